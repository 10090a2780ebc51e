"""Verifies that an exported network computes what its run computes, within a bound, on samples of the data set.

Rounding to 32 bits moves outputs away from the exact logits by an amount that depends on the network.  So the outputs
of the file, and those of the session that ``ipucnn evaluate`` uses, are both compared with a 64-bit computation of the
same weights. The file's difference may be a few times the session's.  ``predict.py`` must prepare image files as the
session does.
"""

import contextlib
import io
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple

import numpy as np
from scipy import special

from ipucnn.aliases import KerasModel, PlainDict
from ipucnn.config.bounds import DEFAULT_OPSET
from ipucnn.datasets.base import IN_MEMORY, Examples
from ipucnn.datasets.pixels import in_8_bits
from ipucnn.errors import DataError, ThresholdError, UserError
from ipucnn.events import Events, Note
from ipucnn.filesystem import user_error_of, write_text
from ipucnn.runs import predict, runtimes
from ipucnn.runs import setup as run_setup
from ipucnn.runs.exported import RuntimeFailed, RuntimeProcess, outputs_of
from ipucnn.runs.predicting import check_finite
from ipucnn.runs.setup import Setup
from ipucnn.runs.trained import TrainedSetup
from ipucnn.sessions.session import Predictor
from ipucnn.text import distinguishable, shown_value

LEAST_SAMPLES = 100
CALIBRATION_IMAGES = 100
# Largest difference relative to the deviation of the outputs, and least share of samples with the same largest output,
# by the bits of the weights; 32: for networks that cannot be computed in 64 bits.
LIMITS = {32: (1e-4, 0.999), 16: (1e-2, 0.995), 8: (1.0, 0.95)}
FACTOR = 10
"""Allowed ratio of the file's to the session's distance from the 64-bit outputs: runtimes add in different orders.

In 28 short trainings of five networks the ratio was 2.4 at most (ONNX, TFLite and SavedModels).
"""
LEAST_LIMIT, LARGEST_LIMIT = 2e-6, 0.1
"""Bounds of the allowed relative difference of 32-bit weights: the last digits, and the most that rounding explains."""
LARGEST_INPUT_DIFFERENCE = 1e-3
"""Largest difference of the script's inputs from the session's, relative to the range of the session's inputs."""
_MOST_ROUNDED = 0.05
"""Largest share of pixels that may differ by one grey level, because resizing leaves halves."""
_SAME_IN_64_BITS = 1e-9
"""Largest difference in 64 bits, relative to the deviation of the outputs, of two networks that compute the same."""
_BATCH = 8

RunBatch = Callable[[np.ndarray], np.ndarray]
"""Function from the images of one batch to the file's float32 outputs."""


@dataclass(frozen=True)
class Samples:
    """The samples that a file is verified with.

    Attributes:
        images: the exported network's inputs, [n, height, width, channels].
        expected: float32 [n, ..., classes]: the session's outputs.
        exact: float64: the outputs computed in 64 bits; None if the network cannot be computed so.
        origin: description of the samples, in words.
        files: the image files of the samples; none for patches.
        pixels: the uint8 pixels that the images were scaled from; None if these are pixels, or were not rounded.
        rounding: what 32 bits round in a network of Keras's layers, see :func:`rounding_of`.
    """

    images: np.ndarray
    expected: np.ndarray
    exact: Optional[np.ndarray]
    origin: str
    files: Tuple[bytes, ...] = ()
    rounding: float = 0.0
    pixels: Optional[np.ndarray] = None


def exact_network(model: KerasModel) -> Events[Optional[KerasModel]]:
    """Returns the network in 64 bits; None, and yields a note, if some layers compute only in another type."""
    from ipucnn.models.editing import in_64_bits

    try:
        double = in_64_bits(model)
        double(np.zeros((1, *model.inputs[0].shape[1:])), training=False)
    except Exception as error:  # layers of a user's own network may raise anything
        reason = shown_value(" ".join(str(error).split()))
        yield Note(
            f"note: the network cannot be computed in 64 bits ({reason}); the file may differ by {LIMITS[32][0]:g}"
        )
        return None
    return double


