"""ImageNet as TFRecord files, ``train-00000-of-01024`` and ``validation-00000-of-00128``, or any other number of files.

Training reads samples in any order, so an index of the start and the label of each record is made and kept in the
user's cache folder (25 MB for files of 144 GB).  The content of a record is read when it is needed.
"""

import contextlib
import hashlib
import io
import json
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from ipucnn.aliases import Numbers
from ipucnn.datasets.base import CLASSES_FILE, DataSource, RecordExamples, class_lines, data_source
from ipucnn.datasets.formats import SHARD
from ipucnn.datasets.problems import (
    Passed,
    Problem,
    check_any_left,
    guarded,
    item_or_problem,
    left_out_line,
    problem_of,
    readable,
)
from ipucnn.datasets.sources.tfrecord import (
    AGAIN,
    BadExample,
    Read,
    ScannedRecord,
    place_of,
    read_features,
    scan_records,
)
from ipucnn.documents import load_record
from ipucnn.errors import DataError
from ipucnn.events import Progress, emit
from ipucnn.filesystem import (
    cache_folder,
    entries,
    read_text,
    real,
    shown,
    write_cached,
)
from ipucnn.machine import num_cores, parallel_map
from ipucnn.text import counted, printable

TRAIN, VALIDATION = "train", "validation"
ENCODED, LABEL, FILENAME = "image/encoded", "image/class/label", "image/filename"
NUM_CLASSES = 1000
MOST_CLASSES = 100_000
LAYOUT = (
    "expected train-00000-of-NNNNN, ... and validation-00000-of-MMMMM, ...; ipucnn build-records makes them"
)
PLAN_FILE = "build.json"
"""The plan of a build beside its files."""
_MOST_PLAN_BYTES = 2**20
RECORDS = "records"
"""The field of the plan with the number of records of each subset."""
_INDEX_VERSION = 3
_COLUMNS = {"shards": np.int32, "numbers": np.int32, "places": np.int64, "labels": np.int32}
_Columns = Dict[str, np.ndarray]


def shard_name(subset: str, number: int, count: int) -> str:
    """Returns the name of a record file, such as ``train-00003-of-01024``."""
    return f"{subset}-{number:05d}-of-{count:05d}"


def list_shards(folder: Path) -> Dict[str, List[Path]]:
    """Returns all files of each subset, derived from the names of the present ones; some of them may be absent.

    Raises:
        DataError: the names of one subset contain different numbers of files.
    """
    counts: Dict[str, int] = {}
    for path in entries(folder):
        match = SHARD.fullmatch(path.name)
        if match is None:
            continue
        subset, number, count = match.group(1), int(match.group(2)), int(match.group(3))
        if counts.setdefault(subset, count) != count or number >= count:
            raise DataError(
                f"{shown(folder)} has files of several sets of '{subset}' records: {path.name} is not one of "
                f"{counts[subset]}",
                "keep one set in a folder",
            )
    return {
        subset: [folder / shard_name(subset, k, counts[subset]) for k in range(counts[subset])]
        for subset in (TRAIN, VALIDATION)
        if subset in counts
    }


