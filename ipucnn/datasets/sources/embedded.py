"""``digits``: 1,797 real handwritten digits of 8x8 pixels that scikit-learn contains, so that nothing is downloaded.

They are the test part of the UCI Optical Recognition of Handwritten Digits set (Alpaydin and Kaynak, 1998).
"""

import functools
from typing import Tuple

import numpy as np

from ipucnn.datasets.base import ArrayExamples, DataSource, data_source
from ipucnn.datasets.limits import check_memory
from ipucnn.errors import InfeasibleError, MissingError

NUM_HELD_OUT = 360
LOCATION = "embedded (scikit-learn)"


def open_digits() -> DataSource:
    """Returns 1,437 training and 360 evaluation images, with the stored values 0..16 scaled to 0..255."""
    training, evaluation = _digits()
    return data_source(
        training,
        evaluation,
        name="digits",
        class_names=[str(n) for n in range(10)],
        location=LOCATION,
        augmentation="digits",
        own_split=True,
    )


@functools.lru_cache(maxsize=None)
def _digits() -> Tuple[ArrayExamples, ArrayExamples]:
    """Returns the parts, which a suite opens many times.

    The split is scikit-learn's stratified split with seed 0.  It is the same everywhere (a test pins the indices), and
    anyone can repeat it in one line.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise MissingError("data set digits needs scikit-learn", "pip install scikit-learn") from error
    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]
    labels = bunch.target.astype(np.int32)
    split = train_test_split(
        np.arange(len(labels)), test_size=NUM_HELD_OUT, stratify=labels, random_state=0, shuffle=True
    )
    kept, held_out = (ArrayExamples(images[np.sort(part)], labels[np.sort(part)]) for part in split)
    for array in (kept.images, kept.labels, held_out.images, held_out.labels):
        array.flags.writeable = False  # they are shared
    return kept, held_out


# ``random``: noise images with random labels, made on the host to measure throughput.  Nothing can be learned.


NUM_TRAIN, NUM_EVAL = 1024, 256
DEFAULT_SHAPE = (32, 32, 3)


def open_random(
    height: int,
    width: int,
    channels: int,
    num_classes: int,
    task: str = "classification",
    seed: int = 0,
    num_train: int = NUM_TRAIN,
    num_eval: int = NUM_EVAL,
) -> DataSource:
    """Returns training and evaluation images of uniform noise, a pure function of the arguments.

    Labels are uniform over ``num_classes``: int32 per image, or uint8 masks for segmentation.

    Raises:
        InfeasibleError: the noise takes more than half of the free memory.
    """
    random = np.random.RandomState([seed % 2**32, (seed >> 32) % 2**32])
    total = num_train + num_eval
    # Labels take 8 bytes each while they are drawn; those that are kept take 1 byte per pixel, or 4 per image.
    labels_bytes = 9 * height * width if task == "segmentation" else 12
    check_memory(
        total * (height * width * channels + labels_bytes),
        f"noise of {total} images of {height}x{width}x{channels}",
        "use smaller batches or images: the noise is for one weight update at least",
        InfeasibleError,
    )
    images: np.ndarray = np.frombuffer(random.bytes(total * height * width * channels), np.uint8)
    images = images.reshape(total, height, width, channels)
    if task == "segmentation":
        labels = random.randint(0, num_classes, (total, height, width)).astype(np.uint8)
    else:
        labels = random.randint(0, num_classes, total).astype(np.int32)
    return data_source(
        ArrayExamples(images[:num_train], labels[:num_train]),
        ArrayExamples(images[num_train:], labels[num_train:]),
        name="random",
        task=task,
        class_names=[str(n) for n in range(num_classes)],
        location="generated",
        augmentation="dihedral" if task == "segmentation" else "crop_flip",
    )
