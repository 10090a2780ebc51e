"""Finding what a training run continues from, before TensorFlow is imported."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from ipucnn.config.resolve import Resolved, resolve_resumed
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.filesystem import absolute, exists, expand, is_file, is_folder
from ipucnn.runs import checkpoints
from ipucnn.runs.folder import (
    CONFIG,
    METRICS,
    RunFolder,
    check_checkpoint_dir,
    check_new,
    check_new_checkpoints,
    claim_default,
    default_run_dir,
    is_unfinished,
    latest_run_dir,
)
from ipucnn.training.checkpoints import Checkpoint


@dataclass
class Start:
    """Where a run begins.

    Attributes:
        resolved: the configuration; that of the run folder if it is continued.
        folder: the run folder, which need not exist yet.
        in_place: the folder is a run's already, and stays it.
        checkpoint: what to continue from; None to begin.
        checkpoint_path: its file.
        notes: what to tell the user, one line each.
        report: that of the run if it is finished already.
        takes_default: the folder is the next free one of its name, whoever else asks for one meanwhile.
    """

    resolved: Resolved
    folder: RunFolder
    in_place: bool
    checkpoint: Optional[Checkpoint]
    checkpoint_path: Optional[Path]
    notes: List[str]
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
    if config.resume:
        path = _resumed_path(resolved)
        if is_file(path / CONFIG, "run folder"):
            return _continue(resolved, path)
        if not is_unfinished(path):
            check_new(path, overwrite=False)
        start = _fresh(resolved, path)
        start.notes.insert(0, f"nothing to resume in {path}: the run begins")
        return start
    takes_default = config.run_dir is None
    path = (
        default_run_dir(config.model_name, resolved.choice.name)
        if config.run_dir is None
        else expand(config.run_dir, "--run-dir")
    )
    check_new(path, config.overwrite)
    return replace(_fresh(resolved, path), takes_default=takes_default)


def _resumed_path(resolved: Resolved) -> Path:
    config = resolved.config
    if config.run_dir is not None:
        return expand(config.run_dir, "--run-dir")
    latest = latest_run_dir(config.model_name, resolved.choice.name)
    return latest or default_run_dir(config.model_name, resolved.choice.name)


def _checkpoint_dir(directory: Optional[str]) -> Optional[str]:
    if directory is None:
        return None
    return str(absolute(expand(directory, "--checkpoint-dir"), "--checkpoint-dir"))


def _fresh(resolved: Resolved, path: Path) -> Start:
    config = resolved.config
    checkpoint_dir = _checkpoint_dir(config.checkpoint_dir)
    if checkpoint_dir is not None:
        check_checkpoint_dir(path, Path(checkpoint_dir))
        check_new_checkpoints(Path(checkpoint_dir), config.overwrite)
    start = Start(resolved, RunFolder(path, checkpoint_dir), False, None, None, [])
    if config.checkpoint_input_dir is not None:
        folder = expand(config.checkpoint_input_dir, "--checkpoint-input-dir")
        found, skipped = _read(folder)
        if not config.training:
            return start  # each of them is validated
        start.checkpoint_path, start.checkpoint = found
        start.notes += skipped
        # The seed of the run that is continued, or the data order and dropout would be another's.
        if config.seed is None:
            seeded = replace(config, seed=int(start.checkpoint.meta["seed"]))
            start.resolved = replace(resolved, config=seeded)
        start.notes.append(_where(start))
    return start


def _continue(resolved: Resolved, path: Path) -> Start:
    saved = RunFolder(path).read_config()
    merged = resolve_resumed(resolved, saved, str(path))
    config = replace(merged.config, overwrite=False)
    merged = replace(merged, config=config)
    folder = RunFolder(path, _checkpoint_dir(config.checkpoint_dir))
    start = Start(merged, folder, True, None, None, [])
    report = folder.read_report()
    if report is not None and config.num_epochs == saved.num_epochs:
        start.report = report
        return start
    if report is not None and saved.clean_dir and config.checkpoint_input_dir is None:
        raise DataError(
            f"{path} is finished and its checkpoints were deleted (--clean-dir): nothing to train on from",
            "train again with another --run-dir",
        )
    _check_checkpoint_dir(resolved, saved, folder)
    if config.checkpoint_input_dir is not None:
        found, start.notes = _read(expand(config.checkpoint_input_dir, "--checkpoint-input-dir"))
    else:
        newest, start.notes = checkpoints.newest(folder.checkpoints)
        if newest is None and start.notes:
            raise DataError(
                f"no checkpoint of {path} is readable; {start.notes[0]}",
                f"start it again with --overwrite --run-dir {path}",
            )
        start.notes = [f"warning: {note}; the one before it is used" for note in start.notes]
        if newest is None:
            start.notes.append(f"{path} ended before its first checkpoint: the run begins again")
            return start
        found = newest
    start.checkpoint_path, start.checkpoint = found
    start.notes.append(_where(start))
    return start


def _check_checkpoint_dir(resolved: Resolved, saved: Any, folder: RunFolder) -> None:
    """Refuses to begin again because the run's checkpoints are looked for in the wrong place."""
    if checkpoints.has_checkpoints(folder.checkpoints) or resolved.config.checkpoint_input_dir is not None:
        return
    former = RunFolder(folder.path, saved.checkpoint_dir).checkpoints
    if former != folder.checkpoints and checkpoints.has_checkpoints(former):
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
    if not is_folder(folder, "checkpoint folder"):
        raise DataError(
            f"checkpoint folder {folder} does not exist", "give the checkpoints folder of a run (*.npz files)"
        )
    found, skipped = checkpoints.newest(folder)
    if found is None:
        reason = f": {skipped[0]}" if skipped else ""
        raise DataError(
            f"there is no readable checkpoint in {folder}{reason}",
            "give the checkpoints folder of a run (*.npz files)",
        )
    return found, [f"warning: {note}; the one before it is used" for note in skipped]


def _where(start: Start) -> str:
    assert start.checkpoint is not None
    done = int(start.checkpoint.meta["weight_updates"])
    per_epoch = start.checkpoint.meta.get("program", {}).get("weight_updates_per_epoch")
    epoch = f" (epoch {done / per_epoch:.2f})" if per_epoch else ""
    return f"continuing after weight update {done}{epoch}, checkpoint {start.checkpoint_path}"


def check_same_run(start: Start, config: Any, program: Any, info: Any, data_sha256: str) -> None:
    """Refuses a checkpoint of another run than the one that is to be continued.

    Raises:
        ConfigurationError: naming the first difference.
        DataError: there is nothing left to train.
    """
    if start.checkpoint is None:
        return
    found = checkpoints.differences(start.checkpoint.meta, config, program, info, data_sha256)
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
