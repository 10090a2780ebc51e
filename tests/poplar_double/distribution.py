"""The variables of ``PopDistStrategy``: mirrored and sync-on-read containers of one component, as in the SDK.

They follow PopDistExtendedV1 of tensorflow/python/ipu/distributed/popdist_strategy.py (release 3.4): new variables are
broadcast from instance 0, an update gets the component, and a sync-on-read variable is reduced over all instances when
the host reads it, so all instances have to read it at the same places.
"""

from typing import Any, List

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, mirrored_strategy

from . import instances


def components(variable: Any) -> List[Any]:
    """Returns the variables of a container, without Keras' automatic casts; any other variable is returned itself."""
    inner = getattr(variable, "_variable", variable)  # of an AutoCastVariable
    return list(inner.values) if isinstance(inner, tf.distribute.DistributedValues) else [variable]


class PopDistExtended(mirrored_strategy.MirroredExtended):  # type: ignore[misc]
    """One device, and instances that hold the same."""

    def __init__(self, strategy: Any, machine: Any) -> None:
        super().__init__(strategy, ["/cpu:0"], tf.distribute.ReductionToOneDevice())
        self._machine = machine
        self._running = 0

    def _make_collective_ops(self, devices: Any) -> None:
        """Returns None: a thread pool would come with them, which complains when the process ends."""

    @property
    def _num_replicas_in_sync(self) -> int:
        return instances.number("NUM_TOTAL_REPLICAS", 1)

    @property
    def _global_batch_size(self) -> bool:
        # The SDK does so, too: Keras 2.6 takes an Input's batch_size for that of all replicas.
        return True

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: Any, primary_var: Any, **arguments: Any
    ) -> Any:
        def initial_value() -> Any:
            value = arguments["initial_value"]
            value = value() if callable(value) else value
            value = getattr(value, "wrapped_value", value)  # of a checkpoint
            value = tf.convert_to_tensor(value, dtype=arguments.get("dtype"))
            return instances.on_host(self._machine, "variable", value, lambda parts: parts[0])

        return initial_value

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        self._running += 1
        try:
            with distribute_lib.ReplicaContext(self._container_strategy(), replica_id_in_sync_group=0):
                return fn(*args, **kwargs)
        finally:
            self._running -= 1

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        is_variable = isinstance(value, tf.distribute.DistributedValues)
        if is_variable:
            (value,) = value.values
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        if not self._running:
            return instances.on_host(
                self._machine,
                "sync on read",
                value,
                lambda parts: np.sum(parts, axis=0) / (len(parts) if mean else 1),
            )
        # cross_replica_sum and _mean of variables on the IPUs.  Gradients are already summed here.
        return self._machine.replicas.reduced(value, mean) if is_variable else value

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> Any:
        return [self._reduce_to(reduce_op, v, d, options) for v, d in value_destination_pairs]
