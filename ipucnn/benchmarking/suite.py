"""Plans and checks suites, lists of command lines in YAML, before the first one runs (``suite_run.py`` runs them).

title: what it is
epoch-images: 50000
options: --host-generated-data --precision 32.32
rows:
  - benchmark lenet {--inference,--training} --micro-batch-size {1,32}
  - two replicas: train resnet18 --replicas 2 --num-epochs 2

``{a,b}`` expands to each of them, as in a shell, and a wildcard to each network that it matches.  ``fit`` in place of
``train`` is Keras' own loop (``keras_fit.py``).
"""

import itertools
import math
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from ipucnn import documents
from ipucnn.aliases import PlainDict, PlainValue
from ipucnn.benchmarking.settings import make_settings
from ipucnn.config import spec
from ipucnn.config.options import find_spec, specs_for
from ipucnn.config.request import RunRequest, matching
from ipucnn.config.resolve import REPLACES, Resolved
from ipucnn.errors import ConfigurationError, UserError, did_you_mean
from ipucnn.filesystem import exists, expand, read_text, shown
from ipucnn.models.registry import nearest_legal_sizes
from ipucnn.text import shown_value

FOLDER = Path(__file__).parent / "suites"
COMMANDS = ("benchmark", "train", "fit")
SEED = 1
"""The default seed of rows, fixed so that a continued suite uses the same."""
_TOP = ("title", "about", "epoch-images", "options", "rows")
MAX_ROWS = 10_000
_BRACES = re.compile(r"\{([^{}\s\"':]*,[^{}\s\"':]*)\}")
# Options of ``benchmark`` that runs do not have: their name in ``make_settings``, and the function that reads their
# value.
_MEASURING: Dict[str, Tuple[str, Callable[[str], PlainValue]]] = {
    "mode": ("mode", str),
    "compare-with": ("compare_with", str),
    "executions": ("executions", spec.EXECUTIONS.flag("--executions")),
    "min-time": ("min_time_s", spec.SECONDS.flag("--min-time")),
    "max-time": ("max_time_s", spec.SECONDS.flag("--max-time")),
    "system": ("system", str),
}
# The flags that replace ``--mode``, and whether weight updates are measured.
_MODES = {"training": True, "train": True, "inference": False, "infer": False}
_ANY = ("config", "config-path")
_OF_SUITE = ("run-dir", "overwrite", "resume", "json", "plan", "model-name", "suite", "versus", "baseline")

Options = Dict[str, List[str]]
"""The words of each option by its key, starting with the option itself."""


def parse_options(words: Sequence[str], where: str) -> Options:
    """Parses typed options, by key; a later one of the same key counts.

    Raises:
        ConfigurationError: a word that belongs to no option, or an option that the suite sets itself.
    """
    options: Options = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            key = _key(name)
            options[key] = [f"--{name}", *([value] if equals else [])]
        elif key:
            options[key].append(word)
        else:
            raise ConfigurationError(
                f"{where}: '{shown_value(word)}' belongs to no option", "options begin with --"
            )
    for key in _OF_SUITE:
        if key in options:
            raise ConfigurationError(
                f"{where}: --{key} is the suite's own", "leave it out of the suite's rows"
            )
    return options


def _key(name: str) -> str:
    if name in _MODES:
        return "mode"
    known = find_spec(name) or (find_spec(name[3:]) if name.startswith("no-") else None)
    return known.key if known is not None else name


def merged(below: Options, above: Options) -> Options:
    """Returns ``above`` over ``below``, without the options of ``below`` that ``above`` replaces."""
    names = {key.replace("-", "_") for key in above}
    replaced = {other.replace("_", "-") for name, other in REPLACES if name in names and other not in names}
    return {**{key: words for key, words in below.items() if key not in replaced}, **above}


