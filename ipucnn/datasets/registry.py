"""The table of data sets, and the choice of the one that a run uses.

A data set is one row of :data:`DATASETS`: its facts and its reader.  ``formats.py`` says which set is in a folder.
"""

import importlib
import os
import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ipucnn.datasets.formats import (
    CLASS_LAYOUT,
    FILE_SETS,
    LAYOUTS,
    MASK_OF_EACH,
    MASKS_INSIDE,
    PAIR_LAYOUT,
    READ,
    TFDS_PREFIX,
    Found,
    MasksAsClasses,
    NoPairs,
    base_name,
    check_has_masks,
    endings_instead,
    find_class_parts,
    find_layout,
    find_set,
    find_sets,
    has_image,
    has_own_images,
    part_alone,
    part_named,
    places_of_images,
    subfolders,
    unwrapped,
)
from ipucnn.datasets.limits import HELD_OUT_SHARE, MAX_IMAGE_PIXELS
from ipucnn.errors import ConfigurationError, DataError, did_you_mean
from ipucnn.filesystem import Kind, expand, kind_of, shown
from ipucnn.python_files import (
    OwnFunction,
    entry_points,
    find_function,
    is_python_name,
    label_of,
)
from ipucnn.text import printable, quoted, shown_value

if TYPE_CHECKING:
    from ipucnn.datasets import base, classes, damaged
    from ipucnn.datasets.base import DataSource
    from ipucnn.datasets.segmentation import imagemasks
    from ipucnn.datasets.sources import cifar, embedded, idx, imagefolder, in_memory, records
    from ipucnn.datasets.sources import download as downloads
else:

    class _Module:
        """A module of this package that is imported when one of its attributes is first used."""

        def __init__(self, name: str) -> None:
            self._name = f"ipucnn.datasets.{name}"

        def __getattr__(self, name: str) -> object:
            return getattr(importlib.import_module(self._name), name)

    base, classes, damaged = _Module("base"), _Module("classes"), _Module("damaged")
    imagemasks = _Module("segmentation.imagemasks")
    cifar, idx = _Module("sources.cifar"), _Module("sources.idx")
    downloads, embedded = _Module("sources.download"), _Module("sources.embedded")
    imagefolder, in_memory = _Module("sources.imagefolder"), _Module("sources.in_memory")
    records = _Module("sources.records")

ANY_TASK = "any"
GROUP = "ipucnn.datasets"
"""The group of entry points through which installed packages offer data sets, as functions of Python files do."""


class ReaderOptions(NamedTuple):
    """Options of the readers; each reader uses those that concern its data set.

    Attributes:
        seed: seed of generated sets, and of the images that a limit keeps.
        image_shape: (height, width, channels) of generated sets; membranes are always grey.
        num_classes: number of classes of noise.
        max_image_pixels: the most pixels of an image, or of a page of a volume.
        least_train: the fewest training images of noise.
        validation_fraction: the share of each class that is held out of a folder without train/ and val/.
        allow_partial: whether to leave out images without a mask, and masks without an image.
        skip_damaged: whether to leave out images that cannot be decoded.
        has_class_weights: whether the loss weighs the classes; without it, a warning about unbalanced ones names it.
    """

    seed: int = 0
    image_shape: Optional[Tuple[int, int, int]] = None
    num_classes: Optional[int] = None
    max_image_pixels: int = MAX_IMAGE_PIXELS
    least_train: int = 0
    validation_fraction: float = HELD_OUT_SHARE
    allow_partial: bool = False
    skip_damaged: bool = False
    has_class_weights: bool = False


@dataclass(frozen=True)
class DatasetRecord:
    """A data set that has a name.

    Attributes:
        task: "classification", "segmentation", or "any".
        summary: one line for tables and help.
        open: the reader of a choice of this set, whose files are found.
        files: the expected files, for messages; empty for sets without files.
        image_shape: (height, width, channels) of its images, if known without reading them.
        num_classes: number of classes, if known without reading the set.
        num_examples: published numbers of training and evaluation examples, for sets with files.
    """

    task: str
    summary: str
    open: "Callable[[ChosenDataset, ReaderOptions], DataSource]"
    files: str = ""
    image_shape: Optional[Tuple[int, int, int]] = None
    num_classes: Optional[int] = None
    num_examples: Optional[Tuple[int, int]] = None


def _open_membranes(choice: "ChosenDataset", opening: ReaderOptions) -> "DataSource":
    from ipucnn.datasets.segmentation.membranes import DEFAULT_SIZE, open_membranes

    height, width = opening.image_shape[:2] if opening.image_shape else (DEFAULT_SIZE, DEFAULT_SIZE)
    return open_membranes(height, width, opening.seed)


