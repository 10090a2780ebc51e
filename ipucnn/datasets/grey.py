"""Which pictures count as 8-bit grey, for training on pairs and for segmentation alike.  No TensorFlow."""

from typing import Any

import numpy as np

__all__ = ["as_grey", "pixels_of"]

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
