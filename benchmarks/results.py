"""Trains presets under several seeds with the command a user types, and writes the held-out figures to a CSV.

Usage: python benchmarks/results.py [--data DIR] [--seeds 1 2 3] [--only NAME ...] [--output results/presets.csv]
           [--choose] [--also="--num-epochs 40"]
       python benchmarks/results.py --suite keras-tutorial --data DIR

One row per preset: mean and standard deviation (n - 1) of the held-out figure after the last epoch (not the
best one), wall and processor time of the whole command, and the conditions.  A row is written when its seeds
are done; rows of other presets in the file stay.  Presets whose data are not in --data are left out, with a message.
A cross-validation has one value for each fold: the soft Dice that `ipucnn evaluate` prints for it.

With --suite a built-in suite of `ipucnn benchmark` runs, and its table is written to results/SUITE.csv.

With --choose nothing is written, and the evaluation images are not used: seed s trains on four fifths of the training
images and is evaluated on fifth number (s - 1) % 5 + 1.  This compares values for a preset; --also tries others.
"""

import argparse
import csv
import io
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import processes
from processes import ROOT

from ipucnn.machine import cpu_name

# What is kept of the table of a suite.
SUITE_COLUMNS = (
    *("id", "model", "measured_with", "mode", "data", "image_height", "micro_batch_size"),
    *("gradient_accumulation_count", "num_replicas", "num_stages", "wall_s", "images_per_s", "step_s"),
    *("peak_memory_bytes", "training_accuracy", "accuracy", "predicted_images_per_s", "predicted_num_ipus"),
)
NUM_FOLDS = 5
# The code of a process with --choose: it takes one fold of the training images, whose number is the first argument.
CHOOSING = f"""
import sys
from dataclasses import replace
from ipucnn.datasets import base, registry
fold, whole = int(sys.argv.pop(1)), registry.open_dataset
def open_dataset(*args, **options):
    source = whole(*args, **options)
    return base.select_fold(replace(source, info=replace(source.info, own_split=False)), {NUM_FOLDS}, fold)
registry.open_dataset = open_dataset
from ipucnn.__main__ import main
main()
"""


class Preset(NamedTuple):
    """A command line of `ipucnn train`, the data it needs, and the figure of its training that others published."""

    arguments: str
    needs: Optional[str]
    figure: Optional[str] = None


PRESETS: Dict[str, Preset] = {
    "toy_model@digits": Preset("toy_model --dataset digits", None),
    "lenet@digits": Preset("lenet --dataset digits", None),
    "mnist_cnn@digits": Preset("mnist_cnn --dataset digits", None),
    "cifar_resnet8@digits": Preset("cifar_resnet8 --dataset digits", None),
    "efficientnet-b0@digits": Preset("efficientnet-b0 --dataset digits --replicas 4", None),
    "unet@membranes": Preset("unet --dataset membranes", None),
    "unet@isbi2012 in 5 folds": Preset("unet --dataset isbi2012 --kfold 5", "isbi2012"),
    "unet@isbi2012": Preset("unet --dataset isbi2012", "isbi2012"),
    "lenet@mnist": Preset("lenet --dataset mnist", "mnist"),
    "mnist_cnn@mnist": Preset("mnist_cnn --dataset mnist", "mnist"),
    "cifar_resnet8@cifar10": Preset("cifar_resnet8 --dataset cifar10", "cifar-10-batches-py"),
    "efficientnet-b0@cifar10": Preset("efficientnet-b0 --dataset cifar10", "cifar-10-batches-py"),
    "keras_mnist": Preset("--config keras_mnist", "mnist", "training accuracy"),
    "keras_mnist_replicas": Preset("--config keras_mnist_replicas", "mnist", "training accuracy"),
    "keras_mnist_pipeline": Preset("--config keras_mnist_pipeline", "mnist", "training accuracy"),
    "ulhpc_resnet50": Preset("--config ulhpc_resnet50", "cifar-10-batches-py", "training loss"),
    "cifar_resnet8@cifar10 in 16.16": Preset(
        "cifar_resnet8 --dataset cifar10 --precision 16.16 --stochastic-rounding ON --loss-scaling 128",
        "cifar-10-batches-py",
    ),
}


