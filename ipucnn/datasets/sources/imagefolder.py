"""An image folder with one subfolder per class, for images of any size and format.

Its layout is ``DIR/{train,val}/CLASS/*``, or ``DIR/CLASS/*`` with a share of each class held out for evaluation;
``formats.find_classes`` finds it.  Images in folders inside a class folder belong to the class.
"""

import hashlib
import os
from pathlib import Path
from typing import (
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import numpy as np

from ipucnn.datasets.base import DataSource, FileExamples, data_source
from ipucnn.datasets.classes import alike_line, written_alike
from ipucnn.datasets.formats import (
    CLASS_LAYOUT,
    EMPTY,
    LOOSE,
    MASK,
    READ,
    Found,
    MasksAsClasses,
    copy_of_classes,
    images_at,
    images_below,
    lifted,
    list_folder,
    masks_among,
    name_in_set,
    part_alone,
    part_named,
    passed_beside,
    same_name,
    subfolders,
    unwrapped,
)
from ipucnn.datasets.limits import HELD_OUT_SHARE, UNBALANCED
from ipucnn.datasets.masks_beside import masks_by_content
from ipucnn.datasets.problems import Passed, Problem, guarded, readable, unused_line, with_unused
from ipucnn.errors import DataError
from ipucnn.filesystem import shown
from ipucnn.text import counted, printable, quoted

MOST_EXAMPLES = 3
FEW_IMAGES = 20
"""Training warns about a class with fewer images."""


class ClassFolder(NamedTuple):
    """The images of a class in one part.

    Attributes:
        subset: "train" or "eval".
        name: name of the class.
        paths: the images, in the order of their names below the part.
    """

    subset: str
    name: str
    paths: Tuple[str, ...]


def read_folders(found: Found) -> Iterator[Union[ClassFolder, Problem]]:
    """Yields the class folders of a set, training first, and a problem for each image that is in none of them.

    A folder without images is a class in a part, and none in a set without parts.
    """
    names: Dict[str, Path] = {}
    for subset, absent, named in (
        ("train", "train", ("train",)),
        ("eval", "val, valid, validation or test", ("validation", "test")),
    ):
        if subset not in found.parts and not found.is_undivided:
            error = DataError(
                f"{found.location} is not an image folder: it lacks train/ or val/",
                CLASS_LAYOUT + part_alone(found),
                "missing-subset",
            )
            bare = [path.name for path in subfolders(found.location) if part_named(path.name) in named]
            reason = (
                f"there are no class folders in {printable(bare[0])}/"
                if bare
                else f"there is no folder {absent}"
            )
            yield Problem("missing-subset", subset, reason, error=error)
    for subset, (part,) in found.parts.items():
        shown_name = printable(name_in_set(part, found.location))
        yield from guarded(_part_folders(found, subset, part, names), subset, shown_name, part)
    if not found.is_undivided:
        used = [path for (path,) in found.parts.values()]
        yield from guarded(
            passed_beside(found.location, used, None, found.location), None, ".", found.location
        )


def _part_folders(
    found: Found, subset: str, part: Path, names: Dict[str, Path]
) -> Iterator[Union[ClassFolder, Problem]]:
    """Yields the class folders of a part; the first part adds its classes to ``names``."""
    is_first, classes = not names, set(subfolders(part))
    class_names = {same_name(path.name) for path in classes}
    for entry in list_folder(part):
        path = Path(entry.path)
        shown_name = printable(name_in_set(path, found.location))
        items = (
            images_below(path, shown_name, subset)
            if path in classes
            else images_at(entry, shown_name, subset)
        )
        paths: List[str] = []
        for item in guarded(items, subset, shown_name, path):
            if isinstance(item, Problem):
                yield item
            elif path in classes:
                paths.append(item)
            else:
                yield Problem("passed-over", subset, shown_name, LOOSE)
        if path not in classes:
            continue
        masks = masks_among(paths)
        for mask in sorted(masks):
            yield Problem("passed-over", subset, printable(name_in_set(mask, found.location)), MASK)
        paths = [image for image in paths if image not in masks]
        name = same_name(entry.name)
        error = _wrong_class(part, path, names, is_first)
        if error is None and any(os.path.dirname(image) != str(path) for image in paths):
            error = copy_of_classes(path, class_names)
        if error is not None and paths:
            yield Problem(error.code, subset, shown_name, counted(len(paths), "image"), error)
        elif not paths and found.is_undivided:
            yield Problem("passed-over", subset, shown_name, EMPTY)
        elif error is None:
            names.setdefault(name, path)
            yield ClassFolder(subset, name, tuple(paths))


def _wrong_class(part: Path, path: Path, names: Mapping[str, Path], is_first: bool) -> Optional[DataError]:
    """Returns the error about a folder that is no class of its own, or not one of training's classes; or None."""
    name = same_name(path.name)
    whole = unwrapped(path)
    inside = {part_named(below.name): below.name for below in subfolders(whole)}
    if "train" in inside and {"validation", "test"} & set(inside):
        return DataError(
            f"the class folder {shown(whole)} has parts of a data set in it, such as {printable(inside['train'])}/",
            f"if it is a data set of its own: --dataset {quoted(whole)}; else put the parts outside the classes: "
            f"{CLASS_LAYOUT[9:]}",
        )
    if is_first and name in names:
        return DataError(
            f"{shown(path)} and {shown(names[name])} have equal names in two Unicode forms",
            "join them in one folder",
        )
    if not is_first and name not in names:
        alike = next((known for known in names if written_alike((known, name))), None)
        example = printable(alike or next(iter(names), "none"))
        hint = "both parts need the same class folders"
        if alike:
            hint += f": mv {quoted(path)} {quoted(part / example)}"
        elif len(names) == 1 and all(map(subfolders, (*names.values(), path))):
            hint = lifted([*names.values(), path])
        else:
            from ipucnn.datasets.sorting import sorted_part_hint

            command, left_out = sorted_part_hint(part, names)
            hint += f"{left_out}: {command}" if command else ""
        return DataError(
            f"{shown(part)} has the class '{printable(name)}', which the training part lacks; it has '{example}'"
            + (", which differs in case or blanks" if alike else ""),
            hint,
            "unknown-class",
        )
    return None


def read_classes(
    found: Found, share: float, report: Callable[[Problem], None]
) -> Tuple[Dict[str, FileExamples], Tuple[str, ...]]:
    """Returns the images of "train" and "eval", and the names of the classes.

    Args:
        found: class folders, in parts or alone.
        share: share of each class that is held out of class folders alone.
        report: function that gets each problem.
    """
    folders = list(readable(read_folders(found), report))
    _check_no_masks_by_content(found, folders)
    names = tuple(dict.fromkeys(folder.name for folder in folders))
    numbers = {name: number for number, name in enumerate(names)}
    parts: Dict[str, FileExamples] = {}
    for subset in found.parts:
        members = [folder for folder in folders if folder.subset == subset]
        counts = [len(folder.paths) for folder in members]
        labels: np.ndarray = np.repeat([numbers[folder.name] for folder in members], counts).astype(np.int32)
        parts[subset] = FileExamples(
            tuple(path for folder in members for path in folder.paths), labels, str(found.location)
        )
    if found.is_undivided:
        whole = parts["train"]
        chosen = held_out(whole.labels, [*map(whole.name, range(len(whole)))], share)
        return {
            "train": whole.subset(np.flatnonzero(~chosen)),
            "eval": whole.subset(np.flatnonzero(chosen)),
        }, names
    return parts, names


def _check_no_masks_by_content(found: Found, folders: Sequence[ClassFolder]) -> None:
    """Refuses class folders some of whose files are masks of others, by their names and pixels.

    Raises:
        MasksAsClasses: there are such files.
    """
    classes = {path: (folder.subset, folder.name) for folder in folders for path in folder.paths}
    masks = masks_by_content(list(classes))
    if not masks:
        return
    from ipucnn.datasets.sorting import hint_without_masks

    mask, image = next(iter(masks.items()))
    inside = all(classes[mask] == classes[image] for mask, image in masks.items())
    hints = [hint_without_masks(found.location, inside)]
    if not inside:
        parts = {subset: part for subset, (part,) in found.parts.items()}
        moves = (
            f"mv {quoted(parts[subset] / name)} {quoted(parts[subset] / ('class-' + name))}"
            for subset, name in dict.fromkeys(classes[one] for one in masks)
        )
        hints.append(f"if they are classes: {' && '.join(moves)}")
    raise MasksAsClasses(
        f"{shown(mask)} has the name of {shown(image)}, and few values, as a mask has: "
        f"{counted(len(masks), 'file')} of this kind in {shown(found.location)}, which are no images of a class",
        "; ".join(filter(None, hints)),
    )


def held_out(labels: np.ndarray, names: Sequence[str], share: float) -> np.ndarray:
    """Returns whether each image is for evaluation, bool [n]: of each class a share, at least one image, and not all.

    The choice depends only on the images' names, so every run on every machine holds out the same images, whatever its
    seed.  Adding or removing n images moves at most n others between the parts.
    """
    chosen: np.ndarray = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label).tolist()
        count = min(max(1, round(len(members) * share)), len(members) - 1)
        chosen[sorted(members, key=lambda index: _draw(names[index]))[:count]] = True
    return chosen


