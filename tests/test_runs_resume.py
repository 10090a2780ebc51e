"""A run that is interrupted anywhere, in any way, continues to the bytes of an uninterrupted run."""

import errno
import functools
import json
import os
import random
import re
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from light_training import train_lightly
from PIL import Image
from support.data_sets import write_class_folders
from support.refusals import Refusal, check_raises, check_refused
from support.scripts import load_script
from support.trained_runs import report_of, rows

from ipucnn.config.options import BY_NAME
from ipucnn.config.resolve import resolve
from ipucnn.datasets.pipeline import eval_batches
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.events import Note
from ipucnn.filesystem import is_locked
from ipucnn.interrupts import Interrupted
from ipucnn.reports import units
from ipucnn.reports.train import report_rows
from ipucnn.runs.folder import RunFolder
from ipucnn.runs.recorder import Timer
from ipucnn.runs.train import TrainingRun
from ipucnn.sessions.host import session as host
from ipucnn.sessions.host.session import HostPredictor
from ipucnn.sessions.session import ExecutionFinished, UpdatesDone
from ipucnn.training import checkpoints
from ipucnn.training.checkpoints import load_checkpoint, save_checkpoint

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
RESUME = ("train", "--resume", "--run-dir", "r")


@pytest.fixture
def real_training():
    """Marks tests of training itself after a cut: the session's state, the compiled loop, the order of images."""


@pytest.fixture(autouse=True)
def others_lightly(request):
    """Trains lightly in all other tests, which are about files: much faster without TensorFlow's compiling."""
    if "real_training" not in request.fixturenames:
        request.getfixturevalue("lightly")


pytestmark = pytest.mark.usefixtures("here")


def training(folder, model="mnist_cnn", options=RUN, **more):
    return TrainingRun(resolve("train", {**options, "run_dir": str(folder), **more}, model=model))


def train(folder, model="mnist_cnn", options=RUN, **more):
    run = training(folder, model, options, **more)
    return run, list(run.events())


def cut(run, after, number=None):
    """Ends a run after some events: as SIGKILL would (nothing more runs), or by a signal to this process."""
    events = run.events()
    try:
        for seen, _ in enumerate(events, 1):
            if seen == after and number is None:
                events.close()
                return True
            if seen == after:
                os.kill(os.getpid(), number)
    except Interrupted as error:
        assert error.exit_code == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
        return True
    return False


def files(folder):
    """Returns the files that must not differ: history, program and checkpoints."""
    paths = [folder / "metrics.jsonl", folder / "program.json", *sorted((folder / "checkpoints").iterdir())]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def assert_same(folder, expected, names=None):
    present = files(folder)
    if names is None:
        assert sorted(present) == sorted(expected)
    for name in expected if names is None else names:
        assert present[name] == expected[name], f"{name} differs"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of runs that several tests read, or copy."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def uninterrupted(folders):
    """Returns a function: the name of an uninterrupted run -> its files and events; each is trained on first use.

    Tests of ``real_training`` ask for "plain" and "pipeline"; others for "light", and "other", of another network.
    """
    lines = {
        "plain": ("mnist_cnn", RUN),
        "light": ("mnist_cnn", RUN),
        "pipeline": ("toy_model_bn", PIPELINE),
        "other": ("toy_model", {**RUN, "dropout": "0"}),
    }

    @functools.lru_cache(maxsize=None)
    def run_of(name):
        with pytest.MonkeyPatch.context() as patch:
            if name in ("light", "other"):
                train_lightly(patch)
            _, events = train(folders / name, *lines[name])
        return files(folders / name), events

    return run_of


@pytest.fixture(scope="module")
def cut_after_nine(folders):
    with pytest.MonkeyPatch.context() as patch:
        train_lightly(patch)
        assert cut(training(folders / "cut"), 9)
    return folders / "cut"


@pytest.fixture
def cut_run(cut_after_nine, tmp_path):
    """Copies a run that was ended after nine events to the run folder r."""
    return Path(shutil.copytree(str(cut_after_nine), str(tmp_path / "r")))


# --- the same bytes


def move(folder, rng):
    return Path(shutil.move(str(folder), str(folder.parent / f"moved-{rng.random()}")))


