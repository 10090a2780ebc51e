"""How the files of a set are stored, to report those that differ from most: training reads all of them by one rule."""

from typing import Callable, Dict, Optional, Tuple

from ipucnn.datasets.forms import GREY, PALETTE, RGB, WHITE_IS_ZERO, Form

USUAL = (GREY, RGB)
"""Pixels that need no conversion."""
ALIKE: Dict[str, Tuple[str, Callable[[str], bool]]] = {
    "mode": ("odd-mode", lambda pixels: pixels.startswith(USUAL) and " with " not in pixels),
    "image": ("odd-form", bool),
    "mask": ("odd-form", bool),
}
"""Properties of :func:`stored_as`, each with the code of the finding about samples that differ from the most common
value, and a function that returns whether a value may be that common value."""


def stored_as(image: Form, mask: Optional[Form] = None) -> Dict[str, str]:
    """Returns the properties that all files of a set should have in common.

    Args:
        image: the form of an image.
        mask: the form of its mask; None for class folders, whose pixels may be of any mode.
    """
    if mask is None:
        return {"mode": image.pixels, "image": _turn(image)}
    return {"image": f"image of {_numbers(image)}", "mask": f"mask of {_numbers(mask)}"}


def _numbers(form: Form) -> str:
    kind = {WHITE_IS_ZERO: ", white is zero", PALETTE: ", with a palette"}.get(form.colour, "")
    return form.depth + kind + ("" if form.orientation == 1 else ", " + _turn(form))


def _turn(form: Form) -> str:
    return "upright" if form.orientation == 1 else f"orientation {form.orientation}"
