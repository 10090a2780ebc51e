"""Output of ``ipucnn benchmark``: the measured figures, and predictions for IPUs beside them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Callable, Iterable, Iterator, List, Optional, Sequence, Tuple

from ipucnn.aliases import PlainDict
from ipucnn.benchmarking.intervals import INTERVAL_NEEDS, QUIET_SHARE, block_length
from ipucnn.reports import units
from ipucnn.reports.console import (
    console,
    fact_table,
    plain_table,
    print_table,
)
from ipucnn.text import counted

if TYPE_CHECKING:
    from rich.console import Console

    from ipucnn.benchmarking.records import (
        BenchmarkReport,
        Comparison,
        EndToEnd,
        ExecutionFacts,
        Interval,
        IpuPrediction,
        MeasuredFigures,
        PipelineFigures,
        Regression,
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
_WHAT = "what is done"


def _interval(value: Interval) -> str:
    text = units.number(value.value)
    if value.lower is not None:
        text += f" ({_bounds(value)})"
    return text


def _bounds(value: Interval) -> str:
    if value.lower is None:
        return f"needs {INTERVAL_NEEDS}"
    return f"{units.number(value.lower)} to {units.number(value.upper)}"


def _flop(number: Optional[float]) -> str:
    return "" if number is None else f"{units.count(number)}FLOP/s"


def _band(prediction: IpuPrediction) -> str:
    band = prediction.images_per_s_band
    return f"{units.number(band[0])} to {units.number(band[1])}" if band else ""


def _memory(prediction: IpuPrediction) -> str:
    memory = prediction.memory
    if not memory:
        return ""
    fullest = max(memory, key=lambda ipu: ipu.fill)
    return f"{units.size(fullest.bytes)} per IPU ({units.percent(fullest.fill)}, {fullest.verdict})"


def columns(report: BenchmarkReport) -> Tuple[List[str], List[List[str]]]:
    """Returns titles and rows of the table of figures; the first column names the row."""
    m, rival, predicted = report.measured, report.comparison, report.predicted
    titles = ["", f"measured\n{report.device.kind.upper()}"]
    titles += [f"measured\n{rival.rival}"] if rival else []
    titles += [f"predicted\n{p.system}, {p.precision}" for p in predicted]

    def row(name: str, value: str, key: Callable[[IpuPrediction], str], other: str = "") -> List[str]:
        return [name, value, *([other] if rival else []), *map(key, predicted)]

    nothing = "void" if report.void else "nothing measured"
    rate = units.number(m.images_per_s.value) if m else nothing
    rival_rate = rival.images_per_s.value if rival else None
    rival_step = m.step_samples / rival_rate if m and rival_rate else None
    step = "weight update" if report.mode == "training" else "micro-batch"
    share = f"{m.share_of_matmul_peak:.1%}" if m and m.share_of_matmul_peak else ""
    return titles, [
        row("images/s", rate, lambda p: units.number(p.images_per_s) or "none", units.number(rival_rate)),
        row(
            "95 % interval",
            _bounds(m.images_per_s) if m else "",
            lambda p: "",
            _bounds(rival.images_per_s) if rival else "",
        ),
        row("80 % band", "", _band),
        row(
            f"time of a {step}",
            units.seconds(m.step_s if m else None),
            lambda p: units.seconds(p.step_s),
            units.seconds(rival_step),
        ),
        row("arithmetic", _flop(m.flop_per_s if m else None), lambda p: _flop(p.flop_per_s)),
        row("share of peak", share, lambda p: f"{p.share_of_peak:.1%}" if p.share_of_peak else ""),
        row("peak memory", units.size(m.peak_memory_bytes if m else None), _memory),
        row("IPUs", "", lambda p: str(p.num_ipus or "")),
    ]


def facts(report: BenchmarkReport) -> Iterator[Tuple[str, str]]:
    """Yields what was measured, the conditions, and the uncertainty, as (name, value)."""
    yield from _work_rows(report)
    if report.measured is not None:
        yield from _spread_rows(report.measured)
    if report.end_to_end is not None:
        yield from _end_to_end_rows(report.end_to_end)
    if report.comparison is not None:
        yield from _comparison_rows(report.comparison, report.measured)
    if report.regression is not None:
        yield from _baseline_rows(report.regression)
    for prediction in report.predicted:
        for text in prediction.notes:
            yield f"predicted, {prediction.precision}", text
    for text in report.notes:
        yield "note", text
    if report.void:
        yield "void", report.void
        if report.hint:
            yield "hint", report.hint


def _work_rows(report: BenchmarkReport) -> Iterator[Tuple[str, str]]:
    """Yields network, data, program and device, and the time of compilation and warm-up."""
    device, environment, compiled, warm = report.device, report.environment, report.compilation, report.warmup
    yield "network", f"{report.model}, input {'x'.join(map(str, report.input_shape))}, seed {report.seed}"
    yield "data", f"{report.data.kind}: {report.data.description} ({report.data.name})"
    yield "program", _program_line(report.program, report.execution, report.mode)
    machine = f"{device.name}, {counted(device.num_cores, 'core')}, {units.size(device.memory_bytes)}"
    versions = f"TensorFlow {environment.get('tensorflow')}, Keras {environment.get('keras')}"
    yield "device", f"{machine}; {versions}"
    if compiled is not None:
        number, first = compiled.num_graph_operations, compiled.first_execution_s
        operations = f"{number:,} graph operations, " if number else ""
        counts = f"{units.count(compiled.num_parameters)} parameters, "
        counts += f"{units.count(compiled.macs_per_sample)} MACs per sample"
        yield "compilation", f"{counted(compiled.num_layers, 'layer')}, {operations}{counts}"
        text = f"{units.duration(compiled.trace_s)} tracing"
        text += f", {units.duration(first)} first execution" if first else ""
        yield "compile time", text + _CACHED[compiled.cached]
    if warm is not None:
        how = "until steady" if warm.steady else "not steady when its time was over"
        yield "warm-up", f"{counted(warm.executions, 'execution')}, {units.duration(warm.seconds)}, {how}"


def _comparison_rows(
    comparison: Comparison, measured: Optional[MeasuredFigures]
) -> Iterator[Tuple[str, str]]:
    yield "session / keras", f"{_interval(comparison.ratio)} times the images/s, in turns in one process"
    by_cpu = comparison.ratio_by_processor_time
    if by_cpu is not None and measured and (measured.others_share or 0.0) > QUIET_SHARE:
        why = "by processor time, which does not count waiting for others"
        yield "the same", f"{_interval(by_cpu)} {why}"
    yield "keras is", comparison.description


def _baseline_rows(regression: Regression) -> Iterator[Tuple[str, str]]:
    why = f"; {regression.why_inconclusive}" if regression.why_inconclusive else ""
    verdict = f"{_VERDICTS[regression.verdict]} ({regression.allowed:.1%} may be lost){why}"
    yield "baseline", f"{_interval(regression.ratio)} times its speed: {verdict}"
    by_cpu = regression.ratio_by_processor_time
    if by_cpu is not None:
        both = f"time {_interval(regression.ratio_by_time)}, processor time {_interval(by_cpu)}"
        yield "baseline by", f"{both}: the machine was busy, so both count"


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


def _spread_rows(measured: MeasuredFigures) -> Iterator[Tuple[str, str]]:
    """Yields the amount measured and its variation."""
    spread, count = measured.execution, measured.num_executions
    how = f"which needs {counted(INTERVAL_NEEDS, 'execution')}"
    if count >= INTERVAL_NEEDS:
        how = f"bootstrap over blocks of {counted(block_length(count), 'execution')}"
    amount = f"{counted(count, 'execution')}, {counted(measured.total_samples, 'image')} in "
    yield "measured", f"{amount}{units.duration(measured.total_s)}; interval: 95 %, {how}"
    varies = spread.coefficient_of_variation
    times = f"{units.seconds(spread.min_s)} least, {units.seconds(spread.max_s)} most"
    yield "an execution", times + (f", standard deviation {varies:.1%}" if varies is not None else "")
    latency = [
        f"p{row.percent:g} needs {row.needs}"
        if row.value_s is None
        else f"p{row.percent:g} {units.seconds(row.value_s)} (at most {units.seconds(row.at_most_s)})"
        for row in measured.percentiles
    ]
    yield "percentiles", "; ".join(latency)
    others, peak = measured.others_share, measured.matmul_peak
    if others is not None:
        quiet = "" if others <= QUIET_SHARE else ": no quiet machine"
        yield "other programs", f"used {units.percent(others)} of the processors{quiet}"
    if peak:
        yield "peak", f"{units.count(peak.flop_per_s)}FLOP/s: {peak.method}"


def _end_to_end_rows(end_to_end: EndToEnd) -> Iterator[Tuple[str, str]]:
    share = end_to_end.data_share
    interval = "" if share.lower is None else f" ({share.lower:.1%} to {share.upper:.1%})"
    why = "waiting for the input pipeline, and the cores that it takes"
    yield "data cost", f"{share.value:.1%}{interval} of the time: {why}"
    yield "without", f"{_interval(end_to_end.constant_batch.images_per_s)} images/s on a constant batch"
    yield "pipeline", f"{_interval(end_to_end.pipeline.images_per_s)} images/s alone"


def part_rows(pipeline: PipelineFigures) -> List[List[str]]:
    """Returns a row for each part of the pipeline.

    Its cells are name, images/s up to it, interval, its own time per image, and a description.
    """
    return [
        [
            part.name,
            units.number(part.images_per_s.value),
            _bounds(part.images_per_s),
            _own_time(part.own_s_per_image),
            part.what,
        ]
        for part in pipeline.stages
    ]


def _own_time(seconds: Interval) -> str:
    """Returns a time with its interval below it, in one unit; either may be negative."""
    known = [value for value in (seconds.value, seconds.lower, seconds.upper) if value is not None]
    unit, factor, digits = ("us", 1e6, 1) if max(map(abs, known)) < 1e-3 else ("ms", 1e3, 2)

    def text(value: float) -> str:
        return f"{factor * value:.{digits}f}"

    line = f"{text(seconds.value)} {unit}"
    if seconds.lower is None or seconds.upper is None:
        return line
    return f"{line}\n({text(seconds.lower)} to {text(seconds.upper)})"


def _print_rows(out: Console, title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table whose first column names the rows; the others hold figures."""
    from rich.text import Text

    table = plain_table(title=title or None, padding=(0, 1, 0, 0))
    for index, head in enumerate(heads):
        is_text = index == 0 or head == _WHAT
        table.add_column(head, justify="left" if is_text else "right", overflow="fold")
    for name, *cells in rows:
        table.add_row(Text(name, style="bold"), *map(Text, cells))
    print_table(out, table)


