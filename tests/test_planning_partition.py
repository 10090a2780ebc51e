"""The exact partition against trying every cut."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipucnn.planning.partition import balanced_partition
from ipucnn.sessions.host.fusion import choose_fused


def largest(costs, starts):
    ends = [*starts[1:], len(costs)]
    return max(sum(costs[a:b]) for a, b in zip(starts, ends))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_the_largest_part_is_as_small_as_any_cut_allows(costs, data):
    parts = data.draw(st.integers(1, len(costs)))
    starts = balanced_partition(costs, parts)
    assert len(starts) == parts and starts[0] == 0 and starts == sorted(set(starts))
    best = min(largest(costs, [0, *cut]) for cut in combinations(range(1, len(costs)), parts - 1))
    assert largest(costs, starts) == best


@pytest.mark.parametrize("costs, parts", [([1], 2), ([], 1), ([1, -1], 1), ([1], 0)])
def test_what_cannot_be_cut_is_refused(costs, parts):
    with pytest.raises(ValueError):
        balanced_partition(costs, parts)


@given(
    st.integers(1, 400),
    st.integers(1, 300),
    st.integers(1, 10**8),
    st.integers(0, 2**36),
    st.sampled_from([1, 2, 4]),
)
def test_fused_micro_batches_divide_a_weight_update_into_whole_groups(count, size, per_sample, memory, group):
    count *= group
    fused = choose_fused(count, size, group, per_sample, memory)
    assert count % fused == 0 and fused % group == 0
