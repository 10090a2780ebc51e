"""Writes the folder of one run, and decides what this process may write, lock and replace there.

:func:`open_writer` gives the process that writes the run a :class:`RunWriter`, and any other a :class:`SilentWriter`,
which has the same methods and writes nothing.  ``folder.py`` says what the files are, and reads them.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Callable, ClassVar, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence

import msgspec
import numpy as np

from ipucnn.aliases import PlainDict
from ipucnn.config.options import RunConfig
from ipucnn.errors import ConfigurationError, DataError, WorkersError
from ipucnn.filesystem import (
    append_text,
    check_makeable,
    entries,
    locked,
    make_folder,
    reason_of,
    remove_file,
    remove_folder,
    remove_temporaries,
    temporary_of,
    write_atomically,
    write_text,
)
from ipucnn.runs.folder import (
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    FOLDS,
    METRICS,
    PAGE,
    PROGRAM,
    REPORT,
    RUN_FILES,
    RUNS,
    TENSORBOARD,
    THRESHOLDS,
    WANDB,
    KeptThreshold,
    RunFolder,
    fold_numbers,
    fold_path,
    is_checkpoint_name,
    is_unfinished,
    numbered_run_dirs,
)
from ipucnn.runs.overwriting import check_replaceable
from ipucnn.runs.records import Folds, Report, plain
from ipucnn.sessions.role import Role
from ipucnn.text import quoted
from ipucnn.training.program import BuiltProgram

Arrays = Mapping[str, np.ndarray]
ELSEWHERE = "choose another --run-dir"
_OURS = (*RUN_FILES, CHECKPOINTS, TENSORBOARD, WANDB)
_CURVES = "events.out.tfevents."


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


def open_writer(role: Role, path: Path, checkpoint_dir: Optional[Path] = None) -> "RunWriter":
    """Returns the writer of a run's folder for a process of this role; see :class:`RunWriter` for the arguments."""
    if role.writes:
        return RunWriter(path, checkpoint_dir)
    return SilentWriter(path, checkpoint_dir, role.rank)


