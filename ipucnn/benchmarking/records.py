"""Declares the contents of ``report.json`` and ``suite.json``: every field with its type, its bounds and its meaning.

This is the only declaration of both files, for writing and for reading.

Units are in the names: seconds ``_s``, bytes ``_bytes``, FLOP ``flop``, where a multiplication with its addition (MAC)
is two FLOP.
"""

import json
import re
import sys
from typing import Any, Dict, List, Optional, Type, TypeVar

import msgspec.structs
from msgspec import Meta, Struct

from ipucnn.aliases import PlainValue
from ipucnn.config.bounds import MAX_FLOAT32
from ipucnn.documents import to_record
from ipucnn.errors import DataError
from ipucnn.text import shown_value

if sys.version_info >= (3, 9):
    from typing import Annotated, Literal
else:  # TensorFlow 2.6 needs it, too
    from typing_extensions import Annotated, Literal

RecordType = TypeVar("RecordType", bound="Record")


def one_of(*values: str) -> Meta:
    """Returns the constraint that a text is one of a few."""
    return Meta(pattern=f"^({'|'.join(map(re.escape, values))})$")


Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(gt=0, le=MAX_FLOAT32)]
Share = Annotated[float, Meta(ge=0, le=1)]


class Record(Struct, forbid_unknown_fields=True, frozen=True):
    """A JSON object; its attributes are the keys."""

    def to_dict(self) -> Dict[str, Any]:
        """Returns plain values, ready for JSON."""
        plain: Dict[str, Any] = msgspec.to_builtins(self)
        return plain

    def to_json(self) -> str:
        """Returns indented text; never NaN or Infinity."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"


def from_plain(data: PlainValue, record: Type[RecordType], where: str, hint: str) -> RecordType:
    """Returns a record read from one of the package's files.

    Args:
        data: the plain values read from the file.
        record: the expected record class, with ``kind`` and ``schema_version``.
        where: the file, for messages.
        hint: the hint about the expected file.

    Raises:
        DataError: the file is of another kind or version, or damaged; the message names the first wrong value.
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


class Interval(Record, frozen=True):
    """An estimate, and the bounds of its 95 % bootstrap interval, null with fewer than 6 executions."""

    value: float
    lower: Optional[float]
    upper: Optional[float]


class Execution(Record, frozen=True):
    """One timed execution."""

    samples: Positive
    wall_s: Amount
    cpu_s: Annotated[float, Meta(ge=0)] = 0.0  # processor time of all threads of the process
    reference_s: Optional[float] = (
        None  # time of one repetition of the reference workload, mean of before and after
    )
    reference_cpu_s: Optional[float] = None  # its processor time


class IpuMemory(Record, frozen=True):
    """The predicted contents of one IPU's memory."""

    ipu: Natural
    bytes: float
    fill: float
    verdict: Annotated[str, one_of("fits", "uncertain", "does not fit")]


class DataFacts(Record, frozen=True, kw_only=True):
    """The source of the images."""

    kind: Annotated[str, one_of("host-generated", "device-generated", "real")]
    description: str
    name: str
    location: str
    num_images: Natural


class Limits(Record, frozen=True, kw_only=True):
    """The limits of a measurement, and the program to compare with.

    Attributes:
        min_executions, min_time_s: the least number of executions and their least total time; both are reached if
            ``max_time_s`` allows.  The time is the sum of the first contender's executions, without other contenders
            and the reference.
        max_time_s: the limit of everything, from ``started`` on.  A third of it is kept for the measured executions,
            however long compiling takes, and at least ``MIN_EXECUTIONS`` rounds are measured whatever time they take.
        max_warmup_s: the time of each contender after which warm-up ends, steady or not; at least one execution is run.
            Warm-up also ends when the measured executions need the rest of ``max_time_s``.
        execution_s: the target length of an execution, if one unit takes less.
        compare_with: "keras", or None.
    """

    min_executions: Positive
    min_time_s: float
    max_time_s: float
    max_warmup_s: float
    execution_s: float
    compare_with: Optional[str]


class DeviceFacts(Record, frozen=True, kw_only=True):
    """The device of the session."""

    kind: Annotated[str, one_of("cpu", "gpu", "ipu")]
    name: str
    num_cores: Positive
    memory_bytes: Natural


class CompiledNetwork(Record, frozen=True, kw_only=True):
    """The compiled network, and the time to compile it."""

    num_layers: Natural
    num_parameters: Natural  # of all layers, also those that are not trained
    num_trainable_parameters: Natural
    macs_per_sample: Natural
    num_graph_operations: Natural
    trace_s: float
    compile_s: float  # tracing and first execution
    first_execution_s: Optional[float] = None  # it may compile; null if it was not reached
    fused_micro_batches: Positive
    # whether the executable came from a cache; null if there is none, as on the host
    cached: Optional[bool] = None


