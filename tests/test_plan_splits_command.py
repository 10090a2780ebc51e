"""The command ``ipucnn plan-splits``, and the runs that use its plans."""

import io
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from few_examples import tries
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.plans import plan, plan_splits, refused
from support.refusals import Refusal, check_refused

from ipucnn.config.options import SPECS, RunConfig
from ipucnn.config.resolve import resolve
from ipucnn.models.build import BuildOptions, build_model
from ipucnn.models.registry import get_model
from ipucnn.planning.cost.memory import published_at
from ipucnn.planning.pipeline_plan import ParetoRow, PipelinePlan
from ipucnn.planning.program import uniform
from ipucnn.planning.question import make_question
from ipucnn.planning.splits import choose_splits
from ipucnn.reports import units
from ipucnn.reports.console import plain_table, print_table
from ipucnn.reports.plan import print_plan
from ipucnn.reports.plan_text import command_line
from ipucnn.training.program import make_program

SMALL = "cifar_resnet8"
GROUPED = "--schedule Grouped"
# Data of its default data set aren't needed; the rest of its preset is.
FITTING = f"{SMALL} --stages 2 {GROUPED}"


def read_plan(name="plan.yml"):
    return PipelinePlan.from_yaml(Path(name).read_text(encoding="utf-8"), name)


def printed_line(out):
    return next(line for line in out.splitlines() if line.startswith("ipucnn train"))


@pytest.mark.slow
def test_fine_tuning_plan_needs_less_memory_than_a_training_plan(run):
    """Only the last convolution and the head are trained: stages before them have no backward pass."""
    Path("fine.yml").write_text(f"fine:\n  model-name: {SMALL}\n  weights: runs/before\n  freeze: backbone\n")
    words = f"--splits conv4_block1_layer1_conv_ds {GROUPED} --precision 16.16 --recomputation off"
    words += " --micro-batch-size 8 --gradient-accumulation-count 8 --optimizer sgd"
    words += ' --optimizer-params {"momentum":0.9} --no-optimizer-state-offloading'
    whole = plan(run, SMALL, words)
    fine = plan(run, "--config-path fine.yml --config fine", words)
    assert fine.predicted_tick_s == plan(run, SMALL, "--freeze backbone", words).predicted_tick_s
    for of_whole, of_fine in zip(whole.stages, fine.stages):
        assert of_fine.predicted_forward_s == of_whole.predicted_forward_s
        assert of_fine.predicted_backward_s < of_whole.predicted_backward_s
    first, last = fine.stages
    assert first.predicted_backward_s == 0 < last.predicted_backward_s
    for name in ("stash", "accumulators", "optimizer_state"):
        of_whole, of_fine = (each.ipus[0].predicted_memory_bytes[name] for each in (whole, fine))
        assert of_fine == 0 < of_whole, name
    assert "--freeze backbone" in command_line(fine) and "--freeze" not in command_line(whole)
    assert any("freeze backbone: " in text and "not trained" in text for text in fine.assumed)
    out, _ = plan_splits(run, SMALL, "--freeze backbone", words, "--html p.html --save-graph whole.json")
    sentence = "add --weights RUN, the run in which the frozen layers were trained"
    assert sentence in " ".join(out.split()) and sentence in Path("p.html").read_text()
    out, _ = plan_splits(run, SMALL, words, "--save-graph same.json")
    assert "--weights" not in out
    assert Path("whole.json").read_text() == Path("same.json").read_text()


