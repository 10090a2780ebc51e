"""Reading of masks, and mapping of their values to classes.

A mask has the class of each pixel.  With two classes, it has 0 and any one other value (for example 255 or 1).  With
more, it has the classes' numbers 0, 1, 2, ..., or a table, such as ``classes.txt``, defines the value or the colour of
each class.  Its line called "ignore" defines the value of pixels that count nowhere.
"""

import csv
import re
from contextlib import suppress
from pathlib import Path
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from ipucnn.datasets.base import CLASSES_FILE as TABLE
from ipucnn.datasets.base import class_lines
from ipucnn.datasets.classes import default_mask_names
from ipucnn.datasets.forms import LARGEST_VALUE, Mask, pillow
from ipucnn.datasets.segmentation.patches import IGNORED
from ipucnn.documents import read_record
from ipucnn.errors import DataError
from ipucnn.filesystem import open_regular
from ipucnn.text import counted, printable, quoted, shown_value

IGNORE = "ignore"
"""The name, in a table, of the value whose pixels are left out of the loss and of all scores, as in nnU-Net."""
_OFTEN_IGNORED = ("void", "ignored", "unlabeled", "unlabelled", "dontcare", "don't care", "dont care")
"""What other programs call pixels that do not count; here they are classes."""
MOST_FOUND = 10
"""The most classes of masks without a table: more values come from smoothed edges, or from one number per object."""
MOST_CLASSES = 255
SHOWN_FIRST = "membrane"
"""The name of a first of two classes that is the one to segment, as in ISBI 2012's challenge."""
EVERY_OTHER = -1
"""The value of the class whose line in a table begins with ``*``: all values that no other line has."""
TABLE_HINT = (
    f"say in DIR/{TABLE} which value is which class, one per line: '0 background', '128 nucleus', ..."
)

TWO_VALUES = "save them as PNG of two values, 255 where a value is above 127 and 0 elsewhere"
"""What to do with masks of two classes that have smoothed edges."""
ONE_CLASS = f"write two lines into DIR/{TABLE}: '0 background' and '* object'"
"""How to make all objects that masks number one class."""


_FIRST_BRIGHT = 128
"""Beside smaller values, 255 is a border or unlabelled, as in Pascal VOC and Cityscapes."""


def table_command(folder: Path, values: Sequence[Tuple[int, ...]], has_border: bool = True) -> str:
    """Returns the hint with the command that writes a table of a folder, whose names the user is to change.

    Args:
        values: the grey values or colours of the masks, in ascending order.
        has_border: whether 255 may be a border or unlabelled pixels.
    """
    is_border = has_border and values[-1] == (255,) and len(values) > 2 and values[-2] < (_FIRST_BRIGHT,)
    lines = []
    for number, value in enumerate(values):
        name = f"class {value[0] if len(value) == 1 else number}" if any(value) else "background"
        name = IGNORE if is_border and value == (255,) else name
        lines.append(quoted(f"{' '.join(map(str, value))} {name}"))
    ignored = f"; {IGNORE} counts nowhere" if is_border else ""
    return (
        f"say which value is which class, with names of yours{ignored}: "
        f"printf '%s\\n' {' '.join(lines)} > {quoted(folder / TABLE)}"
    )


def one_class_command(folder: Path) -> str:
    """Returns the command that writes a table of a folder in which all values but 0 are one class."""
    return f"printf '%s\\n' '0 background' '* object' > {quoted(folder / TABLE)}"


