"""The contract of sessions: one body for the host and the test double of the SDK, against formulas in NumPy."""

import numpy as np
import pytest
import tensorflow as tf
from poplar_double import installed
from support.reference import Naive
from support.sessions import (
    CPU,
    PLAIN,
    SGD,
    batches,
    constant,
    data,
    evaluated_now,
    make_model,
    make_program,
    make_trainer,
    run,
    values,
)

from ipucnn.config.options import RunConfig
from ipucnn.sessions.evaluated import replaced
from ipucnn.sessions.factory import create_session
from ipucnn.sessions.host.session import HostSession
from ipucnn.sessions.session import (
    ExecutionFinished,
    NotFiniteError,
    Stopped,
    UpdatesDone,
    ValidationDue,
    train,
)
from ipucnn.training.losses import Loss

PIPELINE = dict(
    num_stages=2, pipeline_splits=("relu0",), device_mapping=(0, 1), ipus_per_replica=2, num_ipus=2
)


@pytest.fixture(params=["host", "ipu"])
def session(request):
    """Returns a function from options of a run to a session on the host, or on the test double of the SDK."""
    with installed():
        yield (
            lambda **options: (
                HostSession(CPU, RunConfig(**options))
                if request.param == "host"
                else create_session("ipu", config=RunConfig(**options))
            )
        )


def scores(logits, labels):
    """Returns loss and accuracy, written out."""
    shifted = np.float64(logits) - logits.max(axis=1, keepdims=True)
    probabilities = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
    return -np.log(probabilities[np.arange(len(labels)), labels]).mean(), np.mean(logits.argmax(1) == labels)


@pytest.mark.slow_cases("host")
def test_a_predictor_computes_the_networks_logits_and_scores(session):
    """Batches of any size; samples of weight 0 do not count; a validation stops between batches."""
    model, (images, labels) = make_model("group"), data(30, 8)
    predictor, sizes = session(num_replicas=2).predictor(model), [7, 1, 19, 3]
    parts = np.split(images, np.cumsum(sizes)[:-1])
    expected = model(images, training=False).numpy()
    predicted = predictor.predict(parts)
    given = list(predictor.logits((part, n) for n, part in enumerate(parts)))
    for n, ((part, number), logits) in enumerate(given):
        assert number == n and part is parts[n]
        for one in (logits, predicted[n]):
            np.testing.assert_allclose(one, model(part, training=False), rtol=0, atol=1e-5)
    counts = np.float32(np.arange(30) % 4 > 0)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels, counts)).batch(10)
    loss = Loss("cross_entropy")
    metrics = predictor.evaluate(dataset, loss)
    is_sample = counts > 0
    loss_of_samples, accuracy = scores(expected[is_sample], labels[is_sample])
    assert metrics["samples"] == is_sample.sum() and metrics["accuracy"] == pytest.approx(accuracy)
    assert metrics["loss"] == pytest.approx(loss_of_samples, abs=1e-5)
    calls = []
    with pytest.raises(Stopped):
        predictor.evaluate(dataset, loss, lambda: calls.append(1) or len(calls) > 1)


def test_training_is_a_sequence_of_events(session):
    """Progress, then each execution and its validation; samples and learning rate are those of the execution."""
    program = make_program(
        2,
        2,
        updates_per_epoch=4,
        weight_updates_per_execution=2,
        num_executions=2,
        executions_per_validation=1,
    )
    trained = run(session(), make_model("batch"), program, SGD, *data(32, 5))
    kinds = [type(event) for event in trained.events if not isinstance(event, UpdatesDone)]
    assert kinds == 2 * [ExecutionFinished, ValidationDue]
    finished = [event for event in trained.events if isinstance(event, ExecutionFinished)]
    assert [event.weight_updates for event in finished] == [2, 4] and finished[1].samples == 16
    assert [event.learning_rate for event in finished] == pytest.approx([0.05 / 2, 0.05 / 4])
    report = trained.trainer.compilation
    assert report.first_update_s > 0 and report.num_parameters == make_model("batch").count_params()


