"""``ipucnn launch``: start several workers of one run on this machine."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Dict, List, Optional

import typer

import ipucnn
from ipucnn import command_table, interrupts
from ipucnn.config import spec
from ipucnn.errors import EXIT_OK, EXIT_SIGTERM, ConfigurationError, WorkersError
from ipucnn.sessions.host.workers import (
    BEGIN_AGAIN,
    GRACE_S,
    LAUNCH_VARIABLE,
    SECRET_VARIABLE,
    SILENCE_S,
    TF_CONFIG,
)
from ipucnn.text import shown_value

COMMANDS = ("train", "evaluate", "infer")
COMMAND = typer.Argument(
    None,
    metavar="COMMAND...",
    help="Command that every worker runs: `train`, `evaluate` or `infer`, with its options. Write -- before it.",
)
WORKERS = typer.Option(
    None,
    "--workers",
    "-n",
    parser=spec.WORKERS.flag("--workers"),
    metavar="N",
    help="Workers to start.",
    show_default="2",
)
# Seconds after a worker failed: until the others get SIGTERM, and until they are killed.  Usually they end by
# themselves before that, but a stopped process does not.
_UNTIL_SIGTERM_S, _UNTIL_SIGKILL_S = GRACE_S + 2.0, GRACE_S + 10.0
# Starts ``ipucnn`` from the package of this process, never from the current folder.  If this process dies in any way,
# Linux sends SIGTERM (15) to the worker (prctl(2), PR_SET_PDEATHSIG = 1).
_PROGRAM = (
    "import sys; del sys.path[0]; import ctypes, os; sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 15); "
    "os.getppid() == int(sys.argv.pop(1)) or sys.exit(143); "
    "place, said = sys.argv[1:3]; del sys.argv[1:3]; place in sys.path or sys.path.append(place); "
    "sys.argv[0] = 'ipucnn'; from ipucnn import interrupts; interrupts.listen(); from ipucnn import cli; "
    "cli.error_copy = os.fdopen(int(said), 'w', encoding='utf-8') if said else None; cli.main()"
)


def launch(command: Optional[List[str]] = COMMAND, workers: Optional[int] = WORKERS) -> None:
    """Start several workers of one training run, evaluation or inference on this machine.

    They share the work of each weight update. The result has the same bytes as one worker with the same number of
    threads, if both runs begin with the same --max-workers. The GPUs of this machine are divided among the workers. To
    start workers on several machines, use srun or TF_CONFIG; docs/cluster.md has examples. The output of the first
    worker appears unchanged, that of the others behind their number. If one worker fails, all end.
    """
    count = 2 if workers is None else workers
    if not command or command[0] not in COMMANDS:
        given = "nothing" if not command else f"'{shown_value(command[0])}'"
        raise ConfigurationError(
            f"`ipucnn launch` starts workers of `ipucnn train`, `evaluate` or `infer`, and it was given {given}",
            f"type it without launch: ipucnn {command[0]} ..."
            if command and command[0] in command_table.COMMANDS
            else f"type: ipucnn launch -n {count} -- train cifar_resnet8 --dataset digits --seed 1 --max-workers "
            f"{count}",
        )
    code = _Processes(command, count, _share_gpus(command, count)).run()
    if code:
        raise typer.Exit(code)


def _share_gpus(command: List[str], count: int) -> List[Dict[str, str]]:
    """Divides the GPUs among the workers; returns the environment variables of each worker.

    The variables are empty if there are no GPUs, or if the command has ``--device cpu``.

    Raises:
        ConfigurationError: the GPUs cannot be divided evenly.
    """
    words = [word for text in command for word in text.split("=", 1)]
    if any(pair == ("--device", "cpu") for pair in zip(words, words[1:])):
        return [{}] * count
    # Imported here, because it is slow and --help does not need it.
    from ipucnn.diagnosis.look import find_gpus

    gpus = find_gpus()[0]
    if len(gpus) % count:
        fitting = [str(n) for n in range(1, len(gpus) + 1) if len(gpus) % n == 0]
        raise ConfigurationError(
            f"{count} workers cannot share {len(gpus)} GPU{'s' if len(gpus) > 1 else ''} evenly",
            f"use -n {' or '.join(fitting)}, set CUDA_VISIBLE_DEVICES, or add --device cpu to the command",
        )
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    # In the order of CUDA_VISIBLE_DEVICES.  Its numbers are CUDA's, which may differ from those of nvidia-smi.
    named = [gpu.uuid for gpu in gpus] if chosen is None else chosen.split(",")
    share = len(gpus) // count
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(named[rank * share : (rank + 1) * share])} if gpus else {}
        for rank in range(count)
    ]


def _free_ports(count: int) -> List[int]:
    """Returns ports on which no process listens now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()


