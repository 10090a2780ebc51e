"""Walks over the files of a data set, which go on where training would stop.

A walk reads a set's files with the readers of training, tells a :class:`Survey` what they refuse, and yields the
samples in blocks, which are decoded by :func:`in_order`.  A set without a walk of its own is opened as for training.
"""

import contextlib
import functools
import itertools
import os
import struct
import threading
import zlib
from bisect import bisect_right
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import (
    Callable,
    Deque,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
)

import numpy as np

from ipucnn.datasets.base import (
    ArrayExamples,
    DataSource,
    FileExamples,
    ImageFiles,
    RecordExamples,
    read_file,
)
from ipucnn.datasets.images import open_image, opened
from ipucnn.datasets.limits import check_memory
from ipucnn.datasets.segmentation import imagemasks, isbi2012
from ipucnn.datasets.segmentation.masks import BINARY, TABLE, MaskClasses, codes, mask_values, read_table
from ipucnn.datasets.sources import cifar, idx, imagefolder
from ipucnn.datasets.sources import records as imagenet
from ipucnn.datasets.sources.download import REMOTES
from ipucnn.datasets.sources.record_builder import CHECKSUMS_FILE, check_checksums
from ipucnn.datasets.sources.tfrecord import place_of, read_example, scan_records
from ipucnn.datasets.verification.findings import EVAL, TRAIN
from ipucnn.datasets.verification.samples import Block, Look, measure
from ipucnn.datasets.verification.survey import Survey
from ipucnn.errors import DataError
from ipucnn.filesystem import file_size, is_file, is_folder
from ipucnn.machine import num_cores
from ipucnn.text import printable

Walk = Iterator[Block]
BATCH = 256
"""Samples in memory that are measured at once."""


