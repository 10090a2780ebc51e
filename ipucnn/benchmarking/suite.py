"""Suites: lists of command lines in YAML, each run in a process of its own, with one table of what they came to.

title: what it is
epoch-images: 50000
options: --host-generated-data --precision 32.32
rows:
  - benchmark lenet {--inference,--training} --micro-batch-size {1,32}
  - two replicas: train resnet18 --replicas 2 --num-epochs 2

``{a,b}`` stands for each of them, as in a shell, and a wildcard for each network that it matches.  ``fit`` in place of
``train`` is Keras' own loop (``keras_fit.py``).
"""

import csv
import io
import itertools
import json
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from msgspec import structs

from ipucnn import documents
from ipucnn.aliases import PlainDict, PlainValue
from ipucnn.benchmarking.records import MachineFacts, Row, SuiteResult, from_plain
from ipucnn.config.options import find_spec, specs_for
from ipucnn.config.request import RunRequest, matching
from ipucnn.config.resolve import REPLACES, Resolved
from ipucnn.errors import ConfigurationError, DataError, UserError, did_you_mean
from ipucnn.filesystem import (
    check_makeable,
    entries,
    exists,
    expand,
    is_file,
    is_folder,
    is_link,
    make_folder,
    read_text,
    shown,
    write_text,
)
from ipucnn.machine import cpu_name, host_memory_bytes, num_cores
from ipucnn.models.registry import is_own_name, nearest_legal_sizes
from ipucnn.runs.compare import RunRecord, read_run
from ipucnn.runs.start import claim_default, default_run_dir, latest_run_dir
from ipucnn.text import shown_value

FOLDER = Path(__file__).parent / "suites"
RESULT, TABLE, ROWS, FIGURE = "suite.json", "suite.csv", "rows", "speedup"
# What the names of default folders end with; those of single benchmarks end in -benchmark.
_SUFFIX = "suite"
COMMANDS = ("benchmark", "train", "fit")
MAX_ROWS = 10_000
_TOP = ("title", "about", "epoch-images", "options", "rows")
_BRACES = re.compile(r"\{([^{}\s\"':]*,[^{}\s\"':]*)\}")
# Spellings of --mode, and the options that a suite gives its rows itself.
_MODES = {"training": "mode", "inference": "mode", "train": "mode", "infer": "mode"}
_MEASURING = ("mode", "compare-with", "executions", "min-time", "max-time", "system")
_ANY = ("config", "config-path")
# Where data lie changes no figure.
_NOT_WORK = ("dataset-path", "download")
_OF_SUITE = ("run-dir", "overwrite", "resume", "json", "plan", "model-name", "suite", "versus", "baseline")
_PRINTED_BYTES = 4096

Options = Dict[str, List[str]]
"""The words of each option by its key, the option's own first."""


def parse_options(words: Sequence[str], where: str) -> Options:
    """Options as they are typed, by key; a later one of the same key counts.

    Raises:
        ConfigurationError: a word that belongs to no option, or an option that suites give themselves.
    """
    options: Options = {}
    last: List[str] = []
    for word in words:
        if not word.startswith("--"):
            if not last:
                raise ConfigurationError(
                    f"{where}: '{shown_value(word)}' belongs to no option", "options begin with --"
                )
            last.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        last = [f"--{name}", *([value] if equals else [])]
        options[_key(name)] = last
    refused = next((key for key in _OF_SUITE if key in options), None)
    if refused is not None:
        raise ConfigurationError(
            f"{where}: --{refused} is the suite's own", "leave it out of the suite's rows"
        )
    return options


def _key(name: str) -> str:
    if name in _MODES:
        return _MODES[name]
    spec = find_spec(name) or (find_spec(name[3:]) if name.startswith("no-") else None)
    return spec.key if spec is not None else name


def merged(below: Options, above: Options) -> Options:
    """Options over others, which lose those that the upper ones take the place of."""
    names = {_field(key) for key in above}
    replaced = {other for name, other in REPLACES if name in names} - names
    return {**{key: words for key, words in below.items() if _field(key) not in replaced}, **above}


def _field(key: str) -> str:
    return key.replace("-", "_")


