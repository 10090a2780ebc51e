"""Reads measurements on IPUs from a run folder or a benchmark's report, for a profile of the system."""

from dataclasses import replace
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional

import msgspec
import yaml

from ipucnn.aliases import Annotated, PlainDict, PlainValue
from ipucnn.benchmarking.prediction import INFERENCE_STEPS
from ipucnn.benchmarking.records import BenchmarkReport, from_plain
from ipucnn.config.bounds import MAX_COUNT
from ipucnn.config.options import BY_KEY, RunConfig
from ipucnn.datasets.registry import DATASETS, known_as
from ipucnn.documents import Natural, mismatch, read_record
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.filesystem import shown
from ipucnn.models.registry import get_model
from ipucnn.planning.calibration import Observation
from ipucnn.planning.network import network_graph, network_options
from ipucnn.planning.program import planned_program
from ipucnn.planning.splits import check_cuts
from ipucnn.runs.folder import REPORT, RunFolder
from ipucnn.text import shown_value
from ipucnn.training.checkpoints import read_meta
from ipucnn.training.program import BuiltProgram

_HINT = "give run folders of `ipucnn train`, or reports of `ipucnn benchmark`, that ran with --device ipu"
_MOST_PIXELS = 2**16


_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]


class _Program(msgspec.Struct):
    """The fields of a program that a profile needs."""

    micro_batch_size: _Count
    gradient_accumulation_count: _Count
    num_replicas: _Count
    num_stages: _Count
    ipus_per_replica: _Count
    device_mapping: List[Natural]
    pipeline_splits: List[str]


class _Report(NamedTuple):
    """The contents of a report; ``steps`` are the prescribed micro-batches of an execution of inference."""

    config: RunConfig
    program: PlainDict
    device_kind: str
    images_per_s: float
    input_shape: List[int]
    num_classes: int
    training: bool = True
    steps: Optional[int] = None


def read_observation(path: Path, import_tensorflow: Callable[[], object]) -> Observation:
    """Reads the throughput, and the program that reached it, from the report of a benchmark or of a training run.

    Args:
        path: a run folder, or its report.json.
        import_tensorflow: the function called before a network is built whose layers are not known.

    Raises:
        ConfigurationError: the throughput was not measured on IPUs, or is not a network's.
        DataError: the report is absent, damaged, or without a throughput.
    """
    path = path / REPORT if path.is_dir() else path
    name = f"--calibrate {shown(path)}"
    data = read_record(path, _HINT)
    if not isinstance(data, dict):
        raise DataError(f"{name} is no report", _HINT)
    report = _of_benchmark(data, name) if "kind" in data else _of_run(path, name)
    if report.device_kind != "ipu":
        kind = report.device_kind.upper()
        raise ConfigurationError(f"{name} was measured on a {kind}, and a profile is of IPUs", _HINT)
    if not report.images_per_s > 0:
        raise DataError(f"{name} has no throughput: nothing was timed", _HINT)
    if max(report.input_shape) > _MOST_PIXELS:
        raise DataError(f"{name} has the input {tuple(report.input_shape)}", _HINT)
    record = get_model(report.config.model_name)
    height, width, channels = report.input_shape
    options = network_options(record, report.config, (height, width, channels), report.num_classes)
    graph = network_graph(record, options, import_tensorflow)
    problem = mismatch(report.program, _Program)
    if problem:
        raise DataError(f"{name}: its program is damaged: {problem}", "make it again")
    try:
        program = BuiltProgram.from_dict(report.program)
        settings = planned_program(report.config, program, report.training)
        check_cuts(program.pipeline_splits, graph)
    except (TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{name}: its program is damaged: {shown_value(error)}", "make it again") from None
    if not report.training:
        settings = replace(settings, gradient_accumulation_count=report.steps or INFERENCE_STEPS)
    if len(program.pipeline_splits) != settings.num_stages - 1:
        raise DataError(f"{name} does not say which splits ran", "run it again with --pipeline-splits")
    return Observation(shown(path), graph, tuple(program.pipeline_splits), settings, report.images_per_s)


def _of_benchmark(data: Dict[str, PlainValue], name: str) -> _Report:
    report = from_plain(data, BenchmarkReport, name, _HINT)
    if report.scope == "data":
        raise ConfigurationError(
            f"{name} measured an input pipeline alone", "give reports of --mode training or inference"
        )
    # Flags that are not stored as YAML do not affect a network's speed.
    options = {
        key: value for key, value in report.options.items() if key not in BY_KEY or BY_KEY[key].in_yaml
    }
    config = RunConfig.from_yaml(yaml.safe_dump({**options, "model-name": report.model}), name)
    known = DATASETS.get(known_as(report.data.name) or "")
    return _Report(
        config=config,
        program=report.program,
        device_kind=report.device.kind,
        images_per_s=report.measured.images_per_s.value if report.measured is not None else 0.0,
        input_shape=report.input_shape,
        num_classes=(known and known.num_classes) or get_model(report.model).num_classes,
        training=report.mode == "training",
        steps=config.steps_per_execution,
    )


def _of_run(path: Path, name: str) -> _Report:
    folder = RunFolder(path.parent)
    report = folder.read_report()
    if report is None:
        raise DataError(f"{name} is no report of a run", _HINT)
    config = folder.read_config()
    place = RunFolder(path.parent, config.checkpoint_dir).checkpoints
    kept = [place / each for each in report.checkpoints if (place / each).is_file()]
    if not kept:
        raise DataError(
            f"{name}: the run kept no checkpoint, which knows the size of its images",
            "give the report of a benchmark of it",
        )
    meta = read_meta(kept[-1])
    return _Report(
        config=config,
        program=report.program,
        device_kind=report.compilation.device.kind,
        images_per_s=report.measured.images_per_s or 0.0,
        input_shape=meta["input_shape"],
        num_classes=meta["num_classes"],
    )
