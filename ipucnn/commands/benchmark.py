"""``ipucnn benchmark``: measure throughput and time."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, List, Optional

import typer

from ipucnn.aliases import PlainDict
from ipucnn.commands.run_arguments import TRUST, in_instances, own_option, read_plan
from ipucnn.config import spec
from ipucnn.config.request import RunRequest
from ipucnn.config.signature import with_run_options
from ipucnn.text import counted, shown_value

if TYPE_CHECKING:
    from ipucnn.benchmarking.records import BenchmarkReport
    from ipucnn.config.resolve import Resolved

PANEL = "Measuring"
MODE = own_option(
    "--mode",
    "MODE",
    "What to measure: training, inference, data (the input pipeline alone, stage by stage), or end-to-end (how much of "
    "the time the input pipeline costs).  "
    "[default: inference]",
    PANEL,
)
TRAINING = typer.Option(
    None,
    "--training/--inference",
    "--train/--infer",
    help="Measure weight updates, or forward passes.  [default: inference; training in modes data and end-to-end]",
    show_default=False,
    rich_help_panel=PANEL,
)
COMPARE = own_option(
    "--compare-with",
    "keras|FILE",
    "Also measure plain Keras (its fit or predict) or an exported network, in turns, and print the ratio.",
    PANEL,
)
EXECUTIONS = own_option(
    "--executions",
    "INT",
    "Measure at least this many executions.  [default: 10]",
    PANEL,
    number=spec.EXECUTIONS,
)
MIN_TIME = own_option(
    "--min-time",
    "SECONDS",
    "Measure for at least this long.  [default: 10, or --max-time if that is less]",
    PANEL,
    number=spec.SECONDS,
)
MAX_TIME = own_option(
    "--max-time",
    "SECONDS",
    "Stop after this long, of which a third is kept for measuring.  [default: 150]",
    PANEL,
    number=spec.SECONDS,
)
SYSTEM = own_option(
    "--system",
    "NAME",
    "IPU machine to predict for.  [default: the smallest of m2000, pod16, ... that has enough IPUs]",
    PANEL,
)
SYSTEM_PROFILE = own_option(
    "--system-profile",
    "FILE",
    "Predict with what `ipucnn plan-splits --calibrate` measured of that machine, and wrote to this file.",
    PANEL,
)
BASELINE = own_option(
    "--baseline", "FILE", "Compare with an earlier report.json. The exit code is 5 if this is slower.", PANEL
)
MAX_REGRESSION = own_option(
    "--max-regression", "P%", "Share of the baseline's speed that may be lost.  [default: 5%]", PANEL
)
SUITES = "Suites"
SUITE = own_option(
    "--suite",
    "NAME|FILE.yml",
    "Run many benchmarks: ulhpc, keras-tutorial, or a file of your own. With MODEL, only the rows that match it.",
    SUITES,
)
ROWS = own_option(
    "--rows",
    "NAME...",
    "Run only these rows of the suite, given by names or wildcards.  [default: all]",
    SUITES,
)
RESUME = typer.Option(
    False,
    "--resume",
    help="Continue the suite in --run-dir, or else in the latest folder. Rows that have a result are kept.",
    rich_help_panel=SUITES,
)
VERSUS = own_option(
    "--versus",
    "FILE",
    "Print how much faster this other suite.json is than this suite.  [default: predicted IPUs]",
    SUITES,
)


@with_run_options("benchmark", read_plan=read_plan)
@in_instances
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
    system_profile: Optional[str] = SYSTEM_PROFILE,
    baseline: Optional[str] = BASELINE,
    max_regression: Optional[str] = MAX_REGRESSION,
    trust: bool = TRUST,
    suite: Optional[str] = SUITE,
    rows: Optional[List[str]] = ROWS,
    resume: bool = RESUME,
    versus: Optional[str] = VERSUS,
) -> None:
    """Measure throughput and time, beside what is predicted for IPUs.

    It takes those options of `ipucnn train` that affect the speed, and measures exactly what would run. With --suite,
    or with a wildcard as MODEL, it measures many networks and prints one table. MODEL may also be an ONNX or TFLite
    file that `ipucnn export` wrote, or with --trust a SavedModel: then its network is measured here and in the file's
    own runtime, in turns.
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
    measuring: PlainDict = {name: value for name, value in given.items() if value is not None}
    request = request.with_named_model()
    if suite is not None or request.is_wildcard:
        if trust:
            from ipucnn.errors import ConfigurationError

            raise ConfigurationError("--trust: suites run no SavedModel", "drop it, or benchmark one network")
        if system_profile is not None:
            from ipucnn.errors import ConfigurationError

            raise ConfigurationError(
                "--system-profile: suites predict for systems as they are shipped",
                "drop it, or benchmark one network",
            )
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
    measuring.update({"mode": mode, "training": training, "system_profile": system_profile, "trust": trust})
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


