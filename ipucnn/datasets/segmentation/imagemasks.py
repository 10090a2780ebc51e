"""``imagemasks``: a folder of image and mask pairs, ``DIR/images/NAME.*`` with ``DIR/masks/NAME.*``.

If ``DIR/train`` and ``DIR/val`` exist, each with ``images`` and ``masks``, they are the parts.  Otherwise the last
fifth of the pairs, in the order of their names, is for evaluation.  ``DIR/classes.txt`` defines the values of masks
that are not the classes' numbers.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Dict, Iterable, Iterator, List, NamedTuple, Sequence, Set, Tuple, Union

import numpy as np

from ipucnn.datasets.base import ArrayExamples, DataSource, data_source, read_file
from ipucnn.datasets.formats import PAIR_LAYOUT, Found, find_pairs, images_below, images_beside, same_name
from ipucnn.datasets.forms import IMAGE_HINT, MASK_HINT, Form, Mask, Page, mask_numbers, opened, plain_pixels
from ipucnn.datasets.limits import MAX_IMAGE_PIXELS, check_memory
from ipucnn.datasets.problems import Passed, Problem, guarded, problem_of, readable, unused_line
from ipucnn.datasets.segmentation.isbi2012 import num_held_out
from ipucnn.datasets.segmentation.masks import (
    EVERY_OTHER,
    IGNORE,
    TABLE,
    MaskClasses,
    MaskSet,
    check_no_objects,
    check_values,
    classes_of_values,
    codes,
    mask_values,
    read_table,
)
from ipucnn.datasets.segmentation.patches import IGNORED
from ipucnn.errors import DataError
from ipucnn.filesystem import is_folder
from ipucnn.text import counted, printable

SAME_SIZE = "an image and its mask have one size: cut or pad one of them, without resizing"
_MASK_ENDINGS = tuple(
    f"{sign}{word}" for word in ("masks", "mask", "labels", "label", "seg") for sign in "_-"
)
"""Endings that the mask of an image may have, after the image's name."""
_NOT_COMPARED = re.compile(r"masks?|labels?|image|img|seg(mentation)?|[\W_]+")
"""Parts of names that are ignored, like case, in the search for an image and a mask with similar names."""


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
    of_each = []
    for path, mask in masks:
        origin = f"mask {printable(str(path))}"
        present = mask_values(codes(mask.numbers, False, origin))
        of_each.append(present)
        values.update(present)
    check_no_objects(of_each, f"the masks of {printable(str(folder))}")
    check_values(sorted(values), f"the masks of {printable(str(folder))} have together")
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
        if palette is None or max(values) >= len(palette) or EVERY_OTHER in values:
            return ()
        colours = [tuple(palette[value].tolist()) for value in values]
    return tuple(colours) if any(len(set(colour)) > 1 for colour in colours) else ()


class Pair(NamedTuple):
    """An image and its mask in one part, "train" or "eval"."""

    subset: str
    image: Path
    mask: Path


_Files = Dict[str, Path]


def _files_by_name(folder: Path, subset: str, files: _Files) -> Iterator[Problem]:
    """Adds the images of a folder and of folders in it to ``files``, by their names below it without endings.

    Yields:
        A problem for everything else.
    """
    for item in images_below(folder, folder.name, subset):
        if isinstance(item, Problem):
            yield item
            continue
        path = Path(item)
        name = re.sub(r"\.ome$", "", same_name(str(path.relative_to(folder).with_suffix(""))))
        if name in files:
            error = DataError(
                f"{files[name]} and {path} are both called {printable(name)}", "keep one of them"
            )
            yield problem_of(error, subset, _shown(path, folder), path)
        files[name] = path


def read_pairs(found: Found, allow_partial: bool = False) -> Iterator[Union[Pair, Problem]]:
    """Yields the pairs of a set in the order of names, training first, and a problem for each other image.

    Files whose names are equal but for an ending of the mask, or in Unicode form, are a pair.  Of a set without parts,
    the last fifth of the pairs is for evaluation.

    Args:
        found: the folders of the pairs.
        allow_partial: whether training goes on without a file that has no partner.
    """
    for subset in ("train", "eval"):
        if subset not in found.parts and not found.is_undivided:
            error = DataError(
                f"{found.location} has no pairs of images and masks", PAIR_LAYOUT, "missing-subset"
            )
            yield Problem("missing-subset", subset, f"there are no pairs for {subset}", error=error)
    read = {path for folders in found.parts.values() for path in folders}
    for subset, folders in found.parts.items():
        sides: Tuple[_Files, _Files] = ({}, {})
        for folder, files in zip(folders, sides):
            if is_folder(folder):
                yield from guarded(_files_by_name(folder, subset, files), subset, folder.name, folder)
            else:
                error = DataError(
                    f"{folder.parent} has no pairs of images and masks", PAIR_LAYOUT, "missing-file"
                )
                yield Problem("missing-file", subset, f"the folder {folder.name}", error=error)
        pairs, alone = _matched(*sides)
        if all(map(is_folder, folders)):
            yield from _without_partner(subset, folders, alone, bool(pairs), allow_partial)
        edge = len(pairs) - (num_held_out(len(pairs)) if found.is_undivided and len(pairs) > 1 else 0)
        yield from (Pair(subset if k < edge else "eval", *pair) for k, pair in enumerate(pairs))
        yield from guarded(images_beside(folders[0].parent, read, subset), subset, ".", folders[0].parent)
    if not found.is_undivided:
        used = {folders[0].parent for folders in found.parts.values()}
        yield from guarded(images_beside(found.location, used, None), None, ".", found.location)


