"""``ipucnn infer``: the most probable classes of image files."""

import json
from pathlib import Path
from typing import Any, Dict, List, Optional

import typer

from ipucnn.commands.run_arguments import RUN, WHICH
from ipucnn.config.signature import with_run_options

IMAGES = typer.Argument(..., metavar="IMAGE...", help="Image files.")
TOP = typer.Option(5, "--top", min=1, help="Classes to show per image.")


@with_run_options("infer", from_run=True)
def infer(
    flags: Dict[str, Any],
    verbose: bool,
    json_output: bool,
    run: Path = RUN,
    images: List[Path] = IMAGES,
    top: int = TOP,
    checkpoint: Optional[str] = WHICH,
) -> None:
    """Classify image files with a trained run: the most probable labels with their probabilities."""
    from ipucnn.reports.evaluate import print_predictions
    from ipucnn.runs.evaluate import infer_run

    results = infer_run(run, images, flags, top=top, which=checkpoint, verbose=verbose)
    if json_output:
        print(json.dumps(results, indent=2))
    else:
        print_predictions(results)
