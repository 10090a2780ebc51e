"""Which data sets there are, and where their files lie.  No TensorFlow."""

from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from ipucnn.datasets import cifar, idx, imagefolder, isbi2012
from ipucnn.filesystem import entries, is_file, is_folder, real

INFO_FILE = "dataset_info.json"
"""What TFDS writes into the folder of every prepared version."""


@dataclass(frozen=True)
class DatasetRecord:
    """A data set that can be named.

    Attributes:
        task: "classification", "segmentation", or "any".
        summary: one line for tables and help.
        files: what has to lie where, for messages; empty for sets that need no files.
        folders: where below the data folder it may lie.
        image_shape: (height, width, channels) of its images, where that is known without a look at them.
        num_classes: likewise.
    """

    task: str
    summary: str
    files: str = ""
    folders: Tuple[str, ...] = ()
    image_shape: Optional[Tuple[int, int, int]] = None
    num_classes: Optional[int] = None


_IDX_FILES = "the four files train-/t10k- images-idx3-/labels-idx1-ubyte[.gz]"
DATASETS: Dict[str, DatasetRecord] = {
    "digits": DatasetRecord(
        "classification", "8x8 handwritten digits, embedded (scikit-learn)", "", (), (8, 8, 1), 10
    ),
    "membranes": DatasetRecord("segmentation", "generated tissue with membrane masks, any size"),
    "isbi2012": DatasetRecord(
        "segmentation",
        "30 slices of fly brain, 512x512, with membrane masks",
        "train-volume.tif and train-labels.tif",
        ("isbi2012", "ISBI2012", "isbi-2012"),
    ),
    "mnist": DatasetRecord(
        "classification",
        "28x28 handwritten digits",
        _IDX_FILES,
        ("mnist", "MNIST", "MNIST/raw", "mnist/raw"),
        (28, 28, 1),
        10,
    ),
    "fashion_mnist": DatasetRecord(
        "classification",
        "28x28 clothes",
        _IDX_FILES,
        ("fashion_mnist", "fashion-mnist", "FashionMNIST", "FashionMNIST/raw"),
        (28, 28, 1),
        10,
    ),
    "cifar10": DatasetRecord(
        "classification",
        "32x32 colour, 10 classes",
        "cifar-10-batches-py or cifar-10-batches-bin",
        (
            *("cifar-10-batches-py", "cifar-10-batches-bin", "cifar10"),
            *("cifar10/cifar-10-batches-py", "cifar10/cifar-10-batches-bin"),
        ),
        (32, 32, 3),
        10,
    ),
    "cifar100": DatasetRecord(
        "classification",
        "32x32 colour, 100 classes",
        "cifar-100-python or cifar-100-binary",
        (
            *("cifar-100-python", "cifar-100-binary", "cifar100"),
            *("cifar100/cifar-100-python", "cifar100/cifar-100-binary"),
        ),
        (32, 32, 3),
        100,
    ),
    "imagenet": DatasetRecord(
        "classification", "ImageNet as an image folder", "imagenet/{train,val}/CLASS/*.JPEG", ("imagenet",)
    ),
    "imagefolder": DatasetRecord("classification", "an image folder", "{train,val}/CLASS/*.jpg"),
    "imagemasks": DatasetRecord(
        "segmentation", "a folder of image and mask pairs", "[train|val/]{images,masks}/NAME.png"
    ),
    "random": DatasetRecord("any", "noise made on the host, for throughput"),
}


def find_location(name: str, path: Path, *, explicit: bool = False) -> Optional[Path]:
    """The folder that holds ``name``: ``path`` itself, or one of the usual ones below it.

    MNIST and Fashion-MNIST have the same file names: where ``path`` itself holds them, its name decides,
    unless the set was named (``explicit``).
    """
    for folder in (path, *(path / below for below in DATASETS[name].folders)):
        if name in cifar.LAYOUTS and cifar.find_layout(name, folder) is not None:
            return folder
        if name == "isbi2012" and isbi2012.has_files(folder):
            return folder
        if name in idx.CLASS_NAMES and idx.has_files(folder):
            is_fashion = "fashion" in real(folder).as_posix().lower()
            if explicit or folder != path or is_fashion == (name == "fashion_mnist"):
                return folder
        # Any image folder could be ``path`` itself: only if it was asked for, or has the name.
        named = explicit or folder != path or real(folder).name.lower() == "imagenet"
        if name == "imagenet" and named and imagefolder.is_image_folder(folder):
            return folder
    return find_tfds(name, path)


def find_tfds(name: str, path: Path) -> Optional[Path]:
    """The newest prepared version of a TFDS set, or None.

    Args:
        name: NAME, NAME/CONFIG, with :VERSION to choose one.
        path: the folder that holds NAME/[CONFIG/]VERSION, or NAME itself, or the version itself.
    """
    base_name, _, version = name.partition(":")
    parts = base_name.split("/")
    if is_file(path / INFO_FILE) and parts[0] in real(path).parts:
        return path
    roots = [path.joinpath(*parts)]
    if real(path).name == parts[0]:
        roots.append(path.joinpath(*parts[1:]))
    for root in roots:
        below = _folders(root)
        below += [folder for config in below for folder in _folders(config)]
        found = [folder for folder in below if is_file(folder / INFO_FILE)]
        found = [folder for folder in found if version in ("", folder.name)]
        if found:
            return max(found, key=lambda folder: (_version(folder.name), str(folder)))
    return None


def _folders(folder: Path) -> List[Path]:
    if not is_folder(folder):
        return []
    return [path for path in entries(folder) if not path.name.startswith(".") and is_folder(path)]


def _version(text: str) -> Tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else -1 for part in text.split("."))
