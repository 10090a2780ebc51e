"""Inference: the most probable classes of images, in batches of one fixed shape, or masks of images of any size.

Both begin with :func:`_open`: all inputs on the command line are checked before TensorFlow is imported.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Deque, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from ipucnn.aliases import PlainDict, Tensor
from ipucnn.config.options import RunConfig
from ipucnn.datasets.base import IN_MEMORY, Examples, MaskedExamples
from ipucnn.datasets.formats import pair_folders
from ipucnn.datasets.problems import remark_lines
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.events import LOADING, Began, Event, Events, Item, Note, Progress, emit
from ipucnn.filesystem import expand, real
from ipucnn.machine import num_cores
from ipucnn.runs import setup as run_setup
from ipucnn.runs.images.inputs import (
    SUBSETS,
    ImageFiles,
    ImageInput,
    PageSource,
    array_pages,
    decoded,
    file_pages,
    find_images,
    images_of_files,
    images_of_subset,
)
from ipucnn.runs.images.outputs import (
    HALF,
    Classes,
    MaskFiles,
    MaskForm,
    PageSpool,
    Spool,
    check_pages,
    class_colours,
    plan_files,
    predicted_classes,
)
from ipucnn.runs.images.segmentation import (
    PatchwiseNetwork,
    Segmented,
    SegmentedImage,
    class_probabilities,
)
from ipucnn.runs.overwriting import check_only_results_replaced, check_output_folder, check_outputs
from ipucnn.runs.predicting import check_finite
from ipucnn.runs.requests import InferRequest
from ipucnn.runs.sources import weight_inputs
from ipucnn.runs.trained import TrainedSetup, open_trained
from ipucnn.text import counted, exact, printable, shown_value
from ipucnn.training.evaluation import log_softmax

CONTACT_SHEET = "contact-sheet.png"
OUTPUTS = (".csv", ".json", ".jsonl")
LARGEST_BATCH = 64
# Pixels of a batch, as 8 images of 256x256 have.
BATCH_PIXELS = 8 * 256 * 256


# --- shared by classes and masks


def _open(
    request: InferRequest, outputs: Sequence[Tuple[str, Optional[Path], Tuple[str, ...]]]
) -> Tuple[TrainedSetup, ImageFiles]:
    """Returns the network and the image files.

    Args:
        outputs: (flag, file, extensions) that the caller will write; none may replace an input.
    """
    images, subset = request.images, request.subset
    if subset is not None and subset not in SUBSETS:
        raise ConfigurationError(
            f"--split {shown_value(subset)}: must be one of {', '.join(SUBSETS)}", "--split eval"
        )
    files = find_images(images)
    images_read = [("one of the images", Path(path)) for path in files.paths]
    check_outputs(outputs, [*images_read, *weight_inputs(request.named)])
    return open_trained(request.named, reads_data=subset is not None), files


def _begin(
    trained: TrainedSetup,
    verb: str,
    request: InferRequest,
    files: ImageFiles,
) -> Iterator[Event]:
    """Yields a note for each input that names no image, for what is left out, and for each warning.

    Raises:
        DataError: no image is left.
    """
    yield from map(Note, (*files.problems, *files.left_out))
    if request.subset is None and not files.paths:
        raise DataError(f"there is no image to {verb}", "give image files, folders or patterns")
    yield from map(Note, trained.introduction())
    # An index of records, whose bar this replaces, may have been made.
    yield Began(LOADING)


def _examples(trained: TrainedSetup, subset: str) -> Examples:
    source, info = trained.source, trained.source.info
    examples = source.train if subset == "train" else source.eval
    if not len(examples):
        raise DataError(
            f"data set {info.name} in {info.location} has no images for --split {subset}",
            "choose the other --split",
        )
    return examples


# --- classes


@dataclass
class InferenceResult:
    """The results of an inference.

    Attributes:
        results: per image ``image``, ``predictions`` (``label``, ``class`` and ``probability``, most probable first),
            and ``truth`` and ``correct`` if the class is known.
        num_failed: inputs that were no readable image.
        top: predictions per image.
        with_truth: whether the true classes are known.
        notes: remarks on the network, its weights and the classes.
    """

    results: Spool
    num_failed: int
    top: int
    with_truth: bool
    notes: List[str]


@dataclass(frozen=True)
class ClassifiedImage(Item):
    """An image whose class was predicted.

    Attributes:
        result: its row of ``InferenceResult.results``.
        pixels: uint8 [h, w, channels].
    """

    result: PlainDict
    pixels: np.ndarray


def infer_classes(request: InferRequest) -> Events[InferenceResult]:
    """Predicts the ``top`` most probable classes of each image, and yields a :class:`ClassifiedImage` of each.

    Raises:
        ConfigurationError: neither images nor a subset, or both.
        DataError: no image at all, a segmentation network, or weights that do not fit.
    """
    yield Began(LOADING)
    outputs = (("--output", request.output, OUTPUTS), ("--contact-sheet", request.contact_sheet, (".png",)))
    trained, found = _open(request, outputs)
    if trained.record.task != "classification":
        raise DataError(
            f"{trained.record.name} segments images, it has no labels", "give --output for its masks"
        )
    subset, info, shape = request.subset, trained.source.info, trained.input_shape
    remarks: List[str] = []
    if subset is None:
        inputs, total = images_of_files(found.paths, info, shape, remarks), len(found.paths)
    else:
        examples = _examples(trained, subset)
        inputs, total = images_of_subset(examples, info, subset, shape, remarks), len(examples)
    yield from _begin(trained, "classify", request, found)
    session = trained.session(request.verbose)
    trained, session = run_setup.move_preprocessing(trained, session)
    names = tuple(map(printable, trained.labels))
    spool, batches = Spool(), _Batches(trained, inputs, total)
    predictor, notes = trained.load(session, "infer")
    if largest_batch(trained) == 1:
        notes.append(
            "each image is computed alone, because layers of the network's own may mix those of a batch"
        )
    yield from (Note(f"note: {note}") for note in notes)
    for _, logits in predictor.logits(batches.read()):
        images, done = batches.waiting.popleft()
        for (position, image, pixels), row in zip(images, np.asarray(logits)):
            result = _result(image, check_finite(row), names, request.top)
            spool.append(result)
            yield ClassifiedImage(position, total, result, pixels)
        yield Progress("classifying", done, total)
    yield Progress("classifying", total, total)
    failed = len(found.problems) + batches.num_failed
    lines = remark_lines(remarks)
    yield from map(Note, lines)
    notes = [*trained.notes, *trained.warnings, *notes, *found.left_out, *lines]
    return InferenceResult(spool, failed, min(request.top, len(names)), subset is not None, notes)


class _Batches:
    """Reads images in batches of one shape, and keeps what the results of each batch belong to.

    Attributes:
        waiting: for each batch without logits yet: position, input and uint8 pixels of each image, and the number of
            inputs read by then.
        num_failed: inputs that cannot be read; each is reported.
    """

    def __init__(self, trained: TrainedSetup, inputs: Iterator[ImageInput], total: int) -> None:
        self._trained, self._inputs, self._total = trained, inputs, total
        self.waiting: Deque[Tuple[List[Tuple[int, ImageInput, np.ndarray]], int]] = deque()
        self.num_failed = 0

    def read(self) -> Iterator[Tuple[Tensor]]:
        """Yields the batches; the last one is padded with zeros."""
        threads = min(self._trained.config.pipeline_num_parallel, 2 * num_cores())
        size = batch_size(self._trained, self._total)
        finish = finisher(self._trained)
        images: List[Tuple[int, ImageInput, np.ndarray]] = []
        for position, (image, pixels) in enumerate(decoded(self._inputs, threads, 2 * size)):
            if isinstance(pixels, DataError):
                self.num_failed += 1
                emit(Note(" ".join(pixels.message.split())))
            else:
                images.append((position, image, pixels))
            if len(images) == size or (images and position + 1 == self._total):
                self.waiting.append((images, position + 1))
                stacked = np.zeros((size, *images[0][2].shape), np.uint8)
                stacked[: len(images)] = [pixels for _, _, pixels in images]
                yield (finish(stacked),)
                images = []


def largest_batch(trained: TrainedSetup) -> int:
    """Returns the most images that are computed together: one if the others might change its result."""
    own = trained.record.own
    return 1 if own is not None and own.may_mix_samples else LARGEST_BATCH


def batch_size(trained: TrainedSetup, total: int) -> int:
    """Returns the images per batch: enough to keep the cores busy, few enough for any memory."""
    height, width = trained.input_shape[:2]
    return max(1, min(largest_batch(trained), BATCH_PIXELS // (height * width), total))


def finisher(trained: TrainedSetup) -> Callable[[np.ndarray], "Tensor"]:
    """Returns a function from uint8 batches to the network's input, prepared as in evaluation."""
    from ipucnn.datasets.preprocessing import prepare_range, prepare_size

    shape, input_range = trained.input_shape, trained.input_range
    return lambda images: prepare_range(prepare_size(images, shape), shape, input_range)


