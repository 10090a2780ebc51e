"""Collects problems and measurements while a data set is verified, and makes the report.

A :class:`Survey` receives readers' problems with files, and every sample.  It keeps no pixels of the samples, except of
the few that are drawn: only a digest of 16 bytes, the number and the label of each sample, and a histogram of all
samples.  From these, :meth:`Survey.finish` checks properties of the whole set: counts, balance, duplicates, samples in
both subsets, and the published mean.
"""

import contextlib
import math
import threading
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple, Union

import numpy as np

from ipucnn.aliases import Numbers, PlainDict
from ipucnn.datasets import formats
from ipucnn.datasets.base import file_digest, moments, parse_limit
from ipucnn.datasets.hashing import LIMIT, permutation
from ipucnn.datasets.limits import UNBALANCED
from ipucnn.datasets.problems import Problem
from ipucnn.datasets.segmentation.patches import IGNORED
from ipucnn.datasets.verification import stored
from ipucnn.datasets.verification.findings import CODES, ERROR, EVAL, TRAIN, WARNING, Finding
from ipucnn.datasets.verification.samples import Decoded, Drawn, IsDrawn, Sample, SubsetSamples, SubsetSurvey
from ipucnn.errors import DataError
from ipucnn.events import Event, Progress
from ipucnn.text import printable

SCHEMA_VERSION = 1
"""Version of the JSON report; it increases when a key changes its meaning or is removed."""
MOST_EXAMPLES = 10
"""The most samples or files that a finding names; its count covers all of them."""
_WHY_NONE = {code for code, kind in CODES.items() if kind.severity == ERROR} - {"fewer-samples"} | {
    "no-eval-subset"
}
ENDINGS = {**formats.ENDINGS, "MPO": formats.ENDINGS["JPEG"], "DIB": formats.ENDINGS["BMP"]}
"""Endings of file names, by Pillow's name of a format or of a variant of one."""
ALIKE: Dict[str, Tuple[str, Callable[[str], bool]]] = {
    **stored.ALIKE,
    "pixels": ("wrong-mode", bool),
    "values": ("mask-values", lambda values: "," not in values),
}
"""Properties that all samples should have in common, each with the code of the finding about samples that differ from
the most common value, and a function that returns whether a value may be that common value."""
LIMIT_OPTIONS = {TRAIN: "--limit-train", EVAL: "--limit-eval"}


