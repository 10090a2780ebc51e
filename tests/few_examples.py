"""Tests with Hypothesis that usually try a few of their examples, and all of them where slow tests are run."""

import pytest
from hypothesis import settings

# Whether slow tests are left out of this run; ``conftest.py`` sets it before it imports any test.
slow_are_left_out = True


def tries(few, *, slow, **values):
    """Declares how many examples a test has; it stands where Hypothesis's ``@settings`` would.

    Args:
        few: so many where slow tests are left out.
        slow: so many, which are more, where they are not; the test is one of them there.
        values: further settings of Hypothesis's.

    Returns:
        A decorator.
    """
    assert few < slow, "not fewer examples than with -m slow"

    def declare(test):
        if slow_are_left_out:
            return settings(max_examples=few, **values)(test)
        return pytest.mark.slow(settings(max_examples=slow, **values)(test))

    return declare