def leave_temporaries(folder, rng):
    (folder / ".config.yml.4711.tmp").write_text("model-na")
    if (folder / "checkpoints").exists():
        (folder / "checkpoints" / ".last.npz.99999.tmp").write_bytes(b"half a checkpoint")


def damage_side_files(folder, rng):
    for name in ("environment.json", "report.json", "program.json", "timings.jsonl"):
        (folder / name).write_text(rng.choice(["[1]", '{"a": 1}', "", "\x00"]))


def damage_history(folder, rng):
    path = folder / "metrics.jsonl"
    if path.exists():
        path.write_bytes(path.read_bytes()[: rng.randrange(200)])


def damage_newest_checkpoint(folder, rng):
    numbered = sorted((folder / "checkpoints").glob("checkpoint-*.npz"))
    if len(numbered) > 1:
        data = bytearray(numbered[-1].read_bytes())
        data[rng.randrange(len(data) // 4, 3 * len(data) // 4)] ^= 1
        for path in (numbered[-1], folder / "checkpoints" / "last.npz"):
            path.unlink()
            path.write_bytes(bytes(data))


def as_hinted(action):
    """Returns the result of an action, after moving away each damaged file that it names, as its hint says."""
    while True:
        try:
            return action()
        except DataError as error:
            os.remove(re.search(r"mv (\S+) \S+\.damaged", error.hint)[1])


MISHAPS = (move, leave_temporaries, damage_side_files, damage_history, damage_newest_checkpoint)


@pytest.mark.slow
@pytest.mark.slow_cases("2", "3")
@pytest.mark.parametrize("seed", range(4))
def test_repeatedly_cut_damaged_and_moved_run_has_the_same_bytes(uninterrupted, tmp_path, seed):
    """Each process gets a little further and ends by a kill or signal, then its folder is damaged or moved."""
    rng, folder = random.Random(seed), tmp_path / "r"
    for after in range(1, len(uninterrupted("light")[1])):
        number = rng.choice([None, signal.SIGINT, signal.SIGTERM])
        if not as_hinted(lambda: cut(training(folder, resume=True), after, number)):  # noqa: B023
            break
        if folder.exists():
            folder = rng.choice(MISHAPS)(folder, rng) or folder
    as_hinted(lambda: train(folder, resume=True))
    assert_same(folder, uninterrupted("light")[0])
    assert f"run-dir: {folder}" in (folder / "config.yml").read_text()
    assert not list(folder.rglob(".*.tmp"))


# `test_cuts_within_an_execution_and_a_validation` cuts a real training twice.
@pytest.mark.slow
@pytest.mark.parametrize("start, number", [(1, None), (2, signal.SIGINT), (3, signal.SIGTERM)])
def test_repeatedly_cut_run_has_the_same_bytes(real_training, uninterrupted, tmp_path, start, number):
    expected, events = uninterrupted("plain")
    for after in range(start, len(events)):
        if not cut(training(tmp_path / "r", resume=after > start), after, number):
            break
    train(tmp_path / "r", resume=True)
    assert_same(tmp_path / "r", expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "after, number", [pytest.param(3, None, marks=pytest.mark.slow), (7, signal.SIGTERM)]
)
def test_pipelined_statistics_equal_those_of_the_uninterrupted_run(
    real_training, uninterrupted, tmp_path, after, number
):
    assert cut(training(tmp_path / "r", "toy_model_bn", PIPELINE), after, number)
    train(tmp_path / "r", "toy_model_bn", PIPELINE, resume=True)
    assert_same(tmp_path / "r", uninterrupted("pipeline")[0])


@pytest.mark.slow_cases("6-15")
@pytest.mark.parametrize(
    "after, number", [pytest.param(3, None, marks=pytest.mark.slow), (6, signal.SIGTERM)]
)
def test_running_statistics_continue_beside_saved_measured_ones(real_training, tmp_path, after, number):
    train(tmp_path / "whole", "toy_model_bn", PRECISE)
    assert cut(training(tmp_path / "r", "toy_model_bn", PRECISE), after, number)
    train(tmp_path / "r", "toy_model_bn", PRECISE, resume=True)
    assert_same(tmp_path / "r", files(tmp_path / "whole"))


@pytest.mark.slow
def test_cuts_within_an_execution_and_a_validation(real_training, uninterrupted, tmp_path, monkeypatch):
    expected = uninterrupted("plain")[0]
    monkeypatch.setattr(host, "SLICE_S", 0.0)  # slices of one weight update
    assert cut(training(tmp_path / "r"), 4, signal.SIGTERM)
    meta = load_checkpoint(tmp_path / "r" / "checkpoints" / "last.npz").meta
    assert meta["weight_updates"] % 5 and len(meta["position"]["losses"]) == meta["weight_updates"] % 5
    real = host.Totals.add

    def add(totals, sums):
        os.kill(os.getpid(), signal.SIGINT)
        real(totals, sums)

    monkeypatch.setattr(host.Totals, "add", add)
    monkeypatch.setattr("ipucnn.runs.setup.evaluation_batches", small_batches)
    with pytest.raises(Interrupted):
        train(tmp_path / "r", resume=True)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    position = load_checkpoint(tmp_path / "r" / "checkpoints" / "last.npz").meta["position"]
    assert position["events_done"] == 1  # the execution's; the validation does not count as done
    train(tmp_path / "r", resume=True)
    assert_same(tmp_path / "r", expected)


def small_batches(setup, batch_size, shard=(1, 0)):
    return eval_batches(
        setup.source.eval,
        setup.source.info,
        batch_size=batch_size,
        input_shape=setup.input_shape,
        input_range=setup.input_range,
    )


@pytest.mark.slow
def test_loading_threads_and_slices_do_not_change_a_byte(real_training, uninterrupted, tmp_path, monkeypatch):
    expected = uninterrupted("plain")[0]
    monkeypatch.setattr(host, "SLICE_S", 0.0)
    train(tmp_path / "r", pipeline_num_parallel="1")
    assert_same(tmp_path / "r", expected)


def test_the_same_command_line_continues_the_latest_run(uninterrupted, tmp_path, succeeds):
    words = ["train", "mnist_cnn"]
    for name, value in RUN.items():
        words += [f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", value]
    _, err = succeeds(*words, "--resume")
    assert "nothing to resume in runs/mnist_cnn-digits: the run begins" in err
    assert_same(tmp_path / "runs" / "mnist_cnn-digits", uninterrupted("light")[0])
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("*")}
    out, err = succeeds(*words, "--resume", "--json")
    assert "is finished: nothing to continue" in err and json.loads(out)["model"] == "mnist_cnn"
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("*")} == before


def test_finished_run_continues_with_more_epochs(tmp_path):
    options = {**RUN, "lr_schedule": "const"}
    train(tmp_path / "short", options=options)
    train(tmp_path / "long", options=options, num_epochs="3")
    train(tmp_path / "short", options=options, num_epochs="3", resume=True)
    names = ("metrics.jsonl", "program.json", "checkpoints/last.npz")
    assert_same(tmp_path / "short", files(tmp_path / "long"), names)


def test_checkpoints_from_elsewhere_continue_in_a_new_run(uninterrupted, cut_run, tmp_path, run):
    # It continues from its own checkpoints as soon as it has some.
    assert cut(training(tmp_path / "new", checkpoint_input_dir="r/checkpoints"), 9, signal.SIGINT)
    reached = load_checkpoint(tmp_path / "new" / "checkpoints" / "last.npz").meta["weight_updates"]
    shutil.rmtree(str(cut_run))
    train(tmp_path / "new", resume=True)
    assert_same(tmp_path / "new", uninterrupted("light")[0], ("metrics.jsonl", "checkpoints/last.npz"))
    assert report_of("new")["measured"]["first_weight_update"] == reached > 5


def test_checkpoint_output_dir_is_written_and_read(uninterrupted, tmp_path, run, succeeds):
    assert cut(training(tmp_path / "r", checkpoint_dir=str(tmp_path / "ck")), 9)
    assert (tmp_path / "ck" / "last.npz").exists() and not (tmp_path / "r" / "checkpoints").exists()
    shutil.move(str(tmp_path / "ck"), str(tmp_path / "moved"))
    check_refused(run, Refusal(RESUME, "is not there", code=3))
    succeeds(*RESUME, "--checkpoint-output-dir", "moved")
    expected = {k: v for k, v in uninterrupted("light")[0].items() if k.startswith("checkpoints")}
    assert {f"checkpoints/{p.name}": p.read_bytes() for p in (tmp_path / "moved").iterdir()} == expected


def test_full_disk_loses_no_checkpoint(uninterrupted, tmp_path, monkeypatch, succeeds):
    real, calls = np.lib.format.write_array, []

    def write_array(handle, array, **options):
        calls.append(array)
        if len(calls) > 60:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle, array, **options)

    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(DataError, match="No space left") as caught:
        patch.setattr(checkpoints.np.lib.format, "write_array", write_array)
        train(tmp_path / "r")
    command = f"ipucnn train --resume --run-dir {tmp_path / 'r'}"
    assert caught.value.hint == f"free some space, and continue it with: {command}"
    names = [p.name for p in (tmp_path / "r" / "checkpoints").iterdir()]
    assert "last.npz" in names and not [n for n in names if n.endswith(".tmp")]
    for name in names:
        load_checkpoint(tmp_path / "r" / "checkpoints" / name)
    succeeds(*RESUME)
    assert_same(tmp_path / "r", uninterrupted("light")[0])


