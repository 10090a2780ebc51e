"""What an exported network takes, for those who run it elsewhere: as numbers, and as lines of Python.

The lines need Pillow and NumPy alone.  The verification of an export runs them on image files, so that they are known
to give what the run's own session was given.
"""

from typing import List, Optional, Tuple

from ipucnn.aliases import PlainDict
from ipucnn.datasets.images import CUT_THOUSANDTHS, crop_of_evaluation
from ipucnn.runs.setup import Setup

LARGEST_DIFFERENCE = 1e-3
"""Of the range of the session's inputs: what the lines may differ by."""


def describe_input(
    setup: Setup, name: str, dtype: str, batch: Optional[int], takes_pixels: bool
) -> PlainDict:
    """``input.json``: how an image file becomes what the network takes.

    Args:
        setup: of the network.
        name, dtype: of the exported network's input.
        batch: images of a call; None for any number.
        takes_pixels: the network brings pixels of 0..255 to its range itself.
    """
    from ipucnn.datasets.preprocessing import LUMA, channel_affine

    info, (height, width, channels) = setup.source.info, setup.input_shape
    stored = info.image_shape[2]
    affine = channel_affine(setup.input_range, info, channels)
    described: PlainDict = {
        "name": name,
        "dtype": dtype,
        "shape": [batch, height, width, channels],
        "axes": ["batch", "height", "width", "channels"],
        "decode": {
            "mode": "L" if stored == 1 else "RGB",
            "exif_orientation": not info.tiled,
            "transparent": "refused" if info.tiled else "white",
            "more_than_8_bits": {"kind": "stretched", "cut_share": CUT_THOUSANDTHS / 1000},
        },
        "crop": None,
        "resize": None,
        "patch": None,
        "luma": list(LUMA) if (stored, channels) == (3, 1) else None,
        "repeat_channels": channels // stored,
        "range": "raw" if takes_pixels else setup.input_range,
        "reverse_channels": affine.reverse and not takes_pixels,
        "per_image": affine.per_image and not takes_pixels,
        "formula": None,
    }
    if not takes_pixels and not affine.per_image:
        described["formula"] = {
            "scale": affine.scale,
            "offsets": list(affine.offsets),
            "factors": list(affine.factors),
        }
    if info.tiled:
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


def sentences(described: PlainDict) -> List[str]:
    """The steps of a description in words."""
    decode, crop, patch = described["decode"], described["crop"], described["patch"]
    height, width, channels = described["shape"][1:]
    deep = "grey images of more than 8 bits are stretched, the darkest and brightest thousandth cut off"
    if patch is not None:
        top, left = patch["margin"]
        steps = [
            f"pixels of 0..255, {'grey' if decode['mode'] == 'L' else 'red, green, blue'}; {deep}",
            f"patches of {height}x{width}, of which the network predicts the centre, "
            f"{patch['output'][0]}x{patch['output'][1]} pixels: the margin is {top} above and below, and {left} left "
            f"and right; neighbouring patches overlap by {patch['overlap'][0]} and {patch['overlap'][1]} pixels",
            "what a patch shows beyond the image's border is mirrored at the border",
        ]
    else:
        size = "x".join(map(str, crop["size"]))
        share = (
            "the largest centred box" if crop["margin"] == 1 else f"1/{crop['margin']:.4g} of the largest box"
        )
        steps = [
            f"pixels of 0..255, {'grey' if decode['mode'] == 'L' else 'red, green, blue'}, turned as EXIF says, "
            f"transparent parts white; {deep}",
            f"the centre, {share} with the aspect of {size}, resized to {size}: bilinear, antialiased, rounded to "
            "8 bits",
        ]
    if described["resize"] is not None:
        antialiased = "antialiased, " if described["resize"]["antialias"] else ""
        steps.append(f"resized to {height}x{width}: bilinear, {antialiased}not rounded")
    if described["luma"] is not None:
        steps.append("grey: 0.299 red + 0.587 green + 0.114 blue")
    elif described["repeat_channels"] > 1:
        steps.append(f"the grey values {channels} times, as channels")
    if described["reverse_channels"]:
        steps.append("channels in the order blue, green, red")
    if described["formula"] is not None:
        steps.append("(pixel x scale - offset) x factor, for each channel")
    elif described["per_image"]:
        steps.append("minus the mean of all values of the image, over their deviation; zeros where that is 0")
    else:
        steps.append("nothing else: the network brings pixels to its range itself")
    return steps


