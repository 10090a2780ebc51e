"""Output of ``ipucnn verify-dataset``: the facts of each subset, the findings, and a contact sheet."""

import sys
from typing import Any, Dict, List, Tuple, Union

from ipucnn.datasets.verification.findings import ERROR, Finding
from ipucnn.datasets.verification.samples import Drawn
from ipucnn.datasets.verification.survey import SubsetFacts, Verification
from ipucnn.reports.console import NUMBER, TEXT, Side, console, plain_table, text_table, titled
from ipucnn.reports.sheets import ContactSheet, PanelSheet
from ipucnn.runs.images.outputs import class_colours, mask_picture, overlay
from ipucnn.text import counted

MOST_CLASSES = 20
"""Most classes that are listed one by one; if there are more, only the range of their sizes is shown."""
SHOWN_EXAMPLES = 5
"""Most examples of a finding in the table; the JSON has more."""


def print_verification(verification: Verification) -> None:
    """Prints the report as tables on stdout."""
    out = console(sys.stdout)
    out.print(titled(f"{verification.dataset} ({verification.location})", _facts(verification)))
    for line in _known_lines(verification):
        out.print(f" {line}", markup=False)
    if _known_lines(verification):
        out.print()
    if 1 < len(verification.class_names) <= MOST_CLASSES and any(
        subset.classes for subset in verification.subsets
    ):
        out.print(_classes(verification))
    if not verification.findings:
        out.print("no problems found", style="bold green")
        return
    out.print(titled(_verdict(verification), _findings(verification)))


def _verdict(verification: Verification) -> str:
    counts = ((verification.num_errors, "error"), (verification.num_warnings, "warning"))
    return " and ".join(counted(count, noun) for count, noun in counts if count)


def _facts(verification: Verification) -> Any:
    """Returns a table with a row per fact and a column per subset."""
    from rich.text import Text

    rows: List[Tuple[str, List[str]]] = [
        ("samples", [_samples(subset) for subset in verification.subsets]),
        ("looked at", [_looked_at(subset) for subset in verification.subsets]),
        ("pixels", [_pixels(subset) for subset in verification.subsets]),
        ("mean", [_numbers(subset.mean) for subset in verification.subsets]),
        ("deviation", [_numbers(subset.std) for subset in verification.subsets]),
    ]
    if len(verification.class_names) > MOST_CLASSES:
        rows.append(("classes", [_class_range(subset) for subset in verification.subsets]))
    columns: Dict[str, Side] = {"": TEXT, **{subset.name: TEXT for subset in verification.subsets}}
    return text_table(columns, ((Text(name, style="bold"), *cells) for name, cells in rows))


def _known_lines(verification: Verification) -> List[str]:
    """Returns a line for each comparison with published values or checksums."""
    lines = []
    known = verification.known
    if known.mean:
        std = f", deviation {_numbers(known.std)}" if known.std else ""
        lines.append(f"published of {' and '.join(known.measured_on)}: mean {_numbers(known.mean)}{std}")
    for kind, (right, wrong) in verification.checksums.items():
        lines.append(f"{kind}: {right:,} of {right + wrong:,} right")
    return lines


def _samples(subset: SubsetFacts) -> str:
    text = f"{subset.samples:,}"
    return text if subset.expected in (None, subset.samples) else f"{text} of {subset.expected:,}"


def _looked_at(subset: SubsetFacts) -> str:
    if not subset.samples:
        return ""
    text = "all" if subset.checked == subset.samples else f"{subset.checked:,}"
    broken = subset.checked - subset.readable
    return f"{text}, {broken:,} unreadable" if broken else text


def _pixels(subset: SubsetFacts) -> str:
    if subset.smallest is None or subset.largest is None:
        return ""
    sizes = ["x".join(map(str, size)) for size in (subset.smallest, subset.largest)]
    channels = {1: "grey", 3: "colour"}.get(subset.channels or 0, f"{subset.channels} channels")
    return f"{sizes[0]} {channels}" if sizes[0] == sizes[1] else f"{sizes[0]} to {sizes[1]} {channels}"


