"""The contract of both sessions: trainers run a Program as a sequence of events, predictors compute logits and scores.

The only training loop is here, :func:`train`; a trainer supplies the function that runs the next weight updates.
"""

from dataclasses import asdict, dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Optional,
    Sequence,
    Tuple,
)

import numpy as np

from ipucnn.aliases import KerasModel, MemoryAdvice, Tensor, TfDataset, TfVariable
from ipucnn.config.options import RunConfig
from ipucnn.errors import UserError
from ipucnn.events import Event
from ipucnn.training.evaluation import Predictions, Sums
from ipucnn.training.optimizer_settings import LOSS_SCALE, OptimizerSettings
from ipucnn.training.program import BatchLayout, BuiltProgram, Program
from ipucnn.training.schedules import Schedule

if TYPE_CHECKING:
    from ipucnn.datasets.pixels import InputRange
    from ipucnn.sessions.host.division import Division
    from ipucnn.training.losses import Loss


@dataclass(frozen=True)
class DeviceInfo:
    """The device of a session: ``kind`` is cpu, gpu or ipu."""

    kind: str
    name: str
    num_cores: int
    memory_bytes: int


@dataclass(frozen=True)
class CompilationReport:
    """The size of the compiled model, and the times of compiling it on ``device``.

    ``first_update_s`` is the time of the first weight update (on IPUs: execution), which includes compiling;
    0 if there was none.
    """

    device: DeviceInfo
    num_layers: int
    num_parameters: int
    num_trainable_parameters: int
    macs_per_sample: int
    num_graph_operations: int
    trace_s: float
    first_update_s: float
    fused_micro_batches: int
    # Whether an IPU's programs came from the executable cache
    cached: bool = False

    @property
    def compile_s(self) -> float:
        """Returns the time in seconds before the steady state: tracing and the first weight update."""
        return self.trace_s + self.first_update_s

    def to_dict(self) -> Dict[str, Any]:
        """Returns the report as plain values, ready for JSON."""
        return {**asdict(self), "compile_s": self.compile_s}


@dataclass(frozen=True)
class ExecutionFinished(Event):
    """One execution has finished.

    Metrics are means over the samples since the last logged execution, usually the previous one; ``wall_s`` is the time
    of these executions without compiling.  With automatic loss scaling, ``loss_scaling`` is the loss scale of the next
    weight update.
    """

    execution: int
    weight_updates: int
    samples: int
    epoch: float
    metrics: Dict[str, float]
    learning_rate: float
    wall_s: float
    images_per_s: float
    is_logged: bool = True
    loss_scaling: Optional[float] = None


@dataclass(frozen=True)
class UpdatesDone(Event):
    """A part of an execution is done (for progress bars); ``loss`` and ``accuracy`` are those of that part."""

    weight_updates: int
    loss: float
    accuracy: float
    images_per_s: float


@dataclass(frozen=True)
class _Due(Event):
    weight_updates: int


class CheckpointDue(_Due):
    """The Program requires a checkpoint at this point."""


class ValidationDue(_Due):
    """The Program requires a validation at this point."""


@dataclass
class TrainState:
    """Everything that a training step changes, by name; variables are tf.Variables, or act like them.

    Attributes:
        weights: trainable and moving-statistics weights by canonical name, in the model's order.
        slots: optimizer state by ``<weight name>/<slot>``.
        weight_updates: weight updates done.
        losses, accuracies: mean loss and accuracy of each weight update of the current execution.
        events_done: the number of events at that execution's end (in the order of :func:`execution_events`) that have
            been handled; the code that handles an event counts it here.
        earlier_losses, earlier_accuracies: the same values of earlier executions that have not been logged yet.
    """

    weights: Dict[str, TfVariable] = field(default_factory=dict)
    slots: Dict[str, TfVariable] = field(default_factory=dict)
    weight_updates: int = 0
    losses: List[float] = field(default_factory=list)
    accuracies: List[float] = field(default_factory=list)
    events_done: int = 0
    earlier_losses: List[float] = field(default_factory=list)
    earlier_accuracies: List[float] = field(default_factory=list)


