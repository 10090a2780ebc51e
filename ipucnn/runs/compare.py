"""Reads and compares run folders: the state and results of each, and the differences of two.

Everything is read from the files of the folders.  They may come from other people, be damaged, or be written at this
moment.  Nothing here imports TensorFlow.
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import msgspec

from ipucnn.aliases import PlainDict, PlainValue
from ipucnn.config.options import SPECS, RunConfig
from ipucnn.datasets.formats import TFDS_PREFIX
from ipucnn.documents import (
    MAX_RECORD_BYTES,
    BadDocument,
    Finite,
    Natural,
    NotJson,
    load_record,
    mismatch,
)
from ipucnn.errors import DataError
from ipucnn.filesystem import (
    entries,
    is_locked,
    read_text,
)
from ipucnn.models.registry import natural_key
from ipucnn.runs.folder import (
    CONFIG,
    METRICS,
    TIMINGS,
    RunFolder,
    check_one_run,
    folds_of,
    is_run,
    seconds_of,
)
from ipucnn.runs.records import Report
from ipucnn.text import counted, printable, quoted

SORTS = ("name", "age", "accuracy", "time", "size")
FIGURES = ("dice", "accuracy")
"""Figures by which the best validation is chosen: the first of them that the validations have."""
# Versions and hardware, as ``provenance.environment`` notes them.
_ENVIRONMENT = ("ipucnn", "python", "tensorflow", "keras", "numpy", "platform", "cpu", "threads", "variables")
# Entries of a history row that identify it, and are not results.
_WHEN = ("event", "weight_updates")


@dataclass(frozen=True)
class RunRecord:
    """The content of a run folder; files that are absent count as empty.

    Attributes:
        path: the folder.
        config: the resolved configuration.
        program: the content of ``program.json``.
        history: the rows of ``metrics.jsonl``, each with ``event`` and ``weight_updates``.
        timings: the rows of ``timings.jsonl``.
        report: the content of ``report.json``; None for a run that did not finish.
        processes: the entries of ``environment.json``: the processes that wrote the run, the latest last.
        is_locked: whether another process is writing the run.
        unreadable: the number of lines of ``metrics.jsonl`` that are not rows, without a half-written last line.
    """

    path: Path
    config: RunConfig
    program: Mapping[str, Any]
    history: List[PlainDict]
    timings: List[PlainDict]
    report: Optional[Report]
    processes: List[PlainDict]
    is_locked: bool
    unreadable: int = 0

    @property
    def folder(self) -> RunFolder:
        """The run folder."""
        return RunFolder(self.path, self.config.checkpoint_dir)

    @property
    def facts(self) -> Mapping[str, Any]:
        """The facts in a checkpoint of the run; empty without a readable checkpoint."""
        return self.folder.checkpoint_facts()

    @property
    def warnings(self) -> List[str]:
        """Warnings about the files, one sentence each."""
        if not self.unreadable:
            return []
        lines = f"{counted(self.unreadable, 'line')} of {self.path / METRICS}"
        return [f"{lines} cannot be read, and {'is' if self.unreadable == 1 else 'are'} left out"]

    @property
    def state(self) -> str:
        """One of finished, ended early, running and stopped."""
        if self.report is not None:
            return "ended early" if self.report.ended_early else "finished"
        return "running" if self.is_locked else "stopped"

    @property
    def weight_updates(self) -> int:
        """The number of finished weight updates, according to the history."""
        return max((row["weight_updates"] for row in self.history), default=0)

    @property
    def environment(self) -> Mapping[str, Any]:
        """The environment of the process that wrote last."""
        return self.processes[-1] if self.processes else {}

    def rows(self, event: str) -> List[PlainDict]:
        """Returns the rows of one kind of event."""
        return [row for row in self.history if row["event"] == event]

    def best(self) -> Optional[Tuple[str, float]]:
        """Returns the best figure of all validations as (name, value); None without a validation."""
        rows = self.rows("validation")
        for name in FIGURES:
            values = [row[name] for row in rows if not mismatch(row.get(name), Finite)]
            if values:
                return name, max(values)
        return None

    def class_names(self) -> Sequence[str]:
        """Returns the names of the classes; none if neither report nor checkpoint says them."""
        of_report = () if self.report is None else self.report.dataset.class_names
        return of_report or self.facts.get("class_names", ())

    def dice_class(self) -> Optional[str]:
        """Returns the class whose Dice validations report: class 1 of two.  None for more classes: Dice is a mean."""
        names = self.class_names()
        return printable(names[1]) if len(names) == 2 else None

    def seconds(self, event: Optional[str] = None) -> float:
        """Returns the seconds that executions and validations took in all processes.

        Args:
            event: the only kind of event to count; None: all kinds.
        """
        rows = [row for row in self.timings if event in (None, row.get("event"))]
        return sum(row["wall_s"] for row in rows if not mismatch(row.get("wall_s"), Finite))


def read_run(path: Path) -> RunRecord:
    """Reads a run folder.

    Raises:
        DataError: the folder is not a run, or it is a cross-validation, whose folds are runs; or a file is damaged or
            cannot be read.
    """
    check_one_run(path)
    folder = RunFolder(path)
    lines = _lines(path / METRICS)
    history = [row for row in map(_object, lines) if _is_row(row)]
    config = folder.read_config()
    return RunRecord(
        path=path,
        config=config,
        program=folder.read_program(),
        history=history,
        timings=[row for row in map(_object, _lines(path / TIMINGS)) if row],
        report=folder.read_report(),
        processes=folder.processes(),
        is_locked=is_locked(path),
        # The text after the last line break is not a whole line yet.
        unreadable=sum(bool(line) and not _is_row(_object(line)) for line in lines[:-1]),
    )


class _Row(msgspec.Struct):
    event: str
    weight_updates: Natural


def _is_row(row: PlainDict) -> bool:
    return not mismatch(row, _Row)


def _lines(path: Path) -> List[str]:
    """Returns the lines of a file with one JSON value per line; the last item is the text after the last line break."""
    return read_text(path, MAX_RECORD_BYTES).split("\n") if path.exists() else []


def _object(line: str) -> PlainDict:
    """Returns the JSON object of a line; an empty dict if there is none."""
    try:
        value = load_record(line)
    except (NotJson, BadDocument):
        return {}
    return value if isinstance(value, dict) else {}


def find_runs(folder: Path) -> List[Path]:
    """Returns the run folders in a folder, with the folds of cross-validations, or the folder itself if it is a run.

    Raises:
        DataError: the folder does not exist, or is a file.
    """
    if folder.is_file():
        raise DataError(
            f"{folder} is a file, not a folder with runs in it", f"ipucnn runs {quoted(folder.parent)}"
        )
    if not folder.is_dir():
        usual = Path("runs")
        has_usual = folder != usual and usual.is_dir()
        raise DataError(
            f"folder {folder} does not exist",
            "list the runs in runs: ipucnn runs"
            if has_usual
            else "train a first run: ipucnn train toy_model",
        )
    return list(_runs_in(folder, depth=2))


def runs_of(path: Path) -> List[Path]:
    """Returns the folds of a cross-validation, or the path itself if it is none."""
    return (folds_of(path) if path.is_dir() else []) or [path]


def _runs_in(folder: Path, depth: int) -> Iterator[Path]:
    folds = folds_of(folder)
    if (folder / CONFIG).is_file() and not folds:
        if is_run(folder):
            yield folder
    elif depth:
        for path in folds or sorted(entries(folder), key=lambda path: natural_key(path.name)):
            if path.is_dir() and not path.is_symlink():
                yield from _runs_in(path, depth - 1)


def summary(run: RunRecord) -> PlainDict:
    """Returns the row of a run for ``ipucnn runs``.

    Returns:
        ``run``, ``model``, ``dataset`` and ``state``; ``figure`` and ``value`` of the best validation, or None;
        ``class``, whose Dice that is (None for a mean over classes, and for accuracy); ``weight_updates`` of
        ``num_weight_updates``; ``time_s``, ``size_bytes``, ``started`` and ``age_s``.
    """
    best = run.best()
    started = run.environment.get("started")
    began = seconds_of(started)
    epochs, per_epoch = run.program.get("num_epochs"), run.program.get("weight_updates_per_epoch")
    has_total = not mismatch([epochs, per_epoch], List[Natural])
    return {
        "run": str(run.path),
        "model": run.config.model_name,
        "dataset": data_label(run.config.dataset, run.config.dataset_path),
        "state": run.state,
        "figure": None if best is None else best[0],
        "value": None if best is None else best[1],
        "class": None if best is None or best[0] != "dice" else run.dice_class(),
        "weight_updates": _updates_done(run),
        "num_weight_updates": int(epochs or 0) * int(per_epoch or 0) if has_total else None,
        "time_s": run.seconds(),
        "size_bytes": run.folder.size_bytes,
        "started": started if isinstance(started, str) else None,
        "age_s": None if began is None else max(0.0, time.time() - began),
    }


def data_label(name: Optional[str], path: Path) -> Optional[str]:
    """Returns the name of a data set in a path; for a folder or a file, the last part of its path."""
    if name in ("imagefolder", "imagemasks"):
        name = os.path.abspath(path)
    return name if name is None or name.startswith(TFDS_PREFIX) else os.path.basename(os.path.normpath(name))


def _updates_done(run: RunRecord) -> int:
    """Returns the weight updates up to the last row, or up to the last checkpoint if a signal saved a later one."""
    saved = {} if run.report is not None else run.facts
    return max(run.weight_updates, int(saved.get("weight_updates", 0)))


def sort_runs(rows: List[PlainDict], by: str) -> List[PlainDict]:
    """Sorts rows of :func:`summary` in one of the orders ``SORTS``.

    By name, the order stays as it is; by age, the youngest run is first; otherwise the largest value is first.
    """
    if by == "name":
        return rows
    key = {"age": "age_s", "accuracy": "value", "time": "time_s", "size": "size_bytes"}[by]

    def order(row: PlainDict) -> Tuple[bool, float]:
        value = row[key]
        return value is None, 0.0 if value is None else value if by == "age" else -value

    return sorted(rows, key=order)


# --- two runs


def diff_runs(first: RunRecord, second: RunRecord) -> PlainDict:
    """Compares two runs.

    Returns:
        ``options``, ``program``, ``versions`` and ``data``: the differences, name -> [first value, second value].
        ``places``: the same for options that do not change the result: where files lie, and how the work is done.
        ``history``: the first row that differs, or None; see :func:`first_difference`.
        ``compared``: the number of rows in both histories.
        ``rows``: the number of rows in each.
        ``warnings``: sentences.
        ``final``: the figures at the end, name -> [first, second].
        ``equal``: whether options, Program and data are known to be the same, and both histories are readable and the
        same to their ends.
    """
    named = {spec.key: spec for spec in SPECS if spec.in_yaml}
    options = {
        key: [_plain(getattr(run.config, spec.name)) for run in (first, second)]
        for key, spec in named.items()
    }
    networks = [run.facts.get("network") for run in (first, second)]
    contents = [network.get("sha256") for network in networks if isinstance(network, dict)]
    if len(contents) == 2:  # the digest comes from a checkpoint
        options["the network's file"] = contents
    differing = _differing(options)
    without_effect = [key for key in differing if key in named and not named[key].decides_result]
    places = {key: differing.pop(key) for key in without_effect}
    keys = sorted({*first.program, *second.program})
    program = _differing({key: [run.program.get(key) for run in (first, second)] for key in keys})
    versions = {key: [run.environment.get(key) for run in (first, second)] for key in _ENVIRONMENT}
    versions["sources"] = [run.environment.get("sources_sha256") for run in (first, second)]
    data = _differing({"data set": [_data(run)[0] for run in (first, second)]})
    digests = [_data(run)[1] for run in (first, second)]
    if None not in digests:
        data.update(_differing({"SHA-256 of the samples": digests}))
    rows, compared = first_difference(first.history, second.history)
    counts = [len(run.history) for run in (first, second)]
    return {
        "runs": [str(first.path), str(second.path)],
        "options": differing,
        "places": places,
        "program": program,
        "versions": _differing(versions),
        "data": data,
        "data_sha256": digests,
        "history": rows,
        "compared": compared,
        "rows": counts,
        "warnings": [*first.warnings, *second.warnings],
        "final": _final(first, second),
        "equal": not (differing or program or data or rows or None in digests)
        and not (first.unreadable or second.unreadable)
        and counts == [compared, compared] != [0, 0],
    }


def _plain(value: object) -> Any:
    """Converts a value to plain JSON types."""
    return json.loads(json.dumps(value, default=str))


def _differing(pairs: Mapping[str, List[PlainValue]]) -> Dict[str, List[Any]]:
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _data(run: RunRecord) -> Tuple[Optional[str], Optional[str]]:
    """Returns the data set's name and the digest of its samples, both from a checkpoint if there is one.

    Without a checkpoint the name is that of the configuration, and the digest is None.
    """
    meta = run.facts
    digest = meta.get("data_sha256")
    return printable(meta["dataset"]) if meta else run.config.dataset, digest if isinstance(
        digest, str
    ) else None


def first_difference(first: List[PlainDict], second: List[PlainDict]) -> Tuple[Optional[PlainDict], int]:
    """Finds the first row in which two histories differ.

    It compares the rows that both histories have: the same event at the same weight update.  A row of an execution
    covers all weight updates since the row before it.

    Returns:
        (difference, number of common rows).  The difference is None if all common rows are equal.  Otherwise it has
        ``event``; ``after`` and ``weight_updates``, between which the runs began to differ; and ``figures``, name ->
        both values.
    """
    second_rows = {(row["event"], row["weight_updates"]): row for row in second}
    pairs = [(row, second_rows.get((row["event"], row["weight_updates"]))) for row in first]
    common = [(row, other) for row, other in pairs if other is not None]
    after = 0
    for row, other in common:
        names = sorted((row.keys() | other.keys()) - set(_WHEN))
        figures = {
            name: [row.get(name), other.get(name)] for name in names if row.get(name) != other.get(name)
        }
        if figures:
            updates = row["weight_updates"]
            return {
                "event": row["event"],
                "after": min(after, updates),
                "weight_updates": updates,
                "figures": figures,
            }, len(common)
        if row["event"] == "execution":
            after = row["weight_updates"]
    return None, len(common)


def _final(first: RunRecord, second: RunRecord) -> Dict[str, List[Any]]:
    """Returns the figures at the end of both runs, name -> [first, second]."""
    figures: Dict[str, List[Any]] = {"state": [run.state for run in (first, second)]}
    figures["weight updates"] = [run.weight_updates for run in (first, second)]
    lasts = [(run.rows("validation") or [{}])[-1] for run in (first, second)]
    for name in ("loss", "accuracy", "top5", "dice", "iou"):
        if any(name in last for last in lasts):
            figures[f"validation {name}"] = [last.get(name) for last in lasts]
    reports = (first.report, second.report)
    figures["images per second"] = [(report and report.measured.images_per_s) or None for report in reports]
    return figures
