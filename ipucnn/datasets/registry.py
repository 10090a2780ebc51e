"""The table of data sets, and the location of their files.

A data set is one row of :data:`DATASETS`: its facts, the function that recognises its files in a folder, and its
reader.  All commands use :func:`find_kinds` to identify the data sets in a folder.
"""

import importlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from ipucnn.datasets.limits import HELD_OUT_SHARE, MAX_IMAGE_PIXELS
from ipucnn.errors import ConfigurationError, DataError, UserError, did_you_mean
from ipucnn.filesystem import Kind, entries, expand, is_file, is_folder, kind_of, read_bytes, real, shown
from ipucnn.python_files import (
    OwnFunction,
    entry_points,
    find_function,
    is_python_name,
    label_of,
)
from ipucnn.text import printable, shown_value

if TYPE_CHECKING:
    from ipucnn.datasets import base, damaged
    from ipucnn.datasets.base import DataSource
    from ipucnn.datasets.segmentation import imagemasks, isbi2012
    from ipucnn.datasets.sources import cifar, embedded, idx, imagefolder, in_memory, records
    from ipucnn.datasets.sources import download as downloads
else:

    class _Module:
        """A module of this package that is imported when one of its attributes is first used."""

        def __init__(self, name: str) -> None:
            self._name = f"ipucnn.datasets.{name}"

        def __getattr__(self, name: str) -> object:
            return getattr(importlib.import_module(self._name), name)

    base, damaged = _Module("base"), _Module("damaged")
    imagemasks, isbi2012 = _Module("segmentation.imagemasks"), _Module("segmentation.isbi2012")
    cifar, idx = _Module("sources.cifar"), _Module("sources.idx")
    downloads, embedded = _Module("sources.download"), _Module("sources.embedded")
    imagefolder, in_memory = _Module("sources.imagefolder"), _Module("sources.in_memory")
    records = _Module("sources.records")

INFO_FILE = "dataset_info.json"
"""The file that TFDS writes into the folder of every prepared version."""
_MOST_INFO_BYTES = 2**26
TFDS_PREFIX = "tfds:"
ANY_TASK = "any"
GROUP = "ipucnn.datasets"
"""The group of entry points through which installed packages offer data sets, as functions of Python files do."""


class Opening(NamedTuple):
    """Options of the readers; each reader uses those that concern its data set.

    Attributes:
        seed: seed of generated sets, and of the images that a limit keeps.
        image_shape: (height, width, channels) of generated sets; membranes are always grey.
        num_classes: number of classes of noise.
        max_image_pixels: the most pixels of an image, or of a page of a volume.
        least_train: the fewest training images of noise.
        validation_fraction: the share of each class that is held out of a folder without train/ and val/.
        allow_partial: whether to leave out images without a mask, and masks without an image.
        name, location, task: the chosen set, its folder and its task; :func:`open_dataset` sets them.
    """

    seed: int = 0
    image_shape: Optional[Tuple[int, int, int]] = None
    num_classes: Optional[int] = None
    max_image_pixels: int = MAX_IMAGE_PIXELS
    least_train: int = 0
    validation_fraction: float = HELD_OUT_SHARE
    allow_partial: bool = False
    name: str = ""
    location: Path = Path()
    task: str = "classification"


@dataclass(frozen=True)
class DatasetRecord:
    """A data set that has a name.

    Attributes:
        task: "classification", "segmentation", or "any".
        summary: one line for tables and help.
        open: the reader.
        has_files: function that returns whether a folder holds files of the set, complete or not, by their names; None
            for sets without files.
        files: the expected files, for messages; empty for sets without files.
        folders: the usual folders of the set, below the data folder.
        image_shape: (height, width, channels) of its images, if known without reading them.
        num_classes: number of classes, if known without reading the set.
        num_examples: published numbers of training and evaluation examples, for sets with files.
    """

    task: str
    summary: str
    open: "Callable[[Opening], DataSource]"
    has_files: Optional[Callable[[Path], bool]] = None
    files: str = ""
    folders: Tuple[str, ...] = ()
    image_shape: Optional[Tuple[int, int, int]] = None
    num_classes: Optional[int] = None
    num_examples: Optional[Tuple[int, int]] = None


