"""Builds ImageNet's record files, which :mod:`ipucnn.datasets.sources.records` reads, from class folders.

A record depends only on its image, and the names of all images determine its file.  So any number of workers make the
same files, and an interrupted build keeps its finished files.  The features are those of the public builders (for
example tensorflow/models, ``build_imagenet_data.py``), in the order of their names.
"""

import hashlib
import io
import json
import os
import threading
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ipucnn.datasets.base import CLASSES_FILE, FileExamples, file_digest, read_file
from ipucnn.datasets.formats import CLASS_LAYOUT, find_classes
from ipucnn.datasets.forms import GREY, RGB, displayed, opened
from ipucnn.datasets.hashing import ORDER, permutation
from ipucnn.datasets.limits import MAX_IMAGE_PIXELS
from ipucnn.datasets.sources.imagefolder import open_imagefolder
from ipucnn.datasets.sources.records import (
    ENCODED,
    FILENAME,
    LABEL,
    PLAN_FILE,
    RECORDS,
    TRAIN,
    VALIDATION,
    list_shards,
    shard_edges,
    shard_name,
)
from ipucnn.datasets.sources.tfrecord import Feature, frame, make_example, read_example, scan_records
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.events import Events, Progress
from ipucnn.filesystem import (
    check_makeable,
    locked,
    make_folder,
    read_text,
    remove_temporaries,
    shown,
    write_atomically,
    write_text,
)
from ipucnn.text import printable

CHECKSUMS_FILE = "SHA256SUMS"
"""The file with the digests of a finished build's record and class files, in the format of ``sha256sum -c``."""
QUALITY = 100
"""JPEG quality for images that are converted from another format; the public builders' value."""
_OPTIONS = ("--shards", "--validation-shards")
_SHUFFLE_SEED = 12345
_VERSION = 2
_MOST_TEXT_BYTES = 2**26
_POLL_S = 0.2


class Built(NamedTuple):
    """The result of a build.

    Attributes:
        num_images: number of images by subset.
        num_shards: number of files by subset.
        num_classes: number of classes in the folder.
        num_kept: number of files that an earlier build finished.
        num_converted: number of images in this build's files that were not JPEG in grey or colour.
        warnings: lines about images that are held out, or left out.
    """

    num_images: Dict[str, int]
    num_shards: Dict[str, int]
    num_classes: int
    num_kept: int
    num_converted: int
    warnings: Tuple[str, ...]


@dataclass(frozen=True)
class _Shard:
    """A file to make, with its images in order."""

    path: Path
    images: FileExamples
    class_names: Tuple[str, ...]


class _Stopped(Exception):
    """Stops making a file, because the build failed or was interrupted elsewhere."""


def build(
    folder: Path,
    out: Path,
    num_shards: int,
    num_validation_shards: int,
    num_workers: int,
    max_pixels: int = MAX_IMAGE_PIXELS,
) -> Events[Built]:
    """Makes the record files that an earlier call has not finished.

    Args:
        folder: a folder with ``{train,val}/CLASS/*``.
        out: the folder to write the files to.
        num_shards, num_validation_shards: number of files of each subset.
        num_workers: number of files that are made at the same time.
        max_pixels: the most pixels of an image.

    Raises:
        ConfigurationError: there are more files than images.
        DataError: an image cannot be read; or ``out`` holds other files, cannot be written, or is in use by another
            build.
    """
    check_makeable(out)
    found = find_classes(folder)
    if found is None:
        raise DataError(f"{folder} is not an image folder: it lacks train/ or val/", CLASS_LAYOUT)
    source = open_imagefolder(found)
    names, counts = source.info.class_names, {TRAIN: num_shards, VALIDATION: num_validation_shards}
    for name in names:
        if name != name.strip() or name.startswith("#"):
            text = f"the class folder {shown(name)!r} begins with # or a blank, or ends with one: {CLASSES_FILE} cannot"
            raise DataError(f"{text} hold such a name", "rename the folder")
    shards: List[_Shard] = []
    sizes: Dict[str, int] = {}
    for subset, examples in ((TRAIN, source.train), (VALIDATION, source.eval)):
        assert isinstance(examples, FileExamples)
        sizes[subset] = len(examples)
        if counts[subset] > len(examples):
            most = [max(1, len(part) // 1000) for part in (source.train, source.eval)]
            given = [f"{option} {min(pair)}" for option, *pair in zip(_OPTIONS, most, counts.values())]
            raise ConfigurationError(
                f"{_OPTIONS[subset == VALIDATION]} {counts[subset]}: {shown(folder)} has {len(examples)} {subset} "
                "images, fewer than files",
                " ".join(given),
            )
        shards += _deal_out(out, subset, counts[subset], examples, names)
    make_folder(out)
    try:
        lock = locked(out)
    except BlockingIOError:
        raise DataError(f"another process builds records in {shown(out)}", "wait until it is done") from None
    try:
        _begin(out, shards, folder, counts, sizes, names)
        digests, num_kept, num_converted = yield from _make_all(shards, num_workers, max_pixels)
        digests[CLASSES_FILE] = file_digest(out / CLASSES_FILE)
        lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items())]
        write_text(out / CHECKSUMS_FILE, "".join(lines))
    finally:
        if lock is not None:
            os.close(lock)
    return Built(sizes, counts, len(names), num_kept, num_converted, source.info.warnings)


