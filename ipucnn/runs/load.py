"""Opening what a training run left: a run folder, or one of its checkpoints."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Tuple

from ipucnn import filesystem
from ipucnn.config.options import RunConfig
from ipucnn.errors import DataError
from ipucnn.filesystem import Kind
from ipucnn.runs.folder import BEST, CHECKPOINTS, FOLDS, LAST, RunFolder
from ipucnn.training.checkpoints import Checkpoint, assign_weights, load_checkpoint


@dataclass
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
    path = filesystem.expand(str(path), error=DataError)
    kind = filesystem.kind_of(path)
    if kind not in (Kind.ABSENT, Kind.FOLDER):
        checkpoint = load_checkpoint(path)
        folder = RunFolder(path.parent.parent if path.parent.name == CHECKPOINTS else path.parent)
        return TrainedRun(folder, RunConfig.from_yaml(checkpoint.meta["config"], str(path)), checkpoint, path)
    if kind is Kind.ABSENT:
        raise DataError(f"run folder {path} does not exist", "train one with: ipucnn train toy_model")
    folder = RunFolder(path)
    if filesystem.is_file(path / FOLDS):
        raise _is_cross_validation(path, command)
    config = folder.read_config()
    if config.kfold is not None and config.fold is None:
        raise _is_cross_validation(path, command)
    folder = RunFolder(path, config.checkpoint_dir)
    names = [LAST, BEST] if which is None else [which if which.endswith(".npz") else f"{which}.npz"]
    for name in names:
        candidate = folder.checkpoints / name
        if filesystem.exists(candidate):
            return TrainedRun(folder, config, load_checkpoint(candidate), candidate)
    there = [p.name for p in filesystem.entries(folder.checkpoints) if p.name.endswith(".npz")]
    wanted = " or ".join(names)
    hint = f"there are: {', '.join(there)}" if there else _why_none(folder, config)
    raise DataError(f"{folder.checkpoints} has no {wanted}", hint)


def _is_cross_validation(path: Path, command: str) -> DataError:
    """What is wrong with naming the folder of all folds."""
    found = (p for p in filesystem.entries(path) if p.name.startswith("fold-") and filesystem.is_folder(p))
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


def load_weights(model: Any, checkpoint: Checkpoint, what: str) -> None:
    """Copies all weights of a checkpoint into a model.

    Raises:
        DataError: they are another model's.
    """
    from ipucnn.models.names import named_weights

    assign_weights(named_weights(model), checkpoint, what=what)


def load_starting_weights(model: Any, path: Path) -> Tuple[str, ...]:
    """Loads the backbone, and the head where its shape is the same, from a checkpoint or run folder.

    Returns:
        The names of the weights left at their initial values (a new head), in the model's order.

    Raises:
        DataError: the backbone does not fit.
    """
    from ipucnn.models.names import named_weights

    checkpoint = open_run(path).checkpoint if filesystem.is_folder(path) else load_checkpoint(path)
    weights = named_weights(model)
    skip = _new_head(weights, checkpoint)
    assign_weights(weights, checkpoint, what=str(path), skip=skip)
    return skip


def _new_head(weights: Mapping[str, Any], checkpoint: Checkpoint) -> Tuple[str, ...]:
    """Weights of the last layer with weights, if their shapes differ from the checkpoint's."""
    names = list(weights)
    layer = names[-1].split("/")[0]
    head = [name for name in names if name.split("/")[0] == layer]
    differ = any(
        name in checkpoint.weights and tuple(checkpoint.weights[name].shape) != tuple(weights[name].shape)
        for name in head
    )
    return tuple(head) if differ else ()


def summary(run: TrainedRun) -> Dict[str, Any]:
    """What identifies the weights that were used, for reports."""
    meta = run.checkpoint.meta
    return {"checkpoint": str(run.path), "model": meta["model"], "weight_updates": meta["weight_updates"]}
