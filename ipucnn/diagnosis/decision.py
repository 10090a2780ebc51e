"""Decides which device a command runs on, and why: rules over collected facts, without any access to the machine."""

from dataclasses import dataclass, field, replace
from typing import Iterator, List, Optional, Sequence, Tuple

from ipucnn.diagnosis.ipus import Ipus
from ipucnn.diagnosis.look import Probe
from ipucnn.errors import MissingError, UserError
from ipucnn.sessions.host.gpus import Gpu
from ipucnn.sessions.poplar import surroundings
from ipucnn.sessions.poplar.surroundings import Surroundings
from ipucnn.text import counted

PROBLEM, WARNING, NOTE = "problem", "warning", "note"
_PARTITION = "IPUOF_VIPU_API_PARTITION_ID"  # the name of an IPU-POD's partition


@dataclass(frozen=True)
class Finding:
    """A fact for the user.

    Attributes:
        level: PROBLEM (prevents the requested operation), WARNING or NOTE.
        message, hint: the texts, as in an error.
    """

    level: str
    message: str
    hint: Optional[str] = None


def problem(error: UserError) -> Finding:
    """Returns the finding for an error with which a command would end."""
    return Finding(PROBLEM, error.message, error.hint)


@dataclass(frozen=True)
class Machine:
    """The facts that determine which device is used.

    Attributes:
        software: Python, packages and the Poplar SDK.
        ipus: the IPUs as gc-info lists them.
        gpus: the GPUs as the driver lists them; ``gpu_problem`` is the reason why there are none.
        probe: the probe of TensorFlow, None without --full.
    """

    software: Surroundings
    ipus: Ipus = field(default_factory=lambda: Ipus(False))
    gpus: Tuple[Gpu, ...] = ()
    gpu_problem: Optional[str] = None
    probe: Optional[Probe] = None


@dataclass(frozen=True)
class Choice:
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


def choose(requested: str, machine: Machine) -> Tuple[Choice, List[Finding]]:
    """Returns the device for ``--device requested``, and the findings about it.

    Auto uses IPUs if TensorFlow is the Poplar SDK's, else a GPU, else the CPU.  A device that is present but does not
    work is not replaced by another.
    """
    software, ipus = machine.software, machine.ipus
    broken_sdk = list(surroundings.problems(software))
    is_ipu = requested == "ipu" or (requested == "auto" and software.has_ipu_package)
    findings = list(_of_tensorflow(machine))
    is_host_broken = bool(findings)
    if is_ipu:
        messages = [finding.message for finding in findings]
        findings += [problem(each) for each in broken_sdk if each.message not in messages]
        warnings = surroundings.version_warnings(software)
        findings += [Finding(WARNING, each.message, each.hint) for each in warnings]
        findings += _of_ipus(machine)
    elif ipus.num_ipus and broken_sdk:
        message = f"there is hardware ({counted(ipus.num_ipus, 'IPU')}), but {broken_sdk[0].message}"
        findings.append(Finding(WARNING, message, broken_sdk[0].hint))
    worst = next((f for f in findings if f.level == PROBLEM), None)
    if is_ipu:
        reason = _why_ipu(machine) if worst is None else worst.message
        return Choice(requested, "ipu", worst is None, reason, cpu_usable=not is_host_broken), findings
    if worst is not None:
        device = requested if requested != "auto" else None
        return Choice(requested, device, False, worst.message, cpu_usable=False), findings
    choice = Choice(requested, "cpu", True, "chosen with --device cpu")
    if requested != "cpu":
        choice, of_gpu = _choose_gpu(requested, machine)
        findings += of_gpu
    if choice.usable:
        device = str(choice.device).upper()
        message = (
            f"no IPU is used: runs compute on the {device} with the IPU's semantics (micro-batches, accumulation, "
            "replicas, stages); what they measure is this machine's speed, and figures of IPUs are predicted"
        )
        findings.append(Finding(NOTE, message))
    return choice, findings