def _open_membranes(opening: Opening) -> "DataSource":
    from ipucnn.datasets.segmentation.membranes import DEFAULT_SIZE, open_membranes

    height, width = opening.image_shape[:2] if opening.image_shape else (DEFAULT_SIZE, DEFAULT_SIZE)
    return open_membranes(height, width, opening.seed)


def _open_random(opening: Opening) -> "DataSource":
    classes = opening.num_classes or (2 if opening.task == "segmentation" else 10)
    shape, num_train = (
        opening.image_shape or embedded.DEFAULT_SHAPE,
        max(embedded.NUM_TRAIN, opening.least_train),
    )
    return embedded.open_random(*shape, classes, opening.task, opening.seed, num_train)


def _open_imagenet(opening: Opening) -> "DataSource":
    if records.has_shards(opening.location):
        return records.open_records(opening.location)
    return imagefolder.open_imagefolder(opening.location, opening.name)


def _open_tfds(opening: Opening) -> "DataSource":
    from ipucnn.datasets.sources.tfds import open_tfds

    return open_tfds(opening.name, opening.location)


def _idx_record(summary: str, folders: Tuple[str, ...]) -> DatasetRecord:
    return DatasetRecord(
        "classification",
        summary,
        lambda opening: idx.open_idx(opening.name, opening.location),
        lambda folder: idx.has_files(folder),
        "the four files train-/t10k- images-idx3-/labels-idx1-ubyte[.gz]",
        folders,
        (28, 28, 1),
        10,
        (60_000, 10_000),
    )


def _cifar_record(name: str, num_classes: int, folders: Tuple[str, str]) -> DatasetRecord:
    return DatasetRecord(
        "classification",
        f"32x32 colour, {num_classes} classes",
        lambda opening: cifar.open_cifar(opening.name, opening.location),
        lambda folder: cifar.find_layout(name, folder) is not None,
        " or ".join(folders),
        (*folders, name, *(f"{name}/{folder}" for folder in folders)),
        (32, 32, 3),
        num_classes,
        (50_000, 10_000),
    )


DATASETS: Dict[str, DatasetRecord] = {
    "digits": DatasetRecord(
        "classification",
        "8x8 handwritten digits, embedded (scikit-learn)",
        lambda opening: embedded.open_digits(),
        image_shape=(8, 8, 1),
        num_classes=10,
    ),
    "membranes": DatasetRecord(
        "segmentation", "generated tissue with membrane masks, any size", _open_membranes
    ),
    "isbi2012": DatasetRecord(
        "segmentation",
        "30 slices of fly brain, 512x512, with membrane masks",
        lambda opening: isbi2012.open_isbi2012(opening.location, opening.max_image_pixels),
        lambda folder: isbi2012.has_files(folder),
        "train-volume.tif and train-labels.tif",
        ("isbi2012", "ISBI2012", "isbi-2012"),
    ),
    "mnist": _idx_record("28x28 handwritten digits", ("mnist", "MNIST", "MNIST/raw", "mnist/raw")),
    "fashion_mnist": _idx_record(
        "28x28 clothes", ("fashion_mnist", "fashion-mnist", "FashionMNIST", "FashionMNIST/raw")
    ),
    "cifar10": _cifar_record("cifar10", 10, ("cifar-10-batches-py", "cifar-10-batches-bin")),
    "cifar100": _cifar_record("cifar100", 100, ("cifar-100-python", "cifar-100-binary")),
    "imagenet": DatasetRecord(
        "classification",
        "ImageNet as TFRecord files or as an image folder",
        _open_imagenet,
        lambda folder: records.has_shards(folder) or bool(imagefolder.find_parts(folder)),
        "imagenet/train-*-of-01024 and validation-*-of-00128, or imagenet/{train,val}/CLASS/*.JPEG",
        ("imagenet",),
        num_classes=1000,
        num_examples=(1_281_167, 50_000),  # Russakovsky et al. 2015, table 2
    ),
    "imagefolder": DatasetRecord(
        "classification",
        "an image folder",
        lambda opening: imagefolder.open_imagefolder(
            opening.location, opening.name, opening.validation_fraction
        ),
        lambda folder: bool(imagefolder.find_parts(folder)) or imagefolder.is_undivided(folder),
        "{train,val}/CLASS/*.jpg",
    ),
    "imagemasks": DatasetRecord(
        "segmentation",
        "a folder of image and mask pairs",
        lambda opening: imagemasks.open_imagemasks(
            opening.location, opening.max_image_pixels, opening.allow_partial
        ),
        lambda folder: imagemasks.has_files(folder),
        "[train|val/]{images,masks}/NAME.png",
    ),
    "random": DatasetRecord("any", "noise made on the host, for throughput", _open_random),
}
_BY_LAYOUT = ("imagemasks", "imagefolder")
"""Sets that are recognised by the layout of a folder, whatever its name."""


