"""What ``ipucnn benchmark`` shows: progress, the figures, and beside them what is predicted of IPUs."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Callable, List, Optional, Tuple

from ipucnn.aliases import PlainDict
from ipucnn.benchmarking.baseline import QUIET_SHARE
from ipucnn.benchmarking.statistics import INTERVAL_NEEDS, block_length
from ipucnn.reports import units
from ipucnn.reports.console import (
    BAR,
    ELAPSED,
    ProgressBar,
    console,
    fact_table,
    note,
    plain_table,
)
from ipucnn.text import counted

if TYPE_CHECKING:
    from rich.console import Console

    from ipucnn.benchmarking.records import (
        BenchmarkReport,
        EndToEnd,
        ExecutionFacts,
        Interval,
        MeasuredFigures,
        PipelineFigures,
        Prediction,
    )

_VERDICTS = {
    "slower": "slower than allowed",
    "not slower": "not slower than allowed",
    "inconclusive": "inconclusive, which takes more time (--max-time) or a quieter machine to decide",
}
_CACHED = {
    True: ", executable from the cache",
    False: ", executable not in the cache",
    None: "; the host keeps no executables in a cache",
}
# Lines of progress in a pipe are at least so far apart, but for the ends of phases.
_EVERY_S = 15.0


class BenchmarkProgress(ProgressBar):
    """A bar over the executions of a phase on a terminal; in a pipe a line now and then."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __enter__(self) -> BenchmarkProgress:
        self._start(("{task.description}", BAR, "{task.fields[figures]}", ELAPSED), None, figures="")
        return self

    def update(self, phase: str, done: int, of: int, figures: str) -> None:
        """Tells of progress.

        Args:
            phase: what is being done.
            done: executions that are finished.
            of: executions there will be, 0 where nobody knows yet.  The phase ends when as many are done.
            figures: what is known so far, in words.
        """
        ended = done == of
        if ended or (self._bar is None and time.monotonic() - self._said > _EVERY_S):
            count = f": {counted(done, 'execution')}" if of > 1 or done > 1 else ""
            how_many = count if ended or not of else f": {done} of {counted(of, 'execution')}"
            line = f"{phase}{how_many}" + (f", {figures}" if figures else "")
            self._said = time.monotonic()
            if self._bar is not None:
                self._bar.console.print(line, highlight=False)
            else:
                note(line)
        self._update(description=phase, completed=done, total=of or None, figures=figures)


def _interval(value: Interval) -> str:
    text = units.number(value.value)
    if value.lower is not None:
        text += f" ({_bounds(value)})"
    return text


def _bounds(value: Interval) -> str:
    if value.lower is None:
        return f"needs {INTERVAL_NEEDS}"
    return f"{units.number(value.lower)} to {units.number(value.upper)}"


def _rate(number: Optional[float], unit: str) -> str:
    return "" if number is None else f"{units.count(number)}{unit}"


def _band(prediction: Prediction) -> str:
    band = prediction.images_per_s_band
    return f"{units.number(band[0])} to {units.number(band[1])}" if band else ""


def _memory(prediction: Prediction) -> str:
    memory = prediction.memory
    if not memory:
        return ""
    fullest = max(memory, key=lambda ipu: ipu.fill)
    return f"{units.size(fullest.bytes)} per IPU ({units.percent(fullest.fill)}, {fullest.verdict})"


def columns(report: BenchmarkReport) -> Tuple[List[str], List[List[str]]]:
    """Titles and rows of the table of figures; the first column names the row."""
    measured, rival = report.measured, report.comparison
    step = "weight update" if report.mode == "training" else "micro-batch"
    titles = ["", f"measured\n{report.device.kind.upper()}"]
    titles += [f"measured\n{rival.rival}"] if rival else []
    titles += [f"predicted\n{p.system}, {p.precision}" for p in report.predicted]
    void = "void" if report.void else "nothing measured"
    blank = [""] * bool(rival)
    predicted = report.predicted

    def row(name: str, own: str, others: List[str], key: Callable[[Prediction], str]) -> List[str]:
        return [name, own if measured else "", *(others or blank), *(key(p) for p in predicted)]

    rows = [
        [
            "images/s",
            units.number(measured.images_per_s.value) if measured else void,
            *([units.number(rival.images_per_s.value)] if rival else []),
            *(units.number(p.images_per_s) if p.images_per_s else "none" for p in predicted),
        ]
    ]
    m = measured
    rival_step = [units.seconds(m.step_samples / rival.images_per_s.value)] if rival and m else []
    rows += [
        row(
            "95 % interval",
            _bounds(m.images_per_s) if m else "",
            [_bounds(rival.images_per_s)] if rival else [],
            lambda p: "",
        ),
        row("80 % band", "", [], _band),
        row(
            f"time of a {step}",
            units.seconds(m.step_s if m else None),
            rival_step,
            lambda p: units.seconds(p.step_s),
        ),
        row(
            "arithmetic",
            _rate(m.flop_per_s if m else None, "FLOP/s"),
            [],
            lambda p: _rate(p.flop_per_s, "FLOP/s"),
        ),
        row(
            "share of peak",
            f"{m.share_of_matmul_peak:.1%}" if m and m.share_of_matmul_peak else "",
            [],
            lambda p: f"{p.share_of_peak:.1%}" if p.share_of_peak else "",
        ),
        row("peak memory", units.size(m.peak_memory_bytes if m else None), [], _memory),
        row("IPUs", "", [], lambda p: str(p.num_ipus or "")),
    ]
    return titles, rows


