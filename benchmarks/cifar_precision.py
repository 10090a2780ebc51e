"""cifar_resnet8 on CIFAR-10 files, in 32 bits and in 16 with stochastic rounding: are they as good as each other?

Usage: python benchmarks/cifar_precision.py FOLDER [--seeds 3] [--epochs 10] [--out results/cifar_precision.csv]
       [--option=--loss-scaling=128 ...]

FOLDER is what --dataset-path takes.  Runs that are in --out already are not repeated, so it can be stopped and started
again.  Printed are mean and standard deviation of the validation accuracy, the difference with its standard error, and
the time.
"""

import argparse
import csv
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

KINDS = (("32.32", "OFF"), ("16.16", "ON"))
COLUMNS = (
    "precision",
    "stochastic_rounding",
    "seed",
    "epochs",
    "samples",
    "accuracy",
    "loss",
    "train_s",
    "options",
)


def train(folder, precision, rounding, seed, epochs, options):
    """One run's row."""
    with tempfile.TemporaryDirectory() as place:
        command = [
            sys.executable, "-m", "ipucnn", "train", "cifar_resnet8", "--dataset", "cifar10", "--dataset-path", folder,
            "--precision", precision, "--seed", str(seed), "--num-epochs", str(epochs), "--device", "cpu",
            "--no-checkpoints", "--run-dir", f"{place}/run", "--augment", *options,
        ]  # fmt: skip
        if precision != "32.32":
            command += ["--stochastic-rounding", rounding]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        report = json.loads(pathlib.Path(place, "run", "report.json").read_text(encoding="utf-8"))
    validation = report["validation"]
    return {
        "precision": precision, "stochastic_rounding": rounding, "seed": seed, "epochs": epochs,
        "samples": report["dataset"]["train"], "accuracy": validation["accuracy"], "loss": validation["loss"],
        "train_s": round(report["measured"]["train_s"], 1), "options": " ".join(options),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results/cifar_precision.csv"))
    parser.add_argument(
        "--option", action="append", default=[], help="of ipucnn train, for all runs, as --option=..."
    )
    args = parser.parse_args()
    rows = []
    if args.out.exists():
        with args.out.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    options = [part for option in args.option for part in option.split("=", 1)]
    for seed in range(1, args.seeds + 1):
        for precision, rounding in KINDS:
            wanted = (precision, rounding, str(seed), str(args.epochs), " ".join(options))
            names = ("precision", "stochastic_rounding", "seed", "epochs", "options")
            if any(tuple(row[name] for name in names) == wanted for row in rows):
                continue
            row = train(args.folder, precision, rounding, seed, args.epochs, options)
            rows.append({name: str(value) for name, value in row.items()})
            with args.out.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
            print(rows[-1], flush=True)
    found = {}
    for precision, _ in KINDS:
        own = [
            r
            for r in rows
            if (r["precision"], r["epochs"], r["options"]) == (precision, str(args.epochs), " ".join(options))
        ]
        accuracies = [float(r["accuracy"]) for r in own]
        found[precision] = accuracies
        seconds = statistics.mean(float(r["train_s"]) for r in own)
        spread = statistics.stdev(accuracies) if len(own) > 1 else float("nan")
        print(
            f"{precision}: accuracy {statistics.mean(accuracies):.4f}, deviation {spread:.4f}, {seconds:.0f} s a run"
        )
    if args.seeds > 1:
        a, b = found["32.32"], found["16.16"]
        error = (statistics.variance(a) / len(a) + statistics.variance(b) / len(b)) ** 0.5
        difference = statistics.mean(b) - statistics.mean(a)
        print(
            f"16.16 minus 32.32: {difference:+.4f}, standard error {error:.4f}: {difference / error:+.1f} of them"
        )


if __name__ == "__main__":
    main()
