"""Refuses Programs that IPUs cannot run: before TensorFlow is imported, unless only the IPUs can say so.

Every check is a row: whether something is wrong, the error's message, and its hint.  The first wrong row is raised.
"""

from typing import List, Optional, Tuple

from ipucnn.aliases import MemoryAdvice
from ipucnn.config.options import RunConfig
from ipucnn.errors import ConfigurationError
from ipucnn.sessions.group import Alone, Popdist, ProcessGroup
from ipucnn.sessions.poplar import sdk_environment
from ipucnn.sessions.poplar.errors import REMOTE_MEMORY, no_remote_memory
from ipucnn.text import counted
from ipucnn.training.batching import next_power_of_two
from ipucnn.training.program import Program, evaluation_replicas, validation_replicas

Check = Tuple[bool, str, str]

# (schedule, recomputation mode) that the driver does not implement; driver/tools/pipeline_util.cc.
_UNSUPPORTED_MODES = (
    ("Sequential", "RecomputeThenBackpropagate"),
    ("Interleaved", "RecomputeAndBackpropagateInterleaved"),
)


def _raise_first(*checks: Check) -> None:
    for is_wrong, message, hint in checks:
        if is_wrong:
            raise ConfigurationError(message, hint)


def _power_of_two(num_ipus: int, what: str, options: str) -> Check:
    """Checks a number of IPUs: devices have 1, 2, 4, 8, ... of them."""
    above = next_power_of_two(num_ipus)
    message = f"{what} need {num_ipus} IPUs, and a device has 1, 2, 4, 8, ... of them"
    return above != num_ipus, message, f"use {above // 2} or {above} IPUs: {options}"


def _not_selected(config: RunConfig) -> Check:
    message = f"--select-ipu {config.select_ipu}: poprun chooses the IPUs of each instance"
    return config.select_ipu is not None, message, "use --select-ipu none"


def check_program(program: Program, config: RunConfig, instances: ProcessGroup = Alone()) -> None:
    """Refuses a Program that the SDK would refuse during compilation, minutes or hours later.

    Args:
        program: the Program from ``make_program``.
        config: the options of the run.
        instances: the instances of ``poprun`` that share its replicas.

    Raises:
        ConfigurationError: with the nearest legal choice.
    """
    check_layout(instances, program, config)
    p, mapping, count = program, program.device_mapping, instances.size
    mode, schedule = config.recomputation_mode, program.pipeline_schedule
    shares_state = config.replicated_optimizer_state_sharding
    on_ipus = validation_replicas(config.pipeline_validation_model, p.num_replicas, p.ipus_per_replica, count)
    validated = config.validation_num_replicas
    _raise_first(
        _power_of_two(
            p.num_ipus // count, counted(p.num_replicas // count, "replica"), "--num-replicas, or --ipus"
        ),
        (
            schedule == "Interleaved" and p.num_stages > 1 and len(set(mapping)) < len(mapping),
            f"--device-mapping {' '.join(map(str, mapping))}: the Interleaved schedule cannot train several stages on "
            "one IPU",
            "use --pipeline-schedule Grouped or Sequential, or one IPU per stage",
        ),
        (
            p.recomputation and (schedule, mode) in _UNSUPPORTED_MODES,
            f"--recomputation-mode {mode} does not exist for the {schedule} schedule",
            "use --recomputation-mode Auto",
        ),
        (
            shares_state and not config.optimizer_state_offloading,
            "--replicated-optimizer-state-sharding shares out an offloaded state, and it is not offloaded",
            "add --optimizer-state-offloading",
        ),
        (
            shares_state and count > 1,
            "--replicated-optimizer-state-sharding does not work over several instances",
            "add --no-replicated-optimizer-state-sharding",
        ),
        (
            validated is not None and validated != on_ipus,
            f"--validation-num-replicas {validated}: validation runs on the IPUs of training, which hold {on_ipus}",
            f"use --validation-num-replicas {on_ipus}",
        ),
    )


