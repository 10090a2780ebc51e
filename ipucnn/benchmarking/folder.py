"""The folder of a benchmark: ``config.yml``, ``program.json``, ``report.json``."""

import json
from pathlib import Path
from typing import Any

from ipucnn.benchmarking.report import BenchmarkReport
from ipucnn.config.resolve import Resolved
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.filesystem import write_text
from ipucnn.runs.folder import CONFIG, PROGRAM, REPORT, default_run_dir

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
    path = Path(config.run_dir).expanduser()
    if path.exists() and not path.is_dir():
        raise DataError(f"--run-dir {path} is a file", "choose another --run-dir")
    found = sorted(p.name for p in path.iterdir()) if path.is_dir() else []
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
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{folder} cannot be made: {error.strerror or error}", "choose another --run-dir"
        ) from None
    write_text(folder / CONFIG, config.to_yaml())
    write_text(folder / PROGRAM, json.dumps(report.program, indent=2) + "\n")
    write_text(folder / REPORT, report.to_json())
    return folder / REPORT
