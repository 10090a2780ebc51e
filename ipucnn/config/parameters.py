"""The keys of options that take a dictionary: their defaults and meanings, and the formulas they are in.

Schedules, warm-ups, optimizers and norms check their keys against these declarations; ``--help WORD``,
docs/configuration.md and the errors for wrong keys show them.
"""

from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

from ipucnn.errors import did_you_mean

REQUIRED = "required"


class Key(NamedTuple):
    """A key of a dictionary.

    Attributes:
        name: the key.
        default: its value if it is not given; None: it has none, or another option decides.
        help: its meaning.
        default_text: description of a default of None; REQUIRED if the key must be given.
    """

    name: str
    default: Any
    help: str
    default_text: str = ""

    @property
    def shown_default(self) -> str:
        """The words ``default: VALUE``, or ``required``."""
        if self.default_text == REQUIRED:
            return REQUIRED
        return f"default: {self.default_text or str(self.default).lower()}"


class Method(NamedTuple):
    """What a dictionary belongs to: a schedule, a warm-up, an optimizer or a norm.

    Attributes:
        option: name of the option that takes the dictionary.
        name: the word that chooses the method.
        formula: assignments or an expression, in Python, of the keys and of ``SYMBOLS``.
        keys: its keys, in order.
        example: flags to type.
        differs: how it differs from Keras or PyTorch; "" if it does not.
    """

    option: str
    name: str
    formula: str
    keys: Tuple[Key, ...]
    example: str
    differs: str = ""

    @property
    def title(self) -> str:
        """The method with the option that takes its keys."""
        return f"{self.name}: keys of --{self.option.replace('_', '-')}"

    @property
    def defaults(self) -> Dict[str, Any]:
        """The default of each key."""
        return {key.name: key.default for key in self.keys}

    @property
    def known_keys(self) -> str:
        """The keys in words, for hints."""
        if not self.keys:
            return f"{self.name} has no keys"
        names = ", ".join(key.name for key in self.keys)
        return f"its keys are {names}; `ipucnn train --help {self.name}` describes them"

    def hint(self, unknown: str) -> str:
        """Returns the hint for an unknown key: the key that it resembles, or all of them."""
        return did_you_mean(unknown, self.defaults) or self.known_keys


SYMBOLS: Dict[str, str] = {
    "lr_schedule_params": "rate: initial_learning_rate x the global batch, or --learning-rate; e: epochs done, with "
    "fractions. The result is the learning rate of the next weight update. Lengths are in epochs; cosine and stepped "
    "round them down to weight updates.",
    "lr_warmup_params": "schedule(k): the rate of --lr-schedule at weight update k, from 0; n: weight updates in "
    "warmup_epochs, rounded down.",
    "optimizer_params": "w: a weight; g: its gradient, clipped, plus --l2-regularization x w; rate: the learning rate; "
    "k: the number of the weight update, from 1; m, s, v: state, at first 0. With --weight-decay, w -= rate * "
    "weight_decay * w comes first: decoupled decay, also for sgd, as in Keras. PyTorch's weight_decay of SGD, Adam and "
    "RMSprop is --l2-regularization.",
    "norm_layer": "mean and variance: over the values that are normalised together; gamma, beta: weights of each "
    "channel. --norm-layer NAME alone takes all defaults.",
}
"""What the names in the formulas of an option's methods stand for."""

_INITIAL = Key(
    "initial_learning_rate",
    None,
    "The first learning rate, per sample of the global batch. --learning-rate takes its place, and is not multiplied.",
    REQUIRED,
)
_LENGTH = Key(
    "epochs_to_total_decay", None, "Epochs to decay over.", "num-epochs, less a warm-up of mode shift"
)
_WARMUP = (
    Key(
        "warmup_mode",
        None,
        "shift: the schedule begins after the warm-up; mask: it begins with it.",
        REQUIRED,
    ),
    Key("warmup_epochs", None, "Length of the warm-up.", REQUIRED),
)
_RAMP = "Its first rate is 1 / (n + 1) of the full one; Keras's warm-up of CosineDecay has k / n, and begins with 0."
_MOMENTUM = "Share of the last step that is added to the next one."
_BETAS = (
    Key("beta_1", 0.9, "Decay of the average of gradients, m."),
    Key("beta_2", 0.999, "Decay of the average of squared gradients, v."),
    Key("epsilon", 1e-7, "Keeps the divisor above 0."),
)
_ADAM = (
    "m = beta_1 * m + (1 - beta_1) * g; v = beta_2 * v + (1 - beta_2) * g**2; "
    "w -= rate * sqrt(1 - beta_2**k) / (1 - beta_1**k) * m / (sqrt(v) + epsilon)"
)
_NESTEROV = Key("nesterov", False, "Whether to step by the gradient after the momentum, as Nesterov did.")
_STEP = "v = momentum * v - rate * g; w += momentum * v - rate * g if nesterov else v"
_NORM = "y = gamma * (x - mean) / sqrt(variance + epsilon) + beta"
_BATCH_NORM = f"{_NORM}; moving = momentum * moving + (1 - momentum) * (mean or variance)"
_MOVING = Key("momentum", None, "Share of the moving statistics that is kept.", "--bn-momentum")
_PYTORCH_MOMENTUM = "PyTorch's momentum is 1 minus this one."

