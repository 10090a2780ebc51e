"""Which data sets there are, and where their files lie."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np

from ipucnn.datasets.base import DataSource, FileExamples, RecordExamples, limit_source, source_of
from ipucnn.datasets.damaged import without_damaged
from ipucnn.datasets.limits import MAX_IMAGE_PIXELS
from ipucnn.datasets.segmentation import imagemasks, isbi2012
from ipucnn.datasets.sources import cifar, embedded, idx, imagefolder, in_memory, records
from ipucnn.datasets.sources.download import REMOTES
from ipucnn.datasets.sources.download import download as download_files
from ipucnn.errors import ConfigurationError, DataError, UserError, did_you_mean
from ipucnn.filesystem import Kind, entries, expand, is_file, is_folder, kind_of, real, shown
from ipucnn.python_files import (
    PythonFunction,
    entry_point,
    find_function,
    is_python_name,
    label_of,
    load_entry_point,
    own_code_failed,
)
from ipucnn.text import shown_value

INFO_FILE = "dataset_info.json"
"""What TFDS writes into the folder of every prepared version."""
TFDS_PREFIX = "tfds:"
ANY_TASK = "any"
GROUP = "ipucnn.datasets"
"""Entry points of installed packages: functions as those of Python files."""


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
        num_examples: published numbers of training and evaluation examples, of sets that have files.
    """

    task: str
    summary: str
    files: str = ""
    folders: Tuple[str, ...] = ()
    image_shape: Optional[Tuple[int, int, int]] = None
    num_classes: Optional[int] = None
    num_examples: Optional[Tuple[int, int]] = None


