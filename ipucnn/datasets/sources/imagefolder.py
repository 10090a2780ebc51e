"""An image folder with one subfolder per class, for images of any size and format.

Its layout is ``DIR/{train,val}/CLASS/*``, or ``DIR/CLASS/*`` with a share of each class held out for evaluation.
"""

import hashlib
import os
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

import numpy as np

from ipucnn.datasets.base import DataSource, FileExamples, data_source
from ipucnn.datasets.limits import HELD_OUT_SHARE
from ipucnn.datasets.problems import STRICT, Problems
from ipucnn.errors import DataError
from ipucnn.filesystem import Kind, errors_about, is_folder, kind_of
from ipucnn.text import counted, printable

EVAL_NAMES = ("val", "valid", "validation", "test")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
MOST_NAMED = 10
LAYOUT = "expected DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg"
FEW_IMAGES = 20
UNBALANCED = 5
"""Training warns about a class with fewer than ``FEW_IMAGES`` images, and about classes whose numbers of images differ
by a factor of ``UNBALANCED`` or more."""


def find_parts(folder: Path) -> Dict[str, Path]:
    """Returns the folders of "train" and "eval" that a folder has; the latter is called val, or another usual name."""
    names = {"train": ("train",), "eval": EVAL_NAMES}
    parts = {
        part: next((folder / name for name in names[part] if _is_part(folder / name)), None) for part in names
    }
    return {part: path for part, path in parts.items() if path is not None}


def _is_part(folder: Path) -> bool:
    """Returns whether a folder is a part of a data set.

    A folder that has images and no subfolders is a class, even if it has the name of a part.
    """
    if not is_folder(folder):
        return False
    try:
        has_folders = any(leads_to(entry, Kind.FOLDER) for entry in list_folder(folder))
        return has_folders or not _has_image(folder)
    except DataError:  # reading the set reports it
        return True


def is_undivided(folder: Path) -> bool:
    """Returns whether a folder has two or more folders of images, and no part of a data set."""
    if not is_folder(folder) or find_parts(folder):
        return False
    return sum(map(_is_class, list_folder(folder))) > 1


def _is_class(entry: "os.DirEntry[str]") -> bool:
    """Returns whether an entry is a folder with images; False for an unreadable one, which reading the set reports."""
    try:
        return leads_to(entry, Kind.FOLDER) and _has_image(Path(entry.path))
    except DataError:
        return False


def _has_image(folder: Path) -> bool:
    return any(
        entry.name.lower().endswith(EXTENSIONS) and leads_to(entry, Kind.FILE)
        for entry in list_folder(folder)
    )


def list_folder(folder: Path) -> List["os.DirEntry[str]"]:
    """Returns the entries of a folder in the order of names, without hidden files."""
    # Not filesystem.entries, because scandir knows the kind of most files without a system call for each.
    with errors_about(folder), os.scandir(folder) as listing:
        return sorted((e for e in listing if not e.name.startswith(".")), key=lambda e: e.name)


def leads_to(entry: "os.DirEntry[str]", kind: Kind) -> bool:
    """Returns whether an entry is, or links to, a folder or a regular file, as ``kind`` says."""
    with errors_about(Path(entry.path)):
        return entry.is_dir() if kind is Kind.FOLDER else entry.is_file()


def scan(
    part: Path,
    subset: str,
    classes: Dict[str, int],
    problems: Problems = STRICT,
    is_undivided: bool = False,
) -> Tuple[FileExamples, int]:
    """Returns the images of one part, in the order of class and file name, and the number of skipped files.

    Args:
        part: the folder of the part.
        subset: "train" or "eval".
        classes: labels by class name; if it is empty, this call adds the class folders of the part (for an undivided
            folder, only those with images).
        problems: receiver of problems; if it does not raise, images of unknown classes get the label -1.
        is_undivided: whether the part is a whole folder without train/ and val/.

    Raises:
        DataError: the part has a class that the first part lacks, or cannot be listed.
    """
    is_first = not classes
    paths: List[str] = []
    labels: List[int] = []
    skipped = 0
    with problems.noting(subset, part.name, part):
        for entry in list_folder(part):
            name = f"{part.name}/{printable(entry.name)}"
            with problems.noting(subset, name, Path(entry.path)):
                if not leads_to(entry, Kind.FOLDER):
                    problems.find("passed-over", subset, f"{name}: not in a class folder")
                    continue
                images, others = _list_images(Path(entry.path), name, subset, problems)
                skipped += others
                if is_undivided and not images:
                    problems.find("passed-over", subset, f"{name}: a folder without images")
                elif is_first:
                    classes[entry.name] = len(classes)
                elif entry.name not in classes and images:
                    unknown = DataError(
                        f"{part} has the class '{printable(entry.name)}', which the training part lacks",
                        "both parts need the same class folders",
                        "unknown-class",
                    )
                    problems.refuse(unknown, subset, f"{name}: {counted(len(images), 'image')}")
                paths += images
                labels += [classes.get(entry.name, -1)] * len(images)
    return FileExamples(tuple(paths), np.array(labels, np.int32)), skipped