def test_plan_as_json_text_page_and_file(run):
    batch = "--micro-batch-size 32 --global-batch-size 128"
    planned = plan(run, FITTING, batch)
    assert (planned.model, planned.num_stages, planned.planned, planned.optimal) == (SMALL, 2, True, True)
    assert (planned.settings.schedule, planned.settings.precision, planned.verdict) == (
        "Grouped",
        "16.16",
        "fits",
    )
    assert any("precision 16.16" in text for text in planned.assumed)
    assert [row.name for row in planned.comparison] == ["params"] and planned.comparison[0].ratio >= 1
    low, high = planned.predicted_images_per_s_band
    middle = planned.predicted_images_per_s
    assert high / middle == pytest.approx(middle / low) == pytest.approx(planned.predicted_band_factor)
    assert planned.published_fits == published_at(planned.predicted_fill)
    out, err = plan_splits(run, FITTING, batch, "--save plan.yml --html plan.html")
    assert "written: plan.yml" in err and "written: plan.html" in err
    assert read_plan() == planned
    page = Path("plan.html").read_text(encoding="utf-8")
    assert page.lstrip().lower().startswith("<!doctype html") and planned.splits[0] in page
    for text in (" ".join(out.split()), page):
        assert f"({low:,.0f} to {high:,.0f} in 80% of cases)" in text
        assert "80% of measurements" in text and "published configurations with " in text
    compared = plan(run, FITTING, batch, "--compare plan.yml equal-layers equal-blocks")
    rows = {row.name: row for row in compared.comparison}
    assert list(rows) == ["plan.yml", "equal-layers", "equal-blocks"]
    assert rows["plan.yml"].splits == planned.splits and rows["plan.yml"].ratio == pytest.approx(1)
    assert sorted(path.name for path in Path().iterdir()) == ["plan.html", "plan.yml"]


@pytest.mark.parametrize("columns", [80, 160, None])
def test_tables_keep_every_column_and_word(run, capsys, monkeypatch, columns):
    """Covers all tables at once, with the longest names and numbers that they can have."""
    planned = plan(run, FITTING, "--schedule Sequential")
    settings = replace(planned.settings, num_stages=16, schedule="Interleaved", recomputation=True)
    settings = replace(settings, micro_batch_size=1024, gradient_accumulation_count=65536, num_replicas=4096)
    row = ParetoRow(settings, ("a",), 65536, 1234567.8, 1.0, 1.14, "fits", True)
    long = "a_block_of_cells_that_has_quite_a_long_name"
    stage = replace(planned.stages[1], first_layer=long, last_layer="b" * 47, num_layers=1234)
    name = "Interleaved (preset with_an_uncommonly_long_name)"
    wide = replace(
        planned,
        stages=(planned.stages[0], stage),
        pareto=(row, replace(row, settings=replace(settings, half_partials=False))),
        comparison=(replace(planned.comparison[0], name=name, verdict="does not fit"),),
    )
    if columns:
        monkeypatch.setenv("COLUMNS", str(columns))
    print_plan(wide)
    out = capsys.readouterr().out.partition("to train with it")[0]
    assert max(map(len, out.splitlines())) <= (columns or 120)
    heads = "opens at, layers, MACs, params, forward, backward, stages, time, best, x best, "
    heads += "images/s, memory, IPUs, schedule, row, GA, repl., with, prop., "
    heads += f"{long}, with_an_uncommonly_long_name), 65536, 114%, Interleaved, does not fit"
    for text in (*heads.split(", "), "1,234,568"):
        assert re.search(rf"(?<!\S){re.escape(text)}(?!\S)", out), text
    # Rows can be distinguished in each part of a table.
    table = out.partition("best uses of the IPUs")[2]
    assert len(re.findall(r"^ +1 +65536 +16 +Interleaved", table, re.M)) == 1
    assert len(re.findall(r"^ +1  +\S", table, re.M)) == len(re.findall(r"^ +2  +\S", table, re.M)) in (1, 2)


@tries(15, slow=60)
@given(
    words=st.lists(
        st.lists(st.text("ab_", min_size=1, max_size=24), min_size=1, max_size=3), min_size=3, max_size=9
    ),
    wraps=st.lists(st.booleans(), min_size=9, max_size=9),
    width=st.integers(60, 160),
)
def test_tables_of_any_width_keep_every_word(words, wraps, width):
    out = Console(width=width, file=io.StringIO(), color_system=None)
    table = plain_table(padding=(0, 1, 0, 0))
    for number, wrap in enumerate(wraps[: len(words)]):
        table.add_column(f"head{number}", no_wrap=not wrap, overflow="fold")
    table.add_row(*(" ".join(cell if wrap else cell[:1]) for cell, wrap in zip(words, wraps)))
    print_table(out, table)
    lines = out.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    shown = " ".join(lines).split()
    for number, (cell, wrap) in enumerate(zip(words, wraps)):
        assert {f"head{number}", *(cell if wrap else cell[:1])} <= set(shown)