def _of_tensorflow(machine: Machine) -> Iterator[Finding]:
    versions, probe = machine.software.versions, machine.probe
    if versions.get("tensorflow") is None:
        hint = "python -m pip install ipucnn; on an IPU system the Poplar SDK's wheel (docs/ipu.md)"
        yield Finding(PROBLEM, "TensorFlow is not installed here", hint)
        return
    for package in ("keras", "numpy"):
        if versions.get(package) is None:
            message = f"{package} is not installed here"
            yield Finding(PROBLEM, message, f"python -m pip install {package}")
    if probe is not None and probe.error is not None:
        yield problem(probe.error)


def _of_ipus(machine: Machine) -> Iterator[Finding]:
    """Yields the first problem of the IPUs, if there is one."""
    software, ipus = machine.software, machine.ipus
    if not (software.has_ipu_package or ipus.tool_found):
        return
    if "use_ipu_model" in surroundings.parse_flags(software.variables.get("TF_POPLAR_FLAGS", "")):
        message = "TF_POPLAR_FLAGS asks for the software model of an IPU, which is slow"
        yield Finding(WARNING, message)
    elif not ipus.tool_found:
        message = "gc-info is not on PATH: nothing says how many IPUs there are"
        hint = "install the driver's command line tools, or type: source PATH/TO/poplar_sdk-*/enable"
        yield Finding(WARNING, message, hint)
    elif not ipus.num_ipus:
        hint = "on an IPU-POD: export IPUOF_VIPU_API_HOST=HOST IPUOF_VIPU_API_PARTITION_ID=PARTITION"
        if software.variables.get(_PARTITION) or software.variables.get("IPUOF_CONFIG_PATH"):
            hint = "is the partition that IPUOF_... names active? vipu list partition"
        yield Finding(PROBLEM, ipus.problem or "no IPU is visible", hint)


def _why_ipu(machine: Machine) -> str:
    sdk, ipus = surroundings.sdk_version(machine.software), machine.ipus
    reason = f"TensorFlow is that of {f'Poplar SDK {sdk}' if sdk else 'the Poplar SDK'}"
    if not ipus.num_ipus:
        return reason
    boards = f" ({ipus.board})" if ipus.board else ""
    return f"{reason}, and {counted(ipus.num_ipus, 'IPU')}{boards} are visible"


def _choose_gpu(requested: str, machine: Machine) -> Tuple[Choice, List[Finding]]:
    """Returns a GPU if there is one, for "gpu" and "auto"."""
    gpus, probe = machine.gpus, machine.probe
    count, reason, findings = len(gpus), machine.gpu_problem, []
    if probe is not None:
        count = int(probe.answer.get("gpus", 0))
        if gpus and not count:
            reason = "TensorFlow sees none of the driver's GPUs"
            hint = "python -m pip install 'tensorflow[and-cuda]'"
            findings.append(Finding(WARNING, f"{reason}: {gpus[0].name}", hint))
    if count:
        names = ", ".join(gpu.name for gpu in gpus) or counted(count, "GPU")
        them = "it" if count == 1 else "them"
        sure = f"TensorFlow sees {them}" if probe else f"if TensorFlow can use {them}, which --full tells"
        return Choice(requested, "gpu", True, f"{names}; {sure}"), findings
    if requested == "gpu":
        message = f"there is no GPU to use: {reason}"
        findings.append(Finding(PROBLEM, message, "use --device cpu"))
        return Choice(requested, "gpu", False, message), findings
    return Choice(
        requested, "cpu", True, "there is neither the Poplar SDK's TensorFlow nor a GPU here"
    ), findings


def command_devices(choice: Choice) -> Iterator[Choice]:
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
            yield Choice("", "cpu", True, reason, name)
        else:
            yield Choice("", "cpu", True, "works on the host", name)


def next_steps(choice: Choice, findings: Sequence[Finding], machine: Machine) -> List[str]:
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


def as_error(choice: Choice, findings: Sequence[Finding]) -> Optional[UserError]:
    """Returns the error of a device that cannot be used; None if it can."""
    if choice.usable:
        return None
    hints = [f.hint for f in findings if f.level == PROBLEM and f.hint]
    message = f"--device {choice.requested} cannot be used: {choice.reason}"
    return MissingError(message, hints[0] if hints else "--device cpu runs everywhere")
