"""Verifying a data set: which one, and a walk over all of its files that goes on where training would stop.

Each kind of set has one function that reads its files as training does, with the same readers, and hands every sample
to a :class:`~ipucnn.datasets.verification.Survey`.  What a reader refuses is noted, and the walk goes on with the next
file, page or record.  Nothing is executed, and no more than one file's samples are in memory.
"""

import contextlib
import gzip
import hashlib
import re
import zlib
from bisect import bisect_right
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import (
    Any,
    Callable,
    Deque,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Tuple,
    TypeVar,
)

import numpy as np

from ipucnn.datasets import cifar, digits, idx, imagefolder, imagemasks, isbi2012, membranes, random_data
from ipucnn.datasets.base import IMAGENET_MEAN, ArrayExamples, Examples, read_file
from ipucnn.datasets.catalog import DATASETS, INFO_FILE, find_location
from ipucnn.datasets.download import REMOTES
from ipucnn.datasets.images import open_image, opened
from ipucnn.datasets.limits import MAX_IMAGE_PIXELS
from ipucnn.datasets.masks import mask_values
from ipucnn.datasets.registry import TFDS_PREFIX, Choice, choose_dataset, fetch, list_datasets, open_dataset
from ipucnn.datasets.tiff import open_volume, page_name, read_page
from ipucnn.datasets.verification import (
    EVAL,
    TRAIN,
    WARNING,
    Known,
    Measured,
    Survey,
    Verification,
    Watcher,
    measure,
)
from ipucnn.errors import ConfigurationError, DataError, UserError, did_you_mean
from ipucnn.filesystem import Kind, expand, file_size, is_file, is_folder, kind_of, open_regular, real, shown
from ipucnn.hardware import num_cores
from ipucnn.text import printable

_IDX_KNOWN = {TRAIN: idx.FULL_SIZE["train"], EVAL: idx.FULL_SIZE["eval"]}


def _cifar_known(name: str, mean: Tuple[float, ...], std: Tuple[float, ...]) -> Known:
    layout = cifar.LAYOUTS[name][0]
    counts = {TRAIN: layout.per_train_file * len(layout.train), EVAL: cifar.TEST_SIZE}
    return Known(counts, DATASETS[name].image_shape, mean, std)


KNOWN: Dict[str, Known] = {
    "digits": Known({TRAIN: 1797 - digits.NUM_EVAL, EVAL: digits.NUM_EVAL}, (8, 8, 1)),
    "membranes": Known({TRAIN: membranes.NUM_TRAIN, EVAL: membranes.NUM_EVAL}),
    "random": Known({TRAIN: random_data.NUM_TRAIN, EVAL: random_data.NUM_EVAL}),
    # Means and deviations of the whole training subset, as they are published everywhere for normalisation: MNIST
    # 0.1307 and 0.3081 (PyTorch's MNIST example), Fashion-MNIST 0.2860 and 0.3530, CIFAR-10 0.4914 0.4822 0.4465 and
    # 0.2470 0.2435 0.2616, CIFAR-100 0.5071 0.4865 0.4409 and 0.2673 0.2564 0.2762; here in 0..255 and four digits.
    "mnist": Known(_IDX_KNOWN, (28, 28, 1), (33.3184,), (78.5675,)),
    "fashion_mnist": Known(_IDX_KNOWN, (28, 28, 1), (72.9404,), (90.0212,)),
    "cifar10": _cifar_known("cifar10", (125.3069, 122.9501, 113.8660), (62.9932, 62.0887, 66.7049)),
    "cifar100": _cifar_known("cifar100", (129.3039, 124.0699, 112.4336), (68.1702, 65.3918, 70.4184)),
    # Arganda-Carreras et al. 2015: 30 slices of 512x512.  Mean and deviation of the training stack as the challenge
    # gave it, measured on a pixel-identical copy.
    "isbi2012": Known({TRAIN: 24, EVAL: 6}, (512, 512, 1), (126.163,), (44.022,), 0.05, (TRAIN, EVAL)),
    # Russakovsky et al. 2015, table 2.  The mean is that of resized crops, and nobody publishes that of whole images: a
    # warning, beyond a wide margin.
    "imagenet": Known({TRAIN: 1281167, EVAL: 50000}, None, IMAGENET_MEAN, (), 10.0, (TRAIN,), WARNING),
}

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

