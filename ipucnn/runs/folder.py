"""Run folders: their default names, and the files, checkpoints and lock of one run.

Checkpoints may lie elsewhere (``--checkpoint-dir``).  Files that no run wrote are left as they are.
"""

import contextlib
import difflib
import itertools
import json
import os
import re
import secrets
import shlex
import shutil
from datetime import datetime
from pathlib import Path
from typing import Dict, Iterable, Iterator, List, Mapping, Optional, Sequence

import msgspec
import numpy as np

from ipucnn.aliases import Annotated, PlainDict, PlainValue
from ipucnn.config.options import RunConfig
from ipucnn.documents import MAX_BYTES, read_record_if_present
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
    reason_of,
    remove_file,
    remove_folder,
    remove_temporaries,
    shown,
    temporary_of,
    used_bytes,
    write_atomically,
    write_text,
)
from ipucnn.models.registry import folder_name, natural_key
from ipucnn.runs.records import Report, plain
from ipucnn.text import counted
from ipucnn.training.program import BuiltProgram

CONFIG, PROGRAM, REPORT, ENVIRONMENT = "config.yml", "program.json", "report.json", "environment.json"
# METRICS has the computed results: the same bytes in every run with the same seed.  TIMINGS has the measured times.
METRICS, TIMINGS = "metrics.jsonl", "timings.jsonl"
# Pictures of a segmentation network: images, their masks, and the predictions.
PREDICTIONS = "predictions.png"
# Thresholds of a segmentation network with two classes, by the weight updates of their checkpoints.
THRESHOLDS = "thresholds.json"
# The log of --mlperf-logging.
MLPERF = "mlperf.log"
# The page of a run, which `ipucnn train` and `ipucnn evaluate --report` write.
PAGE = "report.html"
# WANDB is the folder in which --wandb keeps the files of its library.
CHECKPOINTS, TENSORBOARD, WANDB = "checkpoints", "tensorboard", "wandb"
# The results of a cross-validation; its folds are run folders beside this file.
FOLDS = "folds.json"
LAST, BEST = "last.npz", "best.npz"
# The largest number of runs or checkpoints that a hint names.
NAMED = 5
RUN_FILES = (CONFIG, PROGRAM, REPORT, ENVIRONMENT, METRICS, TIMINGS, PREDICTIONS, THRESHOLDS, MLPERF, PAGE)
RUNS = Path("runs")
"""The folder of all runs without ``--run-dir``."""
ELSEWHERE = "choose another --run-dir"
_CURVES = "events.out.tfevents."
Arrays = Mapping[str, np.ndarray]


_Threshold = Annotated[float, msgspec.Meta(ge=0, lt=1)]


def is_unfinished(path: Path) -> bool:
    """Whether a folder was left by a process that was killed while it made its run folder."""
    # A link is never such a folder: a run that used it would write somewhere else.
    if is_link(path) or not is_folder(path):
        return False
    if any(p.name != CHECKPOINTS and temporary_of(p.name) not in RUN_FILES for p in entries(path)):
        return False
    return not entries(path / CHECKPOINTS)


def is_checkpoint_name(name: str) -> bool:
    """Whether a file name is that of a run's checkpoint."""
    return name in (LAST, BEST) or re.fullmatch(r"checkpoint-\d{8,}\.npz", name) is not None


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        if is_folder(folder) and not entries(folder):
            folder.rmdir()


class _Locks:
    """Locks of folders, which end with :meth:`release`, with this object, or with the process."""

    def __init__(self) -> None:
        self._handles: Dict[Path, Optional[int]] = {}

    def take(self, folder: Path) -> None:
        """Locks a folder, unless it is locked already; raises BlockingIOError if another process has locked it."""
        if folder not in self._handles:
            self._handles[folder] = locked(folder)

    def release(self) -> None:
        """Ends all locks."""
        while self._handles:
            _, handle = self._handles.popitem()
            if handle is not None:
                os.close(handle)

    def __del__(self) -> None:
        self.release()