@dataclass(frozen=True)
class PlannedRow:
    """A command line of a suite.

    Attributes:
        command: of ``COMMANDS``.
        model: a network.
        options: by key.
        name: as the suite calls it; "" for one made of what it runs.
        where: for messages.
        id: unique in the suite, fit for a folder's name.
        notes: what differs from what was asked for.
    """

    command: str
    model: str
    options: Options
    name: str = ""
    where: str = ""
    id: str = ""
    notes: Tuple[str, ...] = ()

    @property
    def words(self) -> List[str]:
        """What is typed behind ``ipucnn``."""
        return [self.command, self.model, *itertools.chain.from_iterable(self.options.values())]

    def resolve(self) -> Resolved:
        """Its configuration.

        Raises:
            UserError: something in it that needs no data to be found out, with the row it is about.
        """
        command = "train" if self.command == "fit" else self.command
        flags: PlainDict = {}
        for key, (flag, *values) in self.options.items():
            spec = find_spec(key)
            if not _is_for(key, self.command):
                known = [each.key for each in specs_for(command)] + (
                    list(_MEASURING) if command == "benchmark" else []
                )
                raise ConfigurationError(
                    f"{self.where}: `ipucnn {command}` has no option {shown_value(flag)}",
                    did_you_mean(key, known) or f"`ipucnn {command} --help-all` shows all options",
                )
            if spec is not None:
                flags[spec.name] = (
                    values if len(values) > 1 else values[0] if values else not flag.startswith("--no-")
                )
        config, path = (self.options.get(key, [None, None])[1] for key in ("config", "config-path"))
        try:
            return RunRequest(command, flags, self.model, config, path).resolve()
        except UserError as error:
            error.message = f"{self.where} ({self.id}): {error.message}"
            raise


@dataclass(frozen=True)
class Suite:
    """A suite whose rows are written out.

    Attributes:
        name: of the file, without its ending.
        title, about: what it is.
        epoch_images: training images of the epoch whose time is added up, None for no such sum.
        rows: at least one.
    """

    name: str
    rows: Tuple[PlannedRow, ...]
    title: str = ""
    about: str = ""
    epoch_images: Optional[int] = None


# -- what is to run ---------------------------------------------------------------------------------------------


def built_in_names() -> List[str]:
    """The suites that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yml"))


def find_suite(name: str) -> Suite:
    """The suite that ``--suite`` names: a built-in one, or a file.

    Raises:
        ConfigurationError: there is none, or it is wrong.
    """
    if name in built_in_names():
        path = FOLDER / f"{name}.yml"
        return parse_suite(path.read_text(encoding="utf-8"), path.name, name)
    path = expand(name)
    if path.suffix.lower() not in (".yml", ".yaml") and not exists(path):
        raise ConfigurationError(
            f"--suite {shown(name)}: there is no such suite",
            did_you_mean(name, built_in_names())
            or f"the built-in ones are {' and '.join(built_in_names())}; or give a file, FILE.yml",
        )
    hint = "give the path of a YAML file with rows"
    text = read_text(path, documents.MAX_BYTES, hint=hint)
    return parse_suite(text, shown(path), path.stem)


def wildcard_suite(pattern: str) -> Suite:
    """The suite of the networks that MODEL matches; mode and options are the command line's."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", pattern).strip("-") or "all"
    rows = tuple(PlannedRow("benchmark", record.name, {}, where="MODEL") for record in matching(pattern))
    return Suite(name, rows, title=pattern)


