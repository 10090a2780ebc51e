"""Counting a built model's parameters and multiply-accumulates."""

from typing import Any, Tuple

import numpy as np


def _size(weight: Any) -> int:
    return int(np.prod(weight.shape))


def _spatial(shape: Tuple[Any, ...]) -> int:
    """Positions of a (batch, height, width, channels) or (batch, ..., features) tensor."""
    if any(n is None for n in shape[1:]):
        raise ValueError(f"multiply-accumulates need a static shape, got {tuple(shape)}")
    return int(np.prod([int(n) for n in shape[1:-1]]))


def layer_macs(layer: Any) -> int:
    """Multiply-accumulates of one forward pass of one sample; 0 for layers without a kernel.

    Every position of the output uses each number of a convolution's kernel once (grouped and depthwise
    kernels are smaller by just that factor); in a transposed convolution every position of the input does.
    """
    kind = type(layer).__name__
    weights = layer.weights
    if kind in ("Conv2D", "GroupedConv2D", "DepthwiseConv2D", "Dense"):
        return _size(weights[0]) * _spatial(layer.output.shape)
    if kind == "SeparableConv2D":
        return (_size(weights[0]) + _size(weights[1])) * _spatial(layer.output.shape)
    if kind == "Conv2DTranspose":
        return _size(weights[0]) * _spatial(layer.input.shape)
    return 0


def count_macs(model: Any) -> int:
    """Multiply-accumulates of the convolutions and dense layers for one sample, forward."""
    return sum(layer_macs(layer) for layer in model.layers)


def layer_parameters(layer: Any) -> int:
    """Trainable parameters of a layer (moving statistics are not)."""
    return sum(_size(weight) for weight in layer.trainable_weights)


def count_parameters(model: Any) -> int:
    """Trainable parameters of a model."""
    return sum(layer_parameters(layer) for layer in model.layers)
