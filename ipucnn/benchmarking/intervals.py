"""Computes the statistics of a few timed executions: intervals, percentiles, steadiness, regressions.

It uses NumPy, and SciPy's distributions.  Times are never clipped or averaged as rates: throughput is total samples
over total time.
"""

import math
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ipucnn.benchmarking.records import Execution, Interval, Percentile, Spread

CONFIDENCE = 0.95
PERCENTILE_CONFIDENCE = 0.99
PERCENTILES = (50.0, 90.0, 95.0, 99.0)
NUM_RESAMPLES = 2000
# With fewer executions every bootstrap interval is far too narrow, so it is left out.
INTERVAL_NEEDS = 6
# The share of the processors that others may use of a quiet machine.
QUIET_SHARE = 0.05
# Executions compared with as many before them to detect whether times still fall.
STEADY_WINDOW = 3
STEADY_CHANGE = 0.05


def samples_for_percentile(percent: float, confidence: float = PERCENTILE_CONFIDENCE) -> int:
    """Returns how many samples a percentile needs: 7, 44, 90 and 459 for p50, p90, p95 and p99 at 99 %.

    The largest of n independent samples lies above the quantile p unless all n lie below, which has the probability p^n
    (binomial).  So from n = log(1 - confidence) / log(p) on, some sample bounds the quantile from above with that
    confidence.  With fewer samples none does, and the tail was not observed.
    """
    return math.ceil(math.log(1.0 - confidence) / math.log(percent / 100.0))


def percentile_bound_rank(num_samples: int, percent: float, confidence: float = PERCENTILE_CONFIDENCE) -> int:
    """Returns the least rank (from 1) whose order statistic exceeds the quantile with this confidence; 0 if none.

    The r-th smallest of n samples is below the quantile p when at least r samples are, P = 1 - CDF(r - 1).
    """
    # SciPy's distributions are used as functions of ``scipy.special``: ``scipy.stats`` takes a second to import.
    from scipy.special import bdtr

    p = percent / 100.0
    ranks = np.arange(max(1, math.ceil(num_samples * p)), num_samples + 1)
    sure = ranks[bdtr(ranks - 1, num_samples, p) >= confidence]
    return int(sure[0]) if len(sure) else 0


def percentiles(seconds: Sequence[float]) -> List[Percentile]:
    """Returns ``PERCENTILES`` of times, by nearest rank, with an upper bound at 99 % confidence if there are enough."""
    ordered = sorted(seconds)
    rows = []
    for percent in PERCENTILES:
        needs = samples_for_percentile(percent)
        if len(ordered) < needs:
            rows.append(Percentile(percent, needs))
            continue
        rank = max(1, math.ceil(len(ordered) * percent / 100.0))
        bound = ordered[percentile_bound_rank(len(ordered), percent) - 1]
        rows.append(Percentile(percent, needs, ordered[rank - 1], bound))
    return rows


def _bounds(values: np.ndarray, confidence: float = CONFIDENCE) -> Tuple[float, float]:
    tail = 50.0 * (1.0 - confidence)
    lower, upper = np.percentile(values, [tail, 100.0 - tail])
    return float(lower), float(upper)


def expanded_confidence(num: int) -> float:
    """Returns the confidence at which a percentile bootstrap of ``num`` executions is as wide as a 95 % t interval.

    Resamples of n pieces scatter sqrt((n - 1) / n) times as much as samples do, and ignore the uncertainty of that
    scatter, which Student's t includes (Hesterberg 2015, What Teachers Should Know About the Bootstrap, "expanded
    percentile").  The pieces are the blocks here: 5 of 10 executions.
    """
    from scipy.special import stdtrit

    blocks = num / block_length(num)
    student = stdtrit(blocks - 1.0, (1.0 + CONFIDENCE) / 2.0)
    return math.erf(math.sqrt(blocks / (blocks - 1.0)) * student / math.sqrt(2.0))


class Times(NamedTuple):
    """The samples and the seconds of each execution."""

    samples: Sequence[float]
    seconds: Sequence[float]


def times_of(executions: Sequence[Execution], clock: str = "wall") -> Times:
    """Returns the times of executions by the clock "wall" or "cpu"."""
    seconds = [execution.wall_s if clock == "wall" else execution.cpu_s for execution in executions]
    return Times([execution.samples for execution in executions], seconds)


def _interval(statistic: Callable[..., np.ndarray], sides: Sequence[Times], seed: int) -> Interval:
    """Returns a statistic of speeds with an expanded percentile bootstrap over blocks of rounds.

    A resample draws rounds, each with the executions of all sides: a slowdown of a whole round cancels.

    Args:
        statistic: the speeds (total samples / total seconds) of the sides, as numbers or arrays -> the statistic.
        sides: the times of each side, measured in turns.
        seed: the seed of the resamples.
    """
    arrays: List[Any] = [(np.asarray(side.samples, float), np.asarray(side.seconds, float)) for side in sides]

    def of(picks: np.ndarray) -> Any:
        return statistic(*(n[picks].sum(axis=-1) / t[picks].sum(axis=-1) for n, t in arrays))

    num = len(sides[0].seconds)
    value = float(of(np.arange(num)))
    if num < INTERVAL_NEEDS:
        return Interval(value, None, None)
    return Interval(value, *_bounds(of(_block_resamples(num, seed)), expanded_confidence(num)))


