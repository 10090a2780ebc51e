"""What the memory model says of a stage or an IPU: bytes by category, fill and verdict."""

from dataclasses import dataclass
from typing import Dict

__all__ = ["CATEGORIES", "FITS_BELOW", "FITS_NOT_ABOVE", "StageMemory"]

CATEGORIES = (
    "weights",
    "accumulators",
    "optimizer_state",
    "stash",
    "live_activations",
    "temporaries",
    "code",
)

# Fill below which a stage is said to fit, and above which not to.  Public reports of what doesn't fit are too few for
# a sharp edge.  Of the public configurations (benchmarks/fit_cost_model.py --memory) the fullest that fits is at
# 1.03 here, and the emptiest reported out of memory at 0.81: the bounds leave both between them.
FITS_BELOW = 0.80
FITS_NOT_ABOVE = 1.15


@dataclass(frozen=True)
class StageMemory:
    """Predicted bytes of a stage or of an IPU, see ``memory_model`` for the categories; the imbalance is in each.

    Attributes:
        capacity_bytes: of the IPU.
    """

    weights_bytes: float
    accumulators_bytes: float
    optimizer_state_bytes: float
    stash_bytes: float
    live_activations_bytes: float
    temporaries_bytes: float
    code_bytes: float
    capacity_bytes: float

    def categories(self) -> Dict[str, float]:
        """Bytes by category, in the order of ``CATEGORIES``."""
        return {name: getattr(self, f"{name}_bytes") for name in CATEGORIES}

    @property
    def total_bytes(self) -> float:
        return sum(self.categories().values())

    @property
    def fill(self) -> float:
        """Share of the IPU's memory."""
        return self.total_bytes / self.capacity_bytes

    @property
    def verdict(self) -> str:
        """ "fits", "uncertain" or "does not fit"."""
        if self.fill < FITS_BELOW:
            return "fits"
        return "uncertain" if self.fill <= FITS_NOT_ABOVE else "does not fit"
