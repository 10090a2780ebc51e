"""Inputs of ``infer``: image files, folders, patterns, or the images of a data set.

A classification network takes single images (:class:`ImageInput`), and a few at a time are decoded.  A segmentation
network takes grey or colour images and volumes of many pages (:class:`PageSource`), one page at a time.
"""

import fnmatch
import glob
import itertools
import os
import re
from collections import deque
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from typing import (
    Callable,
    Deque,
    Dict,
    Iterable,
    Iterator,
    List,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
)

import numpy as np

from ipucnn import filesystem
from ipucnn.datasets import images as image_files
from ipucnn.datasets.base import IN_MEMORY, DatasetInfo, Examples, FileExamples, read_file
from ipucnn.datasets.formats import (
    EXTENSIONS,
    is_image_name,
    is_made_by_system,
    mask_folders,
    masks_among,
    num_images,
)
from ipucnn.datasets.forms import IMAGE_HINT, opened, page_of, plain_pixels, remarks_on_page
from ipucnn.datasets.limits import MAX_IMAGE_PIXELS
from ipucnn.datasets.masks_beside import masks_by_content
from ipucnn.datasets.problems import MOST_NAMED
from ipucnn.errors import DataError, UserError
from ipucnn.filesystem import Kind, shown
from ipucnn.runs.images.stacks import NO_STACK, Stack, read_stack
from ipucnn.text import counted, exact, printable

SUBSETS = ("eval", "train")
POLL_S = 0.2
VOLUME_ENDINGS = (".tif", ".tiff")
Decoded = Union[np.ndarray, DataError]
"""An image's pixels, or the reason why it cannot be read."""


@dataclass(frozen=True)
class ImageInput:
    """An image that is not decoded yet.

    Attributes:
        name: the path of a file, its name in the data set, or the position there.
        read: function that decodes it to uint8 [h, w, channels], or raises DataError.
        truth: its class, if known.
    """

    name: str
    read: Callable[[], np.ndarray]
    truth: Optional[int] = None


@dataclass(frozen=True)
class ImageFiles:
    """The image files that inputs name.

    Attributes:
        paths: in the order of the inputs; a file that several inputs name appears once.
        problems: a line for each input that names no image.
        left_out: a line about the images in folders that are no images of the user's; empty if there are none.
    """

    paths: Tuple[str, ...]
    problems: Tuple[str, ...]
    left_out: Tuple[str, ...]


def find_images(inputs: Sequence[str]) -> ImageFiles:
    """Finds the image files that inputs name.

    Folders are searched as folders of a data set are: what is hidden, or made by systems and tools, is left out, as are
    masks beside their images.  Links to folders are followed as those of classes are: directly in the folder, if they
    lead out of it and not above it.

    Args:
        inputs: files (accepted with any name), folders (searched recursively for the extensions of images), or patterns
            with ``*``, ``?``, ``[...]`` and ``**``.
    """
    paths: List[str] = []
    problems: List[str] = []
    left_out: LeftOut = {}
    for given in inputs:
        try:
            expanded = str(filesystem.expand(given))
            kind = filesystem.kind_of(Path(expanded))
        except UserError as error:
            problems.append(error.message)
            continue
        if kind is Kind.FOLDER:
            images = _in_folder(expanded, problems, left_out)
        elif kind is not Kind.ABSENT:
            images = [expanded]
        elif glob.has_magic(expanded):
            images = _matching(expanded, problems, left_out)
        else:
            problems.append(f"image {shown(given)} does not exist")
            continue
        if not images:
            problems.append(f"{shown(given)} names no image ({', '.join(EXTENSIONS)})")
        paths += images
    unique: Dict[str, str] = {}
    for path in paths:
        place = os.path.normpath(Path(path).absolute())
        if place not in unique:
            unique[place] = path
        else:
            left_out[path] = (*_AGAIN, left_out.get(path, ("", "", 0))[2] + 1)
    return ImageFiles(tuple(unique.values()), tuple(problems), _left_out_line(left_out))