class MaskClasses(NamedTuple):
    """The classes of masks and their values.

    Attributes:
        names: names of the classes 0, 1, 2, ...
        values: the value of each class: a grey value, or red * 65536 + green * 256 + blue.
        colours: whether values are colours.
        any_other: whether every value except that of class 0 is class 1.
        ignored: the value of pixels that do not count, if a table names one.
        table: the name of the table's file.
    """

    names: Tuple[str, ...]
    values: Tuple[int, ...]
    colours: bool = False
    any_other: bool = False
    ignored: Optional[int] = None
    table: str = TABLE

    def of(self, mask: np.ndarray, origin: str) -> np.ndarray:
        """Returns the classes, uint8 [h, w], of a mask [h, w], or [h, w, 3] of colours.

        With ``ignored``, they are int16, and IGNORED at the pixels of that value.

        Raises:
            DataError: the mask has a value that is not in ``values``, or all its pixels are ignored.
        """
        flat = codes(mask, self.colours, origin)
        if self.any_other:
            return (flat != self.values[0]).astype(np.uint8)
        values = list(self.values)
        classes: np.ndarray = np.arange(len(values), dtype=np.uint8)
        if self.ignored is not None:
            values.append(self.ignored)
            classes = np.append(classes.astype(np.int16), np.int16(IGNORED))
        order = np.argsort(values)
        known = np.array(values, np.int64)[order]
        places = np.minimum(np.searchsorted(known, flat), len(known) - 1)
        wrong = known[places] != flat
        if EVERY_OTHER in values:
            places[wrong] = 0  # EVERY_OTHER is the smallest value
        elif wrong.any():
            value = int(flat[wrong][0])
            shown = (
                " ".join(map(str, (value >> 16, value >> 8 & 255, value & 255)))
                if self.colours
                else str(value)
            )
            hint = f"name that value in {TABLE}, or correct the mask: no smoothing, no JPEG compression"
            if self.table != TABLE:
                hint = f"correct {self.table}, or the mask, or name all values in DIR/{TABLE}: '0 background', ..."
            raise DataError(
                f"{origin} has {counted(int(wrong.sum()), 'pixel')} of no class; the first one has the value {shown}",
                hint,
                "mask-values",
            )
        result: np.ndarray = classes[order][places]
        if (result == IGNORED).all():
            raise DataError(
                f"{origin} has no pixel that counts: all have the value of {IGNORE}",
                "remove the mask and its image, or mark a part of it",
                "mask-values",
            )
        return result


class MaskSet:
    """Rejects masks whose stored numbers mean different things in different files of a set; add one after another.

    Args:
        table: the table of the set, if it has one.
    """

    def __init__(self, table: Optional[MaskClasses]) -> None:
        self._table = table
        self._palettes: List[Tuple[str, np.ndarray, np.ndarray]] = []
        self._plain = self._indexed = ""
        self._greys: Set[int] = set()
        self._have_same_zero = True

    def check(self, mask: Mask, origin: str) -> None:
        """Rejects a mask that does not agree with those before it.

        Raises:
            DataError: its palette gives a number another colour than the palette of an earlier mask, gives brighter
                greys to smaller numbers, or gives other greys than its numbers if masks without a palette have greys.
        """
        palette = mask.form.palette
        if (self._table is not None and self._table.colours) or mask.numbers.ndim > 2:
            return
        values = np.array(mask_values(mask.numbers))
        if palette is None:
            self._plain = self._plain or origin
            self._check_greys(values, values, origin)
            return
        values = values[values < len(palette)]  # a number beyond, such as 255, has no colour
        colours = palette[values].astype(int)
        is_grey = (colours == colours[:, :1]).all()
        if is_grey and (np.diff(colours[:, 0]) < 0).any():
            raise DataError(
                f"{origin} has a palette in which larger numbers are darker greys",
                _PALETTE_HINT,
                "mask-values",
            )
        for earlier, known, known_colours in self._palettes:
            common = np.isin(values, known)
            if (colours[common] != known_colours[np.isin(known, values)]).any():
                raise DataError(
                    f"{origin} has another palette than {earlier}: their numbers mean different colours",
                    _PALETTE_HINT,
                    "mask-values",
                )
        if not any(np.array_equal(values, known) for _, known, _ in self._palettes):
            self._palettes.append((origin, values, colours))
        if is_grey and (colours[:, 0] != values).any():
            self._indexed = self._indexed or origin
            self._check_greys(values, colours[:, 0], origin)

    def _check_greys(self, numbers: np.ndarray, greys: np.ndarray, origin: str) -> None:
        """Rejects a mask if numbers of a palette of greys and greys without one stand for different classes.

        They agree if all pixels but those of 0 are one class.
        """
        self._greys.update(greys.tolist())
        self._have_same_zero &= bool(np.array_equal(numbers == 0, greys == 0))
        has_one_object = len(self._greys - {0}) < 2 if self._table is None else self._table.any_other
        if self._plain and self._indexed and not (self._have_same_zero and has_one_object):
            other = self._plain if origin == self._indexed else self._indexed
            raise DataError(
                f"{origin} and {other} mean different greys by their numbers: one of them has a palette of greys",
                _PALETTE_HINT,
                "mask-values",
            )


