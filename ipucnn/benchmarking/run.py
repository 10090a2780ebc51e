"""One benchmark from configuration to report: data, build, compile, warm-up, measured executions, prediction."""

import contextlib
import functools
import random
import re
import time
import traceback
from dataclasses import asdict, replace
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from ipucnn.benchmarking import regression
from ipucnn.benchmarking.baseline import check_same_machine, check_same_request, compared_options
from ipucnn.benchmarking.measure import Limits, Measurement, Reference, Report, measure
from ipucnn.benchmarking.report import BenchmarkReport, execution_rows, measured_figures, read_report
from ipucnn.benchmarking.settings import (
    DATA,
    DATA_KINDS,
    DEVICE_GENERATED,
    END_TO_END,
    REAL,
    BenchmarkSettings,
    check_data,
    data_kind,
)
from ipucnn.benchmarking.stages import data_share
from ipucnn.benchmarking.statistics import paired_ratio, throughput
from ipucnn.config.resolve import Resolved
from ipucnn.errors import (
    EXIT_BUG,
    EXIT_INFEASIBLE,
    ConfigurationError,
    DataError,
    InfeasibleError,
    UserError,
)
from ipucnn.runs import setup as run_setup
from ipucnn.runs.splits import check_named_splits, settle_splits
from ipucnn.training.batching import divisors
from ipucnn.training.optimizers import make_settings as optimizer_settings
from ipucnn.training.program import Program, make_layout, make_program
from ipucnn.training.schedules import make_schedule

