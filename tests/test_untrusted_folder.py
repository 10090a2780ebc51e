"""Files in the folder where a command is typed are never executed, whatever their names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ipucnn.errors import DataError
from ipucnn.system_programs import find_program, run_program

ROOT = Path(__file__).resolve().parents[1]
MODULES = (
    "absl", "antigravity", "difflib", "encodings", "gzip", "h5py", "json", "keras", "matplotlib", "numpy",
    "pickle", "PIL", "queue", "random", "rich", "scipy", "shlex", "signal", "sitecustomize", "sklearn", "struct",
    "tensorflow", "tensorflow_datasets", "typer", "typing", "usercustomize", "yaml",
)  # fmt: skip
PROGRAMS = (
    "cc", "dvipng", "gc-info", "gc-monitor", "git", "latex", "lscpu", "nvidia-smi", "pdflatex", "ptxas", "sh", "uname"
)  # fmt: skip


@pytest.fixture
def hostile(tmp_path):
    """Fills a folder with traps; each appends its name to the file that is returned with it."""
    folder, sprung = tmp_path / "folder", tmp_path / "sprung"
    trap = f"#!{sys.executable} -E\nopen({str(sprung)!r}, 'a').write(__file__ + '\\n')\n"
    for place in (folder, folder / "bin", folder / "cuda_sdk_lib" / "bin"):
        place.mkdir(parents=True, exist_ok=True)
        for name in PROGRAMS:
            (place / name).write_text(trap)
            (place / name).chmod(0o755)
    for name in MODULES:
        (folder / f"{name}.py").write_text(trap)
    git = folder / ".git"
    (git / "hooks").mkdir(parents=True)
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "objects").mkdir()
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "refs" / "heads" / "main").write_text("0123456789" * 4 + "\n")
    runs = f"{folder}/git"
    (git / "config").write_text(
        f"[core]\n repositoryformatversion = 0\n fsmonitor = {runs}\n pager = {runs}\n sshCommand = {runs}\n"
        f' hooksPath = {folder}\n[alias]\n status = "!{runs}"\n[include]\n path = {folder}/more\n'
        f'[filter "x"]\n clean = {runs}\n process = {runs}\n'
    )
    (folder / "matplotlibrc").write_bytes(
        b"text.usetex: True\nbackend: module://antigravity\ntext.latex.preamble: \\input{x}\n# \xff\xfe\n"
    )
    (folder / ".netrc").write_text("machine example.org login x password y\n")
    return folder, sprung


def ipucnn(folder, *args):
    """Runs the console script in ``folder`` for a user whose PATH includes the current folder.

    One process runs the commands that "+" separates: each import of TensorFlow takes some seconds.
    """
    script = folder.parent / "bin" / "ipucnn"
    script.parent.mkdir(exist_ok=True)
    script.write_text(
        "import itertools, sys\n"
        "from ipucnn.__main__ import main\n"
        "for parts, words in itertools.groupby(sys.argv[1:], '+'.__eq__):\n"
        "    sys.argv[1:] = words\n"
        "    try:\n"
        "        parts or main()\n"
        "    except SystemExit as end:\n"
        "        if end.code:\n"
        "            raise\n"
    )
    paths = [path for path in sys.path if path and os.path.isabs(path) and path != str(folder)]
    return subprocess.run(
        [sys.executable, str(script), *args],
        cwd=str(folder),
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PATH": os.pathsep.join(["", ".", "bin", os.environ.get("PATH", os.defpath)]),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *paths]),
        },
    )


SMALL = ("--dataset", "digits", "--limit-train", "32", "--limit-eval", "8", "--num-epochs", "1")


@pytest.mark.slow
def test_train_and_evaluate_execute_nothing(hostile):
    folder, sprung = hostile
    train = ("train", "toy_model", *SMALL, "--run-dir", "r")
    done = ipucnn(folder, *train, "+", "evaluate", "r", "--plot", "plot.png")
    assert done.returncode == 0, done.stderr
    assert (folder / "plot.png").read_bytes()[:4] == b"\x89PNG"
    assert not sprung.exists(), sprung.read_text()


@pytest.mark.slow
def test_doctor_executes_nothing(hostile):
    folder, sprung = hostile
    done = ipucnn(folder, "doctor", "--full", "--json")
    assert done.returncode in (0, 6), done.stderr
    assert not sprung.exists(), sprung.read_text()


@pytest.mark.slow
def test_a_suite_executes_nothing(hostile):
    folder, sprung = hostile
    (folder / "suite.yml").write_text(
        "title: one\nrows:\n  - benchmark toy_model --micro-batch-size 2 --dataset digits\n"
    )
    args = ("--executions", "3", "--min-time", "0.01", "--max-time", "20", "--device", "cpu")
    done = ipucnn(folder, "benchmark", "--suite", "suite.yml", *args, "--run-dir", "s")
    assert done.returncode == 0, done.stderr
    assert not sprung.exists(), sprung.read_text()


def test_python_m_leaves_the_folder_off_the_path(hostile):
    folder, sprung = hostile
    # Python's own imports before the program begins are unprotected: `python -m` is for one's own folders.
    for name in MODULES:
        if name not in ("rich", "typer", "yaml", "numpy", "json"):
            (folder / f"{name}.py").unlink()
    done = subprocess.run(
        [sys.executable, "-m", "ipucnn", "train", "toy_model", "--print-config"],
        cwd=str(folder),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(os.path.isabs, sys.path)])},
    )
    assert done.returncode == 0, done.stderr
    assert not sprung.exists(), sprung.read_text()


def test_programs_come_only_from_absolute_folders_of_path(hostile, monkeypatch):
    folder, sprung = hostile
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", os.pathsep.join(["", ".", "bin", "cuda_sdk_lib/bin"]))
    assert find_program("gc-info") is None
    assert run_program(["gc-info"]).problem == "not found"
    monkeypatch.setenv("PATH", os.pathsep.join(["", str(folder / "bin")]))
    assert find_program("gc-info") == str(folder / "bin" / "gc-info")
    assert not sprung.exists()


def test_tfds_data_set_imports_no_foreign_modules(hostile, monkeypatch):
    """TFDS need not be installed: this is its method that imports (tensorflow_datasets/core/features/feature.py)."""
    import importlib

    from ipucnn.datasets.sources.tfds import refuse_foreign_features

    class Connector:
        @classmethod
        def cls_from_name(cls, python_class_name):
            return importlib.import_module(python_class_name.rpartition(".")[0])

    folder, sprung = hostile
    monkeypatch.syspath_prepend(str(folder))
    refuse_foreign_features(Connector)
    refuse_foreign_features(Connector)
    with pytest.raises(DataError, match="names antigravity"):
        Connector.cls_from_name("antigravity.Feature")
    assert not sprung.exists() and "antigravity" not in sys.modules
    (folder / "tensorflow_datasets.py").unlink()  # the trap would come first if TFDS is not installed
    with pytest.raises(ImportError):  # allowed, but absent here or without such a module
        Connector.cls_from_name("tensorflow_datasets.core.features.absent.Feature")


def test_a_long_version_in_a_run_folder_is_shortened():
    """A run folder's record of the machine that wrote it may have any text."""
    from ipucnn.runs.provenance import changes

    (line,) = changes({"numpy": "9" * 100_000}, {"numpy": "1.0"})
    assert line.startswith("numpy 999") and line.endswith(" before, 1.0 now") and len(line) < 500
