"""A plan's settings reach the run that uses it, whatever the run's own preset says."""

import json
import re
import shlex
from dataclasses import fields, replace
from pathlib import Path
from unittest import mock

import pytest
import yaml
from few_examples import tries
from hypothesis import assume, given
from hypothesis import strategies as st
from support.plans import SYSTEM, home_graph, plan_splits, refused
from support.plans import plan as plan_of
from support.refusals import check_raises

from ipucnn.config.options import BY_KEY, BY_NAME, SPECS
from ipucnn.config.presets import Preset
from ipucnn.config.resolve import resolve
from ipucnn.errors import DataError
from ipucnn.events import show
from ipucnn.models.registry import get_model
from ipucnn.planning.cost.memory import program_memory
from ipucnn.planning.cost.schedule import predict
from ipucnn.planning.pipeline_plan import PipelinePlan
from ipucnn.planning.plan import assemble
from ipucnn.planning.program import Placement, PlannedProgram, differences, planned_program, uniform
from ipucnn.planning.question import make_question
from ipucnn.planning.search.planner import Planner
from ipucnn.planning.splits import plan_differences
from ipucnn.training.batching import overlap_length
from ipucnn.training.optimizer_settings import OPTIMIZERS
from ipucnn.training.program import make_program

MODEL = "cifar_resnet8"
TRAIN_IMAGES = 60000


@pytest.fixture(scope="module")
def planner():
    return Planner(home_graph(MODEL), SYSTEM)


def params_of(draw, optimizer):
    if optimizer in ("adam", "adamw"):
        return {"beta_1": draw(st.sampled_from([0.8, 0.9]))}
    return {"momentum": draw(st.sampled_from([0, 0.5, 0.9]))}


def some(draw, values):
    """Draws a part of the options."""
    return {name: value for name, value in values.items() if draw(st.booleans())}


def numeric(draw):
    """Draws options that decide a prediction and do not depend on the number of stages."""
    optimizer = draw(st.sampled_from(OPTIMIZERS))
    return {
        "precision": draw(st.sampled_from(["16.16", "16.32", "32.32"])),
        "optimizer": optimizer,
        "optimizer_params": params_of(draw, optimizer),
        "optimizer_state_offloading": draw(st.booleans()),
        "half_partials": draw(st.booleans()),
        "eight_bit_transfer": draw(st.booleans()),
        "micro_batch_size": draw(st.integers(1, 9)),
        "pipeline_schedule": draw(st.sampled_from(["Grouped", "Interleaved", "Sequential"])),
    }


@st.composite
def presets(draw):
    """Draws options that a plan's flags override."""
    options = some(draw, numeric(draw))
    if "optimizer_params" in options:
        options.setdefault("optimizer", "sgd")
        if options["optimizer"] in ("adam", "adamw"):
            options["optimizer_params"] = {"beta_1": 0.7}
        else:
            options["optimizer_params"] = {"momentum": 0.3}
    if draw(st.integers(0, 3)) == 0:
        options["matmul_options"] = {"enableFastReduce": True}
    return options


@st.composite
def presets_of_runs(draw):
    """Draws a preset of a run that has nothing to do with its plan."""
    options = draw(presets())
    options.update(some(draw, {"recomputation": True, "available_memory_proportion": (7.0,)}))
    options.update(some(draw, {"num_replicas": 2, "dbn_replica_group_size": 2}))
    options.update(
        draw(st.sampled_from([{}, {"global_batch_size": 96}, {"gradient_accumulation_count": 24}]))
    )
    stages = [
        {},
        {"pipeline_splits": ("conv2_block1_add",)},
        {"ipus_per_replica": 4},
        {"device_mapping": (0, 1, 1, 0)},
        {"pipeline_splits": ("conv2_block1_add",), "device_mapping": (0, 0)},
    ]
    options.update(draw(st.sampled_from(stages)))
    return options


