"""Preprocessing layers with which a network begins: Rescaling and Normalization.

A registered network gets its images in its range, so the layers are removed (:func:`strip_preprocessing`).  A user's
own network keeps them and gets pixels of 0..255.  Weights of a whole model say how its images were scaled
(:func:`preprocessing_of`).
"""

from __future__ import annotations

from typing import Callable, Iterable, List, NamedTuple, Optional, Sequence, Set

import numpy as np

from ipucnn.datasets.pixels import Scaling
from ipucnn.errors import ConfigurationError
from ipucnn.models.blueprint import FIRST, INPUT_NAME, Blueprint, Node
from ipucnn.models.settings import plain, plain_settings
from ipucnn.text import shown_value

PREPROCESSING = ("Rescaling", "Normalization")
WITH_WEIGHTS = (
    "BatchNormalization", "Conv2D", "Conv2DTranspose", "Dense", "DepthwiseConv2D", "GroupNormalization",
    "LayerNormalization", "PReLU", "SeparableConv2D",
)  # fmt: skip
"""Stock layers with weights: a Rescaling behind the others alone still scales the images."""
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


class ImageScaling(NamedTuple):
    """The layer of a network that scales its images.

    Attributes:
        layer: its name; None if no layer does.
        doubt: why it may not scale pixels of 0..255, or not all that is computed of them by weights; "" if it does.
    """

    layer: Optional[str]
    doubt: str = ""

    @property
    def is_certain(self) -> bool:
        """Whether the layer scales pixels of 0..255."""
        return not self.doubt


def image_scaling(nodes: Sequence[Node]) -> ImageScaling:
    """Finds the first Rescaling before any layer with weights; a network with one takes pixels of 0..255."""
    unscaled, of_own = {INPUT_NAME}, set()  # type: Set[str], Set[str]
    first: Optional[Node] = None
    is_behind_own = goes_on_unscaled = False
    for node in nodes:
        inputs = set(node.inputs)
        if not inputs or not inputs & (unscaled | of_own):
            continue
        if not inputs <= unscaled | of_own:
            goes_on_unscaled = True  # beside what is scaled, or computed by weights
        elif node.stock == "Rescaling":
            if first is None or (is_behind_own and inputs <= unscaled):
                first, is_behind_own = node, not inputs <= unscaled
        elif node.is_own:
            of_own.add(node.name)
        elif node.stock in WITH_WEIGHTS:
            goes_on_unscaled = True
        else:
            (unscaled if inputs <= unscaled else of_own).add(node.name)
    if first is None:
        return ImageScaling(None)
    if is_behind_own or goes_on_unscaled:
        return ImageScaling(first.name, "follows a layer of its own, or other layers get the images unscaled")
    return ImageScaling(first.name, doubt_of(scaling_of(nodes, first.inputs[0])))


_LARGE, _MODERATE = 20, 10
"""Inputs of networks are moderate numbers; one whose 0..255 are large and whose 0..1 are not was made for 0..1."""


def doubt_of(scaling: Scaling) -> str:
    """Returns why a scaling may not be one of pixels of 0..255; "" if it is plausible for them.

    A Normalization that was adapted to images of 0..1 makes numbers up to several hundred of pixels.
    """
    of_pixels, of_unit = (
        [
            float(end(np.float64(side) * scaling.factor + scaling.offset))
            for side in sides
            for end in (np.min, np.max)
        ]
        for sides in ((0, 255), (0, 1))
    )
    if max(map(abs, of_pixels)) <= _LARGE or max(map(abs, of_unit)) > _MODERATE:
        return ""
    ranges = [f"{min(ends):.4g} to {max(ends):.4g}" for ends in (of_pixels, of_unit)]
    return f"makes {ranges[0]} of pixels of 0..255, and {ranges[1]} of 0..1"


def scaling_of(nodes: Iterable[Node], source: str = INPUT_NAME) -> Scaling:
    """The scaling of the Rescaling layers that follow each other from ``source`` on; 1 and 0 without any."""
    factor, offset = np.float64(1), np.float64(0)
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
        ConfigurationError: such a layer follows neither the input itself nor a layer with weights, or its numbers are
            not known.
    """
    chain: List[Node] = []
    source, channels = nodes[0].name, channels_of(nodes[0])
    weighted: Set[str] = set()
    for node in nodes[1:]:
        if node.stock in WITH_WEIGHTS or not weighted.isdisjoint(node.inputs):
            weighted.add(node.name)
            continue
        node = rescaling_of_operation(node, channels if node.inputs == [source] else None) or node
        if node.stock not in PREPROCESSING:
            continue
        where = f"{name}: layer '{shown_value(node.name)}'"
        if node.inputs != [source]:
            raise ConfigurationError(
                f"{where} ({node.kind}) does not follow the images, so its numbers cannot be those of the images",
                "save the model without it, and say the range of the pixels with --normalise",
            )
        if node.stock == "Normalization":
            scaled = as_rescaling(where, node, statistics)
        else:
            scaled = Node(node.name, node.kind, plain_settings(where, node, 3), [])
        scaled.inputs = [chain[-1].name if chain else INPUT_NAME]
        chain.append(scaled)
        source = node.name
    return scaling_of(chain) if chain else None
