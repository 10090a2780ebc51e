"""Forecasts a program under given splits: its time, its bottleneck and its memory.

The search, the judgement of given splits, neighbours of a program, the predicted columns of benchmarks and calibration
all use :func:`forecast`.
"""

from dataclasses import dataclass
from typing import Optional, Sequence, Tuple

from ipucnn.hardware import System
from ipucnn.planning.cost.layer_times import LayerTimes
from ipucnn.planning.cost.memory import StageMemory, program_memory, published_at
from ipucnn.planning.cost.products import BAND_FACTOR
from ipucnn.planning.cost.schedule import Prediction, predict
from ipucnn.planning.graphs.layer_graph import LayerGraph
from ipucnn.planning.program import PlannedProgram


@dataclass(frozen=True)
class Forecast:
    """What the model predicts for a program; nothing in it was measured.

    Attributes:
        times: its throughput, latency and bottleneck, and the times of each stage.
        ipus: the memory of each IPU of a replica.
        band_factor: 80 of 100 measurements are expected between the throughput over this factor and times it.
    """

    times: Prediction
    ipus: Tuple[StageMemory, ...]
    band_factor: float

    @property
    def fullest(self) -> StageMemory:
        """Returns the memory of the fullest IPU."""
        return max(self.ipus, key=lambda memory: memory.fill)

    @property
    def predicted_fill(self) -> float:
        """Returns the fill of the fullest IPU."""
        return self.fullest.fill

    @property
    def verdict(self) -> str:
        """Returns "fits", "uncertain" or "does not fit"."""
        return self.fullest.verdict

    @property
    def predicted_images_per_s(self) -> float:
        """Returns the throughput of all replicas."""
        return self.times.images_per_s

    @property
    def images_per_s_band(self) -> Tuple[float, float]:
        """Returns the range in which 80 of 100 measurements of the throughput are expected."""
        return self.times.images_per_s / self.band_factor, self.times.images_per_s * self.band_factor

    @property
    def published_fits(self) -> Tuple[int, int]:
        """Returns how many public configurations with about that fill are known to fit, and their number."""
        return published_at(self.predicted_fill)


def forecast(
    graph: LayerGraph,
    splits: Sequence[str],
    program: PlannedProgram,
    system: System,
    *,
    ipus: Optional[Tuple[StageMemory, ...]] = None,
    layers: Optional[LayerTimes] = None,
) -> Forecast:
    """Returns the forecast of a program.

    Args:
        splits: the names of the layers that open stages 1, 2, ...; one fewer than stages, in the graph's order.
        ipus: the memory, if it is known from a program whose replicas are the same.
        layers: the times of the layers, if they are known.

    Raises:
        ValueError: splits that are not one fewer than the stages, or out of order.
    """
    times = predict(graph, splits, program, system, times=layers)
    memory = tuple(program_memory(graph, splits, program, system.ipu)) if ipus is None else ipus
    return Forecast(times, memory, max(BAND_FACTOR, system.calibration.band_factor))