@st.composite
def questions(draw):
    """Draws arguments of ``plan-splits``: a preset, typed flags, number of stages and recomputation."""
    stages = draw(st.sampled_from([1, 2, 3, 4]))
    replicas = draw(st.sampled_from([1, 2, 4]))
    below, typed = draw(presets()), some(draw, numeric(draw))
    if "optimizer_params" in typed:
        typed.setdefault("optimizer", "sgd")
        name = typed["optimizer"]
        typed["optimizer_params"] = {"beta_1": 0.7} if name in ("adam", "adamw") else {"momentum": 0.4}
    typed["num_replicas"] = replicas
    schedule = typed.get("pipeline_schedule", below.get("pipeline_schedule", "Grouped"))
    if draw(st.booleans()):
        base = overlap_length(schedule, stages)
        typed["gradient_accumulation_count"] = base * draw(st.integers(1, 4))
    if stages == 1 and draw(st.booleans()):
        typed["dbn_replica_group_size"] = replicas
    count = draw(st.sampled_from([0, 1] if stages == 1 else [0, 1, stages, 2 * stages]))
    shares = draw(st.lists(st.integers(1, 100), min_size=count, max_size=count))
    if shares:
        typed["available_memory_proportion"] = tuple(map(float, shares))
    for name in ("convolution_options", "matmul_options"):
        if draw(st.integers(0, 3)) == 0:
            below[name] = {"availableMemoryProportion": str(draw(st.integers(1, 9)) / 10)}
    flags = {}
    for name, value in typed.items():
        spec = BY_NAME[name]
        text = spec.yaml_value(value)
        flags[name] = json.dumps(text) if isinstance(text, dict) else text
    return below, flags, stages, draw(st.sampled_from(["auto", "on", "off"])), draw(st.integers(0, 10**6))


def resolve_over(preset, command, flags, **details):
    """Resolves a command line that names the preset."""
    named = Preset("other", "other.yml", preset)
    with mock.patch("ipucnn.config.presets.load_preset", lambda name, path: named):
        return resolve(command, flags, reads_data=False, **details)


def resolved_with(plan, command="train", preset=None, **flags):
    """Returns what a command with ``--plan q.yml`` and further flags resolves to, over another preset if given."""
    text = replace(plan, profile=()).to_yaml()  # the profile does not matter here
    flags, details = (
        {"plan": "q.yml", **flags},
        {"read_plan": lambda path: PipelinePlan.from_yaml(text, "q.yml")},
    )
    if preset is None:
        return resolve(command, flags, reads_data=False, **details)
    return resolve_over(preset, command, flags, **details)


def check_predictions(planner, candidate, splits, settings_of_run):
    """Checks that the planner predicts the same for a run's program and settings as for a candidate."""
    assert predict(planner.graph, splits, settings_of_run, SYSTEM) == candidate.prediction
    assert (
        tuple(program_memory(planner.graph, splits, settings_of_run, SYSTEM.ipu)) == candidate.forecast.ipus
    )


@tries(8, slow=2000)
@given(question=questions(), preset=presets_of_runs())
def test_run_of_a_plan_has_the_prediction_of_the_plan(planner, question, preset):
    below, flags, stages, recomputation, number = question
    planned = resolve_over(below, "plan-splits", flags, model=MODEL)
    request = make_question(planned, stages=stages, recomputation=recomputation)
    choices = [one for choice in request.choices() for one in choice.programs]
    choice = choices[number % len(choices)]
    assume(
        not (choice.placement is Placement.SEGMENTS and choice.proportions_differ)
    )  # the planner refuses them
    cuts = len(planner.starts) - 1
    places = sorted({1 + (number * k) % cuts for k in range(1, 4 * stages)})
    while len(places) < stages - 1:
        places = sorted({*places, max(places) % cuts + 1})
    splits = planner.names((0, *places[: stages - 1]))
    check_trained(planner, planner.judge(splits, choice, 1e9, quickly=True), request, preset)


def check_trained(planner, candidate, request, preset):
    plan = assemble(planner, candidate, planned=False, build=request.build, options=request.kept)
    resolved = resolved_with(plan, preset=preset)
    program = make_program(resolved.config, TRAIN_IMAGES, seed=1)
    settings_of_run = planned_program(resolved.config, program)
    assert settings_of_run == candidate.settings
    assert resolved.config.named_splits == plan.splits == candidate.splits
    check_predictions(planner, candidate, resolved.config.named_splits, settings_of_run)
    lines = plan_differences(resolved, program, plan.input_shape, plan.num_classes)
    assert not [line for line in lines if "the plan was made for" in line]
    # The printed command and its YAML have the same settings as the file.
    assert {BY_NAME[name].key for name in request.kept} <= set(plan.run_options())


