"""A contact sheet of segmentations: rows of small pictures of one image side by side, on one PNG."""

from pathlib import Path
from typing import Any, List, Sequence, Set, Tuple

import numpy as np

from ipucnn.reports.contact_sheet import BLACK, GREY, LINE, MARGIN, fitting, load_font, text_length

MOST_ROWS = 30
"""Images shown, evenly spread over all."""
SIDE = 192
GAP = 4
Colour = Tuple[int, int, int]


class PanelSheet:
    """Collects up to 30 images, each as a few pictures of one size, and draws them.

    Args:
        heads: what the pictures of a row are, left to right; may be changed until the sheet is saved.
        legend: colours with what they mean; may be changed, too.
        side: longest side of a picture in pixels.
        columns: images next to each other.
    """

    def __init__(
        self,
        heads: Sequence[str],
        legend: Sequence[Tuple[Colour, str]] = (),
        side: int = SIDE,
        columns: int = 1,
    ) -> None:
        self.heads, self.legend, self._side, self._columns = tuple(heads), tuple(legend), side, columns
        self._wanted: Set[int] = set()
        self._total = 0
        self._rows: List[Tuple[str, List[Any]]] = []

    def expect(self, total: int) -> None:
        """Says how many images there will be."""
        shown = min(total, MOST_ROWS)
        self._total, self._wanted = total, {i * total // shown for i in range(shown)}

    def wants(self, position: int) -> bool:
        """Whether the image at a position is one of those shown."""
        return position in self._wanted

    def add(self, caption: str, pictures: Sequence[Any]) -> None:
        """Takes an image.

        Args:
            caption: one line.
            pictures: as many as heads, uint8 [h, w] or [h, w, 3].
        """
        self._rows.append((caption, [_small(picture, self._side) for picture in pictures]))

    def __len__(self) -> int:
        return len(self._rows)

    def save(self, path: Path) -> None:
        """Draws the sheet into a PNG file, whatever the file's name."""
        from PIL import Image, ImageDraw

        letters = load_font()
        columns = min(self._columns, len(self._rows))
        inner = len(self.heads) * (self._side + GAP) - GAP
        step = inner + 2 * MARGIN
        head = (
            (LINE if len(self._rows) < self._total else 0)
            + (LINE + GAP if self.legend else 0)
            + LINE
            + MARGIN
        )
        tops, bottom = [], head
        for first in range(0, len(self._rows), columns):
            tops.append(bottom)
            beside = self._rows[first : first + columns]
            tall = max(picture.height for _, pictures in beside for picture in pictures)
            bottom += tall + LINE + MARGIN
        sheet = Image.new("RGB", (columns * step, bottom + MARGIN), (255, 255, 255))
        draw = ImageDraw.Draw(sheet)
        top = MARGIN // 2
        if len(self._rows) < self._total:
            draw.text((MARGIN, top), f"{len(self._rows)} of {self._total} images", fill=BLACK, font=letters)
            top += LINE
        if self.legend:
            self._draw_legend(draw, top, letters)
            top += LINE + GAP
        for column in range(columns):
            for i, text in enumerate(self.heads):
                left = column * step + MARGIN + i * (self._side + GAP)
                draw.text((left, top), fitting(text, letters, self._side), fill=BLACK, font=letters)
        for i, (caption, pictures) in enumerate(self._rows):
            left, top = i % columns * step + MARGIN, tops[i // columns]
            for k, picture in enumerate(pictures):
                place = (left + k * (self._side + GAP), top)
                sheet.paste(picture, place)
                corner = (place[0] + picture.width - 1, top + picture.height - 1)
                draw.rectangle((place, corner), outline=GREY)
            below = top + max(picture.height for picture in pictures) + 1
            draw.text((left, below), fitting(caption, letters, inner), fill=(90, 90, 90), font=letters)
        sheet.save(str(path), format="PNG")

    def _draw_legend(self, draw: Any, top: int, letters: Any) -> None:
        left = MARGIN
        for colour, text in self.legend:
            draw.rectangle((left, top + 1, left + LINE - 3, top + LINE - 2), fill=colour, outline=GREY)
            draw.text((left + LINE + GAP, top), text, fill=BLACK, font=letters)
            left += LINE + 4 * GAP + round(text_length(text, letters))


def _small(pixels: Any, side: int) -> Any:
    """At most ``side`` wide and high: small ones enlarged by whole pixels, large ones reduced."""
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels)).convert("RGB")
    longest = max(image.size)
    if longest <= side // 2:
        factor = side // longest
        return image.resize((image.width * factor, image.height * factor), Image.NEAREST)
    image.thumbnail((side, side), Image.BICUBIC)
    return image
