"""Layers that mix samples or draw random numbers, with the IPU's meaning of a micro-batch.

Importing this package imports TensorFlow.
"""

from ipucnn.models.layers.context import ExecutionContext, current_context, execution_context
from ipucnn.models.layers.cropping import Cropping2D
from ipucnn.models.layers.per_sample import DepthwiseConv2D
from ipucnn.models.layers.dropout import Dropout
from ipucnn.models.layers.micro_batches import BatchNormalization, GroupNormalization

__all__ = [
    "BatchNormalization",
    "Cropping2D",
    "DepthwiseConv2D",
    "Dropout",
    "ExecutionContext",
    "GroupNormalization",
    "current_context",
    "execution_context",
]
