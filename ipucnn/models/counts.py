"""Parameters and multiply-accumulates of registered networks and of built models.

The counts of registered networks, for the image size and classes of their default data sets, are read from
``counts.json``, which is derived from their layer graphs (``python -m ipucnn.planning.graphs.shipped``).  The counts of
a built model are computed from its layers.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Dict, NamedTuple, Optional, Sequence

from ipucnn.aliases import KerasLayer, KerasModel, TfVariable
from ipucnn.models.keras_config import input_shape, num_calls, output_shape, stock_kind

FILE = Path(__file__).with_name("counts.json")


class Counts(NamedTuple):
    """The counts of a registered network with its own norm.

    Attributes:
        parameters: trainable parameters.
        macs: multiply-accumulates of the convolutions and dense layers, one sample, one forward pass.
    """

    parameters: int
    macs: int


@functools.lru_cache(maxsize=None)
def registered_counts() -> Dict[str, Counts]:
    """The counts by network name; networks that were registered after the file was written are absent."""
    return {name: Counts(**entry) for name, entry in json.loads(FILE.read_text(encoding="utf-8")).items()}


def counts_text(counts: Dict[str, Counts]) -> str:
    """The text of the file that ``registered_counts`` reads, with a line per network."""
    lines = [f" {json.dumps(name)}: {json.dumps(entry._asdict())}" for name, entry in sorted(counts.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"


# --- counts of a built model


def _size(weight: TfVariable) -> int:
    return math.prod(int(n) for n in weight.shape)


def _spatial(shape: Sequence[Optional[int]]) -> int:
    """Number of positions of a (batch, height, width, channels) or (batch, ..., features) tensor, for one sample."""
    if any(n is None for n in shape[1:]):
        raise ValueError(f"multiply-accumulates need a static shape, got {tuple(shape)}")
    return math.prod(n for n in shape[1:-1] if n is not None)


_WITH_KERNELS = (
    "Conv2D",
    "Conv2DTranspose",
    "Dense",
    "DepthwiseConv2D",
    "GroupedConv2D",
    "SeparableConv2D",
)


def _kind_with_kernel(layer: KerasLayer) -> str:
    """The class of Keras with a kernel that a layer is of or extends, as for weight standardisation; "" for others."""
    known = [
        base
        for base in type(layer).__mro__
        if base.__module__.split(".")[0] in ("keras", "tensorflow", "ipucnn")
    ]
    return next((base.__name__ for base in known if base.__name__ in _WITH_KERNELS), "")


def is_estimated(layer: KerasLayer) -> bool:
    """Whether multiplications of a layer are estimated from its weights: those of a user's class that extends none."""
    return not stock_kind(layer) and not _kind_with_kernel(layer) and bool(layer.weights)


def layer_macs(layer: KerasLayer) -> int:
    """Multiply-accumulates of all calls of a layer in one forward pass of one sample; 0 without a kernel.

    In a convolution each position of the output uses every number of the kernel once; kernels of grouped and depthwise
    convolutions are smaller by exactly the factor by which these compute less.  In a transposed convolution each
    position of the input uses every number of the kernel once.  Of a user's own class, each number of a weight with
    several dimensions is counted as in a convolution.
    """
    kind = _kind_with_kernel(layer)
    weights = layer.weights
    outputs = sum(_spatial(output_shape(layer, call)) for call in range(num_calls(layer))) if weights else 0
    if kind in ("Conv2D", "GroupedConv2D", "DepthwiseConv2D", "Dense"):
        return _size(weights[0]) * outputs
    if kind == "SeparableConv2D":
        return (_size(weights[0]) + _size(weights[1])) * outputs
    if kind == "Conv2DTranspose":
        return _size(weights[0]) * sum(_spatial(input_shape(layer, call)) for call in range(num_calls(layer)))
    if is_estimated(layer):
        return sum(_size(weight) for weight in layer.trainable_weights if len(weight.shape) > 1) * outputs
    return 0


def count_macs(model: KerasModel) -> int:
    """Multiply-accumulates of the convolutions and dense layers for one sample, forward."""
    return sum(layer_macs(layer) for layer in model.layers)


def layer_parameters(layer: KerasLayer) -> int:
    """Trainable parameters of a layer; moving statistics are not trainable."""
    return sum(_size(weight) for weight in layer.trainable_weights)


def count_parameters(model: KerasModel) -> int:
    """Trainable parameters of a model."""
    return sum(layer_parameters(layer) for layer in model.layers)