def _draw(name: str) -> bytes:
    """Returns a pseudo-random key from an image's name below the set's folder."""
    return hashlib.sha256(os.fsencode(same_name(name))).digest()


def division(folder: Path, num_train: int, num_eval: int) -> str:
    """Returns the message about the images that are held out of a folder without train/ and val/."""
    return (
        f"{printable(str(folder))} has no train/ and val/: {num_eval} of its {counted(num_train + num_eval, 'image')}, "
        "the same in every run, are held out for evaluation (--validation-fraction says how many)"
    )


def deeper_folders(found: Found, paths: Sequence[str]) -> List[str]:
    """Returns the names of the folders inside class folders that have images of the class."""
    parts = {part for (part,) in found.parts.values()}
    folders = map(Path, dict.fromkeys(path.rpartition(os.sep)[0] for path in paths))
    return [
        printable(name_in_set(folder, found.location)) for folder in folders if folder.parent not in parts
    ]


def _deeper_line(found: Found, paths: Sequence[str]) -> Tuple[str, ...]:
    """Returns one line about images in folders inside class folders; none if there are none."""
    deeper = deeper_folders(found, paths)
    if not deeper:
        return ()
    names = [*deeper[:MOST_EXAMPLES], *(["..."] if len(deeper) > MOST_EXAMPLES else [])]
    text = f"{counted(len(deeper), 'folder')} inside class folders ({', '.join(names)}): their images are of the class"
    return (f"{printable(str(found.location))}: {text}",)