def _numbers(values: Tuple[float, ...]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def _class_range(subset: SubsetFacts) -> str:
    counts = [count for _, count in subset.classes]
    if not counts:
        return ""
    return f"{len(counts)}, of {min(counts):,} to {max(counts):,} {subset.class_unit}"


def _classes(verification: Verification) -> Any:
    """Returns a table of the samples, or the share of pixels, of each class."""
    pixels = any(subset.class_unit == "pixels" for subset in verification.subsets)
    columns: Dict[str, Side] = {"class": TEXT, **{subset.name: NUMBER for subset in verification.subsets}}
    rows = []
    for label, name in enumerate(verification.class_names):
        cells = [name]
        for subset in verification.subsets:
            counts = [count for _, count in subset.classes]
            share = f"{counts[label] / max(sum(counts), 1):.1%}" if counts else ""
            cells.append(share if pixels or not counts else f"{counts[label]:,}")
        rows.append(cells)
    return titled("pixels per class" if pixels else "samples per class", text_table(columns, rows))


def _findings(verification: Verification) -> Any:
    """Returns a table with a row per finding: the problem, its subset and count, and the remedy."""
    from rich.text import Text

    table = plain_table(show_lines=False)
    table.add_column("finding", no_wrap=True)
    table.add_column("subset", no_wrap=True)
    table.add_column("count", justify="right", no_wrap=True)
    table.add_column("what, where, and what to do", overflow="fold")
    for number, finding in enumerate(verification.findings):
        if number:
            table.add_row()
        colour = "red" if finding.severity == ERROR else "yellow"
        head = Text(f"{finding.severity}\n", style=f"bold {colour}")
        head.append(finding.code, style="bold")
        table.add_row(head, Text(finding.subset or "all"), Text(f"{finding.count:,}"), _body(finding))
    return table


def _body(finding: Finding) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    # The dashes have a separate column, so that wrapped lines continue below the example's beginning.
    examples = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
    examples.add_column(no_wrap=True)
    examples.add_column(overflow="fold")
    shown = list(finding.examples[:SHOWN_EXAMPLES])
    for text in [*shown, "..."] if len(finding.examples) > SHOWN_EXAMPLES else shown:
        examples.add_row(Text("-", style="dim"), Text(text, style="dim"))
    return Group(Text(finding.message), *([examples] if shown else []), Text(f"hint: {finding.hint}"))


class LabelSheet:
    """A contact sheet of samples with their labels; for segmentation sets, of images with masks as overlays.

    Args:
        task: "classification" or "segmentation".
    """

    def __init__(self, task: str) -> None:
        self._sheet: Union[ContactSheet, PanelSheet] = ContactSheet()
        if task != "classification":
            self._sheet = PanelSheet(("image", "mask", "overlay"), columns=3)
        self.save = self._sheet.save

    def is_drawn(self, position: int, total: int) -> bool:
        """Whether a sample at a position among a number of them is one of those shown."""
        self._sheet.expect(total)
        return self._sheet.wants(position)

    def take(self, item: Drawn) -> None:
        """Takes a sample that is shown."""
        sheet, sample = self._sheet, item.sample
        if isinstance(sheet, ContactSheet):
            result = {"image": sample.name, "label": sample.label, "problems": sample.problems}
            sheet.take(item.position, result, sample.image)
            return
        assert sample.mask is not None
        grey = sample.image[..., 0] if sample.image.shape[-1] == 1 else sample.image
        colours = class_colours(len(sample.class_names), sample.class_colours)
        tinted = overlay(sample.image, sample.mask, colours)
        if len(colours) == 2:
            sheet.heads = ("image", f"mask (white: {sample.class_names[1]})", "overlay")
        sheet.legend = tuple(zip(colours, sample.class_names))[1:]
        pictures = [grey, mask_picture(sample.mask, colours), tinted]
        sheet.add(f"{sample.name}: {sample.label}", pictures, sample.problems)

    def __len__(self) -> int:
        return len(self._sheet)

    @property
    def num_undrawn(self) -> int:
        """Number of samples that were chosen to be shown but could not be read."""
        return self._sheet.num_shown - len(self)
