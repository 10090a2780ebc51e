"""Divides the time of a weight update of the host session among kinds of operations, each beside its lower bound.

    python benchmarks/update_profile.py [--only NETWORK] [--updates 6] [--csv FILE]

TensorFlow's profiler times every operation of the weight updates; an operation's time is its median.  Its bound is the
larger of two times: its multiplications and additions at the rate of the fastest large matrix product of one core, and
its inputs and outputs at the memory bandwidth of one core, both while the other cores do the same.  Data that stay in a
cache can be faster than that.  oneDNN's conversions of layouts are inside its operations.

Times are sums over the lanes that compute at the same time.  The rest of a weight update has two parts: "executor" is
processor time outside operations, and "waiting" is time without processor time.  Other programs lengthen operations and
waiting, so the machine should be idle.
"""

import argparse
import collections
import math
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple

from host_session import CASES, Case, SessionSide
from measuring import Provenance, start, write_rows

FLOAT_BYTES = 4
# Numbers of each array of the bandwidth's measurement: 64 MiB, more than caches have.
STREAM_NUMBERS = 2**24
CONVOLUTIONS = {
    "Conv2D": "convolution",
    "Conv2DBackpropInput": "convolution, input gradient",
    "Conv2DBackpropFilter": "convolution, filter gradient",
    "IpucnnFilterGradient": "convolution, filter gradient",
}
NORM_OR_ACTIVATION = re.compile(r"bn|norm|relu|activation|swish", re.IGNORECASE)
# Names of inlined functions begin with the names of their callers: loops, conditions, and the function of a lane.
CALLERS = re.compile(r"(?:.*/)?(?:(?:body|cond|then|else)/_\d+|StatefulPartitionedCall(?:_\d+)?)/")
# The share of the operations' time that may be of operations that the optimizer of graphs made.
MOST_UNKNOWN = 0.1
# Operations with fewer numbers are not worth a kind.
SMALL_NUMBERS = 2**12
# Operations that hand their inputs on.
FREE = (
    "Reshape",
    "Identity",
    "ReadVariableOp",
    "Const",
    "Shape",
    "Enter",
    "Exit",
    "NextIteration",
    "Merge",
    "Switch",
)


def shown_cases() -> List[Case]:
    """Returns the row of each network with the smallest micro-batch that has batch norm."""
    first: Dict[str, Case] = {}
    for case in CASES:
        if case.norm != "group":
            first.setdefault(case.network, case)
    return list(first.values())


class Cost(NamedTuple):
    """What an operation does at least.

    Attributes:
        kind: the row of the table.
        flop: multiplications and additions of convolutions and products.
        moved: bytes of its inputs and outputs.
    """

    kind: str
    flop: float = 0.0
    moved: float = 0.0


def _size(tensor: Any) -> int:
    """Returns the number of values of a tensor; 0 if unknown."""
    known = tensor.shape.num_elements() if tensor.shape.rank is not None else None
    return 0 if known is None or tensor.dtype.name in ("resource", "variant") else int(known)


def unfused(operation: Any, kind: str) -> Any:
    """Returns the operation of the graph that a traced operation of type ``kind`` begins with.

    oneDNN's types have other names, and a fused operation has the name of the last one in it.
    """
    for prefix in ("_Mkl", "_Fused", "Native", "Fused"):
        kind = kind[len(prefix) :] if kind.startswith(prefix) else kind
    first = operation
    while first.type != kind and kind in (*CONVOLUTIONS, "MatMul", "DepthwiseConv2dNative") and first.inputs:
        first = first.inputs[0].op
    return first if first.type == kind else operation


