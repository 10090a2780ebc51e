"""``ipucnn benchmark`` with a suite, or with a wildcard as MODEL."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional

from ipucnn.config.request import RunRequest

if TYPE_CHECKING:
    from ipucnn.benchmarking.suites.plan import SuitePlan
    from ipucnn.benchmarking.suites.result import SuiteResult
    from ipucnn.benchmarking.suites.run import SuiteRun


def benchmark_suite(
    request: RunRequest,
    suite: Optional[str],
    *,
    mode: Optional[str],
    measuring: Dict[str, Any],
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
    from ipucnn.errors import ConfigurationError
    from ipucnn.filesystem import expand
    from ipucnn.reports.console import note
    from ipucnn.reports.suite import print_plan

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
        note(f"{run.num_kept} of {len(plan.rows)} rows in {run.folder} have a result and are kept")
    interrupted = _run(run, verbose)
    _show(run, other, versus, json_output)
    _end(run, interrupted, _again(request, suite, mode, measuring, rows, run.folder, versus))


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
        note(f"{without} of {len(result.rows)} rows have no counterpart in {source}")


def _messages(plan: SuitePlan) -> List[str]:
    """What the user should know of the rows: doubts about the device, the data set, options without effect."""
    from ipucnn.sessions.factory import device_warnings

    lines = [
        f"warning: {warning}"
        for device in dict.fromkeys(row.resolved.config.device for row in plan.rows)
        for warning in device_warnings(device)
    ]
    for row in plan.rows:
        if row.resolved.choice is not None:
            lines.append(row.resolved.choice.message)
        effect = row.resolved.host_note()
        if effect:
            lines.append(effect)
    return lines


def _options(request: RunRequest, mode: Optional[str], measuring: Dict[str, Any]) -> Dict[str, Any]:
    """What was typed, for the record."""
    from ipucnn.config.options import BY_NAME

    options = {BY_NAME[name].key: value for name, value in request.flags.items()}
    options.update({name.replace("_", "-"): value for name, value in measuring.items()})
    if mode is not None:
        options["mode"] = mode
    return options


def _run(run: SuiteRun, verbose: bool) -> bool:
    """Runs the rows; whether the user ended it."""
    from ipucnn.benchmarking.suites.process import RowProcess
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
    if other is not None and compared.num_without == sum(row["status"] == DONE for row in run.result.rows):
        note(f"no finished row has a counterpart in --versus {versus}, so nothing is compared")
    note(f"results in {run.folder}: {RESULT}, suite.csv, and a report of each row")
    if len(compared.points) > 1 and not any(row["mode"] == "fit" for row in run.result.rows):
        from ipucnn.reports.speedup_figure import draw_speedups

        write_atomically(run.folder / f"{FIGURE}.png", lambda path: draw_speedups(compared, path, ".png"))
        write_atomically(run.folder / f"{FIGURE}.svg", lambda path: draw_speedups(compared, path, ".svg"))
        note(f"figure in {run.folder / FIGURE}.png and .svg")


def _again(
    request: RunRequest,
    suite: Optional[str],
    mode: Optional[str],
    measuring: Dict[str, Any],
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


def _end(run: SuiteRun, interrupted: bool, again: str) -> None:
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
            f"interrupted: {done} of {len(result.rows)} rows are finished",
            f"go on with {again}",
        )
    if result.failed:
        first = result.failed[0]
        count = f"{len(result.failed)} of {len(result.rows)} rows failed"
        error = UserError(
            f"{count}; the first, {first['id']}: {first['error']}", f"to try them again: {again}"
        )
        error.exit_code = first["exit_code"]
        raise error