@pytest.mark.parametrize("columns", [80, None])
def test_the_report_fits_its_width(run, columns):
    words = f"{FITTING} --recomputation on --micro-batch-size 512"
    planned = plan(run, words)
    out, _ = plan_splits(run, words, columns=columns)
    table, _, paste = out.partition("to train with it")
    assert max(map(len, table.splitlines())) <= (columns or 120)
    for text in (
        "optimal: true",
        f"{planned.predicted_images_per_s:,.0f} images/s",
        "GB/s",
        "params",
        "fits",
    ):
        assert text in table
    assert units.percent(planned.predicted_fill) in table
    assert len(re.findall(r"^stage \d [-~=.0-9]+$", table, re.M)) == 2
    assert "--pipeline-splits " + " ".join(planned.splits) in printed_line(paste)
    assert "--recomputation" in printed_line(paste).split()
    # The letters of the memory bars are in proportion.
    for ipu in planned.ipus:
        (bar,) = re.findall(rf"^IPU {ipu.ipu} (\S+)\|", out, re.M)
        for name, size in ipu.predicted_memory_bytes.items():
            expected = len(bar) * size / ipu.capacity_bytes
            # Each has a letter; the largest gives those that the smallest have too many.
            is_largest = size == max(ipu.predicted_memory_bytes.values())
            assert bar.count(name[0]) == pytest.approx(expected, abs=6 if is_largest else 1.01), name
            assert (bar.count(name[0]) > 0) == (size > 0), name


def test_given_splits_are_judged(run):
    best = plan(run, FITTING, "--recomputation off")
    names = [layer.name for layer in best.profile]
    judged = plan(run, SMALL, GROUPED, "--splits", names[3], "--recomputation off")
    assert (judged.planned, judged.splits, judged.optimal) == (False, (names[3],), False)
    assert judged.gap == pytest.approx(judged.micro_batch_s / best.micro_batch_s - 1)
    assert judged.predicted_lower_bound_s == pytest.approx(best.micro_batch_s)
    assert {row.name: row for row in judged.comparison}["planned"].splits == best.splits
    same = plan(run, SMALL, GROUPED, "--pipeline-splits", *best.splits, "--recomputation off")
    assert same.optimal and same.gap == 0
    # Splits that do not fit are shown, and the command fails.
    words = f"{SMALL} {GROUPED} --splits {names[-1]} --micro-batch-size 20000"
    out, err = plan_splits(run, words, code=4)
    assert "does not fit" in out and "error: these splits do not fit: IPU 0" in err
    largest = re.search(r"--micro-batch-size (\d+)", err.splitlines()[-1]).group(1)
    plan_splits(run, FITTING, "--micro-batch-size", largest)
    out, _ = plan_splits(run, words, "--json", code=4)
    assert json.loads(out)["optimal"] is False


def hinted(args, hint):
    """Returns the commands of a hint with their verdict: ``args`` with options replaced, added or left out."""
    fits, _, uncertain = hint.partition("uncertain whether this would fit: ")
    fits = fits.partition("this would fit: ")[2] or hint.partition("use ")[2].partition(" in place")[0]
    assert fits or uncertain, hint
    verdicts = {"fits": fits.rstrip("; "), "uncertain": uncertain}
    ways = [(way, verdict) for verdict, text in verdicts.items() for way in text.split(", or ") if way]
    for way, verdict in ways:
        given, _, without = re.sub(r" \(\d+ IPUs\)", "", way).partition(" without ")
        changes = re.findall(r"(--[a-z-]+) (\S+)", given)
        gone = {name for name, _ in changes} | set(without.split(" and "))
        if "in place of the splits" in hint:
            gone |= {"--splits"}
        groups = ("", *(group for group in " ".join(["", *args]).split(" --") if group))
        kept = [group for group in groups if not group or f"--{group.split()[0]}" not in gone]
        yield " --".join(kept).split() + [word for change in changes for word in change], verdict


