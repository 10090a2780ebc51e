"""``ipucnn train``: train a network."""

from ipucnn.commands.run_arguments import read_training_plan
from ipucnn.config.request import RunRequest
from ipucnn.config.signature import with_run_options


@with_run_options("train", read_plan=read_training_plan)
def train(request: RunRequest, verbose: bool, json_output: bool) -> None:
    """Train a network: on IPUs, or with their semantics on a CPU or GPU.

    Options not given come from the preset of the model and data set. The run folder holds the resolved
    configuration, metrics, checkpoints and report.
    """
    resolved = request.resolve()
    if request.print_config:
        from ipucnn.reports.configuration import print_config
        from ipucnn.runs.resume import continued

        print_config(continued(resolved), json_output)
        return
    from ipucnn.reports.console import indexing_progress
    from ipucnn.reports.runs import write_page_of
    from ipucnn.reports.train import RunDisplay, print_result, print_result_of_folds, show_dry_run
    from ipucnn.runs.resume import is_cross_validation

    if is_cross_validation(resolved):
        from ipucnn.runs.kfold import CrossValidation, FoldFinished, FoldStarted

        validation = CrossValidation(resolved, verbose)
        if resolved.config.dry_run:
            show_dry_run(validation.first, json_output, validation.folds)
            return
        with RunDisplay() as display:
            for event in validation.events():
                display.show(event)
                if isinstance(event, FoldStarted):
                    run = event.run
                elif isinstance(event, FoldFinished):
                    write_page_of(run)
        print_result_of_folds(validation, json_output)
        return
    from ipucnn.runs.train import TrainingRun

    with indexing_progress():
        run = TrainingRun(resolved, verbose)
    if resolved.config.dry_run:
        show_dry_run(run, json_output)
        return
    with RunDisplay(run) as display:
        for event in run.events():
            display.show(event)
    print_result(run, json_output)
    write_page_of(run)
