"""A walk over class folders, and how encoded images are looked at, several at a time."""

import contextlib
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
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
    TypeVar,
)

import numpy as np

from ipucnn.datasets.base import read_file
from ipucnn.datasets.images import open_image, opened
from ipucnn.datasets.segmentation import imagemasks, isbi2012
from ipucnn.datasets.segmentation.isbi2012 import open_volume, page_name, read_page
from ipucnn.datasets.segmentation.masks import BINARY, TABLE, MaskClasses, codes, mask_values
from ipucnn.datasets.sources import imagefolder
from ipucnn.datasets.verification.findings import EVAL, TRAIN
from ipucnn.datasets.verification.samples import Measured, measure
from ipucnn.datasets.verification.survey import Survey
from ipucnn.errors import DataError
from ipucnn.filesystem import Kind, file_size, is_file, is_folder, kind_of
from ipucnn.machine import num_cores
from ipucnn.text import counted, printable


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


def walk_imagefolder(survey: Survey, folder: Path, validation_fraction: float) -> None:
    classes: Dict[str, int] = {}
    listed = {TRAIN: _ClassFolders(), EVAL: _ClassFolders()}
    places = {TRAIN: folder / "train", EVAL: imagefolder.find_eval(folder)}
    if imagefolder.is_undivided(folder):
        places = {}
        whole = _ClassFolders()
        _list_classes(survey, TRAIN, folder, classes, whole, is_undivided=True)
        for at, (class_folder, label) in enumerate(zip(whole.folders, whole.labels)):
            names = whole.names(at)
            chosen = imagefolder.held_out([str(class_folder / name) for name in names], validation_fraction)
            for subset, files in listed.items():
                own = [name for i, name in enumerate(names) if (i in chosen) == (subset == EVAL)]
                if own:
                    files.add(class_folder, label, own)
    for subset, place in places.items():
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
        wanted = (item for item in files if into.is_chosen(item[0]))
        # Which images are drawn is asked here: the counting goes on while the next ones are decoded.
        items = ((*item, survey.wants(position)) for position, item in enumerate(wanted, survey.num_done))
        for (number, label, path, _), look in in_order(
            lambda item: _look_at_file(item[2], item[3], survey.max_pixels), items
        ):
            name = files.name_of(number)
            try:
                looked = look()
            except DataError as error:
                survey.note_error(subset, name, error, path)
                survey.passed(subset)
                continue
            take_look(survey, subset, number, label, looked, name, path.suffix.lower())
    survey.odd_ones("mode", "odd-mode", usual=("grey", "colour").__contains__)


def _list_classes(
    survey: Survey,
    subset: str,
    place: Path,
    classes: Dict[str, int],
    files: _ClassFolders,
    is_undivided: bool = False,
) -> None:
    """Lists the class folders of a subset; those of the first one that is listed are the classes, of a folder that
    is divided here those with images."""
    is_first = not classes
    with survey.noting(subset, place.name, place):
        for entry in imagefolder.list_folder(place):
            path, name = Path(entry.path), f"{place.name}/{printable(entry.name)}"
            with survey.noting(subset, name, path):
                if not imagefolder.leads_to(entry, Kind.FOLDER):
                    survey.find("passed-over", subset, f"{name}: not in a class folder")
                    continue
                images = _list_images(survey, subset, path, name)
                if is_undivided and not images:
                    survey.find("passed-over", subset, f"{name}: a folder without images")
                elif is_first:
                    classes[entry.name] = len(classes)
                elif entry.name not in classes and images:
                    survey.find("unknown-class", subset, f"{name}: {counted(len(images), 'image')}")
                if images:
                    files.add(path, classes.get(entry.name, -1), images)


def _list_images(survey: Survey, subset: str, folder: Path, name: str) -> List[str]:
    """The names of the images in a class folder; what is no image is noted."""
    images = []
    for entry in imagefolder.list_folder(folder):
        shown_name = f"{name}/{printable(entry.name)}"
        is_image = entry.name.lower().endswith(imagefolder.EXTENSIONS)
        with survey.noting(subset, shown_name, Path(entry.path)):
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
    pixels: Optional[np.ndarray]


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
    check_png(data, origin)
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


LARGE_BYTES = 64 * 2**20
"""Files of more are read one at a time: each may take half of the memory that is free when it is opened."""
_large_files = threading.Lock()


def _look_at_file(path: Path, wants_pixels: bool, max_pixels: int) -> Look:
    with _large_files if file_size(path) > LARGE_BYTES else contextlib.nullcontext():
        return look_at(read_file(str(path)), f"image {path}", wants_pixels, max_pixels)


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


