"""The training loop of both sessions against a naive one: when it logs, validates and saves."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_runs_resume import assert_same, cut, files, train, training

from ipucnn.config.options import RunConfig
from ipucnn.sessions.session import (
    CheckpointDue,
    ExecutionFinished,
    TrainedPart,
    Trainer,
    TrainState,
    UpdatesDone,
    ValidationDue,
)
from ipucnn.sessions.session import train as run_program
from ipucnn.training.checkpoints import load_checkpoint
from ipucnn.training.program import make_program


def loss_of(update: int) -> float:
    return 1.0 + update % 7 / 8.0


class Stub(Trainer):
    """Runs ``slice_length`` weight updates at a time, but trains nothing."""

    def __init__(self, program, slice_length):
        self.program, self.state = program, TrainState()
        self._slice, self.schedule = slice_length, lambda updates: np.asarray(updates) * 0.5

    def start(self, make_dataset):
        def run(end):
            first = self.state.weight_updates
            updates = range(first, min(end, first + self._slice))
            return TrainedPart([loss_of(u) for u in updates], [u / 1000 for u in updates], 0.1)

        return run


def events_of(program, slice_length, stop_after):
    """Returns the events in order; after ``stop_after`` events a new trainer takes over the state."""
    trainer, events, seen = Stub(program, slice_length), [], 0
    iterator = run_program(trainer, None)
    while True:
        event = next(iterator, None)
        if event is None:
            return events
        seen += 1
        if not isinstance(event, UpdatesDone):
            # Like the recorder: handled first, then counted.
            if isinstance(event, ExecutionFinished) and event.is_logged:
                events.append(("log", event.weight_updates, event.metrics["loss"], event.metrics["accuracy"]))
            elif isinstance(event, (ValidationDue, CheckpointDue)):
                events.append((type(event).__name__, event.weight_updates))
            trainer.state.events_done += 1
        if seen == stop_after:
            state = trainer.state
            trainer = Stub(program, slice_length)
            trainer.state = dataclasses.replace(state)
            iterator, seen = run_program(trainer, None), 0


@given(
    st.integers(1, 24),
    st.integers(1, 4),
    st.sampled_from([0, 0.5, 1, 2, 3, 5, 8]),
    st.sampled_from([0, 0.25, 0.5, 1, 2, 3, 4, 7, 12]),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 5),
)
def test_events_equal_those_of_a_naive_loop(
    updates, epochs, logs, checkpoints, validation, slice_length, stop_after
):
    epochs = 2 * epochs
    config = RunConfig(
        num_epochs=epochs,
        logs_per_epoch=float(logs),
        ckpts_per_epoch=float(checkpoints),
        validation_freq=validation,
    )
    program = make_program(config, updates, seed=0)
    total = updates * epochs
    per_log = program.weight_updates_per_execution * program.executions_per_log
    expected, losses, hits = [], [], []
    for done in range(1, total + 1):
        losses.append(loss_of(done - 1))
        hits.append((done - 1) / 1000)
        if done % per_log == 0:
            expected.append(("log", done, float(np.mean(losses)), float(np.mean(hits))))
            losses, hits = [], []
        execution, rest = divmod(done, program.weight_updates_per_execution)
        if rest:
            continue
        if execution % program.executions_per_validation == 0 or done == total:
            expected.append(("ValidationDue", done))
        every = program.executions_per_checkpoint
        if every and (execution % every == 0 or done == total):
            expected.append(("CheckpointDue", done))
    assert events_of(program, slice_length, 0) == expected
    # Each session gets a few events further than the one before; with one event each, at most a slice.
    assert events_of(program, slice_length, stop_after) == expected


@pytest.mark.slow
def test_short_executions_log_at_the_given_rate_and_continue_to_the_same_bytes(lightly, tmp_path):
    """15 weight updates: logged at their end, saved after every 5."""
    options = {
        **{
            "dataset": "digits",
            "limit_train": "60",
            "limit_eval": "10",
            "seed": "5",
            "micro_batch_size": "4",
        },
        **{"num_epochs": "1", "ckpts_per_epoch": "3", "validation": "False"},
    }
    run, _ = train(tmp_path / "whole", "lenet", options)
    program = run.context.program
    assert (program.weight_updates_per_execution, program.executions_per_log) == (5, 3)
    expected = files(tmp_path / "whole")
    (row,) = [json.loads(line) for line in expected["metrics.jsonl"].decode().splitlines()]
    assert (row["event"], row["weight_updates"], row["epoch"]) == ("execution", 15, 1)
    assert [name for name in expected if "checkpoint-" in name] == [
        f"checkpoints/checkpoint-{n:08d}.npz" for n in (5, 10, 15)
    ]
    at = load_checkpoint(tmp_path / "whole" / "checkpoints" / "checkpoint-00000010.npz").meta["position"]
    losses = at["earlier_losses"] + at["losses"]
    assert len(at["earlier_losses"]) == len(at["losses"]) == 5
    assert row["loss"] != np.mean(at["losses"]) and abs(row["loss"] - np.mean(losses)) < 1
    assert cut(training(tmp_path / "cut", "lenet", options), 6)
    train(tmp_path / "cut", "lenet", options, resume=True)
    assert_same(tmp_path / "cut", expected)
