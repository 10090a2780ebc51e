"""Finds masks among images by what is in them, where names do not say it: ``a.png`` of ``a.jpg``, ``GT_01/3.png``.

Files are masks of others if their names correspond, and if their pixels have few values while those of the others have
many.  Each alone says little: classes may be numbered alike, and drawings have few values.
"""

import os
import re
from typing import Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from ipucnn.datasets.formats import MASK_WORD, pair_name, same_name, side_named

_NUM_OPENED = 3
"""Files of a group that are opened."""
_MOST_FOLDERS = 200
"""A set with more folders has as many classes, and its names alone would take seconds to compare."""
_MOST_OPENED = 64
"""The most groups whose files are opened: the first ones that correspond to another."""
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
    if len({os.path.dirname(path) for path in paths}) > _MOST_FOLDERS:
        return found
    groups = _groups(paths)
    looks: Dict[int, _Look] = {}
    for masks, images in _corresponding(groups):
        if {id(masks), id(images)} - set(looks) and len(looks) >= _MOST_OPENED:
            break
        for group in (masks, images):
            if id(group) not in looks:
                looks[id(group)] = _look(group)
        mask, image = looks[id(masks)], looks[id(images)]
        if mask.is_mask and mask.share >= image.share + _GAP and _have_one_size(masks, images):
            for name, path in masks.files.items():
                if name in images.files:
                    found.setdefault(path, images.files[name])
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
            least = 0 if group.folder.startswith(other.folder + os.sep) else len(other.files) / 2
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
    return next((k for k, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _have_one_size(masks: _Group, images: _Group) -> bool:
    """Returns whether some masks are as large as their images; a logo or a thumbnail is not."""
    from PIL import Image

    names = [name for name in masks.files if name in images.files]
    for name in names[:: max(1, len(names) // _NUM_OPENED)][:_NUM_OPENED]:
        with Image.open(masks.files[name]) as mask, Image.open(images.files[name]) as image:
            if mask.size != image.size:
                return False
    return True


class _Look(NamedTuple):
    """What pixels say of a file, or of a group of files.

    Attributes:
        share: share of the pixels near one of the three commonest values; 1 if there are at most ``_MOST_VALUES``.
        is_mask: whether there are several such values, and little between them: shapes on a ground.  A dark photograph
            has one common value, and many others.
    """

    share: float
    is_mask: bool


def _look(group: _Group) -> _Look:
    """Returns what some files of a group look like; masks may be empty, but not all of them."""
    paths = [*group.files.values()]
    try:
        looks = [*map(_look_of_file, paths[:: max(1, len(paths) // _NUM_OPENED)][:_NUM_OPENED])]
    except Exception:  # whoever decodes the file reports it
        return _Look(0.0, False)
    told = [look for look in looks if look is not None]
    share = float(np.mean([look.share for look in told])) if told else 1.0
    return _Look(share, bool(told) and all(look.is_mask for look in told) and share >= _FEW)


def _look_of_file(path: str) -> Optional[_Look]:
    """Returns what the pixels of a file look like; None if all have one value."""
    from PIL import Image

    with Image.open(path) as file:
        if file.width * file.height > _MOST_PIXELS:
            return _Look(0.0, False)
        is_colour = file.mode not in ("1", "L", "P", "I", "F", "I;16", "I;16B")
        step = 1 + max(file.size) // _LONGEST_SIDE
        pixels = np.asarray(file.convert("RGB") if is_colour else file)[::step, ::step]
    numbers = pixels.astype(np.int64) if pixels.ndim == 2 else pixels.astype(np.int64) @ (65536, 256, 1)
    num_values = len(np.unique(numbers))
    if num_values <= _MOST_VALUES:
        return _Look(1.0, True) if num_values > 1 else None
    if pixels.dtype != np.uint8:
        return _Look(0.0, False)
    grey = pixels if pixels.ndim == 2 else pixels.mean(axis=2).astype(np.uint8)
    counts, near = np.bincount(grey.ravel(), minlength=256), []
    for _ in range(3):
        common = int(counts.argmax())
        window = slice(max(0, common - _NEAR), common + _NEAR + 1)
        near.append(int(counts[window].sum()))
        counts[window] = 0
    return _Look(sum(near) / grey.size, near[1] + near[2] >= grey.size - sum(near))
