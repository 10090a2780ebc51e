"""Commands write files through links, to pipes and to terminals, and never over their inputs."""

import csv
import os
import select
import threading
from pathlib import Path

import pytest
from support.trained_runs import run_of

PLAN = ("plan-splits", "lenet", "--stages", "2")


class Fifo(threading.Thread):
    """A FIFO and the data written to it."""

    def __init__(self, path):
        super().__init__(daemon=True)
        os.mkfifo(path)
        # Open before any writer, however late the thread runs.
        self._end, self.data = os.open(path, os.O_RDONLY | os.O_NONBLOCK), b""
        self.start()

    def run(self):
        waiting = select.poll()
        waiting.register(self._end, select.POLLIN)
        waiting.poll()
        os.set_blocking(self._end, True)
        with os.fdopen(self._end, "rb") as stream:
            self.data = stream.read()

    def read(self):
        self.join(60)
        return self.data


@pytest.fixture
def trained():
    return run_of("lenet")


@pytest.fixture
def image(tmp_path):
    from PIL import Image

    Image.new("L", (8, 8), 128).save(str(tmp_path / "image.png"))
    return tmp_path / "image.png"


def test_full_temporary_folder_is_not_blamed_on_the_pipe(tmp_path, monkeypatch):
    """Output for a pipe is first written in the temporary folder."""
    import tempfile

    from ipucnn.filesystem import user_error_of, write_output

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    Fifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="No such") as error:
        write_output(tmp_path / "fifo", lambda path: path.write_bytes(b"x"))
    assert user_error_of(error.value).message.startswith(str(tmp_path / "absent"))


@pytest.mark.parametrize("option, starts", [("--save", b"model: lenet"), ("--html", b"<!DOCTYPE html>")])
def test_plan_can_be_written_to_a_pipe(run, tmp_path, option, starts):
    """Shells do this for ``--html >(cat)``."""
    fifo = Fifo(tmp_path / "fifo")
    code, out, err = run(*PLAN, option, "fifo")
    assert code == 0 and "written: fifo" in err and "stage" in out
    assert starts.lower() in fifo.read().lower()
    assert [p.name for p in tmp_path.iterdir()] == ["fifo"]


@pytest.mark.parametrize(("name", "to"), [("/dev/fd/1", "file"), ("link", "pipe")])
def test_plan_can_be_written_to_stdout(tmp_path, name, to):
    import subprocess
    import sys

    import ipucnn

    # Not /dev/stdout itself: if this failed as root, the machine would lose it.
    (tmp_path / "link").symlink_to("/dev/fd/1")
    environment = {**os.environ, "PYTHONPATH": str(Path(ipucnn.__file__).parents[1])}
    command = [sys.executable, "-m", "ipucnn", *PLAN, "--save", name, "--html", name]
    if to == "pipe":
        out = subprocess.run(
            command, capture_output=True, text=True, cwd=str(tmp_path), env=environment
        ).stdout
    else:
        with open(tmp_path / "out", "w") as file:
            subprocess.run(command, stdout=file, check=True, cwd=str(tmp_path), env=environment)
        out = (tmp_path / "out").read_text()
    # Both files, then the printed text.
    assert out.index("model: lenet") < out.index("</html>") < out.rindex("to train with it")


def test_a_new_plan_replaces_the_former_one(succeeds):
    for _ in range(2):
        succeeds(*PLAN, "--save", "plan.yml")


def test_predictions_are_written_to_a_pipe_as_csv(run, tmp_path, trained, image):
    fifo = Fifo(tmp_path / "fifo")
    code, out, _ = run("infer", trained, image, "--output", "fifo")
    rows = list(csv.reader(fifo.read().decode().splitlines()))
    assert code == 0 and rows[0][0] == "image" and rows[1][0] == str(image) and out == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fifo", "image.png"]


@pytest.mark.slow
def test_evaluation_figures_and_tables_can_be_written_to_pipes(run, tmp_path, trained):
    pytest.importorskip("matplotlib")
    plot, table = Fifo(tmp_path / "plot"), Fifo(tmp_path / "table")
    code, _, _ = run("evaluate", trained, "--plot", "plot", "--predictions", "table")
    assert code == 0
    assert plot.read().startswith(b"\x89PNG") and table.read().startswith(b"index,image,label")
