"""Compares a run with a baseline, which is a saved benchmark report.

The comparison checks that the report is complete and of the same work and machine, and whether this run is slower.

The machine itself is faster one day and slower the next, and twice as slow while others use it.  So the comparison uses
cost instead of time: an execution's time per sample over the time of a fixed reference workload right before and after
it, in both reports.  Each such quotient describes one short moment.  The median of the quotients over many moments
hardly depends on other load, while a quotient of medians does.

If other processes use part of the processors, waiting for a processor counts as time.  How much a program waits depends
on its threads and on chance.  So on a busy machine processor time, which advances only while the process runs, counts
too: the two are weighted by their precision.  Processor time alone would not be enough.  It does not include waiting
for other things, and threads that poll for work use some while the processors are free.
"""

from pathlib import Path
from typing import Any, List, Optional, Tuple

from ipucnn.aliases import PlainDict, PlainValue
from ipucnn.benchmarking.contenders import REFERENCE
from ipucnn.benchmarking.intervals import CONFIDENCE, QUIET_SHARE, Ratio, unpaired_ratio
from ipucnn.benchmarking.records import BenchmarkReport, Execution, Interval, Regression, Request, from_plain
from ipucnn.documents import read_record
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.runs.folder import REPORT
from ipucnn.sessions.session import DeviceInfo
from ipucnn.text import shown_value

_DEVICE = ("kind", "name", "num_cores")
# Fields of a Program that are not compared: the baseline determines the length of executions, and seeds may differ.
_NOT_OF_PROGRAM = (
    "weight_updates_per_epoch",
    "samples_per_epoch",
    "weight_updates_per_execution",
    "steps_per_execution",
    "num_executions",
    "executions_per_checkpoint",
    "first_checkpoint_execution",
    "seed",
    "warnings",
)

METHOD = (
    "median over executions of time per sample / time of "
    + REFERENCE
    + "; the interval is a 95 % bootstrap of "
    "blocks of executions; slower if all of it is below 1 - allowed, not slower if all of it is above, else "
    "inconclusive; where others took more than 5 % of the processors in either run, the same quotient of processor "
    "times counts too, each weighted by the inverse of its variance, and if the two contradict each other nothing is "
    "decided; inconclusive with fewer than 20 executions in either run"
)
SLOWER, NOT_SLOWER, INCONCLUSIVE = "slower", "not slower", "inconclusive"
# Measuring ends early only if an interval of this confidence has decided, and it is checked only occasionally: the more
# often one checks, the more often chance produces a result (Armitage, McPherson and Rowe 1969).
STOPPING_CONFIDENCE = 0.99
LEAST_EXECUTIONS = 20
_NEXT_LOOK = 1.3


def read_report(path: Path) -> BenchmarkReport:
    """Reads a baseline: a ``report.json`` of a network's speed, with executions beside the reference workload.

    Raises:
        ConfigurationError: the report does not contain a network's speed.
        DataError: the file is absent, damaged, of another kind or version, or void.
    """
    path = path / REPORT if path.is_dir() else path
    data = read_record(path, "give the report.json of a benchmark")
    if isinstance(data, dict) and (data.get("void") or data.get("measured", True) is None):
        why = shown_value(data.get("void") or "nothing was measured")
        raise DataError(f"--baseline {path} has no result: {why}", "make it again")
    hint = "give the report.json that `ipucnn benchmark` wrote"
    report = from_plain(data, BenchmarkReport, f"--baseline {path}", hint)
    if report.scope != "session":
        raise ConfigurationError(
            f"--baseline {path} measured --mode {report.scope}, this run the network's speed",
            "give the report.json of --mode training or inference",
        )
    lacking = [name for name in ("execution", "executions", "measured") if not getattr(report, name)]
    if lacking:
        raise DataError(f"--baseline {path} is damaged: it has no {lacking[0]}", "make it again")
    for index, execution in enumerate(report.executions):
        if not (execution.cpu_s and execution.reference_s and execution.reference_cpu_s):
            raise DataError(
                f"--baseline {path} is damaged: execution {index} lacks its time or that of the reference workload",
                "make it again",
            )
    return report


def _compare(where: str, pairs: List[Tuple[str, PlainValue, PlainValue]]) -> None:
    for what, before, now in pairs:
        if before != now:
            raise ConfigurationError(
                f"--baseline {where} has {what} {_text(before)}, this run {_text(now)}",
                "compare like with like: give this run the baseline's options, or make the baseline again",
            )


def _text(value: object) -> str:
    return "none" if value is None else shown_value(value)


def check_same_request(baseline: BenchmarkReport, where: str, now: Request) -> None:
    """Compares everything that is known before TensorFlow is imported.

    Args:
        baseline: an earlier report.
        where: the baseline's file, for messages.
        now: the request of this run.

    Raises:
        ConfigurationError: something differs; the message names the first difference.
    """
    pairs = [(key, getattr(baseline, key), getattr(now, key)) for key in ("model", "mode")]
    pairs.append(("--compare-with", baseline.settings.compare_with, now.settings.compare_with))
    for key in ("kind", "name", "num_images"):
        pairs.append((f"data {key}".replace("_", " "), getattr(baseline.data, key), getattr(now.data, key)))
    pairs.append(("input shape", baseline.input_shape, now.input_shape))
    before, typed = baseline.options, now.options
    pairs += [(f"--{key}", before.get(key), typed.get(key)) for key in sorted({*before, *typed})]
    _compare(where, [*pairs, *_program_pairs(baseline.program, now.program)])


