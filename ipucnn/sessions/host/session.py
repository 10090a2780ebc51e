"""The host session: trains and predicts on any CPU or GPU, with the IPU's semantics.

A weight update over R replicas x G micro-batches of B samples is one gradient over R*G*B samples, unless a layer mixes
samples.  So groups of micro-batches, of the size that is fastest, are fused into one batch, and batch norm's statistics
are computed per micro-batch (or group of replicas) inside it.  Micro-batches are ordered as an IPU's replicas take them
from the infeed: accumulation step by accumulation step, replica by replica.  Weight updates run in a loop inside one
TensorFlow function.
"""

import contextlib
import itertools
import re
import time
from dataclasses import replace
from typing import Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from ipucnn import interrupts
from ipucnn.aliases import KerasModel, MemoryAdvice, Tensor, TfDataset, TfGraph
from ipucnn.config.options import RunConfig
from ipucnn.datasets.pixels import InputRange, Transfer
from ipucnn.errors import ConfigurationError, MemoryErrors
from ipucnn.machine import parallel_map
from ipucnn.models.names import moved_statistics, penalties
from ipucnn.models.own import own_layers
from ipucnn.sessions.group import Alone, Mpi
from ipucnn.sessions.host.arithmetic import EXCEPTION, Arithmetic
from ipucnn.sessions.host.collectives import Collectives
from ipucnn.sessions.host.division import Capacity, Division, divide, fused_in_inference
from ipucnn.sessions.host.network import HostWeights, Network
from ipucnn.sessions.host.statistics import LargeBatches, peeked
from ipucnn.sessions.host.updates import UpdateLoop, sums_of
from ipucnn.sessions.session import (
    Batch,
    CompilationReport,
    DeviceInfo,
    MakeDataset,
    NotFiniteError,
    Predictor,
    Session,
    Sharing,
    Stopped,
    TrainedPart,
    Trainer,
    TrainingFeed,
    TrainingTask,
    TrainState,
    check_precision,
    compilation_report,
    sums_of_batch,
)
from ipucnn.text import counted, printable
from ipucnn.training.evaluation import Sums, Totals
from ipucnn.training.losses import Loss
from ipucnn.training.optimizers import Optimizer, penalty_weight
from ipucnn.training.program import BatchLayout, Program

# The target duration of a slice of an execution; interrupts and progress are handled between slices.
SLICE_S = 1.0


class HostSession(Session):
    """Makes trainers and predictors on stock TensorFlow; see :class:`ipucnn.sessions.session.Session`.

    Args:
        device: the device to report.
        config: the options of the run.
        group: the processes that train together.
        places: TensorFlow's names of the devices that may take part in training, for example ``/CPU:0``; the first one
            has the weights.
        transfer: how images get to the devices.
    """

    def __init__(
        self,
        device: DeviceInfo,
        config: RunConfig = RunConfig(),
        group: Alone = Alone(),
        places: Sequence[str] = ("/CPU:0",),
        transfer: Transfer = Transfer("float32"),
    ) -> None:
        self.device, self.config, self.group = device, config, group
        self.places, self.transfer = tuple(places), transfer
        self.place = self.places[0]
        self.takes_pixels = transfer.on_device is not None
        self.on_cpu = device.kind == "cpu"
        self.arithmetic = Arithmetic.of(config)

    def with_pixels(self, input_range: InputRange) -> "HostSession":
        """Takes the last step of preprocessing if ``eight_bit_transfer`` or ``accelerator_side_preprocess`` is set."""
        config = self.config
        moved = self.transfer.moved(
            input_range, config.eight_bit_transfer, config.accelerator_side_preprocess
        )
        return HostSession(self.device, config, self.group, self.places, moved)

    def network(self, model: KerasModel, splits: Sequence[str] = ()) -> Network:
        """Returns the compiled form of a model; with splits, it recomputes activations."""
        return Network(model, self.arithmetic, self.transfer.unpack, splits, on_cpu=self.on_cpu)

    def capacity(self, model: KerasModel) -> Capacity:
        """Returns the capacity that every process has."""
        return Capacity.of_all(
            self.group, self.device.kind, self.device.memory_bytes, len(self.places), model
        )

    def divide(self, model: KerasModel, program: Program, fused: Optional[int] = None) -> Division:
        """Returns the division that suits the capacity of all processes."""
        capacity, mixing = self.capacity(model), own_layers(model)
        return divide(program, self.config, capacity, self.group, self.places, fused, mixing)

    def divide_inference(
        self, model: KerasModel, batch: BatchLayout, num_micro_batches: int, fused: Optional[int] = None
    ) -> Division:
        """Returns the division that suits this process's capacity."""
        alone = 1 if own_layers(model) else None
        fused = fused or alone or fused_in_inference(batch, num_micro_batches, self.capacity(model))
        return Division(batch, fused, self.group.size, self.group.rank)

    def trainer(self, task: TrainingTask) -> "HostTrainer":
        """Makes the loop; with a data set, traces it as well."""
        check_precision(task.program, self.config)
        return HostTrainer(self, task)

    def predictor(
        self, model: KerasModel, memory_advice: Optional[MemoryAdvice] = None, shares: bool = True
    ) -> "HostPredictor":
        """Rounds the weights, and makes the function of prediction, which its first call traces."""
        with tf.device(self.place), _exceptions():
            weights = HostWeights(model, self.arithmetic)
        return HostPredictor(self, model, weights, self.places)

    def any_instance(self, flag: bool) -> bool:
        """Returns whether a flag is set in any process; a signal that one process received is noted in all of them."""
        if self.group.size == 1:
            return flag
        states = self.group.gather("signals", [flag, interrupts.noted()])
        for code in [code for _, code in states if code is not None][:1]:
            interrupts.note(code)
        return any(flag for flag, _ in states)


