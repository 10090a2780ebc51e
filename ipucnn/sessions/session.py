"""The contract of both sessions: compile a Program, train it as a sequence of events, evaluate and predict.

The only training loop is here; a session supplies the function that runs the next weight updates
(:meth:`Session._start`).
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
    Union,
)

import numpy as np

from ipucnn.aliases import KerasModel, MemoryAdvice, Tensor, TfDataset, TfVariable
from ipucnn.config.options import RunConfig
from ipucnn.errors import UserError
from ipucnn.training.evaluation import Predictions, Sums
from ipucnn.training.optimizer_settings import LOSS_SCALE, OptimizerSettings
from ipucnn.training.program import BuiltProgram, Program
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

    ``first_update_s`` is the time of the first weight update (on IPUs: execution), which includes compiling.
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
class ExecutionFinished:
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
class Progress:
    """Part of an execution has finished (for progress bars); ``loss`` and ``accuracy`` are those of that part."""

    weight_updates: int
    loss: float
    accuracy: float
    images_per_s: float


@dataclass(frozen=True)
class _Due:
    weight_updates: int


class CheckpointDue(_Due):
    """The Program requires a checkpoint at this point."""


class ValidationDue(_Due):
    """The Program requires a validation at this point."""


Event = Union[ExecutionFinished, Progress, CheckpointDue, ValidationDue]


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
"""The result of :meth:`Session.feed`: on the host an iterator over batches, on IPUs a stream of batches for ``fit``."""
MakeDataset = Callable[[int, int], TfDataset]
"""(Weight update to start from, samples per element) -> infinite data set of (images, labels[, weights 0 or 1])."""


class Session:
    """Base class of the sessions: runs a Program, and yields events.

    Each of several instances (under ``poprun``) has its own session.  Data sets are then the part of this instance,
    every ``count``-th micro-batch from its index on, and all instances call the same methods in the same order.

    Attributes:
        device: the device of the session.
        program: the compiled Program.
        division: its division among processes and devices.
        state: everything that a weight update changes.
        compilation: the latest report, completed after the first weight update (on IPUs: execution).
        would_fit: the function that suggests changes if a program does not fit on IPUs, see
            ``planning.search.neighbours``; set it before :meth:`compile`, :meth:`compile_prediction` and
            :meth:`prepare_evaluation`.
    """

    device: DeviceInfo
    program: Optional[BuiltProgram] = None
    division: Optional["Division"] = None
    state: TrainState
    # Whether each weight update has its own loss; on IPUs all weight updates of an execution share one.
    _has_loss_of_each_update: bool = True
    _config: RunConfig
    _loss: Optional["Loss"] = None
    _schedule: Schedule
    compilation: Optional[CompilationReport] = None
    would_fit: Optional[MemoryAdvice] = None

    def take_preprocessing(self, input_range: "InputRange") -> bool:
        """Returns whether the session itself scales images from pixels 0 to 255 to the network's range.

        Call it before :meth:`compile`, :meth:`compile_prediction` and :meth:`prepare_evaluation`.

        Args:
            input_range: the network's range, into which the session would bring the images.
        """
        return False

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

    def compile(
        self,
        model: KerasModel,
        program: BuiltProgram,
        division: "Division",
        optimizer: OptimizerSettings,
        loss: "Loss",
        schedule: Schedule,
        make_dataset: Optional[MakeDataset] = None,
    ) -> CompilationReport:
        """Builds the training function.  Call it once, before :meth:`train`.

        Args:
            model: functional Keras model with logits as output.  The host trains its weights in place; IPUs train a
                copy.  In both cases ``state.weights`` has the trained weights.
            program: the Program.
            division: its division, from :meth:`divide`.
            optimizer: checked settings.
            loss: the loss.
            schedule: weight updates (int array) -> learning rates.
            make_dataset: as for :meth:`train`; if given, the function is traced (and timed) here.
        """
        raise NotImplementedError

    def _require_same_precision(self, program: Program) -> None:
        """Refuses a Program in another precision than the configuration's; raises ValueError."""
        if program.precision != self._config.precision:
            raise ValueError(f"a program in {program.precision} for a session in {self._config.precision}")

    def train(self, make_dataset: MakeDataset) -> Iterator[Event]:
        """Runs the Program from ``state`` on, which may be within an execution or between the events at its end.

        Time that includes compiling does not count in ``wall_s`` and ``images_per_s``.

        Args:
            make_dataset: the function that makes the data set of training batches from a weight update on.

        Raises:
            NotFiniteError: the loss is NaN or infinite; the weights are then those after all weight updates that ran
                in one call.
            InfeasibleError: the program does not fit into memory.
        """
        p, state = self.program, self.state
        if p is None:
            raise RuntimeError("compile() comes before train()")
        run = self._start(make_dataset)
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
                self._require_finite(part.losses, first)
                loss, accuracy = float(np.mean(part.losses)), float(np.mean(part.accuracies))
                yield Progress(state.weight_updates, loss, accuracy, images_per_s)
            losses = state.earlier_losses + state.losses
            accuracies = state.earlier_accuracies + state.accuracies
            scale = state.slots.get(LOSS_SCALE)
            finished = ExecutionFinished(
                execution=execution,
                weight_updates=end,
                samples=p.samples_before(end),
                epoch=end / p.weight_updates_per_epoch,
                metrics={"loss": _mean(p, losses, end), "accuracy": _mean(p, accuracies, end)},
                learning_rate=self._rate(end - 1),
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

    def _start(self, make_dataset: MakeDataset) -> Callable[[int], TrainedPart]:
        """Prepares training from ``state`` on.

        Returns:
            A function that runs the next weight updates from ``state`` on.  It chooses their number, but stops at
            number ``end``; :meth:`train` counts them in ``state``.
        """
        raise NotImplementedError

    def _rate(self, weight_update: int) -> float:
        """Returns the learning rate of one weight update."""
        return float(self._schedule(np.arange(weight_update, weight_update + 1))[0])

    def _require_finite(self, losses: List[float], first: int) -> None:
        """Raises NotFiniteError if a loss of the weight updates from number ``first`` on is not finite."""
        assert self.program is not None
        bad = [i for i, value in enumerate(losses) if not np.isfinite(value)]
        if not bad:
            return
        last = first + len(losses)
        where = f"in the execution of weight updates {first + 1} to {last}"
        if self._has_loss_of_each_update:
            where = f"at weight update {first + bad[0] + 1}"
        what = f"the learning rate (it was {self._rate(last - 1):.4g})"
        if self.program.precision != "32.32":
            what += " or --loss-scaling, or drop --nanoo, if they are given"
        raise NotFiniteError(f"the loss became {losses[bad[0]]} {where}", f"lower {what}")

    def compile_ahead(
        self, make_dataset: MakeDataset, evaluation: Optional[Iterable[Batch]]
    ) -> CompilationReport:
        """Compiles the programs of :meth:`train` (and with a data set, of :meth:`evaluate`) without a device.

        Only the IPU session supports it (``compile_only``).  The session cannot be used for anything else afterwards.

        Args:
            make_dataset: as for :meth:`train`.
            evaluation: batches as for :meth:`evaluate`, or None.
        """
        raise NotImplementedError

    def any_instance(self, flag: bool) -> bool:
        """Returns whether a flag is set on any of the instances that train together, so that all act alike."""
        return flag

    def of_first_instance(self, value: float) -> float:
        """Returns the value of the first of the instances that train together, so that all decide alike."""
        return value

    @property
    def place(self) -> str:
        """Returns TensorFlow's name of the device that computes what IPUs do not."""
        return "/CPU:0"

    @property
    def num_devices(self) -> Tuple[int, int]:
        """Returns the number of this process' devices that share the training, and the number of all its devices.

        The first is known once a Program is compiled.
        """
        return 1, 1

    @property
    def sharing(self) -> Optional[Sharing]:
        """Returns how several workers of the host shared the work; None for one worker."""
        return None

    @property
    def evaluation_shard(self) -> Tuple[int, int]:
        """Returns (count, index): :meth:`evaluate` takes every ``count``-th batch from number ``index`` on."""
        return 1, 0

    @property
    def evaluation_part(self) -> Tuple[int, int]:
        """Returns (count, index): :meth:`evaluate` and :meth:`logits` take part ``index`` of ``count`` of each batch.

        The parts of a batch are equally large.
        """
        return 1, 0

    def feed(self, dataset: TfDataset) -> TrainingFeed:
        """Returns the batches for :meth:`execute`, whose next call continues with the batches that are left."""
        return iter(dataset)

    def execute(self, batches: TrainingFeed, num_weight_updates: int) -> List[float]:
        """Runs weight updates as one execution, without events, for benchmarks.

        Args:
            batches: the result of :meth:`feed` for a data set with the shapes that were given to :meth:`compile`.
            num_weight_updates: the number of weight updates, at least 1.

        Returns:
            The loss of each weight update on the host; on IPUs, the execution's mean for each of them.

        Raises:
            NotFiniteError: the loss is NaN or infinite.
        """
        first = self.state.weight_updates
        part = self._run(batches, num_weight_updates)
        self.state.weight_updates = first + num_weight_updates
        self._require_finite(part.losses, first)
        return part.losses

    def _run(self, batches: TrainingFeed, num_weight_updates: int) -> TrainedPart:
        """Runs weight updates from ``state`` on in one call, and times them; does not count them in ``state``."""
        raise NotImplementedError

    def compile_prediction(self, model: KerasModel, batch_shape: Sequence[int]) -> CompilationReport:
        """Builds the function of :meth:`predict` for images of one batch shape, and times its tracing."""
        raise NotImplementedError

    def _report(
        self, model: KerasModel, trace_s: float, fused: int, num_operations: int = 0
    ) -> CompilationReport:
        """Returns the report of compiling a model, which is also in ``compilation``."""
        from ipucnn.models.counts import count_macs
        from ipucnn.models.names import named_weights

        self.compilation = CompilationReport(
            device=self.device,
            num_layers=len(model.layers),
            num_parameters=sum(int(np.prod(v.shape)) for v in named_weights(model).values()),
            num_trainable_parameters=sum(int(np.prod(v.shape)) for v in model.trainable_weights),
            macs_per_sample=count_macs(model),
            num_graph_operations=num_operations,
            trace_s=trace_s,
            first_update_s=0.0,
            fused_micro_batches=fused,
        )
        return self.compilation

    def recompute_statistics(self, make_dataset: MakeDataset, num_updates: int) -> List[str]:
        """Sets batch norm's moving statistics to means over the training batches that come next.

        Call it by :func:`ipucnn.sessions.evaluated.evaluated_weights`.  The training position does not move.

        Args:
            make_dataset: as for :meth:`train`.
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

    def prepare_evaluation(self, model: KerasModel, loss: Optional["Loss"]) -> None:
        """Makes :meth:`evaluate` and :meth:`predict` usable without a training Program.

        Args:
            model: the model with the weights to use.
            loss: the loss; None if :meth:`evaluate` is not called.
        """
        raise NotImplementedError

    def evaluate(
        self, dataset: Iterable[Batch], stop: Optional[Callable[[], bool]] = None
    ) -> Dict[str, float]:
        """Returns metrics over a finite data set of (images, labels, weights); every sample of weight 1 counts once.

        Args:
            dataset: the shard of :attr:`evaluation_shard` and the part of :attr:`evaluation_part`; the metrics are
                over all shards and parts.
            stop: a function that returns whether to stop early; it is called between batches.

        Raises:
            Stopped: ``stop`` returned true.
        """
        raise NotImplementedError

    def _sums_of_batch(self, logits: Tensor, labels: Tensor, weights: Tensor) -> Sums:
        """Returns the sums of a batch for the scores of :meth:`evaluate`."""
        if self._loss is None:
            raise RuntimeError("evaluate() needs the loss of compile() or prepare_evaluation()")
        return Predictions(logits, labels, weights).sums(self._loss.name, self._loss.label_smoothing)

    def logits(self, batches: Iterable[Batch]) -> Iterator[Tuple[Batch, np.ndarray]]:
        """Yields each batch with its logits, in order; several batches may be read ahead and computed together.

        Args:
            batches: tuples that begin with images: the part of each batch in :attr:`evaluation_part`, or the whole
                batch if a tuple has only images.

        Yields:
            The batch and the logits of the whole batch.  The images are those that were given; the other elements of
            the tuple are those of the whole batch.
        """
        for batch in batches:
            yield batch, self.predict([batch[0]])[0]

    def predict(self, dataset: Iterable[Tensor]) -> List[np.ndarray]:
        """Returns the logits of every element of a data set of images (or part of one), one array per element."""
        raise NotImplementedError


def _mean(program: Program, values: List[float], end: int) -> float:
    """Returns the mean over samples from the means of consecutive weight updates, the last being ``end`` - 1."""
    if not program.samples_padded_per_epoch:
        return float(np.mean(values))
    counts = np.diff([program.samples_before(i) for i in range(end - len(values), end + 1)])
    return float(np.average(values, weights=counts))
