"""The Poplar session: Programs on IPUs through the SDK's Keras.

One execution is one ``fit`` of one epoch of ``steps_per_execution`` micro-batches per replica, so that events,
checkpoints and validation happen at the same places as on the host.  Its data set begins at its first weight
update: data order is a pure function of the position, so nothing is lost between two of them.
"""

import time
import zlib
from dataclasses import replace
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence

import numpy as np
import tensorflow as tf

from ipucnn.errors import ConfigurationError
from ipucnn.hardware import get_ipu
from ipucnn.models.arithmetic import count_macs
from ipucnn.models.weight_names import named_weights
from ipucnn.sessions.poplar import popdist
from ipucnn.sessions.poplar.device import Device
from ipucnn.sessions.poplar.evaluation import Predictor
from ipucnn.sessions.poplar.feeding import training_batches
from ipucnn.sessions.poplar.float32 import portable
from ipucnn.sessions.poplar.model import (
    STATISTICS,
    TRAINING,
    DeviceModel,
    Shape,
    build_for_ipus,
    compute_type,
    copy_weights,
    layer_order,
)
from ipucnn.sessions.poplar.objective import MicroBatchLoss, make_metrics
from ipucnn.sessions.poplar.optimizer import DeviceOptimizer, WeightUpdate
from ipucnn.sessions.poplar.pipelining import accumulation_options, assign_stages, pipelining_options
from ipucnn.sessions.poplar.validation import check_num_ipus, check_program, evaluation_replicas
from ipucnn.sessions.session import (
    STATISTICS_UPDATES,
    CompilationReport,
    DeviceInfo,
    Event,
    ExecutionFinished,
    MakeDataset,
    NotFiniteError,
    Progress,
    Session,
    Stopped,
    TrainState,
    execution_events,
)
from ipucnn.training.metrics import MetricTotals, batch_sums
from ipucnn.training.optimizers import Optimizer, OptimizerSettings
from ipucnn.training.program import Program

# Generation whose tiles and memory are reported; Bow has the same.
_IPU = "mk2"


