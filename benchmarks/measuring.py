"""What the measuring scripts share: processes, tables whose rows say how they were measured, and journals.

A journal keeps each result as soon as it is there, in .measurements/.  While the package's sources are the same, the
same command goes on where it stopped; ``--again`` measures everything anew.
"""

import argparse
import csv
import hashlib
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

from ipucnn.machine import cpu_name

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
KEPT = ROOT / ".measurements"


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


def start(command: Sequence[str], root: Path = ROOT, **details: Any) -> "subprocess.Popen[Any]":
    """Starts a command that has ``ipucnn`` of this repository, or of ``root``, and no GPU.

    Args:
        details: further arguments of ``Popen``; ``variables`` are further environment variables.
    """
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "-1", "NO_COLOR": "1"}
    return subprocess.Popen(command, env={**env, **details.pop("variables", {})}, **details)


def run(command: Sequence[str], shows_errors: bool = False, **variables: str) -> Ended:
    """Runs a command and measures it.

    Args:
        shows_errors: whether stderr is shown in place of kept.
        variables: further environment variables.
    """
    started = time.perf_counter()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with start(command, stdout=out, stderr=None if shows_errors else err, variables=variables) as process:
            try:
                _, status, used = os.wait4(process.pid, 0)
            except KeyboardInterrupt:  # the terminal has sent it the same signal: it ends well by itself
                process.wait()
                raise
            process.returncode = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
        wall_s = time.perf_counter() - started
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    processor_s = used.ru_utime + used.ru_stime
    return Ended(process.returncode, wall_s, processor_s, used.ru_maxrss / 1024, *texts)


def run_ipucnn(words: Sequence[str], program: Sequence[str] = ("-m", "ipucnn"), **details: Any) -> Ended:
    """Runs ``ipucnn``; ``program`` has the arguments of Python before ``words``."""
    return run([sys.executable, *program, *words], **details)


@dataclass(frozen=True)
class Provenance:
    """How rows were measured.

    Attributes:
        command: what measures them again.
        packages: packages that the figures depend on.
        load: the machine's load when the measurement began.
    """

    command: str
    packages: Sequence[str] = ("tensorflow", "keras")
    load: float = field(default_factory=lambda: os.getloadavg()[0])

    def columns(self) -> Dict[str, str]:
        """Returns the columns: command, revision of the working tree, conditions, and the load at the start."""
        revision = git("rev-parse", "--short=8", "HEAD") or "unknown"
        if git("status", "--porcelain", "--", "ipucnn", "benchmarks"):
            revision += "-changed"
        versions = ", ".join(f"{name} {version(name)}" for name in self.packages)
        processor = ", ".join(filter(None, (cpu_name(), vector_instructions(), f"{os.cpu_count()} cores")))
        conditions = f"{processor}; Python {platform.python_version()}, {versions}"
        return {
            "command": self.command,
            "revision": revision,
            "conditions": conditions,
            "load": f"{self.load:.1f}",
        }


def vector_instructions(facts: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the widest vector instructions of an x86 processor, or "" elsewhere.

    Processors of one name differ in them, and oneDNN's operations depend on them.
    """
    words = set(facts.read_text(encoding="utf-8").split()) if facts.exists() else set()
    named = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX"}
    return next((name for word, name in named.items() if word in words), "")


def git(*words: str) -> str:
    """Returns what git prints; "" if it fails."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def sources_digest() -> str:
    """Returns a digest of the sources and data of the package and of these scripts."""
    digest = hashlib.sha256()
    folders, kinds = (ROOT / "ipucnn", ROOT / "benchmarks"), (".py", ".yml", ".json", ".gz")
    for path in sorted(p for folder in folders for p in folder.rglob("*") if p.suffix in kinds):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def kept_folder(name: str, again: bool = False) -> Path:
    """Returns the folder of a measurement of these sources that survives a stop; with ``again`` an unused one."""
    place = KEPT / f"{name}-{sources_digest()}"
    while again and place.exists():
        place = place.with_name(f"{place.name}-again")
    place.mkdir(parents=True, exist_ok=True)
    return place


class Journal:
    """Keeps each result of a measurement as soon as it is there.

    Args:
        name: the measurement's name.
        again: whether to measure everything anew.
    """

    def __init__(self, name: str, again: bool = False) -> None:
        self.path = kept_folder(name, again) / "journal.jsonl"
        self._values: Dict[str, Any] = {}
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):  # a process that was killed may have left half a line
                entry = json.loads(line)
                self._values[entry["key"]] = entry["value"]
        if text and not text.endswith("\n"):
            self.path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")

    def take(self, key: Sequence[object], measure: Callable[[], Any]) -> Any:
        """Returns the result of a key: the one of an earlier call, else that of ``measure``, as plain values."""
        name = json.dumps([str(part) for part in key])
        if name in self._values:
            print(f"measured before: {', '.join(map(str, key))}", file=sys.stderr, flush=True)
            return self._values[name]
        line = json.dumps({"key": name, "value": measure()}) + "\n"
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._values[name] = json.loads(line)["value"]
        return self._values[name]


def add_again(parser: argparse.ArgumentParser) -> None:
    """Adds ``--again``."""
    parser.add_argument(
        "--again", action="store_true", help="measure anew what the same sources have measured before"
    )


def read_rows(path: Path) -> List[Dict[str, str]]:
    """Returns the rows of a CSV file."""
    with open(path, newline="", encoding="utf-8") as handle:
        return list(csv.DictReader(handle))


def write_rows(path: Path, rows: Sequence[Dict[str, Any]], keys: Sequence[str] = ()) -> None:
    """Writes rows to a CSV file.

    Args:
        keys: columns that identify a row; rows of the file with other values in them stay, each at its place.
    """
    if keys and path.exists():
        merged = {tuple(row[key] for key in keys): row for row in read_rows(path)}
        merged.update({tuple(str(row[key]) for key in keys): dict(row) for row in rows})
        rows = list(merged.values())
    text = io.StringIO()
    ends = ("command", "revision", "conditions", "load")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    columns = [key for key in columns if key not in ends] + [key for key in ends if key in columns]
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text.getvalue(), encoding="utf-8")
    temporary.replace(path)


class Median(NamedTuple):
    """A median, and the bounds of its interval at 95 % confidence; None with fewer than 6 values."""

    value: float
    lower: Optional[float]
    upper: Optional[float]


def median(values: Sequence[float]) -> Median:
    """Returns the median of independent values, with the interval of the sign test.

    The k-th smallest of n values is above the true median with the probability of fewer than k heads in n coins.
    """
    ordered, n = sorted(values), len(values)
    tail, chance, k = 0.0, 0.5**n, 0
    while tail + chance <= 0.025:
        tail += chance
        k += 1
        chance *= (n - k + 1) / k
    bounds = (ordered[k - 1], ordered[n - k]) if k else (None, None)
    return Median(statistics.median(ordered), *bounds)