class RunWriter(RunFolder):
    """Writes the folder of a run; it may not exist yet.

    Args:
        path: the folder.
        checkpoint_dir: the folder of the checkpoints, if they are not in the run folder.
        is_claimed: whether this process made the empty folder for the run.
    """

    writes: ClassVar[bool] = True
    """Whether this process writes the run, and draws, logs and checks for all of its processes."""

    def __init__(self, path: Path, checkpoint_dir: Optional[Path] = None, is_claimed: bool = False) -> None:
        super().__init__(path, checkpoint_dir)
        self._locks = _Locks()
        # The token of this process in ``environment.json``; None before it created or reopened the folder.
        self._token: Optional[str] = None
        # The folders that this process made, if the run folder has no files of an earlier run; else None.
        self._made: Optional[List[Path]] = [path] if is_claimed else None

    def with_checkpoints(self, checkpoint_dir: Optional[Path]) -> "RunWriter":
        """Returns the writer with another folder of checkpoints; both have the same locks."""
        writer = RunWriter(self.path, checkpoint_dir)
        writer._locks = self._locks
        return writer

    # -- may this process write the folder? ----------------------------------------------------------------------------

    def check_free(self, overwrite: bool) -> None:
        """Refuses a run folder, or a ``--checkpoint-dir``, that is taken, before anything is computed.

        Args:
            overwrite: whether files of an earlier run may be replaced.

        Raises:
            ConfigurationError: the folder exists and ``overwrite`` is not set, or it holds files that no run wrote.
            DataError: one of its parents is a file.
        """
        path, checkpoints = self.path, self.checkpoints
        check_makeable(path)
        if not is_unfinished(path):
            # Temporary files of killed runs count as files of runs.
            names = [p.name for p in entries(path) if temporary_of(p.name) not in RUN_FILES]
            foreign = [name for name in names if name not in _OURS]
            check_replaceable(
                path, foreign, CONFIG, "a run folder", overwrite, continues="--resume continues it"
            )
        if checkpoints == path / CHECKPOINTS:
            return
        run, outside = path.absolute(), checkpoints.absolute()
        if outside != run / CHECKPOINTS and (outside == run or run in outside.parents):
            raise ConfigurationError(
                f"checkpoint folder {checkpoints} lies in the run folder {path}",
                f"leave --checkpoint-dir out (they go to {path / CHECKPOINTS}), or choose a folder elsewhere",
            )
        check_makeable(checkpoints)
        if not overwrite and self.checkpoint_files():
            raise ConfigurationError(
                f"checkpoint folder {checkpoints} holds another run's checkpoints",
                "use another --checkpoint-dir, or --overwrite to replace them",
            )

    def check_free_for_folds(self, config: RunConfig, num_folds: int, folds: Sequence[int]) -> None:
        """Refuses the folder of a cross-validation that is taken, before anything is computed.

        Args:
            config: the configuration; with ``resume`` the folds may exist, with ``overwrite`` those of ``folds``.
            num_folds: the number of all folds.
            folds: the numbers of the folds that will run.

        Raises:
            ConfigurationError: it has files of something else, or folds that are neither continued nor replaced.
            DataError: one of its parents is a file, or a fold is a link.
        """
        root = self.path
        check_makeable(root)
        if config.resume and (root / CONFIG).is_file():
            return
        names = {p.name for p in entries(root) if not p.name.startswith(".")}
        # The names decide, not the folds: a number of folds may be typed that no data set has.
        taken = {name: int(name[5:]) for name in names if re.fullmatch(r"fold-[1-9][0-9]*", name)}
        taken = {name: fold for name, fold in taken.items() if fold <= num_folds}
        foreign = sorted(names - {CONFIG, FOLDS, *taken})
        if foreign:
            raise ConfigurationError(
                f"{root} is not (only) the folder of a cross-validation: it holds {foreign[0]}", ELSEWHERE
            )
        if config.resume:
            return
        other_folds = ", ".join(str(fold) for fold in fold_numbers(root) if fold not in folds)
        if other_folds:
            raise ConfigurationError(
                f"{root} is a cross-validation already, with fold {other_folds}",
                "add --resume to go on with it, or use another --run-dir"
                if not config.overwrite
                else f"rm -r {quoted(fold_path(root, folds[0]))}, and add --resume in place of --overwrite; or use "
                "another --run-dir",
            )
        for path in (fold_path(root, fold) for fold in sorted(taken.values()) if fold in folds):
            if path.is_symlink():
                raise DataError(
                    f"{path} is a link, and a cross-validation writes to its own folder alone",
                    f"remove it: rm {quoted(path)}",
                )
            if path.exists() and not config.overwrite:
                raise ConfigurationError(
                    f"{path} already exists",
                    f"--resume continues it, --overwrite replaces it; or use another --run-dir than {root}",
                )
            RunWriter(path).check_free(config.overwrite)

    def lock(self) -> None:
        """Locks the run against other processes, until :meth:`unlock` or until this process ends in any way.

        Folders that do not exist are not locked; call it again when they do.

        Raises:
            ConfigurationError: another process is writing the run.
        """
        in_use = {}
        for folder, flag in ((self.path, "--run-dir"), (self.checkpoints, "--checkpoint-dir")):
            if not folder.is_dir() or (folder is self.checkpoints and folder.parent == self.path):
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

    # -- the folder ----------------------------------------------------------------------------------------------------

    def create(self, config: RunConfig, program: BuiltProgram, replace: bool = False) -> None:
        """Makes the folder and its first files.  If that fails, a new folder is removed again.

        Args:
            config: the configuration of the run.
            program: the Program of the run.
            replace: whether the files of a former run may be replaced; :meth:`check_free` has allowed it.

        Raises:
            DataError: the folder cannot be written.
            ConfigurationError: another process is writing the folder, or has written it since :meth:`check_free`.
        """
        self._refuse_links()
        new = [p for p in (self.path, self.checkpoints) if not p.exists()]
        is_free = not self.path.exists() or is_unfinished(self.path)
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
                *self.checkpoint_files(),
                *([] if inside.checkpoints.is_symlink() else inside.checkpoint_files()),
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
                if self.checkpoint_files():
                    return
                self._remove_files()
                _remove_empty(self.path / TENSORBOARD)
            for folder in reversed(new_folders):
                _remove_empty(folder)

    def _refuse_links(self) -> None:
        """Refuses links in place of subfolders: a run folder may come from other people, and a link leads outside."""
        inside = (self.checkpoints,) if self.checkpoints == self.path / CHECKPOINTS else ()
        for folder in (*inside, self.path / TENSORBOARD, self.path / WANDB):
            if folder.is_symlink():
                hint = f"remove it: rm {quoted(folder)}"
                if folder in inside:
                    hint += "; checkpoints go elsewhere with --checkpoint-dir"
                raise DataError(f"{folder} is a link, and a run writes to its own folder alone", hint)

    def _check_still_free(self) -> None:
        """Refuses a folder in which another process has put a configuration or checkpoints since ``check_free``."""
        if (self.path / CONFIG).exists() or self.checkpoint_files():
            taken = self.path if (self.path / CONFIG).exists() else self.checkpoints
            raise ConfigurationError(
                f"{taken} was written by another run meanwhile", "use another folder, or --overwrite"
            )

    def _remove_files(self, kept: Sequence[str] = ()) -> None:
        """Deletes the files of a run, but not its checkpoints."""
        curves = self.path / TENSORBOARD
        old = [] if curves.is_symlink() else [p for p in entries(curves) if p.name.startswith(_CURVES)]
        for path in (*(self.path / name for name in RUN_FILES if name not in kept), *old):
            remove_file(path)
        remove_folder(self.path / WANDB)
        self._remove_temporaries()

    def _remove_temporaries(self) -> None:
        remove_temporaries(self.path, lambda name: name in RUN_FILES)
        remove_temporaries(self.checkpoints, is_checkpoint_name)

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

    # -- its files -----------------------------------------------------------------------------------------------------

    def append(self, name: str, line: str) -> None:
        """Adds a line to a file of the run."""
        self.check_writer()
        append_text(self.path / name, line)

    def delete(self, name: str) -> None:
        """Deletes a file of the run, if there is one."""
        self.check_writer()
        remove_file(self.path / name)

    def add_environment(self, facts: PlainDict) -> List[PlainDict]:
        """Adds this process to ``environment.json``; returns the entries of all processes, this one last."""
        self.check_writer()
        self._token = self._token or secrets.token_hex(8)
        processes = [*self._finished_processes(), {**facts, "writer": self._token}]
        write_text(self.path / ENVIRONMENT, json.dumps(processes, indent=2) + "\n")
        return processes

    def keep_threshold(self, weight_updates: int, threshold: KeptThreshold) -> None:
        """Saves the threshold of a checkpoint for ``ipucnn infer``.

        Raises:
            DataError: the folder cannot be written to.
        """
        known = {**self.thresholds(), str(weight_updates): threshold}
        write_text(self.path / THRESHOLDS, json.dumps(msgspec.to_builtins(known), indent=1) + "\n")

    def write_file(self, name: str, write: Callable[[Path], object]) -> Path:
        """Writes a picture or the page of the run, whole or not at all, and returns its path.

        Args:
            name: the name of the file.
            write: function that writes the file whose path it is given.
        """
        self.check_writer()
        write_atomically(self.path / name, write)
        return self.path / name

    def write_report(self, report: Report) -> None:
        """Writes ``report.json``."""
        self.check_writer()
        write_text(self.path / REPORT, json.dumps(plain(report), indent=2) + "\n")

    def write_folds(self, config: RunConfig, folds: Folds) -> None:
        """Writes the files of a cross-validation, whose folder this is: its configuration and ``folds.json``."""
        make_folder(self.path)
        self.lock()
        write_text(self.path / CONFIG, config.to_yaml())
        write_text(self.path / FOLDS, json.dumps(plain(folds), indent=2) + "\n")

    def write_checkpoint(self, name: str, weights: Arrays, slots: Arrays, meta: PlainDict) -> Path:
        """Writes ``checkpoints/<name>`` atomically and returns its path."""
        from ipucnn.training.checkpoints import save_checkpoint

        def save(temporary: Path) -> None:
            save_checkpoint(temporary, weights, slots, meta)
            self.check_writer()

        write_atomically(self.checkpoints / name, save)
        return self.checkpoints / name

    def link_checkpoint(self, source: str, name: str) -> Path:
        """Makes ``checkpoints/<name>`` a hard link to another checkpoint, or a copy where links are not possible."""

        def link(temporary: Path) -> None:
            try:
                os.link(self.checkpoints / source, temporary)
            except OSError:
                shutil.copyfile(self.checkpoints / source, temporary)
            self.check_writer()

        write_atomically(self.checkpoints / name, link)
        return self.checkpoints / name

    def clean(self, names: Iterable[str]) -> None:
        """Deletes checkpoints of the run, and their folder if it is then empty."""
        self.check_writer()
        for name in names:
            if is_checkpoint_name(name):
                remove_file(self.checkpoints / name)
        with contextlib.suppress(OSError):
            _remove_empty(self.checkpoints)