# --- refusals


def only(folder, **changes):
    """Changes the content of a folder's single checkpoint."""
    last = folder / "checkpoints" / "last.npz"
    good = load_checkpoint(last)
    for path in last.parent.iterdir():
        path.unlink()
    meta = {**good.meta, **changes.get("meta", {})}
    save_checkpoint(last, good.weights, changes.get("slots", lambda slots: slots)(good.slots), meta)


@pytest.mark.parametrize(
    "prepare, code, error",
    [
        (lambda f: only(f, slots=lambda slots: {k: v[..., None] for k, v in slots.items()}), 3, "optimizer state"),
        (lambda f: only(f, meta={"position": 3}), 3, "position"),
    ],
)  # fmt: skip
def test_unusable_runs_are_refused_and_left_unchanged(cut_run, run, prepare, code, error):
    prepare(cut_run)
    check_refused(run, Refusal(RESUME, error, code=code))


def test_a_continued_run_keeps_what_it_began_with(cut_run, succeeds):
    _, err = succeeds(*RESUME, "--max-workers", 2)
    assert "--max-workers 2 is left out: the run keeps 1, with which it began" in err
    assert "max-workers: 1\n" in (cut_run / "config.yml").read_text()


def test_other_data_are_refused(tmp_path, run):
    write_class_folders(
        tmp_path / "d", {(s, c): 8 for s in ("train", "val") for c in "ab"}, lambda k: (12, 12)
    )
    options = "--micro-batch-size 4 --image-size 12 --num-epochs 1"
    assert (
        run(*f"train toy_model --dataset imagefolder --dataset-path d --run-dir r {options}".split())[0] == 0
    )
    more = [*RESUME, "--num-epochs", 2]
    first, *_, last = sorted(Path("d").rglob("*.png"))
    shutil.copy(str(last), "d/val/b/more.png")
    check_refused(run, Refusal(more, "num eval 16 there, 17 here"))
    Path("d/val/b/more.png").unlink()
    Image.new("RGB", (12, 12)).save(str(first))
    check_refused(run, Refusal(more, "data sha256"))


