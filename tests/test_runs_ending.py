"""Runs that end before their last weight update, and records for other tools: MLPerf's log, Weights & Biases."""

import json
import re
import sys
import types
from pathlib import Path

import pytest
from few_examples import tries
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import Refusal, check_refused
from support.trained_runs import report_of, rows, train

from ipucnn.config.resolve import resolve
from ipucnn.runs.early_end import early_end
from ipucnn.runs.writer import RunWriter
from ipucnn.sessions.host.session import HostPredictor

TRAIN = ("train", "toy_model", "--dataset", "digits", "--limit-train", 64, "--limit-eval", 64, "--seed", 1)


def state_of(folder):
    """Returns a run's results without its times."""
    files = {path.name: path.read_bytes() for path in sorted((folder / "checkpoints").iterdir())}
    return (folder / "metrics.jsonl").read_bytes(), files


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Trains six epochs; returns the run and the accuracy of each validation."""
    line = f"{' '.join(map(str, TRAIN[1:]))} --num-epochs 6"
    folder = train(tmp_path_factory.mktemp("whole") / "run", line, lightly=True)
    return folder, [row["accuracy"] for row in rows(folder, "validation")]


@pytest.mark.slow
def test_target_ends_the_run_at_the_first_validation_that_reaches_it(lightly, succeeds, tmp_path, whole):
    folder, accuracies = whole
    target = max(accuracies[:4])
    first = next(i for i, value in enumerate(accuracies) if value >= target)
    assert 0 < first < 5, accuracies
    flags = ("--num-epochs", 6, "--target-accuracy", target, "--run-dir", "ends")
    out, _ = succeeds(*TRAIN, *flags, "--keep-checkpoints", "all")
    assert "reached the target" in out and "time to train" in out
    ended = tmp_path / "ends"
    # So far the run equals the one without a target.
    lines = (folder / "metrics.jsonl").read_text()
    assert lines.startswith((ended / "metrics.jsonl").read_text())
    assert [row["accuracy"] for row in rows(ended, "validation")] == accuracies[: first + 1]
    target_of = report_of(ended)["target"]
    assert (
        target_of["reached"]
        and target_of["weight_updates"] == rows(ended, "validation")[-1]["weight_updates"]
    )
    assert 0 < target_of["time_to_train_s"] < report_of(ended)["measured"]["wall_s"]
    names = sorted(path.name for path in (ended / "checkpoints").iterdir())
    assert names[-1] == "last.npz" and len(names) == first + 3
    # It is finished; with a higher target it continues to the bytes of an uninterrupted run.
    _, err = succeeds("train", "toy_model", "--resume", "--run-dir", "ends")
    assert "nothing to continue" in err
    out, _ = succeeds("train", "toy_model", "--resume", "--run-dir", "ends", "--target-accuracy", "1")
    assert "was not reached" in out
    assert state_of(ended)[0] == state_of(folder)[0]
    for name in ("best.npz", "last.npz"):
        assert state_of(ended)[1][name] == state_of(folder)[1][name]
    assert report_of(ended)["target"] == {
        "accuracy": 1.0,
        "reached": False,
        "weight_updates": None,
        "time_to_train_s": None,
    }


@pytest.mark.parametrize("option, value, number", [("target-accuracy", 0.01, 0), ("early-stopping", 1, 1)])
def test_an_end_before_the_checkpoint_is_refused(lightly, run, succeeds, tmp_path, option, value, number):
    """A run whose configuration has such an end would not be repeated by it."""
    succeeds(*TRAIN, "--num-epochs", 3, "--learning-rate", "1e-30", "--run-dir", "run")
    path = tmp_path / "run" / "metrics.jsonl"
    lines, found = path.read_bytes(), rows(tmp_path / "run", "validation")
    code, _, err = run("train", "--resume", "--run-dir", "run", f"--{option}", value)
    accuracy = f"{found[0]['accuracy']:.4f}"
    reasons = (
        f"accuracy {accuracy} reached the target of 0.01",
        f"none of the last 1 validation was better than accuracy {accuracy}",
    )
    error = (
        f"--{option} {value} ends the run after weight update {found[number]['weight_updates']} "
        f"({reasons[number]}), and run/checkpoints/last.npz has {found[2]['weight_updates']}"
    )
    hint = "drop it to continue that run as it was, or drop --resume and give another --run-dir"
    assert (code, err.splitlines()[-2:]) == (2, [f"error: {error}", f"hint: {hint}"])
    assert path.read_bytes() == lines
    for same in (
        [],
        ["--checkpoint-dir", "run/checkpoints"],
        ["--checkpoint-dir", path.parent / "checkpoints"],
    ):
        _, err = succeeds("train", "--resume", "--run-dir", "run", *same)
        assert "nothing to continue" in err
    given = ["--checkpoint-input-dir", "run/checkpoints", f"--{option}", value, "--run-dir", "new"]
    code, _, err = run(*TRAIN, "--num-epochs", 3, "--learning-rate", "1e-30", *given)
    hint = "drop it, or drop --checkpoint-input-dir, and begin with its weights: --weights run/checkpoints/last.npz"
    assert (code, err.splitlines()[-1]) == (2, f"hint: {hint}")
    # A report that is absent is written again, without figures that this process cannot know.
    (tmp_path / "run" / "report.json").unlink()
    succeeds("train", "--resume", "--run-dir", "run")
    measured = report_of(tmp_path / "run")["measured"]
    assert (measured["images_per_s"], measured["flop_per_s"]) == (None, None)
    assert "throughput" not in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
def test_run_killed_at_its_target_ends_there_when_continued(
    lightly, run, succeeds, tmp_path, whole, monkeypatch
):
    _, accuracies = whole
    flags = ("--num-epochs", 6, "--target-accuracy", max(accuracies[:4]))

    class Killed(BaseException):
        """Raised instead of SIGKILL: nothing handles it."""

    writes = []
    write = RunWriter.write_checkpoint
    monkeypatch.setattr(
        RunWriter, "write_checkpoint", lambda self, *args: (writes.append(1), write(self, *args))[1]
    )
    succeeds(*TRAIN, *flags, "--run-dir", "once")
    expected, total = state_of(tmp_path / "once"), len(writes)
    for number in range(total - 1, total + 1):
        writes.clear()

        def dying(self, *args, number=number):
            path = write(self, *args)
            writes.append(1)
            if len(writes) == number:
                raise Killed
            return path

        name = f"killed-{number}"
        with monkeypatch.context() as patched:
            patched.setattr(RunWriter, "write_checkpoint", dying)
            with pytest.raises(Killed):
                run(*TRAIN, *flags, "--run-dir", name)
        succeeds("train", "toy_model", "--resume", "--run-dir", name)
        assert state_of(tmp_path / name) == expected, number
        assert report_of(tmp_path / name)["ended_early"] == report_of(tmp_path / "once")["ended_early"]


@pytest.mark.slow
def test_patience_ends_a_run_that_learns_nothing(lightly, succeeds, tmp_path):
    flags = ("--num-epochs", 9, "--learning-rate", "1e-30", "--early-stopping", 3, "--run-dir", "run")
    out, _ = succeeds(*TRAIN, *flags)
    assert "none of the last 3 validations was better" in out
    assert len(rows(tmp_path / "run", "validation")) == 4
    # More epochs alone change nothing; with more patience the run continues.
    _, err = succeeds("train", "toy_model", "--resume", "--run-dir", "run", "--num-epochs", 12)
    assert "nothing to continue" in err
    succeeds("train", "toy_model", "--resume", "--run-dir", "run", "--early-stopping", "5")
    assert len(rows(tmp_path / "run", "validation")) == 6


def test_exploding_validation_loss_is_warned_of_only_once(lightly, run, monkeypatch):
    losses = iter([22.9, 1_278_663_680.0, 5e9])
    figures = {"samples": 64.0, "accuracy": 0.1, "top5": 0.5}
    monkeypatch.setattr(HostPredictor, "evaluate", lambda *words: {**figures, "loss": next(losses)})
    code, _, err = run(*TRAIN, "--num-epochs", 3, "--run-dir", "run")
    (line,) = [line for line in err.splitlines() if line.startswith("warning: validation loss")]
    assert (
        code == 0 and "1.27866e+09, where equal probabilities have 2.30: training may have diverged" in line
    )
    assert "statistics" not in line  # toy_model has no batch norm


@tries(30, slow=100)
@given(
    st.lists(st.integers(0, 8).map(lambda n: n / 8), min_size=1, max_size=12),
    st.one_of(st.none(), st.integers(1, 8).map(lambda n: n / 8)),
    st.one_of(st.none(), st.integers(1, 6)),
)
def test_end_of_a_run_equals_a_naive_loop(figures, target, patience):
    """The run checks the condition after each validation, and ends at the first where it holds."""
    options = {"target_accuracy": target, "early_stopping": patience}
    config = resolve("train", options, model="toy_model").config
    history, ended = ['{"event": "execution", "weight_updates": 1}\n'], None
    for number, figure in enumerate(figures):
        row = {"event": "validation", "weight_updates": number, "accuracy": figure}
        history.append(json.dumps(row) + "\n")
        if early_end(history, config) is not None:
            ended = number
            break
    found = early_end(history, config)
    assert (None if found is None else found.weight_updates) == ended
    expected, best, waited = None, -1.0, 0
    for number, figure in enumerate(figures):
        waited = 0 if figure > best else waited + 1
        best = max(best, figure)
        if (target is not None and figure >= target) or (patience is not None and waited >= patience):
            expected = number
            break
    assert ended == expected


def test_mlperf_log_has_the_required_lines(lightly, succeeds, tmp_path, whole):
    """Lines follow the published grammar: mlperf_compliance's ``mlp_parser`` takes them, with these fields."""
    _, accuracies = whole
    target = max(accuracies[:4])
    flags = ("--num-epochs", 6, "--mlperf-logging", "--target-accuracy", target, "--run-dir", "run")
    succeeds(*TRAIN, *flags, "--optimizer", "lars", "--optimizer-params", "{}")
    text = (tmp_path / "run" / "mlperf.log").read_text()
    entries = []
    for line in text.splitlines():
        match = re.fullmatch(r":::MLLOG (\{.*\})", line)
        assert match, line
        entry = json.loads(match.group(1))
        assert list(entry) == ["namespace", "time_ms", "event_type", "key", "value", "metadata"]
        assert entry["event_type"] in ("POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END")
        assert isinstance(entry["time_ms"], int) and isinstance(entry["metadata"]["lineno"], int)
        assert entry["metadata"]["file"].startswith("ipucnn/runs/")
        entries.append(entry)
    keys = [entry["key"] for entry in entries]
    times = [entry["time_ms"] for entry in entries]
    assert times == sorted(times)
    assert keys[0] == "init_start" and keys.index("init_stop") < keys.index("run_start") < len(keys) - 1
    validations = rows(tmp_path / "run", "validation")
    block = ["block_start", "block_stop", "eval_start", "eval_accuracy", "eval_stop"]
    assert keys[keys.index("run_start") + 1 :] == [*block * len(validations), "run_stop"]
    scores = [entry["value"] for entry in entries if entry["key"] == "eval_accuracy"]
    assert scores == [row["accuracy"] for row in validations]
    # The run's time ends with the validation, before files are saved.
    assert [entry["key"] for entry in entries[-2:]] == ["eval_stop", "run_stop"]
    status = "success" if scores[-1] >= target else "aborted"
    assert entries[-1]["metadata"]["status"] == status
    settings = {entry["key"]: entry["value"] for entry in entries if entry["event_type"] == "POINT_IN_TIME"}
    assert settings["seed"] == 1 and settings["train_samples"] == 64 and settings["eval_samples"] == 64
    assert settings["opt_name"] == "lars" and settings["lars_opt_weight_decay"] == 1e-4
    assert settings["lars_opt_momentum"] == 0.9 and settings["global_batch_size"] == 32


