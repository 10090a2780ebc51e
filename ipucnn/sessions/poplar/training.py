"""A network in training on IPUs: built, configured and compiled; one execution is one ``fit`` of one epoch.

Its data set begins at its first weight update: data order is a pure function of the position, so nothing is lost
between two executions, and events happen at the same places as on the host.  The SDK keeps the compiled program from
one ``fit`` to the next.
"""

import zlib
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from ipucnn.sessions.poplar.device import Device
from ipucnn.sessions.poplar.feeding import training_batches, transfer_type
from ipucnn.sessions.poplar.float32 import portable
from ipucnn.sessions.poplar.model import DeviceModel
from ipucnn.sessions.poplar.objective import MicroBatchLoss, make_metrics
from ipucnn.sessions.poplar.optimizer import DeviceOptimizer, WeightUpdate
from ipucnn.training.optimizers import Optimizer, OptimizerSettings
from ipucnn.training.program import Program


class TrainedNetwork:
    """A network that IPUs train.

    Args:
        device: where.
        config: ``RunConfig``.
        program: what runs.
        made: the network, built for training; options that the SDK wants are set already.
        optimizer: checked settings.
        loss: from ``make_loss``.
        schedule: weight updates (int array) -> learning rates.
    """

    def __init__(
        self,
        device: Device,
        config: Any,
        program: Program,
        made: DeviceModel,
        optimizer: OptimizerSettings,
        loss: Any,
        schedule: Callable[[Any], Any],
    ) -> None:
        self._device, self._config, self._program = device, config, program
        self._loss, self._schedule = loss, schedule
        self.made = made
        with device.scope():
            self._optimizer = _make_optimizer(optimizer, made)
            self._update = WeightUpdate(
                self._optimizer,
                program.weight_updates_per_execution,
                (program.loss_scaling or 1.0) * program.num_replicas,
                self._averaged(),
                device.mean_over_replicas,
            )
            self._compile(program.steps_per_execution)

    @property
    def weights(self) -> Dict[str, Any]:
        """float32 variables, or views, by canonical name."""
        return {name: portable(v) for name, v in self.made.weights.items()}

    @property
    def slots(self) -> Dict[str, Any]:
        """The optimizer's state likewise."""
        return {name: portable(v) for name, v in self._optimizer.slots.items()}

    def rate(self, weight_update: int) -> float:
        """The learning rate of one weight update."""
        return float(self._schedule(np.arange(weight_update, weight_update + 1))[0])

    def _averaged(self) -> List[Any]:
        """Moving statistics that replicas keep apart; those of a pipeline are recomputed instead."""
        p = self._program
        if p.num_replicas == p.dbn_replica_group_size or p.num_stages > 1:
            return []
        moving = ("moving_mean", "moving_variance")
        return [v for name, v in self.made.weights.items() if name.rsplit("/", 1)[-1] in moving]

    def _compile(self, steps_per_execution: int) -> None:
        p = self._program
        mean: Optional[Callable[[Any], Any]] = None
        if self._config.accelerator_side_reduction and p.num_stages == 1 and p.num_replicas > 1:
            # Metrics that the IPUs reduce themselves; stages of a pipeline cannot.
            mean = self._device.mean_over_replicas
        self.made.model.compile(
            optimizer=DeviceOptimizer(self._update),
            loss=MicroBatchLoss(self._loss, p.loss_scaling or 1.0),
            weighted_metrics=make_metrics(self._loss, mean),
            steps_per_execution=steps_per_execution,
        )
        self._steps = steps_per_execution

    def execute(self, dataset: Any, first: int, count: int) -> Tuple[float, float, List[Any]]:
        """One execution.

        Args:
            dataset: (images, labels[, weights]) of this instance, from weight update ``first`` on.
            first: weight updates done before.
            count: weight updates to do.

        Returns:
            Mean loss and accuracy (the same on every instance), and what was compiled for it.
        """
        p, update, made, instances = self._program, self._update, self.made, self._device.instances
        steps = count * p.gradient_accumulation_count
        if count > update.num_rates or steps > self._steps:
            with self._device.scope():
                update.resize(max(count, update.num_rates))
                self._compile(steps)
        update.set_rates(first, self._schedule(np.arange(first, first + count)))
        made.model.optimizer.iterations.assign(first)
        transfer = transfer_type(self._config, self._device.preprocess)
        batches = training_batches(dataset, p, first, made.takes_seeds, transfer, instances)
        if self._draws_random_numbers():
            self._device.reset_seed(_seed(p.seed, first))
        with self._device.running(training=True) as compiled:
            history = made.model.fit(
                batches,
                epochs=1,
                steps_per_epoch=steps * (p.num_replicas // instances.count),
                verbose=0,
                shuffle=False,
            )
        found = [float(history.history[name][-1]) for name in ("mean_loss", "accuracy")]
        loss, hit = self._device.mean_over_instances(found)
        return float(loss), float(hit), compiled

    def _draws_random_numbers(self) -> bool:
        """Whether the IPUs' own generator decides about anything."""
        layers = {type(layer).__name__ for layer in self.made.model.layers}
        return self._config.stochastic_rounding != "OFF" or "Dropout" in layers


def _make_optimizer(settings: OptimizerSettings, made: DeviceModel) -> Optimizer:
    from ipucnn.compat import tf_variable

    ids = {id(tf_variable(v)) for v in made.model.trainable_weights}
    names: Sequence[str] = [name for name, v in made.weights.items() if id(v) in ids]
    return Optimizer(settings, [made.weights[name] for name in names], names)


def _seed(run_seed: int, weight_update: int) -> int:
    """The IPUs' seed of the execution that begins there: a continued run draws as an uninterrupted one."""
    return zlib.crc32(f"{run_seed}/{weight_update}".encode()) & 0x7FFFFFFF
