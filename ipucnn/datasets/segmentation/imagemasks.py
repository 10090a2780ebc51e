"""``imagemasks``: a folder of image and mask pairs, ``DIR/images/NAME.*`` with ``DIR/masks/NAME.*``.

If ``DIR/train`` and ``DIR/val`` exist, each with ``images`` and ``masks``, they are the parts.  Otherwise the last
fifth of the pairs, in the order of their names, is for evaluation.  ``DIR/classes.txt`` defines the values of masks
that are not the classes' numbers.
"""

import re
from pathlib import Path
from typing import Dict, Iterable, List, Mapping, NamedTuple, Sequence, Set, Tuple

import numpy as np

from ipucnn.datasets.base import ArrayExamples, DataSource, data_source, read_file
from ipucnn.datasets.forms import IMAGE_HINT, MASK_HINT, Form, Mask, Page, mask_numbers, opened, plain_pixels
from ipucnn.datasets.limits import MAX_IMAGE_PIXELS, check_memory
from ipucnn.datasets.problems import STRICT, Problems
from ipucnn.datasets.segmentation.isbi2012 import num_held_out
from ipucnn.datasets.segmentation.masks import (
    IGNORE,
    TABLE,
    MaskClasses,
    MaskSet,
    check_values,
    classes_of_values,
    codes,
    mask_values,
    read_table,
)
from ipucnn.datasets.segmentation.patches import IGNORED
from ipucnn.datasets.sources.imagefolder import EVAL_NAMES, EXTENSIONS, find_parts
from ipucnn.errors import DataError
from ipucnn.filesystem import entries, is_file, is_folder
from ipucnn.text import counted, printable

LAYOUT = "expected DIR/images/NAME.png and DIR/masks/NAME.png, or both in DIR/train and DIR/val"
BELOW = ("images", "masks")
_MASK_ENDINGS = ("_mask", "-mask", "_label", "-label")
_NOT_COMPARED = re.compile(r"masks?|labels?|image|img|seg(mentation)?|[\W_]+")
"""Parts of names that are ignored, like case, in the search for an image and a mask with similar names."""


def has_pairs(folder: Path) -> bool:
    return is_folder(folder / "images") and is_folder(folder / "masks")


def is_imagemasks(folder: Path) -> bool:
    """Returns whether a folder, or its train/, has the folders of pairs of images and masks."""
    return has_pairs(folder) or has_pairs(folder / "train")


def has_files(folder: Path) -> bool:
    """Returns whether a folder, or a part of it, has a folder of images or of masks."""
    parts = [folder, folder / "train", find_parts(folder).get("eval", folder)]
    return any(is_folder(part / below) for part in parts for below in BELOW)


def part_folders(folder: Path) -> Dict[str, Path]:
    """Returns the folders with the pairs of "train" and "eval", complete or not.

    If ipucnn divides the set itself, the result is the folder itself as "train".  Pairs in the folder itself take
    precedence over train/ and val/.
    """
    parts = {"train": folder / "train", "eval": find_parts(folder).get("eval", folder / EVAL_NAMES[0])}
    if has_pairs(folder) or not any(is_folder(part / below) for part in parts.values() for below in BELOW):
        return {"train": folder}
    return {subset: part for subset, part in parts.items() if is_folder(part)}


def parts_of(folder: Path) -> Set[Path]:
    """Returns the subfolders of a folder of pairs in which training searches for files."""
    return {folder / name for name in (*BELOW, "train", *EVAL_NAMES)}


def files_by_name(folder: Path, is_mask: bool) -> Dict[str, Path]:
    """Returns the image files of a folder, by the name that pairs images with masks."""
    files: Dict[str, Path] = {}
    for path in entries(folder):
        if path.name.startswith(".") or path.suffix.lower() not in EXTENSIONS or not is_file(path):
            continue
        stem = path.stem
        if is_mask:
            stem = next((stem[: -len(end)] for end in _MASK_ENDINGS if stem.endswith(end)), stem)
        if stem in files:
            raise DataError(f"{files[stem]} and {path} are both called {stem}", "keep one of them")
        files[stem] = path
    return files


def read_image(path: Path, max_pixels: int, mask: Form) -> Tuple[np.ndarray, Form]:
    """Reads an image as ``infer`` does: uint8 [h, w] for grey, [h, w, 3] for colour; and its form.

    Args:
        path: the image.
        max_pixels: the most pixels that it may have.
        mask: the form of its mask.

    Raises:
        DataError: the file cannot be read, has several pages, or is turned and its mask is not.
    """
    origin = f"image {printable(str(path))}"
    page = _single_page(path, origin, max_pixels, IMAGE_HINT)
    tags = (page.form.orientation, mask.orientation)
    if tags[0] != tags[1]:
        raise DataError(
            f"{origin} has the orientation tag {tags[0]}, and its mask {tags[1]}: they may be turned differently",
            "save both upright, without the tag",
            "orientation",
        )
    return plain_pixels(page, origin), page.form


