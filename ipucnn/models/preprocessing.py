"""Preprocessing layers with which a network begins: Rescaling and Normalization.

A registered network gets its images in its range, so the layers are removed (:func:`strip_preprocessing`).  A user's
own network keeps them and gets pixels of 0..255.  Weights of a whole model say how its images were scaled
(:func:`preprocessing_of`).
"""

from __future__ import annotations

from typing import Callable, Iterable, Iterator, List, Optional, Sequence

import numpy as np

from ipucnn.datasets.pixels import Scaling
from ipucnn.errors import ConfigurationError
from ipucnn.models.blueprint import FIRST, INPUT_NAME, Blueprint, Node
from ipucnn.models.settings import plain, plain_settings
from ipucnn.text import shown_value

PREPROCESSING = ("Rescaling", "Normalization")
WITHOUT_WEIGHTS = (
    "Activation", "Add", "Average", "AveragePooling2D", "Concatenate", "Cropping2D", "Dropout", "ELU", "Flatten",
    "GlobalAveragePooling2D", "GlobalMaxPooling2D", "Identity", "LeakyReLU", "MaxPooling2D", "Maximum", "Minimum",
    "Multiply", "Permute", "ReLU", "Rescaling", "Reshape", "Softmax", "SpatialDropout2D", "Subtract", "UpSampling2D",
    "ZeroPadding2D",
)  # fmt: skip
"""Stock layers without weights: a Rescaling behind them alone still scales the images."""
Statistics = Callable[[Node], Optional[Sequence[np.ndarray]]]
"""A function that returns mean and variance of a Normalization layer, which were measured; None if they are absent."""


def strip_preprocessing(blueprint: Blueprint) -> None:
    """Removes the preprocessing at the start of a registered network, which the input pipeline does instead."""
    removed, source = [], INPUT_NAME
    for node in blueprint.nodes:
        if node.stock in PREPROCESSING and node.inputs == [source]:
            removed.append(node.name)
            source = node.name
    blueprint.bypass(removed)


def _of_images(nodes: Iterable[Node], images: str = INPUT_NAME, pass_own: bool = False) -> Iterator[Node]:
    """Yields the nodes that read nothing but the images, or what nodes without weights make of them.

    Args:
        nodes: nodes in an order in which they can run.
        images: name of the input.
        pass_own: whether layers of the user's own, which may have weights, count as nodes without.
    """
    pixels = {images}
    for node in nodes:
        if node.inputs and pixels.issuperset(node.inputs):
            yield node
            is_free = node.is_operation or node.stock in (*WITHOUT_WEIGHTS, *PREPROCESSING)
            if is_free or (pass_own and node.is_own):
                pixels.add(node.name)


def first_rescaling(nodes: Iterable[Node]) -> Optional[str]:
    """Name of the layer that scales the images before any layer with weights; None if there is none.

    A network with such a layer takes pixels of 0..255.
    """
    return next((node.name for node in _of_images(nodes) if node.stock == "Rescaling"), None)


def rescaling_behind_own(nodes: Sequence[Node]) -> Optional[str]:
    """Name of a Rescaling that scales what a layer of the user's own makes of the images, or else the images.

    None if there is no such layer, or another one scales the images.
    """
    if first_rescaling(nodes) is not None:
        return None
    return next((node.name for node in _of_images(nodes, pass_own=True) if node.stock == "Rescaling"), None)


def scaling_of(nodes: Iterable[Node]) -> Scaling:
    """The scaling of the Rescaling layers that follow each other from the input on; 1 and 0 without any."""
    factor, offset, source = np.float64(1), np.float64(0), INPUT_NAME
    for node in nodes:
        if node.inputs == [source] and node.stock == "Rescaling":
            scale, shift = (np.asarray(node.config.get(key, 0.0), np.float64) for key in ("scale", "offset"))
            factor, offset, source = factor * scale, offset * scale + shift, node.name
    return Scaling(np.asarray(factor), np.asarray(offset))


