"""The SDK's modules, and what differs between its versions 3.0 and 3.4: the one place that knows.

Differences are told from what is there, not from version numbers, which the SDK does not state in Python.
Every version is TensorFlow 2.6.3 with Keras 2.6.0; the big change is 3.0 to 3.1.
"""

from dataclasses import dataclass
from typing import Any

from ipucnn.sessions.poplar.errors import poplar_errors


@dataclass(frozen=True)
class Api:
    """The SDK's modules.

    Attributes:
        ipu: ``tensorflow.python.ipu``; its operations are attributes (``ipu.pipelining_ops``).
        keras_ipu: ``keras.ipu``.
        addons_layers: ``ipu_tensorflow_addons.keras.layers``.
        reduces_metrics: models have ``set_replication_options`` (3.1); before, a metric is the last replica's.
    """

    ipu: Any
    keras_ipu: Any
    addons_layers: Any
    reduces_metrics: bool

    def ipu_strategy(self) -> Any:
        """The class ``IPUStrategy``."""
        return self.ipu.ipu_strategy.IPUStrategy

    def start_instances(self) -> None:
        """Lets the processes of ``poprun`` find each other, before anything else of the SDK is called."""
        import popdist
        from tensorflow.python.ipu import distributed

        if hasattr(distributed, "init"):
            distributed.init()  # 3.0: over Horovod
        if hasattr(popdist, "init"):
            popdist.init()

    def join_instances(self, config: Any, ipus_per_replica: int, selects_device: bool) -> None:
        """Tells an ``IPUConfig``, not yet applied, of the other instances, and which IPUs are this one's."""
        import popdist.tensorflow

        popdist.tensorflow.set_ipu_config(
            config, ipus_per_replica=ipus_per_replica, configure_device=selects_device
        )

    def sum_over_instances(self, values: Any) -> Any:
        """The sum over instances of an array, on the host."""
        import tensorflow as tf
        from tensorflow.python.ipu import distributed

        with tf.device("/CPU:0"):
            own = tf.constant(values)
            if hasattr(distributed, "Sum"):  # 3.0: over Horovod
                return distributed.allreduce(own, op=distributed.Sum).numpy()
            return distributed.allreduce(own, tf.distribute.ReduceOp.SUM).numpy()

    def popdist_strategy(self) -> Any:
        """The class ``PopDistStrategy``; the package does not bind it, only its module."""
        from tensorflow.python.ipu.distributed.popdist_strategy import PopDistStrategy

        return PopDistStrategy


def load_api() -> Api:
    """Imports the SDK.

    Raises:
        MissingError: the SDK is not enabled, or this is not its Python, NumPy, TensorFlow or Keras.
    """
    with poplar_errors():
        # A bare ``import keras`` lacks optimizers on Keras 2.6; ``tensorflow.keras`` has ``ipu`` too.
        from ipu_tensorflow_addons.keras import layers
        from tensorflow import keras
        from tensorflow.python import ipu

        keras_ipu = keras.ipu
    return Api(ipu, keras_ipu, layers, hasattr(keras_ipu, "ReplicatedMetricReductionMethod"))
