"""What ``evaluate``, ``infer`` and ``export`` share: whom they tell of their work, and errors of what is predicted."""

import contextlib
from typing import Iterator

import numpy as np

from ipucnn.errors import DataError, InfeasibleError


class Progress:
    """What is told of the work while it goes on; this one keeps it to itself."""

    def line(self, text: str) -> None:
        """Something worth knowing: a warning, or an input that cannot be read."""

    def now(self, what: str) -> None:
        """Something begins that takes its time."""

    def expect(self, total: int) -> None:
        """The number of images, before the first."""

    def update(self, done: int, total: int) -> None:
        """Samples, images or pages done, of all."""

    def image(self, *details: object) -> None:
        """An image that was classified (position, result, uint8 pixels) or segmented (a ``SegmentedImage``)."""


SILENT = Progress()


@contextlib.contextmanager
def memory_errors(what: str, hint: str) -> Iterator[None]:
    """Says what does not fit into memory, and which option is at fault.

    Raises:
        InfeasibleError: memory ran out within the block.
    """
    import tensorflow as tf

    try:
        yield
    except (MemoryError, tf.errors.ResourceExhaustedError) as error:
        raise InfeasibleError(f"{what} do not fit into memory", hint) from error


def check_finite(logits: np.ndarray) -> np.ndarray:
    """The logits [..., classes].

    Raises:
        DataError: some are NaN or infinite.
    """
    if not np.isfinite(logits).all():
        raise DataError(
            "the network's outputs are not finite: its weights are damaged, or its training diverged",
            "take an earlier checkpoint with --checkpoint",
        )
    return logits
