"""Compares ``ipucnn plan-splits --inference`` with published inference throughput, row by row.

Usage: python benchmarks/inference_rows.py [--rows published_throughput.json]

Rows without a micro-batch are lower bounds (evaluation inside of a training, with its input pipeline): what the search
finds on as many IPUs is printed beside them.  Rows that tell a ratio to another processor say nothing of an IPU.
"""

import argparse
import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any, Dict, List, Tuple

from published_rows import registered_name

from ipucnn import cli

SHARED = Path(__file__).resolve().parents[2] / "shared" / "ipu"
_SYSTEMS = {"c600": "c600", "mk2": "pod", "bow": "bow-pod"}


def inference_rows(path: Path) -> List[Dict[str, Any]]:
    """The published rows of inference in images per second."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if row["task"] == "inference" and row["unit"].startswith("images/s")]


def command(row: Dict[str, Any]) -> List[str]:
    """The words of ``ipucnn`` that predict a row.

    PopRT and the public training application accumulate in 16 bits, and the latter sends images in 8 bits; an execution
    of PopRT is one micro-batch.
    """
    generation = row["ipu_generation"].split()[0]
    system = _SYSTEMS[generation] + (str(row["n_ipus"]) if row["n_ipus"] > 1 else "")
    words = ["plan-splits", registered_name(row), "--inference", "--system", system]
    if row["micro_batch"] is None:
        words += ["--ipus", str(row["n_ipus"]), "--eight-bit-transfer"]
    else:
        words += ["--stages", str(row["pipeline_stages"]), "--num-replicas", str(row["replicas"])]
        words += ["--micro-batch-size", str(row["micro_batch"]), "--steps-per-execution", "1"]
        words += ["--available-memory-proportion", "60"]
    return [*words, "--precision", row["precision"], "--half-partials"]


def predicted(words: List[str]) -> Dict[str, Any]:
    """The plan that the command prints.

    Raises:
        RuntimeError: it ended with an error.
    """
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = cli.run([*words, "--json"])
    if code:
        raise RuntimeError(f"ipucnn {' '.join(words)} ended with {code}")
    plan: Dict[str, Any] = json.loads(out.getvalue())
    return plan


def errors(ratios: List[float]) -> Tuple[float, float]:
    """(geometric mean, largest) of the factors by which predictions are off."""
    logs = [abs(math.log(ratio)) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)), math.exp(max(logs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=SHARED / "published_throughput.json")
    arguments = parser.parse_args()
    print(
        "| network | system | IPUs | micro-batch | precision | published | predicted | ratio | latency ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    ratios: List[float] = []
    words: List[str] = []
    for row in inference_rows(arguments.rows):
        words = command(row)
        plan = predicted(words)
        speed, own = plan["predicted_images_per_s"], plan["settings"]
        is_bound = row["micro_batch"] is None
        ratio = speed / row["value"]
        if not is_bound:
            ratios.append(ratio)
        micro_batch = f"{own['micro_batch_size']}" + (" (searched)" if is_bound else "")
        published = ("above " if is_bound else "") + f"{row['value']:,.0f}"
        cells = (
            plan["model"],
            plan["system"]["name"],
            row["n_ipus"],
            micro_batch,
            own["precision"],
            published,
        )
        cells += (f"{speed:,.0f}", f"{ratio:.3f}", f"{1e3 * plan['predicted_latency_s']:.2f}")
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    mean, worst = errors(ratios)
    print(
        f"{len(ratios)} rows: geometric mean error {mean:.3f}, worst {worst:.3f}, "
        f"{min(ratios):.3f} to {max(ratios):.3f}"
    )
    print(f"the last command: ipucnn {' '.join(words)}")


if __name__ == "__main__":
    main()
