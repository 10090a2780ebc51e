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