class SilentWriter(RunWriter):
    """Writes and deletes nothing, for the processes after the first, which writes the run.

    With ``--ckpt-all-instances`` it keeps its own copy of the checkpoints, in ``instance-1``, ... of
    ``--checkpoint-dir``: each instance of ``poprun`` may be on another host, whose disk the first one cannot see.
    """

    writes = False

    def __init__(self, path: Path, checkpoint_dir: Optional[Path], rank: int) -> None:
        super().__init__(path, checkpoint_dir)
        self._rank = rank
        # Writes the copies; None without --ckpt-all-instances.
        self._copies: Optional[RunWriter] = None

    def with_checkpoints(self, checkpoint_dir: Optional[Path]) -> "SilentWriter":
        return SilentWriter(self.path, checkpoint_dir, self._rank)

    def check_free(self, overwrite: bool) -> None:
        """Checks nothing: the first process may have made the folder already."""

    def lock(self) -> None:
        """Locks nothing."""

    def create(self, config: RunConfig, program: BuiltProgram, replace: bool = False) -> None:
        """Makes only the folder for its own copies of checkpoints, if it keeps them."""
        if config.ckpt_all_instances:
            copies = self.checkpoints / f"instance-{self._rank}"
            self._copies = RunWriter(self.path, copies)
            make_folder(copies)

    def reopen(self, config: RunConfig, program: BuiltProgram, history: Sequence[str]) -> None:
        self.create(config, program)

    def append(self, name: str, line: str) -> None:
        """Writes nothing."""

    def delete(self, name: str) -> None:
        """Deletes nothing."""

    def add_environment(self, facts: PlainDict) -> List[PlainDict]:
        """Writes nothing; returns this process alone."""
        return [facts]

    def keep_threshold(self, weight_updates: int, threshold: KeptThreshold) -> None:
        """Writes nothing."""

    def write_file(self, name: str, write: Callable[[Path], object]) -> Path:
        """Writes nothing; returns the path of the first process's file."""
        return self.path / name

    def write_report(self, report: Report) -> None:
        """Writes nothing."""

    def write_folds(self, config: RunConfig, folds: Folds) -> None:
        """Writes nothing."""

    def checkpoint_files(self) -> List[Path]:
        return super().checkpoint_files() if self._copies is None else self._copies.checkpoint_files()

    def write_checkpoint(self, name: str, weights: Arrays, slots: Arrays, meta: PlainDict) -> Path:
        """Writes only its own copy; returns the path at which the first process writes the checkpoint."""
        if self._copies is not None:
            return self._copies.write_checkpoint(name, weights, slots, meta)
        return self.checkpoints / name

    def link_checkpoint(self, source: str, name: str) -> Path:
        if self._copies is not None:
            return self._copies.link_checkpoint(source, name)
        return self.checkpoints / name

    def clean(self, names: Iterable[str]) -> None:
        if self._copies is not None:
            self._copies.clean(names)


def _remove_empty(folder: Path) -> None:
    if folder.is_dir() and not entries(folder):
        folder.rmdir()


def default_run_dir(model: str, dataset: str) -> Path:
    """Returns the first default name that is free; a link to nothing is not."""
    return next(
        path for path in numbered_run_dirs(model, dataset) if not path.exists() and not path.is_symlink()
    )


def claim_default(model: str, dataset: str, checkpoint_dir: Optional[Path] = None) -> RunWriter:
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
        return RunWriter(path, checkpoint_dir, is_claimed=True)
    raise AssertionError("names do not end")
