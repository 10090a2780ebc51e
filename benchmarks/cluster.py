"""Trains with 1, 2 and 4 processes on this machine, compares every byte, and measures the cost of summing gradients.

Usage: python benchmarks/cluster.py [--workers N ...] [--networks NAME ...] [--epochs N] [--reduction ordered|allreduce]
           [--keep DIR] [--model]

Each network is trained by one process and by several with the same command (``mpiexec -n N ipucnn train ...``) and one
thread each.  ``metrics.jsonl`` and all checkpoints must be the same bytes; the exit code is 5 if they are not (with
``--reduction allreduce``, which promises less, a difference is only reported).  The table has the weight updates per
second that the run itself measured, the megabytes each process received in a weight update, the share of the time spent
on that, and the processor time of all processes.  Processes on one machine share its cores, so their speed says nothing
about several machines.

With ``--model`` nothing is trained: it prints the efficiency of several machines by the formula in docs/cluster.md.
"""

import argparse
import json
import os
import platform
import shlex
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from processes import run

COMMON = "--seed 1 --threads 1 --num-replicas 2 --logs-per-epoch 1 --ckpts-per-epoch 1"
NETWORKS: Dict[str, str] = {
    # Batch norm, augmentation, accumulation and replicas in all of them; dropout and drop-connect in EfficientNet.
    "cifar_resnet8": "--dataset digits --micro-batch-size 4 --gradient-accumulation-count 4 --augment "
    "--limit-train 320 --limit-eval 100",
    "efficientnet-b0": "--dataset digits --micro-batch-size 4 --gradient-accumulation-count 2 --augment "
    "--limit-train 64 --limit-eval 40",
    "unet": "--dataset membranes --base-filters 2 --image-size 188 --micro-batch-size 1 "
    "--gradient-accumulation-count 2 --augment",
}
LINKS_GBIT_S = (1, 10, 100)
MACHINES = (2, 4, 8, 16, 32, 64)
# Assumed, not measured: the bytes of memory that a machine reads and writes in a second while it sums gradients. Each
# number takes two reads and a write of 4 bytes.
ADDED_BYTES_PER_S = 5e9


MPIEXEC = str(Path(sysconfig.get_path("scripts")) / "mpiexec")


def train(
    name: str, workers: int, options: argparse.Namespace, folder: Path, launcher: Sequence[str] = (MPIEXEC,)
) -> Dict[str, Any]:
    """Trains in one or several processes of their own; returns the run's report, with their ``processor_s``."""
    words = [*launcher, "-n", str(workers), sys.executable, "-m", "ipucnn", "train", name]
    words += [*shlex.split(NETWORKS[name]), *shlex.split(COMMON), "--max-workers", str(max(options.workers))]
    words += ["--num-epochs", str(options.epochs), "--run-dir", str(folder), "--json"]
    if workers > 1 and options.reduction != "ordered":
        words += ["--reduction", options.reduction]
    ended = run(words)
    if ended.code:
        raise SystemExit(
            f"{name} with {workers} process(es) ended with exit code {ended.code}\n{ended.stderr[-3000:]}"
        )
    return {**json.loads(ended.stdout), "processor_s": ended.processor_s}


def differences(one: Path, other: Path) -> List[str]:
    """Returns the files of a run that are not byte for byte those of another."""
    names = {"metrics.jsonl"}
    names |= {f"checkpoints/{p.name}" for run in (one, other) for p in (run / "checkpoints").iterdir()}
    return sorted(
        name
        for name in names
        if not (one / name).is_file()
        or not (other / name).is_file()
        or (one / name).read_bytes() != (other / name).read_bytes()
    )


HEAD = f"{'network':16}{'processes':>10}{'updates/s':>11}{'received MB':>13}{'share':>7}{'processor s':>13}  bytes"


def line(name: str, workers: int, report: Dict[str, Any], what: str) -> str:
    """Returns a line of the table."""
    measured, program = report["measured"], report["program"]
    per_s = measured["images_per_s"] / program["global_batch_size"]
    sharing = measured["sharing"]
    received, share = "-", "-"
    if sharing is not None:
        received = f"{sharing['received_bytes'] / 1e6:.2f}"
        share = f"{sharing['collective_s'] / measured['train_s']:.0%}"
    return f"{name:16}{workers:10}{per_s:11.2f}{received:>13}{share:>7}{report['processor_s']:13.1f}  {what}"


def measure(options: argparse.Namespace, place: Path) -> int:
    """Prints the table of networks and processes; returns the exit code."""
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; Python {platform.python_version()}"
    )
    print(HEAD, flush=True)
    failed = False
    for name in options.networks:
        for workers in options.workers:
            folder = place / f"{name}-{workers}"
            shutil.rmtree(folder, ignore_errors=True)
            report = train(name, workers, options, folder)
            first = place / f"{name}-{options.workers[0]}"
            differing = differences(first, folder) if workers != options.workers[0] else []
            what = "reference" if folder == first else "the same"
            if differing:
                what = f"{len(differing)} file(s) differ, {differing[0]} first"
                failed = failed or options.reduction == "ordered"
            print(line(name, workers, report, what), flush=True)
    return 5 if failed else 0


def efficiency(
    update_s: float, gradient_bytes: float, workers: int, link_gbit_s: float, is_allreduce: bool
) -> float:
    """Returns the speed of W machines over W times the speed of one; each computes one part of a weight update.

    Args:
        update_s: seconds of a weight update on one machine.
        gradient_bytes: bytes of one gradient, float32.
        workers: W.
        link_gbit_s: speed of each machine's link, in each direction.
        is_allreduce: all-reduce in place of gathering and adding in order.
    """
    times = 2 * (workers - 1) / workers if is_allreduce else workers - 1
    sent_s = times * gradient_bytes * 8 / (link_gbit_s * 1e9)
    added_s = (2 if is_allreduce else workers) * 3 * gradient_bytes / ADDED_BYTES_PER_S
    return update_s / workers / (update_s / workers + sent_s + added_s)


def show_model() -> int:
    """Prints the efficiencies of some networks on machines that have a link each; returns the exit code."""
    # Parameters in millions, and the assumed time of a weight update on one machine.
    cases = (("efficientnet-b0", 5.3, 10.0), ("resnet50", 25.6, 10.0), ("resnet50", 25.6, 60.0))
    heads = "".join(f"{f'{w} workers':>12}" for w in MACHINES)
    print(f"{'network':16}{'update':>8}{'link':>11}{'reduction':>11}{heads}")
    for name, millions, update_s in cases:
        for link in LINKS_GBIT_S:
            for reduction in ("ordered", "allreduce"):
                efficiencies = [
                    efficiency(update_s, millions * 4e6, w, link, reduction == "allreduce") for w in MACHINES
                ]
                cells = "".join(f"{value:12.0%}" for value in efficiencies)
                print(f"{name:16}{update_s:6.0f} s{link:4} Gbit/s{reduction:>11}{cells}")
    return 0


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[1, 2, 4], help="the first one is the reference"
    )
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--reduction", choices=("ordered", "allreduce"), default="ordered")
    parser.add_argument("--keep", type=Path, help="folder to keep the runs in")
    parser.add_argument("--model", action="store_true", help="print the model, and train nothing")
    options = parser.parse_args(arguments)
    if options.model:
        return show_model()
    place = options.keep or Path(tempfile.mkdtemp(prefix="cluster-"))
    try:
        return measure(options, place)
    finally:
        if options.keep is None:
            shutil.rmtree(place)


if __name__ == "__main__":
    sys.exit(main())
