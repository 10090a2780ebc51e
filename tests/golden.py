"""Small seeded commands, and what they print and write, as it is stored in ``tests/golden``: one file for each command.

``python tests/golden.py --renew [NAME ...]`` runs them and stores what they report now; ``git diff tests/golden`` then
shows each changed field.  ``test_golden.py`` runs each command once and compares.
"""

import argparse
import contextlib
import io
import json
import math
import re
import shlex
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import numpy as np
import pytest
from light_training import benchmark_briefly
from support.data_sets import encode, noise, write_class_folders, write_pairs

FOLDER = Path(__file__).parent / "golden"
RELATIVE, ABSOLUTE = 2e-3, 2e-4
"""How far a number may be from the stored one: all versions of TensorFlow and all CPUs stay within."""

MEASURED = r"^(?!.*\b(predicted|program|settings|percentiles)\b)(.*\.)?"
VARIES = (
    # Fields, by their path
    (r"(.*\.)?(environment|command|created)", "PROCESS"),
    (r"(.*\.)?(data_sha256|size_bytes|num_graph_operations)", "VERSION"),
    (r"(.*\.)?(device\.(name|num_cores|memory_bytes)|threads|num_parallel)", "MACHINE"),
    (r"stdout\.options", "as in config.yml"),
    (r"stdout\.notes", "MEASURED"),
    (MEASURED + r"(executions|warmup|steady|num_executions|total_samples|traceback|matmul_peak)", "MEASURED"),
    (MEASURED + r"(peak_memory_bytes|\w*_s|\w*_per_s|\w*_s_per_image|share_of_\w+|others_share)", "MEASURED"),
    (
        MEASURED + r"((ratio\w*|data_share|feeds\.num_ipus)\.\w+|started|(stdout|measured)\.execution)",
        "MEASURED",
    ),
    # Texts
    (r"\b(\d+ (h|min) )?[\d.]+ (s|ms|us|min|[KMG]iB|[kMG]?FLOP/s)(?!\w)", "MEASURED"),
    (r"[\d,.]+ images/s", "MEASURED images/s"),
    (r"warm-up: \d+ executions, MEASURED, (not )?steady( yet)?", "warm-up: MEASURED"),
    (r"\d+ graph operations", "VERSION graph operations"),
    (r"Keras \d[\d.]+", "Keras VERSION"),
    (r"pipeline-num-parallel: \d+", "pipeline-num-parallel: MACHINE"),
)
"""What depends on the machine, the time or the version, and the word that replaces it."""
SOMETIMES = r"reading the layers|\(after: pip install"
"""Lines that depend on what is installed or in a cache."""


class Command(NamedTuple):
    """A command, and the files that it writes and that are reports, too."""

    line: str
    files: Tuple[str, ...] = ()


class Scene(NamedTuple):
    """Commands that run one after the other in a folder.

    Attributes:
        prepare: writes the data that they read.
        commands: by the name of the stored file.
        measures: whether they print what varies; otherwise each number is compared.
    """

    prepare: Callable[[], None]
    commands: Dict[str, Command]
    measures: bool = True


def _nothing() -> None:
    """Writes no data."""


def _images() -> None:
    Path("images").mkdir()
    for number in range(2):
        Path(f"images/{number}.png").write_bytes(encode(noise(number, 40, 30)))


def _data_sets() -> None:
    counts = {("train", "ant"): 4, ("train", "bee"): 5, ("val", "ant"): 2, ("val", "bee"): 2}
    for name in ("good", "damaged"):
        write_class_folders(Path(name), counts, lambda number: (30 + number, 20))
    damaged = Path("damaged")
    (damaged / "train/bee/cut.png").write_bytes(encode(noise(9, 20, 20))[:-200])
    (damaged / "val/ant/text.jpg").write_bytes(b"no image")
    (damaged / "val/ant/copy.png").write_bytes((damaged / "train/ant/0.png").read_bytes())
    (damaged / "train/notes.txt").write_text("x")
    rows = np.arange(24)[:, np.newaxis] * np.ones((1, 32))
    write_pairs(
        Path("pairs"),
        [(noise(n, 24, 32), np.where(rows < n + 3, 255, 0).astype(np.uint8)) for n in range(10)],
    )


