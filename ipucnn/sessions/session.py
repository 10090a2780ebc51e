"""The contract both sessions keep: compile a Program, then train, evaluate and predict as events.

The training loop stands here, once; a session gives it what runs the next weight updates (:meth:`Session._start`).
"""

import contextlib
from dataclasses import asdict, dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import numpy as np

from ipucnn.aliases import KerasModel, MemoryAdvice, Tensor, TfDataset, TfVariable
from ipucnn.errors import UserError
from ipucnn.training.losses import LossFunction
from ipucnn.training.optimizers import AVERAGE, LOSS_SCALE, OptimizerSettings
from ipucnn.training.program import Program
from ipucnn.training.schedules import Schedule

if TYPE_CHECKING:
    from ipucnn.datasets.preprocessing import ChannelAffine


@dataclass(frozen=True)
class DeviceInfo:
    """What the session runs on: ``kind`` is cpu, gpu or ipu."""

    kind: str
    name: str
    num_cores: int
    memory_bytes: int


@dataclass(frozen=True)
class CompilationReport:
    """What was compiled and how long it took; every figure is of the device named."""

    device: DeviceInfo
    num_layers: int
    num_parameters: int
    num_trainable_parameters: int
    macs_per_sample: int
    num_graph_operations: int
    trace_s: float
    first_update_s: float
    fused_micro_batches: int
    # An IPU's programs were compiled before, and kept in the executable cache
    cached: bool = False

    @property
    def compile_s(self) -> float:
        """Time before the steady state: tracing and the first weight update."""
        return self.trace_s + self.first_update_s

    def to_dict(self) -> Dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**asdict(self), "compile_s": self.compile_s}


