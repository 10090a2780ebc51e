"""Users' own networks: from a function in a Python file or an installed package, a .keras file, or a checkpoint.

Every such network is converted to an :class:`Architecture`.  It is built from that, with the same replacement of layers
as in registered networks, and checkpoints store it in that form.  A Python file is run when the network is first built,
and only if the command line names it (``python_files.py``).

Layers of the user's own classes are not replaced.  They may mix the samples of a micro-batch, so micro-batches are
computed one by one.  A layer that keeps state from batch to batch, or draws random numbers itself, is refused, because
a resumed run could not continue to the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ipucnn.aliases import KerasLayer, KerasModel, PlainValue, Tensor
from ipucnn.errors import ConfigurationError, DataError, UserError
from ipucnn.filesystem import file_size, read_bytes
from ipucnn.models.architecture import Architecture, architecture_of, blueprint_of, from_data
from ipucnn.models.blueprint import Blueprint
from ipucnn.models.formulas import formulas_of
from ipucnn.models.keras_config import INPUT_LAYER, LayerCall, read_calls
from ipucnn.models.keras_files import read_configuration, read_statistics
from ipucnn.python_files import label_of, own_code_failed
from ipucnn.text import counted, shown_value

_CONTRACT = "docs/own-networks.md says what the function is given and what it returns"
# Stateful operations that only read variables, call functions, or check.  All others change state for the next call,
# draw random numbers from hidden state, or run Python code.
_READS = (
    "Assert", "Case", "If", "PartitionedCall", "ReadVariableOp", "ResourceGather", "ResourceGatherNd",
    "StatefulPartitionedCall", "VarHandleOp", "VarIsInitializedOp", "VariableShape", "While",
)  # fmt: skip
Make = Callable[..., Any]


class _Made(NamedTuple):
    """A network that the user's function returned, and the calls of its layers."""

    architecture: Architecture
    calls: List[LayerCall]
    model: KerasModel