class HostPredictor(Predictor):
    """Computes with the weights of a network, in the session's precision.

    Args:
        session: the session.
        model: the network.
        weights: its weights.
        places: TensorFlow's names of the devices that take part.
    """

    def __init__(
        self, session: HostSession, model: KerasModel, weights: HostWeights, places: Sequence[str]
    ) -> None:
        self.device, self.weights = session.device, weights
        self.shard = session.group.size, session.group.rank
        self._session, self._model, self._places = session, model, tuple(places)
        self._capacity = session.capacity(model)
        network = session.network(model)

        def forward(images: Tensor) -> Tensor:
            return network(images, training=False)

        self._forward = tf.function(forward, autograph=False)

    def compile(self, batch_shape: Sequence[int]) -> CompilationReport:
        """Traces the forward pass."""
        started = time.perf_counter()
        images = tf.TensorSpec(batch_shape, self._session.transfer.dtype)
        with tf.device(self._places[0]):
            graph = self._forward.get_concrete_function(images).graph
        trace_s = time.perf_counter() - started
        return compilation_report(self.device, self._model, trace_s, num_operations=_count_operations(graph))

    def evaluate(
        self, dataset: Iterable[Batch], loss: Loss, stop: Optional[Callable[[], bool]] = None
    ) -> Dict[str, float]:
        """Adds up the metrics over batches, in their order; every sample of weight 1 counts exactly once.

        Each of several devices computes one of the process's batches at a time.  A CPU that is one device computes
        several in parallel, limited by its cores and memory.
        """
        group, totals = self._session.group, Totals()
        first, batches = peeked(dataset)
        size = 0 if first is None else len(first[0])
        too_large = MemoryErrors(
            f"out of memory in a validation, with batches of {counted(size, 'image')}",
            "use a smaller --validation-micro-batch-size",
        )
        with tf.device(self._places[0]), _exceptions(), too_large:
            self.weights.round_to_nearest()
            # A process without a batch does not know the batch size, so the minimum over all of them counts.
            at_once = min(group.gather("batches at once", self.batches_at_once(size)))
            num_together = len(self._places) * at_once
            while True:
                interrupts.check()
                together = list(itertools.islice(batches, num_together))
                if stop is not None and self._session.any_instance(bool(together) and stop()):
                    raise Stopped
                everyones = group.gather("evaluate", self._sums(together, at_once, loss))
                for batch_sums in itertools.chain.from_iterable(itertools.zip_longest(*everyones)):
                    if batch_sums is not None:
                        totals.add(batch_sums)
                if any(len(sums_of_process) < num_together for sums_of_process in everyones):
                    return totals.result()

    def batches_at_once(self, samples: int) -> int:
        """Returns the number of batches of ``samples`` samples that each device evaluates in parallel."""
        return 1 if len(self._places) > 1 else self._capacity.evaluated(samples)

    def _sums(self, batches: Sequence[Batch], at_once: int, loss: Loss) -> List[Sums]:
        """Returns the sums of metrics of batches, of which there are at most ``at_once`` for each device."""
        forward, pack = self._forward, self._session.transfer.pack

        def logits_of(place: str, batch: Batch) -> Tensor:
            with tf.device(place):
                return forward(pack(batch[0]))

        # A GPU computes while the next one is given its work.
        logits = list(parallel_map(logits_of, zip(itertools.cycle(self._places), batches), at_once))
        scored = ((loss, values, *batch[1:]) for values, batch in zip(logits, batches))
        return list(parallel_map(sums_of_batch, scored, at_once * len(self._places)))

    def predict(self, dataset: Iterable[Tensor]) -> List[np.ndarray]:
        """Returns the logits of each element; each element is one batch."""
        predict, pack = self._forward, self._session.transfer.pack

        def of_batch(images: Tensor) -> np.ndarray:
            with tf.device(self._places[0]):
                array: np.ndarray = np.asarray(predict(pack(images)))
            return array

        too_large = MemoryErrors("out of memory in a prediction", "end other programs")
        with tf.device(self._places[0]), _exceptions(), too_large:
            self.weights.round_to_nearest()
            first, batches = peeked(dataset)
            at_once = 1 if first is None else self.batches_at_once(len(first))
            return list(parallel_map(of_batch, ((images,) for images in batches), at_once))


