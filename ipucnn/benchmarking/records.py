"""What ``report.json`` and ``suite.json`` hold: every field with its type, its bounds, and what it means.

This is the one declaration of both files: of the values that a benchmark makes, and of what is read from a file.

Units are in the names: seconds ``_s``, bytes ``_bytes``, FLOP ``flop``, where a multiplication with its addition (MAC)
is two FLOP.
"""

import json
import re
import sys
from typing import Any, Dict, List, Optional, Type, TypeVar, Union

import msgspec.structs
from msgspec import UNSET, Meta, Struct, UnsetType

from ipucnn.aliases import PlainValue
from ipucnn.config.bounds import MAX_FLOAT32
from ipucnn.documents import to_record
from ipucnn.errors import DataError
from ipucnn.text import shown_value

if sys.version_info >= (3, 9):
    from typing import Annotated, Literal
else:  # what TensorFlow 2.6 needs, too
    from typing_extensions import Annotated, Literal

RecordType = TypeVar("RecordType", bound="Record")


def one_of(*values: str) -> Meta:
    """That a text is one of a few."""
    return Meta(pattern=f"^({'|'.join(map(re.escape, values))})$")


Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(gt=0, le=MAX_FLOAT32)]
Share = Annotated[float, Meta(ge=0, le=1)]


class Record(Struct, forbid_unknown_fields=True):
    """A JSON object; its attributes are the keys."""

    def to_dict(self) -> Dict[str, Any]:
        """Plain values, ready for JSON."""
        plain: Dict[str, Any] = msgspec.to_builtins(self)
        return plain

    def to_json(self) -> str:
        """Indented text; never NaN or Infinity."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"


def from_plain(data: PlainValue, record: Type[RecordType], where: str, hint: str) -> RecordType:
    """A record of one of our files, from what was read of it.

    Args:
        data: plain values.
        record: what it should be, with ``kind`` and ``schema_version``.
        where: the file, for messages.
        hint: which file is wanted.

    Raises:
        DataError: it is of another kind or version, or damaged: naming the first thing that is not what it should be.
    """
    kind, version = (
        next(f.default for f in msgspec.structs.fields(record) if f.name == name)
        for name in ("kind", "schema_version")
    )
    if not isinstance(data, dict) or data.get("kind") != kind:
        raise DataError(f"{where} is no result of an {kind}", hint)
    if data.get("schema_version") != version:
        has = shown_value(data.get("schema_version"))
        raise DataError(f"{where} has schema_version {has}, this ipucnn reads {version}", "make it again")
    return to_record(data, record, where, "make it again")


class Interval(Record):
    """An estimate, and the bounds of its 95 % bootstrap interval, null with fewer than 6 executions."""

    value: float
    lower: Optional[float]
    upper: Optional[float]


class Execution(Record):
    """One timed execution."""

    samples: Positive
    wall_s: Amount
    cpu_s: Annotated[float, Meta(ge=0, description="processor time of all threads of the process")] = 0.0
    reference_s: Annotated[
        Optional[float],
        Meta(description="time of one repetition of the yardstick, mean of before and after"),
    ] = None
    reference_cpu_s: Annotated[Optional[float], Meta(description="its processor time")] = None


class IpuMemory(Record):
    """What is predicted to lie in one IPU's memory."""

    ipu: Natural
    bytes: float
    fill: float
    verdict: Annotated[str, one_of("fits", "uncertain", "does not fit")]


class DataFacts(Record, kw_only=True):
    """Where the images come from."""

    kind: Annotated[str, one_of("host-generated", "device-generated", "real")]
    description: str
    name: str
    location: str
    num_images: Natural


class MeasuringSettings(Record, kw_only=True):
    """How long to measure, and beside what."""

    min_executions: Positive
    min_time_s: float
    max_time_s: float
    max_warmup_s: float
    execution_s: float
    compare_with: Optional[str]


class DeviceFacts(Record, kw_only=True):
    """What the session ran on."""

    kind: Annotated[str, one_of("cpu", "gpu", "ipu")]
    name: str
    num_cores: Positive
    memory_bytes: Natural


class PredictedMemory(Record, kw_only=True):
    """The memory of each IPU of a prediction."""

    system: str
    precision: str
    ipus: List[IpuMemory]


