"""What a segmentation network made of a few evaluation images, for a picture to look at."""

from dataclasses import dataclass
from typing import Any, List, Optional, Tuple

import numpy as np

from ipucnn.datasets.base import ArrayExamples

NUM_PICTURES = 3


@dataclass(frozen=True)
class Picture:
    """One image, its mask and its prediction, all of the pixels that are predicted.

    Attributes:
        number: of the image in the evaluation set, from 0.
        image: uint8 [h, w] or [h, w, 3].
        truth, predicted: uint8 [h, w] of classes.
        whole: (height, width) of what the network sees, where the picture is the centre of that.
    """

    number: int
    image: Any
    truth: Any
    predicted: Any
    whole: Optional[Tuple[int, int]] = None


def predicted_pictures(setup: Any, session: Any, count: int = NUM_PICTURES) -> List[Picture]:
    """Pictures of the first, the last and evenly spaced evaluation images in between; none of images in files.

    Args:
        setup: of the run.
        session: ready to predict.
    """
    examples = setup.source.eval
    if not isinstance(examples, ArrayExamples):
        return []
    spread = np.linspace(0, len(examples) - 1, min(count, len(examples)))
    return [_picture(setup, session, round(float(number))) for number in spread]


def _picture(setup: Any, session: Any, number: int) -> Picture:
    from ipucnn.datasets.pipeline import eval_batches
    from ipucnn.datasets.preprocessing import crop_centre, prepare_size
    from ipucnn.datasets.tiles import stitch

    one = setup.source.eval.subset([number])
    batches = eval_batches(
        one,
        setup.source.info,
        batch_size=1,
        input_shape=setup.input_shape,
        input_range=setup.record.input_range,
        output_shape=setup.output_shape,
        tile_step=setup.record.size_step,
    )
    tiles, truths = [], []
    for images, labels, _ in batches:
        tiles.append(session.predict([images])[0][0].argmax(axis=-1).astype(np.uint8))
        truths.append(labels.numpy()[0])
    if setup.source.info.tiled:
        size = one.images.shape[1:3]
        predicted = stitch(tiles, size, setup.record.size_step)
        return Picture(number, _displayed(one.images[0]), one.labels[0], predicted)
    sized = np.clip(np.round(prepare_size(one.images, setup.input_shape).numpy()), 0, 255).astype(np.uint8)
    image = crop_centre(sized, *setup.output_shape)[0]
    height, width = setup.input_shape[:2]
    whole = None if image.shape[:2] == (height, width) else (height, width)
    return Picture(number, _displayed(image), truths[0].astype(np.uint8), tiles[0], whole)


def _displayed(image: Any) -> Any:
    """[h, w] of grey, [h, w, 3] of colour."""
    return image[..., 0] if image.shape[-1] == 1 else image[..., :3]