@dataclass(frozen=True)
class Sharing:
    """The cost of sharing the timed weight updates among several workers.

    Attributes:
        workers: the number of workers.
        reduction: the method of adding gradients: ordered or allreduce.
        received_bytes: the bytes that each worker received per weight update, its own part included.
        collective_s: the seconds that rank 0 spent in collectives, including the wait for other workers.
    """

    workers: int
    reduction: str
    received_bytes: int
    collective_s: float


class NotFiniteError(UserError):
    """A loss, weights or, with ``--fp-exceptions``, logits became NaN or infinite.

    Args:
        message: what is not finite.
        advice: the options to change, without a word of the run's checkpoints, which the hint adds.
    """

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(message, f"{advice}; checkpoints written before are kept")
        self.advice = advice


class Stopped(Exception):
    """An evaluation was stopped before its end."""


def execution_events(program: Program, finished: ExecutionFinished) -> List[Event]:
    """Returns the events at the end of an execution, in order: its own event, then validation, then checkpoint."""
    events: List[Event] = [finished]
    num_done = finished.execution + 1
    is_last = num_done == program.num_executions
    if program.executions_per_validation and (num_done % program.executions_per_validation == 0 or is_last):
        events.append(ValidationDue(finished.weight_updates))
    if is_checkpoint_due(program, num_done):
        events.append(CheckpointDue(finished.weight_updates))
    return events


def is_checkpoint_due(program: Program, num_done: int) -> bool:
    """Returns whether a checkpoint is due after ``num_done`` executions."""
    if not program.executions_per_checkpoint:
        return False
    due = num_done >= program.first_checkpoint_execution and num_done % program.executions_per_checkpoint == 0
    return due or num_done == program.num_executions


@dataclass(frozen=True)
class TrainedPart:
    """The result of some weight updates of an execution.

    Attributes:
        losses, accuracies: mean loss and accuracy of each weight update.
        timed_s: their time in seconds; 0 if it included compiling, and so is not counted.
    """

    losses: List[float]
    accuracies: List[float]
    timed_s: float


Batch = Tuple[Tensor, ...]
TrainingFeed = Any
"""The result of :meth:`Trainer.feed`: on the host an iterator over batches, on IPUs a stream of batches for ``fit``."""
MakeDataset = Callable[[int, int], TfDataset]
"""(Weight update to start from, samples per element) -> infinite data set of (images, labels[, weights 0 or 1])."""


class Predictor:
    """Computes logits and scores with the present weights of a network.

    Each of several instances (under ``poprun``, or workers) has its own predictor, and all call the same methods in the
    same order.

    Attributes:
        device: the device that computes.
        shard: (count, index): :meth:`evaluate` takes every ``count``-th batch from number ``index`` on.
        part: (count, index): :meth:`evaluate` and :meth:`logits` take part ``index`` of ``count`` of each batch.  The
            parts of a batch are equally large.
    """

    device: DeviceInfo
    shard: Tuple[int, int] = (1, 0)
    part: Tuple[int, int] = (1, 0)

    def compile(self, batch_shape: Sequence[int]) -> CompilationReport:
        """Prepares :meth:`predict` for images of one batch shape, and times it."""
        raise NotImplementedError

    def evaluate(
        self, dataset: Iterable[Batch], loss: "Loss", stop: Optional[Callable[[], bool]] = None
    ) -> Dict[str, float]:
        """Returns metrics over a finite data set of (images, labels, weights); every sample of weight 1 counts once.

        Args:
            dataset: this instance's :attr:`shard` and :attr:`part`; the metrics are over all of them.
            loss: the loss among the metrics.
            stop: a function that returns whether to stop early; it is called between batches.

        Raises:
            InfeasibleError: a batch does not fit into memory.
            Stopped: ``stop`` returned true.
        """
        raise NotImplementedError

    def logits(self, batches: Iterable[Batch]) -> Iterator[Tuple[Batch, np.ndarray]]:
        """Yields each batch with its logits, in order; several batches may be read ahead and computed together.

        Args:
            batches: tuples that begin with images: the :attr:`part` of each batch, or the whole batch if a tuple has
                only images.

        Yields:
            The batch and the logits of the whole batch.  The images are those that were given; the other elements of
            the tuple are those of the whole batch.
        """
        for batch in batches:
            yield batch, self.predict([batch[0]])[0]

    def predict(self, dataset: Iterable[Tensor]) -> List[np.ndarray]:
        """Returns the logits of every element of a data set of images (or part of one), one array per element."""
        raise NotImplementedError


