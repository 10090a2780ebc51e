"""The contract both sessions keep: compile a Program, then train, evaluate and predict as events."""

from dataclasses import asdict, dataclass, field
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

from ipucnn.errors import UserError
from ipucnn.training.program import Program


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
    # Seconds of each stage of an IPU's compiler, as its progress bar tells them; none: from the cache, or no IPU
    stages_s: Mapping[str, float] = field(default_factory=dict)
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
    """One execution is over: metrics are means over its samples, ``wall_s`` is its time without compiling."""

    execution: int
    weight_updates: int
    samples: int
    epoch: float
    metrics: Dict[str, float]
    learning_rate: float
    wall_s: float
    images_per_s: float


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
    """Everything a training step changes, by name; variables are tf.Variables.

    Attributes:
        weights: trainable and moving-statistics weights by canonical name, in the model's order.
        slots: optimizer state by ``<weight name>/<slot>``.
        weight_updates: weight updates done.
        losses, hits: mean loss and accuracy of each weight update of the execution under way.
        events_done: how many of the events at that execution's end (in the order of
            :func:`execution_events`) were handled; whoever handles them counts them here.
    """

    weights: Dict[str, Any] = field(default_factory=dict)
    slots: Dict[str, Any] = field(default_factory=dict)
    weight_updates: int = 0
    losses: List[float] = field(default_factory=list)
    hits: List[float] = field(default_factory=list)
    events_done: int = 0


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


MakeDataset = Callable[[int, int], Any]


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
        would_fit: what to suggest where a program does not fit on IPUs, from how many times the memory there is was
            needed; see ``ipucnn.runs.fitting``; set before :meth:`compile`, :meth:`compile_prediction` and
            :meth:`prepare_evaluation`.
    """

    device: DeviceInfo
    place: str = "/CPU:0"
    program: Optional[Program] = None
    state: TrainState
    first_update_s: float = 0.0
    compilation: Optional[CompilationReport] = None
    would_fit: Optional[Callable[[Optional[float]], Optional[str]]] = None

    def take_preprocessing(self, affine: Any) -> bool:
        """Whether the session brings images from pixels 0 to 255 to the network's range itself.

        Call it before :meth:`compile`, :meth:`compile_prediction` and :meth:`prepare_evaluation`.

        Args:
            affine: ``ipucnn.datasets.preprocessing.ChannelAffine``.
        """
        return False

    def compile(
        self,
        model: Any,
        program: Program,
        optimizer: Any,
        loss: Any,
        schedule: Callable[[Any], Any],
        make_dataset: Optional[MakeDataset] = None,
    ) -> CompilationReport:
        """Builds what :meth:`train` runs.  Must be called once, before it.

        Args:
            model: functional Keras model with logits as output.  The host trains its weights in place; on IPUs a copy
                is trained.  Either way ``state.weights`` has the trained ones.
            program: ``fused_micro_batches`` 0 lets the session choose; see ``self.program`` afterwards.
            optimizer: ``OptimizerSettings``.
            loss: from ``make_loss``.
            schedule: weight updates (int array) -> learning rates.
            make_dataset: as for :meth:`train`; if given, the function is traced (and timed) here.
        """
        raise NotImplementedError

    def train(self, make_dataset: MakeDataset) -> Iterator[Event]:
        """Runs the Program from ``state`` on, wherever in an execution or between its last events that is.

        Args:
            make_dataset: (weight update to start from, samples per element) -> infinite tf.data.Dataset of
                (images, labels).
        """
        raise NotImplementedError

    def compile_ahead(
        self, make_dataset: MakeDataset, evaluation: Optional[Iterable[Any]]
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

    def feed(self, dataset: Any) -> Any:
        """What :meth:`execute` takes its batches from; a host's iterator goes on where it stopped."""
        return iter(dataset)

    def execute(self, batches: Any, num_weight_updates: int) -> List[float]:
        """Runs weight updates as one execution, without events: what a benchmark times.

        Args:
            batches: what :meth:`feed` made of a data set of the same shapes as :meth:`compile` was given.
            num_weight_updates: at least 1.

        Returns:
            The loss of each weight update, on the host.
        """
        raise NotImplementedError

    def compile_prediction(self, model: Any, batch_shape: Sequence[int]) -> CompilationReport:
        """Builds (and times the tracing of) what :meth:`predict` runs for images of one batch shape."""
        raise NotImplementedError

    def recompute_statistics(self, make_dataset: MakeDataset) -> int:
        """Replaces batch norm's moving statistics by means over training batches, where the Program needs it.

        See :func:`recomputes_statistics`; both sessions do it.  The batches are those that training would take
        next; the training position does not move.

        Returns:
            The number of weight updates' batches that were used; 0: the running statistics were kept.
        """
        raise NotImplementedError

    def prepare_evaluation(self, model: Any, loss: Any) -> None:
        """Makes :meth:`evaluate` and :meth:`predict` usable without a training Program."""
        raise NotImplementedError

    def evaluate(self, dataset: Any, stop: Optional[Callable[[], bool]] = None) -> Dict[str, float]:
        """Metrics over a finite data set of (images, labels, weights); every sample of weight 1 counts once.

        Raises:
            Stopped: ``stop``, asked between batches, said so.
        """
        raise NotImplementedError

    def logits(self, batches: Iterable[Tuple[Any, ...]]) -> Iterator[Tuple[Tuple[Any, ...], Any]]:
        """Each batch with its logits, in order; some batches may be taken ahead, to be computed together.

        Args:
            batches: tuples that begin with images.
        """
        for batch in batches:
            yield batch, self.predict([batch[0]])[0]

    def predict(self, dataset: Iterable[Any]) -> List[Any]:
        """Logits of every element of a data set of images (or part of one), one array per element."""
        raise NotImplementedError
