"""Files that ``evaluate`` and ``infer`` write: tables, and the probability maps, masks and overlays of a segmentation.

Output files are checked before any work begins.  Results are stored on disk until they are written, so that memory does
not grow with the number of images.
"""

import colorsys
import csv
import json
import os
import tempfile
import weakref
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from ipucnn.aliases import PillowImage, PlainDict
from ipucnn.datasets.segmentation.masks import SHOWN_FIRST
from ipucnn.errors import DataError
from ipucnn.filesystem import (
    make_folder,
    write_atomically,
    write_output,
)
from ipucnn.runs.images.inputs import is_volume_name
from ipucnn.runs.images.stacks import NO_STACK, Stack
from ipucnn.runs.overwriting import SOFTWARE, check_images_kept
from ipucnn.text import size_text

TIFF_BYTES = 2**32 - 2**24
"""A TIFF's offsets have 32 bits; the headers and tables need far less than the difference."""
HALF = 0.5
"""The threshold that chooses the more probable of two classes."""
Colour = Tuple[int, int, int]
OVERLAY_COLOUR: Colour = (213, 94, 0)
OVERLAY_SHARE = 0.6
CLASS_COLOURS = (
    *(OVERLAY_COLOUR, (0, 114, 178), (0, 158, 115), (204, 121, 167)),
    *((240, 228, 66), (86, 180, 233), (230, 159, 0)),
)
"""Colours of the classes 1, 2, ..., also for colour-blind people (Okabe and Ito 2008); class 0 has none."""
IGNORED_COLOUR: Colour = (128, 128, 128)


class Spool:
    """A list of dictionaries in an anonymous temporary file, which is deleted when the process ends for any reason.

    Append first, then iterate, any number of times.
    """

    def __init__(self) -> None:
        # Buffered by lines: a full disk raises an error in append, not when the results are written.
        self._file = tempfile.TemporaryFile("w+", 1, encoding="utf-8")  # noqa: SIM115 - closed with this object
        weakref.finalize(self, self._file.close)
        self._length = 0

    def append(self, row: PlainDict) -> None:
        """Adds a row that JSON can store."""
        self._file.write(json.dumps(row) + "\n")
        self._length += 1

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[PlainDict]:
        self._file.seek(0)
        for line in self._file:
            yield json.loads(line)


PLOTS = (".png", ".pdf", ".svg")
"""Endings of pictures that matplotlib draws."""


def format_of(path: Path, extensions: Sequence[str]) -> str:
    """Returns the extension to write, with its dot: the name's, or the first for ``/dev/stdout`` and the like."""
    suffix = path.suffix.lower()
    return suffix if suffix in extensions else extensions[0]


