"""Rules between options that need no arithmetic; batches and pipelines are checked by ``training.program``."""

from ipucnn.config.options import RunConfig
from ipucnn.errors import ConfigurationError


def check(config: RunConfig) -> None:
    """Refuses combinations that are illegal whatever the model and data.

    Raises:
        ConfigurationError: naming both options and what to give instead.
    """
    if config.learning_rate is not None and "initial_learning_rate" in config.lr_schedule_params:
        raise ConfigurationError(
            f"learning-rate {config.learning_rate:g} (absolute) and initial_learning_rate "
            f"{config.lr_schedule_params['initial_learning_rate']} (per sample) are both given",
            "give one of --learning-rate and --lr-schedule-params with initial_learning_rate",
        )
    repeated = [name for name in config.pipeline_splits if config.pipeline_splits.count(name) > 1]
    if repeated:
        raise ConfigurationError(
            f"pipeline-splits: '{repeated[0]}' opens two stages",
            "name each layer once, in the network's order",
        )
