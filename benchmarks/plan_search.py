"""Measures processor time and memory of the whole command `ipucnn plan-splits` for every registered model.

Usage: python benchmarks/plan_search.py [PATTERN ...] [--stages 4 16] [--csv FILE] [-- OPTION ...]

Each model has its default image size and number of classes (shipped layer graphs), or the options after "--".  "s" is
the processor time of the whole command, user and system, "MB" its peak resident memory; Python's byte code is compiled
before.  "gap" is that of the plan.  The exit code is 5 if a plan is not proved optimal, or a command takes more than
10 s.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Dict, List, Tuple

import numpy as np

import results
from ipucnn.models.build import BuildOptions
from ipucnn.models.registry import get_model, list_models
from ipucnn.planning.graphs.extract import layer_graph

MOST_S = 10.0
ROOT = Path(__file__).resolve().parent.parent


def run(name: str, num_stages: int, options: List[str], cache: str) -> Tuple[int, float, float, str]:
    """Returns (exit code, processor seconds, MB, standard output) of the command."""
    variables: Dict[str, str] = {
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "-1",
        "PYTHONPYCACHEPREFIX": cache,
    }
    environment = {**os.environ, **variables}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [
        sys.executable,
        "-m",
        "ipucnn",
        "plan-splits",
        name,
        "--stages",
        str(num_stages),
        "--json",
        *options,
    ]
    with tempfile.TemporaryFile() as out, subprocess.Popen(
        command, env=environment, stdout=out, stderr=subprocess.DEVNULL
    ) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
        out.seek(0)
        text = out.read().decode()
    return process.returncode, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("patterns", nargs="*", default=["*"], metavar="PATTERN")
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--csv", type=Path, help="also write the rows there")
    mine, options = sys.argv[1:], []  # type: List[str], List[str]
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
        run("lenet", 2, options, cache)
        for record in list_models():
            name = record.name
            if not any(fnmatch(name, pattern) for pattern in arguments.patterns):
                continue
            cuts = len(
                layer_graph(get_model(name), BuildOptions(record.input_shape, record.num_classes)).cuts
            )
            cells = [f"{name:<17}", f"{cuts:>10}"]
            for count in arguments.stages:
                code, seconds, megabytes, text = run(name, count, options, cache)
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
