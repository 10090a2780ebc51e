"""Milliseconds of a depthwise convolution's weight gradient: TensorFlow's kernels against the sum over taps.

Usage: python benchmarks/depthwise.py [rounds]
The layers of EfficientNet-B0 at 32x32, 128 samples.  oneDNN and the default kernels cannot be had in one
process, so two child processes take turns.
"""

import os
import statistics
import subprocess
import sys
import time

SAMPLES = 128
LAYERS = [  # height = width, channels, kernel, stride
    (16, 32, 3, 1), (16, 96, 3, 2), (8, 144, 3, 1), (8, 144, 5, 2), (4, 240, 5, 1), (4, 240, 3, 2),
    (2, 480, 3, 1), (2, 480, 5, 1), (2, 672, 5, 2), (1, 1152, 5, 1), (1, 1152, 3, 1),
]  # fmt: skip


def child() -> None:
    import tensorflow as tf

    from ipucnn.models.layers.per_sample import tap_sum_filter_gradient

    steps = []
    for size, channels, kernel, stride in LAYERS:
        out = -(-size // stride)
        x = tf.random.normal((SAMPLES, size, size, channels))
        dy = tf.random.normal((SAMPLES, out, out, channels))

        def native(x, dy, k=kernel, c=channels, s=stride):
            return tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(
                input=x, filter_sizes=[k, k, c, 1], out_backprop=dy, strides=[1, s, s, 1], padding="SAME"
            )

        def taps(x, dy, k=kernel, s=stride):
            return tap_sum_filter_gradient(x, dy, (k, k), s, "SAME")

        for function in (native, taps):
            graph = tf.function(function, autograph=False)
            graph(x, dy)
            steps.append((graph, x, dy))
    print("ready", flush=True)
    for line in sys.stdin:
        graph, x, dy = steps[int(line)]
        started = time.perf_counter()
        graph(x, dy).numpy()
        print(1e3 * (time.perf_counter() - started), flush=True)


def main() -> None:
    if sys.argv[1:] == ["--child"]:
        child()
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    children = []
    for onednn in ("0", "1"):
        environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": onednn, "TF_CPP_MIN_LOG_LEVEL": "3"}
        process = subprocess.Popen(
            [sys.executable, __file__, "--child"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        assert process.stdout is not None and process.stdout.readline()
        children.append(process)

    def once(process, number):
        process.stdin.write(f"{number}\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    print(f"{SAMPLES} samples, {os.cpu_count()} cores, medians of {rounds} rounds, ms")
    print("size  channels  kernel  stride   default   oneDNN   sum over taps")
    for index, (size, channels, kernel, stride) in enumerate(LAYERS):
        times = [[], [], []]
        for _ in range(rounds):
            times[0].append(once(children[0], 2 * index))
            times[1].append(once(children[1], 2 * index))
            times[2].append(once(children[1], 2 * index + 1))
        default, onednn, taps = (statistics.median(t) for t in times)
        print(
            f"{size:4}  {channels:8}  {kernel:6}  {stride:6}  {default:8.2f} {onednn:8.2f}  {taps:14.2f}",
            flush=True,
        )
    for process in children:
        process.stdin.close()
        process.wait()


if __name__ == "__main__":
    main()
