"""TensorFlow's collectives between workers, which gather the gradients.

``tf.distribute.MultiWorkerMirroredStrategy`` sets the collectives up, and is used for nothing else: the session has its
own training loop.
"""

import time
from typing import Callable, List, Sequence

import numpy as np
import tensorflow as tf

from ipucnn import interrupts
from ipucnn.aliases import Tensor
from ipucnn.errors import ConfigurationError
from ipucnn.text import printable

# The longest time to wait for TensorFlow's servers to find each other.
_SERVERS_S = 300
# The group key of our collectives: any number that TensorFlow's own strategies, which count from 1, do not use.
_GROUP_KEY = 1_000_003


class Collectives:
    """Starts TensorFlow's server of this worker, and waits for those of the others.

    Args:
        addresses: the addresses of all workers.
        rank: the number of this worker.

    Attributes:
        place: TensorFlow's name of this worker, the prefix of a device name.
        seconds: a variable with the seconds spent in collectives so far, including the wait for other workers.
        received_bytes: the bytes that a worker receives from each collective, in the order of tracing.

    Raises:
        ConfigurationError: the server cannot start.
    """

    def __init__(self, addresses: Sequence[str], rank: int) -> None:
        self._count = len(addresses)
        self.received_bytes: List[int] = []
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": list(addresses)}),
            task_type="worker",
            task_id=rank,
            rpc_layer="grpc",
        )
        # From here on a server may be running, even if the next step fails.
        interrupts.skip_destructors()
        try:
            with interrupts.left_to_the_system(_SERVERS_S):
                # The servers run as long as the strategy exists.
                self._strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
        except (tf.errors.OpError, RuntimeError) as error:
            raise ConfigurationError(
                f"TensorFlow's server of worker {rank} cannot start at {addresses[rank]}: "
                f"{printable(str(error).splitlines()[0])}",
                "use other ports, and addresses of the machines that the workers run on",
            ) from None
        self.place = f"/job:worker/replica:0/task:{rank}"
        # TensorFlow's preemption notifier replaces the handler of SIGTERM.
        interrupts.reinstall_handlers()
        # The variable is not made during tracing: a function that makes a variable is traced twice.
        with tf.device(f"{self.place}/device:CPU:0"):
            self.seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False)

    def gather(self, values: Tensor) -> Tensor:
        """Returns the values of each worker, in the order of workers, inside a compiled function.

        Args:
            values: float32 (n,), of the same length on all workers.

        Returns:
            float32 (workers, n).
        """

        def collect(values: Tensor, **details: object) -> Tensor:
            return tf.raw_ops.CollectiveGatherV2(input=values, **details)

        gathered = self._collective(values, collect, self._count)
        return tf.reshape(gathered, [self._count, values.shape[0]])

    def add(self, values: Tensor) -> Tensor:
        """Returns the sum over workers, in whatever order is fastest, inside a compiled function.

        Args:
            values: float32 (n,), of the same length on all workers.
        """

        def reduce(values: Tensor, **details: object) -> Tensor:
            return tf.raw_ops.CollectiveReduceV2(input=values, merge_op="Add", final_op="Id", **details)

        # In a ring, each part of the sum reaches every worker but one twice, so a worker receives the size twice.
        return tf.ensure_shape(self._collective(values, reduce, 2), values.shape)

    def _collective(self, values: Tensor, collect: Callable[..., Tensor], received: int) -> Tensor:
        """Runs one of TensorFlow's collectives, and times it.

        Args:
            values: float32 (n,), of the same length on all workers.
            collect: the collective operation.
            received: the number of bytes that a worker receives, in multiples of the size of ``values``.
        """
        self.received_bytes.append(4 * received * int(values.shape[0]))
        with tf.device(f"{self.place}/device:CPU:0"):
            with tf.control_dependencies([values]):
                begun = self._now()
            with tf.control_dependencies([begun]):
                result = collect(
                    tf.identity(values),
                    group_size=self._count,
                    group_key=_GROUP_KEY,
                    instance_key=len(self.received_bytes),
                    ordering_token=[],
                    communication_hint="ring",
                    timeout_seconds=0.0,
                )
            with tf.control_dependencies([result]):
                self.seconds.assign_add(self._now() - begun)
        return result

    def _now(self) -> Tensor:
        """Returns the time in seconds when the operation runs.

        TensorFlow's own timestamp operation is not allowed when operations are deterministic.
        """
        return tf.numpy_function(lambda: np.float64(time.perf_counter()), [], tf.float64)