_RUN = "--device cpu --fused-micro-batches 1 --seed 7 --micro-batch-size 8"
_BENCHMARK = (
    "--device cpu --fused-micro-batches 1 --seed 1 --min-time 0 --executions 3 --overwrite --run-dir b --json"
)
_WRITTEN = ("report.json", "metrics.jsonl")
SCENES = {
    "classes": Scene(
        _images,
        {
            "train": Command(
                f"train lenet --dataset digits --limit-train 64 --limit-eval 20 --num-epochs 2 {_RUN} --run-dir r",
                tuple(f"r/{name}" for name in (*_WRITTEN, "config.yml")),
            ),
            "train-resumed": Command(
                "train --resume --run-dir r --num-epochs 3", tuple(f"r/{name}" for name in _WRITTEN)
            ),
            "evaluate": Command("evaluate r --json --predictions p.csv", ("p.csv",)),
            "evaluate-screen": Command("evaluate r"),
            "infer": Command("infer r images --json"),
            "infer-split": Command("infer r --split eval --limit-eval 4 --json"),
            "infer-screen": Command("infer r --split eval --limit-eval 4 --top 2"),
            "runs": Command("runs . --json"),
        },
    ),
    "masks": Scene(
        _images,
        {
            "train-masks": Command(
                "train unet --dataset membranes --limit-train 4 --limit-eval 2 --num-epochs 1 --image-size 204 "
                f"--base-filters 2 {_RUN.replace('size 8', 'size 1')} --run-dir r",
                ("r/report.json", "r/metrics.jsonl"),
            ),
            "evaluate-masks": Command("evaluate r --limit-eval 1 --json"),
            "evaluate-masks-screen": Command("evaluate r --limit-eval 1"),
            "infer-masks": Command("infer r images --output masks --json"),
            "infer-masks-screen": Command("infer r images --output masks-2"),
        },
    ),
    "folds": Scene(
        _nothing,
        {
            "folds": Command(
                f"train lenet --dataset digits --limit-train 32 --limit-eval 16 --kfold 2 --num-epochs 1 {_RUN} "
                "--run-dir cv",
                ("cv/folds.json",),
            ),
        },
    ),
    "data sets": Scene(
        _data_sets,
        {
            "verify": Command("verify-dataset good --json"),
            "verify-screen": Command("verify-dataset good"),
            "verify-masks": Command("verify-dataset pairs --json"),
            "verify-damaged": Command("verify-dataset damaged --json"),
            "verify-damaged-screen": Command("verify-dataset damaged"),
        },
    ),
    "benchmark": Scene(
        _nothing,
        {
            "benchmark": Command(
                f"benchmark lenet --host-generated-data --replicas 2 --micro-batch-size 4 {_BENCHMARK}"
            ),
        },
    ),
    "other benchmarks": Scene(
        _nothing,
        {
            "benchmark-constant-batch": Command(
                "benchmark mnist_cnn --device-generated-data --compare-with keras --steps-per-execution 6 "
                f"--micro-batch-size 2 {_BENCHMARK}"
            ),
            "benchmark-data": Command(
                f"benchmark lenet --mode data --dataset digits --augment --micro-batch-size 4 {_BENCHMARK}"
            ),
            "benchmark-end-to-end": Command(
                "benchmark lenet --mode end-to-end --dataset digits --micro-batch-size 8 --steps-per-execution 2 "
                f"{_BENCHMARK}"
            ),
            "benchmark-void": Command(
                "benchmark mnist_cnn --training --dataset digits --micro-batch-size 8 --optimizer sgd "
                f"--learning-rate 1e38 --steps-per-execution 1 {_BENCHMARK}"
            ),
        },
    ),
    "plans": Scene(
        _nothing,
        {
            "plan": Command("plan-splits cifar_resnet8 --stages 2 --micro-batch-size 4 --json"),
            "plan-screen": Command("plan-splits cifar_resnet8 --stages 2 --micro-batch-size 4"),
        },
        measures=False,
    ),
}
NAMES = [name for scene in SCENES.values() for name in scene.commands]


def play(scene: Scene, folder: Path) -> Dict[str, Any]:
    """Runs the commands of a scene in an empty folder and returns what each reports, by name."""
    from ipucnn.reports import console

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("COLUMNS", raising=False)  # the width of a pipe
        patch.setenv("NO_COLOR", "1")
        patch.setattr(console, "_EVERY_S", math.inf)  # no lines of progress, however slow the machine is
        benchmark_briefly(patch)
        scene.prepare()
        return {name: _reported(command, scene.measures) for name, command in scene.commands.items()}


