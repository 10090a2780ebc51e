"""How a user's own Keras network becomes one that is trained here: the only module that decides it.

A network comes from a function in a Python file or an installed package (:func:`of_function`), from a file that Keras
saved (:func:`of_keras_file`) or from a checkpoint (:func:`of_checkpoint`).  Then:

1. The function is called, once for each build; a Python file is run only if the command line names it.
2. Keras' configuration of the model, or of the file, is read as nodes (``keras_config.py``).
3. Each node becomes a stock layer with plain settings (``settings.py``), or is refused (:func:`_accepted`): training
   would not compute it as Keras does.  A softmax at the end is left out.  The result is the network's architecture,
   which checkpoints store as data: names of stock layers, their settings and inputs.  None of it is run as code, so
   data from others, such as a run folder, can at worst give a wrong network.
4. :meth:`OwnNetwork.blueprint` builds the network with Keras' layers, checks what only a built network shows, and
   exchanges layers for those of this package.  ``build.py`` then continues as with registered networks.

Layers of the user's own classes are not exchanged.  They may mix the samples of a micro-batch, so micro-batches are
computed one by one.  A layer that keeps state from batch to batch, or draws random numbers itself, is refused, because
a resumed run could not continue to the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import random
import zlib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple, Union

import numpy as np

from ipucnn.aliases import KerasConfig, KerasLayer, KerasModel, KerasVariable, PlainValue, Tensor, TfVariable
from ipucnn.errors import ConfigurationError, DataError, UserError, text_of
from ipucnn.filesystem import new_file, read_bytes, shown
from ipucnn.models.blueprint import (
    INPUT_LAYER,
    INPUT_NAME,
    Blueprint,
    LayerSample,
    Node,
    NotMadeError,
    assemble,
    remove_softmax,
)
from ipucnn.models.counts import is_estimated
from ipucnn.models.keras_config import (
    LAYER_OF_OPERATION,
    is_of_keras,
    output_shape,
    read_nodes,
    stock_kind,
)
from ipucnn.models.keras_files import (
    keras_of_file,
    load_keras_weights,
    read_configuration,
    read_model,
    read_statistics,
)
from ipucnn.models.names import added_to_loss, base_name, named_weights, penalties, penalties_of, weights_of
from ipucnn.models.preprocessing import (
    PREPROCESSING,
    ImageScaling,
    Statistics,
    as_rescaling,
    channels_of,
    image_scaling,
    rescaling_of_operation,
    strip_preprocessing,
)
from ipucnn.models.settings import check_activations, formulas_of, keras_settings, plain_settings
from ipucnn.python_files import OwnFunction, label_of, own_code_failed
from ipucnn.text import counted, quoted, shown_value

PER_SAMPLE = (
    "Activation", "Add", "Average", "AveragePooling2D", "BatchNormalization", "Concatenate", "Conv2D",
    "Conv2DTranspose", "Cropping2D", "Dense", "DepthwiseConv2D", "Dropout", "ELU", "Flatten", "GlobalAveragePooling2D",
    "GlobalMaxPooling2D", "GroupNormalization", "Identity", "LayerNormalization", "LeakyReLU", "MaxPooling2D",
    "Maximum", "Minimum", "Multiply", "PReLU", "Permute", "ReLU", "Rescaling", "Reshape", "SeparableConv2D", "Softmax",
    "SpatialDropout2D", "Subtract", "UpSampling2D", "ZeroPadding2D",
)  # fmt: skip
"""Stock layers that compute each sample separately and have no state, and layers that are exchanged for such ones."""
# Keras layers that augment images, in addition to those whose names begin with Random.
_AUGMENTING = ("AugMix", "CutMix", "MixUp", "RandAugment")
# How a checkpoint says that a layer is called so.
_NO_TRAINING = {"training": False}
_OFF_BY_DEFAULT = ("Dropout", "GaussianDropout", "GaussianNoise", "SpatialDropout2D")
_NOISE = ("AlphaDropout", "GaussianDropout", "GaussianNoise")
# Layers without weights whose outputs are probabilities if their inputs are.
_KEEPS_PROBABILITIES = (
    "Activation", "Add", "Average", "AveragePooling2D", "Concatenate", "Dropout", "Flatten", "GlobalAveragePooling2D",
    "GlobalMaxPooling2D", "Identity", "Maximum", "Minimum", "Multiply", "Permute", "Rescaling", "Reshape",
    "SpatialDropout2D",
)  # fmt: skip
# How the versions of Keras record images[..., ::-1], with which preprocess_input of ResNet and VGG begins.
_SLICES = ("GetItem", "SlicingOpLambda")
_COMPILED = "what its compile() sets is not used: --loss, --optimizer and other options say how it is trained"
_CONTRACT = "docs/own-networks.md says what the function is given and what it returns"
# Stateful operations that only read variables, call functions, or check.  All others change state for the next call,
# draw random numbers from hidden state, or run Python code.
_READS = (
    "Assert", "Case", "If", "PartitionedCall", "ReadVariableOp", "ResourceGather", "ResourceGatherNd",
    "StatefulPartitionedCall", "VarHandleOp", "VarIsInitializedOp", "VariableShape", "While",
)  # fmt: skip
_KEPT_BY_GROUP_NORM = ("groups", "epsilon", "gamma_regularizer", "beta_regularizer")
_ROWS = "without_channels"
_SAMPLED = 16
"""How many outputs of a user's own layer are kept, to know it again."""
_ANY_SIDE = 32
_HINT_OF_OWN_LAYERS = (
    "let __init__ of the layer's class take **kwargs and call super().__init__(**kwargs), and let get_config return "
    "every other argument"
)
Make = Callable[..., Any]


