"""Copies files of other layouts into one that is read: images whose classes a table has, and scattered pairs.

A folder with such a layout is refused, because several things could be meant, and :func:`sorting_hint` gives the
command that makes a set of it: ``python -m ipucnn.datasets.sorting classes TABLE COLUMN TARGET FOLDER`` or ``... masks
KIND TARGET FOLDER``, or, for class folders without masks, ``... images TARGET FOLDER``.  The command copies; the files
stay where they are.
"""

import csv
import io
import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ipucnn.datasets.formats import is_image_name, is_made_by_system, part_named, side_named
from ipucnn.datasets.masks_beside import masks_by_content
from ipucnn.errors import ConfigurationError, DataError, UserError
from ipucnn.filesystem import expand, read_text, real, shown, write_folder
from ipucnn.text import counted, printable, quoted

_COMMAND = "python -m ipucnn.datasets.sorting"
_MOST_TABLE_BYTES = 2**26
_MOST_FILES = 500_000
_LONGEST_NAME = 200
_MOST_TABLES = 50
"""The most tables that are read: detection sets have one beside each image."""
_ONE_HOT = "one-hot"
"""In place of a column: the columns with a 1 for the class of each image, and 0 for all others."""
_LOOKS = "by-looks"
"""In place of a kind of masks: files of the name of an image with few values."""
_SHARE = 0.9
"""The least share of a table's rows whose images must be there."""
_HOT = ("1", "1.0")
_LABELS = [
    "label",
    "labels",
    "class",
    "classname",
    "category",
    "target",
    "dx",
    "diagnosis",
    "species",
    "breed",
]
_LABELS += ["grade", "level", "type", "severity", "classid", "labelid"]
"""Names of columns of classes."""
_PARTS = {"train": "train", "validation": "val", "test": "test"}


class _Files(NamedTuple):
    """The files below a folder: images and tables, as paths relative to it, in the order of their names."""

    images: List[Path]
    tables: List[Path]


def _files_of(folder: Path) -> _Files:
    """Returns the files below a folder; links to folders are not followed.

    Raises:
        DataError: there are too many.
    """
    images: List[Path] = []
    tables: List[Path] = []
    for place, folders, names in os.walk(folder):
        below = Path(place).relative_to(folder)
        folders[:] = sorted(name for name in folders if not is_made_by_system(name))
        for name in sorted(names):
            if is_made_by_system(name):
                continue
            if is_image_name(name):
                images.append(below / name)
            elif name.lower().endswith((".csv", ".tsv", ".txt")):
                tables.append(below / name)
        if len(images) + len(tables) > _MOST_FILES:
            raise DataError(
                f"{shown(folder)} has more than {_MOST_FILES:,} files", "sort them with a program of your own"
            )
    return _Files(images, tables)


def _part_of(path: Path) -> str:
    """Returns the part of a set, as its folder is called, that a word of one of a file's folders names; or ""."""
    words = (word for name in path.parts[:-1] for word in (name, *re.split(r"[\W_]+", name)))
    return next((_PARTS[part] for part in map(part_named, words) if part in _PARTS), "")


# -- classes in a table ---------------------------------------------------------------------------------------


class _Table(NamedTuple):
    """A table with a row for each image.

    Attributes:
        path: the file, below the folder.
        header: the names of its columns.
        columns: those that may have the class, the likeliest first; or ``_ONE_HOT`` alone.
        rows: image below the folder -> its row.
        num_others: the number of rows without an image.
    """

    path: Path
    header: List[str]
    columns: List[str]
    rows: Dict[Path, List[str]]
    num_others: int

    def classes(self, column: str) -> Dict[Path, str]:
        """Returns the class of each image that has one, by a column."""
        if column == _ONE_HOT:
            return {
                image: next(name for name, value in zip(self.header, row) if value in _HOT)
                for image, row in self.rows.items()
            }
        k = self.header.index(column)
        return {image: row[k] for image, row in self.rows.items() if row[k]}


def _rows(path: Path) -> List[List[str]]:
    """Returns the rows of a table with commas, semicolons or tabs; the first has the names of the columns.

    There are none if a row has another number of cells: a comma without quotes moves the cells behind it.
    """
    text = read_text(path, _MOST_TABLE_BYTES)
    separator = max(",;\t", key=text.partition("\n")[0].count)
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    cells = [[cell.strip() for cell in row] for row in rows if any(row)]
    return cells if len({len(row) for row in cells}) == 1 and len(cells[0]) > 1 else []


