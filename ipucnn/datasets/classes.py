"""Which class is which: classes are their names, and a set without names has numbers.

A network that was trained on one set meets the classes of another in :func:`match`.
"""

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, replace
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np

from ipucnn.datasets.base import CLASSES_FILE, DatasetInfo, DataSource, Examples, MaskedExamples, joined
from ipucnn.errors import DataError
from ipucnn.text import counted, printable

BACKGROUND, FOREGROUND = "background", "foreground"
MOST_NAMED = 10


def default_mask_names(values: Sequence[int]) -> Tuple[str, ...]:
    """Returns the names of mask classes that nobody named: background and foreground, or "class 1", "class 2", ..."""
    if len(values) <= 2:
        return BACKGROUND, FOREGROUND
    return (BACKGROUND, *(f"class {value}" for value in values[1:]))


def are_numbers(names: Sequence[str]) -> bool:
    """Returns whether nobody named the classes: their names are empty, numbers in any order, or the masks' own."""
    is_unnamed = not any(names) or tuple(names) == default_mask_names(range(len(names)))
    return is_unnamed or _numbers(names) is not None


def _numbers(names: Sequence[str]) -> Optional[Tuple[int, ...]]:
    """Returns the numbers that name the classes, all from 0 or from 1; None for other names.

    Folders are sorted as text, 0, 1, 10, 2, and may have zeros in front.
    """
    if not all(re.fullmatch("[0-9]{1,9}", name) for name in names):
        return None
    numbers = tuple(map(int, names))
    first = min(numbers, default=0)
    is_whole = first in (0, 1) and sorted(numbers) == list(range(first, first + len(numbers)))
    return numbers if is_whole else None


def _labels_by_number(names: Sequence[str], trained: Sequence[str]) -> Optional[Tuple[int, ...]]:
    """Returns the network's class for each class of a set; those that numbers do not name are numbered in order.

    The result is None if the numbers of one of the two alone begin with 1: which class they mean is not known.
    """
    numbers, outputs = _numbers(names), _numbers(trained)
    if _is_from_1(numbers) != _is_from_1(outputs):
        return None
    output_of = {number: k for k, number in enumerate(range(len(trained)) if outputs is None else outputs)}
    return tuple(output_of[number] for number in (range(len(names)) if numbers is None else numbers))


def _is_from_1(numbers: Optional[Sequence[int]]) -> bool:
    return numbers is not None and min(numbers) == 1


@dataclass(frozen=True)
class Matched:
    """The classes of a data set among those of a trained network.

    Attributes:
        labels: for each class of the set, its number in the network.
        note: what was assumed or left out, in one line; "" if the classes are the same in the same order.
        by_number: whether one of the two has no names.
    """

    labels: Tuple[int, ...]
    note: str = ""
    by_number: bool = False