def _result(image: ImageInput, logits: np.ndarray, names: Sequence[str], top: int) -> PlainDict:
    probabilities = np.exp(log_softmax(logits))
    order = np.argsort(-logits, kind="stable")[:top]
    result: PlainDict = {"image": image.name}
    if image.truth is not None:
        result["truth"] = names[image.truth]
        result["correct"] = bool(order[0] == image.truth)
    result["predictions"] = [
        {"label": names[i], "class": int(i), "probability": float(probabilities[i])} for i in order
    ]
    return result


# --- masks


@dataclass
class Masks:
    """The results of a segmentation.

    Attributes:
        results: per input ``image``, ``pages``, ``height`` and ``width`` (of its first page), ``share`` of the pixels
            that are ``shown_name``, ``shares`` of each class by its name, and ``files`` by kind; ``sizes`` of pages
            that differ, and ``page_names`` of those of a data set.
        shown_name: for two classes, the class that reports count and colour; for more, "foreground": all but class 0.
        num_failed: inputs that could not be read.
        num_pages, wall_s: segmented pages, and the seconds taken without building the network and writing files.
        patch_sizes: (height, width) of the patches used.
        notes: remarks on the network, its weights and the classes.
        threshold: for two classes the probability of class 1 above which a pixel is class 1; None for more.
    """

    shown_name: str
    threshold: Optional[float]
    num_failed: int
    results: List[Dict[str, Any]] = field(default_factory=list)
    num_pages: int = 0
    wall_s: float = 0.0
    patch_sizes: List[Tuple[int, int]] = field(default_factory=list)
    device: str = ""
    notes: List[str] = field(default_factory=list)

    @property
    def images_per_s(self) -> float:
        return self.num_pages / self.wall_s if self.wall_s else 0.0