class _Processes:
    """The workers' processes: starts them, forwards their output and signals, and ends them."""

    def __init__(self, command: List[str], count: int, variables: List[Dict[str, str]]) -> None:
        self._command = command
        # The environment variables of each process, added to those of this process.
        self._variables = variables
        self._addresses = [f"127.0.0.1:{port}" for port in _free_ports(count)]
        self._secret = secrets.token_hex(16)
        self._processes: List[subprocess.Popen[bytes]] = []
        self._readers: List[threading.Thread] = []
        # The `error:` and `hint:` lines of each worker.
        self._errors: Dict[int, List[str]] = {}
        self._ends: Dict[int, int] = {}
        self._is_stopped = False
        self._lock = threading.Lock()

    def run(self) -> int:
        """Runs the workers to their end; returns the exit code of the first that failed, else 0."""
        try:
            for rank in range(len(self._addresses)):
                self._start(rank)
            return self._wait()
        finally:
            for process in self._processes:
                with suppress(OSError):
                    process.kill()
            for reader in self._readers:
                reader.join(GRACE_S)
            for rank, lines in sorted(self._errors.items()):
                # Not printed: the same error as the first worker's, which is printed already, and errors of workers
                # that this process ended, or that succeeded.
                was_stopped = self._is_stopped and self._ends.get(rank) in (EXIT_SIGTERM, -signal.SIGTERM)
                ended_well = self._ends.get(rank) == EXIT_OK
                if lines != self._errors.get(0) and rank and not (was_stopped or ended_well):
                    sys.stderr.writelines(f"[worker {rank}] {line}" for line in lines)

    def _start(self, rank: int) -> None:
        tf_config = {"cluster": {"worker": self._addresses}, "task": {"type": "worker", "index": rank}}
        package_folder = str(Path(ipucnn.__file__).parents[1])
        # The first worker writes to the terminal itself, and sends only a copy of its error through a pipe.
        error_pipe = os.pipe() if rank == 0 else ()
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _PROGRAM,
                str(os.getpid()),
                package_folder,
                *map(str, error_pipe[1:] or [""]),
                *self._command,
            ],
            env={
                **os.environ,
                **self._variables[rank],
                TF_CONFIG: json.dumps(tf_config),
                SECRET_VARIABLE: self._secret,
                LAUNCH_VARIABLE: str(len(self._addresses)),
            },
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else subprocess.PIPE,
            stderr=None if rank == 0 else subprocess.PIPE,
            pass_fds=error_pipe[1:],
            # In a session of its own, so that only this process gets the terminal's signals; it forwards each once.
            start_new_session=True,
        )
        self._processes.append(process)
        if error_pipe:
            os.close(error_pipe[1])
        streams = (os.fdopen(error_pipe[0], "rb"),) if error_pipe else (process.stdout, process.stderr)
        for stream in streams:
            if stream is not None:
                reader = threading.Thread(target=self._label, args=(rank, stream), daemon=True)
                reader.start()
                self._readers.append(reader)

    def _label(self, rank: int, stream: IO[bytes]) -> None:
        for data in stream:
            line = data.decode(errors="replace")
            with self._lock:
                if line.startswith(("error: ", "hint: ")):
                    self._errors.setdefault(rank, []).append(line)
                    continue
                sys.stderr.write(f"[worker {rank}] {line}")
                sys.stderr.flush()

    def _wait(self) -> int:
        first_failed: Optional[int] = None
        exit_codes = self._ends
        failed_at: Optional[float] = None
        is_forwarded = False
        while len(exit_codes) < len(self._processes):
            try:
                for rank, process in enumerate(self._processes):
                    code = process.poll()
                    if code is not None and rank not in exit_codes:
                        exit_codes[rank] = code
                        if code and first_failed is None:
                            first_failed, failed_at = rank, time.monotonic()
                if interrupts.noted() is not None and not is_forwarded:
                    is_forwarded = True
                    self._send(signal.Signals((interrupts.noted() or 0) - 128))
                is_late = failed_at is not None and time.monotonic() > failed_at + _UNTIL_SIGTERM_S
                if is_late and not (self._is_stopped or is_forwarded):
                    # The failed worker never connected, so the others would wait for it.
                    self._is_stopped = True
                    self._send(signal.SIGTERM)
                patience = SILENCE_S + _UNTIL_SIGKILL_S if is_forwarded else _UNTIL_SIGKILL_S
                if failed_at is not None and time.monotonic() > failed_at + patience:
                    self._send(signal.SIGKILL)
                time.sleep(0.05)
            except interrupts.Interruption:
                is_forwarded = False  # a second signal is forwarded, too
        if first_failed is None:
            return 0
        code = exit_codes[first_failed]
        if code < 0 and interrupts.noted() is not None:
            # The forwarded signal reached the worker before it could handle signals, so the system ended it.
            return int(interrupts.noted() or 0)
        if code >= 0:
            return code
        raise WorkersError(
            f"worker {first_failed} was ended by {signal.Signals(-code).name}",
            "type the same command with --resume, with any number of workers that fits"
            if self._command[0] == "train"
            else BEGIN_AGAIN,
        )

    def _send(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                with suppress(OSError):
                    process.send_signal(number)