def match(names: Sequence[str], trained: Sequence[str], dataset: str, network: str, hint: str) -> Matched:
    """Matches the classes of a data set with those of a trained network, by name if both have names.

    The same letters in another Unicode form are one name.  Upper and lower case are different.

    Args:
        names: the classes of the data set.
        trained: the classes of the network; empty text for each if their names are not known.
        dataset, network: their names, for messages.
        hint: what to do if the numbers of classes differ.

    Raises:
        DataError: the set has classes that the network lacks, or numbers whose classes are not known.
    """
    if list(names) == list(trained):
        return Matched(tuple(range(len(names))))
    (name, count), *_ = Counter(map(_form, names)).most_common(1) or [("", 0)]
    if count > 1:
        raise DataError(
            f"data set {dataset} has {counted(count, 'class')} of the name {printable(name)}, and the classes of "
            f"{network} have others, so they cannot be matched by name",
            "give each class a name of its own",
            "unknown-class",
        )
    known = {_form(name): number for number, name in enumerate(trained)}
    unknown = [name for name in names if _form(name) not in known]
    if not unknown:
        labels = tuple(known[_form(name)] for name in names)
        return Matched(labels, _note_of_names(labels, names, trained, dataset))
    if are_numbers(names) or are_numbers(trained):
        # Arrays without the last classes.  Of a network without names, only the number of classes can be compared.
        may_lack = are_numbers(names) and (any(trained) or len(names) == 1)
        fits = len(names) <= len(trained) if may_lack else len(names) == len(trained)
        if not fits:
            classes = counted(len(trained), "class")
            both = f": its classes are {_listed(names)}, and the network's are {_listed(trained)}"
            raise DataError(
                f"{network} has {classes}, data set {dataset} has {len(names)}{both if any(trained) else ''}",
                hint,
            )
        by_number = _labels_by_number(names, trained)
        moved = _moved(names, trained, by_number or range(len(names)))
        if moved:
            others = "" if moved[0].isdigit() else "; their other classes have other names"
            raise DataError(
                f"{printable(moved[0])} is class {names.index(moved[0])} of data set {dataset}, and class "
                f"{known[_form(moved[0])]} of {network}{others}",
                "give the classes the network's names, in any order",
                "unknown-class",
            )
        if by_number is None:
            raise _numbered_from_1(names, trained, dataset, network)
        nameless = dataset if are_numbers(names) else network
        ours = dataset if nameless == dataset else f"{dataset}, {_listed(names)},"
        theirs = f", {_listed(trained)}" if any(trained) else ""
        what = _namelessness(names if nameless == dataset else trained)
        how = _how(names, trained)
        note = f"the classes of {nameless} {what}: those of {ours} are compared {how} with the network's"
        return Matched(by_number, note + theirs, True)
    raise DataError(
        f"data set {dataset} has classes that {network} does not know: {_listed(unknown)}; its classes are "
        f"{_listed(names)}, and the network's are {_listed(trained)}",
        _spelling(unknown, trained) or "give images of the network's classes, under the same names",
        "unknown-class",
    )


def by_stored_values(matched: Matched, info: DatasetInfo, trained: DatasetInfo) -> Matched:
    """Returns the classes of masks without names by their stored values, if the network has more than two classes.

    A set that lacks a class in between would otherwise have the classes behind it under other numbers.

    Args:
        matched: what :func:`match` found by number.
        info, trained: the facts of the set and of that of training.

    Raises:
        DataError: the set has a value that training had not.
    """
    ours, theirs = info.mask_values, trained.mask_values
    if len(theirs) <= 2 or not ours or ours == theirs[: len(ours)]:
        return matched
    if not {*ours} <= {*theirs}:
        raise DataError(
            f"the masks of {info.name} have the values {', '.join(map(str, ours))}, and those of training "
            f"{', '.join(map(str, theirs))}",
            f"say in {CLASSES_FILE} of both sets which value is which class, or save masks with the values of training",
            "unknown-class",
        )
    pairs = (f"{value} {printable(trained.class_names[theirs.index(value)])}" for value in ours)
    note = f"the classes of {info.name} have no names: those of training have their stored values, {', '.join(pairs)}"
    return Matched(tuple(map(theirs.index, ours)), note, True)


def _numbered_from_1(names: Sequence[str], trained: Sequence[str], dataset: str, network: str) -> DataError:
    ours, theirs = f"data set {dataset}", network
    hint = "give the classes the network's names, in any order"
    if not _is_from_1(_numbers(names)):
        ours, theirs = theirs, ours
    elif not any(trained):
        hint = "name each class by the number of its output of the network; the first is 0"
    return DataError(
        f"the classes of {ours} are numbered from 1 to {max(len(names), len(trained))}, and those of {theirs} are not: "
        "which class is which is not known",
        hint,
        "unknown-class",
    )


def _how(names: Sequence[str], trained: Sequence[str]) -> str:
    """Returns how classes are compared if one of the two sides has no names."""
    return "by position" if _numbers(names) is None and _numbers(trained) is None else "by number"


def order_note(names: Sequence[str], dataset: str, network: str) -> List[str]:
    """Returns a note that a network's outputs, whose classes nobody named, are the classes of a data set in order."""
    if are_numbers(names) and list(names) == _in_order(names):
        return []
    return [
        f"{network} does not name its classes: its outputs are those of {dataset}, in the order {_listed(names)}"
    ]


