"""Several instances: popdist, its strategy and host collectives."""

from typing import Any

import numpy as np
import tensorflow as tf
from support.poprun import variables

from .cases import Group
from .quoted import params_in, params_of
from .setting import Setting, plain, set_leaf

POPRUN = variables(1)
_STRATEGY = "ipu.distributed.popdist_strategy.PopDistStrategy"
# Closed source: as public programs call it.
_SET_CONFIG = "config, ipus_per_replica=1, configure_device=True"
_PROCESS = "experimental.multi_replica_distribution.process_"


def instances(group: Group, machine: Any) -> None:
    """popdist and ``PopDistStrategy`` under poprun."""
    import popdist
    import popdist.tensorflow
    from tensorflow.python import ipu
    from tensorflow.python.ipu.distributed import popdist_strategy

    make, set_config = popdist_strategy.PopDistStrategy, popdist.tensorflow.set_ipu_config

    def config(**leaves: Any) -> Any:
        built = ipu.config.IPUConfig()
        for name, value in leaves.items():
            set_leaf(built, name, value)
        return built

    def distributed(count: int, index: int, device: int) -> None:
        process = {_PROCESS + "count": count, _PROCESS + "index": index}
        config(**process, select_ipus=device).configure_ipu_system()

    def trained(setting: Setting, starts: bool = True, configures: bool = True) -> Any:
        if starts:
            popdist.init()
        setting.config.auto_select_ipus, setting.strategy = [], make
        if configures:
            set_config(setting.config, ipus_per_replica=1, configure_device=True)
        else:
            setting.config.select_ipus = 17
        return setting.fit()

    def both_selected() -> Any:
        chosen = config(auto_select_ipus=2)
        set_config(chosen, ipus_per_replica=1, configure_device=True).configure_ipu_system()

    for name, function, params, legal in (
        ("PopDistStrategy", make, params_of(_STRATEGY), {}),
        ("set_ipu_config", set_config, params_in(_SET_CONFIG), dict(config=config())),
    ):
        group.signature(name, function, params, legal)
    group.add("training", lambda: trained(plain(ipu)))
    group.add("two stages", lambda: trained(Setting(ipu)))
    group.add("popdist.init by the strategy", lambda: trained(plain(ipu), starts=False))
    group.add("select_ipus", lambda: distributed(2, 1, 17))
    group.add("set_ipu_config: too many IPUs", lambda: set_config(config(), ipus_per_replica=8), RuntimeError)
    group.add("set_ipu_config: and auto_select_ipus", both_selected, Exception)
    group.add("popdist.init: argument", lambda: popdist.init(1), TypeError)
    for count, index in ((2, 2), (2, -1), (1, 1)):
        wrong_index = lambda c=count, i=index: distributed(c, i, 17)  # noqa: E731
        group.add(f"{_PROCESS}index = {index} of {count}", wrong_index, ValueError)
    # Keras divides the IPUs by the instances of poprun, so one IPU is left for two stages.
    group.add("not configured for several", lambda: trained(Setting(ipu), configures=False), ValueError)


def collectives(group: Group, machine: Any) -> None:
    """The host reduction since 3.1."""
    import popdist
    from tensorflow.python.ipu import distributed

    one, add = tf.constant(1.0), tf.distribute.ReduceOp.SUM

    def allreduce(*args: Any, **keywords: Any) -> Any:
        popdist.init()
        return distributed.allreduce(*args, **keywords)

    legal = dict(value=one, reduce_op=add)
    wrong = {
        "value": {tf.errors.NotFoundError: [np.ones(2, np.float64)]},
        "reduce_op": {AttributeError: ("SUM", None, 1)},
    }
    group.call("allreduce", allreduce, params_of("ipu.distributed.allreduce"), legal, wrong)
    group.add("before popdist.init", lambda: distributed.allreduce(**legal), tf.errors.InternalError)
    group.add("op", lambda: allreduce(one, op=add), TypeError)
    for name in ("Sum", "init"):  # of Horovod
        group.add(f"distributed.{name}", lambda n=name: getattr(distributed, n), AttributeError)
