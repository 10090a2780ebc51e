"""Logits from IPUs: a model without training, for batches of any number of samples."""

from typing import Any, Callable, Iterable, Iterator, List, Mapping, Optional, Tuple

import numpy as np
import tensorflow as tf

from ipucnn.sessions.poplar.model import DeviceModel, copy_weights

# What one execution should have at least: starting one takes as long as some hundreds of small images.
_SAMPLES = 1024
# Images and logits of one execution, of which the host holds a few copies.
_LARGEST_BYTES = 2**28
# A larger execution is compiled, which takes minutes, only where the present one is called more often than this.
_WORTH_COMPILING = 8


class Predictor:
    """Runs one network on batches.

    Several batches together are one execution, filled up to whole micro-batches of all replicas.  The last one is
    filled up with zeros: a shorter one would have to be compiled.

    Args:
        device: where.
        build: makes the model for a micro-batch size; called inside the scope.
        micro_batch_size: samples.
        num_replicas: of this process.
        prepare: gives the model its pipelining options, or None without a pipeline.
        program: of the pipeline, or None.
    """

    def __init__(
        self,
        device: Any,
        build: Callable[[int], DeviceModel],
        micro_batch_size: int,
        num_replicas: int,
        prepare: Optional[Callable[[Any], None]] = None,
        program: Any = None,
    ) -> None:
        self._device, self._size = device, micro_batch_size
        self._per_step = micro_batch_size * num_replicas
        self._depth = _depth(program)
        self._steps = 0
        with device.scope():
            self._made = build(micro_batch_size)
            if prepare is not None:
                prepare(self._made.model)
        self._largest = self._largest_steps()

    def take_weights(self, weights: Mapping[str, Any]) -> None:
        """Copies weights from another model."""
        copy_weights(weights, self._made.weights)

    def logits(self, batches: Iterable[Tuple[Any, ...]]) -> Iterator[Tuple[Tuple[Any, ...], Any]]:
        """Each batch with its float32 logits [n, ...], in order; some batches are taken ahead.

        Args:
            batches: tuples that begin with images [n, height, width, channels].
        """
        held: List[Tuple[Any, ...]] = []
        waiting = 0
        for batch in batches:
            held.append(batch)
            waiting += len(batch[0])
            if waiting >= self._largest * self._per_step:
                yield from zip(held, self._run([b[0] for b in held]))
                held, waiting = [], 0
        if held:
            yield from zip(held, self._run([b[0] for b in held]))

    def _run(self, parts: List[Any]) -> List[Any]:
        """The logits of some batches of images."""
        images = np.concatenate([np.asarray(part) for part in parts])
        dtype = tf.as_dtype(self._made.model.inputs[0].dtype).as_numpy_dtype
        if dtype == np.uint8:
            images = np.rint(images)
        self._choose_steps(len(images))
        capacity = self._steps * self._per_step
        found = []
        for start in range(0, len(images), capacity):
            part = images[start : start + capacity]
            filled = np.zeros((capacity, *images.shape[1:]), dtype)
            filled[: len(part)] = part
            with self._device.running(training=False):
                logits = self._made.model.predict(filled, batch_size=self._size, verbose=0)
            found.append(np.asarray(logits, np.float32)[: len(part)])
        ends: Any = np.cumsum([len(part) for part in parts])[:-1]
        return np.split(np.concatenate(found), ends)

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


def _depth(program: Any) -> int:
    """What the micro-batches of an execution must be a multiple of: a pipeline is filled once per stage."""
    if program is None or program.pipeline_schedule == "Sequential":
        return 1
    return int(program.num_stages)
