"""Forward passes without training on IPUs: logits of batches of any number of samples, and batch norm's statistics."""

from typing import Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from ipucnn.aliases import KerasModel, Tensor, TfDataset, TfVariable
from ipucnn.config.options import RunConfig
from ipucnn.models.names import MOVING_STATISTICS
from ipucnn.sessions.poplar.device import Device
from ipucnn.sessions.poplar.model import DeviceModel, copy_weights
from ipucnn.sessions.poplar.training import training_batches, transfer_type
from ipucnn.sessions.session import Batch
from ipucnn.training.program import Program

# What one execution should have at least: starting one takes as long as some hundreds of small images.
_SAMPLES = 1024
# Images and logits of one execution, of which the host holds a few copies.
_LARGEST_BYTES = 2**28
# A larger execution is compiled, which takes minutes, only where the present one is called more often than this.
_WORTH_COMPILING = 8


class Predictor:
    """Runs one network on batches.

    Several batches together are one execution, filled up to whole micro-batches of all replicas.  The last one is
    filled up with zeros: a shorter one would have to be compiled.  Instances of ``poprun`` share the samples, whether
    they are given the same batches or a part of each: all get the logits of all.

    Args:
        device: where.
        build: makes the model for a micro-batch size; called inside the scope.
        micro_batch_size: samples.
        num_replicas: of this process.
        gives_zeros: IPUs make up what they compute on, or nothing is executed: whatever comes back is zeros.
        prepare: gives the model its pipelining options, or None without a pipeline.
        program: of the pipeline, or None.
        shares: the samples are all instances'; else each has its own.
    """

    def __init__(
        self,
        device: Device,
        build: Callable[[int], DeviceModel],
        micro_batch_size: int,
        num_replicas: int,
        gives_zeros: bool = False,
        prepare: Optional[Callable[[KerasModel], None]] = None,
        program: Optional[Program] = None,
        shares: bool = True,
    ) -> None:
        self._device, self._size = device, micro_batch_size
        self._per_step = micro_batch_size * num_replicas
        self._parts, self._part = (device.instances.count, device.instances.index) if shares else (1, 0)
        self._gives_zeros = gives_zeros
        self._depth = _depth(program)
        self._steps = 0
        with device.scope():
            self._made = build(micro_batch_size)
            if prepare is not None:
                prepare(self._made.model)
        self._largest = self._largest_steps()

    def take_weights(self, weights: Mapping[str, TfVariable]) -> None:
        """Copies weights from another model."""
        copy_weights(weights, self._made.weights)

    def logits(self, batches: Iterable[Batch]) -> Iterator[Tuple[Batch, np.ndarray]]:
        """Each batch with its float32 logits [n, ...], in order; some batches are taken ahead.

        Args:
            batches: tuples that begin with images [n, height, width, channels], the same in all instances.
        """
        for held, logits in self._executions(batches, self._parts, self._part):
            yield from zip(held, logits)

    def logits_of_parts(self, batches: Iterable[Batch]) -> Iterator[Tuple[Batch, np.ndarray]]:
        """Each batch with its logits, where an instance is given no more than its part of each.

        What instances have is put together once for each execution, as far as memory for that of all goes, and not for
        each batch: a batch may be one tile of thousands, and a collective of hosts takes longer than that.

        Args:
            batches: (images, labels, weights), of the same shapes in all instances.

        Yields:
            The instance's own images, labels and weights of all instances, in their order; and logits of all.
        """
        for held, computed in self._executions(batches, 1, 0):
            if self._parts == 1:
                yield from zip(held, computed)
                continue
            of_instance = [(np.asarray(b[1]), np.asarray(b[2]), logits) for b, logits in zip(held, computed)]
            numbers = sum(part.size for part in of_instance[0])
            each = max(1, _LARGEST_BYTES // (4 * numbers * self._parts))
            for start in range(0, len(held), each):
                joined = [self._join_batches(parts) for parts in zip(*of_instance[start : start + each])]
                for batch, labels, weights, logits in zip(held[start:], *joined):
                    yield (batch[0], tf.constant(labels), tf.constant(weights)), logits

    @property
    def samples_per_execution(self) -> int:
        """Samples that an instance computes between two places where all instances meet."""
        return self._largest * self._per_step

    def _join(self, array: np.ndarray) -> np.ndarray:
        """What each instance has, one after the other; whole numbers are below 2**24, and pass through 32 bits."""
        return self._device.gather_over_instances(array).reshape((-1, *array.shape[1:])).astype(array.dtype)

    def _join_batches(self, arrays: Sequence[np.ndarray]) -> List[np.ndarray]:
        """Each batch of all instances, one instance's after the other's."""
        gathered = self._device.gather_over_instances(np.concatenate(arrays)).astype(arrays[0].dtype)
        parts = np.split(gathered, _ends(arrays), axis=1)
        return [part.reshape((-1, *part.shape[2:])) for part in parts]

    def _executions(
        self, batches: Iterable[Batch], parts: int, part: int
    ) -> Iterator[Tuple[List[Batch], List[np.ndarray]]]:
        """The batches of one execution and their logits; of all samples, this instance computes one of ``parts``."""
        held: List[Batch] = []
        waiting = 0
        for batch in batches:
            # A batch that would need another execution, nearly all of it zeros, is the first of the next.
            if held and waiting + len(batch[0]) > self.samples_per_execution * parts:
                yield held, self._run([b[0] for b in held], parts, part)
                held, waiting = [], 0
            held.append(batch)
            waiting += len(batch[0])
        if held:
            yield held, self._run([b[0] for b in held], parts, part)

    def _run(self, batches: List[Tensor], parts: int, part: int) -> List[np.ndarray]:
        """The logits of some batches of images."""
        images = np.concatenate([np.asarray(batch) for batch in batches])
        dtype = tf.as_dtype(self._made.model.inputs[0].dtype).as_numpy_dtype
        if dtype == np.uint8:
            images = np.rint(images)
        self._choose_steps(-(-len(images) // parts))
        capacity = self._steps * self._per_step
        results = []
        for start in range(0, len(images), capacity * parts):
            # Where fewer are left than all instances take, some compute zeros alone: they all run the same program.
            images_of_part = images[start + part * capacity :][:capacity]
            filled = np.zeros((capacity, *images.shape[1:]), dtype)
            filled[: len(images_of_part)] = images_of_part
            with self._device.running(training=False):
                logits = self._made.model.predict(filled, batch_size=self._size, verbose=0)
            logits = np.asarray(logits, np.float32)
            if self._gives_zeros:
                # The SDK makes zeros itself: of made-up data those of one replica (_get_all_batch_results in
                # keras/ipu/extensions/extensions_base.py of graphcore/keras r2.6/sdk-release-3.4), without a device
                # those of one micro-batch of each (PoplarExecutor::GetTensorsFromOutfeed of graphcore/tensorflow).
                logits = np.zeros((capacity, *logits.shape[1:]), np.float32)
            if len(logits) != capacity:
                raise RuntimeError(
                    f"{capacity} images were sent to the IPUs, and {len(logits)} results came back"
                )
            if parts > 1:
                logits = self._join(logits)
            results.append(logits[: len(images) - start])
        return np.split(np.concatenate(results), _ends(batches))

    def _choose_steps(self, count: int) -> None:
        """Compiles for executions of the right size for ``count`` samples, if the present ones are far too small."""
        needed = -(-count // self._per_step)
        needed = min(-(-needed // self._depth) * self._depth, self._largest)
        if self._steps and needed < _WORTH_COMPILING * self._steps:
            return
        with self._device.scope():
            self._made.model.compile(steps_per_execution=needed)
        self._steps = needed

    def _largest_steps(self) -> int:
        """Micro-batches of each replica in a full execution."""
        model = self._made.model
        shapes = [model.inputs[0].shape[1:], model.outputs[0].shape[1:]]
        sample_bytes = sum(4 * int(np.prod([int(n) for n in shape])) for shape in shapes)
        samples = max(1, min(_SAMPLES, _LARGEST_BYTES // sample_bytes))
        steps = max(1, samples // self._per_step)
        return -(-steps // self._depth) * self._depth


def _ends(batches: Sequence[Tensor]) -> np.ndarray:
    """Where each batch but the last ends, of all that stand one after the other."""
    ends: np.ndarray = np.cumsum([len(batch) for batch in batches])[:-1]
    return ends


def _depth(program: Optional[Program]) -> int:
    """What the micro-batches of an execution must be a multiple of: a pipeline is filled once per stage."""
    if program is None or program.pipeline_schedule == "Sequential":
        return 1
    return int(program.num_stages)


class StatisticsNetwork:
    """Batch norm's statistics over training batches, by a forward pass that returns those of each micro-batch.

    It is the network of a training run, with statistics as outputs.

    Args:
        device: where.
        config: the options that only IPUs act on.
        program: whose batches are taken.
        build: makes the model, options that the SDK wants included; called inside the scope.
        num_updates: weight updates whose batches are taken.
    """

    def __init__(
        self,
        device: Device,
        config: RunConfig,
        program: Program,
        build: Callable[[], DeviceModel],
        num_updates: int,
    ) -> None:
        self._device, self._config, self._program = device, config, program
        self._steps = num_updates * program.gradient_accumulation_count
        with device.scope():
            self._made = build()
            self._made.model.compile(steps_per_execution=self._steps)

    def measure(self, weights: Mapping[str, TfVariable], dataset: TfDataset) -> Dict[str, np.ndarray]:
        """float32 [channels] of each ``<layer>/moving_mean`` and ``/moving_variance``: means over all micro-batches.

        Args:
            weights: to be used.
            dataset: training batches of this instance.
        """
        p, network, instances = self._program, self._made, self._device.instances
        copy_weights(weights, network.weights)
        transfer = transfer_type(self._config, self._device.preprocess)
        batches = training_batches(dataset, p, 0, network.takes_seeds, transfer, instances)
        inputs = batches.map(lambda images, *rest: (images,))
        with self._device.running(training=False):
            outputs = network.model.predict(
                inputs, steps=self._steps * (p.num_replicas // instances.count), verbose=0
            )
        means = [np.asarray(values, np.float64).mean(axis=0) for values in outputs[: 2 * len(network.norms)]]
        sizes: np.ndarray = np.cumsum([len(values) for values in means])[:-1]
        reduced = self._device.mean_over_instances(np.concatenate(means))
        names = [f"{norm}/{moving}" for norm in network.norms for moving in MOVING_STATISTICS]
        return {name: part.astype(np.float32) for name, part in zip(names, np.split(reduced, sizes))}
