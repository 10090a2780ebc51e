"""Decides which device a command runs on, and why: rules over collected facts, without any access to the machine."""

from dataclasses import dataclass, field, replace
from typing import Iterator, List, Optional, Sequence, Tuple

from ipucnn.diagnosis.ipus import ListedIpus
from ipucnn.diagnosis.look import Probe
from ipucnn.errors import MissingError, UserError
from ipucnn.sessions.host.gpus import Gpu
from ipucnn.sessions.poplar import sdk_environment
from ipucnn.sessions.poplar.sdk_environment import SdkEnvironment
from ipucnn.text import counted

PROBLEM, WARNING, NOTE = "problem", "warning", "note"
_PARTITION = "IPUOF_VIPU_API_PARTITION_ID"  # the name of an IPU-POD's partition


@dataclass(frozen=True)
class DeviceFinding:
    """A fact for the user.

    Attributes:
        level: PROBLEM (prevents the requested operation), WARNING or NOTE.
        message, hint: the texts, as in an error.
    """

    level: str
    message: str
    hint: Optional[str] = None


def problem(error: UserError) -> DeviceFinding:
    """Returns the finding for an error with which a command would end."""
    return DeviceFinding(PROBLEM, error.message, error.hint)


@dataclass(frozen=True)
class Machine:
    """The facts that determine which device is used.

    Attributes:
        software: Python, packages and the Poplar SDK.
        ipus: the IPUs as gc-info lists them.
        gpus: the GPUs as the driver lists them; ``gpu_problem`` is the reason why there are none.
        probe: the probe of TensorFlow, None without --full.
    """

    software: SdkEnvironment
    ipus: ListedIpus = field(default_factory=lambda: ListedIpus(False))
    gpus: Tuple[Gpu, ...] = ()
    gpu_problem: Optional[str] = None
    probe: Optional[Probe] = None


@dataclass(frozen=True)
class ChosenDevice:
    """A device for a command.

    Attributes:
        requested: "auto", "ipu", "gpu" or "cpu"; empty for a command that needs no device.
        device: "ipu", "gpu" or "cpu"; None if none is used.
        usable: whether the device can be used.
        reason: the reason for or against the device.
        command: the command; empty for all that have --device.
        cpu_usable: whether --device cpu would work.
    """

    requested: str
    device: Optional[str]
    usable: bool
    reason: str
    command: str = ""
    cpu_usable: bool = True


def choose(requested: str, machine: Machine) -> Tuple[ChosenDevice, List[DeviceFinding]]:
    """Returns the device for ``--device requested``, and the findings about it.

    Auto uses IPUs if TensorFlow is the Poplar SDK's, else a GPU, else the CPU.  A device that is present but does not
    work is not replaced by another.
    """
    software, ipus = machine.software, machine.ipus
    broken_sdk = list(sdk_environment.problems(software))
    is_ipu = requested == "ipu" or (requested == "auto" and software.has_ipu_package)
    findings = list(_of_tensorflow(machine))
    is_host_broken = bool(findings)
    if is_ipu:
        messages = [finding.message for finding in findings]
        findings += [problem(each) for each in broken_sdk if each.message not in messages]
        warnings = sdk_environment.version_warnings(software)
        findings += [DeviceFinding(WARNING, each.message, each.hint) for each in warnings]
        findings += _of_ipus(machine)
    elif ipus.num_ipus and broken_sdk:
        message = f"there is hardware ({counted(ipus.num_ipus, 'IPU')}), but {broken_sdk[0].message}"
        findings.append(DeviceFinding(WARNING, message, broken_sdk[0].hint))
    worst = next((f for f in findings if f.level == PROBLEM), None)
    if is_ipu:
        reason = _why_ipu(machine) if worst is None else worst.message
        return ChosenDevice(requested, "ipu", worst is None, reason, cpu_usable=not is_host_broken), findings
    if worst is not None:
        device = requested if requested != "auto" else None
        return ChosenDevice(requested, device, False, worst.message, cpu_usable=False), findings
    choice = ChosenDevice(requested, "cpu", True, "chosen with --device cpu")
    if requested != "cpu":
        choice, of_gpu = _choose_gpu(requested, machine)
        findings += of_gpu
    if choice.usable:
        device = str(choice.device).upper()
        message = (
            f"no IPU is used: runs compute on the {device} with the IPU's semantics (micro-batches, accumulation, "
            "replicas, stages); what they measure is this machine's speed, and figures of IPUs are predicted"
        )
        findings.append(DeviceFinding(NOTE, message))
    return choice, findings


def _of_tensorflow(machine: Machine) -> Iterator[DeviceFinding]:
    versions, probe = machine.software.versions, machine.probe
    if versions.get("tensorflow") is None:
        hint = "python -m pip install ipucnn; on an IPU system the Poplar SDK's wheel (docs/ipu.md)"
        yield DeviceFinding(PROBLEM, "TensorFlow is not installed here", hint)
        return
    for package in ("keras", "numpy"):
        if versions.get(package) is None:
            message = f"{package} is not installed here"
            yield DeviceFinding(PROBLEM, message, f"python -m pip install {package}")
    if probe is not None and probe.error is not None:
        yield problem(probe.error)


