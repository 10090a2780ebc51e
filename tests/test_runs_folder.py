"""Run folders: each run gets a free name, and links that others planted are not written through."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from light_training import train_lightly
from support.refusals import check_raises

import ipucnn
from ipucnn.benchmarking.suite import parse_suite, plan_suite
from ipucnn.benchmarking.suite_run import run_rows
from ipucnn.command_group import parse_line
from ipucnn.config.resolve import resolve
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.events import show
from ipucnn.reports.runs import write_page
from ipucnn.runs import writer as run_writer
from ipucnn.runs.folder import is_unfinished, latest_run_dir
from ipucnn.runs.kfold import CrossValidation
from ipucnn.runs.train import TrainingRun
from ipucnn.runs.writer import RunWriter, claim_default, default_run_dir
from ipucnn.sessions.host.session import HostTrainer
from ipucnn.training.program import make_program


def names(folder="runs"):
    return sorted(p.name for p in Path(folder).iterdir())


def begin(path):
    (path / "config.yml").write_text("model-name: lenet\n")


def test_simultaneous_processes_get_a_folder_each(here):
    code = (
        "import sys; from ipucnn.runs.writer import claim_default; sys.stdin.read(1)\n"
        "for _ in range(20):\n"
        "    claim = claim_default('lenet', 'digits'); print(claim.path.name)\n"
        "    (claim.path / 'config.yml').write_text('model-name: lenet'); claim.unlock()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(ipucnn.__file__).parents[1])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    both = [subprocess.Popen([sys.executable, "-c", code], **pipes) for _ in range(2)]
    for process in both:
        process.stdin.write("x")
        process.stdin.flush()
    given = [name for process in both for name in process.communicate()[0].split()]
    assert len(given) == len(set(given)) == 40
    assert sorted(given) == names()
    assert [process.returncode for process in both] == [0, 0]


def test_leftovers_of_a_killed_process_are_never_resumed(here):
    assert latest_run_dir("lenet", "digits") is None
    first = claim_default("lenet", "digits")
    assert default_run_dir("lenet", "digits").name == "lenet-digits-2"
    assert latest_run_dir("lenet", "digits") is None
    begin(first.path)
    killed = claim_default("lenet", "digits")
    (killed.path / "checkpoints").mkdir()
    (killed.path / ".config.yml.123.tmp").write_text("half")
    assert is_unfinished(killed.path)
    assert latest_run_dir("lenet", "digits") == first.path
    begin(claim_default("lenet", "digits").path)
    assert latest_run_dir("lenet", "digits").name == "lenet-digits-3"
    assert names() == ["lenet-digits", "lenet-digits-2", "lenet-digits-3"]


def test_the_latest_run_is_the_one_that_began_last(here):
    first, second, third = (claim_default("lenet", "digits").path for _ in range(3))
    for path, time in ((first, 30), (second, 20), (third, 10)):
        begin(path)
        os.utime(path / "config.yml", (time, time))
    begin(claim_default("lenet", "digits-kfold5").path)
    assert latest_run_dir("lenet", "digits") == first
    (second / "environment.json").write_text('[{"started": "2026-11-28T10:00:00+0000"}]')
    assert latest_run_dir("lenet", "digits") == second
    shutil.rmtree(first)
    assert latest_run_dir("lenet", "digits") == second
    shutil.rmtree(second)
    assert latest_run_dir("lenet", "digits") == third


def test_a_root_that_is_a_file_is_refused(here):
    Path("runs").write_text("a")
    check_raises(DataError, "runs", "", claim_default, "lenet", "digits")


def make_run(**flags):
    small = {"dataset": "digits", "limit_train": "32", "limit_eval": "8", "micro_batch_size": "8"}
    return TrainingRun(resolve("train", {**small, "num_epochs": "1", **flags}, model="toy_model"))


def test_simultaneous_runs_get_a_folder_each(lightly, here):
    """Both are prepared before either has made its folder."""
    runs = [make_run(seed="1"), make_run(seed="2")]
    for run in runs:
        list(run.events())
    assert names() == ["toy_model-digits", "toy_model-digits-2"]
    for run, name in zip(runs, names()):
        config = (Path("runs") / name / "config.yml").read_text()
        assert f"run-dir: runs/{name}" in config and f"seed: {run.context.seed}" in config
        assert (Path("runs") / name / "report.json").is_file() and run.context.folder.path.name == name


@pytest.mark.slow
def test_run_without_results_releases_its_name(here, monkeypatch):
    def fail(*_, **__):
        raise DataError("the data are damaged", "mend them")

    with monkeypatch.context() as patched:
        patched.setattr(HostTrainer, "start", fail)
        for _ in range(2):
            check_raises(DataError, "the data are damaged", "", list, make_run().events())
    assert names() == []


def test_simultaneous_cross_validations_get_a_folder_each(here):
    flags = {"dataset": "digits", "limit_train": "5%", "limit_eval": "5%", "num_epochs": "1", "kfold": "2"}
    both = [CrossValidation(resolve("train", flags, model="toy_model")) for _ in range(2)]
    assert [one.root.name for one in both] == ["toy_model-digits-kfold2", "toy_model-digits-kfold2-2"]
    assert both[1].first.context.folder.path.parent == both[1].root
    with pytest.raises(DataError):
        CrossValidation(resolve("train", {**flags, "weights": "none.npz"}, model="toy_model"))
    assert names() == ["toy_model-digits-kfold2", "toy_model-digits-kfold2-2"]


@pytest.mark.slow_cases(
    ".config.yml.123.tmp-error0",
    ".config.yml.123.tmp-error1",
    "None-error0",
    "None-error1",
    "checkpoints-error1",
)
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError()])
@pytest.mark.parametrize("leftover", [None, "checkpoints", ".config.yml.123.tmp"])
def test_failed_folder_leaves_nothing_that_stops_the_same_command(here, monkeypatch, leftover, error):
    """The folder is new, or a killed process left it; the disk or memory is full after the first file."""
    path = here / "run"
    if leftover is not None:
        path.mkdir()
        (path / leftover).mkdir() if leftover == "checkpoints" else (path / leftover).write_text("half")
    write_text = run_writer.write_text

    def write(file, text):
        if file.name == "program.json":
            raise error
        write_text(file, text)

    monkeypatch.setattr(run_writer, "write_text", write)
    run = make_run(run_dir="run")
    with pytest.raises((DataError, MemoryError)):
        list(run.events())
    assert path.exists() == (leftover is not None)
    RunWriter(path).check_free(overwrite=False)


def test_folder_refused_for_its_checkpoints_is_removed(lightly, here):
    """Another run wrote checkpoints into the same folder after both were prepared."""
    run = make_run(run_dir="run", checkpoint_dir="shared")
    Path("shared").mkdir()
    (Path("shared") / "last.npz").write_text("another run's")
    check_raises(ConfigurationError, "written by another run meanwhile", "", list, run.events())
    assert names(".") == ["shared"] and names("shared") == ["last.npz"]


# -- a folder from others -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains one epoch; returns the finished run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("trained"))
        train_lightly(patch)
        list(make_run(run_dir="run", seed="1").events())
        return Path("run").absolute()


def test_a_page_that_is_killed_while_it_is_written_leaves_a_file_of_the_run(
    lightly, here, trained, monkeypatch
):
    """The next run with --overwrite takes such a file for one of a run."""
    shutil.copytree(trained, "run")
    left = []

    def killed(handle):
        left.extend(path for path in Path("run").iterdir() if path.name.endswith(".tmp"))
        Path("run", "kept").write_bytes(left[-1].read_bytes())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            write_page(RunWriter(Path("run")))
    (temporary,) = left
    Path("run", "kept").rename(temporary)
    RunWriter(Path("run")).check_free(overwrite=True)
    list(make_run(run_dir="run", seed="1", overwrite=True).events())
    assert not temporary.exists()


def test_an_unwritable_page_is_named_itself(here, trained, monkeypatch):
    shutil.copytree(trained, "run")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    words = "run/report.html cannot be written: No space left"
    check_raises(DataError, words, "free some space", write_page, RunWriter(Path("run")))


def test_checkpoints_of_a_replaced_run_are_deleted_if_the_new_ones_go_elsewhere(lightly, here, trained):
    shutil.copytree(str(trained), "run")
    (Path("run") / "checkpoints" / "mine.npz").write_text("mine")
    flags = {"run_dir": "run", "checkpoint_dir": "elsewhere", "overwrite": "true"}
    list(make_run(**flags).events())
    assert names("run/checkpoints") == ["mine.npz"] and "last.npz" in names("elsewhere")
    shutil.rmtree("run/checkpoints")
    shutil.copytree("elsewhere", "linked")
    (Path("run") / "checkpoints").symlink_to(here / "linked")
    list(make_run(**flags).events())
    assert names("linked") == names("elsewhere")


PLANTED = (
    "config.yml",
    "program.json",
    "metrics.jsonl",
    "timings.jsonl",
    "environment.json",
    "report.json",
    "checkpoints/last.npz",
    "checkpoints/best.npz",
    "checkpoints/checkpoint-00000099.npz",
    "tensorboard",
    "checkpoints",
)


@pytest.mark.parametrize("way", ["resume", "overwrite"])
@pytest.mark.parametrize("name", PLANTED)
def test_planted_link_is_not_written_through(lightly, here, trained, name, way):
    shutil.copytree(str(trained), "run")
    precious = here / "precious"
    planted = Path("run") / name
    if planted.is_dir():
        shutil.move(str(planted), str(precious))
        (precious / "other.txt").write_text("mine")
    elif planted.is_file() and name in ("config.yml", "checkpoints/last.npz"):
        shutil.move(str(planted), str(precious))
    else:
        planted.exists() and planted.unlink()
        precious.write_text("mine\n")
    planted.symlink_to(precious)

    def content():
        files = sorted(precious.rglob("*")) if precious.is_dir() else [precious]
        return {str(f): f.read_bytes() for f in files if f.is_file()}

    before = content()
    flags = {"resume": {"resume": "true", "num_epochs": "2"}, "overwrite": {"overwrite": "true"}}[way]
    try:
        list(make_run(run_dir="run", **flags).events())
    except DataError as error:
        assert ("link" in error.message or name in error.message) and error.hint
    assert content() == before


def test_suite_never_writes_through_links(here):
    """A folder from others may link ``rows`` to any folder."""
    folder, precious = here / "suite", here / "precious"
    precious.mkdir()
    folder.mkdir()
    (folder / "rows").symlink_to(precious)
    suite = plan_suite(parse_suite("rows:\n- benchmark lenet\n", "s.yml", "s", parse_line), None, {})
    check_raises(DataError, "rows is a link", "", show, run_rows(suite, folder))
    assert not list(precious.iterdir())


def test_continued_run_makes_its_folder_if_checkpoints_are_elsewhere(tmp_path):
    config = resolve("train", {"dataset": "digits"}, model="lenet").config
    folder = RunWriter(tmp_path / "gone" / "run", tmp_path / "checkpoints")
    folder.reopen(config, make_program(config, 64, seed=1), ["{}\n"])
    folder.unlock()
    assert (tmp_path / "gone" / "run" / "config.yml").is_file() and (tmp_path / "checkpoints").is_dir()


def test_a_process_that_lost_its_run_removes_nothing(tmp_path):
    """It was stopped before its first checkpoint; without a file lock, another process continued the run."""
    config = resolve("train", {"dataset": "digits"}, model="lenet").config
    program = make_program(config, 64, seed=1)
    first, second = (RunWriter(tmp_path / "run") for _ in range(2))
    first.create(config, program)
    first.unlock()
    second.reopen(config, program, ["{}\n"])
    second.unlock()
    before = {path.name for path in (tmp_path / "run").iterdir()}
    first.discard()
    assert {path.name for path in (tmp_path / "run").iterdir()} == before
    assert before == {"checkpoints", "config.yml", "environment.json", "metrics.jsonl", "program.json"}
