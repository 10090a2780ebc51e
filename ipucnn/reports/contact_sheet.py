"""A contact sheet: small images with their predictions, or labels, below, on one PNG."""

from pathlib import Path
from typing import Any, Dict, List, Set, Tuple

import numpy as np

from ipucnn.text import to_ascii

MOST_IMAGES = 100
TILE, MARGIN, BORDER, LINE = 128, 10, 4, 15
"""Pixels: side of an image, gap between tiles, frame of an image, height of a line of text."""
COLUMNS = 10
FONT_SIZE = 12
GREEN, RED, GREY, BLACK = (34, 139, 34), (200, 30, 30), (190, 190, 190), (0, 0, 0)


class ContactSheet:
    """Collects up to 100 images, evenly spread over all of them, and draws them.

    A frame is green where the prediction is right, red where it is wrong, and grey where nobody knows; a
    wrong one says the true class, too, for those who can't tell the colours apart.  Of a data set's own samples
    (without ``predictions``) the label is written, and the frame is red where ``problems`` were found.
    """

    def __init__(self) -> None:
        self._wanted: Set[int] = set()
        self._tiles: List[Tuple[Dict[str, Any], Any]] = []
        self._given = 0

    def expect(self, total: int) -> None:
        """Says how many images there will be."""
        shown = min(total, MOST_IMAGES)
        self._wanted = {i * total // shown for i in range(shown)}

    def wants(self, position: int) -> bool:
        """Whether the image at a position is one of those shown."""
        return position in self._wanted

    def add(self, position: int, result: Dict[str, Any], pixels: Any) -> None:
        """Takes an image (uint8 [h, w, 1 or 3]) if it is one of those shown.  Unreadable ones are left out."""
        self._given += 1
        if self.wants(position):
            self._tiles.append((result, _thumbnail(pixels)))

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
        head = LINE + MARGIN if self._given > len(self._tiles) else 0
        sheet = Image.new("RGB", (columns * step + MARGIN, head + rows * tall + MARGIN), (255, 255, 255))
        draw, font = ImageDraw.Draw(sheet), load_font()
        if head:
            text = f"{len(self._tiles)} of {self._given} images"
            draw.text((MARGIN, MARGIN // 2), text, fill=BLACK, font=font)
        for i, (result, thumbnail) in enumerate(self._tiles):
            left, top = MARGIN + i % columns * step, head + MARGIN + i // columns * tall
            colour = _frame(result)
            side = TILE + 2 * BORDER
            draw.rectangle((left, top, left + side - 1, top + side - 1), fill=colour)
            inset = ((side - thumbnail.width) // 2, (side - thumbnail.height) // 2)
            draw.rectangle(
                (left + BORDER, top + BORDER, left + side - BORDER - 1, top + side - BORDER - 1),
                fill=(255, 255, 255),
            )
            sheet.paste(thumbnail, (left + inset[0], top + inset[1]))
            for number, (line, fill) in enumerate(_caption(result)):
                place = (left, top + side + 1 + number * LINE)
                draw.text(place, fitting(line, font, side), fill=fill, font=font)
        sheet.save(str(path), format="PNG")


def _frame(result: Dict[str, Any]) -> Tuple[int, int, int]:
    if "truth" in result:
        return GREEN if result["correct"] else RED
    return RED if result.get("problems") else GREY


def _thumbnail(pixels: Any) -> Any:
    """The image at most TILE wide and high: small ones enlarged by whole pixels, large ones reduced."""
    from PIL import Image

    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).convert("RGB")
    longest = max(image.size)
    if longest <= TILE // 2:
        factor = TILE // longest
        return image.resize((image.width * factor, image.height * factor), Image.NEAREST)
    image.thumbnail((TILE, TILE), Image.BICUBIC)
    return image


def _caption(result: Dict[str, Any]) -> List[Tuple[str, Tuple[int, int, int]]]:
    """The predicted label and its probability, or the label, the file's name, and in red what is wrong."""
    last = result["image"].rpartition("/")[2]
    name = last if "." in last else result["image"]
    if "predictions" not in result:
        lines = [(result["label"], BLACK), (name, (90, 90, 90))]
        return lines + ([(", ".join(result["problems"]), RED)] if result["problems"] else [])
    best = result["predictions"][0]
    lines = [(f"{best['label']}: {best['probability']:.0%}", BLACK), (name, (90, 90, 90))]
    if not result.get("correct", True):
        lines.append((f"is {result['truth']}", RED))
    return lines


def load_font() -> Any:
    from PIL import ImageFont

    try:
        return ImageFont.load_default(FONT_SIZE)
    except (TypeError, ImportError):  # Pillow before 10.1, or without FreeType: one bitmap font
        return ImageFont.load_default()


def fitting(text: str, font: Any, width: int) -> str:
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


def text_length(text: str, font: Any) -> float:
    """Pixels a line of text takes."""
    if hasattr(font, "getlength"):
        return float(font.getlength(text))
    return float(np.asarray(font.getmask(text).size)[0])
