"""Output of ``ipucnn train --dry-run``: the plan of the run, its learning rates, and its first samples."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, List, Sequence, Tuple

import numpy as np

from ipucnn.aliases import PlainDict
from ipucnn.datasets.images import changes_of_training
from ipucnn.datasets.segmentation.patches import IGNORED
from ipucnn.reports.console import console, fact_table, note
from ipucnn.reports.figures import label, new_figure
from ipucnn.reports.sheets import ContactSheet, PanelSheet, Sheet
from ipucnn.runs.images.outputs import IGNORED_COLOUR, class_colours, mask_picture, overlay
from ipucnn.runs.setup import TrainingSample, training_samples
from ipucnn.text import counted, printable
from ipucnn.training.program import BatchLayout, Layers, PipelineLayout, Program
from ipucnn.training.schedules import Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ipucnn.runs.context import RunContext

# The largest number of points of a curve, more than a picture has columns.
_POINTS = 20_000
_SAMPLES = 12
"""Number of training samples that are drawn."""
# Up to this number of points, each point has a marker.
_SEPARATE = 60


def batch_text(program: BatchLayout) -> str:
    """Describes the global batch: ``64 = micro-batch 8 x 4 accumulated x 2 replicas``."""
    return (
        f"{program.global_batch_size:,} = micro-batch {program.micro_batch_size:,} x "
        f"{program.gradient_accumulation_count:,} accumulated x {counted(program.num_replicas, 'replica')}"
    )


def stages_text(program: PipelineLayout, splits: Sequence[str]) -> str:
    """Describes the pipeline; without splits, the planner chooses them."""
    opened = ", ".join(splits) or "layers that the planner chooses"
    return f"{counted(program.num_stages, 'stage')} ({program.pipeline_schedule}) opened by {opened}"


def print_plan_of_run(report: PlainDict, as_json: bool) -> None:
    """Prints what a run would do, on stdout.

    Args:
        report: the result of ``TrainingRun.plan_of_run``.
        as_json: whether to print JSON.
    """
    if as_json:
        print(json.dumps(report, indent=2))
        return
    values = report["program"]
    facts = _rows(report, Program.from_dict(values), Layers.from_dict(values))
    rows = [(name, printable(value)) for name, value in facts]
    console(sys.stdout).print(fact_table(rows))
    note("nothing was trained or written: --dry-run")


def _rows(report: PlainDict, p: Program, layers: Layers) -> List[Tuple[str, str]]:
    data, rates = report["dataset"], report["learning_rate"]
    size = "x".join(map(str, report["input_shape"]))
    execution = counted(p.weight_updates_per_execution, "weight update")
    rows = [
        ("network", f"{report['model']}, input {size}, {counted(data['classes'], 'class')}"),
        ("data set", f"{data['name']}: {data['train']:,} train, {data['evaluation']:,} evaluation"),
        ("device", report["device"]),
        ("run folder", report["run_dir"]),
        ("global batch", batch_text(p)),
        ("weight updates", f"{p.weight_updates_per_epoch:,} per epoch x {counted(p.num_epochs, 'epoch')}"),
        ("executions", f"{p.num_executions:,}, each of {execution}"),
        ("logs", f"after every {_times(p.executions_per_log)}"),
        ("validation", _events(p.executions_per_validation, p.num_executions)),
        ("checkpoints", _events(p.executions_per_checkpoint, p.num_executions)),
    ]
    if p.first_checkpoint_execution > 1 and 0 < p.executions_per_checkpoint < p.num_executions:
        rows[-1] = ("checkpoints", f"{rows[-1][1]}, from execution {p.first_checkpoint_execution:,} on")
    if p.executions_per_validation:
        batch, replicas = p.validation_micro_batch_size, counted(p.validation_num_replicas, "replica")
        samples = f"{batch * p.validation_num_replicas:,} = micro-batch {batch:,} x {replicas}"
        rows.append(("validation batch", samples))
    if report["folds"]:
        numbers = ", ".join(map(str, report["folds"]))
        rows.insert(2, ("folds", f"{numbers}; shown is fold {report['folds'][0]}"))
    if report["finished"]:
        rows.insert(4, ("starts", "not at all: the run is finished"))
    elif report["continues_after"]:
        start = f"after weight update {report['continues_after']:,} of {p.num_weight_updates:,}"
        rows.insert(4, ("starts", start))
    if p.num_stages > 1:
        chooser = "" if layers.splits_from in ("", "given") else f" ({layers.splits_from})"
        rows.append(("pipeline", stages_text(p, layers.pipeline_splits) + chooser))
    if p.num_ipus > 1:
        rows.append(("IPUs", f"{p.num_ipus}, {p.ipus_per_replica} for each replica"))
    scale = f", loss scale {p.loss_scaling:g}" if p.loss_scaling else ""
    rounding = "" if p.precision == "32.32" else f", stochastic rounding {report['stochastic_rounding']}"
    first, largest, last = (f"{rates[name]:.6g}" for name in ("first", "largest", "last"))
    values = f"{first} at first, at most {largest}, {last} at last"
    norm = dict(report["norm_layer"])
    name, parameters = norm.pop("name"), ", ".join(f"{key} {value}" for key, value in norm.items())
    rows += [
        ("precision", p.precision + rounding + (", automatic loss scale" if p.auto_loss_scaling else scale)),
        ("norm layer", name + f" ({parameters})" * bool(parameters)),
        ("optimizer", report["optimizer"]),
        ("learning rate", f"{rates['schedule']}: {values}"),
    ]
    return rows


def _times(count: int) -> str:
    return "execution" if count == 1 else f"{counted(count, 'execution')}"


def _events(executions: int, total: int) -> str:
    """Describes how often something happens that also happens at the end of each run.

    Args:
        executions: the number of executions between two events; 0: none happens.
        total: the number of executions of the run.
    """
    if not executions:
        return "none"
    if executions >= total:
        return "at the end"
    return f"after every {_times(executions)}" + (" and at the end" if total % executions else "")


def schedule_curve(schedule: Schedule, num_weight_updates: int) -> Tuple[np.ndarray, np.ndarray]:
    """Returns weight updates (from 0) and their learning rates.

    A long run has evenly spaced points, about 20,000 of them, with the last weight update.
    """
    points = min(num_weight_updates, _POINTS)
    updates = np.unique(np.linspace(0, num_weight_updates - 1, points).round().astype(np.int64))
    return updates, schedule(updates)


def draw_schedule(schedule: Schedule, program: Program, title: str) -> Figure:
    """Draws the learning rate over weight updates, with epochs on the upper axis."""
    updates, rates = schedule_curve(schedule, program.num_weight_updates)
    figure = new_figure(8.0, 4.8)
    axis = figure.subplots()
    few = len(updates) <= _SEPARATE
    axis.plot(updates, rates, color="#0072b2", linewidth=1.8, marker="o" if few else None, markersize=4)
    # A margin at the sides, so that markers are not cut; the y axis starts at 0, so that heights can be compared.
    margin = max(0.5, 0.01 * program.num_weight_updates)
    axis.set_xlim(-margin, program.num_weight_updates - 1 + margin)
    axis.set_ylim(0, 1.06 * float(np.max(rates)) or 1.0)
    axis.set_xlabel(f"weight update (of {program.num_weight_updates:,})")
    axis.set_ylabel("learning rate")
    axis.grid(alpha=0.3)
    per_epoch = float(program.weight_updates_per_epoch)
    above = axis.secondary_xaxis("top", functions=(lambda x: x / per_epoch, lambda x: x * per_epoch))
    above.set_xlabel("epoch")
    axis.set_title(label(title), fontsize=11)
    return figure


def sheet_of_samples(context: RunContext) -> Sheet:
    """Returns a sheet of the first training samples, as the network will see them."""
    from ipucnn.sessions.host.environment import import_tensorflow

    import_tensorflow(verbose=False)
    info, config = context.info, context.config
    samples = training_samples(context, context.program, _SAMPLES)
    changes = changes_of_training(info) if config.augment else ""
    mixed = [f"--{name} {value:g}" for name, value in (
        ("mixup", config.mixup), ("cutmix", config.cutmix), ("random-erasing", config.random_erasing)
    ) if value]  # fmt: skip
    applied = "; ".join([changes or "no augmentation", *mixed])
    heading = (
        f"{context.resolved.record.name} on {info.name}: training samples, {applied}, seed {context.seed}"
    )
    if info.task == "classification":
        contacts = ContactSheet(heading)
        contacts.expect(len(samples))
        for number, sample in enumerate(samples):
            result = {
                "image": printable(sample.name),
                "label": _label(sample, info.class_names),
                "problems": [],
            }
            contacts.take(number, result, sample.image)
        return contacts
    colours = class_colours(info.num_classes, info.class_colours)
    sheet = PanelSheet(("network's input", "mask", "overlay"), columns=3, heading=heading)
    sheet.expect(len(samples))
    for sample in samples:
        mask = np.full(sample.image.shape[:2], IGNORED, np.int16)
        top, left = ((whole - inner) // 2 for whole, inner in zip(mask.shape, sample.label.shape))
        mask[top : top + sample.label.shape[0], left : left + sample.label.shape[1]] = sample.label
        pictures = [sample.image, mask_picture(mask, colours), overlay(sample.image, mask, colours)]
        counts = np.bincount(mask[mask != IGNORED], minlength=info.num_classes)
        shares = [
            f"{count / max(counts.sum(), 1):.1%} {name}" for count, name in zip(counts, info.class_names)
        ]
        sheet.add(", ".join([printable(sample.name), *shares]), pictures)
    shown = colours if info.num_classes > 2 else ((0, 0, 0), (255, 255, 255))
    sheet.legend = (*zip(shown, info.class_names), (IGNORED_COLOUR, "not predicted, or ignored"))
    return sheet


def _label(sample: TrainingSample, names: Sequence[str]) -> str:
    """Returns the class of a sample; of a mixed image, the share of each class."""
    if sample.label.ndim == 0:
        return printable(names[int(sample.label)])
    return ", ".join(
        f"{share:.0%} {printable(names[k])}" for k, share in enumerate(sample.label) if share > 0
    )
