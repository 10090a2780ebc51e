"""The Poplar session: Programs on IPUs through the SDK's Keras."""

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Callable, Dict, FrozenSet, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from ipucnn.aliases import KerasModel, Tensor, TfDataset
from ipucnn.datasets.pixels import InputRange
from ipucnn.errors import ConfigurationError
from ipucnn.hardware import get_ipu
from ipucnn.sessions.evaluated import STATISTICS_UPDATES, Statistics, statistics_policy
from ipucnn.sessions.host.arithmetic import Arithmetic
from ipucnn.sessions.host.division import Division
from ipucnn.sessions.host.network import Weights
from ipucnn.sessions.host.statistics import LargeBatches
from ipucnn.sessions.poplar.batches import BatchStream
from ipucnn.sessions.poplar.checks import check_remote_memory, evaluation_replicas
from ipucnn.sessions.poplar.device import Device
from ipucnn.sessions.poplar.model import (
    PREDICTION,
    STATISTICS,
    TRAINING,
    DeviceModel,
    ModelSpec,
    assign_stages,
    assign_weights,
    build_for_ipus,
)
from ipucnn.sessions.poplar.options import accumulation_options, pipelining_options
from ipucnn.sessions.poplar.prediction import Predictor, StatisticsNetwork
from ipucnn.sessions.poplar.surroundings import cached_programs, executable_cache, gives_nothing_back
from ipucnn.sessions.poplar.training import TrainedNetwork
from ipucnn.sessions.session import (
    Batch,
    CompilationReport,
    DeviceInfo,
    MakeDataset,
    Session,
    Stopped,
    TrainedPart,
    TrainingFeed,
    TrainState,
)
from ipucnn.training.evaluation import Totals
from ipucnn.training.losses import Loss
from ipucnn.training.optimizer_settings import OptimizerSettings
from ipucnn.training.program import BuiltProgram, Program
from ipucnn.training.schedules import Schedule

# Generation whose tiles and memory are reported; Bow has the same.
_IPU = "mk2"


