"""Several instances: ``popdist``, ``popdist.tensorflow`` and ``tensorflow.python.ipu.distributed``.

popdist is closed source; the test double does what public programs need of it.
"""

import os
import types
from typing import Any, Dict

import numpy as np
import tensorflow as tf

from .errors import failed, internal
from .facts import FACTS, like, module

_AVERAGE, _SUM = 0, 1  # of Horovod


def number(name: str, default: int) -> int:
    """Returns a number that ``poprun`` set."""
    return int(os.environ.get("POPDIST_" + name, default))


def is_distributed() -> bool:
    """Whether ``poprun`` started this process."""
    return "POPDIST_NUM_TOTAL_REPLICAS" in os.environ


def num_instances() -> int:
    """Returns the number of processes of the run; 1 without ``poprun``."""
    return number("NUM_TOTAL_REPLICAS", 1) // number("NUM_LOCAL_REPLICAS", 1)


def instance_index() -> int:
    """Returns the number of this process among the instances."""
    return number("REPLICA_INDEX_OFFSET", 0) // number("NUM_LOCAL_REPLICAS", 1)


def device_id(machine: Any, ipus_per_replica: int) -> int:
    """Returns this instance's device as ``gc-info -l`` numbers them: every IPU, then the pairs, the fours, ...

    Raises:
        RuntimeError: the host has no such group of IPUs left.
    """
    size = 1
    while size < ipus_per_replica * number("NUM_LOCAL_REPLICAS", 1):
        size *= 2
    index = number("LOCAL_INSTANCE_INDEX", 0)
    if (index + 1) * size > machine.num_ipus:
        raise RuntimeError(f"instance {index} on this host finds no device of {size} IPUs")
    smaller = sum(machine.num_ipus // n for n in (2**i for i in range(20)) if n < size)
    return smaller + index


def build_popdist(machine: Any) -> Dict[str, types.ModuleType]:
    """Builds ``popdist`` and ``popdist.tensorflow``."""

    def init() -> None:
        machine.note("popdist.init")
        machine.popdist_ready = True

    @like("popdist.tensorflow.set_ipu_config")
    def set_ipu_config(config: Any, ipus_per_replica: int, configure_device: bool) -> Any:
        machine.note("set_ipu_config", ipus_per_replica=ipus_per_replica, configure_device=configure_device)
        if configure_device and is_distributed():
            # In a list, as the SDK's own tests do: a bare 0 would pass for "nothing selected" beside auto_select_ipus.
            config.select_ipus = [device_id(machine, ipus_per_replica)]
        elif configure_device:
            config.auto_select_ipus = ipus_per_replica
        config.experimental.multi_replica_distribution.process_count = num_instances()
        config.experimental.multi_replica_distribution.process_index = instance_index()
        return config

    root = module("popdist", init=init, __path__=[])
    # ``import popdist`` alone does not bind popdist.tensorflow.
    return {
        "popdist": root,
        "popdist.tensorflow": module("popdist.tensorflow", set_ipu_config=set_ipu_config),
    }


def on_host(machine: Any, name: str, value: Any, combine: Any) -> Any:
    """Runs a host collective, or something like one: eagerly, or as an operation of a graph."""

    def run(array: Any) -> Any:
        machine.note(name)
        parts = [arrays[0] for arrays in machine.gather(name, [array])]
        return np.asarray(combine(parts), array.dtype)

    value = tf.convert_to_tensor(value)
    if tf.executing_eagerly():
        return tf.constant(run(value.numpy()))
    result = tf.numpy_function(run, [value], value.dtype)
    result.set_shape(value.shape)
    return result


def build_distributed(machine: Any) -> types.ModuleType:
    """Builds ``tensorflow.python.ipu.distributed``: popdist's reduction since 3.1, Horovod's before."""
    members = _horovod(machine) if machine.sdk == "3.0" else _collectives(machine)
    return module("tensorflow.python.ipu.distributed", __path__=[], **members)


def _collectives(machine: Any) -> Dict[str, Any]:
    def ready(value: Any) -> Any:
        value = tf.convert_to_tensor(value)
        if value.dtype.name not in FACTS["host_reduction_types"]:
            # kernels/popdist/ registers no other types.
            raise tf.errors.NotFoundError(
                None, None, f"Could not find device for node: no kernel for {value.dtype.name}"
            )
        if not machine.popdist_ready:
            raise internal("popdist has not been initialised: popdist.init()")
        return value

    @like("ipu.distributed.allreduce")
    def allreduce(value: Any, reduce_op: Any, tensor_name: Any) -> Any:
        word = reduce_op.value  # AttributeError, as in host_collective_ops.py, for anything but a ReduceOp
        if not isinstance(word, str):
            raise TypeError(f"Expected string for argument 'reduce_op' not {word!r}.")

        def combine(parts: Any) -> Any:
            total = sum(parts[1:], parts[0])
            # The kernel sums, and divides only for the word MEAN.
            return total / len(parts) if word == "MEAN" else total

        return on_host(machine, "distributed.allreduce", ready(value), combine)

    return {"allreduce": allreduce}


def _horovod(machine: Any) -> Dict[str, Any]:
    def init() -> None:
        machine.note("distributed.init")
        machine.horovod_ready = True

    def ready() -> None:
        if not machine.horovod_ready:
            raise failed("Horovod has not been initialized; use hvd.init().")

    @like("ipu.distributed.allreduce 3.0")
    def allreduce(tensor: Any, op: Any, prescale_factor: float, postscale_factor: float) -> Any:
        op = _AVERAGE if op is None else op
        if op not in (_AVERAGE, _SUM):
            raise TypeError(f"Expected int for argument 'reduce_op' not {op!r}.")
        ready()

        def combine(parts: Any) -> Any:
            total = sum(p * prescale_factor for p in parts) * postscale_factor
            return total / len(parts) if op == _AVERAGE else total

        return on_host(machine, "distributed.allreduce", tensor, combine)

    return {"init": init, "Sum": _SUM, "allreduce": allreduce}