@dataclass(eq=False)
class OwnNetwork:
    """A network that is not registered.

    Attributes:
        name: the user's name of the network.
        sha256: digest of its file; for an installed package, of the entry point's value.
        make: function from (input shape, number of classes) to a Keras model; None if the architecture is known.
        architecture: the network as data; for a function, None until it has been called.
        needs: the hint to name its file, for a network that is known only from a run folder or checkpoint and needs
            the user's code; otherwise None.
        notes: remarks for the user about the built network, a sentence each.
        trained_as: the network in the checkpoint whose weights a function's network gets; None without a checkpoint.
    """

    name: str
    sha256: str
    make: Optional[Make] = None
    architecture: Optional[Architecture] = None
    needs: Optional[str] = None
    notes: List[str] = field(default_factory=list)
    trained_as: Optional[Architecture] = None
    _called: Optional[Tuple[Tuple[Tuple[int, ...], int, int], List[_Made]]] = None

    @property
    def label(self) -> str:
        """A short name whose characters are valid in names of folders and layers."""
        return label_of(self.name)

    @property
    def has_own_code(self) -> bool:
        """Whether only the user's own code can build it; True for a function that has not been called yet."""
        return self.make is not None if self.architecture is None else bool(self.architecture.own_layers)

    @property
    def input_shape(self) -> Tuple[Optional[int], ...]:
        """(height, width, channels) of its input; None for sizes that the data determine."""
        known = self.architecture if self.make is None else None
        return (None, None, None) if known is None else known.input_shape

    @property
    def num_classes(self) -> Optional[int]:
        """Its number of logits; None if the data determine it."""
        known = self.architecture if self.make is None else None
        return None if known is None else known.num_outputs

    @property
    def first_rescaling(self) -> Optional[str]:
        """See :attr:`Architecture.first_rescaling`; None for a function of no checkpoint that was not called yet."""
        known = self.architecture or self.trained_as
        return None if known is None else known.first_rescaling

    def call(self, shape: Sequence[int], num_classes: int, seed: int) -> None:
        """Calls the function that makes the network, if there is one, for the next call of :meth:`blueprint`.

        Raises:
            ConfigurationError: as :meth:`blueprint`.
        """
        if self.make is not None:
            self.check_buildable()
            key = tuple(map(int, shape)), num_classes, seed
            self._called = key, self._made(*key)
            self.architecture = self._called[1][0].architecture

    def to_data(self) -> Dict[str, Any]:
        """The built network as data for a checkpoint, from which it can be rebuilt, except for the user's classes."""
        assert self.architecture is not None
        return {"name": self.name, "sha256": self.sha256, **self.architecture.to_data()}

    def check_buildable(self) -> None:
        """Checks that the file that the network needs was named on the command line.

        Raises:
            ConfigurationError: it was not named; the hint says what to type.
        """
        if self.needs is None:
            return
        layers = () if self.architecture is None else self.architecture.own_layers
        parts = f"layers of its own ({', '.join(map(shown_value, layers))})" if layers else "layers"
        raise ConfigurationError(
            f"the network is {shown_value(self.name)}, whose {parts} are in that file alone, and a file is run only if "
            "the command line names it",
            f"if you trust it, {self.needs}",
        )

    def blueprint(self, images: Tensor, num_classes: int, seed: int = 0) -> Blueprint:
        """Makes the blueprint of the network, with stock layers and the user's own layers.

        Raises:
            ConfigurationError: training would not compute a layer as Keras does; the message names it.
        """
        from ipucnn.models.editing import use_grouped_convolutions

        shape = tuple(int(n) for n in images.shape[1:])
        self.check_buildable()
        made: List[_Made] = []
        if self.make is not None:
            key = shape, num_classes, seed
            made = (
                self._called[1] if self._called is not None and self._called[0] == key else self._made(*key)
            )
            self._called = None
            self.architecture = made[0].architecture
            _check_formulas(shown_value(self.name), self.architecture, self.trained_as)
        assert self.architecture is not None
        self.check_input(shape)
        self.notes = [f"{shown_value(self.name)}: {note}" for note in self.architecture.notes]
        user_layers = [layer for layer in self.architecture.layers if layer.is_own]
        if user_layers:
            kinds = ", ".join(f"{shown_value(layer.name)} ({layer.kind})" for layer in user_layers)
            self.notes.append(
                f"{shown_value(self.name)}: micro-batches are computed one by one, because layers of its own may mix "
                f"their samples: {kinds}"
            )
        name = shown_value(self.name)
        with seeded(seed, "own"):
            blueprint, model = blueprint_of(self.architecture, images, name)
        self._check_output(model, num_classes)
        for layer in user_layers:
            _check_own_layer(name, model.get_layer(layer.name))
        if model.losses:
            raise ConfigurationError(
                f"{name}: its layers add {counted(len(model.losses), 'loss')}, and training has its own",
                "drop them; --weight-decay and --l2-regularization hold for the whole network",
            )
        if made:
            _check_initial_weights(name, made, model)
        _exchange(blueprint, model, name)
        use_grouped_convolutions(blueprint)
        return blueprint

    def _made(self, shape: Tuple[int, ...], num_classes: int, seed: int) -> List[_Made]:
        """Calls the user's function under two seeds, and converts its models to architectures.

        Raises:
            ConfigurationError: it does not return a functional or sequential float32 model that training supports, or
                another network each time.
        """
        made = [self._made_with(shape, num_classes, seed, key) for key in ("own", "own, with another seed")]
        kinds = [[(layer.name, layer.kind) for layer in one.architecture.layers] for one in made]
        if kinds[0] != kinds[1]:
            raise ConfigurationError(
                f"{shown_value(self.name)} returns another network each time it is called",
                "decide its layers by its arguments alone",
            )
        return made

    def _made_with(self, shape: Tuple[int, ...], num_classes: int, seed: int, key: str) -> _Made:
        """Calls the user's function under the seed of a key."""
        from tensorflow import keras

        assert self.make is not None
        name, old_policy = shown_value(self.name), keras.mixed_precision.global_policy()
        with seeded(seed, key):
            model = self.make(shape, num_classes)
        policy = keras.mixed_precision.global_policy().name
        if policy != "float32":
            # Otherwise later networks of this process would also get this policy.
            keras.mixed_precision.set_global_policy(old_policy)
            raise ConfigurationError(
                f"{name} sets the type of all of Keras' layers to {policy}",
                "leave types out of the network: --precision 16.16 trains in 16 bits",
            )
        if not isinstance(model, keras.Model):
            raise ConfigurationError(
                f"{name} returned {shown_value(type(model).__name__)} instead of a functional or sequential model",
                _CONTRACT,
            )
        kind = "Sequential" if isinstance(model, keras.Sequential) else "Functional"
        is_graph = (
            kind == "Sequential" or getattr(model, "_is_graph_network", False) or type(model) is keras.Model
        )
        if not is_graph and "Functional" not in {c.__name__ for c in type(model).__mro__}:
            raise ConfigurationError(
                f"{name} returned a {shown_value(type(model).__name__)}, a model whose layers are hidden in its code",
                "return keras.Model(inputs, outputs), or a keras.Sequential",
            )
        try:
            config = model.get_config()
        except UserError:
            raise
        except Exception as error:
            failed = own_code_failed(error, f"get_config of a layer of {name}")
            raise ConfigurationError(failed.message, "give the layer's class a get_config") from error
        calls = read_calls(name, kind, config, renumbers=True)
        return _Made(architecture_of(name, calls, model), calls, model)

    def check_input(self, shape: Sequence[int]) -> None:
        """Refuses images of a shape that does not fit the known sizes of the network's input.

        Raises:
            ConfigurationError: the shape does not fit.
        """
        known = () if self.architecture is None else self.architecture.input_shape
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


