"""Describes the input of an exported network for its users: as numbers, in words and as lines of Python.

The lines need only Pillow and NumPy.  The page of an export shows them.  The verification of an export runs them on
image files, so that they are known to produce the inputs of the run's own session.
"""

from typing import Iterator, List, Optional, Sequence, Tuple

from ipucnn.aliases import PlainDict
from ipucnn.config.values import norm_of
from ipucnn.datasets.forms import CUT_THOUSANDTHS
from ipucnn.datasets.images import crop_of_evaluation
from ipucnn.datasets.pixels import LUMA, InputRange
from ipucnn.runs.running_lines import IMAGE, MASK, running_lines
from ipucnn.runs.setup import Setup
from ipucnn.text import printable

INPUT = "input.json"
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
    name_of_range = "raw" if takes_pixels else setup.input_range
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
        **InputRange.of(name_of_range, info, channels).describe(),
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


Step = Tuple[str, List[str]]
"""A step of the preparation in words, and its lines of Python."""
READS = (
    "the function reads JPEG, BMP, GIF and WebP; PNG, except colour of 16 bits, grey of 16 bits with transparency, "
    "and grey below 8 bits with a transparent colour; and of TIFF, upright pages of 1-bit, 8-bit or 16-bit grey or of "
    "8-bit RGB, without extra bands, in which black is zero; it refuses all others"
)
"""The forms of files that the lines of a page read as ``datasets/forms.py`` does; they refuse all others."""
_OPENED = '''class NotRead(ValueError):
    """The form of a file is none that these lines read."""


def opened(path, page=0):
    """The upright Pillow image of a file or, for TIFF, of one of its pages."""
    image = Image.open(path)
    is_read = image.format in ("JPEG", "MPO", "PNG", "BMP", "GIF", "WEBP")
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
            ("1", 1, 1, 1), ("L", 1, 8, 1), ("RGB", 2, 8, 1), ("I;16", 1, 16, 1), ("I;16B", 1, 16, 1)
        ) and (tags.get(274, 1), tags.get(284, 1), tags.get(254, 0) & 1, 338 in tags) == (1, 1, 0, False)
    if not is_read:
        raise NotRead(f"{path}: {image.format} of this form is not read; save it as PNG of 8 bits")
    return ImageOps.exif_transpose(image)
'''
_STRETCHED = [
    '    if image.mode[0] == "I":  # 16 bits',
    "        values = np.asarray(image, float)",
    "        cut = (values.size - 1) // 1000",
    "        low, dark, bright, high = np.sort(values, None)[[0, cut, -1 - cut, -1]]",
    "        dark, bright = (low, high) if dark == bright else (dark, bright)",
    "        values = (np.clip(values, dark, bright) - dark) * 255 / max(bright - dark, 1e-300)",
    "        image = Image.fromarray(np.uint8(values + 0.5))",
]


def sentences(described: PlainDict) -> List[str]:
    """Returns the steps of a description in words."""
    return [words for words, _ in _steps(described)]


def python_lines(described: PlainDict) -> str:
    """Returns the source of a Python function that prepares an image file for the network."""
    height, width, channels = described["shape"][1:]
    imports = ["import numpy as np", "from PIL import Image, ImageOps"]
    if described["patch"] is not None:
        imports = ["from functools import lru_cache", "", *imports]
        head = [
            "@lru_cache(maxsize=1)",
            "def mirrored_pixels(path, page):",
            '    """The pixels of an image, mirrored at its borders; those of the last image are kept."""',
            "    image = opened(path, page)",
        ]
    else:
        head = [
            "def network_input(path):",
            f'    """{described["dtype"]} [{height}, {width}, {channels}] of an image file."""',
            "    image = opened(path)",
        ]
    lines = [*imports, "", "", *_OPENED.split("\n"), "", *head]
    for _, of_step in _steps(described):
        lines += of_step
    return "\n".join(lines) + "\n"


