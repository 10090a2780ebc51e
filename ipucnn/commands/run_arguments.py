"""What several commands take: arguments about a run or other trained weights, and the reader of ``--plan FILE``."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ipucnn.config import spec

if TYPE_CHECKING:
    from ipucnn.planning.pipeline_plan import PipelinePlan


RUN = typer.Argument(
    ...,
    metavar="RUN",
    help="Run folder, a checkpoint in one, or Keras weights (.weights.h5, .h5, .keras) of --model-name; "
    "with --weights a network.",
)
WHICH = typer.Option(
    None,
    "--checkpoint",
    metavar="NAME",
    help="Checkpoint of the run: best, last, or a file name in it; where RUN names a network, a run or checkpoint.",
    show_default="last, else best",
)
WEIGHTS = typer.Option(
    None,
    "--weights",
    metavar="imagenet|FILE",
    help="Weights for the network that RUN then names: imagenet (of Keras Applications, downloaded once) or "
    "a Keras weight file.",
    show_default=False,
)
TILE_SIZE = typer.Option(
    None,
    "--tile-size",
    parser=spec.TILE_SIDE.flag("--tile-size"),
    metavar="N",
    help="Segmentation: height and width of the tiles that the network sees.",
    show_default="by the image's size",
)
VIEWS = typer.Option(
    1,
    "--views",
    parser=spec.VIEWS.flag("--views"),
    metavar="1|2|4|8",
    help="Segmentation: average the probabilities of so many rotated and mirrored versions of each image.",
)


def read_plan(path: Path, what: str) -> "PipelinePlan":
    """The plan of ``--plan``: the planner's reader, which is imported where there is a plan."""
    from ipucnn.planning import pipeline_plan

    return pipeline_plan.read_plan(path, what)
