"""Finds masks among images by what is in them, where names do not say it: ``a.png`` of ``a.jpg``, ``GT_01/3.png``.

Files are masks of others if their names correspond, and if their pixels have few values while those of the others have
many.  Each alone says little: classes may be numbered alike, and drawings have few values.
"""

import io
import os
import re
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from ipucnn.datasets.base import read_file
from ipucnn.datasets.formats import MASK_WORD, pair_name, same_name, side_named

_NUM_OPENED = 3
"""Files of two groups that are opened."""
_MOST_FOLDERS = 200
"""A set with more folders has as many classes, and its names alone would take seconds to compare."""
_MOST_OPENED = 64
"""The most pairs of groups whose files are opened."""
_NUM_NEAREST = 4
"""The nearest groups with which one is compared: a thousand classes may be numbered alike."""
_LEAST = 3
"""The fewest files of which names can say something."""
_SHARE = 0.9
_MOST_PIXELS = 2**27
"""Larger images are not decoded."""
_LONGEST_SIDE = 1024
"""The most rows and columns that are looked at."""
_MOST_VALUES = 32
_NEAR = 4
"""Grey values around a common one that count as this value: JPEG changes those at edges."""
_FEW = 0.85
"""The least share of pixels that have one of three values in a mask that JPEG changed."""
_GAP = 0.1
"""How much larger this share is in masks than in their images."""


class _Group(NamedTuple):
    """Files of one folder and format, with one ending of their names.

    Attributes:
        folder: the folder.
        files: what a name has without the ending -> the file.
    """

    folder: str
    files: Dict[str, str]


def masks_by_content(paths: Sequence[str]) -> Dict[str, str]:
    """Returns the image of each file that is its mask, as its name and its pixels say; files that cannot be read aside.

    Args:
        paths: paths of image files.
    """
    found: Dict[str, str] = {}
    if len({os.path.dirname(path) for path in paths}) <= _MOST_FOLDERS:
        for masks, images in _corresponding(_groups(paths))[:_MOST_OPENED]:
            shared = [name for name in masks.files if name in images.files]
            if _are_masks([(masks.files[name], images.files[name]) for name in shared]):
                for name in shared:
                    found.setdefault(masks.files[name], images.files[name])
    return found


def _groups(paths: Sequence[str]) -> List[_Group]:
    """Returns the files by folder, format, and what follows the name of another file of the folder: ``-labelled``."""
    by_folder: Dict[str, List[str]] = {}
    for path in paths:
        by_folder.setdefault(os.path.dirname(path), []).append(path)
    groups: Dict[Tuple[str, str, str], Dict[str, str]] = {}
    for folder, files in by_folder.items():
        stems = {pair_name(os.path.basename(path)) for path in files}
        for path in files:
            stem = pair_name(os.path.basename(path))
            begin = _beginning(stem, stems)
            ending = os.path.splitext(path)[1].casefold()
            groups.setdefault((folder, ending, stem[len(begin) :]), {})[begin] = path
    return [
        _Group(folder, _without_common_ending(files))
        for (folder, _, _), files in groups.items()
        if len(files) >= _LEAST
    ]


def _without_common_ending(files: Dict[str, str]) -> Dict[str, str]:
    """Returns the files by their names without the sign and words that all of them end with: ``_leftImg8bit``."""
    ending = os.path.commonprefix([name[::-1] for name in files])[::-1]  # noqa: RUF071 - of names
    match = re.search(r"[_. (-]+(?!\d+\Z)[^/]*\Z", ending)
    end = len(match[0]) if match else 0
    return {name[: len(name) - end]: path for name, path in files.items()} if end else files


def _beginning(stem: str, stems: Set[str]) -> str:
    """Returns the longest name of another file with which a name begins, up to a sign and a word; else the name."""
    for sign in reversed([*re.finditer(r"[_. (-]+(?!\d+\Z)", stem)]):
        if sign.start() and stem[: sign.start()] in stems:
            return stem[: sign.start()]
    return stem


