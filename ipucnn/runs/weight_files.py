"""How the images of a Keras file were scaled, and whether the network that gets its weights has the same images.

A whole model may begin with Rescaling or Normalization.  A registered network has no such layers, so evaluation takes
their numbers over, in place of the network's input range; training refuses them.  A user's own network keeps its
layers, which have to be those of the file.
"""

from dataclasses import replace
from pathlib import Path
from typing import List, Optional, Tuple

import numpy as np

from ipucnn.aliases import KerasModel
from ipucnn.datasets.pixels import InputRange, Scaling
from ipucnn.errors import ConfigurationError, DataError, UserError
from ipucnn.filesystem import shown
from ipucnn.models.blueprint import Node
from ipucnn.models.keras_files import has_statistics, read_model, read_statistics
from ipucnn.models.own import model_in_file
from ipucnn.models.preprocessing import doubt_of, preprocessing_of, scaling_of
from ipucnn.models.registry import ModelRecord, find_network
from ipucnn.planning.network import InputShape
from ipucnn.runs.setup import Setup, SomeSetup, range_name
from ipucnn.text import quoted, shown_value


def file_with_weights(record: ModelRecord) -> Optional[Path]:
    """Returns the Keras file that a network was read from, whose weights are beside it; None for other networks."""
    return record.file if record.own is not None and record.own.make is None else None


def check_frozen_weights(record: ModelRecord) -> None:
    """Refuses to draw the weights of layers of a Keras file that would keep them.

    Raises:
        ConfigurationError: there is such a layer.
    """
    own = record.own
    if own is None or file_with_weights(record) is None:
        return
    name, kept = shown_value(record.name), own.kept_layers
    if kept:
        layer, how = kept[0]
        raise ConfigurationError(
            f"{name}: layer '{shown_value(layer)}' {how}, and training would draw weights for it",
            f"begin with the weights in the file: --weights {quoted(record.name)}",
        )


def scaling_of_file(path: Path) -> Optional[Scaling]:
    """Returns the scaling of pixels with which the model in a Keras file begins; None if it has none, or no model.

    Raises:
        DataError: its numbers cannot be taken over.
    """
    nodes = read_model(path)
    if nodes is None:
        if has_statistics(path):
            raise DataError(
                f"{shown(path)} has weights of a Normalization layer, and does not say where it stands in the network",
                "save the whole model: model.save('my_net.keras')",
            )
        return None
    try:
        return preprocessing_of(shown(path), nodes, lambda node: read_statistics(path, node))
    except ConfigurationError as error:
        raise DataError(error.message, _own_network(path, error.hint or "")) from None


def holds_network(path: Path) -> bool:
    """Returns whether a file is one in which Keras saved a whole model that can be trained."""
    try:
        find_network(str(path))
    except UserError:  # weights alone, or layers that are not supported
        return False
    return True


def _own_network(path: Path, otherwise: str) -> str:
    """Returns the hint to take the network in a file, or another one if it holds none that can be trained."""
    return f"take the file's own network: --model-name {quoted(path)}" if holds_network(path) else otherwise


def input_shape_of_file(path: Path) -> Optional[InputShape]:
    """Returns (height, width, channels) of the input of the model in a Keras file; None if it does not fix them."""
    nodes = read_model(path) or [Node("", "", {}, [])]
    shape = nodes[0].config.get("batch_shape", nodes[0].config.get("batch_input_shape"))
    if not isinstance(shape, (list, tuple)) or len(shape) != 4:
        return None
    height, width, channels = shape[1:]
    is_fixed = all(type(size) is int and size > 0 for size in (height, width, channels))
    return (height, width, channels) if is_fixed else None


def size_note(path: Path, shape: InputShape) -> str:
    """Returns a note that images get the size of the input of the model in a Keras file."""
    return f"images are brought to {shape[0]}x{shape[1]}, the input of the model in {shown(path)}"


def _as_scaling(input_range: InputRange) -> Optional[Scaling]:
    """Returns a range as a scaling of pixels; None if it is none."""
    return None if input_range.reverse else input_range.scaling


def _text(scaling: Scaling) -> str:
    """Returns a scaling as a formula."""
    factor, offset = (
        " ".join(f"{value:.6g}" for value in np.unique(np.atleast_1d(part))) for part in scaling
    )
    return f"pixels x {factor} + {offset}" if any(np.atleast_1d(scaling.offset)) else f"pixels x {factor}"


