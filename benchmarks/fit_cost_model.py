"""Fits the constants of the cost model on published throughput and prints its errors; judges published fits.

Usage: python benchmarks/fit_cost_model.py [--csv results/throughput.csv]
       python benchmarks/fit_cost_model.py --memory

The constants are fitted to the rows of ``results/published.csv``.  The fit is a maximum a posteriori estimate: least
squares of log(predicted / published), where each network and task has the weight of one row, and a log-normal
prior for each constant.  The sources named below give its centre and width.  Tile splits are searched again between
rounds of the fit until they no longer change.  "left out" is the prediction of a network's rows by constants fitted
without any of its rows.  The 80 % band beside each prediction is the quantile of those errors.  Its coverage is counted
with the band of the other networks' rows alone.
"""

import argparse
import dataclasses
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
from measuring import RESULTS, Provenance, read_rows, write_rows
from published_rows import Program, program_of
from scipy.optimize import least_squares

from ipucnn.planning.cost.memory import StageMemory, program_memory, published_at, published_bin
from ipucnn.planning.cost.products import BAND_FACTOR, BAND_SHARE, DEFAULT_CONSTANTS, CostConstants

PUBLISHED = RESULTS / "published.csv"
PUBLISHED_FITS = RESULTS / "published_fits.csv"

# Centre of each constant before any row is used, and the factor by which it may be off (one standard deviation).
PRIOR = {
    # poplibs: six workers with about 30 cycles each, a supervisor with 25 to 109.
    "block_cycles": (200.0, 1.5),
    # The wire alone is 0.25; some rearranging adds to it.
    "received_byte_cycles": (0.3, 1.5),
    # 0.2 to 0.25 cycles per element, of two bytes, read and written.
    "moved_byte_cycles": (0.12, 1.5),
    # No source: a gather of single halves, a few cycles each.
    "transposed_byte_cycles": (0.25, 5.0),
    # Others fitted 247 cycles to ResNet-50 inference.
    "step_cycles": (250.0, 1.5),
    # 60 to 100 us were derived from MNIST rows.
    "micro_batch_s": (60e-6, 1.2),
}
# The expected error of the model on a row; it weighs the prior against the rows.
ROW_SIGMA = 0.15
ROUNDS = 8


def calibration_programs() -> List[Any]:
    """Returns (program, published images per second) of each published row."""
    return [(program_of(row), float(row["images_per_s"])) for row in read_rows(PUBLISHED)]


def fit(programs: Sequence[Program], published: Sequence[float]) -> CostConstants:
    """Fits the constants to these rows."""
    names = list(PRIOR)
    centre = np.log([PRIOR[name][0] for name in names])
    stiffness = ROW_SIGMA / np.log([PRIOR[name][1] for name in names])
    groups = Counter((p.graph.model, p.settings.training) for p in programs)
    weights = np.array([groups[p.graph.model, p.settings.training] ** -0.5 for p in programs])
    goal = np.log(published)

    def constants(logs: np.ndarray) -> CostConstants:
        return CostConstants(**dict(zip(names, np.exp(logs).tolist())))

    logs = centre
    for _ in range(ROUNDS):
        plans = [program.times(constants(logs)) for program in programs]

        def residuals(logs: np.ndarray) -> np.ndarray:
            values = [p.images_per_s(constants(logs), times) for p, times in zip(programs, plans)]
            return np.concatenate([weights * (np.log(values) - goal), stiffness * (logs - centre)])

        solution = least_squares(residuals, logs, diff_step=1e-3).x
        settled = float(np.abs(solution - logs).max()) < 1e-3
        logs = solution
        if settled:
            break
    return constants(logs)


def band_factor(errors: Sequence[float]) -> float:
    """Returns the factor within which the band's share of rows lies; ``errors`` are logarithms of ratios."""
    return float(np.exp(np.quantile(np.abs(errors), BAND_SHARE)))


def band_coverage(models: Sequence[str], errors: Sequence[float]) -> Dict[str, List[bool]]:
    """Says for each network's rows whether they lie within the band of all other networks' rows.

    Args:
        models: network of each row.
        errors: log(predicted / published) of each row by constants fitted without its network.
    """
    covered: Dict[str, List[bool]] = {}
    for model in dict.fromkeys(models):
        band = np.log(band_factor([e for e, other in zip(errors, models) if other != model]))
        covered[model] = [bool(abs(e) <= band) for e, other in zip(errors, models) if other == model]
    return covered


def describe(program: Program) -> str:
    settings = program.settings
    schedule = f"{settings.num_stages} {settings.schedule}" if settings.num_stages > 1 else "1"
    return (
        f"{program.graph.model:19} {'train' if settings.training else 'infer'}  {program.system.name:10} "
        f"{settings.num_ipus:4} {schedule:13} {settings.micro_batch_size:3} x{settings.gradient_accumulation_count:<4}"
        f"{settings.precision:6}"
    )


