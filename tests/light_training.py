"""Training in which nothing is compiled, for tests of folders, checkpoints, signals and resuming.

A run takes a quarter of the time of a real one.  Its network, options, state, events, files and checkpoints are those
of the host session; only a weight update and an evaluation are replaced by some NumPy arithmetic on the whole state.
Any part of the state that is lost or restored wrongly changes every later figure.  Images are not read, and each
validation is better than the one before, unless the learning rate is 0.
"""

import time

import numpy as np

from ipucnn.sessions.session import Stopped, TrainedPart

_networks = {}


def benchmark_briefly(patch):
    """Makes the benchmarks of this process skip the warm-up and measure too briefly for meaningful figures.

    Args:
        patch: pytest's monkeypatch, which undoes it.
    """
    from ipucnn.benchmarking import contenders, peak, settings

    make = settings.Limits

    def brief(**values):
        return make(**{**values, "max_warmup_s": 0.0, "execution_s": 0.01})

    patch.setattr(settings, "Limits", brief)
    # Twenty products of 1024x1024 take a second of processor time.
    patch.setattr(peak, "_SMALLEST", 256)
    patch.setattr(peak, "_LEAST_S", 0.0)
    patch.setattr(contenders, "_LEAST_S", 0.005)


def train_lightly(patch, evaluates=False):
    """Makes the runs of this process train without compiling, as the module describes.

    Args:
        patch: pytest's monkeypatch, which undoes it.
        evaluates: whether validations are real ones, of the weights as they are.
    """
    from ipucnn.runs import setup as run_setup
    from ipucnn.sessions.host.session import HostPredictor, HostTrainer

    build, start = run_setup.build, HostTrainer.start

    def build_once(setup):
        """Returns the built network with its initial weights, from a cache: building takes half of a light run."""
        if setup.record.own is not None:  # a name says nothing about the contents of a file
            return build(setup)
        key = repr((setup.record.name, run_setup.build_options(setup), setup.config.freeze))
        if key not in _networks:
            model = build(setup)
            _networks[key] = model, model.get_weights()
        model, weights = _networks[key]
        model.set_weights(weights)
        return model

    patch.setattr(run_setup, "build", build_once)
    patch.setattr(HostTrainer, "trace", lambda trainer, make_dataset: (0.0, 1))
    patch.setattr(HostTrainer, "start", lambda trainer, make_dataset: start(trainer, lambda *place: None))
    patch.setattr(HostTrainer, "feed", lambda trainer, dataset: dataset)
    patch.setattr(HostTrainer, "run", _run)
    if not evaluates:
        patch.setattr(HostPredictor, "evaluate", _evaluate)


def _run(trainer, batches, num_weight_updates):
    started, state = time.perf_counter(), trainer.state
    variables = {**state.weights, **state.slots}
    values = {name: variable.numpy() for name, variable in variables.items()}
    losses, hits = [], []
    numbers = np.arange(state.weight_updates, state.weight_updates + num_weight_updates)
    for number, rate in zip(numbers, trainer.schedule(numbers)):
        losses.append(_size(values))
        hits.append(1 / (2 + number))
        for place, (name, value) in enumerate(values.items()):
            values[name] = np.asarray(value - rate * (value - np.cos(number + place) / 1000), value.dtype)
    for name, variable in variables.items():
        variable.assign(values[name])
    return TrainedPart(losses, hits, time.perf_counter() - started)


def _evaluate(predictor, dataset, loss, stop):
    if stop():
        raise Stopped
    loss = _size({name: variable.numpy() for name, variable in predictor.weights.kept.items()})
    return {"samples": 40.0, "loss": loss, "accuracy": 1 / (1 + loss), "top5": 1 / (1 + loss / 5)}


def _size(values):
    return float(
        sum(np.abs(value, dtype=np.float64).mean() for value in values.values() if value.dtype.kind == "f")
    )
