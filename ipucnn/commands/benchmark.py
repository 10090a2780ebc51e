"""``ipucnn benchmark``: measure throughput and time."""

from pathlib import Path
from typing import Any, Optional

import typer

from ipucnn.config.resolve import Resolved
from ipucnn.config.signature import with_run_options

PANEL = "Measuring"
MODE = typer.Option(
    False,
    "--training/--inference",
    "--train/--infer",
    help="Measure weight updates, or forward passes.  [default: inference]",
    show_default=False,
    rich_help_panel=PANEL,
)
COMPARE = typer.Option(
    None,
    "--compare-with",
    metavar="keras",
    help="Measure plain Keras fit or predict too, in turns, and print the ratio.",
    rich_help_panel=PANEL,
)
EXECUTIONS = typer.Option(
    10,
    "--executions",
    metavar="INT",
    help="Measure at least so many executions.  [default: 10]",
    show_default=False,
    rich_help_panel=PANEL,
)
MIN_TIME = typer.Option(
    10.0,
    "--min-time",
    metavar="SECONDS",
    help="Measure at least so long.  [default: 10]",
    show_default=False,
    rich_help_panel=PANEL,
)
MAX_TIME = typer.Option(
    150.0,
    "--max-time",
    metavar="SECONDS",
    help="End after so long; a third of it is kept for measuring.  [default: 150]",
    show_default=False,
    rich_help_panel=PANEL,
)
SYSTEM = typer.Option(
    None,
    "--system",
    metavar="NAME",
    help="IPU machine to predict for.  [default: the smallest of m2000, pod16, ... with the IPUs]",
    show_default=False,
    rich_help_panel=PANEL,
)
BASELINE = typer.Option(
    None,
    "--baseline",
    metavar="FILE",
    help="Compare with an earlier report.json; exit code 5 if this is slower.",
    rich_help_panel=PANEL,
)
MAX_REGRESSION = typer.Option(
    None,
    "--max-regression",
    metavar="P%",
    help="Share of the baseline's speed that may be lost.  [default: 5%]",
    show_default=False,
    rich_help_panel=PANEL,
)


@with_run_options("benchmark")
def benchmark(
    resolved: Resolved,
    verbose: bool,
    json_output: bool,
    training: bool = MODE,
    compare_with: Optional[str] = COMPARE,
    executions: int = EXECUTIONS,
    min_time: float = MIN_TIME,
    max_time: float = MAX_TIME,
    system: Optional[str] = SYSTEM,
    baseline: Optional[str] = BASELINE,
    max_regression: Optional[str] = MAX_REGRESSION,
) -> None:
    """Measure throughput and time, beside what is predicted of IPUs.

    Takes the options of `ipucnn train` that decide about speed, so that what is measured is what would run.
    """
    from ipucnn.benchmarking.folder import check_folder, write_folder
    from ipucnn.benchmarking.run import Benchmark
    from ipucnn.benchmarking.settings import make_settings
    from ipucnn.reports.benchmark import BenchmarkProgress, print_benchmark
    from ipucnn.reports.console import note

    settings = make_settings(
        training=training,
        executions=executions,
        min_time_s=min_time,
        max_time_s=max_time,
        compare_with=compare_with,
        system=system,
        baseline=baseline,
        max_regression=max_regression,
    )
    folder = check_folder(resolved)
    work = Benchmark(resolved, settings, verbose)
    note(resolved.choice.message)
    from ipucnn.sessions.factory import runs_on_ipus

    effect = None if runs_on_ipus(resolved.config.device) else resolved.host_note()
    if effect:
        note(effect)
    with BenchmarkProgress() as progress:
        report = work.run(progress.update)
    path = write_folder(folder, work.resolved.config, report)
    if json_output:
        print(report.to_json(), end="")
    else:
        print_benchmark(report)
    note(f"report in {path}")
    _end(report, path)


def _end(report: Any, path: Path) -> None:
    """Raises what the exit code says, once the report is out.

    Raises:
        UserError: the result is void, interrupted, or slower than the baseline.
    """
    from ipucnn.errors import EXIT_SIGINT, ThresholdError, UserError

    if report.void is not None:
        hints = [line[6:] for line in report.notes if line.startswith("hint: ")]
        error = UserError(f"the result is void: {report.void}", hints[0] if hints else None)
        error.exit_code = report.exit_code
        raise error
    if report.interrupted:
        stopped = UserError(
            f"interrupted after {len(report.executions)} measured executions",
            "these count; the report has them" if report.executions else None,
        )
        stopped.exit_code = EXIT_SIGINT
        raise stopped
    slower = report.regression
    if slower is not None and slower["regressed"]:
        raise ThresholdError(
            f"{1 - slower['ratio']['value']:.1%} slower than {slower['baseline']}, "
            f"{slower['allowed']:.1%} are allowed",
            f"the interval of the ratio is in {path}",
        )
