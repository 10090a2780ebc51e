"""The described formulas of optimizers, evaluated as they are written, against the code; test_training_schedules.py has
those of schedules.
"""

import json
import shlex

import numpy as np
import pytest

from ipucnn.config.parameters import METHODS, method_of
from ipucnn.config.resolve import resolve
from ipucnn.errors import EXIT_USAGE, ConfigurationError
from ipucnn.runs.setup import learning_rates
from ipucnn.training.optimizer_settings import make_settings, settings_of_run
from ipucnn.training.program import make_program

BATCH = 4
NAMES = {"sqrt": np.sqrt, "norm": np.linalg.norm, "sum": sum}


def ids(method):
    return method.name


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("sgd", {}),
        ("sgd", {"momentum": 0.9, "nesterov": True}),
        ("lars", {"eeta": 0.1, "epsilon": 0.01, "weight_decay": 0.1}),
        ("adam", {}),
        ("adamw", {"beta_1": 0.8, "beta_2": 0.9, "epsilon": 0.1}),
        ("rmsprop", {}),
        ("rmsprop", {"momentum": 0.9, "epsilon": 0.1}),
        ("rmsprop", {"base_decay_exponent": -4}),
    ],
)
def test_formulas_of_optimizers(name, params):
    import tensorflow as tf

    from ipucnn.training.optimizers import Optimizer

    method, rng = method_of("optimizer_params", name), np.random.default_rng(3)
    weight = rng.normal(size=(3, 4))
    variable, rate = tf.Variable(weight, dtype=tf.float32), 0.05
    settings = make_settings(name, params, global_batch_size=BATCH)
    optimizer = Optimizer(settings, {"w": variable})
    known = {**NAMES, **method.defaults, **params, "w": weight, "m": 0.0, "s": 0.0, "v": 0.0}
    if params.get("base_decay_exponent"):
        known["rho"] = 1 - 2 ** params["base_decay_exponent"] * BATCH
    for k in (1, 2, 3):
        gradient = rng.normal(size=weight.shape)
        known.update(g=gradient.copy(), rate=rate, k=k)
        exec(method.formula, known)
        optimizer.apply([tf.constant(gradient, tf.float32)], tf.constant(rate), tf.constant(k - 1))
        np.testing.assert_allclose(variable.numpy(), known["w"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS, ids=ids)
def test_examples_are_accepted(method):
    words = shlex.split(method.example)
    flags = {flag[2:].replace("-", "_"): value for flag, value in zip(words[::2], words[1::2])}
    config = resolve("train", flags, model="toy_model").config
    learning_rates(config, make_program(config, 100, seed=0))
    settings_of_run(config, BATCH)
    value = getattr(config, method.option)
    assert method.name in (value.get("name"), value.get("warmup_mode"), config.optimizer, config.lr_schedule)
    assert set(value) - {"name"} <= {*method.defaults, "momentum"}


def test_help_describes_a_method(succeeds):
    out, _ = succeeds("train", "--help", "Polynomial")
    for text in ("end_learning_rate_ratio", "default: 0.0", "required", "Keras's PolynomialDecay", "formula"):
        assert text in out
    assert "exponential: keys" not in out
    out, _ = succeeds("train", "--help", "epochs_to_decay")
    assert "exponential: keys" in out and "cosine: keys" not in out


@pytest.mark.parametrize(
    "word, title", [("eeta", "lars: keys"), ("adam", "adam: keys"), ("Cosine", "cosine: keys")]
)
def test_help_without_a_command_describes_a_method(succeeds, word, title):
    out, _ = succeeds("--help", word)
    assert title in out and "formula" in out


@pytest.mark.parametrize(
    "key, flag",
    [
        ("weight_decay", "--weight-decay"),
        ("learning_rate", "--learning-rate"),
        ("clipnorm", "--clip-gradient-norm"),
    ],
)
def test_a_parameter_that_is_an_option_is_named(key, flag):
    with pytest.raises(ConfigurationError, match=key) as error:
        make_settings("adam", {key: 0.1}, global_batch_size=8)
    assert f"{flag} 0.1" in error.value.hint


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("lr_schedule_params", {"initial_learning_rate": 0.1}, "'{\"initial_learning_rate\": 0.1}'"),
        ("validation", False, ""),
        ("available_memory_proportion", [20, 40], "20 40"),
        ("model_name", "my net.keras", "'my net.keras'"),
    ],
)
def test_an_option_among_parameters_is_written_as_a_shell_takes_it(run, key, value, words):
    command = ("train", "toy_model", "--dataset", "digits", "--dry-run")
    code, _, err = run(*command, "--optimizer-params", json.dumps({key: value}), columns=400)
    assert code == EXIT_USAGE
    hint = err.splitlines()[-1].partition("of its own: ")[2]
    option = "--no-validation" if value is False else f"--{key.replace('_', '-')} {words}"
    assert hint == option
    if key != "model_name":
        stages = ("--pipeline-splits", "flatten") if isinstance(value, list) else ()
        assert run(*command, *shlex.split(hint), *stages)[0] == 0