@dataclass(frozen=True)
class PlannedRow:
    """A command line of a suite.

    Attributes:
        command: one of ``COMMANDS``.
        model: the name of a network.
        options: the options by key.
        name: the name in the suite; "" for a name derived from the command line.
        where: the place in the suite, for messages.
        id: a name that is unique in the suite and valid as a folder's name.
        notes: differences from the requested options.
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
        """Returns the words to type after ``ipucnn``."""
        return [self.command, self.model, *itertools.chain.from_iterable(self.options.values())]

    @property
    def trains(self) -> bool:
        """Tells whether weight updates are timed."""
        mode = self.options.get("mode", ["--inference"])[-1].lstrip("-")
        return self.command != "benchmark" or _MODES.get(mode, True)

    def resolve(self) -> Resolved:
        """Returns its configuration.

        Raises:
            UserError: an error that can be detected without data; the message names the row.
        """
        command = "train" if self.command == "fit" else self.command
        flags: PlainDict = {}
        others: Dict[str, str] = {}
        for key, (flag, *values) in self.options.items():
            option = find_spec(key)
            if not _takes(self.command, key):
                known = [each.key for each in specs_for(command)]
                known += _MEASURING if command == "benchmark" else ()
                raise ConfigurationError(
                    f"{self.where}: `ipucnn {command}` has no option {shown_value(flag)}",
                    did_you_mean(key, known) or f"`ipucnn {command} --help-all` shows all options",
                )
            if option is not None:
                value = values if len(values) > 1 else values[0] if values else not flag.startswith("--no-")
                flags[option.name] = value
            elif flag[2:] not in _MODES:
                if len(values) != 1:
                    raise ConfigurationError(f"{self.where}: {flag} takes one value", f"{flag} VALUE")
                others[key] = values[0]
        request = RunRequest(
            command, flags, self.model, others.pop("config", None), others.pop("config-path", None)
        )
        try:
            settings = {_MEASURING[key][0]: _MEASURING[key][1](text) for key, text in others.items()}
            make_settings(**settings)  # type: ignore[arg-type]
            return request.resolve()
        except UserError as error:
            error.message = f"{self.where} ({self.id}): {error.message}"
            raise


def _takes(command: str, key: str) -> bool:
    """Tells whether a command of a suite has an option."""
    if key in _ANY or (key in _MEASURING and command == "benchmark"):
        return True
    option = find_spec(key)
    return option is not None and ("train" if command == "fit" else command) in option.commands


@dataclass(frozen=True)
class Suite:
    """A suite with its rows expanded.

    Attributes:
        name: the name of the file, without its ending.
        rows: the rows, at least one.
        title, about: the description.
        epoch_images: the training images of the epoch whose time is computed, None for no such time.
    """

    name: str
    rows: Tuple[PlannedRow, ...]
    title: str = ""
    about: str = ""
    epoch_images: Optional[int] = None


def find_suite(name: str) -> Suite:
    """Returns the suite that ``--suite`` names: a built-in one, or a file.

    Raises:
        ConfigurationError: there is no such suite, or it is wrong.
    """
    built_in = sorted(path.stem for path in FOLDER.glob("*.yml"))
    if name in built_in:
        path = FOLDER / f"{name}.yml"
        return parse_suite(path.read_text(encoding="utf-8"), path.name, name)
    path = expand(name)
    if path.suffix.lower() not in (".yml", ".yaml") and not exists(path):
        raise ConfigurationError(
            f"--suite {shown(name)}: there is no such suite",
            did_you_mean(name, built_in)
            or f"the built-in ones are {' and '.join(built_in)}; or give a file, FILE.yml",
        )
    hint = "give the path of a YAML file with rows"
    text = read_text(path, documents.MAX_BYTES, hint=hint)
    return parse_suite(text, shown(path), path.stem)


def wildcard_suite(pattern: str) -> Suite:
    """Returns the suite of the networks that MODEL matches; mode and options come from the command line."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", pattern).strip("-") or "all"
    rows = tuple(PlannedRow("benchmark", record.name, {}, where="MODEL") for record in matching(pattern))
    return Suite(name, rows, title=pattern)


def parse_suite(text: str, source: str, name: str) -> Suite:
    """Reads a suite from YAML.

    Raises:
        ConfigurationError: the suite is wrong; the message names ``source`` and the error.
    """
    with documents.naming(source):
        data = documents.load(text)
    if not isinstance(data, dict) or not isinstance(data.get("rows"), list) or not data["rows"]:
        raise ConfigurationError(
            f"{source}: it has no rows", "write `rows:` and below it a command line each: - benchmark lenet"
        )
    for key in data:
        if key not in _TOP:
            old = "write `options: --flag value` instead; each row is a command line (docs/benchmark.md)"
            raise ConfigurationError(
                f"{source}: unknown key '{shown_value(str(key))}'",
                old
                if key == "defaults"
                else did_you_mean(str(key), _TOP) or f"a suite has {', '.join(_TOP)}",
            )
    images = data.get("epoch-images")
    if images is not None and not (isinstance(images, int) and images is not True and images > 0):
        raise ConfigurationError(
            f"{source}: epoch-images: {shown_value(images)} is no number of images", "epoch-images: 50000"
        )
    where = f"{source}: options"
    options = parse_options(_split(str(data.get("options") or ""), where), where)
    rows = itertools.chain.from_iterable(
        _rows_of(row, f"{source}, row {number}", options) for number, row in enumerate(data["rows"], 1)
    )
    about = " ".join(str(data.get("about") or "").split())
    return Suite(name, tuple(rows), str(data.get("title") or ""), about, images)


