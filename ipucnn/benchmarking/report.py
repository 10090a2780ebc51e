"""The result of a benchmark: its figures as a value, void if anything went wrong, and the folder it is written to."""

import contextlib
import json
import re
import traceback
from pathlib import Path
from typing import Iterator, List, Optional, Tuple

from ipucnn import interrupts
from ipucnn.benchmarking import statistics
from ipucnn.benchmarking.measure import Measurement
from ipucnn.benchmarking.records import (
    BenchmarkReport,
    Comparison,
    Execution,
    MatmulPeakFacts,
    MeasuredFigures,
    from_plain,
)
from ipucnn.config.options import RunConfig
from ipucnn.config.resolve import Resolved
from ipucnn.documents import read_record
from ipucnn.errors import EXIT_BUG, EXIT_INFEASIBLE, ConfigurationError, DataError, UserError
from ipucnn.filesystem import check_makeable, entries, expand, is_folder, make_folder, write_text
from ipucnn.runs.folder import CONFIG, PROGRAM, REPORT
from ipucnn.runs.start import claim_default, default_run_dir
from ipucnn.text import shown_value

_FILES = (CONFIG, PROGRAM, REPORT)


def read_report(path: Path) -> BenchmarkReport:
    """A baseline: a ``report.json`` of a network's speed, with executions beside the yardstick.

    Raises:
        ConfigurationError: it measured no network's speed.
        DataError: the file is not there, damaged, of another kind or version, or void.
    """
    path = path / REPORT if is_folder(path) else path
    data = read_record(path, "give the report.json of a benchmark")
    if isinstance(data, dict) and (data.get("void") or data.get("measured", True) is None):
        raise DataError(f"{path}: {shown_value(data.get('void') or 'nothing was measured')}", "make it again")
    hint = "give the report.json that `ipucnn benchmark` wrote"
    report = from_plain(data, BenchmarkReport, f"--baseline {path}", hint)
    if report.scope != "session":
        raise ConfigurationError(
            f"--baseline {path} measured --mode {report.scope}, this run the network's speed",
            "give the report.json of --mode training or inference",
        )
    lacking = [name for name in ("execution", "executions", "measured") if not getattr(report, name)]
    if lacking:
        raise DataError(f"--baseline {path} is damaged: it has no {lacking[0]}", "make it again")
    for index, execution in enumerate(report.executions):
        if not (execution.cpu_s and execution.reference_s and execution.reference_cpu_s):
            raise DataError(
                f"--baseline {path} is damaged: execution {index} has no time of its own or of the yardstick",
                "make it again",
            )
    return report


def measured_figures(
    executions: List[Execution],
    *,
    seed: int,
    step_samples: int,
    flop_per_image: Optional[float],
    peak: Optional[MatmulPeakFacts],
    peak_memory_bytes: Optional[int],
    device_peak_memory_bytes: Optional[int],
    others_share: Optional[float],
) -> MeasuredFigures:
    """``measured`` of a report.

    Args:
        executions: at least one.
        seed: of the bootstrap.
        step_samples: of a weight update, or of one micro-batch on each replica in inference.
        flop_per_image: of the mode; None where nothing is computed.
        peak: of ``MatmulPeak.measure``.
        others_share: of the processors, that other processes took meanwhile.
    """
    samples, seconds = [e.samples for e in executions], [e.wall_s for e in executions]
    speed = statistics.throughput(samples, seconds, seed)
    flop_per_s = speed.value * flop_per_image if flop_per_image is not None else None
    return MeasuredFigures(
        images_per_s=speed,
        step_s=step_samples / speed.value,
        step_samples=step_samples,
        total_samples=sum(samples),
        total_s=sum(seconds),
        num_executions=len(executions),
        execution=statistics.spread(seconds),
        percentiles=statistics.percentiles(seconds),
        flop_per_image=flop_per_image,
        flop_per_s=flop_per_s,
        matmul_peak=peak,
        share_of_matmul_peak=flop_per_s / peak.flop_per_s if peak and flop_per_s else None,
        peak_memory_bytes=peak_memory_bytes,
        device_peak_memory_bytes=device_peak_memory_bytes,
        others_share=others_share,
    )