_IDX_SIZE = (idx.FULL_SIZE["train"], idx.FULL_SIZE["eval"])
_CIFAR_SIZE = (50_000, cifar.TEST_SIZE)
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
        _IDX_SIZE,
    ),
    "fashion_mnist": DatasetRecord(
        "classification",
        "28x28 clothes",
        _IDX_FILES,
        ("fashion_mnist", "fashion-mnist", "FashionMNIST", "FashionMNIST/raw"),
        (28, 28, 1),
        10,
        _IDX_SIZE,
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
        _CIFAR_SIZE,
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
        _CIFAR_SIZE,
    ),
    "imagenet": DatasetRecord(
        "classification",
        "ImageNet as TFRecord files or as an image folder",
        "imagenet/train-*-of-01024 and validation-*-of-00128, or imagenet/{train,val}/CLASS/*.JPEG",
        ("imagenet",),
        num_classes=1000,
        num_examples=(1_281_167, 50_000),  # Russakovsky et al. 2015, table 2
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
        if not _has_files(name, folder):
            continue
        is_right = explicit or folder != path
        if name in idx.CLASS_NAMES:
            is_fashion = "fashion" in real(folder).as_posix().lower()
            is_right = is_right or is_fashion == (name == "fashion_mnist")
        elif name == "imagenet":
            # Any image folder could be ``path`` itself: only if it was asked for, or has the name.
            is_right = is_right or real(folder).name.lower() == "imagenet"
        else:
            is_right = True
        if is_right:
            return folder
    return find_tfds(name, path)


def _has_files(name: str, folder: Path) -> bool:
    """Whether a folder holds a set that is found by its files, in the layout it is published in."""
    if name in cifar.LAYOUTS:
        return cifar.find_layout(name, folder) is not None
    if name in idx.CLASS_NAMES:
        return idx.has_files(folder)
    if name == "isbi2012":
        return isbi2012.has_files(folder)
    return name == "imagenet" and (records.has_shards(folder) or imagefolder.is_image_folder(folder))


def is_tfds(name: str, location: Path) -> bool:
    """Whether what was found under a name is a set in the format of TFDS.

    Hugging Face writes a file called as TFDS's description, too: beside files of the set's own layout it says nothing.
    """
    if name.startswith(TFDS_PREFIX):
        return True
    is_named_by_layout = name in ("imagefolder", "imagemasks")
    return not is_named_by_layout and is_file(location / INFO_FILE) and not _has_files(name, location)


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


# Which data set a run uses, and opening it.


EMBEDDED = {"classification": "digits", "segmentation": "membranes"}


@dataclass(frozen=True)
class Choice:
    """Which data set a run uses.

    Attributes:
        name: a key of DATASETS, or "tfds:NAME".
        location: the folder it lies in; None for embedded and generated sets, and before a download.
        message: one line for stderr: which set, from where, and how to get the other.
        task: "classification" or "segmentation".
        download_to: the data folder it is to be fetched into, if it is.
        like: the data set that noise stands for, of whose size and classes it is where they are known.
        make: the function of the user's own that reads it; None of any other set.
        is_absent: its files are not here; as many blank images as are published of it stand for them.
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
        """Whether it is made of random numbers, on the host or on the device."""
        return self.name == "random"

    @property
    def sha256(self) -> Optional[str]:
        """Digest of the user's own Python file that reads it; None of any other set."""
        return self.make.sha256 if isinstance(self.make, PythonFunction) else None


def choose_synthetic(like: Optional[str], task: str, where: str) -> Choice:
    """Noise in place of a data set, of which nothing needs to be here.

    Args:
        like: its name, or None.
        task: the model's.
        where: "host" or "ipu", for the message.

    Raises:
        ConfigurationError: there is no such data set.
    """
    if like is not None and is_python_name(like):
        raise ConfigurationError(
            f"synthetic data in place of {shown_value(like)}: only running that file would tell the size of its images",
            "drop --dataset; --image-size says how large the images are",
        )
    if like is not None and known_as(like) is None and not _may_be_elsewhere(like):
        raise _unknown(like, task)
    made = "made on the host" if where == "host" else "one batch, kept on the device"
    named = f", in place of {like}" if like is not None else ""
    return Choice(
        "random", None, f"synthetic data{named}: noise, {made}; nothing can be learned", task, like=like
    )


def _may_be_elsewhere(name: str) -> bool:
    """Whether a name is that of a TFDS set, or of a folder, of which noise needs nothing to be here."""
    return name.lower().startswith(TFDS_PREFIX) or "/" in name or is_folder(expand(name))


# A folder that --dataset names, by task.
_FOLDERS = {
    "classification": "tfds:NAME, a folder with a folder of images for each class",
    "segmentation": "a folder with images/ and masks/",
}


def _unknown(name: str, task: str) -> ConfigurationError:
    fitting = [
        known for known, record in DATASETS.items() if task == ANY_TASK or record.task in (ANY_TASK, task)
    ]
    folders = ", ".join(text for own, text in _FOLDERS.items() if task in (ANY_TASK, own))
    return ConfigurationError(
        f"--dataset {shown_value(name)}: there is no such folder"
        if os.sep in name
        else f"data set '{name}' is unknown",
        did_you_mean(name, fitting) or f"choose one of {', '.join(fitting)}, {folders}, or FILE.py:FUNCTION",
    )


def list_datasets() -> List[str]:
    """The names ``--dataset`` takes, besides a folder and tfds:NAME."""
    return list(DATASETS)


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
    """Decides which data set is used, looking at no more than which files exist.

    Args:
        name: as given with ``--dataset``: a name, tfds:NAME, a folder of images, or None for the home data
            set where it lies in ``path`` and the embedded one of the task otherwise.
        path: ``--dataset-path``, the folder to look in.
        home: the model's home data set.
        task: the model's task.
        download: whether a set that is absent may be fetched (it is when it is opened).
        divides: whether a folder of classes may be without train/ and val/, because a share of it is held out.
        reads_files: False where the published size of a set will do if it is absent.

    Raises:
        ConfigurationError: the name is unknown, or the set is for another task.
        DataError: the set was named but its files are not there.
    """
    path = expand(str(path))
    if name is None:
        return _choose_default(path, home, task, download)
    if name.lower().startswith(TFDS_PREFIX):
        return _choose_tfds(name[len(TFDS_PREFIX) :], path, task, download)
    if name.startswith(in_memory.PREFIX):
        return Choice(name, None, f"data set {name}", task, make=in_memory.find(name))
    known = canonical(name)
    if is_python_name(name):
        function = find_function(name, "--dataset", "load")
        return Choice(label_of(name), None, f"data set {shown_value(name)}", task, make=function)
    if known is None:
        folder = expand(name)
        if is_folder(folder):
            if isbi2012.has_files(folder):
                _check_task(f"folder {folder}", "segmentation", task)
                return Choice("isbi2012", folder, f"data set isbi2012 from {folder}", task)
            if task == "segmentation" or imagemasks.is_imagemasks(folder):
                _check_task(f"folder {folder}", "segmentation", task)
                return _choose_imagemasks(folder)
            if records.has_shards(folder):
                return Choice("imagenet", folder, f"data set imagenet from {folder}")
            return _choose_imagefolder(folder, divides)
        entry = entry_point(GROUP, name)
        if entry is not None:
            make = _of_package(name, load_entry_point(entry))
            return Choice(name, None, f"data set {name} of {entry.value}", task, make=make)
        raise _unknown(name, task)
    _check_task(f"data set {known}", DATASETS[known].task, task)
    if known == "imagefolder":
        return _choose_imagefolder(path, divides)
    if known == "imagemasks":
        return _choose_imagemasks(path)
    if not DATASETS[known].files:
        return Choice(known, None, f"data set {known}, {_origin(known)}", task)
    location = find_location(known, path, explicit=True)
    if location is not None:
        return Choice(known, location, f"data set {known} from {location}", task)
    size = None if reads_files else DATASETS[known].num_examples
    if size is not None:
        published = (
            f"its published size stands for it, {size[0]:,} training and {size[1]:,} evaluation images"
        )
        return Choice(known, None, f"data set {known} is not in {path}: {published}", task, is_absent=True)
    if download and known in REMOTES:
        return Choice(known, None, f"data set {known}, to be downloaded to {path}", task, path)
    check_is_there(path)
    raise DataError(f"data set {known} is not in {path}", _how_to_get(known))


def check_divides(choice: Choice, validation_fraction: float) -> None:
    """Refuses a ``--validation-fraction`` of a set whose evaluation part is decided already.

    Raises:
        ConfigurationError: it is.
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
    *,
    download: bool = False,
    limit_train: Optional[str] = None,
    limit_eval: Optional[str] = None,
    seed: int = 0,
    image_shape: Optional[Tuple[int, int, int]] = None,
    num_classes: Optional[int] = None,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
    least_train: int = 0,
    validation_fraction: float = imagefolder.HELD_OUT_SHARE,
    allow_partial: bool = False,
    skip_damaged: bool = False,
) -> DataSource:
    """Reads what :func:`choose_dataset` chose.

    Args:
        choice: which set.
        download: whether it may be fetched.
        limit_train, limit_eval: how many images to keep: "500" or "10%".
        seed: of generated sets, and of which images a limit keeps.
        image_shape: (height, width, channels) of generated sets; membranes are grey whatever it says.
        num_classes: of the set "random".
        max_image_pixels: what an image, or a page of a volume, may have at most.
        least_train: training images that the set "random" has at least.
        validation_fraction: of each class of a folder without train/ and val/, the share that is held out.
        allow_partial: leave out images without a mask, and masks without an image.
        skip_damaged: whether images of a folder that cannot be decoded are left out instead of refused.

    Raises:
        DataError: files are absent or damaged, or the set takes more than half of the memory.
        MissingError: an optional package or the network is needed.
        ConfigurationError: a limit is not a number.
    """
    if choice.make is not None:
        source = source_of(choice.make(), choice.name, choice.message[len("data set ") :])
        _check_task(choice.message, source.info.task, choice.task)
    elif choice.is_absent:
        source = _open_published(choice.name)
    elif choice.name == "imagefolder":
        source = imagefolder.open_imagefolder(fetch(choice, download), choice.name, validation_fraction)
    else:
        source = _open(
            choice, download, seed, image_shape, num_classes, max_image_pixels, least_train, allow_partial
        )
    source = replace(source, info=replace(source.info, max_image_pixels=max_image_pixels))
    if skip_damaged and isinstance(source.train, FileExamples):
        source = without_damaged(source)
    return limit_source(source, limit_train, limit_eval, seed)


def _open(
    choice: Choice,
    download: bool,
    seed: int,
    image_shape: Optional[Tuple[int, int, int]],
    num_classes: Optional[int],
    max_image_pixels: int,
    least_train: int,
    allow_partial: bool,
) -> DataSource:
    name = choice.name
    if name == "digits":
        return embedded.open_digits()
    if name == "membranes":
        from ipucnn.datasets.segmentation.membranes import DEFAULT_SIZE, open_membranes

        height, width = image_shape[:2] if image_shape else (DEFAULT_SIZE, DEFAULT_SIZE)
        return open_membranes(height, width, seed)
    if name == "random":
        classes = num_classes or (2 if choice.task == "segmentation" else 10)
        shape, num_train = image_shape or embedded.DEFAULT_SHAPE, max(embedded.NUM_TRAIN, least_train)
        return embedded.open_random(*shape, classes, choice.task, seed, num_train)
    location = fetch(choice, download)
    if is_tfds(name, location):
        from ipucnn.datasets.sources.tfds import open_tfds

        return open_tfds(name, location)
    if name in idx.CLASS_NAMES:
        return idx.open_idx(name, location)
    if name in cifar.LAYOUTS:
        return cifar.open_cifar(name, location)
    if name == "isbi2012":
        return isbi2012.open_isbi2012(location, max_image_pixels)
    if name == "imagemasks":
        return imagemasks.open_imagemasks(location, max_image_pixels, allow_partial)
    if name == "imagenet" and records.has_shards(location):
        return records.open_records(location)
    return imagefolder.open_imagefolder(location, name)


def _open_published(name: str) -> DataSource:
    """A set that is not here, with blank images: for what depends on no pixel."""
    record = DATASETS[name]
    assert record.num_examples is not None and record.num_classes is not None
    shape = record.image_shape or (1, 1, 3)
    source = embedded.open_blank(*shape, record.num_classes, num_examples=record.num_examples)
    source = replace(source, info=replace(source.info, name=name))
    if record.image_shape is not None:
        return source
    parts = [RecordExamples((), *[np.zeros(count, np.int64)] * 4) for count in record.num_examples]
    info = replace(source.info, image_shape=(None, None, 3))
    return replace(source, info=info, train=parts[0], eval=parts[1])


def fetch(choice: Choice, download: bool) -> Path:
    """Where the files of a set lie, after they were downloaded if they are to be.

    Raises:
        DataError: they are not here, or what was fetched is damaged.
        MissingError: the network or a package is missing.
    """
    name = choice.name
    if choice.location is not None:
        return choice.location
    if download and choice.download_to is not None:
        if name.startswith(TFDS_PREFIX):
            from ipucnn.datasets.sources.tfds import prepare

            return prepare(name[len(TFDS_PREFIX) :], choice.download_to)
        return download_files(name, choice.download_to)
    raise DataError(f"data set {name} is not here", _how_to_get(name))


def _choose_default(path: Path, home: str, task: str, download: bool) -> Choice:
    stand_in = EMBEDDED[task]
    other = (
        f"--dataset {stand_in} for the embedded one"
        if task == "classification"
        else f"or --dataset {stand_in}"
    )
    record = DATASETS.get(home)
    if record is None or not record.files:
        chosen = home if record is not None else stand_in
        return Choice(chosen, None, f"data set {chosen}, {_origin(chosen)}", task)
    location = find_location(home, path)
    if location is not None:
        return Choice(home, location, f"data set {home} from {location} ({other})", task)
    if download and home in REMOTES:
        return Choice(home, None, f"data set {home}, to be downloaded to {path} ({other})", task, path)
    get = _how_to_get(home)
    why = f"{home}, this model's home data set, is not in {path} ({get})"
    if task == "segmentation" and imagemasks.is_imagemasks(path):
        why += f"; {path} has images and masks: add --dataset imagemasks to take them"
    elif task == "classification" and imagefolder.is_image_folder(path):
        why += f"; {path} has images in folders: add --dataset imagefolder to take them"
    message = f"data set {stand_in}, {_origin(stand_in)}: {why}"
    return Choice(stand_in, None, message, task)


def _choose_tfds(name: str, path: Path, task: str, download: bool) -> Choice:
    _check_task(f"data set {TFDS_PREFIX}{name}", "classification", task)
    if not name or any(part in ("", ".", "..") for part in name.split("/")):
        raise ConfigurationError(f"'{TFDS_PREFIX}{name}' names no data set", "for example tfds:svhn_cropped")
    full_name = TFDS_PREFIX + name
    location = find_tfds(name, path)
    if location is not None:
        return Choice(full_name, location, f"data set {full_name} from {location}", task)
    if download:
        return Choice(full_name, None, f"data set {full_name}, to be downloaded to {path}", task, path)
    raise DataError(f"data set {full_name} is not in {path}", _how_to_get(full_name))


def _of_package(name: str, function: Callable[[], object]) -> Callable[[], object]:
    """A package's function, whose errors are told as those of a user's own file."""

    def make() -> object:
        try:
            return function()
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise own_code_failed(error, name) from error

    return make


def check_is_there(folder: Path) -> None:
    """Refuses a ``--dataset-path`` that leads to nothing, or to a file.

    Raises:
        DataError: it does.
    """
    kind, hint = kind_of(folder), "pass --dataset-path with the folder of the data"
    if kind is Kind.ABSENT:
        raise DataError(f"data folder {folder} does not exist", hint)
    if kind is not Kind.FOLDER:
        raise DataError(f"--dataset-path {folder} is {kind.value}, not a folder", hint)


def _choose_imagefolder(folder: Path, divides: bool) -> Choice:
    check_is_there(folder)
    if not imagefolder.is_image_folder(folder) and not (divides and imagefolder.is_undivided(folder)):
        layout = imagefolder.LAYOUT + (", or two or more folders DIR/CLASS/*.jpg" if divides else "")
        raise DataError(f"{folder} is not an image folder: it lacks train/ or val/", layout)
    return Choice("imagefolder", folder, f"data set imagefolder from {folder}")


def _choose_imagemasks(folder: Path) -> Choice:
    check_is_there(folder)
    if not imagemasks.is_imagemasks(folder):
        raise DataError(f"{folder} holds no pairs of images and masks", imagemasks.LAYOUT)
    return Choice("imagemasks", folder, f"data set imagemasks from {folder}", "segmentation")


def _how_to_get(name: str) -> str:
    if name.startswith(TFDS_PREFIX):
        folder = name[len(TFDS_PREFIX) :]
        return f"put the prepared TFDS folder {folder}/ there, or pass --dataset {name} --download"
    text = f"put {DATASETS[name].files} there, or point --dataset-path at the folder that has it"
    return text + (f", or pass --dataset {name} --download" if name in REMOTES else "")


def _origin(name: str) -> str:
    return embedded.LOCATION if name == "digits" else "generated"


def _fold(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def canonical(name: str) -> Optional[str]:
    """The registered name that is meant, whatever the case, with ``-``, ``_`` or neither; None for no such set."""
    return next((known for known in DATASETS if _fold(known) == _fold(name)), None)


def known_as(name: str) -> Optional[str]:
    """The registered name of a set, in its own files or as tfds:NAME[/CONFIG][:VERSION]; None for no such set."""
    if name.lower().startswith(TFDS_PREFIX):
        name = name[len(TFDS_PREFIX) :].split("/")[0].split(":")[0]
    return canonical(name)


def _check_task(what: str, task: str, wanted: str) -> None:
    if task not in (ANY_TASK, wanted) and wanted != ANY_TASK:
        hint = f"for example --dataset {EMBEDDED[wanted]}"
        if task == "segmentation":
            hint += "; masks are for the network unet"
        raise ConfigurationError(f"{what} is for {task}, but the model does {wanted}", hint)
