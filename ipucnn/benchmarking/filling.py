"""What was measured, put into the report.  ``work`` is the ``Benchmark``."""

from typing import Any, List, Optional, Tuple

from ipucnn.benchmarking.measure import Measurement
from ipucnn.benchmarking.report import BenchmarkReport, execution_rows, measured_figures
from ipucnn.benchmarking.settings import DATA, END_TO_END
from ipucnn.benchmarking.input_pipeline import data_share
from ipucnn.benchmarking.statistics import paired_ratio, throughput


def fill(
    work: Any,
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
        _final_program(work, result, own)
        macs = result.compilation["macs_per_sample"]
    result.measured = measured_figures(
        executions,
        seed=work.seed,
        step_samples=step_samples(work),
        # A training step counts as three forward passes: forward, and the products of the two gradients.
        flop_per_image=2.0 * macs * (3 if work.settings.training else 1) if macs else None,
        peak=peak.measure() if peak is not None else None,
        peak_memory_bytes=machine.peak_memory_bytes(),
        device_peak_memory_bytes=machine.device_peak_memory_bytes(result.device["kind"]),
        others_share=others_share,
    )
    if (result.measured["share_of_matmul_peak"] or 0.0) > 1.0:
        result.notes.append(
            "this is more arithmetic than the fastest matrix product does: something is wrong with one of the two"
        )
    if work.settings.scope == DATA:
        _fill_stages(work, result, measurements)
    elif work.settings.scope == END_TO_END:
        result.end_to_end = data_share([m.executions for m in measurements], work.seed)
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
            "images_per_s": throughput(samples[1], seconds[1], work.seed).to_dict(),
            "ratio": paired_ratio(samples, seconds, work.seed).to_dict(),
            "ratio_by_processor_time": paired_ratio(samples, on_cpu, work.seed).to_dict()
            if result.device["kind"] == "cpu"
            else None,
        }


def _fill_stages(work: Any, result: BenchmarkReport, measurements: List[Measurement]) -> None:
    from ipucnn.benchmarking.input_pipeline import pipeline_figures
    from ipucnn.datasets.pipeline import parallel_calls

    ordered = measurements[::-1]
    result.data_pipeline = pipeline_figures(
        work.setup.source,
        [m.side.name for m in ordered],
        [m.executions for m in ordered],
        result.predicted,
        batch_size=work.program.micro_batch_size,
        num_parallel=parallel_calls(work.resolved.config.pipeline_num_parallel),
        seed=work.seed,
    )


def _final_program(work: Any, result: BenchmarkReport, own: Measurement) -> None:
    """Program and execution as they were measured."""
    units, p = own.units, work.program
    if work.settings.training:
        p = work.program_of(units).with_fused(p.fused_micro_batches)
        if work.program.pipeline_splits:
            p = p.with_splits(work.program.pipeline_splits)
    result.program = p.to_dict()
    result.execution = {
        "weight_updates": units if work.settings.training else None,
        "micro_batches": units * p.num_micro_batches if work.settings.training else units,
        "samples": units * own.side.samples_per_unit,
        "fused_micro_batches": p.fused_micro_batches,
    }


def step_samples(work: Any) -> int:
    """Samples of a weight update, or of one micro-batch on each replica."""
    p = work.program
    return p.global_batch_size if work.settings.training else p.micro_batch_size * p.num_replicas
