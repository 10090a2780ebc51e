"""``imagemasks``: a folder of image and mask pairs, ``DIR/images/NAME.*`` with ``DIR/masks/NAME.*``.

With ``DIR/train`` and ``DIR/val``, each with ``images`` and ``masks``, the parts are the user's; otherwise the
last fifth of the pairs, in the order of their names, is for evaluation.
"""

from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np

from ipucnn.datasets.base import ArrayExamples, DataSource, array_source, read_file
from ipucnn.datasets.images import opened
from ipucnn.datasets.limits import MAX_IMAGE_PIXELS, check_memory
from ipucnn.datasets.segmentation.isbi2012 import SHARE_HELD_OUT
from ipucnn.datasets.segmentation.masks import as_grey, mask_values, pixels_of, to_classes
from ipucnn.datasets.sources.imagefolder import EXTENSIONS, find_eval
from ipucnn.errors import DataError
from ipucnn.filesystem import entries, is_file, is_folder
from ipucnn.text import counted, printable

LAYOUT = "expected DIR/images/NAME.png and DIR/masks/NAME.png, or both in DIR/train and DIR/val"
CLASS_NAMES = ("background", "foreground")
IMAGE_HINT = "save it as 8-bit grey: PNG, TIFF or JPEG"
_MASK_ENDINGS = ("_mask", "-mask", "_label", "-label")


def has_pairs(folder: Path) -> bool:
    return is_folder(folder / "images") and is_folder(folder / "masks")


def is_imagemasks(folder: Path) -> bool:
    """Whether a folder is laid out as pairs of images and masks."""
    return has_pairs(folder) or has_pairs(folder / "train")


def files_by_name(folder: Path, is_mask: bool) -> Dict[str, Path]:
    """The image files of a folder by the name that pairs them."""
    found: Dict[str, Path] = {}
    for path in entries(folder):
        if path.name.startswith(".") or path.suffix.lower() not in EXTENSIONS or not is_file(path):
            continue
        stem = path.stem
        if is_mask:
            stem = next((stem[: -len(end)] for end in _MASK_ENDINGS if stem.endswith(end)), stem)
        if stem in found:
            raise DataError(f"{found[stem]} and {path} are both called {stem}", "keep one of them")
        found[stem] = path
    return found


def read_image(path: Path, max_pixels: int) -> Any:
    """uint8 [h, w].  As ``infer`` reads images: colour, more bits and several pages are refused."""
    origin = f"image {printable(str(path))}"
    with opened(read_file(str(path)), origin, max_pixels, IMAGE_HINT) as image:
        image.load()
        count, page = int(getattr(image, "n_frames", 1)), as_grey(image)
        pixels = np.array(page)
    if page.mode != "L":
        raise DataError(f"{origin} has {pixels_of(page.mode)}; images must be 8-bit grey", IMAGE_HINT)
    if count > 1:
        raise DataError(f"{origin} has {count} pages", "save each page as an image of its own")
    return pixels


def read_mask(path: Path, max_pixels: int) -> Any:
    """uint8 [h, w]; a colour or 16-bit mask is refused, for it would not keep its two values."""
    origin, hint = f"mask {printable(str(path))}", "masks are 8-bit grey PNG or TIFF"
    with opened(read_file(str(path)), origin, max_pixels, hint) as image:
        image.load()
        mode, pixels = image.mode, np.array(image)
    if mode not in ("L", "1", "P"):
        raise DataError(f"{origin} has pixels of mode {mode}", hint)
    return pixels.astype(np.uint8) * 255 if pixels.dtype == bool else pixels


