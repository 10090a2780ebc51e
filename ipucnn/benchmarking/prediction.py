"""What the cost and memory model predicts of IPUs for the program that is measured here.  Nothing of it is measured.

The other way round, ``read_measurement`` reads what was measured on IPUs, for a profile of the system.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from ipucnn.aliases import KerasModel, PlainValue
from ipucnn.benchmarking.records import BenchmarkReport, IpuMemory, Prediction, from_plain
from ipucnn.config.bounds import MAX_COUNT
from ipucnn.config.options import BY_KEY, RunConfig
from ipucnn.datasets.registry import DATASETS, known_as
from ipucnn.documents import read_record
from ipucnn.errors import ConfigurationError, DataError, UserError
from ipucnn.filesystem import is_file, is_folder, shown
from ipucnn.hardware import System, get_system, smallest_system
from ipucnn.json_fields import Fields, is_count, is_text, list_of, wrong_field
from ipucnn.models.registry import get_model
from ipucnn.planning.calibration import Measurement, SystemProfile, calibrated_system
from ipucnn.planning.cost.products import throughput_band
from ipucnn.planning.graphs.extract import known_graph, layer_graph
from ipucnn.planning.graphs.layer_graph import LayerGraph, estimates
from ipucnn.planning.search.planner import LIMITS, Candidate, Planner, candidates
from ipucnn.planning.settings import PlanSettings, given_proportions, plan_settings
from ipucnn.planning.splits import check_cuts
from ipucnn.runs.folder import REPORT, RunFolder
from ipucnn.runs.setup import network_options
from ipucnn.text import shown_value
from ipucnn.training.batching import next_power_of_two, overlap_length
from ipucnn.training.checkpoints import read_meta
from ipucnn.training.program import Program

# Micro-batches per execution that an inference pipeline is filled for, unless --steps-per-execution says otherwise:
# what the public U-Net application's benchmark commands give.
INFERENCE_STEPS = 400
SMALLEST_SYSTEM = "m2000"
_STAGES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Wanted:
    """What to predict for.

    Attributes:
        config: of the run.
        program: that is measured.
        training: or inference.
        steps: micro-batches per execution of inference, None for ``INFERENCE_STEPS``.
        system: name, None for the smallest from ``SMALLEST_SYSTEM`` on that has the IPUs.
        profile: of the system that was measured, which then is what to predict for where none is named.
    """

    config: RunConfig
    program: Program
    training: bool
    steps: Optional[int] = None
    system: Optional[str] = None
    profile: Optional[SystemProfile] = None

    def system_for(self, num_ipus: int = 1) -> System:
        """The machine to predict for; the largest there is, where none has as many IPUs."""
        name = self.system or (self.profile.system if self.profile else None)
        system = get_system(name) if name else smallest_system(num_ipus, SMALLEST_SYSTEM)
        return calibrated_system(self.profile, system) if self.profile else system


def predict_columns(model: KerasModel, name: str, wanted: Wanted) -> List[Prediction]:
    """The predicted columns of a report: of the run's precision, and of 16.16.

    IPUs are mostly used in 16 bits.

    Raises:
        UserError: the network has no layer graph.
    """
    from ipucnn.planning.graphs.keras_graph import graph_of

    graph = graph_of(model, name)
    return [predict_ipu(graph, wanted, each) for each in dict.fromkeys((wanted.config.precision, "16.16"))]


def predict_ipu(graph: LayerGraph, wanted: Wanted, precision: str) -> Prediction:
    """The predicted column of a report for one precision.

    A program without pipeline gets one if its network does not fit on one IPU: with the fewest IPUs on which the
    planner finds splits that do.

    Returns:
        Figures are None, and the reason is in ``notes``, where nothing can be predicted.
    """
    notes = estimates(graph)
    try:
        best, system = _best(graph, wanted, precision, notes)
    except UserError as error:
        best, system = None, wanted.system_for()
        notes.append(error.message)
    if best is None:
        return Prediction(
            system=system.name, title=system.title, ipu=system.ipu.title, precision=precision, notes=notes
        )
    settings, prediction = best.settings, best.prediction
    ipus = settings.num_replicas * next_power_of_two(settings.num_ipus_per_replica)
    flop = 2 * sum(layer.macs for layer in graph.layers) * (3 if settings.training else 1)
    peak = system.ipu.peak_flops_per_s(settings.arithmetic) * settings.num_ipus
    if wanted.training:
        step_s = prediction.weight_update_s
    else:
        step_s = settings.micro_batch_size * settings.num_replicas / prediction.images_per_s
    return Prediction(
        system=system.name,
        title=system.title,
        ipu=system.ipu.title,
        precision=precision,
        images_per_s=prediction.images_per_s,
        images_per_s_band=list(throughput_band(prediction.images_per_s, system)),
        step_s=step_s,
        latency_s=prediction.latency_s,
        flop_per_s=flop * prediction.images_per_s,
        share_of_peak=flop * prediction.images_per_s / peak,
        num_ipus=ipus,
        ipus_per_replica=next_power_of_two(settings.num_ipus_per_replica),
        splits=list(best.splits),
        recomputation=settings.recomputation,
        bottleneck=prediction.bottleneck,
        memory=[IpuMemory(i, m.total_bytes, m.fill, m.verdict) for i, m in enumerate(best.ipus)],
        notes=notes,
    )


def _system(wanted: Wanted, num_ipus: int, notes: List[str]) -> System:
    system = wanted.system_for(num_ipus)
    if system.num_ipus < num_ipus:
        notes.append(f"{num_ipus} IPUs, more than the {system.num_ipus} of {system.name}")
    return system


def _settings(wanted: Wanted, precision: str, num_stages: int, notes: List[str]) -> PlanSettings:
    """The measured program, or the same in more stages than one, in another precision."""
    own = plan_settings(replace(wanted.config, precision=precision), wanted.program.layout, wanted.training)
    if not wanted.training:
        own = replace(own, gradient_accumulation_count=wanted.steps or INFERENCE_STEPS)
    if num_stages == own.num_stages:
        return own
    count = own.gradient_accumulation_count
    if wanted.training:
        base = overlap_length(own.schedule, num_stages)
        legal = -(-count // base) * base
        if legal != count:
            notes.append(
                f"{num_stages} stages need a gradient accumulation count of {legal} instead of {count}"
            )
            count = legal
    return own.restaged(
        num_stages,
        gradient_accumulation_count=count,
        # Pipelines have no distributed batch norm.
        dbn_replica_group_size=1,
        # Segments on one IPU would not make the network any smaller.
        device_mapping=tuple(range(num_stages)) if own.schedule == "Sequential" else None,
    )


def _best(
    graph: LayerGraph, wanted: Wanted, precision: str, notes: List[str]
) -> Tuple[Optional[Candidate], System]:
    p = wanted.program
    if p.num_stages > 1:
        settings = _settings(wanted, precision, p.num_stages, notes)
        system = _system(wanted, p.num_replicas * p.ipus_per_replica, notes)
        planner = Planner(graph, system)
        if p.pipeline_splits:
            return planner.judge(p.pipeline_splits, settings, max(LIMITS)), system
        own = settings.available_memory_proportion
        found = planner.best_of(candidates(settings, p.recomputation, own))
        if found is None:
            notes.append(f"no splits into {p.num_stages} stages fit")
        return found, system
    # The IPU is the same in a system of any size, and so is what fits on it.
    ipu_system = wanted.system_for()
    planner = Planner(graph, ipu_system)
    open_to = None if wanted.training else False
    proportions = given_proportions(wanted.config, p.num_stages)
    uncertain: Optional[Candidate] = None
    for limit in LIMITS[:1], LIMITS[1:]:
        for stages in _STAGES:
            if stages > len(planner.starts):
                break
            trial: List[str] = []
            settings = _settings(wanted, precision, stages, trial)
            uncertain = planner.best_of(candidates(settings, open_to, proportions), limit)
            if uncertain is not None:
                notes += trial
                if stages > 1:
                    notes.append(f"does not fit on one IPU: {stages} stages, split by the planner")
                if uncertain.verdict != "fits":
                    notes.append(f"memory: {uncertain.verdict}")
                system = _system(wanted, p.num_replicas * stages, notes)
                return _on(system, uncertain, planner), system
    notes.append(f"does not fit on {_STAGES[-1]} IPUs per replica")
    return None, ipu_system


def _on(system: System, candidate: Candidate, planner: Planner) -> Candidate:
    """The candidate's prediction on another system of the same IPUs."""
    if system is planner.system:
        return candidate
    from ipucnn.planning.cost.schedule import predict

    prediction = predict(planner.graph, candidate.splits, candidate.settings, system)
    return replace(candidate, prediction=prediction)


