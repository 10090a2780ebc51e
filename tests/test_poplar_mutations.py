"""Mutations of everything the session tells the SDK: the double refuses each that the SDK refuses.

Generated from the recorded facts: for every leaf of the configuration, a wrong name, wrong types and an illegal value;
for every call that the session makes (recorded while it trains a pipeline, trains without one, validates and is
distributed), an unknown keyword, a missing one, and a value of a wrong type or out of range for each argument.
"""

import contextlib
import dataclasses
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import pytest
import tensorflow as tf
from poplar_double import ProcessAborted, installed
from poplar_double.facts import FACTS
from tensorflow import keras

from ipucnn.config.options import RunConfig
from ipucnn.sessions.poplar.config import ROWS, Layout, make_ipu_config

Case = Tuple[str, Callable[[], Any], Tuple[type, ...]]

_WRONG = {
    "bool": [1, "true", None],
    "int": [1.0, "1", True, None, np.int32(1)],
    "float": [1, "1.0", None],
    "str": [1, None, b"x"],
    "dict": ["{}", None, [("a", "b")]],
}


def leaf_cases(ipu: Any) -> List[Case]:
    """Every leaf of IPUConfig: misspelt, of wrong types, its category assigned."""
    cases: List[Case] = []

    def assign(name: str, value: Any) -> Callable[[], None]:
        def change() -> None:
            node = ipu.config.IPUConfig()
            *categories, last = name.split(".")
            for category in categories:
                node = getattr(node, category)
            setattr(node, last, value)

        return change

    def read(name: str) -> Callable[[], None]:
        def look() -> None:
            node = ipu.config.IPUConfig()
            for part in name.split("."):
                node = getattr(node, part)

        return look

    for name, fact in FACTS["leaves"].items():
        cases.append((f"{name}: misspelt", assign(name + "s", fact["default"]), (ValueError,)))
        cases.append((f"{name}: misspelt reading", read(name + "s"), (ValueError,)))
        if "enum" in fact:
            members = list(FACTS["enums"][fact["enum"]])
            wrong: List[Any] = [members[0], FACTS["enums"][fact["enum"]][members[0]], None, True]
            illegal = lambda e=fact["enum"]: getattr(ipu.config, e)["NO_SUCH_MEMBER"]  # noqa: E731
            cases.append((f"{name}: unknown member", illegal, (KeyError,)))
        elif fact["type"] in _WRONG:
            wrong = _WRONG[fact["type"]]
        else:
            wrong = ["2", 2.0, None, [1.0], ("1",)]
        for value in wrong:
            cases.append((f"{name} = {value!r}", assign(name, value), (TypeError,)))
        if fact["type"] == "dict":
            for bad in ({"availableMemoryProportion": 0.2}, {1: "x"}, {"partialsType": True}):
                cases.append((f"{name} = {bad}", _configured(ipu, name, bad), (TypeError,)))
    for category in FACTS["categories"]:
        cases.append((f"{category}: assigned", assign(category, 1), (Exception,)))
    illegal_values = [
        ("auto_select_ipus", 3, tf.errors.FailedPreconditionError),
        ("auto_select_ipus", 64, tf.errors.FailedPreconditionError),
        ("select_ipus", [1, 1], ValueError),
        ("select_ipus", 99, tf.errors.InvalidArgumentError),
        ("device_connection.version", "ipu9", ValueError),
        ("io_tiles.place_ops_on_io_tiles", True, ValueError),
        ("norms.experimental.distributed_batch_norm_replica_group_size", 0, ValueError),
    ]
    for name, value, error in illegal_values:
        cases.append((f"{name} = {value}", _configured(ipu, name, value), (error,)))
    for kind in ("PRE_COMPILE", "NEVER"):
        member = ipu.config.DeviceConnectionType[kind]
        cases.append(
            (f"{kind}: no version", _configured(ipu, "device_connection.type", member), (ValueError,))
        )
    return cases


def _configured(ipu: Any, name: str, value: Any) -> Callable[[], None]:
    def configure() -> None:
        config = ipu.config.IPUConfig()
        node: Any = config
        *categories, last = name.split(".")
        for category in categories:
            node = getattr(node, category)
        setattr(node, last, value)
        config.configure_ipu_system()

    return configure