_PALETTE_HINT = (
    f"name the colours in DIR/{TABLE}, one per line: '255 0 0 tumour', or save masks as grey: 0, 1, 2, ..."
)
BINARY = MaskClasses(default_mask_names((0, 255)), (0, 255), any_other=True)


def codes(mask: np.ndarray, colours: bool, origin: str) -> np.ndarray:
    """Returns the values of a mask as integers [h, w]: grey values, or each colour as one number.

    Without ``colours``, a colour mask whose pixels are all grey counts as a grey mask.

    Raises:
        DataError: the mask has colours and ``colours`` is False.
    """
    if mask.ndim == 2:
        if not colours:
            return mask
        mask = np.repeat(mask[..., np.newaxis], 3, axis=2)
    if colours:
        return (mask.astype(np.int64) * (65536, 256, 1)).sum(axis=2)
    if (mask == mask[..., :1]).all():
        return mask[..., 0]
    raise DataError(
        f"{origin} has colours, and no table says what they mean",
        f"name them in DIR/{TABLE}, one per line: '255 0 0 tumour', or save masks as grey: 0, 1, 2, ...",
        "wrong-mode",
    )


LABEL_MAP = "labelmap.txt"
"""The file in which CVAT and Datumaro describe masks of colours: ``NAME:RED,GREEN,BLUE:PARTS:ACTIONS``."""
VALUE_TABLE = "_classes.csv"
"""The file in which Roboflow describes masks: ``Pixel Value, Class``, and a row for each class."""
DESCRIPTION = "dataset.json"
"""The file in which nnU-Net describes a set."""
_VALUE_COLUMNS = r"\s*pixel value\s*,\s*class\s*(\n|$)"
_LABEL = r"([^:]+):(\d{1,3}),(\d{1,3}),(\d{1,3}):[^:]*:[^:]*"
_Rows = Sequence[Tuple[Tuple[int, ...], str]]


def table_in(folder: Path) -> Optional[Path]:
    """Returns the file of a folder that defines the values of masks, ``classes.txt`` before others; None without one.

    nnU-Net's, which is read in sets of nnU-Net alone, is none of them.
    """
    is_table: Dict[str, Callable[[str], bool]] = {
        LABEL_MAP: lambda text: any(re.fullmatch(_LABEL, line.strip()) for line in text.splitlines()),
        VALUE_TABLE: lambda text: bool(re.match(_VALUE_COLUMNS, text, re.IGNORECASE)),
    }
    for path in (folder / TABLE, folder / LABEL_MAP, folder / VALUE_TABLE):
        if path.is_file() and (path.name == TABLE or is_table[path.name](_beginning(path))):
            return path
    return None


def _beginning(path: Path) -> str:
    """Returns the first characters of a file; other programs' files of these names may be anything."""
    with suppress(DataError, OSError), open_regular(path) as file:
        return file.read(2**16).decode("utf-8-sig", "replace")
    return ""


def read_table(path: Path) -> MaskClasses:
    """Reads the file that defines the values of masks.

    Raises:
        DataError: it cannot be read, or has another format.
    """
    if path.name == DESCRIPTION:
        return _read_description(path)
    origin = printable(str(path))
    if path.name == TABLE:
        return _classes_of(
            _own_rows(path), origin, "write one class per line: '0 background' or '255 0 0 tumour'"
        )
    hint = f"correct it, or name the classes in {quoted(path.parent / TABLE)}, one per line: '0 background'"
    rows: List[Tuple[Tuple[int, ...], str]] = []
    for number, line in class_lines(path)[path.name == VALUE_TABLE :]:
        if path.name == LABEL_MAP:
            label = re.fullmatch(_LABEL, line)
            name, *numbers = label.groups() if label else ("",)
            most = 255
        else:
            name, numbers = _value_and_name(line)
            most = LARGEST_VALUE
        name, value = name.strip(), tuple(map(int, filter(_is_number, numbers)))
        if not name or not name.isprintable() or not value or max(value) > most:
            raise DataError(f"{origin}, line {number}: {printable(line)!r} is no class and its value", hint)
        rows.append((value, _class_name(name)))
    return _classes_of(rows, origin, hint)._replace(table=path.name)