def _matched(images: _Files, masks: _Files) -> Tuple[List[Tuple[Path, Path]], Tuple[_Files, _Files]]:
    """Returns the pairs in the order of names, and the images and the masks without a partner."""
    keys = {}
    for name in masks:
        shorter = next((name[: -len(end)] for end in _MASK_ENDINGS if name.endswith(end)), name)
        keys[name] = name if name in images else shorter
    shared = [key for key, count in Counter(keys.values()).items() if count > 1]
    by_key = {name if key in shared else key: masks[name] for name, key in keys.items()}
    names = sorted(set(images) & set(by_key))
    alone = (
        {name: images[name] for name in sorted(set(images) - set(names))},
        {key: by_key[key] for key in sorted(set(by_key) - set(names))},
    )
    return [(images[name], by_key[name]) for name in names], alone


def _without_partner(
    subset: str, folders: Sequence[Path], alone: Tuple[_Files, _Files], has_pairs: bool, allow_partial: bool
) -> Iterator[Problem]:
    """Yields a problem for each file without a partner, with a new name for a mask that is called like an image."""
    similar: Dict[str, Tuple[List[Path], List[Path]]] = {}
    for side, files in enumerate(alone):
        for name, path in files.items():
            similar.setdefault(_NOT_COMPARED.sub("", name.casefold()), ([], []))[side].append(path)
    renames = {
        mask[0]: f"{_shown(mask[0], folders[1])} to "
        + _shown(mask[0].with_name(image[0].stem + mask[0].suffix), folders[1])
        for image, mask in similar.values()
        if len(image) == len(mask) == 1
    }
    names = [_shown(path, folder) for folder, files in zip(folders, alone) for path in files.values()]
    hint = f"an image and its mask have one name: rename {_some(list(renames.values()))}" if renames else ""
    text = f"{folders[0].parent} has {counted(len(names), 'file')} without a partner: {_some(names)}"
    error = DataError(
        text,
        (hint or "add the missing image or mask") + "; or leave the files out with --allow-partial",
        "unpaired",
    )
    if not has_pairs:
        examples = [
            _shown(path, folder) for folder, files in zip(folders, alone) for path in [*files.values()][:1]
        ]
        text = f"no file in {folders[0]} has the name of one in {folders[1]}: for example {' and '.join(examples)}"
        error = DataError(text, hint or PAIR_LAYOUT, "unpaired")
    for folder, files in zip(folders, alone):
        for path in files.values():
            reason = f"rename {renames[path]}" if path in renames else "without a partner"
            raised = None if allow_partial and has_pairs else error
            yield Problem("unpaired", subset, _shown(path, folder), reason, raised)


def _shown(path: Path, folder: Path) -> str:
    return printable(str(path.relative_to(folder.parent)))


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
        _check_size(image, path, mask, mask_path, SAME_SIZE)
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
    found = find_pairs(folder)
    if found is None:
        raise DataError(f"{folder} has no pairs of images and masks", PAIR_LAYOUT)
    passed = Passed()
    pairs = list(readable(read_pairs(found, allow_partial), passed))
    files = {subset: [pair[1:] for pair in pairs if pair.subset == subset] for subset in ("train", "eval")}
    for subset, folders in found.parts.items():
        if not files[subset]:
            raise DataError(f"{folders[0].parent} has no pairs of images and masks", PAIR_LAYOUT)
    if len(pairs) < 2:
        raise DataError(f"{folder} has one pair; training and evaluation need two", PAIR_LAYOUT)
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
    counted_labels = labels if classes.ignored is None else labels[labels != IGNORED]
    if len(mask_values(counted_labels)) < 2:
        raise DataError(f"the masks of {folder} have one value in all pixels: nothing to learn", PAIR_LAYOUT)
    names = tuple(f"{path.parent.name}/{path.name}" for path, _ in every)
    examples, edge = ArrayExamples(images, labels, names), len(files["train"])
    train, held = examples.subset(slice(None, edge)), examples.subset(slice(edge, None))
    values = classes.values
    if classes.any_other:
        values = (0, max(int(stored[path].numbers.max()) for _, path in every))
    warnings = [*unused_line(printable(str(folder)), passed.unused)]
    if classes.ignored is not None:
        share = (labels == IGNORED).mean()
        warnings.append(
            f"{TABLE}: {share:.2%} of the masks' pixels are {IGNORE}, and count neither in the loss nor in any score"
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
        unused=passed.unused,
        patchwise=True,
        own_split=found.is_undivided,
        class_colours=class_colours(classes, stored[every[0][1]]),
        mask_values=() if classes.colours or EVERY_OTHER in values else values,
    )
