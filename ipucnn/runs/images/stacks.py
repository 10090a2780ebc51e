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
_MICROMETRES = {
    "pm": 1e-6,
    "\u00c5": 1e-4,
    "nm": 1e-3,
    "\u00b5m": 1.0,
    "um": 1.0,
    "mm": 1e3,
    "cm": 1e4,
    "m": 1e6,
}
_SECONDS = {"ns": 1e-9, "\u00b5s": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
"""Units of OME-XML: https://www.openmicroscopy.org/Schemas/Documentation/Generated/OME-2016-06/ome_xsd.html."""
_NO_UNIT = 1


class Stack(NamedTuple):
    """Pixel size and axes.

    Attributes:
        resolution: pixels per unit in x and y; None if the file does not say it.
        resolution_unit: TIFF's number of the unit of ``resolution``: 1 none (or ImageJ's unit), 2 inch, 3 centimetre.
        imagej: ImageJ's keys and values, beside the number of pages; empty if the file has no axes and no unit.
        remarks: what the results do not keep, words after "images have".
    """

    resolution: Optional[Tuple[Fraction, Fraction]] = None
    resolution_unit: int = _NO_UNIT
    imagej: Tuple[Tuple[str, str], ...] = ()
    remarks: Tuple[str, ...] = ()

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
    unit, remarks = pixels.get("PhysicalSizeXUnit", "\u00b5m"), []
    sizes = {axis: _length(pixels, axis, unit) for axis in "XYZ" if pixels.get(f"PhysicalSize{axis}")}
    resolution, kept = None, {}
    x, y = (Fraction(1 / (sizes.get(axis) or math.inf)).limit_denominator(10**9) for axis in "XY")
    if min(x, y) > 0:
        resolution = (x, y)
        kept["unit"] = unit
        if sizes.get("Z"):
            kept["spacing"] = f"{sizes['Z']:.9g}"
    if None in sizes.values() or (sizes and resolution is None):
        remarks.append(
            "a pixel size in one direction alone, in an unknown unit or of no amount, which the results lack"
        )
    if pixels.get("TimeIncrement") and pixels.get("TimeIncrementUnit", "s") in _SECONDS:
        seconds = float(pixels.get("TimeIncrement", 0)) * _SECONDS[pixels.get("TimeIncrementUnit", "s")]
        if 0 < seconds < math.inf:
            kept["finterval"] = f"{seconds:.9g}"
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
    elif len(counts) > 1 or not counts.keys() <= {*_IMAGEJ_AXES}:
        lost = "".join(counts)
        remarks.append(f"axes {lost}, and the results have plain pages in this order: ImageJ's axes are TZC")
    return Stack(resolution, _NO_UNIT, tuple(kept.items()), tuple(remarks))


def _length(pixels: ElementTree.Element, axis: str, unit: str) -> Optional[float]:
    """Returns OME's size of a pixel along an axis in a unit; None if it is no size, or a unit is not known."""
    size, own = 0.0, pixels.get(f"PhysicalSize{axis}Unit", "\u00b5m")
    with contextlib.suppress(ValueError):
        size = float(pixels.get(f"PhysicalSize{axis}", 0))
    # TIFF has 32 bits for each side of a fraction.
    if not 1e-9 < size < 1e9:
        return None
    if own == unit:
        return size
    return size * _MICROMETRES[own] / _MICROMETRES[unit] if {own, unit} <= _MICROMETRES.keys() else None
