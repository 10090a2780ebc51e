"""Removes the session's workarounds for rules of the SDK: the test double notices each time."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf
from poplar_double import engine, installed
from support.sessions import CPU, SGD, make_model, make_program, run
from support.sessions import data as make_data

from ipucnn.config.options import RunConfig
from ipucnn.errors import ConfigurationError
from ipucnn.sessions.factory import create_session
from ipucnn.sessions.host.session import HostSession
from ipucnn.sessions.poplar import device, errors, model


def predicted(**options):
    """Returns the shape of a session's predictions on two replicas."""
    session = create_session("auto", config=RunConfig(num_replicas=2, **options))
    return session.predictor(make_model("group")).predict([make_data(20, 1)[0]])[0].shape


@pytest.mark.parametrize("how", ["made-up data", "no device"])
def test_missing_predictions_are_filled_up(monkeypatch, tmp_path, how):
    """Zeros of only one replica, or of one micro-batch: not a fault of the program."""
    synthetic = "--use_synthetic_data --synthetic_data_initializer=random"
    flags = synthetic if how == "made-up data" else f"--executable_cache_path={tmp_path}"
    monkeypatch.setenv("TF_POPLAR_FLAGS", flags)
    options = {"compile_only": how == "no device", "validation_micro_batch_size": 2}
    with installed():
        assert predicted(**options)[0] == 20
    monkeypatch.setattr(device.Ipus, "gives_zeros", False)
    with installed(), pytest.raises(RuntimeError, match="images were sent to the IPUs, and"):
        predicted(**options)
    assert device.gives_nothing_back() == (how == "made-up data")


def test_missing_remote_memory_is_explained(monkeypatch):
    def train():
        with installed(remote_memory=False, gc_info=False):
            program = make_program(4, 2, 1, updates_per_epoch=1)
            session = create_session("auto", config=RunConfig(on_demand=False))
            run(session, make_model("group"), program, SGD, *make_data(8, 1))

    with pytest.raises(ConfigurationError, match="no remote memory"):
        train()
    monkeypatch.setattr(errors, "CASES", [c for c in errors.CASES if "remote memory" not in c.pattern])
    with pytest.raises(tf.errors.FailedPreconditionError):
        train()


@pytest.mark.slow
def test_variance_of_a_group_is_unbiased_as_for_one_replica(monkeypatch):
    """Without the rule the test double uses the group's N."""
    program = make_program(4, 2, 2, updates_per_epoch=1, dbn_replica_group_size=2)
    images, labels = make_data(program.global_batch_size, 5)
    host = run(HostSession(CPU), make_model("batch"), program, SGD, images, labels)

    def far():
        with installed():
            session = create_session("auto", config=RunConfig(num_replicas=2))
            result = run(session, make_model("batch"), program, SGD, images, labels)
        return max(np.abs(host[0][name] - result[0][name]).max() for name in host[0])

    assert far() < 1e-6
    monkeypatch.setattr(engine, "_unbias_as_a_replica", lambda *arguments: None)
    assert far() > 1e-3


def rounded_at_random(program, rounding, replicas=1):
    """Trains and predicts; returns the models that rounded at random, and all models."""
    options = dict(precision=program.precision, stochastic_rounding=rounding, num_replicas=replicas)
    with installed() as machine:
        session = create_session("auto", config=RunConfig(**options))
        images, labels = make_data(8, 1)
        trained = run(session, make_model("batch"), program, SGD, images, labels)
        trained.trainer.predictor.predict([images])
    rounded = machine.rounded_at_random
    return {model for (model, _), names in rounded.items() if names}, {model for model, _ in rounded}


@pytest.mark.slow
def test_only_training_rounds_stochastically_in_a_pipeline(monkeypatch):
    """Without the scopes, or with a scope around the whole call, other programs of a training run do, too."""
    pipeline = dict(
        num_stages=2, pipeline_splits=("relu0",), device_mapping=(0, 1), ipus_per_replica=2, num_ipus=2
    )
    program = make_program(2, 4, 1, updates_per_epoch=1, precision="16.16", **pipeline)
    every = {"training", "validation", "statistics"}
    assert rounded_at_random(program, "ON") == ({"training"}, every)
    monkeypatch.setattr(model, "_round_to_nearest", lambda layer, api: None)
    assert rounded_at_random(program, "ON")[0] == every
    running = device.Ipus.running

    @contextlib.contextmanager
    def scoped(self, training):
        with running(self, training), self.api.ipu.scopes.stochastic_rounding(False):
            yield

    monkeypatch.setattr(device.Ipus, "running", scoped)
    assert rounded_at_random(program, "ON")[0] == every


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "rounding", "is_averaged"), [("16.32", "RI", True), ("16.16", "ON", False)]
)
def test_only_training_rounds_stochastically_and_replicas_average_only_statistics_that_are_read(
    monkeypatch, precision, rounding, is_averaged
):
    """With 16-bit weights the statistics are recomputed before each use."""
    program = make_program(2, 2, 2, updates_per_epoch=1, precision=precision)
    mean, averaged = device.Ipus.mean_over_replicas, []

    def noted(self, value):
        averaged.append(getattr(value, "name", ""))
        return mean(self, value)

    monkeypatch.setattr(device.Ipus, "mean_over_replicas", noted)
    of_statistics = set() if is_averaged else {"statistics"}
    expected = {"training"}, {"training", "validation"} | of_statistics
    assert rounded_at_random(program, rounding, replicas=2) == expected
    assert any("moving" in name for name in averaged) == is_averaged


@pytest.mark.slow
def test_moments_that_a_layer_computes_itself_are_noticed(monkeypatch):
    def own_moments(self, inputs):
        x = tf.cast(inputs, tf.float32)
        mean, variance = tf.nn.moments(x, [0, 1, 2])
        y = (x - mean) * tf.math.rsqrt(variance + self.epsilon)
        return tf.cast(y, inputs.dtype), mean[None], variance[None]

    program = make_program(2, 2, 2, updates_per_epoch=1, precision="16.16", dbn_replica_group_size=2)
    options = dict(num_replicas=2, precision="16.16", dbn_replica_group_size=2)
    monkeypatch.setattr(model.BatchStatistics, "call", own_moments)
    with installed(), pytest.raises(NotImplementedError, match="over the samples of replicas"):
        session = create_session("auto", config=RunConfig(**options))
        run(session, make_model("batch"), program, SGD, *make_data(8, 1))
