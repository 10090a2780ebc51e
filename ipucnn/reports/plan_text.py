"""Describes a plan in sentences and text tables, shared by the terminal and the page."""

from __future__ import annotations

import json
from typing import List, NamedTuple, Optional, Sequence, Tuple

from ipucnn.config.options import BY_NAME
from ipucnn.datasets.registry import DATASETS
from ipucnn.models.registry import is_layer_graph
from ipucnn.planning.cost.memory import FITS_BELOW, LAST_BIN, published_bin
from ipucnn.planning.pipeline_plan import Change, PipelinePlan
from ipucnn.planning.program import Placement, PlannedProgram, Proportions, percentages
from ipucnn.planning.schedules import SEQUENTIAL
from ipucnn.planning.search.neighbours import untried_stages
from ipucnn.reports import units
from ipucnn.text import counted, quoted

VERDICTS = ("fits", "uncertain", "does not fit")


class TextTable(NamedTuple):
    """A table of text.

    Attributes:
        title: the content of the table.
        columns: the column heads.
        texts: the heads of the columns that hold words; the others hold numbers.
        rows: the rows, with a cell for each column.
        notes: the sentences below it.
        chosen: the index of the row that is the plan, None if there is none.
    """

    title: str
    columns: Tuple[str, ...]
    texts: Tuple[str, ...]
    rows: List[Tuple[str, ...]]
    notes: Tuple[str, ...] = ()
    chosen: Optional[int] = None


def verdict_of(text: str) -> Optional[str]:
    """Returns the memory verdict at the start of a cell or sentence, which determines its colour."""
    return next((verdict for verdict in VERDICTS if text.split(":")[0] == verdict), None)


def assumed(sentences: Sequence[str]) -> str:
    """Returns the sentence about what was assumed because the user gave nothing else."""
    return "assumed: " + "; ".join(sentences)


def title(plan: PipelinePlan) -> str:
    """Returns network, stages, replicas and system."""
    settings, count = plan.settings, plan.num_stages
    replicas = counted(settings.num_replicas, "replica")
    if count > 1 and settings.placement is Placement.SEGMENTS and settings.recomputation:
        where = f"1 IPU, {counted(count, 'recomputation segment')}"
        where += f", {replicas}" if settings.num_replicas > 1 else ""
    else:
        stages = counted(count, "stage") if count > 1 else "one stage"
        where = f"{stages} on {counted(plan.occupied_ipus, 'IPU')}"
        where += f" in {replicas}" if settings.num_replicas > 1 else ""
    return f"{plan.model}: {where}, {plan.system.title}"


def facts(plan: PipelinePlan) -> List[Tuple[str, str]]:
    """Returns names and their lines; a line without a name belongs to the one before."""
    settings = plan.settings
    update = weight_update(plan)
    latency = (
        f"{units.milliseconds(plan.predicted_latency_s)} of a micro-batch from the first stage to the last"
    )
    tick = units.milliseconds(plan.predicted_tick_s)
    if plan.predicted_update_s:
        tick += f"; with its share of the update {units.milliseconds(plan.micro_batch_s)}"
    bound = units.milliseconds(plan.predicted_lower_bound_s)
    return [
        ("predicted", f"{plan.predicted_images_per_s:,.0f} images/s{_band(plan)}; nothing here was measured"),
        *_epoch(plan),
        ("memory", memory(plan)),
        ("splits", proof(plan)),
        ("", f"tick {tick}, lower bound {bound}, gap {plan.gap:.2%}"),
        ("bottleneck", plan.bottleneck),
        *(
            [("weight update", update)]
            if settings.training
            else [("latency", latency), ("execution", update)]
        ),
        (
            "host",
            f"{plan.predicted_host_bytes_per_s / 1e9:.2f} GB/s of images; it could feed "
            f"{plan.predicted_host_limit_images_per_s:,.0f} images/s",
        ),
        ("batch", batch(plan)),
        ("settings", _settings(plan)),
        *_fixed(plan),
        *_changes(plan),
    ]


def _epoch(plan: PipelinePlan) -> List[Tuple[str, str]]:
    """Returns the time of an epoch over the data set's training images, if their number is known."""
    known = DATASETS.get(str(plan.options.get("dataset")))
    if known is None or known.num_examples is None or not plan.settings.training:
        return []
    number = known.num_examples[0]
    time = units.duration(number / plan.predicted_images_per_s)
    return [("epoch", f"{time} for the {number:,} training images of {plan.options['dataset']}")]


