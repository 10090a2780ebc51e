"""Every preset and every network x stages x schedules x replicas: configured, split, rightly refused; nothing runs.

Refusals are compared with the test double's own rules (the general formula over any device mapping), not with this
program's.
"""

import dataclasses
import gc
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf
from poplar_double import installed, rules
from poplar_double.config import ENUMS
from support.sessions import make_program as plain_program
from support.sessions import restart_names
from tensorflow import keras

from ipucnn.config.options import RunConfig
from ipucnn.config.presets import built_in_names
from ipucnn.config.resolve import resolve
from ipucnn.datasets.pixels import Transfer
from ipucnn.errors import ConfigurationError, MissingError
from ipucnn.models.blueprint import stages_by_layer
from ipucnn.models.build import BuildOptions, build_model
from ipucnn.models.registry import get_model, list_models
from ipucnn.planning.graphs.keras_graph import graph_of
from ipucnn.planning.splits import equal_layers
from ipucnn.sessions.group import Alone
from ipucnn.sessions.poplar.checks import check_program
from ipucnn.sessions.poplar.device import Exchange, Ipus, load_api
from ipucnn.sessions.poplar.model import TRAINING, build_network
from ipucnn.sessions.poplar.options import SystemLayout, make_ipu_config, pipelining_options
from ipucnn.training.program import make_program

STAGES, REPLICAS, SCHEDULES = (1, 2, 4), (1, 2, 4), ("Grouped", "Interleaved", "Sequential")
NUM_SAMPLES = 1_281_167


def all_layouts():
    return itertools.product(STAGES, SCHEDULES, REPLICAS)


def is_refused(config: RunConfig, stages: int, schedule: str, replicas: int) -> bool:
    """Whether the SDK (its depth rule from the device mapping) or the options themselves forbid a combination."""
    count = config.gradient_accumulation_count
    depth = rules.overlap_length(schedule, list(range(stages)), True) if stages > 1 else 1
    if count is not None and (count % depth or config.global_batch_size is not None):
        return True
    if config.dbn_replica_group_size > 1 and (stages > 1 or replicas % config.dbn_replica_group_size):
        return True
    if config.recomputation and stages == 1:
        return True
    return len(config.available_memory_proportion) not in (
        (0, 1, stages, 2 * stages) if stages > 1 else (0, 1)
    )


@pytest.mark.parametrize("preset", built_in_names())
def test_presets_are_legal_or_rightly_refused_in_every_layout(preset):
    """Each preset in every layout is a legal program and system configuration, or rightly refused."""
    name = preset.partition("@")[0]
    model = (
        name if name in {record.name for record in list_models()} else None
    )  # otherwise the preset names it
    resolved = resolve("train", {}, model=model, config_name=preset, reads_data=False)
    with installed(num_ipus=16):
        from tensorflow.python import ipu

        for stages, schedule, replicas in all_layouts():
            config = dataclasses.replace(
                resolved.config,
                ipus_per_replica=stages,
                pipeline_schedule=schedule,
                num_replicas=replicas,
                recomputation=stages > 1,
                pipeline_splits=(),
                device_mapping=None,
                # The legal weight updates per execution depend on the size of the data set.
                steps_per_execution=None,
            )
            refused = is_refused(config, stages, schedule, replicas)
            try:
                program = make_program(config, NUM_SAMPLES, seed=1)
                check_program(program, config)
            except ConfigurationError as error:
                assert refused and error.hint, (stages, schedule, replicas, error.message)
                continue
            assert not refused, (stages, schedule, replicas)
            ipu_config = make_ipu_config(
                ipu, config, SystemLayout(program.num_ipus, 0.2, program.recomputation)
            )
            ipu_config.configure_ipu_system()
            assert program.num_ipus == stages * replicas
            if stages > 1:
                _check_pipeline(ipu, program, config, ipu_config)


def _check_pipeline(ipu: Any, program: Any, config: Any, made: Any) -> None:
    """Checks that the test double's rules of ``pipeline()`` accept the session's settings."""
    options = pipelining_options(ipu, program, config, training=True)
    steps = options.pop("gradient_accumulation_steps_per_replica")
    mapping = options.pop("device_mapping")
    method = options.pop("gradient_accumulation_reduction_method")
    assert ENUMS["GradientAccumulationReductionMethod"].parse(method)
    extension = SimpleNamespace(
        pipelining=steps,
        device_mapping=mapping,
        pipelining_keywords=options,
        assignment=[
            SimpleNamespace(pipeline_stage=i, layer=SimpleNamespace(name=f"layer {i}", weights=["kernel"]))
            for i in range(program.num_stages)
        ],
    )
    machine = SimpleNamespace(sdk="3.4", config={"leaves": made._values, "ipus": program.num_ipus})
    rules.check_pipeline(machine, extension, True, program.steps_per_execution)
    assert program.steps_per_execution % steps == 0


