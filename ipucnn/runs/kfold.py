"""Cross-validation: one training run per fold, and the mean over the folds.

``ROOT/config.yml`` is the configuration of the cross-validation.  ``ROOT/fold-1``, ... are the run folders of the
folds, which are runs like any other.  ``ROOT/folds.json`` has the results of the finished folds and the fingerprint of
their common data; it is written at the beginning and after each fold.
"""

import contextlib
import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

from ipucnn.config.origin import CROSS_VALIDATION, DEFAULT, RUN
from ipucnn.config.resolve import Resolved, resolve_resumed
from ipucnn.documents import Finite, mismatch, read_record_if_present
from ipucnn.errors import ConfigurationError, NoSpaceError, UserError
from ipucnn.events import OPENING, Began, Event, Events
from ipucnn.interrupts import Interrupted
from ipucnn.machine import fix_threads
from ipucnn.runs import setup as run_setup
from ipucnn.runs.checkpoints import TrainedRun, open_run
from ipucnn.runs.compare import read_run
from ipucnn.runs.folder import CONFIG, FOLDS, RUNS, RunFolder, fold_numbers, fold_path, latest_run_dir
from ipucnn.runs.records import Fold, Folds, Report
from ipucnn.runs.resume import network_to_continue, resume_command
from ipucnn.runs.rules import check_group
from ipucnn.runs.train import TrainingRun
from ipucnn.runs.writer import claim_default, default_run_dir, open_writer
from ipucnn.sessions.group import find_group
from ipucnn.sessions.role import find_role

_NOT_FIGURES = ("samples",)


@dataclass(frozen=True)
class FoldStarted(Event):
    """A fold's run is prepared; the events of the run follow."""

    fold: int
    num_folds: int
    run: TrainingRun


@dataclass(frozen=True)
class FoldFinished(Event):
    """A fold is done: its row of ``folds.json``."""

    row: Fold


