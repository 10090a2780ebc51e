"""How long `ipucnn --help` and `ipucnn train --help` take, beside a bare Typer app with as many options.

    python benchmarks/cli_start.py [--runs 15] [--check]

The programs run in turn, so that a busy machine slows all alike; medians of wall time are reported.
``--check`` exits with 5 unless `ipucnn --help` takes 0.35 s and `train --help` 1.3x the bare app at most.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, List

from ipucnn.config.options import specs_for
from ipucnn.errors import EXIT_THRESHOLD

ROOT_LIMIT_S = 0.35
TRAIN_RATIO_LIMIT = 1.3


def bare_app(num_options: int) -> str:
    """The source of a Typer app with one command and ``num_options`` options."""
    options = [
        f'    option_{i}: Optional[str] = typer.Option(None, help="What option {i} does."),'
        for i in range(num_options)
    ]
    lines = [
        "from typing import Optional",
        "import typer",
        "app = typer.Typer(add_completion=False)",
        "@app.command()",
        "def train(",
        *options,
        "): pass",
        "app()",
    ]
    return "\n".join(lines)


def measure(commands: Dict[str, List[str]], runs: int) -> Dict[str, List[float]]:
    """Wall times in seconds of each command, one of each in every round; the first round is not counted."""
    times: Dict[str, List[float]] = {name: [] for name in commands}
    environment = {**os.environ, "COLUMNS": "80"}
    for number in range(runs + 1):
        for name, command in commands.items():
            start = time.perf_counter()
            subprocess.run(command, stdout=subprocess.DEVNULL, env=environment, check=True)
            if number:
                times[name].append(time.perf_counter() - start)
    return times


def main() -> int:
    """Measures and prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=15, help="counted runs of each program")
    parser.add_argument("--check", action="store_true", help="exit with 5 above the limits")
    arguments = parser.parse_args()
    # MODEL, --config, --config-path, --print-config, --json, --verbose come on top of the run options.
    num_options = len(list(specs_for("train"))) + 6
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder) / "bare.py"
        bare.write_text(bare_app(num_options))
        times = measure(
            {
                "ipucnn --help": [sys.executable, "-m", "ipucnn", "--help"],
                "ipucnn train --help": [sys.executable, "-m", "ipucnn", "train", "--help"],
                f"bare Typer app, {num_options} options": [sys.executable, str(bare), "--help"],
            },
            arguments.runs,
        )
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"Python {sys.version.split()[0]}, {arguments.runs} runs each, interleaved, wall time in s")
    print(f"{'program':<32} {'median':>7} {'min':>7} {'max':>7}")
    for name, values in times.items():
        print(f"{name:<32} {medians[name]:7.3f} {min(values):7.3f} {max(values):7.3f}")
    root_s, train_s, bare_s = medians.values()
    print(f"train --help / bare app: {train_s / bare_s:.2f} (limit {TRAIN_RATIO_LIMIT})")
    print(f"ipucnn --help: {root_s:.3f} s (limit {ROOT_LIMIT_S})")
    missed = root_s > ROOT_LIMIT_S or train_s / bare_s > TRAIN_RATIO_LIMIT
    return EXIT_THRESHOLD if arguments.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