def _value_and_name(line: str) -> Tuple[str, List[str]]:
    """Returns the name in a line of Roboflow's table, and the value in a list; nothing if there is something else."""
    with suppress(csv.Error):
        cells = [cell.strip() for row in csv.reader([line], skipinitialspace=True) for cell in row]
        if len(cells) == 2:
            return cells[1], cells[:1]
    return "", []


def _own_rows(path: Path) -> _Rows:
    """Returns the values and names in ``classes.txt``.

    Each line is ``VALUE NAME`` or ``RED GREEN BLUE NAME``, and one may be ``* NAME`` for all other values.  Its
    position, from 0, is its class; a class called background comes first wherever its line is, because mean scores and
    pictures leave class 0 out.  The line of the name "ignore" is no class.  Blank lines and lines that begin with # are
    skipped.

    Raises:
        DataError: the file cannot be read, or has another format.
    """
    rows: List[Tuple[Tuple[int, ...], str]] = []
    for number, line in class_lines(path):
        words = line.split()
        if words[0] == "*" and len(words) > 1:
            rows.append(((), _class_name(" ".join(words[1:]))))
            continue
        count = next((i for i, word in enumerate(words) if not _is_number(word)), len(words))
        name = " ".join(words[count:])
        value = tuple(int(word) for word in words[:count])
        most = LARGEST_VALUE if count == 1 else 255
        if count not in (1, 3) or not name or not name.isprintable() or max(value) > most:
            raise DataError(
                f"{printable(str(path))}, line {number}: {printable(line)!r} is no class",
                "write one class per line: '0 background' or '255 0 0 tumour'",
            )
        rows.append((value, _class_name(name)))
    return rows


def _classes_of(rows: _Rows, origin: str, hint: str) -> MaskClasses:
    """Returns the classes of a table: that of the background first, the others in the table's order.

    Raises:
        DataError: they are too few or too many, or two of them have one value or one name.
    """
    rows = sorted(rows, key=lambda row: not is_background(row[1]))
    values, names = [value for value, _ in rows], [name for _, name in rows]
    num_classes = len(names) - names.count(IGNORE)
    if not 2 <= num_classes <= MOST_CLASSES:
        raise DataError(
            f"{origin} has {counted(num_classes, 'class')}; a mask has from 2 to {MOST_CLASSES}", hint
        )
    lengths = {len(value) for value in values if value}
    if len(lengths) > 1:
        raise DataError(f"{origin} has both grey values and colours", hint)
    for column, entries in (("value", values), ("name", names)):
        repeated = [one for i, one in enumerate(entries) if one in entries[:i]]
        if repeated:
            shown = repeated[0] if isinstance(repeated[0], str) else " ".join(map(str, repeated[0])) or "*"
            raise DataError(f"{origin} has the {column} {shown} twice", hint)
    colours = lengths == {3}
    packed = [_packed(value) for value in values]
    ignored = packed.pop(names.index(IGNORE)) if IGNORE in names else None
    return MaskClasses(
        tuple(name for name in names if name != IGNORE), tuple(packed), colours, False, ignored
    )


def _read_description(path: Path) -> MaskClasses:
    """Reads the labels of nnU-Net's ``dataset.json``.

    Version 2 has ``{"labels": {NAME: VALUE}}``, and the label called "ignore" is no class; version 1 has
    ``{"labels": {VALUE: NAME}}``.

    Raises:
        DataError: the file cannot be read, or its labels are no single values.
    """
    hint = f"correct it, or name the classes in DIR/{TABLE}, one per line: '0 background', '1 nucleus', ..."
    about = read_record(path, hint)
    labels = about.get("labels") if isinstance(about, dict) else None
    rows: Dict[str, object] = {}
    for key, value in (labels if isinstance(labels, dict) else {}).items():
        is_first = isinstance(value, str)
        rows[_class_name(str(value) if is_first else key)] = (
            int(key) if is_first and _is_number(key) else value
        )
    values = [value for value in rows.values() if type(value) is int and 0 <= value <= LARGEST_VALUE]
    if len(values) < len(rows) or len(set(values)) < max(2, len(labels or ())):
        text = (
            f"{printable(str(path))} has the labels {shown_value(labels)}: each name has one value of its own"
        )
        raise DataError(text, hint)
    ordered = sorted((value, name) for value, name in zip(values, rows) if name != IGNORE)
    names = tuple(name for _, name in ordered)
    ignored = dict(zip(rows, values)).get(IGNORE)
    return MaskClasses(names, tuple(value for value, _ in ordered), ignored=ignored)


