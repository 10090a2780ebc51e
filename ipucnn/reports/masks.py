"""What ``ipucnn infer`` shows of a segmentation: a table, JSON, and the contact sheet's pictures."""

import json
import sys

import numpy as np

from ipucnn.reports.console import console
from ipucnn.reports.evaluate import plain_table
from ipucnn.reports.panel_sheet import PanelSheet
from ipucnn.runs.images.outputs import overlay
from ipucnn.runs.infer import Masks, Page


def masks_json(done: Masks) -> str:
    """The results as indented JSON."""
    rows = [{**row, "share": round(row["share"], 6)} for row in done.results]
    measured = {
        "pages": done.num_pages,
        "wall_s": done.wall_s,
        "images_per_s": done.images_per_s,
        "device": done.device,
        "tile_sizes": done.tile_sizes,
    }
    return json.dumps({"results": rows, "share_of": done.shown_name, "measured": measured}, indent=2)


def print_masks(done: Masks) -> None:
    """A row per input on stdout."""
    from rich.text import Text

    table = plain_table()
    table.add_column("image", overflow="fold")
    table.add_column("pages", justify="right")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column(done.shown_name, justify="right")
    table.add_column("mask", overflow="fold")
    for row in done.results:
        cells = [
            row["image"],
            str(row["pages"]),
            f"{row['height']}x{row['width']}",
            f"{row['share']:.1%}",
            row["files"]["mask"],
        ]
        table.add_row(*(Text(cell) for cell in cells))
    console(sys.stdout).print(table)


def speed_line(done: Masks) -> str:
    """How fast it went, and with which tiles."""
    tiles = ", ".join(f"{size}x{size}" for size in done.tile_sizes)
    return (
        f"{done.num_pages} images in {done.wall_s:.1f} s: {done.images_per_s:.3g} images/s, measured on "
        f"{done.device.upper()}, tiles of {tiles}"
    )


class MaskSheet(PanelSheet):
    """The contact sheet of masks; takes pages as they are segmented."""

    def __init__(self) -> None:
        super().__init__(("image", "probability", "overlay"), columns=2)
        self._given = 0

    def add_page(self, page: Page) -> None:
        """Takes a page if it is one of those shown."""
        self.heads = ("image", f"probability of {page.class_names[1]}", "overlay")
        wanted = self.wants(self._given)
        self._given += 1
        if not wanted:
            return
        image = page.image
        coloured = page.probability > 0.5
        if page.shown_class == 0:
            coloured = ~coloured
        grey = image[..., 0] if image.shape[-1] == 1 else image
        probability = np.round(255 * page.probability).astype(np.uint8)
        last = page.name.rpartition("/")[2]
        number = f", page {page.number + 1} of {page.pages}" if page.pages > 1 else ""
        caption = f"{last}{number}: {coloured.mean():.1%} {page.class_names[page.shown_class]}"
        self.add(caption, [grey, probability, overlay(image, coloured)])
