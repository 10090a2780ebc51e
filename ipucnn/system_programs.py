"""Runs the machine's programs (gc-info, vipu, nvidia-smi, ...) with a time limit and returns their output."""

import contextlib
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from typing import Mapping, Optional, Sequence

TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Ran:
    """The result of running a program.

    Attributes:
        is_on_path: whether it is on PATH.
        output, errors: stdout and stderr; empty if it is not on PATH or did not end.
        problem: None if it ended with 0, else what happened, in a few words.
        signal_name: e.g. "SIGILL" if a signal ended it.
        exit_code: the exit code; 0 if a signal ended it or it did not run.
    """

    is_on_path: bool
    output: str = ""
    errors: str = ""
    problem: Optional[str] = None
    signal_name: Optional[str] = None
    exit_code: int = 0


def find_program(program: str) -> Optional[str]:
    """Returns the absolute path of a program, from the absolute folders of PATH; None if it is in none of them.

    A relative folder (``.``, or nothing between two colons) is the user's current folder, where anybody may have put a
    program of that name.
    """
    folders = [
        folder for folder in os.environ.get("PATH", os.defpath).split(os.pathsep) if os.path.isabs(folder)
    ]
    return shutil.which(program, path=os.pathsep.join(folders)) if folders else None


def run_program(
    command: Sequence[str],
    timeout_s: Optional[float] = TIMEOUT_S,
    variables: Optional[Mapping[str, str]] = None,
    shows_errors: bool = False,
) -> Ran:
    """Runs a program and everything it starts, for at most ``timeout_s``; only an interruption is raised.

    Args:
        command: the program and its arguments.
        timeout_s: the limit in seconds; None for no limit.
        variables: its environment variables; None: this process's.
        shows_errors: whether its stderr is this process's, and not stored.
    """
    program = command[0] if os.path.isabs(command[0]) else find_program(command[0])
    if program is None:
        return Ran(False, problem="not found")
    try:
        process = subprocess.Popen(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if shows_errors else subprocess.PIPE,
            env=None if variables is None else dict(variables),
            start_new_session=True,
        )
    except OSError as error:
        return Ran(True, problem=f"cannot be run: {error.strerror or error}")
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        return Ran(True, problem=f"did not answer within {timeout_s:g} s")
    except BaseException:
        _kill(process)
        raise
    texts = output.decode("utf-8", "replace"), (errors or b"").decode("utf-8", "replace")
    if process.returncode < 0:
        name = signal_name(-process.returncode)
        return Ran(True, *texts, problem=f"died of {name}", signal_name=name)
    problem = f"ended with exit code {process.returncode}" if process.returncode else None
    return Ran(True, *texts, problem=problem, exit_code=process.returncode)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Ends the process with its children, which would keep the pipes open."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:
        process.kill()
    # Processes that left its session may hold the pipes open; the call does not wait for them.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=1.0)


def signal_name(number: int) -> str:
    """Returns the name of a signal, SIGTERM for 15; real-time signals have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
