"""What the cost and memory model predicts of IPUs for the program that is measured here.  Nothing of it is measured."""

from dataclasses import dataclass, replace
from typing import Any, Dict, List, Optional, Tuple

from ipucnn.errors import UserError
from ipucnn.hardware import SYSTEMS, System, get_system
from ipucnn.planning.graph import LayerGraph
from ipucnn.planning.judge import LIMITS, Candidate, Planner, candidates
from ipucnn.planning.settings import PlanSettings
from ipucnn.training.batching import next_power_of_two, overlap_length
from ipucnn.training.program import Program

# Micro-batches per execution that an inference pipeline is filled for, unless --steps-per-execution says otherwise:
# what the public U-Net application's benchmark commands give.
INFERENCE_STEPS = 400
DEFAULT_SYSTEMS = ("m2000", "pod16", "pod64", "pod128", "pod256")
_STAGES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Wanted:
    """What to predict for.

    Attributes:
        program: that is measured.
        training: or inference.
        steps: micro-batches per execution of inference, None for ``INFERENCE_STEPS``.
        system: name, None for the smallest of ``DEFAULT_SYSTEMS`` that has the IPUs.
        optimizer_slots: see ``PlanSettings``; likewise the following.
    """

    program: Program
    training: bool
    steps: Optional[int] = None
    system: Optional[str] = None
    optimizer_slots: int = 0
    optimizer_state_offloading: bool = True
    half_partials: bool = False
    eight_bit_transfer: bool = False


def predict_ipu(graph: LayerGraph, wanted: Wanted, precision: str) -> Dict[str, Any]:
    """The predicted column of a report for one precision.

    A program without pipeline gets one if its network does not fit on one IPU: with the fewest IPUs on which the
    planner finds splits that do.

    Returns:
        Plain values; figures None, and the reason in ``notes``, where nothing can be predicted.
    """
    notes: List[str] = []
    try:
        best, system = _best(graph, wanted, precision, notes)
    except UserError as error:
        best, system = None, get_system(wanted.system or DEFAULT_SYSTEMS[0])
        notes.append(error.message)
    result: Dict[str, Any] = {
        "system": system.name,
        "title": system.title,
        "ipu": system.ipu.title,
        "precision": precision,
        "images_per_s": None,
        "step_s": None,
        "latency_s": None,
        "flop_per_s": None,
        "share_of_peak": None,
        "num_ipus": None,
        "ipus_per_replica": None,
        "splits": [],
        "recomputation": None,
        "bottleneck": None,
        "memory": [],
        "notes": notes,
    }
    if best is None:
        return result
    settings, prediction = best.settings, best.prediction
    ipus = settings.num_replicas * next_power_of_two(settings.num_ipus_per_replica)
    flop = 2 * sum(layer.macs for layer in graph.layers) * (3 if settings.training else 1)
    peak = system.ipu.peak_flops_per_s(settings.arithmetic) * settings.num_ipus
    if wanted.training:
        step_s = prediction.weight_update_s
    else:
        step_s = settings.micro_batch_size * settings.num_replicas / prediction.images_per_s
    result.update(
        images_per_s=prediction.images_per_s,
        step_s=step_s,
        latency_s=prediction.latency_s,
        flop_per_s=flop * prediction.images_per_s,
        share_of_peak=flop * prediction.images_per_s / peak,
        num_ipus=ipus,
        ipus_per_replica=next_power_of_two(settings.num_ipus_per_replica),
        splits=list(best.splits),
        recomputation=settings.recomputation,
        bottleneck=prediction.bottleneck,
        memory=[
            {"ipu": i, "bytes": m.total_bytes, "fill": m.fill, "verdict": m.verdict}
            for i, m in enumerate(best.ipus)
        ],
    )
    return result