def _program_pairs(before: PlainDict, now: PlainDict) -> List[Tuple[str, Any, Any]]:
    # Layers and fused micro-batches are known only later; options, network and device determine them.
    keys = [key for key in sorted(now) if key not in _NOT_OF_PROGRAM]
    return [(key.replace("_", " "), _plain(before.get(key)), _plain(now.get(key))) for key in keys]


def _plain(value: object) -> Any:
    return list(value) if isinstance(value, tuple) else value


def check_same_machine(baseline: BenchmarkReport, where: str, device: DeviceInfo) -> None:
    """Compares the devices.

    Raises:
        ConfigurationError: the devices differ.
    """
    _compare(
        where, [(f"device {key}", getattr(baseline.device, key), getattr(device, key)) for key in _DEVICE]
    )


def costs(executions: List[Execution], clock: str = "wall") -> List[float]:
    """Returns each execution's time per sample relative to the reference workload's; ``clock`` is "wall" or "cpu"."""
    spent, reference = ("wall_s", "reference_s") if clock == "wall" else ("cpu_s", "reference_cpu_s")
    return [getattr(e, spent) / e.samples / getattr(e, reference) for e in executions]


def judge(ratio: Interval, allowed: float) -> str:
    """Returns SLOWER, NOT_SLOWER or INCONCLUSIVE for a ratio of speeds, now over before."""
    if ratio.lower is None or ratio.upper is None:
        return INCONCLUSIVE
    if ratio.upper < 1.0 - allowed:
        return SLOWER
    return NOT_SLOWER if ratio.lower >= 1.0 - allowed else INCONCLUSIVE


def is_too_short(baseline: BenchmarkReport) -> bool:
    """Tells whether a report has too few executions for any decision against it."""
    return len(baseline.executions) < LEAST_EXECUTIONS


class Gate:
    """A baseline, and the loss of its speed that is allowed.

    Args:
        baseline: an earlier report.
        where: the report's file.
        allowed: the share of the speed that may be lost.
        seed: the seed of the bootstrap.
    """

    def __init__(self, baseline: BenchmarkReport, where: str, allowed: float, seed: int = 0) -> None:
        self._baseline, self._where, self._allowed, self._seed = baseline, where, allowed, seed
        self._next_look = LEAST_EXECUTIONS

    def _verdict(
        self, executions: List[Execution], others_share: Optional[float], confidence: float = CONFIDENCE
    ) -> Tuple[str, Ratio]:
        """Returns the verdict, and the ratio of speeds by time and, if a machine was busy, by processor time."""
        clocks = ["wall"]
        assert self._baseline.measured is not None
        shares = [others_share, self._baseline.measured.others_share]
        # If the system does not report the load, the machine counts as quiet.
        on_cpu = self._baseline.device.kind == "cpu"
        if on_cpu and max(share or 0.0 for share in shares) > QUIET_SHARE:
            clocks.append("cpu")
        before = self._baseline.executions
        ratio = unpaired_ratio(
            [costs(executions, clock) for clock in clocks],
            [costs(before, clock) for clock in clocks],
            self._seed,
            confidence,
        )
        verdict = judge(ratio.together, self._allowed)
        if self._why_open(len(executions)) is not None:
            verdict = INCONCLUSIVE
        if {judge(each, self._allowed) for each in ratio.each} >= {SLOWER, NOT_SLOWER}:
            verdict = INCONCLUSIVE
        return verdict, ratio

    def _why_open(self, count: int) -> Optional[str]:
        """Returns why ``count`` executions are too few for a decision; None if they suffice."""
        for whose, number in (("the baseline", len(self._baseline.executions)), ("this run", count)):
            if number < LEAST_EXECUTIONS:
                return f"{whose} has {number} executions, and {LEAST_EXECUTIONS} are needed to decide"
        return None

    def is_decided(self, executions: List[Execution], others_share: Optional[float]) -> bool:
        """Tells whether measuring may stop: checks only occasionally, and returns True if the baseline is too short."""
        if is_too_short(self._baseline):
            return True
        if len(executions) < self._next_look:
            return False
        self._next_look = int(len(executions) * _NEXT_LOOK) + 1
        return self._verdict(executions, others_share, STOPPING_CONFIDENCE)[0] != INCONCLUSIVE

    def compare(self, executions: List[Execution], others_share: Optional[float]) -> Regression:
        """Returns the ``regression`` of a report, from its executions and the others' share of the processors."""
        verdict, ratio = self._verdict(executions, others_share)
        assert self._baseline.measured is not None
        return Regression(
            baseline=self._where,
            baseline_images_per_s=self._baseline.measured.images_per_s.value,
            ratio=ratio.together,
            ratio_by_time=ratio.each[0],
            ratio_by_processor_time=ratio.each[1] if len(ratio.each) > 1 else None,
            allowed=self._allowed,
            verdict=verdict,
            why_inconclusive=self._why_open(len(executions)),
            regressed=verdict == SLOWER,
            method=METHOD,
        )
