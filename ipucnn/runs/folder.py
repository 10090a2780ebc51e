"""The run folder: everything about one run, and nothing it did not write."""

import contextlib
import difflib
import json
import os
import re
import secrets
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Dict, Iterable, List, Mapping, Optional, Sequence

import msgspec
import numpy as np

from ipucnn.aliases import Annotated, PlainDict, PlainValue
from ipucnn.config.options import RunConfig
from ipucnn.documents import MAX_BYTES, Figures, Finite, Natural, misfit, read_record_if_whole
from ipucnn.errors import ConfigurationError, DataError, WorkersError
from ipucnn.filesystem import (
    append_text,
    entries,
    exists,
    expand,
    is_file,
    is_folder,
    is_link,
    locked,
    make_folder,
    read_text,
    remove_file,
    remove_folder,
    remove_temporaries,
    shown,
    used_bytes,
    write_atomically,
    write_text,
)
from ipucnn.models.registry import natural_key
from ipucnn.training.program import Program

CONFIG, PROGRAM, REPORT, ENVIRONMENT = "config.yml", "program.json", "report.json", "environment.json"
# What the run computed, the same bytes whenever it runs, and how long that took, which never is the same.
METRICS, TIMINGS = "metrics.jsonl", "timings.jsonl"
# Of a segmentation network: images, their masks and what was predicted.
PREDICTIONS = "predictions.png"
# Of a segmentation network of two classes: weight updates of a checkpoint -> the threshold that suits it.
THRESHOLDS = "thresholds.json"
# The log of --mlperf-logging.
MLPERF = "mlperf.log"
# The run as a page, of the commands that have it drawn.
PAGE = "report.html"
# WANDB is the folder of that library's own files, which --wandb makes.
CHECKPOINTS, TENSORBOARD, WANDB = "checkpoints", "tensorboard", "wandb"
# Of a cross-validation, whose folds are run folders below it.
FOLDS = "folds.json"
LAST, BEST = "last.npz", "best.npz"
# How many runs or checkpoints a hint names.
NAMED = 5
RUN_FILES = (CONFIG, PROGRAM, REPORT, ENVIRONMENT, METRICS, TIMINGS, PREDICTIONS, THRESHOLDS, MLPERF, PAGE)
_CURVES = "events.out.tfevents."
Arrays = Mapping[str, np.ndarray]


_Threshold = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class _Validation(msgspec.Struct):
    """Figures of a validation, as the end report shows them; a Dice comes with the others of its kind."""

    accuracy: float
    samples: float
    loss: float
    iou: Optional[float] = None
    dice: Optional[float] = None
    dice_all_foreground: Optional[float] = None
    dice_background: Optional[float] = None

    def __post_init__(self) -> None:
        if self.dice is not None and self.iou is None:
            raise ValueError("dice without iou")
        if self.dice_background is not None and None in (self.dice, self.dice_all_foreground):
            raise ValueError("dice_background without dice")


class _Device(msgspec.Struct):
    kind: str


class _Compilation(msgspec.Struct):
    """What was compiled, on IPUs or on the host, and how long that took."""

    device: _Device
    compile_s: Finite
    num_parameters: Finite
    macs_per_sample: Finite
    fused_micro_batches: Finite
    cached: Optional[bool] = None
    num_graph_operations: Optional[Finite] = None
    num_layers: Optional[Finite] = None

    def __post_init__(self) -> None:
        needed = (self.num_graph_operations, self.num_layers)
        if None in ((self.cached,) if self.device.kind == "ipu" else needed):
            raise ValueError("what was compiled is not said")


class _Dataset(msgspec.Struct):
    name: str
    location: str
    train: Natural
    evaluation: Natural
    class_names: List[str] = []
    left_out: List[str] = []
    validated_pixels: Optional[Dict[str, PlainValue]] = None


class _Measured(msgspec.Struct):
    images_per_s: Finite
    flop_per_s: Finite
    train_s: Finite
    wall_s: Finite
    first_weight_update: Natural = 0
    samples: Natural = 0


class _Report(msgspec.Struct):
    """What a report must have to be shown; one that lacks any of it is none, and the run goes on to write it."""

    model: str
    dataset: _Dataset
    program: Dict[str, PlainValue]
    compilation: _Compilation
    measured: _Measured
    trained_samples: Natural
    validation: Optional[_Validation]
    best_validation: Optional[_Validation]
    checkpoints: List[str]


def is_checkpoint_name(name: str) -> bool:
    """Whether a run gives its checkpoints such a name."""
    return name in (LAST, BEST) or re.fullmatch(r"checkpoint-\d{8,}\.npz", name) is not None


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        if is_folder(folder) and not entries(folder):
            folder.rmdir()