class FakeWandb(types.ModuleType):
    """Has the library's interface (wandb.init, Run.log, Run.finish), and keeps its arguments."""

    class errors:
        class Error(Exception):
            pass

    def __init__(self, refuses=None):
        super().__init__("wandb")
        self.runs, self.refuses = [], refuses

    def Settings(self, *, disable_git):
        assert disable_git
        return {"disable_git": True}

    def init(self, *, project, name, tags, id, resume, config, dir, settings):
        # The library writes files before it notices the error.
        folder = Path(dir) / "wandb" / "run-1"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "debug.log").write_text("")
        if self.refuses is not None:
            raise self.refuses
        run = types.SimpleNamespace(
            name=name, tags=tags, id=id, config=config, dir=dir, points=[], exit_code=None
        )
        run.log = lambda values, step: run.points.append((step, values))
        run.finish = lambda exit_code: setattr(run, "exit_code", exit_code)
        self.runs.append(run)
        return run


def test_weights_and_biases_gets_the_tensorboard_values(lightly, succeeds, tmp_path, monkeypatch):
    library = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", library)
    named = ("--wandb-run-name", "a run", "--wandb-tags", "one", "two")
    succeeds(*TRAIN, "--num-epochs", 2, "--wandb", *named, "--run-dir", "run")
    (first,) = library.runs
    assert (first.name, first.tags, first.exit_code) == ("a run", ["one", "two"], 0)
    assert first.config["model_name"] == "toy_model" and first.dir == "run"
    logged = {(step, name): value for step, values in first.points for name, value in values.items()}
    for row in rows(tmp_path / "run", "execution"):
        assert logged[row["weight_updates"], "train/loss"] == row["loss"]
    for row in rows(tmp_path / "run", "validation"):
        assert logged[row["weight_updates"], "validation/accuracy"] == row["accuracy"]
    # A continued run keeps its identity.
    succeeds("train", "toy_model", "--resume", "--run-dir", "run", "--num-epochs", 3)
    assert library.runs[1].id == first.id and len(first.id) == 16


