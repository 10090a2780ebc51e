"""Checkpoints of runs: their content beside the weights, restoring them, and opening a trained run.

A checkpoint has everything that a run needs to continue: model, optimizer, position (data order, augmentation, dropout
and schedule are pure functions of seed and position), the unfinished execution, and the history so far.  ``resume.py``
chooses the checkpoint from which a run continues; ``training/checkpoints.py`` defines the file format.  Nothing here
imports TensorFlow; functions that load weights take a built network.
"""

import contextlib
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from ipucnn.aliases import KerasModel, PlainDict, PlainValue, TfVariable
from ipucnn.config.options import RunConfig
from ipucnn.datasets.base import DatasetInfo, DataSource
from ipucnn.datasets.classes import are_same, in_order_of
from ipucnn.errors import DataError, UserError
from ipucnn.filesystem import Kind, absolute, entries, exists, expand, is_file, is_folder, kind_of
from ipucnn.models.keras_files import is_keras_file
from ipucnn.models.registry import get_model
from ipucnn.runs.folder import (
    BEST,
    CHECKPOINTS,
    CONFIG,
    CONTINUE_FOLDS,
    LAST,
    NAMED,
    RunFolder,
    check_one_run,
    is_checkpoint_name,
)
from ipucnn.sessions.evaluated import resumed_arrays
from ipucnn.sessions.session import NotFiniteError, TrainState, is_checkpoint_due
from ipucnn.training.checkpoints import Checkpoint, assign_weights, load_checkpoint, read_meta
from ipucnn.training.program import Program


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


def arrays(variables: Mapping[str, "TfVariable"], learning_rate: float) -> Dict[str, np.ndarray]:
    """Returns the values of variables, if all of them are finite.

    Raises:
        NotFiniteError: a value is not finite; the error names the variable.
    """
    values = {name: variable.numpy() for name, variable in variables.items()}
    for name, value in values.items():
        if not np.all(np.isfinite(value)):
            raise NotFiniteError(
                f"{name} is no longer finite; no checkpoint of it is written",
                f"lower the learning rate (it was {learning_rate:.4g})",
            )
    return values


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
            "start from its weights with: --weights " + what,
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
    # Not splitlines, which also splits at separators other than line feeds.
    history = [line + "\n" for line in run["history"].split("\n")[:-1]]
    return RunState(history, run["best"], run["last_validation"], run.get("notes", ()))


def keras_checkpoints(folder: Path) -> List[Path]:
    """Returns Keras's weight files in a folder without checkpoints of a run, sorted by the epochs in their names."""
    paths = entries(folder)
    if any(is_checkpoint_name(path.name) for path in paths):
        return []
    return sorted(
        (path for path in paths if is_keras_file(path)), key=lambda path: (_epoch_of(path), path.name)
    )


def _epoch_of(path: Path) -> float:
    """Returns the epoch in a name such as ``epoch_2.5.h5``, which Graphcore's public application writes; else 0."""
    epoch = re.search(r"epoch_(\d{1,9}(\.\d{1,9})?)", path.name)
    return float(epoch.group(1)) if epoch else 0.0


def list_checkpoints(
    folder: Path, state: TrainState, model: KerasModel
) -> Tuple[List[Path], List[str], List[str]]:
    """Returns the readable checkpoints of a folder, the error of each of the others, and notes for the user.

    These are the numbered checkpoints, in the order of training.  Without numbered ones it is the last or else the best
    checkpoint, or the weight files of Keras.

    Args:
        folder: a folder with at least one readable checkpoint.
        state: the session's ``TrainState``; its weights are overwritten with those of each checkpoint, as a check.
        model: the network, whose layers are matched with those of weight files.

    Raises:
        DataError: a checkpoint is of another model.
    """
    names = [path for path in entries(folder) if is_checkpoint_name(path.name)]
    names = [path for path in names if path.name not in (LAST, BEST)] or [
        path for name in (LAST, BEST) for path in names if path.name == name
    ][:1]
    good, bad, notes = keras_checkpoints(folder), [], []
    for path in good:
        notes += load_for_validation(path, state, model, 0)[1]
    for path in names:
        try:
            checkpoint = load_checkpoint(path)
        except DataError as error:
            bad.append(error.message)
            continue
        assign_weights(state.weights, checkpoint, what=str(path))
        good.append(path)
    return good, bad, notes


