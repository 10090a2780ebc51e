"""Inference: of images the most probable classes, on batches of one fixed shape, or masks of images of any size.

Both begin alike (:func:`_open`): what the command line names is found and checked before TensorFlow is imported.
"""

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import numpy as np

from ipucnn.aliases import Tensor
from ipucnn.config.options import RunConfig
from ipucnn.datasets.base import ArrayExamples, Examples
from ipucnn.datasets.segmentation.imagemasks import is_imagemasks, parts_of
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.filesystem import expand, file_size, real
from ipucnn.machine import num_cores
from ipucnn.planning.search.variations import prediction_would_fit
from ipucnn.runs import setup as run_setup
from ipucnn.runs.images.inputs import (
    SUBSETS,
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
    MaskFiles,
    PageSpool,
    Spool,
    check_folder,
    check_outputs,
    check_pages,
    class_colours,
    plan_files,
    predicted_classes,
)
from ipucnn.runs.images.segmentation import (
    TiledNetwork,
    check_tile_size,
    check_views,
    class_probabilities,
)
from ipucnn.runs.trained import Named, TrainedSetup, open_trained, weight_inputs
from ipucnn.text import printable, shown_value
from ipucnn.training.evaluation import log_softmax

CONTACT_SHEET = "contact-sheet.png"
OUTPUTS = (".csv", ".json", ".jsonl")
LARGEST_BATCH = 64
# Pixels of a batch: 8 images of 256x256.
BATCH_PIXELS = 8 * 256 * 256
OnImage = Callable[[int, Dict[str, Any], np.ndarray], None]
OutputFiles = Sequence[Tuple[str, Optional[Path], Tuple[str, ...]]]
"""Flag, file and extensions of what the caller is going to write."""


_Group = List[Tuple[int, ImageInput, np.ndarray]]


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
    named: Named,
    images: Sequence[str],
    *,
    subset: Optional[str] = None,
    top: int = 5,
    outputs: OutputFiles = (),
    verbose: bool = False,
    say: Callable[[str], None] = lambda line: None,
    on_images: Optional[Callable[[int, int], None]] = None,
    on_total: Callable[[int], None] = lambda total: None,
    on_image: Optional[OnImage] = None,
) -> Predictions:
    """The ``top`` most probable classes of each image.

    Args:
        named: a classification network and its weights.
        images: files, folders and patterns; empty with ``subset``.
        subset: eval or train: the images of the data set instead.
        top: classes per image, at most the network's.
        outputs: (flag, file, extensions) the caller will write; checked before any work.
        verbose: let TensorFlow speak.
        say: takes a line for each image that cannot be read, and warnings.
        on_images: called with the images done and their total.
        on_total: called with the number of images before the first.
        on_image: called with the position, the result and the uint8 pixels of each readable image.

    Raises:
        ConfigurationError: neither images nor a subset, or both.
        DataError: no image at all, a segmentation network, or weights that do not fit.
    """
    _check_request("classify", images, subset)
    trained, paths, problems = _open(named, images, subset, outputs)
    if trained.record.task != "classification":
        raise DataError(
            f"{trained.record.name} segments images, it has no labels", "give --output for its masks"
        )
    _say_problems("classify", problems, paths, subset, say)
    inputs, total = _inputs(trained, subset, paths)
    for warning in trained.warnings:
        say(f"warning: {warning}")
    config = trained.config
    session = trained.session(verbose, trained.join(split=subset, images=_names_of(paths)))
    trained = run_setup.move_preprocessing(trained, session)
    names = tuple(map(printable, trained.names()))
    on_total(total)
    spool, failed = Spool(), len(problems)
    threads = min(config.pipeline_num_parallel, 2 * num_cores())
    batch = batch_size(trained.input_shape, total)
    finish = finisher(trained)

    # Of the batches whose logits are still to come.
    groups: List[Tuple[_Group, int]] = []

    def batches() -> Iterator[Tuple[Tensor, ...]]:
        nonlocal failed
        readable: _Group = []
        for position, (image, pixels) in enumerate(decoded(inputs, threads, 2 * batch)):
            if isinstance(pixels, DataError):
                failed += 1
                say(" ".join(pixels.message.split()))
            else:
                readable.append((position, image, pixels))
            if len(readable) == batch or (readable and position + 1 == total):
                groups.append((readable, position + 1))
                yield (finish(_padded([pixels for _, _, pixels in readable], batch)),)
                readable = []

    with session.together():
        model = trained.build()
        session.would_fit = prediction_would_fit(model, trained.record.name, config, "infer")
        session.prepare_evaluation(model, None)
        for _, logits in session.logits(batches()):
            group, done = groups.pop(0)
            for (position, image, pixels), row in zip(group, np.asarray(logits)):
                result = _result(image, row, names, top)
                spool.append(result)
                if on_image is not None:
                    on_image(position, result, pixels)
            if on_images is not None:
                on_images(done, total)
    if on_images is not None:
        on_images(total, total)
    return Predictions(spool, failed, min(top, len(names)), subset is not None)


