"""The host session: any CPU or GPU, with the IPU's semantics."""

import time
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from ipucnn import interrupts
from ipucnn.errors import InfeasibleError
from ipucnn.models.counts import count_macs
from ipucnn.models.names import named_weights
from ipucnn.sessions.host.fusion import activation_bytes_per_sample, choose_fused
from ipucnn.sessions.host.step import Evaluation, UpdateLoop
from ipucnn.sessions.session import (
    STATISTICS_UPDATES,
    CompilationReport,
    DeviceInfo,
    Event,
    ExecutionFinished,
    MakeDataset,
    NotFiniteError,
    Progress,
    Session,
    Stopped,
    TrainState,
    execution_events,
    recomputes_statistics,
)
from ipucnn.training.metrics import MetricTotals
from ipucnn.training.optimizers import Optimizer, OptimizerSettings
from ipucnn.training.program import Program

# An execution runs in slices of about this long, so that interrupts and progress don't wait for its end.
SLICE_S = 1.0


class HostSession(Session):
    """Runs Programs through stock TensorFlow; see :class:`ipucnn.sessions.session.Session`.

    Args:
        device: what is reported.
        place: TensorFlow's name of the device, for example ``/CPU:0``.
    """

    def __init__(self, device: DeviceInfo, place: str = "/CPU:0") -> None:
        self.device = device
        self.place = place
        self.state = TrainState()
        self.program: Optional[Program] = None
        self._loop: Optional[UpdateLoop] = None
        self._evaluation: Optional[Evaluation] = None
        self._schedule: Callable[[Any], Any] = np.zeros_like

    def compile(
        self,
        model: Any,
        program: Program,
        optimizer: OptimizerSettings,
        loss: Any,
        schedule: Callable[[Any], Any],
        make_dataset: Optional[MakeDataset] = None,
    ) -> CompilationReport:
        """Builds the loop of weight updates; chooses how many micro-batches are fused if the Program leaves it open."""
        if program.fused_micro_batches == 0:
            fused = choose_fused(
                program.num_micro_batches,
                program.micro_batch_size,
                program.dbn_replica_group_size,
                activation_bytes_per_sample(model),
                self.device.memory_bytes if self.device.kind == "cpu" else 0,
            )
            program = program.with_fused(fused)
        self.program = program
        self._schedule = schedule
        with tf.device(self.place):
            weights = named_weights(model)
            trained = {id(v) for v in self._trainable(model)}
            names = [name for name, v in weights.items() if id(v) in trained]
            variables = [weights[name] for name in names]
            opt = Optimizer(optimizer, variables, names)
            self.state = TrainState(weights, opt.slots, 0)
            self._loop = UpdateLoop(model, program, opt, loss, variables)
        self._evaluation = Evaluation(model, loss)
        trace_s, operations = self._trace(make_dataset) if make_dataset is not None else (0.0, 0)
        return self._report(model, operations, trace_s, program.fused_micro_batches)

    def _report(self, model: Any, operations: int, trace_s: float, fused: int) -> CompilationReport:
        return CompilationReport(
            device=self.device,
            num_layers=len(model.layers),
            num_parameters=sum(int(np.prod(v.shape)) for v in named_weights(model).values()),
            num_trainable_parameters=sum(int(np.prod(v.shape)) for v in self._trainable(model)),
            macs_per_sample=count_macs(model),
            num_graph_operations=operations,
            trace_s=trace_s,
            first_update_s=0.0,
            fused_micro_batches=fused,
        )

    @staticmethod
    def _trainable(model: Any) -> List[Any]:
        from ipucnn.compat import tf_variable

        return [tf_variable(w) for w in model.trainable_weights]

    @property
    def samples_per_element(self) -> int:
        """Samples of one element of the training data set."""
        assert self.program is not None
        return self.program.fused_micro_batches * self.program.micro_batch_size

    def _trace(self, make_dataset: MakeDataset) -> Tuple[float, int]:
        assert self._loop is not None
        started = time.perf_counter()
        iterator = iter(make_dataset(0, self.samples_per_element))
        with tf.device(self.place):
            graph = self._loop.trace(iterator)
        interrupts.check()
        return time.perf_counter() - started, _count_operations(graph)

    def train(self, make_dataset: MakeDataset) -> Iterator[Event]:
        """Runs the Program from ``state`` on.  The first event is the first weight update's, compiling included.

        Raises:
            NotFiniteError: the loss is NaN or infinite; the weights are then those after that slice.
        """
        p, loop = self.program, self._loop
        if p is None or loop is None:
            raise RuntimeError("compile() comes before train()")
        state, per_execution = self.state, p.weight_updates_per_execution
        iterator = iter(make_dataset(state.weight_updates, self.samples_per_element))
        update_s: Optional[float] = None
        while state.weight_updates - len(state.losses) < p.num_weight_updates:
            execution = (state.weight_updates - len(state.losses)) // per_execution
            end = (execution + 1) * per_execution
            busy_s, timed_samples = 0.0, 0
            while state.weight_updates < end:
                first = state.weight_updates
                count = 1 if update_s is None else max(1, int(SLICE_S / max(update_s, 1e-9)))
                count = min(count, end - first)
                rates = self._schedule(np.arange(first, first + count))
                started = time.perf_counter()
                losses, hits = self._run_slice(iterator, rates, first)
                spent = time.perf_counter() - started
                state.losses.extend(losses)
                state.hits.extend(hits)
                state.weight_updates = first + count
                if update_s is None:
                    # The first update tells nothing, it compiles; the second runs alone and is timed.
                    update_s, self.first_update_s = SLICE_S, spent
                else:
                    busy_s += spent
                    timed_samples += p.samples_before(first + count) - p.samples_before(first)
                    update_s = spent / count
                _require_finite(losses, first, float(rates[-1]))
                speed = timed_samples / busy_s if busy_s else 0.0
                yield Progress(state.weight_updates, float(np.mean(losses)), float(np.mean(hits)), speed)
            finished = ExecutionFinished(
                execution=execution,
                weight_updates=end,
                samples=p.samples_before(end),
                epoch=end / p.weight_updates_per_epoch,
                metrics={"loss": _mean(p, state.losses, end), "accuracy": _mean(p, state.hits, end)},
                learning_rate=float(self._schedule(np.arange(end - 1, end))[0]),
                wall_s=busy_s,
                images_per_s=timed_samples / busy_s if busy_s else 0.0,
            )
            yield from execution_events(p, finished)[state.events_done :]
            state.losses, state.hits, state.events_done = [], [], 0

    def execute(self, batches: Iterator[Any], num_weight_updates: int) -> List[float]:
        """Runs weight updates as one execution, which is not cut into slices.

        Raises:
            NotFiniteError: the loss is NaN or infinite.
        """
        first = self.state.weight_updates
        rates = self._schedule(np.arange(first, first + num_weight_updates))
        losses, _ = self._run_slice(batches, rates, first)
        self.state.weight_updates = first + num_weight_updates
        _require_finite(losses, first, float(rates[-1]))
        return losses

    def _run_slice(self, iterator: Any, rates: Any, first: int) -> Tuple[List[float], List[float]]:
        assert self._loop is not None and self.program is not None
        try:
            with tf.device(self.place):
                losses, hits = self._loop.run(
                    iterator, tf.constant(rates, tf.float32), tf.constant(first, tf.int64)
                )
                return losses.numpy().tolist(), hits.numpy().tolist()
        except tf.errors.ResourceExhaustedError:
            fused = self.program.fused_micro_batches
            raise InfeasibleError(
                f"out of memory with {fused} fused micro-batch(es) of {self.program.micro_batch_size}",
                "use --fused-micro-batches 1"
                if fused > 1
                else "use a smaller --micro-batch-size or --image-size",
            ) from None

    def recompute_statistics(self, make_dataset: MakeDataset) -> int:
        """Replaces the moving statistics by means over training batches, where the Program needs it."""
        p, loop = self.program, self._loop
        if p is None or loop is None:
            raise RuntimeError("compile() comes before recompute_statistics()")
        if not (recomputes_statistics(p) and loop.has_batch_norm):
            return 0
        updates = min(STATISTICS_UPDATES, p.weight_updates_per_epoch)
        iterator = iter(make_dataset(self.state.weight_updates, self.samples_per_element))
        with tf.device(self.place):
            loop.collect(iterator, tf.constant(updates))
        return updates

    def compile_prediction(self, model: Any, batch_shape: Sequence[int]) -> CompilationReport:
        """Traces, and times, what :meth:`predict` runs for images of one batch shape."""
        self._evaluation = Evaluation(model, None)
        started = time.perf_counter()
        images = tf.TensorSpec(batch_shape, tf.float32)
        with tf.device(self.place):
            graph = self._evaluation.predict.get_concrete_function(images).graph
        return self._report(model, _count_operations(graph), time.perf_counter() - started, 1)

    def prepare_evaluation(self, model: Any, loss: Any) -> None:
        """Makes :meth:`evaluate` and :meth:`predict` usable without a training Program."""
        self._evaluation = Evaluation(model, loss)

    def evaluate(self, dataset: Any, stop: Optional[Callable[[], bool]] = None) -> Dict[str, float]:
        """Metrics over a data set of (images, labels, weights); every sample of weight 1 counts exactly once."""
        if self._evaluation is None:
            raise RuntimeError("compile() or prepare_evaluation() comes before evaluate()")
        totals = MetricTotals()
        with tf.device(self.place):
            for images, labels, weights in dataset:
                interrupts.check()
                if stop is not None and stop():
                    raise Stopped
                totals.add(self._evaluation.run(images, labels, weights))
        return totals.result()

    def predict(self, dataset: Iterable[Any]) -> List[Any]:
        """Logits of every element of a data set of images, one array per element."""
        if self._evaluation is None:
            raise RuntimeError("compile() or prepare_evaluation() comes before predict()")
        with tf.device(self.place):
            return [self._evaluation.predict(images).numpy() for images in dataset]


def _count_operations(graph: Any) -> int:
    """Operations of a function graph and of the functions it calls."""
    definition = graph.as_graph_def()
    return len(definition.node) + sum(len(f.node_def) for f in definition.library.function)


def _mean(program: Program, values: List[float], end: int) -> float:
    """Mean over samples of the means of consecutive weight updates, the last of which is number ``end`` - 1."""
    if not program.samples_padded_per_epoch:
        return float(np.mean(values))
    counts = np.diff([program.samples_before(i) for i in range(end - len(values), end + 1)])
    return float(np.average(values, weights=counts))


def _require_finite(losses: List[float], first: int, rate: float) -> None:
    bad = [i for i, value in enumerate(losses) if not np.isfinite(value)]
    if bad:
        raise NotFiniteError(
            f"the loss became {losses[bad[0]]} at weight update {first + bad[0] + 1}",
            f"lower the learning rate (it was {rate:.4g}); checkpoints written before are kept",
        )
