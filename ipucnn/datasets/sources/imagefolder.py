"""An image folder, ``DIR/{train,val}/CLASS/*``: one sub-folder per class, any image sizes and formats."""

import os
from pathlib import Path
from typing import Dict, List, Optional, Tuple

import numpy as np

from ipucnn.datasets.base import IMAGENET_MEAN, IMAGENET_STD, DatasetInfo, DataSource, FileExamples
from ipucnn.errors import DataError
from ipucnn.filesystem import Kind, asking, is_folder
from ipucnn.text import printable

EVAL_NAMES = ("val", "valid", "validation", "test")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
MOST_NAMED = 10
LAYOUT = "expected DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg"


def find_eval(folder: Path) -> Optional[Path]:
    """The evaluation part: val, or as some sets name it."""
    return next((folder / name for name in EVAL_NAMES if is_folder(folder / name)), None)


def is_image_folder(folder: Path) -> bool:
    return is_folder(folder / "train") and find_eval(folder) is not None


def list_folder(folder: Path) -> List["os.DirEntry[str]"]:
    """What lies in a folder, in the order of names; hidden files are left out."""
    # Not filesystem.entries: scandir knows the kind of most files without a question for each.
    with asking(folder), os.scandir(folder) as found:
        return sorted((e for e in found if not e.name.startswith(".")), key=lambda e: e.name)


def leads_to(entry: "os.DirEntry[str]", kind: Kind) -> bool:
    """Whether an entry is, or links to, a folder or a regular file."""
    with asking(Path(entry.path)):
        return entry.is_dir() if kind is Kind.FOLDER else entry.is_file()


def _scan(part: Path, classes: Dict[str, int]) -> Tuple[FileExamples, int]:
    """The images below one part in the order of class and file name, and how many files were passed over."""
    paths: List[str] = []
    labels: List[int] = []
    skipped = 0
    for entry in list_folder(part):
        if not leads_to(entry, Kind.FOLDER):
            continue
        files = [f for f in list_folder(Path(entry.path)) if leads_to(f, Kind.FILE)]
        images = [f.path for f in files if f.name.lower().endswith(EXTENSIONS)]
        skipped += len(files) - len(images)
        if not images:
            continue
        if entry.name not in classes:
            raise DataError(
                f"{part} has the class '{printable(entry.name)}', which the training part lacks",
                "both parts need the same class folders",
            )
        paths += images
        labels += [classes[entry.name]] * len(images)
    return FileExamples(tuple(paths), np.array(labels, np.int32)), skipped


def open_imagefolder(folder: Path, name: str = "imagefolder") -> DataSource:
    """Lists the images; none is decoded yet.  Classes are numbered in the order of their names.

    The mean and standard deviation are ImageNet's: decoding every photograph to measure them would take
    longer than they are worth.

    Raises:
        DataError: a part is absent or without images, or the evaluation part has a class of its own.
    """
    evaluation_part = find_eval(folder)
    if not is_folder(folder / "train") or evaluation_part is None:
        raise DataError(f"{folder} is not an image folder: it lacks train/ or val/", LAYOUT)
    names = [e.name for e in list_folder(folder / "train") if leads_to(e, Kind.FOLDER)]
    classes = {class_name: label for label, class_name in enumerate(names)}
    train, skipped_train = _scan(folder / "train", classes)
    evaluation, skipped_eval = _scan(evaluation_part, classes)
    for part, examples in ((folder / "train", train), (evaluation_part, evaluation)):
        if len(examples) == 0:
            raise DataError(f"{part} has no images in class folders", LAYOUT)
    warnings = []
    if skipped_train + skipped_eval:
        warnings.append(f"{folder}: {skipped_train + skipped_eval} files that are no images were passed over")
    empty = sorted(set(names) - {names[label] for label in np.unique(train.labels)})
    if empty:
        more = f" and {len(empty) - MOST_NAMED} more" if len(empty) > MOST_NAMED else ""
        some = ", ".join(empty[:MOST_NAMED]) + more
        warnings.append(f"{folder / 'train'}: no images in {some}")
    info = DatasetInfo(
        name=name,
        task="classification",
        num_classes=len(names),
        image_shape=(None, None, 3),
        num_train=len(train),
        num_eval=len(evaluation),
        class_names=tuple(names),
        location=str(folder),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        warnings=tuple(warnings),
        crops=name,
        augmentation="none",  # the random crops of files happen while they are decoded
    )
    return DataSource(info, train, evaluation)
