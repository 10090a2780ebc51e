"""What is in a run folder, and the reader of it; ``writer.py`` writes it.

=======================  =============================================  =======================================
file                     content                                        read by
=======================  =============================================  =======================================
config.yml               the configuration that repeats the run         ``--resume``, ``open_run``, ``compare.py``
program.json             the Program: batches, executions, pipeline     ``compare.py``, the page
environment.json         versions and machine of each process           ``compare.py``, ``--resume``, ``writer.py``,
                                                                        ``latest_run_dir`` below
metrics.jsonl            computed results: equal bytes for equal seeds  ``compare.py``, ``ipucnn.read_history``
timings.jsonl            measured times of the same rows                ``compare.py``
checkpoints/*.npz        weights, optimizer, position, history          ``resume.py``, ``open_run``
report.json              the result; a run with one is finished         ``records.py`` declares it; ``--resume``,
                                                                        ``compare.py``, ``checkpoints.py``,
                                                                        ``benchmarking/observation.py``
predictions.png          masks of a segmentation network                the page
report.html              the page                                       people
thresholds.json          what ``evaluate`` recommends for masks         ``infer``
mlperf.log               the log of ``--mlperf-logging``                MLPerf's tools
tensorboard/, wandb/     curves (``trackers.py``)                       TensorBoard, Weights & Biases
folds.json               results of a cross-validation, whose folds     ``records.py`` declares it; ``kfold.py``
                         ``fold-1``, ... are run folders beside it
=======================  =============================================  =======================================

Checkpoints may lie elsewhere (``--checkpoint-dir``).  Files that no run wrote are left as they are.
"""

import contextlib
import difflib
import itertools
import os
import re
from datetime import datetime
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Union

import msgspec

from ipucnn.aliases import Annotated, PlainDict, PlainValue
from ipucnn.config.options import RunConfig
from ipucnn.documents import MAX_BYTES, read_record_if_present
from ipucnn.errors import DataError
from ipucnn.filesystem import (
    entries,
    read_text,
    shown,
    temporary_of,
    used_bytes,
)
from ipucnn.models.registry import folder_name, natural_key
from ipucnn.runs.records import Report
from ipucnn.text import counted, quoted

CONFIG, PROGRAM, REPORT, ENVIRONMENT = "config.yml", "program.json", "report.json", "environment.json"
METRICS, TIMINGS, MLPERF = "metrics.jsonl", "timings.jsonl", "mlperf.log"
PREDICTIONS, PAGE, THRESHOLDS, FOLDS = "predictions.png", "report.html", "thresholds.json", "folds.json"
CHECKPOINTS, TENSORBOARD, WANDB = "checkpoints", "tensorboard", "wandb"
LAST, BEST = "last.npz", "best.npz"
# The largest number of runs or checkpoints that a hint names.
NAMED = 5
RUN_FILES = (CONFIG, PROGRAM, REPORT, ENVIRONMENT, METRICS, TIMINGS, PREDICTIONS, THRESHOLDS, MLPERF, PAGE)
RUNS = Path("runs")
"""The folder of all runs without ``--run-dir``."""

_Probability = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class KeptThreshold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The probability above which a pixel is class 1, as ``ipucnn evaluate`` recommended it.

    Attributes:
        value: the probability.
        chosen_on: the images on which it was the best: "6 images of isbi2012 (isbi2012)"; "" if that was not written.
    """

    value: _Probability
    chosen_on: str = ""


def is_unfinished(path: Path) -> bool:
    """Whether a folder was left by a process that was killed while it made its run folder."""
    # A link is never such a folder: a run that used it would write somewhere else.
    if path.is_symlink() or not path.is_dir():
        return False
    if any(p.name != CHECKPOINTS and temporary_of(p.name) not in RUN_FILES for p in entries(path)):
        return False
    return not entries(path / CHECKPOINTS)


def is_checkpoint_name(name: str) -> bool:
    """Whether a file name is that of a run's checkpoint."""
    return name in (LAST, BEST) or re.fullmatch(r"checkpoint-\d{8,}\.npz", name) is not None