# Network -> options of its layers that may change; each combination beyond the first few needs a build per example.
NETWORKS = {
    "lenet": {"image_size": "32", "dataset": "cifar10"},
    "mnist_cnn": {"dataset": "fashion_mnist"},
    "cifar_resnet8": {"norm_layer": "group_norm", "image_size": "40", "dataset": "cifar100"},
    "toy_model": {"image_size": "64"},
    "unet": {"base_filters": "16"},
    "resnet18": {},
    "resnet50": {"dataset": "imagenet"},
    "mobilenetv2": {},
    "efficientnet-b0": {},
    "efficientnet-b4-g16": {},
    "densenet121": {},
    "inceptionv3": {},
}


@st.composite
def whole_questions(draw):
    """Draws a network, flags, the share of the layers before each split, and whether it is inference."""
    name, inference = draw(st.sampled_from(sorted(NETWORKS))), draw(st.booleans())
    flags = {**some(draw, numeric(draw)), **some(draw, NETWORKS[name])}
    if flags.get("optimizer_params") is not None:
        flags["optimizer"] = "sgd"
        flags["optimizer_params"] = {"momentum": 0.4}
    if inference:
        for option in ("optimizer", "optimizer_params", "optimizer_state_offloading", "pipeline_schedule"):
            flags.pop(option, None)
        flags["steps_per_execution"] = str(draw(st.integers(1, 99)))
    cuts = draw(st.lists(st.floats(0, 1), min_size=1, max_size=3))
    flags["num_replicas"] = draw(st.sampled_from(["1", "2", "4"]))
    return name, flags, cuts, inference


@pytest.mark.slow
@tries(6, slow=60)
@given(question=whole_questions(), preset=presets_of_runs())
def test_plan_alone_restores_all_settings(question, preset):
    """Plan to run to plan, with no other argument: the same network, splits, settings and prediction."""
    name, flags, cuts, inference = question
    graph = home_graph(name)
    places = sorted({1 + round(cut * (len(graph.cuts) - 2)) for cut in cuts})
    flags = {key: _text_of(key, value) for key, value in flags.items()}
    flags["pipeline_splits"] = " ".join(graph.layers[graph.cuts[place]].name for place in places)
    first = _planned(name, flags, inference)
    other = {**preset, "image_size": (99, 99), "dataset": "mnist"}
    run = resolved_with(first, first.command.split()[0], other)
    assert run.config.dataset == flags.get("dataset", get_model(name).home_dataset)
    assert run.config.image_size == first.input_shape[:2]
    options = {BY_NAME[key].key for key in ("dataset", "image_size", "norm_layer")}
    assert options <= set(first.run_options())
    options_of_run = {BY_KEY[key].name: value for key, value in run.plan.run_options().items()}
    if inference:
        options_of_run.pop("dbn_replica_group_size")  # which plan-splits refuses there
    config = {key: BY_NAME[key].yaml_value(getattr(run.config, key)) for key in options_of_run}
    second = _planned(name, {key: _text_of(key, value) for key, value in config.items()}, inference)
    # Inference has no optimizer, and its plan has no optimizer options.
    ofs = {"optimizer_slots": 0, "optimizer_state_offloading": False} if inference else {}
    settings = [replace(plan.settings, **ofs) for plan in (second, first)]
    assert (settings[0], second.splits, second.build) == (settings[1], first.splits, first.build)
    assert (second.input_shape, second.num_classes) == (first.input_shape, first.num_classes)
    assert second.predicted_images_per_s == first.predicted_images_per_s
    assert second.ipus == first.ipus


def _text_of(name, value):
    """Returns a value as text of the command line."""
    if isinstance(value, dict):
        return json.dumps(value)
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value


def _planned(name, flags, inference):
    from ipucnn.planning.plan import make_plan

    planned = resolve("plan-splits", flags, model=name, reads_data=False)
    request = make_question(planned, inference=inference)
    return show(make_plan(request, (), lambda: None))


