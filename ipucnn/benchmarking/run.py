"""Measures a job, from building its network to its report.  The report is void if one of the steps fails."""

from __future__ import annotations

import re
import time
import traceback
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Iterator, List, Optional, Tuple

from msgspec import structs

from ipucnn import interrupts
from ipucnn.aliases import KerasModel, MemoryAdvice
from ipucnn.benchmarking import peak, report
from ipucnn.benchmarking.contenders import ReferenceWorkload
from ipucnn.benchmarking.job import Job
from ipucnn.benchmarking.prediction import PredictionRequest, predict_columns
from ipucnn.benchmarking.records import BenchmarkReport, DeviceFacts, IpuPrediction
from ipucnn.benchmarking.rounds import Clocks, Rounds, measure
from ipucnn.benchmarking.settings import DATA
from ipucnn.errors import EXIT_BUG, EXIT_INFEASIBLE, UserError, is_out_of_memory
from ipucnn.events import Began, Event, Events, Note, Progress
from ipucnn.filesystem import user_error_of
from ipucnn.machine import fix_threads, num_cores, peak_memory_bytes, reset_peak_memory
from ipucnn.planning.splits import splits_of_run
from ipucnn.runs import setup as run_setup
from ipucnn.sessions.host.division import threads_of_training
from ipucnn.sessions.session import NotFiniteError, Session
from ipucnn.training.program import Layers

if TYPE_CHECKING:
    from ipucnn.benchmarking.work import Work


def run(job: Job, verbose: bool = False) -> Events[Tuple[BenchmarkReport, int]]:
    """Builds, compiles, measures and predicts.

    Args:
        job: what to measure.
        verbose: whether to show TensorFlow's messages.

    Returns:
        The report, and the exit code if it is void; an error on the device makes it void, and is not raised.

    Raises:
        UserError: the device is missing, or the baseline is another machine's.
    """
    from ipucnn.sessions.factory import create_session, runs_on_ipus

    began = time.perf_counter()
    yield Progress("", 0, None)
    config, settings = job.config, job.settings
    if settings.training and not runs_on_ipus(config.device):
        # As in training; but a comparison runs one operation at a time, with all cores for each.
        is_alone = settings.compare_with is None
        threads = threads_of_training(job.program, job.fused, config.max_workers) if is_alone else num_cores()
        fix_threads(threads, required=False)
    session = create_session(config.device, verbose=verbose, config=config)
    setup, session = run_setup.move_preprocessing(job.setup, session)
    job = replace(job, setup=setup)
    from ipucnn.datasets.pipeline import data_errors
    from ipucnn.runs.provenance import environment

    latest = report.first_report(job, session.device, environment())
    if job.baseline is not None:
        from ipucnn.benchmarking.baseline import check_same_machine

        check_same_machine(job.baseline, str(settings.baseline), session.device)
    reset_peak_memory()
    from ipucnn.benchmarking.work import compile_work

    # Each step makes the report anew: if the next one fails, the void report has what is known by then.
    try:
        with data_errors():
            yield from _began("building the network")
            model = run_setup.build(job.setup)
            layers = Layers(*splits_of_run(job.program, model, job.resolved, None), ())
            predicted, notes = _predictions(job, layers, model)
            program = {**job.program.to_dict(), **layers.to_dict()}
            latest = structs.replace(
                latest,
                program=program,
                predicted=predicted,
                notes=[*latest.notes, *job.setup.record.notes, *notes],
            )
            # The host's matrix products are no measure of IPUs.
            has_peak = settings.scope != DATA and session.device.kind != "ipu"
            matmul = peak.MatmulPeak(session.place) if has_peak else None
            yield from _began("compiling")
            work = compile_work(job, layers, session, model, _memory_advice(job, layers, model))
            latest = _compiled(latest, work, session)
            latest = yield from _measured(latest, job, work, session, began, matmul)
        return latest, 0
    except Exception as error:
        return _void(latest, error)


def _began(work: str) -> Iterator[Event]:
    """Yields that a piece of work began, also as a line for a pipe."""
    yield Note(work)
    yield Began(work)


def _compiled(latest: BenchmarkReport, work: Work, session: Session) -> BenchmarkReport:
    """Returns the report with the compiled work."""
    return structs.replace(
        latest,
        program=work.program.to_dict(),
        device=DeviceFacts(**asdict(session.device if work.compilation is None else work.compilation.device)),
        compilation=report.compilation_record(work.compilation),
    )