LeftOut = Dict[str, Tuple[str, str, int]]
"""What is left out: path -> (the word for one, more words, their number)."""
_SYSTEM = "image", " hidden, or made by a system or tool"
_MASK = "mask", " beside their images"
_LINK = "link", " to folders"
_AGAIN = "path", " named again"
_OTHER = "file", " with no image's name"


def _left_out_line(left_out: LeftOut) -> Tuple[str, ...]:
    """Returns a line that counts what is left out, and names the first paths; none if nothing is."""
    if not left_out:
        return ()
    numbers = {
        kind: sum(n for *one, n in left_out.values() if (*one,) == kind)
        for kind in (_SYSTEM, _MASK, _LINK, _AGAIN, _OTHER)
    }
    parts = [counted(number, kind[0]) + kind[1] for kind, number in numbers.items() if number]
    # Files without an image's name come last: there may be one beside each image.
    paths = sorted(left_out, key=lambda path: left_out[path][:2] == _OTHER)
    named = ", ".join(shown(path) for path in paths[:MOST_NAMED])
    more = f" and {len(left_out) - MOST_NAMED:,} more" if len(left_out) > MOST_NAMED else ""
    return (f"left out: {'; '.join(parts)} ({named}{more})",)


def _in_folder(folder: str, problems: List[str], left_out: LeftOut) -> List[str]:
    def unreadable(error: OSError) -> None:
        problems.append(f"cannot read {printable(str(error.filename))}: {error.strerror or error}")

    images = []
    for place, folders, files in _walk(folder, unreadable):
        for name in folders:
            path = Path(place, name)
            number = num_images(path) if is_made_by_system(name) and not path.is_symlink() else 0
            if number:
                left_out[str(path)] = (*_SYSTEM, number)
            elif path.is_symlink() and not (place == folder and _leads_out(path)):
                left_out[str(path)] = (*_LINK, 1)
        folders[:] = [name for name in folders if not is_made_by_system(name)]
        for path in mask_folders([Path(place, name) for name in folders]):
            folders.remove(path.name)
            left_out[str(path)] = (*_MASK, num_images(path))
        named = list(filter(is_image_name, files))
        others = sorted(name for name in files if not is_image_name(name) and not is_made_by_system(name))
        left_out.update((os.path.join(place, name), (*_OTHER, 1)) for name in others)
        masks = masks_among([name for name in named if not is_made_by_system(name)])
        for name in named:
            path_of = os.path.join(place, name)
            if is_made_by_system(name):
                left_out[path_of] = (*_SYSTEM, 1)
            elif name in masks:
                left_out[path_of] = (*_MASK, 1)
            else:
                images.append(path_of)
    images.sort()
    by_looks = masks_by_content(images)
    left_out.update((path, (*_MASK, 1)) for path in sorted(by_looks))
    return [path for path in images if path not in by_looks]


def _walk(folder: str, unreadable: Callable[[OSError], None]) -> Iterator[Tuple[str, List[str], List[str]]]:
    """Yields what ``os.walk`` does, also of the links to folders directly in the folder that lead out of it."""
    links: List[str] = []
    for place, folders, files in os.walk(folder, onerror=unreadable):
        yield place, folders, files
        if place == folder:
            links = [
                path for path in (os.path.join(folder, name) for name in folders) if _leads_out(Path(path))
            ]
    for link in links:
        yield from os.walk(link, onerror=unreadable)


def _leads_out(path: Path) -> bool:
    """Whether a path is a link to a folder that is neither below the folder that has the link nor above it."""
    if not path.is_symlink():
        return False
    here, there = path.parent.resolve(), path.resolve()
    return there != here and there not in here.parents and here not in there.parents


def _matching(pattern: str, problems: List[str], left_out: LeftOut) -> List[str]:
    """Returns the images that a pattern names, and all images below folders that it names, as with a shell's expansion.

    ``**`` follows no links to folders, unlike ``glob.glob``: with two links that lead back up, it would visit 2^40
    folders. Names that are hidden, or of systems and tools, match only if the pattern spells them.
    """
    # Within a name, two stars are one; ``Path.glob`` refuses them.
    parts = (part if part == "**" else re.sub(r"\*+", "*", part) for part in Path(pattern).parts)
    pattern_path = Path(*parts)
    spelled = [part for part in pattern_path.parts if is_made_by_system(part)]
    paths: Set[str] = set()
    for match in Path(pattern_path.anchor).glob(str(pattern_path.relative_to(pattern_path.anchor))):
        of_system = (part for part in match.parts if is_made_by_system(part))
        if any(not any(fnmatch.fnmatch(part, spelling) for spelling in spelled) for part in of_system):
            continue
        if os.path.isdir(match):
            paths.update(_in_folder(str(match), problems, left_out))
        elif is_image_name(match.name):
            paths.add(str(match))
    return sorted(paths)