def _corresponding(groups: Sequence[_Group]) -> List[Tuple[_Group, _Group]]:
    """Returns the pairs of groups of which nearly all files of the first, and half of the second, have equal names.

    A folder in the other one may have masks of a few of its images.  The nearest in the tree of folders come first.
    """
    by_name: Dict[str, List[_Group]] = {}
    for group in groups:
        for name in group.files:
            by_name.setdefault(name, []).append(group)
    pairs = []
    for group in groups:
        names = [*group.files]
        others: Dict[int, _Group] = {}
        for name in names[:: max(1, len(names) // _NUM_OPENED)][:_NUM_OPENED]:
            others.update((id(other), other) for other in by_name[name] if other is not group)
        nearest = sorted(others.values(), key=lambda one: -_common_length(group.folder, one.folder))
        for other in nearest[:_NUM_NEAREST]:
            shared = sum(name in other.files for name in names)
            least = 0 if Path(other.folder) in Path(group.folder).parents else len(other.files) / 2
            if shared >= max(_LEAST, _SHARE * len(names), least) and _may_be_masks(group, other):
                pairs.append((group, other))
    return pairs


def _may_be_masks(group: _Group, images: _Group) -> bool:
    """Returns whether files may be masks of others by their folders: the same, or one called like masks.

    Numbered classes in two folders, such as night/1.jpg and day/1.jpg, correspond, and dark ones have few values.
    """
    begin = _common_length(group.folder, images.folder)
    begin = group.folder.rfind(os.sep, 0, begin) + 1
    rest = same_name(group.folder[begin:]).casefold().split(os.sep)
    if any(part.startswith("class-") for part in rest):
        return False
    is_called_so = any(MASK_WORD.search(part) or side_named(part) == "masks" for part in rest)
    return group.folder == images.folder or is_called_so


def _common_length(one: str, other: str) -> int:
    """Returns the number of characters with which both paths begin."""
    return len(os.path.commonprefix([one, other]))  # noqa: RUF071 - of characters


class _Look(NamedTuple):
    """What the pixels of a file say.

    Attributes:
        size: width and height.
        share: share of the pixels near one of the three commonest values; 1 if there are at most ``_MOST_VALUES``.
        has_shapes: whether there are several such values, and little between them: shapes on a ground.  A dark
            photograph has one common value, and many others.  None if all pixels have one value.
    """

    size: Tuple[int, int]
    share: float
    has_shapes: Optional[bool]


def _are_masks(pairs: Sequence[Tuple[str, str]]) -> bool:
    """Returns whether the first file of some pairs looks like a mask of the second; not all masks may be empty."""
    try:
        looks = [
            (_look(mask), _look(image))
            for mask, image in pairs[:: max(1, len(pairs) // _NUM_OPENED)][:_NUM_OPENED]
        ]
    except Exception:  # whoever decodes the file reports it
        return False
    shapes = {mask.has_shapes for mask, _ in looks}
    share, other = (float(np.mean([look.share for look in side])) for side in zip(*looks))
    is_alike = all(mask.size == image.size for mask, image in looks)
    return is_alike and True in shapes and False not in shapes and share >= max(_FEW, other + _GAP)


def _look(path: str) -> _Look:
    """Returns what the pixels of a file look like.  A FIFO is refused, because reading it may never end."""
    from PIL import Image

    with Image.open(io.BytesIO(read_file(path))) as file:
        size = file.size
        if size[0] * size[1] > _MOST_PIXELS:
            return _Look(size, 0.0, False)
        is_colour = file.mode not in ("1", "L", "P", "I", "F", "I;16", "I;16B")
        step = 1 + max(size) // _LONGEST_SIDE
        pixels = np.asarray(file.convert("RGB") if is_colour else file)[::step, ::step]
    numbers = pixels.astype(np.int64) if pixels.ndim == 2 else pixels.astype(np.int64) @ (65536, 256, 1)
    num_values = len(np.unique(numbers[::7, ::7]))  # of a photograph, which has many, this tells enough
    num_values = num_values if num_values > _MOST_VALUES else len(np.unique(numbers))
    if num_values <= _MOST_VALUES:
        return _Look(size, 1.0, True if num_values > 1 else None)
    if pixels.dtype != np.uint8:
        return _Look(size, 0.0, False)
    grey = pixels if pixels.ndim == 2 else pixels.mean(axis=2).astype(np.uint8)
    counts, near = np.bincount(grey.ravel(), minlength=256), []
    for _ in range(3):
        common = int(counts.argmax())
        window = slice(max(0, common - _NEAR), common + _NEAR + 1)
        near.append(int(counts[window].sum()))
        counts[window] = 0
    return _Look(size, sum(near) / grey.size, near[1] + near[2] >= grey.size - sum(near))
