"""Walks over the sets for segmentation: ISBI 2012's volumes, and folders of images and masks."""

import contextlib
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple

import numpy as np

from ipucnn.datasets.base import read_file
from ipucnn.datasets.segmentation import imagemasks, isbi2012
from ipucnn.datasets.segmentation.isbi2012 import open_volume, page_name, read_page
from ipucnn.datasets.segmentation.masks import mask_values
from ipucnn.datasets.sources import imagefolder
from ipucnn.datasets.verification.findings import EVAL, TRAIN
from ipucnn.datasets.verification.folders import check_png
from ipucnn.datasets.verification.survey import Survey
from ipucnn.errors import DataError
from ipucnn.filesystem import is_folder
from ipucnn.text import printable


def walk_isbi2012(survey: Survey, folder: Path) -> None:
    survey.class_names = isbi2012.CLASS_NAMES
    paths = {stem: isbi2012.find_volume(folder, stem) for stem in (isbi2012.IMAGES, isbi2012.LABELS)}
    for stem, path in paths.items():
        if path is None:
            survey.find("missing-file", None, f"{stem}.tif")
    label_path, image_path = paths[isbi2012.LABELS], paths[isbi2012.IMAGES]
    masks: List[Tuple[Tuple[int, ...], Any]] = []
    if label_path is not None:
        # Of the labels a bit per pixel is kept; pages of both volumes at once could wait for each other's memory.
        masks = [_packed(mask) for mask in _pages(survey, label_path, "labels", is_mask=True)]
    if image_path is None:
        return
    num_pages = len(masks)
    with contextlib.suppress(DataError), open_volume(image_path, survey.max_pixels) as (_, count):
        num_pages = count
    if masks and num_pages != len(masks):
        survey.find("count-mismatch", None, f"{image_path.name}: {num_pages} slices, {len(masks)} labels")
    held_out = max(1, num_pages // isbi2012.SHARE_HELD_OUT) if num_pages else 0
    survey.expect({TRAIN: num_pages - held_out, EVAL: held_out})
    first_eval = num_pages - held_out
    survey.subsets[TRAIN].name_of = lambda number: f"{image_path.name}, page {number + 1}"
    survey.subsets[EVAL].name_of = lambda number: f"{image_path.name}, page {first_eval + number + 1}"
    for page, image in enumerate(_pages(survey, image_path, "images", is_mask=False)):
        subset, number = (TRAIN, page) if page < first_eval else (EVAL, page - first_eval)
        if not survey.subsets[subset].is_chosen(number):
            continue
        size, bits = masks[page] if page < len(masks) else ((), None)
        if image is None or bits is None:
            survey.passed(subset)
            continue
        if image.shape != size:
            survey.find(
                "wrong-shape", subset, f"page {page + 1}: {_size(image.shape)}, its labels {_size(size)}"
            )
            survey.passed(subset)
            continue
        mask = np.unpackbits(bits)[: image.size].reshape(image.shape)
        survey.add_mask(subset, number, image[..., np.newaxis], mask)
    survey.odd_ones("size of images", "wrong-shape")


def _packed(mask: Any) -> Tuple[Tuple[int, ...], Any]:
    return ((), None) if mask is None else (mask.shape, np.packbits(mask != 0))


def _pages(survey: Survey, path: Path, what: str, is_mask: bool) -> Iterator[Any]:
    """uint8 [h, w] of each page of a volume, None for one that cannot be read; what is wrong is noted."""
    other: Optional[int] = None
    with survey.noting(None, path.name, path), open_volume(path, survey.max_pixels) as (volume, count):
        for page in range(count):
            name, pixels = f"{path.name}, page {page + 1}", None
            try:
                pixels = read_page(volume, page, page_name(path, page, count), None, survey.max_pixels)
            except DataError as error:
                survey.note_error(None, name, error, said=page_name(path, page, count))
            if pixels is not None and not is_mask:
                survey.tally(f"size of {what}", _size(pixels.shape), TRAIN, name)
            if pixels is not None and is_mask:
                other = _check_mask(survey, None, name, pixels, other)
            yield pixels


def _check_mask(
    survey: Survey, subset: Optional[str], name: str, mask: Any, other: Optional[int]
) -> Optional[int]:
    """Notes a mask of other values than 0 and ``other``; gives the value that later masks must have."""
    values = [value for value in mask_values(mask) if value]
    if other is None and len(values) == 1:
        other = values[0]
    if values and values != [other]:
        several = len(values) > 1 or other is None
        text = ", ".join(map(str, values[:5])) + (", ..." if len(values) > 5 else "")
        survey.find(
            "mask-values", subset, f"{name}: {text}" + ("" if several else f" where others have {other}")
        )
    return other


def _size(shape: Iterable[int]) -> str:
    return "x".join(str(side) for side in shape) or "unreadable"


def walk_imagemasks(survey: Survey, folder: Path) -> None:
    survey.class_names = imagemasks.CLASS_NAMES
    places: Dict[str, Path] = {}
    whole = any(is_folder(folder / below) for below in ("images", "masks"))
    evaluation = imagefolder.find_eval(folder)
    if whole:
        places = {TRAIN: folder}
    else:
        places = {TRAIN: folder / "train"} if is_folder(folder / "train") else {}
        if evaluation is not None:
            places[EVAL] = evaluation
    pairs: Dict[str, List[Tuple[Path, Path]]] = {TRAIN: [], EVAL: []}
    for subset, place in places.items():
        pairs[subset] = _pairs(survey, subset, place)
    if whole and len(pairs[TRAIN]) > 1:
        held_out = max(1, len(pairs[TRAIN]) // isbi2012.SHARE_HELD_OUT)
        pairs = {TRAIN: pairs[TRAIN][:-held_out], EVAL: pairs[TRAIN][-held_out:]}
    survey.expect({subset: len(found) for subset, found in pairs.items()})
    other: Optional[int] = None
    for subset, found in pairs.items():
        names = [_below(image, folder) for image, _ in found]
        survey.subsets[subset].name_of = names.__getitem__
        for number, (image_path, mask_path) in enumerate(found):
            if not survey.subsets[subset].is_chosen(number):
                continue
            image = mask = None
            with survey.noting(subset, names[number], image_path):
                check_png(read_file(str(image_path)), f"image {image_path}")
                image = imagemasks.read_image(image_path, survey.max_pixels)
                survey.tally("size", _size(image.shape), subset, names[number])
            mask_name = _below(mask_path, folder)
            with survey.noting(subset, mask_name, mask_path):
                check_png(read_file(str(mask_path)), f"mask {mask_path}")
                mask = imagemasks.read_mask(mask_path, survey.max_pixels)
                other = _check_mask(survey, subset, mask_name, mask, other)
            if image is None or mask is None:
                survey.passed(subset)
            elif image.shape != mask.shape:
                survey.find(
                    "wrong-shape",
                    subset,
                    f"{names[number]}: {_size(image.shape)}, its mask {_size(mask.shape)}",
                )
                survey.passed(subset)
            else:
                survey.add_mask(subset, number, image[..., np.newaxis], (mask != 0).astype(np.uint8))
    survey.odd_ones("size", "wrong-shape")


def _pairs(survey: Survey, subset: str, place: Path) -> List[Tuple[Path, Path]]:
    """Images with their masks in the order of names; what has no partner is noted."""
    found: List[Dict[str, Path]] = []
    for below in ("images", "masks"):
        files: Dict[str, Path] = {}
        with survey.noting(subset, below, place / below):
            if not is_folder(place / below):
                survey.find("missing-file", subset, f"the folder {below}")
            files = imagemasks.files_by_name(place / below, below == "masks")
        found.append(files)
    images, masks = found
    for what, alone in (("images", set(images) - set(masks)), ("masks", set(masks) - set(images))):
        for stem in sorted(alone):
            path = (images if what == "images" else masks)[stem]
            survey.find("unpaired", subset, f"{what}/{path.name}")
    return [(images[stem], masks[stem]) for stem in sorted(set(images) & set(masks))]


def _below(path: Path, folder: Path) -> str:
    return printable(str(path.relative_to(folder)))
