"""The run folder: everything about one run, and nothing it did not write."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, Dict, Optional

from ipucnn.config.options import RunConfig
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.runs.files import write_text

CONFIG, PROGRAM, METRICS, REPORT = "config.yml", "program.json", "metrics.jsonl", "report.json"
CHECKPOINTS, TENSORBOARD = "checkpoints", "tensorboard"
LAST, BEST = "last.npz", "best.npz"
_OURS = (CONFIG, PROGRAM, METRICS, REPORT, CHECKPOINTS, TENSORBOARD)


def default_run_dir(model: str, dataset: str, root: Path = Path("runs")) -> Path:
    """``runs/<model>-<dataset>``, with ``-2``, ``-3``, ... appended where that exists."""
    base = f"{model}-{dataset}".replace(":", "-").replace("/", "-")
    number = 1
    while True:
        path = root / (base if number == 1 else f"{base}-{number}")
        if not path.exists():
            return path
        number += 1


def check_new(path: Path, overwrite: bool) -> None:
    """Refuses a run folder that is taken, before anything is computed.

    Raises:
        ConfigurationError: it exists and ``overwrite`` is not set, or holds what no run wrote.
        DataError: its parent is a file.
    """
    for parent in (path, *path.parents):
        if parent.exists():
            if not parent.is_dir():
                raise DataError(f"run folder {path}: {parent} is a file", "choose another --run-dir")
            break
    if not path.exists() or not any(path.iterdir()):
        return
    foreign = sorted(p.name for p in path.iterdir() if p.name not in _OURS)
    if not overwrite:
        raise ConfigurationError(
            f"run folder {path} already exists", f"use another --run-dir, or --overwrite to replace {path}"
        )
    if foreign or not (path / CONFIG).is_file():
        raise ConfigurationError(
            f"{path} is not (only) a run folder{': it holds ' + foreign[0] if foreign else ''}; not overwritten",
            "choose another --run-dir",
        )


def check_new_checkpoints(folder: Path, overwrite: bool) -> None:
    """Refuses a checkpoint folder of its own that holds another run's checkpoints.

    Raises:
        ConfigurationError: it does, and ``overwrite`` is not set.
        DataError: it is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise DataError(f"checkpoint folder {folder} is a file", "choose another --checkpoint-dir")
    if folder.is_dir() and not overwrite and any(is_checkpoint_name(p.name) for p in folder.iterdir()):
        raise ConfigurationError(
            f"checkpoint folder {folder} holds another run's checkpoints",
            "use another --checkpoint-dir, or --overwrite to replace them",
        )


def is_checkpoint_name(name: str) -> bool:
    """Whether a run gives its checkpoints such a name."""
    return name in (LAST, BEST) or (name.startswith("checkpoint-") and name.endswith(".npz"))


class RunFolder:
    """Paths and writers of a run folder.

    Args:
        path: the folder.
        checkpoint_dir: where checkpoints go, if not into the run folder.
    """

    def __init__(self, path: Path, checkpoint_dir: Optional[str] = None) -> None:
        self.path = path
        self.checkpoints = Path(checkpoint_dir).expanduser() if checkpoint_dir else path / CHECKPOINTS

    def create(self, config: RunConfig, program: Any) -> None:
        """Makes the folder (replacing a former run's files, which ``check_new`` allowed) and its first files.

        Raises:
            DataError: it cannot be written.
        """
        made = [p for p in (self.path, self.checkpoints) if not p.exists()]
        try:
            # The new folders first: a former run goes only once it is known that this one can be written.
            self.path.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            write_text(self.path / CONFIG, config.to_yaml())
        except (OSError, DataError) as error:
            for folder in reversed(made):
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()
            reason = error.strerror if isinstance(error, OSError) else error.message
            raise DataError(
                f"run folder {self.path} cannot be written: {reason}", "choose another --run-dir"
            ) from None
        for name in (PROGRAM, METRICS, REPORT):
            if (self.path / name).exists():
                (self.path / name).unlink()
        if (self.path / TENSORBOARD).is_dir():
            shutil.rmtree(self.path / TENSORBOARD)
        for old in self.checkpoints.iterdir():
            if is_checkpoint_name(old.name):
                old.unlink()
        write_text(self.path / PROGRAM, program.to_json())

    def append_metrics(self, row: Dict[str, Any]) -> None:
        """Adds one line to ``metrics.jsonl``."""
        try:
            with open(self.path / METRICS, "a", encoding="utf-8") as handle:
                handle.write(json.dumps(row) + "\n")
        except OSError as error:
            raise DataError(
                f"{self.path / METRICS} cannot be written: {error.strerror}", "free some space"
            ) from None

    def write_report(self, report: Dict[str, Any]) -> None:
        """Writes ``report.json``."""
        write_text(self.path / REPORT, json.dumps(report, indent=2) + "\n")

    def read_config(self) -> RunConfig:
        """The resolved configuration of the run.

        Raises:
            DataError: there is none: not a run folder.
        """
        path = self.path / CONFIG
        try:
            text = path.read_text(encoding="utf-8")
        except OSError:
            raise DataError(
                f"{self.path} is not a run folder: it has no {CONFIG}",
                "give a folder that `ipucnn train` wrote, for example runs/efficientnet-b0-digits",
            ) from None
        return RunConfig.from_yaml(text, str(path))

    def write_checkpoint(self, name: str, weights: Any, slots: Any, meta: Dict[str, Any]) -> Path:
        """Writes ``checkpoints/<name>`` atomically and returns its path."""
        from ipucnn.runs.files import write_atomically
        from ipucnn.training.checkpoints import save_checkpoint

        path = self.checkpoints / name
        write_atomically(path, lambda temporary: save_checkpoint(temporary, weights, slots, meta))
        return path

    def link_checkpoint(self, source: Path, name: str) -> Path:
        """Makes ``checkpoints/<name>`` the same file as ``source`` without writing it again where possible."""
        from ipucnn.runs.files import write_atomically

        def link(temporary: Path) -> None:
            try:
                os.link(source, temporary)
            except OSError:
                shutil.copyfile(source, temporary)

        path = self.checkpoints / name
        write_atomically(path, link)
        return path