def rounding_of(stock: KerasModel, samples: Samples) -> float:
    """The distance of a network of Keras's layers in 32 bits from the 64-bit outputs, relative to their deviation.

    Keras computes a variance as the mean of squares minus the squared mean, and scales an image before it subtracts the
    mean.  32 bits round this more than the session's formulas.  The result is 0 unless the network in 64 bits gives the
    64-bit outputs, and so computes the same.
    """
    from ipucnn.models.editing import in_64_bits

    if samples.exact is None:
        return 0.0
    try:
        double = in_64_bits(stock)
    except Exception:  # as for `exact_network`
        return 0.0
    differences, deviation = [0.0, 0.0], float(samples.exact.std(dtype=np.float64))
    for first in range(0, len(samples.images), _BATCH):
        images, exact = (part[first : first + _BATCH] for part in (samples.images, samples.exact))
        for k, (network, inputs) in enumerate(((stock, images), (double, images.astype(np.float64)))):
            outputs = np.asarray(network(inputs, training=False), np.float64)
            differences[k] = max(differences[k], float(np.abs(outputs - exact).max()))
    is_same = deviation > 0 and differences[1] <= _SAME_IN_64_BITS * deviation
    return differences[0] / deviation if is_same else 0.0


def take_samples(
    trained: TrainedSetup,
    predictor: Predictor,
    double: Optional[KerasModel],
    as_pixels: bool,
    probabilities: bool,
) -> Samples:
    """Returns ``LEAST_SAMPLES`` samples, or all if there are fewer: evaluation samples first, then training samples.

    Args:
        predictor: the predictor of the network.
        double: the network in 64 bits.
        as_pixels: whether the exported network takes uint8 pixels.
        probabilities: whether it returns probabilities instead of logits.

    Raises:
        DataError: its outputs are not finite.
    """
    source, origin, files = trained.source, [], []
    keeps_pixels = trained.config.eight_bit_transfer and not as_pixels
    rows: List[Tuple[np.ndarray, np.ndarray, Any, Any]] = []
    for name, examples in (("evaluation", source.eval), ("training", source.train)):
        left = LEAST_SAMPLES - sum(len(row[0]) for row in rows)
        if left <= 0 or not len(examples):
            continue
        taken = 0
        for pixels, inputs, is_sample in _batches(trained, examples, as_pixels):
            outputs = np.asarray(predictor.predict([inputs])[0])
            pixels, inputs, outputs = (part[is_sample][: left - taken] for part in (pixels, inputs, outputs))
            images = pixels if as_pixels else inputs
            # The file scales pixels itself, so what the session's inputs are rounded by counts, too.
            same = trained.input_range.exact(pixels) if as_pixels else inputs.astype(np.float64)
            exact = None if double is None else np.asarray(double(same, training=False))
            rows.append((images, outputs, exact, pixels if keeps_pixels else None))
            taken += len(images)
            if taken == left:
                break
        files += [] if source.info.patchwise else [_image_file(examples, number) for number in range(taken)]
        origin.append(f"{taken:,} of {name}")
    images, expected = (np.concatenate([row[k] for row in rows]) for k in (0, 1))
    exact = None if double is None else np.concatenate([row[2] for row in rows])
    check_finite(expected)
    if probabilities:
        expected = np.float32(special.softmax(expected, axis=-1))
        exact = None if exact is None else special.softmax(exact, axis=-1)
    whole = np.concatenate([row[3] for row in rows]) if keeps_pixels else None
    return Samples(images, np.float32(expected), exact, " and ".join(origin), tuple(files), pixels=whole)