def _predictions(job: Job, layers: Layers, model: KerasModel) -> Tuple[List[IpuPrediction], List[str]]:
    """Returns the predicted columns, and why there are none."""
    settings = job.settings
    request = PredictionRequest(
        job.config,
        job.program,
        layers.pipeline_splits,
        settings.training,
        job.steps,
        settings.system,
        settings.profile,
    )
    try:
        return predict_columns(model, job.resolved.record.name, request), []
    except UserError as error:
        return [], [f"nothing predicted: {error.message}"]


def _memory_advice(job: Job, layers: Layers, model: KerasModel) -> MemoryAdvice:
    """Returns the function for advice if the program does not fit; it calls the planner only after a failure."""

    def advise(overuse: Optional[float], without: Optional[str] = None) -> Optional[str]:
        from ipucnn.planning.search.neighbours import prediction_advice, training_advice

        name, config = job.resolved.record.name, job.config
        if job.settings.training:
            return training_advice(model, name, job.program, config, layers.pipeline_splits)(overuse, without)
        return prediction_advice(model, name, config, "benchmark")(overuse, without)

    return advise


def _measured(
    latest: BenchmarkReport,
    job: Job,
    work: Work,
    session: Session,
    began: float,
    matmul: Optional[peak.MatmulPeak],
) -> Events[BenchmarkReport]:
    """Returns the report with the measured work: in executions as long as the baseline's, if there is one."""
    settings, baseline, gate, before = job.settings, job.baseline, None, None
    if baseline is not None and baseline.execution is not None:
        from ipucnn.benchmarking.baseline import Gate

        first = work.contenders[0]
        first.fixed_units = baseline.execution.samples // first.samples_per_unit
        gate = Gate(baseline, str(settings.baseline), settings.allowed_loss, job.seed)
        before = baseline.execution.reference_repetitions
    reference = ReferenceWorkload(session.place, before) if settings.scope != DATA else None
    occupation = peak.Occupation()

    def is_decided(rounds: Rounds) -> bool:
        return gate is None or gate.is_decided(rounds.executions(), occupation.others_share())

    # All instances take the time from the first instance's clock, so that they stop measuring together.
    clocks = Clocks(session.of_first_instance(began), lambda: session.of_first_instance(time.perf_counter()))
    rounds = yield from measure(work.contenders, settings.limits, clocks, reference, is_decided)
    share, executions = occupation.others_share(), rounds.executions()
    machine = report.MachineState(
        repetitions=reference.repetitions if reference is not None else None,
        cached=work.cached if session.device.kind == "ipu" else None,
        others_share=share,
        matmul_peak=matmul.measure() if matmul is not None and executions else None,
        peak_memory_bytes=peak_memory_bytes(),
        device_peak_memory_bytes=peak.device_peak_memory_bytes(session.device.kind),
    )
    regression = gate.compare(executions, share) if gate is not None and executions else None
    return report.measured_report(latest, job, work, rounds, machine, regression)


def _void(latest: BenchmarkReport, error: Exception) -> Tuple[BenchmarkReport, int]:
    """Returns the report of a benchmark that failed, without figures, and its exit code."""
    import tensorflow as tf

    where = None
    is_memory = is_out_of_memory(error) and not isinstance(error, UserError)
    known = error if isinstance(error, UserError) else user_error_of(error)
    if known is not None and not is_memory:
        # A benchmark writes no checkpoints.
        hint = known.advice if isinstance(known, NotFiniteError) else known.hint
        why, code = known.message, known.exit_code
    elif is_memory:
        why = f"out of memory: {_without_nodes(str(getattr(error, 'message', error)))}"
        hint = "use a smaller --micro-batch-size or --image-size"
        # IPUs refuse the option.
        hint += "" if latest.device.kind == "ipu" else ", or --fused-micro-batches 1"
        code = EXIT_INFEASIBLE
    else:
        # A library's error after an interruption says nothing about the benchmark.
        interrupts.check()
        text = str(error.message if isinstance(error, tf.errors.OpError) else error)
        lines = [line for line in text.splitlines() if line.strip()] or ["no message"]
        why, hint, code = f"{type(error).__name__}: {lines[0].strip()}", None, EXIT_BUG
        where = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return structs.replace(latest, void=why, hint=hint, traceback=where), code


def _without_nodes(text: str) -> str:
    """Returns the line of a TensorFlow message that names the failed allocation, without names of graph nodes."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    line = next((line for line in lines if re.search("OOM|allocat", line)), lines[0])
    line = re.sub(r"\{\{[^{}]*\}\}|\[\[.*?\]\]|\[Op:[^\]]*\]", "", line)
    line = re.sub(r" on /job:\S+ by allocator \S+", "", line)
    return " ".join(line.split())
