"""Draws the pictures of these pages again: `make pictures`, with Chromium and a trained U-Net.

    ipucnn train unet --seed 1 --run-dir runs/unet-membranes
    python docs/pictures.py runs/unet-membranes

The numbers that a picture shows go into images/data.json; tests/test_docs_pictures.py compares them with today's.
"""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Tuple

DOCS = Path(__file__).resolve().parent
IMAGES, DATA = DOCS / "images", DOCS / "images" / "data.json"
sys.path.insert(0, str(DOCS.parent))

PLAN = ["plan-splits", "resnet50", "--stages", "4", "--replicas", "4"]
SHEET_ROWS = 2
# What a terminal shows, as SVG: name of the picture -> command line.
TERMINALS = {
    "terminal-plan": [*PLAN],
    "terminal-train": ["train", "--help"],
}
TERMINAL_WIDTH = 120
# Rich's own template loads a font from another host; this one takes what the reader's system has.
SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: system-ui, sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g></g></svg>
"""


def printed(args: List[str]) -> str:
    """What a command prints on stdout, without colour."""
    from ipucnn import cli

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = cli.run(args)
    if code:
        raise SystemExit(f"ipucnn {' '.join(args)} ended with {code}")
    return out.getvalue()


def plan_data() -> Dict[str, Any]:
    """The numbers of the plan's page."""
    plan = json.loads(printed([*PLAN, "--json"]))
    kept = (
        "model",
        "splits",
        "predicted_images_per_s",
        "predicted_tick_s",
        "predicted_weight_update_s",
        "optimal",
    )
    memory = [sum(ipu["predicted_memory_bytes"].values()) for ipu in plan["ipus"]]
    return {**{key: plan[key] for key in kept}, "predicted_memory_bytes": memory}


def unet_data(run: Path) -> Dict[str, Any]:
    """What the sheet of the U-Net was drawn from: its options that count, and its last validation."""
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    metrics = report["validation"]
    return {"model": report["model"], **{key: metrics[key] for key in ("accuracy", "dice", "loss")}}


def screenshot(page: Path, picture: Path, size: Tuple[int, int]) -> None:
    """A page as Chromium shows it, without a network."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("pictures of pages need Chromium: apt-get install chromium")
    subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--window-size={size[0]},{size[1]}",
            f"--screenshot={picture}",
            page.resolve().as_uri(),
        ],
        check=True,
        stderr=subprocess.DEVNULL,
    )


def memory_and_pipeline(page: str) -> str:
    """The page of a plan with nothing but its title and the figures of memory and pipeline."""
    parts = r"(<main>.*?</h1>).*?(<h2>Memory</h2>.*?)<h2>Layers</h2>.*(</main>)"
    return re.sub(parts, r"\1\2\3", page, flags=re.DOTALL)


def terminal(name: str) -> str:
    """A command's output as SVG."""
    from rich.console import Console
    from rich.text import Text

    args = TERMINALS[name]
    console = Console(record=True, width=TERMINAL_WIDTH, file=io.StringIO())
    console.print(Text("$ ipucnn " + " ".join(args), style="bold"), soft_wrap=True)
    # A plan ends with a command that is as long as it is; the picture ends before it.
    shown, cut, _ = printed(args).partition("to train with it")
    console.print(Text(shown.rstrip() + ("\n..." if cut else "")), soft_wrap=True)
    return console.export_svg(title="ipucnn", code_format=SVG, unique_id=name)


def few_colours(picture: Any) -> Any:
    """A picture in 256 colours, with those that only a few pixels have, as a figure in green has."""
    from PIL import Image

    return picture.quantize(256, method=Image.MAXCOVERAGE, kmeans=5)


def labelled(panels: List[List[Any]]) -> Any:
    """Rows of image, truth, prediction and difference, half as large, with heads that a page's reader can read."""
    from PIL import Image, ImageDraw, ImageFont

    side, gap, text = 300, 8, 36
    whole = Image.new("RGB", (4 * side + 3 * gap, 2 * text + len(panels) * (side + gap)), "white")
    draw, font = ImageDraw.Draw(whole), ImageFont.load_default(size=22)
    for column, name in enumerate(("image", "truth", "prediction", "difference")):
        draw.text((column * (side + gap), 4), name, fill="black", font=font)
    for number, row in enumerate(panels):
        for column, panel in enumerate(row):
            place = (column * (side + gap), text + number * (side + gap))
            whole.paste(panel.resize((side, side), Image.LANCZOS), place)
    words = (("#56b4e9", "cell taken for membrane"), ("#d55e00", "membrane taken for cell"))
    for column, (colour, meaning) in enumerate(words):
        x, y = column * 2 * (side + gap), whole.height - text + 6
        draw.rectangle((x, y, x + 20, y + 20), fill=colour)
        draw.text((x + 30, y - 4), meaning, fill="black", font=font)
    return whole


def draw_terminals() -> None:
    """The pictures of terminals, which need neither Chromium nor a run."""
    os.environ["COLUMNS"] = str(TERMINAL_WIDTH)
    for name in TERMINALS:
        (IMAGES / f"{name}.svg").write_text(terminal(name), encoding="utf-8")


def main(args: List[str]) -> None:
    from PIL import Image

    run = Path(args[0])
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plan.html"
        printed([*PLAN, "--html", str(page)])
        screenshot(page, IMAGES / "plan-resnet50.png", (1140, 1900))
        short, top = Path(folder) / "short.html", IMAGES / "first-screen.png"
        short.write_text(memory_and_pipeline(page.read_text(encoding="utf-8")), encoding="utf-8")
        screenshot(short, top, (1140, 862))
        sheet = Path(folder) / "worst.png"
        printed(["evaluate", str(run), "--contact-sheet", str(sheet)])
        whole = Image.open(sheet).convert("RGB")
    plan = Image.open(IMAGES / "plan-resnet50.png").convert("RGB")
    # Images of the sheet are 504 pixels wide and high, columns 508 and rows 554 apart, below the legend and the heads.
    head, row, side = 94, 554, 504
    panels = [
        [
            whole.crop((x, head + r * row, x + side, head + r * row + side))
            for x in range(10, 10 + 4 * 508, 508)
        ]
        for r in range(SHEET_ROWS)
    ]
    few_colours(labelled(panels)).save(IMAGES / "unet-membranes.png", optimize=True)
    # Memory and pipeline of the plan, and below them image, prediction and errors: wide enough for a telephone.
    first, gap = Image.open(top).convert("RGB"), 12
    third = (first.width - 2 * gap) // 3
    height = round(0.62 * third)
    both = Image.new("RGB", (first.width, first.height + height), "white")
    both.paste(first, (0, 0))
    for place, panel in enumerate((0, 2, 3)):
        picture = panels[1][panel].resize((third, third), Image.LANCZOS).crop((0, 0, third, height))
        both.paste(picture, (place * (third + gap), first.height))
    few_colours(both).save(IMAGES / "first-screen.png", optimize=True)
    few_colours(plan).save(IMAGES / "plan-resnet50.png", optimize=True)
    draw_terminals()
    DATA.write_text(
        json.dumps({"plan-resnet50": plan_data(), "unet-membranes": unet_data(run)}, indent=1) + "\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
