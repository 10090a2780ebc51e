"""Grouped convolution that also trains on a CPU.

TensorFlow's CPU kernels have no gradients for grouped convolutions (neither 2.6 nor 2.21), and their forward
pass is slower than one convolution per group.
"""

from typing import Any

import tensorflow as tf
from tensorflow import keras


def native_groups() -> bool:
    """Whether an accelerator is visible whose kernels know groups."""
    return any(tf.config.list_physical_devices(kind) for kind in ("GPU", "IPU"))


@keras.utils.register_keras_serializable(package="ipucnn")
class GroupedConv2D(keras.layers.Conv2D):
    """``keras.layers.Conv2D`` with ``groups`` and its weights; one convolution per group on a CPU."""

    def call(self, inputs: Any) -> Any:
        kernel = tf.convert_to_tensor(self.kernel)
        options = {
            "strides": list(self.strides),
            "padding": self.padding.upper(),
            "dilations": list(self.dilation_rate),
        }
        if self.groups == 1 or native_groups():
            outputs = tf.nn.conv2d(inputs, kernel, **options)
        else:
            # The kernel is (height, width, in / groups, out): its last axis holds one group after the other.
            parts = zip(tf.split(inputs, self.groups, axis=-1), tf.split(kernel, self.groups, axis=-1))
            outputs = tf.concat([tf.nn.conv2d(x, k, **options) for x, k in parts], axis=-1)
        if self.use_bias:
            outputs = tf.nn.bias_add(outputs, tf.convert_to_tensor(self.bias))
        return outputs if self.activation is None else self.activation(outputs)