def _open_random(choice: "ChosenDataset", opening: ReaderOptions) -> "DataSource":
    classes = opening.num_classes or (2 if choice.task == "segmentation" else 10)
    shape, num_train = (
        opening.image_shape or embedded.DEFAULT_SHAPE,
        max(embedded.NUM_TRAIN, opening.least_train),
    )
    return embedded.open_random(*shape, classes, choice.task, opening.seed, num_train)


def _open_imagenet(choice: "ChosenDataset", opening: ReaderOptions) -> "DataSource":
    if not choice.files.parts:
        return records.open_records(choice.files.location, opening.skip_damaged)
    return _open_imagefolder(choice, opening)


def _open_imagefolder(choice: "ChosenDataset", opening: ReaderOptions) -> "DataSource":
    return imagefolder.open_imagefolder(choice.files, opening.validation_fraction, opening.has_class_weights)


def _open_pairs(choice: "ChosenDataset", opening: ReaderOptions) -> "DataSource":
    limit = opening.max_image_pixels
    try:
        return imagemasks.open_pairs(choice.files, limit, opening.allow_partial, opening.skip_damaged)
    except NoPairs as error:
        from ipucnn.datasets.sorting import sorting_hint

        command = sorting_hint(choice.files.location, "segmentation").command
        raise DataError(error.message, command or error.hint, error.code) from error


def _open_tfds(choice: "ChosenDataset", opening: ReaderOptions) -> "DataSource":
    from ipucnn.datasets.sources.tfds import open_tfds

    return open_tfds(choice.name, choice.files.location)


def _idx_record(summary: str) -> DatasetRecord:
    return DatasetRecord(
        "classification",
        summary,
        lambda choice, opening: idx.open_idx(choice.files),
        "the four files train-/t10k- images-idx3-/labels-idx1-ubyte[.gz]",
        (28, 28, 1),
        10,
        (60_000, 10_000),
    )


def _cifar_record(name: str, num_classes: int) -> DatasetRecord:
    return DatasetRecord(
        "classification",
        f"32x32 colour, {num_classes} classes",
        lambda choice, opening: cifar.open_cifar(choice.files),
        " or ".join(FILE_SETS[name].folders[:2]),
        (32, 32, 3),
        num_classes,
        (50_000, 10_000),
    )


DATASETS: Dict[str, DatasetRecord] = {
    "digits": DatasetRecord(
        "classification",
        "8x8 handwritten digits, embedded (scikit-learn)",
        lambda choice, opening: embedded.open_digits(),
        image_shape=(8, 8, 1),
        num_classes=10,
    ),
    "membranes": DatasetRecord(
        "segmentation", "generated tissue with membrane masks, any size", _open_membranes
    ),
    "isbi2012": DatasetRecord(
        "segmentation",
        "30 slices of fly brain, 512x512, with membrane masks",
        _open_pairs,
        "train-volume.tif and train-labels.tif",
    ),
    "mnist": _idx_record("28x28 handwritten digits"),
    "fashion_mnist": _idx_record("28x28 clothes"),
    "cifar10": _cifar_record("cifar10", 10),
    "cifar100": _cifar_record("cifar100", 100),
    "imagenet": DatasetRecord(
        "classification",
        "ImageNet as TFRecord files or as an image folder",
        _open_imagenet,
        "imagenet/train-*-of-01024 and validation-*-of-00128, or imagenet/{train,val}/CLASS/*.JPEG",
        num_classes=1000,
        num_examples=(1_281_167, 50_000),  # Russakovsky et al. 2015, table 2
    ),
    "imagefolder": DatasetRecord(
        "classification",
        "an image folder",
        _open_imagefolder,
        "{train,val}/CLASS/*.jpg",
    ),
    "imagemasks": DatasetRecord(
        "segmentation",
        "a folder of image and mask pairs",
        _open_pairs,
        "[train|val/]{images,masks}/NAME.png, NAME.png with NAME_mask.png, or imagesTr/ and labelsTr/",
    ),
    "random": DatasetRecord("any", "noise made on the host, for throughput", _open_random),
}


def needs_files(name: str) -> bool:
    """Returns whether a set, a name of DATASETS or tfds:NAME, is read from files."""
    return name.startswith(TFDS_PREFIX) or name in FILE_SETS or name in LAYOUTS


# Choosing and opening the data set of a run.


EMBEDDED = {"classification": "digits", "segmentation": "membranes"}