def throughput(times: Times, seed: int = 0) -> Interval:
    """Returns total samples over total seconds."""
    return _interval(lambda speed: speed, [times], seed)


def paired_ratio(first: Times, second: Times, seed: int = 0) -> Interval:
    """Returns the throughput of the first side over that of the second, measured in turns."""
    return _interval(lambda a, b: a / b, [first, second], seed)


def paired_share(first: Times, second: Times, seed: int = 0) -> Interval:
    """Returns the share of the first side's time that the second saves: 1 - cost of the second / cost of the first."""
    return _interval(lambda a, b: 1.0 - a / b, [first, second], seed)


def paired_difference(first: Times, second: Optional[Times], seed: int = 0) -> Interval:
    """Returns the seconds per sample of the first side minus those of the second, measured in turns.

    If the second side is None, nothing is subtracted: the result is the first side's cost.  The difference may be
    negative by chance.
    """
    if second is None:
        return _interval(lambda a: 1.0 / a, [first], seed)
    return _interval(lambda a, b: 1.0 / a - 1.0 / b, [first, second], seed)


class Ratio(NamedTuple):
    """A ratio of speeds, by several measures of the same quantity and by their combination.

    Attributes:
        together: the combination: the measures' logarithms weighted by their precision.
        each: the ratio by each measure.
        weights: the weight of each measure, 1 in sum.
    """

    together: Interval
    each: List[Interval]
    weights: List[float]


def unpaired_ratio(
    now: Sequence[Sequence[float]],
    before: Sequence[Sequence[float]],
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> Ratio:
    """Returns how many times as fast ``now`` is: median cost before over median cost now.

    Executions are resampled on either side separately, with all their measures.  Neighbours may be correlated, so
    blocks of about the cube root of their number are drawn, around the circle (Politis and Romano 1992).  Measures are
    combined with the inverse of their variances over the resamples, as independent estimates of one quantity.

    Args:
        now, before: for each measure, the cost of a sample in each execution; ``regression`` describes the measures.
        seed: the seed of the resamples.
        confidence: the confidence of the intervals.
    """
    a: Any = np.log(np.asarray(now, float))
    b: Any = np.log(np.asarray(before, float))
    values = np.median(b, axis=1) - np.median(a, axis=1)
    if min(a.shape[1], b.shape[1]) < INTERVAL_NEEDS:
        alone = [Interval(float(np.exp(v)), None, None) for v in values]
        return Ratio(alone[0], alone, [1.0] + [0.0] * (len(alone) - 1))
    picks_a, picks_b = _block_resamples(a.shape[1], seed), _block_resamples(b.shape[1], seed + 1)
    resampled: Any = np.stack(
        [np.median(y[picks_b], axis=1) - np.median(x[picks_a], axis=1) for x, y in zip(a, b)]
    )
    precisions = 1.0 / (resampled.var(axis=1) + 1e-12)
    weights = precisions / precisions.sum()
    each = [Interval(float(np.exp(v)), *_bounds(np.exp(r), confidence)) for v, r in zip(values, resampled)]
    combined = Interval(float(np.exp(weights @ values)), *_bounds(np.exp(weights @ resampled), confidence))
    return Ratio(combined, each, [float(w) for w in weights])


def block_length(num: int) -> int:
    """Returns the number of executions in a block: about the cube root of their number."""
    return max(1, round(num ** (1.0 / 3.0)))


def _block_resamples(num: int, seed: int) -> np.ndarray:
    """Returns int [resamples, num]: runs of neighbours, with the first following the last."""
    length = block_length(num)
    starts = np.random.RandomState(seed % 2**32).randint(0, num, size=(NUM_RESAMPLES, -(-num // length)))
    runs = (starts[:, :, np.newaxis] + np.arange(length)) % num
    return runs.reshape(NUM_RESAMPLES, -1)[:, :num]


def is_steady(seconds_per_sample: Sequence[float]) -> bool:
    """Tells whether the last executions are as fast as those before them: their medians differ by 5 % at most."""
    if len(seconds_per_sample) < 2 * STEADY_WINDOW:
        return False
    last = float(np.median(seconds_per_sample[-STEADY_WINDOW:]))
    before = float(np.median(seconds_per_sample[-2 * STEADY_WINDOW : -STEADY_WINDOW]))
    return abs(last / before - 1.0) <= STEADY_CHANGE


def spread(seconds: Sequence[float]) -> Spread:
    """Returns least, median and most seconds of an execution, and the standard deviation over the mean."""
    t: Any = np.asarray(seconds, float)
    varies = float(t.std(ddof=1) / t.mean()) if len(t) > 1 else None
    return Spread(float(t.min()), float(np.median(t)), float(t.max()), varies)