# --- what was measured on IPUs

_MEASUREMENT_HINT = (
    "give run folders of `ipucnn train`, or reports of `ipucnn benchmark`, that ran with --device ipu"
)

_MOST_PIXELS = 2**16


def _is_some(value: PlainValue) -> bool:
    return is_count(value) and 0 < value <= MAX_COUNT


_SIZES = ("micro_batch_size", "gradient_accumulation_count", "num_replicas", "num_stages", "ipus_per_replica")
_PROGRAM_FIELDS: Fields = {
    **dict.fromkeys(_SIZES, ("a whole number from 1", _is_some)),
    "device_mapping": ("a list of IPUs", list_of(is_count)),
    "pipeline_splits": ("a list of layers", list_of(is_text)),
}


def read_measurement(path: Path, import_tensorflow: Callable[[], object]) -> Measurement:
    """The throughput in the report of a benchmark or of a training run, and the program that reached it.

    Args:
        path: a run folder, or its report.json.
        import_tensorflow: called before a network is built whose layers are not known.

    Raises:
        ConfigurationError: it was not measured on IPUs, or not of a network's speed.
        DataError: absent, damaged, or without a throughput.
    """
    found, source = _found_in(path, "--calibrate")
    name = f"--calibrate {source}"
    if not (found.images_per_s or 0) > 0:
        raise DataError(f"{name} has no throughput: nothing was timed", _MEASUREMENT_HINT)
    record = get_model(found.config.model_name)
    if max(found.input_shape) > _MOST_PIXELS:
        raise DataError(f"{name} has the input {found.input_shape}", _MEASUREMENT_HINT)
    options = network_options(record, found.config, found.input_shape, found.num_classes)
    graph = known_graph(record, options)
    if graph is None:
        import_tensorflow()
        graph = layer_graph(record, options)
    problem = wrong_field(found.program, _PROGRAM_FIELDS, _PROGRAM_FIELDS)
    if problem:
        raise DataError(f"{name}: its program {problem}", "make it again")
    try:
        program = Program.from_dict(found.program)
        settings = plan_settings(found.config, program.layout, found.training)
        check_cuts(program.pipeline_splits, graph)
    except (TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{name}: its program is damaged: {shown_value(error)}", "make it again") from None
    if not found.training:
        settings = replace(settings, gradient_accumulation_count=found.steps or INFERENCE_STEPS)
    if len(program.pipeline_splits) != settings.num_stages - 1:
        raise DataError(f"{name} does not say which splits ran", "run it again with --pipeline-splits")
    return Measurement(source, graph, tuple(program.pipeline_splits), settings, found.images_per_s or 0.0)


@dataclass(frozen=True)
class _Found:
    """What a report says."""

    config: RunConfig
    program: Dict[str, Any]
    device_kind: str
    training: bool
    images_per_s: Optional[float]
    input_shape: Tuple[int, int, int]
    num_classes: int
    steps: Optional[int] = None


def _found_in(path: Path, what: str) -> Tuple[_Found, str]:
    """What a run folder or report says, and the file's name."""
    report_path = path / REPORT if is_folder(path) else path
    name = f"{what} {shown(report_path)}"
    data = read_record(report_path, _MEASUREMENT_HINT)
    if not isinstance(data, dict):
        raise DataError(f"{name} is no report", _MEASUREMENT_HINT)
    found = _of_benchmark(data, name) if "kind" in data else _of_run(data, report_path, name)
    if found.device_kind != "ipu":
        raise ConfigurationError(
            f"{name} was measured on a {found.device_kind.upper()}, and a profile is of IPUs",
            _MEASUREMENT_HINT,
        )
    return found, shown(report_path)


def _config_of(options: Mapping[str, PlainValue], name: str) -> RunConfig:
    import yaml

    return RunConfig.from_yaml(yaml.safe_dump(dict(options)), name)


def _of_benchmark(data: Dict[str, PlainValue], name: str) -> _Found:
    report = from_plain(data, BenchmarkReport, name, _MEASUREMENT_HINT)
    if report.scope == "data":
        raise ConfigurationError(
            f"{name} measured an input pipeline alone",
            "give reports of --mode training or inference",
        )
    # Flags that no YAML has say nothing of a network's speed.
    options = {
        key: value for key, value in report.options.items() if key not in BY_KEY or BY_KEY[key].in_yaml
    }
    options["model-name"] = report.model
    config = _config_of(options, name)
    known = DATASETS.get(known_as(report.data.name) or "")
    height, width, channels = report.input_shape
    return _Found(
        config=config,
        program=report.program,
        device_kind=report.device.kind,
        training=report.mode == "training",
        images_per_s=report.images_per_s,
        input_shape=(height, width, channels),
        num_classes=(known and known.num_classes) or get_model(report.model).num_classes,
        steps=config.steps_per_execution,
    )


def _of_run(data: Dict[str, PlainValue], path: Path, name: str) -> _Found:
    folder = RunFolder(path.parent)
    report = folder.read_report()
    try:
        assert report is not None
        kind, images_per_s = (
            report["compilation"]["device"]["kind"],
            float(report["measured"]["images_per_s"]),
        )
        program = dict(report["program"])
        checkpoints = [str(own) for own in report["checkpoints"]]
    except (AssertionError, KeyError, TypeError, ValueError):
        raise DataError(f"{name} is no report of a run", _MEASUREMENT_HINT) from None
    config = folder.read_config()
    folder = RunFolder(path.parent, config.checkpoint_dir)
    kept = [own for own in checkpoints if is_file(folder.checkpoints / own)]
    if not kept:
        raise DataError(
            f"{name}: the run kept no checkpoint, which knows the size of its images",
            "give the report of a benchmark of it",
        )
    meta = read_meta(folder.checkpoints / kept[-1])
    height, width, channels = meta["input_shape"]
    return _Found(
        config, program, str(kind), True, images_per_s, (height, width, channels), meta["num_classes"]
    )
