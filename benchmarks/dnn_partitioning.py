"""Optimal pipelines for the instances of Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph
Operators" (NeurIPS 2020), whose inputs are in the public repository msr-fiddle/dnn-partitioning.

Usage: python benchmarks/dnn_partitioning.py throughput-inputs/LayerGraphs/bert24_inference.json ...
           [--accelerators K] [--cpus L]

An instance is a graph of nodes with seconds on an accelerator and on a CPU, bytes, and the seconds in which a node's
output moves between an accelerator and the host.  Every accelerator and every CPU takes a contiguous part of the graph:
what is behind one down-set of it, and in another.  A CPU's load is its computing; an accelerator's is its computing and
what enters and leaves it, each tensor once however many nodes read it.  The largest load is made as small as possible,
by a dynamic program over all down-sets; nothing here is heuristic.  Prints that load without CPUs, and with as many as
the file (or --cpus) says, beside what is published.

Instances with backward nodes (training) are refused, and so are those of more than 3,000 down-sets.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Set, Tuple

import numpy as np

MOST_DOWN_SETS = 3000

# Published in the paper's tables: file -> (accelerators, largest load in ms without CPUs, with one).
PUBLISHED: Dict[str, Tuple[int, Optional[float], Optional[float]]] = {
    "bert24_inference": (6, None, 17.79),
    "resnet50_inference": (6, 34.22, 33.77),
}


@dataclass(frozen=True)
class Instance:
    """A graph, its n nodes in an order in which each comes behind all that it reads.

    Attributes:
        accelerator, cpu, size, cost: (n,) time on either, bytes, and time to move the output; inf where a node does not
            run on accelerators.
        reads: (n, n) whether node [j] reads node [i].
        together: sets of nodes that have to be on one device.
        max_size: bytes of an accelerator.
    """

    accelerator: np.ndarray
    cpu: np.ndarray
    size: np.ndarray
    cost: np.ndarray
    reads: np.ndarray
    together: Tuple[Tuple[int, ...], ...]
    max_size: float
    max_accelerators: int
    max_cpus: int


def read_instance(text: str) -> Instance:
    """The instance in a JSON text of that repository.

    Raises:
        ValueError: it has backward nodes, a circle, or a node whose output has two costs.
    """
    data = json.loads(text)
    nodes = {node["id"]: node for node in data["nodes"]}
    if any(node["isBackwardNode"] for node in nodes.values()):
        raise ValueError("it has backward nodes: only graphs of inference are solved here")
    before: Dict[int, Set[int]] = {name: set() for name in nodes}
    cost: Dict[int, float] = {}
    for edge in data["edges"]:
        source = edge["sourceId"]
        before[edge["destId"]].add(source)
        if abs(cost.setdefault(source, edge["cost"]) - edge["cost"]) > 1e-6:
            raise ValueError(f"the output of node {source} has two costs")
    order: List[int] = []
    left = dict(before)
    while left:
        ready = [name for name, sources in left.items() if sources <= set(order)]
        if not ready:
            raise ValueError("it has a circle")
        order += ready
        for name in ready:
            del left[name]
    place = {name: i for i, name in enumerate(order)}
    reads = np.zeros((len(order), len(order)), dtype=bool)
    for name, sources in before.items():
        for source in sources:
            reads[place[source], place[name]] = True
    classes: Dict[object, List[int]] = {}
    for name in order:
        classes.setdefault(nodes[name].get("colorClass", ("own", name)), []).append(place[name])

    def column(key: str) -> np.ndarray:
        return np.array([float(nodes[name].get(key, 0.0)) for name in order])

    supported = np.array([bool(nodes[name]["supportedOnFpga"]) for name in order])
    return Instance(
        accelerator=np.where(supported, column("fpgaLatency"), np.inf),
        cpu=column("cpuLatency"),
        size=column("size"),
        cost=np.array([cost.get(name, 0.0) for name in order]),
        reads=reads,
        together=tuple(tuple(own) for own in classes.values() if len(own) > 1),
        max_size=float(data["maxSizePerFPGA"]),
        max_accelerators=int(data["maxFPGAs"]),
        max_cpus=int(data["maxCPUs"]),
    )


def down_sets(instance: Instance) -> np.ndarray:
    """(down-sets, n) which nodes each holds, from the empty one to all.

    Raises:
        ValueError: there are more than ``MOST_DOWN_SETS``.
    """
    n = len(instance.cost)
    sources = [sum(1 << int(i) for i in np.flatnonzero(instance.reads[:, j])) for j in range(n)]
    found, latest = {0}, [0]
    while latest:
        grown = {
            own | 1 << j for own in latest for j in range(n) if not own >> j & 1 and sources[j] & ~own == 0
        }
        latest = list(grown - found)
        found |= grown
        if len(found) > MOST_DOWN_SETS:
            raise ValueError(f"it has more than {MOST_DOWN_SETS:,} down-sets")
    ordered = sorted(found, key=lambda own: (bin(own).count("1"), own))
    return np.array([[own >> j & 1 for j in range(n)] for own in ordered], dtype=bool)


def loads(instance: Instance, sets: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """(down-sets, down-sets) the loads of an accelerator, and of a CPU, with what only the second of two holds.

    inf where the first is no part of the second, or a device can't take what is between them.
    """
    on_accelerator, on_cpu = np.full((2, len(sets), len(sets)), np.inf)
    readers, degree = instance.reads.astype(np.float32).T, instance.reads.sum(axis=1)
    seconds = np.where(np.isfinite(instance.accelerator), instance.accelerator, 0.0)
    refused = ~np.isfinite(instance.accelerator)
    for end, whole in enumerate(sets):
        begins = np.flatnonzero(~(sets & ~whole).any(axis=1))
        part = whole & ~sets[begins]
        inside = part.astype(np.float32) @ readers  # of each node's readers, those in the part
        enters = ((inside > 0) & ~part) @ instance.cost
        leaves = ((inside < degree) & part) @ instance.cost
        apart = np.zeros(len(begins), dtype=bool)
        for own in instance.together:
            count = part[:, list(own)].sum(axis=1)
            apart |= (count > 0) & (count < len(own))
        fits = (part @ instance.size <= instance.max_size) & ~(part & refused).any(axis=1)
        own_loads = part @ seconds + enters + leaves
        on_accelerator[begins, end] = np.where(fits & ~apart, own_loads, np.inf)
        on_cpu[begins, end] = np.where(apart, np.inf, part @ instance.cpu)
    return on_accelerator, on_cpu


def least_load(
    on_accelerator: np.ndarray, on_cpu: np.ndarray, accelerators: int, cpus: int
) -> Tuple[float, List[Tuple[str, int, int]]]:
    """The smallest largest load of that many devices at most, and who takes what.

    Returns:
        The load, and (device, first down-set, last down-set) in the order of the pipeline, without devices that take
        nothing; inf and nothing where no devices can.
    """
    nothing = np.full(len(on_cpu), np.inf)
    nothing[0] = 0.0
    best: Dict[Tuple[int, int], np.ndarray] = {}
    for a in range(accelerators + 1):
        for c in range(cpus + 1):
            options = [nothing] if a == c == 0 else []
            if a:
                options.append(np.maximum(best[a - 1, c][:, None], on_accelerator).min(axis=0))
            if c:
                options.append(np.maximum(best[a, c - 1][:, None], on_cpu).min(axis=0))
            best[a, c] = np.min(options, axis=0)
    load, at = float(best[accelerators, cpus][-1]), len(on_cpu) - 1
    if not np.isfinite(load):
        return load, []
    taken: List[Tuple[str, int, int]] = []
    a, c = accelerators, cpus
    while (a, c) != (0, 0):
        value = best[a, c][at]
        tried = [("accelerator", (a - 1, c), on_accelerator)] if a else []
        tried += [("cpu", (a, c - 1), on_cpu)] if c else []
        for device, before, table in tried:
            source = np.flatnonzero(np.maximum(best[before], table[:, at]) == value)
            if len(source):
                if source[-1] != at:
                    taken.append((device, int(source[-1]), at))
                at, (a, c) = int(source[-1]), before
                break
    return load, taken[::-1]


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--accelerators", type=int, help="in place of the file's")
    parser.add_argument("--cpus", type=int, help="in place of the file's")
    given = parser.parse_args(arguments)
    print("instance              nodes  down-sets  accelerators  CPUs  largest load  published")
    failed = 0
    for path in given.files:
        try:
            instance = read_instance(path.read_text(encoding="utf-8"))
            sets = down_sets(instance)
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"{path.stem:<20}  left out: {error}")
            failed += 1
            continue
        tables = loads(instance, sets)
        count = instance.max_accelerators if given.accelerators is None else given.accelerators
        most_cpus = instance.max_cpus if given.cpus is None else given.cpus
        for cpus in sorted({0, most_cpus}):
            load, taken = least_load(*tables, count, cpus)
            known = PUBLISHED.get(path.stem, (0, None, None))
            told = known[1 + cpus] if known[0] == count and cpus < 2 else None
            print(
                f"{path.stem:<20}  {len(instance.cost):5}  {len(sets):9}  {count:12}  {cpus:4}  {load:12.2f}  "
                f"{'' if told is None else f'{told:9.2f}'}".rstrip()
            )
            parts = [int((sets[end] & ~sets[begin]).sum()) for _, begin, end in taken]
            print("    nodes of each: " + ", ".join(f"{d} {n}" for (d, _, _), n in zip(taken, parts)))
    return 1 if failed == len(given.files) else 0


if __name__ == "__main__":
    sys.exit(main())