def _model(**options: Any) -> Any:
    inputs = keras.Input((4, 4, 1), batch_size=2, name="input")
    x = keras.layers.Conv2D(2, 3, name="first")(inputs)
    x = keras.layers.Flatten(name="flat")(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="last")(x), name="small")


def _data(labels: Any = np.int32, images: Any = np.float32, remainder: bool = True, count: int = 64) -> Any:
    arrays = np.zeros((count, 4, 4, 1), images), np.zeros(count, labels)
    return tf.data.Dataset.from_tensor_slices(arrays).batch(2, drop_remainder=remainder).repeat()


class Setting:
    """A model of two stages in a strategy's scope, ready to be trained; what a case changes, it changes before."""

    def __init__(self, ipu: Any, ipus: int = 2, stages: int = 2) -> None:
        self.ipu = ipu
        self.config = ipu.config.IPUConfig()
        self.config.auto_select_ipus = ipus
        self.arguments: Dict[str, Any] = dict(
            gradient_accumulation_steps_per_replica=4,
            device_mapping=[0, 1],
            gradient_accumulation_reduction_method="mean",
            pipeline_schedule=ipu.pipelining_ops.PipelineSchedule.Grouped,
        )
        self.stages = stages
        self.steps, self.steps_per_execution, self.epochs = 8, 4, 1
        self.data = _data()
        self.before: Callable[[Any], None] = lambda model: None
        self.optimizer: Any = "sgd"
        self.model: Callable[[], Any] = _model
        self.strategy: Callable[[], Any] = ipu.ipu_strategy.IPUStrategy
        self.fitting: Dict[str, Any] = {}
        self.predicting: Dict[str, Any] = {}
        self.configure = self.compile = self.inside = True

    def fit(self) -> Any:
        """Trains; returns the model."""
        if self.configure:
            self.config.configure_ipu_system()
        strategy = self.strategy()
        with strategy.scope() if self.inside else contextlib.nullcontext():
            model = self.model()
            if self.stages > 1:
                assignment = model.get_pipeline_stage_assignment()
                for i, entry in enumerate(assignment):
                    entry.pipeline_stage = int(i > 0)
                model.set_pipeline_stage_assignment(assignment)
                model.set_pipelining_options(**self.arguments)
            elif self.arguments:
                model.set_gradient_accumulation_options(**self.arguments)
            self.before(model)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            if self.compile:
                model.compile(self.optimizer, loss, steps_per_execution=self.steps_per_execution)
            keywords = dict(epochs=self.epochs, steps_per_epoch=self.steps, verbose=0, shuffle=False)
            model.fit(self.data, **{**keywords, **self.fitting})
            return model


