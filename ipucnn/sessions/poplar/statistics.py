"""Batch norm's statistics over training batches, by a forward pass on IPUs that returns those of each micro-batch."""

from typing import Any, Callable, Dict

import numpy as np

from ipucnn.sessions.poplar.device import Device
from ipucnn.sessions.poplar.feeding import training_batches, transfer_type
from ipucnn.sessions.poplar.model import DeviceModel, copy_weights
from ipucnn.training.program import Program

_MOVING = ("moving_mean", "moving_variance")


class StatisticsNetwork:
    """The network of a training run, with statistics as outputs.

    Args:
        device: where.
        config: ``RunConfig``.
        program: whose batches are taken.
        build: makes the model, options that the SDK wants included; called inside the scope.
        num_updates: weight updates whose batches are taken.
    """

    def __init__(
        self,
        device: Device,
        config: Any,
        program: Program,
        build: Callable[[], DeviceModel],
        num_updates: int,
    ) -> None:
        self._device, self._config, self._program = device, config, program
        self._steps = num_updates * program.gradient_accumulation_count
        with device.scope():
            self._made = build()
            self._made.model.compile(steps_per_execution=self._steps)

    def measure(self, weights: Dict[str, Any], dataset: Any) -> Dict[str, Any]:
        """float32 [channels] of each ``<layer>/moving_mean`` and ``/moving_variance``: means over all micro-batches.

        Args:
            weights: to be used.
            dataset: training batches of this instance.
        """
        p, made, instances = self._program, self._made, self._device.instances
        copy_weights(weights, made.weights)
        transfer = transfer_type(self._config, self._device.preprocess)
        batches = training_batches(dataset, p, 0, made.takes_seeds, transfer, instances)
        inputs = batches.map(lambda images, *rest: (images,))
        with self._device.running(training=False):
            found = made.model.predict(
                inputs, steps=self._steps * (p.num_replicas // instances.count), verbose=0
            )
        means = [np.asarray(values, np.float64).mean(axis=0) for values in found[: 2 * len(made.norms)]]
        sizes: Any = np.cumsum([len(values) for values in means])[:-1]
        together = self._device.mean_over_instances(np.concatenate(means))
        names = [f"{norm}/{moving}" for norm in made.norms for moving in _MOVING]
        return {name: part.astype(np.float32) for name, part in zip(names, np.split(together, sizes))}
