"""One benchmark from configuration to report: data, network, compiling, warm-up, measured executions, prediction.

:class:`Benchmark` is the whole story.  Constructing it checks all that can be checked without TensorFlow.  Its
:meth:`~Benchmark.run` builds the network, makes the contenders (what is timed: the session, the input pipeline, and
Keras where it is asked for), has ``measure`` time them in turns, and writes what was found into a report.
"""

from __future__ import annotations

import functools
import random
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, List, Optional, Sequence, Tuple

from msgspec import UNSET

from ipucnn.aliases import KerasModel, MemoryAdvice, PlainDict, TfDataset
from ipucnn.benchmarking import machine
from ipucnn.benchmarking.baseline import Gate, check_same_machine, check_same_request, compared_options
from ipucnn.benchmarking.contenders import (
    KerasInference,
    KerasTraining,
    SessionInference,
    SessionTraining,
    Yardstick,
    compile_session,
    keras_model,
)
from ipucnn.benchmarking.input_pipeline import (
    PipelinePart,
    data_share,
    images_only,
    part_names,
    pipeline_figures,
    random_source,
)
from ipucnn.benchmarking.measure import (
    Contender,
    Measurement,
    Reference,
    Report,
    ignore_progress,
    measure,
    shortfall,
)
from ipucnn.benchmarking.records import (
    BenchmarkReport,
    Compilation,
    DataFacts,
    DeviceFacts,
    ExecutionFacts,
    MeasuringSettings,
    Phases,
    PredictedMemory,
    Warmup,
)
from ipucnn.benchmarking.report import (
    comparison_figures,
    measured_figures,
    read_report,
    void_on_error,
)
from ipucnn.benchmarking.settings import (
    DATA,
    DATA_KINDS,
    DEVICE_GENERATED,
    END_TO_END,
    KERAS,
    REAL,
    BenchmarkSettings,
    check_data,
    check_settings,
    data_kind,
)
from ipucnn.config.resolve import Resolved
from ipucnn.config.values import MEASURE
from ipucnn.errors import ConfigurationError, DataError, UserError
from ipucnn.filesystem import expand
from ipucnn.machine import fix_threads, num_cores, peak_memory_bytes, reset_peak_memory
from ipucnn.models.registry import folder_name
from ipucnn.planning.search.variations import prediction_would_fit, would_fit
from ipucnn.planning.splits import check_named_splits, settle_splits
from ipucnn.runs import setup as run_setup
from ipucnn.runs.exported import ExportedNetwork, read_exported
from ipucnn.sessions.host.workers import require_one, threads_of_training
from ipucnn.sessions.poplar.popdist import find_instances
from ipucnn.training.batching import divisors, updates_from_steps_per_execution
from ipucnn.training.optimizers import settings_of_run
from ipucnn.training.program import Program, make_layout, make_program
from ipucnn.training.schedules import make_schedule

if TYPE_CHECKING:
    from ipucnn.sessions.session import CompilationReport, DeviceInfo, Session

# Micro-batches per replica from which inference may fuse, where executions are not prescribed.
_OPEN_STEPS = 64
# On IPUs every length of an execution is a program of its own, compiled for minutes: one length, long enough.
_IPU_UPDATES = 32

Rival = Optional[Tuple[str, str]]
"""(name, description) of the contender that the session is compared with; None where there is none."""


