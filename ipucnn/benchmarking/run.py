"""Runs a benchmark from building its network to its report, which grows in steps and is void if one of them fails."""

from __future__ import annotations

import re
import time
import traceback
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from msgspec import convert, structs

from ipucnn import interrupts
from ipucnn.aliases import KerasModel, MemoryAdvice, PlainDict
from ipucnn.benchmarking import machine, statistics
from ipucnn.benchmarking.benchmark import Benchmark, compared_options, program_of
from ipucnn.benchmarking.contenders import ReferenceWorkload
from ipucnn.benchmarking.input_pipeline import data_share, pipeline_figures
from ipucnn.benchmarking.measure import Measured, Measurement, Report, ignore_progress, measure, shortfall
from ipucnn.benchmarking.prediction import PredictionRequest, predict_columns
from ipucnn.benchmarking.records import (
    BenchmarkReport,
    Comparison,
    Compilation,
    DataFacts,
    DeviceFacts,
    ExecutionFacts,
    MeasuredFigures,
    PipelineFigures,
    Prediction,
    Regression,
    Warmup,
)
from ipucnn.benchmarking.settings import DATA, DATA_KINDS, END_TO_END
from ipucnn.errors import EXIT_BUG, EXIT_INFEASIBLE, UserError
from ipucnn.machine import fix_threads, num_cores, peak_memory_bytes, reset_peak_memory
from ipucnn.planning.splits import with_run_splits
from ipucnn.runs import setup as run_setup
from ipucnn.sessions.host.workers import threads_of_training
from ipucnn.sessions.session import DeviceInfo, Session
from ipucnn.training.program import Program

if TYPE_CHECKING:
    from ipucnn.benchmarking.work import Work


class Outcome(NamedTuple):
    """The result of a benchmark: its report, and the exit code if that is void."""

    report: BenchmarkReport
    exit_code: int = 0


def run(benchmark: Benchmark, progress: Report = ignore_progress, verbose: bool = False) -> Outcome:
    """Builds, compiles, measures and predicts.

    Args:
        progress: the function called with the progress.
        verbose: whether to show TensorFlow's messages.

    Returns:
        The report; an error on the device makes it void, and is not raised.

    Raises:
        UserError: the device is missing, or the baseline is another machine's.
    """
    from ipucnn.sessions.factory import create_session, runs_on_ipus

    began = time.perf_counter()
    config, settings = benchmark.config, benchmark.settings
    if settings.training and not runs_on_ipus(config.device):
        # As in training; but a comparison runs one operation at a time, with all cores for each.
        is_alone = settings.compare_with is None
        threads = threads_of_training(benchmark.program, config.max_workers) if is_alone else num_cores()
        fix_threads(threads, required=False)
    session = create_session(config.device, verbose=verbose, config=config)
    benchmark = replace(benchmark, setup=run_setup.move_preprocessing(benchmark.setup, session))
    from ipucnn.datasets.pipeline import data_errors
    from ipucnn.runs.provenance import environment

    report = first_report(benchmark, session.device, environment())
    if benchmark.baseline is not None:
        from ipucnn.benchmarking.baseline import check_same_machine

        check_same_machine(benchmark.baseline, str(settings.baseline), report.device)
    reset_peak_memory()
    try:
        with data_errors():
            for grown in _steps(benchmark, session, report, began, progress):
                report = grown
    except Exception as error:
        return _void(report, error)
    return Outcome(report)


def first_report(benchmark: Benchmark, device: DeviceInfo, environment: PlainDict) -> BenchmarkReport:
    """Returns the report with everything that is known before the network is built."""
    info, settings, count = benchmark.setup.source.info, benchmark.settings, benchmark.instances.count
    notes = list(benchmark.program.warnings)
    if count > 1:
        notes.append(
            f"measured in {count} instances of poprun, by the clock of the first: images/s are of all of them, the "
            "device and its memory are the first's"
        )
    return BenchmarkReport(
        model=benchmark.resolved.record.name,
        preset=benchmark.resolved.preset,
        mode=settings.mode,
        scope=settings.scope,
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        seed=benchmark.seed,
        input_shape=list(benchmark.setup.input_shape),
        data=DataFacts(
            kind=benchmark.kind,
            description=DATA_KINDS[benchmark.kind],
            name=info.name,
            location=info.location,
            num_images=info.num_train,
        ),
        settings=settings.limits,
        options=compared_options(benchmark.config),
        program=benchmark.program.to_dict(),
        device=DeviceFacts(**asdict(device)),
        environment=environment,
        notes=notes,
    )