def are_same(names: Sequence[str], trained: Sequence[str]) -> bool:
    """Returns whether a network's outputs fit the classes of a set: the same names in the same order.

    If one of the two has no names, equally many classes suffice.
    """
    if len(names) != len(trained):
        return False
    if list(map(_form, names)) == list(map(_form, trained)):
        return True
    labels, nameless = _labels_by_number(names, trained), are_numbers(names) or are_numbers(trained)
    return nameless and labels == tuple(range(len(names))) and not _moved(names, trained, labels)


def _namelessness(names: Sequence[str]) -> str:
    """Returns what is to be said of classes that :func:`are_numbers`; those of folders may be called so."""
    return "have numbers for names" if all(name.isdigit() for name in names) else "have no names"


def _moved(names: Sequence[str], trained: Sequence[str], labels: Sequence[int]) -> List[str]:
    """Returns the names that another class of the network has than the one in ``labels``."""
    known = {_form(name): number for number, name in enumerate(trained) if name}
    return [name for name, label in zip(names, labels) if known.get(_form(name), label) != label]


def _in_order(names: Sequence[str]) -> List[str]:
    """Returns the names, those that are numbers in the order of their numbers."""
    numbers = _numbers(names)
    return list(names) if numbers is None else [name for _, name in sorted(zip(numbers, names))]


def in_order_of(source: DataSource, trained: Sequence[str]) -> DataSource:
    """Returns a source whose classes have the numbers of a network to start from, if they have the same names.

    Other classes keep their numbers.  A warning of the source says what was assumed.
    """
    info = source.info
    known = list(map(_form, trained))
    if len(known) == info.num_classes and sorted(map(_form, info.class_names)) != sorted(known):
        # The network knows the classes by number alone, and folders are sorted as text.
        source = _in_order_of_numbers(source)
    names, note = list(map(_form, source.info.class_names)), ""
    if names != known and sorted(names) == sorted(known):
        source = relabelled(source, [known.index(name) for name in names], trained)
        note = f"the classes of {info.name} are numbered as those of the weights to start from: {_listed(trained)}"
    elif names != known and are_same(names, known):
        nameless = f"data set {info.name}" if are_numbers(names) else "the weights to start from"
        unnamed, named = (names, trained) if are_numbers(names) else (trained, info.class_names)
        how = _how(names, trained)
        note = (
            f"the classes of {nameless} {_namelessness(unnamed)}, and the last layer keeps its weights {how}"
        )
        note += f": {_listed(named)}" if any(named) else ""
    if not note:
        return source
    return replace(source, info=replace(source.info, warnings=(*source.info.warnings, note)))


def _in_order_of_numbers(source: DataSource) -> DataSource:
    """Returns a source whose classes, if numbers name them, are in the order of their numbers."""
    names = source.info.class_names
    ordered = _in_order(names)
    return source if ordered == list(names) else relabelled(source, [*map(ordered.index, names)], ordered)


