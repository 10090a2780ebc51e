"""What a run's checkpoints hold beyond weights and optimizer state, and which of them to continue from.

A checkpoint is all that is needed to go on: model, optimizer, position (data order, augmentation, dropout and
schedule are pure functions of seed and position), the half-done execution, and the history so far.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

import numpy as np

from ipucnn.config.options import RunConfig
from ipucnn.config.resolve import RESUMABLE
from ipucnn.errors import DataError, UserError
from ipucnn.runs.folder import BEST, LAST, is_checkpoint_name
from ipucnn.training.checkpoints import Checkpoint, assign_weights, load_checkpoint


class NotFiniteWeightsError(UserError):
    """The weights became NaN or infinite, so that there is nothing worth saving."""


@dataclass
class RunState:
    """What a run knows beside the session's state; saved in every checkpoint.

    Attributes:
        history: the lines of ``metrics.jsonl``.
        best: metrics of the best validation.
        last_validation: metrics of the latest validation.
        written: names of the checkpoints the run has written.
    """

    history: List[str]
    best: Optional[Dict[str, float]] = None
    last_validation: Optional[Dict[str, float]] = None
    written: Tuple[str, ...] = ()


def position(state: Any, run: RunState) -> Dict[str, Any]:
    """The meta entries that say where a run stands."""
    return {
        "weight_updates": state.weight_updates,
        "position": {
            "losses": state.losses,
            "hits": state.hits,
            "events_done": state.events_done,
        },
        "run": {
            "history": "".join(run.history),
            "best": run.best,
            "last_validation": run.last_validation,
            "written": sorted(run.written),
        },
    }


def arrays(variables: Mapping[str, Any], learning_rate: float) -> Dict[str, Any]:
    """The variables' values, if all of them are finite.

    Raises:
        NotFiniteWeightsError: naming the first that is not.
    """
    values = {name: variable.numpy() for name, variable in variables.items()}
    for name, value in values.items():
        if not np.all(np.isfinite(value)):
            raise NotFiniteWeightsError(
                f"{name} is no longer finite; no checkpoint of it is written",
                f"lower the learning rate (it was {learning_rate:.4g}); checkpoints written before are kept",
            )
    return values


def restore(checkpoint: Checkpoint, state: Any, what: str) -> RunState:
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
        slot.assign(checkpoint.slots[name])
    try:
        at, run = checkpoint.meta["position"], checkpoint.meta["run"]
        state.weight_updates = int(checkpoint.meta["weight_updates"])
        state.losses, state.hits = list(at["losses"]), list(at["hits"])
        state.events_done = int(at["events_done"])
        history = run["history"].splitlines(keepends=True)
        for line in history:
            json.loads(line)
        return RunState(history, run["best"], run["last_validation"], tuple(run["written"]))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{what} cannot be continued: its position is not readable ({error})",
            "start from its weights alone with: --weights " + what,
        ) from None


def differences(meta: Mapping[str, Any], config: RunConfig, program: Any, info: Any) -> List[str]:
    """What of a checkpoint's run is not as here, except what may change; readable."""
    saved = RunConfig.from_yaml(str(meta.get("config", "")), "checkpoint")
    found = [
        f"{field.name.replace('_', '-')} {getattr(saved, field.name)} there, {getattr(config, field.name)} here"
        for field in fields(RunConfig)
        if field.name not in RESUMABLE and getattr(saved, field.name) != getattr(config, field.name)
    ]
    if not found:
        ignored = ("num_epochs", "num_executions", "splits_from")
        here, there = program.to_dict(), meta.get("program", {})
        here = json.loads(json.dumps(here))
        found = [
            f"program's {name.replace('_', ' ')} {there.get(name)} there, {value} here"
            for name, value in here.items()
            if name not in ignored and there.get(name) != value
        ]
        facts = {"mean": list(info.mean), "std": list(info.std), "class_names": list(info.class_names)}
        found += [
            f"data set's {name.replace('_', ' ')} {meta.get(name)} there, {value} here"
            for name, value in facts.items()
            if meta.get(name) != value
        ]
    return found


def list_checkpoints(folder: Path) -> Tuple[List[Path], List[str]]:
    """The numbered checkpoints of a folder in the order they were trained (else the last or best one), and none
    that is damaged: for those the reasons.

    Raises:
        DataError: the folder does not exist or has no good checkpoint.
    """
    hint = "give the checkpoints folder of a run (*.npz files)"
    if not folder.is_dir():
        raise DataError(f"checkpoint folder {folder} does not exist", hint)
    names = sorted(path for path in folder.glob("checkpoint-*.npz"))
    names = names or [folder / name for name in (LAST, BEST) if (folder / name).is_file()][:1]
    good, bad = [], []
    for path in names:
        try:
            load_checkpoint(path)
            good.append(path)
        except DataError as error:
            bad.append(error.message)
    if not good:
        raise DataError(
            f"there is no readable checkpoint in {folder}" + "".join(f": {b}" for b in bad[:1]), hint
        )
    return good, bad


def load_for_validation(path: Path, state: Any) -> int:
    """Loads a checkpoint's weights alone; returns its weight updates.

    Raises:
        DataError: it is of another model.
    """
    checkpoint = load_checkpoint(path)
    assign_weights(state.weights, checkpoint, what=str(path))
    return int(checkpoint.meta["weight_updates"])


def require_finite_loss(metrics: Mapping[str, float], weight_updates: int) -> None:
    """Refuses a validation whose loss is no number.

    Raises:
        NotFiniteWeightsError: it is NaN or infinite.
    """
    if not np.isfinite(metrics.get("loss", 0.0)):
        raise NotFiniteWeightsError(
            f"the validation loss is {metrics['loss']} after weight update {weight_updates}",
            "lower the learning rate; checkpoints written before are kept",
        )


def newest(folder: Path) -> Tuple[Optional[Tuple[Path, Checkpoint]], List[str]]:
    """The newest good checkpoint of a folder, if any, and why others were passed over.

    ``last.npz`` is never older than the others; should it be damaged, the numbered ones are tried from the
    highest on, then ``best.npz``.
    """
    names = (
        [path for path in folder.glob("*.npz") if is_checkpoint_name(path.name)] if folder.is_dir() else []
    )
    order = {LAST: 0, BEST: 2}
    bad: List[str] = []
    for path in sorted(sorted(names, reverse=True), key=lambda p: order.get(p.name, 1)):
        try:
            return (path, load_checkpoint(path)), bad
        except DataError as error:
            bad.append(error.message)
    return None, bad
