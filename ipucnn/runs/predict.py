"""Predicts with the exported network beside this file: python predict.py IMAGE.

For a network of classes it prints the class; for one of masks it writes the mask beside IMAGE, as IMAGE-mask.png, or
those of a stack as IMAGE-mask.tif.  It replaces only masks that it or ``ipucnn infer`` wrote.  It needs NumPy, Pillow
and the network's runtime.  ``input.json`` says how an image becomes the network's input, and ``export.json`` what the
network's outputs are.  Other programs import ``network_input`` and ``network``.

ipucnn writes this file into every export, and verifies an export with its ``network_input``.
"""

import json
import sys
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple
from xml.etree import ElementTree

import numpy as np
from PIL import Image, ImageOps, PngImagePlugin, UnidentifiedImageError

FOLDER = Path(__file__).resolve().parent
SOFTWARE = "ipucnn"
ENDINGS = (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".gif", ".webp", ".tif", ".tiff")


class NotRead(ValueError):
    """The form of a file is none that this script reads."""


def described(name: str) -> Any:
    """Returns the content of a JSON file of the export."""
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


@contextmanager
def decoding(path: str) -> Iterator[None]:
    """Turns what Pillow raises for a file that it cannot open or decode into :class:`NotRead`."""
    try:
        yield
    except (NotRead, MemoryError):
        raise
    except Exception as error:  # Pillow raises nearly any type for such files
        if getattr(error, "errno", None) is not None:  # no file, or no permission to read it
            raise
        reason = "it is in no form that Pillow reads" if isinstance(error, UnidentifiedImageError) else error
        raise NotRead(f"{path} cannot be decoded: {reason}; save it as PNG of 8 bits") from error


