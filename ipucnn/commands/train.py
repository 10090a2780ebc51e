"""``ipucnn train``: train a network."""

from ipucnn.commands.run_arguments import one_speaks, read_training_plan
from ipucnn.config.resolve import Resolved
from ipucnn.config.signature import with_run_options


def _settle(resolved: Resolved) -> Resolved:
    from ipucnn.runs.start import settled

    return settled(resolved)


@with_run_options("train", settle=_settle, read_plan=read_training_plan)
def train(resolved: Resolved, verbose: bool, json_output: bool) -> None:
    """Train a network: on IPUs, or with their semantics on a CPU or GPU.

    Options not given come from the preset of the model and data set. The run folder holds the resolved
    configuration, metrics, checkpoints and report.
    """
    from ipucnn.filesystem import is_file
    from ipucnn.reports.console import telling_of_indexing
    from ipucnn.reports.runs import write_page, write_page_of
    from ipucnn.reports.train import FoldsDisplay, RunDisplay, show_dry_run
    from ipucnn.runs.compare import find_runs
    from ipucnn.runs.folder import REPORT
    from ipucnn.runs.start import is_cross_validation
    from ipucnn.sessions.host.workers import find_group

    if is_cross_validation(resolved):
        from ipucnn.runs.kfold import CrossValidation

        group = find_group(resolved.config)
        with one_speaks(group):
            validation = CrossValidation(resolved, verbose)
            if resolved.config.dry_run:
                show_dry_run(validation.first, json_output, validation.folds)
                return
            with FoldsDisplay(validation) as folds:
                for fold_event in validation.events():
                    folds.show(fold_event)
            folds.print_result(json_output)
            for fold in find_runs(validation.root) if group.is_writer else ():
                if is_file(fold / REPORT):
                    write_page(fold)
        return
    from ipucnn.runs.train import TrainingRun

    with telling_of_indexing():
        run = TrainingRun(resolved, verbose)
    if resolved.config.dry_run:
        show_dry_run(run, json_output)
        return
    with RunDisplay(run) as display:
        for event in run.events():
            display.show(event)
    display.print_result(json_output)
    write_page_of(run)
