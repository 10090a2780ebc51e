"""Runs a command in a process of its own, and measures it."""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Ended:
    """A process that ended.

    Attributes:
        processor_s: user and system time of the process and of those that it waited for.
        memory_mib: the peak resident memory.
    """

    code: int
    wall_s: float
    processor_s: float
    memory_mib: float
    stdout: str
    stderr: str


def run(command: Sequence[str], **variables: str) -> Ended:
    """Runs a command that has ``ipucnn`` of this repository and no GPU.

    Args:
        variables: further environment variables.
    """
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "-1", "NO_COLOR": "1", **variables}
    started = time.perf_counter()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with subprocess.Popen(command, env=env, stdout=out, stderr=err) as process:
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
        wall_s = time.perf_counter() - started
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    processor_s = used.ru_utime + used.ru_stime
    return Ended(process.returncode, wall_s, processor_s, used.ru_maxrss / 1024, *texts)


def run_ipucnn(words: Sequence[str], program: Sequence[str] = ("-m", "ipucnn"), **variables: str) -> Ended:
    """Runs ``ipucnn``; ``program`` has the arguments of Python before ``words``."""
    return run([sys.executable, *program, *words], **variables)
