"""Settings of optimizers: their parameters and defaults, checked without TensorFlow."""

import json
import math
import shlex
from dataclasses import dataclass
from typing import Any, Mapping, Tuple

from ipucnn.aliases import PlainValue
from ipucnn.config.options import RunConfig, find_meant
from ipucnn.config.parameters import method_of, names_of
from ipucnn.config.spec import OptionSpec
from ipucnn.errors import ConfigurationError, did_you_mean
from ipucnn.text import counted

_SLOTS = {
    "sgd": ("momentum",),
    "lars": ("momentum",),
    "adam": ("m", "v"),
    "adamw": ("m", "v"),
    "rmsprop": ("mean_square", "momentum"),
}
# The distance of the largest double below 1 from 1.
_LEAST_SHARE = 2.0**-53
OPTIMIZERS = names_of("optimizer_params")
AVERAGE = "average"
"""The slot of averaged weights."""
LOSS_SCALE = "loss_scale/factor"
"""The name of the automatic loss scale in the state of a run."""


@dataclass(frozen=True)
class OptimizerSettings:
    """A checked optimizer configuration.

    Attributes:
        name: one of OPTIMIZERS.
        params: all of the optimizer's own parameters.
        weight_decay: decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101): w -= lr * weight_decay * w.
        l2_regularization: the factor of the term added to the gradient of every trainable weight: g += l2 * w.
        decay_biases_and_norms: whether these two act on weights of one dimension, too; timm's default is not.
        clip_gradient_norm: the largest global norm of the gradients of a weight update; 0: no limit.
        ema_decay: the decay of the averages of all weights; 0: no averages.
    """

    name: str
    params: Mapping[str, Any]
    weight_decay: float = 0.0
    l2_regularization: float = 0.0
    decay_biases_and_norms: bool = True
    clip_gradient_norm: float = 0.0
    ema_decay: float = 0.0

    @property
    def slot_names(self) -> Tuple[str, ...]:
        """Returns the names of the state tensors of every weight, on the host and on IPUs.

        RMSprop's operation always takes both of its tensors, with momentum or without.
        """
        unused = self.name != "rmsprop" and not self.params.get("momentum")
        names = tuple(slot for slot in _SLOTS[self.name] if not (slot == "momentum" and unused))
        return (*names, AVERAGE) if self.ema_decay else names


def make_settings(
    name: str,
    params: Mapping[str, PlainValue],
    *,
    global_batch_size: int,
    decay_biases_and_norms: bool = True,
    **others: float,
) -> OptimizerSettings:
    """Checks an optimizer's parameters and fills in the defaults; ``others`` are further settings.

    ``base_decay_exponent`` of RMSprop gives rho = 1 - 2**exponent * global batch size, so that the moving average
    extends over the same number of samples at any batch size (Masters et al. 2021, arXiv:2106.03640).

    Raises:
        ConfigurationError: the optimizer or a parameter is unknown, or a parameter is out of range.
    """
    if name not in OPTIMIZERS:
        hint = did_you_mean(name, OPTIMIZERS) or f"one of {', '.join(OPTIMIZERS)}"
        raise ConfigurationError(f"optimizer '{name}' does not exist", hint)
    method = method_of("optimizer_params", name)
    values = dict(method.defaults)
    for key, value in params.items():
        if key not in method.defaults:
            if key == "momentum" and not value:
                continue  # the general default {"momentum": 0} has no effect on an optimizer without momentum
            spec = find_meant(key)
            if spec is not None and spec.name == "optimizer_params":
                spec = None  # a parameter of other optimizers
            hint = method.hint(key) if spec is None else f"it is an option of its own: {_typed(spec, value)}"
            raise ConfigurationError(f"optimizer {name} has no parameter '{key}'", hint)
        if key == "nesterov" and not isinstance(value, bool):
            raise ConfigurationError(f"optimizer parameter nesterov is '{value}'", "give it true or false")
        if key != "nesterov" and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ConfigurationError(
                f"optimizer parameter {key} is '{value}', not a number", f"give {key} a number"
            )
        values[key] = value
    exponent = values.pop("base_decay_exponent", None)
    if exponent is not None:
        values["rho"] = _rho(exponent, global_batch_size)
    for key, value in values.items():
        if key in ("momentum", "rho", "beta_1", "beta_2") and not 0 <= value < 1:
            raise ConfigurationError(
                f"optimizer parameter {key} is {value:g}", f"{key} must be at least 0 and below 1"
            )
        if value < 0:
            raise ConfigurationError(f"optimizer parameter {key} is {value:g}", f"{key} must not be negative")
    return OptimizerSettings(name, values, decay_biases_and_norms=decay_biases_and_norms, **others)


def _typed(spec: OptionSpec, value: PlainValue) -> str:
    """Returns an option and its value as a shell takes them."""
    if spec.is_bool:
        return spec.flag if value else f"--no-{spec.key}"
    words = value if spec.kind.is_list and isinstance(value, list) else [value]
    texts = (json.dumps(word) if isinstance(word, (dict, list)) else str(word) for word in words)
    return " ".join([spec.flag, *map(shlex.quote, texts)])


def _rho(exponent: float, global_batch_size: int) -> float:
    """Returns RMSprop's rho for a ``base_decay_exponent``; refuses an exponent that gives none."""
    share = 2.0**exponent * global_batch_size if exponent <= 0 else math.inf
    if not 0 <= 1.0 - share < 1:
        least, most = math.log2(_LEAST_SHARE / global_batch_size), -math.log2(global_batch_size)
        raise ConfigurationError(
            f"optimizer parameter base_decay_exponent is {exponent:g}, and 1 - 2**base_decay_exponent x the global "
            f"batch of {counted(global_batch_size, 'sample')} must be at least 0 and below 1",
            f"give base_decay_exponent a number from {math.ceil(least)} to {math.floor(most)}",
        )
    return 1.0 - share


def settings_of_run(config: RunConfig, global_batch_size: int) -> OptimizerSettings:
    """Returns the optimizer settings of a run's configuration; raises the errors of :func:`make_settings`."""
    return make_settings(
        config.optimizer,
        config.optimizer_params,
        global_batch_size=global_batch_size,
        weight_decay=config.weight_decay,
        l2_regularization=config.l2_regularization,
        decay_biases_and_norms=config.decay_biases_and_norms,
        clip_gradient_norm=config.clip_gradient_norm or 0.0,
        ema_decay=config.ema_decay or 0.0,
    )