@pytest.mark.slow
def test_a_folder_of_images_may_have_moved(tmp_path, run, succeeds, monkeypatch):
    """The hints say how to name its new place, from wherever the run is seen; a folder with other images is refused."""
    write_class_folders(tmp_path / "photos", {("", name): 8 for name in ("a", "b")})
    words = [
        "train",
        "lenet",
        "--dataset",
        "photos",
        "--image-size",
        "16",
        "--micro-batch-size",
        "4",
        "--seed",
        "1",
    ]
    words += ["--lr-schedule", "const", "--lr-schedule-params", "{initial_learning_rate: 0.01}", "--run-dir"]
    succeeds(*words, "whole", "--num-epochs", "2")
    succeeds(*words, "r", "--num-epochs", "1")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    trained = "the run was trained with --dataset photos in another folder; from here, add"
    where = f"{trained} --dataset ../photos"
    more = ("train", "--resume", "--run-dir", "../r", "--num-epochs", "2")
    check_refused(run, Refusal(more, "data set 'photos' is unknown", f"{trained} lenet --dataset ../photos"))
    check_refused(run, Refusal(["evaluate", "../r"], "data set 'photos' is unknown", where))
    succeeds("evaluate", "../r", "--dataset", "../photos")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").rename("moved")
    where = "the run was trained with --dataset photos; add --dataset DIR"
    more = ("train", "--resume", "--run-dir", "r", "--num-epochs", "2")
    of_model = where.replace("--dataset DIR", "lenet --dataset DIR")
    check_refused(run, Refusal(more, "data set 'photos' is unknown", of_model))
    check_refused(run, Refusal(["evaluate", "r"], "data set 'photos' is unknown", where))
    write_class_folders(tmp_path / "other", {("", name): 8 for name in ("b", "a")})
    check_refused(run, Refusal([*more, "--dataset", "other"], "is not as it was for"))
    check_refused(run, Refusal([*more, "--dataset", "digits"], "the run in r has photos"))
    succeeds(*more, "lenet", "--dataset", "moved")
    check_refused(run, Refusal([*more, "--dataset", "other"], "is finished, with moved", "more --num-epochs"))
    weights = [
        load_checkpoint(tmp_path / name / "checkpoints" / "last.npz").weights for name in ("r", "whole")
    ]
    assert all((weights[0][name] == value).all() for name, value in weights[1].items())


