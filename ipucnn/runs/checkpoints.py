"""Checkpoints of runs: their names, the facts of the training set in them, and opening a trained run.

``resume.py`` decides which checkpoint a run continues from, and what it takes from it; ``training/checkpoints.py``
defines the file format.  Nothing here imports TensorFlow.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

import numpy as np

from ipucnn.aliases import PlainValue, TfVariable
from ipucnn.config.options import RunConfig
from ipucnn.datasets.base import DatasetInfo
from ipucnn.errors import DataError
from ipucnn.filesystem import Kind, entries, kind_of
from ipucnn.models.registry import get_model, is_keras_file, refuse_other_form
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
from ipucnn.sessions.session import NotFiniteError, is_checkpoint_due
from ipucnn.text import quoted
from ipucnn.training.checkpoints import Checkpoint, load_checkpoint
from ipucnn.training.program import Program


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


def keras_checkpoints(folder: Path) -> List[Path]:
    """Returns Keras's weight files in a folder without checkpoints of a run, sorted by the epochs in their names."""
    paths = entries(folder)
    if any(is_checkpoint_name(path.name) for path in paths):
        return []
    return sorted(
        (path for path in paths if is_keras_file(path.name)), key=lambda path: (epoch_of(path), path.name)
    )


def epoch_of(path: Path) -> float:
    """Returns the epoch in a name such as ``epoch_2.5.h5``, which Graphcore's public application writes; else 0."""
    epoch = re.search(r"epoch_(\d{1,9}(\.\d{1,9})?)", path.name)
    return float(epoch.group(1)) if epoch else 0.0


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


def trained_facts(meta: Mapping[str, PlainValue]) -> DatasetInfo:
    """Returns the facts of the training set in a checkpoint or its export.

    Neither its place nor the numbers of its images are known.
    """
    return DatasetInfo(
        name=meta["dataset"],
        task=get_model(meta["model"]).task,
        num_classes=int(meta["num_classes"]),
        image_shape=tuple(meta["image_shape"]),
        num_train=0,
        num_eval=0,
        class_names=tuple(meta["class_names"]),
        location="",
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
        folder: the run folder; None for a checkpoint that is not in one.
        config: the resolved configuration.
        checkpoint: the weights and the facts of the checkpoint.
        path: the file of the checkpoint.
    """

    folder: Optional[RunFolder]
    config: RunConfig
    checkpoint: Checkpoint
    path: Path

    @property
    def meta(self) -> Dict[str, Any]:
        """The facts of the checkpoint."""
        return self.checkpoint.meta


def open_run(path: Path, which: Optional[str] = None, command: str = "evaluate") -> TrainedRun:
    """Opens a run folder, or a checkpoint inside one.

    Args:
        path: ``runs/NAME``, or ``runs/NAME/checkpoints/best.npz``.
        which: "best", "last" or the name of a checkpoint file in the run; None: the last if there is one, else the
            best.  It is ignored if ``path`` is a checkpoint.
        command: the command of the user, for hints.

    Raises:
        DataError: the path is not a run, or the run has no such checkpoint or a damaged one, or the folder is a
            cross-validation, which has a run for each fold, or the path is another form of a Keras model.
    """
    kind = kind_of(path)
    refuse_other_form(path)
    if kind not in (Kind.ABSENT, Kind.FOLDER):
        checkpoint = load_checkpoint(path)
        config = RunConfig.from_yaml(checkpoint.meta["config"], str(path))
        inside = path.absolute().parent
        # A checkpoint may have been copied into the run folder, or be all that is left of the run.
        runs = [inside.parent, inside] if inside.name == CHECKPOINTS else [inside]
        folder = next((RunFolder(run) for run in runs if (run / CONFIG).is_file()), None)
        return TrainedRun(folder, config, checkpoint, path)
    check_one_run(path, command)
    config = RunFolder(path).read_config()
    if config.kfold is not None and config.fold is None:
        raise DataError(f"{path} is a cross-validation without a fold", CONTINUE_FOLDS.format(quoted(path)))
    folder = RunFolder(path, config.checkpoint_dir)
    names = [LAST, BEST] if which is None else [which if which.endswith(".npz") else f"{which}.npz"]
    for name in names:
        candidate = folder.checkpoints / name
        if candidate.exists():
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