def _steps(described: PlainDict) -> Iterator[Step]:
    """Yields the steps from an image file to the network's input."""
    channels = described["shape"][3]
    yield from _patch_steps(described) if described["patch"] is not None else _crop_steps(described)
    if described["resize"] is not None:
        yield _resize_step(described)
    if described["luma"] is not None:
        lines = [f"    pixels = (pixels * np.float32({described['luma']})).sum(-1, keepdims=True)"]
        yield "grey: 0.299 red + 0.587 green + 0.114 blue", lines
    elif described["repeat_channels"] > 1:
        yield (
            f"the grey values {channels} times, as channels",
            [f"    pixels = np.repeat(pixels, {channels}, -1)"],
        )
    if described["reverse_channels"]:
        yield "channels in the order blue, green, red", ["    pixels = pixels[..., ::-1]"]
    yield _range_step(described)


def _pixels(described: PlainDict, more: str = "") -> str:
    colours = "grey" if described["decode"]["mode"] == "L" else "red, green, blue"
    deep = "grey images of 16 bits are stretched, the darkest and brightest thousandth cut off"
    return f"pixels of 0..255, {colours}{more}; {deep}; {READS}"


def _patch_steps(described: PlainDict) -> Iterator[Step]:
    (height, width, _), patch, mode = described["shape"][1:], described["patch"], described["decode"]["mode"]
    top, left = patch["margin"]
    kinds = ("1", "L", "I", "I;16", "I;16B") if mode == "L" else ("RGB",)
    kind = "grey" if mode == "L" else "RGB"
    array = f'np.asarray(image.convert("{mode}"), np.float32).reshape(image.height, image.width, -1)'
    check = [
        f'    if image.mode not in {kinds} or "transparency" in image.info:'.replace("'", '"'),
        f'        raise NotRead(f"{{path}}: the network takes {kind} images without transparency")',
    ]
    yield _pixels(described, ", turned as EXIF says"), [*check, *_STRETCHED, f"    pixels = {array}"]
    yield (
        f"patches of {height}x{width}, of which the network predicts the centre, "
        f"{patch['output'][0]}x{patch['output'][1]} pixels: the margin is {top} above and below, and {left} left "
        f"and right; neighbouring patches overlap by {patch['overlap'][0]} and {patch['overlap'][1]} pixels",
        [f'    return np.pad(pixels, (({top}, {height}), ({left}, {width}), (0, 0)), "reflect")'],
    )
    dtype, channels = described["dtype"], described["shape"][3]
    cut = [
        "",
        "",
        "def network_input(path, row=0, column=0, page=0):",
        f'    """{dtype} [{height}, {width}, {channels}]: the patch that is predicted from (row, column) on."""',
        f"    pixels = mirrored_pixels(path, page)[row : row + {height}, column : column + {width}]",
    ]
    yield "what a patch shows beyond the image's border is mirrored at the border", cut


def _crop_steps(described: PlainDict) -> Iterator[Step]:
    mode, crop = described["decode"]["mode"], described["crop"]
    (height, width), margin = crop["size"], crop["margin"]
    transparent = [
        '    if image.mode[-1] == "A" or image.mode == "P" or "transparency" in image.info:',
        "        # transparent parts are white",
        '        image = image.convert("RGBA")',
        '        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)',
        f'    image = image.convert("{mode}")',
    ]
    yield _pixels(described, ", turned as EXIF says, transparent parts white"), [*_STRETCHED, *transparent]
    share = "the largest centred box" if margin == 1 else f"1/{margin:.4g} of the largest box"
    smallest = f"min(image.width / {width}, image.height / {height})"
    yield (
        f"the centre, {share} with the aspect of {height}x{width}, resized to {height}x{width}: bilinear, antialiased, "
        "rounded to 8 bits",
        [
            f"    scale = {smallest}" + ("" if margin == 1 else f" / {margin!r}"),
            f"    x, y, dx, dy = image.width / 2, image.height / 2, {width} * scale / 2, {height} * scale / 2",
            f"    image = image.resize(({width}, {height}), Image.BILINEAR, (x - dx, y - dy, x + dx, y + dy))",
            f"    pixels = np.asarray(image, np.float32).reshape({height}, {width}, -1)",
        ],
    )


