"""``ipucnn train``: train a network."""

from dataclasses import dataclass

from ipucnn.commands.run_arguments import read_training_plan
from ipucnn.config.command import NetworkOptions


@dataclass(frozen=True)
class Train(NetworkOptions):
    """The options of ``ipucnn train``, besides those of runs."""


def train(options: Train) -> None:
    """Train a network: on IPUs, or with their semantics on a CPU or GPU.

    Options not given come from the preset of the model and data set. The run folder holds the resolved
    configuration, metrics, checkpoints and report.
    """
    resolved = options.request("train", read_training_plan).resolve()
    if options.print_config:
        from ipucnn.reports.configuration import print_config
        from ipucnn.runs.resume import continued

        print_config(continued(resolved), options.json)
        return
    from ipucnn.events import OPENING, during, show
    from ipucnn.reports.console import Screen
    from ipucnn.reports.runs import write_page_of
    from ipucnn.reports.train import RunDisplay, print_result, print_result_of_folds, show_dry_run
    from ipucnn.runs.resume import is_cross_validation

    if is_cross_validation(resolved):
        from ipucnn.runs.kfold import CrossValidation, FoldFinished, FoldStarted

        validation = CrossValidation(resolved, options.verbose)
        if resolved.config.dry_run:
            show_dry_run(validation.first, options.json, validation.folds)
            return
        with RunDisplay() as display:
            for event in validation.events():
                display.show(event)
                if isinstance(event, FoldStarted):
                    run = event.run
                elif isinstance(event, FoldFinished):
                    write_page_of(run)
        print_result_of_folds(validation, options.json)
        return
    from ipucnn.runs.train import TrainingRun

    run = show(during(OPENING, lambda: TrainingRun(resolved, options.verbose)), Screen())
    if resolved.config.dry_run:
        show_dry_run(run, options.json)
        return
    with RunDisplay(run) as display:
        for event in run.events():
            display.show(event)
    print_result(run, options.json)
    write_page_of(run)
