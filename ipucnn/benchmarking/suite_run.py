"""Runs a planned suite in its folder, each row in a process of its own, and computes speed-ups."""

import csv
import io
import itertools
import json
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Sequence, Tuple

from msgspec import convert, structs

from ipucnn import documents
from ipucnn.aliases import PlainValue
from ipucnn.benchmarking.figures import figures_of_benchmark, figures_of_run
from ipucnn.benchmarking.records import Figures, Row, SuiteResult, from_plain
from ipucnn.benchmarking.report import foreign_names
from ipucnn.config.options import find_spec
from ipucnn.config.spec import Effect
from ipucnn.errors import ConfigurationError, DataError, UserError
from ipucnn.events import Events, Item
from ipucnn.filesystem import check_makeable, expand, make_folder, write_text
from ipucnn.runs.compare import read_run
from ipucnn.runs.folder import latest_run_dir
from ipucnn.runs.overwriting import check_replaceable
from ipucnn.runs.writer import default_run_dir
from ipucnn.system_programs import Ran, run_program
from ipucnn.text import quoted, shown_value

RESULT, TABLE, ROWS, FIGURE = "suite.json", "suite.csv", "rows", "speedup"
FILES = (RESULT, TABLE, ROWS, f"{FIGURE}.png", f"{FIGURE}.svg")
# The ending of default folders' names; single benchmarks end in -benchmark.
SUFFIX = "suite"
_PRINTED_CHARACTERS = 4096


# -- the folder -------------------------------------------------------------------------------------------------


def suite_folder(name: str, run_dir: Optional[str], *, resume: bool, overwrite: bool) -> Path:
    """Returns the folder of a suite, checked before anything is measured.

    Raises:
        ConfigurationError: it is taken and neither continued nor replaced, contains other files, or there is nothing to
            continue.
        DataError: it is a file.
    """
    if run_dir is not None:
        path = expand(run_dir)
    elif not resume:
        return default_run_dir(name, SUFFIX)
    else:
        latest = latest_run_dir(name, SUFFIX)
        if latest is None:
            raise ConfigurationError(
                f"--resume: there is no {default_run_dir(name, SUFFIX)} to go on with",
                "leave --resume out to begin, or name the suite's folder with --run-dir",
            )
        path = latest
    check_makeable(path)
    foreign = foreign_names(path, FILES)
    if resume and not foreign and not (path / RESULT).is_file():
        raise ConfigurationError(
            f"--resume: {path} holds no suite to go on with", "leave --resume out to begin one there"
        )
    continues = "--resume goes on with its rows"
    check_replaceable(
        path, foreign, RESULT, "the folder of a suite", resume or overwrite, continues=continues
    )
    return path


def read_suite(path: Path, option: str = "--versus") -> SuiteResult:
    """Reads a ``suite.json``, or the one in a folder.

    Raises:
        DataError: it is absent, damaged, or of another kind or version.
    """
    path = path / RESULT if path.is_dir() else path
    hint = "give the suite.json that `ipucnn benchmark --suite` wrote, or its folder"
    return from_plain(documents.read_record(path, hint), SuiteResult, f"{option} {path}", hint)


def write_result(folder: Path, result: SuiteResult) -> None:
    """Writes the current result of a suite."""
    write_text(folder / RESULT, result.to_json())
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row.__struct_fields__)
    for row in result.rows:
        values = [getattr(row, key) for key in Row.__struct_fields__]
        writer.writerow(["; ".join(v) if isinstance(v, list) else "" if v is None else v for v in values])
    write_text(folder / TABLE, text.getvalue())


# -- running ----------------------------------------------------------------------------------------------------


