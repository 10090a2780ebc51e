"""Makes a benchmark's report from its results, and writes the report's folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

from msgspec import convert, structs

from ipucnn.aliases import PlainDict
from ipucnn.benchmarking import statistics
from ipucnn.benchmarking.benchmark import Benchmark, program_of
from ipucnn.benchmarking.input_pipeline import data_share, pipeline_figures
from ipucnn.benchmarking.measure import Measured, Measurement, shortfall
from ipucnn.benchmarking.records import (
    BenchmarkReport,
    Comparison,
    Compilation,
    DeviceFacts,
    ExecutionFacts,
    MatmulPeakFacts,
    MeasuredFigures,
    PipelineFigures,
    Prediction,
    Regression,
    Request,
    Warmup,
)
from ipucnn.benchmarking.settings import DATA, END_TO_END
from ipucnn.config.options import RunConfig
from ipucnn.config.resolve import Resolved
from ipucnn.errors import ConfigurationError
from ipucnn.filesystem import check_makeable, entries, expand, make_folder, write_text
from ipucnn.runs.folder import CONFIG, PROGRAM, REPORT, claim_default, default_run_dir
from ipucnn.sessions.session import CompilationReport, DeviceInfo
from ipucnn.training.program import Program

# Lavin and Gray 2016, arXiv:1509.09308: a 3x3 convolution takes down to 4 / 9 of the multiplications.
_MORE_THAN_PEAK = (
    "this counts more arithmetic than the fastest matrix product did: convolutions may need fewer multiplications than "
    "are counted (Winograd's algorithm), or the peak was measured in a slow moment"
)


@dataclass(frozen=True)
class Timed:
    """The measurements.

    Attributes:
        measured: the executions of all contenders; the session, or the whole input pipeline, comes first.
        repetitions: the number of the reference workload's repetitions, None if there is none.
        regression: the comparison with the baseline.
        others_share: the others' use of the processors.
        cached: whether the executable came from a cache, which is known once it has run; None without a cache.
        matmul_peak, peak_memory_bytes, device_peak_memory_bytes: see ``MeasuredFigures``.
    """

    measured: Measured
    repetitions: Optional[int]
    regression: Optional[Regression]
    others_share: Optional[float]
    cached: Optional[bool]
    matmul_peak: Optional[MatmulPeakFacts]
    peak_memory_bytes: Optional[int]
    device_peak_memory_bytes: Optional[int]

    @property
    def first(self) -> Measurement:
        """The measurement of the session, or of the whole input pipeline."""
        return self.measured.measurements[0]


@dataclass(frozen=True)
class Results:
    """The results of a benchmark so far; each step adds its own.

    Attributes:
        benchmark: the benchmark; its program is the latest: as requested, with splits, or as compiled.
        request: the part of the report that is known before the network is built.
        device: the session's device.
        environment: versions, machine and command line.
        notes: remarks on the program and on the predictions.
        predicted: the predicted columns.
        compilation: the compilation of the network, None if the input pipeline is measured alone.
        timed: the measurements, None until they are complete.
    """

    benchmark: Benchmark
    request: Request
    device: DeviceInfo
    environment: PlainDict
    notes: Tuple[str, ...]
    predicted: Sequence[Prediction] = ()
    compilation: Optional[CompilationReport] = None
    timed: Optional[Timed] = None


def first_results(benchmark: Benchmark, device: DeviceInfo, environment: PlainDict) -> Results:
    """Returns the results before the network is built."""
    notes, count = benchmark.program.warnings, benchmark.instances.size
    if count > 1:
        notes += (
            f"measured in {count} instances of poprun, by the clock of the first: images/s are of all of them, the "
            "device and its memory are the first's",
        )
    return Results(benchmark, benchmark.make_request(), device, environment, notes)


def report_of(results: Results) -> BenchmarkReport:
    """Returns the report of a benchmark, with what its results have."""
    benchmark, timed = results.benchmark, results.timed
    settings, program = benchmark.settings, benchmark.program
    with_figures = timed if timed is not None and timed.first.executions else None
    warmup = execution = figures = pipeline = end_to_end = comparison = None
    notes = list(results.notes)
    if timed is not None and timed.first.first_s:
        first = timed.first
        warmup = Warmup(executions=first.warmup_executions, seconds=first.warmup_s, steady=first.steady)
    if with_figures is not None:
        if results.compilation is not None:
            program, execution = _execution(benchmark, with_figures)
        figures = _figures(results, with_figures)
        if not with_figures.first.steady:
            notes.append("warm-up ended by its time limit, before times were steady")
        if (figures.share_of_matmul_peak or 0.0) > 1.0:
            notes.append(_MORE_THAN_PEAK)
        measurements = with_figures.measured.measurements
        if settings.scope == DATA:
            pipeline = _pipeline(results, measurements)
        elif settings.scope == END_TO_END:
            end_to_end = data_share([each.executions for each in measurements], benchmark.seed)
        elif settings.compare_with is not None:
            comparison = _comparison(results, measurements)
    shortened = shortfall(timed.measured, settings.limits) if timed is not None else None
    return BenchmarkReport(
        **structs.asdict(structs.replace(results.request, program=program.to_dict())),
        device=DeviceFacts(**asdict(results.device)),
        environment=results.environment,
        compilation=_compilation(results),
        execution=execution,
        warmup=warmup,
        executions=timed.first.executions if timed is not None else [],
        measured=figures,
        comparison=comparison,
        predicted=list(results.predicted),
        data_pipeline=pipeline,
        end_to_end=end_to_end,
        regression=timed.regression if timed is not None else None,
        notes=notes + ([shortened] if shortened else []),
        interrupted=timed is not None and timed.measured.interrupted,
    )


def _compilation(results: Results) -> Optional[Compilation]:
    """Returns the compilation with the time of the first execution, which may compile, too."""
    if results.compilation is None:
        return None
    compilation, timed = convert(results.compilation, Compilation, from_attributes=True), results.timed
    compilation = structs.replace(compilation, cached=timed.cached if timed is not None else None)
    if timed is None or not timed.first.first_s:
        return compilation
    first_s = timed.first.first_s
    return structs.replace(compilation, first_execution_s=first_s, compile_s=compilation.trace_s + first_s)


def _execution(benchmark: Benchmark, timed: Timed) -> Tuple[Program, ExecutionFacts]:
    """Returns program and execution as they were measured."""
    units, p, training = timed.first.units, benchmark.program, benchmark.settings.training
    if training:
        splits = p.pipeline_splits
        p = program_of(benchmark.config, benchmark.seed, benchmark.instances, units)
        p = p.with_fused(benchmark.program.fused_micro_batches)
        p = p.with_splits(splits) if splits else p
    return p, ExecutionFacts(
        weight_updates=units if training else None,
        micro_batches=units * p.num_micro_batches if training else units,
        samples=units * timed.first.contender.samples_per_unit,
        fused_micro_batches=p.fused_micro_batches,
        reference_repetitions=timed.repetitions,
    )


def _figures(results: Results, timed: Timed) -> MeasuredFigures:
    """Returns the figures of the network, or of the input pipeline."""
    benchmark = results.benchmark
    training, p = benchmark.settings.training, benchmark.program
    macs = results.compilation.macs_per_sample if results.compilation is not None else 0
    # A training step counts as three forward passes: forward, and the products of the two gradients.
    flop_per_image = 2.0 * macs * (3 if training else 1) if macs else None
    # A weight update, or one micro-batch on each replica.
    step_samples = p.global_batch_size if training else p.micro_batch_size * p.num_replicas
    samples, seconds = [e.samples for e in timed.first.executions], [e.wall_s for e in timed.first.executions]
    speed = statistics.throughput(samples, seconds, benchmark.seed)
    flop_per_s = speed.value * flop_per_image if flop_per_image is not None else None
    peak = timed.matmul_peak
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
        matmul_peak=peak,
        share_of_matmul_peak=flop_per_s / peak.flop_per_s if peak and flop_per_s else None,
        peak_memory_bytes=timed.peak_memory_bytes,
        device_peak_memory_bytes=timed.device_peak_memory_bytes,
        others_share=timed.others_share,
    )


def _comparison(results: Results, measurements: Sequence[Measurement]) -> Comparison:
    """Compares the session's speed with the rival's, round by round."""
    seed = results.benchmark.seed
    session, other = measurements[0].executions, measurements[1]
    samples = [e.samples for e in session], [e.samples for e in other.executions]
    seconds = [e.wall_s for e in session], [e.wall_s for e in other.executions]
    on_cpu = [e.cpu_s for e in session], [e.cpu_s for e in other.executions]
    # Processor times can be compared only if both compute on the processors.
    by_cpu = results.device.kind == "cpu"
    return Comparison(
        rival=other.contender.name,
        description=other.contender.description,
        executions=other.executions,
        steady=other.steady,
        images_per_s=statistics.throughput(samples[1], seconds[1], seed),
        ratio=statistics.paired_ratio(samples, seconds, seed),
        ratio_by_processor_time=statistics.paired_ratio(samples, on_cpu, seed) if by_cpu else None,
    )


def _pipeline(results: Results, measurements: Sequence[Measurement]) -> PipelineFigures:
    """Returns the figures of the input pipeline part by part; the whole pipeline was measured first."""
    from ipucnn.datasets.pipeline import parallel_calls

    benchmark = results.benchmark
    ordered = measurements[::-1]
    return pipeline_figures(
        benchmark.setup.source,
        [m.contender.name for m in ordered],
        [m.executions for m in ordered],
        results.predicted,
        batch_size=benchmark.program.micro_batch_size,
        num_parallel=parallel_calls(benchmark.config.pipeline_num_parallel),
        seed=benchmark.seed,
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
    path = expand(config.run_dir)
    if checked_folder(path, (CONFIG, PROGRAM, REPORT), "a folder of a benchmark") and not config.overwrite:
        raise ConfigurationError(
            f"--run-dir {path} already exists", "--overwrite replaces it; or use another --run-dir"
        )
    return path


def checked_folder(path: Path, ours: Sequence[str], what: str) -> List[str]:
    """Returns the names in a folder that may be written to.

    Raises:
        ConfigurationError: it contains other files than ``ours``.
        DataError: it is a file.
    """
    check_makeable(path)
    names = [p.name for p in entries(path)]
    for name in names:
        if name not in ours and not name.startswith("."):
            raise ConfigurationError(f"{path} is not {what}: it holds {name}", "choose another --run-dir")
    return names


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
