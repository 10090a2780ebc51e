"""benchmarks/paste_docs.py: the commands that it finds in a page, and the shape of an output."""

import pytest
from support.scripts import ROOT, load_script

paste_docs = load_script("benchmarks/paste_docs.py")

PAGE = """
<!-- paste: --num-epochs 2 -->
```console
$ ipucnn train lenet --seed 1    # a comment
run folder runs/lenet-digits; compiling
...
 time    1.5 s
$ ipucnn evaluate runs/lenet-digits
```

```console
pip install tensorboard
$ ipucnn train lenet --dataset-path DATA
```

<!-- paste: exit 3 -->
```console
$ ipucnn evaluate nothing
```

<!-- paste: first, export runs/lenet-digits --format onnx -->
<!-- paste: skip, it takes an hour -->

```console
$ ipucnn train unet \\
    --num-epochs 1 \\
    --seed 2
$ ipucnn models
```
"""


def test_commands_of_a_page():
    pasted = list(paste_docs.commands("x.md", PAGE))
    assert [one.args[:2] for one in pasted] == [
        ["train", "lenet"],
        ["evaluate", "runs/lenet-digits"],
        ["train", "lenet"],
        ["evaluate", "nothing"],
        ["export", "runs/lenet-digits"],
        ["train", "unet"],
        ["models"],
    ]
    written = PAGE.splitlines()
    assert pasted[5].args[-4:] == ["--num-epochs", "1", "--seed", "2"]
    for one in (pasted[0], pasted[3], pasted[5], pasted[6]):
        assert written[one.line - 1].startswith("$ ipucnn " + one.args[0])
    assert (
        pasted[0].options == ["--num-epochs", "2"] and pasted[0].args[-1] == "1" and len(pasted[0].shown) == 3
    )
    assert pasted[1].options == [] and pasted[1].shown == []
    assert pasted[2].skip and [one.code for one in pasted] == [0, 0, 0, 3, 0, 0, 0]
    assert pasted[4].skip == "" and pasted[5].skip == "it takes an hour"
    block = "<!-- paste: {} -->\n\n```console\n$ ipucnn benchmark lenet\n$ ipucnn train lenet\n```\n"
    for note, options in (
        ("benchmark --max-time 9", [["--max-time", "9"], []]),
        ("--seed 1", [[], ["--seed", "1"]]),
    ):
        assert [one.options for one in paste_docs.commands("x.md", block.format(note))] == options
    assert paste_docs.files("Write it to `net.py`:\n\n```python\nx = 1\n```\n") == {"net.py": "x = 1\n"}


@pytest.mark.parametrize(
    "shown, printed, absent",
    [
        (["accuracy  95.5% of 360"], "loss 1\naccuracy   7% of 1,360\n", None),
        (["time  1 min 4 s"], "time 3.1 s", None),
        (["accuracy  95.5% of 360 (best 96.0%)"], "accuracy 96% of 360", None),
        (["one", "...", "two"], "one\nother\ntwo", None),
        (["two", "one"], "one\ntwo", "one"),
        (["session: warm-up: 6 executions, 10.2 s, steady", " warm-up    6 executions", "b"], "b", None),
        (["warm-up is a phase"], "b", "warm-up is a phase"),
        (["saved in runs/x"], "saved in runs/y", "saved in runs/x"),
    ],
)
def test_shapes(shown, printed, absent):
    assert paste_docs.missing(shown, printed) == absent


def test_pages_have_commands_to_paste():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    pasted = [
        one for page in pages for one in paste_docs.commands(page.name, page.read_text(encoding="utf-8"))
    ]
    assert len([one for one in pasted if not one.skip]) > 40 and sum(len(one.shown) for one in pasted) > 200