def write_csv(path: Path, columns: List[str], rows: Iterable[Sequence[object]]) -> None:
    """Writes a table in UTF-8 to a file, device or stream.

    Raises:
        DataError: the file system refuses it.
    """

    def write(temporary: Path) -> None:
        with open(temporary, "w", encoding="utf-8", newline="") as handle:
            writer = csv.writer(handle, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows(rows)

    write_output(path, write)


@dataclass(frozen=True)
class MaskForm:
    """The form in which masks are written: that of the training masks.

    Attributes:
        values: value of each class.  Without values and colours, two classes are 0 and 255, and more have their
            numbers.
        colours: the palette's colour of each class; without ``values``, masks are images of these colours.
    """

    values: Tuple[int, ...] = ()
    colours: Tuple[Colour, ...] = ()

    def stored(self, mask: np.ndarray, num_classes: int) -> np.ndarray:
        """Returns the pixels to write, uint8 or uint16 [h, w] or uint8 [h, w, 3], of classes [h, w]."""
        if self.colours and not self.values:
            return np.array(self.colours, np.uint8)[mask]
        values = self.values or ((0, 255) if num_classes == 2 else tuple(range(num_classes)))
        return np.array(values, np.uint8 if max(values) < 256 else np.uint16)[mask]

    @property
    def palette(self) -> Optional[List[int]]:
        """Red, green and blue of the values 0 to 255 if masks have a palette."""
        if not self.colours or not self.values:
            return None
        palette = [0] * 768
        for value, colour in zip(self.values, self.colours):
            palette[3 * value : 3 * value + 3] = colour
        return palette


@dataclass(frozen=True)
class Classes:
    """The classes of a segmentation, as reports and pictures show them.

    Attributes:
        names: printable names of all classes.
        colours: colours of all classes.
        form: the form in which masks are written.
    """

    names: Tuple[str, ...]
    colours: Tuple[Colour, ...]
    form: "MaskForm" = field(default_factory=lambda: MaskForm())

    @property
    def is_binary(self) -> bool:
        """Whether there are two classes, of which one is shown and counted."""
        return len(self.names) == 2

    @property
    def shown(self) -> int:
        """The one of two classes that is shown and counted: ``SHOWN_FIRST`` if it is the first, else the second."""
        return 0 if self.names[0] == SHOWN_FIRST else 1

    @property
    def legend(self) -> Tuple[Tuple[Colour, str], ...]:
        """The colours of an overlay with the names of their classes."""
        pairs = tuple(zip(self.colours, self.names))
        return (pairs[self.shown],) if self.is_binary else pairs[1:]


def class_colours(num_classes: int, of_masks: Sequence[Colour] = ()) -> Tuple[Colour, ...]:
    """Returns the colour of each class in pictures.

    Args:
        num_classes: classes of the network.
        of_masks: colours of the user's masks (``DatasetInfo.class_colours``), which are kept.  Without them, class 0 is
            black and the others have ``CLASS_COLOURS``; of two classes, class 0 has a colour too, because either can be
            tinted.
    """
    if len(of_masks) == num_classes:
        return tuple(of_masks)
    first = OVERLAY_COLOUR if num_classes == 2 else (0, 0, 0)
    return (first, *(_class_colour(number) for number in range(1, num_classes)))


def _class_colour(number: int) -> Colour:
    """Returns the colour of class 1, 2, ...; after the first seven, the hues advance by the golden angle."""
    if number <= len(CLASS_COLOURS):
        return CLASS_COLOURS[number - 1]
    red, green, blue = colorsys.hsv_to_rgb(number * 0.381966 % 1.0, 0.75, 0.9)
    return round(255 * red), round(255 * green), round(255 * blue)


def mask_picture(mask: np.ndarray, colours: Sequence[Colour]) -> np.ndarray:
    """Returns uint8 [h, w, 3] of classes [h, w]; two classes are black and white, ignored pixels are grey."""
    return _coloured(mask, ((0, 0, 0), (255, 255, 255)) if len(colours) == 2 else colours)


def _coloured(mask: np.ndarray, colours: Sequence[Colour]) -> np.ndarray:
    # The colour of IGNORED, -1, is the last.
    return np.array([*colours, IGNORED_COLOUR], np.uint8)[np.minimum(mask, len(colours) - 1)]


def overlay(image: np.ndarray, mask: np.ndarray, colours: Sequence[Colour], shown: int = 1) -> np.ndarray:
    """Returns uint8 [h, w, 3]: a grey or colour image tinted by its mask.

    Args:
        image: uint8 [h, w, 1 or 3].
        mask: classes [h, w].
        colours: colours of the classes; every class except 0 is tinted with its colour.
        shown: the one of two classes that is tinted.
    """
    pixels = np.repeat(image, 3, axis=-1) if image.shape[-1] == 1 else image
    tint = (1 - OVERLAY_SHARE) * pixels + OVERLAY_SHARE * _coloured(mask, colours)
    is_tinted = (np.minimum(mask, 1) == shown) if len(colours) == 2 else mask > 0
    return np.where(is_tinted[..., None], tint.round().astype(np.uint8), pixels)


def predicted_classes(probabilities: Sequence[np.ndarray], threshold: float = HALF) -> np.ndarray:
    """Returns uint8 [h, w]: the class of each pixel.

    Args:
        probabilities: [h, w] of class 1; for more than two classes, one of each.
        threshold: for two classes the probability above which a pixel is class 1; for more, the most probable class
            wins.
    """
    if len(probabilities) == 1:
        return (probabilities[0] > threshold).astype(np.uint8)
    return np.argmax(np.stack(probabilities), axis=0).astype(np.uint8)


class PageSpool:
    """Pages of float32 in an anonymous temporary file, so that memory holds one at a time.

    Append all, then iterate, any number of times.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
        weakref.finalize(self, self._file.close)
        self._sizes: List[Tuple[int, int]] = []

    def append(self, page: np.ndarray) -> None:
        """Adds a page: float32 [h, w]."""
        self._file.write(np.ascontiguousarray(page, np.float32).data)
        self._file.flush()  # raises the error of a full disk
        self._sizes.append(page.shape)

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[np.ndarray]:
        self._file.seek(0)
        for height, width in self._sizes:
            data = self._file.read(4 * height * width)
            yield np.frombuffer(data, np.float32).reshape(height, width)


class MaskFiles:
    """The output files of one input.

    Args:
        folder: folder of the files, created with the first one.
        stem: beginning of the names.
        is_volume: TIFF if true, else PNG.
        with_overlay: whether there is an overlay.
        num_classes: for two classes, only class 1 has a probability map; for more, each class.
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
        images: Callable[[], Iterator[np.ndarray]],
        classes: Classes,
        threshold: float = HALF,
        stack: Stack = NO_STACK,
    ) -> None:
        """Writes all files, each completely or not at all.

        Args:
            probabilities: probabilities of class 1; for more than two classes, of each class.
            images: function that yields the pages, uint8 [h, w, c].
            classes: names and colours of the classes.
            threshold: see :func:`predicted_classes`.
            stack: pixel size and axes of the input.
        """
        num_pages = len(probabilities[0])
        for number, (kind, path) in enumerate(self.paths.items()):
            masks = (predicted_classes(page, threshold) for page in zip(*probabilities))
            pages: Iterable[np.ndarray]
            if kind == "mask":
                pages = (classes.form.stored(mask, len(classes.names)) for mask in masks)
            elif kind == "overlay":
                pages = (
                    overlay(image, mask, classes.colours, classes.shown)
                    for image, mask in zip(images(), masks)
                )
            else:
                # TIFF stores float32.  PNG has no floats: uint16, in which 65535 stands for 1.
                spool = probabilities[number]
                pages = (
                    spool
                    if self.is_volume
                    else (np.round(page * 65535.0).astype(np.uint16) for page in spool)
                )
            make_folder(path.parent)
            palette = classes.form.palette if kind == "mask" else None
            write = partial(write_pages, pages=pages, is_volume=self.is_volume, palette=palette)
            write_atomically(path, partial(write, stack=stack, num_pages=num_pages))