@dataclass(frozen=True)
class TrainingTask:
    """What a trainer trains.

    Attributes:
        model: functional Keras model with logits as output.  The host trains its weights in place; IPUs train a copy.
        program: the Program.
        division: its division among processes and devices, from :meth:`Session.divide`.
        optimizer: checked settings.
        loss: the loss.
        schedule: weight updates (int array) -> learning rates.
        make_dataset: as for :func:`train`; if given, the host traces (and times) a weight update.
        memory_advice: the function that suggests changes if the program does not fit on IPUs, see
            ``planning.search.neighbours``.
    """

    model: KerasModel
    program: BuiltProgram
    division: "Division"
    optimizer: OptimizerSettings
    loss: "Loss"
    schedule: Schedule
    make_dataset: Optional[MakeDataset] = None
    memory_advice: Optional[MemoryAdvice] = None


class Trainer:
    """Runs the weight updates of a Program; :func:`train` and :func:`execute` call it.

    Each of several instances has its own trainer.  Data sets are then the part of this instance, every ``count``-th
    micro-batch from its index on, and all instances call the same methods in the same order.

    Attributes:
        program, division, loss, schedule: those of the task.
        state: everything that a weight update changes, with the trained weights.
        compilation: the report; its times are complete after the first weight update (on IPUs: execution).
        predictor: computes with the weights in ``state``.
        has_loss_of_each_update: whether each weight update has its own loss; on IPUs those of an execution share one.
    """

    state: TrainState
    compilation: CompilationReport
    predictor: Predictor
    has_loss_of_each_update: bool = True

    def __init__(self, task: TrainingTask) -> None:
        self.program, self.division, self.loss, self.schedule = (
            task.program,
            task.division,
            task.loss,
            task.schedule,
        )

    @property
    def sharing(self) -> Optional[Sharing]:
        """Returns how several workers of the host shared the work; None for one worker."""
        return None

    def feed(self, dataset: TfDataset) -> TrainingFeed:
        """Returns the batches for :meth:`run`, whose next call continues with the batches that are left."""
        raise NotImplementedError

    def run(self, batches: TrainingFeed, num_weight_updates: int) -> TrainedPart:
        """Runs weight updates from ``state`` on in one call, and times them; does not count them in ``state``.

        Raises:
            InfeasibleError: they do not fit into memory.
        """
        raise NotImplementedError

    def start(self, make_dataset: MakeDataset) -> Callable[[int], TrainedPart]:
        """Prepares training from ``state`` on.

        Returns:
            A function that runs the next weight updates from ``state`` on.  It chooses their number, but stops at
            number ``end``; :func:`train` counts them in ``state``.
        """
        raise NotImplementedError

    def recompute_statistics(self, make_dataset: MakeDataset, num_updates: int) -> List[str]:
        """Sets batch norm's moving statistics to means over the training batches that come next.

        Call it by :func:`ipucnn.sessions.evaluated.evaluated_weights`.  The training position does not move.

        Args:
            make_dataset: as for :func:`train`.
            num_updates: the number of weight updates whose batches are used.

        Returns:
            The names of the statistics, of layers whose statistics move with every micro-batch.
        """
        raise NotImplementedError

    def measure_statistics(self, images: TfDataset) -> List[str]:
        """Sets batch norm's moving statistics to those of large batches of training images.

        Call it by :func:`ipucnn.sessions.evaluated.evaluated_weights`; see :mod:`ipucnn.sessions.host.statistics`.

        Args:
            images: (images, ...), with images in the same range as in training.

        Returns:
            The names of the statistics, of all layers that are trained.

        Raises:
            InfeasibleError: the pass does not fit into the host's memory.
        """
        raise NotImplementedError