@dataclass(frozen=True)
class ChosenDataset:
    """The data set that a run uses.

    Attributes:
        name: a key of DATASETS, "tfds:NAME", the label of a function of the user's, or the name of arrays in memory.
        found: the set in its folder; None for embedded and generated sets, and before a download.
        message: one line for stderr: the set, its source, and the way to get the other one.
        task: "classification" or "segmentation".
        download_to: the data folder to download into; None if there is no download.
        like: the data set that noise replaces; noise has its size and classes if they are known.
        make: the user's function that reads the set; None for all other sets.
        is_opened: whether ``make`` is no function of the user's, and returns a set that was checked before.
        is_absent: whether the files are missing; the published number of blank images replaces them.
    """

    name: str
    found: Optional[Found]
    message: str
    task: str = "classification"
    download_to: Optional[Path] = None
    like: Optional[str] = None
    make: Optional[Callable[[], Any]] = None
    is_absent: bool = False
    is_opened: bool = False

    @property
    def files(self) -> Found:
        """The set in its folder, for a choice that has one."""
        assert self.found is not None
        return self.found

    @property
    def location(self) -> Optional[Path]:
        """The folder of the set; None if there is none."""
        return None if self.found is None else self.found.location

    @property
    def is_noise(self) -> bool:
        """Whether the set consists of random numbers, made on the host or on the device."""
        return self.name == "random"

    @property
    def sha256(self) -> Optional[str]:
        """Digest of the user's Python file that reads the set; None for all other sets."""
        return self.make.sha256 if isinstance(self.make, OwnFunction) and self.make.path else None


def choose_synthetic(like: Optional[str], task: str, where: str) -> ChosenDataset:
    """Chooses noise in place of a data set, whose files are not needed.

    Args:
        like: the data set's name, or None.
        task: the model's task.
        where: "host" or "ipu", for the message.

    Raises:
        ConfigurationError: the data set is unknown, or is a function of a Python file.
    """
    if like is not None and is_python_name(like):
        raise ConfigurationError(
            f"synthetic data in place of {shown_value(like)}: only running that file would tell the size of its images",
            "use --dataset random; --image-size says how large the images are",
        )
    if like is not None and known_as(like) is None and not _may_be_elsewhere(like):
        raise _unknown(like, task)
    origin = "made on the host" if where == "host" else "one batch, kept on the device"
    named = f", in place of {like}" if like is not None else ""
    return ChosenDataset(
        "random", None, f"synthetic data{named}: noise, {origin}; nothing can be learned", task, like=like
    )


def _may_be_elsewhere(name: str) -> bool:
    """Returns whether a name may be that of a TFDS set or a folder, which noise can replace without its files."""
    return name.lower().startswith(TFDS_PREFIX) or "/" in name or expand(name).is_dir()


# The kinds of folder that --dataset accepts, by task.
_FOLDERS = {
    "classification": "tfds:NAME, a folder with a folder of images for each class",
    "segmentation": "a folder with images/ and masks/",
}


def _unknown(name: str, task: str) -> ConfigurationError:
    fitting = [
        known for known, record in DATASETS.items() if task == ANY_TASK or record.task in (ANY_TASK, task)
    ]
    folders = ", ".join(text for for_task, text in _FOLDERS.items() if task in (ANY_TASK, for_task))
    return ConfigurationError(
        f"--dataset {shown_value(name)}: there is no such folder"
        if os.sep in name
        else f"data set '{name}' is unknown, and there is no such folder",
        did_you_mean(name, fitting) or f"choose one of {', '.join(fitting)}, {folders}, or FILE.py:FUNCTION",
    )


