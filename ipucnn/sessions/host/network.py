"""Computes the forward pass of a network layer by layer, and keeps its weights.

It differs from Keras as follows:

- On a CPU, faster operations compute many layers (``fast_layers.py``).
- In 16 bits, the output of each layer and the gradient that comes back to it are rounded, and so are the images.
- Under recomputation, the activations of every pipeline stage but the last are discarded, and computed again when the
  gradient arrives (Chen et al. 2016, arXiv:1604.06174); those of the last stage are kept, as on IPUs.

A layer is one operation: its bias and its activation are computed before rounding.  The outputs of layers that move or
drop numbers, or take their maximum, stay on float16's grid and are not rounded.  Several gradients of one output are
added in float32 and rounded once.
"""

import contextlib
import functools
import inspect
import re
from typing import Any, Callable, List, NamedTuple, Optional, Sequence

import numpy as np
import tensorflow as tf

from ipucnn.aliases import KerasLayer, KerasModel, Tensor, TfVariable
from ipucnn.compat import tf_variable
from ipucnn.models.blueprint import Node, stages_by_layer
from ipucnn.models.keras_config import read_blueprint, stock_kind
from ipucnn.models.layers.micro_batches import BatchNormalization, ExecutionContext, execution_context
from ipucnn.models.names import named_weights
from ipucnn.models.own import around
from ipucnn.sessions.host.arithmetic import Arithmetic, Rounding
from ipucnn.sessions.host.fast_layers import FastLayers, find_fast_layers

_EXACT = (
    "Concatenate", "Cropping2D", "Flatten", "GlobalMaxPooling2D", "MaxPooling2D", "Permute", "Reshape", "SubsamplePad",
    "ZeroPadding2D",
)  # fmt: skip


def _is_exact(layer: KerasLayer) -> bool:
    """Returns whether a layer maps numbers on float16's grid to numbers on that grid."""
    kind, config = stock_kind(layer), layer.get_config()
    if kind == "Activation":
        return config["activation"] in ("linear", "relu")
    if kind == "ReLU":
        bound, slope, threshold = (config.get(k) or 0.0 for k in ("max_value", "negative_slope", "threshold"))
        return not slope and all(float(np.float16(v)) == v for v in (bound, threshold))
    if kind == "UpSampling2D":
        return config["interpolation"] == "nearest"
    return kind in _EXACT or (kind == "Dropout" and not config["rate"])


def _scope(name: str) -> str:
    """Returns a valid scope with the name of a layer: profilers show operations by layer, as for Keras's own."""
    return re.sub(r"[^A-Za-z0-9.]", "_", name).lstrip("_") or "layer"


class _Stage(NamedTuple):
    """A pipeline stage.

    Attributes:
        nodes: its nodes, in order.
        sources: the layers before the stage whose outputs it reads.
        leaving: its layers whose outputs later stages read, or that are the network's output.
        fast: the faster functions of its layers.
    """

    nodes: Sequence[Node]
    sources: Sequence[str]
    leaving: Sequence[str]
    fast: FastLayers


class Network:
    """A functional model with one input and one output.

    Args:
        model: the model whose layers are called.
        arithmetic: the session's arithmetic.
        unpack: the function that brings the images of a batch to the network's range.
        splits: the layers that open a stage; the forward pass of every stage but the last is recomputed.  Without
            splits nothing is recomputed.
        on_cpu: whether other operations than Keras' may compute layers (``fast_layers.py``).
        measures: whether batch norms measure statistics, so that none is computed as a part of another layer.

    Attributes:
        model, arithmetic: as given.
    """

    def __init__(
        self,
        model: KerasModel,
        arithmetic: Arithmetic,
        unpack: Callable[[Tensor], Tensor],
        splits: Sequence[str] = (),
        *,
        on_cpu: bool,
        measures: bool = False,
    ) -> None:
        self.model, self.arithmetic = model, arithmetic
        self._unpack = unpack
        blueprint = read_blueprint(model)
        self._input, self._output = blueprint.nodes[0].name, blueprint.output
        nodes = blueprint.nodes[1:]
        self._layers = {node.name: model.get_layer(node.layer) for node in nodes}
        self._exact = {name for name, layer in self._layers.items() if _is_exact(layer)}
        self._takes_training = {
            name
            for name, layer in self._layers.items()
            if "training" in inspect.signature(layer.call).parameters
        }
        for name, layer in self._layers.items():
            if name not in self._takes_training and not stock_kind(layer):
                self._layers[name] = around(layer)
                self._takes_training.add(name)
        numbers = stages_by_layer([node.name for node in blueprint.nodes], splits)
        self._stages: List[_Stage] = []
        for number in range(len(splits) + 1):
            in_stage = [node for node in nodes if numbers[node.name] == number]
            names = {node.name for node in in_stage}
            sources = {name for node in in_stage for name in node.inputs} - names
            later = {name for node in nodes if numbers[node.name] > number for name in node.inputs}
            leaving = names & (later | {self._output})
            # Each layer's output is needed if it is rounded.
            needed = names if measures or not arithmetic.is_plain else leaving
            fast = find_fast_layers(in_stage, self._layers, needed) if on_cpu else FastLayers()
            self._stages.append(_Stage(in_stage, sorted(sources), sorted(leaving), fast))

    def __call__(
        self,
        images: Tensor,
        training: bool,
        rounding: Optional[Rounding] = None,
        context: Optional[ExecutionContext] = None,
    ) -> Tensor:
        """Returns the logits.

        Args:
            images: the images of a batch, as they are transferred.
            training: Keras' ``training`` argument.
            rounding: the rounding of each layer's output; None: to nearest.
            context: the micro-batches, for layers that depend on them.
        """
        rounding = rounding or Rounding(self.arithmetic)
        # The host casts images before IPUs get them, always to nearest.
        tensors = {self._input: rounding.images(self._unpack(images))}
        for stage in self._stages:
            run = functools.partial(self._run, stage, training, rounding)
            inputs = [tensors[name] for name in stage.sources]
            is_last = stage is self._stages[-1]
            outputs = run(inputs, context) if is_last else _recomputed(run, inputs, context)
            tensors.update(zip(stage.leaving, outputs))
        return tensors[self._output]

    def _run(
        self,
        stage: _Stage,
        training: bool,
        rounding: Rounding,
        inputs: Sequence[Tensor],
        context: Optional[ExecutionContext],
    ) -> List[Tensor]:
        """Returns the outputs of the layers whose outputs leave a stage."""
        tensors = dict(zip(stage.sources, inputs))
        computes = stage.fast.training if training else stage.fast.inference
        with contextlib.ExitStack() as stack:
            if context is not None:
                stack.enter_context(execution_context(context))
            for node in stage.nodes:
                inputs_of_node = [tensors[name] for name in node.inputs]
                if node.name in computes:
                    with tf.name_scope(_scope(node.name)):
                        output = computes[node.name](inputs_of_node[0])
                else:
                    options = {"training": training} if node.name in self._takes_training else {}
                    output = self._layers[node.name](
                        inputs_of_node[0] if len(inputs_of_node) == 1 else inputs_of_node, **options
                    )
                if node.name not in self._exact:
                    output = rounding.layer_output(output, node.name)
                tensors[node.name] = output
        return [tensors[name] for name in stage.leaving]


