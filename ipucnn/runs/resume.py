"""Decides how a run begins or continues: :func:`find_start` returns Fresh, Continue or Finished, with the run folder.

With ``--resume`` the run in the folder goes on: with the options in its ``config.yml`` (``resolve_resumed`` says which
may change), at its newest readable checkpoint that has more than weights.  A run with a report is finished, unless an
option that moves its end is typed.  A checkpoint has all that is needed (:func:`position`, :func:`restore`): weights,
optimizer, losses of the unfinished execution, the events that were handled, and the history so far.  The order of data,
augmentation, dropout and learning rates are functions of seed and position.  ``RunWriter.reopen`` cuts the files of the
folder back to that history.  :func:`check_same_run` refuses a checkpoint of another run.

All checks are made before anything is computed or written.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from ipucnn.aliases import PlainDict, PlainValue
from ipucnn.config.options import BY_NAME, SPECS, RunConfig
from ipucnn.config.resolve import Resolved, resolve_resumed
from ipucnn.config.spec import Effect
from ipucnn.config.values import path_to_yaml
from ipucnn.datasets.base import DatasetInfo
from ipucnn.datasets.registry import is_folder_name
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.filesystem import entries, real, shown
from ipucnn.models.registry import (
    ModelRecord,
    check_buildable,
    check_same_network,
    saved_network,
)
from ipucnn.python_files import naming_hint
from ipucnn.runs.checkpoints import keras_checkpoints, trained_facts
from ipucnn.runs.early_end import early_end
from ipucnn.runs.folder import (
    CONFIG,
    FOLDS,
    LAST,
    METRICS,
    RunFolder,
    is_checkpoint_name,
    latest_run_dir,
)
from ipucnn.runs.records import Report
from ipucnn.runs.writer import RunWriter, claim_default, default_run_dir, open_writer
from ipucnn.sessions.evaluated import resumed_arrays
from ipucnn.sessions.group import resume_words
from ipucnn.sessions.role import ALONE, Role
from ipucnn.sessions.session import TrainState
from ipucnn.text import counted, quoted, shown_value
from ipucnn.training.checkpoints import Checkpoint, assign_weights, load_checkpoint, read_meta
from ipucnn.training.program import Program


def is_cross_validation(resolved: Resolved) -> bool:
    """Whether a configuration asks for folds, or with ``--resume`` continues a cross-validation."""
    config = resolved.config
    if config.kfold is not None:
        return True
    if not config.resume or config.run_dir is None:
        return False
    path = config.run_dir
    if (path / FOLDS).exists() or not (path / CONFIG).is_file():
        return (path / FOLDS).exists()
    saved = RunFolder(path).read_config()
    return saved.kfold is not None and saved.fold is None


# The number of replicas that validate does not change training.  The other fields follow from options, which are
# compared themselves.
_MAY_DIFFER = (
    *("num_epochs", "num_executions", "validation_num_replicas"),
    *("clip_gradient_norm", "ema_decay", "mixup", "cutmix", "random_erasing"),
)


_OF_DATA = "data set's "


def differences(
    meta: Mapping[str, PlainValue],
    config: RunConfig,
    program: Program,
    info: Optional[DatasetInfo],
    data_sha256: str,
) -> List[str]:
    """Lists how a checkpoint's run differs from the run that is to continue it, one text for each difference.

    Facts that may differ between the parts of one run are left out, and those of the data set if ``info`` is None.
    """

    def options(of: RunConfig) -> PlainDict:
        values = {spec.key: getattr(of, spec.name) for spec in SPECS if spec.effect is Effect.RESULT}
        # A folder of images is compared by its content.
        return {**values, "dataset": "a folder" if is_folder_name(of.dataset) else of.dataset}

    def compared(what: str, before: Mapping[str, PlainValue], now: Mapping[str, PlainValue]) -> List[str]:
        return [
            f"{what}{name} {shown_value(before.get(name))} there, {shown_value(value)} here"
            for name, value in now.items()
            if before.get(name) != value
        ]

    saved = RunConfig.from_yaml(str(meta.get("config", "")), "checkpoint")
    before = meta.get("program", {})
    now = {name: value for name, value in json.loads(program.to_json()).items() if name not in _MAY_DIFFER}
    data: PlainDict = {}
    if info is not None:
        data = {
            "num_eval": info.num_eval,
            "mean": list(info.mean),
            "std": list(info.std),
            "class_names": list(info.class_names),
            "data_sha256": data_sha256,
        }
    # Another number of samples gives another Program.
    return compared("", options(saved), options(config)) or [
        *compared(_OF_DATA, _spaced(meta), _spaced(data)),
        *compared("program's ", _spaced(before), _spaced(now)),
    ]


def _spaced(values: Mapping[str, PlainValue]) -> PlainDict:
    return {name.replace("_", " "): value for name, value in values.items()}


def _rank(path: Path) -> Tuple[bool, float, bool, str]:
    """Returns a sort key for checkpoints: damaged ones first, then the newest first, those with only weights last."""
    try:
        meta = read_meta(path)
        whole, updates = is_whole(meta), float(meta["weight_updates"])
    except DataError:
        whole, updates = True, float("inf")
    return not whole, -updates, path.name != LAST, path.name


def newest_checkpoint(folder: Path) -> Tuple[Optional[Tuple[Path, Checkpoint]], List[str]]:
    """Returns the newest readable checkpoint of a folder, if any, and why newer ones were skipped."""
    bad: List[str] = []
    for path in sorted((p for p in entries(folder) if is_checkpoint_name(p.name)), key=_rank):
        try:
            return (path, load_checkpoint(path)), bad
        except DataError as error:
            bad.append(error.message)
    return None, bad


@dataclass(frozen=True)
class Destination:
    """The run folder to write.

    Attributes:
        folder: the writer of the folder, which may not exist yet.
        is_own: whether it is the folder of the run that ``--resume`` names.
        is_default: whether the run takes the next free default name, because no folder was given.
        replaces: whether files of a former run in it may be replaced.
    """

    folder: RunWriter
    is_own: bool = False
    is_default: bool = False
    replaces: bool = False

    def claim(self, resolved: Resolved) -> RunWriter:
        """Returns the writer of the run; without ``--run-dir``, the process that writes makes the next free folder."""
        if not (self.is_default and self.folder.writes):
            return self.folder
        config = resolved.config
        directory = _checkpoint_dir(config.checkpoint_dir)
        return claim_default(config.model_name, resolved.choice.name, checkpoint_dir=directory)


@dataclass(frozen=True)
class Fresh:
    """A run that begins with its first weight update.

    Attributes:
        resolved: the configuration; that of the run's folder if ``--resume`` names one without a checkpoint.
        target: the folder to write.
        notes: lines for the user.
    """

    resolved: Resolved
    target: Destination
    notes: Tuple[str, ...] = ()


@dataclass(frozen=True)
class Continue:
    """A run that goes on from a checkpoint, in its own folder or in another one.

    What such a run keeps beside its state (:func:`restore`) are the properties here, and the pipeline splits of
    ``program``.

    Attributes:
        resolved, target, notes: as for :class:`Fresh`.
        checkpoint: the checkpoint.
        path: its file.
        weight_updates: the number of weight updates that are done.
    """

    resolved: Resolved
    target: Destination
    checkpoint: Checkpoint
    path: Path
    weight_updates: int
    notes: Tuple[str, ...]

    @property
    def program(self) -> PlainDict:
        """The Program of the checkpoint."""
        return dict(self.checkpoint.meta.get("program", {}))

    @property
    def fused_micro_batches(self) -> Optional[int]:
        """The number of fused micro-batches, which changes the rounding; None if the checkpoint does not say it."""
        return self.program.get("fused_micro_batches")

    @property
    def threads(self) -> Optional[int]:
        """The number of threads per operation, which decides the order of sums; None on IPUs."""
        return self.checkpoint.meta.get("threads")

    @property
    def facts(self) -> DatasetInfo:
        """The facts of the training set; mean and deviation may be those of the weights that the run began with."""
        return trained_facts(self.checkpoint.meta)


@dataclass(frozen=True)
class Finished:
    """A run that is finished already, with its report."""

    resolved: Resolved
    target: Destination
    report: Report


Start = Union[Fresh, Continue, Finished]


def find_start(resolved: Resolved, role: Role = ALONE, locks: bool = False) -> Start:
    """Finds the point where a run begins: anew, or with ``--resume`` at the newest checkpoint of its folder.

    Args:
        resolved: the configuration.
        role: the role of this process.
        locks: whether this process goes on to write the run: a run that is continued in its own folder is locked
            before it is read, so that no other process changes it in between.

    Raises:
        ConfigurationError: the folder is taken or in use, or options contradict those of the run.
        DataError: there is nothing readable to continue from.
    """
    config = resolved.config
    names = config.model_name, resolved.choice.name
    path = config.run_dir
    is_default = path is None and not config.resume
    if path is None and config.resume:
        path = latest_run_dir(*names)
    path = path or default_run_dir(*names)
    if config.resume and (path / CONFIG).is_file():
        run = open_writer(role, path)
        if locks:
            run.lock()
        with run.unlocked_after_error():
            return _with_own_network(_resumed(resolved, run, locks), resolved)
    origins = resolved.origins
    if config.resume and origins["run_dir"].is_typed and not origins["model_name"].is_given:
        raise DataError(
            f"there is no run in {shown(path)}, and no network is named to begin one",
            f"give the folder of a run; or begin one: ipucnn train MODEL --resume --run-dir {quoted(path)}",
        )
    folder = open_writer(role, path, _checkpoint_dir(config.checkpoint_dir))
    folder.check_free(config.overwrite)
    target = Destination(folder, is_default=is_default, replaces=config.overwrite)
    notes = (f"nothing to resume in {path}: the run begins",) if config.resume else ()
    if config.checkpoint_input_dir is None:
        return Fresh(resolved, target, notes)
    given = config.checkpoint_input_dir
    if not config.training and keras_checkpoints(given):
        return Fresh(resolved, target, notes)
    newest, skipped = _read(given)
    if not config.training:
        return Fresh(resolved, target, notes)  # every checkpoint of the folder is validated
    if config.seed is None:
        # Without the seed of the continued run, data order and dropout would be different.
        resolved = replace(resolved, config=replace(config, seed=int(newest[1].meta["seed"])))
    return _from_checkpoint(resolved, target, newest, skipped, notes)


def continued(resolved: Resolved) -> Resolved:
    """Returns the configuration to run: with ``--resume``, that of the run that is continued.

    Raises:
        UserError: see :func:`find_start`.
    """
    if is_cross_validation(resolved) or not resolved.config.resume:
        return resolved  # each fold is a run and finds its own start
    return find_start(resolved).resolved


def _checkpoint_dir(directory: Optional[Path]) -> Optional[Path]:
    return None if directory is None else directory.absolute()


def _resumed(resolved: Resolved, folder: RunWriter, locks: bool) -> Start:
    """Returns the start of a run that goes on in its own folder."""
    saved, path = folder.read_config(), folder.path
    merged = resolve_resumed(resolved, saved, str(path))
    config = merged.config
    folder = folder.with_checkpoints(_checkpoint_dir(config.checkpoint_dir))
    if locks:
        folder.lock()
    target = Destination(folder, is_own=True, replaces=True)
    report = folder.read_report()
    folder.processes()  # a damaged record of them is refused now, before anything is computed
    ends = (spec.name for spec in SPECS if spec.effect is Effect.END)
    changed = {name for name in ends if getattr(config, name) != getattr(saved, name)}
    if report is not None and report.ended_early:
        # A run that ended early would end there again, whatever its number of epochs.
        changed -= {"num_epochs"}
    if report is not None and not changed:
        places = folder.checkpoints, RunFolder(path, saved.checkpoint_dir).checkpoints
        is_elsewhere = real(places[0]) != real(places[1])
        for flag, (given, had), is_other in (
            ("--dataset", (config.dataset, saved.dataset), config.dataset != saved.dataset),
            ("--checkpoint-dir", places, is_elsewhere),
        ):
            if is_other:
                raise ConfigurationError(
                    f"{flag} {shown_value(given)}: the run in {path} is finished, with {shown_value(had)}",
                    "drop it" if report.ended_early else "drop it, or give more --num-epochs",
                )
        return Finished(merged, target, report)
    if report is not None and saved.clean_dir and config.checkpoint_input_dir is None:
        raise DataError(
            f"{path} is finished and its checkpoints were deleted (--clean-dir): nothing to train on from",
            "train again with another --run-dir",
        )
    _check_former_checkpoints(resolved, saved, folder)
    if config.checkpoint_input_dir is not None:
        return _from_checkpoint(merged, target, *_read(config.checkpoint_input_dir))
    newest, skipped = newest_checkpoint(folder.checkpoints)
    if newest is not None and is_whole(newest[1].meta):
        return _from_checkpoint(merged, target, newest, skipped)
    if skipped:
        hint = f"start it again with --overwrite --run-dir {quoted(path)}"
        if newest is not None:
            hint = f"train on from the weights of its best validation with --weights {quoted(newest[0])}, or {hint}"
        raise DataError(f"no checkpoint of {path} is readable; {skipped[0]}", hint)
    return Fresh(merged, target, (f"{path} ended before its first checkpoint: the run begins again",))


def _with_own_network(start: Start, given: Resolved) -> Start:
    """Adds the record of a user's own network to a start: from the command line, else from the checkpoint.

    Raises:
        ConfigurationError: neither names the network.
        DataError: the checkpoint's record is damaged.
    """
    resolved = start.resolved
    if resolved.record.own is None or isinstance(start, Finished):
        return start
    meta, what = (start.checkpoint.meta, str(start.path)) if isinstance(start, Continue) else (None, "")
    record = network_to_continue(
        given, resolved.config.model_name, meta, f"checkpoint {what}", start.target.folder.path
    )
    return replace(start, resolved=replace(resolved, record=record))


def network_to_continue(
    given: Resolved, name: str, meta: Optional[Mapping[str, PlainValue]], what: str, folder: Path
) -> ModelRecord:
    """Returns the record of a user's own network to continue with: from the command line, else from a checkpoint.

    Args:
        given: the configuration of the command line.
        name: the network's name in the run.
        meta: the checkpoint's facts; None if there is no checkpoint.
        what: the checkpoint, for messages.
        folder: the run folder.

    Raises:
        ConfigurationError: neither names the network.
        DataError: the checkpoint's record is damaged.
    """
    if given.origins["model_name"].overrides_run:
        return given.record
    hint = naming_hint(name, folder)
    if meta is None:
        raise ConfigurationError(
            f"{folder} has no checkpoint that says what the network {shown_value(name)} is", hint
        )
    record = saved_network(name, meta.get("network"), what, hint)
    check_buildable(record)
    return record


def _check_former_checkpoints(resolved: Resolved, saved: RunConfig, folder: RunFolder) -> None:
    """Refuses to begin a run again if its checkpoints are in another folder than ``--checkpoint-dir``."""
    if folder.checkpoint_files() or resolved.config.checkpoint_input_dir is not None:
        return
    former = RunFolder(folder.path, saved.checkpoint_dir)
    if former.checkpoints != folder.checkpoints and former.checkpoint_files():
        raise ConfigurationError(
            f"the checkpoints of {folder.path} are in {former.checkpoints}, not in {folder.checkpoints}",
            "use --checkpoint-dir {0}, or add --checkpoint-input-dir {0}".format(quoted(former.checkpoints)),
        )
    if saved.checkpoint_dir and not folder.checkpoints.is_dir() and (folder.path / METRICS).exists():
        raise DataError(
            f"the checkpoint folder {folder.checkpoints} of {folder.path} is not there",
            "bring it back, or give its new place with --checkpoint-dir",
        )


def _read(folder: Path) -> Tuple[Tuple[Path, Checkpoint], List[str]]:
    """Returns the newest readable checkpoint of ``--checkpoint-input-dir``, and why newer ones were skipped."""
    if not folder.is_dir():
        raise DataError(
            f"checkpoint folder {folder} does not exist", "give the checkpoints folder of a run (*.npz files)"
        )
    newest, skipped = newest_checkpoint(folder)
    files = keras_checkpoints(folder)
    if files:
        raise DataError(
            f"{folder} has weight files of Keras, which do not say where a training run goes on",
            f"validate them with --no-training, or start from one of them: --weights {quoted(files[-1])}",
        )
    if newest is None:
        reason = f": {skipped[0]}" if skipped else ""
        raise DataError(
            f"there is no readable checkpoint in {folder}{reason}",
            "give the checkpoints folder of a run (*.npz files)",
        )
    return newest, skipped


def _from_checkpoint(
    resolved: Resolved,
    target: Destination,
    newest: Tuple[Path, Checkpoint],
    skipped: Sequence[str],
    notes: Tuple[str, ...] = (),
) -> Continue:
    """Returns a start from a checkpoint, with notes on its position and on newer checkpoints that were skipped."""
    path, checkpoint = newest
    updates = int(checkpoint.meta["weight_updates"])
    per_epoch = checkpoint.meta.get("program", {}).get("weight_updates_per_epoch")
    epoch = f" (epoch {updates / per_epoch:.2f})" if per_epoch else ""
    warnings = [f"warning: {reason}; the one before it is used" for reason in skipped]
    origin = f"continuing after weight update {updates}{epoch}, checkpoint {path}"
    return Continue(resolved, target, checkpoint, path, updates, (*notes, *warnings, origin))


def check_same_run(
    start: Continue, config: RunConfig, program: Program, info: DatasetInfo, data_sha256: str
) -> None:
    """Refuses a checkpoint that belongs to another run than the one to continue.

    Raises:
        ConfigurationError: it belongs to another run (the error names the first difference), or it has more weight
            updates than the run, or a validation before its last weight update ends the run.
    """
    is_absent = start.resolved.choice.is_absent
    check_same_network(start.resolved.record, start.checkpoint.meta, str(start.path))
    differing = differences(start.checkpoint.meta, config, program, None if is_absent else info, data_sha256)
    if differing:
        way = (
            "--resume, give another --run-dir"
            if config.checkpoint_input_dir is None
            else "--checkpoint-input-dir"
        )
        what, kept = f"{start.path} is of another run", "continue with that run's options"
        if differing[0].startswith(_OF_DATA):
            what, kept = f"{info.name} is not as it was for {start.path}", "bring its files back"
            if info.own_split:
                kept += " if they changed (if not, another version of ipucnn divided the set otherwise)"
        raise ConfigurationError(
            f"{what}: {differing[0]}",
            f"{kept}; or drop {way}, and begin with its weights: --weights {quoted(start.path)}",
        )
    if start.weight_updates > program.num_weight_updates:
        raise ConfigurationError(
            f"--num-epochs {config.num_epochs} are {counted(program.num_weight_updates, 'weight update')}, and "
            f"{start.path} has {start.weight_updates}",
            f"use --num-epochs {-(-start.weight_updates // program.weight_updates_per_epoch)}, or more",
        )
    end = early_end(history_in(start.checkpoint), config) if is_whole(start.checkpoint.meta) else None
    if end is not None and end.weight_updates < start.weight_updates:
        flag = f"--{BY_NAME[end.option].key}"
        raise ConfigurationError(
            f"{flag} {getattr(config, end.option):g} ends the run after weight update {end.weight_updates} "
            f"({end.reason}), and {start.path} has {start.weight_updates}",
            "drop it to continue that run as it was, or drop --resume and give another --run-dir"
            if config.checkpoint_input_dir is None
            else f"drop it, or drop --checkpoint-input-dir, and begin with its weights: --weights {quoted(start.path)}",
        )


# -- the state in a checkpoint


@dataclass
class RunState:
    """The state of a run beside that of its session; saved in every checkpoint.

    Attributes:
        history: the lines of ``metrics.jsonl``.
        best: metrics of the best validation.
        last_validation: metrics of the latest validation.
        notes: remarks on the network and the weights that the run began with.
    """

    history: List[str]
    best: Optional[Dict[str, float]] = None
    last_validation: Optional[Dict[str, float]] = None
    notes: Sequence[str] = ()


def position(state: TrainState, run: RunState) -> Dict[str, Any]:
    """Returns the meta entries of a checkpoint from which a run continues."""
    at: Dict[str, Any] = {"losses": state.losses, "hits": state.accuracies, "events_done": state.events_done}
    if state.earlier_losses:
        at.update(earlier_losses=state.earlier_losses, earlier_hits=state.earlier_accuracies)
    return {
        "weight_updates": state.weight_updates,
        "position": at,
        "run": {
            "history": "".join(run.history),
            "best": run.best,
            "last_validation": run.last_validation,
            **({"notes": list(run.notes)} if run.notes else {}),
        },
    }


def is_whole(meta: Mapping[str, PlainValue]) -> bool:
    """Whether a run can continue from a checkpoint; the best one has only weights, to save space."""
    return {"position", "run"} <= set(meta)


def restore(checkpoint: Checkpoint, state: TrainState, what: str) -> RunState:
    """Restores a session and a run from a checkpoint.

    Args:
        checkpoint: a checkpoint of the same run.
        state: the session's ``TrainState``, changed in place.
        what: the checkpoint's path, for messages.

    Raises:
        DataError: the checkpoint has only weights, or is of another model or optimizer.
    """
    if not is_whole(checkpoint.meta):
        raise DataError(
            f"{what} cannot be continued: it has weights alone, and does not say where its run stood",
            f"start from its weights with: --weights {quoted(what)}",
        )
    weights, slots = resumed_arrays(checkpoint.weights, checkpoint.slots)
    checkpoint = replace(checkpoint, weights=weights, slots=slots)
    assign_weights(state.weights, checkpoint, what=what)
    missing = sorted(set(state.slots) ^ set(checkpoint.slots))
    if missing:
        raise DataError(
            f"{what} does not fit: optimizer state {missing[0]} is not in both",
            "continue with the optimizer it was trained with",
        )
    for name, slot in state.slots.items():
        if tuple(checkpoint.slots[name].shape) != tuple(slot.shape):
            raise DataError(
                f"{what} does not fit: optimizer state {name} is {tuple(checkpoint.slots[name].shape)}, "
                f"not {tuple(slot.shape)}",
                "continue with the model and optimizer it was trained with",
            )
    for name, slot in state.slots.items():
        slot.assign(checkpoint.slots[name])
    at, run = checkpoint.meta["position"], checkpoint.meta["run"]
    state.weight_updates = checkpoint.meta["weight_updates"]
    state.losses, state.accuracies = list(at["losses"]), list(at["hits"])
    state.events_done = at["events_done"]
    state.earlier_losses = list(at.get("earlier_losses", ()))
    state.earlier_accuracies = list(at.get("earlier_hits", ()))
    history = history_in(checkpoint)
    return RunState(history, run["best"], run["last_validation"], run.get("notes", ()))


def history_in(checkpoint: Checkpoint) -> List[str]:
    """Returns the lines of ``metrics.jsonl`` up to a checkpoint from which a run can continue."""
    # Not splitlines, which also splits at separators other than line feeds.
    return [line + "\n" for line in checkpoint.meta["run"]["history"].split("\n")[:-1]]


def resume_command(folder: Path, user_files: Sequence[str]) -> str:
    """Returns the command that continues a run, with the same number of processes if MPI's launcher started it.

    Args:
        folder: the run folder.
        user_files: the command-line words that name the user's own files.
    """
    place = Path(path_to_yaml(folder))
    words = [*resume_words(), "ipucnn", "train", "--resume", "--run-dir", place, *user_files]
    return " ".join(map(quoted, words))
