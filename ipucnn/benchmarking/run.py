"""One benchmark from configuration to report: data, build, compile, warm-up, measured executions, prediction."""

import random
import time
from dataclasses import asdict, replace
from typing import Any, Dict, Optional, Sequence, Tuple

from ipucnn.benchmarking import regression
from ipucnn.benchmarking.baseline import check_same_machine, check_same_request, compared_options
from ipucnn.benchmarking.filling import fill
from ipucnn.benchmarking.making import make_sides
from ipucnn.benchmarking.measure import Limits, Measurement, Reference, Report, measure
from ipucnn.benchmarking.report import BenchmarkReport, execution_rows, read_report
from ipucnn.benchmarking.settings import (
    DATA,
    DATA_KINDS,
    DEVICE_GENERATED,
    REAL,
    BenchmarkSettings,
    check_data,
    data_kind,
)
from ipucnn.benchmarking.void import void_on_error
from ipucnn.config.resolve import Resolved
from ipucnn.errors import (
    ConfigurationError,
    DataError,
    InfeasibleError,
    UserError,
)
from ipucnn.runs import setup as run_setup
from ipucnn.runs.checks import check_effects
from ipucnn.runs.fitting import Ask, prediction_would_fit, would_fit
from ipucnn.runs.splits import check_named_splits, settle_splits
from ipucnn.training.batching import divisors
from ipucnn.training.optimizers import settings_of_run
from ipucnn.training.program import Program, make_layout, make_program
from ipucnn.training.schedules import make_schedule

# Random images are as many as fit in here, at least as many as ``_LEAST_IMAGES``: drawing them takes time.
_RANDOM_BYTES, _LEAST_IMAGES, _MOST_IMAGES = 32 * 2**20, 16, 1024


def _silent(phase: str, done: int, of: int, figures: str) -> None:
    pass


def run_benchmark(
    resolved: Resolved,
    settings: BenchmarkSettings,
    *,
    report: Report = _silent,
    verbose: bool = False,
) -> BenchmarkReport:
    """Runs one benchmark; what goes wrong on the device makes its report void, and does not raise.

    Args:
        resolved: the configuration.
        settings: what to measure.
        report: told of progress.
        verbose: let TensorFlow speak.

    Raises:
        UserError: the configuration or the data are wrong; raised before anything is measured.
    """
    return Benchmark(resolved, settings, verbose).run(report)