class HostTrainer(Trainer):
    """Runs weight updates in a loop inside one TensorFlow function; see :meth:`HostSession.trainer`."""

    def __init__(self, session: HostSession, task: TrainingTask) -> None:
        super().__init__(task)
        model, program, division = task.model, task.program, task.division
        self._session, self._place = session, division.devices[0]
        self._collectives = Collectives(session.group) if isinstance(session.group, Mpi) else None
        # Seconds in collectives before weight updates were timed, mostly the wait for the slowest compilation.
        self._waited_s = 0.0
        with tf.device(self._place), _exceptions():
            weights = self._weights = HostWeights(model, session.arithmetic)
            trained = {name: weights.kept[name] for name in weights.trainable}
            statistics = {name: weights.kept[name] for name in moved_statistics(model)}
            opt = Optimizer(task.optimizer, trained, statistics, penalties(model), penalty_weight(program))
            network = session.network(model, program.pipeline_splits if program.recomputation else ())
            sums = sums_of(division, self._collectives, session.config.reduction, program)
            self._loop = UpdateLoop(network, program, division, opt, task.loss, weights, sums)
        scaler = self._loop.scaler
        self.state = TrainState(weights.kept, {**opt.slots, **({} if scaler is None else scaler.slots)}, 0)
        self.predictor: HostPredictor = HostPredictor(session, model, weights, division.devices)
        self._large_batches = LargeBatches(
            model, session.arithmetic, session.transfer.unpack, session.on_cpu, self.predictor.batches_at_once
        )
        trace_s, operations = (0.0, 0) if task.make_dataset is None else self.trace(task.make_dataset)
        fused = division.fused_micro_batches
        self.compilation = compilation_report(session.device, model, trace_s, fused, operations)

    def trace(self, make_dataset: MakeDataset) -> Tuple[float, int]:
        """Traces the loop; returns the time in seconds, and the number of operations."""
        started = time.perf_counter()
        iterator = self.feed(make_dataset(0, self.division.samples_per_group))
        with tf.device(self._place):
            graph = self._loop.trace(iterator)
        interrupts.check()
        return time.perf_counter() - started, _count_operations(graph)

    def start(self, make_dataset: MakeDataset) -> Callable[[int], TrainedPart]:
        """Returns a function that runs slices of about a second; the first two have a single update each."""
        iterator = self.feed(make_dataset(self.state.weight_updates, self.division.samples_per_group))
        num_parts, update_s = 0, 0.0

        def run(end: int) -> TrainedPart:
            nonlocal num_parts, update_s
            # The time of the first update includes compiling, so the second one runs alone as well, and is timed.
            count = 1 if num_parts < 2 else max(1, int(SLICE_S / max(update_s, 1e-9)))
            # The length of a slice depends on the clock, so rank 0 decides it for all processes.
            count = self._session.group.from_rank_0("slice", count)
            count = min(count, end - self.state.weight_updates)
            part = self.run(iterator, count)
            num_parts += 1
            if num_parts == 1:
                self.compilation = replace(self.compilation, first_update_s=part.timed_s)
                self._waited_s = self._collective_s
                return replace(part, timed_s=0.0)
            update_s = part.timed_s / count
            return part

        return run

    @property
    def _collective_s(self) -> float:
        return 0.0 if self._collectives is None else self._collectives.seconds

    @property
    def sharing(self) -> Optional[Sharing]:
        """Returns how the processes shared the weight updates that were timed; None for one process."""
        workers, reduction = self._session.group.size, self._session.config.reduction
        if workers == 1:
            return None
        return Sharing(workers, reduction, self._loop.received_bytes, self._collective_s - self._waited_s)

    def feed(self, dataset: TfDataset) -> Iterator[Batch]:
        """Returns an iterator over the data set, which continues where it stopped."""
        return iter(self._session.transfer.pack_8_bits(dataset))

    def run(self, batches: TrainingFeed, num_weight_updates: int) -> TrainedPart:
        """Calls the compiled loop once."""
        first = self.state.weight_updates
        last = first + num_weight_updates
        rates = self.schedule(np.arange(first, last))
        started = time.perf_counter()
        with tf.device(self._place), _exceptions(first, last), self._too_large():
            results = self._loop.run(batches, tf.constant(rates, tf.float32), tf.constant(first, tf.int64))
            losses, hits = (values.numpy().tolist() for values in results)
        return TrainedPart(losses, hits, time.perf_counter() - started)

    def _too_large(self) -> MemoryErrors:
        """Returns the block in which training may run out of memory."""
        fused = self.division.fused_micro_batches
        smaller = "--fused-micro-batches 1" if fused > 1 else "a smaller --micro-batch-size or --image-size"
        what = f"{counted(fused, 'fused micro-batch')} of {self.program.micro_batch_size}"
        return MemoryErrors(f"out of memory with {what}", f"use {smaller}")

    def recompute_statistics(self, make_dataset: MakeDataset, num_updates: int) -> List[str]:
        """Runs the training loop's forward pass over the batches."""
        if self._loop.collected:
            iterator = self.feed(make_dataset(self.state.weight_updates, self.division.samples_per_group))
            with tf.device(self._place), _exceptions(), self._too_large():
                self._weights.round_to_nearest()
                self._loop.collect(iterator, tf.constant(num_updates))
                self._weights.round_to_nearest()
        return self._loop.collected

    def measure_statistics(self, images: TfDataset) -> List[str]:
        """Measures the statistics in the session's precision."""
        with tf.device(self._place), _exceptions():
            self._weights.round_to_nearest()
            for name, value in self._large_batches.measure(self.feed(images)).items():
                self.state.weights[name].assign(value)
            self._weights.round_to_nearest()
        return self._large_batches.names