def test_checkpoint_of_another_model_is_never_validated(uninterrupted, folders, run):
    uninterrupted("other")
    words = ["train", "mnist_cnn", "--dataset", "digits", "--no-training", "--run-dir", "v"]
    command = [*words, "--checkpoint-input-dir", folders / "other" / "checkpoints"]
    check_refused(run, Refusal(command, "another model", code=3))


def test_folders_in_use_are_refused(uninterrupted, folders, cut_run, tmp_path, run):
    fcntl = pytest.importorskip("fcntl")
    for name in ("shared", "used"):
        Path(name).mkdir()
    train = "train mnist_cnn --dataset digits --run-dir"
    for folder, command in (
        (cut_run, RESUME),
        # A folder that is new for both processes belongs to the one that locked it.
        ("shared", f"{train} new --checkpoint-dir shared"),
        ("used", f"{train} used --checkpoint-dir new"),
    ):
        handle = os.open(str(folder), os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            check_refused(run, Refusal(command, "in use by another process"))
        finally:
            os.close(handle)
    with pytest.raises(Exception, match="lies in the run folder"):
        training(tmp_path / "n", checkpoint_dir=str(tmp_path / "n" / "tensorboard"))
    late = training(tmp_path / "late", seed="8")
    uninterrupted("light")
    shutil.copytree(str(folders / "light"), str(tmp_path / "late"))
    before = files(tmp_path / "late")
    with pytest.raises(Exception, match="written by another run meanwhile"):
        list(late.events())
    assert files(tmp_path / "late") == before


@pytest.mark.slow
def test_non_finite_loss_keeps_the_last_good_checkpoint(real_training, tmp_path, run):
    words = ["train", "mnist_cnn", "--dataset", "digits", "--limit-train", "160", "--limit-eval", "40",
             "--micro-batch-size", "8", "--seed", "5", "--optimizer", "sgd", "--optimizer-params", "{}",
             "--steps-per-execution", "1", "--ckpts-per-epoch", "20", "--lr-schedule", "stepped",
             "--lr-schedule-params", '{"boundaries": [0.1], "values": [1e-5, 1e38]}',
             "--run-dir", "r"]  # fmt: skip
    code, _, err = run(*words)
    assert code == 2 and "hint: lower the learning rate" in err
    last = load_checkpoint(tmp_path / "r" / "checkpoints" / "last.npz")
    assert last.meta["weight_updates"] > 0
    assert all(np.all(np.isfinite(v)) for v in {**last.weights, **last.slots}.values())


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
def test_a_file_size_limit_is_an_error_with_a_hint(tmp_path, run):
    import resource

    command = "train mnist_cnn --dataset digits --limit-train 160 --num-epochs 1 --run-dir r"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40000, before[1]))
        code, _, err = run(*command.split())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert code == 3 and "cannot be written: File too large" in err and "hint: free some space" in err
    assert not list((tmp_path / "r").rglob("*.tmp")) and not list((tmp_path / "r").rglob("*.npz"))


# --- the output and results of a continued run


