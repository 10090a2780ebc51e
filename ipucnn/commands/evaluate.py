"""``ipucnn evaluate``: measure the metrics of a trained run or of other weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ipucnn.config.shared_options import PatchOptions
from ipucnn.config.spec import option
from ipucnn.errors import ConfigurationError


@dataclass(frozen=True)
class Evaluate(PatchOptions):
    """The options of ``ipucnn evaluate``."""

    plot: Optional[Path] = option(
        None,
        "Draw the confusion matrix and the reliability diagram: .png, .pdf or .svg.",
    )
    predictions: Optional[Path] = option(
        None,
        "Write each sample's label and prediction.",
        metavar="FILE.csv",
    )
    contact_sheet: Optional[Path] = option(
        None,
        "Segmentation: draw the worst images, each with its mask, the prediction and the difference.",
        metavar="FILE.png",
    )
    report: bool = option(
        False, "Put the confusion matrix into report.html, the page of the run in its folder."
    )


def evaluate(options: Evaluate) -> None:
    """Evaluate on held-out data: loss, accuracy, classes, confusion matrix, calibration; for masks also Dice and IoU.

    Every sample counts exactly once; for a segmentation network, every pixel does. The options of the run are used
    unless a flag overrides them. Weights that Keras saved need --model-name and --dataset.
    """
    from ipucnn.events import show
    from ipucnn.filesystem import expand, write_output
    from ipucnn.reports.console import Screen, note
    from ipucnn.reports.evaluate import WorstSheet, draw_evaluation, evaluation_json, print_evaluation
    from ipucnn.reports.figures import check_can_plot
    from ipucnn.reports.runs import write_page
    from ipucnn.runs.evaluate import EvaluateRequest, evaluate_run
    from ipucnn.runs.folder import CONFIG
    from ipucnn.runs.images.outputs import PLOTS, format_of
    from ipucnn.runs.sources import WeightsArgument
    from ipucnn.runs.writer import open_writer
    from ipucnn.sessions.role import find_role

    run_folder = expand(options.run)
    if options.report and not (run_folder / CONFIG).is_file():
        raise ConfigurationError(
            f"--report: {options.run} is no run folder, which has a page", "drop it, or give the folder"
        )
    role = find_role()
    plot_to, predictions_to, sheet_to = map(
        role.path, (options.plot, options.predictions, options.contact_sheet)
    )
    if plot_to is not None:
        check_can_plot("--plot")
    sheet = WorstSheet()
    request = EvaluateRequest(
        WeightsArgument(
            "evaluate", options.run, options.flags, which=options.checkpoint, weights=options.weights
        ),
        plot=plot_to,
        predictions=predictions_to,
        contact_sheet=sheet_to,
        patch_size=options.patch_size,
        test_time_augmentation=options.test_time_augmentation,
        verbose=options.verbose,
    )
    result = show(evaluate_run(request), Screen(take=sheet.take))
    if plot_to is not None:
        form = format_of(plot_to, PLOTS)
        write_output(plot_to, lambda temporary: draw_evaluation(result, temporary, form))
    if sheet_to is not None:
        write_output(sheet_to, sheet.save)
    if options.report:
        write_page(open_writer(role, run_folder), result)
    if options.json:
        print(evaluation_json(result))
    else:
        print_evaluation(result)
    for what, path in (("figure", plot_to), ("predictions", predictions_to), ("contact sheet", sheet_to)):
        if path is not None:
            note(f"{what} in {path}")