class Benchmark:
    """Validates everything that can be without TensorFlow on construction; :meth:`run` does the work.

    Args:
        resolved: the configuration.
        settings: what to measure.
        verbose: let TensorFlow speak.
        dry: only validate, without pixels of generated images.

    Raises:
        UserError: whatever is wrong with the configuration, the baseline or the data.
    """

    def __init__(
        self, resolved: Resolved, settings: BenchmarkSettings, verbose: bool = False, dry: bool = False
    ) -> None:
        from ipucnn.sessions.factory import check_device, runs_on_ipus
        from ipucnn.sessions.poplar.validation import check_layout, check_program

        self.instances = find_instances()
        require_one(
            "`ipucnn benchmark`",
            resolved.config,
            "; the report of `ipucnn train` has the speed of several, and what adding gradients up takes of the time",
        )
        run_setup.check_instances(self.instances, resolved.config)
        check_settings(settings, self.instances.count)
        self.settings, self.verbose = settings, verbose
        self.exported: Optional[ExportedNetwork] = None
        if settings.compare_with not in (None, KERAS):
            path = expand(str(settings.compare_with), "--compare-with")
            self.exported = read_exported(path, settings.trust)
        self.exit_code = 0
        if not settings.training:
            # Nothing is accumulated; a pipeline is filled with as many micro-batches as an execution has.
            config = replace(resolved.config, gradient_accumulation_count=None, global_batch_size=None)
            resolved = replace(resolved, config=config)
        self.resolved, config = resolved, resolved.config
        self.kind = data_kind(config)
        check_data(settings, self.kind)
        check_device(config.device)
        self.loss_name = run_setup.loss_name(config, resolved.record.task)
        self.seed = config.seed if config.seed is not None else random.SystemRandom().randrange(2**31)
        layout = make_layout(config)
        if settings.training:
            run_setup.check_effects(config, resolved.origins, layout)
        check_named_splits(resolved, run_setup.network_options)
        # A preset's own length is for another device; here executions are as long as time allows.
        self.steps: Optional[int] = resolved.typed.get("steps_per_execution")
        self.program = self.program_of(None)
        if settings.training and runs_on_ipus(config.device):
            check_program(self.program, config, self.instances)
        elif runs_on_ipus(config.device):
            check_layout(self.instances, self.program, config)
        self.fused: Optional[int] = resolved.config.fused_micro_batches
        self._check_fused()
        self.baseline = read_report(settings.baseline) if settings.baseline is not None else None
        self.optimizer = settings_of_run(config, self.program.global_batch_size)
        self.learning_rate = self._first_learning_rate()
        started = time.perf_counter()
        source = None
        if self.kind != REAL:
            source = random_source(resolved, self.seed, self.program.micro_batch_size, blank=dry)
        self.setup = run_setup.prepare(resolved, self.seed, source=source)
        self.data_s = time.perf_counter() - started
        if self.exported is not None:
            self._check_exported(self.exported)
        run_setup.build_options(self.setup)
        self._check_baseline()

    def _check_exported(self, exported: ExportedNetwork) -> None:
        """Refuses to compare a network with a file of another one.

        Raises:
            ConfigurationError: naming in what they differ.
        """
        setup = self.setup
        facts = (
            ("network", folder_name(str(exported.record["model"])), folder_name(setup.record.name)),
            ("input", "x".join(map(str, exported.input_shape)), "x".join(map(str, setup.input_shape))),
            ("number of classes", exported.num_classes, setup.source.info.num_classes),
        )
        for what, there, here in facts:
            if there != here:
                raise ConfigurationError(
                    f"{exported.path} is another network: its {what} is {there}, and {here} is benchmarked",
                    "name the network that the file was exported from, with its data and --image-size",
                )

    def _check_baseline(self) -> None:
        """Refuses a baseline of other work, and takes over how many micro-batches it computed as one.

        Executions are as long as the baseline's: a call has a cost of its own, so that executions of another length
        have another cost per sample.
        """
        if self.baseline is None:
            return
        info = self.setup.source.info
        where, execution = str(self.settings.baseline), self.baseline.execution
        assert execution is not None
        now = {
            "model": self.resolved.record.name,
            "mode": self.settings.mode,
            "compare_with": self.settings.compare_with,
            "data": {"kind": self.kind, "name": info.name, "num_images": info.num_train},
            "input_shape": self.setup.input_shape,
            "options": compared_options(self.resolved.config),
            "program": self.program.to_dict(),
        }
        check_same_request(self.baseline, where, now)
        self.fused = execution.fused_micro_batches
        whole = self.program.global_batch_size
        if self.settings.training:
            self.program = self.program.with_checked_fused(self.fused)
        else:
            whole = self.program.micro_batch_size * self.fused
        if execution.samples % whole:
            raise DataError(
                f"{where} is damaged: executions of {execution.samples} samples are no multiple of {whole}",
                "make it again",
            )

    def _check_fused(self) -> None:
        """Checks --fused-micro-batches: it divides an execution, in training a weight update."""
        given = self.fused
        if given is None or (given == MEASURE and self.settings.training):
            return
        if given == MEASURE:
            raise ConfigurationError(
                "--fused-micro-batches measure is for training: nothing is measured for inference",
                "give a number, or leave it out: the network's size and the memory decide",
            )
        if self.settings.training:
            self.program = self.program.with_checked_fused(given)
            return
        whole = self._local_replicas * (self.steps or given)
        if whole % given:
            near = min(divisors(whole), key=lambda d: abs(d - given))
            raise ConfigurationError(
                f"--fused-micro-batches {given} does not divide the {whole} micro-batches of an execution",
                f"use --fused-micro-batches {near}",
            )

    @property
    def _local_replicas(self) -> int:
        """Replicas of this process."""
        return self.program.num_replicas // self.instances.count

    def program_of(self, updates: Optional[int]) -> Program:
        """The Program with executions of so many weight updates; None: the prescribed number, or one."""
        config = self.resolved.config
        batch = make_layout(config).batching
        if updates is None:
            updates = 1
            if self.settings.training and self.steps is not None:
                count = batch.gradient_accumulation_count
                updates = updates_from_steps_per_execution(self.steps, batch, max(1, self.steps // count), 1)
        config = replace(
            config,
            num_epochs=1,
            weight_updates_per_epoch=updates,
            pad_dataset=False,
            steps_per_execution=None,
            logs_per_epoch=1.0,
            validation=False,
            checkpoints=False,
        )
        samples = updates * batch.global_batch_size
        return make_program(config, samples, seed=self.seed, num_instances=self.instances.count)

    def _first_learning_rate(self) -> float:
        """What the schedule begins with, without warm-up: it stays the same while updates are measured."""
        import numpy as np

        config = self.resolved.config
        schedule = make_schedule(
            config.lr_schedule,
            config.lr_schedule_params,
            global_batch_size=self.program.global_batch_size,
            weight_updates_per_epoch=self.program.weight_updates_per_epoch,
            num_epochs=config.num_epochs,
            learning_rate=config.learning_rate,
            staircase=config.lr_staircase,
        )
        return float(schedule(np.arange(1))[0])

    # -- what is timed --------------------------------------------------------------------------------------------

    def dataset(
        self, first_update: int, samples_per_element: int, input_range: Optional[str] = None
    ) -> TfDataset:
        """Infinite training batches; without order or augmentation in inference.

        Args:
            input_range: of the images; None: what the session takes.
        """
        batches = self.pipeline(samples_per_element, input_range=input_range)
        if self.kind != DEVICE_GENERATED:
            return batches
        from ipucnn.datasets.pipeline import constant_batch

        return constant_batch(batches)

    def pipeline(
        self, samples_per_element: int, until: str = "batch", input_range: Optional[str] = None
    ) -> TfDataset:
        """The input pipeline up to one of its parts; of several instances this one's part of the batches."""
        from ipucnn.datasets.pipeline import train_batches

        config = self.resolved.config
        return train_batches(
            self.setup.source,
            batch_size=samples_per_element,
            samples_per_epoch=max(1, self.setup.source.info.num_train),
            input_shape=self.setup.input_shape,
            input_range=input_range or self.setup.input_range,
            augment=config.augment and self.settings.training,
            seed=self.seed,
            shuffle=config.shuffle and self.settings.training,
            num_parallel=config.pipeline_num_parallel,
            output_shape=self.setup.output_shape,
            until=until,
            shard=(self.instances.count, self.instances.index),
        )

    def _buffered(self, samples_per_element: int) -> int:
        """Elements that the input pipeline has ready or under way at most."""
        from ipucnn.datasets.pipeline import buffered_elements

        config = self.resolved.config
        return buffered_elements(samples_per_element, self.setup.input_shape, config.pipeline_num_parallel)

    def _pipeline_parts(self, samples_per_element: int) -> List[PipelinePart]:
        """The input pipeline up to each of its parts."""
        buffered = self._buffered(samples_per_element)
        make = functools.partial(self.pipeline, samples_per_element)
        names = part_names(self.resolved.config.augment and self.settings.training)
        return [PipelinePart(name, make, buffered) for name in names]

    def contenders(
        self, session: Session, model: KerasModel, result: BenchmarkReport
    ) -> Tuple[List[Contender], Rival]:
        """What is timed, and which of it the session is compared with.

        Compiling completes the Program, and puts what it says of itself into the report.
        """
        if self.settings.scope == DATA:
            # The whole pipeline comes first: progress, and how long to measure, go by the first contender.
            return [*reversed(self._pipeline_parts(self.program.micro_batch_size))], None
        started = time.perf_counter()
        compile_ = self._compile_training if self.settings.training else self._compile_inference
        compilation, own = compile_(session, model)
        result.device = DeviceFacts(**asdict(session.device))
        result.program = self.program.to_dict()
        result.compilation = Compilation(
            num_layers=compilation.num_layers,
            num_parameters=compilation.num_parameters,
            num_trainable_parameters=compilation.num_trainable_parameters,
            macs_per_sample=compilation.macs_per_sample,
            num_graph_operations=compilation.num_graph_operations,
            trace_s=compilation.trace_s,
            fused_micro_batches=compilation.fused_micro_batches,
            compile_s=compilation.compile_s,
            predicted_memory=[
                PredictedMemory(system=p.system, precision=p.precision, ipus=p.memory)
                for p in result.predicted
            ],
        )
        result.phases.trace_s = compilation.trace_s
        result.phases.prepare_s = time.perf_counter() - started
        found: List[Contender] = [own]
        rival: Rival = None
        if self.settings.compare_with is not None:
            if self.exported is None:
                other, description = self.keras_contender(model)
            else:
                other, description = self.exported_contender(self.exported, model)
            found.append(other)
            rival = (other.name, description)
        if self.settings.scope == END_TO_END:
            element = self.program.fused_micro_batches * self.program.micro_batch_size
            found += [self._on_constant_batch(session, element), self._pipeline_parts(element)[-1]]
        return found, rival

    def _compile_training(
        self, session: Session, model: KerasModel
    ) -> Tuple[CompilationReport, SessionTraining]:
        from ipucnn.training.losses import make_loss

        loss = make_loss(self.loss_name, self.resolved.config.label_smoothing)
        compilation = compile_session(
            session, model, self.program, self.optimizer, loss, self.learning_rate, self.dataset
        )
        assert session.program is not None
        self.program = session.program
        element = self.program.fused_micro_batches * self.program.micro_batch_size
        fixed = None if self.steps is None else self.program.weight_updates_per_execution
        if fixed is None and session.device.kind == "ipu":
            fixed = _IPU_UPDATES
        batches = self.dataset(0, element)
        return compilation, SessionTraining(session, batches, fixed, lead=self._lead(element))

    def _compile_inference(
        self, session: Session, model: KerasModel
    ) -> Tuple[CompilationReport, SessionInference]:

        self.program = self.program.with_fused(self.fused_in_inference(session, model))
        p = self.program
        element = p.fused_micro_batches * p.micro_batch_size
        compilation = session.compile_prediction(model, (element, *self.setup.input_shape))
        own = SessionInference(
            session,
            images_only(self.dataset(0, element)),
            p.micro_batch_size,
            p.fused_micro_batches,
            None if self.steps is None else self.steps * p.num_replicas,
            lead=self._lead(element),
            num_instances=self.instances.count,
        )
        return replace(compilation, fused_micro_batches=p.fused_micro_batches), own

    def fused_in_inference(self, session: Session, model: KerasModel) -> int:
        """Micro-batches that inference computes as one: as asked for, else as many as suit the memory."""
        from ipucnn.sessions.host.session import activation_bytes_per_sample, choose_fused

        if self.fused is not None:
            return self.fused
        p = self.program
        micro_batches = self._local_replicas * (self.steps or _OPEN_STEPS)
        memory = session.device.memory_bytes if session.device.kind == "cpu" else 0
        return choose_fused(micro_batches, p.micro_batch_size, 1, activation_bytes_per_sample(model), memory)

    def _lead(self, samples_per_element: int) -> int:
        """Elements to compute off the clock: while others have their turn, the pipeline fills its buffers."""
        alone = self.settings.scope != END_TO_END and self.settings.compare_with is None
        return 0 if alone or self.kind == DEVICE_GENERATED else self._buffered(samples_per_element)

    def _on_constant_batch(self, session: Session, samples_per_element: int) -> Contender:
        """The session's work on a constant batch, without input pipeline."""
        from ipucnn.datasets.pipeline import constant_batch

        batch, p = constant_batch(self.pipeline(samples_per_element)), self.program
        own: Contender
        if self.settings.training:
            own = SessionTraining(session, batch)
        else:
            images = images_only(batch)
            own = SessionInference(session, images, p.micro_batch_size, p.fused_micro_batches)
        own.name = "constant batch"
        return own

    def keras_contender(self, model: KerasModel) -> Tuple[Contender, str]:
        """Plain Keras at the same work, and what that is, in words."""
        p, smoothing = self.program, self.resolved.config.label_smoothing
        compiled, accumulated, description = keras_model(
            model, self.optimizer, self.learning_rate, self.loss_name, smoothing, p.num_micro_batches
        )
        # Keras leaves no preprocessing to the device.
        input_range = run_setup.input_range(self.resolved.config, self.resolved.record)
        batches = self.dataset(0, p.micro_batch_size, input_range)
        if self.settings.training:
            micro_batches = p.num_micro_batches if accumulated > 1 else 1
            return KerasTraining(compiled, batches, micro_batches, p.micro_batch_size), description
        description = f"Keras {description.split()[1]} predict"
        return KerasInference(compiled, images_only(batches), p.micro_batch_size), description

    def exported_contender(self, exported: ExportedNetwork, model: KerasModel) -> Tuple[Contender, str]:
        """The same work by an exported file in its own runtime, and what that is, in words."""
        p, session = self.program, exported.session()
        session.prepare_evaluation(model, None)
        element = p.fused_micro_batches * p.micro_batch_size
        input_range = run_setup.input_range(self.resolved.config, self.resolved.record)
        images = images_only(self.dataset(0, element, "raw" if exported.takes_pixels else input_range))
        other = SessionInference(
            session, images, p.micro_batch_size, p.fused_micro_batches, lead=self._lead(element)
        )
        other.name = exported.form
        return other, f"{session.runtime} on {exported.path}"

    # -- from building the network to the report ------------------------------------------------------------------

    def run(self, report: Report = ignore_progress) -> BenchmarkReport:
        """Builds, compiles, measures, predicts.

        Args:
            report: told of progress.

        Returns:
            The report; what goes wrong on the device makes it void, and raises nothing.

        Raises:
            UserError: the device is not there, or the baseline is another machine's.
        """
        from ipucnn.sessions.factory import create_session, runs_on_ipus

        began = time.perf_counter()
        config = self.resolved.config
        if self.settings.training and not runs_on_ipus(config.device):
            # As in training; but what is compared has one operation at a time, and all cores for each.
            alone = self.settings.compare_with is None
            fix_threads(threads_of_training(config, self.program) if alone else num_cores(), required=False)
        session = create_session(
            self.resolved.config.device, verbose=self.verbose, config=self.resolved.config
        )
        self.setup = run_setup.move_preprocessing(self.setup, session)
        from ipucnn.datasets.pipeline import data_errors
        from ipucnn.runs.provenance import environment

        result = self._empty_report(session.device, environment())
        gate: Optional[Gate] = None
        if self.baseline is not None:
            where = str(self.settings.baseline)
            check_same_machine(self.baseline, where, result.device)
            gate = Gate(self.baseline, where, self.settings.max_regression, self.seed)
        reset_peak_memory()
        exit_codes: List[int] = []
        with void_on_error(result, exit_codes), data_errors():
            self._run(session, result, gate, began, report)
        self.exit_code = exit_codes[0] if exit_codes else 0
        return result

    def _run(
        self, session: Session, result: BenchmarkReport, gate: Optional[Gate], began: float, report: Report
    ) -> None:
        """Fills the report; whatever this raises makes it void."""
        report("building the network", 0, 0, "")
        started = time.perf_counter()
        model = run_setup.build(self.setup)
        result.phases.build_s = time.perf_counter() - started
        self.program = settle_splits(self.program, model, self.resolved, None)
        result.program = self.program.to_dict()
        self._predict(model, result)
        # The host's matrix products are no measure of what IPUs do.
        has_peak = self.settings.scope != DATA and session.device.kind != "ipu"
        peak = machine.MatmulPeak(session.place) if has_peak else None
        session.would_fit = self._would_fit(model)
        report("compiling", 0, 0, "")
        contenders, rival = self.contenders(session, model, result)
        if self.baseline is not None:
            own = contenders[0]
            assert self.baseline.execution is not None
            own.fixed_units = self.baseline.execution.samples // own.samples_per_unit
        yardstick = self._yardstick(session.place)
        occupation = machine.Occupation()

        def is_decided(measurements: Sequence[Measurement]) -> bool:
            if gate is None:
                return True
            return gate.is_decided(measurements[0].executions, occupation.others_share())

        def clock() -> float:
            # How long to measure is decided by it, in all instances alike.
            return session.of_first_instance(time.perf_counter())

        limits = self.settings.limits
        began = session.of_first_instance(began)
        measured = measure(
            contenders, limits, report, yardstick, clock=clock, started=began, is_decided=is_decided
        )
        if session.compilation is not None and result.compilation is not None:
            result.compilation.cached = session.compilation.cached
        result.interrupted = measured.interrupted
        others_share = occupation.others_share()
        self._fill(result, measured.measurements, rival, peak, others_share)
        if result.execution is not None and yardstick is not None:
            result.execution.reference_repetitions = yardstick.repetitions
        if gate is not None and result.measured is not None:
            result.regression = gate.compare(result.executions, others_share)
        lacking = shortfall(measured, limits)
        if lacking is not None:
            result.notes.append(lacking)

    def _would_fit(self, model: KerasModel) -> MemoryAdvice:
        name, config = self.resolved.record.name, self.resolved.config
        if self.settings.training:
            return would_fit(model, name, self.program, config)
        return prediction_would_fit(model, name, config, "benchmark")

    def _yardstick(self, place: str) -> Optional[Reference]:
        """The work that tells how fast the machine is meanwhile, repeated as often as the baseline did."""
        if self.settings.scope == DATA:
            return None
        execution = self.baseline.execution if self.baseline is not None else None
        before = execution.reference_repetitions if execution is not None else UNSET
        return Yardstick(place, None if before is UNSET else before)

    def _predict(self, model: KerasModel, result: BenchmarkReport) -> None:
        from ipucnn.benchmarking.prediction import Wanted, predict_columns

        settings = self.settings
        wanted = Wanted(
            self.resolved.config,
            self.program,
            settings.training,
            self.steps,
            settings.system,
            settings.profile,
        )
        try:
            result.predicted = predict_columns(model, result.model, wanted)
        except UserError as error:
            result.notes.append(f"nothing predicted: {error.message}")

    # -- the report -----------------------------------------------------------------------------------------------

    def _empty_report(self, device: DeviceInfo, environment: PlainDict) -> BenchmarkReport:
        info = self.setup.source.info
        return BenchmarkReport(
            model=self.resolved.record.name,
            preset=self.resolved.preset,
            mode=self.settings.mode,
            scope=self.settings.scope,
            started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            seed=self.seed,
            input_shape=list(self.setup.input_shape),
            data=DataFacts(
                kind=self.kind,
                description=DATA_KINDS[self.kind],
                name=info.name,
                location=info.location,
                num_images=info.num_train,
            ),
            settings=MeasuringSettings(
                **asdict(self.settings.limits), compare_with=self.settings.compare_with
            ),
            options=compared_options(self.resolved.config),
            program=self.program.to_dict(),
            device=DeviceFacts(**asdict(device)),
            environment=environment,
            phases=Phases(data_s=self.data_s),
            notes=[*self.program.warnings, *self._of_instances()],
        )

    def _of_instances(self) -> List[str]:
        """What the figures of several instances are of."""
        count = self.instances.count
        if count == 1:
            return []
        return [
            f"measured in {count} instances of poprun, by the clock of the first: images/s are of all of them, the "
            "device and its memory are the first's"
        ]

    def _fill(
        self,
        result: BenchmarkReport,
        measurements: List[Measurement],
        rival: Rival,
        peak: Optional[machine.MatmulPeak],
        others_share: Optional[float],
    ) -> None:
        """Puts what was measured into the report."""
        own = measurements[0]
        executions = own.executions
        if own.first_s:
            if result.compilation is not None:
                result.compilation.first_execution_s = own.first_s
                result.compilation.compile_s = result.compilation.trace_s + own.first_s
            result.phases.first_execution_s = own.first_s
            result.phases.warmup_s = own.warmup_s
            result.warmup = Warmup(executions=own.warmup_executions, seconds=own.warmup_s, steady=own.steady)
            if not own.steady and executions:
                result.notes.append("warm-up ended by its time limit, before times were steady")
        result.executions = executions
        if not executions:
            return
        result.phases.measured_s = sum(m.wall_s for each in measurements for m in each.executions)
        macs = 0
        if result.compilation is not None:
            self._fill_program(result, own)
            macs = result.compilation.macs_per_sample
        training, p = self.settings.training, self.program
        result.measured = measured_figures(
            executions,
            seed=self.seed,
            # A weight update, or one micro-batch on each replica.
            step_samples=p.global_batch_size if training else p.micro_batch_size * p.num_replicas,
            # A training step counts as three forward passes: forward, and the products of the two gradients.
            flop_per_image=2.0 * macs * (3 if training else 1) if macs else None,
            peak=peak.measure() if peak is not None else None,
            peak_memory_bytes=peak_memory_bytes(),
            device_peak_memory_bytes=machine.device_peak_memory_bytes(result.device.kind),
            others_share=others_share,
        )
        if (result.measured.share_of_matmul_peak or 0.0) > 1.0:
            result.notes.append(
                # Lavin and Gray 2016, arXiv:1509.09308: a 3x3 convolution takes down to 4 / 9 of the multiplications.
                "this counts more arithmetic than the fastest matrix product did: convolutions may need fewer "
                "multiplications than are counted (Winograd's algorithm), or the peak was measured in a slow moment"
            )
        if self.settings.scope == DATA:
            self._fill_pipeline(result, measurements)
        elif self.settings.scope == END_TO_END:
            result.end_to_end = data_share([m.executions for m in measurements], self.seed)
        elif rival is not None:
            has_clock = result.device.kind == "cpu"
            result.comparison = comparison_figures(own, measurements[1], rival, self.seed, by_cpu=has_clock)

    def _fill_program(self, result: BenchmarkReport, own: Measurement) -> None:
        """Program and execution as they were measured."""
        units, p, training = own.units, self.program, self.settings.training
        if training:
            p = self.program_of(units).with_fused(p.fused_micro_batches)
            if self.program.pipeline_splits:
                p = p.with_splits(self.program.pipeline_splits)
        result.program = p.to_dict()
        result.execution = ExecutionFacts(
            weight_updates=units if training else None,
            micro_batches=units * p.num_micro_batches if training else units,
            samples=units * own.contender.samples_per_unit,
            fused_micro_batches=p.fused_micro_batches,
        )

    def _fill_pipeline(self, result: BenchmarkReport, measurements: List[Measurement]) -> None:
        """The input pipeline part by part; the whole of it was measured first."""
        from ipucnn.datasets.pipeline import parallel_calls

        ordered = measurements[::-1]
        result.data_pipeline = pipeline_figures(
            self.setup.source,
            [m.contender.name for m in ordered],
            [m.executions for m in ordered],
            result.predicted,
            batch_size=self.program.micro_batch_size,
            num_parallel=parallel_calls(self.resolved.config.pipeline_num_parallel),
            seed=self.seed,
        )