def _check_no_training_folder(config: RunConfig, output: Path) -> None:
    """Refuses masks where training on the run's pairs of images and masks would read them.

    Raises:
        ConfigurationError: the results would go there.
    """
    target = real(output)
    for name in filter(None, (config.dataset, config.dataset_path)):
        folder = real(expand(str(name)))
        if is_imagemasks(folder) and (target == folder or parts_of(folder) & {target, *target.parents}):
            raise ConfigurationError(
                f"--output {output}: training reads the images and masks in {folder}",
                "choose a folder outside it, for example --output predicted",
            )


def _names_of(paths: Sequence[str]) -> str:
    """A digest of what the images are called and how large their files are, which workers compare."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            size = file_size(Path(path))
        except DataError:
            size = -1
        digest.update(f"{path} {size}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _check_request(verb: str, images: Sequence[str], subset: Optional[str]) -> None:
    if subset is not None and subset not in SUBSETS:
        raise ConfigurationError(
            f"--split {shown_value(subset)}: must be one of {', '.join(SUBSETS)}", "--split eval"
        )
    if subset is not None and images:
        raise ConfigurationError(
            f"images and --split {subset} are both given", "give images, or --split, not both"
        )
    if subset is None and not images:
        raise ConfigurationError(
            f"there is nothing to {verb}", "give images, or a data set with --split eval"
        )


def _open(
    named: Named,
    images: Sequence[str],
    subset: Optional[str],
    outputs: OutputFiles,
) -> Tuple[TrainedSetup, List[str], List[str]]:
    """The network, the image files, and a line for each input that names none; no output may replace what is read."""
    paths, problems = find_images(images)
    if outputs:
        images_read = [("one of the images", Path(path)) for path in paths]
        check_outputs(outputs, [*images_read, *weight_inputs(named)])
    trained = open_trained(named, reads_data=subset is not None)
    return trained, paths, problems


def _say_problems(
    verb: str, problems: List[str], paths: List[str], subset: Optional[str], say: Callable[[str], None]
) -> None:
    """Tells of the inputs that name no image; where no image is left, that is an error."""
    for problem in problems:
        say(problem)
    if subset is None and not paths:
        raise DataError(f"there is no image to {verb}", "give image files, folders or patterns")


def _examples(trained: TrainedSetup, subset: str) -> Examples:
    source = trained.source
    return source.train if subset == "train" else source.eval


def _no_images(trained: TrainedSetup, subset: str) -> DataError:
    info = trained.source.info
    return DataError(
        f"data set {info.name} in {info.location} has no images for --split {subset}",
        "choose the other --split",
    )


def _inputs(
    trained: TrainedSetup, subset: Optional[str], paths: List[str]
) -> Tuple[Iterator[ImageInput], int]:
    info = trained.source.info
    if subset is None:
        return images_of_files(paths, info, trained.input_shape), len(paths)
    examples = _examples(trained, subset)
    if not len(examples):
        raise _no_images(trained, subset)
    return images_of_subset(examples, info, subset, trained.input_shape), len(examples)


def batch_size(input_shape: Tuple[int, int, int], total: int) -> int:
    """Images per batch: enough to keep the cores busy, few enough for any memory."""
    return max(1, min(LARGEST_BATCH, BATCH_PIXELS // (input_shape[0] * input_shape[1]), total))


def _padded(images: List[np.ndarray], batch: int) -> np.ndarray:
    """uint8 [batch, h, w, c]: the images, and zeros up to the fixed shape."""
    stacked = np.zeros((batch, *images[0].shape), np.uint8)
    stacked[: len(images)] = images
    return stacked


def finisher(trained: TrainedSetup) -> Callable[[np.ndarray], "Tensor"]:
    """From uint8 batches to the network's input, as evaluation prepares it."""
    from ipucnn.datasets.preprocessing import prepare_range, prepare_size

    shape, info, input_range = trained.input_shape, trained.source.info, trained.input_range
    return lambda images: prepare_range(prepare_size(images, shape), shape, input_range, info)


def _result(image: ImageInput, logits: np.ndarray, names: Sequence[str], top: int) -> Dict[str, Any]:
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


