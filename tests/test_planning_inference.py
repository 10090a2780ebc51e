"""Plans for inference, and for replicas that share batch norm statistics."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_simulator import simulate_stages
from support.plans import SYSTEM, home_graph, plan, plan_splits, refused, space
from support.refusals import Refusal, check_refused

from ipucnn.benchmarking.prediction import PredictionRequest, predict_ipu
from ipucnn.config.resolve import resolve
from ipucnn.planning.cost.layer_times import layer_times, transfers_s
from ipucnn.planning.cost.memory import program_memory
from ipucnn.planning.cost.schedule import predict
from ipucnn.planning.pipeline_plan import PipelinePlan
from ipucnn.planning.program import PlannedProgram, uniform
from ipucnn.planning.search.front import best_uses
from ipucnn.planning.search.planner import Planner
from ipucnn.training.program import make_program

MODEL = "cifar_resnet8"


@pytest.fixture(scope="module")
def planner():
    return Planner(home_graph(MODEL), SYSTEM)


@settings(max_examples=30)
@given(
    places=st.sets(st.integers(1, 20), max_size=3),
    steps=st.integers(1, 9),
    micro_batch=st.integers(1, 16),
    replicas=st.sampled_from([1, 2, 4]),
)
def test_throughput_and_latency_are_those_of_a_simulation(planner, places, steps, micro_batch, replicas):
    splits = planner.names((0, *sorted(places)))
    plan_options = PlannedProgram(micro_batch, steps, replicas, len(splits) + 1, training=False)
    prediction = predict(planner.graph, splits, plan_options, SYSTEM)
    cuts = [planner.graph.index(name) for name in splits]
    receive = [0.0, *transfers_s(planner.graph, cuts, plan_options, SYSTEM.ipu)]
    forward = [stage.forward_s for stage in prediction.stages]
    assert all(stage.backward_s == stage.recompute_s == 0 for stage in prediction.stages)
    fixed = prediction.tick_s - prediction.transfer_s - max(forward)
    simulation = simulate_stages(
        np.array(forward), np.zeros(len(forward)), np.array(receive), "Grouped", steps, False
    )
    seconds = simulation.total_s + simulation.num_ticks * fixed
    assert prediction.weight_update_s == pytest.approx(seconds, rel=1e-12)
    speed = micro_batch * steps * replicas / seconds
    assert prediction.images_per_s == pytest.approx(min(speed, prediction.host_limit_images_per_s), rel=1e-12)
    assert prediction.latency_s == pytest.approx(sum(forward) + sum(receive) + fixed, rel=1e-12)


def test_inference_memory_excludes_training_data(planner):
    splits = planner.names((0, 5, 9))
    many, one = (
        program_memory(planner.graph, splits, PlannedProgram(8, count, 1, 3, training=False), SYSTEM.ipu)
        for count in (64, 1)
    )
    trained = program_memory(planner.graph, splits, PlannedProgram(8, 12, 1, 3), SYSTEM.ipu)
    assert many == one  # independent of the number of micro-batches in flight
    for inference, other in zip(many, trained):
        assert inference.stash_bytes == inference.accumulators_bytes == inference.optimizer_state_bytes == 0
        assert inference.weights_bytes == other.weights_bytes and inference.fill < other.fill


def test_the_search_finds_the_fastest_and_the_shortest_latency(planner):
    """Compares it with every configuration of the grid, each planned by itself."""
    base = PlannedProgram(training=False)
    options = {"schedule": ("Grouped",), "available_memory_proportion": (uniform(0.6),)}
    best, rows = best_uses(planner, space(base, 4, (1, 4, 32), **options))
    tried = []
    for size in (1, 4, 32):
        for stages, counts in ((1, (1, 2, 4)), (2, (1, 2)), (4, (1,))):
            for replicas in counts:
                steps = 16 * stages
                plan_options = PlannedProgram(size, steps, replicas, stages, training=False)
                tried.append(planner.fastest_splits(plan_options, 0.8))
    assert all(candidate is not None for candidate in tried)
    fastest = max(candidate.prediction.images_per_s for candidate in tried)
    assert best.prediction.images_per_s == pytest.approx(fastest, rel=2e-3)
    latency = min(candidate.prediction.latency_s for candidate in tried)
    assert min(row.predicted_latency_s for row in rows) == pytest.approx(latency, rel=1e-9)
    assert {row.settings.micro_batch_size for row in rows} > {1}
    assert not any(row.settings.recomputation for row in rows)


def test_plan_splits_plans_inference(run):
    planned = plan(run, MODEL, "--inference", "--stages", 2, "--micro-batch-size", 8, "--save", "i.yml")
    assert not planned.settings.training and not planned.settings.recomputation
    assert all(stage.predicted_backward_s == stage.predicted_recompute_s == 0 for stage in planned.stages)
    assert not any(ipu.predicted_memory_bytes["stash"] for ipu in planned.ipus)
    splits = planned.splits
    judged = plan(run, MODEL, "--inference", "--splits", *splits, "--micro-batch-size", 8)
    assert judged.predicted_images_per_s == planned.predicted_images_per_s and judged.optimal
    out, _ = plan_splits(run, MODEL, "--inference", "--ipus", 4, "--micro-batch-size", 8)
    text = " ".join(out.split())
    assert "is better than another in throughput, latency" in text
    assert f"ipucnn benchmark {MODEL} --inference" in text and "recomp. " not in text
    # Training refuses a plan for inference.
    for more in ([], ["--print-config"]):
        line = ["train", "--plan", "i.yml", "--dataset", "digits", *more]
        check_refused(run, Refusal(line, "i.yml is a plan for inference"))
    assert sorted(path.name for path in Path().iterdir()) == ["i.yml"]


@pytest.mark.parametrize("steps", [None, 7])
def test_benchmark_predicts_the_figures_of_an_inference_plan(run, planner, steps):
    more = [] if steps is None else ["--steps-per-execution", steps]
    planned = plan(
        run, MODEL, "--inference", "--stages", 2, "--micro-batch-size", 8, "--num-replicas", 2, *more
    )
    text = planned.to_yaml()
    resolved = resolve(
        "benchmark",
        {"plan": "i.yml"},
        reads_data=False,
        read_plan=lambda path: PipelinePlan.from_yaml(text, "i.yml"),
    )
    config = resolved.config
    assert config.steps_per_execution == planned.settings.gradient_accumulation_count == (steps or 32)
    program = make_program(replace(config, steps_per_execution=None), 60000, seed=1)
    request = PredictionRequest(
        config, program, config.named_splits, training=False, steps=config.steps_per_execution
    )
    predicted = predict_ipu(planner.graph, request, config.precision)
    ratio = predicted.images_per_s / planned.predicted_images_per_s
    assert ratio == pytest.approx(1, rel=1e-9) or planned.bottleneck == "host"
    assert predicted.latency_s == pytest.approx(planned.predicted_latency_s, rel=1e-9)


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        ("--stages 2 --gradient-accumulation-count 8", "no weight updates", "--steps-per-execution"),
        ("--ipus 4 --global-batch-size 64", "has no weight updates", "--micro-batch-size"),
        ("--stages 1 --dbn-replica-group-size 2", "has no weight updates", "drop it"),
        ("--stages 2 --recomputation on", "computed again", "drop it"),
        ("--stages 2 --optimizer lars", "--optimizer lars: inference has no", "drop it"),
        ("--ipus 2 --optimizer-params {momentum:0.5}", "has no weight updates", "drop it"),
        ("--stages 2 --no-optimizer-state-offloading", "--no-optimizer-state-offloading: ", "drop"),
        ("--stages 2 --schedule Interleaved", "no backward passes", "--pipeline-schedule Grouped"),
        ("--stages 2 --optimisations", "--inference: --optimisations makes no plan", "drop"),
    ],
)
def test_options_incompatible_with_inference_are_refused(run, args, error, hint):
    refused(run, 2, error, hint, MODEL, "--inference", args)


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        ("--stages 2 --steps-per-execution 8", "an execution of training", "--inference"),
        ("--stages 2 --num-replicas 4 --dbn-replica-group-size 2", "needs a model on one IPU", "1"),
        ("--ipus 4 --dbn-replica-group-size 3", "does not divide", "--dbn-replica-group-size 1 or 2 or 4"),
    ],
)
def test_options_incompatible_with_training_are_refused(run, args, error, hint):
    refused(run, 2, error, hint, MODEL, args)


def test_shared_statistics_take_time_in_both_passes_of_each_norm(run, planner):
    args = [MODEL, "--stages", 1, "--num-replicas", 4, "--available-memory-proportion", 60]
    alone, shared = plan(run, *args), plan(run, *args, "--dbn-replica-group-size", 2)
    norms = sum(layer.op_class == "norm" for layer in planner.graph.layers)
    assert norms > 0 and shared.settings.dbn_replica_group_size == 2
    each_s = layer_times(planner.graph, shared.settings, SYSTEM.ipu).shared_s
    assert (each_s > 0).sum() == norms
    more = shared.predicted_tick_s - alone.predicted_tick_s
    assert more == pytest.approx(2 * each_s.sum(), rel=1e-9)
    assert shared.run_options()["dbn-replica-group-size"] == 2
    assert shared.predicted_fill == alone.predicted_fill


def test_search_with_shared_statistics_has_whole_groups_on_one_ipu_each(run):
    planned = plan(run, MODEL, "--ipus", 4, "--dbn-replica-group-size", 2, "--micro-batch-size", 8)
    assert {row.settings.num_ipus_per_replica for row in planned.pareto} == {1}
    assert {row.settings.num_replicas for row in planned.pareto} <= {2, 4}
    assert planned.settings.dbn_replica_group_size == 2
