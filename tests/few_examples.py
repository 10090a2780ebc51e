"""Hypothesis tests that usually try a few examples, and more when slow tests are run."""

import pytest
from hypothesis import settings

# Whether this run leaves out slow tests; ``conftest.py`` sets it before any test is imported.
slow_are_left_out = True


def tries(few, *, slow, **values):
    """Declares the numbers of examples of a test; replaces Hypothesis's ``@settings``.

    Args:
        few: number of examples when slow tests are left out.
        slow: larger number of examples when they are run; the test is then marked as slow.
        values: further Hypothesis settings.

    Returns:
        A decorator.
    """
    assert few < slow, "not fewer examples than with -m slow"

    def declare(test):
        if slow_are_left_out:
            return settings(max_examples=few, **values)(test)
        return pytest.mark.slow(settings(max_examples=slow, **values)(test))

    return declare