# Which kind of finding an error of a reader is, by words of its message without the file's name.
_KINDS_OF_ERROR: Tuple[Tuple[str, str], ...] = (
    ("truncated", "truncated"),
    ("ended before", "truncated"),
    ("CRC", "checksum"),
    ("checksum", "checksum"),
    ("8-bit grey", "wrong-mode"),
    ("pixels of mode", "wrong-mode"),
    ("has 0 and one other", "mask-values"),
    ("pages of different sizes", "wrong-shape"),
    ("not an array of bytes", "wrong-dtype"),
    (" images but ", "count-mismatch"),
)
# Types of numbers in idx files besides unsigned bytes, by the third byte of the file.
_OTHER_IDX_TYPES = (0x09, 0x0B, 0x0C, 0x0D, 0x0E)
_READ_BYTES = 2**20
_MOST_PROMISED = 10**7


def verify(
    choice: Choice,
    *,
    download: bool = False,
    allow_partial: bool = False,
    limit_train: Optional[str] = None,
    limit_eval: Optional[str] = None,
    image_size: Optional[Tuple[int, int]] = None,
    max_pixels: int = MAX_IMAGE_PIXELS,
    watcher: Optional[Watcher] = None,
) -> Verification:
    """Looks at every sample of a data set.

    Args:
        choice: which set, of :func:`choose`.
        download: whether it may be fetched.
        allow_partial: whether what is missing of the set is a warning only.
        limit_train, limit_eval: how many samples to look at: "500" or "10%".
        image_size: (height, width) of the network's input: smaller images are noted; the size of generated sets.
        max_pixels: what an image may have at most.
        watcher: what hears of the progress.

    Raises:
        DataError: the set is not here at all.
        MissingError: a package or the network is needed.
        ConfigurationError: a limit is not a number.
    """
    has_files = choice.name.startswith(TFDS_PREFIX) or bool(DATASETS[choice.name].files)
    location = fetch(choice, download) if has_files else None
    survey = Survey(
        choice.name,
        choice.task,
        shown(location) if location is not None else "",
        KNOWN.get(choice.name.replace(TFDS_PREFIX, "", 1), Known()),
        watcher or Watcher(),
        {TRAIN: limit_train, EVAL: limit_eval},
        image_size if has_files else None,
        max_pixels,
    )
    if location is None:
        _walk_generated(survey, choice, image_size)
    elif is_file(location / INFO_FILE):
        from ipucnn.datasets.verify_tfds import walk_tfds

        walk_tfds(survey, choice.name, location)
    elif choice.name in idx.CLASS_NAMES:
        _walk_idx(survey, choice.name, location)
    elif choice.name in cifar.LAYOUTS:
        _walk_cifar(survey, choice.name, location)
    elif choice.name == "isbi2012":
        _walk_isbi2012(survey, location)
    elif choice.name == "imagemasks":
        _walk_imagemasks(survey, location)
    else:
        _walk_imagefolder(survey, location)
    return survey.finish(allow_partial)


# -- which set ------------------------------------------------------------------------------------------------


def choose(name: Optional[str], path: str, download: bool = False) -> Choice:
    """Which set is to be verified.

    Args:
        name: a name, tfds:NAME, or a folder with any kind of set in it; None for the one in ``path``.
        path: ``--dataset-path``.
        download: whether a set that is absent may be fetched.

    Raises:
        ConfigurationError: no such name, or it is not clear which set is meant.
        DataError: there is no such set.
    """
    folder = expand(path, "--dataset-path")
    if name is None:
        found = _find_kinds(folder)
        if not found:
            raise ConfigurationError(
                f"no data set is given, and none is known in {shown(folder)}",
                f"ipucnn verify-dataset NAME, one of {', '.join(list_datasets())}, tfds:NAME, or a folder",
            )
        return _only(found, folder)
    if name.lower().startswith(TFDS_PREFIX):
        return choose_dataset(name, folder, home="", task="classification", download=download)
    known = next((n for n in DATASETS if _folded(n) == _folded(name)), None)
    if known is None:
        return _choose_folder(name)
    if known in ("imagefolder", "imagemasks", "imagenet"):
        # Without one of its subsets training would not take it; here that is a finding.
        is_kind = _has_pairs_somewhere if known == "imagemasks" else _has_subset
        below = [folder / part for part in DATASETS[known].folders]
        location = next((place for place in (*below, folder) if is_kind(place)), None)
        if location is not None:
            return Choice(known, location, "", DATASETS[known].task)
    task = DATASETS[known].task
    task = "classification" if task == "any" else task
    return choose_dataset(known, folder, home="", task=task, download=download)


