"""The Poplar session: Programs on IPUs through the SDK's Keras."""

import time
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Callable, Iterable, List, Mapping, Optional, Tuple

import numpy as np
import tensorflow as tf

from ipucnn.aliases import KerasModel, MemoryAdvice, TfDataset
from ipucnn.config.options import RunConfig
from ipucnn.datasets.pixels import InputRange, Transfer
from ipucnn.errors import ConfigurationError
from ipucnn.sessions.evaluated import Statistics, statistics_policy, statistics_updates
from ipucnn.sessions.group import ProcessGroup
from ipucnn.sessions.host.arithmetic import Arithmetic
from ipucnn.sessions.host.division import Division, one_by_one
from ipucnn.sessions.host.network import HostWeights
from ipucnn.sessions.host.statistics import LargeBatches
from ipucnn.sessions.poplar.batches import BatchStream
from ipucnn.sessions.poplar.checks import check_remote_memory, local_evaluation_replicas
from ipucnn.sessions.poplar.device import Api, Exchange, Ipus, compute_type
from ipucnn.sessions.poplar.model import PREDICTION, TRAINING, assign_weights, build_network
from ipucnn.sessions.poplar.prediction import PoplarPredictor, StatisticsNetwork
from ipucnn.sessions.poplar.sdk_environment import cached_programs, executable_cache
from ipucnn.sessions.poplar.training import TrainedNetwork
from ipucnn.sessions.session import (
    Batch,
    CompilationReport,
    DeviceInfo,
    MakeDataset,
    Session,
    TrainedPart,
    Trainer,
    TrainingFeed,
    TrainingTask,
    TrainState,
    check_precision,
    compilation_report,
)
from ipucnn.training.program import BatchLayout, Program