def _changes(plan: PipelinePlan) -> List[Tuple[str, str]]:
    """Returns the changes that would be faster, and what to do if the plan does not fit."""

    def text(change: Change) -> str:
        doubt = "" if change.verdict == "fits" else f", {change.verdict} whether it fits"
        effect = f"x{change.ratio:.2f} images/s, the fullest IPU at {units.percent(change.predicted_fill)}"
        return f"{' '.join(change.flags)}: {effect}{doubt}"

    # plan-splits would choose other splits and proportions for them.
    lines = [("next changes", "each keeps the splits and replaces options of the command below")]
    lines = [*lines, *(("", text(change)) for change in plan.next_changes)] if plan.next_changes else []
    return lines if plan.remedy is None else [*lines, ("if too large", text(plan.remedy))]


def _band(plan: PipelinePlan) -> str:
    low, high = plan.predicted_images_per_s_band
    return f" ({low:,.0f} to {high:,.0f} in 80% of cases)"


def memory(plan: PipelinePlan) -> str:
    """Returns the verdict, and what is known of configurations with a similar fill."""
    text = f"{plan.verdict}: the fullest IPU at {units.percent(plan.predicted_fill)} of its memory"
    fits, number = plan.published_fits
    if number:
        text += f"; published configurations with {_tenth(plan.predicted_fill)}: {fits} of {number} fit"
    if plan.planned and plan.memory_limit > FITS_BELOW:
        text += f"; no splits stay below {units.percent(FITS_BELOW)}, these may take "
        text += units.percent(plan.memory_limit)
    return text


def _tenth(fill: float) -> str:
    """Returns the range of fills with which a plan's is compared."""
    place = published_bin(fill)
    if place == LAST_BIN:
        return f"{10 * place}% or more"
    return f"{10 * place} to {10 * place + 10}%"


def proof(plan: PipelinePlan) -> str:
    """Tells whether the splits are the best ones."""
    transfer = "eight_bit_transfer"
    text = f"optimal: {str(plan.optimal).lower()}"
    if plan.optimal and plan.num_stages > 1:
        aside = ", fill and drain aside," if plan.predicted_fill_drain_s else ""
        text += f" (no splits of these layers in this order are faster{aside} within the memory allowed)"
    if plan.verdict == "does not fit":
        text = "they do not fit"
    if plan.bottleneck == "host" and transfer in plan.not_searched and not plan.settings.eight_bit_transfer:
        text = "the host limits any splits, and --eight-bit-transfer was not tried"
    return text if plan.planned else f"given; {text}"


def weight_update(plan: PipelinePlan) -> str:
    """Returns the time of a weight update, or of an execution of inference, and of its parts."""
    settings = plan.settings
    text = f"{units.milliseconds(plan.predicted_weight_update_s)}: "
    text += counted(settings.gradient_accumulation_count, "tick")
    if plan.num_stages > 1 and not settings.order.is_sequential:
        text += f", {units.milliseconds(plan.predicted_fill_drain_s)} to fill and drain"
    if settings.training:
        text += f", {units.milliseconds(plan.predicted_update_s)} update"
        if settings.num_replicas > 1:
            text += f" ({units.milliseconds(plan.predicted_all_reduce_s)} of it all-reduce)"
    if plan.bottleneck == "host":
        images = settings.global_batch_size
        text += f"; the host takes {units.milliseconds(images / plan.predicted_images_per_s)} for its images"
    return text


def batch(plan: PipelinePlan) -> str:
    """Returns the size of a weight update, or of an execution of inference."""
    settings = plan.settings
    replicas = counted(settings.num_replicas, "replica")
    if not settings.training:
        return (
            f"micro-batch {settings.micro_batch_size:,} x {replicas}, and "
            f"{counted(settings.gradient_accumulation_count, 'micro-batch')} of each in an execution"
        )
    return (
        f"global batch {settings.global_batch_size:,} = micro-batch {settings.micro_batch_size:,} x "
        f"{settings.gradient_accumulation_count:,} accumulated x {replicas}"
    )