def load_for_validation(
    path: Path, state: TrainState, model: KerasModel, updates_per_epoch: int
) -> Tuple[int, List[str]]:
    """Loads only the weights of a checkpoint.

    Returns:
        The weight updates of the checkpoint, for a weight file those of the epoch in its name; and notes for the user.

    Raises:
        DataError: the checkpoint is of another model.
    """
    if is_keras_file(path):
        from ipucnn.models.keras_files import read_keras_weights

        weights, notes = read_keras_weights(model, path)
        checkpoint = Checkpoint(weights, {})
        checkpoint.meta["weight_updates"] = round(_epoch_of(path) * updates_per_epoch)
    else:
        checkpoint, notes = load_checkpoint(path), []
    assign_weights(state.weights, checkpoint, what=str(path))
    return int(checkpoint.meta["weight_updates"]), notes


def checkpoint_name(weight_updates: int) -> str:
    """Returns the file name of a numbered checkpoint."""
    return f"checkpoint-{weight_updates:08d}.npz"


def written_names(program: Program, first: int, last: int) -> List[str]:
    """Returns the names of the checkpoints that weight updates ``first`` to ``last`` write, with best and last."""
    per_execution, names = program.weight_updates_per_execution, [BEST, LAST]
    for done in range(max(1, -(-first // per_execution)), last // per_execution + 1):
        if is_checkpoint_due(program, done):
            names.append(checkpoint_name(done * per_execution))
    return names


def form_of_masks(info: DatasetInfo) -> Dict[str, PlainValue]:
    """Returns ``class_colours`` and ``mask_values`` of a training set that has them, for :func:`trained_facts`."""
    facts: Dict[str, PlainValue] = {}
    if info.class_colours:
        facts["class_colours"] = [list(colour) for colour in info.class_colours]
    if info.mask_values:
        facts["mask_values"] = list(info.mask_values)
    return facts


def trained_facts(meta: Mapping[str, PlainValue], path: Path) -> DatasetInfo:
    """Returns the facts of the training set in a checkpoint or its export; the numbers of images are not known."""
    return DatasetInfo(
        name=meta["dataset"],
        task=get_model(meta["model"]).task,
        num_classes=int(meta["num_classes"]),
        image_shape=tuple(meta["image_shape"]),
        num_train=0,
        num_eval=0,
        class_names=tuple(meta["class_names"]),
        location=str(path),
        mean=tuple(meta["mean"]),
        std=tuple(meta["std"]),
        crops=meta["dataset"],
        class_colours=tuple(map(tuple, meta.get("class_colours", ()))),
        mask_values=tuple(meta.get("mask_values", ())),
    )


@dataclass(frozen=True)
class TrainedRun:
    """A run folder with the checkpoint chosen from it.

    Attributes:
        folder: the run folder.
        config: the resolved configuration.
        checkpoint: the weights and the facts of the checkpoint.
        path: the file of the checkpoint.
    """

    folder: RunFolder
    config: RunConfig
    checkpoint: Checkpoint
    path: Path

    @property
    def meta(self) -> Dict[str, Any]:
        """The facts of the checkpoint."""
        return self.checkpoint.meta

    def fill(self, model: "KerasModel") -> List[str]:
        """Copies all weights of the checkpoint into a built network; returns notes for the user.

        Raises:
            DataError: the weights are another network's.
        """
        from ipucnn.models.names import named_weights

        assign_weights(named_weights(model), self.checkpoint, what=str(self.path))
        return []


def open_run(path: Path, which: Optional[str] = None, command: str = "evaluate") -> TrainedRun:
    """Opens a run folder, or a checkpoint inside one.

    Args:
        path: ``runs/NAME``, or ``runs/NAME/checkpoints/best.npz``.
        which: "best", "last" or the name of a checkpoint file in the run; None: the last if there is one, else the
            best.  It is ignored if ``path`` is a checkpoint.
        command: the command of the user, for hints.

    Raises:
        DataError: the path is not a run, or the run has no such checkpoint or a damaged one, or the folder is a
            cross-validation, which has a run for each fold.
    """
    path = expand(str(path))
    kind = kind_of(path)
    if kind not in (Kind.ABSENT, Kind.FOLDER):
        checkpoint = load_checkpoint(path)
        config = RunConfig.from_yaml(checkpoint.meta["config"], str(path))
        inside = absolute(path).parent
        # A checkpoint may have been copied into the run folder, or be all that is left of the run.
        is_in_place = inside.name == CHECKPOINTS and is_file(inside.parent / CONFIG)
        folder = RunFolder(inside.parent if is_in_place else path.parent)
        return TrainedRun(folder, config, checkpoint, path)
    check_one_run(path, command)
    config = RunFolder(path).read_config()
    if config.kfold is not None and config.fold is None:
        raise DataError(
            f"{path} is a cross-validation without a fold", CONTINUE_FOLDS.format(shlex.quote(str(path)))
        )
    folder = RunFolder(path, config.checkpoint_dir)
    names = [LAST, BEST] if which is None else [which if which.endswith(".npz") else f"{which}.npz"]
    for name in names:
        candidate = folder.checkpoints / name
        if exists(candidate):
            return TrainedRun(folder, config, load_checkpoint(candidate), candidate)
    present = [p.name for p in entries(folder.checkpoints) if p.name.endswith(".npz")]
    hint = _nearest(present, str(which)) if present else _why_none(folder, config)
    raise DataError(f"{folder.checkpoints} has no {' or '.join(names)}", hint)


def _nearest(names: List[str], given: str) -> str:
    """Returns a hint with the existing checkpoints; if there are many, those nearest to the given weight update."""
    if len(names) <= NAMED:
        return f"there are: {', '.join(names)}"

    def updates(name: str) -> float:
        return float("".join(filter(str.isdigit, name)) or "inf")

    number = updates(given) if any(map(str.isdigit, given)) else 0.0
    nearest = sorted(names, key=lambda name: abs(updates(name) - number))[:NAMED]
    return f"there are {len(names)}, the nearest are {', '.join(sorted(nearest))}; also {LAST[:-4]} and {BEST[:-4]}"


def _why_none(folder: RunFolder, config: RunConfig) -> str:
    """Returns a hint for a run without any checkpoint: the reason, and what to do."""
    if not config.training:
        return "the run did not train (--no-training), so there are no weights; train one with: ipucnn train"
    if not config.checkpoints:
        return "the run was told to write none (--no-checkpoints); train again without it"
    if folder.read_report() is None:
        return "the run ended before its first checkpoint; train again"
    if config.clean_dir:
        return "the run deleted its checkpoints at its end (--clean-dir); train again without it"
    return "the run finished, and its checkpoints were deleted or moved since; train again, or move them back"


def facts_of_weights(weights: Optional[str]) -> PlainDict:
    """Returns the facts of the run or checkpoint that ``--weights`` names, without reading its weights.

    The result is empty for other weights, and for files that cannot be read, which loading them reports.
    """
    path = expand(str(weights))
    if weights in (None, "imagenet") or is_keras_file(path):
        return {}
    with contextlib.suppress(UserError):
        if is_folder(path):
            return RunFolder(path, RunFolder(path).read_config().checkpoint_dir).checkpoint_facts()
        return read_meta(path)
    return {}


def as_started(source: DataSource, facts: PlainDict) -> DataSource:
    """Returns a training set as the network to start from knows it: its numbers of classes, mean and deviation.

    Args:
        source: the training set.
        facts: the facts of the starting weights, see :func:`facts_of_weights`; empty for others.
    """
    if not facts:
        return source
    source = in_order_of(source, facts["class_names"])
    info, mean, std = source.info, tuple(facts["mean"]), tuple(facts["std"])
    if len(mean) != len(info.mean) or (mean, std) == (info.mean, info.std):
        return source
    note = f"{info.name} is normalised with the mean and deviation of {facts['dataset']}, as the weights to start from"
    return replace(source, info=replace(info, mean=mean, std=std, warnings=(*info.warnings, note)))


def load_starting_weights(
    model: "KerasModel", path: Path, class_names: Sequence[str]
) -> Tuple[Tuple[str, ...], List[str]]:
    """Loads starting weights from a checkpoint, a run folder or a Keras file.

    From a checkpoint or run it loads the backbone, and the head if that has the same shapes and classes; from a Keras
    file, all weights.  ``class_names`` are the classes of the network.

    Returns:
        The names of the weights left at their initial values (a new head), in the model's order; and notes for the
        user.

    Raises:
        DataError: the weights of the backbone do not fit.
    """
    from ipucnn.models.keras_files import load_keras_weights
    from ipucnn.models.names import named_weights

    if is_keras_file(path):
        return (), load_keras_weights(model, path)
    checkpoint = open_run(path).checkpoint if is_folder(path) else load_checkpoint(path)
    weights = named_weights(model)
    skip = _new_head(weights, checkpoint, class_names)
    assign_weights(weights, checkpoint, what=str(path), skip=skip)
    return skip, []


def _new_head(
    weights: Mapping[str, "TfVariable"], checkpoint: Checkpoint, class_names: Sequence[str]
) -> Tuple[str, ...]:
    """Returns the names of the head's weights if their shapes or classes differ from the checkpoint's; else none.

    The head is the last layer that has weights.
    """
    names = list(weights)
    layer = names[-1].split("/")[0]
    head = [name for name in names if name.split("/")[0] == layer]
    differ = not are_same(class_names, checkpoint.meta["class_names"]) or any(
        name in checkpoint.weights and tuple(checkpoint.weights[name].shape) != tuple(weights[name].shape)
        for name in head
    )
    return tuple(head) if differ else ()
