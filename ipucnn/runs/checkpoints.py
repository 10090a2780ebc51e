"""A run's checkpoints: what they hold beside weights, which of them a run goes on from, and opening one that is done.

A checkpoint is all that is needed to go on: model, optimizer, position (data order, augmentation, dropout and
schedule are pure functions of seed and position), the half-done execution, and the history so far.  The file itself
is ``training/checkpoints.py``.  Nothing here imports TensorFlow; what has weights to fill gets a built network.
"""

import json
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from ipucnn.aliases import KerasModel, TfVariable
from ipucnn.config.options import RunConfig
from ipucnn.config.resolve import RESUMABLE, Resolved, resolve_resumed
from ipucnn.datasets.base import DatasetInfo
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.filesystem import Kind, absolute, entries, exists, expand, is_file, is_folder, kind_of
from ipucnn.models.registry import get_model
from ipucnn.runs.folder import (
    BEST,
    CHECKPOINTS,
    CONFIG,
    FOLDS,
    LAST,
    METRICS,
    RunFolder,
    check_checkpoint_dir,
    check_new,
    check_new_checkpoints,
    claim_default,
    default_run_dir,
    is_checkpoint_name,
    is_unfinished,
    latest_run_dir,
)
from ipucnn.sessions.session import NotFiniteError, TrainState, is_checkpoint_due
from ipucnn.text import shown_value
from ipucnn.training.checkpoints import Checkpoint, assign_weights, load_checkpoint, read_meta
from ipucnn.training.program import Program


@dataclass
class RunState:
    """What a run knows beside the session's state; saved in every checkpoint.

    Attributes:
        history: the lines of ``metrics.jsonl``.
        best: metrics of the best validation.
        last_validation: metrics of the latest validation.
    """

    history: List[str]
    best: Optional[Dict[str, float]] = None
    last_validation: Optional[Dict[str, float]] = None


def position(state: TrainState, run: RunState) -> Dict[str, Any]:
    """The meta entries that say where a run stands."""
    at: Dict[str, Any] = {"losses": state.losses, "hits": state.hits, "events_done": state.events_done}
    if state.earlier_losses:
        at.update(earlier_losses=state.earlier_losses, earlier_hits=state.earlier_hits)
    return {
        "weight_updates": state.weight_updates,
        "position": at,
        "run": {
            "history": "".join(run.history),
            "best": run.best,
            "last_validation": run.last_validation,
        },
    }


def arrays(variables: Mapping[str, "TfVariable"], learning_rate: float) -> Dict[str, np.ndarray]:
    """The variables' values, if all of them are finite.

    Raises:
        NotFiniteError: naming the first that is not.
    """
    values = {name: variable.numpy() for name, variable in variables.items()}
    for name, value in values.items():
        if not np.all(np.isfinite(value)):
            raise NotFiniteError(
                f"{name} is no longer finite; no checkpoint of it is written",
                f"lower the learning rate (it was {learning_rate:.4g}); checkpoints written before are kept",
            )
    return values


def restore(checkpoint: Checkpoint, state: TrainState, what: str) -> RunState:
    """Puts a session and a run back to where a checkpoint was written.

    Args:
        checkpoint: of the same run.
        state: the session's ``TrainState``, changed in place.
        what: the checkpoint's path, for messages.

    Raises:
        DataError: it is of another model or optimizer.
    """
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
    if not {"position", "run"} <= set(checkpoint.meta):
        raise DataError(
            f"{what} cannot be continued: it does not say where its run stood",
            "start from its weights alone with: --weights " + what,
        )
    at, run = checkpoint.meta["position"], checkpoint.meta["run"]
    state.weight_updates = checkpoint.meta["weight_updates"]
    state.losses, state.hits = list(at["losses"]), list(at["hits"])
    state.events_done = at["events_done"]
    state.earlier_losses = list(at.get("earlier_losses", ()))
    state.earlier_hits = list(at.get("earlier_hits", ()))
    # Not splitlines, which also splits where text has other separators than line feeds.
    history = [line + "\n" for line in run["history"].split("\n")[:-1]]
    return RunState(history, run["best"], run["last_validation"])