def _system(name: Optional[str], num_ipus: int, notes: List[str]) -> System:
    if name is not None:
        system = get_system(name)
    else:
        fitting = [SYSTEMS[s] for s in DEFAULT_SYSTEMS if SYSTEMS[s].num_ipus >= num_ipus]
        system = fitting[0] if fitting else SYSTEMS[DEFAULT_SYSTEMS[-1]]
    if system.num_ipus < num_ipus:
        notes.append(f"{num_ipus} IPUs, more than the {system.num_ipus} of {system.name}")
    return system


def _settings(wanted: Wanted, precision: str, num_stages: int, notes: List[str]) -> PlanSettings:
    p = wanted.program
    count = p.gradient_accumulation_count if wanted.training else wanted.steps or INFERENCE_STEPS
    schedule = p.pipeline_schedule
    if wanted.training:
        base = overlap_length(schedule, num_stages)
        legal = -(-count // base) * base
        if legal != count:
            notes.append(
                f"{num_stages} stages need a gradient accumulation count of {legal} instead of {count}"
            )
            count = legal
    mapping: Optional[Tuple[int, ...]] = None
    if num_stages == p.num_stages and p.device_mapping != tuple(range(num_stages)):
        mapping = p.device_mapping
    elif schedule == "Sequential":
        mapping = tuple(range(num_stages))
    return PlanSettings(
        micro_batch_size=p.micro_batch_size,
        gradient_accumulation_count=count,
        num_replicas=p.num_replicas,
        num_stages=num_stages,
        schedule=schedule,
        precision=precision,
        recomputation=p.recomputation,
        available_memory_proportion=min(p.available_memory_proportion, default=60.0) / 100.0,
        training=wanted.training,
        optimizer_slots=wanted.optimizer_slots,
        optimizer_state_offloading=wanted.optimizer_state_offloading,
        dbn_replica_group_size=p.dbn_replica_group_size if num_stages == 1 else 1,
        half_partials=wanted.half_partials,
        eight_bit_transfer=wanted.eight_bit_transfer,
        device_mapping=mapping,
    )


def _best(
    graph: LayerGraph, wanted: Wanted, precision: str, notes: List[str]
) -> Tuple[Optional[Candidate], System]:
    p = wanted.program
    if p.num_stages > 1:
        settings = _settings(wanted, precision, p.num_stages, notes)
        system = _system(wanted.system, p.num_replicas * p.ipus_per_replica, notes)
        planner = Planner(graph, system)
        if p.pipeline_splits:
            return planner.judge(p.pipeline_splits, settings, max(LIMITS)), system
        found = planner.best_of(candidates(settings, p.recomputation, settings.available_memory_proportion))
        if found is None:
            notes.append(f"no splits into {p.num_stages} stages fit")
        return found, system
    # The IPU is the same in a system of any size, and so is what fits on it.
    ipu_system = get_system(wanted.system or DEFAULT_SYSTEMS[0])
    planner = Planner(graph, ipu_system)
    open_to = None if wanted.training else False
    proportion = min(p.available_memory_proportion, default=0.0) / 100.0 or None
    uncertain: Optional[Candidate] = None
    for limit in LIMITS[:1], LIMITS[1:]:
        for stages in _STAGES:
            if stages > len(planner.starts):
                break
            trial: List[str] = []
            settings = _settings(wanted, precision, stages, trial)
            uncertain = planner.best_of(candidates(settings, open_to, proportion), limit)
            if uncertain is not None:
                notes += trial
                if stages > 1:
                    notes.append(f"does not fit on one IPU: {stages} stages, split by the planner")
                if uncertain.verdict != "fits":
                    notes.append(f"memory: {uncertain.verdict}")
                system = _system(wanted.system, p.num_replicas * stages, notes)
                return _on(system, uncertain, planner), system
    notes.append(f"does not fit on {_STAGES[-1]} IPUs per replica")
    return None, ipu_system


def _on(system: System, candidate: Candidate, planner: Planner) -> Candidate:
    """The candidate's prediction on another system of the same IPUs."""
    if system is planner.system:
        return candidate
    from ipucnn.planning.predict import predict

    prediction = predict(planner.graph, candidate.splits, candidate.settings, system)
    return replace(candidate, prediction=prediction)
