"""Intervals, percentiles and verdicts of a benchmark, against SciPy and against what is known of random draws."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ipucnn.benchmarking import statistics
from ipucnn.benchmarking.regression import compare

times = st.floats(1e-3, 10.0)


def test_samples_for_the_percentiles():
    needed = [statistics.samples_for_percentile(p) for p in (50, 90, 95, 99)]
    assert needed == [7, 44, 90, 459]


@given(st.floats(1.0, 99.9), st.floats(0.5, 0.999))
def test_the_count_is_the_least_that_a_binomial_allows(percent, confidence):
    n = statistics.samples_for_percentile(percent, confidence)
    p = percent / 100
    # All n samples below the quantile: P(X = n) of a binomial; from n on it is at most 1 - confidence.
    assert stats.binom.pmf(n, n, p) <= (1 - confidence) * (1 + 1e-9)
    assert n == 1 or stats.binom.pmf(n - 1, n - 1, p) > (1 - confidence) * (1 - 1e-9)


@given(st.integers(1, 600), st.sampled_from([50.0, 90.0, 95.0, 99.0]))
def test_the_bound_is_the_least_rank_that_is_surely_above(n, percent):
    rank = statistics.percentile_bound_rank(n, percent)
    p = percent / 100
    at_least = math.ceil(n * p)
    sure = [r for r in range(max(1, at_least), n + 1) if stats.binom.cdf(r - 1, n, p) >= 0.99 - 1e-12]
    near_tie = any(abs(stats.binom.cdf(r - 1, n, p) - 0.99) < 1e-9 for r in range(1, n + 1))
    assert near_tie or rank == (sure[0] if sure else 0)
    assert bool(rank) == (n >= statistics.samples_for_percentile(percent))


def test_percentiles_are_blank_until_there_are_enough():
    rows = statistics.percentiles([1.0] * 43)
    assert [(r["percent"], r["value_s"] is None, r["needs"]) for r in rows] == [
        (50.0, False, 7), (90.0, True, 44), (95.0, True, 90), (99.0, True, 459)
    ]  # fmt: skip
    values = list(np.random.RandomState(0).permutation(459) + 1.0)
    rows = statistics.percentiles(values)
    assert [r["value_s"] for r in rows] == [230.0, 414.0, 437.0, 455.0]  # nearest rank
    assert rows[3]["at_most_s"] == 459.0 and rows[1]["value_s"] < rows[1]["at_most_s"] < 459


def test_the_upper_bound_covers_the_quantile_as_often_as_it_says():
    random = np.random.RandomState(1)
    covered = sum(
        statistics.percentiles(random.exponential(size=60))[1]["at_most_s"] >= -math.log(0.1)
        for _ in range(400)
    )
    assert covered >= 0.97 * 400


@given(st.lists(st.tuples(st.integers(1, 100), times), min_size=1, max_size=20))
def test_throughput_is_total_over_total_and_lies_in_its_interval(pairs):
    samples, seconds = zip(*pairs)
    speed = statistics.throughput(samples, seconds)
    assert speed.value == pytest.approx(sum(samples) / sum(seconds))
    if len(pairs) == 1:
        assert speed.lower is None and speed.upper is None
    else:
        rates = [n / t for n, t in pairs]
        assert min(rates) * (1 - 1e-9) <= speed.lower <= speed.upper <= max(rates) * (1 + 1e-9)
    assert statistics.throughput(samples, seconds) == speed  # seeded


def test_the_interval_covers_the_true_speed():
    random = np.random.RandomState(2)
    covered = 0
    for trial in range(200):
        seconds = random.gamma(16.0, 1 / 16.0, size=30)
        speed = statistics.throughput([5] * 30, seconds, trial)
        covered += speed.lower <= 5.0 <= speed.upper
    assert 175 <= covered <= 199


def test_what_slows_down_a_whole_round_cancels_in_the_paired_ratio():
    random = np.random.RandomState(3)
    weather = random.uniform(1, 3, size=20)
    ours, theirs = weather * random.normal(1, 0.01, 20), 2 * weather * random.normal(1, 0.01, 20)
    counts = [8] * 20
    ratio = statistics.paired_ratio((counts, counts), (ours, theirs))
    assert ratio.value == pytest.approx(theirs.sum() / ours.sum())
    assert 1.95 < ratio.lower < ratio.upper < 2.05
    alone = statistics.throughput(counts, ours)
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
    assert statistics.is_steady(costs) is steady


def test_spread():
    found = statistics.spread([1.0, 2.0, 3.0])
    assert found == {"min_s": 1.0, "median_s": 2.0, "max_s": 3.0, "coefficient_of_variation": 0.5}
    assert statistics.spread([2.0])["coefficient_of_variation"] is None


def executions(random, speed, count=30, weather=1.0):
    """Executions of a machine whose speed drifts, the reference product with it."""
    drift = weather * random.uniform(0.9, 1.1, count)
    noise = random.normal(1.0, 0.04, count)
    return [
        {"samples": 10, "wall_s": 10 / speed * d * e, "reference_s": 0.02 * d} for d, e in zip(drift, noise)
    ]


def report(rows):
    total = sum(r["samples"] for r in rows) / sum(r["wall_s"] for r in rows)
    return {"executions": rows, "measured": {"images_per_s": {"value": total}}}


@pytest.mark.parametrize("slowdown, at_least, at_most", [(0.0, 0, 1), (0.10, 36, 40)])
def test_regressions_are_found_and_not_invented(slowdown, at_least, at_most):
    """40 simulated trials; the machine as a whole is up to 40 % slower the second time, which must not count."""
    random = np.random.RandomState(4)
    found = 0
    for trial in range(40):
        before = executions(random, 100.0)
        now = executions(random, 100.0 * (1 - slowdown), weather=random.uniform(0.8, 1.4))
        found += compare(report(before), "b.json", now, 0.05, trial)["regressed"]
    assert at_least <= found <= at_most


def test_a_comparison_without_reference_says_so():
    random = np.random.RandomState(5)
    rows = [{**row, "reference_s": None} for row in executions(random, 100.0)]
    result = compare(report(rows), "b.json", rows, 0.05)
    assert result["relative_to_reference"] is False and not result["regressed"]
    assert result["ratio"]["value"] == 1.0


def test_few_noisy_executions_prove_no_regression():
    before = [{"samples": 1, "wall_s": t, "reference_s": None} for t in (0.5, 1.0, 1.5)]
    now = [{"samples": 1, "wall_s": t, "reference_s": None} for t in (0.6, 1.1, 1.6)]
    result = compare(report(before), "b.json", now, 0.05)
    assert result["ratio"]["value"] < 0.95 and result["ratio"]["upper"] > 1 and not result["regressed"]