def _of_ipus(machine: Machine) -> Iterator[DeviceFinding]:
    """Yields the first problem of the IPUs, if there is one."""
    software, ipus = machine.software, machine.ipus
    if not (software.has_ipu_package or ipus.tool_found):
        return
    if "use_ipu_model" in sdk_environment.parse_flags(software.variables.get("TF_POPLAR_FLAGS", "")):
        message = "TF_POPLAR_FLAGS asks for the software model of an IPU, which is slow"
        yield DeviceFinding(WARNING, message)
    elif not ipus.tool_found:
        message = "gc-info is not on PATH: nothing says how many IPUs there are"
        hint = "install the driver's command line tools, or type: source PATH/TO/poplar_sdk-*/enable"
        yield DeviceFinding(WARNING, message, hint)
    elif not ipus.num_ipus:
        hint = "on an IPU-POD: export IPUOF_VIPU_API_HOST=HOST IPUOF_VIPU_API_PARTITION_ID=PARTITION"
        if software.variables.get(_PARTITION) or software.variables.get("IPUOF_CONFIG_PATH"):
            hint = "is the partition that IPUOF_... names active? vipu list partition"
        yield DeviceFinding(PROBLEM, ipus.problem or "no IPU is visible", hint)


def _why_ipu(machine: Machine) -> str:
    sdk, ipus = sdk_environment.sdk_version(machine.software), machine.ipus
    reason = f"TensorFlow is that of {f'Poplar SDK {sdk}' if sdk else 'the Poplar SDK'}"
    if not ipus.num_ipus:
        return reason
    boards = f" ({ipus.board})" if ipus.board else ""
    return f"{reason}, and {counted(ipus.num_ipus, 'IPU')}{boards} are visible"


def _choose_gpu(requested: str, machine: Machine) -> Tuple[ChosenDevice, List[DeviceFinding]]:
    """Returns a GPU if there is one, for "gpu" and "auto"."""
    gpus, probe = machine.gpus, machine.probe
    count, reason, findings = len(gpus), machine.gpu_problem, []
    if probe is not None:
        count = int(probe.answer.get("gpus", 0))
        if gpus and not count:
            reason = "TensorFlow sees none of the driver's GPUs"
            hint = "python -m pip install 'tensorflow[and-cuda]'"
            findings.append(DeviceFinding(WARNING, f"{reason}: {gpus[0].name}", hint))
    if count:
        names = ", ".join(gpu.name for gpu in gpus) or counted(count, "GPU")
        them = "it" if count == 1 else "them"
        sure = f"TensorFlow sees {them}" if probe else f"if TensorFlow can use {them}, which --full tells"
        return ChosenDevice(requested, "gpu", True, f"{names}; {sure}"), findings
    if requested == "gpu":
        message = f"there is no GPU to use: {reason}"
        findings.append(DeviceFinding(PROBLEM, message, "use --device cpu"))
        return ChosenDevice(requested, "gpu", False, message), findings
    return ChosenDevice(
        requested, "cpu", True, "there is neither the Poplar SDK's TensorFlow nor a GPU here"
    ), findings


def command_devices(choice: ChosenDevice) -> Iterator[ChosenDevice]:
    """Yields the device of each command."""
    from ipucnn.command_table import COMMANDS
    from ipucnn.config.options import BY_NAME

    for name in COMMANDS:
        if name == "doctor":
            continue
        if name in BY_NAME["device"].commands:
            yield replace(choice, command=name)
        elif name == "plan-splits":
            reason = "plans on the host; the networks' layers are shipped, others TensorFlow reads once"
            yield ChosenDevice("", "cpu", True, reason, name)
        else:
            yield ChosenDevice("", "cpu", True, "works on the host", name)


def next_steps(choice: ChosenDevice, findings: Sequence[DeviceFinding], machine: Machine) -> List[str]:
    """Returns what to type, most useful first."""
    steps = [f.hint for f in findings if f.level == PROBLEM and f.hint is not None]
    num_ipus = machine.ipus.num_ipus
    if not choice.usable:
        if choice.requested != "cpu" and choice.cpu_usable:
            steps.append("until then: --device cpu computes on the host with the IPU's semantics")
        return list(dict.fromkeys(steps))
    if choice.device != "ipu":
        steps.append("ipucnn train lenet: a first run")
        steps.append("ipucnn plan-splits resnet50 --stages 4: what IPUs would do, predicted")
    else:
        steps.append(
            "ipucnn train lenet: a first run on IPUs; docs/contributing/hardware-checklist.md has what to look at"
        )
        if num_ipus > 1:
            steps.append(f"ipucnn plan-splits resnet50 --ipus {num_ipus}: how to spend them on a network")
    if machine.probe is None:
        steps.append("ipucnn doctor --full: imports TensorFlow, too, in a process of its own")
    return list(dict.fromkeys(steps))


def as_error(choice: ChosenDevice, findings: Sequence[DeviceFinding]) -> Optional[UserError]:
    """Returns the error of a device that cannot be used; None if it can."""
    if choice.usable:
        return None
    hints = [f.hint for f in findings if f.level == PROBLEM and f.hint]
    message = f"--device {choice.requested} cannot be used: {choice.reason}"
    return MissingError(message, hints[0] if hints else "--device cpu runs everywhere")
