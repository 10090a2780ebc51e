"""The host session: trains on any CPU or GPU, with the IPU's semantics.

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
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from ipucnn import interrupts
from ipucnn.aliases import KerasModel, Tensor, TfDataset, TfGraph
from ipucnn.config.options import RunConfig
from ipucnn.datasets.pixels import InputRange, Transfer
from ipucnn.errors import ConfigurationError, InfeasibleError
from ipucnn.machine import operations_at_once, side_by_side
from ipucnn.models.names import moved_statistics
from ipucnn.sessions.group import Alone, Mpi
from ipucnn.sessions.host.arithmetic import EXCEPTION, Arithmetic
from ipucnn.sessions.host.collectives import Collectives
from ipucnn.sessions.host.division import (
    Capacity,
    Division,
    activation_bytes_per_sample,
    divide,
)
from ipucnn.sessions.host.network import Network, Weights
from ipucnn.sessions.host.statistics import LargeBatches, peeked
from ipucnn.sessions.host.sums import sums_of
from ipucnn.sessions.host.updates import UpdateLoop
from ipucnn.sessions.session import (
    Batch,
    CompilationReport,
    DeviceInfo,
    MakeDataset,
    NotFiniteError,
    Session,
    Sharing,
    Stopped,
    TrainedPart,
    TrainingFeed,
    TrainState,
)
from ipucnn.text import counted, printable
from ipucnn.training.evaluation import Sums, Totals
from ipucnn.training.losses import Loss
from ipucnn.training.optimizer_settings import OptimizerSettings
from ipucnn.training.optimizers import Optimizer
from ipucnn.training.program import BuiltProgram, Program
from ipucnn.training.schedules import Schedule

# The target duration of a slice of an execution; interrupts and progress are handled between slices.
SLICE_S = 1.0


class HostSession(Session):
    """Runs Programs through stock TensorFlow; see :class:`ipucnn.sessions.session.Session`.

    Args:
        device: the device to report.
        config: the options of the run.
        group: the processes that train together.
        places: TensorFlow's names of the devices that may take part in training, for example ``/CPU:0``; the first one
            has the weights.

    Attributes:
        places: the devices that take part in training, once a Program is compiled; before, all of them.
    """

    _weights: Weights
    _large_batches: LargeBatches

    def __init__(
        self,
        device: DeviceInfo,
        config: RunConfig = RunConfig(),
        group: Alone = Alone(),
        places: Sequence[str] = ("/CPU:0",),
    ) -> None:
        self._config = config
        self._group = group
        self._collectives = Collectives(group) if isinstance(group, Mpi) else None
        self._transfer = Transfer("float32")
        self.device = device
        self.places = self._devices = tuple(places)
        self._capacity = Capacity()
        self._on_cpu = device.kind == "cpu"
        self._arithmetic = Arithmetic.of(self._config)
        self._loop: Optional[UpdateLoop] = None
        self._forward: Optional[Callable[[Tensor], Tensor]] = None
        # Seconds in collectives before weight updates were timed, mostly the wait for the slowest compilation.
        self._waited_s = 0.0

    def take_preprocessing(self, input_range: InputRange) -> bool:
        """Takes the last step of preprocessing if ``eight_bit_transfer`` or ``accelerator_side_preprocess`` is set."""
        self._transfer = self._transfer.moved(
            input_range, self._config.eight_bit_transfer, self._config.accelerator_side_preprocess
        )
        return self._transfer.on_device is not None

    def divide(self, model: KerasModel, program: Program, fused: Optional[int] = None) -> Division:
        """Returns the division that suits the capacity of all processes."""
        from ipucnn.models.own import own_layers

        self._take_capacity(model)
        mixing = own_layers(model)
        return divide(program, self._config, self._capacity, self._group, self._devices, fused, mixing)

    def compile(
        self,
        model: KerasModel,
        program: BuiltProgram,
        division: Division,
        optimizer: OptimizerSettings,
        loss: Loss,
        schedule: Schedule,
        make_dataset: Optional[MakeDataset] = None,
    ) -> CompilationReport:
        """Makes the loop; with a data set, traces it as well."""
        self._require_same_precision(program)
        self.program, self.division, self._schedule = program, division, schedule
        self.places = division.devices
        with tf.device(self.place), _exceptions():
            weights = self._weights = Weights(model, self._arithmetic)
            trained = {name: weights.kept[name] for name in weights.trainable}
            statistics = {name: weights.kept[name] for name in moved_statistics(model)}
            opt = Optimizer(optimizer, trained, statistics)
            self.state = TrainState(weights.kept, opt.slots, 0)
            network = self._network(model, program.pipeline_splits if program.recomputation else ())
            sums = sums_of(division, self._collectives, self._config.reduction)
            self._loop = UpdateLoop(network, program, division, opt, loss, weights, sums)
            if self._loop.scaler is not None:
                self.state.slots = {**opt.slots, **self._loop.scaler.slots}
        self._make_forward(model, loss)
        self._large_batches = LargeBatches(
            model, self._arithmetic, self._transfer.unpack, self._on_cpu, self._evaluated_at_once
        )
        trace_s, operations = self._trace(make_dataset) if make_dataset is not None else (0.0, 0)
        return self._report(model, trace_s, program.fused_micro_batches, operations)

    @property
    def place(self) -> str:
        """Returns TensorFlow's name of the device that has the weights."""
        return self.places[0]

    @property
    def num_devices(self) -> Tuple[int, int]:
        """Returns the number of devices that share the training, and the number of all devices."""
        return len(self.places), len(self._devices)

    def _take_capacity(self, model: KerasModel) -> None:
        """Agrees with the other processes on the capacity to assume: the minimum over all of them."""
        operations, memory = (operations_at_once(), self.device.memory_bytes) if self._on_cpu else (1, 0)
        facts = [self.device.kind, len(self._devices), operations, memory]
        kinds, *numbers = zip(*self._group.gather("capacity", facts))
        if len(set(kinds)) > 1:
            other = next(rank for rank, kind in enumerate(kinds) if kind != kinds[0])
            raise ConfigurationError(
                f"rank {other} computes on a {kinds[other]}, and rank 0 on a {kinds[0]}",
                "give all processes the same kind of device: --device cpu, or --device gpu",
            )
        devices, operations, memory = (int(min(values)) for values in numbers)
        size = activation_bytes_per_sample(model)
        self._capacity = Capacity(devices, operations, memory, size, self._on_cpu)

    def _trace(self, make_dataset: MakeDataset) -> Tuple[float, int]:
        assert self._loop is not None and self.division is not None
        started = time.perf_counter()
        iterator = self.feed(make_dataset(0, self.division.samples_per_group))
        with tf.device(self.place):
            graph = self._loop.trace(iterator)
        interrupts.check()
        return time.perf_counter() - started, _count_operations(graph)

    def _start(self, make_dataset: MakeDataset) -> Callable[[int], TrainedPart]:
        """Returns a function that runs slices of about a second; the first two have a single update each."""
        assert self.division is not None
        iterator = self.feed(make_dataset(self.state.weight_updates, self.division.samples_per_group))
        num_parts, update_s = 0, 0.0

        def run(end: int) -> TrainedPart:
            nonlocal num_parts, update_s
            # The time of the first update includes compiling, so the second one runs alone as well, and is timed.
            count = 1 if num_parts < 2 else max(1, int(SLICE_S / max(update_s, 1e-9)))
            # The length of a slice depends on the clock, so rank 0 decides it for all processes.
            count = self._group.from_rank_0("slice", count)
            count = min(count, end - self.state.weight_updates)
            part = self._run(iterator, count)
            num_parts += 1
            if num_parts == 1:
                assert self.compilation is not None
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
        if self._group.size == 1 or self._loop is None:
            return None
        return Sharing(
            self._group.size,
            self._config.reduction,
            self._loop.received_bytes,
            self._collective_s - self._waited_s,
        )

    def any_instance(self, flag: bool) -> bool:
        """Returns whether a flag is set in any process; a signal that one process received is noted in all of them."""
        if self._group.size == 1:
            return flag
        states = self._group.gather("signals", [flag, interrupts.noted()])
        for code in [code for _, code in states if code is not None][:1]:
            interrupts.note(code)
        return any(flag for flag, _ in states)

    @property
    def evaluation_shard(self) -> Tuple[int, int]:
        """Returns (number of processes, rank): each of N processes evaluates every N-th batch."""
        return self._group.size, self._group.rank

    def feed(self, dataset: TfDataset) -> Iterator[Batch]:
        """Returns an iterator over the data set, which continues where it stopped."""
        return iter(self._transfer.pack_8_bits(dataset))

    def _run(self, batches: TrainingFeed, num_weight_updates: int) -> TrainedPart:
        """Calls the compiled loop once."""
        assert self._loop is not None and self.program is not None
        first = self.state.weight_updates
        rates = self._schedule(np.arange(first, first + num_weight_updates))
        started = time.perf_counter()
        last = first + num_weight_updates
        with tf.device(self.place), _exceptions(self._memory_of_training, first, last):
            results = self._loop.run(batches, tf.constant(rates, tf.float32), tf.constant(first, tf.int64))
            losses, hits = (values.numpy().tolist() for values in results)
        return TrainedPart(losses, hits, time.perf_counter() - started)

    @property
    def _memory_of_training(self) -> Tuple[str, str]:
        """Returns the work of training and the option to change, if it does not fit into memory."""
        assert self.program is not None
        fused = self.program.fused_micro_batches
        smaller = "--fused-micro-batches 1" if fused > 1 else "a smaller --micro-batch-size or --image-size"
        what = f"with {counted(fused, 'fused micro-batch')} of {self.program.micro_batch_size}"
        return what, f"use {smaller}"

    def recompute_statistics(self, make_dataset: MakeDataset, num_updates: int) -> List[str]:
        """Runs the training loop's forward pass over the batches."""
        assert self._loop is not None and self.division is not None
        if self._loop.collected:
            iterator = self.feed(make_dataset(self.state.weight_updates, self.division.samples_per_group))
            with tf.device(self.place), _exceptions(self._memory_of_training):
                self._weights.round_to_nearest()
                self._loop.collect(iterator, tf.constant(num_updates))
                self._weights.round_to_nearest()
        return self._loop.collected

    def measure_statistics(self, images: TfDataset) -> List[str]:
        """Measures the statistics in the session's precision."""
        with tf.device(self.place), _exceptions():
            self._weights.round_to_nearest()
            for name, value in self._large_batches.measure(self.feed(images)).items():
                self.state.weights[name].assign(value)
            self._weights.round_to_nearest()
        return self._large_batches.names

    def compile_prediction(self, model: KerasModel, batch_shape: Sequence[int]) -> CompilationReport:
        """Traces the forward pass for one batch shape."""
        self.prepare_evaluation(model, None)
        forward: Any = self._forward
        started = time.perf_counter()
        images = tf.TensorSpec(batch_shape, self._transfer.dtype)
        with tf.device(self.place):
            graph = forward.get_concrete_function(images).graph
        return self._report(model, time.perf_counter() - started, 1, _count_operations(graph))

    def prepare_evaluation(self, model: KerasModel, loss: Optional[Loss]) -> None:
        """Makes the function of evaluation, which its first call traces, and rounds the weights."""
        with tf.device(self.place), _exceptions():
            self._weights = Weights(model, self._arithmetic)
        self._make_forward(model, loss)
        self._take_capacity(model)

    def _network(self, model: KerasModel, splits: Sequence[str] = ()) -> Network:
        return Network(model, self._arithmetic, self._transfer.unpack, splits, on_cpu=self._on_cpu)

    def _make_forward(self, model: KerasModel, loss: Optional[Loss]) -> None:
        """Makes the function of evaluation, from images to logits."""
        network = self._network(model)

        def forward(images: Tensor) -> Tensor:
            return network(images, training=False)

        self._forward, self._loss = tf.function(forward, autograph=False), loss

    def evaluate(
        self, dataset: Iterable[Batch], stop: Optional[Callable[[], bool]] = None
    ) -> Dict[str, float]:
        """Adds up the metrics over batches, in their order; every sample of weight 1 counts exactly once.

        Each of several devices computes one of the process's batches at a time.  A CPU that is one device computes
        several in parallel, limited by its cores and memory.

        Raises:
            RuntimeError: nothing is compiled.
            InfeasibleError: a batch does not fit into memory.
            Stopped: ``stop`` returned true in a process.
        """
        if self._forward is None:
            raise RuntimeError("compile() or prepare_evaluation() comes before evaluate()")
        totals = Totals()
        first, batches = peeked(dataset)
        size = 0 if first is None else len(first[0])
        what = f"in a validation, with batches of {counted(size, 'image')}"
        with tf.device(self.place), _exceptions((what, "use a smaller --validation-micro-batch-size")):
            self._weights.round_to_nearest()
            # A process without a batch does not know the batch size, so the minimum over all of them counts.
            at_once = min(self._group.gather("batches at once", self._evaluated_at_once(size)))
            group_size = len(self.places) * at_once
            while True:
                interrupts.check()
                group = list(itertools.islice(batches, group_size))
                if stop is not None and self.any_instance(bool(group) and stop()):
                    raise Stopped
                everyones = self._group.gather("evaluate", self._sums_of_group(group, at_once))
                for batch_sums in itertools.chain.from_iterable(itertools.zip_longest(*everyones)):
                    if batch_sums is not None:
                        totals.add(batch_sums)
                if any(len(sums_of_process) < group_size for sums_of_process in everyones):
                    return totals.result()

    def _evaluated_at_once(self, samples: int) -> int:
        """Returns the number of batches of ``samples`` samples that each device evaluates in parallel."""
        return 1 if len(self.places) > 1 else self._capacity.evaluated(samples)

    def _sums_of_group(self, group: Sequence[Batch], at_once: int) -> List[Sums]:
        """Returns the sums of metrics of each batch in a group, which has at most ``at_once`` batches per device."""
        forward, pack = self._forward, self._transfer.pack
        assert forward is not None

        def logits_of(place: str, batch: Batch) -> Tensor:
            with tf.device(place):
                return forward(pack(batch[0]))

        # A GPU computes while the next one is given its work.
        logits = list(side_by_side(logits_of, zip(itertools.cycle(self.places), group), at_once))
        scored = ((values, *batch[1:]) for values, batch in zip(logits, group))
        return list(side_by_side(self._sums_of_batch, scored, at_once * len(self.places)))

    def predict(self, dataset: Iterable[Tensor]) -> List[np.ndarray]:
        """Returns the logits of each element; each element is one batch."""
        if self._forward is None:
            raise RuntimeError("compile() or prepare_evaluation() comes before predict()")
        predict, pack = self._forward, self._transfer.pack

        def of_batch(images: Tensor) -> np.ndarray:
            with tf.device(self.place):
                array: np.ndarray = np.asarray(predict(pack(images)))
            return array

        with tf.device(self.place), _exceptions():
            self._weights.round_to_nearest()
            first, batches = peeked(dataset)
            at_once = 1 if first is None else self._evaluated_at_once(len(first))
            return list(side_by_side(of_batch, ((images,) for images in batches), at_once))


@contextlib.contextmanager
def _exceptions(memory: Optional[Tuple[str, str]] = None, first: int = 0, last: int = 0) -> Iterator[None]:
    """Translates TensorFlow's errors: out of memory, floating-point exceptions, and no deterministic operation.

    Args:
        memory: the work that may not fit into memory, and the option to change; None: such errors pass.
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
            "lower --loss-scaling or the learning rate, or drop --fp-exceptions",
        ) from None
    except (MemoryError, tf.errors.ResourceExhaustedError):
        if memory is None:
            raise
        raise InfeasibleError(f"out of memory {memory[0]}", memory[1]) from None


def _count_operations(graph: TfGraph) -> int:
    """Returns the number of operations in a function graph and in the functions that it calls."""
    definition = graph.as_graph_def()
    return len(definition.node) + sum(len(f.node_def) for f in definition.library.function)
