"""Compares twelve programs on the test double of the SDK with the host: training, evaluation, inference, benchmark.

``python tests/poplar_covering.py`` runs all of them on the facts of SDK 3.0 and 3.4 and prints the table of
docs/contributing/poplar-double.md; ``--only ROW ...`` and ``--sdk VERSION ...`` choose some.  The exit code is 1 if a
row differs from the host.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np

UPDATES = 3
SDKS = ("3.0", "3.4")
_EVALUATED, _INFERRED = 6, 2


@dataclass(frozen=True)
class Row:
    """One program.

    Attributes:
        name: name of the row.
        model: network to train.
        stages, schedule: the pipeline.
        replicas, accumulation: micro-batches of a weight update.
        size: height and width of the images.
        precision: 32.32, 16.16 or 16.32.
        more: further options.
        ipu: options of IPUs alone.
        ahead: whether it is compiled without IPUs first.
        generated: whether the benchmark's data is generated on the device, not on the host.
    """

    name: str
    model: str
    stages: int = 1
    schedule: str = "Grouped"
    replicas: int = 1
    accumulation: int = 2
    size: int = 16
    precision: str = "32.32"
    more: Tuple[str, ...] = ()
    ipu: Tuple[str, ...] = ()
    ahead: bool = False
    generated: bool = False

    @property
    def micro_batch(self) -> int:
        return 1 if self.model == "unet" else 4

    @property
    def group(self) -> int:
        """Replicas that share statistics; the host computes their micro-batches as one."""
        words = dict(zip(self.more, self.more[1:]))
        return int(words.get("--dbn-replica-group-size", 1))

    def flags(self) -> List[str]:
        """Returns options of ``ipucnn train`` for three weight updates, each an execution."""
        samples = UPDATES * self.micro_batch * self.accumulation * self.replicas
        words = f"--dataset random --image-size {self.size} --limit-train {samples} --limit-eval {_EVALUATED}"
        words += " --num-epochs 1 --seed 7 --precise-batch-norm 0 --dropout 0 --weight-decay 0 --learning-rate 0.01"
        words += (
            f" --micro-batch-size {self.micro_batch} --num-replicas {self.replicas} --global-batch-size none"
        )
        words += (
            f" --gradient-accumulation-count {self.accumulation} --steps-per-execution {self.accumulation}"
        )
        words += (
            ' --optimizer sgd --optimizer-params {"momentum":0.9} --lr-schedule const --lr-schedule-params {}'
        )
        words += f" --precision {self.precision}" + " --loss-scaling 8" * (self.precision != "32.32")
        return [*words.split(), *self.pipeline(), *self.more]

    def pipeline(self) -> List[str]:
        """Returns the options of the pipeline."""
        words = f"--ipus-per-replica {self.stages} --pipeline-schedule {self.schedule} --pipeline-splits auto"
        return words.split() if self.stages > 1 else []


_BATCH_NORM = ("--norm-layer", "batch_norm")
_GROUP_NORM = ("--norm-layer", "group_norm")
_DISTRIBUTED = (*_BATCH_NORM, "--dbn-replica-group-size", "2", "--eight-bit-transfer")
_RESNET = "cifar_resnet8"
ROWS = (
    Row("lenet", "lenet", generated=True),
    Row("lenet, compiled ahead", "lenet", replicas=2, ahead=True),
    Row(_RESNET, _RESNET, replicas=2, more=_BATCH_NORM),
    Row(f"{_RESNET}, distributed batch norm, 8-bit transfer", _RESNET, replicas=4, more=_DISTRIBUTED),
    Row(f"{_RESNET}, 2 stages Grouped", _RESNET, 2, "Grouped", 1, 4, more=_BATCH_NORM),
    Row(
        f"{_RESNET}, 2 stages Interleaved, 16.16",
        _RESNET,
        2,
        "Interleaved",
        precision="16.16",
        more=_GROUP_NORM,
    ),
    Row(
        f"{_RESNET}, 2 stages Sequential, 16.32",
        _RESNET,
        2,
        "Sequential",
        precision="16.32",
        more=_BATCH_NORM,
    ),
    Row(
        f"{_RESNET}, 4 stages Grouped",
        _RESNET,
        4,
        "Grouped",
        accumulation=8,
        more=_GROUP_NORM,
        ipu=("--pipeline-validation-model", "--recomputation"),
    ),
    Row(f"{_RESNET}, 4 stages Interleaved", _RESNET, 4, "Interleaved", 1, 4, more=_GROUP_NORM),
    Row(f"{_RESNET}, 4 stages Sequential", _RESNET, 4, "Sequential", replicas=2, more=_BATCH_NORM),
    Row("efficientnet-b0", "efficientnet-b0", replicas=2, size=32, more=_GROUP_NORM),
    Row("unet, 2 stages Grouped", "unet", 2, "Grouped", 1, 4, 188, more=("--base-filters", "2")),
)


def call(*words: Any) -> str:
    """Runs a command; returns its standard output.

    Raises:
        RuntimeError: it failed.
    """
    from ipucnn import cli

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run([str(word) for word in words])
    if code:
        raise RuntimeError(f"{' '.join(map(str, words))}: exit code {code}: {err.getvalue()[-600:]}")
    return out.getvalue()


@dataclass
class Comparison:
    """The comparison of a row with the host.

    Attributes:
        weights: largest difference from the host's, for 16 bits in steps between numbers (``in_steps``).
        loss: relative difference of the evaluated loss.
        inferred: number of images with the host's prediction.
        images_per_s: the benchmark's figure, which on the test double only shows that it ran.
        programs: number of compiled programs.
    """

    weights: float
    in_steps: bool
    loss: float
    inferred: int
    images_per_s: float
    programs: int

    def is_right(self) -> bool:
        limit, tolerance = (4.0, 0.02) if self.in_steps else (1e-6, 1e-4)
        return (
            self.weights <= limit
            and self.loss <= tolerance
            and self.inferred == _INFERRED
            and self.images_per_s > 0
        )


@dataclass
class Host:
    """The host's result for a row."""

    weights: Dict[str, Any]
    loss: float
    inferred: List[Any]


