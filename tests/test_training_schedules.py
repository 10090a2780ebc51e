"""Learning-rate schedules against formulas written out here, and against Keras' where Keras has them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipucnn.errors import ConfigurationError
from ipucnn.training.schedules import largest_rate, make_schedule

UPDATES = np.arange(0, 60)


def schedule(name, params, **values):
    settings = dict(global_batch_size=4, weight_updates_per_epoch=10, num_epochs=5)
    settings.update(values)
    return make_schedule(name, params, **settings)


def test_const_scales_with_the_global_batch():
    np.testing.assert_allclose(schedule("const", {"initial_learning_rate": 0.01})(UPDATES), 0.04, rtol=1e-6)


def test_learning_rate_is_absolute():
    np.testing.assert_allclose(schedule("const", {}, learning_rate=0.3)(UPDATES), 0.3, rtol=1e-6)


def test_cosine_equals_its_formula():
    rates = schedule("cosine", {"initial_learning_rate": 0.25, "epochs_to_total_decay": 4})(UPDATES)
    naive = [0.5 * (1 + math.cos(math.pi * min(u, 40) / 40)) for u in UPDATES]
    np.testing.assert_allclose(rates, naive, rtol=1e-6, atol=1e-7)


def test_cosine_decays_over_the_run_by_default_less_the_shifted_warm_up():
    rates = schedule("cosine", {}, learning_rate=1.0, warmup={"warmup_mode": "shift", "warmup_epochs": 2})(
        UPDATES
    )
    assert rates[20] == 1.0 and rates[50] == 0.0 and 0 < rates[49] < 0.01


@pytest.mark.parametrize("mode", ["shift", "mask"])
@given(st.integers(1, 4))
def test_warm_up_equals_its_formula(mode, epochs):
    base = [0.5 * (1 + math.cos(math.pi * min(u, 30) / 30)) for u in range(100)]
    n = epochs * 10
    if mode == "shift":
        naive = [base[u - n] if u >= n else base[0] * (u + 1) / (n + 1) for u in UPDATES]
    else:
        naive = [base[u] * (1 if u >= n else (u + 1) / (n + 1)) for u in UPDATES]
    rates = schedule(
        "cosine",
        {"initial_learning_rate": 0.25, "epochs_to_total_decay": 3},
        warmup={"warmup_mode": mode, "warmup_epochs": epochs},
    )(UPDATES)
    np.testing.assert_allclose(rates, naive, rtol=1e-5, atol=1e-7)


def test_staircase_holds_the_rate_through_an_epoch():
    smooth = schedule("cosine", {}, learning_rate=1.0)
    stairs = schedule("cosine", {}, learning_rate=1.0, staircase=True)
    np.testing.assert_array_equal(stairs(UPDATES), smooth(UPDATES // 10 * 10))


def test_polynomial_and_stepped_are_keras():
    keras = pytest.importorskip("tensorflow").keras
    polynomial = keras.optimizers.schedules.PolynomialDecay(0.4, 30, 0.04, 2.0)
    ours = schedule(
        "polynomial",
        {
            "initial_learning_rate": 0.1,
            "epochs_to_total_decay": 3,
            "end_learning_rate_ratio": 0.1,
            "power": 2,
        },
    )(UPDATES)
    np.testing.assert_allclose(ours, [float(polynomial(int(u))) for u in UPDATES], rtol=1e-5)
    stepped = keras.optimizers.schedules.PiecewiseConstantDecay([10, 25], [1.0, 0.1, 0.01])
    ours = schedule("stepped", {"boundaries": [1, 2.5], "values": [1.0, 0.1, 0.01]})(UPDATES)
    np.testing.assert_allclose(ours, [float(stepped(int(u))) for u in UPDATES], rtol=1e-6)


def test_a_step_within_the_first_epoch():
    rates = schedule("stepped", {"boundaries": [0, 0.5], "values": [3.0, 2.0, 1.0]})(UPDATES)
    np.testing.assert_array_equal(rates, [3.0 if u <= 0 else 2.0 if u <= 5 else 1.0 for u in UPDATES])


@pytest.mark.parametrize("updates", [1, 2**20, 2**20 + 1, 2_500_000])
def test_the_largest_rate_of_a_long_run_is_found_in_little_memory(updates):
    sizes = []

    def rising(steps):
        sizes.extend([len(steps)])
        return steps / 2

    assert largest_rate(rising, updates) == (updates - 1) / 2
    assert sum(sizes) == updates and max(sizes) <= 2**20
    assert largest_rate(lambda steps: -rising(steps), updates) == 0


def test_exponential_equals_its_formula():
    rates = schedule("exponential", {"epochs_to_decay": 2, "decay_rate": 0.5}, learning_rate=1.0)(UPDATES)
    np.testing.assert_allclose(rates, 0.5 ** (UPDATES / 20), rtol=1e-6)


@pytest.mark.parametrize(
    "name, params, warmup, message",
    [
        # A missing key is named first, with the known keys.
        ("cosine", {"epoch_to_total_decay": 3}, None, "lacks initial_learning_rate"),
        ("stepped", {"boundaries": [-1], "values": [1, 2]}, None, "boundaries of .* is -1"),
        ("cosine", {"initial_learning_rate": 1, "epoch_to_total_decay": 3}, None, "unknown key 'epoch_to"),
        ("cosine", {}, None, "lacks initial_learning_rate"),
        ("stepped", {"boundaries": [1], "values": [1]}, None, "1 boundaries and 1 values"),
        ("const", {"initial_learning_rate": "fast"}, None, "not a number"),
        ("const", {"initial_learning_rate": 1}, {"warmup_mode": "slow", "warmup_epochs": 1}, "'slow'"),
        ("const", {"initial_learning_rate": 1}, {"warmup_epochs": 1}, "lacks warmup_mode"),
        ("exponential", {"initial_learning_rate": 1, "epochs_to_decay": 0, "decay_rate": 1}, None, "above 0"),
    ],
)
def test_wrong_parameters_are_refused(name, params, warmup, message):
    with pytest.raises(ConfigurationError, match=message) as error:
        schedule(name, params, warmup=warmup)
    assert error.value.hint


def test_missing_key_error_lists_the_keys():
    with pytest.raises(ConfigurationError) as error:
        schedule("cosine", {"epoch_to_total_decay": 3})
    assert error.value.hint == "its keys are initial_learning_rate, epochs_to_total_decay"
    with pytest.raises(ConfigurationError) as error:
        schedule("cosine", {"initial_learning_rate": 1, "epoch_to_total_decay": 3})
    assert "epochs_to_total_decay" in error.value.hint and "its keys" not in error.value.hint