class RunFolder:
    """Reads the folder of a run.

    Args:
        path: the folder.
        checkpoint_dir: the folder of the checkpoints, if they are not in the run folder.
    """

    def __init__(self, path: Path, checkpoint_dir: Optional[Path] = None) -> None:
        self.path = path
        self.checkpoints = checkpoint_dir or path / CHECKPOINTS

    def read_config(self) -> RunConfig:
        """Returns the resolved configuration of the run.

        Raises:
            DataError: the folder has no configuration (it is not a run folder), or a damaged one.
        """
        path = self.path / CONFIG
        if not path.exists():
            inside = [p for p in entries(self.path) if p.is_dir() and (p / CONFIG).is_file()]
            some = ", ".join(map(str, inside[:5])) + (", ..." if len(inside) > 5 else "")
            hint = "give a folder that `ipucnn train` wrote" + (f": {some}" if inside else "")
            raise DataError(f"{self.path} is not a run folder: it has no {CONFIG}", hint)
        text = read_text(path, MAX_BYTES, hint="restore it, or train again with --overwrite")
        if "model-name:" not in text:
            raise DataError(
                f"{path} is damaged: it names no model", "restore it, or train again with --overwrite"
            )
        return RunConfig.from_yaml(text, str(path))

    def read_program(self) -> PlainDict:
        """Returns the content of ``program.json``; an empty dict if there is none.

        Raises:
            DataError: the file is damaged or cannot be read.
        """
        without = "a continued run writes it again"
        return read_record_if_present(self.path / PROGRAM, without, Dict[str, PlainValue]) or {}

    def read_report(self) -> Optional[Report]:
        """Returns the content of ``report.json``; None for a run that did not finish.

        Raises:
            DataError: the file is damaged or cannot be read.
        """
        without = "the run then counts as unfinished, and --resume writes it again"
        return read_record_if_present(self.path / REPORT, without, Report)

    def processes(self) -> List[PlainDict]:
        """Returns the entries of ``environment.json``: the processes that wrote the run, the latest last.

        Raises:
            DataError: the file is damaged or cannot be read.
        """
        without = "the earlier processes of the run are then not known"
        return read_record_if_present(self.path / ENVIRONMENT, without, List[Dict[str, PlainValue]]) or []

    def thresholds(self) -> Dict[str, KeptThreshold]:
        """Returns the thresholds that ``ipucnn evaluate`` recommended, by the weight updates of their checkpoints.

        Raises:
            DataError: the file is damaged or cannot be read.
        """
        without = "ipucnn evaluate writes it again"
        kind = Dict[str, Union[_Probability, KeptThreshold]]  # earlier versions wrote numbers
        read = read_record_if_present(self.path / THRESHOLDS, without, kind) or {}
        return {key: KeptThreshold(one) if isinstance(one, float) else one for key, one in read.items()}

    def checkpoint_files(self) -> List[Path]:
        """Returns the checkpoints of the run."""
        return [path for path in entries(self.checkpoints) if is_checkpoint_name(path.name)]

    def checkpoint_facts(self) -> PlainDict:
        """Returns the facts of the last checkpoint, else of the best; an empty dict if there is none.

        Raises:
            DataError: the checkpoint is damaged or cannot be read.
        """
        from ipucnn.training.checkpoints import read_meta

        paths = (self.checkpoints / name for name in (LAST, BEST))
        return next((read_meta(path) for path in paths if path.exists()), {})

    @property
    def size_bytes(self) -> int:
        """Bytes that the run takes on disk, with the checkpoints in ``--checkpoint-dir``."""
        return used_bytes(self.path, self.checkpoint_files())


def folds_of(path: Path) -> List[Path]:
    """Returns the run folders of a cross-validation, by their numbers; an empty list for a run."""
    folds = [p for p in entries(path) if p.name.startswith("fold-") and p.is_dir()]
    return sorted(folds, key=lambda p: natural_key(p.name))


def fold_path(root: Path, fold: int) -> Path:
    """Returns the run folder of a fold of a cross-validation."""
    return root / f"fold-{fold}"


def fold_numbers(root: Path) -> List[int]:
    """Returns the numbers of the folds that have a folder."""
    numbers = {int(p.name[5:]) for p in entries(root) if re.fullmatch(r"fold-[0-9]+", p.name)}
    return sorted(number for number in numbers if fold_path(root, number).is_dir())