def on_the_host(row: Row, folder: Path) -> Host:
    """Trains, evaluates and infers on the host, micro-batch by micro-batch as IPUs do."""
    train = ["train", row.model, *row.flags(), "--fused-micro-batches", row.group]
    call(*train, "--device", "cpu", "--run-dir", folder / "run")
    return Host(_weights(folder), *_judged(row, folder, "cpu"))


def cover(row: Row, sdk: str, host: Host, folder: Path) -> Comparison:
    """Trains, evaluates, infers and benchmarks a row on the test double.

    Raises:
        RuntimeError: a command failed.
    """
    from poplar_double import installed

    cache = folder / "cache"
    train = ["train", row.model, *row.flags(), *row.ipu, "--run-dir", folder / "run"]
    if row.ahead:
        train += ["--executable-cache", cache]
        with installed(sdk=sdk, num_ipus=0):
            call(*train, "--compile-only")
        names = set(os.listdir(cache))
    with installed(sdk=sdk) as machine:
        call(*train, "--device", "ipu")
        programs, executions = len(machine.programs), len(machine.calls("fit"))
    if executions != UPDATES:
        raise RuntimeError(f"{executions} executions instead of {UPDATES}")
    if row.ahead and set(os.listdir(cache)) != names:
        raise RuntimeError("training compiled what was to be there already")
    with installed(sdk=sdk):
        loss, inferred = _judged(row, folder, "ipu")
        rate = _benchmarked(row)
    return Comparison(
        _compare(_weights(folder), host.weights, row.precision),
        row.precision != "32.32",
        abs(loss - host.loss) / max(abs(host.loss), 1e-3),
        sum(a == b for a, b in zip(inferred, host.inferred)),
        rate,
        programs,
    )