def _settings(plan: PipelinePlan) -> str:
    settings = plan.settings
    how = "" if settings.training else "inference, "
    if plan.num_stages > 1 and settings.training:
        how = f"{settings.schedule}, recomputation {'on' if settings.recomputation else 'off'}, "
    half = " with half partials" if settings.has_half_partials else ""
    half += ", 8-bit transfer" if settings.eight_bit_transfer else ""
    return (
        f"{how}precision {settings.precision}{half}, input {'x'.join(map(str, plan.input_shape))}, "
        f"{counted(plan.num_classes, 'class')}, available memory proportion "
        f"{proportion(settings.available_memory_proportion)}"
    )


def _fixed(plan: PipelinePlan) -> List[Tuple[str, str]]:
    """Returns the settings that nobody typed and the search did not vary."""
    if not plan.not_searched or plan.num_stages == 1 or not plan.planned:
        return []
    names = (f"--{BY_NAME[name].key}" for name in plan.not_searched)
    return [("", f"not varied by the search: {', '.join(names)}")]


def proportion(proportions: Proportions) -> str:
    """Returns the availableMemoryProportion, of all stages or of each."""
    values = percentages(proportions)
    if len(values) == len(proportions):
        text = " ".join(f"{value:g}" for value in values) + "%"
        if len(proportions) == 1 and proportions[0].matmul != proportions[0].convolution:
            text += f" (matrix products {100 * proportions[0].matmul:g}%)"
        return text
    pairs = zip(values[::2], values[1::2])
    stages = " ".join(f"{a:g}/{b:g}" if a != b else f"{a:g}" for a, b in pairs)
    return f"{stages}% (convolutions/matrix products)"


def why_no_fit(plan: PipelinePlan) -> List[str]:
    """Returns why no plan surely fits, and what would fit: a sentence each."""
    why = plan.no_fit
    if why is None:
        fill = units.percent(plan.predicted_fill)
        return [f"The fullest IPU is predicted to take {fill} of its memory: {plan.verdict}."]
    lines = [
        f"No split into {counted(why.num_stages, 'stage')} stays below {units.percent(why.memory_limit)} of an IPU's "
        f"memory; the verdict on this one is: {plan.verdict}."
    ]
    if why.layer is not None:
        lines.append(f"Layer {why.layer} exceeds that in every stage.")
    if why.ranges:
        runs = "; ".join(f"{first} to {last}" for first, last in why.ranges)
        lines.append(f"Each of these runs of layers is too large for one stage: {runs}.")
    where = " on one IPU" if why.on_one_ipu else " with an IPU each"
    if why.fewest_stages is not None:
        lines.append(f"It would fit in {counted(why.fewest_stages, 'stage')}{where}.")
    else:
        if why.most_stages > why.num_stages:
            lines.append(f"No split into {why.num_stages + 1} to {why.most_stages} stages{where} fits.")
        lines += filter(None, [untried_stages(why, plan.settings)])
    lines.append(
        "No smaller micro-batch fits."
        if why.largest_micro_batch_size is None
        else f"The largest micro-batch with which some split fits: {why.largest_micro_batch_size}."
    )
    return lines


def within(factor: float) -> str:
    """Returns a sentence with the range in which measured throughputs are expected."""
    return (
        f"80% of measurements are expected within -{1 - 1 / factor:.0%} and +{factor - 1:.0%} of the images/s"
    )


# -- tables -------------------------------------------------------------------------------------------------------


def stage_sheet(plan: PipelinePlan) -> TextTable:
    """Returns the table with a row for each stage."""
    training, pipelined = plan.settings.training, plan.num_stages > 1
    recomputes = any(stage.predicted_recompute_s for stage in plan.stages)
    is_mapped = plan.settings.mapping != tuple(range(plan.num_stages))
    columns = ["", *["IPU"] * is_mapped, "opens at", "ends with", "layers", "MACs", "params", "forward"]
    columns += ["recompute"] * recomputes + ["backward"] * training + ["receives", "skips"] * pipelined
    rows = []
    for stage in plan.stages:
        cells = {
            "": str(stage.stage),
            "IPU": str(stage.ipu),
            "opens at": stage.first_layer,
            "ends with": stage.last_layer,
            "layers": str(stage.num_layers),
            "MACs": units.count(stage.macs),
            "params": units.count(stage.num_parameters),
            "forward": units.column_milliseconds(stage.predicted_forward_s),
            "recompute": _milliseconds_or_none(stage.predicted_recompute_s),
            "backward": units.column_milliseconds(stage.predicted_backward_s),
            "receives": _milliseconds_or_none(stage.predicted_receive_s),
            "skips": str(len(stage.skips) or ""),
        }
        rows.append(tuple(cells[name] for name in columns))
    what = "stages, predicted; times of one micro-batch in ms"
    return TextTable(what, tuple(columns), ("opens at", "ends with"), rows)


