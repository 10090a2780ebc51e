"""Reads the data of ``fit`` and ``predict`` as keras/ipu/extensions/data_adapter.py does."""

from typing import Any, Iterator

import numpy as np
import tensorflow as tf
from tensorflow import keras

from .machine import ProcessAborted

ARRAYS = (np.ndarray, tf.Tensor, tuple, list, dict)


class Data:
    """A data set and its steps.

    Args:
        steps: steps over the replicas of this instance, or None.

    Raises:
        ValueError: Keras or its IPU version refuse the data.
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        batch_size: Any = None,
        steps: Any = None,
    ) -> None:
        self._steps = steps
        self._is_dataset = isinstance(x, tf.data.Dataset)
        for name, value in (("y", y), ("sample_weight", sample_weight)):
            if value is not None:
                raise ValueError(f"`{name}` argument is not supported when using dataset as input.")
        self.dataset = x if self._is_dataset else self._from_array(x, batch_size)

    def _from_array(self, x: Any, batch_size: Any) -> Any:
        if isinstance(x, keras.utils.Sequence) or not isinstance(x, ARRAYS):
            raise ValueError(f"{type(x).__name__} is no input that IPUs take")
        length = len(tf.nest.flatten(x)[0])
        size = 32 if batch_size is None else batch_size
        if length % size:
            raise ValueError(f"{length} samples are not a multiple of the batch size {size}")
        self._length = length // size
        return tf.data.Dataset.from_tensor_slices(x).batch(size, drop_remainder=True)

    def steps_per_replica(self, replicas: int, steps_per_execution: int) -> int:
        """Returns the steps that each replica runs."""
        steps, cardinality = self._steps, int(self.dataset.cardinality())
        if steps is None:
            steps = cardinality if self._is_dataset else self._length
        if steps < 0:
            raise ValueError("the number of steps is unknown: give steps_per_epoch or steps")
        each = int(steps // replicas)
        if 0 <= cardinality < each:
            raise ValueError(f"the data set has {cardinality} elements, too few for {each}")
        if each < 1:
            raise ValueError("there is not a step for each replica")
        if each % min(steps_per_execution, each):
            raise ValueError(f"{each} steps per replica are not a multiple of steps_per_execution")
        return each

    def elements(self, machine: Any) -> Iterator[Any]:
        """Yields elements as IPUs get them: an end or an error ends the process, synthetic data is zeros.

        No infeed runs if nothing is executed.
        """
        if machine.is_synthetic("infeed") or machine.is_precompiling:
            while True:
                yield tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), self.dataset.element_spec)
        iterator = iter(self.dataset)
        while True:
            try:
                element = next(iterator, None)
            except Exception as error:
                raise ProcessAborted(f"An infeed dataset iterator has failed with status: {error}") from error
            if element is None:
                break
            yield tf.nest.map_structure(
                lambda t: tf.cast(t, tf.float32) if t.dtype == tf.float64 else t, element
            )
        raise ProcessAborted("Infeed dataset iterator out of range. Are you trying to dequeue more elements?")


def unpack(element: Any) -> Any:
    """Returns (x, y, weights) of an element, as Keras takes them."""
    parts = element if isinstance(element, tuple) else (element,)
    return (*parts, None, None)[:3]
