"""An image folder, one sub-folder per class, any image sizes and formats.

It is ``DIR/{train,val}/CLASS/*``, or ``DIR/CLASS/*``, of which a share of each class is held out for evaluation.
"""

import hashlib
import os
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Set, Tuple

import numpy as np

from ipucnn.datasets.base import DataSource, FileExamples, file_source
from ipucnn.datasets.limits import HELD_OUT_SHARE
from ipucnn.datasets.problems import STRICT, Problems
from ipucnn.errors import DataError
from ipucnn.filesystem import Kind, asking, is_folder, kind_of
from ipucnn.text import counted, printable

EVAL_NAMES = ("val", "valid", "validation", "test")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
MOST_NAMED = 10
LAYOUT = "expected DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg"
FEW_IMAGES = 20
UNBALANCED = 5
"""Users are told of fewer training images of a class, and of classes with so many times as many as others."""


def find_eval(folder: Path) -> Optional[Path]:
    """The evaluation part: val, or as some sets name it."""
    return next((folder / name for name in EVAL_NAMES if _is_part(folder / name)), None)


def find_train(folder: Path) -> Optional[Path]:
    """The training part."""
    return folder / "train" if _is_part(folder / "train") else None


def _is_part(folder: Path) -> bool:
    """Whether a folder is a part of a data set; one of images alone is a class that is called as a part."""
    if not is_folder(folder):
        return False
    try:
        has_folders = any(leads_to(entry, Kind.FOLDER) for entry in list_folder(folder))
        return has_folders or not _has_image(folder)
    except DataError:  # which is told once the set is read
        return True


def has_parts(folder: Path) -> bool:
    """Whether a folder has a training or an evaluation part."""
    return find_train(folder) is not None or find_eval(folder) is not None


def is_image_folder(folder: Path) -> bool:
    return find_train(folder) is not None and find_eval(folder) is not None


def is_undivided(folder: Path) -> bool:
    """Whether a folder has two or more folders of images, and no part of a data set."""
    if not is_folder(folder) or has_parts(folder):
        return False
    return sum(map(_is_class, list_folder(folder))) > 1


def _is_class(entry: "os.DirEntry[str]") -> bool:
    """Whether an entry is a folder with images; one that cannot be looked at is refused once the set is read."""
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
    """What lies in a folder, in the order of names; hidden files are left out."""
    # Not filesystem.entries: scandir knows the kind of most files without a question for each.
    with asking(folder), os.scandir(folder) as listing:
        return sorted((e for e in listing if not e.name.startswith(".")), key=lambda e: e.name)


def leads_to(entry: "os.DirEntry[str]", kind: Kind) -> bool:
    """Whether an entry is, or links to, a folder or a regular file."""
    with asking(Path(entry.path)):
        return entry.is_dir() if kind is Kind.FOLDER else entry.is_file()


def scan(
    part: Path,
    subset: str,
    classes: Dict[str, int],
    problems: Problems = STRICT,
    is_undivided: bool = False,
) -> Tuple[FileExamples, int]:
    """The images below one part in the order of class and file name, and how many files were passed over.

    Args:
        part: of the data set.
        subset: which of them it is.
        classes: labels by name; filled with the class folders of the first part, of a folder that is divided here those
            with images.
        problems: what hears of the rest; with it images of unknown classes have the label -1.
        is_undivided: the part is a folder that is divided here.

    Raises:
        DataError: the part has a class that the first one lacks, or cannot be listed.
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
    """The image files of a class folder by their names, and how many other files there are."""
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


def divide(examples: FileExamples, share: float) -> Tuple[FileExamples, FileExamples]:
    """Training and evaluation examples, of each class as :func:`held_out` has it."""
    chosen: List[int] = []
    for label in np.unique(examples.labels):
        (members,) = np.nonzero(examples.labels == label)
        chosen += [
            int(members[place]) for place in held_out([examples.paths[index] for index in members], share)
        ]
    rest = sorted(set(range(len(examples))) - set(chosen))
    return examples.subset(rest), examples.subset(sorted(chosen))


def held_out(paths: Sequence[str], share: float) -> Set[int]:
    """Which images of one class are for evaluation: that share of them, one at least and not all.

    It depends on their names: every run on every machine, whatever its seed, holds out the same, and images that
    are added or taken away move at most as many others from one part to the other.
    """
    count = min(max(1, round(len(paths) * share)), len(paths) - 1)
    return set(sorted(range(len(paths)), key=lambda index: _draw(paths[index]))[:count])


def division(folder: Path, num_train: int, num_eval: int) -> str:
    """What to tell the user of a folder that is divided here."""
    return (
        f"{printable(str(folder))} has no train/ and val/: {num_eval} of its {counted(num_train + num_eval, 'image')}, "
        "the same in every run, are held out for evaluation (--validation-fraction says how many)"
    )


def _draw(path: str) -> bytes:
    """A number that looks drawn, of an image's class and file name."""
    return hashlib.sha256(os.fsencode("/".join(Path(path).parts[-2:]))).digest()


