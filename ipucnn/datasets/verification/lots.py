"""Finds the samples of each kind of data set, for verification.

Training's readers read the files of a set; they report problems to a :class:`Survey` and continue with the next file,
page or record.  Embedded and generated sets, and those of users' functions, are opened as for training.
"""

import contextlib
import itertools
import os
import struct
import threading
import zlib
from bisect import bisect_right
from functools import partial
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

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
from ipucnn.datasets.verification.samples import Decoded, Lot, measure
from ipucnn.datasets.verification.survey import Survey
from ipucnn.errors import DataError
from ipucnn.filesystem import file_size, is_file, is_folder
from ipucnn.text import printable

Lots = Mapping[str, Lot]
"""The samples of each subset, TRAIN and EVAL."""
BATCH = 256
"""Number of samples in memory that are measured in one call."""
LARGE_BYTES = 64 * 2**20
"""Larger files are read one at a time, because each may take half of the memory that is free when it is opened."""
_large_files = threading.Lock()


# -- decoding ---------------------------------------------------------------------------------------------------

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


def decode_image(
    data: bytes, origin: str, label: int, is_drawn: bool, max_pixels: int, channels: int = 3
) -> Decoded:
    """Decodes an image as training does, and records its original mode, format and frames.  Raises DataError."""
    check_png(data, origin)
    with opened(data, origin, max_pixels) as image:
        mode, form, frames = str(image.mode), str(image.format), 1
        if form in ("GIF", "WEBP", "TIFF", "PNG"):
            with contextlib.suppress(Exception):  # training reads only the first frame
                frames = int(getattr(image, "n_frames", 1))
        if mode == "P" and "transparency" in image.info:
            mode = "PA"
    array = np.asarray(open_image(data, origin, channels, max_pixels))
    pixels = array.reshape(1, *array.shape[:2], -1)
    mode = _MODES.get("I" if mode.startswith("I;") else mode, f"mode {mode}")
    alike = {"mode": mode} if channels == 3 else {}
    kept = pixels if is_drawn else None
    return Decoded(measure(pixels), array.shape[:2], [label], kept, None, alike, form, frames)