def _read_part(folder: Path, max_pixels: int) -> Tuple[Any, Any, List[str]]:
    """Images [n, h, w, 1] and masks [n, h, w] with the values they are stored with, and warnings."""
    images, masks = files_by_name(folder / "images", False), files_by_name(folder / "masks", True)
    names = sorted(set(images) & set(masks))
    if not names:
        raise DataError(f"no file in {folder / 'images'} has the name of one in {folder / 'masks'}", LAYOUT)
    passed_over = []
    for what, alone in (("image", set(images) - set(masks)), ("mask", set(masks) - set(images))):
        if alone:
            some = ", ".join(sorted(alone)[:3]) + (", ..." if len(alone) > 3 else "")
            passed_over.append(f"{folder}: passed over {counted(len(alone), what)} without a partner: {some}")
    pairs: List[Tuple[Any, Any]] = []
    for name in names:
        image, mask = read_image(images[name], max_pixels), read_mask(masks[name], max_pixels)
        if image.shape != mask.shape:
            sizes = ["x".join(map(str, a.shape)) for a in (image, mask)]
            raise DataError(
                f"{images[name]} is {sizes[0]} pixels, but {masks[name]} is {sizes[1]}",
                "an image and its mask have one size",
            )
        if not pairs:
            # All are of this size; they are held twice while they become one array.
            check_memory(
                4 * len(names) * image.size, f"{printable(str(folder))} with {len(names)} such images"
            )
        if pairs and image.shape != pairs[0][0].shape:
            sizes = ["x".join(map(str, a.shape)) for a in (pairs[0][0], image)]
            raise DataError(
                f"{images[name]} is {sizes[1]} pixels, but {images[names[0]]} is {sizes[0]}",
                "all images of a set have one size: cut or pad them",
            )
        to_classes(mask[np.newaxis], f"mask {masks[name]}")
        pairs.append((image, mask))
    return np.stack([p[0] for p in pairs])[..., np.newaxis], np.stack([p[1] for p in pairs]), passed_over


def open_imagemasks(folder: Path, max_pixels: int = MAX_IMAGE_PIXELS) -> DataSource:
    """Reads all pairs.  Images are 8-bit grey; masks have 0 (class 0) and one other value (class 1).

    Raises:
        DataError: no pairs, sizes that differ, a file that is damaged or no 8-bit grey image, a mask of more than two
            values, or more pairs than half of the memory holds.
    """
    own_split = has_pairs(folder)
    if own_split:
        images, masks, passed_over = _read_part(folder, max_pixels)
        if len(images) < 2:
            raise DataError(f"{folder} has one pair; training and evaluation need two", LAYOUT)
        held_out = max(1, len(images) // SHARE_HELD_OUT)
        parts = [(images[:-held_out], masks[:-held_out]), (images[-held_out:], masks[-held_out:])]
    else:
        evaluation = find_eval(folder)
        if not has_pairs(folder / "train") or evaluation is None or not has_pairs(evaluation):
            raise DataError(f"{folder} has no pairs of images and masks", LAYOUT)
        parts, passed_over = [], []
        for part in (folder / "train", evaluation):
            images, masks, found = _read_part(part, max_pixels)
            parts.append((images, masks))
            passed_over += found
        if parts[0][0].shape[1:] != parts[1][0].shape[1:]:
            sizes = ["x".join(map(str, images.shape[1:3])) for images, _ in parts]
            raise DataError(
                f"images of {sizes[0]} pixels in {folder / 'train'}, of {sizes[1]} in {evaluation}",
                "all images of a set have one size: cut or pad them",
            )
    every_mask = np.concatenate([masks for _, masks in parts])
    to_classes(every_mask, f"the masks of {folder}, taken together,")
    if len(mask_values(every_mask)) < 2:
        raise DataError(f"the masks of {folder} have one value in all pixels: nothing to learn", LAYOUT)
    train, held = (ArrayExamples(images, (masks != 0).astype(np.uint8)) for images, masks in parts)
    return array_source(
        train,
        held,
        name="imagemasks",
        task="segmentation",
        class_names=CLASS_NAMES,
        location=str(folder),
        augmentation="elastic",
        warnings=passed_over,
        tiled=True,
        own_split=own_split,
    )
