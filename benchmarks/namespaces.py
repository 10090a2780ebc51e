"""Trains between two hosts that are network namespaces of this machine, over links of limited bandwidth.

Usage: sudo python benchmarks/namespaces.py [--rates RATE ...] [--networks NAME ...] [--epochs N] [--csv FILE]

Two namespaces with host names of their own are joined by a veth pair.  ``tc`` limits the bandwidth of both ends with a
token bucket (tbf).  MPICH's Hydra starts one process in each of them, with ``ip netns exec`` in place of ssh.  Each
network is trained in one process, and then between the hosts at each rate; ``metrics.jsonl`` and all checkpoints must
be the same bytes, else the exit code is 5.  It needs root.  The delay of a real network is not part of it.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import List, Optional

import cluster

import results

HOSTS = {"ipucnn-a": "10.99.0.1", "ipucnn-b": "10.99.0.2"}
# Hydra calls it as ssh: options, host, command.
LAUNCHER = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec "$host" unshare --uts sh -c "hostname $host; $*"
"""


def run(command: str) -> None:
    """Runs a command of ip or tc."""
    subprocess.run(command.split(), check=True)


def make_hosts(place: Path) -> List[str]:
    """Makes the namespaces; returns the words that start processes in them."""
    (first, one), (second, other) = HOSTS.items()
    names = "".join(f"{address} {name}\n" for name, address in HOSTS.items())
    for name in HOSTS:
        run(f"ip netns add {name}")
        run(f"ip -n {name} link set lo up")
        folder = Path("/etc/netns") / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
    run(f"ip link add veth0 netns {first} type veth peer name veth0 netns {second}")
    for name, address in ((first, one), (second, other)):
        run(f"ip -n {name} addr add {address}/24 dev veth0")
        run(f"ip -n {name} link set veth0 up")
    script = place / "launcher"
    script.write_text(LAUNCHER)
    script.chmod(0o755)
    words = f"ip netns exec {first} unshare --uts {place / 'start'} -launcher ssh -launcher-exec {script}"
    start = place / "start"
    start.write_text(f'#!/bin/sh\nhostname {first}; exec {cluster.MPIEXEC} "$@"\n')
    start.chmod(0o755)
    return [*words.split(), "-hosts", ",".join(HOSTS), "-ppn", "1", "-iface", "veth0"]


def limit(rate: str) -> None:
    """Limits the bandwidth of both ends of the link."""
    for name in HOSTS:
        run(f"ip netns exec {name} tc qdisc replace dev veth0 root tbf rate {rate} burst 1mb latency 500ms")


def remove_hosts() -> None:
    for name in HOSTS:
        subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--networks", nargs="+", choices=list(cluster.NETWORKS), default=["cifar_resnet8"])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--csv", type=Path, help="also write the figures there")
    options = parser.parse_args(arguments)
    options.workers, options.reduction = [1, 2], "ordered"
    place, rows, failed = Path(tempfile.mkdtemp(prefix="namespaces-")), [], False
    os.chmod(place, 0o755)
    print(f"{'rate':10}{cluster.HEAD}", flush=True)
    try:
        launcher = make_hosts(place)
        for name in options.networks:
            reference = place / f"{name}-1"
            print(f"{'-':10}{cluster.line(name, 1, cluster.train(name, 1, options, reference), 'reference')}")
            for rate in options.rates:
                limit(rate)
                folder = place / f"{name}-{rate}"
                report = cluster.train(name, 2, options, folder, launcher)
                differing = cluster.differences(reference, folder)
                failed = failed or bool(differing)
                what = f"{len(differing)} file(s) differ" if differing else "the same"
                print(f"{rate:10}{cluster.line(name, 2, report, what)}", flush=True)
                measured = report["measured"]
                rows.append(
                    {
                        "network": name,
                        "rate": rate,
                        "updates_per_s": round(
                            measured["images_per_s"] / report["program"]["global_batch_size"], 2
                        ),
                        "received_mb": round(measured["sharing"]["received_bytes"] / 1e6, 2),
                        "share": round(measured["sharing"]["collective_s"] / measured["train_s"], 2),
                        "bytes": what,
                    }
                )
        if options.csv is not None:
            how = results.Measurement(f"python benchmarks/namespaces.py --rates {' '.join(options.rates)}")
            results.write_rows(options.csv, rows, how, ("network", "rate"))
    finally:
        remove_hosts()
        shutil.rmtree(place)
    return 5 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
