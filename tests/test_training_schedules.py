"""Learning-rate schedules against formulas; with each kind of warm-up, test_train_dry_run.py compares them."""

import itertools
import math

import numpy as np
import pytest

from ipucnn.errors import ConfigurationError
from ipucnn.training.optimizer_settings import make_settings
from ipucnn.training.schedules import largest_rate, make_schedule

UPDATES = np.arange(0, 60)


def schedule(name, params, **values):
    settings = dict(global_batch_size=4, weight_updates_per_epoch=10, num_epochs=5)
    settings.update(values)
    return make_schedule(name, params, **settings)


def cosine(update, length=40):
    return 0.5 * (1 + math.cos(math.pi * min(update, length) / length))


def root(update):
    return 0.1 + 0.9 * math.sqrt(1 - min(update, 30) / 30)


RATE = {"learning_rate": 1.0}


@pytest.mark.parametrize("name, params, settings, formula", [
    ("const", {"initial_learning_rate": 0.01}, {}, lambda u: 0.04),  # times the global batch
    ("const", {}, {"learning_rate": 0.3}, lambda u: 0.3),
    ("cosine", {"initial_learning_rate": 0.25, "epochs_to_total_decay": 4}, {}, cosine),
    ("cosine", {}, {**RATE, "staircase": True}, lambda u: cosine(u // 10 * 10, 50)),
    ("exponential", {"epochs_to_decay": 2, "decay_rate": 0.5}, RATE, lambda u: 0.5 ** (u / 20)),
    ("polynomial", {"epochs_to_total_decay": 3, "end_learning_rate_ratio": 0.1, "power": 0.5}, RATE, root),
    ("stepped", {"boundaries": [0, 0.5], "values": [3, 2, 1]}, {}, lambda u: 3 if u <= 0 else 2 if u <= 5 else 1),
])  # fmt: skip
def test_schedules_equal_their_formulas(name, params, settings, formula):
    rates = schedule(name, params, **settings)(UPDATES)
    np.testing.assert_allclose(rates, [formula(u) for u in UPDATES], rtol=1e-6, atol=1e-7)


def test_cosine_decays_over_the_run_by_default_less_the_shifted_warm_up():
    rates = schedule("cosine", {}, learning_rate=1.0, warmup={"warmup_mode": "shift", "warmup_epochs": 2})(
        UPDATES
    )
    assert rates[20] == 1.0 and rates[50] == 0.0 and 0 < rates[49] < 0.01
    # A warm-up as long as the run leaves one weight update for the decay.
    rates = schedule("cosine", {}, learning_rate=1.0, warmup={"warmup_mode": "shift", "warmup_epochs": 5})(
        UPDATES
    )
    assert rates[50] == 1.0 and rates[51] == 0.0


@pytest.mark.parametrize("updates", [1, 2**20, 2**20 + 1, 2_500_000])
def test_the_largest_rate_of_a_long_run_is_found_in_little_memory(updates):
    sizes = []

    def rising(steps):
        sizes.extend([len(steps)])
        return steps / 2

    assert largest_rate(rising, updates) == (updates - 1) / 2
    assert sum(sizes) == updates and max(sizes) <= 2**20
    assert largest_rate(lambda steps: -rising(steps), updates) == 0


ONE = {"initial_learning_rate": 1}


@pytest.mark.parametrize("name, params, warmup, message, hint", [
    # A missing key is named first, with the known keys.
    ("cosine", {"epoch_to_total_decay": 3}, None, "lacks initial_learning_rate",
     "its keys are initial_learning_rate, epochs_to_total_decay; `ipucnn train --help cosine`"),
    ("cosine", {**ONE, "epoch_to_total_decay": 3}, None, "unknown key 'epoch_to", "epochs_to_total_decay"),
    ("stepped", {"boundaries": [-1], "values": [1, 2]}, None, "boundaries of .* is -1", "use 0"),
    ("stepped", {"boundaries": [1], "values": [1]}, None, "1 boundaries and 1 values", "give 0"),
    ("const", {"initial_learning_rate": "fast"}, None, "not a number", "give"),
    ("const", ONE, {"warmup_mode": "slow", "warmup_epochs": 1}, "'slow'", "shift"),
    ("const", ONE, {"warmup_epochs": 1}, "lacks warmup_mode", "its keys are"),
    ("exponential", {**ONE, "epochs_to_decay": 0, "decay_rate": 1}, None, "above 0", "1 or more"),
    ("cosine", {**ONE, "epochs_to_total_decay": 0}, None, "above 0", "number of epochs"),
    ("stepped", {"boundaries": [1, 1], "values": [1, 2, 3]}, None, "do not rise", "sort"),
    ("stepped", {"boundaries": 1, "values": [1, 2]}, None, "must be lists", "for example"),
    ("stepped", {"boundaries": [1], "values": 1}, None, "must be lists", "for example"),
])  # fmt: skip
def test_wrong_parameters_are_refused(name, params, warmup, message, hint):
    with pytest.raises(ConfigurationError, match=message) as error:
        schedule(name, params, warmup=warmup)
    assert hint in error.value.hint and ("its keys" in error.value.hint) == ("lacks" in message)


EXTREMES = [0, 1e-45, 1e-12, 0.5, 7, 2000, 1e18, 2**64, 3.4e38]
KEYS = {
    "const": ["initial_learning_rate"],
    "cosine": ["initial_learning_rate", "epochs_to_total_decay"],
    "exponential": ["initial_learning_rate", "epochs_to_decay", "decay_rate"],
    "polynomial": ["initial_learning_rate", "epochs_to_total_decay", "end_learning_rate_ratio", "power"],
}


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.filterwarnings("error")
def test_numbers_give_finite_rates_or_are_refused(name):
    """Two numbers at a time are extreme; the others are 1."""
    warmups = [None, *({"warmup_mode": mode, "warmup_epochs": 3.4e38} for mode in ("shift", "mask"))]
    outcomes = set()
    for one, other in itertools.product(KEYS[name], repeat=2):
        for value, second, warmup in itertools.product(EXTREMES, EXTREMES, warmups):
            params = {**dict.fromkeys(KEYS[name], 1), one: value, other: second}
            try:
                rates = schedule(name, params, warmup=warmup)(np.arange(50))
            except ConfigurationError as error:
                outcomes.add("32 bits" in error.message)
            else:
                assert np.isfinite(rates).all(), params
    assert True in outcomes


@pytest.mark.parametrize("exponent", [2000, 1e38, 1, -4, -59, -2000, -3.4e38])
def test_a_decay_exponent_without_a_rho_is_refused(exponent):
    with pytest.raises(ConfigurationError, match="32 samples must be at least 0 and below 1") as error:
        make_settings("rmsprop", {"base_decay_exponent": exponent}, global_batch_size=32)
    assert error.value.hint == "give base_decay_exponent a number from -58 to -5"


@pytest.mark.parametrize(("exponent", "rho"), [(-5, 0.0), (-6.0, 0.5), (-58, 1 - 2**-53)])
def test_a_decay_exponent_gives_rho(exponent, rho):
    settings = make_settings("rmsprop", {"base_decay_exponent": exponent}, global_batch_size=32)
    assert settings.params["rho"] == rho
