"""The options of a model, its data, and the order of the calls."""

from typing import Any, Callable

import numpy as np
import tensorflow as tf
from poplar_double import ProcessAborted
from poplar_double.facts import FACTS
from tensorflow import keras

from .cases import Group
from .setting import Setting, make_data, plain, small_model


def calls(machine: Any) -> Group:
    """Returns mutations of the options of a model, its stages and its data: names, keywords, types, values, order."""
    from tensorflow.python import ipu

    group = Group("options, stages and data of a model")
    grouped, options = ipu.pipelining_ops.PipelineSchedule.Grouped, ipu.pipelining_ops.PipelineStageOptions
    failed, internal = tf.errors.FailedPreconditionError, tf.errors.InternalError

    def setting(name: str, change: Callable[[Setting], Any], *errors: type, **kind: Any) -> None:
        def run() -> None:
            built = plain(ipu) if kind.get("stages") == 1 else Setting(ipu, **kind)
            change(built)
            built.fit()

        group.add(name, run, *errors)

    def argument(name: str, value: Any, *errors: type, **kind: Any) -> None:
        where = ", no pipeline" if kind else ""
        setting(f"{name} = {value!r}{where}", lambda s: s.arguments.update({name: value}), *errors, **kind)

    # set_pipelining_options
    for value in (0, -1, 1.0, "4", np.int64(4)):
        argument("gradient_accumulation_steps_per_replica", value, ValueError)
    for value in ((0, 1), [0.0, 1.0], "01", [0], [0, 1, 2], [0, 4]):
        argument("device_mapping", value, ValueError)
    for value in ("average", 1, True):
        argument("gradient_accumulation_reduction_method", value, ValueError)
    for value in ("Grouped", 0):
        argument("pipeline_schedule", value, TypeError)
    for value in ("Auto", 0):
        argument("recomputation_mode", value, TypeError)
    for side in ("forward", "backward"):
        name = f"{side}_propagation_stages_poplar_options"
        argument(name, options(), TypeError)
        argument(name, [{}, {}], TypeError)
        argument(name, [options()], ValueError)
        argument(name, [options(convolution_options={"availableMemoryProportion": "x"}), options()], internal)
        argument(name, [options(matmul_options={"partialType": "half"}), options()], internal)
    argument("weight_update_poplar_options", {}, TypeError)
    argument("continuous_weight_updates", True, NotImplementedError)
    setting(
        "sharding without offloading",
        lambda s: s.arguments.update(
            replicated_optimizer_state_sharding=True, offload_weight_update_variables=False
        ),
        ValueError,
    )
    for name in FACTS["forbidden_keywords"]["set_pipelining_options"]:
        if name not in ("device_mapping", "accumulate_outfeed"):  # arguments of their own
            argument(name, 1, ValueError)
    for name in FACTS["pipelining_keywords"]:
        argument(name + "s", None, TypeError)
    setting(
        "no accumulation",
        lambda s: s.arguments.pop("gradient_accumulation_steps_per_replica"),
        ValueError,
    )
    # Depth and steps
    for count in (1, 2, 3, 6):
        setting(f"depth {count}", lambda s, n=count: _depth(s, n, grouped), failed)
    setting(
        "Interleaved depth", lambda s: _depth(s, 3, ipu.pipelining_ops.PipelineSchedule.Interleaved), failed
    )
    setting(
        "Interleaved, one IPU",
        lambda s: s.arguments.update(
            device_mapping=[0, 0], pipeline_schedule=ipu.pipelining_ops.PipelineSchedule.Interleaved
        ),
        NotImplementedError,
    )
    setting("steps per execution", lambda s: setattr(s, "steps_per_execution", 6), RuntimeError, ValueError)
    setting("steps per epoch", lambda s: setattr(s, "steps", 10), ValueError)
    setting("steps unknown", lambda s: setattr(s, "steps", None), ValueError)
    for schedule, mode in (
        ("Sequential", "RecomputeThenBackpropagate"),
        ("Interleaved", "RecomputeAndBackpropagateInterleaved"),
    ):
        setting(
            f"{mode}, {schedule}",
            lambda s, p=(schedule, mode): _recompute(s, *p),
            tf.errors.UnimplementedError,
        )
    # set_gradient_accumulation_options
    for value in (0, 1.0, "4"):
        argument("gradient_accumulation_steps_per_replica", value, ValueError, stages=1)
    argument("gradient_accumulation_reduction_method", "average", ValueError, stages=1)
    for name in FACTS["forbidden_keywords"]["set_gradient_accumulation_options"]:
        argument(name, 1, ValueError, stages=1)
    for name in (*(k + "s" for k in FACTS["accumulation_keywords"]), "reduction_method"):
        argument(name, None, TypeError, stages=1)
    # Other options of a model
    for depth in (256, 1000, -1):
        setting(
            f"prefetch depth {depth}", _option("set_infeed_queue_options", prefetch_depth=depth), ValueError
        )
    for name in FACTS["forbidden_keywords"]["set_infeed_queue_options"]:
        setting(f"infeed {name}", _option("set_infeed_queue_options", **{name: 1}), ValueError)
    for name in FACTS["forbidden_keywords"]["set_outfeed_queue_options"]:
        setting(f"outfeed {name}", _option("set_outfeed_queue_options", **{name: 1}), ValueError)
    setting("outfeed unknown", _option("set_outfeed_queue_options", depth=1), TypeError)
    for value in ("AVERAGE", 1, None):
        change = _option("set_replication_options", replicated_metric_reduction_method=value)
        setting(f"metric reduction {value}", change, ValueError)
    setting("replication keyword", _option("set_replication_options", method="MEAN"), TypeError)
    setting("outfeed without depth", _option("set_outfeed_queue_options", buffer_depth=0), ValueError)
    setting(
        "sharding without offloading, no pipeline",
        lambda s: s.arguments.update(
            replicated_optimizer_state_sharding=True, offload_weight_update_variables=False
        ),
        ValueError,
        stages=1,
    )
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = small_model()
    legal = {"set_pipeline_stage_assignment": dict(pipeline_stage_assignment=[])}
    for method, params in FACTS["model_methods"].items():
        if not any("kind" in p for p in params):
            group.signature(method, getattr(model, method), params, legal.get(method, {}))
    for side in ("infeed", "outfeed"):
        method = f"set_{side}_queue_options"
        group.add(f"{method}(3)", lambda m=method: getattr(model, m)(3), TypeError)
    # Stages
    stage = [
        ("not a list", lambda a: tuple(a), ValueError),
        ("too short", lambda a: a[1:], ValueError),
        ("unset", lambda a: _with(a, 0, None), ValueError),
        ("of numbers", lambda a: [0, 0, 1], ValueError),
        ("out of order", lambda a: a[::-1], ValueError),
        ("backwards", lambda a: _with(_with(a, 1, 1), 2, 0), ValueError),
        ("with a hole", lambda a: _with(_with(a, 1, 2), 2, 2), RuntimeError),
    ]
    for name, change, error in stage:
        setting(f"stages {name}", lambda s, c=change: setattr(s, "before", lambda m: _assign(m, c)), error)
    setting("stages missing", lambda s: setattr(s, "before", _assign_nothing), TypeError)
    # Data
    feeds = [
        ("int64 labels", make_data(labels=np.int64), failed),
        ("int64 images", make_data(images=np.int64), failed),
        ("uint16 images", make_data(images=np.uint16), failed),
        (
            "nothing beside the images",
            make_data().map(lambda x, y: ((x, x[:, :0]), y)),
            tf.errors.InvalidArgumentError,
        ),
        ("dynamic batch", make_data(remainder=False), ValueError),
        ("generator", (x for x in ()), ValueError),
        ("a data set that ends", make_data().take(5), (ProcessAborted, ValueError)),
        ("a data set that fails", make_data().map(_fails), ProcessAborted),
    ]
    for name, feed, error in feeds:
        errors = error if isinstance(error, tuple) else (error,)
        setting(name, lambda s, d=feed: setattr(s, "data", d), *errors)
    # A layer that two stages use has its weights on one IPU.
    setting("a layer on two IPUs", _call_twice, tf.errors.UnimplementedError)
    group.allow("a layer in two stages of one IPU", lambda: _on_one_ipu(_call_twice(Setting(ipu))))
    # Order of calls
    setting("never configured", lambda s: setattr(s, "configure", False), failed)
    setting("never compiled", lambda s: setattr(s, "compile", False), RuntimeError)
    setting("outside of the scope", lambda s: setattr(s, "inside", False), AttributeError)
    setting("optimizer with its own minimize", lambda s: setattr(s, "optimizer", _own_minimize()), ValueError)
    setting("eagerly", lambda s: setattr(s, "before", _eagerly), RuntimeError, AttributeError)
    # The system
    setting("too few IPUs", lambda s: setattr(s.config, "auto_select_ipus", 1), ValueError)
    system = [
        ("io_tiles.num_io_tiles", 193, tf.errors.InvalidArgumentError),
        ("convolutions.poplar_options", {"availableMemoryProportions": "0.2"}, internal),
        ("convolutions.poplar_options", {"partialsType": "double"}, internal),
        ("matmuls.poplar_options", {"partialsType": "double"}, internal),
        ("compilation_poplar_options", {"opt.internalExchangeOptimisationTarget": "speed"}, internal),
    ]
    for leaf, value, error in system:
        setting(f"{leaf} = {value}", lambda s, n=leaf, v=value: _set(s.config, n, v), error)
    setting(
        "group of replicas",
        lambda s: _set(s.config, "norms.experimental.distributed_batch_norm_replica_group_size", 3),
        internal,
        stages=1,
    )
    # Graphcore advises against it across IPUs, but never refuses it.
    group.allow("distributed batch norm in a pipeline on one IPU", lambda: _on_one_ipu(Setting(ipu)))
    # Data in remote memory on a machine without any
    for name, kind in (
        ("offload_weight_update_variables", {}),
        ("offload_weight_update_variables", {"stages": 1}),
        ("offload_activations", {}),
        ("offload_gradient_accumulation_buffers", {}),
    ):
        where = ", no pipeline" if kind else ""
        setting(
            f"{name} without remote memory{where}", lambda s, n=name: _offload(machine, s, n), failed, **kind
        )
    for stages in (2, 1):
        group.allow(f"{stages} stage(s)", lambda n=stages: plain(ipu).fit() if n == 1 else Setting(ipu).fit())
    return group


