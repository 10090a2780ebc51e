"""A plan's figures and options as text."""

import json
import shlex
from typing import Any, Dict

from ipucnn.planning.pipeline_plan import PipelinePlan
from ipucnn.planning.settings import Proportions, percentages

__all__ = ["command_line", "images", "mebibytes", "milliseconds", "percent", "train_options"]


def milliseconds(seconds: float) -> str:
    """0.00213 -> ``2.13 ms``; below a tenth of a millisecond microseconds, above ten seconds seconds."""
    if seconds >= 10:
        return f"{seconds:.3g} s"
    if seconds and seconds < 1e-4:
        return f"{1e6 * seconds:.3g} \u00b5s"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{1e3 * seconds:,.0f} ms"


def mebibytes(bytes_: float) -> str:
    """Three digits or whole MiB; an IPU's memory is told in MiB by its maker."""
    value = bytes_ / 2**20
    return f"{value:,.0f} MiB" if value >= 100 else f"{value:.3g} MiB"


def proportion(proportions: Proportions) -> str:
    """availableMemoryProportion: of all stages, or of each."""
    text = " ".join(f"{value:g}" for value in percentages(proportions)) + "%"
    if any(own.matmul != own.convolution for own in proportions):
        text += f" (matrix products {100 * proportions[0].matmul:g}%)"
    return text


def percent(share: float) -> str:
    """0.804 -> ``80%``."""
    return f"{100 * share:.0f}%" if share >= 0.0995 or not share else f"{100 * share:.2g}%"


def images(images_per_s: float) -> str:
    return f"{images_per_s:,.0f}" if images_per_s >= 100 else f"{images_per_s:.3g}"


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