def _resize_step(described: PlainDict) -> Step:
    height, width, _ = described["shape"][1:]
    if described["resize"]["antialias"]:
        return f"resized to {height}x{width}: bilinear, antialiased, not rounded", [
            "    planes = [Image.fromarray(pixels[..., k]) for k in range(pixels.shape[2])]",
            f"    pixels = np.stack([plane.resize(({width}, {height}), Image.BILINEAR) for plane in planes], -1)",
        ]
    return f"resized to {height}x{width}: bilinear, not rounded", [
        # positions in 32 bits, as in TensorFlow's ResizeBilinear (half_pixel_centers)
        f"    for axis, size in ((0, {height}), (1, {width})):",
        "        old, half = pixels.shape[axis], np.float32(0.5)",
        "        place = (np.arange(size, dtype=np.float32) + half) * np.float32(old / size) - half",
        "        low = np.floor(place)",
        "        below, above = (np.take(pixels, np.int64(k).clip(0, old - 1), axis) for k in (low, low + 1))",
        "        pixels = below + (above - below) * (place - low).reshape((-1, 1, 1) if axis == 0 else (-1, 1))",
    ]


def _range_step(described: PlainDict) -> Step:
    formula, dtype = described["formula"], described["dtype"]
    if formula is not None:
        return "(pixel x scale - offset) x factor, for each channel", [
            f"    offsets, factors = np.array({formula['offsets']}), np.array({formula['factors']})",
            f"    return np.{dtype}((pixels * {formula['scale']!r} - offsets) * factors)",
        ]
    if described["per_image"]:
        words = "minus the mean of all values of the image, over their deviation; zeros where that is 0"
        return words, [
            "    pixels = np.asarray(pixels, float) - np.mean(pixels, dtype=float)",
            f"    return np.{dtype}(pixels / (pixels.std() or 1))",
        ]
    rounded = "np.rint(np.clip(pixels, 0, 255))" if dtype == "uint8" else "pixels"
    return "nothing else: the network brings pixels to its range itself", [
        f"    return np.{dtype}({rounded})"
    ]


def compared_with(verified: PlainDict) -> str:
    """Returns in words the reference that the outputs of an export were compared with."""
    if verified["session_relative"] is None:
        return "the run's own session"
    return f"a 64-bit computation (the run's own session: {verified['session_relative']:.2g})"


def allowed_difference(verified: PlainDict) -> str:
    """Returns in words how far the outputs of an export differ, and how far they may."""
    limit = f"the limit is {verified['allowed_relative']:.2g}"
    return f"{verified['relative']:.2g} x the outputs' standard deviation; {limit}"


def shape_text(shape: Sequence[Optional[int]]) -> str:
    """Returns a shape as text, with "any" for None: ``any x 28 x 28 x 1``."""
    return " x ".join("any" if size is None else str(size) for size in shape)


def _running(record: PlainDict) -> str:
    """Returns the part of the page that says how to predict."""
    lines = running_lines(record)
    if not lines:
        return ""
    described = record["input"]
    if described["patch"] is None:
        words = f"These lines continue, and print the class of `{IMAGE}`:"
    else:
        height, width = described["shape"][1:3]
        words = (
            f"These lines continue. They cut `{IMAGE}`, of any size, into patches of {height}x{width}, join what the "
            f"network predicts of them, and write `{MASK}`, the mask that `ipucnn infer` gives:"
        )
        if norm_of(record["norm_layer"]) == "group":
            words += (
                f"\n\nThe network has group norm, which takes its statistics of each patch: {COST_OF_PATCHES}. The run "
                "itself takes an image as one patch, so its masks of larger images differ from these."
            )
    return f"\n\n## Predict\n\n{words}\n\n```python\n{lines}```"


def _files_of(verified: PlainDict) -> str:
    """Returns the line about the image files with which the function of the page was verified."""
    counts = verified.get("files")
    if not counts or not sum(counts.values()):
        return ""
    refused = f"; it refuses {counts['not_read']:,} others" if counts["not_read"] else ""
    return f"\n- `network_input` makes the session's input of {counts['read']:,} image files{refused}"


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

`{INPUT}` has the numbers. In Python, with Pillow and NumPy:

```python
{python_lines(described)}```

The network takes such arrays stacked, `[batch, height, width, channels]`.{_running(record)}

## Data and figures

{source}{record["weights"]["checkpoint"]}{averaged}.
In the run's own validation of these weights:

{measured}

## Verification

{verified["samples"]:,} samples ({verified["of"]}) in {verified["runtime"]}, compared with {compared_with(verified)}:

- largest difference: {difference}
- the same class as the run's own session: {verified["agreement"]:.2%}{_files_of(verified)}

## Where it comes from

- command: `{environment["command"]}`
- versions: {versions}
"""