@dataclass(frozen=True)
class Known:
    """Published facts of a set.

    Attributes:
        counts: number of samples by subset.
        mean, std: per channel in 0..255 units, of the subsets in ``measured_on``; empty if they are not published.
        tolerance: the largest allowed difference of a whole set; published values are rounded, or of other crops.
        measured_on: the subsets that mean and std were computed from.
        severity: severity of a larger difference.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    mean: Tuple[float, ...] = ()
    std: Tuple[float, ...] = ()
    tolerance: float = 0.05
    measured_on: Tuple[str, ...] = (TRAIN,)
    severity: str = ERROR


@dataclass(frozen=True)
class SubsetFacts:
    """The facts of a subset for the report; the attributes are the keys of the JSON (docs/verify-dataset.md)."""

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
    """The result of a verification: facts of the set, and findings.

    Attributes:
        choice: what of the set's folder serves for what; empty if nothing was chosen.
        checksums: numbers of compared checksums by kind: kind -> (right, wrong).
    """

    dataset: str
    task: str
    location: str
    choice: str
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
        """Returns plain data for JSON; docs/verify-dataset.md describes the keys."""
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
            "choice": self.choice,
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


@dataclass
class Survey:
    """Collects problems and measurements of a data set.

    Attributes:
        dataset, task, location: name, task ("classification" or "segmentation") and location of the set.
        known: published facts of the set.
        is_drawn: chooses the samples to draw.
        limits: values of ``--limit-train`` and ``--limit-eval`` by subset.
        image_size: (height, width) of the network's input, if given.
        validation_fraction: the share of each class that is held out of a folder without train/ and val/.
        max_pixels: the most pixels of an image.
        choice: see :class:`Verification`.
        class_names, class_colours: names and colours of the classes, set by the readers.
        shape: (height, width) of all samples, if known; set by the readers.
        is_published: whether all files with samples have their published checksums; set by the readers.
        checksums: kind -> [right, wrong].
    """

    dataset: str
    task: str
    location: str
    known: Known
    is_drawn: IsDrawn
    limits: Mapping[str, Optional[str]]
    image_size: Optional[Tuple[int, int]]
    validation_fraction: float
    max_pixels: int
    choice: str = ""
    class_names: Tuple[str, ...] = ()
    class_colours: Tuple[Tuple[int, int, int], ...] = ()
    shape: Optional[Tuple[int, int]] = None
    is_published: bool = False
    checksums: Dict[str, List[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.subsets = {name: SubsetSurvey(name) for name in (TRAIN, EVAL)}
        self._checking = threading.Lock()
        self._findings: Dict[Tuple[str, Optional[str]], Tuple[int, List[str], Set[str]]] = {}
        # The few samples that are drawn, by subset and number.
        self._drawn: Dict[Tuple[str, int], Sample] = {}
        self._done = self._total = 0

    # -- problems that readers report --------------------------------------------------------------------------

    def find(
        self, code: str, subset: Optional[str], example: str = "", count: int = 1, hint: str = ""
    ) -> None:
        """Adds a problem to the finding of its code and subset; see :class:`Problem`.

        The finding has the hint that all its problems have, or that of its code.
        """
        before, examples, hints = self._findings.get((code, subset), (0, [], set()))
        if example and len(examples) < MOST_EXAMPLES:
            examples.append(printable(example))
        self._findings[code, subset] = (before + count, examples, hints | {hint})

    def report(self, problem: Problem) -> None:
        """Adds a reader's problem."""
        if problem.path is not None and _is_empty(problem.path):
            self.find("empty-file", problem.subset, problem.name)
            return
        text = f"{problem.name}: {problem.reason}" if problem.reason else problem.name
        # Training's own hint says more than that of the code, except for parts that --allow-partial leaves out.
        hint = "" if problem.error is None else problem.error.hint or ""
        if CODES[problem.code].partial and (problem.code != "unpaired" or "--allow-partial" in hint):
            hint = ""
        self.find(problem.code, problem.subset, text, problem.count, hint)

    def check(self, kind: str, is_right: bool) -> None:
        """Counts a compared checksum; any thread may call it."""
        with self._checking:
            self.checksums.setdefault(kind, [0, 0])[0 if is_right else 1] += 1

    def compare(self, subset: Optional[str], path: Path, kind: str, published: str) -> None:
        """Compares a file with the published checksum, and records a difference; skips unreadable files.

        Args:
            subset: the subset of the file.
            path: path of the file.
            kind: MD5 or SHA-256.
            published: the checksum in hexadecimal.
        """
        try:
            digest = file_digest(path, kind.lower().replace("-", ""))
        except DataError:  # the reader of the file reports it
            self.is_published = False
            return
        is_right = digest == published
        self.check(f"{kind} of files", is_right)
        self.is_published &= is_right
        if not is_right:
            self.find("not-published", subset, f"{printable(path.name)}: {kind} {digest}")

    # -- samples ----------------------------------------------------------------------------------------------

    def expect(self, by_subset: Mapping[str, SubsetSamples]) -> None:
        """Sets the samples of each subset, before any is decoded, and applies the limits to them."""
        for name, subset in self.subsets.items():
            subset.class_counts = np.zeros(len(self.class_names), np.int64)
            if name in by_subset:
                samples = subset.stored = by_subset[name]
                subset.num_stored = samples.size if samples.num_stored is None else samples.num_stored
                subset.chosen = self.chosen(name, samples.size)
                self._total += int(subset.chosen.sum())

    def chosen(self, name: str, size: int) -> np.ndarray:
        """Returns the samples of a subset that a limit keeps: bool [size]."""
        kept = parse_limit(self.limits.get(name), size, LIMIT_OPTIONS[name]) if size else 0
        chosen: np.ndarray = np.zeros(size, bool)
        chosen[permutation(size, 0, LIMIT, 0 if name == TRAIN else 1)[:kept]] = True
        return chosen

    def groups(self) -> Iterator[Tuple[str, List[int], List[int]]]:
        """Yields the subset and the numbers of samples to decode in one call, and those of them that are drawn."""
        position = 0
        for name, subset in self.subsets.items():
            single = (range(number, number + 1) for number in range(subset.stored.size))
            for group in single if subset.stored.groups is None else subset.stored.groups():
                numbers = (group.start + np.flatnonzero(subset.chosen[group.start : group.stop])).tolist()
                if numbers:
                    drawn = [n for k, n in enumerate(numbers) if self.is_drawn(position + k, self._total)]
                    yield name, numbers, drawn
                position += len(numbers)

    def take(
        self, name: str, numbers: Sequence[int], decoded: Union[Decoded, Problem, None]
    ) -> Iterator[Event]:
        """Records samples of one size, checks each of them by itself, and yields those to draw.

        Args:
            name: name of the subset.
            numbers: numbers of the samples.
            decoded: the decoded samples in order; the problem if they cannot be decoded, or None if it is already a
                finding.
        """
        subset, position = self.subsets[name], self._done
        subset.checked += len(numbers)
        self._done += len(numbers)
        yield Progress("verifying", self._done, self._total)
        if isinstance(decoded, Problem):
            self.report(decoded)
        if not isinstance(decoded, Decoded):
            return
        num_classes = len(self.class_names)
        masks = decoded.labels if decoded.labels.ndim == 3 else None
        if masks is not None:
            subset.class_unit = "pixels"
            labels = [zlib.crc32(np.ascontiguousarray(mask).data) for mask in masks]
            counts = [np.bincount(mask[mask != IGNORED], minlength=num_classes) for mask in masks]
        else:
            labels = decoded.labels.tolist()
            counts = [np.bincount([n for n in labels if 0 <= n < num_classes], minlength=num_classes)]
        subset.class_counts += sum(one[:num_classes] for one in counts)
        subset.record(numbers, labels, decoded)
        for k, number in enumerate(numbers):
            if self.is_drawn(position + k, self._total) and (masks is None or self.class_names):
                assert decoded.images is not None
                mask = None if masks is None else masks[k]
                label = self._class_name(labels[k]) if mask is None else self._rarest(counts[k])
                names = (self.class_names, self.class_colours)
                sample = Sample(subset.stored.name(number), label, [], decoded.images[k], mask, *names)
                self._drawn[name, number] = sample
                yield Drawn(position + k, self._total, sample)
        self._check_together(subset, numbers, decoded)
        for k, number in enumerate(numbers):
            if masks is not None:
                self._check_mask(subset, number, counts[k])
            elif not 0 <= labels[k] < num_classes:
                self._note_label(subset, number, labels[k])
            if decoded.measured.constant[k] and decoded.measured.size != (1, 1):
                self._note(subset, "constant-image", [number])

    def _note(self, subset: SubsetSurvey, code: str, numbers: Sequence[int], text: str = "") -> None:
        """Adds a finding about samples, and marks those of them that are drawn."""
        name = subset.stored.name(numbers[0]) + (f" and {len(numbers) - 1} more" if len(numbers) > 1 else "")
        self.find(code, subset.name, f"{name}: {text}" if text else name, len(numbers))
        self._mark(code, subset.name, numbers)

    def _mark(self, code: str, name: str, numbers: Sequence[int]) -> None:
        for number in numbers if self._drawn else ():
            sample = self._drawn.get((name, number))
            if sample is not None and code not in sample.problems:
                sample.problems.append(code)

    def _check_together(self, subset: SubsetSurvey, numbers: Sequence[int], decoded: Decoded) -> None:
        """Checks the size and the file of samples."""
        height, width = decoded.measured.size
        if self.shape is not None and (height, width) != self.shape:
            self._note(
                subset, "wrong-shape", numbers, f"{height}x{width}, not {self.shape[0]}x{self.shape[1]}"
            )
        least = self.image_size if decoded.labels.ndim == 1 and self.image_size is not None else (0, 0)
        if height < least[0] or width < least[1]:
            self._note(subset, "small-image", numbers, f"{height}x{width}")
        path = subset.stored.path(numbers[0])
        ending = "" if path is None else path.suffix.lower()
        if ending and ending not in ENDINGS.get(decoded.format, (ending,)):
            self._note(subset, "wrong-format", numbers, decoded.format)
        if decoded.frames > 1:
            self._note(subset, "several-frames", numbers, str(decoded.frames))
        if decoded.deep:
            self._note(subset, "stretched", numbers, decoded.deep)
        if decoded.has_other_colours:
            self._note(subset, "colour-profile", numbers, "")

    def _note_label(self, subset: SubsetSurvey, number: int, label: int) -> None:
        """Reports a label that is no class."""
        text = f"label {label}, classes are 0 to {len(self.class_names) - 1}"
        self._note(subset, "label-range", [number], text)

    def _check_mask(self, subset: SubsetSurvey, number: int, counts: np.ndarray) -> None:
        """Checks a mask by its number of pixels of each class."""
        num_classes = len(self.class_names)
        if counts[num_classes:].any():
            text = f"class {len(counts) - 1} of {num_classes} in its mask"
            self._note(subset, "label-range", [number], text)
        if (counts > 0).sum() == 1:
            self._note(subset, "mask-constant", [number], f"all {self._class_name(int(counts.argmax()))}")

    def _class_name(self, label: int) -> str:
        return self.class_names[label] if 0 <= label < len(self.class_names) else f"label {label}"

    def _rarest(self, counts: np.ndarray) -> str:
        """Returns share and name of the rarest class of a mask."""
        if not counts.any():
            return "no pixel that counts"
        rarest = int(counts[: len(self.class_names)].argmin())
        return f"{counts[rarest] / counts.sum():.1%} {self.class_names[rarest]}"

    # -- conclusions ------------------------------------------------------------------------------------------

    def finish(self, allow_partial: bool) -> Verification:
        """Checks the properties of the whole set, and returns the report."""
        self._check_alike()
        for subset in self.subsets.values():
            self._check_counts(subset)
            self._check_balance(subset)
        self._check_classes()
        self._check_same()
        self._check_statistics()
        findings = [
            self._finding(
                code, subset, hints.pop() if len(hints) == 1 else "", count, examples, allow_partial
            )
            for (code, subset), (count, examples, hints) in self._findings.items()
        ]
        order = list(CODES)
        findings.sort(key=lambda f: (f.severity != ERROR, order.index(f.code), f.subset != TRAIN))
        return Verification(
            self.dataset,
            self.task,
            self.location,
            self.choice,
            self.class_names,
            allow_partial,
            tuple(map(self._facts, self.subsets.values())),
            self.known,
            {kind: (right, wrong) for kind, (right, wrong) in self.checksums.items()},
            tuple(findings),
        )

    def _finding(
        self,
        code: str,
        subset: Optional[str],
        hint: str,
        count: int,
        examples: List[str],
        allow_partial: bool,
    ) -> Finding:
        kind = CODES[code]
        severity = self.known.severity if code == "statistics" else kind.severity
        hint = hint or kind.hint + (", or pass --allow-partial" if kind.partial else "")
        is_empty = not any(len(one.numbers) for one in self.subsets.values())
        if kind.partial and allow_partial and not is_empty:
            severity, hint = WARNING, kind.hint
        if kind.as_published and self.is_published:
            severity, hint = WARNING, "the set was published so: nothing is wrong with this copy"
        return Finding(code, severity, subset, count, kind.message, tuple(examples), hint)

    def _facts(self, subset: SubsetSurvey) -> SubsetFacts:
        sizes, histogram = subset.sizes, subset.histogram
        mean, std = ((), ()) if histogram is None else moments(histogram)
        counts: Numbers = subset.class_counts if len(subset.numbers) else []
        return SubsetFacts(
            name=subset.name,
            samples=subset.num_stored,
            expected=self.known.counts.get(subset.name),
            checked=subset.checked,
            readable=len(subset.numbers),
            smallest=min(sizes, key=sizes.__getitem__, default=None),
            largest=max(sizes, key=sizes.__getitem__, default=None),
            channels=None if histogram is None else len(histogram),
            class_unit=subset.class_unit,
            classes=tuple((name, int(count)) for name, count in zip(self.class_names, counts)),
            mean=tuple(round(value, 3) for value in mean),
            std=tuple(round(value, 3) for value in std),
        )

    def _check_alike(self) -> None:
        """Reports samples with a property that differs from that of most samples."""
        for key, (code, is_usual) in ALIKE.items():
            counts = Counter(value for subset in self.subsets.values() for value in subset.alike.get(key, ()))
            common = max(filter(is_usual, filter(None, counts)), key=counts.__getitem__, default=None)
            for subset in self.subsets.values():
                for number, value in zip(subset.numbers, subset.alike.get(key, ())):
                    if value not in ("", common):
                        text = value if common is None else f"{value}, not {common}"
                        self._note(subset, code, [number], text)

    def _check_counts(self, subset: SubsetSurvey) -> None:
        expected = self.known.counts.get(subset.name)
        if not subset.num_stored:
            # Other findings already explain why there are no samples.
            if not any(name in (subset.name, None) and code in _WHY_NONE for code, name in self._findings):
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
        counts: Numbers = subset.class_counts
        # In a part that a limit chose, a class may be absent or rare by chance.
        if not subset.is_whole or not counts.any() or subset.class_unit == "pixels":
            return
        for label in np.nonzero(counts == 0)[0]:
            self.find("empty-class", subset.name, self.class_names[label])
        present = counts[counts > 0]
        if present.max() >= UNBALANCED * present.min():
            most = counts.argmax()
            least = np.where(counts > 0, counts, counts.max()).argmin()
            self.find(
                "imbalance",
                subset.name,
                f"{self.class_names[most]}: {counts[most]:,}, {self.class_names[least]}: {counts[least]:,}",
            )

    def _check_classes(self) -> None:
        train, evaluation = self.subsets[TRAIN], self.subsets[EVAL]
        # Masks are counted in both subsets.  Samples that a limit leaves out may have other classes.
        has_masks = train.class_unit == "pixels"
        counted = [train, evaluation] if has_masks else [train]
        if not all(subset.is_whole for subset in counted):
            return
        counts: Numbers = sum(subset.class_counts for subset in counted)
        if (counts > 0).sum() == 1 and (has_masks or len(train.numbers) > 1):
            self.find(
                "nothing-to-learn", None if has_masks else TRAIN, self._class_name(int(counts.argmax()))
            )

    def _check_same(self) -> None:
        """Reports samples with identical pixels: in one subset, in both, and with different labels."""
        train, evaluation = self.subsets[TRAIN], self.subsets[EVAL]
        num_train = len(train.numbers)
        raw = bytes(train.digests + evaluation.digests)
        digests: np.ndarray = np.frombuffer(raw, np.uint64).reshape(-1, 2)
        if len(digests) < 2:
            return
        labels: np.ndarray = np.concatenate([np.array(s.labels, np.int64) for s in (train, evaluation)])
        order = np.lexsort((digests[:, 1], digests[:, 0]))  # a stable sort keeps the order of equal samples
        ordered = digests[order]
        same = (ordered[1:] == ordered[:-1]).all(axis=1)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
        groups = [order[start : end + 1] for start, end in zip(edges[::2], edges[1::2])]
        for group in sorted(groups, key=lambda members: int(members[0])):
            parts = {TRAIN: group[group < num_train], EVAL: group[group >= num_train]}
            is_both = all(map(len, parts.values()))
            for name, members in parts.items():
                if len(members) > 1:
                    self._note_same("duplicate", name, members, members, len(members) - 1)
            if is_both:
                pair = [parts[EVAL][0], parts[TRAIN][0]]
                self._note_same("leakage", EVAL, pair, group, len(parts[EVAL]))
            others = group[labels[group] != labels[group[0]]]
            if len(others):
                subset = None if is_both else TRAIN if len(parts[TRAIN]) else EVAL
                self._note_same("conflict", subset, [group[0], others[0]], group, len(group))

    def _note_same(
        self, code: str, name: Optional[str], members: Sequence[int], group: Sequence[int], count: int
    ) -> None:
        """Adds a finding about samples with the same pixels, numbered through both subsets.

        Args:
            code, name, count: code, subset and count of the finding.
            members: samples of the example; it names the first two, and counts the others.
            group: all samples with these pixels, which are marked.  If they are in both subsets, the example says which
                sample is in which.
        """
        places = [self._place(member) for member in group]
        is_both = places[0][0] is not places[-1][0]
        texts = []
        for subset, at in map(self._place, members[:2]):
            text = subset.stored.name(subset.numbers[at])
            if code == "conflict" and subset.class_unit == "samples":
                label = subset.labels[at]
                text += f" ({self.class_names[label] if 0 <= label < len(self.class_names) else label})"
            texts.append(f"{subset.name} {text}" if is_both else text)
        more = f" and {len(members) - 2} more" if len(members) > 2 else ""
        self.find(code, name, " = ".join(texts) + more, count)
        for subset, at in places:
            self._mark(code, subset.name, [subset.numbers[at]])

    def _place(self, member: int) -> Tuple[SubsetSurvey, int]:
        """Returns the subset and the index in it of one of all decoded samples, numbered with training first."""
        num_train = len(self.subsets[TRAIN].numbers)
        return (
            (self.subsets[TRAIN], member) if member < num_train else (self.subsets[EVAL], member - num_train)
        )

    def _check_statistics(self) -> None:
        measured = [self.subsets[name] for name in self.known.measured_on]
        histograms = [subset.histogram for subset in measured if subset.histogram is not None]
        if self.known.mean and histograms and len({len(h) for h in histograms}) == 1:
            self._compare_with_known(measured, np.sum(histograms, axis=0))
        both = list(self.subsets.values())
        histograms = [subset.histogram for subset in both if subset.histogram is not None]
        is_alike = len(histograms) == 2 and len(histograms[0]) == len(histograms[1])
        if is_alike and min(len(subset.numbers) for subset in both) >= 10:
            means = [np.array(moments(histogram)[0]) for histogram in histograms]
            difference = float(np.abs(means[0] - means[1]).max())
            # The means of photographs and slices vary.  A random split does not differ by a tenth of the range.
            if difference > 25.5 and difference > 6 * math.hypot(*(s.standard_error() for s in both)):
                self.find(
                    "shift", None, f"mean of train and eval: {' and '.join(map(_numbers, means))} of 255"
                )

    def _compare_with_known(self, measured: Sequence[SubsetSurvey], histogram: np.ndarray) -> None:
        known, tolerance = self.known, self.known.tolerance
        num = sum(len(subset.numbers) for subset in measured)
        if num != sum(known.counts.get(subset.name, 0) for subset in measured):
            # The mean of a part of the set differs by chance, but not by five standard errors.
            tolerance += 5 * max(subset.standard_error() for subset in measured)
        for statistic, actual, published in zip(
            ("mean", "deviation"), moments(histogram), (known.mean, known.std)
        ):
            is_right = len(actual) == len(published) and all(
                abs(a - b) <= tolerance for a, b in zip(actual, published)
            )
            if published and not is_right:
                text = f"{statistic} {_numbers(actual)}, published {_numbers(published)} (0 to 255)"
                self.find("statistics", TRAIN if len(measured) == 1 else None, text)


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def _is_empty(path: Path) -> bool:
    with contextlib.suppress(OSError):  # the reader of the file reports it
        return path.is_file() and path.stat().st_size == 0
    return False
