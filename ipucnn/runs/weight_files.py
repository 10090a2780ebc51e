"""How the images of a Keras file were scaled, and whether the network that gets its weights has the same images.

A whole model may begin with Rescaling or Normalization.  A registered network has no such layers, so evaluation takes
their numbers over, in place of the network's input range; training refuses them.  A user's own network keeps its
layers, which have to be those of the file.
"""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import List, Optional, Tuple

import numpy as np

from ipucnn.datasets.pixels import InputRange, Scaling
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.filesystem import shown
from ipucnn.models.keras_files import has_statistics, read_model, read_statistics
from ipucnn.models.preprocessing import preprocessing_of, scaling_of
from ipucnn.models.registry import ModelRecord
from ipucnn.runs.setup import Setup, SomeSetup, range_name
from ipucnn.text import shown_value


def file_with_weights(record: ModelRecord) -> Optional[Path]:
    """Returns the Keras file that a network was read from, whose weights are beside it; None for other networks."""
    return record.file if record.own is not None and record.own.make is None else None


def check_frozen_weights(record: ModelRecord) -> None:
    """Refuses to draw the weights of frozen layers of a Keras file, which would keep them.

    Raises:
        ConfigurationError: there is such a layer.
    """
    own = record.own
    if own is None or file_with_weights(record) is None:
        return
    name, frozen = shown_value(record.name), own.frozen_layers
    if frozen:
        raise ConfigurationError(
            f"{name}: layer '{shown_value(frozen[0])}' is frozen (trainable=False), and training would draw weights "
            "for it",
            f"begin with the weights in the file: --weights {shlex.quote(record.name)}",
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
        raise DataError(error.message, error.hint) from None


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
    """
    present = _as_scaling(setup.input_range)
    if present is not None and present.equals(scaling):
        return setup, []
    name = setup.record.name
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
    own, scaling = setup.record.own, scaling_of_file(path)
    name = range_name(setup.config.normalise, setup.record)
    if scaling is None:
        return [f"{shown(path)} does not say how its images were scaled; here they are in the range {name}"]
    if own is not None and own.architecture is not None and own.first_rescaling is not None:
        present: Optional[Scaling] = scaling_of(own.architecture.nodes)
    else:
        present = _as_scaling(InputRange.of(name, setup.source.info, setup.input_shape[2]))
    if present is not None and present.equals(scaling):
        return []
    hint = "begin the network with the same layer"
    if own is None:
        hint = "save the network with Keras 3 as .keras, which trains with its own layers: ipucnn train my_net.keras"
    given = "its images otherwise" if present is None else f"them to {_text(present)}"
    raise ConfigurationError(
        f"the model in {shown(path)} scales its images to {_text(scaling)}, and {shown_value(setup.record.name)} "
        f"gets {given}",
        hint,
    )