def find_location(name: str, path: Path, *, explicit: bool = False) -> Optional[Path]:
    """Returns the folder that holds a set, complete or not: ``path`` itself, or one of the usual folders below it.

    MNIST and Fashion-MNIST have the same file names, and any image folder could be ImageNet.  If ``path`` itself holds
    such files, its name decides, unless the user named the set (``explicit``).
    """
    if name.startswith(TFDS_PREFIX):
        return find_tfds(name[len(TFDS_PREFIX) :], path)
    record = DATASETS[name]
    assert record.has_files is not None
    for folder in (path, *(path / below for below in record.folders)):
        if record.has_files(folder) and (explicit or folder != path or _is_called(name, folder)):
            return folder
    return find_tfds(name, path)


def _is_called(name: str, folder: Path) -> bool:
    """Returns whether a folder's name fits a set whose files are in it."""
    if name in idx.CLASS_NAMES:
        return ("fashion" in real(folder).as_posix().lower()) == (name == "fashion_mnist")
    return name != "imagenet" or real(folder).name.lower() == "imagenet"


def find_kinds(folder: Path) -> List[Tuple[str, Path]]:
    """Returns names and locations of the data sets in a folder, complete or not.

    Layouts of the folder itself are tried only if none of the other sets lies in the folder itself.
    """
    # Hugging Face also writes a file of this name into image folders; TFDS's records have no folders beside them.
    described = is_file(folder / INFO_FILE)
    if described and not (imagemasks.has_files(folder) or imagefolder.find_parts(folder)):
        return [(TFDS_PREFIX + printable("/".join(_described(folder)[0])), folder)]
    has_records = records.has_shards(folder)
    kinds = []
    for name, record in DATASETS.items():
        location = find_location(name, folder) if record.has_files and name not in _BY_LAYOUT else None
        # Class folders without records are an image folder, even if its name is "imagenet".
        if location is not None and (has_records or (name, location) != ("imagenet", folder)):
            kinds.append((name, location))
    if any(location == folder for _, location in kinds):
        return kinds
    layouts = ["imagenet"] if has_records else _BY_LAYOUT
    layout = next((name for name in layouts if DATASETS[name].has_files(folder)), None)  # type: ignore[misc]
    return kinds if layout is None else [*kinds, (layout, folder)]


def is_tfds(name: str, location: Path) -> bool:
    """Returns whether the set at a location is stored in the format of TFDS.

    Hugging Face also writes a file with the name of TFDS's description; it is ignored beside files of the set's own
    layout.
    """
    if name.startswith(TFDS_PREFIX):
        return True
    has_files = DATASETS[name].has_files
    is_named_by_layout = has_files is None or name in _BY_LAYOUT
    return not is_named_by_layout and is_file(location / INFO_FILE) and not has_files(location)  # type: ignore[misc]