def python_lines(described: PlainDict) -> str:
    """A Python function that makes an image file what the network takes."""
    height, width, channels = described["shape"][1:]
    mode, crop, patch = described["decode"]["mode"], described["crop"], described["patch"]
    lines = ["import numpy as np", "from PIL import Image, ImageOps", "", ""]
    if patch is not None:
        lines += [
            "def network_input(path, row=0, column=0, page=0):",
            f'    """float32 [{height}, {width}, {channels}]: the patch that is predicted from (row, column) on."""',
            "    image = Image.open(path)",
            "    image.seek(page)",
        ]
    else:
        lines += [
            "def network_input(path):",
            f'    """{described["dtype"]} [{height}, {width}, {channels}] of an image file."""',
            "    image = ImageOps.exif_transpose(Image.open(path))",
        ]
    lines += [
        '    if image.mode[0] in "FI":  # more than 8 bits',
        "        values = np.asarray(image, float)",
        "        cut = (values.size - 1) // 1000",
        "        low, dark, bright, high = np.sort(values, None)[[0, cut, -1 - cut, -1]]",
        "        dark, bright = (low, high) if dark == bright else (dark, bright)",
        "        values = (np.clip(values, dark, bright) - dark) * 255 / max(bright - dark, 1e-300)",
        "        image = Image.fromarray(np.uint8(values + 0.5))",
    ]
    if patch is None:
        lines += [
            '    if image.mode[-1] in "Aa" or image.mode == "P":  # transparent parts are white',
            '        image = image.convert("RGBA")',
            '        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)',
            f'    image = image.convert("{mode}")',
            *_crop_lines(crop["size"], crop["margin"]),
        ]
    else:
        (top, left), layer = patch["margin"], "(0, 0)"
        lines += [
            f'    pixels = np.asarray(image.convert("{mode}"), np.float32).reshape(image.height, image.width, -1)',
            f'    pixels = np.pad(pixels, (({top}, {height}), ({left}, {width}), {layer}), "reflect")',
            f"    pixels = pixels[row : row + {height}, column : column + {width}]",
        ]
    if described["resize"] is not None and not described["resize"]["antialias"]:
        lines += [  # positions in 32 bits, as TensorFlow's ResizeBilinear has them (half_pixel_centers)
            f"    for axis, size in ((0, {height}), (1, {width})):",
            "        old, half = pixels.shape[axis], np.float32(0.5)",
            "        place = (np.arange(size, dtype=np.float32) + half) * np.float32(old / size) - half",
            "        low = np.floor(place)",
            "        below, above = (np.take(pixels, np.int64(k).clip(0, old - 1), axis) for k in (low, low + 1))",
            "        pixels = below + (above - below) * (place - low).reshape((-1, 1, 1) if axis == 0 else (-1, 1))",
        ]
    elif described["resize"] is not None:
        lines += [
            "    planes = [Image.fromarray(pixels[..., k]) for k in range(pixels.shape[2])]",
            f"    pixels = np.stack([plane.resize(({width}, {height}), Image.BILINEAR) for plane in planes], -1)",
        ]
    if described["luma"] is not None:
        lines.append(f"    pixels = (pixels * np.float32({described['luma']})).sum(-1, keepdims=True)")
    elif described["repeat_channels"] > 1:
        lines.append(f"    pixels = np.repeat(pixels, {channels}, -1)")
    if described["reverse_channels"]:
        lines.append("    pixels = pixels[..., ::-1]")
    return "\n".join([*lines, *_range_lines(described)]) + "\n"


def _crop_lines(size: Tuple[int, int], margin: float) -> List[str]:
    height, width = size
    smallest = f"min(image.width / {width}, image.height / {height})"
    return [
        f"    scale = {smallest}" + ("" if margin == 1 else f" / {margin!r}"),
        f"    x, y, dx, dy = image.width / 2, image.height / 2, {width} * scale / 2, {height} * scale / 2",
        f"    image = image.resize(({width}, {height}), Image.BILINEAR, (x - dx, y - dy, x + dx, y + dy))",
        f"    pixels = np.asarray(image, np.float32).reshape({height}, {width}, -1)",
    ]


def _range_lines(described: PlainDict) -> List[str]:
    formula, dtype = described["formula"], described["dtype"]
    if described["per_image"]:
        return [
            "    pixels = np.asarray(pixels, float) - np.mean(pixels, dtype=float)",
            f"    return np.{dtype}(pixels / (pixels.std() or 1))",
        ]
    if formula is None:
        rounded = "np.rint(np.clip(pixels, 0, 255))" if dtype == "uint8" else "pixels"
        return [f"    return np.{dtype}({rounded})"]
    return [
        f"    offsets, factors = np.array({formula['offsets']}), np.array({formula['factors']})",
        f"    return np.{dtype}((pixels * {formula['scale']!r} - offsets) * factors)",
    ]
