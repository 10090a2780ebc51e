"""The run folder: everything about one run, and nothing it did not write."""

import contextlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence

from ipucnn import json_text
from ipucnn.config.options import RunConfig
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.filesystem import (
    is_file,
    read_text,
    reason_of,
    remove_temporaries,
    temporary_of,
    write_hint,
    write_text,
)
from ipucnn.json_text import is_count, is_number, is_text, list_of, optional, read_json

CONFIG, PROGRAM, REPORT, ENVIRONMENT = "config.yml", "program.json", "report.json", "environment.json"
# What the run computed, the same bytes whenever it runs, and how long that took, which never is the same.
METRICS, TIMINGS = "metrics.jsonl", "timings.jsonl"
# Of a segmentation network: images, their masks and what was predicted.
PREDICTIONS = "predictions.png"
CHECKPOINTS, TENSORBOARD = "checkpoints", "tensorboard"
# Of a cross-validation, whose folds are run folders below it.
FOLDS = "folds.json"
LAST, BEST = "last.npz", "best.npz"
_FILES = (CONFIG, PROGRAM, REPORT, ENVIRONMENT, METRICS, TIMINGS, PREDICTIONS)
_CONFIG_BYTES = 2**20


def _is_validation(value: Any) -> bool:
    """Whether figures are those of a validation, as the end report shows them."""
    if not json_text.metrics(value):
        return False
    needed = ["accuracy", "samples", "loss"]
    needed += ["iou"] if "dice" in value else []
    needed += ["dice", "dice_all_foreground"] if "dice_background" in value else []
    return all(is_number(value.get(name)) or isinstance(value.get(name), float) for name in needed)


def _is_compilation(value: Any) -> bool:
    """Whether a mapping says what was compiled, on IPUs or on the host, as the end report shows it."""
    device = value.get("device") if isinstance(value, dict) else None
    if not isinstance(device, dict) or not is_text(device.get("kind")):
        return False
    numbers = ["compile_s", "num_parameters", "macs_per_sample", "fused_micro_batches"]
    if device["kind"] == "ipu":
        return (
            all(is_number(value.get(name)) for name in numbers)
            and isinstance(value.get("cached"), bool)
            and json_text.metrics(value.get("stages_s"))
        )
    return all(is_number(value.get(name)) for name in [*numbers, "num_graph_operations", "num_layers"])


_figures = optional(_is_validation)
_REPORT_FIELDS: json_text.Fields = {
    "model": ("a text", json_text.is_text),
    "dataset": (
        "name, location, train and evaluation",
        json_text.all_of(
            {"name": is_text, "location": is_text, "train": is_count, "evaluation": is_count},
            {"class_names": list_of(is_text), "validated_pixels": optional(json_text.is_mapping)},
        ),
    ),
    "program": ("a mapping", json_text.is_mapping),
    "compilation": ("what was compiled, and how long that took", _is_compilation),
    "measured": (
        "throughput and times",
        json_text.all_of(
            {"images_per_s": is_number, "flop_per_s": is_number, "train_s": is_number, "wall_s": is_number},
            {"first_weight_update": is_count},
        ),
    ),
    "trained_samples": ("a number", is_count),
    "validation": ("a mapping of figures", _figures),
    "best_validation": ("a mapping of figures", _figures),
    "checkpoints": ("a list of texts", list_of(is_text)),
}
"""What a report must have to be shown; a report that lacks any of it is none, and the run goes on to write it."""
_OURS = (*_FILES, CHECKPOINTS, TENSORBOARD)


def _numbered(model: str, dataset: str, root: Path, number: int) -> Path:
    base = f"{model}-{dataset}".replace(":", "-").replace("/", "-")
    return root / (base if number == 1 else f"{base}-{number}")


def _first_free(model: str, dataset: str, root: Path) -> int:
    number = 1
    while _numbered(model, dataset, root, number).exists():
        number += 1
    return number


def default_run_dir(model: str, dataset: str, root: Path = Path("runs")) -> Path:
    """``runs/<model>-<dataset>``, with ``-2``, ``-3``, ... appended where that exists."""
    return _numbered(model, dataset, root, _first_free(model, dataset, root))


def latest_run_dir(model: str, dataset: str, root: Path = Path("runs")) -> Optional[Path]:
    """The folder that :func:`default_run_dir` gave out last, None if there is none."""
    free = _first_free(model, dataset, root)
    return _numbered(model, dataset, root, free - 1) if free > 1 else None


