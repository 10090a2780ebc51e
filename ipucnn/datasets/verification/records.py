"""Verifying sets of TFRecord files, record by record: those of TensorFlow Datasets (TFDS), and ImageNet's.

TensorFlow's own reader ends at the first damaged record, so the records are taken from the files by ours.
"""

import functools
from pathlib import Path
from typing import BinaryIO, Callable, Iterator, List, NamedTuple, Optional, Tuple

from ipucnn.datasets.sources import records as imagenet
from ipucnn.datasets.sources import tfds as reader
from ipucnn.datasets.sources.record_builder import CHECKSUMS_FILE, check_checksums
from ipucnn.datasets.sources.tfrecord import BadExample, features_of, read_records
from ipucnn.datasets.verification.findings import EVAL, TRAIN
from ipucnn.datasets.verification.folders import Look, in_order, look_at, take_look
from ipucnn.datasets.verification.survey import Survey
from ipucnn.errors import DataError
from ipucnn.filesystem import file_size, is_file, open_regular
from ipucnn.text import printable

_RECORDS = "CRC32C of records"


class _Shard(NamedTuple):
    """A file of records.

    Attributes:
        path: of the file.
        first: number of its first record among the subset's.
        num_records: that the set's description says it has.
        first_extra: number of the first record beyond those; they come after all that the description knows of.
    """

    path: Path
    first: int
    num_records: int
    first_extra: int

    def number_of(self, record: int) -> int:
        """The number among the subset's of a record of this file."""
        extra = record - self.num_records
        return self.first + record if extra < 0 else self.first_extra + extra


def walk_tfds(survey: Survey, name: str, folder: Path) -> None:
    """Goes over a prepared version of a TFDS set.

    Raises:
        MissingError: tensorflow-datasets is not installed.
        DataError: its description is damaged, or it is no set of 8-bit images with a class each.
    """
    builder, image_key, label_key = reader.open_builder(name, folder)
    survey.class_names = tuple(printable(n) for n in builder.info.features[label_key].names)
    shape = tuple(builder.info.features[image_key].shape)
    splits = builder.info.splits
    chosen = {TRAIN: "train" if "train" in splits else None}
    chosen[EVAL] = next((s for s in reader.EVAL_SPLITS if s in splits and splits[s].num_examples > 0), None)
    if chosen[EVAL] is None:
        survey.find("no-eval-subset", EVAL, f"its parts: {', '.join(splits)}")
    sizes = {subset: splits[split].num_examples for subset, split in chosen.items() if split is not None}
    survey.expect(sizes)
    for subset, split in chosen.items():
        if split is not None:
            paths = [Path(str(path)) for path in splits[split].filepaths]
            lengths = [int(length) for length in splits[split].shard_lengths]
            parse = functools.partial(_parse, image_key=image_key, label_key=label_key)
            _walk_files(survey, subset, paths, lengths, parse, shape)
    if shape[-1] == 3:
        survey.odd_ones("mode", "odd-mode", usual=("grey", "colour").__contains__)


def walk_records(survey: Survey, folder: Path) -> None:
    """Goes over ImageNet's record files.

    Raises:
        DataError: files of several sets lie in the folder, or that of the classes is damaged.
    """
    shards, survey.class_names = imagenet.list_shards(folder), imagenet.class_names(folder)
    chosen = {TRAIN: shards.get(imagenet.TRAIN, []), EVAL: shards.get(imagenet.VALIDATION, [])}
    lengths = {
        subset: [imagenet.num_records(path) if is_file(path) else 0 for path in paths]
        for subset, paths in chosen.items()
    }
    survey.expect({subset: sum(counts) for subset, counts in lengths.items()})
    parse = functools.partial(
        _parse,
        image_key=imagenet.ENCODED,
        label_key=imagenet.LABEL,
        first_label=1,
        num_classes=len(survey.class_names),
    )
    for subset, paths in chosen.items():
        for path in paths:
            if is_file(path) and file_size(path) == 0:
                survey.find("empty-file", subset, printable(path.name))
        _walk_files(survey, subset, paths, lengths[subset], parse, (None, None, 3))
    with survey.noting(None, CHECKSUMS_FILE, folder / CHECKSUMS_FILE):
        for name, is_right in (check_checksums(folder) or {}).items():
            survey.check("SHA-256 of files", is_right)
            if not is_right:
                survey.find(
                    "checksum", None, f"{printable(name)}: its SHA-256 is not that in {CHECKSUMS_FILE}"
                )
    survey.odd_ones("mode", "odd-mode", usual=("grey", "colour").__contains__)


_Shape = Tuple[Optional[int], Optional[int], int]
_Parse = Callable[[bytes], Tuple[bytes, int, str, str]]
"""Image and class of a record; or the code and text of what is wrong with it."""


