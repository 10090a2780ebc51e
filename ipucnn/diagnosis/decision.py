"""Which device a command runs on here, and why: rules over what was found, without looking at anything."""

from dataclasses import dataclass, replace
from typing import Iterator, List, Optional, Sequence, Tuple

from ipucnn.diagnosis.ipus import Ipus
from ipucnn.diagnosis.look import Disk, Gpu, Host, Poprun, Probe
from ipucnn.documents import load_json
from ipucnn.errors import UserError
from ipucnn.sessions.poplar import surroundings
from ipucnn.sessions.poplar.surroundings import Surroundings
from ipucnn.text import counted, size_text

_LEVELS = ("problem", "warning", "note")
_SMALL_MEMORY_BYTES = 2 * 2**30
_SMALL_DISK_BYTES = 2**30
_PARTITION = "IPUOF_VIPU_API_PARTITION_ID"  # names the partition of an IPU-POD


@dataclass(frozen=True)
class Finding:
    """Something to know.

    Attributes:
        level: "problem" (in the way of what was asked for), "warning" or "note".
        topic: "python", "tensorflow", "sdk", "ipu", "poprun", "gpu", "machine" or "disk".
        message, hint: as of an error.
    """

    level: str
    topic: str
    message: str
    hint: Optional[str] = None

    @property
    def rank(self) -> int:
        """Worse ones first."""
        return _LEVELS.index(self.level)


@dataclass(frozen=True)
class Choice:
    """What runs where.

    Attributes:
        asked: "auto", "ipu", "gpu" or "cpu"; empty for a command that needs no device.
        device: "ipu", "gpu" or "cpu"; None where none is used.
        usable: whether it can be.
        reason: why this device, or why not.
        command: that this is about; empty for all that take --device.
        cpu_usable: whether --device cpu would work.
    """

    asked: str
    device: Optional[str]
    usable: bool
    reason: str
    command: str = ""
    cpu_usable: bool = True


def choose(
    asked: str,
    found: Surroundings,
    ipus: Ipus,
    gpus: Sequence[Gpu],
    gpu_problem: Optional[str],
    probe: Optional[Probe],
    poprun: Poprun = Poprun(),
) -> Tuple[Choice, List[Finding]]:
    """The device for ``--device asked``, and what there is to say about it.

    Auto takes IPUs where TensorFlow is the Poplar SDK's, else a GPU, else the CPU; nothing is taken in place of what
    is there but does not work.
    """
    findings = list(_of_tensorflow(found, probe))
    tensorflow_works = not any(f.level == "problem" for f in findings)
    sdk_problems = surroundings.problems(found)
    wants_ipu = asked == "ipu" or (asked == "auto" and found.has_ipu_package)
    if wants_ipu:
        for problem in sdk_problems:
            _add(findings, Finding("problem", "sdk", problem.message, problem.hint))
        for doubt in surroundings.doubts(found):
            _add(findings, Finding("warning", "sdk", doubt.message, doubt.hint))
        own = _of_ipus(found, ipus) if found.has_ipu_package or ipus.tool_found else []
        findings += [*own, *_of_poprun(poprun)]
        broken = [f for f in findings if f.level == "problem"]
        reason = broken[0].message if broken else _why_ipu(found, ipus)
        works = _cpu_works(found, probe) and poprun.problem is None
        return Choice(asked, "ipu", not broken, reason, cpu_usable=works), findings
    if ipus.num_ipus and sdk_problems:
        findings.append(
            Finding(
                "warning",
                "sdk",
                f"there is hardware ({counted(ipus.num_ipus, 'IPU')}), but {sdk_problems[0].message}",
                sdk_problems[0].hint,
            )
        )
    findings += _of_poprun(poprun)
    if not tensorflow_works or poprun.problem is not None:
        broken = [f for f in findings if f.level == "problem"]
        device = asked if asked != "auto" else None
        return Choice(asked, device, False, broken[0].message, cpu_usable=False), findings
    if asked == "cpu":
        choice = Choice(asked, "cpu", True, "asked for")
    else:
        choice = _choose_gpu(asked, gpus, gpu_problem, probe, findings)
    if choice.usable:
        findings.append(_what_no_ipu_means(str(choice.device)))
    return choice, findings


def _add(findings: List[Finding], finding: Finding) -> None:
    if all(finding.message != other.message for other in findings):
        findings.append(finding)


def _cpu_works(found: Surroundings, probe: Optional[Probe]) -> bool:
    return found.versions.get("tensorflow") is not None and (probe is None or probe.error is None)


