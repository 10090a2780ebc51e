"""Optimizers of both sessions: Keras' formulas with TensorFlow's kernels, and state that can be saved.

Keras 2.6 and Keras 3 keep optimizer state in different classes and orders; here a slot is a variable named
after its weight, so one checkpoint works with both.

TensorFlow's kernels compute in the weights' type.  In 16 bits a squared gradient above 65504 would make the state
infinite and the weight not a number.  So the kernels' formulas update 16-bit weights in float32, and weights and state
are then rounded to 16 bits.
"""

from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import tensorflow as tf

from ipucnn.aliases import Tensor, TfVariable
from ipucnn.training.optimizer_settings import AVERAGE, LOSS_SCALE, OptimizerSettings
from ipucnn.training.program import Program


def penalty_weight(program: Program) -> float:
    """Returns the number of losses that the gradient of a weight update sums: penalties are part of each."""
    is_sum = program.gradient_accumulation_reduction_method == "sum"
    return float(program.gradient_accumulation_count) if is_sum else 1.0


class LossScaler:
    """Automatic loss scaling as the SDK's ``ALSOptimizer`` does it (keras/ipu/optimizers of graphcore/keras).

    The scale begins at 1, and is adjusted after every 8th weight update.  If more than 1e-5 of the scaled gradients of
    these weight updates exceeded 2**13, the scale is halved.  Otherwise it is doubled.  It does not change if the
    result would be less than 1, or 2**15 or more.  No weight update is skipped.  The state is kept in variables, to be
    saved with the optimizer's slots.

    Args:
        num_gradients: the number of gradient values in a weight update.

    Attributes:
        factor: the loss scale, a float32 variable.
        slots: all of the state, by name.
    """

    PERIOD, EDGE, LARGEST = 8, 2.0**13, 2.0**15
    # One value in this many may exceed the edge.
    _SHARE = 100_000

    def __init__(self, num_gradients: int) -> None:
        self.factor = tf.Variable(1.0, trainable=False, name="loss_scale")
        # The count is exact up to 2**24, which is more than the allowed number for any network.
        self._beyond = tf.Variable(0.0, trainable=False, name="gradients_beyond")
        self._allowed = float(self.PERIOD * num_gradients // self._SHARE)
        self.slots: Dict[str, TfVariable] = {LOSS_SCALE: self.factor, "loss_scale/beyond": self._beyond}

    def unscaled(self, gradients: Sequence[Tensor], times: float = 1.0) -> Tuple[List[Tensor], Tensor]:
        """Returns the gradients without the scale, and the number of scaled values beyond the edge.

        Args:
            gradients: the gradients of the scaled loss.
            times: an additional factor that they contain.
        """
        factor = tf.convert_to_tensor(self.factor)
        gradients = [tf.cast(gradient, tf.float32) for gradient in gradients]
        beyond = tf.add_n(
            [tf.reduce_sum(tf.cast(tf.abs(g) > self.EDGE * times, tf.float32)) for g in gradients]
        )
        return [g / factor for g in gradients], beyond

    def rescale(self, beyond: Tensor, update: Tensor) -> List[Tensor]:
        """Adds to the count of values beyond the edge, and adjusts the scale if it is due.

        Args:
            beyond: the number of values beyond the edge in this weight update, from :meth:`unscaled`.
            update: the number of the weight update, from 0.

        Returns:
            The assignments.
        """
        factor = tf.convert_to_tensor(self.factor)
        total = self._beyond + beyond
        is_due = tf.equal((tf.cast(update, tf.int32) + 1) % self.PERIOD, 0)
        adjusted = tf.where(total > self._allowed, factor / 2.0, factor * 2.0)
        changes = tf.logical_and(is_due, tf.logical_and(adjusted >= 1.0, adjusted < self.LARGEST))
        return [
            self.factor.assign(tf.where(changes, adjusted, factor)),
            self._beyond.assign(tf.where(is_due, 0.0, total)),
        ]


class Optimizer:
    """Applies gradients to weights; every slot is a variable of the weight's shape and type.

    Args:
        settings: from :func:`make_settings`.
        weights: the tf.Variables to train, by canonical name.
        statistics: moving statistics by name, which are averaged if weights are.
        penalties: factors (l1, l2) of weights by name; l1 sum |w| + l2 sum w^2 is added to the loss, as by Keras'
            regularizers.
        penalty_weight: weight of the penalties in the gradients, such as the number of losses that these sum.

    Attributes:
        weights: the trained variables by name, in order.
        slots: the state by ``<name>/<slot>``.
    """

    def __init__(
        self,
        settings: OptimizerSettings,
        weights: Mapping[str, TfVariable],
        statistics: Optional[Mapping[str, TfVariable]] = None,
        penalties: Optional[Mapping[str, Tuple[float, float]]] = None,
        penalty_weight: float = 1.0,
    ) -> None:
        self.settings = settings
        self.penalties = {name: pair for name, pair in (penalties or {}).items() if name in weights}
        self._penalty_weight = penalty_weight
        self.weights = dict(weights)
        self._statistics = dict(statistics or {}) if settings.ema_decay else {}
        self.slots: Dict[str, TfVariable] = {}
        for slot in settings.slot_names:
            variables = {**self.weights, **self._statistics} if slot == AVERAGE else self.weights
            for name, variable in variables.items():
                # In 16 bits an average would not move: the change in one weight update is too small.
                dtype = tf.float32 if slot == AVERAGE else variable.dtype
                self.slots[f"{name}/{slot}"] = tf.Variable(
                    tf.zeros(variable.shape, dtype), trainable=False, name=f"{slot}_slot"
                )

    def apply(
        self,
        gradients: Sequence[Tensor],
        learning_rate: Tensor,
        weight_update: Tensor,
        rounded: Optional[Callable[[List[Tensor]], List[Tensor]]] = None,
    ) -> None:
        """Applies one weight update.

        Args:
            gradients: one gradient per weight, in their order.
            learning_rate: scalar float32 tensor.
            weight_update: scalar int tensor, the number of updates before this one (for Adam's bias correction).
            rounded: the function that rounds new float32 weights and state to the precision in which they are kept;
                None: they are kept in float32.
        """
        count = tf.cast(weight_update, tf.float32) + 1.0
        shared = self._shared(count)
        done: List[Tensor] = []
        new_values: List[Tuple[TfVariable, Tensor]] = []
        gradients = self.clipped(self.penalized(list(self.weights), gradients))
        for name, gradient in zip(self.weights, gradients):
            if rounded is None:
                done += self._apply(name, gradient, learning_rate, count, shared)
            else:
                new_values += self._new_values(name, gradient, learning_rate, count)
        if rounded is not None:
            values = rounded([value for _, value in new_values])
            done = [variable.assign(value) for (variable, _), value in zip(new_values, values)]
        if self.settings.ema_decay:
            with tf.control_dependencies(done):
                for name, variable in self.weights.items():
                    self._average(name, variable, count)
                self.average_statistics(weight_update)

    def penalty(self) -> Tensor:
        """Returns the sum of all penalties of the present weights, scalar float32."""
        total = tf.constant(0.0)
        for name, (l1, l2) in self.penalties.items():
            weight = tf.cast(tf.convert_to_tensor(self.weights[name]), tf.float32)
            total += l1 * tf.reduce_sum(tf.abs(weight)) + l2 * tf.reduce_sum(tf.square(weight))
        return total

    def penalized(
        self, names: Sequence[str], gradients: Sequence[Tensor], times: float = 1.0
    ) -> List[Tensor]:
        """Returns the gradients of weights with those of their penalties.

        Args:
            names: the weights.
            gradients: their gradients.
            times: the factor that the gradients contain.
        """
        penalized = []
        for name, gradient in zip(names, gradients):
            if name in self.penalties:
                l1, l2 = (factor * self._penalty_weight * times for factor in self.penalties[name])
                weight = tf.cast(tf.convert_to_tensor(self.weights[name]), tf.float32)
                gradient = tf.cast(gradient, tf.float32) + (l1 * tf.sign(weight) + 2.0 * l2 * weight)
            penalized.append(gradient)
        return penalized

    def clipped(self, gradients: Sequence[Tensor], times: float = 1.0) -> List[Tensor]:
        """Returns the gradients, scaled down if their global norm is above ``clip_gradient_norm``.

        All are multiplied by the same number, which keeps their direction (Pascanu et al. 2013, arXiv:1211.5063,
        section 3.2; Keras' ``global_clipnorm``).  If the norm is not finite, the gradients become not-a-number.

        Args:
            gradients: the gradients of a weight update, before terms for weight decay are added.
            times: an additional factor that they contain.
        """
        largest = self.settings.clip_gradient_norm
        if not largest:
            return list(gradients)
        gradients = [tf.cast(gradient, tf.float32) for gradient in gradients]
        norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(g)) for g in gradients])) / times
        # norm * 0 is 0, or not-a-number if the norm is infinite or not-a-number.
        factor = tf.where(norm > largest, largest / norm, 1.0) + norm * 0.0
        return [g * factor for g in gradients]

    def _average(self, name: str, variable: TfVariable, count: Tensor) -> Tensor:
        """Moves an average after weight update number ``count``, from 1 on: d average + (1 - d) value.

        This is the averaging of Polyak and Juditsky 1992 (doi:10.1137/0330046), with exponential weights as in timm's
        ``ModelEma``.  The decay is d = min(ema_decay, (count - 1) / (count + 9)), so that an average begins as the
        first updated value, and short runs forget it; TensorFlow's ``ExponentialMovingAverage`` has
        (1 + n) / (10 + n), which begins one update earlier.
        """
        average = self.slots[f"{name}/{AVERAGE}"]
        decay = tf.minimum(self.settings.ema_decay, (count - 1.0) / (count + 9.0))
        value = tf.cast(tf.convert_to_tensor(variable), tf.float32)
        return average.assign(decay * tf.convert_to_tensor(average) + (1.0 - decay) * value)

    def average_statistics(self, weight_update: Tensor, only: Optional[TfVariable] = None) -> List[Tensor]:
        """Moves the averages of moving statistics, or of ``only`` one; does nothing if nothing is averaged."""
        count = tf.cast(weight_update, tf.float32) + 1.0
        return [
            self._average(name, variable, count)
            for name, variable in self._statistics.items()
            if only is None or variable is only
        ]

    @property
    def num_weights(self) -> int:
        """Returns the number of values in all trained variables."""
        return sum(int(variable.shape.num_elements()) for variable in self.weights.values())

    def apply_one(
        self, name: str, gradient: Tensor, learning_rate: Tensor, weight_update: Tensor
    ) -> List[Tensor]:
        """Applies a weight update to one weight, without clipping and moving statistics.

        The arguments are those of :meth:`apply`, but ``weight_update`` is a float32 scalar.

        Returns:
            The operations, for control dependencies in graph mode.
        """
        count = weight_update + 1.0
        done = self._apply(name, gradient, learning_rate, count, self._shared(count))
        if self.settings.ema_decay:
            with tf.control_dependencies(done):
                done = [*done, self._average(name, self.weights[name], count)]
        return done

    def _apply(
        self, name: str, gradient: Tensor, learning_rate: Tensor, count: Tensor, shared: Dict[str, Tensor]
    ) -> List[Tensor]:
        """Updates one weight; ``count`` is the number of the weight update from 1 on."""
        variable = self.weights[name]
        if variable.dtype == tf.float16:
            # Values that are too large become the largest number, as on IPUs without --fp-exceptions.
            return [
                kept.assign(tf.cast(tf.clip_by_value(value, kept.dtype.min, kept.dtype.max), kept.dtype))
                for kept, value in self._new_values(name, gradient, learning_rate, count)
            ]
        l2, decay = self._decays(variable)
        if l2:
            gradient = gradient + l2 * variable
        if not decay:
            return [self._kernel(name, gradient, learning_rate, shared)]
        with tf.control_dependencies([gradient]):
            decayed = variable.assign_sub(learning_rate * decay * variable)
        with tf.control_dependencies([decayed]):
            return [self._kernel(name, gradient, learning_rate, shared)]

    def _decays(self, variable: TfVariable) -> Tuple[float, float]:
        """Returns the L2 penalty and the decoupled weight decay of a weight; 0: none."""
        s = self.settings
        if variable.shape.rank < 2 and not s.decay_biases_and_norms:
            return 0.0, 0.0
        return s.l2_regularization, 0.0 if s.name == "lars" else s.weight_decay

    def _kernel(
        self, weight: str, gradient: Tensor, learning_rate: Tensor, shared: Dict[str, Tensor]
    ) -> Tensor:
        """Runs TensorFlow's operation that updates a 32-bit weight and its state in place."""
        name, p, variable = self.settings.name, self.settings.params, self.weights[weight]

        def slot(slot_name: str) -> Tensor:
            return self.slots[f"{weight}/{slot_name}"].handle

        if name in ("adam", "adamw"):
            return tf.raw_ops.ResourceApplyAdam(
                var=variable.handle,
                m=slot("m"),
                v=slot("v"),
                lr=learning_rate,
                **shared,
                grad=gradient,
            )
        if name == "rmsprop":
            return tf.raw_ops.ResourceApplyRMSProp(
                var=variable.handle,
                ms=slot("mean_square"),
                mom=slot("momentum"),
                lr=learning_rate,
                rho=p["rho"],
                momentum=p["momentum"],
                epsilon=p["epsilon"],
                grad=gradient,
            )
        if name == "lars":
            gradient, learning_rate = self._scaled_by_layer(variable, gradient, learning_rate)
        if not p["momentum"]:
            return tf.raw_ops.ResourceApplyGradientDescent(
                var=variable.handle, alpha=learning_rate, delta=gradient
            )
        return tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=slot("momentum"),
            lr=learning_rate,
            grad=gradient,
            momentum=p["momentum"],
            use_nesterov=bool(p["nesterov"]),
        )

    def _shared(self, count: Tensor) -> Dict[str, Tensor]:
        """Returns the arguments that the operations of all weights share in weight update number ``count``."""
        p = self.settings.params
        if self.settings.name not in ("adam", "adamw"):
            return {}
        powers = {f"beta{k}_power": tf.pow(float(p[f"beta_{k}"]), count) for k in (1, 2)}
        values = {"beta1": p["beta_1"], "beta2": p["beta_2"], "epsilon": p["epsilon"]}
        return {**powers, **{name: tf.constant(value, tf.float32) for name, value in values.items()}}

    def _scaled_by_layer(self, weight: Tensor, gradient: Tensor, rate: Tensor) -> Tuple[Tensor, Tensor]:
        """Returns gradient and learning rate of LARS (You et al. 2017, arXiv:1708.03888).

        Biases and norm scales (vectors) use the plain rate.
        """
        if weight.shape.rank < 2:
            return gradient, rate
        p = self.settings.params
        decay = p["weight_decay"]
        weight_norm, gradient_norm = tf.norm(weight), tf.norm(gradient)
        gradient = gradient + decay * weight
        denominator = gradient_norm + decay * weight_norm + p["epsilon"]
        usable = tf.logical_and(weight_norm > 0, gradient_norm > 0)
        return gradient, rate * tf.where(usable, p["eeta"] * weight_norm / denominator, 1.0)

    def _new_values(
        self, name: str, gradient: Tensor, learning_rate: Tensor, count: Tensor
    ) -> List[Tuple[TfVariable, Tensor]]:
        """Returns the state of a weight and the weight, each with its new value.

        The values follow from the kernels' formulas in float32.
        """
        s, p, variable = self.settings, self.settings.params, self.weights[name]

        def in_float32(value: Union[Tensor, TfVariable]) -> Tensor:
            return tf.cast(tf.convert_to_tensor(value), tf.float32)

        weight, gradient, rate, count = map(in_float32, (variable, gradient, learning_rate, count))
        slots = {slot: self.slots[f"{name}/{slot}"] for slot in s.slot_names if slot != AVERAGE}
        old, new = {slot: in_float32(value) for slot, value in slots.items()}, {}
        l2, decay = self._decays(variable)
        if l2:
            gradient = gradient + l2 * weight
        if s.name in ("adam", "adamw"):
            new["m"] = p["beta_1"] * old["m"] + (1.0 - p["beta_1"]) * gradient
            new["v"] = p["beta_2"] * old["v"] + (1.0 - p["beta_2"]) * tf.square(gradient)
            corrected = rate * tf.sqrt(1.0 - tf.pow(p["beta_2"], count)) / (1.0 - tf.pow(p["beta_1"], count))
            change = -corrected * new["m"] / (tf.sqrt(new["v"]) + p["epsilon"])
        elif s.name == "rmsprop":
            new["mean_square"] = p["rho"] * old["mean_square"] + (1.0 - p["rho"]) * tf.square(gradient)
            step = rate * gradient * tf.math.rsqrt(new["mean_square"] + p["epsilon"])
            new["momentum"] = p["momentum"] * old["momentum"] + step
            change = -new["momentum"]
        else:
            if s.name == "lars":
                gradient, rate = self._scaled_by_layer(weight, gradient, rate)
            change = -rate * gradient
            if p["momentum"]:
                new["momentum"] = momentum = p["momentum"] * old["momentum"] - rate * gradient
                change = p["momentum"] * momentum - rate * gradient if p["nesterov"] else momentum
        if decay:
            change = change - rate * decay * weight
        return [*((slots[slot], value) for slot, value in new.items()), (variable, weight + change)]