class Compilation(Record, kw_only=True):
    """What was compiled, and how long it took."""

    num_layers: Natural
    num_parameters: Annotated[Natural, Meta(description="all, also those that are not trained")]
    num_trainable_parameters: Natural
    macs_per_sample: Natural
    num_graph_operations: Natural
    trace_s: float
    compile_s: Annotated[float, Meta(description="tracing and first execution")]
    first_execution_s: Annotated[
        Optional[float], Meta(description="which may compile; null if it was not reached")
    ] = None
    fused_micro_batches: Positive
    cached: Annotated[
        Optional[bool],
        Meta(
            description="whether the executable came from a cache; null where there is none, as on the host"
        ),
    ] = None
    predicted_memory: List[PredictedMemory]


class ExecutionFacts(Record, kw_only=True):
    """What one execution computes."""

    weight_updates: Annotated[Optional[int], Meta(description="null in inference")]
    micro_batches: Annotated[
        Positive, Meta(description="over all replicas, which the host computes one after the other")
    ]
    samples: Positive
    fused_micro_batches: Annotated[Positive, Meta(description="computed as one by the host session")]
    reference_repetitions: Annotated[
        Union[Positive, UnsetType], Meta(description="of the yardstick at a time")
    ] = UNSET


class Phases(Record, kw_only=True):
    """Seconds of each phase; those not reached are absent."""

    data_s: Optional[float]
    build_s: Union[float, UnsetType, None] = UNSET
    trace_s: Union[float, UnsetType, None] = UNSET
    prepare_s: Annotated[
        Union[float, UnsetType, None],
        Meta(description="the session's setup of training or inference, trace_s in it"),
    ] = UNSET
    first_execution_s: Union[float, UnsetType, None] = UNSET
    warmup_s: Union[float, UnsetType, None] = UNSET
    measured_s: Union[float, UnsetType, None] = UNSET


class Warmup(Record, kw_only=True):
    """What was executed before measuring began."""

    executions: Natural
    seconds: float
    steady: Annotated[bool, Meta(description="ended because times no longer changed, not by its time limit")]


class Spread(Record):
    """How the times of executions scatter."""

    min_s: Amount
    median_s: Amount
    max_s: Amount
    coefficient_of_variation: Optional[float]


class Percentile(Record):
    """A percentile of the time of an execution."""

    percent: float
    needs: Annotated[Positive, Meta(description="executions from which it is given")]
    value_s: Optional[float] = None
    at_most_s: Annotated[Optional[float], Meta(description="upper bound at 99 % confidence")] = None


class MatmulPeakFacts(Record):
    """What the device does at best."""

    flop_per_s: Amount
    method: str


class MeasuredFigures(Record, kw_only=True):
    """The figures of the network, or of the input pipeline."""

    images_per_s: Annotated[Interval, Meta(description="total samples / total time")]
    step_s: Annotated[Amount, Meta(description="time of step_samples at that throughput")]
    step_samples: Annotated[
        Positive, Meta(description="of a weight update; in inference of one micro-batch on each replica")
    ]
    total_samples: Positive
    total_s: Amount
    num_executions: Positive
    execution: Spread
    percentiles: List[Percentile]
    flop_per_image: Annotated[Optional[float], Meta(description="null where nothing is computed")]
    flop_per_s: Optional[float]
    matmul_peak: Optional[MatmulPeakFacts]
    share_of_matmul_peak: Optional[float]
    peak_memory_bytes: Annotated[
        Optional[int], Meta(description="resident memory of the process, high-water mark")
    ]
    device_peak_memory_bytes: Annotated[Optional[int], Meta(description="of a GPU")]
    others_share: Annotated[
        Optional[Share],
        Meta(description="of the processors, taken by others meanwhile; null where the system does not tell"),
    ]


class Comparison(Record, kw_only=True, rename={"rival": "with"}):
    """The same work by another program, in turns in one process."""

    rival: Annotated[str, one_of("keras", "onnx", "tflite", "saved-model")]
    description: str
    executions: List[Execution]
    steady: bool
    images_per_s: Interval
    ratio: Annotated[Interval, Meta(description="session over rival, paired by round")]
    ratio_by_processor_time: Annotated[
        Optional[Interval],
        Meta(description="the same of processor seconds, for machines that are shared; null on a GPU"),
    ]


