"""Plans and checks suites, lists of command lines in YAML, before the first one runs (``suite_run.py`` runs them).

title: what it is
epoch-images: 50000
options: --host-generated-data --precision 32.32
rows:
  - benchmark lenet {--inference,--training} --micro-batch-size {1,32}
  - two replicas: train resnet18 --replicas 2 --num-epochs 2

``{a,b}`` expands to each of them, as in a shell, and a wildcard to each network that it matches.  ``fit`` in place of
``train`` is Keras' own loop (``keras_fit.py``).  The command line's own parser reads each row.
"""

import contextlib
import itertools
import math
import platform
import re
import shlex
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Callable, Dict, FrozenSet, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import msgspec
from msgspec import Meta, Struct

from ipucnn import documents
from ipucnn.aliases import Annotated, PlainDict, PlainValue
from ipucnn.benchmarking.records import MachineFacts, Row, SuiteResult
from ipucnn.benchmarking.rules import check_row, check_settings, differences_of_fit, without_effect
from ipucnn.benchmarking.settings import TRAINING, BenchmarkSettings, make_settings
from ipucnn.command_line import HELP_WORDS
from ipucnn.config.options import BY_NAME
from ipucnn.config.request import RunRequest, matching
from ipucnn.config.resolve import REPLACES, Resolved
from ipucnn.config.rules import is_set
from ipucnn.config.shared_options import CommandOptions
from ipucnn.config.values import plain_number
from ipucnn.errors import ConfigurationError, UnknownOption, UserError, did_you_mean
from ipucnn.filesystem import expand, read_text, shown
from ipucnn.machine import cpu_name, host_memory_bytes, num_cores
from ipucnn.models.registry import nearest_legal_sizes
from ipucnn.sessions.poplar.sdk_environment import read_sdk_environment
from ipucnn.text import quoted, shown_value

FOLDER = Path(__file__).parent / "suites"
COMMANDS = {"benchmark": "benchmark", "train": "train", "fit": "train"}
"""The command whose options a command of a suite has."""
SEED = "1"
"""The default seed of rows, fixed so that a continued suite uses the same."""
MAX_ROWS = 10_000
_BRACES = re.compile(r"\{([^{}\s\"':]*,[^{}\s\"':]*)\}")
_PRESET = ("config", "config_path")
# Options that the suite itself sets, or that are for a single benchmark.
_OF_SUITE = (
    *("run_dir", "overwrite", "resume", "plan", "model_name", "suite", "versus", "baseline"),
    *("max_regression", "system_profile", "json", "verbose", "print_config"),
)
_REPLACES = (*REPLACES, ("mode", "training"), ("training", "mode"))

Options = Mapping[str, PlainValue]
"""The typed options of a command line, by the name of the command's parameter."""
Parse = Callable[[Sequence[str]], CommandOptions]
"""Parses the words of a command line after ``ipucnn``, as the command line itself does."""

_Text = Union[None, str, int, float]
"""A text in YAML, where 2024 is a number and an empty text is null."""


class _File(Struct, forbid_unknown_fields=True, rename="kebab"):
    """The contents of a suite's file; a row may have a name."""

    rows: Annotated[
        List[Union[str, Annotated[Dict[str, str], Meta(min_length=1, max_length=1)]]], Meta(min_length=1)
    ]
    title: _Text = ""
    about: _Text = ""
    options: _Text = ""
    epoch_images: Optional[documents.Positive] = None


_HINT = (
    "a suite has title, about, epoch-images: 50000, options: --flag value, and rows:, a list of command lines such as "
    "`- benchmark lenet` or `- NAME: benchmark lenet` (docs/benchmark.md)"
)


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """Puts the place in a suite before the message of an error."""
    try:
        yield
    except UserError as error:
        error.message = f"{where}: {error.message}"
        raise


def given_options(parameters: Options) -> Options:
    """Returns the typed ones of a command's parameters; the others are None.

    Raises:
        ConfigurationError: an option that the suite sets itself.
    """
    for name in _OF_SUITE:
        if is_set(parameters.get(name)):
            flag = name.replace("_", "-")
            raise ConfigurationError(f"--{flag} is the suite's own", "leave it out of the suite's rows")
    others = {name: value for name, value in parameters.items() if name not in (*_OF_SUITE, "model")}
    return {name: value for name, value in others.items() if value is not None}


def merged(below: Options, above: Options) -> Options:
    """Returns ``above`` over ``below``, without the options of ``below`` that ``above`` replaces."""
    replaced = {other for name, other in _REPLACES if name in above and other not in above}
    return {**{name: value for name, value in below.items() if name not in replaced}, **above}


