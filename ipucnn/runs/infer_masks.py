"""Segmentation of images and volumes of any size: probability maps, masks and overlays as files."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from ipucnn.datasets.base import ArrayExamples
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.runs.images.inputs import SPLITS, find_images
from ipucnn.runs.images.outputs import MaskFiles, PageSpool, check_folder, check_pages, plan_files
from ipucnn.runs.images.segmentation import TiledNetwork, check_tile_size, check_views
from ipucnn.runs.mask_inputs import PageSource, array_pages, file_pages
from ipucnn.runs.spool import check_outputs
from ipucnn.runs.trained import Subject, open_subject, weight_inputs
from ipucnn.text import printable

__all__ = ["CONTACT_SHEET", "Masks", "foreground_probability", "infer_masks", "shown_class", "Page"]

CONTACT_SHEET = "contact-sheet.png"


@dataclass(frozen=True)
class Page:
    """A page that was segmented.

    Attributes:
        name: of the input.
        number, pages: its place in the input, from 0, and how many the input has.
        image: uint8 [h, w, c].
        probability: float32 [h, w], of class 1.
        shown_class: the class that reports count and colour.
        class_names: of both classes.
    """

    name: str
    number: int
    pages: int
    image: Any
    probability: Any
    shown_class: int
    class_names: Tuple[str, ...]


@dataclass
class Masks:
    """What was segmented.

    Attributes:
        results: per input ``image``, ``pages``, ``height`` and ``width`` (of its first page), ``share`` of
            the pixels that are ``shown_name``, and ``files`` by kind.
        shown_name: of the class that reports count and colour.
        num_failed: inputs that could not be read.
        num_pages, wall_s: pages segmented, and the seconds that it took without building the network and writing.
        tile_sizes: input sizes used.
    """

    results: List[Dict[str, Any]]
    shown_name: str
    num_failed: int
    num_pages: int
    wall_s: float
    tile_sizes: List[int]
    device: str

    @property
    def images_per_s(self) -> float:
        return self.num_pages / self.wall_s if self.wall_s else 0.0


def infer_masks(
    target: str,
    images: Sequence[str],
    flags: Mapping[str, Any],
    *,
    output: Path,
    split: Optional[str] = None,
    which: Optional[str] = None,
    weights: Optional[str] = None,
    tile_size: Optional[int] = None,
    views: int = 1,
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
        target: run folder, checkpoint or Keras weight file of a segmentation network.
        images: files, folders and patterns; empty with ``split``.
        flags: options given on the command line.
        output: folder of the results; made if it is not there.
        split: eval or train: the images of the data set instead, as one volume.
        which: which checkpoint of the run.
        weights: a Keras weight file.
        tile_size: height and width of tiles; None chooses.
        views: versions of each image whose probabilities are averaged.
        with_overlay: whether to write overlays.
        contact_sheet: file that the caller will write, checked before any work; None: one in ``output``.
        verbose: let TensorFlow speak.
        say: takes a line for each input that cannot be read, and warnings.
        on_pages: called with the pages done and their total.
        on_total: called with the number of pages before the first.
        on_page: called with each page.

    Raises:
        ConfigurationError: neither images nor a split, or both; a result that would replace an image.
        DataError: no readable image at all, or weights that do not fit.
    """
    _check_request(images, split)
    check_folder(output)
    paths, problems = find_images(images)
    if contact_sheet is not None:
        read = [("one of the images", Path(path)) for path in paths]
        read += weight_inputs(target, which, weights)
        check_outputs([("--contact-sheet", contact_sheet, (".png",))], read)
    subject = open_subject("infer", target, flags, which=which, weights=weights, reads_data=split is not None)
    setup = subject.setup
    check_tile_size(setup.record, tile_size)
    check_views(views)
    if setup.source.info.num_classes != 2:
        raise DataError(
            f"{target} has {setup.source.info.num_classes} classes, and a mask has two",
            "train with two classes",
        )
    for problem in problems:
        say(problem)
    if split is None and not paths:
        raise DataError("there is no image to segment", "give image files, folders or patterns")
    for warning in subject.warnings:
        say(f"warning: {warning}")
    if split is not None:
        files = [_split_files(subject, split, output, with_overlay)]
    else:
        files = plan_files(paths, output, with_overlay)
    names = tuple(map(printable, subject.names()))
    shown = shown_class(names)
    network = TiledNetwork(subject, tile_size, verbose, views)
    opened, failed = _open_all(subject, split, paths, say)
    failed += len(problems)
    if not opened:
        raise DataError(f"none of the {failed} inputs could be read", "the lines above say why")
    total = sum(len(source.sizes) for _, source in opened)
    on_total(total)
    results: List[Dict[str, Any]] = []
    done, wall_s = 0, 0.0
    for number, source in opened:
        spool, pixels, found = PageSpool(), 0, 0
        for page, image in enumerate(source.pages()):
            network.prepare(image.shape)
            started = time.perf_counter()
            probability = foreground_probability(network.logits(image))
            wall_s += time.perf_counter() - started
            spool.append(probability)
            pixels += probability.size
            found += int(((probability > 0.5) == shown).sum())
            on_page(Page(source.name, page, len(source.sizes), image, probability, shown, names))
            done += 1
            if on_pages is not None:
                on_pages(done, total)
        files[number].write(spool, source.pages, shown)
        results.append(_result(source, files[number], found / pixels))
    return Masks(results, names[shown], failed, done, wall_s, network.tile_sizes, network.device)