@dataclass(eq=False)
class OwnNetwork:
    """A network that is not registered.

    Attributes:
        name: the user's name of the network.
        sha256: digest of its file; for an installed package, of the entry point's value.
        make: function from (input shape, number of classes) to a Keras model; None if the architecture is known.
        architecture: the network as data, without the batch in the shapes of its input; for a function, None until it
            has been called.
        needs: the hint to name its file, for a network that is known only from a run folder or checkpoint and needs
            the user's code; otherwise None.
        remarks: what conversion changed, a sentence each.
        trained_as: the network in the checkpoint whose weights a function's network gets; None without a checkpoint.
        trained_scaling: the layer that scales the images, as the checkpoint says; None without a checkpoint.
    """

    name: str
    sha256: str
    make: Optional[Make] = None
    architecture: Optional[Blueprint] = None
    needs: Optional[str] = None
    remarks: Sequence[str] = ()
    trained_as: Optional[Blueprint] = None
    trained_scaling: Optional[ImageScaling] = None
    _called: Optional[Tuple[Tuple[int, ...], int, int]] = None

    @property
    def label(self) -> str:
        """A short name whose characters are valid in names of folders and layers."""
        return label_of(self.name)

    @property
    def has_own_code(self) -> bool:
        """Whether only the user's own code can build it; True for a function that has not been called yet."""
        return self.make is not None if self.architecture is None else bool(_own_nodes(self.architecture))

    @property
    def input_shape(self) -> Tuple[Optional[int], ...]:
        """(height, width, channels) of its input; None for sizes that the data determine."""
        known = self.architecture if self.make is None else None
        return (None, None, None) if known is None else _input_sizes(known)

    @property
    def num_classes(self) -> Optional[int]:
        """Its number of logits, from the last layer's ``units``; None if the data determine it."""
        if self.architecture is None or self.make is not None:
            return None
        units = self.architecture[self.architecture.output].config.get("units")
        return units if isinstance(units, int) else None

    @property
    def image_scaling(self) -> ImageScaling:
        """The layer that scales pixels of 0..255; none for a function that was not called."""
        if self.trained_scaling is not None:
            return self.trained_scaling
        return ImageScaling(None) if self.architecture is None else image_scaling(self.architecture.nodes)

    @property
    def first_rescaling(self) -> Optional[str]:
        """Name of the layer that certainly scales pixels of 0..255; None without it."""
        scaling = self.image_scaling
        return scaling.layer if scaling.is_certain else None

    @property
    def notes(self) -> List[str]:
        """Remarks for the user about the network, a sentence each."""
        notes, known = list(self.remarks), self.architecture
        own_nodes = [] if known is None else _own_nodes(known)
        if own_nodes:
            kinds = ", ".join(f"{shown_value(node.name)} ({node.kind})" for node in own_nodes)
            notes.append(
                f"micro-batches are computed one by one, because layers of its own may mix their samples: {kinds}"
            )
        return [f"{shown_value(self.name)}: {note}" for note in notes]

    @property
    def may_mix_samples(self) -> bool:
        """Whether a layer is of a class of the user's own, which may compute a sample by others of its micro-batch."""
        return self.architecture is not None and bool(_own_nodes(self.architecture))

    @property
    def frozen_layers(self) -> List[str]:
        """Names of the layers whose weights training does not change."""
        return [node.name for node in self._weighted() if node.config.get("trainable") is False]

    @property
    def num_weighted(self) -> int:
        """Number of layers that may have weights."""
        return len(self._weighted())

    def _weighted(self) -> List[Node]:
        return [
            node
            for node in ([] if self.architecture is None else self.architecture.nodes)
            if node.name == node.layer
            and (node.is_own or any(key.endswith("_initializer") for key in node.config))
        ]

    @property
    def kept_layers(self) -> List[Tuple[str, str]]:
        """Layers with weights or statistics that training does not change: the name, and how it is so."""
        nodes, frozen = [] if self.architecture is None else self.architecture.nodes, self.frozen_layers
        return [
            *((name, "is frozen (trainable=False)") for name in frozen),
            *(
                (node.name, "keeps its statistics (training=False)")
                for node in nodes
                if node.infers and node.name not in frozen
            ),
        ]

    def to_data(self) -> Dict[str, Any]:
        """The built network as data for a checkpoint, from which it can be rebuilt, except for the user's classes."""
        assert self.architecture is not None
        layers = [
            [
                node.name,
                node.kind,
                None if node.is_own else {**node.config, **(_NO_TRAINING if node.infers else {})},
                tuple(node.inputs),
                *([node.layer] if node.layer != node.name else []),
            ]
            for node in self.architecture.nodes[1:]
        ]
        shape = list(_input_sizes(self.architecture))
        return {
            "name": self.name,
            "sha256": self.sha256,
            "input_shape": shape,
            "layers": layers,
            "samples": {
                node.name: node.sample for node in self.architecture.nodes if node.sample is not None
            },
            "scaled_by": self.first_rescaling,
        }

    def check_buildable(self) -> None:
        """Checks that the file that the network needs was named on the command line.

        Raises:
            ConfigurationError: it was not named; the hint says what to type.
        """
        if self.needs is None:
            return
        layers = [] if self.architecture is None else [node.name for node in _own_nodes(self.architecture)]
        parts = f"layers of its own ({', '.join(map(shown_value, layers))})" if layers else "layers"
        raise ConfigurationError(
            f"the network is {shown_value(self.name)}, whose {parts} are in that file alone, and a file is run only if "
            "the command line names it",
            f"if you trust it, {self.needs}",
        )

    def check_input(self, shape: Sequence[int]) -> None:
        """Refuses images of a shape that does not fit the known sizes of the network's input.

        Raises:
            ConfigurationError: the shape does not fit.
        """
        known = () if self.architecture is None else _input_sizes(self.architecture)
        if all(size in (None, given) for size, given in zip(known, shape)):
            return
        takes = "x".join("any" if n is None else str(n) for n in known)
        hint = "build it for the shape that the function is given"
        if self.make is None:
            hint = "drop --image-size, or take data of as many channels"
        raise ConfigurationError(
            f"{shown_value(self.name)} takes images of {takes}, and is to be built for "
            f"{'x'.join(map(str, shape))} (height, width, channels)",
            hint,
        )

    def changes_since(self, network: PlainValue, what: str) -> List[str]:
        """Returns a note on layers that compute something else than those whose weights the network starts from.

        Args:
            network: what :meth:`to_data` returned for the network whose weights these are.
            what: name of the checkpoint that contains it, for messages.
        """
        former = of_checkpoint(self.name, network, what, "").architecture
        assert self.architecture is not None and former is not None
        known = {node.name: node for node in former.nodes if node.name != former.output}
        pairs = [(node, known[node.name]) for node in self.architecture.nodes if node.name in known]
        changed = list(
            filter(None, (_changed_setting(*pair) for pair in pairs if pair[0].kind == pair[1].kind))
        )
        more = f", and {counted(len(changed) - 1, 'more layer')}" if len(changed) > 1 else ""
        return [f"{shown_value(self.name)} has {changed[0]}{more}"] if changed else []

    def call(self, shape: Sequence[int], num_classes: int, seed: int) -> None:
        """Calls the function that makes the network, if there is one and it was not just called with these arguments.

        Raises:
            ConfigurationError: as :meth:`blueprint`.
        """
        key = tuple(map(int, shape)), num_classes, seed
        if self.make is None or self._called == key:
            return
        self.check_buildable()
        from ipucnn.compat import KERAS_3

        name = shown_value(self.name)
        model, first_values = _called(name, self.make, *key)
        try:
            config = model.get_config()
        except UserError:
            raise
        except Exception as error:
            hint = _HINT_OF_OWN_LAYERS if isinstance(error, NotImplementedError) else "fix that line"
            raise own_code_failed(error, f"get_config of a layer of {name}", hint=hint) from error
        kind = "Sequential" if type(model).__name__ == "Sequential" else "Functional"
        nodes = read_nodes(name, kind, config, canonical=True)
        _check_places(name, nodes, model)
        _freeze_as_keras(name, nodes, model)
        self.architecture, self.remarks = _architecture_of(
            name, nodes, 3 if KERAS_3 else 2, _measured_in(model), model
        )
        if getattr(model, "optimizer", None) is not None:
            self.remarks = (*self.remarks, _COMPILED)
        _check_losses(name, nodes, model)
        _check_initial_weights(name, nodes, model, first_values)
        ends, places = _ends(self.architecture), {node.name: node for node in nodes}
        for node in _own_nodes(self.architecture):
            node.sample = _check_remade(name, node, places[node.name].layer_in(model), node.name in ends)
        _check_trained_as(name, self.architecture, self.trained_as)
        self._called = key

    def check_trained(self, model: KerasModel, has_new_head: bool) -> None:
        """Refuses to train the built network if all its layers are frozen, or a last layer that is new.

        Args:
            model: the network as training has it, after ``--freeze``.
            has_new_head: whether the last layer has its initial weights.

        Raises:
            ConfigurationError: nothing would be trained, or the last layer would stay random.
        """
        weighted = [layer for layer in model.layers if layer.weights]
        trained = [layer for layer in weighted if layer.trainable_weights]
        if trained and not (has_new_head and weighted[-1] is not trained[-1]):
            return
        hint = "set trainable = True for the layers to train, in the function"
        if self.make is None:
            old, new = (
                json.dumps(str(path)) for path in (self.name, new_file(Path(self.name).with_suffix(".h5")))
            )
            load = f"from tensorflow.keras import models; m = models.load_model({old})"
            line = quoted(f"{load}; m.trainable = True; m.save({new})")
            hint = f"make a file whose layers are trained: python -c {line}"
        reason = f"all {counted(len(weighted), 'layer')} with weights are frozen: nothing is left to train"
        if trained:
            reason = f"its last layer, {weighted[-1].name}, is frozen, and new, as the weights are of other classes"
        raise ConfigurationError(f"{shown_value(self.name)}: {reason}", hint)

    def blueprint(self, images: Tensor, num_classes: int, seed: int = 0) -> Blueprint:
        """Makes the blueprint of the network, with layers of Keras, of this package and of the user.

        Raises:
            ConfigurationError: training would not compute a layer as Keras does; the message names it.
        """
        from ipucnn.models.editing import use_grouped_convolutions

        shape = tuple(int(n) for n in images.shape[1:])
        self.check_buildable()
        self.call(shape, num_classes, seed)
        self._called = None
        assert self.architecture is not None
        self.check_input(shape)
        name = shown_value(self.name)
        if self.make is None:
            self._fit_head(num_classes)
        blueprint = _of_installed_keras(name, self.architecture)
        with seeded_generators(seed, "own"):
            try:
                model = assemble(_without_regularizers(blueprint), images, "own")
            except NotMadeError as error:
                where = f"{name}: layer '{shown_value(error.node.layer)}' ({shown_value(error.node.kind)})"
                raise ConfigurationError(
                    f"{where} cannot be made again from its settings: {_one_line(error.__cause__ or error)}",
                    _HINT_OF_OWN_LAYERS if error.node.is_own else "change the settings of that layer",
                ) from error
            except Exception as error:
                raise ConfigurationError(
                    f"{name} cannot be built for images of {'x'.join(map(str, shape))}: {_one_line(error)}",
                    _HINT_OF_OWN_LAYERS if self.has_own_code else "change the network or --image-size",
                ) from error
        _check_axes(name, blueprint, model)
        self._check_output(model, num_classes)
        for node in _own_nodes(self.architecture):
            _check_own_layer(name, model.get_layer(node.layer))
            _check_penalties(name, node, model.get_layer(node.layer))
        if model.losses:
            raise ConfigurationError(
                f"{name}: its layers add {counted(len(model.losses), 'loss')}, and training has its own",
                "drop them; give stock layers kernel_regularizer='l2', or use --weight-decay",
            )
        _exchange(blueprint, model, name)
        use_grouped_convolutions(blueprint)
        return blueprint

    def _fit_head(self, num_classes: int) -> None:
        """Gives the last layer of a network from a file as many logits as there are classes, if it is a Dense layer."""
        assert self.architecture is not None
        last = self.architecture[self.architecture.output]
        units = last.config.get("units")
        if last.kind != "Dense" or last.is_own or units == num_classes:
            return
        was_frozen = last.config.get("trainable") is False
        changed = replace(last, config={**last.config, "units": num_classes, "trainable": True})
        nodes = [changed if node is last else node for node in self.architecture.nodes]
        self.architecture = Blueprint(nodes, self.architecture.output)
        self.remarks = (
            *self.remarks,
            f"its last layer, {shown_value(last.name)}, is new: it gives {counted(num_classes, 'logit')}, one for each "
            f"class of the data, in place of {units}"
            + ("; it is trained, and was frozen" if was_frozen else ""),
        )

    def _check_output(self, model: KerasModel, num_classes: int) -> None:
        shape = tuple(model.output.shape)
        if len(shape) == 2 and shape[1] == num_classes:
            return
        gives = (
            counted(int(shape[1] or 0), "logit") if len(shape) == 2 else f"numbers of the shape {shape[1:]}"
        )
        hint = "take data of as many classes, or save the network with another last layer"
        if len(shape) == 4:
            hint = "end it with keras.layers.Dense(num_classes), to classify images; masks are for the network unet"
        elif self.make is not None:
            hint = "end it with keras.layers.Dense(num_classes)"
        raise ConfigurationError(
            f"{shown_value(self.name)} gives {gives} for each image, and the data have "
            f"{counted(num_classes, 'class')}",
            hint,
        )