def _batches(
    trained: Setup, examples: Examples, as_pixels: bool
) -> Iterator[Tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields uint8 pixels, or the inputs again if none are rounded; the session's inputs; and which are no padding."""
    from ipucnn.datasets.pipeline import data_errors

    is_rounded = as_pixels or trained.config.eight_bit_transfer
    setup = replace(trained, source=replace(trained.source, eval=examples))
    setup = setup.in_range("raw") if is_rounded else setup
    with data_errors():
        for batch, _, weights in run_setup.evaluation_batches(setup, _BATCH):
            pixels = inputs = np.asarray(batch)
            if is_rounded:
                # Resizing and the weights of red, green and blue leave fractions.
                pixels = in_8_bits(pixels)
                inputs = np.asarray(trained.input_range.apply(np.float32(pixels)))
            yield pixels, inputs, np.asarray(weights) > 0


def calibration_images(trained: Setup, as_pixels: bool) -> np.ndarray:
    """Returns up to ``CALIBRATION_IMAGES`` images for the exported network, spread evenly over the training set.

    Raises:
        DataError: there are no training images, or they cannot be read.
    """
    examples, taken = trained.source.train, 0
    if not len(examples):
        raise DataError(
            "--int8: the data set has no training images, which give the ranges of the integers",
            "drop --int8, or export with --half",
        )
    spread = np.unique(np.linspace(0, len(examples) - 1, CALIBRATION_IMAGES).astype(int))
    rows = []
    for pixels, inputs, is_sample in _batches(trained, examples.subset(spread), as_pixels):
        rows.append((pixels if as_pixels else inputs)[is_sample])
        taken += len(rows[-1])
        if taken >= CALIBRATION_IMAGES:
            break
    return np.concatenate(rows)[:CALIBRATION_IMAGES]


def _image_file(examples: Examples, number: int) -> bytes:
    """Returns the image file of a sample; for an array in memory, a PNG of it."""
    if not isinstance(examples, IN_MEMORY):
        return examples.encoded(number)
    from PIL import Image

    pixels, packed = examples.images[number], io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(packed, "PNG")
    return packed.getvalue()


def verify(record: PlainDict, path: Path, samples: Samples, run: Optional[RunBatch] = None) -> PlainDict:
    """Runs the samples through a file in its own runtime and compares the outputs.

    Args:
        record: ``export.json`` so far.
        path: the file, or the SavedModel's folder.
        run: function that runs a program for an IPU, in this process: its SavedModel needs the SDK's operations and the
            IPU that this process has acquired.  None uses a :class:`RuntimeProcess`.

    Returns:
        ``verification`` of ``export.json``.

    Raises:
        ThresholdError: the file differs from its description, or its outputs differ too much.
    """
    batch, is_half = record["input"]["shape"][0], record["half"] or record["input"]["dtype"] == "float16"
    bits = 8 if record["int8"] else 16 if is_half else 32
    findings: PlainDict = {}
    files: Dict[str, int] = {}
    largest = LARGEST_LIMIT
    try:
        runtime = "the Poplar SDK's runtime"
        if run is None:
            process = RuntimeProcess({**record, "file": str(path.absolute())})
            runtime, run = process.runtime, process.run
            with _failures_of_script():
                files = check_script(record["input"], samples)
        outputs = outputs_of(run, samples.images, batch, samples.expected.shape[1:])
        findings = {"runtime": runtime, "samples": len(outputs)}
        findings.update(compare(outputs, samples.expected, samples.exact))
        findings["rounding"] = samples.rounding or None
        largest, least = limits(bits, findings["session_relative"], samples.rounding)
        check_limits(findings, largest, least, record["output"]["name"])
    except RuntimeFailed as error:
        is_rounding = largest < findings.get("relative", 0.0) <= LARGEST_LIMIT
        raise ThresholdError(
            f"the {record['format']} file does not do what the run does, and was removed: {error}",
            remedy(record, is_rounding),
        ) from None
    return {
        **findings,
        "of": samples.origin,
        "files": files,
        "wanted_samples": LEAST_SAMPLES,
        "allowed_relative": largest,
        "least_agreement": least,
    }


@contextlib.contextmanager
def _failures_of_script() -> Iterator[None]:
    """Turns what ``predict.py`` raises into :class:`RuntimeFailed`, but for errors of users, the system and memory."""
    try:
        yield
    except (UserError, RuntimeFailed):
        raise
    except Exception as error:
        if user_error_of(error) is not None:
            raise
        raise RuntimeFailed(f"its predict.py raises {type(error).__name__}: {error}") from error


def check_script(described: PlainDict, samples: Samples) -> Dict[str, int]:
    """Prepares the image files of samples with ``predict.py``, as users of an export do.

    Args:
        described: the content of ``input.json``.

    Returns:
        How many files are ``read``, and ``not_read`` because the script refuses their form.

    Raises:
        RuntimeFailed: the script produces other inputs than the session's.
    """
    made, numbers = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(samples.files):
            path = os.path.join(folder, f"{number}.image")
            write_text(Path(path), data)
            with contextlib.suppress(predict.NotRead):
                made.append(predict.network_pixels(path, 0, 0, 0, described))
                numbers.append(number)
    counts = {"read": len(made), "not_read": len(samples.files) - len(made)}
    if not made:
        return counts

    def scaled(pixels: Iterable[np.ndarray]) -> np.ndarray:
        return np.stack([predict.in_range(np.float32(image), described) for image in pixels])

    images, whole = samples.images[numbers], samples.pixels
    pairs = [(scaled(made), images)]
    if whole is not None:
        # One grey level that the last digit decides is more than the rounding of scaled inputs.
        pairs = [(np.uint8(made), whole[numbers]), (scaled(whole[numbers]), images)]
    reason = next(filter(None, (input_difference(*pair) for pair in pairs)), "")
    if reason:
        raise RuntimeFailed(f"predict.py makes other inputs of image files: {reason}")
    return counts


def input_difference(made: np.ndarray, images: np.ndarray) -> str:
    """Describes how inputs differ from the session's by more than rounding; returns "" if they do not."""
    if (made.shape, made.dtype) != (images.shape, images.dtype):
        return f"they are {made.dtype} {list(made.shape)}, not {images.dtype} {list(images.shape)}"
    differences = np.abs(made.astype(np.float64) - images)
    if images.dtype == np.uint8 and differences.max() <= 1:
        # The last digits of 32 bits decide whether a fractional grey level is rounded up or down.
        share = float(np.mean(differences > 0))
        return "" if share <= _MOST_ROUNDED else f"{share:.1%} of the pixels differ by one grey level"
    relative = float(differences.max() / (np.ptp(images.astype(float)) or 1))
    return "" if relative <= LARGEST_INPUT_DIFFERENCE else f"they differ by {relative:.2g}"


def compare(outputs: np.ndarray, expected: np.ndarray, exact: Optional[np.ndarray] = None) -> Dict[str, Any]:
    """Compares outputs, and the session's outputs, with those of a 64-bit computation.

    Args:
        outputs, expected: [n, ..., classes]: outputs of the file and of the session.
        exact: the same outputs computed in float64; None uses the session's as the reference.

    Returns:
        ``largest_difference``; ``deviation``, of all reference outputs (float64); ``relative``, the former over the
        latter; ``session_relative``, the same for the session (None without ``exact``); ``agreement``, the share of
        samples (of masks: pixels) whose largest output is the session's; and ``first_disagreement``, the number of the
        first sample that differs.

    Raises:
        RuntimeFailed: outputs are not finite.
    """
    if not np.isfinite(outputs).all():
        raise RuntimeFailed("its outputs are not finite")
    reference = expected if exact is None else exact
    difference = float(np.abs(outputs.astype(np.float64) - reference).max())
    deviation = float(reference.std(dtype=np.float64))

    def relative(largest: float) -> float:
        return largest / deviation if deviation else (0.0 if largest == 0 else float("inf"))

    same = outputs.argmax(axis=-1) == expected.argmax(axis=-1)
    wrong = np.flatnonzero(~same.reshape(len(same), -1).all(axis=1))
    return {
        "largest_difference": difference,
        "deviation": deviation,
        "relative": relative(difference),
        "session_relative": None if exact is None else relative(float(np.abs(expected - exact).max())),
        "agreement": float(same.mean()),
        "first_disagreement": int(wrong[0]) if len(wrong) else None,
    }


def limits(bits: int, session_relative: Optional[float], rounding: float = 0.0) -> Tuple[float, float]:
    """Returns the largest allowed relative difference of a file, and the least share of samples of the same class.

    Args:
        bits: of its weights: 32, 16 or 8.
        session_relative: the session's relative distance from the 64-bit outputs; None if there are none.
        rounding: see :func:`rounding_of`.
    """
    if bits < 32 or session_relative is None:
        return LIMITS[bits]
    # The limit of the difference suffices: a class can change only if two outputs differ by no more than rounding.
    return min(LARGEST_LIMIT, max(LEAST_LIMIT, FACTOR * max(session_relative, rounding))), 0.0


def check_limits(findings: PlainDict, largest: float, least: float, output_name: str) -> None:
    """Refuses differences beyond the limits.

    Raises:
        RuntimeFailed: the results of :func:`compare` are beyond the limits.
    """
    if findings["relative"] > largest:
        differ, allowed = distinguishable(findings["relative"], largest, digits=2)
        raise RuntimeFailed(
            f"its {output_name} differ by up to {differ} of their deviation, and {allowed} is allowed"
        )
    if findings["agreement"] < least:
        share, allowed = distinguishable(100 * (1 - findings["agreement"]), 100 * (1 - least), digits=2)
        raise RuntimeFailed(f"it gives another class for {share}% of the samples, and {allowed}% is allowed")


def remedy(record: PlainDict, is_rounding: bool = False) -> str:
    """Returns the hint for an export that was refused.

    Args:
        is_rounding: whether rounding may explain the difference.
    """
    if record["int8"]:
        return "export it with --half instead of --int8"
    if record["half"]:
        return "export it without --half"
    if record["opset"] not in (None, DEFAULT_OPSET):
        return f"drop --opset: the default is {DEFAULT_OPSET}"
    if is_rounding:
        if record.get("input", {}).get("dtype") == "uint8":
            return "drop --raw-uint8: scaling pixels in the file may round more; if that fails, too, train for longer"
        return "train it for longer: a network that has hardly learned multiplies what 32 bits round"
    other = runtimes.ONNX if record["format"] == runtimes.SAVED_MODEL else runtimes.SAVED_MODEL
    return f"export it in another format, for example --format {other}"