def _milliseconds_or_none(seconds: float) -> str:
    return units.column_milliseconds(seconds) if seconds else ""


def comparison_sheet(plan: PipelinePlan) -> TextTable:
    """Returns the table of the plan's splits, and below them others under the same settings."""

    def row(
        name: str, stages: int, ratio: float, best_s: float, speed: float, fill: float
    ) -> Tuple[str, ...]:
        times = (f"{units.column_milliseconds(seconds)} ms" for seconds in (ratio * best_s, best_s))
        return (name, str(stages), *times, f"{ratio:.2f}", f"{speed:,.0f}", units.percent(fill))

    name = "this plan" if plan.planned else "these splits"
    times = 1 + plan.gap, plan.predicted_lower_bound_s
    mine = row(name, plan.num_stages, *times, plan.predicted_images_per_s, plan.predicted_fill)
    rows = [(*mine, plan.verdict)]
    for other in plan.comparison:
        times = other.ratio, other.predicted_best_tick_s
        figures = other.predicted_images_per_s, other.predicted_fill
        rows.append((*row(other.name, len(other.splits) + 1, *times, *figures), other.verdict))
    share = ", with its share of the update" if plan.predicted_update_s else ""
    notes = [f"time: of a tick{share}; best: the shortest of all splits that need no more memory"]
    if any(row.ratio < 0.995 for row in plan.comparison):
        notes.append(
            "A row below 1 has another schedule. Its ticks are shorter, and more of them fill and drain the pipeline."
        )
    columns = ("", "stages", "time", "best", "x best", "images/s", "memory", "verdict")
    what = "other splits under the same settings, predicted"
    return TextTable(what, columns, ("", "verdict"), rows, (*notes, *_band_note(plan)))


def _band_note(plan: PipelinePlan) -> Tuple[str, ...]:
    return (within(plan.predicted_band_factor),)


_MARKS = {
    "r": "recomputation of activations in the backward pass; --recomputation off leaves it out",
    "h": "half partials: sums of products in 16 bits, which change numerics; --no-half-partials leaves them out",
    "o": "optimizer state outside the chip; --no-optimizer-state-offloading keeps it on the chip",
    "t": "8-bit transfer: images travel to the device as bytes; --no-eight-bit-transfer sends them as they are",
}


def pareto_sheet(plan: PipelinePlan, most: Optional[int] = None) -> TextTable:
    """Returns the table of the best uses of the IPUs: the plan's, and the first ones up to ``most`` rows in all."""
    training, rows = plan.settings.training, plan.pareto
    chosen = next(number for number, entry in enumerate(rows, start=1) if entry.best)
    most = len(rows) if most is None else most
    shown = [*range(1, min(len(rows), most - (chosen > most)) + 1)]
    shown += [] if chosen in shown else [chosen]
    pipelined = any(entry.settings.num_stages > 1 for entry in rows)
    columns = [
        "row",
        "IPUs",
        "stages",
        *["schedule"] * pipelined,
        "micro",
        "GA" if training else "steps",
        "repl.",
    ]
    columns += [*["latency"] * (not training), "with", "prop.", "images/s", "memory"]
    table = []
    for number in shown:
        entry, settings = rows[number - 1], rows[number - 1].settings
        cells = {
            "row": str(number),
            "IPUs": str(entry.occupied_ipus),
            "stages": str(settings.num_stages),
            "schedule": settings.schedule if settings.num_stages > 1 else "",
            "micro": str(settings.micro_batch_size),
            "GA": str(settings.gradient_accumulation_count),
            "steps": str(settings.gradient_accumulation_count),
            "repl.": str(settings.num_replicas),
            "latency": f"{units.column_milliseconds(entry.predicted_latency_s)} ms",
            "with": _marks(settings),
            "prop.": _span(settings.available_memory_proportion),
            "images/s": f"{entry.predicted_images_per_s:,.0f}",
            "memory": units.percent(entry.predicted_fill) + "?" * (entry.verdict == "uncertain"),
        }
        table.append(tuple(cells[name] for name in columns))
    better = "throughput, memory and IPUs" if training else "throughput, latency, memory and IPUs"
    return TextTable(
        f"best uses of the IPUs, predicted: no row is better than another in {better} at once",
        tuple(columns),
        ("schedule", "with"),
        table,
        tuple(_pareto_notes(plan, chosen, shown)),
        shown.index(chosen),
    )


