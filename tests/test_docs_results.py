"""The figures in the README and the pages are those of results/*.csv."""

import csv
import math
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def rows(name, **values):
    """Returns the rows of a CSV file that have these values."""
    with open(ROOT / "results" / f"{name}.csv", newline="", encoding="utf-8") as handle:
        return [row for row in csv.DictReader(handle) if all(row[k] == str(v) for k, v in values.items())]


def session(side, network="efficientnet-b0", micro_batch=8, column="images_per_s"):
    (row,) = rows("host_session", network=network, micro_batch=micro_batch, side=side)
    return float(row[column])


def preset(name):
    """Returns mean and standard deviation, in per cent, and the number of seeds."""
    (row,) = rows("presets", preset=name)
    return 100 * float(row["mean"]), 100 * float(row["std"] or 0), len(row["seeds"].split())


def errors():
    """Returns by how much predictions are off, as logarithms, each by constants fitted without its network."""
    return [abs(math.log(float(row["ratio_without_this_network"]))) for row in rows("throughput")]


def mean_factor():
    return math.exp(sum(errors()) / len(errors()))


def worst_factor():
    return math.exp(max(errors()))


def planned(model, column):
    """Returns a figure of plan-splits for 4 and for 16 stages."""
    return [float(rows("plan_search", model=model, stages=stages)[0][column]) for stages in (4, 16)]


def most_planned(column):
    return max(float(row[column]) for row in rows("plan_search") if row["tick_ms"])


def killed(column, of_workers=False):
    """Returns a sum over the campaigns of one process, or of several."""
    return sum(int(row[column]) for row in rows("kills") if (row["configuration"] == "workers") == of_workers)


def shared(rate):
    """Returns the per cent of the time that processes on two hosts spent on gradients."""
    (row,) = rows("cluster", network="cifar_resnet8", rate=rate)
    return 100 * float(row["share"])


# Page, the words around the figures, and the figures.
FIGURES = [
    ("README.md", r"trained at ([\d,]+) images/s with micro-batches of 8", lambda: [session("session")]),
    (
        "README.md",
        r"Keras `fit` reached\s([\d,]+), and ([\d,]+) with batches as large",
        lambda: [session("keras"), session("keras, fused")],
    ),
    ("README.md", r"PyTorch reached ([\d,]+) with the whole", lambda: [session("torch")]),
    ("README.md", r"killed (\d+) training runs (\d+) times", lambda: [killed("runs"), killed("kills")]),
    ("README.md", r"several processes (\d+) times", lambda: [killed("kills", of_workers=True)]),
    ("docs/cluster.md", r"spent (\d+) % of its time on gradients at 100 Mbit/s", lambda: [shared("100mbit")]),
    ("docs/cluster.md", r"and (\d+) % at 1 Gbit/s", lambda: [shared("1gbit")]),
    ("README.md", r"factor of ([\d.]+) on average", lambda: [mean_factor()]),
    ("docs/planner.md", r"and by ([\d.]+) \(at most ([\d.]+)\)", lambda: [mean_factor(), worst_factor()]),
    (
        "docs/planner.md",
        r"took ([\d.]+) s in 4 stages and ([\d.]+) s in 16",
        lambda: planned("resnet50", "processor_s"),
    ),
    (
        "docs/planner.md",
        r"The slowest, efficientnet-b7 in 16 stages, took ([\d.]+) s",
        lambda: [most_planned("processor_s")],
    ),
    ("docs/planner.md", r"efficientnetv2-l in 4\sstages, took (\d+) MB", lambda: [most_planned("memory_mb")]),
    ("README.md", r"geometric mean over (\d+) published", lambda: [len(rows("throughput"))]),
    ("README.md", r"such as (\d+) % on 20,000 images", lambda: preset("cifar_resnet8@cifar10")[:1]),
    ("README.md", r"accuracy was ([\d.]+) ± ([\d.]+) %", lambda: preset("efficientnet-b0@digits")[:2]),
    (
        "docs/unet.md",
        r"short preset have ([\d.]+) ± ([\d.]+) after 52 epochs",
        lambda: [value / 100 for value in preset("unet@isbi2012 in 5 folds")[:2]],
    ),
]


def equals(text, value):
    """Says whether a printed number is the value, rounded to the digits it shows."""
    digits = len(text.partition(".")[2])
    return f"{value:,.{digits}f}" == text


@pytest.mark.parametrize("page, words, figures", FIGURES, ids=[words for _, words, _ in FIGURES])
def test_figures_of_a_page_are_the_measured_ones(page, words, figures):
    (printed,) = re.findall(words, (ROOT / page).read_text(encoding="utf-8"))
    printed = [printed] if isinstance(printed, str) else printed
    values = figures()
    assert len(printed) == len(values)
    for text, value in zip(printed, values):
        assert equals(text, value), (text, value)


def test_every_row_says_how_it_was_measured():
    files = list((ROOT / "results").glob("*.csv"))
    assert len(files) >= 8
    for path in files:
        if path.stem not in ("published", "published_fits", "public_documents"):
            for row in rows(path.stem):
                assert (
                    row["command"].startswith("python benchmarks/") and row["revision"] and row["conditions"]
                )


CLAIM = re.compile(
    r"\b(took|reached|spent (?=\d)|killed|trained at|accuracy was|factor of)\b[^.|]*?\d[\d.,]*"
)
# Sentences whose figures are not in results/ yet, by the words around them.
WITHOUT_ROW = (
    ("README.md", r"run took 209 s of processor time"),
    ("docs/datasets.md", r"plain tf.data took 1.20 times"),
    ("docs/host-session.md", r"took 7.8 times|took\sa second"),
    ("docs/unet.md", r"`--no-augment --num-epochs 20` reached 0.9497"),
    ("docs/planner.md", r"a factor of 2 "),  # priors and simulations, not measurements
)


def test_every_measured_figure_has_a_row():
    """A sentence that says what something took or reached is among the figures above, or is listed as an exception."""
    known = [(page, words) for page, words, _ in FIGURES] + list(WITHOUT_ROW)
    seen, absent = set(), []
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        page, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        for part in (r"<!-- [\w ]+: begin.*?end -->", r"^ *```.*?^ *```", r"^\|.*?$"):
            text = re.sub(part, "", text, flags=re.DOTALL | re.MULTILINE)
        for claim in CLAIM.finditer(text):
            around = text[max(0, claim.start() - 60) : claim.end() + 60]
            matching = [words for other, words in known if other == page and re.search(words, around)]
            seen.update((page, words) for words in matching)
            absent += [] if matching else [f"{page}: {claim.group()}"]
    assert not absent
    assert not set(WITHOUT_ROW) - seen, "these sentences are gone"