def _packed(value: Sequence[int]) -> int:
    """Returns the value of a line of a table as one number; no numbers stand for every other value."""
    if not value:
        return EVERY_OTHER
    return value[0] * 65536 + value[1] * 256 + value[2] if len(value) == 3 else value[0]


def have_grey_edges(masks: Sequence[Sequence[int]]) -> bool:
    """Returns whether masks have values from black to white, as those saved as JPEG, or smoothed.

    Objects are numbered without gaps, and beside few classes there is at most a value such as 255 that does not count.
    """
    many = [values for values in masks if len(values) > 2]
    return bool(many) and all(
        max(values) >= 240 > len(values) >= 12
        and 3 <= sum(value >= 128 for value in values) <= len(values) - 3
        for values in many
    )


# Objects that are coloured one by one seldom have more colours in all masks together; smoothed edges have dozens.
_MANY_COLOURS = 12


def other_values(classes: MaskClasses, masks: Iterable[np.ndarray]) -> List[str]:
    """Returns which values of masks the line ``* NAME`` of a table makes one class; nothing if that is one value.

    Args:
        classes: the classes of the table.
        masks: the stored numbers of each mask.
    """
    if EVERY_OTHER not in classes.values:
        return []
    of_each = []
    for mask in masks:
        with suppress(DataError):  # a mask of other pixels, which the classes refuse
            values = codes(mask, classes.colours, "")
            of_each.append(np.unique(values).tolist() if classes.colours else mask_values(values))
    others = sorted({value for values in of_each for value in values} - {*classes.values, classes.ignored})
    if len(others) < 2:
        return []
    name = printable(classes.names[classes.values.index(EVERY_OTHER)])
    kind = "colour" if classes.colours else "value"
    ends = "" if classes.colours else f" ({others[0]} to {others[-1]})"
    text = f"{counted(len(others), kind)} of masks{ends} that no other line of {TABLE} names are {name}"
    if have_grey_edges(of_each) or (classes.colours and len(others) >= _MANY_COLOURS):
        text += "; if they are smoothed edges (JPEG, anti-aliasing), save masks of one value for each class"
    return [text]


def check_no_objects(masks: Sequence[Sequence[int]], subject: str, two_values: str = TWO_VALUES) -> None:
    """Rejects masks without a table that seem to number objects: some have other numbers of values than others.

    Args:
        masks: the distinct values of each mask.
        subject: subject and verb of the message: "the masks of DIR".
        two_values: how to make masks with smoothed edges black and white.

    Raises:
        DataError: the numbers of values differ, and there are more than two values.
    """
    counts = [len(values) for values in masks]
    if have_grey_edges(masks):
        raise DataError(
            f"{subject} have up to {max(counts)} different values between black and white, as masks with grey edges "
            "have (saved as JPEG, or smoothed)",
            f"{two_values}; if the values are objects, {ONE_CLASS}; if they are classes, name each of them there",
            "mask-values",
        )
    if len({value for values in masks for value in values if value}) < 2 or len(set(counts)) == 1:
        return
    raise DataError(
        f"{subject} have from {min(counts)} to {max(counts)} different values, as masks that number single objects "
        "have (Cellpose, StarDist); the network tells classes apart, not objects",
        f"to make all objects one class, {ONE_CLASS}; if the values are classes, name each of them there",
        "mask-values",
    )


def _class_name(name: str) -> str:
    """Returns the name of a class as it is written, or ``IGNORE`` in whatever case that is."""
    return IGNORE if name.casefold() == IGNORE else name