@pytest.mark.slow_cases(
    "--inference --stages 2 --micro-batch-size 20000",
    "--ipus 2 --micro-batch-size 20000 --global-batch-size 40000",
    "--splits conv2_block1_layer1_conv --micro-batch-size 4000 --device-mapping 0 1",
    "--stages 2 --ipus 2 --micro-batch-size 4000",
    "--stages 2 --micro-batch-size 4000 --gradient-accumulation-count 12 --schedule Grouped",
)
@pytest.mark.parametrize(
    "args",
    [
        "--stages 1 --micro-batch-size 8000 --recomputation off",
        "--stages 1 --micro-batch-size 4000 --gradient-accumulation-count 1",
        "--stages 2 --micro-batch-size 4000 --gradient-accumulation-count 12 --schedule Grouped",
        "--stages 2 --micro-batch-size 4000 --global-batch-size 16000 --schedule Grouped",
        "--stages 1 --num-replicas 4 --dbn-replica-group-size 2 --micro-batch-size 8000",
        "--ipus-per-replica 2 --schedule Sequential --micro-batch-size 8000 --recomputation off",
        "--device-mapping 0 1 --micro-batch-size 4000",
        "--stages 2 --ipus 2 --micro-batch-size 4000",
        "--stages 2 --num-replicas 3 --micro-batch-size 4000 --system pod16",
        "--stages 2 --available-memory-proportion 30 60 --micro-batch-size 4000",
        "--splits conv2_block1_layer1_conv --micro-batch-size 4000 --device-mapping 0 1",
        "--ipus 2 --micro-batch-size 20000 --global-batch-size 40000",
        "--inference --stages 2 --micro-batch-size 20000",
    ],
)
def test_hinted_commands_have_their_stated_verdict(run, args):
    check_hints(run, SMALL, args)


@pytest.mark.slow
def test_hint_says_when_it_is_uncertain_whether_a_plan_fits(run):
    hint = check_hints(run, "resnet50", "--stages 2 --micro-batch-size 32")
    assert "uncertain whether this would fit: --stages 3" in hint


def check_hints(run, model, args):
    """Runs the commands in the hint of a plan that does not fit, and compares the verdicts."""
    _, err = plan_splits(run, model, args, code=4)
    hint = err.splitlines()[-1]
    for command, verdict in hinted(args.split(), hint):
        ipus = plan(run, model, *command).ipus
        assert max(ipus, key=lambda ipu: ipu.predicted_fill).verdict == verdict, command
    return hint


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "--global-batch-size 67 --schedule Grouped --recomputation on",
        "--global-batch-size 64 --micro-batch-size 3",
        "--global-batch-size 67 --micro-batch-size 2",
    ],
)
def test_hint_for_a_batch_that_no_pipeline_has_names_batches_that_one_has(run, words):
    words = f"{SMALL} --ipus 4 {words}".split()
    code, _, err = run("plan-splits", *words)
    error, hint = err.splitlines()[-2:]
    assert (
        code == 2
        and error.startswith("error: --global-batch-size 6")
        and "in any configuration of 4 IPUs" in error
    )
    hints = re.findall(r"(--[\w-]+) (\d+)(?: or (\d+))?", hint)
    assert hints
    for option, *values in hints:
        for value in filter(None, values):
            place = words.index(option)
            assert run("plan-splits", *words[: place + 1], value, *words[place + 2 :])[0] == 0, (
                option,
                value,
            )


@pytest.mark.slow
def test_page_of_segments_does_not_speak_of_pipelines(run):
    words = "resnet50 --stages 8 --schedule Sequential --micro-batch-size 32 --device-mapping 0 0 0 0 0 0 0 0"
    plan_splits(run, words, "--html p.html")
    page = Path("p.html").read_text()
    assert "No split into 9 to 16 stages on one IPU fits." in page
    assert "Pipelines over several IPUs were not tried." in page and "up to 16 stages" not in page