def _one_line(error: BaseException) -> str:
    return shown_value(" ".join(text_of(error).split()))


def _own_nodes(blueprint: Blueprint) -> List[Node]:
    return [node for node in blueprint.nodes if node.is_own]


def _without_regularizers(blueprint: Blueprint) -> Blueprint:
    nodes = [
        replace(node, config={k: v for k, v in node.config.items() if not k.endswith("_regularizer")})
        for node in blueprint.nodes
    ]
    return Blueprint(nodes, blueprint.output)


def _input_sizes(blueprint: Blueprint) -> Tuple[Optional[int], ...]:
    """(height, width, channels) of the input; None for a size that is not fixed."""
    return tuple(blueprint.nodes[0].config["batch_shape"][1:])


# --- calling a user's function


def _called(
    name: str, make: Make, shape: Tuple[int, ...], num_classes: int, seed: int
) -> Tuple[KerasModel, FirstValues]:
    """The model that a user's function returns, and the first values of its weights.

    Raises:
        ConfigurationError: it is no functional or sequential model, or the function sets Keras' number type.
    """
    from tensorflow import keras

    old_policy, old_type = keras.mixed_precision.global_policy(), keras.backend.floatx()
    with seeded_generators(seed, "own"), _first_values() as first_values:
        model = make(shape, num_classes)
    policy = keras.mixed_precision.global_policy().name
    if keras.backend.floatx() != old_type:
        policy = keras.backend.floatx()
        keras.backend.set_floatx(old_type)
    if policy != "float32":
        # Otherwise later networks of this process would also get this policy.
        keras.mixed_precision.set_global_policy(old_policy)
        raise ConfigurationError(
            f"{name} sets the type of all of Keras' layers to {policy}",
            "leave types out of the network: --precision 16.16 trains in 16 bits",
        )
    other = type(model).__module__
    if not isinstance(model, keras.Model) and "keras" in other:
        raise ConfigurationError(
            f"{name} returned a {shown_value(type(model).__name__)} of {shown_value(other)}, which is not TensorFlow's "
            "Keras",
            "import it with: from tensorflow import keras",
        )
    if not isinstance(model, keras.Model):
        raise ConfigurationError(
            f"{name} returned {shown_value(type(model).__name__)} instead of a functional or sequential model",
            _CONTRACT,
        )
    is_graph = isinstance(model, keras.Sequential) or getattr(model, "_is_graph_network", False)
    if not (
        is_graph or type(model) is keras.Model or "Functional" in {c.__name__ for c in type(model).__mro__}
    ):
        raise ConfigurationError(
            f"{name} returned a {shown_value(type(model).__name__)}, a model whose layers are hidden in its code",
            "return keras.Model(inputs, outputs), or a keras.Sequential",
        )
    changed = [
        method
        for kind in type(model).__mro__
        for method in ("call", "train_step", "test_step", "compute_loss")
        if method in vars(kind) and not is_of_keras(kind.__module__)
    ]
    if changed:
        raise ConfigurationError(
            f"{name} returned a {shown_value(type(model).__name__)}, whose {changed[0]} is its own, and training knows "
            "its layers alone",
            "return keras.Model(inputs, outputs), or a keras.Sequential",
        )
    return model, first_values


FirstValues = Dict[int, Tuple[KerasVariable, Tensor]]
"""Identity of a weight -> the weight, and its value when its layer created it."""


@contextlib.contextmanager
def _first_values() -> Iterator[FirstValues]:
    """Records the first value of each weight that a layer creates inside the block."""
    import tensorflow as tf
    from tensorflow import keras

    from ipucnn.compat import tf_variable

    values: FirstValues = {}
    add_weight = keras.layers.Layer.add_weight

    def recording(layer: KerasLayer, *arguments: object, **named: object) -> KerasVariable:
        weight = add_weight(layer, *arguments, **named)
        # A layer that creates weights while it is traced has no values yet.
        if tf.executing_eagerly() and getattr(weight, "_value", weight) is not None:
            values[id(weight)] = weight, tf_variable(weight).read_value()
        return weight

    keras.layers.Layer.add_weight = recording
    try:
        yield values
    finally:
        keras.layers.Layer.add_weight = add_weight


def _check_places(name: str, nodes: Sequence[Node], model: KerasModel) -> None:
    """Refuses a layer that is called at two levels of models within models: its calls would be two layers here.

    Raises:
        ConfigurationError: there is such a layer.
    """
    first_nodes: Dict[int, Node] = {}
    for node in nodes:
        if node.kind == INPUT_LAYER:
            continue  # a Sequential does not list its input among its layers
        first = node if not node.has_layer else first_nodes.setdefault(id(node.layer_in(model)), node)
        if first.place != node.place:
            raise ConfigurationError(
                f"{name}: layers '{shown_value(first.layer)}' and '{shown_value(node.layer)}' are one layer, in two "
                "models",
                "call the model that contains it from one of them only",
            )