def _deal_out(
    out: Path, subset: str, count: int, examples: FileExamples, names: Tuple[str, ...]
) -> List[_Shard]:
    """Returns the files of a subset: its images in a fixed pseudo-random order, cut into ``count`` runs.

    So each file holds a mixture of classes, for readers that shuffle only within a few files.
    """
    order = permutation(len(examples), _SHUFFLE_SEED, ORDER, 0 if subset == TRAIN else 1).tolist()
    edges = shard_edges(len(order), count)
    return [
        _Shard(out / shard_name(subset, k, count), examples.subset(order[begin:end]), names)
        for k, (begin, end) in enumerate(zip(edges, edges[1:]))
    ]


def _begin(
    out: Path,
    shards: Sequence[_Shard],
    folder: Path,
    counts: Dict[str, int],
    sizes: Dict[str, int],
    names: Tuple[str, ...],
) -> None:
    """Writes the plan of the build, or compares it with that of an earlier build; removes incomplete files.

    Raises:
        DataError: the folder holds records of other images, another number of files, or no plan.
    """
    digest = hashlib.sha256(json.dumps([_VERSION, names]).encode())
    for shard in shards:
        for image, label in zip(shard.images.paths, shard.images.labels):
            name, size = os.path.relpath(image, folder), Path(image).stat().st_size
            digest.update(f"{name}\0{label}\0{size}\n".encode("utf-8", "surrogateescape"))
    in_plan = {"version": _VERSION, **counts, RECORDS: sizes, "images_sha256": digest.hexdigest()}
    plan = json.dumps(in_plan, indent=2) + "\n"
    path = out / PLAN_FILE
    is_begun = path.is_file()
    if is_begun and read_text(path, _MOST_TEXT_BYTES) != plan:
        raise DataError(
            f"{shown(out)} holds records of other images, or another number of files",
            "choose an empty folder for OUT, or give the numbers of the build that was begun there",
        )
    if not is_begun and (list_shards(out) or (out / CLASSES_FILE).is_file()):
        raise DataError(
            f"{shown(out)} holds records that were not built here", "choose an empty folder for OUT"
        )
    ours = {*(shard.path.name for shard in shards), CLASSES_FILE, CHECKSUMS_FILE, PLAN_FILE}
    remove_temporaries(out, ours.__contains__)
    if not is_begun:
        write_text(path, plan)
    text = "".join(f"{printable(name)}\n" for name in names)
    if not (out / CLASSES_FILE).is_file() or read_text(out / CLASSES_FILE, _MOST_TEXT_BYTES) != text:
        write_text(out / CLASSES_FILE, text)


def _make_all(
    shards: Sequence[_Shard], num_workers: int, max_pixels: int
) -> Events[Tuple[Dict[str, str], int, int]]:
    """Makes the files; returns the SHA-256 of each by name, the number of kept files, and that of converted images."""
    total, done, stop = sum(len(shard.images) for shard in shards), [0] * len(shards), threading.Event()

    def make(number: int) -> Tuple[str, bool, int]:
        def progress(images: int) -> None:
            done[number] = images
            if stop.is_set():
                raise _Stopped

        shard = shards[number]
        if _is_whole(shard, progress):
            return file_digest(shard.path), True, 0
        return _made(shard, max_pixels, progress)

    with ThreadPoolExecutor(num_workers) as pool:
        futures: List[Future[Tuple[str, bool, int]]] = [
            pool.submit(make, number) for number in range(len(shards))
        ]
        try:
            waiting = set(futures)
            while waiting:
                # With a timeout, because a signal just before an endless wait would be handled only at its end.
                ended, waiting = wait(waiting, timeout=_POLL_S, return_when=FIRST_EXCEPTION)
                yield Progress("building records", sum(done), total)
                for future in ended:
                    future.result()
        finally:
            stop.set()
            for future in futures:
                future.cancel()
    results = [future.result() for future in futures]
    digests = {shard.path.name: digest for shard, (digest, _, _) in zip(shards, results)}
    return digests, sum(kept for _, kept, _ in results), sum(converted for _, _, converted in results)