def parse_suite(text: str, source: str, name: str) -> Suite:
    """A suite from YAML.

    Raises:
        ConfigurationError: with ``source`` and what is wrong.
    """
    with documents.naming(source):
        data = documents.load(text)
    if not isinstance(data, dict) or not isinstance(data.get("rows"), list) or not data["rows"]:
        raise ConfigurationError(
            f"{source}: it has no rows", "write `rows:` and below it a command line each: - benchmark lenet"
        )
    unknown = next((key for key in data if key not in _TOP), None)
    if unknown is not None:
        old = "defaults are now written as `options: --flag value`; each row is a command line (docs/benchmark.md)"
        raise ConfigurationError(
            f"{source}: unknown key '{shown_value(str(unknown))}'",
            did_you_mean(str(unknown), _TOP)
            or (old if unknown == "defaults" else f"a suite has {', '.join(_TOP)}"),
        )
    images = data.get("epoch-images")
    if images is not None and not (isinstance(images, int) and not isinstance(images, bool) and images > 0):
        raise ConfigurationError(
            f"{source}: epoch-images: {shown_value(images)} is no number of images", "epoch-images: 50000"
        )
    options = parse_options(
        _split(str(data.get("options") or ""), f"{source}: options"), f"{source}: options"
    )
    rows: List[PlannedRow] = []
    for number, row in enumerate(data["rows"], 1):
        rows += _rows_of(row, f"{source}, row {number}", options, MAX_ROWS - len(rows))
    about = " ".join(str(data.get("about") or "").split())
    return Suite(name, tuple(rows), str(data.get("title") or ""), about, images)


def _rows_of(row: PlainValue, where: str, options: Options, at_most: int) -> Iterator[PlannedRow]:
    name = ""
    if isinstance(row, dict) and len(row) == 1:
        ((name, row),) = ((str(key), value) for key, value in row.items())
    if not isinstance(row, str):
        raise ConfigurationError(
            f"{where} is no command line", "- benchmark lenet, or - NAME: benchmark lenet"
        )
    parts = _BRACES.split(row)
    choices = [part.split(",") if k % 2 else [part] for k, part in enumerate(parts)]
    count = 1
    for each in choices:
        count *= len(each)
    if count > at_most:
        raise ConfigurationError(
            f"{where} stands for {shown_value(count)} command lines, and a suite has at most {MAX_ROWS:,}",
            "give fewer values, or make several suites",
        )
    for combination in itertools.product(*choices):
        words = _split("".join(combination), where)
        words = words[1:] if words[:1] == ["ipucnn"] else words
        if len(words) < 2 or words[0] not in COMMANDS or words[1].startswith("-"):
            raise ConfigurationError(
                f"{where}: '{shown_value(' '.join(words))}' is no command line of a suite",
                f"begin with {', '.join(COMMANDS[:2])} and the name of a network",
            )
        if is_own_name(words[1]):
            raise _of_ones_own(where, words[1])
        try:
            records = matching(words[1])
        except ConfigurationError as error:
            raise ConfigurationError(f"{where}: {error.message}", error.hint) from None
        if any(record.own is not None for record in records):
            raise _of_ones_own(where, words[1])
        for record in records:
            own = merged(options, parse_options(words[2:], where))
            yield PlannedRow(words[0], record.name, own, name, where)


def _of_ones_own(where: str, model: str) -> ConfigurationError:
    return ConfigurationError(
        f"{where}: {shown_value(model)} is a network of one's own, and suites have registered ones",
        f"measure it by itself: ipucnn benchmark {shown_value(model)}",
    )