def take_look(
    survey: Survey,
    subset: str,
    number: int,
    label: int,
    looked: Look,
    name: str,
    ending: str = "",
    problems: Sequence[str] = (),
) -> None:
    """Hands a decoded image to the survey, with what is odd about its file beside the ``problems`` found already."""
    problems = list(problems)
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


# Walks over the sets for segmentation: ISBI 2012's volumes, and folders of images and masks.


def walk_isbi2012(survey: Survey, folder: Path) -> None:
    survey.class_names = isbi2012.CLASS_NAMES
    paths = {stem: isbi2012.find_volume(folder, stem) for stem in (isbi2012.IMAGES, isbi2012.LABELS)}
    for stem, path in paths.items():
        if path is None:
            survey.find("missing-file", None, f"{stem}.tif")
    label_path, image_path = paths[isbi2012.LABELS], paths[isbi2012.IMAGES]
    counts = {stem: _count_pages(survey, path) for stem, path in paths.items()}
    num_pages = counts[isbi2012.IMAGES] or counts[isbi2012.LABELS]
    first_eval = num_pages - (max(1, num_pages // isbi2012.SHARE_HELD_OUT) if num_pages else 0)

    def subset_of(page: int) -> str:
        return TRAIN if page < first_eval else EVAL

    masks: List[Tuple[Tuple[int, ...], Optional[np.ndarray]]] = []
    wrong_masks: Set[int] = set()
    if label_path is not None:
        # Of the labels a bit per pixel is kept; pages of both volumes at once could wait for each other's memory.
        masks = [_packed(mask) for mask in _pages(survey, label_path, subset_of, wrong_masks)]
    if image_path is None:
        return
    if masks and num_pages != len(masks):
        survey.find("count-mismatch", None, f"{image_path.name}: {num_pages} slices, {len(masks)} labels")
    survey.expect({TRAIN: first_eval, EVAL: num_pages - first_eval})
    survey.subsets[TRAIN].name_of = lambda number: f"{image_path.name}, page {number + 1}"
    survey.subsets[EVAL].name_of = lambda number: f"{image_path.name}, page {first_eval + number + 1}"
    for page, image in enumerate(_pages(survey, image_path, subset_of)):
        subset = subset_of(page)
        number = page if subset == TRAIN else page - first_eval
        if not survey.subsets[subset].is_chosen(number):
            continue
        size, bits = masks[page] if page < len(masks) else ((), None)
        if image is not None and page >= len(masks):
            survey.left_out()
            continue
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
        survey.add_mask(
            subset, number, image[..., np.newaxis], mask, _MASK_VALUES if page in wrong_masks else ()
        )
    survey.odd_ones("size of images", "wrong-shape")


def _count_pages(survey: Survey, path: Optional[Path]) -> int:
    """How many pages a volume has; none where it cannot be opened, which is noted when its pages are read."""
    if path is not None:
        with contextlib.suppress(DataError), open_volume(path, survey.max_pixels) as (_, count):
            return count
    return 0


def _packed(mask: Optional[np.ndarray]) -> Tuple[Tuple[int, ...], Optional[np.ndarray]]:
    return ((), None) if mask is None else (mask.shape, np.packbits(mask != 0))


def _pages(
    survey: Survey, path: Path, subset_of: Callable[[int], str], wrong_masks: Optional[Set[int]] = None
) -> Iterator[Optional[np.ndarray]]:
    """uint8 [h, w] of each page of a volume, None for one that cannot be read; what is wrong is noted.

    Of a volume of masks ``wrong_masks`` is given, and takes the pages with values that are no mask's.
    """
    other: Optional[int] = None
    with survey.noting(None, path.name, path), open_volume(path, survey.max_pixels) as (volume, count):
        for page in range(count):
            name, pixels = f"{path.name}, page {page + 1}", None
            try:
                pixels = read_page(volume, page, page_name(path, page, count), None, survey.max_pixels)
            except DataError as error:
                survey.note_error(subset_of(page), name, error, said=page_name(path, page, count))
            if pixels is not None and wrong_masks is None:
                survey.tally("size of images", _size(pixels.shape), subset_of(page), name)
            if pixels is not None and wrong_masks is not None:
                other, is_right = _check_mask(survey, subset_of(page), name, pixels, other)
                if not is_right:
                    wrong_masks.add(page)
            yield pixels


def _check_mask(
    survey: Survey, subset: str, name: str, mask: np.ndarray, other: Optional[int]
) -> Tuple[Optional[int], bool]:
    """Notes a mask of other values than 0 and ``other``; gives the value that later masks must have, and whether this
    one is right."""
    values = [value for value in mask_values(mask) if value]
    if other is None and len(values) == 1:
        other = values[0]
    is_right = not values or values == [other]
    if not is_right:
        several = len(values) > 1 or other is None
        text = ", ".join(map(str, values[:5])) + (", ..." if len(values) > 5 else "")
        survey.find(
            "mask-values", subset, f"{name}: {text}" + ("" if several else f" where others have {other}")
        )
    return other, is_right


def _size(shape: Iterable[int]) -> str:
    return "x".join(str(side) for side in shape) or "unreadable"


_MASK_VALUES = ("mask-values",)


def walk_imagemasks(survey: Survey, folder: Path) -> None:
    places = {TRAIN: folder / "train"} if is_folder(folder / "train") else {}
    evaluation = imagefolder.find_eval(folder)
    if evaluation is not None:
        places[EVAL] = evaluation
    # As in training pairs of the folder itself come first; a part of them counts where nothing else is here.
    whole = imagemasks.has_pairs(folder) or not any(
        is_folder(place / below) for place in places.values() for below in imagemasks.BELOW
    )
    if whole:
        places = {TRAIN: folder}
    pairs: Dict[str, List[Tuple[Path, Path]]] = {TRAIN: [], EVAL: []}
    for subset, place in places.items():
        pairs[subset] = _pairs(survey, subset, place)
    if whole and len(pairs[TRAIN]) > 1:
        held_out = max(1, len(pairs[TRAIN]) // isbi2012.SHARE_HELD_OUT)
        pairs = {TRAIN: pairs[TRAIN][:-held_out], EVAL: pairs[TRAIN][-held_out:]}
    survey.expect({subset: len(found) for subset, found in pairs.items()})
    classes = _mask_classes(survey, folder, [mask for found in pairs.values() for _, mask in found])
    survey.class_names = tuple(map(printable, classes.names))
    for _, first_mask in [pair for found in pairs.values() for pair in found][:1]:
        with contextlib.suppress(DataError):  # a mask that cannot be read is a finding of its own
            survey.class_colours = imagemasks.class_colours(classes, first_mask, survey.max_pixels)
    other: Optional[int] = None
    for subset, found in pairs.items():
        names = [_below(image, folder) for image, _ in found]
        survey.subsets[subset].name_of = names.__getitem__
        for number, (image_path, mask_path) in enumerate(found):
            if not survey.subsets[subset].is_chosen(number):
                continue
            image = mask = None
            is_right = True
            with survey.noting(subset, names[number], image_path):
                check_png(read_file(str(image_path)), f"image {image_path}")
                image = imagemasks.read_image(image_path, survey.max_pixels)
                survey.tally("size", _size(image.shape[:2]), subset, names[number])
                survey.tally("pixels", "grey" if image.ndim == 2 else "colour", subset, names[number])
            mask_name = _below(mask_path, folder)
            with survey.noting(subset, mask_name, mask_path):
                check_png(read_file(str(mask_path)), f"mask {mask_path}")
                mask = imagemasks.read_mask(mask_path, survey.max_pixels, classes.colours)
                if classes.any_other:
                    mask = codes(mask, False, f"mask {mask_path}")
                    other, is_right = _check_mask(survey, subset, mask_name, mask, other)
                mask = classes.of(mask, f"mask {mask_path}")
            if image is None or mask is None:
                survey.passed(subset)
            elif image.shape[:2] != mask.shape:
                survey.find(
                    "wrong-shape",
                    subset,
                    f"{names[number]}: {_size(image.shape[:2])}, its mask {_size(mask.shape)}",
                )
                survey.passed(subset)
            else:
                image = image[..., np.newaxis] if image.ndim == 2 else image
                survey.add_mask(subset, number, image, mask, () if is_right else _MASK_VALUES)
    survey.odd_ones("size", "wrong-shape")
    survey.odd_ones("pixels", "wrong-mode")


def _mask_classes(survey: Survey, folder: Path, paths: List[Path]) -> MaskClasses:
    """What the masks' values mean; where they do not belong together, two classes, of which each mask is judged."""

    def readable() -> Iterator[Tuple[Path, np.ndarray]]:
        for path in paths:
            with contextlib.suppress(DataError):  # noted when it is its turn
                yield path, imagemasks.read_mask(path, survey.max_pixels)

    if is_file(folder / TABLE):
        with survey.noting(None, TABLE, folder / TABLE):
            return imagemasks.find_classes(folder, ())
        return BINARY
    with contextlib.suppress(DataError):
        return imagemasks.find_classes(folder, readable())
    return BINARY


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