def check_png(data: bytes, origin: str) -> None:
    """Compares the checksums of a PNG file's chunks, which decoding ignores if it can still compute the pixels.

    Raises:
        DataError: a checksum is wrong, or the file has no end.
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
            text = f"{origin}: the checksum of its chunk {printable(kind.decode('latin1'))} is wrong"
            raise DataError(text, "get the file again", "checksum")
        if kind == b"IEND":
            return
        at += 12 + length
    raise DataError(f"{origin} is truncated: it has no end", "get the file again", "truncated")


def array_lot(files: Sequence[Tuple[str, np.ndarray, np.ndarray]], num_stored: Optional[int] = None) -> Lot:
    """Returns samples in memory.

    Args:
        files: name, images [n, h, w, c] and labels (classes [n] or masks [n, h, w]) of each file; all images have one
            size.
        num_stored: number of stored samples, if it is larger.
    """
    sizes = [min(len(images), len(labels)) for _, images, labels in files]
    starts = [0, *itertools.accumulate(sizes)]
    images, labels = files[0][1:]
    if len(files) > 1:
        images = np.concatenate([file[1][:size] for file, size in zip(files, sizes)])
        labels = np.concatenate([file[2][:size] for file, size in zip(files, sizes)])

    def name(number: int) -> str:
        at = bisect_right(starts, number) - 1
        return f"{files[at][0]}{', ' if files[at][0] else ''}sample {number - starts[at]}"

    def decode(numbers: Sequence[int], is_drawn: bool) -> Decoded:
        is_run = numbers[-1] + 1 - numbers[0] == len(numbers)
        rows = slice(numbers[0], numbers[-1] + 1) if is_run else numbers  # a slice needs no copy
        part, size = images[rows], (int(images.shape[1]), int(images.shape[2]))
        if labels.ndim == 3:
            return Decoded(measure(part), size, (), part, labels[rows])
        return Decoded(measure(part), size, labels[rows].tolist(), part)

    return Lot(starts[-1], name, decode, num_stored=num_stored, at_once=BATCH if labels.ndim == 1 else 1)


def file_lot(survey: Survey, examples: ImageFiles, name: Callable[[int], str], channels: int = 3) -> Lot:
    """Returns samples that are encoded images, decoded one by one."""

    def path(number: int) -> Optional[Path]:
        return Path(examples.paths[number]) if isinstance(examples, FileExamples) else None

    def decode(numbers: Sequence[int], is_drawn: bool) -> Decoded:
        (number,) = numbers
        file = path(number)
        is_large = file is not None and file_size(file) > LARGE_BYTES
        with _large_files if is_large else contextlib.nullcontext():
            data, label = examples.encoded(number), int(examples.labels[number])
            return decode_image(data, examples.describe(number), label, is_drawn, survey.max_pixels, channels)

    return Lot(
        len(examples), name, decode, path, lambda number: "" if path(number) else examples.describe(number)
    )


def source_lots(survey: Survey, source: DataSource) -> Lots:
    """Returns the samples of a set that was opened as for training."""
    survey.class_names, survey.location = source.info.class_names, source.info.location
    return {
        subset: array_lot([("", examples.images, examples.labels)])
        if isinstance(examples, ArrayExamples)
        else file_lot(survey, examples, examples.describe, source.info.image_shape[2])
        for subset, examples in ((TRAIN, source.train), (EVAL, source.eval))
    }


# -- sets in memory -----------------------------------------------------------------------------------------------


def idx_lots(survey: Survey, name: str, folder: Path) -> Lots:
    """Returns the samples of MNIST or Fashion-MNIST, and compares packed files with their published checksums."""
    survey.class_names = idx.CLASS_NAMES[name]
    published = dict(REMOTES[name].files)
    survey.is_published = True
    lots = {}
    for subset in (TRAIN, EVAL):
        for kind in ("images", "labels"):
            stem = idx.FILES[f"{subset}_{kind}"]
            path = idx.find_file(folder, stem)
            if path is None or path.suffix != ".gz":
                survey.is_published = False  # there are no published checksums of unpacked files
                continue
            with survey.noting(subset, path.name, path):
                survey.compare(subset, path, "SHA-256", published[stem + ".gz"])
        arrays = idx.read_part(folder, subset, name, survey)
        if "images" in arrays:
            path, images = arrays["images"]
            labels = arrays["labels"][1] if "labels" in arrays else np.zeros(0, np.uint8)
            lots[subset] = array_lot([(path.name, images[..., np.newaxis], labels)], len(images))
    return lots


# MD5 of the files in the archives of https://www.cs.toronto.edu/~kriz/cifar.html, from torchvision.
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


def cifar_lots(survey: Survey, name: str, folder: Path) -> Lots:
    """Returns the samples of CIFAR-10 or CIFAR-100, file by file.

    Raises DataError if a subset takes more than half of the memory.
    """
    layout = cifar.find_layout(name, folder)
    assert layout is not None  # otherwise the set would not have been chosen
    survey.class_names = tuple(str(n) for n in range(cifar.NUM_CLASSES[name]))
    if not is_file(folder / layout.meta):
        survey.find("class-names", None, layout.meta)
    with survey.noting(None, layout.meta, folder / layout.meta):
        survey.class_names = cifar.read_class_names(name, folder, layout)
    survey.is_published = not layout.binary
    lots = {}
    parts = ((TRAIN, layout.train, layout.per_train_file), (EVAL, (layout.test,), cifar.TEST_SIZE))
    for subset, names, full in parts:
        present = [folder / n for n in names if is_file(folder / n)]
        check_memory(3 * sum(map(file_size, present)), f"{name} in {printable(str(folder))}")
        for file_name in (
            names if present else ()
        ):  # without any file, the whole subset is reported as missing
            if folder / file_name not in present:
                survey.find("missing-file", subset, file_name)
        files = []
        for path in present:
            with survey.noting(subset, path.name, path):
                if not layout.binary:
                    survey.compare(subset, path, "MD5", _CIFAR_MD5[name, path.name])
                images, labels = cifar.read_batch(name, layout, path, None)
                files.append((path.name, images, labels))
                if len(images) < full and len(names) > 1:
                    text = f"{path.name}: {len(images):,} of {full:,}"
                    survey.find("fewer-samples", subset, text, 0)
        if files:
            lots[subset] = array_lot(files)
    return lots


# -- class folders ------------------------------------------------------------------------------------------------


def imagefolder_lots(survey: Survey, folder: Path, validation_fraction: float) -> Lots:
    parts, names, _ = imagefolder.read_parts(folder, validation_fraction, survey)
    survey.class_names = tuple(map(printable, names))
    return {
        subset: file_lot(survey, files, partial(_name_of_file, files.paths))
        for subset, files in parts.items()
    }


def _name_of_file(paths: Sequence[str], number: int) -> str:
    return printable("/".join(Path(paths[number]).parts[-3:]))


# -- images with masks --------------------------------------------------------------------------------------------


def isbi2012_lots(survey: Survey, folder: Path) -> Lots:
    """Returns the pages of the two volumes; a page that only one volume has counts as stored, but is not decoded."""
    survey.class_names = isbi2012.CLASS_NAMES
    volumes: List[List[Optional[np.ndarray]]] = []
    paths = [isbi2012.find_volume(folder, stem) for stem in (isbi2012.IMAGES, isbi2012.LABELS)]
    for stem, path in zip((isbi2012.IMAGES, isbi2012.LABELS), paths):
        if path is None:
            survey.find("missing-file", None, f"{stem}.tif")
        volumes.append([] if path is None else isbi2012.read_pages(path, survey.max_pixels, survey))
    images, masks = volumes
    if paths[0] is None:
        return {}
    file_name, num_pages = paths[0].name, len(images) or len(masks)
    first_eval = num_pages - (isbi2012.num_held_out(num_pages) if num_pages else 0)
    if images and masks and len(images) != len(masks):
        text = f"{file_name}: {len(images)} slices, {len(masks)} labels"
        survey.find("count-mismatch", None, text)

    def lot(first: int, end: int) -> Lot:
        def decode(numbers: Sequence[int], is_drawn: bool) -> Optional[Decoded]:
            image, mask = (volume[first + numbers[0]] for volume in volumes)
            return None if image is None or mask is None else _decode_pair(image, mask, mask != 0)

        count = max(0, min(end, len(images), len(masks)) - first)
        return Lot(
            count, lambda number: f"{file_name}, page {first + number + 1}", decode, num_stored=end - first
        )

    return {TRAIN: lot(0, first_eval), EVAL: lot(first_eval, num_pages)}


def _decode_pair(image: np.ndarray, stored: np.ndarray, mask: np.ndarray) -> Decoded:
    """Measures a sample with a mask.

    Args:
        image: uint8 [h, w], or [h, w, 3] of colour.
        stored: the mask's values if they must be 0 and one other value, the same in all masks; else empty.
        mask: the mask's classes.

    Raises:
        DataError: image and mask differ in size.
    """
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
    return Decoded(measure(pixels), size, (), pixels, mask[np.newaxis].astype(np.uint8), alike)


def imagemasks_lots(survey: Survey, folder: Path) -> Lots:
    """Returns pairs of images and masks.  All masks are read first, because together they determine the classes."""
    parts = imagemasks.part_folders(folder)
    pairs = {subset: _pairs(survey, subset, part) for subset, part in parts.items()}
    if parts == {TRAIN: folder} and len(pairs[TRAIN]) > 1:
        edge = len(pairs[TRAIN]) - isbi2012.num_held_out(len(pairs[TRAIN]))
        pairs = {TRAIN: pairs[TRAIN][:edge], EVAL: pairs[TRAIN][edge:]}
    classes: Optional[MaskClasses] = BINARY
    table = None
    with survey.noting(None, TABLE, folder / TABLE):
        classes = table = read_table(folder)
    stored = _stored_masks(survey, folder, pairs, table is not None and table.colours)
    if classes is None:
        classes = BINARY
        with contextlib.suppress(DataError):  # values that are no classes are reported for each mask
            classes = imagemasks.classes_of_masks(folder, stored.items())
    survey.class_names = tuple(map(printable, classes.names))
    for mask_path in list(stored)[:1]:
        survey.class_colours = imagemasks.class_colours(classes, mask_path, survey.max_pixels)
    return {subset: _pairs_lot(survey, folder, files, stored, classes) for subset, files in pairs.items()}


def _pairs_lot(
    survey: Survey,
    folder: Path,
    files: Sequence[Tuple[Path, Path]],
    stored: Mapping[Path, np.ndarray],
    classes: MaskClasses,
) -> Lot:
    def decode(numbers: Sequence[int], is_drawn: bool) -> Optional[Decoded]:
        path, mask_path = files[numbers[0]]
        check_png(read_file(str(path)), f"image {path}")
        image = imagemasks.read_image(path, survey.max_pixels)
        values = stored.get(mask_path)
        if values is None:
            return None
        origin = f"mask {_below(mask_path, folder)}"
        mask = classes.of(values, origin)
        judged = codes(values, False, origin) if classes.any_other else np.zeros(0, np.uint8)
        return _decode_pair(image, judged, mask)

    return Lot(
        len(files), lambda number: _below(files[number][0], folder), decode, lambda number: files[number][0]
    )


def _stored_masks(
    survey: Survey, folder: Path, pairs: Mapping[str, Sequence[Tuple[Path, Path]]], colours: bool
) -> Dict[Path, np.ndarray]:
    """Reads each mask once; returns those that can be read."""
    stored: Dict[Path, np.ndarray] = {}
    total = sum(map(len, pairs.values()))
    for subset, files in pairs.items():
        chosen = survey.chosen(subset, len(files))
        for number, (_, path) in enumerate(files):
            is_chosen = chosen is None or chosen[number]
            name = _below(path, folder)
            with survey.noting(subset, name, path) if is_chosen else contextlib.suppress(DataError):
                check_png(read_file(str(path)), f"mask {path}")
                stored[path] = imagemasks.read_mask(path, survey.max_pixels, colours)
                if len(stored) == 1:
                    subject = f"{printable(str(folder))} with {total} such masks"
                    check_memory(total * stored[path].nbytes, subject)
    return stored


def _pairs(survey: Survey, subset: str, part: Path) -> List[Tuple[Path, Path]]:
    """Returns images with their masks in the order of names, and reports files without a partner."""
    files: List[Dict[str, Path]] = []
    for below in imagemasks.BELOW:
        with survey.noting(subset, below, part / below):
            if is_folder(part / below):
                files.append(imagemasks.files_by_name(part / below, below == "masks"))
            else:
                survey.find("missing-file", subset, f"the folder {below}")
    if len(files) < len(imagemasks.BELOW):
        return []  # One folder is missing or unreadable, which is reported; files without a partner follow from it.
    pairs = imagemasks.find_pairs(*files)
    for name in pairs.alone:
        rename = next((f": rename {words}" for words in pairs.renames if words.startswith(name + " to ")), "")
        survey.find("unpaired", subset, name + rename)
    return list(pairs.both.values())


def _below(path: Path, folder: Path) -> str:
    return printable(str(path.relative_to(folder)))


# -- TFRecord files -------------------------------------------------------------------------------------------------

_RECORDS = "CRC32C of records"


def tfds_lots(survey: Survey, name: str, folder: Path) -> Lots:
    """Returns the samples of a prepared version of a TFDS set.

    Raises:
        MissingError: tensorflow-datasets is not installed.
        DataError: its description is damaged, or it is no set of 8-bit images with one class each.
    """
    from ipucnn.datasets.sources import tfds

    builder, image_key, label_key = tfds.open_builder(name, folder)
    survey.class_names = tuple(map(printable, builder.info.features[label_key].names))
    height, width, channels = builder.info.features[image_key].shape
    survey.shape = None if None in (height, width) else (height, width)
    splits = builder.info.splits
    chosen = {
        TRAIN: "train" if "train" in splits else None,
        EVAL: next((s for s in tfds.EVAL_SPLITS if s in splits and splits[s].num_examples > 0), None),
    }
    if chosen[EVAL] is None:
        survey.find("no-eval-subset", EVAL, f"its parts: {', '.join(splits)}")
    read = partial(_read_record, survey, (image_key, label_key), 0, None, channels)
    lots = {}
    for subset, split in chosen.items():
        if split is not None:
            paths = [Path(str(path)) for path in splits[split].filepaths]
            shards = list(zip(paths, map(int, splits[split].shard_lengths)))
            lots[subset] = _shards_lot(survey, subset, shards, ".tfrecord", read)
    return lots


def records_lots(survey: Survey, folder: Path) -> Lots:
    """Returns the samples in ImageNet's record files.

    Raises:
        DataError: the folder has files of several sets, or the file of the classes is damaged.
    """
    shards_of, survey.class_names = imagenet.list_shards(folder), imagenet.class_names(folder)
    with survey.noting(None, CHECKSUMS_FILE, folder / CHECKSUMS_FILE):
        for name, is_right in (check_checksums(folder) or {}).items():
            survey.check("SHA-256 of files", is_right)
            if not is_right:
                text = f"{printable(name)}: its SHA-256 is not that in {CHECKSUMS_FILE}"
                survey.find("checksum", None, text)
    keys = (imagenet.ENCODED, imagenet.LABEL)
    read = partial(_read_record, survey, keys, 1, len(survey.class_names), 3)
    lots = {}
    for subset, name in ((TRAIN, imagenet.TRAIN), (EVAL, imagenet.VALIDATION)):
        shards = [(path, -1) for path in shards_of.get(name, [])]
        for path, _ in shards:
            if is_file(path) and file_size(path) == 0:
                survey.find("empty-file", subset, printable(path.name))
        lots[subset] = _shards_lot(survey, subset, shards, "", read)
    return lots


def _shards_lot(
    survey: Survey,
    subset: str,
    files: Sequence[Tuple[Path, int]],
    ending: str,
    read: Callable[[str, int, int, bool], Decoded],
) -> Lot:
    """Returns the records of files as samples.

    Each file comes with its expected number of records, or -1.  Only files whose name contains ``ending`` can be read;
    the records of others count as stored.
    """
    examples, num_unread = _scan_shards(survey, subset, files, ending)

    def place(number: int) -> Tuple[str, int, int]:
        shard = examples.paths[examples.shards[number]]
        return shard, int(examples.numbers[number]), int(examples.places[number])

    def name(number: int) -> str:
        path, record, _ = place(number)
        return f"{printable(os.path.basename(path))}, record {record}"

    return Lot(
        len(examples),
        name,
        lambda numbers, is_drawn: read(*place(numbers[0]), is_drawn),
        place=lambda number: place_of(*place(number)),
        num_stored=len(examples) + num_unread,
    )


def _scan_shards(
    survey: Survey, subset: str, files: Sequence[Tuple[Path, int]], ending: str
) -> Tuple[RecordExamples, int]:
    """Returns the positions of the records in a subset's files, and the number of records in files of another format.

    Problems of the files are reported.
    """
    places: List[np.ndarray] = [np.zeros((3, 0), np.int64)]
    differences: List[Tuple[str, int]] = []
    num_unread = 0
    for shard, (path, length) in enumerate(files):
        name = printable(path.name)
        if not is_file(path):
            survey.find("missing-file", subset, name)
            continue
        if ending not in path.name:
            survey.find("not-checked", subset, f"{name}: no TFRecord file")
            num_unread += length
            continue
        records: List[Tuple[int, int, int]] = []
        try:
            for number, at, _, _ in scan_records(path):
                records.append((shard, number, at))
        except DataError as error:
            if error.code == "checksum":
                survey.check(_RECORDS, False)
            survey.note_error(subset, name, error, path)
        places.append(np.array(records, np.int64).reshape(-1, 3).T)
        if length not in (-1, len(records)):
            differences.append((f"{name}: {len(records):,} of {length:,}", len(records) - length))
    columns = np.concatenate(places, axis=1)
    num_stored = columns.shape[1] + num_unread
    expected = survey.known.counts.get(subset, num_stored)
    for text, difference in differences:
        # Differences from the published number are counted later, when each subset is compared with it.
        is_counted = (num_stored - expected) * difference > 0
        code = "fewer-samples" if difference < 0 else "more-samples"
        survey.find(code, subset, text, 0 if is_counted else abs(difference))
    labels: np.ndarray = np.zeros(columns.shape[1], np.int32)
    paths = tuple(str(path) for path, _ in files)
    return RecordExamples(paths, columns[0], columns[1], columns[2], labels), num_unread


def _read_record(
    survey: Survey,
    keys: Tuple[str, str],
    first_label: int,
    num_classes: Optional[int],
    channels: int,
    path: str,
    record: int,
    at: int,
    is_drawn: bool,
) -> Decoded:
    """Decodes the image of a record.

    ``keys`` are the features of the image and of the class.  Classes count from ``first_label``; with ``num_classes``,
    other classes raise DataError.
    """
    try:
        features = read_example(path, record, at, {keys[0]: bytes, keys[1]: int})
    except DataError as error:
        if error.code != "truncated":  # a truncated record has no checksum to compare
            survey.check(_RECORDS, error.code != "checksum")
        raise
    survey.check(_RECORDS, True)
    data, label = (features[key] for key in keys)
    assert isinstance(data, bytes) and isinstance(label, int)
    if num_classes is not None and not 0 <= label - first_label < num_classes:
        text = f"label {label}, labels are {first_label} to {first_label + num_classes - 1}"
        raise DataError(text, "correct the labels, or remove the samples", "label-range")
    origin = place_of(path, record, at)
    return decode_image(data, origin, label - first_label, is_drawn, survey.max_pixels, channels)
