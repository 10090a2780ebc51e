"""The result of a benchmark: its figures as a value, void if anything went wrong, and the folder it is written to.

The schema of ``report.json`` is ``schema.json`` beside this file.
"""

import contextlib
import json
import re
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

from ipucnn import interrupts
from ipucnn.benchmarking import statistics
from ipucnn.benchmarking.baseline import check_whole
from ipucnn.benchmarking.measure import Execution, Measurement
from ipucnn.config.options import RunConfig
from ipucnn.config.resolve import Resolved
from ipucnn.documents import read_record
from ipucnn.errors import EXIT_BUG, EXIT_INFEASIBLE, ConfigurationError, DataError, UserError
from ipucnn.filesystem import check_makeable, entries, expand, is_folder, make_folder, write_text
from ipucnn.runs.folder import CONFIG, PROGRAM, REPORT
from ipucnn.runs.start import ELSEWHERE, claim_default, default_run_dir
from ipucnn.text import shown_value

SCHEMA_VERSION = 3
KIND = "ipucnn benchmark"
SCHEMA = Path(__file__).with_name("schema.json")
_FILES = (CONFIG, PROGRAM, REPORT)


@dataclass
class BenchmarkReport:
    """One benchmark; the attributes are the keys of ``report.json``, described in ``schema.json``.

    Attributes:
        void: why the result does not count, None if it does; a void report has nothing in ``measured``.
        hint: what to do about ``void``.
        exit_code: what the command ends with because of ``void``; not in the file.
    """

    model: str
    preset: Optional[str]
    mode: str
    scope: str
    started: str
    seed: int
    input_shape: List[int]
    data: Dict[str, Any]
    settings: Dict[str, Any]
    options: Dict[str, Any]
    program: Dict[str, Any]
    device: Dict[str, Any] = field(default_factory=dict)
    environment: Dict[str, Any] = field(default_factory=dict)
    compilation: Optional[Dict[str, Any]] = None
    execution: Optional[Dict[str, Any]] = None
    phases: Dict[str, Optional[float]] = field(default_factory=dict)
    warmup: Optional[Dict[str, Any]] = None
    executions: List[Dict[str, Any]] = field(default_factory=list)
    measured: Optional[Dict[str, Any]] = None
    comparison: Optional[Dict[str, Any]] = None
    predicted: List[Dict[str, Any]] = field(default_factory=list)
    data_pipeline: Optional[Dict[str, Any]] = None
    end_to_end: Optional[Dict[str, Any]] = None
    regression: Optional[Dict[str, Any]] = None
    notes: List[str] = field(default_factory=list)
    void: Optional[str] = None
    hint: Optional[str] = None
    traceback: Optional[str] = None
    interrupted: bool = False
    exit_code: int = 0

    @property
    def images_per_s(self) -> Optional[float]:
        """Measured throughput; None if the result is void or nothing was measured."""
        return float(self.measured["images_per_s"]["value"]) if self.measured is not None else None

    def to_dict(self) -> Dict[str, Any]:
        """Plain values, ready for JSON."""
        plain = asdict(self)
        del plain["exit_code"]
        return {"kind": KIND, "schema_version": SCHEMA_VERSION, **plain}

    def to_json(self) -> str:
        """The text of ``report.json``; never NaN or Infinity."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"


def read_report(path: Path) -> Dict[str, Any]:
    """A ``report.json`` as far as another benchmark needs it: whole, of this version, with executions.

    Raises:
        DataError: the file is not there, damaged, of another kind or version, or void.
    """
    path = path / REPORT if is_folder(path, "--baseline") else path
    data = read_record(path, "--baseline", "give the report.json of a benchmark")
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise DataError(
            f"{path} is no report of a benchmark", "give the report.json that `ipucnn benchmark` wrote"
        )
    if data.get("schema_version") != SCHEMA_VERSION:
        raise DataError(
            f"{path} has schema_version {shown_value(data.get('schema_version'))}, this ipucnn reads {SCHEMA_VERSION}",
            "make it again",
        )
    if data.get("void") or data.get("measured") is None:
        raise DataError(f"{path}: {shown_value(data.get('void') or 'nothing was measured')}", "make it again")
    check_whole(data, str(path))
    return data


def measured_figures(
    executions: List[Execution],
    *,
    seed: int,
    step_samples: int,
    flop_per_image: Optional[float],
    peak: Optional[Dict[str, Any]],
    peak_memory_bytes: Optional[int],
    device_peak_memory_bytes: Optional[int],
    others_share: Optional[float],
) -> Dict[str, Any]:
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
    return {
        "images_per_s": speed.to_dict(),
        "step_s": step_samples / speed.value,
        "step_samples": step_samples,
        "total_samples": sum(samples),
        "total_s": sum(seconds),
        "num_executions": len(executions),
        "execution": statistics.spread(seconds),
        "percentiles": statistics.percentiles(seconds),
        "flop_per_image": flop_per_image,
        "flop_per_s": flop_per_s,
        "matmul_peak": peak,
        "share_of_matmul_peak": flop_per_s / peak["flop_per_s"] if peak and flop_per_s else None,
        "peak_memory_bytes": peak_memory_bytes,
        "device_peak_memory_bytes": device_peak_memory_bytes,
        "others_share": others_share,
    }


def execution_rows(executions: List[Execution]) -> List[Dict[str, Any]]:
    """``executions`` of a report."""
    return [asdict(execution) for execution in executions]


def comparison_figures(
    own: Measurement, other: Measurement, rival: Tuple[str, str], seed: int, *, by_cpu: bool
) -> Dict[str, Any]:
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
    return {
        "with": rival[0],
        "description": rival[1],
        "executions": execution_rows(other.executions),
        "steady": other.steady,
        "images_per_s": statistics.throughput(samples[1], seconds[1], seed).to_dict(),
        "ratio": statistics.paired_ratio(samples, seconds, seed).to_dict(),
        "ratio_by_processor_time": statistics.paired_ratio(samples, on_cpu, seed).to_dict()
        if by_cpu
        else None,
    }


def _without_nodes(text: str) -> str:
    """The line of a TensorFlow message that says what could not be allocated, without names of graph nodes."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    line = next((line for line in lines if re.search("OOM|allocat", line)), lines[0])
    line = re.sub(r"\{\{[^{}]*\}\}|\[\[.*?\]\]|\[Op:[^\]]*\]", "", line)
    line = re.sub(r" on /job:\S+ by allocator \S+", "", line)
    return " ".join(line.split())


@contextlib.contextmanager
def void_on_error(result: BenchmarkReport) -> Iterator[None]:
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
        # What a library made of an interruption says nothing about the benchmark.
        interrupts.check()
        text = str(error.message if isinstance(error, tf.errors.OpError) else error)
        lines = [line for line in text.splitlines() if line.strip()] or ["no message"]
        result.void, result.exit_code = f"{type(error).__name__}: {lines[0].strip()}", EXIT_BUG
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
    path = expand(config.run_dir, "--run-dir")
    check_makeable(path, "--run-dir", ELSEWHERE)
    found = [p.name for p in entries(path, "--run-dir")]
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
    make_folder(folder, "", ELSEWHERE)
    write_text(folder / CONFIG, config.to_yaml())
    write_text(folder / PROGRAM, json.dumps(report.program, indent=2) + "\n")
    write_text(folder / REPORT, report.to_json())
    if claim is not None:
        claim.unlock()
    return folder / REPORT
