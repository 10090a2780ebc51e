"""``ipucnn benchmark``: measure throughput and time."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional

import typer

from ipucnn.config import spec
from ipucnn.config.request import RunRequest
from ipucnn.config.signature import with_run_options

if TYPE_CHECKING:
    from ipucnn.benchmarking.report import BenchmarkReport

PANEL = "Measuring"
MODE = typer.Option(
    None,
    "--mode",
    metavar="MODE",
    help="training, inference, data (the input pipeline alone, by stage) or end-to-end (how much time it costs).  "
    "[default: inference]",
    show_default=False,
    rich_help_panel=PANEL,
)
TRAINING = typer.Option(
    None,
    "--training/--inference",
    "--train/--infer",
    help="Measure weight updates, or forward passes.  [default: inference; training in modes data and end-to-end]",
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
    None,
    "--executions",
    parser=spec.EXECUTIONS.flag("--executions"),
    metavar="INT",
    help="Measure at least so many executions.  [default: 10]",
    show_default=False,
    rich_help_panel=PANEL,
)
MIN_TIME = typer.Option(
    None,
    "--min-time",
    parser=spec.SECONDS.flag("--min-time"),
    metavar="SECONDS",
    help="Measure at least so long.  [default: 10, or --max-time if that is less]",
    show_default=False,
    rich_help_panel=PANEL,
)
MAX_TIME = typer.Option(
    None,
    "--max-time",
    parser=spec.SECONDS.flag("--max-time"),
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
SUITES = "Suites"
SUITE = typer.Option(
    None,
    "--suite",
    metavar="NAME|FILE.yml",
    help="Run many benchmarks: ulhpc, keras-tutorial, or a file of your own. MODEL keeps the rows it matches.",
    rich_help_panel=SUITES,
)
ROWS = typer.Option(
    None,
    "--rows",
    metavar="NAME...",
    help="Run these rows of the suite; names or wildcards.  [default: all]",
    show_default=False,
    rich_help_panel=SUITES,
)
RESUME = typer.Option(
    False,
    "--resume",
    help="Go on with the suite in --run-dir, else in the latest folder: rows that have a result are kept.",
    rich_help_panel=SUITES,
)
VERSUS = typer.Option(
    None,
    "--versus",
    metavar="FILE",
    help="Speed-up of another suite.json over this suite.  [default: of predicted IPUs]",
    show_default=False,
    rich_help_panel=SUITES,
)


@with_run_options("benchmark")
def benchmark(
    request: RunRequest,
    verbose: bool,
    json_output: bool,
    mode: Optional[str] = MODE,
    training: Optional[bool] = TRAINING,
    compare_with: Optional[str] = COMPARE,
    executions: Optional[int] = EXECUTIONS,
    min_time: Optional[float] = MIN_TIME,
    max_time: Optional[float] = MAX_TIME,
    system: Optional[str] = SYSTEM,
    baseline: Optional[str] = BASELINE,
    max_regression: Optional[str] = MAX_REGRESSION,
    suite: Optional[str] = SUITE,
    rows: Optional[List[str]] = ROWS,
    resume: bool = RESUME,
    versus: Optional[str] = VERSUS,
) -> None:
    """Measure throughput and time, beside what is predicted of IPUs.

    Takes the options of `ipucnn train` that decide about speed, so that what is measured is what would run. With
    --suite, or a wildcard as MODEL, it runs many and prints one table.
    """
    given = {
        "compare_with": compare_with,
        "executions": executions,
        "min_time_s": min_time,
        "max_time_s": max_time,
        "system": system,
        "baseline": baseline,
        "max_regression": max_regression,
    }
    measuring: Dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    request = request.with_named_model()
    if suite is not None or request.is_wildcard:
        from ipucnn.commands.benchmark_suite import benchmark_suite

        benchmark_suite(
            request,
            suite,
            mode=_suite_mode(training, mode),
            measuring=measuring,
            rows=rows or [],
            resume=resume,
            versus=versus,
            verbose=verbose,
            json_output=json_output,
        )
        return
    _check_no_suite({"--rows": rows, "--resume": resume, "--versus": versus})
    measuring.update({"mode": mode, "training": training})
    _benchmark_one(request, measuring, verbose, json_output)


def _suite_mode(training: Optional[bool], mode: Optional[str]) -> Optional[str]:
    """training or inference, if it was typed.

    Raises:
        ConfigurationError: a mode that suites do not have.
    """
    from ipucnn.benchmarking.settings import SESSION, work_and_scope
    from ipucnn.errors import ConfigurationError

    if training is None and mode is None:
        return None
    work, scope = work_and_scope(training, mode)
    if scope != SESSION:
        raise ConfigurationError(
            f"--mode {mode}: suites and wildcards measure training and inference",
            "name one network, or use --mode training",
        )
    return work


def _check_no_suite(flags: Dict[str, Any]) -> None:
    """Refuses the flags of suites without one."""
    from ipucnn.errors import ConfigurationError

    for flag, value in flags.items():
        if value:
            raise ConfigurationError(
                f"{flag} is for suites, and this is one benchmark",
                "add --suite NAME, or give a wildcard as MODEL; or drop it",
            )


def _benchmark_one(request: RunRequest, measuring: Dict[str, Any], verbose: bool, json_output: bool) -> None:
    resolved = request.resolve()
    if request.print_config:
        request.show(resolved, json_output)
        return
    from ipucnn.benchmarking.baseline import LEAST_EXECUTIONS, is_too_short
    from ipucnn.benchmarking.benchmark import Benchmark
    from ipucnn.benchmarking.report import check_folder, write_folder
    from ipucnn.benchmarking.settings import make_settings
    from ipucnn.reports.benchmark import BenchmarkProgress, print_benchmark
    from ipucnn.reports.console import note

    settings = make_settings(**measuring)
    folder = check_folder(resolved)
    one = Benchmark(resolved, settings, verbose)
    note(resolved.choice.message)
    if one.baseline is not None and is_too_short(one.baseline):
        note(f"{settings.baseline} has {len(one.baseline['executions'])} executions, and {LEAST_EXECUTIONS} are "
             "needed: whether this is slower will be inconclusive")  # fmt: skip
    from ipucnn.sessions.factory import device_warnings, runs_on_ipus

    effect = None if runs_on_ipus(resolved.config.device) else resolved.host_note()
    if effect:
        note(effect)
    for warning in device_warnings(resolved.config.device):
        note(f"warning: {warning}")
    with BenchmarkProgress() as progress:
        report = one.run(progress.update)
    path = write_folder(folder, one.resolved.config, report)
    if json_output:
        print(report.to_json(), end="")
    else:
        print_benchmark(report)
    note(f"report in {path}")
    _end(report, path)


def _end(report: "BenchmarkReport", path: Path) -> None:
    """Raises what the exit code says, once the report is out.

    Raises:
        UserError: the result is void, interrupted, or slower than the baseline.
    """
    from ipucnn import interrupts
    from ipucnn.benchmarking.baseline import INCONCLUSIVE, LEAST_EXECUTIONS
    from ipucnn.errors import EXIT_SIGINT, ThresholdError, UserError
    from ipucnn.reports.console import note

    if report.void is not None:
        error = UserError(f"the result is void: {report.void}", report.hint)
        error.exit_code = report.exit_code
        raise error
    if report.interrupted:
        raise interrupts.Interrupted(
            interrupts.noted() or EXIT_SIGINT,
            f"interrupted after {len(report.executions)} measured executions",
            "these count; the report has them" if report.executions else None,
        )
    slower = report.regression
    if slower is not None and slower["verdict"] == INCONCLUSIVE:
        why = slower["why_inconclusive"]
        advice = "take a longer --max-time, a baseline with a longer --min-time, or a quieter machine"
        if why is not None:
            advice = f"{why}; use --executions {LEAST_EXECUTIONS} for both, and a longer --max-time"
        note(f"whether this is slower than {slower['baseline']} is inconclusive: {advice}")
    if slower is not None and slower["regressed"]:
        raise ThresholdError(
            f"{1 - slower['ratio']['value']:.1%} slower than {slower['baseline']}, "
            f"{slower['allowed']:.1%} are allowed",
            f"the interval of the ratio is in {path}",
        )
