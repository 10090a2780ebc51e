"""Rules between options.  Batch, schedule and pipeline arithmetic is checked where it is computed."""

from typing import Dict, List, Optional

from ipucnn.config.options import RunConfig
from ipucnn.errors import ConfigurationError


def check(config: RunConfig) -> None:
    """Refuses combinations that are illegal whatever the model and data.

    Raises:
        ConfigurationError: naming both options and what to give instead.
    """
    if config.gradient_accumulation_count is not None and config.global_batch_size is not None:
        raise ConfigurationError(
            f"gradient-accumulation-count {config.gradient_accumulation_count} and global-batch-size "
            f"{config.global_batch_size} are both given, and each follows from the other",
            "give one of --gradient-accumulation-count and --global-batch-size",
        )
    if config.learning_rate is not None and "initial_learning_rate" in config.lr_schedule_params:
        raise ConfigurationError(
            f"learning-rate {config.learning_rate:g} (absolute) and initial_learning_rate "
            f"{config.lr_schedule_params['initial_learning_rate']} (per sample) are both given",
            "give one of --learning-rate and --lr-schedule-params with initial_learning_rate",
        )
    _check_pipeline(config)


def _check_pipeline(config: RunConfig) -> None:
    splits = config.pipeline_splits
    repeated = _repeated(list(splits))
    if repeated is not None:
        raise ConfigurationError(
            f"pipeline-splits: '{repeated}' opens two stages", "name each layer once, in the network's order"
        )
    num_stages = len(splits) + 1
    mapping = config.device_mapping
    if mapping is not None:
        if len(mapping) != num_stages and not (config.ipus_per_replica and not splits):
            raise ConfigurationError(
                f"device-mapping has {len(mapping)} entries for {num_stages} stages "
                f"({len(splits)} pipeline-splits)",
                f"give one IPU per stage, e.g. --device-mapping {' '.join(map(str, range(num_stages)))}",
            )
        gap = _missing_ipu(mapping)
        if gap is not None:
            raise ConfigurationError(
                f"device-mapping {' '.join(map(str, mapping))} uses IPU {max(mapping)} but not IPU {gap}",
                "number the IPUs of a replica from 0 without gaps",
            )
    if config.recomputation and not splits and (config.ipus_per_replica or 1) < 2:
        raise ConfigurationError(
            "recomputation is on, but the model is not pipelined",
            "add --pipeline-splits, or --ipus-per-replica 2 or more; or --recomputation False",
        )


def _repeated(names: List[str]) -> Optional[str]:
    seen: Dict[str, bool] = {}
    for name in names:
        if name in seen:
            return name
        seen[name] = True
    return None


def _missing_ipu(mapping: tuple) -> Optional[int]:
    return next((ipu for ipu in range(max(mapping, default=-1) + 1) if ipu not in mapping), None)
