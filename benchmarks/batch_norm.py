"""Milliseconds of batch norm, forward and backward: grouped, one native call per group, one for the whole batch.

Usage: python benchmarks/batch_norm.py [rounds]
"""

import os
import statistics
import sys
import time

SHAPES = [  # (fused batch, height, width, channels), groups
    ((128, 32, 32, 16), 4),
    ((128, 32, 32, 16), 16),
    ((128, 16, 16, 32), 16),
    ((128, 16, 16, 32), 4),
    ((128, 8, 8, 64), 4),
    ((128, 16, 16, 96), 16),
    ((128, 8, 8, 144), 16),
    ((128, 4, 4, 240), 16),
    ((128, 2, 2, 672), 16),
    ((128, 1, 1, 1152), 16),
]


def main() -> None:
    from ipucnn.sessions.host.environment import import_tensorflow

    tf = import_tensorflow()
    from ipucnn.models.layers import micro_batches

    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    kinds = {
        "grouped": micro_batches._grouped_batch_norm,
        "native per group": micro_batches._native_batch_norm,
        "native, one group": lambda x, g, b, e, k: micro_batches._native_batch_norm(x, g, b, e, 1),
    }
    print(f"TensorFlow {tf.__version__}, {os.cpu_count()} cores, medians of {rounds} rounds, interleaved, ms")
    for shape, groups in SHAPES:
        x, dy = (tf.random.stateless_normal(shape, [seed, 0]) for seed in (1, 2))
        gamma, beta = tf.ones(shape[-1]), tf.zeros(shape[-1])
        steps = {}
        for name, norm in kinds.items():

            def step(norm=norm):
                with tf.GradientTape() as tape:
                    tape.watch([x, gamma, beta])
                    y = norm(x, gamma, beta, 1e-3, groups)[0]
                return tape.gradient(y, [x, gamma, beta], output_gradients=dy)

            steps[name] = tf.function(step, autograph=False)
            steps[name]()
        times = {name: [] for name in steps}
        for _ in range(rounds):
            for name, step in steps.items():
                started = time.perf_counter()
                step()[0].numpy()
                times[name].append(1e3 * (time.perf_counter() - started))
        row = "  ".join(f"{name} {statistics.median(t):6.2f}" for name, t in times.items())
        print(f"{shape!s:20} {groups:3} groups  {row}", flush=True)


if __name__ == "__main__":
    main()
