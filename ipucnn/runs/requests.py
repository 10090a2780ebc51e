"""The requests of the commands on trained weights: what ``evaluate``, ``infer`` and ``export`` are to do."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Optional, Sequence

from ipucnn.models.blueprint import INPUT_NAME as NETWORK_INPUT
from ipucnn.runs import runtimes

if TYPE_CHECKING:
    from ipucnn.runs.sources import WeightsArgument

IPU = "ipu"
"""The format that the Poplar SDK writes: a SavedModel with a compiled program, which only the SDK can run."""
FORMATS = (*runtimes.FORMATS, IPU)
INPUT_NAME = "images"


@dataclass(frozen=True)
class EvaluateRequest:
    """The options of an ``ipucnn evaluate`` command.

    Attributes:
        named: the network and its weights; its flags override the run's own options.
        plot: figure that the caller writes.
        predictions: CSV file with a row per sample.
        contact_sheet: picture of segmented images that the caller writes.
        patch_size: height and width of the input patches of a segmentation network; None chooses.
        test_time_augmentation: number of versions of each image whose probabilities are averaged (segmentation only).
        verbose: whether to show TensorFlow's messages.
    """

    named: "WeightsArgument"
    plot: Optional[Path] = None
    predictions: Optional[Path] = None
    contact_sheet: Optional[Path] = None
    patch_size: Optional[int] = None
    test_time_augmentation: int = 1
    verbose: bool = False


@dataclass(frozen=True)
class InferRequest:
    """The options of an ``ipucnn infer`` command.

    Attributes:
        named: the network and its weights.
        images: files, folders and patterns; empty with ``subset``.
        top: classes per image, at most the network's.
        subset: eval or train: uses the images of the data set instead; for masks they are one volume.
        output: the file of classes that the caller writes.
        contact_sheet: the file that the caller writes; for masks None stands for a file in their folder.
        verbose: whether to show TensorFlow's messages.
        patch_size: height and width of the input patches; None chooses.
        test_time_augmentation: number of versions of each image whose probabilities are averaged.
        threshold: for two classes the probability of class 1 above which a pixel is class 1; None: the one that
            ``ipucnn evaluate`` recommends for the checkpoint, or 0.5.
        with_overlay: whether to write overlays.
    """

    named: "WeightsArgument"
    images: Sequence[str]
    top: int
    subset: Optional[str] = None
    output: Optional[Path] = None
    contact_sheet: Optional[Path] = None
    verbose: bool = False
    patch_size: Optional[int] = None
    test_time_augmentation: int = 1
    threshold: Optional[float] = None
    with_overlay: bool = False


@dataclass(frozen=True)
class ExportRequest:
    """The options of an ``ipucnn export`` command.

    Attributes:
        named: the network and its weights.
        form: one of ``FORMATS``.
        batch: images of each call; None for any number.
        opset: ONNX opset; None for the default.
        half: whether weights are stored in 16 bits.
        int8: whether weights and activations are 8-bit integers.
        raw_uint8: whether the network takes pixels of 0..255.
        probabilities: whether the network returns probabilities instead of logits.
        output: folder; None for ``exports/NAME-FORMAT``.
        overwrite: whether an earlier export may be replaced.
        verbose: whether to show messages of TensorFlow and the converters.
    """

    named: "WeightsArgument"
    form: str
    batch: Optional[int] = None
    opset: Optional[int] = None
    half: bool = False
    int8: bool = False
    raw_uint8: bool = False
    probabilities: bool = False
    output: Optional[Path] = None
    overwrite: bool = False
    verbose: bool = False

    @property
    def input_name(self) -> str:
        """Name of the network's input."""
        return NETWORK_INPUT if self.form == IPU else INPUT_NAME

    @property
    def input_type(self) -> str:
        """Type of the network's input; see :func:`_describe` for a program for an IPU."""
        return "uint8" if self.raw_uint8 else "float32"

    @property
    def output_name(self) -> str:
        """Name of the network's output."""
        return "probabilities" if self.probabilities else "logits"
