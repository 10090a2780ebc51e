"""What ``evaluate`` and ``infer`` write of images: tables, and of a segmentation probability maps, masks and overlays.

Output files are checked before any work.  Results wait for them on disk, so that memory does not grow with the
number of images.
"""

import colorsys
import csv
import json
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from ipucnn import filesystem
from ipucnn.aliases import PlainDict
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.filesystem import (
    absolute,
    check_different,
    check_makeable,
    check_not_read,
    is_folder,
    is_written_to,
    make_folder,
    real,
    shown,
    write_atomically,
    write_output,
)
from ipucnn.runs.images.inputs import is_volume_name
from ipucnn.text import size_text

TIFF_BYTES = 2**32 - 2**24
"""A TIFF's offsets have 32 bits; what a header and its tables take is far below the difference."""
HALF = 0.5
"""The threshold with which the more probable of two classes is taken."""
Colour = Tuple[int, int, int]
OVERLAY_COLOUR: Colour = (213, 94, 0)
OVERLAY_SHARE = 0.6
CLASS_COLOURS = (
    *(OVERLAY_COLOUR, (0, 114, 178), (0, 158, 115), (204, 121, 167)),
    *((240, 228, 66), (86, 180, 233), (230, 159, 0)),
)
"""Of the classes 1, 2, ...: those that the colour-blind tell apart too (Okabe and Ito 2008); class 0 has none."""


class Spool:
    """A list of dictionaries in an anonymous temporary file, gone when the process ends, however it ends.

    Append first, then iterate, any number of times.
    """

    def __init__(self) -> None:
        # By lines: a full disk is told where a row is added, and not where the results are written.
        self._file = tempfile.TemporaryFile("w+", 1, encoding="utf-8")  # noqa: SIM115 - closed with this object
        self._length = 0

    def append(self, row: PlainDict) -> None:
        """Adds a JSON-able row."""
        self._file.write(json.dumps(row) + "\n")
        self._length += 1

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[PlainDict]:
        self._file.seek(0)
        for line in self._file:
            yield json.loads(line)


def check_output(
    path: Path, option: str, extensions: Sequence[str], inputs: Iterable[Tuple[str, Path]] = ()
) -> None:
    """Refuses a file that could not be written in the end, before any work.

    Args:
        path: the file to be.
        option: the flag, for messages.
        extensions: what its name may end in, without regard to case; a device, FIFO or stream needs no ending.
        inputs: (what it is, path) of what is read, and must not be replaced.

    Raises:
        ConfigurationError: another extension, or a file that is read.
        DataError: no folder, no permission, or a folder of that name.
    """
    if path.name in ("", ".", "..") or (path.suffix.lower() not in extensions and not is_written_to(path)):
        raise ConfigurationError(
            f"{option} {shown(path)}: the name must end in {', '.join(extensions)}",
            f"for example {option} {shown(path.stem or 'result')}{extensions[0]}",
        )
    filesystem.check_output(path)
    check_not_read(path, option, inputs)


def check_outputs(
    outputs: Iterable[Tuple[str, Optional[Path], Sequence[str]]], inputs: Iterable[Tuple[str, Path]]
) -> None:
    """:func:`check_output` of each (option, file, extensions) whose file is not None; no two may be one file.

    Raises:
        ConfigurationError, DataError: as that does; two are one file.
    """
    outputs, inputs = list(outputs), list(inputs)
    for option, path, extensions in outputs:
        if path is not None:
            check_output(path, option, extensions, inputs)
    check_different([(option, path) for option, path, _ in outputs])


def format_of(path: Path, extensions: Sequence[str]) -> str:
    """The ending, with its dot, whose format is written: the name's, or the first for ``/dev/stdout`` and the like."""
    suffix = path.suffix.lower()
    return suffix if suffix in extensions else extensions[0]


