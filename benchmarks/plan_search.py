"""Times the exact search for every registered model: graph, tables, plan; and checks that it ends with a proof.

Usage: python benchmarks/plan_search.py [PATTERN ...] [--stages 4 16] [--schedules Grouped Interleaved]
                                        [--micro-batch-size 1] [--markdown]

Each model in its own image size and number of classes, training, 16.16, recomputation, on a Mk2.  "graph" is the
time to get the layer graph (built with TensorFlow where it is not cached), "tables" that of the cost and memory model,
"search" that of the planner, with the memory of all stages, at the first of ``judge.LIMITS`` at which some splits fit
("memory").  "programs" are the dynamic programs it ran.  Ends with exit code 5 if a plan is not proved optimal, or a
search takes more CPU time than 1 s up to 300 cut points, or 10 s beyond.
"""

import argparse
import sys
import time
from fnmatch import fnmatch
from typing import Any, List

import numpy as np

from ipucnn.hardware import get_system
from ipucnn.models.build import BuildOptions
from ipucnn.models.registry import get_model, list_models
from ipucnn.planning.graphs.extract import layer_graph
from ipucnn.planning.graphs.layer_graph import LayerGraph
from ipucnn.planning.search.exact import fastest_split, some_split_fits
from ipucnn.planning.search.planner import LIMITS
from ipucnn.planning.search.tables import stage_tables
from ipucnn.planning.settings import PlanSettings

SYSTEM = get_system("pod16")
SMALL_CUTS, SMALL_S, LARGE_S = 300, 1.0, 10.0


def timed(function: Any, *arguments: Any) -> Any:
    """(seconds, CPU seconds of this process, result)."""
    begin = time.perf_counter(), time.process_time()
    result = function(*arguments)
    return time.perf_counter() - begin[0], time.process_time() - begin[1], result


def model_graph(name: str) -> LayerGraph:
    record = get_model(name)
    return layer_graph(record, BuildOptions(record.input_shape, record.num_classes))


def planned(graph: LayerGraph, num_stages: int, schedule: str, micro_batch_size: int) -> List[str]:
    """The cells of a row, the last one what is wrong with it."""
    settings = PlanSettings(
        micro_batch_size=micro_batch_size,
        gradient_accumulation_count=2 * num_stages,
        num_stages=num_stages,
        schedule=schedule,
        recomputation=True,
        device_mapping=tuple(range(num_stages)),
    )
    tables_s, _, _ = timed(stage_tables, graph, settings, SYSTEM)
    limit = LIMITS[0]
    for limit in LIMITS:
        if some_split_fits(stage_tables(graph, settings, SYSTEM, max_fill=limit), num_stages):
            break
    # New tables: their memory is worked out when the search asks for it.
    tables = stage_tables(graph, settings, SYSTEM, max_fill=limit)
    search_s, cpu_s, solution = timed(fastest_split, tables, num_stages, schedule)
    allowed_s = SMALL_S if len(graph.cuts) <= SMALL_CUTS else LARGE_S
    wrong = []
    if solution.feasible and not solution.optimal:
        wrong.append(f"gap {solution.gap:.2e}")
    if cpu_s > allowed_s:
        wrong.append(f"over {allowed_s:.0f} s")
    result = (
        "optimal: true" if solution.optimal else "does not fit" if not solution.feasible else "not proved"
    )
    tick = f"{1e3 * solution.objective_s:.3f}" if solution.feasible else ""
    return [
        f"{tables_s:.2f}",
        f"{search_s:.2f}",
        f"{cpu_s:.2f}",
        str(solution.num_evaluations),
        tick,
        f"{limit:.0%}" if solution.feasible else "",
        result,
        ", ".join(wrong),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("patterns", nargs="*", default=["*"], metavar="PATTERN")
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--schedules", nargs="+", default=["Grouped", "Interleaved"])
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    arguments = parser.parse_args()
    head = [
        "model",
        "layers",
        "cuts",
        "graph s",
        "stages",
        "schedule",
        "tables s",
        "search s",
        "programs",
        "tick ms",
    ]
    head += ["memory", "result", ""]
    widths = [19, 6, 5, 7, 6, 11, 8, 8, 6, 8, 9, 6, 13, 0]
    if arguments.markdown:
        print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    else:
        print(" ".join(f"{name:<{width}}" for name, width in zip(head, widths)))
    slowest, bad = {True: 0.0, False: 0.0}, 0
    for record in list_models():
        name = record.name
        if not any(fnmatch(name, pattern) for pattern in arguments.patterns):
            continue
        graph_s, _, graph = timed(model_graph, name)
        for num_stages in arguments.stages:
            for schedule in arguments.schedules:
                cells = [
                    name,
                    str(len(graph.layers)),
                    str(len(graph.cuts)),
                    f"{graph_s:.1f}",
                    str(num_stages),
                    schedule,
                ]
                if num_stages > len(graph.cuts) + 1:
                    cells += ["", "", "", "", "", "", "too few layers", ""]
                else:
                    found = planned(graph, num_stages, schedule, arguments.micro_batch_size)
                    cells += found
                    small = len(graph.cuts) <= SMALL_CUTS
                    slowest[small] = max(slowest[small], float(found[2]))
                    bad += bool(found[-1])
                if arguments.markdown:
                    print("| " + " | ".join(cells) + " |", flush=True)
                else:
                    print(" ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths)), flush=True)
    print(
        f"\nslowest search, CPU time: {slowest[True]:.2f} s up to {SMALL_CUTS} cuts, {slowest[False]:.2f} s beyond; "
        f"{bad} row(s) not as they should be; Python {sys.version.split()[0]}, NumPy {np.__version__}"
    )
    return 5 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