def test_every_setting_lists_the_options_that_decide_it():
    names = {spec.name for spec in SPECS}
    for setting in fields(PlannedProgram):
        options = setting.metadata["options"]
        assert set(options) <= names, setting.name
        # Only `training` is decided by the command itself.
        assert options or setting.name == "training"


@pytest.mark.parametrize("name", [setting.name for setting in fields(PlannedProgram)])
def test_run_reports_a_setting_that_differs_from_its_plan(name):
    settings_of_plan = PlannedProgram(gradient_accumulation_count=4, num_stages=2)
    texts = {"schedule": "Interleaved", "precision": "32.32", "device_mapping": (1, 0)}
    value = getattr(settings_of_plan, name)
    if name == "available_memory_proportion":
        value = uniform(0.25)
    elif name in texts:
        value = texts[name]
    else:
        value = not value if isinstance(value, bool) else value + 3
    (line,) = differences(settings_of_plan, replace(settings_of_plan, **{name: value}))
    assert re.fullmatch(r".+ \(here .+\)", line)
    assert differences(settings_of_plan, settings_of_plan) == []


def test_saved_plan_printed_command_and_printed_yaml_have_every_setting(run, report):
    typed = "--half-partials --no-optimizer-state-offloading --optimizer lars --eight-bit-transfer"
    typed += " --precision 16.32 --recomputation on --num-replicas 2"
    out, _ = plan_splits(run, f"{MODEL} --splits conv2_block1_add {typed} --save q.yml")
    command = next(line for line in out.splitlines() if line.startswith("ipucnn train"))
    text = out.partition("as YAML:")[2]
    Path("mine.yml").write_text(text)
    (name,) = yaml.safe_load(text)

    def options(*words):
        return report("train", *words, "--print-config")["options"]

    expected = PipelinePlan.from_yaml(Path("q.yml").read_text(encoding="utf-8"), "q.yml").run_options()
    assert expected["pipeline-splits"] == ["conv2_block1_add"] and expected["num-replicas"] == 2
    assert expected["optimizer-state-offloading"] is False and expected["optimizer"] == "lars"
    assert expected["eight-bit-transfer"] is expected["half-partials"] is expected["recomputation"] is True
    assert expected["precision"] == "16.32"
    ways = [["--plan", "q.yml"], shlex.split(command)[2:], ["--config", name, "--config-path", "mine.yml"]]
    for words in ways:
        values = options(*words)
        assert {key: values[key]["value"] for key in expected} == expected, words
    origins = {value["origin"] for key, value in options("--plan", "q.yml").items() if key in expected}
    assert origins == {"plan q.yml"}
    # Typed options override the plan.
    overridden = options("--plan", "q.yml", "--no-half-partials", "--optimizer", "sgd")
    assert overridden["half-partials"]["value"] is False and overridden["optimizer"]["value"] == "sgd"


def test_typed_data_set_is_saved_in_the_plan(run, report):
    args = [MODEL, "--dataset", "cifar10", "--stages", 2]
    out, _ = plan_splits(run, *args, "--save", "q.yml")
    assert " --dataset cifar10" in out

    def chosen(*more):
        return report("train", "--plan", "q.yml", *more, "--print-config")

    assert chosen()["options"]["dataset"] == {"value": "cifar10", "origin": "plan q.yml"}
    assert chosen()["preset"] == MODEL
    typed = chosen("--dataset", "digits")
    assert typed["options"]["dataset"]["value"] == "digits" and typed["preset"] == f"{MODEL}@digits"


def test_run_with_another_optimizer_differs_from_the_plan(planner):
    candidate = planner.judge(planner.names((0, 5)), PlannedProgram(num_stages=2), 1.0)
    plan = assemble(
        planner, candidate, planned=False, build={}, options={"optimizer": "sgd", "optimizer_params": {}}
    )
    resolved = resolved_with(plan, optimizer="adam", norm_layer="group_norm", gradient_accumulation_count=4)
    program = make_program(resolved.config, TRAIN_IMAGES, seed=1)
    (line,) = plan_differences(resolved, program, plan.input_shape, plan.num_classes)
    assert "norm-layer batch (here group)" in line
    assert "tensors of optimizer state per weight 1 (here 2)" in line


