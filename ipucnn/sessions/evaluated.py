"""The weights that validations, checkpoints and exports have, in place of those that training changes.

With an exponential moving average, they are the averages.  Their batch norm statistics follow one policy of the run
(:class:`Statistics`), which both sessions obey.  Training itself always goes on with its own weights and statistics.
"""

import contextlib
import enum
from dataclasses import dataclass
from typing import Callable, Dict, FrozenSet, Iterator, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from ipucnn.aliases import TfDataset, TfVariable
from ipucnn.config.options import RunConfig
from ipucnn.config.values import moves_once, norm_of
from ipucnn.models.names import is_moving_statistic
from ipucnn.sessions.session import MakeDataset, Trainer, TrainState
from ipucnn.training.optimizer_settings import AVERAGE
from ipucnn.training.program import Program

_STATISTICS_UPDATES = 16
# Suffix of the weights from which training goes on, among the slots of a checkpoint whose own weights differ.
_RUNNING = "/running"


def statistics_updates(program: Program) -> int:
    """Returns the number of weight updates whose batches are used to recompute moving statistics."""
    return min(_STATISTICS_UPDATES, program.weight_updates_per_epoch)


class Statistics(enum.Enum):
    """Where the batch norm statistics of evaluated weights come from."""

    RUNNING = "averages that move with every micro-batch of training"
    COLLECTED = "averages that move once per weight update, by statistics that are accumulated like gradients"
    RECOMPUTED = "means over the training batches that come next"
    MEASURED = "moments of training images in large batches (--precise-batch-norm)"


def statistics_policy(config: RunConfig, program: Program) -> Statistics:
    """Returns the policy of a run.  Statistics that IPUs would lose are recomputed, on the host, too."""
    if config.precise_batch_norm:
        return Statistics.MEASURED
    if moves_once(config.norm_layer):
        return Statistics.COLLECTED
    is_batch_norm = norm_of(config.norm_layer) == "batch"
    is_lost = is_batch_norm and why_statistics_are_lost(program) is not None
    return Statistics.RECOMPUTED if is_lost else Statistics.RUNNING


def why_statistics_are_lost(program: Program) -> Optional[str]:
    """Returns why IPUs lose running statistics, as words that follow "IPUs"; None: they keep them.

    With 16-bit weights the hundredth part by which a statistic moves is lost in rounding.
    """
    if program.num_stages > 1:
        return "do not update them correctly in a pipeline"
    if program.precision == "16.16":
        return f"keep them in 16 bits with --precision {program.precision}"
    return None


class StatisticsImages(NamedTuple):
    """Training images for :attr:`Statistics.MEASURED`: ``num_batches`` batches of (images, ...)."""

    batches: TfDataset
    num_batches: int
    batch_size: int


@dataclass(frozen=True)
class EvaluatedWeights:
    """Values by name that replace the weights of training where these are evaluated or saved.

    Attributes:
        values: the values.
        resumed: the names of those whose value in training has to be saved beside them, for a run to continue from.
        statistics: the origin of the batch norm statistics, for reports.
    """

    values: Mapping[str, np.ndarray]
    resumed: FrozenSet[str]
    statistics: str


AS_TRAINED = EvaluatedWeights({}, frozenset(), "running")


def evaluated_weights(
    trainer: Trainer, policy: Statistics, next_batches: MakeDataset, images: Callable[[], StatisticsImages]
) -> EvaluatedWeights:
    """Returns the weights to evaluate and save at the present weight update.  The trainer's state does not change.

    Statistics belong to the evaluated weights: the averaged ones, if there are any.

    Args:
        trainer: the trainer.
        policy: the run's policy.
        next_batches: the function that makes the data set of training batches from a weight update on.
        images: a function that returns the images to measure.
    """
    weights, slots = trainer.state.weights, trainer.state.slots
    averages = {name: slots[f"{name}/{AVERAGE}"].numpy() for name in weights if f"{name}/{AVERAGE}" in slots}
    origin = "averaged as the weights are" if any(map(is_moving_statistic, averages)) else "running"
    if policy in (Statistics.RUNNING, Statistics.COLLECTED):
        return EvaluatedWeights(averages, frozenset(averages), origin)
    moving = {name: weights[name].numpy() for name in weights if is_moving_statistic(name)}
    with replaced(weights, {**moving, **averages}):
        if policy is Statistics.MEASURED:
            measured = images()
            names = trainer.measure_statistics(measured.batches)
            new_origin = (
                f"measured over {measured.num_batches} batches of {measured.batch_size} training images"
            )
        else:
            updates = statistics_updates(trainer.program)
            names = trainer.recompute_statistics(next_batches, updates)
            new_origin = f"recomputed over {updates} weight updates' batches"
        values = {**averages, **{name: weights[name].numpy() for name in names}}
    # Training does not read the statistics that are recomputed, so it does not need them to go on.
    resumed = frozenset(values if policy is Statistics.MEASURED else averages)
    return EvaluatedWeights(values, resumed, new_origin if names else origin)


@contextlib.contextmanager
def replaced(weights: Mapping[str, TfVariable], values: Mapping[str, np.ndarray]) -> Iterator[None]:
    """Gives weights other values inside the block."""
    before = {name: weights[name].numpy() for name in values}
    try:
        for name, value in values.items():
            weights[name].assign(value)
        yield
    finally:
        for name, value in before.items():
            weights[name].assign(value)


def slots_to_save(state: TrainState, evaluated: EvaluatedWeights) -> Dict[str, TfVariable]:
    """Returns the slots of a checkpoint whose weights are the evaluated ones."""
    resumed = {name + _RUNNING: v for name, v in state.weights.items() if name in evaluated.resumed}
    return {**state.slots, **resumed}


def resumed_arrays(
    weights: Mapping[str, np.ndarray], slots: Mapping[str, np.ndarray]
) -> Tuple[Dict[str, np.ndarray], Dict[str, np.ndarray]]:
    """Returns the weights and slots from which training goes on, of those of a checkpoint."""
    resumed = {name[: -len(_RUNNING)]: v for name, v in slots.items() if name.endswith(_RUNNING)}
    return {**weights, **resumed}, {n: v for n, v in slots.items() if not n.endswith(_RUNNING)}
