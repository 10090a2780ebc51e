"""Shared by ``evaluate``, ``infer`` and ``export``: checks of options, and errors of predictions."""

import contextlib
from typing import Iterable, Iterator, Tuple

import numpy as np

from ipucnn.errors import ConfigurationError, DataError, InfeasibleError


def check_task(segments: bool, network: str, options: Iterable[Tuple[str, bool, bool]]) -> None:
    """Refuses options for the other kind of network.

    Args:
        segments: whether the network makes masks.
        network: the name of the network or run, for the error.
        options: (option, whether it is given, whether it is for masks).

    Raises:
        ConfigurationError: such an option is given.
    """
    makes = "segments images, it has no labels" if segments else "classifies images, it makes no masks"
    for option, is_given, is_for_masks in options:
        if is_given and is_for_masks != segments:
            raise ConfigurationError(f"{option}: {network} {makes}", "drop it")


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
