"""Learning-rate schedules as pure functions of the weight update, with NumPy only.

``initial_learning_rate`` is per sample, as in the public Graphcore CNN application: it is multiplied by the
global batch size (linear scaling, Goyal et al. 2017, arXiv:1706.02677).  ``--learning-rate`` is absolute.
"""

from typing import Callable, Dict, Mapping, Optional

import numpy as np

from ipucnn.aliases import PlainValue
from ipucnn.config.bounds import MAX_FLOAT32
from ipucnn.config.parameters import Method, method_of, names_of
from ipucnn.errors import ConfigurationError

Schedule = Callable[[np.ndarray], np.ndarray]
"""Weight updates (int array) -> learning rates."""

# The number of weight updates whose rates are computed at once to find the largest rate of a run.
PIECE = 2**20


def largest_rate(schedule: Schedule, num_weight_updates: int) -> float:
    """Returns the largest learning rate of a run; the memory it takes is that of :data:`PIECE` weight updates."""
    pieces = range(0, num_weight_updates, PIECE)
    return max(
        float(schedule(np.arange(first, min(first + PIECE, num_weight_updates))).max()) for first in pieces
    )


def _check_keys(what: str, params: Mapping[str, PlainValue], method: Method) -> None:
    # An unknown key is often the missing one with a slip of the keyboard.
    for key in params:
        if key not in method.defaults:
            raise ConfigurationError(f"{what} has an unknown key '{key}'", method.hint(key))
    missing = [key for key in method.defaults if key not in params]
    if missing:
        raise ConfigurationError(f"{what} lacks {', '.join(missing)}", method.known_keys)


def _number(what: str, key: str, value: object, minimum: Optional[float] = None) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigurationError(f"{key} of {what} is '{value}', not a number", f"give {key} a number")
    if minimum is not None and value < minimum:
        raise ConfigurationError(f"{key} of {what} is {value}", f"use {minimum} or more")
    return float(value)


def make_schedule(
    name: str,
    params: Mapping[str, PlainValue],
    *,
    global_batch_size: int,
    weight_updates_per_epoch: int,
    num_epochs: int,
    learning_rate: Optional[float] = None,
    warmup: Optional[Mapping[str, PlainValue]] = None,
    staircase: bool = False,
) -> Schedule:
    """Returns the learning rate as a function of the number of weight updates done.

    Args:
        name: const, cosine, stepped, polynomial or exponential.
        params: the schedule's own parameters, with lengths in epochs.  ``epochs_to_total_decay`` defaults to
            the run's epochs minus a shifted warm-up.
        global_batch_size: samples per weight update.
        weight_updates_per_epoch: weight updates per epoch.
        num_epochs: epochs of the run.
        learning_rate: absolute initial rate, instead of ``initial_learning_rate`` per sample.
        warmup: ``warmup_mode`` shift (the schedule starts after the warm-up) or mask (the schedule runs
            from the start under a rising ramp), and ``warmup_epochs``.
        staircase: whether to keep the rate constant in each epoch.

    Returns:
        A function from an integer array of weight updates to float32 rates of the same shape.

    Raises:
        ConfigurationError: a missing, unknown or impossible parameter.
    """
    method = method_of("lr_schedule_params", name)
    values = {**{key: value for key, value in method.defaults.items() if value is not None}, **params}
    what = f"lr-schedule '{name}'"
    if learning_rate is not None:
        values["initial_learning_rate"] = learning_rate
        scale = 1.0
    else:
        scale = float(global_batch_size)
    warmup_epochs = 0.0
    mode = "mask"
    if warmup:
        mode = str(warmup.get("warmup_mode", mode))
        if mode not in names_of("lr_warmup_params"):
            raise ConfigurationError(
                f"warmup_mode '{mode}' does not exist", f"use {' or '.join(names_of('lr_warmup_params'))}"
            )
        _check_keys("lr-warmup-params", warmup, method_of("lr_warmup_params", mode))
        warmup_epochs = _number("lr-warmup-params", "warmup_epochs", warmup["warmup_epochs"], 0)
    if "epochs_to_total_decay" in method.defaults and "epochs_to_total_decay" not in values:
        # Without a length, the rate decays until the end of the run.
        values["epochs_to_total_decay"] = max(num_epochs - (warmup_epochs if mode == "shift" else 0), 1e-9)
    _check_keys(what, values, method)
    schedule = _base_schedule(name, what, values, scale, weight_updates_per_epoch)
    _check_ends(what, schedule, num_epochs * weight_updates_per_epoch)
    if warmup_epochs:
        schedule = _with_warmup(schedule, mode, float(np.floor(warmup_epochs * weight_updates_per_epoch)))

    def rates(updates: np.ndarray) -> np.ndarray:
        steps = np.asarray(updates, dtype=np.float64)
        if staircase:
            steps = steps // weight_updates_per_epoch * weight_updates_per_epoch
        return schedule(steps).astype(np.float32)

    return rates


