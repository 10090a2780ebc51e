"""Output of ``ipucnn train``: the program, progress, the report at the end, and the folds of a cross-validation."""

from __future__ import annotations

import json
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

from ipucnn.aliases import PlainValue
from ipucnn.config.origin import RUN
from ipucnn.events import LOADING, Began, Event, Events, Note, Progress, show
from ipucnn.filesystem import write_output
from ipucnn.reports import units
from ipucnn.reports.console import (
    NUMBER,
    TEXT,
    TRAINING,
    Screen,
    console,
    fact_table,
    note,
    print_lines,
    text_table,
)
from ipucnn.reports.dry_run import batch_text, draw_schedule, print_plan_of_run, sheet_of_samples, stages_text
from ipucnn.runs.records import (
    Compilation,
    CompiledReport,
    Fold,
    Folds,
    Report,
    ReportedDataset,
    plain,
)
from ipucnn.runs.resume import Finished
from ipucnn.sessions.factory import runs_on_ipus
from ipucnn.sessions.role import find_role
from ipucnn.text import counted, printable, quoted
from ipucnn.training.program import BuiltProgram, Program

if TYPE_CHECKING:
    from ipucnn.runs.images.segmentation import SegmentedImage
    from ipucnn.runs.kfold import CrossValidation
    from ipucnn.runs.train import TrainingRun


def program_line(program: Program, splits: Sequence[str]) -> str:
    """Describes a Program in one line: batch, epochs, executions, pipeline and training options."""
    execution = counted(program.weight_updates_per_execution, "weight update")
    parts = [
        f"global batch {batch_text(program)}",
        f"{counted(program.weight_updates_per_epoch, 'weight update')} per epoch "
        f"x {counted(program.num_epochs, 'epoch')}",
        f"{counted(program.num_executions, 'execution')} of {execution}"
        + (f", a log after every {program.executions_per_log:,}" if program.executions_per_log > 1 else ""),
    ]
    if program.num_stages > 1:
        parts.append(stages_text(program, splits))
    if program.num_ipus > 1:
        parts.append(f"{counted(program.num_ipus, 'IPU')}")
    recipe = (
        (program.clip_gradient_norm, "gradients clipped to a norm of {:g}"),
        (program.ema_decay, "weights averaged with a decay of {:g}"),
        (program.mixup, "mixup {:g}"),
        (program.cutmix, "CutMix {:g}"),
        (program.random_erasing, "random erasing {:g}"),
    )
    parts += [text.format(value) for value, text in recipe if value]
    return "; ".join(parts)


