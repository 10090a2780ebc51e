"""Arguments that several commands share: about runs and other trained weights, and the reader of ``--plan FILE``."""

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Union

import typer

from ipucnn.config import spec
from ipucnn.errors import ConfigurationError
from ipucnn.filesystem import shown

if TYPE_CHECKING:
    from ipucnn.planning.pipeline_plan import PipelinePlan


def value_option(
    name: str,
    metavar: str,
    help: str,
    panel: Optional[str] = None,
    number: Optional[spec.Number] = None,
    shown: Union[bool, str] = False,
) -> Any:
    """Returns an option of a command that takes a value; it is None if it was not typed.

    Args:
        name: the option with its dashes.
        metavar: the placeholder of the value in the help.
        help: the help text.
        panel: the title of the panel in the help.
        number: the range of legal numbers; None for a text.
        shown: the default as the help shows it.
    """
    return typer.Option(
        None,
        name,
        parser=None if number is None else number.flag(name),
        metavar=metavar,
        help=help,
        show_default=shown,
        rich_help_panel=panel,
    )


def output_of_process(text: Optional[str]) -> Optional[Path]:
    """Returns the path to which this process writes an output.

    The first of several instances of poprun writes to the given file; the others write to a temporary file of the
    same name.
    """
    from ipucnn.filesystem import expand
    from ipucnn.sessions.group import find_instances

    path = None if text is None else expand(text)
    if path is None or find_instances().is_writer:
        return path
    folder = tempfile.mkdtemp(prefix="ipucnn-instance-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder) / path.name


RUN = typer.Argument(
    ...,
    metavar="RUN",
    help="A run folder, a checkpoint in one, or an exported network in its folder (.onnx, .tflite). Or weights that "
    "Keras saved (.weights.h5, .h5, .keras), with --model-name; or a network's name, with --weights.",
)
WHICH = value_option(
    "--checkpoint",
    "NAME",
    "Checkpoint of the run: best, last, or a file name in it. If RUN is a network's name: a run or a checkpoint.",
    shown="last, else best",
)
WEIGHTS = value_option(
    "--weights",
    "imagenet|FILE",
    "Weights for the network whose name is given as RUN: imagenet (those of Keras Applications, downloaded once), or a "
    "weight file of Keras.",
)
PATCH_SIZE = value_option(
    "--patch-size",
    "N",
    "Segmentation: height and width of the patches that the network sees.",
    number=spec.PATCH_SIDE,
    shown="by the image's size",
)
THRESHOLD = value_option(
    "--threshold",
    "P",
    "Segmentation of two classes: the probability of the second class above which a pixel belongs to it. `evaluate` "
    "recommends one, and saves it in the run.",
    number=spec.THRESHOLD,
    shown="as evaluate recommends, else 0.5",
)
TEST_TIME_AUGMENTATION = typer.Option(
    1,
    "--test-time-augmentation",
    parser=spec.TEST_TIME_AUGMENTATION.flag("--test-time-augmentation"),
    metavar="1|2|4|8",
    help="Segmentation: average the probabilities over this many rotated and mirrored versions of each image.",
)


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