def _list_images(folder: Path, shown_name: str, subset: str, problems: Problems) -> Tuple[List[str], int]:
    """Returns the files of a class folder with the name of an image, and the number of other files."""
    images, others = [], 0
    for entry in list_folder(folder):
        name = f"{shown_name}/{printable(entry.name)}"
        with problems.noting(subset, name, Path(entry.path)):
            if not leads_to(entry, Kind.FILE):
                kind = kind_of(Path(entry.path))
                if kind is Kind.ABSENT:
                    problems.find("missing-file", subset, f"{name}: a link that leads nowhere")
                else:
                    problems.find("passed-over", subset, f"{name}: {kind.value}")
            elif entry.name.lower().endswith(EXTENSIONS):
                images.append(entry.path)
            else:
                others += 1
                problems.find("passed-over", subset, f"{name}: no image by its name")
    return images, others


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


def division(folder: Path, num_train: int, num_eval: int) -> str:
    """Returns the message about the images that are held out of a folder without train/ and val/."""
    return (
        f"{printable(str(folder))} has no train/ and val/: {num_eval} of its {counted(num_train + num_eval, 'image')}, "
        "the same in every run, are held out for evaluation (--validation-fraction says how many)"
    )


def _draw(path: str) -> bytes:
    """Returns a pseudo-random key from an image's class and file name."""
    return hashlib.sha256(os.fsencode("/".join(Path(path).parts[-2:]))).digest()


def _few(names: Sequence[str], counts: np.ndarray) -> Tuple[str, ...]:
    """Returns warnings about classes with few training images, and about unbalanced classes."""
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
        )
    return tuple(messages)


def read_parts(
    folder: Path, share: float, problems: Problems = STRICT
) -> Tuple[Dict[str, FileExamples], Tuple[str, ...], int]:
    """Returns the images of "train" and "eval", the names of the classes, and the number of skipped files.

    Args:
        folder: a folder with train/ and val/, or with class folders alone.
        share: share of each class that is held out of a folder with class folders alone.
        problems: receiver of problems; if it does not raise, the result lacks parts that are absent.

    Raises:
        DataError: a part is absent, cannot be listed, or has a class that the first part lacks.
    """
    classes: Dict[str, int] = {}
    parts: Dict[str, FileExamples] = {}
    if is_undivided(folder):
        whole, skipped = scan(folder, "train", classes, problems, is_undivided=True)
        chosen = held_out(whole.labels, whole.paths, share)
        parts = {"train": whole.subset(np.flatnonzero(~chosen)), "eval": whole.subset(np.flatnonzero(chosen))}
        return parts, tuple(classes), skipped
    skipped = 0
    names, folders = {"train": "train", "eval": " or ".join(EVAL_NAMES)}, find_parts(folder)
    for subset in names:
        if subset not in folders:
            text = f"{folder} is not an image folder: it lacks train/ or val/"
            error = DataError(text, LAYOUT, "missing-subset")
            problems.refuse(error, subset, f"there is no folder {names[subset]}")
        else:
            parts[subset], others = scan(folders[subset], subset, classes, problems)
            skipped += others
    return parts, tuple(classes), skipped


def open_imagefolder(
    folder: Path, name: str = "imagefolder", validation_fraction: float = HELD_OUT_SHARE
) -> DataSource:
    """Lists the images of a folder without decoding them.  Classes are numbered in the order of their names.

    If the folder has class folders and no parts, ``validation_fraction`` of each class is for evaluation.

    Raises:
        DataError: a part is absent or has no images, or the evaluation part has a class that training lacks.
    """
    parts, names, skipped = read_parts(folder, validation_fraction)
    train, evaluation, warnings = parts["train"], parts["eval"], []
    folders = find_parts(folder) or {"train": folder, "eval": folder}
    if folders["train"] == folder:
        if not len(evaluation):
            raise DataError(
                f"{folder}: every class has one image alone, and none can be held out", "add images"
            )
        warnings.append(division(folder, len(train), len(evaluation)))
    for subset, examples in parts.items():
        if not len(examples):
            raise DataError(f"{folders[subset]} has no images in class folders", LAYOUT)
    if skipped:
        files = "1 file that is not an image" if skipped == 1 else f"{skipped:,} files that are not images"
        warnings.append(f"{folder}: skipped {files}")
    empty = sorted(set(names) - {names[label] for label in np.unique(train.labels)})
    if empty:
        more = f" and {len(empty) - MOST_NAMED} more" if len(empty) > MOST_NAMED else ""
        warnings.append(f"{folders['train']}: no images in {', '.join(empty[:MOST_NAMED]) + more}")
    # No augmentation is set: files are augmented by random crops while they are decoded.
    return data_source(
        train,
        evaluation,
        name=name,
        class_names=names,
        location=str(folder),
        warnings=tuple(warnings),
        training_warnings=_few(names, np.bincount(train.labels, minlength=len(names))),
        crops=name,
    )
