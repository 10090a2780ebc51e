"""A run that was cut anywhere, however, continues to the bytes of a run that was left alone."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from light_training import train_lightly

from ipucnn import cli
from ipucnn.config.resolve import resolve
from ipucnn.errors import DataError
from ipucnn.interrupts import Interrupted
from ipucnn.reports import units
from ipucnn.reports.train import report_rows
from ipucnn.runs.recorder import Timer
from ipucnn.runs.train import TrainingRun
from ipucnn.sessions.session import ExecutionFinished, Progress
from ipucnn.training.checkpoints import load_checkpoint

ROOT = Path(__file__).parents[1]

# Replicas, accumulation, dropout, augmentation, a schedule; executions and checkpoints within epochs.
RUN = {
    "dataset": "digits",
    "limit_train": "160",
    "limit_eval": "40",
    "num_epochs": "2",
    "seed": "5",
    "num_replicas": "2",
    "micro_batch_size": "4",
    "gradient_accumulation_count": "2",
    "augment": True,
    "dropout": "0.3",
    "optimizer": "adam",
    "optimizer_params": "{}",
    "lr_schedule": "cosine",
    "logs_per_epoch": "2",
    "ckpts_per_epoch": "2",
    "validation_freq": "1",
}
PIPELINE = {
    **RUN,
    "ipus_per_replica": "2",
    "gradient_accumulation_count": "4",
    "optimizer": "sgd",
    "optimizer_params": "{momentum: 0.9}",
    "precise_batch_norm": "0",
}
PIPELINE.pop("dropout")
PRECISE = {**RUN, "precise_batch_norm": "32"}
PRECISE.pop("dropout")


@pytest.fixture
def real_training():
    """For tests of what training itself makes of a cut: the session's state, the compiled loop, the order of images."""


@pytest.fixture(autouse=True)
def others_lightly(request):
    """Everything else is about files, and costs a fraction without TensorFlow's compiling."""
    if "real_training" not in request.fixturenames:
        request.getfixturevalue("lightly")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")


def training(folder, model="mnist_cnn", options=RUN, **more):
    return TrainingRun(resolve("train", {**options, "run_dir": str(folder), **more}, model=model))


def train(folder, model="mnist_cnn", options=RUN, **more):
    run = training(folder, model, options, **more)
    events = list(run.events())
    return run, events


def cut(run, after, number=None):
    """Ends a run after some events: as SIGKILL would (nothing more is done), or by a signal to this process."""
    seen = 0
    events = run.events()
    try:
        for _ in events:
            seen += 1
            if seen == after:
                if number is None:
                    events.close()
                    return True
                os.kill(os.getpid(), number)
    except Interrupted as error:
        assert error.exit_code == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
        return True
    return False


