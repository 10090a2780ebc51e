"""Walks over the sets that are stored as arrays: MNIST's idx files, CIFAR's batches, and what is generated."""

import contextlib
import gzip
import zlib
from bisect import bisect_right
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Tuple

import numpy as np

from ipucnn.datasets.base import ArrayExamples, Examples
from ipucnn.datasets.registry import Choice, open_dataset
from ipucnn.datasets.sources import cifar, embedded, idx
from ipucnn.datasets.sources.download import REMOTES
from ipucnn.datasets.verification.findings import EVAL, TRAIN
from ipucnn.datasets.verification.survey import Survey
from ipucnn.errors import DataError
from ipucnn.filesystem import file_size, is_file, open_regular, shown

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
_MOST_PROMISED = 10**7


def walk_generated(survey: Survey, choice: Choice, image_size: Optional[Tuple[int, int]]) -> None:
    shape = None if image_size is None else (*image_size, embedded.DEFAULT_SHAPE[2])
    source = open_dataset(choice, image_shape=shape)
    survey.location, survey.class_names = source.info.location, source.info.class_names
    parts: Dict[str, Examples] = {TRAIN: source.train, EVAL: source.eval}
    survey.expect({name: len(examples) for name, examples in parts.items()})
    for name, examples in parts.items():
        assert isinstance(examples, ArrayExamples)
        if source.info.task != "segmentation":
            survey.add_arrays(name, examples.images, examples.labels)
            continue
        for number, (image, mask) in enumerate(zip(examples.images, examples.labels)):
            if survey.subsets[name].is_chosen(number):
                survey.add_mask(name, number, image, mask)


class _Files:
    """Which file a sample lies in, of a subset that is stored in several."""

    def __init__(self) -> None:
        self.starts: List[int] = []
        self.names: List[str] = []
        self.num_samples = 0

    def add(self, name: str, num_samples: int) -> int:
        """Appends a file; the number of its first sample."""
        self.starts.append(self.num_samples)
        self.names.append(name)
        self.num_samples += num_samples
        return self.starts[-1]

    def name_of(self, number: int) -> str:
        at = bisect_right(self.starts, number) - 1
        return f"{self.names[at]}, sample {number - self.starts[at]}"


def walk_idx(survey: Survey, name: str, folder: Path) -> None:
    survey.class_names = idx.CLASS_NAMES[name]
    published = dict(REMOTES[name].files)
    are_published = True
    paths: Dict[Tuple[str, str], Optional[Path]] = {}
    sizes: Dict[str, int] = {}
    for subset in (TRAIN, EVAL):
        for kind in ("images", "labels"):
            stem = idx.FILES[f"{subset}_{kind}"]
            path = paths[subset, kind] = idx.find_file(folder, stem)
            if path is None:
                survey.find("missing-file", subset, f"{stem} (plain or .gz)")
                are_published = False
            elif path.suffix == ".gz":
                with survey.noting(subset, path.name, path):
                    are_published &= survey.is_as_published(subset, path, "SHA-256", published[stem + ".gz"])
            else:
                are_published = False  # nobody publishes checksums of the unpacked files
        if any(paths[subset, kind] is not None for kind in ("images", "labels")):
            sizes[subset] = idx.FULL_SIZE[subset]
    survey.is_published = are_published
    # What the headers say, which is known before anything is unpacked.
    for subset in sizes:
        image_path = paths[subset, "images"]
        if image_path is not None:
            sizes[subset] = _promised(image_path) or sizes[subset]
    survey.expect(sizes)
    for subset in sizes:
        arrays: Dict[str, np.ndarray] = {}
        for kind, dimensions in (("images", 3), ("labels", 1)):
            path = paths[subset, kind]
            if path is not None:
                with survey.noting(subset, path.name, path):
                    arrays[kind] = idx.read_idx(path, dimensions)
        survey.subsets[subset].num_stored = len(arrays.get("images", ()))
        if len(arrays) < 2:
            continue
        images, labels = arrays["images"], arrays["labels"]
        image_path = paths[subset, "images"]
        assert image_path is not None
        file_name = image_path.name
        if len(images) != len(labels):
            survey.find("count-mismatch", subset, f"{file_name}: {len(images)} images, {len(labels)} labels")
        problems = []
        if images.shape[1:] != (28, 28):
            problems.append("wrong-shape")
            survey.find(
                "wrong-shape",
                subset,
                f"{file_name}: {images.shape[1]}x{images.shape[2]}, not 28x28",
                len(images),
            )
        survey.subsets[subset].name_of = lambda number, file_name=file_name: f"{file_name}, sample {number}"  # type: ignore[misc]
        num = min(len(images), len(labels))
        survey.add_arrays(subset, images[:num, ..., np.newaxis], labels[:num], problems=problems)


def _promised(path: Path) -> int:
    """How many images the header of an idx file says there are; 0 where it says nothing that can be true."""
    with contextlib.suppress(DataError, EOFError, zlib.error), open_regular(path) as file:
        is_packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        stream = gzip.GzipFile(fileobj=file) if is_packed else file
        count = int.from_bytes(stream.read(8)[4:], "big")
        return count if count <= _MOST_PROMISED else 0
    return 0


def walk_cifar(survey: Survey, name: str, folder: Path) -> None:
    layout = cifar.find_layout(name, folder)
    if layout is None:
        raise DataError(f"{shown(folder)} has no {name} files", "check --dataset-path")
    num_classes = cifar.NUM_CLASSES[name]
    survey.class_names = tuple(str(n) for n in range(num_classes))
    meta = folder / layout.meta
    if not is_file(meta):
        survey.find("class-names", None, layout.meta)
    with survey.noting(None, layout.meta, meta):
        survey.class_names = cifar.read_class_names(name, folder, layout)
    files: Dict[str, List[Path]] = {TRAIN: [folder / n for n in layout.train], EVAL: [folder / layout.test]}
    full = {TRAIN: layout.per_train_file, EVAL: cifar.TEST_SIZE}
    are_published = not layout.binary
    present: Dict[str, List[Path]] = {}
    sizes: Dict[str, int] = {}
    for subset, paths in files.items():
        present[subset] = [path for path in paths if is_file(path)]
        if not present[subset]:
            continue  # the subset is missing, which says more
        for path in paths:
            if path not in present[subset]:
                survey.find("missing-file", subset, path.name)
        # A record takes 3,073 bytes or a little more; nothing is read yet.
        sizes[subset] = sum(
            min(full[subset], file_size(path) // (cifar.PIXELS + 1)) for path in present[subset]
        )
    survey.expect(sizes)
    for subset, paths in present.items():
        into, where = survey.subsets[subset], _Files()
        into.name_of = where.name_of
        for path in paths:
            images = labels = None
            with survey.noting(subset, path.name, path):
                if not layout.binary:
                    md5 = _CIFAR_MD5[name, path.name]
                    are_published &= survey.is_as_published(subset, path, "MD5", md5)
                images, labels = cifar.read_batch(name, layout, path, None)
            if images is None:
                survey.passed(subset, 0)
                continue
            first = where.add(path.name, len(images))
            if len(images) < full[subset] and len(paths) > 1:
                survey.find("fewer-samples", subset, f"{path.name}: {len(images):,} of {full[subset]:,}", 0)
            survey.add_arrays(subset, images, labels, first)
        into.num_stored = where.num_samples
    survey.is_published = are_published