def with_kept_rows(result: SuiteResult, folder: Path) -> SuiteResult:
    """Returns a pending result with the finished rows of the folder.

    Raises:
        ConfigurationError: they have other command lines, or are from another machine.
    """
    former = read_suite(folder, "--run-dir")
    now, before = ([_without_files(row.command) for row in each.rows] for each in (result, former))
    for one, other in itertools.zip_longest(now, before):
        if one != other:
            raise ConfigurationError(
                f"{folder} holds another suite: '{shown_value(other)}' there, '{shown_value(one)}' now",
                "give the options that it was begun with, or use another --run-dir",
            )
    done = {row.id: row for row in former.rows if row.status == "done"}
    current, saved_facts = result.machine.to_dict(), former.machine.to_dict()
    for key in current:
        if current[key] != saved_facts[key] and done:
            raise ConfigurationError(
                f"{folder} was measured with {key} {shown_value(saved_facts[key])}, this is {current[key]}",
                "use another --run-dir, and compare the two with --versus",
            )
    rows = [done.get(row.id, row) for row in result.rows]
    return structs.replace(result, started=former.started, rows=rows)


def _without_files(command: str) -> str:
    """Returns a row's command line without options that only say which files are read or written."""
    words, is_kept = [], True
    for word in shlex.split(command):
        if word.startswith("--"):
            spec = find_spec(word[2:]) or find_spec(word[len("--no-") :])
            is_kept = spec is None or spec.effect is not Effect.FILES
        words += [word] * is_kept
    return " ".join(map(shlex.quote, words))


@dataclass(frozen=True)
class RowBegan(Item):
    """A row runs."""

    name: str


@dataclass(frozen=True)
class RowFinished(Item):
    """A row has a result, or failed."""

    row: Row


def run_rows(result: SuiteResult, folder: Path, verbose: bool = False) -> Events[Tuple[SuiteResult, bool]]:
    """Runs the rows that have no result yet; a failure is recorded, and the next row begins.

    Yields a :class:`RowBegan` and a :class:`RowFinished` of each.

    Args:
        result: the current result of the suite.
        folder: the folder to write to.
        verbose: whether a row's stderr is shown instead of stored.

    Returns:
        The result, and whether a signal interrupted it.
    """
    if (folder / ROWS).is_symlink():
        raise DataError(
            f"{folder / ROWS} is a link, and a suite writes to its own folder alone",
            f"remove it: rm {quoted(folder / ROWS)}",
        )
    make_folder(folder)
    write_result(folder, result)
    make_folder(folder / ROWS)
    num_done, total = sum(row.status == "done" for row in result.rows), len(result.rows)
    try:
        for index, row in enumerate(result.rows):
            if row.status == "done":
                continue
            yield RowBegan(num_done, total, row.id)
            began = time.perf_counter()
            finished = _finished(row, folder / ROWS / row.id, result.epoch_images, verbose)
            finished = structs.replace(finished, wall_s=time.perf_counter() - began)
            result = structs.replace(result, rows=[*result.rows[:index], finished, *result.rows[index + 1 :]])
            write_result(folder, result)
            yield RowFinished(num_done, total, finished)
            num_done += 1
    except KeyboardInterrupt:
        return result, True
    return result, False


# It starts like ``ipucnn``, and never imports from the current folder.  If this process dies, Linux sends SIGTERM (15)
# to the child (prctl(2), where PR_SET_PDEATHSIG is 1).
_PROGRAM = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; import ctypes; "
    "sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 15); "
    "place = sys.argv.pop(1); place in sys.path or sys.path.append(place); sys.argv[0] = 'ipucnn'; "
    "from ipucnn import interrupts; interrupts.listen(); from ipucnn import cli, command_group; "
    "from ipucnn.benchmarking import keras_fit; "
    "keras_fit.main(command_group.parse_line) if sys.argv[1] == 'fit' else cli.main()"
)


def run_command(words: Sequence[str], verbose: bool) -> Ran:
    """Runs a command line of a suite in a process of its own.

    A fresh process costs the seconds of importing TensorFlow.  In return, each figure, peak memory too, is the same as
    that of the command alone.
    """
    place = str(Path(__file__).resolve().parents[2])
    return run_program([sys.executable, "-c", _PROGRAM, place, *words], timeout_s=None, shows_errors=verbose)