def facts(report: BenchmarkReport) -> List[Tuple[str, str]]:
    """What was measured, on what, and how sure it is, as (name, value)."""
    compilation, execution, measured = report.compilation, report.execution, report.measured
    device, environment, program = report.device, report.environment, report.program
    size = "x".join(map(str, report.input_shape))
    rows = [
        ("network", f"{report.model}, input {size}, seed {report.seed}"),
        ("data", f"{report.data.kind}: {report.data.description} ({report.data.name})"),
        ("program", _program_line(program, execution, report.mode)),
        (
            "device",
            f"{device.name}, {counted(device.num_cores, 'core')}, {units.size(device.memory_bytes)}; "
            f"TensorFlow {environment.get('tensorflow')}, Keras {environment.get('keras')}",
        ),
    ]
    if compilation is not None:
        number = compilation.num_graph_operations
        operations = f"{number:,} graph operations, " if number else ""
        rows.append(
            (
                "compilation",
                f"{counted(compilation.num_layers, 'layer')}, {operations}"
                f"{units.count(compilation.num_parameters)} parameters, "
                f"{units.count(compilation.macs_per_sample)} MACs per sample",
            )
        )
        first = compilation.first_execution_s
        rows.append(
            (
                "compile time",
                f"{units.duration(compilation.trace_s)} tracing"
                + (f", {units.duration(first)} first execution" if first else "")
                + _CACHED[compilation.cached],
            )
        )
    if report.warmup is not None:
        warm = report.warmup
        how = "until steady" if warm.steady else "not steady when its time was over"
        rows.append(
            ("warm-up", f"{counted(warm.executions, 'execution')}, {units.duration(warm.seconds)}, {how}")
        )
    if measured is not None:
        rows += _spread_rows(measured)
    if report.end_to_end is not None:
        rows += _end_to_end_rows(report.end_to_end)
    if report.comparison is not None:
        ratio = report.comparison.ratio
        rows.append(("session / keras", f"{_interval(ratio)} times the images/s, in turns in one process"))
        by_cpu = report.comparison.ratio_by_processor_time
        if by_cpu is not None and measured and (measured.others_share or 0.0) > QUIET_SHARE:
            rows.append(
                (
                    "the same",
                    f"{_interval(by_cpu)} by processor time, which does not count waiting for others",
                )
            )
        rows.append(("keras is", report.comparison.description))
    if report.regression is not None:
        r = report.regression
        rows.append(
            (
                "baseline",
                f"{_interval(r.ratio)} times its speed: {_VERDICTS[r.verdict]} "
                f"({r.allowed:.1%} may be lost)" + (f"; {r.why_inconclusive}" if r.why_inconclusive else ""),
            )
        )
        if r.ratio_by_processor_time:
            rows.append(
                (
                    "baseline by",
                    f"time {_interval(r.ratio_by_time)}, processor time "
                    f"{_interval(r.ratio_by_processor_time)}: the machine was busy, so both count",
                )
            )
    for prediction in report.predicted:
        for text in prediction.notes:
            rows.append((f"predicted, {prediction.precision}", text))
    rows += [("note", text) for text in report.notes]
    if report.void:
        rows.append(("void", report.void))
        if report.hint:
            rows.append(("hint", report.hint))
    return rows


def _program_line(program: PlainDict, execution: Optional[ExecutionFacts], mode: str) -> str:
    replicas = f" x {counted(program['num_replicas'], 'replica')}"
    if execution is None:
        line = f"{mode}, micro-batches of {program['micro_batch_size']}"
    elif mode == "training":
        line = (
            f"training: global batch {program['global_batch_size']:,} = micro-batch {program['micro_batch_size']} x "
            f"{program['gradient_accumulation_count']} accumulated{replicas}"
        )
    else:
        line = f"inference: micro-batch {program['micro_batch_size']}{replicas}"
    if execution is not None:
        line += f"; executions of {counted(execution.samples, 'image')}"
        if execution.fused_micro_batches > 1:
            line += f", {execution.fused_micro_batches} micro-batches fused"
    return line


