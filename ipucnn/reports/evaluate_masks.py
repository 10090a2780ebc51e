"""What ``ipucnn evaluate`` shows of a segmentation network: figures beside a baseline, and the worst images."""

import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from ipucnn.reports import units
from ipucnn.reports.console import console
from ipucnn.reports.evaluate import plain_table, titled
from ipucnn.reports.panel_sheet import Colour, PanelSheet
from ipucnn.reports.predictions import FALSE, MISSED
from ipucnn.runs.evaluate import JudgedImage, mean_dice

WORST = 6
WORST_DRAWN = 12
RIGHT_FOREGROUND: Colour = (255, 255, 255)
RIGHT_BACKGROUND: Colour = (0, 0, 0)
FALSE_FOREGROUND: Colour = MISSED
FALSE_BACKGROUND: Colour = FALSE
Row = Tuple[str, str, str]


def print_mask_evaluation(result: Dict[str, Any]) -> None:
    """The evaluation as tables on stdout."""
    out = console(sys.stdout)
    out.print(_figures(result))
    out.print(_worst(result))


def _figures(result: Dict[str, Any]) -> Any:
    from rich.text import Text

    data, found = result["dataset"], result["segmentation"]
    names = [row["name"] for row in result["classes"]]
    table = plain_table()
    table.add_column("")
    table.add_column("measured", overflow="fold")
    table.add_column(f"every pixel {found['baseline']['class']}", overflow="fold")
    for row in [*_pixel_rows(result, names), *_score_rows(found), *_other_rows(result)]:
        table.add_row(Text(row[0], style="bold"), Text(row[1]), Text(row[2]))
    return titled(f"{result['model']} on {data['name']} ({data['location']})", table)


def _pixel_rows(result: Dict[str, Any], names: List[str]) -> List[Row]:
    found = result["segmentation"]
    baseline = found["baseline"]
    rows = [("pixel accuracy", f"{result['measured']['accuracy']:.2%}", f"{baseline['accuracy']:.2%}")]
    for key, title in (("dice", "Dice"), ("iou", "IoU")):
        for i in reversed(range(len(names))):
            rows.append((f"{title}, {names[i]}", _share(found[key][i]), _share(baseline[key][i])))
    return rows


def _score_rows(found: Dict[str, Any]) -> List[Row]:
    scores, baseline = found["scores"], found["baseline"]["scores"] or {}
    rows = []
    for key, title in (("rand", "V^Rand"), ("info", "V^Info")):
        if scores is None:
            continue
        part = scores[key]
        details = f"{part['score']:.4f} (split {part['split']:.4f}, merge {part['merge']:.4f})"
        rows.append((f"{title} at 0.5", details, _share(baseline.get(key))))
        best = part["best"]
        rows.append((f"{title}, best", f"{best['score']:.4f} at {best['threshold']:g}", ""))
    return rows


def _other_rows(result: Dict[str, Any]) -> List[Row]:
    measured, data = result["measured"], result["dataset"]
    seen = f"{measured['samples']} of {data['size']}"
    if data["stored"] != data["size"]:
        seen += f" (--limit-eval; the data set has {data['stored']})"
    updates = result["weight_updates"]
    checkpoint = result["checkpoint"] + ("" if updates is None else f" ({updates} weight updates)")
    tiles = ", ".join(f"{size}x{size}" for size in result["segmentation"]["tile_sizes"])
    views = result["segmentation"]["views"]
    averaged = f", {views} views of each averaged" if views > 1 else ""
    found = result["segmentation"]
    time = f"{units.duration(measured['wall_s'])}: network {units.duration(found['network_s'])}"
    if found["scores"] is not None:
        time += f", V^Rand and V^Info {units.duration(found['scores_s'])}"
    return [
        ("loss", f"{measured['loss']:.4f}", ""),
        ("calibration error", f"{measured['calibration_error']:.4f}", ""),
        ("images", f"{seen}, whole, by tiles of {tiles}{averaged}", ""),
        ("time", f"{time}, measured on {result['device'].upper()}", ""),
        ("weights" if updates is None else "checkpoint", checkpoint, ""),
    ]


def _share(value: Optional[float]) -> str:
    return "" if value is None else f"{value:.4f}"


def _worst(result: Dict[str, Any]) -> Any:
    """The images with the lowest mean Dice."""
    from rich.text import Text

    names = [row["name"] for row in result["classes"]]
    rows = result["segmentation"]["images"]
    table = plain_table()
    table.add_column("image", overflow="fold")
    for name in reversed(names):
        table.add_column(f"Dice, {name}", justify="right")
    scored = "rand" in rows[0]
    if scored:
        table.add_column("V^Rand", justify="right")
        table.add_column("V^Info", justify="right")
    shown = sorted(rows, key=mean_dice)[:WORST]
    for row in shown:
        cells = [row["image"], *(_share(value) for value in reversed(row["dice"]))]
        if scored:
            cells += [_share(row["rand"]), _share(row["info"])]
        table.add_row(*(Text(cell) for cell in cells))
    return titled(f"the worst {len(shown)} of {len(rows)} images", table)


class WorstSheet(PanelSheet):
    """The contact sheet of the images with the lowest mean Dice, the worst first."""

    def __init__(self) -> None:
        super().__init__(("image", "truth", "prediction", "difference"), side=256)
        self._judged: List[Tuple[float, JudgedImage]] = []

    def add_image(self, judged: JudgedImage) -> None:
        """Takes an image if it is one of the worst so far."""
        first, second = judged.class_names[:2]
        self.legend = (
            (FALSE_BACKGROUND, f"{second} taken for {first}"),
            (FALSE_FOREGROUND, f"{first} taken for {second}"),
        )
        self._total += 1
        self._judged.append((mean_dice(judged.row), judged))
        self._judged = sorted(self._judged, key=lambda pair: pair[0])[:WORST_DRAWN]

    def save(self, path: Path) -> None:
        """See ``PanelSheet``."""
        self._rows = []
        for dice, judged in self._judged:
            image = judged.image[..., 0] if judged.image.shape[-1] == 1 else judged.image
            self.add(
                f"{judged.row['image']}: mean Dice {dice:.4f}",
                [
                    image,
                    _grey(judged.truth),
                    _grey(judged.predicted),
                    difference(judged.truth, judged.predicted),
                ],
            )
        super().save(path)


def _grey(mask: Any) -> Any:
    return np.where(np.asarray(mask) > 0, np.uint8(255), np.uint8(0))


def difference(truth: Any, predicted: Any) -> Any:
    """uint8 [h, w, 3]: right pixels white (class 1) and black (class 0), wrong ones in colour."""
    truth, predicted = np.asarray(truth) > 0, np.asarray(predicted) > 0
    colours = np.array([[RIGHT_BACKGROUND, FALSE_FOREGROUND], [FALSE_BACKGROUND, RIGHT_FOREGROUND]], np.uint8)
    return colours[truth.astype(int), predicted.astype(int)]