def cost(operation: Any, weights: "frozenset[Tuple[int, ...]]") -> Cost:
    """Returns the cost of an operation of the graph; ``weights`` are the shapes of the trained weights."""
    inputs, outputs = [[_size(t) for t in side] for side in (operation.inputs, operation.outputs)]
    result, kind = max(outputs, default=0), operation.type
    moved = FLOAT_BYTES * float(sum(inputs) + sum(outputs))
    if kind in CONVOLUTIONS:
        # The number of outputs of the forward pass, and the kernel's shape.
        pixels = outputs[0] if kind == "Conv2D" else inputs[2]
        is_gradient = "Filter" in kind
        kernel = (operation.outputs[0] if is_gradient else operation.inputs[1]).shape
        flop = 2.0 * pixels * kernel.num_elements() / kernel[-1]
        return Cost(CONVOLUTIONS[kind], flop, moved)
    if kind.startswith(("DepthwiseConv", "IpucnnDepthwise")):
        kernel = min((t.shape for t in (*operation.inputs, *operation.outputs) if len(t.shape) == 4),
                     key=lambda shape: shape.num_elements() or math.inf)  # fmt: skip
        pixels = outputs[0] if kind.endswith("Native") else inputs[2]
        return Cost("depthwise", 2.0 * pixels * kernel[0] * kernel[1], moved)
    if "_se_" in operation.name:
        flop = _product(inputs, result) if kind == "MatMul" else 0.0
        return Cost("squeeze-excite", flop, moved)
    if kind == "MatMul":
        return Cost("matrix product", _product(inputs, result), moved)
    if kind.startswith("ResourceApply"):
        # Weight and momentum are read and written.
        return Cost("optimizer", 0.0, FLOAT_BYTES * 5.0 * max(inputs, default=0))
    if kind == "Transpose":
        return Cost("layout conversion", 0.0, moved)
    if kind in FREE:
        return Cost("other")
    shape = tuple(operation.outputs[0].shape) if result else ()
    if kind in ("Add", "AddV2", "AddN", "Mul") and shape in weights and "gradient_tape" not in operation.name:
        return Cost("accumulation", 0.0, moved)
    if max([result, *inputs]) < SMALL_NUMBERS:
        return Cost("other", 0.0, moved)
    # The gradients of norms by TensorFlow's operations have no layer's name.
    is_nameless = re.fullmatch(r"(while/)*\w+", operation.name) and kind != "AddN"
    is_norm = (
        kind.startswith(("Ipucnn", "FusedBatchNorm"))
        or is_nameless
        or NORM_OR_ACTIVATION.search(operation.name)
    )
    return Cost("norm and activation" if is_norm else "elementwise", 0.0, moved)


def _product(inputs: List[int], result: int) -> float:
    """Returns the multiplications and additions of a product of two matrices."""
    return 2.0 * result * math.sqrt(inputs[0] * inputs[1] / result) if result else 0.0


def operations(graph: Any) -> Iterator[Any]:
    """Yields the operations of a graph and of the functions that it calls."""
    yield from graph.get_operations()
    for name in graph._functions:
        inner = graph._get_function(name)
        inner_graph = getattr(inner, "graph", None)
        if inner_graph is not None:
            yield from operations(inner_graph)


def timed(side: SessionSide, updates: int) -> Dict[str, Tuple[str, float, float]]:
    """Returns (type, median seconds, occurrences in a weight update) of each operation by name."""
    import tensorflow as tf
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    with tempfile.TemporaryDirectory() as folder:
        # Level 3 has the small operations too.
        tf.profiler.experimental.start(folder, tf.profiler.experimental.ProfilerOptions(host_tracer_level=3))
        side.run(updates)
        tf.profiler.experimental.stop()
        (file,) = Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace()
        space.ParseFromString(file.read_bytes())
    durations: Dict[Tuple[str, str], List[float]] = collections.defaultdict(list)
    for plane in space.planes:
        for line in plane.lines:
            if not line.name.startswith("tf_Compute"):
                continue
            for event in line.events:
                found = re.fullmatch(r"([^:]+):([^:]+)", plane.event_metadata[event.metadata_id].name)
                if found:
                    durations[found.group(1), found.group(2)].append(event.duration_ps / 1e12)
    return {
        name: (kind, statistics.median(values), len(values) / updates)
        for (name, kind), values in durations.items()
    }


def stream_bytes_per_s(cores: int) -> float:
    """Returns the memory bandwidth of one core while all of them add arrays."""
    import numpy as np

    from ipucnn.machine import parallel_map

    arrays: List[List[Any]] = [[np.ones(STREAM_NUMBERS, np.float32) for _ in range(3)] for _ in range(cores)]
    seconds = []
    for _ in range(7):
        started = time.perf_counter()
        for _ in parallel_map(lambda a, b, c: np.add(a, b, out=c), arrays, cores):
            pass
        seconds.append(time.perf_counter() - started)
    return 3.0 * FLOAT_BYTES * STREAM_NUMBERS / min(seconds)


