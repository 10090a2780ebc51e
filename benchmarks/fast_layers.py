"""Processor time of layers as the host computes them, against Keras' layers: forward and backward, fused micro-batches.

Usage: python benchmarks/fast_layers.py [--rounds 9] [--only depthwise]

Layers of EfficientNet-B0 and of CIFAR's ResNet at 32x32, 128 samples in 16 micro-batches.  Both ways take turns in one
process, and the ratio is that of their medians.  A number above 1 says that the host's way is faster.
"""

import argparse
import os
import platform
import statistics
import time

SAMPLES, PARTS = 128, 16


def cases():
    """(text, input shape, [layers])"""
    from tensorflow import keras

    from ipucnn.models.layers import BatchNormalization, GroupNormalization, SubsamplePad

    layers = keras.layers
    for size, inputs, outputs in (
        (16, 32, 16), (16, 16, 96), (8, 96, 24), (8, 24, 144), (4, 144, 40), (4, 40, 240), (2, 240, 80), (2, 80, 480),
        (2, 112, 672), (1, 192, 1152), (1, 1152, 320), (1, 320, 1280),
    ):  # fmt: skip
        yield (
            f"1x1 convolution {inputs}->{outputs}",
            (size, size, inputs),
            [lambda n=outputs: layers.Conv2D(n, 1, use_bias=False)],
        )
    for size, inputs, outputs in ((1, 512, 512), (2, 256, 512)):
        stride = size
        yield (
            f"3x3 convolution {inputs}->{outputs}, stride {stride}",
            (size, size, inputs),
            [lambda n=outputs, s=stride: layers.Conv2D(n, 3, strides=s, padding="same", use_bias=False)],
        )
    for size, channels, kernel, stride in (
        (16, 32, 3, 1), (16, 96, 3, 2), (8, 144, 3, 1), (8, 144, 5, 2), (4, 240, 5, 1), (2, 480, 3, 1), (2, 672, 5, 2),
        (1, 1152, 5, 1),
    ):  # fmt: skip
        yield (
            f"depthwise {kernel}x{kernel}, stride {stride}",
            (size, size, channels),
            [lambda k=kernel, s=stride: layers.DepthwiseConv2D(k, strides=s, padding="same", use_bias=False)],
        )
    for size, channels, activation in (
        (32, 16, "relu"), (16, 32, "relu"), (8, 64, "relu"), (16, 96, "swish"), (8, 144, "swish"), (4, 240, "swish"),
        (2, 672, "swish"), (1, 1152, "swish"),
    ):  # fmt: skip
        for name, norm in (("batch norm", BatchNormalization), ("group norm", lambda: GroupNormalization(8))):
            yield f"{name} and {activation}", (size, size, channels), [
                norm, lambda a=activation: layers.Activation(a)
            ]  # fmt: skip
    yield "every second pixel", (32, 32, 16), [lambda: SubsamplePad(32)]


def steps(tf, shape, makers):
    """Two functions, Keras' and the host's, that run a forward and a backward pass."""
    from tensorflow import keras

    from ipucnn.models.layers import ExecutionContext, execution_context
    from ipucnn.sessions.host.arithmetic import Arithmetic, Rounding
    from ipucnn.sessions.host.network import Network

    inputs = outputs = keras.Input(shape)
    for make in makers:
        outputs = make()(outputs)
    model = keras.Model(inputs, outputs)
    network = Network(model, on_cpu=True, alone=False)
    x = tf.random.stateless_normal([SAMPLES, *shape], [0, 1])
    dy = tf.random.stateless_normal([SAMPLES, *model.output.shape[1:]], [0, 2])

    def step(ours):
        context = ExecutionContext(PARTS, tf.zeros([PARTS, 2], tf.int32), PARTS)
        with tf.GradientTape() as tape:
            tape.watch(x)
            if ours:
                y = network(x, True, Rounding(Arithmetic()), context)
            else:
                with execution_context(context):
                    y = model(x, training=True)
        weights = [
            getattr(w, "value", w) if not isinstance(w, tf.Variable) else w for w in model.trainable_weights
        ]
        gradients = tape.gradient(y, [x, *weights], output_gradients=dy)
        return [tf.reduce_sum(g) for g in gradients if g is not None]

    return [tf.function(lambda ours=ours: step(ours), autograph=False) for ours in (False, True)]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="part of a layer's text")
    arguments = parser.parse_args()
    from ipucnn.machine import cpu_name
    from ipucnn.sessions.host.environment import import_tensorflow

    tf = import_tensorflow()
    print(f"{cpu_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; Python {platform.python_version()}, "
          f"TensorFlow {tf.__version__}")  # fmt: skip
    print(f"{SAMPLES} samples in {PARTS} micro-batches, medians of {arguments.rounds} rounds")
    print(f"{'layers':36} {'input':>13} {'keras, ms':>10} {'host, ms':>10} {'ratio':>6}")
    for text, shape, makers in cases():
        if arguments.only not in text:
            continue
        functions = steps(tf, shape, makers)
        times = [[], []]
        for function in functions:
            function()
        for _ in range(arguments.rounds):
            for function, own in zip(functions, times):
                started = time.process_time()
                for _ in range(3):
                    function()
                own.append(1e3 * (time.process_time() - started) / 3)
        keras_ms, ours_ms = (statistics.median(own) for own in times)
        size = "x".join(map(str, shape))
        print(f"{text:36} {size:>13} {keras_ms:10.2f} {ours_ms:10.2f} {keras_ms / ours_ms:6.2f}", flush=True)


if __name__ == "__main__":
    main()