def write_csv(path: Path, columns: List[str], rows: Iterable[Sequence[object]]) -> None:
    """Writes a table, UTF-8, to what a path leads to.  Raises DataError where the file system refuses."""

    def write(temporary: Path) -> None:
        with open(temporary, "w", encoding="utf-8", newline="") as handle:
            writer = csv.writer(handle, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows(rows)

    write_output(path, write)


class PageSpool:
    """Pages of float32 in an anonymous temporary file, so that memory holds one at a time.

    Append all, then iterate, any number of times.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
        self._sizes: List[Tuple[int, int]] = []

    def append(self, page: np.ndarray) -> None:
        """Adds a page: float32 [h, w]."""
        self._file.write(np.ascontiguousarray(page, np.float32).data)
        self._file.flush()  # here a full disk is an error
        self._sizes.append(page.shape)

    def __iter__(self) -> Iterator[np.ndarray]:
        self._file.seek(0)
        for height, width in self._sizes:
            data = self._file.read(4 * height * width)
            yield np.frombuffer(data, np.float32).reshape(height, width)


class MaskFiles:
    """Where the results of one input go.

    Args:
        folder: made when the first file is written.
        stem: of the names.
        is_volume: TIFF, else PNG.
        num_classes: of two, class 1 has a probability map; of more each.
    """

    def __init__(
        self, folder: Path, stem: str, is_volume: bool, with_overlay: bool, num_classes: int = 2
    ) -> None:
        ending = ".tif" if is_volume else ".png"
        self.is_volume = is_volume
        kinds = ["probability"] if num_classes == 2 else [f"probability-{k}" for k in range(num_classes)]
        kinds += ["mask", "overlay"] if with_overlay else ["mask"]
        self.paths: Dict[str, Path] = {kind: folder / f"{stem}-{kind}{ending}" for kind in kinds}

    def write(
        self,
        probabilities: Sequence[PageSpool],
        pages: Callable[[], Iterator[np.ndarray]],
        shown_class: int,
        colours: Sequence[Colour],
        threshold: float = HALF,
    ) -> None:
        """Writes all of them, each whole or not at all.

        Args:
            probabilities: of class 1, or where there are more than two of each class.
            pages: the images, uint8 [h, w, c].
            shown_class: of two classes the one that overlays colour, 0 or 1.
            colours: of the classes, see :func:`class_colours`.
            threshold: see :func:`predicted_classes`.
        """

        def classes() -> Iterator[np.ndarray]:
            return (predicted_classes(page, threshold) for page in zip(*probabilities))

        is_binary = len(probabilities) == 1
        makers: Dict[str, Callable[[], Iterator[np.ndarray]]] = {
            f"probability-{k}": lambda spool=spool: map(_stored(self.is_volume), spool)  # type: ignore[misc]
            for k, spool in enumerate(probabilities)
        }
        makers["probability"] = makers["probability-0"]
        makers["mask"] = lambda: (255 * mask if is_binary else mask for mask in classes())
        makers["overlay"] = lambda: (
            overlay(image, mask == shown_class, colours[shown_class])
            if is_binary
            else class_overlay(image, mask, colours)
            for image, mask in zip(pages(), classes())
        )
        for kind, path in self.paths.items():
            make_folder(path.parent)
            write_atomically(path, partial(self._write_one, makers[kind]))

    def _write_one(self, make: Callable[[], Iterator[np.ndarray]], into: Path) -> None:
        write_pages(into, make(), self.is_volume)


def predicted_classes(probabilities: Sequence[np.ndarray], threshold: float = HALF) -> np.ndarray:
    """uint8 [h, w]: the class of each pixel.

    Args:
        probabilities: [h, w] of class 1, or where there are more than two classes of each.
        threshold: of two classes the probability above which a pixel is class 1; of more the most probable is taken.
    """
    if len(probabilities) == 1:
        return (probabilities[0] > threshold).astype(np.uint8)
    return np.argmax(np.stack(probabilities), axis=0).astype(np.uint8)


def _stored(is_volume: bool) -> Callable[[np.ndarray], np.ndarray]:
    """Probabilities as float32 in TIFF; in PNG, which has no floats, as uint16: 65535 is 1."""
    if is_volume:
        return lambda page: page
    return lambda page: np.round(page * 65535.0).astype(np.uint16)


def overlay(image: np.ndarray, tinted: np.ndarray, colour: Colour = OVERLAY_COLOUR) -> np.ndarray:
    """uint8 [h, w, 3]: a grey or colour image [h, w, c], in another colour where ``tinted``."""
    pixels = np.repeat(image, 3, axis=-1) if image.shape[-1] == 1 else image
    tint = (1 - OVERLAY_SHARE) * pixels + OVERLAY_SHARE * np.array(colour)
    return np.where(tinted[..., None], tint.round().astype(np.uint8), pixels)


def class_colours(num_classes: int, of_masks: Sequence[Colour] = ()) -> Tuple[Colour, ...]:
    """The colour of each class in pictures.

    Args:
        num_classes: of the network.
        of_masks: the colours of the user's masks (``DatasetInfo.class_colours``), which are kept; empty: class 0 is
            black, and the others have ``CLASS_COLOURS``.  Of two classes either can be tinted.
    """
    if len(of_masks) == num_classes:
        return tuple(of_masks)
    first = OVERLAY_COLOUR if num_classes == 2 else (0, 0, 0)
    return (first, *(_class_colour(number) for number in range(1, num_classes)))


def _class_colour(number: int) -> Colour:
    """Of class 1, 2, ...: after the first seven, hues that turn by the golden angle."""
    if number <= len(CLASS_COLOURS):
        return CLASS_COLOURS[number - 1]
    red, green, blue = colorsys.hsv_to_rgb(number * 0.381966 % 1.0, 0.75, 0.9)
    return round(255 * red), round(255 * green), round(255 * blue)


def mask_picture(mask: np.ndarray, colours: Sequence[Colour]) -> np.ndarray:
    """uint8 [h, w, 3] of classes [h, w]: of two classes black and white."""
    if len(colours) == 2:
        colours = ((0, 0, 0), (255, 255, 255))
    return np.array(colours, np.uint8)[np.minimum(mask, len(colours) - 1)]


def class_overlay(image: np.ndarray, mask: np.ndarray, colours: Sequence[Colour]) -> np.ndarray:
    """uint8 [h, w, 3]: a grey or colour image [h, w, c], each class but 0 in its colour."""
    pixels = np.repeat(image, 3, axis=-1) if image.shape[-1] == 1 else image
    tint = (1 - OVERLAY_SHARE) * pixels + OVERLAY_SHARE * mask_picture(mask, colours)
    return np.where((mask > 0)[..., None], tint.round().astype(np.uint8), pixels)


def write_pages(path: Path, pages: Iterable[np.ndarray], is_volume: bool) -> None:
    """Writes pages, uint8 [h, w] or [h, w, 3], uint16 or float32 [h, w], one by one into a TIFF; or one into a PNG."""
    from PIL import Image, TiffImagePlugin

    if not is_volume:
        (page,) = pages
        Image.fromarray(page).save(str(path), format="PNG")
        return
    with TiffImagePlugin.AppendingTiffWriter(str(path), new=True) as writer:
        for page in pages:
            # Deflate makes masks a hundred times smaller, and floats hardly.
            options = {} if page.dtype == np.float32 else {"compression": "tiff_adobe_deflate"}
            Image.fromarray(page).save(writer, format="TIFF", **options)
            writer.newFrame()


def check_pages(sizes: Sequence[Tuple[int, int]], name: str) -> None:
    """Refuses volumes whose probabilities are too many for a TIFF.

    Raises:
        DataError: they are.
    """
    num_bytes = 4 * sum(height * width for height, width in sizes)
    if num_bytes > TIFF_BYTES:
        raise DataError(
            f"image {name}: its probabilities would take {size_text(num_bytes)}, and a TIFF holds 4 GiB",
            "cut the volume into several",
        )


def check_folder(folder: Path) -> None:
    """Refuses an output folder that could not be written to, before any work.

    Raises:
        DataError: a file of that name, no folder to make it in, or no permission.
    """
    check_makeable(folder)
    above = absolute(folder).parent
    if not is_folder(above):
        raise DataError(
            f"--output {folder}: folder {above} does not exist", "make the folder, or choose another"
        )


def plan_files(
    paths: Sequence[str], folder: Path, with_overlay: bool, num_classes: int = 2
) -> List[MaskFiles]:
    """Where the results of image files go: below ``folder`` as the images lie below the folder they have in common.

    Of two files that differ in their ending alone both keep it in the results' names.

    Raises:
        ConfigurationError: a result would replace one of the images.
    """
    places = [os.path.abspath(path) for path in paths]
    base = os.path.commonpath([os.path.dirname(place) for place in places])
    stems = [os.path.splitext(os.path.relpath(place, base))[0] for place in places]
    files = []
    for place, stem in zip(places, stems):
        # Names that differ only in upper and lower case are one on some file systems.
        twins = sum(other.lower() == stem.lower() for other in stems)
        name = stem if twins == 1 else os.path.relpath(place, base)
        files.append(MaskFiles(folder, name, is_volume_name(place), with_overlay, num_classes))
    images = {os.path.realpath(place) for place in places}
    for one in files:
        for path in one.paths.values():
            if str(real(path)) in images:
                raise ConfigurationError(
                    f"--output {folder}: {path} is one of the images, and would be replaced",
                    "choose another folder",
                )
    return files