class PoplarSession(Session):
    """Makes trainers and predictors on IPUs; see :class:`ipucnn.sessions.session.Session`.

    Args:
        api: the SDK's modules.
        instances: the instances of ``poprun``, and which one this process is.
        config: the options of the run.
        preprocess: how images get to the IPUs; None: in the type in which networks compute.
    """

    def __init__(
        self, api: Api, instances: ProcessGroup, config: RunConfig, preprocess: Optional[Transfer] = None
    ) -> None:
        self._api, self._instances, self._config = api, instances, config
        self._preprocess = preprocess or Transfer(compute_type(config.precision))
        self._exchange = Exchange(api, instances)
        # (number, Program, advice, options that need remote memory) -> the configured IPUs
        self._configured = partial(Ipus, api, self._exchange, config, self._preprocess)
        self.device = DeviceInfo("ipu", "IPU", 0, 0)
        self.takes_pixels = self._preprocess.on_device is not None

    def with_pixels(self, input_range: InputRange) -> "PoplarSession":
        """Takes the last step of preprocessing with ``eight_bit_transfer`` or ``accelerator_side_preprocess``.

        Raises:
            ConfigurationError: the SDK's fused operation does not support it.
        """
        config = self._config
        moved = self._preprocess.moved(
            input_range, config.eight_bit_transfer, config.accelerator_side_preprocess
        )
        is_constant = not (input_range.per_image or input_range.reverse) and len(input_range.offsets) == 3
        if moved.on_device is not None and config.fused_preprocessing and not is_constant:
            what = "an image by itself" if input_range.per_image else "other channels"
            raise ConfigurationError(
                f"--fused-preprocessing normalises red, green and blue by constants, and this network takes {what}",
                "add --no-fused-preprocessing; preprocessing still runs on the IPU",
            )
        return PoplarSession(self._api, self._instances, config, moved)

    def divide(self, model: KerasModel, program: Program, fused: Optional[int] = None) -> Division:
        """Returns a division without fused micro-batches: IPUs compute them one by one."""
        return one_by_one(program, self._instances)

    def divide_inference(
        self, model: KerasModel, batch: BatchLayout, num_micro_batches: int, fused: Optional[int] = None
    ) -> Division:
        """Returns a division without fused micro-batches, as in training."""
        return one_by_one(batch, self._instances)

    def trainer(self, task: TrainingTask) -> "PoplarTrainer":
        """Builds the network for IPUs.  Poplar compiles it in the first execution.

        The Program has passed :func:`~ipucnn.sessions.poplar.checks.check_program`.

        Raises:
            ConfigurationError: it needs remote memory, which the IPUs lack, or ``--select-ipu`` names another device.
            MissingError: there are no such IPUs.
            ValueError: the Program has another precision than the configuration.
        """
        program, memory_advice = task.program, task.memory_advice
        check_precision(program, self._config)
        kept_remotely = check_remote_memory(program, self._config, memory_advice)
        ipus = self._configured(
            program.num_ipus // self._instances.size, program, memory_advice, kept_remotely
        )
        return PoplarTrainer(ipus, task)

    def predictor(
        self, model: KerasModel, memory_advice: Optional[MemoryAdvice] = None, shares: bool = True
    ) -> PoplarPredictor:
        """Attaches the IPUs of this instance of ``poprun``, or one per replica of validation; without a pipeline."""
        config = self._config
        replicas = local_evaluation_replicas(self._instances, config)
        size = config.validation_micro_batch_size or config.micro_batch_size
        predictor = PoplarPredictor(
            self._configured(replicas, memory_advice=memory_advice), model, size, replicas, shares=shares
        )
        predictor.network  # noqa: B018 - built on first use
        return predictor

    def any_instance(self, flag: bool) -> bool:
        """Returns whether a flag is set on any instance of ``poprun``; every instance must make this call."""
        return self._exchange.any_instance(flag)

    def of_first_instance(self, value: float) -> float:
        """Returns the value of the first instance; every instance must make this call."""
        return self._exchange.of_first_instance(value)

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
        ipus = self._configured(1)
        served = build_network(ipus, model, PREDICTION, batch_size, "serving").model
        with ipus.scope():
            # Calls that run together; more of them would delay the first result.
            served.compile(steps_per_execution=1)
        with ipus.running(training=False):
            predict = self._api.ipu.serving.export_keras(
                served, str(folder), batch_size, output_names=output_name
            )

        def run(images: np.ndarray) -> np.ndarray:
            with ipus.running(training=False):
                logits = predict(tf.constant(images, served.inputs[0].dtype))
            return np.asarray(logits[output_name], np.float32)

        return run


