"""Attacks ipucnn with command lines, damaged run folders and data files, and judges what it does with them.

    python benchmarks/attack.py --seed 7             # all of it: about an hour on two cores
    python benchmarks/attack.py --seed 7 --continue  # goes on where it was stopped
    python benchmarks/attack.py --seed 7 --only line:123

A case is a pure function of (seed, kind, number).  Two servers have the program's modules imported, one of them
TensorFlow too (imported only: nothing has computed in it), and fork a process for each case; a share of the cases
is started as fresh processes, to show that the servers hide nothing.  Exit code 5 if anything was found.

Nothing here is written to a device of the machine, and the processes have no network where that can be arranged.
"""

import argparse
import collections
import contextlib
import ctypes
import importlib
import importlib.abc
import importlib.util
import io
import json
import os
import pickle
import platform
import random
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

REPOSITORY = Path(__file__).resolve().parents[1]
for _folder in (str(Path(__file__).resolve().parent), str(REPOSITORY)):
    if _folder not in sys.path:
        sys.path.insert(0, _folder)

import attack_inputs as inputs  # noqa: E402
from attack_inputs import Case, CommandLine, Draw, Sandbox  # noqa: E402

KINDS = ("line", "tensorflow", "folder", "data")
TITLES = {
    "line": "command lines",
    "tensorflow": "command lines that compute",
    "folder": "damaged run folders",
    "data": "data files",
}
ALLOWED_CODES = (0, 2, 3, 4, 5, 6, 7, 130, 143)
REACHED_CODE, BROKEN_CODE = 77, 99
"""Exit codes of a case that came to TensorFlow where it may not compute, and of one that could not be made."""
SILENT_S = 30.0
"""Without output and without using the processor for so long, a process hangs."""
STOP_AFTER_CPU_S = 12.0
"""A case that computes (it may be a long, legal training) is asked to stop after so much processor time."""
STOP_WITHIN_S = 30.0
ROWS = 20
"""A wildcard may stand for so many networks."""
LIMIT_CPU_S = 30.0
"""A command line that does not come to TensorFlow takes less."""
MEMORY_BYTES = 2 * 2**30
"""What a case may take beyond what its server has."""
LINE_CHARACTERS = 4000
"""A message is shorter."""
FRESH_SHARE = {"line": 0.05, "tensorflow": 0.01, "folder": 0.01, "data": 0.01}
UNPRIVILEGED_SHARE = 0.1
STREAMS_SHARE = 0.03
STREAMS = ("stdout closed", "stderr closed", "stdout broken", "stderr broken")

DOCS = REPOSITORY / "docs" / "security.md"
BEGIN, END = (
    "<!-- the table of benchmarks/attack.py begins -->",
    "<!-- the table of benchmarks/attack.py ends -->",
)


class ReachedTensorFlow(BaseException):
    """The command line passed every check that needs no TensorFlow."""


# -- judging --------------------------------------------------------------------------------------------------

Entry = Tuple[int, int, int, int, str]
Snapshot = Dict[str, Entry]


class Finding(NamedTuple):
    """Something that should not have happened: its class, what exactly, and what is common to all like it."""

    kind: str
    detail: str
    signature: str


FINDINGS = {
    "traceback": "tracebacks",
    "signal": "signals",
    "silent": "30 s without progress",
    "hint": "missing hints",
    "files": "files left behind",
    "executed": "executed",
    "memory": "over memory",
    "slow": "over time",
    "deaf": "deaf to signals",
    "code": "wrong exit codes",
    "output": "unprintable or foreign output",
    "broken": "cases not made",
}


class Ending(NamedTuple):
    """How a case ended.

    Attributes:
        code: exit code; negative for a signal that the campaign did not send.
        stdout, stderr: what it printed.
        cut: why the campaign ended it: "silent", "slow", "memory", "deaf"; empty if it ended by itself.
        before, after: snapshots of the guarded folders.
        executed: traps that something ran, and programs that were started.
        left_running: processes of its own lived on.
    """

    code: int
    stdout: bytes
    stderr: bytes
    cut: str = ""
    before: Optional[Snapshot] = None
    after: Optional[Snapshot] = None
    executed: Tuple[str, ...] = ()
    left_running: bool = False


def snapshot(folder: Path) -> Snapshot:
    """Every entry below a folder: type and permissions, size, time of change (of files), inode, link's end."""
    found: Snapshot = {}
    pending = [os.fsencode(str(folder))]
    while pending:
        here = pending.pop()
        try:
            entries = list(os.scandir(here))
        except OSError:
            continue
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            is_folder = stat.S_ISDIR(status.st_mode)
            link = os.fsdecode(os.readlink(entry.path)) if stat.S_ISLNK(status.st_mode) else ""
            times = (0, 0, 0) if is_folder else (status.st_size, status.st_mtime_ns, status.st_ino)
            found[os.fsdecode(entry.path)] = (status.st_mode, *times, link)
            if is_folder:
                pending.append(entry.path)
    return found


def judge(ending: Ending, case: Case, sandbox: Optional[Sandbox] = None) -> List[Finding]:
    """Everything that is wrong with the way a case ended."""
    found: List[Finding] = []

    def add(kind: str, detail: str, signature: str = "") -> None:
        found.append(Finding(kind, detail[:2000], f"{kind}: {_normalised(signature or detail)}"))

    errors = ending.stderr.decode("utf-8", "replace")
    if ending.code == BROKEN_CODE:
        add("broken", errors[-1500:], (errors.strip().splitlines() or ["?"])[-1])
        return found
    last = _normalised(_last_error(errors))
    command = case.args[0] if case.args else ""
    if ending.cut == "silent":
        add("silent", f"no output and no processor time for {SILENT_S:.0f} s", f"{case.kind} {command}")
    elif ending.cut == "slow":
        add("slow", f"more than {LIMIT_CPU_S:.0f} s of processor time", f"{case.kind} {command}")
    elif ending.cut == "memory":
        add("memory", f"more than {MEMORY_BYTES // 2**20} MiB", f"{case.kind} {command}")
    elif ending.cut == "deaf":
        add("deaf", f"did not end within {STOP_WITHIN_S:.0f} s of SIGTERM", f"{case.kind} {command}")
    elif ending.code < 0:
        name = signal.Signals(-ending.code).name
        add("signal", f"ended by {name}", f"{name} {case.kind} {command}")
    is_told = not case.streams.startswith("stderr")
    if (
        "Traceback (most recent call last)" in errors
        or "this is a bug" in errors
        or "Fatal Python error" in errors
    ):
        add("traceback", errors[-1500:], traceback_signature(errors))
    elif (
        ending.code >= 0
        and not ending.cut
        and ending.code not in (*ALLOWED_CODES, REACHED_CODE)
        and not _is_stopped_row(ending.code, errors)
    ):
        add("code", f"exit code {ending.code}: {last}", f"{ending.code} {last}")
    elif ending.code >= 0 and not ending.cut and is_told:
        _judge_messages(ending.code, errors, add)
    _judge_output(ending, case, add)
    if ending.executed:
        add("executed", ", ".join(ending.executed), " ".join(sorted({_program(e) for e in ending.executed})))
    if ending.left_running:
        add("files", "a process of it lives on", f"process {command}")
    if ending.before is not None and ending.after is not None and sandbox is not None and not ending.cut:
        for path, what, sign in changes(ending, case, sandbox):
            add("files", f"{path} {what}", f"{what} {sign} {command} code {ending.code}")
    return found


