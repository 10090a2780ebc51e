"""``ipucnn runs``, ``ipucnn diff`` and ``ipucnn plot``: list, compare and draw runs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import List, Tuple

from ipucnn.config.shared_options import CommandOptions
from ipucnn.config.spec import FILE, FILES, WORD, argument, option
from ipucnn.errors import ConfigurationError, DataError, ThresholdError, UserError
from ipucnn.text import counted, quoted, shown_value


@dataclass(frozen=True)
class Runs(CommandOptions):
    """The options of ``ipucnn runs``."""

    folder: Path = argument("[FOLDER]", "Folder with run folders in it.", default=Path("runs"), kind=FILE)
    sort: str = option(
        "name",
        "Order of the rows: the youngest run first, or the one with the most.",
        kind=WORD,
        metavar="name|age|accuracy|time|size",
        default_text="name",
    )


def runs(options: Runs) -> None:
    """List run folders: network, data, best figure, state, time, size and age.

    The state of a run is finished, ended early (by --target-accuracy or --early-stopping), running (another process
    is writing it), or stopped. A stopped run can be continued with `ipucnn train --resume`. The time is that of its
    training and validations; compiling and saving are not in it.
    """
    from ipucnn.reports.console import note
    from ipucnn.reports.runs import print_runs
    from ipucnn.runs.compare import SORTS, find_runs, read_run, sort_runs, summary

    folder, by = options.folder, options.sort
    if by not in SORTS:
        raise ConfigurationError(f"--sort {shown_value(by)}: must be one of {', '.join(SORTS)}", "--sort age")
    rows, damaged = [], 0
    for path in find_runs(folder):
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
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        print_runs(rows)
    if damaged:
        raise DataError(
            f"{damaged} of {damaged + len(rows)} runs could not be read", "the lines above say why"
        )


@dataclass(frozen=True)
class Diff(CommandOptions):
    """The options of ``ipucnn diff``."""

    first: Path = argument("RUN1", "A run folder.", required=True, kind=FILE)
    second: Path = argument("RUN2", "Another run folder.", required=True, kind=FILE)
    exit_code: bool = option(False, "End with exit code 5 if the runs are not equal.")


def diff(options: Diff) -> None:
    """Show how two runs differ: options, Program, versions, data, and the first weight update that differs.

    Two runs are equal if their options, Programs, data and whole histories are equal, wherever they ran.
    """
    from ipucnn.reports.runs import print_diff
    from ipucnn.runs.compare import diff_runs, read_run

    differences = diff_runs(read_run(options.first), read_run(options.second))
    if options.json:
        print(json.dumps(differences, indent=2))
    else:
        _warn(differences["warnings"])
        print_diff(differences)
    if options.exit_code and not differences["equal"]:
        raise ThresholdError("the two runs are not equal", "drop --exit-code to see the differences alone")


def _warn(warnings: List[str]) -> None:
    from ipucnn.reports.console import note

    for warning in warnings:
        note(f"warning: {warning}")


@dataclass(frozen=True)
class Plot(CommandOptions):
    """The options of ``ipucnn plot``."""

    folders: Tuple[Path, ...] = argument(
        "RUN...",
        "One or several run folders. The folder of a cross-validation stands for all its folds.",
        default=(),
        required=True,
        kind=FILES,
    )
    output: Path = option(
        Path("curves.png"),
        "The picture to write: .png, .pdf or .svg.",
        kind=FILE,
        default_text="curves.png",
    )


def plot(options: Plot) -> None:
    """Draw the curves of one or several runs: loss, accuracy (for masks: Dice) and learning rate."""
    from ipucnn.filesystem import write_output
    from ipucnn.reports.console import note
    from ipucnn.reports.figures import check_can_plot
    from ipucnn.reports.runs import draw_curves
    from ipucnn.runs.compare import read_run, runs_of
    from ipucnn.runs.folder import RUN_FILES
    from ipucnn.runs.images.outputs import PLOTS, format_of
    from ipucnn.runs.overwriting import check_outputs

    check_can_plot("ipucnn plot")
    path = options.output
    paths = [run for folder in options.folders for run in runs_of(folder)]
    inputs = [("a file of the run", run / name) for run in paths for name in RUN_FILES]
    check_outputs([("--output", path, PLOTS)], inputs)
    records = [read_run(run) for run in paths]
    for record in records:
        _warn(record.warnings)
        if not record.history:
            raise DataError(
                f"run {record.path} has no history yet",
                f"leave it out, or go on with it: ipucnn train --resume --run-dir {quoted(record.path)}",
            )
    write_output(path, lambda temporary: draw_curves(records, temporary, format_of(path, PLOTS)))
    if options.json:
        print(json.dumps({"output": str(path), "runs": [str(record.path) for record in records]}, indent=2))
    note(f"curves of {counted(len(records), 'run')} in {path}")
