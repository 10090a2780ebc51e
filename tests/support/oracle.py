"""One oracle of the planner: the fastest splits by brute force or an integer program, from the definitions alone.

Everything is computed with Python numbers and loops.  ``pipeline_simulator.py`` confirms the ticks.
"""

import itertools

import numpy as np
import pytest

from ipucnn.planning.search.exact import solve
from ipucnn.planning.search.tables import StageTables


def masked(table):
    """Returns a table of memory in which a range without items takes infinitely much."""
    return np.where(np.tri(*table.shape, dtype=bool), np.inf, table)


def free_tables(forward, backward, cut, capacity=1.0, memory=None, **details):
    """Returns tables whose stages take no memory, or that of a table for all of them."""
    forward, backward, cut = (np.asarray(values, dtype=float) for values in (forward, backward, cut))
    n = len(forward)
    sizes = masked(np.zeros((n, n + 1)) if memory is None else memory)
    return StageTables(forward, backward, cut, capacity, lambda k, s: sizes, **details)


def naive_tick(tables, starts, schedule, chosen=None):
    """Returns the seconds of a tick; ``chosen`` has the tables of each stage, if the stages differ."""
    k, ends = len(starts), [*starts[1:], tables.num_items]
    f, b = [], []
    for s, (i, j) in enumerate(zip(starts, ends)):
        of_stage = chosen[s] if chosen else tables
        forward, backward = (
            of_stage.stage_s[s] if of_stage.stage_s else (of_stage.forward_s, of_stage.backward_s)
        )
        f.append(sum(float(x) for x in forward[i:j]))
        b.append(sum(float(x) for x in backward[i:j]))
        b[s] += f[s] if tables.recompute and tables.training and s < k - 1 else 0.0
    cut = {s: float(tables.cut_s[starts[s]]) for s in range(1, k)}
    both = 2 if tables.training else 1
    if schedule == "Sequential":
        return sum(f) + sum(b) + both * sum(cut.values())
    if schedule == "Grouped" or not tables.training:
        return max(f) + max(b) + both * max(cut.values(), default=0)
    total = 0.0
    for parity in (0, 1):
        total += max(f[s] if s % 2 == parity else b[s] for s in range(k))
        # Forward from stages of this parity, backward from the others: both cross the cuts before the others.
        total += 2 * max((cut[s] for s in cut if s % 2 != parity), default=0)
    return total


def naive_fits(tables, starts, chosen=None):
    k, ends = len(starts), [*starts[1:], tables.num_items]
    bytes_ = [
        (chosen[s] if chosen else tables).memory_bytes(k, s)[i][j]
        for s, (i, j) in enumerate(zip(starts, ends))
    ]
    if tables.checkpoint_bytes is None:
        return all(one <= tables.capacity_bytes for one in bytes_)
    return sum(tables.checkpoint_bytes[i] for i in starts) + max(bytes_) <= tables.capacity_bytes


def all_starts(n, k):
    return [(0, *cuts) for cuts in itertools.combinations(range(1, n), k - 1)]


def brute_force(tables, k, schedule):
    """Returns the least tick of all splits that fit, with all choices of settings; None if none does."""
    return min(
        (
            naive_tick(tables, starts, schedule, chosen)
            for starts in all_starts(tables.num_items, k)
            for chosen in itertools.product(tables.options or (tables,), repeat=k)
            if naive_fits(tables, starts, chosen)
        ),
        default=None,
    )


def check_fastest(tables, k, schedule, oracle=brute_force, rel=1e-12):
    """Checks the search's solution against an oracle.

    Returns:
        The solution, and the oracle's tick; None if nothing fits.
    """
    solution, best = solve(tables, k, schedule), oracle(tables, k, schedule)
    assert solution.feasible == (best is not None)
    if best is None:
        assert solution.starts == () and not solution.optimal and solution.objective_s == np.inf
        return solution, None
    assert len(solution.starts) == k and {0, *solution.starts} <= {*range(tables.num_items)}
    if not tables.options:
        assert naive_fits(tables, solution.starts)
        assert solution.objective_s == pytest.approx(naive_tick(tables, solution.starts, schedule), rel=1e-12)
    assert solution.objective_s == pytest.approx(best, rel=rel)
    assert solution.optimal and solution.lower_bound_s <= solution.objective_s
    assert solve(tables, k, schedule) == solution
    return solution, best


def integer_program(tables, k, schedule):
    """Solves for the least tick by HiGHS: z[s, i, j] says that stage s holds items i .. j - 1."""
    optimize = pytest.importorskip("scipy.optimize")
    if not hasattr(optimize, "milp"):
        pytest.skip("this SciPy has no milp (1.9 has)")
    from scipy.sparse import lil_matrix

    n = tables.num_items
    runs = []
    for s in range(k):
        memory = tables.memory_bytes(k, s)
        runs += [
            (s, i, j)
            for i in range(n)
            for j in range(i + 1, n + 1)
            if memory[i][j] <= tables.capacity_bytes and (s == 0) == (i == 0) and (s == k - 1) == (j == n)
        ]
    num = len(runs)
    # The columns after z: X, Y, and the largest cut before odd and before even stages.
    cost = np.zeros(num + 4)
    alternates = schedule == "Interleaved"
    cost[num:] = [1, 1, 2, 2 if alternates else 0]
    flow = lil_matrix((1 + (k - 1) * (n - 1), num + 4))
    loads = lil_matrix((4 * k, num + 4))
    for column, (s, i, j) in enumerate(runs):
        if s == 0:
            flow[0, column] = 1
        if s < k - 1:
            flow[1 + s * (n - 1) + j - 1, column] += 1
        if s > 0:
            flow[1 + (s - 1) * (n - 1) + i - 1, column] -= 1
        f, b = tables.forward_s[i:j].sum(), tables.backward_s[i:j].sum()
        if tables.recompute and s < k - 1:
            b += f
        loads[4 * s, column], loads[4 * s + 1, column] = f, b
        if s > 0:
            loads[4 * s + 2, column] = tables.cut_s[i]
    for s in range(k):
        swapped = alternates and s % 2
        loads[4 * s, num + (1 if swapped else 0)] = -1
        loads[4 * s + 1, num + (0 if swapped else 1)] = -1
        loads[4 * s + 2, num + (3 if alternates and s and s % 2 == 0 else 2)] = -1
    right = np.zeros(flow.shape[0])
    right[0] = 1
    result = optimize.milp(
        cost,
        integrality=np.array([1] * num + [0] * 4),
        bounds=optimize.Bounds(0, np.array([1.0] * num + [np.inf] * 4)),
        constraints=[
            optimize.LinearConstraint(flow.tocsr(), right, right),
            optimize.LinearConstraint(loads.tocsr(), -np.inf, 0),
        ],
        options={"mip_rel_gap": 1e-9, "time_limit": 60},
    )
    if result.status == 2:
        return None
    assert result.status == 0, result.message
    return result.fun
