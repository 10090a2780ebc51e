"""Processor time of a weight update in 16 bits over that in 32, on the host.

Usage: python benchmarks/precision.py [--rounds 7] [--only cifar_resnet8] [--precision 16.16]

For each network (32x32, gradient accumulation 16) one process keeps three sessions: 32 bits, 16 bits rounded to
nearest, and 16 bits rounded stochastically.  They take turns.  Printed are medians over the rounds of the processor
time (all threads) of a weight update, and of the ratios within a round.
"""

import argparse
import dataclasses
import platform
import statistics
import time

ACCUMULATE, SIZE, CLASSES = 16, 32, 10
CASES = (("cifar_resnet8", 8), ("cifar_resnet8", 32), ("efficientnet-b0", 8))
KINDS = (("32.32", "OFF"), ("16", "OFF"), ("16", "ON"))


def make_session(name, micro_batch, precision, rounding):
    """run(weight updates) of a session."""
    import numpy as np

    from ipucnn.config.options import RunConfig
    from ipucnn.models.registry import get_model
    from ipucnn.sessions.factory import create_session
    from ipucnn.training.losses import make_loss
    from ipucnn.training.optimizers import make_settings
    from ipucnn.training.program import make_program

    config = dataclasses.replace(
        RunConfig(), micro_batch_size=micro_batch, gradient_accumulation_count=ACCUMULATE, validation=False,
        precision=precision, stochastic_rounding=rounding,
    )  # fmt: skip
    session = create_session("cpu", config=config)
    import tensorflow as tf

    from ipucnn.models.build import BuildOptions, build_model

    program = make_program(config, 10**6, seed=0)
    optimizer = make_settings("sgd", {"momentum": 0.9}, global_batch_size=program.global_batch_size)
    model = build_model(get_model(name), BuildOptions((SIZE, SIZE, 3), CLASSES, norm="batch", seed=1))
    rates = lambda updates: np.full(np.shape(updates), 1e-3, np.float32)  # noqa: E731
    session.compile(model, program, optimizer, make_loss("cross_entropy"), rates)
    rng = np.random.default_rng(0)
    size = session.samples_per_element
    images = tf.constant(rng.normal(size=(size, SIZE, SIZE, 3)).astype("float32"))
    labels = tf.constant(rng.integers(0, CLASSES, size).astype("int32"))
    batches = session.feed(tf.data.Dataset.from_tensors((images, labels)).repeat())
    return lambda updates: session.execute(batches, updates)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only")
    parser.add_argument("--precision", choices=("16.16", "16.32"), default="16.16")
    parser.add_argument("--round-s", type=float, default=1.5)
    args = parser.parse_args()
    print(
        f"{args.precision}, 32x32, gradient accumulation {ACCUMULATE}, {args.rounds} rounds; processor time"
    )
    print(f"{'network':16} batch    32.32 s  nearest  stochastic")
    for name, micro_batch in CASES:
        if args.only not in (None, name):
            continue
        runs = [
            make_session(name, micro_batch, args.precision if kind == "16" else kind, rounding)
            for kind, rounding in KINDS
        ]
        for run in runs:
            run(1)
        started = time.perf_counter()
        runs[0](1)
        updates = max(1, round(args.round_s / (time.perf_counter() - started)))
        found = []
        for number in range(args.rounds):
            times = {}
            for turn in range(len(runs)):
                which = (number + turn) % len(runs)
                started = time.process_time()
                runs[which](updates)
                times[which] = (time.process_time() - started) / updates
            found.append([times[which] for which in range(len(runs))])
        plain = statistics.median(times[0] for times in found)
        ratios = [statistics.median(times[i] / times[0] for times in found) for i in (1, 2)]
        print(f"{name:16} {micro_batch:5} {plain:10.3f} {ratios[0]:8.2f} {ratios[1]:11.2f}", flush=True)
    import tensorflow as tf

    print(f"Python {platform.python_version()}, TensorFlow {tf.__version__}")


if __name__ == "__main__":
    main()
