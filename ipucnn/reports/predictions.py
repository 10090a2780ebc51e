"""``predictions.png``: image, truth, prediction and the difference side by side, an image to a row."""

from pathlib import Path
from typing import Any, List, Sequence

import numpy as np

from ipucnn.text import to_ascii

SIDE, GAP, LINE = 300, 8, 18
"""Pixels: about the width of an image, between images, a line of text."""
RIGHT, MISSED, FALSE = (0, 158, 115), (213, 94, 0), (86, 180, 233)
"""Colours that the colour-blind tell apart too (Okabe and Ito 2008)."""


def save_predictions(pictures: Sequence[Any], class_names: Sequence[str], path: Path) -> None:
    """Draws ``ipucnn.runs.images.segmentation.Picture`` s into a PNG file, whole or not at all.

    The difference tints the rarer class of the two commonest: where it is right, missed, or found wrongly.
    """
    from PIL import Image, ImageDraw

    from ipucnn.filesystem import write_atomically
    from ipucnn.reports.contact_sheet import GREY, load_font, text_length

    shown = _rarer_class(pictures)
    name = to_ascii(class_names[shown]) if shown < len(class_names) else f"class {shown}"
    height, width = pictures[0].image.shape[:2]
    scale = max(1, round(SIDE / width)) if width <= SIDE else SIDE / width
    size = (round(width * scale), round(height * scale))
    font = load_font()
    titles = ["image", "truth", "prediction", f"{name}: "]
    sheet = Image.new(
        "RGB",
        (4 * size[0] + 5 * GAP, LINE + len(pictures) * (size[1] + LINE + GAP) + GAP),
        (255, 255, 255),
    )
    draw = ImageDraw.Draw(sheet)
    for column, title in enumerate(titles):
        draw.text((GAP + column * (size[0] + GAP), 2), title, fill=(0, 0, 0), font=font)
    left = GAP + 3 * (size[0] + GAP) + round(text_length(titles[3], font))
    for word, colour in (("right", RIGHT), ("missed", MISSED), ("false", FALSE)):
        draw.text((left, 2), word, fill=colour, font=font)
        left += round(text_length(word + "   ", font))
    for row, picture in enumerate(pictures):
        top = LINE + row * (size[1] + LINE + GAP)
        for column, panel in enumerate(_panels(picture, shown, len(class_names))):
            panel_image = Image.fromarray(panel)
            kind = Image.NEAREST if scale >= 1 else Image.BILINEAR
            left = GAP + column * (size[0] + GAP)
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
        draw.text((GAP, top + size[1] + 2), text, fill=(90, 90, 90), font=font)
    write_atomically(path, lambda temporary: sheet.save(str(temporary), format="PNG"))


def dice(picture: Any, which: int) -> float:
    """Dice score of one class on one picture; 1 where neither mask has it."""
    truth, found = picture.truth == which, picture.predicted == which
    both = int(truth.sum()) + int(found.sum())
    return 2 * int((truth & found).sum()) / both if both else 1.0


def _rarer_class(pictures: Sequence[Any]) -> int:
    counts: Any = sum(np.bincount(p.truth.reshape(-1).astype(np.int64), minlength=2) for p in pictures)
    there = [k for k in range(len(counts)) if counts[k]]
    return int(min(there, key=lambda k: counts[k]))


def _panels(picture: Any, shown: int, num_classes: int) -> List[Any]:
    grey = picture.image
    image = np.repeat(grey[..., np.newaxis], 3, axis=2) if grey.ndim == 2 else grey
    masks = [
        np.repeat(
            (mask.astype(np.int64) * 255 // max(num_classes - 1, 1)).astype(np.uint8)[..., np.newaxis], 3, 2
        )
        for mask in (picture.truth, picture.predicted)
    ]
    truth, found = picture.truth == shown, picture.predicted == shown
    tinted = image.astype(np.float64)
    for where, colour in ((truth & found, RIGHT), (truth & ~found, MISSED), (~truth & found, FALSE)):
        tinted[where] = 0.3 * tinted[where] + 0.7 * np.array(colour)
    return [image, *masks, np.round(tinted).astype(np.uint8)]