def choose_dataset(
    name: Optional[str],
    path: Path,
    *,
    home: str,
    task: str,
    download: bool = False,
    reads_files: bool = True,
    is_path_typed: bool = False,
) -> ChosenDataset:
    """Chooses the data set of a run; of files, it checks only which exist.

    Args:
        name: the value of ``--dataset``: a name, tfds:NAME, a folder of images, FILE.py:FUNCTION, or a name that an
            installed package offers.  None stands for the default data set if it lies in ``path``, else for the
            embedded one of the task.
        path: the value of ``--dataset-path``, the folder to search.
        home: the model's default data set.
        task: the model's task; ANY_TASK for verification, which also takes incomplete sets.
        download: whether an absent set may be downloaded (when it is opened).
        reads_files: whether the files are needed; if False, the published size of an absent set is enough.
        is_path_typed: whether the user gave ``path``, which is then refused if nothing is found there.

    Raises:
        ConfigurationError: the name is unknown, the set is for another task, or a typed ``path`` has no effect.
        DataError: the files of the named set are absent.
    """
    if name is None:
        return _choose_default(path, home, task, download, is_path_typed)
    is_tfds = name.lower().startswith(TFDS_PREFIX)
    if is_python_name(name) and not is_tfds:
        function = find_function(name, "load")
        return ChosenDataset(label_of(name), None, f"data set {shown_value(name)}", task, make=function)
    known = canonical(name)
    if is_tfds:
        known = TFDS_PREFIX + name[len(TFDS_PREFIX) :]
        if any(part in ("", ".", "..") for part in name[len(TFDS_PREFIX) :].split("/")):
            raise ConfigurationError(f"'{known}' names no data set", "for example tfds:svhn_cropped")
    if known is None:
        return _choose_unregistered(name, task)
    chosen_task = _task_for(known, f"data set {known}", task)
    if known in LAYOUTS and task != ANY_TASK:
        check_is_there(path)
        with with_sorting_hint(path, task):
            return _choose_layout(known, path, find_layout(known, path))
    if not needs_files(known):
        return ChosenDataset(known, None, f"data set {known}, {_origin(known)}", chosen_task)
    found = find_set(known, path, explicit=True)
    size = None if reads_files or known not in DATASETS else DATASETS[known].num_examples
    if found is None and size is not None:
        published = (
            f"its published size stands for it, {size[0]:,} training and {size[1]:,} evaluation images"
        )
        return ChosenDataset(
            known, None, f"data set {known} is not in {path}: {published}", task, is_absent=True
        )
    choice = _located(known, found, path, chosen_task, download)
    if choice is not None:
        return choice
    check_is_there(path)
    raise DataError(f"data set {known} is not in {path}", _how_to_get(known, "--download"))


def _choose_unregistered(name: str, task: str) -> ChosenDataset:
    """Chooses arrays in memory, the set in a folder, or one of an installed package."""
    if name.startswith(in_memory.PREFIX):
        make = in_memory.find(name)
        return ChosenDataset(name, None, f"data set {name}", task, make=make, is_opened=True)
    folder = expand(name)
    kind, offered = kind_of(folder), entry_points(GROUP).get(name)
    if kind is Kind.FOLDER and offered is not None:
        raise ConfigurationError(
            f"{shown_value(name)} is a folder here, and a data set of an installed package",
            f"--dataset {quoted(os.path.join('.', name))} is the folder; the package's needs another current folder",
        )
    if kind is Kind.FOLDER:
        return choose_folder(folder, task)
    if offered is not None:
        return ChosenDataset(name, None, f"data set {name} of an installed package", task, make=offered)
    if kind is not Kind.ABSENT:
        raise DataError(f"data set {shown(folder)} is {kind.value}, not a folder", _hint_for_file(folder))
    raise _unknown(name, task)


def _hint_for_file(path: Path) -> str:
    """Returns the hint for a file in place of a data set."""
    name = path.name.lower()
    if name.endswith((".zip", ".tar", ".tar.gz", ".tar.bz2", ".tar.xz", ".tgz", ".7z", ".rar")):
        return "unpack it, and give the folder"
    if name.endswith((".npz", ".npy", ".h5", ".hdf5", ".mat", ".csv", ".parquet", ".pkl")):
        return "read it in a function of yours, and give FILE.py:FUNCTION (docs/own-networks.md)"
    return "give the folder it lies in"


def check_divides(choice: ChosenDataset, validation_fraction: float) -> None:
    """Rejects ``--validation-fraction`` for a set that already has an evaluation part.

    Raises:
        ConfigurationError: the set has one.
    """
    found = choice.found if choice.name == "imagefolder" else None
    if (found is not None and found.is_undivided) or in_memory.is_divided(choice.name):
        return
    if found is not None:
        why = f"{shown(found.location)} has parts of its own"
    else:
        why = f"the data set {choice.name} has an evaluation part of its own"
    raise ConfigurationError(
        f"--validation-fraction {validation_fraction:g} has no effect: {why}",
        "drop it"
        if choice.task == "segmentation"
        else "drop it; it divides folders DIR/CLASS/* without train/ and val/",
    )


