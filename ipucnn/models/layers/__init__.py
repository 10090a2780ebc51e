"""This package's Keras layers: layers that must know micro-batches, and layers that compute each sample separately.

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
