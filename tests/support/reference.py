"""A weight update written out in float64: one micro-batch and one replica at a time, NumPy optimizers."""

from dataclasses import dataclass, field
from typing import Any, Dict, List, Tuple

import numpy as np
import tensorflow as tf

from ipucnn.models.names import named_weights
from support.sessions import EPSILON, MOMENTUM, SIZE, make_model


@dataclass
class Naive:
    """Replicas one after the other, micro-batches one after the other, every formula written out."""

    norm: str
    weights: Dict[str, np.ndarray]
    slots: Dict[str, np.ndarray]
    replica_moving: List[Dict[str, np.ndarray]]
    clipped: List[bool] = field(default_factory=list)
    frozen: Tuple[str, ...] = ()
    class_weights: Tuple[float, ...] = ()
    nearest: float = np.inf
    """The smallest absolute input of any ReLU."""

    def forward(self, values: Dict[str, Any], images: np.ndarray, group: int):
        """Returns logits and batch statistics of ``group`` replicas' micro-batches normalised as one batch."""
        x, statistics = tf.constant(images, tf.float64), {}
        for i in range(2):
            x = tf.nn.conv2d(x, values[f"conv{i}/kernel"], 1, "SAME")
            if self.norm == "none":
                x = x + values[f"conv{i}/bias"]
            elif self.norm != "group" and f"norm{i}" in self.frozen:
                weight = {
                    k: self.weights[f"norm{i}/{k}"]
                    for k in ("gamma", "beta", "moving_mean", "moving_variance")
                }
                x = (x - weight["moving_mean"]) / np.sqrt(weight["moving_variance"] + EPSILON)
                x = x * weight["gamma"] + weight["beta"]
            elif self.norm != "group":
                mean = tf.reduce_mean(x, axis=[0, 1, 2])
                variance = tf.reduce_mean((x - mean) ** 2, axis=[0, 1, 2])
                # IPUs: the group's biased variance times n / (n - 1), where n counts the values of one replica.
                n = images[..., 0].size // group
                statistics[f"norm{i}"] = (mean.numpy(), variance.numpy() * n / (n - 1))
                x = (x - mean) / tf.sqrt(variance + EPSILON)
                x = x * values[f"norm{i}/gamma"] + values[f"norm{i}/beta"]
            else:
                per_group = []
                for channels in (slice(0, 2), slice(2, 4)):
                    part = x[..., channels]
                    mean = tf.reduce_mean(part, axis=[1, 2, 3], keepdims=True)
                    variance = tf.reduce_mean((part - mean) ** 2, axis=[1, 2, 3], keepdims=True)
                    per_group.append((part - mean) / tf.sqrt(variance + EPSILON))
                x = tf.concat(per_group, -1) * values[f"norm{i}/gamma"] + values[f"norm{i}/beta"]
            self.nearest = min(self.nearest, float(tf.reduce_min(tf.abs(x))))
            x = tf.nn.relu(x)
        return tf.reduce_mean(x, axis=[1, 2]) @ values["logits/kernel"] + values["logits/bias"], statistics

    def update(self, program, optimizer, images, labels, rate, count, real=None):
        """Returns loss and accuracy of a weight update; ``real``: 0 for samples that fill up the batch, otherwise 1."""
        p = program
        real = np.ones(len(labels)) if real is None else real
        # Method "sum" sums over accumulation steps, padded or not.
        is_sum = p.gradient_accumulation_reduction_method == "sum"
        shares = real if is_sum else real * len(real) / real.sum()
        kept = tuple(f"{layer}/" for layer in self.frozen)
        trainable = [k for k in self.weights if "moving" not in k and not k.startswith(kept)]
        accumulated: Dict[str, np.ndarray] = {}
        size, losses, hits = p.micro_batch_size, [], []
        # Per norm and replica: the statistics of its micro-batches.
        measured: Dict[str, List[Any]] = {}
        for g in range(p.gradient_accumulation_count):
            gradient = {k: np.zeros_like(self.weights[k]) for k in trainable}
            for r in range(0, p.num_replicas, p.dbn_replica_group_size):
                # The replicas of one distributed batch norm group share their statistics.
                start = (g * p.num_replicas + r) * size
                stop = start + size * p.dbn_replica_group_size
                values = {k: tf.Variable(v) for k, v in self.weights.items()}
                with tf.GradientTape() as tape:
                    logits, statistics = self.forward(values, images[start:stop], p.dbn_replica_group_size)
                    entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels[start:stop], logits)
                    if self.class_weights:
                        entropy *= np.array([self.class_weights[label] for label in labels[start:stop]])
                    loss = tf.reduce_mean(entropy * shares[start:stop])
                for k, d in zip(trainable, tape.gradient(loss, [values[k] for k in trainable])):
                    gradient[k] += d.numpy() * p.dbn_replica_group_size / p.num_replicas
                losses += list(entropy.numpy())
                hits += list(np.argmax(logits.numpy(), -1) == labels[start:stop])
                for member in range(r, r + p.dbn_replica_group_size):
                    for name, pair in statistics.items():
                        measured.setdefault(name, [[] for _ in range(p.num_replicas)])[member].append(pair)
                        if self.norm == "batch":
                            self.move(member, name, pair)
            for k, d in gradient.items():
                if p.gradient_accumulation_reduction_method == "running_mean":
                    accumulated[k] = accumulated.get(k, 0.0) * (g / (g + 1)) + d / (g + 1)
                else:
                    accumulated[k] = accumulated.get(k, 0.0) + d
        if p.gradient_accumulation_reduction_method == "mean":
            accumulated = {k: d / p.gradient_accumulation_count for k, d in accumulated.items()}
        largest, decay = (optimizer[2].get(name, 0.0) for name in ("clip_gradient_norm", "ema_decay"))
        norm = np.sqrt(sum(np.sum(np.float64(d) ** 2) for d in accumulated.values()))
        self.clipped.append(bool(largest and norm > largest))
        for k, d in accumulated.items():
            shorter = d * largest / norm if self.clipped[-1] else d
            self.weights[k] = self.step(optimizer, k, shorter, rate, count)
        if self.norm == "custom":
            for name, replicas in measured.items():
                per_replica = [np.mean(pairs, axis=0) for pairs in replicas]
                for member in range(p.num_replicas):
                    self.move(member, name, pooled(per_replica, size * SIZE * SIZE))
        for k in self.weights:
            if "moving" in k:
                self.weights[k] = np.mean([m[k] for m in self.replica_moving], axis=0)
        if decay:
            kept = min(decay, count / (count + 10))
            for k in (
                k for k in self.weights if not k.startswith(tuple(f"{layer}/" for layer in self.frozen))
            ):
                value = self.weights[k]
                self.slots[f"{k}/average"] = kept * self.slot(f"{k}/average", value) + (1 - kept) * value
        return np.average(losses, weights=real), np.average(hits, weights=real)

    def move(self, replica, name, statistics):
        """Moves a replica's statistics of a norm towards the given mean and variance."""
        moving = self.replica_moving[replica]
        for kind, value in zip(("moving_mean", "moving_variance"), statistics):
            key = f"{name}/{kind}"
            moving[key] = MOMENTUM * moving[key] + (1 - MOMENTUM) * value

    def slot(self, key, like):
        return self.slots.setdefault(key, np.zeros_like(like))

    def step(self, optimizer, name, gradient, rate, count):
        kind, params, extra = optimizer
        w = self.weights[name]
        decays = w.ndim > 1 or extra.get("decay_biases_and_norms", True)
        if decays:
            gradient = gradient + extra.get("l2_regularization", 0.0) * w
        if decays and kind != "lars":
            w = w - rate * extra.get("weight_decay", 0.0) * w
        if kind == "lars":
            original = w
            if w.ndim > 1:
                norms = np.linalg.norm(original.ravel()), np.linalg.norm(gradient.ravel())
                decay = params["weight_decay"]
                gradient = gradient + decay * original
                if norms[0] > 0 and norms[1] > 0:
                    rate = (
                        rate * params["eeta"] * norms[0] / (norms[1] + decay * norms[0] + params["epsilon"])
                    )
        if kind in ("sgd", "lars"):
            m = params.get("momentum", 0.0)
            if not m:
                return w - rate * gradient
            velocity = m * self.slot(f"{name}/momentum", w) - rate * gradient
            self.slots[f"{name}/momentum"] = velocity
            return w + (m * velocity - rate * gradient if params.get("nesterov") else velocity)
        if kind in ("adam", "adamw"):
            first = 0.9 * self.slot(f"{name}/m", w) + 0.1 * gradient
            second = 0.999 * self.slot(f"{name}/v", w) + 0.001 * gradient**2
            self.slots[f"{name}/m"], self.slots[f"{name}/v"] = first, second
            corrected = rate * np.sqrt(1 - 0.999 ** (count + 1)) / (1 - 0.9 ** (count + 1))
            return w - corrected * first / (np.sqrt(second) + 1e-7)
        rho, m = params["rho"], params.get("momentum", 0.0)
        square = rho * self.slot(f"{name}/mean_square", w) + (1 - rho) * gradient**2
        velocity = m * self.slot(f"{name}/momentum", w) + rate * gradient / np.sqrt(
            square + params["epsilon"]
        )
        self.slots[f"{name}/mean_square"], self.slots[f"{name}/momentum"] = square, velocity
        return w - velocity