def _split(text: str, where: str) -> List[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigurationError(f"{where}: {error}", "close the quotation marks") from None


def plan_suite(suite: Suite, model: Optional[str], typed: Sequence[str], seed: Optional[int]) -> Suite:
    """The suite with what was typed beside it, every row checked.

    Args:
        suite: as written.
        model: MODEL, which keeps the rows of the networks that it matches.
        typed: options, in place of the rows' own.
        seed: of rows that have none; None draws it.

    Raises:
        UserError: whatever is wrong with any row, with the row it is about.
    """
    above = parse_options(typed, "options")
    kept = None if model is None else {record.name for record in matching(model)}
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    rows: List[PlannedRow] = []
    for row in suite.rows:
        if kept is not None and row.model not in kept:
            continue
        own = {key: words for key, words in above.items() if _is_for(key, row.command)}
        options = {"seed": ["--seed", str(seed)], **merged(row.options, own)}
        if all(
            (row.command, row.model, row.name, options) != (r.command, r.model, r.name, r.options)
            for r in rows
        ):
            rows.append(replace(row, options=options))
    if not rows:
        raise ConfigurationError(
            f"the suite {suite.name} has no row of {model}", "leave MODEL out for all of its rows"
        )
    idle = [key for key in above if not any(_is_for(key, row.command) for row in rows)]
    if idle:
        raise ConfigurationError(f"--{idle[0]} has no effect on any row of {suite.name}", "drop it")
    rows = [_with_legal_size(row, row.resolve()) for row in _named(rows)]
    return replace(suite, rows=tuple(rows))


def _is_for(key: str, command: str) -> bool:
    """Whether a command of a suite has an option."""
    if key in _ANY or (key in _MEASURING and command == "benchmark"):
        return True
    spec = find_spec(key)
    if spec is None:
        return False
    return ("train" if command == "fit" else command) in spec.commands


def _named(rows: List[PlannedRow]) -> List[PlannedRow]:
    """The rows with ids: of their name or network, and of what tells them from others of that."""
    named: List[PlannedRow] = []
    for row in rows:
        same = [other for other in rows if (other.name or other.model) == (row.name or row.model)]
        parts = [row.name or row.model]
        if len({other.command for other in same}) > 1:
            parts.append(row.command)
        for key in dict.fromkeys(key for other in same for key in other.options):
            if len({tuple(other.options.get(key, ())) for other in same}) > 1 and key in row.options:
                values = row.options[key][1:]
                parts.append(
                    f"{key}-{'-'.join(values)}" if values and key != "mode" else row.options[key][-1][2:]
                )
        base = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(parts)).strip("-")
        taken = {other.id for other in named}
        number = next(n for n in itertools.count(1) if (base if n == 1 else f"{base}-{n}") not in taken)
        named.append(replace(row, id=base if number == 1 else f"{base}-{number}"))
    return named


def _with_legal_size(row: PlannedRow, resolved: Resolved) -> PlannedRow:
    """An image size that the network cannot take becomes the next one that it can, and the row says so."""
    size = resolved.config.image_size
    if size is None or "image-size" not in row.options:
        return row
    legal = tuple(nearest_legal_sizes(resolved.record, n)[-1] for n in size)
    if legal == tuple(size):
        return row
    told = "x".join(map(str, legal))
    note = f"images of {told} instead of {'x'.join(map(str, size))}: the next size that {row.model} takes"
    return replace(row, options={**row.options, "image-size": ["--image-size", told]}, notes=(note,))


# -- running ----------------------------------------------------------------------------------------------------


def suite_folder(name: str, run_dir: Optional[str], *, resume: bool, overwrite: bool) -> Path:
    """The folder of a suite, checked before anything is measured.

    Raises:
        ConfigurationError: it is taken and neither continued nor replaced, holds something else, or there is
            nothing to go on with.
        DataError: it is a file.
    """
    if run_dir is not None:
        path = expand(run_dir)
    elif resume:
        latest = latest_run_dir(name, _SUFFIX)
        if latest is None:
            raise ConfigurationError(
                f"--resume: there is no {default_run_dir(name, _SUFFIX)} to go on with",
                "leave --resume out to begin, or name the suite's folder with --run-dir",
            )
        path = latest
    else:
        return default_run_dir(name, _SUFFIX)
    check_makeable(path)
    there = [p.name for p in entries(path)]
    ours = (RESULT, TABLE, ROWS, f"{FIGURE}.png", f"{FIGURE}.svg")
    foreign = [own for own in there if own not in ours and not own.startswith(".")]
    if foreign:
        raise ConfigurationError(
            f"{path} is not the folder of a suite: it holds {foreign[0]}", "choose another --run-dir"
        )
    if resume and RESULT not in there:
        raise ConfigurationError(
            f"--resume: {path} holds no suite to go on with", "leave --resume out to begin one there"
        )
    if there and not (resume or overwrite):
        raise ConfigurationError(
            f"--run-dir {path} already exists",
            "--resume goes on with its rows, --overwrite replaces them; or use another --run-dir",
        )
    return path


def saved_seed(folder: Path) -> Optional[int]:
    """The seed of the suite in a folder; None where there is none yet."""
    if not is_file(folder / RESULT):
        return None
    words = parse_options(shlex.split(read_suite(folder, "--run-dir").rows[0].command)[2:], "--run-dir")
    return int(words["seed"][1]) if "seed" in words else None


