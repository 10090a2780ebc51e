"""The options of a model, its data, and the order of the calls."""

from typing import Any, Callable, Tuple, Union

import numpy as np
import tensorflow as tf
from poplar_double import ProcessAborted
from support.sessions import chain
from tensorflow import keras

from .cases import Group
from .quoted import QUOTED, params_in, params_of, refused_by
from .setting import Setting, make_data, plain, set_leaf, small_model

Errors = Union[type, Tuple[type, ...]]


def calls(group: Group, machine: Any) -> None:
    """Options of a model, its stages and its data: names, keywords, types, values, order."""
    from tensorflow.python import ipu

    options = ipu.pipelining_ops.PipelineStageOptions
    failed, internal = tf.errors.FailedPreconditionError, tf.errors.InternalError
    invalid = tf.errors.InvalidArgumentError

    schedules, modes = ipu.pipelining_ops.PipelineSchedule, ipu.pipelining_ops.RecomputationMode
    unimplemented = tf.errors.UnimplementedError

    def changed(
        name: str,
        error: Errors,
        arguments: Any = (),
        leaves: Any = (),
        stages: int = 2,
        **attributes: Any,
    ) -> None:
        """Adds training with other arguments of the options, leaves of IPUConfig, or attributes of the setting."""

        def run() -> None:
            built = plain(ipu, **attributes) if stages == 1 else Setting(ipu, **attributes)
            built.arguments.update(arguments)
            for leaf, value in dict(leaves).items():
                set_leaf(built.config, leaf, value)
            built.fit()

        group.add(name, run, *(error if isinstance(error, tuple) else (error,)))

    def refused(name: str, values: Any, error: type, stages: int = 2) -> None:
        where = ", no pipeline" if stages == 1 else ""
        for value in values:
            changed(f"{name} = {value!r}{where}", error, {name: value}, stages=stages)

    # Arguments of set_pipelining_options
    steps, method = "gradient_accumulation_steps_per_replica", "gradient_accumulation_reduction_method"
    for name, values, error in (
        (steps, (0, -1, 1.0, "4", np.int64(4)), ValueError),
        ("device_mapping", ((0, 1), [0.0, 1.0], "01", [0], [0, 1, 2], [0, 4]), ValueError),
        (method, ("average", 1, True), ValueError),
        ("pipeline_schedule", ("Grouped", 0), TypeError),
        ("recomputation_mode", ("Auto", 0), TypeError),
        ("weight_update_poplar_options", ({},), TypeError),
        ("continuous_weight_updates", (True,), NotImplementedError),
    ):
        refused(name, values, error)
    for side in ("forward", "backward"):
        name = f"{side}_propagation_stages_poplar_options"
        refused(name, (options(), [{}, {}]), TypeError)
        refused(name, ([options()],), ValueError)
        for words in (
            {"convolution_options": {"availableMemoryProportion": "x"}},
            {"matmul_options": {"partialType": "half"}},
        ):
            refused(name, ([options(**words), options()],), internal)
    own_arguments = ("device_mapping", "accumulate_outfeed")
    for name in refused_by("set_pipelining_options"):
        refused(name, () if name in own_arguments else (1,), ValueError)
    of_keras = refused_by("set_pipelining_options") + [
        "gradient_accumulation_reduction_method",
        "reduction_method",
    ]
    for name, _ in params_of("ipu.ops.pipelining_ops.pipeline"):
        if name not in of_keras:
            refused(name + "s", (None,), TypeError)
    sharding = {"replicated_optimizer_state_sharding": True, "offload_weight_update_variables": False}
    changed("sharding without offloading", ValueError, sharding)
    changed("sharding without offloading, no pipeline", ValueError, sharding, stages=1)
    changed("no accumulation", ValueError, {steps: None})
    # Depth and steps
    for name, count, schedule in (
        *((f"depth {count}", count, schedules.Grouped) for count in (1, 2, 3, 6)),
        ("Interleaved depth", 3, schedules.Interleaved),
    ):
        arguments = {steps: count, "pipeline_schedule": schedule}
        changed(name, failed, arguments, steps=2 * count, steps_per_execution=count)
    arguments = {"device_mapping": [0, 0], "pipeline_schedule": schedules.Interleaved}
    changed("Interleaved, one IPU", NotImplementedError, arguments)
    changed("steps per execution", (RuntimeError, ValueError), steps_per_execution=6)
    changed("steps per epoch", ValueError, steps=10)
    changed("steps unknown", ValueError, steps=None)
    for schedule, mode in (
        ("Sequential", "RecomputeThenBackpropagate"),
        ("Interleaved", "RecomputeAndBackpropagateInterleaved"),
    ):
        arguments = {"pipeline_schedule": schedules[schedule], "recomputation_mode": modes[mode]}
        changed(f"{mode}, {schedule}", unimplemented, arguments)
    # Arguments of set_gradient_accumulation_options
    refused(steps, (0, 1.0, "4"), ValueError, stages=1)
    refused(method, ("average",), ValueError, stages=1)
    for name in refused_by("set_gradient_accumulation_options"):
        refused(name, (1,), ValueError, stages=1)
    of_optimizer = params_of("ipu.optimizers.GradientAccumulationOptimizerV2")
    for name in (*(one.name + "s" for one in of_optimizer), "reduction_method"):
        refused(name, (None,), TypeError, stages=1)
    # Other options of a model
    infeed, replication = "set_infeed_queue_options", "set_replication_options"
    for name, option, keywords, error in (
        *((f"prefetch depth {n}", infeed, {"prefetch_depth": n}, ValueError) for n in (256, 1000, -1)),
        *((f"infeed {n}", infeed, {n: 1}, ValueError) for n in refused_by(infeed)),
        *(
            (
                f"metric reduction {value}",
                replication,
                {"replicated_metric_reduction_method": value},
                ValueError,
            )
            for value in ("AVERAGE", 1, None)
        ),
        ("replication keyword", replication, {"method": "MEAN"}, TypeError),
    ):
        changed(name, error, before=lambda model, o=option, k=keywords: getattr(model, o)(**k))
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = small_model()
    legal = {"set_pipeline_stage_assignment": dict(pipeline_stage_assignment=[])}
    for method, text in QUOTED["method"].items():
        if "**" not in text and hasattr(model, method):
            group.signature(method, getattr(model, method), params_in(text), legal.get(method, {}))
    group.add(f"{infeed}(3)", lambda: model.set_infeed_queue_options(3), TypeError)
    # Stages
    for name, change, error in (
        ("not a list", tuple, ValueError),
        ("too short", lambda a: a[1:], ValueError),
        ("unset", lambda a: _with(a, 0, None), ValueError),
        ("of numbers", lambda a: [0, 0, 1], ValueError),
        ("out of order", lambda a: a[::-1], ValueError),
        ("backwards", lambda a: _with(_with(a, 1, 1), 2, 0), ValueError),
        ("with a hole", lambda a: _with(_with(a, 1, 2), 2, 2), RuntimeError),
    ):
        changed(f"stages {name}", error, before=lambda model, c=change: _assign(model, c))
    changed("stages missing", TypeError, before=lambda model: model.set_pipeline_stage_assignment())
    # Data
    for name, feed, error in (
        ("int64 labels", make_data(labels=np.int64), failed),
        ("int64 images", make_data(images=np.int64), failed),
        ("uint16 images", make_data(images=np.uint16), failed),
        ("nothing beside the images", make_data().map(lambda x, y: ((x, x[:, :0]), y)), invalid),
        ("dynamic batch", make_data(remainder=False), ValueError),
        ("generator", (x for x in ()), ValueError),
        ("a data set that ends", make_data().take(5), (ProcessAborted, ValueError)),
        ("a data set that fails", make_data().map(_fails), ProcessAborted),
    ):
        changed(name, error, data=feed)
    # A layer that two stages use has its weights on one IPU.
    changed("a layer on two IPUs", unimplemented, model=_calls_a_layer_twice)
    group.add("a layer in two stages of one IPU", lambda: _on_one_ipu(ipu, _calls_a_layer_twice))
    # Order of calls
    changed("never configured", failed, configure=False)
    changed("never compiled", RuntimeError, compile=False)
    changed("outside of the scope", AttributeError, inside=False)
    changed("optimizer with its own minimize", ValueError, optimizer=_own_minimize())
    changed("eagerly", (RuntimeError, AttributeError), before=_eagerly)
    # The system
    changed("too few IPUs", ValueError, leaves={"auto_select_ipus": 1})
    for leaf, value, error in (
        ("io_tiles.num_io_tiles", 193, invalid),
        ("convolutions.poplar_options", {"availableMemoryProportions": "0.2"}, internal),
        ("convolutions.poplar_options", {"partialsType": "double"}, internal),
        ("matmuls.poplar_options", {"partialsType": "double"}, internal),
        ("compilation_poplar_options", {"opt.internalExchangeOptimisationTarget": "speed"}, internal),
    ):
        changed(f"{leaf} = {value}", error, leaves={leaf: value})
    changed("group of replicas", internal, leaves={_GROUP: 3}, stages=1)
    # Graphcore advises against it across IPUs, but never refuses it.
    group.add("distributed batch norm in a pipeline on one IPU", lambda: _on_one_ipu(ipu, small_model))
    # Data in remote memory on a machine without any
    for name, stages in (
        ("offload_weight_update_variables", 2),
        ("offload_weight_update_variables", 1),
        ("offload_activations", 2),
        ("offload_gradient_accumulation_buffers", 2),
    ):
        where = ", no pipeline" if stages == 1 else ""
        changed(
            f"{name} without remote memory{where}",
            failed,
            {name: True},
            stages=stages,
            before=lambda model: setattr(machine, "remote_memory", False),
        )
    for stages, make in ((2, Setting), (1, plain)):
        group.add(f"{stages} stage(s)", lambda m=make: m(ipu).fit())