def _steps(
    benchmark: Benchmark, session: Session, report: BenchmarkReport, began: float, progress: Report
) -> Iterator[BenchmarkReport]:
    """Yields the report after each step: the network is built and predicted, compiled, and measured."""
    from ipucnn.benchmarking.work import compile_work

    progress("building the network", 0, 0, "")
    model = run_setup.build(benchmark.setup)
    program = with_run_splits(benchmark.program, model, benchmark.resolved, None)
    benchmark = replace(benchmark, program=program)
    predicted, notes = _predictions(benchmark, model)
    report = structs.replace(
        report,
        program=program.to_dict(),
        predicted=predicted,
        notes=[*report.notes, *notes],
    )
    yield report
    # The host's matrix products are no measure of IPUs.
    has_peak = benchmark.settings.scope != DATA and session.device.kind != "ipu"
    peak = machine.MatmulPeak(session.place) if has_peak else None
    session.would_fit = _memory_advice(benchmark, model)
    progress("compiling", 0, 0, "")
    work = compile_work(benchmark, session, model)
    benchmark = replace(benchmark, program=work.program)
    if work.compilation is not None:
        report = structs.replace(
            report,
            device=DeviceFacts(**asdict(session.device)),
            program=work.program.to_dict(),
            # Whether it came from a cache is known once it has run.
            compilation=structs.replace(
                convert(work.compilation, Compilation, from_attributes=True), cached=None
            ),
        )
        yield report
    timed = _time(benchmark, session, work, began, progress)
    yield _measured_report(report, benchmark, session, work, timed, peak)


def _predictions(benchmark: Benchmark, model: KerasModel) -> Tuple[List[Prediction], List[str]]:
    """Returns the predicted columns, and why there are none."""
    settings = benchmark.settings
    request = PredictionRequest(
        benchmark.config,
        benchmark.program,
        settings.training,
        benchmark.steps,
        settings.system,
        settings.profile,
    )
    try:
        return predict_columns(model, benchmark.resolved.record.name, request), []
    except UserError as error:
        return [], [f"nothing predicted: {error.message}"]


def _memory_advice(benchmark: Benchmark, model: KerasModel) -> MemoryAdvice:
    """Returns the function for advice if the program does not fit; it calls the planner only after a failure."""

    def advise(overuse: Optional[float], without: Optional[str] = None) -> Optional[str]:
        from ipucnn.planning.search.variations import prediction_would_fit, would_fit

        name, config = benchmark.resolved.record.name, benchmark.config
        if benchmark.settings.training:
            return would_fit(model, name, benchmark.program, config)(overuse, without)
        return prediction_would_fit(model, name, config, "benchmark")(overuse, without)

    return advise


class _Timed(NamedTuple):
    """The measurements; ``repetitions`` is the number of the reference workload, None if there is none."""

    measured: Measured
    others_share: Optional[float]
    repetitions: Optional[int]
    regression: Optional[Regression]


def _time(benchmark: Benchmark, session: Session, work: Work, began: float, progress: Report) -> _Timed:
    """Measures the work in executions as long as the baseline's, if there is one."""
    settings, baseline, gate, before = benchmark.settings, benchmark.baseline, None, None
    if baseline is not None and baseline.execution is not None:
        from ipucnn.benchmarking.baseline import Gate

        first = work.contenders[0]
        first.fixed_units = baseline.execution.samples // first.samples_per_unit
        gate = Gate(baseline, str(settings.baseline), settings.max_regression, benchmark.seed)
        before = baseline.execution.reference_repetitions
    reference = ReferenceWorkload(session.place, before) if settings.scope != DATA else None
    occupation = machine.Occupation()

    def is_decided(measurements: Sequence[Measurement]) -> bool:
        return gate is None or gate.is_decided(measurements[0].executions, occupation.others_share())

    measured = measure(
        work.contenders,
        settings.limits,
        progress,
        reference,
        # All instances take the time from the first instance's clock, so that they stop measuring together.
        clock=lambda: session.of_first_instance(time.perf_counter()),
        started=session.of_first_instance(began),
        is_decided=is_decided,
    )
    share, executions = occupation.others_share(), measured.measurements[0].executions
    return _Timed(
        measured=measured,
        others_share=share,
        repetitions=reference.repetitions if reference is not None else None,
        regression=gate.compare(executions, share) if gate is not None and executions else None,
    )