def open_dataset(
    choice: ChosenDataset,
    options: ReaderOptions = ReaderOptions(),
    *,
    download: bool = False,
    limit_train: Optional[str] = None,
    limit_eval: Optional[str] = None,
) -> "DataSource":
    """Reads the set that :func:`choose_dataset` chose.

    Args:
        choice: the set.
        options: options of its reader.
        download: whether it may be downloaded.
        limit_train, limit_eval: number or share of images to keep: "500" or "10%".

    Raises:
        DataError: files are absent or damaged, or the set takes more than half of the memory.
        MissingError: an optional package or the network is needed.
        ConfigurationError: a limit is not a number.
    """
    if choice.make is not None:
        source = choice.make()
        if not choice.is_opened:
            source = in_memory.source_of(source, choice.name, choice.message[len("data set ") :])
        _check_task(choice.message, source.info.task, choice.task)
    elif choice.is_absent:
        return base.limit_source(_open_published(choice.name), limit_train, limit_eval, options.seed)
    else:
        choice = fetch(choice, download) if needs_files(choice.name) else choice
        is_tfds = choice.found is not None and choice.found.is_tfds
        source = (_open_tfds if is_tfds else DATASETS[choice.name].open)(choice, options)
    words = "" if choice.found is None else choice.found.choice_words
    info = replace(source.info, max_image_pixels=options.max_image_pixels, choice=words or source.info.choice)
    source = replace(source, info=info)
    if options.skip_damaged and not isinstance(source.train, base.IN_MEMORY):
        source = damaged.without_damaged(source)
    if choice.make is not None or needs_files(choice.name):
        source = classes.with_absent_named(source, source.info.location)
    return base.limit_source(source, limit_train, limit_eval, options.seed)


def _open_published(name: str) -> "DataSource":
    """Returns an absent set with blank images in its published numbers, for work that does not depend on pixels."""
    record = DATASETS[name]
    assert record.num_examples is not None and record.num_classes is not None
    shape = record.image_shape
    parts = [base.RecordExamples((), *[np.zeros(count, np.int32)] * 4) for count in record.num_examples]
    source = base.data_source(
        *parts,
        name=name,
        class_names=[str(n) for n in range(record.num_classes)],
        location="generated",
        channels=3 if shape is None else shape[2],
        augmentation="crop_flip",
    )
    if shape is None:
        return source
    # All pixels share one byte of memory.
    train, evaluation = (
        base.ArrayExamples(np.broadcast_to(np.uint8(0), (len(part), *shape)), part.labels) for part in parts
    )
    return replace(source, info=replace(source.info, image_shape=shape), train=train, eval=evaluation)


def fetch(choice: ChosenDataset, download: bool) -> ChosenDataset:
    """Returns the choice of a set whose files are there, after downloading them if necessary and allowed.

    Raises:
        DataError: the files are absent, or the downloaded ones are damaged.
        MissingError: the network or a package is missing.
    """
    name = choice.name
    if choice.found is not None:
        return choice
    if download and choice.download_to is not None:
        if name.startswith(TFDS_PREFIX):
            from ipucnn.datasets.sources.tfds import prepare

            folder = prepare(name[len(TFDS_PREFIX) :], choice.download_to)
            return replace(choice, found=Found(name, folder, is_tfds=True))
        folder = downloads.download(name, choice.download_to)
        return replace(choice, found=find_set(name, folder, explicit=True))
    raise DataError(f"data set {name} is not here", _how_to_get(name, "--download"))


def _choose_default(path: Path, home: str, task: str, download: bool, is_path_typed: bool) -> ChosenDataset:
    embedded_name = EMBEDDED[task]
    option = f"--dataset {embedded_name}"
    other = f"{option} for the embedded one" if task == "classification" else f"or {option}"
    if home not in DATASETS:
        if is_path_typed:
            check_is_there(path)
            raise ConfigurationError(
                f"--dataset-path {shown(path)} has no effect: without --dataset the data set is {embedded_name}",
                f"drop it, and give --dataset {quoted(path)}",
            )
        return ChosenDataset(embedded_name, None, f"data set {embedded_name}, {_origin(embedded_name)}", task)
    choice = _located(home, find_set(home, path), path, task, download, f" ({other})")
    if choice is not None:
        return choice
    get = _how_to_get(home, f"--dataset {home} --download")
    if is_path_typed:
        check_is_there(path)
        # Given as the data set, the folder is taken, or what is wrong in it is said.
        hint = f"drop it, and give --dataset {quoted(path)}"
        with suppress(DataError):
            sets = find_sets(path)
            named = [one.name for one in sets if one.name in DATASETS and DATASETS[one.name].task == task]
            if named:
                hint = f"add --dataset {' or --dataset '.join(named)}"
            elif not sets:
                hint = f"drop it for the data set {embedded_name}, or {get}"
        raise DataError(
            f"--dataset-path {shown(path)} lacks {home}, the default data set of this network", hint
        )
    why = f"{home}, this model's default data set, is not in {path} ({get})"
    layout, words = ("imagemasks", "and masks") if task == "segmentation" else ("imagefolder", "in folders")
    # Nobody named this folder, which may be the root of a disk: no tree is walked, and no error concerns the user.
    with suppress(DataError, OSError):
        found = find_layout(layout, path) if task == "segmentation" else find_class_parts(path)
        if found is not None and _is_complete(found):
            why += f"; {path} has images {words}: add --dataset {layout} to take them"
    message = f"data set {embedded_name}, {_origin(embedded_name)}: {why}"
    return ChosenDataset(embedded_name, None, message, task)