METHODS: Tuple[Method, ...] = (
    Method("lr_schedule_params", "const", "rate", (_INITIAL,),
        """--lr-schedule const --lr-schedule-params '{"initial_learning_rate": 0.0001}'"""),
    Method("lr_schedule_params", "cosine",
        "rate * (1 + cos(pi * min(e, epochs_to_total_decay) / epochs_to_total_decay)) / 2", (_INITIAL, _LENGTH),
        "--lr-schedule cosine --learning-rate 0.1 --lr-schedule-params '{\"epochs_to_total_decay\": 20}'",
        "Keras's alpha and PyTorch's eta_min are 0; PyTorch's rate rises again after T_max."),
    Method("lr_schedule_params", "stepped", "values[sum(boundary < e for boundary in boundaries)]", (
        Key("boundaries", None, "Epochs at which the rate changes, rising.", REQUIRED),
        Key("values", None, "The rates before, between and after them, one more than boundaries.", REQUIRED)),
        """--lr-schedule stepped --lr-schedule-params '{"boundaries": [30, 60], "values": [0.1, 0.01, 0.001]}'""",
        "Values are the rates themselves: unlike initial_learning_rate, they are not multiplied by the batch. As in "
        "Keras's PiecewiseConstantDecay, the weight update at a boundary has the rate before it; PyTorch's "
        "MultiStepLR has the rate after it."),
    Method("lr_schedule_params", "polynomial",
        "end_learning_rate_ratio * rate + (1 - end_learning_rate_ratio) * rate"
        " * (1 - min(e, epochs_to_total_decay) / epochs_to_total_decay)**power", (_INITIAL, _LENGTH,
        Key("end_learning_rate_ratio", 0.0, "The last learning rate, as a share of the first."),
        Key("power", 1.0, "The power; 1 is linear.")),
        """--lr-schedule polynomial --learning-rate 0.1 --lr-schedule-params '{"power": 2}'""",
        "It ends with 0 by default; Keras's PolynomialDecay ends with 0.0001."),
    Method("lr_schedule_params", "exponential", "rate * decay_rate**(e / epochs_to_decay)", (_INITIAL,
        Key("epochs_to_decay", None, "Epochs in which the rate falls to decay_rate of it.", REQUIRED),
        Key("decay_rate", None, "The factor.", REQUIRED)),
        "--lr-schedule exponential --learning-rate 0.1"
        " --lr-schedule-params '{\"epochs_to_decay\": 2, \"decay_rate\": 0.9}'",
        "Keras's staircase keeps the rate for decay_steps; --lr-staircase keeps it for an epoch, as PyTorch's "
        "ExponentialLR does."),
    Method("lr_warmup_params", "shift", "schedule(0) * (k + 1) / (n + 1) if k < n else schedule(k - n)", _WARMUP,
        """--lr-warmup-params '{"warmup_mode": "shift", "warmup_epochs": 5}'""", _RAMP),
    Method("lr_warmup_params", "mask", "schedule(k) * min((k + 1) / (n + 1), 1)", _WARMUP,
        """--lr-warmup-params '{"warmup_mode": "mask", "warmup_epochs": 5}'""", _RAMP),
    Method("optimizer_params", "sgd", _STEP, (Key("momentum", 0.0, _MOMENTUM), _NESTEROV),
        """--optimizer sgd --optimizer-params '{"momentum": 0.9, "nesterov": true}'""",
        "As in Keras; PyTorch multiplies the sum of gradients by the rate, which differs where the rate changes."),
    Method("optimizer_params", "lars",
        "rate *= eeta * norm(w) / (norm(g) + weight_decay * norm(w) + epsilon); g += weight_decay * w; " + _STEP, (
        Key("momentum", 0.9, _MOMENTUM),
        Key("weight_decay", 1e-4, "Its own weight decay, in place of --weight-decay."),
        Key("eeta", 1e-3, "The trust coefficient."),
        Key("epsilon", 0.0, "Added to the divisor."),
        _NESTEROV),
        """--optimizer lars --optimizer-params '{"eeta": 0.001, "weight_decay": 0.0001}'""",
        "Keras and PyTorch have none. Biases and norms are updated as by sgd, and so is a weight if one of the two "
        "norms is 0."),
    Method("optimizer_params", "adam", _ADAM, _BETAS,
        """--optimizer adam --optimizer-params '{"beta_2": 0.99, "epsilon": 1e-8}'""",
        "As in Keras; PyTorch adds epsilon, 1e-8, to the root of v / (1 - beta_2**k)."),
    Method("optimizer_params", "adamw", _ADAM, _BETAS,
        """--optimizer adamw --weight-decay 0.01 --optimizer-params '{"beta_2": 0.99}'""",
        "Weight decay is 0 unless --weight-decay is given (0.004 in Keras, 0.01 in PyTorch). Otherwise as adam."),
    Method("optimizer_params", "rmsprop",
        "s = rho * s + (1 - rho) * g**2; v = momentum * v + rate * g / sqrt(s + epsilon); w -= v", (
        Key("rho", 0.9, "Decay of the average of squared gradients, s."),
        Key("momentum", 0.0, _MOMENTUM),
        Key("epsilon", 1e-7, "Keeps the divisor above 0."),
        Key("base_decay_exponent", None, "Gives rho = 1 - 2**base_decay_exponent * global batch.", "rho is used")),
        """--optimizer rmsprop --optimizer-params '{"rho": 0.9, "momentum": 0.9}'""",
        "PyTorch adds epsilon, 1e-8, to the root of s; its alpha (rho) is 0.99."),
    Method("norm_layer", "batch_norm", _BATCH_NORM, (
        _MOVING, Key("epsilon", None, "Added to the variance.", "the network's own")),
        """--norm-layer '{"name": "batch_norm", "momentum": 0.9}'""",
        f"Statistics are those of a micro-batch; the moving variance is that with n - 1. {_PYTORCH_MOMENTUM}"),
    Method("norm_layer", "custom_batch_norm", _BATCH_NORM, (
        # Whatever the network's own layers have, as in model_factory.py of the public application.
        _MOVING, Key("epsilon", 1.001e-5, "Added to the variance.")),
        """--norm-layer '{"name": "custom_batch_norm", "momentum": 0.9}'""",
        f"Moving statistics move once per weight update, not with each micro-batch. {_PYTORCH_MOMENTUM}"),
    Method("norm_layer", "group_norm", _NORM, (
        Key("num_groups", None, "Groups of channels that are normalised together.",
            "the greatest common divisor of 32 and the channels"),
        Key("channels_per_group", None, "Channels of a group, instead of num_groups.", "from num_groups"),
        Key("epsilon", None, "Added to the variance.", "0.00001")),
        """--norm-layer '{"name": "group_norm", "num_groups": 8}'""",
        "Keras's epsilon is 0.001."),
    Method("norm_layer", "none", "y = x", (), "--norm-layer none"),
)  # fmt: skip


def method_of(option: str, name: str) -> Method:
    """Returns the method that a word chooses, of those of an option."""
    return next(method for method in METHODS if (method.option, method.name) == (option, name))


def names_of(option: str) -> Tuple[str, ...]:
    """Returns the methods of an option."""
    return tuple(method.name for method in METHODS if method.option == option)


def methods_about(word: str, options: Sequence[str]) -> List[Method]:
    """Returns the methods of some options that a word is about, regardless of ``-`` and ``_``.

    It is the name or a key of the methods.
    """
    sought = word.strip("-_ ").lower().replace("-", "_")
    about = [method for method in METHODS if method.option in options]
    named = [method for method in about if method.name == sought]
    return named or [method for method in about if sought in method.defaults]