def images_of_files(
    paths: Sequence[str],
    info: DatasetInfo,
    input_shape: Tuple[int, int, int],
    remarks: List[str],
) -> Iterator[ImageInput]:
    """Yields image files, decoded as in evaluation; for ``remarks`` see :func:`pixels_for_evaluation`."""
    for path in paths:
        read = _reader(partial(read_file, path), path, info, input_shape, remarks)
        yield ImageInput(exact(path), read)


def images_of_subset(
    examples: Examples,
    info: DatasetInfo,
    subset: str,
    input_shape: Tuple[int, int, int],
    remarks: List[str],
) -> Iterator[ImageInput]:
    """Yields the samples of a data set in stored order, with their classes."""
    for i in range(len(examples)):
        truth = int(examples.labels[i])
        if isinstance(examples, IN_MEMORY):
            name = f"{info.name}/{subset}/{i}"
            read = _reader(partial(examples.images.__getitem__, i), name, info, input_shape, remarks)
            yield ImageInput(name, read, truth)
        else:
            path = name = f"{info.name}/{subset}/{i}"
            if isinstance(examples, FileExamples):
                path, name = examples.paths[i], examples.name(i)
            read = _reader(partial(examples.encoded, i), path, info, input_shape, remarks)
            yield ImageInput(exact(name), read, truth)


def _reader(
    load: Callable[[], Union[bytes, np.ndarray]],
    name: str,
    info: DatasetInfo,
    input_shape: Tuple[int, int, int],
    remarks: List[str],
) -> Callable[[], np.ndarray]:
    origin = f"image {printable(name)}"
    return lambda: image_files.pixels_for_evaluation(load(), origin, info, input_shape, remarks)


def decoded(
    inputs: Iterable[ImageInput], num_parallel: int, ahead: int
) -> Iterator[Tuple[ImageInput, Decoded]]:
    """Yields each input with its pixels, or with its error, in order.

    Args:
        inputs: images; taken from the iterator only when they are decoded.
        num_parallel: threads.
        ahead: the most images to decode ahead of the caller; bounds the memory.
    """
    waiting: Deque[Tuple[ImageInput, AsyncResult[Union[np.ndarray, BaseException]]]] = deque()
    remaining = iter(inputs)
    # No ThreadPoolExecutor: the interpreter waits for its threads, but an interrupt must not wait for a disk.
    with ThreadPool(max(1, num_parallel)) as pool:
        while True:
            for image in itertools.islice(remaining, max(1, ahead) - len(waiting)):
                waiting.append((image, pool.apply_async(_pixels_or_error, (image,))))
            if not waiting:
                return
            first, result = waiting.popleft()
            # Waits in short intervals: a signal just before an endless wait would go unnoticed.
            while not result.ready():
                result.wait(POLL_S)
            pixels = result.get()
            if isinstance(pixels, BaseException) and not isinstance(pixels, DataError):
                raise pixels
            yield first, pixels


def _pixels_or_error(image: ImageInput) -> Union[np.ndarray, BaseException]:
    try:
        return np.asarray(image.read())
    except BaseException as error:  # the pool's thread would end with some of them, and never give a result
        return error