def _located(
    name: str, found: Optional[Found], path: Path, task: str, download: bool, other: str = ""
) -> Optional[ChosenDataset]:
    """Returns the choice of a set whose files are present or are to be downloaded to ``path``; None for any other.

    Args:
        other: text about other sets, for the end of the message.
    """
    if found is not None:
        return ChosenDataset(name, found, f"data set {name} from {found.location}{found.choice}{other}", task)
    if download and (name in downloads.REMOTES or name.startswith(TFDS_PREFIX)):
        return ChosenDataset(name, None, f"data set {name}, to be downloaded to {path}{other}", task, path)
    return None


def check_is_there(folder: Path) -> None:
    """Rejects a ``--dataset-path`` that is not an existing folder.

    Raises:
        DataError: it does not exist, or is not a folder.
    """
    kind, hint = kind_of(folder), "pass --dataset-path with the folder of the data"
    if kind is Kind.ABSENT:
        raise DataError(f"data folder {folder} does not exist", hint)
    if kind is not Kind.FOLDER:
        raise DataError(f"--dataset-path {folder} is {kind.value}, not a folder", hint)


def choose_folder(folder: Path, task: str) -> ChosenDataset:
    """Chooses the data set in a folder that was given in place of a name.

    Raises:
        ConfigurationError: the folder holds a set for another task, or several sets.
        DataError: the folder holds no set, or one that lacks a part that training needs.
    """
    with with_sorting_hint(folder, task):
        return _choose_in(folder, task)


@contextmanager
def with_sorting_hint(folder: Path, task: str) -> Iterator[None]:
    """Gives an error of the block the hint that makes a set of the folder, if names or a table tell how."""
    try:
        yield
    except (DataError, ConfigurationError) as error:
        from ipucnn.datasets.sorting import hint_without_masks, sorting_hint

        command, reason = "", ""
        code = error.code if isinstance(error, DataError) else ""
        is_of_masks = code in (MASKS_INSIDE, MASK_OF_EACH)
        if is_of_masks and task != "segmentation":
            command = hint_without_masks(folder, code == MASKS_INSIDE)
        elif (
            is_of_masks
            or (isinstance(error, MasksAsClasses) and task == "segmentation")
            or not (isinstance(error, MasksAsClasses) or re.search(_NAMES_A_SET, error.hint or ""))
        ):
            command, reason = sorting_hint(folder, task)
        around = re.search(f"; or {_THE_SET_AROUND} --dataset .*", error.hint or "", re.DOTALL)
        command += around[0] if command and around else ""
        # Files that do not tell the classes or masks concern no other error.
        is_unknown = any(layout in (error.hint or "") for layout in ("CLASS/", PAIR_LAYOUT, _LAYOUTS))
        reason = reason if is_unknown else ""
        if not (command or reason):
            raise
        message = f"{error.message}; {reason}" if reason else error.message
        raise type(error)(message, command or error.hint, *([code] if code else [])) from error


def _choose_in(folder: Path, task: str) -> ChosenDataset:
    try:
        sets = find_sets(folder)
    except MasksAsClasses:
        raise
    except DataError:
        if task != "segmentation" or find_layout("imagemasks", folder) is not None:
            raise
        sets = []  # the error is about class folders
    if task == "segmentation":
        sets = [one for one in sets if one.name != "imagefolder"]
    return choose_found(sets, folder, task)


def choose_found(sets: Sequence[Found], folder: Path, task: str) -> ChosenDataset:
    """Chooses one of the data sets that were found in a folder; raises as :func:`choose_folder` does."""
    if not sets and task == ANY_TASK:
        endings = _unread_endings(folder)
        raise DataError(
            f"{shown(folder)} holds no data set that is known{f': {endings}' if endings else ''}",
            _LAYOUTS
            + _inside(folder, find_sets)
            + (_around(folder, "imagemasks") or _around(folder, "imagefolder")),
        )
    if len(sets) > 1:
        raise ConfigurationError(
            f"{shown(folder)} holds {' and '.join(found.name for found in sets)}",
            f"--dataset {sets[0].name} --dataset-path {quoted(folder)}",
        )
    if sets and sets[0].name == "imagemasks":
        check_has_masks(sets[0])
    if sets and sets[0].name == "imagemasks" and task == "classification":
        images, masks = next(iter(sets[0].parts.values()))
        if not masks.is_dir():
            raise DataError(
                f"{shown(folder)} has images in {printable(images.name)}/, and neither class folders nor masks",
                _hint_for_pairs(folder, sets),
            )
    name = sets[0].name if sets else "imagemasks" if task == "segmentation" else "imagefolder"
    chosen_task = _task_for(name, f"folder {folder}", task, _hint_for_pairs(folder, sets))
    if not sets or (name in LAYOUTS and task != ANY_TASK):
        return _choose_layout(name, folder, sets[0] if sets else None)
    return ChosenDataset(
        name, sets[0], f"data set {name} from {sets[0].location}{sets[0].choice}", chosen_task
    )