@pytest.mark.slow_cases("ipu-batch", "ipu-custom")
@pytest.mark.slow_cases("host-custom")
@pytest.mark.parametrize("norm", ["batch", "custom"])
def test_a_trainer_continues_from_a_state(session, norm):
    """Half of a run, and the rest in another trainer, give the bytes of one run."""
    program = make_program(2, 2, updates_per_epoch=4, weight_updates_per_execution=2, num_executions=2)
    images, labels = data(32, 5)
    whole = run(session(), make_model(norm, dropout=0.5), program, SGD, images, labels)
    dataset = batches(program, images, labels)
    first = make_trainer(session(), make_model(norm, dropout=0.5), program)
    for event in train(first, dataset):
        if isinstance(event, ExecutionFinished):
            break
    state = values(first.state.weights), values(first.state.slots), first.state.weight_updates
    rest = run(session(), make_model(norm, seed=9, dropout=0.5), program, SGD, images, labels, state=state)
    for one, other in zip(whole[:2], rest[:2]):
        assert list(one) == list(other)
        for name, value in one.items():
            assert value.tobytes() == other[name].tobytes(), name


@pytest.mark.slow
@pytest.mark.slow_cases("host-pipeline", "ipu-16.16")
@pytest.mark.parametrize("kind", ["pipeline", "16.16"])
def test_recomputed_statistics_are_means_over_the_next_batches(session, kind):
    """Training's own statistics stay; within the block the predictor uses the recomputed ones."""
    changes = PIPELINE if kind == "pipeline" else {"precision": kind}
    program = make_program(2, 4, updates_per_epoch=3, **changes)
    (images, labels), options = data(48, 4), {"precision": program.precision}
    trainer = make_trainer(session(**options), make_model("batch"), program, PLAIN, constant(0.0))
    dataset = batches(program, images, labels)
    list(train(trainer, dataset))
    before = values(trainer.state.weights)
    evaluated = evaluated_now(trainer, dataset)
    assert evaluated.statistics == "recomputed over 3 weight updates' batches" and not evaluated.resumed
    naive, wide = Naive("batch", {}, {}, []), {name: np.float64(value) for name, value in before.items()}
    measured = [naive.forward(wide, images[24 + 2 * i : 26 + 2 * i], 1)[1] for i in range(12)]
    tolerance = 1e-4 if kind == "pipeline" else 0.03
    assert len(evaluated.values) == 4
    for name, value in evaluated.values.items():
        layer, moving = name.split("/")
        mean = np.mean([one[layer][moving == "moving_variance"] for one in measured], axis=0)
        np.testing.assert_allclose(value, mean, rtol=tolerance, atol=tolerance, err_msg=name)
    after = values(trainer.state.weights)
    assert all(after[name].tobytes() == value.tobytes() for name, value in before.items())
    (plain,) = trainer.predictor.predict([images[:4]])
    with replaced(trainer.state.weights, evaluated.values):
        (recomputed,) = trainer.predictor.predict([images[:4]])
    assert np.abs(recomputed - plain).max() > 1e-3


@pytest.mark.slow
def test_averaged_weights_are_evaluated_and_training_goes_on_with_its_own(session):
    program = make_program(2, 2, updates_per_epoch=4)
    optimizer = ("sgd", {"momentum": 0.9}, {"ema_decay": 0.5})
    trained = run(session(), make_model("batch"), program, optimizer, *data(32, 5))
    state = trained.trainer.state
    evaluated = evaluated_now(trained.trainer, None)
    assert evaluated.statistics == "averaged as the weights are" and evaluated.resumed == set(state.weights)
    for name, value in evaluated.values.items():
        assert value.tobytes() == trained.slots[f"{name}/average"].tobytes()
        assert trained.weights[name].tobytes() == state.weights[name].numpy().tobytes()
    assert any(np.abs(value - trained.weights[name]).max() > 1e-4 for name, value in evaluated.values.items())


def test_a_loss_that_is_not_finite_ends_training(session):
    program = make_program(2, updates_per_epoch=2)
    images, labels = data(4, 0)
    is_host = isinstance(session(), HostSession)
    where = r"at weight update [12]" if is_host else "in the execution of weight updates 1 to 2"
    with pytest.raises(NotFiniteError, match=rf"the loss became (nan|inf) {where}") as error:
        run(
            session(),
            make_model("none"),
            program,
            PLAIN,
            images * np.float32(1e30),
            labels,
            schedule=constant(1e30),
        )
    assert "learning rate" in error.value.hint


def test_a_program_in_another_precision_is_refused(session):
    with pytest.raises(ValueError, match=r"a program in 16\.16 for a session in 32\.32"):
        make_trainer(session(), make_model("none"), make_program(2, precision="16.16"))