def _spread_rows(measured: MeasuredFigures) -> List[Tuple[str, str]]:
    spread = measured.execution
    varies = spread.coefficient_of_variation
    times = f"{units.seconds(spread.min_s)} least, {units.seconds(spread.max_s)} most"
    latency = []
    for row in measured.percentiles:
        name = f"p{row.percent:g}"
        if row.value_s is None:
            latency.append(f"{name} needs {row.needs}")
        else:
            latency.append(f"{name} {units.seconds(row.value_s)} (at most {units.seconds(row.at_most_s)})")
    rows = [
        (
            "measured",
            f"{counted(measured.num_executions, 'execution')}, {counted(measured.total_samples, 'image')} in "
            f"{units.duration(measured.total_s)}; interval: 95 %, "
            + (
                f"bootstrap over blocks of {counted(block_length(measured.num_executions), 'execution')}"
                if measured.num_executions >= INTERVAL_NEEDS
                else f"which needs {counted(INTERVAL_NEEDS, 'execution')}"
            ),
        ),
        (
            "an execution",
            times + (f", standard deviation {varies:.1%}" if varies is not None else ""),
        ),
        ("percentiles", "; ".join(latency)),
    ]
    if measured.others_share is not None:
        quiet = "" if measured.others_share <= QUIET_SHARE else ": no quiet machine"
        rows.append(
            ("other programs", f"used {units.percent(measured.others_share)} of the processors{quiet}")
        )
    if measured.matmul_peak:
        peak = measured.matmul_peak
        rows.append(("peak", f"{units.count(peak.flop_per_s)}FLOP/s: {peak.method}"))
    return rows


def _end_to_end_rows(found: EndToEnd) -> List[Tuple[str, str]]:
    share = found.data_share
    text = f"{share.value:.1%}"
    if share.lower is not None:
        text += f" ({share.lower:.1%} to {share.upper:.1%})"
    return [
        ("data cost", f"{text} of the time: waiting for the input pipeline, and the cores that it takes"),
        ("without", f"{_interval(found.constant_batch.images_per_s)} images/s on a constant batch"),
        ("pipeline", f"{_interval(found.pipeline.images_per_s)} images/s alone"),
    ]


def part_rows(found: PipelineFigures) -> List[List[str]]:
    """A row for each part of the pipeline: its name, images/s up to it, interval, own time per image, what it does."""
    return [
        [
            part.name,
            units.number(part.images_per_s.value),
            _bounds(part.images_per_s),
            _own_time(part.own_s_per_image),
            part.what,
        ]
        for part in found.stages
    ]


def _own_time(seconds: Interval) -> str:
    """A time with its interval below, in one unit; either may be negative."""
    known = [value for value in (seconds.value, seconds.lower, seconds.upper) if value is not None]
    unit, factor, digits = ("us", 1e6, 1) if max(map(abs, known)) < 1e-3 else ("ms", 1e3, 2)

    def text(value: float) -> str:
        return f"{factor * value:.{digits}f}"

    line = f"{text(seconds.value)} {unit}"
    if seconds.lower is None or seconds.upper is None:
        return line
    return f"{line}\n({text(seconds.lower)} to {text(seconds.upper)})"


def _print_pipeline(out: Console, report: BenchmarkReport, found: PipelineFigures) -> None:
    """The table of the pipeline's parts, and of the IPUs that the pipeline could feed."""
    from rich.text import Text

    name = f"{report.data.name}: input pipeline of {report.model}, {report.mode}"
    table = plain_table(title=name)
    titles = ("measured\nup to", "images/s", "95 % interval", "own time\nper image", "what is done")
    for index, title in enumerate(titles):
        table.add_column(Text(title), justify="right" if 0 < index < 4 else "left", overflow="fold")
    for row in part_rows(found):
        table.add_row(Text(row[0], style="bold"), *(Text(cell) for cell in row[1:]))
    out.print(table)
    if not found.feeds:
        return
    table = plain_table()
    for index, title in enumerate(
        ("predicted", "images/s of one IPU", "IPUs the pipeline could feed", "95 % interval")
    ):
        table.add_column(Text(title), justify="right" if index else "left")
    for feed in found.feeds:
        number = feed.num_ipus
        table.add_row(
            Text(f"{feed.system}, {feed.precision}", style="bold"),
            units.number(feed.images_per_s_per_ipu),
            units.number(number.value),
            _bounds(number),
        )
    out.print(table)


def _print_figures(out: Console, report: BenchmarkReport) -> None:
    """The table of figures, measured and predicted side by side."""
    from rich.text import Text

    titles, rows = columns(report)
    what = f"{report.model}: {report.mode}" + (", end to end" if report.scope == "end-to-end" else "")
    if report.interrupted:
        what += ", interrupted"
    table = plain_table(title=what)
    for index, title in enumerate(titles):
        table.add_column(Text(title), justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(Text(row[0], style="bold"), *(Text(cell) for cell in row[1:]))
    out.print(table)


def print_benchmark(report: BenchmarkReport) -> None:
    """The report on stdout."""
    out = console(sys.stdout)
    if report.data_pipeline is not None:
        _print_pipeline(out, report, report.data_pipeline)
    else:
        _print_figures(out, report)
    out.print(fact_table(facts(report)))