def test_print_config_shows_the_continued_run(cut_run, run):
    printed = run(*RESUME, "--print-config", "--json")[1]
    assert json.loads(printed) and "mnist_cnn" in printed and "cosine" in printed


def test_no_training_validates_every_checkpoint_of_a_folder(tmp_path):
    train(tmp_path / "r", ckpts_per_epoch="1")
    of_updates = [name for name in RUN if BY_NAME[name].updates_only]
    data = {name: value for name, value in RUN.items() if name not in of_updates}
    train(tmp_path / "v", options=data, training="false", checkpoint_input_dir="r/checkpoints")
    validations = rows("v")
    assert validations == rows("r", "validation") and len(validations) == 2
    assert not any((tmp_path / "v" / "checkpoints").iterdir())


def test_report_of_a_continued_run_is_of_its_last_process(cut_run, succeeds):
    path = cut_run / "environment.json"
    path.write_text(path.read_text().replace(f'"numpy": "{np.__version__}"', '"numpy": "1.0"'))
    _, err = succeeds(*RESUME)
    assert f"warning: numpy 1.0 before, {np.__version__} now" in err
    processes = json.loads(path.read_text())
    assert [p["first_weight_update"] for p in processes] == [0, 5]
    names = {
        "ipucnn",
        "python",
        "tensorflow",
        "keras",
        "numpy",
        "sources_sha256",
        "command",
        "cpu",
        "platform",
    }
    assert all(names <= set(process) and len(process["sources_sha256"]) == 64 for process in processes)
    report = report_of(cut_run)
    assert len(report["processes"]) == 2 and report["environment"]["numpy"] == np.__version__
    measured = report["measured"]
    assert measured["first_weight_update"] == 5 and 0 < measured["samples"] < report["trained_samples"] == 320
    # Times are those of the last process, so samples must be, too.
    record = RunFolder(cut_run).read_report()
    record.measured.train_s = record.compilation.compile_s = 1.0
    record.measured.images_per_s = float(record.measured.samples)
    rows = dict(report_rows(record, "r", None))
    assert rows["with compilation"] == f"{units.rate(measured['samples'] / 2)} images/s"


def test_executions_after_the_last_log_are_timed_too(uninterrupted):
    timer = Timer()
    figures = {"epoch": 1.0, "metrics": {}, "learning_rate": 0.1, "samples": 0}
    for number, (wall_s, is_logged) in enumerate([(1.0, False), (2.0, True), (3.0, False)]):
        timer.add(
            ExecutionFinished(number, 1, wall_s=wall_s, images_per_s=8.0, is_logged=is_logged, **figures)
        )
    assert (timer.busy_s, timer.images_per_s) == (5.0, 8.0)
    events = uninterrupted("light")[1]
    assert sum(isinstance(e, ExecutionFinished) for e in events) == 4
    assert sum(isinstance(e, UpdatesDone) for e in events) >= 4


# --- kept checkpoints


def numbered(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir() if "-" in path.name)


@pytest.mark.slow
def test_newest_checkpoints_are_kept(uninterrupted, tmp_path):
    """They have the same bytes, whether the others were deleted or not, and by any process."""
    expected, _ = uninterrupted("light")
    every = [name for name in expected if name.startswith("checkpoints/checkpoint-")]
    assert len(every) == 4  # --ckpts-per-epoch is given, so all are kept
    _, events = train(tmp_path / "whole", keep_checkpoints="2")
    assert numbered(tmp_path / "whole") == [Path(name).name for name in sorted(every)[-2:]]
    left = {name: data for name, data in expected.items() if name not in sorted(every)[:2]}
    assert_same(tmp_path / "whole", left)
    # Killed after a checkpoint was written, but before the older one was deleted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ipucnn.runs.recorder.Recorder._delete_older", lambda recorder: None)
        assert cut(training(tmp_path / "r", keep_checkpoints="2"), len(events) - 2)
    assert len(numbered(tmp_path / "r")) > 2
    train(tmp_path / "r", resume=True)
    assert_same(tmp_path / "r", left)


def cut_when_there_is(folder, name, **more):
    events = training(folder, **more).events()
    for _ in events:
        if (folder / "checkpoints" / name).exists():
            break
    events.close()
    assert not (folder / "report.json").exists()


