"""Several instances: popdist, its strategy and host collectives."""

from typing import Any

import numpy as np
import tensorflow as tf
from support.poprun import variables
from tensorflow import keras

from .cases import Group, params_of
from .setting import Setting, plain

POPRUN = variables(1)
_STRATEGY = "ipu.distributed.popdist_strategy.PopDistStrategy"


def _trained(ipu: Any, setting: Setting, init: bool = True, config: bool = True) -> Any:
    import popdist
    import popdist.tensorflow
    from tensorflow.python.ipu.distributed.popdist_strategy import PopDistStrategy

    if init:
        popdist.init()
    setting.config.auto_select_ipus = []
    setting.strategy = PopDistStrategy
    if config:
        popdist.tensorflow.set_ipu_config(setting.config, ipus_per_replica=1, configure_device=True)
    else:
        setting.config.select_ipus = popdist.getDeviceId(1)
    return setting.fit()


def instances(machine: Any) -> Group:
    """Returns mutations of popdist and ``PopDistStrategy`` under poprun."""
    import popdist
    import popdist.tensorflow
    from tensorflow.python import ipu
    from tensorflow.python.ipu.distributed import popdist_strategy

    group = Group("popdist and PopDistStrategy")
    make, set_config = popdist_strategy.PopDistStrategy, popdist.tensorflow.set_ipu_config
    process = "experimental.multi_replica_distribution."

    def config(**leaves: Any) -> Any:
        built = ipu.config.IPUConfig()
        for name, value in leaves.items():
            setattr(built, name, value)
        return built

    def configured(count: int, index: int, **leaves: Any) -> Any:
        built = config(**leaves)
        built.experimental.multi_replica_distribution.process_count = count
        built.experimental.multi_replica_distribution.process_index = index
        built.configure_ipu_system()
        return built

    def adapted(**keywords: Any) -> Any:
        popdist.init()
        return make().update_ipu_config(**keywords)

    def chosen(**leaves: Any) -> Any:
        return set_config(config(**leaves), ipus_per_replica=1, configure_device=True).configure_ipu_system()

    group.allow("training", lambda: _trained(ipu, plain(ipu)))
    group.allow("select_ipus", lambda: configured(2, 1, select_ipus=popdist.getDeviceId()))
    group.allow("update_ipu_config", lambda: adapted(config=config()))
    group.signature("PopDistStrategy", make, params_of(_STRATEGY), {})
    group.signature(
        "update_ipu_config", adapted, params_of(_STRATEGY, "update_ipu_config"), dict(config=config())
    )
    params = params_of("popdist.tensorflow.set_ipu_config")
    group.signature("set_ipu_config", set_config, params, dict(config=config()))
    group.add("set_ipu_config: too many IPUs", lambda: set_config(config(), ipus_per_replica=8), RuntimeError)
    group.add("set_ipu_config: and auto_select_ipus", lambda: chosen(auto_select_ipus=2), Exception)
    group.add("popdist.init: argument", lambda: popdist.init(1), TypeError)
    for name in ("getDeviceId", "checkNumIpusPerReplica"):
        function = getattr(popdist, name)
        keywords = {} if name == "getDeviceId" else dict(ipusPerReplica=1)
        group.signature(f"popdist.{name}", function, params_of("popdist." + name), keywords)
    for name in ("isPopdistEnvSet", "getNumInstances", "getInstanceIndex", "getNumTotalReplicas"):
        group.add(f"popdist.{name}: argument", lambda n=name: getattr(popdist, n)(1), TypeError)
    group.allow("popdist.init by the strategy", lambda: _trained(ipu, plain(ipu), init=False))
    for count, index in ((2, 2), (2, -1), (1, 1)):
        wrong_index = lambda c=count, i=index: configured(c, i, select_ipus=17)  # noqa: E731
        group.add(f"{process}process_index = {index} of {count}", wrong_index, ValueError)
    group.allow("two stages", lambda: _trained(ipu, Setting(ipu)))
    # Keras divides the IPUs by the instances of poprun, so one IPU is left for two stages.
    group.add("not configured for several", lambda: _trained(ipu, Setting(ipu), config=False), ValueError)

    def stage_scope() -> None:
        popdist.init()
        with make().scope(), keras.ipu.PipelineStage(0):
            pass

    group.add("PipelineStage", stage_scope, RuntimeError)
    return group


def collectives(machine: Any) -> Group:
    """Returns mutations of the host collectives since 3.1."""
    import popdist
    from tensorflow.python.ipu import distributed

    group = Group("host collectives")
    one, add = tf.constant(1.0), tf.distribute.ReduceOp.SUM

    def ready(name: str) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            popdist.init()
            return getattr(distributed, name)(*args, **keywords)

        return call

    legal = {
        "allreduce": dict(value=one, reduce_op=add),
        "allgather": dict(value=[1.0]),
        "broadcast": dict(value=one),
    }
    for name, keywords in legal.items():
        group.allow(name, lambda n=name, k=keywords: ready(n)(**k))
        group.signature(name, ready(name), params_of("ipu.distributed." + name), keywords)
        early = lambda n=name, k=keywords: getattr(distributed, n)(**k)  # noqa: E731
        group.add(f"{name} before popdist.init", early, tf.errors.InternalError)
        wrong = {**keywords, "value": np.ones(2, np.float64)}
        group.add(f"{name} of float64", lambda n=name, w=wrong: ready(n)(**w), tf.errors.NotFoundError)
    for wrong in ("SUM", None, 1):
        group.add(f"reduce_op = {wrong!r}", lambda w=wrong: ready("allreduce")(one, w), AttributeError)
    group.add("op", lambda: ready("allreduce")(one, op=add), TypeError)
    for name in ("Sum", "Average", "init", "size", "rank", "local_rank"):
        group.add(f"distributed.{name}", lambda n=name: getattr(distributed, n), AttributeError)
    return group