class Benchmark:
    """Validates everything that can be without TensorFlow on construction; :meth:`run` does the work.

    Args:
        resolved: the configuration.
        settings: what to measure.
        verbose: let TensorFlow speak.
        dry: only validate, with as few generated images as that takes.

    Raises:
        UserError: whatever is wrong with the configuration, the baseline or the data.
    """

    def __init__(
        self, resolved: Resolved, settings: BenchmarkSettings, verbose: bool = False, dry: bool = False
    ) -> None:
        from ipucnn.runs.checks import refuse_instances
        from ipucnn.sessions.factory import check_device, runs_on_ipus
        from ipucnn.sessions.poplar.validation import check_program

        refuse_instances("benchmark")
        self.settings, self.verbose, self.dry = settings, verbose, dry
        if not settings.training:
            # Nothing is accumulated; a pipeline is filled with as many micro-batches as an execution has.
            config = replace(resolved.config, gradient_accumulation_count=None, global_batch_size=None)
            resolved = replace(resolved, config=config)
        self.resolved, config = resolved, resolved.config
        self.kind = data_kind(config)
        check_data(settings, self.kind)
        check_device(config.device)
        run_setup.check_supported(config)
        self.loss_name = run_setup.loss_name(config, resolved.record.task)
        self.seed = config.seed if config.seed is not None else random.SystemRandom().randrange(2**31)
        layout = make_layout(config)
        if settings.training:
            check_effects(config, resolved.origins, layout)
        check_named_splits(resolved)
        # A preset's own length is for another device; here executions are as long as time allows.
        self.steps: Optional[int] = resolved.typed.get("steps_per_execution")
        self.program = self.program_of(None)
        if settings.training and runs_on_ipus(config.device):
            check_program(self.program, config)
        self.fused: Optional[int] = resolved.config.fused_micro_batches
        self._check_fused()
        self.baseline = read_report(settings.baseline) if settings.baseline is not None else None
        self.optimizer = settings_of_run(config, self.program.global_batch_size)
        self.learning_rate = self._learning_rate()
        started = time.perf_counter()
        self.setup = run_setup.prepare(resolved, self.seed, source=self._random_source())
        self.data_s = time.perf_counter() - started
        run_setup.build_options(self.setup)
        self._check_baseline()

    def _check_baseline(self) -> None:
        """Refuses a baseline of other work, and takes over how many micro-batches it computed as one.

        Executions are as long as the baseline's: a call has a cost of its own, so that executions of another length
        have another cost per sample.
        """
        if self.baseline is None:
            return
        info = self.setup.source.info
        where, execution = str(self.settings.baseline), self.baseline["execution"]
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
        self.fused = execution["fused_micro_batches"]
        whole = self.program.global_batch_size
        if self.settings.training:
            self.program = self.program.with_checked_fused(self.fused)
        else:
            whole = self.program.micro_batch_size * self.fused
        if execution["samples"] % whole:
            raise DataError(
                f"{where} is damaged: executions of {execution['samples']} samples are no multiple of {whole}",
                "make it again",
            )

    def _check_fused(self) -> None:
        """Checks --fused-micro-batches: it divides an execution, in training a weight update."""
        given = self.fused
        if given is None:
            return
        if self.settings.training:
            self.program = self.program.with_checked_fused(given)
            return
        whole = self.program.num_replicas * (self.steps or given)
        if whole % given:
            near = min(divisors(whole), key=lambda d: abs(d - given))
            raise ConfigurationError(
                f"--fused-micro-batches {given} does not divide the {whole} micro-batches of an execution",
                f"use --fused-micro-batches {near}",
            )

    def program_of(self, updates: Optional[int]) -> Program:
        """The Program with executions of so many weight updates; None: the prescribed number, or one."""
        config = self.resolved.config
        batch = make_layout(config).batching
        if updates is None:
            updates = 1
            if self.settings.training and self.steps is not None:
                from ipucnn.training.batching import updates_from_steps_per_execution

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
        return make_program(config, updates * batch.global_batch_size, seed=self.seed)

    def _learning_rate(self) -> float:
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

    def _random_source(self) -> Any:
        """Few random images where the images are random; None where they are not."""
        if self.kind == REAL:
            return None
        from ipucnn.datasets.random_data import open_random
        from ipucnn.models.shapes import validate_input_shape

        config, record = self.resolved.config, self.resolved.record
        shape: Tuple[int, int, int] = record.input_shape
        if config.image_size is not None:
            shape = (*config.image_size, record.input_shape[2])
            validate_input_shape(record, shape)
        pixels = shape[0] * shape[1] * shape[2]
        number = max(_LEAST_IMAGES, min(_MOST_IMAGES, _RANDOM_BYTES // pixels))
        self._check_memory(shape, number)
        classes = record.num_classes or (2 if record.task == "segmentation" else 10)
        if self.dry:
            # Only what the set is called, its shape and its classes count: no pixels are drawn.
            tiny = open_random(1, 1, shape[2], classes, record.task, self.seed, num_train=1, num_eval=1)
            return replace(tiny, info=replace(tiny.info, image_shape=shape))
        return open_random(*shape, classes, record.task, self.seed, num_train=number, num_eval=1)

    def _check_memory(self, shape: Tuple[int, int, int], number: int) -> None:
        """Refuses images that cannot fit: the random ones, a byte per value, and one micro-batch of floats."""
        from ipucnn.sessions.session import host_memory_bytes

        values, batch = shape[0] * shape[1] * shape[2], self.program.micro_batch_size
        needed, memory = values * (number + 1 + 4 * batch), host_memory_bytes()
        if memory and needed > memory:
            raise InfeasibleError(
                f"{number} random images and a micro-batch of {batch} of {shape[0]}x{shape[1]}x{shape[2]} take "
                f"{needed / 2**30:.3g} GiB, and this machine has {memory / 2**30:.3g}",
                "use a smaller --image-size" + (" or --micro-batch-size" if batch > 1 else ""),
            )

    def dataset(self, first_update: int, samples_per_element: int) -> Any:
        """Infinite training batches, for the session; without order or augmentation in inference."""
        from ipucnn.benchmarking.sides import constant_batch

        batches = self.pipeline(samples_per_element)
        return constant_batch(batches) if self.kind == DEVICE_GENERATED else batches

    def pipeline(self, samples_per_element: int, until: str = "batch") -> Any:
        """The input pipeline up to a stage."""
        from ipucnn.datasets.pipeline import train_batches

        config = self.resolved.config
        return train_batches(
            self.setup.source,
            batch_size=samples_per_element,
            samples_per_epoch=max(1, self.setup.source.info.num_train),
            input_shape=self.setup.input_shape,
            input_range=self.setup.input_range,
            augment=config.augment and self.settings.training,
            seed=self.seed,
            shuffle=config.shuffle and self.settings.training,
            num_parallel=config.pipeline_num_parallel,
            output_shape=self.setup.output_shape,
            until=until,
        )

    def run(self, report: Report = _silent) -> BenchmarkReport:
        """Builds, compiles, measures, predicts."""
        from ipucnn.benchmarking import machine
        from ipucnn.sessions.factory import create_session

        began = time.perf_counter()
        session = create_session(
            self.resolved.config.device, verbose=self.verbose, config=self.resolved.config
        )
        self.setup = run_setup.move_preprocessing(self.setup, session)
        from ipucnn.datasets.pipeline import data_errors
        from ipucnn.runs.provenance import environment

        result = self._empty_report(session.device, environment())
        if self.baseline is not None:
            check_same_machine(self.baseline, str(self.settings.baseline), result.device)
        gate = self._gate()
        machine.reset_peak_memory()
        with void_on_error(result), data_errors():
            report("building the network", 0, 0, "")
            started = time.perf_counter()
            model = run_setup.build(self.setup)
            result.phases["build_s"] = time.perf_counter() - started
            self.program = settle_splits(self.program, model, self.resolved, None)
            result.program = self.program.to_dict()
            self._predict(model, result)
            # The host's matrix products are no measure of what IPUs do.
            has_peak = self.settings.scope != DATA and session.device.kind != "ipu"
            peak = machine.MatmulPeak(session.place) if has_peak else None
            session.would_fit = self._would_fit(model)
            report("compiling", 0, 0, "")
            sides, rival = make_sides(self, session, model, result)
            if self.baseline is not None:
                sides[0].fixed_units = self.baseline["execution"]["samples"] // sides[0].samples_per_unit
            yardstick = self._yardstick(session.place)
            occupation = machine.Occupation()

            def is_decided(measurements: Sequence[Measurement]) -> bool:
                if gate is None:
                    return True
                return gate.is_decided(execution_rows(measurements[0].executions), occupation.others_share())

            measured = measure(
                sides,
                self.settings.limits,
                report,
                yardstick,
                started=began,
                is_decided=is_decided,
            )
            if session.compilation is not None and result.compilation is not None:
                result.compilation["cached"] = session.compilation.cached
            result.interrupted = measured.interrupted
            others_share = occupation.others_share()
            fill(self, result, measured.measurements, rival, peak, others_share)
            if result.execution is not None and yardstick is not None:
                result.execution["reference_repetitions"] = yardstick.repetitions
            if gate is not None and result.measured is not None:
                result.regression = gate.compare(result.executions, others_share)
            if measured.out_of_time:
                done, wanted = len(result.executions), self.settings.limits.min_executions
                if done < wanted:
                    result.notes.append(
                        f"{done} executions instead of {wanted}: --max-time "
                        f"{self.settings.limits.max_time_s:g} s was over"
                    )
        return result

    def _would_fit(self, model: Any) -> Ask:
        name, config = self.resolved.record.name, self.resolved.config
        if self.settings.training:
            return would_fit(model, name, self.program, config)
        return prediction_would_fit(model, name, config, "benchmark")

    def _yardstick(self, place: str) -> Optional[Reference]:
        from ipucnn.benchmarking.yardstick import Yardstick

        if self.settings.scope == DATA:
            return None
        before = self.baseline["execution"]["reference_repetitions"] if self.baseline is not None else None
        return Yardstick(place, before)

    def _gate(self) -> Optional[regression.Gate]:
        if self.baseline is None:
            return None
        where, allowed = str(self.settings.baseline), self.settings.max_regression
        return regression.Gate(self.baseline, where, allowed, self.seed)

    def _empty_report(self, device: Any, environment: Dict[str, Any]) -> BenchmarkReport:
        info, limits = self.setup.source.info, self.settings.limits
        return BenchmarkReport(
            model=self.resolved.record.name,
            preset=self.resolved.preset,
            mode=self.settings.mode,
            scope=self.settings.scope,
            started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            seed=self.seed,
            input_shape=list(self.setup.input_shape),
            data={
                "kind": self.kind,
                "description": DATA_KINDS[self.kind],
                "name": info.name,
                "location": info.location,
                "num_images": info.num_train,
            },
            settings={**asdict(limits), "compare_with": self.settings.compare_with},
            options=compared_options(self.resolved.config),
            program=self.program.to_dict(),
            device=asdict(device),
            environment=environment,
            phases={"data_s": self.data_s},
            notes=list(self.program.warnings),
        )

    def _predict(self, model: Any, result: BenchmarkReport) -> None:
        from ipucnn.benchmarking.prediction import Wanted, predict_ipu
        from ipucnn.planning.keras_graph import graph_of

        config = self.resolved.config
        try:
            graph = graph_of(model, result.model)
        except UserError as error:
            result.notes.append(f"nothing predicted: {error.message}")
            return
        wanted = Wanted(config, self.program, self.settings.training, self.steps, self.settings.system)
        # IPUs are mostly used in 16 bits, which this session does not do.
        for precision in dict.fromkeys((config.precision, "16.16")):
            result.predicted.append(predict_ipu(graph, wanted, precision))


__all__ = ["Benchmark", "Limits", "run_benchmark"]
