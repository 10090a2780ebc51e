"""The records of ``report.json``, ``folds.json`` and an evaluation: each is written, and read, as it is declared here.

The other files of a run folder have no record here: ``folder.py`` checks their types when it reads them.
"""

from typing import Any, Dict, List, Literal, Mapping, Optional, Tuple, Union

import msgspec

from ipucnn.aliases import Annotated, PlainDict, PlainValue
from ipucnn.config import bounds
from ipucnn.datasets.problems import Unused
from ipucnn.documents import Finite, Natural
from ipucnn.sessions.session import CompilationReport, DeviceInfo, Sharing

Threads = Annotated[int, msgspec.Meta(ge=1, le=bounds.MAX_THREADS)]


Scores = Mapping[str, Union[int, float, None]]
"""Scores of a validation by name; None where there is nothing to measure."""


class ReportedDataset(msgspec.Struct, kw_only=True):
    """The data set of a run.

    Attributes:
        choice: what of the folder serves for what; empty if nothing was chosen.
        train, evaluation: numbers of samples.
        left_out: names of damaged images.
        unused: files and folders that are not read, by reason.
        validated_pixels: ``inner`` and ``of``, the region of the images that is validated; None for all pixels.
        warnings: sentences about what was assumed or left out, such as files of several pages.
    """

    name: str
    location: str
    choice: str = ""  # runs before it was recorded have none
    train: Natural
    evaluation: Natural
    class_names: List[str]
    left_out: List[str]
    unused: List[Unused]
    validated_pixels: Optional[Dict[str, Tuple[Natural, Natural]]]
    warnings: List[str]


class Compilation(msgspec.Struct):
    """The fields of a ``CompilationReport``, and ``compile_s``, the seconds before the steady state."""

    device: DeviceInfo
    num_layers: Natural
    num_parameters: Natural
    num_trainable_parameters: Natural
    macs_per_sample: Natural
    num_graph_operations: Natural
    trace_s: Finite
    first_update_s: Finite
    fused_micro_batches: Natural
    cached: bool
    compile_s: Finite

    @classmethod
    def of(cls, report: CompilationReport) -> "Compilation":
        """Returns the record of a session's report."""
        return msgspec.convert(report.to_dict(), cls)


class Measured(msgspec.Struct):
    """What the process that ended the run measured.

    Attributes:
        images_per_s, flop_per_s: None if it timed no weight update.
        sharing: the cost of sharing weight updates; None for one worker.
        first_weight_update: the weight updates that earlier processes did.
        samples: the samples that this process trained.
    """

    images_per_s: Optional[Finite]
    flop_per_s: Optional[Finite]
    train_s: Finite
    wall_s: Finite
    peak_memory_bytes: Optional[Natural]
    sharing: Optional[Sharing]
    first_weight_update: Natural
    samples: Natural


class Target(msgspec.Struct):
    """Whether ``--target-accuracy`` was reached; the time is None for a continued run."""

    accuracy: Finite
    reached: bool
    weight_updates: Optional[Natural]
    time_to_train_s: Optional[Finite]


class Report(msgspec.Struct):
    """``report.json``: the result of a run.

    Attributes:
        notes: remarks on the network and the weights that the run began with.
        ended_early: the reason; None if the run has all its weight updates.
        moving_statistics: which batch norm statistics the checkpoints have.
        checkpoints: names of the files that the run wrote and kept.
        validation, best_validation: figures of the last and of the best validation.
        processes: ``started``, ``first_weight_update`` and ``command`` of each process.
        environment: versions and machine of the last process.
    """

    model: str
    dataset: ReportedDataset
    notes: List[str]
    program: Dict[str, PlainValue]
    compilation: Compilation
    measured: Measured
    ended_early: Optional[str]
    target: Optional[Target]
    averaged_weights: bool
    moving_statistics: str
    checkpoints: List[str]
    checkpoints_deleted: bool
    trained_samples: Natural
    validation: Optional[Scores]
    best_validation: Optional[Scores]
    processes: List[PlainDict]
    environment: Dict[str, PlainValue]

    def __post_init__(self) -> None:
        for figures in filter(None, (self.validation, self.best_validation)):  # the page shows these
            needed = ["accuracy", "loss", "samples"]
            if "dice" in figures:
                needed += ["dice", "iou"]
            if "dice_background" in figures:
                needed += ["dice_background", "dice_all_foreground"]
            if any(figures.get(name) is None for name in needed):
                raise ValueError(f"a validation lacks one of {', '.join(needed)}")


