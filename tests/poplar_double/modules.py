"""The module tree of the double: ``tensorflow.python.ipu``, ``keras.ipu``, ``ipu_tensorflow_addons``, ``popdist``."""

import contextlib
import os
import types
from typing import Any, Dict, Iterator

import tensorflow as tf

from . import addons, config, extension
from .facts import FACTS, like


def _module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    for key, value in members.items():
        setattr(module, key, value)
    return module


def _strategies(machine: Any) -> Any:
    """The two strategies; the scope is where models get the SDK's methods."""

    class Strategy:
        extends = True

        @property
        def num_replicas_in_sync(self) -> int:
            return 1

        @contextlib.contextmanager
        def scope(self) -> Iterator[Any]:
            machine.flags  # noqa: B018 - building extended models accesses the driver
            machine.strategies.append(self)
            try:
                yield self
            finally:
                machine.strategies.pop()

        def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
            if not hasattr(fn, "get_concrete_function"):
                raise ValueError("IPUStrategy.run takes a tf.function")
            return fn(*args, **(kwargs or {}))

    @like("ipu.ipu_strategy.IPUStrategyV1")
    def ipu_strategy(**options: Any) -> Any:
        machine.note("IPUStrategy", **options)
        strategy = type("IPUStrategyV1", (Strategy,), {})()
        strategy.extends = options["enable_keras_extensions"]
        return strategy

    @like("ipu.distributed.popdist_strategy.PopDistStrategy")
    def popdist_strategy(**options: Any) -> Any:
        if "POPDIST_NUM_TOTAL_REPLICAS" not in os.environ:
            raise RuntimeError("PopDistStrategy outside of poprun")
        machine.note("PopDistStrategy", **options)

        def update_ipu_config(self: Any, config: Any) -> None:
            _set_distribution(config)

        strategy = type("PopDistStrategy", (Strategy,), {"update_ipu_config": update_ipu_config})()
        strategy.extends = options["enable_keras_extensions"]
        return strategy

    return ipu_strategy, popdist_strategy


def _number(name: str, default: int) -> int:
    return int(os.environ.get("POPDIST_" + name, default))


def _num_instances() -> int:
    return _number("NUM_TOTAL_REPLICAS", 1) // _number("NUM_LOCAL_REPLICAS", 1)


def _instance_index() -> int:
    return _number("REPLICA_INDEX_OFFSET", 0) // _number("NUM_LOCAL_REPLICAS", 1)


def _set_distribution(config: Any) -> None:
    config.experimental.multi_replica_distribution.process_count = _num_instances()
    config.experimental.multi_replica_distribution.process_index = _instance_index()


def _popdist(machine: Any) -> Dict[str, types.ModuleType]:
    def set_ipu_config(config: Any, ipus_per_replica: int = 1, configure_device: bool = True) -> None:
        machine.note("set_ipu_config", ipus_per_replica=ipus_per_replica, configure_device=configure_device)
        if configure_device:
            config.auto_select_ipus = ipus_per_replica * _number("NUM_LOCAL_REPLICAS", 1)
        _set_distribution(config)

    root = _module(
        "popdist",
        init=lambda: machine.note("popdist.init"),
        isPopdistEnvSet=lambda: "POPDIST_NUM_TOTAL_REPLICAS" in os.environ,
        getNumInstances=_num_instances,
        getInstanceIndex=_instance_index,
        getLocalInstanceIndex=lambda: _number("LOCAL_INSTANCE_INDEX", 0),
        getNumIpusPerReplica=lambda: _number("NUM_IPUS_PER_REPLICA", 1),
        getNumLocalReplicas=lambda: _number("NUM_LOCAL_REPLICAS", 1),
        getNumTotalReplicas=lambda: _number("NUM_TOTAL_REPLICAS", 1),
        checkNumIpusPerReplica=lambda n: _number("NUM_IPUS_PER_REPLICA", 1) == n,
    )
    tensorflow = _module("popdist.tensorflow", set_ipu_config=set_ipu_config)
    root.tensorflow = tensorflow  # type: ignore[attr-defined]
    root.__path__ = []  # type: ignore[attr-defined]
    return {"popdist": root, "popdist.tensorflow": tensorflow}


