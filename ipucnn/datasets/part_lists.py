"""Lists of the images of each part beside the images: those of Food-101, CUB-200, MIT Indoor and Pascal VOC."""

import csv
from contextlib import suppress
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from ipucnn.datasets.tables import ListedImage, Names, listed_images, part_in_name, read_rows
from ipucnn.errors import DataError


class Listed(NamedTuple):
    """A division of images into parts.

    Attributes:
        lists: the files that have it, as paths below the folder.
        parts: image -> the folder of its part.
        num_others: the number of rows that name no single image.
        has_other_classes: whether the lists have classes, and these are not the folders of the images.
    """

    lists: List[Path]
    parts: Dict[Path, str]
    num_others: int
    has_other_classes: bool = False


_List = Tuple[Path, List[ListedImage]]


def listed_parts(folder: Path, images: Sequence[Path], tables: Sequence[Path]) -> Optional[Listed]:
    """Returns the only division that lists have, or the only one of exactly these images; None without one.

    Args:
        folder: the folder.
        images, tables: images, and files that may be lists, as paths below it.
    """
    names = Names(images, folder.name, {image.parent.name for image in images})
    found = [*_by_part(folder, tables, names), *_by_number(folder, tables, names)]
    found = [one for one in found if {*one.parts} == {*images}] or found
    return found[0] if found and all(one.parts == found[0].parts for one in found) else None


def _by_part(folder: Path, tables: Sequence[Path], names: Names) -> Iterator[Listed]:
    """Yields the divisions of lists whose names differ in the word of the part alone."""
    groups: Dict[Tuple[Path, str], Dict[str, List[_List]]] = {}
    for path in sorted(tables, key=lambda one: (len(one.name), one)):
        word, part = part_in_name(path.stem)
        listed = listed_images(folder / path, names) if word else []
        if listed:
            group = groups.setdefault((path.parent, path.stem.replace(word, "", 1)), {})
            group.setdefault(part, []).append((path, listed))
    for group in groups.values():
        lists = {part: of_part[0] for part, of_part in group.items()}
        images = {part: _images(listed) for part, (_, listed) in lists.items()}
        parts = {image: part for part, of_part in images.items() for image in of_part}
        # trainval.txt has the images of train.txt and more.
        is_one_each = all(
            {*images[part]} <= {*_images(listed)} for part, of_part in group.items() for _, listed in of_part
        )
        if {"train"} < {*group} and is_one_each and len(parts) == sum(map(len, images.values())):
            every = [one for _, listed in lists.values() for one in listed]
            paths = [path for path, _ in lists.values()]
            yield Listed(paths, parts, len(every) - len(parts), _has_other_classes(every))


def _by_number(folder: Path, tables: Sequence[Path], names: Names) -> Iterator[Listed]:
    """Yields CUB-200's form: numbers and images in one table, the numbers and a 1 for training in another one."""
    numbered: Dict[Path, Dict[str, Optional[Path]]] = {}
    divided: Dict[Path, Dict[str, str]] = {}
    for path in tables:
        word, _ = part_in_name(path.stem)
        cells: List[List[str]] = []
        if word or path.stem == "images":
            with suppress(DataError, csv.Error):
                cells = read_rows(folder / path)
        if not cells or {len(row) for row in cells} != {2}:
            continue
        if not word:
            numbered[path] = {number: names.image(name) for number, name in cells}
        elif {row[1] for row in cells} == {"0", "1"}:
            divided[path] = {row[0]: row[1] for row in cells}
    for path, image_of in numbered.items():
        for other, values in divided.items():
            if {*image_of} == {*values}:
                parts = {
                    image: "train" if values[number] == "1" else "test"
                    for number, image in image_of.items()
                    if image is not None
                }
                yield Listed([path, other], parts, len(image_of) - len(parts))


def _images(listed: Sequence[ListedImage]) -> List[Path]:
    return [one.image for one in listed if one.image is not None]


def _has_other_classes(listed: Sequence[ListedImage]) -> bool:
    """Returns whether further cells have few values, as classes have, and none has one for each folder."""
    named = [(one.image.parent, one.others) for one in listed if one.image is not None]
    folders = {folder for folder, _ in named}
    differ = False
    for column in range(min((len(others) for _, others in named), default=0)):
        pairs = {(folder, others[column]) for folder, others in named}
        values = {value for _, value in pairs}
        if not 1 < len(values) <= len(named) // 2:
            continue
        are_names = {value.casefold() for value in values} == {folder.name.casefold() for folder in folders}
        if are_names and any(value.casefold() != folder.name.casefold() for folder, value in pairs):
            return True
        if len(pairs) == len(values) == len(folders):
            return False
        differ = True
    return differ
