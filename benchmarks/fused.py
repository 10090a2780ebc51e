"""How many micro-batches are best computed as one: images per second of processor time, and peak memory, by samples.

Usage: python benchmarks/fused.py [--rounds 3] [--only cifar_resnet8]

The host session trains with 32 micro-batches of 8 samples per weight update and computes 2, 4, ... of them as one.
Each number has a process of its own, and the processes take turns.  The star marks what the session's own rule takes.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time

MICRO_BATCH, ACCUMULATE = 8, 32
NUMBERS = (2, 4, 8, 16, 32)
CASES = (
    ("efficientnet-b0", 32),
    ("efficientnet-b0", 64),
    ("cifar_resnet8", 32),
    ("resnet50", 64),
    ("mobilenetv2", 96),
)


def worker(name, size, fused):
    """Says what the rule takes; then reads numbers of weight updates, and prints processor seconds and MiB of each."""
    import dataclasses

    import numpy as np

    from ipucnn.config.options import RunConfig
    from ipucnn.machine import host_memory_bytes, peak_memory_bytes
    from ipucnn.models.build import BuildOptions, build_model
    from ipucnn.models.registry import get_model
    from ipucnn.sessions.factory import create_session
    from ipucnn.training.losses import make_loss
    from ipucnn.training.optimizers import make_settings
    from ipucnn.training.program import make_program

    session = create_session("cpu")
    import tensorflow as tf

    from ipucnn.sessions.host.session import activation_bytes_per_sample, choose_fused

    config = dataclasses.replace(
        RunConfig(), micro_batch_size=MICRO_BATCH, gradient_accumulation_count=ACCUMULATE, validation=False
    )
    program = make_program(config, MICRO_BATCH * ACCUMULATE * 1000, seed=0)
    model = build_model(get_model(name), BuildOptions((size, size, 3), 10, seed=1))
    per_sample = activation_bytes_per_sample(model)
    print(choose_fused(ACCUMULATE, MICRO_BATCH, 1, per_sample, host_memory_bytes()), flush=True)
    session.compile(
        model, program.with_fused(fused), make_settings("sgd", {"momentum": 0.9}, global_batch_size=256),
        make_loss("cross_entropy"), lambda updates: np.full(np.shape(updates), 1e-3, np.float32),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    images = rng.normal(size=(256, size, size, 3)).astype("float32")
    labels = rng.integers(0, 10, 256).astype("int32")
    data = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().batch(session.samples_per_element)
    batches, rates = iter(data.prefetch(2)), tf.constant([1e-3])
    for line in sys.stdin:
        started = time.process_time()
        for _ in range(int(line)):
            session._loop.run(batches, rates, tf.constant(0, tf.int64))[0].numpy()
        print(time.process_time() - started, (peak_memory_bytes() or 0) / 2**20, flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        name, size, fused = arguments.worker
        worker(name, int(size), int(fused))
        return
    from importlib.metadata import version

    from ipucnn.machine import cpu_name

    print(f"{cpu_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; Python {platform.python_version()}, "
          f"TensorFlow {version('tensorflow')}")  # fmt: skip
    print(f"images per second of processor time (MiB), micro-batch {MICRO_BATCH}, {arguments.rounds} rounds")
    print(f"{'samples as one':22}" + "".join(f"{MICRO_BATCH * n:>15}" for n in NUMBERS))
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    for name, size in CASES:
        if arguments.only not in (None, name):
            continue
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", name, str(size), str(fused)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )
            for fused in NUMBERS
        ]  # fmt: skip

        def run(process, updates):
            process.stdin.write(f"{updates}\n")
            process.stdin.flush()
            return [float(part) for part in process.stdout.readline().split()]

        chosen = {int(process.stdout.readline()) for process in processes}
        memory = [run(process, 1)[1] for process in processes]
        rates = [[] for _ in processes]
        for _ in range(arguments.rounds):
            for own, process in zip(rates, processes):
                seconds, _ = run(process, 2)
                own.append(2 * MICRO_BATCH * ACCUMULATE / seconds)
        cells = [
            f"{statistics.median(own):.0f}{'*' if number in chosen else ''} ({mib:.0f})"
            for own, mib, number in zip(rates, memory, NUMBERS)
        ]
        print(f"{f'{name}, {size}x{size}':22}" + "".join(f"{cell:>15}" for cell in cells), flush=True)
        for process in processes:
            process.stdin.close()
            process.wait()


if __name__ == "__main__":
    main()
