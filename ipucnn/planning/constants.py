"""The fitted constants of the cost model, in one place.

``benchmarks/fit_cost_model.py`` reproduces the values: least squares of the logarithms of predicted over published
throughput together with a prior for each constant (its sources stand in that script), on the rows of a table of
published figures that are marked for calibration: ResNet-50 inference on a C600, training of ResNet-50, ResNeXt-101,
EfficientNet-B4 G16 and U-Net on Mk2 and Bow.  It prints the errors, also with a network left out.  Everything else in
the model is a fact of ``ipucnn.hardware``, a count of steps or a size of the network.
"""

from dataclasses import dataclass

import numpy as np

__all__ = ["DEFAULT_CONSTANTS", "FEATURES", "CostConstants"]

# What the work of an operation is counted in (per tile; the last axis of all work arrays).
FEATURES = ("unit_cycles", "blocks", "received_bytes", "moved_bytes", "transposed_bytes", "steps")


@dataclass(frozen=True)
class CostConstants:
    """Cycles per unit of work, and one time.

    Attributes:
        block_cycles: starting one pass of the workers over one weight block, beyond loading it.
        received_byte_cycles: per byte a tile receives in an exchange, rearranging included; 0.25 is the wire alone.
        moved_byte_cycles: per byte an element-wise vertex reads or writes, all vertex overheads included.
        transposed_byte_cycles: per byte of the operands of a weight gradient, which the matrix unit wants
            position-major while activations lie channel-major.
        step_cycles: one bulk-synchronous step: synchronisation, exchange set-up, vertex start.
        micro_batch_s: feeds and loop around one micro-batch.
    """

    block_cycles: float
    received_byte_cycles: float
    moved_byte_cycles: float
    transposed_byte_cycles: float
    step_cycles: float
    micro_batch_s: float

    @property
    def cycles_per_unit(self) -> np.ndarray:
        """Cycles of one unit of each of ``FEATURES``; a unit cycle is one cycle."""
        return np.array(
            [
                1.0,
                self.block_cycles,
                self.received_byte_cycles,
                self.moved_byte_cycles,
                self.transposed_byte_cycles,
                self.step_cycles,
            ]
        )


DEFAULT_CONSTANTS = CostConstants(
    block_cycles=204.0,
    received_byte_cycles=0.308,
    moved_byte_cycles=0.122,
    transposed_byte_cycles=1.37,
    step_cycles=294.0,
    micro_batch_s=60e-6,
)