def _made(shard: _Shard, max_pixels: int, progress: Callable[[int], None]) -> Tuple[str, bool, int]:
    """Makes a file; returns its SHA-256, False because it was not kept, and the number of converted images."""
    digest, num_converted = hashlib.sha256(), 0

    def write(temporary: Path) -> None:
        nonlocal num_converted
        with temporary.open("xb") as file:
            for number, (path, label) in enumerate(zip(shard.images.paths, shard.images.labels.tolist()), 1):
                example, is_converted = make_record(path, label, shard.class_names[label], max_pixels)
                data = frame(example)
                file.write(data)
                digest.update(data)
                num_converted += is_converted
                progress(number)

    write_atomically(shard.path, write)
    return digest.hexdigest(), False, num_converted


def make_record(path: str, label: int, class_name: str, max_pixels: int) -> Tuple[bytes, bool]:
    """Returns the Example of an image file, and whether the image was converted.

    JPEG files in grey or colour are stored unchanged.  Other images (PNG, CMYK, ...) are converted as for training and
    stored as JPEG.

    Args:
        path: path of the file.
        label: its class, from 0; the record stores it from 1.
        class_name: name of that class.
        max_pixels: the most pixels it may have.

    Raises:
        DataError: the image cannot be read.
    """
    data, origin = read_file(path), f"image {printable(path)}"
    with opened(data, origin, max_pixels, strict=True) as file:
        # MPO, which telephones write, is a JPEG followed by a second one.
        is_kept = file.form.format in ("JPEG", "MPO") and file.form.colour in (GREY, RGB)
        page, (height, width) = file.page(), file.form.size
        if not is_kept:
            picture, packed = displayed(page, origin, 3), io.BytesIO()
            width, height = picture.size
            picture.save(packed, "JPEG", quality=QUALITY, subsampling=0)  # colours of each pixel
            data = packed.getvalue()
    features: Dict[str, Feature] = {
        ENCODED: data,
        LABEL: label + 1,
        FILENAME: os.fsencode(os.path.basename(path)),
        "image/class/synset": os.fsencode(class_name),
        "image/class/text": os.fsencode(class_name),
        "image/format": b"JPEG",
        "image/colorspace": b"RGB",
        "image/channels": 3,
        "image/height": height,
        "image/width": width,
    }
    return make_example(features), not is_kept


def _is_whole(shard: _Shard, progress: Callable[[int], None]) -> bool:
    """Returns whether the file exists with all its records, each with the right checksum, name and label."""
    if not shard.path.is_file():
        return False
    names = {ENCODED: bytes, LABEL: int, FILENAME: bytes}
    count = 0
    try:
        for number, at, _, _ in scan_records(shard.path):
            features = read_example(str(shard.path), number, at, names)
            name = (
                os.fsencode(os.path.basename(shard.images.paths[number]))
                if number < len(shard.images)
                else b""
            )
            if not name or (features[LABEL], features[FILENAME]) != (shard.images.labels[number] + 1, name):
                return False
            count = number + 1
            progress(count)
    except DataError:
        return False
    return count == len(shard.images)


def check_checksums(folder: Path) -> Optional[Dict[str, bool]]:
    """Checks the SHA-256 of each present file in a build's list; returns the results by name, or None without a list.

    Raises:
        DataError: a line of the list is damaged.
    """
    path = folder / CHECKSUMS_FILE
    if not folder.is_dir() or not path.is_file():
        return None
    results = {}
    for line in read_text(path, _MOST_TEXT_BYTES).splitlines():
        digest, separator, name = line.partition("  ")
        if len(digest) != 64 or not separator or "/" in name or not name:
            raise DataError(f"{shown(path)} is damaged: '{shown(line)}'", "build the records again")
        if (folder / name).is_file():
            results[name] = file_digest(folder / name) == digest
    return results