def _reported(command: Command, measures: bool) -> Dict[str, Any]:
    from ipucnn import cli

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run(shlex.split(command.line))
    texts = {name: Path(name).read_text(encoding="utf-8") for name in command.files}
    texts = {"stdout": out.getvalue(), "stderr": err.getvalue(), **texts}
    documents = {name: _parsed(text) for name, text in texts.items()}
    documents = steady(documents) if measures else documents
    return {"command": f"ipucnn {command.line}", "exit code": code, **documents}


def _parsed(text: str) -> Any:
    """Returns JSON, a list of lines of JSON, or a list of lines of text."""
    for read in (json.loads, lambda text: [json.loads(line) for line in text.splitlines()]):
        with contextlib.suppress(ValueError):
            return read(text)
    # Columns are as wide as their numbers.
    lines = (re.sub(r"([ ─])\1{2,}", r"\1\1", line.strip()) for line in text.splitlines())
    return [line for line in lines if line and not re.match(SOMETIMES, line)]


def steady(value: Any, path: str = "") -> Any:
    """Returns a value of a report in which words stand for what varies, see ``VARIES``."""
    for pattern, word in VARIES:
        if value is not None and re.fullmatch(pattern, path):
            return word
    if isinstance(value, dict):
        return {key: steady(part, f"{path}.{key}" if path else key) for key, part in value.items()}
    if isinstance(value, list):
        return [steady(part, path) for part in value]
    for pattern, word in VARIES if isinstance(value, str) else ():
        value = re.sub(pattern, word, value)
    return value


def differences(stored: Any, now: Any, path: str = "") -> List[str]:
    """Returns a line for each field that is not the stored one; numbers may differ by ``RELATIVE`` or ``ABSOLUTE``."""
    if isinstance(stored, dict) and isinstance(now, dict):
        lines = [f"{path}.{key}: only in one" for key in sorted(set(stored) ^ set(now))]
        parts = [(f"{path}.{key}", stored[key], now[key]) for key in stored if key in now]
        return lines + [line for name, *both in parts for line in differences(*both, name)]
    if isinstance(stored, list) and isinstance(now, list) and len(stored) == len(now):
        numbered = enumerate(zip(stored, now))
        return [line for k, both in numbered for line in differences(*both, f"{path}[{k}]")]
    if isinstance(stored, float) and isinstance(now, (int, float)):
        equal = math.isclose(stored, now, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    elif isinstance(stored, str) and isinstance(now, str):
        equal = _same_text(stored, now)
    else:
        equal = stored == now and type(stored) is type(now)
    return [] if equal else [f"{path}: {stored!r} is now {now!r}"]


def _same_text(stored: str, now: str) -> bool:
    """Returns whether two texts are equal but for the last digits of their fractions."""
    parts = [re.split(r"(\d+\.\d+)", text) for text in (stored, now)]
    if parts[0][::2] != parts[1][::2]:
        return False
    for a, b in zip(parts[0][1::2], parts[1][1::2]):
        last_digit = 10.0 ** -len(a.partition(".")[2])
        if not math.isclose(float(a), float(b), rel_tol=RELATIVE, abs_tol=1.01 * last_digit):
            return False
    return True


def stored(name: str) -> Dict[str, Any]:
    """Returns what is stored for a command."""
    report: Dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return report


def _in_one_line(numbers: "re.Match[str]") -> str:
    return f"[{' '.join(numbers[1].split())}]"


def renew(names: List[str]) -> None:
    """Stores what commands report now; without names, for all of them, and removes the files of others."""
    for scene in SCENES.values():
        if set(names or NAMES) & set(scene.commands):
            with tempfile.TemporaryDirectory() as folder:
                for name, report in play(scene, Path(folder)).items():
                    if name in (names or NAMES):
                        text = json.dumps(report, indent=1, ensure_ascii=False)
                        text = re.sub(r"\[\s+([^][{}\"]+?)\s+\]", _in_one_line, text)
                        (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    for path in FOLDER.glob("*.json"):
        if path.stem not in NAMES:
            path.unlink()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--renew", nargs="*", metavar="NAME", choices=[*NAMES, []], required=True)
    renew(parser.parse_args().renew)