class RunLines:
    """Describes the events of runs in lines and in a bar; those of a cross-validation come in turn.

    Args:
        run: the run; None if :class:`~ipucnn.runs.kfold.FoldStarted` brings it.
    """

    def __init__(self, run: Optional[TrainingRun] = None) -> None:
        self._run = run
        # The line of the last execution; the figures of a validation may be appended to it before it is shown.
        self._execution = ""
        # The lines of the introduction: those of one fold are not repeated for the next.
        self._introduced: Set[str] = set()

    def introduction(self) -> Iterator[Event]:
        """Yields notes, warnings and settings of the run."""
        assert self._run is not None
        for line in introduction(self._run):
            if line not in self._introduced:
                self._introduced.add(line)
                yield Note(line)
        yield Began(LOADING)

    def held(self) -> Iterator[Event]:
        """Yields the line that is held back, if any."""
        line, self._execution = self._execution, ""
        if line:
            yield Note(line)

    def take(self, event: Event) -> Iterator[Event]:
        """Yields what to show of an event of training."""
        from ipucnn.reports.runs import write_page_of
        from ipucnn.runs import kfold, recorder

        if isinstance(event, kfold.FoldStarted):
            self._run = event.run
            held_out = len(event.run.context.source.eval)
            yield Note(f"fold {event.fold} of {event.num_folds}: {held_out} examples held out")
            yield from self.introduction()
            return
        run = self._run
        assert run is not None
        if isinstance(event, kfold.FoldFinished):
            yield from self.held()
            yield Note(fold_line(event.row, int(run.context.config.kfold or 1), run.context.info.class_names))
            write_page_of(run)
        elif isinstance(event, recorder.Predicted):
            yield Note(f"picture of the predictions: {draw_predictions(run, event.images)}")
        elif isinstance(event, recorder.Started):
            yield from _beginning(run, event.program)
        elif isinstance(event, recorder.UpdatesDone):
            speed = f" {units.rate(event.images_per_s)} img/s" if event.images_per_s else ""
            figures = f"loss {event.loss:.3f} acc {event.accuracy:.1%}{speed}"
            yield _progress(run, event.weight_updates, figures)
        elif isinstance(event, recorder.ExecutionFinished):
            yield from self.held()
            # An execution during which IPUs compile has no speed.
            speed = f"{units.rate(event.images_per_s)} images/s" if event.images_per_s else "compiled"
            figures = f"loss {event.metrics['loss']:.4f}  accuracy {event.metrics['accuracy']:.2%}"
            self._execution = f"epoch {_epoch(run, event.weight_updates)}  {figures}  {speed}"
        elif isinstance(event, recorder.Validated):
            m, names = event.metrics, [printable(name) for name in run.context.info.class_names]
            text = f"validation loss {m['loss']:.4f}  accuracy {m['accuracy']:.2%}"
            text += "".join(f"  {title} {value:.4f}" for title, value in _dice_scores(m, names))
            self._execution = f"{self._execution}  {text}" if self._execution else text
            yield from self.held()


def show_training(work: Events[None], lines: RunLines) -> None:
    """Shows runs on stderr to their end, and at an error the line that was held back."""
    screen = Screen(TRAINING, lines.take)
    try:
        show(work, screen)
    finally:
        for event in lines.held():
            screen.show(event)


def introduction(run: TrainingRun) -> List[str]:
    """Returns notes, warnings and settings of a run, one line each."""
    context = run.context
    resolved, start = context.resolved, context.start
    if isinstance(start, Finished):
        lines = [f"{context.folder.path} is finished: nothing to continue"]
    else:
        lines = list(start.notes)
    lines += resolved.notes(runs_on_ipus(resolved.config.device))
    lines += [f"warning: {line}" for line in context.warnings]
    preset = f"preset {resolved.preset}" if resolved.preset else "no preset"
    if start.target.is_own:
        preset = "the run's configuration"
    elif resolved.origins["model_name"] == RUN:
        preset = "the cross-validation's configuration"
    size = "x".join(map(str, context.input_shape))
    network = f"{context.record.name} ({preset}), input {size}, seed {context.seed}"
    if context.config.base_filters is not None:
        full = "x".join(map(str, context.record.input_shape))
        published = context.record.builder_args.get("base_filters")
        network += f", {context.config.base_filters} base filters (as published: {full}, {published})"
    lines.append(f"{network}; {program_line(context.program, context.config.named_splits)}")
    return lines


def _beginning(run: TrainingRun, program: BuiltProgram) -> Iterator[Event]:
    """Yields what is known of a run when its network is compiled, and its bar."""
    context, frozen = run.context, program.frozen_layers
    if frozen:
        named = ", ".join(frozen if len(frozen) <= 4 else (*frozen[:3], "...", frozen[-1]))
        yield Note(f"{counted(len(frozen), 'layer')} frozen: {named}")
    if program.splits_from not in ("", "given"):
        yield Note(f"stages opened by {', '.join(program.pipeline_splits)} ({program.splits_from})")
    yield Note(f"run folder {context.folder.path}; compiling")
    yield _progress(run, 0, "compiling")


def _progress(run: TrainingRun, weight_updates: int, figures: str) -> Progress:
    total = run.context.program.num_weight_updates
    return Progress(f"epoch {_epoch(run, weight_updates)}", weight_updates, total, figures)


def _epoch(run: TrainingRun, weight_updates: int) -> str:
    program = run.context.program
    return f"{weight_updates / program.weight_updates_per_epoch:.1f}/{program.num_epochs}"


