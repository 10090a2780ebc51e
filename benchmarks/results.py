"""Trains presets under several seeds with the command a user types, and writes the held-out figures to a CSV.

Usage: python benchmarks/results.py [--data DIR] [--seeds 1 2 3] [--only NAME ...] [--output results/presets.csv]
           [--choose] [--also="--num-epochs 40"]
       python benchmarks/results.py --suite keras-tutorial --data DIR

One row per preset: mean and standard deviation (n - 1) of the held-out figure after the last epoch (not the
best one), wall and processor time of the whole command, and the conditions.  A row is written when its seeds
are done; rows of other presets in the file stay.  After a stop, the same command goes on with the next seed.  Presets
whose data are not in --data are left out, with a message.  A cross-validation has one value for each fold: the soft
Dice that `ipucnn evaluate` prints for it.

With --suite a built-in suite of `ipucnn benchmark` runs, and its table is written to results/SUITE.csv, its figure to
docs/images/SUITE.svg: rows that failed are in it, with their error.  After a stop, the same command goes on with the
next row.

With --choose nothing is written, and the evaluation images are not used: seed s trains on four fifths of the training
images and is evaluated on fifth number (s - 1) % 5 + 1.  This compares values for a preset; --also tries others.
"""

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional, Sequence

import measuring
from measuring import RESULTS, ROOT, Journal, Provenance, read_rows, write_rows

# What is kept of the table of a suite.
SUITE_COLUMNS = (
    *("id", "model", "measured_with", "mode", "status", "error", "data", "image_height", "micro_batch_size"),
    *("gradient_accumulation_count", "num_replicas", "num_stages", "wall_s", "images_per_s", "step_s"),
    *("peak_memory_bytes", "flop_per_parameter", "ratio_to_keras", "training_accuracy", "accuracy"),
    *("predicted_images_per_s", "predicted_num_ipus", "notes"),
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


def run_ipucnn(words: Sequence[str], program: Sequence[str] = ("-m", "ipucnn")) -> Dict[str, Any]:
    """Runs ipucnn; returns what it prints with --json, and the wall and processor seconds of the process."""
    words = [*words, "--json"]
    ended = measuring.run_ipucnn(words, program)
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


def cross_validation(name: str, arguments: Sequence[str], seed: int, folder: Path) -> Dict[str, Any]:
    """Returns the CSV row of a cross-validation: the soft Dice of each fold's held-out images.

    It continues in its folder after a stop; then the row has no time.
    """
    continues = (folder / "folds.json").exists()
    words = ["--resume"] if continues else [*arguments, "--seed", str(seed)]
    done = run_ipucnn(["train", *words, "--run-dir", str(folder)])
    folds = [folder / f"fold-{row['fold']}" for row in done["folds"]]
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
        "wall_s": "" if continues else f"{done['wall_s']:.0f}",
        "cpu_s": "" if continues else f"{done['cpu_s']:.0f}",
        "images_per_s": "",
    }


def run_suite(name: str, data: Optional[Path], again: bool) -> int:
    """Runs a built-in suite of ``ipucnn benchmark`` in a folder that stays, and writes its table.

    Rows that failed are part of the table, with their error, and so are those that are not measured yet after a stop.

    Returns:
        The exit code.
    """
    how = Provenance(f"python benchmarks/results.py --suite {name}" + (" --data DATA" if data else ""))
    stem = Path(name).stem
    folder = measuring.kept_folder(f"suite-{stem}", again) / "run"
    where = ["--dataset-path", str(data)] if data else []
    where += ["--resume"] if (folder / "suite.json").exists() else []
    code = 130
    try:
        code = measuring.run_ipucnn(
            ["benchmark", "--suite", name, *where, "--run-dir", str(folder)], shows_errors=True
        ).code
    finally:
        rows = read_rows(folder / "suite.csv") if (folder / "suite.csv").exists() else []
        for row in rows:
            row["measured_with"] = f"ipucnn {row['command']}"
            if data:
                row["measured_with"] = row["measured_with"].replace(str(data), "DATA")
        if rows:
            kept = [{**{key: row[key] for key in SUITE_COLUMNS}, **how.columns()} for row in rows]
            write_rows(RESULTS / f"{stem}.csv", kept, ("id",))
        for figure in folder.glob("speedup.svg"):
            (ROOT / "docs" / "images" / f"{stem}.svg").write_bytes(figure.read_bytes())
    return code


def row(name: str, options: argparse.Namespace, journal: Journal) -> Dict[str, Any]:
    """Returns the CSV row of a preset, trained once per seed."""
    preset, seeds = PRESETS[name], options.seeds
    arguments = [*shlex.split(preset.arguments), *shlex.split(options.also)]
    where = ["--dataset-path", str(options.data)] if preset.needs else []
    if "--kfold" in arguments:
        folder = journal.path.parent / f"{name.replace(' ', '-')}-{seeds[0]}"
        measured: Dict[str, Any] = journal.take(
            (name, seeds[0]), lambda: cross_validation(name, [*arguments, *where], seeds[0], folder)
        )
        return measured
    runs = []
    for seed in seeds:
        key = (name, options.also, options.choose, seed)
        runs.append(journal.take(key, lambda: train([*arguments, *where], seed, options.choose)))
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
        "images_per_s": f"{statistics.mean(run['measured']['images_per_s'] or 0 for run in runs):.0f}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with mnist/ and cifar-10-batches-py/")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    parser.add_argument("--output", type=Path, default=RESULTS / "presets.csv")
    parser.add_argument(
        "--suite", help="a suite of `ipucnn benchmark`, built in or FILE.yml, in place of presets"
    )
    parser.add_argument(
        "--choose", action="store_true", help="judge on parts of the training images; write nothing"
    )
    parser.add_argument(
        "--also", default="", help="with --choose, more options of `ipucnn train`, in one text"
    )
    measuring.add_again(parser)
    options = parser.parse_args()
    if options.also and not options.choose:
        parser.error("--also goes with --choose: rows are of presets as they are")
    if options.suite:
        return run_suite(options.suite, options.data, options.again)
    journal = Journal("presets", options.again)
    for name in options.only:
        needs = PRESETS[name].needs
        if needs is not None and not (options.data and (options.data / needs).exists()):
            print(f"{name}: left out, needs {needs} in --data", file=sys.stderr)
            continue
        if options.choose and ("--kfold" in PRESETS[name].arguments or PRESETS[name].figure):
            print(f"{name}: left out, there is nothing to choose", file=sys.stderr)
            continue
        data = " --data DATA" if needs else ""
        seeds = " ".join(map(str, options.seeds))
        how = Provenance(f"python benchmarks/results.py --only {shlex.quote(name)} --seeds {seeds}{data}")
        new_row = row(name, options, journal)
        if not options.choose:
            write_rows(options.output, [{**new_row, **how.columns()}], ("preset",))
    return 0


if __name__ == "__main__":
    sys.exit(main())