def this_machine() -> MachineFacts:
    """The facts about this machine that figures depend on and that are known without TensorFlow."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        tensorflow: Optional[str] = version("tensorflow")
    except PackageNotFoundError:
        tensorflow = None
    python = ".".join(map(str, sys.version_info[:3]))
    return MachineFacts(cpu_name(), num_cores(), host_memory_bytes(), python, tensorflow)


@dataclass
class SuiteRun:
    """One suite in one folder.

    Attributes:
        suite: planned.
        folder: from :func:`suite_folder`.
        takes_default: ``folder`` is a default one, and gives way to the next that is free.
        result: what there is of it.
    """

    suite: Suite
    folder: Path
    takes_default: bool
    result: SuiteResult = field(init=False)

    def __post_init__(self) -> None:
        suite = self.suite
        self.result = SuiteResult(
            suite=suite.name,
            title=suite.title,
            about=suite.about,
            started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            machine=this_machine(),
            epoch_images=suite.epoch_images,
            rows=[_pending(row) for row in suite.rows],
        )

    def take_over(self) -> int:
        """Keeps the rows of the folder that have a result; how many they are.

        Raises:
            ConfigurationError: they are of other command lines, or of another machine.
        """
        former = read_suite(self.folder, "--run-dir")
        asked, saved = ([_work(row) for row in result.rows] for result in (self.result, former))
        other = next(((one, two) for one, two in itertools.zip_longest(asked, saved) if one != two), None)
        if other is not None:
            raise ConfigurationError(
                f"{self.folder} holds another suite: '{shown_value(other[1])}' there, "
                f"'{shown_value(other[0])}' asked for",
                "give the options that it was begun with, or use another --run-dir",
            )
        done = {row.id: row for row in former.rows if row.status == "done"}
        here, there = self.result.machine.to_dict(), former.machine.to_dict()
        key = next((key for key, value in here.items() if there[key] != value), None)
        if key is not None and done:
            raise ConfigurationError(
                f"{self.folder} was measured with {key} {shown_value(there[key])}, this is {here[key]}",
                "use another --run-dir, and compare the two with --versus",
            )
        self.result.started = former.started
        self.result.rows = [done.get(row.id, row) for row in self.result.rows]
        return len(done)

    def run(self, verbose: bool, on_row: Callable[[str, Optional[Row]], None]) -> None:
        """Runs what has no result yet; what fails is written down, and the next row begins.

        Args:
            verbose: whether a row's stderr is shown and not kept.
            on_row: told when a row begins, by its id, and when it has ended, with what it came to.
        """
        if self.takes_default:
            claim = claim_default(self.suite.name, _SUFFIX)
            self.folder = claim.path
            claim.unlock()
        rows = self.folder / ROWS
        if is_link(rows):
            raise DataError(
                f"{rows} is a link, and a suite writes to its own folder alone", f"remove it: rm {rows}"
            )
        make_folder(rows)
        for index, row in enumerate(self.suite.rows):
            if self.result.rows[index].status != "done":
                self._write()
                on_row(row.id, None)
                began = time.perf_counter()
                finished = self._row(row, verbose)
                self.result.rows[index] = structs.replace(finished, wall_s=time.perf_counter() - began)
                self._write()
                on_row(row.id, self.result.rows[index])

    def _row(self, row: PlannedRow, verbose: bool) -> Row:
        folder = self.folder / ROWS / row.id
        words = [*row.words, "--run-dir", str(folder), "--overwrite", "--json"]
        code, printed, said = run_command(words, verbose)
        pending = _pending(row)
        if code:
            return structs.replace(pending, status="failed", exit_code=code, error=_why(code, said))
        try:
            report = json.loads(printed)
        except ValueError:
            return structs.replace(pending, status="failed", exit_code=1, error="it printed no result")
        trained = report.get("training_accuracy")
        if row.command == "train":
            trained = _last_epoch(read_run(folder), "accuracy")
        return figures(pending, report, self.suite.epoch_images, trained)

    def _write(self) -> None:
        write_text(self.folder / RESULT, self.result.to_json())
        write_text(self.folder / TABLE, to_csv(self.result.rows))


def _work(row: Row) -> str:
    """A row's command line without what changes no figure."""
    command, model, *words = shlex.split(row.command)
    options = parse_options(words, "--run-dir")
    return " ".join(
        [command, model, *(" ".join(own) for key, own in options.items() if key not in _NOT_WORK)]
    )