_ByName = Dict[str, List[Path]]
"""The name of a file, with and without its ending -> the images that are called so."""


def _by_name(images: Sequence[Path]) -> _ByName:
    names: _ByName = {}
    for image in images:
        for key in {image.name, image.stem}:
            names.setdefault(key, []).append(image)
    return names


def _image_named(cell: str, names: _ByName) -> Optional[Path]:
    """Returns the only image that a cell names, by its name or as much of its path as the cell has; or None."""
    parts = [part for part in re.split(r"[/\\]", cell) if part not in ("", ".")]
    images = names.get(parts[-1], []) if parts else []
    for count in range(2, len(parts) + 1):
        if len(images) < 2:
            break
        near = [image for image in images if list(image.parts[-count:-1]) == parts[-count:-1]]
        images = near or images
    return images[0] if len(images) == 1 else None


def _table(folder: Path, path: Path, names: _ByName) -> Optional[_Table]:
    """Returns what a table says of images; None if it has no column with their names, or none with classes.

    Of several columns that could name the images, one with whole names of files counts; the others are numbers.
    """
    rows: List[List[str]] = []
    with suppress(DataError, csv.Error):
        rows = _rows(folder / path)
    if len(rows) < 3:
        return None
    header, body = rows[0], rows[1:]
    fitting: List[Tuple[bool, int, List[Optional[Path]]]] = []
    for column in range(len(header)):
        found = [_image_named(row[column], names) for row in body]
        count = sum(image is not None for image in found)
        if count >= _SHARE * len(body) and len({image for image in found if image is not None}) == count:
            whole = all(image is None or row[column].endswith(image.name) for image, row in zip(found, body))
            fitting.append((whole, column, found))
    fitting = [one for one in fitting if one[0]] or fitting
    if not fitting or any(one[2] != fitting[0][2] for one in fitting):
        return None
    _, column, found = fitting[0]
    read = {image: row for image, row in zip(found, body) if image is not None}
    columns = _label_columns(header, [*read.values()], column)
    return _Table(path, header, columns, read, len(body) - len(read)) if columns else None