def _measured_report(
    report: BenchmarkReport,
    benchmark: Benchmark,
    session: Session,
    work: Work,
    timed: _Timed,
    peak: Optional[machine.MatmulPeak],
) -> BenchmarkReport:
    """Returns the report with all measurements."""
    measurements, scope = timed.measured.measurements, benchmark.settings.scope
    first, has_figures = measurements[0], bool(measurements[0].executions)
    compilation, is_compiled = report.compilation, report.compilation is not None
    if compilation is not None:
        compilation = structs.replace(
            compilation,
            cached=session.compilation.cached if session.compilation is not None else compilation.cached,
            first_execution_s=first.first_s or None,
            compile_s=compilation.trace_s + first.first_s if first.first_s else compilation.compile_s,
        )
    warmup = Warmup(executions=first.warmup_executions, seconds=first.warmup_s, steady=first.steady)
    program, execution = _execution(benchmark, first, timed.repetitions)
    figures = _figures(report, benchmark, first, timed.others_share, peak) if has_figures else None
    notes = (
        "warm-up ended by its time limit, before times were steady"
        if has_figures and not first.steady
        else None,
        _MORE_THAN_PEAK if figures is not None and (figures.share_of_matmul_peak or 0.0) > 1.0 else None,
        shortfall(timed.measured, benchmark.settings.limits),
    )
    report = structs.replace(
        report,
        compilation=compilation,
        warmup=warmup if first.first_s else None,
        interrupted=timed.measured.interrupted,
        executions=first.executions,
        program=program.to_dict() if is_compiled and has_figures else report.program,
        execution=execution if is_compiled and has_figures else None,
        measured=figures,
        regression=timed.regression,
        notes=[*report.notes, *filter(None, notes)],
    )
    if not has_figures:
        return report
    if scope == DATA:
        return structs.replace(report, data_pipeline=_pipeline(report, benchmark, measurements))
    if scope == END_TO_END:
        executions = [measurement.executions for measurement in measurements]
        return structs.replace(report, end_to_end=data_share(executions, benchmark.seed))
    if work.rival is not None:
        return structs.replace(report, comparison=_comparison(report, benchmark, measurements, work.rival))
    return report


def _execution(
    benchmark: Benchmark, first: Measurement, repetitions: Optional[int]
) -> Tuple[Program, ExecutionFacts]:
    """Returns program and execution as they were measured."""
    units, p, training = first.units, benchmark.program, benchmark.settings.training
    if training:
        splits = p.pipeline_splits
        p = program_of(benchmark.config, benchmark.seed, benchmark.instances, units)
        p = p.with_fused(benchmark.program.fused_micro_batches)
        p = p.with_splits(splits) if splits else p
    return p, ExecutionFacts(
        weight_updates=units if training else None,
        micro_batches=units * p.num_micro_batches if training else units,
        samples=units * first.contender.samples_per_unit,
        fused_micro_batches=p.fused_micro_batches,
        reference_repetitions=repetitions,
    )


# Lavin and Gray 2016, arXiv:1509.09308: a 3x3 convolution takes down to 4 / 9 of the multiplications.
_MORE_THAN_PEAK = (
    "this counts more arithmetic than the fastest matrix product did: convolutions may need fewer multiplications than "
    "are counted (Winograd's algorithm), or the peak was measured in a slow moment"
)