@dataclass(frozen=True)
class SuiteCommand:
    """A command line of a suite.

    Attributes:
        command: a key of ``COMMANDS``.
        model: the name of a network.
        options: the typed options.
        name: the name in the suite; "" for a name derived from the command line.
        where: the place in the suite, for messages.
        shared: names of the options that were given for all rows.
        unknown: flags that were given for all rows, and that its command does not have.
    """

    command: str
    model: str
    options: Options
    name: str = ""
    where: str = field(default="MODEL", compare=False)
    shared: FrozenSet[str] = field(default=frozenset(), compare=False)
    unknown: Tuple[str, ...] = field(default=(), compare=False)

    @property
    def text(self) -> str:
        """Returns what to type after ``ipucnn``."""
        words = itertools.chain.from_iterable(map(option_words, self.options.items()))
        return " ".join(map(shlex.quote, [self.command, self.model, *words]))

    @property
    def training(self) -> bool:
        """Tells whether weight updates are timed."""
        return self.command != "benchmark" or self.settings.mode == TRAINING

    @property
    def settings(self) -> BenchmarkSettings:
        """The settings of a benchmark."""
        of_run = {name for name in self.options if name in _PRESET or self._is_of_run(name)}
        measuring: PlainDict = {name: value for name, value in self.options.items() if name not in of_run}
        return make_settings(**measuring)

    def _is_of_run(self, name: str) -> bool:
        spec = BY_NAME.get(name)
        return spec is not None and COMMANDS[self.command] in spec.commands

    def takes(self, name: str) -> bool:
        """Tells whether its command has an option of ``benchmark``; ``--training`` of runs is another one."""
        is_shared = name in _PRESET or (name != "training" and self._is_of_run(name))
        return self.command == "benchmark" or is_shared

    def resolve(self) -> Resolved:
        """Returns its configuration.

        Raises:
            UserError: an error that can be detected without data.
        """
        flags = {name: value for name, value in self.options.items() if self._is_of_run(name)}
        preset, file = (self.options.get(name) for name in _PRESET)
        resolved = RunRequest(COMMANDS[self.command], flags, self.model, preset, file).resolve()
        if self.command == "benchmark":
            check_settings(self.settings, resolved.config)
        check_row(resolved, self.command, self.training)
        return resolved


def option_words(option: Tuple[str, PlainValue]) -> List[str]:
    """Returns the words of a typed option."""
    name, value = option
    if name == "training":
        return ["--training" if value else "--inference"]
    key = BY_NAME[name].key if name in BY_NAME else name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{key}" if value else f"--no-{key}"]
    return [f"--{key}", *map(_word, value if isinstance(value, (list, tuple)) else [value])]


def _word(value: PlainValue) -> str:
    """Returns the word of a typed value, a whole number without a fraction."""
    return plain_number(value) if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Suite:
    """A suite as it was written.

    Attributes:
        name: the name of the file, without its ending.
        rows: the command lines, at least one, with braces and wildcards expanded.
        title, about: the description.
        epoch_images: the training images of the epoch whose time is computed, None for no such time.
    """

    name: str
    rows: Tuple[SuiteCommand, ...]
    title: str = ""
    about: str = ""
    epoch_images: Optional[int] = None


def find_suite(name: str, parse: Parse) -> Suite:
    """Returns the suite that ``--suite`` names: a built-in one, or a file.

    Raises:
        ConfigurationError: there is no such suite, or it is wrong.
    """
    built_in = sorted(path.stem for path in FOLDER.glob("*.yml"))
    path = FOLDER / f"{name}.yml" if name in built_in else expand(name)
    if path.suffix.lower() not in (".yml", ".yaml") and not path.exists():
        raise ConfigurationError(
            f"--suite {shown(name)}: there is no such suite",
            did_you_mean(name, built_in)
            or f"the built-in ones are {' and '.join(built_in)}; or give a file, FILE.yml",
        )
    hint = "give the path of a YAML file with rows"
    return parse_suite(read_text(path, documents.MAX_BYTES, hint=hint), shown(path), path.stem, parse)