def comparison_figures(
    own: Measurement, other: Measurement, rival: Tuple[str, str], seed: int, *, by_cpu: bool
) -> Comparison:
    """``comparison`` of a report: the session's speed over the rival's, round by round.

    Args:
        own, other: of the session and the rival, with as many executions.
        rival: name and description of the other.
        seed: of the bootstrap.
        by_cpu: both computed on the processors, so that processor times can be compared too.
    """
    both = own.executions, other.executions
    samples = [e.samples for e in both[0]], [e.samples for e in both[1]]
    seconds = [e.wall_s for e in both[0]], [e.wall_s for e in both[1]]
    on_cpu = [e.cpu_s for e in both[0]], [e.cpu_s for e in both[1]]
    return Comparison(
        rival=rival[0],
        description=rival[1],
        executions=other.executions,
        steady=other.steady,
        images_per_s=statistics.throughput(samples[1], seconds[1], seed),
        ratio=statistics.paired_ratio(samples, seconds, seed),
        ratio_by_processor_time=statistics.paired_ratio(samples, on_cpu, seed) if by_cpu else None,
    )


def _without_nodes(text: str) -> str:
    """The line of a TensorFlow message that says what could not be allocated, without names of graph nodes."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    line = next((line for line in lines if re.search("OOM|allocat", line)), lines[0])
    line = re.sub(r"\{\{[^{}]*\}\}|\[\[.*?\]\]|\[Op:[^\]]*\]", "", line)
    line = re.sub(r" on /job:\S+ by allocator \S+", "", line)
    return " ".join(line.split())


@contextlib.contextmanager
def void_on_error(result: BenchmarkReport, exit_codes: List[int]) -> Iterator[None]:
    """Turns whatever goes wrong from here on into a void report.

    Args:
        result: the report.
        exit_codes: gets what the command ends with because of it.
    """
    import tensorflow as tf

    try:
        yield
    except UserError as error:
        result.void = error.message
        exit_codes.append(error.exit_code)
        # Sessions speak of the checkpoints of a training run, which a benchmark does not write.
        result.hint = error.hint.split("; checkpoints")[0] if error.hint else None
    except (tf.errors.ResourceExhaustedError, MemoryError) as error:
        what = _without_nodes(str(getattr(error, "message", error)))
        result.void = f"out of memory: {what}"
        exit_codes.append(EXIT_INFEASIBLE)
        result.hint = "use a smaller --micro-batch-size or --image-size, or --fused-micro-batches 1"
    except Exception as error:
        # What a library made of an interruption says nothing about the benchmark.
        interrupts.check()
        text = str(error.message if isinstance(error, tf.errors.OpError) else error)
        lines = [line for line in text.splitlines() if line.strip()] or ["no message"]
        result.void = f"{type(error).__name__}: {lines[0].strip()}"
        exit_codes.append(EXIT_BUG)
        result.traceback = traceback.format_exc()
    if result.void is not None:
        result.measured = result.comparison = result.regression = None
        result.data_pipeline = result.end_to_end = None


def check_folder(resolved: Resolved) -> Path:
    """The folder the report will go to, checked before anything is measured.

    Raises:
        ConfigurationError: it is taken, or ``--overwrite`` would destroy something else.
        DataError: it is a file.
    """
    config = resolved.config
    if config.run_dir is None:
        return default_run_dir(resolved.record.name, "benchmark")
    path = expand(config.run_dir)
    check_makeable(path)
    found = [p.name for p in entries(path)]
    foreign = [name for name in found if name not in _FILES]
    if foreign:
        raise ConfigurationError(
            f"{path} is no folder of a benchmark: it holds {foreign[0]}", "choose another --run-dir"
        )
    if found and not config.overwrite:
        raise ConfigurationError(
            f"--run-dir {path} already exists", "--overwrite replaces it; or use another --run-dir"
        )
    return path


def write_folder(folder: Path, config: RunConfig, report: BenchmarkReport) -> Path:
    """Writes the three files; returns the path of ``report.json``.

    Raises:
        DataError: the file system refuses.
    """
    claim = claim_default(config.model_name, "benchmark") if config.run_dir is None else None
    if claim is not None:
        folder = claim.path  # what check_folder named may be another benchmark's by now
    make_folder(folder)
    write_text(folder / CONFIG, config.to_yaml())
    write_text(folder / PROGRAM, json.dumps(report.program, indent=2) + "\n")
    write_text(folder / REPORT, report.to_json())
    if claim is not None:
        claim.unlock()
    return folder / REPORT
