"""Exact partition of a sequence into contiguous parts."""

from typing import List, Sequence


def balanced_partition(costs: Sequence[float], num_parts: int) -> List[int]:
    """Cuts a sequence into non-empty contiguous parts whose largest sum is as small as possible.

    Dynamic programming over prefixes (Hansen and Lih 1992): best[p][i] = min over j < i of
    max(best[p - 1][j], sum(costs[j:i])), O(parts x n^2).

    Args:
        costs: non-negative, at least ``num_parts`` of them.
        num_parts: at least 1.

    Returns:
        The index at which each part starts; of several optima the one with the earliest cuts.

    Raises:
        ValueError: fewer costs than parts, or a negative cost.
    """
    n = len(costs)
    if not 1 <= num_parts <= n:
        raise ValueError(f"{n} costs cannot make {num_parts} parts")
    if any(c < 0 for c in costs):
        raise ValueError("costs must not be negative")
    prefix: List[float] = [0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    infinite = float("inf")
    best: List[float] = [0, *[infinite] * n]
    cuts: List[List[int]] = []
    for part in range(1, num_parts + 1):
        row: List[float] = [infinite] * (n + 1)
        cut = [0] * (n + 1)
        for i in range(part, n + 1):
            # Going down from the last possible cut, the part's sum grows: stop once it alone is too large.
            for j in range(i - 1, part - 2, -1):
                own = prefix[i] - prefix[j]
                if own > row[i]:
                    break
                value = max(best[j], own)
                if value <= row[i]:
                    row[i], cut[i] = value, j
        cuts.append(cut)
        best = row
    starts, end = [], n
    for cut in reversed(cuts):
        end = cut[end]
        starts.append(end)
    return starts[::-1]
