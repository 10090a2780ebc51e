"""Forecasts a program under given splits: its time, its bottleneck and its memory.

The search, the judgement of given splits, advice and the predicted columns of benchmarks all use :func:`forecast`.  A
calibration varies the cost model itself, so it calls the model (``cost/schedule.py``).
"""

from dataclasses import dataclass
from typing import Sequence, Tuple

from ipucnn.hardware import System
from ipucnn.planning.cost.memory import StageMemory, program_memory
from ipucnn.planning.cost.schedule import Prediction, predict
from ipucnn.planning.graphs.layer_graph import LayerGraph
from ipucnn.planning.program import PlannedProgram


@dataclass(frozen=True)
class Forecast:
    """What the model predicts for a program; nothing in it was measured.

    Attributes:
        times: its throughput, latency and bottleneck, and the times of each stage.
        ipus: the memory of each IPU of a replica.
    """

    times: Prediction
    ipus: Tuple[StageMemory, ...]

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


def forecast(graph: LayerGraph, splits: Sequence[str], settings: PlannedProgram, system: System) -> Forecast:
    """Returns the forecast of a program.

    Args:
        splits: the names of the layers that open stages 1, 2, ...; one fewer than stages, in the graph's order.

    Raises:
        ValueError: splits that are not one fewer than the stages, or out of order.
    """
    times = predict(graph, splits, settings, system)
    return Forecast(times, tuple(program_memory(graph, splits, settings, system.ipu)))
