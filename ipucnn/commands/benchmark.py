"""``ipucnn benchmark``: measure throughput and time."""

import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Dict, Optional

from ipucnn.aliases import PlainDict
from ipucnn.commands.run_arguments import read_plan
from ipucnn.config import bounds
from ipucnn.config.command import own_options, request_of
from ipucnn.config.request import RunRequest
from ipucnn.config.shared_options import NetworkOptions
from ipucnn.config.spec import SHARE, argument, option, word
from ipucnn.text import counted, percent

if TYPE_CHECKING:
    from ipucnn.benchmarking.records import BenchmarkReport, SuiteResult
    from ipucnn.benchmarking.settings import BenchmarkSettings
    from ipucnn.benchmarking.suite import Parse
    from ipucnn.benchmarking.suite_run import Speedups
    from ipucnn.config.resolve import Resolved

MEASURING, SUITES = "Measuring", "Suites"


@dataclass(frozen=True)
class Benchmark(NetworkOptions):
    """The options of ``ipucnn benchmark``, besides those of runs."""

    EACH: ClassVar[Dict[str, Any]] = {**NetworkOptions.EACH, "panel": MEASURING}

    model: Optional[str] = argument(
        "MODEL",
        "Network, or a wildcard for several, see `ipucnn models`.  [default: the preset's, else toy_model]",
        default=None,
    )
    mode: Optional[str] = word(
        "MODE",
        "Measurement: training, inference, data (the input pipeline alone, stage by stage), or end-to-end (how much of "
        "the time the input pipeline costs).",
        default_text="inference",
    )
    training: Optional[bool] = option(
        None,
        "Measure weight updates, or forward passes.",
        aliases=("train",),
        off=("inference", "infer"),
        default_text="inference; training in modes data and end-to-end",
    )
    compare_with: Optional[str] = word(
        "keras", "Also measure plain Keras (its fit or predict), in turns, and print the ratio."
    )
    executions: Optional[int] = option(
        None,
        "Measure at least this many executions.",
        within=bounds.EXECUTIONS,
        default_text=str(bounds.DEFAULT_EXECUTIONS),
    )
    min_time: Optional[float] = option(
        None,
        "Measure for at least this long.",
        metavar="SECONDS",
        within=bounds.SECONDS,
        default_text=f"{bounds.DEFAULT_MIN_TIME_S:g}, or --max-time if that is less",
    )
    max_time: Optional[float] = option(
        None,
        "Stop after this long, of which a third is kept for measuring.",
        metavar="SECONDS",
        within=bounds.SECONDS,
        default_text=f"{bounds.DEFAULT_MAX_TIME_S:g}",
    )
    system: Optional[str] = word(
        "NAME",
        "IPU machine to predict for.",
        default_text="the smallest of m2000, pod16, ... that has enough IPUs",
    )
    system_profile: Optional[Path] = option(
        None,
        "Predict with what `ipucnn plan-splits --calibrate` measured of that machine, and wrote to this file.",
    )
    baseline: Optional[Path] = option(
        None,
        "Compare with an earlier report.json. The exit code is 5 if this is slower.",
    )
    max_regression: Optional[float] = option(
        None,
        "Share of the baseline's speed that may be lost.",
        kind=SHARE,
        metavar="P%",
        default_text=percent(bounds.DEFAULT_MAX_REGRESSION),
    )
    suite: Optional[str] = word(
        "NAME|FILE.yml",
        "Run many benchmarks: ulhpc, keras-tutorial, or a file of your own. With MODEL, only the rows that match it.",
        panel=SUITES,
    )
    resume: bool = option(
        False,
        "Continue the suite in --run-dir, or else in the latest folder. Rows that have a result are kept.",
        panel=SUITES,
    )
    versus: Optional[Path] = option(
        None,
        "Print how much faster this other suite.json is than this suite.",
        default_text="predicted IPUs",
        panel=SUITES,
    )


def benchmark(options: Benchmark) -> None:
    """Measure throughput and time, beside what is predicted for IPUs.

    It takes those options of `ipucnn train` that affect the speed, and measures exactly what would run. With --suite,
    or with a wildcard as MODEL, it measures many networks and prints one table.
    """
    from ipucnn.command_group import parse_line
    from ipucnn.commands.rules import BENCHMARK_COMMAND_RULES
    from ipucnn.config.rules import check_rules

    specs = own_options(Benchmark)
    names = (spec.name for spec in specs if spec.panel == MEASURING and not spec.argument)
    given = {name: getattr(options, name) for name in names}
    measuring: PlainDict = {name: value for name, value in given.items() if value is not None}
    request = request_of(options, "benchmark", read_plan).with_named_model()
    suite = options.suite
    is_suite = suite is not None or request.is_wildcard
    check_rules(BENCHMARK_COMMAND_RULES, options, is_suite)
    if not is_suite:
        _benchmark_one(request, measuring, options.verbose, options.json)
        return
    benchmark_suite(
        request,
        suite,
        measuring,
        parse_line,
        resume=options.resume,
        versus=options.versus,
        verbose=options.verbose,
        json_output=options.json,
    )


