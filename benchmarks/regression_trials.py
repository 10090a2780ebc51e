"""How often the regression gate is wrong: the same work measured twice, and with a slowdown put in.

Usage: python benchmarks/regression_trials.py [--model lenet] [--trials 40] [--executions 20]

Each trial measures a baseline and then the work again, with the same code as `ipucnn benchmark --baseline`; once as
it is, once with every execution made longer.  Printed is in how many trials a regression of more than 5 % was
reported, and how the ratios spread.
"""

import argparse
import statistics
import time

from ipucnn.benchmarking.measure import Limits, Side, measure
from ipucnn.benchmarking.regression import compare
from ipucnn.benchmarking.report import execution_rows


class Slowed(Side):
    """A side whose executions reach only a share of their speed; the rest of the time it sleeps."""

    def __init__(self, side, speed):
        self._side, self._speed = side, speed
        self.name, self.samples_per_unit, self.granule = side.name, side.samples_per_unit, side.granule

    def execute(self, num_units):
        started = time.perf_counter()
        self._side.execute(num_units)
        time.sleep((time.perf_counter() - started) * (1 / self._speed - 1))

    def check(self):
        self._side.check()


def make_side(model, training):
    """The benchmark's own side and reference for a network on generated data."""
    from ipucnn.benchmarking.machine import MatmulReference
    from ipucnn.benchmarking.report import BenchmarkReport
    from ipucnn.benchmarking.run import Benchmark
    from ipucnn.benchmarking.settings import make_settings
    from ipucnn.config.resolve import resolve
    from ipucnn.runs.setup import build
    from ipucnn.sessions.factory import create_session

    flags = {"host_generated_data": True, "seed": "1", "micro_batch_size": "8"}
    work = Benchmark(resolve("benchmark", flags, model=model), make_settings(training=training))
    session = create_session("cpu")
    network = build(work.setup)
    report = BenchmarkReport(model, None, work.settings.mode, "", 1, [], {}, {}, {})
    return work._compile(session, network, report)[0][0], MatmulReference(session.place)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--executions", type=int, default=20)
    parser.add_argument("--execution-s", type=float, default=0.25)
    arguments = parser.parse_args()
    side, reference = make_side(arguments.model, arguments.training)
    limits = Limits(
        min_executions=arguments.executions, min_time_s=0, max_warmup_s=1, execution_s=arguments.execution_s
    )

    def executions(speed):
        chosen = side if speed == 1.0 else Slowed(side, speed)
        return execution_rows(measure([chosen], limits, reference=reference).measurements[0].executions)

    ratios, found = {1.0: [], 0.9: []}, {1.0: 0, 0.9: 0}
    for trial in range(arguments.trials):
        rows = executions(1.0)
        speed = sum(r["samples"] for r in rows) / sum(r["wall_s"] for r in rows)
        baseline = {"executions": rows, "measured": {"images_per_s": {"value": speed}}}
        for share in found:
            result = compare(baseline, "baseline", executions(share), 0.05, trial)
            ratios[share].append(result["ratio"]["value"])
            found[share] += result["regressed"]
        print(
            f"trial {trial + 1}:",
            {share: f"{values[-1]:.3f}" for share, values in ratios.items()},
            flush=True,
        )
    for share, number in found.items():
        values = ratios[share]
        print(f"speed x {share}: regression in {number} of {arguments.trials}; ratios {min(values):.3f} to "
              f"{max(values):.3f}, median {statistics.median(values):.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
