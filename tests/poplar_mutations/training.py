"""``fit`` and ``predict`` of a model."""

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from .cases import Group
from .quoted import QUOTED, params_in, params_of
from .setting import make_data, plain


def training(group: Group, machine: Any) -> None:
    """Keywords and values of ``fit`` and ``predict``."""
    from tensorflow.python import ipu

    images = np.zeros((8, 4, 4, 1), np.float32)
    failed = tf.errors.FailedPreconditionError

    def fit(**keywords: Any) -> Any:
        return plain(ipu, fitting=keywords).fit()

    def predict(**keywords: Any) -> Any:
        def change(model: Any) -> None:
            model.compile(steps_per_execution=1)
            model.predict(**keywords)

        setting = plain(ipu, before=change)
        setting.config.auto_select_ipus = 1
        return setting.fit()

    defaults = dict(max_queue_size=10, workers=1, use_multiprocessing=False, callbacks=None)
    group.add("fit", lambda: fit(**defaults, validation_split=0.0, class_weight=None, initial_epoch=0))
    group.add("predict", lambda: predict(x=images, batch_size=2, verbose=0, steps=None, **defaults))
    for where, function, legal in (("fit", fit, {}), ("predict", predict, dict(x=images, batch_size=2))):
        for name, _ in params_in(QUOTED["delegate"][where]):
            misspelt = {**legal, name + "s": None}
            group.add(f"{where}: {name}s", lambda f=function, m=misspelt: f(**m), TypeError)
    group.add("predict: no x", lambda: predict(batch_size=2), TypeError)
    group.add("fit: x twice", lambda: fit(x=images), TypeError)
    for number, (function, keywords, *errors) in enumerate(
        [
            (fit, dict(y=np.zeros(64, np.int32)), ValueError),
            (fit, dict(sample_weight=np.ones(64, np.float32)), ValueError),
            (fit, dict(validation_split=0.5), ValueError),
            (fit, dict(steps_per_epoch=None), ValueError),
            # 5 steps of each of 2 replicas are no multiple of 4; with 3 steps all are one execution, which is not 4
            # either.
            (fit, dict(steps_per_epoch=10), ValueError),
            (fit, dict(steps_per_epoch=6), RuntimeError),
            (fit, dict(steps_per_epoch=0), ValueError, TypeError),
            # A partial batch
            (predict, dict(x=images[:5], batch_size=2), ValueError),
            (predict, dict(x=images.astype(np.int64), batch_size=2), failed),
            (predict, dict(x=(i for i in images)), ValueError),
            (predict, dict(x=None), ValueError),
            # An endless data set
            (predict, dict(x=make_data()), ValueError),
            # A dynamic batch
            (predict, dict(x=make_data(remainder=False), steps=4), ValueError),
            (predict, dict(x=make_data(), steps=0), ValueError, TypeError),
        ]
    ):
        group.add(f"{number}: {list(keywords)}", lambda f=function, k=keywords: f(**k), *errors)


def strategies(group: Group, machine: Any) -> None:
    """``IPUStrategy``, its scope and ``run``."""
    from tensorflow.python import ipu
    from tensorflow.python.ipu.distributed.popdist_strategy import PopDistStrategy

    make = ipu.ipu_strategy.IPUStrategy
    traced = tf.function(lambda: 1, autograph=False)
    group.add("IPUStrategy", lambda: make().run(traced))
    group.signature("IPUStrategy", make, params_of("ipu.ipu_strategy.IPUStrategyV1"), {})
    group.add("run: no tf.function", lambda: make().run(lambda: 1), ValueError)
    for name, seed, kind, result, *errors in (
        ("three seeds", [1, 2, 3], tf.int32, tf.float32, tf.errors.InvalidArgumentError),
        ("64-bit numbers", [1, 2], tf.int32, tf.float64, tf.errors.InvalidArgumentError),
        ("64-bit seeds", [1, 2], tf.int64, tf.float32),
    ):
        draw = functools.partial(tf.random.stateless_uniform, [4], tf.constant(seed, kind), dtype=result)
        drawn = tf.function(lambda d=draw: d(), autograph=False)
        group.add(f"stateless_uniform: {name}", lambda d=drawn: make().run(d), *errors)
    without = functools.partial(make, enable_keras_extensions=False)
    group.add("without the methods", lambda: plain(ipu, strategy=without).fit(), AttributeError)
    group.add("PopDistStrategy without poprun", PopDistStrategy, RuntimeError)
