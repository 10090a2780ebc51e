"""Is it slower than an earlier report says?

The machine itself is faster one day and slower the next, and twice as slow while others use it.  So what is compared
is not time but cost: an execution's time per sample over the time that a fixed yardstick took right before and after
it, in both reports.  Each such quotient is of one short moment; their median over many moments hardly depends on
what else ran, where a quotient of medians does.

Where others take part of the processors, waiting for one counts as time, and how much a program waits depends on its
threads and on luck.  So on a busy machine processor time, which goes on only while the process runs, counts too: the
two are weighted by their precision.  By itself it would not do: it does not see a program that waits for something,
and threads that look for work take some where the processors are free.
"""

from typing import Any, Dict, List, Optional, Tuple

from ipucnn.benchmarking.statistics import CONFIDENCE, Interval, Ratio, unpaired_ratio
from ipucnn.benchmarking.yardstick import METHOD as YARDSTICK

METHOD = (
    "median over executions of time per sample / time of "
    + YARDSTICK
    + "; the interval is a 95 % bootstrap of "
    "blocks of executions; slower if all of it is below 1 - allowed, not slower if all of it is above, else "
    "inconclusive; where others took more than 5 % of the processors in either run, the same quotient of processor "
    "times counts too, each weighted by the inverse of its variance, and if the two contradict each other nothing is "
    "decided; inconclusive with fewer than 20 executions in either run"
)
SLOWER, NOT_SLOWER, INCONCLUSIVE = "slower", "not slower", "inconclusive"
# Measuring ends early only if an interval of this confidence has decided, looked at now and then: the more
# often one looks, the more often chance shows something (Armitage, McPherson and Rowe 1969).
STOPPING_CONFIDENCE = 0.99
QUIET_SHARE = 0.05
LEAST_EXECUTIONS = 20
_NEXT_LOOK = 1.3


def costs(executions: List[Dict[str, Any]], clock: str = "wall") -> List[float]:
    """Time per sample of each execution relative to the yardstick's; ``clock`` is "wall" or "cpu"."""
    own, reference = ("wall_s", "reference_s") if clock == "wall" else ("cpu_s", "reference_cpu_s")
    return [e[own] / e["samples"] / e[reference] for e in executions]


def judge(ratio: Interval, allowed: float) -> str:
    """SLOWER, NOT_SLOWER or INCONCLUSIVE of the ratio of speeds, now over before."""
    if ratio.lower is None or ratio.upper is None:
        return INCONCLUSIVE
    if ratio.upper < 1.0 - allowed:
        return SLOWER
    return NOT_SLOWER if ratio.lower >= 1.0 - allowed else INCONCLUSIVE


def is_too_short(baseline: Dict[str, Any]) -> bool:
    """Whether a report has too few executions for anything to be decided against it."""
    return len(baseline["executions"]) < LEAST_EXECUTIONS


class Gate:
    """A baseline, and what may be lost of its speed.

    Args:
        baseline: an earlier report.
        where: its file.
        allowed: share of the speed that may be lost.
        seed: of the bootstrap.
    """

    def __init__(self, baseline: Dict[str, Any], where: str, allowed: float, seed: int = 0) -> None:
        self._baseline, self._where, self._allowed, self._seed = baseline, where, allowed, seed
        self._next_look = LEAST_EXECUTIONS

    def _verdict(
        self, executions: List[Dict[str, Any]], others_share: Optional[float], confidence: float = CONFIDENCE
    ) -> Tuple[str, Ratio]:
        """The verdict, and the ratio of speeds by time and, if a machine was busy, by processor time."""
        clocks = ["wall"]
        shares = [others_share, self._baseline["measured"].get("others_share")]
        # Where the system does not tell, the machine is taken for quiet.
        on_cpu = self._baseline.get("device", {}).get("kind", "cpu") == "cpu"
        if on_cpu and max(share or 0.0 for share in shares) > QUIET_SHARE:
            clocks.append("cpu")
        before = self._baseline["executions"]
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
        """Why so many executions decide nothing; None if they may."""
        for whose, number in (("the baseline", len(self._baseline["executions"])), ("this run", count)):
            if number < LEAST_EXECUTIONS:
                return f"{whose} has {number} executions, and {LEAST_EXECUTIONS} are needed to decide"
        return None

    def is_decided(self, executions: List[Dict[str, Any]], others_share: Optional[float]) -> bool:
        """Whether measuring may stop; looks only now and then, and does not wait for what can't come."""
        if is_too_short(self._baseline):
            return True
        if len(executions) < self._next_look:
            return False
        self._next_look = int(len(executions) * _NEXT_LOOK) + 1
        return self._verdict(executions, others_share, STOPPING_CONFIDENCE)[0] != INCONCLUSIVE

    def compare(self, executions: List[Dict[str, Any]], others_share: Optional[float]) -> Dict[str, Any]:
        """``regression`` of a report, of its executions and what others took of the processors meanwhile."""
        verdict, ratio = self._verdict(executions, others_share)
        by_cpu = ratio.each[1].to_dict() if len(ratio.each) > 1 else None
        return {
            "baseline": self._where,
            "baseline_images_per_s": self._baseline["measured"]["images_per_s"]["value"],
            "ratio": ratio.together.to_dict(),
            "ratio_by_time": ratio.each[0].to_dict(),
            "ratio_by_processor_time": by_cpu,
            "allowed": self._allowed,
            "verdict": verdict,
            "why_inconclusive": self._why_open(len(executions)),
            "regressed": verdict == SLOWER,
            "method": METHOD,
        }
