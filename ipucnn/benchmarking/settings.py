"""The settings of a benchmark: what it measures, for how long, and what it is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Optional, Tuple

from ipucnn.benchmarking.records import Limits
from ipucnn.config import bounds
from ipucnn.config.options import RunConfig
from ipucnn.errors import ConfigurationError, did_you_mean
from ipucnn.text import shown_value

if TYPE_CHECKING:
    from ipucnn.planning.calibration import SystemProfile

TRAINING, INFERENCE = "training", "inference"
SESSION, DATA, END_TO_END = "session", "data", "end-to-end"
MODES = (TRAINING, INFERENCE, DATA, END_TO_END)
KERAS = "keras"
# A call of Keras' fit takes some 50 ms whatever its work: executions are long enough to make this negligible.
COMPARED_EXECUTION_S = 2.0
DEFAULTS = Limits(
    min_executions=bounds.DEFAULT_EXECUTIONS,
    min_time_s=bounds.DEFAULT_MIN_TIME_S,
    max_time_s=bounds.DEFAULT_MAX_TIME_S,
    max_warmup_s=15.0,
    execution_s=0.1,
    compare_with=None,
)
HOST_GENERATED, DEVICE_GENERATED, REAL = "host-generated", "device-generated", "real"
DATA_KINDS = {
    HOST_GENERATED: "random images, generated once on the host and fed through the input pipeline",
    DEVICE_GENERATED: "one constant batch in memory, without input pipeline",
    REAL: "images of the data set, through the input pipeline",
}


@dataclass(frozen=True)
class BenchmarkSettings:
    """The options of a benchmark that runs do not have; ``rules.py`` has those that do not go together.

    Attributes:
        mode: TRAINING or INFERENCE.
        scope: SESSION: the network on its data; DATA: the input pipeline that feeds it, alone; END_TO_END: the
            network on its data, beside the network on a constant batch and the pipeline alone.
        limits: the limits of time and executions, and the program to compare with.
        system: the IPU machine to predict for, None for the smallest suitable one.
        profile: the measurements of the IPU machine.
        baseline: an earlier report.json to compare with.
        max_regression: the share of the baseline's speed that may be lost; None for ``DEFAULT_MAX_REGRESSION``.
        flag: TRAINING or INFERENCE as the flag of that name says; None without it.
    """

    mode: str = INFERENCE
    scope: str = SESSION
    limits: Limits = DEFAULTS
    system: Optional[str] = None
    profile: Optional[SystemProfile] = None
    baseline: Optional[Path] = None
    max_regression: Optional[float] = None
    flag: Optional[str] = None

    @property
    def training(self) -> bool:
        """Tells whether weight updates are measured."""
        return self.mode == TRAINING

    @property
    def allowed_loss(self) -> float:
        """Returns the share of the baseline's speed that may be lost."""
        return bounds.DEFAULT_MAX_REGRESSION if self.max_regression is None else self.max_regression

    @property
    def compare_with(self) -> Optional[str]:
        """Returns "keras", or None."""
        return self.limits.compare_with


def make_settings(
    *,
    training: Optional[bool] = None,
    mode: Optional[str] = None,
    executions: int = DEFAULTS.min_executions,
    min_time: Optional[float] = None,
    max_time: float = DEFAULTS.max_time_s,
    compare_with: Optional[str] = None,
    system: Optional[str] = None,
    system_profile: Optional[Path] = None,
    baseline: Optional[Path] = None,
    max_regression: Optional[float] = None,
) -> BenchmarkSettings:
    """Returns the settings of the typed options.

    Args:
        training: ``--training`` (True) or ``--inference`` (False); None: as ``mode`` implies.
        mode: one of ``MODES``.
        executions, min_time, max_time: see ``Limits``; the default of the least time is at most ``max_time``.
        compare_with, system, baseline, max_regression: see :class:`BenchmarkSettings`.
        system_profile: the file with the profile.

    Raises:
        ConfigurationError: a wrong option; the message names it, its value and the nearest legal one.
    """
    flag = None if training is None else TRAINING if training else INFERENCE
    work, scope = _work_and_scope(flag, mode)
    if system is not None:
        from ipucnn.hardware import get_system

        system = get_system(system).name
    return BenchmarkSettings(
        mode=work,
        scope=scope,
        limits=_limits(executions, min_time, max_time, compare_with),
        system=system,
        profile=_profile(system_profile, system) if system_profile is not None else None,
        baseline=baseline,
        max_regression=max_regression,
        flag=flag,
    )


def _work_and_scope(flag: Optional[str], mode: Optional[str]) -> Tuple[str, str]:
    """Returns (TRAINING or INFERENCE, scope) of ``--mode`` and the flag."""
    if mode is None:
        return flag or INFERENCE, SESSION
    name = mode.lower().replace("_", "-")
    if name not in MODES:
        raise ConfigurationError(
            f"--mode {shown_value(mode)}: there is no such mode",
            did_you_mean(mode, MODES) or f"use one of {', '.join(MODES)}",
        )
    if name in (DATA, END_TO_END):
        return flag or TRAINING, name
    return name, SESSION


def _limits(
    executions: int, min_time_s: Optional[float], max_time_s: float, compare_with: Optional[str]
) -> Limits:
    """Returns the limits; the command line has refused values that are no number of executions or seconds."""
    if compare_with is not None and compare_with.lower() != KERAS:
        raise ConfigurationError(
            f"--compare-with {shown_value(compare_with)}: there is no such rival",
            did_you_mean(compare_with, (KERAS,)) or f"use --compare-with {KERAS}",
        )
    if min_time_s is None:
        min_time_s = min(DEFAULTS.min_time_s, max_time_s)
    return Limits(
        min_executions=executions,
        min_time_s=min_time_s,
        max_time_s=max_time_s,
        max_warmup_s=DEFAULTS.max_warmup_s,
        execution_s=COMPARED_EXECUTION_S if compare_with is not None else DEFAULTS.execution_s,
        compare_with=KERAS if compare_with is not None else None,
    )


def _profile(path: Path, system: Optional[str]) -> SystemProfile:
    """Returns the profile of ``--system-profile``, checked against the system."""
    from ipucnn.hardware import SYSTEMS
    from ipucnn.planning.calibration import calibrated_system, read_profile

    profile = read_profile(path)
    calibrated_system(profile, SYSTEMS[system or profile.system])
    return profile


def data_kind(config: RunConfig) -> str:
    """Returns the source of a run's images: a key of ``DATA_KINDS``."""
    if config.device_generated_data or config.synthetic_data == "ipu":
        return DEVICE_GENERATED
    is_noise = config.host_generated_data or config.synthetic_data == "host" or config.dataset == "random"
    return HOST_GENERATED if is_noise else REAL