def _folded(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _choose_folder(name: str) -> Choice:
    folder = expand(name, "DATASET")
    kind = kind_of(folder, "DATASET")
    if kind is Kind.ABSENT:
        raise ConfigurationError(
            f"data set '{shown(name)}' is unknown, and there is no such folder",
            did_you_mean(name, list_datasets())
            or f"choose one of {', '.join(list_datasets())}, tfds:NAME, or a folder",
        )
    if kind is not Kind.FOLDER:
        raise DataError(
            f"DATASET {shown(folder)} is {kind.value}, not a folder", "give the folder it lies in"
        )
    found = _find_kinds(folder)
    if not found:
        raise DataError(
            f"{shown(folder)} holds no data set that is known",
            "class folders in train/ and val/, images/ and masks/, or the files of "
            "mnist, fashion_mnist, cifar10, cifar100, isbi2012 or a TFDS set",
        )
    return _only(found, folder)


def _only(found: List[Choice], folder: Path) -> Choice:
    if len(found) > 1:
        names = [choice.name for choice in found]
        raise ConfigurationError(
            f"{shown(folder)} holds {' and '.join(names)}",
            f"ipucnn verify-dataset {names[0]} --dataset-path {shown(folder)}",
        )
    return found[0]


def _find_kinds(folder: Path) -> List[Choice]:
    """The sets in a folder, complete or not."""
    if is_file(folder / INFO_FILE):
        return [Choice(TFDS_PREFIX + printable(real(folder).parent.name), folder, "")]
    found = []
    for name, record in DATASETS.items():
        if record.files and name not in ("imagefolder", "imagemasks"):
            location = find_location(name, folder)
            if location is not None:
                found.append(Choice(name, location, "", record.task))
    if found:
        return found
    if _has_pairs_somewhere(folder):
        return [Choice("imagemasks", folder, "", "segmentation")]
    return [Choice("imagefolder", folder, "")] if _has_subset(folder) else []


def _has_subset(folder: Path) -> bool:
    return is_folder(folder / "train") or imagefolder.find_eval(folder) is not None


def _has_pairs_somewhere(folder: Path) -> bool:
    parts = [folder, folder / "train", imagefolder.find_eval(folder) or folder]
    return any(is_folder(part / below) for part in parts for below in ("images", "masks"))


# -- errors and checksums -------------------------------------------------------------------------------------


def note_error(survey: Survey, subset: Optional[str], name: str, error: UserError) -> str:
    """Turns what a reader refused into a finding, and gives its code.

    Args:
        survey: that takes it.
        subset: it is in.
        name: the file or sample.
        error: of the reader; its message begins with what it is about.
    """
    reason = error.message
    path = getattr(error, "path", "")
    for prefix in (f"image {path}", f"mask {path}", path):
        reason = reason.replace(prefix, "", 1) if prefix else reason
    reason = reason.strip(" :,")
    code = next((code for words, code in _KINDS_OF_ERROR if words in reason), "unreadable")
    magic = re.search(r"starts with 0x([0-9a-f]{8})", reason)
    if magic and int(magic.group(1), 16) >> 8 in _OTHER_IDX_TYPES:
        code = "wrong-dtype"
    survey.find(code, subset, f"{name}: {reason}" if reason else name)
    return code


@contextlib.contextmanager
def noting(survey: Survey, subset: Optional[str], name: str, path: Path) -> Iterator[None]:
    """Around the reading of a file or sample: what is refused becomes a finding, and the block ends there."""
    try:
        yield
    except DataError as error:
        _note(survey, subset, name, path, error)


def _note(survey: Survey, subset: Optional[str], name: str, path: Path, error: DataError) -> None:
    is_empty = False
    with contextlib.suppress(DataError):
        is_empty = is_file(path) and file_size(path) == 0
    if is_empty:
        survey.find("empty-file", subset, name)
        return
    error.path = printable(str(path))  # type: ignore[attr-defined]
    note_error(survey, subset, name, error)


def _is_as_published(survey: Survey, subset: Optional[str], path: Path, kind: str, published: str) -> bool:
    """Compares a file with the published checksum, and notes a difference."""
    digest = hashlib.new(kind.lower().replace("-", ""))
    with open_regular(path) as file:
        for chunk in iter(lambda: file.read(_READ_BYTES), b""):
            digest.update(chunk)
    is_right = digest.hexdigest() == published
    survey.check(f"{kind} of files", is_right)
    if not is_right:
        survey.find("not-published", subset, f"{printable(path.name)}: {kind} {digest.hexdigest()}")
    return is_right


# -- sets in memory -------------------------------------------------------------------------------------------


def _walk_generated(survey: Survey, choice: Choice, image_size: Optional[Tuple[int, int]]) -> None:
    shape = None if image_size is None else (*image_size, random_data.DEFAULT_SHAPE[2])
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


def _walk_idx(survey: Survey, name: str, folder: Path) -> None:
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
                with noting(survey, subset, path.name, path):
                    are_published &= _is_as_published(
                        survey, subset, path, "SHA-256", published[stem + ".gz"]
                    )
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
        arrays: Dict[str, Any] = {}
        for kind, dimensions in (("images", 3), ("labels", 1)):
            path = paths[subset, kind]
            if path is not None:
                with noting(survey, subset, path.name, path):
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
        if images.shape[1:] != (28, 28):
            survey.find(
                "wrong-shape",
                subset,
                f"{file_name}: {images.shape[1]}x{images.shape[2]}, not 28x28",
                len(images),
            )
        survey.subsets[subset].name_of = lambda number, file_name=file_name: f"{file_name}, sample {number}"  # type: ignore[misc]
        num = min(len(images), len(labels))
        survey.add_arrays(subset, images[:num, ..., np.newaxis], labels[:num])


def _promised(path: Path) -> int:
    """How many images the header of an idx file says there are; 0 where it says nothing that can be true."""
    with contextlib.suppress(DataError, EOFError, zlib.error), open_regular(path) as file:
        is_packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        stream: Any = gzip.GzipFile(fileobj=file) if is_packed else file
        count = int.from_bytes(stream.read(8)[4:], "big")
        return count if count <= _MOST_PROMISED else 0
    return 0


def _walk_cifar(survey: Survey, name: str, folder: Path) -> None:
    layout = cifar.find_layout(name, folder)
    if layout is None:
        raise DataError(f"{shown(folder)} has no {name} files", "check --dataset-path")
    num_classes = cifar.NUM_CLASSES[name]
    survey.class_names = tuple(str(n) for n in range(num_classes))
    meta = folder / layout.meta
    if not is_file(meta):
        survey.find("class-names", None, layout.meta)
    with noting(survey, None, layout.meta, meta):
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
            with noting(survey, subset, path.name, path):
                if not layout.binary:
                    md5 = _CIFAR_MD5[name, path.name]
                    are_published &= _is_as_published(survey, subset, path, "MD5", md5)
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


# -- masks ----------------------------------------------------------------------------------------------------


def _walk_isbi2012(survey: Survey, folder: Path) -> None:
    survey.class_names = isbi2012.CLASS_NAMES
    paths = {stem: isbi2012.find_volume(folder, stem) for stem in (isbi2012.IMAGES, isbi2012.LABELS)}
    for stem, path in paths.items():
        if path is None:
            survey.find("missing-file", None, f"{stem}.tif")
    label_path, image_path = paths[isbi2012.LABELS], paths[isbi2012.IMAGES]
    masks: List[Tuple[Tuple[int, ...], Any]] = []
    if label_path is not None:
        # Of the labels a bit per pixel is kept; pages of both volumes at once could wait for each other's memory.
        masks = [_packed(mask) for mask in _pages(survey, label_path, "labels", is_mask=True)]
    if image_path is None:
        return
    num_pages = len(masks)
    with contextlib.suppress(DataError), open_volume(image_path, survey.max_pixels) as (_, count):
        num_pages = count
    if masks and num_pages != len(masks):
        survey.find("count-mismatch", None, f"{image_path.name}: {num_pages} slices, {len(masks)} labels")
    held_out = max(1, num_pages // isbi2012.SHARE_HELD_OUT) if num_pages else 0
    survey.expect({TRAIN: num_pages - held_out, EVAL: held_out})
    first_eval = num_pages - held_out
    survey.subsets[TRAIN].name_of = lambda number: f"{image_path.name}, page {number + 1}"
    survey.subsets[EVAL].name_of = lambda number: f"{image_path.name}, page {first_eval + number + 1}"
    for page, image in enumerate(_pages(survey, image_path, "images", is_mask=False)):
        subset, number = (TRAIN, page) if page < first_eval else (EVAL, page - first_eval)
        if not survey.subsets[subset].is_chosen(number):
            continue
        size, bits = masks[page] if page < len(masks) else ((), None)
        if image is None or bits is None:
            survey.passed(subset)
            continue
        if image.shape != size:
            survey.find(
                "wrong-shape", subset, f"page {page + 1}: {_size(image.shape)}, its labels {_size(size)}"
            )
            survey.passed(subset)
            continue
        mask = np.unpackbits(bits)[: image.size].reshape(image.shape)
        survey.add_mask(subset, number, image[..., np.newaxis], mask)
    survey.odd_ones("size of images", "wrong-shape")


def _packed(mask: Any) -> Tuple[Tuple[int, ...], Any]:
    return ((), None) if mask is None else (mask.shape, np.packbits(mask != 0))


def _pages(survey: Survey, path: Path, what: str, is_mask: bool) -> Iterator[Any]:
    """uint8 [h, w] of each page of a volume, None for one that cannot be read; what is wrong is noted."""
    other: Optional[int] = None
    with noting(survey, None, path.name, path), open_volume(path, survey.max_pixels) as (volume, count):
        for page in range(count):
            name, pixels = f"{path.name}, page {page + 1}", None
            try:
                pixels = read_page(volume, page, page_name(path, page, count), None, survey.max_pixels)
            except DataError as error:
                reason = DataError(error.message.replace(page_name(path, page, count), "", 1), error.hint)
                note_error(survey, None, name, reason)
            if pixels is not None and not is_mask:
                survey.tally(f"size of {what}", _size(pixels.shape), TRAIN, name)
            if pixels is not None and is_mask:
                other = _check_mask(survey, None, name, pixels, other)
            yield pixels


def _check_mask(
    survey: Survey, subset: Optional[str], name: str, mask: Any, other: Optional[int]
) -> Optional[int]:
    """Notes a mask of other values than 0 and ``other``; gives the value that later masks must have."""
    values = [value for value in mask_values(mask) if value]
    if other is None and len(values) == 1:
        other = values[0]
    if values and values != [other]:
        several = len(values) > 1 or other is None
        text = ", ".join(map(str, values[:5])) + (", ..." if len(values) > 5 else "")
        survey.find(
            "mask-values", subset, f"{name}: {text}" + ("" if several else f" where others have {other}")
        )
    return other


def _size(shape: Iterable[int]) -> str:
    return "x".join(str(side) for side in shape) or "unreadable"


def _walk_imagemasks(survey: Survey, folder: Path) -> None:
    survey.class_names = imagemasks.CLASS_NAMES
    places: Dict[str, Path] = {}
    whole = any(is_folder(folder / below) for below in ("images", "masks"))
    evaluation = imagefolder.find_eval(folder)
    if whole:
        places = {TRAIN: folder}
    else:
        places = {TRAIN: folder / "train"} if is_folder(folder / "train") else {}
        if evaluation is not None:
            places[EVAL] = evaluation
    pairs: Dict[str, List[Tuple[Path, Path]]] = {TRAIN: [], EVAL: []}
    for subset, place in places.items():
        pairs[subset] = _pairs(survey, subset, place)
    if whole and len(pairs[TRAIN]) > 1:
        held_out = max(1, len(pairs[TRAIN]) // isbi2012.SHARE_HELD_OUT)
        pairs = {TRAIN: pairs[TRAIN][:-held_out], EVAL: pairs[TRAIN][-held_out:]}
    survey.expect({subset: len(found) for subset, found in pairs.items()})
    other: Optional[int] = None
    for subset, found in pairs.items():
        names = [_below(image, folder) for image, _ in found]
        survey.subsets[subset].name_of = names.__getitem__
        for number, (image_path, mask_path) in enumerate(found):
            if not survey.subsets[subset].is_chosen(number):
                continue
            image = mask = None
            with noting(survey, subset, names[number], image_path):
                image = imagemasks.read_image(image_path, survey.max_pixels)
                survey.tally("size", _size(image.shape), subset, names[number])
            mask_name = _below(mask_path, folder)
            with noting(survey, subset, mask_name, mask_path):
                mask = imagemasks.read_mask(mask_path, survey.max_pixels)
                other = _check_mask(survey, subset, mask_name, mask, other)
            if image is None or mask is None:
                survey.passed(subset)
            elif image.shape != mask.shape:
                survey.find(
                    "wrong-shape",
                    subset,
                    f"{names[number]}: {_size(image.shape)}, its mask {_size(mask.shape)}",
                )
                survey.passed(subset)
            else:
                survey.add_mask(subset, number, image[..., np.newaxis], (mask != 0).astype(np.uint8))
    survey.odd_ones("size", "wrong-shape")


def _pairs(survey: Survey, subset: str, place: Path) -> List[Tuple[Path, Path]]:
    """Images with their masks in the order of names; what has no partner is noted."""
    found: List[Dict[str, Path]] = []
    for below in ("images", "masks"):
        files: Dict[str, Path] = {}
        with noting(survey, subset, below, place / below):
            if not is_folder(place / below):
                survey.find("missing-file", subset, f"the folder {below}")
            files = imagemasks.files_by_name(place / below, below == "masks")
        found.append(files)
    images, masks = found
    for what, alone in (("images", set(images) - set(masks)), ("masks", set(masks) - set(images))):
        for stem in sorted(alone):
            path = (images if what == "images" else masks)[stem]
            survey.find("unpaired", subset, f"{what}/{path.name}")
    return [(images[stem], masks[stem]) for stem in sorted(set(images) & set(masks))]


def _below(path: Path, folder: Path) -> str:
    return printable(str(path.relative_to(folder)))


# -- class folders --------------------------------------------------------------------------------------------


class _ClassFolders:
    """The image files of a subset in the order of training, a few dozen bytes each."""

    def __init__(self) -> None:
        self.folders: List[Path] = []
        self.labels: List[int] = []
        self.starts: List[int] = []
        self._names: List[bytes] = []
        self.num_files = 0

    def add(self, folder: Path, label: int, names: List[str]) -> None:
        self.folders.append(folder)
        self.labels.append(label)
        self.starts.append(self.num_files)
        # No file name holds a slash.
        self._names.append("/".join(names).encode("utf-8", "surrogateescape"))
        self.num_files += len(names)

    def names(self, at: int) -> List[str]:
        return self._names[at].decode("utf-8", "surrogateescape").split("/")

    def name_of(self, number: int) -> str:
        at = bisect_right(self.starts, number) - 1
        folder = self.folders[at]
        return printable("/".join([*folder.parts[-2:], self.names(at)[number - self.starts[at]]]))

    def __iter__(self) -> Iterator[Tuple[int, int, Path]]:
        """Number, label and path of each file."""
        for at, folder in enumerate(self.folders):
            for k, name in enumerate(self.names(at)):
                yield self.starts[at] + k, self.labels[at], folder / name


def _walk_imagefolder(survey: Survey, folder: Path) -> None:
    places = {TRAIN: folder / "train", EVAL: imagefolder.find_eval(folder)}
    classes: Dict[str, int] = {}
    listed: Dict[str, _ClassFolders] = {}
    for subset, place in places.items():
        listed[subset] = _ClassFolders()
        if place is None or not is_folder(place):
            name = "train" if subset == TRAIN else " or ".join(imagefolder.EVAL_NAMES)
            survey.find("missing-subset", subset, f"there is no folder {name}")
            continue
        _list_classes(survey, subset, place, classes, listed[subset])
    survey.class_names = tuple(printable(name) for name in classes)
    survey.expect({subset: files.num_files for subset, files in listed.items()})
    for subset, files in listed.items():
        into = survey.subsets[subset]
        into.name_of = files.name_of
        chosen = (item for item in files if into.is_chosen(item[0]))
        # Which images are drawn is asked here: the counting goes on while the next ones are decoded.
        items = ((*item, survey.wants(position)) for position, item in enumerate(chosen, survey.num_done))
        for (number, label, path, _), look in in_order(
            lambda item: look_at(read_file(str(item[2])), f"image {item[2]}", item[3], survey.max_pixels),
            items,
        ):
            name = files.name_of(number)
            try:
                looked = look()
            except DataError as error:
                _note(survey, subset, name, path, error)
                survey.passed(subset)
                continue
            take_look(survey, subset, number, label, looked, name, path.suffix.lower())
    survey.odd_ones("mode", "odd-mode", usual=("grey", "colour").__contains__)


def _list_classes(
    survey: Survey, subset: str, place: Path, classes: Dict[str, int], files: _ClassFolders
) -> None:
    """Lists the class folders of a subset; those of the first one that is listed are the classes."""
    is_first = not classes
    with noting(survey, subset, place.name, place):
        for entry in imagefolder.list_folder(place):
            path, name = Path(entry.path), f"{place.name}/{printable(entry.name)}"
            with noting(survey, subset, name, path):
                if not imagefolder.leads_to(entry, Kind.FOLDER):
                    survey.find("passed-over", subset, f"{name}: not in a class folder")
                    continue
                images = _list_images(survey, subset, path, name)
                if is_first:
                    classes[entry.name] = len(classes)
                elif entry.name not in classes and images:
                    survey.find("unknown-class", subset, f"{name}: {len(images)} images")
                if images:
                    files.add(path, classes.get(entry.name, -1), images)


def _list_images(survey: Survey, subset: str, folder: Path, name: str) -> List[str]:
    """The names of the images in a class folder; what is no image is noted."""
    images = []
    for entry in imagefolder.list_folder(folder):
        shown_name = f"{name}/{printable(entry.name)}"
        is_image = entry.name.lower().endswith(imagefolder.EXTENSIONS)
        with noting(survey, subset, shown_name, Path(entry.path)):
            if imagefolder.leads_to(entry, Kind.FILE):
                if is_image:
                    images.append(entry.name)
                else:
                    survey.find("passed-over", subset, f"{shown_name}: no image by its name")
                continue
            kind = kind_of(Path(entry.path))
            if kind is Kind.ABSENT:
                survey.find("missing-file", subset, f"{shown_name}: a link that leads nowhere")
            else:
                survey.find("passed-over", subset, f"{shown_name}: {kind.value}")
    return images


class Look(NamedTuple):
    """What was seen of one encoded image.

    Attributes:
        measured: of its pixels as training sees them.
        mode: "grey", "colour", or another in words.
        format: Pillow's name of it.
        frames: of an animation.
        size: (height, width).
        pixels: uint8 [h, w, c]; None where they are not drawn.
    """

    measured: Measured
    mode: str
    format: str
    frames: int
    size: Tuple[int, int]
    pixels: Any


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
_ENDINGS = {
    "JPEG": (".jpg", ".jpeg"),
    "MPO": (".jpg", ".jpeg"),
    "PNG": (".png",),
    "BMP": (".bmp",),
    "DIB": (".bmp",),
    "GIF": (".gif",),
    "WEBP": (".webp",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm"),
}


def look_at(data: bytes, origin: str, wants_pixels: bool, max_pixels: int, channels: int = 3) -> Look:
    """Decodes an image as training does, and says what it was before.  Raises DataError."""
    with opened(data, origin, max_pixels) as image:
        mode, form, frames = str(image.mode), str(image.format), 1
        if form in ("GIF", "WEBP", "TIFF", "PNG"):
            with contextlib.suppress(Exception):  # training reads the first frame alone
                frames = int(getattr(image, "n_frames", 1))
        if mode == "P" and "transparency" in image.info:
            mode = "PA"
    pixels = np.asarray(open_image(data, origin, channels, max_pixels))
    pixels = pixels[..., np.newaxis] if pixels.ndim == 2 else pixels
    mode = _MODES.get("I" if mode.startswith("I;") else mode, f"mode {mode}")
    measured = measure(pixels[np.newaxis])
    return Look(measured, mode, form, frames, pixels.shape[:2], pixels if wants_pixels else None)


def take_look(
    survey: Survey, subset: str, number: int, label: int, looked: Look, name: str, ending: str = ""
) -> None:
    """Hands a decoded image to the survey, with what is odd about its file."""
    problems = []
    survey.tally("mode", looked.mode, subset, name)
    if looked.mode not in ("grey", "colour"):
        problems.append("odd-mode")
    if ending and ending not in _ENDINGS.get(looked.format, (ending,)):
        survey.find("wrong-format", subset, f"{name}: {looked.format}")
        problems.append("wrong-format")
    if looked.frames > 1:
        survey.find("several-frames", subset, f"{name}: {looked.frames}")
        problems.append("several-frames")
    if label < 0:
        problems.append("unknown-class")
    survey.add(subset, number, label, looked.measured, looked.pixels, problems, looked.size)


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