class RunFolder:
    """Paths and writers of a run folder.

    Args:
        path: the folder.
        checkpoint_dir: where checkpoints go, if not into the run folder.
        is_claimed: this process made the empty folder for the run.
    """

    def __init__(self, path: Path, checkpoint_dir: Optional[str] = None, is_claimed: bool = False) -> None:
        self.path = path
        self._locks: List[int] = []
        # What this process noted of itself in ``environment.json``; None before it made or reopened the folder.
        self._token: Optional[str] = None
        # Of a folder that held nothing before: which of its folders are new.  None of any other.
        self._made: Optional[List[Path]] = [path] if is_claimed else None
        self.checkpoints = expand(checkpoint_dir) if checkpoint_dir else path / CHECKPOINTS

    def lock(self) -> None:
        """Keeps other processes from writing this run until :meth:`unlock` or the end of this one, whatever it is.

        Raises:
            ConfigurationError: another process is writing it.
        """
        for folder, flag in ((self.path, "--run-dir"), (self.checkpoints, "--checkpoint-dir")):
            if not is_folder(folder) or (folder is self.checkpoints and folder.parent == self.path):
                continue
            try:
                handle = locked(folder)
            except BlockingIOError:
                self.unlock()
                raise ConfigurationError(
                    f"folder {folder} is in use by another process", f"wait for it, or use another {flag}"
                ) from None
            self._locks += [] if handle is None else [handle]

    def unlock(self) -> None:
        """Lets other processes write the run."""
        while self._locks:
            os.close(self._locks.pop())

    def create(self, config: RunConfig, program: Program, replace: bool = False) -> None:
        """Makes the folder and its first files; nothing of a new folder is left if that fails.

        Args:
            config: the run's.
            program: the run's.
            replace: a former run's files may be replaced, as ``check_new`` allowed.

        Raises:
            DataError: it cannot be written.
            ConfigurationError: another process is writing it, or has written it meanwhile.
        """
        self._refuse_links()
        was_empty = not exists(self.path) or not entries(self.path)
        made = [*(self._made or ()), *(p for p in (self.path, self.checkpoints) if not exists(p))]
        try:
            # The new folders first: a former run goes only once it is known that this one can be written.
            make_folder(self.path)
            make_folder(self.checkpoints)
            self.lock()
            if not replace:
                self._check_still_free()
            write_text(self.path / CONFIG, config.to_yaml())
            self._claim([])
            self._remove_files(kept=(CONFIG, ENVIRONMENT))
            for old in self._checkpoints():
                remove_file(old)
            write_text(self.path / PROGRAM, program.to_json())
            self._made = made if was_empty else None
        except (OSError, DataError) as error:
            self._made = made if was_empty else None
            self.discard()
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
        # The error that ended the run is the one to tell, whatever the file system says now.
        with contextlib.suppress(OSError, DataError, WorkersError):
            self.check_writer()
            if self._checkpoints():
                return
            self._remove_files()
            _remove_empty((self.path / TENSORBOARD, *reversed(made)))

    def _remove_files(self, kept: Sequence[str] = ()) -> None:
        """Deletes the files of a run, but not its checkpoints."""
        for path in (*(self.path / name for name in RUN_FILES if name not in kept), *self._curves()):
            remove_file(path)
        remove_folder(self.path / WANDB)
        self._remove_temporaries()

    def _checkpoints(self) -> List[Path]:
        return [path for path in entries(self.checkpoints) if is_checkpoint_name(path.name)]

    def _refuse_links(self) -> None:
        """Refuses folders inside the run folder that lie elsewhere: a run folder may come from others."""
        inside = (self.checkpoints,) if self.checkpoints == self.path / CHECKPOINTS else ()
        for folder in (*inside, self.path / TENSORBOARD, self.path / WANDB):
            if is_link(folder):
                hint = f"remove it: rm {shlex.quote(str(folder))}"
                if folder in inside:
                    hint += "; checkpoints go elsewhere with --checkpoint-dir"
                raise DataError(f"{folder} is a link, and a run writes to its own folder alone", hint)

    def _curves(self) -> List[Path]:
        folder = self.path / TENSORBOARD
        return [] if is_link(folder) else [p for p in entries(folder) if p.name.startswith(_CURVES)]

    def _check_still_free(self) -> None:
        """Another process may have begun, and even ended, since ``check_new``."""
        if exists(self.path / CONFIG) or self._checkpoints():
            taken = self.path if exists(self.path / CONFIG) else self.checkpoints
            raise ConfigurationError(
                f"{taken} was written by another run meanwhile", "use another folder, or --overwrite"
            )

    def reopen(self, config: RunConfig, program: Program, history: Sequence[str]) -> None:
        """Makes the folder one of a run that stands where ``history`` (the lines of its metrics) ends.

        Raises:
            DataError: it cannot be written.
        """
        self._refuse_links()
        make_folder(self.path)
        make_folder(self.checkpoints)
        self.lock()
        self._claim(self._processes())
        self._remove_temporaries()
        write_text(self.path / CONFIG, config.to_yaml())
        write_text(self.path / PROGRAM, program.to_json())
        write_text(self.path / METRICS, "".join(history))
        remove_file(self.path / REPORT)
        remove_file(self.path / PAGE)

    def _remove_temporaries(self) -> None:
        remove_temporaries(self.path, lambda name: name in RUN_FILES)
        remove_temporaries(self.checkpoints, is_checkpoint_name)

    def _processes(self) -> List[PlainDict]:
        """Those that noted themselves, without who was killed before it said more than that it writes."""
        known = read_record_if_whole(self.path / ENVIRONMENT)
        if misfit(known, List[Dict[str, PlainValue]]):
            return []
        return [entry for entry in known if set(entry) != {"writer"}]

    def _claim(self, before: Sequence[PlainDict]) -> None:
        """Notes that this process writes the run, before it changes what another one may still add to."""
        self._token = secrets.token_hex(8)
        write_text(self.path / ENVIRONMENT, json.dumps([*before, {"writer": self._token}], indent=2) + "\n")

    def check_writer(self) -> None:
        """Refuses to write a run that another process goes on with.

        A lock keeps others out, but not on every network: a process that was stopped, and is let go on after the run
        was continued on another machine, would write over what that one has.

        Raises:
            WorkersError: another process noted itself in ``environment.json`` after this one.
        """
        processes = None if self._token is None else read_record_if_whole(self.path / ENVIRONMENT)
        last = processes[-1] if isinstance(processes, list) and processes else None
        if isinstance(last, dict) and last.get("writer", self._token) != self._token:
            raise WorkersError(
                f"another process goes on with the run in {self.path}, and this one writes nothing more",
                "leave the run to that process; this one was stopped, or cut off, for a while",
            )

    def append(self, name: str, line: str) -> None:
        """Adds a line to ``metrics.jsonl`` or ``timings.jsonl``."""
        self.check_writer()
        append_text(self.path / name, line)

    def add_environment(self, facts: PlainDict) -> List[PlainDict]:
        """Notes the process that writes the run in ``environment.json``; returns all of them, this one last."""
        self.check_writer()
        self._token = self._token or secrets.token_hex(8)
        processes = [*self._processes(), {**facts, "writer": self._token}]
        write_text(self.path / ENVIRONMENT, json.dumps(processes, indent=2) + "\n")
        return processes

    def thresholds(self) -> Dict[str, float]:
        """The thresholds that ``ipucnn evaluate`` recommends, by the weight updates of their checkpoints."""
        stored = read_record_if_whole(self.path / THRESHOLDS)
        return {} if misfit(stored, Dict[str, _Threshold]) else stored

    def keep_threshold(self, weight_updates: int, threshold: float) -> None:
        """Keeps the threshold of a checkpoint for ``ipucnn infer``.

        Raises:
            DataError: the folder cannot be written to.
        """
        known = {**self.thresholds(), str(weight_updates): threshold}
        write_text(self.path / THRESHOLDS, json.dumps(known) + "\n")

    def read_report(self) -> Optional[PlainDict]:
        """``report.json``, which a finished run has; None for one that did not finish."""
        report = read_record_if_whole(self.path / REPORT)
        if misfit(report, _Report):
            return None
        figures = [report["validation"], report["best_validation"]]
        return None if misfit(figures, List[Optional[Figures]]) else report

    @property
    def size_bytes(self) -> int:
        """What the run takes on its disk, its checkpoints elsewhere included."""
        return used_bytes(self.path, self._checkpoints())

    def clean(self, names: Iterable[str]) -> None:
        """Deletes checkpoints the run wrote, and their folder if nothing else is in it."""
        self.check_writer()
        for name in names:
            if is_checkpoint_name(name):
                remove_file(self.checkpoints / name)
        with contextlib.suppress(OSError):
            _remove_empty((self.checkpoints,))

    def write_report(self, report: PlainDict) -> None:
        """Writes ``report.json``."""
        self.check_writer()
        write_text(self.path / REPORT, json.dumps(report, indent=2) + "\n")

    def read_config(self) -> RunConfig:
        """The resolved configuration of the run.

        Raises:
            DataError: there is none (not a run folder), or it is damaged.
        """
        path = self.path / CONFIG
        if not exists(path):
            inside = [p for p in entries(self.path) if is_folder(p) and is_file(p / CONFIG)]
            some = ", ".join(map(str, inside[:5])) + (", ..." if len(inside) > 5 else "")
            hint = "give a folder that `ipucnn train` wrote" + (f": {some}" if inside else "")
            raise DataError(f"{self.path} is not a run folder: it has no {CONFIG}", hint)
        text = read_text(path, MAX_BYTES, hint="restore it, or train again with --overwrite")
        if "model-name:" not in text:
            raise DataError(
                f"{path} is damaged: it names no model", "restore it, or train again with --overwrite"
            )
        config = RunConfig.from_yaml(text, str(path))
        if "keep-checkpoints:" not in text:
            # Of an earlier version, which kept all: what such a run wrote is not deleted when it goes on.
            config = replace(config, keep_checkpoints=None)
        return config

    def write_checkpoint(self, name: str, weights: Arrays, slots: Arrays, meta: PlainDict) -> Path:
        """Writes ``checkpoints/<name>`` atomically and returns its path."""
        from ipucnn.training.checkpoints import save_checkpoint

        def save(temporary: Path) -> None:
            save_checkpoint(temporary, weights, slots, meta)
            self.check_writer()

        path = self.checkpoints / name
        write_atomically(path, save)
        return path

    def link_checkpoint(self, source: Path, name: str) -> Path:
        """Makes ``checkpoints/<name>`` the same file as ``source`` without writing it again where possible."""

        def link(temporary: Path) -> None:
            try:
                os.link(source, temporary)
            except OSError:
                shutil.copyfile(source, temporary)
            self.check_writer()

        path = self.checkpoints / name
        write_atomically(path, link)
        return path


