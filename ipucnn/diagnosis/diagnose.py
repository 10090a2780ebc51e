"""Diagnoses the machine: its facts, the chosen device with the reason, and the next steps."""

import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

from ipucnn.diagnosis import look
from ipucnn.diagnosis.decision import (
    PROBLEM,
    ChosenDevice,
    DeviceFinding,
    Machine,
    choose,
    command_devices,
    next_steps,
)
from ipucnn.diagnosis.ipus import find_ipus
from ipucnn.models.custom_ops import crop_library
from ipucnn.sessions.host.gpus import find_gpus
from ipucnn.sessions.poplar import sdk_environment

SCHEMA_VERSION = 2

# The prefixes of variables that determine which IPUs there are and how they are used.
_PREFIXES = ("IPUOF_", "POPDIST_", "POPLAR_", "POPLIBS_", "TF_POPLAR_", "GCDA_")
_NAMES = ("CUDA_VISIBLE_DEVICES", "IPUCNN_CACHE_DIR", "IPUCNN_CUSTOM_OPS")


@dataclass(frozen=True)
class Diagnosis:
    """The contents of ``ipucnn doctor``'s report.

    Attributes:
        machine: the facts that determine which device is used.
        choice: the requested device, and the one that is used.
        commands: the device of each command.
        datasets: the place of each data set, None for missing ones.
        findings: the findings, problems first.
        next_steps: what to type, most useful first.
    """

    machine: Machine
    choice: ChosenDevice
    commands: Tuple[ChosenDevice, ...]
    host: look.Host
    disk: look.Disk
    dataset_path: str
    datasets: Dict[str, Optional[str]]
    findings: Tuple[DeviceFinding, ...]
    next_steps: Tuple[str, ...]

    @property
    def sdk(self) -> Dict[str, Any]:
        """Returns the Poplar SDK's facts: version, whether it is enabled and from where."""
        software, library = self.machine.software, crop_library()
        path = software.variables.get("POPLAR_SDK_ENABLED") or None
        return {
            "version": sdk_environment.sdk_version(software),
            "enabled": path is not None,
            "path": path,
            "tensorflow": software.has_ipu_package,
            "modules": {name: name in software.modules for name in sdk_environment.SDK_MODULES},
            "custom_ops": None if library is None else str(library),
        }

    @property
    def variables(self) -> Dict[str, str]:
        """Returns the environment variables that affect IPUs and GPUs."""
        every = self.machine.software.variables
        return {name: every[name] for name in sorted(every) if name.startswith(_PREFIXES) or name in _NAMES}

    def to_dict(self) -> Dict[str, Any]:
        """Returns plain values, ready for JSON; all keys are always present."""
        from ipucnn import __version__

        machine, probe = self.machine, self.machine.probe

        def of_choice(choice: ChosenDevice, *names: str) -> Dict[str, Any]:
            return {name: getattr(choice, name) for name in (*names, "device", "usable", "reason")}

        return {
            "schema_version": SCHEMA_VERSION,
            "ipucnn": __version__,
            "asked": self.choice.requested,
            **of_choice(self.choice),
            "commands": [of_choice(choice, "command") for choice in self.commands],
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": dict(machine.software.versions),
            "sdk": self.sdk,
            "ipus": machine.ipus.to_dict(),
            "gpus": [asdict(gpu) for gpu in machine.gpus],
            "gpu_problem": machine.gpu_problem,
            "host": asdict(self.host),
            "disk": asdict(self.disk),
            "dataset_path": self.dataset_path,
            "datasets": self.datasets,
            "variables": self.variables,
            "probe": probe and {**probe.answer, "error": probe.error and probe.error.message},
            "findings": [asdict(finding) for finding in self.findings],
            "next_steps": list(self.next_steps),
        }


def diagnose(requested: str = "auto", *, dataset_path: Path = Path("."), full: bool = False) -> Diagnosis:
    """Diagnoses this machine.

    Args:
        requested: the device, as for ``--device``.
        dataset_path: the folder in which to look for data sets.
        full: whether to import TensorFlow in another process.
    """
    software = sdk_environment.read_sdk_environment()
    gpus, gpu_problem = find_gpus()
    can_probe = full and software.versions.get("tensorflow") is not None
    probe = look.probe_tensorflow() if can_probe else None
    machine = Machine(software, find_ipus(), tuple(gpus), gpu_problem, probe)
    choice, findings = choose(requested, machine)
    findings.sort(key=lambda finding: finding.level != PROBLEM)
    return Diagnosis(
        machine=machine,
        choice=choice,
        commands=tuple(command_devices(choice)),
        host=look.find_host(),
        disk=look.find_disk(Path("runs")),
        dataset_path=str(dataset_path),
        datasets=look.find_datasets(dataset_path),
        findings=tuple(findings),
        next_steps=tuple(next_steps(choice, findings, machine)),
    )