def profile(case: Case, updates: int) -> List[Dict[str, Any]]:
    """Returns the rows of a network: one for each kind, the longest first."""
    from ipucnn.benchmarking.peak import MatmulPeak
    from ipucnn.machine import num_cores

    side = SessionSide(case)
    side.run(2)
    peak = MatmulPeak()
    started, processor = time.perf_counter(), time.process_time()
    side.run(updates)
    wall_s, processor_s = (
        (time.perf_counter() - started) / updates,
        (time.process_time() - processor) / updates,
    )
    traced = timed(side, updates)
    cores = num_cores()
    flop_per_s, bytes_per_s = peak.measure().flop_per_s / cores, stream_bytes_per_s(cores)
    weights = frozenset(tuple(v.shape) for v in side.model.trainable_weights)
    trainer: Any = side.trainer
    by_name = {op.name: op for op in operations(trainer._loop.trace(side.batches))}
    rows: Dict[str, List[float]] = collections.defaultdict(lambda: [0.0] * 4)
    unknown_s = 0.0
    for name, (kind, seconds, count) in traced.items():
        operation = by_name.get(CALLERS.sub("", name))
        if operation is None:
            unknown_s += seconds * count
            spent = Cost("layout conversion" if "Transpose" in kind else "other")
        else:
            spent = cost(unfused(operation, kind), weights)
        bound = max(spent.flop / flop_per_s, spent.moved / bytes_per_s)
        for i, value in enumerate((seconds, spent.flop, spent.moved, bound)):
            rows[spent.kind][i] += value * count
    if not traced or unknown_s > MOST_UNKNOWN * sum(row[0] for row in rows.values()):
        raise SystemExit(
            "the operations of the trace are not those of the graph: correct CALLERS in this script"
        )
    rest = (
        ("executor", processor_s - sum(row[0] for row in rows.values())),
        ("waiting", wall_s * side.side_by_side - processor_s),
    )
    rows.update((kind, [max(0.0, seconds), 0.0, 0.0, 0.0]) for kind, seconds in rest)
    total = sum(row[0] for row in rows.values())
    return [
        {
            **case._asdict(),
            "kind": kind,
            "ms": round(1e3 * seconds, 2),
            "share": round(seconds / total, 4),
            "gflop": round(flop / 1e9, 3),
            "mb": round(moved / 1e6, 1),
            "bound_ms": round(1e3 * bound, 2),
            "wall_ms": round(1e3 * wall_s, 2),
            "core_gflop_per_s": round(flop_per_s / 1e9, 1),
            "core_gb_per_s": round(bytes_per_s / 1e9, 2),
        }
        for kind, (seconds, flop, moved, bound) in sorted(rows.items(), key=lambda item: -item[1][0])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=[case.network for case in shown_cases()])
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--csv", type=Path, help="also write the rows there; its rows of other networks stay")
    arguments = parser.parse_args()
    cases = [case for case in shown_cases() if arguments.only in (None, case.network)]
    if len(cases) > 1:  # Each network has a process of its own.
        for case in cases:
            more = [] if arguments.csv is None else ["--csv", str(arguments.csv)]
            words = ["--only", case.network, "--updates", str(arguments.updates), *more]
            command = [sys.executable, __file__, *words]
            if start(command, variables={"TF_ENABLE_ONEDNN_OPTS": "1"}).wait():
                raise SystemExit(f"{case.network} failed: its messages are above")
        return
    (case,) = cases
    how = Provenance(f"python benchmarks/update_profile.py --updates {arguments.updates}")
    rows = profile(case, arguments.updates)
    first = rows[0]
    print(f"{case.network}, {case.size}x{case.size}, micro-batch {case.micro_batch}, global batch "
          f"{case.global_batch}: {first['wall_ms']} ms; a core has {first['core_gflop_per_s']} GFLOP/s and "
          f"{first['core_gb_per_s']} GB/s")  # fmt: skip
    print(f"{'kind':30} {'ms':>8} {'share':>6} {'bound, ms':>9} {'GFLOP':>8} {'MB':>8}")
    for row in rows:
        print(f"{row['kind']:30} {row['ms']:8.1f} {row['share']:6.0%} {row['bound_ms']:9.1f} {row['gflop']:8.2f} "
              f"{row['mb']:8.1f}", flush=True)  # fmt: skip
    if arguments.csv:
        write_rows(arguments.csv, [{**row, **how.columns()} for row in rows], (*Case._fields, "kind"))


if __name__ == "__main__":
    main()
