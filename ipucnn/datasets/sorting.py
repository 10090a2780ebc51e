"""Copies files of other layouts into one that is read: images whose classes a table has, and scattered pairs.

A folder with such a layout is refused, because several things could be meant, and :func:`sorting_hint` gives the
command that makes a set of it: ``python -m ipucnn.datasets.sorting classes TABLE COLUMN TARGET FOLDER`` or ``... masks
KIND TARGET FOLDER``; for pairs that are read, with several masks of an image or parts in their names, ``... pairs
TARGET FOLDER``; for pairs with smoothed masks ``... two-values TARGET FOLDER``; for class folders without masks ``...
images TARGET FOLDER``; for names that begin with a class ``... names TARGET FOLDER``; and for class folders with lists
of their parts ``... lists TARGET FOLDER``.  The command copies; the files stay where they are.
"""

import csv
import itertools
import os
import re
import shutil
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import (
    Callable,
    Collection,
    Dict,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

from ipucnn.datasets.formats import (
    CLASS_LAYOUT,
    MAXIMUM,
    PAIR_LAYOUT,
    SORTING,
    classes_in_names,
    find_layout,
    images_with_classes,
    is_image_name,
    is_made_by_system,
    list_folder,
    named_classes_hint,
    names_without_class,
    part_named,
    same_name,
    side_named,
    some_of,
    subfolders,
)
from ipucnn.datasets.masks_beside import masks_by_content
from ipucnn.datasets.part_lists import Listed, listed_parts
from ipucnn.datasets.tables import PARTS, SHARE, Names, is_table, part_in_name, part_of, read_rows
from ipucnn.errors import ConfigurationError, DataError, UserError
from ipucnn.filesystem import expand, new_folder, real, shown, write_folder
from ipucnn.text import counted, printable, quoted, shown_value

_MOST_FILES = 500_000
_LONGEST_NAME = 200
_UNREAD = (".json", ".xlsx", ".xls", ".ods", ".xml", ".parquet", ".mat", ".sqlite", ".db", ".pkl")
"""Endings of files that may have the classes, and are not read, ..."""
_OF_IMAGES = re.compile(
    r"annot|class|label|categor|coco|meta|gt|truth|train|val|test|split|instances|info", re.IGNORECASE
)
"""... if they are called so, or like an image."""
_MOST_TABLES = 50
"""The most tables that are read: detection sets have one beside each image."""
_ONE_HOT = "one-hot"
"""In place of a column: the columns with a 1 for the class of each image, and 0 for all others."""
TWO_VALUES = "two-values"
"""The command that copies pairs, with masks of which each pixel is black or white: above _HALF, or not."""
_HALF, _WHITE = 127, 255
_LOOKS = "by-looks"
"""In place of a kind of masks: files of the name of an image with few values."""
_HOT = ("1", "1.0")
_MISSING = re.compile(r"nan|null|none|na", re.IGNORECASE)
"""Cells that many programs write where a value is missing; each may also be the name of a class."""
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
_LABELS += ["grade", "level", "type", "severity", "classid", "labelid", "choice"]
"""Names of columns of classes."""
_LAST_LABELS = ("label", "labels", "class", "category", "diagnosis", "species")
"""Last words of such names: Finding Labels; ..."""
_NO_LABELS = re.compile(r"num|number|no|n|count|is|has|pred|predicted|prediction", re.IGNORECASE)
"""... unless another word says that they are numbers, flags or guesses."""
_FOLD = re.compile(r"(k[-_]?)?folds?|splits?|groups?", re.IGNORECASE)
"""Names of columns that divide images, but not into classes."""
_FOLD_VALUE = re.compile(
    r"-?\d{1,3}(\.0)?|((k[-_ ]?)?fold|split|group|part|set|subset)?[-_ ]?(\d{1,3}|[a-z])", re.I
)
"""Values of these columns that are no parts."""
Copies = Dict[Path, List[Path]]
"""Place below the new folder -> the files below the old one that go there: several masks are joined."""


class Hint(NamedTuple):
    """How to make a set of a folder that is none.

    Attributes:
        command: words for a hint, with the command; "" if names and tables tell none.
        reason: why the files beside the images do not tell one, or what the command leaves out; or "".
    """

    command: str
    reason: str = ""


class _Files(NamedTuple):
    """The files below a folder, as paths relative to it, in the order of their names.

    Attributes:
        images, tables: images, and files that may be tables.
        unread: files that may say more of the images, in forms that are not read.
    """

    images: List[Path]
    tables: List[Path]
    unread: List[Path]


def _files_of(folder: Path) -> _Files:
    """Returns the files below a folder; links to folders are not followed.

    Raises:
        DataError: there are too many.
    """
    images: List[Path] = []
    tables: List[Path] = []
    unread: List[Path] = []
    for place, folders, names in os.walk(folder):
        below = Path(place).relative_to(folder)
        folders[:] = sorted(name for name in folders if not is_made_by_system(name))
        for name in sorted(names):
            if is_made_by_system(name):
                continue
            if is_image_name(name):
                images.append(below / name)
            elif is_table(name):
                tables.append(below / name)
            elif name.lower().endswith(_UNREAD):
                unread.append(below / name)
        if len(images) + len(tables) > _MOST_FILES:
            raise DataError(
                f"{shown(folder)} has more than {_MOST_FILES:,} files", "sort them with a program of your own"
            )
    return _Files(images, tables, unread)


# -- classes in a table ---------------------------------------------------------------------------------------


class _Table(NamedTuple):
    """A table with a row for each image.

    Attributes:
        path: the file, below the folder.
        header: the names of its columns.
        names: the place of the column that names the images.
        columns: those that may have the class, the likeliest first; or ``_ONE_HOT`` alone.
        hot: the columns behind ``_ONE_HOT``.
        rows: image below the folder -> its row.
        parts: image -> folder of its part, "" if that is not known; empty if the set has no parts.
        part_column: the column that says the parts; "" if folders do, or if there are none.
        num_others: the number of rows without an image.
    """

    path: Path
    header: List[str]
    names: int
    columns: List[str]
    hot: List[str]
    rows: Dict[Path, List[str]]
    parts: Dict[Path, str]
    part_column: str
    num_others: int

    @property
    def named_in(self) -> str:
        """Words for a hint: which column names the images."""
        return f", named in its column {printable(self.header[self.names]) or f'{self.names + 1}, which has no name'}"

    def classes(self, column: str) -> Dict[Path, str]:
        """Returns the class of each image that has one, and a part if there are parts, by a column."""
        rows = {image: row for image, row in self.rows.items() if not self.parts or self.parts[image]}
        if column == _ONE_HOT:
            places = [self.header.index(name) for name in self.hot]
            return {
                image: next(self.header[k] for k in places if row[k] in _HOT) for image, row in rows.items()
            }
        k = self.header.index(column)
        return {image: row[k] for image, row in rows.items() if row[k]}


class _NoTable(NamedTuple):
    """Why a file does not tell the classes of images, "" if it is not about them; and whether it names them."""

    reason: str = ""
    is_about: bool = False


def _table(folder: Path, path: Path, names: Names) -> Union[_Table, _NoTable]:
    """Returns what a table says of images, or why it does not tell their classes.

    The first row has the names of the columns, unless it names an image: they are then called 1, 2 and so on.  Of
    several columns that could name the images, one with whole names of files counts; the others are numbers.
    """
    name, is_text = shown(folder / path), path.suffix.lower() == ".txt"
    # A table that cannot be read may be about anything.
    may_be_about = not is_text and _OF_IMAGES.search(path.stem) is not None
    if not (folder / path).is_file():
        return _NoTable()
    try:
        cells = read_rows(folder / path)
    except DataError as error:
        return _NoTable(error.message if may_be_about else "")
    except csv.Error as error:
        return _NoTable(f"{name} is no table: {printable(str(error))}" if may_be_about else "")
    if len(cells) < 3:
        return _NoTable()
    names = _names_of(path, cells, names)
    if len({len(row) for row in cells}) > 1:
        # A comma without quotes moves the cells behind it.
        about = [row for row in cells if any(names.image(cell) is not None for cell in row)]
        other = next(row for row in cells if len(row) != len(cells[0]))
        if len(about) < max(SHARE * (len(cells) - 1), 10 * is_text):
            return _NoTable()
        text = f"the row of {printable(other[0])} has {counted(len(other), 'cell')}, and the first row {len(cells[0])}"
        return _NoTable(f"{name}: {text}", True)
    header, body = cells[0], cells[1:]
    naming = _naming_column(name, header, body, names)
    has_names = any(names.image(cell) is not None for cell in header)
    # Columns of classes may be called by numbers, as images are.
    if has_names and not (isinstance(naming, _Column) and names.image(header[naming.place]) is None):
        header, body = _numbered(len(header)), cells
        naming = _naming_column(name, header, body, names)
    if isinstance(naming, _NoTable):
        return naming
    column, found = naming.place, naming.images
    read = {image: row for image, row in zip(found, body) if image is not None}
    first = len(cells) - len(body) + 1
    numbered = {
        number: row for number, (image, row) in enumerate(zip(found, body), first) if image is not None
    }
    columns, hot, why = _label_columns(header, numbered, column)
    if not columns:
        text = f"{name} names the images, and its columns do not tell which has their classes"
        return _NoTable(f"{text}: {why}" if why else text, True)
    parts = _parts(header, read, {*map(part_of, names.images)} > {"train"})
    if parts is None:
        return _NoTable(f"{name} has columns or folders that contradict each other about the parts", True)
    return _Table(path, header, column, columns, hot, read, parts[1], parts[0], len(body) - len(read))


class _Column(NamedTuple):
    """The images that a column names.

    Attributes:
        place: the column.
        images: the image of each row, None for none.
        is_whole: whether these cells are whole names of files; bare stems may be other numbers.
    """

    place: int
    images: List[Optional[Path]]
    is_whole: bool

    @property
    def num_found(self) -> int:
        return sum(image is not None for image in self.images)

    @property
    def has_repeats(self) -> bool:
        return len({*self.images} - {None}) < self.num_found


def _column(place: int, rows: Sequence[Sequence[str]], names: Names) -> _Column:
    found = [names.image(row[place]) for row in rows]
    named = ((row[place], image) for row, image in zip(rows, found) if image is not None)
    return _Column(
        place, found, all(same_name(cell).endswith(same_name(image.name)) for cell, image in named)
    )


def _numbered(count: int) -> List[str]:
    """Returns the names of the columns of a table whose first row names an image."""
    return [str(number) for number in range(1, count + 1)]


def _is_numbered(header: Sequence[str]) -> bool:
    return list(header) == _numbered(len(header))


def _naming_column(
    name: str, header: Sequence[str], body: Sequence[Sequence[str]], names: Names
) -> Union[_Column, _NoTable]:
    """Returns the column that names the images, one with whole names of files if there is one; or why none does."""
    columns = [_column(place, body, names) for place in range(len(header))]
    matching = [one for one in columns if one.num_found >= SHARE * len(body)]
    fitting = [one for one in matching if not one.has_repeats]
    fitting = [one for one in fitting if one.is_whole] or fitting
    several = _NoTable(f"{name} has several rows for an image, as for boxes or several classes", True)
    if not fitting:
        if any(one.is_whole for one in matching):
            return several
        files_first = sorted(columns, key=lambda one: not is_image_name(body[0][one.place]))
        cell = next(filter(None, (_unlike(one, body, names) for one in files_first if header[1:])), "")
        return _NoTable(f"{name} names {_not_found(cell, names)}", True) if cell else _NoTable()
    if any(one.images != fitting[0].images for one in fitting):
        return _NoTable(f"{name} has several columns with names of images", True)
    if not fitting[0].is_whole:
        # A number of each row is called like an image by chance.
        for other in columns:
            if other not in fitting and _may_name_images(other, fitting[0], header, body, names):
                if other in matching:
                    return several
                cell = next(row[other.place] for row, image in zip(body, other.images) if image is None)
                return _NoTable(f"{name} names {_not_found(cell, names)}", True)
    return next((one for one in fitting if header[one.place]), fitting[0])


def _names_of(path: Path, cells: Sequence[Sequence[str]], names: Names) -> Names:
    """Returns the names of the images that a table is about, where images in several folders are called alike.

    These are the ones of its part, if nearly all rows name one.  Otherwise they are the ones in its folder, if more
    rows name one of them alone than one of all.
    """
    rows = cells[:: len(cells) // 1000 + 1]  # as many as tell

    def most_named(some: Names) -> int:
        places = range(len(cells[0]))
        counts = (len({some.image(row[k]) for row in rows if k < len(row)} - {None}) for k in places)
        return max(counts, default=0)

    part = part_of(path) or part_in_name(path.stem)[1]
    own = path.parent.parts  # faster than Path.parents, and this is done for each cell
    inside = names.only(lambda image: image.parts[: len(own)] == own)
    for some in (inside, names) if part else ():
        of_part = some.only(lambda image: part_of(image) == part)
        if most_named(of_part) >= SHARE * (len(rows) - 1):
            return of_part
    return names if path.parent == Path() else max((names, inside), key=most_named)


_OF_FILES = re.compile(
    r"(file|image|img|photo|picture|pic|path|fname)s?((file|path|name|id|index|idx|url)s?)*", re.IGNORECASE
)
"""Names of columns that name images."""


def _may_name_images(
    column: _Column,
    numbers: _Column,
    header: Sequence[str],
    body: Sequence[Sequence[str]],
    names: Names,
) -> bool:
    """Returns whether a column looks more like the names of images than one of bare stems, and has other ones.

    It looks like names if its cells end as images do, or if it is called so and the other one is not.  Names with other
    endings agree with the stems.  Stems that count rows, or have no head, agree with nothing.
    """
    cells = [row[column.place] for row in body]
    called, other_called = (
        _OF_FILES.fullmatch(re.sub(r"[\W_]", "", header[one.place])) for one in (column, numbers)
    )
    are_counted = _are_counted([row[numbers.place] for row in body])
    is_weak = are_counted or not header[numbers.place]
    # Images are often called by a number, and not as at the address where they were found.
    is_address = all("://" in cell for cell in cells) and not is_weak
    are_files = sum(map(is_image_name, cells)) >= SHARE * len(cells)
    least = 2 if column.num_found >= SHARE * len(cells) else len(cells) // 2
    is_called = bool(called) and len({*cells}) > least and (is_weak or not other_called)
    pairs = [(names.image(cell) or names.alike(cell), image) for cell, image in zip(cells, numbers.images)]
    known = [pair for pair in pairs if pair[0] is not None]
    agrees = not is_weak and len(known) >= SHARE * len(pairs) and all(one == other for one, other in known)
    return (are_files or is_called) and not is_address and not agrees


def _are_counted(cells: Sequence[str]) -> bool:
    """Returns whether cells are a number and its successors, in their order."""
    first = int(cells[0]) if re.fullmatch(r"\d{1,9}", cells[0]) else 0
    return [*cells] == [str(number) for number in range(first, first + len(cells))]


def _unlike(column: _Column, body: Sequence[Sequence[str]], names: Names) -> str:
    """Returns the first cell without an image if nearly all have one that is called alike, or several; or ""."""
    cells = [row[column.place] for row in body]
    near = [image or names.alike(cell) or names.all_called(cell) for cell, image in zip(cells, column.images)]
    is_near = (
        column.num_found < SHARE * len(cells) <= sum(map(bool, near)) and len({*cells}) > len(cells) // 2
    )
    return next((cell for cell, image in zip(cells, column.images) if image is None), "") if is_near else ""


def _not_found(cell: str, names: Names) -> str:
    """Returns words about a cell that names no single image."""
    several, alike = names.all_called(cell), names.alike(cell)
    if len(several) > 1:
        one, other = (printable(path.as_posix()) for path in several[:2])
        why = f"which may be {one} or {other}"
    else:
        why = f"and the file is '{printable(alike.name)}'" if alike else "and no image is called so"
    return f"'{shown_value(cell)}', {why}"


def _parts(
    header: Sequence[str], rows: Mapping[Path, List[str]], has_other_parts: bool
) -> Optional[Tuple[str, Dict[Path, str]]]:
    """Returns the column that says the part of each image, and the parts; None if columns contradict each other.

    Folders that are called like parts say more than a column, which may divide the training part once more.  It counts
    if all images lie in the folder of the training part.
    """
    by_folder = {image: part_of(image) for image in rows}
    named = {*by_folder.values()}
    if named - {"", "train"}:
        # Images outside of the parts are left out; without a part of training, theirs is not known.
        return (
            None if len(named) > 1 and "train" not in named else ("", by_folder if "train" in named else {})
        )
    if "train" in named and (len(named) > 1 or has_other_parts):
        return "", {}
    found: Dict[str, Dict[Path, str]] = {}
    for k, name in enumerate(header):
        of_images = {image: _part_in(name, row[k]) for image, row in rows.items()}
        known = {image: part for image, part in of_images.items() if part is not None}
        if len(known) == len(rows) and {"train"} < {*known.values()} - {""}:
            found[name] = known
    if not found:
        return "", {}
    column, parts = next(iter(found.items()))
    return (column, parts) if all(other == parts for other in found.values()) else None


_ANSWERS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def _part_in(column: str, cell: str) -> Optional[str]:
    """Returns the folder of the part that a cell names; "" for an empty cell, and None for another value."""
    words = [word for word in _parts_of_name(column.casefold()) if word != "is"]
    # test_positive is no part.
    asked = (
        "train" if "train" in map(part_named, words) else part_named(words[0]) if len(words) == 1 else None
    )
    if cell.casefold() in _ANSWERS and asked in PARTS:
        part = PARTS[asked]
        return part if _ANSWERS[cell.casefold()] else "val" if part == "train" else "train"
    return PARTS.get(part_named(cell) or "") if cell else ""


def _parts_of_name(name: str) -> List[str]:
    return re.split(r"[\W_]+", name)


def _label_columns(
    header: Sequence[str], rows: Mapping[int, Sequence[str]], names: int
) -> Tuple[List[str], List[str], str]:
    """Returns the columns that may have the classes, the likeliest first: few values, each a name of a folder.

    If they are ``_ONE_HOT``, the columns behind it are the second result.  There are none if a column that is called
    like labels cannot have them.  Of columns without names it is the one with other values than numbers.

    Args:
        header: the names of all columns.
        rows: number of a row, the first row of the file being 1 -> its cells.
        names: the column that names the images.

    Returns:
        The columns, those behind ``_ONE_HOT``, and why there are none, if that is known.
    """
    twice = next((name for name, count in Counter(header).items() if count > 1), None)
    if twice is not None:
        called = f"are called '{shown_value(twice)}'" if twice else "have no name"
        return [], [], f"two columns {called}"
    # A name that is not printed cannot be typed.
    others = [k for k in range(len(header)) if k != names and header[k] and header[k].isprintable()]
    others = [k for k in others if not _divides(header[k], {row[k] for row in rows.values()})]
    hot = [k for k in others if {row[k] for row in rows.values()} <= {*_HOT, "0", "0.0"}]
    columns = [header[k] for k in hot]
    counts = [sum(float(row[k]) for k in hot) for row in rows.values()] if len(hot) > 1 else []
    labels: List[str] = []
    fitting: List[str] = []
    unfit: Dict[str, str] = {}
    for k in others:
        is_label = _is_called_label(header[k])
        if not is_label and k in hot and len(hot) > 1:
            continue  # an image may have several of them
        values = {row[k] for row in rows.values()} - {""}
        is_few = 1 < len(values) <= (len(rows) - 1 if is_label else max(2, len(rows) // 2))
        why = _not_folders(sorted(values)) if is_few else _not_classes(values, len(rows))
        if not why:
            (labels if is_label else fitting).append(header[k])
        elif is_label or is_few:
            unfit[header[k]] = f"{why} (column {printable(header[k])})"
    labels.sort(key=lambda name: not _is_exactly_label(name))
    # Two columns such as "male" and "female" may be facts beside the label.
    if counts and {*counts} == {1} and not any(map(_is_exactly_label, labels)):
        why = _not_folders(columns)
        return ([], [], why) if why else ([_ONE_HOT], columns, "")
    for name, why in unfit.items():
        is_alone = not labels and (_is_called_label(name) or not fitting)
        if is_alone or _is_exactly_label(name):
            return [], [], why
    # A row that is left blank, or a second label, may be a mistake; with more of them the columns may be no classes.
    is_nearly_hot = len(rows) - counts.count(1) <= max(1, (1 - SHARE) * len(rows))
    if not labels and counts and (is_nearly_hot or not fitting):
        number, count = next(one for one in zip(rows, counts) if one[1] != 1)
        how_many = "no 1" if count < 1 else "more than one 1"
        return [], [], f"row {number:,} has {how_many} in its columns {some_of(columns)}"
    if _is_numbered(header):
        worded = [name for name in fitting if not all(row[int(name) - 1].isdigit() for row in rows.values())]
        fitting = worded if len(worded) == 1 else fitting
    return [*labels, *fitting], [], ""


def _not_classes(values: Collection[str], num_images: int) -> str:
    """Returns why a column with too many or too few values has no classes."""
    if len(values) == 1:
        return f"all images have the label '{shown_value(next(iter(values)))}'"
    return f"{num_images:,} images have {len(values):,} labels" if values else "no image has a label"


def _not_folders(names: Sequence[str]) -> str:
    """Returns why names of classes cannot be those of folders; "" if they can."""
    name = next((name for name in names if not _is_folder_name(name)), None)
    return "" if name is None else f"label '{shown_value(name)}' cannot be a folder's name"


def _divides(name: str, values: Collection[str]) -> bool:
    """Returns whether a column is called like parts of a set or like folds, and has such values, and not classes."""
    words = _parts_of_name(name)
    is_called = any(part_named(word) or _FOLD.fullmatch(word) for word in words)
    return (
        is_called
        and not _is_called_label(name)
        and all(
            value.casefold() in _ANSWERS or part_named(value) or _FOLD_VALUE.fullmatch(value)
            for value in values
            if value
        )
    )


def _is_called_label(name: str) -> bool:
    words = [word.casefold() for word in re.findall(r"[A-Z]?[^\W\d_A-Z]+|[A-Z]+", name)]
    is_last = bool(words) and words[-1] in _LAST_LABELS and not any(map(_NO_LABELS.fullmatch, words))
    return is_last or _is_exactly_label(name)


def _is_exactly_label(name: str) -> bool:
    return re.sub(r"[\W_]", "", name.casefold()) in _LABELS


def _is_folder_name(text: str) -> bool:
    """Returns whether a class may be called so: not as a part of a set, a side of pairs, or a folder of a system."""
    is_taken = part_named(text) is not None or side_named(text) is not None or is_made_by_system(text)
    return not is_taken and "/" not in text and text.isprintable() and len(os.fsencode(text)) <= _LONGEST_NAME


def _may_be_true(table: Path) -> bool:
    """Returns whether a table may have the true classes: a submission and predictions are guesses."""
    return re.search(r"submission|(?<![^\W_])pred(ict(ed|ions?))?s?(?![^\W_])", table.stem.casefold()) is None


def _classes_hint(folder: Path, files: _Files) -> Hint:
    names = Names(files.images, folder.name)
    read = [_table(folder, path, names) for path in [*filter(_may_be_true, files.tables)][:_MOST_TABLES]]
    tables = sorted((one for one in read if isinstance(one, _Table)), key=lambda one: -len(one.rows))
    if not tables:
        reasons = [one for one in read if isinstance(one, _NoTable) and one.reason]
        stems = {path.stem for path in files.images}
        unread = [path for path in files.unread if path.stem in stems or _OF_IMAGES.search(path.stem)]
        if reasons and (not unread or any(one.is_about for one in reasons)):
            return Hint("", max(reasons, key=lambda one: one.is_about).reason)
        others = f" and {counted(len(unread) - 1, 'more file')} are" if len(unread) > 1 else " is"
        return Hint("", f"{shown(folder / unread[0])}{others} not read" if unread else "")
    by_part: Dict[str, _Table] = {}
    for table in tables:
        parts = {part_of(image) for image in table.rows}
        by_part.setdefault(parts.pop() if len(parts) == 1 else "", table)
    if "train" in by_part:
        by_part.pop("", None)
    else:
        # Pets and others have a table for each part, whose images lie together.
        named = {part_in_name(table.path.stem)[1]: table for table in reversed(tables)}
        named.pop("", None)
        is_alike = len({table.columns[0] for table in named.values()}) == 1
        by_part = named if {"train"} < {*named} and is_alike else {"": tables[0]}
    table = by_part.get("train") or next(iter(by_part.values()))
    column, *more_columns = table.columns
    by_part = {part: one for part, one in by_part.items() if column in one.columns}
    target, commands = new_folder(folder, "classes"), []
    for part, one in by_part.items():
        place = target / part if len(by_part) > 1 else target
        commands.append(
            f"{SORTING} classes {quoted(folder / one.path)} {quoted(column)} {quoted(place)} {quoted(folder)}"
        )
    cells = Counter(cell for one in by_part.values() for cell in one.classes(column).values())
    by = "columns with a 1 for its class" if column == _ONE_HOT else f"column {printable(column)}"
    more = f"; or {', '.join(map(printable, more_columns[:3]))} in its place" if more_columns else ""
    more = f" ({counted(len(cells), 'class')}: {some_of(cells)}{more})"
    alone = len(files.images) - len({image for one in by_part.values() for image in one.classes(column)})
    rest = f", in the parts of its column {printable(table.part_column)}" if table.part_column else ""
    of_which = "no class or no part" if table.parts else "no class"
    rest += f", without {counted(alone, 'image')} of which {of_which} is known" if alone else ""
    for cell in filter(_MISSING.fullmatch, sorted(cells)):
        rest += f"; {printable(cell)} is a class, of {counted(cells[cell], 'image')}"
    joined = [cell for cell in sorted(cells) if _joins_others(cell, cells)]
    if joined:
        also = f" and {counted(len(joined) - 1, 'more class')}" if joined[1:] else ""
        rest += f"; {shown_value(joined[0])}{also} may be several labels of an image"
    missing = sum(one.num_others for one in by_part.values())
    rest += f"; {counted(missing, 'row')} {'names' if missing == 1 else 'name'} no image" if missing else ""
    return Hint(
        f"{shown(folder / table.path)} has a row for each image{table.named_in}; copy them into class folders by its "
        f"{by}{more}{rest}: "
        f"{' && '.join(commands)}; then pass --dataset {quoted(target)}"
    )


def _joins_others(name: str, classes: Collection[str]) -> bool:
    """Returns whether the name of a class joins those of others, as Mass|Hernia does."""
    others = {*classes} - {name}
    parted = ([part.strip() for part in name.split(separator)] for separator in ",;|+/& ")
    is_joined = any(len(parts) > 1 and {*parts} <= others for parts in parted)
    return is_joined or ("|" in name and not others.isdisjoint(name.split("|")))


def sorted_part_hint(part: Path, classes: Collection[str]) -> Hint:
    """Returns the commands that make class folders of a part whose table has them, and words about what is left out.

    tiny-ImageNet has them in ``val/val_annotations.txt``, GTSRB in ``Test.csv`` beside ``Test``.

    Args:
        part: the folder of the part.
        classes: the classes of the training part.
    """
    with suppress(OSError, DataError):
        files = _files_of(part)
        others = [path for path in subfolders(part.parent) if path.name != part.name]
        folders = [path.name for path in others if part_named(path.name) in PARTS]
        names, own = Names(files.images, part.name, folders), PARTS.get(part_named(part.name) or "", "")
        beside = [Path("..", entry.name) for entry in list_folder(part.parent) if is_table(entry.name)]
        beside = [path for path in beside if part_in_name(path.stem)[1] in ("", own)]
        for path in filter(_may_be_true, [*files.tables[:_MOST_TABLES], *beside]):
            table = _table(part, path, names)
            if isinstance(table, _NoTable):
                continue
            cells = itertools.chain.from_iterable([*table.rows.values()][:20])
            paths = [cell for cell in cells if "/" in cell and not os.path.isabs(cell)]
            if any((other / cell).is_file() for cell in paths for other in others):
                continue  # the images of another part
            column, of_images = table.columns[0], table.classes(table.columns[0])
            is_named = _is_numbered(table.header) or column == _ONE_HOT or _is_called_label(column)
            if not is_named or not {*of_images.values()} <= {*classes}:
                continue
            alone = len(files.images) - len(of_images)
            rest = table.named_in
            rest += f", without {counted(alone, 'image')} of which no class is known" if alone else ""
            path = Path(os.path.normpath(part / path))
            target, whole = new_folder(part, "classes"), real(part.parent)
            kept = new_folder(whole, f"{part.name}-unsorted")
            return Hint(
                f"{SORTING} classes {quoted(path)} {quoted(column)} {quoted(target)} {quoted(part)} "
                f"&& mv {quoted(part)} {quoted(kept)} && mv {quoted(target)} {quoted(part)}",
                rest,
            )
    return Hint("")


def _placed(folder: Path, places: Mapping[Path, Path]) -> Copies:
    """Returns the copies of files that go to one place each.

    Raises:
        DataError: two files would get one name.
    """
    copies: Copies = {}
    for source, place in places.items():
        first = copies.setdefault(place, [source])[0]
        if first != source:
            raise DataError(
                f"{shown(folder / first)} and {shown(folder / source)} would both be {printable(str(place))}",
                "rename one of them",
            )
    return copies


def copies_of_classes(table: Path, column: str, folder: Path) -> Copies:
    """Returns the copies of the images of a table in folders of their classes.

    Raises:
        DataError: the table cannot be read, has no row for an image, or two images would get one name.
        ConfigurationError: it has no such column.
    """
    names = Names(_files_of(folder).images, folder.name)
    found = _table(folder, Path(os.path.relpath(table, folder)), names)
    if isinstance(found, _NoTable):
        raise DataError(
            found.reason or f"{shown(table)} has no row with the class of each image in {shown(folder)}",
            "give a table with the name of a file and its class in each row",
        )
    if column not in found.columns:
        raise ConfigurationError(
            f"{shown(table)} has no column {printable(column)} with classes",
            f"take one of {', '.join(map(printable, found.columns))}",
        )
    classes, parts = found.classes(column).items(), found.parts
    return _placed(
        folder, {image: Path(parts.get(image, ""), name, "_".join(image.parts)) for image, name in classes}
    )


# -- lists of parts -------------------------------------------------------------------------------------------


def copies_by_lists(folder: Path) -> Copies:
    """Returns the copies of images that lists have, into the class folders in which they lie, of parts."""
    files = _files_of(folder)
    listed = listed_parts(folder, files.images, files.tables)
    if listed is None or not _are_of_classes(listed):
        return {}
    return {Path(part, image.parent.name, image.name): [image] for image, part in listed.parts.items()}


def _are_of_classes(listed: Listed) -> bool:
    """Returns whether the folders of listed images are classes.

    They lie beside each other, are not called like parts, and hold images for training; and if the lists have classes,
    too, these are the folders.
    """
    folders = {image.parent for image in listed.parts}
    trained = {image.parent for image, part in listed.parts.items() if part == "train"}
    is_part = any(part_named(path.name) is not None for path in folders)
    is_beside = Path() not in folders and len({path.parent for path in folders}) == 1
    is_whole = 1 < len(folders) == len(trained)
    return is_whole and is_beside and not is_part and not listed.has_other_classes


def _lists_hint(folder: Path, files: _Files, listed: Optional[Listed]) -> str:
    """Returns words for a hint with the command that makes parts of class folders by lists; "" if they are none."""
    if listed is None or not _are_of_classes(listed):
        return ""
    target = new_folder(folder, "parts")
    lists = " and ".join(shown(folder / path) for path in listed.lists)
    counts = Counter(listed.parts.values())
    parts = " and ".join(f"{count:,} in {part}/" for part, count in counts.items())
    alone = len(files.images) - len(listed.parts)
    rest = f", without {counted(alone, 'image')} in none of them" if alone else ""
    others = "names no single image" if listed.num_others == 1 else "name no single image"
    rest += f"; {counted(listed.num_others, 'row')} of them {others}" if listed.num_others else ""
    return (
        f"{lists} list the images of parts; copy them into class folders, {parts}{rest}: {SORTING} lists "
        f"{quoted(target)} {quoted(folder)}; then pass --dataset {quoted(target)}"
    )


def lists_beside_classes(folder: Path) -> str:
    """Returns words with the command for class folders that have lists of parts beside them; "" without such lists."""
    with suppress(OSError, DataError):
        if any(is_table(entry.name) for entry in list_folder(folder)):
            files = _files_of(folder)
            listed = listed_parts(folder, files.images, files.tables)
            if listed is not None and listed.has_other_classes:
                named = " and ".join(shown(folder / path) for path in listed.lists)
                return f"{named} have other classes than the folders, or several columns of them"
            return _lists_hint(folder, files, listed)
    return ""


# -- scattered pairs ------------------------------------------------------------------------------------------

_WORD = re.compile(r"manual\d|[^\W\d_]+|\d+")
_OBSERVER = re.compile(r"(\d)(?:st|nd|rd)[\W_]*(?:ho|manual)", re.IGNORECASE)
"""The first and the second observer's masks: 1st_manual in DRIVE, 1stHO in CHASE-DB1."""
_MASK_WORDS = re.compile(
    r"masks?|labels?|label(train)?ids|instanceids|color|gt(fine|coarse)?|groundtruth|truth|segs?|segmentations?"
    r"|annotations?|annots?|manual\d?|trimaps?"
)
_DRAWN = re.compile(r"viz|visuali[sz]ations?|overlays?|previews?")
"""Words of masks that are drawn for people."""
_AFTER_MASK = re.compile(rf"({_MASK_WORDS.pattern}) \d+\Z")
_Key = Tuple[str, ...]
_Side = Dict[Tuple[str, _Key], List[Path]]
"""Images, or masks of one kind: (part, words of its path that tell files apart) -> files below the folder."""
_Pairs = Dict[Path, List[Path]]
"""An image -> its masks, as paths below the folder."""


def _words(path: Path) -> List[str]:
    text = " ".join((*path.parts[:-1], path.stem)).replace("leftImg8bit", "")
    # Pascal VOC's folders in the words of Cityscapes.
    text = text.replace("SegmentationClass", "labelIds").replace("SegmentationObject", "instanceIds")
    return _WORD.findall(_OBSERVER.sub(r" manual\1 ", text).casefold())


def _is_of_images(word: str) -> bool:
    """Returns whether a word says nothing but that a file is an image, or of which part."""
    return part_named(word) in PARTS or side_named(word) == "images"


def _telling(words: Sequence[str]) -> _Key:
    """Returns the words that tell a file from others of its kind."""
    return tuple(word for word in words if not _MASK_WORDS.fullmatch(word) and not _is_of_images(word))


def _kind_of(path: Path) -> _Key:
    """Returns the words of masks in a path; () for an image."""
    return tuple(sorted({word.rstrip("s") for word in _words(path) if _MASK_WORDS.fullmatch(word)}))


def _by_folder(path: Path) -> _Key:
    """Returns the telling words of a file's folders: DSB2018's ID/images/ID.png and ID/masks/*.png."""
    return _telling(_words(path.parent / "_"))


def _without_number(path: Path) -> _Key:
    """Returns the telling words of a file without the number of one of several masks: x_mask and x_mask_1."""
    return _telling(_AFTER_MASK.sub(r"\1", " ".join(_words(path))).split())


def _side(files: Sequence[Path], key_of: Callable[[Path], _Key], leaves_out_common: bool = False) -> _Side:
    """Returns files by their keys; without the words that all of a part begin and end with, if those are left out."""
    side: _Side = {}
    for part in {part_of(path) for path in files}:
        paths = [path for path in files if part_of(path) == part]
        keys = [key_of(path) for path in paths]
        if leaves_out_common and len(keys) > 1:
            begin = len(os.path.commonprefix(keys))  # noqa: RUF071 - of words
            end = len(os.path.commonprefix([key[begin:][::-1] for key in keys]))  # noqa: RUF071
            keys = [key[begin : len(key) - end] for key in keys]
        for key, path in zip(keys, paths):
            side.setdefault((part, key), []).append(path)
    return side


def _pairs(images: _Side, masks: _Side, has_several: bool = False) -> _Pairs:
    """Returns the pairs if all masks have a partner, and half of the images of their parts, or by equal names.

    A mask without one may be the second mask of an image, which would be lost.

    Args:
        images: the images; there are no pairs if two have one key.
        masks: the masks of one kind.
        has_several: whether an image may have several masks.
    """
    if any(len(paths) > 1 for paths in (*images.values(), *(() if has_several else masks.values()))):
        return {}
    shared = [key for key in masks if key in images]
    parts = {part for part, _ in masks}
    count = sum(part in parts for part, _ in images)
    is_same = all(mask.stem == images[key][0].stem for key in shared for mask in masks[key])
    is_whole = len(shared) > 1 and len(shared) >= max(len(masks), 0 if is_same else count / 2)
    return {images[key][0]: masks[key] for key in shared} if is_whole else {}


def _pairs_of(images: Sequence[Path], masks: Sequence[Path]) -> _Pairs:
    """Returns the pairs by the words that tell most files apart; with several masks of an image if it has no others."""
    ways = [
        [_side(files, lambda path: _telling(_words(path)), common) for common in (False, True)]
        for files in (images, masks)
    ]
    found = max((_pairs(image, mask) for image in ways[0] for mask in ways[1]), key=len)
    if found:
        return found
    numbered = _pairs(_side(images, _without_number), _side(masks, _without_number), has_several=True)
    if numbered or not all(_MASK_WORDS.fullmatch(path.parent.name.casefold()) for path in masks):
        return numbered
    pairs = _pairs(_side(images, _by_folder), _side(masks, _by_folder), has_several=True)
    named = {frozenset(re.sub(r"\d+", "", mask.stem) for mask in of_image) for of_image in pairs.values()}
    # Of each image nucleus.png and cytoplasm.png: two kinds, and not two parts of one.
    return {} if len(named) == 1 and len(next(iter(named))) > 1 else pairs


def _masks_by_looks(folder: Path, files: Sequence[Path]) -> Dict[Path, Path]:
    """Returns the image of each file that looks like its mask, as paths below the folder."""
    found = masks_by_content([str(folder / path) for path in files])
    return {Path(mask).relative_to(folder): Path(image).relative_to(folder) for mask, image in found.items()}


def _kinds(folder: Path, files: Sequence[Path]) -> Dict[str, _Pairs]:
    """Returns the pairs with each kind of masks that is complete, by the words that tell this kind from the others.

    If words tell none, masks are the files that look like masks; the kind is ``_LOOKS``.
    """
    by_kind: Dict[_Key, List[Path]] = {}
    for path in files:
        if not any(map(_DRAWN.fullmatch, _words(path))):
            by_kind.setdefault(_kind_of(path), []).append(path)
    images = by_kind.pop((), [])
    found = {kind: _pairs_of(images, masks) for kind, masks in by_kind.items()}
    found = {kind: pairs for kind, pairs in found.items() if pairs}
    if not found:
        looking = _masks_by_looks(folder, files)
        # A file with a word of masks that is none of these may be the second mask of an image.
        worded = {path for path in files if any(map(_MASK_WORDS.fullmatch, _words(path)))}
        return _looking_kinds(looking) if worded <= set(looking) else {}
    common = set.intersection(*map(set, found)) if len(found) > 1 else set()
    return {
        "-".join(word for word in kind if word not in common) or "masks": pairs
        for kind, pairs in found.items()
    }


def _looking_kinds(looking: Mapping[Path, Path]) -> Dict[str, _Pairs]:
    """Returns the pairs by looks; if images have several masks, a kind for each folder of masks.

    There are none if a folder has several masks of an image, which may be several classes.
    """
    folders: Dict[str, _Pairs] = {}
    for mask, image in looking.items():
        folders.setdefault(mask.parent.name, {}).setdefault(image, []).append(mask)
    if any(len(masks) > 1 for pairs in folders.values() for masks in pairs.values()):
        return {}
    if len({*looking.values()}) == len(looking):
        folders = {_LOOKS: {image: [mask] for mask, image in looking.items()}} if looking else {}
    return folders


def _pairs_hint(folder: Path, files: _Files) -> str:
    kinds = _kinds(folder, files.images)
    if not kinds:
        return ""

    # Colours are drawn for people, from the labels beside them, and numbers of instances are no classes.
    def rank(one: Tuple[str, _Pairs]) -> Tuple[bool, int, str]:
        return any(word in one[0] for word in ("color", "instance")), -len(one[1]), one[0]

    kind, pairs = min(kinds.items(), key=rank)
    image, masks = max(pairs.items(), key=lambda one: len(one[1]))
    mask, *more_masks = masks
    target = new_folder(folder, "pairs")
    others = [other for other in kinds if other != kind]
    alone = len(files.images) - len({*pairs, *_masks_of(kinds)})
    rest = f", without {counted(alone, 'image')} that {'has' if alone == 1 else 'have'} none" if alone else ""
    more = f" (or {', '.join(others)} in place of {kind})" if others else ""
    also = f" and {counted(len(more_masks), 'more file')}" if more_masks else ""
    joined = f", with the masks of an image joined as one, {MAXIMUM}" if more_masks else ""
    _, lists = _parts_of_pairs(folder, pairs, files.tables)
    joined += f", in the parts of {' and '.join(shown(folder / path) for path in lists)}" if lists else ""
    return (
        f"{printable(mask.as_posix())}{also} may be the mask of {printable(image.as_posix())}; copy "
        f"{counted(len(pairs), 'such pair')}{more} into images/ and masks/{joined}{rest}: {SORTING} masks "
        f"{quoted(kind)} {quoted(target)} {quoted(folder)}; then pass --dataset {quoted(target)}"
    )


def _drawings(folder: Path, files: _Files) -> str:
    """Returns words about files called like images that may have the outlines of their masks, as Labelme's have."""
    stems = {path.with_suffix("") for path in files.images}
    beside = [path for path in files.unread if path.with_suffix("") in stems]
    if not beside:
        return ""
    more = f" and {counted(len(beside) - 1, 'more file')} beside images are" if len(beside) > 1 else " is"
    return f"{shown(folder / beside[0])}{more} not read: masks are images"


def _masks_of(kinds: Mapping[str, _Pairs]) -> List[Path]:
    return [mask for pairs in kinds.values() for masks in pairs.values() for mask in masks]


def copies_of_pairs(kind: str, folder: Path) -> Copies:
    """Returns the copies of images and masks in folders of both, in parts if the words of their folders name them.

    Raises:
        ConfigurationError: there are no masks of this kind.
        DataError: two images would get one name.
    """
    from ipucnn.datasets.segmentation.masks import table_in

    files = _files_of(folder)
    kinds = _kinds(folder, files.images)
    if kind not in kinds:
        known = (
            f"the kinds of masks in it are {', '.join(kinds)}"
            if kinds
            else "it has no masks of images by their names"
        )
        raise ConfigurationError(f"{shown(folder)}: no masks are called {printable(kind)}", known)
    parts, _ = _parts_of_pairs(folder, kinds[kind], files.tables)
    pairs = ((parts.get(image, ""), image, masks) for image, masks in kinds[kind].items())
    return _copies(folder, pairs, table_in(folder))


def _parts_of_pairs(
    folder: Path, pairs: Collection[Path], tables: Sequence[Path]
) -> Tuple[Dict[Path, str], List[Path]]:
    """Returns the part of each image, by the words of its folders, or else by lists that have them all, and these."""
    parts = {image: part_of(image) for image in pairs}
    if {"train"} < {*parts.values()} <= {*PARTS.values()}:
        return parts, []
    listed = listed_parts(folder, [*pairs], tables)
    if listed is None or {*listed.parts} != {*pairs}:
        return {}, []
    return listed.parts, listed.lists


def _copies(folder: Path, pairs: Iterable[Tuple[str, Path, Sequence[Path]]], table: Optional[Path]) -> Copies:
    """Returns the copies of pairs, and of the table of their classes.

    Args:
        folder: the folder below which the files are.
        pairs: the folder of the part, "" for none, an image and its masks.
        table: the file that defines the values of the masks.
    """
    images, masks = {}, {}
    for part, image, of_image in pairs:
        name = "_".join((*image.parts[:-1], image.stem))
        images[image] = Path(part, "images", name + image.suffix)
        ending = of_image[0].suffix if len(of_image) == 1 else ".png"
        masks[Path(part, "masks", name + ending)] = [*of_image]
    if table is not None:
        masks[Path(table.name)] = [_below(folder, table)]
    return {**_placed(folder, images), **masks}


def copies_of_set(folder: Path) -> Copies:
    """Returns the copies of the pairs in folders that are read: with the masks of each image as one, and in parts.

    Raises:
        DataError: there are no such folders, or two images would get one name.
    """
    from ipucnn.datasets.segmentation.imagemasks import masks_of_images, part_in_name, table_of, tables_of
    from ipucnn.datasets.segmentation.masks import DESCRIPTION, TABLE

    found = find_layout("imagemasks", folder)
    if found is None:
        raise DataError(f"{shown(folder)} has no images and masks", PAIR_LAYOUT)
    table_of(found)  # tables of parts are the same, or refused
    table = next(iter(tables_of(found)), None)
    if table is not None and table.name == DESCRIPTION:
        text = f"{shown(table)} has the names of classes, which the copy would lack"
        raise DataError(text, f"name them in {quoted(found.location / TABLE)}, a line for each: 1 cell")
    files: Dict[str, _Pairs] = {}
    for subset, (image, *masks) in masks_of_images(found):
        part = part_in_name(image.name) if found.is_undivided else subset.replace("eval", "validation")
        of_part = files.setdefault(PARTS.get(part or "", ""), {})
        of_part[_below(folder, image)] = [_below(folder, mask) for mask in masks]
    has_parts = "train" in files and "" not in files
    pairs = ((part, *pair) for part, of_part in files.items() for pair in of_part.items())
    parted = ((part if has_parts else "", image, masks) for part, image, masks in pairs)
    return _copies(folder, parted, table)


def _below(folder: Path, path: Path) -> Path:
    return Path(os.path.relpath(path, folder))


# -- the command ----------------------------------------------------------------------------------------------


def copies_without_masks(folder: Path) -> Copies:
    """Returns the copies of images that are no masks of others, by looks, or by the words of their own names."""
    images = _files_of(folder).images
    masks = {*_masks_of(_kinds(folder, images)), *_masks_by_looks(folder, images)}
    return {
        path: [path]
        for path in images
        if path not in masks and not any(map(_MASK_WORDS.fullmatch, _words(Path(path.name))))
    }


def copies_by_names(folder: Path) -> Copies:
    """Returns the copies of the images of a folder, or of its parts, into folders of the classes in their names."""
    images = images_with_classes(folder).items()
    return {image.parent / of_name / image.name: [image] for image, of_name in images}


def hint_without_masks(folder: Path, is_inside: bool) -> str:
    """Returns words for a hint with the commands for a folder whose class folders have masks.

    Args:
        is_inside: whether each mask lies in the class folder of its image, so that there are classes without them.
    """
    target = new_folder(folder, "images")
    without = (
        f"for class folders without them: {SORTING} images {quoted(target)} {quoted(folder)}; then pass --dataset "
        f"{quoted(target)}"
    )
    pairs = _pairs_hint(folder, _files_of(folder))
    return "; ".join(
        [*([without] if is_inside else []), *([f"for the network unet: {pairs}"] if pairs else [])]
    )


def sorting_hint(folder: Path, task: str) -> Hint:
    """Returns the command that makes a set of a folder, if its names and tables tell one."""
    with suppress(OSError, DataError):
        files = _files_of(folder)
        if task == "segmentation":
            command = _pairs_hint(folder, files)
            return Hint(command, "" if command else _drawings(folder, files))
        by_table = _classes_hint(folder, files)
        command = (
            _lists_hint(folder, files, listed_parts(folder, files.images, files.tables))
            or by_table.command
            or (named_classes_hint(folder) if classes_in_names(folder) else "")
            or (_pairs_hint(folder, files) if task != "classification" else "")
        )
        return Hint(command, "" if command else by_table.reason or names_without_class(folder))
    return Hint("")


def copy_files(
    folder: Path, copies: Mapping[Path, Sequence[Path]], target: Path, two_values: bool = False
) -> None:
    """Copies files into a new folder, which is complete or absent; several files for one place are joined masks.

    With ``two_values``, masks are written with 0 and 255.

    Raises:
        DataError: the folder exists, masks cannot be joined, or the file system refuses.
    """
    if os.path.lexists(target):
        raise DataError(f"{shown(target)} exists", "name a folder that does not")

    def write(new: Path) -> None:
        for place, sources in copies.items():
            (new / place).parent.mkdir(parents=True, exist_ok=True)
            if len(sources) == 1 and not (two_values and place.parent.name == "masks"):
                shutil.copyfile(folder / sources[0], new / place)
            else:
                _join([folder / source for source in sources], new / place, two_values)

    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    write_folder(target, write)


def _join(masks: Sequence[Path], place: Path, two_values: bool) -> None:
    """Writes the maximum of the stored numbers of masks in each pixel, as training reads them.

    With ``two_values``, 255 takes the place of numbers above 127, and 0 that of others.

    Raises:
        DataError: one cannot be read, or they have other sizes, palettes or turns, colours, or several pages.
    """
    import numpy as np
    from PIL import Image

    from ipucnn.datasets.base import read_file
    from ipucnn.datasets.forms import MASK_HINT, mask_numbers, opened
    from ipucnn.datasets.segmentation.masks import MaskSet

    agreeing, joined = MaskSet(None), None
    for path in masks:
        origin = f"mask {shown(path)}"
        with opened(read_file(str(path)), origin, hint=MASK_HINT, strict=True) as file:
            num_pages, mask = file.num_pages, mask_numbers(file.page(), origin)
        agreeing.check(mask, origin)
        numbers = mask.numbers
        if numbers.ndim == 3 and (numbers == numbers[..., :1]).all():
            numbers = numbers[..., 0]
        joined = numbers if joined is None else joined
        if num_pages > 1 or numbers.ndim > 2 or numbers.shape != joined.shape or mask.form.orientation != 1:
            reason = "it has several pages, colours, another size than the one before, or is turned"
            raise DataError(f"{origin} cannot be joined with others: {reason}", "join them yourself")
        if two_values and numbers.max() > _WHITE:
            raise DataError(
                f"{origin} has numbers up to {numbers.max()}, more than 8 bits", "save it as 8-bit grey"
            )
        joined = np.maximum(joined, numbers)
    pixels = np.asarray(joined)
    if two_values:
        pixels = np.where(pixels > _HALF, 255, 0)
    Image.fromarray(pixels.astype(np.uint8 if pixels.max() < 256 else np.uint16)).save(place)


def copies_as_png(folder: Path) -> Copies:
    """Returns the copies of :func:`copies_of_set`, with masks whose values are stored as they are."""
    copies = copies_of_set(folder)
    return {
        place.with_suffix(".png") if place.parent.name == "masks" else place: copies[place]
        for place in copies
    }


_OF_FOLDER = {
    "pairs": copies_of_set,
    TWO_VALUES: copies_as_png,
    "images": copies_without_masks,
    "names": copies_by_names,
    "lists": copies_by_lists,
}
_INTO_CLASSES = ("classes", "names", "lists")


def main(words: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    try:
        if len(words) == 5 and words[0] == "classes":
            folder, target = expand(words[4]), expand(words[3])
            copies = copies_of_classes(expand(words[1]), words[2], folder)
        elif len(words) == 4 and words[0] == "masks":
            folder, target = expand(words[3]), expand(words[2])
            copies = copies_of_pairs(words[1], folder)
        elif len(words) == 3 and words[0] in _OF_FOLDER:
            folder, target = expand(words[2]), expand(words[1])
            if not folder.is_dir():
                raise DataError(f"there is no folder {shown(folder)}", "check the path")
            copies = _OF_FOLDER[words[0]](folder)
        else:
            raise ConfigurationError(
                "sorting takes: classes TABLE COLUMN TARGET FOLDER, masks KIND TARGET FOLDER, pairs TARGET FOLDER, "
                "two-values TARGET FOLDER, images TARGET FOLDER, names TARGET FOLDER, or lists TARGET FOLDER",
                "the hint of `ipucnn verify-dataset FOLDER` has the words",
            )
        if not copies:
            wanted = CLASS_LAYOUT if words[0] in _INTO_CLASSES else PAIR_LAYOUT
            raise DataError(f"{shown(folder)} has nothing to copy by {words[0]}", wanted)
        count = counted(sum(map(len, copies.values())), "file")
        if sys.stderr.isatty():
            print(f"copying {count} of {shown(folder)} into {shown(target)} ...", file=sys.stderr)
        copy_files(folder, copies, target, words[0] == TWO_VALUES)
    except UserError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(
            "error: interrupted; nothing is left of the copy\nhint: give the command again", file=sys.stderr
        )
        return 130
    folders = {place.parent.name for place in copies} if words[0] in _INTO_CLASSES else set()
    into = f", in {counted(len(folders), 'class folder')}: {some_of(folders)}" if folders else ""
    print(f"{count} of {shown(folder)} copied into {shown(target)}{into}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