def needs_files(name: str) -> bool:
    """Returns whether a set, a name of DATASETS or tfds:NAME, is read from files."""
    return name.startswith(TFDS_PREFIX) or DATASETS[name].has_files is not None


def find_tfds(name: str, path: Path) -> Optional[Path]:
    """Returns the newest prepared version of a TFDS set, or None.

    Args:
        name: NAME or NAME/CONFIG, with :VERSION to choose a version.
        path: the folder that holds NAME/[CONFIG/]VERSION, or the folder NAME, or the folder of the version.
    """
    base_name, _, version = name.partition(":")
    parts = tuple(base_name.split("/"))
    if is_file(path / INFO_FILE):
        names, its_version = _described(path)
        if names[: len(parts)] == parts and version in ("", its_version):
            return path
    roots = [path.joinpath(*parts)]
    if real(path).name == parts[0]:
        roots.append(path.joinpath(*parts[1:]))
    for root in roots:
        below = _folders(root)
        below += [folder for config in below for folder in _folders(config)]
        versions = [folder for folder in below if is_file(folder / INFO_FILE)]
        versions = [folder for folder in versions if version in ("", folder.name)]
        if versions:
            return max(versions, key=lambda folder: (_version(folder.name), str(folder)))
    return None


def _described(folder: Path) -> Tuple[Tuple[str, ...], str]:
    """Returns (NAME,) or (NAME, CONFIG), and the version, from the description of a prepared set; if it has no name,
    returns the names of its folders."""
    with suppress(UserError, ValueError, RecursionError):
        about = json.loads(read_bytes(folder / INFO_FILE, _MOST_INFO_BYTES))
        if isinstance(about, dict) and isinstance(about.get("name"), str):
            names = (about["name"], about.get("configName"))
            return tuple(str(name) for name in names if name), str(about.get("version", ""))
    return (real(folder).parent.name,), real(folder).name


def _folders(folder: Path) -> List[Path]:
    if not is_folder(folder):
        return []
    return [path for path in entries(folder) if not path.name.startswith(".") and is_folder(path)]


def _version(text: str) -> Tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else -1 for part in text.split("."))


# Choosing and opening the data set of a run.


EMBEDDED = {"classification": "digits", "segmentation": "membranes"}


@dataclass(frozen=True)
class Choice:
    """The data set that a run uses.

    Attributes:
        name: a key of DATASETS, "tfds:NAME", the label of a function of the user's, or the name of arrays in memory.
        location: the folder of the set; None for embedded and generated sets, and before a download.
        message: one line for stderr: the set, its source, and the way to get the other one.
        task: "classification" or "segmentation".
        download_to: the data folder to download into; None if there is no download.
        like: the data set that noise replaces; noise has its size and classes if they are known.
        make: the user's function that reads the set; None for all other sets.
        is_absent: whether the files are missing; the published number of blank images replaces them.
    """

    name: str
    location: Optional[Path]
    message: str
    task: str = "classification"
    download_to: Optional[Path] = None
    like: Optional[str] = None
    make: Optional[Callable[[], Any]] = None
    is_absent: bool = False

    @property
    def is_noise(self) -> bool:
        """Whether the set consists of random numbers, made on the host or on the device."""
        return self.name == "random"

    @property
    def sha256(self) -> Optional[str]:
        """Digest of the user's Python file that reads the set; None for all other sets."""
        return self.make.sha256 if isinstance(self.make, OwnFunction) and self.make.path else None


def choose_synthetic(like: Optional[str], task: str, where: str) -> Choice:
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
            "drop --dataset; --image-size says how large the images are",
        )
    if like is not None and known_as(like) is None and not _may_be_elsewhere(like):
        raise _unknown(like, task)
    origin = "made on the host" if where == "host" else "one batch, kept on the device"
    named = f", in place of {like}" if like is not None else ""
    return Choice(
        "random", None, f"synthetic data{named}: noise, {origin}; nothing can be learned", task, like=like
    )