def _label_columns(header: Sequence[str], rows: Sequence[Sequence[str]], names: int) -> List[str]:
    """Returns the columns that may have the classes, the likeliest first: few values, each a name of a folder.

    There are none if a column that is called like labels cannot have them, or if none of several is called so: which
    one is meant is not known.
    """
    if len(set(header)) < len(header):
        return []
    others = [k for k in range(len(header)) if k != names and header[k]]
    hot = [k for k in others if {row[k] for row in rows} <= {*_HOT, "0", "0.0"}]
    if len(hot) > 1 and all(sum(float(row[k]) for k in hot) == 1 for row in rows):
        return [_ONE_HOT]
    labels: List[str] = []
    fitting: List[str] = []
    for k in others:
        values, is_label = {row[k] for row in rows} - {""}, _is_called_label(header[k])
        if not is_label and k in hot and len(hot) > 1:
            continue  # an image may have several of them
        most = len(rows) - 1 if is_label else max(2, len(rows) // 2)
        if 1 < len(values) <= most and all(map(_is_folder_name, values)):
            (labels if is_label else fitting).append(header[k])
        elif is_label:
            return []
    return [*labels, *fitting] if labels or len(fitting) == 1 else []


def _is_called_label(name: str) -> bool:
    return re.sub(r"[\W_]", "", name.casefold()) in _LABELS


def _is_folder_name(text: str) -> bool:
    """Returns whether a class may be called so: not as a part of a set, a side of pairs, or a folder of a system."""
    is_taken = part_named(text) is not None or side_named(text) is not None or is_made_by_system(text)
    return not is_taken and "/" not in text and text.isprintable() and len(os.fsencode(text)) <= _LONGEST_NAME


def _classes_hint(folder: Path, files: _Files) -> str:
    names = _by_name(files.images)
    paths = [path for path in files.tables if "submission" not in path.name.casefold()]  # has no true classes
    read = (_table(folder, path, names) for path in paths[:_MOST_TABLES])
    tables = sorted((table for table in read if table is not None), key=lambda one: -len(one.rows))
    if not tables:
        return ""
    by_part: Dict[str, _Table] = {}
    for table in tables:
        parts = {_part_of(image) for image in table.rows}
        by_part.setdefault(parts.pop() if len(parts) == 1 else "", table)
    if "train" in by_part:
        by_part.pop("", None)
    else:
        by_part = {"": tables[0]}
    target, commands = _new_folder(folder, "classes"), []
    for part, table in by_part.items():
        place = target / part if len(by_part) > 1 else target
        commands.append(
            f"{_COMMAND} classes {quoted(folder / table.path)} {quoted(table.columns[0])} {quoted(place)} "
            f"{quoted(folder)}"
        )
    table = next(iter(by_part.values()))
    column, *others = table.columns
    by = "columns with a 1 for its class" if column == _ONE_HOT else f"column {printable(column)}"
    more = f" (or {', '.join(map(printable, others[:3]))} in its place)" if others else ""
    alone = len(files.images) - len(
        {image for one in by_part.values() for image in one.classes(one.columns[0])}
    )
    rest = f", without {counted(alone, 'image')} of which no class is known" if alone else ""
    missing = sum(one.num_others for one in by_part.values())
    rest += f"; {counted(missing, 'row')} {'names' if missing == 1 else 'name'} no image" if missing else ""
    return (
        f"{shown(folder / table.path)} has a row for each image; copy them into class folders by its {by}{more}{rest}: "
        f"{' && '.join(commands)}; then pass --dataset {quoted(target)}"
    )


def copies_of_classes(table: Path, column: str, folder: Path) -> Dict[Path, Path]:
    """Returns where each image goes: image below ``folder`` -> place below the new folder.

    Raises:
        DataError: the table cannot be read, or has no row for an image.
        ConfigurationError: it has no such column.
    """
    names = _by_name(_files_of(folder).images)
    found = _table(folder, Path(os.path.relpath(table, folder)), names)
    if found is None:
        raise DataError(
            f"{shown(table)} has no row with the class of each image in {shown(folder)}",
            "give a table with the name of a file and its class in each row",
        )
    if column not in found.columns:
        raise ConfigurationError(
            f"{shown(table)} has no column {printable(column)} with classes",
            f"take one of {', '.join(map(printable, found.columns))}",
        )
    return {image: Path(label, "_".join(image.parts)) for image, label in found.classes(column).items()}


# -- scattered pairs ------------------------------------------------------------------------------------------

_WORD = re.compile(r"manual\d|[^\W\d_]+|\d+")
_OBSERVER = re.compile(r"(\d)(?:st|nd|rd)[\W_]*(?:ho|manual)", re.IGNORECASE)
"""The first and the second observer's masks: 1st_manual in DRIVE, 1stHO in CHASE-DB1."""
_MASK_WORDS = re.compile(
    r"masks?|labels?|label(train)?ids|instanceids|color|gt(fine|coarse)?|groundtruth|truth|segs?|segmentations?"
    r"|annotations?|annots?|manual\d?|trimaps?"
)
_Key = Tuple[str, ...]


_Side = Dict[Tuple[str, _Key], Path]
"""Images, or masks of one kind: (part, words of its path that tell files apart) -> file below the folder."""


def _words(path: Path) -> List[str]:
    text = " ".join((*path.parts[:-1], path.stem)).replace("leftImg8bit", "")
    return _WORD.findall(_OBSERVER.sub(r" manual\1 ", text).casefold())


def _is_of_images(word: str) -> bool:
    """Returns whether a word says nothing but that a file is an image, or of which part."""
    return part_named(word) in _PARTS or side_named(word) == "images"


def _sides(images: Sequence[Path]) -> Dict[_Key, List[_Side]]:
    """Returns the words of masks in paths -> the files with them, by each way to tell them apart; () for the images."""
    rows: Dict[_Key, List[Tuple[str, _Key, Path]]] = {}
    for path in images:
        words = _words(path)
        kind = tuple(sorted({word.rstrip("s") for word in words if _MASK_WORDS.fullmatch(word)}))
        rest = tuple(word for word in words if not _MASK_WORDS.fullmatch(word) and not _is_of_images(word))
        rows.setdefault(kind, []).append((_part_of(path), rest, path))
    return {kind: [_side(files, False), _side(files, True)] for kind, files in rows.items()}


def _side(rows: Sequence[Tuple[str, _Key, Path]], leaves_out_common: bool) -> _Side:
    """Returns files by their words; without those that all of their part begin and end with, if those are left out."""
    side: _Side = {}
    for part in {part for part, _, _ in rows}:
        keys, paths = (
            [key for one, key, _ in rows if one == part],
            [path for one, _, path in rows if one == part],
        )
        if leaves_out_common and len(keys) > 1:
            begin = len(os.path.commonprefix(keys))  # noqa: RUF071 - of words
            end = len(os.path.commonprefix([key[begin:][::-1] for key in keys]))  # noqa: RUF071
            keys = [key[begin : len(key) - end] for key in keys]
        if len(set(keys)) < len(keys):
            return {}  # this way does not tell the files apart
        side.update(zip(((part, key) for key in keys), paths))
    return side


def _pairs(images: _Side, masks: _Side) -> Dict[Path, Path]:
    """Returns image -> mask if all masks, and half of the images of their parts, have a partner.

    A mask without one may be the second mask of an image, which would be lost.
    """
    shared = [key for key in masks if key in images]
    parts = {part for part, _ in masks}
    count = sum(part in parts for part, _ in images)
    is_whole = len(shared) > 1 and len(shared) >= max(len(masks), count / 2)
    return {images[key]: masks[key] for key in shared} if is_whole else {}


def _masks_by_looks(folder: Path, files: Sequence[Path]) -> Dict[Path, Path]:
    """Returns the image of each file that looks like its mask, as paths below the folder."""
    found = masks_by_content([str(folder / path) for path in files])
    return {Path(mask).relative_to(folder): Path(image).relative_to(folder) for mask, image in found.items()}


def _kinds(folder: Path, files: Sequence[Path]) -> Dict[str, Dict[Path, Path]]:
    """Returns the pairs with each kind of masks that is complete, by the words that tell this kind from the others.

    If words tell none, masks are the files that look like masks; the kind is ``_LOOKS``.
    """
    sides = _sides(files)
    images = sides.pop((), [])
    found = {
        kind: max((_pairs(image, mask) for image in images for mask in masks), key=len, default={})
        for kind, masks in sides.items()
    }
    found = {kind: pairs for kind, pairs in found.items() if pairs}
    if not found:
        looking = _masks_by_looks(folder, files)
        # A file with a word of masks that is none of these may be the second mask of an image.
        worded = {path for path in files if any(map(_MASK_WORDS.fullmatch, _words(path)))}
        return (
            {_LOOKS: {image: mask for mask, image in looking.items()}}
            if looking and worded <= set(looking)
            else {}
        )
    common = set.intersection(*map(set, found)) if len(found) > 1 else set()
    return {
        "-".join(word for word in kind if word not in common) or "masks": pairs
        for kind, pairs in found.items()
    }


def _pairs_hint(folder: Path, files: _Files) -> str:
    kinds = _kinds(folder, files.images)
    if not kinds:
        return ""
    # Colours are drawn for people, from the labels beside them.
    kind, pairs = min(kinds.items(), key=lambda one: ("color" in one[0], -len(one[1]), one[0]))
    image, mask = next(iter(pairs.items()))
    target = _new_folder(folder, "pairs")
    others = [other for other in kinds if other != kind]
    alone = len(files.images) - len({*pairs, *(mask for each in kinds.values() for mask in each.values())})
    rest = f", without {counted(alone, 'image')} that {'has' if alone == 1 else 'have'} none" if alone else ""
    more = f" (or {', '.join(others)} in place of {kind})" if others else ""
    return (
        f"{printable(mask.as_posix())} may be the mask of {printable(image.as_posix())}; copy "
        f"{counted(len(pairs), 'such pair')}{more} into images/ and masks/{rest}: {_COMMAND} masks {quoted(kind)} "
        f"{quoted(target)} {quoted(folder)}; then pass --dataset {quoted(target)}"
    )


def copies_of_pairs(kind: str, folder: Path) -> Dict[Path, Path]:
    """Returns where each file of the pairs goes: file below ``folder`` -> place below the new folder.

    Raises:
        ConfigurationError: there are no masks of this kind.
    """
    kinds = _kinds(folder, _files_of(folder).images)
    if kind not in kinds:
        known = (
            f"the kinds of masks in it are {', '.join(kinds)}"
            if kinds
            else "it has no masks of images by their names"
        )
        raise ConfigurationError(f"{shown(folder)}: no masks are called {printable(kind)}", known)
    copies: Dict[Path, Path] = {}
    parts = {_part_of(image) for image in kinds[kind]}
    for image, mask in kinds[kind].items():
        part = _part_of(image) if {"train"} < parts <= {*_PARTS.values()} else ""
        name = "_".join((*image.parts[:-1], image.stem))
        copies[image] = Path(part, "images", name + image.suffix)
        copies[mask] = Path(part, "masks", name + mask.suffix)
    return copies


# -- the command ----------------------------------------------------------------------------------------------


def copies_without_masks(folder: Path) -> Dict[Path, Path]:
    """Returns where each image goes that is no mask of another, by looks, or by the words of its own name."""
    images = _files_of(folder).images
    masks = {mask for pairs in _kinds(folder, images).values() for mask in pairs.values()}
    masks.update(_masks_by_looks(folder, images))
    return {
        path: path
        for path in images
        if path not in masks and not any(map(_MASK_WORDS.fullmatch, _words(Path(path.name))))
    }


def hint_without_masks(folder: Path, is_inside: bool) -> str:
    """Returns words for a hint with the commands for a folder whose class folders have masks.

    Args:
        is_inside: whether each mask lies in the class folder of its image, so that there are classes without them.
    """
    target = _new_folder(folder, "images")
    without = (
        f"for class folders without them: {_COMMAND} images {quoted(target)} {quoted(folder)}; then pass --dataset "
        f"{quoted(target)}"
    )
    pairs = _pairs_hint(folder, _files_of(folder))
    return "; ".join(
        [*([without] if is_inside else []), *([f"for the network unet: {pairs}"] if pairs else [])]
    )


def sorting_hint(folder: Path, task: str) -> str:
    """Returns words for a hint with the command that makes a set of a folder; "" if its names and tables tell none."""
    with suppress(OSError, DataError):
        files = _files_of(folder)
        if task == "segmentation":
            return _pairs_hint(folder, files)
        return _classes_hint(folder, files) or (
            _pairs_hint(folder, files) if task != "classification" else ""
        )
    return ""


def _new_folder(folder: Path, ending: str) -> Path:
    """Returns the place of a new folder beside a folder, below the current one if that is a path from here."""
    place = folder if folder.name not in ("", "..") else real(folder)
    names = (f"{place.name}-{ending}{number}" for number in ("", *map(str, range(2, 100))))
    return next(place.with_name(name) for name in names if not os.path.lexists(place.with_name(name)))


def copy_files(folder: Path, copies: Mapping[Path, Path], target: Path) -> None:
    """Copies files into a new folder, which is complete or absent.

    Raises:
        DataError: the folder exists, two files would get one name, or the file system refuses.
    """
    if os.path.lexists(target):
        raise DataError(f"{shown(target)} exists", "name a folder that does not")
    first: Dict[Path, Path] = {}
    for source, place in copies.items():
        if first.setdefault(place, source) != source:
            raise DataError(
                f"{shown(folder / first[place])} and {shown(folder / source)} would both be {printable(str(place))}",
                "rename one of them",
            )

    def write(new: Path) -> None:
        for source, place in copies.items():
            (new / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / source, new / place)

    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    write_folder(target, write)


def main(words: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    try:
        if len(words) == 5 and words[0] == "classes":
            folder, target = expand(words[4]), expand(words[3])
            copies = copies_of_classes(expand(words[1]), words[2], folder)
        elif len(words) == 4 and words[0] == "masks":
            folder, target = expand(words[3]), expand(words[2])
            copies = copies_of_pairs(words[1], folder)
        elif len(words) == 3 and words[0] == "images":
            folder, target = expand(words[2]), expand(words[1])
            copies = copies_without_masks(folder)
        else:
            raise ConfigurationError(
                "sorting takes: classes TABLE COLUMN TARGET FOLDER, masks KIND TARGET FOLDER, or images TARGET FOLDER",
                "the hint of `ipucnn verify-dataset FOLDER` has the words",
            )
        copy_files(folder, copies, target)
    except UserError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(
            "error: interrupted; nothing is left of the copy\nhint: give the command again", file=sys.stderr
        )
        return 130
    print(f"{counted(len(copies), 'file')} of {shown(folder)} copied into {shown(target)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