def read_mask(path: Path, max_pixels: int, colours: bool = False) -> Mask:
    """Reads the stored values of a mask; see ``forms.mask_numbers``."""
    origin = f"mask {printable(str(path))}"
    return mask_numbers(_single_page(path, origin, max_pixels, MASK_HINT), origin, colours)


def _single_page(path: Path, origin: str, max_pixels: int, hint: str) -> Page:
    with opened(read_file(str(path)), origin, max_pixels, hint, strict=True) as file:
        if file.num_pages > 1:
            text = f"{origin} has {file.num_pages} pages"
            raise DataError(text, "save each page as a file of its own", "several-pages")
        return file.page()


def classes_of_masks(folder: Path, masks: Iterable[Tuple[Path, Mask]]) -> MaskClasses:
    """Returns the classes of a set without a table, from the values of all its masks.

    Raises:
        DataError: the values cannot be classes.
    """
    values: Set[int] = set()
    for path, mask in masks:
        origin = f"mask {printable(str(path))}"
        present = mask_values(codes(mask.numbers, False, origin))
        check_values(present, f"{origin} has")
        values.update(present)
    return classes_of_values(sorted(values), f"the masks of {printable(str(folder))} have together")


def class_colours(classes: MaskClasses, mask: Mask) -> Tuple[Tuple[int, int, int], ...]:
    """Returns red, green and blue of each class, from the table or from the palette of one mask.

    Args:
        classes: the classes of the masks.
        mask: one of the masks.

    Returns:
        One colour per class; empty if masks are grey.
    """
    palette = mask.form.palette
    if classes.colours:
        colours = [(value >> 16, value >> 8 & 255, value & 255) for value in classes.values]
    else:
        values = (0, int(mask.numbers.max())) if classes.any_other else classes.values
        if palette is None or max(values) >= len(palette):
            return ()
        colours = [tuple(palette[value].tolist()) for value in values]
    return tuple(colours) if any(len(set(colour)) > 1 for colour in colours) else ()


class Pairs(NamedTuple):
    """The files of a folder, in pairs.

    Attributes:
        both: image and mask, by the name that pairs them, in the order of names.
        alone: images without a mask and masks without an image, as ``images/one.png``.
        renames: suggested names for masks whose names are similar to that of an image without a mask.
    """

    both: Dict[str, Tuple[Path, Path]]
    alone: Tuple[str, ...]
    renames: Tuple[str, ...]


def find_pairs(images: Mapping[str, Path], masks: Mapping[str, Path]) -> Pairs:
    """Pairs the images and masks of :func:`files_by_name`."""
    both = {name: (images[name], masks[name]) for name in sorted(set(images) & set(masks))}
    alone = [{name: files[name] for name in sorted(set(files) - set(both))} for files in (images, masks)]
    similar: Dict[str, Tuple[List[Path], List[Path]]] = {}
    for side, files in enumerate(alone):
        for name, path in files.items():
            similar.setdefault(_NOT_COMPARED.sub("", name.casefold()), ([], []))[side].append(path)
    renames = [
        f"masks/{mask[0].name} to masks/{image[0].stem}{mask[0].suffix}"
        for image, mask in similar.values()
        if len(image) == len(mask) == 1
    ]
    names = [f"{below}/{path.name}" for below, files in zip(BELOW, alone) for path in files.values()]
    return Pairs(both, tuple(map(printable, names)), tuple(map(printable, renames)))


def read_pairs(part: Path, subset: str, problems: Problems = STRICT) -> Pairs:
    """Returns the pairs of a part; none if one of its two folders is absent or unreadable, which is a problem."""
    files: List[Dict[str, Path]] = []
    for below in BELOW:
        with problems.noting(subset, below, part / below):
            if is_folder(part / below):
                files.append(files_by_name(part / below, below == "masks"))
            else:
                error = DataError(f"{part} has no pairs of images and masks", LAYOUT, "missing-file")
                problems.refuse(error, subset, f"the folder {below}")
    return find_pairs(*files) if len(files) == len(BELOW) else Pairs({}, (), ())


def divided(parts: Mapping[str, Pairs], folder: Path) -> Dict[str, List[Tuple[Path, Path]]]:
    """Returns image and mask of each pair, in training and evaluation parts; the last fifth of an undivided folder is
    for evaluation."""
    files = {subset: list(pairs.both.values()) for subset, pairs in parts.items()}
    if list(part_folders(folder).values()) == [folder] and len(files["train"]) > 1:
        edge = len(files["train"]) - num_held_out(len(files["train"]))
        files = {"train": files["train"][:edge], "eval": files["train"][edge:]}
    return files


def _check_pairs(part: Path, pairs: Pairs, allow_partial: bool) -> None:
    """Rejects a part without pairs, and, unless ``allow_partial`` is set, one with a file that has no partner."""
    rename = (
        "" if not pairs.renames else f"an image and its mask have one name: rename {_some(pairs.renames)}"
    )
    if not pairs.both:
        raise DataError(
            f"no file in {part / 'images'} has the name of one in {part / 'masks'}", rename or LAYOUT
        )
    if pairs.alone and not allow_partial:
        raise DataError(
            f"{part} has {counted(len(pairs.alone), 'file')} without a partner: {_some(pairs.alone)}",
            (rename or "add the missing image or mask") + "; or leave the files out with --allow-partial",
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f", and {len(names) - 3} more" if len(names) > 3 else "")


