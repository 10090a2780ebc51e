"""Masks of two values, as people store them, to classes."""

from typing import Any, Tuple

import numpy as np

from ipucnn.errors import DataError


def to_classes(masks: Any, origin: str) -> Any:
    """uint8 masks [n, h, w] of 0 and one other value (255, or 1) to classes 0 and 1.

    Raises:
        DataError: more values, or two values of which none is 0.
    """
    found = mask_values(masks)
    others = [value for value in found if value != 0]
    if len(others) > 1:
        if len(found) == 2:
            values = f"the values {found[0]} and {found[1]}"
        else:
            shown = ", ".join(map(str, found[:5])) + (", ..." if len(found) > 5 else "")
            values = f"{len(found)} different values ({shown})"
        raise DataError(
            f"{origin} has {values}; a mask has 0 and one other",
            "0 for the background and 255 for the foreground, without smoothing or JPEG compression",
        )
    return (masks != 0).astype(np.uint8)


def mask_values(masks: Any) -> Tuple[int, ...]:
    """The values there are, ascending."""
    counts = np.bincount(masks.reshape(-1), minlength=256)
    return tuple(int(value) for value in np.nonzero(counts)[0])


# Which pictures count as 8-bit grey, for training on pairs and for segmentation alike.


_PIXELS = {
    "RGB": "colour (RGB)",
    "RGBA": "colour (RGBA)",
    "CMYK": "colour (CMYK)",
    "P": "a colour palette",
    "L": "grey",
    "LA": "grey with transparency",
    "I;16": "16 bits per pixel",
    "I;16B": "16 bits per pixel",
    "I;16L": "16 bits per pixel",
    "I;16N": "16 bits per pixel",
    "I": "32 bits per pixel",
    "F": "floating-point pixels",
}


def pixels_of(mode: str) -> str:
    """What to call pixels, by Pillow's name of them."""
    return _PIXELS.get(mode, f"pixels of mode {mode}")


def as_grey(page: Any) -> Any:
    """A Pillow image as 8-bit grey ("L") where it is one: bits and palettes of greys too.  Others stay."""
    return page.convert("L") if page.mode == "1" or _has_grey_palette(page) else page


def _has_grey_palette(page: Any) -> bool:
    """Whether a palette is one of greys, as ImageJ writes for a look-up table of greys."""
    if page.mode != "P":
        return False
    colours: Any = np.reshape(page.getpalette("RGB"), (-1, 3))
    return bool((colours == colours[:, :1]).all())