@pytest.mark.slow
def test_hint_has_the_largest_micro_batches_that_fit(run):
    out, err = plan_splits(run, FITTING, "--micro-batch-size 20000 --json", code=4)
    why = json.loads(out)
    assert err.startswith("error: ") and why["feasible"] is False
    fits, uncertain = (int(n) for n in re.findall(r"--micro-batch-size (\d+)", err.splitlines()[1]))
    assert why["no_fit"]["largest_micro_batch_size"] == uncertain
    for size, verdict in ((fits, "fits"), (fits + 1, "uncertain"), (uncertain, "uncertain")):
        assert plan(run, FITTING, "--micro-batch-size", size).verdict == verdict
    plan_splits(run, FITTING, "--micro-batch-size", uncertain + 1, code=4)


@pytest.mark.slow
def test_search_tries_schedules_that_the_preset_does_not_name(run):
    # The preset's schedule is Interleaved.
    words = "unet --ipus 4 --global-batch-size 24"
    planned, typed = plan(run, words), plan(run, words, "--schedule Interleaved")
    assert planned.settings.schedule != "Interleaved" and typed.settings.schedule == "Interleaved"
    assert planned.predicted_images_per_s > typed.predicted_images_per_s


def test_splits_of_presets_are_compared(run):
    names = [layer.name for layer in plan(run, FITTING).profile]
    text = f"mine: {{pipeline-splits: [{names[5]}], micro-batch-size: 4, gradient-accumulation-count: 8}}\n"
    Path("configs.yml").write_text(text + "other: {model-name: lenet, pipeline-splits: [conv3]}\n")
    planned = plan(run, SMALL, "--config mine --config-path configs.yml")
    assert planned.num_stages == 2 and planned.planned
    assert (planned.settings.micro_batch_size, planned.settings.gradient_accumulation_count) == (4, 8)
    assert {row.name: row.splits for row in planned.comparison}["preset mine"] == (names[5],)
    out, err = plan_splits(run, FITTING, "--compare configs.yml")
    assert "mine" in out and "not for cifar_resnet8: other" in err


@pytest.mark.slow
def test_other_option_names_for_stages(run):
    two = plan(run, FITTING)
    assert plan(run, SMALL, "--ipus-per-replica 2", GROUPED).splits == two.splits
    segments = plan(run, SMALL, "--stages 2 --schedule Sequential")
    assert segments.settings.mapping == (0, 0) and segments.run_options()["device-mapping"] == [0, 0]
    two_ipus = plan(run, SMALL, "--ipus-per-replica 2 --schedule Sequential")
    assert two_ipus.settings.mapping == (0, 1)
    four = plan(run, FITTING, "--ipus 8")
    assert (four.settings.num_replicas, four.occupied_ipus) == (4, 8)
    assert plan(run, SMALL, "--stages 3").occupied_ipus == 4


@pytest.mark.slow
def test_input_size_is_that_of_the_data_set(run):
    from ipucnn.config.resolve import resolve
    from ipucnn.runs.setup import prepare

    def shape(*words):
        planned = plan(run, FITTING, *words)
        return planned.input_shape, planned.num_classes

    trained = prepare(resolve("train", {"dataset": "digits"}, model=SMALL), seed=0)
    assert shape() == ((32, 32, 3), 10)
    assert shape("--dataset digits") == (trained.input_shape, trained.source.info.num_classes)
    assert shape("--classes 7 --image-size 48") == ((48, 48, 3), 7)


def test_recomputation(run):
    words = f"{SMALL} --stages 4 --micro-batch-size 16"
    on, off, auto = (plan(run, words, more) for more in ("--recomputation on", "--recomputation off", ""))
    assert on.settings.recomputation and not off.settings.recomputation
    assert auto.predicted_images_per_s == max(on.predicted_images_per_s, off.predicted_images_per_s)
    assert on.stages[-1].predicted_recompute_s == 0 < on.stages[0].predicted_recompute_s


