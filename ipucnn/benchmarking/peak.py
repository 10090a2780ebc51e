"""Measures the machine's peak performance, and the peak memory of a GPU."""

import os
import time
from pathlib import Path
from typing import Optional, Tuple

from ipucnn.aliases import Tensor
from ipucnn.benchmarking.records import MatmulPeakFacts
from ipucnn.machine import operations_at_once, parallel_map

_SMALLEST, _LARGEST, _LEAST_S = 1024, 8192, 0.01
# Products timed before the executions, and again after them.
_PRODUCTS = 10
PEAK_METHOD = (
    "the fastest of 20 float32 products of two {n}x{n} matrices, half before and half after the executions, "
    "2 x {n}^3 FLOP each"
)


class MatmulPeak:
    """A matrix product that measures the peak performance of the session's device.

    The matrices are the smallest that take 10 ms, at least 1024 on a side.  If fewer threads share an operation than
    there are cores, enough products are computed at once to keep all cores busy.

    Args:
        place: TensorFlow's name of the device.
    """

    def __init__(self, place: str = "/CPU:0") -> None:
        import tensorflow as tf

        self._place = place
        self._at_once = operations_at_once() if "CPU" in place else 1
        self._product = tf.function(lambda a, b: tf.reduce_sum(tf.matmul(a, b)), autograph=False)
        self.size = _SMALLEST
        while True:
            with tf.device(place):
                self._factors = [tf.random.stateless_uniform([self.size] * 2, [i, 0]) for i in (1, 2)]
            self._time()
            self.best_s = min(self._time() for _ in range(_PRODUCTS))
            if self.best_s >= _LEAST_S or self.size >= _LARGEST:
                return
            self.size *= 2

    def _time(self) -> float:
        import tensorflow as tf

        def product(*factors: Tensor) -> None:
            with tf.device(self._place):
                self._product(*factors).numpy()

        started = time.perf_counter()
        for _ in parallel_map(product, [self._factors] * self._at_once, self._at_once):
            pass
        return time.perf_counter() - started

    def measure(self) -> MatmulPeakFacts:
        """Returns the fastest product, among some timed now and those at the beginning."""
        self.best_s = min(self.best_s, *(self._time() for _ in range(_PRODUCTS)))
        method = PEAK_METHOD.format(n=self.size)
        if self._at_once > 1:
            method += f", {self._at_once} products at once"
        return MatmulPeakFacts(2.0 * self.size**3 * self._at_once / self.best_s, method)


class Occupation:
    """The others' use of the processors since this object was made: other processes and other virtual machines."""

    def __init__(self) -> None:
        self._before = _processor_seconds()
        self._ours = time.process_time()

    def others_share(self) -> Optional[float]:
        """Returns 0 to 1 of all processors; None if the system (other than Linux) does not report it."""
        now = _processor_seconds()
        if now is None or self._before is None:
            return None
        busy, total = (after - before for after, before in zip(now, self._before))
        ours = time.process_time() - self._ours
        return min(1.0, max(0.0, busy - ours) / total) if total > 0 else None


def _processor_seconds() -> Optional[Tuple[float, float]]:
    """Returns (busy, all) seconds of all processors since the system started; hypervisor time counts as busy."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        # user nice system idle iowait irq softirq steal; guest time is part of user time (proc(5)).
        ticks = [int(value) for value in fields[1:9]]
        per_s = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError, IndexError):
        return None
    if fields[0] != "cpu" or len(ticks) < 8:
        return None
    idle = ticks[3] + ticks[4]
    return (sum(ticks) - idle) / per_s, sum(ticks) / per_s


def device_peak_memory_bytes(kind: str) -> Optional[int]:
    """Returns TensorFlow's peak memory on a GPU; None for a CPU or a version that does not report it."""
    if kind != "gpu":
        return None
    import tensorflow as tf

    try:
        return int(tf.config.experimental.get_memory_info("GPU:0")["peak"])
    except (AttributeError, KeyError, ValueError, tf.errors.OpError):
        return None
