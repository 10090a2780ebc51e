"""Which data set is in a folder: an ordered list of formats, each with the function that finds it by names of files.

:func:`find_sets` tries them in order.  Names alone decide; no file is opened, except for the description of a TFDS set.
What could be meant in several ways is refused with the candidates.

This module imports no library, because every command chooses its data set before it does anything else.
"""

import itertools
import json
import os
import re
import unicodedata
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import (
    Callable,
    Collection,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
)

from ipucnn.datasets.problems import Problem, guarded
from ipucnn.errors import DataError, UserError
from ipucnn.filesystem import (
    Kind,
    entries,
    errors_about,
    kind_of,
    new_folder,
    read_bytes,
    real,
    shown,
)
from ipucnn.text import counted, printable, quoted, shown_value

ENDINGS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "PNG": (".png",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "WEBP": (".webp",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm"),
}
"""Pillow's name of a format -> the endings of its files."""
EXTENSIONS = tuple(ending for endings in ENDINGS.values() for ending in endings)
TFDS_PREFIX = "tfds:"
INFO_FILE = "dataset_info.json"
"""The file that TFDS writes into the folder of every prepared version."""
_MOST_INFO_BYTES = 2**26


class Found(NamedTuple):
    """A data set in a folder, complete or not.

    Attributes:
        name: the name of a format, or "tfds:NAME".
        location: its folder.
        parts: for layouts, the folders of "train" and of "eval": one with class folders, or one of images and one of
            masks, which may be the same folder.  "eval" is absent if ipucnn divides the set itself.  For MNIST and
            Fashion-MNIST, the files of images and of labels, which may be absent.
        choice: words for a run's first line: what serves for what, and what for nothing.
        is_undivided: whether ipucnn divides the set itself.
        has_channel_numbers: whether names of images end in the number of a channel, ``_0000``, as in nnU-Net.
        is_tfds: whether TFDS prepared it, whatever its name.
        cifar: for CIFAR, the version that its files are of.
    """

    name: str
    location: Path
    parts: Mapping[str, Tuple[Path, ...]] = {}
    choice: str = ""
    is_undivided: bool = False
    has_channel_numbers: bool = False
    is_tfds: bool = False
    cifar: "Optional[CifarFiles]" = None

    @property
    def choice_words(self) -> str:
        """The words of ``choice`` for a report."""
        return self.choice.lstrip(":, ")


# -- names and listings ---------------------------------------------------------------------------------------


_SYSTEM_NAMES = {
    *(
        "__macosx",
        "@eadir",
        "#recycle",
        "@recycle",
        "$recycle.bin",
        "system volume information",
        "lost+found",
    ),
    *("thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "__pycache__"),
}
SYSTEM = "made by the system or a tool"
BESIDE = "beside the folders that are read"
LIST = "classes or labels by its name; not read"
LOOSE = "in no class folder"
NO_IMAGE = "no image by its name"
EMPTY = "a folder without images"
LINK = "a link to a folder"
MASK = "a mask by its name, beside its image"


def is_made_by_system(name: str) -> bool:
    """Returns whether a name is hidden, or one that systems and tools give to files of their own."""
    return name.startswith(".") or name.casefold() in _SYSTEM_NAMES


def is_image_name(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS)


def same_name(name: str) -> str:
    """Returns the one form of a name that is written in one of several equal Unicode forms (NFC)."""
    return unicodedata.normalize("NFC", name)


def name_in_set(path: Union[str, Path], folder: Union[str, Path]) -> str:
    """Returns the name of a file or folder of a set: its path below the set's folder, however that is spelt."""
    return os.path.relpath(path, folder)


def list_folder(folder: Path) -> List["os.DirEntry[str]"]:
    """Returns the entries of a folder in the order of names."""
    # Not filesystem.entries, because scandir knows the kind of most files without a system call for each.
    with errors_about(folder), os.scandir(folder) as listing:
        return sorted(listing, key=lambda entry: same_name(entry.name))


def subfolders(folder: Path) -> List[Path]:
    """Returns the folders in a folder, and links to folders, in the order of names; none that a system or tool made."""
    if not folder.is_dir():
        return []
    listing = list_folder(folder)
    return [Path(e.path) for e in listing if not is_made_by_system(e.name) and _is_folder(e)]


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    with suppress(OSError):  # reading the set reports it
        return entry.is_dir()
    return False


def images_below(folder: Path, name: str, subset: Optional[str]) -> Iterator[Union[str, Problem]]:
    """Yields the path of each image in a folder and the folders in it, in the order of names.

    All other entries are problems, except for files of systems and tools without the name of an image.

    Args:
        folder: the folder.
        name: its name in problems.
        subset: the subset of the problems.

    Raises:
        DataError: the folder itself cannot be listed.
    """
    for entry in list_folder(folder):
        path, its_name = Path(entry.path), f"{name}/{printable(entry.name)}"
        yield from guarded(images_at(entry, its_name, subset), subset, its_name, path)


def images_at(entry: "os.DirEntry[str]", name: str, subset: Optional[str]) -> Iterator[Union[str, Problem]]:
    """Yields the images of one entry of a folder, as :func:`images_below` does for all."""
    path = Path(entry.path)
    is_system = is_made_by_system(entry.name)
    with errors_about(path):
        is_directory, is_regular = entry.is_dir(), entry.is_file()
    if is_directory and (is_system or entry.is_symlink()):
        if num_images(path):
            yield Problem("passed-over", subset, name, SYSTEM if is_system else LINK, count=num_images(path))
    elif is_directory:
        has_image = False
        for item in images_below(path, name, subset):
            has_image = has_image or not isinstance(item, Problem)
            yield item
        if not has_image:
            yield Problem("passed-over", subset, name, EMPTY)
    elif is_regular and is_image_name(entry.name):
        yield Problem("passed-over", subset, name, SYSTEM) if is_system else entry.path
    elif is_regular and not is_system:
        yield Problem("passed-over", subset, name, NO_IMAGE)
    elif not is_regular:
        kind = kind_of(path)
        if kind is Kind.ABSENT:
            yield Problem("missing-file", subset, name, "a link that leads nowhere")
        else:
            yield Problem("passed-over", subset, name, kind.value)


def num_images(folder: Path) -> int:
    """Returns the number of files below a folder with the name of an image, whoever made them."""
    return sum(is_image_name(name) for _, _, names in os.walk(folder) for name in names)


def has_image(folder: Path) -> bool:
    """Returns whether a folder, or a folder in it, has an image; False for an unreadable one, which reading reports."""
    with suppress(DataError, OSError):
        return any(not isinstance(item, Problem) for item in images_below(folder, "", None))
    return False


_ABOUT_CLASSES = re.compile(
    r".*(class|label|categor|annotation|names|truth).*\.(txt|csv|tsv|json|ya?ml|xml|pbtxt|mat|xlsx?|np[yz])|.*\.names",
    re.IGNORECASE,
)


def passed_beside(
    folder: Path, read: Collection[Path], subset: Optional[str], location: Path
) -> Iterator[Problem]:
    """Yields a problem for each entry of a folder that is not read and has images, or seems to list classes.

    Args:
        folder: the folder.
        read: the paths in it that are read.
        subset: the subset of the problems.
        location: the folder of the set, below which are the names in problems.
    """
    for entry in list_folder(folder) if folder.is_dir() else ():
        path = Path(entry.path)
        if path not in read:
            count = num_images(path) if _is_folder(entry) else int(is_image_name(entry.name))
            reason = SYSTEM if is_made_by_system(entry.name) else BESIDE
            if not count and reason != SYSTEM and _ABOUT_CLASSES.fullmatch(entry.name) and path.is_file():
                count, reason = 1, LIST
            if count:
                name = printable(name_in_set(path, location))
                yield Problem("passed-over", subset, name, reason, count=count)


# -- names of parts -------------------------------------------------------------------------------------------


_PARTS = {
    "train": ("train", "training", "trainval"),
    "validation": ("val", "valid", "validation", "dev", "eval", "evaluation", "holdout"),
    "test": ("test", "testing"),
    "unlabelled": ("predict", "prediction", "predictions", "inference", "unlabelled", "unlabeled"),
    "masks": ("images", "masks", "labels", "annotations"),
}
_SUBSETS = ("train", "eval")
_EVALUATION = ("validation", "test")
"""The parts for evaluation: the first one that a set has serves, and the other one for nothing."""
_SERVING = ("train", *_EVALUATION)
_NUMBERED = ("train", "val", "test")
_PART_ENDING = re.compile(r"(set|data|images|split)$")


def part_named(name: str) -> Optional[str]:
    """Returns the part of a set that a folder's name is for, in any case and with endings such as ``_set``; or None.

    ``train``, ``val`` and ``test`` may have a number: ``test1``, ``train2017``, ``train_set1``.
    """
    word = re.sub(r"[\W_]+", "", name.casefold())
    words = {word, _PART_ENDING.sub("", word)}
    numbered = _PART_ENDING.sub("", re.sub(r"\d+\Z", "", word))
    words |= {numbered} & {*_NUMBERED}
    return next((part for part, names in _PARTS.items() if words & {*names}), None)


def _one(candidates: List[Path], purpose: str) -> Optional[Path]:
    """Returns the only candidate, or None.  Raises DataError with the names if there are several."""
    if len(candidates) > 1:
        names = " and ".join(printable(path.name) for path in candidates)
        raise DataError(
            f"{shown(candidates[0].parent)} has several folders for {purpose}: {names}",
            f"keep one of them there: mv {quoted(candidates[-1])} {quoted(_outside(candidates[-1]))}",
        )
    return candidates[0] if candidates else None


def _outside(path: Path) -> Path:
    """Returns a new place for a folder, beside the folder that it lies in; no part of a set has such a name."""
    parent = real(path.parent)
    return parent.with_name(f"{path.name}-of-{parent.name}")


def part_alone(found: Found) -> str:
    """Returns words for a hint that give the first part of a set as a set without parts; "" if it cannot be one."""
    if found.is_undivided or found.has_channel_numbers or not found.parts:
        return ""
    first, *others = next(iter(found.parts.values()))
    part = first.parent if others and others != [first] else first
    share = "the last fifth of the pairs" if found.name == "imagemasks" else "a share of each class"
    return f"; or the part alone: --dataset {quoted(part)} (training holds out {share}, evaluate takes all)"


def lifted(folders: Sequence[Path]) -> str:
    """Returns the hint that puts folders in the place of those that they lie in, if classes lie a folder too deep."""
    moves = []
    for folder in folders:
        part, outside = folder.parent, _outside(folder.parent)
        moves.append(
            f"mv {quoted(part)} {quoted(outside)} && mv {quoted(outside / folder.name)} {quoted(part)}"
        )
    return f"if the folders in {shown(folders[0])} are the classes: {' && '.join(moves)}"


# -- class folders and pairs ----------------------------------------------------------------------------------


READ = "JPEG, PNG, BMP, GIF, WebP, TIFF, PPM and PGM are read"
CLASS_LAYOUT = "expected DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg"


class MasksAsClasses(DataError):
    """Folders of masks that would be classes; the hint makes pairs of them."""


class NoPairs(DataError):
    """No image has the name of a mask."""


MASKS_INSIDE, MASK_OF_EACH = "masks-inside", "mask-of-each"
"""The codes of errors about masks in the class folders of their images, and about folders of an image and its mask."""
_HOW_TO_PAIR = (
    "for masks: join those of each image, and put all into DIR/images/NAME.png and DIR/masks/NAME.png"
)
MAXIMUM = "the maximum of them in each pixel"
"""How several masks of an image become one."""
SORTING = "python -m ipucnn.datasets.sorting"
"""The command that makes a set of a folder that is refused, see ``sorting.py``."""


PAIR_LAYOUT = (
    "expected DIR/images/NAME.png and DIR/masks/NAME.png, or both in DIR/train and DIR/val; or DIR/NAME.png and "
    "DIR/NAME_mask.png; or nnU-Net's DIR/imagesTr and DIR/labelsTr"
)


def _serving(parts: Mapping[Path, Optional[str]]) -> Dict[str, Path]:
    """Returns the folders that serve for "train" and "eval", of folders with the part that each is named after.

    Raises:
        DataError: several folders may serve for one part.
    """
    chosen: Dict[str, Path] = {}
    for subset, kinds in (("train", ("train",)), ("eval", _EVALUATION)):
        for kind in kinds:
            path = _one([path for path, part in parts.items() if part == kind], kind)
            if path is not None:
                chosen.setdefault(subset, path)
    return chosen


def find_class_parts(folder: Path) -> Optional[Found]:
    """Finds class folders in folders for training and evaluation, by the names of a few folders: no tree is walked.

    Raises:
        DataError: several folders may serve for one part.
    """
    named = {path: part_named(path.name) for path in subfolders(folder)}
    parts = {path: part for path, part in named.items() if part in _SERVING and _has_classes(path)}
    read = {subset: (path,) for subset, path in _serving(parts).items()}
    return _in_parts("imagefolder", folder, read, parts) if read else None


def find_classes(folder: Path) -> Optional[Found]:
    """Finds class folders: in folders for training and evaluation, or two or more of them alone.

    Raises:
        DataError: several folders may serve for one part, a folder that is named like a part lies beside classes, or
            all classes have the same folders of images in them.
    """
    in_parts = find_class_parts(folder)
    if in_parts is not None and "train" in in_parts.parts:
        _check_classes(subfolders(in_parts.parts["train"][0]))
        return in_parts
    named = {path: part_named(path.name) for path in subfolders(folder)}
    classes = [path for path, part in named.items() if part is None and has_image(path)]
    if in_parts is not None and classes:
        raise _part_beside_classes(folder, in_parts.parts["eval"][0])
    if in_parts is not None:
        return in_parts
    bare = [path for path, part in named.items() if part is not None and has_image(path)]
    if bare:
        raise next(filter(None, map(_no_masks, bare)), None) or _bare_part(folder, bare, bool(classes))
    _check_classes(classes)
    return Found("imagefolder", folder, {"train": (folder,)}, is_undivided=True) if len(classes) > 1 else None


def _in_parts(
    name: str,
    folder: Path,
    read: Mapping[str, Tuple[Path, ...]],
    parts: Collection[Path],
    said: Sequence[str] = (),
) -> Found:
    """Returns a set whose parts are folders of ``folder``; other ``parts`` serve for nothing.

    Args:
        said: more words for a run's first line.
    """
    used = [path if path.parent == folder else path.parent for path, *_ in read.values()]
    texts = [
        f"{purpose} on {printable(path.name)}/"
        for purpose, path in zip(("training", "evaluation"), used)
        if len(used) == len(_SUBSETS)
    ]
    texts += [f"nothing on {printable(path.name)}/" for path in parts if path not in used]
    texts += said
    return Found(name, folder, read, f": {', '.join(texts)}" if texts else "")


def _has_classes(folder: Path) -> bool:
    """Returns whether a folder that is named like a part is one: it has folders in it, or no images."""
    try:
        return bool(subfolders(folder)) or not has_image(folder)
    except (DataError, OSError):  # reading the set reports it
        return True


_NAMED_CLASS = re.compile(r"(.*[^\W\d_])([._ -]+\(?)\d.*", re.DOTALL)
"""The name of an image that begins with its class, what follows this, and a number: cat.0.jpg, great_dane_12.jpg."""


_NUMBER_INSIDE = re.compile(r"([._ -]+\(?)\d")


def classes_in_names(part: Path) -> Dict[str, str]:
    """Returns the class of each image of a folder, with which its name begins; there are none if one has no class."""
    names = _own_images(part)
    found = _classes_of(part, names)
    return found if len(found) == len(names) else {}


def _classes_of(part: Path, names: Sequence[str]) -> Dict[str, str]:
    """Returns the classes of those names in a folder that have the usual separator; none if they seem to be none."""
    matches = {name: _NAMED_CLASS.fullmatch(name) for name in names if part_named(part.name) != "masks"}
    known = {match[1] for match in matches.values() if match is not None}
    parted = {name: _class_before_number(name, known) for name, match in matches.items() if match is not None}
    separators = Counter(separator for _, separator in parted.values()).most_common(1)
    found = {name: of_name for name, (of_name, one) in parted.items() if one == separators[0][0]}
    classes = {*found.values()}
    # train_1.jpg, mask_1.png
    is_taken = any(part_named(name) or side_named(name) for name in classes)
    return found if 1 < len(classes) <= len(found) // 2 and not is_taken else {}


def _class_before_number(name: str, classes: Collection[str]) -> Tuple[str, str]:
    """Returns the shortest class that a name begins with, and what is between it and a number: cat for cat_0_rot_90."""
    begins = ((name[: match.start()], match[1]) for match in _NUMBER_INSIDE.finditer(name))
    return next(begin for begin in begins if begin[0] in classes)


def images_with_classes(folder: Path) -> Dict[Path, str]:
    """Returns the class of each image of a folder, or else of its parts, with which its name begins, by paths in it."""
    own = {Path(name): of_name for name, of_name in classes_in_names(folder).items()}
    parts = [] if own else [path for path in subfolders(folder) if part_named(path.name)]
    inside = {
        Path(part.name, name): of_name for part in parts for name, of_name in classes_in_names(part).items()
    }
    classes = {*inside.values()}
    return own or {image: _class_before_number(image.name, classes)[0] for image in inside}


def names_without_class(folder: Path) -> str:
    """Returns words about images without a class in a folder or its parts, if nearly all others have one; or ""."""
    for part in (folder, *(path for path in subfolders(folder) if part_named(path.name))):
        names = _own_images(part)
        found = _classes_of(part, names)
        others = [name for name in names if name not in found]
        if found and 0 < len(others) <= len(names) / 10:
            also = f" and {counted(len(others) - 1, 'more image')}" if others[1:] else ""
            verb = "have no class in their names" if also else "has no class in its name"
            return f"{shown(part / others[0])}{also} {verb}, as {printable(next(iter(found)))} has"
    return ""


def some_of(names: Collection[str]) -> str:
    """Returns a few names on one line: all of up to four, or three of them."""
    first = sorted(names)[: 3 if len(names) > 4 else 4]
    return ", ".join([*map(shown_value, first), *(["..."] if len(names) > 4 else [])])


def named_classes_hint(folder: Path) -> str:
    """Returns the hint with the command for images whose names begin with their classes, of a set or of one part."""
    target, found = new_folder(folder, "classes"), images_with_classes(folder)
    alone = num_images(folder) - len(found)
    rest = f", without {counted(alone, 'other image')}" if alone else ""
    classes = {*found.values()}
    told = f"{counted(len(classes), 'class')}: {some_of(classes)}"
    return (
        f"if the names of images begin with their classes, copy them into class folders ({told}){rest}: "
        f"{SORTING} names {quoted(target)} {quoted(folder)}; then pass --dataset {quoted(target)}"
    )


def _bare_part(folder: Path, parts: Sequence[Path], has_classes: bool) -> DataError:
    """Returns the error about images in folders that are named like parts, without class folders in them."""
    part = min(parts, key=lambda path: part_named(path.name) != "train")
    text = f"{shown(part)} is named like a part of a data set, and has images without class folders"
    classified = [path for path in parts if classes_in_names(path)]
    if part in classified:
        is_whole = {"train"} < {part_named(path.name) for path in classified} <= {*_SERVING}
        return DataError(text, named_classes_hint(folder if is_whole else part))
    if not has_classes:
        return DataError(
            text, f"put the images of each class into a folder of its own: {shown(part)}/CLASS/*.jpg"
        )
    return DataError(
        text,
        f"move it away if it is no class: mv {quoted(part)} {quoted(_outside(part))}; or rename the class: "
        f"mv {quoted(part)} {quoted(part.with_name('class-' + part.name))}",
    )


def _check_classes(classes: List[Path]) -> None:
    """Refuses class folders that may be parts of a set, by their names or by the folders in them.

    Raises:
        DataError: as the functions say that it calls.
    """
    _check_no_folds(classes)
    _check_no_parts(classes)
    _check_no_pieces(classes)
    _check_no_masks(classes)
    _check_no_cases(classes)


MASK_WORD = re.compile(r"mask|label|annot|segm|ground[\W_]*truth|manual|(?<![^\W_])gt(?![^\W_])")
_STRONG_WORD = re.compile(r"annotation|segmentation|ground[\W_]*truth")
"""Words in the names of folders of masks; the latter say it although the files are numbered."""


def masks_by_name(folders: Sequence[Path]) -> Tuple[List[Path], List[Path]]:
    """Returns the folders of masks among folders, and the only other one with images; ([], []) if there are none.

    A folder is one of masks by a word in its name, if its files are called like those in the other folder.  Numbered
    files say no more of it than of any two classes: masks then have another format, or the folder a stronger name.
    """
    words = {path: same_name(path.name).casefold() for path in folders}
    named = [path for path, word in words.items() if MASK_WORD.search(word) and has_image(path)]
    unnamed = (path for path in folders if named and not MASK_WORD.search(words[path]) and has_image(path))
    others = list(itertools.islice(unnamed, 2))
    if len(others) != 1:
        return [], []
    images = _image_files(others[0])
    other = words[others[0]]

    def is_of_masks(path: Path) -> bool:
        files, word = _image_files(path), words[path]
        is_strong = _STRONG_WORD.search(word) is not None
        if not _are_called_alike(files, images):  # Original/im1 and GroundTruth/gt1
            return is_strong and side_named(word) == "masks" and len(files) == len(images)
        is_beside = word.startswith(other) and side_named(word[len(other) :]) == "masks"  # photo and photo_gt
        have_other_format = set(files.values()).isdisjoint(images.values())
        return is_strong or is_beside or have_other_format or not _are_numbered(images)

    masks = list(filter(is_of_masks, named))
    return (masks, others) if masks else ([], [])


def _are_called_alike(masks: Collection[str], images: Collection[str]) -> bool:
    """Returns whether each mask's name is that of an image, or begins with it; the image's may end with "_img"."""
    known = by_beginning(images)
    return bool(masks) and all(
        name in known or any(name[: sign.start()] in known for sign in re.finditer("[_. -]", name))
        for name in masks
    )


def _are_numbered(names: Collection[str]) -> bool:
    """Returns whether names count, as 0001 and IMG_0002 do: at least half of the numbers of a range, and one word."""
    numbers = [re.sub(r"\D", "", name) for name in names]
    words = {re.sub(r"\d", "", name) for name in names}
    if not all(numbers) or len(words) != 1:
        return False
    first, last = min(map(int, numbers)), max(map(int, numbers))
    return last - first < 2 * len(names)


def _image_files(folder: Path) -> Dict[str, str]:
    """Returns the format's ending of all images below a folder by their names; {} for an unreadable one."""
    with suppress(DataError, OSError):
        images = (item for item in images_below(folder, "", None) if not isinstance(item, Problem))
        names = [os.path.basename(path) for path in images]
        return {pair_name(name): os.path.splitext(name)[1].casefold() for name in names}
    return {}


def _check_no_masks(classes: List[Path]) -> None:
    """Refuses a folder of images beside folders of their masks: JPEGImages and SegmentationClass.

    Raises:
        MasksAsClasses: a folder has masks, as :func:`masks_by_name` says.
    """
    found, others = masks_by_name(classes)
    if not found:
        return
    masks, images = found[0], others[0]
    part = images.parent
    beside = [path for path in subfolders(part.parent) if part_named(path.name) and part_named(part.name)]
    places = dict.fromkeys([part, *beside])
    moves = [
        f"mv {quoted(place / path.name)} {quoted(place / side)}"
        for place in places
        if (place / images.name).is_dir() and (place / masks.name).is_dir()
        for path, side in ((images, "images"), (masks, "masks"))
        if path.name != side
    ]
    classes_of = [
        f"mv {quoted(place / masks.name)} {quoted(place / 'class-2')}"
        for place in places
        if (place / masks.name).is_dir()
    ]
    whole = part.parent if part_named(part.name) in _SERVING else part
    raise MasksAsClasses(
        f"{shown(masks)} has masks of the images in {shown(images)}, by the names of both; they are no classes",
        f"{' && '.join(moves)}, then pass --dataset {quoted(whole)} to the network unet; if they are classes: "
        + " && ".join(classes_of),
    )


def _check_no_cases(classes: List[Path]) -> None:
    """Refuses folders that each have an image and its mask in them, of the same names: image.png and label.png.

    Raises:
        MasksAsClasses: the first two folders are such ones.
    """
    if len(classes) < 2:
        return
    (first, names), (second, others) = ((path, _own_images(path)) for path in classes[:2])
    # Nothing else lies in them but further pictures of the two: label_viz.png.
    pairs = [
        (mask, image)
        for mask, image in (masks_among(names).items() if {*names} == {*others} else ())
        if all(name.startswith((pair_name(mask), pair_name(image))) for name in names)
    ]
    for mask, image in pairs:
        if not without_mask_ending(pair_name(mask)):
            raise MasksAsClasses(
                f"{shown(first)} and {shown(second)} have {image} and {mask} in them: an image with its mask in each, "
                "and not a class",
                _HOW_TO_PAIR,
                MASK_OF_EACH,
            )


_WORDS = re.compile(r"[^\W\d_]+|\d+")
_PIECES = ("image", "images", "imgs", "part", "fold", "split", "batch", "chunk", "shard", "subset")
"""Words before the number of a piece of a set that is none of a class: images_001, part_2."""


def _words(folder: Path) -> Tuple[str, ...]:
    return tuple(_WORDS.findall(same_name(folder.name).casefold()))


def _check_no_parts(classes: List[Path]) -> None:
    """Refuses two folders whose names differ in nothing but a word of parts: seg_train and seg_test.

    Raises:
        DataError: there are such folders.
    """
    by_rest: Dict[Tuple[str, ...], Dict[str, Path]] = {}
    for path in classes:
        words = tuple(word for word in _words(path) if not _PART_ENDING.fullmatch(word))
        for at, part in enumerate(map(part_named, words)):
            if part in _SERVING:
                by_rest.setdefault((*words[:at], *words[at + 1 :]), {}).setdefault(part, path)
    for path in classes:  # rps beside rps-test-set
        parts = by_rest.get(_words(path), {})
        if "train" not in parts and any(subfolders(unwrapped(one)) for one in parts.values()):
            parts["train"] = path
    for parts in by_rest.values():
        if "train" not in parts or len(parts) < 2:
            continue
        train, other = parts["train"], next(parts[part] for part in _EVALUATION if part in parts)
        whole, (inside, other_inside) = train.parent, map(unwrapped, (train, other))
        hint = f"put the images of each class into a folder of its own: {shown(whole)}/train/CLASS/*.jpg"
        if subfolders(inside) and subfolders(other_inside):
            hint = (
                f"make two parts: mv {quoted(inside)} {quoted(whole / 'train')} && mv {quoted(other_inside)} "
                f"{quoted(whole / 'val')}; then pass --dataset {quoted(whole)}"
            )
        elif len(subfolders(inside)) > 1:
            hint = f"if {shown(inside)} has the classes: --dataset {quoted(inside)}; else {hint}"
        raise DataError(
            f"{shown(train)} and {shown(other)} are named like parts of a data set, not like classes",
            f"{hint}; if they are classes, give them other names",
        )


def _check_no_pieces(classes: List[Path]) -> None:
    """Refuses folders whose names differ in nothing but the number of a piece: images_001 and images_002.

    Raises:
        DataError: all folders are called so, and none has several folders of images in it.
    """
    names = {tuple(word for word in _words(path) if not word.isdigit()) for path in classes}
    if len(classes) < 2 or len(names) > 1 or not set(names.pop()[-1:]) & set(_PIECES):
        return
    if any(len(subfolders(path)) > 1 for path in classes):
        return
    first = classes[0]
    raise DataError(
        f"{shown(first)} and {shown(classes[1])} are named like pieces of one folder of images, not like classes",
        f"put the images of each class into a folder of its own: {shown(first.parent)}/CLASS/*.jpg; if they are "
        f"classes: mv {quoted(first)} {quoted(first.with_name('class-' + first.name))}",
    )


def unwrapped(folder: Path) -> Path:
    """Returns the first folder that has images or several folders in it, going into the only one each time."""
    inside = subfolders(folder)
    return unwrapped(inside[0]) if len(inside) == 1 and not _own_images(folder) else folder


def copy_of_classes(folder: Path, classes: Collection[str]) -> Optional[DataError]:
    """Returns the error about a class folder with two or more of the ``classes`` in it again, as some archives have."""
    inside = subfolders(folder)
    inside = subfolders(unwrapped(folder)) if len(inside) == 1 else inside
    again = [printable(path.name) for path in inside if same_name(path.name) in classes]
    if len(again) < 2:
        return None
    return DataError(
        f"the class folder {shown(folder)} has the classes {again[0]} and {again[1]} in it again",
        f"move it away if it is a copy of the set: mv {quoted(folder)} {quoted(_outside(folder))}",
    )


def _is_for_evaluation(folder: Path) -> bool:
    """Returns whether a word in a folder's name says that it is for evaluation: CRC-VAL-HE-7K."""
    return any(part_named(word) in _EVALUATION for word in _words(folder))


def _check_no_folds(classes: List[Path]) -> None:
    """Refuses two or more folders that have the same folders of images in them: they may be parts, or the classes.

    Raises:
        DataError: at least two names of folders are common to all.
    """
    common: Dict[str, None] = {}
    for number, folder in enumerate(classes):
        inside = (path for path in subfolders(folder) if part_named(path.name) not in _SERVING)
        names = dict.fromkeys(same_name(path.name) for path in inside if _own_images(path))
        common = names if not number else {name: None for name in common if name in names}
        if len(common) < 2:
            return
    if len(classes) < 2:
        return
    (first, second), (one, other) = classes[:2], [printable(name) for name in common][:2]
    sides = {side_named(name): name for name in common}
    if len(common) == 2 and {"images", "masks"} <= set(sides):
        one, other = sides["images"], sides["masks"]
        raise MasksAsClasses(
            f"{shown(first)} and {shown(second)} have {one}/ and {other}/ in them: masks are no images of a class",
            f"{_HOW_TO_PAIR}; for classes: move the folders {other}/ out of the class folders",
            MASKS_INSIDE,
        )
    whole, moved = first.parent, first.with_name(f"{first.name}-images")
    train, rest = sorted((first, second), key=lambda path: (_is_for_evaluation(path), -num_images(path)))
    raise DataError(
        f"{shown(first)} and {shown(second)} have the same folders in them, such as {one} and {other}: "
        f"{printable(train.name)} may be a part of a data set with the class {one}, or a class itself",
        f"if it is a part: --dataset {quoted(train)}; or train on it and evaluate on another: "
        f"mv {quoted(train)} {quoted(whole / 'train')} && mv {quoted(rest)} {quoted(whole / 'val')}, then pass "
        f"--dataset {quoted(whole)}; if it is a class: mv {quoted(first)} {quoted(moved)} && mkdir {quoted(first)} && "
        f"mv {quoted(moved)} {quoted(first)}",
    )


def check_has_masks(found: Found) -> None:
    """Refuses a set of images and masks that has no masks, and whose folder of images is of another layout.

    Raises:
        DataError: there are class folders in it, or files of text beside it as detection sets have.
    """
    images, masks = next(iter(found.parts.values()))
    error = None if masks.is_dir() or not images.is_dir() else _no_masks(images)
    if error is not None:
        raise error


def _no_masks(images: Path) -> Optional[DataError]:
    """Returns the error about a folder of images without masks if it is of a known other layout; else None."""
    with suppress(DataError, OSError):
        inside = unwrapped(images)
        if part_named(images.name) == "masks" and find_classes(inside) is not None:
            return DataError(
                f"{shown(inside)} has class folders in it, and there are no masks beside it",
                f"for a network of classes: --dataset {quoted(inside)}",
            )
    labels = next((path for path in subfolders(images.parent) if path.name.casefold() == "labels"), None)
    if labels is not None and any(
        name.lower().endswith(".txt") for _, _, names in os.walk(labels) for name in names
    ):
        return DataError(
            f"{shown(images.parent)} has images and labels as text (.txt), as detection sets such as YOLO's have; "
            "boxes are not trained on",
            "put the images of each class into a folder of its own: DIR/CLASS/*.jpg; or draw masks: "
            "DIR/images/NAME.png and DIR/masks/NAME.png",
        )
    return None


def _part_beside_classes(folder: Path, part: Path) -> DataError:
    """Returns the error about a folder with class folders for evaluation, beside class folders for training."""
    whole, new = real(folder), real(folder).with_name(f"{real(folder).name}-set")
    train = new / "train"
    return DataError(
        f"{shown(part)} is named like the part of a data set for evaluation, and lies beside class folders",
        f"make two parts: mkdir {quoted(new)} && mv {quoted(whole)} {quoted(train)} && "
        f"mv {quoted(train / part.name)} {quoted(new / 'val')}; then pass --dataset {quoted(new)}",
    )


PairOf = Callable[[Path], Dict[str, Path]]
"""Returns the folders of "images" and "masks" in a folder by their names; one of them, or both, may be absent."""
_SIDES = {
    "images": ("images", "image", "imgs", "img", "inputs", "input"),
    "masks": (
        *("masks", "mask", "labels", "label", "annotations", "annotation", "annots", "annot", "annos"),
        *("groundtruth", "groundtruths", "gt", "gts", "targets", "target", "segmentations", "segmentation"),
    ),
}
"""Names of a folder of images and of the folder of their masks beside it; the first of each needs no images in it."""


def side_named(name: str) -> Optional[str]:
    """Returns "images" or "masks" for a folder that is named so where the other one lies beside it; or None."""
    word = re.sub(r"[\W_]+", "", name.casefold())
    return next((side for side, names in _SIDES.items() if word in names), None)


def _called(folders: Sequence[Path], images: str, masks: str) -> Dict[str, Path]:
    """Returns the folders of these two names, in any case."""
    named = {
        kind: _one([path for path in folders if path.name.casefold() == name], name)
        for kind, name in (("images", images), ("masks", masks))
    }
    return {kind: path for kind, path in named.items() if path is not None}


def sides_among(folders: Sequence[Path]) -> Dict[str, Path]:
    """Returns the folders of "images" and of "masks" among folders: ``images`` and ``masks``, if at least one is there.

    In place of one that is absent, a folder with another name for it serves, if only these two have images in them, and
    those in one are called like those in the other.

    Raises:
        DataError: several folders may serve for one side.
    """
    pair = _called(folders, "images", "masks")
    if len(pair) == 2:
        return pair
    named: Dict[str, List[Path]] = {}
    for path in folders:
        side = side_named(path.name)
        if side is not None and side not in pair:
            named.setdefault(side, []).append(path)
    sides = {side: [pair[side]] if side in pair else named.get(side, []) for side in _SIDES}
    if not all(map(len, sides.values())) or sum(map(has_image, folders)) != 2:
        return pair
    images, masks = (next((path for path in paths if has_image(path)), None) for paths in sides.values())
    if images is None or masks is None or not _are_called_alike(_image_files(masks), _image_files(images)):
        return pair
    return {"images": images, "masks": masks}


def masks_beside(folders: Sequence[Path]) -> Dict[Path, Tuple[str, Path]]:
    """Returns the part and the folder of masks of each folder of images that is named like a part of a set.

    The names of the two differ in nothing but words for images and masks: ``train`` and ``train_masks``, ``imagesTr``
    and ``labelsTr``.
    """
    sides: Dict[Tuple[str, str], List[Path]] = {}
    parts: Dict[str, str] = {}
    for path in folders:
        word = re.sub(r"[\W_]+", "", path.name.casefold())
        rests = [
            (side, rest)
            for side in ("masks", "images")
            for name in _SIDES[side]
            for rest in (word[: -len(name)] * word.endswith(name), word[len(name) :] * word.startswith(name))
        ]
        for side, rest in (*rests, ("images", word)):
            part = {"tr": "train", "ts": "test"}.get(rest) or part_named(rest)
            if part in _SERVING and has_own_images(path):
                sides.setdefault((rest, side), []).append(path)
                parts[rest] = part
                break
    pairs = (
        (part, sides.get((rest, "images"), []), sides.get((rest, "masks"), []))
        for rest, part in parts.items()
    )
    return {images[0]: (part, masks[0]) for part, images, masks in pairs if len(images) == len(masks) == 1}


def _find_beside(folder: Path) -> Optional[Found]:
    """Finds folders of images that are named like parts, and beside them those of their masks.

    Raises:
        DataError: several folders may serve for one part.
    """
    folders = subfolders(folder)
    pairs = masks_beside(folders)
    serving = _serving({images: part for images, (part, _) in pairs.items()})
    if "train" not in serving:
        return _part_with_masks_beside(folder)
    read = {subset: (images, pairs[images][1]) for subset, images in serving.items()}
    parts = [path for path in folders if path in pairs or part_named(path.name) in _SERVING]
    said = [f"masks in {printable(read['train'][1].name)}/", *([] if "eval" in read else [UNDIVIDED])]
    return _in_parts("imagemasks", folder, read, parts, said)._replace(is_undivided="eval" not in read)


def _part_with_masks_beside(folder: Path) -> Optional[Found]:
    """Returns the pairs of a folder of images that is a part itself, with its masks in a folder beside it; or None.

    The set has the folder in which both lie, and a table of classes there is that of the part.
    """
    if folder.name in ("", "..") or not has_own_images(folder):
        return None
    with suppress(DataError, OSError):
        _, masks = masks_beside(subfolders(folder.parent)).get(folder, ("", folder))
        if masks != folder:
            choice = (
                f": images in {printable(folder.name)}/ and masks in {printable(masks.name)}/, {UNDIVIDED}"
            )
            return Found("imagemasks", folder.parent, {"train": (folder, masks)}, choice, is_undivided=True)
    return None


def mask_folders(folders: Sequence[Path]) -> Set[Path]:
    """Returns the folders of masks among folders that lie beside those of their images; both have images."""
    with suppress(DataError, OSError):  # several may be one, and reading reports what cannot be listed
        pair = sides_among(folders)
        found = {pair["masks"]} if len(pair) == 2 and all(map(has_image, pair.values())) else set()
        return {*found, *(masks for _, masks in masks_beside(folders).values()), *masks_by_name(folders)[0]}
    return set()


def _in_two_folders(folder: Path) -> Dict[str, Path]:
    return sides_among(subfolders(folder))


def pair_name(name: str) -> str:
    """Returns the name of an image or mask file without the ending of its format, of OME and in one Unicode form."""
    return re.sub(r"\.ome$", "", same_name(os.path.splitext(name)[0]), flags=re.IGNORECASE)


_BEFORE_WORD = r"(?:[_-]|(?<![^/]))"
_MASK = _BEFORE_WORD + "(?:cp_masks|masks?|labels?|seg(?:mentation)?|gt|anno(?:tation)?)"
_MASK_END = re.compile(_MASK + r"\Z", re.IGNORECASE)
_IMAGE_END = re.compile(_BEFORE_WORD + r"(?:img|image)\Z", re.IGNORECASE)
"""Endings of the names of masks and of images, or whole names."""
_NUMBER = r"[_-]?\d+"
_NUMBER_END = re.compile(_NUMBER + r"\Z")
_MASK_FILE = re.compile(_MASK + f"(?:{_NUMBER})?" + r"(?:\.ome)?\.\w+\Z", re.IGNORECASE)


def without_mask_ending(name: str) -> str:
    """Returns what a mask's name begins with, as that of its image; the name itself if it has no ending of a mask."""
    return _MASK_END.sub("", name)


def image_of_mask(name: str, images: Mapping[str, str]) -> Optional[str]:
    """Returns the image that a name, without its format, has as that of one of its masks; or None.

    Args:
        images: the names of the images, :func:`by_beginning`.
    """
    for whole in dict.fromkeys((name, _NUMBER_END.sub("", name))):
        begin = without_mask_ending(whole)
        if not os.path.basename(begin) and whole != name:
            continue  # mask_1 may be one of many, and not the mask of image
        if begin != whole and images.get(begin, name) != name:
            return images[begin]
    return None


def by_beginning(images: Collection[str]) -> Dict[str, str]:
    """Returns the names of images by what those of their masks begin with: the whole name, or that without "_img"."""
    return {**{_IMAGE_END.sub("", name): name for name in images}, **{name: name for name in images}}


def masks_among(paths: Sequence[str]) -> Dict[str, str]:
    """Returns the image of each file that is called like its mask, in one folder: a_mask.png, a_mask_1.png of a.png."""
    named = [path for path in paths if _MASK_FILE.search(path)]
    # Most folders have no masks, and many images.
    names = {pair_name(path): path for path in paths} if named else {}
    images, found = by_beginning(names), {}
    for path in named:
        image = image_of_mask(pair_name(path), images)
        if image is not None:
            found[path] = names[image]
    return found


def _in_one_folder(folder: Path) -> Dict[str, Path]:
    """Returns the folder itself for images and masks, if it has an image and its mask with an ending of masks."""
    return {"images": folder, "masks": folder} if masks_among(_own_images(folder)) else {}


def has_own_images(folder: Path) -> bool:
    """Returns whether images lie in a folder itself; False for an unreadable one, which reading reports."""
    with suppress(DataError, OSError):
        return bool(_own_images(folder))
    return False


def endings_instead(folder: Path) -> str:
    """Returns the endings of the files below a folder with their numbers, if none is named like an image; else ""."""
    counts: Counter[str] = Counter()
    for _, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not is_made_by_system(name)]
        counts.update(os.path.splitext(name)[1].lower() for name in names if not is_made_by_system(name))
    if not counts or any(map(is_image_name, counts)):
        return ""
    listed = ", ".join(
        f"{printable(ending) or 'none'} ({count:,})" for ending, count in counts.most_common(3)
    )
    return listed


def places_of_images(folder: Path, most: int = 4) -> str:
    """Returns words that name the folders below a folder in which images lie, at most ``most``; "" if there are none.

    At most three levels and 100 folders are looked at.
    """
    found: List[str] = []
    level, num_looked_at = [folder], 0
    for _ in range(3):
        below: List[Path] = []
        for parent in level:
            with suppress(DataError, OSError):
                below += subfolders(parent)
        level = below[: 100 - num_looked_at]
        num_looked_at += len(level)
        found += [printable(path.relative_to(folder).as_posix()) for path in level if has_own_images(path)]
    more = f" and {counted(len(found) - most, 'more folder')}" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def _own_images(folder: Path) -> List[str]:
    """Returns the names of the images in a folder itself."""
    entries = list_folder(folder) if folder.is_dir() else ()
    return [e.name for e in entries if is_image_name(e.name) and not is_made_by_system(e.name)]


def _sides_said(read: Mapping[str, Tuple[Path, ...]]) -> List[str]:
    """Returns words for a run's first line: which files are masks, if folders called ``masks`` do not say it."""
    images, masks = next(iter(read.values()))
    if images == masks:
        mask, image = next(iter(masks_among(_own_images(masks)).items()))
        return [f"{printable(mask)} is the mask of {printable(image)}"]
    names = [printable(path.name) for path in (images, masks)]
    is_usual = [name.casefold() for name in names] == ["images", "masks"]
    return [] if is_usual else [f"images in {names[0]}/ and masks in {names[1]}/"]


UNDIVIDED = "the last fifth of the pairs, in the order of names, is for evaluation"


def _find_pairs(folder: Path, pair_of: PairOf) -> Optional[Found]:
    """Finds images and masks in a folder itself, or in folders in it for training and evaluation.

    One of the two may be absent, but ``masks`` beside several folders of images is a class.  Pairs in the folder itself
    take precedence over those in parts; the parts may also lie inside the folders of images and of masks.

    Raises:
        DataError: several folders may serve for one part.
    """

    def sides(parent: Path) -> Dict[str, Path]:
        pair = pair_of(parent)
        others = [path for path in subfolders(parent) if path not in pair.values()]
        return {} if set(pair) == {"masks"} and sum(map(has_image, others)) > 1 else pair

    here = sides(folder)
    inside = _parts_inside(here)
    if inside:
        names = [name_in_set(images, folder) for images, _ in inside.values()]
        choice = f": training on {printable(names[0])}/, evaluation on {printable(names[1])}/"
        return Found("imagemasks", folder, inside, choice)
    if len(here) < 2:
        named = {path: part_named(path.name) for path in subfolders(folder)}
        parts = {path: part for path, part in named.items() if part in _SERVING and sides(path)}
        whole = {path: part for path, part in parts.items() if len(sides(path)) == 2}
        serving = {**_serving(parts), **_serving(whole)}
        if whole or "train" in serving:
            read = {subset: _both(path, sides(path)) for subset, path in serving.items()}
            return _in_parts("imagemasks", folder, read, parts, _sides_said(read) if whole else ())
        in_parts = find_class_parts(folder) if here else None
        if in_parts is not None and "train" in in_parts.parts:
            return None  # a folder called images lies beside class folders in parts
    if not here:
        return None
    read = {"train": _both(folder, here)}
    choice = ": " + ", ".join([UNDIVIDED, *(_sides_said(read) if len(here) == 2 else ())])
    return Found("imagemasks", folder, read, choice, is_undivided=True)


def _parts_inside(pair: Mapping[str, Path]) -> Dict[str, Tuple[Path, ...]]:
    """Returns the folders of "train" and "eval" inside those of images and of masks; none if one of them lacks one.

    Raises:
        DataError: several folders may serve for one part.
    """
    if len(pair) < 2 or pair["images"] == pair["masks"]:
        return {}

    def inside(part: str) -> Tuple[Path, ...]:
        named = [
            [path for path in subfolders(side) if part_named(path.name) == part] for side in pair.values()
        ]
        return tuple(path for path in (_one(paths, part) for paths in named) if path is not None)

    train, *evaluations = map(inside, _SERVING)
    evaluation = next((paths for paths in evaluations if len(paths) == 2), ())
    return {"train": train, "eval": evaluation} if len(train) == 2 and evaluation else {}


def _both(folder: Path, pair: Mapping[str, Path]) -> Tuple[Path, Path]:
    return pair.get("images", folder / "images"), pair.get("masks", folder / "masks")


def _find_nnunet(folder: Path) -> Optional[Found]:
    """Finds nnU-Net's ``imagesTr`` and ``labelsTr``, and ``imagesTs`` and ``labelsTs`` for evaluation if both exist.

    Raises:
        DataError: there are images for training without labels, or several folders of one name.
    """
    folders = subfolders(folder)
    train, test = (_called(folders, f"images{end}", f"labels{end}") for end in ("tr", "ts"))
    if "images" not in train:
        return None
    if "masks" not in train:
        raise DataError(
            f"{shown(train['images'])} has no labels: there is no folder labelsTr beside it", PAIR_LAYOUT
        )
    read = {"train": _both(folder, train)}
    if len(test) == 2:
        read["eval"] = _both(folder, test)
        names = [printable(images.name) for images, _ in read.values()]
        choice = f": training on {names[0]}/, evaluation on {names[1]}/"
    else:
        choice = f": {UNDIVIDED}" + "".join(f", nothing on {printable(path.name)}/" for path in test.values())
    return Found("imagemasks", folder, read, choice, len(read) == 1, has_channel_numbers=True)


def pair_folders(folder: Path) -> Set[Path]:
    """Returns the folders in which training searches for images and masks; none if there are no pairs."""
    with suppress(DataError, OSError):  # choosing the set reports it
        found = find_layout("imagemasks", folder)
        if found is not None and all(map(Path.is_dir, found.parts.get("train", (folder / "train",)))):
            read = {path for paths in found.parts.values() for path in paths}
            return read if found.is_undivided else read | {path.parent for path in read}
    return set()


# -- files with fixed names -----------------------------------------------------------------------------------


IDX_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "eval": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
IDX_SETS = ("mnist", "fashion_mnist")
VOLUME, VOLUME_LABELS = "train-volume", "train-labels"
SHARD = re.compile(r"(train|validation)-(\d{5})-of-(\d{5})")
"""The names of ImageNet's record files."""


def _idx_file(folder: Path, stem: str) -> Path:
    """Returns the plain or gzipped file of that name, also with the name that some tools unpack to (``idx3.ubyte``).

    Without any of them, the path of the plain file, which is absent.
    """
    names = (stem, stem + ".gz", stem.replace("-idx", ".idx"), stem.replace("-idx", ".idx") + ".gz")
    return next((folder / name for name in names if (folder / name).is_file()), folder / stem)


def has_shards(folder: Path) -> bool:
    """Returns whether a folder has a file with the name of one of ImageNet's record files."""
    return folder.is_dir() and any(SHARD.fullmatch(path.name) for path in entries(folder))


@dataclass
class CifarFiles:
    """The files of one version of CIFAR, and the number of images in a full training file."""

    train: Tuple[str, ...]
    test: str
    per_train_file: int
    meta: str
    label_key: str

    @property
    def binary(self) -> bool:
        return self.test.endswith(".bin")


_BATCHES = tuple(f"data_batch_{n}" for n in range(1, 6))
_BINARY = tuple(f"{name}.bin" for name in _BATCHES)
CIFAR_FILES: Dict[str, Tuple[CifarFiles, ...]] = {
    "cifar10": (
        CifarFiles(_BATCHES, "test_batch", 10000, "batches.meta", "labels"),
        CifarFiles(_BINARY, "test_batch.bin", 10000, "batches.meta.txt", "labels"),
    ),
    "cifar100": (
        CifarFiles(("train",), "test", 50000, "meta", "fine_labels"),
        CifarFiles(("train.bin",), "test.bin", 50000, "fine_label_names.txt", "fine_labels"),
    ),
}


def _find_cifar(name: str, folder: Path) -> Optional[Found]:
    """Finds a version of CIFAR-10 or CIFAR-100, complete or not."""
    for files in CIFAR_FILES[name]:
        # Only files count, because an image folder also has train/ and test/.  cifar100's names are common (many
        # folders hold a file "meta"), so two of them are needed.
        present = [n for n in (*files.train, files.test, files.meta) if (folder / n).is_file()]
        if len(present) >= (2 if name == "cifar100" else 1):
            return Found(name, folder, cifar=files)
    return None


# -- the formats ----------------------------------------------------------------------------------------------


class Format(NamedTuple):
    """A kind of data set that has files.

    Attributes:
        name: the name of the set; layouts of one set have the same name.
        find: function that finds the set in a folder itself.
        folders: the usual folders of the set, below the data folder.
        is_layout: whether any folder of this layout is such a set, whatever its name.
    """

    name: str
    find: Callable[[Path], Optional[Found]]
    folders: Tuple[str, ...] = ()
    is_layout: bool = False


def _idx(name: str, *folders: str) -> Format:
    def find(folder: Path) -> Optional[Found]:
        parts = {part: tuple(_idx_file(folder, stem) for stem in stems) for part, stems in IDX_FILES.items()}
        has_file = any(path.is_file() for paths in parts.values() for path in paths)
        return Found(name, folder, parts) if has_file else None

    return Format(name, find, folders)


def _find_volumes(folder: Path) -> Optional[Found]:
    """Finds a volume of images and one of labels; one of the two may be absent."""
    paths = [folder / f"{stem}.tif" for stem in (VOLUME, VOLUME_LABELS)]
    paths = [path if path.is_file() else path.with_suffix(".tiff") for path in paths]
    if not any(map(Path.is_file, paths)):
        return None
    read = {"train": (paths[0], paths[1])}
    return Found(
        "isbi2012", folder, read, ": the last fifth of the slices is for evaluation", is_undivided=True
    )


def _find_imagenet(folder: Path) -> Optional[Found]:
    """Finds record files, or class folders in train/ and val/."""
    if has_shards(folder):
        return Found("imagenet", folder)
    found = find_classes(folder)
    return None if found is None or found.is_undivided else found._replace(name="imagenet")


def _cifar(name: str, *folders: str) -> Format:
    below = (*folders, name, *(f"{name}/{folder}" for folder in folders))
    return Format(name, lambda folder: _find_cifar(name, folder), below)


FORMATS: Tuple[Format, ...] = (
    Format("isbi2012", _find_volumes, ("isbi2012", "ISBI2012", "isbi-2012")),
    _idx("mnist", "mnist", "MNIST", "MNIST/raw", "mnist/raw"),
    _idx("fashion_mnist", "fashion_mnist", "fashion-mnist", "FashionMNIST", "FashionMNIST/raw"),
    _cifar("cifar10", "cifar-10-batches-py", "cifar-10-batches-bin"),
    _cifar("cifar100", "cifar-100-python", "cifar-100-binary"),
    Format("imagenet", _find_imagenet, ("imagenet",)),
    Format("imagemasks", _find_nnunet, is_layout=True),
    Format("imagemasks", lambda folder: _find_pairs(folder, _in_two_folders), is_layout=True),
    Format("imagemasks", lambda folder: _find_pairs(folder, _in_one_folder), is_layout=True),
    Format("imagemasks", _find_beside, is_layout=True),
    Format("imagefolder", find_classes, is_layout=True),
)
"""The formats in the order in which they are tried."""
FILE_SETS = {form.name: form for form in FORMATS if not form.is_layout}
LAYOUTS = {form.name for form in FORMATS if form.is_layout}


def find_layout(name: str, folder: Path) -> Optional[Found]:
    """Finds a set in a folder itself: the first of the formats of that name that finds one.

    Raises:
        DataError: folders may serve for several purposes, or lack their partners.
    """
    tried = (form.find(folder) for form in FORMATS if form.name == name)
    found = next((one for one in tried if one is not None), None)
    if (
        found is None
        or name in LAYOUTS
        or any(path.is_dir() for part in found.parts.values() for path in part)
    ):
        return found
    classes = None
    with suppress(DataError, OSError):
        classes = find_classes(folder)
    unread = f"{',' if found.choice else ':'} from its files; the class folders beside them are not read"
    return found if classes is None else found._replace(choice=found.choice + unread)


def find_set(name: str, path: Path, *, explicit: bool = False) -> Optional[Found]:
    """Finds a set by its name: in ``path`` itself, or in one of its usual folders below it.

    MNIST, Fashion-MNIST and others have the same file names, and any image folder could be ImageNet.  If ``path``
    itself holds such files, its name decides, unless the user named the set (``explicit``).  Record files are always
    ImageNet's.
    """
    if name.startswith(TFDS_PREFIX):
        return find_tfds(name[len(TFDS_PREFIX) :], path, name)
    below = FILE_SETS[name].folders if name in FILE_SETS else ()
    there = [folder for folder in (path / one for one in below) if folder.is_dir()]
    for folder in (path, *there):
        if explicit or folder != path or _is_called(name, folder):
            found = find_layout(name, folder)
            if found is not None:
                return found
    return find_tfds(name, path, name)


def _is_called(name: str, folder: Path) -> bool:
    """Returns whether a folder's name fits a set whose files are in it."""
    if name in IDX_SETS:
        return _idx_name(folder) == name
    return name != "imagenet" or real(folder).name.lower() == "imagenet" or has_shards(folder)


_LIKE_MNIST = ("kmnist", "emnist", "qmnist", "medmnist", "notmnist", "kuzushiji", "k49")
"""Words in the names of folders with other sets in files of the same names."""


def _idx_name(folder: Path) -> str:
    """Returns the set whose idx files are in a folder, by the nearest name that tells; "" if that is another set's.

    KMNIST, EMNIST and others have the same files, and contain "mnist" in a longer word.
    """
    names = (part.lower() for part in reversed(real(folder).parts))
    nearest = next((part for part in names if "mnist" in part or part == "fashion"), "mnist")
    if "fashion" in nearest:
        return "fashion_mnist"
    return "" if any(other in nearest for other in _LIKE_MNIST) else "mnist"


def find_sets(folder: Path) -> List[Found]:
    """Finds all data sets in a folder, complete or not.

    Layouts of the folder itself are tried only if none of the other sets lies in the folder itself, in their order.

    Raises:
        DataError: a folder may serve for several purposes, or may be no class, or has idx files of an unknown set.
    """
    # Hugging Face also writes a file of this name into image folders; TFDS's records have no folders beside them.
    if (folder / INFO_FILE).is_file() and not subfolders(folder):
        return [Found(TFDS_PREFIX + printable("/".join(_described(folder)[0])), folder, is_tfds=True)]
    found = [one for one in (find_set(name, folder) for name in FILE_SETS) if one is not None]
    if any(one.location == folder for one in found):
        return found
    if not found and not _idx_name(folder) and find_layout("mnist", folder) is not None:
        ways = (f"--dataset {name} --dataset-path {quoted(folder)} if they are {name}" for name in IDX_SETS)
        raise DataError(
            f"{folder} has idx files, which do not say of which set they are, and its name is no set's that is known",
            f"{', '.join(ways)}; for another set, write a function that returns arrays (docs/own-networks.md)",
        )
    layouts = (form.find(folder) for form in FORMATS if form.is_layout)
    layout = next((one for one in layouts if one is not None), None)
    return found if layout is None else [*found, layout]


# -- sets of TensorFlow Datasets ------------------------------------------------------------------------------


def find_tfds(name: str, path: Path, chosen: str) -> Optional[Found]:
    """Finds the newest prepared version of a TFDS set.

    Args:
        name: NAME or NAME/CONFIG, with :VERSION to choose a version.
        path: the folder that holds NAME/[CONFIG/]VERSION, or the folder NAME, or the folder of the version.
        chosen: the name of the result.

    Raises:
        DataError: there are several configurations, and none is named.
    """
    plain_name, _, version = name.partition(":")
    parts = tuple(plain_name.split("/"))
    if (path / INFO_FILE).is_file():
        names, its_version = _described(path)
        if names[: len(parts)] == parts and version in ("", its_version):
            return Found(chosen, path, is_tfds=True)
    roots = [path.joinpath(*parts)]
    if real(path).name == parts[0]:
        roots.append(path.joinpath(*parts[1:]))
    for root in roots:
        below = subfolders(root)
        folders = [*below, *(inside for config in below for inside in subfolders(config))]
        versions = [inside for inside in folders if (inside / INFO_FILE).is_file()]
        versions = [inside for inside in versions if version in ("", inside.name)]
        configs = sorted({inside.parent for inside in versions})
        if len(configs) > 1:
            named = [f"{plain_name}/{printable(config.relative_to(root).as_posix())}" for config in configs]
            raise DataError(
                f"{shown(root)} has several configurations of {plain_name}: {', '.join(named)}",
                f"--dataset {TFDS_PREFIX}{named[0]}",
            )
        if versions:
            newest = max(versions, key=lambda inside: _version(inside.name))
            choice = ", the newest version" if len(versions) > 1 else ""
            return Found(chosen, newest, choice=choice, is_tfds=True)
    return None


def base_name(name: str) -> str:
    """Returns the name of a set without the prefix, configuration and version of TFDS."""
    return name[len(TFDS_PREFIX) :].split(":")[0].split("/")[0] if name.startswith(TFDS_PREFIX) else name


def _described(folder: Path) -> Tuple[Tuple[str, ...], str]:
    """Returns (NAME,) or (NAME, CONFIG), and the version, from the description of a prepared set; if it has no name,
    returns the names of its folders."""
    with suppress(UserError, ValueError, RecursionError):
        about = json.loads(read_bytes(folder / INFO_FILE, _MOST_INFO_BYTES))
        if isinstance(about, dict) and isinstance(about.get("name"), str):
            names = (about["name"], about.get("configName"))
            return tuple(str(name) for name in names if name), str(about.get("version", ""))
    return (real(folder).parent.name,), real(folder).name


def _version(text: str) -> Tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else -1 for part in text.split("."))
