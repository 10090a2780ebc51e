"""Predicts IPUs' figures for the measured program, with the cost and memory model.  None of them is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, List, Optional, Tuple

from ipucnn.aliases import KerasModel
from ipucnn.benchmarking.records import IpuMemory, IpuPrediction
from ipucnn.config.options import RunConfig
from ipucnn.errors import UserError
from ipucnn.hardware import System, get_system, smallest_system
from ipucnn.planning.forecast import forecast
from ipucnn.planning.graphs.layer_graph import LayerGraph, estimates
from ipucnn.planning.program import (
    Placement,
    PlannedProgram,
    planned_program,
)
from ipucnn.planning.search.open_settings import OPEN, choices, proportions_to_try
from ipucnn.planning.search.planner import LIMITS, Candidate, Planner
from ipucnn.training.batching import next_power_of_two
from ipucnn.training.program import Program

if TYPE_CHECKING:
    from ipucnn.planning.calibration import SystemProfile

# Micro-batches per execution that fill an inference pipeline, unless --steps-per-execution is given: the value of the
# public U-Net application's benchmark commands.
INFERENCE_STEPS = 400
SMALLEST_SYSTEM = "m2000"
_STAGES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class PredictionRequest:
    """The input of a prediction.

    Attributes:
        config: the configuration of the run.
        program: the measured program.
        splits: the layers that open its stages.
        training: training (True) or inference.
        steps: the micro-batches per execution of inference, None for ``INFERENCE_STEPS``.
        system: the name; None for the smallest from ``SMALLEST_SYSTEM`` on that has the IPUs.
        profile: the profile of the measured system, which is also the system to predict for if none is named.
    """

    config: RunConfig
    program: Program
    splits: Tuple[str, ...]
    training: bool
    steps: Optional[int] = None
    system: Optional[str] = None
    profile: Optional[SystemProfile] = None

    def system_for(self, num_ipus: int = 1) -> System:
        """Returns the machine to predict for; the largest one if none has enough IPUs."""
        name = self.system or (self.profile.system if self.profile else None)
        system = get_system(name) if name else smallest_system(num_ipus, SMALLEST_SYSTEM)
        if self.profile is None:
            return system
        from ipucnn.planning.calibration import calibrated_system

        return calibrated_system(self.profile, system)


def predict_columns(model: KerasModel, name: str, request: PredictionRequest) -> List[IpuPrediction]:
    """Returns the predicted columns of a report: for the run's precision, and for 16.16.

    IPUs are mostly used with 16 bits.

    Raises:
        UserError: the network has no layer graph.
    """
    from ipucnn.planning.graphs.keras_graph import graph_of

    graph = graph_of(model, name)
    return [predict_ipu(graph, request, each) for each in dict.fromkeys((request.config.precision, "16.16"))]


def predict_ipu(graph: LayerGraph, request: PredictionRequest, precision: str) -> IpuPrediction:
    """Returns the predicted column of a report for one precision.

    A program without pipeline gets one if its network does not fit on one IPU, with the fewest IPUs for which the
    planner finds splits that fit.

    Returns:
        Figures are None, with the reason in ``notes``, if no prediction is possible.
    """
    notes = estimates(graph)
    try:
        best, system = _best(graph, request, precision, notes)
    except UserError as error:
        best, system = None, request.system_for()
        notes.append(error.message)
    if best is None:
        return IpuPrediction(
            system=system.name, title=system.title, ipu=system.ipu.title, precision=precision, notes=notes
        )
    settings, prediction = best.settings, best.prediction
    ipus = settings.num_replicas * next_power_of_two(settings.num_ipus_per_replica)
    flop = 2 * sum(layer.macs for layer in graph.layers) * (3 if settings.training else 1)
    peak = system.ipu.peak_flops_per_s(settings.arithmetic) * settings.num_ipus
    if request.training:
        step_s = prediction.weight_update_s
    else:
        step_s = settings.micro_batch_size * settings.num_replicas / prediction.images_per_s
    return IpuPrediction(
        system=system.name,
        title=system.title,
        ipu=system.ipu.title,
        precision=precision,
        images_per_s=prediction.images_per_s,
        images_per_s_band=list(best.forecast.images_per_s_band),
        step_s=step_s,
        latency_s=prediction.latency_s,
        flop_per_s=flop * prediction.images_per_s,
        share_of_peak=flop * prediction.images_per_s / peak,
        num_ipus=ipus,
        ipus_per_replica=next_power_of_two(settings.num_ipus_per_replica),
        splits=list(best.splits),
        recomputation=settings.recomputation,
        bottleneck=prediction.bottleneck,
        memory=[IpuMemory(i, m.total_bytes, m.fill, m.verdict) for i, m in enumerate(best.forecast.ipus)],
        notes=notes,
    )


def _system(request: PredictionRequest, num_ipus: int, notes: List[str]) -> System:
    system = request.system_for(num_ipus)
    if system.num_ipus < num_ipus:
        notes.append(f"{num_ipus} IPUs, more than the {system.num_ipus} of {system.name}")
    return system


def _settings(
    request: PredictionRequest, precision: str, num_stages: int, notes: List[str]
) -> PlannedProgram:
    """Returns the measured program, or the same in more than one stage, in another precision."""
    settings = planned_program(
        replace(request.config, precision=precision), request.program, request.training
    )
    if not request.training:
        settings = replace(settings, gradient_accumulation_count=request.steps or INFERENCE_STEPS)
    if num_stages == settings.num_stages:
        return settings
    # Segments on one IPU would not make the network smaller, and pipelines have no distributed batch norm.
    staged = replace(settings.with_stages(num_stages, placement=Placement.ONE_EACH), dbn_replica_group_size=1)
    count = staged.gradient_accumulation_count
    if count != settings.gradient_accumulation_count:
        notes.append(
            f"{num_stages} stages need a gradient accumulation count of {count} instead of "
            f"{settings.gradient_accumulation_count}"
        )
    return staged


def _best(
    graph: LayerGraph, request: PredictionRequest, precision: str, notes: List[str]
) -> Tuple[Optional[Candidate], System]:
    p = request.program
    if p.num_stages > 1:
        settings = _settings(request, precision, p.num_stages, notes)
        system = _system(request, p.num_replicas * p.ipus_per_replica, notes)
        return Planner(graph, system).judge(request.splits, settings, max(LIMITS)), system
    ipu_system = request.system_for()
    planner = Planner(graph, ipu_system)
    # One value for all stages, as the measured program has: only plan-splits lets stages differ.
    shares = proportions_to_try(request.config, p.num_stages)
    values = {"recomputation": OPEN["recomputation"], "available_memory_proportion": shares}
    for limit in LIMITS[:1], LIMITS[1:]:
        for stages in _STAGES:
            if stages > len(planner.starts):
                break
            trial: List[str] = []
            settings = _settings(request, precision, stages, trial)
            candidate = planner.fastest_program(choices(settings, values), limit)
            if candidate is not None:
                notes += trial
                if stages > 1:
                    notes.append(f"does not fit on one IPU: {stages} stages, split by the planner")
                if candidate.verdict != "fits":
                    notes.append(f"memory: {candidate.verdict}")
                # A program that fits on an IPU fits in a system of any size; only the links between IPUs differ.
                system = _system(request, p.num_replicas * stages, notes)
                predicted = forecast(graph, candidate.splits, candidate.settings, system)
                return replace(candidate, forecast=predicted), system
    notes.append(f"does not fit on {_STAGES[-1]} IPUs per replica")
    return None, ipu_system
