"""Shared by ``evaluate``, ``infer`` and ``export``: checks of options, and errors of predictions."""

from typing import Iterable, Tuple

import numpy as np

from ipucnn.errors import ConfigurationError, DataError


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