class Prediction(Record, kw_only=True):
    """What the cost and memory model predicts of IPUs; figures are null where it predicts none."""

    system: str
    title: str
    ipu: str
    precision: str
    images_per_s: Optional[float] = None
    images_per_s_band: Annotated[
        Optional[List[float]], Meta(description="80 of 100 measurements are expected between the two")
    ] = None
    step_s: Optional[float] = None
    latency_s: Optional[float] = None
    flop_per_s: Optional[float] = None
    share_of_peak: Annotated[Optional[float], Meta(description="of the IPUs' matrix units")] = None
    num_ipus: Optional[int] = None
    ipus_per_replica: Optional[int] = None
    splits: List[str] = []
    recomputation: Optional[bool] = None
    bottleneck: Optional[str] = None
    memory: List[IpuMemory] = []
    notes: List[str] = []


class PipelinePartFigures(Record, kw_only=True):
    """The input pipeline up to one of its parts."""

    name: Annotated[str, one_of("read", "decode", "augment", "batch")]
    what: str
    images_per_s: Annotated[Interval, Meta(description="through the pipeline up to this stage")]
    own_s_per_image: Annotated[
        Interval,
        Meta(description="time per image less that up to the stage before; may be negative by chance"),
    ]
    executions: List[Execution]


class Feed(Record, kw_only=True):
    """How many IPUs take as many images as the pipeline delivers."""

    system: str
    precision: str
    images_per_s_per_ipu: Annotated[float, Meta(description="predicted")]
    num_ipus: Annotated[Interval, Meta(description="measured over predicted")]


class PipelineFigures(Record, kw_only=True):
    """The input pipeline alone, part by part."""

    method: str
    batch_size: Positive
    num_parallel: Optional[int]
    stages: List[PipelinePartFigures]
    feeds: List[Feed]


class Throughput(Record, kw_only=True):
    """Executions of one thing, and their throughput."""

    images_per_s: Interval
    executions: List[Execution]


class EndToEnd(Record, kw_only=True):
    """The network on its data beside the network on a constant batch, and the input pipeline alone."""

    method: str
    data_share: Annotated[Interval, Meta(description="share of the time that the input pipeline costs")]
    constant_batch: Throughput
    pipeline: Throughput


class Regression(Record, kw_only=True):
    """The comparison with a baseline."""

    baseline: str
    baseline_images_per_s: Amount
    ratio: Annotated[Interval, Meta(description="speed now over speed then, which decides")]
    ratio_by_time: Interval
    ratio_by_processor_time: Annotated[
        Optional[Interval], Meta(description="null on a quiet machine, where time alone decides")
    ]
    allowed: float
    verdict: Annotated[str, one_of("slower", "not slower", "inconclusive")]
    why_inconclusive: Annotated[
        Optional[str], Meta(description="set where one of the runs has too few executions to decide anything")
    ]
    regressed: bool
    method: str


class BenchmarkReport(Record, kw_only=True):
    """One benchmark.

    Everything under predicted and predicted_memory is predicted by a model of the IPU; everything else was measured on
    the device named.
    """

    kind: Literal["ipucnn benchmark"] = "ipucnn benchmark"
    schema_version: Literal[3] = 3
    model: Annotated[str, Meta(description="registered name")]
    preset: Annotated[Optional[str], Meta(description="preset the options came from")]
    mode: Annotated[
        Annotated[str, one_of("training", "inference")], Meta(description="what the network does")
    ]
    scope: Annotated[
        Annotated[str, one_of("session", "data", "end-to-end")],
        Meta(
            description="session: the network on its data; data: the input pipeline alone; end-to-end: the network on "
            "its data, beside the network on a constant batch and the pipeline alone"
        ),
    ]
    started: Annotated[str, Meta(description="local time, ISO 8601")]
    seed: Annotated[Natural, Meta(description="of weights, data and bootstrap")]
    input_shape: Annotated[
        List[Positive], Meta(min_length=3, max_length=3, description="height, width, channels")
    ]
    data: DataFacts
    settings: MeasuringSettings
    options: Annotated[
        Dict[str, Any],
        Meta(
            description="options of the run that decide about its speed, by key; a baseline has to have the same"
        ),
    ]
    program: Annotated[Dict[str, Any], Meta(description="the Program, with executions as they were measured")]
    device: DeviceFacts
    environment: Annotated[Dict[str, Any], Meta(description="versions, git revision, machine, command line")]
    compilation: Optional[Compilation] = None
    execution: Optional[ExecutionFacts] = None
    phases: Phases
    warmup: Optional[Warmup] = None
    executions: Annotated[List[Execution], Meta(description="every measured execution")] = []
    measured: Annotated[
        Optional[MeasuredFigures], Meta(description="null if the result is void or nothing was measured")
    ] = None
    comparison: Optional[Comparison] = None
    predicted: List[Prediction] = []
    data_pipeline: Annotated[
        Optional[PipelineFigures], Meta(description="in scope data: images per second up to each stage")
    ] = None
    end_to_end: Annotated[Optional[EndToEnd], Meta(description="in scope end-to-end")] = None
    regression: Optional[Regression] = None
    notes: List[str] = []
    void: Annotated[
        Optional[str],
        Meta(description="why the result does not count, null if it does; measured is null then"),
    ] = None
    hint: Annotated[Optional[str], Meta(description="what to do about void")] = None
    traceback: Annotated[
        Optional[str], Meta(description="of an unexpected error that made the result void")
    ] = None
    interrupted: bool = False

    @property
    def images_per_s(self) -> Optional[float]:
        """Measured throughput; None if the result is void or nothing was measured."""
        return self.measured.images_per_s.value if self.measured is not None else None


