"""Refusals as data: how the files of ``tests/refusals`` are read, and which commands a hint gives.

A file is a list of blocks, which blank lines separate; ``#`` begins a comment::

    Given photographs, a plan
    mine.yml:
        model-name: lenet

    $ ipucnn train lenet --num-epochs 0 --print-config
    error 2: --num-epochs 0: must be at least 1
    hint: the nearest legal value is --num-epochs 1

``Given`` names situations (``support/situations.py``), a line that ends in a colon is a file with its content, and
``first: LINE`` is a line of the shell that changes them; all hold for the commands down to the next such block, and
``Given`` also where that block has none.  The two lines after a command are its whole error and hint.  Then
the hint is typed, unless a line says otherwise:

    where DIR is photos, FILE is p.yml    words of the hint that stand for something
    typed with --print-config             words that are added, so that the hinted command ends soon
    then 3: no such file (WHY)            the code and a part of the error of the hinted command
    not typed: WHY                        what the hint says cannot be typed here
    slow: WHY                             only tried with ``-m slow``

``nothing to type: WHY`` or ``not typed: WHY`` in a block without a command holds for the commands below it, down to the
next ``Given``.
"""

import difflib
import json
import re
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import pytest
import yaml

from ipucnn.command_group import options_class
from ipucnn.command_table import COMMANDS
from ipucnn.config.command import own_options, run_options
from ipucnn.config.spec import OptionSpec

FOLDER = Path(__file__).resolve().parents[1] / "refusals"
_NOTHING, _NOT_TYPED = "nothing to type:", "not typed:"
_NOTES = ("where", "typed with", "then", "slow:", _NOT_TYPED)


@dataclass(frozen=True)
class Refusal:
    """A command that is refused.

    Attributes:
        page: the name of its file.
        given: names of situations.
        files: name -> content.
        first: lines of the shell that come before the command.
        command: the words after ``ipucnn``.
        ending: the lines on stderr.
        code: the exit code.
        notes: kind of note -> its text.
    """

    page: str
    given: Tuple[str, ...]
    files: Dict[str, str]
    first: Tuple[str, ...]
    command: str
    code: int = 0
    ending: Tuple[str, ...] = ()
    notes: Dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.page}: {self.command}"

    @property
    def has_tensorflow(self) -> bool:
        """Whether the command may import TensorFlow, or follows a run that did."""
        return any(name.startswith(("TensorFlow", "a run", "folds", "weight files")) for name in self.given)


def read(path: Path) -> Iterator[Refusal]:
    """Yields the refusals of a page."""
    given, first = (), ()  # type: Tuple[str, ...], Tuple[str, ...]
    files, default = {}, {}  # type: Dict[str, str], Dict[str, str]
    for block in re.split(r"\n\n+", path.read_text(encoding="utf-8")):
        lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        if lines and lines[0].startswith("$ ipucnn "):
            notes = {
                kind: line[len(kind) + 1 :] for line in lines for kind in _NOTES if line.startswith(kind)
            }
            kind, _, error = lines[1].partition(": ")
            ending = (f"error: {error}", lines[2])
            code, notes = int(kind.split()[1]), {**default, **notes}
            yield Refusal(path.stem, given, files, first, lines[0][9:], code, ending, notes)
            continue
        texts = {line[:-1]: "" for line in lines if line.endswith(":") and not line.startswith("    ")}
        files, name = texts, ""
        first = tuple(line[7:] for line in lines if line.startswith("first: "))
        for line in lines:
            if line.startswith("    "):
                texts[name] += line[4:] + "\n"
            elif line.startswith("Given "):
                given, default = tuple(line[6:].split(", ")), {}
            elif line.startswith((_NOTHING, _NOT_TYPED)):
                default = {line.partition(":")[0] + ":": line}
            elif not line.startswith("first: "):
                name = line[:-1]


def all_refusals() -> List[Refusal]:
    """Returns the refusals of all files."""
    return [refusal for path in sorted(FOLDER.glob("*.txt")) for refusal in read(path)]


def cases(has_tensorflow: bool) -> List[Any]:
    """Returns the refusals with or without TensorFlow as cases of a test."""
    chosen = [one for one in all_refusals() if one.has_tensorflow == has_tensorflow]
    return [pytest.param(one, marks=[pytest.mark.slow] * ("slow:" in one.notes)) for one in chosen]