def _hint_for_pairs(folder: Path, sets: Sequence[Found]) -> str:
    """Returns the hint for a network of classes if a folder has images and masks, which may be classes; else ""."""
    if not sets or sets[0].name != "imagemasks":
        return ""
    if not next(iter(sets[0].parts.values()))[1].is_dir():
        try:
            find_layout("imagefolder", folder)
        except DataError as error:
            return error.hint or ""  # there are other folders beside images/
        return f"put the images of each class into a folder of its own: {shown(folder)}/CLASS/*.jpg"
    hint = f"masks are for the network unet: ipucnn train unet --dataset {quoted(folder)}"
    images = unwrapped(next(iter(sets[0].parts.values()))[0])
    with suppress(DataError, OSError):
        if find_layout("imagefolder", images) is not None:
            hint += f"; for the class folders in it: --dataset {quoted(images)}"
    with suppress(DataError, OSError):
        classes = find_layout("imagefolder", folder)
        if classes is not None and _is_complete(classes):
            hint += f"; if these folders are classes: --dataset imagefolder --dataset-path {quoted(folder)}"
    return hint


def _task_for(name: str, what: str, requested: str, hint: str = "") -> str:
    """Returns the task of a set; for a set that fits any task, the requested one.

    Raises ConfigurationError, with ``what`` as its subject, if another task is requested.
    """
    task = DATASETS[name].task if name in DATASETS else "classification"
    if task == ANY_TASK:
        return "classification" if requested == ANY_TASK else requested
    _check_task(what, task, requested, hint)
    return task


def _choose_layout(name: str, folder: Path, found: Optional[Found]) -> ChosenDataset:
    """Chooses an image folder, or a folder of images and masks, that has all parts that training needs.

    Raises:
        DataError: the folder lacks a part.
    """
    if found is not None and _is_complete(found):
        message = f"data set {name} from {folder}{found.choice}"
        return ChosenDataset(name, found, message, DATASETS[name].task)
    if name == "imagemasks":
        if found is not None:
            check_has_masks(found)
        inside = (
            "" if found is not None else _inside(folder, partial(find_layout, name)) + _around(folder, name)
        )
        places = places_of_images(folder)
        lie = f": images lie in {places}" if places else ""
        alone = "" if found is None or "train" in found.parts else part_alone(found)
        raise DataError(f"{folder} holds no pairs of images and masks{lie}", PAIR_LAYOUT + alone + inside)
    text, hint = f"{folder} is not an image folder: it lacks train/ or val/", CLASS_LAYOUT
    if found is not None and found.parts:
        hint = _hint_for_bare_part(folder, found) or hint + part_alone(found)
    else:
        hint += ", or two or more folders DIR/CLASS/*.jpg"
        endings = _unread_endings(folder) if found is None else ""
        text = f"{folder} is not an image folder: {endings}" if endings else text
        hint = (
            f"convert them ({READ}), or read them in a function of yours, FILE.py:FUNCTION"
            if endings
            else hint
        )
    near = "" if found is not None else _inside(folder, partial(find_layout, name)) + _around(folder, name)
    raise DataError(text, hint + near)


def _unread_endings(folder: Path) -> str:
    """Returns words about a folder without images, or the first folder in it without them beside others; or ""."""
    endings = endings_instead(folder)
    if endings:
        return f"no file in it is named like an image; their endings are {endings}"
    for path in subfolders(folder):
        endings = endings_instead(path)
        if endings:
            return f"no file in {printable(path.name)}/ is named like an image; their endings are {endings}"
    return ""


def _hint_for_bare_part(folder: Path, found: Found) -> str:
    """Returns the hint for class folders of training beside images of evaluation whose classes a table has; or ""."""
    from ipucnn.datasets.sorting import sorted_part_hint

    classes = [path.name for part in found.parts.get("train", ()) for path in subfolders(part)]
    for part in subfolders(folder):
        if part_named(part.name) in ("validation", "test") and has_image(part):
            command, left_out = sorted_part_hint(part, classes)
            if command:
                return f"{shown(part)} has images without class folders, {_OF_TABLE}{left_out}: {command}"
    return ""