def infer_masks(request: InferRequest, folder: Path) -> Events[Masks]:
    """Segments images and volumes, and yields a ``Segmented`` of each page.

    Args:
        request: the network and the images.
        folder: the folder of the masks, which is created if necessary.

    Raises:
        ConfigurationError: neither images nor a subset, or both; a result that would replace an image, or another file
            that is no result.
        DataError: no readable image at all, or weights that do not fit.
    """
    yield Began(LOADING)
    check_output_folder(folder)
    trained, found = _open(request, (("--contact-sheet", request.contact_sheet, (".png",)),))
    _check_no_training_folder(trained.config, folder)
    network = PatchwiseNetwork(trained, request.patch_size, request.verbose, request.test_time_augmentation)
    num_classes = trained.source.info.num_classes
    if request.threshold is not None and num_classes > 2:
        raise ConfigurationError(
            f"--threshold {request.threshold:g}: {trained.record.name} predicts {num_classes} classes, and a threshold "
            "separates two",
            "leave it out: each pixel gets its most probable class",
        )
    yield from _begin(trained, "segment", request, found)
    if request.subset is None:
        files = plan_files(found.paths, folder, request.with_overlay, num_classes)
    else:
        name = trained.source.info.name.replace(":", "-").replace("/", "-")
        files = [MaskFiles(folder, f"{name}-{request.subset}", True, request.with_overlay, num_classes)]
    pictures = [path for of_input in files for path in of_input.paths.values()]
    if request.contact_sheet is None:
        pictures.append(folder / CONTACT_SHEET)
    check_only_results_replaced(folder, pictures)
    names = tuple(map(printable, trained.labels))
    info = trained.source.info
    form = MaskForm(info.mask_values, info.class_colours)
    classes = Classes(names, class_colours(num_classes, info.class_colours), form)
    threshold = request.threshold
    if classes.is_binary and threshold is None:
        kept = trained.weights.threshold
        threshold, on = kept.value, f" on {printable(kept.chosen_on)}" if kept.chosen_on else ""
        if threshold != HALF:
            yield Note(
                f"a pixel is {names[1]} above a probability of {threshold:g}, which `ipucnn evaluate` recommends for "
                f"this checkpoint{on}; --threshold 0.5 takes the more probable class"
            )
    opened, failed = yield from _open_all(trained, request.subset, found.paths)
    failed += len(found.problems)
    if not opened:
        if failed == 1:
            raise DataError("the input could not be read", "the line above says why")
        raise DataError(f"none of the {failed:,} inputs could be read", "the lines above say why")
    sizes = [size for _, source in opened for size in source.sizes]
    remarks = [remark for _, source in opened for remark in source.remarks]
    lines = remark_lines(remarks, lambda count: counted(count, "image"))
    yield from map(Note, lines)
    yield from network.warn_of_seams(sizes)
    shown_name = names[classes.shown] if classes.is_binary else "foreground"
    masks = Masks(shown_name, threshold, failed)
    above = HALF if threshold is None else threshold
    inputs = [_Segmented(source, files[number], classes, above) for number, source in opened]
    pages = (
        ((segmented, page), image)
        for segmented in inputs
        for page, image in enumerate(segmented.source.pages())
    )
    for (segmented, page), image, logits in network.each(pages):
        started = time.perf_counter()
        probabilities = class_probabilities(logits)
        masks.wall_s += time.perf_counter() - started
        yield Segmented(masks.num_pages, len(sizes), segmented.add(page, image, probabilities))
        masks.num_pages += 1
        yield Progress("segmenting", masks.num_pages, len(sizes))
        if page + 1 == len(segmented.source.sizes):
            masks.results.append(segmented.finish())
    masks.wall_s += network.busy_s
    masks.patch_sizes, masks.device = network.patch_sizes, network.device
    masks.notes = [*trained.notes, *trained.warnings, *network.notes, *found.left_out, *lines]
    return masks