@dataclass(frozen=True)
class Measurement:
    """How rows were measured.

    Attributes:
        command: what measures them again.
        packages: packages that the figures depend on.
        load: the machine's load when the measurement began.
    """

    command: str
    packages: Sequence[str] = ("tensorflow", "keras")
    load: float = field(default_factory=lambda: os.getloadavg()[0])

    def columns(self) -> Dict[str, str]:
        """Returns the columns: command, revision of the working tree, conditions, and the load at the start."""
        revision = _git("rev-parse", "--short=8", "HEAD") or "unknown"
        if _git("status", "--porcelain", "--", "ipucnn", "benchmarks"):
            revision += "-changed"
        versions = ", ".join(f"{name} {version(name)}" for name in self.packages)
        conditions = f"{cpu_name()}, {os.cpu_count()} cores; Python {platform.python_version()}, {versions}"
        return {
            "command": self.command,
            "revision": revision,
            "conditions": conditions,
            "load": f"{self.load:.1f}",
        }


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def read_rows(path: Path) -> List[Dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as handle:
        return list(csv.DictReader(handle))


def write_rows(
    path: Path, rows: Sequence[Dict[str, Any]], how: Measurement, keys: Sequence[str] = ()
) -> None:
    """Writes rows to a CSV file, with what ``how`` says behind them.

    Args:
        keys: columns that identify a row; rows of the file with other values in them stay, each at its place.
    """
    rows = [{**row, **how.columns()} for row in rows]
    if keys and path.exists():
        merged = {tuple(row[key] for key in keys): row for row in read_rows(path)}
        merged.update({tuple(str(row[key]) for key in keys): row for row in rows})
        rows = list(merged.values())
    text = io.StringIO()
    writer = csv.DictWriter(
        text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text.getvalue(), encoding="utf-8")
    temporary.replace(path)


def run_ipucnn(words: Sequence[str], program: Sequence[str] = ("-m", "ipucnn")) -> Dict[str, Any]:
    """Runs ipucnn; returns what it prints with --json, and the wall and processor seconds of the process."""
    words = [*words, "--json"]
    ended = processes.run_ipucnn(words, program)
    if ended.code != 0:
        raise SystemExit(f"ipucnn {shlex.join(words)} failed:\n{ended.stderr[-2000:]}")
    report: Dict[str, Any] = json.loads(ended.stdout)
    return {**report, "wall_s": ended.wall_s, "cpu_s": ended.processor_s}


def train(arguments: Sequence[str], seed: int, chooses: bool = False) -> Dict[str, Any]:
    """Trains one run; returns its report, and the wall and processor seconds of the process."""
    program = ["-c", CHOOSING, str((seed - 1) % NUM_FOLDS + 1)] if chooses else ["-m", "ipucnn"]
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", *arguments, "--seed", str(seed), "--run-dir", f"{folder}/run"]
        report = run_ipucnn(words, program)
        lines = Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    last = [row for row in map(json.loads, lines) if row["event"] == "execution"][-1]
    figures = {f"training {name}": last[name] for name in ("loss", "accuracy") if name in last}
    return {**report, "figures": {**report["validation"], **figures}}


def cross_validation(name: str, arguments: Sequence[str], seed: int) -> Dict[str, Any]:
    """Returns the CSV row of a cross-validation: the soft Dice of each fold's held-out images."""
    with tempfile.TemporaryDirectory() as folder:
        done = run_ipucnn(["train", *arguments, "--seed", str(seed), "--run-dir", f"{folder}/run"])
        folds = [Path(folder, "run", f"fold-{row['fold']}") for row in done["folds"]]
        programs = [json.loads((fold / "program.json").read_text(encoding="utf-8")) for fold in folds]
        evaluations = [run_ipucnn(["evaluate", str(fold)]) for fold in folds]
    values = [evaluation["segmentation"]["soft_dice"] for evaluation in evaluations]
    print(f"{name}: {' '.join(f'{value:.4f}' for value in values)}", file=sys.stderr, flush=True)
    return {
        "preset": name,
        "trained_with": f"ipucnn train {PRESETS[name].arguments} --dataset-path DATA",
        "figure": "soft dice",
        "mean": f"{statistics.mean(values):.4f}",
        "std": f"{statistics.stdev(values):.4f}",
        "seeds": str(seed),
        "values": " ".join(f"{value:.4f}" for value in values),
        "epochs": programs[0]["num_epochs"],
        "evaluation_samples": sum(each["dataset"]["size"] for each in evaluations),
        "wall_s": f"{done['wall_s']:.0f}",
        "cpu_s": f"{done['cpu_s']:.0f}",
        "images_per_s": "",
    }


def run_suite(name: str, data: Optional[Path]) -> None:
    """Runs a built-in suite of ``ipucnn benchmark``, and writes its table with command, revision and conditions."""
    how = Measurement(f"python benchmarks/results.py --suite {name}" + (" --data DATA" if data else ""))
    where = ["--dataset-path", str(data)] if data else []
    with tempfile.TemporaryDirectory() as folder:
        run_ipucnn(["benchmark", "--suite", name, *where, "--run-dir", f"{folder}/run"])
        rows = read_rows(Path(folder, "run", "suite.csv"))
    for row in rows:
        row["measured_with"] = f"ipucnn {row['command']}"
        if data:
            row["measured_with"] = row["measured_with"].replace(str(data), "DATA")
    write_rows(
        ROOT / "results" / f"{name}.csv", [{key: row[key] for key in SUITE_COLUMNS} for row in rows], how
    )


def row(name: str, options: argparse.Namespace) -> Dict[str, Any]:
    """Returns the CSV row of a preset, trained once per seed."""
    preset, seeds = PRESETS[name], options.seeds
    arguments = [*shlex.split(preset.arguments), *shlex.split(options.also)]
    where = ["--dataset-path", str(options.data)] if preset.needs else []
    if "--kfold" in arguments:
        return cross_validation(name, [*arguments, *where], seeds[0])
    runs = []
    for seed in seeds:
        runs.append(train([*arguments, *where], seed, options.choose))
        figure = preset.figure or ("dice" if "dice" in runs[-1]["figures"] else "accuracy")
        value, spent = runs[-1]["figures"][figure], runs[-1]["wall_s"]
        print(f"{name} seed {seed}: {figure} {value:.4f} in {spent:.0f} s", file=sys.stderr, flush=True)
    values = [run["figures"][figure] for run in runs]
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    print(
        f"{name}: mean {statistics.mean(values):.4f}, standard deviation {deviation:.4f}, least {min(values):.4f}, "
        f"median of {statistics.median(run['wall_s'] for run in runs):.0f} s",
        file=sys.stderr,
        flush=True,
    )
    last = runs[-1]
    command = f"ipucnn train {preset.arguments}" + (" --dataset-path DATA" if preset.needs else "")
    return {
        "preset": name,
        "trained_with": command,
        "figure": figure,
        "mean": f"{statistics.mean(values):.4f}",
        "std": f"{statistics.stdev(values):.4f}" if len(values) > 1 else "",
        "seeds": " ".join(map(str, seeds)),
        "values": " ".join(f"{value:.4f}" for value in values),
        "epochs": last["program"]["num_epochs"],
        "evaluation_samples": int(last["validation"]["samples"]),
        "wall_s": f"{statistics.mean(run['wall_s'] for run in runs):.0f}",
        "cpu_s": f"{statistics.mean(run['cpu_s'] for run in runs):.0f}",
        "images_per_s": f"{statistics.mean(run['measured']['images_per_s'] for run in runs):.0f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with mnist/ and cifar-10-batches-py/")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "presets.csv")
    parser.add_argument("--suite", help="a built-in suite of `ipucnn benchmark` in place of presets")
    parser.add_argument(
        "--choose", action="store_true", help="judge on parts of the training images; write nothing"
    )
    parser.add_argument(
        "--also", default="", help="with --choose, more options of `ipucnn train`, in one text"
    )
    options = parser.parse_args()
    if options.also and not options.choose:
        parser.error("--also goes with --choose: rows are of presets as they are")
    if options.suite:
        run_suite(options.suite, options.data)
        return
    for name in options.only:
        needs = PRESETS[name].needs
        if needs is not None and not (options.data and (options.data / needs).exists()):
            print(f"{name}: left out, needs {needs} in --data", file=sys.stderr)
            continue
        if options.choose and ("--kfold" in PRESETS[name].arguments or PRESETS[name].figure):
            print(f"{name}: left out, there is nothing to choose", file=sys.stderr)
            continue
        new_row = row(name, options)
        if not options.choose:
            seeds = new_row["seeds"]
            data = " --data DATA" if needs else ""
            how = Measurement(
                f"python benchmarks/results.py --only {shlex.quote(name)} --seeds {seeds}{data}"
            )
            write_rows(options.output, [new_row], how, ("preset",))


if __name__ == "__main__":
    main()