@pytest.mark.slow
def test_real_weights_and_biases_library_works_offline(succeeds, tmp_path, monkeypatch):
    """The real library writes a file of its own with the run's name, tags and curves."""
    pytest.importorskip("wandb", reason="Weights & Biases is not installed: pip install 'ipucnn[wandb]'")
    # Its service would learn of the machine and of crashes; offline, nothing is sent.
    for name, value in (("MODE", "offline"), ("SILENT", "true"), ("ERROR_REPORTING", "false")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    named = ("--wandb-run-name", "a certain run", "--wandb-tags", "firsttag", "secondtag")
    succeeds(*TRAIN, "--num-epochs", 2, "--wandb", *named, "--run-dir", "run")
    (written,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    content = written.read_bytes()
    for text in ("a certain run", "firsttag", "secondtag", "train/loss", "validation/accuracy", "toy_model"):
        assert text.encode() in content, text


@pytest.mark.slow
def test_missing_weights_and_biases_requirements_are_reported(run, tmp_path, monkeypatch):
    command = [*TRAIN, "--wandb", "--run-dir", "run"]
    monkeypatch.setitem(sys.modules, "wandb", None)
    check_refused(run, Refusal(command, "", "pip install 'ipucnn[wandb]'", 6))
    refusal = FakeWandb.errors.Error("api_key not configured (no-tty)\nmore")
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(refusal))
    check_refused(run, Refusal(command, "api_key not configured (no-tty)", "WANDB_MODE=offline", 6))
    assert "more" not in run(*command)[2]
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(ValueError("tags: too long\nmore")))
    check_refused(run, Refusal([*command, "--wandb-tags", "t" * 65], "refuses a value: tags: too long"))
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(OSError(28, "No space left on device", "run/wandb")))
    check_refused(run, Refusal(command, "run/wandb: No space left on device", "free some space", 3))
    # Settings that somebody else may have put into the folder have no effect.
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nbase_url = http://127.0.0.1:9\n")
    check_refused(run, Refusal(command, "wandb/settings"))