def _check_formulas(name: str, architecture: Architecture, trained_as: Optional[Architecture]) -> None:
    """Refuses a network whose activations have other formulas in this Keras than they had where it was trained.

    Raises:
        ConfigurationError: a formula differs; the message names the layer and both.
    """
    trained = {} if trained_as is None else {layer.name: layer for layer in trained_as.layers}
    for layer in architecture.layers:
        former = trained.get(layer.name)
        if former is None or layer.is_own:
            continue
        now, then = formulas_of(layer.config), formulas_of(former.config)
        for key in sorted({*now, *then}):
            if now.get(key) != then.get(key):
                former_one, present = (one.get(key, "another activation") for one in (then, now))
                raise ConfigurationError(
                    f"{name}: layer '{shown_value(layer.name)}' was trained with {former_one}, and this Keras computes "
                    f"{present}",
                    "use the TensorFlow that the run was trained with (environment.json has its version)",
                )


def _check_initial_weights(name: str, made: Sequence[_Made], model: KerasModel) -> None:
    """Refuses weights that the function set: they are equal under two seeds, and the rebuilt layer begins with others.

    Args:
        name: name of the network, for messages.
        made: the function's networks under two seeds.
        model: the network rebuilt from its architecture.

    Raises:
        ConfigurationError: a layer has such weights; the message names it.
    """
    for call, other in zip(made[0].calls, made[1].calls):
        if call.is_operation or call.kind in (INPUT_LAYER, "Normalization", "Softmax"):
            continue
        layer, layer_2 = call.layer_in(made[0].model), other.layer_in(made[1].model)
        names = [step.name for step in made[0].architecture.layers]
        if layer is None or layer_2 is None or call.name not in names:
            continue
        rebuilt = model.get_layer(call.name)
        for weight, second, third in zip(layer.weights, layer_2.weights, rebuilt.weights):
            values, repeated, begins = (np.asarray(tf_value.numpy()) for tf_value in (weight, second, third))
            if not _is_set(values, repeated, begins) or _is_drawn_with_a_seed(layer, values):
                continue
            base = weight.name.split("/")[-1].split(":")[0]
            hint = "return it untrained (weights=None); --weights begins with weights that were trained"
            if f"{base}_initializer" in call.settings and call.kind != "BatchNormalization":
                constant = f"{base}_initializer=keras.initializers.Constant(values)"
                hint = f"give the layer {constant} to keep them, or {hint}"
            raise ConfigurationError(
                f"{name} sets weights itself ({base} of layer '{shown_value(call.name)}'), and training draws its own "
                "with the seed",
                hint,
            )


def _is_set(values: np.ndarray, repeated: np.ndarray, begins: np.ndarray) -> bool:
    """Whether weights, or some of them, are equal in two builds, and other than the initial ones.

    Two draws of 23 bits are equal by chance for about 1e-7 of the weights.
    """
    if values.shape != repeated.shape:
        return True
    equal = (values == repeated) & (values != begins)
    return bool(equal.size) and (bool(equal.all()) or int(equal.sum()) >= 3 + 1e-5 * equal.size)


def _is_drawn_with_a_seed(layer: KerasLayer, values: np.ndarray) -> bool:
    """Whether weights are what an initialiser with a seed of the user's own draws."""
    initializers = [
        value
        for value in vars(layer).values()
        if isinstance(getattr(value, "seed", None), int) and callable(value)
    ]
    return any(np.array_equal(np.asarray(draw(values.shape)), values) for draw in initializers)


def _is_stateful(operation: str) -> bool:
    """Whether an operation of TensorFlow changes or hides state, by its definition."""
    from tensorflow.python.framework import op_def_registry

    definition = op_def_registry.get(operation)
    return definition is not None and definition.is_stateful and operation not in _READS


