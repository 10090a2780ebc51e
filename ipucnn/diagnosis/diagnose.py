"""Everything found here, the device that is used and why, and what to do next."""

import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

from ipucnn.diagnosis.decision import (
    Choice,
    Finding,
    choose,
    command_devices,
    next_steps,
    of_host,
    of_variables,
)
from ipucnn.diagnosis.ipus import Ipus, find_ipus
from ipucnn.diagnosis.look import (
    Disk,
    Gpu,
    Host,
    HostCluster,
    Poprun,
    Probe,
    find_cluster,
    find_datasets,
    find_gpus,
    find_poprun,
    look_at_disk,
    look_at_host,
    probe_tensorflow,
)
from ipucnn.models.custom_ops import crop_library
from ipucnn.sessions.poplar import surroundings
from ipucnn.sessions.poplar.surroundings import Surroundings

SCHEMA_VERSION = 1

# Variables that decide which IPUs there are and what is done on them, by what they begin with.
_PREFIXES = ("IPUOF_", "POPDIST_", "POPLAR_", "POPLIBS_", "TF_POPLAR_", "GCDA_")
_NAMES = ("CUDA_VISIBLE_DEVICES", "IPUCNN_CACHE_DIR", "IPUCNN_CUSTOM_OPS")


@dataclass(frozen=True)
class Diagnosis:
    """What ``ipucnn doctor`` says.

    Attributes:
        choice: device that was asked for, and the one that is used.
        commands: what each command would run on.
        surroundings, sdk: Python, packages and the Poplar SDK; ``sdk`` as for ``to_dict``.
        poprun: what it told this process.
        cluster: the workers that this process is one of.
        gpu_problem: why there are no GPUs.
        probe: of TensorFlow, None without --deep.
        findings: problems first.
        next_steps: what to type, most useful first.
    """

    choice: Choice
    commands: Tuple[Choice, ...]
    surroundings: Surroundings = field(repr=False)
    ipus: Ipus
    poprun: Poprun
    cluster: HostCluster
    gpus: Tuple[Gpu, ...]
    gpu_problem: Optional[str]
    host: Host
    disk: Disk
    dataset_path: str
    datasets: Dict[str, Optional[str]]
    probe: Optional[Probe]
    findings: Tuple[Finding, ...]
    next_steps: Tuple[str, ...]

    @property
    def sdk(self) -> Dict[str, Any]:
        """The Poplar SDK: version, whether it is enabled and from where."""
        found = self.surroundings
        return {
            "version": surroundings.sdk_version(found),
            "enabled": bool(found.variables.get("POPLAR_SDK_ENABLED")),
            "path": found.variables.get("POPLAR_SDK_ENABLED") or None,
            "tensorflow": found.has_ipu_package,
            "modules": {name: name in found.modules for name in surroundings.SDK_MODULES},
            "custom_ops": _custom_ops(),
        }

    @property
    def variables(self) -> Dict[str, str]:
        """Environment variables that count on IPUs and GPUs."""
        every = self.surroundings.variables
        return {name: every[name] for name in sorted(every) if name.startswith(_PREFIXES) or name in _NAMES}

    def to_dict(self) -> Dict[str, Any]:
        """Plain values, ready for JSON; keys are always there."""
        from ipucnn import __version__

        probe = self.probe
        return {
            "schema_version": SCHEMA_VERSION,
            "ipucnn": __version__,
            "asked": self.choice.asked,
            "device": self.choice.device,
            "usable": self.choice.usable,
            "reason": self.choice.reason,
            "commands": [
                {"command": c.command, "device": c.device, "usable": c.usable, "reason": c.reason}
                for c in self.commands
            ],
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": dict(self.surroundings.versions),
            "sdk": self.sdk,
            "ipus": self.ipus.to_dict(),
            "poprun": self.poprun.to_dict(),
            "cluster": self.cluster.to_dict(),
            "gpus": [asdict(gpu) for gpu in self.gpus],
            "gpu_problem": self.gpu_problem,
            "host": asdict(self.host),
            "disk": asdict(self.disk),
            "dataset_path": self.dataset_path,
            "datasets": self.datasets,
            "variables": self.variables,
            "probe": None
            if probe is None
            else {**probe.answer, "error": None if probe.error is None else probe.error.message},
            "findings": [asdict(finding) for finding in self.findings],
            "next_steps": list(self.next_steps),
        }


def diagnose(
    asked: str = "auto",
    *,
    dataset_path: Path = Path("."),
    deep: bool = False,
) -> Diagnosis:
    """Looks at this machine.

    Args:
        asked: as for ``--device``.
        dataset_path: where data sets are looked for.
        deep: import TensorFlow in another process.
    """
    found = surroundings.look_around()
    ipus = find_ipus()
    gpus, gpu_problem = find_gpus()
    probe = None
    if deep and found.versions.get("tensorflow") is not None:
        probe = probe_tensorflow()
    host, disk = look_at_host(), look_at_disk(Path("runs"))
    poprun = find_poprun(found.variables)
    choice, findings = choose(asked, found, ipus, gpus, gpu_problem, probe, poprun)
    cluster = find_cluster(os.environ)
    if cluster.problem is not None:
        findings.append(Finding("problem", "cluster", cluster.problem.message, cluster.problem.hint))
    findings = sorted([*findings, *of_variables(found), *of_host(host, disk)], key=lambda f: f.rank)
    return Diagnosis(
        choice=choice,
        commands=tuple(command_devices(choice, poprun)),
        surroundings=found,
        ipus=ipus,
        poprun=poprun,
        cluster=cluster,
        gpus=tuple(gpus),
        gpu_problem=gpu_problem,
        host=host,
        disk=disk,
        dataset_path=str(dataset_path),
        datasets=find_datasets(dataset_path),
        probe=probe,
        findings=tuple(findings),
        next_steps=tuple(next_steps(choice, findings, ipus, deep)),
    )


def _custom_ops() -> Optional[str]:
    library = crop_library()
    return None if library is None else str(library)