def _freeze_as_keras(name: str, nodes: Sequence[Node], model: KerasModel) -> None:
    """Sets which layers are frozen: a layer may have been unfrozen after the model around it was frozen.

    Keras 3 then trains it, and Keras 2.6 does not, but for the statistics of batch norm.

    Raises:
        ConfigurationError: a batch norm is neither frozen nor trained.
    """
    from ipucnn.compat import KERAS_3

    for node in nodes:
        if not node.has_layer or node.kind == INPUT_LAYER:
            continue
        around = [model]
        for part in node.place[:-1]:
            around.append(next(layer for layer in around[-1].layers if layer.name == part))
        layer = node.layer_in(model)
        is_trained = layer.trainable and all(one.trainable for one in (around[:1] if KERAS_3 else around))
        if node.stock == "BatchNormalization" and is_trained != layer.trainable:
            raise ConfigurationError(
                f"{name}: layer '{shown_value(node.layer)}' ({node.kind}) is not frozen, and a model around it is",
                "freeze or unfreeze the model first, and then its layers",
            )
        untrained = [
            base_name(weight.name)
            for weight in getattr(layer, "_trainable_variables", ())  # of Keras 3
            if stock_kind(layer) and not weight.trainable
        ]
        if layer.trainable and untrained and not getattr(layer, "lora_enabled", False):
            raise ConfigurationError(
                f"{name}: layer '{shown_value(node.layer)}' ({node.kind}) is trained, and its {untrained[0]} is not",
                "freeze the whole layer: layer.trainable = False",
            )
        if node.config.get("trainable", True) != is_trained:
            node.config["trainable"] = is_trained


def _check_losses(name: str, nodes: Sequence[Node], model: KerasModel) -> None:
    """Refuses layers and models that add something else to the loss than the regularizers in their settings.

    Keras adds what a layer had when it was built, and what ``add_loss`` gave it.

    Raises:
        ConfigurationError: there is such a layer or model; the message names it.
    """
    from ipucnn.compat import KERAS_3

    hint = "give stock layers kernel_regularizer='l2' when they are made, or use --weight-decay"
    rng = np.random.default_rng(0)
    layers = {id(node.layer_in(model)): node for node in nodes if node.has_layer and node.kind != INPUT_LAYER}
    for node in layers.values():
        layer, is_own = node.layer_in(model), not stock_kind(node.layer_in(model))
        factors = penalties_of(node.config) if layer.trainable or not KERAS_3 else {}
        if is_own and any(map(any, factors.values())):
            continue  # compared when it is made again
        kept = layer.get_weights()
        try:
            if not (factors or layer.losses):
                continue  # drawing weights for large layers takes seconds
            layer.set_weights([np.asarray(rng.uniform(0.1, 0.9, one.shape), one.dtype) for one in kept])
            added = float(sum(np.asarray(loss, np.float64).sum() for loss in layer.losses))
            expected = added_to_loss(factors, weights_of(layer))
        except Exception:  # a loss of tensors, which is refused later
            continue
        finally:
            layer.set_weights(kept)
        if not np.isclose(added, expected, 1e-4):
            raise ConfigurationError(
                f"{name}: layer '{shown_value(node.layer)}' ({node.kind}) adds to the loss something else than the "
                "regularizers in its settings",
                hint,
            )
    around = [model, *(layer for layer in model._flatten_layers() if hasattr(layer, "layers"))]
    if any(getattr(one, "_callable_losses", None) for one in around):  # of Keras 2.6
        raise ConfigurationError(
            f"{name}: add_loss of a model adds to its loss, and training has its own", hint
        )


