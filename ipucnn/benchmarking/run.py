"""Runs a benchmark from building its network to its report.  The report is void if one of the steps fails."""

from __future__ import annotations

import re
import time
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Iterator, List, Optional, Sequence, Tuple

from msgspec import structs

from ipucnn import interrupts
from ipucnn.aliases import KerasModel, MemoryAdvice
from ipucnn.benchmarking import machine
from ipucnn.benchmarking.benchmark import Benchmark
from ipucnn.benchmarking.contenders import ReferenceWorkload
from ipucnn.benchmarking.measure import Measurement, Report, ignore_progress, measure
from ipucnn.benchmarking.prediction import PredictionRequest, predict_columns
from ipucnn.benchmarking.records import BenchmarkReport, Prediction
from ipucnn.benchmarking.report import Results, Timed, first_results, report_of
from ipucnn.benchmarking.settings import DATA
from ipucnn.errors import EXIT_BUG, EXIT_INFEASIBLE, UserError
from ipucnn.machine import fix_threads, num_cores, peak_memory_bytes, reset_peak_memory
from ipucnn.runs import setup as run_setup
from ipucnn.sessions.host.division import threads_of_training
from ipucnn.sessions.session import NotFiniteError, Session

if TYPE_CHECKING:
    from ipucnn.benchmarking.work import Work


def run(
    benchmark: Benchmark, progress: Report = ignore_progress, verbose: bool = False
) -> Tuple[BenchmarkReport, int]:
    """Builds, compiles, measures and predicts.

    Args:
        progress: the function called with the progress.
        verbose: whether to show TensorFlow's messages.

    Returns:
        The report, and the exit code if it is void; an error on the device makes it void, and is not raised.

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

    results = first_results(benchmark, session.device, environment())
    if benchmark.baseline is not None:
        from ipucnn.benchmarking.baseline import check_same_machine

        check_same_machine(benchmark.baseline, str(settings.baseline), session.device)
    reset_peak_memory()
    try:
        with data_errors():
            for grown in _steps(results, session, began, progress):
                results = grown
        return report_of(results), 0
    except Exception as error:
        return _void(report_of(replace(results, timed=None)), error)


def _steps(results: Results, session: Session, began: float, progress: Report) -> Iterator[Results]:
    """Yields the results after each step: the network is built and predicted, compiled, and measured."""
    from ipucnn.benchmarking.work import compile_work

    benchmark = results.benchmark
    progress("building the network", 0, 0, "")
    model = run_setup.build(benchmark.setup)
    if benchmark.program.num_stages > 1:
        from ipucnn.planning.splits import with_run_splits

        program = with_run_splits(benchmark.program, model, benchmark.resolved, None)
        benchmark = replace(benchmark, program=program)
    predicted, notes = _predictions(benchmark, model)
    results = replace(results, benchmark=benchmark, predicted=predicted, notes=(*results.notes, *notes))
    yield results
    # The host's matrix products are no measure of IPUs.
    has_peak = benchmark.settings.scope != DATA and session.device.kind != "ipu"
    peak = machine.MatmulPeak(session.place) if has_peak else None
    session.would_fit = _memory_advice(benchmark, model)
    progress("compiling", 0, 0, "")
    work = compile_work(benchmark, session, model)
    results = replace(results, benchmark=work.benchmark, device=session.device, compilation=work.compilation)
    yield results
    yield replace(results, timed=_time(work, session, began, progress, peak))


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
        from ipucnn.planning.search.advice import prediction_advice, training_advice

        name, config = benchmark.resolved.record.name, benchmark.config
        if benchmark.settings.training:
            return training_advice(model, name, benchmark.program, config)(overuse, without)
        return prediction_advice(model, name, config, "benchmark")(overuse, without)

    return advise


def _time(
    work: Work, session: Session, began: float, progress: Report, peak: Optional[machine.MatmulPeak]
) -> Timed:
    """Measures the work in executions as long as the baseline's, if there is one."""
    benchmark = work.benchmark
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
    return Timed(
        measured=measured,
        repetitions=reference.repetitions if reference is not None else None,
        regression=gate.compare(executions, share) if gate is not None and executions else None,
        others_share=share,
        cached=session.compilation.cached if session.compilation and session.device.kind == "ipu" else None,
        matmul_peak=peak.measure() if peak is not None and executions else None,
        peak_memory_bytes=peak_memory_bytes(),
        device_peak_memory_bytes=machine.device_peak_memory_bytes(session.device.kind),
    )


def _void(report: BenchmarkReport, error: Exception) -> Tuple[BenchmarkReport, int]:
    """Returns the report of a benchmark that failed, without figures, and its exit code."""
    import tensorflow as tf

    where = None
    if isinstance(error, UserError):
        # A benchmark writes no checkpoints.
        hint = error.advice if isinstance(error, NotFiniteError) else error.hint
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
    return structs.replace(report, void=why, hint=hint, traceback=where), code


def _without_nodes(text: str) -> str:
    """Returns the line of a TensorFlow message that names the failed allocation, without names of graph nodes."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    line = next((line for line in lines if re.search("OOM|allocat", line)), lines[0])
    line = re.sub(r"\{\{[^{}]*\}\}|\[\[.*?\]\]|\[Op:[^\]]*\]", "", line)
    line = re.sub(r" on /job:\S+ by allocator \S+", "", line)
    return " ".join(line.split())