def check_layout(instances: ProcessGroup, program: Program, config: RunConfig) -> None:
    """Refuses a Program whose layout differs from the one that ``poprun`` was started with.

    Raises:
        ConfigurationError: naming both numbers.
    """
    if not isinstance(instances, Popdist):
        return
    p, replicas, ipus = program, instances.total_replicas, instances.ipus_per_replica
    _raise_first(
        (
            replicas != p.num_replicas,
            f"poprun has {counted(replicas, 'replica')}, the program {p.num_replicas}",
            f"use --num-replicas {replicas}, or poprun --num-replicas {p.num_replicas}",
        ),
        (
            ipus != p.ipus_per_replica,
            f"poprun has {counted(ipus, 'IPU')} per replica, the program {p.ipus_per_replica}",
            f"use poprun --ipus-per-replica {p.ipus_per_replica}",
        ),
        _not_selected(config),
        (
            p.dbn_replica_group_size > 1 and instances.size > 1,
            "distributed batch norm over several instances: which replicas form a group depends on how the data is "
            "shared out",
            "use --dbn-replica-group-size 1, or poprun --num-instances 1",
        ),
    )


def local_evaluation_replicas(instances: ProcessGroup, config: RunConfig) -> int:
    """Returns the replicas of an evaluation in one process, which has one IPU for each; ``poprun`` has chosen its IPUs.

    Raises:
        ConfigurationError: another number of IPUs was requested, or no device has so many.
    """
    requested = config.validation_num_replicas
    given = instances.local_ipus if isinstance(instances, Popdist) else 0
    if given:
        _raise_first(
            (
                requested is not None and requested != given,
                f"--validation-num-replicas {requested}: poprun gave each instance {counted(given, 'IPU')}",
                f"use --validation-num-replicas {given}",
            ),
            _not_selected(config),
        )
    replicas = given or evaluation_replicas(config)
    what = f"{counted(replicas, 'replica')} of evaluation"
    _raise_first(_power_of_two(replicas, what, "--validation-num-replicas"))
    return replicas


def check_remote_memory(
    program: Program, config: RunConfig, memory_advice: Optional[MemoryAdvice]
) -> List[str]:
    """Refuses options that need remote memory if gc-info reports that the IPUs have none.

    If IPUs are attached before compilation, the driver asks them itself.  By default they are attached when the
    program is executed (``--on-demand``), and then loading it fails.

    Returns:
        The options that keep a part of the program in remote memory; the SDK does so only with gradient accumulation.

    Raises:
        ConfigurationError: with the option that avoids remote memory.
    """
    is_pipeline = program.num_stages > 1
    if not is_pipeline and program.gradient_accumulation_count == 1:
        return []
    options = [
        option
        for option in REMOTE_MEMORY
        if getattr(config, option) and (is_pipeline or option == "optimizer_state_offloading")
    ]
    if options and not config.compile_only and sdk_environment.remote_memory() is False:
        raise no_remote_memory(options[0], memory_advice)
    return options


def check_selected(select_ipu: int, ipus_of_device: int, num_ipus: int) -> None:
    """Refuses a selected device that has another number of IPUs than the program needs.

    The SDK divides a device by the IPUs of a replica, and would train with other replicas than the program says
    (keras/ipu of SDK 3.4: ``get_num_of_ipus_in_device`` // shards).

    Args:
        select_ipu: the value of ``--select-ipu``.
        ipus_of_device: the IPUs of that device, which the SDK reports after configuration.
        num_ipus: the IPUs that the program needs.

    Raises:
        ConfigurationError: naming both numbers.
    """
    _raise_first(
        (
            ipus_of_device != num_ipus,
            f"--select-ipu {select_ipu}: that device has {counted(ipus_of_device, 'IPU')}, and {num_ipus} are needed",
            f"take the number of a device of {num_ipus} from gc-info -l, or use --select-ipu none",
        )
    )


def why_of_last_replica(program: Program, config: RunConfig) -> str:
    """Returns why loss and accuracy of training are those of the last replica; "" if they are of all replicas."""
    if program.num_replicas == 1:
        return ""
    if program.num_stages > 1:
        return "the SDK's pipelines give no others"
    version = sdk_environment.version_number(
        sdk_environment.sdk_version(sdk_environment.read_sdk_environment())
    )
    if version[:2] == sdk_environment.OLDEST_SDK and not config.accelerator_side_reduction:
        return "SDK 3.0 reduces no others; --accelerator-side-reduction averages them over all replicas"
    return ""