def test_one_stage_plan_replaces_the_pipeline_of_a_preset(planner):
    candidate = planner.judge((), PlannedProgram(), 1.0)
    plan = assemble(planner, candidate, planned=False, build={})
    preset = {
        "pipeline_splits": ("conv2_block1_add",),
        "recomputation": True,
        "pipeline_schedule": "Interleaved",
    }
    config = resolved_with(plan, preset=preset).config
    program = make_program(config, TRAIN_IMAGES, seed=1)
    assert (program.num_stages, config.named_splits, program.recomputation) == (1, (), False)


def test_options_that_no_plan_has_are_refused(planner):
    plan = assemble(planner, planner.judge((), PlannedProgram(), 1.0), planned=False, build={})
    data = {**plan.to_dict(), "options": {"optimiser": "sgd"}}
    check_raises(DataError, "unknown key 'optimiser'", "optimizer", PipelinePlan.from_dict, data, "q.yml")


# --- batches, schedules, hints, and saved files


def test_a_global_batch_below_the_smallest_is_refused(run):
    words = f"{MODEL} --ipus 16 --stages 4 --micro-batch-size 16 --global-batch-size"
    error = "--global-batch-size 7 is not possible: micro-batch 16 x 4 replicas x 8"
    refused(run, 2, error, "use --global-batch-size 512 or 1024", words, 7)
    for legal in (512, 1024):
        assert plan_of(run, words, legal).settings.gradient_accumulation_count == legal // 64


def test_changed_global_batch_is_a_warning(run):
    args = [MODEL, "--ipus", 16, "--stages", 4, "--global-batch-size", 100, "--micro-batch-size", 3]
    out, err = plan_splits(run, *args)
    assert err.startswith("warning: global batch size 100 is not a multiple of micro-batch 3 x 4 replicas")
    assert "using 96" in err and "global batch 96" in out


PRESET = f"{MODEL} --stages 4 --config mine --config-path configs.yml"


@pytest.mark.slow
def test_untyped_schedule_is_searched(run):
    preset = "mine: {pipeline-schedule: Interleaved, micro-batch-size: 8, gradient-accumulation-count: 24}\n"
    Path("configs.yml").write_text(preset)
    planned = plan_of(run, PRESET)
    grouped, interleaved = (plan_of(run, PRESET, "--schedule", s) for s in ("Grouped", "Interleaved"))
    fastest = max((grouped, interleaved), key=lambda each: each.predicted_images_per_s)
    assert planned.splits == fastest.splits and planned.settings == fastest.settings == grouped.settings
    row = {row.name: row for row in planned.comparison}["Interleaved (preset mine)"]
    assert row.splits == interleaved.splits
    assert row.predicted_images_per_s == interleaved.predicted_images_per_s < planned.predicted_images_per_s
    assert row.ratio == pytest.approx(interleaved.micro_batch_s / planned.micro_batch_s)
    assert not [row for each in (grouped, interleaved) for row in each.comparison if "(" in row.name]
    # The same for given splits
    judged = plan_of(run, PRESET, "--splits", *interleaved.splits)
    assert judged.settings.schedule == "Grouped" and judged.splits == interleaved.splits
    assert {row.name for row in judged.comparison} >= {"Interleaved (preset mine)", "planned"}


def test_typed_batch_is_legal_for_the_chosen_schedule(run):
    Path("configs.yml").write_text("mine: {pipeline-schedule: Interleaved, micro-batch-size: 8}\n")
    settings = plan_of(run, PRESET, "--gradient-accumulation-count 12").settings
    assert (settings.schedule, settings.gradient_accumulation_count) == ("Interleaved", 12)


@pytest.mark.slow
def test_search_saves_only_the_plan(run):
    planned = plan_of(run, MODEL, "--ipus 4 --save plan.yml")
    saved = PipelinePlan.from_yaml(Path("plan.yml").read_text(encoding="utf-8"), "plan.yml")
    assert planned.pareto and saved == replace(planned, pareto=())