def pages_of(path: str) -> np.ndarray:
    """Returns the pages of each image of a file [images, channels]: three where channels lie one behind another.

    The descriptions of ImageJ and OME say so, in TIFF; a file of another format has one image.
    """
    with decoding(path), Image.open(path) as file:
        image: Any = file
        is_tiff = image.format == "TIFF"
        count, about = (image.n_frames, str(image.tag_v2.get(270, ""))) if is_tiff else (1, "")
    order, sizes = "CZT", {"C": 1, "Z": count, "T": 1}
    if about.startswith("ImageJ="):
        keys = dict(line.split("=", 1) for line in about.splitlines() if "=" in line)
        channels = int(keys.get("channels", 1))
        sizes.update(C=channels, Z=int(keys.get("images", 1)) // channels)
    elif "<OME" in about:
        pixels = next(node for node in ElementTree.fromstring(about).iter() if node.tag.endswith("Pixels"))
        order = pixels.attrib["DimensionOrder"][2:]
        sizes = {axis: int(pixels.attrib[f"Size{axis}"]) for axis in order}
        if sizes["C"] == 3 and image.mode == "RGB":
            sizes["C"] = 1
    total = sizes["C"] * sizes["Z"] * sizes["T"]
    if total != count or sizes["C"] not in (1, 3):
        raise NotRead(
            f"{path}: {count} pages for {total} images, {sizes['C']} of them channels, are not read"
        )
    # The first axis of the order changes fastest.
    pages = np.arange(count).reshape([sizes[axis] for axis in reversed(order)])
    return np.moveaxis(pages, 2 - order.index("C"), -1).reshape(-1, sizes["C"])


def opened(path: str, page: int = 0) -> Any:
    """Returns the upright Pillow image of a file or, for TIFF, one of its images."""
    with decoding(path):
        planes = [opened_page(path, number) for number in pages_of(path)[page].tolist()]
    if len(planes) == 1:
        return planes[0]
    if {plane.mode for plane in planes} != {"L"}:
        raise NotRead(f"{path}: channels of this form are not read; save them as 8 bits")
    return Image.merge("RGB", planes)


def opened_page(path: str, page: int) -> Any:
    """Returns the upright Pillow image of a page of a file."""
    with Image.open(path) as file:
        return upright(file, path, page)


def upright(image: Any, path: str, page: int) -> Any:
    """Returns a page of an open file as an upright image."""
    is_read = image.format in ("JPEG", "MPO", "PNG", "BMP", "GIF", "WEBP")
    if image.format == "GIF":  # the first frame may be smaller than the image
        is_read = image.tile[0][1] == (0, 0, *image.size)
    if image.format == "BMP":
        with open(path, "rb") as file:
            head = file.read(34)
        # Pillow takes pixels of 4 and 8 bits for single ones if there are two colours, and versions differ otherwise.
        is_read = image.mode != "1" or head[28:30] == b"\1\0"
        is_read = is_read and head[30:34] in (bytes(4), b"\3\0\0\0")
    if image.format == "WEBP":
        is_read = image.n_frames == 1
    if image.format == "PNG":
        with open(path, "rb") as file:
            depth, colour = file.read(26)[24:]
        has_plain_key = "transparency" not in image.info or colour == 3 or depth == 8
        is_read = has_plain_key and (depth <= 8 or colour == 0)
    if image.format == "TIFF":
        image.seek(page)
        tags = image.tag_v2
        form = image.mode, tags.get(262), max(tags.get(258, (1,))), max(tags.get(339, (1,)))
        is_read = form in (
            ("1", 1, 1, 1),
            ("L", 1, 8, 1),
            ("RGB", 2, 8, 1),
            ("I;16", 1, 16, 1),
            ("I;16B", 1, 16, 1),
        ) and (tags.get(274, 1), tags.get(284, 1), tags.get(254, 0) & 1, 338 in tags) == (1, 1, 0, False)
        # GDAL's number of pixels without data counts where pixels are stretched.
        is_read = is_read and not (42113 in tags and image.mode.startswith("I"))
    if not is_read:
        raise NotRead(f"{path}: {image.format} of this form is not read; save it as PNG of 8 bits")
    image.load()
    return ImageOps.exif_transpose(image)


def stretched(image: Any) -> Any:
    """Returns a grey image of 16 bits stretched to 8, the darkest and brightest thousandth cut off; others as is."""
    if image.mode[0] != "I":
        return image
    values = np.asarray(image, float)
    cut = (values.size - 1) // 1000
    low, dark, bright, high = np.sort(values, None)[[0, cut, -1 - cut, -1]]
    dark, bright = (low, high) if dark == bright else (dark, bright)
    values = (np.clip(values, dark, bright) - dark) * 255 / max(bright - dark, 1e-300)
    return Image.fromarray(np.uint8(values + 0.5))


@lru_cache(maxsize=1)
def mirrored_pixels(path: str, page: int, mode: str, size: Tuple[int, int], margin: Tuple[int, int]) -> Any:
    """Returns the pixels of an image, mirrored at its borders; those of the last image are kept."""
    image = opened(path, page)
    kinds = ("1", "L", "I", "I;16", "I;16B") if mode == "L" else ("RGB",)
    if image.mode not in kinds or "transparency" in image.info:
        kind = "grey" if mode == "L" else "RGB"
        raise NotRead(f"{path}: the network takes {kind} images without transparency")
    image = stretched(image)
    pixels = np.asarray(image.convert(mode), np.float32).reshape(image.height, image.width, -1)
    return np.pad(pixels, ((margin[0], size[0]), (margin[1], size[1]), (0, 0)), "reflect")


def cropped_pixels(path: str, mode: str, crop: Dict[str, Any]) -> Any:
    """Returns the centre of an image in the crop's size; transparent parts are white."""
    image = stretched(opened(path))
    if image.mode[-1] == "A" or image.mode == "P" or "transparency" in image.info:
        image = image.convert("RGBA")
        if image.getextrema()[3][1] == 0:
            raise NotRead(f"{path} is transparent everywhere: it would be white")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert(mode)
    height, width = crop["size"]
    scale = min(image.width / width, image.height / height) / crop["margin"]
    x, y, dx, dy = image.width / 2, image.height / 2, width * scale / 2, height * scale / 2
    image = image.resize((width, height), Image.BILINEAR, (x - dx, y - dy, x + dx, y + dy))
    return np.asarray(image, np.float32).reshape(height, width, -1)


def resized(pixels: Any, size: Tuple[int, int], antialias: bool) -> Any:
    """Returns unrounded pixels in another size."""
    if antialias:
        planes = [Image.fromarray(pixels[..., k]) for k in range(pixels.shape[2])]
        return np.stack([plane.resize((size[1], size[0]), Image.BILINEAR) for plane in planes], -1)
    # positions in 32 bits, as in TensorFlow's ResizeBilinear (half_pixel_centers)
    for axis in (0, 1):
        old, half = pixels.shape[axis], np.float32(0.5)
        place = (np.arange(size[axis], dtype=np.float32) + half) * np.float32(old / size[axis]) - half
        low = np.floor(place)
        below, above = (np.take(pixels, np.int64(k).clip(0, old - 1), axis) for k in (low, low + 1))
        pixels = below + (above - below) * (place - low).reshape((-1, 1, 1) if axis == 0 else (-1, 1))
    return pixels


def network_input(
    path: str, row: int = 0, column: int = 0, page: int = 0, form: Optional[Dict[str, Any]] = None
) -> np.ndarray:
    """Returns the network's input of an image file: [height, width, channels].

    Args:
        row, column: the first pixel that is predicted, for a network that sees patches.
        page: the image of a TIFF file that has several, from 0.
        form: the content of ``input.json``; None reads the file beside this script.
    """
    form = form or described("input.json")
    return in_range(network_pixels(path, row, column, page, form), form)


def network_pixels(path: str, row: int, column: int, page: int, form: Dict[str, Any]) -> Any:
    """Returns the pixels of 0..255 that :func:`in_range` makes the network's input of: [height, width, channels]."""
    (height, width), mode, patch = form["shape"][1:3], form["decode"]["mode"], form["patch"]
    if patch is not None:
        pixels = mirrored_pixels(path, page, mode, (height, width), tuple(patch["margin"]))
        pixels = pixels[row : row + height, column : column + width]
    else:
        pixels = cropped_pixels(path, mode, form["crop"])
    if form["resize"] is not None:
        pixels = resized(pixels, (height, width), form["resize"]["antialias"])
    if form["luma"] is not None:
        pixels = (pixels * np.float32(form["luma"])).sum(-1, keepdims=True)
    elif form["repeat_channels"] > 1:
        pixels = np.repeat(pixels, form["repeat_channels"], -1)
    is_rounded = form.get("rounded") or form["dtype"] == "uint8"  # earlier versions wrote no "rounded"
    return np.rint(np.clip(pixels, 0, 255)) if is_rounded else pixels


def in_range(pixels: Any, form: Dict[str, Any]) -> np.ndarray:
    """Brings float32 pixels of 0..255 into the network's range and type."""
    if form["reverse_channels"]:
        pixels = pixels[..., ::-1]
    formula = form["formula"]
    if formula is not None:
        pixels = (pixels * formula["scale"] - np.array(formula["offsets"])) * np.array(formula["factors"])
    elif form["per_image"]:
        pixels = np.asarray(pixels, float) - np.mean(pixels, dtype=float)
        pixels = pixels / (pixels.std() or 1)
    return np.asarray(pixels, form["dtype"])


def network(record: Dict[str, Any], threads: int = 0) -> Callable[[np.ndarray], np.ndarray]:
    """Loads the network of ``export.json``; returns the function from images [batch, ...] to its outputs.

    Args:
        threads: threads of onnxruntime and TensorFlow Lite; 0 for their own choice.
    """
    file, name, output = str(FOLDER / record["file"]), record["input"]["name"], record["output"]["name"]
    if record["format"] == "onnx":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        return _in_batches(record, lambda images: session.run([output], {name: images})[0])
    if record["format"] == "keras":
        from tensorflow import keras

        model = keras.models.load_model(file, compile=False)
        return _in_batches(record, lambda images: np.asarray(model(images, training=False)))
    if record["format"] == "saved-model":
        import tensorflow as tf

        loaded = tf.saved_model.load(file)
        signature = loaded.signatures["serving_default"]
        return _in_batches(
            record, lambda images: loaded and signature(**{name: tf.constant(images)})[output].numpy()
        )
    if record["format"] != "tflite":
        raise ValueError(f"the format {record['format']} runs in the Poplar SDK alone")
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError:
        from tensorflow import lite

        Interpreter = lite.Interpreter
    runner = Interpreter(file, num_threads=threads or None).get_signature_runner("serving_default")
    return _in_batches(record, lambda images: runner(**{name: images})[output])


def _in_batches(
    record: Dict[str, Any], run: Callable[[np.ndarray], np.ndarray]
) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that fills the last of the network's batches, if they have one size, with zeros."""
    batch = record["input"]["shape"][0]

    def outputs(images: np.ndarray) -> np.ndarray:
        missing = 0 if batch is None else -len(images) % batch
        filled = np.concatenate([images, np.zeros((missing, *images.shape[1:]), images.dtype)])
        size = batch or len(filled)
        parts = [run(filled[first : first + size]) for first in range(0, len(filled), size)]
        return np.concatenate(parts)[: len(images)]

    return outputs


def predicted_mask(
    path: str, run: Callable[[np.ndarray], np.ndarray], record: Dict[str, Any], page: int = 0
) -> np.ndarray:
    """Returns the mask of an image of any size: values [height, width], or colours [height, width, 3]."""
    (height, width), step = (
        record["input"]["patch"]["output"],
        record["input"]["patch"]["first_at_multiples_of"],
    )
    stored = np.array(record["mask"]["values"], record["mask"]["dtype"])
    image = opened(path, page)
    mask = np.zeros((image.height, image.width, *stored.shape[1:]), stored.dtype)

    def starts(size: int, patch: int) -> range:
        stride = patch // step * step or patch
        return range(0, max(size - patch, 0) + stride, stride)

    for row in starts(image.height, height):
        for column in starts(image.width, width):
            scores = run(network_input(path, row, column, page, record["input"])[np.newaxis])[0]
            part = mask[row : row + height, column : column + width]
            part[:] = stored[_classes(scores, record)][: part.shape[0], : part.shape[1]]
    return mask


def _classes(scores: np.ndarray, record: Dict[str, Any]) -> np.ndarray:
    """Returns the classes of a patch, as ``ipucnn infer`` chooses them."""
    if record["threshold"] is None:
        return np.asarray(scores.argmax(-1))
    if record["output"]["name"] == "probabilities":
        share = scores[..., 1]
    else:
        share = 1 / (1 + np.exp(scores[..., 0].astype(float) - scores[..., 1]))
    return np.uint8(np.float32(share) > record["threshold"])


def was_written(path: Path) -> bool:
    """Returns whether this script or ``ipucnn infer`` wrote a picture."""
    try:
        with Image.open(path) as image:
            return SOFTWARE in (image.info.get("Software"), getattr(image, "tag_v2", {}).get(305))
    except OSError:
        return False


def mask_path(path: str, ending: str) -> Path:
    """Returns the path of an image's mask; it keeps the image's ending if another image differs in nothing else."""
    image = Path(path)
    stems = [
        other.stem.lower() for other in image.absolute().parent.iterdir() if other.suffix.lower() in ENDINGS
    ]
    name = image.name if stems.count(image.stem.lower()) > 1 else image.stem
    target = image.with_name(f"{name}-mask{ending}")
    if target.exists() and not was_written(target):
        raise FileExistsError(
            f"{target} does not say that ipucnn wrote it, and would be replaced: move it away"
        )
    return target


def main(path: str) -> None:
    """Prints the class of an image, or writes its mask."""
    record = described("export.json")
    run = network(record)
    if record["input"]["patch"] is None:
        scores = run(network_input(path, form=record["input"])[np.newaxis])[0]
        print(described("labels.json")[scores.argmax()])
        with Image.open(path) as image:
            count = len(pages_of(path)) if image.format == "TIFF" else getattr(image, "n_frames", 1)
        if count > 1 and image.format != "MPO":
            print(f"{path} has several pages or frames: the first is used", file=sys.stderr)
        return
    masks: List[Any] = []
    count = len(pages_of(path))
    target = mask_path(path, ".png" if count == 1 else ".tif")
    for page in range(count):
        masks.append(Image.fromarray(predicted_mask(path, run, record, page)))
        if record["mask"]["palette"] is not None:
            masks[-1].putpalette(record["mask"]["palette"])
    text = PngImagePlugin.PngInfo()
    text.add_text("Software", SOFTWARE)
    more = {} if count == 1 else {"save_all": True, "append_images": masks[1:]}
    masks[0].save(target, pnginfo=text, software=SOFTWARE, **more)
    print(target)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python predict.py IMAGE")
    try:
        main(sys.argv[1])
    except (NotRead, OSError) as error:
        sys.exit(f"error: {error}")