def _print_pipeline(out: Console, report: BenchmarkReport, pipeline: PipelineFigures) -> None:
    """Prints the table of the pipeline's parts, and of the number of IPUs that the pipeline could feed."""
    title = f"{report.data.name}: input pipeline of {report.model}, {report.mode}"
    heads = ("measured\nup to", "images/s", "95 % interval", "own time\nper image", _WHAT)
    _print_rows(out, title, heads, part_rows(pipeline))
    if pipeline.feeds:
        feed_heads = ("predicted", "images/s of one IPU", "IPUs the pipeline could feed", "95 % interval")
        feeds = [
            (
                f"{feed.system}, {feed.precision}",
                units.number(feed.images_per_s_per_ipu),
                units.number(feed.num_ipus.value),
                _bounds(feed.num_ipus),
            )
            for feed in pipeline.feeds
        ]
        _print_rows(out, "", feed_heads, feeds)


def _print_figures(out: Console, report: BenchmarkReport) -> None:
    """Prints the table of figures, measured and predicted side by side."""
    what = f"{report.model}: {report.mode}" + (", end to end" if report.scope == "end-to-end" else "")
    _print_rows(out, what + (", interrupted" if report.interrupted else ""), *columns(report))


def print_benchmark(report: BenchmarkReport) -> None:
    """Prints the report on stdout."""
    out = console(sys.stdout)
    if report.data_pipeline is not None:
        _print_pipeline(out, report, report.data_pipeline)
    else:
        _print_figures(out, report)
    out.print(fact_table(facts(report)))
