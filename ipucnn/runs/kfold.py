"""Cross-validation: one training run per fold, and the mean over them.

``ROOT/config.yml`` is the configuration of the whole, ``ROOT/fold-1`` ... the run folders of the folds, which are
runs like any other, and ``ROOT/folds.json`` the results of those that are finished, written at the beginning and
after each, with the fingerprint of the data that all folds are of.
"""

import contextlib
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, Iterator, List, Literal, Optional, Tuple, Union

import msgspec

from ipucnn.aliases import Annotated, PlainDict
from ipucnn.config import bounds
from ipucnn.config.options import RunConfig
from ipucnn.config.resolve import Resolved, resolve_resumed
from ipucnn.documents import Figures, Finite, Natural, misfit, read_record_if_whole
from ipucnn.errors import ConfigurationError, DataError, UserError
from ipucnn.filesystem import (
    check_makeable,
    entries,
    exists,
    expand,
    is_file,
    is_folder,
    is_link,
    make_folder,
    write_text,
)
from ipucnn.interrupts import Interrupted
from ipucnn.machine import fix_threads
from ipucnn.runs import setup as run_setup
from ipucnn.runs.checkpoints import open_run
from ipucnn.runs.compare import read_run
from ipucnn.runs.folder import CONFIG, FOLDS, RunFolder
from ipucnn.runs.recorder import RunEvent
from ipucnn.runs.rules import check_group
from ipucnn.runs.start import (
    check_new,
    claim_default,
    default_run_dir,
    latest_run_dir,
    network_to_continue,
)
from ipucnn.runs.train import TrainingRun
from ipucnn.sessions.host.cluster import Cluster
from ipucnn.sessions.host.workers import Workers, find_group, resume_command

SCHEMA_VERSION = 1
_NOT_FIGURES = ("samples",)
Threads = Annotated[int, msgspec.Meta(ge=1, le=bounds.MAX_THREADS)]


class _Fold(msgspec.Struct):
    fold: Natural
    run: str
    held_out: List[Natural]
    validation: Optional[Figures]
    train_s: Finite


class _Folds(msgspec.Struct):
    """What ``folds.json`` must have for its folds to count as finished."""

    schema_version: Literal[1]
    kfold: Natural
    folds: List[_Fold]
    data_sha256: Optional[str] = None
    threads: Optional[Threads] = None


@dataclass(frozen=True)
class FoldStarted:
    """A fold's run is prepared; its own events follow."""

    fold: int
    num_folds: int
    run: TrainingRun


@dataclass(frozen=True)
class FoldFinished:
    """A fold is done: its row of ``folds.json``."""

    row: PlainDict