def _check_no_suite(flags: PlainDict) -> None:
    """Refuses the flags of suites without one."""
    from ipucnn.errors import ConfigurationError

    for flag, value in flags.items():
        if value:
            raise ConfigurationError(
                f"{flag} is for suites, and this is one benchmark",
                "add --suite NAME, or give a wildcard as MODEL; or drop it",
            )


def _resolve(request: RunRequest, measuring: PlainDict) -> Resolved:
    """The benchmark's configuration; of an exported file that of its network, which is then compared with the file."""
    from ipucnn.models.registry import list_models
    from ipucnn.runs.exported import is_exported, read_exported

    model = request.model
    if model is None or model in {record.name for record in list_models()} or not is_exported(Path(model)):
        return request.resolve()
    from ipucnn.config.resolve import refuse_unnamed
    from ipucnn.errors import ConfigurationError
    from ipucnn.filesystem import expand

    if measuring.get("compare_with") is not None:
        raise ConfigurationError(
            f"--compare-with {measuring['compare_with']}: MODEL is an exported file, which is what is compared",
            "drop it, or give the network's name as MODEL",
        )
    exported = read_exported(expand(model, "MODEL"), bool(measuring["trust"]))
    name = str(exported.record["model"])
    command = f"ipucnn benchmark {shown_value(name)} --compare-with {shown_value(model)}"
    command += " --trust" if measuring["trust"] else ""
    refuse_unnamed(f"the network of {shown_value(model)}", name, command)
    measuring["compare_with"] = model
    below = [(f"export {model}", exported.options())]
    return request.resolve_as(name, below)


def _benchmark_one(request: RunRequest, measuring: PlainDict, verbose: bool, json_output: bool) -> None:
    resolved = _resolve(request, measuring)
    if request.print_config:
        request.show(resolved, json_output)
        return
    from ipucnn.benchmarking.baseline import LEAST_EXECUTIONS, is_too_short
    from ipucnn.benchmarking.benchmark import Benchmark
    from ipucnn.benchmarking.report import check_folder, write_folder
    from ipucnn.benchmarking.settings import make_settings
    from ipucnn.models.registry import assumption
    from ipucnn.reports.benchmark import BenchmarkProgress, print_benchmark
    from ipucnn.reports.console import note, telling_of_indexing

    settings = make_settings(**measuring)
    folder = check_folder(resolved)
    # Noise is of the network's own size, and says nothing about a network that takes any.
    is_any_noise = resolved.choice.is_noise and resolved.choice.like is None
    assumed = assumption(resolved.record, image_size=resolved.config.image_size) if is_any_noise else None
    if assumed:
        note(f"{assumed}; --dataset NAME, in place of noise, takes those of a data set")
    with telling_of_indexing():
        one = Benchmark(resolved, settings, verbose)
    note(resolved.choice.message)
    public = resolved.public_note()
    if public:
        note(public)
    if one.baseline is not None and is_too_short(one.baseline):
        have = counted(len(one.baseline.executions), "execution")
        note(
            f"{settings.baseline} has {have}, and {LEAST_EXECUTIONS} are needed: whether this is slower will be "
            "inconclusive"
        )
    from ipucnn.sessions.factory import device_warnings, runs_on_ipus

    effect = None if runs_on_ipus(resolved.config.device) else resolved.host_note()
    if effect:
        note(effect)
    for warning in device_warnings(resolved.config.device):
        note(f"warning: {warning}")
    with BenchmarkProgress() as progress:
        report = one.run(progress.update)
    path = folder
    if one.instances.is_writer:
        path = write_folder(folder, one.resolved.config, report)
    if json_output:
        print(report.to_json(), end="")
    else:
        print_benchmark(report)
    note(f"report in {path}")
    _end(report, one.exit_code, path)


def _end(report: BenchmarkReport, exit_code: int, path: Path) -> None:
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
        error.exit_code = exit_code
        raise error
    if report.interrupted:
        raise interrupts.Interrupted(
            interrupts.noted() or EXIT_SIGINT,
            f"interrupted after {len(report.executions)} measured executions",
            "these count; the report has them" if report.executions else None,
        )
    slower = report.regression
    if slower is not None and slower.verdict == INCONCLUSIVE:
        why = slower.why_inconclusive
        advice = "take a longer --max-time, a baseline with a longer --min-time, or a quieter machine"
        if why is not None:
            advice = f"{why}; use --executions {LEAST_EXECUTIONS} for both, and a longer --max-time"
        note(f"whether this is slower than {slower.baseline} is inconclusive: {advice}")
    if slower is not None and slower.regressed:
        raise ThresholdError(
            f"{1 - slower.ratio.value:.1%} slower than {slower.baseline}, {slower.allowed:.1%} are allowed",
            f"the interval of the ratio is in {path}",
        )