def pooled(statistics, n):
    """Returns mean and unbiased variance of all numbers of some parts, from these two of each part of ``n`` numbers."""
    means, variances = np.moveaxis(np.asarray(statistics), 1, 0)
    mean, total = means.mean(axis=0), n * len(means)
    biased = np.mean((n - 1) / n * variances + (means - mean) ** 2, axis=0)
    return mean, biased * total / (total - 1)


def run_naive(
    norm,
    program,
    optimizer,
    images,
    labels,
    learning_rate=0.05,
    seed=3,
    frozen=(),
    real=None,
    class_weights=(),
):
    """Returns the loop after all weight updates, and the loss and accuracy of each."""
    start = {k: v.numpy().astype(np.float64) for k, v in named_weights(make_model(norm, seed)).items()}
    moving = [{k: v.copy() for k, v in start.items() if "moving" in k} for _ in range(program.num_replicas)]
    naive = Naive(norm, start, {}, moving, frozen=tuple(frozen), class_weights=class_weights)
    losses, hits = [], []
    for u in range(program.num_weight_updates):
        part = slice(u * program.global_batch_size, (u + 1) * program.global_batch_size)
        rate = np.float32(learning_rate) / np.float32(1 + u)
        counted = None if real is None else real[part]
        loss, hit = naive.update(program, optimizer, images[part], labels[part], rate, u, counted)
        losses.append(loss)
        hits.append(hit)
    if "clip_gradient_norm" in optimizer[2]:
        assert {True, False} == set(naive.clipped), "the test is of nothing unless some are clipped"
    return naive, losses, hits
