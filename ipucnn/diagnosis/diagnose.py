"""Everything found here, the device that is used and why, and what to do next."""

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from ipucnn.diagnosis import look
from ipucnn.diagnosis.decision import PROBLEM, Choice, Finding, choose, command_devices, next_steps, problem
from ipucnn.diagnosis.ipus import Ipus, find_ipus
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
        surroundings: Python, packages and the Poplar SDK.
        poprun: what it told this process.
        cluster: the workers that this process is one of.
        gpu_problem: why there are no GPUs.
        datasets: where each data set lies, None for those that are not there.
        probe: of TensorFlow, None without --deep.
        findings: problems first.
        next_steps: what to type, most useful first.
    """

    choice: Choice
    commands: Tuple[Choice, ...]
    surroundings: Surroundings
    ipus: Ipus
    poprun: look.Poprun
    cluster: look.HostCluster
    gpus: Tuple[look.Gpu, ...]
    gpu_problem: Optional[str]
    host: look.Host
    disk: look.Disk
    dataset_path: str
    datasets: Dict[str, Optional[str]]
    probe: Optional[look.Probe]
    findings: Tuple[Finding, ...]
    next_steps: Tuple[str, ...]

    @property
    def sdk(self) -> Dict[str, Any]:
        """The Poplar SDK: version, whether it is enabled and from where."""
        found, library = self.surroundings, crop_library()
        return {
            "version": surroundings.sdk_version(found),
            "enabled": bool(found.variables.get("POPLAR_SDK_ENABLED")),
            "path": found.variables.get("POPLAR_SDK_ENABLED") or None,
            "tensorflow": found.has_ipu_package,
            "modules": {name: name in found.modules for name in surroundings.SDK_MODULES},
            "custom_ops": None if library is None else str(library),
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

        def of_choice(choice: Choice, *names: str) -> Dict[str, Any]:
            return {name: getattr(choice, name) for name in (*names, "device", "usable", "reason")}

        return {
            "schema_version": SCHEMA_VERSION,
            "ipucnn": __version__,
            **of_choice(self.choice, "asked"),
            "commands": [of_choice(choice, "command") for choice in self.commands],
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
            "probe": probe and {**probe.answer, "error": probe.error and probe.error.message},
            "findings": [asdict(finding) for finding in self.findings],
            "next_steps": list(self.next_steps),
        }


def diagnose(asked: str = "auto", *, dataset_path: Path = Path("."), deep: bool = False) -> Diagnosis:
    """Looks at this machine.

    Args:
        asked: as for ``--device``.
        dataset_path: where data sets are looked for.
        deep: import TensorFlow in another process.
    """
    found, ipus = surroundings.look_around(), find_ipus()
    gpus, gpu_problem = look.find_gpus()
    can_probe = deep and found.versions.get("tensorflow") is not None
    probe = look.probe_tensorflow() if can_probe else None
    poprun, cluster = look.find_poprun(found.variables), look.find_cluster(os.environ)
    choice, findings = choose(asked, found, ipus, gpus, gpu_problem, probe, poprun)
    of_cluster: List[Finding] = [] if cluster.problem is None else [problem("cluster", cluster.problem)]
    findings = sorted([*findings, *of_cluster], key=lambda finding: finding.level != PROBLEM)
    return Diagnosis(
        choice=choice,
        commands=tuple(command_devices(choice, poprun)),
        surroundings=found,
        ipus=ipus,
        poprun=poprun,
        cluster=cluster,
        gpus=tuple(gpus),
        gpu_problem=gpu_problem,
        host=look.look_at_host(),
        disk=look.look_at_disk(Path("runs")),
        dataset_path=str(dataset_path),
        datasets=look.find_datasets(dataset_path),
        probe=probe,
        findings=tuple(findings),
        next_steps=tuple(next_steps(choice, findings, ipus, deep)),
    )