def print_result(run: TrainingRun, as_json: bool) -> None:
    """Prints the report at the end of a run on stdout."""
    report = run.final_report
    folder, neighbours = run.context.folder, run.neighbours_accuracy
    assert report is not None
    if as_json:
        extra = (
            {"run_dir": str(folder.path), "knn_accuracy": neighbours} if isinstance(report, Report) else {}
        )
        print(json.dumps({**plain(report), **extra}, indent=2))
    elif isinstance(report, CompiledReport):
        print_compiled(report)
    else:
        print_report(report, str(folder.path), neighbours, folder.size_bytes, run.context.own_files)


def draw_predictions(run: TrainingRun, images: List[SegmentedImage]) -> Path:
    """Draws the predictions of a segmentation network into the run folder; returns the file."""
    from ipucnn.reports.sheets import save_predictions
    from ipucnn.runs.folder import PREDICTIONS

    heading = _heading(run)
    return run.context.folder.write_file(PREDICTIONS, lambda path: save_predictions(images, path, heading))


def _heading(run: TrainingRun) -> str:
    """Returns the title of a picture: the Dice scores over all held-out images, and the run folder."""
    report, names = run.final_report, run.context.info.class_names
    assert isinstance(report, Report)
    validation = report.validation or {}
    parts = [f"{title} {value:.4f}" for title, value in _dice_scores(validation, names)]
    if parts:
        images = counted(int(validation["samples"] or 0), "held-out image")
        parts[-1] += f" over {images}{_region(report.dataset)}"
    return ", ".join([*parts, str(run.context.folder.path)])


def show_dry_run(run: TrainingRun, as_json: bool, folds: Sequence[int] = ()) -> None:
    """Prints what a run would do, and draws the pictures of ``--plot-schedule`` and ``--draw-samples``.

    Args:
        run: the prepared run.
        as_json: whether to print JSON.
        folds: the folds to train, of which the run is the first; empty without cross-validation.

    Raises:
        DataError: the picture cannot be written.
    """
    from ipucnn.reports.figures import check_can_plot, save_figure
    from ipucnn.runs.images.outputs import PLOTS, format_of

    # Before the introduction, which then names the layers that the planner chose.
    report = {**run.plan_of_run(), "folds": list(folds)}
    for line in introduction(run):
        note(line)
    for line in report["notes"]:
        note(f"note: {line}")
    for line in report["warnings"][len(run.context.warnings) :]:
        note(f"warning: {line}")
    config = run.context.config
    role = find_role()
    path = role.path(config.plot_schedule)
    if path is not None:
        check_can_plot("--plot-schedule")
        warmup = config.lr_warmup_params
        ramp = f", warm-up {warmup['warmup_mode']} of {warmup['warmup_epochs']:g} epochs" if warmup else ""
        stairs = ", constant within an epoch" if config.lr_staircase else ""
        title = f"{run.context.resolved.record.name}: {config.lr_schedule} learning rate{ramp}{stairs}"
        figure = draw_schedule(run.context.schedule, run.context.program, title)
        write_output(path, partial(save_figure, figure, suffix=format_of(path, PLOTS)))
        note(f"picture of the learning rate: {path}")
    path = role.path(config.draw_samples)
    if path is not None:
        sheet = sheet_of_samples(run.context)
        write_output(path, sheet.save)
        note(f"picture of {counted(len(sheet), 'training sample')}: {path}")
    print_plan_of_run(report, as_json)


def print_result_of_folds(validation: CrossValidation, as_json: bool) -> None:
    """Prints the report of a cross-validation on stdout."""
    report, root, context = validation.report(), str(validation.root), validation.first.context
    if as_json:
        print(json.dumps({**plain(report), "run_dir": root}, indent=2))
    else:
        print_folds(report, root, context.info.class_names, context.own_files)