_GROUP = "norms.experimental.distributed_batch_norm_replica_group_size"


def _on_one_ipu(ipu: Any, model: Callable[[], Any]) -> None:
    s = Setting(ipu, model=model)
    set_leaf(s.config, _GROUP, 2)
    s.arguments.update(
        device_mapping=[0, 0], pipeline_schedule=ipu.pipelining_ops.PipelineSchedule.Sequential
    )
    s.fit()


def _fails(images: Any, labels: Any) -> Any:
    return tf.debugging.check_numerics(images / 0, "no number"), labels


def _calls_a_layer_twice() -> Any:
    twice = [keras.layers.Conv2D(1, 3, padding="same", name="again")] * 2
    end = keras.layers.Flatten(name="flat"), keras.layers.Dense(3, name="last")
    return chain((4, 4, 1), *twice, *end, batch_size=2)


def _with(assignment: Any, index: int, stage: Any) -> Any:
    assignment[index].pipeline_stage = stage
    return assignment


def _assign(model: Any, change: Any) -> None:
    model.set_pipeline_stage_assignment(change(list(model.get_pipeline_stage_assignment())))


def _own_minimize() -> Any:
    class Own(keras.optimizers.SGD):
        def minimize(self, *args: Any, **kwargs: Any) -> Any:
            return super().minimize(*args, **kwargs)

    return Own()


def _eagerly(model: Any) -> None:
    model.compile("sgd", "mse", run_eagerly=True, steps_per_execution=1)
    model.fit(make_data(labels=np.float32), steps_per_epoch=8, verbose=0)
