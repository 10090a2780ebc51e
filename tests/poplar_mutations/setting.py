"""A small model in a strategy's scope, ready to be trained; mutations change it before."""

import contextlib
import functools
from typing import Any, Callable, Dict

import numpy as np
import tensorflow as tf
from support.sessions import chain
from tensorflow import keras


def small_model(**options: Any) -> Any:
    end = keras.layers.Flatten(name="flat"), keras.layers.Dense(3, name="last")
    return chain((4, 4, 1), keras.layers.Conv2D(2, 3, name="first"), *end, batch_size=2)


def make_data(
    labels: Any = np.int32, images: Any = np.float32, remainder: bool = True, count: int = 64
) -> Any:
    arrays = np.zeros((count, 4, 4, 1), images), np.zeros(count, labels)
    return tf.data.Dataset.from_tensor_slices(arrays).batch(2, drop_remainder=remainder).repeat()


def set_leaf(config: Any, name: str, value: Any) -> None:
    """Sets a leaf of IPUConfig by its dotted name."""
    *categories, last = name.split(".")
    setattr(functools.reduce(getattr, categories, config), last, value)


class Setting:
    """A model of two stages in a strategy's scope, ready to be trained; ``changes`` are its attributes."""

    def __init__(self, ipu: Any, **changes: Any) -> None:
        self.config = ipu.config.IPUConfig()
        self.config.auto_select_ipus = 2
        self.arguments: Dict[str, Any] = dict(
            gradient_accumulation_steps_per_replica=4,
            device_mapping=[0, 1],
            gradient_accumulation_reduction_method="mean",
            pipeline_schedule=ipu.pipelining_ops.PipelineSchedule.Grouped,
        )
        self.stages, self.steps, self.steps_per_execution = 2, 8, 4
        self.data = make_data()
        self.before: Callable[[Any], None] = lambda model: None
        self.optimizer: Any = "sgd"
        self.reduction = "sum_over_batch_size"
        self.model: Callable[[], Any] = small_model
        self.strategy: Callable[[], Any] = ipu.ipu_strategy.IPUStrategy
        self.fitting: Dict[str, Any] = {}
        self.configure = self.compile = self.inside = True
        self.__dict__.update(changes)

    def fit(self) -> Any:
        """Trains; returns the model."""
        if self.configure:
            self.config.configure_ipu_system()
        strategy = self.strategy()
        with strategy.scope() if self.inside else contextlib.nullcontext():
            model = self.model()
            if self.stages > 1:
                assignment = model.get_pipeline_stage_assignment()
                for i, entry in enumerate(assignment):
                    entry.pipeline_stage = int(i > 0)
                model.set_pipeline_stage_assignment(assignment)
                model.set_pipelining_options(**self.arguments)
            elif self.arguments:
                model.set_gradient_accumulation_options(**self.arguments)
            self.before(model)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=self.reduction)
            if self.compile:
                model.compile(self.optimizer, loss, steps_per_execution=self.steps_per_execution)
            keywords = dict(epochs=1, steps_per_epoch=self.steps, verbose=0, shuffle=False)
            model.fit(self.data, **{**keywords, **self.fitting})
            return model


def plain(ipu: Any, **changes: Any) -> Setting:
    """Returns a setting without a pipeline, with gradient accumulation."""
    arguments = dict(gradient_accumulation_steps_per_replica=4, gradient_accumulation_reduction_method="mean")
    return Setting(ipu, **{"stages": 1, "arguments": arguments, **changes})