def test_run_deletes_only_its_own_files(tmp_path):
    cut_when_there_is(tmp_path / "r", "last.npz", keep_checkpoints="1")
    foreign = tmp_path / "r" / "checkpoints" / "checkpoint-00000001.npz"
    foreign.write_bytes(b"of somebody else")
    train(tmp_path / "r", resume=True)
    assert foreign.read_bytes() == b"of somebody else" and len(numbered(tmp_path / "r")) == 2


@pytest.mark.slow
def test_clean_dir_deletes_only_the_checkpoints_of_the_run(tmp_path, run):
    assert cut(training(tmp_path / "r", clean_dir=True), 9)
    good = load_checkpoint(tmp_path / "r" / "checkpoints" / "last.npz")
    mine = [
        tmp_path / "r" / "checkpoints" / "checkpoint-of-mine.txt",
        tmp_path / "r" / "checkpoints" / "checkpoint-00000099.npz.txt",
        tmp_path / "r" / "tensorboard" / "notes.txt",
        tmp_path / "victim.txt",
    ]
    for path in mine:
        path.write_text("x")
    train(tmp_path / "r", resume=True, clean_dir=True)
    assert not list((tmp_path / "r" / "checkpoints").glob("*.npz"))
    train(tmp_path / "r", num_epochs="1", overwrite=True, clean_dir=True)
    train(tmp_path / "s", clean_dir=True)
    assert not (tmp_path / "s" / "checkpoints").exists()
    # Names in a foreign checkpoint never delete files.
    (tmp_path / "evil").mkdir()
    good.meta["run"]["written"] = ["../../victim.txt", "../../../victim.txt"]
    save_checkpoint(tmp_path / "evil" / "last.npz", good.weights, good.slots, good.meta)
    train(tmp_path / "n", checkpoint_input_dir="evil", clean_dir=True)
    assert [path.read_text() for path in mine] == ["x"] * 4


@pytest.mark.slow
def test_best_checkpoint_has_only_weights(tmp_path, monkeypatch):
    figures = {"samples": 40.0, "loss": 1.0, "top5": 1.0}
    for name, accuracies in (("falling", [0.9, 0.5]), ("rising", [0.5, 0.9])):
        left = iter(accuracies)
        monkeypatch.setattr(
            HostPredictor, "evaluate", lambda *_, left=left: {**figures, "accuracy": next(left)}
        )
        train(tmp_path / name)
        best, last = (
            load_checkpoint(tmp_path / name / "checkpoints" / f"{kind}.npz") for kind in ("best", "last")
        )
        assert (best.meta["weight_updates"] < last.meta["weight_updates"]) == (name == "falling")
        assert list(best.weights) == list(last.weights)
        assert not best.slots and last.slots and "position" not in best.meta


def test_run_does_not_continue_from_weights_alone(tmp_path):
    cut_when_there_is(tmp_path / "r", "best.npz", ckpts_per_epoch="1/2")
    folder = tmp_path / "r" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["best.npz"]
    run = training(tmp_path / "r", resume=True, ckpts_per_epoch="1/2")
    assert run.context.checkpoint is None and "begins again" in run.context.start.notes[0]
    run.context.folder.unlock()
    options = {"ckpts_per_epoch": "1/2", "checkpoint_input_dir": str(folder)}
    check_raises(DataError, "it has weights alone", "--weights", train, tmp_path / "other", **options)
    # Damaged checkpoints beside it are an error.
    (folder / "last.npz").write_bytes((folder / "best.npz").read_bytes()[:1000])
    options = {"ckpts_per_epoch": "1/2", "resume": True}
    error = check_raises(DataError, "no checkpoint of ", "--weights", training, tmp_path / "r", **options)
    assert " is readable" in error.message and "best.npz" in error.hint


def test_nearly_full_disk_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr("ipucnn.runs.train.free_bytes", lambda folder: 2**20)
    run = training(tmp_path / "r", num_epochs="1")
    notes = [event.line for event in run.events() if isinstance(event, Note)]
    (line,) = [line for line in notes if "MiB are free" in line]
    paths = (tmp_path / "r" / "checkpoints").iterdir()
    sizes = sum({path.stat().st_ino: path.stat().st_size for path in paths}.values())
    needed = int(line.partition("up to ")[2].split()[0])
    assert sizes / 2**20 <= needed + 1 and needed <= 2 + 2 * sizes / 2**20
    assert run.context.folder.size_bytes >= sizes