def is_background(name: str) -> bool:
    """Returns whether a class is called background, as people and programs (LabelMe) call it."""
    return name.casefold().strip("_") in ("background", "bg")


def void_classes(classes: MaskClasses) -> List[str]:
    """Returns the names of classes, of more than two, that elsewhere mean pixels that do not count.

    So does 255 beside smaller values, whatever it is called.
    """
    if len(classes.names) == 2:
        return []
    is_border = not classes.colours and sorted(classes.values)[-2] < _FIRST_BRIGHT
    return [
        name
        for name, value in zip(classes.names, classes.values)
        if name.casefold() in _OFTEN_IGNORED or (is_border and value == 255)
    ]


def unnamed_values(classes: MaskClasses, is_named: bool) -> List[str]:
    """Returns the values of masks that are taken for classes, of more than two, without a table that names them."""
    return [] if is_named or len(classes.names) == 2 else [f"0 to {len(classes.names) - 1}"]


def notes_on_classes(classes: MaskClasses, is_named: bool, one_class: str = ONE_CLASS) -> List[str]:
    """Returns what is taken for granted about the classes: that such as "void" count, that the first is the background,
    and that values are classes.

    Args:
        classes: the classes.
        is_named: whether a table names them.
        one_class: what to do to make all objects that masks number one class.
    """
    void = [
        f"{printable(name)} is a class like the others; the name {IGNORE} leaves its pixels out of the loss and of all "
        "scores"
        for name in void_classes(classes)
    ]
    first, others = classes.names[0], classes.names[1:]
    left_out = []
    is_shown = first == SHOWN_FIRST and len(others) == 1
    if is_named and not is_background(first) and not is_shown:
        what = (
            "mean scores and pictures"
            if len(others) > 1
            else f"scores and pictures of {printable(others[0])}"
        )
        left_out = [f"{printable(first)} is class 0: {what} leave it out, as the background"]
    unnamed = [
        f"the values {values} of the masks are taken for classes; if they number objects, {one_class}"
        for values in unnamed_values(classes, is_named)
    ]
    return [*void, *left_out, *unnamed]


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= len(str(LARGEST_VALUE))


def classes_of_values(values: Sequence[int], subject: str) -> MaskClasses:
    """Returns the classes of a set without a table, from the values of all its masks.

    Args:
        values: the values in ascending order.
        subject: subject and verb of the message: "the masks of DIR have".

    Raises:
        DataError: the values are neither 0 and one other, nor 0, 1, 2, ... without a gap.
    """
    if len([value for value in values if value]) <= 1:
        return BINARY
    check_values(values, subject)
    if tuple(values) == tuple(range(len(values))) and len(values) > 2:
        return MaskClasses(default_mask_names(values), tuple(values))
    raise DataError(
        f"{subject} {_listed(values)}; a mask has 0 and one other value, or the classes 0, 1, 2, ... without a gap",
        TABLE_HINT,
        "mask-values",
    )


def check_values(values: Sequence[int], subject: str) -> None:
    """Rejects more values than ``MOST_FOUND``; the arguments are those of :func:`classes_of_values`.

    Raises:
        DataError: there are more.
    """
    if len(values) > MOST_FOUND:
        raise DataError(
            f"{subject} {_listed(values)}; a mask has one value for each class",
            "save masks without smoothing or JPEG compression; where each object has a number of its own, "
            f"{ONE_CLASS} (more than {MOST_FOUND} classes are named there)",
        )


def _listed(values: Sequence[int]) -> str:
    if len(values) == 2:
        return f"the values {values[0]} and {values[1]}"
    shown = ", ".join(map(str, values[:5])) + (", ..." if len(values) > 5 else "")
    return f"{len(values)} different values ({shown})"


def mask_values(masks: np.ndarray) -> Tuple[int, ...]:
    """Returns the distinct values of integers from 0 to 65535, in ascending order."""
    if masks.dtype == np.uint8 and masks.size:  # Pillow counts many times faster than NumPy
        flat = np.ascontiguousarray(masks).reshape(-1, masks.shape[-1])
        counts = np.array(pillow().fromarray(flat).histogram())
    else:
        counts = np.bincount(masks.reshape(-1), minlength=256)
    return tuple(int(value) for value in np.nonzero(counts)[0])
