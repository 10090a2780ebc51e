"""A yardstick to print beside a network's accuracy: nearest neighbours on the raw pixels."""

import numpy as np

from ipucnn.datasets.base import ArrayExamples, DataSource
from ipucnn.errors import ConfigurationError


def knn_accuracy(source: DataSource, k: int = 3) -> float:
    """Held-out accuracy in [0, 1] of ``k`` nearest neighbours (Euclidean, raw pixels) on the source's split.

    For small in-memory classification sets: every evaluation image is compared with every training image.
    Raises ConfigurationError for other sets.
    """
    train, evaluation = source.train, source.eval
    if not (
        source.info.task == "classification"
        and isinstance(train, ArrayExamples)
        and isinstance(evaluation, ArrayExamples)
    ):
        raise ConfigurationError(
            f"nearest neighbours need in-memory class labels, which {source.info.name} lacks",
            "choose a data set of images with classes, such as digits",
        )
    from sklearn.neighbors import KNeighborsClassifier

    classifier = KNeighborsClassifier(n_neighbors=min(k, len(train)))
    classifier.fit(train.images.reshape(len(train), -1).astype(np.float32), train.labels)
    predicted = classifier.predict(evaluation.images.reshape(len(evaluation), -1).astype(np.float32))
    return float(np.mean(predicted == evaluation.labels))
