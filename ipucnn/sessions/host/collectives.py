"""Gathers or adds gradients of several processes inside a compiled function, by calling MPI from TensorFlow."""

import contextlib
import time
from typing import Callable, Iterator, List, Optional

import numpy as np
import tensorflow as tf

from ipucnn.aliases import Tensor
from ipucnn.sessions.group import Mpi


class Collectives:
    """The collective operations of a group of processes, as operations of TensorFlow.

    TensorFlow runs them in the order of its loop, because a Python function counts as stateful.

    Attributes:
        seconds: the seconds spent in them so far, including the wait for other processes.
        received_bytes: the bytes that a process receives from each of them, in the order of tracing.
    """

    def __init__(self, group: Mpi) -> None:
        self._group = group
        self.seconds = 0.0
        self.received_bytes: List[int] = []
        # The exception that ended one of them; TensorFlow passes on only its text.
        self._failure: Optional[BaseException] = None

    @contextlib.contextmanager
    def exceptions(self) -> Iterator[None]:
        """Raises the exception of a collective operation in place of TensorFlow's."""
        try:
            yield
        except Exception:
            if self._failure is None:
                raise
            raise self._failure from None

    def gather(self, values: Tensor) -> Tensor:
        """Returns the values of each process, by rank.

        Args:
            values: float32 (n,), of the same length in all processes.

        Returns:
            float32 (processes, n).
        """
        size, length = self._group.size, int(values.shape[0])
        return self._call(self._group.gather_array, values, size * length, [size, length])

    def add(self, values: Tensor) -> Tensor:
        """Returns the sum over processes, in the order that MPI chooses.

        Args:
            values: float32 (n,), of the same length in all processes.
        """
        length = int(values.shape[0])
        # In a large sum, each process receives the others' parts of its share, and then the sums of their shares.
        return self._call(self._group.sum_array, values, 2 * length, [length])

    def _call(
        self, collect: Callable[[np.ndarray], np.ndarray], values: Tensor, received: int, shape: List[int]
    ) -> Tensor:
        """Calls MPI on the host, and times it.

        Args:
            collect: the collective operation.
            values: its argument.
            received: the number of float32 values that a process receives.
            shape: the shape of the result.
        """
        self.received_bytes.append(4 * received)

        def timed(values: np.ndarray) -> np.ndarray:
            begun = time.perf_counter()
            try:
                return collect(values)
            except BaseException as error:
                self._failure = error
                raise
            finally:
                self.seconds += time.perf_counter() - begun

        with tf.device("/CPU:0"):
            return tf.ensure_shape(tf.numpy_function(timed, [values], tf.float32), shape)
