"""Limits on the memory for data.

Every reader checks them before it allocates: :func:`check_pixels` for one image, and :func:`decoding` while it is
decoded, so that only few threads decode large images at the same time.  :func:`check_memory` is for what would fill the
memory part by part until the system ends the process: data sets that are held in memory, batches, and large images.
"""

import contextlib
import threading
from typing import ContextManager, Iterator, Optional, Type

from ipucnn.errors import DataError, UserError
from ipucnn.machine import available_bytes
from ipucnn.text import size_text

HELD_OUT_SHARE = 0.2
"""The share of each class that is held out of a folder without train/ and val/, unless an option says otherwise."""
MAX_IMAGE_PIXELS = 100_000_000
"""Pixels of one image (one page of a volume), unless ``--max-image-pixels`` says otherwise."""
LARGEST_IMAGE_PIXELS = 2**31 - 1
"""The largest value of ``--max-image-pixels``: Pillow's own arithmetic overflows beyond it."""
LARGEST_FILE_BYTES = 2**32
"""The largest file or record of one image."""
BYTES_PER_PIXEL = 16
"""Memory of one pixel while it is decoded, turned upright, laid on white and converted: four copies of 4 bytes."""
TOO_LARGE = "too-large"
"""The code of the findings of this module: such data are whole, and ``--skip-damaged`` never leaves them out."""
UNBALANCED = 5
"""The ratio of the samples of the largest class to those of the smallest from which on classes are unbalanced."""


def check_memory(
    num_bytes: int, what: str, hint: Optional[str] = None, error: Type[UserError] = DataError
) -> None:
    """Rejects data that would take more than half of the available memory.

    Args:
        num_bytes: number of bytes to allocate.
        what: the data's name in the message: the path of a file or folder.
        hint: the error's hint.
        error: the class of the error; InfeasibleError if options are at fault.

    Raises:
        UserError: the data would take more than half.
    """
    allowed = available_bytes() // 2
    if num_bytes > allowed:
        refusal = error(
            f"{what} needs {size_text(num_bytes)} of memory, and half of what is free is {size_text(allowed)}",
            hint or "use a smaller data set, or a machine with more memory",
        )
        if isinstance(refusal, DataError):
            refusal.code = TOO_LARGE
        raise refusal


def check_pixels(width: int, height: int, at_most: int, origin: str) -> None:
    """Rejects an image whose header gives it more pixels than ``--max-image-pixels``.

    Raises:
        DataError: the image has more.
    """
    if width * height > at_most:
        raise DataError(
            f"{origin} has {width}x{height} pixels, more than --max-image-pixels {at_most}",
            f"shrink it, or allow it with --max-image-pixels {width * height}"
            if width * height <= LARGEST_IMAGE_PIXELS
            else "shrink it",
            TOO_LARGE,
        )


class _Gate:
    """Lets images be decoded at the same time while their bytes fit into a limit; one image is always let in."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken_bytes = 0
        self._num_inside = 0

    @contextlib.contextmanager
    def holding(self, num_bytes: int, allowed_bytes: int) -> Iterator[None]:
        with self._changed:
            while self._num_inside and self._taken_bytes + num_bytes > allowed_bytes:
                self._changed.wait()
            self._taken_bytes += num_bytes
            self._num_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._taken_bytes -= num_bytes
                self._num_inside -= 1
                self._changed.notify_all()


_gate = _Gate()
FREELY_PIXELS = 4_000_000
"""Images up to this size are decoded without a check: 48 threads that decode them stay within 3 GiB."""


_AT_ONCE: ContextManager[None] = contextlib.nullcontext()


def decoding(width: int, height: int, origin: str) -> ContextManager[None]:
    """Returns a context for the decoding of one image; large images wait in it until memory is free.

    All images that are decoded at the same time take at most a quarter of the available memory.  A single image may
    take up to half of it.

    Raises:
        DataError: the image alone would take more than half.
    """
    pixels = width * height
    if pixels <= FREELY_PIXELS:
        return _AT_ONCE
    check_memory(pixels * BYTES_PER_PIXEL, origin, "shrink it, or use a machine with more memory")
    return _gate.holding(pixels * BYTES_PER_PIXEL, available_bytes() // 4)