def _figures(
    report: BenchmarkReport,
    benchmark: Benchmark,
    first: Measurement,
    others_share: Optional[float],
    peak: Optional[machine.MatmulPeak],
) -> MeasuredFigures:
    """Returns the figures of the network, or of the input pipeline."""
    training, p = benchmark.settings.training, benchmark.program
    macs = report.compilation.macs_per_sample if report.compilation is not None else 0
    # A training step counts as three forward passes: forward, and the products of the two gradients.
    flop_per_image = 2.0 * macs * (3 if training else 1) if macs else None
    # A weight update, or one micro-batch on each replica.
    step_samples = p.global_batch_size if training else p.micro_batch_size * p.num_replicas
    samples, seconds = [e.samples for e in first.executions], [e.wall_s for e in first.executions]
    speed = statistics.throughput(samples, seconds, benchmark.seed)
    flop_per_s = speed.value * flop_per_image if flop_per_image is not None else None
    best = peak.measure() if peak is not None else None
    return MeasuredFigures(
        images_per_s=speed,
        step_s=step_samples / speed.value,
        step_samples=step_samples,
        total_samples=sum(samples),
        total_s=sum(seconds),
        num_executions=len(samples),
        execution=statistics.spread(seconds),
        percentiles=statistics.percentiles(seconds),
        flop_per_image=flop_per_image,
        flop_per_s=flop_per_s,
        matmul_peak=best,
        share_of_matmul_peak=flop_per_s / best.flop_per_s if best and flop_per_s else None,
        peak_memory_bytes=peak_memory_bytes(),
        device_peak_memory_bytes=machine.device_peak_memory_bytes(report.device.kind),
        others_share=others_share,
    )


def _comparison(
    report: BenchmarkReport, benchmark: Benchmark, measurements: Sequence[Measurement], rival: Tuple[str, str]
) -> Comparison:
    """Compares the session's speed with the rival's, round by round."""
    session, other = measurements[0].executions, measurements[1]
    samples = [e.samples for e in session], [e.samples for e in other.executions]
    seconds = [e.wall_s for e in session], [e.wall_s for e in other.executions]
    on_cpu = [e.cpu_s for e in session], [e.cpu_s for e in other.executions]
    # Processor times can be compared only if both compute on the processors.
    by_cpu = report.device.kind == "cpu"
    return Comparison(
        rival=rival[0],
        description=rival[1],
        executions=other.executions,
        steady=other.steady,
        images_per_s=statistics.throughput(samples[1], seconds[1], benchmark.seed),
        ratio=statistics.paired_ratio(samples, seconds, benchmark.seed),
        ratio_by_processor_time=statistics.paired_ratio(samples, on_cpu, benchmark.seed) if by_cpu else None,
    )


def _pipeline(
    report: BenchmarkReport, benchmark: Benchmark, measurements: Sequence[Measurement]
) -> PipelineFigures:
    """Returns the figures of the input pipeline part by part; the whole pipeline was measured first."""
    from ipucnn.datasets.pipeline import parallel_calls

    ordered = measurements[::-1]
    return pipeline_figures(
        benchmark.setup.source,
        [m.contender.name for m in ordered],
        [m.executions for m in ordered],
        report.predicted,
        batch_size=benchmark.program.micro_batch_size,
        num_parallel=parallel_calls(benchmark.config.pipeline_num_parallel),
        seed=benchmark.seed,
    )


def _void(report: BenchmarkReport, error: Exception) -> Outcome:
    """Returns the report of a benchmark that failed, without figures, and its exit code."""
    import tensorflow as tf

    where = None
    if isinstance(error, UserError):
        # Sessions mention the checkpoints of a training run, which a benchmark does not write.
        hint = error.hint.split("; checkpoints")[0] if error.hint else None
        why, code = error.message, error.exit_code
    elif isinstance(error, (tf.errors.ResourceExhaustedError, MemoryError)):
        why = f"out of memory: {_without_nodes(str(getattr(error, 'message', error)))}"
        hint = "use a smaller --micro-batch-size or --image-size, or --fused-micro-batches 1"
        code = EXIT_INFEASIBLE
    else:
        # A library's error after an interruption says nothing about the benchmark.
        interrupts.check()
        text = str(error.message if isinstance(error, tf.errors.OpError) else error)
        lines = [line for line in text.splitlines() if line.strip()] or ["no message"]
        why, hint, code = f"{type(error).__name__}: {lines[0].strip()}", None, EXIT_BUG
        where = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Outcome(structs.replace(report, void=why, hint=hint, traceback=where), code)


def _without_nodes(text: str) -> str:
    """Returns the line of a TensorFlow message that names the failed allocation, without names of graph nodes."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    line = next((line for line in lines if re.search("OOM|allocat", line)), lines[0])
    line = re.sub(r"\{\{[^{}]*\}\}|\[\[.*?\]\]|\[Op:[^\]]*\]", "", line)
    line = re.sub(r" on /job:\S+ by allocator \S+", "", line)
    return " ".join(line.split())
