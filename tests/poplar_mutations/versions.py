"""Mutations for the differences of SDK 3.0, 3.1 and 3.4."""

from typing import Any

import tensorflow as tf
from poplar_double import ProcessAborted
from tensorflow import keras

from .cases import Group, environment
from .quoted import params_in
from .setting import Setting, plain

# Legal and refused flags by SDK; a refused one ends the process.
_FLAGS = {
    "3.4": (
        ("--use_on_demand", "--show_progress_bar=true", "--executable_cache_path=x"),
        (
            "--no_such_flag",
            "--show_progress_bars=true",
            "--show_progress_bar=maybe",
            "--synthetic_data_initializer=1",
            "show_progress_bar=true",
            "-show_progress_bar=true",
        ),
    ),
    "3.1": (("--show_progress_bar=true",), ("--use_on_demand",)),
    "3.0": ((), ("--use_on_demand",)),
}


def flags(group: Group, machine: Any) -> None:
    """``TF_POPLAR_FLAGS``."""
    from tensorflow.python import ipu

    def configure(flag: str) -> None:
        with environment({"TF_POPLAR_FLAGS": flag}):
            ipu.config.IPUConfig().configure_ipu_system()

    for flags_of_kind, errors in zip(_FLAGS[machine.sdk], ((), (ProcessAborted,))):
        for flag in flags_of_kind:
            group.add(flag, lambda f=flag: configure(f), *errors)


def version_3_0(group: Group, machine: Any) -> None:
    """SDK 3.0, and its Horovod."""
    from tensorflow.python import ipu
    from tensorflow.python.ipu import distributed

    def hole(model: Any) -> None:
        """Leaves a stage out: 3.0 refuses it when stages are set, later versions when they are trained."""
        assignment = list(model.get_pipeline_stage_assignment())
        for entry in assignment[1:]:
            entry.pipeline_stage = 2
        model.set_pipeline_stage_assignment(assignment)

    def turned(model: Any) -> None:
        model.set_pipeline_stage_assignment(model.get_pipeline_stage_assignment()[::-1])

    def allreduce(*args: Any, **keywords: Any) -> Any:
        distributed.init()
        return distributed.allreduce(*args, **keywords)

    def metrics(model: Any) -> None:
        model.set_replication_options("MEAN")

    def trained(setting: Setting, argument: str) -> None:
        setting.arguments[argument] = False
        setting.fit()

    group.add("training", lambda: Setting(ipu).fit())
    group.add("stages in any order", lambda: Setting(ipu, before=turned).fit())
    group.add("stages with a hole", lambda: Setting(ipu, before=hole).fit(), ValueError)
    group.add("set_replication_options", lambda: plain(ipu, before=metrics).fit(), AttributeError)
    method = "ReplicatedMetricReductionMethod"
    group.add(method, lambda: getattr(keras.ipu, method), AttributeError)
    for make, name in (
        (plain, "use_v2_gradient_accumulation_optimizer"),
        (Setting, "gradient_accumulation_for_captured_grads"),
    ):
        group.add(name, lambda m=make, n=name: trained(m(ipu), n), TypeError)
    one, add = tf.constant(1.0), tf.distribute.ReduceOp.SUM
    legal = dict(tensor=one, op=distributed.Sum)
    group.call(
        "allreduce",
        allreduce,
        params_in("tensor, op=None, prescale_factor=1.0, postscale_factor=1.0"),
        legal,
        {},
    )
    group.add("allreduce: reduce_op", lambda: allreduce(one, reduce_op=add), TypeError)
    group.add("allreduce: ReduceOp", lambda: allreduce(one, add), TypeError)
    not_ready = tf.errors.FailedPreconditionError
    group.add("allreduce before init", lambda: distributed.allreduce(**legal), not_ready)
