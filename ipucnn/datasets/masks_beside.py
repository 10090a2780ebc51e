"""Finds masks among images by what is in them, where names do not say it: ``a.png`` of ``a.jpg``, ``GT_01/3.png``.

Files are masks of others if their names correspond, and if their pixels have few values while those of the others have
many.  Each alone says little: classes may be numbered alike, and drawings have few values.
"""

import os
import re
from typing import Dict, List, NamedTuple, Sequence, Set, Tuple

import numpy as np

from ipucnn.datasets.formats import pair_name

_NUM_OPENED = 3
"""Files of a group that are opened."""
_MOST_GROUPS = 2000
"""A set with more groups has as many classes, and no masks; each would be compared with many."""
_MOST_OPENED = 64
"""The most groups whose files are opened: the first ones that correspond to another."""
_LEAST = 3
"""The fewest files of which names can say something."""
_SHARE = 0.9
_MOST_PIXELS = 2**26
"""Larger images are not opened."""
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
    groups = _groups(paths)
    found: Dict[str, str] = {}
    if not 1 < len(groups) <= _MOST_GROUPS:
        return found
    shares: Dict[int, float] = {}
    for masks, images in _corresponding(groups):
        if {id(masks), id(images)} - set(shares) and len(shares) >= _MOST_OPENED:
            break
        for group in (masks, images):
            if id(group) not in shares:
                shares[id(group)] = _share_of_few_values(group)
        if shares[id(masks)] >= max(_FEW, shares[id(images)] + _GAP):
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
            others.update((id(other), other) for other in by_name[name][:_MOST_OPENED] if other is not group)
        for other in sorted(others.values(), key=lambda one: -_common_length(group.folder, one.folder)):
            shared = sum(name in other.files for name in names)
            least = 0 if group.folder.startswith(other.folder + os.sep) else len(other.files) / 2
            if shared >= max(_LEAST, _SHARE * len(names), least):
                pairs.append((group, other))
    return pairs


def _common_length(one: str, other: str) -> int:
    """Returns the number of characters with which both paths begin."""
    return next((k for k, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _share_of_few_values(group: _Group) -> float:
    """Returns the share of pixels with one of few values, the mean of some files; 0 if they cannot be read."""
    paths = [*group.files.values()]
    chosen = paths[:: max(1, len(paths) // _NUM_OPENED)][:_NUM_OPENED]
    try:
        return float(np.mean([*map(_share_of_few_values_in, chosen)]))
    except Exception:  # whoever decodes the file reports it
        return 0.0


def _share_of_few_values_in(path: str) -> float:
    """Returns 1 for an image of at most ``_MOST_VALUES`` values, else the share of pixels near the commonest three."""
    from PIL import Image

    with Image.open(path) as file:
        if file.width * file.height > _MOST_PIXELS:
            return 0.0
        is_colour = file.mode not in ("1", "L", "P", "I", "F", "I;16", "I;16B")
        pixels = np.asarray(file.convert("RGB") if is_colour else file)
    numbers = pixels.astype(np.int64) if pixels.ndim == 2 else pixels.astype(np.int64) @ (65536, 256, 1)
    if len(np.unique(numbers)) <= _MOST_VALUES:
        return 1.0
    if pixels.dtype != np.uint8:
        return 0.0
    grey = pixels if pixels.ndim == 2 else pixels.mean(axis=2).astype(np.uint8)
    counts, near = np.bincount(grey.ravel(), minlength=256), 0
    for _ in range(3):
        common = int(counts.argmax())
        window = slice(max(0, common - _NEAR), common + _NEAR + 1)
        near += int(counts[window].sum())
        counts[window] = 0
    return near / grey.size
