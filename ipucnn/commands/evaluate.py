"""``ipucnn evaluate``: measure the metrics of a trained run or of other weights."""

from typing import Optional

import typer

from ipucnn.aliases import PlainDict
from ipucnn.commands.run_arguments import (
    PATCH_SIZE,
    RUN,
    TEST_TIME_AUGMENTATION,
    WEIGHTS,
    WHICH,
    output_of_process,
    value_option,
)
from ipucnn.config.signature import with_run_options
from ipucnn.errors import ConfigurationError

PLOT = value_option(
    "--plot", "FILE", "Draw the confusion matrix and the reliability diagram: .png, .pdf or .svg."
)
PREDICTIONS = value_option("--predictions", "FILE.csv", "Write each sample's label and prediction.")
SHEET = value_option(
    "--contact-sheet",
    "FILE.png",
    "Segmentation: draw the worst images, each with its mask, the prediction and the difference.",
)
REPORT = typer.Option(
    False, "--report", help="Put the confusion matrix into report.html, the page of the run in its folder."
)


@with_run_options("evaluate", from_run=True)
def evaluate(
    flags: PlainDict,
    verbose: bool,
    json_output: bool,
    run: str = RUN,
    checkpoint: Optional[str] = WHICH,
    weights: Optional[str] = WEIGHTS,
    plot: Optional[str] = PLOT,
    predictions: Optional[str] = PREDICTIONS,
    contact_sheet: Optional[str] = SHEET,
    patch_size: Optional[int] = PATCH_SIZE,
    test_time_augmentation: int = TEST_TIME_AUGMENTATION,
    report: bool = REPORT,
) -> None:
    """Evaluate on held-out data: loss, accuracy, classes, confusion matrix, calibration; for masks also Dice and IoU.

    Every sample counts exactly once; for a segmentation network, every pixel does. The options of the run are used
    unless a flag overrides them. Weights that Keras saved need --model-name and --dataset.
    """
    from ipucnn.filesystem import expand, is_file, write_output
    from ipucnn.reports.console import LOADING, indexing_progress, note
    from ipucnn.reports.evaluate import WorstSheet, draw_evaluation, evaluation_json, print_evaluation
    from ipucnn.reports.figures import check_can_plot
    from ipucnn.reports.infer import SheetProgress
    from ipucnn.reports.runs import write_page
    from ipucnn.runs.evaluate import EvaluateRequest, evaluate_run
    from ipucnn.runs.folder import CONFIG
    from ipucnn.runs.images.outputs import PLOTS, format_of
    from ipucnn.runs.trained import Named
    from ipucnn.sessions.group import find_instances

    run_folder = expand(run)
    if report and not is_file(run_folder / CONFIG):
        raise ConfigurationError(
            f"--report: {run} is no run folder, which has a page", "drop it, or give the folder"
        )
    plot_to, predictions_to, sheet_to = map(output_of_process, (plot, predictions, contact_sheet))
    if plot_to is not None:
        check_can_plot("--plot")
    sheet = WorstSheet()
    request = EvaluateRequest(
        Named("evaluate", run, flags, which=checkpoint, weights=weights),
        plot=plot_to,
        predictions=predictions_to,
        contact_sheet=sheet_to,
        patch_size=patch_size,
        test_time_augmentation=test_time_augmentation,
        verbose=verbose,
    )
    with indexing_progress(), SheetProgress("evaluating", LOADING, sheet) as progress:
        result = evaluate_run(request, progress)
    if plot_to is not None:
        form = format_of(plot_to, PLOTS)
        write_output(plot_to, lambda temporary: draw_evaluation(result, temporary, form))
    if sheet_to is not None:
        write_output(sheet_to, sheet.save)
    if report and find_instances().is_writer:
        write_page(run_folder, result)
    if json_output:
        print(evaluation_json(result))
    else:
        print_evaluation(result)
    for option, path in (("figure", plot_to), ("predictions", predictions_to), ("contact sheet", sheet_to)):
        if path is not None:
            note(f"{option} in {path}")
