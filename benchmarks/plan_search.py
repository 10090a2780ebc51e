"""Measures processor time and memory of the whole command `ipucnn plan-splits` for every registered model.

Usage: python benchmarks/plan_search.py [PATTERN ...] [--stages 4 16] [--csv FILE] [-- OPTION ...]

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
from typing import List

import numpy as np
from processes import run_ipucnn

import results
from ipucnn.models.build import BuildOptions
from ipucnn.models.registry import get_model, list_models
from ipucnn.planning.graphs.extract import layer_graph

MOST_S = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("patterns", nargs="*", default=["*"], metavar="PATTERN")
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--csv", type=Path, help="also write the rows there")
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
    how = results.Measurement("python benchmarks/plan_search.py", ("numpy",))
    rows = []
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
                ended = run_ipucnn(words, **environment)
                code, seconds, megabytes, text = (
                    ended.code,
                    ended.processor_s,
                    ended.memory_mib,
                    ended.stdout,
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
                    }
                )
            print("  ".join(cells), flush=True)
    print(
        f"\n{plans} plans; slowest command {slowest:.2f} s, largest {largest:.0f} MB; {bad} not as they should be; "
        f"Python {sys.version.split()[0]}, NumPy {np.__version__}"
    )
    if arguments.csv is not None:
        results.write_rows(arguments.csv, rows, how)
    return 5 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
