"""Verifying a data set: which one is meant, what is published about it, and the walk over its files.

Each kind of set has one walk, which reads its files as training does, with the same readers, and hands every sample to
a :class:`~ipucnn.datasets.verification.survey.Survey`.  What a reader refuses is noted, and the walk goes on with the
next file, page or record.  Nothing is executed, and no more than one file's samples are in memory.
"""

from dataclasses import replace
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from ipucnn.datasets.base import IMAGENET_MEAN, ArrayExamples
from ipucnn.datasets.limits import MAX_IMAGE_PIXELS
from ipucnn.datasets.registry import (
    ANY_TASK,
    DATASETS,
    INFO_FILE,
    TFDS_PREFIX,
    Choice,
    canonical,
    check_divides,
    choose_dataset,
    fetch,
    find_location,
    is_tfds,
    list_datasets,
    open_dataset,
)
from ipucnn.datasets.segmentation import membranes
from ipucnn.datasets.sources import cifar, embedded, idx, imagefolder, records
from ipucnn.datasets.verification.arrays import walk_cifar, walk_generated, walk_idx
from ipucnn.datasets.verification.findings import EVAL, TRAIN, WARNING
from ipucnn.datasets.verification.folders import walk_imagefolder, walk_imagemasks, walk_isbi2012
from ipucnn.datasets.verification.records import walk_records, walk_tfds
from ipucnn.datasets.verification.samples import Watcher
from ipucnn.datasets.verification.survey import Known, Survey, Verification
from ipucnn.errors import ConfigurationError, DataError, did_you_mean
from ipucnn.filesystem import Kind, expand, is_file, is_folder, kind_of, real, shown
from ipucnn.python_files import is_python_name
from ipucnn.text import printable


def _published(name: str, mean: Tuple[float, ...], std: Tuple[float, ...] = ()) -> Known:
    record = DATASETS[name]
    return Known(dict(zip((TRAIN, EVAL), record.num_examples or ())), record.image_shape, mean, std)


KNOWN: Dict[str, Known] = {
    "digits": Known(
        {TRAIN: 1797 - embedded.NUM_HELD_OUT, EVAL: embedded.NUM_HELD_OUT}, DATASETS["digits"].image_shape
    ),
    "membranes": Known({TRAIN: membranes.NUM_TRAIN, EVAL: membranes.NUM_EVAL}),
    "random": Known({TRAIN: embedded.NUM_TRAIN, EVAL: embedded.NUM_EVAL}),
    # Means and deviations of the whole training subset, as they are published everywhere for normalisation: MNIST
    # 0.1307 and 0.3081 (PyTorch's MNIST example), Fashion-MNIST 0.2860 and 0.3530, CIFAR-10 0.4914 0.4822 0.4465 and
    # 0.2470 0.2435 0.2616, CIFAR-100 0.5071 0.4865 0.4409 and 0.2673 0.2564 0.2762; here in 0..255 and four digits.
    "mnist": _published("mnist", (33.3184,), (78.5675,)),
    "fashion_mnist": _published("fashion_mnist", (72.9404,), (90.0212,)),
    "cifar10": _published("cifar10", (125.3069, 122.9501, 113.8660), (62.9932, 62.0887, 66.7049)),
    "cifar100": _published("cifar100", (129.3039, 124.0699, 112.4336), (68.1702, 65.3918, 70.4184)),
    # Arganda-Carreras et al. 2015: 30 slices of 512x512.  Mean and deviation of the training stack as the challenge
    # gave it, measured on a pixel-identical copy.
    "isbi2012": Known({TRAIN: 24, EVAL: 6}, (512, 512, 1), (126.163,), (44.022,), 0.05, (TRAIN, EVAL)),
    # The mean is that of resized crops, and nobody publishes that of whole images: a warning, beyond a wide margin.
    "imagenet": replace(_published("imagenet", IMAGENET_MEAN), tolerance=10.0, severity=WARNING),
}