@pytest.mark.slow
def test_row_of_a_search_can_be_planned(run):
    """A printed row can be planned: the plan has the row's figures, and its command gives them again."""
    words = f"{SMALL} --ipus 4 --global-batch-size 256"
    out, _ = plan_splits(run, words)
    assert "Row 1 is the plan above. Add --row 2 to the command" in " ".join(out.split())
    table = out.partition("best uses of the IPUs")[2].partition("Row 1")[0]
    shown = {int(line.split()[0]): line for line in table.splitlines() if line[:5].strip().isdigit()}
    first = plan(run, words)
    rows = first.pareto
    assert first.settings.global_batch_size == 256 and max(row.occupied_ipus for row in rows) == 4
    assert first.predicted_images_per_s == max(row.predicted_images_per_s for row in rows)
    assert list(shown) == sorted(shown) and len(shown) == min(12, len(rows)) > 2
    for number in (1, 2, max(shown)):
        line, row, planned = shown[number], rows[number - 1], plan(run, words, "--row", number)
        assert [other.best for other in planned.pareto] == [i == number for i in range(1, len(rows) + 1)]
        assert f" {planned.predicted_images_per_s:,.0f} " in line
        assert line.endswith(units.percent(planned.predicted_fill))
        assert planned.splits == row.splits and planned.occupied_ipus == row.occupied_ipus
        assert planned.settings == row.settings
        # The printed command runs this program.
        typed = shlex.split(command_line(planned))
        assert typed[typed.index("--num-replicas") + 1] == str(row.settings.num_replicas)
    refused(run, 2, f"has {len(rows)} rows", f"--row 1 to --row {len(rows)}", words, "--row", len(rows) + 1)


@pytest.mark.slow
def test_table_always_shows_the_row_of_the_plan(run, capsys):
    planned = plan(run, SMALL, "--ipus 4 --global-batch-size 256 --row 2")
    row = replace(planned.pareto[0], occupied_ipus=4, best=False)
    rows = [replace(row, predicted_images_per_s=100.0 - i) for i in range(30)]
    for chosen, last in ((1, 12), (7, 12), (29, 11)):
        best = replace(rows[chosen - 1], best=True)
        print_plan(replace(planned, pareto=(*rows[: chosen - 1], best, *rows[chosen:])))
        out = capsys.readouterr().out
        table, _, after = out.partition("best uses of the IPUs")[2].partition("Row ")
        shown = [int(line[:5]) for line in table.splitlines() if line[:5].strip().isdigit()]
        assert shown == sorted({*range(1, last + 1), chosen})
        assert after.startswith(f"{chosen} is the plan above.")
        assert "leaves out 18 of 30 rows" in " ".join(after.split())


UNTYPED = {"half partials off", "optimizer state offloading on", "8-bit transfer off"}


@pytest.mark.parametrize(
    ("args", "code", "error", "hint"),
    [
        ("--stages 2 --device-mapping 0 1 1", 2, "says 3 stages", "--stages 3"),
        ("--splits conv2_block1_add --device-mapping 0 1 1 0", 2, "names 4 stages", "give 2 numbers"),
        ("--device-mapping 0 1 1 0 --ipus-per-replica 4", 2, "uses 2 IPUs", "--ipus-per-replica 2"),
        ("--stages 2 --row 2", 2, "number of stages is given", "--ipus"),
        ("--stages 2 --optimisations --row 2", 2, "--row: ", "drop one"),
    ],
)
def test_user_mistakes_get_an_error_and_a_hint(run, args, code, error, hint):
    refused(run, code, error, hint, SMALL, args)
    assert list(Path().iterdir()) == []


BATCH = {"micro_batch_size": 4, "num_replicas": 1}
SWITCHES = {"half_partials": True, "optimizer_state_offloading": False, "eight_bit_transfer": True}


