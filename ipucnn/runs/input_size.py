"""Warnings about an input size that nobody chose, if the pictures or the starting weights suggest another one."""

import contextlib
from typing import List, Optional, Tuple

import numpy as np

from ipucnn.config.values import image_size_to_yaml
from ipucnn.datasets.base import EncodedExamples, Examples, FileExamples
from ipucnn.datasets.forms import opened
from ipucnn.datasets.images import crops_of
from ipucnn.errors import DataError
from ipucnn.runs.setup import Setup
from ipucnn.runs.sources import Weights
from ipucnn.text import shown_value

_LOOKED_AT = 16
"""Pictures whose headers are read, evenly spread over the training set: enough to distinguish 32 pixels from 224."""
_MUCH = 2
"""Factor by which an input must be larger than the pictures to cause a warning."""


def size_warnings(setup: Setup, weights: Optional[Weights]) -> List[str]:
    """Returns at most one warning, which names ``--image-size N``; none if the command line gives a size.

    There are two cases.  The weights of ``--weights RUN`` were trained on images of one size and lose accuracy on
    others. A user's own network that takes any size gets 224x224 for class folders, whose pictures may be much smaller.

    Args:
        setup: the run's data and shapes.
        weights: the weights that the run starts from, if any.
    """
    if setup.resolved.origins["image_size"].is_typed or setup.source.info.patchwise:
        return []
    input_size = setup.input_shape[:2]
    shape = None if weights is None else weights.input_shape
    trained = shape and shape[:2]
    if trained is not None and trained != input_size:
        return [
            f"{shown_value(setup.config.weights)} was trained on images of {_text(trained)}, and this run takes "
            f"{_text(input_size)}: --image-size {image_size_to_yaml(trained)} keeps its size"
        ]
    is_open = setup.record.own is not None and None in setup.record.own.input_shape[:2]
    margin = crops_of(setup.source.info.crops).margin
    if trained is None and is_open and setup.config.image_size is None:
        largest = _largest_picture(setup.source.train, setup.config.max_image_pixels)
        if largest is not None and _MUCH * max(largest) <= min(input_size):
            return [
                f"the pictures, of {_text(largest)}, are enlarged to {_text(input_size)}, which takes time and memory: "
                f"with --image-size {max(largest)}, a crop for evaluation enlarges them by {margin:.3g}, and one for "
                "training by more"
            ]
    return []


def _largest_picture(examples: Examples, max_pixels: int) -> Optional[Tuple[int, int]]:
    """Returns (height, width) of the largest of a sample of picture files; None if none can be read."""
    if not isinstance(examples, (FileExamples, EncodedExamples)) or not len(examples):
        return None
    sizes = []
    for index in np.unique(np.linspace(0, len(examples) - 1, _LOOKED_AT).astype(int)):
        position = int(index)
        # An unreadable picture is reported when training reads it.
        with contextlib.suppress(DataError), opened(
            examples.encoded(position), examples.describe(position), max_pixels
        ) as file:
            sizes.append(file.form.size)
    return max(sizes, key=max, default=None)


def _text(size: Tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"