def _of_tensorflow(found: Surroundings, probe: Optional[Probe]) -> Iterator[Finding]:
    version = found.versions.get("tensorflow")
    if version is None:
        yield Finding(
            "problem",
            "tensorflow",
            "TensorFlow is not installed here",
            "python -m pip install ipucnn; on an IPU system the Poplar SDK's wheel (docs/ipu.md)",
        )
        return
    for package in ("keras", "numpy"):
        if found.versions.get(package) is None:
            yield Finding(
                "problem",
                "tensorflow",
                f"{package} is not installed here",
                f"python -m pip install {package}",
            )
    if probe is not None and probe.error is not None:
        yield Finding("problem", "tensorflow", probe.error.message, probe.error.hint)


def _of_ipus(found: Surroundings, ipus: Ipus) -> List[Finding]:
    if "use_ipu_model" in surroundings.parse_flags(found.variables.get("TF_POPLAR_FLAGS", "")):
        return [
            Finding("warning", "ipu", "TF_POPLAR_FLAGS asks for the software model of an IPU, which is slow")
        ]
    if not ipus.tool_found:
        return [
            Finding(
                "warning",
                "ipu",
                "gc-info is not on PATH: nothing says how many IPUs there are",
                "install the driver's command line tools, or type: source PATH/TO/poplar_sdk-*/enable",
            )
        ]
    if not ipus.num_ipus:
        return [Finding("problem", "ipu", ipus.problem or "no IPU is visible", _partition_hint(found))]
    if ipus.num_busy == ipus.num_ipus:
        users = sorted({process.user for process in ipus.processes or () if process.user})
        return [
            Finding(
                "warning",
                "ipu",
                f"no IPU of {ipus.num_ipus} is free" + (f": in use by {', '.join(users)}" if users else ""),
                "a run waits for them with --on-demand, the default; gc-monitor shows who uses them",
            )
        ]
    if ipus.remote_buffers is False:
        return [
            Finding(
                "warning",
                "ipu",
                "these IPUs have no remote buffers: nothing of a program can be kept outside of their own memory",
                "add --no-optimizer-state-offloading; plan-splits with it says what still fits",
            )
        ]
    return []


def _of_poprun(poprun: Poprun) -> List[Finding]:
    if poprun.problem is None:
        return []
    return [Finding("problem", "poprun", poprun.problem.message, poprun.problem.hint)]


def _partition_hint(found: Surroundings) -> str:
    if found.variables.get(_PARTITION) or found.variables.get("IPUOF_CONFIG_PATH"):
        return "is the partition that IPUOF_... names active? vipu list partition"
    return "on an IPU-POD: export IPUOF_VIPU_API_HOST=HOST IPUOF_VIPU_API_PARTITION_ID=PARTITION"


def _why_ipu(found: Surroundings, ipus: Ipus) -> str:
    sdk = surroundings.sdk_version(found)
    name = f"Poplar SDK {sdk}" if sdk else "the Poplar SDK"
    if not ipus.num_ipus:
        return f"TensorFlow is that of {name}"
    boards = f" ({ipus.board})" if ipus.board else ""
    return f"TensorFlow is that of {name}, and {counted(ipus.num_ipus, 'IPU')}{boards} are visible"


def _choose_gpu(
    asked: str,
    gpus: Sequence[Gpu],
    gpu_problem: Optional[str],
    probe: Optional[Probe],
    findings: List[Finding],
) -> Choice:
    """A GPU if there is one, for "gpu" and "auto"."""
    count, reason = len(gpus), gpu_problem
    if probe is not None:
        count = int(probe.answer.get("gpus", 0))
        if gpus and not count:
            reason = "TensorFlow sees none of the driver's GPUs"
            findings.append(
                Finding(
                    "warning",
                    "gpu",
                    f"{reason}: {gpus[0].name}",
                    "python -m pip install 'tensorflow[and-cuda]'",
                )
            )
    if count:
        it = "it" if count == 1 else "them"
        names = ", ".join(gpu.name for gpu in gpus) if gpus else "a GPU" if count == 1 else f"{count} GPUs"
        if len({gpu.name for gpu in gpus}) > 1:
            findings.append(
                Finding(
                    "warning",
                    "gpu",
                    "the GPUs are of different kinds: which of them computes what decides the last digits",
                    "export CUDA_VISIBLE_DEVICES=0 for one of them, or train with --devices 1",
                )
            )
        sure = f"TensorFlow sees {it}" if probe else f"if TensorFlow can use {it}, which --deep tells"
        return Choice(asked, "gpu", True, f"{names}; {sure}")
    if asked == "gpu":
        message = f"there is no GPU to use: {reason}"
        findings.append(Finding("problem", "gpu", message, "use --device cpu"))
        return Choice(asked, "gpu", False, message)
    return Choice(asked, "cpu", True, "there is neither the Poplar SDK's TensorFlow nor a GPU here")


def _what_no_ipu_means(device: str) -> Finding:
    return Finding(
        "note",
        "ipu",
        f"no IPU is used: runs compute on the {device.upper()} with the IPU's semantics (micro-batches, accumulation, "
        "replicas, stages); what they measure is this machine's speed, and figures of IPUs are predicted",
    )