class Row(Record, kw_only=True):
    """One command line of a suite; figures are null until it has run."""

    id: Annotated[str, Meta(pattern="^[A-Za-z0-9._-]+$", description="unique; its run folder is rows/ID")]
    name: str
    model: str
    command: Annotated[str, Meta(description="what is typed behind `ipucnn`")]
    mode: Annotated[str, one_of("inference", "training")]
    status: Annotated[str, one_of("pending", "done", "failed")] = "pending"
    error: Annotated[Optional[str], Meta(description="why the row failed")] = None
    exit_code: Optional[int] = None
    wall_s: Annotated[Optional[Amount], Meta(description="of the whole command, its start included")] = None
    device: Optional[str] = None
    data: Annotated[Optional[str], Meta(description="name of the data set")] = None
    image_height: Optional[Natural] = None
    image_width: Optional[Natural] = None
    micro_batch_size: Optional[Natural] = None
    gradient_accumulation_count: Optional[Natural] = None
    num_replicas: Optional[Natural] = None
    num_stages: Optional[Natural] = None
    images_per_s: Optional[Amount] = None
    images_per_s_lower: Annotated[Optional[Amount], Meta(description="95 % bootstrap interval")] = None
    images_per_s_upper: Optional[Amount] = None
    step_s: Annotated[
        Optional[Amount],
        Meta(description="as the benchmark's report has it; of a training run, of one micro-batch"),
    ] = None
    compile_s: Optional[Amount] = None
    num_trainable_parameters: Optional[Natural] = None
    macs_per_image: Optional[Natural] = None
    flop_per_parameter: Annotated[
        Optional[Amount], Meta(description="2 x MACs x micro-batch size / trainable parameters")
    ] = None
    peak_memory_bytes: Optional[Natural] = None
    ratio_to_keras: Optional[Amount] = None
    training_accuracy: Optional[Share] = None
    accuracy: Annotated[Optional[Share], Meta(description="on held-out images")] = None
    epoch_s: Annotated[
        Optional[Amount], Meta(description="of the whole batches in `epoch_images`; null where there is none")
    ] = None
    predicted_images_per_s: Annotated[Optional[Amount], Meta(description="of IPUs, not measured")] = None
    predicted_num_ipus: Optional[Natural] = None
    notes: List[str] = []


class MachineFacts(Record):
    """What is known of a machine without TensorFlow."""

    cpu: Optional[str]
    num_cores: Positive
    memory_bytes: Natural
    python: str
    tensorflow: Optional[str]


class SuiteResult(Record, kw_only=True):
    """One row for each command line."""

    kind: Literal["ipucnn benchmark suite"] = "ipucnn benchmark suite"
    schema_version: Literal[3] = 3
    suite: Annotated[str, Meta(description="name of its file without the ending, or the wildcard")]
    title: str
    about: str
    started: Annotated[str, Meta(description="when the first of its rows began, local time with offset")]
    machine: MachineFacts
    epoch_images: Annotated[
        Optional[Positive], Meta(description="training images of the epoch whose time is added up")
    ]
    rows: Annotated[List[Row], Meta(min_length=1)]