class CrossValidation:
    """Runs the folds of a configuration one after the other, each among all workers, or all instances of ``poprun``;
    the first one of them writes.

    Args:
        resolved: the configuration, with ``kfold``; with ``fold`` only that one is run.
        verbose: let TensorFlow speak.

    Attributes:
        root: the folder of the whole.
        first: the run of the first fold there is to do, prepared.
        folds: those to run.

    Raises:
        UserError: whatever is wrong with the configuration, the data or the folder.
    """

    def __init__(self, resolved: Resolved, verbose: bool = False) -> None:
        config = resolved.config
        self._instances = find_group(config)
        # The workers, once the first fold's have met.
        self._cluster: Optional[Cluster] = None
        if self._instances.count > 1 and config.run_dir is None:
            who = "instances of poprun" if self._instances.is_distributed else "workers"
            raise ConfigurationError(
                f"--kfold in {self._instances.count} {who} needs a folder that all of them are given",
                "add --run-dir DIR",
            )
        if config.checkpoint_dir is not None or config.checkpoint_input_dir is not None:
            raise ConfigurationError(
                "--kfold with a checkpoint folder of its own: every fold has its checkpoints",
                "drop --checkpoint-dir and --checkpoint-input-dir; they go to fold-K/checkpoints",
            )
        if not config.training:
            raise ConfigurationError("--kfold without training has nothing to do", "drop --no-training")
        self.root = self._find_root(resolved)
        self._verbose = verbose
        try:
            self._prepare(resolved)
        except BaseException:
            if config.run_dir is None:
                with contextlib.suppress(OSError):  # which it is if anything is in it
                    self.root.rmdir()
            raise

    def _prepare(self, resolved: Resolved) -> None:
        continued = self._continued(resolved)
        config = continued.config
        # A seed that is drawn is another in each process.
        check_group(self._instances, config)
        seed = run_setup.draw_seed() if config.seed is None else config.seed
        self.resolved = replace(continued, config=replace(config, seed=seed))
        self.num_folds = int(config.kfold or 1)
        self.folds: Tuple[int, ...] = (config.fold,) if config.fold else tuple(range(1, self.num_folds + 1))
        if self._instances.is_writer:
            # The writer may have made folders already where another instance looks later.
            self._check_folders(config)
        record: Any = read_record_if_whole(self.root / FOLDS) if config.resume else None
        is_former = not misfit(record, _Folds) and record["kfold"] == self.num_folds
        former: PlainDict = record if is_former else {}
        self._rows: Dict[int, PlainDict] = {row["fold"]: row for row in former.get("folds", ())}
        # Folds that begin in another process, or elsewhere perhaps, have the threads of those before them.
        self._threads: Optional[int] = former.get("threads")
        if self._threads is not None and config.threads is None:
            fix_threads(self._threads)
        # The first run refuses what all would: nothing is written before it has been prepared.
        self.first = self._make_run(self.folds[0])
        self.data_sha256 = self.first.context.source.pool_sha256
        if former.get("data_sha256") not in (None, self.data_sha256):
            raise ConfigurationError(
                f"the folds in {self.root} are of other data than {self.first.context.info.location} (images or "
                "labels differ), so this run cannot go on with them",
                "give their data with --dataset-path, or another --run-dir",
            )

    def events(self) -> Iterator[Union[FoldStarted, RunEvent, FoldFinished]]:
        """FoldStarted, the run's events and FoldFinished for every fold; writes ``folds.json`` after each.

        Raises:
            Interrupted: by SIGINT or SIGTERM; the fold is saved.
        """
        try:
            yield from self._events()
        except BaseException as error:
            if self._cluster is not None:
                self._cluster.close(error)
            raise
        if self._cluster is not None:
            self._cluster.close()

    def _events(self) -> Iterator[Union[FoldStarted, RunEvent, FoldFinished]]:
        for fold in self.folds:
            run = self.first if fold == self.folds[0] else self._make_run(fold)
            yield FoldStarted(fold, self.num_folds, run)
            # What workers share is written once they have met, of whom one may never come.
            is_written = run.context.start.report is not None
            try:
                if not is_written and not isinstance(self._instances, Workers):
                    is_written = self._write(run)
                for event in run.events():
                    self._cluster = run.cluster
                    is_written = is_written or self._write(run)
                    yield event
            except Interrupted as interrupted:
                hint = interrupted.hint
                if is_written:
                    hint = f"continue it with: {resume_command(self.root, run.context.own_files)}"
                    if len(self.folds) == 1:
                        hint += f" --kfold {self.num_folds} --fold {fold}"
                raise Interrupted(
                    interrupted.exit_code, f"fold {fold}: {interrupted.message}", hint
                ) from None
            self._rows[fold] = self._row(fold, run)
            self._write(run)
            yield FoldFinished(self._rows[fold])
            _forget_graphs()

    def report(self) -> PlainDict:
        """What ``folds.json`` holds: the finished folds, and mean and deviation of their last validations.

        The deviation is the sample's (divided by n - 1); None for one fold.
        """
        rows = [self._rows[fold] for fold in sorted(self._rows)]
        figures = [row["validation"] for row in rows if row["validation"] is not None]
        mean, deviation = {}, {}
        for name in figures[0] if figures else ():
            values = [row.get(name) for row in figures]
            if name not in _NOT_FIGURES and not misfit(values, List[Finite]):
                mean[name], deviation[name] = mean_and_deviation(list(map(float, values)))
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.resolved.config.model_name,
            "dataset": self.resolved.choice.name,
            "kfold": self.num_folds,
            "seed": self.resolved.config.seed,
            "data_sha256": self.data_sha256,
            "threads": self._threads,
            "folds": rows,
            "missing": [fold for fold in range(1, self.num_folds + 1) if fold not in self._rows],
            "mean": mean,
            "std": deviation,
        }

    def _find_root(self, resolved: Resolved) -> Path:
        config = resolved.config
        if config.run_dir is not None:
            return expand(config.run_dir)
        name = f"{resolved.choice.name}-kfold{config.kfold}"
        latest = latest_run_dir(config.model_name, name)
        if latest is not None and config.resume:
            return latest
        if config.dry_run:
            return default_run_dir(config.model_name, name)
        return claim_default(config.model_name, name).path

    def _present(self) -> List[int]:
        """The folds that have a folder."""
        names = [p.name[5:] for p in entries(self.root) if p.name.startswith("fold-") and is_folder(p)]
        return sorted(int(name) for name in names if name.isdecimal())

    def _continued(self, resolved: Resolved) -> Resolved:
        """The configuration of the cross-validation in the root, where there is one to go on with."""
        config = resolved.config
        if config.resume and config.overwrite:
            raise ConfigurationError("--resume and --overwrite are both given", "drop one of them")
        if not config.resume or not is_file(self.root / CONFIG):
            return resolved
        saved = RunFolder(self.root).read_config()
        if saved.kfold is None:
            raise ConfigurationError(
                f"{self.root} is a run, not a cross-validation", "choose another --run-dir, or drop --kfold"
            )
        asked = {name: value for name, value in resolved.typed.items() if name != "fold"}
        merged = resolve_resumed(replace(resolved, typed=asked), saved, str(self.root))
        if merged.record.own is not None:
            merged = self._with_own_network(merged, resolved)
        return replace(merged, config=replace(merged.config, resume=True, overwrite=False, fold=config.fold))

    def _with_own_network(self, merged: Resolved, asked: Resolved) -> Resolved:
        """With a network of one's own as the command line names it, else as the first fold's checkpoint has it."""
        meta, what, name = None, "", merged.config.model_name
        for fold in self._present():
            with contextlib.suppress(UserError):
                run = open_run(fold_path(self.root, fold))
                meta, what = run.checkpoint.meta, f"checkpoint {run.path}"
                break
        record = network_to_continue(asked, name, meta, what, self.root)
        # Each fold takes it as if it had been typed.
        return replace(merged, record=record, typed={**merged.typed, "model_name": record.name})

    def _check_folders(self, config: RunConfig) -> None:
        """Refuses a root that holds something else, and folds that are there without being continued."""
        check_makeable(self.root)
        names = {p.name for p in entries(self.root) if not p.name.startswith(".")}
        known = {CONFIG, FOLDS, *(fold_path(self.root, k).name for k in range(1, self.num_folds + 1))}
        foreign = sorted(names - known)
        if foreign:
            raise ConfigurationError(
                f"{self.root} is not (only) the folder of a cross-validation: it holds {foreign[0]}",
                "choose another --run-dir",
            )
        if config.resume:
            return
        others = ", ".join(str(fold) for fold in self._present() if fold not in self.folds)
        if others:
            raise ConfigurationError(
                f"{self.root} is a cross-validation already, with fold {others}",
                "add --resume to go on with it, or use another --run-dir"
                if not config.overwrite
                else f"rm -r {fold_path(self.root, self.folds[0])}, and add --resume in place of --overwrite; or use "
                "another --run-dir",
            )
        for path in (fold_path(self.root, fold) for fold in self.folds):
            if is_link(path):
                raise DataError(
                    f"{path} is a link, and a cross-validation writes to its own folder alone",
                    f"remove it: rm {path}",
                )
            if exists(path) and not config.overwrite:
                raise ConfigurationError(
                    f"{path} already exists",
                    f"--resume continues it, --overwrite replaces it; or use another --run-dir than {self.root}",
                )
            check_new(path, config.overwrite)

    def _make_run(self, fold: int) -> TrainingRun:
        config, path = self.resolved.config, fold_path(self.root, fold)
        place, overwrite = str(path), config.overwrite and exists(path)
        resolved = replace(
            self.resolved,
            config=replace(config, fold=fold, run_dir=place, overwrite=overwrite),
            typed={**self.resolved.typed, "fold": fold, "seed": config.seed, "run_dir": place},
        )
        return TrainingRun(resolved, self._verbose, self._cluster, parts=False)

    def _row(self, fold: int, run: TrainingRun) -> PlainDict:
        report, train_s = run.final_report, 0.0
        with contextlib.suppress(UserError):  # of a worker that writes nothing there may be none
            train_s = read_run(run.context.folder.path).seconds("execution")
        return {
            "fold": fold,
            "run": fold_path(self.root, fold).name,
            "train": report["dataset"]["train"],
            "evaluation": report["dataset"]["evaluation"],
            "held_out": list(run.context.source.held_out),
            "weight_updates": run.context.program.num_weight_updates,
            "validation": report["validation"],
            "best_validation": report["best_validation"],
            "train_s": train_s or report["measured"]["train_s"],
        }

    def _write(self, run: TrainingRun) -> bool:
        """Writes the root's files; of several processes the first one does.

        Args:
            run: of the fold under way.

        Returns:
            That they are written.
        """
        self._threads = self._threads or run.threads
        if self._instances.is_writer:
            make_folder(self.root)
            # Folds that begin later, among fewer workers perhaps, have as many fused micro-batches.
            sharing = run.context.saved_config().max_workers
            config = replace(
                self.resolved.config,
                fold=None,
                max_workers=sharing,
                run_dir=str(self.root),
                overwrite=False,
                resume=False,
            )
            write_text(self.root / CONFIG, config.to_yaml())
            write_text(self.root / FOLDS, json.dumps(self.report(), indent=2) + "\n")
        return True


def fold_path(root: Path, fold: int) -> Path:
    """The run folder of a fold."""
    return root / f"fold-{fold}"


def mean_and_deviation(values: List[float]) -> Tuple[float, Optional[float]]:
    """Mean and sample standard deviation (n - 1), which one value does not have."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _forget_graphs() -> None:
    """Frees what Keras keeps of the fold's network."""
    if "tensorflow" not in sys.modules:
        return  # the fold was finished before; to import TensorFlow only for this would take seconds, and be loud
    from tensorflow import keras

    keras.backend.clear_session()