def take_over(setup: SomeSetup, path: Path, scaling: Scaling) -> Tuple[SomeSetup, List[str]]:
    """Returns the setup of a registered network with the range of the images in a Keras file, and notes for the user.

    Raises:
        DataError: the range cannot be that of normalised images.
        ConfigurationError: the user gave another range.
    """
    present = _as_scaling(setup.input_range)
    if present is not None and present.equals(scaling):
        return setup, []
    name, doubt = setup.record.name, doubt_of(scaling)
    if doubt:
        hint = _own_network(path, "save the model with a Rescaling(1 / 255) in front")
        unit = " --normalise unit, if it takes images of 0..1" if holds_network(path) else ""
        raise ConfigurationError(
            f"the model in {shown(path)} scales its images to {_text(scaling)}, which {doubt}", hint + unit
        )
    if setup.resolved.origins["normalise"].by_user:
        raise ConfigurationError(
            f"the model in {shown(path)} scales its images to {_text(scaling)}, and --normalise "
            f"{setup.config.normalise} otherwise",
            "drop --normalise",
        )
    channels = setup.input_shape[2]
    factor, offset = (np.broadcast_to(part, (channels,)) for part in scaling)
    if setup.record.task == "segmentation" or not (factor > 0).all():
        raise DataError(
            f"the model in {shown(path)} scales its images to {_text(scaling)}, and {name} gets them in the range "
            f"{setup.input_range.name}",
            "train it on images in that range",
        )
    info = replace(
        setup.source.info, mean=tuple((-offset / factor).tolist()), std=tuple((1 / factor).tolist())
    )
    config = replace(setup.config, normalise="standard")
    setup = replace(setup, resolved=replace(setup.resolved, config=config))
    scaled = setup.in_range("standard", replace(setup.source, info=info))
    return scaled, [f"{name} gets its images as the model in {shown(path)} scales them: {_text(scaling)}"]


def check_scaling(setup: Setup, path: Path) -> List[str]:
    """Refuses weights of a Keras file whose images were scaled otherwise than those of a built network.

    Returns:
        A note for the user if the file does not say how its images were scaled.

    Raises:
        ConfigurationError: the scalings differ.
    """
    own = setup.record.own
    if own is not None and not own.image_scaling.is_certain:
        return []  # the user said it, and check_computes compares both networks on pixels
    try:
        scaling = scaling_of_file(path)
    except DataError:
        if own is None or own.first_rescaling is None:
            raise
        return []  # the layer follows others, and check_computes compares both networks on pixels
    name = range_name(setup.config.normalise, setup.record)
    if scaling is None and setup.resolved.origins["normalise"].by_user:
        return []
    if scaling is None:
        return [
            f"{shown(path)} does not say how its images were scaled; here they are in the range {name}. --normalise "
            "would say it, and so would a Rescaling layer in front of the model"
        ]
    if own is not None and own.architecture is not None and own.first_rescaling is not None:
        first = own.architecture[own.first_rescaling]
        present: Optional[Scaling] = scaling_of(own.architecture.nodes, first.inputs[0])
    else:
        present = _as_scaling(InputRange.of(name, setup.source.info, setup.input_shape[2]))
    if present is not None and present.equals(scaling):
        return []
    hint = "begin the network with the same layer"
    if own is None:
        hint = _own_network(path, hint)
    given = "its images otherwise" if present is None else f"them to {_text(present)}"
    raise ConfigurationError(
        f"the model in {shown(path)} scales its images to {_text(scaling)}, and {shown_value(setup.record.name)} "
        f"gets {given}",
        hint,
    )


_ROUNDING = 1e-3
"""Largest relative difference of what the last layer reads that rounding explains."""


def check_computes(setup: Setup, model: KerasModel, path: Path) -> List[str]:
    """Refuses the weights of a whole model that computes something else than the network that gets them.

    Names and shapes of weights do not tell activations, strides, padding, the epsilon of a norm and the like.

    Args:
        setup: the run's data and shapes.
        model: the network with these weights.
        path: the file; one of weights alone is not compared.

    Returns:
        A note if the file has a model that training does not support, which is not compared, either.

    Raises:
        DataError: they differ.
    """
    own, name = setup.record.own, shown_value(setup.record.name)
    scales = own is not None and own.image_scaling.layer is not None
    end = [node.config.get("activation") for node in (read_model(path) or ())[-1:]]
    if end and end[0] not in (None, "linear", "softmax"):
        raise DataError(
            f"the model in {shown(path)} ends in {shown_value(str(end[0]))}, and {name} in softmax",
            "save it with an end of Dense(num_classes) without activation, or with softmax",
        )
    try:
        theirs = None if setup.record.file == path else model_in_file(path, setup.input_shape, scales)
    except UserError as error:
        return [f"only the shapes of weights say that the model in {shown(path)} is {name}: {error.message}"]
    if theirs is None:
        return []
    images = np.random.default_rng(0).normal(size=(2, *setup.input_shape))
    images = np.float32(255 * images if scales else images)
    if not _compute_the_same(model, theirs, images):
        hint = _own_network(path, "name the network that it was saved from, --model-name my_net.py:build")
        raise DataError(
            f"the model in {shown(path)} has the weights of {name}, and computes something else with them: other "
            "activations, strides, padding or settings of norms, or other layers at the end",
            hint,
        )
    return []


def _compute_the_same(model: KerasModel, theirs: KerasModel, images: np.ndarray) -> bool:
    """Returns whether two networks compute the same of images, up to rounding.

    If their last layers with weights have other weights, because the classes are others, this layer and those behind
    it are new: what it reads is compared.
    """
    from tensorflow import keras

    mine, other = ([layer for layer in network.layers if layer.weights][-1] for network in (model, theirs))
    weights = [last.get_weights() for last in (mine, other)]
    networks = [model, theirs]
    if len(weights[0]) != len(weights[1]) or not all(map(np.array_equal, *weights)):
        networks = [keras.Model(net.inputs[0], end.input) for net, end in zip(networks, (mine, other))]
    one, expected = (np.asarray(network(images, training=False)) for network in networks)
    return one.shape == expected.shape and bool(
        np.abs(one - expected).max() <= _ROUNDING * np.abs(expected).max()
    )