# Random images are as many as fit in here, at least as many as ``_LEAST_IMAGES``: drawing them takes time.
_RANDOM_BYTES, _LEAST_IMAGES, _MOST_IMAGES = 32 * 2**20, 16, 1024
# Micro-batches per replica from which inference may fuse, where executions are not prescribed.
_OPEN_STEPS = 64
# On IPUs every length of an execution is a program of its own, compiled for minutes: one length, long enough.
_IPU_UPDATES = 32


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
        from ipucnn.sessions.factory import check_device

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
        make_layout(config)
        check_named_splits(resolved)
        # A preset's own length is for another device; here executions are as long as time allows.
        self.steps: Optional[int] = resolved.typed.get("steps_per_execution")
        self.program = self._program(None)
        self.fused: Optional[int] = resolved.config.fused_micro_batches
        self._check_fused()
        self.baseline = read_report(settings.baseline) if settings.baseline is not None else None
        self.optimizer = optimizer_settings(
            config.optimizer,
            config.optimizer_params,
            global_batch_size=self.program.global_batch_size,
            weight_decay=config.weight_decay,
            l2_regularization=config.l2_regularization,
        )
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

    def _program(self, updates: Optional[int]) -> Program:
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
        run_setup.move_preprocessing(self.setup, session)
        from ipucnn.datasets.pipeline import data_errors
        from ipucnn.runs.provenance import environment

        result = self._empty_report(session.device, environment())
        if self.baseline is not None:
            check_same_machine(self.baseline, str(self.settings.baseline), result.device)
        gate = self._gate()
        machine.reset_peak_memory()
        with _void_on_error(result), data_errors():
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
            report("compiling", 0, 0, "")
            sides, rival = self._sides(session, model, result)
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
            self._fill(result, measured.measurements, rival, peak, others_share)
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
        wanted = Wanted(
            self.program,
            self.settings.training,
            self.steps,
            self.settings.system,
            len(self.optimizer.slots),
            config.optimizer_state_offloading,
            config.half_partials,
            config.eight_bit_transfer,
        )
        # IPUs are mostly used in 16 bits, which this session does not do.
        for precision in dict.fromkeys((config.precision, "16.16")):
            result.predicted.append(predict_ipu(graph, wanted, precision))

    def _sides(
        self, session: Any, model: Any, result: BenchmarkReport
    ) -> Tuple[List[Any], Optional[Tuple[str, str]]]:
        """The sides to measure, and (name, description) of the one that the session is compared with."""
        if self.settings.scope == DATA:
            return list(reversed(self._stages(self.program.micro_batch_size))), None
        measured, rival = self._compile(session, model, result)
        if self.settings.scope == END_TO_END:
            element = self.program.fused_micro_batches * self.program.micro_batch_size
            measured += [self._constant(session, element), self._stages(element)[-1]]
        return measured, rival

    def _stages(self, samples_per_element: int) -> List[Any]:
        """The input pipeline up to each of its stages."""
        from ipucnn.benchmarking.stages import PipelineStage, stage_names

        augment = self.resolved.config.augment and self.settings.training
        buffered = self._buffered(samples_per_element)
        return [
            PipelineStage(name, functools.partial(self.pipeline, samples_per_element), buffered)
            for name in stage_names(augment)
        ]

    def _buffered(self, samples_per_element: int) -> int:
        from ipucnn.datasets.pipeline import buffered_elements

        config = self.resolved.config
        return buffered_elements(samples_per_element, self.setup.input_shape, config.pipeline_num_parallel)

    def _compile(
        self, session: Any, model: Any, result: BenchmarkReport
    ) -> Tuple[List[Any], Optional[Tuple[str, str]]]:
        """The sides to measure, and (name, description) of the one that the session is compared with."""
        from ipucnn.benchmarking import sides

        started = time.perf_counter()
        if self.settings.training:
            from ipucnn.training.losses import make_loss

            loss = make_loss(self.loss_name, self.resolved.config.label_smoothing)
            compilation = sides.compile_session(
                session, model, self.program, self.optimizer, loss, self.learning_rate, self.dataset
            )
            self.program = session.program
            element = self.program.fused_micro_batches * self.program.micro_batch_size
            fixed = None if self.steps is None else self.program.weight_updates_per_execution
            if fixed is None and session.device.kind == "ipu":
                fixed = _IPU_UPDATES
            side: Any = sides.SessionTraining(
                session, self.dataset(0, element), fixed, lead=self._lead(element)
            )
        else:
            self.program = self.program.with_fused(self._fused_inference(session, model))
            element = self.program.fused_micro_batches * self.program.micro_batch_size
            compilation = session.compile_prediction(model, (element, *self.setup.input_shape))
            compilation = replace(compilation, fused_micro_batches=self.program.fused_micro_batches)
            images = sides.images_only(self.dataset(0, element))
            side = sides.SessionInference(
                session,
                images,
                self.program.micro_batch_size,
                self.program.fused_micro_batches,
                None if self.steps is None else self.steps * self.program.num_replicas,
                lead=self._lead(element),
            )
        result.device = asdict(session.device)
        result.program = self.program.to_dict()
        result.compilation = {
            **{
                k: v
                for k, v in compilation.to_dict().items()
                if k not in ("device", "first_update_s", "stages_s")
            },
            "first_execution_s": None,
            "cached": None,  # TensorFlow keeps no executables
            "predicted_memory": [
                {"system": p["system"], "precision": p["precision"], "ipus": p["memory"]}
                for p in result.predicted
            ],
        }
        result.phases["trace_s"] = compilation.trace_s
        result.phases["prepare_s"] = time.perf_counter() - started
        if self.settings.compare_with is None:
            return [side], None
        rival, description = self._keras(model)
        return [side, rival], ("keras", description)

    def _lead(self, samples_per_element: int) -> int:
        """Elements to compute off the clock: while others have their turn, the pipeline fills its buffers."""
        alone = self.settings.scope != END_TO_END and self.settings.compare_with is None
        return 0 if alone or self.kind == DEVICE_GENERATED else self._buffered(samples_per_element)

    def _constant(self, session: Any, samples_per_element: int) -> Any:
        """The session's work on a constant batch, without input pipeline."""
        from ipucnn.benchmarking import sides

        batch = sides.constant_batch(self.pipeline(samples_per_element))
        if self.settings.training:
            side: Any = sides.SessionTraining(session, batch)
        else:
            p = self.program
            images = sides.images_only(batch)
            side = sides.SessionInference(session, images, p.micro_batch_size, p.fused_micro_batches)
        side.name = "constant batch"
        return side

    def _fused_inference(self, session: Any, model: Any) -> int:
        from ipucnn.sessions.host.fusion import activation_bytes_per_sample, choose_fused

        p = self.program
        if self.fused is not None:
            return self.fused
        micro_batches = p.num_replicas * (self.steps or _OPEN_STEPS)
        memory = session.device.memory_bytes if session.device.kind == "cpu" else 0
        return choose_fused(micro_batches, p.micro_batch_size, 1, activation_bytes_per_sample(model), memory)

    def _keras(self, model: Any) -> Tuple[Any, str]:
        from ipucnn.benchmarking import sides

        p, config = self.program, self.resolved.config
        compiled, accumulated, description = sides.keras_model(
            model,
            self.optimizer,
            self.learning_rate,
            self.loss_name,
            config.label_smoothing,
            p.num_micro_batches,
        )
        batches = self.dataset(0, p.micro_batch_size)
        if self.settings.training:
            micro_batches = p.num_micro_batches if accumulated > 1 else 1
            return sides.KerasTraining(compiled, batches, micro_batches, p.micro_batch_size), description
        images = sides.images_only(batches)
        description = f"Keras {description.split()[1]} predict"
        return sides.KerasInference(compiled, images, p.micro_batch_size), description

    def _fill(
        self,
        result: BenchmarkReport,
        measurements: List[Measurement],
        rival: Optional[Tuple[str, str]],
        peak: Any,
        others_share: Optional[float],
    ) -> None:
        """Puts what was measured into the report."""
        from ipucnn.benchmarking import machine

        own = measurements[0]
        executions = own.executions
        if own.first_s:
            if result.compilation is not None:
                result.compilation["first_execution_s"] = own.first_s
                result.compilation["compile_s"] = result.compilation["trace_s"] + own.first_s
            result.phases["first_execution_s"] = own.first_s
            result.phases["warmup_s"] = own.warmup_s
            result.warmup = {
                "executions": own.warmup_executions,
                "seconds": own.warmup_s,
                "steady": own.steady,
            }
            if not own.steady and executions:
                result.notes.append("warm-up ended by its time limit, before times were steady")
        result.executions = execution_rows(executions)
        if not executions:
            return
        result.phases["measured_s"] = sum(m.wall_s for each in measurements for m in each.executions)
        macs = 0
        if result.compilation is not None:
            self._final_program(result, own)
            macs = result.compilation["macs_per_sample"]
        result.measured = measured_figures(
            executions,
            seed=self.seed,
            step_samples=self._step_samples(),
            # A training step counts as three forward passes: forward, and the products of the two gradients.
            flop_per_image=2.0 * macs * (3 if self.settings.training else 1) if macs else None,
            peak=peak.measure() if peak is not None else None,
            peak_memory_bytes=machine.peak_memory_bytes(),
            device_peak_memory_bytes=machine.device_peak_memory_bytes(result.device["kind"]),
            others_share=others_share,
        )
        if (result.measured["share_of_matmul_peak"] or 0.0) > 1.0:
            result.notes.append(
                "this is more arithmetic than the fastest matrix product does: something is wrong with one of the two"
            )
        if self.settings.scope == DATA:
            self._fill_stages(result, measurements)
        elif self.settings.scope == END_TO_END:
            result.end_to_end = data_share([m.executions for m in measurements], self.seed)
        elif rival is not None:
            other = measurements[1].executions
            samples = [e.samples for e in executions], [e.samples for e in other]
            seconds = [e.wall_s for e in executions], [e.wall_s for e in other]
            on_cpu = [e.cpu_s for e in executions], [e.cpu_s for e in other]
            result.comparison = {
                "with": rival[0],
                "description": rival[1],
                "executions": execution_rows(other),
                "steady": measurements[1].steady,
                "images_per_s": throughput(samples[1], seconds[1], self.seed).to_dict(),
                "ratio": paired_ratio(samples, seconds, self.seed).to_dict(),
                "ratio_by_processor_time": paired_ratio(samples, on_cpu, self.seed).to_dict()
                if result.device["kind"] == "cpu"
                else None,
            }

    def _fill_stages(self, result: BenchmarkReport, measurements: List[Measurement]) -> None:
        from ipucnn.benchmarking.stages import pipeline_figures
        from ipucnn.datasets.pipeline import parallel_calls

        ordered = measurements[::-1]
        result.data_pipeline = pipeline_figures(
            self.setup.source,
            [m.side.name for m in ordered],
            [m.executions for m in ordered],
            result.predicted,
            batch_size=self.program.micro_batch_size,
            num_parallel=parallel_calls(self.resolved.config.pipeline_num_parallel),
            seed=self.seed,
        )

    def _final_program(self, result: BenchmarkReport, own: Measurement) -> None:
        """Program and execution as they were measured."""
        units, p = own.units, self.program
        if self.settings.training:
            p = self._program(units).with_fused(p.fused_micro_batches)
            if self.program.pipeline_splits:
                p = p.with_splits(self.program.pipeline_splits)
        result.program = p.to_dict()
        result.execution = {
            "weight_updates": units if self.settings.training else None,
            "micro_batches": units * p.num_micro_batches if self.settings.training else units,
            "samples": units * own.side.samples_per_unit,
            "fused_micro_batches": p.fused_micro_batches,
        }

    def _step_samples(self) -> int:
        """Samples of a weight update, or of one micro-batch on each replica."""
        p = self.program
        return p.global_batch_size if self.settings.training else p.micro_batch_size * p.num_replicas


