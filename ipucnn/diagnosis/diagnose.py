"""Everything found here, the device that is used and why, and what to do next."""

import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from ipucnn.diagnosis.decision import Choice, Finding, choose, command_devices
from ipucnn.diagnosis.ipus import Ipus, find_ipus
from ipucnn.diagnosis.machine import Disk, Gpu, Host, find_datasets, find_gpus, look_at_disk, look_at_host
from ipucnn.diagnosis.poprun import Poprun, find_poprun
from ipucnn.diagnosis.probe import Probe, probe_tensorflow
from ipucnn.documents import load_json
from ipucnn.sessions.poplar import surroundings
from ipucnn.sessions.poplar.surroundings import Surroundings

__all__ = ["SCHEMA_VERSION", "Diagnosis", "diagnose"]

SCHEMA_VERSION = 1

# Variables that decide which IPUs there are and what is done on them, by what they begin with.
_PREFIXES = ("IPUOF_", "POPDIST_", "POPLAR_", "POPLIBS_", "TF_POPLAR_", "GCDA_")
_NAMES = ("CUDA_VISIBLE_DEVICES", "IPUCNN_CACHE_DIR", "IPUCNN_CUSTOM_OPS")

_SMALL_MEMORY_BYTES = 2 * 2**30
_SMALL_DISK_BYTES = 2**30


@dataclass(frozen=True)
class Diagnosis:
    """What ``ipucnn doctor`` says.

    Attributes:
        choice: device that was asked for, and the one that is used.
        commands: what each command would run on.
        surroundings, sdk: Python, packages and the Poplar SDK; ``sdk`` as for ``to_dict``.
        poprun: what it told this process.
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

        ipus = asdict(self.ipus)
        ipus["num_busy"] = self.ipus.num_busy
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
            "ipus": ipus,
            "poprun": self.poprun.to_dict(),
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
    run_folder: Path = Path("runs"),
    deep: bool = False,
    timeout_s: Optional[float] = None,
) -> Diagnosis:
    """Looks at this machine.

    Args:
        asked: as for ``--device``.
        dataset_path: where data sets are looked for.
        run_folder: where runs would be written.
        deep: import TensorFlow in another process.
        timeout_s: for that process; None for the usual one.
    """
    found = surroundings.look_around()
    ipus = find_ipus()
    gpus, gpu_problem = find_gpus()
    probe = None
    if deep and found.versions.get("tensorflow") is not None:
        probe = probe_tensorflow(*(() if timeout_s is None else (timeout_s,)))
    host, disk = look_at_host(), look_at_disk(run_folder)
    poprun = find_poprun(found.variables)
    choice, findings = choose(asked, found, ipus, gpus, gpu_problem, probe, poprun)
    findings = sorted(
        [*findings, *_of_variables(found), *_of_host(host, disk, run_folder)], key=lambda f: f.rank
    )
    return Diagnosis(
        choice=choice,
        commands=tuple(command_devices(choice, poprun)),
        surroundings=found,
        ipus=ipus,
        poprun=poprun,
        gpus=tuple(gpus),
        gpu_problem=gpu_problem,
        host=host,
        disk=disk,
        dataset_path=str(dataset_path),
        datasets=find_datasets(dataset_path),
        probe=probe,
        findings=tuple(findings),
        next_steps=tuple(_next_steps(choice, findings, ipus, deep)),
    )


def _custom_ops() -> Optional[str]:
    from ipucnn.models.custom_ops import crop_library

    library = crop_library()
    return None if library is None else str(library)


def _of_variables(found: Surroundings) -> List[Finding]:
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


def _of_host(host: Host, disk: Disk, run_folder: Path) -> List[Finding]:
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
                f"only {disk.free_bytes / 2**20:,.0f} MiB are free for runs in {disk.folder}",
                "free some space, or use --run-dir on another disk",
            )
        )
    if 0 < host.available_bytes < _SMALL_MEMORY_BYTES:
        findings.append(
            Finding(
                "warning",
                "machine",
                f"only {host.available_bytes / 2**30:.1f} GiB of memory are free",
                "use a small model, --micro-batch-size or --limit-train",
            )
        )
    return findings


def _next_steps(choice: Choice, findings: List[Finding], ipus: Ipus, deep: bool) -> List[str]:
    steps = [f.hint for f in findings if f.level == "problem" and f.hint is not None]
    if not choice.usable:
        if choice.asked != "cpu" and choice.cpu_usable:
            steps.append("until then: --device cpu computes on the host with the IPU's semantics")
        return list(dict.fromkeys(steps))
    if choice.device == "ipu":
        steps.append(
            "ipucnn train lenet: a first run on IPUs; docs/hardware-checklist.md has what to look at"
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