class Session:
    """An open device, which makes trainers and predictors of networks.

    Attributes:
        device: the device; the number of IPUs is known only to trainers and predictors.
        place: TensorFlow's name of the device that computes what IPUs do not.
        takes_pixels: whether images arrive as pixels 0 to 255, which the device scales; see :meth:`with_pixels`.
    """

    device: DeviceInfo
    place: str = "/CPU:0"
    takes_pixels: bool = False

    def with_pixels(self, input_range: "InputRange") -> "Session":
        """Returns a session that scales pixels to the network's range itself, if an option says so, else this one.

        Args:
            input_range: the network's range.

        Raises:
            ConfigurationError: the device cannot scale to it.
        """
        return self

    def divide(self, model: KerasModel, program: Program, fused: Optional[int] = None) -> "Division":
        """Returns the division of each weight update among processes and devices.

        Args:
            model: the model that is to be trained.
            program: its Program.
            fused: the number of fused micro-batches that an option or a checkpoint fixes; None: the session chooses it.

        Raises:
            ConfigurationError: processes and devices cannot share a weight update evenly.
        """
        raise NotImplementedError

    def divide_inference(
        self, model: KerasModel, batch: BatchLayout, num_micro_batches: int, fused: Optional[int] = None
    ) -> "Division":
        """Returns the division of inference among processes, of which each has its own samples.

        Args:
            model: the network.
            batch: the size of micro-batches.
            num_micro_batches: the micro-batches that an execution of each process has at least.
            fused: the number of fused micro-batches that an option fixes; None: the session chooses it.
        """
        raise NotImplementedError

    def trainer(self, task: TrainingTask) -> Trainer:
        """Returns a trainer of a network.  A session makes one.

        Raises:
            ConfigurationError, MissingError: the device cannot run the Program, or is absent.
        """
        raise NotImplementedError

    def predictor(
        self, model: KerasModel, memory_advice: Optional[MemoryAdvice] = None, shares: bool = True
    ) -> Predictor:
        """Returns a predictor of a network, without a training Program.

        Args:
            model: the network with its weights.
            memory_advice: as in a :class:`TrainingTask`.
            shares: whether instances share the samples; otherwise each has its own.
        """
        raise NotImplementedError

    def any_instance(self, flag: bool) -> bool:
        """Returns whether a flag is set on any of the instances that compute together, so that all act alike."""
        return flag

    def of_first_instance(self, value: float) -> float:
        """Returns the value of the first of the instances that compute together, so that all decide alike."""
        return value


def train(trainer: Trainer, make_dataset: MakeDataset) -> Iterator[Event]:
    """Runs the Program from ``state`` on, which may be within an execution or between the events at its end.

    Time that includes compiling does not count in ``wall_s`` and ``images_per_s``.

    Args:
        trainer: the trainer.
        make_dataset: the function that makes the data set of training batches from a weight update on.

    Raises:
        NotFiniteError: the loss is NaN or infinite; the weights are then those after all weight updates that ran in one
            call.
        InfeasibleError: the program does not fit into memory.
    """
    p, state = trainer.program, trainer.state
    run = trainer.start(make_dataset)
    busy_s, timed_samples, images_per_s = 0.0, 0, 0.0
    while state.weight_updates - len(state.losses) < p.num_weight_updates:
        execution = (state.weight_updates - len(state.losses)) // p.weight_updates_per_execution
        end = (execution + 1) * p.weight_updates_per_execution
        while state.weight_updates < end:
            first = state.weight_updates
            part = run(end)
            state.losses.extend(part.losses)
            state.accuracies.extend(part.accuracies)
            state.weight_updates = first + len(part.losses)
            if part.timed_s:
                busy_s += part.timed_s
                timed_samples += p.samples_before(state.weight_updates) - p.samples_before(first)
                images_per_s = timed_samples / busy_s
            _require_finite(trainer, part.losses, first)
            loss, accuracy = float(np.mean(part.losses)), float(np.mean(part.accuracies))
            yield UpdatesDone(state.weight_updates, loss, accuracy, images_per_s)
        losses = state.earlier_losses + state.losses
        accuracies = state.earlier_accuracies + state.accuracies
        scale = state.slots.get(LOSS_SCALE)
        finished = ExecutionFinished(
            execution=execution,
            weight_updates=end,
            samples=p.samples_before(end),
            epoch=end / p.weight_updates_per_epoch,
            metrics={"loss": _mean(p, losses, end), "accuracy": _mean(p, accuracies, end)},
            learning_rate=_rate(trainer, end - 1),
            wall_s=busy_s,
            images_per_s=images_per_s,
            is_logged=(execution + 1) % p.executions_per_log == 0,
            loss_scaling=None if scale is None else float(scale.numpy()),
        )
        yield from execution_events(p, finished)[state.events_done :]
        if finished.is_logged:
            losses, accuracies = [], []
            busy_s, timed_samples, images_per_s = 0.0, 0, 0.0
        state.earlier_losses, state.earlier_accuracies = losses, accuracies
        state.losses, state.accuracies, state.events_done = [], [], 0