def wildcard_suite(pattern: str) -> Suite:
    """Returns the suite of the networks that MODEL matches; mode and options come from the command line."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", pattern).strip("-") or "all"
    rows = tuple(SuiteCommand("benchmark", record.name, {}) for record in matching(pattern))
    return Suite(name, rows, title=pattern)


def parse_suite(text: str, source: str, name: str, parse: Parse) -> Suite:
    """Reads a suite from YAML.

    Raises:
        ConfigurationError: the suite is wrong; the message names ``source`` and the error.
    """
    with documents.naming(source):
        data = documents.load(text)
    problem = documents.mismatch(data, _File)
    if problem:
        raise ConfigurationError(f"{source}: {problem}", _HINT)
    file = msgspec.convert(data, _File)
    with _naming(f"{source}: options"):
        options = _split(str(file.options or ""))
    rows: List[SuiteCommand] = []
    for number, row in enumerate(file.rows, 1):
        if file.rows.index(row) + 1 < number:
            raise ConfigurationError(
                f"{source}, row {number}: it is row {file.rows.index(row) + 1} again",
                "drop it, or give it a name: `- again: COMMAND`",
            )
        ((row_name, line),) = row.items() if isinstance(row, dict) else (("", row),)
        where = f"{source}, row {number}"
        with _naming(where):
            rows += (replace(each, name=row_name, where=where) for each in _expanded(line, options, parse))
    for flag in rows[0].unknown if rows else ():
        if all(flag in row.unknown for row in rows):
            raise ConfigurationError(f"{source}: options: no row has an option {flag}", "drop it")
    title, about = str(file.title or ""), " ".join(str(file.about or "").split())
    return Suite(name, tuple(rows), title, about, file.epoch_images)


def _expanded(line: str, options: Sequence[str], parse: Parse) -> Iterator[SuiteCommand]:
    """Yields the command lines that a line with braces and wildcards stands for."""
    choices = [part.split(",") if k % 2 else [part] for k, part in enumerate(_BRACES.split(line))]
    count = math.prod(map(len, choices))
    if count > MAX_ROWS:
        raise ConfigurationError(
            f"the line stands for {count} command lines, and a suite has at most {MAX_ROWS:,}",
            "write fewer alternatives in braces",
        )
    for combination in itertools.product(*choices):
        words = _split("".join(combination))
        words = words[1:] if words[:1] == ["ipucnn"] else words
        asks_help = not set(HELP_WORDS).isdisjoint([*options, *words])
        if len(words) < 2 or words[0] not in COMMANDS or words[1].startswith("-") or asks_help:
            raise ConfigurationError(
                f"'{shown_value(' '.join(words))}' is no command line of a suite",
                "begin with benchmark or train, and the name of a network",
            )
        start = [COMMANDS[words[0]], words[1]]
        known, unknown = _known(options, start, parse)
        below, above = (given_options(parse([*start, *more]).values()) for more in (known, words[2:]))
        for record in matching(words[1]):
            if record.own is not None:
                raise ConfigurationError(
                    f"{shown_value(words[1])} is your own network, and suites have registered ones",
                    f"measure it by itself: ipucnn benchmark {quoted(words[1])}",
                )
            shared = frozenset(below) - frozenset(above)
            yield SuiteCommand(words[0], record.name, merged(below, above), shared=shared, unknown=unknown)


def _known(words: Sequence[str], start: Sequence[str], parse: Parse) -> Tuple[List[str], Tuple[str, ...]]:
    """Divides the words of options for all rows into those of a command, and the flags that only others have."""
    known: List[str] = []
    unknown: List[str] = []
    begins = [k for k, word in enumerate(words) if word.startswith("--") or k == 0]
    for begin, end in zip(begins, [*begins[1:], len(words)]):
        option = words[begin:end]
        try:
            parse([*start, *option])
        except UnknownOption:
            if not any(_has_option(command, start[1], option, parse) for command in COMMANDS.values()):
                raise
            unknown.append(option[0].partition("=")[0])
        else:
            known += option
    return known, tuple(unknown)


def _has_option(command: str, model: str, option: Sequence[str], parse: Parse) -> bool:
    with contextlib.suppress(UnknownOption):
        parse([command, model, *option])
        return True
    return False


def _split(text: str) -> List[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigurationError(str(error), "close the quotation marks") from None


def plan_suite(suite: Suite, model: Optional[str], typed: Options) -> SuiteResult:
    """Returns the result of a suite before any row has run, with the typed options, every row checked.

    Args:
        suite: the suite as written.
        model: MODEL, which selects the rows of the networks that it matches.
        typed: options that override the rows' own.

    Raises:
        UserError: a row is wrong; the message names the row.
    """
    names = None if model is None else {record.name for record in matching(model)}
    equal: Dict[str, List[SuiteCommand]] = {}
    for row in suite.rows:
        if names is None or row.model in names:
            above = {name: value for name, value in typed.items() if row.takes(name)}
            options = {"seed": SEED, **merged(row.options, above)}
            unknown = (option_words(option)[0] for option in typed.items() if option[0] not in above)
            row = replace(
                row,
                options=options,
                shared=row.shared.union(above),
                unknown=tuple(dict.fromkeys([*row.unknown, *unknown])),
            )
            key = repr((row.command, row.model, row.name, sorted(options.items())))
            equal.setdefault(key, []).append(row)
    rows = [of_key[0] for of_key in equal.values()]
    if not rows:
        raise ConfigurationError(
            f"the suite {suite.name} has no row of {model}", "leave MODEL out for all of its rows"
        )
    for name in typed:
        if not any(row.takes(name) for row in rows):
            raise ConfigurationError(
                f"--{name.replace('_', '-')} has no effect on any row of {suite.name}", "drop it"
            )
    ids = _ids(rows)
    planned = list(map(_pending, rows, ids, map(len, equal.values())))
    for row, row_id, (_, left_out) in zip(rows, ids, planned):
        for name, error in left_out.items():
            uses = (name not in others for other, (_, others) in zip(rows, planned) if name in other.shared)
            # An option of the file may have its effect in rows that MODEL does not select.
            if (model is None or name in typed) and not any(uses):
                with _naming(f"{row.where} ({row_id})"):
                    raise error
    return SuiteResult(
        suite=suite.name,
        title=suite.title,
        about=suite.about,
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        machine=MachineFacts(
            cpu=cpu_name(),
            num_cores=num_cores(),
            memory_bytes=host_memory_bytes(),
            python=platform.python_version(),
            tensorflow=read_sdk_environment().versions["tensorflow"],
        ),
        epoch_images=suite.epoch_images,
        rows=[row for row, _ in planned],
    )


def _ids(rows: List[SuiteCommand]) -> List[str]:
    """Returns the rows' ids: their name or network, and the options that distinguish rows of the same name."""
    ids: List[str] = []
    for row in rows:
        same = [other for other in rows if (other.name or other.model) == (row.name or row.model)]
        parts = [row.name or row.model]
        if len({other.command for other in same}) > 1:
            parts.append(row.command)
        for name, value in row.options.items():
            if any(other.options.get(name) != value for other in same):
                words = option_words((name, value))
                parts.append("-".join(words[name == "mode" :]).lstrip("-"))
        base = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(parts)).strip("-.") or row.model
        names = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
        ids.append(next(name for name in names if name not in ids))
    return ids


