"""The SDK's errors: the classes that the driver and TensorFlow raise, with a text."""

from functools import partial

import tensorflow as tf

failed = partial(tf.errors.FailedPreconditionError, None, None)
internal = partial(tf.errors.InternalError, None, None)
invalid = partial(tf.errors.InvalidArgumentError, None, None)
unimplemented = partial(tf.errors.UnimplementedError, None, None)