def call_cases(ipu: Any) -> List[Case]:
    """Every call of the session: names, keywords, types, values, order."""
    cases: List[Case] = []
    grouped, options = ipu.pipelining_ops.PipelineSchedule.Grouped, ipu.pipelining_ops.PipelineStageOptions
    failed, internal = tf.errors.FailedPreconditionError, tf.errors.InternalError

    def setting(name: str, change: Callable[[Setting], Any], *errors: type, **kind: Any) -> None:
        def run() -> None:
            made = Setting(ipu, **kind)
            if kind.get("stages") == 1:
                made.arguments = dict(
                    gradient_accumulation_steps_per_replica=4, gradient_accumulation_reduction_method="mean"
                )
            change(made)
            made.fit()

        cases.append((name, run, errors))

    def argument(name: str, value: Any, *errors: type, **kind: Any) -> None:
        setting(f"{name} = {value!r}", lambda s: s.arguments.update({name: value}), *errors, **kind)

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
    for method in FACTS["model_methods"]:
        setting(f"{method}s", _option(method + "s"), AttributeError)
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
        ("int64 labels", _data(labels=np.int64), failed),
        ("int64 images", _data(images=np.int64), failed),
        ("uint16 images", _data(images=np.uint16), failed),
        ("dynamic batch", _data(remainder=False), ValueError),
        ("generator", (x for x in ()), ValueError),
        ("a data set that ends", _data().take(5), (ProcessAborted, ValueError)),
    ]
    for name, feed, error in feeds:
        errors = error if isinstance(error, tuple) else (error,)
        setting(name, lambda s, d=feed: setattr(s, "data", d), *errors)
    # Order of calls
    setting("never configured", lambda s: setattr(s, "configure", False), failed)
    setting("never compiled", lambda s: setattr(s, "compile", False), RuntimeError)
    setting("outside of the scope", lambda s: setattr(s, "inside", False), AttributeError)
    setting("optimizer with its own minimize", lambda s: setattr(s, "optimizer", _own_minimize()), ValueError)
    setting("eagerly", lambda s: setattr(s, "before", _eagerly), RuntimeError, AttributeError)
    # The system
    setting("too few IPUs", lambda s: setattr(s.config, "auto_select_ipus", 1), ValueError)
    system = [
        ("convolutions.poplar_options", {"availableMemoryProportions": "0.2"}, internal),
        ("convolutions.poplar_options", {"partialsType": "double"}, internal),
        ("matmuls.poplar_options", {"partialsType": "double"}, internal),
        ("compilation_poplar_options", {"opt.internalExchangeOptimisationTarget": "speed"}, internal),
        ("norms.experimental.distributed_batch_norm_replica_group_size", 2, tf.errors.UnimplementedError),
    ]
    for leaf, value, error in system:
        setting(f"{leaf} = {value}", lambda s, n=leaf, v=value: _set(s.config, n, v), error)
    setting(
        "group of replicas",
        lambda s: _set(s.config, "norms.experimental.distributed_batch_norm_replica_group_size", 3),
        internal,
        stages=1,
    )
    # Functions
    functions = [
        ("reset_ipu_seed", ipu.utils.reset_ipu_seed, dict(seed=1)),
        ("IPUStrategy", ipu.ipu_strategy.IPUStrategy, {}),
        ("PipelineStageOptions", options, {}),
        ("cross_replica_mean", ipu.cross_replica_ops.cross_replica_mean, dict(x=1.0)),
        (
            "normalise_image",
            ipu.image_ops.normalise_image,
            dict(image=1, channel_offsets=1, channel_scales=1),
        ),
    ]
    for name, function, keywords in functions:
        cases.append(
            (f"{name}: unknown keyword", lambda f=function, k=keywords: f(**k, surplus=1), (TypeError,))
        )
        for missing in keywords:
            kept = {k: v for k, v in keywords.items() if k != missing}
            cases.append((f"{name}: no {missing}", lambda f=function, k=kept: f(**k), (TypeError,)))
    for seed in (2**31, -(2**31) - 1):
        cases.append((f"seed {seed}", lambda v=seed: _seed(ipu, v), (tf.errors.InvalidArgumentError,)))
    for value in (1.5, "1", None, True):
        cases.append((f"seed {value!r}", lambda v=value: _seed(ipu, v), (TypeError,)))
    cases.append(("seed before the system", lambda: _early_seed(ipu), (failed,)))
    for name in ("convolution_options", "matmul_options", "slice_options"):
        for bad in ("x", [1], {"a": 1}, {1: "a"}):
            cases.append((f"stage {name} {bad!r}", lambda n=name, b=bad: options(**{n: b}), (TypeError,)))
    for missing in ("utilities", "pipelining", "strategy"):
        cases.append((f"ipu.{missing}", lambda n=missing: getattr(ipu, n), (AttributeError,)))
    return cases


def layer_cases() -> List[Case]:
    """The layers of the addons."""
    from ipu_tensorflow_addons.keras import layers

    return [
        ("Dropout: no rate", lambda: layers.Dropout(), (TypeError,)),
        (
            "GroupNormalization: channels",
            lambda: layers.GroupNormalization(3)(tf.zeros([1, 2, 2, 4])),
            (ValueError,),
        ),
        ("GroupNormalization: axis", lambda: layers.GroupNormalization(2, channels_axis=2), (ValueError,)),
        ("Dropout: misspelt", lambda: layers.Dropouts(0.1), (AttributeError,)),
    ]


def _depth(s: Setting, count: int, schedule: Any) -> None:
    s.arguments.update(gradient_accumulation_steps_per_replica=count, pipeline_schedule=schedule)
    s.steps, s.steps_per_execution = 2 * count, count


