"""The refusals in ``tests/refusals`` that need TensorFlow: of networks, weights and runs."""

import pytest
from support.refused import cases
from support.typed_refusals import check_refusal


@pytest.mark.usefixtures("membranes_once")
@pytest.mark.parametrize("refusal", cases(has_tensorflow=True), ids=str)
def test_a_refused_command_says_why_and_its_hint_works(refusal, run, monkeypatch, tmp_path):
    check_refusal(refusal, run, monkeypatch, tmp_path)