def _few(names: Sequence[str], counts: np.ndarray, has_weights: bool) -> Tuple[str, ...]:
    """Returns warnings about classes with few training images, and about unbalanced classes.

    ``has_weights`` says that the loss already weighs the classes.
    """
    present = [(int(count), printable(name)) for name, count in zip(names, counts) if count]
    (least, rarest), (most, commonest) = min(present), max(present)
    messages = []
    if least < FEW_IMAGES:
        messages.append(
            f"few training images: the smallest class, {rarest}, has {least}. What helps most are more images, or "
            "trained weights to start from (--weights FILE)"
        )
    if most >= UNBALANCED * least:
        messages.append(
            f"unbalanced classes: {commonest} has {most} training images, and {rarest} has {least}. The accuracy over "
            f"all classes says little about {rarest}: `ipucnn evaluate` shows the accuracy of each class"
            + (
                ""
                if has_weights
                else ", and --class-weights balanced makes rare classes count as much as common ones"
            )
        )
    return tuple(messages)


def open_imagefolder(
    found: Found, validation_fraction: float = HELD_OUT_SHARE, has_class_weights: bool = False
) -> DataSource:
    """Lists the images of class folders without decoding them.  Classes are numbered in the order of their names.

    Args:
        found: the class folders.
        validation_fraction: the share of each class that is for evaluation, if class folders have no parts.
        has_class_weights: whether the loss weighs the classes.

    Raises:
        DataError: a part is absent or has no images, or the evaluation part has a class that training lacks.
    """
    name, folder = found.name, found.location
    passed = Passed()
    parts, names = read_classes(found, validation_fraction, passed)
    train, evaluation = parts["train"], parts["eval"]
    if found.is_undivided and not len(evaluation):
        raise DataError(f"{folder}: every class has one image alone, and none can be held out", "add images")
    for subset, (path,) in found.parts.items():
        if not len(parts[subset]):
            text = f"{path} has no images in class folders"
            raise DataError(with_unused(text, passed.unused), f"{CLASS_LAYOUT}; {READ}")
    divided = division(folder, len(train), len(evaluation)) if found.is_undivided else ""
    from ipucnn.datasets.sorting import lists_beside_classes

    lists = lists_beside_classes(folder) if found.is_undivided else ""
    warnings = [divided, *([f"lists of parts are not read: {lists}"] if lists else [])] if divided else []
    pairs = written_alike(names)
    if pairs:
        warnings.append(alike_line(printable(str(folder)), pairs))
    warnings += _deeper_line(found, (*train.paths, *evaluation.paths))
    warnings += unused_line(printable(str(folder)), passed.unused)
    # No augmentation is set: files are augmented by random crops while they are decoded.
    return data_source(
        train,
        evaluation,
        name=name,
        class_names=names,
        location=str(folder),
        warnings=tuple(warnings),
        training_warnings=_few(names, np.bincount(train.labels, minlength=len(names)), has_class_weights),
        crops=name,
        unused=passed.unused,
        own_split=found.is_undivided,
        division=divided,
    )
