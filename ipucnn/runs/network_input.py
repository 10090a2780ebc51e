"""Describes the input of an exported network for its users, as numbers and in words, and writes the page of an export.

``predict.py``, which every export gets a copy of, prepares images by these numbers.
"""

from typing import Iterator, Optional, Sequence

import numpy as np

from ipucnn.aliases import PlainDict
from ipucnn.config.values import norm_of
from ipucnn.datasets.base import DatasetInfo
from ipucnn.datasets.forms import CUT_THOUSANDTHS
from ipucnn.datasets.images import crop_of_evaluation
from ipucnn.datasets.pixels import LUMA
from ipucnn.runs.images.outputs import MaskForm
from ipucnn.runs.runtimes import FORMATS
from ipucnn.runs.setup import Setup
from ipucnn.text import printable

INPUT, SCRIPT = "input.json", "predict.py"
COST_OF_PATCHES = "scores may fall far; compare both with `ipucnn evaluate`, which has --patch-size"
"""What patches may cost networks with group norm."""


def describe_input(
    setup: Setup, name: str, dtype: str, batch: Optional[int], takes_pixels: bool
) -> PlainDict:
    """Returns ``input.json``: how to prepare an image file for the network.

    Args:
        setup: the network's setup.
        name, dtype: name and type of the exported network's input.
        batch: images of a call; None for any number.
        takes_pixels: whether the network takes pixels of 0..255 and normalises them itself.
    """
    info, (height, width, channels) = setup.source.info, setup.input_shape
    stored = info.image_shape[2]
    delivered = setup.in_range("raw") if takes_pixels else setup
    described: PlainDict = {
        "name": name,
        "dtype": dtype,
        "shape": [batch, height, width, channels],
        "axes": ["batch", "height", "width", "channels"],
        "decode": {
            "mode": "L" if stored == 1 else "RGB",
            "exif_orientation": not info.patchwise,
            "transparent": "refused" if info.patchwise else "white",
            "more_than_8_bits": {"kind": "stretched", "cut_share": CUT_THOUSANDTHS / 1000},
        },
        "crop": None,
        "resize": None,
        "patch": None,
        "luma": list(LUMA) if (stored, channels) == (3, 1) else None,
        "repeat_channels": channels // stored,
        "rounded": takes_pixels or setup.config.eight_bit_transfer,
        **delivered.input_range.describe(),
    }
    if info.patchwise:
        output = setup.output_shape or (height, width)
        described["patch"] = {
            "output": list(output),
            "margin": [(height - output[0]) // 2, (width - output[1]) // 2],
            "overlap": [height - output[0], width - output[1]],
            "first_at_multiples_of": setup.record.size_step,
            "border": "mirrored",
        }
    else:
        size, margin = crop_of_evaluation(info, setup.input_shape)
        described["crop"] = {
            "size": list(size),
            "margin": margin,
            "place": "centre",
            "box": "unrounded",
            "resampling": "bilinear",
            "antialias": True,
            "result": "rounded to 8 bits",
        }
        if size != (height, width):
            described["resize"] = {
                "size": [height, width],
                "resampling": "bilinear",
                "antialias": size[0] > height or size[1] > width,
                "result": "unrounded",
            }
    return described


def describe_mask(info: DatasetInfo) -> PlainDict:
    """Returns ``mask`` of ``export.json``: what a mask stores for each class, and its palette."""
    form, count = MaskForm(info.mask_values, info.class_colours), info.num_classes
    stored = form.stored(np.arange(count), count)
    return {"values": stored.tolist(), "dtype": stored.dtype.name, "palette": form.palette}


READS = (
    "`predict.py` reads JPEG, BMP, GIF and WebP; PNG, except colour of 16 bits, grey of 16 bits with transparency, "
    "and grey below 8 bits with a transparent colour; and of TIFF, upright pages of 1-bit, 8-bit or 16-bit grey or of "
    "8-bit RGB, without extra bands, in which black is zero, and stacks of these, also of three 8-bit channels as "
    "ImageJ and OME have them; it refuses all others"
)
"""The forms of files that the script reads as ``datasets/forms.py`` does."""


def sentences(described: PlainDict) -> Iterator[str]:
    """Yields the steps from an image file to the network's input in words."""
    (height, width, channels), patch = described["shape"][1:], described["patch"]
    colours = "grey" if described["decode"]["mode"] == "L" else "red, green, blue"
    transparent = "" if patch is not None else ", transparent parts white"
    deep = "grey images of 16 bits are stretched, the darkest and brightest thousandth cut off"
    yield f"pixels of 0..255, {colours}, turned as EXIF says{transparent}; {deep}; {READS}"
    if patch is not None:
        yield (
            f"patches of {height}x{width}, of which the network predicts the centre, "
            f"{patch['output'][0]}x{patch['output'][1]} pixels: the margin is {patch['margin'][0]} above and below, "
            f"and {patch['margin'][1]} left and right; neighbouring patches overlap by {patch['overlap'][0]} and "
            f"{patch['overlap'][1]} pixels"
        )
        yield "what a patch shows beyond the image's border is mirrored at the border"
    else:
        (high, wide), margin = described["crop"]["size"], described["crop"]["margin"]
        share = "the largest centred box" if margin == 1 else f"1/{margin:.4g} of the largest box"
        yield (
            f"the centre, {share} with the aspect of {high}x{wide}, resized to {high}x{wide}: bilinear, antialiased, "
            "rounded to 8 bits"
        )
    if described["resize"] is not None:
        antialiased = ", antialiased" if described["resize"]["antialias"] else ""
        yield f"resized to {height}x{width}: bilinear{antialiased}, not rounded"
    if described["luma"] is not None:
        red, green, blue = described["luma"]
        yield f"grey: {red} red + {green} green + {blue} blue"
    elif described["repeat_channels"] > 1:
        yield f"the grey values {channels} times, as channels"
    if described["rounded"] and described["dtype"] != "uint8":
        yield "rounded to whole numbers of 0..255"
    if described["reverse_channels"]:
        yield "channels in the order blue, green, red"
    if described["formula"] is not None:
        yield "(pixel x scale - offset) x factor, for each channel"
    elif described["per_image"]:
        yield "minus the mean of all values of the image, over their deviation; zeros where that is 0"
    else:
        yield "nothing else: the network brings pixels to its range itself"


def compared_with(verified: PlainDict) -> str:
    """Returns in words the reference that the outputs of an export were compared with."""
    if verified["session_relative"] is None:
        return "the run's own session"
    rounding = verified.get("rounding")
    more = f"; in Keras's layers 32 bits round {rounding:.2g}" if rounding else ""
    return f"a 64-bit computation (the run's own session: {verified['session_relative']:.2g}{more})"


def allowed_difference(verified: PlainDict) -> str:
    """Returns in words how far the outputs of an export differ, and how far they may."""
    limit = f"the limit is {verified['allowed_relative']:.2g}"
    return f"{verified['relative']:.2g} x the outputs' standard deviation; {limit}"


def least_agreement(verified: PlainDict) -> str:
    """Returns the limit of the share of samples with the same class in words; empty if there is none."""
    return f"; the limit is {verified['least_agreement']:.1%}" if verified["least_agreement"] else ""


def shape_text(shape: Sequence[Optional[int]]) -> str:
    """Returns a shape as text, with "any" for None: ``any x 28 x 28 x 1``."""
    return " x ".join("any" if size is None else str(size) for size in shape)


def _running(record: PlainDict) -> str:
    """Returns the part of the page that says how to predict; empty for a program for an IPU."""
    if record["format"] not in FORMATS:
        return ""
    text = f"\n\n## Predict\n\n```console\n$ python {SCRIPT} image.png\n```\n\n"
    if record["input"]["patch"] is None:
        return text + "prints the class of the image."
    height, width = record["input"]["shape"][1:3]
    text += (
        f"cuts an image of any size into patches of {height}x{width}, joins what the network predicts of them, and "
        "writes `image-mask.png`, the mask that `ipucnn infer` gives."
    )
    if norm_of(record["norm_layer"]) == "group":
        text += (
            f"\n\nThe network has group norm, which takes its statistics of each patch: {COST_OF_PATCHES}. The run "
            "itself takes an image as one patch, so its masks of larger images differ from these."
        )
    return text


def _files_of(verified: PlainDict) -> str:
    """Returns the line about the image files with which the function of the page was verified."""
    counts = verified.get("files")
    if not counts or not sum(counts.values()):
        return ""
    refused = f"; it refuses {counts['not_read']:,} others" if counts["not_read"] else ""
    return f"\n- `network_input` of `{SCRIPT}` makes the session's input of {counts['read']:,} image files{refused}"


def page(record: PlainDict) -> str:
    """Returns the page of an export, in Markdown.

    Args:
        record: the complete ``export.json``.
    """
    verified, environment, described = record["verification"], record["environment"], record["input"]
    shape = shape_text(described["shape"])
    classes = record["setup"]["class_names"]
    of = f" of {printable(classes[1])}" if len(classes) == 2 else ", mean of all classes but the first"
    shown = [
        f"- {name.replace('_', ' ')}{of if name in ('dice', 'iou') else ''}: {value:.4f}"
        for name, value in (record["figures"] or {}).items()
        if isinstance(value, float) and name in ("accuracy", "top5", "dice", "iou", "loss")
    ]
    measured = "\n".join(shown) if shown else "Nothing is recorded of these weights."
    steps = "\n".join(f"{number}. {step}" for number, step in enumerate(sentences(described), 1))
    versions = ", ".join(
        f"{name} {environment[name]}" for name in ("ipucnn", "tensorflow", "keras", "python")
    )
    name = record["trained_on"]["name"]
    source = "Weights of " if name is None else f"Trained on {name}; weights of "
    difference = allowed_difference(verified)
    averaged = ", averaged over training" if record["averaged_weights"] else ""
    return f"""# {record["model"]}, as {record["format"]}

The network is `{record["file"]}`. It takes `{described["name"]}` ({described["dtype"]}, {shape}) and gives
`{record["output"]["name"]}` (float32), one for each class of `labels.json`, in that order.

## Input

{steps}

`{INPUT}` has the numbers. `{SCRIPT}` follows them, with Pillow and NumPy:

```python
from predict import network_input

image = network_input("image.png")
```

The network takes such arrays stacked, `[batch, height, width, channels]`.{_running(record)}

## Data and figures

{source}{record["weights"]["checkpoint"]}{averaged}.
In the run's own validation of these weights:

{measured}

## Verification

{verified["samples"]:,} samples ({verified["of"]}) in {verified["runtime"]}, compared with {compared_with(verified)}:

- largest difference: {difference}
- the same class as the run's own session: {verified["agreement"]:.2%}{least_agreement(verified)}{_files_of(verified)}

## Where it comes from

- command: `{environment["command"]}`
- versions: {versions}
"""
