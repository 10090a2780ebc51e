"""Small data sets of every kind in their original files, with images of noise."""

import gzip
import io
import itertools
import pickle
import struct
from pathlib import Path

import numpy as np
from PIL import Image

from ipucnn.datasets.registry import choose_dataset, open_dataset
from ipucnn.datasets.segmentation import imagemasks
from ipucnn.datasets.sources import cifar, imagefolder
from ipucnn.datasets.verification import verify
from ipucnn.datasets.verification.findings import ERROR
from ipucnn.events import View, show


def noise(seed, *shape):
    """Returns uint8 noise of a shape."""
    return np.random.RandomState(seed).randint(0, 256, shape).astype(np.uint8)


def encode(image, form="PNG", **options):
    """Returns the bytes of an image file, from uint8 [h, w], [h, w, 3] or a Pillow image."""
    buffer = io.BytesIO()
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(buffer, form, **options)
    return buffer.getvalue()


def smooth(seed, width, height):
    """Returns a Pillow image with gradients of brightness, as photographs have them."""
    return Image.fromarray(noise(seed, 4, 5, 3)).resize((width, height), Image.BICUBIC)


def idx_bytes(array, kind=8):
    return struct.pack(f">I{array.ndim}I", (kind << 8) + array.ndim, *array.shape) + array.tobytes()


def write_mnist(folder, counts=(20, 10), compress=True):
    """Writes the four idx files; returns images [n, 28, 28] and labels by "train" and "eval"."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for seed, (part, stem, count) in enumerate(zip(("train", "eval"), ("train", "t10k"), counts)):
        written[part] = noise(seed, count, 28, 28), (np.arange(count) % 10).astype(np.uint8)
        for name, array in zip((f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte"), written[part]):
            data = idx_bytes(array)
            (folder / (name + ".gz" if compress else name)).write_bytes(
                gzip.compress(data) if compress else data
            )
    return written


def cifar_arrays(num, num_classes=10, seed=0):
    """Returns uint8 [n, 32, 32, 3] and labels [n]."""
    return noise(seed, num, 32, 32, 3), (np.arange(num) + 8 * seed) % num_classes


def planes(images):
    """Returns uint8 [n, 3072] in the order of CIFAR's files: red, green, blue."""
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2).reshape(len(images), -1))


def write_cifar10(folder, batches=(1, 2), num=6, num_test=5, binary=False):
    """Writes the files of CIFAR-10; batch n has the arrays of seed n, and the test batch those of seed 9."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in [*((n, f"data_batch_{n}") for n in batches), (9, "test_batch")]:
        images, labels = cifar_arrays(num_test if name == "test_batch" else num, seed=seed)
        if binary:
            rows = np.hstack([labels[:, np.newaxis].astype(np.uint8), planes(images)])
            (folder / f"{name}.bin").write_bytes(rows.tobytes())
        else:
            content = {"data": planes(images), "labels": labels.tolist()}
            (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    names = list(cifar.CIFAR10_CLASSES)
    if binary:
        (folder / "batches.meta.txt").write_text("\n".join(names))
    else:
        (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}, protocol=2))


def write_class_folders(folder, counts, size=lambda number: (30, 20), form="PNG", ending="png"):
    """Writes images of noise as ``PART/CLASS/K.png``, by counts of (part, class); ``size(K)`` is (width, height)."""
    number = 0
    for (part, name), count in counts.items():
        (folder / part / name).mkdir(parents=True)
        for k in range(count):
            width, height = size(number)
            path = folder / part / name / f"{k}.{ending}"
            path.write_bytes(encode(noise(number, height, width, 3), form))
            number += 1


def save_pages(path, pages, **options):
    """Writes a TIFF file of pages, which are arrays or Pillow images."""
    images = [page if isinstance(page, Image.Image) else Image.fromarray(page) for page in pages]
    images[0].save(path, save_all=True, append_images=images[1:], **options)


def verified(name, path, view=View(), **options):
    """Verifies a data set; returns the codes of its errors and of its warnings, and the whole report."""
    report = show(verify.verify(verify.choose(str(name), Path(path)), **options), view)
    errors = {finding.code for finding in report.findings if finding.severity == ERROR}
    return errors, {finding.code for finding in report.findings} - errors, report


def write_pairs(folder, pairs, ending="png", numbers=None):
    """Writes pairs of an image and a mask as ``images/K.png`` and ``masks/K.png``; returns the folder.

    Args:
        pairs: two arrays or Pillow images each.
        ending: of the images.
        numbers: their numbers K; None: from 0.
    """
    for k, pair in zip(numbers or itertools.count(), pairs):
        for part, end, pixels in zip(("images", "masks"), (ending, "png"), pair):
            (folder / part).mkdir(parents=True, exist_ok=True)
            image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
            image.save(folder / part / f"{k}.{end}")
    return folder


def open_pairs(name, folder, **options):
    """Opens a set of images and masks in a folder itself."""
    choice = choose_dataset(name, folder, home="", task="segmentation")
    return imagemasks.open_pairs(choice.files, **options)


def open_set(name, folder):
    """Opens the classification set of a name in a folder."""
    return open_dataset(choose_dataset(name, folder, home=name, task="classification"))


def open_imagefolder(folder, **options):
    """Opens class folders, in parts or alone, in a folder itself."""
    choice = choose_dataset("imagefolder", folder, home="", task="classification")
    return imagefolder.open_imagefolder(choice.files, **options)
