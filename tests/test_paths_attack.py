"""Every option that takes a path, given every kind of bad path: an error and a hint, before TensorFlow is imported.

The command lines run in a process of their own, first as the user who runs the tests and then, if that is root, as
another user, who may not search every folder.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import pytest

NOBODY = 65534
HANGS_S = int(os.environ.get("HANGS_S", "60"))
NAME = "x" * 300
LONG = "/".join(["y" * 200] * 25)

STOP = ("--ipus", "4", "--num-replicas", "2")
"""Ends ``train`` after its options were checked, and before its data are."""
LATE = ("--micro-batch-size", "1", "--global-batch-size", "1000000")
"""Ends ``train`` after the data were opened, and before TensorFlow is imported."""

TEMPLATES = {
    "dataset-path": ("train", "lenet", *LATE, "--dataset-path", "{}"),
    "dataset-path of a set": ("train", "lenet", *LATE, "--dataset", "mnist", "--dataset-path", "{}"),
    "dataset-path of images": ("train", "lenet", *LATE, "--dataset", "imagefolder", "--dataset-path", "{}"),
    "dataset-path of tfds": ("train", "lenet", *LATE, "--dataset", "tfds:mnist", "--dataset-path", "{}"),
    "dataset": ("train", "lenet", *LATE, "--dataset", "{}"),
    "dataset of masks": ("train", "unet", *LATE, "--dataset", "{}"),
    "run-dir": ("train", "lenet", *STOP, "--run-dir", "{}"),
    "run-dir --resume": ("train", "lenet", *STOP, "--resume", "--run-dir", "{}"),
    "run-dir --overwrite": ("train", "lenet", *STOP, "--overwrite", "--run-dir", "{}"),
    "run-dir --kfold": ("train", "lenet", *STOP, "--kfold", "2", "--run-dir", "{}"),
    "run-dir --kfold --resume": ("train", "lenet", *STOP, "--kfold", "2", "--resume", "--run-dir", "{}"),
    "run-dir --print-config": ("train", "lenet", "--print-config", "--resume", "--run-dir", "{}"),
    "checkpoint-dir": ("train", "lenet", *STOP, "--checkpoint-dir", "{}"),
    "checkpoint-output-dir": ("train", "lenet", *STOP, "--checkpoint-output-dir", "{}"),
    "checkpoint-input-dir": ("train", "lenet", *STOP, "--checkpoint-input-dir", "{}"),
    "checkpoint-input-dir --no-training": (
        *("train", "lenet", *STOP, "--no-training"),
        *("--checkpoint-input-dir", "{}"),
    ),
    "weights": ("train", "lenet", *STOP, "--weights", "{}"),
    "executable-cache": ("train", "lenet", *STOP, "--executable-cache", "{}"),
    "config-path": ("train", "lenet", *STOP, "--config-path", "{}"),
    "config-path --config": ("train", "lenet", *STOP, "--config", "a", "--config-path", "{}"),
    "plan": ("train", "lenet", *STOP, "--plan", "{}"),
    "plan-splits config-path": ("plan-splits", "lenet", "--stages", "200", "--config-path", "{}"),
    "plan-splits compare": ("plan-splits", "lenet", "--stages", "2", "--compare", "{}"),
    "plan-splits save": ("plan-splits", "lenet", "--optimisations", "--save", "{}"),
    "plan-splits html": ("plan-splits", "lenet", "--optimisations", "--html", "{}"),
    "evaluate": ("evaluate", "{}"),
    "evaluate checkpoint": ("evaluate", "run", "--checkpoint", "{}"),
    "evaluate checkpoint of a network": ("evaluate", "lenet", "--checkpoint", "{}"),
    "evaluate weights": ("evaluate", "lenet", "--weights", "{}"),
    "evaluate a Keras file": ("evaluate", "{}.h5", "--model-name", "lenet"),
    "evaluate plot": ("evaluate", "none", "--plot", "{}"),
    "evaluate plot.png": ("evaluate", "none", "--plot", "{}.png"),
    "evaluate predictions": ("evaluate", "none", "--predictions", "{}.csv"),
    "evaluate contact-sheet": ("evaluate", "none", "--contact-sheet", "{}.png"),
    "infer": ("infer", "{}", "image.png"),
    "infer image": ("infer", "none", "{}"),
    "infer below": ("infer", "none", "{}/*.png"),
    "infer below that": ("infer", "none", "{}/**/*.png"),
    "infer checkpoint": ("infer", "lenet", "image.png", "--checkpoint", "{}"),
    "infer weights": ("infer", "lenet", "image.png", "--weights", "{}"),
    "infer output": ("infer", "none", "image.png", "--output", "{}"),
    "infer output.csv": ("infer", "none", "image.png", "--output", "{}.csv"),
    "infer output of masks": ("infer", "unet", "image.png", "--output", "{}", "--weights", "none.h5"),
    "infer contact-sheet": ("infer", "none", "image.png", "--contact-sheet", "{}.png"),
    "infer dataset-path": ("infer", "lenet", "--split", "eval", "--weights", "a.h5", "--dataset-path", "{}"),
    "benchmark run-dir": ("benchmark", "lenet", "--baseline", "none", "--run-dir", "{}"),
    "benchmark baseline": ("benchmark", "lenet", "--baseline", "{}"),
    "benchmark dataset-path": ("benchmark", "lenet", "--baseline", "none", "--dataset-path", "{}"),
    "benchmark config-path": ("benchmark", "lenet", "--baseline", "none", "--config-path", "{}"),
    "benchmark plan": ("benchmark", "lenet", "--baseline", "none", "--plan", "{}"),
    "suite": ("benchmark", "--print-config", "--suite", "{}"),
    "suite.yml": ("benchmark", "--print-config", "--suite", "{}.yml"),
    "suite run-dir": ("benchmark", "toy*", "--versus", "none", "--run-dir", "{}"),
    "suite run-dir --resume": ("benchmark", "toy*", "--versus", "none", "--resume", "--run-dir", "{}"),
    "suite run-dir --overwrite": ("benchmark", "toy*", "--versus", "none", "--overwrite", "--run-dir", "{}"),
    "suite versus": ("benchmark", "toy*", "--versus", "{}"),
    "doctor": ("doctor", "--dataset-path", "{}"),
}

YAML_KEYS = (
    "dataset-path",
    "run-dir",
    "checkpoint-dir",
    "checkpoint-input-dir",
    "checkpoint-output-dir",
    "weights",
)

VARIABLES = {
    "HOME": ("train ~", "doctor"),
    "IPUCNN_CUSTOM_OPS": ("doctor",),
    "TMPDIR": ("doctor", "infer"),
}
FOR_OTHERS = (
    *("closed", "in closed", "file in closed", "new in closed"),
    *("unreadable", "blind", "sealed", "new in sealed"),
)
"""The paths whose result depends on the user."""
TOO_LONG = ("long name", "long name below")
"""Names that only the file system refuses; options already refuse texts that no file can have as its name."""
COMMANDS = {
    "train": ("train", "lenet", *STOP),
    "train ~": ("train", "lenet", *STOP, "--run-dir", "~/run"),
    "doctor": ("doctor",),
    "infer": ("infer", "none", "image.png"),
}
FREE_TO_ANSWER = ("doctor",)
"""Commands that report a path that leads nowhere without an error."""


def make_paths(folder):
    """Makes every kind of path in ``folder``, the working directory; returns them by name."""
    (folder / "file").write_text("not what is expected\n")
    (folder / "folder").mkdir()
    (folder / "run").mkdir()
    (folder / "image.png").write_bytes(b"no image")
    closed = folder / "closed"
    (closed / "inside").mkdir(parents=True)
    (closed / "inside" / "file").write_text("x")
    unreadable = folder / "unreadable"
    unreadable.write_text("x")
    blind = folder / "blind"
    blind.mkdir()
    (folder / "sealed").mkdir()
    for path in (closed, unreadable, blind):
        path.chmod(0)
    (folder / "sealed").chmod(0o555)
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to("pool")
    (folder / "pool").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere/at/all")
    (folder / "to-folder").symlink_to("folder")
    tree = folder / "tree" / "train" / "class"
    tree.mkdir(parents=True)
    (tree / "loop.png").symlink_to("loop.png")
    (folder / "tree" / "val").symlink_to("../tree")
    (folder / "tree" / "train" / "self").symlink_to("self")
    masks = folder / "masks"
    (masks / "images").mkdir(parents=True)
    (masks / "masks").mkdir()
    (masks / "images" / "a.png").symlink_to("a.png")
    (masks / "masks" / "a.png").symlink_to("../images/a.png")
    with socket.socket(socket.AF_UNIX) as server:
        folder_now = os.getcwd()
        os.chdir(folder)
        server.bind("socket")
        os.chdir(folder_now)
    return {
        "empty": "",
        "blank": " ",
        "absent": "nowhere",
        "absent below": "nowhere/at/all",
        "file": "file",
        "below a file": "file/below",
        "folder": "folder",
        "link to a folder": "to-folder",
        "root": "/",
        "parent": "..",
        "closed": "closed",
        "in closed": "closed/inside",
        "file in closed": "closed/inside/file",
        "new in closed": "closed/inside/new/one",
        "unreadable": "unreadable",
        "blind": "blind",
        "sealed": "sealed",
        "new in sealed": "sealed/new",
        "fifo": "fifo",
        "below a fifo": "fifo/below",
        "socket": "socket",
        "terminal": None,
        "loop": "loop",
        "below a loop": "loop/below",
        "dangling": "dangling",
        "loops inside": "tree",
        "masks with loops": "masks",
        "long name": NAME,
        "long name below": f"folder/{NAME}",
        "name of 255 bytes": "z" * 255,
        "long path": LONG,
        "long absolute path": f"/{LONG}",
        "no user": "~nouser",
        "below no user": "~nouser/below",
        "NUL": "a\0b",
        "newline": "a\nb",
        "surrogate": "a\udc80b",
        "no byte": "a\ud800b",
        "escape": "\x1b[31mred",
        "markup": "[bold]x[/] {y} %s",
    }


def lines(paths):
    """Yields (name, arguments, environment changes, whether in a deleted folder) of every command line."""
    for option, template in TEMPLATES.items():
        for kind, path in paths.items():
            if (kind == "root" and template[0] == "infer") or (kind == "empty" and "{}/**/*.png" in template):
                continue  # this would search all of the machine's files
            args = [part.replace("{}", path) for part in template]
            yield f"{option}: {kind}", args, {}, False
    for key in YAML_KEYS:
        for kind, path in paths.items():
            name = f"yaml-{key}-{kind}.yml".replace(" ", "-")
            Path(name).write_text(f"model-name: lenet\n{key}: {json.dumps(path)}\n")
            yield f"YAML {key}: {kind}", ["train", *STOP, "--config-path", name], {}, False
    for variable, commands in VARIABLES.items():
        for kind, path in paths.items():
            if "\0" in path or "\ud800" in path:
                continue  # no environment variable can hold it
            for command in commands:
                yield f"{variable} of {command}: {kind}", list(COMMANDS[command]), {variable: path}, False
    for command, args in COMMANDS.items():
        yield f"no HOME for {command}", list(args), {"HOME": None}, False
    for option, template in TEMPLATES.items():
        for path in ("nowhere", "./.", "../nowhere"):
            args = [part.replace("{}", path) for part in template]
            yield f"{option} in a deleted folder: {path}", args, {}, True


def attack(folder):
    """Runs all command lines as this user; yields a text for each one that ends wrongly."""
    os.chdir(folder)
    import pty

    paths = make_paths(folder)
    leader, follower = pty.openpty()
    paths["terminal"] = os.ttyname(follower)
    todo = list(lines(paths))
    before = list_all(folder)
    problems, count = [], 0
    users = [("", None)]
    if os.geteuid() == 0:
        users.append(("as another user: ", NOBODY))
    for who, number in users:
        if number is not None:
            os.chmod(folder, 0o755)
            os.setgroups([])
            os.setgid(number)
            os.setuid(number)
        lines_of_user = (
            todo if number is None else [one for one in todo if one[0].rsplit(": ", 1)[-1] in FOR_OTHERS]
        )
        count += len(lines_of_user)
        for name, args, changes, deleted in lines_of_user:
            print(repr(name), file=sys.stderr)
            problem = one(name.rsplit(": ", 1)[-1], args, changes, deleted, folder)
            if problem is not None:
                problems.append((who + name, args, problem))
        after = list_all(folder)
        if number is None:
            problems += [(who, path, "left behind") for path in sorted(after - before)]
            before = after
    os.close(leader)
    os.close(follower)
    return problems, count


def list_all(folder):
    return {os.path.join(place, name) for place, inner, files in os.walk(folder) for name in (*inner, *files)}


class Hangs(BaseException):
    pass


def _hangs(number, frame):
    raise Hangs


def one(kind, args, changes, deleted, folder):
    """Returns the fault in the ending of one command line, None if there is none."""
    from ipucnn import cli

    environment = dict(os.environ)
    signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(HANGS_S)
    out, err = io.StringIO(), io.StringIO()
    try:
        for name, value in changes.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        tempfile.tempdir = None
        if deleted:
            gone = tempfile.mkdtemp(prefix="ipucnn-gone-")
            os.chdir(gone)
            os.rmdir(gone)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.run(list(args))
    except BaseException:
        return traceback.format_exc()
    finally:
        signal.alarm(0)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None
    text = err.getvalue()
    if "tensorflow" in sys.modules:
        # Every later line would be slow, and could no longer show this fault.
        raise RuntimeError(f"TensorFlow was imported: {args} {changes}\n{text}")
    if "Traceback" in text or code not in (0, 2, 3, 4, 6):
        return f"exit code {code}\n{text}"
    if kind in TOO_LONG and code == 2 and args[0] != "doctor":
        return f"exit code 2, and the file system refuses it\n{text}"
    if code == 0:
        silent = args[0] in FREE_TO_ANSWER or "--print-config" in args
        return None if silent else f"exit code 0\n{text}"
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    hints = [line for line in text.splitlines() if line.startswith("hint: ") and len(line) > 6]
    if len(errors) != 1 or len(hints) != 1:
        return f"{len(errors)} errors, {len(hints)} hints\n{text}"
    if max(map(len, text.splitlines())) > 2000:
        return f"a line of {max(map(len, text.splitlines()))} characters"
    return None


@pytest.mark.slow
def test_no_path_ends_in_a_traceback():
    folder = Path(tempfile.mkdtemp(prefix="ipucnn-paths-"))
    try:
        done = subprocess.run(
            [sys.executable, __file__, str(folder)],
            capture_output=True,
            text=True,
            timeout=600,
            env={**os.environ, "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"},
        )
    finally:
        for path in ("closed", "blind", "sealed"):
            with contextlib.suppress(OSError):
                (folder / path).chmod(0o755)
        shutil.rmtree(str(folder), ignore_errors=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    answer = json.loads(done.stdout)
    assert answer["found"] == [], json.dumps(answer["found"][:10], indent=1)
    assert answer["count"] > 2000


if __name__ == "__main__":
    found, count = attack(Path(sys.argv[1]))
    json.dump({"found": found, "count": count}, sys.stdout)
