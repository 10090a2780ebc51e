"""Volumes: multi-page TIFF files of 8-bit grey slices, all of one size.  No TensorFlow."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from ipucnn.datasets.grey import pixels_of
from ipucnn.errors import DataError

HINT = "save it as an 8-bit grey multi-page TIFF"


def read_volume(path: Path) -> Any:
    """uint8 [slices, h, w] of a multi-page TIFF; a page of one bit becomes 0 and 255.

    Raises:
        DataError: absent, no TIFF, a damaged page, other than 8-bit grey, or pages of different sizes.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of what it then fails on
        return _read(path)


def _read(path: Path) -> Any:
    from PIL import Image

    try:
        volume = Image.open(path)
    except Image.UnidentifiedImageError:
        raise DataError(f"{path} is not an image", HINT) from None
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror or error}", "check that the file exists and is readable"
        ) from None
    except Exception as error:  # Pillow's plugins raise a wide variety for damaged files
        raise DataError(f"{path} cannot be decoded: {error}", HINT) from error
    with volume:
        if volume.format != "TIFF":
            raise DataError(f"{path} is a {volume.format} file, not a TIFF", HINT)
        slices = []
        try:
            count = int(volume.n_frames)
        except Exception as error:
            raise DataError(f"{path}: its list of pages is damaged: {error}", "get the file again") from error
        for page in range(count):
            slices.append(_read_page(volume, page, f"{path}, page {page + 1} of {count}"))
            if slices[-1].shape != slices[0].shape:
                sizes = " and ".join("x".join(map(str, s.shape)) for s in (slices[0], slices[-1]))
                raise DataError(f"{path} has pages of different sizes: {sizes}", HINT)
    return np.stack(slices)


def _read_page(volume: Any, page: int, origin: str) -> Any:
    try:
        volume.seek(page)
        if volume.mode not in ("L", "1"):
            raise DataError(f"{origin} has {pixels_of(volume.mode)}; slices must be 8-bit grey", HINT)
        volume.load()
        pixels = np.array(volume)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{origin} is damaged: {error}", "get the file again") from error
    return pixels.astype(np.uint8) * 255 if pixels.dtype == bool else pixels
