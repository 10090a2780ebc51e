"""Shared by ``evaluate``, ``infer`` and ``export``: reports of progress, and errors of predictions."""

import contextlib
from typing import Iterator

import numpy as np

from ipucnn.errors import DataError, InfeasibleError


class Progress:
    """Receives reports of progress; this class ignores them."""

    def line(self, text: str) -> None:
        """Reports a message: a warning, or an input that cannot be read."""

    def now(self, what: str) -> None:
        """Reports that a longer piece of work begins."""

    def expect(self, total: int) -> None:
        """Reports the number of images, before the first one."""

    def update(self, done: int, total: int) -> None:
        """Reports the samples, images or pages done, and their total."""

    def image(self, *details: object) -> None:
        """Reports an image that was classified (position, result, uint8 pixels) or segmented (a ``SegmentedImage``)."""


SILENT = Progress()


@contextlib.contextmanager
def memory_errors(what: str, hint: str) -> Iterator[None]:
    """Replaces out-of-memory errors by messages that name the data that do not fit, and the option to change.

    Raises:
        InfeasibleError: memory ran out within the block.
    """
    import tensorflow as tf

    try:
        yield
    except (MemoryError, tf.errors.ResourceExhaustedError) as error:
        raise InfeasibleError(f"{what} do not fit into memory", hint) from error


def check_finite(logits: np.ndarray) -> np.ndarray:
    """Returns the logits [..., classes] unchanged.

    Raises:
        DataError: some are NaN or infinite.
    """
    if not np.isfinite(logits).all():
        raise DataError(
            "the network's outputs are not finite: its weights are damaged, or its training diverged",
            "take an earlier checkpoint with --checkpoint",
        )
    return logits