# --- kills of processes


@pytest.fixture
def kill_campaign():
    """Returns benchmarks/kill_campaign.py with a small configuration."""
    module = load_script("benchmarks/kill_campaign.py")
    module.CONFIGURATIONS["small"] = (
        "mnist_cnn --dataset digits --augment --dropout 0.2 --replicas 2 --micro-batch-size 4 --limit-train 320 "
        "--limit-eval 40 --num-epochs 12 --ckpts-per-epoch 4 --logs-per-epoch 4 --optimizer adam --optimizer-params {} "
        "--keep-checkpoints 2"
    )
    return module


@pytest.mark.slow
@pytest.mark.parametrize("moments", [("deletion",), ("any time", "checkpoint")])
def test_killed_and_continued_processes_have_the_same_bytes(tmp_path, kill_campaign, moments):
    """Runs a small part of the campaign: real processes, real signals."""
    count = len(moments)
    result = kill_campaign.campaign("small", count, count, 4, tmp_path, moments=moments)
    assert result["kills"] == count and result["runs"] >= 1
    assert result["differing"] == 0 and result["wrong end"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["slot", "seed", "row"])
def test_the_campaign_notices_a_broken_build(tmp_path, kill_campaign, broken):
    assert kill_campaign.campaign("small", 1, 1, 4, tmp_path, broken, moments=("any time",))["differing"] == 1


@pytest.mark.slow
def test_a_run_is_locked_before_its_state_is_read(lightly, tmp_path, run):
    """Otherwise another process could write weight updates in between, which this one would then delete."""
    list(training(tmp_path / "r").events())
    continued = training(tmp_path / "r", resume="true", num_epochs="3")
    check_refused(
        run, Refusal(f"train --resume --run-dir {tmp_path / 'r'} --num-epochs 3", "in use by another")
    )
    assert run("train", "--resume", "--run-dir", tmp_path / "r", "--num-epochs", 3, "--dry-run")[0] == 0
    list(continued.events())
    with pytest.raises(ConfigurationError, match="--num-epochs 1 are"):
        training(tmp_path / "r", resume="true", num_epochs="1")
    assert not is_locked(tmp_path / "r")
    finished = training(tmp_path / "r", resume="true", num_epochs="3")
    assert list(finished.events()) == [] and not is_locked(tmp_path / "r")


@pytest.mark.slow
def test_a_schedule_that_grows_with_the_run_is_said(lightly, tmp_path, succeeds):
    """A finished cosine run goes on with the high rate of the longer schedule; a constant rate is not mentioned."""
    line = (
        "train toy_model --dataset digits --limit-train 64 --limit-eval 10 --num-epochs 2 --learning-rate 0.1"
    )
    for schedule in ("cosine", "const"):
        folder = tmp_path / schedule
        succeeds(*line.split(), "--lr-schedule", schedule, "--lr-schedule-params", "{}", "--run-dir", folder)
        _, err = succeeds("train", "--resume", "--run-dir", folder, "--num-epochs", 4)
        told = [line for line in err.splitlines() if "the learning rate was" in line]
        assert len(told) == (schedule == "cosine")
    history = [json.loads(line) for line in (tmp_path / "cosine" / "metrics.jsonl").read_text().splitlines()]
    rates = [row["learning_rate"] for row in history if row["event"] == "execution"]
    assert rates[2] > 2 * rates[1]


@pytest.mark.slow
def test_starting_weights_are_opened_once_and_not_for_a_finished_run(lightly, tmp_path, succeeds):
    train(tmp_path / "a")
    run = training(tmp_path / "b", weights=str(tmp_path / "a"), resume=False)
    # The weights are those that were checked, whatever happens to their files before they are needed.
    shutil.rmtree(tmp_path / "a")
    list(run.events())
    assert report_of(tmp_path / "b")["trained_samples"]
    out, error = succeeds("train", "--resume", "--run-dir", tmp_path / "b", "--json")
    assert "is finished: nothing to continue" in error
    assert json.loads(out)["trained_samples"] == report_of(tmp_path / "b")["trained_samples"]