def _on_one_ipu(s: Setting) -> None:
    _set(s.config, "norms.experimental.distributed_batch_norm_replica_group_size", 2)
    s.arguments.update(
        device_mapping=[0, 0], pipeline_schedule=s.ipu.pipelining_ops.PipelineSchedule.Sequential
    )
    s.fit()


def _fails(images: Any, labels: Any) -> Any:
    return tf.debugging.check_numerics(images / 0, "no number"), labels


def _call_twice(s: Setting) -> Setting:
    def model() -> Any:
        inputs = keras.Input(batch_shape=(2, 4, 4, 1), name="input")
        second = keras.layers.Conv2D(1, 3, padding="same", name="again")
        x = keras.layers.Flatten(name="flat")(second(second(inputs)))
        return keras.Model(inputs, keras.layers.Dense(3, name="last")(x), name="twice")

    s.model = model
    return s


def _offload(machine: Any, s: Setting, name: str) -> None:
    s.arguments[name] = True
    s.before = lambda model: setattr(machine, "remote_memory", False)


def _depth(s: Setting, count: int, schedule: Any) -> None:
    s.arguments.update(gradient_accumulation_steps_per_replica=count, pipeline_schedule=schedule)
    s.steps, s.steps_per_execution = 2 * count, count


def _recompute(s: Setting, schedule: str, mode: str) -> None:
    ops = s.ipu.pipelining_ops
    s.arguments.update(
        pipeline_schedule=ops.PipelineSchedule[schedule], recomputation_mode=ops.RecomputationMode[mode]
    )


def _option(method_: str, **keywords: Any) -> Callable[[Setting], None]:
    return lambda s: setattr(s, "before", lambda model: getattr(model, method_)(**keywords))


def _with(assignment: Any, index: int, stage: Any) -> Any:
    assignment[index].pipeline_stage = stage
    return assignment


def _assign(model: Any, change: Any) -> None:
    model.set_pipeline_stage_assignment(change(list(model.get_pipeline_stage_assignment())))


def _assign_nothing(model: Any) -> None:
    model.set_pipeline_stage_assignment()


def _own_minimize() -> Any:
    class Own(keras.optimizers.SGD):
        def minimize(self, *args: Any, **kwargs: Any) -> Any:
            return super().minimize(*args, **kwargs)

    return Own()


def _eagerly(model: Any) -> None:
    model.compile("sgd", "mse", run_eagerly=True, steps_per_execution=1)
    model.fit(make_data(labels=np.float32), steps_per_epoch=8, verbose=0)


def _set(config: Any, name: str, value: Any) -> None:
    *categories, last = name.split(".")
    for category in categories:
        config = getattr(config, category)
    setattr(config, last, value)