class SilentFolder(RunFolder):
    """What a worker has that leaves writing to the first one: nothing is written, or taken away."""

    def lock(self) -> None:
        """There is nothing to lock."""

    def create(self, config: RunConfig, program: Program, replace: bool = False) -> None:
        """Makes nothing."""

    def reopen(self, config: RunConfig, program: Program, history: Sequence[str]) -> None:
        """Changes nothing."""

    def append(self, name: str, line: str) -> None:
        """Writes nothing."""

    def add_environment(self, facts: PlainDict) -> List[PlainDict]:
        """Notes nothing; this process alone is known."""
        return [facts]

    def clean(self, names: Iterable[str]) -> None:
        """Deletes nothing."""

    def write_report(self, report: PlainDict) -> None:
        """Writes nothing."""

    def write_checkpoint(self, name: str, weights: Arrays, slots: Arrays, meta: PlainDict) -> Path:
        """Writes nothing; where the first worker writes it."""
        return self.checkpoints / name

    def link_checkpoint(self, source: Path, name: str) -> Path:
        """Writes nothing."""
        return self.checkpoints / name


def folds_of(path: Path) -> List[Path]:
    """The run folders of a cross-validation; none of a run."""
    folds = [p for p in entries(path) if p.name.startswith("fold-") and is_folder(p)]
    return sorted(folds, key=lambda p: natural_key(p.name))


