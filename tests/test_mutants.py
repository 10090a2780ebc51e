"""The measurement of how many small mistakes the tests notice: the changes it makes, and the tests it runs."""

import ast
import sys
from pathlib import Path

import pytest

if sys.version_info < (3, 12):
    pytest.skip("it needs sys.monitoring", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import mutants
from mutants_runs import Reached

TEXT = '''"""A module."""

LIMIT = 2 * 3  # a comment stays


def among(
    value,
    bound=LIMIT,
):
    """It is said."""
    if (
        value < bound
        and value != 0
    ):
        return f"{value + 1} of {bound}"
    return None


class Counted:
    size = 7

    def next(self):
        return [self.size + 1, "ä" * 2]
'''


def differences(before, after):
    """Returns the outermost parts in which two trees differ."""
    if type(before) is not type(after) or (not isinstance(before, (ast.AST, list)) and before != after):
        return [(before, after)]
    if isinstance(before, list):
        if len(before) != len(after):
            return [(before, after)]
        return [difference for pair in zip(before, after) for difference in differences(*pair)]
    if not isinstance(before, ast.AST):
        return []
    return [
        difference
        for name in before._fields
        for difference in differences(getattr(before, name, None), getattr(after, name, None))
    ]


def test_each_mutant_has_exactly_one_change():
    drawn = mutants.draw(TEXT, 1000, seed=1)
    assert len({mutant.key for mutant in drawn}) == len({mutant.text for mutant in drawn}) == len(drawn)
    for mutant in drawn:
        assert len(differences(ast.parse(TEXT), ast.parse(mutant.text))) == 1, mutant
        assert mutant.text.count("\n") == TEXT.count("\n") and "# a comment stays" in mutant.text
    changes = {(mutant.before, mutant.after) for mutant in drawn}
    assert {
        ("2 * 3", "2 // 3"),
        ("value < bound", "value <= bound"),
        ("value < bound and value != 0", "value < bound or value != 0"),
        ("value < bound and value != 0", "not (value < bound and value != 0)"),
        ("value + 1", "value - 1"),
        ("7", "8"),
        ('return [self.size + 1, "ä" * 2]', "return None"),
    } <= changes
    # Operators on text are not changed, and neither is `return None`.
    assert not any("ä" in before and "return" not in before for before, _ in changes)
    assert ("return None", "return None") not in changes


def test_mutants_depend_only_on_the_text_and_the_seed():
    some = mutants.draw(TEXT, 5, seed=1)
    assert some == mutants.draw(TEXT, 5, seed=1) and len(some) == 5
    assert some != mutants.draw(TEXT, 5, seed=2)
    assert {mutant.key for mutant in some} <= {mutant.key for mutant in mutants.draw(TEXT, 1000, seed=1)}


def test_mutants_record_their_lines_and_whether_they_run_on_import():
    places = {(m.before, m.after): (m.lines, m.on_import) for m in mutants.draw(TEXT, 1000, seed=1)}
    assert places["2 * 3", "2 // 3"] == ((3, 3), True)
    assert places["value != 0", "value == 0"] == ((11, 14), False)
    assert places["value + 1", "value - 1"] == ((15, 15), False)
    assert places["7", "8"] == ((20, 20), True)
    assert places["self.size + 1", "self.size - 1"] == ((23, 23), False)


def test_a_mutant_runs_the_tests_that_reach_it_fastest_first():
    module = "ipucnn/sums.py"
    reached = {
        "tests/test_a.py": Reached(
            seconds={"import": 0, "tests/test_a.py::slow": 5.0, "tests/test_a.py::other": 0.01},
            lines={
                "import": {module: [3]},
                "tests/test_a.py::slow": {module: [15]},
                "tests/test_a.py::other": {},
            },
            failed=[],
        ),
        "tests/test_sums.py": Reached(
            seconds={"import": 0, "tests/test_sums.py::quick": 0.02, "tests/test_sums.py::broken": 0.01},
            lines={
                "import": {},
                "tests/test_sums.py::quick": {module: [14, 15]},
                "tests/test_sums.py::broken": {module: [15]},
            },
            failed=["tests/test_sums.py::broken"],
        ),
    }
    pool = mutants.Pool(module, list(reached), reached)
    by_change = {mutant.before: mutant for mutant in mutants.draw(TEXT, 1000, seed=1)}
    assert list(pool.for_mutant(by_change["value + 1"])) == [
        "tests/test_sums.py::quick",
        "tests/test_a.py::slow",
    ]
    assert list(pool.for_mutant(by_change["value < bound"])) == ["tests/test_sums.py::quick"]
    assert pool.for_mutant(by_change["self.size + 1"]) == {}
    # A line that runs on import may change any test.
    assert sorted(pool.for_mutant(by_change["2 * 3"])) == [
        "tests/test_a.py::other",
        "tests/test_a.py::slow",
        "tests/test_sums.py::quick",
    ]