class ExecutionFacts(Record, frozen=True, kw_only=True):
    """The work of one execution."""

    weight_updates: Optional[int]  # null in inference
    micro_batches: Positive  # over all replicas; the host computes them one after the other
    samples: Positive
    fused_micro_batches: Positive  # fused into one by the host session
    reference_repetitions: Optional[Positive] = None  # repetitions of the reference workload at a time


class Warmup(Record, frozen=True, kw_only=True):
    """The executions before measuring began."""

    executions: Natural
    seconds: float
    steady: bool  # whether it ended because times no longer changed, not by its time limit


class Spread(Record, frozen=True):
    """The spread of the execution times."""

    min_s: Amount
    median_s: Amount
    max_s: Amount
    coefficient_of_variation: Optional[float]


class Percentile(Record, frozen=True):
    """A percentile of the time of an execution."""

    percent: float
    needs: Positive  # the number of executions from which on it is given
    value_s: Optional[float] = None
    at_most_s: Optional[float] = None  # upper bound at 99 % confidence


class MatmulPeakFacts(Record, frozen=True):
    """The peak performance of the device."""

    flop_per_s: Amount
    method: str


class MeasuredFigures(Record, frozen=True, kw_only=True):
    """The figures of the network, or of the input pipeline."""

    images_per_s: Interval  # total samples / total time
    step_s: Amount  # time of step_samples at that throughput
    step_samples: Positive  # samples of a weight update; in inference of one micro-batch on each replica
    total_samples: Positive
    total_s: Amount
    num_executions: Positive
    execution: Spread
    percentiles: List[Percentile]
    flop_per_image: Optional[float]  # null if nothing is computed
    flop_per_s: Optional[float]
    matmul_peak: Optional[MatmulPeakFacts]
    share_of_matmul_peak: Optional[float]
    peak_memory_bytes: Optional[int]  # resident memory of the process, high-water mark
    device_peak_memory_bytes: Optional[int]  # the same of a GPU
    # share of the processors used by others meanwhile; null if the system does not report it
    others_share: Optional[Share]


class Comparison(Record, frozen=True, kw_only=True, rename={"rival": "with"}):
    """The same work by another program, in turns in one process."""

    rival: Annotated[str, one_of("keras", "onnx", "tflite", "saved-model")]
    description: str
    executions: List[Execution]
    steady: bool
    images_per_s: Interval
    ratio: Interval  # session over rival, paired by round
    # the same with processor seconds, for shared machines; null on a GPU
    ratio_by_processor_time: Optional[Interval]


class IpuPrediction(Record, frozen=True, kw_only=True):
    """The predictions of the cost and memory model for IPUs; a figure is null if there is no prediction."""

    system: str
    title: str
    ipu: str
    precision: str
    images_per_s: Optional[float] = None
    images_per_s_band: Optional[List[float]] = None  # 80 of 100 measurements are expected between the two
    step_s: Optional[float] = None
    latency_s: Optional[float] = None
    flop_per_s: Optional[float] = None
    share_of_peak: Optional[float] = None  # share of the peak of the IPUs' matrix units
    num_ipus: Optional[int] = None
    ipus_per_replica: Optional[int] = None
    splits: List[str] = []
    recomputation: Optional[bool] = None
    bottleneck: Optional[str] = None
    memory: List[IpuMemory] = []
    notes: List[str] = []


class PipelinePartFigures(Record, frozen=True, kw_only=True):
    """The input pipeline up to one of its parts."""

    name: Annotated[str, one_of("read", "decode", "augment", "batch")]
    what: str
    images_per_s: Interval  # through the pipeline up to this stage
    own_s_per_image: Interval  # time per image minus that up to the previous stage; may be negative by chance
    executions: List[Execution]


class Feed(Record, frozen=True, kw_only=True):
    """The number of IPUs that take as many images as the pipeline delivers."""

    system: str
    precision: str
    images_per_s_per_ipu: float  # predicted
    num_ipus: Interval  # measured over predicted


class PipelineFigures(Record, frozen=True, kw_only=True):
    """The input pipeline alone, part by part."""

    method: str
    batch_size: Positive
    num_parallel: Optional[int]
    stages: List[PipelinePartFigures]
    feeds: List[Feed]


class Throughput(Record, frozen=True, kw_only=True):
    """The executions of one contender, and their throughput."""

    images_per_s: Interval
    executions: List[Execution]


class EndToEnd(Record, frozen=True, kw_only=True):
    """The network on its data beside the network on a constant batch, and the input pipeline alone."""

    method: str
    data_share: Interval  # share of the time that is due to the input pipeline
    constant_batch: Throughput
    pipeline: Throughput


class Regression(Record, frozen=True, kw_only=True):
    """The comparison with a baseline."""

    baseline: str
    baseline_images_per_s: Amount
    ratio: Interval  # speed now over speed then, which is decisive
    ratio_by_time: Interval
    ratio_by_processor_time: Optional[Interval]  # null on a quiet machine, where time alone is decisive
    allowed: float
    verdict: Annotated[str, one_of("slower", "not slower", "inconclusive")]
    why_inconclusive: Optional[str]  # set if one of the runs has too few executions for a decision
    regressed: bool
    method: str


