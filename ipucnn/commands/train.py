"""``ipucnn train``: train a network."""

import json
from typing import TYPE_CHECKING, Any, Dict, Optional

from ipucnn.config.resolve import RUN_ORIGIN, Resolved
from ipucnn.config.signature import with_run_options

if TYPE_CHECKING:
    from ipucnn.reports.train import TrainProgress
    from ipucnn.runs.recorder import RunEvent
    from ipucnn.runs.train import TrainingRun


def _settle(resolved: Resolved) -> Resolved:
    from ipucnn.runs.checkpoints import find_start
    from ipucnn.runs.kfold import is_cross_validation

    if is_cross_validation(resolved):
        return resolved  # each fold has a run of its own
    return find_start(resolved).resolved if resolved.config.resume else resolved


@with_run_options("train", settle=_settle)
def train(resolved: Resolved, verbose: bool, json_output: bool) -> None:
    """Train a network: on IPUs, or with their semantics on a CPU or GPU.

    Options not given come from the preset of the model and data set. The run folder holds the resolved
    configuration, metrics, checkpoints and report.
    """
    from ipucnn.runs import kfold
    from ipucnn.runs.checks import refuse_instances

    if kfold.is_cross_validation(resolved):
        refuse_instances("train --kfold")
        _cross_validate(resolved, verbose, json_output)
        return
    from ipucnn.reports.train import print_report
    from ipucnn.runs.train import TrainingRun

    run = TrainingRun(resolved, verbose)
    if not run.instances.is_writer:
        # Another instance of poprun says and writes what there is; this one computes along.
        for _ in run.events():
            pass
        return
    _introduce(run)
    display = _Display(run)
    try:
        for event in run.events():
            display.show(event)
    finally:
        display.close()
    _draw(run)
    report = run.final_report
    if report.get("compiled_only"):
        _show_compiled(report, json_output)
        return
    baseline = _baseline(run)
    if json_output:
        print(json.dumps({**report, "run_dir": str(run.folder.path), "knn_accuracy": baseline}, indent=2))
    else:
        print_report(report, str(run.folder.path), baseline)


def _cross_validate(resolved: Resolved, verbose: bool, json_output: bool) -> None:
    from ipucnn.reports.console import note
    from ipucnn.reports.train import fold_line, print_folds
    from ipucnn.runs import kfold

    validation = kfold.CrossValidation(resolved, verbose, note)
    display: Optional[_Display] = None
    try:
        for event in validation.events():
            if isinstance(event, kfold.FoldStarted):
                held_out = len(event.run.setup.source.eval)
                note(f"fold {event.fold} of {event.num_folds}: {held_out} examples held out")
                _introduce(event.run)
                display = _Display(event.run)
            elif isinstance(event, kfold.FoldFinished):
                assert display is not None
                display.close()
                _draw(display.run)
                note(fold_line(event.row, validation.num_folds, display.run.info.class_names))
                display = None
            elif display is not None:
                display.show(event)
    finally:
        if display is not None:
            display.close()
    report = validation.report()
    if json_output:
        print(json.dumps({**report, "run_dir": str(validation.root)}, indent=2))
    else:
        print_folds(report, str(validation.root), validation.first.info.class_names)


def _introduce(run: "TrainingRun") -> None:
    """What is going to run, on stderr."""
    from ipucnn.reports.console import note
    from ipucnn.reports.train import program_line

    resolved = run.resolved
    for line in run.start.notes:
        note(line)
    if run.start.report is not None:
        note(f"{run.folder.path} is finished: nothing to continue")
    note(resolved.choice.message)
    public = resolved.public_note()
    if public:
        note(public)
    from ipucnn.sessions.factory import device_warnings, runs_on_ipus

    effect = None if runs_on_ipus(resolved.config.device) else resolved.host_note()
    if effect:
        note(effect)
    for warning in [*device_warnings(resolved.config.device), *run.warnings]:
        note(f"warning: {warning}")
    preset = f"preset {resolved.preset}" if resolved.preset else "no preset"
    if run.start.in_place:
        preset = "the run's configuration"
    elif resolved.origins["model_name"] == RUN_ORIGIN:
        preset = "the cross-validation's configuration"
    size = "x".join(map(str, run.setup.input_shape))
    network = f"{resolved.record.name} ({preset}), input {size}, seed {run.seed}"
    if resolved.config.base_filters is not None:
        full = "x".join(map(str, resolved.record.input_shape))
        published = resolved.record.builder_args.get("base_filters")
        network += f", {resolved.config.base_filters} base filters (as published: {full}, {published})"
    note(f"{network}; {program_line(run.program)}")


def _show_compiled(report: Dict[str, Any], json_output: bool) -> None:
    from ipucnn.reports.train import print_compiled

    if json_output:
        print(json.dumps(report, indent=2))
    else:
        print_compiled(report)


def _draw(run: "TrainingRun") -> None:
    """The picture of what a segmentation network predicts, into the run folder."""
    if run.pictures:
        from ipucnn.reports.console import note
        from ipucnn.reports.sheets import save_predictions
        from ipucnn.runs.folder import PREDICTIONS

        path = run.folder.path / PREDICTIONS
        save_predictions(run.pictures, run.info.class_names, path)
        note(f"picture of the predictions: {path}")


class _Display:
    """Shows a run's events: notes, then progress from when its training begins."""

    def __init__(self, run: "TrainingRun") -> None:
        self.run = run
        self._progress: Optional[TrainProgress] = None

    def close(self) -> None:
        """Ends the progress, whose last line may still wait to be printed."""
        if self._progress is not None:
            self._progress.flush()
            self._progress.__exit__()
            self._progress = None

    def show(self, event: "RunEvent") -> None:
        from ipucnn.reports.console import note
        from ipucnn.reports.train import TrainProgress
        from ipucnn.runs import recorder

        run = self.run
        if isinstance(event, recorder.Notes):
            for line in event.lines:
                note(line)
        elif isinstance(event, recorder.CompilingAhead):
            note("compiling; nothing is trained")
        elif isinstance(event, recorder.Started):
            if run.fresh_weights:
                weights = run.resolved.config.weights
                note(f"starting from {weights}, with a new head for {run.info.num_classes} classes")
            if event.program.splits_from not in ("", "given"):
                opened = ", ".join(event.program.pipeline_splits)
                note(f"stages opened by {opened} ({event.program.splits_from})")
            note(f"run folder {event.folder}; compiling")
            self._progress = TrainProgress(event.program)
            self._progress.__enter__()
        elif self._progress is None:
            return
        elif isinstance(event, recorder.Progress):
            self._progress.progress(event)
        elif isinstance(event, recorder.ExecutionFinished):
            self._progress.execution(event)
        elif isinstance(event, recorder.Validated):
            self._progress.validation(event)


def _baseline(run: "TrainingRun") -> Optional[float]:
    """3-nearest-neighbours on the same split, where that takes no time: the yardstick of the embedded digits."""
    validation: Optional[Dict[str, float]] = run.final_report.get("validation")
    if run.info.name != "digits" or validation is None:
        return None
    from ipucnn.datasets.base import knn_accuracy

    return float(knn_accuracy(run.setup.source))