def _check_initial_weights(
    name: str, nodes: Sequence[Node], model: KerasModel, first_values: FirstValues
) -> None:
    """Refuses weights that the function set, or that it took from a layer made before: training draws its own.

    Raises:
        ConfigurationError: a layer has such weights; the message names it.
    """

    def is_set(layer: KerasLayer, weight: TfVariable) -> bool:
        first = first_values.get(id(weight), (weight, None))[1]
        if first is None:
            return bool(stock_kind(layer))  # else a variable of the user's own
        return not np.array_equal(np.asarray(first), np.asarray(weight.numpy()))

    with_weights, found = 0, []
    for node in nodes:
        if not node.has_layer or node.stock in (INPUT_LAYER, "Normalization"):
            continue
        layer = node.layer_in(model)
        changed = [base_name(weight.name) for weight in layer.weights if is_set(layer, weight)]
        with_weights += bool(layer.weights)
        found += [(node, changed)] if changed else []
    if not found:
        return
    node, (base, *_) = found[0]
    hint = "return it untrained (weights=None); --weights begins with weights that were trained"
    if len(found) > max(1, with_weights // 2):
        hint = (
            "return it untrained (weights=None), or name the file that has its weights, as Keras saved it: "
            "--model-name my_net.keras --weights my_net.keras"
        )
    elif f"{base}_initializer" in node.config and node.stock != "BatchNormalization":
        constant = f"{base}_initializer=keras.initializers.Constant(values)"
        hint = f"give the layer {constant} to keep them, or {hint}"
    raise ConfigurationError(
        f"{name} sets weights itself ({base} of layer '{shown_value(node.layer)}'), and training draws its own with "
        "the seed",
        hint,
    )


def own_layers(model: KerasModel) -> Tuple[str, ...]:
    """Names of the layers of a built network whose classes are neither from Keras nor from this package."""
    return tuple(layer.name for layer in model.layers if not stock_kind(layer))


def _measured_in(model: KerasModel) -> Statistics:
    def statistics(node: Node) -> Sequence[np.ndarray]:
        layer = node.layer_in(model)
        return layer.mean, layer.variance

    return statistics


@contextlib.contextmanager
def seeded_generators(seed: int, key: str) -> Iterator[None]:
    """Seeds the generators of Python, NumPy and TensorFlow from (seed, key) inside the block.

    The user's own layers draw their initial weights from these generators.  Afterwards Python and NumPy go on where
    they were, and TensorFlow begins its former seed again.  If it had none, it keeps this one, because deterministic
    operations need a seed.
    """
    import tensorflow as tf
    from tensorflow.python.eager import context

    digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
    number = int.from_bytes(digest[:4], "little")
    python_state, numpy_state, former_seed = random.getstate(), np.random.get_state(), context.global_seed()
    random.seed(number)
    np.random.seed(number)
    tf.random.set_seed(number)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if former_seed is not None:
            tf.random.set_seed(former_seed)


# --- from Keras' nodes to an architecture


def _architecture_of(
    name: str,
    nodes: Sequence[Node],
    keras: int,
    statistics: Statistics,
    model: Optional[KerasModel] = None,
) -> Tuple[Blueprint, List[str]]:
    """The architecture of a functional or sequential model, and a sentence for each change.

    Args:
        name: name of the network, for messages.
        nodes: nodes of the model.
        keras: the major version of the Keras that spelt its settings.
        statistics: see :data:`Statistics`.
        model: the model itself, which has the user's own classes; None for one in a file.

    Raises:
        ConfigurationError: training would not compute a layer as Keras does; the message names it.
    """
    num_calls = Counter(node.layer for node in nodes)
    layers: List[Node] = []
    scaled = INPUT_NAME  # the images after the layers that scale them
    for node in nodes[1:]:
        if node.name == INPUT_NAME:
            raise ConfigurationError(
                f"{name}: a layer is called '{INPUT_NAME}', as the images are", "rename it"
            )
        inputs = [INPUT_NAME if source == nodes[0].name else source for source in node.inputs]
        where = f"{name}: layer '{shown_value(node.layer)}'"
        channels = channels_of(nodes[0]) if inputs[:1] == [scaled] else None
        layers.append(
            _accepted(
                where, replace(node, inputs=inputs), num_calls[node.layer], keras, statistics, model, channels
            )
        )
        if channels is not None and layers[-1].stock == "Rescaling":
            scaled = layers[-1].name
    shape = nodes[0].config.get("batch_shape", nodes[0].config.get("batch_input_shape"))
    sizes: Tuple[Optional[int], ...] = (None, None, None)
    rows: Optional[Tuple[Optional[int], ...]] = None
    if isinstance(shape, (list, tuple)):
        sizes = tuple(shape[1:])
        if len(sizes) == 2:
            rows, sizes = sizes, (*sizes, 1)
        if len(sizes) != 3 or any(n is not None and (not isinstance(n, int) or n < 1) for n in sizes):
            raise ConfigurationError(
                f"{name}: takes {shown_value(str(tuple(shape[1:])))} instead of images (height, width and channels)",
                "begin it with keras.Input((height, width, channels))",
            )
    read = layers if rows is None else _without_channels(rows, layers)
    blueprint = Blueprint([_input(sizes), *read], nodes[-1].name)
    changes = []
    if rows is not None:
        changes.append("its input has no channels, and images of one channel are given to it without theirs")
    last = blueprint[blueprint.output]
    calls = num_calls[last.layer]
    if calls != 1 and last.config.get("activation") == "softmax":
        raise ConfigurationError(
            f"{name}: its last layer '{shown_value(last.layer)}', with softmax, is called {calls} times",
            "end it with a layer of its own: keras.layers.Dense(num_classes)",
        )
    if remove_softmax(blueprint):
        changes.append("its softmax at the end is left out: loss and metrics take logits")
    _check_end(name, blueprint)
    seeded = {
        node.layer
        for node, accepted in zip(nodes[1:], layers)
        if not accepted.is_own and _has_seed(node.config)
    }
    if seeded:
        changes.append(
            f"the seeds of {counted(len(seeded), 'layer')} are not used: weights and dropout are drawn from --seed"
        )
    regularized = {
        node.layer
        for node in layers
        if node.config.get("trainable", True)
        and any(key.endswith("_regularizer") and value is not None for key, value in node.config.items())
    }
    if any(_infers(node, keras) and node.stock in _OFF_BY_DEFAULT for node in nodes):
        changes.append("dropout called with training=False is off")
    keeping = [node for node in layers if node.infers]
    if keeping:
        changes.append(
            f"{counted(len(keeping), 'batch norm')} called with training=False: training keeps the moving statistics, "
            "which are those of --weights, or 0 and 1"
        )
    own = [
        accepted.layer
        for node, accepted in zip(nodes[1:], layers)
        if accepted.is_own and model is not None and is_estimated(node.layer_in(model))
    ]
    if own:
        changes.append(
            "its number of MACs is an estimate: in layers of its own, each number of a kernel counts once at each "
            f"place of the output ({', '.join(map(shown_value, own[:3]))}{', ...' * (len(own) > 3)})"
        )
    if regularized:
        changes.append(
            f"the regularizers of {counted(len(regularized), 'layer')} are added to the loss of training, and to no "
            "other"
        )
    scaling = image_scaling(blueprint.nodes)
    if scaling.layer is not None and scaling.is_certain:
        changes.append(f"it takes pixels of 0..255, which its layer {scaling.layer} scales")
    return blueprint, changes


def _without_channels(sizes: Sequence[Optional[int]], layers: Sequence[Node]) -> List[Node]:
    """The layers of a network whose input is (height, width), behind one that leaves out the only channel."""
    inputs = [[_ROWS if name == INPUT_NAME else name for name in node.inputs] for node in layers]
    first = Node(_ROWS, "Reshape", {"target_shape": list(sizes)}, [INPUT_NAME])
    return [first, *(replace(node, inputs=names) for node, names in zip(layers, inputs))]


def _has_seed(config: PlainValue) -> bool:
    """Whether the settings of a stock layer or of its initializers name a seed."""
    return isinstance(config, dict) and any(
        (key == "seed" and isinstance(value, int)) or _has_seed(value) for key, value in config.items()
    )


def _input(sizes: Sequence[Optional[int]]) -> Node:
    return Node(INPUT_NAME, INPUT_LAYER, {"batch_shape": [None, *sizes]}, [])


def _check_end(name: str, blueprint: Blueprint) -> None:
    """Refuses a network that does not end in logits.

    Raises:
        ConfigurationError: the network ends in an activation, or has no layer.
    """
    last = blueprint[blueprint.output]
    if last.name == INPUT_NAME:
        raise ConfigurationError(
            f"{name}: it has no layer with weights between images and output",
            "end it with keras.layers.Dense",
        )
    activation = "linear" if last.is_own else last.config.get("activation", "linear")
    if activation != "linear" or last.stock in ("ReLU", "Softmax"):
        end = last.kind if activation == "linear" else activation
        raise ConfigurationError(
            f"{name}: its last layer '{shown_value(last.name)}' ends in {end}, and training takes logits",
            "end it with a keras.layers.Dense(num_classes) without activation, or with softmax",
        )
    if _gives_probabilities(blueprint):
        raise ConfigurationError(
            f"{name}: its last layer '{shown_value(last.name)}' ({last.kind}) gives probabilities, and training takes "
            "logits",
            "give it what comes before softmax or sigmoid, and end with softmax, or without activation",
        )


def _ends(blueprint: Blueprint) -> Set[str]:
    """The names of the last layer and of those before it behind which nothing is computed any more."""
    ends, last = {blueprint.output}, blueprint[blueprint.output]
    while last.stock == "Activation" and last.config.get("activation") == "linear" and len(last.inputs) == 1:
        last = blueprint[last.inputs[0]]
        ends.add(last.name)
    return ends


def _gives_probabilities(blueprint: Blueprint) -> bool:
    """Whether the output is made of outputs of softmax or sigmoid alone, by layers without weights."""
    nodes, seen, waiting = {node.name: node for node in blueprint.nodes}, set(), [blueprint.output]
    while waiting:
        node = nodes[waiting.pop()]
        activation = None if node.is_own else node.config.get("activation", "linear")
        if activation in ("softmax", "sigmoid") or node.stock == "Softmax":
            continue
        if activation != "linear" or node.stock not in _KEEPS_PROBABILITIES:
            return False
        waiting += [name for name in node.inputs if name not in seen]
        seen.update(node.inputs)
    return True


def _accepted(
    where: str,
    node: Node,
    num_calls: int,
    keras: int,
    statistics: Statistics,
    model: Optional[KerasModel],
    channels: Optional[int],
) -> Node:
    """The node with plain settings.

    Args:
        where: the layer, for messages.
        node: a node of Keras' configuration.
        num_calls: number of calls of the layer.
        keras: the major version of the Keras that spelt its settings.
        statistics: see :data:`Statistics`.
        model: the network itself; None for one in a file.
        channels: see :func:`rescaling_of_operation`.

    Raises:
        ConfigurationError: training would not compute the layer as Keras does.
    """
    kind = node.kind
    live = None if model is None or not node.has_layer else node.layer_in(model)
    is_own = node.is_own if live is None else not stock_kind(live)
    may_be_of_keras = not node.is_own if live is None else is_of_keras(type(live).__module__)
    if (kind.startswith("Random") or kind in _AUGMENTING) and may_be_of_keras:
        raise ConfigurationError(
            f"{where} ({shown_value(kind)}) augments images, which is done to the data and not in the network",
            "leave it out, and add --augment to the command (or --mixup, --cutmix, --random-erasing)",
        )
    if kind in ("CenterCrop", "Resizing") and may_be_of_keras:
        raise ConfigurationError(
            f"{where} ({kind}) changes the size of images, which is done to the data and not in the network",
            "leave it out, and add --image-size to the command",
        )
    if num_calls != 1 and (is_own or kind == "BatchNormalization"):
        reason = (
            "layers of its own"
            if is_own
            else "batch norm, whose statistics would be those of several tensors"
        )
        raise ConfigurationError(
            f"{where} is called {num_calls} times, which training does not know for {reason}",
            "give each call a layer of its own"
            if is_own
            else "give each call a batch norm of its own, or use GroupNormalization or LayerNormalization",
        )
    infers = _infers(node, keras)
    others = ", ".join(
        f"{key}={value}"[:40] if key else str(value)[:40]
        for key, value in node.arguments
        if not (kind in (*_OFF_BY_DEFAULT, "BatchNormalization") and (key, value) == ("training", False))
    )
    plain_node = Node(node.name, kind, {}, node.inputs, node.layer)
    if node.is_operation:
        scaled = rescaling_of_operation(node, channels)
        if scaled is not None:
            return scaled
        _check_operation(where.replace(": layer", ": operation", 1), node, others)
        return plain_node
    if kind == "Lambda":
        raise ConfigurationError(
            f"{where} is a Lambda layer, whose function no file can keep",
            "write it as a class: class Mine(keras.layers.Layer)",
        )
    if is_own and live is None:
        raise ConfigurationError(
            f"{where} is of the class {shown_value(kind)}, which is not Keras' own",
            "name the function that makes the network: --model my_net.py:build",
        )
    if not is_own and kind in _NOISE:
        raise ConfigurationError(
            f"{where} is a {kind}, whose random numbers would differ each time",
            "use Dropout or SpatialDropout2D, which draw them from the seed of the run, or --augment",
        )
    if not is_own and kind not in PER_SAMPLE and kind not in PREPROCESSING:
        raise ConfigurationError(
            f"{where} is a {shown_value(kind)}, which is not among Keras' layers that are known to compute each sample "
            "by itself",
            "use another layer, or a class of your own, whose micro-batches are computed one by one",
        )
    if others:
        raise ConfigurationError(
            f"{where} ({shown_value(kind)}) is called with {shown_value(others)}",
            "call it with one tensor, or one list of them, alone; trainable=False freezes a layer",
        )
    if infers and is_own and live is not None and _may_know_training(live):
        raise ConfigurationError(
            f"{where} ({shown_value(kind)}) may compute something else in training, and the model around it is called "
            "with training=False",
            "call that model with one tensor alone",
        )
    if infers and kind in _OFF_BY_DEFAULT:
        return replace(plain_node, kind="Activation", config={"activation": "linear"})
    if is_own:
        kept = {k: v for k, v in node.config.items() if k.endswith(("_regularizer", "_constraint"))}
        plain_settings(
            f"{where} ({kind})", replace(node, config=kept)
        )  # refuses those that training does not know
        return replace(plain_node, config=node.config, layer_class=type(live), is_own=True)
    if live is not None:
        _check_classes_of_settings(f"{where} ({kind})", live, node.config)
    if kind == "Normalization":
        return as_rescaling(where, node, statistics)
    plain_node.config = plain_settings(f"{where} ({kind})", node, keras)
    plain_node.infers = infers and kind == "BatchNormalization" and plain_node.config.get("trainable", True)
    if live is not None:
        check_activations(where, live, plain_node.config)
    return plain_node


def _check_classes_of_settings(where: str, layer: KerasLayer, config: KerasConfig) -> None:
    """Refuses an initializer or regularizer of the user's own class, which may be called as one of Keras is.

    Raises:
        ConfigurationError: the layer has one; the message names it.
    """
    for key in config:
        value = getattr(layer, key, None)
        if not key.endswith(("_initializer", "_regularizer")) or value is None or inspect.isroutine(value):
            continue
        kind = type(value)
        if not is_of_keras(kind.__module__):
            raise ConfigurationError(
                f"{where} has {key} {shown_value(kind.__name__)}, a class that is not Keras' own",
                f"use one of keras.{key.rpartition('_')[2]}s",
            )


def _infers(node: Node, keras: int) -> bool:
    """Whether a call is one of inference in training, too: ``training=False`` is given to it, or to a model around it.

    Keras 3 records the default of dropout and noise as if it had been given.
    """
    is_said = ("training", False) in node.arguments
    return node.infers or (is_said and (keras == 2 or node.stock not in _OFF_BY_DEFAULT))


def _may_know_training(layer: KerasLayer) -> bool:
    """Whether a layer of the user's own can compute something else in training: by an argument, or by a layer in it."""
    parameters = inspect.signature(layer.call).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    return takes_any or "training" in parameters or any(layer._flatten_layers(include_self=False))


def _check_operation(where: str, node: Node, others: str) -> None:
    """Refuses an operation that no layer computes, or that reads numbers besides tensors.

    Raises:
        ConfigurationError: the operation is refused.
    """
    num_inputs = len(node.inputs)
    if node.kind not in LAYER_OF_OPERATION.values():
        raise ConfigurationError(
            f"{where.replace(': operation ', ': ', 1)} is the operation {shown_value(node.kind)}, which is no layer",
            "leave it out, and add --normalise caffe, if it is from preprocess_input"
            if node.kind in _SLICES
            else "use a layer of Keras in its place, or write it as a class of layers",
        )
    if others or (node.kind == "ReLU") != (num_inputs == 1):
        raise ConfigurationError(
            f"{where} reads {counted(num_inputs, 'tensor')} and numbers besides ({shown_value(others)})",
            "use a layer in its place, such as keras.layers.Rescaling",
        )


def _check_trained_as(name: str, architecture: Blueprint, trained_as: Optional[Blueprint]) -> None:
    """Refuses a network that computes something else than where it was trained.

    Its activations may have other formulas in this Keras, and its function may read other files, or the surroundings.

    Raises:
        ConfigurationError: a layer differs; the message names it and both.
    """
    if trained_as is None:
        return
    trained, present = ({node.name: node for node in one.nodes} for one in (trained_as, architecture))
    if list(trained) != list(present):
        differing = ", ".join(map(shown_value, sorted({*trained} ^ {*present}))) or "in another order"
        raise _made_otherwise(name, f"has other layers ({differing})")
    for node in architecture.nodes:
        former = trained[node.name]
        where = f"layer '{shown_value(node.name)}'"
        if (node.kind, node.layer, node.inputs) != (former.kind, former.layer, former.inputs):
            raise _made_otherwise(name, f"has another {where}")
        now, then = ({} if node.is_own else formulas_of(one.config) for one in (node, former))
        for key in sorted({*now, *then}):
            if now.get(key) != then.get(key):
                former_one, present_one = (one.get(key, "another activation") for one in (then, now))
                raise ConfigurationError(
                    f"{name}: {where} was trained with {former_one}, and this Keras computes {present_one}",
                    "use the TensorFlow that the run was trained with (environment.json has its version)",
                )
        changed = _changed_setting(node, former)
        if changed is not None:
            raise _made_otherwise(name, f"has {changed}")
        if (
            node.sample is not None
            and former.sample is not None
            and node.sample.inputs == former.sample.inputs
        ):
            node.sample = former.sample  # a continued run ends with the same bytes on another processor


def _changed_setting(node: Node, former: Node) -> Optional[str]:
    """The first setting with which a layer computes something else than the layer of its name that was trained.

    Of a layer of the user's own only what it computes is known.
    """
    if node.sample is not None and former.sample is not None and _differ(node.sample, former.sample):
        return f"layer '{shown_value(node.layer)}', which computes something else than it did in training"
    for key in sorted({*node.config} & {*former.config}):
        values = node.config[key], former.config[key]
        if not key.endswith(_SPELT_OR_DRAWN) and not _are_alike(*values):
            now, then = (shown_value(str(value))[:40] for value in values)
            return f"layer '{shown_value(node.name)}' {key} = {now}, and was trained with {then}"
    return None


def _differ(one: LayerSample, other: LayerSample) -> bool:
    """Whether two samples are of layers that compute something else; images of other sizes do not tell."""
    if one.inputs != other.inputs:
        return False
    return len(one.outputs) != len(other.outputs) or not np.allclose(one.outputs, other.outputs, 1e-3, 1e-4)


# Ends of settings that the versions of Keras write differently, or that say how weights begin and are trained.
_SPELT_OR_DRAWN = ("axis", "seed", "trainable", "_initializer", "_regularizer")


def _are_alike(one: PlainValue, other: PlainValue) -> bool:
    """Whether two settings are equal, numbers but for rounding to 32 bits."""
    try:
        return np.shape(one) == np.shape(other) and np.allclose(one, other, rtol=1e-5)
    except (TypeError, ValueError):
        return bool(one == other)


def _made_otherwise(name: str, how: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name} {how}",
        "bring back what its function read then, in other files or the surroundings, or train it anew",
    )