def differences(
    meta: Mapping[str, Any], config: RunConfig, program: Program, info: DatasetInfo, data_sha256: str
) -> List[str]:
    """In what a checkpoint's run differs from the one that is to continue it, one text each.

    What may differ between the parts of one run is left out.
    """
    saved = RunConfig.from_yaml(str(meta.get("config", "")), "checkpoint")
    found = [
        f"{field.name.replace('_', '-')} {shown_value(getattr(saved, field.name))} there, "
        f"{shown_value(getattr(config, field.name))} here"
        for field in fields(RunConfig)
        if field.name not in RESUMABLE and getattr(saved, field.name) != getattr(config, field.name)
    ]
    if not found:
        # How many replicas validate changes nothing that is trained; the options that decide it were compared above.
        ignored = ("num_epochs", "num_executions", "splits_from", "validation_num_replicas")
        # A program of an earlier version lacks what it did not know yet.
        since = {f.name: f.default for f in fields(Program) if f.default is not MISSING}
        here, there = program.to_dict(), {**since, **meta.get("program", {})}
        here = json.loads(json.dumps(here))
        found = [
            f"program's {name.replace('_', ' ')} {shown_value(there.get(name))} there, {shown_value(value)} here"
            for name, value in here.items()
            if name not in ignored and there.get(name) != value
        ]
        facts = {
            "num_eval": info.num_eval,
            "mean": list(info.mean),
            "std": list(info.std),
            "class_names": list(info.class_names),
            "data_sha256": data_sha256,
        }
        found += [
            f"data set's {name.replace('_', ' ')} {shown_value(meta.get(name))} there, {shown_value(value)} here"
            for name, value in facts.items()
            if meta.get(name) != value
        ]
    return found


def list_checkpoints(folder: Path, state: TrainState) -> Tuple[List[Path], List[str]]:
    """The checkpoints of a folder that can be read, and what is wrong with each of the others.

    These are the numbered ones in the order they were trained; where there are none, the last or else the best one.

    Args:
        folder: was found to have at least one checkpoint that can be read.
        state: of the session; its weights are overwritten with those of each checkpoint, to see that they fit.

    Raises:
        DataError: one of them is of another model.
    """
    names = [path for path in entries(folder) if is_checkpoint_name(path.name)]
    names = [path for path in names if path.name not in (LAST, BEST)] or [
        path for name in (LAST, BEST) for path in names if path.name == name
    ][:1]
    good, bad = [], []
    for path in names:
        try:
            checkpoint = load_checkpoint(path)
        except DataError as error:
            bad.append(error.message)
            continue
        assign_weights(state.weights, checkpoint, what=str(path))
        good.append(path)
    return good, bad


def load_for_validation(path: Path, state: TrainState) -> int:
    """Loads a checkpoint's weights alone; returns its weight updates.

    Raises:
        DataError: it is of another model.
    """
    checkpoint = load_checkpoint(path)
    assign_weights(state.weights, checkpoint, what=str(path))
    return int(checkpoint.meta["weight_updates"])


def checkpoint_name(weight_updates: int) -> str:
    """File name of a numbered checkpoint."""
    return f"checkpoint-{weight_updates:08d}.npz"