class _Segmented:
    """Collects the predicted pages of one input until its files are written."""

    def __init__(self, source: PageSource, files: MaskFiles, classes: Classes, threshold: float) -> None:
        self.source, self._files, self._classes, self._threshold = source, files, classes, threshold
        self._spools: List[PageSpool] = []
        self._counts: np.ndarray = np.zeros(len(classes.names), np.int64)

    def add(self, number: int, image: np.ndarray, probabilities: List[np.ndarray]) -> SegmentedImage:
        """Adds the next page."""
        if not number:
            self._spools = [PageSpool() for _ in probabilities]
        for spool, probability in zip(self._spools, probabilities):
            spool.append(probability)
        predicted = predicted_classes(probabilities, self._threshold)
        self._counts += np.bincount(predicted.reshape(-1), minlength=len(self._counts))
        highest = probabilities[0] if self._classes.is_binary else np.max(probabilities, axis=0)
        pages = len(self.source.sizes)
        name = self.source.name.rpartition("/")[2] + (f", page {number + 1} of {pages}" if pages > 1 else "")
        if self.source.page_names:
            name = self.source.page_names[number]
        return SegmentedImage(printable(name), image, predicted, self._classes, probability=highest)

    def finish(self) -> PlainDict:
        """Writes the files and returns the row of ``Masks.results``."""
        source = self.source
        self._files.write(self._spools, source.pages, self._classes, self._threshold, source.stack)
        self._spools = []
        names, (height, width) = self._classes.names, self.source.sizes[0]
        shares = dict(zip(names, (self._counts / self._counts.sum()).tolist()))
        share = shares[names[self._classes.shown]] if self._classes.is_binary else 1.0 - shares[names[0]]
        sizes = [list(map(int, size)) for size in source.sizes]
        return {
            "image": self.source.name,
            "pages": len(self.source.sizes),
            **({"page_names": list(source.page_names)} if source.page_names else {}),
            **({"sizes": sizes} if any(size != sizes[0] for size in sizes) else {}),
            "height": int(height),
            "width": int(width),
            "orientation": self.source.orientation,
            "share": share,
            "files": {kind: exact(str(path)) for kind, path in self._files.paths.items()},
            "shares": shares,
        }


def _check_no_training_folder(config: RunConfig, output: Path) -> None:
    """Refuses an output folder in which training on the run's pairs of images and masks would read the results.

    Raises:
        ConfigurationError: the output is such a folder.
    """
    target = real(output)
    folder = real(config.dataset_path if config.dataset == "imagemasks" else expand(str(config.dataset)))
    read = pair_folders(folder)
    if read and (target == folder or read & {target, *target.parents}):
        raise ConfigurationError(
            f"--output {output}: training reads the images and masks in {folder}",
            "choose a folder outside it, for example --output predicted",
        )


def _open_all(
    trained: TrainedSetup, subset: Optional[str], paths: Sequence[str]
) -> Events[Tuple[List[Tuple[int, PageSource]], int]]:
    """Returns (number, input) of all readable inputs, and the number of unreadable ones.

    Every input is decoded once before any is segmented.
    """
    if subset is not None:
        examples = _examples(trained, subset)
        assert isinstance(examples, IN_MEMORY)  # as in all data sets with masks
        names = examples.names if isinstance(examples, MaskedExamples) else ()
        return [(0, array_pages(f"{trained.source.info.name}/{subset}", list(examples.images), names))], 0
    readable: List[Tuple[int, PageSource]] = []
    for number, path in enumerate(paths):
        try:
            source = file_pages(path, trained.input_shape[2], trained.config.max_image_pixels)
            check_pages(source.sizes, printable(source.name))
            readable.append((number, source))
            if source.orientation != 1:
                tag = f"its orientation tag {source.orientation}"
                yield Note(f"image {printable(path)}: turned as {tag} says, and so is its mask")
        except DataError as error:
            yield Note(" ".join(error.message.split()))
    return readable, len(paths) - len(readable)
