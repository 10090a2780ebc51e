"""Sheets of pictures in one PNG each: a grid of images, each with its pictures side by side and text below.

``ContactSheet`` shows images with their predicted labels, ``PanelSheet`` several pictures of each image, and
:func:`save_predictions` draws the masks at the end of a training run beside the true ones.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Dict, List, Optional, Sequence, Set, Tuple, Union

import numpy as np

from ipucnn.aliases import PlainDict
from ipucnn.datasets.segmentation.patches import IGNORED
from ipucnn.runs.images.outputs import IGNORED_COLOUR, mask_picture, png_options
from ipucnn.text import counted, printable
from ipucnn.training.evaluation import class_figures, confusion_matrix

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage
    from PIL.ImageDraw import ImageDraw as Draw
    from PIL.ImageFont import FreeTypeFont, ImageFont

    from ipucnn.runs.images.segmentation import SegmentedImage

    Font = Union[ImageFont, FreeTypeFont]

Colour = Tuple[int, int, int]
MOST_IMAGES, MOST_ROWS = 100, 30
"""Most images of a contact sheet and of a sheet of panels, evenly spread over all."""
TILE, SIDE, PREDICTION_SIDE = 128, 192, 300
"""Pixels: longest side of a picture of a contact sheet, of a panel, and of a prediction at the end of a run."""
MARGIN, GAP, LINE = 10, 4, 15
"""Pixels: margin around an image, gap between its pictures, and height of a line of the smallest letters."""
COLUMNS = 10
FONT_SIZE, LARGEST_FONT, PIXELS_PER_POINT = 12, 32, 100
"""Letters grow with the sheet, to be readable on a screen: a sheet of 3,000 pixels has letters of 30."""
MOST_ASPECT = 1.2
"""Images are placed side by side if the sheet would otherwise be taller than this many times its width."""
GREEN, RED, GREY, BLACK = (34, 139, 34), (200, 30, 30), (190, 190, 190), (0, 0, 0)
DARK, WHITE = (90, 90, 90), (255, 255, 255)
RIGHT_BACKGROUND, RIGHT_FOREGROUND = BLACK, WHITE
FALSE_FOREGROUND, FALSE_BACKGROUND, WRONG = (213, 94, 0), (86, 180, 233), (255, 0, 255)
"""Colours that colour-blind people can distinguish, too (Okabe and Ito 2008)."""


_NO_LETTER = "\U0010ffff"
"""A character that no font has."""
Looks = Tuple[Sequence[Tuple[str, Colour]], Colour, int]
"""The lines of text below an image with their colours, and the colour and width of its frame."""


@dataclass(frozen=True)
class _Item:
    """An image of a sheet: its pictures, and a function that returns its text and frame when the sheet is saved."""

    pictures: List[PilImage]
    looks: Callable[[], Looks]

    @property
    def height(self) -> int:
        return max(picture.height for picture in self.pictures)


class Sheet:
    """Collects images, evenly spread over all of them, and draws them in a grid.

    Args:
        heads: headings of an image's pictures, left to right; may be changed until the sheet is saved.
        side: longest side of a picture in pixels.
        columns: most images side by side.
        most: most images.
        heading: line above the images; "" for none.

    Attributes:
        legend: colours with their meanings; may be set until the sheet is saved.
    """

    largest_font = LARGEST_FONT

    def __init__(self, heads: Sequence[str], side: int, columns: int, most: int, heading: str = "") -> None:
        self.heads, self._side, self._columns, self._most = tuple(heads), side, columns, most
        self._heading = [heading] if heading else []
        self.legend: Tuple[Tuple[Colour, str], ...] = ()
        self._font_file: Optional[str] = None
        self._positions: Set[int] = set()
        self._total = 0
        self._items: List[_Item] = []

    def expect(self, total: int) -> None:
        """Sets the number of images that will follow."""
        if total == self._total:
            return
        shown = min(total, self._most)
        self._total, self._positions = total, {i * total // shown for i in range(shown)}

    def wants(self, position: int) -> bool:
        """Whether the image at a position is one of those shown."""
        return position in self._positions

    @property
    def num_shown(self) -> int:
        """Number of images to be shown, if they can be read."""
        return len(self._positions)

    def __len__(self) -> int:
        return len(self._items)

    def _above(self) -> List[str]:
        """Returns the lines above all images."""
        shown = [] if len(self) == self._total else [f"{len(self)} of {counted(self._total, 'image')}"]
        return [*self._heading, *shown]

    def _add(self, pictures: Sequence[np.ndarray], looks: Callable[[], Looks]) -> None:
        """Adds an image: its pictures uint8 [h, w] or [h, w, 1 or 3]."""
        self._items.append(_Item([_reduced(picture, self._side) for picture in pictures], looks))

    def _enlarge(self) -> None:
        """Enlarges all pictures by one whole factor if the largest takes less than half of its side."""
        from PIL import Image

        longest = max(max(picture.size) for item in self._items for picture in item.pictures)
        if longest > self._side // 2:
            return
        factor = self._side // longest
        for item in self._items:
            item.pictures[:] = [
                picture.resize((picture.width * factor, picture.height * factor), Image.NEAREST)
                for picture in item.pictures
            ]

    def save(self, path: Path) -> None:
        """Draws the sheet into a PNG file of any name."""
        from PIL import Image, ImageDraw

        self._enlarge()
        looks, above = [item.looks() for item in self._items], self._above()
        texts = [*above, *self.heads, *(text for _, text in self.legend)]
        self._font_file = font_file("".join([*texts, *(text for lines, *_ in looks for text, _ in lines)]))
        columns = self._num_columns()
        font = self._font(columns)
        line = round(LINE / FONT_SIZE * font.size) if hasattr(font, "size") else LINE
        side = self._drawn_side(font)
        inner = max(1, len(self.heads)) * (side + GAP) - GAP
        step = inner + 2 * MARGIN
        legend = _legend_lines(self.legend, font, line, columns * step - 2 * MARGIN)
        heads_top = MARGIN // 2 + line * (len(above) + len(legend)) + (GAP if legend else 0)
        bottom = heads_top + line * bool(self.heads) + MARGIN // 2
        items = [
            (
                item,
                [(part, fill) for text, fill in lines for part in self._parts(text, font, inner)],
                frame,
                border,
            )
            for item, (lines, frame, border) in zip(self._items, looks)
        ]
        rows = [items[first : first + columns] for first in range(0, len(items), columns)]
        tops = []
        for row in rows:
            tops.append(bottom)
            bottom += max(item.height for item, *_ in row) + MARGIN
            bottom += line * max(len(lines) for _, lines, _, _ in row)
        sheet = Image.new("RGB", (columns * step, bottom + MARGIN), WHITE)
        draw = ImageDraw.Draw(sheet)
        for number, text in enumerate(above):
            place = (MARGIN, MARGIN // 2 + number * line)
            draw.text(place, fitting(text, font, columns * step - 2 * MARGIN), fill=BLACK, font=font)
        _draw_legend(draw, legend, (MARGIN, MARGIN // 2 + line * len(above)), font, line)
        for column in range(columns):
            for k, text in enumerate(self.heads):
                place = (column * step + MARGIN + k * (side + GAP), heads_top)
                draw.text(place, fitting(text, font, side), fill=BLACK, font=font)
        for top, row in zip(tops, rows):
            for column, (item, lines, frame, border) in enumerate(row):
                left = column * step + MARGIN
                for k, picture in enumerate(item.pictures):
                    x, y = left + k * (side + GAP), top
                    corner = (x + picture.width - 1 + border, y + picture.height - 1 + border)
                    draw.rectangle(((x - border, y - border), corner), fill=frame)
                    sheet.paste(picture, (x, y))
                for number, (text, fill) in enumerate(lines):
                    place = (left, top + item.height + border + number * line)
                    draw.text(place, fitting(text, font, inner), fill=fill, font=font)
        sheet.save(str(path), format="PNG", **png_options())

    def _parts(self, text: str, font: Font, width: int) -> List[str]:
        """Returns the lines for a text below an image."""
        return [text]

    def _num_columns(self) -> int:
        """Returns the smallest number of images side by side for which the sheet is not much taller than wide."""
        widest = max(picture.width for item in self._items for picture in item.pictures)
        tallest = max(item.height for item in self._items)
        pictures = max(1, len(self.heads))
        for columns in range(1, self._columns):
            if -(-len(self._items) // columns) * tallest <= MOST_ASPECT * columns * pictures * widest:
                return columns
        return min(self._columns, len(self._items))

    def _font(self, columns: int) -> Font:
        """Returns the font: larger sheets have larger letters, as long as the headings fit above their pictures."""
        side = self._drawn_side(load_font(FONT_SIZE, self._font_file))
        width = columns * len(self.heads) * side
        height = sum(item.height for item in self._items) // columns
        for size in range(min(self.largest_font, max(width, height) // PIXELS_PER_POINT), FONT_SIZE, -1):
            font = load_font(size, self._font_file)
            if all(text_length(drawable(head, font), font) <= side for head in self.heads):
                return font
        return load_font(FONT_SIZE, self._font_file)

    def _drawn_side(self, font: Font) -> int:
        """Returns the width of a column: that of the widest picture or longest heading, limited to a picture's side.

        Without headings it is a picture's longest side.
        """
        if not self.heads:
            return self._side
        widest = max(picture.width for item in self._items for picture in item.pictures)
        longest = max(math.ceil(text_length(drawable(head, font), font)) for head in self.heads)
        return min(self._side, max(widest, longest))


class ContactSheet(Sheet):
    """A sheet of up to 100 images with their labels below.

    Args:
        run: run that classified the images, for the heading of the sheet; "" if none did.
        only_mistakes: whether to show only the first 100 images that were classified wrongly.

    The frame is green if the prediction is right, red if it is wrong, and grey if the class is unknown.  For
    colour-blind readers, a wrong prediction also has the true class as text.  Samples of a data set (without
    ``predictions``) have their label, and a red frame if they have ``problems``.
    """

    largest_font = FONT_SIZE

    def __init__(self, run: str = "", only_mistakes: bool = False) -> None:
        super().__init__((), TILE, COLUMNS, MOST_IMAGES, run)
        self._only_mistakes = only_mistakes
        self._given = self._known = self._right = 0

    def _num_columns(self) -> int:
        return min(COLUMNS, len(self))

    def take(self, position: int, result: PlainDict, pixels: np.ndarray) -> None:
        """Takes an image (uint8 [h, w, 1 or 3]) if it is one of those shown.  Unreadable images are never passed."""
        self._given += 1
        if "truth" in result:
            self._known += 1
            self._right += bool(result["correct"])
        if self._only_mistakes:
            is_shown = not result["correct"] and len(self) < MOST_IMAGES
        else:
            is_shown = self.wants(position)
        if is_shown:
            self._add([pixels], lambda: (_caption(result), _frame(result), GAP))

    def _above(self) -> List[str]:
        """Returns lines with the run, its accuracy, and the number of images shown."""
        heads = [*self._heading]
        if self._known:
            heads.append(f"{self._right:,} of {self._known:,} right: {self._right / self._known:.2%}")
        if self._only_mistakes:
            heads.append(f"{len(self)} of {counted(self._known - self._right, 'mistake')}")
        elif self._given > len(self):
            heads.append(f"{len(self)} of {counted(self._given, 'image')}")
        return heads


def _frame(result: PlainDict) -> Colour:
    if "truth" in result:
        return GREEN if result["correct"] else RED
    return RED if result.get("problems") else GREY


def _caption(result: PlainDict) -> List[Tuple[str, Colour]]:
    """Returns the text below an image.

    It is the predicted label with its probability, or the sample's label; the file's name; and mistakes or problems in
    red.
    """
    path = printable(result["image"])
    last = path.rpartition("/")[2]
    name = last if "." in last else path
    if "predictions" not in result:
        lines = [(result["label"], BLACK), (name, DARK)]
        return lines + ([(", ".join(result["problems"]), RED)] if result["problems"] else [])
    best = result["predictions"][0]
    lines = [(f"{best['label']}: {best['probability']:.0%}", BLACK), (name, DARK)]
    if not result.get("correct", True):
        lines.append((f"is {result['truth']}", RED))
    return lines


class PanelSheet(Sheet):
    """A sheet of up to 30 images, each with several pictures of one size and a caption below; see :class:`Sheet`."""

    def __init__(self, heads: Sequence[str], side: int = SIDE, columns: int = 1, heading: str = "") -> None:
        super().__init__(heads, side, columns, MOST_ROWS, heading)

    def add(self, caption: str, pictures: Sequence[np.ndarray], problems: Sequence[str] = ()) -> None:
        """Adds an image.

        Args:
            caption: parts with ", " in between, where a long caption is broken into lines.
            pictures: as many as headings, uint8 [h, w] or [h, w, 3].
            problems: problems of the image, which then has a red frame; read when the sheet is saved.
        """

        def looks() -> Looks:
            if problems:
                return [(f"{', '.join(problems)}: {caption}", RED)], RED, 3
            return [(caption, DARK)], GREY, 1

        self._add(pictures, looks)

    def _parts(self, text: str, font: Font, width: int) -> List[str]:
        lines: List[str] = []
        for part in re.split("(?<=, )", text):
            if lines and text_length(drawable(lines[-1] + part.rstrip(), font), font) <= width:
                lines[-1] += part
            else:
                lines.append(part)
        return lines


def load_font(size: int = FONT_SIZE, file: Optional[str] = None) -> Font:
    """Returns a font from a file, or Pillow's own."""
    from PIL import ImageFont

    try:
        return ImageFont.load_default(size) if file is None else ImageFont.truetype(file, size)
    except (TypeError, ImportError):  # Pillow before 10.1, or without FreeType: one bitmap font
        return ImageFont.load_default()