def _few(names: Sequence[str], counts: np.ndarray) -> List[str]:
    """What to tell the user of classes with few training images, and of numbers that differ much."""
    present = [(int(count), printable(name)) for name, count in zip(names, counts) if count]
    (least, rarest), (most, commonest) = min(present), max(present)
    told = []
    if least < FEW_IMAGES:
        told.append(
            f"few training images: the smallest class, {rarest}, has {least}. What helps most are more images, or "
            "trained weights to start from (--weights FILE)"
        )
    if most >= UNBALANCED * least:
        told.append(
            f"unbalanced classes: {commonest} has {most} training images, and {rarest} has {least}. The accuracy over "
            f"all classes says little about {rarest}: `ipucnn evaluate` shows the accuracy of each class"
        )
    return told


def read_parts(
    folder: Path, share: float, problems: Problems = STRICT
) -> Tuple[Dict[str, FileExamples], Tuple[str, ...], int]:
    """The images of "train" and "eval", the classes, and how many files were passed over.

    Args:
        folder: with train/ and val/, or class folders alone, of each of which ``share`` is for evaluation.
        problems: what is told of the rest; with it a part that is not there is not among what is returned.

    Raises:
        DataError: a part is absent, cannot be listed, or has a class that the first one lacks.
    """
    classes: Dict[str, int] = {}
    parts: Dict[str, FileExamples] = {}
    if is_undivided(folder):
        whole, skipped = scan(folder, "train", classes, problems, is_undivided=True)
        parts["train"], parts["eval"] = divide(whole, share)
        return parts, tuple(classes), skipped
    skipped = 0
    names = {"train": "train", "eval": " or ".join(EVAL_NAMES)}
    for subset, part in (("train", find_train(folder)), ("eval", find_eval(folder))):
        if part is None:
            text = f"{folder} is not an image folder: it lacks train/ or val/"
            error = DataError(text, LAYOUT, "missing-subset")
            problems.refuse(error, subset, f"there is no folder {names[subset]}")
        else:
            parts[subset], others = scan(part, subset, classes, problems)
            skipped += others
    return parts, tuple(classes), skipped


def open_imagefolder(
    folder: Path, name: str = "imagefolder", validation_fraction: float = HELD_OUT_SHARE
) -> DataSource:
    """Lists the images; none is decoded yet.  Classes are numbered in the order of their names.

    Where the folder has class folders and no parts, ``validation_fraction`` of each class is for evaluation.

    Raises:
        DataError: a part is absent or without images, or the evaluation part has a class of its own.
    """
    parts, names, skipped = read_parts(folder, validation_fraction)
    train, evaluation, warnings = parts["train"], parts["eval"], []
    part = find_train(folder) or folder
    if part == folder:
        if not len(evaluation):
            raise DataError(
                f"{folder}: every class has one image alone, and none can be held out", "add images"
            )
        warnings.append(division(folder, len(train), len(evaluation)))
    for where, examples in ((part, train), (find_eval(folder), evaluation)):
        if not len(examples):
            raise DataError(f"{where} has no images in class folders", LAYOUT)
    if skipped:
        files = "1 file that is not an image" if skipped == 1 else f"{skipped:,} files that are not images"
        warnings.append(f"{folder}: skipped {files}")
    empty = sorted(set(names) - {names[label] for label in np.unique(train.labels)})
    if empty:
        more = f" and {len(empty) - MOST_NAMED} more" if len(empty) > MOST_NAMED else ""
        warnings.append(f"{part}: no images in {', '.join(empty[:MOST_NAMED]) + more}")
    # Random crops of files, which are their augmentation, happen while they are decoded.
    return file_source(
        train,
        evaluation,
        name=name,
        class_names=names,
        location=str(folder),
        warnings=warnings,
        training_warnings=_few(names, np.bincount(train.labels, minlength=len(names))),
        crops=name,
    )
