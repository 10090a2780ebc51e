"""The scripts that measure: rows that survive a stop, tables, and intervals of medians."""

import csv
import json
import os
import random
import sys

import numpy as np
import pytest
from scipy import stats
from support.scripts import load_script


@pytest.fixture
def measuring(monkeypatch, tmp_path):
    module = load_script("benchmarks/measuring.py")
    monkeypatch.setattr(module, "KEPT", tmp_path / "kept")
    return module


def script(monkeypatch, measuring, name):
    """Returns a script that keeps its measurements where ``measuring`` does."""
    monkeypatch.setitem(sys.modules, "measuring", measuring)
    return load_script(f"benchmarks/{name}.py")


def interrupting(calls):
    """Returns a function that counts its calls, and is interrupted in the second one."""

    def measure(*key):
        calls.append(key)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return len(calls)

    return measure


def test_a_stopped_measurement_goes_on_with_the_next_result(measuring):
    calls = []
    measure = interrupting(calls)

    def everything(again=False):
        journal = measuring.Journal("m", again)
        return [journal.take((key, 1), lambda key=key: measure(key)) for key in "abc"]

    with pytest.raises(KeyboardInterrupt):
        everything()
    assert everything() == [1, 3, 4] and [key for (key,) in calls] == ["a", "b", "b", "c"]
    assert everything() == [1, 3, 4] and len(calls) == 4
    assert everything(again=True) == [5, 6, 7]


@pytest.mark.slow
def test_half_a_line_of_a_killed_process_is_measured_again(measuring):
    journal = measuring.Journal("m")
    journal.take(("a",), lambda: {"x": 1})
    whole = journal.path.read_text()
    for length in range(len(whole) - 1):
        journal.path.write_text(whole + whole[:length])
        assert measuring.Journal("m").take(("b",), lambda: 2) == 2
        after = measuring.Journal("m")
        assert after.take(("a",), lambda: None) == {"x": 1} and after.take(("b",), lambda: None) == 2


def test_other_sources_measure_anew(measuring, monkeypatch):
    assert measuring.Journal("m").take(("a",), lambda: 1) == 1
    monkeypatch.setattr(measuring, "sources_digest", lambda: "other")
    assert measuring.Journal("m").take(("a",), lambda: 2) == 2


def test_rows_of_other_keys_stay_in_the_table(measuring, tmp_path):
    path = tmp_path / "t.csv"
    how = {"command": "c", "revision": "r", "conditions": "x", "load": "1"}
    measuring.write_rows(
        path, [{"name": "a", "value": 1, **how}, {"name": "b", "value": 2, **how}], ("name",)
    )
    measuring.write_rows(path, [{"name": "b", "value": 3, "more": 4, **how}], ("name",))
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["name"], row["value"], row["more"]) for row in rows] == [("a", "1", ""), ("b", "3", "4")]
    assert list(rows[0])[-4:] == list(how)


@pytest.mark.parametrize("count", [1, 5, 6, 7, 9, 20, 51])
def test_the_interval_of_a_median_is_that_of_the_sign_test(measuring, count):
    values = list(np.random.RandomState(count).normal(size=count))
    result = measuring.median(values)
    assert result.value == np.median(values)
    ranks = [k for k in range(1, count) if 2 * stats.binom.cdf(k - 1, count, 0.5) <= 0.05]
    if not ranks:
        assert (result.lower, result.upper) == (None, None) and count < 6
        return
    ordered = sorted(values)
    assert (result.lower, result.upper) == (ordered[max(ranks) - 1], ordered[count - max(ranks)])