def is_run(path: Path) -> bool:
    """Whether a folder is that of one run, and not of a benchmark or a cross-validation."""
    if not path.is_dir() or not (path / CONFIG).is_file() or (path / FOLDS).is_file():
        return False
    # A run writes its report last; a benchmark writes only configuration, program and report.
    of_a_run = any((path / name).is_file() for name in (ENVIRONMENT, METRICS))
    return of_a_run or not (path / REPORT).is_file()


def hint_of_runs(path: Path, command: Optional[str] = None) -> str:
    """Returns a hint for a run that does not exist: the runs beside it, or those in ``runs``.

    Args:
        path: the path of the missing run.
        command: a command that takes a run, for an example line; None: no line is shown.
    """
    for folder in (path.parent, RUNS):
        runs = [p for p in entries(folder) if is_run(p)] if folder.is_dir() else []
        if runs:
            by_name = {p.name: shown(p) for p in sorted(runs, key=lambda p: natural_key(p.name))}
            close = difflib.get_close_matches(path.name, by_name, 1)
            if close:
                return f"did you mean '{by_name[close[0]]}'?"
            names = list(by_name.values())
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            line = f"; type: ipucnn {command} {names[0]}" if command is not None else ""
            return f"there are: {', '.join(names[:NAMED])}{more}{line}"
    return "train one with: ipucnn train toy_model"


CONTINUE_FOLDS = "go on with it: ipucnn train --resume --run-dir {}"


def check_one_run(path: Path, command: Optional[str] = None) -> None:
    """Refuses a path that is not the folder of one run.

    Args:
        path: the path that the user gave.
        command: a command that takes a run, for the hint; None: the hint shows no command line.

    Raises:
        DataError: nothing or a file is there, or a cross-validation, which has a run for each fold.
    """
    if not path.exists():
        raise DataError(f"run folder {path} does not exist", hint_of_runs(path, command))
    if not path.is_dir():
        raise DataError(f"run folder {path} is a file", "`ipucnn runs` lists the runs there are")
    folds = [fold for fold in folds_of(path) if is_run(fold)]
    if folds:
        raise DataError(
            f"{path} is a cross-validation of {counted(len(folds), 'fold')}, each of which is a run",
            f"name a fold in its place: {quoted(folds[0])}",
        )
    if (path / FOLDS).is_file():
        raise DataError(f"{path} is a cross-validation without a fold", CONTINUE_FOLDS.format(quoted(path)))


def numbered_run_dirs(model: str, dataset: str) -> Iterator[Path]:
    """Yields the default names: ``runs/<model>-<dataset>``, then the same with ``-2``, ``-3``, ... appended."""
    base = f"{folder_name(model)}-{dataset}".replace(":", "-").replace("/", "-")
    yield RUNS / base
    yield from (RUNS / f"{base}-{number}" for number in itertools.count(2))


def latest_run_dir(model: str, dataset: str) -> Optional[Path]:
    """Returns the default folder whose run began or went on last, skipping runs killed before they began; else None."""
    names = re.escape(next(numbered_run_dirs(model, dataset)).name) + r"(-[1-9]\d*)?"
    runs = [
        path
        for path in (entries(RUNS) if RUNS.is_dir() else ())
        if re.fullmatch(names, path.name) and path.is_dir() and not is_unfinished(path)
    ]
    return max(runs, key=lambda path: (_began(path), natural_key(path.name)), default=None)


def _began(path: Path) -> float:
    """Returns when the latest process of a run began, in seconds since 1970; if that is not recorded, by its files."""
    with contextlib.suppress(DataError):
        processes = RunFolder(path).processes()
        began = seconds_of(processes[-1].get("started")) if processes else None
        if began is not None:
            return began
    config = path / CONFIG
    return os.stat(config if config.is_file() else path).st_mtime


def seconds_of(started: object) -> Optional[float]:
    """Converts a time of ``environment.json``, with its zone, to seconds since 1970; None if it is no such time."""
    try:
        return datetime.strptime(str(started), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (ValueError, OverflowError):
        return None