def report_rows(
    report: Report, folder: str, neighbours: Optional[float], size_bytes: Optional[int] = None
) -> List[Tuple[str, str]]:
    """Returns the end report as (name, value) rows."""
    data, compiled = report.dataset, report.compilation
    continued = report.measured.first_weight_update
    sizes = f"{data.train:,} train, {data.evaluation:,} evaluation"
    if data.left_out:
        sizes += f", {counted(len(data.left_out), 'damaged entry')} left out"
    rows = [("data set", f"{data.name}, {data.location}: {sizes}"), *_validation_rows(report)]
    if neighbours is not None:
        rows.append(("3-nearest-neighbours", f"{neighbours:.2%} on the same split, for comparison"))
    rows += _speed_rows(report)
    if continued:
        since = "throughput and times are those of the part since then"
        rows.append(("continued", f"after weight update {continued:,}; {since}"))
    fused = compiled.fused_micro_batches
    model = (
        f"{units.count(compiled.num_parameters)} parameters",
        f"{units.count(compiled.macs_per_sample)} MACs per sample",
        "no micro-batches fused" if fused == 1 else f"{fused:,} micro-batches fused",
    )
    size = "" if size_bytes is None else f" ({units.size(size_bytes)})"
    return [*rows, ("model", ", ".join(model)), ("saved in", folder + size)]


def _validation_rows(report: Report) -> List[Tuple[str, str]]:
    """Returns the rows of the last validation: figures, averaged weights, early end and target."""
    rows: List[Tuple[str, str]] = []
    validation, best, data, target = report.validation, report.best_validation, report.dataset, report.target
    if validation:
        line = (
            f"{validation['accuracy']:.2%} of {counted(int(validation['samples'] or 0), 'held-out sample')}"
        )
        line += _region(data)
        if best and (best["accuracy"] or 0) > (validation["accuracy"] or 0):
            line += f" (best {best['accuracy']:.2%})"
        rows.append(("pixel accuracy" if "dice" in validation else "accuracy", line))
        rows += _dice_rows(validation, data.class_names)
        rows.append(("validation loss", f"{validation['loss']:.4f}"))
    if report.averaged_weights:
        rows.append(("weights", "averaged over training, in the figures above and in the checkpoints"))
    if report.ended_early:
        rows.append(("ended early", report.ended_early))
    if target and not target.reached:
        rows.append(("target", f"{target.accuracy:g} was not reached"))
    elif target and target.time_to_train_s is not None:
        how = "from the end of compiling to the validation that reached the target"
        rows.append(("time to train", f"{units.duration(target.time_to_train_s)} {how}"))
    return rows


def _speed_rows(report: Report) -> List[Tuple[str, str]]:
    """Returns the rows with throughput, memory and times of the process."""
    measured, compiled = report.measured, report.compilation
    rows: List[Tuple[str, str]] = []
    if measured.images_per_s and measured.flop_per_s:
        speed, kind = units.rate(measured.images_per_s), compiled.device.kind.upper()
        rows.append(("throughput", f"{speed} images/s steady, measured on {kind}"))
        sharing = measured.sharing
        if sharing:
            share = sharing.collective_s / max(measured.train_s, 1e-9)
            adding = f"{share:.0%} of the time for adding gradients up ({sharing.reduction})"
            size = f"{units.size(sharing.received_bytes)} for each worker and weight update"
            rows.append(("workers", f"{sharing.workers}; {adding}, {size}"))
        total = measured.samples / max(measured.train_s + compiled.compile_s, 1e-9)
        rows.append(("with compilation", f"{units.rate(total)} images/s"))
        if measured.peak_memory_bytes:
            size = units.size(measured.peak_memory_bytes)
            rows.append(("peak memory", f"{size} of this process, libraries included"))
        rows.append(("arithmetic", f"{units.count(measured.flop_per_s)}FLOP/s (2 x MACs x 3 passes)"))
    return [*rows, ("compile time", _compile_time(compiled)), ("time", units.duration(measured.wall_s))]


def _region(data: ReportedDataset) -> str:
    """Names the region of the images that was validated; empty if that is all pixels."""
    if not data.validated_pixels:
        return ""
    inner, whole = ("x".join(map(str, data.validated_pixels[key])) for key in ("inner", "of"))
    return f", their inner {inner} of {whole} pixels"


