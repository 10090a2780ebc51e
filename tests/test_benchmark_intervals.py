"""Intervals, percentiles and verdicts of a benchmark, against SciPy and against known properties of random draws."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from few_examples import tries
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from scipy import stats

from ipucnn.benchmarking import intervals
from ipucnn.benchmarking.baseline import Gate
from ipucnn.benchmarking.intervals import Times
from ipucnn.benchmarking.records import Execution, Interval, Spread

times = st.floats(1e-3, 10.0)


@pytest.mark.slow
@given(st.floats(1.0, 99.9), st.floats(0.5, 0.999))
def test_the_number_of_samples_is_the_minimum_of_a_binomial(percent, confidence):
    n = intervals.samples_for_percentile(percent, confidence)
    p = percent / 100
    # P(X = n) of a binomial, that all n samples lie below the quantile; from n on it is at most 1 - confidence.
    assert stats.binom.pmf(n, n, p) <= (1 - confidence) * (1 + 1e-9)
    assert n == 1 or stats.binom.pmf(n - 1, n - 1, p) > (1 - confidence) * (1 - 1e-9)


@pytest.mark.slow
@tries(30, slow=100)
@given(st.integers(1, 600), st.sampled_from([50.0, 90.0, 95.0, 99.0]))
def test_the_bound_is_the_smallest_rank_with_the_confidence(n, percent):
    rank = intervals.percentile_bound_rank(n, percent)
    p = percent / 100
    at_least = math.ceil(n * p)
    sure = [r for r in range(max(1, at_least), n + 1) if stats.binom.cdf(r - 1, n, p) >= 0.99 - 1e-12]
    near_tie = any(abs(stats.binom.cdf(r - 1, n, p) - 0.99) < 1e-9 for r in range(1, n + 1))
    assert near_tie or rank == (sure[0] if sure else 0)
    assert bool(rank) == (n >= intervals.samples_for_percentile(percent))


def test_percentiles_are_blank_until_there_are_enough():
    rows = intervals.percentiles([1.0] * 43)
    assert [(r.percent, r.value_s is None, r.needs) for r in rows] == [
        (50.0, False, 7), (90.0, True, 44), (95.0, True, 90), (99.0, True, 459)
    ]  # fmt: skip
    values = list(np.random.RandomState(0).permutation(459) + 1.0)
    rows = intervals.percentiles(values)
    assert [r.value_s for r in rows] == [230.0, 414.0, 437.0, 455.0]  # nearest rank
    assert rows[3].at_most_s == 459.0 and rows[1].value_s < rows[1].at_most_s < 459


def test_the_upper_bound_covers_the_quantile_with_its_confidence():
    random = np.random.RandomState(1)
    covered = sum(
        intervals.percentiles(random.exponential(size=60))[1].at_most_s >= -math.log(0.1) for _ in range(400)
    )
    assert covered >= 0.97 * 400


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 100), times), min_size=1, max_size=20))
def test_throughput_is_total_over_total_and_lies_in_its_interval(pairs):
    samples, seconds = zip(*pairs)
    speed = intervals.throughput(Times(samples, seconds))
    assert speed.value == pytest.approx(sum(samples) / sum(seconds))
    if len(pairs) < intervals.INTERVAL_NEEDS:
        assert speed.lower is None and speed.upper is None
    else:
        rates = [n / t for n, t in pairs]
        assert min(rates) * (1 - 1e-9) <= speed.lower <= speed.upper <= max(rates) * (1 + 1e-9)
    assert intervals.throughput(Times(samples, seconds)) == speed  # seeded


@pytest.mark.parametrize("count", [10, 30])
def test_the_interval_covers_the_true_speed(count):
    random = np.random.RandomState(2)
    covered = 0
    for trial in range(200):
        seconds = random.gamma(16.0, 1 / 16.0, size=count)
        speed = intervals.throughput(Times([5] * count, seconds), trial)
        covered += speed.lower <= 5.0 <= speed.upper
    assert 183 <= covered <= 199


@pytest.mark.parametrize("count", [6, 7, 8, 10, 12, 20, 40, 100, 400])
def test_the_expansion_equals_students_t(count):
    blocks = count / intervals.block_length(count)
    exact = math.sqrt(blocks / (blocks - 1)) * stats.t.ppf(0.975, blocks - 1)
    quantile = stats.norm.ppf((1 + intervals.expanded_confidence(count)) / 2)
    assert quantile == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("count", [1, 2, 5, 6, 10])
def test_intervals_are_blank_with_few_executions(count):
    """All intervals are blank: with two executions a bootstrap covers the truth half of the time, not 95 %."""
    a, b = np.random.RandomState(0).uniform(1, 2, (2, count))
    first, second = Times([3] * count, a), Times([3] * count, b)
    for interval in (
        intervals.throughput(first),
        intervals.paired_ratio(first, second),
        intervals.paired_share(first, second),
        intervals.paired_difference(first, second),
        intervals.unpaired_ratio([a], [b]).together,
    ):
        assert (interval.lower is None) is (interval.upper is None) is (count < 6)


def test_drifting_times_have_a_wider_interval():
    """Similar neighbours carry less information than the same number of independent executions."""
    drifting = np.exp(np.repeat(np.random.RandomState(9).normal(0, 0.1, 16), 8))
    shuffled = np.random.RandomState(10).permutation(drifting)
    ones = [1.0] * len(drifting)
    for interval_of in (
        lambda seconds: intervals.throughput(Times(ones, seconds)),
        lambda seconds: intervals.unpaired_ratio([seconds], [seconds[::-1]]).together,
    ):
        wide, narrow = map(interval_of, (drifting, shuffled))
        assert wide.upper - wide.lower > 1.3 * (narrow.upper - narrow.lower)


def test_a_slow_round_cancels_in_the_paired_ratio():
    random = np.random.RandomState(3)
    weather = random.uniform(1, 3, size=20)
    ours, theirs = weather * random.normal(1, 0.01, 20), 2 * weather * random.normal(1, 0.01, 20)
    counts = [8] * 20
    ratio = intervals.paired_ratio(Times(counts, ours), Times(counts, theirs))
    assert ratio.value == pytest.approx(theirs.sum() / ours.sum())
    assert 1.95 < ratio.lower < ratio.upper < 2.05
    alone = intervals.throughput(Times(counts, ours))
    assert (alone.upper - alone.lower) / alone.value > 5 * (ratio.upper - ratio.lower) / ratio.value


@pytest.mark.parametrize(
    "costs, steady",
    [
        ([1.0] * 5, False),
        ([1.0] * 6, True),
        ([9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], True),
        ([2.0, 1.8, 1.6, 1.4, 1.2, 1.0], False),
        ([1.0, 1.0, 1.0, 1.0, 50.0, 1.0], True),  # one outlier is no trend
        ([1.0, 1.0, 1.0, 1.06, 1.06, 1.06], False),
    ],
)
def test_steadiness(costs, steady):
    assert intervals.is_steady(costs) is steady


def test_spread():
    spread = intervals.spread([1.0, 2.0, 3.0])
    assert spread == Spread(1.0, 2.0, 3.0, 0.5)
    assert intervals.spread([2.0]).coefficient_of_variation is None


def test_the_difference_of_two_costs_is_paired():
    random = np.random.RandomState(6)
    weather = random.uniform(1, 3, size=30)
    long, short = 1.2 * weather, 1.0 * weather
    counts = [4] * 30
    difference = intervals.paired_difference(Times(counts, long), Times(counts, short))
    assert difference.value == pytest.approx((long.sum() - short.sum()) / 120)
    assert difference.lower <= difference.value <= difference.upper
    # Circular bootstrap of ten blocks of three; the normal quantile is widened to the 2.5 % tail of Student's t
    # for ten blocks.
    first = np.random.RandomState(7).randint(0, 30, (4000, 10))
    naive = []
    for starts in first:
        p = [(s + k) % 30 for s in starts for k in range(3)]
        naive.append((long[p].mean() - short[p].mean()) / 4)
    tail = stats.norm.sf(stats.t.ppf(0.975, 9) * math.sqrt(10 / 9))
    assert difference.lower == pytest.approx(np.quantile(naive, tail), rel=0.05)
    assert difference.upper == pytest.approx(np.quantile(naive, 1 - tail), rel=0.05)
    alone = intervals.paired_difference(Times(counts, long), None)
    assert alone.value == pytest.approx(long.sum() / 120)
    assert intervals.paired_difference(Times([4], [2.0]), Times([4], [1.0])) == Interval(0.25, None, None)


def test_a_share_of_time():
    share = intervals.paired_share(Times([10] * 9, [4.0] * 9), Times([20] * 9, [6.0] * 9))
    assert [share.value, share.lower, share.upper] == pytest.approx([0.25, 0.25, 0.25])
    assert intervals.paired_share(Times([1], [4.0]), Times([1], [3.0])) == Interval(0.25, None, None)


def test_measures_are_weighted_by_their_precision():
    random = np.random.RandomState(8)
    rough, fine = random.normal(0, 0.2, 60), random.normal(0, 0.02, 60)
    before = [np.exp(random.normal(0, 0.2, 60)), np.exp(random.normal(0, 0.02, 60))]
    ratio = intervals.unpaired_ratio([np.exp(rough) * 1.25, np.exp(fine) * 1.25], before)
    assert ratio.weights[1] > 0.9 and sum(ratio.weights) == pytest.approx(1.0)
    expected = np.median(before[1]) / np.median(np.exp(fine) * 1.25)
    assert ratio.each[1].value == pytest.approx(expected, rel=1e-3)
    assert ratio.together.lower < 0.8 < ratio.together.upper
    assert ratio.together.upper - ratio.together.lower < ratio.each[0].upper - ratio.each[0].lower


def executions(random, speed, count=40, busy=0.0):
    """Returns executions on a machine whose speed drifts, together with that of the reference workload.

    ``busy``: how much other processes use the machine: wall times then scatter widely, towards longer times, and
    processor times hardly.
    """
    drift = np.exp(np.cumsum(random.normal(0, 0.05, count)))
    noise = random.normal(1.0, 0.03, count) + busy * random.exponential(0.6, count)
    cpu_noise = random.normal(1.0, 0.02, count)
    yard = 1.0 + busy * random.exponential(0.6, count)
    return [
        Execution(10, 10 / speed * d * e, 10 / speed * d * c, 0.02 * d * y, 0.02 * d)
        for d, e, c, y in zip(drift, noise, cpu_noise, yard)
    ]


def report(rows, others=0.0):
    """Returns the part of a report that a gate reads."""
    speed = Interval(sum(r.samples for r in rows) / sum(r.wall_s for r in rows), None, None)
    return SimpleNamespace(
        executions=rows,
        measured=SimpleNamespace(images_per_s=speed, others_share=others),
        device=SimpleNamespace(kind="cpu"),
    )


@pytest.mark.parametrize("busy", [0.0, 0.6])
@pytest.mark.parametrize("slowdown, at_least, at_most", [(0.0, 0, 1), (0.10, 36, 40)])
def test_regressions_are_found_without_false_alarms(slowdown, at_least, at_most, busy):
    """Simulates 40 trials in which the drift of the machine is far larger than the regression."""
    random = np.random.RandomState(4)
    num_regressed = 0
    for trial in range(40):
        before = executions(random, 100.0, busy=busy)
        speed = random.uniform(0.5, 2.0)  # the whole machine is faster or slower the second time
        now = executions(random, 100.0 * speed * (1 - slowdown), busy=busy)
        now = [
            structs.replace(
                row, reference_s=row.reference_s / speed, reference_cpu_s=row.reference_cpu_s / speed
            )
            for row in now
        ]
        num_regressed += Gate(report(before, busy), "b.json", 0.05, trial).compare(now, busy).regressed
    assert at_least <= num_regressed <= at_most


def rows_of(walls, cpus):
    return [Execution(1, w, c, 1.0, 1.0) for w, c in zip(walls, cpus)]


def test_wall_time_alone_is_inconclusive_on_a_busy_machine():
    steady = [1.0 + 0.001 * i for i in range(30)]
    before, waits = rows_of(steady, steady), rows_of([1.3 * s for s in steady], steady)
    quiet = Gate(report(before), "b", 0.05).compare(waits, 0.01)
    assert quiet.verdict == "slower" and quiet.ratio_by_processor_time is None
    busy = Gate(report(before), "b", 0.05).compare(waits, 0.5)
    assert busy.verdict == "inconclusive" and busy.ratio_by_processor_time.value == 1.0
    busy_then = Gate(report(before, others=0.5), "b", 0.05).compare(waits, 0.0)
    assert busy_then.verdict == "inconclusive"
    both = Gate(report(before), "b", 0.05).compare(
        rows_of([1.3 * s for s in steady], [1.3 * s for s in steady]), 0.5
    )
    assert both.verdict == "slower"


@pytest.mark.parametrize("before, now, who", [(19, 40, "the baseline has 19"), (40, 19, "this run has 19")])
def test_few_executions_are_inconclusive(before, now, who):
    """Even a clear difference is inconclusive: here the run is twice as slow."""
    fast, slow = rows_of([1.0] * before, [1.0] * before), rows_of([2.0] * now, [2.0] * now)
    gate = Gate(report(fast), "b.json", 0.05)
    result = gate.compare(slow, 0.0)
    assert result.verdict == "inconclusive" and not result.regressed
    assert result.why_inconclusive.startswith(who)
    # Measuring does not continue until --max-time for a baseline that is too short for a verdict.
    assert gate.is_decided(slow, 0.0) is (before < 20)
    enough = Gate(report(rows_of([1.0] * 20, [1.0] * 20)), "b", 0.05).compare(slow + slow, 0.0)
    assert enough.verdict == "slower" and enough.why_inconclusive is None


def test_a_gate_tests_only_now_and_then():
    """The gate tests only now and then: a test after every execution would report differences due to chance."""
    steady = [1.0 + 0.001 * i for i in range(100)]
    gate = Gate(report(rows_of(steady, steady)), "b", 0.05)
    now = rows_of([2 * s for s in steady], steady)
    looks = [n for n in range(1, 100) if gate.is_decided(now[:n], 0.0)]
    assert looks[0] == 20 and 3 <= len(looks) <= 8