def command_devices(choice: Choice, poprun: Poprun) -> Iterator[Choice]:
    """What each command would run on."""
    from ipucnn.command_table import COMMANDS
    from ipucnn.config.options import find_spec

    spec = find_spec("device")
    assert spec is not None
    for name in COMMANDS:
        if name == "doctor":
            continue
        if name in spec.commands:
            yield _under_poprun(choice, name, poprun)
        elif name == "plan-splits":
            reason = "plans on the host; the networks' layers are shipped, others TensorFlow reads once"
            yield Choice("", "cpu", True, reason, name)
        else:
            yield Choice("", "cpu", True, "works on the host", name)


_TOGETHER = ("train", "evaluate", "infer", "benchmark")
"""The commands that several instances of poprun share."""


def _under_poprun(choice: Choice, command: str, poprun: Poprun) -> Choice:
    """IPUs work together in several processes, a host computes in one."""
    own = replace(choice, command=command)
    count = poprun.instances.count
    if not choice.usable or not poprun.instances.is_distributed:
        return own
    if command not in _TOGETHER:
        return replace(own, usable=False, reason="refused under poprun: it works in one process")
    if choice.device == "ipu":
        reason = f"{choice.reason}; with PopDist, as one of {counted(count, 'instance')} of poprun"
        return replace(own, reason=reason)
    if count > 1:
        reason = f"refused with {count} instances of poprun: only IPUs work together"
        return replace(own, usable=False, reason=reason)
    return own


def of_variables(found: Surroundings) -> List[Finding]:
    """What is odd in the environment, whatever the device."""
    findings = []
    for name in ("POPLAR_ENGINE_OPTIONS", "POPLAR_RUNTIME_OPTIONS", "POPLAR_TARGET_OPTIONS"):
        text = found.variables.get(name)
        if not text:
            continue
        try:
            options = load_json(text)
        except ValueError:
            options = None
        if not isinstance(options, dict):
            findings.append(
                Finding("warning", "sdk", f"{name} is no JSON object: Poplar refuses it", f"unset {name}")
            )
        elif name == "POPLAR_ENGINE_OPTIONS" and str(options.get("autoReport.all")).lower() == "true":
            findings.append(
                Finding(
                    "warning",
                    "sdk",
                    "POPLAR_ENGINE_OPTIONS profiles every run, which is slower and compiles everything again",
                    "unset POPLAR_ENGINE_OPTIONS unless you profile",
                )
            )
    return findings


def of_host(host: Host, disk: Disk) -> List[Finding]:
    """What is short on this machine, whatever the device."""
    findings = []
    if not disk.writable:
        findings.append(
            Finding(
                "problem",
                "disk",
                f"runs cannot be written to {disk.folder}",
                "use --run-dir DIR, or another folder",
            )
        )
    elif disk.free_bytes < _SMALL_DISK_BYTES:
        findings.append(
            Finding(
                "warning",
                "disk",
                f"only {size_text(disk.free_bytes)} are free for runs in {disk.folder}",
                "free some space, or use --run-dir on another disk",
            )
        )
    if 0 < host.available_bytes < _SMALL_MEMORY_BYTES:
        findings.append(
            Finding(
                "warning",
                "machine",
                f"only {size_text(host.available_bytes)} of memory are free",
                "use a small model, --micro-batch-size or --limit-train",
            )
        )
    return findings


def next_steps(choice: Choice, findings: Sequence[Finding], ipus: Ipus, deep: bool) -> List[str]:
    """What to type, most useful first."""
    steps = [f.hint for f in findings if f.level == "problem" and f.hint is not None]
    if not choice.usable:
        if choice.asked != "cpu" and choice.cpu_usable:
            steps.append("until then: --device cpu computes on the host with the IPU's semantics")
        return list(dict.fromkeys(steps))
    if choice.device == "ipu":
        steps.append(
            "ipucnn train lenet: a first run on IPUs; docs/contributing/hardware-checklist.md has what to look at"
        )
        if ipus.num_ipus > 1:
            steps.append(
                f"ipucnn plan-splits resnet50 --ipus {ipus.num_ipus}: how to spend them on a network"
            )
    else:
        steps.append("ipucnn train lenet: a first run")
        steps.append("ipucnn plan-splits resnet50 --stages 4: what IPUs would do, predicted")
    if not deep:
        steps.append("ipucnn doctor --deep: imports TensorFlow, too, in a process of its own")
    return list(dict.fromkeys(steps))


def as_error(choice: Choice, findings: Sequence[Finding]) -> Optional[UserError]:
    """The error of a device that cannot be used; None if it can."""
    from ipucnn.errors import MissingError

    if choice.usable:
        return None
    worst = next((f for f in findings if f.level == "problem"), None)
    return MissingError(
        f"--device {choice.asked} cannot be used: {choice.reason}",
        (worst.hint if worst else None) or "--device cpu runs everywhere",
    )
