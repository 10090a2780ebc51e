"""Makes a benchmark's report from its job, its work and its rounds, and writes the report's folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, List, Optional, Sequence

from msgspec import convert, structs

from ipucnn.aliases import PlainDict
from ipucnn.benchmarking import intervals
from ipucnn.benchmarking.input_pipeline import data_share, pipeline_figures
from ipucnn.benchmarking.job import Job, program_of
from ipucnn.benchmarking.records import (
    BenchmarkReport,
    Comparison,
    CompiledNetwork,
    DeviceFacts,
    ExecutionFacts,
    Interval,
    MatmulPeakFacts,
    MeasuredFigures,
    PipelineFigures,
    Regression,
)
from ipucnn.benchmarking.rounds import Rounds
from ipucnn.benchmarking.settings import DATA, END_TO_END
from ipucnn.config.options import RunConfig
from ipucnn.config.resolve import Resolved
from ipucnn.filesystem import check_makeable, entries, make_folder, write_text
from ipucnn.runs.folder import CONFIG, PROGRAM, REPORT
from ipucnn.runs.overwriting import check_replaceable
from ipucnn.runs.writer import claim_default, default_run_dir
from ipucnn.training.program import BuiltProgram, Layers

if TYPE_CHECKING:
    from ipucnn.benchmarking.work import Work
    from ipucnn.sessions.session import CompilationReport, DeviceInfo

# Lavin and Gray 2016, arXiv:1509.09308: a 3x3 convolution takes down to 4 / 9 of the multiplications.
_MORE_THAN_PEAK = (
    "this counts more arithmetic than the fastest matrix product did: convolutions may need fewer multiplications than "
    "are counted (Winograd's algorithm), or the peak was measured in a slow moment"
)


@dataclass(frozen=True)
class MachineState:
    """What the machine did and gave while the rounds were measured; see ``MeasuredFigures``.

    Attributes:
        repetitions: the number of the reference workload's repetitions, None if there is none.
        cached: whether the executable came from a cache, which is known once it has run; None without a cache.
    """

    repetitions: Optional[int]
    cached: Optional[bool]
    others_share: Optional[float]
    matmul_peak: Optional[MatmulPeakFacts]
    peak_memory_bytes: Optional[int]
    device_peak_memory_bytes: Optional[int]


def first_report(job: Job, device: DeviceInfo, environment: PlainDict) -> BenchmarkReport:
    """Returns the report before the network is built.

    Args:
        job: the job.
        device: the session's device.
        environment: versions, machine and command line.
    """
    notes, count = list(job.program.warnings), job.instances.size
    if count > 1:
        notes.append(
            f"measured in {count} instances of poprun, by the clock of the first: images/s are of all of them, the "
            "device and its memory are the first's"
        )
    return BenchmarkReport(
        **structs.asdict(job.request),
        device=DeviceFacts(**asdict(device)),
        environment=environment,
        notes=notes,
    )


def measured_report(
    report: BenchmarkReport,
    job: Job,
    work: Work,
    rounds: Rounds,
    machine: MachineState,
    regression: Optional[Regression],
) -> BenchmarkReport:
    """Returns a report with what was measured.

    Args:
        report: the report of the compiled work.
        job, work: what was measured.
        rounds: the times.
        machine: what the machine did meanwhile.
        regression: the comparison with the baseline, if there is one.
    """
    if not rounds.sides:
        return structs.replace(report, interrupted=rounds.interrupted)
    first, compilation = rounds.sides[0], report.compilation
    if compilation is not None:
        compilation = structs.replace(
            compilation,
            cached=machine.cached,
            first_execution_s=first.first_s,
            compile_s=compilation.trace_s + first.first_s,
        )
    report = structs.replace(
        report, compilation=compilation, warmup=first.warmup, interrupted=rounds.interrupted
    )
    if not rounds.turns:
        return report
    if compilation is not None:
        report = _with_execution(report, job, work, rounds, machine)
    figures = _figures(report, work, rounds, machine, job)
    notes = list(report.notes)
    if not first.warmup.steady:
        notes.append("warm-up ended by its time limit, before times were steady")
    if (figures.share_of_matmul_peak or 0.0) > 1.0:
        notes.append(_MORE_THAN_PEAK)
    notes += [rounds.shortfall] if rounds.shortfall else []
    report = structs.replace(
        report,
        executions=rounds.executions(),
        measured=figures,
        regression=regression,
        notes=notes,
    )
    scope = job.settings.scope
    if scope == DATA:
        return structs.replace(report, data_pipeline=_pipeline(report, job, rounds))
    if scope == END_TO_END:
        executions = [rounds.executions(side) for side in range(len(rounds.sides))]
        return structs.replace(report, end_to_end=data_share(executions, job.seed))
    if job.settings.compare_with is not None:
        return structs.replace(report, comparison=_comparison(report, job, rounds))
    return report


def compilation_record(compilation: Optional[CompilationReport]) -> Optional[CompiledNetwork]:
    """Returns the compilation before its first execution, which may compile, too."""
    if compilation is None:
        return None
    return structs.replace(convert(compilation, CompiledNetwork, from_attributes=True), cached=None)


def _with_execution(
    report: BenchmarkReport, job: Job, work: Work, rounds: Rounds, machine: MachineState
) -> BenchmarkReport:
    """Returns the report with program and execution as they were measured."""
    first, p, training = rounds.sides[0], work.program, job.settings.training
    units = first.units
    if training:
        measured = program_of(job.config, job.seed, job.instances, units)
        p = BuiltProgram.of(measured, Layers.from_dict(p.to_dict()), p.fused_micro_batches)
    execution = ExecutionFacts(
        weight_updates=units if training else None,
        micro_batches=units * p.num_micro_batches if training else units,
        samples=units * first.contender.samples_per_unit,
        fused_micro_batches=p.fused_micro_batches,
        reference_repetitions=machine.repetitions,
    )
    return structs.replace(report, program=p.to_dict(), execution=execution)


def _figures(
    report: BenchmarkReport, work: Work, rounds: Rounds, machine: MachineState, job: Job
) -> MeasuredFigures:
    """Returns the figures of the network, or of the input pipeline."""
    training, p = job.settings.training, work.program
    macs = work.compilation.macs_per_sample if work.compilation is not None else 0
    # A training step counts as three forward passes: forward, and the products of the two gradients.
    flop_per_image = 2.0 * macs * (3 if training else 1) if macs else None
    # A weight update, or one micro-batch on each replica.
    step_samples = p.global_batch_size if training else p.micro_batch_size * p.num_replicas
    executions = rounds.executions()
    seconds = [e.wall_s for e in executions]
    speed = intervals.throughput(intervals.times_of(executions), job.seed)
    flop_per_s = speed.value * flop_per_image if flop_per_image is not None else None
    peak = machine.matmul_peak
    return MeasuredFigures(
        images_per_s=speed,
        step_s=step_samples / speed.value,
        step_samples=step_samples,
        total_samples=sum(e.samples for e in executions),
        total_s=sum(seconds),
        num_executions=len(executions),
        execution=intervals.spread(seconds),
        percentiles=intervals.percentiles(seconds),
        flop_per_image=flop_per_image,
        flop_per_s=flop_per_s,
        matmul_peak=peak,
        share_of_matmul_peak=flop_per_s / peak.flop_per_s if peak and flop_per_s else None,
        peak_memory_bytes=machine.peak_memory_bytes,
        device_peak_memory_bytes=machine.device_peak_memory_bytes,
        others_share=machine.others_share,
    )


def _comparison(report: BenchmarkReport, job: Job, rounds: Rounds) -> Comparison:
    """Compares the session's speed with the rival's, round by round."""
    other = rounds.sides[1]
    executions = rounds.executions(0), rounds.executions(1)

    def ratio(clock: str) -> Interval:
        first, second = (intervals.times_of(each, clock) for each in executions)
        return intervals.paired_ratio(first, second, job.seed)

    return Comparison(
        rival=other.contender.name,
        description=other.contender.description,
        executions=executions[1],
        steady=other.warmup.steady,
        images_per_s=intervals.throughput(intervals.times_of(executions[1]), job.seed),
        ratio=ratio("wall"),
        # Processor times can be compared only if both compute on the processors.
        ratio_by_processor_time=ratio("cpu") if report.device.kind == "cpu" else None,
    )


def _pipeline(report: BenchmarkReport, job: Job, rounds: Rounds) -> PipelineFigures:
    """Returns the figures of the input pipeline part by part; the whole pipeline was measured first."""
    from ipucnn.datasets.pipeline import parallel_calls

    parts = range(len(rounds.sides))[::-1]
    return pipeline_figures(
        job.setup.source,
        [rounds.sides[part].contender.name for part in parts],
        [rounds.executions(part) for part in parts],
        report.predicted,
        batch_size=job.program.micro_batch_size,
        num_parallel=parallel_calls(job.config.pipeline_num_parallel),
        seed=job.seed,
    )


def check_folder(resolved: Resolved) -> Path:
    """Returns the folder of the report, checked before anything is measured.

    Raises:
        ConfigurationError: it is taken, or ``--overwrite`` would destroy other files.
        DataError: it is a file.
    """
    config = resolved.config
    if config.run_dir is None:
        return default_run_dir(resolved.record.name, "benchmark")
    path = config.run_dir
    check_makeable(path)
    foreign = foreign_names(path, (CONFIG, PROGRAM, REPORT))
    check_replaceable(path, foreign, CONFIG, "the folder of a benchmark", config.overwrite)
    return path


def foreign_names(path: Path, ours: Sequence[str]) -> List[str]:
    """Returns the names in a folder that are neither hidden nor among ``ours``."""
    return [p.name for p in entries(path) if p.name not in ours and not p.name.startswith(".")]


def write_folder(folder: Path, config: RunConfig, report: BenchmarkReport) -> Path:
    """Writes the three files; returns the path of ``report.json``.

    Raises:
        DataError: the file system refuses.
    """
    if config.run_dir is None:  # another benchmark may have taken the folder since check_folder
        folder = claim_default(config.model_name, "benchmark").path
    make_folder(folder)
    write_text(folder / CONFIG, config.to_yaml())
    write_text(folder / PROGRAM, json.dumps(report.program, indent=2) + "\n")
    write_text(folder / REPORT, report.to_json())
    return folder / REPORT
