"""Finds the samples of each kind of data set, for verification.

Training's readers read the files of a set; they report problems to a :class:`Survey` and continue with the next file,
page or record.  Embedded and generated sets, and those of users' functions, are opened as for training.
"""

import contextlib
import itertools
import os
import threading
from bisect import bisect_right
from functools import partial
from pathlib import Path
from typing import (
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
)

import numpy as np

from ipucnn.datasets.base import IN_MEMORY, DataSource, FileExamples, ImageFiles
from ipucnn.datasets.classes import written_alike
from ipucnn.datasets.formats import (
    CIFAR_FILES,
    IDX_FILES,
    Found,
)
from ipucnn.datasets.forms import Mask, Page, displayed, opened
from ipucnn.datasets.problems import Problem, guarded, item_or_problem, problem_of, readable
from ipucnn.datasets.segmentation import imagemasks
from ipucnn.datasets.segmentation.imagemasks import Pair, PairPage
from ipucnn.datasets.segmentation.masks import (
    BINARY,
    EVERY_OTHER,
    TABLE,
    MaskClasses,
    codes,
    mask_values,
    other_values,
    unnamed_values,
    void_classes,
)
from ipucnn.datasets.segmentation.patches import IGNORED
from ipucnn.datasets.sources import cifar, idx, imagefolder
from ipucnn.datasets.sources import records as imagenet
from ipucnn.datasets.sources.download import REMOTES
from ipucnn.datasets.sources.record_builder import CHECKSUMS_FILE, check_checksums
from ipucnn.datasets.sources.tfrecord import ScannedRecord, place_of, read_example, scan_records
from ipucnn.datasets.verification.findings import EVAL, TRAIN
from ipucnn.datasets.verification.samples import Decoded, Result, SubsetSamples, measure
from ipucnn.datasets.verification.stored import stored_as
from ipucnn.datasets.verification.survey import Survey
from ipucnn.errors import DataError
from ipucnn.text import printable

SamplesBySubset = Mapping[str, SubsetSamples]
"""The samples of each subset, TRAIN and EVAL."""
BATCH = 256
"""Number of samples in memory that are measured in one call."""
LARGE_BYTES = 64 * 2**20
"""Larger files are read one at a time, because each may take half of the memory that is free when it is opened."""
_large_files = threading.Lock()


# -- decoding ---------------------------------------------------------------------------------------------------


def decode_image(
    data: bytes, origin: str, label: int, is_drawn: bool, max_pixels: int, channels: int = 3
) -> Decoded:
    """Decodes an image as training does, and records its original mode, format and frames.  Raises DataError."""
    with opened(data, origin, max_pixels, strict=True) as file:
        page = file.page()
        pixels = np.asarray(displayed(page, origin, channels))
        frames = file.num_frames
    pixels = pixels.reshape(1, *pixels.shape[:2], -1)
    alike = stored_as(page.form) if channels == 3 else {}
    kept = pixels if is_drawn else None
    form, deep = page.form, _stretched(page)
    return Decoded(
        measure(pixels), np.array([label]), kept, alike, form.format, frames, deep, form.has_other_colours
    )


def _stretched(page: Page) -> str:
    """Returns the type of a page's samples in words if they are stretched to 8 bits; else ""."""
    return page.form.depth if page.form.is_deep else ""


