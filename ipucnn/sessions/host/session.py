"""The host session: any CPU or GPU, with the IPU's semantics.

A weight update over R replicas x G micro-batches of B samples is one gradient over R*G*B samples, except where a layer
mixes samples.  So several micro-batches are computed as one batch, as many as are fastest, and batch norm's statistics
are computed per micro-batch (or group of replicas) inside it.  Micro-batches are ordered as an IPU's replicas take them
from the infeed: accumulation step by accumulation step, replica by replica.  Weight updates run in a loop inside one
TensorFlow function.
"""

import contextlib
import itertools
import math
import re
import time
from dataclasses import replace
from typing import Any, Callable, ContextManager, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from ipucnn import interrupts
from ipucnn.aliases import KerasModel, Tensor, TfDataset, TfGraph
from ipucnn.config.options import RunConfig
from ipucnn.config.values import MEASURE
from ipucnn.datasets.preprocessing import ChannelAffine
from ipucnn.errors import ConfigurationError, InfeasibleError
from ipucnn.machine import operations_at_once, side_by_side
from ipucnn.models.architecture import own_layers
from ipucnn.models.names import moved_statistics
from ipucnn.sessions.host.arithmetic import EXCEPTION, Arithmetic, Rounding
from ipucnn.sessions.host.cluster import Cluster
from ipucnn.sessions.host.division import (
    Capacity,
    choose_devices,
    choose_fused,
    choose_lanes,
    similar_to,
)
from ipucnn.sessions.host.network import Network, Weights
from ipucnn.sessions.host.statistics import LargeBatches
from ipucnn.sessions.host.updates import Preprocessing, UpdateLoop
from ipucnn.sessions.host.workers import check_sharing
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
    TrainState,
)
from ipucnn.text import counted, printable
from ipucnn.training.checkpoints import digest_of
from ipucnn.training.losses import LossFunction
from ipucnn.training.metrics import MetricTotals, traced_sums
from ipucnn.training.optimizers import Optimizer, OptimizerSettings
from ipucnn.training.program import Program
from ipucnn.training.schedules import Schedule

# An execution runs in slices of about this long, so that interrupts and progress don't wait for its end.
SLICE_S = 1.0

# --fused-micro-batches measure: weight updates that are timed of each number; the fastest counts.
MEASURED_UPDATES = 3


def activation_bytes_per_sample(model: KerasModel) -> int:
    """Bytes of all layer outputs of one sample, float32, from the static shapes of a functional model."""
    total = 0
    for layer in model.layers:
        shapes = layer.output.shape if not isinstance(layer.output, (list, tuple)) else None
        if shapes is None:
            continue
        size = 4
        for dimension in shapes[1:]:
            size *= int(dimension or 1)
        total += size
    return total


