"""Runs a suite's rows one by one into a folder that always holds what is finished, and goes on from there."""

import json
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

from ipucnn.benchmarking.measure import Report
from ipucnn.benchmarking.suites.file import FIT
from ipucnn.benchmarking.suites.plan import PlannedRow, SuitePlan
from ipucnn.benchmarking.suites.result import (
    DONE,
    SuiteResult,
    finished_row,
    pending_row,
    read_suite,
)
from ipucnn.documents import read_record
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.filesystem import (
    check_makeable,
    entries,
    expand,
    is_file,
    is_link,
    make_folder,
    remove_file,
    remove_temporaries,
    write_text,
)
from ipucnn.machine import cpu_name, host_memory_bytes, num_cores
from ipucnn.runs.folder import ELSEWHERE, claim_default, default_run_dir, latest_run_dir
from ipucnn.text import shown_value

RESULT, TABLE, PLAN, REPORTS, FIGURE = "suite.json", "suite.csv", "plan.json", "reports", "speedup"
_FILES = (RESULT, TABLE, PLAN, REPORTS, f"{FIGURE}.png", f"{FIGURE}.svg")
# What the names of default folders end with; those of single benchmarks end in -benchmark.
_SUFFIX = "suite"
RunRow = Callable[[PlannedRow, Path, Report], Dict[str, Any]]
OnRow = Callable[[int, int, Dict[str, Any]], None]


def suite_folder(name: str, run_dir: Optional[str], *, resume: bool, overwrite: bool) -> Path:
    """The folder of a suite, checked before anything is measured.

    Raises:
        ConfigurationError: it is taken and neither continued nor replaced, holds something else, or there is
            nothing to go on with.
        DataError: it is a file.
    """
    if run_dir is not None:
        path = expand(run_dir, "--run-dir")
    elif resume:
        latest = latest_run_dir(name, _SUFFIX)
        if latest is None:
            raise ConfigurationError(
                f"--resume: there is no {default_run_dir(name, _SUFFIX)} to go on with",
                "leave --resume out to begin, or name the suite's folder with --run-dir",
            )
        path = latest
    else:
        return default_run_dir(name, _SUFFIX)
    check_makeable(path, "--run-dir", ELSEWHERE)
    found = [p.name for p in entries(path, "--run-dir")]
    foreign = [name for name in found if name not in _FILES and not name.startswith(".")]
    if foreign:
        raise ConfigurationError(
            f"{path} is no folder of a suite: it holds {foreign[0]}", "choose another --run-dir"
        )
    if resume and RESULT not in found:
        raise ConfigurationError(
            f"--resume: {path} holds no suite to go on with", "leave --resume out to begin one there"
        )
    if found and not (resume or overwrite):
        raise ConfigurationError(
            f"--run-dir {path} already exists",
            "--resume goes on with its rows, --overwrite replaces them; or use another --run-dir",
        )
    return path


def saved_seed(folder: Path) -> Optional[int]:
    """The seed of the suite in a folder; None where there is none yet."""
    return read_suite(folder, "--run-dir").seed if is_file(folder / RESULT, "--run-dir") else None