def written_names(program: Program, first: int, last: int) -> List[str]:
    """The checkpoints that a run over weight updates ``first`` to ``last`` has written, the unnumbered ones too."""
    per_execution, names = program.weight_updates_per_execution, [BEST, LAST]
    for done in range(max(1, -(-first // per_execution)), last // per_execution + 1):
        if is_checkpoint_due(program, done):
            names.append(checkpoint_name(done * per_execution))
    return names


def has_checkpoints(folder: Path) -> bool:
    """Whether there is a checkpoint, good or bad, in a folder."""
    return any(is_checkpoint_name(path.name) for path in entries(folder, "checkpoint folder"))


def _weight_updates(path: Path) -> float:
    """After how many weight updates a file was written; infinity for a damaged one, which is then reported first."""
    try:
        return float(read_meta(path)["weight_updates"])
    except DataError:
        return float("inf")


def newest_checkpoint(folder: Path) -> Tuple[Optional[Tuple[Path, Checkpoint]], List[str]]:
    """The newest good checkpoint of a folder, if any, and why newer ones were passed over."""
    names = [path for path in entries(folder, "checkpoint folder") if is_checkpoint_name(path.name)]
    bad: List[str] = []
    for path in sorted(names, key=lambda p: (-_weight_updates(p), p.name != LAST, p.name)):
        try:
            return (path, load_checkpoint(path)), bad
        except DataError as error:
            bad.append(error.message)
    return None, bad


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        resolved: the configuration; that of the run folder if it is continued.
        folder: the run folder, which need not exist yet.
        in_place: the folder is already that of the run, which goes on in it.
        checkpoint: what to continue from; None to begin.
        checkpoint_path: its file.
        notes: what to tell the user, one line each.
        report: that of the run if it is finished already.
        takes_default: the folder is the next free one of its name, whoever else asks for one meanwhile.
    """

    resolved: Resolved
    folder: RunFolder
    in_place: bool = False
    checkpoint: Optional[Checkpoint] = None
    checkpoint_path: Optional[Path] = None
    notes: Tuple[str, ...] = ()
    report: Optional[Dict[str, Any]] = None
    takes_default: bool = False

    def claim(self) -> RunFolder:
        """The run folder for this process alone: under a default name the next one that is free by now."""
        if not self.takes_default:
            return self.folder
        config = self.resolved.config
        directory = _checkpoint_dir(config.checkpoint_dir)
        return claim_default(config.model_name, self.resolved.choice.name, checkpoint_dir=directory)


def find_start(resolved: Resolved) -> Start:
    """Where the run of a configuration begins: anew, or with ``--resume`` where its folder left off.

    Raises:
        ConfigurationError: a folder that is taken, or options that contradict the run's own.
        DataError: nothing readable to continue from.
    """
    config = resolved.config
    if config.resume and config.overwrite:
        raise ConfigurationError("--resume and --overwrite are both given", "drop one of them")
    if config.resume and not config.training:
        raise ConfigurationError(
            "--resume without training has nothing to continue", "validate with: ipucnn evaluate RUN"
        )
    names = config.model_name, resolved.choice.name
    given = None if config.run_dir is None else expand(config.run_dir, "--run-dir")
    if config.resume:
        path = given or latest_run_dir(*names) or default_run_dir(*names)
        if is_file(path / CONFIG, "run folder"):
            return _continue(resolved, path)
        if not is_unfinished(path):
            check_new(path, overwrite=False)
        return _fresh(resolved, path, f"nothing to resume in {path}: the run begins")
    path = given or default_run_dir(*names)
    check_new(path, config.overwrite)
    return replace(_fresh(resolved, path), takes_default=given is None)


def _checkpoint_dir(directory: Optional[str]) -> Optional[str]:
    if directory is None:
        return None
    return str(absolute(expand(directory, "--checkpoint-dir"), "--checkpoint-dir"))


def _fresh(resolved: Resolved, path: Path, *notes: str) -> Start:
    """The start of a run in a new folder, from a checkpoint of ``--checkpoint-input-dir`` if that is given."""
    config = resolved.config
    checkpoint_dir = _checkpoint_dir(config.checkpoint_dir)
    if checkpoint_dir is not None:
        check_checkpoint_dir(path, Path(checkpoint_dir))
        check_new_checkpoints(Path(checkpoint_dir), config.overwrite)
    start = Start(resolved, RunFolder(path, checkpoint_dir), notes=notes)
    if config.checkpoint_input_dir is None:
        return start
    found, skipped = _read(expand(config.checkpoint_input_dir, "--checkpoint-input-dir"))
    if not config.training:
        return start  # each of them is validated
    start = _going_on(start, found, skipped)
    if config.seed is None and start.checkpoint is not None:
        # The seed of the run that is continued, or the data order and dropout would be another's.
        seeded = replace(config, seed=int(start.checkpoint.meta["seed"]))
        start = replace(start, resolved=replace(resolved, config=seeded))
    return start


def _continue(resolved: Resolved, path: Path) -> Start:
    """The start of a run that goes on in its own folder; with its report, if it is finished."""
    saved = RunFolder(path).read_config()
    merged = resolve_resumed(resolved, saved, str(path))
    config = replace(merged.config, overwrite=False)
    folder = RunFolder(path, _checkpoint_dir(config.checkpoint_dir))
    start = Start(replace(merged, config=config), folder, in_place=True)
    report = folder.read_report()
    if report is not None and config.num_epochs == saved.num_epochs:
        return replace(start, report=report)
    if report is not None and saved.clean_dir and config.checkpoint_input_dir is None:
        raise DataError(
            f"{path} is finished and its checkpoints were deleted (--clean-dir): nothing to train on from",
            "train again with another --run-dir",
        )
    _check_checkpoint_dir(resolved, saved, folder)
    if config.checkpoint_input_dir is not None:
        return _going_on(start, *_read(expand(config.checkpoint_input_dir, "--checkpoint-input-dir")))
    found, skipped = newest_checkpoint(folder.checkpoints)
    if found is None and skipped:
        raise DataError(
            f"no checkpoint of {path} is readable; {skipped[0]}",
            f"start it again with --overwrite --run-dir {path}",
        )
    if found is None:
        return replace(start, notes=(f"{path} ended before its first checkpoint: the run begins again",))
    return _going_on(start, found, skipped)


def _check_checkpoint_dir(resolved: Resolved, saved: RunConfig, folder: RunFolder) -> None:
    """Refuses to begin again because the run's checkpoints are looked for in the wrong place."""
    if has_checkpoints(folder.checkpoints) or resolved.config.checkpoint_input_dir is not None:
        return
    former = RunFolder(folder.path, saved.checkpoint_dir).checkpoints
    if former != folder.checkpoints and has_checkpoints(former):
        raise ConfigurationError(
            f"the checkpoints of {folder.path} are in {former}, not in {folder.checkpoints}",
            f"drop --checkpoint-dir, or add --checkpoint-input-dir {former}",
        )
    if saved.checkpoint_dir and not is_folder(folder.checkpoints) and exists(folder.path / METRICS):
        raise DataError(
            f"the checkpoint folder {folder.checkpoints} of {folder.path} is not there",
            "bring it back, or give its new place with --checkpoint-dir",
        )


def _read(folder: Path) -> Tuple[Tuple[Path, Checkpoint], List[str]]:
    """The newest good checkpoint of ``--checkpoint-input-dir``, and why newer ones were passed over."""
    if not is_folder(folder, "checkpoint folder"):
        raise DataError(
            f"checkpoint folder {folder} does not exist", "give the checkpoints folder of a run (*.npz files)"
        )
    found, skipped = newest_checkpoint(folder)
    if found is None:
        reason = f": {skipped[0]}" if skipped else ""
        raise DataError(
            f"there is no readable checkpoint in {folder}{reason}",
            "give the checkpoints folder of a run (*.npz files)",
        )
    return found, skipped


def _going_on(start: Start, found: Tuple[Path, Checkpoint], skipped: Sequence[str]) -> Start:
    """A start from a checkpoint, with notes that say where that is and which newer ones could not be read."""
    path, checkpoint = found
    done = int(checkpoint.meta["weight_updates"])
    per_epoch = checkpoint.meta.get("program", {}).get("weight_updates_per_epoch")
    epoch = f" (epoch {done / per_epoch:.2f})" if per_epoch else ""
    warnings = [f"warning: {reason}; the one before it is used" for reason in skipped]
    where = f"continuing after weight update {done}{epoch}, checkpoint {path}"
    return replace(start, checkpoint=checkpoint, checkpoint_path=path, notes=(*start.notes, *warnings, where))


def check_same_run(
    start: Start, config: RunConfig, program: Program, info: DatasetInfo, data_sha256: str
) -> None:
    """Refuses a checkpoint of another run than the one that is to be continued.

    Raises:
        ConfigurationError: naming the first difference.
        DataError: there is nothing left to train.
    """
    if start.checkpoint is None:
        return
    found = differences(start.checkpoint.meta, config, program, info, data_sha256)
    if found:
        raise ConfigurationError(
            f"{start.checkpoint_path} is of another run: {found[0]}",
            f"continue with that run's options, or start from its weights: --weights {start.checkpoint_path}",
        )
    done = int(start.checkpoint.meta["weight_updates"])
    if done > program.num_weight_updates:
        raise ConfigurationError(
            f"--num-epochs {config.num_epochs} are {program.num_weight_updates} weight updates, and "
            f"{start.checkpoint_path} has {done}",
            "give more epochs",
        )


@dataclass(frozen=True)
class TrainedRun:
    """A run folder with the checkpoint chosen from it.

    Attributes:
        folder: the run.
        config: its resolved configuration.
        checkpoint: weights and facts.
        path: the checkpoint's file.
    """

    folder: RunFolder
    config: RunConfig
    checkpoint: Checkpoint
    path: Path

    @property
    def input_shape(self) -> Tuple[int, int, int]:
        """(height, width, channels) the network was trained with."""
        height, width, channels = self.checkpoint.meta["input_shape"]
        return int(height), int(width), int(channels)

    @property
    def num_classes(self) -> int:
        """Classes the network was trained with."""
        return int(self.checkpoint.meta["num_classes"])

    @property
    def facts(self) -> DatasetInfo:
        """The facts of the training set, as far as the checkpoint has them: not how many images there are."""
        meta = self.checkpoint.meta
        return DatasetInfo(
            name=meta["dataset"],
            task=get_model(self.config.model_name).task,
            num_classes=self.num_classes,
            image_shape=tuple(meta["image_shape"]),  # type: ignore[arg-type]
            num_train=0,
            num_eval=0,
            class_names=tuple(meta["class_names"]),
            location=str(self.path),
            mean=tuple(meta["mean"]),
            std=tuple(meta["std"]),
        )

    @property
    def summary(self) -> Dict[str, Any]:
        """What identifies the weights that were used, for reports."""
        meta = self.checkpoint.meta
        return {"checkpoint": str(self.path), **{name: meta[name] for name in ("model", "weight_updates")}}

    def fill(self, model: "KerasModel") -> None:
        """Copies all weights of the checkpoint into a built network.

        Raises:
            DataError: they are another network's.
        """
        from ipucnn.models.names import named_weights

        assign_weights(named_weights(model), self.checkpoint, what=str(self.path))


def open_run(path: Path, which: Optional[str] = None, command: str = "evaluate") -> TrainedRun:
    """Opens a run folder, or a checkpoint inside one.

    Args:
        path: ``runs/NAME``, or ``runs/NAME/checkpoints/best.npz``.
        which: "best", "last" or the name of a checkpoint file in the run; by default the last where there
            is one, else the best.  Without meaning for a checkpoint's own path.
        command: of the user, for what to type.

    Raises:
        DataError: not a run, no checkpoint, a damaged one, or a cross-validation, which has a run for each fold.
    """
    path = expand(str(path), error=DataError)
    kind = kind_of(path)
    if kind not in (Kind.ABSENT, Kind.FOLDER):
        checkpoint = load_checkpoint(path)
        folder = RunFolder(path.parent.parent if path.parent.name == CHECKPOINTS else path.parent)
        return TrainedRun(folder, RunConfig.from_yaml(checkpoint.meta["config"], str(path)), checkpoint, path)
    if kind is Kind.ABSENT:
        raise DataError(f"run folder {path} does not exist", "train one with: ipucnn train toy_model")
    folder = RunFolder(path)
    if is_file(path / FOLDS):
        raise _is_cross_validation(path, command)
    config = folder.read_config()
    if config.kfold is not None and config.fold is None:
        raise _is_cross_validation(path, command)
    folder = RunFolder(path, config.checkpoint_dir)
    names = [LAST, BEST] if which is None else [which if which.endswith(".npz") else f"{which}.npz"]
    for name in names:
        candidate = folder.checkpoints / name
        if exists(candidate):
            return TrainedRun(folder, config, load_checkpoint(candidate), candidate)
    there = [p.name for p in entries(folder.checkpoints) if p.name.endswith(".npz")]
    wanted = " or ".join(names)
    hint = f"there are: {', '.join(there)}" if there else _why_none(folder, config)
    raise DataError(f"{folder.checkpoints} has no {wanted}", hint)


def _is_cross_validation(path: Path, command: str) -> DataError:
    """The error for a command that takes one run and was given the folder of a whole cross-validation."""
    found = (p for p in entries(path) if p.name.startswith("fold-") and is_folder(p))
    folds = sorted(found, key=lambda p: (len(p.name), p.name))
    if not folds:
        return DataError(
            f"{path} is a cross-validation without a fold", "go on with it: ipucnn train --resume"
        )
    return DataError(
        f"{path} is a cross-validation, with a network for each fold; name a fold",
        f"ipucnn {command} {folds[0]}",
    )


def _why_none(folder: RunFolder, config: RunConfig) -> str:
    """Why a run has no checkpoint at all, and what to do."""
    if not config.training:
        return "the run did not train (--no-training), so there are no weights; train one with: ipucnn train"
    if not config.checkpoints:
        return "the run was told to write none (--no-checkpoints); train again without it"
    if folder.read_report() is None:
        return "the run ended before its first checkpoint; train again"
    if config.clean_dir:
        return "the run deleted its checkpoints at its end (--clean-dir); train again without it"
    return "the run finished, and its checkpoints were deleted or moved since; train again, or move them back"


def load_starting_weights(model: "KerasModel", path: Path) -> Tuple[str, ...]:
    """Loads the backbone, and the head where its shape is the same, from a checkpoint or run folder.

    Returns:
        The names of the weights left at their initial values (a new head), in the model's order.

    Raises:
        DataError: the backbone does not fit.
    """
    from ipucnn.models.names import named_weights

    checkpoint = open_run(path).checkpoint if is_folder(path) else load_checkpoint(path)
    weights = named_weights(model)
    skip = _new_head(weights, checkpoint)
    assign_weights(weights, checkpoint, what=str(path), skip=skip)
    return skip


def _new_head(weights: Mapping[str, "TfVariable"], checkpoint: Checkpoint) -> Tuple[str, ...]:
    """The names of the weights of the last layer that has any, if its shapes are not the checkpoint's; else none."""
    names = list(weights)
    layer = names[-1].split("/")[0]
    head = [name for name in names if name.split("/")[0] == layer]
    differ = any(
        name in checkpoint.weights and tuple(checkpoint.weights[name].shape) != tuple(weights[name].shape)
        for name in head
    )
    return tuple(head) if differ else ()
