"""Rules between options that need no arithmetic; batches and pipelines are checked by ``training.program``."""

from collections import Counter

from ipucnn.config.options import AUTO, SPECS, RunConfig
from ipucnn.errors import ConfigurationError
from ipucnn.filesystem import expand
from ipucnn.text import shown_value

# What options that take a path call it in their help.
_PATHS = ("DIR", "FILE", "PATH")


def check_paths(config: RunConfig) -> None:
    """Refuses what no path can be, in every option that takes one; nothing is looked for.

    Not for saved configurations: what they name may have been on another machine.

    Raises:
        ConfigurationError: empty, too long, with a NUL, or ``~`` and a user who is not here.
    """
    for spec in SPECS:
        path = getattr(config, spec.name)
        if path is not None and spec.metavar.startswith(_PATHS):
            expand(path, spec.flag)


def check(config: RunConfig) -> None:
    """Refuses combinations that are illegal whatever the model and data.

    Raises:
        ConfigurationError: naming both options and what to give instead.
    """
    if config.learning_rate is not None and "initial_learning_rate" in config.lr_schedule_params:
        raise ConfigurationError(
            f"learning-rate {config.learning_rate:g} (absolute) and initial_learning_rate "
            f"{shown_value(config.lr_schedule_params['initial_learning_rate'])} (per sample) are both given",
            "give one of --learning-rate and --lr-schedule-params with initial_learning_rate",
        )
    if config.steps_per_execution is not None and config.logs_per_epoch != RunConfig().logs_per_epoch:
        raise ConfigurationError(
            f"steps-per-execution {config.steps_per_execution} and logs-per-epoch {config.logs_per_epoch:g} are "
            "both given, and each sets the length of an execution",
            "give one of --steps-per-execution and --logs-per-epoch",
        )
    if config.optimizer == "lars" and config.weight_decay:
        raise ConfigurationError(
            f"weight-decay {config.weight_decay:g} is not LARS's: it has its own, inside the trust ratio",
            f"give it with --optimizer-params '{{\"weight_decay\": {config.weight_decay:g}}}'",
        )
    if not config.training and not config.validation:
        raise ConfigurationError(
            "neither training nor validation: nothing to do", "drop one of the two flags"
        )
    if config.fold is not None and (config.kfold is None or config.fold > config.kfold):
        if config.kfold is None:
            raise ConfigurationError(
                f"--fold {config.fold} without --kfold", "for example --kfold 5 --fold 5"
            )
        raise ConfigurationError(
            f"--fold {config.fold} of --kfold {config.kfold}", f"folds are numbered from 1 to {config.kfold}"
        )
    if AUTO in config.pipeline_splits and len(config.pipeline_splits) > 1:
        raise ConfigurationError(
            "pipeline-splits: 'auto' stands for all of them, but others are given too", "give auto, or layers"
        )
    repeated = [name for name, count in Counter(config.pipeline_splits).items() if count > 1]
    if repeated:
        raise ConfigurationError(
            f"pipeline-splits: '{shown_value(repeated[0])}' opens two stages",
            "name each layer once, in the network's order",
        )
