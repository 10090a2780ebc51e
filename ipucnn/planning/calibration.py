"""Fits the cost model to the user's system: three factors on its times.

They are fitted to measured throughputs and, if known, to times of pipeline stages.  The factors are a
maximum a posteriori estimate: least squares of log(predicted / measured), with a log-normal prior around 1, the
package's own value.  A factor that the measurements do not determine (``collective`` if none of them has replicas)
stays 1.  The model's own errors differ from network to network, so measure networks similar to those you plan.
"""

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Callable, List, Literal, Sequence, Tuple

import numpy as np
from msgspec import Meta

import ipucnn
from ipucnn.aliases import Annotated
from ipucnn.documents import read_record, to_record
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.filesystem import shown
from ipucnn.hardware import SYSTEMS, Calibration, System
from ipucnn.models.build import BuildOptions
from ipucnn.models.registry import get_model
from ipucnn.planning.cost.layer_times import LayerTimes, program_times, stage_starts
from ipucnn.planning.cost.memory import program_memory
from ipucnn.planning.cost.products import BAND_FACTOR, DEFAULT_CONSTANTS
from ipucnn.planning.forecast import Forecast, forecast
from ipucnn.planning.graphs.layer_graph import LayerGraph, frozen_graph
from ipucnn.planning.network import network_graph
from ipucnn.planning.pipeline_plan import PipelinePlan
from ipucnn.planning.program import PlannedProgram
from ipucnn.planning.splits import check_cuts, frozen_layers
from ipucnn.text import counted, quoted

FactorName = Literal["compute", "fixed", "collective"]
FACTORS: Tuple[FactorName, ...] = ("compute", "fixed", "collective")
_NAMES = {"compute": "computing", "fixed": "feeds and loop", "collective": "the all-reduce"}
# The factor by which each may be off before any measurement (one standard deviation): the model's error on published
# rows is 1.09, feeds were derived from small networks alone, and the all-reduce from differences between logs.
_PRIOR = np.log([1.25, 2.0, 2.0])
# The expected error of a measurement together with that of the model at its best.
_SIGMA = 0.05
# A factor counts as undetermined if its standard deviation after measuring is more than this share of that before.
_UNDETERMINED = 0.9
_BOUNDS = (0.05, 20.0)
# A factor beyond this, or below its inverse, reveals a faulty measurement rather than a property of the system.
_SUSPICIOUS = 3.0
# The number of standard deviations to either side that contain 80 of 100 values of a normal distribution.
_DEVIATIONS_OF_80 = 1.2816
_HINT = "make it again: ipucnn plan-splits --calibrate RUN... --system NAME --system-profile "


@dataclass(frozen=True)
class Observation:
    """A throughput measured on IPUs, and the program that reached it.

    Attributes:
        source: the file it was read from.
        splits: the layers that open the program's stages.
        stage_s: seconds of forward, recomputation and backward of one micro-batch in each stage; () if not measured.
    """

    source: str
    graph: LayerGraph
    splits: Tuple[str, ...]
    settings: PlannedProgram
    images_per_s: float
    stage_s: Tuple[float, ...] = ()


@dataclass(frozen=True)
class MeasuredRow:
    """A measurement beside the prediction for it.

    Attributes:
        model: the name of the network.
        shipped_images_per_s, calibrated_images_per_s: the predictions without and with the profile.
    """

    source: str
    model: str
    images_per_s: float
    shipped_images_per_s: float
    calibrated_images_per_s: float


Factor = Annotated[float, Meta(ge=_BOUNDS[0], le=_BOUNDS[1])]


@dataclass(frozen=True)
class Factors:
    """The values of ``FACTORS``, as stored in a profile."""

    compute: Factor
    fixed: Factor
    collective: Factor


@dataclass(frozen=True)
class SystemProfile:
    """The result of measurements on a system: the file of ``--system-profile``.

    Attributes:
        system: the name of the measured system.
        told: the factors that the measurements determine; the others are 1.
        error_before, error_after: the geometric mean of the predictions' errors, as a factor.
        band_factor: the factor that bounds the predictions' error in 80 of 100 cases.
    """

    system: Annotated[str, Meta(pattern=f"^({'|'.join(SYSTEMS)})$")]
    factors: Factors
    told: Tuple[FactorName, ...]
    error_before: float
    error_after: float
    band_factor: Annotated[float, Meta(ge=1)] = BAND_FACTOR
    measurements: Tuple[MeasuredRow, ...] = ()
    kind: Literal["ipucnn system profile"] = "ipucnn system profile"
    schema_version: Literal[1] = 1
    ipucnn_version: str = ""

    @property
    def calibration(self) -> Calibration:
        """Returns the factors, and the band of predictions with them."""
        return Calibration(**asdict(self.factors), band_factor=self.band_factor)

    def to_json(self) -> str:
        """Returns the text of a profile; ``read_profile`` reads it."""
        return json.dumps(asdict(self), indent=2) + "\n"