def _marks(settings: PlannedProgram) -> str:
    """Returns the letters of ``_MARKS`` for what makes a difference to a program."""
    return (
        "r" * (settings.training and settings.recomputation)
        + "h" * settings.has_half_partials
        + "o" * (settings.offloads_optimizer_state and settings.optimizer_slots > 0)
        + "t" * settings.eight_bit_transfer
    )


def _pareto_notes(plan: PipelinePlan, chosen: int, shown: Sequence[int]) -> List[str]:
    """Explains the table's rows, columns and letters."""
    training, rows = plan.settings.training, plan.pareto
    first = f"Row {chosen} is the plan above."
    if len(rows) > 1:
        other = chosen % len(rows) + 1
        first += (
            f" Add --row {other} to the command that you typed to see row {other} in its place, with the command that "
            f"{'trains' if training else 'measures'} it."
        )
    if len(shown) < len(rows):
        left = f"{len(rows) - len(shown)} of {len(rows)} rows"
        first += f" The table leaves out {left}: --json has all of them, and --row takes their numbers, too."
    counts = (
        "GA: micro-batches accumulated per weight update"
        if training
        else "steps: micro-batches per execution"
    )
    notes = [first, f"micro: samples in a micro-batch; {counts}; repl.: replicas"]
    if training and any(entry.settings.schedule == SEQUENTIAL for entry in rows):
        notes.append(
            "Sequential stages are segments: parts of a network on one IPU, here with recomputation."
        )
    notes.append("prop.: available memory proportion in percent, or the smallest and largest of the stages")
    if any(entry.verdict == "uncertain" for entry in rows):
        notes.append("?: uncertain whether it fits")
    used = {mark for number in shown for mark in _marks(rows[number - 1].settings)}
    notes += [f"{mark}: {text}" for mark, text in _MARKS.items() if mark in used]
    if len(rows) > 1:
        notes.append(
            "Row 1 is the fastest of all configurations, each with its best splits; the other rows were searched for "
            "among fewer micro-batch sizes and segments. Memory that differs by no more than 5% of an IPU's counts as "
            "equal."
        )
    return notes if plan.comparison else [*notes, *_band_note(plan)]


def _span(proportions: Proportions) -> str:
    shares = sorted({100 * share for stage in proportions for share in (stage.convolution, stage.matmul)})
    return f"{shares[0]:g}" if len(shares) == 1 else f"{shares[0]:g}-{shares[-1]:g}"


# -- options, ready to paste ---------------------------------------------------------------------------------------


def command_line(plan: PipelinePlan) -> str:
    """Returns the command that runs a plan, ready to paste; "" for a layer graph, which no command runs."""
    if is_layer_graph(plan.model):
        return ""
    command, *flags = plan.command.split()
    words = ["ipucnn", command, quoted(plan.model), *flags]
    for name, value in plan.run_options().items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
            continue
        values = (
            value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        )
        words += [f"--{name}", *(quoted(f"{v:g}" if isinstance(v, float) else v) for v in values)]
    return " ".join(words)


def how_to_run(plan: PipelinePlan) -> str:
    """Returns the line above the command: its purpose, and the alternative."""
    what = "train with it" if plan.settings.training else "measure it"
    return f"to {what} (or --save plan.yml, and ipucnn {plan.command} --plan plan.yml):"


def needs_weights(plan: PipelinePlan) -> str:
    """Returns a sentence about the missing weights of a command; "" if it is complete.  A plan stores no weights."""
    if "freeze" not in plan.options:
        return ""
    return "add --weights RUN, the run in which the frozen layers were trained, or --weights imagenet"
