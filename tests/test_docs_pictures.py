"""The numbers behind the pictures of the documentation are current; docs/pictures.py draws them."""

import json
import re
from html import unescape

import pytest
from support.scripts import ROOT, load_script

from ipucnn import cli

DOCS = ROOT / "docs"
pictures = load_script("docs/pictures.py")
DATA = json.loads(pictures.DATA.read_text(encoding="utf-8"))


def test_the_picture_of_the_plan_is_current(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    today, shown = pictures.plan_data(), DATA["plan-resnet50"]
    assert set(today) == set(shown)
    for key, value in shown.items():
        assert today[key] == (
            value if isinstance(value, (str, bool)) or key == "splits" else pytest.approx(value)
        )


@pytest.mark.parametrize("name", sorted(pictures.TERMINALS))
def test_pictures_of_terminals_are_current(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(pictures.TERMINAL_WIDTH))

    def words(svg):
        return unescape(" ".join(re.findall(r"<text[^>]*>([^<]*)</text>", svg))).split()

    shown = (DOCS / "images" / f"{name}.svg").read_text(encoding="utf-8")
    assert words(shown) == words(pictures.terminal(name)), "run: make pictures"
    assert len(words(shown)) > 100


@pytest.mark.slow
def test_the_picture_of_the_unet_is_current(tmp_path):
    run = tmp_path / "unet"
    assert cli.run(["train", "unet", "--seed", "1", "--run-dir", str(run), "--device", "cpu"]) == 0
    today, shown = pictures.unet_data(run), DATA["unet-membranes"]
    assert today["model"] == shown["model"]
    for figure in ("accuracy", "dice"):
        assert today[figure] == pytest.approx(shown[figure], abs=0.01)