class PoplarSession(Session):
    """Runs Programs on IPUs; see :class:`ipucnn.sessions.session.Session`.

    The network that is given is not trained in place: IPUs run a copy that was built for them, whose weights are
    ``state.weights``.

    Args:
        device: the SDK, its modules and this process' place among others.
        config: ``RunConfig``: the options that only IPUs act on.
    """

    def __init__(self, device: Device, config: Any) -> None:
        self._device, self._config = device, config
        self.device = DeviceInfo("ipu", "IPU", 0, 0)
        self.state = TrainState()
        self.program: Optional[Program] = None
        self.compilation: Optional[CompilationReport] = None
        self._network: Any = None
        self._trained: Optional[DeviceModel] = None
        self._update: Optional[WeightUpdate] = None
        self._optimizer: Any = None
        self._predictor: Optional[Predictor] = None
        self._statistics: Optional[DeviceModel] = None
        self._loss: Any = None
        self._schedule: Callable[[Any], Any] = np.zeros_like
        self._steps = 0

    def take_preprocessing(self, affine: Any) -> bool:
        """See the contract: with ``eight_bit_transfer`` or ``accelerator_side_preprocess``.

        Raises:
            ConfigurationError: the SDK's fused operation cannot do this.
        """
        config = self._config
        if not (config.eight_bit_transfer or config.accelerator_side_preprocess):
            return False
        if config.fused_preprocessing and (affine.reverse or len(affine.offsets) != 3):
            raise ConfigurationError(
                "--fused-preprocessing normalises red, green and blue, and this network takes other channels",
                "drop it; preprocessing still runs on the IPU",
            )
        fused = self._device.api.ipu.image_ops.normalise_image if config.fused_preprocessing else None
        transfer = "uint8" if config.eight_bit_transfer else compute_type(config.precision)
        self._device.preprocess = (affine, fused, transfer)
        return True

    # --- building --------------------------------------------------------------------------------------

    def compile(
        self,
        model: Any,
        program: Program,
        optimizer: OptimizerSettings,
        loss: Any,
        schedule: Callable[[Any], Any],
        make_dataset: Optional[MakeDataset] = None,
    ) -> CompilationReport:
        """See the contract.  Poplar itself compiles in the first execution; see ``compilation`` afterwards.

        Raises:
            ConfigurationError: the SDK cannot run the program.
            MissingError: there are no such IPUs.
        """
        instances = self._device.instances
        check_program(program, self._config, instances.count)
        popdist.check_program(instances, program)
        if program.fused_micro_batches == 0:
            program = program.with_fused(program.dbn_replica_group_size)
        self._device.would_fit = self.would_fit
        self.program, self._schedule, self._loss = program, schedule, loss
        self._network = model
        self._attach(program.num_ipus // instances.count, program)
        started = time.perf_counter()
        with self._device.scope():
            self._trained = self._build(TRAINING, program.micro_batch_size, "training")
            self._set_options(self._trained.model, training=True)
            self._make_optimizer(optimizer)
            self._compile_training(program.steps_per_execution)
        weights = {name: portable(v) for name, v in self._trained.weights.items()}
        slots = {name: portable(v) for name, v in self._optimizer.slots.items()}
        self.state = TrainState(weights, slots, 0)
        self.compilation = self._report(model, time.perf_counter() - started, program.fused_micro_batches)
        return self.compilation

    def _attach(self, num_ipus: int, program: Optional[Program]) -> None:
        """Configures the system for so many IPUs."""
        self._device.configure(num_ipus, self._config, program)
        ipu = get_ipu(_IPU)
        memory_bytes = num_ipus * ipu.num_tiles * ipu.sram_per_tile_bytes
        plural = "s" if num_ipus > 1 else ""
        self.device = DeviceInfo("ipu", f"{num_ipus} IPU{plural}", num_ipus * ipu.num_tiles, memory_bytes)

    def _build(self, purpose: str, micro_batch_size: int, name: str) -> DeviceModel:
        config = self._config
        shape = Shape(
            micro_batch_size=micro_batch_size,
            purpose=purpose,
            precision=config.precision,
            stateless_dropout=config.dropout_layer == "stateless",
            preprocess=self._device.preprocess,
        )
        made = build_for_ipus(self._device.api, self._network, shape, name)
        if purpose != TRAINING:
            return made
        p = self.program
        assert p is not None
        if p.num_stages > 1:
            assign_stages(made.model, layer_order(self._network), p.pipeline_splits)
        return made

    def _set_options(self, model: Any, training: bool) -> None:
        """The SDK's options of a model; they have to be given again to every model that is built or loaded."""
        p, config = self.program, self._config
        assert p is not None
        if p.num_stages > 1:
            model.set_pipelining_options(**pipelining_options(self._device.api.ipu, p, config, training))
        elif training and p.gradient_accumulation_count > 1:
            model.set_gradient_accumulation_options(**accumulation_options(p, config))
        model.set_infeed_queue_options(prefetch_depth=config.prefetch_depth)
        if training and p.num_replicas > 1 and p.num_stages == 1 and self._device.api.reduces_metrics:
            model.set_replication_options(replicated_metric_reduction_method="MEAN")

    def _make_optimizer(self, settings: OptimizerSettings) -> None:
        p, trained = self.program, self._trained
        assert p is not None and trained is not None
        ids = {id(_underlying(v)) for v in trained.model.trainable_weights}
        names = [name for name, v in trained.weights.items() if id(v) in ids]
        self._optimizer = Optimizer(settings, [trained.weights[name] for name in names], names)
        self._update = WeightUpdate(
            self._optimizer,
            p.weight_updates_per_execution,
            (p.loss_scaling or 1.0) * p.num_replicas,
            self._averaged(trained),
            self._device.mean_over_replicas,
        )

    def _averaged(self, trained: DeviceModel) -> List[Any]:
        """Moving statistics that replicas keep apart; those of a pipeline are recomputed instead."""
        p = self.program
        assert p is not None
        if p.num_replicas == p.dbn_replica_group_size or p.num_stages > 1:
            return []
        moving = ("moving_mean", "moving_variance")
        return [v for name, v in trained.weights.items() if name.rsplit("/", 1)[-1] in moving]

    def _compile_training(self, steps_per_execution: int) -> None:
        p, trained = self.program, self._trained
        assert p is not None and trained is not None and self._update is not None
        weighted = make_metrics(self._loss, self._metric_mean())
        trained.model.compile(
            optimizer=DeviceOptimizer(self._update),
            loss=MicroBatchLoss(self._loss, p.loss_scaling or 1.0),
            weighted_metrics=weighted,
            steps_per_execution=steps_per_execution,
        )
        self._steps = steps_per_execution

    def _metric_mean(self) -> Optional[Callable[[Any], Any]]:
        """The mean over replicas for metrics that the IPUs reduce themselves; stages of a pipeline cannot."""
        p = self.program
        assert p is not None
        if self._config.accelerator_side_reduction and p.num_stages == 1 and p.num_replicas > 1:
            return self._device.mean_over_replicas
        return None

    def _report(self, model: Any, trace_s: float, fused: int) -> CompilationReport:
        weights = named_weights(model)
        trainable = {id(_underlying(v)) for v in model.trainable_weights}
        return CompilationReport(
            device=self.device,
            num_layers=len(model.layers),
            num_parameters=sum(int(np.prod(v.shape)) for v in weights.values()),
            num_trainable_parameters=sum(
                int(np.prod(v.shape)) for v in weights.values() if id(v) in trainable
            ),
            macs_per_sample=count_macs(model),
            num_graph_operations=0,
            trace_s=trace_s,
            first_update_s=0.0,
            fused_micro_batches=fused,
        )

    # --- training --------------------------------------------------------------------------------------

    def train(self, make_dataset: MakeDataset) -> Iterator[Event]:
        """See the contract.  Between two events lies a whole execution; what compiles is not timed.

        Raises:
            NotFiniteError: the loss is NaN or infinite; the weights are then those after that execution.
            InfeasibleError: the program does not fit.
        """
        p = self.program
        if p is None or self._trained is None:
            raise RuntimeError("compile() comes before train()")
        state, per_execution = self.state, p.weight_updates_per_execution
        while state.weight_updates - len(state.losses) < p.num_weight_updates:
            execution = (state.weight_updates - len(state.losses)) // per_execution
            end = (execution + 1) * per_execution
            busy_s, images_per_s = 0.0, 0.0
            if state.weight_updates < end:
                first, is_compiled = state.weight_updates, self.first_update_s > 0
                loss, hit, spent = self._execute(make_dataset(first, p.micro_batch_size), end - first)
                state.losses.extend([loss] * (end - first))
                state.hits.extend([hit] * (end - first))
                state.weight_updates = end
                if is_compiled:
                    busy_s = spent
                    images_per_s = (p.samples_before(end) - p.samples_before(first)) / spent
                _require_finite(loss, first, end, float(self._schedule(np.arange(end - 1, end))[0]))
                yield Progress(end, loss, hit, images_per_s)
            finished = ExecutionFinished(
                execution=execution,
                weight_updates=end,
                samples=p.samples_before(end),
                epoch=end / p.weight_updates_per_epoch,
                metrics={"loss": float(np.mean(state.losses)), "accuracy": float(np.mean(state.hits))},
                learning_rate=float(self._schedule(np.arange(end - 1, end))[0]),
                wall_s=busy_s,
                images_per_s=images_per_s,
            )
            yield from execution_events(p, finished)[state.events_done :]
            state.losses, state.hits, state.events_done = [], [], 0

    def feed(self, dataset: Any) -> Any:
        """See the contract: ``fit`` wants the data set itself."""
        return dataset

    def execute(self, batches: Any, num_weight_updates: int) -> List[float]:
        """See the contract; the loss is the execution's mean, once for each weight update.

        Raises:
            NotFiniteError: the loss is NaN or infinite.
        """
        first = self.state.weight_updates
        loss, _, _ = self._execute(batches, num_weight_updates)
        self.state.weight_updates = first + num_weight_updates
        last = self.state.weight_updates
        _require_finite(loss, first, last, float(self._schedule(np.arange(last - 1, last))[0]))
        return [loss] * num_weight_updates

    def _execute(self, dataset: Any, count: int) -> Any:
        """One execution of ``count`` weight updates from the state's position on: (loss, accuracy, seconds)."""
        p, trained, update = self.program, self._trained, self._update
        assert p is not None and trained is not None and update is not None
        first = self.state.weight_updates
        steps = count * p.gradient_accumulation_count
        if count > update.num_rates or steps > self._steps:
            with self._device.scope():
                update.num_rates = max(count, update.num_rates)
                update.rates = tf.Variable(tf.zeros([update.num_rates], tf.float32), trainable=False)
                self._compile_training(steps)
        update.set_rates(first, self._schedule(np.arange(first, first + count)))
        trained.model.optimizer.iterations.assign(first)
        instances = self._device.instances
        transfer = compute_type(self._config.precision)
        if self._device.preprocess is not None:
            transfer = self._device.preprocess[2]
        batches = training_batches(dataset, p, first, trained.takes_seeds, transfer, instances)
        replicas = p.num_replicas // instances.count
        if self._draws_random_numbers():
            self._device.reset_seed(_seed(p.seed, first))
        started = time.perf_counter()
        with self._device.running(training=True) as compiled:
            history = trained.model.fit(
                batches, epochs=1, steps_per_epoch=steps * replicas, verbose=0, shuffle=False
            )
        spent = time.perf_counter() - started
        self._note_compilation(spent, compiled)
        if not history.history:  # compiled without a device
            return float("nan"), float("nan"), spent
        loss, hit = (float(history.history[name][-1]) for name in ("mean_loss", "accuracy"))
        return loss, hit, spent

    def _draws_random_numbers(self) -> bool:
        """Whether the IPUs' own generator decides about anything."""
        p, trained = self.program, self._trained
        assert p is not None and trained is not None
        layers = {layer.name: type(layer).__name__ for layer in trained.model.layers}
        return self._config.stochastic_rounding != "OFF" or "Dropout" in layers.values()

    def _note_compilation(self, spent_s: float, modules: Sequence[Any]) -> None:
        """Keeps what the first execution's compiling took."""
        if self.first_update_s or self.compilation is None:
            return
        self.first_update_s = spent_s
        stages: Dict[str, float] = {}
        for module in modules:
            for stage, seconds in module.stages_s.items():
                stages[stage] = stages.get(stage, 0.0) + seconds
        self.compilation = replace(
            self.compilation, first_update_s=spent_s, stages_s=stages, cached=not modules
        )

    def recompute_statistics(self, make_dataset: MakeDataset) -> int:
        """See the contract: a pipelined forward pass on IPUs that returns each micro-batch's statistics."""
        p, trained = self.program, self._trained
        if p is None or trained is None:
            raise RuntimeError("compile() comes before recompute_statistics()")
        if p.num_stages == 1 or not trained.norms:
            return 0
        updates = min(STATISTICS_UPDATES, p.weight_updates_per_epoch)
        first, instances = self.state.weight_updates, self._device.instances
        steps = updates * p.gradient_accumulation_count
        with self._device.scope():
            if self._statistics is None:
                self._statistics = self._build(STATISTICS, p.micro_batch_size, "statistics")
                model = self._statistics.model
                assign_stages(model, layer_order(self._network), p.pipeline_splits)
                self._set_options(model, training=False)
                model.compile(steps_per_execution=steps)
        made = self._statistics
        copy_weights(trained.weights, made.weights)
        transfer = (
            self._device.preprocess[2] if self._device.preprocess else compute_type(self._config.precision)
        )
        batches = training_batches(
            make_dataset(first, p.micro_batch_size), p, 0, made.takes_seeds, transfer, instances
        )
        inputs = batches.map(lambda images, *rest: (images,))
        with self._device.running(training=False):
            found = made.model.predict(inputs, steps=steps * (p.num_replicas // instances.count), verbose=0)
        for position, name in enumerate(made.norms):
            for offset, moving in enumerate(("moving_mean", "moving_variance")):
                values = np.asarray(found[2 * position + offset], np.float64).mean(axis=0)
                self.state.weights[f"{name}/{moving}"].assign(values.astype(np.float32))
        return updates

    # --- prediction ------------------------------------------------------------------------------------

    def compile_prediction(self, model: Any, batch_shape: Sequence[int]) -> CompilationReport:
        """See the contract.  Poplar compiles in the first call of :meth:`predict`."""
        started = time.perf_counter()
        self.prepare_evaluation(model, None)
        self.compilation = self._report(model, time.perf_counter() - started, 1)
        return self.compilation

    def prepare_evaluation(self, model: Any, loss: Any) -> None:
        """See the contract.  IPUs as the configuration's replicas of validation need; no pipeline."""
        config = self._config
        self._network, self._loss = model, loss
        replicas = config.validation_num_replicas or config.num_replicas
        check_num_ipus(replicas, f"{replicas} replica(s) of evaluation")
        self._device.would_fit = self.would_fit
        self._attach(replicas, None)
        self._predictor = Predictor(
            self._device,
            lambda size: self._build("prediction", size, "prediction"),
            config.validation_micro_batch_size or config.micro_batch_size,
            replicas,
        )

    def _validation(self) -> Predictor:
        """The predictor, with the trained weights."""
        if self._predictor is None:
            p = self.program
            if p is None:
                raise RuntimeError("compile() or prepare_evaluation() comes before evaluate() and predict()")
            count = self._device.instances.count
            pipelined = self._config.pipeline_validation_model and p.num_stages > 1
            self._predictor = Predictor(
                self._device,
                lambda size: self._build("prediction", size, "validation"),
                p.validation_micro_batch_size,
                evaluation_replicas(p, self._config, count),
                prepare=self._pipeline_validation if pipelined else None,
                program=p if pipelined else None,
            )
        if self._trained is not None:
            self._predictor.take_weights(self._trained.weights)
        return self._predictor

    def _pipeline_validation(self, model: Any) -> None:
        p = self.program
        assert p is not None
        assign_stages(model, layer_order(self._network), p.pipeline_splits)
        self._set_options(model, training=False)

    def evaluate(self, dataset: Any, stop: Optional[Callable[[], bool]] = None) -> Dict[str, float]:
        """See the contract.  IPUs give the logits, the host adds up: every sample of weight 1 counts exactly once."""
        predictor, totals = self._validation(), MetricTotals()
        for images, labels, weights in dataset:
            if stop is not None and stop():
                raise Stopped
            logits = tf.constant(predictor.logits(images))
            with tf.device("/CPU:0"):
                losses = self._loss(logits, labels, int(logits.shape[0]))
                totals.add(batch_sums(logits, labels, weights, losses))
        return totals.result()

    def predict(self, dataset: Iterable[Any]) -> List[Any]:
        """See the contract."""
        predictor = self._validation()
        return [predictor.logits(images) for images in dataset]


def _underlying(weight: Any) -> Any:
    from ipucnn.compat import tf_variable

    return tf_variable(weight)


def _seed(run_seed: int, weight_update: int) -> int:
    """The IPUs' seed of the execution that begins there: a continued run draws as an uninterrupted one."""
    return zlib.crc32(f"{run_seed}/{weight_update}".encode()) & 0x7FFFFFFF


def _require_finite(loss: float, first: int, end: int, rate: float) -> None:
    if not np.isfinite(loss):
        raise NotFiniteError(
            f"the loss became {loss} in the execution of weight updates {first + 1} to {end}",
            f"lower the learning rate (it was {rate:.4g}); checkpoints written before are kept",
        )