class _Program:
    """A measured program; its partitions over tiles are searched only once."""

    def __init__(self, measured: Observation, system: System) -> None:
        self.measured, self.system = measured, system
        self._ipus = tuple(program_memory(measured.graph, measured.splits, measured.settings, system.ipu))
        starts = stage_starts(measured.graph, measured.splits)
        self._times = program_times(measured.graph, starts, measured.settings, system.ipu)

    def _forecast(self, system: System) -> Forecast:
        measured = self.measured
        times: LayerTimes = replace(self._times, clock_hz=system.ipu.computing_hz)
        layers = times.with_constants(DEFAULT_CONSTANTS)
        return forecast(
            measured.graph, measured.splits, measured.settings, system, ipus=self._ipus, layers=layers
        )

    def log_ratios(self, calibration: Calibration) -> List[float]:
        """Returns log(predicted / measured) of the throughput, then of each stage's speed."""
        measured = self.measured
        prediction = self._forecast(self.system.calibrated(calibration)).times
        ratios = [math.log(prediction.images_per_s / measured.images_per_s)]
        for stage, measured_s in zip(prediction.stages, measured.stage_s):
            ratios.append(math.log(measured_s / (stage.forward_s + stage.backward_s)))
        return ratios


def calibrate(measurements: Sequence[Observation], system: System) -> SystemProfile:
    """Returns the profile fitted to measurements on a system.

    Args:
        system: the system as shipped.

    Raises:
        ConfigurationError: no measurement, or one on more IPUs than the system has.
        DataError: a measurement that no factor within bounds explains.
    """
    if not measurements:
        raise ConfigurationError(
            "--calibrate: nothing was measured",
            "give runs, reports of benchmarks, or plans with images/s",
        )
    for measured in measurements:
        if measured.settings.occupied_ipus > system.num_ipus:
            raise ConfigurationError(
                f"{measured.source} ran on {measured.settings.occupied_ipus} IPUs, and {system.title} has "
                f"{system.num_ipus}",
                "name the system that was measured: --system bow-pod64",
            )
    programs = [_Program(measured, system) for measured in measurements]
    determined = list(range(len(FACTORS)))
    logs, deviations = _fit(programs, determined)
    determined = [i for i in determined if deviations[i] < _UNDETERMINED * _PRIOR[i]]
    logs, _ = _fit(programs, determined)
    low, high = np.log(_BOUNDS)
    if not ((logs > low) & (logs < high)).all():
        raise DataError(
            "--calibrate: no factor between 1/20 and 20 explains these measurements",
            "check that --system is what was measured, and that the reports are of whole runs",
        )
    factors = Factors(*(round(float(factor), 6) for factor in np.exp(logs)))
    calibration = Calibration(**asdict(factors), band_factor=_band_factor(programs, determined))
    before = [program.log_ratios(Calibration())[0] for program in programs]
    after = [program.log_ratios(calibration)[0] for program in programs]
    rows = tuple(
        MeasuredRow(
            measured.source,
            measured.graph.model,
            measured.images_per_s,
            measured.images_per_s * math.exp(shipped),
            measured.images_per_s * math.exp(calibrated),
        )
        for measured, shipped, calibrated in zip(measurements, before, after)
    )
    error_before, error_after = (float(np.exp(np.abs(errors).mean())) for errors in (before, after))
    return SystemProfile(
        system=system.name,
        factors=factors,
        told=tuple(FACTORS[i] for i in determined),
        error_before=error_before,
        error_after=error_after,
        band_factor=calibration.band_factor,
        measurements=rows,
        ipucnn_version=ipucnn.__version__,
    )


def _fit(programs: Sequence[_Program], free: Sequence[int]) -> Tuple[np.ndarray, np.ndarray]:
    """Fits the logarithms of some factors by least squares, with the others fixed at 1.

    Returns:
        (3,) logarithms of the factors, and their standard deviations given the measurements; fixed factors keep those
        of the prior.
    """
    from scipy.optimize import least_squares

    logs, deviations, free = np.zeros(len(FACTORS)), _PRIOR.copy(), list(free)
    if not free:
        return logs, deviations

    def residuals(moved: np.ndarray) -> np.ndarray:
        logs[free] = moved
        ratios = np.concatenate([program.log_ratios(_factors(logs)) for program in programs])
        return np.concatenate([ratios / _SIGMA, moved / _PRIOR[free]])

    fit = least_squares(residuals, np.zeros(len(free)))
    logs[free] = fit.x
    deviations[free] = np.sqrt(np.diag(np.linalg.inv(fit.jac.T @ fit.jac)))
    return logs, deviations