def _is_stopped_row(code: int, errors: str) -> bool:
    """Whether a suite failed only because its row, a process of its own, came to the stand-in for TensorFlow."""
    return code == 1 and f"its process ended with exit code {REACHED_CODE} and" in errors


def _judge_messages(code: int, errors: str, add: Any) -> None:
    """One ``error:`` line and a ``hint:`` line after it where the exit code says so, none where it does not."""
    lines = errors.splitlines()
    at = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    if code in (0, REACHED_CODE):
        if at:
            add(
                "hint",
                f"exit code {code} with {lines[at[0]][:300]}",
                f"code {code} with an error: {lines[at[0]][:80]}",
            )
        return
    if code in (130, 143):
        return
    if len(at) != 1:
        said = lines[-1][:200] if lines else "nothing"
        add(
            "hint",
            f"exit code {code} with {len(at)} error lines; last: {said}",
            f"{len(at)} error lines: {said[:80]}",
        )
    elif at[0] + 1 >= len(lines) or not lines[at[0] + 1].startswith("hint: "):
        add("hint", f"no hint: {lines[at[0]][:300]}", f"no hint: {lines[at[0]][:100]}")


_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")
_FOREIGN = re.compile(
    r"^(.*\.py:\d+: \w*Warning|TIFF\w*: |LZW\w*: |libpng |Corrupt JPEG|Exception ignored in"
    r"|[WEFI]\d{4} \d|\d{4}-\d\d-\d\d \d\d:)"
)


def _judge_output(ending: Ending, case: Case, add: Any) -> None:
    """What is printed is UTF-8 without control characters, in lines of a sensible length, and the program's own."""
    # It lets TensorFlow speak.
    is_verbose = bool({"-v", "--verbose"} & set(case.args))
    for name, data in (("stdout", ending.stdout), ("stderr", ending.stderr)):
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            add("output", f"{name} is not UTF-8 at byte {error.start}", f"{name} is not UTF-8")
            continue
        match = _CONTROL.search(text)
        if match:
            around = text[max(0, match.start() - 40) : match.end() + 40]
            add(
                "output",
                f"{name} has the control character {match.group()!r}: {around!r}",
                f"{name} control {around!r}",
            )
        if name == "stderr":
            for line in text.splitlines():
                if _FOREIGN.match(line) and not is_verbose:
                    add("output", f"foreign line on stderr: {line[:300]}", f"foreign {line[:80]}")
                    break
                if len(line) > LINE_CHARACTERS:
                    add("output", f"a line of {len(line)} characters: {line[:200]}", f"long line {line[:60]}")
                    break


def changes(ending: Ending, case: Case, sandbox: Sandbox) -> Iterable[Tuple[str, str, str]]:
    """(path, what happened to it, its kind) for everything that the command should not have written or left."""
    before, after = ending.before or {}, ending.after or {}
    allowed = [str(path) for path in case.may_write]
    # Keras writes its own settings into the home folder when it is imported.
    allowed += [str(sandbox.home / name) for name in (".cache", ".config", ".keras")]
    allowed.append(str(sandbox.work / "runs"))
    allowed += [os.path.realpath(path) for path in allowed]
    has_failed = ending.code in (2, 4, 6) or (ending.code == 3 and case.args[:1] == ["train"])
    runs: Set[str] = set()
    for path in sorted({*before, *after}):
        old, new = before.get(path), after.get(path)
        if old == new:
            continue
        shown = os.path.relpath(path, str(sandbox.guarded))
        where = shown.split(os.sep)[0]
        is_new = old is None
        if new is not None and is_new and path.endswith(".tmp"):
            yield shown, "is a temporary left behind", where
            continue
        if is_new and path.startswith(str(sandbox.tmp) + os.sep):
            yield shown, "is left in TMPDIR", where
            continue
        root = next((a for a in allowed if path == a or path.startswith(a + os.sep)), None)
        if root is None:
            parents = any(a.startswith(path + os.sep) for a in allowed)
            if not (parents and is_new and new is not None and stat.S_ISDIR(new[0])):
                what = "is new" if is_new else "is gone" if new is None else "is changed"
                yield shown, what, where
            continue
        if not is_new or new is None or not has_failed or ".cache" in shown or ".config" in shown:
            continue
        if stat.S_ISREG(new[0]) and new[1] == 0 and not path.endswith(".log"):
            yield shown, "is empty after a failure", Path(path).suffix
        # A run that failed leaves a checkpoint or metrics to go on from, a benchmark the report that says it is void.
        if Path(path).name in ("config.yml", "program.json") and str(Path(path).parent) not in runs:
            runs.add(str(Path(path).parent))
            folder = str(Path(path).parent)
            if not any(
                p.startswith(folder + os.sep) and p.endswith((".npz", "metrics.jsonl", "report.json"))
                for p in after
            ):
                yield os.path.relpath(folder, str(sandbox.guarded)), "is a half-written run folder", "run"


