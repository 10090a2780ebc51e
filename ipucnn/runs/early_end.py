"""Decides where a run ends before its last weight update, by ``--target-accuracy`` or ``--early-stopping``."""

import json
from dataclasses import dataclass
from typing import Mapping, Optional, Sequence

from ipucnn.config.options import RunConfig
from ipucnn.text import counted


@dataclass(frozen=True)
class EarlyEnd:
    """The end of a run before its last weight update.

    Attributes:
        weight_updates: the weight update of the validation that ends the run.
        option: the field of the option that ends it.
        reason: the reason, for the user.
    """

    weight_updates: int
    option: str
    reason: str


def figure_of(metrics: Mapping[str, object]) -> str:
    """Returns the name of the figure by which the best validation is chosen."""
    return "dice" if "dice" in metrics else "accuracy"


def early_end(history: Sequence[str], config: RunConfig) -> Optional[EarlyEnd]:
    """Finds the first validation that ends a run.

    The history alone decides, so that a continued run ends at the same weight update.

    Args:
        history: lines of ``metrics.jsonl``.
        config: the configuration of the run.

    Returns:
        The end; None if the run goes on.
    """
    target, patience = config.target_accuracy, config.early_stopping
    if target is None and patience is None:
        return None
    best, since_best = float("-inf"), 0
    for row in map(json.loads, history):
        if row["event"] != "validation":
            continue
        name = figure_of(row)
        figure = float(row[name])
        since_best = 0 if figure > best else since_best + 1
        best = max(best, figure)
        if target is not None and figure >= target:
            reason = f"{name} {figure:.4f} reached the target of {target:g}"
            return EarlyEnd(row["weight_updates"], "target_accuracy", reason)
        if patience is not None and since_best >= patience:
            reason = f"none of the last {counted(since_best, 'validation')} was better than {name} {best:.4f}"
            return EarlyEnd(row["weight_updates"], "early_stopping", reason)
    return None
