"""``ipucnn runs``, ``ipucnn diff`` and ``ipucnn plot``: list, compare and draw runs."""

import json
from typing import List, Optional

import typer

from ipucnn.commands.run_arguments import value_option
from ipucnn.errors import ConfigurationError, DataError, UserError
from ipucnn.text import counted, shown_value

AS_JSON = typer.Option(False, "--json", help="Print the result as JSON.")
FOLDER = typer.Argument("runs", metavar="[FOLDER]", help="Folder with run folders in it.")
SORT = value_option(
    "--sort",
    "name|age|accuracy|time|size",
    "Order of the rows: the youngest run first, or the one with the most.",
    shown="name",
)
RUN_1 = typer.Argument(..., metavar="RUN1", help="A run folder.")
RUN_2 = typer.Argument(..., metavar="RUN2", help="Another run folder.")
RUNS = typer.Argument(
    ...,
    metavar="RUN...",
    help="One or several run folders. The folder of a cross-validation stands for all its folds.",
)
OUTPUT = value_option("--output", "FILE", "The picture to write: .png, .pdf or .svg.", shown="curves.png")


def runs(folder: str = FOLDER, sort: Optional[str] = SORT, as_json: bool = AS_JSON) -> None:
    """List run folders: network, data, best figure, state, time, size and age.

    The state of a run is finished, ended early (by --target-accuracy or --early-stopping), running (another process
    is writing it), or stopped. A stopped run can be continued with `ipucnn train --resume`. The time is that of its
    training and validations; compiling and saving are not in it.
    """
    from ipucnn.filesystem import expand
    from ipucnn.reports.console import note
    from ipucnn.reports.runs import print_runs
    from ipucnn.runs.compare import SORTS, find_runs, read_run, sort_runs, summary

    by = "name" if sort is None else sort
    if by not in SORTS:
        raise ConfigurationError(f"--sort {shown_value(by)}: must be one of {', '.join(SORTS)}", "--sort age")
    rows, damaged = [], 0
    for path in find_runs(expand(folder)):
        try:
            record = read_run(path)
            rows.append(summary(record))
            _warn(record.warnings)
        except UserError as error:
            damaged += 1
            note(f"left out: {error.message}")
    rows = sort_runs(rows, by)
    if not rows:
        raise DataError(f"{folder} has no runs in it", "train one with: ipucnn train toy_model")
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        print_runs(rows)
    if damaged:
        raise DataError(
            f"{damaged} of {damaged + len(rows)} runs could not be read", "the lines above say why"
        )


def diff(first: str = RUN_1, second: str = RUN_2, as_json: bool = AS_JSON) -> None:
    """Show how two runs differ: options, Program, versions, data, and the first weight update that differs.

    Two runs are equal if their options, Programs, data and whole histories are equal, wherever they ran.
    """
    from ipucnn.filesystem import expand
    from ipucnn.reports.runs import print_diff
    from ipucnn.runs.compare import diff_runs, read_run

    differences = diff_runs(read_run(expand(first)), read_run(expand(second)))
    if as_json:
        print(json.dumps(differences, indent=2))
    else:
        _warn(differences["warnings"])
        print_diff(differences)


def _warn(warnings: List[str]) -> None:
    from ipucnn.reports.console import note

    for warning in warnings:
        note(f"warning: {warning}")


def plot(folders: List[str] = RUNS, output: Optional[str] = OUTPUT) -> None:
    """Draw the curves of one or several runs: loss, accuracy (for masks: Dice) and learning rate."""
    from ipucnn.filesystem import expand, write_output
    from ipucnn.reports.console import note
    from ipucnn.reports.figures import check_can_plot
    from ipucnn.reports.runs import draw_curves
    from ipucnn.runs.compare import read_run, runs_of
    from ipucnn.runs.folder import RUN_FILES
    from ipucnn.runs.images.outputs import PLOTS, check_outputs, format_of

    check_can_plot("ipucnn plot")
    path = expand("curves.png" if output is None else output)
    paths = [run for folder in folders for run in runs_of(expand(folder))]
    inputs = [("a file of the run", run / name) for run in paths for name in RUN_FILES]
    check_outputs([("--output", path, PLOTS)], inputs)
    records = [read_run(run) for run in paths]
    for record in records:
        _warn(record.warnings)
        if not record.history:
            raise DataError(
                f"run {record.path} has no history yet",
                "leave it out, or go on with it: ipucnn train --resume",
            )
    write_output(path, lambda temporary: draw_curves(records, temporary, format_of(path, PLOTS)))
    note(f"curves of {counted(len(records), 'run')} in {path}")