def _rows_of(row: PlainValue, where: str, options: Options) -> Iterator[PlannedRow]:
    name = ""
    if isinstance(row, dict) and len(row) == 1:
        ((name, row),) = ((str(key), value) for key, value in row.items())
    if not isinstance(row, str):
        raise ConfigurationError(
            f"{where} is no command line", "- benchmark lenet, or - NAME: benchmark lenet"
        )
    choices = [part.split(",") if k % 2 else [part] for k, part in enumerate(_BRACES.split(row))]
    count = math.prod(map(len, choices))
    if count > MAX_ROWS:
        raise ConfigurationError(
            f"{where} stands for {shown_value(count)} command lines, and a suite has at most {MAX_ROWS:,}",
            "write fewer alternatives in braces",
        )
    for combination in itertools.product(*choices):
        words = _split("".join(combination), where)
        words = words[1:] if words[:1] == ["ipucnn"] else words
        if len(words) < 2 or words[0] not in COMMANDS or words[1].startswith("-"):
            raise ConfigurationError(
                f"{where}: '{shown_value(' '.join(words))}' is no command line of a suite",
                f"begin with {', '.join(COMMANDS[:2])} and the name of a network",
            )
        try:
            records = matching(words[1])
        except ConfigurationError as error:
            raise ConfigurationError(f"{where}: {error.message}", error.hint) from None
        for record in records:
            if record.own is not None:
                raise ConfigurationError(
                    f"{where}: {shown_value(words[1])} is a network of one's own, and suites have registered ones",
                    f"measure it by itself: ipucnn benchmark {shown_value(words[1])}",
                )
            typed = parse_options(words[2:], where)
            yield PlannedRow(words[0], record.name, merged(options, typed), name, where)


def _split(text: str, where: str) -> List[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigurationError(f"{where}: {error}", "close the quotation marks") from None


def plan_suite(suite: Suite, model: Optional[str], typed: Sequence[str]) -> Suite:
    """Returns the suite with the typed options, every row checked.

    Args:
        suite: the suite as written.
        model: MODEL, which selects the rows of the networks that it matches.
        typed: options that override the rows' own.

    Raises:
        UserError: a row is wrong; the message names the row.
    """
    above = parse_options(typed, "options")
    kept = None if model is None else {record.name for record in matching(model)}
    rows: List[PlannedRow] = []
    for row in suite.rows:
        if kept is None or row.model in kept:
            typed_here = {key: words for key, words in above.items() if _takes(row.command, key)}
            row = replace(row, options={"seed": ["--seed", str(SEED)], **merged(row.options, typed_here)})
            # Typed options may make rows equal.
            if all(replace(row, where=other.where) != other for other in rows):
                rows.append(row)
    if not rows:
        raise ConfigurationError(
            f"the suite {suite.name} has no row of {model}", "leave MODEL out for all of its rows"
        )
    for key in above:
        if not any(_takes(row.command, key) for row in rows):
            raise ConfigurationError(f"--{key} has no effect on any row of {suite.name}", "drop it")
    return replace(suite, rows=tuple(_with_legal_size(row) for row in _with_ids(rows)))


def _with_ids(rows: List[PlannedRow]) -> Iterator[PlannedRow]:
    """Yields the rows with ids: their name or network, and the options that distinguish rows of the same name."""
    taken: Set[str] = set()
    for row in rows:
        same = [other for other in rows if (other.name or other.model) == (row.name or row.model)]
        parts = [row.name or row.model]
        if len({other.command for other in same}) > 1:
            parts.append(row.command)
        for key, words in row.options.items():
            if any(other.options.get(key) != words for other in same):
                has_value = len(words) > 1 and key != "mode"
                parts.append("-".join([key, *words[1:]]) if has_value else words[-1].lstrip("-"))
        base = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(parts)).strip("-")
        names = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
        name = next(name for name in names if name not in taken)
        taken.add(name)
        yield replace(row, id=name)


def _with_legal_size(row: PlannedRow) -> PlannedRow:
    """Checks and returns a row; an image size that its network does not accept becomes the next legal one, noted."""
    resolved = row.resolve()
    size = resolved.config.image_size
    if size is None or "image-size" not in row.options:
        return row
    legal = tuple(nearest_legal_sizes(resolved.record, n)[-1] for n in size)
    if legal == tuple(size):
        return row
    text, typed = ("x".join(map(str, sides)) for sides in (legal, size))
    note = f"images of {text} instead of {typed}: the next size that {row.model} takes"
    return replace(row, options={**row.options, "image-size": ["--image-size", text]}, notes=(note,))
