"""Shared by ``evaluate``, ``infer`` and ``export``: errors of predictions."""

import numpy as np

from ipucnn.errors import DataError


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
