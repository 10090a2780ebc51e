"""A plan's options as text."""

import json
import shlex
from typing import Any, Dict

from ipucnn.planning.pipeline_plan import PipelinePlan
from ipucnn.planning.settings import Proportions, percentages

__all__ = ["command_line", "proportion", "train_options"]


def proportion(proportions: Proportions) -> str:
    """availableMemoryProportion: of all stages, or of each."""
    text = " ".join(f"{value:g}" for value in percentages(proportions)) + "%"
    if any(own.matmul != own.convolution for own in proportions):
        text += f" (matrix products {100 * proportions[0].matmul:g}%)"
    return text


def train_options(plan: PipelinePlan) -> Dict[str, Any]:
    """The options that train with a plan anywhere: without its precision, which the host does not have yet."""
    return {name: value for name, value in plan.run_options().items() if name != "precision"}


def command_line(plan: PipelinePlan) -> str:
    """The command that runs a plan, ready to paste."""
    words = ["ipucnn", "train", shlex.quote(plan.model)]
    for name, value in train_options(plan).items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
            continue
        values = (
            value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        )
        words += [f"--{name}", *(shlex.quote(f"{v:g}" if isinstance(v, float) else str(v)) for v in values)]
    return " ".join(words)