def _dice_scores(validation: Mapping[str, PlainValue], names: Sequence[str]) -> List[Tuple[str, float]]:
    """Returns (title, value) of the Dice scores, for example ``Dice of cell``.

    With more than two classes ``mean Dice`` is first.  The list is empty for a network that classifies.
    """
    titles = _dice_titles(names).items()
    return [(title, validation[key]) for key, title in titles if key in validation]


def _dice_rows(validation: Mapping[str, PlainValue], names: Sequence[str]) -> List[Tuple[str, str]]:
    """Returns the rows with Dice and IoU; with two classes, also the score of calling every pixel class 1."""
    if "dice" not in validation:
        return []
    scores = _dice_scores(validation, names)
    if "dice_background" not in validation:
        background = names[0] if names else "class 0"
        headline = f"{validation['dice']:.4f}, {validation['iou']:.4f} of all classes but {background}"
        rows = [("mean Dice, IoU", headline)]
        for key, title in list(_dice_titles(names).items())[1:]:
            value = validation.get(key)
            rows.append((title, "- (in no mask, and not predicted)" if value is None else f"{value:.4f}"))
        return rows
    foreground = names[1] if len(names) == 2 else "foreground"
    trivial = validation["dice_all_foreground"]
    beside = (f" (calling every pixel {foreground} scores {trivial:.4f})", " (the same scores 0)")
    if not trivial:
        beside = (f" (no pixel of the masks is {foreground})", "")
    return [
        *((title, f"{value:.4f}{text}") for (title, value), text in zip(scores, beside)),
        (f"IoU of {foreground}", f"{validation['iou']:.4f}"),
    ]


def print_report(
    report: Report,
    folder: str,
    neighbours: Optional[float],
    size_bytes: Optional[int] = None,
    files: Sequence[str] = (),
) -> None:
    """Prints the end report on stdout, and the commands that evaluate the result and show its curves.

    Args:
        report: the content of ``report.json``.
        folder: the run folder.
        neighbours: accuracy of the three nearest neighbours on the same data; None if it is not known.
        size_bytes: the size of the run on disk.
        files: words that name the user's own files to `ipucnn evaluate`.
    """
    from ipucnn.runs.folder import TENSORBOARD

    out = console(sys.stdout)
    rows = [(name, printable(value)) for name, value in report_rows(report, folder, neighbours, size_bytes)]
    out.print(fact_table(rows, title=f"{report.model} on {report.dataset.name}"))
    lines = [f"see its curves: tensorboard --logdir {quoted(Path(folder, TENSORBOARD))}"]
    if find_spec("tensorboard") is None:
        lines.append("  (after: pip install tensorboard)")
    if report.checkpoints and not report.checkpoints_deleted:
        lines.insert(0, f"evaluate it: ipucnn evaluate {' '.join(map(quoted, [Path(folder), *files]))}")
    print_lines(out, *lines)


def print_compiled(report: CompiledReport) -> None:
    """Prints the result of ``--compile-only`` on stdout."""
    compiled = report.compilation
    print_lines(
        console(sys.stdout),
        f"compiled {report.model} for {compiled.device.name} in {units.duration(compiled.compile_s)}"
        + (": all programs were there already" if compiled.cached else ""),
        f"programs in {report.executable_cache}",
        "train with them: the same command without --compile-only",
    )


def _compile_time(compiled: Compilation) -> str:
    """Describes the compile time.

    On the host it names the size of the traced graph.  On IPUs it is the time of the first execution, and the text says
    if a cache made compiling unnecessary.
    """
    if compiled.device.kind != "ipu":
        size = f"{compiled.num_graph_operations:,} graph operations, {counted(compiled.num_layers, 'layer')}"
    else:
        size = "the first execution" + ("; its program was compiled before" if compiled.cached else "")
    return f"{units.duration(compiled.compile_s)} ({size})"


