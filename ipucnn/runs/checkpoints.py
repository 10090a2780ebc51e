"""A run's checkpoints: what they hold beside weights, and opening one of a run that is done.

A checkpoint is all that is needed to go on: model, optimizer, position (data order, augmentation, dropout and
schedule are pure functions of seed and position), the half-done execution, and the history so far; ``start.py`` says
from which a run goes on.  The file itself is ``training/checkpoints.py``.  Nothing here imports TensorFlow; what has
weights to fill gets a built network.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

import numpy as np

from ipucnn.aliases import KerasModel, PlainValue, TfVariable
from ipucnn.config.options import RunConfig
from ipucnn.datasets.base import DatasetInfo
from ipucnn.errors import DataError
from ipucnn.filesystem import Kind, entries, exists, expand, is_file, is_folder, kind_of
from ipucnn.models.keras_files import is_keras_file
from ipucnn.models.registry import get_model
from ipucnn.runs.folder import (
    BEST,
    CHECKPOINTS,
    FOLDS,
    LAST,
    NAMED,
    RunFolder,
    folds_of,
    is_checkpoint_name,
    runs_there_are,
)
from ipucnn.sessions.session import NotFiniteError, TrainState, is_checkpoint_due
from ipucnn.training.checkpoints import Checkpoint, assign_weights, load_checkpoint
from ipucnn.training.program import Program

RUNNING = "/running"
"""Ends the names of running statistics, which are among the slots where a checkpoint's weights have measured ones."""


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


def is_whole(meta: Mapping[str, PlainValue]) -> bool:
    """Whether a run can go on from a checkpoint; the best one has weights alone, to save space."""
    return {"position", "run"} <= set(meta)


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
    if not is_whole(checkpoint.meta):
        raise DataError(
            f"{what} cannot be continued: it has weights alone, and does not say where its run stood",
            "start from its weights with: --weights " + what,
        )
    running = {name for name in checkpoint.slots if name.endswith(RUNNING)}
    if running:
        kept = {name[: -len(RUNNING)]: checkpoint.slots[name] for name in running}
        slots = {name: value for name, value in checkpoint.slots.items() if name not in running}
        checkpoint = replace(checkpoint, weights={**checkpoint.weights, **kept}, slots=slots)
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
    state.losses, state.hits = list(at["losses"]), list(at["hits"])
    state.events_done = at["events_done"]
    state.earlier_losses = list(at.get("earlier_losses", ()))
    state.earlier_hits = list(at.get("earlier_hits", ()))
    # Not splitlines, which also splits where text has other separators than line feeds.
    history = [line + "\n" for line in run["history"].split("\n")[:-1]]
    return RunState(history, run["best"], run["last_validation"])


def keras_checkpoints(folder: Path) -> List[Path]:
    """The weight files of Keras in a folder without checkpoints of a run, by the epochs in their names."""
    paths = entries(folder)
    if any(is_checkpoint_name(path.name) for path in paths):
        return []
    return sorted(
        (path for path in paths if is_keras_file(path)), key=lambda path: (_epoch_of(path), path.name)
    )


def _epoch_of(path: Path) -> float:
    """The epoch in a name such as ``epoch_2.5.h5``, as the public application writes them; 0 in any other."""
    epoch = re.search(r"epoch_(\d{1,9}(\.\d{1,9})?)", path.name)
    return float(epoch.group(1)) if epoch else 0.0


def list_checkpoints(folder: Path, state: TrainState, model: KerasModel) -> Tuple[List[Path], List[str]]:
    """The checkpoints of a folder that can be read, and what is wrong with each of the others.

    These are the numbered ones in the order they were trained; where there are none, the last or else the best one, or
    the weight files of Keras.

    Args:
        folder: was found to have at least one checkpoint that can be read.
        state: of the session; its weights are overwritten with those of each checkpoint, to see that they fit.
        model: the network, to whose layers those of weight files are matched.

    Raises:
        DataError: one of them is of another model.
    """
    names = [path for path in entries(folder) if is_checkpoint_name(path.name)]
    names = [path for path in names if path.name not in (LAST, BEST)] or [
        path for name in (LAST, BEST) for path in names if path.name == name
    ][:1]
    good, bad = keras_checkpoints(folder), []
    for path in good:
        load_for_validation(path, state, model, 0)
    for path in names:
        try:
            checkpoint = load_checkpoint(path)
        except DataError as error:
            bad.append(error.message)
            continue
        assign_weights(state.weights, checkpoint, what=str(path))
        good.append(path)
    return good, bad


