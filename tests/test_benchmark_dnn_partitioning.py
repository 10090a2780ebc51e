"""The reader and solver of Tarnawski et al.'s instances, against trying every assignment of nodes to devices."""

import importlib
import itertools
import json
import random
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def solver(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("dnn_partitioning")
    sys.modules.pop("dnn_partitioning", None)


def instance(draw, num_nodes):
    """A random graph in the repository's format, ids in no order, with a node that runs on CPUs alone and a colour."""
    ids = draw.sample(range(100), num_nodes)
    nodes = [
        {
            "id": name,
            "supportedOnFpga": int(draw.random() < 0.9),
            "cpuLatency": round(draw.uniform(1, 9), 2),
            "fpgaLatency": round(draw.uniform(0, 3), 2),
            "isBackwardNode": 0,
            "size": draw.randint(0, 4),
            **({"colorClass": draw.randint(1, num_nodes - 1)} if draw.random() < 0.8 else {}),
        }
        for name in ids
    ]
    costs = {name: round(draw.uniform(0, 2), 2) for name in ids}
    edges = [
        {"sourceId": a, "destId": b, "cost": costs[a]}
        for a, b in itertools.combinations(ids, 2)
        if draw.random() < 0.4
    ]
    return {
        "maxSizePerFPGA": 9,
        "maxFPGAs": 2,
        "maxCPUs": 1,
        "nodes": draw.sample(nodes, num_nodes),
        "edges": edges,
    }


def load_of(data, part, device):
    """Written from the paper's text: seconds of a set of node ids on a device, inf where it can't be."""
    nodes = [node for node in data["nodes"] if node["id"] in part]
    for node in data["nodes"]:
        alike = [
            o["id"]
            for o in data["nodes"]
            if o.get("colorClass", o["id"] + 1000) == node.get("colorClass", -1)
        ]
        if part & set(alike) and not set(alike) <= part:
            return float("inf")
    if device == "cpu":
        return sum(node["cpuLatency"] for node in nodes)
    if any(not node["supportedOnFpga"] for node in nodes):
        return float("inf")
    if sum(node["size"] for node in nodes) > data["maxSizePerFPGA"]:
        return float("inf")
    moved = {}
    for edge in data["edges"]:
        if (edge["sourceId"] in part) != (edge["destId"] in part):
            moved[edge["sourceId"]] = edge["cost"]  # in or out, once for each tensor
    return sum(node["fpgaLatency"] for node in nodes) + sum(moved.values())


def by_trying(data, devices):
    """The least load over all assignments in which data flows from each device to itself and later ones."""
    ids, least = [node["id"] for node in data["nodes"]], float("inf")
    for order in set(itertools.permutations(devices)):
        for stages in itertools.product(range(len(order)), repeat=len(ids)):
            place = dict(zip(ids, stages))
            if any(place[e["sourceId"]] > place[e["destId"]] for e in data["edges"]):
                continue
            parts = [{name for name in ids if place[name] == s} for s in range(len(order))]
            least = min(least, max(load_of(data, part, device) for part, device in zip(parts, order)))
    return least


@pytest.mark.parametrize("seed", range(12))
def test_the_largest_load_is_that_of_trying_everything(solver, seed):
    data = instance(random.Random(seed), 6)
    own = solver.read_instance(json.dumps(data))
    sets = solver.down_sets(own)
    tables = solver.loads(own, sets)
    for cpus in (0, 1):
        least, taken = solver.least_load(*tables, 2, cpus)
        assert least == pytest.approx(by_trying(data, ["accelerator"] * 2 + ["cpu"] * cpus))
        if taken:
            kinds = [device for device, _, _ in taken]
            assert kinds.count("accelerator") <= 2 and kinds.count("cpu") <= cpus
            assert (taken[0][1], taken[-1][2]) == (0, len(sets) - 1)
            assert all(before[2] == after[1] for before, after in zip(taken, taken[1:]))
            worst = max((tables[0] if d == "accelerator" else tables[1])[a, b] for d, a, b in taken)
            assert worst == pytest.approx(least)


def test_the_command_prints_loads_and_says_what_it_leaves_out(solver, tmp_path, capsys):
    data = instance(random.Random(1), 5)
    (tmp_path / "small.json").write_text(json.dumps(data))
    data["nodes"][0]["isBackwardNode"] = 1
    (tmp_path / "training.json").write_text(json.dumps(data))
    (tmp_path / "broken.json").write_text("{}")
    files = [str(tmp_path / name) for name in ("small.json", "training.json", "broken.json", "absent.json")]
    assert solver.main(files) == 0
    out = capsys.readouterr().out
    assert out.count("left out: ") == 3 and "backward nodes" in out and "nodes of each" in out
    assert solver.main(files[1:]) == 1