# ``ipucnn benchmark`` with a suite, or with a wildcard as MODEL.


if TYPE_CHECKING:
    from ipucnn.benchmarking.records import SuiteResult
    from ipucnn.benchmarking.suites.plan import SuitePlan
    from ipucnn.benchmarking.suites.run import SuiteRun


def benchmark_suite(
    request: RunRequest,
    suite: Optional[str],
    *,
    mode: Optional[str],
    measuring: PlainDict,
    rows: List[str],
    resume: bool,
    versus: Optional[str],
    verbose: bool,
    json_output: bool,
) -> None:
    """Plans all rows, runs those without a result, and shows them.

    Args:
        request: what was typed about runs.
        suite: ``--suite``, None for a wildcard.
        mode: inference or training if it was typed.
        measuring: arguments of ``make_settings`` that were typed.
        rows: ``--rows``.
        resume: ``--resume``.
        versus: ``--versus``.
        verbose: ``--verbose``.
        json_output: ``--json``.

    Raises:
        UserError: before the first row, whatever is wrong with any of them; at the end, if a row failed.
    """
    from ipucnn.benchmarking.suites.file import find_suite, wildcard_suite
    from ipucnn.benchmarking.suites.plan import plan_suite
    from ipucnn.benchmarking.suites.result import read_suite
    from ipucnn.benchmarking.suites.run import SuiteRun, saved_seed, suite_folder
    from ipucnn.config.options import RunConfig
    from ipucnn.errors import ConfigurationError
    from ipucnn.filesystem import expand
    from ipucnn.reports.console import note
    from ipucnn.reports.suite import print_plan
    from ipucnn.sessions.host.workers import require_one
    from ipucnn.sessions.poplar.popdist import find_instances

    if find_instances().is_distributed:
        raise ConfigurationError(
            "suites run each row in a process of its own, and poprun started this one",
            "type it without poprun, or benchmark one network under it",
        )
    require_one("`ipucnn benchmark`", RunConfig(trusted_network=True))
    for name, flag in (("baseline", "--baseline"), ("max_regression", "--max-regression")):
        if name in measuring:
            raise ConfigurationError(
                f"{flag} is for one benchmark, not for suites", "compare two results of a suite with --versus"
            )
    overwrite = bool(request.flags.get("overwrite"))
    if resume and overwrite:
        raise ConfigurationError("--resume and --overwrite contradict each other", "give one of them")
    found = find_suite(suite) if suite is not None else wildcard_suite(str(request.model))
    folder = suite_folder(found.name, request.flags.get("run_dir"), resume=resume, overwrite=overwrite)
    seed = saved_seed(folder) if resume else None
    plan = plan_suite(found, request, mode=mode, measuring=measuring, only=rows, seed=seed)
    if request.print_config:
        print_plan(plan, json_output)
        return
    other = read_suite(expand(versus, "--versus")) if versus is not None else None
    run = SuiteRun(
        plan,
        folder,
        resume=resume,
        options=_options(request, mode, measuring),
        takes_default=request.flags.get("run_dir") is None and not resume,
    )
    if other is not None:
        _check_versus(run.result, other, str(versus))
    if run.result.pending:
        from ipucnn.benchmarking.suites.plan import check_rows

        check_rows(plan)
    for line in (*dict.fromkeys(_messages(plan)), *plan.notes):
        note(line)
    if run.num_kept:
        note(f"{run.num_kept} of {counted(len(plan.rows), 'row')} in {run.folder} have a result and are kept")
    interrupted = _run(run, verbose)
    _show(run, other, versus, json_output)
    _end_suite(run, interrupted, _again(request, suite, mode, measuring, rows, run.folder, versus))


def _check_versus(result: SuiteResult, other: SuiteResult, source: str) -> None:
    """Says before the first row runs which rows will have nothing to compare with.

    Raises:
        DataError: none of them.
    """
    from ipucnn.benchmarking.suites.result import counterparts
    from ipucnn.errors import DataError
    from ipucnn.reports.console import note

    without = len(result.rows) - len(counterparts(result.rows, other))
    if without == len(result.rows):
        raise DataError(
            f"--versus {source}: no finished row of it is like one of this suite",
            "it needs the same networks, modes, batches and --image-size",
        )
    if without:
        note(f"{without} of {counted(len(result.rows), 'row')} have no counterpart in {source}")