def _may_be_elsewhere(name: str) -> bool:
    """Returns whether a name may be that of a TFDS set or a folder, which noise can replace without its files."""
    return name.lower().startswith(TFDS_PREFIX) or "/" in name or is_folder(expand(name))


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
    divides: bool = False,
    reads_files: bool = True,
) -> Choice:
    """Chooses the data set of a run; of files, it checks only which exist.

    Args:
        name: the value of ``--dataset``: a name, tfds:NAME, a folder of images, FILE.py:FUNCTION, or a name that an
            installed package offers.  None stands for the default data set if it lies in ``path``, else for the
            embedded one of the task.
        path: the value of ``--dataset-path``, the folder to search.
        home: the model's default data set.
        task: the model's task; ANY_TASK for verification, which also takes incomplete sets.
        download: whether an absent set may be downloaded (when it is opened).
        divides: whether a folder of classes may lack train/ and val/, because a share of it is held out.
        reads_files: whether the files are needed; if False, the published size of an absent set is enough.

    Raises:
        ConfigurationError: the name is unknown, or the set is for another task.
        DataError: the files of the named set are absent.
    """
    path = expand(str(path))
    if name is None:
        return _choose_default(path, home, task, download)
    is_tfds = name.lower().startswith(TFDS_PREFIX)
    if is_python_name(name) and not is_tfds:
        function = find_function(name, "load")
        return Choice(label_of(name), None, f"data set {shown_value(name)}", task, make=function)
    known = canonical(name)
    if is_tfds:
        known = TFDS_PREFIX + name[len(TFDS_PREFIX) :]
        if any(part in ("", ".", "..") for part in name[len(TFDS_PREFIX) :].split("/")):
            raise ConfigurationError(f"'{known}' names no data set", "for example tfds:svhn_cropped")
    if known is None:
        return _choose_unregistered(name, task, divides)
    chosen_task = _task_for(known, f"data set {known}", task)
    if known in _BY_LAYOUT and task != ANY_TASK:
        return _choose_layout(known, path, divides)
    if not needs_files(known):
        return Choice(known, None, f"data set {known}, {_origin(known)}", chosen_task)
    location = find_location(known, path, explicit=True)
    size = None if reads_files or known not in DATASETS else DATASETS[known].num_examples
    if location is None and size is not None:
        published = (
            f"its published size stands for it, {size[0]:,} training and {size[1]:,} evaluation images"
        )
        return Choice(known, None, f"data set {known} is not in {path}: {published}", task, is_absent=True)
    choice = _located(known, location, path, chosen_task, download)
    if choice is not None:
        return choice
    check_is_there(path)
    raise DataError(f"data set {known} is not in {path}", _how_to_get(known))


def _choose_unregistered(name: str, task: str, divides: bool) -> Choice:
    """Chooses arrays in memory, the set in a folder, or one of an installed package."""
    if name.startswith(in_memory.PREFIX):
        return Choice(name, None, f"data set {name}", task, make=in_memory.find(name))
    folder = expand(name)
    kind = kind_of(folder)
    if kind is Kind.FOLDER:
        return choose_folder(folder, task, divides)
    offered = entry_points(GROUP).get(name)
    if offered is not None:
        return Choice(name, None, f"data set {name} of an installed package", task, make=offered)
    if kind is not Kind.ABSENT:
        raise DataError(
            f"data set {shown(folder)} is {kind.value}, not a folder", "give the folder it lies in"
        )
    raise _unknown(name, task)


def check_divides(choice: Choice, validation_fraction: float) -> None:
    """Rejects ``--validation-fraction`` for a set that already has an evaluation part.

    Raises:
        ConfigurationError: the set has one.
    """
    folder = choice.location if choice.name == "imagefolder" else None
    if folder is not None and imagefolder.is_undivided(folder):
        return
    if folder is not None:
        why = f"{shown(folder)} has parts of its own"
    else:
        why = f"the data set {choice.name} has an evaluation part of its own"
    raise ConfigurationError(
        f"--validation-fraction {validation_fraction:g} has no effect: {why}",
        "drop it"
        if choice.task == "segmentation"
        else "drop it; it divides folders DIR/CLASS/* without train/ and val/",
    )