# -- hints ------------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """One way out of an error.

    Attributes:
        words: the words to type after ``ipucnn``.
        files: the files, perhaps changed.
        shell: a command of the shell that comes first; empty if there is none.
    """

    words: List[str]
    files: Dict[str, str]
    shell: str = ""


_PROGRAM = re.compile(r"`ipucnn ([^`]+)`|ipucnn ((?:(?!, |; |$).)+)")
_SHELL = re.compile(r"\b((?:mkdir -p|mv|rm|cp) (?:(?!, or |; | or |$).)+)")
_CLAUSE = re.compile(r"; (?:or )?|:? or (?=[a-z`]*[ -]*(?:[a-z]+ )*--)|, (?:or )?(?=--|drop |use |add )")
_OPTION = re.compile(r"--[a-z][a-z0-9-]*")
_ALTERNATIVES = re.compile(r"(\S+?),? or (\d\S*?)[,;]?(?: |$)")
_REMOVAL = re.compile(r"\b(drop|leave|without)\b")
_SMALLER = re.compile(r"\b(smaller|lower|lowers?)\b")


def ways(refusal: Refusal) -> List[Way]:
    """Returns the ways that a hint gives: commands, changes of options, names that were meant, and shell commands."""
    error, hint = (line.partition(": ")[2] for line in refusal.ending)
    for pair in filter(None, refusal.notes.get("where", "").split(", ")):
        word, _, value = pair.partition(" is ")
        hint = re.sub(
            rf"(?<![\w-]){re.escape(word)}(?![\w-])", value if word.isupper() else f"{word} {value}", hint
        )
    more = shlex.split(refusal.notes.get("typed with", ""))
    words = [*shlex.split(refusal.command), *more]
    programs = [shlex.split(first or second) for first, second in _PROGRAM.findall(hint)]
    found = [Way([*program, *more], refusal.files) for program in programs]
    hint = _PROGRAM.sub("", hint)
    found += [Way(words, refusal.files, line) for line in _SHELL.findall(hint)]
    hint = _SHELL.sub("", hint)
    row = re.match(r"(\S+\.yml), row (\d+)(?: \(\S+\))?: ", error)
    if row and not found:
        return _with_row(refusal, words, row[1], int(row[2]) - 1, error[row.end() :])
    place = re.match(r"name a fold in its place: (\S+)$", hint)
    if place:
        return [Way([place[1] if word == error.split()[0] else word for word in words], refusal.files)]
    if hint.startswith("did you mean"):
        return [_with_name(refusal, words, error, hint.split("'")[1])]
    code = _with_code(refusal.files, error, hint)
    if code != refusal.files:
        return [Way(words, code)]
    line = re.search(r"\b([a-z-]+): (\S+|\{.*\})$", hint)
    if line and any(f"{line[1]}:" in text for text in refusal.files.values()):
        files = {name: re.sub(rf"\b{line[1]}:.*", line[0], text) for name, text in refusal.files.items()}
        return [Way(words, files)]
    options = _options(words)
    hint = hint.replace(", or pass --download", "")  # it needs a network
    named = [f"--{name}" for name in re.findall(r"(?<![\w-])(?:--)?([a-z][a-z0-9-]+)", error)]
    typed = {word.partition("=")[0] for word in words}
    subjects = [flag for flag in named if flag in options and flag in typed]
    for clause in (clause for clause in _CLAUSE.split(hint) if " say" not in clause):
        found += [Way(each, refusal.files) for each in _changed(words, clause, subjects, options)]
    return found


def _options(words: Sequence[str]) -> Dict[str, OptionSpec]:
    command = COMMANDS.get("train" if words[:1] == ["fit"] else "".join(words[:1]))
    if command is None:
        return {}
    of = options_class(command)
    specs = [*own_options(of), *run_options(of, command.name)]
    return {flag: spec for spec in specs for flag in (*(f"--{key}" for key in spec.keys), *spec.off_flags)}


def _with_name(refusal: Refusal, words: List[str], error: str, name: str) -> Way:
    """Replaces, in the command or else in a file, the word of the error that is closest to a name."""
    parts = {
        part for text in [*words, *refusal.files.values()] for part in re.split(r"[\s=,:{}\[\]'\"]+", text)
    }
    in_error = re.split(r"[\s=,:'\"]+", error.replace("_", "-"))
    parts = {
        p for p in parts if p.replace("_", "-") in in_error and p.startswith("--") == name.startswith("--")
    }
    closest = max(parts, key=lambda part: difflib.SequenceMatcher(None, part.replace("_", "-"), name).ratio())
    typed = [re.sub(rf"(?<![\w-]){re.escape(closest)}(?![\w-])", name, word) for word in words]
    files = (
        {key: text.replace(closest, name) for key, text in refusal.files.items()} if typed == words else {}
    )
    return Way(typed, {**refusal.files, **files})


def _with_row(refusal: Refusal, words: List[str], name: str, number: int, error: str) -> List[Way]:
    """Changes a command line of a suite as the hint says."""
    suite = yaml.safe_load(refusal.files[name])
    ending = (f"error: {error}", refusal.ending[1])
    row = replace(refusal, command=suite["rows"][number], files={}, ending=ending, notes={})
    found = []
    for way in ways(row):
        rows = [*suite["rows"]]
        rows[number] = " ".join(map(shlex.quote, way.words))
        found.append(Way(words, {**refusal.files, name: json.dumps({**suite, "rows": rows})}))
    return found


def _with_code(files: Dict[str, str], error: str, hint: str) -> Dict[str, str]:
    """Changes, or leaves out, the argument that a hint names in Python files; returns the files, perhaps unchanged."""
    given = re.search(r"such as (\w+)=\S+$", hint)
    wrong = re.search(r" (?:has|begins with|called with) (\w+)", error)
    if given:
        old, new = rf"\b{given[1]}=[^,)]+", given[0][8:]
    elif wrong and re.search(r"\bleave out|^drop it|^call it", hint):
        named = re.search(r"leave out (\w+)$", hint) or wrong
        old, new = rf",? ?\b{named[1]}=[^,)]+", ""
    else:
        return files
    return {name: re.sub(old, new, text) if name.endswith(".py") else text for name, text in files.items()}


def _changed(
    words: List[str], clause: str, subjects: List[str], options: Dict[str, OptionSpec]
) -> Iterator[List[str]]:
    """Yields the command with the options of one clause of a hint changed, added or left out."""
    named = [match for match in _OPTION.finditer(clause) if match.group() in options]
    is_one_of_them = re.search(r"\b(drop|give|keep) one\b", clause)
    if re.search(r"\b(drop|leave) (it|them)\b", clause) and subjects:
        words = _without(words, subjects[0], options)
    if is_one_of_them:
        for flag in subjects[:2]:
            yield _without(words, flag, options)
    elif named and _REMOVAL.search(clause[: named[0].start()]) and "drop it" not in clause:
        for match in named:
            words = _without(words, match.group(), options)
        yield words
    elif named:
        ends = [*(match.start() for match in named[1:]), len(clause)]
        results = [words]
        for match, end in zip(named, ends):
            flag = match.group()
            values = _values(clause[: match.start()], clause[match.end() : end].strip(), options[flag])
            results = [[*_without(each, flag, options), flag, *value] for each in results for value in values]
        yield from results
    elif "use train in its place" in clause:
        yield ["train", *words[1:]]
    elif "drop it" in clause or "leave it" in clause:
        yield words


def _values(before: str, after: str, spec: OptionSpec) -> List[List[str]]:
    """Returns the values that a hint gives an option, each as words; none for an option that it only names."""
    if spec.is_bool:
        return [[]]
    if _SMALLER.search(before):
        return [["1"]]
    if not after or re.match(r"[,;:]", after) or before.rstrip().endswith("another"):
        return [["another"]] if "another" in before and not spec.kind.is_number else []
    alternatives = _ALTERNATIVES.match(after)
    if alternatives:
        return [[value] for value in alternatives.groups()]
    if spec.kind.is_list:
        return [shlex.split(re.split(r"[,;(]| or | in place| and ", after)[0])]
    return [shlex.split(after)[:1] if after[0] in "'\"" else [after.split()[0].rstrip(",;:")]]


def _without(words: Sequence[str], flag: str, options: Dict[str, OptionSpec]) -> List[str]:
    """Returns the words of a command without an option and its values."""
    spec, kept, skipped = options[flag], [], 0  # type: OptionSpec, List[str], float
    names = {*(f"--{key}" for key in spec.keys), *spec.off_flags}
    for word in words:
        name, equals, _ = word.replace("_", "-").partition("=")
        if name in names:
            skipped = 0 if spec.is_bool or equals else float("inf") if spec.kind.is_list else 1
        elif skipped and not word.startswith("--"):
            skipped -= 1
        else:
            skipped = 0
            kept.append(word)
    return kept