def _form(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def _note_of_names(labels: Sequence[int], names: Sequence[str], trained: Sequence[str], dataset: str) -> str:
    missing = [name for number, name in enumerate(trained) if number not in labels]
    if missing:
        return (
            f"data set {dataset} has {len(names)} of the network's {len(trained)} classes, matched by name; "
            f"without images: {_listed(missing)}"
        )
    if list(labels) != list(range(len(labels))):
        return f"the classes of {dataset} come in another order than the network's, and are matched by name"
    return ""


def _spelling(unknown: Sequence[str], trained: Sequence[str]) -> str:
    """Returns a hint if the unknown names are those of the network in another case."""
    spelled = {_form(name).casefold(): name for name in trained}
    pairs = [(name, spelled.get(_form(name).casefold())) for name in unknown]
    renames = [f"{printable(name)} to {printable(other)}" for name, other in pairs if other is not None]
    if not renames:
        return ""
    return f"if they are the same classes, rename {', '.join(renames[:MOST_NAMED])}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(printable(name) for name in names[:MOST_NAMED]) + more


def relabelled(source: DataSource, labels: Sequence[int], names: Sequence[str]) -> DataSource:
    """Returns a source whose class k has the label ``labels[k]``, of the classes ``names``.

    Pixels that are ignored, whose labels are negative, stay so.  Values and colours of masks move with their classes;
    if some of ``names`` are no classes of the source, theirs are not known, and there are none.
    """
    table: np.ndarray = np.array(labels)

    def changed(examples: Examples) -> Examples:
        old = examples.labels
        return replace(examples, labels=np.where(old < 0, old, table[np.maximum(old, 0)]).astype(old.dtype))

    order = [labels.index(number) for number in range(len(names)) if number in labels]
    info = source.info
    are_known = len(order) == len(names)
    colours, values = info.class_colours if are_known else (), info.mask_values if are_known else ()
    info = replace(
        info,
        num_classes=len(names),
        class_names=tuple(names),
        class_colours=tuple(colours[k] for k in order) if colours else (),
        mask_values=tuple(values[k] for k in order) if values else (),
    )
    if list(labels) == list(range(len(labels))):
        return replace(source, info=info)
    return replace(source, info=info, train=changed(source.train), eval=changed(source.eval))


def written_alike(names: Sequence[str]) -> List[str]:
    """Returns "'cat' and 'Cat'" for each class whose name differs from an earlier one only in case and blanks."""
    known: Dict[str, str] = {}
    pairs = []
    for name in names:
        first = known.setdefault(" ".join(_form(name).casefold().split()), name)
        if first is not name:
            pairs.append(f"'{printable(first)}' and '{printable(name)}'")
    return pairs


def alike_line(location: str, pairs: Sequence[str]) -> str:
    """Returns a warning about :func:`written_alike` names in a place."""
    more = f" and {len(pairs) - MOST_NAMED} more pairs" if len(pairs) > MOST_NAMED else ""
    return (
        f"{location}: classes whose names differ only in case or blanks: {', '.join(pairs[:MOST_NAMED])}{more}; join "
        "them if they are one class"
    )


def absent(examples: Examples, names: Sequence[str]) -> List[str]:
    """Returns the classes of which no image, or no pixel of a mask, is among the examples."""
    labels = examples.labels
    if labels.ndim == 1 and not isinstance(examples, MaskedExamples):
        counts = np.bincount(labels, minlength=len(names))
        return [name for name, count in zip(names, counts) if not count]
    return [name for number, name in enumerate(names) if not (labels == number).any()]


def with_absent_named(source: DataSource, location: str) -> DataSource:
    """Returns the source with a warning for each part that lacks classes; ``location`` names it."""
    info, lines = source.info, _absent_lines(source, location)
    return replace(source, info=replace(info, warnings=(*info.warnings, *lines))) if lines else source


def _absent_lines(source: DataSource, location: str) -> List[str]:
    info, lines = source.info, []
    what = "pixels" if info.task == "segmentation" else "images"
    for examples, purpose in ((source.train, "training"), (source.eval, "evaluation")):
        names = absent(examples, info.class_names)
        if names:
            lines.append(f"{printable(location)}: no {what} for {purpose} in {_listed(names)}")
    return lines


def placed(names: Sequence[str], labels: Sequence[int]) -> Tuple[str, ...]:
    """Returns the names of a set's classes in the order of the labels that they have in a network."""
    return tuple(name for _, name in sorted(zip(labels, names)))


def undivided(source: DataSource) -> DataSource:
    """Returns a set that ipucnn divided as a whole, which both parts have then, without warnings about the division."""
    examples, info = joined(source.train, source.eval), source.info
    whole = DataSource(info, examples, examples)
    of_parts, of_whole = (_absent_lines(one, info.location) for one in (source, whole))
    stale = {info.division, *of_parts} - {*of_whole}
    count = len(examples)
    return replace(
        whole,
        info=replace(
            info,
            num_train=count,
            num_eval=count,
            division="",
            warnings=tuple(line for line in info.warnings if line not in stale),
        ),
    )
