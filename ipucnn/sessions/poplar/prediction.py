"""Forward passes on IPUs: logits of batches of any size, and batch norm's statistics."""

import time
from functools import cached_property
from typing import Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from ipucnn.aliases import KerasModel, Tensor, TfDataset, TfVariable
from ipucnn.models.names import statistics_of
from ipucnn.sessions.host.statistics import peeked
from ipucnn.sessions.poplar.batches import training_batches
from ipucnn.sessions.poplar.device import Ipus
from ipucnn.sessions.poplar.model import PREDICTION, STATISTICS, DeviceModel, assign_weights, build_network
from ipucnn.sessions.session import (
    Batch,
    CompilationReport,
    Predictor,
    Stopped,
    compilation_report,
    sums_of_batch,
)
from ipucnn.training.evaluation import Totals
from ipucnn.training.losses import Loss
from ipucnn.training.program import BuiltProgram

# Minimum size of an execution: starting one takes as long as some hundreds of small images.
_SAMPLES = 1024
# Maximum size of images and logits of one execution; the host holds a few copies of them.
_LARGEST_BYTES = 2**28
# A larger execution is compiled, which takes minutes, if the present one would run more often than this.
_WORTH_COMPILING = 8


class PoplarPredictor(Predictor):
    """Runs one network on batches.

    An execution computes several batches together, padded to whole micro-batches of all replicas.  The last one is
    padded with zeros, because a shorter one would have to be compiled.  Instances of ``poprun`` share the samples,
    whether they receive the same batches or a part of each, and every instance gets all logits.  Poplar compiles the
    network in the first call that computes.

    Args:
        ipus: the IPUs, which are configured.
        model: the network; for a pipeline, with the stages of ``pipeline``.
        micro_batch_size: the samples of a micro-batch.
        num_replicas: the replicas of this process.
        pipeline: the Program whose stages the model has; None without a pipeline.
        shares: whether instances share the samples; else each has its own.
        trained: the weights in training, which are copied before each use; None: the network's own.
    """

    def __init__(
        self,
        ipus: Ipus,
        model: KerasModel,
        micro_batch_size: int,
        num_replicas: int,
        pipeline: Optional[BuiltProgram] = None,
        shares: bool = True,
        trained: Optional[Mapping[str, TfVariable]] = None,
    ) -> None:
        self.device, self._ipus, self._model = ipus.info, ipus, model
        self._size, self._num_replicas, self._trained = micro_batch_size, num_replicas, trained
        self._per_step = micro_batch_size * num_replicas
        self.part = ipus.instances.size, ipus.instances.rank
        self._parts, self._part = self.part if shares else (1, 0)
        self._pipeline = pipeline
        # An execution is a multiple of so many micro-batches.
        self._depth = 1
        if pipeline is not None and pipeline.pipeline_schedule != "Sequential":
            self._depth = pipeline.num_stages
        self._steps = 0

    @cached_property
    def network(self) -> DeviceModel:
        """The network as it is built for IPUs, on first use."""
        name = "prediction" if self._trained is None else "validation"
        return build_network(self._ipus, self._model, PREDICTION, self._size, name, self._pipeline)

    @cached_property
    def _largest(self) -> int:
        """The micro-batches of each replica in a full execution."""
        model = self.network.model
        shapes = [model.inputs[0].shape[1:], model.outputs[0].shape[1:]]
        sample_bytes = sum(4 * int(np.prod([int(n) for n in shape])) for shape in shapes)
        samples = max(1, min(_SAMPLES, _LARGEST_BYTES // sample_bytes))
        steps = max(1, samples // self._per_step)
        return -(-steps // self._depth) * self._depth

    def compile(self, batch_shape: Sequence[int]) -> CompilationReport:
        """Builds the network for IPUs."""
        started = time.perf_counter()
        self.network  # noqa: B018 - built on first use
        return compilation_report(self.device, self._model, time.perf_counter() - started)

    def evaluate(
        self, dataset: Iterable[Batch], loss: Loss, stop: Optional[Callable[[], bool]] = None
    ) -> Dict[str, float]:
        """Computes logits on IPUs and adds up metrics on the host: every sample of weight 1 counts exactly once.

        Each instance has the totals of all instances.
        """
        # One process can stop between any two batches; instances agree once per execution.
        between = self.samples_per_execution if self._ipus.instances.size > 1 else 0

        def unless_stopped() -> Iterator[Batch]:
            given = due = 0
            for batch in dataset:
                if stop is not None and given >= due:
                    if self._ipus.exchange.any_instance(stop()):
                        raise Stopped
                    due = given + between
                given += len(batch[0])
                yield batch

        totals = Totals()
        for (_, labels, weights), logits in self._logits_of_parts(unless_stopped()):
            totals.add(sums_of_batch(loss, logits, labels, weights))
        return totals.result()

    def logits(self, batches: Iterable[Batch]) -> Iterator[Tuple[Batch, np.ndarray]]:
        """Computes several batches per execution.  Instances share the work if batches have images alone."""
        first, given = peeked(batches)
        if first is not None:
            yield from self._logits_of_whole(given) if len(first) == 1 else self._logits_of_parts(given)

    def predict(self, dataset: Iterable[Tensor]) -> List[np.ndarray]:
        """Returns the logits of each element, computing several at once.  All instances receive the same elements."""
        return [logits for _, logits in self._logits_of_whole((images,) for images in dataset)]

    def _logits_of_whole(self, batches: Iterable[Batch]) -> Iterator[Tuple[Batch, np.ndarray]]:
        """Yields each batch with its float32 logits (n, ...), in order; some batches are taken ahead.

        Args:
            batches: tuples that begin with images (n, height, width, channels), the same in all instances.
        """
        for held, logits in self._executions(batches, self._parts, self._part):
            yield from zip(held, logits)

    def _logits_of_parts(self, batches: Iterable[Batch]) -> Iterator[Tuple[Batch, np.ndarray]]:
        """Yields each batch with its logits, if every instance receives its part of each batch only.

        Instances exchange results once per execution, or more often if memory is short, but not once per batch: a batch
        may be one patch of thousands, and an exchange between hosts takes longer than computing it.

        Args:
            batches: (images, labels, weights), of the same shapes in all instances.

        Yields:
            The images of this instance; labels, weights and logits of all instances, in their order.
        """
        for held, computed in self._executions(batches, 1, 0):
            if self._parts == 1:
                yield from zip(held, computed)
                continue
            of_instance = [(np.asarray(b[1]), np.asarray(b[2]), logits) for b, logits in zip(held, computed)]
            numbers = sum(part.size for part in of_instance[0])
            each = max(1, _LARGEST_BYTES // (4 * numbers * self._parts))
            for start in range(0, len(held), each):
                joined = [self._joined(parts) for parts in zip(*of_instance[start : start + each])]
                for batch, labels, weights, logits in zip(held[start:], *joined):
                    yield (batch[0], tf.constant(labels), tf.constant(weights)), logits

    @property
    def samples_per_execution(self) -> int:
        """Returns the samples that an instance computes between two exchanges."""
        return self._largest * self._per_step

    def _joined(self, arrays: Sequence[np.ndarray]) -> List[np.ndarray]:
        """Returns each array with the parts of all instances, in their order.

        They are float32, or whole numbers below 2**24, which float32 holds exactly.
        """
        gathered = self._ipus.exchange.gather_over_instances(np.concatenate(arrays)).astype(arrays[0].dtype)
        parts = np.split(gathered, _ends(arrays), axis=1)
        return [part.reshape((-1, *part.shape[2:])) for part in parts]

    def _executions(
        self, batches: Iterable[Batch], parts: int, part: int
    ) -> Iterator[Tuple[List[Batch], List[np.ndarray]]]:
        """Yields the batches of each execution and their logits; this instance computes one of ``parts`` shares."""
        if self._trained is not None:
            assign_weights(self._trained, self.network.weights)
        held: List[Batch] = []
        waiting = 0
        for batch in batches:
            # A batch that does not fit waits for the next execution: another one now would be nearly all padding.
            if held and waiting + len(batch[0]) > self.samples_per_execution * parts:
                yield held, self._run([b[0] for b in held], parts, part)
                held, waiting = [], 0
            held.append(batch)
            waiting += len(batch[0])
        if held:
            yield held, self._run([b[0] for b in held], parts, part)

    def _run(self, batches: List[Tensor], parts: int, part: int) -> List[np.ndarray]:
        """Returns the logits of batches of images, from one execution or several."""
        with tf.device("/CPU:0"):
            images = np.concatenate([self._ipus.preprocess.pack(batch) for batch in batches])
        self._choose_steps(-(-len(images) // parts))
        capacity = self._steps * self._per_step
        results = []
        for start in range(0, len(images), capacity * parts):
            # All instances run the same program, so if too few samples are left, some compute padding only.
            images_of_part = images[start + part * capacity :][:capacity]
            filled = np.zeros((capacity, *images.shape[1:]), images.dtype)
            filled[: len(images_of_part)] = images_of_part
            with self._ipus.running(training=False):
                logits = self.network.model.predict(filled, batch_size=self._size, verbose=0)
            logits = np.asarray(logits, np.float32)
            if self._ipus.gives_zeros:
                # The SDK returns zeros: for generated data those of one replica (_get_all_batch_results in
                # keras/ipu/extensions/extensions_base.py of graphcore/keras r2.6/sdk-release-3.4), without a device
                # those of one micro-batch of each (PoplarExecutor::GetTensorsFromOutfeed of graphcore/tensorflow).
                logits = np.zeros((capacity, *logits.shape[1:]), np.float32)
            if len(logits) != capacity:
                raise RuntimeError(
                    f"{capacity} images were sent to the IPUs, and {len(logits)} results came back"
                )
            if parts > 1:
                (logits,) = self._joined([logits])
            results.append(logits[: len(images) - start])
        return np.split(np.concatenate(results), _ends(batches))

    def _choose_steps(self, count: int) -> None:
        """Compiles for executions of the right size for ``count`` samples, if the present ones are far too small."""
        needed = -(-count // self._per_step)
        needed = min(-(-needed // self._depth) * self._depth, self._largest)
        if self._steps and needed < _WORTH_COMPILING * self._steps:
            return
        with self._ipus.scope():
            self.network.model.compile(steps_per_execution=needed)
        self._steps = needed


def _ends(batches: Sequence[Tensor]) -> np.ndarray:
    """Returns the indices at which to split concatenated batches."""
    ends: np.ndarray = np.cumsum([len(batch) for batch in batches])[:-1]
    return ends


class StatisticsNetwork:
    """Measures batch norm's statistics over training batches: the trained network with statistics as outputs.

    Args:
        ipus: the IPUs.
        program: the Program whose batches are used.
        model: the network.
    """

    def __init__(self, ipus: Ipus, program: BuiltProgram, model: KerasModel) -> None:
        self._ipus, self._program, self._steps = ipus, program, 0
        self._network = build_network(
            ipus, model, STATISTICS, program.micro_batch_size, "statistics", program
        )

    def measure(
        self, weights: Mapping[str, TfVariable], dataset: TfDataset, num_updates: int
    ) -> Dict[str, np.ndarray]:
        """Returns float32 (channels,) for each ``<layer>/moving_mean`` and ``/moving_variance``, averaged over all
        micro-batches.

        Args:
            weights: the weights to measure with.
            dataset: the training batches of this instance.
            num_updates: the number of weight updates whose batches are used.
        """
        steps = num_updates * self._program.gradient_accumulation_count
        if steps != self._steps:
            with self._ipus.scope():
                self._network.model.compile(steps_per_execution=steps)
            self._steps = steps
        p, network, instances = self._program, self._network, self._ipus.instances
        assign_weights(weights, network.weights)
        batches = training_batches(dataset, p, 0, network.takes_seeds, self._ipus.preprocess, instances)
        inputs = batches.map(lambda images, *rest: (images,))
        with self._ipus.running(training=False):
            outputs = network.model.predict(
                inputs, steps=steps * (p.num_replicas // instances.size), verbose=0
            )
        means = [np.asarray(values, np.float64).mean(axis=0) for values in outputs[: 2 * len(network.norms)]]
        sizes: np.ndarray = np.cumsum([len(values) for values in means])[:-1]
        reduced = self._ipus.exchange.mean_over_instances(np.concatenate(means))
        parts = zip(statistics_of(network.norms), np.split(reduced, sizes))
        return {name: part.astype(np.float32) for name, part in parts}