def _check_own_layer(name: str, layer: KerasLayer) -> None:
    """Refuses a layer of the user's own that has state, draws random numbers, or does not compute in float32.

    Raises:
        ConfigurationError: the layer is refused; the message names it and the operation.
    """
    import tensorflow as tf
    from tensorflow import keras

    what = f"{name}: layer '{shown_value(layer.name)}' ({shown_value(type(layer).__name__)})"
    if layer.compute_dtype != "float32":
        raise ConfigurationError(
            f"{what} computes in {layer.compute_dtype}",
            "leave types out of the network: --precision 16.16 trains in 16 bits",
        )
    tensors = layer.input if isinstance(layer.input, (list, tuple)) else [layer.input]

    class Training(keras.layers.Layer):  # type: ignore[misc]
        """Calls the layer without ``training``, which its inner layers get from this outer call, as in a run."""

        def call(self, values: Tensor, training: Optional[bool] = None) -> Tensor:
            return layer(values)

    def call(*values: Tensor) -> Tensor:
        return Training()(values[0] if len(values) == 1 else list(values), training=True)

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


def _exchange(blueprint: Blueprint, model: KerasModel, name: str) -> None:
    """Replaces further layers that have a counterpart in this package, and refuses settings that would get lost.

    The layers that are replaced in every network, such as batch norm, are checked here and replaced later.

    Raises:
        ConfigurationError: a layer has such a setting; the message names it.
    """
    from ipucnn.models.editing import replace_layer
    from ipucnn.models.layers.micro_batches import Dropout, GroupNormalization

    for step in blueprint.steps:
        where, config = f"{name}: layer '{shown_value(step.name)}' ({step.kind})", step.config
        if step.kind == "SpatialDropout2D":
            replace_layer(step, Dropout, {"rate": config["rate"], "noise_shape": [None, 1, 1, None]})
        elif step.kind == "Dropout" and (config.get("noise_shape") or [None])[0] is not None:
            raise ConfigurationError(f"{where} has one mask for all samples", "begin noise_shape with None")
        elif step.kind in ("BatchNormalization", "GroupNormalization"):
            axis, rank = config.get("axis", -1), len(model.get_layer(step.name).output.shape)
            if (axis[0] if isinstance(axis, list) and len(axis) == 1 else axis) not in (-1, rank - 1):
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
            if step.kind == "GroupNormalization" and config.get("center", True) and config.get("scale", True):
                if config["groups"] == -1:
                    config["groups"] = step.channels
                kept = {key: config[key] for key in ("groups", "epsilon")}
                frozen = {} if config.get("trainable", True) else {"trainable": False}
                replace_layer(step, GroupNormalization, {**kept, **frozen})


@contextlib.contextmanager
def seeded(seed: int, key: str) -> Iterator[None]:
    """Seeds the generators of Python, NumPy and TensorFlow from (seed, key) inside the block.

    The user's own layers draw their initial weights from these generators.
    """
    import tensorflow as tf

    digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
    number = int.from_bytes(digest[:4], "little")
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(number)
    np.random.seed(number)
    tf.random.set_seed(number)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


# --- sources of networks


def of_keras_file(name: str, path: Path) -> OwnNetwork:
    """Reads the network in a file that Keras 3 saved, without its weights.

    Raises:
        DataError: the file is absent or damaged, or training does not support its network.
    """
    hint = "give a network that Keras 3 saved: model.save('my_net.keras')"
    config = read_configuration(path, hint)
    if not isinstance(config, dict):
        raise DataError(f"{shown_value(name)} holds no model", hint)
    try:
        kind, settings = str(config.get("class_name")), config.get("config")
        calls = read_calls(shown_value(name), kind, settings, renumbers=True)
        architecture = architecture_of(
            shown_value(name), calls, statistics=lambda call: read_statistics(path, call)
        )
    except ConfigurationError as error:
        raise DataError(error.message, error.hint) from None  # an error of the file, not of the command line
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{shown_value(name)} is damaged: {shown_value(repr(error))}", hint) from None
    digest = hashlib.sha256(read_bytes(path, file_size(path))).hexdigest()
    return OwnNetwork(name, digest, architecture=architecture)


def of_checkpoint(name: str, data: PlainValue, what: str, needs: str) -> OwnNetwork:
    """Reads the network of a checkpoint; no file that the checkpoint names is read or run.

    Args:
        name: name of the network.
        data: the data of :meth:`OwnNetwork.to_data`.
        what: name of the checkpoint, for messages.
        needs: the hint to name the user's file, if the network has layers that are only in that file.

    Raises:
        DataError: the data are not a network.
    """
    architecture = from_data(data, what)
    hint = needs if architecture.own_layers else None
    return OwnNetwork(name, str(data.get("sha256")), architecture=architecture, needs=hint)
