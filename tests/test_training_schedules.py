"""Learning-rate schedules: their formulas, as written here and as the help describes them, and their refusals."""

import itertools
import math

import numpy as np
import pytest

from ipucnn.config.parameters import method_of
from ipucnn.errors import ConfigurationError
from ipucnn.training.optimizer_settings import make_settings
from ipucnn.training.schedules import largest_rate, make_schedule

PER_EPOCH, EPOCHS, BATCH = 10, 8, 4
UPDATES = range(PER_EPOCH * EPOCHS)
WARM_UP, RISING = 1.5, 15  # epochs, and the weight updates in them
RATE = {"initial_learning_rate": 0.25}  # of a sample: 1 for a batch


def schedule(name, params, **settings):
    sizes = {"global_batch_size": BATCH, "weight_updates_per_epoch": PER_EPOCH, "num_epochs": EPOCHS}
    return make_schedule(name, params, **{**sizes, **settings})


def cosine(e, end):
    return 0.5 * (1 + math.cos(math.pi * min(e / end, 1)))


# Name, keys, and the rate after e epochs, for a default decay until the epoch ``end``.
SCHEDULES = [
    ("const", RATE, lambda e, end: 1.0),
    ("cosine", {**RATE, "epochs_to_total_decay": 4}, lambda e, end: cosine(e, 4)),
    ("cosine", RATE, cosine),
    ("exponential", {**RATE, "epochs_to_decay": 2, "decay_rate": 0.5}, lambda e, end: 0.5 ** (e / 2)),
    ("polynomial", RATE, lambda e, end: 1 - min(e / end, 1)),
    ("polynomial", {**RATE, "epochs_to_total_decay": 3, "end_learning_rate_ratio": 0.1, "power": 0.5},
     lambda e, end: 0.1 + 0.9 * math.sqrt(1 - min(e / 3, 1))),
    # A boundary's own weight update still has the value before it.
    ("stepped", {"boundaries": [0, 2.5], "values": [3, 2, 1]}, lambda e, end: 3 if e <= 0 else 2 if e <= 2.5 else 1),
]  # fmt: skip


@pytest.mark.parametrize("name, params, formula", SCHEDULES)
@pytest.mark.parametrize("mode", [None, "shift", "mask"])
@pytest.mark.parametrize("staircase", [False, True])
def test_schedules_equal_their_formulas(name, params, formula, mode, staircase):
    end, expected = EPOCHS - (WARM_UP if mode == "shift" else 0), []
    for k in UPDATES:
        k = k // PER_EPOCH * PER_EPOCH if staircase else k
        after = max(k - RISING, 0) if mode == "shift" else k
        factor = min((k + 1) / (RISING + 1), 1) if mode else 1
        expected.append(factor * formula(after / PER_EPOCH, end))
    warmup = mode and {"warmup_mode": mode, "warmup_epochs": WARM_UP}
    rates = schedule(name, params, warmup=warmup, staircase=staircase)(np.array(UPDATES))
    np.testing.assert_allclose(rates, expected, rtol=1e-6, atol=1e-7)
    if staircase:
        return
    method = method_of("lr_schedule_params", name)
    known = {name: getattr(np, name) for name in ("sqrt", "cos", "pi")}
    known.update(
        min=min, sum=sum, rate=1.0, n=RISING, **{**method.defaults, "epochs_to_total_decay": end, **params}
    )

    def described(k):
        return eval(method.formula, {**known, "e": k / PER_EPOCH})

    of_mode = "schedule(k)" if mode is None else method_of("lr_warmup_params", mode).formula
    by_help = [eval(of_mode, {**known, "schedule": described, "k": k}) for k in UPDATES]
    np.testing.assert_allclose(by_help, expected, rtol=1e-6, atol=1e-7)


def test_a_rate_of_the_batch_replaces_that_of_a_sample():
    assert schedule("const", {}, learning_rate=0.3)(np.arange(3)).tolist() == [np.float32(0.3)] * 3


def test_a_warm_up_takes_whole_weight_updates():
    rates = schedule("const", RATE, warmup={"warmup_mode": "mask", "warmup_epochs": 1.59})(np.arange(20))
    np.testing.assert_allclose(rates, [min((k + 1) / 16, 1) for k in range(20)], rtol=1e-6)


def test_a_warm_up_as_long_as_the_run_leaves_one_weight_update_for_the_decay():
    warmup = {"warmup_mode": "shift", "warmup_epochs": EPOCHS}
    rates = schedule("cosine", RATE, warmup=warmup)(np.arange(90))
    assert rates[80] == 1.0 and rates[81] == 0.0


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
    ("cosine", {}, None, "lacks initial_learning_rate",
     "its keys are initial_learning_rate, epochs_to_total_decay; `ipucnn train --help cosine`"),
    # An unknown key is named before a missing one, which it may stand for.
    ("cosine", {"epoch_to_total_decay": 3}, None, "unknown key 'epoch_to", "epochs_to_total_decay"),
    ("stepped", {"boundaries": [-1], "values": [1, 2]}, None, "boundaries of .* is -1", "use 0"),
    ("stepped", {"boundaries": [1], "values": [1]}, None, "1 boundaries and 1 values", "give 0"),
    ("const", {"initial_learning_rate": "fast"}, None, "not a number", "give"),
    ("const", ONE, {"warmup_mode": "slow", "warmup_epochs": 1}, "'slow'", "shift"),
    ("const", ONE, {"warmup_epochs": 1}, "lacks warmup_mode", "its keys are"),
    ("exponential", {**ONE, "epochs_to_decay": 0, "decay_rate": 1}, None, "above 0", "1 or more"),
    ("cosine", {**ONE, "epochs_to_total_decay": 0}, None, "above 0", "number of epochs"),
    ("stepped", {"boundaries": [1, 1], "values": [1, 2, 3]}, None, "do not rise", "sort"),
    ("stepped", {"boundaries": 1, "values": [1, 2]}, None, "must be lists", "--lr-schedule-params"),
    ("stepped", {"boundaries": [1], "values": 1}, None, "must be lists", "--lr-schedule-params"),
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


def test_the_rate_of_the_last_weight_update_must_fit_into_32_bits():
    last = PER_EPOCH * EPOCHS - 1
    for updates in (last - 0.5, last + 0.5):  # after which the rate is the largest number of 32 bits
        growth = float(np.finfo(np.float32).max) ** (1 / updates)
        params = {**RATE, "epochs_to_decay": 1 / PER_EPOCH, "decay_rate": growth}
        if updates > last:
            assert np.isfinite(schedule("exponential", params)(np.arange(last + 1))).all()
        else:
            with pytest.raises(ConfigurationError, match=f"at weight update {last}, which 32 bits"):
                schedule("exponential", params)


@pytest.mark.parametrize("exponent", [2000, 1e38, 1, -4, -59, -2000, -3.4e38])
def test_a_decay_exponent_without_a_rho_is_refused(exponent):
    with pytest.raises(ConfigurationError, match="32 samples must be at least 0 and below 1") as error:
        make_settings("rmsprop", {"base_decay_exponent": exponent}, global_batch_size=32)
    assert error.value.hint == "give base_decay_exponent a number from -58 to -5"


@pytest.mark.parametrize(("exponent", "rho"), [(-5, 0.0), (-6.0, 0.5), (-58, 1 - 2**-53)])
def test_a_decay_exponent_gives_rho(exponent, rho):
    settings = make_settings("rmsprop", {"base_decay_exponent": exponent}, global_batch_size=32)
    assert settings.params["rho"] == rho
