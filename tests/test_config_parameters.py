"""The described formulas of schedules, warm-ups and optimizers, evaluated as they are written, against the code."""

import shlex

import numpy as np
import pytest

from ipucnn.config.parameters import METHODS, method_of, names_of
from ipucnn.config.resolve import resolve
from ipucnn.training.optimizer_settings import make_settings, settings_of_run
from ipucnn.training.schedules import make_schedule

PER_EPOCH, EPOCHS, BATCH = 10, 8, 4
NUMPY = {name: getattr(np, name) for name in ("sqrt", "cos", "pi")}
NAMES = {**NUMPY, "norm": np.linalg.norm, "min": min, "sum": sum}


def schedule(name, params, **more):
    sizes = {"global_batch_size": BATCH, "weight_updates_per_epoch": PER_EPOCH, "num_epochs": EPOCHS}
    return make_schedule(name, params, **sizes, **more)


def ids(method):
    return method.name


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("const", {}),
        ("cosine", {"epochs_to_total_decay": 3}),
        ("cosine", {}),
        ("polynomial", {}),
        ("polynomial", {"epochs_to_total_decay": 5, "end_learning_rate_ratio": 0.2, "power": 2}),
        ("exponential", {"epochs_to_decay": 2, "decay_rate": 0.7}),
        ("stepped", {"boundaries": [1, 2.5], "values": [3, 2, 1]}),
    ],
)
def test_formulas_of_schedules(name, params):
    method = method_of("lr_schedule_params", name)
    own = params if name == "stepped" else {"initial_learning_rate": 0.25, **params}
    known = {**NAMES, **method.defaults, "epochs_to_total_decay": EPOCHS, **own, "rate": 0.25 * BATCH}
    expected = [eval(method.formula, {**known, "e": k / PER_EPOCH}) for k in range(PER_EPOCH * EPOCHS)]
    rates = schedule(name, own)(np.arange(PER_EPOCH * EPOCHS))
    np.testing.assert_allclose(rates, expected, rtol=1e-6, atol=1e-7)
    assert name == "const" or len(set(expected)) > 2


@pytest.mark.parametrize("mode", names_of("lr_warmup_params"))
def test_formulas_of_warm_ups(mode):
    warmup = {"warmup_mode": mode, "warmup_epochs": 1.55}
    params = {"epochs_to_total_decay": 3}
    plain = schedule("cosine", params, learning_rate=1.0)
    known = {**NAMES, "schedule": lambda k: float(plain(np.array([k]))[0]), "n": 15}
    formula = method_of("lr_warmup_params", mode).formula
    expected = [eval(formula, {**known, "k": k}) for k in range(50)]
    rates = schedule("cosine", params, learning_rate=1.0, warmup=warmup)(np.arange(50))
    np.testing.assert_allclose(rates, expected, rtol=1e-6, atol=1e-7)


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
    schedule(
        config.lr_schedule,
        config.lr_schedule_params,
        learning_rate=config.learning_rate,
        warmup=config.lr_warmup_params,
    )
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