def _weights(folder: Path) -> Dict[str, Any]:
    from ipucnn.training.checkpoints import load_checkpoint

    return dict(load_checkpoint(folder / "run" / "checkpoints" / "last.npz").weights)


def _compare(on_ipus: Dict[str, Any], on_host: Dict[str, Any], precision: str) -> float:
    """Returns the largest difference; for 16 bits in steps between two numbers at the size of the weight."""
    if list(on_ipus) != list(on_host):
        raise RuntimeError("other weights than the host's")
    far = 0.0
    for name, value in on_host.items():
        difference = np.abs(on_ipus[name] - value)
        if precision != "32.32":
            largest = np.full_like(value, np.abs(value).max()).astype(np.float16)
            difference = difference / np.maximum(np.spacing(largest).astype(np.float32), 2.0**-14)
        far = max(far, float(difference.max()))
    return far


def _judged(row: Row, folder: Path, device: str) -> Tuple[float, List[Any]]:
    """Returns the loss of all evaluation images, and the class or mask of some."""
    report = json.loads(
        call("evaluate", folder / "run", "--limit-eval", _EVALUATED, "--device", device, "--json")
    )
    if report["measured"]["samples"] != _EVALUATED:
        raise RuntimeError(f"{report['measured']['samples']} images were evaluated instead of {_EVALUATED}")
    infer = ["infer", folder / "run", "--split", "eval", "--limit-eval", _INFERRED, "--device", device]
    if row.model == "unet":
        from PIL import Image, ImageSequence

        call(*infer, "--output", folder / "masks")
        (masks,) = (folder / "masks").glob("*mask.tif")
        with Image.open(masks) as stack:
            return report["measured"]["loss"], [mask.tobytes() for mask in ImageSequence.Iterator(stack)]
    return report["measured"]["loss"], [
        one["predictions"][0]["class"] for one in json.loads(call(*infer, "--json"))
    ]


def _benchmarked(row: Row) -> float:
    """Benchmarks training on the test double; returns the images per second of three executions."""
    words = "--training --device ipu --json --executions 3 --min-time 0.01 --max-time 2 --dropout 0"
    words += f" --image-size {row.size} --precision {row.precision} --micro-batch-size {row.micro_batch}"
    words += f" --num-replicas {row.replicas} --gradient-accumulation-count {row.accumulation}"
    words += f" --global-batch-size none --steps-per-execution {row.accumulation}"
    words += " --device-generated-data" if row.generated else " --host-generated-data"
    report = json.loads(call("benchmark", row.model, *words.split(), *row.more, *row.pipeline()))
    return float(report["measured"]["images_per_s"]["value"])


def main(arguments: List[str]) -> int:
    """Runs rows and prints a table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="ROW", help="rows whose names contain one of these")
    parser.add_argument("--sdk", nargs="+", default=list(SDKS), metavar="VERSION")
    chosen = parser.parse_args(arguments)
    rows = [row for row in ROWS if not chosen.only or any(word in row.name for word in chosen.only)]
    if not rows:
        parser.error(f"no row is named so; there are: {'; '.join(row.name for row in ROWS)}")
    print("| row | SDK | weights | evaluated loss | images evaluated, inferred | programs | right |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    wrong = 0
    for row in rows:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            host = on_the_host(row, Path(folder))
        for sdk in chosen.sdk:
            try:
                with tempfile.TemporaryDirectory() as folder:
                    comparison = cover(row, sdk, host, Path(folder))
            except RuntimeError as error:
                wrong += 1
                print(f"| {row.name} | {sdk} | {error} | | | | no |", flush=True)
                continue
            wrong += not comparison.is_right()
            unit = " steps" if comparison.in_steps else ""
            print(
                f"| {row.name} | {sdk} | {comparison.weights:.1e}{unit} | {comparison.loss:.1e} | {_EVALUATED}, "
                f"{comparison.inferred} | {comparison.programs} | {'yes' if comparison.is_right() else 'no'} |",
                flush=True,
            )
        print(f"{row.name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
