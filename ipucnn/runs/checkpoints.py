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
from ipucnn.errors import DataError
from ipucnn.filesystem import entries
from ipucnn.runs.folder import BEST, LAST, is_checkpoint_name
from ipucnn.sessions.session import NotFiniteError, is_checkpoint_due
from ipucnn.text import shown_value
from ipucnn.training.checkpoints import Checkpoint, assign_weights, load_checkpoint, read_meta


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
        },
    }


def arrays(variables: Mapping[str, Any], learning_rate: float) -> Dict[str, Any]:
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
    # Not splitlines, which also splits where text has other separators than line feeds.
    history = [line + "\n" for line in run["history"].split("\n")[:-1]]
    return RunState(history, run["best"], run["last_validation"])


def differences(
    meta: Mapping[str, Any], config: RunConfig, program: Any, info: Any, data_sha256: str
) -> List[str]:
    """What of a checkpoint's run is not as here, except what may change; readable."""
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
        here, there = program.to_dict(), meta.get("program", {})
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


def list_checkpoints(folder: Path, state: Any) -> Tuple[List[Path], List[str]]:
    """The numbered checkpoints of a folder in the order they were trained (else the last or best one), and none
    that is damaged: for those the reasons.

    Args:
        folder: was found to have a good checkpoint.
        state: the session's ``TrainState``, whose weights they must have; it ends with the last one's.

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
        NotFiniteError: it is NaN or infinite.
    """
    if not np.isfinite(metrics.get("loss", 0.0)):
        raise NotFiniteError(
            f"the validation loss is {metrics['loss']} after weight update {weight_updates}",
            "lower the learning rate; checkpoints written before are kept",
        )


def checkpoint_name(weight_updates: int) -> str:
    """File name of a numbered checkpoint."""
    return f"checkpoint-{weight_updates:08d}.npz"


def written_names(program: Any, first: int, last: int) -> List[str]:
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
    """Where a checkpoint was written, without reading the rest; infinity if that cannot be read."""
    try:
        return float(read_meta(path)["weight_updates"])
    except DataError:
        return float("inf")


def newest(folder: Path) -> Tuple[Optional[Tuple[Path, Checkpoint]], List[str]]:
    """The newest good checkpoint of a folder, if any, and why newer ones were passed over."""
    names = [path for path in entries(folder, "checkpoint folder") if is_checkpoint_name(path.name)]
    bad: List[str] = []
    for path in sorted(names, key=lambda p: (-_weight_updates(p), p.name != LAST, p.name)):
        try:
            return (path, load_checkpoint(path)), bad
        except DataError as error:
            bad.append(error.message)
    return None, bad
