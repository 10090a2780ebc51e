"""``ipucnn train``: train a network."""

import json
from typing import Any, Dict, Optional

from ipucnn.config.resolve import Resolved
from ipucnn.config.signature import with_run_options


def _settle(resolved: Resolved) -> Resolved:
    from ipucnn.runs.resume import find_start

    return find_start(resolved).resolved if resolved.config.resume else resolved


@with_run_options("train", settle=_settle)
def train(resolved: Resolved, verbose: bool, json_output: bool) -> None:
    """Train a network: on IPUs, or with their semantics on a CPU or GPU.

    Options not given come from the preset of the model and data set. The run folder holds the resolved
    configuration, metrics, checkpoints and report.
    """
    from ipucnn.reports.console import note
    from ipucnn.reports.train import TrainProgress, print_report, program_line
    from ipucnn.runs import events
    from ipucnn.runs import train as runs

    run = runs.TrainingRun(resolved, verbose)
    resolved = run.resolved
    for line in run.start.notes:
        note(line)
    if run.start.report is not None:
        note(f"{run.folder.path} is finished: nothing to continue")
    note(resolved.choice.message)
    from ipucnn.sessions.factory import runs_on_ipus

    effect = None if runs_on_ipus(resolved.config.device) else resolved.host_note()
    if effect:
        note(effect)
    for warning in run.warnings:
        note(f"warning: {warning}")
    preset = f"preset {resolved.preset}" if resolved.preset else "no preset"
    if run.start.in_place:
        preset = "the run's configuration"
    size = "x".join(map(str, run.setup.input_shape))
    network = f"{resolved.record.name} ({preset}), input {size}, seed {run.seed}"
    if resolved.config.base_filters is not None:
        full = "x".join(map(str, resolved.record.input_shape))
        published = resolved.record.builder_args.get("base_filters")
        network += f", {resolved.config.base_filters} base filters (as published: {full}, {published})"
    note(f"{network}; {program_line(run.program)}")
    progress: Optional[TrainProgress] = None
    try:
        for event in run.events():
            if isinstance(event, events.Notes):
                for line in event.lines:
                    note(line)
            elif isinstance(event, events.Started):
                if run.fresh_weights:
                    note(
                        f"starting from {resolved.config.weights}, with a new head for {run.info.num_classes} classes"
                    )
                if event.program.splits_from not in ("", "given"):
                    note(
                        f"stages opened by {', '.join(event.program.pipeline_splits)} ({event.program.splits_from})"
                    )
                note(f"run folder {event.folder}; compiling")
                progress = TrainProgress(event.program)
                progress.__enter__()
            elif progress is not None:
                _show(progress, event)
    finally:
        if progress is not None:
            progress.flush()
            progress.__exit__()
    report = run.final_report
    baseline = _baseline(run)
    if json_output:
        print(json.dumps({**report, "run_dir": str(run.folder.path), "knn_accuracy": baseline}, indent=2))
    else:
        print_report(report, str(run.folder.path), baseline)


def _show(progress: Any, event: Any) -> None:
    from ipucnn.runs import events

    if isinstance(event, events.Progress):
        progress.progress(event)
    elif isinstance(event, events.ExecutionFinished):
        progress.execution(event)
    elif isinstance(event, events.Validated):
        progress.validation(event)


def _baseline(run: Any) -> Optional[float]:
    """3-nearest-neighbours on the same split, where that takes no time: the yardstick of the embedded digits."""
    validation: Optional[Dict[str, float]] = run.final_report.get("validation")
    if run.info.name != "digits" or validation is None:
        return None
    from ipucnn.datasets.baseline import knn_accuracy

    return float(knn_accuracy(run.setup.source))