def _finished(row: Row, folder: Path, epoch_images: Optional[int], verbose: bool) -> Row:
    """Runs a row; returns it with its result or error."""
    words = shlex.split(row.command)
    outputs = [] if words[0] == "fit" else ["--run-dir", str(folder), "--overwrite", "--json"]
    ran = run_command([*words, *outputs], verbose)
    if ran.problem is not None:
        code = ran.exit_code or 1
        return structs.replace(row, status="failed", exit_code=code, error=_why(ran))
    try:
        report = json.loads(ran.output)
    except ValueError:
        return structs.replace(row, status="failed", exit_code=1, error="it printed no result")
    if words[0] == "benchmark":
        return with_figures(row, figures_of_benchmark(report), epoch_images)
    if words[0] == "train":
        try:
            run = read_run(folder)
        except UserError as error:
            return structs.replace(row, status="failed", exit_code=error.exit_code, error=error.message)
        return with_figures(row, figures_of_run(report, run), epoch_images)
    return with_figures(row, convert(report, Figures), epoch_images)


def _why(ran: Ran) -> str:
    """Returns why a row failed: its error, else how its process ended."""
    lines = [line.strip() for line in ran.errors[-_PRINTED_CHARACTERS:].splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    if errors:
        return errors[-1][len("error: ") :]
    memory = " (the system may have been out of memory)" if ran.signal_name == "SIGKILL" else ""
    last = f"; it last said: {lines[-1][:200]}" if lines else ""
    return f"its process {ran.problem}{memory}{last}"


# -- results ----------------------------------------------------------------------------------------------------


def with_figures(row: Row, figures: Figures, epoch_images: Optional[int]) -> Row:
    """Returns a row that is done.

    Args:
        row: the finished row.
        figures: its figures.
        epoch_images: the training images of the epoch whose time is computed.
    """
    f, epoch_s = figures, None
    # Only whole batches count: without any, the epoch has no time.
    batch = (f.micro_batch_size or 1) * (f.gradient_accumulation_count or 1) * (f.num_replicas or 1)
    whole = (epoch_images or 0) // batch * batch
    if whole and f.images_per_s and row.mode == "training":
        epoch_s = whole / f.images_per_s
    values = {**structs.asdict(f), "notes": [*row.notes, *f.notes]}
    return structs.replace(row, status="done", exit_code=0, epoch_s=epoch_s, **values)


@dataclass(frozen=True)
class Speedups:
    """The speed-ups of others over the rows of a suite.

    Attributes:
        pairs: (row, speed-up, IPUs of a prediction; None for a measurement).
        second: a description of what is compared with the suite.
        first_s, second_s: the epoch times of the training rows that both have; None if there are none.
    """

    pairs: Tuple[Tuple[Row, float, Optional[int]], ...]
    second: str
    first_s: Optional[float]
    second_s: Optional[float]


def speedups(result: SuiteResult, versus: Optional[SuiteResult] = None, source: str = "") -> Speedups:
    """Returns the speed-ups of ``versus`` over the result, for rows of one id, network and batch.

    Without ``versus``, they are those of the IPUs' predictions.
    """
    done = [row for row in result.rows if row.status == "done" and row.images_per_s]
    if versus is None:
        second = "IPUs, predicted"
        rates = [(row.predicted_images_per_s, row.predicted_num_ipus) for row in done]
    else:
        second = f"{versus.machine.cpu or 'another machine'} ({source})"
        others = {_identity(row): row.images_per_s for row in versus.rows}
        rates = [(others.get(_identity(row)), None) for row in done]
    pairs = tuple(
        (row, rate / row.images_per_s, ipus)
        for row, (rate, ipus) in zip(done, rates)
        if rate and row.images_per_s
    )
    timed = [(row.epoch_s, times) for row, times, _ in pairs if row.epoch_s]
    if not timed:
        return Speedups(pairs, second, None, None)
    return Speedups(pairs, second, sum(s for s, _ in timed), sum(s / times for s, times in timed))


def _identity(row: Row) -> Tuple[PlainValue, ...]:
    """Returns the properties that two rows must share for a comparison of their speeds."""
    batch = row.micro_batch_size, row.num_replicas, row.num_stages
    return row.id, row.model, row.mode, *batch, row.image_height, row.image_width
