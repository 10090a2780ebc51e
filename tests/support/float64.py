"""cifar_resnet8 in NumPy's float64 and TensorFlow's plain operations."""

from typing import Any, Dict, List, Tuple

import numpy as np
import tensorflow as tf

from ipucnn.models.blueprint import read_blueprint
from ipucnn.models.build import BuildOptions, build_model
from ipucnn.models.names import named_weights
from ipucnn.models.registry import get_model
from ipucnn.sessions.host.session import HostSession

from .sessions import CPU, constant, make_program, run

Weights = Dict[str, np.ndarray]
MOMENTUM = 0.9


class Reference:
    """Stochastic gradient descent with momentum: mean over micro-batches, batch norm of each micro-batch.

    Args:
        images, labels: samples of all weight updates.
        batch, count: samples of a micro-batch, and micro-batches of a weight update.
        rate: learning rate.
    """

    def __init__(self, images: Any, labels: Any, batch: int, count: int, rate: float) -> None:
        self.images, self.labels, self.batch, self.count, self.rate = images, labels, batch, count, rate
        network = self.network()
        self._start = {name: v.numpy() for name, v in named_weights(network).items()}
        blueprint = read_blueprint(network)
        self._steps, self._output = blueprint.steps, blueprint.output
        self.nearest = np.inf

    def network(self) -> Any:
        """Returns the network with its initial weights."""
        size = self.images.shape[1]
        return build_model(
            get_model("cifar_resnet8"), BuildOptions(input_shape=(size, size, 3), num_classes=10, seed=3)
        )

    def run(self, fused: int) -> Weights:
        """Returns weights by name after all weight updates, with ``fused`` micro-batches computed as one batch.

        Sets ``nearest`` to the smallest absolute input of any ReLU.
        """
        weights = {name: value.astype(np.float64) for name, value in self._start.items()}
        trained = [name for name in weights if "moving" not in name]
        velocity = {name: np.zeros_like(weights[name]) for name in trained}
        momenta = {s.name: s.config["momentum"] for s in self._steps if _kind(s) == "BatchNormalization"}
        self.nearest = np.inf
        per_update = self.batch * self.count
        for first in range(0, len(self.images), per_update):
            sums = {name: np.zeros_like(weights[name]) for name in trained}
            for start in range(first, first + per_update, fused * self.batch):
                part = slice(start, start + fused * self.batch)
                values = {name: tf.Variable(weights[name]) for name in trained}
                statistics: Dict[str, Any] = {}
                with tf.GradientTape() as tape:
                    x = tf.constant(self.images[part].astype(np.float64))
                    logits = self._forward(values, x, fused, statistics)
                    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(self.labels[part], logits)
                    loss = tf.reduce_mean(losses)
                for name, d in zip(trained, tape.gradient(loss, [values[name] for name in trained])):
                    sums[name] += d.numpy() * (fused / self.count)
                for norm, pair in statistics.items():
                    for moments in zip(*pair):
                        for word, value in zip(("moving_mean", "moving_variance"), moments):
                            old = weights[f"{norm}/{word}"]
                            weights[f"{norm}/{word}"] = momenta[norm] * old + (1 - momenta[norm]) * value
            for name in trained:
                velocity[name] = MOMENTUM * velocity[name] - self.rate * sums[name]
                weights[name] = weights[name] + velocity[name]
        return weights

    def _forward(self, values: Dict[str, Any], x: Any, groups: int, statistics: Dict[str, Any]) -> Any:
        tensors = {self._steps[0].name: x}
        for step in self._steps[1:]:
            inputs = [tensors[name] for name in step.inputs]
            tensors[step.name] = self._layer(step, inputs, values, groups, statistics)
        return tensors[self._output]

    def _layer(
        self, step: Any, inputs: List[Any], values: Dict[str, Any], groups: int, statistics: Any
    ) -> Any:
        x, kind, config, name = inputs[0], _kind(step), step.config, step.name
        if kind == "Conv2D":
            return tf.nn.conv2d(x, values[f"{name}/kernel"], config["strides"], "SAME")
        if kind == "BatchNormalization":
            each = tf.reshape(x, [groups, -1, x.shape[-1]])
            mean = tf.reduce_mean(each, axis=1, keepdims=True)
            variance = tf.reduce_mean((each - mean) ** 2, axis=1, keepdims=True)
            n = int(each.shape[1])
            statistics[name] = (mean[:, 0].numpy(), variance[:, 0].numpy() * (n / (n - 1)))
            normal = tf.reshape((each - mean) / tf.sqrt(variance + config["epsilon"]), x.shape)
            return normal * values[f"{name}/gamma"] + values[f"{name}/beta"]
        if kind == "ReLU":
            self.nearest = min(self.nearest, float(np.abs(x).min()))
            return tf.nn.relu(x)
        if kind == "SubsamplePad":
            missing = config["channels"] - int(x.shape[-1])
            return tf.pad(x[:, ::2, ::2], [[0, 0], [0, 0], [0, 0], [0, missing]])
        if kind == "Add":
            return inputs[0] + inputs[1]
        if kind == "GlobalAveragePooling2D":
            return tf.reduce_mean(x, axis=[1, 2])
        if kind == "Dense":
            return x @ values[f"{name}/kernel"] + values[f"{name}/bias"]
        raise ValueError(kind)


def _kind(step: Any) -> str:
    """Returns a layer's class without the package name that Keras 2.6 puts before it."""
    return str(step.kind.rpartition(">")[2])


def distance(one: Weights, other: Weights) -> float:
    """Returns the largest difference of two networks' weights."""
    return max(float(np.abs(np.float64(one[name]) - other[name]).max()) for name in other)


def samples(count: int, size: int, seed: int) -> Tuple[np.ndarray, np.ndarray]:
    """Returns normally distributed images and random labels."""
    rng = np.random.default_rng(seed)
    return rng.normal(0, 1, (count, size, size, 3)).astype(np.float32), rng.integers(0, 10, count).astype(
        np.int32
    )


def on_the_host(reference: Reference, fused: int) -> Weights:
    """Returns the host session's weights after the same run."""
    updates = len(reference.images) // (reference.batch * reference.count)
    program = make_program(reference.batch, reference.count, updates_per_epoch=updates).with_fused(fused)
    optimizer, rate = ("sgd", {"momentum": MOMENTUM}, {}), constant(reference.rate)
    images, labels = reference.images, reference.labels
    return run(
        HostSession(CPU), reference.network(), program, optimizer, images, labels, schedule=rate
    ).weights
