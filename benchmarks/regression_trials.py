"""How often the regression gate is wrong: the same work measured twice, and with a slowdown put in.

Usage: python benchmarks/regression_trials.py [--model lenet] [--inference] [--trials 40] [--executions 60]

Each trial measures a baseline, then the work again as it is, then with a tenth more work in every execution (eleven
units for ten that are reported), with the code of `ipucnn benchmark --baseline`.  Printed is in how many trials a
regression of more than 5 % was reported, how often nothing was decided, and how the ratios spread.
"""

import argparse
import os
import statistics
import time
from types import SimpleNamespace

from ipucnn.benchmarking.baseline import Gate
from ipucnn.benchmarking.machine import Occupation
from ipucnn.benchmarking.measure import Contender, Limits, Reference, measure
from ipucnn.benchmarking.records import Interval

ALLOWED = 0.05


class Slowed(Contender):
    """A side that does ``extra`` percent more work in an execution than it reports."""

    def __init__(self, contender, extra, units=None):
        self._contender, self._extra = contender, extra
        self.name, self.samples_per_unit = contender.name, contender.samples_per_unit
        self.granule, self.fixed_units = contender.granule * 10, units

    def execute(self, num_units):
        self._contender.execute(num_units + num_units * self._extra // 100)

    def check(self):
        self._contender.check()


def make_contender(model, training):
    """The benchmark's own contender and yardstick for a network on generated data."""
    from ipucnn.benchmarking.benchmark import prepare
    from ipucnn.benchmarking.contenders import Yardstick
    from ipucnn.benchmarking.settings import make_settings
    from ipucnn.benchmarking.work import compile_work
    from ipucnn.config.resolve import resolve
    from ipucnn.runs.setup import build
    from ipucnn.sessions.factory import create_session

    flags = {"host_generated_data": True, "seed": "1", "micro_batch_size": "8"}
    work = prepare(resolve("benchmark", flags, model=model), make_settings(training=training))
    session = create_session("cpu")
    network = build(work.setup)
    return compile_work(work, session, network).contenders[0], Yardstick(session.place)


def text(ratio):
    return f"{ratio.value:.3f} [{ratio.lower:.3f} {ratio.upper:.3f}]"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--inference", action="store_true")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=5.0, help="least time of a measurement")
    parser.add_argument("--executions", type=int, default=60, help="least executions of a measurement")
    parser.add_argument("--most", type=float, default=60.0, help="most time of an undecided one")
    parser.add_argument("--execution-s", type=float, default=0.05)
    arguments = parser.parse_args()
    contender, yardstick = make_contender(arguments.model, not arguments.inference)
    limits = Limits(
        min_executions=arguments.executions, min_time_s=arguments.seconds, max_time_s=arguments.most, max_warmup_s=1.0,
        execution_s=arguments.execution_s,
    )  # fmt: skip

    def executions(extra, gate=None):
        """Rows of executions, and what others took of the processors."""
        occupied, more = Occupation(), {}
        if gate is not None:
            more["is_decided"] = lambda m: gate.is_decided(m[0].executions, occupied.others_share())
        # As `ipucnn benchmark --baseline` does: executions and yardstick are as long as the baseline's.
        units = None if gate is None else length[0]
        done = measure(
            [Slowed(contender, extra, units)], limits, reference=Fixed() if gate else yardstick, **more
        )
        length[0] = done.measurements[0].units
        return done.measurements[0].executions, occupied.others_share()

    class Fixed(Reference):
        def __call__(self):
            return yardstick()

    length = [None]

    def rate(rows):
        return sum(r.samples for r in rows) / sum(r.wall_s for r in rows)

    ratios, verdicts = {0: [], 10: []}, {0: [], 10: []}
    for trial in range(arguments.trials):
        started = time.perf_counter()
        rows, share = executions(0)
        figures = SimpleNamespace(images_per_s=Interval(rate(rows), None, None), others_share=share)
        baseline = SimpleNamespace(executions=rows, measured=figures, device=SimpleNamespace(kind="cpu"))
        line, shares = [], [share]
        for extra in verdicts:
            gate = Gate(baseline, "baseline", ALLOWED, trial)
            now, share = executions(extra, gate)
            result = gate.compare(now, share)
            shares.append(share)
            ratios[extra].append(result.ratio.value)
            verdicts[extra].append(result.verdict)
            raw = rate(now) / rate(rows)
            cpu = result.ratio_by_processor_time
            line.append(
                f"+{extra} %: {text(result.ratio)} {result.verdict} (by time {text(result.ratio_by_time)}"
                + (f", processor time {text(cpu)}" if cpu else "")
                + f", {len(now)} executions, raw {raw:.2f})"
            )
        load = os.getloadavg()[0]
        print(
            f"trial {trial + 1}: {'; '.join(line)}; {time.perf_counter() - started:.0f} s, load {load:.1f}, others "
            f"{statistics.mean(s or 0.0 for s in shares):.0%}",
            flush=True,
        )
    for extra, found in verdicts.items():
        values = ratios[extra]
        counts = ", ".join(f"{found.count(v)} {v}" for v in ("slower", "not slower", "inconclusive"))
        print(f"{extra} % more work: of {len(found)} trials {counts}; ratios {min(values):.3f} to "
              f"{max(values):.3f}, median {statistics.median(values):.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
