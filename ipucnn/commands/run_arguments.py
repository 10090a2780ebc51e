"""Arguments that several commands share: about runs and other trained weights, and the reader of ``--plan FILE``."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Mapping, Optional

from ipucnn.config import bounds
from ipucnn.config.command import RunOptions, argument, word
from ipucnn.config.spec import WEIGHTS, option
from ipucnn.errors import ConfigurationError
from ipucnn.filesystem import shown

if TYPE_CHECKING:
    from ipucnn.planning.pipeline_plan import PipelinePlan


@dataclass(frozen=True)
class WeightsOptions(RunOptions):
    """Options of a command on trained weights: those of a run, or others."""

    FROM_RUN: ClassVar[bool] = True

    run: str = argument(
        "RUN",
        "A run folder, a checkpoint in one, or an exported network in its folder (.onnx, .tflite). Or weights that "
        "Keras saved (.weights.h5, .h5, .keras), with --model-name; or a network's name, with --weights.",
        required=True,
    )
    checkpoint: Optional[str] = word(
        "NAME",
        "Checkpoint of the run: best, last, or a file name in it. If RUN is a network's name: a run or a checkpoint.",
        default_text="last, else best",
    )
    weights: Optional[str] = option(
        None,
        "Weights for the network whose name is given as RUN: imagenet (those of Keras Applications, downloaded once), "
        "or a weight file of Keras.",
        metavar="imagenet|FILE",
        kind=WEIGHTS,
    )


@dataclass(frozen=True)
class PatchOptions(WeightsOptions):
    """Options of a command that predicts masks patch by patch."""

    patch_size: Optional[int] = option(
        None,
        "Segmentation: height and width of the patches that the network sees.",
        metavar="N",
        within=bounds.PATCH_SIDE,
        default_text="by the image's size",
    )
    test_time_augmentation: int = option(
        1,
        "Segmentation: average the probabilities over this many rotated and mirrored versions of each image.",
        metavar="1|2|4|8",
        within=bounds.TEST_TIME_AUGMENTATION,
        default_text="1",
    )


def refuse_given(values: Mapping[str, object], why: str, hint: str) -> None:
    """Refuses options that were given beside another one.

    Args:
        values: the value of each option by its flag.
        why: follows the flag in the error.
        hint: the hint of the error.

    Raises:
        ConfigurationError: an option was given; the error names the first.
    """
    for flag, value in values.items():
        if value:
            raise ConfigurationError(f"{flag}{why}", hint)


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
            f"ipucnn {plan.command} --plan {name}, or make one for training: ipucnn plan-splits {plan.model} "
            f"--stages {plan.num_stages} --save FILE",
        )
    return plan
