"""Masks of two values, as people store them, to classes.  No TensorFlow."""

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
