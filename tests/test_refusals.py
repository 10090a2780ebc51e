"""Every refusal in ``tests/refusals``: exit code, error and hint, whole; then the hint is typed, and works.

Those of networks, weights and runs, which need TensorFlow, are in ``test_refusals_runs.py``.
"""

import pytest
from support.refused import cases
from support.typed_refusals import check_refusal


@pytest.mark.usefixtures("membranes_once")
@pytest.mark.parametrize("refusal", cases(has_tensorflow=False), ids=str)
def test_a_refused_command_says_why_and_its_hint_works(refusal, run, monkeypatch, tmp_path):
    check_refusal(refusal, run, monkeypatch, tmp_path)
