"""``fit`` and ``predict`` of a model."""

from typing import Any

import numpy as np
import tensorflow as tf
from poplar_double.facts import FACTS

from .cases import Group, params_of
from .setting import make_data, plain


def training(machine: Any) -> Group:
    """Returns mutations of the keywords and values of ``fit`` and ``predict``."""
    from tensorflow.python import ipu

    group = Group("fit and predict")
    images = np.zeros((8, 4, 4, 1), np.float32)

    def fit(**keywords: Any) -> Any:
        return plain(ipu, fitting=keywords).fit()

    def predict(*args: Any, **keywords: Any) -> Any:
        def change(model: Any) -> None:
            model.compile(steps_per_execution=1)
            model.predict(*args, **keywords)

        return change

    def predicted(*args: Any, **keywords: Any) -> Any:
        setting = plain(ipu, before=predict(*args, **keywords))
        setting.config.auto_select_ipus = 1
        return setting.fit()

    defaults = dict(max_queue_size=10, workers=1, use_multiprocessing=False, callbacks=None)
    group.allow("fit", lambda: fit(**defaults, validation_split=0.0, class_weight=None, initial_epoch=0))
    group.allow("predict", lambda: predicted(images, batch_size=2, verbose=0, steps=None, **defaults))
    for name in (p["name"] for p in FACTS["delegates"]["fit"]):
        group.add(f"fit: {name}s", lambda n=name: fit(**{n + "s": None}), TypeError)
    for name in (p["name"] for p in FACTS["delegates"]["predict"]):
        group.add(
            f"predict: {name}s", lambda n=name: predicted(images, batch_size=2, **{n + "s": None}), TypeError
        )
    group.add("predict: no x", lambda: predicted(batch_size=2), TypeError)
    group.add("fit: x twice", lambda: fit(x=images), TypeError)

    wrong_fit = [
        ("y", np.zeros(64, np.int32), ValueError),
        ("sample_weight", np.ones(64, np.float32), ValueError),
        ("validation_split", 0.5, ValueError),
        ("steps_per_epoch", None, ValueError),
        # 5 steps of each of 2 replicas are no multiple of 4; with 3 steps all are one execution, which is not 4 either.
        ("steps_per_epoch", 10, ValueError),
        ("steps_per_epoch", 6, RuntimeError),
        ("steps_per_epoch", 0, (ValueError, TypeError)),
    ]
    for name, value, errors in wrong_fit:
        kinds = errors if isinstance(errors, tuple) else (errors,)
        shown = value if isinstance(value, (int, float, str)) else type(value).__name__
        group.add(f"fit: {name} = {shown!r}", lambda n=name, v=value: fit(**{n: v}), *kinds)
    failed = tf.errors.FailedPreconditionError
    wrong_predict = [
        ("a partial batch", (images[:5],), dict(batch_size=2), ValueError),
        ("int64", (images.astype(np.int64),), dict(batch_size=2), failed),
        ("a generator", ((i for i in images),), {}, ValueError),
        ("nothing", (None,), {}, ValueError),
        ("an endless data set", (make_data(),), {}, ValueError),
        ("a dynamic batch", (make_data(remainder=False),), dict(steps=4), ValueError),
        ("no steps", (make_data(),), dict(steps=0), ValueError),
    ]
    for name, args, keywords, error in wrong_predict:
        errors = (error, TypeError) if name == "no steps" else (error,)
        group.add(f"predict: {name}", lambda a=args, k=keywords: predicted(*a, **k), *errors)
    return group


def strategies(machine: Any) -> Group:
    """Returns mutations of ``IPUStrategy``, its scope and ``run``."""
    from tensorflow.python import ipu
    from tensorflow.python.ipu.distributed.popdist_strategy import PopDistStrategy

    group = Group("IPUStrategy")
    make = ipu.ipu_strategy.IPUStrategy
    traced = tf.function(lambda: 1, autograph=False)
    group.allow("IPUStrategy", lambda: make().run(traced))
    group.signature("IPUStrategy", make, params_of("ipu.ipu_strategy.IPUStrategyV1"), {})
    group.add("run: no tf.function", lambda: make().run(lambda: 1), ValueError)
    draw = tf.random.stateless_uniform
    for name, seed, kind, result in (
        ("three seeds", [1, 2, 3], tf.int32, tf.float32),
        ("64-bit numbers", [1, 2], tf.int32, tf.float64),
        ("64-bit seeds", [1, 2], tf.int64, tf.float32),
    ):
        drawn = tf.function(
            lambda s=seed, k=kind, r=result: draw([4], tf.constant(s, k), dtype=r), autograph=False
        )
        run = lambda f=drawn: make().run(f)  # noqa: E731
        if name == "64-bit seeds":
            group.allow(name, run)
        else:
            group.add(f"stateless_uniform: {name}", run, tf.errors.InvalidArgumentError)
    without = lambda: make(enable_keras_extensions=False)  # noqa: E731
    group.add("without the methods", lambda: plain(ipu, strategy=without).fit(), AttributeError)
    group.add("PopDistStrategy without poprun", PopDistStrategy, RuntimeError)
    return group