def _utils(machine: Any) -> types.ModuleType:
    @like("ipu.utils.reset_ipu_seed")
    def reset_ipu_seed(seed: Any, device: Any, cpu_device: Any, experimental_identical_replicas: Any) -> None:
        machine.device_ipus  # noqa: B018 - raises before the system is configured
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError("seed must be an integer")
        if not -(2**31) <= seed < 2**31:
            raise tf.errors.InvalidArgumentError(None, None, f"seed {seed} does not fit into 32 bits")
        machine.note("reset_ipu_seed", seed=seed, identical=experimental_identical_replicas)
        machine.generator.reset_from_seed(seed)

    @like("ipu.utils.get_num_of_ipus_in_device")
    def get_num_of_ipus_in_device(ipu_device: Any, device: Any) -> int:
        return machine.device_ipus

    return _module(
        "tensorflow.python.ipu.utils",
        reset_ipu_seed=reset_ipu_seed,
        get_num_of_ipus_in_device=get_num_of_ipus_in_device,
    )


def _ops(machine: Any) -> Dict[str, types.ModuleType]:
    def reduced(x: Any) -> Any:
        if machine.replicas is None:
            raise NotImplementedError("the double reduces over replicas in a weight update only")
        return machine.replicas.cross_replica_mean(x)

    @like("ipu.ops.cross_replica_ops.cross_replica_mean")
    def cross_replica_mean(x: Any, replica_group_size: Any, name: Any) -> Any:
        return reduced(x)

    @like("ipu.ops.image_ops.normalise_image")
    def normalise_image(image: Any, channel_offsets: Any, channel_scales: Any, scale: Any, name: Any) -> Any:
        if image.shape[-1] != 3:
            raise ValueError("normalise_image takes images of 3 channels")
        dtype = channel_offsets.dtype
        return (tf.cast(image, dtype) * tf.cast(scale, dtype) - channel_offsets) * channel_scales

    return {
        "cross_replica_ops": _module("cross_replica_ops", cross_replica_mean=cross_replica_mean),
        "image_ops": _module("image_ops", normalise_image=normalise_image),
        "pipelining_ops": _module(
            "pipelining_ops",
            PipelineSchedule=config.ENUMS["PipelineSchedule"],
            RecomputationMode=config.ENUMS["RecomputationMode"],
            PipelineStageOptions=extension.make_stage_options,
        ),
    }


def build(machine: Any) -> Dict[str, types.ModuleType]:
    """Modules by the name they are imported as; ``keras.ipu`` is to be set on the Keras modules, too."""
    strategy, popdist_strategy = _strategies(machine)
    functions = config.make_functions(machine)
    enums = {
        k: config.ENUMS[k]
        for k in (
            "SelectionOrder",
            "DeviceConnectionType",
            "StochasticRoundingBehaviour",
            "MergeRemoteBuffersBehaviour",
            "SchedulingAlgorithm",
        )
    }
    ipu = _module("tensorflow.python.ipu")
    parts: Dict[str, types.ModuleType] = {
        "config": _module(
            "tensorflow.python.ipu.config", IPUConfig=config.make_config_class(machine), **functions, **enums
        ),
        "utils": _utils(machine),
        "ipu_strategy": _module(
            "tensorflow.python.ipu.ipu_strategy", IPUStrategy=strategy, IPUStrategyV1=strategy
        ),
        **_ops(machine),
    }
    for name, part in parts.items():
        if name not in FACTS["package_attributes"]:
            raise ValueError(f"tensorflow.python.ipu binds no {name}")
        setattr(ipu, name, part)
    distributed = _module("tensorflow.python.ipu.distributed")
    distributed.__path__ = []  # type: ignore[attr-defined]
    ipu.__path__ = []  # type: ignore[attr-defined]
    keras_ipu = _module(
        "keras.ipu",
        PipelineStage=extension.make_stage_scope(machine),
        FunctionalLayerPipelineStageAssignment=extension.StageAssignment,
    )
    if "ReplicatedMetricReductionMethod" not in FACTS["absent_in"].get(machine.sdk, {}).get("names", ()):
        keras_ipu.ReplicatedMetricReductionMethod = config.ENUMS["ReplicatedMetricReductionMethod"]
    return {
        "tensorflow.python.ipu": ipu,
        # Files that can be imported by their path; the operations can be reached as attributes only.
        "tensorflow.python.ipu.config": parts["config"],
        "tensorflow.python.ipu.utils": parts["utils"],
        "tensorflow.python.ipu.ipu_strategy": parts["ipu_strategy"],
        "tensorflow.python.ipu.gradient_accumulation": _module(
            "tensorflow.python.ipu.gradient_accumulation",
            GradientAccumulationReductionMethod=config.ENUMS["GradientAccumulationReductionMethod"],
        ),
        "tensorflow.python.ipu.distributed": distributed,
        "tensorflow.python.ipu.distributed.popdist_strategy": _module(
            "popdist_strategy", PopDistStrategy=popdist_strategy
        ),
        "keras.ipu": keras_ipu,
        **addons.build(machine),
        **_popdist(machine),
    }