def _last_epoch(run: RunRecord, figure: str) -> Optional[float]:
    """The mean of a figure over the executions of the last epoch."""
    rows = run.rows("execution")
    first = run.weight_updates - int(run.program.get("weight_updates_per_epoch") or 0)
    values = [row[figure] for row in rows if row["weight_updates"] > first and figure in row]
    return sum(values) / len(values) if values else None


# As ``ipucnn`` starts, and never from the current folder.  Where this process is gone, however that came, Linux sends
# SIGTERM, the 15 (prctl(2), PR_SET_PDEATHSIG, the 1).
_PROGRAM = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; import ctypes; "
    "sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 15); "
    "place = sys.argv.pop(1); place in sys.path or sys.path.append(place); sys.argv[0] = 'ipucnn'; "
    "from ipucnn import interrupts; interrupts.listen(); from ipucnn import cli; "
    "from ipucnn.benchmarking import keras_fit; keras_fit.main() if sys.argv[1] == 'fit' else cli.main()"
)


def run_command(words: Sequence[str], verbose: bool) -> Tuple[int, str, str]:
    """Runs a command line of a suite in a process of its own: exit code, stdout and the end of stderr.

    A fresh process costs the seconds that importing TensorFlow takes, and buys that each figure, peak memory too, is
    the one that the command alone would give.

    Raises:
        DataError: the process cannot be started.
    """
    place = str(Path(__file__).resolve().parents[2])
    # A session of its own: Ctrl-C is the suite's to handle.
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, place, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if verbose else subprocess.PIPE,
        start_new_session=True,
    )
    try:
        printed, said = process.communicate()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
    return process.returncode, printed.decode("utf-8", "replace"), (said or b"").decode("utf-8", "replace")


def _why(code: int, said: str) -> str:
    """Why a row failed: its error, else what it last said."""
    lines = [line.strip() for line in said[-_PRINTED_BYTES:].splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("error: ")]
    if told:
        return told[-1][len("error: ") :]
    if code < 0:
        memory = " (the system may have been out of memory)" if -code == signal.SIGKILL else ""
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"its process was ended by {name}{memory}"
    return f"its process ended with exit code {code}" + (
        f"; it last said: {lines[-1][:200]}" if lines else ""
    )


# -- what it came to --------------------------------------------------------------------------------------------


def _pending(row: PlannedRow) -> Row:
    """A row that has not run yet."""
    command = " ".join(map(shlex.quote, row.words))
    mode = "inference"
    if row.command != "benchmark" or row.options.get("mode", ["--inference"])[-1] in (
        "--training",
        "--train",
        "training",
    ):
        mode = "training"
    return Row(
        id=row.id,
        name=row.name or row.model,
        model=row.model,
        command=command,
        mode=mode,
        notes=list(row.notes),
    )


def figures(row: Row, report: PlainDict, epoch_images: Optional[int], trained: Optional[float]) -> Row:
    """A row with what its report says.

    Args:
        row: that has run.
        report: what ``--json`` printed, of ``benchmark`` or ``train``.
        epoch_images: training images of the epoch whose time is wanted.
        trained: accuracy on training images at the end.
    """
    program, measured, compiled = report["program"], report["measured"], report.get("compilation") or {}
    is_benchmark = "executions" in report
    speed = (
        measured["images_per_s"]
        if is_benchmark
        else {"value": measured["images_per_s"], "lower": None, "upper": None}
    )
    batch, global_batch = program["micro_batch_size"], program["global_batch_size"]
    height, width = (report.get("input_shape") or [None, None])[:2]
    predicted = (report.get("predicted") or [{}])[0]
    parameters, macs = (compiled.get(key) for key in ("num_trainable_parameters", "macs_per_sample"))
    images = (epoch_images or 0) // global_batch * global_batch if row.mode == "training" else 0
    return structs.replace(
        row,
        status="done",
        exit_code=0,
        device=(report.get("device") or compiled["device"])["name"],
        data=report["data"]["name"] if is_benchmark else report["dataset"]["name"],
        image_height=height,
        image_width=width,
        micro_batch_size=batch,
        gradient_accumulation_count=program["gradient_accumulation_count"],
        num_replicas=program["num_replicas"],
        num_stages=program["num_stages"],
        images_per_s=speed["value"] or None,
        images_per_s_lower=speed["lower"],
        images_per_s_upper=speed["upper"],
        # As Keras' progress bar counts: of a training run a step is a micro-batch, whichever replica takes it.
        step_s=measured["step_s"] if is_benchmark else batch / speed["value"] if speed["value"] else None,
        compile_s=compiled.get("compile_s"),
        num_trainable_parameters=parameters,
        macs_per_image=macs,
        flop_per_parameter=2.0 * macs * batch / parameters if parameters and macs else None,
        peak_memory_bytes=measured.get("peak_memory_bytes"),
        ratio_to_keras=((report.get("comparison") or {}).get("ratio") or {}).get("value"),
        training_accuracy=trained,
        accuracy=(report.get("validation") or {}).get("accuracy"),
        # The whole batches alone: of an epoch without any there is no time.
        epoch_s=images / speed["value"] if images and speed["value"] else None,
        predicted_images_per_s=predicted.get("images_per_s"),
        predicted_num_ipus=predicted.get("num_ipus"),
        notes=[*row.notes, *report.get("notes", ())],
    )