def _benchmark_one(request: RunRequest, measuring: PlainDict, verbose: bool, json_output: bool) -> None:
    resolved = request.resolve()
    if request.print_config:
        from ipucnn.reports.configuration import print_config

        print_config(resolved, json_output)
        return
    from ipucnn.benchmarking.job import make_job
    from ipucnn.benchmarking.report import check_folder, write_folder
    from ipucnn.benchmarking.run import run
    from ipucnn.benchmarking.settings import make_settings
    from ipucnn.events import OPENING, during, show
    from ipucnn.models.registry import assumption
    from ipucnn.reports.benchmark import print_benchmark
    from ipucnn.reports.console import EXECUTIONS, Screen, note
    from ipucnn.sessions.role import find_role

    settings = make_settings(**measuring)
    folder = check_folder(resolved)
    # Noise has the network's default size, so it does not decide the size of a network that takes any size.
    is_any_noise = resolved.choice.is_noise and resolved.choice.like is None
    assumed = assumption(resolved.record, resolved.config.image_size) if is_any_noise else None
    if assumed:
        note(f"{assumed}; --dataset NAME, in place of noise, takes those of a data set")
    job = show(during(OPENING, lambda: make_job(resolved, settings)), Screen())
    _tell(resolved, job.baseline, settings)
    report, exit_code = show(run(job, verbose), Screen(EXECUTIONS))
    path = folder
    if find_role().writes:
        path = write_folder(folder, job.config, report)
    if json_output:
        print(report.to_json(), end="")
    else:
        print_benchmark(report)
    note(f"report in {path}")
    _end(report, exit_code, path)


def _tell(resolved: "Resolved", baseline: "Optional[BenchmarkReport]", settings: "BenchmarkSettings") -> None:
    """Prints notes and warnings on stderr before the benchmark begins."""
    from ipucnn.benchmarking.rules import without_effect
    from ipucnn.reports.console import note
    from ipucnn.sessions.factory import device_warnings, runs_on_ipus

    device = resolved.config.device
    lines = [*resolved.notes(runs_on_ipus(device))]
    lines += [f"note: {text}" for text in without_effect(resolved, settings.training)]
    for line in (*lines, *(f"warning: {w}" for w in device_warnings(device))):
        note(line)
    if baseline is not None:
        from ipucnn.benchmarking.baseline import LEAST_EXECUTIONS, is_too_short

        if is_too_short(baseline):
            have = counted(len(baseline.executions), "execution")
            note(
                f"{settings.baseline} has {have}, and {LEAST_EXECUTIONS} are needed: whether this is slower will be "
                "inconclusive"
            )


def _end(report: "BenchmarkReport", exit_code: int, path: Path) -> None:
    """Raises the error that gives the exit code, after the report was printed.

    Raises:
        UserError: the result is void, interrupted, or slower than the baseline.
    """
    from ipucnn import interrupts
    from ipucnn.errors import EXIT_SIGINT, ThresholdError, UserError

    if report.void is not None:
        error = UserError(f"the result is void: {report.void}", report.hint)
        error.exit_code = exit_code
        raise error
    if report.interrupted:
        raise interrupts.Interrupted(
            interrupts.noted() or EXIT_SIGINT,
            f"interrupted after {len(report.executions)} measured executions",
            "these count; the report has them" if report.executions else None,
        )
    regression = report.regression
    if regression is None:
        return
    from ipucnn.benchmarking.baseline import INCONCLUSIVE, LEAST_EXECUTIONS
    from ipucnn.reports.console import note

    if regression.verdict == INCONCLUSIVE:
        why = regression.why_inconclusive
        advice = "take a longer --max-time, a baseline with a longer --min-time, or a quieter machine"
        if why is not None:
            advice = f"{why}; use --executions {LEAST_EXECUTIONS} for both, and a longer --max-time"
        note(f"whether this is slower than {regression.baseline} is inconclusive: {advice}")
    if regression.regressed:
        raise ThresholdError(
            f"{1 - regression.ratio.value:.1%} slower than {regression.baseline}, {regression.allowed:.1%} are allowed",
            f"the interval of the ratio is in {path}",
        )


# ``ipucnn benchmark`` with a suite, or with a wildcard as MODEL.