@dataclass(frozen=True)
class Page:
    """A page that was segmented.

    Attributes:
        name: of the input.
        number, pages: its place in the input, from 0, and how many the input has.
        image: uint8 [h, w, c].
        probability: float32 [h, w]: of two classes that of class 1, of more that of the most probable one.
        predicted: uint8 [h, w], the most probable class.
        shown_class: of two classes the one that reports count and colour.
        class_names: of all classes.
        colours: of all classes, see ``outputs.class_colours``.
    """

    name: str
    number: int
    pages: int
    image: np.ndarray
    probability: np.ndarray
    predicted: np.ndarray
    shown_class: int
    class_names: Tuple[str, ...]
    colours: Tuple[Tuple[int, int, int], ...]


@dataclass
class Masks:
    """What was segmented.

    Attributes:
        results: per input ``image``, ``pages``, ``height`` and ``width`` (of its first page), ``share`` of
            the pixels that are ``shown_name``, ``shares`` of each class by its name, and ``files`` by kind.
        shown_name: of two classes the one that reports count and colour; of more "foreground", all but class 0.
        num_failed: inputs that could not be read.
        num_pages, wall_s: pages segmented, and the seconds that it took without building the network and writing.
        tile_sizes: input sizes used.
        threshold: of two classes the probability of class 1 above which a pixel is class 1; None of more.
    """

    results: List[Dict[str, Any]]
    shown_name: str
    num_failed: int
    num_pages: int
    wall_s: float
    tile_sizes: List[int]
    device: str
    threshold: Optional[float] = None

    @property
    def images_per_s(self) -> float:
        return self.num_pages / self.wall_s if self.wall_s else 0.0


def infer_masks(
    named: Named,
    images: Sequence[str],
    *,
    output: Path,
    subset: Optional[str] = None,
    tile_size: Optional[int] = None,
    views: int = 1,
    threshold: Optional[float] = None,
    with_overlay: bool = False,
    contact_sheet: Optional[Path] = None,
    verbose: bool = False,
    say: Callable[[str], None] = lambda line: None,
    on_pages: Optional[Callable[[int, int], None]] = None,
    on_total: Callable[[int], None] = lambda total: None,
    on_page: Callable[[Page], None] = lambda page: None,
) -> Masks:
    """Segments images and volumes.

    Args:
        named: a segmentation network and its weights.
        images: files, folders and patterns; empty with ``subset``.
        output: folder of the results; made if it is not there.
        subset: eval or train: the images of the data set instead, as one volume.
        tile_size: height and width of tiles; None chooses.
        views: versions of each image whose probabilities are averaged.
        threshold: of two classes the probability of class 1 above which a pixel is class 1; None: the one that
            ``ipucnn evaluate`` recommends for the checkpoint, or 0.5.
        with_overlay: whether to write overlays.
        contact_sheet: file that the caller will write, checked before any work; None: one in ``output``.
        verbose: let TensorFlow speak.
        say: takes a line for each input that cannot be read, and warnings.
        on_pages: called with the pages done and their total.
        on_total: called with the number of pages before the first.
        on_page: called with each page.

    Raises:
        ConfigurationError: neither images nor a subset, or both; a result that would replace an image.
        DataError: no readable image at all, or weights that do not fit.
    """
    _check_request("segment", images, subset)
    check_folder(output)
    outputs = () if contact_sheet is None else (("--contact-sheet", contact_sheet, (".png",)),)
    trained, paths, problems = _open(named, images, subset, outputs)
    _check_no_training_folder(trained.config, output)
    check_tile_size(trained.record, tile_size)
    check_views(views)
    num_classes = trained.source.info.num_classes
    if threshold is not None and num_classes > 2:
        raise ConfigurationError(
            f"--threshold {threshold:g}: {trained.record.name} tells {num_classes} classes apart, and a pixel is of "
            "the most probable one",
            "drop it",
        )
    _say_problems("segment", problems, paths, subset, say)
    for warning in trained.warnings:
        say(f"warning: {warning}")
    if subset is not None:
        name = trained.source.info.name.replace(":", "-").replace("/", "-")
        files = [MaskFiles(output, f"{name}-{subset}", True, with_overlay, num_classes)]
    else:
        files = plan_files(paths, output, with_overlay, num_classes)
    names = tuple(map(printable, trained.names()))
    shown, colours = shown_class(names), class_colours(num_classes, trained.source.info.class_colours)
    if num_classes == 2 and threshold is None:
        threshold = _recommended(trained, names[1], say)
    above = HALF if threshold is None else threshold
    network = TiledNetwork(trained, tile_size, verbose, views)
    opened, failed = _open_all(trained, subset, paths, say)
    failed += len(problems)
    if not opened:
        if failed == 1:
            raise DataError("the input could not be read", "the line above says why")
        raise DataError(f"none of the {failed:,} inputs could be read", "the lines above say why")
    total = sum(len(source.sizes) for _, source in opened)
    network.warn_of_seams((size for _, source in opened for size in source.sizes), say)
    on_total(total)
    results: List[Dict[str, Any]] = []
    done, wall_s = 0, 0.0
    pages = (
        ((place, page), image)
        for place, (_, source) in enumerate(opened)
        for page, image in enumerate(source.pages())
    )
    spools: List[PageSpool] = []
    counts: Any = None
    with network.together(split=subset, images=_names_of(paths), threshold=above):
        for (place, page), image, logits in network.each(pages):
            number, source = opened[place]
            if page == 0:
                spools = [PageSpool() for _ in range(1 if num_classes == 2 else num_classes)]
                counts = np.zeros(num_classes, np.int64)
            started = time.perf_counter()
            probabilities = class_probabilities(logits)
            wall_s += time.perf_counter() - started
            # Of several workers the first one writes.
            for spool, probability in zip(spools, probabilities) if network.is_writer else ():
                spool.append(probability)
            predicted = predicted_classes(probabilities, above)
            counts += np.bincount(predicted.reshape(-1), minlength=num_classes)
            highest = probabilities[0] if num_classes == 2 else np.max(probabilities, axis=0)
            on_page(
                Page(source.name, page, len(source.sizes), image, highest, predicted, shown, names, colours)
            )
            done += 1
            if on_pages is not None:
                on_pages(done, total)
            if page + 1 < len(source.sizes):
                continue
            if network.is_writer:
                files[number].write(spools, source.pages, shown, colours, above)
            shares = dict(zip(names, (counts / counts.sum()).tolist()))
            share = shares[names[shown]] if num_classes == 2 else 1.0 - shares[names[0]]
            results.append({**_masks_result(source, files[number], share), "shares": shares})
    wall_s += network.busy_s
    shown_name = names[shown] if num_classes == 2 else "foreground"
    return Masks(results, shown_name, failed, done, wall_s, network.tile_sizes, network.device, threshold)


