"""Options that exclude each other, in one table; the rules depend on no network, data or device.

``training.program`` checks what needs the Program's arithmetic; ``runs.rules`` has the options that have no effect in a
run.
"""

from typing import Callable, Mapping, NamedTuple, Optional, Sequence, Tuple

from ipucnn.config.options import AUTO, SPECS, RunConfig
from ipucnn.errors import ConfigurationError, UserError
from ipucnn.filesystem import expand

DEFAULT = "default"
FLAG = "flag"
RUN_ORIGIN = "run"

Origins = Mapping[str, str]
"""Field name -> origin of its value."""


class Contradiction(NamedTuple):
    """Options that contradict each other.

    Attributes:
        applies: function that decides whether a configuration, with the origins of its values, contains the
            contradiction.
        message: the error, with the values of options in braces, for ``str.format``.
        hint: the remedy, with values likewise.
    """

    applies: Callable[[RunConfig, Origins], bool]
    message: str
    hint: str


CONTRADICTIONS: Tuple[Contradiction, ...] = (
    *(
        Contradiction(
            lambda config, origins, name=name: (  # type: ignore[misc]
                config.synthetic_data is not None
                and getattr(config, name)
                # Values of a saved run do not count as given.
                and RUN_ORIGIN not in (origins[name], origins["synthetic_data"])
            ),
            f"synthetic-data {{synthetic_data}} and {name.replace('_', '-')} are two sources of the same data",
            f"drop --{name.replace('_', '-')}: with --synthetic-data nothing is read",
        )
        for name in ("host_generated_data", "device_generated_data")
    ),
    Contradiction(
        lambda config, origins: config.deterministic and config.shuffle and origins["shuffle"] == FLAG,
        "--shuffle contradicts deterministic, which trains on the samples in their stored order",
        "drop --shuffle, or add --no-deterministic",
    ),
    Contradiction(
        lambda config, origins: (
            config.eight_bit_transfer
            and not config.accelerator_side_preprocess
            and origins["accelerator_side_preprocess"] != DEFAULT
        ),
        "eight-bit-transfer with accelerator-side-preprocess False ({origins[accelerator_side_preprocess]}): "
        "normalised pixels do not go into 8 bits",
        "add --accelerator-side-preprocess, or --no-eight-bit-transfer",
    ),
    Contradiction(
        lambda config, _: (
            config.learning_rate is not None and "initial_learning_rate" in config.lr_schedule_params
        ),
        "learning-rate {learning_rate:g} (absolute) and initial_learning_rate "
        "{lr_schedule_params[initial_learning_rate]} (per sample) are both given",
        "give one of --learning-rate and --lr-schedule-params with initial_learning_rate",
    ),
    Contradiction(
        lambda config, _: (
            config.steps_per_execution is not None and config.logs_per_epoch != RunConfig.logs_per_epoch
        ),
        "steps-per-execution {steps_per_execution} and logs-per-epoch {logs_per_epoch:g} are both given, and each sets "
        "the length of an execution",
        "give one of --steps-per-execution and --logs-per-epoch",
    ),
    Contradiction(
        lambda config, _: config.optimizer == "lars" and config.weight_decay > 0,
        "weight-decay {weight_decay:g} is not LARS's: it has its own, inside the trust ratio",
        "give it with --optimizer-params '{{\"weight_decay\": {weight_decay:g}}}'",
    ),
    Contradiction(
        lambda config, _: not (config.training or config.validation),
        "neither training nor validation: nothing to do",
        "drop one of the two flags",
    ),
    Contradiction(
        lambda config, _: config.resume and config.overwrite,
        "--resume and --overwrite are both given",
        "drop one of them",
    ),
    Contradiction(
        # A continued run, whose options are the run's own, may be one that was saved without training.
        lambda config, origins: config.resume and not config.training and origins["resume"] == FLAG,
        "--resume without training has nothing to continue",
        "validate with: ipucnn evaluate RUN",
    ),
    Contradiction(
        lambda config, _: config.fold is not None and config.kfold is None,
        "--fold {fold} without --kfold",
        "for example --kfold 5 --fold 5",
    ),
    Contradiction(
        lambda config, _: (config.fold or 0) > (config.kfold or 0),
        "--fold {fold} of --kfold {kfold}",
        "folds are numbered from 1 to {kfold}",
    ),
    Contradiction(
        lambda config, _: AUTO in config.pipeline_splits and len(config.pipeline_splits) > 1,
        "pipeline-splits: 'auto' stands for all of them, but others are given too",
        "give auto, or layers",
    ),
    Contradiction(
        lambda config, _: _repeated(config.pipeline_splits) is not None,
        "pipeline-splits: '{repeated}' opens two stages",
        "name each layer once, in the network's order",
    ),
)


def _repeated(splits: Sequence[str]) -> Optional[str]:
    """Returns the first layer that is named twice, or None."""
    return next((name for number, name in enumerate(splits) if name in splits[:number]), None)


def check(config: RunConfig, origins: Origins) -> None:
    """Refuses options that exclude each other, and texts that cannot be paths.

    Paths need not exist.  Those of a saved run are not checked, because they may belong to another machine.

    Raises:
        ConfigurationError: the message names both options, and the hint the remedy; or an empty path, or ``~`` with an
            unknown user.
        DataError: a path that is too long, has a NUL, or is in a folder that may not be searched.
    """
    for rule in CONTRADICTIONS:
        if rule.applies(config, origins):
            values = {**vars(config), "origins": origins, "repeated": _repeated(config.pipeline_splits)}
            raise ConfigurationError(rule.message.format(**values), rule.hint.format(**values))

    for spec in SPECS:
        path = getattr(config, spec.name)
        if path is not None and spec.kind.is_path and origins[spec.name] != RUN_ORIGIN:
            try:
                expand(path)
            except UserError as error:
                raise type(error)(f"{spec.flag} {error.message}", error.hint) from None