def to_csv(rows: Sequence[Row]) -> str:
    """A line for each row, with all of its fields."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row.__struct_fields__)
    for row in rows:
        values = [getattr(row, key) for key in Row.__struct_fields__]
        writer.writerow(["; ".join(v) if isinstance(v, list) else "" if v is None else v for v in values])
    return text.getvalue()


def read_suite(path: Path, option: str = "--versus") -> SuiteResult:
    """A ``suite.json``, or the one in a folder.

    Raises:
        DataError: not there, damaged, or of another kind or version.
    """
    path = path / RESULT if is_folder(path) else path
    hint = "give the suite.json that `ipucnn benchmark --suite` wrote, or its folder"
    result = from_plain(documents.read_record(path, hint), SuiteResult, f"{option} {path}", hint)
    if len({row.id for row in result.rows}) < len(result.rows):
        raise DataError(f"{option} {path} is damaged: two rows of one id", "make it again")
    return result


@dataclass(frozen=True)
class Speedups:
    """How many times as fast others are than the rows of a suite.

    Attributes:
        pairs: (row, speed-up, IPUs that a prediction is for; None of what was measured).
        second: what is compared with the suite, in words.
        first_s, second_s: epoch times of the training rows that both have; None where there are none.
    """

    pairs: Tuple[Tuple[Row, float, Optional[int]], ...]
    second: str
    first_s: Optional[float]
    second_s: Optional[float]


def speedups(result: SuiteResult, versus: Optional[SuiteResult] = None, source: str = "") -> Speedups:
    """The speed-ups of ``versus`` over the result, of rows of one id, network and batch; without it those that are
    predicted of IPUs."""
    done = [row for row in result.rows if row.status == "done" and row.images_per_s]
    if versus is None:
        rates = {row.id: (row.predicted_images_per_s, row.predicted_num_ipus) for row in done}
        second = "IPUs, predicted"
    else:
        others = {(row.id, *_batch(row)): row for row in versus.rows if row.images_per_s}
        found = {row.id: others.get((row.id, *_batch(row))) for row in done}
        rates = {key: (None if row is None else row.images_per_s, None) for key, row in found.items()}
        second = f"{versus.machine.cpu or 'another machine'} ({source})"
    pairs = tuple(
        (row, rate / row.images_per_s, ipus)
        for row in done
        for rate, ipus in [rates[row.id]]
        if rate and row.images_per_s
    )
    timed = [(row.epoch_s, times) for row, times, _ in pairs if row.epoch_s]
    first_s = sum(seconds for seconds, _ in timed) if timed else None
    return Speedups(pairs, second, first_s, sum(s / times for s, times in timed) if timed else None)


def _batch(row: Row) -> Tuple[PlainValue, ...]:
    keys = ("model", "mode", "micro_batch_size", "num_replicas", "num_stages", "image_height", "image_width")
    return tuple(getattr(row, key) for key in keys)