def is_run(path: Path) -> bool:
    """Whether a folder is that of one run: not of a benchmark, nor of a cross-validation, whose folds are runs."""
    if not is_folder(path) or not is_file(path / CONFIG) or is_file(path / FOLDS):
        return False
    # What a run writes last is the report; a benchmark writes a program and that, and nothing besides.
    of_a_run = any(is_file(path / name) for name in (ENVIRONMENT, METRICS))
    return of_a_run or not is_file(path / REPORT)


def runs_there_are(path: Path, command: Optional[str] = None) -> str:
    """What to type where a run was asked for that is not there: the runs beside it, or below ``runs``.

    Args:
        path: of what is not there.
        command: that a run can be given to as it is, for the whole line to type.
    """
    for folder in (path.parent, Path("runs")):
        runs = [p for p in entries(folder) if is_run(p)] if is_folder(folder) else []
        if runs:
            by_name = {p.name: shown(p) for p in sorted(runs, key=lambda p: natural_key(p.name))}
            close = difflib.get_close_matches(path.name, by_name, 1)
            if close:
                return f"did you mean '{by_name[close[0]]}'?"
            names = list(by_name.values())
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            line = f"; type: ipucnn {command} {names[0]}" if command is not None else ""
            return f"there are: {', '.join(names[:NAMED])}{more}{line}"
    return "train one with: ipucnn train toy_model"