class HostSession(Session):
    """Runs Programs through stock TensorFlow; see :class:`ipucnn.sessions.session.Session`.

    Args:
        device: what is reported.
        place: TensorFlow's name of the device, for example ``/CPU:0``.
        config: the options of the run; None: all defaults.
        cluster: the workers that train together; None: this one is alone.
        others: more devices of the same kind, which may take part in training.

    Attributes:
        places: the devices that take part in training, once a Program is compiled.
        lanes: chunks that each of them computes side by side, once a Program is compiled.  On a CPU these are as many
            as there are cores and memory for, and as can share a weight update evenly.  It changes nothing but how
            long that takes.
    """

    def __init__(
        self,
        device: DeviceInfo,
        place: str = "/CPU:0",
        config: Optional[RunConfig] = None,
        cluster: Optional[Cluster] = None,
        others: Sequence[str] = (),
    ) -> None:
        self._config = RunConfig() if config is None else config
        self._cluster = Cluster() if cluster is None else cluster
        self._preprocessing = Preprocessing()
        self.device = device
        self.place = place
        self.places = self._devices = (place, *others)
        self.lanes = 1
        self._capacity = Capacity()
        self._on_cpu = device.kind == "cpu"
        self._clock = time.perf_counter
        self._arithmetic = Arithmetic.of(self._config)
        self._precision = self._arithmetic.precision
        self._weights: Optional[Weights] = None
        self.state = TrainState()
        self.program: Optional[Program] = None
        self._loop: Optional[UpdateLoop] = None
        self._forward: Optional[Callable[[Tensor], Tensor]] = None
        self._sums_of_logits = traced_sums(None)
        self._large_batches: Optional[LargeBatches] = None
        # Seconds in collectives before weight updates were timed: waiting for who compiled last.
        self._waited_s = 0.0

    def take_preprocessing(self, affine: ChannelAffine) -> bool:
        """Takes it with ``eight_bit_transfer`` or ``accelerator_side_preprocess``."""
        config = self._config
        if not (config.eight_bit_transfer or config.accelerator_side_preprocess):
            return False
        self._preprocessing = Preprocessing(affine, "uint8" if config.eight_bit_transfer else "float32")
        return True

    def compile(
        self,
        model: KerasModel,
        program: Program,
        optimizer: OptimizerSettings,
        loss: LossFunction,
        schedule: Schedule,
        make_dataset: Optional[MakeDataset] = None,
    ) -> CompilationReport:
        """Chooses how many micro-batches to fuse, and makes the loop; with a data set it is traced as well."""
        if program.precision != self._precision:
            raise ValueError(f"a program in {program.precision} for a session in {self._precision}")
        self._schedule = schedule
        self._take_capacity(model)
        self.places = self._devices[: self._choose_devices(program)]
        with tf.device(self.place), _exceptions():
            weights = self._weights = Weights(model, self._arithmetic)
            names = weights.trainable
            statistics = {name: weights.kept[name] for name in moved_statistics(model)}
            opt = Optimizer(optimizer, [weights.kept[name] for name in names], names, statistics)
            self.state = TrainState(weights.kept, opt.slots, 0)

            def loop_of(program: Program) -> UpdateLoop:
                self.lanes = self._choose_lanes(program)
                return UpdateLoop(
                    model,
                    program,
                    opt,
                    loss,
                    weights,
                    self._arithmetic,
                    self._preprocessing,
                    self._on_cpu,
                    self.places * self.lanes,
                    self._cluster,
                    self._config.reduction == "ordered",
                )

            if program.fused_micro_batches == 0:
                program = program.with_fused(self._choose_fused(model, program, loop_of, make_dataset))
            _check_own_layers(model, program)
            check_sharing(program, self._config, self._cluster.count, len(self.places))
            self.program = program
            self._loop = loop_of(program)
            if self._loop.scaler is not None:
                self.state.slots = {**opt.slots, **self._loop.scaler.slots}
        self._make_forward(model, loss)
        self._large_batches = LargeBatches(
            model, self._arithmetic, self._preprocessing.unpack, self._on_cpu, self._evaluated_at_once
        )
        trace_s, operations = self._trace(make_dataset) if make_dataset is not None else (0.0, 0)
        return self._report(model, trace_s, program.fused_micro_batches, operations)

    @property
    def num_devices(self) -> Tuple[int, int]:
        """How many devices share the training, and how many there are."""
        return len(self.places), len(self._devices)

    def _take_capacity(self, model: KerasModel) -> None:
        """Agrees with the other workers on what each of them can do: the least that one of them can."""
        operations, memory = (operations_at_once(), self.device.memory_bytes) if self._on_cpu else (1, 0)
        everyone = self._cluster.exchange("capacity", [len(self._devices), operations, memory])
        devices, operations, memory = (int(min(values)) for values in zip(*everyone))
        self._capacity = Capacity(devices, operations, memory, activation_bytes_per_sample(model))

    def _choose_devices(self, program: Program) -> int:
        """How many devices take part: as many as were asked for, else the most that share a weight update evenly."""
        fused, workers, devices = program.fused_micro_batches, self._cluster.count, self._capacity.devices
        if self._config.devices is None:
            units = program.num_micro_batches // (fused or program.dbn_replica_group_size)
            devices = choose_devices(units, devices, workers, self._config.max_workers, bool(fused))
        check_sharing(program, self._config, workers, devices)
        return devices

    def _choose_lanes(self, program: Program) -> int:
        """How many of a program's chunks each device computes side by side; several devices compute one each."""
        if len(self.places) > 1:
            return 1
        fused = program.fused_micro_batches
        at_once = self._capacity.trained(fused * program.micro_batch_size)
        return choose_lanes(program.num_micro_batches // fused, at_once, self._cluster.count)

    def _choose_fused(
        self,
        model: KerasModel,
        program: Program,
        loop_of: Callable[[Program], UpdateLoop],
        make_dataset: Optional[MakeDataset],
    ) -> int:
        """How many micro-batches are computed as one; one where layers may mix samples."""
        if own_layers(model):
            return 1
        sharing = max(self._config.max_workers, self._cluster.count * len(self.places))
        sizes = (program.num_micro_batches, program.micro_batch_size, program.dbn_replica_group_size)
        capacity = (self._capacity.bytes_per_sample, self._capacity.memory_bytes)
        fused = choose_fused(*sizes, *capacity, sharing, self._on_cpu)
        if self._config.fused_micro_batches == MEASURE and make_dataset is not None:
            tried = similar_to(fused, *sizes, *capacity, sharing)
            fused = self._measure_fused(program, fused, tried, loop_of, make_dataset)
        return fused

    def _measure_fused(
        self,
        program: Program,
        usual: int,
        tried: Sequence[int],
        loop_of: Callable[[Program], UpdateLoop],
        make_dataset: MakeDataset,
    ) -> int:
        """Of some numbers that with which a weight update is fastest, on worker 0; the state stays as it is.

        Args:
            usual: what is taken where none of them works.
            tried: the numbers.
            loop_of: makes the loop of a program.
        """
        variables = [*self.state.weights.values(), *self.state.slots.values()]
        before = [variable.numpy() for variable in variables]
        seconds: Dict[int, float] = {}
        for fused in tried:
            loop = loop_of(program.with_fused(fused))
            iterator = self.feed(make_dataset(0, fused * program.micro_batch_size))
            for number in range(1 + MEASURED_UPDATES):
                interrupts.check()
                started = self._clock()
                try:
                    loop.run(iterator, tf.constant([0.0]), tf.constant(0, tf.int64))[0].numpy()
                except (tf.errors.ResourceExhaustedError, tf.errors.OutOfRangeError):
                    if self._cluster.count > 1:  # the others wait for what this worker cannot compute
                        raise InfeasibleError(
                            f"worker {self._cluster.rank} cannot compute {counted(fused, 'fused micro-batch')} of "
                            f"{program.micro_batch_size}, which --fused-micro-batches measure tries",
                            f"use --fused-micro-batches {tried[0]}, or leave it out",
                        ) from None
                    break  # too much memory, or too few images
                if number > 0:  # the first one compiles
                    seconds[fused] = min(seconds.get(fused, math.inf), self._clock() - started)
        for variable, value in zip(variables, before):
            variable.assign(value)
        fastest = min(seconds, key=lambda fused: seconds[fused], default=usual)
        return int(self._cluster.first("fastest", fastest))

    @property
    def samples_per_element(self) -> int:
        """Samples of one element of the training data set."""
        assert self.program is not None
        return self.program.fused_micro_batches * self.program.micro_batch_size

    def _trace(self, make_dataset: MakeDataset) -> Tuple[float, int]:
        assert self._loop is not None
        started = time.perf_counter()
        iterator = self.feed(make_dataset(0, self.samples_per_element))
        with tf.device(self.place):
            graph = self._loop.trace(iterator)
        interrupts.check()
        return time.perf_counter() - started, _count_operations(graph)

    def _start(self, make_dataset: MakeDataset) -> Callable[[int], TrainedPart]:
        """Runs slices of about a second; the first weight update is one of its own, as it compiles."""
        iterator = self.feed(make_dataset(self.state.weight_updates, self.samples_per_element))
        update_s: Optional[float] = None

        def run(end: int) -> TrainedPart:
            nonlocal update_s
            count = 1 if update_s is None else max(1, int(SLICE_S / max(update_s, 1e-9)))
            # A slice ends by the clock, and all workers have to end it alike.
            count = self._cluster.first("slice", count)
            count = min(count, end - self.state.weight_updates)
            part = self._run(iterator, count)
            if update_s is None:
                # The first update tells nothing, it compiles; the second runs alone and is timed.
                update_s, self.first_update_s = SLICE_S, part.timed_s
                self._waited_s = self._collective_s
                return replace(part, timed_s=0.0)
            update_s = part.timed_s / count
            return part

        return run

    @property
    def _collective_s(self) -> float:
        return float(self._cluster.collective_s.numpy()) if self._cluster.count > 1 else 0.0

    @property
    def sharing(self) -> Optional[Sharing]:
        """How the workers shared the weight updates that were timed; None for one worker."""
        if self._cluster.count == 1 or self._loop is None:
            return None
        return Sharing(
            self._cluster.count,
            self._config.reduction,
            self._loop.received_bytes,
            self._collective_s - self._waited_s,
        )

    def any_instance(self, flag: bool) -> bool:
        """Whether it is set on any worker: all of them have to ask."""
        return self._cluster.any_signal(flag)

    @property
    def evaluation_shard(self) -> Tuple[int, int]:
        """(workers, which one this is): each evaluates every so-manieth batch.

        Where nothing is trained all of them are given all batches, of which :meth:`logits` takes their share.
        """
        return (1, 0) if self._loop is None else (self._cluster.count, self._cluster.rank)

    def feed(self, dataset: TfDataset) -> Iterator[Batch]:
        """An iterator, which goes on where it stopped."""
        pack = self._preprocessing.pack
        if self._preprocessing.transfer == "uint8":
            packed = tf.autograph.experimental.do_not_convert(lambda images, *rest: (pack(images), *rest))
            dataset = dataset.map(packed)
        return iter(dataset)

    def _run(self, batches: Iterable[Batch], num_weight_updates: int) -> TrainedPart:
        """One call of the compiled loop."""
        assert self._loop is not None and self.program is not None
        first = self.state.weight_updates
        rates = self._schedule(np.arange(first, first + num_weight_updates))
        started = time.perf_counter()
        with tf.device(self.place), _exceptions(
            first, first + num_weight_updates
        ), self._memory_of_training():
            results = self._loop.run(batches, tf.constant(rates, tf.float32), tf.constant(first, tf.int64))
            losses, hits = (values.numpy().tolist() for values in results)
        return TrainedPart(losses, hits, time.perf_counter() - started)

    def _memory_of_training(self) -> ContextManager[None]:
        assert self.program is not None
        fused = self.program.fused_micro_batches
        return _memory_errors(
            f"with {counted(fused, 'fused micro-batch')} of {self.program.micro_batch_size}",
            "use --fused-micro-batches 1"
            if fused > 1
            else "use a smaller --micro-batch-size or --image-size",
        )

    def _has_batch_norm(self) -> bool:
        """Whether the loop found layers with moving statistics."""
        return self._loop is not None and self._loop.has_batch_norm

    def _measure_statistics(self, make_dataset: MakeDataset, num_updates: int) -> None:
        """A forward pass over the batches, in the loop that trains."""
        assert self._loop is not None and self._weights is not None
        iterator = self.feed(make_dataset(self.state.weight_updates, self.samples_per_element))
        with tf.device(self.place), _exceptions(), self._memory_of_training():
            self._weights.round_to_nearest()
            self._loop.collect(iterator, tf.constant(num_updates))
            self._weights.round_to_nearest()

    def measure_statistics(self, batches: TfDataset) -> None:
        """A pass in the numbers that the session computes in."""
        assert self._large_batches is not None
        weights = self.state.weights
        running = {name: weights[name].numpy() for name in self._large_batches.names}
        with tf.device(self.place), _exceptions():
            self._round_weights()  # which rounds the running statistics, too
            self.evaluated = {**self.evaluated, **self._large_batches.measure(self.feed(batches))}
        for name, value in running.items():
            weights[name].assign(value)

    def compile_prediction(self, model: KerasModel, batch_shape: Sequence[int]) -> CompilationReport:
        """Traces the forward pass for batches of that shape."""
        self.prepare_evaluation(model, None)
        forward: Any = self._forward
        started = time.perf_counter()
        images = tf.TensorSpec(batch_shape, self._preprocessing.transfer)
        with tf.device(self.place):
            graph = forward.get_concrete_function(images).graph
        return self._report(model, time.perf_counter() - started, 1, _count_operations(graph))

    def prepare_evaluation(self, model: KerasModel, loss: Optional[LossFunction]) -> None:
        """Makes the functions that are traced in the first call, and rounds the weights."""
        with tf.device(self.place), _exceptions():
            self._weights = Weights(model, self._arithmetic)
        values = (
            {name: v.numpy() for name, v in self._weights.kept.items()} if self._cluster.count > 1 else {}
        )
        self._cluster.require_same("weights", digest_of(values, {}))
        self._make_forward(model, loss)
        self._take_capacity(model)

    def _make_forward(self, model: KerasModel, loss: Optional[LossFunction]) -> None:
        """Makes the functions of evaluation: images to logits, and logits to what they add to the metrics."""
        network = Network(model, on_cpu=self._on_cpu, alone=not self._arithmetic.is_plain)

        def forward(images: Tensor) -> Tensor:
            return network(self._preprocessing.unpack(images), False, Rounding(self._arithmetic))

        self._forward, self._sums_of_logits = tf.function(forward, autograph=False), traced_sums(loss)

    def evaluate(
        self, dataset: Iterable[Batch], stop: Optional[Callable[[], bool]] = None
    ) -> Dict[str, float]:
        """Sums over batches, in their order; every sample of weight 1 counts exactly once, whoever computes it.

        Of a worker's batches each of its devices computes one at a time, or as many as there are cores for.

        Raises:
            InfeasibleError: a batch does not fit into memory.
        """
        if self._forward is None:
            raise RuntimeError("compile() or prepare_evaluation() comes before evaluate()")
        totals = MetricTotals()
        batches = iter(dataset)
        first = next(batches, None)
        size = 0 if first is None else len(first[0])
        memory = _memory_errors(
            f"in a validation, with batches of {counted(size, 'image')}",
            "use a smaller --validation-micro-batch-size",
        )
        with tf.device(self.place), _exceptions(), memory:
            self._round_weights()
            if first is not None:
                batches = itertools.chain([first], batches)
            # A worker without a batch knows no size.
            at_once = min(self._cluster.exchange("batches at once", self._evaluated_at_once(size)))
            together = len(self.places) * at_once
            while True:
                interrupts.check()
                group = list(itertools.islice(batches, together))
                if stop is not None and self.any_instance(bool(group) and stop()):
                    raise Stopped
                everyones = self._cluster.exchange("evaluate", self._sums(group, at_once))
                for one in itertools.chain.from_iterable(itertools.zip_longest(*everyones)):
                    if one is not None:
                        totals.add(one)
                if any(len(theirs) < together for theirs in everyones):
                    return totals.result()

    def _evaluated_at_once(self, samples: int) -> int:
        """How many batches of so many samples each device evaluates side by side."""
        return 1 if len(self.places) > 1 else self._capacity.evaluated(samples)

    def _sums(self, group: Sequence[Batch], at_once: int) -> List[Dict[str, float]]:
        """What some batches, ``at_once`` for each device at most, add to the metrics."""
        forward, sums_of, pack = self._forward, self._sums_of_logits, self._preprocessing.pack
        assert forward is not None

        def of_batch(place: str, batch: Batch) -> Dict[str, Tensor]:
            images, labels, weights = batch
            with tf.device(place):
                return sums_of(forward(pack(images)), labels, weights)

        # A GPU computes on while the next one is told what to do.
        results = list(side_by_side(of_batch, zip(itertools.cycle(self.places), group), at_once))
        return [{name: float(value) for name, value in sums.items()} for sums in results]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Parts with the other workers in order, or tells them of the error that ends this one."""
        try:
            yield
        except BaseException as error:
            self._cluster.close(error)
            raise
        self._cluster.close()

    def logits(self, batches: Iterable[Batch]) -> Iterator[Tuple[Batch, np.ndarray]]:
        """Each batch with its logits; of several workers each computes every so-manieth one, and has those of all."""
        left, rank = iter(batches), self._cluster.rank
        while True:
            group = list(itertools.islice(left, self._cluster.count))
            array = self.predict([group[rank][0]])[0] if rank < len(group) else None
            yield from zip(group, self._cluster.exchange_arrays("logits", array))
            if len(group) < self._cluster.count:
                return

    def predict(self, dataset: Iterable[Tensor]) -> List[np.ndarray]:
        """Logits of each element, computed as it is."""
        if self._forward is None:
            raise RuntimeError("compile() or prepare_evaluation() comes before predict()")
        predict, pack = self._forward, self._preprocessing.pack

        def of_batch(images: Tensor) -> np.ndarray:
            with tf.device(self.place):
                array: np.ndarray = np.asarray(predict(pack(images)))
            return array

        with tf.device(self.place), _exceptions():
            self._round_weights()
            batches = iter(dataset)
            first = next(batches, None)
            if first is None:
                return []
            given = ((images,) for images in itertools.chain([first], batches))
            return list(side_by_side(of_batch, given, self._evaluated_at_once(len(first))))

    def _round_weights(self) -> None:
        """Rounds the weights for whatever is no training; those of a checkpoint may have come in between."""
        assert self._weights is not None
        self._weights.round_to_nearest()


def _check_own_layers(model: KerasModel, program: Program) -> None:
    """Refuses to compute micro-batches together whose samples a layer of the user's own may mix.

    Raises:
        ConfigurationError: naming the layer.
    """
    layers = own_layers(model)
    together = max(program.fused_micro_batches, program.dbn_replica_group_size)
    if layers and together > 1:
        option = "--fused-micro-batches" if program.fused_micro_batches > 1 else "--dbn-replica-group-size"
        raise ConfigurationError(
            f"{option} {together}: layer '{layers[0]}' of the network is of a class of its own and may mix samples, so "
            "that micro-batches are computed one by one",
            f"drop {option}",
        )


@contextlib.contextmanager
def _exceptions(first: Optional[int] = None, last: Optional[int] = None) -> Iterator[None]:
    """Says where --fp-exceptions found one.

    Args:
        first, last: weight updates done before and after what runs; None: it is no training.
    """
    try:
        yield
    except tf.errors.UnimplementedError as error:
        # What TensorFlow's kernels say that would draw lots otherwise ("A deterministic GPU implementation of ...").
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
        when = "" if last is None else f", in weight updates {(first or 0) + 1} to {last}"
        raise NotFiniteError(
            f"--fp-exceptions: {EXCEPTION}{match.group(1)}{when}: its result is too large, or no number",
            "lower --loss-scaling or the learning rate, or drop --fp-exceptions; checkpoints written before are kept",
        ) from None


@contextlib.contextmanager
def _memory_errors(what: str, hint: str) -> Iterator[None]:
    """Says what does not fit into memory, and which option is at fault."""
    try:
        yield
    except (MemoryError, tf.errors.ResourceExhaustedError):
        raise InfeasibleError(f"out of memory {what}", hint) from None


def _count_operations(graph: TfGraph) -> int:
    """Operations of a function graph and of the functions it calls."""
    definition = graph.as_graph_def()
    return len(definition.node) + sum(len(f.node_def) for f in definition.library.function)
