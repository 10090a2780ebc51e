"""Options say what they have an effect on; the tests of each option show that it has one."""

import pytest

from ipucnn.config.options import BY_NAME, SPECS, RunConfig
from ipucnn.config.spec import Effect, OptionSpec
from ipucnn.sessions.host.agreement import compared_options


@pytest.mark.slow
def test_a_sweep_is_accepted_with_one_warning(succeeds):
    options = ("--dataset", "digits", "--limit-train", 32, "--num-epochs", 1, "--seed", 1, "--no-validation")
    _, err = succeeds("train", "toy_model", "--sweep", *options, "--run-dir", "run")
    assert err.count("warning:") == 1 == err.count("warning: sweep changes nothing")


def test_an_option_without_any_effect_cannot_be_declared():
    details = {**vars(BY_NAME["shuffle"]), "host_effect": False, "ipu_effect": False}
    with pytest.raises(TypeError, match="neither on the host nor on IPUs"):
        OptionSpec(**details)


def test_an_option_of_runs_without_a_declared_effect_cannot_be_declared():
    details = {**vars(BY_NAME["shuffle"]), "effect": None}
    with pytest.raises(TypeError, match="shuffle declares no effect"):
        OptionSpec(**details)
    assert OptionSpec(**{**details, "commands": ()}).effect is None


def test_options_that_only_name_places_or_switch_files_change_neither_result_nor_delivery():
    of_paths = {spec.name for spec in SPECS if spec.kind.is_path}
    # Weights to start from are a part of the result, wherever they lie.
    for name in of_paths - {"weights"} | {"keep_checkpoints", "clean_dir", "overwrite", "download"}:
        assert BY_NAME[name].effect is Effect.FILES, name


def test_processes_compare_all_options_but_those_of_files_and_delivery():
    config = RunConfig()
    compared = {flag[2:].replace("-", "_") for flag in compared_options(config)}
    free = {spec.name for spec in SPECS if spec.effect in (Effect.FILES, Effect.DELIVERY)}
    assert compared == {*BY_NAME} - free
    assert {"device", "devices", "dataset_path", "wandb"} <= free