def _check_ends(what: str, schedule: Schedule, num_weight_updates: int) -> None:
    """Refuses rates that no 32-bit float can hold.

    A schedule rises or falls all the time, and a warm-up makes rates smaller, so the ends have the largest rate.  Only
    stepped does not, whose values are the rates.
    """
    updates = np.array([0, max(0, num_weight_updates - 1)])
    with np.errstate(over="ignore", invalid="ignore"):
        for update, rate in zip(updates, schedule(updates.astype(np.float64))):
            if not rate <= MAX_FLOAT32:
                raise ConfigurationError(
                    f"the learning rate of {what} is {rate:g} at weight update {update}, which 32 bits cannot hold",
                    "give smaller numbers, as in --learning-rate 0.1",
                )


def _base_schedule(
    name: str, what: str, values: Dict[str, PlainValue], scale: float, weight_updates_per_epoch: int
) -> Schedule:
    if name == "stepped":
        if not isinstance(values["boundaries"], list) or not isinstance(values["values"], list):
            raise ConfigurationError(
                f"boundaries and values of {what} must be lists",
                '--lr-schedule-params \'{"boundaries": [30, 60], "values": [1, 0.1, 0.01]}\'',
            )
        boundaries, rates = list(values["boundaries"]), list(values["values"])
        if len(boundaries) != len(rates) - 1:
            raise ConfigurationError(
                f"{what} has {len(boundaries)} boundaries and {len(rates)} values",
                f"give {len(rates) - 1} boundaries, one less than values",
            )
        edges = np.array([_number(what, "boundaries", b, 0) for b in boundaries])
        if np.any(np.diff(edges) <= 0):
            raise ConfigurationError(f"boundaries of {what} do not rise: {boundaries}", "sort them")
        edges = np.floor(edges * weight_updates_per_epoch)
        levels = np.array([_number(what, "values", v, 0) for v in rates])
        # As in Keras' PiecewiseConstantDecay, the boundary itself still has the value before it.
        return lambda steps: levels[np.searchsorted(edges, steps, side="left")]
    initial = _number(what, "initial_learning_rate", values["initial_learning_rate"], 0) * scale
    if name == "const":
        return lambda steps: np.full(np.shape(steps), initial)
    if name == "exponential":
        length = _number(what, "epochs_to_decay", values["epochs_to_decay"]) * weight_updates_per_epoch
        rate = _number(what, "decay_rate", values["decay_rate"], 0)
        if length <= 0:
            raise ConfigurationError(f"epochs_to_decay of {what} must be above 0", "give it 1 or more")
        return lambda steps: initial * rate ** (steps / length)
    length = (
        _number(what, "epochs_to_total_decay", values["epochs_to_total_decay"]) * weight_updates_per_epoch
    )
    if length <= 0:
        raise ConfigurationError(
            f"epochs_to_total_decay of {what} must be above 0", "give it the number of epochs to decay over"
        )
    if name == "cosine":
        length = max(1.0, np.floor(length))
        return lambda steps: initial * 0.5 * (1 + np.cos(np.pi * np.minimum(steps, length) / length))
    end = initial * _number(what, "end_learning_rate_ratio", values["end_learning_rate_ratio"], 0)
    power = _number(what, "power", values["power"], 0)
    return lambda steps: end + (initial - end) * (1 - np.minimum(steps, length) / length) ** power


def _with_warmup(schedule: Schedule, mode: str, warmup_updates: float) -> Schedule:
    """Returns the schedule with a linear ramp over n warm-up updates; its first rate is 1/(n+1) of the target."""

    def shifted(steps: np.ndarray) -> np.ndarray:
        ramp = (steps + 1) / (warmup_updates + 1)
        after = schedule(np.maximum(steps - warmup_updates, 0))
        return np.where(steps >= warmup_updates, after, schedule(np.zeros_like(steps)) * ramp)

    def masked(steps: np.ndarray) -> np.ndarray:
        return schedule(steps) * np.minimum((steps + 1) / (warmup_updates + 1), 1.0)

    return shifted if mode == "shift" else masked