def this_machine() -> Dict[str, Any]:
    """The facts about this machine that figures depend on and that are known without TensorFlow."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        tensorflow: Optional[str] = version("tensorflow")
    except PackageNotFoundError:
        tensorflow = None
    cores = num_cores()
    return {
        "cpu": cpu_name(),
        "num_cores": cores,
        "memory_bytes": host_memory_bytes(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "tensorflow": tensorflow,
    }


class SuiteRun:
    """One suite in one folder.

    Args:
        plan: settled rows.
        folder: from :func:`suite_folder`.
        resume: go on with what is in the folder.
        options: the command line's, for the record.
        takes_default: ``folder`` is a default one, and gives way to the next that is free if it is taken meanwhile.

    Raises:
        ConfigurationError: the folder is of another configuration or machine.
        DataError: what is in it is damaged.
    """

    def __init__(
        self,
        plan: SuitePlan,
        folder: Path,
        *,
        resume: bool,
        options: Dict[str, Any],
        takes_default: bool = False,
    ) -> None:
        self.plan, self.folder = plan, folder
        self._takes_default = takes_default
        suite = plan.suite
        self.result = SuiteResult(
            suite=suite.name,
            title=suite.title,
            about=suite.about,
            started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            seed=plan.seed,
            machine=this_machine(),
            options=options,
            epoch_images=suite.epoch_images,
            rows=[pending_row(row) for row in plan.rows],
        )
        self._identity = _plain(
            {"epoch_images": suite.epoch_images, "rows": [row.identity() for row in plan.rows]}
        )
        self.num_kept = 0
        if resume and is_file(folder / RESULT, "--run-dir"):
            self._take_over(read_suite(folder, "--run-dir"))

    def _take_over(self, former: SuiteResult) -> None:
        saved = read_record(self.folder / PLAN, "--run-dir", "use another --run-dir, or --overwrite")
        difference = _difference(saved, self._identity)
        if difference is not None:
            raise ConfigurationError(
                f"{self.folder} holds another configuration: {difference}",
                "give the options that it was begun with, or use another --run-dir",
            )
        other = [key for key, value in self.result.machine.items() if former.machine.get(key) != value]
        if other and any(row["status"] == DONE for row in former.rows):
            key = other[0]
            then = shown_value(former.machine.get(key))
            raise ConfigurationError(
                f"{self.folder} was measured with {key} {then}, this is {self.result.machine[key]}",
                "use another --run-dir, and compare the two with --versus",
            )
        by_id = {row["id"]: row for row in former.rows if row["status"] == DONE}
        self.num_kept = len(by_id)
        self.result.started = former.started
        self.result.rows = [by_id.get(row["id"], row) for row in self.result.rows]

    def run(self, run_row: RunRow, update: Report, on_row: OnRow) -> SuiteResult:
        """Runs what has no result yet; what fails is written down, and the next row begins.

        Args:
            run_row: runs one row, see ``process.RowProcess``.
            update: told of progress within a row.
            on_row: told of each finished row: how many are done, of how many, and the row.

        Raises:
            KeyboardInterrupt: as soon as it comes; finished rows are in the folder.
        """
        self._create()
        done = self.num_kept
        for index, row in enumerate(self.plan.rows):
            if self.result.rows[index]["status"] == DONE:
                continue
            within = _named(row.id, update)
            within("starting", 0, 0, "")
            began = time.perf_counter()
            log = self.folder / REPORTS / f"{row.id}.log"
            # A folder may come from others: what they put there under this name is not written through.
            remove_file(log)
            answer = run_row(row, log, within)
            finished = finished_row(row, answer, time.perf_counter() - began, self.result.epoch_images)
            self.result.rows[index] = finished
            if "report" in answer and row.mode != FIT:
                text = json.dumps(answer["report"], indent=2, allow_nan=False) + "\n"
                write_text(self.folder / REPORTS / f"{row.id}.json", text)
            self._write()
            done += 1
            on_row(done, len(self.plan.rows), finished)
        self.result.add_totals()
        return self.result

    def _create(self) -> None:
        claim = None
        if self._takes_default:
            claim = claim_default(self.plan.suite.name, _SUFFIX)
            self.folder = claim.path  # what suite_folder named may be another suite's by now
        reports = self.folder / REPORTS
        if is_link(reports):
            raise DataError(
                f"{reports} is a link, and a suite writes to its own folder alone", f"remove it: rm {reports}"
            )
        make_folder(reports, "", ELSEWHERE)
        for folder in (self.folder, self.folder / REPORTS):
            remove_temporaries(folder, lambda name: True)
        if not self.num_kept:
            for old in (*entries(self.folder), *entries(reports)):
                is_report = old.parent == reports and old.suffix in (".json", ".log")
                if is_report or old.stem == FIGURE:
                    remove_file(old)
        write_text(self.folder / PLAN, json.dumps(self._identity, indent=1) + "\n")
        self._write()
        if claim is not None:
            claim.unlock()

    def _write(self) -> None:
        self.result.add_totals()
        write_text(self.folder / RESULT, self.result.to_json())
        write_text(self.folder / TABLE, self.result.to_csv())


def _named(row: str, update: Report) -> Report:
    """Progress of a row, under its name."""
    return lambda phase, done, of, figures: update(f"{row}: {phase}", done, of, figures)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, sort_keys=True, default=str))


def _difference(saved: Any, asked: Any) -> Optional[str]:
    """The first thing in which two plans differ, in words; None if they do not."""
    if saved == asked:
        return None
    old, now = _rows_of(saved), _rows_of(asked)
    gone = [name for name in old if name not in now]
    new = [name for name in now if name not in old]
    if gone or new:
        extra = f"it has the row {shown_value(gone[0])}, which is not asked for" if gone else ""
        return extra or f"it has no row {new[0]}"
    for name, row in now.items():
        for path, value in _leaves(row):
            former = dict(_leaves(old[name])).get(path)
            if former != value:
                had, wanted = ("none" if v is None else shown_value(v) for v in (former, value))
                return f"row {name}: {path} is {had}, asked for is {wanted}"
    return "the order of rows, or the images of an epoch"


def _rows_of(plan: Any) -> Dict[str, Any]:
    """The rows of a plan by their names; those of a file may be damaged, and are then none."""
    rows = plan.get("rows") if isinstance(plan, dict) else None
    named = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return {row["id"]: row for row in named if isinstance(row.get("id"), str)}


def _leaves(row: Any, path: str = "") -> List[Tuple[str, Any]]:
    if not isinstance(row, dict):
        return [(path, row)]
    return [leaf for key, value in row.items() for leaf in _leaves(value, key)]