def _pending(row: SuiteCommand, row_id: str, count: int) -> Tuple[Row, Dict[str, ConfigurationError]]:
    """Checks ``count`` equal rows; an image size that their network does not accept becomes the next legal one, noted.

    Returns:
        The row, and the refusal of each option that it leaves out (:func:`_with_effect`).
    """
    with _naming(f"{row.where} ({row_id})"):
        row, resolved, left_out = _with_effect(row)
    size = resolved.config.image_size
    notes = [f"left out: {row.command} has no option {flag}" for flag in row.unknown]
    notes += [f"left out: {error.message}" for error in left_out.values()]
    notes += without_effect(resolved, row.training)
    notes += [f"stands for {count} equal rows"] if count > 1 else []
    notes += differences_of_fit(resolved) if row.command == "fit" else []
    if size is not None and "image_size" in row.options:
        legal = tuple(nearest_legal_sizes(resolved.record, side)[-1] for side in size)
        text, typed = ("x".join(map(str, sides)) for sides in (legal, size))
        if text != typed:
            notes.append(f"images of {text} instead of {typed}: the next size that {row.model} takes")
            row = replace(row, options={**row.options, "image_size": text})
    mode = "training" if row.training else "inference"
    name = row.name or row.model
    return Row(id=row_id, name=name, model=row.model, command=row.text, mode=mode, notes=notes), left_out


def _with_effect(row: SuiteCommand) -> Tuple[SuiteCommand, Resolved, Dict[str, ConfigurationError]]:
    """Returns a row without the shared options that have no effect in it, its configuration, and their refusals."""
    left_out: Dict[str, ConfigurationError] = {}
    while True:
        try:
            return row, row.resolve(), left_out
        except ConfigurationError as error:
            if error.unused not in row.shared:
                raise
            left_out[error.unused] = error
            options = {name: value for name, value in row.options.items() if name != error.unused}
            row = replace(row, options=options, shared=row.shared - {error.unused})