def _walk_files(
    survey: Survey,
    subset: str,
    paths: List[Path],
    lengths: List[int],
    parse: _Parse,
    shape: _Shape,
) -> None:
    # Where numbers begin: (number, file, record).  Of files without records the next one's begin is the right one.
    begins = [(sum(lengths[:k]), path, 0) for k, path in enumerate(paths)]
    into = survey.subsets[subset]

    def name_of(number: int) -> str:
        begin, path, record = next(entry for entry in reversed(begins) if entry[0] <= number)
        return f"{printable(path.name)}, record {number - begin + record}"

    into.name_of = name_of
    num_there, first_extra = 0, sum(lengths)
    differences: List[Tuple[str, int]] = []
    for (first, path, _), length in zip(list(begins), lengths):
        shard_name = printable(path.name)
        if not is_file(path):
            survey.find("missing-file", subset, shard_name)
            continue
        if survey.dataset != "imagenet" and ".tfrecord" not in path.name:
            survey.find("not-checked", subset, f"{shard_name}: no TFRecord file")
            num_there += length
            continue
        begins.append((first_extra, path, length))
        try:
            num_records = _walk_shard(survey, subset, _Shard(path, first, length, first_extra), parse, shape)
        except DataError as error:
            survey.note_error(subset, shard_name, error)
            continue
        num_there += num_records
        first_extra += max(num_records - length, 0)
        if num_records != length:
            differences.append((f"{shard_name}: {num_records:,} of {length:,}", num_records - length))
    into.num_stored = num_there
    expected = survey.known.counts.get(subset, num_there)
    for text, difference in differences:
        # What differs from the published number is counted where all subsets are compared with it.
        is_counted = (num_there - expected) * difference > 0
        code = "fewer-samples" if difference < 0 else "more-samples"
        survey.find(code, subset, text, 0 if is_counted else abs(difference))


class _Item(NamedTuple):
    """A record on its way: with an image, or with the code and text of what is wrong with it.

    Where the rest of a file cannot be read, its end is on the way, too, and is no sample.
    """

    record: int
    label: int
    image: bytes
    is_wanted: bool
    code: str = ""
    problem: str = ""
    is_end: bool = False


def _walk_shard(survey: Survey, subset: str, shard: _Shard, parse: _Parse, shape: _Shape) -> int:
    """Hands the records of a shard to the survey; how many there are."""
    num_records = 0

    def items(file: BinaryIO, num_bytes: int) -> Iterator[_Item]:
        nonlocal num_records
        position = survey.num_done
        for record in read_records(file, num_bytes):
            at = num_records
            if record.code != "truncated":  # of which there is no checksum to compare
                survey.check(_RECORDS, record.code != "checksum")
            if record.is_end:
                yield _Item(at, -1, b"", False, record.code, record.problem, True)
                return
            num_records += 1
            if not survey.subsets[subset].is_chosen(shard.number_of(at)):
                continue
            if record.code:
                yield _Item(at, -1, b"", False, record.code, record.problem)
            else:
                image, label, code, problem = parse(record.data)
                yield _Item(at, label, image, survey.wants(position), code, problem)
            position += 1

    def look(item: _Item) -> Optional[Look]:
        return (
            None if item.code else look_at(item.image, "image", item.is_wanted, survey.max_pixels, channels)
        )

    channels = shape[2]
    with open_regular(shard.path) as file:
        for item, result in in_order(look, items(file, file_size(shard.path))):
            name = f"{printable(shard.path.name)}, record {item.record}"
            try:
                looked = result()
            except DataError as error:
                survey.note_error(subset, name, error, said="image")
                looked = None
            if item.code:
                survey.find(item.code, subset, f"{name}: {item.problem}")
            if looked is None:
                if not item.is_end:
                    survey.passed(subset)
                continue
            problems = []
            if None not in shape and looked.size != shape[:2]:
                problems.append("wrong-shape")
                survey.find(
                    "wrong-shape",
                    subset,
                    f"{name}: {looked.size[0]}x{looked.size[1]}, not {shape[0]}x{shape[1]}",
                )
            take_look(
                survey, subset, shard.number_of(item.record), item.label, looked, name, problems=problems
            )
    return num_records


def _parse(
    data: bytes, image_key: str, label_key: str, first_label: int = 0, num_classes: int = 0
) -> Tuple[bytes, int, str, str]:
    """The encoded image and the class from 0 of a record, where labels begin with ``first_label``; or code and text of
    what is wrong with it: it lacks one of them, or has a label beyond ``num_classes`` if these are given."""
    try:
        features = features_of(data, {image_key: bytes, label_key: int})
    except BadExample as error:
        return b"", -1, "unreadable", str(error)
    image, label = features[image_key], features[label_key]
    assert isinstance(image, bytes) and isinstance(label, int)
    if num_classes and not 0 <= label - first_label < num_classes:
        last = first_label + num_classes - 1
        return b"", -1, "label-range", f"label {label}, labels are {first_label} to {last}"
    return image, label - first_label, "", ""
