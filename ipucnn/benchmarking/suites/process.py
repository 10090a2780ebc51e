"""A process per row: what crashes, or is killed for its memory, ends its own row and nothing else.

A fresh process costs the seconds that importing TensorFlow takes, and buys that each figure, peak memory too, is the
one that ``ipucnn benchmark`` alone would give: whatever ran before it, and whether the suite was resumed.

The row travels to the process pickled on stdin, progress and result come back as lines of JSON on stdout, and what
libraries print goes to a log file.  The process ends when its stdin does, so it never outlives the suite.
"""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, Dict, List, Optional

from ipucnn.benchmarking.measure import Report
from ipucnn.benchmarking.suites.file import FIT
from ipucnn.benchmarking.suites.plan import PlannedRow
from ipucnn.diagnosis.tools import signal_name
from ipucnn.errors import DataError, UserError
from ipucnn.filesystem import reason_of, shown, write_hint

LOG_END_BYTES = 4096

# Without the current folder, which ``-c`` puts first on the path: what lies there is not to be imported.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1:]; from ipucnn.benchmarking.suites.process import main; main()"
)


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

        report = Benchmark(row.resolved, row.settings, verbose).run(update)
        return {"report": report.to_dict(), "exit_code": report.exit_code}
    except UserError as error:
        return {"error": error.message, "hint": error.hint, "exit_code": error.exit_code}


def main() -> None:
    """The process of a row."""
    # Results have the pipe for themselves; what anything prints goes to the log.
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    row, verbose = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_stdin, daemon=True).start()

    def send(message: Dict[str, Any]) -> None:
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