class CrossValidation:
    """Runs the folds of a configuration one after the other.

    All processes of a group train each fold together; the first of them writes.

    Args:
        resolved: the configuration, with ``kfold``; with ``fold`` only that fold is run.
        verbose: show TensorFlow's own messages.

    Attributes:
        root: the folder of the cross-validation.
        first: the prepared run of the first fold to train.
        folds: the numbers of the folds to train.

    Raises:
        UserError: the configuration, the data or the folder is wrong.
    """

    def __init__(self, resolved: Resolved, verbose: bool = False) -> None:
        config = resolved.config
        self._group = find_group()
        if self._group.size > 1 and config.run_dir is None:
            who = "instances of poprun" if self._group.under_poprun else "processes"
            raise ConfigurationError(
                f"--kfold in {self._group.size} {who} needs a folder that all of them are given",
                "add --run-dir DIR",
            )
        makes_runs = not RUNS.exists()
        self.root = self._find_root(resolved)
        self._verbose = verbose
        # Whether the root has the files from which the cross-validation continues.
        self._is_written = False
        # Before anything is read: between two folds, no other process writes the runs.
        self._folder = open_writer(find_role(), self.root)
        try:
            with self._folder.unlocked_after_error():
                if not config.dry_run:
                    self._folder.lock()
                self._prepare(resolved)
        except BaseException:
            if config.run_dir is None:
                with contextlib.suppress(OSError):  # the folder is not empty
                    self.root.rmdir()
                    if makes_runs:
                        RUNS.rmdir()
            raise

    def _prepare(self, resolved: Resolved) -> None:
        continued = self._continued(resolved)
        config = continued.config
        # Before the seed is drawn: each process would draw another one.
        check_group(self._group, config)
        seed = run_setup.draw_seed() if config.seed is None else config.seed
        self.resolved = replace(continued, config=replace(config, seed=seed))
        self.num_folds = int(config.kfold or 1)
        self.folds: Sequence[int] = (config.fold,) if config.fold else range(1, self.num_folds + 1)
        if self._folder.writes:
            # Only the writer checks: another instance may come later, when the writer has already made folders.
            self._folder.check_free_for_folds(config, self.num_folds, self.folds)
        without = "--resume then finds finished folds by their own files"
        former: Optional[Folds] = None
        if config.resume:
            former = read_record_if_present(self.root / FOLDS, without, Folds)
            if former is not None and former.kfold != self.num_folds:
                former = None
        self._rows: Dict[int, Fold] = {} if former is None else {row.fold: row for row in former.folds}
        # Folds that begin in another process, or on another machine, use the same number of threads as those before.
        self._threads = None if former is None else former.threads
        if self._threads is not None and config.threads is None:
            fix_threads(self._threads)
        # Preparing the first run makes the checks of all runs, before anything is written.
        self.first = self._make_run(self.folds[0])
        self.data_sha256 = self.first.context.source.pool_sha256
        digest = None if former is None else former.data_sha256
        if config.resume and not (digest == self.data_sha256 if digest else self._are_folds_of_this_data()):
            raise ConfigurationError(
                f"the folds in {self.root} are of other data than {self.first.context.info.location} (images or "
                "labels differ), so this run cannot go on with them",
                "give their data with --dataset-path, or another --run-dir",
            )

    def _are_folds_of_this_data(self) -> bool:
        """Whether all checkpoints were trained on the data that their folds have here, for a missing ``folds.json``."""
        for fold, trained in self._readable():
            run = self.first if fold == self.folds[0] else self._make_run(fold)
            if trained.meta.get("data_sha256") != run.context.data_sha256:
                return False
            if run is not self.first:
                run.context.folder.unlock()
        return True

    def _readable(self) -> Iterator[Tuple[int, TrainedRun]]:
        """Yields the folds that have a readable checkpoint, with it."""
        for fold in fold_numbers(self.root):
            with contextlib.suppress(UserError):  # there is nothing to continue
                yield fold, open_run(fold_path(self.root, fold))

    def events(self) -> Events[None]:
        """Yields FoldStarted, the run's events and FoldFinished for every fold; writes ``folds.json`` after each.

        Raises:
            Interrupted: SIGINT or SIGTERM arrived; the fold is saved.
            NoSpaceError: a disk is full; finished folds and the last checkpoint of this one stay.
        """
        try:
            yield from self._events()
        finally:
            self._folder.unlock()

    def _events(self) -> Events[None]:
        for fold in self.folds:
            run = self.first
            if fold != self.folds[0]:
                yield Began(OPENING)
                run = self._make_run(fold)
            yield FoldStarted(fold, self.num_folds, run)
            try:
                # What is thrown while an event is shown has to reach the run, which decides what is left of it.
                yield from run.events(partial(self._write, run))
            except Interrupted as interrupted:
                hint = self._continuing(run) if self._is_written else interrupted.hint
                raise Interrupted(
                    interrupted.exit_code, f"fold {fold}: {interrupted.message}", hint
                ) from None
            except NoSpaceError as error:
                hint = f"free some space, and {self._continuing(run)}" if self._is_written else error.hint
                raise NoSpaceError(f"fold {fold}: {error.message}", hint) from error
            self._rows[fold] = self._row(fold, run)
            self._write(run)
            yield FoldFinished(self._rows[fold])
            _forget_graphs()

    def _continuing(self, run: TrainingRun) -> str:
        """Returns words for a hint with the command that continues after a fold that ended early."""
        alone = f" --kfold {self.num_folds} --fold {self.folds[0]}" if len(self.folds) == 1 else ""
        return f"continue it with: {resume_command(self.root, run.context.own_files)}{alone}"

    def report(self) -> Folds:
        """Returns the content of ``folds.json``: finished folds, and mean and deviation of their last validations.

        The deviation is the sample standard deviation (divided by n - 1); None for one fold.
        """
        rows = [self._rows[fold] for fold in sorted(self._rows)]
        figures = [row.validation for row in rows if row.validation is not None]
        mean, deviation = {}, {}
        for name in dict.fromkeys(name for row in figures for name in row):
            values = [row[name] for row in figures if name in row]  # a fold may lack a class of masks
            if name not in _NOT_FIGURES and not mismatch(values, List[Finite]):
                mean[name], deviation[name] = mean_and_deviation([float(value or 0) for value in values])
        return Folds(
            schema_version=1,
            model=self.resolved.config.model_name,
            dataset=self.resolved.choice.name,
            kfold=self.num_folds,
            seed=self.resolved.config.seed,
            data_sha256=self.data_sha256,
            threads=self._threads,
            folds=rows,
            missing=[fold for fold in range(1, self.num_folds + 1) if fold not in self._rows],
            mean=mean,
            std=deviation,
        )

    def _find_root(self, resolved: Resolved) -> Path:
        config = resolved.config
        if config.run_dir is not None:
            return config.run_dir
        name = f"{resolved.choice.name}-kfold{config.kfold}"
        latest = latest_run_dir(config.model_name, name)
        if latest is not None and config.resume:
            return latest
        if config.dry_run:
            return default_run_dir(config.model_name, name)
        return claim_default(config.model_name, name).path

    def _continued(self, resolved: Resolved) -> Resolved:
        """Returns the configuration of the cross-validation to continue; without one, the given configuration."""
        config = resolved.config
        if not config.resume or not (self.root / CONFIG).is_file():
            return resolved
        saved = RunFolder(self.root).read_config()
        if saved.kfold is None:
            raise ConfigurationError(
                f"{self.root} is a run, not a cross-validation", "choose another --run-dir, or drop --kfold"
            )
        # The saved configuration is that of all folds.
        without_fold = replace(resolved, origins={**resolved.origins, "fold": DEFAULT})
        merged = resolve_resumed(without_fold, saved, str(self.root))
        if merged.record.own is not None:
            merged = self._with_own_network(merged, resolved)
        # What the user typed again is asked of each fold, too.
        again = [name for name, origin in resolved.origins.items() if origin.by_user]
        asked = {name: CROSS_VALIDATION for name in again if merged.origins[name] == RUN}
        return replace(
            merged,
            config=replace(merged.config, resume=True, overwrite=False, fold=config.fold),
            origins={**merged.origins, **asked},
        )

    def _with_own_network(self, merged: Resolved, given: Resolved) -> Resolved:
        """Adds the record of a user's own network: from the command line, else from the first readable checkpoint."""
        _, trained = next(self._readable(), (0, None))
        meta, what = (None, "") if trained is None else (trained.meta, f"checkpoint {trained.path}")
        record = network_to_continue(given, merged.config.model_name, meta, what, self.root)
        # Each fold takes the network from here.
        return replace(merged, record=record, origins={**merged.origins, "model_name": CROSS_VALIDATION})

    def _make_run(self, fold: int) -> TrainingRun:
        config, path = self.resolved.config, fold_path(self.root, fold)
        overwrite = config.overwrite and path.exists()
        resolved = replace(
            self.resolved,
            config=replace(config, fold=fold, run_dir=path, overwrite=overwrite),
            origins={**self.resolved.origins, **dict.fromkeys(("fold", "seed", "run_dir"), CROSS_VALIDATION)},
        )
        return TrainingRun(resolved, self._verbose)

    def _row(self, fold: int, run: TrainingRun) -> Fold:
        report, train_s = run.final_report, 0.0
        assert isinstance(report, Report)
        path, updates = run.context.folder.path, run.context.program.num_weight_updates
        if (path / CONFIG).is_file():  # a process that writes nothing may have no run folder
            written = read_run(path)
            train_s, updates = written.seconds("execution"), written.weight_updates
        return Fold(
            fold=fold,
            run=fold_path(self.root, fold).name,
            train=report.dataset.train,
            evaluation=report.dataset.evaluation,
            held_out=list(run.context.source.held_out),
            weight_updates=updates,
            validation=report.validation,
            best_validation=report.best_validation,
            train_s=train_s or report.measured.train_s,
            ended_early=report.ended_early,
        )

    def _write(self, run: TrainingRun) -> None:
        """Writes the files of the root; the run is that of the current fold."""
        self._threads = self._threads or run.threads
        # Folds that begin later, perhaps with fewer workers, fuse the same number of micro-batches.
        config = replace(
            self.resolved.config,
            fold=None,
            max_workers=run.context.saved_config().max_workers,
            run_dir=self.root,
            overwrite=False,
            resume=False,
        )
        self._folder.write_folds(config, self.report())
        self._is_written = True


def mean_and_deviation(values: List[float]) -> Tuple[float, Optional[float]]:
    """Returns the mean and the sample standard deviation (n - 1), which is None for one value."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _forget_graphs() -> None:
    """Clears Keras's global state, so that the fold's network is freed."""
    if "tensorflow" not in sys.modules:
        return  # an earlier process finished the fold; importing TensorFlow only for this takes seconds
    from tensorflow import keras

    keras.backend.clear_session()
