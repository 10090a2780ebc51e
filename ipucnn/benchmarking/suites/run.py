"""Runs a suite's rows one by one into a folder that always holds what is finished, and goes on from there."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

from ipucnn.aliases import PlainValue
from ipucnn.benchmarking.measure import Report
from ipucnn.benchmarking.records import MachineFacts, Row, SuiteResult
from ipucnn.benchmarking.suites.file import FIT
from ipucnn.benchmarking.suites.plan import PlannedRow, SuitePlan
from ipucnn.benchmarking.suites.result import (
    DONE,
    finished_row,
    pending_row,
    read_suite,
    to_csv,
    totals,
)
from ipucnn.diagnosis.programs import signal_name
from ipucnn.documents import read_record
from ipucnn.errors import ConfigurationError, DataError, UserError
from ipucnn.filesystem import (
    check_makeable,
    entries,
    expand,
    is_file,
    is_link,
    make_folder,
    reason_of,
    remove_file,
    remove_temporaries,
    shown,
    write_hint,
    write_text,
)
from ipucnn.machine import cpu_name, host_memory_bytes, num_cores
from ipucnn.runs.start import ELSEWHERE, claim_default, default_run_dir, latest_run_dir
from ipucnn.text import shown_value

RESULT, TABLE, PLAN, REPORTS, FIGURE = "suite.json", "suite.csv", "plan.json", "reports", "speedup"
_FILES = (RESULT, TABLE, PLAN, REPORTS, f"{FIGURE}.png", f"{FIGURE}.svg")
# What the names of default folders end with; those of single benchmarks end in -benchmark.
_SUFFIX = "suite"
RunRow = Callable[[PlannedRow, Path, Report], Dict[str, Any]]
OnRow = Callable[[int, int, Row], None]


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


def this_machine() -> MachineFacts:
    """The facts about this machine that figures depend on and that are known without TensorFlow."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        tensorflow: Optional[str] = version("tensorflow")
    except PackageNotFoundError:
        tensorflow = None
    python = ".".join(map(str, sys.version_info[:3]))
    return MachineFacts(cpu_name(), num_cores(), host_memory_bytes(), python, tensorflow)


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
        options: Dict[str, PlainValue],
        takes_default: bool = False,
    ) -> None:
        self.plan, self.folder = plan, folder
        self._takes_default = takes_default
        suite = plan.suite
        rows = [pending_row(row) for row in plan.rows]
        self.result = SuiteResult(
            suite=suite.name,
            title=suite.title,
            about=suite.about,
            started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            seed=plan.seed,
            machine=this_machine(),
            options=options,
            epoch_images=suite.epoch_images,
            rows=rows,
            totals=totals(rows, suite.epoch_images),
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
        here, there = self.result.machine.to_dict(), former.machine.to_dict()
        other = [key for key, value in here.items() if there[key] != value]
        if other and any(row.status == DONE for row in former.rows):
            key = other[0]
            raise ConfigurationError(
                f"{self.folder} was measured with {key} {shown_value(there[key])}, this is {here[key]}",
                "use another --run-dir, and compare the two with --versus",
            )
        by_id = {row.id: row for row in former.rows if row.status == DONE}
        self.num_kept = len(by_id)
        self.result.started = former.started
        self.result.rows = [by_id.get(row.id, row) for row in self.result.rows]

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
            if self.result.rows[index].status == DONE:
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
        self.result.totals = totals(self.result.rows, self.result.epoch_images)
        write_text(self.folder / RESULT, self.result.to_json())
        write_text(self.folder / TABLE, to_csv(self.result.rows))


def _named(row: str, update: Report) -> Report:
    """Progress of a row, under its name."""
    return lambda phase, done, of, figures: update(f"{row}: {phase}", done, of, figures)


def _plain(value: object) -> Any:
    return json.loads(json.dumps(value, sort_keys=True, default=str))


def _difference(saved: PlainValue, asked: PlainValue) -> Optional[str]:
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


def _rows_of(plan: PlainValue) -> Dict[str, Any]:
    """The rows of a plan by their names; those of a file may be damaged, and are then none."""
    rows = plan.get("rows") if isinstance(plan, dict) else None
    named = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return {row["id"]: row for row in named if isinstance(row.get("id"), str)}


def _leaves(row: PlainValue, path: str = "") -> List[Tuple[str, Any]]:
    if not isinstance(row, dict):
        return [(path, row)]
    return [leaf for key, value in row.items() for leaf in _leaves(value, key)]


# A process per row: what crashes, or is killed for its memory, ends its own row and nothing else.
#
# A fresh process costs the seconds that importing TensorFlow takes, and buys that each figure, peak memory too, is the
# one that ``ipucnn benchmark`` alone would give: whatever ran before it, and whether the suite was resumed.
#
# The row travels to the process pickled on stdin, progress and result come back as lines of JSON on stdout, and what
# libraries print goes to a log file.  The process ends when its stdin does, so it never outlives the suite.


LOG_END_BYTES = 4096

# Without the current folder, which ``-c`` puts first on the path: what lies there is not to be imported.
_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from ipucnn.benchmarking.suites.run import main; main()"


class RowProcess:
    """Runs rows, each in a process of its own.

    Args:
        verbose: let TensorFlow speak.
        command: what to run, for tests.
    """

    def __init__(self, verbose: bool = False, command: Optional[List[str]] = None) -> None:
        self._verbose = verbose
        self._command = command or [sys.executable, "-c", _PROGRAM, *_import_path()]

    def __call__(self, row: PlannedRow, log: Path, update: Report) -> Dict[str, Any]:
        """Runs a row.

        Args:
            row: to run.
            log: file for what the process prints; not kept of a row that succeeded.
            update: told of progress.

        Returns:
            ``report``: a dictionary as of ``BenchmarkReport.to_dict``, and ``exit_code``; or ``error``, ``hint`` and
            ``exit_code``.

        Raises:
            DataError: the process cannot be started, or its log file not be written.
        """
        try:
            with open(log, "wb") as errors:
                # A session of its own: Ctrl-C is the suite's to handle.
                process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=None if self._verbose else errors,
                    start_new_session=True,
                )
        except OSError as error:
            raise DataError(
                f"the process of row {row.id}, which prints to {shown(log)}, cannot be started: {reason_of(error)}",
                write_hint(error, "go on later with --resume"),
            ) from None
        answer: Optional[Dict[str, Any]] = None
        assert process.stdin is not None and process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                pickle.dump((row, self._verbose), process.stdin)
                process.stdin.flush()
            for line in process.stdout:
                try:
                    message = json.loads(line.decode("utf-8"))
                except ValueError:
                    continue  # the process was killed in the middle of a line
                if "progress" in message:
                    update(*message["progress"])
                else:
                    answer = message
            process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        if answer is None:
            answer = _died(process.returncode, log)
        succeeded = "report" in answer and answer["report"]["void"] is None
        if succeeded or log.stat().st_size == 0:
            log.unlink()
        return answer


