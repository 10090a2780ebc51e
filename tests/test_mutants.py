"""benchmarks/mutants.py: which changes it makes, and which ones tests notice."""

import sys

import pytest
from support.scripts import load_script

pytestmark = pytest.mark.skipif(sys.version_info < (3, 9), reason="ast.unparse is new in Python 3.9")

SOURCE = '''
def sign(x: int, least: int = 1) -> int:
    """Returns 1 or -1."""
    if not x:
        raise ValueError("x is 0" + "!")
    return least if x > 0 else -least
'''


@pytest.fixture(scope="module")
def script():
    return load_script("benchmarks/mutants.py")


def test_code_changes_and_texts_annotations_and_errors_stay(script):
    drawn = script.mutants(SOURCE, count=100, seed=1)
    assert sorted((m.line, m.before.split("\n")[0], m.after) for m in drawn) == [
        (2, "1", "2"),
        (4, "if not x:", "pass"),
        (4, "not x", "x"),
        (6, "0", "1"),
        (6, "return least if x > 0 else -least", "return None"),
        (6, "x > 0", "x >= 0"),
    ]
    assert all(m.source.count("Returns 1 or -1.") == m.source.count("x: int") == 1 for m in drawn)


def test_the_same_seed_draws_the_same_mutants(script):
    assert script.mutants(SOURCE, 3, seed=1) == script.mutants(SOURCE, 3, seed=1)
    assert any(
        script.mutants(SOURCE, 3, seed=1) != script.mutants(SOURCE, 3, seed=seed) for seed in range(2, 9)
    )


@pytest.mark.slow
def test_a_mutant_survives_if_its_tests_pass(script, tmp_path):
    (tmp_path / "test_sign.py").write_text("import sign\n\ndef test_2(): assert sign.sign(2) == 1\n")
    alive = {
        m.after: script.survives(tmp_path, "sign.py", m.source, ["test_sign.py"])
        for m in script.mutants(SOURCE, 100, seed=1)
        if m.after in ("x >= 0", "x")
    }
    assert alive == {"x >= 0": True, "x": False}  # the test does not try 0
