"""What a training run tells while it works."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Union

from ipucnn.sessions.session import CompilationReport, ExecutionFinished, Progress
from ipucnn.training.program import Program


@dataclass(frozen=True)
class Started:
    """The model is built and traced; training begins."""

    program: Program
    compilation: CompilationReport
    folder: Path
    dataset: Any


@dataclass(frozen=True)
class CompilingAhead:
    """The model is built; its programs are compiled, and nothing else happens."""

    program: Program


@dataclass(frozen=True)
class Validated:
    """Metrics over the whole evaluation set after ``weight_updates``."""

    weight_updates: int
    metrics: Dict[str, float]
    is_best: bool
    wall_s: float


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint was written."""

    path: Path


@dataclass(frozen=True)
class Notes:
    """Lines to tell the user."""

    lines: List[str]


RunEvent = Union[Started, CompilingAhead, Progress, ExecutionFinished, Validated, CheckpointSaved, Notes]
