"""Sheets of pictures, on one PNG each.

``ContactSheet`` has images with their predicted labels below, ``PanelSheet`` rows of pictures of one image side by
side, and :func:`save_predictions` the masks at the end of a training run beside the true ones.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, List, Sequence, Set, Tuple, Union

import numpy as np

from ipucnn.aliases import PlainDict
from ipucnn.text import counted, to_ascii

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage
    from PIL.ImageDraw import ImageDraw as Draw
    from PIL.ImageFont import FreeTypeFont, ImageFont

    from ipucnn.runs.images.segmentation import Picture

    Font = Union[ImageFont, FreeTypeFont]

Colour = Tuple[int, int, int]
MOST_IMAGES = 100
TILE, MARGIN, BORDER, LINE = 128, 10, 4, 15
"""Pixels: side of an image, gap between tiles, frame of an image, height of a line of text."""
COLUMNS = 10
FONT_SIZE, LARGEST_FONT, PIXELS_PER_POINT = 12, 32, 100
"""Letters of a sheet grow with it: a sheet of 3,000 pixels has letters of 30, so that they can be read on a screen."""
MOST_ASPECT = 1.2
"""Images stand next to each other where a sheet would be taller than so many times its width."""
GREEN, RED, GREY, BLACK = (34, 139, 34), (200, 30, 30), (190, 190, 190), (0, 0, 0)
DARK, WHITE = (90, 90, 90), (255, 255, 255)
MOST_ROWS = 30
"""Images of a sheet of panels, evenly spread over all."""
SIDE, GAP = 192, 4
"""Pixels: longest side of a panel's picture, and between pictures."""
PREDICTION_SIDE, PREDICTION_GAP, PREDICTION_LINE = 300, 8, 18
"""Pixels of a sheet of predictions: about the width of an image, between images, a line of text."""
RIGHT, MISSED, FALSE = (0, 158, 115), (213, 94, 0), (86, 180, 233)
"""Colours that the colour-blind tell apart too (Okabe and Ito 2008)."""


