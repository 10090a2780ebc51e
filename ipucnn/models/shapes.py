"""Which input sizes a network takes and what size its logits have, without TensorFlow."""

from typing import List, Optional, Sequence, Tuple

from ipucnn.errors import ConfigurationError
from ipucnn.models.registry import ModelRecord


def _is_legal(record: ModelRecord, size: int) -> bool:
    return size >= record.min_size and (size - record.size_offset) % record.size_step == 0


def nearest_legal_sizes(record: ModelRecord, size: int) -> List[int]:
    """The legal heights or widths just below and just above ``size`` (``size`` itself if it is legal)."""
    if _is_legal(record, size):
        return [size]
    below = size - (size - record.size_offset) % record.size_step
    above = below + record.size_step
    smallest = record.min_size + (record.size_offset - record.min_size) % record.size_step
    return sorted({max(smallest, candidate) for candidate in (below, above)})


def validate_input_shape(record: ModelRecord, input_shape: Sequence[int]) -> None:
    """Refuses sizes the network can't be built with.

    Args:
        record: the model.
        input_shape: (height, width, channels).

    Raises:
        ConfigurationError: too small, not on the network's size grid, or not three positive numbers.
    """
    if len(input_shape) != 3 or any(int(n) != n or n < 1 for n in input_shape):
        raise ConfigurationError(
            f"{record.name} takes images as height, width, channels, got {tuple(input_shape)}",
            "for example --image-size 32 or --image-size 32x48",
        )
    for axis, size in zip(("height", "width"), input_shape[:2]):
        if _is_legal(record, size):
            continue
        nearest = " or ".join(str(n) for n in nearest_legal_sizes(record, size))
        reason = f"at least {record.min_size}"
        if record.size_step > 1:
            reason += f" and {record.size_offset} more than a multiple of {record.size_step}"
        raise ConfigurationError(
            f"{record.name} can't take images of {axis} {size}: it must be {reason}",
            f"nearest legal {axis}: {nearest} (--image-size)",
        )
    if record.keras_application is not None and input_shape[2] not in (1, 3):
        raise ConfigurationError(
            f"{record.name} takes 1 or 3 channels, got {input_shape[2]}", "convert the images to grey or RGB"
        )


def output_shape(record: ModelRecord, input_shape: Sequence[int]) -> Optional[Tuple[int, int]]:
    """(height, width) of a segmentation network's logits; None for a classifier.

    U-Net's convolutions are not padded: each side of the output is 184 pixels shorter than the input's.
    """
    if record.task != "segmentation":
        return None
    validate_input_shape(record, input_shape)
    margin = int(record.builder_args["margin"])
    return int(input_shape[0]) - margin, int(input_shape[1]) - margin
