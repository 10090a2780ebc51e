"""``digits``: 1,797 real handwritten digits of 8x8 pixels that come with scikit-learn, so no download.

The test part of the UCI Optical Recognition of Handwritten Digits set (Alpaydin and Kaynak, 1998).
"""

import numpy as np

from ipucnn.datasets.base import ArrayExamples, DataSource, array_source
from ipucnn.errors import MissingError

NUM_EVAL = 360
LOCATION = "embedded (scikit-learn)"


def open_digits() -> DataSource:
    """1,437 training and 360 evaluation images, stratified, the stored 0..16 scaled to 0..255.

    The split is scikit-learn's stratified one with its generator seeded by 0: the same everywhere (its test
    pins the indices), and anyone can repeat it in one line.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise MissingError("data set digits needs scikit-learn", "pip install scikit-learn") from error
    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]
    labels = bunch.target.astype(np.int32)
    kept, held_out = (
        np.sort(part)
        for part in train_test_split(
            np.arange(len(labels)), test_size=NUM_EVAL, stratify=labels, random_state=0, shuffle=True
        )
    )
    return array_source(
        ArrayExamples(images[kept], labels[kept]),
        ArrayExamples(images[held_out], labels[held_out]),
        name="digits",
        class_names=[str(n) for n in range(10)],
        location=LOCATION,
        augmentation="digits",
        own_split=True,
    )
