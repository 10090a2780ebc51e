"""The cost model fitted to a system of one's own: three factors on its times, from throughputs measured there.

The factors are a maximum a posteriori estimate: least squares of log(predicted / measured), with a log-normal prior
around 1, which is what the package has.  A factor that the measurements say nothing of (``collective`` where none of
them has replicas) stays 1.  The model's own errors differ from network to network, so measure what is like what is
planned.
"""

import json
import math
import shlex
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np

import ipucnn
from ipucnn.documents import read_record
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.filesystem import shown
from ipucnn.hardware import SYSTEMS, Calibration, System
from ipucnn.json_fields import Fields, is_count, is_number, is_text, wrong_field
from ipucnn.planning.cost.layer_times import LayerTimes, program_times, stage_starts
from ipucnn.planning.cost.products import DEFAULT_CONSTANTS
from ipucnn.planning.cost.schedule import predict
from ipucnn.planning.graphs.layer_graph import LayerGraph
from ipucnn.planning.settings import PlanSettings

KIND, SCHEMA_VERSION = "ipucnn system profile", 1
FACTORS = ("compute", "fixed", "collective")
# By what factor each may be off before anything is measured (one standard deviation): the model's error on published
# rows is 1.09, feeds were derived from small networks alone, and the all-reduce from differences between logs.
_PRIOR = np.log([1.25, 2.0, 2.0])
# What a measurement, and the model at its best, are expected to miss by.
_SIGMA = 0.05
# A factor whose standard deviation after measuring is more than this share of that before is one that nothing tells.
_UNTOLD = 0.9
_BOUNDS = (0.05, 20.0)
_ROUNDS = 50
_HINT = "make it again: ipucnn plan-splits --calibrate RUN... --system NAME --system-profile "


@dataclass(frozen=True)
class Measurement:
    """A throughput that was measured on IPUs, and the program that reached it.

    Attributes:
        source: the file it is from.
        splits: that open the program's stages.
    """

    source: str
    graph: LayerGraph
    splits: Tuple[str, ...]
    settings: PlanSettings
    images_per_s: float


@dataclass(frozen=True)
class MeasuredRow:
    """A measurement beside what is predicted for it.

    Attributes:
        model: name of the network.
        shipped_images_per_s, calibrated_images_per_s: predicted without and with the profile.
    """

    source: str
    model: str
    images_per_s: float
    shipped_images_per_s: float
    calibrated_images_per_s: float


@dataclass(frozen=True)
class SystemProfile:
    """What measurements on a system say of it.

    Attributes:
        system: name of the system that was measured.
        told: the factors that the measurements tell; the others are 1.
        error_before, error_after: geometric mean of how far predictions of the measurements are off, as a factor.
    """

    system: str
    calibration: Calibration
    told: Tuple[str, ...]
    error_before: float
    error_after: float
    rows: Tuple[MeasuredRow, ...] = ()

    def to_json(self) -> str:
        """The text of a profile; ``read_profile`` reads it."""
        data = {
            "kind": KIND,
            "schema_version": SCHEMA_VERSION,
            "ipucnn_version": ipucnn.__version__,
            "system": self.system,
            "factors": dict(zip(FACTORS, astuple(self.calibration))),
            "told": list(self.told),
            "error_before": self.error_before,
            "error_after": self.error_after,
            "measurements": [vars(row) for row in self.rows],
        }
        return json.dumps(data, indent=2) + "\n"


class _Program:
    """A measured program, whose partitions over tiles are searched once."""

    def __init__(self, measured: Measurement, system: System) -> None:
        self.measured, self.system = measured, system
        starts = stage_starts(measured.graph, measured.splits)
        self._times = program_times(measured.graph, starts, measured.settings, system.ipu)

    def log_ratio(self, calibration: Calibration) -> float:
        """log(predicted / measured)."""
        own, system = self.measured, self.system.calibrated(calibration)
        times: LayerTimes = replace(self._times, clock_hz=system.ipu.computing_hz)
        times = times.with_constants(DEFAULT_CONSTANTS)
        found = predict(own.graph, own.splits, own.settings, system, times=times)
        return math.log(found.images_per_s / own.images_per_s)