# -- looking at samples -----------------------------------------------------------------------------------------

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_order(
    look: Callable[[_Item], _Result], items: Iterable[_Item]
) -> Iterator[Tuple[_Item, Callable[[], _Result]]]:
    """Each item with what gives its result, in their order, while the next ones are worked on by all cores.

    A few more are under way than there are cores, so that what waits in memory is bounded.
    """
    workers = num_cores()
    waiting: Deque[Tuple[_Item, Future[_Result]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                waiting.append((item, pool.submit(look, item)))
                if len(waiting) >= 2 * workers:
                    done, future = waiting.popleft()
                    yield done, future.result
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result
        finally:
            for _, future in waiting:
                future.cancel()


_MODES = {
    "1": "black and white",
    "L": "grey",
    "RGB": "colour",
    "P": "a palette",
    "CMYK": "CMYK (for print)",
    "LA": "grey with alpha (transparency)",
    "PA": "a palette with alpha (transparency)",
    "RGBA": "colour with alpha (transparency)",
    "I": "16 or 32 bits",
    "F": "floating point",
}
_PNG = b"\x89PNG\r\n\x1a\n"
LARGE_BYTES = 64 * 2**20
"""Files of more are read one at a time: each may take half of the memory that is free when it is opened."""
_large_files = threading.Lock()


def look_at(
    data: bytes, origin: str, label: int, keeps_pixels: bool, max_pixels: int, channels: int = 3
) -> Look:
    """Decodes an image as training does, and says what it was before.  Raises DataError."""
    check_png(data, origin)
    with opened(data, origin, max_pixels) as image:
        mode, form, frames = str(image.mode), str(image.format), 1
        if form in ("GIF", "WEBP", "TIFF", "PNG"):
            with contextlib.suppress(Exception):  # training reads the first frame alone
                frames = int(getattr(image, "n_frames", 1))
        if mode == "P" and "transparency" in image.info:
            mode = "PA"
    pixels = np.asarray(open_image(data, origin, channels, max_pixels))
    pixels = pixels[np.newaxis, ..., np.newaxis] if pixels.ndim == 2 else pixels[np.newaxis]
    mode = _MODES.get("I" if mode.startswith("I;") else mode, f"mode {mode}")
    kept = pixels if keeps_pixels else None
    alike = {"mode": mode} if channels == 3 else {}
    return Look(measure(pixels), pixels.shape[1:3], [label], kept, None, alike, form, frames)


def check_png(data: bytes, origin: str) -> None:
    """Compares the checksums of a PNG file's chunks, which decoding does not look at where the pixels can be made out.

    Raises:
        DataError: one is wrong, or the file has no end.
    """
    at = len(_PNG)
    if data[:at] != _PNG:
        return
    while at + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        if at + 12 + length > len(data):
            break
        (checksum,) = struct.unpack_from(">I", data, at + 8 + length)
        if zlib.crc32(memoryview(data)[at + 4 : at + 8 + length]) != checksum:
            name = printable(kind.decode("latin1"))
            raise DataError(
                f"{origin}: the checksum of its chunk {name} is wrong", "get the file again", "checksum"
            )
        if kind == b"IEND":
            return
        at += 12 + length
    raise DataError(f"{origin} is truncated: it has no end", "get the file again", "truncated")


# -- sets in memory -----------------------------------------------------------------------------------------------

_Arrays = Tuple[str, np.ndarray, np.ndarray]
"""The name of a file, which may be empty, and its images [n, h, w, c] and labels, of classes [n] or masks [n, h, w]."""


def walk_arrays(
    survey: Survey, files: Mapping[str, Sequence[_Arrays]], num_stored: Optional[Mapping[str, int]] = None
) -> Walk:
    """The samples of files that were read, by subset.

    Args:
        survey: that hears how many there are.
        files: by subset.
        num_stored: images there are by subset, where some have no labels.
    """
    counts = {subset: [min(map(len, file[1:])) for file in read] for subset, read in files.items()}
    survey.expect({subset: sum(numbers) for subset, numbers in counts.items()})
    for subset, number in (num_stored or {}).items():
        survey.subsets[subset].num_stored = number
    for subset, read in files.items():
        into, starts = survey.subsets[subset], [0, *itertools.accumulate(counts[subset])]
        names = [f"{file[0]}, " if file[0] else "" for file in read]
        into.name_of = functools.partial(_name_in_files, starts, names)
        for first, name, count, (_, images, labels) in zip(starts, names, counts[subset], read):
            size = BATCH if labels.ndim == 1 else 1
            for begin in range(0, count, size):
                rows = [n for n in range(begin, min(begin + size, count)) if into.is_chosen(first + n)]
                if rows:
                    numbers = [first + n for n in rows]
                    text = f"{name}samples {rows[0]} to {rows[-1]}" if size > 1 else into.name_of(numbers[0])
                    # Here, not on other cores: digests of small images would wait for Python's lock.
                    look = _look_at_rows(images, labels, rows)
                    yield Block(subset, numbers, text, lambda keeps_pixels, look=look: look)  # type: ignore[misc]


def _name_in_files(starts: Sequence[int], names: Sequence[str], number: int) -> str:
    at = bisect_right(starts, number) - 1
    return f"{names[at]}sample {number - starts[at]}"


def _look_at_rows(images: np.ndarray, labels: np.ndarray, rows: Sequence[int]) -> Look:
    # A slice is no copy.
    chosen = slice(rows[0], rows[-1] + 1) if len(rows) == rows[-1] + 1 - rows[0] else rows
    part, size = images[chosen], (int(images.shape[1]), int(images.shape[2]))
    if labels.ndim == 3:
        return Look(measure(part), size, (), part, labels[chosen])
    return Look(measure(part), size, labels[chosen].tolist(), part)


def walk_source(survey: Survey, source: DataSource) -> Walk:
    """The samples of a set that was opened as for training."""
    survey.class_names = source.info.class_names
    parts = {TRAIN: source.train, EVAL: source.eval}
    arrays = {
        subset: [("", examples.images, examples.labels)]
        for subset, examples in parts.items()
        if isinstance(examples, ArrayExamples)
    }
    if len(arrays) == len(parts):
        yield from walk_arrays(survey, arrays)
        return
    survey.expect({subset: len(examples) for subset, examples in parts.items()})
    for subset, examples in parts.items():
        assert not isinstance(examples, ArrayExamples)
        survey.subsets[subset].name_of = examples.describe
        yield from walk_images(survey, subset, examples, source.info.image_shape[2])


def walk_images(survey: Survey, subset: str, examples: ImageFiles, channels: int = 3) -> Walk:
    """The samples of a subset of encoded images."""
    into = survey.subsets[subset]
    for number, label in enumerate(examples.labels.tolist()):
        if into.is_chosen(number):
            path = Path(examples.paths[number]) if isinstance(examples, FileExamples) else None

            def load(
                keeps_pixels: bool, number: int = number, label: int = label, path: Optional[Path] = path
            ) -> Look:
                is_large = path is not None and file_size(path) > LARGE_BYTES
                with _large_files if is_large else contextlib.nullcontext():
                    data, origin = examples.encoded(number), examples.describe(number)
                    return look_at(data, origin, label, keeps_pixels, survey.max_pixels, channels)

            yield Block(subset, [number], into.name_of(number), load, path, examples.describe(number))


def walk_idx(survey: Survey, name: str, folder: Path) -> Walk:
    survey.class_names = idx.CLASS_NAMES[name]
    published = dict(REMOTES[name].files)
    survey.is_published = True
    files: Dict[str, List[_Arrays]] = {}
    stored = {}
    for subset in (TRAIN, EVAL):
        for kind in ("images", "labels"):
            stem = idx.FILES[f"{subset}_{kind}"]
            path = idx.find_file(folder, stem)
            if path is None or path.suffix != ".gz":
                survey.is_published = False  # nobody publishes checksums of the unpacked files
                continue
            with survey.noting(subset, path.name, path):
                survey.compare(subset, path, "SHA-256", published[stem + ".gz"])
        found = idx.read_part(folder, subset, name, survey)
        if "images" in found:
            stored[subset] = len(found["images"][1])
        if len(found) == 2:
            (path, images), (_, labels) = found["images"], found["labels"]
            files[subset] = [(path.name, images[..., np.newaxis], labels)]
    return walk_arrays(survey, files, stored)


# MD5 of the files in the archives of https://www.cs.toronto.edu/~kriz/cifar.html, as torchvision checks them.
_CIFAR_MD5: Mapping[Tuple[str, str], str] = {
    ("cifar10", "data_batch_1"): "c99cafc152244af753f735de768cd75f",
    ("cifar10", "data_batch_2"): "d4bba439e000b95fd0a9bffe97cbabec",
    ("cifar10", "data_batch_3"): "54ebc095f3ab1f0389bbae665268c751",
    ("cifar10", "data_batch_4"): "634d18415352ddfa80567beed471001a",
    ("cifar10", "data_batch_5"): "482c414d41f54cd18b22e5b47cb7c3cb",
    ("cifar10", "test_batch"): "40351d587109b95175f43aff81a1287e",
    ("cifar100", "train"): "16019d7e3df5f24257cddd939b257f8d",
    ("cifar100", "test"): "f0ef6b0ae62326f3e7ffdfab6717acfc",
}


def walk_cifar(survey: Survey, name: str, folder: Path) -> Walk:
    layout = cifar.find_layout(name, folder)
    assert layout is not None  # or the set would not have been found
    survey.class_names = tuple(str(n) for n in range(cifar.NUM_CLASSES[name]))
    if not is_file(folder / layout.meta):
        survey.find("class-names", None, layout.meta)
    with survey.noting(None, layout.meta, folder / layout.meta):
        survey.class_names = cifar.read_class_names(name, folder, layout)
    survey.is_published = not layout.binary
    files: Dict[str, List[_Arrays]] = {TRAIN: [], EVAL: []}
    parts = ((TRAIN, layout.train, layout.per_train_file), (EVAL, (layout.test,), cifar.TEST_SIZE))
    for subset, names, full in parts:
        present = [folder / n for n in names if is_file(folder / n)]
        check_memory(2 * sum(map(file_size, present)), f"{name} in {printable(str(folder))}")
        for file_name in names if present else ():  # else the subset is missing, which says more
            if folder / file_name not in present:
                survey.find("missing-file", subset, file_name)
        for path in present:
            with survey.noting(subset, path.name, path):
                if not layout.binary:
                    survey.compare(subset, path, "MD5", _CIFAR_MD5[name, path.name])
                images, labels = cifar.read_batch(name, layout, path, None)
                files[subset].append((path.name, images, labels))
                if len(images) < full and len(names) > 1:
                    text = f"{path.name}: {len(images):,} of {full:,}"
                    survey.find("fewer-samples", subset, text, 0)
    return walk_arrays(survey, files)


# -- class folders ------------------------------------------------------------------------------------------------


def walk_imagefolder(survey: Survey, folder: Path, validation_fraction: float) -> Walk:
    classes: Dict[str, int] = {}
    examples: Dict[str, FileExamples] = {}
    if imagefolder.is_undivided(folder):
        whole, _ = imagefolder.scan(folder, TRAIN, classes, survey, is_undivided=True)
        examples[TRAIN], examples[EVAL] = imagefolder.divide(whole, validation_fraction)
    else:
        places = {TRAIN: imagefolder.find_train(folder), EVAL: imagefolder.find_eval(folder)}
        for subset, place in places.items():
            if place is None:
                name = "train" if subset == TRAIN else " or ".join(imagefolder.EVAL_NAMES)
                survey.find("missing-subset", subset, f"there is no folder {name}")
            else:
                examples[subset], _ = imagefolder.scan(place, subset, classes, survey)
    survey.class_names = tuple(printable(name) for name in classes)
    survey.expect({subset: len(files) for subset, files in examples.items()})
    for subset, files in examples.items():
        survey.subsets[subset].name_of = functools.partial(_name_of_file, files.paths)
        yield from walk_images(survey, subset, files)


def _name_of_file(paths: Sequence[str], number: int) -> str:
    return printable("/".join(Path(paths[number]).parts[-3:]))


# -- images with masks --------------------------------------------------------------------------------------------


def walk_isbi2012(survey: Survey, folder: Path) -> Walk:
    survey.class_names = isbi2012.CLASS_NAMES
    stems = (isbi2012.IMAGES, isbi2012.LABELS)
    paths = [isbi2012.find_volume(folder, stem) for stem in stems]
    pages: List[List[Optional[np.ndarray]]] = []
    for stem, path in zip(stems, paths):
        if path is None:
            survey.find("missing-file", None, f"{stem}.tif")
        pages.append([] if path is None else isbi2012.read_pages(path, survey.max_pixels, survey))
    (images, masks), image_path = pages, paths[0]
    num_pages = len(images) or len(masks)
    first_eval = num_pages - (isbi2012.num_held_out(num_pages) if num_pages else 0)
    if image_path is None:
        return
    if images and masks and len(images) != len(masks):
        text = f"{image_path.name}: {len(images)} slices, {len(masks)} labels"
        survey.find("count-mismatch", None, text)
    survey.expect({TRAIN: first_eval, EVAL: num_pages - first_eval})
    for subset, first in ((TRAIN, 0), (EVAL, first_eval)):
        survey.subsets[subset].name_of = lambda number, first=first: (  # type: ignore[misc]
            f"{image_path.name}, page {first + number + 1}"
        )
    for page, image in enumerate(images):
        subset, number = (TRAIN, page) if page < first_eval else (EVAL, page - first_eval)
        if not survey.subsets[subset].is_chosen(number):
            continue
        if image is not None and page >= len(masks):
            survey.left_out()
            continue
        mask = masks[page] if page < len(masks) else None
        load = functools.partial(_look_at_pair, image, mask, np.zeros(0) if mask is None else mask != 0)
        yield Block(subset, [number], survey.subsets[subset].name_of(number), load)


def _look_at_pair(
    image: Optional[np.ndarray], stored: Optional[np.ndarray], mask: np.ndarray, keeps_pixels: bool
) -> Optional[Look]:
    """What a sample with a mask is; None where one of them was refused.

    Args:
        image: uint8 [h, w], or [h, w, 3] of colour.
        stored: the mask's values, where they are to be 0 and one other, the same in all masks.
        mask: its classes.
        keeps_pixels: all are kept.
    """
    if image is None or stored is None:
        return None
    if image.shape[:2] != mask.shape:
        sizes = ["x".join(map(str, array.shape[:2])) for array in (image, mask)]
        hint = "an image and its mask have one size"
        raise DataError(f"{sizes[0]}, its mask {sizes[1]}", hint, "wrong-shape")
    pixels = image.reshape(1, *image.shape[:2], -1)
    size = (int(pixels.shape[1]), int(pixels.shape[2]))
    alike = {"size": f"{size[0]}x{size[1]}", "pixels": "grey" if image.ndim == 2 else "colour"}
    values = [str(value) for value in mask_values(stored) if value]
    if values:
        alike["mask"] = "mask of " + ", ".join(values[:5]) + (", ..." if len(values) > 5 else "")
    return Look(measure(pixels), size, (), pixels, mask[np.newaxis].astype(np.uint8), alike)


def walk_imagemasks(survey: Survey, folder: Path) -> Walk:
    places = {TRAIN: folder / "train"} if is_folder(folder / "train") else {}
    evaluation = imagefolder.find_eval(folder)
    if evaluation is not None:
        places[EVAL] = evaluation
    # As in training pairs of the folder itself come first; a part of them counts where nothing else is here.
    if imagemasks.has_pairs(folder) or not any(
        is_folder(place / below) for place in places.values() for below in imagemasks.BELOW
    ):
        places = {TRAIN: folder}
    pairs = {subset: _pairs(survey, subset, place) for subset, place in places.items()}
    if places == {TRAIN: folder} and len(pairs[TRAIN]) > 1:
        edge = len(pairs[TRAIN]) - isbi2012.num_held_out(len(pairs[TRAIN]))
        pairs = {TRAIN: pairs[TRAIN][:edge], EVAL: pairs[TRAIN][edge:]}
    survey.expect({subset: len(found) for subset, found in pairs.items()})
    classes: Optional[MaskClasses] = BINARY
    table = None
    with survey.noting(None, TABLE, folder / TABLE):
        classes = table = read_table(folder)
    stored = _stored_masks(survey, folder, pairs, table is not None and table.colours)
    if classes is None:
        classes = BINARY
        with contextlib.suppress(DataError):  # each mask is judged by itself
            classes = imagemasks.classes_of_masks(folder, stored.items())
    survey.class_names = tuple(map(printable, classes.names))
    for mask_path in list(stored)[:1]:
        survey.class_colours = imagemasks.class_colours(classes, mask_path, survey.max_pixels)
    for subset, found in pairs.items():
        names = [_below(image, folder) for image, _ in found]
        survey.subsets[subset].name_of = names.__getitem__
        for number, (image_path, mask_path) in enumerate(found):
            if not survey.subsets[subset].is_chosen(number):
                continue
            load = functools.partial(
                _look_at_files, survey, image_path, stored.get(mask_path), classes, _below(mask_path, folder)
            )
            yield Block(subset, [number], names[number], load, image_path)


def _look_at_files(
    survey: Survey,
    path: Path,
    stored: Optional[np.ndarray],
    classes: MaskClasses,
    mask_name: str,
    keeps_pixels: bool,
) -> Optional[Look]:
    """What an image file is with its mask, as it is stored; None where that was refused."""
    check_png(read_file(str(path)), f"image {path}")
    image = imagemasks.read_image(path, survey.max_pixels)
    if stored is None:
        return None
    mask = classes.of(stored, f"mask {mask_name}")
    judged = codes(stored, False, f"mask {mask_name}") if classes.any_other else np.zeros(0, np.uint8)
    return _look_at_pair(image, judged, mask, keeps_pixels)


def _stored_masks(
    survey: Survey, folder: Path, pairs: Mapping[str, List[Tuple[Path, Path]]], colours: bool
) -> Dict[Path, np.ndarray]:
    """The masks that can be read, each of which is decoded once; the others are noted where they are looked at."""
    stored: Dict[Path, np.ndarray] = {}
    total = sum(map(len, pairs.values()))
    for subset, found in pairs.items():
        for number, (_, path) in enumerate(found):
            is_chosen = survey.subsets[subset].is_chosen(number)
            with (
                survey.noting(subset, _below(path, folder), path)
                if is_chosen
                else contextlib.suppress(DataError)
            ):
                check_png(read_file(str(path)), f"mask {path}")
                stored[path] = imagemasks.read_mask(path, survey.max_pixels, colours)
                if len(stored) == 1:
                    check_memory(
                        total * stored[path].nbytes, f"{printable(str(folder))} with {total} such masks"
                    )
    return stored


def _pairs(survey: Survey, subset: str, place: Path) -> List[Tuple[Path, Path]]:
    """Images with their masks in the order of names; what has no partner is noted."""
    found: List[Dict[str, Path]] = []
    for below in imagemasks.BELOW:
        with survey.noting(subset, below, place / below):
            if is_folder(place / below):
                found.append(imagemasks.files_by_name(place / below, below == "masks"))
            else:
                survey.find("missing-file", subset, f"the folder {below}")
    if len(found) < len(imagemasks.BELOW):
        return []  # One of them cannot be listed, which is told; that nothing in the other has a partner follows.
    pairs = imagemasks.find_pairs(*found)
    for name in pairs.alone:
        rename = next((f": rename {words}" for words in pairs.renames if words.startswith(name + " to ")), "")
        survey.find("unpaired", subset, name + rename)
    return list(pairs.both.values())


def _below(path: Path, folder: Path) -> str:
    return printable(str(path.relative_to(folder)))


# -- TFRecord files -------------------------------------------------------------------------------------------------

_RECORDS = "CRC32C of records"


def walk_tfds(survey: Survey, name: str, folder: Path) -> Walk:
    """A prepared version of a TFDS set.

    Raises:
        MissingError: tensorflow-datasets is not installed.
        DataError: its description is damaged, or it is no set of 8-bit images with a class each.
    """
    from ipucnn.datasets.sources import tfds

    builder, image_key, label_key = tfds.open_builder(name, folder)
    survey.class_names = tuple(printable(n) for n in builder.info.features[label_key].names)
    height, width, channels = builder.info.features[image_key].shape
    survey.shape = None if None in (height, width) else (height, width)
    splits = builder.info.splits
    chosen = {TRAIN: "train" if "train" in splits else None}
    chosen[EVAL] = next((s for s in tfds.EVAL_SPLITS if s in splits and splits[s].num_examples > 0), None)
    if chosen[EVAL] is None:
        survey.find("no-eval-subset", EVAL, f"its parts: {', '.join(splits)}")
    shards: Dict[str, List[Tuple[Path, int]]] = {}
    for subset, split in chosen.items():
        if split is not None:
            paths = [Path(str(path)) for path in splits[split].filepaths]
            shards[subset] = list(zip(paths, map(int, splits[split].shard_lengths)))
    read = functools.partial(_read_record, survey, image_key, label_key, 0, 0, channels)
    return _walk_shards(survey, shards, ".tfrecord", read)


def walk_records(survey: Survey, folder: Path) -> Walk:
    """ImageNet's record files.

    Raises:
        DataError: files of several sets lie in the folder, or that of the classes is damaged.
    """
    found, survey.class_names = imagenet.list_shards(folder), imagenet.class_names(folder)
    shards: Dict[str, List[Tuple[Path, int]]] = {}
    for subset, name in ((TRAIN, imagenet.TRAIN), (EVAL, imagenet.VALIDATION)):
        shards[subset] = [(path, -1) for path in found.get(name, [])]
        for path, _ in shards[subset]:
            if is_file(path) and file_size(path) == 0:
                survey.find("empty-file", subset, printable(path.name))
    with survey.noting(None, CHECKSUMS_FILE, folder / CHECKSUMS_FILE):
        for name, is_right in (check_checksums(folder) or {}).items():
            survey.check("SHA-256 of files", is_right)
            if not is_right:
                text = f"{printable(name)}: its SHA-256 is not that in {CHECKSUMS_FILE}"
                survey.find("checksum", None, text)
    num_classes = len(survey.class_names)
    read = functools.partial(_read_record, survey, imagenet.ENCODED, imagenet.LABEL, 1, num_classes, 3)
    return _walk_shards(survey, shards, "", read)


def _walk_shards(
    survey: Survey,
    shards: Mapping[str, Sequence[Tuple[Path, int]]],
    ending: str,
    read: Callable[[str, int, int, bool], Look],
) -> Walk:
    """The records of files, with how many each should have, or -1; ``ending`` is in the names of those that can be
    read."""
    listed = {subset: _scan_shards(survey, subset, files, ending) for subset, files in shards.items()}
    stored = {subset: survey.subsets[subset].num_stored for subset in listed}
    survey.expect({subset: len(examples) for subset, examples in listed.items()})
    for subset, examples in listed.items():
        into = survey.subsets[subset]
        into.num_stored += stored[subset]
        into.name_of = functools.partial(_name_of_record, examples)
        for number, (shard, record, at) in enumerate(
            zip(examples.shards.tolist(), examples.numbers.tolist(), examples.places.tolist())
        ):
            if into.is_chosen(number):
                path = examples.paths[shard]
                load = functools.partial(read, path, record, at)
                yield Block(subset, [number], into.name_of(number), load, None, place_of(path, record, at))


def _name_of_record(examples: RecordExamples, number: int) -> str:
    name = os.path.basename(examples.paths[examples.shards[number]])
    return f"{printable(name)}, record {examples.numbers[number]}"


def _scan_shards(
    survey: Survey, subset: str, files: Sequence[Tuple[Path, int]], ending: str
) -> RecordExamples:
    """Where the records of a subset's files begin, as far as they can be found; what is wrong with the files is noted.

    The samples of files that cannot be looked into count as stored.
    """
    places: List[np.ndarray] = [np.zeros((3, 0), np.int64)]
    differences: List[Tuple[str, int]] = []
    unseen = 0
    for shard, (path, length) in enumerate(files):
        name = printable(path.name)
        if not is_file(path):
            survey.find("missing-file", subset, name)
            continue
        if ending not in path.name:
            survey.find("not-checked", subset, f"{name}: no TFRecord file")
            unseen += length
            continue
        found: List[Tuple[int, int, int]] = []
        try:
            for number, at, _, _ in scan_records(path):
                found.append((shard, number, at))
        except DataError as error:
            if error.code == "checksum":
                survey.check(_RECORDS, False)
            survey.note_error(subset, name, error, path)
        places.append(np.array(found, np.int64).reshape(-1, 3).T)
        if length not in (-1, len(found)):
            differences.append((f"{name}: {len(found):,} of {length:,}", len(found) - length))
    columns = np.concatenate(places, axis=1)
    survey.subsets[subset].num_stored = unseen
    num_there = columns.shape[1] + unseen
    expected = survey.known.counts.get(subset, num_there)
    for text, difference in differences:
        # What differs from the published number is counted where all subsets are compared with it.
        is_counted = (num_there - expected) * difference > 0
        code = "fewer-samples" if difference < 0 else "more-samples"
        survey.find(code, subset, text, 0 if is_counted else abs(difference))
    labels: np.ndarray = np.zeros(columns.shape[1], np.int32)
    return RecordExamples(tuple(str(path) for path, _ in files), columns[0], columns[1], columns[2], labels)


def _read_record(
    survey: Survey,
    image_key: str,
    label_key: str,
    first_label: int,
    num_classes: int,
    channels: int,
    path: str,
    record: int,
    at: int,
    keeps_pixels: bool,
) -> Look:
    """What a record's image is, of a class from ``first_label`` on; labels beyond ``num_classes`` are refused if that
    is given."""
    try:
        features = read_example(path, record, at, {image_key: bytes, label_key: int})
    except DataError as error:
        if error.code != "truncated":  # of which there is no checksum to compare
            survey.check(_RECORDS, error.code != "checksum")
        raise
    survey.check(_RECORDS, True)
    data, label = features[image_key], features[label_key]
    assert isinstance(data, bytes) and isinstance(label, int)
    if num_classes and not 0 <= label - first_label < num_classes:
        last = first_label + num_classes - 1
        text = f"label {label}, labels are {first_label} to {last}"
        raise DataError(text, "correct the labels, or remove the samples", "label-range")
    try:
        return look_at(data, "image", label - first_label, keeps_pixels, survey.max_pixels, channels)
    except DataError as error:
        raise DataError(error.message.partition("image")[2], error.hint, error.code) from None