class Request(Record, frozen=True, kw_only=True):
    """The part of a report that is known before the network is built."""

    kind: Literal["ipucnn benchmark"] = "ipucnn benchmark"
    schema_version: Literal[4] = 4
    model: str  # registered name
    preset: Optional[str]  # the preset that the options came from
    mode: Annotated[str, one_of("training", "inference")]  # the measured operation of the network
    # session: the network on its data; data: the input pipeline alone; end-to-end: the network on its data, beside the
    # network on a constant batch and the pipeline alone
    scope: Annotated[str, one_of("session", "data", "end-to-end")]
    started: str  # local time, ISO 8601
    seed: Natural  # seed of weights, data and bootstrap
    input_shape: Annotated[List[Positive], Meta(min_length=3, max_length=3)]  # height, width, channels
    data: DataFacts
    settings: Limits
    # options of the run that affect its speed, by key; a baseline must have the same
    options: Dict[str, Any]
    program: Dict[str, Any]  # the Program, in a report with the measured executions


class BenchmarkReport(Request, frozen=True, kw_only=True):
    """One benchmark.

    Everything under predicted comes from a model of the IPU; everything else was measured on the named device.
    """

    device: DeviceFacts
    environment: Dict[str, Any]  # versions, digest of the sources, machine, command line
    compilation: Optional[CompiledNetwork] = None
    execution: Optional[ExecutionFacts] = None
    warmup: Optional[Warmup] = None
    executions: List[Execution] = []  # every measured execution
    measured: Optional[MeasuredFigures] = None  # null if the result is void or nothing was measured
    comparison: Optional[Comparison] = None
    predicted: List[IpuPrediction] = []
    data_pipeline: Optional[PipelineFigures] = None  # in scope data: images per second up to each stage
    end_to_end: Optional[EndToEnd] = None  # in scope end-to-end
    regression: Optional[Regression] = None
    notes: List[str] = []
    void: Optional[str] = None  # why the result does not count, null if it does; measured is null then
    hint: Optional[str] = None  # advice about void
    traceback: Optional[str] = None  # traceback of an unexpected error that made the result void
    interrupted: bool = False


class Figures(Record, frozen=True, kw_only=True):
    """The figures that a benchmark, a training run and Keras' own loop have in common; null if one does not have it."""

    device: Optional[str] = None
    data: Optional[str] = None  # name of the data set
    image_height: Optional[Natural] = None
    image_width: Optional[Natural] = None
    micro_batch_size: Optional[Natural] = None
    gradient_accumulation_count: Optional[Natural] = None
    num_replicas: Optional[Natural] = None
    num_stages: Optional[Natural] = None
    images_per_s: Optional[Amount] = None
    images_per_s_lower: Optional[Amount] = None  # 95 % bootstrap interval
    images_per_s_upper: Optional[Amount] = None
    step_s: Optional[Amount] = None  # as in the benchmark's report; in a training run, of one micro-batch
    compile_s: Optional[Amount] = None
    num_trainable_parameters: Optional[Natural] = None
    macs_per_image: Optional[Natural] = None
    flop_per_parameter: Optional[Amount] = None  # 2 x MACs x micro-batch size / trainable parameters
    peak_memory_bytes: Optional[Natural] = None
    ratio_to_keras: Optional[Amount] = None
    training_accuracy: Optional[Share] = None
    accuracy: Optional[Share] = None  # accuracy on held-out images
    predicted_images_per_s: Optional[Amount] = None  # predicted for IPUs, not measured
    predicted_num_ipus: Optional[Natural] = None
    notes: List[str] = []


class Row(Figures, frozen=True, kw_only=True):
    """One command line of a suite; figures are null until it has run."""

    id: Annotated[str, Meta(pattern="^[A-Za-z0-9._-]+$")]  # unique; its run folder is rows/ID
    name: str
    model: str
    command: str  # the words to type after `ipucnn`
    mode: Annotated[str, one_of("inference", "training")]
    status: Annotated[str, one_of("pending", "done", "failed")] = "pending"
    error: Optional[str] = None  # why the row failed
    exit_code: Optional[int] = None
    wall_s: Optional[Amount] = None  # time of the whole command, its start included
    epoch_s: Optional[Amount] = None  # time of the whole batches in `epoch_images`; null if there is none


class MachineFacts(Record, frozen=True):
    """The facts about a machine that are known without TensorFlow."""

    cpu: Optional[str]
    num_cores: Positive
    memory_bytes: Natural
    python: str
    tensorflow: Optional[str]


class SuiteResult(Record, frozen=True, kw_only=True):
    """One row for each command line."""

    kind: Literal["ipucnn benchmark suite"] = "ipucnn benchmark suite"
    schema_version: Literal[4] = 4
    suite: str  # name of its file without the ending, or the wildcard
    title: str
    about: str
    started: str  # start of the first of its rows, local time with offset
    machine: MachineFacts
    epoch_images: Optional[Positive]  # training images of the epoch whose time is computed
    rows: Annotated[List[Row], Meta(min_length=1)]
