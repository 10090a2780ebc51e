"""Images and masks in files, in one of the layouts of ``formats.py``: folders, one folder, nnU-Net's, or two volumes.

Of a set without parts, the last fifth of the pairs, in the order of their names and pages, is for evaluation.
A table, ``DIR/classes.txt`` or that of CVAT, Roboflow or nnU-Net, defines values that are not the classes' numbers.
"""

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import (
    Callable,
    Collection,
    Dict,
    Iterable,
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

import numpy as np

from ipucnn.datasets.base import DataSource, MaskedExamples, data_source, read_file
from ipucnn.datasets.formats import (
    MAXIMUM,
    PAIR_LAYOUT,
    READ,
    SORTING,
    Found,
    NoPairs,
    by_beginning,
    image_of_mask,
    images_at,
    images_below,
    is_image_name,
    list_folder,
    name_in_set,
    pair_name,
    part_alone,
    part_named,
    passed_beside,
    without_mask_ending,
)
from ipucnn.datasets.forms import (
    IMAGE_HINT,
    MASK_HINT,
    WHITE_IS_ZERO,
    Axes,
    Mask,
    Page,
    mask_numbers,
    opened,
    page_of,
    plain_pixels,
    remarks_on_page,
)
from ipucnn.datasets.limits import MAX_IMAGE_PIXELS, check_memory
from ipucnn.datasets.problems import (
    Passed,
    Problem,
    check_any_left,
    guarded,
    item_or_problem,
    left_out_line,
    problem_of,
    readable,
    remark_lines,
    unused_line,
    with_unused,
)
from ipucnn.datasets.segmentation.masks import (
    DESCRIPTION,
    EVERY_OTHER,
    IGNORE,
    MOST_FOUND,
    TABLE,
    TWO_VALUES,
    MaskClasses,
    MaskSet,
    check_no_objects,
    classes_of_values,
    codes,
    mask_values,
    notes_on_classes,
    one_class_command,
    other_values,
    read_table,
    table_command,
    table_in,
)
from ipucnn.datasets.segmentation.patches import IGNORED
from ipucnn.errors import DataError
from ipucnn.filesystem import new_folder, shown
from ipucnn.text import counted, printable, quoted

SAME_SIZE = "an image and its mask have one size: cut or pad one of them, without resizing"
SHARE_HELD_OUT = 5
"""One in five pairs is held out for evaluation, the last ones: 6 of ISBI's 30 slices, the fifth of five folds."""
VOLUME_CLASSES = ("membrane", "cell")
"""The classes of ISBI 2012's volumes, fly brain under an electron microscope: white in the labels is cell, black
membrane (Arganda-Carreras et al. 2015, doi:10.3389/fnana.2015.00142)."""
_NOT_COMPARED = re.compile(r"masks?|labels?|image|img|seg(mentation)?|[\W_]+")
"""Parts of names that are ignored, like case, in the search for an image and a mask with similar names."""
_CHANNEL = re.compile(r"(.*)_(\d{4})")
"""The name of an image of nnU-Net, and the number of its channel."""
_STACKS = (".tif", ".tiff")
"""Endings of TIFF files that may have several pages."""


class PairFiles(NamedTuple):
    """An image file and its mask file in one part, "train" or "eval": a pair, or as many pairs as they have pages."""

    subset: str
    image: Path
    mask: Path


class Pair(NamedTuple):
    """An image and its mask in one part, "train" or "eval": the same page of two files with ``axes``."""

    subset: str
    image: Path
    mask: Path
    page: int
    num_pages: int
    axes: Axes = ()

    @property
    def files(self) -> PairFiles:
        """The two files."""
        return PairFiles(self.subset, self.image, self.mask)

    def shown(self, path: Path, folder: Optional[Path] = None) -> str:
        """Returns the name of one of the two files and its page, from 1: below a folder, or the whole path."""
        page = "" if self.num_pages == 1 else f", page {self.page + 1}"
        if folder is not None:
            return printable(name_in_set(path, folder)) + page
        return printable(str(path)) + (f"{page} of {self.num_pages}" if page else "")


class PairPage(NamedTuple):
    """A decoded page of one of the two files of a pair.

    Attributes:
        pair: the pair.
        page: the page.
        origin: its name in messages.
    """

    pair: Pair
    page: Page
    origin: str


def pages(
    files: PairFiles,
    kind: str,
    folder: Path,
    max_pixels: int,
    mask: Optional[Pair] = None,
    chosen: Optional[Collection[int]] = None,
) -> Iterator[Union[PairPage, Problem]]:
    """Yields the pages of a file one after another; a page or file that cannot be decoded is a problem.

    Args:
        files: the two files.
        kind: "image" or "mask", the file to read.
        folder: the folder of the set; names in problems are below it.
        max_pixels: the most pixels of a page.
        mask: for an image, a pair of its mask's pages.
        chosen: the pages to decode, from 0; None: all.
    """
    path = files.image if kind == "image" else files.mask
    origin, hint = f"{kind} {printable(str(path))}", IMAGE_HINT if kind == "image" else MASK_HINT
    name = printable(name_in_set(path, folder))
    num_read = 0
    try:
        with opened(read_file(str(path)), origin, max_pixels, hint, strict=True) as file:
            count = file.num_pages
            if count > 1 and (file.form.format != "TIFF" or path.suffix.lower() not in _STACKS):
                text = f"{origin} has {count} pages"
                raise DataError(text, "save each page as a file of its own", "several-pages")
            if mask is not None and mask.num_pages != count:
                text = f"{path} has {counted(count, 'page')}, and its mask {files.mask} has {mask.num_pages}"
                hint = "each page of an image has its mask on the same page: save as many pages in both files"
                raise DataError(text, hint, "count-mismatch")
            axes = file.axes if mask is None else mask.axes
            if file.axes and axes and file.axes != axes:
                text = f"{path} has pages of {_shown_axes(file.axes)}, and its mask {files.mask} of {_shown_axes(axes)}"
                hint = f"save the mask with the axes and the order of the image: {_shown_axes(file.axes)}"
                raise DataError(text, hint, "page-order")
            for number in range(count) if chosen is None else sorted(chosen):
                pair = Pair(*files, number, count, axes)
                where = f"{kind} {pair.shown(path)}"
                place = pair.shown(path)
                read = file.page if count == 1 else partial(page_of, file, number, where)
                page = item_or_problem(read, files.subset, pair.shown(path, folder), path, place)
                num_read += 1
                yield page if isinstance(page, Problem) else PairPage(pair, page, where)
    except DataError as error:
        problem = problem_of(error, files.subset, name, path)
        may_have_more = chosen is None and path.suffix.lower() in _STACKS
        count = 1 if chosen is None else len(chosen) - num_read
        yield replace(problem, count=count, has_rest=may_have_more)


def _shown_axes(axes: Axes) -> str:
    return f"{''.join(axis for axis, _ in axes)} {'x'.join(str(length) for _, length in axes)}"


def image_pixels(page: Page, origin: str, mask: Mask) -> np.ndarray:
    """Returns an image as ``infer`` reads it: uint8 [h, w, 1] for grey, [h, w, 3] for colour.

    Raises:
        DataError: its pixels are not read, it has another size than its mask, or it is turned and its mask is not.
    """
    tags = (page.form.orientation, mask.form.orientation)
    if tags[0] != tags[1]:
        raise DataError(
            f"{origin} has the orientation tag {tags[0]}, and its mask {tags[1]}: they may be turned differently",
            "save both upright, without the tag",
            "orientation",
        )
    image = plain_pixels(page, origin)
    if image.shape[:2] != mask.numbers.shape[:2]:
        sizes = ["x".join(map(str, array.shape[:2])) for array in (image, mask.numbers)]
        hint = SAME_SIZE
        (factor, rest), other = (divmod(a, b) for a, b in zip(image.shape[:2], mask.numbers.shape[:2]))
        if (factor, rest) == other and factor > 1 and not rest:
            hint = (
                "if the mask shows the whole image, enlarge it without new values: "
                f"mask.repeat({factor}, axis=0).repeat({factor}, axis=1) in NumPy"
            )
        raise DataError(f"{origin} is {sizes[0]} pixels, its mask {sizes[1]}", hint, "wrong-shape")
    return image.reshape(*image.shape[:2], -1)


def table_of(found: Found) -> Optional[MaskClasses]:
    """Returns the classes that the set's table names; None without one.

    Raises:
        DataError: the file cannot be read, or has another format; or the tables of two parts differ.
    """
    paths = tables_of(found)
    read = [read_table(path) for path in paths]
    for path, table in zip(paths, read):
        if table != read[0]:
            raise DataError(
                f"{shown(paths[0])} and {shown(path)} differ, and the parts of a set have the same classes",
                f"keep one table for all parts, {quoted(found.location / TABLE)}",
            )
    return read[0] if read else None


def tables_of(found: Found) -> List[Path]:
    """Returns the files that name the classes of the masks: those of the set and of its parts, beside the images."""
    folders = [found.location]
    for of_part in found.parts.values():
        folders += [folder for folder in _around(of_part) if folder not in folders]
    paths = [path for path in map(table_in, folders) if path is not None]
    # Ours comes before other programs' tables, in whichever folder.
    paths = [path for path in paths if path.name == TABLE] or paths
    if not paths and found.has_channel_numbers and (found.location / DESCRIPTION).is_file():
        return [found.location / DESCRIPTION]
    return paths


def classes_of_masks(found: Found, masks: Mapping[Pair, Mask]) -> MaskClasses:
    """Returns the classes of a set without a table, from the values of all its masks.

    Raises:
        DataError: the values cannot be classes.
    """
    values: Set[int] = set()
    of_each = []
    for pair, mask in masks.items():
        try:
            present = mask_values(codes(mask.numbers, False, f"mask {pair.shown(pair.mask)}"))
        except DataError as error:
            colours = colours_of_masks(masks.values())
            hint = table_command(found.location, colours) if len(colours) <= MOST_FOUND else error.hint
            raise DataError(error.message, hint, error.code) from None
        of_each.append(present)
        values.update(present)
    subject = f"the masks of {printable(str(found.location))}"
    command = f": {_copied_pairs(found, 'two-values')}" if found.name == "imagemasks" else ""
    check_no_objects(of_each, subject, TWO_VALUES + command)
    try:
        classes = classes_of_values(sorted(values), f"{subject} have together")
    except DataError as error:
        if len(values) > MOST_FOUND:
            raise
        message, several = (
            error.message,
            [{*present} - {0} for present in of_each if len({*present} - {0}) > 1],
        )
        # Beside other values 255 is a border; alone in a mask it is the object, of another number than in others.
        has_border = any(255 in present for present in several)
        hint = table_command(found.location, [(value,) for value in sorted(values)], has_border)
        if 0 in values and not several:
            message += ", and no mask has two of them beside 0"
            one_class = one_class_command(found.location)
            hint = f"if each is the object, in masks of several programs: {one_class}; or {hint}"
        raise DataError(message, hint, error.code) from None
    if found.name == "isbi2012" and classes.any_other:
        return classes._replace(names=VOLUME_CLASSES)
    return classes


def _inverted_greys(masks: Iterable[Mask]) -> List[str]:
    """Returns the line about masks that have white as 0: viewers show them inverted."""
    inverted = [mask.form.colour == WHITE_IS_ZERO for mask in masks]
    if not any(inverted):
        return []
    if all(inverted):
        return ["the masks have white as 0, and viewers show them inverted: the stored numbers count"]
    verb = "has" if sum(inverted) == 1 else "have"
    return [
        f"{sum(inverted)} of {counted(len(inverted), 'mask')} {verb} white as 0, and viewers show them inverted: the "
        "stored numbers count; if these are the inverse of the others', save them by one rule"
    ]


def colours_of_masks(masks: Iterable[Mask]) -> List[Tuple[int, ...]]:
    """Returns the distinct red, green and blue of masks, in ascending order; a grey one has three equal numbers."""
    found: Set[int] = set()
    for mask in masks:
        found.update(np.unique(codes(mask.numbers, True, "")).tolist())
    return [(value >> 16, value >> 8 & 255, value & 255) for value in sorted(found)]


def colours_of_classes(classes: MaskClasses, masks: Collection[Mask]) -> Tuple[Tuple[int, int, int], ...]:
    """Returns red, green and blue of each class, from the table or from the palettes of masks.

    Each colour is that of the first mask that has the class: in the palettes of others it may mean nothing.

    Args:
        classes: the classes of the masks.
        masks: all masks, in order.

    Returns:
        One colour per class; empty if masks are grey.
    """
    if classes.colours:
        colours = [(value >> 16, value >> 8 & 255, value & 255) for value in classes.values]
        return tuple(colours) if any(len(set(colour)) > 1 for colour in colours) else ()
    values = (0, max(int(mask.numbers.max()) for mask in masks)) if classes.any_other else classes.values
    palettes = [(mask.numbers, mask.form.palette) for mask in masks if mask.form.palette is not None]
    if EVERY_OTHER in values or len(palettes) < len(masks):
        return ()
    found = []
    for value in values:
        known = [(numbers, palette) for numbers, palette in palettes if value < len(palette)]
        if not known:
            return ()
        has_it = (palette for numbers, palette in known if (numbers == value).any())
        found.append(tuple(next(has_it, known[0][1])[value].tolist()))
    return tuple(found) if any(len(set(colour)) > 1 for colour in found) else ()


_Files = Dict[str, Path]


def _sides(
    found: Found, folders: Sequence[Path], subset: str, sides: Tuple[_Files, _Files]
) -> Iterator[Problem]:
    """Adds the images and the masks of a part to ``sides``, by their names without endings.

    Yields:
        A problem for everything else.
    """
    in_one = folders[0] == folders[1]
    for folder, files in zip(folders[:1] if in_one else folders, sides):
        if folder.is_file():  # a volume
            files[""] = folder
            continue
        entries = list_folder(folder) if in_one else ()
        items = (
            item
            for entry in entries
            if is_image_name(entry.name) and entry.is_file()
            for item in images_at(entry, _shown(found, Path(entry.path)), subset)
        )
        extra: List[Path] = []
        for item in items if in_one else images_below(folder, _shown(found, folder), subset):
            if isinstance(item, Problem):
                yield item
                continue
            path = Path(item)
            name = name_in_set(path.with_name(pair_name(path.name)), folder)
            channel = _CHANNEL.fullmatch(name) if found.has_channel_numbers and folder == folders[0] else None
            if channel is not None:
                name = channel[1]
                if int(channel[2]):
                    extra.append(path)
                    continue
            side = sides[1] if in_one and without_mask_ending(name) != name else files
            if name in side:
                text = f"{side[name]} and {path} are both called {printable(name)}"
                yield problem_of(DataError(text, "keep one of them"), subset, _shown(found, path), path)
            side[name] = path
        if extra:
            yield _several_channels(found, extra, folder, subset)


def _several_channels(found: Found, extra: Sequence[Path], folder: Path, subset: str) -> Problem:
    """Returns the problem of images whose channels lie in several files."""
    outside, first = folder.with_name(f"{folder.name}-channels"), printable(extra[0].name)
    error = DataError(
        f"{folder} has images with a channel in each file, for example {first}; a network takes grey or colour ones",
        "join three channels as one colour image with the number 0000, or take the first channel alone: "
        f"mkdir {quoted(outside)} && mv {quoted(folder)}/*_000[1-9].* {quoted(outside)}",
        "wrong-mode",
    )
    return Problem("wrong-mode", subset, _shown(found, extra[0]), "a second channel", error, len(extra))


def read_pairs(found: Found, allow_partial: bool = False) -> Iterator[Union[PairFiles, Problem]]:
    """Yields the files of pairs in the order of names, training first, and a problem for each other image.

    Files whose names are equal but for an ending of the mask, or in Unicode form, are a pair.  An image with several
    masks is in none, because with one of them what the others show would be background.

    Args:
        found: the folders of the pairs.
        allow_partial: whether training goes on without a file that has no partner.
    """
    for subset in ("train", "eval"):
        if subset not in found.parts and not found.is_undivided:
            purpose = "training" if subset == "train" else "evaluation"
            text = f"{found.location} has no pairs of images and masks for {purpose}"
            error = DataError(text, PAIR_LAYOUT + part_alone(found), "missing-subset")
            yield Problem("missing-subset", subset, f"there are no pairs for {subset}", error=error)
    read = {*tables_of(found), *(path for folders in found.parts.values() for path in folders)}
    looked_at: Set[Path] = set()
    for subset, folders in found.parts.items():
        sides: Tuple[_Files, _Files] = ({}, {})
        for path in [path for path in folders if not path.is_dir() and not path.is_file()]:
            text = f"{path.parent} has no {printable(path.name)}"
            hint = PAIR_LAYOUT + (part_alone(found) if subset == "eval" else "")
            error = DataError(text, hint, "missing-file")
            yield Problem("missing-file", subset, _shown(found, path), error=error)
        is_whole = all(path.is_dir() or path.is_file() for path in folders)
        if is_whole:
            name = _shown(found, folders[0])
            yield from guarded(_sides(found, folders, subset, sides), subset, name, folders[0])
        if is_whole and found.is_undivided and not found.has_channel_numbers:
            _check_no_named_parts(found, sides)
        known = read | {path for side in sides for path in side.values()}
        several = _take_several(sides, folders[0] == folders[1])
        files, alone = _matched(*sides)
        ends = None if allow_partial and files else _several_error(found, folders, several, bool(files))
        for path in (path for image, masks in several for path in (image, *masks)):
            yield Problem(
                "several-masks", subset, _shown(found, path), "an image and its several masks", ends
            )
        if is_whole:
            yield from _without_partner(found, subset, folders, alone, bool(files), allow_partial)
        yield from (PairFiles(subset, image, mask) for image, mask in files)
        around = [folder for folder in _around(folders) if folder not in looked_at]
        for beside in around:
            passed = passed_beside(beside, known, subset, found.location)
            yield from guarded(passed, subset, _shown(found, beside), beside)
        looked_at.update(around)
    if not found.is_undivided and found.location not in looked_at:
        used = {path.parent for folders in found.parts.values() for path in folders} | read
        passed = passed_beside(found.location, used, None, found.location)
        yield from guarded(passed, None, ".", found.location)


def _around(folders: Sequence[Path]) -> List[Path]:
    """Returns the folders that have the folders of a part, or that of images and masks together."""
    return [folders[0]] if folders[0] == folders[1] else sorted({path.parent for path in folders})


_PART_BEFORE = re.compile(r"(train(?:ing)?|val(?:id(?:ation)?)?|test(?:ing)?)[A-Z]?(?![a-z])")
"""A part of a set with which the name of a file begins: train_1, testA_1."""


def part_in_name(name: str) -> Optional[str]:
    """Returns the part of a set with which a name begins, as ``part_named`` calls it; or None."""
    begin = _PART_BEFORE.match(name)
    return None if begin is None else part_named(begin[1])


def _check_no_named_parts(found: Found, sides: Tuple[_Files, _Files]) -> None:
    """Refuses pairs all of whose names begin with a part of a set: the last fifth would be other ones than the test's.

    Raises:
        DataError: they do, for training and for evaluation; the hint has the command that makes parts of them.
    """
    parts = {part_in_name(name): name for name in (*sides[0], *sides[1])}
    if None not in parts and {"train"} < {*parts}:
        names = " and ".join(printable(name) for name in list(parts.values())[:2])
        raise DataError(
            f"the names of all pairs in {found.location} begin with a part of a set, such as {names}, and no folders "
            "say the parts",
            f"copy them into parts: {_copied_pairs(found)}",
        )


def _copied_pairs(found: Found, how: str = "pairs") -> str:
    """Returns the command for a hint that copies pairs, see ``sorting.copies_of_set``."""
    target = new_folder(found.location, how)
    return f"{SORTING} {how} {quoted(target)} {quoted(found.location)}; then pass --dataset {quoted(target)}"


def num_held_out(count: int) -> int:
    """Returns how many of ``count`` pairs, the last ones, are for evaluation."""
    return max(1, count // SHARE_HELD_OUT)


def _matched(images: _Files, masks: _Files) -> Tuple[List[Tuple[Path, Path]], Tuple[_Files, _Files]]:
    """Returns the pairs in the order of names, and the images and the masks without a partner."""
    keys, begins = {}, by_beginning(images)
    for name in masks:
        begin = without_mask_ending(name)
        keys[name] = name if name in images else begins.get(begin, begin)
    shared = [key for key, count in Counter(keys.values()).items() if count > 1]
    by_key = {name if key in shared else key: masks[name] for name, key in keys.items()}
    names = sorted(set(images) & set(by_key))
    alone = (
        {name: images[name] for name in sorted(set(images) - set(names))},
        {key: by_key[key] for key in sorted(set(by_key) - set(names))},
    )
    return [(images[name], by_key[name]) for name in names], alone


def _take_several(sides: Tuple[_Files, _Files], in_one: bool) -> List[Tuple[Path, List[Path]]]:
    """Takes the images that have several masks, and these masks, out of the images and masks of a part."""
    images, masks = sides
    begins = by_beginning(images)
    of_each: Dict[str, List[Tuple[_Files, str]]] = {}
    for side in (masks, images) if in_one else (masks,):
        for name in side:
            image = name if side is masks and name in images else image_of_mask(name, begins)
            if image is None and side is masks:
                image = begins.get(name)
            if image is not None:
                of_each.setdefault(image, []).append((side, name))
    several = {image: names for image, names in of_each.items() if len(names) > 1}
    return [
        (images.pop(image), sorted(side.pop(name) for side, name in several[image]))
        for image in sorted(several)
    ]


def masks_of_images(found: Found) -> Iterator[Tuple[str, List[Path]]]:
    """Yields the subset of each image that has masks, and its files: the image and its masks, one or several.

    Raises:
        DataError: a file is neither; training says so, too.
    """
    for subset, folders in found.parts.items():
        sides: Tuple[_Files, _Files] = ({}, {})
        for problem in _sides(found, folders, subset, sides):
            if problem.error is not None:
                raise problem.error
        for image, masks in _take_several(sides, folders[0] == folders[1]):
            yield subset, [image, *masks]
        yield from ((subset, [*pair]) for pair in _matched(*sides)[0])


def _several_error(
    found: Found, folders: Sequence[Path], several: Sequence[Tuple[Path, List[Path]]], has_pairs: bool
) -> Optional[DataError]:
    """Returns the error about images with several masks, with the command that joins them; None without any."""
    if not several:
        return None
    image, masks = several[0]
    names = [_shown(found, path) for path in masks]
    more = f", and {counted(len(several) - 1, 'more image')} with several" if len(several) > 1 else ""
    text = f"{image} has {len(masks)} masks: {_some(names)}{more}; an image has one"
    hint = f"copy the pairs with the masks of each image joined as one, {MAXIMUM}: {_copied_pairs(found)}"
    if has_pairs:
        hint += "; or leave out these images with --allow-partial"
    return DataError(text, hint, "several-masks")


def _without_partner(
    found: Found,
    subset: str,
    folders: Sequence[Path],
    alone: Tuple[_Files, _Files],
    has_pairs: bool,
    allow_partial: bool,
) -> Iterator[Problem]:
    """Yields a problem for each file without a partner, with a new name for a mask that is called like an image."""
    similar: Dict[str, Tuple[List[Path], List[Path]]] = {}
    for side, files in enumerate(alone):
        for name, path in files.items():
            similar.setdefault(_NOT_COMPARED.sub("", name.casefold()), ([], []))[side].append(path)
    renames = {
        mask[0]: f"{_shown(found, mask[0])} to "
        + _shown(found, mask[0].with_name(image[0].stem + mask[0].suffix))
        for image, mask in similar.values()
        if len(image) == len(mask) == 1
    }
    names = [_shown(found, path) for files in alone for path in files.values()]
    hint = f"an image and its mask have one name: rename {_some(list(renames.values()))}" if renames else ""
    text = f"{found.location} has {counted(len(names), 'file')} without a partner: {_some(names)}"
    error = DataError(
        text,
        (hint or "add the missing image or mask") + "; or leave the files out with --allow-partial",
        "unpaired",
    )
    if not has_pairs:
        examples = [_shown(found, path) for files in alone for path in [*files.values()][:1]]
        text = f"no file in {folders[0]} has the name of one in {folders[1]}: for example {' and '.join(examples)}"
        error = NoPairs(text, hint or PAIR_LAYOUT, "unpaired")
    for files in alone:
        for path in files.values():
            reason = f"rename {renames[path]}" if path in renames else "without a partner"
            raised = None if allow_partial and has_pairs else error
            yield Problem("unpaired", subset, _shown(found, path), reason, raised)


def _shown(found: Found, path: Path) -> str:
    return printable(name_in_set(path, found.location))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f", and {len(names) - 3} more" if len(names) > 3 else "")


def read_masks(
    found: Found, files: Sequence[PairFiles], max_pixels: int, table: Optional[MaskClasses]
) -> List[Union[Tuple[Pair, Mask], Problem]]:
    """Returns the mask of each pair, or the problem with it.

    Of a set without parts, the last fifth of them is for evaluation.

    Raises:
        DataError: all masks would take more than half of the memory, if those that follow are as large on average.
    """
    agreeing = MaskSet(table)
    masks: List[Union[Tuple[Pair, Mask], Problem]] = []
    taken = checked = 0

    def checked_mask(page: PairPage) -> Mask:
        mask = mask_numbers(page.page, page.origin, table is not None and table.colours)
        agreeing.check(mask, page.origin)
        return mask

    for number, of_file in enumerate(files):
        for page in pages(of_file, "mask", found.location, max_pixels):
            if isinstance(page, Problem):
                masks.append(page)
                continue
            path, pair = of_file.mask, page.pair
            names = pair.shown(path, found.location), path, pair.shown(path)
            mask = item_or_problem(partial(checked_mask, page), pair.subset, *names)
            masks.append(mask if isinstance(mask, Problem) else (pair, mask))
            if isinstance(mask, Problem):
                continue
            taken += mask.numbers.nbytes
            if taken > checked:  # at the first one and at each doubling, because a check takes time
                # The pages of files that are not open yet are unknown: each has at least one.
                num_unopened = len(files) - number - 1
                num_pairs = len(masks) + pair.num_pages - pair.page - 1 + num_unopened
                least = "at least " if num_unopened else ""
                _check_memory(found, f"{least}{num_pairs}", taken * num_pairs // len(masks), mask)
                checked = 2 * taken
    if found.is_undivided and len(masks) > 1:
        for k in range(len(masks) - num_held_out(len(masks)), len(masks)):
            one = masks[k]
            masks[k] = (
                replace(one, subset="eval")
                if isinstance(one, Problem)
                else (one[0]._replace(subset="eval"), one[1])
            )
    return masks


def _check_memory(found: Found, num_pairs: str, num_bytes: int, largest: Mask) -> None:
    size = "x".join(map(str, largest.numbers.shape[:2]))
    what = f"{printable(str(found.location))} with {num_pairs} images and masks of up to {size} pixels"
    check_memory(num_bytes, what)


def by_image(pairs: Collection[Pair]) -> Iterator[Tuple[PairFiles, List[Pair]]]:
    """Yields the files of pairs, with the pairs of their pages; pairs of one file follow each other."""
    for (image, mask), group in groupby(pairs, key=lambda pair: (pair.image, pair.mask)):
        same = list(group)
        yield PairFiles(same[0].subset, image, mask), same


def _read_images(
    found: Found, masks: Mapping[Pair, Mask], max_pixels: int, report: Callable[[Problem], None]
) -> Tuple[np.ndarray, List[Pair], List[str]]:
    """Reads the images of a set, each as large as its mask.

    Returns:
        uint8 [pixels of all images, 1 or 3], their pairs, and the remarks on them; ``report`` gets the problems of
        those that cannot be read.
    """
    pixels: np.ndarray = np.zeros((0, 1), np.uint8)
    pairs: List[Pair] = []
    remarks: List[str] = []
    at = 0
    for files, same in by_image(masks):
        own = {pair.page: pair for pair in same}
        read = pages(files, "image", found.location, max_pixels, same[0], own)
        for page in readable(read, report):
            pair = own[page.pair.page]
            image = image_pixels(page.page, page.origin, masks[pair])
            if not at:
                largest = max(masks.values(), key=lambda mask: mask.numbers.size)
                shape = sum(mask.numbers.size for mask in masks.values()), image.shape[2]
                # The images, and the classes of masks beside their numbers.
                num_bytes = shape[0] * (shape[1] + 2 * largest.numbers.itemsize)
                _check_memory(found, str(len(masks)), num_bytes, largest)
                pixels = np.empty(shape, np.uint8)
            elif image.shape[2] != pixels.shape[1]:
                kinds = ["grey" if count == 1 else "colour" for count in (image.shape[2], pixels.shape[1])]
                raise DataError(
                    f"{pair.shown(pair.image)} is {kinds[0]}, but {pairs[0].shown(pairs[0].image)} is {kinds[1]}",
                    "all images of a set are grey, or all are colour",
                )
            flat = image.reshape(-1, image.shape[2])
            pixels[at : at + len(flat)] = flat
            at += len(flat)
            pairs.append(pair)
            remarks += remarks_on_page(page.page)
    return pixels[:at], pairs, remarks


def _check_any_left(pairs: Collection[Pair], passed: Passed) -> int:
    """Rejects a set of which no pair of a part is left, and returns the number of pairs for training."""
    num_train = sum(pair.subset == "train" for pair in pairs)
    check_any_left(num_train, len(pairs) - num_train, passed.damaged)
    return num_train


def open_pairs(
    found: Found,
    max_pixels: int = MAX_IMAGE_PIXELS,
    allow_partial: bool = False,
    skip_damaged: bool = False,
) -> DataSource:
    """Reads all pairs of a folder.  Images are grey or colour; ``masks`` describes the masks.

    Args:
        found: the folders of images and of masks, or the volumes of isbi2012.
        max_pixels: the most pixels of an image.
        allow_partial: whether to leave out images without a mask, and masks without an image.
        skip_damaged: whether to leave out pairs of which a file cannot be decoded.

    Raises:
        DataError: there are no pairs, a file has no partner, sizes or numbers of pages differ, a file is damaged or has
            unsupported pixels, values of masks are no classes, or the pairs take more than half of the memory.
    """
    name, folder = found.name, found.location
    passed = Passed(skip_damaged)
    files = list(readable(read_pairs(found, allow_partial), passed))
    for subset, folders in found.parts.items():
        if not any(one.subset == subset for one in files):
            text = f"{folders[0].parent} has no pairs of images and masks"
            raise DataError(with_unused(text, passed.unused), f"{PAIR_LAYOUT}; {READ}")
    table = table_of(found)
    stored = dict(readable(read_masks(found, files, max_pixels, table), passed))
    _check_any_left(stored, passed)
    if len(stored) < 2:
        _read_images(
            found, stored, max_pixels, passed
        )  # raises the better error: an image has more pages than its mask
        raise DataError(
            f"{folder} has one pair; training and evaluation need two", f"add pairs: {PAIR_LAYOUT}"
        )
    classes = table or classes_of_masks(found, stored)
    pixels, pairs, remarks = _read_images(found, stored, max_pixels, passed)
    num_train = _check_any_left(pairs, passed)
    masks = [classes.of(stored[pair].numbers, f"mask {pair.shown(pair.mask)}") for pair in pairs]
    sizes: np.ndarray = np.array([mask.shape for mask in masks], np.int64)
    labels = np.concatenate([mask.reshape(-1) for mask in masks])
    counted_labels = labels if classes.ignored is None else labels[labels != IGNORED]
    if len(mask_values(counted_labels)) < 2:
        only = classes.names[int(counted_labels[0])]
        raise DataError(
            f"the masks of {folder} have one value in all pixels, of {printable(only)}: nothing to learn",
            "mark what is to be found with another value: 0 is the background, 255 or any other the object",
        )
    names = tuple(pair.shown(pair.image, folder) for pair in pairs)
    examples = MaskedExamples(pixels, labels, sizes, names)
    train, held = examples.subset(slice(None, num_train)), examples.subset(slice(num_train, None))
    values = classes.values
    if classes.any_other:
        values = (0, max(int(mask.numbers.max()) for mask in stored.values()))
    warnings = [*unused_line(printable(str(folder)), passed.unused), *left_out_line(passed.damaged, "pair")]
    warnings += remark_lines(remarks, lambda count: counted(count, "image"))
    tables = tables_of(found)
    if tables and tables[0].parent != found.location:
        warnings.append(f"the classes of all parts are those of {' and '.join(map(shown, tables))}")
    elif tables and tables[0].name not in (TABLE, DESCRIPTION):
        warnings.append(
            f"the classes are those of {shown(tables[0])}: {', '.join(map(printable, classes.names))}"
        )
    warnings += notes_on_classes(classes, table is not None)
    warnings += other_values(classes, (stored[pair].numbers for pair in pairs))
    warnings += _inverted_greys(stored[pair] for pair in pairs)
    if classes.ignored is not None:
        share = (labels == IGNORED).mean()
        warnings.append(
            f"{tables[0].name}: {share:.2%} of the masks' pixels are {IGNORE}, and count neither in the loss nor in "
            "any score"
        )
    smallest, largest = (
        "x".join(map(str, min_or_max(sizes.tolist(), key=np.prod))) for min_or_max in (min, max)
    )
    different = (
        f"the images are of {smallest} to {largest} pixels: patches are cut from each, as large as fits into the "
        "smallest height and width unless --image-size says otherwise"
    )
    return data_source(
        train,
        held,
        name=name,
        task="segmentation",
        class_names=classes.names,
        location=str(folder),
        augmentation="elastic",
        warnings=tuple(warnings),
        training_warnings=(different,) if len(np.unique(sizes, axis=0)) > 1 else (),
        unused=passed.unused,
        left_out=passed.left_out,
        decoded=True,
        patchwise=True,
        own_split=found.is_undivided,
        class_colours=colours_of_classes(classes, [stored[pair] for pair in pairs]),
        mask_values=() if classes.colours or EVERY_OTHER in values else values,
    )
