"""The Poplar session: Programs on IPUs through the SDK's Keras."""

import time
from dataclasses import replace
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from ipucnn.errors import ConfigurationError
from ipucnn.hardware import get_ipu
from ipucnn.models.counts import count_macs
from ipucnn.models.names import named_weights
from ipucnn.sessions.poplar.device import Device
from ipucnn.sessions.poplar.evaluation import Predictor
from ipucnn.sessions.poplar.model import (
    PREDICTION,
    STATISTICS,
    TRAINING,
    DeviceModel,
    Shape,
    build_for_ipus,
    compute_type,
    layer_order,
)
from ipucnn.sessions.poplar.pipelining import accumulation_options, assign_stages, pipelining_options
from ipucnn.sessions.poplar.statistics import StatisticsNetwork
from ipucnn.sessions.poplar.training import TrainedNetwork
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
    recomputes_statistics,
)
from ipucnn.training.metrics import MetricTotals, batch_sums
from ipucnn.training.optimizers import OptimizerSettings
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
        self._trained: Optional[TrainedNetwork] = None
        self._predictor: Optional[Predictor] = None
        self._statistics: Optional[StatisticsNetwork] = None
        self._loss: Any = None

    def take_preprocessing(self, affine: Any) -> bool:
        """Whether IPUs bring images to the network's range: under 8-bit transfer or preprocessing on the accelerator.

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
        """Builds what IPUs train.  Poplar compiles it in the first execution; see ``compilation`` afterwards.

        Raises:
            ConfigurationError: the SDK cannot run the program.
            MissingError: there are no such IPUs.
        """
        instances = self._device.instances
        check_program(program, self._config, instances)
        if program.fused_micro_batches == 0:
            program = program.with_fused(program.dbn_replica_group_size)
        self._device.would_fit = self.would_fit
        self.program, self._loss, self._network = program, loss, model
        self._attach(program.num_ipus // instances.count, program)
        started = time.perf_counter()
        with self._device.scope():
            made = self._build(TRAINING, program.micro_batch_size, "training")
            self._set_options(made.model, training=True)
        self._trained = TrainedNetwork(self._device, self._config, program, made, optimizer, loss, schedule)
        self.state = TrainState(self._trained.weights, self._trained.slots, 0)
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
        """The network for a purpose; one that is trained is split into the program's stages."""
        config, p = self._config, self.program
        shape = Shape(
            micro_batch_size=micro_batch_size,
            purpose=purpose,
            precision=config.precision,
            stateless_dropout=config.dropout_layer == "stateless",
            preprocess=self._device.preprocess,
        )
        made = build_for_ipus(self._device.api, self._network, shape, name)
        if purpose != PREDICTION and p is not None and p.num_stages > 1:
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

    def _report(self, model: Any, trace_s: float, fused: int) -> CompilationReport:
        from ipucnn.compat import tf_variable

        weights = named_weights(model)
        trainable = {id(tf_variable(v)) for v in model.trainable_weights}
        sizes = {name: int(np.prod(v.shape)) for name, v in weights.items()}
        return CompilationReport(
            device=self.device,
            num_layers=len(model.layers),
            num_parameters=sum(sizes.values()),
            num_trainable_parameters=sum(sizes[k] for k, v in weights.items() if id(v) in trainable),
            macs_per_sample=count_macs(model),
            num_graph_operations=0,
            trace_s=trace_s,
            first_update_s=0.0,
            fused_micro_batches=fused,
        )

    def compile_ahead(
        self, make_dataset: MakeDataset, evaluation: Optional[Iterable[Any]]
    ) -> CompilationReport:
        """Starts the programs of training and evaluation once each, on a connection that compiles and executes nothing.

        Raises:
            InfeasibleError: the program does not fit.
        """
        p = self.program
        if p is None or self._trained is None:
            raise RuntimeError("compile() comes before compile_ahead()")
        started = time.perf_counter()
        self._trained.execute(make_dataset(0, p.micro_batch_size), 0, p.weight_updates_per_execution)
        self.recompute_statistics(make_dataset)
        if evaluation is not None:
            next(self.logits(evaluation), None)
        self._note_compilation(time.perf_counter() - started, self._device.compiled)
        assert self.compilation is not None
        return self.compilation

    # --- training --------------------------------------------------------------------------------------

    def train(self, make_dataset: MakeDataset) -> Iterator[Event]:
        """Runs the Program from ``state`` on.  Between two events lies a whole execution; what compiles is not timed.

        Raises:
            NotFiniteError: the loss is NaN or infinite; the weights are then those after that execution.
            InfeasibleError: the program does not fit.
        """
        p, trained = self.program, self._trained
        if p is None or trained is None:
            raise RuntimeError("compile() comes before train()")
        state, per_execution = self.state, p.weight_updates_per_execution
        while state.weight_updates - len(state.losses) < p.num_weight_updates:
            execution = (state.weight_updates - len(state.losses)) // per_execution
            end = (execution + 1) * per_execution
            busy_s, images_per_s = 0.0, 0.0
            if state.weight_updates < end:
                first, is_compiled = state.weight_updates, self.first_update_s > 0
                loss, hit, spent_s = self._execute(make_dataset(first, p.micro_batch_size), end - first)
                state.losses.extend([loss] * (end - first))
                state.hits.extend([hit] * (end - first))
                state.weight_updates = end
                if is_compiled:
                    busy_s = spent_s
                    images_per_s = (p.samples_before(end) - p.samples_before(first)) / spent_s
                _require_finite(loss, first, end, trained.rate(end - 1))
                yield Progress(end, loss, hit, images_per_s)
            finished = ExecutionFinished(
                execution=execution,
                weight_updates=end,
                samples=p.samples_before(end),
                epoch=end / p.weight_updates_per_epoch,
                metrics={"loss": float(np.mean(state.losses)), "accuracy": float(np.mean(state.hits))},
                learning_rate=trained.rate(end - 1),
                wall_s=busy_s,
                images_per_s=images_per_s,
            )
            yield from execution_events(p, finished)[state.events_done :]
            state.losses, state.hits, state.events_done = [], [], 0

    def feed(self, dataset: Any) -> Any:
        """The data set as it is: ``fit`` takes no iterator."""
        return dataset

    def execute(self, batches: Any, num_weight_updates: int) -> List[float]:
        """Runs weight updates as one execution, whose mean loss is given once for each of them.

        Raises:
            NotFiniteError: the loss is NaN or infinite.
        """
        trained = self._trained
        assert trained is not None
        first = self.state.weight_updates
        loss, _, _ = self._execute(batches, num_weight_updates)
        last = first + num_weight_updates
        self.state.weight_updates = last
        _require_finite(loss, first, last, trained.rate(last - 1))
        return [loss] * num_weight_updates

    def _execute(self, dataset: Any, count: int) -> Tuple[float, float, float]:
        """One execution of ``count`` weight updates from the state's position on: (loss, accuracy, seconds)."""
        assert self._trained is not None
        started = time.perf_counter()
        loss, hit, compiled = self._trained.execute(dataset, self.state.weight_updates, count)
        spent_s = time.perf_counter() - started
        self._note_compilation(spent_s, compiled)
        return loss, hit, spent_s

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

    def any_instance(self, flag: bool) -> bool:
        """Whether a flag is set on any of the instances, told by its mean over them."""
        return bool(self._device.mean_over_instances([float(flag)])[0] > 0)

    def recompute_statistics(self, make_dataset: MakeDataset) -> int:
        """Takes the moving statistics from a forward pass over training batches on IPUs, pipelined like training."""
        p, trained = self.program, self._trained
        if p is None or trained is None:
            raise RuntimeError("compile() comes before recompute_statistics()")
        if not trained.made.norms or not recomputes_statistics(p, self._config.precision):
            return 0
        updates = min(STATISTICS_UPDATES, p.weight_updates_per_epoch)
        if self._statistics is None:
            self._statistics = StatisticsNetwork(
                self._device, self._config, p, self._build_statistics, updates
            )
        batches = make_dataset(self.state.weight_updates, p.micro_batch_size)
        for name, value in self._statistics.measure(trained.made.weights, batches).items():
            self.state.weights[name].assign(value)
        return updates

    def _build_statistics(self) -> DeviceModel:
        assert self.program is not None
        made = self._build(STATISTICS, self.program.micro_batch_size, "statistics")
        self._set_options(made.model, training=False)
        return made

    # --- prediction ------------------------------------------------------------------------------------

    def compile_prediction(self, model: Any, batch_shape: Sequence[int]) -> CompilationReport:
        """Builds what :meth:`predict` runs.  Poplar compiles it in the first call."""
        started = time.perf_counter()
        self.prepare_evaluation(model, None)
        self.compilation = self._report(model, time.perf_counter() - started, 1)
        return self.compilation

    def prepare_evaluation(self, model: Any, loss: Any) -> None:
        """Prepares an evaluation without a pipeline, on the IPUs that the replicas of validation need."""
        config = self._config
        self._network, self._loss = model, loss
        self._device.would_fit = self.would_fit
        replicas = config.validation_num_replicas or config.num_replicas
        check_num_ipus(replicas, f"{replicas} replica(s) of evaluation", "--validation-num-replicas")
        self._attach(replicas, None)
        self._predictor = Predictor(
            self._device,
            lambda size: self._build(PREDICTION, size, "prediction"),
            config.validation_micro_batch_size or config.micro_batch_size,
            replicas,
        )

    def _validation(self) -> Predictor:
        """The predictor, with the trained weights."""
        if self._predictor is None:
            p = self.program
            if p is None:
                raise RuntimeError("compile() or prepare_evaluation() comes before evaluate() and predict()")
            pipelined = self._config.pipeline_validation_model and p.num_stages > 1
            self._predictor = Predictor(
                self._device,
                lambda size: self._build(PREDICTION, size, "validation"),
                p.validation_micro_batch_size,
                evaluation_replicas(p, self._config, self._device.instances.count),
                prepare=self._pipeline_validation if pipelined else None,
                program=p if pipelined else None,
            )
        if self._trained is not None:
            self._predictor.take_weights(self._trained.made.weights)
        return self._predictor

    def _pipeline_validation(self, model: Any) -> None:
        p = self.program
        assert p is not None
        assign_stages(model, layer_order(self._network), p.pipeline_splits)
        self._set_options(model, training=False)

    def evaluate(self, dataset: Any, stop: Optional[Callable[[], bool]] = None) -> Dict[str, float]:
        """Metrics of logits from IPUs, added up on the host; every sample of weight 1 counts exactly once.

        Every instance evaluates the whole data set.
        """

        def unless_stopped() -> Iterator[Any]:
            for batch in dataset:
                if stop is not None and self.any_instance(stop()):
                    raise Stopped
                yield batch

        totals = MetricTotals()
        for (_, labels, weights), found in self.logits(unless_stopped()):
            with tf.device("/CPU:0"):
                logits = tf.constant(found)
                losses = self._loss(logits, labels, int(logits.shape[0]))
                totals.add(batch_sums(logits, labels, weights, losses))
        return totals.result()

    def logits(self, batches: Iterable[Tuple[Any, ...]]) -> Iterator[Tuple[Tuple[Any, ...], Any]]:
        """Each batch with its logits, in order; several batches are one execution."""
        return self._validation().logits(batches)

    def predict(self, dataset: Iterable[Any]) -> List[Any]:
        """Logits of every element of a data set of images, one array per element."""
        return [found for _, found in self.logits((images,) for images in dataset)]


def _require_finite(loss: float, first: int, end: int, rate: float) -> None:
    if not np.isfinite(loss):
        raise NotFiniteError(
            f"the loss became {loss} in the execution of weight updates {first + 1} to {end}",
            f"lower the learning rate (it was {rate:.4g}); checkpoints written before are kept",
        )