_LAYOUTS = (
    "class folders of images, alone or in train/ and val/, images/ and masks/, or the files of mnist, fashion_mnist, "
    "cifar10, cifar100, isbi2012, imagenet's records or a TFDS set"
)
_THE_SET = "the set in it:"
_THE_SET_AROUND = "the set that it is a part of:"
_OF_TABLE = "and a table has their classes"
_NAMES_A_SET = f"({_THE_SET}|the part alone:) --dataset|{_OF_TABLE}"
"""Words of hints that no other hint replaces."""


def _inside(folder: Path, find: Callable[[Path], object]) -> str:
    """Returns words for a hint that name a folder in a folder with a data set in it, the first whole one; or ""."""
    inside, whole = [], []
    for path in map(unwrapped, subfolders(folder)):
        with suppress(DataError, OSError):
            found = find(path)
            inside += [path] if found else []
            whole += [path] if found and (not isinstance(found, Found) or _is_complete(found)) else []
    if len(inside) > 1:
        inside = whole
    if not inside:
        return ""
    which = _THE_SET if len(inside) == 1 else f"one of the {len(inside)} sets in it, such as"
    return f"; or {which} --dataset {quoted(inside[0])}"


def _around(folder: Path, name: str) -> str:
    """Returns words for a hint that name the folder around a folder, if that is a part of a whole set; or ""."""
    around = _parent(folder)
    part = part_named(Path(os.path.abspath(around)).name)
    for whole in (_parent(around), around) if part else (around,):
        with suppress(DataError, OSError):
            found = find_layout(name, whole)
            if found is not None and _is_complete(found) and _has_part(found, folder):
                return f"; or {_THE_SET_AROUND} --dataset {quoted(whole)}"
    return ""


def _has_part(found: Found, folder: Path) -> bool:
    """Whether a folder of images is one of a set: of images, of masks, or of a class beside folders of images alone."""
    if not has_own_images(folder):
        return False
    parts, here = [path for part in found.parts.values() for path in part], folder.resolve()
    if found.name == "imagemasks":
        return any(path.resolve() == here for path in parts)
    classes = [path for part in parts for path in subfolders(part)]
    return any(path.resolve() == here for path in classes) and all(
        has_own_images(path) and not subfolders(path) for path in classes
    )


def _parent(folder: Path) -> Path:
    """Returns the folder around a folder; for the current folder and those above it a path that ends with ``..``."""
    return folder.parent if folder.name not in ("", "..") else folder / ".."


def _is_complete(found: Found) -> bool:
    """Returns whether a layout has all parts that training needs; ipucnn divides class folders alone itself."""
    if found.name == "imagemasks":
        return "train" in found.parts and all(map(Path.is_dir, found.parts["train"]))
    return len(found.parts) == 2 or found.is_undivided


def _how_to_get(name: str, download: str) -> str:
    """Returns the hint for the absent files of a data set; ``download`` are the words that download it."""
    if name.startswith(TFDS_PREFIX):
        folder = name[len(TFDS_PREFIX) :]
        return f"put the prepared TFDS folder {folder}/ there, or pass {download}"
    text = f"put {DATASETS[name].files} there, or give the folder that has it: --dataset-path DIR"
    return text + (f", or pass {download}" if name in downloads.REMOTES else "")


def _origin(name: str) -> str:
    return embedded.LOCATION if name == "digits" else "generated"


def _fold(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def canonical(name: str) -> Optional[str]:
    """Returns the registered name for any spelling of it (case, ``-``, ``_`` or neither); None for an unknown set."""
    return next((known for known in DATASETS if _fold(known) == _fold(name)), None)


def is_folder_name(name: Optional[str]) -> bool:
    """Returns whether a value of ``--dataset`` can only be a folder: no name, no function and no set of a package."""
    return not (
        name is None
        or name.startswith((TFDS_PREFIX, in_memory.PREFIX))
        or is_python_name(name)
        or canonical(name) is not None
        or name in entry_points(GROUP)
    )


def known_as(name: str) -> Optional[str]:
    """Returns the registered name of a set, also for tfds:NAME[/CONFIG][:VERSION]; None for an unknown set."""
    prefix = name[: len(TFDS_PREFIX)].lower()
    return canonical(base_name(prefix + name[len(prefix) :]))


def _check_task(what: str, task: str, requested: str, hint: str = "") -> None:
    if requested not in (ANY_TASK, task):
        if not hint:
            more = "; masks are for the network unet" if task == "segmentation" else ""
            hint = f"for example --dataset {EMBEDDED[requested]}{more}"
        raise ConfigurationError(f"{what} is for {task}, but the model does {requested}", hint)