class RunFolder:
    """The paths of a run folder, and the methods that read and write its files.

    Args:
        path: the folder.
        checkpoint_dir: the folder of the checkpoints, if they are not in the run folder.
        is_claimed: whether this process made the empty folder for the run.
    """

    def __init__(self, path: Path, checkpoint_dir: Optional[str] = None, is_claimed: bool = False) -> None:
        self.path = path
        self._locks = _Locks()
        # The token of this process in ``environment.json``; None before it created or reopened the folder.
        self._token: Optional[str] = None
        # The folders that this process made, if the run folder has no files of an earlier run; else None.
        self._made: Optional[List[Path]] = [path] if is_claimed else None
        self.checkpoints = expand(checkpoint_dir) if checkpoint_dir else path / CHECKPOINTS

    def with_checkpoints(self, checkpoint_dir: Optional[str]) -> "RunFolder":
        """Returns this run folder with another folder of checkpoints; both have the same locks."""
        folder = RunFolder(self.path, checkpoint_dir)
        folder._locks = self._locks
        return folder

    def lock(self) -> None:
        """Locks the run against other processes, until :meth:`unlock` or until this process ends in any way.

        Folders that do not exist are not locked; call it again when they do.

        Raises:
            ConfigurationError: another process is writing the run.
        """
        in_use = {}
        for folder, flag in ((self.path, "--run-dir"), (self.checkpoints, "--checkpoint-dir")):
            if not is_folder(folder) or (folder is self.checkpoints and folder.parent == self.path):
                continue
            try:
                self._locks.take(folder)
            except BlockingIOError:
                in_use[folder] = flag
        if in_use:
            # Without the lock, a new folder may be that of another process.
            self._made = self._made and [p for p in self._made if not in_use.keys() & {p, p.parent}]
            folder, flag = next(iter(in_use.items()))
            raise ConfigurationError(
                f"folder {folder} is in use by another process", f"wait for it, or use another {flag}"
            )

    def unlock(self) -> None:
        """Lets other processes write the run."""
        self._locks.release()

    @contextlib.contextmanager
    def unlocked_after_error(self) -> Iterator[None]:
        """Ends the locks if an error ends the block."""
        try:
            yield
        except BaseException:
            self.unlock()
            raise

    def create(self, config: RunConfig, program: BuiltProgram, replace: bool = False) -> None:
        """Makes the folder and its first files.  If that fails, a new folder is removed again.

        Args:
            config: the configuration of the run.
            program: the Program of the run.
            replace: whether the files of a former run may be replaced; ``check_new`` has allowed it.

        Raises:
            DataError: the folder cannot be written.
            ConfigurationError: another process is writing the folder, or has written it since ``check_new``.
        """
        self._refuse_links()
        new = [p for p in (self.path, self.checkpoints) if not exists(p)]
        is_free = not exists(self.path) or is_unfinished(self.path)
        self._made = [*(self._made or ()), *new] if is_free else None
        try:
            # The new folders first: a former run is deleted only after this one could be written.
            make_folder(self.path)
            make_folder(self.checkpoints)
            self.lock()
            if not replace:
                self._check_still_free()
            self._token = secrets.token_hex(8)
            write_text(self.path / CONFIG, config.to_yaml())
            self._claim([])
            self._remove_files(kept=(CONFIG, ENVIRONMENT))
            inside = RunFolder(self.path)
            for old in (
                *self._checkpoints(),
                *([] if is_link(inside.checkpoints) else inside._checkpoints()),
            ):
                remove_file(old)
            write_text(self.path / PROGRAM, program.to_json())
        except (OSError, DataError) as error:
            self.discard()
            reason = error.strerror if isinstance(error, OSError) else error.message
            raise DataError(
                f"run folder {self.path} cannot be written: {reason}",
                "choose another --run-dir or --checkpoint-dir, or free some space",
            ) from None

    def discard(self) -> None:
        """Removes what :meth:`create` and a run without results wrote, so that the same command works again.

        A folder that had files of a run before :meth:`create` stays.  So does one with a checkpoint or a foreign file.
        """
        new_folders, self._made = self._made, None
        if new_folders is None:
            return
        # The error that ended the run is reported, not an error of removing its folder.
        with contextlib.suppress(OSError, DataError, WorkersError):
            self.check_writer()
            # Without a token, files and checkpoints belong to another process.
            if self._token is not None:
                if self._checkpoints():
                    return
                self._remove_files()
                _remove_empty((self.path / TENSORBOARD,))
            _remove_empty(reversed(new_folders))

    def _remove_files(self, kept: Sequence[str] = ()) -> None:
        """Deletes the files of a run, but not its checkpoints."""
        for path in (*(self.path / name for name in RUN_FILES if name not in kept), *self._curves()):
            remove_file(path)
        remove_folder(self.path / WANDB)
        self._remove_temporaries()

    def _checkpoints(self) -> List[Path]:
        return [path for path in entries(self.checkpoints) if is_checkpoint_name(path.name)]

    def _refuse_links(self) -> None:
        """Refuses links in place of subfolders: a run folder may come from other people, and a link leads outside."""
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
        """Refuses a folder that another process has written since ``check_new``.

        Raises:
            ConfigurationError: there is a configuration or a checkpoint.
        """
        if exists(self.path / CONFIG) or self._checkpoints():
            taken = self.path if exists(self.path / CONFIG) else self.checkpoints
            raise ConfigurationError(
                f"{taken} was written by another run meanwhile", "use another folder, or --overwrite"
            )

    def reopen(self, config: RunConfig, program: BuiltProgram, history: Sequence[str]) -> None:
        """Prepares the folder of a run that is continued: its files end where ``history`` ends.

        Args:
            config: the configuration of the run.
            program: the Program of the run.
            history: the lines of ``metrics.jsonl`` up to the checkpoint.

        Raises:
            DataError: the folder cannot be written.
        """
        self._refuse_links()
        make_folder(self.path)
        make_folder(self.checkpoints)
        self.lock()
        self._claim(self._finished_processes())
        self._remove_temporaries()
        write_text(self.path / CONFIG, config.to_yaml())
        write_text(self.path / PROGRAM, program.to_json())
        write_text(self.path / METRICS, "".join(history))
        remove_file(self.path / REPORT)
        remove_file(self.path / PAGE)

    def _remove_temporaries(self) -> None:
        remove_temporaries(self.path, lambda name: name in RUN_FILES)
        remove_temporaries(self.checkpoints, is_checkpoint_name)

    def processes(self) -> List[PlainDict]:
        """Returns the entries of ``environment.json``: the processes that wrote the run, the latest last.

        Raises:
            DataError: the file is damaged or cannot be read.
        """
        without = "the earlier processes of the run are then not known"
        return read_record_if_present(self.path / ENVIRONMENT, without, List[Dict[str, PlainValue]]) or []

    def _finished_processes(self) -> List[PlainDict]:
        """Returns the entries of processes that were not killed before they added facts."""
        return [entry for entry in self.processes() if set(entry) != {"writer"}]

    def _claim(self, before: Sequence[PlainDict]) -> None:
        """Adds this process's token to ``environment.json``, before it changes files another process may still write.

        Args:
            before: the entries of earlier processes.
        """
        self._token = self._token or secrets.token_hex(8)
        write_text(self.path / ENVIRONMENT, json.dumps([*before, {"writer": self._token}], indent=2) + "\n")

    def check_writer(self) -> None:
        """Refuses to write a run that another process has continued.

        The lock does not work on every network file system.  Without this check, a process that was paused while the
        run was continued on another machine would overwrite the newer files.

        Raises:
            WorkersError: another process added its entry to ``environment.json`` after this one.
        """
        processes = [] if self._token is None else self.processes()
        if processes and processes[-1].get("writer", self._token) != self._token:
            raise WorkersError(
                f"another process goes on with the run in {self.path}, and this one writes nothing more",
                "leave the run to that process; this one was stopped, or cut off, for a while",
            )

    def append(self, name: str, line: str) -> None:
        """Adds a line to a file of the run."""
        self.check_writer()
        append_text(self.path / name, line)

    def add_environment(self, facts: PlainDict) -> List[PlainDict]:
        """Adds this process to ``environment.json``; returns the entries of all processes, this one last."""
        self.check_writer()
        self._token = self._token or secrets.token_hex(8)
        processes = [*self._finished_processes(), {**facts, "writer": self._token}]
        write_text(self.path / ENVIRONMENT, json.dumps(processes, indent=2) + "\n")
        return processes

    def thresholds(self) -> Dict[str, float]:
        """Returns the thresholds that ``ipucnn evaluate`` recommended, by the weight updates of their checkpoints."""
        without = "ipucnn evaluate writes it again"
        return read_record_if_present(self.path / THRESHOLDS, without, Dict[str, _Threshold]) or {}

    def keep_threshold(self, weight_updates: int, threshold: float) -> None:
        """Saves the threshold of a checkpoint for ``ipucnn infer``.

        Raises:
            DataError: the folder cannot be written to.
        """
        known = {**self.thresholds(), str(weight_updates): threshold}
        write_text(self.path / THRESHOLDS, json.dumps(known) + "\n")

    def read_report(self) -> Optional[Report]:
        """Returns the content of ``report.json``; None for a run that did not finish.

        Raises:
            DataError: the file is damaged or cannot be read.
        """
        without = "the run then counts as unfinished, and --resume writes it again"
        return read_record_if_present(self.path / REPORT, without, Report)

    def read_program(self) -> PlainDict:
        """Returns the content of ``program.json``; an empty dict if there is none.

        Raises:
            DataError: the file is damaged or cannot be read.
        """
        without = "a continued run writes it again"
        return read_record_if_present(self.path / PROGRAM, without, Dict[str, PlainValue]) or {}

    @property
    def size_bytes(self) -> int:
        """Bytes that the run takes on disk, with the checkpoints in ``--checkpoint-dir``."""
        return used_bytes(self.path, self._checkpoints())

    def clean(self, names: Iterable[str]) -> None:
        """Deletes checkpoints of the run, and their folder if it is then empty."""
        self.check_writer()
        for name in names:
            if is_checkpoint_name(name):
                remove_file(self.checkpoints / name)
        with contextlib.suppress(OSError):
            _remove_empty((self.checkpoints,))

    def write_report(self, report: Report) -> None:
        """Writes ``report.json``."""
        self.check_writer()
        write_text(self.path / REPORT, json.dumps(plain(report), indent=2) + "\n")

    def read_config(self) -> RunConfig:
        """Returns the resolved configuration of the run.

        Raises:
            DataError: the folder has no configuration (it is not a run folder), or a damaged one.
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
        return RunConfig.from_yaml(text, str(path))

    def checkpoint_facts(self) -> PlainDict:
        """Returns the facts of the last checkpoint, else of the best; an empty dict if there is none.

        Raises:
            DataError: the checkpoint is damaged or cannot be read.
        """
        from ipucnn.training.checkpoints import read_meta

        paths = (self.checkpoints / name for name in (LAST, BEST))
        return next((read_meta(path) for path in paths if exists(path)), {})

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
        """Makes ``checkpoints/<name>`` a hard link to ``source``, or a copy if links are not possible."""

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
    """A run folder that writes and deletes nothing, for the processes after rank 0, which writes the run."""

    def lock(self) -> None:
        """Locks nothing."""

    def create(self, config: RunConfig, program: BuiltProgram, replace: bool = False) -> None:
        """Makes nothing."""

    def reopen(self, config: RunConfig, program: BuiltProgram, history: Sequence[str]) -> None:
        """Changes nothing."""

    def append(self, name: str, line: str) -> None:
        """Writes nothing."""

    def add_environment(self, facts: PlainDict) -> List[PlainDict]:
        """Writes nothing; returns this process alone."""
        return [facts]

    def clean(self, names: Iterable[str]) -> None:
        """Deletes nothing."""

    def write_report(self, report: Report) -> None:
        """Writes nothing."""

    def write_checkpoint(self, name: str, weights: Arrays, slots: Arrays, meta: PlainDict) -> Path:
        """Writes nothing; returns the path at which rank 0 writes the checkpoint."""
        return self.checkpoints / name

    def link_checkpoint(self, source: Path, name: str) -> Path:
        """Writes nothing."""
        return self.checkpoints / name


def folds_of(path: Path) -> List[Path]:
    """Returns the run folders of a cross-validation, by their numbers; an empty list for a run."""
    folds = [p for p in entries(path) if p.name.startswith("fold-") and is_folder(p)]
    return sorted(folds, key=lambda p: natural_key(p.name))


def is_run(path: Path) -> bool:
    """Whether a folder is that of one run, and not of a benchmark or a cross-validation."""
    if not is_folder(path) or not is_file(path / CONFIG) or is_file(path / FOLDS):
        return False
    # A run writes its report last; a benchmark writes only configuration, program and report.
    of_a_run = any(is_file(path / name) for name in (ENVIRONMENT, METRICS))
    return of_a_run or not is_file(path / REPORT)


def hint_of_runs(path: Path, command: Optional[str] = None) -> str:
    """Returns a hint for a run that does not exist: the runs beside it, or those in ``runs``.

    Args:
        path: the path of the missing run.
        command: a command that takes a run, for an example line; None: no line is shown.
    """
    for folder in (path.parent, RUNS):
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


CONTINUE_FOLDS = "go on with it: ipucnn train --resume --run-dir {}"


def check_one_run(path: Path, command: Optional[str] = None) -> None:
    """Refuses a path that is not the folder of one run.

    Args:
        path: the path that the user gave.
        command: a command that takes a run, for the hint; None: the hint shows no command line.

    Raises:
        DataError: nothing or a file is there, or a cross-validation, which has a run for each fold.
    """
    if not exists(path):
        raise DataError(f"run folder {path} does not exist", hint_of_runs(path, command))
    if not is_folder(path):
        raise DataError(f"run folder {path} is a file", "`ipucnn runs` lists the runs there are")
    folds = [fold for fold in folds_of(path) if is_run(fold)]
    if folds:
        hint = shown(folds[0]) if command is None else f"ipucnn {command} {shlex.quote(str(folds[0]))}"
        raise DataError(
            f"{path} is a cross-validation of {counted(len(folds), 'fold')}, each of which is a run",
            f"name a fold: {hint}",
        )
    if is_file(path / FOLDS):
        raise DataError(
            f"{path} is a cross-validation without a fold", CONTINUE_FOLDS.format(shlex.quote(str(path)))
        )


def numbered_run_dirs(model: str, dataset: str) -> Iterator[Path]:
    """Yields the default names: ``runs/<model>-<dataset>``, then the same with ``-2``, ``-3``, ... appended."""
    base = f"{folder_name(model)}-{dataset}".replace(":", "-").replace("/", "-")
    yield RUNS / base
    yield from (RUNS / f"{base}-{number}" for number in itertools.count(2))


def is_taken(path: Path) -> bool:
    """Tells whether a name is in use, a link to nothing included."""
    return exists(path) or is_link(path)


def default_run_dir(model: str, dataset: str) -> Path:
    """Returns the first default name that is free."""
    return next(path for path in numbered_run_dirs(model, dataset) if not is_taken(path))


def latest_run_dir(model: str, dataset: str) -> Optional[Path]:
    """Returns the default folder whose run began or went on last, skipping runs killed before they began; else None."""
    names = re.escape(next(numbered_run_dirs(model, dataset)).name) + r"(-[1-9]\d*)?"
    runs = [
        path
        for path in (entries(RUNS) if is_folder(RUNS) else ())
        if re.fullmatch(names, path.name) and is_folder(path) and not is_unfinished(path)
    ]
    return max(runs, key=lambda path: (_began(path), natural_key(path.name)), default=None)


def _began(path: Path) -> float:
    """Returns when the latest process of a run began, in seconds since 1970; if that is not recorded, by its files."""
    with contextlib.suppress(DataError):
        processes = RunFolder(path).processes()
        began = seconds_of(processes[-1].get("started")) if processes else None
        if began is not None:
            return began
    config = path / CONFIG
    return os.stat(config if is_file(config) else path).st_mtime


def seconds_of(started: object) -> Optional[float]:
    """Converts a time of ``environment.json``, with its zone, to seconds since 1970; None if it is no such time."""
    try:
        return datetime.strptime(str(started), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (ValueError, OverflowError):
        return None


def claim_default(model: str, dataset: str, checkpoint_dir: Optional[str] = None) -> RunFolder:
    """Makes the folder of the first default name that is free.

    Several processes that call this at the same time get different folders.

    Raises:
        DataError: the folder cannot be made.
    """
    make_folder(RUNS)
    for path in numbered_run_dirs(model, dataset):
        try:
            os.mkdir(path)
        except FileExistsError:
            continue
        except OSError as error:
            raise DataError(f"run folder {path} cannot be made: {reason_of(error)}", ELSEWHERE) from None
        return RunFolder(path, checkpoint_dir, is_claimed=True)
    raise AssertionError("names do not end")