def shard_edges(num_records: int, num_shards: int) -> List[int]:
    """Returns the bounds of the runs of records that a build puts into its files."""
    return [num_records * k // num_shards for k in range(num_shards + 1)]


def sizes_in_plan(folder: Path, shards: Mapping[str, Sequence[Path]]) -> Dict[str, List[int]]:
    """Returns the number of records of each file by subset; -1 for those that ipucnn did not build."""
    sizes = {subset: [-1] * len(paths) for subset, paths in shards.items()}
    if (folder / PLAN_FILE).is_file():
        with contextlib.suppress(DataError, ValueError):
            planned = load_record(read_text(folder / PLAN_FILE, _MOST_PLAN_BYTES))
            counts = planned.get(RECORDS) if isinstance(planned, dict) else None
            for subset, paths in shards.items():
                count = counts.get(subset) if isinstance(counts, dict) else None
                if isinstance(count, int) and not isinstance(count, bool) and count >= 0:
                    edges = shard_edges(count, len(paths))
                    sizes[subset] = [end - begin for begin, end in zip(edges, edges[1:])]
    return sizes


def class_names(folder: Path) -> Tuple[str, ...]:
    """Returns the names of the classes in the order of their labels, which begin at 1: ImageNet's 1000 without a file.

    Raises:
        DataError: the file of the classes is damaged.
    """
    path = folder / CLASSES_FILE
    if not path.is_file():
        return tuple(str(label) for label in range(1, NUM_CLASSES + 1))
    names = [name for _, name in class_lines(path)]
    if not 1 <= len(names) <= MOST_CLASSES:
        raise DataError(
            f"{shown(path)} has the names of {len(names)} classes",
            "write one class a line, in the order of labels",
        )
    return tuple(printable(name) for name in names)


# -- the index ------------------------------------------------------------------------------------------------


def label_of(read: Read, length: int, place: str, num_classes: int) -> int:
    """Returns the class of a record, from 0; ``read`` reads bytes of the record.

    Raises:
        DataError: the record has no label, or one outside 1 to ``num_classes``.
    """
    try:
        label = read_features(read, length, {LABEL: int})[LABEL]
    except BadExample as error:
        raise DataError(f"{place} is no labelled image: {error}", AGAIN, "unreadable") from None
    assert isinstance(label, int)
    if not 1 <= label <= num_classes:
        raise DataError(
            f"{place} has the label {label}, and labels are 1 to {num_classes}",
            f"build the records again, or put a {CLASSES_FILE} with a line for each class beside them",
            "label-range",
        )
    return label - 1


_Row = Tuple[int, int, int]


def scan_shard(path: Path, subset: str, size: int) -> Iterator[Union[ScannedRecord, Problem]]:
    """Yields the records of a file, and the problems with it.

    A file without records, or with fewer than ``size``, which is -1 if it is not known, is damaged: it was cut.
    """
    count, has_rest = 0, False
    for record in guarded(scan_records(path), subset, printable(path.name), path):
        has_rest = has_rest or (isinstance(record, Problem) and record.has_rest)
        count += 1
        yield record
    if not has_rest and (not count or count < size):
        of_plan = "" if size == -1 else f" of the {size:,} in {PLAN_FILE}"
        hint = f"{AGAIN}, or pass --skip-damaged"
        code = "truncated" if count else "empty-file"
        error = DataError(f"{shown(path)} has {counted(count, 'record')}{of_plan}", hint, code)
        yield replace(problem_of(error, subset, printable(path.name), path), has_rest=True)


def _index_shard(path: Path, subset: str, num_classes: int, size: int) -> List[Union[_Row, Problem]]:
    """Returns number, place and class of each record of a file, or the problem with it."""
    rows: List[Union[_Row, Problem]] = []
    for record in scan_shard(path, subset, size):
        if isinstance(record, Problem):
            rows.append(record)
            continue
        number, at, length, read = record
        place = place_of(path, number, at)
        label = item_or_problem(partial(label_of, read, length, place, num_classes), subset, place)
        rows.append(label if isinstance(label, Problem) else (number, at, label))
    return rows


def _index(
    shards: List[Path],
    sizes: List[int],
    subset: str,
    num_classes: int,
    done: int,
    total: int,
    report: Callable[[Problem], None],
) -> _Columns:
    """Returns the columns of :class:`RecordExamples` of one subset; several files are read at the same time.

    Args:
        shards, sizes, subset: the files, their number of records or -1, and their subset.
        num_classes: number of classes.
        done, total: how many files were read before, and how many there are in all subsets.
        report: function that gets each problem.
    """
    parts = []
    work = ((path, subset, num_classes, size) for path, size in zip(shards, sizes))
    for rows in parallel_map(_index_shard, work, num_cores()):
        parts.append(np.array(list(readable(rows, report)), np.int64).reshape(-1, 3).T)
        emit(Progress("indexing records", done + len(parts), total))
    numbers, places, labels = np.concatenate(parts, axis=1)
    owners: np.ndarray = np.repeat(np.arange(len(shards)), [part.shape[1] for part in parts])
    columns = {"shards": owners, "numbers": numbers, "places": places, "labels": labels}
    return {name: columns[name].astype(kind) for name, kind in _COLUMNS.items()}


def _cache_path(folder: Path, shards: Dict[str, List[Path]], num_classes: int) -> Optional[Path]:
    """Returns the path of the index, which depends on the plan, and the name, size and modification time of each file.

    None without a cache.
    """
    described: List[object] = [_INDEX_VERSION, num_classes, str(real(folder)), sizes_in_plan(folder, shards)]
    for path in (path for paths in shards.values() for path in paths):
        status = path.stat()
        described.append([path.name, status.st_size, status.st_mtime_ns])
    key = hashlib.sha256(json.dumps(described).encode("utf-8", "surrogateescape")).hexdigest()
    cache = cache_folder("records")
    return None if cache is None else cache / f"{key[:32]}.npz"


def _read_cached(path: Path, subsets: Iterable[str]) -> Optional[Dict[str, _Columns]]:
    """Reads the columns of both subsets; returns None if the file is absent or damaged."""
    with contextlib.suppress(Exception):  # NumPy and zipfile raise many types for damaged files
        zipfile.ZipFile(path).close()  # NumPy 1.19 prints an error for a file that is none
        with np.load(path, allow_pickle=False) as stored:
            return {subset: {name: stored[f"{subset}.{name}"] for name in _COLUMNS} for subset in subsets}
    return None


def _write_index(path: Optional[Path], subsets: Dict[str, _Columns]) -> None:
    packed = io.BytesIO()
    columns: Dict[str, Numbers] = {
        f"{subset}.{name}": column for subset in subsets for name, column in subsets[subset].items()
    }
    np.savez(packed, **columns)
    write_cached(path, packed.getvalue())


def open_records(folder: Path, skip_damaged: bool = False) -> DataSource:
    """Indexes the record files of a folder, or reads the cached index; images are read later.

    Args:
        folder: the folder.
        skip_damaged: whether to leave out damaged records, and the rest of a file that ends early.

    Raises:
        DataError: a file is missing, a record is truncated or damaged, or a label is beyond the classes; the message
            names file and record.
    """
    shards = list_shards(folder)
    for subset in (TRAIN, VALIDATION):
        if subset not in shards:
            raise DataError(f"{shown(folder)} has no {subset} records", LAYOUT)
        for path in shards[subset]:
            if not path.is_file():
                raise DataError(
                    f"{shown(path)} is missing: the '{subset}' records are {len(shards[subset])} files",
                    "copy or build it again",
                )
    names = class_names(folder)
    cached = _cache_path(folder, shards, len(names))
    subsets = None if cached is None else _read_cached(cached, shards)
    passed = Passed(skip_damaged)
    if subsets is None:
        subsets, done, total = {}, 0, sum(map(len, shards.values()))
        sizes = sizes_in_plan(folder, shards)
        for subset, paths in shards.items():
            subsets[subset] = _index(paths, sizes[subset], subset, len(names), done, total, passed)
            done += len(paths)
        num_train, num_eval = (len(subsets[subset]["labels"]) for subset in (TRAIN, VALIDATION))
        check_any_left(num_train, num_eval, passed.damaged)
        for subset, columns in subsets.items():
            if not len(columns["labels"]):
                raise DataError(f"{shown(folder)}: the {subset} files have no records", LAYOUT)
        if not passed.damaged:
            _write_index(cached, subsets)
    train, evaluation = (
        RecordExamples(tuple(map(str, shards[subset])), **subsets[subset]) for subset in (TRAIN, VALIDATION)
    )
    note = "the index of the records is not kept: no cache folder is known (IPUCNN_CACHE_DIR names one)"
    return data_source(
        train,
        evaluation,
        name="imagenet",
        class_names=names,
        location=str(folder),
        warnings=(
            *((note,) if cached is None else ()),
            *left_out_line(passed.damaged, "record"),
        ),
        left_out=passed.left_out,
        crops="imagenet",
    )