def report_throughput(output: Optional[Path]) -> int:
    started = time.perf_counter()
    pairs = calibration_programs()
    programs, published = [p for p, _ in pairs], [v for _, v in pairs]
    fitted = fit(programs, published)
    models = [p.graph.model for p in programs]
    left_out: Dict[str, CostConstants] = {}
    for model in dict.fromkeys(models):
        kept = [i for i, other in enumerate(models) if other != model]
        left_out[model] = fit([programs[i] for i in kept], [published[i] for i in kept])
    print("constants: fitted on all rows, in the package, and with a network left out")
    for field in dataclasses.fields(CostConstants):
        others = "  ".join(f"{getattr(c, field.name):9.4g}" for c in left_out.values())
        own = f"{getattr(fitted, field.name):9.4g}  {getattr(DEFAULT_CONSTANTS, field.name):9.4g}"
        print(f"  {field.name:24} {own}  | {others}")
    print(f"  (left out: {', '.join(left_out)})")
    print("\nimages/s, published and predicted; ratios predicted / published")
    print(
        f"{'network':19} task   system     IPUs stages        mb  GA   prec.   published predicted  ratio  left out"
    )
    ratios, other_ratios = [], []
    for program, value in pairs:
        own = program.images_per_s(fitted) / value
        other = program.images_per_s(left_out[program.graph.model]) / value
        ratios.append(own)
        other_ratios.append(other)
        print(f"{describe(program)} {value:10.0f} {own * value:9.0f}  {own:5.3f}     {other:5.3f}")
    for title, values in (("in sample", ratios), ("network left out", other_ratios)):
        errors = np.abs(np.log(values))
        print(
            f"{title}: geometric mean error {np.exp(errors.mean()):.3f}, worst {np.exp(errors.max()):.3f}, "
            f"{min(values):.3f} to {max(values):.3f}, {len(values)} rows"
        )
    errors = [float(np.log(ratio)) for ratio in other_ratios]
    covered = band_coverage(models, errors)
    hits = [hit for own in covered.values() for hit in own]
    shares = [float(np.mean(own)) for own in covered.values()]
    print(
        f"{BAND_SHARE:.0%} band: predicted / {band_factor(errors):.3f} to predicted x {band_factor(errors):.3f} "
        f"({len(errors)} rows, network left out; in the package {BAND_FACTOR})\n"
        f"its coverage with the band of the other networks' rows: {sum(hits)} of {len(hits)} rows "
        f"({np.mean(hits):.0%}), mean of the networks {np.mean(shares):.0%} "
        f"({', '.join(f'{model} {sum(own)}/{len(own)}' for model, own in covered.items())})"
    )
    print(f"{time.perf_counter() - started:.0f} s, NumPy {np.__version__}")
    if output is not None:
        rows = [
            {
                **row,
                "predicted_images_per_s": round(program.images_per_s(DEFAULT_CONSTANTS)),
                "predicted_without_this_network": round(ratio * value),
                "ratio_without_this_network": round(ratio, 3),
            }
            for row, (program, value), ratio in zip(read_rows(PUBLISHED), pairs, other_ratios)
        ]
        how = Provenance("python benchmarks/fit_cost_model.py", ("numpy",)).columns()
        write_rows(output, [{**row, **how} for row in rows])
    return 0


def judged_fits() -> Iterator[Tuple[Dict[str, str], Program, StageMemory]]:
    """Yields each row of published fits with its program and the fullest IPU."""
    for row in read_rows(PUBLISHED_FITS):
        program = program_of(row)
        ipus = program_memory(program.graph, program.splits, program.settings, program.system.ipu)
        yield row, program, max(ipus, key=lambda memory: memory.fill)


def report_memory() -> int:
    verdicts: Dict[str, Counter] = {}
    bins: Dict[int, Counter] = {}
    print("published  fill of the fullest IPU, verdict")
    for row, program, fullest in judged_fits():
        outcome = row["outcome"]
        verdicts.setdefault(outcome, Counter())[fullest.verdict] += 1
        bins.setdefault(published_bin(fullest.fill), Counter())[outcome == "fits"] += 1
        parts = " ".join(f"{name} {value / 1e6:.0f}" for name, value in fullest.categories().items())
        print(f"{outcome:22} {fullest.fill:5.2f} {fullest.verdict:13} {program.label} [MB: {parts}]")
    print("\npublished: verdicts")
    for outcome, counts in verdicts.items():
        print(
            f"  {outcome:22} {sum(counts.values()):3} rows: {', '.join(f'{n} {v}' for v, n in counts.items())}"
        )
    print("  published configurations that fit, of all with the same predicted fill (in the package):")
    for place, counts in sorted(bins.items()):
        fits, number = published_at(place / 10 + 0.05)
        name = f"{place * 10} % or more" if place == max(bins) else f"{place * 10} to {place * 10 + 10} %"
        print(f"    {name}: {counts[True]} of {sum(counts.values())} ({fits} of {number})")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--csv", type=Path, help="also write the predictions there")
    parser.add_argument("--memory", action="store_true", help="judge published fits instead")
    arguments = parser.parse_args()
    return report_memory() if arguments.memory else report_throughput(arguments.csv)


if __name__ == "__main__":
    sys.exit(main())
