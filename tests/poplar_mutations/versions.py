"""Mutations for the differences of SDK 3.0, 3.1 and 3.4."""

import os
from typing import Any

import tensorflow as tf
from poplar_double import ProcessAborted
from tensorflow import keras

from .cases import Group, params_of
from .setting import Setting, plain


def _flags(group: Group, flag: str, legal: bool) -> None:
    from tensorflow.python import ipu

    def configure() -> None:
        os.environ["TF_POPLAR_FLAGS"] = flag
        try:
            ipu.config.IPUConfig().configure_ipu_system()
        finally:
            del os.environ["TF_POPLAR_FLAGS"]

    if legal:
        group.allow(flag, configure)
    else:
        group.add(flag, configure, ProcessAborted)


def flags(machine: Any) -> Group:
    """Returns mutations of TF_POPLAR_FLAGS of 3.4: a wrong one ends the process."""
    group = Group("TF_POPLAR_FLAGS")
    for flag in ("--use_on_demand", "--show_progress_bar=true", "--executable_cache_path=x"):
        _flags(group, flag, True)
    for flag in (
        "--no_such_flag",
        "--show_progress_bars=true",
        "--show_progress_bar=maybe",
        "--synthetic_data_initializer=1",
        "show_progress_bar=true",
        "-show_progress_bar=true",
    ):
        _flags(group, flag, False)
    return group


def _with_a_hole(model: Any) -> Any:
    """Assigns stages with a gap: 3.0 refuses it when they are set, later versions when they are trained."""
    assignment = list(model.get_pipeline_stage_assignment())
    for entry in assignment[1:]:
        entry.pipeline_stage = 2
    return assignment


def _set_before(setting: Setting, before: Any) -> Setting:
    setting.before = before
    return setting


def version_3_1(machine: Any) -> Group:
    """Returns mutations of SDK 3.1."""
    group = Group("SDK 3.1")
    _flags(group, "--use_on_demand", False)
    _flags(group, "--show_progress_bar=true", True)
    return group


def version_3_0(machine: Any) -> Group:
    """Returns mutations of SDK 3.0, and its Horovod."""
    from tensorflow.python import ipu
    from tensorflow.python.ipu import distributed

    group = Group("SDK 3.0")
    _flags(group, "--use_on_demand", False)
    group.allow("training", lambda: Setting(ipu).fit())
    group.add(
        "ReplicatedMetricReductionMethod", lambda: keras.ipu.ReplicatedMetricReductionMethod, AttributeError
    )
    hole = lambda m: m.set_pipeline_stage_assignment(_with_a_hole(m))  # noqa: E731
    group.add("stages with a hole", lambda: _set_before(Setting(ipu), hole).fit(), ValueError)
    turned = lambda m: m.set_pipeline_stage_assignment(m.get_pipeline_stage_assignment()[::-1])  # noqa: E731
    group.allow("stages in any order", lambda: _set_before(Setting(ipu), turned).fit())
    metrics = lambda m: m.set_replication_options("MEAN")  # noqa: E731
    group.add("set_replication_options", lambda: plain(ipu, before=metrics).fit(), AttributeError)

    def changed(setting: Setting, name: str) -> None:
        setting.arguments[name] = False
        setting.fit()

    group.add(
        "use_v2_gradient_accumulation_optimizer",
        lambda: changed(plain(ipu), "use_v2_gradient_accumulation_optimizer"),
        TypeError,
    )
    group.add(
        "gradient_accumulation_for_captured_grads",
        lambda: changed(Setting(ipu), "gradient_accumulation_for_captured_grads"),
        TypeError,
    )
    one = tf.constant(1.0)

    def allreduce(*args: Any, **keywords: Any) -> Any:
        distributed.init()
        return distributed.allreduce(*args, **keywords)

    legal = dict(tensor=one, op=distributed.Sum)
    group.allow("allreduce", lambda: allreduce(**legal))
    group.signature("allreduce", allreduce, params_of("ipu.distributed.allreduce 3.0"), legal)
    add = tf.distribute.ReduceOp.SUM
    group.add("allreduce: reduce_op", lambda: allreduce(one, reduce_op=add), TypeError)
    group.add("allreduce: ReduceOp", lambda: allreduce(one, add), TypeError)
    group.add("allreduce: Adasum", lambda: allreduce(one, distributed.Adasum), NotImplementedError)
    not_ready = tf.errors.FailedPreconditionError
    group.add("allreduce before init", lambda: distributed.allreduce(**legal), not_ready)
    group.add("rank before init", lambda: distributed.rank(), ValueError)
    return group
