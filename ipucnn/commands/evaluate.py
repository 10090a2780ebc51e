"""``ipucnn evaluate``: the metrics of a trained run or of other weights."""

from pathlib import Path
from typing import Any, Dict, Optional

import typer

from ipucnn.commands.run_arguments import RUN, TILE_SIZE, VIEWS, WEIGHTS, WHICH
from ipucnn.config.signature import with_run_options

PLOT = typer.Option(
    None,
    "--plot",
    metavar="FILE",
    help="Draw the confusion matrix and the reliability diagram: .png, .pdf or .svg.",
)
PREDICTIONS = typer.Option(
    None, "--predictions", metavar="FILE.csv", help="Write each sample's label and prediction."
)
SHEET = typer.Option(
    None,
    "--contact-sheet",
    metavar="FILE.png",
    help="Segmentation: draw the worst images with truth, prediction and difference.",
)


@with_run_options("evaluate", from_run=True)
def evaluate(
    flags: Dict[str, Any],
    verbose: bool,
    json_output: bool,
    run: str = RUN,
    checkpoint: Optional[str] = WHICH,
    weights: Optional[str] = WEIGHTS,
    plot: Optional[Path] = PLOT,
    predictions: Optional[Path] = PREDICTIONS,
    contact_sheet: Optional[Path] = SHEET,
    tile_size: Optional[int] = TILE_SIZE,
    views: int = VIEWS,
) -> None:
    """Evaluate on held-out data: loss, accuracy, classes, confusion matrix, calibration; of masks Dice, IoU, V^Rand.

    Every sample counts exactly once, and of a segmentation network every pixel. A run's own options hold unless
    a flag overrides them; weights of Keras take --model-name and --dataset.
    """
    from ipucnn.reports.console import note
    from ipucnn.reports.evaluate import evaluation_json, print_evaluation
    from ipucnn.reports.progress import ItemProgress
    from ipucnn.runs.evaluate import evaluate_run

    if plot is not None:
        from ipucnn.reports.evaluate_plot import check_can_plot

        check_can_plot()
    from ipucnn.reports.evaluate_masks import WorstSheet, print_mask_evaluation

    sheet = WorstSheet()
    with ItemProgress("evaluating") as progress:
        result = evaluate_run(
            run,
            flags,
            which=checkpoint,
            weights=weights,
            plot=plot,
            predictions=predictions,
            contact_sheet=contact_sheet,
            tile_size=tile_size,
            views=views,
            verbose=verbose,
            say=note,
            on_batch=progress.update,
            on_image=sheet.add_image,
        )
    if plot is not None:
        from ipucnn.filesystem import write_atomically
        from ipucnn.reports.evaluate_plot import draw_evaluation

        write_atomically(plot, lambda temporary: draw_evaluation(result, temporary, plot.suffix))
    if contact_sheet is not None:
        from ipucnn.filesystem import write_atomically

        write_atomically(contact_sheet, sheet.save)
    if json_output:
        print(evaluation_json(result))
    elif "segmentation" in result:
        print_mask_evaluation(result)
    else:
        print_evaluation(result)
    for option, path in (("figure", plot), ("predictions", predictions), ("contact sheet", contact_sheet)):
        if path is not None:
            note(f"{option} in {path}")