def font_file(text: str) -> Optional[str]:
    """Returns the first font that has all letters of a text, else the one that has the most.

    The result is None for Pillow's own font, which has hardly more than ASCII, or the file of Matplotlib's DejaVu Sans
    or of another installed font.
    """
    if text.isascii():
        return None
    import matplotlib
    from matplotlib.font_manager import findSystemFonts

    def num_missing(file: Optional[str]) -> int:
        try:
            font = load_font(FONT_SIZE, file)
        except OSError:  # a font that FreeType cannot read
            return len(text)
        return sum(not _has_letter(font, letter) for letter in set(text))

    counts: Dict[Optional[str], int] = {}
    dejavu = str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf")
    for file in itertools.chain([None, dejavu], sorted(findSystemFonts())):
        counts[file] = num_missing(file)
        if not counts[file]:
            return file
    return min(counts, key=lambda file: counts[file])


def _has_letter(font: Font, letter: str) -> bool:
    """Returns whether a font can draw a letter; it draws the same box for all that it lacks."""
    if letter.isascii() or not hasattr(font, "getlength"):
        return letter.isascii() and letter.isprintable()
    boxes = [font.getmask(each) for each in (letter, _NO_LETTER)]
    return letter.isprintable() and (boxes[0].size, bytes(boxes[0])) != (boxes[1].size, bytes(boxes[1]))