@pytest.mark.parametrize(
    ("flags", "asked", "assumed"),
    [
        ({}, {"stages": 2}, {"1 replica", *UNTYPED}),  # the preset has a micro-batch
        (BATCH, {"stages": 2}, UNTYPED),
        ({"micro_batch_size": 4, "ipus": 4}, {"stages": 2}, UNTYPED),
        ({**BATCH, **SWITCHES}, {"stages": 2}, set()),
        ({**BATCH, "precision": "32.32"}, {"stages": 2}, UNTYPED - {"half partials off"}),
        ({**BATCH, "device_mapping": "0 1"}, {}, {"schedule Grouped", *UNTYPED}),
        (
            BATCH,
            {"stages": 2, "inference": True},
            UNTYPED - {"optimizer state offloading on"} | {"schedule Grouped"},
        ),
        ({"ipus": 2}, {}, set()),
        ({"ipus": 2}, {"inference": True}, {"schedule Grouped"}),
    ],
)
def test_every_setting_that_nobody_gave_is_named_once(flags, asked, assumed):
    """Those that are searched are open, so nothing is assumed about them; a search has one mapping of them."""
    question = make_question(resolve("plan-splits", flags, model="toy_model", reads_data=False), **asked)
    kinds = ("micro-batch ", "replica", "schedule", "half partials", "optimizer state", "8-bit")
    named = [text for text in question.assumed if text.startswith(kinds) or text.endswith("replica")]
    assert sorted(named) == sorted(assumed)
    assert question.space is None or question.space.values == question.values


# Training with plans


TRAIN = "--dataset digits --limit-train 32 --limit-eval 16 --epochs 1 --seed 1"


def train(run, *args):
    code, _, err = run("train", *" ".join([*args, TRAIN]).split())
    return code, err


def program(folder="lenet-digits"):
    return json.loads((Path("runs") / folder / "program.json").read_text())


@pytest.mark.slow
def test_plan_sets_the_pipeline_of_a_run_and_is_recorded(lightly, run):
    words = "lenet --stages 2 --micro-batch-size 2 --gradient-accumulation-count 8 --save plan.yml"
    plan_splits(run, words)
    planned = read_plan()
    code, err = train(run, "--plan plan.yml")
    assert code == 0, err
    assert "the plan was made for" not in err  # the images are resized to the plan's size
    saved = program()
    assert saved["pipeline_splits"] == list(planned.splits) and saved["splits_from"] == "plan plan.yml"
    assert (saved["micro_batch_size"], saved["gradient_accumulation_count"]) == (2, 8)
    config = yaml.safe_load(Path("runs/lenet-digits/config.yml").read_text())
    assert config["pipeline-splits"] == list(planned.splits)
    assert str(config["precision"]) == saved["precision"] == "16.16"
    code, err = train(run, "--plan plan.yml --resume --run-dir runs/lenet-digits")
    assert code == 0, err


@pytest.mark.slow
def test_pipeline_does_not_change_the_trained_weights(run):
    words = "lenet --micro-batch-size 2 --gradient-accumulation-count 8"
    more = "--image-size 12 --dataset digits --stages 2 --precision 32.32 --save plan.yml"
    plan_splits(run, words, more)
    assert train(run, words, "--run-dir plain")[0] == 0
    assert train(run, "--plan plan.yml --run-dir planned")[0] == 0
    plain, planned = ((Path(name) / "metrics.jsonl").read_text() for name in ("plain", "planned"))
    assert plain == planned


@pytest.mark.slow
def test_planner_chooses_splits_that_are_left_open(lightly, run):
    words = "lenet --micro-batch-size 2 --gradient-accumulation-count 8 --ipus-per-replica 4"
    assert train(run, words)[0] == 0
    assert train(run, words, "--pipeline-splits auto")[0] == 0
    first, second = program(), program("lenet-digits-2")
    assert first["pipeline_splits"] == second["pipeline_splits"]
    assert first["splits_from"] == second["splits_from"] == "planned for IPU-POD16"
    assert len(first["pipeline_splits"]) == 3
    # The planner's answer for the same network
    known = "--dataset digits --image-size 12 --precision 32.32 --recomputation off --schedule Grouped"
    planned = plan(run, words, known, "--available-memory-proportion 60")
    assert list(planned.splits) == first["pipeline_splits"]