def _recompute(s: Setting, schedule: str, mode: str) -> None:
    ops = s.ipu.pipelining_ops
    s.config.allow_recompute = True
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
    model.fit(_data(labels=np.float32), steps_per_epoch=8, verbose=0)


def _set(config: Any, name: str, value: Any) -> None:
    *categories, last = name.split(".")
    for category in categories:
        config = getattr(config, category)
    setattr(config, last, value)


def _seed(ipu: Any, value: Any) -> None:
    ipu.config.IPUConfig().configure_ipu_system()
    ipu.utils.reset_ipu_seed(value)


def _early_seed(ipu: Any) -> None:
    ipu.config.reset_ipu_configuration()
    ipu.utils.reset_ipu_seed(1)


def test_every_mutation_is_refused():
    with installed() as machine:
        from tensorflow.python import ipu

        cases = leaf_cases(ipu) + call_cases(ipu) + layer_cases()
        accepted = []
        for name, run, errors in cases:
            machine.config = None
            try:
                run()
            except errors:
                continue
            except BaseException as error:
                accepted.append(f"{name}: {type(error).__name__}: {error}")
                continue
            accepted.append(f"{name}: accepted")
        assert not accepted, "\n".join(accepted)
        print(f"{len(cases)} mutations refused")
        assert len(cases) > 400


def test_what_is_mutated_is_legal_unchanged():
    """Without a mutation everything passes, so that a case fails for its own reason."""
    with installed():
        from tensorflow.python import ipu

        Setting(ipu).fit()
        plain = Setting(ipu, stages=1)
        plain.arguments = dict(
            gradient_accumulation_steps_per_replica=4, gradient_accumulation_reduction_method="mean"
        )
        plain.fit()


@pytest.mark.parametrize(
    "flags", ["--no_such_flag", "--show_progress_bar=maybe", "--synthetic_data_initializer=1"]
)
def test_wrong_flags_end_the_process(monkeypatch, flags):
    monkeypatch.setenv("TF_POPLAR_FLAGS", flags)
    with installed(), pytest.raises(ProcessAborted):
        from tensorflow.python import ipu

        ipu.config.IPUConfig().configure_ipu_system()


def test_every_row_of_the_table_names_a_leaf_and_options_that_exist():
    leaves, options = set(FACTS["leaves"]), {f.name for f in dataclasses.fields(RunConfig)}
    for row in ROWS:
        assert row.leaf in leaves and set(row.options) <= options, row.leaf
    assert len({row.leaf for row in ROWS}) == len(ROWS)


def test_every_option_that_only_an_ipu_acts_on_reaches_the_configuration():
    """Each option of the table, changed, changes its leaf."""
    changed = {
        "select_ipu": 3,
        "on_demand": False,
        "compile_only": True,
        "fp_exceptions": True,
        "stochastic_rounding": "ON",
        "half_partials": True,
        "gather_conv_output": True,
        "conv_dithering": True,
        "convolution_options": {"use128BitConvUnitLoad": True},
        "matmul_options": {"enableFastReduce": True},
        "internal_exchange_optimization_target": "memory",
        "deterministic_workers": "portable",
        "stable_norm": True,
        "max_cross_replica_buffer_size": 5,
        "max_reduce_many_buffer_size": 6,
        "min_remote_tensor_size": 7,
        "scheduling_algorithm": "LOOK_AHEAD",
    }
    with installed():
        from tensorflow.python import ipu

        default = make_ipu_config(ipu, RunConfig(), Layout(4)).to_dict()
        for name, value in changed.items():
            config = dataclasses.replace(RunConfig(), **{name: value})
            made = make_ipu_config(ipu, config, Layout(4)).to_dict()
            leaves = {row.leaf for row in ROWS if name in row.options}
            different = {leaf for leaf in made if made[leaf] != default[leaf]}
            assert different and different <= leaves, name
        layout = make_ipu_config(ipu, RunConfig(), Layout(8, 0.25, True, 2)).to_dict()
        assert layout["auto_select_ipus"] == 8 and layout["allow_recompute"]
        assert layout["convolutions.poplar_options"] == {"availableMemoryProportion": "0.25"}