def as_rescaling(where: str, node: Node, statistics: Statistics) -> Node:
    """A Normalization layer as a Rescaling layer with the same numbers: (x - mean) / max(deviation, 1e-7).

    Args:
        where: the layer, for messages.

    Raises:
        ConfigurationError: its numbers are not known, or there is not one number per channel or for all.
    """
    numbers: Optional[Sequence[object]] = statistics(node)
    if numbers is None or numbers[0] is None:
        numbers = [plain(node.config.get(key), where, key) for key in ("mean", "variance")]
    if numbers[0] is None:
        raise ConfigurationError(
            f"{where} (Normalization) has no mean and variance",
            "call its adapt() before the network is saved",
        )
    mean, variance = (np.squeeze(np.asarray(value, np.float64)) for value in numbers)
    axis = node.config.get("axis")
    axes = list(axis) if isinstance(axis, (list, tuple)) else [] if axis is None else [axis]
    is_first = node.inputs == [INPUT_NAME]  # one behind a Rescaling, as in EfficientNet, changes nothing
    if is_first and np.all(mean == 0) and np.all(variance == 1) and node.config.get("mean") is None:
        raise ConfigurationError(
            f"{where} (Normalization) has mean 0 and variance 1, as one that was not adapted: pixels stay 0 to 255",
            "call its adapt() with training images, give it mean and variance, or leave it out",
        )
    if axes not in ([], [-1], [3]) or mean.ndim > 1 or not np.isfinite([*mean.flat, *variance.flat]).all():
        raise ConfigurationError(
            f"{where} (Normalization) has other numbers than one per channel", "use axis=-1 or axis=None"
        )
    deviation = np.maximum(np.sqrt(variance), 1e-7)
    factor, offset = 1 / deviation, -mean / deviation
    if node.config.get("invert"):
        factor, offset = deviation, mean
    return Node(node.name, "Rescaling", {"scale": factor.tolist(), "offset": offset.tolist()}, node.inputs)


def channels_of(images: Node) -> Optional[int]:
    """The channels of the images that a network reads; None if its configuration does not say."""
    shape = images.config.get("batch_shape", images.config.get("batch_input_shape"))
    return shape[-1] if isinstance(shape, (list, tuple)) and shape else None


_DIVISIONS = ("TrueDivide", "Divide", "truediv", "divide")
_SUMS = ("Add", "bias_add")


def rescaling_of_operation(node: Node, channels: Optional[int]) -> Optional[Node]:
    """An operation on one tensor and a number, or one per channel, as the Rescaling layer that computes the same.

    So begin networks with ``x / 255.0`` or Keras' ``preprocess_input``.  Returns None for any other operation.

    Args:
        node: the node.
        channels: those of the images, if it reads them, scaled or not; None for any other tensor, which takes one
            number.
    """
    given = [pair for pair in node.arguments if pair != ("data_format", "NHWC")]
    if not node.is_operation or len(node.inputs) != 1 or len(given) != 1:
        return None
    ((place, value),) = given
    try:
        number = np.asarray(value["config"]["value"] if isinstance(value, dict) else value, np.float64)
    except (KeyError, TypeError, ValueError):
        return None
    if number.shape not in ((), (channels,), (1, 1, 1, channels)) or not np.isfinite(number).all():
        return None
    number = number.reshape(-1) if number.ndim else number
    is_first, one = place == FIRST, np.ones_like(number)
    if node.stock in _SUMS:
        scale, offset = one, number
    elif node.stock == "Subtract":
        scale, offset = (-one, number) if is_first else (one, -number)
    elif node.stock == "Multiply":
        scale, offset = number, 0 * one
    elif node.stock in _DIVISIONS and not is_first and number.all():
        scale, offset = 1 / number, 0 * one
    else:
        return None
    settings = {"scale": scale.tolist(), "offset": offset.tolist()}
    return Node(node.name, "Rescaling", settings, node.inputs, node.layer)


def preprocessing_of(name: str, nodes: Sequence[Node], statistics: Statistics) -> Optional[Scaling]:
    """The scaling at the beginning of a whole model; None if no Rescaling and no Normalization scales its images.

    Args:
        name: name of the model, for messages.
        nodes: its nodes; the first is the input.
        statistics: see :data:`Statistics`.

    Raises:
        ConfigurationError: such a layer does not follow the input itself, or its numbers are not known.
    """
    chain: List[Node] = []
    source, channels = nodes[0].name, channels_of(nodes[0])
    for node in _of_images(nodes[1:], source):
        node = rescaling_of_operation(node, channels if node.inputs == [source] else None) or node
        if node.stock not in PREPROCESSING:
            continue
        where = f"{name}: layer '{shown_value(node.name)}'"
        if node.inputs != [source]:
            raise ConfigurationError(
                f"{where} ({node.kind}) does not follow the images, so its numbers cannot be those of the images",
                "use the network of the file itself: save it as .keras",
            )
        if node.stock == "Normalization":
            scaled = as_rescaling(where, node, statistics)
        else:
            scaled = Node(node.name, node.kind, plain_settings(where, node, 3), [])
        scaled.inputs = [chain[-1].name if chain else INPUT_NAME]
        chain.append(scaled)
        source = node.name
    return scaling_of(chain) if chain else None