def execute(trainer: Trainer, batches: TrainingFeed, num_weight_updates: int) -> List[float]:
    """Runs weight updates as one execution, without events, for benchmarks.

    Args:
        trainer: the trainer.
        batches: the result of its ``feed``.
        num_weight_updates: the number of weight updates, at least 1.

    Returns:
        The loss of each weight update on the host; on IPUs, the execution's mean for each of them.

    Raises:
        NotFiniteError: the loss is NaN or infinite.
    """
    first = trainer.state.weight_updates
    part = trainer.run(batches, num_weight_updates)
    trainer.state.weight_updates = first + num_weight_updates
    _require_finite(trainer, part.losses, first)
    return part.losses


def _rate(trainer: Trainer, weight_update: int) -> float:
    """Returns the learning rate of one weight update."""
    return float(trainer.schedule(np.arange(weight_update, weight_update + 1))[0])


def _require_finite(trainer: Trainer, losses: List[float], first: int) -> None:
    """Raises NotFiniteError if a loss of the weight updates from number ``first`` on is not finite."""
    bad = [i for i, value in enumerate(losses) if not np.isfinite(value)]
    if not bad:
        return
    last = first + len(losses)
    where = f"in the execution of weight updates {first + 1} to {last}"
    if trainer.has_loss_of_each_update:
        where = f"at weight update {first + bad[0] + 1}"
    what = f"the learning rate (it was {_rate(trainer, last - 1):.4g})"
    if trainer.program.precision != "32.32":
        what += " or --loss-scaling, or add --no-nanoo, if they are on"
    raise NotFiniteError(f"the loss became {losses[bad[0]]} {where}", f"lower {what}")


def compilation_report(
    device: DeviceInfo, model: KerasModel, trace_s: float, fused: int = 1, num_operations: int = 0
) -> CompilationReport:
    """Returns the report of compiling a model, before its first weight update."""
    from ipucnn.models.counts import count_macs
    from ipucnn.models.names import named_weights

    return CompilationReport(
        device=device,
        num_layers=len(model.layers),
        num_parameters=sum(int(np.prod(v.shape)) for v in named_weights(model).values()),
        num_trainable_parameters=sum(int(np.prod(v.shape)) for v in model.trainable_weights),
        macs_per_sample=count_macs(model),
        num_graph_operations=num_operations,
        trace_s=trace_s,
        first_update_s=0.0,
        fused_micro_batches=fused,
    )


def sums_of_batch(loss: "Loss", logits: Tensor, labels: Tensor, weights: Tensor) -> Sums:
    """Returns the sums of a batch for the scores of :meth:`Predictor.evaluate`."""
    return Predictions(logits, labels, weights).sums(loss.name, loss.label_smoothing)


def check_precision(program: Program, config: RunConfig) -> None:
    """Refuses a Program in another precision than the configuration's; raises ValueError."""
    if program.precision != config.precision:
        raise ValueError(f"a program in {program.precision} for a session in {config.precision}")


def _mean(program: Program, values: List[float], end: int) -> float:
    """Returns the mean over samples from the means of consecutive weight updates, the last being ``end`` - 1."""
    if not program.samples_padded_per_epoch:
        return float(np.mean(values))
    counts = np.diff([program.samples_before(i) for i in range(end - len(values), end + 1)])
    return float(np.average(values, weights=counts))