def traceback_signature(errors: str) -> str:
    """Where in ipucnn the last traceback ended, and its last line."""
    lines = errors.splitlines()
    starts = [n for n, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    places = [line.strip() for line in lines[starts[-1] if starts else 0 :] if line.startswith('  File "')]
    own = [place for place in places if "ipucnn" in place and "attack" not in place]
    where = re.sub(r'File ".*?(ipucnn/[^"]*)", line \d+', r"\1", own[-1]) if own else ""
    return f"{where}: {_last_error(errors)}"


def _last_error(errors: str) -> str:
    """The line that says what happened: of a traceback its last, else the error line, else the last one."""
    lines = [line for line in errors.splitlines() if line.strip()]
    for line in reversed(lines):
        if re.match(r"[\w.]+(Error|Exception|Interrupt|Exit|Warning)\b", line):
            return line
    return next((line for line in lines if line.startswith("error: ")), lines[-1] if lines else "")


def _normalised(text: str) -> str:
    text = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`", "'...'", text)
    text = (
        re.sub(r"\S*/\S*[^\w\s)\]:]?", "PATH", text)
        if "PATH" not in text and " " in text and "ipucnn/" not in text
        else text
    )
    return re.sub(r"\s+", " ", re.sub(r"\d+", "N", text)).strip()[:160]


# -- the cases ------------------------------------------------------------------------------------------------


def build(
    kind: str, seed: int, number: int, sandbox: Sandbox, place: Path, commands: Dict[str, CommandLine]
) -> Case:
    """Makes a case and what it needs in its sandbox: a pure function of (kind, seed, number)."""
    rng = random.Random(f"{seed}/{kind}/{number}")
    case = Case(kind, number)
    git = place / "git"
    sandbox.make(git if rng.random() < 0.2 and git.is_dir() else None)
    draw = Draw(rng, sandbox, place / "prepared")
    case.is_fresh = rng.random() < FRESH_SHARE[kind]
    case.is_unprivileged = rng.random() < UNPRIVILEGED_SHARE
    if rng.random() < STREAMS_SHARE:
        case.streams = rng.choice(STREAMS)
    makers = {"line": build_line, "tensorflow": build_computing, "folder": build_folder, "data": build_data}
    makers[kind](draw, case, commands)
    case.args = [_typeable(word) for word in case.args]
    return case


def _typeable(word: str) -> str:
    """The word as the system can hand it over: without NUL, and of bytes."""
    return os.fsdecode(
        word.replace("\0", "").encode("utf-8", "surrogateescape" if _is_bytes(word) else "replace")
    )


def _is_bytes(word: str) -> bool:
    try:
        word.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _add(case: Case, draw: Draw, option: inputs.Option, words: Sequence[str]) -> None:
    """Adds a typed option, and what it lets the command write."""
    case.args += words
    if option.writes:
        values = [words[0].split("=", 1)[1]] if "=" in words[0] else list(words[1:])
        for value in values:
            allow(case, draw, value)


def allow(case: Case, draw: Draw, value: str) -> None:
    """Lets the command write to what a path leads to."""
    if "\0" in value:
        return
    home = str(draw.sandbox.home)
    text = home + value[1:] if value == "~" or value.startswith("~/") else value
    path = os.path.join(str(draw.sandbox.work), text)
    case.may_write.append(Path(os.path.realpath(path)))
    if not os.path.islink(path):
        case.may_write.append(Path(os.path.normpath(path)))


_COMMANDS = (
    *(["train"] * 30 + ["plan-splits"] * 18 + ["benchmark"] * 16 + ["evaluate"] * 10 + ["infer"] * 11),
    *(["models"] * 8 + ["verify-dataset"] * 3 + ["doctor"] * 4),
)


def build_line(draw: Draw, case: Case, commands: Dict[str, CommandLine]) -> None:
    """Any command with one to eight options of any value."""
    rng = draw.rng
    if draw.chance(0.03):
        case.args = draw.pick(
            [
                [],
                ["--version"],
                ["--help"],
                ["-v"],
                ["-h"],
                ["--nope"],
                ["--show-completion"],
                ["train", "--help"],
                ["--"],
                [""],
            ]
            + [
                [draw.typo(draw.pick(commands))],
                [draw.text()],
                ["-v", "train", "lenet", "--print-config"],
                ["help"],
            ]
        )
        return
    weighted = [name for name in _COMMANDS if name in commands] + [
        n for n in commands if n not in _COMMANDS
    ] * 4
    command = commands[rng.choice(weighted)]
    case.args = [command.name]
    for argument in command.arguments:
        _argument(draw, case, argument)
    if draw.chance(0.15) and any(option.name == "--config-path" for option in command.options):
        case.args += ["--config-path", draw.file(inputs.yaml_bytes(draw), ".yml")]
        case.args += (
            ["--config", draw.pick(["lenet", "mine", "unet", "defaults"])] if draw.chance(0.7) else []
        )
    for _ in range(rng.randint(1, 8)):
        option = draw.pick(command.options)
        _add(case, draw, option, draw.typed(option, legal=draw.chance(0.35)))
    if draw.chance(0.06):
        name, value = draw.pick(
            [("COLUMNS", "0"), ("COLUMNS", "-1"), ("COLUMNS", "abc"), ("COLUMNS", "100000"), ("HOME", None)]
            + [
                ("TMPDIR", str(draw.sandbox.root / "absent")),
                ("NO_COLOR", "1"),
                ("TERM", "dumb"),
                ("LC_ALL", "C"),
            ]
            + [
                ("IPUCNN_CACHE_DIR", draw.path(writes=True)),
                ("IPUCNN_CUSTOM_OPS", draw.path()),
                ("FORCE_COLOR", ""),
            ]
        )
        case.environment[name] = value
        if name == "IPUCNN_CACHE_DIR":
            allow(case, draw, value)


def _argument(draw: Draw, case: Case, name: str) -> None:
    """An argument: what it stands for, or anything."""
    if draw.chance(0.1):
        case.args.append(draw.pick([draw.text, draw.path])())
    elif name == "run":
        case.args.append(
            draw.pick([lambda: inputs.copy_run(draw, "classification"), draw.path, lambda: "lenet"])()
        )
    elif name == "images":
        for _ in range(draw.rng.randint(0, 2)):
            case.args.append(
                draw.pick([draw.path, lambda: "*.png", lambda: "**", lambda: "[", lambda: "n1/../**/*.jpg"])()
            )
    elif draw.chance(0.75):
        word = draw.pick(inputs.WORDS["model"])
        case.args.append(word if draw.chance(0.8) else draw.typo(word))


_HEAVY = (
    "--model-name",
    "--config",
    "--config-path",
    "--run-dir",
    "--plan",
    "--suite",
    "--kfold",
    "--num-epochs",
    "--print-config",
)


def build_computing(draw: Draw, case: Case, commands: Dict[str, CommandLine]) -> None:
    """Small work with a few options that are mostly legal."""
    rng = draw.rng
    small = ["--limit-train", "64", "--limit-eval", "8", "--epochs", "1", "--seed", str(rng.randrange(9))]
    batch = ["--micro-batch-size", "4"]
    command, start, end = draw.pick(
        [
            ("train", ["lenet", *batch], ["--dataset", "digits", *small]),
            ("train", ["mnist_cnn", *batch], ["--dataset", "digits", *small]),
            ("train", ["lenet", *batch], ["--dataset", "random", *small]),
            ("train", ["cifar_resnet8", *batch], ["--dataset", "digits", *small]),
            ("train", ["RUN"], ["--resume"]),
            ("train", ["lenet"], ["--dataset", "digits", "--weights", "RUN", *batch, *small]),
            ("evaluate", ["RUN"], ["--limit-eval", "8"]),
            ("evaluate", ["RUN"], ["--limit-eval", "8"]),
            ("infer", ["RUN", "--split", "eval"], ["--limit-eval", "8"]),
            ("infer", ["RUN", "IMAGES"], []),
            ("infer", ["RUN", "IMAGES"], []),
            ("benchmark", ["lenet"], ["--executions", "3", "--min-time", "0", "--max-time", "1"]),
            (
                "benchmark",
                ["lenet"],
                ["--mode", "inference", "--executions", "3", "--min-time", "0", "--max-time", "1"],
            ),
            ("models", ["lenet", "--summary"], []),
            ("plan-splits", ["lenet", "--stages", "2", "--image-size", str(rng.randint(28, 60))], []),
            ("plan-splits", ["cifar_resnet8", "--image-size", str(rng.randint(24, 60))], []),
        ]
        + [("MASKS", [], [])]
    )
    if command == "MASKS":
        unet = [
            "--base-filters",
            "2",
            "--image-size",
            "188",
            "--limit-train",
            "2",
            "--limit-eval",
            "1",
            "--epochs",
            "1",
            "--gradient-accumulation-count",
            "1",
        ]
        command, start, end = draw.pick(
            [
                ("train", ["unet"], ["--dataset", "membranes", *unet]),
                ("evaluate", ["MASKRUN"], ["--limit-eval", "1"]),
                ("infer", ["MASKRUN", "--split", "eval", "--output", "masks"], ["--limit-eval", "1"]),
            ]
        )
        allow(case, draw, "masks")
    case.args = [command]
    for word in start:
        case.args += _placed(draw, case, word)
    lines = [option for option in commands[command].options if option.name not in _HEAVY]
    for _ in range(rng.choice([0, 0, 1, 1, 1, 2, 2, 3])):
        option = draw.pick(lines)
        _add(case, draw, option, draw.typed(option, legal=draw.chance(0.9)))
    for word in end:
        case.args += _placed(draw, case, word)


def _placed(draw: Draw, case: Case, word: str) -> List[str]:
    """RUN, MASKRUN and IMAGES of a template, made."""
    if word in ("RUN", "MASKRUN"):
        name = inputs.copy_run(draw, "classification" if word == "RUN" else "segmentation")
        if case.args == ["train"]:
            allow(case, draw, name)
            return ["lenet", "--dataset", "digits", "--run-dir", name]
        return [name]
    if word == "IMAGES":
        data = inputs.hostile_image(draw) if draw.chance(0.4) else inputs.image_bytes(draw)
        return [
            draw.file(data, draw.pick([".png", ".png", ".tif", ".jpg", ""])),
            draw.file(inputs.image_bytes(draw), ".png"),
        ]
    return [word]


def build_folder(draw: Draw, case: Case, commands: Dict[str, CommandLine]) -> None:
    """A run folder with one to three damaged files, and a command on it."""
    is_masks = draw.chance(0.15)
    run = draw.sandbox.work / inputs.copy_run(draw, "segmentation" if is_masks else "classification", "run")
    if not is_masks and draw.chance(0.12):
        # Other files that runs leave and commands take.
        name, args = draw.pick(
            [
                (
                    "plan.yml",
                    [
                        "train",
                        "lenet",
                        "--dataset",
                        "digits",
                        "--plan",
                        "plan.yml",
                        "--limit-train",
                        "16",
                        "--epochs",
                        "1",
                    ],
                ),
                ("plan.yml", ["plan-splits", "lenet", "--compare", "plan.yml", "--stages", "2"]),
                (
                    "benchmark.json",
                    [
                        "benchmark",
                        "lenet",
                        "--baseline",
                        "benchmark.json",
                        "--executions",
                        "3",
                        "--min-time",
                        "0",
                        "--max-time",
                        "1",
                    ],
                ),
            ]
        )
        shutil.copy(str(draw.prepared / name), str(draw.sandbox.work / name))
        path = draw.sandbox.work / name
        change = (
            inputs._damage_file
            if draw.chance(0.3)
            else inputs._damage_yaml
            if name.endswith("yml")
            else inputs._damage_json
        )
        change(draw, path)
        case.args = args
        return
    if not is_masks and draw.chance(0.1):
        name = inputs.keras_weights(draw)
        small = ["--dataset", "digits", "--limit-train", "16", "--limit-eval", "8"]
        case.args = draw.pick(
            [
                ["evaluate", name, "--model-name", "lenet", "--dataset", "digits", "--limit-eval", "8"],
                ["train", "lenet", *small, "--weights", name, "--epochs", "1", "--micro-batch-size", "4"],
            ]
        )
        return
    inputs.damage_run(draw, run)
    checkpoint = draw.pick(["run", "run/checkpoints/last.npz", "run/checkpoints/best.npz"])
    if is_masks:
        case.args = draw.pick(
            [
                ["evaluate", "run", "--limit-eval", "1"],
                ["infer", "run", "--split", "eval", "--limit-eval", "1", "--output", "masks"],
                ["train", "unet", "--dataset", "membranes", "--run-dir", "run", "--resume"],
            ]
        )
        allow(case, draw, "masks")
    else:
        small = ["--limit-train", "16", "--limit-eval", "8", "--epochs", "1", "--seed", "1"]
        case.args = draw.pick(
            [
                ["train", "lenet", "--dataset", "digits", "--run-dir", "run", "--resume"],
                ["train", "--run-dir", "run", "--resume"],
                ["evaluate", checkpoint, "--limit-eval", "8"],
                ["evaluate", "run", "--checkpoint", draw.pick(["best", "last"]), "--limit-eval", "8"],
                ["infer", checkpoint, "--split", "eval", "--limit-eval", "4"],
                ["infer", "run", "--split", "eval", "--limit-eval", "4", "--json"],
                ["train", "lenet", "--dataset", "digits", "--weights", checkpoint, *small],
                ["train", "lenet", "--dataset", "digits", "--run-dir", "run", "--overwrite", *small],
            ]
        )
    if case.args[0] == "train" and "--run-dir" in case.args:
        allow(case, draw, "run")


def build_data(draw: Draw, case: Case, commands: Dict[str, CommandLine]) -> None:
    """A data set with a hostile file, or hostile images, and a command that reads them."""
    if draw.chance(0.3):
        is_masks = draw.chance(0.25)
        run = inputs.copy_run(draw, "segmentation" if is_masks else "classification", "run")
        names = []
        for _ in range(draw.rng.randint(1, 3)):
            data = (
                inputs.hostile_image(draw, pages=draw.pick([1, 1, 3]) if is_masks else 1)
                if draw.chance(0.8)
                else inputs.image_bytes(draw)
            )
            names.append(draw.file(data, draw.pick([".png", ".tif", ".jpg", ".gif", ".bmp", ".webp"])))
        case.args = ["infer", run, *names]
        if is_masks:
            case.args += ["--output", "masks"]
            allow(case, draw, "masks")
        elif draw.chance(0.5):
            sheet = draw.pick(
                [["--contact-sheet", "sheet.png"], ["--output", "labels.csv"], ["--format", "json"]]
            )
            case.args += sheet
            allow(case, draw, sheet[1])
        return
    name = draw.pick(inputs.DATA_SETS)
    folder = draw.sandbox.work / "data"
    folder.mkdir()
    inputs.DATA_SETS[name](draw, folder)
    common = ["--dataset", name, "--dataset-path", "data"]
    if draw.chance(0.1):
        case.args = ["verify-dataset", *common]
    elif name in ("imagemasks", "isbi2012"):
        if draw.chance(0.5):
            case.args = [
                "evaluate",
                inputs.copy_run(draw, "segmentation", "run"),
                *common,
                "--limit-eval",
                "1",
            ]
        else:
            case.args = [
                "train",
                "unet",
                *common,
                "--base-filters",
                "2",
                "--image-size",
                "188",
                "--limit-train",
                "1",
                "--gradient-accumulation-count",
                "1",
            ]
            case.args += ["--limit-eval", "1", "--epochs", "1"]
    elif draw.chance(0.3):
        case.args = ["evaluate", inputs.copy_run(draw, "classification", "run"), *common, "--limit-eval", "4"]
    else:
        case.args = [
            "train",
            "lenet",
            *common,
            "--limit-train",
            "8",
            "--limit-eval",
            "4",
            "--epochs",
            "1",
            "--micro-batch-size",
            "2",
        ]
        case.args += ["--image-size", "32"] if name == "imagefolder" else []


# -- running a case -------------------------------------------------------------------------------------------


class _TensorFlowGate(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Notices the import of TensorFlow; hands out ``module``, or ends the case where there is none."""

    def __init__(self, module: Any, mark: Path) -> None:
        self.module, self.mark = module, mark

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name == "tensorflow" else None

    def create_module(self, spec: Any) -> Any:
        self.mark.touch()
        if self.module is None:
            raise ReachedTensorFlow
        return self.module

    def exec_module(self, module: Any) -> None:
        pass


def environment_of(case: Case, sandbox: Sandbox, place: Path) -> Dict[str, str]:
    """The variables of a case: few, so that the machine it runs on does not matter."""
    variables: Dict[str, Optional[str]] = {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "HOME": str(sandbox.home),
        "TMPDIR": str(sandbox.tmp),
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_VISIBLE_DEVICES": "-1",
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
        **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),
        **case.environment,
    }
    if case.is_fresh and not case.needs_tensorflow:
        variables["PYTHONPATH"] = f"{place / 'stub'}{os.pathsep}{REPOSITORY}"
        variables["ATTACK_REACHED"] = str(sandbox.root / "reached")
    return {name: value for name, value in variables.items() if value is not None}


def drop_privileges() -> None:
    """Takes from root the right to read, write and search what the permissions refuse, also from its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    if libc.capget(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    for word in (0, 1, 2):
        data[word] &= ~0b110
    if libc.capset(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def child(case_id: Tuple[str, int], server: "Server", sandbox: Sandbox) -> None:
    """Makes and runs a case in a process that was just forked; does not return."""
    code = BROKEN_CODE
    try:
        os.setsid()
        inputs.die_with_parent(server.pid)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
        case = build(case_id[0], server.seed, case_id[1], sandbox, server.place, server.commands)
        with open(str(sandbox.root / "case"), "wb") as handle:
            pickle.dump((case, snapshot(sandbox.guarded)), handle)
        variables = environment_of(case, sandbox, server.place)
        os.chdir(str(sandbox.work))
        if case.is_unprivileged and os.geteuid() == 0:
            drop_privileges()
        _set_streams(case, sandbox)
        if case.is_fresh:
            (sandbox.root / "fresh").touch()
            program = [sys.executable, str(server.place / "ipucnn"), *case.args]
            os.execve(program[0], program, variables)
        os.environ.clear()
        os.environ.update(variables)
        tempfile.tempdir = None
        code = _run_here(case, sandbox, server)
    except BaseException:
        with open(str(sandbox.stderr), "a", encoding="utf-8") as handle:
            traceback.print_exc(file=handle)
        code = BROKEN_CODE
    finally:
        os._exit(code)


def _set_streams(case: Case, sandbox: Sandbox) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, name, path in ((1, "stdout", sandbox.stdout), (2, "stderr", sandbox.stderr)):
        if case.streams == f"{name} closed":
            os.close(number)
            continue
        if case.streams == f"{name} broken":
            reading, writing = os.pipe()
            os.close(reading)
        else:
            writing = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(writing, number)
        if writing != number:
            os.close(writing)


def _run_here(case: Case, sandbox: Sandbox, server: "Server") -> int:
    """Runs the command line in this process as Python's start would have; the exit code."""
    from ipucnn import cli

    reached = sandbox.root / "reached"
    if server.tensorflow is not None:
        sys.modules.pop("tensorflow", None)
    sys.meta_path.insert(0, _TensorFlowGate(server.tensorflow, reached))
    started = open(str(sandbox.root / "started"), "a", encoding="utf-8")  # noqa: SIM115 - as long as the process

    def note_programs(event: str, details: Any) -> None:
        if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
            started.write(f"{details[0]!r} {details[1]!r}\n" if len(details) > 1 else f"{details[0]!r}\n")
            started.flush()
            if (
                server.tensorflow is None
                and event == "subprocess.Popen"
                and str(details[0]) == sys.executable
            ):
                raise ReachedTensorFlow

    sys.addaudithook(note_programs)
    if "matplotlib" in sys.modules:  # as its import here would have
        import matplotlib

        matplotlib.rcParams.update(matplotlib.rc_params())
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream: Any = None
        if case.streams != f"{name} closed":
            errors = "strict" if number == 1 else "backslashreplace"
            buffer = open(number, "wb", -1, closefd=False)  # noqa: SIM115 - as long as the process
            stream = io.TextIOWrapper(buffer, "utf-8", errors, line_buffering=number == 2)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = ["ipucnn", *case.args]
    code: Any = 0
    try:
        cli.main()
    except SystemExit as ending:
        code = ending.code
    except ReachedTensorFlow:
        code = REACHED_CODE
    except BaseException:
        code = 1
        with contextlib.suppress(OSError, AttributeError):
            traceback.print_exc()
    if not isinstance(code, int):
        with contextlib.suppress(OSError):
            print(code or "", file=sys.stderr)
        code = 0 if code is None else 1
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            code = code or 120  # as Python does
    return code


# -- the servers ----------------------------------------------------------------------------------------------


class _Running:
    """A case that runs."""

    def __init__(self, case_id: Tuple[str, int], pid: int, sandbox: Sandbox) -> None:
        self.case_id, self.pid, self.sandbox = case_id, pid, sandbox
        self.began = self.moved = time.monotonic()
        self.looked = 0.0
        self.progress: Tuple[Any, ...] = ()
        self.session_ticks = -1
        self.cpu_s = 0.0
        self.cut = ""
        self.asked: Optional[float] = None
        self.peak_bytes = 0


def _stat_of(pid: int) -> Optional[List[str]]:
    """The fields of /proc/PID/stat from the state on."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as handle:
            return handle.read().rpartition(")")[2].split()
    except OSError:
        return None


def _anonymous_bytes(pid: int) -> int:
    return _status_bytes(pid, "RssAnon")


def _peak_bytes(pid: int) -> int:
    return _status_bytes(pid, "VmHWM")


def _status_bytes(pid: int, name: str) -> int:
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as handle:
            match = re.search(rf"{name}:\s+(\d+) kB", handle.read())
    except OSError:
        return 0
    return int(match.group(1)) * 1024 if match else 0


class Server:
    """Has the modules imported and forks a process for each case.

    Args:
        place: the campaign's folder.
        seed: of the campaign.
        jobs: cases at a time.
        with_tensorflow: whether TensorFlow is imported.
    """

    def __init__(self, place: Path, seed: int, jobs: int, with_tensorflow: bool) -> None:
        self.place, self.seed, self.jobs = place, seed, jobs
        self.pid = os.getpid()
        self.tensorflow: Any = None
        _cut_network()
        os.environ.update(CUDA_VISIBLE_DEVICES="-1", TF_CPP_MIN_LOG_LEVEL="3", OMP_NUM_THREADS="1")
        if with_tensorflow:
            from ipucnn.sessions.host.environment import set_variables

            set_variables()
            with _stderr_aside():
                import tensorflow as tf
                from tensorflow import keras

            assert keras.Model is not None  # Keras is loaded on first use
            self.tensorflow = tf
        self._import_all(with_tensorflow)
        self.commands = inputs.declared_commands()
        self._warm_up()
        self.base_bytes = _anonymous_bytes(self.pid)
        self.base_peak_bytes = _peak_bytes(self.pid)

    def _import_all(self, with_tensorflow: bool) -> None:
        """Imports what cases would import, so that it is done once."""
        gate = _TensorFlowGate(None, self.place / "reached-while-importing")
        if not with_tensorflow:
            sys.meta_path.insert(0, gate)
        files = sorted((REPOSITORY / "ipucnn").rglob("*.py"))
        names = [".".join(path.relative_to(REPOSITORY).with_suffix("").parts) for path in files]
        others = [
            "sklearn.datasets",
            "sklearn.neighbors",
            "scipy.ndimage",
            "PIL.Image",
            "yaml",
            "rich.table",
            "rich.progress",
        ]
        others += [
            "matplotlib.figure",
            "matplotlib.font_manager",
            "matplotlib.backends.backend_agg",
            "getpass",
            "urllib.request",
        ]
        others += [f"PIL.{form}ImagePlugin" for form in ("Png", "Jpeg", "Gif", "Bmp", "Tiff", "Ppm", "WebP")]
        for name in [*names, *others]:
            if name.endswith(("__main__", "__init__")):
                continue
            try:
                importlib.import_module(name)
            except (ImportError, ReachedTensorFlow):
                sys.modules.pop(name, None)
        if gate in sys.meta_path:
            sys.meta_path.remove(gate)

    def _warm_up(self) -> None:
        """Has Typer import its converters."""
        from ipucnn import cli

        kept = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        try:
            cli.run(["train", "lenet", "--print-config", "--seed", "1", "--dataset", "digits"])
        finally:
            sys.stdout, sys.stderr = kept

    def sandbox_of(self, case_id: Tuple[str, int]) -> Sandbox:
        return Sandbox(self.place / "cases" / f"{case_id[0]}-{case_id[1]}")

    def run(self, pending: List[Tuple[str, int]], done: Any) -> None:
        """Runs cases, ``jobs`` at a time; ``done`` gets (case id, ending, case, sandbox, cpu_s, wall_s) of each."""
        running: List[_Running] = []
        queue = collections.deque(pending)
        while queue or running:
            while queue and len(running) < self.jobs:
                running.append(self._start(queue.popleft()))
            for entry in list(running):
                pid, status, usage = os.wait4(entry.pid, os.WNOHANG)
                if pid == 0:
                    self._watch(entry)
                    continue
                running.remove(entry)
                self._finish(entry, status, usage, done)
            time.sleep(0.004)

    def _start(self, case_id: Tuple[str, int]) -> _Running:
        sandbox = self.sandbox_of(case_id)
        remove(sandbox.root)
        sandbox.root.mkdir(parents=True)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            child(case_id, self, sandbox)
        return _Running(case_id, pid, sandbox)

    def _watch(self, entry: _Running) -> None:
        """Ends a process that hangs, takes too much, or has computed for long enough."""
        now = time.monotonic()
        if now - entry.looked < 0.1:
            return
        entry.looked = now
        fields = _stat_of(entry.pid)
        if fields is None:
            return
        ticks = sum(map(int, fields[11:15]))
        entry.cpu_s = ticks / os.sysconf("SC_CLK_TCK")
        sizes = [
            path.stat().st_size for path in (entry.sandbox.stdout, entry.sandbox.stderr) if path.exists()
        ]
        progress = (ticks, *sizes)
        if progress != entry.progress or fields[0] == "R":
            entry.progress, entry.moved = progress, now
        elif now - entry.moved > 3:  # it may wait for a process of its own
            ticks = _ticks_of_session(entry.pid)
            if ticks != entry.session_ticks:
                entry.session_ticks, entry.moved = ticks, now
        entry.peak_bytes = max(entry.peak_bytes, _anonymous_bytes(entry.pid) - self.base_bytes)
        if entry.peak_bytes > MEMORY_BYTES:
            self._cut(entry, "memory")
        elif now - entry.moved > SILENT_S:
            self._cut(entry, "silent")
        elif entry.asked is not None:
            if now - entry.asked > STOP_WITHIN_S:
                self._cut(entry, "deaf")
        elif entry.case_id[0] != "line":
            # A process of its own has imported TensorFlow before it computes.
            if entry.cpu_s > STOP_AFTER_CPU_S * (3 if (entry.sandbox.root / "fresh").exists() else 1):
                entry.asked = now
                os.kill(entry.pid, signal.SIGINT if entry.case_id[1] % 2 else signal.SIGTERM)
        elif entry.cpu_s > LIMIT_CPU_S * (ROWS if (entry.sandbox.root / "reached").exists() else 1):
            # Each row of a suite is a process, which imports what it needs and ends where TensorFlow would come.
            self._cut(entry, "slow")

    def _cut(self, entry: _Running, why: str) -> None:
        entry.cut = entry.cut or why
        try:
            os.killpg(entry.pid, signal.SIGKILL)
        except OSError:
            os.kill(entry.pid, signal.SIGKILL)

    def _finish(self, entry: _Running, status: int, usage: Any, done: Any) -> None:
        sandbox = entry.sandbox
        left_running = False
        try:
            os.killpg(entry.pid, 0)
            left_running = not entry.cut
            os.killpg(entry.pid, signal.SIGKILL)
        except OSError:
            pass
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
        # What it had for a moment only; a process of its own imports what the server has already.
        if usage.ru_maxrss * 1024 - self.base_peak_bytes > MEMORY_BYTES:
            entry.cut = entry.cut or "memory"
        case, before = Case(*entry.case_id), None
        try:
            with open(str(sandbox.root / "case"), "rb") as handle:
                case, before = pickle.load(handle)
        except (OSError, EOFError, pickle.UnpicklingError):
            code = BROKEN_CODE
        executed = tuple(
            _lines(sandbox.mark) + [p for p in _lines(sandbox.root / "started") if not _may_start(p, case)]
        )
        ending = Ending(
            code,
            _bytes(sandbox.stdout),
            _bytes(sandbox.stderr),
            entry.cut,
            before,
            snapshot(sandbox.guarded),
            executed,
            left_running,
        )
        cpu_s = usage.ru_utime + usage.ru_stime
        done(entry.case_id, ending, case, sandbox, cpu_s, time.monotonic() - entry.began)


def _ticks_of_session(session: int) -> int:
    """The processor time of the processes that a case started."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _stat_of(int(name))
            if fields is not None and int(fields[3]) == session:
                total += sum(map(int, fields[11:15]))
    return total


def _may_start(program: str, case: Case) -> bool:
    """Whether a command may start a program: doctor looks at the machine, suites run rows in processes.

    Python itself asks ldconfig, by its absolute path, where a library is.
    """
    is_ours = repr(sys.executable) in program or program.startswith("'/sbin/ldconfig'")
    return is_ours or "doctor" in case.args[:3]


def _program(line: str) -> str:
    """The name of a program or trap in a line that tells of it."""
    words = shlex.split(line) if line.startswith(("'", '"')) else [line]
    return Path(words[0]).name


def _lines(path: Path) -> List[str]:
    return _bytes(path).decode("utf-8", "replace").splitlines()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def remove(folder: Path) -> None:
    """Removes a sandbox, also where its folders are closed."""
    if not os.path.lexists(str(folder)):
        return

    def again(function: Any, path: str, _: Any) -> None:
        os.chmod(os.path.dirname(path), 0o700)
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, 0o700)
            shutil.rmtree(path, ignore_errors=True)
        else:
            function(path)

    shutil.rmtree(str(folder), onerror=again)


def _cut_network() -> None:
    """A network of its own without any way out, where the system allows it; the proxies lead nowhere anyway."""
    ctypes.CDLL(None).unshare(0x40000000)  # CLONE_NEWNET


class _stderr_aside:
    """What TensorFlow's import prints goes nowhere."""

    def __enter__(self) -> None:
        self._kept = os.dup(2)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 2)
        os.close(nothing)

    def __exit__(self, *_: Any) -> None:
        os.dup2(self._kept, 2)
        os.close(self._kept)


# -- what is prepared -----------------------------------------------------------------------------------------

PREPARED = (
    (
        "classification",
        "train lenet --dataset digits --limit-train 48 --limit-eval 16 --epochs 3 --seed 1 --micro-batch-size 16 "
        "--run-dir classification",
    ),
    (
        "segmentation",
        "train unet --dataset membranes --base-filters 2 --image-size 188 --gradient-accumulation-count 1 "
        "--limit-train 2 "
        "--limit-eval 1 --epochs 2 --seed 1 --run-dir segmentation",
    ),
    ("plan.yml", "plan-splits lenet --stages 2 --seed 1 --dataset digits --save plan.yml"),
    ("benchmark.json", "benchmark lenet --executions 3 --min-time 0 --max-time 1 --json"),
)


def prepare(server: Server) -> None:
    """The good runs that cases damage, made once."""
    from ipucnn import cli

    folder = server.place / "prepared"
    folder.mkdir(exist_ok=True)
    for name, line in PREPARED:
        if (folder / name).exists():
            continue
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.chdir(str(folder))
                os.environ.update(HOME=str(server.place), IPUCNN_CACHE_DIR=str(server.place / "cache"))
                output = open("output", "w+", encoding="utf-8")  # noqa: SIM115 - as long as the process
                os.dup2(output.fileno(), 1)
                sys.stdout = output
                code = cli.run(shlex.split(line))
                output.flush()
                if code == 0 and not os.path.exists(name):
                    os.rename("output", name)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        if os.waitpid(pid, 0)[1] != 0:
            raise SystemExit(f"attack.py: `ipucnn {line}` fails, so there is nothing to damage")
    if not (folder / "bomb.keras").exists():
        inputs.write_zip_bomb(folder / "bomb.part")
        (folder / "bomb.part").rename(folder / "bomb.keras")
    _make_unfinished(folder / "classification")
    _make_unfinished(folder / "segmentation")


def _make_unfinished(run: Path) -> None:
    """The run as a crash after its second to last checkpoint leaves it, so that ``--resume`` computes."""
    if not (run / "report.json").exists():
        return
    checkpoints = sorted((run / "checkpoints").glob("checkpoint-*.npz"))
    if len(checkpoints) > 1:
        checkpoints[-1].unlink()
        shutil.copy(str(checkpoints[-2]), str(run / "checkpoints" / "last.npz"))
    for path in checkpoints[:-3]:
        path.unlink()
    shutil.rmtree(str(run / "tensorboard"), ignore_errors=True)
    (run / "report.json").unlink()


def lay_out(place: Path) -> None:
    """What every case needs besides runs: the program, a stand-in for TensorFlow, a repository."""
    for name in ("cases", "stub"):
        (place / name).mkdir(parents=True, exist_ok=True)
    (place / "ipucnn").write_text("import sys\nfrom ipucnn.cli import main\nmain()\n", encoding="utf-8")
    (place / "stub" / "tensorflow.py").write_text(
        "import os\nif 'ATTACK_REACHED' in os.environ:\n"
        f"    open(os.environ['ATTACK_REACHED'], 'w').close()\n    os._exit({REACHED_CODE})\n",
        encoding="utf-8",
    )
    git = place / "git"
    if git.is_dir() or shutil.which("git") is None:
        return
    made = place / "repository"
    shutil.rmtree(str(made), ignore_errors=True)
    made.mkdir()
    (made / "file").write_text("x\n", encoding="utf-8")
    name = ["-c", "user.name=x", "-c", "user.email=x@example.invalid", "-c", "core.hooksPath=none"]
    for words in (["init", "-q", "--template="], ["add", "file"], [*name, "commit", "-q", "-m", "x"]):
        if subprocess.run(["git", "-C", str(made), *words], capture_output=True).returncode != 0:
            return
    (made / ".git").rename(git)


# -- the campaign ---------------------------------------------------------------------------------------------


def reproduce(case: Case) -> str:
    """The command line as a shell takes it."""
    words = " ".join(
        shlex.quote(word.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))
        for word in case.args
    )
    return f"ipucnn {words}"[:1500]


def record_of(
    case_id: Tuple[str, int], ending: Ending, case: Case, sandbox: Sandbox, cpu_s: float, wall_s: float
) -> Dict[str, Any]:
    """A line of the state file."""
    return {
        "kind": case_id[0],
        "number": case_id[1],
        "code": ending.code,
        "reached": (sandbox.root / "reached").exists(),
        "fresh": case.is_fresh,
        "cut": ending.cut,
        "cpu_s": round(cpu_s, 3),
        "wall_s": round(wall_s, 3),
        "command": case.args[0][:20] if case.args else "",
        "findings": [list(finding) for finding in judge(ending, case, sandbox)],
        "line": reproduce(case),
    }


def read_state(path: Path) -> Tuple[Dict[str, Any], List[Dict[str, Any]]]:
    """The head and the cases done of a state file; a last line that was cut is passed over."""
    rows = []
    for line in _lines(path):
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return (rows[0], rows[1:]) if rows else ({}, [])


def _append(path: Path, row: Dict[str, Any]) -> None:
    data = (json.dumps(row) + "\n").encode("utf-8")
    with open(str(path), "ab") as handle:
        handle.write(data)


def serve(
    place: Path, seed: int, jobs: int, pending: List[Tuple[str, int]], with_tensorflow: bool, verbose: bool
) -> None:
    """Runs cases in a server of its own process; results go into the state file."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            inputs.die_with_parent(parent)
            server = Server(place, seed, jobs, with_tensorflow)
            if with_tensorflow:
                prepare(server)
            count = [0]

            def done(
                case_id: Tuple[str, int],
                ending: Ending,
                case: Case,
                sandbox: Sandbox,
                cpu_s: float,
                wall_s: float,
            ) -> None:
                row = record_of(case_id, ending, case, sandbox, cpu_s, wall_s)
                _append(place / "state.jsonl", row)
                count[0] += 1
                if verbose:
                    _show_case(row, ending, case, sandbox)
                else:
                    remove(sandbox.root)
                    if count[0] % 250 == 0:
                        print(
                            f"{time.strftime('%H:%M:%S')}  {count[0]} of {len(pending)} cases",
                            file=sys.stderr,
                            flush=True,
                        )

            server.run(pending, done)
            code = 0
        except SystemExit as ending:
            print(ending.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    try:
        status = os.waitpid(pid, 0)[1]
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    if status != 0:
        raise SystemExit(f"attack.py: the server ended with status {status}")


def _show_case(row: Dict[str, Any], ending: Ending, case: Case, sandbox: Sandbox) -> None:
    print(
        f"{row['kind']}:{row['number']}  exit code {row['code']}  {row['cpu_s']} s of processor, {row['wall_s']} s"
    )
    print(
        f"fresh {case.is_fresh}, unprivileged {case.is_unprivileged}, streams {case.streams}, {case.environment}"
    )
    print(f"in {sandbox.work}: {row['line']}")
    for name, data in (("stdout", ending.stdout), ("stderr", ending.stderr)):
        print(f"-- {name}\n{data[-4000:].decode('utf-8', 'backslashreplace')}")
    print("-- findings")
    for finding in row["findings"]:
        print(f"{finding[0]}: {finding[1]}")


def table(head: Dict[str, Any], rows: List[Dict[str, Any]]) -> str:
    """The result as plain text."""
    main = ("traceback", "signal", "silent", "hint", "files", "executed", "memory")
    other = [name for name in FINDINGS if name not in main]
    titles = ["", "cases", "ended 0", "refused", "TensorFlow", *(FINDINGS[name] for name in main), "other"]
    lines = []
    for kind in [*KINDS, None]:
        of_kind = [row for row in rows if kind is None or row["kind"] == kind]
        if not of_kind:
            continue

        def count(names: Sequence[str], some: List[Dict[str, Any]] = of_kind) -> int:
            return sum(any(finding[0] in names for finding in row["findings"]) for row in some)

        values = [
            len(of_kind),
            sum(row["code"] == 0 for row in of_kind),
            sum(row["code"] in (2, 3, 4, 5, 6) for row in of_kind),
            sum(bool(row["reached"]) for row in of_kind),
            *(count([name]) for name in main),
            count(other),
        ]
        lines.append([TITLES[kind] if kind else "together", *map(str, values)])
    widths = [max(len(line[n]) for line in [titles, *lines]) for n in range(len(titles))]
    cpu_s, num_fresh = sum(row["cpu_s"] for row in rows), sum(bool(row["fresh"]) for row in rows)
    in_all = "the time in all and the load of a run that is stopped are not kept"
    if "wall_s" in head:
        in_all = f"{head['wall_s'] / 60:.0f} min in all, load {head.get('load')}"
    text = [
        f"seed {head.get('seed')}, ipucnn {head.get('ipucnn')}, {head.get('versions')}",
        f"{cpu_s / 60:.0f} min of processor time on {head.get('cores')} cores ({in_all}); "
        f"{num_fresh} cases as fresh processes",
        "",
    ]
    for line in [titles, *lines]:
        text.append(
            "  ".join(
                cell.rjust(width) if n else cell.ljust(width)
                for n, (cell, width) in enumerate(zip(line, widths))
            ).rstrip()
        )
    return "\n".join(text)


def groups(rows: List[Dict[str, Any]]) -> List[Tuple[str, List[Tuple[Dict[str, Any], List[str]]]]]:
    """Findings by what is common to them, the most frequent first."""
    found: Dict[str, List[Tuple[Dict[str, Any], List[str]]]] = {}
    for row in rows:
        for finding in row["findings"]:
            found.setdefault(finding[2], []).append((row, finding))
    return sorted(found.items(), key=lambda item: -len(item[1]))


def print_findings(seed: int, rows: List[Dict[str, Any]]) -> int:
    """Every class of finding with how to repeat one; how many classes there are."""
    found = groups(rows)
    for signature, members in found:
        row, finding = min(members, key=lambda member: len(member[0]["line"]))
        print(f"\n{len(members)} x {signature}")
        print(f"    {row['line'][:300]}")
        if finding[0] != "traceback":
            print(f"    {finding[1][:300]}")
        print(f"    python benchmarks/attack.py --seed {seed} --only {row['kind']}:{row['number']}")
    return len(found)


def write_docs(text: str) -> None:
    """Puts the table into the page that quotes it."""
    page = DOCS.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"attack.py: {DOCS} has no place for the table")
    DOCS.write_text(f"{before}{BEGIN}\n```\n{text}\n```\n{END}{after}", encoding="utf-8")


def _versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    names = []
    for package in ("tensorflow", "keras", "numpy", "pillow", "PyYAML", "typer"):
        try:
            names.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return f"Python {platform.python_version()}, " + ", ".join(names)


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument(
        "--continue", dest="go_on", action="store_true", help="go on with a campaign that was stopped"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="cases at a time")
    parser.add_argument("--command-lines", type=int, default=10000, help="with those that compute")
    parser.add_argument("--tensorflow", type=int, default=2000, help="command lines that compute")
    parser.add_argument("--folders", type=int, default=2000)
    parser.add_argument("--data-files", type=int, default=500)
    parser.add_argument(
        "--keep", type=Path, help="the campaign's folder; default: one in the temporary folder"
    )
    parser.add_argument(
        "--only", metavar="KIND:NUMBER", help="repeat one case and print everything; its folder is kept"
    )
    parser.add_argument(
        "--report", action="store_true", help="print the table of what was run, and run nothing"
    )
    parser.add_argument("--write-docs", action="store_true", help="write the table into docs/security.md")
    options = parser.parse_args(arguments)
    place = (options.keep or Path(tempfile.gettempdir()) / f"ipucnn-attack-{options.seed}").resolve()
    place.mkdir(parents=True, exist_ok=True)
    lay_out(place)
    os.environ["MPLCONFIGDIR"] = str(place / "matplotlib")
    if options.only:
        return _repeat(place, options.seed, options.only)
    state = place / "state.jsonl"
    head, rows = read_state(state)
    if head and not (options.go_on or options.report):
        raise SystemExit(f"attack.py: {state} exists: add --continue, or remove {place}")
    if head and head["seed"] != options.seed:
        raise SystemExit(f"attack.py: {state} is of seed {head['seed']}")
    counts = {
        "line": max(0, options.command_lines - options.tensorflow),
        "tensorflow": options.tensorflow,
        "folder": options.folders,
        "data": options.data_files,
    }
    if not options.report:
        began = time.time()
        if not head:
            from ipucnn import __version__

            head = {
                "seed": options.seed,
                "ipucnn": __version__,
                "versions": _versions(),
                "cores": os.cpu_count(),
            }
            _append(state, head)
        elif state.read_bytes()[-1:] != b"\n":
            with open(str(state), "ab") as handle:
                handle.write(b"\n")
        finished = {(row["kind"], row["number"]) for row in rows if "kind" in row}
        pending = [(kind, n) for kind in KINDS for n in range(counts[kind]) if (kind, n) not in finished]
        plain = [case_id for case_id in pending if case_id[0] == "line"]
        computing = [case_id for case_id in pending if case_id[0] != "line"]
        if computing or (plain and not (place / "prepared" / "bomb.keras").exists()):
            serve(place, options.seed, options.jobs, computing, True, False)
        if plain:
            serve(place, options.seed, options.jobs, plain, False, False)
        _append(state, {"wall_s": time.time() - began, "load": [round(load, 1) for load in os.getloadavg()]})
        head, rows = read_state(state)
    for row in rows:
        if "wall_s" in row and "kind" not in row:
            head["wall_s"] = head.get("wall_s", 0) + row["wall_s"]
            head["load"] = row["load"][1]
    rows = [row for row in rows if "kind" in row]
    text = table(head, rows)
    print(text)
    number = print_findings(options.seed, rows)
    if options.write_docs:
        write_docs(text)
    return 5 if number else 0


def _repeat(place: Path, seed: int, only: str) -> int:
    """Repeats one case and prints everything."""
    kind, _, number = only.partition(":")
    if kind not in KINDS or not number.isdigit():
        raise SystemExit(
            f"attack.py: --only {only}: give {', '.join(KINDS)} with a number, for example line:12"
        )
    if kind == "line" and not (place / "prepared" / "bomb.keras").exists():
        serve(place, seed, 1, [], True, False)
    serve(place, seed, 1, [(kind, int(number))], kind != "line", True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
