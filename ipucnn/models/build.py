"""Builds registered models: network, substitutions, seeded weights.

TensorFlow is imported on the first build.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Dict, Optional, Sequence, Tuple

from ipucnn.aliases import KerasModel, Tensor
from ipucnn.errors import ConfigurationError, MissingError, did_you_mean
from ipucnn.models.registry import ModelRecord, validate_input_shape
from ipucnn.text import counted, quoted, shown_value


@dataclass(frozen=True)
class BuildOptions:
    """Options for building a network.

    Attributes:
        input_shape: (height, width, channels).
        num_classes: logits per image or pixel.
        norm: "batch", "group" or "none"; None for the network's own.
        norm_momentum: momentum of batch norm's moving statistics.
        norm_epsilon: epsilon of the norm; None for the network's own (batch) or 1e-5 (group).
        norm_moves_once: whether batch norm's moving statistics move once per weight update.
        norm_groups: number of groups of group norm.
        norm_channels_per_group: channels of a group, instead of ``norm_groups``; if both are None, the number of
            groups is the greatest common divisor of 32 and the layer's channels.
        dropout: rate of the element-wise dropout; None for the network's own; 0 also switches drop connect off.
        base_filters: filters of U-Net's first block; None for the network's own.
        batch_size: static batch size; None for any.
        seed: seed of the initial weights.
    """

    input_shape: Tuple[int, int, int]
    num_classes: int
    norm: Optional[str] = None
    norm_momentum: float = 0.97
    norm_epsilon: Optional[float] = None
    norm_moves_once: bool = False
    norm_groups: Optional[int] = None
    norm_channels_per_group: Optional[int] = None
    dropout: Optional[float] = None
    base_filters: Optional[int] = None
    batch_size: Optional[int] = None
    seed: int = 0


def check_requirements(record: ModelRecord) -> None:
    """Checks that the installed Keras is new enough for a network.

    Raises:
        MissingError: it is older than the network needs.
    """
    if record.requires is None:
        return
    from ipucnn.compat import KERAS_VERSION

    version = record.requires[len("Keras ") :]
    if tuple(int(part) for part in version.split(".")) > KERAS_VERSION:
        installed = ".".join(str(part) for part in KERAS_VERSION)
        raise MissingError(
            f"{record.name} needs Keras {version} or newer, and this is Keras {installed}",
            "use a newer TensorFlow, or one of `ipucnn models 'efficientnet-b*'`",
        )


def _check_norm(record: ModelRecord, options: BuildOptions) -> str:
    norm = options.norm or record.default_norm
    if norm not in record.norms:
        known = " or ".join(record.norms)
        if record.norms == ("none",):
            raise ConfigurationError(
                f"{record.name} has no normalisation layers to replace by {norm} norm", "--norm-layer none"
            )
        raise ConfigurationError(f"{record.name} can't be built with norm '{norm}'", f"it takes {known}")
    if norm != "group" and (options.norm_groups is not None or options.norm_channels_per_group is not None):
        raise ConfigurationError(
            f"a number of groups was given, but the norm is '{norm}'", "--norm-layer group_norm"
        )
    return norm


def check_options(record: ModelRecord, options: BuildOptions) -> Tuple[str, Dict[str, Any]]:
    """Checks the options that can be checked without building; does not need TensorFlow.

    Returns:
        The normalisation and the builder's arguments.

    Raises:
        ConfigurationError: the network does not support an option.
    """
    validate_input_shape(record, options.input_shape)
    if options.num_classes < 1:
        raise ConfigurationError(
            f"{record.name} needs at least one class, got {options.num_classes}", "give --classes 10"
        )
    norm = _check_norm(record, options)
    arguments = dict(record.builder_args)
    if options.base_filters is not None:
        if "base_filters" not in arguments:
            raise ConfigurationError(f"{record.name} has no --base-filters", "only unet has")
        if options.base_filters < 1:
            raise ConfigurationError(
                f"--base-filters must be at least 1, got {options.base_filters}", "--base-filters 1"
            )
        arguments["base_filters"] = options.base_filters
    return norm, arguments


BACKBONE = "backbone"
"""Value of ``--freeze`` for all layers with weights except the last one, the head."""


def layers_to_freeze(freeze: str, names: Sequence[str], model: str) -> Tuple[str, ...]:
    """The layers that ``--freeze`` selects.

    Args:
        freeze: a number of layers, counted from the input; ``backbone``; or shell patterns separated by commas.
        names: names of the layers with weights, in the network's order.
        model: name of the network, for messages.

    Returns:
        Names of the selected layers, in the network's order.

    Raises:
        ConfigurationError: no layer matches a pattern, or no layer would be left to train.
    """
    if freeze == BACKBONE:
        chosen = list(names[:-1])
    elif freeze.isdigit():
        chosen = list(names[: int(freeze)])
    else:
        patterns = freeze.split(",")
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigurationError(
                    f"--freeze {shown_value(pattern)}: no layer of {model} that has weights is called so",
                    did_you_mean(pattern.strip("*?"), names)
                    or f"`ipucnn models {quoted(model)} --summary` lists the layers; for example --freeze '{names[0]}'",
                )
        chosen = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if len(chosen) == len(names):
        raise ConfigurationError(
            f"--freeze {shown_value(freeze)} freezes all {counted(len(names), 'layer')} of {model} that have weights: "
            "nothing is left to train",
            f"use --freeze {BACKBONE} to train the last one alone, or a number from 1 to {len(names) - 1}",
        )
    return tuple(chosen)


def freeze_layers(model: KerasModel, freeze: str, has_new_head: bool = False) -> Tuple[str, ...]:
    """Freezes the layers that ``--freeze`` selects.

    Frozen layers have no gradients and no optimizer state; a frozen batch norm keeps its statistics.

    Args:
        freeze: as in :func:`layers_to_freeze`.
        has_new_head: whether the last layer has its initial weights.

    Returns:
        The names of the frozen layers.

    Raises:
        ConfigurationError: as :func:`layers_to_freeze`; or a new head would be frozen.
    """
    names = [layer.name for layer in model.layers if layer.weights]
    frozen = layers_to_freeze(freeze, names, model.name)
    if has_new_head and names[-1] in frozen:
        raise ConfigurationError(
            f"--freeze {shown_value(freeze)} freezes {names[-1]}, which is new: the weights are of other classes",
            f"leave it out, for example with --freeze {BACKBONE}",
        )
    for name in frozen:
        model.get_layer(name).trainable = False
    return frozen


def build_model(record: ModelRecord, options: BuildOptions) -> KerasModel:
    """Builds a registered network as a functional Keras model.

    Batch norm, group norm and dropout are the layers of ``ipucnn.models.layers``.  Layer names are canonical.  The
    outputs are logits, (batch, classes) or (batch, height, width, classes).  The initial weights are a pure function
    of ``options.seed`` and the layers' names.

    Raises:
        ConfigurationError: the network does not support an option.
        MissingError: the installed Keras lacks the network.
    """
    norm, arguments = check_options(record, options)
    check_requirements(record)

    from tensorflow import keras

    from ipucnn.models import editing
    from ipucnn.models.blueprint import INPUT_NAME, assemble, remove_softmax
    from ipucnn.models.names import name_input
    from ipucnn.models.own import seeded_generators
    from ipucnn.models.preprocessing import strip_preprocessing

    shape = tuple(int(n) for n in options.input_shape)

    def images() -> Tensor:
        return keras.Input(shape, batch_size=options.batch_size, name=INPUT_NAME, dtype="float32")

    if record.own is not None:
        arguments["seed"] = options.seed
    blueprint = record.builder(images(), options.num_classes, **arguments)
    name_input(blueprint)
    if record.own is None:
        strip_preprocessing(blueprint)
        remove_softmax(blueprint)
    if norm != "batch" and record.own is not None:
        editing.check_replaceable_norms(blueprint, norm)
    if norm == "batch":
        editing.set_batch_norm(
            blueprint, options.norm_momentum, options.norm_epsilon, options.norm_moves_once
        )
    elif norm == "group":
        editing.set_group_norm(
            blueprint, options.norm_groups, options.norm_channels_per_group, options.norm_epsilon
        )
    else:
        editing.remove_norm(blueprint)
    editing.set_dropout(blueprint, options.dropout)
    editing.seed_weights(blueprint, options.seed)
    if record.own is None:
        return assemble(blueprint, images(), record.name)
    # The user's own layers draw their initial weights from the process' global generators.
    with seeded_generators(options.seed, "initial weights"):
        return assemble(blueprint, images(), record.own.label)