def _import_path() -> List[str]:
    """Where this process imports from, this package included; the current folder is left out."""
    folders = [folder for folder in sys.path if folder]
    package = str(Path(__file__).resolve().parents[3])
    return folders if package in folders else [package, *folders]


def _died(code: int, log: Path) -> Dict[str, Any]:
    if code < 0:
        name = signal_name(-code)
        why = " (the system may have been out of memory)" if -code == signal.SIGKILL else ""
        message = f"its process was ended by {name}{why}"
    else:
        message = f"its process ended with exit code {code} and without a result"
    with open(log, "rb") as file:
        # The end is enough: what it printed may be very much.
        file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_END_BYTES))
        printed = file.read(LOG_END_BYTES).decode("utf-8", "replace").strip().splitlines()
    if printed:
        message += f"; it last said: {printed[-1][:200]}"
    return {"error": message, "hint": f"what it printed is in {log}" if printed else None, "exit_code": 1}


def run_here(row: PlannedRow, update: Report, verbose: bool = False) -> Dict[str, Any]:
    """Runs a row in this process; see :class:`RowProcess` for what is returned."""
    try:
        if row.mode == FIT:
            from ipucnn.benchmarking.fit import Fit

            fit = Fit(row.resolved, row.engine, verbose, row.settings.system)
            return {"report": fit.run(update), "exit_code": 0}
        from ipucnn.benchmarking.benchmark import Benchmark

        work = Benchmark(row.resolved, row.settings, verbose)
        return {"report": work.run(update).to_dict(), "exit_code": work.exit_code}
    except UserError as error:
        return {"error": error.message, "hint": error.hint, "exit_code": error.exit_code}


def main() -> None:
    """The process of a row."""
    # Results have the pipe for themselves; what anything prints goes to the log.
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    row, verbose = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_stdin, daemon=True).start()

    def send(message: Dict[str, PlainValue]) -> None:
        results.write(json.dumps(message, allow_nan=False) + "\n")
        results.flush()

    code = 1
    try:
        send(run_here(row, lambda *progress: send({"progress": progress}), verbose))
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        # Without waiting for TensorFlow's threads and destructors, and for the one that reads stdin.
        os._exit(code)


def _end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(1)
