"""The settings of a benchmark besides the options of a run, and the checks that need no TensorFlow."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Optional, Tuple

from ipucnn.benchmarking.measure import MIN_ROUNDS
from ipucnn.benchmarking.records import Limits
from ipucnn.config import values
from ipucnn.config.options import RunConfig
from ipucnn.errors import ConfigurationError, did_you_mean
from ipucnn.filesystem import expand
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
    min_executions=10,
    min_time_s=10.0,
    max_time_s=150.0,
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
    """The settings of a measurement and its comparison.

    Attributes:
        mode: TRAINING or INFERENCE.
        scope: SESSION: the network on its data; DATA: the input pipeline that feeds it, alone; END_TO_END: the
            network on its data, beside the network on a constant batch and the pipeline alone.
        limits: the limits of time and executions, and the program to compare with.
        system: the IPU machine to predict for, None for the smallest suitable one.
        profile: the measurements of the IPU machine.
        baseline: an earlier report.json to compare with.
        max_regression: the share of the baseline's speed that may be lost.
    """

    mode: str = INFERENCE
    scope: str = SESSION
    limits: Limits = DEFAULTS
    system: Optional[str] = None
    profile: Optional["SystemProfile"] = None
    baseline: Optional[Path] = None
    max_regression: float = 0.05

    @property
    def training(self) -> bool:
        """Tells whether weight updates are measured."""
        return self.mode == TRAINING

    @property
    def compare_with(self) -> Optional[str]:
        """Returns "keras", or None."""
        return self.limits.compare_with


def data_kind(config: RunConfig) -> str:
    """Returns the source of a run's images: a key of ``DATA_KINDS``."""
    if config.device_generated_data or config.synthetic_data == "ipu":
        return DEVICE_GENERATED
    is_noise = config.host_generated_data or config.synthetic_data == "host" or config.dataset == "random"
    return HOST_GENERATED if is_noise else REAL


def make_settings(
    *,
    training: Optional[bool] = None,
    mode: Optional[str] = None,
    executions: int = DEFAULTS.min_executions,
    min_time: Optional[float] = None,
    max_time: float = DEFAULTS.max_time_s,
    compare_with: Optional[str] = None,
    system: Optional[str] = None,
    system_profile: Optional[str] = None,
    baseline: Optional[str] = None,
    max_regression: Optional[str] = None,
) -> BenchmarkSettings:
    """Returns checked settings from the typed options.

    Args:
        training: ``--training`` (True) or ``--inference`` (False); None: as ``mode`` implies.
        mode: one of ``MODES``.
        executions, min_time, max_time: see ``Limits``; the default of the least time is at most ``max_time``.
        compare_with, system, baseline, max_regression: see :class:`BenchmarkSettings`.
        system_profile: the file with the profile.

    Raises:
        ConfigurationError: a wrong option; the message names it, its value and the nearest legal one.
    """
    work, scope = work_and_scope(training, mode)
    for option, given in (("--compare-with", compare_with), ("--baseline", baseline)):
        if given and scope != SESSION:
            raise ConfigurationError(
                f"{option} compares the network's speed, and --mode {scope} measures something else",
                f"drop {option}, or use --mode {work}",
            )
    if max_regression is not None and baseline is None:
        raise ConfigurationError(
            f"--max-regression {shown_value(max_regression)} needs something to compare with",
            "add --baseline report.json",
        )
    if system is not None:
        from ipucnn.hardware import get_system

        system = get_system(system).name
    return BenchmarkSettings(
        mode=work,
        scope=scope,
        limits=_limits(executions, min_time, max_time, _rival(compare_with)),
        system=system,
        profile=_profile(system_profile, system) if system_profile is not None else None,
        baseline=expand(baseline) if baseline is not None else None,
        max_regression=_share(max_regression or "5%"),
    )


def _limits(
    executions: int, min_time_s: Optional[float], max_time_s: float, compare_with: Optional[str]
) -> Limits:
    """Returns the limits; the command line has refused values that are no number of executions or seconds."""
    if executions < MIN_ROUNDS:
        raise ConfigurationError(
            f"--executions {executions}: fewer than {MIN_ROUNDS} show no spread",
            f"use --executions {MIN_ROUNDS}",
        )
    if min_time_s is None:
        min_time_s = min(DEFAULTS.min_time_s, max_time_s)
    if max_time_s < min_time_s:
        raise ConfigurationError(
            f"--max-time {max_time_s:g} is less than --min-time {min_time_s:g}",
            f"use --max-time {min_time_s:g}",
        )
    return Limits(
        min_executions=executions,
        min_time_s=min_time_s,
        max_time_s=max_time_s,
        max_warmup_s=DEFAULTS.max_warmup_s,
        execution_s=COMPARED_EXECUTION_S if compare_with is not None else DEFAULTS.execution_s,
        compare_with=compare_with,
    )


def _rival(compare_with: Optional[str]) -> Optional[str]:
    """Returns the name of the program to compare the session with, "keras", or None."""
    if compare_with is None:
        return None
    if compare_with.lower() != KERAS:
        raise ConfigurationError(
            f"--compare-with {shown_value(compare_with)}: there is no such rival",
            did_you_mean(compare_with, (KERAS,)) or f"use --compare-with {KERAS}",
        )
    return compare_with.lower()


def _profile(path: str, system: Optional[str]) -> "SystemProfile":
    """Returns the profile of ``--system-profile``, checked against the system."""
    from ipucnn.hardware import SYSTEMS
    from ipucnn.planning.calibration import calibrated_system, read_profile

    profile = read_profile(expand(path))
    calibrated_system(profile, SYSTEMS[system or profile.system])
    return profile


def work_and_scope(training: Optional[bool], mode: Optional[str]) -> Tuple[str, str]:
    """Returns (TRAINING or INFERENCE, scope) of ``--mode`` and ``--training`` or ``--inference``."""
    flag = None if training is None else TRAINING if training else INFERENCE
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
    if flag not in (None, name):
        raise ConfigurationError(f"--mode {name} and --{flag} contradict each other", "drop one of them")
    return name, SESSION


def check_settings(settings: BenchmarkSettings, kind: str, num_instances: int) -> None:
    """Refuses options that cannot be measured.

    These are modes that measure an absent input pipeline, and options for one process under several instances of
    ``poprun``, because each instance would measure only its own host.

    Raises:
        ConfigurationError: an option cannot be measured; the message names it.
    """
    if settings.scope != SESSION and kind == DEVICE_GENERATED:
        raise ConfigurationError(
            f"--mode {settings.scope} measures the input pipeline, and --device-generated-data has none",
            "use --host-generated-data, or a data set",
        )
    alone = {
        f"--mode {settings.scope}": settings.scope != SESSION,
        f"--compare-with {settings.compare_with}": settings.compare_with is not None,
        f"--baseline {settings.baseline}": settings.baseline is not None,
    }
    for option, given in alone.items():
        if given and num_instances > 1:
            raise ConfigurationError(
                f"{option} is for one process, and poprun started {num_instances} instances",
                "drop it, or start the benchmark without poprun",
            )


def _share(text: str) -> float:
    """Returns ``5%`` or ``0.05`` as a share."""
    percent = text.strip().endswith("%")
    try:
        share = values.parse_float(text.strip().rstrip("%").strip()) / (100.0 if percent else 1.0)
    except values.BadValue:
        share = -1.0
    if not 0 <= share < 1:
        raise ConfigurationError(
            f"--max-regression {shown_value(text)}: must be a share below 1 or a percentage below 100%",
            "--max-regression 5%",
        )
    return share
