"""What is gathered while a data set is verified, and what follows from it.

A :class:`Survey` hears of the problems that readers have with files, and of every sample.  It keeps no pixels: of each
sample 16 bytes of a digest, its number and its label, and of all of them together a histogram.  From these
:meth:`Survey.finish` concludes what no single sample tells: counts, balance, duplicates, samples that are in both
subsets, and a mean that is not the published one.
"""

import contextlib
import hashlib
import math
import threading
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from ipucnn.aliases import Numbers, PlainDict
from ipucnn.datasets.base import moments, parse_limit
from ipucnn.datasets.hashing import LIMIT, permutation
from ipucnn.datasets.problems import Problems
from ipucnn.datasets.verification.findings import CODES, ERROR, EVAL, IMBALANCE, TRAIN, WARNING, Finding
from ipucnn.datasets.verification.samples import Block, Look, Sample, SubsetSurvey, Watcher
from ipucnn.errors import DataError
from ipucnn.filesystem import file_size, is_file, open_regular, shown
from ipucnn.text import printable

SCHEMA_VERSION = 1
"""Of the JSON report; grows when a key changes its meaning or goes away."""
MOST_EXAMPLES = 10
"""Samples or files that a finding names; the count says how many there are."""
_WHY_NONE = {code for code, kind in CODES.items() if kind.severity == ERROR} - {"fewer-samples"} | {
    "no-eval-subset"
}
ENDINGS = {
    "JPEG": (".jpg", ".jpeg"),
    "MPO": (".jpg", ".jpeg"),
    "PNG": (".png",),
    "BMP": (".bmp",),
    "DIB": (".bmp",),
    "GIF": (".gif",),
    "WEBP": (".webp",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm"),
}
"""Of file names, by Pillow's name of a format."""
USUAL_MODES = ("grey", "colour")
ALIKE: Dict[str, Tuple[str, Callable[[str], bool]]] = {
    "mode": ("odd-mode", USUAL_MODES.__contains__),
    "size": ("wrong-shape", bool),
    "pixels": ("wrong-mode", bool),
    "mask": ("mask-values", lambda values: "," not in values),
}
"""Properties that all samples should have in common: the finding of those that differ from most, and what is usual."""
LIMIT_OPTIONS = {TRAIN: "--limit-train", EVAL: "--limit-eval"}


_READ_BYTES = 2**20


@dataclass(frozen=True)
class Known:
    """What is published about a set.

    Attributes:
        counts: samples by subset.
        mean, std: per channel in 0..255 units of the subsets in ``measured_on``; empty where nobody published them.
        tolerance: how far a whole set may be from them: they are published rounded, or of other crops.
        measured_on: the subsets they were computed from.
        severity: of a difference.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    mean: Tuple[float, ...] = ()
    std: Tuple[float, ...] = ()
    tolerance: float = 0.05
    measured_on: Tuple[str, ...] = (TRAIN,)
    severity: str = ERROR


@dataclass(frozen=True)
class SubsetFacts:
    """What a subset is, for the report; the attributes are the keys of the JSON (docs/verify-dataset.md)."""

    name: str
    samples: int
    expected: Optional[int]
    checked: int
    readable: int
    smallest: Optional[Tuple[int, int]]
    largest: Optional[Tuple[int, int]]
    channels: Optional[int]
    class_unit: str
    classes: Tuple[Tuple[str, int], ...]
    mean: Tuple[float, ...]
    std: Tuple[float, ...]


@dataclass(frozen=True)
class Verification:
    """The result: what the set is, and what is wrong with it.

    Attributes:
        checksums: how many of each kind were compared: kind -> (right, wrong).
    """

    dataset: str
    task: str
    location: str
    class_names: Tuple[str, ...]
    allow_partial: bool
    subsets: Tuple[SubsetFacts, ...]
    known: Known
    checksums: Mapping[str, Tuple[int, int]]
    findings: Tuple[Finding, ...]

    @property
    def num_errors(self) -> int:
        return sum(finding.severity == ERROR for finding in self.findings)

    @property
    def num_warnings(self) -> int:
        return len(self.findings) - self.num_errors

    def to_dict(self) -> PlainDict:
        """Plain data for JSON; docs/verify-dataset.md describes the keys."""
        subsets = [
            {**asdict(subset), "classes": [{"name": name, "count": count} for name, count in subset.classes]}
            for subset in self.subsets
        ]
        published = {key: getattr(self.known, key) for key in ("mean", "std", "measured_on")}
        return {
            "schema_version": SCHEMA_VERSION,
            "dataset": self.dataset,
            "task": self.task,
            "location": self.location,
            "allow_partial": self.allow_partial,
            "verdict": "errors" if self.num_errors else "warnings" if self.findings else "ok",
            "num_errors": self.num_errors,
            "num_warnings": self.num_warnings,
            "class_names": self.class_names,
            "subsets": subsets,
            "published": published if self.known.mean else None,
            "checksums": {
                kind: {"right": right, "wrong": wrong} for kind, (right, wrong) in self.checksums.items()
            },
            "findings": [asdict(finding) for finding in self.findings],
        }


class Survey(Problems):
    """Gathers everything about a data set.

    Args:
        dataset: its name.
        task: "classification" or "segmentation".
        location: where it lies.
        known: what is published about it.
        watcher: what hears of the progress.
        limits: by subset, as given with ``--limit-train`` and ``--limit-eval``.
        image_size: (height, width) of the network's input, where it was given.
        max_pixels: what an image may have at most.

    Attributes:
        class_names, class_colours: set by the walk over the set's files.
        shape: the (height, width) of all samples, if known; likewise.
        is_published: all files that hold samples have their published checksums; set by the reader.
        checksums: kind -> [right, wrong].
    """

    def __init__(
        self,
        dataset: str,
        task: str,
        location: str,
        known: Known,
        watcher: Watcher,
        limits: Mapping[str, Optional[str]],
        image_size: Optional[Tuple[int, int]],
        max_pixels: int,
    ) -> None:
        self.dataset, self.task, self.location, self.known = dataset, task, location, known
        self.image_size, self.max_pixels = image_size, max_pixels
        self.class_names: Tuple[str, ...] = ()
        self.class_colours: Tuple[Tuple[int, int, int], ...] = ()
        self.shape: Optional[Tuple[int, int]] = None
        self.is_published = False
        self.checksums: Dict[str, List[int]] = {}
        self._checking = threading.Lock()
        self.subsets = {name: SubsetSurvey(name) for name in (TRAIN, EVAL)}
        self._watcher, self._limits = watcher, limits
        self._found: Dict[Tuple[str, Optional[str]], Tuple[int, List[str]]] = {}
        self._severities: Dict[str, str] = {}
        # By property, value and subset: how many samples, and the first of them.
        self._tallies: Dict[str, Dict[str, Dict[str, Tuple[int, List[str]]]]] = {}
        # Of the few samples that are drawn: by subset and number, and by subset, name and property its value.
        self._drawn: Dict[Tuple[str, int], Sample] = {}
        self._values: Dict[Tuple[str, str, str], str] = {}
        self._done = self._total = 0

    # -- what readers say -------------------------------------------------------------------------------------

    def find(self, code: str, subset: Optional[str], example: str = "", count: int = 1) -> None:
        before, examples = self._found.get((code, subset), (0, []))
        if example and len(examples) < MOST_EXAMPLES:
            examples.append(printable(example))
        self._found[code, subset] = (before + count, examples)

    def refuse(self, error: DataError, subset: Optional[str], example: str) -> None:
        self.find(error.code, subset, example)

    @contextlib.contextmanager
    def noting(self, subset: Optional[str], name: str, path: Path, said: str = "") -> Iterator[None]:
        try:
            yield
        except DataError as error:
            self.note_error(subset, name, error, path, said)

    def note_error(
        self, subset: Optional[str], name: str, error: DataError, path: Optional[Path] = None, said: str = ""
    ) -> None:
        """Turns what a reader refused into a finding; of the arguments :meth:`noting` knows."""
        if path is not None and _is_empty(path):
            self.find("empty-file", subset, name)
            return
        reason = error.message
        names = [] if path is None else [printable(str(path)), str(path), shown(path)]
        for prefix in (said, *(what + p for p in names for what in ("image ", "mask ", "cannot read ", ""))):
            if prefix and reason.startswith(prefix):
                reason = reason[len(prefix) :]
                break
        reason = reason.strip(" :,")
        self.find(error.code, subset, f"{name}: {reason}" if reason else name)

    def check(self, kind: str, is_right: bool) -> None:
        """Counts a checksum that was compared; from any thread."""
        with self._checking:
            self.checksums.setdefault(kind, [0, 0])[0 if is_right else 1] += 1

    def compare(self, subset: Optional[str], path: Path, kind: str, published: str) -> None:
        """Compares a file with the published checksum, and notes a difference.

        Args:
            subset: it is in.
            path: of the file.
            kind: MD5 or SHA-256.
            published: hexadecimal.
        """
        digest = hashlib.new(kind.lower().replace("-", ""))
        with open_regular(path) as file:
            for chunk in iter(lambda: file.read(_READ_BYTES), b""):
                digest.update(chunk)
        is_right = digest.hexdigest() == published
        self.check(f"{kind} of files", is_right)
        self.is_published &= is_right
        if not is_right:
            self.find("not-published", subset, f"{printable(path.name)}: {kind} {digest.hexdigest()}")

    def _tally(self, what: str, value: str, subset: str, example: str) -> None:
        """Counts a property that all samples should have in common; see :meth:`_check_alike`."""
        entry = self._tallies.setdefault(what, {}).setdefault(value, {})
        count, examples = entry.setdefault(subset, (0, []))
        if len(examples) < MOST_EXAMPLES:
            examples.append(example)
        entry[subset] = (count + 1, examples)
        if self._watcher.wants(self._done):
            self._values[what, subset, example] = value

    def _check_alike(self) -> None:
        """Finds the samples whose property is not the one that most samples have."""
        for what, values in self._tallies.items():
            code, is_usual = ALIKE[what]
            sums = {value: sum(count for count, _ in found.values()) for value, found in values.items()}
            allowed = filter(is_usual, values)
            common = max(allowed, key=lambda value: sums[value], default=None)
            for value, by_subset in values.items():
                if value == common:
                    continue
                for subset, (count, examples) in by_subset.items():
                    instead = f"{value}, not {common}" if common is not None else value
                    for number, example in enumerate(examples):
                        rest = 0 if number else count - len(examples)
                        self.find(code, subset, f"{example}: {instead}", 1 + rest)
            for (subset, number), sample in self._drawn.items():
                if self._values.get((what, subset, sample.name), common) != common:
                    self._frame(subset, number, code)

    def _frame(self, subset: str, number: int, code: str) -> None:
        """Tells a sample that is drawn, if this one is, of a problem that was found after it was read."""
        sample = self._drawn.get((subset, number))
        if sample is not None and code not in sample.problems:
            sample.problems.append(code)

    def expect(self, sizes: Mapping[str, int]) -> None:
        """Says how many samples each subset has, before any is handed in; limits are applied to these numbers."""
        for number, name in enumerate((TRAIN, EVAL)):
            size, subset = sizes.get(name, 0), self.subsets[name]
            subset.num_stored = size
            kept = parse_limit(self._limits.get(name), size, LIMIT_OPTIONS[name]) if size else 0
            if kept < size:
                subset.chosen = np.zeros(size, bool)
                subset.chosen[permutation(size, 0, LIMIT, number)[:kept]] = True
            self._total += kept
        self._watcher.on_total(self._total)

    def wants(self, position: int) -> bool:
        """Whether the sample at a position, of those that are looked at, is one for the contact sheet."""
        return self._watcher.wants(position)

    def left_out(self) -> None:
        """A sample cannot be looked at, for its labels are not there."""
        self._advance(1)

    def passed(self, subset: str, count: int = 1) -> None:
        """So many samples were looked at that could not be read."""
        self.subsets[subset].checked += count
        self._advance(count)

    def _advance(self, count: int) -> None:
        self._done += count
        self._watcher.on_progress(min(self._done, self._total), self._total)

    def take(self, block: Block, look: Look) -> None:
        """Takes samples of one size, and checks each of them by itself."""
        subset, into = block.subset, self.subsets[block.subset]
        masks, labels = look.masks, look.labels
        if masks is not None:
            into.class_unit = "pixels"
            labels = [zlib.crc32(np.ascontiguousarray(mask).data) for mask in masks]
        into.record(block.numbers, labels, look.measured, look.size)
        if masks is None:
            legal = [label for label in labels if 0 <= label < len(self.class_names)]
            into.count_classes(np.bincount(np.array(legal, np.int64), minlength=len(self.class_names)))
        common = self._check_together(block, look)
        for k, number in enumerate(block.numbers):
            problems = list(common)
            if masks is not None:
                problems += self._check_mask(block, number, masks[k])
            elif not 0 <= labels[k] < len(self.class_names):
                problems.append(self._check_label(block, number, labels[k]))
            if look.measured.constant[k] and look.size[0] * look.size[1] > 1:
                self.find("constant-image", subset, into.name_of(number))
                problems.append("constant-image")
            if self._watcher.wants(self._done + k):
                assert look.images is not None
                mask = None if masks is None else masks[k]
                label = self._class_name(labels[k]) if mask is None else self._rarest(mask)
                name, classes = into.name_of(number), (self.class_names, self.class_colours)
                sample = Sample(name, label, problems, look.images[k], mask, *classes)
                self._drawn[subset, number] = sample
                self._watcher.on_sample(self._done + k, sample)
        into.checked += len(block.numbers)
        self._advance(len(block.numbers))

    def _check_together(self, block: Block, look: Look) -> List[str]:
        """What is odd about the file of samples, and about their size: the codes."""
        found = []

        def note(code: str, text: str) -> None:
            self.find(code, block.subset, f"{block.name}: {text}", len(block.numbers))
            found.append(code)

        shown_size = f"{look.size[0]}x{look.size[1]}"
        if self.shape is not None and tuple(look.size) != self.shape:
            note("wrong-shape", f"{shown_size}, not {self.shape[0]}x{self.shape[1]}")
        least = self.image_size if look.masks is None and self.image_size is not None else (0, 0)
        if look.size[0] < least[0] or look.size[1] < least[1]:
            note("small-image", shown_size)
        for what, value in look.alike.items():
            self._tally(what, value, block.subset, block.name)
        if look.alike.get("mode", "grey") not in USUAL_MODES:
            found.append("odd-mode")
        if look.format:
            ending = block.path.suffix.lower() if block.path is not None else ""
            if ending and ending not in ENDINGS.get(look.format, (ending,)):
                note("wrong-format", look.format)
            if look.frames > 1:
                note("several-frames", str(look.frames))
        return found

    def _check_label(self, block: Block, number: int, label: int) -> str:
        """Notes a label that is no class: the code."""
        if label < 0 and block.path is not None:
            return "unknown-class"  # of a folder, which was told
        name, last = self.subsets[block.subset].name_of(number), len(self.class_names) - 1
        self.find("label-range", block.subset, f"{name}: label {label}, classes are 0 to {last}")
        return "label-range"

    def _check_mask(self, block: Block, number: int, mask: np.ndarray) -> List[str]:
        into, num_classes, found = self.subsets[block.subset], len(self.class_names), []
        counts: Numbers = np.bincount(mask.reshape(-1), minlength=num_classes)
        into.count_classes(counts[:num_classes])
        name = into.name_of(number)
        if counts[num_classes:].any():
            self.find(
                "label-range", into.name, f"{name}: class {len(counts) - 1} of {num_classes} in its mask"
            )
            found.append("label-range")
        if (counts > 0).sum() == 1:
            self.find("mask-constant", into.name, f"{name}: all {self._class_name(int(counts.argmax()))}")
            found.append("mask-constant")
        return found

    def _class_name(self, label: int) -> str:
        return self.class_names[label] if 0 <= label < len(self.class_names) else f"label {label}"

    def _rarest(self, mask: np.ndarray) -> str:
        """The rarest class of a mask with its share."""
        counts: Numbers = np.bincount(mask.reshape(-1), minlength=len(self.class_names))
        rarest = int(counts[: len(self.class_names)].argmin())
        return f"{counts[rarest] / mask.size:.1%} {self.class_names[rarest]}"

    # -- what follows -----------------------------------------------------------------------------------------

    def finish(self, allow_partial: bool) -> Verification:
        """Compares what was gathered, and gives the report."""
        self._check_alike()
        for subset in self.subsets.values():
            self._check_counts(subset)
            self._check_balance(subset)
        self._check_classes()
        self._check_same()
        self._check_statistics()
        findings = [
            self._finding(code, subset, count, examples, allow_partial)
            for (code, subset), (count, examples) in self._found.items()
        ]
        order = list(CODES)
        findings.sort(key=lambda f: (f.severity != ERROR, order.index(f.code), f.subset != TRAIN))
        return Verification(
            self.dataset,
            self.task,
            self.location,
            self.class_names,
            allow_partial,
            tuple(self._facts(subset) for subset in self.subsets.values()),
            self.known,
            {kind: (right, wrong) for kind, (right, wrong) in self.checksums.items()},
            tuple(findings),
        )

    def _finding(
        self, code: str, subset: Optional[str], count: int, examples: List[str], allow_partial: bool
    ) -> Finding:
        kind = CODES[code]
        severity = self._severities.get(code, kind.severity)
        hint = kind.hint + (", or pass --allow-partial" if kind.partial else "")
        nothing = not any(len(one.numbers) for one in self.subsets.values())
        if kind.partial and allow_partial and not nothing:
            severity, hint = WARNING, kind.hint
        if kind.as_published and self.is_published:
            severity, hint = WARNING, "the set was published so: nothing is wrong with this copy"
        return Finding(code, severity, subset, count, kind.message, tuple(examples), hint)

    def _facts(self, subset: SubsetSurvey) -> SubsetFacts:
        mean: Tuple[float, ...] = ()
        std: Tuple[float, ...] = ()
        if subset.histogram is not None:
            mean, std = moments(subset.histogram)
        counts: Numbers = subset.class_counts if len(subset.numbers) else []
        return SubsetFacts(
            subset.name,
            subset.num_stored,
            self.known.counts.get(subset.name),
            subset.checked,
            len(subset.numbers),
            subset.smallest,
            subset.largest,
            None if subset.histogram is None else len(subset.histogram),
            subset.class_unit,
            tuple((name, int(count)) for name, count in zip(self.class_names, counts)),
            tuple(round(value, 3) for value in mean),
            tuple(round(value, 3) for value in std),
        )

    def _check_counts(self, subset: SubsetSurvey) -> None:
        expected = self.known.counts.get(subset.name)
        if not subset.num_stored:
            # What was found says more, where it says why there are none.
            if not any(name in (subset.name, None) and code in _WHY_NONE for code, name in self._found):
                self.find("missing-subset", subset.name, f"{self.location} has no samples for it")
        elif expected is not None and subset.num_stored != expected:
            code = "fewer-samples" if subset.num_stored < expected else "more-samples"
            self.find(
                code,
                subset.name,
                f"{subset.num_stored:,} of {expected:,}",
                abs(expected - subset.num_stored),
            )

    def _check_balance(self, subset: SubsetSurvey) -> None:
        counts: Numbers = subset.class_counts[: len(self.class_names)]
        # Of a part that a limit chose, a class may be absent, or rare, by chance.
        if subset.chosen is not None or not counts.any() or subset.class_unit == "pixels":
            return
        for label in np.nonzero(counts == 0)[0]:
            self.find("empty-class", subset.name, self.class_names[label])
        present = counts[counts > 0]
        if present.max() > IMBALANCE * present.min():
            most = counts.argmax()
            least = np.where(counts > 0, counts, counts.max()).argmin()
            self.find(
                "imbalance",
                subset.name,
                f"{self.class_names[most]}: {counts[most]:,}, {self.class_names[least]}: {counts[least]:,}",
            )

    def _check_classes(self) -> None:
        train = self.subsets[TRAIN]
        # Of masks both subsets are counted; what a limit left out may be of other classes.
        counted = self.subsets.values() if train.class_unit == "pixels" else [train]
        if any(subset.chosen is not None for subset in counted):
            return
        if len(train.numbers) > 1 and train.class_unit == "samples" and (train.class_counts > 0).sum() == 1:
            self.find("nothing-to-learn", TRAIN, self.class_names[int(train.class_counts.argmax())])
        if train.class_unit == "pixels":
            counts: Numbers = (
                train.class_counts + self.subsets[EVAL].class_counts
                if len(self.subsets[EVAL].class_counts) == len(train.class_counts)
                else train.class_counts
            )
            if counts.any() and (counts > 0).sum() == 1:
                self.find("nothing-to-learn", None, self.class_names[int(counts.argmax())])

    def _check_same(self) -> None:
        """Samples that are pixel for pixel the same: in one subset, in both, and with different labels."""
        train, evaluation = self.subsets[TRAIN], self.subsets[EVAL]
        num_train = len(train.numbers)
        digests: np.ndarray = np.frombuffer(bytes(train.digests + evaluation.digests), np.uint64).reshape(
            -1, 2
        )
        if len(digests) < 2:
            return
        labels: np.ndarray = np.concatenate([np.array(s.labels, np.int64) for s in (train, evaluation)])
        order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: equal ones stay in their order
        ordered = digests[order]
        same = (ordered[1:] == ordered[:-1]).all(axis=1)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
        groups = [order[start : end + 1] for start, end in zip(edges[::2], edges[1::2])]
        for group in sorted(groups, key=lambda members: int(members[0])):
            parts = {TRAIN: group[group < num_train], EVAL: group[group >= num_train]}
            for name, members in parts.items():
                if len(members) > 1:
                    self.find("duplicate", name, self._same(members), len(members) - 1)
                    self._frame_all(members, "duplicate")
            if len(parts[TRAIN]) and len(parts[EVAL]):
                pair = [parts[EVAL][0], parts[TRAIN][0]]
                self.find("leakage", EVAL, self._same(pair, with_subset=True), len(parts[EVAL]))
                self._frame_all(group, "leakage")
            if (labels[group] != labels[group[0]]).any():
                other = group[np.flatnonzero(labels[group] != labels[group[0]])[0]]
                is_both = len(parts[TRAIN]) > 0 and len(parts[EVAL]) > 0
                subset = None if is_both else TRAIN if len(parts[TRAIN]) else EVAL
                shown = self._same([group[0], other], with_subset=is_both, with_label=True)
                self.find("conflict", subset, shown, len(group))
                self._frame_all(group, "conflict")

    def _frame_all(self, members: Sequence[int], code: str) -> None:
        for member in members if self._drawn else ():
            name, at = self._place(member)
            self._frame(name, self.subsets[name].numbers[at], code)

    def _place(self, member: int) -> Tuple[str, int]:
        """The subset of one of all samples that were read, those for training first, and its place there."""
        num_train = len(self.subsets[TRAIN].numbers)
        return (TRAIN, member) if member < num_train else (EVAL, member - num_train)

    def _same(self, members: Sequence[int], with_subset: bool = False, with_label: bool = False) -> str:
        """Two samples of a group as an example names them, and how many more there are."""
        texts = []
        for member in members[:2]:
            name, at = self._place(member)
            subset = self.subsets[name]
            text = subset.name_of(subset.numbers[at])
            if with_label and subset.class_unit == "samples":
                label = subset.labels[at]
                known = 0 <= label < len(self.class_names)
                text += f" ({self.class_names[label] if known else label})"
            texts.append(f"{name} {text}" if with_subset else text)
        more = f" and {len(members) - 2} more" if len(members) > 2 else ""
        return " = ".join(texts) + more

    def _check_statistics(self) -> None:
        train, evaluation = self.subsets[TRAIN], self.subsets[EVAL]
        measured = [self.subsets[name] for name in self.known.measured_on]
        histograms = [subset.histogram for subset in measured if subset.histogram is not None]
        if self.known.mean and histograms and len({len(h) for h in histograms}) == 1:
            self._compare_with_known(measured, np.sum(histograms, axis=0))
        both = [s.histogram for s in (train, evaluation) if s.histogram is not None]
        if (
            len(both) == 2
            and len(both[0]) == len(both[1])
            and min(len(train.numbers), len(evaluation.numbers)) >= 10
        ):
            means = [np.array(moments(histogram)[0]) for histogram in both]
            apart = float(np.abs(means[0] - means[1]).max())
            # Photographs and slices differ a lot: a tenth of the range is more than any honest split shows.
            if apart > 25.5 and apart > 6 * math.hypot(train.standard_error(), evaluation.standard_error()):
                shown = " and ".join(_numbers(mean) for mean in means)
                self.find("shift", None, f"mean of train and eval: {shown} of 255")

    def _compare_with_known(self, measured: Sequence[SubsetSurvey], histogram: np.ndarray) -> None:
        mean, std = moments(histogram)
        num = sum(len(subset.numbers) for subset in measured)
        expected = sum(self.known.counts.get(subset.name, 0) for subset in measured)
        tolerance = self.known.tolerance
        if num != expected:
            # Of a part of the set the mean differs by chance; five standard errors are beyond it.
            tolerance += 5 * max(subset.standard_error() for subset in measured)
        wrong = [
            f"{what} {_numbers(got)}, published {_numbers(should)} (0 to 255)"
            for what, got, should in (("mean", mean, self.known.mean), ("deviation", std, self.known.std))
            if should
            and (len(got) != len(should) or any(abs(a - b) > tolerance for a, b in zip(got, should)))
        ]
        for text in wrong:
            self._severities["statistics"] = self.known.severity
            self.find("statistics", TRAIN if len(measured) == 1 else None, text)


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def _is_empty(path: Path) -> bool:
    with contextlib.suppress(DataError):
        return is_file(path) and file_size(path) == 0
    return False
