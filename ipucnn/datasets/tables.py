"""Reads tables and lists beside images: their rows, and the images that their cells name."""

import copy
import csv
import io
import re
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Collection, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ipucnn.datasets.formats import part_named, same_name
from ipucnn.documents import BadDocument, NotJson, load_record
from ipucnn.errors import DataError
from ipucnn.filesystem import read_text, shown

TABLES = (".csv", ".tsv", ".txt", ".jsonl")
"""Endings of files that may be tables; a line of the last one is an object, as in Hugging Face's sets."""
SHARE = 0.9
"""The least share of a table's rows whose images must be there."""
PARTS = {"train": "train", "validation": "val", "test": "test"}
"""A part of a set -> the name of its folder."""
_MOST_BYTES = 2**26


def is_table(name: str) -> bool:
    """Returns whether a file may be a table by its name."""
    return name.lower().endswith(TABLES)


def part_in_name(stem: str) -> Tuple[str, str]:
    """Returns the word of a table's name that names a part, and the folder of this part: ``TrainImages``; or ""."""
    words = re.findall(r"[A-Z]?[^\W\d_A-Z]+|[A-Z]+", stem)
    return next(
        ((word, PARTS[named]) for word in words for named in [part_named(word)] if named in PARTS), ("", "")
    )


def part_of(path: Path) -> str:
    """Returns the part of a set, as its folder is called, that a word of one of a file's folders names; or ""."""
    return _part_of_folders(path.parts[:-1])


@lru_cache(maxsize=10_000)
def _part_of_folders(folders: Tuple[str, ...]) -> str:
    words = (word for name in folders for word in (name, *re.split(r"[\W_]+", name)))
    return next((PARTS[part] for part in map(part_named, words) if part in PARTS), "")


class Names:
    """The images below a folder, by the names that cells have for them.

    Args:
        images: the images, as paths below the folder.
        root: the name of the folder.
        folders: names of folders of the set, none of which may hold the image of a cell that names another one.
    """

    def __init__(self, images: Sequence[Path], root: str, folders: Collection[str] = ()) -> None:
        self.images, self._root, self._folders = images, same_name(root), {*map(same_name, folders)}
        self._images: Dict[str, List[Path]] = {}
        self._alike: Dict[str, List[Path]] = {}
        self._counts: Callable[[Path], bool] = lambda image: True
        for image in images:
            for key in {same_name(image.name), same_name(image.stem)}:
                self._images.setdefault(key, []).append(image)
            self._alike.setdefault(same_name(image.stem).casefold(), []).append(image)

    def only(self, counts: Callable[[Path], bool]) -> "Names":
        """Returns the names of those images alone for which a function returns True."""
        some = copy.copy(self)
        some._counts = lambda image: self._counts(image) and counts(image)
        return some

    def image(self, cell: str) -> Optional[Path]:
        """Returns the only image that a cell names, by its name or as much of its path as the cell has; or None.

        A cell that puts the image into another one of the folders names none.
        """
        images = self.all_called(cell)
        if len(images) != 1:
            return None
        inside = {self._root, *map(same_name, images[0].parent.parts)} if self._folders else set()
        return None if self._folders & {*_parts(cell)[:-1]} - inside else images[0]

    def all_called(self, cell: str) -> List[Path]:
        """Returns the images that a cell may name: several if it has too little of their paths."""
        parts = _parts(cell)
        images = self._images.get(parts[-1], []) if parts else []
        for count in range(2, len(parts) + 1):
            if len(images) < 2:
                break
            near = [
                image for image in images if [*map(same_name, image.parts[-count:-1])] == parts[-count:-1]
            ]
            images = near or images
        return list(filter(self._counts, images))

    def alike(self, cell: str) -> Optional[Path]:
        """Returns the only image whose name differs from a cell's in case or in the ending alone; or None."""
        name = (_parts(cell) or [""])[-1]
        # 1.5 is a number, and no name with an ending.
        stem = re.sub(r"\.[^\W\d]\w{1,4}\Z", "", name)
        keys = {one.casefold() for one in (name, stem)}
        images = {image for key in keys for image in self._alike.get(key, []) if self._counts(image)}
        return images.pop() if len(images) == 1 else None


def _parts(cell: str) -> List[str]:
    if "/" not in cell and "\\" not in cell:  # nearly all cells of a table, and faster
        return [same_name(cell)] if cell not in ("", ".") else []
    return [part for part in re.split(r"[/\\]", same_name(cell)) if part not in ("", ".")]


_SEPARATOR = re.compile(r'"?sep=([^\w"\s]|\t)"?\r?\n', re.IGNORECASE)
"""The first line of a table for Excel, which is no row of it."""


def read_rows(path: Path) -> List[List[str]]:
    """Returns the rows of a table with commas, semicolons or tabs, or else blanks, or with an object in each line.

    Raises:
        DataError: it is no text, or a line is no object.
        csv.Error: it is no table.
    """
    text = read_text(path, _MOST_BYTES)
    if path.suffix.lower() == ".jsonl":
        return _rows_of_objects(text, path)
    told = _SEPARATOR.match(text)
    text = text[told.end() :] if told else text
    first = text.partition("\n")[0]
    separator = told[1] if told else max(",;\t", key=first.count)
    if separator not in first:
        return [line.split() for line in text.splitlines() if line.strip()]
    cells = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    return [[cell.strip() for cell in row] for row in cells if any(row)]


def _rows_of_objects(text: str, path: Path) -> List[List[str]]:
    objects: List[Dict[str, Any]] = []
    for number, line in enumerate(text.split("\n"), 1):
        one: Any = None
        if line.strip():
            with suppress(NotJson, BadDocument):
                one = load_record(line)
            if not isinstance(one, dict):
                raise DataError(f"{shown(path)}, line {number}, is no object", "write an object in each line")
            objects.append(one)
    keys = [*dict.fromkeys(key for one in objects for key in one)]
    # Values with parts, such as boxes, are no class.
    plain = [{k: str(v) for k, v in one.items() if isinstance(v, (str, int, float))} for one in objects]
    return [keys, *([one.get(key, "") for key in keys] for one in plain)] if objects else []


class ListedImage(NamedTuple):
    """A row of a list: its image, None if it names no single one, and the other cells."""

    image: Optional[Path]
    others: List[str]


def listed_images(path: Path, names: Names) -> List[ListedImage]:
    """Returns the rows of a list of images, without a head; none if too few of them name an image each.

    A row is a name, which may have blanks, or has the name in its first cell.  Bare numbers before other cells are no
    names: any table has them.
    """
    with suppress(DataError, csv.Error):
        lines = [line.strip() for line in read_text(path, _MOST_BYTES).splitlines()]
        whole = [ListedImage(names.image(line), []) for line in lines if line]
        if _are_images(whole):
            return whole
        cells = read_rows(path)
        if (
            len({len(row) for row in cells}) != 1
            or len(cells[0]) < 2
            or all(row[0].isdigit() for row in cells[1:])
        ):
            return []
        found = [ListedImage(names.image(row[0]), row[1:]) for row in cells]
        found = found[1:] if found[0].image is None else found
        return found if _are_images(found) else []
    return []


def _are_images(found: Sequence[ListedImage]) -> bool:
    images = [one.image for one in found if one.image is not None]
    return len(images) >= max(SHARE * len(found), 1) and len({*images}) == len(images)