def check_new(path: Path, overwrite: bool) -> None:
    """Refuses a run folder that is taken, before anything is computed.

    Raises:
        ConfigurationError: it exists and ``overwrite`` is not set, or holds what no run wrote.
        DataError: its parent is a file.
    """
    try:
        for parent in (path, *path.parents):
            if parent.exists():
                if not parent.is_dir():
                    raise DataError(f"run folder {path}: {parent} is a file", "choose another --run-dir")
                break
        if not path.exists() or not any(path.iterdir()):
            return
    except OSError as error:
        raise DataError(f"run folder {path}: {error.strerror}", "choose another --run-dir") from None
    foreign = sorted(p.name for p in path.iterdir() if not _is_ours(p.name))
    if not overwrite:
        raise ConfigurationError(
            f"run folder {path} already exists",
            f"--resume continues it, --overwrite replaces {path}; or use another --run-dir",
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


def is_unfinished(path: Path) -> bool:
    """Whether a folder is what a process left that was killed while it made its run folder."""
    if not path.is_dir() or (path / CONFIG).exists():
        return False
    checkpoints = path / CHECKPOINTS
    inside = list(checkpoints.iterdir()) if checkpoints.is_dir() else []
    return not inside and all(p.name == CHECKPOINTS or temporary_of(p.name) in _FILES for p in path.iterdir())


def check_checkpoint_dir(path: Path, checkpoints: Path) -> None:
    """Refuses a checkpoint folder inside the run folder where the run keeps other things.

    Raises:
        ConfigurationError: it is.
    """
    run, there = path.absolute(), checkpoints.absolute()
    if there != run / CHECKPOINTS and (there == run or run in there.parents):
        raise ConfigurationError(
            f"checkpoint folder {checkpoints} lies in the run folder {path}",
            f"leave --checkpoint-dir out (they go to {path / CHECKPOINTS}), or choose a folder elsewhere",
        )


def _is_ours(name: str) -> bool:
    """Whether a run puts a file or folder of this name into its folder; temporaries of killed runs too."""
    return name in _OURS or temporary_of(name) in _FILES


def is_checkpoint_name(name: str) -> bool:
    """Whether a run gives its checkpoints such a name."""
    return name in (LAST, BEST) or re.fullmatch(r"checkpoint-\d{8,}\.npz", name) is not None


class RunFolder:
    """Paths and writers of a run folder.

    Args:
        path: the folder.
        checkpoint_dir: where checkpoints go, if not into the run folder.
    """

    def __init__(self, path: Path, checkpoint_dir: Optional[str] = None) -> None:
        self.path = path
        self._locks: List[int] = []
        # Of a folder that held nothing before: which of its folders are new.  None of any other.
        self._made: Optional[List[Path]] = None
        self.checkpoints = Path(checkpoint_dir).expanduser() if checkpoint_dir else path / CHECKPOINTS

    def lock(self) -> None:
        """Keeps other processes from writing this run until :meth:`unlock` or the end of this one, whatever it is.

        Raises:
            ConfigurationError: another process is writing it.
        """
        for folder, flag in ((self.path, "--run-dir"), (self.checkpoints, "--checkpoint-dir")):
            if not folder.is_dir() or (folder is self.checkpoints and folder.parent == self.path):
                continue
            try:
                import fcntl

                handle = os.open(str(folder), os.O_RDONLY)
                self._locks.append(handle)
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.unlock()
                raise ConfigurationError(
                    f"folder {folder} is in use by another process", f"wait for it, or use another {flag}"
                ) from None
            except (ImportError, OSError):
                pass  # no such locks on this system or file system

    def unlock(self) -> None:
        """Lets other processes write the run."""
        while self._locks:
            os.close(self._locks.pop())

    def create(self, config: RunConfig, program: Any, replace: bool = False) -> None:
        """Makes the folder and its first files; nothing of a new folder is left if that fails.

        Args:
            config: the run's.
            program: the run's.
            replace: a former run's files may be replaced, as ``check_new`` allowed.

        Raises:
            DataError: it cannot be written.
            ConfigurationError: another process is writing it, or has written it meanwhile.
        """
        is_new = not self.path.exists()
        was_empty = is_new or not any(self.path.iterdir())
        made = [p for p in (self.path, self.checkpoints) if not p.exists()]
        try:
            # The new folders first: a former run goes only once it is known that this one can be written.
            self.path.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.lock()
            if not replace:
                self._check_still_free()
            write_text(self.path / CONFIG, config.to_yaml())
            self._remove_former()
            write_text(self.path / PROGRAM, program.to_json())
            self._made = made if was_empty else None
        except (OSError, DataError) as error:
            if is_new:
                (self.path / CONFIG).unlink() if (self.path / CONFIG).exists() else None
            for folder in reversed(made):
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()
            reason = error.strerror if isinstance(error, OSError) else error.message
            raise DataError(
                f"run folder {self.path} cannot be written: {reason}",
                "choose another --run-dir or --checkpoint-dir, or free some space",
            ) from None

    def discard(self) -> None:
        """Takes away what :meth:`create` made and a run that came to nothing wrote, so that it can be typed again.

        A folder that held anything before, or now holds a checkpoint or a file of others, stays.
        """
        made, self._made = self._made, None
        if made is None:
            return
        if any(is_checkpoint_name(p.name) for p in self.checkpoints.glob("*")):
            return
        curves = self.path / TENSORBOARD
        # The error that ended the run is the one to tell, whatever the file system says now.
        with contextlib.suppress(OSError):
            for path in (*(self.path / name for name in _FILES), *curves.glob("events.out.tfevents.*")):
                if path.exists():
                    path.unlink()
            self._remove_temporaries()
            for folder in (curves, *reversed(made)):
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()

    def _check_still_free(self) -> None:
        """Another process may have begun, and even ended, since ``check_new``."""
        taken = [self.path] if (self.path / CONFIG).exists() else []
        taken += (
            [self.checkpoints] if any(is_checkpoint_name(p.name) for p in self.checkpoints.iterdir()) else []
        )
        if taken:
            raise ConfigurationError(
                f"{taken[0]} was written by another run meanwhile", "use another folder, or --overwrite"
            )

    def _remove_former(self) -> None:
        for name in _FILES:
            if name != CONFIG and (self.path / name).exists():
                (self.path / name).unlink()
        if (self.path / TENSORBOARD).is_dir():
            for old in (self.path / TENSORBOARD).glob("events.out.tfevents.*"):
                old.unlink()
        for old in self.checkpoints.iterdir():
            if is_checkpoint_name(old.name):
                old.unlink()
        self._remove_temporaries()

    def reopen(self, config: RunConfig, program: Any, history: Sequence[str]) -> None:
        """Makes the folder one of a run that stands where ``history`` (the lines of its metrics) ends.

        Raises:
            DataError: it cannot be written.
        """
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self.lock()
        self._remove_temporaries()
        write_text(self.path / CONFIG, config.to_yaml())
        write_text(self.path / PROGRAM, program.to_json())
        write_text(self.path / METRICS, "".join(history))
        if (self.path / REPORT).exists():
            (self.path / REPORT).unlink()

    def _remove_temporaries(self) -> None:
        remove_temporaries(self.path, lambda name: name in _FILES)
        remove_temporaries(self.checkpoints, is_checkpoint_name)

    def append(self, name: str, line: str) -> None:
        """Adds a line to ``metrics.jsonl`` or ``timings.jsonl``."""
        try:
            with open(self.path / name, "a", encoding="utf-8") as handle:
                handle.write(line)
        except OSError as error:
            raise DataError(
                f"{self.path / name} cannot be written: {reason_of(error)}", write_hint(error)
            ) from None

    def add_environment(self, facts: Dict[str, Any]) -> List[Dict[str, Any]]:
        """Notes the process that writes the run in ``environment.json``; returns all of them, this one last."""
        path = self.path / ENVIRONMENT
        before = read_json(path)
        known = [entry for entry in before if isinstance(entry, dict)] if isinstance(before, list) else []
        processes = [*known, facts]
        write_text(path, json.dumps(processes, indent=2) + "\n")
        return processes

    def read_report(self) -> Optional[Dict[str, Any]]:
        """``report.json``, which a finished run has; None for one that did not finish."""
        report = read_json(self.path / REPORT)
        if not isinstance(report, dict) or json_text.wrong_field(report, _REPORT_FIELDS, _REPORT_FIELDS):
            return None
        return report

    def clean(self, names: Iterable[str]) -> None:
        """Deletes checkpoints the run wrote, and their folder if nothing else is in it."""
        for name in names:
            if is_checkpoint_name(name) and (self.checkpoints / name).exists():
                (self.checkpoints / name).unlink()
        if self.checkpoints.is_dir() and not any(self.checkpoints.iterdir()):
            self.checkpoints.rmdir()

    def write_report(self, report: Dict[str, Any]) -> None:
        """Writes ``report.json``."""
        write_text(self.path / REPORT, json.dumps(report, indent=2) + "\n")

    def read_config(self) -> RunConfig:
        """The resolved configuration of the run.

        Raises:
            DataError: there is none (not a run folder), or it is damaged.
        """
        path = self.path / CONFIG
        if not is_file(path):
            raise DataError(
                f"{self.path} is not a run folder: it has no {CONFIG}",
                "give a folder that `ipucnn train` wrote, for example runs/efficientnet-b0-digits",
            )
        text = read_text(path, _CONFIG_BYTES, hint="restore it, or train again with --overwrite")
        if "model-name:" not in text:
            raise DataError(
                f"{path} is damaged: it names no model", "restore it, or train again with --overwrite"
            )
        return RunConfig.from_yaml(text, str(path))

    def write_checkpoint(self, name: str, weights: Any, slots: Any, meta: Dict[str, Any]) -> Path:
        """Writes ``checkpoints/<name>`` atomically and returns its path."""
        from ipucnn.filesystem import write_atomically
        from ipucnn.training.checkpoints import save_checkpoint

        path = self.checkpoints / name
        write_atomically(path, lambda temporary: save_checkpoint(temporary, weights, slots, meta))
        return path

    def link_checkpoint(self, source: Path, name: str) -> Path:
        """Makes ``checkpoints/<name>`` the same file as ``source`` without writing it again where possible."""
        from ipucnn.filesystem import write_atomically

        def link(temporary: Path) -> None:
            try:
                os.link(source, temporary)
            except OSError:
                shutil.copyfile(source, temporary)

        path = self.checkpoints / name
        write_atomically(path, link)
        return path