@dataclass(frozen=True)
class PageSource:
    """An image of one page, or a volume; every page has been decoded once without an error.

    Attributes:
        name: the path, or the position in the data set; valid UTF-8, but perhaps with control characters.
        is_volume: whether the results are volumes, too.
        sizes: (height, width) of each page.
        pages: function that decodes the pages one by one: uint8 [h, w, channels].
        stack: pixel size and axes, which results keep.
        orientation: value of the orientation tag of the first page, which was applied; 1 if there was nothing to turn.
        remarks: what is to be said about its pages; see :func:`ipucnn.datasets.forms.remarks_on_page`.
        page_names: the names of the files of a data set that are its pages; empty for a file.
    """

    name: str
    is_volume: bool
    sizes: Tuple[Tuple[int, int], ...]
    pages: Callable[[], Iterator[np.ndarray]]
    orientation: int = 1
    stack: Stack = NO_STACK
    remarks: Tuple[str, ...] = ()
    page_names: Tuple[str, ...] = ()


def is_volume_name(path: str) -> bool:
    """Whether a file may have many pages, and so has TIFF results."""
    return path.lower().endswith(VOLUME_ENDINGS)


def array_pages(name: str, images: Sequence[np.ndarray], names: Sequence[str] = ()) -> PageSource:
    """Returns the images of a set in memory, uint8 [h, w, c] each, as a volume; ``names`` are their files, if any."""
    sizes = tuple(image.shape[:2] for image in images)
    return PageSource(name, True, sizes, lambda: iter(images), page_names=tuple(map(exact, names)))


def file_pages(path: str, channels: int, max_pixels: int = MAX_IMAGE_PIXELS) -> PageSource:
    """Reads a file of one or, for TIFF, many pages.

    Args:
        path: an image file.
        channels: channels of the network's input: 1 takes grey pages, 3 colour ones.  Neither is converted to the
            other; pages of more than 8 bits are stretched one by one, as for training.
        max_pixels: the most pixels that a page may have.

    Raises:
        DataError: no image, a page that is damaged or of another kind, or many pages in a file that is no TIFF.
    """
    data = read_file(path)
    with opened(data, f"image {printable(path)}", max_pixels, IMAGE_HINT) as file:
        orientation = file.form.orientation
    remarks: List[str] = []
    sizes = tuple(page.shape[:2] for page in _pages(data, path, channels, max_pixels, remarks))
    # The file is read a second time for segmentation: a folder of volumes may be larger than memory.
    pages = partial(_read_again, path, channels, max_pixels, sizes)
    is_volume = is_volume_name(path)
    stack = read_stack(data, len(sizes)) if is_volume else NO_STACK
    return PageSource(exact(path), is_volume, sizes, pages, orientation, stack, (*remarks, *stack.remarks))


def _read_again(
    path: str, channels: int, max_pixels: int, sizes: Sequence[Tuple[int, int]]
) -> Iterator[np.ndarray]:
    same = 0
    for page, size in zip(_pages(read_file(path), path, channels, max_pixels, []), sizes):
        if page.shape[:2] != size:
            break
        same += 1
        yield page
    if same < len(sizes):
        raise DataError(
            f"image {printable(path)} was changed while it was segmented", "run the command again"
        )


def _pages(
    data: bytes, path: str, channels: int, max_pixels: int, remarks: List[str]
) -> Iterator[np.ndarray]:
    """Yields uint8 [h, w, channels] of each page of a file, and adds what is to be said about it to ``remarks``."""
    origin = f"image {printable(path)}"
    with opened(data, origin, max_pixels, IMAGE_HINT, strict=True) as file:
        count = file.num_pages
        if count > 1 and not (file.form.format == "TIFF" and is_volume_name(path)):
            ending = Path(path).suffix or "no ending"
            raise DataError(
                f"{origin} has {counted(count, 'page')}, and its name says it is one picture ({ending})",
                "give volumes as TIFF, named .tif or .tiff",
            )
        for number in range(count):
            where = origin if count == 1 else f"{origin}, page {number + 1} of {count},"
            page = page_of(file, number, where)
            pixels = plain_pixels(page, where)
            remarks += remarks_on_page(page)
            is_grey = pixels.ndim == 2
            if is_grey != (channels == 1):
                kinds = ("grey", "colour (RGB)") if is_grey else ("colour (RGB)", "grey")
                raise DataError(
                    f"{where} is {kinds[0]}; the network takes {kinds[1]}", f"save it as {kinds[1]}"
                )
            yield pixels[..., np.newaxis] if is_grey else pixels
