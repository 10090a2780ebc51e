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
import inspect
from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np
import tensorflow as tf

from ipucnn.aliases import KerasLayer, KerasModel, Tensor, TfVariable
from ipucnn.compat import tf_variable
from ipucnn.models.blueprint import Step, read_blueprint, stages_by_layer
from ipucnn.models.layers.micro_batches import BatchNormalization, ExecutionContext, execution_context
from ipucnn.models.names import named_weights
from ipucnn.sessions.host.arithmetic import Arithmetic, Rounding
from ipucnn.sessions.host.fast_layers import FastLayers, find_fast_layers

_EXACT = (
    "Concatenate", "Cropping2D", "Flatten", "GlobalMaxPooling2D", "MaxPooling2D", "Permute", "Reshape", "SubsamplePad",
    "ZeroPadding2D",
)  # fmt: skip


def _is_exact(layer: KerasLayer) -> bool:
    """Returns whether a layer maps numbers on float16's grid to numbers on that grid."""
    kind, config = type(layer).__name__, layer.get_config()
    if kind == "Activation":
        return config["activation"] in ("linear", "relu")
    if kind == "ReLU":
        bound, slope, threshold = (config.get(k) or 0.0 for k in ("max_value", "negative_slope", "threshold"))
        return not slope and all(float(np.float16(v)) == v for v in (bound, threshold))
    if kind == "UpSampling2D":
        return config["interpolation"] == "nearest"
    return kind in _EXACT or (kind == "Dropout" and not config["rate"])


class Network:
    """A functional model with one input and one output.

    Args:
        model: the model whose layers are called.
        splits: the layers that open a stage; the forward pass of every stage but the last is recomputed.  Without
            splits nothing is recomputed.
        on_cpu: whether other operations than Keras' may compute layers (``fast_layers.py``).
        alone: whether the output of every layer is needed, because it is rounded or measured.
    """

    def __init__(self, model: KerasModel, splits: Sequence[str] = (), *, on_cpu: bool, alone: bool) -> None:
        blueprint = read_blueprint(model)
        self._input, self._output = blueprint.steps[0].name, blueprint.output
        steps = blueprint.steps[1:]
        stages = stages_by_layer([step.name for step in blueprint.steps], splits)
        self._stages: List[List[Step]] = [[] for _ in range(len(splits) + 1)]
        for step in steps:
            self._stages[stages[step.name]].append(step)
        self._layers = {step.name: model.get_layer(step.name) for step in steps}
        self._exact = {name for name, layer in self._layers.items() if _is_exact(layer)}
        self._takes_training = {
            name
            for name, layer in self._layers.items()
            if "training" in inspect.signature(layer.call).parameters
        }

        self._fast = [FastLayers() for _ in self._stages]
        for number, stage in enumerate(self._stages if on_cpu else ()):
            self._fast[number] = find_fast_layers(stage, self._layers, self._leaving(number), alone)

    def _leaving(self, number: int) -> List[str]:
        """Returns the layers of a stage whose outputs later stages read, or that are the network's output."""
        names = {step.name for step in self._stages[number]}
        later = {name for stage in self._stages[number + 1 :] for step in stage for name in step.inputs}
        return sorted(names & (later | {self._output}))

    def __call__(
        self,
        images: Tensor,
        training: bool,
        rounding: Rounding,
        context: Optional[ExecutionContext] = None,
    ) -> Tensor:
        """Returns the logits.

        Args:
            images: float32, in the network's range.
            training: Keras' ``training`` argument.
            rounding: the rounding of each layer's output.
            context: the micro-batches, for layers that depend on them.
        """
        # The host casts images before IPUs get them, always to nearest.
        tensors = {self._input: rounding.images(images)}
        for number, steps in enumerate(self._stages):
            names = {step.name for step in steps}
            sources = sorted({name for step in steps for name in step.inputs} - names)
            leaving = self._leaving(number)

            def stage(
                inputs: Sequence[Tensor],
                context: Optional[ExecutionContext],
                number: int = number,
                sources: Sequence[str] = sources,
                leaving: Sequence[str] = leaving,
            ) -> List[Tensor]:
                tensors_after = self._run(number, dict(zip(sources, inputs)), training, rounding, context)
                return [tensors_after[name] for name in leaving]

            stage_inputs = [tensors[name] for name in sources]
            is_last = number == len(self._stages) - 1
            outputs = stage(stage_inputs, context) if is_last else _recomputed(stage, stage_inputs, context)
            tensors.update(zip(leaving, outputs))
        return tensors[self._output]

    def _run(
        self,
        number: int,
        tensors: Dict[str, Tensor],
        training: bool,
        rounding: Rounding,
        context: Optional[ExecutionContext],
    ) -> Dict[str, Tensor]:
        """Adds the outputs of a stage's layers to ``tensors``, which has those of the layers before them."""
        fast = self._fast[number]
        computes = fast.training if training else fast.inference
        done = fast.done_in_training if training else fast.done_in_inference
        with contextlib.ExitStack() as stack:
            if context is not None:
                stack.enter_context(execution_context(context))
            for step in self._stages[number]:
                inputs = [tensors[name] for name in step.inputs]
                if step.name in done:
                    output = inputs[0]
                elif step.name in computes:
                    output = computes[step.name](inputs[0])
                else:
                    options = {"training": training} if step.name in self._takes_training else {}
                    output = self._layers[step.name](inputs[0] if len(inputs) == 1 else inputs, **options)
                if step.name not in self._exact:
                    output = rounding.layer_output(output, step.name)
                tensors[step.name] = output
        return tensors


_Stage = Callable[[Sequence[Tensor], Optional[ExecutionContext]], List[Tensor]]


def _recomputed(
    stage: _Stage, inputs: Sequence[Tensor], context: Optional[ExecutionContext]
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
                    outputs = stage(copies, before)
                gradients = tape.gradient(
                    outputs,
                    [*copies, *variables],
                    output_gradients=list(upstream),
                    unconnected_gradients=tf.UnconnectedGradients.ZERO,
                )
            return gradients[: len(inputs)], gradients[len(inputs) :]

        return stage(inputs, context), gradient

    outputs = forget(*inputs)
    return outputs if isinstance(outputs, (list, tuple)) else [outputs]


class Weights:
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
            wide = tuple(f"{norm.name}/" for norm in norms)
        else:
            wide = tuple(f"{norm.name}/moving_" for norm in norms if norm.moves_once)
        self._precision = arithmetic.precision
        # The names of the rounded weights, and the variables that are read and kept, in the order of the network.
        self.rounded = [name for name in read if arithmetic.is_half and not name.startswith(wide)]
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
        self._copy(self.rounded, self._rounding)

    def copy(self, rounding: Rounding) -> None:
        """Updates the copies that the layers read in one weight update, if they are not the kept weights."""
        if self._precision == "16.32":
            self._copy([name for name in self.trainable if name in self.rounded], rounding)

    def _copy(self, names: Sequence[str], rounding: Rounding) -> None:
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