def load_for_validation(path: Path, state: TrainState, model: KerasModel, updates_per_epoch: int) -> int:
    """Loads a checkpoint's weights alone; returns its weight updates, for a weight file those of its name's epoch.

    Raises:
        DataError: it is of another model.
    """
    if is_keras_file(path):
        from ipucnn.models.keras_files import read_keras_weights

        checkpoint = Checkpoint(read_keras_weights(model, path), {})
        checkpoint.meta["weight_updates"] = round(_epoch_of(path) * updates_per_epoch)
    else:
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


def colours_of_masks(info: DatasetInfo) -> Dict[str, PlainValue]:
    """``class_colours`` of a training set, for :func:`trained_facts`; nothing where masks have no colours."""
    return {"class_colours": [list(colour) for colour in info.class_colours]} if info.class_colours else {}


def trained_facts(meta: Mapping[str, PlainValue], model: str, num_classes: int, path: Path) -> DatasetInfo:
    """The facts of a training set that a checkpoint, or an export made of one, has; not how many images there are."""
    return DatasetInfo(
        name=meta["dataset"],
        task=get_model(model).task,
        num_classes=num_classes,
        image_shape=tuple(meta["image_shape"]),
        num_train=0,
        num_eval=0,
        class_names=tuple(meta["class_names"]),
        location=str(path),
        mean=tuple(meta["mean"]),
        std=tuple(meta["std"]),
        crops=meta["dataset"],
        class_colours=tuple(map(tuple, meta.get("class_colours", ()))),
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
    def seed(self) -> int:
        """Of the run."""
        return int(self.checkpoint.meta["seed"])

    @property
    def num_classes(self) -> int:
        """Classes the network was trained with."""
        return int(self.checkpoint.meta["num_classes"])

    @property
    def facts(self) -> DatasetInfo:
        """The facts of the training set, as far as the checkpoint has them: not how many images there are."""
        return trained_facts(self.checkpoint.meta, self.config.model_name, self.num_classes, self.path)

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
    path = expand(str(path))
    kind = kind_of(path)
    if kind not in (Kind.ABSENT, Kind.FOLDER):
        checkpoint = load_checkpoint(path)
        folder = RunFolder(path.parent.parent if path.parent.name == CHECKPOINTS else path.parent)
        return TrainedRun(folder, RunConfig.from_yaml(checkpoint.meta["config"], str(path)), checkpoint, path)
    if kind is Kind.ABSENT:
        raise DataError(f"run folder {path} does not exist", runs_there_are(path, command))
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
    present = [p.name for p in entries(folder.checkpoints) if p.name.endswith(".npz")]
    hint = _nearest(present, str(which)) if present else _why_none(folder, config)
    raise DataError(f"{folder.checkpoints} has no {' or '.join(names)}", hint)


def _nearest(names: List[str], given: str) -> str:
    """The checkpoints there are, of many those whose weight updates are nearest to the number that was given."""
    if len(names) <= NAMED:
        return f"there are: {', '.join(names)}"

    def updates(name: str) -> float:
        return float("".join(filter(str.isdigit, name)) or "inf")

    number = updates(given) if any(map(str.isdigit, given)) else 0.0
    nearest = sorted(names, key=lambda name: abs(updates(name) - number))[:NAMED]
    return f"there are {len(names)}, the nearest are {', '.join(sorted(nearest))}; also {LAST[:-4]} and {BEST[:-4]}"


def _is_cross_validation(path: Path, command: str) -> DataError:
    """The error for a command that takes one run and was given the folder of a whole cross-validation."""
    folds = folds_of(path)
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
    """Loads the backbone, and the head where its shape is the same, from a checkpoint or run folder; or all weights of
    a file of Keras.

    Returns:
        The names of the weights left at their initial values (a new head), in the model's order.

    Raises:
        DataError: the backbone does not fit.
    """
    from ipucnn.models.keras_files import load_keras_weights
    from ipucnn.models.names import named_weights

    if is_keras_file(path):
        load_keras_weights(model, path)
        return ()
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