class PoplarTrainer(Trainer):
    """Trains a copy of the network that is built for IPUs; its weights are ``state.weights``.

    See :meth:`PoplarSession.trainer`.
    """

    has_loss_of_each_update = False

    def __init__(self, ipus: Ipus, task: TrainingTask) -> None:
        super().__init__(task)
        self._ipus, self._network = ipus, task.model
        model, program = task.model, task.program
        self._programs = cached_programs()
        self._is_compiled = False
        started = time.perf_counter()
        network = build_network(ipus, model, TRAINING, program.micro_batch_size, "training", program)
        self._trained = TrainedNetwork(ipus, task, network)
        self.state = TrainState(self._trained.weights, self._trained.slots, 0)
        built_s = time.perf_counter() - started
        self.compilation = compilation_report(ipus.info, model, built_s, program.fused_micro_batches)
        is_pipeline = ipus.config.pipeline_validation_model and program.num_stages > 1
        self.predictor = PoplarPredictor(
            ipus,
            model,
            program.validation_micro_batch_size,
            program.validation_num_replicas,
            program if is_pipeline else None,
            trained=network.weights,
        )

    def compile_ahead(
        self, make_dataset: MakeDataset, evaluation: Optional[Iterable[Batch]]
    ) -> CompilationReport:
        """Compiles each program without executing it, with ``compile_only``; nothing else can follow.

        Args:
            make_dataset: the function that makes the training data set.
            evaluation: batches as for :meth:`PoplarPredictor.evaluate`, or None.

        Raises:
            InfeasibleError: the program does not fit.
        """
        p = self.program
        started = time.perf_counter()
        stream = self._trained.stream(make_dataset(0, p.micro_batch_size), 0)
        self._trained.execute(stream, 0, p.weight_updates_per_execution)
        if statistics_policy(self._ipus.config, p) is Statistics.RECOMPUTED:
            self.recompute_statistics(make_dataset, statistics_updates(p))
        if evaluation is not None:
            next(self.predictor.logits(evaluation), None)
        self._note_compilation(time.perf_counter() - started)
        return self.compilation

    def feed(self, dataset: TfDataset) -> BatchStream:
        """Returns a stream of batches for :meth:`run`, which continues where it stopped."""
        return self._trained.stream(dataset, self.state.weight_updates)

    def start(self, make_dataset: MakeDataset) -> Callable[[int], TrainedPart]:
        """Prepares to run whole executions; the first one compiles, and is not timed."""
        stream = self.feed(make_dataset(self.state.weight_updates, self.program.micro_batch_size))

        def run(end: int) -> TrainedPart:
            is_compiled = self._is_compiled
            part = self.run(stream, end - self.state.weight_updates)
            return part if is_compiled else replace(part, timed_s=0.0)

        return run

    def run(self, batches: TrainingFeed, num_weight_updates: int) -> TrainedPart:
        """Runs one execution; its mean loss and accuracy stand for each of its weight updates."""
        started = time.perf_counter()
        loss, hit = self._trained.execute(batches, self.state.weight_updates, num_weight_updates)
        spent_s = time.perf_counter() - started
        self._note_compilation(spent_s)
        return TrainedPart([loss] * num_weight_updates, [hit] * num_weight_updates, spent_s)

    def _note_compilation(self, spent_s: float) -> None:
        """Records the time of the first execution, and whether its programs came from the executable cache."""
        if not self._is_compiled:
            self._is_compiled = True
            is_cached = bool(executable_cache()) and cached_programs() == self._programs
            self.compilation = replace(self.compilation, first_update_s=spent_s, cached=is_cached)

    def recompute_statistics(self, make_dataset: MakeDataset, num_updates: int) -> List[str]:
        """Runs a forward pass on IPUs, pipelined like training."""
        network = self._trained.network
        if not network.norms:
            return []
        batches = make_dataset(self.state.weight_updates, self.program.micro_batch_size)
        measured = self._statistics.measure(network.weights, batches, num_updates)
        return self._take_statistics(measured)

    @cached_property
    def _statistics(self) -> StatisticsNetwork:
        return StatisticsNetwork(self._ipus, self.program, self._network)

    def measure_statistics(self, images: TfDataset) -> List[str]:
        """Measures on the host's CPU, with the IPUs' weights and precision: the batches do not fit on IPUs.

        Every instance uses all images.
        """
        with tf.device("/CPU:0"):
            weights, large_batches = self._on_host
            assign_weights(self.state.weights, weights.kept)
            weights.round_to_nearest()
            return self._take_statistics(large_batches.measure(self._ipus.preprocess.pack_8_bits(images)))

    @cached_property
    def _on_host(self) -> Tuple[HostWeights, LargeBatches]:
        """The network's weights on the host, and the passes of large batches with them."""
        arithmetic = Arithmetic(self._ipus.config.precision, nanoo=self._ipus.config.nanoo)
        unpack = self._ipus.preprocess.unpack
        weights = HostWeights(self._network, arithmetic)
        return weights, LargeBatches(self._network, arithmetic, unpack, on_cpu=True)

    def _take_statistics(self, values: Mapping[str, np.ndarray]) -> List[str]:
        """Sets moving statistics, and returns their names."""
        for name, value in values.items():
            self.state.weights[name].assign(value)
        return list(values)