def _read_images(
    folder: Path,
    files: Sequence[Tuple[Path, Path]],
    masks: Sequence[np.ndarray],
    forms: Sequence[Form],
    max_pixels: int,
) -> np.ndarray:
    """Reads the images of a set, all of one size and as large as their masks: uint8 [n, h, w, 1 or 3]."""
    for i, ((path, mask_path), mask, form) in enumerate(zip(files, masks, forms)):
        image, _ = read_image(path, max_pixels, form)
        _check_size(image, path, mask, mask_path, "an image and its mask have one size")
        if i == 0:
            # All images have this size; masks are in memory twice while they are stacked into one array.
            needed = len(files) * (image.size + 2 * mask.size)
            check_memory(needed, f"{printable(str(folder))} with {len(files)} such images")
            images = np.empty((len(files), *image.shape), np.uint8)
        else:
            _check_alike(image, path, images[0], files[0][0])
        images[i] = image
    return images[..., np.newaxis] if images.ndim == 3 else images


def _check_size(one: np.ndarray, path: Path, other: np.ndarray, other_path: Path, hint: str) -> None:
    if one.shape[:2] != other.shape[:2]:
        sizes = ["x".join(map(str, array.shape[:2])) for array in (one, other)]
        raise DataError(f"{path} is {sizes[0]} pixels, but {other_path} is {sizes[1]}", hint)


def _check_alike(image: np.ndarray, path: Path, first: np.ndarray, first_path: Path) -> None:
    _check_size(image, path, first, first_path, "all images of a set have one size: cut or pad them")
    if image.ndim != first.ndim:
        kinds = ["grey" if array.ndim == 2 else "colour" for array in (image, first)]
        raise DataError(
            f"{path} is {kinds[0]}, but {first_path} is {kinds[1]}",
            "all images of a set are grey, or all are colour",
        )


def open_imagemasks(
    folder: Path, max_pixels: int = MAX_IMAGE_PIXELS, allow_partial: bool = False
) -> DataSource:
    """Reads all pairs of a folder.  Images are grey or colour; ``masks`` describes the masks.

    Args:
        folder: the folder of the set.
        max_pixels: the most pixels of an image.
        allow_partial: whether to leave out images without a mask, and masks without an image.

    Raises:
        DataError: there are no pairs, a file has no partner, sizes differ, a file is damaged or has unsupported pixels,
            values of masks are no classes, or the pairs take more than half of the memory.
    """
    parts = part_folders(folder)
    is_undivided = list(parts.values()) == [folder]
    if not is_undivided and len(parts) < 2:
        raise DataError(f"{folder} has no pairs of images and masks", LAYOUT)
    pairs = {subset: read_pairs(part, subset) for subset, part in parts.items()}
    for subset, part in parts.items():
        _check_pairs(part, pairs[subset], allow_partial)
    files = divided(pairs, folder)
    if len(files) < 2:
        raise DataError(f"{folder} has one pair; training and evaluation need two", LAYOUT)
    every = [pair for part_files in files.values() for pair in part_files]
    table = read_table(folder)
    stored: Dict[Path, Mask] = {}
    agreeing = MaskSet(table)
    for _, path in every:
        stored[path] = read_mask(path, max_pixels, table is not None and table.colours)
        agreeing.check(stored[path], f"mask {printable(str(path))}")
        if len(stored) == 1:
            needed = len(every) * stored[path].numbers.nbytes
            check_memory(needed, f"{printable(str(folder))} with {len(every)} such masks")
    classes = table or classes_of_masks(folder, stored.items())
    masks = [classes.of(stored[path].numbers, f"mask {printable(str(path))}") for _, path in every]
    forms = [stored[path].form for _, path in every]
    images = _read_images(folder, every, masks, forms, max_pixels)
    labels = np.stack(masks)
    is_ignored = labels == IGNORED
    if len(mask_values(labels[~is_ignored])) < 2:
        raise DataError(f"the masks of {folder} have one value in all pixels: nothing to learn", LAYOUT)
    names = tuple(f"{path.parent.name}/{path.name}" for path, _ in every)
    examples, edge = ArrayExamples(images, labels, names), len(files["train"])
    train, held = examples.subset(slice(None, edge)), examples.subset(slice(edge, None))
    warnings = [
        f"{part}: left out {counted(len(alone), 'file')} without a partner: {_some(alone)}"
        for part, alone in ((part, pairs[subset].alone) for subset, part in parts.items())
        if alone
    ]
    if classes.ignored is not None:
        warnings.append(
            f"{TABLE}: {is_ignored.mean():.2%} of the masks' pixels are {IGNORE}, and count neither in the loss nor in "
            "any score"
        )
    return data_source(
        train,
        held,
        name="imagemasks",
        task="segmentation",
        class_names=classes.names,
        location=str(folder),
        augmentation="elastic",
        warnings=tuple(warnings),
        patchwise=True,
        own_split=is_undivided,
        class_colours=class_colours(classes, stored[every[0][1]]),
    )
