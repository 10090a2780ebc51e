"""A fixed piece of work that executions are measured by: how fast is the machine right now?

Two programs that share a CPU with others do not slow down alike: a large matrix product loses little where many
small operations lose much.  So the yardstick is of the kind that networks are: convolutions of few channels,
activations, pooling, a dense layer, forward and backward, several operations at a time.  It belongs to the
benchmark, not to what is benchmarked: no change to networks or sessions changes it.
"""

import time
from typing import Any, Optional, Tuple

from ipucnn.benchmarking.measure import Reference

METHOD = (
    "a yardstick right before and after each execution: two forward passes and one with gradients of four 3x3 "
    "convolutions of 16 channels on 8 images of 32x32, pooling and a dense layer, repeated"
)
_SHARE = 0.5
_LEAST_S, _MOST_S = 0.02, 1.0
_FORWARD_PASSES = 2
_IMAGES = 8


class Yardstick(Reference):
    """The work, on the session's device; calling it returns the seconds of one repetition.

    Args:
        place: TensorFlow's name of the device.
        repetitions: at a time; None: as suits the executions.
    """

    def __init__(self, place: str = "/CPU:0", repetitions: Optional[int] = None) -> None:
        import tensorflow as tf

        self._place = place
        with tf.device(place):
            self._images = tf.random.stateless_uniform([_IMAGES, 32, 32, 16], [1, 2])
            kernels = [tf.random.stateless_uniform([3, 3, 16, 16], [i, 3]) * 0.1 - 0.05 for i in range(4)]
            self._weights = [*kernels, tf.random.stateless_uniform([16 * 16 * 16, 64], [5, 6]) * 0.01]
        self._repeat = tf.function(self._work, autograph=False)
        self._fixed = repetitions
        self.repetitions = repetitions or 1
        self()
        self._best_s = min(self()[0] for _ in range(5))

    def suit(self, execution_s: float) -> None:
        """Takes as many repetitions as last half as long as an execution: 20 ms at least, 1 s at most."""
        if self._fixed is not None:
            return
        wanted = min(max(_SHARE * execution_s, _LEAST_S), _MOST_S)
        self.repetitions = max(1, round(wanted / max(self._best_s, 1e-9)))

    def _work(self, count: Any) -> Any:
        import tensorflow as tf

        def network(images: Any) -> Any:
            x = images
            for kernel in self._weights[:-1]:
                x = tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME"))
            x = tf.nn.max_pool2d(x, 2, 2, "SAME")
            return tf.reduce_mean(tf.matmul(tf.reshape(x, [_IMAGES, -1]), self._weights[-1]))

        def body(i: Any, carried: Any) -> Any:
            # Each repetition depends on the one before, so that none is moved out of the loop or dropped.
            for _ in range(_FORWARD_PASSES):
                carried = network(self._images + carried * 1e-9)
            with tf.GradientTape() as tape:
                tape.watch(self._weights)
                result = network(self._images + carried * 1e-9)
            gradients = tape.gradient(result, self._weights)
            return i + 1, tf.add_n([tf.reduce_sum(g) for g in gradients]) * 1e-9

        start = (tf.constant(0), tf.constant(0.0))
        return tf.while_loop(lambda i, _: i < count, body, start, parallel_iterations=1)[1]

    def __call__(self) -> Tuple[float, float]:
        """Does the work; seconds and processor seconds of one repetition."""
        import tensorflow as tf

        with tf.device(self._place):
            count = tf.constant(self.repetitions)
            wall, cpu = time.perf_counter(), time.process_time()
            self._repeat(count).numpy()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return wall / self.repetitions, cpu / self.repetitions
