"""Logits from IPUs: a model without training, for batches of any number of samples."""

from typing import Any, Callable, Mapping, Optional

import numpy as np
import tensorflow as tf

from ipucnn.sessions.poplar.model import DeviceModel, copy_weights


class Predictor:
    """Runs one network on batches: each is one execution, filled up to whole micro-batches of all replicas.

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
        self._device, self._size, self._replicas = device, micro_batch_size, num_replicas
        self._depth = _depth(program)
        self._steps = 0
        with device.scope():
            self._made = build(micro_batch_size)
            if prepare is not None:
                prepare(self._made.model)

    def take_weights(self, weights: Mapping[str, Any]) -> None:
        """Copies weights from another model."""
        copy_weights(weights, self._made.weights)

    def logits(self, images: Any) -> Any:
        """float32 [n, ...] of images [n, height, width, channels]."""
        images = np.asarray(images)
        steps = -(-len(images) // (self._size * self._replicas))
        steps = -(-steps // self._depth) * self._depth
        model = self._made.model
        dtype = tf.as_dtype(model.inputs[0].dtype).as_numpy_dtype
        if dtype == np.uint8:
            images = np.rint(images)
        filled = np.zeros((steps * self._size * self._replicas, *images.shape[1:]), dtype)
        filled[: len(images)] = images
        if steps != self._steps:
            with self._device.scope():
                model.compile(steps_per_execution=steps)
            self._steps = steps
        with self._device.running(training=False):
            found = model.predict(filled, batch_size=self._size, verbose=0)
        return np.asarray(found, np.float32)[: len(images)]


def _depth(program: Any) -> int:
    """What the micro-batches of an execution must be a multiple of: a pipeline is filled once per stage."""
    if program is None or program.pipeline_schedule == "Sequential":
        return 1
    return int(program.num_stages)
