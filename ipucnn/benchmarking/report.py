"""Reads baselines from report files, and writes a benchmark's report folder."""

import json
from pathlib import Path
from typing import List, Sequence

from ipucnn.benchmarking.records import BenchmarkReport, from_plain
from ipucnn.config.options import RunConfig
from ipucnn.config.resolve import Resolved
from ipucnn.documents import read_record
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.filesystem import check_makeable, entries, expand, is_folder, make_folder, write_text
from ipucnn.runs.folder import CONFIG, PROGRAM, REPORT, claim_default, default_run_dir
from ipucnn.text import shown_value


def read_report(path: Path) -> BenchmarkReport:
    """Reads a baseline: a ``report.json`` of a network's speed, with executions beside the reference workload.

    Raises:
        ConfigurationError: the report does not contain a network's speed.
        DataError: the file is absent, damaged, of another kind or version, or void.
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
                f"--baseline {path} is damaged: execution {index} lacks its time or that of the reference workload",
                "make it again",
            )
    return report


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
