"""Keras layers of our own: those that must know micro-batches, and those that see each sample by itself.

Importing this package imports TensorFlow.
"""

from ipucnn.models.layers.micro_batches import (
    BatchNormalization,
    Dropout,
    ExecutionContext,
    GroupNormalization,
    current_context,
    execution_context,
)
from ipucnn.models.layers.per_sample import (
    Cropping2D,
    GroupedConv2D,
    HardSigmoid,
    HardSwish,
    SubsamplePad,
)

__all__ = [
    "BatchNormalization",
    "Cropping2D",
    "Dropout",
    "ExecutionContext",
    "GroupNormalization",
    "GroupedConv2D",
    "HardSigmoid",
    "HardSwish",
    "SubsamplePad",
    "current_context",
    "execution_context",
]
