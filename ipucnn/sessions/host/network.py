"""The forward pass of a network layer by layer, where a host computes it differently from Keras; and its weights.

- On a CPU many layers are computed by faster operations (``fast_layers.py``).
- In 16 bits, what leaves a layer, and the gradient that comes back to it, is rounded; so is the image.
- Under recomputation the activations of every pipeline stage but the last are forgotten, and computed again when the
  gradient arrives (Chen et al. 2016, arXiv:1604.06174); the last stage's are still there, as on IPUs.

A layer is one operation: its bias and its activation are computed before rounding.  Layers that move or drop numbers,
or take the larger of them, leave float16's grid alone and are passed over; where several gradients meet they are added
in float32 and rounded once.
"""

import contextlib
import inspect
from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np
import tensorflow as tf

from ipucnn.aliases import KerasLayer, KerasModel, Tensor, TfVariable
from ipucnn.compat import tf_variable
from ipucnn.models.blueprint import Step, read_blueprint, stages_by_layer
from ipucnn.models.layers import BatchNormalization, ExecutionContext, execution_context
from ipucnn.models.names import named_weights
from ipucnn.sessions.host.arithmetic import Arithmetic, Rounding
from ipucnn.sessions.host.fast_layers import FastLayers, find_fast_layers

_EXACT = (
    "Concatenate", "Cropping2D", "Flatten", "GlobalMaxPooling2D", "MaxPooling2D", "Permute", "Reshape", "SubsamplePad",
    "ZeroPadding2D",
)  # fmt: skip


def _is_exact(layer: KerasLayer) -> bool:
    """Whether a layer gives numbers of float16's grid for numbers of that grid."""
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
    """A functional model of one input and one output.

    Args:
        model: whose layers are called.
        splits: layers that open a stage whose forward pass is recomputed, but for the last; none: nothing is.
        on_cpu: layers may be computed by other operations than Keras' (``fast_layers.py``).
        alone: what leaves each layer is needed, for it is rounded or looked at.
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
        """The layers of a stage whose outputs are read by later stages, or are the network's."""
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
        """The logits.

        Args:
            images: float32, in the network's range.
            training: as Keras has it.
            rounding: of what leaves each layer.
            context: for layers that must know micro-batches.
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

            given = [tensors[name] for name in sources]
            is_last = number == len(self._stages) - 1
            outputs = stage(given, context) if is_last else _recomputed(stage, given, context)
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
        """Adds the outputs of a stage's layers to those of the layers before them."""
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
    """The outputs of a stage, of which nothing but the inputs is kept for the backward pass."""
    before = context.again() if context is not None else None

    @tf.custom_gradient
    def forget(*inputs: Tensor) -> Any:
        def gradient(*upstream: Tensor, variables: Sequence[TfVariable] = ()) -> Any:
            # Not before the gradient is there; otherwise TensorFlow computes it at once, or merges it with the first.
            with tf.control_dependencies(upstream):
                again = [tf.identity(tensor) for tensor in inputs]
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch([*again, *variables])
                    outputs = stage(again, before)
                gradients = tape.gradient(
                    outputs,
                    [*again, *variables],
                    output_gradients=list(upstream),
                    unconnected_gradients=tf.UnconnectedGradients.ZERO,
                )
            return gradients[: len(inputs)], gradients[len(inputs) :]

        return stage(inputs, context), gradient

    outputs = forget(*inputs)
    return outputs if isinstance(outputs, (list, tuple)) else [outputs]


class Weights:
    """A model's weights as the run keeps them, and as the layers read them.

    They are the same variables, on float16's grid in 16.16.  In 16.32 the layers read a rounded copy of what is kept,
    as on IPUs; but batch norm's, which its operation takes in float32.  Moving statistics that move once per weight
    update are float32 in every precision, as on IPUs: nothing measures them anew, so what rounding takes is lost.

    Args:
        model: with the initial weights.
        arithmetic: of the session.
    """

    def __init__(self, model: KerasModel, arithmetic: Arithmetic) -> None:
        read = named_weights(model)
        norms = [x for x in model.layers if isinstance(x, BatchNormalization)]
        if arithmetic.precision == "16.32":
            wide = tuple(f"{norm.name}/" for norm in norms)
        else:
            wide = tuple(f"{norm.name}/moving_" for norm in norms if norm.moves_once)
        self._precision = arithmetic.precision
        # In the order of the network: of those that are rounded, which are read, and by name which are kept.
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
        """Rounds to nearest what the layers read: for whatever is no training."""
        self._copy(self.rounded, self._rounding)

    def copy(self, rounding: Rounding) -> None:
        """Gives the layers what they read in one weight update, where that is not what is kept."""
        if self._precision == "16.32":
            self._copy([name for name in self.trainable if name in self.rounded], rounding)

    def _copy(self, names: Sequence[str], rounding: Rounding) -> None:
        kept = [tf.convert_to_tensor(self.kept[name]) for name in names]
        for name, value in zip(names, rounding.all(kept, "the weights as layers read them")):
            self.read[name].assign(value)

    def round_gradients(self, gradients: Sequence[Tensor], rounding: Rounding) -> List[Tensor]:
        """The gradients of the trainable weights, rounded where the weights that layers read are."""
        chosen = [i for i, name in enumerate(self.trainable) if not self.rounded or name in self.rounded]
        values = list(gradients)
        for i, value in zip(chosen, rounding.all([values[i] for i in chosen], "the weights' gradients")):
            values[i] = value
        return values
