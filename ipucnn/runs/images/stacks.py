"""Pixel size and axes of a TIFF: read from an input of ``infer``, and written into its results.

ImageJ stores axes, unit and distance of slices as text in the first page's description, and the pixel size as the
resolution in pixels per unit.  OME-TIFF has an XML description.  Results have ImageJ's form, which Fiji, napari and
tifffile read, too.
"""

import contextlib
import io
import math
from fractions import Fraction
from typing import Any, Dict, NamedTuple, Optional, Tuple
from xml.etree import ElementTree

_KEPT = (
    "channels",
    "slices",
    "frames",
    "hyperstack",
    "mode",
    "unit",
    "yunit",
    "zunit",
    "spacing",
    "finterval",
    "fps",
)
"""ImageJ's keys that describe axes and sizes, in the order in which it writes them; others are about the display."""
_IMAGEJ_AXES = ("T", "Z", "C")
_NO_UNIT = 1


class Stack(NamedTuple):
    """Pixel size and axes.

    Attributes:
        resolution: pixels per unit in x and y; None if the file does not say it.
        resolution_unit: TIFF's number of the unit of ``resolution``: 1 none (or ImageJ's unit), 2 inch, 3 centimetre.
        imagej: ImageJ's keys and values, beside the number of pages; empty if the file has no axes and no unit.
    """

    resolution: Optional[Tuple[Fraction, Fraction]] = None
    resolution_unit: int = _NO_UNIT
    imagej: Tuple[Tuple[str, str], ...] = ()

    def tags(self, num_pages: int, is_first: bool) -> Dict[str, Any]:
        """Returns Pillow's options for saving a page of a result."""
        from PIL.TiffImagePlugin import IFDRational

        options: Dict[str, Any] = {}
        if self.resolution is not None:
            x, y = (IFDRational(side.numerator, side.denominator) for side in self.resolution)
            options.update(x_resolution=x, y_resolution=y, resolution_unit=self.resolution_unit)
        if self.imagej and is_first:
            lines = [
                "ImageJ=1.54f",
                f"images={num_pages}",
                *(f"{key}={value}" for key, value in self.imagej),
                "",
            ]
            # ImageJ escapes other letters, such as the Greek one of micrometres.
            text = (letter if letter.isascii() else f"\\u{ord(letter):04X}" for letter in "\n".join(lines))
            options["description"] = "".join(text)
        return options


NO_STACK = Stack()


def read_stack(data: bytes, num_pages: int) -> Stack:
    """Reads pixel size and axes of a TIFF; what its description does not say is left out.

    Args:
        data: the file, whose pages can be read.
        num_pages: the pages that are segmented; axes with another number of pages are left out.
    """
    import tifffile

    # Descriptions are free text: those of other programs are no reason to refuse an image.
    with contextlib.suppress(Exception), tifffile.TiffFile(io.BytesIO(data)) as file:
        tags = file.pages[0].tags
        resolution = None
        if 282 in tags and 283 in tags:
            sides = [Fraction(*map(int, tags[code].value)) for code in (282, 283)]
            resolution = (sides[0], sides[1]) if min(sides) > 0 else None
        unit = int(tags[296].value) if 296 in tags else 2
        if file.is_imagej:
            found = file.imagej_metadata or {}
            counts = [int(found.get(key, 1)) for key in ("channels", "slices", "frames")]
            kept = {key: _text(found[key]) for key in _KEPT if key in found}
            if counts[0] > 1 and counts[1] * counts[2] == num_pages:  # channels are one colour page
                kept = {key: value for key, value in kept.items() if key not in ("channels", "mode")}
            elif counts[0] * counts[1] * counts[2] != num_pages:
                kept = {key: value for key, value in kept.items() if key not in _KEPT[:4]}
            return Stack(resolution, unit, tuple(kept.items()))
        if file.is_ome:
            return _ome_stack(file.ome_metadata, file.series[0].axes, file.series[0].shape, num_pages)
        return Stack(resolution, unit)
    return NO_STACK


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _ome_stack(description: str, axes: str, shape: Tuple[int, ...], num_pages: int) -> Stack:
    pixels = next(node for node in ElementTree.fromstring(description).iter() if node.tag.endswith("}Pixels"))
    sizes = {axis: pixels.get(f"PhysicalSize{axis}") for axis in "XYZ"}
    units = {axis: pixels.get(f"PhysicalSize{axis}Unit", "\u00b5m") for axis in "XYZ"}
    resolution, kept = None, {}
    if sizes["X"] and sizes["Y"] and units["X"] == units["Y"]:
        x, y = (Fraction(1 / float(sizes[axis] or 0)).limit_denominator(10**6) for axis in "XY")
        resolution = (x, y)
        kept["unit"] = units["X"]
        if sizes["Z"] and units["Z"] == units["X"]:
            kept["spacing"] = str(sizes["Z"])
    counts = {axis: count for axis, count in zip(axes, shape) if axis not in "YXS"}
    order = [axis for axis in _IMAGEJ_AXES if axis in counts]
    total = math.prod(counts.values())
    if counts.get("C", 1) > 1 and total == num_pages * counts["C"]:  # channels are one colour page
        total //= counts.pop("C")
        order.remove("C")
    if list(counts) == order and total == num_pages > 1:
        names = (("C", "channels"), ("Z", "slices"), ("T", "frames"))
        kept = {
            **{name: str(counts[axis]) for axis, name in names if axis in counts},
            "hyperstack": "true",
            **kept,
        }
    return Stack(resolution, _NO_UNIT, tuple(kept.items()))
