"""Inference: the most probable classes of images, on batches of one fixed shape."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from ipucnn.errors import ConfigurationError, DataError
from ipucnn.hardware import num_cores
from ipucnn.runs import setup as run_setup
from ipucnn.runs.fitting import prediction_would_fit
from ipucnn.runs.images.inputs import (
    SPLITS,
    ImageInput,
    decoded,
    find_images,
    images_of_files,
    images_of_split,
)
from ipucnn.runs.spool import Spool, check_outputs
from ipucnn.runs.trained import Subject, open_subject, weight_inputs
from ipucnn.text import printable
from ipucnn.training.evaluation import log_softmax

OUTPUTS = (".csv", ".json", ".jsonl")
LARGEST_BATCH = 64
# Pixels of a batch: 8 images of 256x256.
BATCH_PIXELS = 8 * 256 * 256
Predict = Callable[[Any], Any]
OnImage = Callable[[int, Dict[str, Any], Any], None]


@dataclass
class Predictions:
    """What an inference gave.

    Attributes:
        results: per image ``image``, ``predictions`` (``label``, ``class`` and ``probability``, falling), and
            ``truth`` and ``correct`` where the class is known.
        num_failed: inputs that were no readable image.
        top: predictions per image.
        with_truth: whether the true classes are known.
    """

    results: Spool
    num_failed: int
    top: int
    with_truth: bool


def infer_run(
    target: str,
    images: Sequence[str],
    flags: Mapping[str, Any],
    *,
    split: Optional[str] = None,
    top: int = 5,
    which: Optional[str] = None,
    weights: Optional[str] = None,
    outputs: Sequence[Tuple[str, Optional[Path], Tuple[str, ...]]] = (),
    verbose: bool = False,
    say: Callable[[str], None] = lambda line: None,
    on_images: Optional[Callable[[int, int], None]] = None,
    on_total: Callable[[int], None] = lambda total: None,
    on_image: Optional[OnImage] = None,
) -> Predictions:
    """The ``top`` most probable classes of each image.

    Args:
        target: run folder, checkpoint or Keras weight file of a classification network, or with ``weights``
            a network.
        images: files, folders and patterns; empty with ``split``.
        flags: options given on the command line.
        split: eval or train: the images of the data set instead.
        top: classes per image, at most the network's.
        which: which checkpoint of the run.
        weights: imagenet or a Keras weight file.
        outputs: (flag, file, extensions) the caller will write; checked before any work.
        verbose: let TensorFlow speak.
        say: takes a line for each image that cannot be read, and warnings.
        on_images: called with the images done and their total.
        on_total: called with the number of images before the first.
        on_image: called with the position, the result and the uint8 pixels of each readable image.

    Raises:
        ConfigurationError: neither images nor a split, or both.
        DataError: no image at all, a segmentation network, or weights that do not fit.
    """
    from ipucnn.sessions.factory import create_session

    _check_request(images, split)
    paths, problems = find_images(images)
    images_read = [("one of the images", Path(path)) for path in paths]
    check_outputs(outputs, [*images_read, *weight_inputs(target, which, weights)])
    subject = open_subject("infer", target, flags, which=which, weights=weights, reads_data=split is not None)
    setup = subject.setup
    if setup.record.task != "classification":
        raise DataError(
            f"{setup.record.name} segments images, it has no labels", "give --output for its masks"
        )
    for problem in problems:
        say(problem)
    if split is None and not paths:
        raise DataError("there is no image to classify", "give image files, folders or patterns")
    inputs, total = _inputs(subject, split, paths)
    for warning in subject.warnings:
        say(f"warning: {warning}")
    config = subject.resolved.config
    session = create_session(config.device, verbose=verbose, config=config)
    run_setup.move_preprocessing(setup, session)
    names = tuple(map(printable, subject.names()))
    model = subject.build()
    session.would_fit = prediction_would_fit(model, setup.record.name, config, "infer")
    session.prepare_evaluation(model, None)
    on_total(total)
    spool, failed = Spool(), len(problems)
    threads = min(config.pipeline_num_parallel, 2 * num_cores())
    batch = batch_size(setup.input_shape, total)
    finish = _finisher(subject)
    readable: List[Tuple[int, ImageInput, Any]] = []

    def flush() -> None:
        if not readable:
            return
        logits = session.predict([finish(_padded([pixels for _, _, pixels in readable], batch))])[0]
        for (position, image, pixels), row in zip(readable, np.asarray(logits)):
            result = _result(image, row, names, top)
            spool.append(result)
            if on_image is not None:
                on_image(position, result, pixels)
        readable.clear()

    for position, (image, pixels) in enumerate(decoded(inputs, threads, 2 * batch)):
        if isinstance(pixels, DataError):
            failed += 1
            say(" ".join(pixels.message.split()))
        else:
            readable.append((position, image, pixels))
        if len(readable) == batch or position + 1 == total:
            flush()
            if on_images is not None:
                on_images(position + 1, total)
    return Predictions(spool, failed, min(top, len(names)), split is not None)


def _check_request(images: Sequence[str], split: Optional[str]) -> None:
    if split is not None and split not in SPLITS:
        raise ConfigurationError(f"--split {split}: must be one of {', '.join(SPLITS)}", "--split eval")
    if split is not None and images:
        raise ConfigurationError(
            f"images and --split {split} are both given", "give images, or --split, not both"
        )
    if split is None and not images:
        raise ConfigurationError(
            "there is nothing to classify", "give images, or a data set with --split eval"
        )


def _inputs(subject: Subject, split: Optional[str], paths: List[str]) -> Tuple[Iterator[ImageInput], int]:
    setup = subject.setup
    info = setup.source.info
    if split is None:
        return images_of_files(paths, info, setup.input_shape), len(paths)
    examples = setup.source.train if split == "train" else setup.source.eval
    if not len(examples):
        raise DataError(
            f"data set {info.name} in {info.location} has no images for --split {split}",
            "choose the other --split",
        )
    return images_of_split(examples, info, split, setup.input_shape), len(examples)


def batch_size(input_shape: Tuple[int, int, int], total: int) -> int:
    """Images per batch: enough to keep the cores busy, few enough for any memory."""
    return max(1, min(LARGEST_BATCH, BATCH_PIXELS // (input_shape[0] * input_shape[1]), total))


def _padded(images: List[Any], batch: int) -> Any:
    """uint8 [batch, h, w, c]: the images, and zeros up to the fixed shape."""
    stacked = np.zeros((batch, *images[0].shape), np.uint8)
    stacked[: len(images)] = images
    return stacked


def _finisher(subject: Subject) -> Callable[[Any], Any]:
    """From uint8 batches to the network's input, as evaluation prepares it."""
    from ipucnn.datasets.preprocessing import prepare_range, prepare_size

    setup = subject.setup
    shape, info, input_range = setup.input_shape, setup.source.info, setup.input_range
    return lambda images: prepare_range(prepare_size(images, shape), shape, input_range, info)


def _result(image: ImageInput, logits: Any, names: Sequence[str], top: int) -> Dict[str, Any]:
    if not np.isfinite(logits).all():
        raise DataError(
            "the network's outputs are not finite: its weights are damaged, or its training diverged",
            "take an earlier checkpoint with --checkpoint",
        )
    probabilities = np.exp(log_softmax(logits))
    order = np.argsort(-logits, kind="stable")[:top]
    result: Dict[str, Any] = {"image": image.name}
    if image.truth is not None:
        result["truth"] = names[image.truth]
        result["correct"] = bool(order[0] == image.truth)
    result["predictions"] = [
        {"label": names[i], "class": int(i), "probability": float(probabilities[i])} for i in order
    ]
    return result