class ContactSheet:
    """Collects up to 100 images, evenly spread over all of them, and draws them.

    Args:
        run: what classified the images, for the head of the sheet; "" if nothing did.
        only_mistakes: take those that were classified wrongly, the first 100 of them.

    A frame is green where the prediction is right, red where it is wrong, and grey where nobody knows; a
    wrong one says the true class, too, for those who can't tell the colours apart.  Of a data set's own samples
    (without ``predictions``) the label is written, and the frame is red where ``problems`` were found.
    """

    def __init__(self, run: str = "", only_mistakes: bool = False) -> None:
        self._run, self._only_mistakes = run, only_mistakes
        self._wanted: Set[int] = set()
        self._tiles: List[Tuple[PlainDict, PilImage]] = []
        self._given = self._known = self._right = 0

    def expect(self, total: int) -> None:
        """Says how many images there will be."""
        shown = min(total, MOST_IMAGES)
        self._wanted = {i * total // shown for i in range(shown)}

    def wants(self, position: int) -> bool:
        """Whether the image at a position is one of those shown."""
        return position in self._wanted

    @property
    def num_wanted(self) -> int:
        """Images that are to be shown, if they can be read."""
        return len(self._wanted)

    def add(self, position: int, result: PlainDict, pixels: np.ndarray) -> None:
        """Takes an image (uint8 [h, w, 1 or 3]) if it is one of those shown.  Unreadable ones are left out."""
        self._given += 1
        if "truth" in result:
            self._known += 1
            self._right += bool(result["correct"])
        if self._only_mistakes:
            wanted = not result["correct"] and len(self._tiles) < MOST_IMAGES
        else:
            wanted = self.wants(position)
        if wanted:
            self._tiles.append((result, _small(pixels, TILE)))

    def __len__(self) -> int:
        return len(self._tiles)

    def save(self, path: Path) -> None:
        """Draws the sheet into a PNG file, whatever the file's name."""
        from PIL import Image, ImageDraw

        columns = min(COLUMNS, len(self._tiles))
        rows = -(-len(self._tiles) // columns)
        has_third = any("truth" in result or result.get("problems") for result, _ in self._tiles)
        lines = 3 if has_third else 2
        step = TILE + 2 * BORDER + MARGIN
        tall = step + lines * LINE
        heads = self._heads()
        head = len(heads) * LINE + MARGIN if heads else 0
        sheet = Image.new("RGB", (columns * step + MARGIN, head + rows * tall + MARGIN), WHITE)
        draw, font = ImageDraw.Draw(sheet), load_font()
        for number, text in enumerate(heads):
            place = (MARGIN, MARGIN // 2 + number * LINE)
            draw.text(place, fitting(text, font, columns * step - MARGIN), fill=BLACK, font=font)
        for i, (result, thumbnail) in enumerate(self._tiles):
            left, top = MARGIN + i % columns * step, head + MARGIN + i // columns * tall
            colour = _frame(result)
            side = TILE + 2 * BORDER
            draw.rectangle((left, top, left + side - 1, top + side - 1), fill=colour)
            inset = ((side - thumbnail.width) // 2, (side - thumbnail.height) // 2)
            draw.rectangle(
                (left + BORDER, top + BORDER, left + side - BORDER - 1, top + side - BORDER - 1),
                fill=WHITE,
            )
            sheet.paste(thumbnail, (left + inset[0], top + inset[1]))
            for number, (line, fill) in enumerate(_caption(result)):
                place = (left, top + side + 1 + number * LINE)
                draw.text(place, fitting(line, font, side), fill=fill, font=font)
        sheet.save(str(path), format="PNG")

    def _heads(self) -> List[str]:
        """The lines above the images: what classified them, how well, and how many of them are shown."""
        heads = [self._run] if self._run else []
        if self._known:
            heads.append(f"{self._right:,} of {self._known:,} right: {self._right / self._known:.2%}")
        if self._only_mistakes:
            heads.append(f"{len(self._tiles)} of {counted(self._known - self._right, 'mistake')}")
        elif self._given > len(self._tiles):
            heads.append(f"{len(self._tiles)} of {counted(self._given, 'image')}")
        return heads


def _frame(result: PlainDict) -> Colour:
    if "truth" in result:
        return GREEN if result["correct"] else RED
    return RED if result.get("problems") else GREY


def _caption(result: PlainDict) -> List[Tuple[str, Colour]]:
    """The predicted label and its probability, or the label, the file's name, and in red what is wrong."""
    last = result["image"].rpartition("/")[2]
    name = last if "." in last else result["image"]
    if "predictions" not in result:
        lines = [(result["label"], BLACK), (name, DARK)]
        return lines + ([(", ".join(result["problems"]), RED)] if result["problems"] else [])
    best = result["predictions"][0]
    lines = [(f"{best['label']}: {best['probability']:.0%}", BLACK), (name, DARK)]
    if not result.get("correct", True):
        lines.append((f"is {result['truth']}", RED))
    return lines


def load_font(size: int = FONT_SIZE) -> Font:
    """The font of all sheets."""
    from PIL import ImageFont

    try:
        return ImageFont.load_default(size)
    except (TypeError, ImportError):  # Pillow before 10.1, or without FreeType: one bitmap font
        return ImageFont.load_default()


def fitting(text: str, font: Font, width: int) -> str:
    """The text, its end cut off with dots where it is wider than ``width`` pixels."""
    # Pillow's own fonts draw a box for most of what is not ASCII.
    text = to_ascii(text)
    length = text_length(text, font)
    if length <= width:
        return text
    text = text[: int(len(text) * width / length) + 5]  # about right, so that few characters are tried
    while text and text_length(text + "...", font) > width:
        text = text[:-1]
    return text + "..."


def text_length(text: str, font: Font) -> float:
    """Pixels a line of text takes."""
    if hasattr(font, "getlength"):
        return float(font.getlength(text))
    return float(np.asarray(font.getmask(text).size)[0])


class PanelSheet:
    """Collects up to 30 images, each as a few pictures of one size, and draws them.

    Args:
        heads: what the pictures of a row are, left to right; may be changed until the sheet is saved.
        side: longest side of a picture in pixels.
        columns: images next to each other.

    Attributes:
        legend: colours with what they mean; may be set until the sheet is saved.
    """

    def __init__(
        self,
        heads: Sequence[str],
        side: int = SIDE,
        columns: int = 1,
    ) -> None:
        self.heads, self._side, self._columns = tuple(heads), side, columns
        self.legend: Tuple[Tuple[Colour, str], ...] = ()
        self._wanted: Set[int] = set()
        self._total = 0
        self._rows: List[Tuple[str, List[PilImage], Sequence[str]]] = []

    def expect(self, total: int) -> None:
        """Says how many images there will be."""
        shown = min(total, MOST_ROWS)
        self._total, self._wanted = total, {i * total // shown for i in range(shown)}

    def wants(self, position: int) -> bool:
        """Whether the image at a position is one of those shown."""
        return position in self._wanted

    @property
    def num_wanted(self) -> int:
        """Images that are to be shown, if they can be read."""
        return len(self._wanted)

    def add(self, caption: str, pictures: Sequence[np.ndarray], problems: Sequence[str] = ()) -> None:
        """Takes an image.

        Args:
            caption: one line.
            pictures: as many as heads, uint8 [h, w] or [h, w, 3].
            problems: what is wrong with the image, which is then framed in red; read when the sheet is saved.
        """
        self._rows.append((caption, [_small(picture, self._side) for picture in pictures], problems))

    def __len__(self) -> int:
        return len(self._rows)

    def save(self, path: Path) -> None:
        """Draws the sheet into a PNG file, whatever the file's name."""
        from PIL import Image, ImageDraw

        columns = self._num_columns()
        beside = [self._rows[first : first + columns] for first in range(0, len(self._rows), columns)]
        heights = [max(picture.height for _, pictures, _ in row for picture in pictures) for row in beside]
        letters = self._letters(columns, sum(heights))
        line = round(LINE / FONT_SIZE * letters.size) if hasattr(letters, "size") else LINE
        side = self._drawn_side(letters)
        inner = len(self.heads) * (side + GAP) - GAP
        step = inner + 2 * MARGIN
        above = (
            []
            if len(self._rows) == self._total
            else [f"{len(self._rows)} of {counted(self._total, 'image')}"]
        )
        legend = legend_lines(self.legend, letters, line, columns * step - 2 * MARGIN)
        top = MARGIN // 2 + line * len(above)
        heads_top = top + len(legend) * line + (GAP if legend else 0)
        bottom, tops = heads_top + line + MARGIN // 2, []
        for height in heights:
            tops.append(bottom)
            bottom += height + line + MARGIN
        sheet = Image.new("RGB", (columns * step, bottom + MARGIN), WHITE)
        draw = ImageDraw.Draw(sheet)
        for text in above:
            draw.text((MARGIN, MARGIN // 2), text, fill=BLACK, font=letters)
        draw_legend(draw, legend, (MARGIN, top), letters, line)
        for column in range(columns):
            for i, text in enumerate(self.heads):
                place = (column * step + MARGIN + i * (side + GAP), heads_top)
                draw.text(place, fitting(text, letters, side), fill=BLACK, font=letters)
        for i, (caption, pictures, problems) in enumerate(self._rows):
            left, top = i % columns * step + MARGIN, tops[i // columns]
            for k, picture in enumerate(pictures):
                place = (left + k * (side + GAP), top)
                sheet.paste(picture, place)
                corner = (place[0] + picture.width - 1, top + picture.height - 1)
                if problems:
                    around = (place[0] - 2, place[1] - 2, corner[0] + 2, corner[1] + 2)
                    draw.rectangle(around, outline=RED, width=3)
                else:
                    draw.rectangle((place, corner), outline=GREY)
            below = top + max(picture.height for picture in pictures) + 1
            text, fill = (f"{', '.join(problems)}: {caption}", RED) if problems else (caption, DARK)
            draw.text((left, below), fitting(text, letters, inner), fill=fill, font=letters)
        sheet.save(str(path), format="PNG")

    def _num_columns(self) -> int:
        """Images next to each other: as few as make the sheet not much taller than wide."""
        widest = max(picture.width for _, pictures, _ in self._rows for picture in pictures)
        tallest = max(picture.height for _, pictures, _ in self._rows for picture in pictures)
        for columns in range(1, self._columns):
            if -(-len(self._rows) // columns) * tallest <= MOST_ASPECT * columns * len(self.heads) * widest:
                return columns
        return min(self._columns, len(self._rows))

    def _letters(self, columns: int, height: int) -> Font:
        """The font: the larger the sheet, the larger its letters, as long as the heads fit above their pictures."""
        width = columns * len(self.heads) * self._drawn_side(load_font())
        for size in range(min(LARGEST_FONT, max(width, height) // PIXELS_PER_POINT), FONT_SIZE, -1):
            font = load_font(size)
            if all(text_length(to_ascii(head), font) <= self._drawn_side(load_font()) for head in self.heads):
                return font
        return load_font()

    def _drawn_side(self, letters: Font) -> int:
        """The width of a column: that of the widest picture, or of the longest head, but not more than a picture's."""
        widest = max(picture.width for _, pictures, _ in self._rows for picture in pictures)
        return min(self._side, max(widest, *(math.ceil(text_length(head, letters)) for head in self.heads)))


Legend = Sequence[Tuple[Colour, str]]


def legend_lines(legend: Legend, font: Font, line: int, width: int) -> List[List[Tuple[int, Colour, str]]]:
    """The entries of a legend with the place of each from the left, in as many lines as ``width`` pixels need."""
    lines: List[List[Tuple[int, Colour, str]]] = []
    left = 0
    for colour, text in legend:
        text = to_ascii(text)
        taken = line + 4 * GAP + round(text_length(text, font))
        if not lines or left + taken > width:
            lines.append([])
            left = 0
        lines[-1].append((left, colour, text))
        left += taken
    return lines


def draw_legend(
    draw: Draw,
    lines: Sequence[Sequence[Tuple[int, Colour, str]]],
    place: Tuple[int, int],
    font: Font,
    line: int,
) -> None:
    """Draws what :func:`legend_lines` returns, each line ``line`` pixels high."""
    for number, entries in enumerate(lines):
        top = place[1] + number * line
        for offset, colour, text in entries:
            left = place[0] + offset
            draw.rectangle((left, top + 1, left + line - 3, top + line - 2), fill=colour, outline=GREY)
            draw.text((left + line + GAP, top), text, fill=BLACK, font=font)


def _small(pixels: np.ndarray, side: int) -> PilImage:
    """At most ``side`` wide and high: small ones enlarged by whole pixels, large ones reduced."""
    from PIL import Image

    plane = pixels[..., 0] if pixels.ndim == 3 and pixels.shape[-1] == 1 else pixels
    image = Image.fromarray(np.ascontiguousarray(plane)).convert("RGB")
    longest = max(image.size)
    if longest <= side // 2:
        factor = side // longest
        return image.resize((image.width * factor, image.height * factor), Image.NEAREST)
    image.thumbnail((side, side), Image.BICUBIC)
    return image


def save_predictions(
    pictures: Sequence[Picture],
    class_names: Sequence[str],
    path: Path,
    heading: str = "",
    of_masks: Sequence[Colour] = (),
) -> None:
    """Draws pictures of masks into a PNG file, whole or not at all.

    The difference tints the rarer class of the two commonest: where it is right, missed, or found wrongly.

    Args:
        heading: a line above the pictures: of which run they are, and how good it is.
        of_masks: colours of the classes in the user's masks; empty where these have none.
    """
    from PIL import Image, ImageDraw

    from ipucnn.filesystem import write_atomically
    from ipucnn.runs.images.outputs import class_colours

    shown = _rarer_class(pictures)
    name = to_ascii(class_names[shown]) if shown < len(class_names) else f"class {shown}"
    height, width = pictures[0].image.shape[:2]
    scale = max(1, round(PREDICTION_SIDE / width)) if width <= PREDICTION_SIDE else PREDICTION_SIDE / width
    size = (round(width * scale), round(height * scale))
    font = load_font()
    colours = class_colours(len(class_names), of_masks)
    is_binary = len(colours) == 2
    titles = ["image", "truth", "prediction", f"{name}: "]
    if is_binary:
        titles[1:3] = [f"{title} (white: {to_ascii(class_names[1])})" for title in titles[1:3]]
    classes = () if is_binary else tuple(zip(colours, class_names))[1:]
    legend = legend_lines(classes, font, LINE, 4 * size[0] + 3 * PREDICTION_GAP)
    legend_top = PREDICTION_LINE if heading else 0
    head = legend_top + len(legend) * LINE
    sheet = Image.new(
        "RGB",
        (
            4 * size[0] + 5 * PREDICTION_GAP,
            head
            + PREDICTION_LINE
            + len(pictures) * (size[1] + PREDICTION_LINE + PREDICTION_GAP)
            + PREDICTION_GAP,
        ),
        WHITE,
    )
    draw = ImageDraw.Draw(sheet)
    if heading:
        text = fitting(heading, font, 4 * size[0] + 3 * PREDICTION_GAP)
        draw.text((PREDICTION_GAP, 2), text, fill=BLACK, font=font)
    draw_legend(draw, legend, (PREDICTION_GAP, legend_top + 2), font, LINE)
    for column, title in enumerate(titles):
        draw.text(
            (PREDICTION_GAP + column * (size[0] + PREDICTION_GAP), head + 2), title, fill=BLACK, font=font
        )
    left = PREDICTION_GAP + 3 * (size[0] + PREDICTION_GAP) + round(text_length(titles[3], font))
    for word, colour in (("right", RIGHT), ("missed", MISSED), ("false", FALSE)):
        draw.text((left, head + 2), word, fill=colour, font=font)
        left += round(text_length(word + "   ", font))
    for row, picture in enumerate(pictures):
        top = head + PREDICTION_LINE + row * (size[1] + PREDICTION_LINE + PREDICTION_GAP)
        for column, panel in enumerate(_panels(picture, shown, colours)):
            panel_image = Image.fromarray(panel)
            kind = Image.NEAREST if scale >= 1 else Image.BILINEAR
            left = PREDICTION_GAP + column * (size[0] + PREDICTION_GAP)
            sheet.paste(panel_image.resize(size, kind), (left, top))
            # Around it, for a panel that is white all over.
            draw.rectangle((left - 1, top - 1, left + size[0], top + size[1]), outline=GREY)
        region = ""
        if picture.whole is not None:
            sizes = ["x".join(map(str, shape)) for shape in (picture.image.shape[:2], picture.whole)]
            region = f", the inner {sizes[0]} of {sizes[1]} pixels"
        text = f"evaluation image {picture.number}{region}: " + ", ".join(
            f"Dice of {to_ascii(class_names[k])} {dice(picture, k):.3f}" for k in range(len(class_names))
        )
        text = fitting(text, font, 4 * size[0] + 3 * PREDICTION_GAP)
        draw.text((PREDICTION_GAP, top + size[1] + 2), text, fill=DARK, font=font)
    write_atomically(path, lambda temporary: sheet.save(str(temporary), format="PNG"))


def dice(picture: Picture, which: int) -> float:
    """Dice score of one class on one picture; 1 where neither mask has it."""
    truth, found = picture.truth == which, picture.predicted == which
    both = int(truth.sum()) + int(found.sum())
    return 2 * int((truth & found).sum()) / both if both else 1.0


def _rarer_class(pictures: Sequence[Picture]) -> int:
    counts: Any = sum(np.bincount(p.truth.reshape(-1).astype(np.int64), minlength=2) for p in pictures)
    there = [k for k in range(len(counts)) if counts[k]]
    return int(min(there, key=lambda k: counts[k]))


def _panels(picture: Picture, shown: int, colours: Sequence[Colour]) -> List[np.ndarray]:
    from ipucnn.runs.images.outputs import mask_picture

    grey = picture.image
    image = np.repeat(grey[..., np.newaxis], 3, axis=2) if grey.ndim == 2 else grey
    masks = [mask_picture(mask, colours) for mask in (picture.truth, picture.predicted)]
    truth, found = picture.truth == shown, picture.predicted == shown
    tinted: np.ndarray = image.astype(np.float64)
    for where, colour in ((truth & found, RIGHT), (truth & ~found, MISSED), (~truth & found, FALSE)):
        tinted[where] = 0.3 * tinted[where] + 0.7 * np.array(colour)
    return [image, *masks, np.round(tinted).astype(np.uint8)]