# --- from an architecture to a network


def _of_installed_keras(name: str, architecture: Blueprint) -> Blueprint:
    """A copy of an architecture with the classes and the spellings of the installed Keras.

    Raises:
        ConfigurationError: the installed Keras lacks a layer or a setting.
    """
    from tensorflow import keras

    nodes = [replace(architecture.nodes[0])]
    for node in architecture.nodes[1:]:
        where, config = f"{name}: layer '{shown_value(node.layer)}'", dict(node.config)
        layer_class = node.layer_class if node.is_own else getattr(keras.layers, node.kind, None)
        if layer_class is None:
            raise ConfigurationError(
                f"{where} is a {node.kind}, which this Keras lacks", "use a newer TensorFlow"
            )
        if not node.is_own:
            config = keras_settings(where, node, layer_class)
        nodes.append(replace(node, layer_class=layer_class, config=config, inputs=list(node.inputs)))
    return Blueprint(nodes, architecture.output)


def _check_axes(name: str, blueprint: Blueprint, model: KerasModel) -> None:
    """Refuses layers that mix the samples of a batch.

    Raises:
        ConfigurationError: a stock layer computes along the axis of samples; the message names it.
    """
    for node in blueprint.nodes[1:]:
        shape = output_shape(model.get_layer(node.layer))
        axes = [] if node.is_own else node.config.get("axis", [])
        if any(axis % len(shape) == 0 for axis in (axes if isinstance(axes, list) else [axes])):
            raise ConfigurationError(
                f"{name}: layer '{shown_value(node.layer)}' has axis = {axes}, which mixes the samples of a batch",
                "name an axis of a sample's own, such as axis=-1",
            )
        node.channels = shape[-1] if len(shape) > 1 else None