def open_dataset(
    choice: Choice,
    options: Opening = Opening(),
    *,
    download: bool = False,
    limit_train: Optional[str] = None,
    limit_eval: Optional[str] = None,
    skip_damaged: bool = False,
) -> "DataSource":
    """Reads the set that :func:`choose_dataset` chose.

    Args:
        choice: the set.
        options: options of its reader.
        download: whether it may be downloaded.
        limit_train, limit_eval: number or share of images to keep: "500" or "10%".
        skip_damaged: whether to leave out images of a folder that cannot be decoded.

    Raises:
        DataError: files are absent or damaged, or the set takes more than half of the memory.
        MissingError: an optional package or the network is needed.
        ConfigurationError: a limit is not a number.
    """
    if choice.make is not None:
        source = in_memory.source_of(choice.make(), choice.name, choice.message[len("data set ") :])
        _check_task(choice.message, source.info.task, choice.task)
    elif choice.is_absent:
        source = _open_published(choice.name)
    else:
        location = fetch(choice, download) if needs_files(choice.name) else Path()
        read = _open_tfds if is_tfds(choice.name, location) else DATASETS[choice.name].open
        source = read(options._replace(name=choice.name, location=location, task=choice.task))
    source = replace(source, info=replace(source.info, max_image_pixels=options.max_image_pixels))
    if skip_damaged and isinstance(source.train, base.FileExamples):
        source = damaged.without_damaged(source)
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


def fetch(choice: Choice, download: bool) -> Path:
    """Returns the folder of a set's files, after downloading them if necessary and allowed.

    Raises:
        DataError: the files are absent, or the downloaded ones are damaged.
        MissingError: the network or a package is missing.
    """
    name = choice.name
    if choice.location is not None:
        return choice.location
    if download and choice.download_to is not None:
        if name.startswith(TFDS_PREFIX):
            from ipucnn.datasets.sources.tfds import prepare

            return prepare(name[len(TFDS_PREFIX) :], choice.download_to)
        return downloads.download(name, choice.download_to)
    raise DataError(f"data set {name} is not here", _how_to_get(name))


def _choose_default(path: Path, home: str, task: str, download: bool) -> Choice:
    embedded_name = EMBEDDED[task]
    other = (
        f"--dataset {embedded_name} for the embedded one"
        if task == "classification"
        else f"or --dataset {embedded_name}"
    )
    record = DATASETS.get(home)
    if record is None or not record.files:
        chosen = home if record is not None else embedded_name
        return Choice(chosen, None, f"data set {chosen}, {_origin(chosen)}", task)
    choice = _located(home, find_location(home, path), path, task, download, f" ({other})")
    if choice is not None:
        return choice
    get = _how_to_get(home)
    why = f"{home}, this model's default data set, is not in {path} ({get})"
    if task == "segmentation" and imagemasks.is_imagemasks(path):
        why += f"; {path} has images and masks: add --dataset imagemasks to take them"
    elif task == "classification" and len(imagefolder.find_parts(path)) == 2:
        why += f"; {path} has images in folders: add --dataset imagefolder to take them"
    message = f"data set {embedded_name}, {_origin(embedded_name)}: {why}"
    return Choice(embedded_name, None, message, task)


def _located(
    name: str, location: Optional[Path], path: Path, task: str, download: bool, other: str = ""
) -> Optional[Choice]:
    """Returns the choice of a set whose files are present or are to be downloaded to ``path``; None for any other.

    Args:
        other: text about other sets, for the end of the message.
    """
    if location is not None:
        return Choice(name, location, f"data set {name} from {location}{other}", task)
    if download and (name in downloads.REMOTES or name.startswith(TFDS_PREFIX)):
        return Choice(name, None, f"data set {name}, to be downloaded to {path}{other}", task, path)
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


