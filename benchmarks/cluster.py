"""Trains with several processes, compares every byte, and measures the cost of summing gradients.

Usage: python benchmarks/cluster.py [--workers N ...] [--networks NAME ...] [--epochs N] [--reduction ordered|allreduce]
           [--csv FILE] [--again]
       sudo python benchmarks/cluster.py --rates 100mbit 1gbit [--networks NAME ...] [--epochs N] [--csv FILE]
       python benchmarks/cluster.py --model

Each network is trained by one process and by several with the same command (``mpiexec -n N ipucnn train ...``) and one
thread each.  ``metrics.jsonl`` and all checkpoints must be the same bytes; the exit code is 5 if they are not (with
``--reduction allreduce``, which promises less, a difference is only reported).  The table has the weight updates per
second that the run itself measured, the megabytes each process received in a weight update, the share of the time spent
on that, and the processor time of all processes.  Processes on one machine share its cores, so their speed says nothing
about several machines.  After a stop, the same command goes on with the next row.

With ``--rates`` two processes are on two hosts that are network namespaces of this machine, joined by a veth pair whose
ends ``tc`` limits with a token bucket (tbf).  MPICH's Hydra starts one process in each, with ``ip netns exec`` in place
of ssh.  It needs root.  The delay of a real network is not part of it.

With ``--model`` nothing is trained: it prints the efficiency of several machines by the formula in docs/cluster.md.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from measuring import Journal, Provenance, add_again, run, write_rows

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


HOSTS = {"ipucnn-a": "10.99.0.1", "ipucnn-b": "10.99.0.2"}
# Hydra calls it as ssh: options, host, command.
LAUNCHER = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec "$host" unshare --uts sh -c "hostname $host; $*"
"""


def call(command: str) -> None:
    """Runs a command of ip or tc."""
    subprocess.run(command.split(), check=True)


def make_hosts(place: Path) -> List[str]:
    """Makes the namespaces; returns the words that start processes in them."""
    (first, one), (second, other) = HOSTS.items()
    names = "".join(f"{address} {name}\n" for name, address in HOSTS.items())
    for name in HOSTS:
        call(f"ip netns add {name}")
        call(f"ip -n {name} link set lo up")
        folder = Path("/etc/netns") / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
    call(f"ip link add veth0 netns {first} type veth peer name veth0 netns {second}")
    for name, address in ((first, one), (second, other)):
        call(f"ip -n {name} addr add {address}/24 dev veth0")
        call(f"ip -n {name} link set veth0 up")
    script = place / "launcher"
    script.write_text(LAUNCHER)
    script.chmod(0o755)
    words = f"ip netns exec {first} unshare --uts {place / 'start'} -launcher ssh -launcher-exec {script}"
    start = place / "start"
    start.write_text(f'#!/bin/sh\nhostname {first}; exec {MPIEXEC} "$@"\n')
    start.chmod(0o755)
    return [*words.split(), "-hosts", ",".join(HOSTS), "-ppn", "1", "-iface", "veth0"]


def limit(rate: str) -> None:
    """Limits the bandwidth of both ends of the link."""
    for name in HOSTS:
        call(f"ip netns exec {name} tc qdisc replace dev veth0 root tbf rate {rate} burst 1mb latency 500ms")


def remove_hosts() -> None:
    for name in HOSTS:
        subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def figures(report: Dict[str, Any]) -> Dict[str, Any]:
    """Returns the figures of a run; those of sharing are empty in one process."""
    measured = report["measured"]
    row = {
        "updates_per_s": round((measured["images_per_s"] or 0) / report["program"]["global_batch_size"], 2),
        "processor_s": round(report["processor_s"], 1),
        "received_mb": "",
        "share": "",
    }
    sharing = measured["sharing"]
    if sharing is not None:
        row["received_mb"] = round(sharing["received_bytes"] / 1e6, 2)
        row["share"] = round(sharing["collective_s"] / measured["train_s"], 2)
    return row


def measure(options: argparse.Namespace) -> int:
    """Measures the rows of networks and processes, or of networks and rates; returns the exit code."""
    words = f"--epochs {options.epochs} --networks {' '.join(options.networks)}"
    if options.rates:
        words, options.workers = f"--rates {' '.join(options.rates)} {words}", [1, 2]
        kinds = [(1, ""), *((2, rate) for rate in options.rates)]
    else:
        words = f"--workers {' '.join(map(str, options.workers))} --reduction {options.reduction} {words}"
        kinds = [(workers, "") for workers in options.workers]
    journal = Journal("cluster", options.again)
    place, failed = journal.path.parent, False
    columns = ("network", "workers", "rate", "updates_per_s", "received_mb", "share", "processor_s", "bytes")
    print("".join(f"{column:>16}" for column in columns), flush=True)

    def row(name: str, workers: int, rate: str) -> Dict[str, Any]:
        how = Provenance(f"python benchmarks/cluster.py {words}", ("tensorflow", "keras", "mpi4py"))
        folder = place / f"{name}-{options.epochs}-{options.reduction}-{workers}{rate}"
        shutil.rmtree(folder, ignore_errors=True)
        if rate:
            limit(rate)
        report = train(name, workers, options, folder, launcher if rate else (MPIEXEC,))
        reference = place / f"{name}-{options.epochs}-{options.reduction}-{kinds[0][0]}"
        differing = differences(reference, folder)
        what = f"{len(differing)} differ: {differing[0]}" if differing else "the same"
        found = {**figures(report), "bytes": "reference" if folder == reference else what}
        return {"network": name, "workers": workers, "rate": rate, **found, **how.columns()}

    try:
        launcher = make_hosts(place) if options.rates else (MPIEXEC,)
        for name in options.networks:
            for kind in kinds:
                key = (name, *kind, options.epochs, options.reduction)
                measured: Dict[str, Any] = journal.take(key, lambda: row(name, *kind))
                failed = failed or (options.reduction == "ordered" and "differ" in measured["bytes"])
                print("".join(f"{measured[column]!s:>16}" for column in columns), flush=True)
                if options.csv is not None:
                    write_rows(options.csv, [measured], ("network", "workers", "rate"))
    finally:
        if options.rates:
            remove_hosts()
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
    parser.add_argument("--rates", nargs="+", help="bandwidths between two namespaces, such as 100mbit")
    parser.add_argument("--csv", type=Path, help="also write the rows there")
    parser.add_argument("--model", action="store_true", help="print the model, and train nothing")
    add_again(parser)
    options = parser.parse_args(arguments)
    return show_model() if options.model else measure(options)


if __name__ == "__main__":
    sys.exit(main())