def test_a_stopped_suite_writes_its_rows_and_goes_on(measuring, monkeypatch, tmp_path):
    """A row that failed is in the table with its error; the second call continues in the same folder."""
    results = script(monkeypatch, measuring, "results")
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    lines = []

    def run_ipucnn(words, shows_errors):
        lines.append(words)
        folder = tmp_path / words[words.index("--run-dir") + 1]
        folder.mkdir(exist_ok=True)
        (folder / "suite.json").write_text("{}")
        status = ["done", "pending"] if len(lines) == 1 else ["done", "failed"]
        with open(folder / "suite.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, [*results.SUITE_COLUMNS, "command"])
            writer.writeheader()
            for name, state in zip("ab", status):
                error = "out of memory" * (state == "failed")
                writer.writerow({"id": name, "status": state, "error": error, "command": f"train {name}"})
        if len(lines) == 1:
            raise KeyboardInterrupt
        return measuring.Ended(4, 1.0, 1.0, 1.0, "", "")

    monkeypatch.setattr(measuring, "run_ipucnn", run_ipucnn)
    with pytest.raises(KeyboardInterrupt):
        results.run_suite("tiny", None, again=False)
    table = measuring.read_rows(tmp_path / "results" / "tiny.csv")
    assert [row["status"] for row in table] == ["done", "pending"]
    assert results.run_suite("tiny", None, again=False) == 4
    table = measuring.read_rows(tmp_path / "results" / "tiny.csv")
    assert [(row["status"], row["error"]) for row in table] == [("done", ""), ("failed", "out of memory")]
    assert ["--resume" in words for words in lines] == [False, True] and table[0]["revision"]


def test_a_stopped_comparison_of_sessions_goes_on_with_the_next_case(
    measuring, monkeypatch, tmp_path, capsys
):
    host_session = script(monkeypatch, measuring, "host_session")
    calls, chance = [], random.Random(1)

    class Side:
        """A side whose session is twice as fast as the others; the machine's speed changes from round to round."""

        num_parallel, fused = 2, 8

        def __init__(self, name, case, *others, root=None):
            calls.append((name, case.network))
            if len(calls) == 3:
                raise KeyboardInterrupt
            self.name, self.speed, self.rates = name, 2.0 if name == "session" else 1.0, []

        def measure(self):
            rate = (1.0, 3.0, 2.0)[len(self.rates) % 3] * self.speed * chance.uniform(0.99, 1.01)
            self.rates.append((rate, rate))

        def median(self):
            return measuring.median([wall for wall, _ in self.rates]).value

        def ask(self, number):
            return 0.1, 100.0

        def close(self):
            pass

    monkeypatch.setattr(host_session, "Side", Side)
    monkeypatch.setattr(host_session, "checkout", lambda revision: tmp_path)
    path = tmp_path / "t.csv"
    line = ["x", "--against", "HEAD", "--rounds", "9", "--micro-batch", "8", "--csv", str(path)]
    monkeypatch.setattr("sys.argv", line)
    with pytest.raises(KeyboardInterrupt):
        host_session.main()
    assert [row["side"] for row in measuring.read_rows(path)] == ["session", "session of HEAD"]
    host_session.main()
    rows = measuring.read_rows(path)
    names = list(dict.fromkeys(network for _, network in calls))
    assert len(rows) == 2 * len(names) and calls.count(("session", names[0])) == 1
    for row in rows[1::2]:
        assert float(row["ratio_lower"]) <= 2 <= float(row["ratio_upper"])
        assert float(row["ratio_upper"]) - float(row["ratio_lower"]) < 0.05
    assert "95 %" in capsys.readouterr().out


def test_another_revision_is_checked_out_once(measuring, monkeypatch):
    host_session = script(monkeypatch, measuring, "host_session")
    monkeypatch.setattr(host_session, "KEPT", measuring.KEPT)
    if not measuring.git("rev-parse", "HEAD"):
        pytest.skip("no repository")
    folder = host_session.checkout("HEAD")
    assert (folder / "benchmarks" / "host_session.py").is_file() and (folder / "ipucnn" / "cli.py").is_file()
    (folder / "mark").write_text("")
    assert (host_session.checkout("HEAD") / "mark").exists()


def test_a_stopped_comparison_of_processes_goes_on(measuring, monkeypatch, tmp_path):
    cluster = script(monkeypatch, measuring, "cluster")
    calls = []

    def train(name, workers, options, folder, launcher):
        calls.append(workers)
        if len(calls) == 2:
            raise KeyboardInterrupt
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("same" if workers < 4 else "other")
        sharing = None if workers == 1 else {"received_bytes": 2e6, "collective_s": 1.0}
        measured = {"images_per_s": 16.0, "train_s": 4.0, "sharing": sharing}
        return {"measured": measured, "program": {"global_batch_size": 8}, "processor_s": 3.0}

    monkeypatch.setattr(cluster, "train", train)
    path = tmp_path / "t.csv"
    line = ["--networks", "unet", "--csv", str(path)]
    with pytest.raises(KeyboardInterrupt):
        cluster.main(line)
    assert cluster.main(line) == 5 and calls == [1, 2, 2, 4]
    rows = measuring.read_rows(path)
    assert [row["bytes"] for row in rows] == ["reference", "the same", "1 differ: metrics.jsonl"]
    assert [row["share"] for row in rows] == ["", "0.25", "0.25"]


def test_a_stopped_comparison_of_pipelines_goes_on(measuring, monkeypatch, tmp_path, capsys):
    pipeline = script(monkeypatch, measuring, "input_pipeline")
    calls = []

    def measure_pairs(folder, rounds):
        calls.append(folder.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return {"ours": [3.0, 1.0, 2.0]}

    def measure(source, images, rounds, size, with_plain=True):
        return measure_pairs(source, rounds)

    monkeypatch.setattr(pipeline, "measure_pairs", measure_pairs)
    monkeypatch.setattr(pipeline, "measure", measure)
    monkeypatch.setattr("ipucnn.datasets.registry.choose_dataset", lambda name, folder, **_: folder)
    monkeypatch.setattr("ipucnn.datasets.registry.open_dataset", lambda folder: folder)
    path = tmp_path / "t.csv"
    line = ["--classes", str(tmp_path / "c"), "--pairs", str(tmp_path / "p"), "--csv", str(path)]
    with pytest.raises(KeyboardInterrupt):
        pipeline.main(line)
    assert pipeline.main(line) == 0 and calls == ["c", "p", "p"]
    rows = measuring.read_rows(path)
    assert [(row["kind"], row["ms_per_image"], row["most"]) for row in rows] == [
        ("classes", "2.0", "3.0"),
        ("pairs", "2.0", "3.0"),
    ]


@pytest.mark.slow
def test_wrong_inputs_that_are_accepted_are_counted(measuring, monkeypatch, tmp_path, capsys):
    """One wrong input of each kind is refused as it should be; an accepted one, a crash and a written file count."""
    refused = script(monkeypatch, measuring, "refused_inputs")
    wrong = refused.Case(["train", "lenett"])
    right = refused.Case(["models"], is_right=True)
    accepted = refused.Case(["models"])
    broken = refused.Case(["train", "lenet"])
    real = refused.run_here

    def run_here(words, folder, output, result):
        if words == ["train", "lenet"]:
            (folder / "half").write_text("x")
            output.write_text("Traceback (most recent call last)\n")
            result.write_text(json.dumps([1, True]))
            os._exit(0)
        real(words, folder, output, result)

    monkeypatch.setattr(refused, "run_here", run_here)
    monkeypatch.setattr(
        refused,
        "KINDS",
        {"good": lambda rng: [right, wrong], "bad": lambda rng: [accepted, broken]},
    )
    path = tmp_path / "t.csv"
    monkeypatch.setattr("sys.argv", ["x", "--only", "good", "bad", "--csv", str(path)])
    assert refused.main() == 5
    good, bad = measuring.read_rows(path)
    assert [good[rule] for rule in ("cases", *refused.RULES)] == ["2", *"000000"]
    assert [bad[rule] for rule in ("cases", *refused.RULES)] == ["2", *"221110"]
    assert "models" in capsys.readouterr().err


@pytest.mark.slow
def test_every_kind_begins_with_a_right_input(measuring, monkeypatch):
    refused = script(monkeypatch, measuring, "refused_inputs")
    for kind in ("command lines", "YAML", "folders", "images"):
        cases = list(refused.KINDS[kind](random.Random(1)))
        assert cases[0].is_right and len(cases) > 30
        for case in cases[1:]:
            if kind == "command lines" and case.words[-1].startswith("--micro-batch-size="):
                rules, printed = refused.broken_rules(case)
                assert not rules, printed


def test_a_process_is_measured(measuring):
    ended = measuring.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (ended.code, ended.stdout, ended.stderr) == (3, "out\n", "err\n") and ended.memory_mib > 0


@pytest.mark.parametrize(
    "flags, name",
    [("fpu avx avx2 avx512f", "AVX-512"), ("fpu avx avx2", "AVX2"), ("fpu sse2", ""), (None, "")],
)
def test_conditions_name_the_vector_instructions_of_the_processor(
    measuring, tmp_path, monkeypatch, flags, name
):
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"model name : x\nflags : {flags}\n")
    assert measuring.vector_instructions(tmp_path / "cpuinfo") == name
    monkeypatch.setattr(measuring, "vector_instructions", lambda: name)
    conditions = measuring.Provenance("c", ("numpy",)).columns()["conditions"]
    assert (f", {name}, " in conditions) == bool(name)