class CompiledReport(msgspec.Struct):
    """The result of ``--compile-only``: no run folder is made."""

    model: str
    executable_cache: Optional[str]
    program: Dict[str, PlainValue]
    compilation: Compilation
    compiled_only: bool = True


class Fold(msgspec.Struct):
    """A finished fold: its run folder's name, numbers of samples, the held-out examples, figures and seconds.

    Attributes:
        weight_updates: the weight updates that it did.
        ended_early: the reason; None if it did all.
    """

    fold: Natural
    run: str
    train: Natural
    evaluation: Natural
    held_out: List[Natural]
    weight_updates: Natural
    validation: Optional[Scores]
    best_validation: Optional[Scores]
    train_s: Finite
    ended_early: Optional[str] = None


class Folds(msgspec.Struct):
    """``folds.json``: the finished folds of a cross-validation.

    Attributes:
        threads: threads that share an operation, the same in all folds.
        missing: numbers of the folds that are not finished.
        mean, std: mean and sample standard deviation (n - 1; None for one fold) of the last validations.
    """

    schema_version: Literal[1]
    model: str
    dataset: str
    kfold: Natural
    seed: Optional[Natural]
    data_sha256: Optional[str]
    threads: Optional[Threads]
    folds: List[Fold]
    missing: List[Natural]
    mean: Dict[str, Finite]
    std: Dict[str, Optional[Finite]]


class EvaluatedDataset(msgspec.Struct):
    """The data set of an evaluation; ``stored`` counts its samples before ``--limit-eval``."""

    name: str
    location: str
    size: Natural
    stored: Natural


class ClassScores(msgspec.Struct):
    """Scores of a class: ``count`` of true and ``predicted`` samples or pixels; a ratio with denominator 0 is None."""

    number: Natural = msgspec.field(name="class")
    name: str
    count: Natural
    predicted: Natural
    accuracy: Optional[float]
    precision: Optional[float]
    f1: Optional[float]
    iou: Optional[float]


class Bin(msgspec.Struct):
    """A bin of the reliability diagram; the means of an empty one are None."""

    lower: float
    upper: float
    count: Natural
    confidence: Optional[float]
    accuracy: Optional[float]


class Evaluation(msgspec.Struct, omit_defaults=True):
    """The result of ``ipucnn evaluate``.

    Attributes:
        checkpoint: the name of the weights.
        weight_updates: those of the checkpoint; None if that is not known.
        notes: remarks on the network, its weights and the classes.
        device: cpu, gpu or ipu.
        measured: loss, accuracy, top5 or dice and iou, calibration_error, samples and wall_s.
        confusion_matrix: counts; rows are true classes.
        segmentation: further figures of masks, see ``MaskEvaluation.report``; None for classes.
    """

    checkpoint: str
    model: str
    weight_updates: Optional[Natural]
    task: str
    dataset: EvaluatedDataset
    notes: List[str]
    device: str
    measured: Dict[str, PlainValue]
    classes: List[ClassScores]
    calibration: List[Bin]
    confusion_matrix: List[List[Natural]]
    segmentation: Optional[PlainDict] = None


def plain(record: Union[Report, CompiledReport, Folds, Evaluation]) -> Dict[str, Any]:
    """Returns the plain values of a record, as JSON has them."""
    values: Dict[str, Any] = msgspec.to_builtins(record)
    return values
