"""Refuses Programs that IPUs cannot run: before TensorFlow is imported, unless only the IPUs can say so."""

from typing import List, Optional, Sequence

from ipucnn.aliases import MemoryAdvice
from ipucnn.config.options import RunConfig
from ipucnn.errors import ConfigurationError
from ipucnn.sessions.poplar import surroundings
from ipucnn.sessions.poplar.errors import REMOTE_MEMORY, no_remote_memory
from ipucnn.sessions.poplar.popdist import Instances
from ipucnn.text import counted
from ipucnn.training.batching import next_power_of_two
from ipucnn.training.program import Program, validation_replicas

# (schedule, recomputation mode) that the driver does not implement; driver/tools/pipeline_util.cc.
_UNSUPPORTED_MODES = (
    ("Sequential", "RecomputeThenBackpropagate"),
    ("Interleaved", "RecomputeAndBackpropagateInterleaved"),
)


def check_num_ipus(num_ipus: int, what: str, options: str = "--num-replicas, or --ipus") -> None:
    """Refuses a number of IPUs that is not a power of two: devices have 1, 2, 4, 8, ... of them.

    Args:
        num_ipus: the number to check.
        what: the subject of the error message.
        options: the options that change the number, for the hint.

    Raises:
        ConfigurationError: with the next smaller and larger powers of two.
    """
    above = next_power_of_two(num_ipus)
    if above != num_ipus:
        raise ConfigurationError(
            f"{what} need {num_ipus} IPUs, and a device has 1, 2, 4, 8, ... of them",
            f"use {above // 2} or {above} IPUs: {options}",
        )


def check_program(program: Program, config: RunConfig, instances: Instances = Instances()) -> None:
    """Refuses a Program that the SDK would refuse during compilation, minutes or hours later.

    Args:
        program: from ``make_program``.
        config: the options that only IPUs act on.
        instances: the instances of ``poprun`` that share its replicas.

    Raises:
        ConfigurationError: with the nearest legal choice.
    """
    check_layout(instances, program, config)
    num_instances = instances.count
    check_num_ipus(
        program.num_ipus // num_instances, f"{counted(program.num_replicas // num_instances, 'replica')}"
    )
    mapping = program.device_mapping
    if (
        program.pipeline_schedule == "Interleaved"
        and program.num_stages > 1
        and len(set(mapping)) < len(mapping)
    ):
        raise ConfigurationError(
            f"--device-mapping {' '.join(map(str, mapping))}: the Interleaved schedule cannot train several stages on "
            "one IPU",
            "use --pipeline-schedule Grouped or Sequential, or one IPU per stage",
        )
    pair = (program.pipeline_schedule, config.recomputation_mode)
    if program.recomputation and pair in _UNSUPPORTED_MODES:
        raise ConfigurationError(
            f"--recomputation-mode {pair[1]} does not exist for the {pair[0]} schedule",
            "use --recomputation-mode Auto",
        )
    if config.replicated_optimizer_state_sharding:
        if not config.optimizer_state_offloading:
            raise ConfigurationError(
                "--replicated-optimizer-state-sharding shares out an offloaded state, and it is not offloaded",
                "add --optimizer-state-offloading",
            )
        if program.num_stages == 1 and program.gradient_accumulation_count == 1:
            raise ConfigurationError(
                "--replicated-optimizer-state-sharding has no effect without accumulation: the SDK shares out the "
                "state only then",
                "use --gradient-accumulation-count 2 or more, or drop it",
            )
        if num_instances > 1:
            raise ConfigurationError(
                "--replicated-optimizer-state-sharding does not work over several instances", "drop it"
            )
    _check_validation(program, config, num_instances)


def kept_remotely(program: Program, config: RunConfig) -> List[str]:
    """The options that keep a part of the program in remote memory; the SDK does so only with gradient accumulation."""
    is_pipeline = program.num_stages > 1
    if not is_pipeline and program.gradient_accumulation_count == 1:
        return []
    only_in_pipelines = ("offload_activations", "offload_gradient_accumulation_buffers")
    return [
        option
        for option in REMOTE_MEMORY
        if getattr(config, option) and (is_pipeline or option not in only_in_pipelines)
    ]