def _messages(plan: SuitePlan) -> List[str]:
    """What the user should know of the rows: doubts about the device, the data set, options without effect."""
    from ipucnn.sessions.factory import device_warnings

    lines = [
        f"warning: {warning}"
        for device in dict.fromkeys(row.resolved.config.device for row in plan.rows)
        for warning in device_warnings(device)
    ]
    for row in plan.rows:
        if row.resolved.data is not None:
            lines.append(row.resolved.data.message)
        effect = row.resolved.host_note()
        if effect:
            lines.append(effect)
    return lines


def _options(request: RunRequest, mode: Optional[str], measuring: PlainDict) -> PlainDict:
    """What was typed, for the record."""
    from ipucnn.config.options import BY_NAME

    options = {BY_NAME[name].key: value for name, value in request.flags.items()}
    options.update({name.replace("_", "-"): value for name, value in measuring.items()})
    if mode is not None:
        options["mode"] = mode
    return options


def _run(run: SuiteRun, verbose: bool) -> bool:
    """Runs the rows; whether the user ended it."""
    from ipucnn.benchmarking.suites.run import RowProcess
    from ipucnn.reports.suite import SuiteProgress

    with SuiteProgress(run.num_kept, len(run.plan.rows)) as progress:
        try:
            run.run(RowProcess(verbose), progress.update, progress.row)
        except KeyboardInterrupt:
            return True
    return False


def _show(run: SuiteRun, other: Optional[SuiteResult], versus: Optional[str], json_output: bool) -> None:
    from ipucnn.benchmarking.suites.result import DONE, speedups
    from ipucnn.benchmarking.suites.run import FIGURE, RESULT
    from ipucnn.filesystem import write_atomically
    from ipucnn.reports.console import note
    from ipucnn.reports.suite import print_suite

    compared = speedups(run.result, other, versus or "")
    if json_output:
        print(run.result.to_json(), end="")
    else:
        print_suite(run.result, compared)
    if other is not None and compared.num_without == sum(row.status == DONE for row in run.result.rows):
        note(f"no finished row has a counterpart in --versus {versus}, so nothing is compared")
    note(f"results in {run.folder}: {RESULT}, suite.csv, and a report of each row")
    if len(compared.points) > 1 and not any(row.mode == "fit" for row in run.result.rows):
        from ipucnn.reports.speedup_figure import draw_speedups

        write_atomically(run.folder / f"{FIGURE}.png", lambda path: draw_speedups(compared, path, ".png"))
        write_atomically(run.folder / f"{FIGURE}.svg", lambda path: draw_speedups(compared, path, ".svg"))
        note(f"figure in {run.folder / FIGURE}.png and .svg")


def _again(
    request: RunRequest,
    suite: Optional[str],
    mode: Optional[str],
    measuring: PlainDict,
    rows: List[str],
    folder: Path,
    versus: Optional[str],
) -> str:
    """The command that goes on."""
    from ipucnn.config.options import BY_NAME

    words = ["ipucnn", "benchmark"]
    words += [request.model] if request.model is not None else []
    words += ["--suite", suite] if suite is not None else []
    words += [f"--{mode}"] if mode is not None else []
    words += ["--rows", *rows] if rows else []
    for name, value in measuring.items():
        flag = name[:-2] if name.endswith("_s") else name
        words += ["--" + flag.replace("_", "-"), f"{value:g}" if isinstance(value, float) else str(value)]
    words += ["--versus", versus] if versus is not None else []
    words += ["--config", request.config_name] if request.config_name else []
    words += ["--config-path", request.config_path] if request.config_path else []
    for name, value in request.flags.items():
        if name in ("run_dir", "overwrite"):
            continue
        if isinstance(value, (list, tuple)):
            words += [BY_NAME[name].flag, *map(str, value)]
        elif isinstance(value, bool):
            words += [BY_NAME[name].flag if value else f"--no-{BY_NAME[name].key}"]
        else:
            words += [BY_NAME[name].flag, str(value)]
    words += ["--run-dir", str(folder), "--resume"]
    return " ".join(shlex.quote(word) for word in words)


def _end_suite(run: SuiteRun, interrupted: bool, again: str) -> None:
    """Raises what the exit code says.

    Raises:
        UserError: interrupted, or a row failed; the exit code is then that of the first that did.
    """
    from ipucnn import interrupts
    from ipucnn.errors import EXIT_SIGINT, UserError

    result = run.result
    if interrupted:
        done = len(result.rows) - len(result.pending)
        raise interrupts.Interrupted(
            interrupts.noted() or EXIT_SIGINT,
            f"interrupted: {done} of {counted(len(result.rows), 'row')} are finished",
            f"go on with {again}",
        )
    if result.failed:
        first = result.failed[0]
        count = f"{len(result.failed)} of {counted(len(result.rows), 'row')} failed"
        error = UserError(f"{count}; the first, {first.id}: {first.error}", f"to try them again: {again}")
        error.exit_code = first.exit_code or 1
        raise error