def verify(
    choice: Choice,
    *,
    download: bool = False,
    allow_partial: bool = False,
    limit_train: Optional[str] = None,
    limit_eval: Optional[str] = None,
    image_size: Optional[Tuple[int, int]] = None,
    max_pixels: int = MAX_IMAGE_PIXELS,
    watcher: Optional[Watcher] = None,
    validation_fraction: Optional[float] = None,
) -> Verification:
    """Looks at every sample of a data set.

    Args:
        choice: which set, of :func:`choose`.
        download: whether it may be fetched.
        allow_partial: whether what is missing of the set is a warning only.
        limit_train, limit_eval: how many samples to look at: "500" or "10%".
        image_size: (height, width) of the network's input: smaller images are noted; the size of generated sets.
        max_pixels: what an image may have at most.
        watcher: what hears of the progress.
        validation_fraction: of each class of a folder without train/ and val/, the share that is for evaluation.

    Raises:
        DataError: the set is not here at all.
        MissingError: a package or the network is needed.
        ConfigurationError: a limit is not a number, or a fraction of what is divided already.
    """
    if validation_fraction is not None:
        check_divides(choice, validation_fraction)
    is_known = choice.name in DATASETS
    has_files = choice.name.startswith(TFDS_PREFIX) or (is_known and bool(DATASETS[choice.name].files))
    location = fetch(choice, download) if has_files else None
    is_records = choice.name == "imagenet" and location is not None and records.has_shards(location)
    known = KNOWN.get(choice.name.replace(TFDS_PREFIX, "", 1), Known())
    if is_records and location is not None and len(records.class_names(location)) != records.NUM_CLASSES:
        known = Known()  # records of another set, in the layout of ImageNet's
    survey = Survey(
        choice.name,
        choice.task,
        shown(location) if location is not None else "",
        known,
        watcher or Watcher(),
        {TRAIN: limit_train, EVAL: limit_eval},
        image_size if has_files else None,
        max_pixels,
    )
    if location is None:
        walk_generated(survey, choice, image_size)
    elif is_tfds(choice.name, location):
        walk_tfds(survey, choice.name, location)
    elif choice.name in idx.CLASS_NAMES:
        walk_idx(survey, choice.name, location)
    elif choice.name in cifar.LAYOUTS:
        walk_cifar(survey, choice.name, location)
    elif choice.name == "isbi2012":
        walk_isbi2012(survey, location)
    elif choice.name == "imagemasks":
        walk_imagemasks(survey, location)
    elif is_records:
        walk_records(survey, location)
    else:
        walk_imagefolder(survey, location, validation_fraction or imagefolder.HELD_OUT_SHARE)
    return survey.finish(allow_partial)


# -- which set ------------------------------------------------------------------------------------------------


def choose(name: Optional[str], path: str, download: bool = False) -> Choice:
    """Which set is to be verified.

    Args:
        name: a name, tfds:NAME, or a folder with any kind of set in it; None for the one in ``path``.
        path: ``--dataset-path``.
        download: whether a set that is absent may be fetched.

    Raises:
        ConfigurationError: no such name, or it is not clear which set is meant.
        DataError: there is no such set.
    """
    folder = expand(path)
    if name is None:
        found = _find_kinds(folder)
        if not found:
            raise ConfigurationError(
                f"no data set is given, and none is known in {shown(folder)}",
                f"ipucnn verify-dataset NAME, one of {', '.join(list_datasets())}, tfds:NAME, or a folder",
            )
        return _only(found, folder)
    if name.lower().startswith(TFDS_PREFIX):
        return choose_dataset(name, folder, home="", task="classification", download=download)
    if is_python_name(name):
        return _choose_own(name, folder)
    known = canonical(name)
    if known is None:
        return _choose_folder(name)
    if known in ("imagefolder", "imagemasks", "imagenet"):
        # Without one of its subsets training would not take it; here that is a finding.
        is_kind = _has_pairs_somewhere if known == "imagemasks" else _has_classes
        if known == "imagenet":
            is_kind = _has_subset_or_shards
        below = [folder / part for part in DATASETS[known].folders]
        location = next((place for place in (*below, folder) if is_kind(place)), None)
        if location is not None:
            return Choice(known, location, "", DATASETS[known].task)
    task = DATASETS[known].task
    task = "classification" if task == "any" else task
    return choose_dataset(known, folder, home="", task=task, download=download)