_RunStage = Callable[[Sequence[Tensor], Optional[ExecutionContext]], List[Tensor]]


def _recomputed(
    run: _RunStage, inputs: Sequence[Tensor], context: Optional[ExecutionContext]
) -> Sequence[Tensor]:
    """Returns the outputs of a stage, and keeps only its inputs for the backward pass."""
    before = context.replayed() if context is not None else None

    @tf.custom_gradient
    def forget(*inputs: Tensor) -> Any:
        def gradient(*upstream: Tensor, variables: Sequence[TfVariable] = ()) -> Any:
            # Recomputation has to wait for the gradient: otherwise TensorFlow runs it at once, or merges it with the
            # first pass.
            with tf.control_dependencies(upstream):
                copies = [tf.identity(tensor) for tensor in inputs]
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch([*copies, *variables])
                    outputs = run(copies, before)
                gradients = tape.gradient(
                    outputs,
                    [*copies, *variables],
                    output_gradients=list(upstream),
                    unconnected_gradients=tf.UnconnectedGradients.ZERO,
                )
            return gradients[: len(inputs)], gradients[len(inputs) :]

        return run(inputs, context), gradient

    outputs = forget(*inputs)
    return outputs if isinstance(outputs, (list, tuple)) else [outputs]


class HostWeights:
    """A model's weights as the run keeps them, and as the layers read them.

    In 32.32 and 16.16 both are the same variables, on float16's grid in 16.16.  In 16.32 the layers read a rounded copy
    of the kept weights, as on IPUs, except for those of batch norm, whose operation takes float32.  Moving statistics
    that move once per weight update are float32 in every precision, as on IPUs: they are never measured anew, so a
    rounding error would stay.

    Args:
        model: the model with its initial weights.
        arithmetic: the session's arithmetic.
    """

    def __init__(self, model: KerasModel, arithmetic: Arithmetic) -> None:
        read = named_weights(model)
        norms = [x for x in model.layers if isinstance(x, BatchNormalization)]
        if arithmetic.precision == "16.32":
            not_rounded = tuple(f"{norm.name}/" for norm in norms)
        else:
            not_rounded = tuple(f"{norm.name}/moving_" for norm in norms if norm.moves_once)
        self._precision = arithmetic.precision
        # The names of the rounded weights, and the variables that are read and kept, in the order of the network.
        self.rounded = [name for name in read if arithmetic.is_half and not name.startswith(not_rounded)]
        self._rounding = Rounding(arithmetic)
        self.read = read
        self.kept = dict(read)
        if arithmetic.precision == "16.32":
            self.kept.update({name: tf.Variable(read[name], trainable=False) for name in self.rounded})
        trained = {id(tf_variable(v)) for v in model.trainable_weights}
        self.trainable = [name for name, v in read.items() if id(v) in trained]
        self.round_to_nearest()

    def round_to_nearest(self) -> None:
        """Rounds the weights that the layers read to nearest, for everything except training."""
        self._round(self.rounded, self._rounding)

    def round_trainable(self, rounding: Rounding) -> None:
        """Updates the copies that the layers read in one weight update, if they are not the kept weights."""
        if self._precision == "16.32":
            self._round([name for name in self.trainable if name in self.rounded], rounding)

    def _round(self, names: Sequence[str], rounding: Rounding) -> None:
        kept = [tf.convert_to_tensor(self.kept[name]) for name in names]
        for name, value in zip(names, rounding.all(kept, "the weights as layers read them")):
            self.read[name].assign(value)

    def round_gradients(self, gradients: Sequence[Tensor], rounding: Rounding) -> List[Tensor]:
        """Rounds the gradients of the trainable weights whose values are rounded for the layers."""
        chosen = [i for i, name in enumerate(self.trainable) if not self.rounded or name in self.rounded]
        values = list(gradients)
        for i, value in zip(chosen, rounding.all([values[i] for i in chosen], "the weights' gradients")):
            values[i] = value
        return values
