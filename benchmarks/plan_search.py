"""Measures processor time and memory of the whole command `ipucnn plan-splits` for every registered model.

Usage: python benchmarks/plan_search.py [PATTERN ...] [--stages 4 16] [--csv FILE] [--again] [-- OPTION ...]

Each model has its default image size and number of classes (shipped layer graphs), or the options after "--".  "s" is
the processor time of the whole command, user and system, "MB" its peak resident memory; Python's byte code is compiled
before.  "gap" is that of the plan.  The exit code is 5 if a plan is not proved optimal, or a command takes more than
10 s.
"""

import argparse
import json
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Dict, List, Tuple

import numpy as np
from measuring import Journal, Provenance, add_again, run_ipucnn, write_rows

from ipucnn.models.build import BuildOptions
from ipucnn.models.registry import get_model, list_models
from ipucnn.planning.graphs.extract import layer_graph

MOST_S = 10.0


def command(words: List[str], environment: Dict[str, str]) -> Tuple[int, float, float, str]:
    """Runs ``ipucnn``; returns exit code, processor seconds, peak memory in MiB, and its output."""
    ended = run_ipucnn(words, **environment)
    return ended.code, ended.processor_s, ended.memory_mib, ended.stdout


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("patterns", nargs="*", default=["*"], metavar="PATTERN")
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--csv", type=Path, help="also write the rows there")
    add_again(parser)
    mine = sys.argv[1:]
    options: List[str] = []
    if "--" in mine:
        place = mine.index("--")
        mine, options = mine[:place], mine[place + 1 :]
    arguments = parser.parse_args(mine)
    head = ["model", "cut points"]
    for count in arguments.stages:
        head += [f"{count} stages: s", "MB", "tick ms", "gap"]
    print("  ".join(f"{name:<17}" if i == 0 else name for i, name in enumerate(head)))
    journal, rows = Journal("plan_search", arguments.again), []
    slowest, largest, bad, plans = 0.0, 0.0, 0, 0
    with tempfile.TemporaryDirectory() as cache:
        environment = {"PYTHONPYCACHEPREFIX": cache, "PYTHONDONTWRITEBYTECODE": ""}
        run_ipucnn(["plan-splits", "lenet", "--stages", "2", "--json", *options], **environment)
        for record in list_models():
            name = record.name
            if not any(fnmatch(name, pattern) for pattern in arguments.patterns):
                continue
            cuts = len(
                layer_graph(get_model(name), BuildOptions(record.input_shape, record.num_classes)).cuts
            )
            cells = [f"{name:<17}", f"{cuts:>10}"]
            for count in arguments.stages:
                words = ["plan-splits", name, "--stages", str(count), "--json", *options]
                how = Provenance("python benchmarks/plan_search.py", ("numpy",))
                code, seconds, megabytes, text, provenance = journal.take(
                    words, lambda: (*command(words, environment), how.columns())
                )
                slowest, largest = max(slowest, seconds), max(largest, megabytes)
                plan = json.loads(text) if code == 0 else {}
                proved = bool(plan.get("optimal"))
                plans += code == 0
                bad += (code == 0 and not proved) or code not in (0, 2, 4) or seconds > MOST_S
                answer = {0: f"{plan.get('gap', 0):.2%}", 2: "too few layers", 4: "does not fit"}.get(
                    code, f"exit {code}"
                )
                tick = f"{1e3 * plan['predicted_tick_s']:.3f}" if plan else ""
                cells += [f"{seconds:>11.2f}", f"{megabytes:>4.0f}", f"{tick:>7}", answer]
                rows.append(
                    {
                        "model": name,
                        "cut_points": cuts,
                        "stages": count,
                        "processor_s": round(seconds, 2),
                        "memory_mb": round(megabytes),
                        "tick_ms": tick,
                        "gap_or_reason": answer,
                        **provenance,
                    }
                )
            print("  ".join(cells), flush=True)
    print(
        f"\n{plans} plans; slowest command {slowest:.2f} s, largest {largest:.0f} MB; {bad} not as they should be; "
        f"Python {sys.version.split()[0]}, NumPy {np.__version__}"
    )
    if arguments.csv is not None:
        write_rows(arguments.csv, rows)
    return 5 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