def drawable(text: str, font: Font) -> str:
    """Returns a text with escapes for the letters that a font lacks."""
    return "".join(
        letter if _has_letter(font, letter) else letter.encode("ascii", "backslashreplace").decode()
        for letter in printable(text)
    )


def fitting(text: str, font: Font, width: int) -> str:
    """Returns the text, shortened with dots at its end if it is wider than ``width`` pixels."""
    text = drawable(text, font)
    length = text_length(text, font)
    if length <= width:
        return text
    text = text[: int(len(text) * width / length) + 5]  # an estimate, so that the loop below takes few steps
    while text and text_length(text + "...", font) > width:
        text = text[:-1]
    return text + "..."


def text_length(text: str, font: Font) -> float:
    """Returns the width of a line of text in pixels."""
    if hasattr(font, "getlength"):
        return float(font.getlength(text))
    return float(np.asarray(font.getmask(text).size)[0])


Legend = Sequence[Tuple[Colour, str]]


def _legend_lines(legend: Legend, font: Font, line: int, width: int) -> List[List[Tuple[int, Colour, str]]]:
    """Returns the entries of a legend with their offsets from the left, in lines of at most ``width`` pixels."""
    lines: List[List[Tuple[int, Colour, str]]] = []
    left = 0
    for colour, text in legend:
        text = drawable(text, font)
        taken = line + 4 * GAP + round(text_length(text, font))
        if not lines or left + taken > width:
            lines.append([])
            left = 0
        lines[-1].append((left, colour, text))
        left += taken
    return lines


