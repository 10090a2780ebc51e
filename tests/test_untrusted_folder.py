"""Nothing that lies in the folder a command is typed in is executed, whatever it is called."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ipucnn.diagnosis.programs import find_program, run_program
from ipucnn.errors import DataError
from ipucnn.runs.provenance import git_revision, sources

ROOT = Path(__file__).resolve().parents[1]
REVISION = "0123456789abcdef0123456789abcdef01234567"
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
    """A folder full of traps; each leaves its name in the file that is returned with it."""
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
    (git / "refs" / "heads" / "main").write_text(REVISION + "\n")
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
    """The console script, typed in ``folder`` by someone whose PATH has the current folder in it.

    One process runs the commands that "+" parts: each import of TensorFlow takes some seconds.
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


def test_train_and_evaluate_execute_nothing(hostile):
    folder, sprung = hostile
    train = ("train", "toy_model", *SMALL, "--run-dir", "r")
    done = ipucnn(folder, *train, "+", "evaluate", "r", "--plot", "plot.png")
    assert done.returncode == 0, done.stderr
    entry = json.loads((folder / "r" / "environment.json").read_text())[0]
    assert entry["git"]["working_directory"] == {"revision": REVISION}
    assert set(entry["git"]["ipucnn"]) == {"revision", "sources_sha256"}
    assert (folder / "plot.png").read_bytes()[:4] == b"\x89PNG"
    assert not sprung.exists(), sprung.read_text()


@pytest.mark.slow
def test_doctor_executes_nothing(hostile):
    folder, sprung = hostile
    done = ipucnn(folder, "doctor", "--deep", "--json")
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


def test_a_module_run_with_python_m_leaves_the_folder_off_the_path(hostile):
    folder, sprung = hostile
    # What Python itself imports before the program begins cannot be helped: `python -m` is for one's own folders.
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


def test_programs_come_from_absolute_folders_of_path_alone(hostile, monkeypatch):
    folder, sprung = hostile
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", os.pathsep.join(["", ".", "bin", "cuda_sdk_lib/bin"]))
    assert find_program("gc-info") is None
    assert run_program(["gc-info"]).problem == "not found"
    monkeypatch.setenv("PATH", os.pathsep.join(["", str(folder / "bin")]))
    assert find_program("gc-info") == str(folder / "bin" / "gc-info")
    assert not sprung.exists()


def _repository(folder, head="ref: refs/heads/main\n"):
    (folder / ".git" / "refs" / "heads").mkdir(parents=True)
    (folder / ".git" / "HEAD").write_text(head)
    return folder / ".git"


def test_revisions_are_read_from_loose_and_packed_references(tmp_path):
    git = _repository(tmp_path)
    assert git_revision(tmp_path) is None  # no commit yet
    (git / "packed-refs").write_text(
        f"# pack-refs with: peeled\n{REVISION[::-1]} refs/heads/main\n^{REVISION}\n"
    )
    assert git_revision(tmp_path) == REVISION[::-1]
    (git / "refs" / "heads" / "main").write_text(REVISION + "\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert git_revision(tmp_path / "a" / "b") == REVISION
    (git / "HEAD").write_text("a" * 64 + "\n")
    assert git_revision(tmp_path) == "a" * 64


def test_a_worktree_has_its_own_head_and_the_branches_of_its_repository(tmp_path):
    git = _repository(tmp_path / "main")
    own = git / "worktrees" / "w"
    own.mkdir(parents=True)
    (own / "HEAD").write_text("ref: refs/heads/side\n")
    (own / "commondir").write_text("../..\n")
    (git / "refs" / "heads" / "side").write_text(REVISION + "\n")
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / ".git").write_text(f"gitdir: {own}\n")
    assert git_revision(tmp_path / "w") == REVISION


@pytest.mark.parametrize(
    "head",
    [
        "",
        "ref: /etc/passwd\n",
        "ref: refs/../../secret\n",
        "ref: refs/heads/../../../secret\n",
        "ref: refs/heads/.invalid\n",
        "g" * 40,
        "a" * 41,
        "\x00" * 40,
        "x" * 10**6,
    ],
)
def test_what_is_no_revision_is_not_told(tmp_path, head):
    git = _repository(tmp_path / "r", head)
    (tmp_path / "secret").write_text(REVISION)
    (git.parent / "secret").write_text(REVISION)
    assert git_revision(tmp_path / "r") is None


def test_fifos_and_links_in_git_s_place_are_not_opened(tmp_path):
    git = _repository(tmp_path / "r")
    (git / "HEAD").unlink()
    os.mkfifo(git / "HEAD")
    assert git_revision(tmp_path / "r") is None
    (git / "HEAD").unlink()
    (tmp_path / "elsewhere").write_text(REVISION)
    (git / "HEAD").symlink_to(tmp_path / "elsewhere")
    assert git_revision(tmp_path / "r") is None
    (tmp_path / "f").mkdir()
    os.mkfifo(tmp_path / "f" / ".git")
    assert git_revision(tmp_path / "f") is None


def test_the_sources_are_told_as_git_tells_them():
    found = sources()
    assert len(found["sources_sha256"]) == 64
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode == 0:
        assert found["revision"] == head.stdout.strip()


def test_a_data_set_makes_tfds_import_nothing_of_others(hostile, monkeypatch):
    """TFDS need not be here: this is the method of it that imports (tensorflow_datasets/core/features/feature.py)."""
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
    (
        folder / "tensorflow_datasets.py"
    ).unlink()  # what lies there would come first where TFDS is not installed
    with pytest.raises(ImportError):  # allowed, and absent here or without such a module
        Connector.cls_from_name("tensorflow_datasets.core.features.absent.Feature")


def test_a_long_version_in_a_run_folder_is_shortened():
    """What a run folder says of the machine that wrote it may be anything."""
    from ipucnn.runs.provenance import changes

    (line,) = changes({"numpy": "9" * 100_000}, {"numpy": "1.0"})
    assert line.startswith("numpy 999") and line.endswith(" before, 1.0 now") and len(line) < 500