def _recommended(trained: TrainedSetup, name: str, say: Callable[[str], None]) -> float:
    """The threshold that the run keeps for this checkpoint, which is said; 0.5 without."""
    kept = {} if trained.folder is None else trained.folder.thresholds()
    threshold = kept.get(str(trained.summary["weight_updates"]))
    if threshold in (None, HALF):
        return HALF
    say(
        f"a pixel is {name} above a probability of {threshold:g}, which `ipucnn evaluate` recommends for this "
        "checkpoint; --threshold 0.5 takes the more probable class"
    )
    return threshold


def shown_class(class_names: Sequence[str]) -> int:
    """The class that reports show and count: membranes where there are any, else the foreground."""
    return 0 if class_names[0] == "membrane" else 1


def _open_all(
    trained: TrainedSetup, subset: Optional[str], paths: Sequence[str], say: Callable[[str], None]
) -> Tuple[List[Tuple[int, PageSource]], int]:
    """(number, input) of all that can be read, each decoded once before any is segmented, and how many cannot be."""
    found: List[Tuple[int, PageSource]] = []
    failed = 0
    for number, source in enumerate(_open_each(trained, subset, paths)):
        if isinstance(source, DataError):
            failed += 1
            say(" ".join(source.message.split()))
        else:
            found.append((number, source))
    return found, failed


def _open_each(
    trained: TrainedSetup, subset: Optional[str], paths: Sequence[str]
) -> Iterator[Union[PageSource, DataError]]:
    if subset is not None:
        examples = _examples(trained, subset)
        if not len(examples) or not isinstance(examples, ArrayExamples):
            raise _no_images(trained, subset)
        yield array_pages(f"{trained.source.info.name}/{subset}", examples.images)
        return
    for path in paths:
        try:
            source = file_pages(path, trained.input_shape[2], trained.config.max_image_pixels)
            check_pages(source.sizes, source.name)
            yield source
        except DataError as error:
            yield error


def _masks_result(source: PageSource, files: MaskFiles, share: float) -> Dict[str, Any]:
    height, width = source.sizes[0]
    return {
        "image": source.name,
        "pages": len(source.sizes),
        "height": int(height),
        "width": int(width),
        "share": share,
        "files": {kind: printable(str(path)) for kind, path in files.paths.items()},
    }