@pytest.mark.slow
def test_stages_have_their_own_proportions_unless_excluded(run):
    words = f"unet --stages 4 {GROUPED} --micro-batch-size 1"
    open_ = plan(run, words)
    shares = [share.convolution for share in open_.settings.available_memory_proportion]
    assert len(set(shares)) > 1 and set(shares) <= {0.6, 0.3, 0.15}
    one = plan(run, words, "--no-stage-proportions")
    assert not one.settings.proportions_differ
    assert open_.predicted_images_per_s > one.predicted_images_per_s * 1.001
    values = " ".join(f"{100 * share:g}" for share in shares)
    out, _ = plan_splits(run, words, "--save plan.yml")
    assert f"available memory proportion {values}%" in " ".join(out.split())
    assert f"--available-memory-proportion {values}" in command_line(open_)
    # A run gets them, and the same splits are judged with them.
    code, printed, _ = run("train", "--plan", "plan.yml", "--print-config")
    assert code == 0
    percentages = re.findall(r"\d+(?:\.\d+)?", printed[printed.index("available-memory-proportion") :])
    assert [float(value) for value in percentages[: len(shares)]] == [100 * share for share in shares]
    judged = plan(run, words, "--splits", *open_.splits)
    assert judged.settings.available_memory_proportion == open_.settings.available_memory_proportion
    # A typed value applies to all stages.
    typed = plan(run, words, "--available-memory-proportion 30")
    assert typed.settings.available_memory_proportion == uniform(0.3)


def test_splits_are_chosen_even_if_no_ipu_can_hold_them():
    record = get_model("toy_model")
    model = build_model(record, BuildOptions(input_shape=record.input_shape, num_classes=10))
    config = RunConfig(micro_batch_size=100000, gradient_accumulation_count=4, ipus_per_replica=2)
    splits, origin = choose_splits(model, "toy_model", make_program(config, 1000000, seed=0), config)
    assert len(splits) == 1 and origin == "planned for IPU-POD16, whose memory they exceed"


@pytest.mark.parametrize(
    ("args", "code", "error"),
    [
        ("resnet18 --plan plan.yml", 2, "is for lenet, but the network is resnet18"),
        ("--plan broken.yml", 3, "is damaged: Object missing required field `predicted_tick_s`"),
        ("--plan .", 3, ". is a folder"),
    ],
)
def test_unusable_plans_are_refused(run, args, code, error):
    plan_splits(run, "lenet --stages 2 --save plan.yml")
    text = Path("plan.yml").read_text(encoding="utf-8")
    Path("broken.yml").write_text(re.sub(r"\npredicted_tick_s: \S+", "", text))
    check_refused(run, Refusal(f"train {args} {TRAIN}", error, "", code))


@pytest.mark.parametrize(
    ("recomputation", "title"),
    [
        ("on", "lenet: 1 IPU, 2 recomputation segments, 4 replicas, "),
        ("off", "lenet: 2 stages on 4 IPUs in 4 replicas, "),
        (
            "on --splits conv3 --device-mapping 0 0 --schedule Grouped",
            "lenet: 2 stages on 4 IPUs in 4 replicas, ",
        ),
    ],
)
def test_stages_of_one_ipu_are_called_recomputation_segments(run, recomputation, title):
    words = "lenet --stages 2 --pipeline-schedule Sequential --replicas 4 --html plan.html"
    out, _ = plan_splits(run, words, "--recomputation", recomputation)
    assert out.startswith(title)
    assert f"<h1>{title}" in Path("plan.html").read_text(encoding="utf-8")


def test_documented_defaults_are_used(run):
    shown, _ = plan_splits(run, "--help-all", columns=200)
    documented = {spec.key: spec.plan_default for spec in SPECS if spec.plan_default}
    assert {"precision", "pipeline-schedule", "micro-batch-size"} <= set(documented)
    assert all(f"[default: {text}]" in shown for text in documented.values())
    words = f"{SMALL} --stages 2 --gradient-accumulation-count 8"
    planned = plan(run, words)
    assert planned.settings.precision == "16.16" and documented["precision"].endswith("else 16.16")
    speeds = {
        name: plan(run, words, "--schedule", name).predicted_images_per_s
        for name in ("Grouped", "Interleaved")
    }
    assert speeds[planned.settings.schedule] == max(speeds.values()) == planned.predicted_images_per_s
