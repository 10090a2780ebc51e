"""A walk over class folders, and how encoded images are looked at, several at a time."""

import contextlib
import struct
import zlib
from bisect import bisect_right
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, NamedTuple, Tuple, TypeVar

import numpy as np

from ipucnn.datasets.base import read_file
from ipucnn.datasets.images import open_image, opened
from ipucnn.datasets.sources import imagefolder
from ipucnn.datasets.verification.findings import EVAL, TRAIN
from ipucnn.datasets.verification.samples import Measured, measure
from ipucnn.datasets.verification.survey import Survey
from ipucnn.errors import DataError
from ipucnn.filesystem import Kind, is_folder, kind_of
from ipucnn.machine import num_cores
from ipucnn.text import printable


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


def walk_imagefolder(survey: Survey, folder: Path) -> None:
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
                survey.note_error(subset, name, error, path)
                survey.passed(subset)
                continue
            take_look(survey, subset, number, label, looked, name, path.suffix.lower())
    survey.odd_ones("mode", "odd-mode", usual=("grey", "colour").__contains__)


def _list_classes(
    survey: Survey, subset: str, place: Path, classes: Dict[str, int], files: _ClassFolders
) -> None:
    """Lists the class folders of a subset; those of the first one that is listed are the classes."""
    is_first = not classes
    with survey.noting(subset, place.name, place):
        for entry in imagefolder.list_folder(place):
            path, name = Path(entry.path), f"{place.name}/{printable(entry.name)}"
            with survey.noting(subset, name, path):
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
            raise DataError(f"{origin}: the checksum of its chunk {name} is wrong", "get the file again")
        if kind == b"IEND":
            return
        at += 12 + length
    raise DataError(f"{origin} is truncated: it has no end", "get the file again")


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