def shown_class(class_names: Sequence[str]) -> int:
    """The class that reports show and count: membranes where there are any, else the foreground."""
    return 0 if class_names[0] == "membrane" else 1


def foreground_probability(logits: Any) -> Any:
    """float32 [h, w]: softmax of class 1 from logits [h, w, 2], without overflow."""
    gap = (logits[..., 0] - logits[..., 1]).astype(np.float64)
    # Of -|gap| the exponential is at most 1.
    small = np.exp(-np.abs(gap))
    return np.where(gap > 0, small / (1 + small), 1 / (1 + small)).astype(np.float32)


def _check_request(images: Sequence[str], split: Optional[str]) -> None:
    if split is not None and split not in SPLITS:
        raise ConfigurationError(f"--split {split}: must be one of {', '.join(SPLITS)}", "--split eval")
    if split is not None and images:
        raise ConfigurationError(
            f"images and --split {split} are both given", "give images, or --split, not both"
        )
    if split is None and not images:
        raise ConfigurationError(
            "there is nothing to segment", "give images, or a data set with --split eval"
        )


def _split_files(subject: Subject, split: str, folder: Path, with_overlay: bool) -> MaskFiles:
    name = subject.setup.source.info.name.replace(":", "-").replace("/", "-")
    return MaskFiles(folder, f"{name}-{split}", True, with_overlay)


def _open_all(
    subject: Subject, split: Optional[str], paths: Sequence[str], say: Callable[[str], None]
) -> Tuple[List[Tuple[int, PageSource]], int]:
    """(number, input) of all that can be read, each decoded once before any is segmented, and how many cannot be."""
    found: List[Tuple[int, PageSource]] = []
    failed = 0
    for number, source in enumerate(_open_each(subject, split, paths)):
        if isinstance(source, DataError):
            failed += 1
            say(" ".join(source.message.split()))
        else:
            found.append((number, source))
    return found, failed


def _open_each(subject: Subject, split: Optional[str], paths: Sequence[str]) -> Iterator[Any]:
    setup = subject.setup
    if split is not None:
        examples, info = (setup.source.train if split == "train" else setup.source.eval), setup.source.info
        if not len(examples) or not isinstance(examples, ArrayExamples):
            raise DataError(
                f"data set {info.name} in {info.location} has no images for --split {split}",
                "choose the other --split",
            )
        yield array_pages(f"{info.name}/{split}", examples.images)
        return
    for path in paths:
        try:
            source = file_pages(path, setup.input_shape[2], setup.config.max_image_pixels)
            check_pages(source.sizes, source.name)
            yield source
        except DataError as error:
            yield error


def _result(source: PageSource, files: MaskFiles, share: float) -> Dict[str, Any]:
    height, width = source.sizes[0]
    return {
        "image": source.name,
        "pages": len(source.sizes),
        "height": int(height),
        "width": int(width),
        "share": share,
        "files": {kind: printable(str(path)) for kind, path in files.paths.items()},
    }
