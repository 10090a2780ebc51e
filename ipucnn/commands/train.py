"""``ipucnn train``: train a network."""

from dataclasses import dataclass

from ipucnn.commands.run_arguments import read_training_plan
from ipucnn.config.command import request_of
from ipucnn.config.shared_options import NetworkOptions


@dataclass(frozen=True)
class Train(NetworkOptions):
    """The options of ``ipucnn train``, besides those of runs."""


def train(options: Train) -> None:
    """Train a network: on IPUs, or with their semantics on a CPU or GPU.

    Options not given come from the preset of the model and data set. The run folder holds the resolved
    configuration, metrics, checkpoints and report.
    """
    resolved = request_of(options, "train", read_training_plan).resolve()
    if options.print_config:
        from ipucnn.reports.configuration import print_config
        from ipucnn.runs.resume import continued

        print_config(continued(resolved), options.json)
        return
    from ipucnn.events import OPENING, Events, during, show
    from ipucnn.reports.console import Screen
    from ipucnn.reports.runs import write_page_of
    from ipucnn.reports.train import (
        RunLines,
        print_result,
        print_result_of_folds,
        show_dry_run,
        show_training,
    )
    from ipucnn.runs.kfold import CrossValidation
    from ipucnn.runs.resume import is_cross_validation
    from ipucnn.runs.train import TrainingRun

    def train_run(run: TrainingRun, lines: RunLines) -> Events[None]:
        yield from lines.introduction()
        yield from run.events()

    if is_cross_validation(resolved):
        validation = show(during(OPENING, lambda: CrossValidation(resolved, options.verbose)), Screen())
        if resolved.config.dry_run:
            show_dry_run(validation.first, options.json, validation.folds)
            return
        show_training(validation.events(), RunLines())
        print_result_of_folds(validation, options.json)
        return
    run = show(during(OPENING, lambda: TrainingRun(resolved, options.verbose)), Screen())
    if resolved.config.dry_run:
        show_dry_run(run, options.json)
        return
    lines = RunLines(run)
    show_training(train_run(run, lines), lines)
    print_result(run, options.json)
    write_page_of(run)
