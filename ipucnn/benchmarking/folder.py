"""The folder of a benchmark: ``config.yml``, ``program.json``, ``report.json``."""

import json
from pathlib import Path
from typing import Any

from ipucnn.benchmarking.report import BenchmarkReport
from ipucnn.config.resolve import Resolved
from ipucnn.errors import ConfigurationError
from ipucnn.filesystem import check_makeable, entries, expand, make_folder, write_text
from ipucnn.runs.folder import CONFIG, ELSEWHERE, PROGRAM, REPORT, claim_default, default_run_dir

_FILES = (CONFIG, PROGRAM, REPORT)


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


def write_folder(folder: Path, config: Any, report: BenchmarkReport) -> Path:
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
