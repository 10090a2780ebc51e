"""plan-splits --optimisations: each row is the planner's own prediction of the program with one change."""

import json
from dataclasses import replace

import pytest
from support.plans import plan_splits, refused

from ipucnn.errors import ConfigurationError
from ipucnn.hardware import get_system
from ipucnn.models.build import BuildOptions
from ipucnn.models.registry import get_model
from ipucnn.planning.cost.memory import FITS_BELOW, program_memory
from ipucnn.planning.cost.schedule import predict
from ipucnn.planning.graphs.extract import layer_graph
from ipucnn.planning.program import PlannedProgram, uniform
from ipucnn.planning.search import neighbours
from ipucnn.planning.search.neighbours import optimisations
from ipucnn.planning.search.planner import Planner

SYSTEM = get_system("pod16")
SETTINGS = PlannedProgram(
    gradient_accumulation_count=24,
    num_stages=4,
    schedule="Interleaved",
    recomputation=True,
    available_memory_proportion=uniform(0.3),
)
EARLY = ("encoder_block_2_conv1", "decoder_block_0_concat", "decoder_block_2_concat")


@pytest.fixture(scope="module")
def graph():
    record = get_model("unet")
    return layer_graph(record, BuildOptions(record.input_shape, 2))


def predicted(graph, splits, settings):
    fills = [memory.fill for memory in program_memory(graph, splits, settings, SYSTEM.ipu)]
    return max(fills), predict(graph, splits, settings, SYSTEM).images_per_s


def by_name(rows):
    return {row.name: row for row in rows}


def test_the_order_of_hints_does_not_change_the_rows(graph, monkeypatch):
    planner = Planner(graph, SYSTEM)
    expected = optimisations(planner, EARLY, SETTINGS)
    hints = neighbours.neighbours
    monkeypatch.setattr(neighbours, "neighbours", lambda *given: reversed(list(hints(*given))))
    assert optimisations(planner, EARLY, SETTINGS) == expected


def test_rows_are_predictions_with_one_setting_changed(graph):
    base, changed_rows = optimisations(Planner(graph, SYSTEM), EARLY, SETTINGS, loss_scaling=128)
    assert (base.predicted_fill, base.predicted_images_per_s) == pytest.approx(
        predicted(graph, EARLY, SETTINGS)
    )
    assert sorted({one.number for one in changed_rows}) == list(range(1, 12))
    rows = by_name(changed_rows)
    for name, changes in (
        ("reduced precision", {"precision": "32.32"}),
        ("16-bit partials", {"half_partials": False}),
        ("recomputation", {"recomputation": False}),
        ("convolution options", {"available_memory_proportion": uniform(0.6)}),
        ("schedule", {"schedule": "Grouped"}),
        ("offloaded optimizer state", {"optimizer_state_offloading": True}),
    ):
        outcome = rows[name].outcome
        expected = predicted(graph, EARLY, replace(SETTINGS, **changes))
        assert (outcome.predicted_fill, outcome.predicted_images_per_s) == pytest.approx(expected), name
    assert rows["loss scaling"].outcome == base and rows["loss scaling"].here == "128"
    assert rows["internal exchange"].outcome is None
    # The largest proportion with which a stage surely fits, else the smallest.
    fits = {
        share: [
            memory.fill < FITS_BELOW
            for memory in program_memory(
                graph, EARLY, replace(SETTINGS, available_memory_proportion=uniform(share)), SYSTEM.ipu
            )
        ]
        for share in (0.6, 0.3, 0.15)
    }
    shares = [next((s for s in fits if fits[s][stage]), 0.15) for stage in range(4)]
    assert rows["options of each stage"].instead == " ".join(f"{100 * share:g}" for share in shares) + "%"
    alone = replace(
        SETTINGS, num_stages=1, num_replicas=4, gradient_accumulation_count=6, recomputation=False
    )
    outcome = rows["pipelining"].outcome
    assert (outcome.predicted_fill, outcome.predicted_images_per_s) == pytest.approx(
        predicted(graph, (), alone)
    )


def test_rows_switch_settings_off_as_well_as_on(graph):
    other = replace(SETTINGS, half_partials=False, optimizer_state_offloading=True, schedule="Grouped")
    rows = by_name(optimisations(Planner(graph, SYSTEM), EARLY, other)[1])
    for name, present, instead in (
        ("16-bit partials", "off", "on"),
        ("offloaded optimizer state", "on", "off"),
        ("schedule", "Grouped", "Interleaved"),
        ("loss scaling", "none", "128"),
    ):
        assert (rows[name].here, rows[name].instead) == (present, instead)
    expected = predicted(graph, EARLY, replace(other, half_partials=True))
    assert rows["16-bit partials"].outcome.predicted_fill == pytest.approx(expected[0])


def test_proportions_of_each_stage(graph):
    shares = (0.6, 0.3, 0.15, 0.6)
    own_shares = replace(SETTINGS, available_memory_proportion=tuple(uniform(s)[0] for s in shares))
    _, rows = optimisations(Planner(graph, SYSTEM), EARLY, own_shares)
    row = by_name(rows)["options of each stage"]
    assert (row.here, row.instead) == ("60 30 15 60%", "60%")
    same = predicted(graph, EARLY, replace(SETTINGS, available_memory_proportion=uniform(0.6)))
    assert (row.outcome.predicted_fill, row.outcome.predicted_images_per_s) == pytest.approx(same)


@pytest.mark.parametrize(
    "changes",
    [{"num_stages": 1}, {"training": False}, {"schedule": "Sequential"}, {"device_mapping": (0, 1, 0, 1)}],
)
def test_only_training_pipelines_are_accepted(graph, changes):
    settings = replace(SETTINGS, **changes)
    with pytest.raises(ConfigurationError, match="training pipeline"):
        optimisations(Planner(graph, SYSTEM), EARLY if settings.num_stages > 1 else (), settings)


def test_optimisations_command_prints_its_table(run):
    out, _ = plan_splits(run, "unet", "--config", "unet@isbi2012-pod4", "--optimisations", columns=80)
    assert max(map(len, out.splitlines())) <= 80
    for word in ("pipelining", "not modelled", "does not fit", "70 30", "--loss-scaling", "predicted"):
        assert word in out
    assert "--recomputation on|off" in out and "micro-batches are accumulated" in " ".join(out.split())
    assert f"splits: {' '.join(EARLY)}" in " ".join(out.split()) and "the model knows one" not in out
    out, _ = plan_splits(run, "unet", "--config", "unet@isbi2012-pod4", "--optimisations", "--json")
    answer = json.loads(out)
    assert len(answer["optimisations"]) == 12 and len(answer["splits"]) == 3
    outcomes = [one["outcome"] for one in answer["optimisations"] if one["outcome"]]
    verdicts = {one["verdict"] for one in outcomes}
    assert "does not fit" in verdicts and len(verdicts) > 1
    for one in outcomes:
        if one["verdict"] == "does not fit":
            assert one["predicted_images_per_s"] is None
    assert answer["settings"]["num_stages"] == 4 and answer["predicted"]["predicted_fill"] > 0


@pytest.mark.parametrize(
    "args, error",
    [
        ("--ipus 4", "nothing says how many stages"),
        ("--stages 1", "training pipeline"),
        ("--stages 4 --save p.yml", "makes no plan"),
    ],
)
def test_optimisations_command_refuses_wrong_options(run, args, error):
    refused(run, 2, error, "", "unet --optimisations", args)