def benchmark_suite(
    request: RunRequest,
    name: Optional[str],
    measuring: PlainDict,
    parse: "Parse",
    *,
    resume: bool,
    versus: Optional[Path],
    verbose: bool,
    json_output: bool,
) -> None:
    """Plans all rows of a suite, runs those without a result, and prints the table.

    Args:
        request: the options of runs, as they were typed.
        name: the value of ``--suite``; None for a wildcard.
        measuring: the typed options of measuring, which override those of the rows as those of runs do.
        parse: the parser of command lines, for the rows.
        resume: the value of ``--resume``.
        versus: the value of ``--versus``.
        verbose: the value of ``--verbose``.
        json_output: the value of ``--json``.

    Raises:
        UserError: before the first row, if any row is wrong; at the end, if a row failed.
    """
    from ipucnn.benchmarking import suite as suites
    from ipucnn.benchmarking import suite_run
    from ipucnn.config.options import RunConfig
    from ipucnn.config.rules import RESUMED_OR_REPLACED, check_rules
    from ipucnn.errors import DataError
    from ipucnn.events import show
    from ipucnn.reports import suite as report
    from ipucnn.reports.console import ROWS, Screen, note
    from ipucnn.runs.writer import claim_default
    from ipucnn.sessions.group import check_starter

    check_starter("ipucnn benchmark --suite", in_processes=False, in_instances=False)
    overwrite, run_dir = bool(request.flags.get("overwrite")), request.flags.get("run_dir")
    check_rules([RESUMED_OR_REPLACED], RunConfig(resume=resume, overwrite=overwrite), {})
    if name is not None:
        written = suites.find_suite(name, parse)
    else:
        written = suites.wildcard_suite(str(request.model))
    folder = suite_run.suite_folder(written.name, run_dir, resume=resume, overwrite=overwrite)
    preset = {"config": request.config_name, "config_path": request.config_path}
    flags = {name: value for name, value in request.flags.items() if name not in ("run_dir", "overwrite")}
    typed = suites.given_options({**measuring, **preset, **flags})
    plan = suites.plan_suite(written, request.model if name is not None else None, typed)
    if request.print_config:
        report.print_plan(plan, json_output)
        return
    other = suite_run.read_suite(versus) if versus is not None else None
    if other is not None and not {row.id for row in other.rows} & {row.id for row in plan.rows}:
        raise DataError(
            f"--versus {versus}: no row of it is one of this suite", "give the suite.json of the same suite"
        )
    if resume:
        plan = suite_run.with_kept_rows(plan, folder)
    elif run_dir is None:
        folder = claim_default(written.name, suite_run.SUFFIX).path
    num_kept, num_rows = sum(row.status == "done" for row in plan.rows), len(plan.rows)
    if num_kept:
        note(f"{num_kept} of {counted(num_rows, 'row')} in {folder} have a result and are kept")
    screen = Screen(ROWS, report.RowLines().take)
    result, is_interrupted = show(suite_run.run_rows(plan, folder, verbose), screen)
    compared = suite_run.speedups(result, other, str(versus or ""))
    if json_output:
        print(result.to_json(), end="")
    else:
        report.print_suite(result, compared)
    note(f"results in {folder}: {suite_run.RESULT}, {suite_run.TABLE}, and a run folder of each row")
    _draw(compared, folder)
    words = ["ipucnn", "benchmark", *([request.model] if request.model else [])]
    words += ["--suite", name] if name else []
    words += [word for option in typed.items() for word in suites.option_words(option)]
    words += ["--versus", str(versus)] if versus else []
    resume_command = " ".join(map(shlex.quote, [*words, "--run-dir", str(folder), "--resume"]))
    _end_suite(result, is_interrupted, resume_command)


def _draw(compared: "Speedups", folder: Path) -> None:
    """Draws the figure of speed-ups, if it has at least two points."""
    from ipucnn.benchmarking.suite_run import FIGURE
    from ipucnn.filesystem import write_atomically
    from ipucnn.reports.console import note
    from ipucnn.reports.suite import draw_speedups, points

    if len(points(compared)) > 1:
        for suffix in (".png", ".svg"):
            write_atomically(folder / f"{FIGURE}{suffix}", partial(draw_speedups, compared, suffix))
        note(f"figure in {folder / FIGURE}.png and .svg")


def _end_suite(result: "SuiteResult", is_interrupted: bool, again: str) -> None:
    """Raises the error that gives the exit code, after the results were printed.

    Args:
        result: the result of the suite.
        is_interrupted: whether a signal interrupted it.
        again: the command that continues the suite.

    Raises:
        UserError: the suite was interrupted, or a row failed.
    """
    from ipucnn import interrupts
    from ipucnn.errors import EXIT_SIGINT, UserError

    rows = counted(len(result.rows), "row")
    if is_interrupted:
        num_done = sum(row.status != "pending" for row in result.rows)
        raise interrupts.Interrupted(
            interrupts.noted() or EXIT_SIGINT,
            f"interrupted: {num_done} of {rows} are finished",
            f"go on with {again}",
        )
    failed = [row for row in result.rows if row.status == "failed"]
    if failed:
        error = UserError(
            f"{len(failed)} of {rows} failed; the first, {failed[0].id}: {failed[0].error}",
            f"to try them again: {again}",
        )
        error.exit_code = max(1, failed[0].exit_code or 1)
        raise error