def _dice_titles(class_names: Sequence[str]) -> Dict[str, str]:
    """Returns key -> title of a validation's Dice scores, the headline first: the mean, or class 1 of two."""
    if len(class_names) > 2:
        each = {f"dice_class_{k}": f"Dice of {name}" for k, name in enumerate(class_names)}
        return {"dice": "mean Dice", **each}
    background, foreground = class_names if len(class_names) == 2 else ("background", "foreground")
    return {"dice": f"Dice of {foreground}", "dice_background": f"Dice of {background}"}


def _metrics(class_names: Sequence[str]) -> List[Tuple[str, str, str]]:
    """Returns (key, title, format) of the metrics of a validation that are shown."""
    return [
        ("loss", "loss", "{:.4f}"),
        ("accuracy", "accuracy", "{:.2%}"),
        ("top5", "top 5", "{:.2%}"),
        *((key, title, "{:.4f}") for key, title in _dice_titles(class_names).items()),
        ("iou", "mean IoU" if len(class_names) > 2 else "IoU", "{:.4f}"),
    ]


def fold_line(row: Fold, num_folds: int, class_names: Sequence[str]) -> str:
    """Describes one finished fold in a line, for stderr."""
    figures = ", ".join(
        f"{title} {text.format(row.validation[key])}"
        for key, title, text in _metrics(class_names)
        if row.validation and key in row.validation
    )
    end = f"; ended early: {row.ended_early}" if row.ended_early else ""
    return f"fold {row.fold} of {num_folds}: {figures or 'not validated'}{end}"


def print_folds(report: Folds, folder: str, class_names: Sequence[str], own_files: Sequence[str]) -> None:
    """Prints the folds as a table on stdout.

    Args:
        report: the content of ``folds.json``.
        folder: the folder of the cross-validation.
        class_names: the names of the classes, one per class.
        own_files: words that name the user's own files to `ipucnn evaluate`.
    """
    columns = [column for column in _metrics(class_names) if column[0] in report.mean]
    figures = {printable(title): NUMBER for _, title, _ in columns}
    rows = []
    for row in report.folds:
        known = row.validation or {}
        cells = [text.format(known[key]) if key in known else "-" for key, _, text in columns]
        held_out = held_out_text(row.held_out)
        rows.append([str(row.fold), held_out, *cells, units.duration(row.train_s)])
    if len(report.folds) > 1 and columns:
        for name, figures_of in (("mean", report.mean), ("std", report.std)):
            values = [(figures_of[key], text) for key, _, text in columns]
            cells = ["-" if value is None else text.format(value) for value, text in values]
            rows.append([name, "", *cells, ""])
    title = f"{report.model} on {report.dataset}, {counted(report.kfold, 'fold')}, measured"
    headings = {"fold": TEXT, "held out": TEXT, **figures, "time": NUMBER}
    out = console(sys.stdout)
    out.print(text_table(headings, rows, title=printable(title)))
    lines = []
    validations = [row.validation for row in report.folds if row.validation]
    trivial = [
        value for value in (each.get("dice_all_foreground") for each in validations) if value is not None
    ]
    if trivial and len(trivial) == len(validations):
        mean = sum(trivial) / len(trivial)
        lines.append(f"calling every pixel {class_names[-1]} scores a Dice of {mean:.4f}")
    early = [str(row.fold) for row in report.folds if row.ended_early]
    if early:
        lines.append(
            f"ended early: fold {', '.join(early)}, by validations on the examples held out: figures may be too good"
        )
    if report.missing:
        lines.append(f"not trained: fold {', '.join(map(str, report.missing))}")
    example = report.folds[0].run if report.folds else "fold-1"
    command = f"ipucnn evaluate {' '.join(map(quoted, [Path(folder, example), *own_files]))}"
    print_lines(out, *lines, f"saved in {folder}; evaluate one: {command}")


def held_out_text(numbers: List[int]) -> str:
    """Formats the numbers of held-out examples: ``24-29`` if they are consecutive, else their count."""
    if numbers and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
    return f"{len(numbers)} examples"