def _choose_own(name: str, folder: Path) -> Choice:
    """The data that a function of the user's own returns, which is called for their task."""
    choice = choose_dataset(name, folder, home="", task=ANY_TASK)
    source = open_dataset(choice)
    if not isinstance(source.train, ArrayExamples) or not isinstance(source.eval, ArrayExamples):
        raise ConfigurationError(
            f"{choice.message}: its examples are no arrays, and files are known by their layout alone",
            "ipucnn verify-dataset FOLDER, of the files that it reads",
        )
    # Called once: what it returns may differ from call to call.
    return replace(choice, task=source.info.task, make=lambda: source)


def _choose_folder(name: str) -> Choice:
    folder = expand(name)
    kind = kind_of(folder)
    if kind is Kind.ABSENT:
        raise ConfigurationError(
            f"data set '{shown(name)}' is unknown, and there is no such folder",
            did_you_mean(name, list_datasets())
            or f"choose one of {', '.join(list_datasets())}, tfds:NAME, or a folder",
        )
    if kind is not Kind.FOLDER:
        raise DataError(
            f"DATASET {shown(folder)} is {kind.value}, not a folder", "give the folder it lies in"
        )
    found = _find_kinds(folder)
    if not found:
        raise DataError(
            f"{shown(folder)} holds no data set that is known",
            "class folders of images, alone or in train/ and val/, images/ and masks/, or the files of "
            "mnist, fashion_mnist, cifar10, cifar100, isbi2012, imagenet's records or a TFDS set",
        )
    return _only(found, folder)


def _only(found: List[Choice], folder: Path) -> Choice:
    if len(found) > 1:
        names = [choice.name for choice in found]
        raise ConfigurationError(
            f"{shown(folder)} holds {' and '.join(names)}",
            f"ipucnn verify-dataset {names[0]} --dataset-path {shown(folder)}",
        )
    return found[0]


def _find_kinds(folder: Path) -> List[Choice]:
    """The sets in a folder, complete or not."""
    # Hugging Face writes a file of this name into image folders, too; beside TFDS's records there are no folders.
    if is_file(folder / INFO_FILE) and not (_has_pairs_somewhere(folder) or _has_subset(folder)):
        return [Choice(TFDS_PREFIX + printable(real(folder).parent.name), folder, "")]
    found = []
    for name, record in DATASETS.items():
        if record.files and name not in ("imagefolder", "imagemasks"):
            location = find_location(name, folder)
            if location is not None:
                found.append(Choice(name, location, "", record.task))
    if any(choice.location == folder for choice in found):
        return found
    if records.has_shards(folder):
        found.append(Choice("imagenet", folder, ""))
    elif _has_pairs_somewhere(folder):
        found.append(Choice("imagemasks", folder, "", "segmentation"))
    elif _has_classes(folder):
        found.append(Choice("imagefolder", folder, ""))
    return found


def _has_subset(folder: Path) -> bool:
    return is_folder(folder / "train") or imagefolder.find_eval(folder) is not None


def _has_classes(folder: Path) -> bool:
    """Whether there is a part of an image folder, or class folders that are divided here."""
    return _has_subset(folder) or (is_folder(folder) and imagefolder.is_undivided(folder))


def _has_subset_or_shards(folder: Path) -> bool:
    return _has_subset(folder) or records.has_shards(folder)


def _has_pairs_somewhere(folder: Path) -> bool:
    parts = [folder, folder / "train", imagefolder.find_eval(folder) or folder]
    return any(is_folder(part / below) for part in parts for below in ("images", "masks"))
