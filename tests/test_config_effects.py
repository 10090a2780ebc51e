"""Options say what they have an effect on; the tests of each option show that it has one."""

import pytest

from ipucnn.config.options import BY_NAME
from ipucnn.config.spec import OptionSpec


def test_a_sweep_is_accepted_with_one_warning(succeeds):
    options = ("--dataset", "digits", "--limit-train", 32, "--num-epochs", 1, "--seed", 1, "--no-validation")
    _, err = succeeds("train", "toy_model", "--sweep", *options, "--run-dir", "run")
    assert err.count("warning:") == 1 == err.count("warning: sweep changes nothing")


def test_an_option_without_any_effect_cannot_be_declared():
    details = {**vars(BY_NAME["shuffle"]), "host_effect": False, "ipu_effect": False}
    with pytest.raises(TypeError, match="neither on the host nor on IPUs"):
        OptionSpec(**details)