def calibrate(measurements: Sequence[Measurement], system: System) -> SystemProfile:
    """The profile that measurements on a system give.

    Args:
        system: as shipped.

    Raises:
        ConfigurationError: no measurement, or one on more IPUs than the system has.
        DataError: a measurement that no factor within bounds explains.
    """
    if not measurements:
        raise ConfigurationError(
            "--calibrate: nothing was measured", "give runs or reports of benchmarks on IPUs"
        )
    for measured in measurements:
        if measured.settings.occupied_ipus > system.num_ipus:
            raise ConfigurationError(
                f"{measured.source} ran on {measured.settings.occupied_ipus} IPUs, and {system.title} has "
                f"{system.num_ipus}",
                "name the system that was measured: --system bow-pod64",
            )
    programs = [_Program(measured, system) for measured in measurements]
    told = list(range(len(FACTORS)))
    logs, deviations = _fit(programs, told)
    told = [i for i in told if deviations[i] < _UNTOLD * _PRIOR[i]]
    logs, _ = _fit(programs, told)
    low, high = np.log(_BOUNDS)
    if not ((logs > low) & (logs < high)).all():
        raise DataError(
            "--calibrate: no factor between 1/20 and 20 explains these measurements",
            "check that --system is what was measured, and that the reports are of whole runs",
        )
    calibration = Calibration(*(round(float(factor), 6) for factor in np.exp(logs)))
    before = [program.log_ratio(Calibration()) for program in programs]
    after = [program.log_ratio(calibration) for program in programs]
    rows = tuple(
        MeasuredRow(
            own.source,
            own.graph.model,
            own.images_per_s,
            own.images_per_s * math.exp(shipped),
            own.images_per_s * math.exp(calibrated),
        )
        for own, shipped, calibrated in zip(measurements, before, after)
    )
    error_before, error_after = (float(np.exp(np.abs(errors).mean())) for errors in (before, after))
    return SystemProfile(
        system.name, calibration, tuple(FACTORS[i] for i in told), error_before, error_after, rows
    )


def _fit(programs: Sequence[_Program], free: Sequence[int]) -> Tuple[np.ndarray, np.ndarray]:
    """Gauss-Newton over the logarithms of some factors, the others 1.

    Returns:
        (3,) logarithms of the factors, and their standard deviations given the measurements; those of the prior for
        factors that are not free.
    """
    logs, deviations = np.zeros(len(FACTORS)), _PRIOR.copy()
    free = list(free)

    def ratios(logs: np.ndarray) -> np.ndarray:
        calibration = Calibration(*np.exp(logs).tolist())
        return np.array([program.log_ratio(calibration) for program in programs])

    def loss(logs: np.ndarray) -> float:
        return float(((ratios(logs) / _SIGMA) ** 2).sum() + ((logs / _PRIOR) ** 2).sum())

    step = 1e-4
    for _ in range(_ROUNDS if free else 0):
        here = ratios(logs)
        jacobian = np.stack([(ratios(logs + step * np.eye(3)[i]) - here) / step for i in free], axis=1)
        curvature = jacobian.T @ jacobian / _SIGMA**2 + np.diag(_PRIOR[free] ** -2.0)
        slope = jacobian.T @ here / _SIGMA**2 + logs[free] / _PRIOR[free] ** 2
        move = np.zeros(len(FACTORS))
        move[free] = -np.linalg.solve(curvature, slope)
        deviations[free] = np.sqrt(np.diag(np.linalg.inv(curvature)))
        # A pipeline's longest stage changes along the way: steps that do not help are halved.
        now = loss(logs)
        while loss(logs + move) > now and np.abs(move).max() > 1e-9:
            move /= 2
        logs = logs + move
        if np.abs(move).max() < 1e-7:
            break
    return logs, deviations


_FIELDS: Fields = {
    "schema_version": (str(SCHEMA_VERSION), lambda value: is_count(value) and value == SCHEMA_VERSION),
    "system": ("a system that this version knows", lambda value: is_text(value) and value in SYSTEMS),
    "factors": (
        f"{', '.join(FACTORS)} as numbers from {_BOUNDS[0]} to {_BOUNDS[1]}",
        lambda value: _are_factors(value),
    ),
    "told": (
        "a list of factors",
        lambda value: isinstance(value, list) and set(map(str, value)) <= set(FACTORS),
    ),
    "error_before": ("a number", is_number),
    "error_after": ("a number", is_number),
}


def _are_factors(value: object) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == set(FACTORS)
        and all(is_number(factor) and _BOUNDS[0] <= factor <= _BOUNDS[1] for factor in value.values())
    )


def read_profile(path: Path) -> SystemProfile:
    """The profile in the file of ``--system-profile``; its measurements are not read.

    Raises:
        DataError: absent, damaged, or of another kind or version.
    """
    what, hint = "--system-profile", _HINT + shlex.quote(shown(path))
    data: Dict[str, Any] = read_record(path, what, hint)
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise DataError(f"{what} {shown(path)} is no system profile", hint)
    problem = wrong_field(data, _FIELDS, needed=_FIELDS)
    if problem:
        raise DataError(f"{what} {shown(path)} {problem}", hint)
    return SystemProfile(
        data["system"],
        Calibration(*(float(data["factors"][name]) for name in FACTORS)),
        tuple(data["told"]),
        float(data["error_before"]),
        float(data["error_after"]),
    )


def calibrated_system(profile: SystemProfile, system: System) -> System:
    """A system with the factors of a profile.

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
    """What a profile says, a sentence each."""
    factors = dict(zip(FACTORS, astuple(profile.calibration)))
    names = {"compute": "computing", "fixed": "feeds and loop", "collective": "the all-reduce"}
    told = [f"{names[name]} x {factors[name]:.3g}" for name in profile.told]
    untold = [names[name] for name in FACTORS if name not in profile.told]
    sentences = [f"times as measured on {SYSTEMS[profile.system].title}: {', '.join(told) or 'as shipped'}"]
    if untold:
        sentences.append(f"nothing measured tells {' or '.join(untold)}: as shipped")
    return sentences