def array_samples(files: Sequence[Tuple[str, np.ndarray, np.ndarray]]) -> SubsetSamples:
    """Returns samples in memory.

    Args:
        files: name, images [n, h, w, c] and labels (classes [n] or masks [n, h, w], or fewer) of each file; all images
            have one size.
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

    def decode(numbers: List[int], drawn: Sequence[int]) -> Iterator[Result]:
        is_run = numbers[-1] + 1 - numbers[0] == len(numbers)
        rows = slice(numbers[0], numbers[-1] + 1) if is_run else numbers  # a slice needs no copy
        part = images[rows]
        yield numbers, Decoded(measure(part), labels[rows], part)

    at_once = BATCH if labels.ndim == 1 else 1
    groups = [range(begin, min(begin + at_once, starts[-1])) for begin in range(0, starts[-1], at_once)]
    stored = sum(len(images) for _, images, _ in files)
    return SubsetSamples(
        starts[-1], name, decode, num_stored=stored, groups=lambda: groups, is_in_memory=at_once > 1
    )


def file_samples(
    survey: Survey, subset: str, examples: ImageFiles, name: Callable[[int], str], channels: int = 3
) -> SubsetSamples:
    """Returns samples that are encoded images, decoded one by one."""

    def path(number: int) -> Optional[Path]:
        return Path(examples.paths[number]) if isinstance(examples, FileExamples) else None

    def decode(numbers: List[int], drawn: Sequence[int]) -> Iterator[Result]:
        (number,) = numbers
        file, origin = path(number), examples.describe(number)
        is_large = file is not None and file.stat().st_size > LARGE_BYTES

        def read() -> Decoded:
            with _large_files if is_large else contextlib.nullcontext():
                data, label = examples.encoded(number), int(examples.labels[number])
                return decode_image(data, origin, label, bool(drawn), survey.max_pixels, channels)

        yield numbers, item_or_problem(read, subset, name(number), file, "" if file else origin)

    return SubsetSamples(len(examples), name, decode, path)


def source_samples(survey: Survey, source: DataSource) -> SamplesBySubset:
    """Returns the samples of a set that was opened as for training."""
    survey.class_names, survey.location = source.info.class_names, source.info.location
    for pair in written_alike(survey.class_names):
        survey.find("alike-classes", None, pair)
    return {
        subset: array_samples([("", np.asarray(examples.images), np.asarray(examples.masks))])
        if isinstance(examples, IN_MEMORY)
        else file_samples(survey, subset, examples, examples.describe, source.info.image_shape[2])
        for subset, examples in ((TRAIN, source.train), (EVAL, source.eval))
    }


# -- sets in memory -----------------------------------------------------------------------------------------------


def idx_samples(survey: Survey, found: Found) -> SamplesBySubset:
    """Returns the samples of MNIST or Fashion-MNIST, and compares packed files with their published checksums."""
    survey.class_names = idx.CLASS_NAMES[survey.dataset]
    published = dict(REMOTES[survey.dataset].files)
    survey.is_published = True
    by_subset = {}
    for subset in (TRAIN, EVAL):
        for stem, path in zip(IDX_FILES[subset], found.parts[subset]):
            if path.suffix != ".gz":
                survey.is_published = False  # there are no published checksums of unpacked files
            else:
                survey.compare(subset, path, "SHA-256", published[stem + ".gz"])
        files = list(readable(idx.read_part(found, subset), survey.report))
        if files:
            by_subset[subset] = array_samples([(file.path.name, file.images, file.labels) for file in files])
    return by_subset


# MD5 of the files in the archives of https://www.cs.toronto.edu/~kriz/cifar.html, from torchvision.
_CIFAR_MD5: Mapping[str, Mapping[str, str]] = {
    "cifar10": {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
    "cifar100": {"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
}


def cifar_samples(survey: Survey, found: Found) -> SamplesBySubset:
    """Returns the samples of CIFAR-10 or CIFAR-100, file by file.

    Raises DataError if the set takes more than half of the memory.
    """
    name, folder, layout = survey.dataset, found.location, cifar.version_of(found)
    survey.class_names = tuple(str(n) for n in range(cifar.NUM_CLASSES[name]))
    if not (folder / layout.meta).is_file():
        survey.find("class-names", None, layout.meta)
    try:
        survey.class_names = cifar.read_class_names(name, folder, layout)
    except DataError as error:
        survey.report(problem_of(error, None, layout.meta, folder / layout.meta))
    survey.is_published = not layout.binary
    for file_name, digest in _CIFAR_MD5[name].items() if survey.is_published else ():
        if (folder / file_name).is_file():
            subset = EVAL if file_name == layout.test else TRAIN
            survey.compare(subset, folder / file_name, "MD5", digest)
    parts: Dict[str, List[Tuple[str, np.ndarray, np.ndarray]]] = {}
    for file in readable(cifar.read_files(name, folder, layout), survey.report):
        parts.setdefault(file.subset, []).append((file.path.name, file.images, file.labels))
    return {subset: array_samples(files) for subset, files in parts.items()}


# -- class folders ------------------------------------------------------------------------------------------------


def imagefolder_samples(survey: Survey, found: Found) -> SamplesBySubset:
    parts, names = imagefolder.read_classes(found, survey.validation_fraction, survey.report)
    survey.class_names = tuple(map(printable, names))
    for pair in written_alike(names):
        survey.find("alike-classes", None, pair)
    for inside in imagefolder.deeper_folders(found, [path for part in parts.values() for path in part.paths]):
        survey.find("inner-folder", None, inside)
    return {
        subset: file_samples(survey, subset, files, partial(_name_of_file, files))
        for subset, files in parts.items()
    }


def _name_of_file(files: FileExamples, number: int) -> str:
    return printable(files.name(number))


# -- images with masks --------------------------------------------------------------------------------------------


_ReadMask = Callable[[np.ndarray, str], Tuple[np.ndarray, List[str]]]


def pairs_samples(survey: Survey, found: Found) -> SamplesBySubset:
    """Returns pairs of images and masks.  All masks are read first, because together they determine the classes."""
    folder = found.location
    files = list(readable(imagemasks.read_pairs(found), survey.report))
    path = next(iter(imagemasks.tables_of(found)), folder / TABLE)
    table = item_or_problem(partial(imagemasks.table_of, found), None, path.name, path)
    if isinstance(table, Problem):
        survey.report(table)
    # Without one table, the values of masks say nothing.
    known = MaskClasses(BINARY.names, (0, EVERY_OTHER)) if isinstance(table, Problem) else table
    masks = imagemasks.read_masks(found, files, survey.max_pixels, known)
    stored = dict(readable(masks, lambda problem: None))  # decoding reports those that are chosen
    classes = None if isinstance(table, Problem) else table
    if table is None and stored:
        of_masks = partial(imagemasks.classes_of_masks, found, stored)
        classes = next(readable([item_or_problem(of_masks, None, "masks", folder)], survey.report), None)
    is_refused = classes is None
    if is_refused and table is None and _has_foreground(stored.values()):
        classes = BINARY
    if classes is not None:
        survey.class_names = tuple(map(printable, classes.names))
        for name in void_classes(classes):
            survey.find("void-class", None, printable(name))
        for values in unnamed_values(classes, table is not None):
            survey.find("unnamed-classes", None, values)
        for values in other_values(classes, (mask.numbers for mask in stored.values())):
            survey.find("other-values", None, values)
        if stored:
            survey.class_colours = imagemasks.colours_of_classes(classes, stored.values())

    def read(mask: np.ndarray, origin: str) -> Tuple[np.ndarray, List[str]]:
        """Returns the classes of a mask, and its values of the foreground, of which all masks without a table have one.

        If the masks are refused, no pixel counts of those that do not have 0 and one other value.
        """
        values = mask_values(codes(mask, False, origin)) if table is None else ()
        foreground = [str(value) for value in values if value and classes and classes.any_other]
        if classes is None or (is_refused and len(foreground) > 1):
            return np.full(mask.shape[:2], IGNORED, np.int16), foreground
        return classes.of(mask, origin), foreground

    return {
        subset: _pairs_samples(survey, found, read, of_part)
        for subset in (TRAIN, EVAL)
        for of_part in [[one for one in masks if _subset_of(one) == subset]]
        if of_part
    }


def _has_foreground(masks: Iterable[Mask]) -> bool:
    """Returns whether a mask has the value 0 and one other."""
    for mask in masks:
        with contextlib.suppress(DataError):  # colours, which reading the mask reports
            values = mask_values(codes(mask.numbers, False, ""))
            if len(values) == 2 and not values[0]:
                return True
    return False


def _subset_of(mask: Union[Tuple[Pair, Mask], Problem]) -> Optional[str]:
    return mask.subset if isinstance(mask, Problem) else mask[0].subset


def _pairs_samples(
    survey: Survey,
    found: Found,
    read: _ReadMask,
    masks: Sequence[Union[Tuple[Pair, Mask], Problem]],
) -> SubsetSamples:
    """Returns pairs of one subset.  The pages of an image file are one group, because it is opened once."""
    folder = found.location

    files = [n if isinstance(one, Problem) else one[0].files for n, one in enumerate(masks)]
    groups: List[range] = []
    for _, numbers in itertools.groupby(range(len(masks)), key=files.__getitem__):
        first, *others = numbers
        groups.append(range(first, first + 1 + len(others)))

    def decode(numbers: List[int], drawn: Sequence[int]) -> Iterator[Result]:
        first = masks[numbers[0]]
        if isinstance(first, Problem):
            yield numbers, first
            return
        chosen = {one[0].page: one[1] for one in (masks[n] for n in numbers) if not isinstance(one, Problem)}
        waiting = list(numbers)
        for page in imagemasks.pages(first[0].files, "image", folder, survey.max_pixels, first[0], chosen):
            number = waiting.pop(0)
            yield (
                [number],
                page
                if isinstance(page, Problem)
                else item_or_problem(
                    partial(_measured_pair, page, chosen[page.pair.page], read, folder, number in drawn),
                    first[0].subset,
                    page.pair.shown(page.pair.image, folder),
                    page.pair.image,
                    page.pair.shown(page.pair.image),
                ),
            )
        if waiting:  # the first problem is that of the whole file
            yield waiting, None

    names = [one.name if isinstance(one, Problem) else one[0].shown(one[0].image, folder) for one in masks]
    paths = [one.path if isinstance(one, Problem) else one[0].image for one in masks]
    return SubsetSamples(len(masks), names.__getitem__, decode, paths.__getitem__, groups=lambda: groups)


def _measured_pair(page: PairPage, stored: Mask, read: _ReadMask, folder: Path, is_drawn: bool) -> Decoded:
    """Decodes and measures a pair, from the page of its image and its mask.  Raises DataError."""
    values, form = stored
    image = imagemasks.image_pixels(page.page, page.origin, stored)[np.newaxis]
    origin = f"mask {page.pair.shown(page.pair.mask, folder)}"
    mask, judged = read(values, origin)
    alike = {
        **stored_as(page.page.form, form),
        "pixels": "grey" if image.shape[3] == 1 else "colour",
        "values": "mask of " + ", ".join(judged[:5]) + ", ..." * (len(judged) > 5) if judged else "",
    }
    return Decoded(
        measure(image), mask[np.newaxis], image if is_drawn else None, alike, deep=_stretched(page.page)
    )


# -- TFRecord files -------------------------------------------------------------------------------------------------

_RECORDS = "CRC32C of records"


def tfds_samples(survey: Survey, folder: Path) -> SamplesBySubset:
    """Returns the samples of a prepared version of a TFDS set.

    Raises:
        MissingError: tensorflow-datasets is not installed.
        DataError: its description is damaged, or it is no set of 8-bit images with one class each.
    """
    from ipucnn.datasets.sources import tfds

    builder, image_key, label_key = tfds.open_builder(survey.dataset, folder)
    survey.class_names = tuple(map(printable, builder.info.features[label_key].names))
    height, width, channels = builder.info.features[image_key].shape
    survey.shape = None if None in (height, width) else (height, width)
    splits = builder.info.splits
    chosen = {TRAIN: "train" if "train" in splits else None, EVAL: tfds.eval_split(builder)}
    if chosen[EVAL] is None:
        survey.find("no-eval-subset", EVAL, f"its parts: {', '.join(splits)}")
    for text in itertools.chain(*tfds.unread(builder, (image_key, label_key))):
        survey.find("unread-part", None, printable(text))

    def scan(path: Path, subset: str, _: int) -> Iterator[Union[ScannedRecord, Problem]]:
        return guarded(scan_records(path), subset, printable(path.name), path)

    form = _RecordForm(image_key, label_key, channels, scan, survey.shape is not None, ending=".tfrecord")
    by_subset = {}
    for subset, split in chosen.items():
        if split is not None:
            paths = [Path(str(path)) for path in splits[split].filepaths]
            shards = list(zip(paths, map(int, splits[split].shard_lengths)))
            by_subset[subset] = _shards_samples(survey, subset, shards, form)
    return by_subset


def imagenet_samples(survey: Survey, found: Found) -> SamplesBySubset:
    """Returns the samples in ImageNet's record files, or in its class folders.

    Raises:
        DataError: the folder has files of several sets, or the file of the classes is damaged.
    """
    if found.parts:
        return imagefolder_samples(survey, found)
    folder = found.location
    shards_of, survey.class_names = imagenet.list_shards(folder), imagenet.class_names(folder)
    compared, sizes = {}, imagenet.sizes_in_plan(folder, shards_of)  # type: Dict[str, bool], Dict[str, List[int]]
    try:
        compared = check_checksums(folder) or {}
    except DataError as error:
        survey.report(problem_of(error, None, CHECKSUMS_FILE, folder / CHECKSUMS_FILE))
    for name, is_right in compared.items():
        survey.check("SHA-256 of files", is_right)
        if not is_right:
            survey.find("checksum", None, f"{printable(name)}: its SHA-256 is not that in {CHECKSUMS_FILE}")
    labels = range(1, len(survey.class_names) + 1)
    form = _RecordForm(
        imagenet.ENCODED, imagenet.LABEL, 3, imagenet.scan_shard, labels=labels, names_cut=True
    )
    by_subset = {}
    for subset, name in ((TRAIN, imagenet.TRAIN), (EVAL, imagenet.VALIDATION)):
        shards = list(zip(shards_of.get(name, []), sizes.get(name, [])))
        by_subset[subset] = _shards_samples(survey, subset, shards, form)
    return by_subset


class _RecordForm(NamedTuple):
    """What the records of a set are.

    Attributes:
        image, label, channels: the names of the features of an image and of its class, and the channels of an image.
        scan: the function that yields the records of a file, with problems, from its subset and its expected number of
            records, or -1.
        has_one_size: whether the images are TFDS's of one size, which are decoded as it does.
        labels: the valid labels; None: they are checked as those of other sets.
        ending: what is in the names of files that can be read.
        names_cut: whether ``scan`` names a file with fewer records than expected as a problem.
    """

    image: str
    label: str
    channels: int
    scan: Callable[[Path, str, int], Iterable[Union[ScannedRecord, Problem]]]
    has_one_size: bool = False
    labels: Optional[range] = None
    ending: str = ""
    names_cut: bool = False


def _shards_samples(
    survey: Survey, subset: str, files: Sequence[Tuple[Path, int]], form: _RecordForm
) -> SubsetSamples:
    """Returns the records of files as samples, and reports problems of the files.

    Each file comes with its expected number of records, or -1.  Files of TFDS that are no TFRecord files cannot be
    read; their records count as stored.
    """
    places: List[np.ndarray] = [np.zeros((0, 3), np.int64)]
    differences: List[Tuple[str, int]] = []
    num_stored = 0
    cut: Set[str] = set()

    def report(problem: Problem) -> None:
        if problem.has_rest and form.names_cut:
            cut.add(problem.name)
        if problem.code == "checksum":
            survey.check(_RECORDS, False)
        survey.report(problem)

    for shard, (path, length) in enumerate(files):
        name = printable(path.name)
        if not path.is_file():
            survey.find("missing-file", subset, name)
            continue
        if form.ending not in path.name:
            survey.find("not-checked", subset, f"{name}: no TFRecord file")
            num_stored += length
            continue
        found = readable(form.scan(path, subset, length), report)
        records = [(shard, number, at) for number, at, _, _ in found]
        places.append(np.array(records, np.int64).reshape(-1, 3))
        num_stored += len(records)
        if length not in (-1, len(records)) and not (len(records) < length and name in cut):
            differences.append((f"{name}: {len(records):,} of {length:,}", len(records) - length))
    for text, difference in differences:
        # Differences from the published number are counted later, when each subset is compared with it.
        is_counted = (num_stored - survey.known.counts.get(subset, num_stored)) * difference > 0
        code = "fewer-samples" if difference < 0 else "more-samples"
        survey.find(code, subset, text, 0 if is_counted else abs(difference))
    rows = np.concatenate(places)

    def place(number: int) -> Tuple[str, int, int]:
        shard, record, at = rows[number].tolist()
        return str(files[shard][0]), record, at

    def name_of(number: int) -> str:
        path, record, _ = place(number)
        return f"{printable(os.path.basename(path))}, record {record}"

    def decode(numbers: List[int], drawn: Sequence[int]) -> Iterator[Result]:
        at = place(numbers[0])
        read = partial(_read_record, survey, form, at, bool(drawn))
        yield numbers, item_or_problem(read, subset, name_of(numbers[0]), place=place_of(*at))

    return SubsetSamples(len(rows), name_of, decode, num_stored=num_stored)


def _read_record(survey: Survey, form: _RecordForm, place: Tuple[str, int, int], is_drawn: bool) -> Decoded:
    """Decodes the image of a record; ``place`` is its file, number and first byte.  Raises DataError."""
    try:
        features = read_example(*place, {form.image: bytes, form.label: int})
    except DataError as error:
        if error.code != "truncated":  # a truncated record has no checksum to compare
            survey.check(_RECORDS, error.code != "checksum")
        raise
    survey.check(_RECORDS, True)
    data, label = features[form.image], features[form.label]
    assert isinstance(data, bytes) and isinstance(label, int)
    if form.labels is not None and label not in form.labels:
        text = f"label {label}, labels are {form.labels[0]} to {form.labels[-1]}"
        raise DataError(text, "correct the labels, or remove the samples", "label-range")
    first = 0 if form.labels is None else form.labels[0]
    if form.has_one_size:
        from ipucnn.datasets.sources.tfds import stored_pixels

        pixels = stored_pixels(data, form.channels, place_of(*place))[np.newaxis]
        return Decoded(measure(pixels), np.array([label - first]), pixels if is_drawn else None)
    return decode_image(data, place_of(*place), label - first, is_drawn, survey.max_pixels, form.channels)


OF_SETS: Mapping[str, Callable[[Survey, Found], SamplesBySubset]] = {
    **dict.fromkeys(idx.CLASS_NAMES, idx_samples),
    **dict.fromkeys(CIFAR_FILES, cifar_samples),
    "isbi2012": pairs_samples,
    "imagemasks": pairs_samples,
    "imagefolder": imagefolder_samples,
    "imagenet": imagenet_samples,
}
"""The function that finds the samples of each set that is read from files, except for those of TFDS."""