def _draw_legend(
    draw: Draw,
    lines: Sequence[Sequence[Tuple[int, Colour, str]]],
    place: Tuple[int, int],
    font: Font,
    line: int,
) -> None:
    """Draws the lines of :func:`_legend_lines`, each ``line`` pixels high."""
    for number, entries in enumerate(lines):
        top = place[1] + number * line
        for offset, colour, text in entries:
            left = place[0] + offset
            draw.rectangle((left, top + 1, left + line - 3, top + line - 2), fill=colour, outline=GREY)
            draw.text((left + line + GAP, top), text, fill=BLACK, font=font)


def _reduced(pixels: np.ndarray, side: int) -> PilImage:
    """Returns a picture at most ``side`` wide and high; larger ones are reduced."""
    from PIL import Image

    plane = pixels[..., 0] if pixels.ndim == 3 and pixels.shape[-1] == 1 else pixels
    image = Image.fromarray(np.ascontiguousarray(plane)).convert("RGB")
    image.thumbnail((side, side), Image.BICUBIC)
    return image


def save_predictions(images: Sequence[SegmentedImage], path: Path, heading: str = "") -> None:
    """Draws images with their true and predicted masks into a PNG file.

    Args:
        heading: line above the images with the run and its score.
    """
    classes = images[0].classes
    sheet = PanelSheet(("image", "truth", "prediction", "difference"), side=PREDICTION_SIDE, heading=heading)
    sheet.expect(len(images))
    sheet.legend = legend_of_errors(images)
    for image in images:
        scores = zip(classes.names, dice_of_classes(image))
        captions = ", ".join(f"Dice of {name} {score:.3f}" for name, score in scores)
        sheet.add(f"{image.name}: {captions}", compared(image))
    sheet.save(path)