def files(folder):
    """What must not differ: history, program and checkpoints."""
    paths = [folder / "metrics.jsonl", folder / "program.json", *sorted((folder / "checkpoints").iterdir())]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def assert_same(folder, expected):
    found = files(folder)
    assert sorted(found) == sorted(expected)
    for name in expected:
        assert found[name] == expected[name], f"{name} differs"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Where the runs lie that several tests read, or copy."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def uninterrupted(folders):
    """Files and events of runs that were left alone."""
    results = {}
    for name, model, options in (
        ("plain", "mnist_cnn", RUN),
        ("light", "mnist_cnn", RUN),
        ("pipeline", "toy_model_bn", PIPELINE),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if name == "light":
                train_lightly(patch)
            _, events = train(folders / name, model, options)
        results[name] = files(folders / name), events
    return results


@pytest.fixture(scope="module")
def cut_after_nine(folders):
    with pytest.MonkeyPatch.context() as patch:
        train_lightly(patch)
        assert cut(training(folders / "cut"), 9)
    return folders / "cut"


@pytest.fixture
def cut_run(cut_after_nine, tmp_path):
    """A run folder r, of a run that was ended after nine events."""
    return shutil.copytree(str(cut_after_nine), str(tmp_path / "r"))


# Really trained it is cut twice, by `test_the_middle_of_an_execution_and_of_a_validation`.
@pytest.mark.slow
@pytest.mark.parametrize("start, step, number", [(1, 1, None), (2, 1, signal.SIGINT), (3, 1, signal.SIGTERM)])
def test_cut_again_and_again_it_ends_in_the_same_bytes(
    real_training, uninterrupted, tmp_path, start, step, number
):
    cut_again_and_again(tmp_path, *uninterrupted["plain"], start, step, number)


@pytest.mark.parametrize("start, number", [(1, None), (2, signal.SIGINT), (3, signal.SIGTERM)])
def test_cut_after_every_event(uninterrupted, tmp_path, start, number):
    cut_again_and_again(tmp_path, *uninterrupted["light"], start, 1, number)


def cut_again_and_again(tmp_path, expected, events, start, step, number):
    assert cut(training(tmp_path / "r"), start, number)
    for after in range(2, len(events), step):
        # Each process gets a little further than the one before.
        if not cut(training(tmp_path / "r", resume=True), after, number):
            break
    train(tmp_path / "r", resume=True)
    assert_same(tmp_path / "r", expected)


@pytest.mark.parametrize(
    "after, number", [pytest.param(3, None, marks=pytest.mark.slow), (7, signal.SIGTERM)]
)
def test_pipelined_statistics_are_those_of_the_uninterrupted_run(
    real_training, uninterrupted, tmp_path, after, number
):
    expected, _ = uninterrupted["pipeline"]
    assert cut(training(tmp_path / "r", "toy_model_bn", PIPELINE), after, number)
    train(tmp_path / "r", "toy_model_bn", PIPELINE, resume=True)
    assert_same(tmp_path / "r", expected)


@pytest.mark.parametrize(
    "after, number", [pytest.param(3, None, marks=pytest.mark.slow), (6, signal.SIGTERM)]
)
def test_running_statistics_go_on_where_measured_ones_are_saved(real_training, tmp_path, after, number):
    _, events = train(tmp_path / "whole", "toy_model_bn", PRECISE)
    assert len(events) > after
    assert cut(training(tmp_path / "r", "toy_model_bn", PRECISE), after, number)
    train(tmp_path / "r", "toy_model_bn", PRECISE, resume=True)
    assert_same(tmp_path / "r", files(tmp_path / "whole"))


def test_the_middle_of_an_execution_and_of_a_validation(real_training, uninterrupted, tmp_path, monkeypatch):
    from ipucnn.sessions.host import session as host

    expected, _ = uninterrupted["plain"]
    monkeypatch.setattr(host, "SLICE_S", 0.0)  # slices of one weight update
    assert cut(training(tmp_path / "r"), 4, signal.SIGTERM)
    meta = load_checkpoint(tmp_path / "r" / "checkpoints" / "last.npz").meta
    assert meta["weight_updates"] % 5 and len(meta["position"]["losses"]) == meta["weight_updates"] % 5
    real = host.MetricTotals.add

    def add(totals, sums):
        os.kill(os.getpid(), signal.SIGINT)
        real(totals, sums)

    monkeypatch.setattr(host.MetricTotals, "add", add)
    monkeypatch.setattr("ipucnn.runs.setup.evaluation_batches", small_batches)
    with pytest.raises(Interrupted):
        train(tmp_path / "r", resume=True)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    position = load_checkpoint(tmp_path / "r" / "checkpoints" / "last.npz").meta["position"]
    assert position["events_done"] == 1  # the execution's own; the validation was not counted as done
    train(tmp_path / "r", resume=True)
    assert_same(tmp_path / "r", expected)


def small_batches(setup, batch_size, shard=(1, 0)):
    from ipucnn.datasets.pipeline import eval_batches

    return eval_batches(
        setup.source.eval,
        setup.source.info,
        batch_size=batch_size,
        input_shape=setup.input_shape,
        input_range=setup.record.input_range,
    )


def test_a_signal_before_training_leaves_nothing(tmp_path, monkeypatch):
    def build(setup):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal should have ended the run")

    monkeypatch.setattr("ipucnn.runs.setup.build", build)
    with pytest.raises(Interrupted) as caught:
        train(tmp_path / "r")
    assert caught.value.exit_code == 143 and not (tmp_path / "r").exists()


def test_the_number_of_loading_threads_and_slices_does_not_change_a_byte(
    real_training, uninterrupted, tmp_path, monkeypatch
):
    from ipucnn.sessions.host import session as host

    monkeypatch.setattr(host, "SLICE_S", 0.0)
    train(tmp_path / "r", pipeline_num_parallel="1")
    assert_same(tmp_path / "r", uninterrupted["plain"][0])


def test_a_moved_run_folder_continues(uninterrupted, cut_run, tmp_path):
    shutil.move(str(tmp_path / "r"), str(tmp_path / "elsewhere"))
    train(tmp_path / "elsewhere", resume=True)
    assert_same(tmp_path / "elsewhere", uninterrupted["light"][0])
    assert f"run-dir: {tmp_path / 'elsewhere'}" in (tmp_path / "elsewhere" / "config.yml").read_text()


def test_a_damaged_checkpoint_is_recognised_and_the_one_before_it_used(uninterrupted, tmp_path, capsys):
    assert cut(training(tmp_path / "r"), len(uninterrupted["light"][1]) - 3)
    checkpoints = tmp_path / "r" / "checkpoints"
    newest = max(checkpoints.glob("checkpoint-*.npz"))
    assert newest.samefile(checkpoints / "last.npz") and len(list(checkpoints.glob("checkpoint-*"))) >= 2
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(bytes(data))
    (checkpoints / ".last.npz.99999.tmp").write_bytes(b"half a checkpoint")
    (checkpoints / ".mine.tmp").write_bytes(b"not ours")
    assert cli.run(["train", "--resume", "--run-dir", "r"]) == 0
    err = capsys.readouterr().err
    assert "damaged" in err and "the one before it is used" in err and "continuing after weight update" in err
    assert not (checkpoints / ".last.npz.99999.tmp").exists()
    (checkpoints / ".mine.tmp").unlink()
    assert_same(tmp_path / "r", uninterrupted["light"][0])


def test_nothing_readable_is_an_error_and_changes_nothing(cut_run, tmp_path, capsys):
    for path in (tmp_path / "r" / "checkpoints").iterdir():
        path.write_bytes(b"PK damaged")
    before = files(tmp_path / "r")
    assert cli.run(["train", "mnist_cnn", "--resume", "--run-dir", "r"]) == 3
    err = capsys.readouterr().err
    assert "damaged" in err and "--overwrite" in err and "Traceback" not in err
    assert files(tmp_path / "r") == before


def test_a_checkpoint_of_another_run_is_not_continued(cut_run, tmp_path, capsys):
    train(tmp_path / "other", seed="6", num_epochs="1")
    for path in (tmp_path / "r" / "checkpoints").iterdir():
        path.unlink()
    shutil.copy(
        str(tmp_path / "other" / "checkpoints" / "last.npz"), str(tmp_path / "r" / "checkpoints" / "last.npz")
    )
    assert cli.run(["train", "--resume", "--run-dir", "r"]) == 2
    err = capsys.readouterr().err
    assert "another run" in err and "seed 6 there, 5 here" in err and "--weights" in err


CONTRADICTIONS = [
    (["--micro-batch-size", "8"], "--micro-batch-size 8: the run in r has 4"),
    (["--lr-schedule", "const"], "the run in r has cosine"),
    (["--overwrite"], "both given"),
    (["--no-training"], "nothing to continue"),
    (["--num-epochs", "1"], "--num-epochs 1"),
]


def test_options_that_contradict_the_run_are_refused(tmp_path, capsys):
    assert cut(training(tmp_path / "r"), 14)
    assert load_checkpoint(tmp_path / "r" / "checkpoints" / "last.npz").meta["weight_updates"] > 10
    before = files(tmp_path / "r")
    for args, message in CONTRADICTIONS:
        code = cli.run(["train", "mnist_cnn", "--resume", "--run-dir", "r", *args])
        err = capsys.readouterr().err
        assert code == 2 and message in err and "hint: " in err, err
        assert files(tmp_path / "r") == before


def test_the_same_command_line_continues_the_latest_run(real_training, uninterrupted, tmp_path, capsys):
    words = ["train", "mnist_cnn"]
    for name, value in RUN.items():
        words += [f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", value]
    assert cli.run([*words, "--resume"]) == 0
    assert "nothing to resume in runs/mnist_cnn-digits: the run begins" in capsys.readouterr().err
    assert_same(tmp_path / "runs" / "mnist_cnn-digits", uninterrupted["plain"][0])
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("*")}
    assert cli.run([*words, "--resume", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "is finished: nothing to continue" in err and json.loads(out)["model"] == "mnist_cnn"
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("*")} == before


def test_print_config_shows_the_run_that_is_continued(cut_run, tmp_path, capsys):
    assert cli.run(["train", "--resume", "--run-dir", "r", "--print-config", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert "mnist_cnn" in json.dumps(printed) and "cosine" in json.dumps(printed)


def test_more_epochs_for_a_finished_run(tmp_path):
    options = {**RUN, "lr_schedule": "const"}
    train(tmp_path / "short", options=options)
    train(tmp_path / "long", options=options, num_epochs="3")
    train(tmp_path / "short", options=options, num_epochs="3", resume=True)
    found, expected = files(tmp_path / "short"), files(tmp_path / "long")
    for name in ("metrics.jsonl", "program.json", "checkpoints/last.npz"):
        assert found[name] == expected[name]


def test_checkpoints_of_elsewhere_are_continued_into_a_new_run(uninterrupted, cut_run, tmp_path, capsys):
    train(tmp_path / "new", checkpoint_input_dir="r/checkpoints")
    expected = uninterrupted["light"][0]
    found = files(tmp_path / "new")
    for name in ("metrics.jsonl", "checkpoints/last.npz", "checkpoints/best.npz"):
        assert found[name] == expected[name], name
    code = cli.run(
        ["train", "mnist_cnn", "--checkpoint-input-dir", "r/checkpoints", "--run-dir", "x", "--seed", "9"]
    )
    assert code == 2 and "another run" in capsys.readouterr().err and not (tmp_path / "x").exists()
    assert cli.run(["train", "mnist_cnn", "--checkpoint-input-dir", "nowhere", "--run-dir", "x"]) == 3
    assert "does not exist" in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_without_training_every_checkpoint_of_a_folder_is_validated(tmp_path):
    train(tmp_path / "r", ckpts_per_epoch="1")
    rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    wanted = [row for row in rows if row["event"] == "validation"]
    train(tmp_path / "v", training=False, checkpoint_input_dir="r/checkpoints")
    rows = [json.loads(line) for line in (tmp_path / "v" / "metrics.jsonl").read_text().splitlines()]
    assert rows == wanted and len(rows) == 2
    assert not any((tmp_path / "v" / "checkpoints").iterdir())


def test_checkpoint_output_dir_is_where_they_go_and_come_from(uninterrupted, tmp_path, capsys):
    assert cut(training(tmp_path / "r", checkpoint_dir=str(tmp_path / "ck")), 9)
    assert (tmp_path / "ck" / "last.npz").exists() and not (tmp_path / "r" / "checkpoints").exists()
    assert cli.run(["train", "--resume", "--run-dir", "r", "--checkpoint-output-dir", "ck"]) == 0
    expected = {k: v for k, v in uninterrupted["light"][0].items() if k.startswith("checkpoints")}
    assert {f"checkpoints/{p.name}": p.read_bytes() for p in (tmp_path / "ck").iterdir()} == expected


def test_clean_dir_of_a_continued_run_deletes_its_checkpoints_and_no_others(tmp_path):
    assert cut(training(tmp_path / "r", clean_dir=True), 9)
    (tmp_path / "r" / "checkpoints" / "checkpoint-of-mine.txt").write_text("x")
    train(tmp_path / "r", resume=True, clean_dir=True)
    assert [p.name for p in (tmp_path / "r" / "checkpoints").iterdir()] == ["checkpoint-of-mine.txt"]
    train(tmp_path / "s", clean_dir=True)
    assert not (tmp_path / "s" / "checkpoints").exists()


def test_killed_between_the_last_checkpoint_and_the_report(tmp_path, monkeypatch):
    options = {k: v for k, v in RUN.items() if k != "ckpts_per_epoch"}
    options.update(num_epochs="1", logs_per_epoch="1")
    train(tmp_path / "a", options=options)

    def killed(*_):
        raise KeyboardInterrupt  # nothing more is done

    with monkeypatch.context() as patched:
        patched.setattr("ipucnn.runs.folder.RunFolder.write_report", killed)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "b", options=options)
    train(tmp_path / "b", options=options, resume="true")
    assert_same(tmp_path / "b", files(tmp_path / "a"))


def test_a_loss_that_is_no_number_keeps_the_last_good_checkpoint(real_training, tmp_path, capsys):
    words = ["train", "mnist_cnn", "--dataset", "digits", "--limit-train", "160", "--limit-eval", "40",
             "--micro-batch-size", "8", "--seed", "5", "--optimizer", "sgd", "--optimizer-params", "{}",
             "--steps-per-execution", "1", "--ckpts-per-epoch", "20", "--lr-schedule", "exponential",
             "--lr-schedule-params", '{"initial_learning_rate": 1e-5, "epochs_to_decay": 0.05, "decay_rate": 1e9}',
             "--run-dir", "r"]  # fmt: skip
    assert cli.run(words) == 2
    err = capsys.readouterr().err
    assert ("no longer finite" in err or "the loss became" in err) and "hint: lower the learning rate" in err
    assert "Traceback" not in err
    last = load_checkpoint(tmp_path / "r" / "checkpoints" / "last.npz")
    assert last.meta["weight_updates"] > 0
    assert all(np.all(np.isfinite(v)) for v in {**last.weights, **last.slots}.values())


def test_a_full_disk_loses_nothing(uninterrupted, tmp_path, monkeypatch, capsys):
    from ipucnn.training import checkpoints

    real, calls = np.lib.format.write_array, []

    def write_array(handle, array, **options):
        calls.append(array)
        if len(calls) > 60:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle, array, **options)

    words = ["train", "--resume", "--run-dir", "r"]
    with monkeypatch.context() as patch, pytest.raises(Exception, match="No space left"):
        patch.setattr(checkpoints.np.lib.format, "write_array", write_array)
        train(tmp_path / "r")
    monkeypatch.chdir(tmp_path)
    names = [p.name for p in (tmp_path / "r" / "checkpoints").iterdir()]
    assert "last.npz" in names and not [n for n in names if n.endswith(".tmp")]
    for name in names:
        load_checkpoint(tmp_path / "r" / "checkpoints" / name)
    assert cli.run(words) == 0
    assert_same(tmp_path / "r", uninterrupted["light"][0])


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
def test_a_file_size_limit_is_an_error_with_a_hint(tmp_path, capsys):
    import resource

    words = ["train", "mnist_cnn", "--dataset", "digits", "--limit-train", "160", "--num-epochs", "1",
             "--run-dir", "r"]  # fmt: skip
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40000, before[1]))
        code = cli.run(words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    err = capsys.readouterr().err
    assert code == 3, err
    assert "cannot be written: File too large" in err and "hint: free some space" in err
    assert "Traceback" not in err
    assert not list((tmp_path / "r").rglob("*.tmp")) and not list((tmp_path / "r").rglob("*.npz"))


def test_two_processes_cannot_write_one_run(cut_run, tmp_path, capsys):
    fcntl = pytest.importorskip("fcntl")
    handle = os.open(str(tmp_path / "r"), os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert cli.run(["train", "--resume", "--run-dir", "r"]) == 2
        assert "in use by another process" in capsys.readouterr().err
    finally:
        os.close(handle)


def test_the_run_folder_says_where_its_result_comes_from(cut_run, tmp_path):
    train(tmp_path / "r", resume=True)
    processes = json.loads((tmp_path / "r" / "environment.json").read_text())
    assert [p["first_weight_update"] for p in processes] == [0, 5]
    for process in processes:
        assert {
            "ipucnn",
            "python",
            "tensorflow",
            "keras",
            "numpy",
            "sources_sha256",
            "command",
            "cpu",
            "platform",
        } <= set(process)
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert len(report["processes"]) == 2 and report["environment"]["numpy"] == np.__version__
    assert len(processes[0]["sources_sha256"]) == 64


def test_throughput_of_a_continued_run_is_that_of_its_last_process(cut_run, tmp_path):
    run, _ = train(tmp_path / "r", resume=True)
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    measured = report["measured"]
    whole, first = run.context.program.samples_before, measured["first_weight_update"]
    assert first == 5 and measured["samples"] == report["trained_samples"] - whole(first)
    # Times are told of the last process, so the samples have to be, too.
    report["measured"].update(train_s=1.0, images_per_s=measured["samples"] * 1.0)
    report["compilation"]["compile_s"] = 1.0
    rows = dict(report_rows(report, "r", None))
    assert rows["with compilation"] == f"{units.rate(measured['samples'] / 2)} images/s"
    # A report of an earlier version does not say how many they are.
    del report["measured"]["samples"]
    assert "with compilation" not in dict(report_rows(report, "r", None))


def test_executions_after_the_last_log_are_timed_too():
    timer = Timer()
    figures = {"epoch": 1.0, "metrics": {}, "learning_rate": 0.1, "samples": 0}
    for number, (wall_s, is_logged) in enumerate([(1.0, False), (2.0, True), (3.0, False)]):
        timer.add(
            ExecutionFinished(number, 1, wall_s=wall_s, images_per_s=8.0, is_logged=is_logged, **figures)
        )
    assert (timer.busy_s, timer.images_per_s) == (5.0, 8.0)


def test_a_change_of_versions_is_told(cut_run, tmp_path, capsys):
    path = tmp_path / "r" / "environment.json"
    path.write_text(path.read_text().replace(f'"numpy": "{np.__version__}"', '"numpy": "1.0"'))
    assert cli.run(["train", "--resume", "--run-dir", "r"]) == 0
    assert f"warning: numpy 1.0 before, {np.__version__} now" in capsys.readouterr().err


def test_events_are_those_a_consumer_expects(uninterrupted):
    _, events = uninterrupted["light"]
    assert sum(isinstance(e, ExecutionFinished) for e in events) == 4
    assert sum(isinstance(e, Progress) for e in events) >= 4


def test_a_run_from_other_checkpoints_continues_from_its_own(uninterrupted, cut_run, tmp_path):
    assert cut(training(tmp_path / "new", checkpoint_input_dir="r/checkpoints"), 9, signal.SIGINT)
    reached = load_checkpoint(tmp_path / "new" / "checkpoints" / "last.npz").meta["weight_updates"]
    shutil.rmtree(str(tmp_path / "r"))
    train(tmp_path / "new", resume=True)
    report = json.loads((tmp_path / "new" / "report.json").read_text())
    assert report["measured"]["first_weight_update"] == reached > 5
    assert (
        files(tmp_path / "new")["checkpoints/last.npz"] == uninterrupted["light"][0]["checkpoints/last.npz"]
    )


def test_checkpoints_looked_for_in_the_wrong_place_do_not_restart_the_run(cut_run, tmp_path, capsys):
    before = files(tmp_path / "r")
    assert cli.run(["train", "--resume", "--run-dir", "r", "--checkpoint-dir", "new"]) == 2
    assert "are in r/checkpoints, not in" in capsys.readouterr().err
    assert files(tmp_path / "r") == before
    assert cut(training(tmp_path / "s", checkpoint_dir=str(tmp_path / "ck")), 9)
    shutil.move(str(tmp_path / "ck"), str(tmp_path / "moved"))
    metrics = (tmp_path / "s" / "metrics.jsonl").read_bytes()
    assert cli.run(["train", "--resume", "--run-dir", "s"]) == 3
    assert (
        "is not there" in capsys.readouterr().err
        and (tmp_path / "s" / "metrics.jsonl").read_bytes() == metrics
    )
    assert cli.run(["train", "--resume", "--run-dir", "s", "--checkpoint-dir", "moved"]) == 0


def test_a_folder_that_another_run_took_meanwhile_is_kept(uninterrupted, folders, tmp_path):
    late = training(tmp_path / "r", seed="8")
    shutil.copytree(str(folders / "plain"), str(tmp_path / "r"))
    before = files(tmp_path / "r")
    with pytest.raises(Exception, match="written by another run meanwhile"):
        list(late.events())
    assert files(tmp_path / "r") == before


def test_a_checkpoint_folder_in_use_is_refused(tmp_path, capsys):
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / "shared").mkdir()
    handle = os.open(str(tmp_path / "shared"), os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(Exception, match="in use by another process"):
            train(tmp_path / "r", checkpoint_dir="shared")
    finally:
        os.close(handle)
    with pytest.raises(Exception, match="lies in the run folder"):
        training(tmp_path / "r", checkpoint_dir=str(tmp_path / "r" / "tensorboard"))


def test_names_in_a_foreign_checkpoint_delete_nothing(tmp_path):
    from ipucnn.training.checkpoints import save_checkpoint

    assert cut(training(tmp_path / "r", clean_dir=True), 9)
    good = load_checkpoint(tmp_path / "r" / "checkpoints" / "last.npz")
    (tmp_path / "evil").mkdir()
    (tmp_path / "victim.txt").write_text("x")
    good.meta["run"]["written"] = ["../../victim.txt", "../../../victim.txt"]
    save_checkpoint(tmp_path / "evil" / "last.npz", good.weights, good.slots, good.meta)
    train(tmp_path / "n", checkpoint_input_dir="evil", clean_dir=True)
    assert (tmp_path / "victim.txt").read_text() == "x"


def test_overwrite_and_clean_leave_files_of_others_alone(tmp_path):
    train(tmp_path / "r", num_epochs="1")
    mine = [
        tmp_path / "r" / "checkpoints" / "checkpoint-mine.npz",
        tmp_path / "r" / "checkpoints" / "checkpoint-00000099.npz.txt",
        tmp_path / "r" / "tensorboard" / "notes.txt",
    ]
    for path in mine:
        path.write_text("x")
    train(tmp_path / "r", num_epochs="1", overwrite=True, clean_dir=True)
    assert [path.read_text() for path in mine] == ["x"] * 3
    assert not list((tmp_path / "r" / "checkpoints").glob("checkpoint-0*.npz"))


def test_an_interrupted_finished_clean_run_is_cleaned_and_not_trained_on(tmp_path, capsys):
    train(tmp_path / "r", clean_dir=True)
    assert cli.run(["train", "--resume", "--run-dir", "r", "--num-epochs", "3"]) == 3
    assert "were deleted (--clean-dir)" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[1]", '{"a": 1}'])
def test_damaged_side_files_do_not_stop_a_run(uninterrupted, cut_run, tmp_path, text):
    (tmp_path / "r" / "environment.json").write_text(text)
    (tmp_path / "r" / "report.json").write_text(text)
    (tmp_path / "r" / "program.json").write_text(text)
    train(tmp_path / "r", resume=True)
    assert_same(tmp_path / "r", uninterrupted["light"][0])


def test_a_damaged_configuration_is_an_error(cut_run, tmp_path, capsys):
    (tmp_path / "r" / "config.yml").write_text("")
    assert cli.run(["train", "--resume", "--run-dir", "r"]) == 3
    assert "is damaged" in capsys.readouterr().err


def test_killed_while_the_folder_was_made(uninterrupted, tmp_path):
    (tmp_path / "r" / "checkpoints").mkdir(parents=True)
    (tmp_path / "r" / ".config.yml.4711.tmp").write_text("model-na")
    train(tmp_path / "r", resume=True)
    assert_same(tmp_path / "r", uninterrupted["light"][0])
    assert not list((tmp_path / "r").glob(".*.tmp"))


def test_interrupted_before_the_first_checkpoint_every_file_is_the_same(tmp_path):
    train(tmp_path / "a", num_epochs="1", ckpts_per_epoch="1")
    assert cut(training(tmp_path / "b", num_epochs="1", ckpts_per_epoch="1"), 3, signal.SIGINT)
    train(tmp_path / "b", num_epochs="1", ckpts_per_epoch="1", resume=True)
    assert_same(tmp_path / "b", files(tmp_path / "a"))


def test_other_data_are_not_continued_with(tmp_path, capsys):
    from PIL import Image

    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in ("a", "b"):
            (tmp_path / "d" / split / label).mkdir(parents=True)
            for i in range(8):
                pixels = rng.integers(0, 255, (12, 12, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(str(tmp_path / "d" / split / label / f"{i}.png"))
    words = ["train", "toy_model", "--dataset", "imagefolder", "--dataset-path", "d", "--run-dir", "r",
             "--micro-batch-size", "4", "--image-size", "12", "--num-epochs", "1"]  # fmt: skip
    assert cli.run(words) == 0
    (tmp_path / "d" / "val" / "b" / "8.png").write_bytes(
        (tmp_path / "d" / "val" / "b" / "7.png").read_bytes()
    )
    assert cli.run(["train", "--resume", "--run-dir", "r", "--num-epochs", "2"]) == 2
    assert "num eval 16 there, 17 here" in capsys.readouterr().err
    (tmp_path / "d" / "val" / "b" / "8.png").unlink()
    Image.new("RGB", (12, 12)).save(str(tmp_path / "d" / "train" / "a" / "0.png"))
    assert cli.run(["train", "--resume", "--run-dir", "r", "--num-epochs", "2"]) == 2
    assert "data sha256" in capsys.readouterr().err


def test_absurd_names_and_checkpoints(cut_run, tmp_path, capsys):
    from ipucnn.training.checkpoints import save_checkpoint

    assert cli.run(["train", "toy_model", "--run-dir", "x" * 300]) == 3
    assert "too long" in capsys.readouterr().err
    last = tmp_path / "r" / "checkpoints" / "last.npz"
    good = load_checkpoint(last)
    slots = {k: v[..., None] for k, v in good.slots.items()}
    for path in last.parent.iterdir():
        path.unlink()
    save_checkpoint(last, good.weights, slots, good.meta)
    assert cli.run(["train", "--resume", "--run-dir", "r"]) == 3
    assert "optimizer state" in capsys.readouterr().err
    save_checkpoint(last, good.weights, good.slots, {**good.meta, "position": 3})
    assert cli.run(["train", "--resume", "--run-dir", "r"]) == 3
    assert "$.position" in capsys.readouterr().err


def test_a_checkpoint_of_another_model_is_validated_by_nobody(uninterrupted, folders, tmp_path, capsys):
    words = ["train", "mnist_cnn", "--dataset", "digits", "--no-training", "--checkpoint-input-dir",
             str(folders / "pipeline" / "checkpoints"), "--run-dir", "v"]  # fmt: skip
    assert cli.run(words) == 3
    assert "another model" in capsys.readouterr().err and not (tmp_path / "v").exists()


def numbered(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir() if "-" in path.name)


def test_the_newest_checkpoints_are_kept(uninterrupted, tmp_path):
    """The same bytes, whether the others were deleted or not, and by whichever process."""
    expected, _ = uninterrupted["light"]
    every = [name for name in expected if name.startswith("checkpoints/checkpoint-")]
    assert len(every) == 4  # --ckpts-per-epoch is given, and so all are kept
    _, events = train(tmp_path / "whole", keep_checkpoints="2")
    assert numbered(tmp_path / "whole") == [Path(name).name for name in sorted(every)[-2:]]
    left = {name: data for name, data in expected.items() if name not in sorted(every)[:2]}
    assert_same(tmp_path / "whole", left)
    # Killed after a checkpoint was written, and before the older one was deleted.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ipucnn.runs.recorder.Recorder._delete_older", lambda recorder: None)
        assert cut(training(tmp_path / "r", keep_checkpoints="2"), len(events) - 2)
    assert len(numbered(tmp_path / "r")) > 2
    train(tmp_path / "r", resume=True)
    assert_same(tmp_path / "r", left)


def _cut_when_there_is(folder, name, **more):
    events = training(folder, **more).events()
    for _ in events:
        if (folder / "checkpoints" / name).exists():
            break
    events.close()
    assert not (folder / "report.json").exists()


def test_nothing_is_deleted_that_the_run_did_not_write(tmp_path):
    _cut_when_there_is(tmp_path / "r", "last.npz", keep_checkpoints="1")
    foreign = tmp_path / "r" / "checkpoints" / "checkpoint-00000001.npz"
    foreign.write_bytes(b"of somebody else")
    train(tmp_path / "r", resume=True)
    assert foreign.read_bytes() == b"of somebody else" and len(numbered(tmp_path / "r")) == 2


def test_the_best_checkpoint_has_weights_alone_unless_it_is_the_last(real_training, tmp_path):
    train(tmp_path / "r", validation_freq="1", num_epochs="3")
    best = load_checkpoint(tmp_path / "r" / "checkpoints" / "best.npz")
    last = load_checkpoint(tmp_path / "r" / "checkpoints" / "last.npz")
    assert list(best.weights) == list(last.weights)
    if best.meta["weight_updates"] == last.meta["weight_updates"]:
        assert (tmp_path / "r/checkpoints/best.npz").samefile(tmp_path / "r/checkpoints/last.npz")
    else:
        assert not best.slots and last.slots and "position" not in best.meta


def test_a_run_does_not_go_on_from_weights_alone(tmp_path):
    _cut_when_there_is(tmp_path / "r", "best.npz", ckpts_per_epoch="1/2")
    folder = tmp_path / "r" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["best.npz"]
    run = training(tmp_path / "r", resume=True, ckpts_per_epoch="1/2")
    assert run.context.start.checkpoint is None and "begins again" in run.context.start.notes[0]
    with pytest.raises(DataError, match="it has weights alone") as caught:
        train(tmp_path / "other", checkpoint_input_dir=str(folder), ckpts_per_epoch="1/2")
    assert "--weights" in caught.value.hint


def test_damaged_checkpoints_beside_weights_alone_are_an_error(tmp_path):
    _cut_when_there_is(tmp_path / "r", "last.npz", ckpts_per_epoch="1/2")
    folder = tmp_path / "r" / "checkpoints"
    for path in folder.iterdir():
        if path.name != "best.npz":
            path.write_bytes(path.read_bytes()[:1000])
    before = files(tmp_path / "r")
    with pytest.raises(DataError, match=r"no checkpoint of .* is readable") as caught:
        training(tmp_path / "r", resume=True, ckpts_per_epoch="1/2")
    assert "--weights" in caught.value.hint and "best.npz" in caught.value.hint
    assert files(tmp_path / "r") == before


def test_a_run_of_an_earlier_version_keeps_all_of_its_checkpoints(tmp_path):
    _cut_when_there_is(tmp_path / "r", "last.npz", keep_checkpoints="1")
    config = tmp_path / "r" / "config.yml"
    lines = [line for line in config.read_text().splitlines(True) if not line.startswith("keep-checkpoints:")]
    config.write_text("".join(lines))
    train(tmp_path / "r", resume=True)
    assert len(numbered(tmp_path / "r")) == 4
    assert "keep-checkpoints: null" in config.read_text()


def test_a_disk_with_little_room_is_told_of(tmp_path, monkeypatch):
    monkeypatch.setattr("ipucnn.runs.train.free_bytes", lambda folder: 2**20)
    run = training(tmp_path / "r", num_epochs="1")
    notes = [line for event in run.events() if hasattr(event, "lines") for line in event.lines]
    (line,) = [line for line in notes if "MiB are free" in line]
    paths = (tmp_path / "r" / "checkpoints").iterdir()
    sizes = sum({path.stat().st_ino: path.stat().st_size for path in paths}.values())
    told = int(line.partition("up to ")[2].split()[0])
    assert sizes / 2**20 <= told + 1 and told <= 2 + 2 * sizes / 2**20
    assert run.context.folder.size_bytes >= sizes


@pytest.fixture
def kill_campaign():
    """benchmarks/kill_campaign.py with a configuration that is small."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("kill_campaign", ROOT / "benchmarks" / "kill_campaign.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.CONFIGURATIONS["small"] = (
        "mnist_cnn --dataset digits --augment --dropout 0.2 --replicas 2 --micro-batch-size 4 --limit-train 320 "
        "--limit-eval 40 --num-epochs 12 --ckpts-per-epoch 4 --logs-per-epoch 4 --optimizer adam --optimizer-params {} "
        "--keep-checkpoints 2"
    )
    return module


# Writes the files of a run that the campaign looks at, in their order; what is broken shows when it goes on.
WRITER = """
import json, os, pathlib, signal, sys, time
mark, folder, resume, broken = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3], sys.argv[4]
for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)):
    signal.signal(number, lambda *_, code=code: os._exit(code))
os.mkdir(mark)
kept, metrics = folder / "checkpoints", folder / "metrics.jsonl"
kept.mkdir(parents=True, exist_ok=True)

def write(path, text):
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    time.sleep(0.005)
    temporary.rename(path)

def delete_older():
    for path in sorted(kept.glob("checkpoint-*.npz"))[:-2]:
        time.sleep(0.005)
        path.unlink()

write(folder / "program.json", "{}")
write(folder / "config.yml", "keep-checkpoints: 2\\n")
done = max((int(path.stem[-3:]) for path in kept.glob("checkpoint-*.npz")), default=0)
rows = metrics.read_text().splitlines(True)[:done] if metrics.exists() else []
write(metrics, "".join(rows))
delete_older()
(folder / "environment.json").write_text("{}")
for number in range(done + 1, 81):
    row = json.dumps({"event": "execution", "loss": number + bool(broken and resume)})
    with open(metrics, "a") as out:
        out.write(row + "\\n")
    time.sleep(0.005)
    write(kept / f"checkpoint-{number:03d}.npz", row)
    delete_older()
write(folder / "report.json", "{}")
time.sleep(0.02)
write(folder / "report.html", "")
"""


def test_the_campaign_kills_at_its_moments_and_notices_what_differs(tmp_path, kill_campaign, monkeypatch):
    """The campaign itself, on a writer of files that needs no TensorFlow."""

    def start(configuration, folder, resume, log, rng, broken="", stderr="log"):
        words = [str(kill_campaign.mark_of(folder)), str(folder), "resume" * resume, broken]
        shutil.rmtree(words[0], ignore_errors=True)
        with open(log, "ab") as out:
            return subprocess.Popen([sys.executable, "-c", WRITER, *words], stdout=out, stderr=out)

    monkeypatch.setattr(kill_campaign, "start", start)
    result = kill_campaign.campaign("small", 6, 3, 4, tmp_path / "whole")
    assert result["kills"] == 6 and result["differing"] == 0 and result["wrong end"] == 0
    assert sum(result[moment] for moment in kill_campaign.MOMENTS) == 6
    # It goes on with what is there: six kills were wanted, and six there are.
    assert kill_campaign.campaign("small", 6, 3, 4, tmp_path / "whole") == result
    result = kill_campaign.campaign("small", 1, 1, 4, tmp_path / "broken", "seed", moments=("any time",))
    assert result["differing"] == 1


@pytest.mark.slow
def test_killed_processes_and_continued_runs(tmp_path, kill_campaign):
    """A small part of the campaign: real processes, real signals."""
    result = kill_campaign.campaign("small", 1, 1, 4, tmp_path, moments=("deletion",))
    assert result["kills"] == 1 and result["runs"] >= 1
    assert result["differing"] == 0 and result["wrong end"] == 0


@pytest.mark.slow
def test_processes_killed_at_any_time_and_twice(tmp_path, kill_campaign):
    result = kill_campaign.campaign("small", 2, 2, 4, tmp_path, moments=("any time", "checkpoint"))
    assert result["kills"] == 2 and result["differing"] == 0 and result["wrong end"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["slot", "seed", "row"])
def test_the_campaign_notices_a_broken_build(tmp_path, kill_campaign, broken):
    assert kill_campaign.campaign("small", 1, 1, 4, tmp_path, broken, moments=("any time",))["differing"] == 1