class PoplarSession(Session):
    """Runs Programs on IPUs; see :class:`ipucnn.sessions.session.Session`.

    IPUs train a copy of the network that is built for them; its weights are ``state.weights``.

    Args:
        device: the SDK, and the IPUs of this process.
    """

    _has_loss_of_each_update = False
    _programs: FrozenSet[str]

    def __init__(self, device: Device) -> None:
        self._device, self._config = device, device.config
        self.device = DeviceInfo("ipu", "IPU", 0, 0)
        self.state = TrainState()
        self._network: KerasModel = None
        self._trained: Optional[TrainedNetwork] = None
        self._predictor: Optional[Predictor] = None
        self._statistics: Optional[StatisticsNetwork] = None
        self._large_batches: Optional[LargeBatches] = None
        self._host_weights: Optional[Weights] = None

    def take_preprocessing(self, input_range: InputRange) -> bool:
        """Takes the last step of preprocessing with ``eight_bit_transfer`` or ``accelerator_side_preprocess``.

        Raises:
            ConfigurationError: the SDK's fused operation does not support it.
        """
        preprocess = self._device.preprocess.moved(
            input_range, self._config.eight_bit_transfer, self._config.accelerator_side_preprocess
        )
        if preprocess.on_device is None:
            return False
        if self._config.fused_preprocessing and (
            input_range.per_image or input_range.reverse or len(input_range.offsets) != 3
        ):
            what = "an image by itself" if input_range.per_image else "other channels"
            raise ConfigurationError(
                f"--fused-preprocessing normalises red, green and blue by constants, and this network takes {what}",
                "drop it; preprocessing still runs on the IPU",
            )
        self._device.preprocess = preprocess
        return True

    # --- building --------------------------------------------------------------------------------------

    def divide(self, model: KerasModel, program: Program, fused: Optional[int] = None) -> Division:
        """Returns a division without fused micro-batches: IPUs compute them one by one."""
        instances = self._device.instances
        return Division(program, program.dbn_replica_group_size, instances.size, instances.rank)

    def compile(
        self,
        model: KerasModel,
        program: BuiltProgram,
        division: Division,
        optimizer: OptimizerSettings,
        loss: Loss,
        schedule: Schedule,
        make_dataset: Optional[MakeDataset] = None,
    ) -> CompilationReport:
        """Builds the network for IPUs.  Poplar compiles it in the first execution; see ``compilation`` afterwards.

        The Program has passed :func:`~ipucnn.sessions.poplar.checks.check_program`.

        Raises:
            ConfigurationError: it needs remote memory, which the IPUs lack, or ``--select-ipu`` names another device.
            MissingError: there are no such IPUs.
            ValueError: the Program has another precision than the configuration.
        """
        self._require_same_precision(program)
        self._device.kept_remotely = check_remote_memory(program, self._config, self.would_fit)
        self.program, self.division, self._network, self._loss = program, division, model, loss
        self._schedule = schedule
        self._programs = cached_programs()
        self._attach(program.num_ipus // self._device.instances.size, program)
        started = time.perf_counter()
        with self._device.scope():
            network = self._build(TRAINING, program.micro_batch_size, "training", program)
        self._trained = TrainedNetwork(self._device, program, network, optimizer, loss, schedule)
        self.state = TrainState(self._trained.weights, self._trained.slots, 0)
        return self._report(model, time.perf_counter() - started, program.fused_micro_batches)

    def _attach(self, num_ipus: int, program: Optional[BuiltProgram]) -> None:
        """Configures the system for ``num_ipus`` IPUs."""
        self._device.would_fit = self.would_fit
        self._device.configure(num_ipus, program)
        ipu = get_ipu(_IPU)
        memory_bytes = num_ipus * ipu.num_tiles * ipu.sram_per_tile_bytes
        plural = "s" if num_ipus > 1 else ""
        self.device = DeviceInfo("ipu", f"{num_ipus} IPU{plural}", num_ipus * ipu.num_tiles, memory_bytes)

    def _build(
        self, purpose: str, micro_batch_size: int, name: str, program: Optional[BuiltProgram] = None
    ) -> DeviceModel:
        """Builds the network for a purpose; with a program, in its stages and with the SDK's options for it."""
        config = self._config
        spec = ModelSpec(
            micro_batch_size=micro_batch_size,
            purpose=purpose,
            precision=config.precision,
            stateless_dropout=config.dropout_layer == "stateless",
            preprocess=self._device.preprocess,
            fused_preprocessing=config.fused_preprocessing,
            rounds_to_nearest=self._device.rounds_stochastically and purpose != TRAINING,
        )
        network = build_for_ipus(self._device.api, self._network, spec, name)
        if program is not None:
            if program.num_stages > 1:
                layers = [layer.name for layer in self._network.layers]
                assign_stages(network.model, layers, program.pipeline_splits)
            self._set_options(network.model, program, training=purpose == TRAINING)
        return network

    def _set_options(self, model: KerasModel, program: Program, training: bool) -> None:
        """Sets the SDK's options of a model, which models do not save."""
        p, config = program, self._config
        if p.num_stages > 1:
            model.set_pipelining_options(**pipelining_options(self._device.api.ipu, p, config, training))
        elif training and p.gradient_accumulation_count > 1:
            model.set_gradient_accumulation_options(**accumulation_options(p, config))
        model.set_infeed_queue_options(prefetch_depth=config.prefetch_depth)
        if training and p.num_replicas > 1 and p.num_stages == 1 and self._device.api.reduces_metrics:
            model.set_replication_options(replicated_metric_reduction_method="MEAN")

    def compile_ahead(
        self, make_dataset: MakeDataset, evaluation: Optional[Iterable[Batch]]
    ) -> CompilationReport:
        """Compiles each program without executing it.

        Raises:
            InfeasibleError: the program does not fit.
        """
        p = self.program
        if p is None or self._trained is None:
            raise RuntimeError("compile() comes before compile_ahead()")
        started = time.perf_counter()
        stream = self._trained.stream(make_dataset(0, p.micro_batch_size), 0)
        self._trained.execute(stream, 0, p.weight_updates_per_execution)
        if statistics_policy(self._config, p) is Statistics.RECOMPUTED:
            self.recompute_statistics(make_dataset, min(STATISTICS_UPDATES, p.weight_updates_per_epoch))
        if evaluation is not None:
            next(self.logits(evaluation), None)
        self._note_compilation(time.perf_counter() - started)
        assert self.compilation is not None
        return self.compilation

    # --- training --------------------------------------------------------------------------------------

    def _start(self, make_dataset: MakeDataset) -> Callable[[int], TrainedPart]:
        """Prepares to run whole executions; the first one compiles, and is not timed."""
        p = self.program
        assert p is not None
        stream = self.feed(make_dataset(self.state.weight_updates, p.micro_batch_size))

        def run(end: int) -> TrainedPart:
            assert self.compilation is not None
            is_compiled = self.compilation.first_update_s > 0
            part = self._run(stream, end - self.state.weight_updates)
            return part if is_compiled else replace(part, timed_s=0.0)

        return run

    def feed(self, dataset: TfDataset) -> BatchStream:
        """Returns a stream of batches for :meth:`execute`, which continues where it stopped."""
        if self._trained is None:
            raise RuntimeError("compile() comes before feed()")
        return self._trained.stream(dataset, self.state.weight_updates)

    def _run(self, batches: TrainingFeed, num_weight_updates: int) -> TrainedPart:
        """Runs one execution; its mean loss and accuracy stand for each of its weight updates."""
        assert self._trained is not None
        started = time.perf_counter()
        loss, hit = self._trained.execute(batches, self.state.weight_updates, num_weight_updates)
        spent_s = time.perf_counter() - started
        self._note_compilation(spent_s)
        return TrainedPart([loss] * num_weight_updates, [hit] * num_weight_updates, spent_s)

    def _note_compilation(self, spent_s: float) -> None:
        """Records the time of the first execution, and whether its programs came from the executable cache."""
        if self.compilation is None or self.compilation.first_update_s:
            return
        is_cached = bool(executable_cache()) and cached_programs() == self._programs
        self.compilation = replace(self.compilation, first_update_s=spent_s, cached=is_cached)

    def any_instance(self, flag: bool) -> bool:
        """Returns whether a flag is set on any instance of ``poprun``; every instance must make this call."""
        return bool(self._device.mean_over_instances([float(flag)])[0] > 0)

    def of_first_instance(self, value: float) -> float:
        """Returns the value of the first instance; every instance must make this call."""
        return self._device.of_first_instance(value)

    def recompute_statistics(self, make_dataset: MakeDataset, num_updates: int) -> List[str]:
        """Runs a forward pass on IPUs, pipelined like training."""
        p, trained = self.program, self._trained
        assert p is not None and trained is not None
        if not trained.network.norms:
            return []
        if self._statistics is None:
            self._statistics = StatisticsNetwork(
                self._device,
                p,
                lambda: self._build(STATISTICS, p.micro_batch_size, "statistics", p),
                num_updates,
            )
        batches = make_dataset(self.state.weight_updates, p.micro_batch_size)
        return self._take_statistics(self._statistics.measure(trained.network.weights, batches))

    def measure_statistics(self, images: TfDataset) -> List[str]:
        """Measures on the host's CPU, with the IPUs' weights and precision: the batches do not fit on IPUs.

        Every instance uses all images.
        """
        with tf.device("/CPU:0"):
            if self._large_batches is None:
                arithmetic = Arithmetic(self._config.precision, nanoo=self._config.nanoo)
                self._host_weights = Weights(self._network, arithmetic)
                unpack = self._device.preprocess.unpack
                self._large_batches = LargeBatches(self._network, arithmetic, unpack, on_cpu=True)
            assert self._host_weights is not None
            assign_weights(self.state.weights, self._host_weights.kept)
            self._host_weights.round_to_nearest()
            return self._take_statistics(
                self._large_batches.measure(self._device.preprocess.pack_8_bits(images))
            )

    def _take_statistics(self, values: Mapping[str, np.ndarray]) -> List[str]:
        """Sets moving statistics, and returns their names."""
        for name, value in values.items():
            self.state.weights[name].assign(value)
        return list(values)

    # --- prediction ------------------------------------------------------------------------------------

    def compile_prediction(self, model: KerasModel, batch_shape: Sequence[int]) -> CompilationReport:
        """Builds the network for IPUs.  Poplar compiles it in the first call of :meth:`predict`.

        Instances of ``poprun`` then predict batches of their own.
        """
        started = time.perf_counter()
        self.prepare_evaluation(model, None, shares=False)
        return self._report(model, time.perf_counter() - started, 1)

    def prepare_evaluation(self, model: KerasModel, loss: Optional[Loss], shares: bool = True) -> None:
        """Attaches the IPUs of this instance of ``poprun``, or one per replica of validation; without a pipeline.

        With ``shares``, instances share the samples; otherwise each has its own.
        """
        config = self._config
        self._network, self._loss = model, loss
        replicas = evaluation_replicas(self._device.instances, config)
        self._attach(replicas, None)
        size = config.validation_micro_batch_size or config.micro_batch_size
        self._predictor = Predictor(
            self._device,
            lambda: self._build(PREDICTION, size, "prediction"),
            size,
            replicas,
            self._gives_zeros(),
            shares=shares,
        )

    def write_program(
        self, model: KerasModel, folder: Path, batch_size: int, output_name: str
    ) -> Callable[[np.ndarray], np.ndarray]:
        """Writes a network as a SavedModel that holds the program of one IPU, for TensorFlow Serving.

        The program is compiled: layers and weights cannot be read from it.

        Args:
            model: the network with its weights.
            folder: an absent or empty folder.
            batch_size: the images of each call.
            output_name: the name of the logits in the signature; the input has the name of the network's.

        Returns:
            A function that runs the program: images of one batch -> float32 logits.

        Raises:
            MissingError: there is no IPU.
            InfeasibleError: the network does not fit on one.
        """
        self._network = model
        self._attach(1, None)
        with self._device.scope():
            served = self._build(PREDICTION, batch_size, "serving").model
            # Calls that run together; more of them would delay the first result.
            served.compile(steps_per_execution=1)
        with self._device.running(training=False):
            predict = self._device.api.ipu.serving.export_keras(
                served, str(folder), batch_size, output_names=output_name
            )

        def run(images: np.ndarray) -> np.ndarray:
            with self._device.running(training=False):
                logits = predict(tf.constant(images, served.inputs[0].dtype))
            return np.asarray(logits[output_name], np.float32)

        return run

    def _validation(self) -> Predictor:
        """Returns the predictor, with the trained weights."""
        if self._predictor is None:
            p = self.program
            if p is None:
                raise RuntimeError("compile() or prepare_evaluation() comes before evaluate() and predict()")
            size = p.validation_micro_batch_size
            pipeline = p if self._config.pipeline_validation_model and p.num_stages > 1 else None
            self._predictor = Predictor(
                self._device,
                lambda: self._build(PREDICTION, size, "validation", pipeline),
                size,
                p.validation_num_replicas,
                self._gives_zeros(),
                pipeline,
            )
        if self._trained is not None:
            self._predictor.take_weights(self._trained.network.weights)
        return self._predictor

    def _gives_zeros(self) -> bool:
        """Returns whether IPUs return zeros, for fewer images than were sent."""
        return gives_nothing_back() or self._config.compile_only

    def evaluate(
        self, dataset: Iterable[Batch], stop: Optional[Callable[[], bool]] = None
    ) -> Dict[str, float]:
        """Computes logits on IPUs and adds up metrics on the host: every sample of weight 1 counts exactly once.

        Each instance has the totals of all instances.
        """
        predictor = self._validation()
        # One process can stop between any two batches; instances agree once per execution.
        between = predictor.samples_per_execution if self._device.instances.size > 1 else 0

        def unless_stopped() -> Iterator[Batch]:
            given = due = 0
            for batch in dataset:
                if stop is not None and given >= due:
                    if self.any_instance(stop()):
                        raise Stopped
                    due = given + between
                given += len(batch[0])
                yield batch

        totals = Totals()
        for (_, labels, weights), logits in predictor.logits_of_parts(unless_stopped()):
            totals.add(self._sums_of_batch(logits, labels, weights))
        return totals.result()

    @property
    def evaluation_part(self) -> Tuple[int, int]:
        """Returns (number of instances of ``poprun``, index of this one)."""
        return self._device.instances.size, self._device.instances.rank

    def logits(self, batches: Iterable[Batch]) -> Iterator[Tuple[Batch, np.ndarray]]:
        """Computes several batches per execution.  Instances share the work if batches have images alone."""
        left = iter(batches)
        for first in left:
            predictor = self._validation()
            given = itertools.chain([first], left)
            yield from predictor.logits(given) if len(first) == 1 else predictor.logits_of_parts(given)

    def predict(self, dataset: Iterable[Tensor]) -> List[np.ndarray]:
        """Returns the logits of each element, computing several at once.  All instances receive the same elements."""
        return [logits for _, logits in self._validation().logits((images,) for images in dataset)]