def _factors(logs: np.ndarray) -> Calibration:
    return Calibration(*np.exp(logs).tolist())


def _band_factor(programs: Sequence[_Program], free: Sequence[int]) -> float:
    """Returns the factor that contains 80 of 100 predictions, each with factors fitted to all other measurements."""
    misses = []
    for program in programs:
        others = [other for other in programs if other is not program]
        logs = _fit(others, free)[0] if others else np.zeros(len(FACTORS))
        misses.append(program.log_ratios(_factors(logs))[0])
    return max(BAND_FACTOR, math.exp(_DEVIATIONS_OF_80 * float(np.sqrt(np.mean(np.square(misses))))))


def read_profile(path: Path) -> SystemProfile:
    """Returns the profile in the file of ``--system-profile``.

    Raises:
        DataError: the file is absent, damaged, or of another kind or version.
    """
    what, hint = "--system-profile", _HINT + quoted(path)
    data: Any = read_record(path, hint)
    if not isinstance(data, dict) or "kind" not in data:
        raise DataError(f"{what} {shown(path)} is no system profile", hint)
    return to_record(data, SystemProfile, f"{what} {shown(path)}", hint)


def calibrated_system(profile: SystemProfile, system: System) -> System:
    """Returns a system with the factors of a profile.

    Raises:
        ConfigurationError: the profile is of IPUs of another generation.
    """
    measured = SYSTEMS[profile.system]
    if measured.ipu.name != system.ipu.name:
        raise ConfigurationError(
            f"--system-profile was measured on {measured.title} ({measured.ipu.title}), and {system.title} has another "
            f"IPU ({system.ipu.title})",
            f"--system {measured.name}, or drop --system-profile",
        )
    return system.calibrated(profile.calibration)


def describe(profile: SystemProfile) -> List[str]:
    """Returns a profile's contents, one sentence each."""
    factors = [f"{_NAMES[name]} x {getattr(profile.calibration, name):.3g}" for name in profile.told]
    others = [_NAMES[name] for name in FACTORS if name not in profile.told]
    sentences = [
        f"times as measured on {SYSTEMS[profile.system].title}: {', '.join(factors) or 'as shipped'}"
    ]
    if others:
        sentences.append(f"nothing measured tells {' or '.join(others)}: as shipped")
    return sentences + [f"warning: {text}" for text in suspicious(profile)]


def suspicious(profile: SystemProfile) -> List[str]:
    """Returns a sentence for each factor that measurements of whole runs on the named system are unlikely to give."""
    factors = [(name, getattr(profile.calibration, name)) for name in profile.told]
    return [
        f"{_NAMES[name]} x {factor:.3g} is beyond a factor of {_SUSPICIOUS:g}: check that --system is what was "
        "measured, and that whole runs were"
        for name, factor in factors
        if not 1 / _SUSPICIOUS <= factor <= _SUSPICIOUS
    ]


def plan_measurement(plan: PipelinePlan, source: str, import_tensorflow: Callable[[], object]) -> Observation:
    """Returns the measured figures that the user wrote into a plan.

    Raises:
        DataError: there are none, or they are impossible.
        ConfigurationError: the plan's network is not registered.
    """
    images_per_s, stage_s = plan.measured_images_per_s, plan.measured_stage_s
    if images_per_s is None or not images_per_s > 0:
        raise DataError(
            f"--calibrate {source}: the plan has no measured throughput",
            "write the images/s that its run reached into it: measured_images_per_s: 1234",
        )
    if stage_s and (len(stage_s) != plan.num_stages or min(stage_s) <= 0):
        raise DataError(
            f"--calibrate {source}: measured_stage_s has {counted(len(stage_s), 'value')}, for "
            f"{counted(plan.num_stages, 'stage')}",
            "give the seconds that each stage takes for one micro-batch, forward and backward",
        )
    record = get_model(plan.model)
    try:
        options = BuildOptions(plan.input_shape, plan.num_classes, **plan.build)  # type: ignore[arg-type]
    except TypeError:
        raise DataError(f"--calibrate {source}: build has an unknown key", "make the plan again") from None
    graph = network_graph(record, options, import_tensorflow)
    if "freeze" in plan.options:
        graph = frozen_graph(graph, frozen_layers(graph, str(plan.options["freeze"])))
    check_cuts(plan.splits, graph)
    return Observation(source, graph, plan.splits, plan.settings, images_per_s, stage_s)
