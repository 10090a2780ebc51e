"""Every `$ ipucnn ...` line of the README and the docs is run, long commands only up to the resolved configuration."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# The files of `world` are not data sets, which verify-dataset reports, and too few for build-records.  There is no
# profile of an IPU, and no IPU.
EXIT_CODES = {
    **{"verify-dataset": 3, "build-records": 2, "profile": 3, "doctor --device ipu": 6},
    # Without the file, which Keras has to save.
    # Without the runs, which nobody trained here.
    "train --resume --run-dir runs/efficientnet-b0-digits": 3,
    "train --resume --run-dir runs/unet-imagemasks": 3,
    "train my_net.keras --weights my_net.keras --dataset imagefolder --dataset-path DIR --freeze backbone": 3,
}


def examples():
    for page in PAGES:
        lines = re.sub(r" \\\n +", " ", page.read_text(encoding="utf-8")).splitlines()
        for number, line in enumerate(lines, 1):
            match = re.match(r"\$ ipucnn (.*)", line)
            if match:
                yield pytest.param(match.group(1).split(" #")[0], id=f"{page.name}:{number}")


@pytest.fixture
def world(tmp_path):
    """Writes the files that the examples name, as far as resolving a configuration reads them."""
    cifar, mnist = tmp_path / "DATA" / "cifar-10-batches-py", tmp_path / "DATA" / "mnist"
    for folder, names in (
        (cifar, ["data_batch_1", "test_batch", "batches.meta"]),
        (mnist, [f"{s}-{k}-ubyte.gz" for s in ("train", "t10k") for k in ("images-idx3", "labels-idx1")]),
        (tmp_path / "DATA" / "isbi2012", ["train-volume.tif", "train-labels.tif"]),
        (tmp_path / "DIR" / "isbi2012", ["train-volume.tif", "train-labels.tif"]),
        (tmp_path / "DIR" / "train" / "cat", ["1.png"]),
        (tmp_path / "DIR" / "val" / "cat", ["1.png"]),
    ):
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_bytes(b"x")
    (tmp_path / "configs.yml").write_text("my_run:\n  model-name: lenet\n")
    page = (ROOT / "docs" / "own-networks.md").read_text(encoding="utf-8")
    for name, block in zip(("my_net.py", "my_data.py"), re.findall(r"```python\n(.*?)```", page, re.DOTALL)):
        (tmp_path / name).write_text(block)
    run = tmp_path / "runs" / "lenet-digits"
    run.mkdir(parents=True)
    (run / "config.yml").write_text("model-name: lenet\ndataset: digits\n")


@pytest.mark.parametrize("line", list(examples()))
def test_example(line, world, run):
    args = shlex.split(line)
    if args[0] in ("evaluate", "infer", "export", "diff", "plot"):
        args = [args[0], "--help"]
    if args[0] in ("train", "plan-splits", "benchmark") and "--print-config" not in args:
        args.append("--print-config")
    code, _, err = run(*args)
    assert code == EXIT_CODES.get(line, EXIT_CODES.get(args[0], 0)), err


def test_pages_have_examples():
    assert len(list(examples())) >= 8


@pytest.mark.parametrize(
    "page, line",
    [
        ("README.md", "plan-splits resnet50 --stages 4"),
        ("docs/unet.md", "plan-splits unet --config unet@isbi2012-pod4 --optimisations"),
    ],
)
def test_pages_show_the_printed_output(page, line, succeeds):
    text = (ROOT / page).read_text(encoding="utf-8")
    shown = text.rpartition(f"$ ipucnn {line}\n")[2].partition("\n```")[0].splitlines()
    assert len(shown) > 20
    out, _ = succeeds(*shlex.split(line), columns=None)
    printed = "\n".join(row.rstrip() for row in out.splitlines())
    for part in "\n".join(shown).split("\n..."):
        assert part in printed