def _without_nodes(text: str) -> str:
    """The line of a TensorFlow message that says what could not be allocated, without names of graph nodes."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    line = next((line for line in lines if re.search("OOM|allocat", line)), lines[0])
    line = re.sub(r"\{\{[^{}]*\}\}|\[\[.*?\]\]|\[Op:[^\]]*\]", "", line)
    line = re.sub(r" on /job:\S+ by allocator \S+", "", line)
    return " ".join(line.split())


@contextlib.contextmanager
def _void_on_error(result: BenchmarkReport) -> Iterator[None]:
    """Turns whatever goes wrong from here on into a void report."""
    import tensorflow as tf

    try:
        yield
    except UserError as error:
        result.void, result.exit_code = error.message, error.exit_code
        # Sessions speak of the checkpoints of a training run, which a benchmark does not write.
        result.hint = error.hint.split("; checkpoints")[0] if error.hint else None
    except (tf.errors.ResourceExhaustedError, MemoryError) as error:
        what = _without_nodes(str(getattr(error, "message", error)))
        result.void, result.exit_code = f"out of memory: {what}", EXIT_INFEASIBLE
        result.hint = "use a smaller --micro-batch-size or --image-size, or --fused-micro-batches 1"
    except Exception as error:
        text = str(error.message if isinstance(error, tf.errors.OpError) else error)
        lines = [line for line in text.splitlines() if line.strip()] or ["no message"]
        result.void, result.exit_code = f"{type(error).__name__}: {lines[0].strip()}", EXIT_BUG
        result.traceback = traceback.format_exc()
    if result.void is not None:
        result.measured = result.comparison = result.regression = None
        result.data_pipeline = result.end_to_end = None


__all__ = ["Benchmark", "Limits", "run_benchmark"]