def _is_stateful(operation: str) -> bool:
    """Whether an operation of TensorFlow changes or hides state, by its definition."""
    from tensorflow.python.framework import op_def_registry

    definition = op_def_registry.get(operation)
    return definition is not None and definition.is_stateful and operation not in _READS


def around(layer: KerasLayer) -> KerasLayer:
    """A layer that calls one whose ``call`` does not take ``training``, but whose inner layers may.

    They get it from this outer call, as from a model around them.
    """
    from tensorflow import keras

    class Around(keras.layers.Layer):  # type: ignore[misc]
        def call(self, values: Tensor, training: Optional[bool] = None) -> Tensor:
            return layer(values)

    return Around(autocast=False, name=layer.name)


def _check_own_layer(name: str, layer: KerasLayer) -> None:
    """Refuses a layer of the user's own that has state, draws random numbers, or does not compute in float32.

    Raises:
        ConfigurationError: the layer is refused; the message names it and the operation.
    """
    import tensorflow as tf

    what = f"{name}: layer '{shown_value(layer.name)}' ({shown_value(type(layer).__name__)})"
    if layer.compute_dtype != "float32":
        raise ConfigurationError(
            f"{what} computes in {layer.compute_dtype}",
            "leave types out of the network: --precision 16.16 trains in 16 bits",
        )
    tensors = _tensors(layer.input)

    def call(*values: Tensor) -> Tensor:
        return around(layer)(values[0] if len(values) == 1 else list(values), training=True)

    specs = [tf.TensorSpec([2, *tensor.shape[1:]], tf.float32) for tensor in tensors]
    try:
        graph = tf.function(call, autograph=False).get_concrete_function(*specs).graph.as_graph_def()
    except Exception as error:
        raise own_code_failed(error, what) from error
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    operation = next((node.op for node in nodes if _is_stateful(node.op)), None)
    if operation is not None:
        raise ConfigurationError(
            f"{what} draws random numbers, or remembers something from batch to batch (operation {operation}), which a "
            "continued run would not know",
            "use keras.layers.Dropout or BatchNormalization, which are exchanged for layers that can be continued",
        )


def _check_penalties(name: str, node: Node, layer: KerasLayer) -> None:
    """Refuses regularizers of a layer of the user's own that training would add to other weights, or to none.

    Raises:
        ConfigurationError: what the layer adds to the loss is not what training adds.
    """
    from tensorflow import keras

    has_none = all(value is None for key, value in node.config.items() if key.endswith("_regularizer"))
    if has_none or not node.config.get("trainable", True):
        return
    made = type(layer).from_config({**node.config, "name": layer.name})
    tensors = [keras.Input(tuple(one.shape)[1:]) for one in _tensors(layer.input)]
    model = keras.Model(tensors, made(tensors[0] if len(tensors) == 1 else tensors))
    rng = np.random.default_rng(0)
    made.set_weights([np.float32(rng.uniform(0.1, 0.9, tuple(weight.shape))) for weight in made.weights])
    factors = penalties(model)
    added = float(sum(np.asarray(loss) for loss in model.losses))
    if not np.isclose(added, added_to_loss(factors, named_weights(model)), 1e-4):
        raise ConfigurationError(
            f"{name}: layer '{shown_value(node.layer)}' ({node.kind}) adds to the loss something else than the norms "
            f"of the weights that its settings name ({', '.join(factors)})",
            "name each weight as its setting, kernel for kernel_regularizer; or drop them, and use --weight-decay",
        )


def _tensors(given: Tensor) -> List[Tensor]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _check_remade(name: str, node: Node, layer: KerasLayer, is_last: bool) -> Optional[LayerSample]:
    """Refuses a layer of the user's own that is another one when it is made again, as for each build.

    Layers that fail, draw random numbers or have a state are refused later.

    Returns:
        What the layer computes, if that can be said.

    Raises:
        ConfigurationError: ``get_config`` lacks a setting, or the layer has a constraint, or it is the last one and
            gives probabilities.
    """
    what = f"{name}: layer '{shown_value(node.layer)}' ({node.kind})"
    if any(getattr(weight, "constraint", None) is not None for weight in layer.weights):
        raise ConfigurationError(
            f"{what} has a constraint on its weights, which training does not know",
            "drop it; kernel_regularizer='l2' keeps weights small, and so does --weight-decay",
        )
    made: KerasLayer = None
    samples: List[LayerSample] = []
    with seeded_generators(0, "made again"), contextlib.suppress(Exception):
        made = type(layer).from_config({**node.config, "name": layer.name})
        images = _drawn_images(layer)
        made(images)
        samples = [_sample_of(one, images) for one in (layer, layer, made)]
    if not samples or samples[0] != samples[1]:
        return None  # it does not repeat what it computes
    own, other = (
        ([tuple(weight.shape) for weight in one.weights], len(one.trainable_weights)) for one in (layer, made)
    )
    if own != other or _differ(samples[0], samples[2]):
        raise ConfigurationError(
            f"{what} is another layer when it is made again from what its get_config returns",
            "let get_config return every argument of __init__, and set weights and trainable in __init__ or build",
        )
    given = samples[0].outputs[:_SAMPLED]
    # Random pixels and weights give logits that are small, but not all of them within 0 and 1.
    if is_last and len(layer.output.shape) == 2 and min(given) >= 0 and max(given) <= 1:
        raise ConfigurationError(
            f"{what}, its last layer, gives probabilities, and training takes logits",
            "leave out the softmax or sigmoid: training and evaluation have their own softmax",
        )
    return samples[0]


def _drawn_images(layer: KerasLayer) -> Union[np.ndarray, List[np.ndarray]]:
    """Random tensors for a layer to compute, as it takes them: one, or a list; a side of any size is _ANY_SIDE."""
    rng = np.random.default_rng(0)
    is_list = isinstance(layer.input, (list, tuple))
    shapes = [
        (2, *(_ANY_SIDE if n is None else n for n in tensor.shape[1:])) for tensor in _tensors(layer.input)
    ]
    values = [np.float32(rng.normal(size=shape)) for shape in shapes]
    return values if is_list else values[0]


def _sample_of(layer: KerasLayer, images: Union[np.ndarray, List[np.ndarray]]) -> LayerSample:
    """What a layer computes with weights that follow from their names; its own weights are overwritten."""
    drawn = [
        np.random.default_rng(zlib.crc32(name.encode())).uniform(0.1, 0.9, weight.shape)
        for name, weight in weights_of(layer).items()
    ]
    layer.set_weights([np.float32(values) for values in drawn])
    outputs = [layer(images)]
    if "training" in inspect.signature(layer.call).parameters:
        outputs.append(layer(images, training=True))
    flat = [np.asarray(output, np.float64).reshape(-1) for output in outputs]
    numbers = np.concatenate([one[np.linspace(0, len(one) - 1, _SAMPLED, dtype=int)] for one in flat])
    # Rounded, because machines differ in the last digits; what is not finite counts as 0, as JSON has no such numbers.
    finite = np.nan_to_num(numbers, nan=0.0, posinf=0.0, neginf=0.0)
    return LayerSample(
        tuple(tuple(map(int, one.shape)) for one in _tensors(images)),
        tuple(float(f"{number:.5g}") for number in finite),
    )