@dataclass(frozen=True)
class ExecutionFinished:
    """One execution is over.

    Metrics are means over the samples since the last execution that was logged, which is most often the one before;
    ``wall_s`` is the time of these executions without compiling.  ``loss_scaling`` is the loss scale of the next weight
    update where it is found while training.
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
    """Part of an execution is done (for progress bars); ``loss`` is of that part."""

    weight_updates: int
    loss: float
    accuracy: float
    images_per_s: float


@dataclass(frozen=True)
class CheckpointDue:
    """The Program has a checkpoint here."""

    weight_updates: int
    execution: int


@dataclass(frozen=True)
class ValidationDue:
    """The Program has a validation here."""

    weight_updates: int
    execution: int


def recomputes_statistics(program: Program, precision: str = "32.32") -> bool:
    """Whether batch norm's moving statistics are recomputed from training batches where they are needed.

    IPUs do not update those of a pipeline correctly; those of a network of 16-bit weights they keep in 16 bits, where
    the hundredth part by which a statistic moves is rounded away.
    """
    return program.num_stages > 1 or precision == "16.16"


# Batches of how many weight updates the moving statistics of a pipelined batch norm are recomputed from.
STATISTICS_UPDATES = 16

Event = Union[ExecutionFinished, Progress, CheckpointDue, ValidationDue]


@dataclass
class TrainState:
    """Everything a training step changes, by name; variables are tf.Variables, or act as such.

    Attributes:
        weights: trainable and moving-statistics weights by canonical name, in the model's order.
        slots: optimizer state by ``<weight name>/<slot>``.
        weight_updates: weight updates done.
        losses, hits: mean loss and accuracy of each weight update of the execution under way.
        events_done: how many of the events at that execution's end (in the order of
            :func:`execution_events`) were handled; whoever handles them counts them here.
        earlier_losses, earlier_hits: those of the executions before it that were not logged yet.
    """

    weights: Dict[str, "TfVariable"] = field(default_factory=dict)
    slots: Dict[str, "TfVariable"] = field(default_factory=dict)
    weight_updates: int = 0
    losses: List[float] = field(default_factory=list)
    hits: List[float] = field(default_factory=list)
    events_done: int = 0
    earlier_losses: List[float] = field(default_factory=list)
    earlier_hits: List[float] = field(default_factory=list)


@dataclass(frozen=True)
class Sharing:
    """How several workers shared the weight updates that were timed.

    Attributes:
        workers: how many.
        reduction: how gradients were added: ordered or ring.
        received_bytes: that each worker got in a weight update, its own part included.
        collective_s: seconds of worker 0 in collectives, waiting for other workers included.
    """

    workers: int
    reduction: str
    received_bytes: int
    collective_s: float


class NotFiniteError(UserError):
    """The loss or the weights became NaN or infinite."""


class Stopped(Exception):
    """An evaluation was asked to stop before its end."""


def execution_events(program: Program, finished: ExecutionFinished) -> List[Event]:
    """What happens at the end of an execution, in order: its own event, then validation, then checkpoint."""
    events: List[Event] = [finished]
    execution, done = finished.execution, finished.execution + 1
    last = done == program.num_executions
    if program.executions_per_validation and (done % program.executions_per_validation == 0 or last):
        events.append(ValidationDue(finished.weight_updates, execution))
    if is_checkpoint_due(program, done):
        events.append(CheckpointDue(finished.weight_updates, execution))
    return events


def is_checkpoint_due(program: Program, num_done: int) -> bool:
    """Whether a checkpoint is due when ``num_done`` executions are done."""
    if not program.executions_per_checkpoint:
        return False
    due = num_done >= program.first_checkpoint_execution and num_done % program.executions_per_checkpoint == 0
    return due or num_done == program.num_executions


@dataclass(frozen=True)
class TrainedPart:
    """Some weight updates of an execution are done.

    Attributes:
        losses, hits: mean loss and accuracy of each of them.
        timed_s: their time; 0 where some of it went into compiling, and nothing is timed.
    """

    losses: List[float]
    hits: List[float]
    timed_s: float


Batch = Tuple["Tensor", ...]
MakeDataset = Callable[[int, int], "TfDataset"]
"""(Weight update to start from, samples per element) -> infinite data set of (images, labels[, weights 0 or 1])."""


class Session:
    """Base of the sessions: a Program in, events out.

    One of several instances (under ``poprun``) has a session of its own.  Data sets are then this instance's part,
    every ``count``-th micro-batch from its index on, and all instances call the same methods in the same order.

    Attributes:
        device: what it runs on.
        place: TensorFlow's name of the device.
        program: the compiled Program, with the session's own choices filled in.
        state: everything a weight update changes.
        first_update_s: seconds of the first weight update (on IPUs: execution), which includes compiling.
        compilation: the latest report, with what only the first execution told.
        evaluated: what evaluation and checkpoints have in place of the weights of that name: averages, see
            :meth:`take_averages`, and what :meth:`measure_statistics` found last.
        would_fit: what to suggest where a program does not fit on IPUs, see ``planning.search.variations``; set
            before :meth:`compile`, :meth:`compile_prediction` and :meth:`prepare_evaluation`.
    """

    device: DeviceInfo
    place: str = "/CPU:0"
    program: Optional[Program] = None
    state: TrainState
    # Whether each weight update has a loss of its own; on IPUs an execution has one for all of its weight updates.
    _has_loss_of_each_update: bool = True
    # In 16.16 the device keeps batch norm's moving statistics in 16 bits, so that they are measured anew.
    _precision: str = "32.32"
    _schedule: Schedule
    first_update_s: float = 0.0
    compilation: Optional[CompilationReport] = None
    evaluated: Mapping[str, np.ndarray] = {}
    would_fit: Optional[MemoryAdvice] = None

    def take_preprocessing(self, affine: "ChannelAffine") -> bool:
        """Whether the session brings images from pixels 0 to 255 to the network's range itself.

        Call it before :meth:`compile`, :meth:`compile_prediction` and :meth:`prepare_evaluation`.

        Args:
            affine: what it would have to do to each channel.
        """
        return False

    def compile(
        self,
        model: "KerasModel",
        program: Program,
        optimizer: OptimizerSettings,
        loss: LossFunction,
        schedule: Schedule,
        make_dataset: Optional[MakeDataset] = None,
    ) -> CompilationReport:
        """Builds what :meth:`train` runs.  Must be called once, before it.

        Args:
            model: functional Keras model with logits as output.  The host trains its weights in place; on IPUs a copy
                is trained.  Either way ``state.weights`` has the trained ones.
            program: ``fused_micro_batches`` 0 lets the session choose; see ``self.program`` afterwards.
            optimizer: checked settings.
            loss: from ``make_loss``.
            schedule: weight updates (int array) -> learning rates.
            make_dataset: as for :meth:`train`; if given, the function is traced (and timed) here.
        """
        raise NotImplementedError

    def train(self, make_dataset: MakeDataset) -> Iterator[Event]:
        """Runs the Program from ``state`` on, wherever in an execution or between its last events that is.

        Time in which something was compiled counts in no ``wall_s`` and no ``images_per_s``.

        Args:
            make_dataset: training batches from a weight update on.

        Raises:
            NotFiniteError: the loss is NaN or infinite; the weights are then those after the weight updates that ran
                together.
            InfeasibleError: the program does not fit.
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
                state.hits.extend(part.hits)
                state.weight_updates = first + len(part.losses)
                if part.timed_s:
                    busy_s += part.timed_s
                    timed_samples += p.samples_before(state.weight_updates) - p.samples_before(first)
                    images_per_s = timed_samples / busy_s
                self._require_finite(part.losses, first)
                loss, accuracy = float(np.mean(part.losses)), float(np.mean(part.hits))
                yield Progress(state.weight_updates, loss, accuracy, images_per_s)
            losses, hits = state.earlier_losses + state.losses, state.earlier_hits + state.hits
            scale = state.slots.get(LOSS_SCALE)
            finished = ExecutionFinished(
                execution=execution,
                weight_updates=end,
                samples=p.samples_before(end),
                epoch=end / p.weight_updates_per_epoch,
                metrics={"loss": _mean(p, losses, end), "accuracy": _mean(p, hits, end)},
                learning_rate=self._rate(end - 1),
                wall_s=busy_s,
                images_per_s=images_per_s,
                is_logged=(execution + 1) % p.executions_per_log == 0,
                loss_scaling=None if scale is None else float(scale.numpy()),
            )
            yield from execution_events(p, finished)[state.events_done :]
            if finished.is_logged:
                losses, hits = [], []
                busy_s, timed_samples, images_per_s = 0.0, 0, 0.0
            state.earlier_losses, state.earlier_hits = losses, hits
            state.losses, state.hits, state.events_done = [], [], 0

    def _start(self, make_dataset: MakeDataset) -> Callable[[int], TrainedPart]:
        """Makes ready to train from ``state`` on.

        Returns:
            What runs the next weight updates from ``state`` on, as many as it likes before number ``end``; it leaves
            counting them in ``state`` to :meth:`train`.
        """
        raise NotImplementedError

    def _rate(self, weight_update: int) -> float:
        """The learning rate of one weight update."""
        return float(self._schedule(np.arange(weight_update, weight_update + 1))[0])

    def _require_finite(self, losses: List[float], first: int) -> None:
        """Refuses to go on from the weight updates from number ``first`` on if a loss of theirs is not finite."""
        bad = [i for i, value in enumerate(losses) if not np.isfinite(value)]
        if not bad:
            return
        last = first + len(losses)
        where = f"in the execution of weight updates {first + 1} to {last}"
        if self._has_loss_of_each_update:
            where = f"at weight update {first + bad[0] + 1}"
        what = f"the learning rate (it was {self._rate(last - 1):.4g})"
        if self._precision != "32.32":
            what += " or --loss-scaling, or drop --nanoo, if they are given"
        raise NotFiniteError(
            f"the loss became {losses[bad[0]]} {where}", f"lower {what}; checkpoints written before are kept"
        )

    def compile_ahead(
        self, make_dataset: MakeDataset, evaluation: Optional[Iterable[Batch]]
    ) -> CompilationReport:
        """Compiles what :meth:`train` (and with a data set :meth:`evaluate`) runs, without a device to run it on.

        Only IPUs can: ``compile_only``.  The session is of no other use after that.

        Args:
            make_dataset: as for :meth:`train`.
            evaluation: batches as for :meth:`evaluate`, or None.
        """
        raise NotImplementedError

    def any_instance(self, flag: bool) -> bool:
        """Whether a flag is set on any of the instances that train together, so that they act alike."""
        return flag

    def of_first_instance(self, value: float) -> float:
        """What the first of the instances that work together has, so that they all decide alike."""
        return value

    @property
    def num_devices(self) -> Tuple[int, int]:
        """How many devices of this process share the training once a Program is compiled, and how many it has."""
        return 1, 1

    @property
    def sharing(self) -> Optional[Sharing]:
        """How several workers of the host shared the work; None where there is one."""
        return None

    @property
    def evaluation_shard(self) -> Tuple[int, int]:
        """(count, index): :meth:`evaluate` takes every ``count``-th batch from number ``index`` on."""
        return 1, 0

    @property
    def evaluation_part(self) -> Tuple[int, int]:
        """(count, index): :meth:`evaluate` and :meth:`logits` take this one of ``count`` equal parts of each batch."""
        return 1, 0

    def feed(self, dataset: "TfDataset") -> Iterable[Batch]:
        """What :meth:`execute` takes its batches from; a host's iterator goes on where it stopped."""
        return iter(dataset)

    def execute(self, batches: Iterable[Batch], num_weight_updates: int) -> List[float]:
        """Runs weight updates as one execution, without events: what a benchmark times.

        Args:
            batches: what :meth:`feed` made of a data set of the same shapes as :meth:`compile` was given.
            num_weight_updates: at least 1.

        Returns:
            The loss of each weight update, on the host; on IPUs it is the execution's mean for each of them.

        Raises:
            NotFiniteError: the loss is NaN or infinite.
        """
        first = self.state.weight_updates
        part = self._run(batches, num_weight_updates)
        self.state.weight_updates = first + num_weight_updates
        self._require_finite(part.losses, first)
        return part.losses

    def _run(self, batches: Iterable[Batch], num_weight_updates: int) -> TrainedPart:
        """Runs weight updates from ``state`` on as one piece, and times them; does not count them in ``state``."""
        raise NotImplementedError

    def compile_prediction(self, model: "KerasModel", batch_shape: Sequence[int]) -> CompilationReport:
        """Builds (and times the tracing of) what :meth:`predict` runs for images of one batch shape."""
        raise NotImplementedError

    def _report(
        self, model: "KerasModel", trace_s: float, fused: int, num_operations: int = 0
    ) -> CompilationReport:
        """What was compiled of a model."""
        from ipucnn.models.counts import count_macs
        from ipucnn.models.names import named_weights

        return CompilationReport(
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

    def recompute_statistics(self, make_dataset: MakeDataset) -> int:
        """Replaces batch norm's moving statistics by means over training batches, where the Program needs it.

        See :func:`recomputes_statistics`; both sessions do it.  The batches are those that training would take
        next; the training position does not move.

        Returns:
            The number of weight updates' batches that were used; 0: the running statistics were kept.
        """
        p = self.program
        if p is None:
            raise RuntimeError("compile() comes before recompute_statistics()")
        if not (recomputes_statistics(p, self._precision) and self._has_batch_norm()):
            return 0
        updates = min(STATISTICS_UPDATES, p.weight_updates_per_epoch)
        self._measure_statistics(make_dataset, updates)
        return updates

    def _has_batch_norm(self) -> bool:
        """Whether what :meth:`compile` was given has moving statistics."""
        raise NotImplementedError

    def _measure_statistics(self, make_dataset: MakeDataset, num_updates: int) -> None:
        """Sets the moving statistics to means over the batches of so many weight updates."""
        raise NotImplementedError

    def take_averages(self) -> None:
        """Puts the averages of weights and moving statistics, where the optimizer keeps them, into ``evaluated``."""
        slots = self.state.slots
        names = [name for name in self.state.weights if name + AVERAGE in slots]
        self.evaluated = {name: slots[name + AVERAGE].numpy() for name in names}

    def measure_statistics(self, batches: "TfDataset") -> None:
        """Measures batch norm's statistics over large batches of training images, into ``evaluated``.

        The moving statistics stay as they are, for training to go on from; see :meth:`as_evaluated` and
        :mod:`ipucnn.sessions.host.statistics`.  A network without batch norm has nothing to measure.

        Args:
            batches: (images, ...), images as :meth:`compile` was promised them.

        Raises:
            InfeasibleError: the host's memory does not hold the pass.
        """
        raise NotImplementedError

    @contextlib.contextmanager
    def as_evaluated(self) -> Iterator[None]:
        """Inside it the network has the weights in ``evaluated``, for evaluation and checkpoints."""
        weights = self.state.weights
        running = {name: weights[name].numpy() for name in self.evaluated}
        try:
            for name, value in self.evaluated.items():
                weights[name].assign(value)
            yield
        finally:
            for name, value in running.items():
                weights[name].assign(value)

    def prepare_evaluation(self, model: "KerasModel", loss: Optional[LossFunction]) -> None:
        """Makes :meth:`evaluate` and :meth:`predict` usable without a training Program.

        Args:
            model: with the weights to use.
            loss: from ``make_loss``; None where :meth:`evaluate` is not called.
        """
        raise NotImplementedError

    def evaluate(
        self, dataset: Iterable[Batch], stop: Optional[Callable[[], bool]] = None
    ) -> Dict[str, float]:
        """Metrics over a finite data set of (images, labels, weights); every sample of weight 1 counts once.

        Args:
            dataset: what :attr:`evaluation_shard` and :attr:`evaluation_part` say; the metrics are over all of it.
            stop: whether to end before the end; see below.

        Raises:
            Stopped: ``stop``, asked between batches, said so.
        """
        raise NotImplementedError

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around :meth:`logits` where nothing is trained: workers of the host part after it, or end together."""
        yield

    def logits(self, batches: Iterable[Batch]) -> Iterator[Tuple[Batch, np.ndarray]]:
        """Each batch with its logits, in order; some batches may be taken ahead, to be computed together.

        Args:
            batches: tuples that begin with images, the part of each that :attr:`evaluation_part` says; of images alone,
                all of them.

        Yields:
            Logits of the whole batch, after what stands beside its images, of the whole batch as well; images are those
            that were given.
        """
        for batch in batches:
            yield batch, self.predict([batch[0]])[0]

    def predict(self, dataset: Iterable["Tensor"]) -> List[np.ndarray]:
        """Logits of every element of a data set of images (or part of one), one array per element."""
        raise NotImplementedError


def _mean(program: Program, values: List[float], end: int) -> float:
    """Mean over samples of the means of consecutive weight updates, the last of which is number ``end`` - 1."""
    if not program.samples_padded_per_epoch:
        return float(np.mean(values))
    counts = np.diff([program.samples_before(i) for i in range(end - len(values), end + 1)])
    return float(np.average(values, weights=counts))
