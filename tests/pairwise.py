"""Finds few rows with all pairs of values of several factors, greedily (Cohen et al. 1997, "The AETG system")."""

import itertools
import random
from typing import Any, Callable, Dict, List, Mapping, Sequence, Set, Tuple

Row = Dict[str, Any]
_Pair = Tuple[str, Any, str, Any]


def _pairs(row: Row) -> Set[_Pair]:
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(sorted(row), 2)}


def pairwise(
    factors: Mapping[str, Sequence[Any]],
    is_legal: Callable[[Row], bool] = lambda row: True,
    minimum: int = 0,
    seed: int = 0,
    tries: int = 60,
) -> List[Row]:
    """Returns rows in which every pair of values that some legal row has occurs at least once.

    Args:
        factors: values (hashable) by name.
        is_legal: says whether a complete row is legal.
        minimum: smallest number of rows; more are added up to it.
        seed: seed of the search; the same seed gives the same rows.
        tries: number of random rows among which the best is chosen.
    """
    rng = random.Random(seed)
    names = list(factors)

    def draw(fixed: Row) -> Row:
        return {name: fixed.get(name, rng.choice(list(factors[name]))) for name in names}

    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(sorted(names), 2)
        for x in factors[a]
        for y in factors[b]
    }
    rows: List[Row] = []
    while missing or len(rows) < minimum:
        fixed: Row = {}
        if missing:
            a, x, b, y = min(missing, key=repr)
            fixed = {a: x, b: y}
        candidates = [row for row in (draw(fixed) for _ in range(tries * 10)) if is_legal(row)][:tries]
        if not candidates:
            missing.discard(min(missing, key=repr))  # no legal row has this pair
            continue
        best = max(candidates, key=lambda row: len(_pairs(row) & missing))
        rows.append(best)
        missing -= _pairs(best)
    return rows