def check_remote_memory(options: Sequence[str], config: RunConfig, would_fit: Optional[MemoryAdvice]) -> None:
    """Refuses options that need remote memory if gc-info reports that the IPUs have none.

    If IPUs are attached before compilation, the driver asks them itself.  By default they are attached when the
    program is executed (``--on-demand``), and then loading it fails.

    Raises:
        ConfigurationError: with the option that avoids remote memory.
    """
    if options and not config.compile_only and surroundings.remote_memory() is False:
        raise no_remote_memory(options[0], would_fit)


def evaluation_replicas(program: Program, config: RunConfig, num_instances: int = 1) -> int:
    """Replicas of the validation model on the IPUs of training, in one process."""
    return validation_replicas(config, program.num_replicas, program.ipus_per_replica, num_instances)


def _check_validation(program: Program, config: RunConfig, num_instances: int) -> None:
    asked, held = config.validation_num_replicas, evaluation_replicas(program, config, num_instances)
    if asked is not None and asked != held:
        raise ConfigurationError(
            f"--validation-num-replicas {asked}: validation runs on the IPUs of training, which hold {held}",
            f"use --validation-num-replicas {held}, or drop it",
        )


def check_evaluation(instances: Instances, config: RunConfig) -> None:
    """Refuses an evaluation that asks for another number of IPUs than ``poprun`` gave this instance.

    Raises:
        ConfigurationError: naming both numbers.
    """
    if not instances.is_distributed:
        return
    asked, given = config.validation_num_replicas, instances.local_ipus
    if asked is not None and asked != given:
        raise ConfigurationError(
            f"--validation-num-replicas {asked}: poprun gave each instance {counted(given, 'IPU')}",
            f"use --validation-num-replicas {given}, or drop it",
        )
    _check_not_selected(config)


def _check_not_selected(config: RunConfig) -> None:
    if config.select_ipu is not None:
        raise ConfigurationError(
            f"--select-ipu {config.select_ipu}: poprun chooses the IPUs of each instance", "drop it"
        )


def check_layout(instances: Instances, program: Program, config: RunConfig) -> None:
    """Refuses a Program whose layout differs from the one that ``poprun`` was started with.

    Raises:
        ConfigurationError: naming both numbers.
    """
    if not instances.is_distributed:
        return
    if instances.total_replicas != program.num_replicas:
        raise ConfigurationError(
            f"poprun has {counted(instances.total_replicas or 0, 'replica')}, the program {program.num_replicas}",
            f"use --num-replicas {instances.total_replicas}, or poprun --num-replicas {program.num_replicas}",
        )
    if instances.ipus_per_replica != program.ipus_per_replica:
        raise ConfigurationError(
            f"poprun has {counted(instances.ipus_per_replica or 0, 'IPU')} per replica, the program "
            f"{program.ipus_per_replica}",
            f"use poprun --ipus-per-replica {program.ipus_per_replica}",
        )
    _check_not_selected(config)
    if program.dbn_replica_group_size > 1 and instances.count > 1:
        raise ConfigurationError(
            "distributed batch norm over several instances: which replicas form a group depends on how the data is "
            "shared out",
            "use --dbn-replica-group-size 1, or poprun --num-instances 1",
        )


def check_selected(select_ipu: int, ipus_of_device: int, num_ipus: int) -> None:
    """Refuses a selected device that has another number of IPUs than the program needs.

    The SDK divides a device by the IPUs of a replica, and would train with other replicas than the program says
    (keras/ipu of SDK 3.4: ``get_num_of_ipus_in_device`` // shards).

    Args:
        select_ipu: ``--select-ipu``.
        ipus_of_device: IPUs of that device, which the SDK reports after configuration.
        num_ipus: IPUs that the program needs.

    Raises:
        ConfigurationError: naming both numbers.
    """
    if ipus_of_device != num_ipus:
        raise ConfigurationError(
            f"--select-ipu {select_ipu}: that device has {counted(ipus_of_device, 'IPU')}, and {num_ipus} are needed",
            f"take the number of a device of {num_ipus} from gc-info -l, or drop --select-ipu",
        )