def choose_folder(folder: Path, task: str, divides: bool) -> Choice:
    """Chooses the data set in a folder that was given in place of a name.

    Raises:
        ConfigurationError: the folder holds a set for another task, or several sets.
        DataError: the folder holds no set, or one that lacks a part that training needs.
    """
    kinds = find_kinds(folder)
    if not kinds and task == ANY_TASK:
        raise DataError(
            f"{shown(folder)} holds no data set that is known",
            "class folders of images, alone or in train/ and val/, images/ and masks/, or the files of "
            "mnist, fashion_mnist, cifar10, cifar100, isbi2012, imagenet's records or a TFDS set",
        )
    if len(kinds) > 1:
        raise ConfigurationError(
            f"{shown(folder)} holds {' and '.join(name for name, _ in kinds)}",
            f"--dataset {kinds[0][0]} --dataset-path {shown(folder)}",
        )
    layout = "imagemasks" if task == "segmentation" else "imagefolder"
    name, location = kinds[0] if kinds else (layout, folder)
    chosen_task = _task_for(name, f"folder {folder}", task)
    if name in _BY_LAYOUT and task != ANY_TASK:
        return _choose_layout(name, folder, divides)
    return Choice(name, location, f"data set {name} from {location}", chosen_task)


def _task_for(name: str, what: str, requested: str) -> str:
    """Returns the task of a set; for a set that fits any task, the requested one.

    Raises ConfigurationError, with ``what`` as its subject, if another task is requested.
    """
    task = DATASETS[name].task if name in DATASETS else "classification"
    if task == ANY_TASK:
        return "classification" if requested == ANY_TASK else requested
    _check_task(what, task, requested)
    return task


def _choose_layout(name: str, folder: Path, divides: bool) -> Choice:
    """Chooses an image folder, or a folder of images and masks, that has all parts that training needs.

    Raises:
        DataError: the folder does not exist, or lacks a part.
    """
    check_is_there(folder)
    if name == "imagemasks" and not imagemasks.is_imagemasks(folder):
        raise DataError(f"{folder} holds no pairs of images and masks", imagemasks.LAYOUT)
    is_divided = name == "imagemasks" or len(imagefolder.find_parts(folder)) == 2
    if not is_divided and not (divides and imagefolder.is_undivided(folder)):
        layout = imagefolder.LAYOUT + (", or two or more folders DIR/CLASS/*.jpg" if divides else "")
        raise DataError(f"{folder} is not an image folder: it lacks train/ or val/", layout)
    return Choice(name, folder, f"data set {name} from {folder}", DATASETS[name].task)


def _how_to_get(name: str) -> str:
    if name.startswith(TFDS_PREFIX):
        folder = name[len(TFDS_PREFIX) :]
        return f"put the prepared TFDS folder {folder}/ there, or pass --dataset {name} --download"
    text = f"put {DATASETS[name].files} there, or point --dataset-path at the folder that has it"
    return text + (f", or pass --dataset {name} --download" if name in downloads.REMOTES else "")


def _origin(name: str) -> str:
    return embedded.LOCATION if name == "digits" else "generated"


def _fold(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def canonical(name: str) -> Optional[str]:
    """Returns the registered name for any spelling of it (case, ``-``, ``_`` or neither); None for an unknown set."""
    return next((known for known in DATASETS if _fold(known) == _fold(name)), None)


def known_as(name: str) -> Optional[str]:
    """Returns the registered name of a set, also for tfds:NAME[/CONFIG][:VERSION]; None for an unknown set."""
    if name.lower().startswith(TFDS_PREFIX):
        name = name[len(TFDS_PREFIX) :].split("/")[0].split(":")[0]
    return canonical(name)


def _check_task(what: str, task: str, requested: str) -> None:
    if requested not in (ANY_TASK, task):
        hint = f"for example --dataset {EMBEDDED[requested]}"
        if task == "segmentation":
            hint += "; masks are for the network unet"
        raise ConfigurationError(f"{what} is for {task}, but the model does {requested}", hint)
