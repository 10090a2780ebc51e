"""Peak memory and time of the host session with and without --recomputation.

Usage: python benchmarks/recomputation.py [--model cifar_resnet56] [--stages 4] [--micro-batch 32] [--accumulate 16]

Each runs in a process of its own: a first weight update, which compiles, and three that are timed.  Printed are the
process's largest resident memory above what it had before the first weight update, and the time of a weight update.
"""

import argparse
import json
import resource
import subprocess
import sys
import time


def worker(args):
    import dataclasses

    import numpy as np

    from ipucnn.config.options import RunConfig
    from ipucnn.models.registry import get_model
    from ipucnn.sessions.factory import create_session
    from ipucnn.training.losses import make_loss
    from ipucnn.training.optimizers import make_settings
    from ipucnn.training.program import make_program

    config = dataclasses.replace(
        RunConfig(), micro_batch_size=args.micro_batch, gradient_accumulation_count=args.accumulate, validation=False,
        ipus_per_replica=args.stages, pipeline_splits=("auto",), recomputation=args.worker == "on",
    )  # fmt: skip
    session = create_session("cpu", config=config)
    import tensorflow as tf

    from ipucnn.models.build import BuildOptions, build_model

    model = build_model(get_model(args.model), BuildOptions((32, 32, 3), 10, seed=1))
    blocks = [layer.name for layer in model.layers if type(layer).__name__ == "Add"]
    splits = [blocks[len(blocks) * i // args.stages] for i in range(1, args.stages)]
    program = make_program(config, 10**6, seed=0).with_splits(splits)
    optimizer = make_settings("sgd", {}, global_batch_size=program.global_batch_size)
    rates = lambda updates: np.full(np.shape(updates), 1e-3, np.float32)  # noqa: E731
    session.compile(model, program, optimizer, make_loss("cross_entropy"), rates)
    size = session.samples_per_element
    rng = np.random.default_rng(0)
    images = tf.constant(rng.normal(size=(size, 32, 32, 3)).astype("float32"))
    labels = tf.constant(rng.integers(0, 10, size).astype("int32"))
    batches = session.feed(tf.data.Dataset.from_tensors((images, labels)).repeat())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    session.execute(batches, 1)
    started = time.perf_counter()
    session.execute(batches, 3)
    update_s = (time.perf_counter() - started) / 3
    above = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(
        json.dumps(
            {"above_start_mib": above, "update_s": update_s, "fused": session.program.fused_micro_batches}
        )
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="cifar_resnet56")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--accumulate", type=int, default=16)
    parser.add_argument("--worker", choices=("on", "off"))
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    for which in ("off", "on"):
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", which]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        print(f"recomputation {which:4}", done.stdout.splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