def dice_of_classes(image: SegmentedImage) -> List[float]:
    """Returns the Dice score of each class over the pixels of an image that count; 1 if neither mask has it."""
    truth, predicted = np.asarray(image.truth), np.asarray(image.predicted)
    figures = class_figures(confusion_matrix(truth, predicted, len(image.classes.names)))
    return [1.0 if score is None else score for score in figures["dice"]]


def compared(image: SegmentedImage) -> List[np.ndarray]:
    """Returns the pictures of an image whose truth is known: the image, its true and predicted mask, and the errors."""
    assert image.truth is not None
    masks = [mask_picture(np.asarray(mask), image.classes.colours) for mask in (image.truth, image.predicted)]
    return [image.image, *masks, errors(image.truth, image.predicted, image.classes.is_binary)]


def errors(truth: np.ndarray, predicted: np.ndarray, is_binary: bool) -> np.ndarray:
    """Returns uint8 [h, w, 3]: right pixels are black (class 0) and white, wrong ones coloured, ignored ones grey.

    Of two classes, each has its own colour where it was taken for the other.
    """
    truth, predicted = np.asarray(truth), np.asarray(predicted)
    wrong = [FALSE_FOREGROUND, FALSE_BACKGROUND] if is_binary else [WRONG, WRONG]
    colours = np.array([RIGHT_BACKGROUND, RIGHT_FOREGROUND, *wrong, IGNORED_COLOUR], np.uint8)
    kinds = (truth > 0) + 2 * (truth != predicted)
    return colours[np.where(truth == IGNORED, 4, kinds)]


def legend_of_errors(images: Sequence[SegmentedImage]) -> Tuple[Tuple[Colour, str], ...]:
    """Returns the colours in the pictures of :func:`compared`, with their meanings."""
    classes = images[0].classes
    has_ignored = any(bool(np.any(np.equal(image.truth, IGNORED))) for image in images)
    ignored = ((IGNORED_COLOUR, "not counted"),) if has_ignored else ()
    if not classes.is_binary:
        right = (RIGHT_FOREGROUND, f"right ({classes.names[0]}: black)")
        return (*zip(classes.colours, classes.names), (WRONG, "taken for another class"), right, *ignored)
    first, second = classes.names
    return (
        (RIGHT_BACKGROUND, first),
        (RIGHT_FOREGROUND, second),
        (FALSE_BACKGROUND, f"{second} taken for {first}"),
        (FALSE_FOREGROUND, f"{first} taken for {second}"),
        *ignored,
    )
