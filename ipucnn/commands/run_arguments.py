"""What several commands do with their options: the reader of ``--plan FILE``, and the refusal of options."""

from pathlib import Path
from typing import TYPE_CHECKING

from ipucnn.errors import ConfigurationError
from ipucnn.filesystem import shown
from ipucnn.text import quoted

if TYPE_CHECKING:
    from ipucnn.planning.pipeline_plan import PipelinePlan


def read_plan(path: Path) -> "PipelinePlan":
    """Reads the plan of ``--plan``; the planner is imported only if there is one."""
    from ipucnn.planning import pipeline_plan

    return pipeline_plan.read_plan(path)


def read_training_plan(path: Path) -> "PipelinePlan":
    """Reads the plan of ``--plan`` for training.

    Raises:
        ConfigurationError: the plan is for inference.
    """
    plan = read_plan(path)
    if not plan.settings.training:
        name = shown(path)
        raise ConfigurationError(
            f"--plan {name} is a plan for inference",
            f"ipucnn {plan.command} --plan {quoted(path)}, or make one for training: ipucnn plan-splits "
            f"{quoted(plan.model)} --stages {plan.num_stages} --save FILE",
        )
    return plan