PIPELINE = dict(num_stages=2, num_ipus=2, device_mapping=(0, 1), recomputation=True)
SHARING = dict(replicated_optimizer_state_sharding=True)


@pytest.mark.parametrize(
    ("sizes", "layout", "options", "wrong", "message"),
    [
        ((1, 4, 1), {**PIPELINE, "pipeline_schedule": "Sequential"}, {},
         {"recomputation_mode": "RecomputeThenBackpropagate"}, "RecomputeThenBackpropagate"),
        ((1, 4, 1), {**PIPELINE, "pipeline_schedule": "Interleaved"}, {},
         {"recomputation_mode": "RecomputeAndBackpropagateInterleaved"}, "RecomputeAndBackpropagateInterleaved"),
        ((1, 4, 2), {}, SHARING, {"optimizer_state_offloading": False}, "not offloaded"),
        ((1, 4, 2), {}, {}, {"validation_num_replicas": 4}, "hold 2"),
        ((1, 4, 3), {}, None, {}, "need 3 IPUs"),
        ((1, 4, 1), {"num_stages": 2, "device_mapping": (0, 0), "pipeline_schedule": "Interleaved"}, None, {},
         "Interleaved schedule cannot train several stages"),
    ],
)  # fmt: skip
def test_wrong_layouts_are_refused(sizes, layout, options, wrong, message):
    """Without the wrong options, a layout with legal options is accepted."""
    program, config = plain_program(*sizes, **layout), RunConfig(**(options or {}))
    if options is not None:
        check_program(program, config)
    with pytest.raises(ConfigurationError, match=message):
        check_program(program, dataclasses.replace(config, **wrong))


@pytest.mark.slow
@pytest.mark.parametrize("name", [record.name for record in list_models()])
def test_every_network_compiles_in_every_layout(name: str) -> None:
    """Builds it for IPUs, copies its weights, in 1, 2 and 4 stages; every schedule and number of replicas compiles."""
    record = get_model(name)
    restart_names()
    size = record.min_size
    shape = (size, size, record.input_shape[2])
    options = BuildOptions(shape, 10, base_filters=2 if name == "unet" else None)
    try:
        network = build_model(record, options)
    except MissingError as error:
        pytest.skip(error.message)
    graph = graph_of(network, name)
    config, num_programs = RunConfig(), 0
    for stages in STAGES:
        with installed() as machine:
            api = load_api()
            exchange = Exchange(api, Alone())
            splits = equal_layers(graph, stages) if stages > 1 else ()
            order = [layer.name for layer in network.layers]
            assert sorted(set(stages_by_layer(order, splits).values())) == list(range(stages))
            for schedule, replicas in itertools.product(SCHEDULES, REPLICAS):
                program = plain_program(
                    1,
                    2 * stages,
                    replicas,
                    updates_per_epoch=1,
                    num_stages=stages,
                    pipeline_splits=splits,
                    device_mapping=tuple(range(stages)),
                    ipus_per_replica=stages,
                    num_ipus=stages * replicas,
                    pipeline_schedule=schedule,
                )
                check_program(program, config)
                ipus = Ipus(api, exchange, config, Transfer("float32"), program.num_ipus, program)
                trained = build_network(ipus, network, TRAINING, 1, "training", program)
                with ipus.scope():
                    trained.model.compile(optimizer=keras.optimizers.SGD(), loss="mse")
                if stages > 1:
                    _check_stages(trained.model, network, splits)
                spec = tf.nest.map_structure(
                    lambda tensor: tf.TensorSpec(tensor.shape, tf.as_dtype(tensor.dtype)),
                    trained.model.inputs,
                )
                engine = trained.model._double.engine
                assert engine._compile("fit", program.steps_per_execution, spec) == replicas
            weights = {k: v.numpy() for k, v in trained.weights.items()}
            assert sum(v.size for v in weights.values()) == network.count_params()
            num_programs += len(machine.programs)
        del api, exchange, ipus, trained, engine, machine
        gc.collect()  # the weights of the largest network in all programs are 17 GB
    assert num_programs == len(list(all_layouts()))


def _check_stages(model: Any, network: Any, splits: Any) -> None:
    """Checks that a split opens its stage: every layer before it, in the network's order, runs in an earlier one."""
    stages = {entry.layer.name: entry.pipeline_stage for entry in model.get_pipeline_stage_assignment()}
    position = {layer.name: i for i, layer in enumerate(network.layers)}
    for name, stage in stages.items():
        if name in position:
            assert stage == sum(position[name] >= position[split] for split in splits), name