def _exchange(blueprint: Blueprint, model: KerasModel, name: str) -> None:
    """Replaces further layers that have a counterpart in this package, and refuses settings that would get lost.

    The layers that are replaced in every network, such as batch norm, are checked here and replaced later.

    Raises:
        ConfigurationError: a layer has such a setting; the message names it.
    """
    from ipucnn.models.layers.micro_batches import Dropout, GroupNormalization

    for node in blueprint.nodes:
        where, config = f"{name}: layer '{shown_value(node.layer)}' ({node.kind})", node.config
        if node.stock == "SpatialDropout2D":
            node.replace(Dropout, {"rate": config["rate"], "noise_shape": [None, 1, 1, None]})
        elif node.stock == "Dropout" and (config.get("noise_shape") or [None])[0] is not None:
            raise ConfigurationError(f"{where} has one mask for all samples", "begin noise_shape with None")
        elif node.stock == "UpSampling2D" and config.get("interpolation") == "area":
            raise ConfigurationError(
                f"{where} has the interpolation area, whose gradient TensorFlow lacks", "use bilinear"
            )
        elif node.stock == "Conv2DTranspose" and set(np.ravel(config.get("dilation_rate", 1))) != {1}:
            raise ConfigurationError(
                f"{where} is dilated, which TensorFlow computes on no CPU",
                "use keras.layers.UpSampling2D and Conv2D",
            )
        elif node.stock in ("BatchNormalization", "GroupNormalization"):
            axis, rank = config.get("axis", -1), len(output_shape(model.get_layer(node.layer)))
            if axis not in (-1, rank - 1):
                raise ConfigurationError(
                    f"{where} normalises axis {axis}", "normalise the last axis, the channels"
                )
            for key in ("gamma", "moving_variance", "beta", "moving_mean"):
                usual = "Ones" if key in ("gamma", "moving_variance") else "Zeros"
                kind = (config.get(f"{key}_initializer") or {}).get("class_name", usual)
                if kind != usual:
                    raise ConfigurationError(
                        f"{where} begins with {key} {kind}", f"leave out {key}_initializer"
                    )
            lost = [key for key in ("renorm", "virtual_batch_size", "synchronized") if config.get(key)]
            if lost:
                raise ConfigurationError(f"{where} has {lost[0]}", f"leave it out; {_CONTRACT}")
            if node.kind == "GroupNormalization" and config.get("center", True) and config.get("scale", True):
                if config["groups"] == -1:
                    config["groups"] = node.channels
                kept = {key: value for key, value in config.items() if key in _KEPT_BY_GROUP_NORM}
                frozen = {} if config.get("trainable", True) else {"trainable": False}
                node.replace(GroupNormalization, {**kept, **frozen})


# --- sources of networks


def of_function(function: OwnFunction) -> OwnNetwork:
    """The network that a function of the user makes, which is not called yet."""
    return OwnNetwork(function.name, function.sha256, function)


def of_keras_file(name: str, path: Path) -> OwnNetwork:
    """Reads the network in a file that ``model.save`` wrote, without its weights.

    Raises:
        DataError: the file is absent or damaged, or training does not support its network.
    """
    hint = "give a network that Keras saved: model.save('my_net.keras'), or 'my_net.h5'"
    config = read_configuration(path, hint)
    if config is None:
        raise DataError(f"{shown_value(name)} holds weights alone, and no network", hint)
    if not isinstance(config, dict):
        raise DataError(f"{shown_value(name)} holds no model", hint)
    try:
        nodes = read_nodes(
            shown_value(name), str(config.get("class_name")), config.get("config"), canonical=True
        )
        architecture, changes = _architecture_of(
            shown_value(name), nodes, keras_of_file(path), lambda node: read_statistics(path, node)
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{shown_value(name)} is damaged: {shown_value(repr(error))}", hint) from None
    if config.get("compile_config"):
        changes.append(_COMPILED)
    digest = hashlib.sha256(read_bytes(path, path.stat().st_size)).hexdigest()
    return OwnNetwork(name, digest, architecture=architecture, remarks=changes)


def model_in_file(path: Path, shape: Sequence[int], scales: bool) -> Optional[KerasModel]:
    """The whole model in a file of Keras with its weights; None if there is none.

    Args:
        path: the file.
        shape: (height, width, channels) of its input.
        scales: whether it scales its images itself; otherwise it is built without the layers that do.

    Raises:
        UserError: training does not support it.
    """
    from tensorflow import keras

    nodes = read_model(path)
    if nodes is None:
        return None
    architecture, _ = _architecture_of(
        shown(path), nodes, keras_of_file(path), lambda node: read_statistics(path, node)
    )
    if not scales:
        strip_preprocessing(architecture)
    blueprint = _without_regularizers(_of_installed_keras(shown(path), architecture))
    try:
        model = assemble(blueprint, keras.Input(tuple(shape)), "file")
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"{shown(path)} cannot be built: {text_of(error)}", "") from None
    load_keras_weights(model, path)
    return model


def _read_sample(inputs: Sequence[Sequence[int]], outputs: Sequence[float]) -> LayerSample:
    return LayerSample(tuple(tuple(map(int, shape)) for shape in inputs), tuple(map(float, outputs)))


def of_checkpoint(name: str, data: PlainValue, what: str, needs: str) -> OwnNetwork:
    """Reads the network of a checkpoint, which is not trusted; no file that the checkpoint names is read or run.

    Args:
        name: name of the network.
        data: the data of :meth:`OwnNetwork.to_data`.
        what: name of the checkpoint, for messages.
        needs: the hint to name the user's file, if the network has layers that are only in that file.

    Raises:
        DataError: the data are not a network.
    """
    try:
        shape = tuple(data["input_shape"])
        if len(shape) != 3 or any(n is not None and (type(n) is not int or n < 1) for n in shape):
            raise ValueError(f"an input of {shape}")
        nodes = {INPUT_NAME: _input(shape)}
        for name_of_call, kind, settings, inputs, *shared in data["layers"]:
            (layer,) = shared or (name_of_call,)
            if not isinstance(name_of_call, str) or name_of_call in nodes or not isinstance(kind, str):
                raise ValueError(f"a layer {name_of_call!r}")
            if not inputs or not set(inputs) <= set(nodes):
                raise ValueError(f"layer {name_of_call!r} reads {inputs!r}")
            is_own = settings is None
            settings = dict(settings or {})
            infers = settings.pop("training", None) is False
            node = Node(name_of_call, kind, settings, list(inputs), layer, is_own=is_own, infers=infers)
            if layer != name_of_call and (nodes[layer].kind, nodes[layer].is_own) != (kind, node.is_own):
                raise ValueError(f"layer {name_of_call!r} is no call of {layer!r}")
            if not node.is_own:
                if kind not in PER_SAMPLE:
                    raise ValueError(f"layer {name_of_call!r} is of the class {kind!r}")
                node.config = plain_settings(f"layer '{shown_value(name_of_call)}'", node)
            nodes[name_of_call] = node
        if len(nodes) == 1:
            raise ValueError("0 layers")
        for name_of_layer, sample in data["samples"].items():
            nodes[name_of_layer].sample = _read_sample(*sample)
        architecture = Blueprint(list(nodes.values()), name_of_call)
        scaling = ImageScaling(data["scaled_by"])
        if scaling.layer is not None and scaling.layer not in nodes:
            raise ValueError(f"a layer {scaling.layer!r} that scales the images")
    except (TypeError, ValueError, KeyError, AttributeError, ConfigurationError) as error:
        reason = text_of(error)
        raise DataError(
            f"{what} has no network that can be read: {shown_value(reason)}", "give another checkpoint"
        ) from None
    hint = needs if _own_nodes(architecture) else None
    digest = str(data.get("sha256"))
    return OwnNetwork(name, digest, architecture=architecture, needs=hint, trained_scaling=scaling)