@contextlib.contextmanager
def _exceptions(first: int = 0, last: int = 0) -> Iterator[None]:
    """Translates TensorFlow's errors: floating-point exceptions, and no deterministic operation.

    Args:
        first, last: the numbers of weight updates before and after the block; 0: the block does not train.
    """
    try:
        yield
    except tf.errors.UnimplementedError as error:
        # The message of kernels without a deterministic version ("A deterministic GPU implementation of ...").
        if "determinis" not in str(error):
            raise
        raise ConfigurationError(
            f"TensorFlow cannot compute this network with deterministic operations: {printable(error.message)}",
            "add --no-deterministic-operations: a GPU then gives other last digits each time",
        ) from None
    except tf.errors.InvalidArgumentError as error:
        match = re.search(rf"{EXCEPTION}(.*?) : Tensor had (\w+)", str(error))
        if match is None:
            raise
        when = f", in weight updates {first + 1} to {last}" if last else ""
        raise NotFiniteError(
            f"--fp-exceptions: {EXCEPTION}{match.group(1)}{when}: its result is too large, or no number",
            "lower --loss-scaling or the learning rate, or add --no-fp-exceptions",
        ) from None


def _count_operations(graph: TfGraph) -> int:
    """Returns the number of operations in a function graph and in the functions that it calls."""
    definition = graph.as_graph_def()
    return len(definition.node) + sum(len(f.node_def) for f in definition.library.function)