def write_pages(
    path: Path,
    pages: Iterable[np.ndarray],
    is_volume: bool,
    palette: Optional[List[int]] = None,
    stack: Stack = NO_STACK,
    num_pages: int = 1,
) -> None:
    """Writes pages one by one into a TIFF, or a single page into a PNG.

    Args:
        pages: uint8 [h, w] or [h, w, 3], uint16 or float32 [h, w].
        is_volume: TIFF if true, else PNG.
        palette: red, green and blue of the values 0 to 255 of a mask.
        stack: pixel size and axes of a TIFF.
        num_pages: number of pages of a TIFF.
    """
    from PIL import Image, TiffImagePlugin

    def picture(page: np.ndarray) -> PillowImage:
        image = Image.fromarray(page)
        if palette is not None:
            image.putpalette(palette)
        return image

    if not is_volume:
        (page,) = pages
        picture(page).save(str(path), format="PNG", **png_options())
        return
    with TiffImagePlugin.AppendingTiffWriter(str(path), new=True) as writer:
        for number, page in enumerate(pages):
            # Deflate makes masks a hundred times smaller, but floats hardly smaller.
            options = {} if page.dtype == np.float32 else {"compression": "tiff_adobe_deflate"}
            options.update(stack.tags(num_pages, not number), software=SOFTWARE)
            picture(page).save(writer, format="TIFF", **options)
            writer.newFrame()


def png_options() -> Dict[str, Any]:
    """Returns Pillow's options that store ``SOFTWARE`` in a PNG."""
    from PIL.PngImagePlugin import PngInfo

    text = PngInfo()
    text.add_text("Software", SOFTWARE)
    return {"pnginfo": text}


def check_pages(sizes: Sequence[Tuple[int, int]], name: str) -> None:
    """Refuses volumes whose probabilities exceed the size of a TIFF.

    Raises:
        DataError: the volume is too large.
    """
    num_bytes = 4 * sum(height * width for height, width in sizes)
    if num_bytes > TIFF_BYTES:
        raise DataError(
            f"image {name}: its probabilities would take {size_text(num_bytes)}, and a TIFF holds 4 GiB",
            "cut the volume into several",
        )


def plan_files(
    paths: Sequence[str], folder: Path, with_overlay: bool, num_classes: int = 2
) -> List[MaskFiles]:
    """Returns the output files of image files.

    Their folders below ``folder`` are those of the images below the images' common folder.  Two files that differ only
    in their extension keep it in the names of their results.

    Raises:
        ConfigurationError: a result would replace one of the images.
    """
    places = [os.path.abspath(path) for path in paths]
    base = os.path.commonpath([os.path.dirname(place) for place in places])
    stems = [os.path.splitext(os.path.relpath(place, base))[0] for place in places]
    files = []
    for place, stem in zip(places, stems):
        # Some file systems ignore case.
        twins = sum(other.lower() == stem.lower() for other in stems)
        name = stem if twins == 1 else os.path.relpath(place, base)
        files.append(MaskFiles(folder, name, is_volume_name(place), with_overlay, num_classes))
    check_images_kept(folder, [path for file in files for path in file.paths.values()], paths)
    return files
