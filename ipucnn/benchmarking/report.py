"""The result of a benchmark as a value and as ``report.json``, whose schema is ``schema.json`` beside this file."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional

from ipucnn.benchmarking import statistics
from ipucnn.benchmarking.baseline import check_whole
from ipucnn.benchmarking.measure import Execution
from ipucnn.documents import read_record
from ipucnn.errors import DataError
from ipucnn.filesystem import is_folder
from ipucnn.text import shown_value

SCHEMA_VERSION = 3
KIND = "ipucnn benchmark"
SCHEMA = Path(__file__).with_name("schema.json")


@dataclass
class BenchmarkReport:
    """One benchmark; the attributes are the keys of ``report.json``, described in ``schema.json``.

    Attributes:
        void: why the result does not count, None if it does; nothing is then in ``measured``.
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
    path = path / "report.json" if is_folder(path, "--baseline") else path
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
