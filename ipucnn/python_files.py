"""Functions of users' own Python files, named FILE.py:FUNCTION: checked without running them, and run.

A Python file that is run can do whatever its reader may do.  So only one is run that a person names on the command
line: never one that a preset, a plan, a suite or a run folder names, for those may come from others
(docs/security.md).  What is run is the text whose digest was taken, whatever is written to the file meanwhile.
"""

import ast
import contextlib
import functools
import hashlib
import os
import re
import shlex
import sys
import traceback
import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Tuple

from ipucnn.errors import ConfigurationError, UserError, did_you_mean, text_of
from ipucnn.filesystem import absolute, expand, is_file, read_bytes, shown
from ipucnn.text import printable, shown_value

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

MAX_BYTES = 2**24
MODELS_GROUP = "ipucnn.models"
"""Entry points of installed packages that make networks: functions as those of Python files."""
_NAME = re.compile(r"(?s)(.*\.py):([^/\\:]*)")


def is_python_name(name: str) -> bool:
    """Whether a name is that of a function in a Python file, or of a Python file alone."""
    return name.lower().endswith(".py") or _NAME.fullmatch(name) is not None


def name_it(option: str, name: str, run: Path) -> str:
    """The hint that names a run's Python file on the command line: as the run does, or as its place is seen from here.

    Args:
        option: that names it.
        name: as the run has it.
        run: its folder; the file is looked for in all folders around it.
    """
    path, colon, function = name.rpartition(":") if ":" in name else (name, "", "")
    places = [path, *(os.path.relpath(folder / path) for folder in Path(os.path.abspath(run)).parents)]
    place = next((place for place in places if is_file(Path(place))), path)
    return f"add {option} {shlex.quote(f'{place}{colon}{function}')}"


def label_of(name: str) -> str:
    """What names of folders call a file of one's own: ``my_net-build`` of ``nets/my_net.py:build``."""
    path, _, function = name.rpartition(":") if _NAME.fullmatch(name) else (name, "", "")
    stem = re.sub(r"[^A-Za-z0-9_.-]", "_", Path(path).stem).strip(".-")[:100] or "own"
    return f"{stem}-{function}" if function else stem


@dataclass(frozen=True)
class PythonFunction:
    """A function of a Python file, which was read and not run.

    Attributes:
        name: as it was typed.
        path: of the file.
        function: its name at the top level of the file.
        text: what is run.
        sha256: of the file.
    """

    name: str
    path: Path
    function: str
    text: str
    sha256: str

    def __call__(self, *arguments: object) -> Any:
        """Runs the file, once, and calls the function.

        What either prints goes to stderr: stdout is for results.

        Raises:
            ConfigurationError: either raises an error, or the file has no such function once it has run.
        """
        with _running(self):
            found = getattr(_module(self.path, self.text, self.sha256), self.function, None)
            if callable(found):
                return found(*arguments)
        raise ConfigurationError(
            f"{shown_value(self.name)}: {self.function} is not a function once the file has run",
            f"define it: def {self.function}(...)",
        )


@functools.lru_cache(maxsize=None)
def _module(path: Path, text: str, sha256: str) -> types.ModuleType:
    """The file as a module; run once for all of its functions, for layers that it registers in Keras must not be
    registered twice."""
    module = types.ModuleType(f"ipucnn_own_{path.stem}_{sha256[:12]}")
    module.__file__ = str(path)
    # Where data classes, pickles and Keras look for the module of a class.
    sys.modules[module.__name__] = module
    try:
        exec(compile(text, str(path), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[module.__name__]
        raise
    return module


@contextlib.contextmanager
def _running(function: PythonFunction) -> Iterator[None]:
    """Code of the file runs inside: it may import its neighbours, as under ``python FILE``."""
    folder = str(function.path.parent)
    # Last, so that nothing that lies there takes the place of a module of Python or an installed package.
    sys.path.append(folder)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise own_code_failed(error, function.name, function.path) from error
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def own_code_failed(error: BaseException, what: str, path: Optional[Path] = None) -> ConfigurationError:
    """What to tell where code of the user's own raised an error.

    Args:
        what: was run, as the user named it.
        path: its file, whose line is the one to look at; None: the last one.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen ")  # Python's own
    ]
    own = [frame for frame in frames if path is not None and frame.filename == str(path)] or frames
    where = f", {shown(Path(own[-1].filename))}, line {own[-1].lineno}" if own else ""
    hint = (
        "mend that line"
        if path is None and not isinstance(error, ImportError)
        else "mend the package that offers it"
        if path is None
        else f"mend that line; the function is called by itself with: python -i {shown(path)}"
    )
    if path is None and isinstance(error, ImportError):
        where = ""  # where it was looked for, which is nobody's mistake
    if path is not None and own is frames and isinstance(error, TypeError):
        where, hint = "", "docs/own-networks.md says what the function is given"
    elif isinstance(error, RecursionError):
        hint = "Keras follows a network's layers by recursion: sys.setrecursionlimit(10000) in the file allows for more"
    if isinstance(error, SyntaxError) and error.filename:
        where = f", {shown(Path(error.filename))}, line {error.lineno}"
    # Keras writes several lines, the cause among them, with a terminal's colours.
    text = printable(" ".join(re.sub(r"\x1b\[[0-9;]*m", "", text_of(error)).split()))[:300]
    return ConfigurationError(
        f"{shown_value(what)} raised {type(error).__name__}{': ' + text if text else ''}{where}", hint
    )


def find_function(name: str, option: str, example: str) -> PythonFunction:
    """The function that FILE.py:FUNCTION names; the file is read and not run.

    Args:
        option: that names it, for messages.
        example: of a function that would do, such as ``build``.

    Raises:
        ConfigurationError: there is no such file or function, or the file is not Python.
    """
    match = _NAME.fullmatch(name)
    if match is None or not match.group(2):
        file = name.rstrip(":")
        functions = _functions_if_any(file, option)
        hint = f"for example {shown_value(file)}:{functions[0] if functions else example}"
        raise ConfigurationError(
            f"{option} {shown_value(name)} names a Python file without the function in it", hint
        )
    path, function = expand(match.group(1)), match.group(2)
    hint = f"give FILE.py:FUNCTION, for example my_file.py:{example}"
    data = read_bytes(path, MAX_BYTES, hint=hint)
    names = _top_level(_parsed(data, path, option))
    if function not in names:
        defined = [own for own, is_function in names.items() if is_function]
        there = f"it has {', '.join(map(shown_value, defined[:8]))}" if defined else "it has none"
        raise ConfigurationError(
            f"{option} {shown(path)} has no function {shown_value(function)} at its top level",
            did_you_mean(function, defined) or f"{there}; define it: def {example}(...)",
        )
    return PythonFunction(
        name, absolute(path), function, data.decode("utf-8-sig"), hashlib.sha256(data).hexdigest()
    )


def _parsed(data: bytes, path: Path, option: str) -> ast.Module:
    try:
        return ast.parse(data.decode("utf-8-sig"), str(path))
    except SyntaxError as error:
        reason, line = printable(str(error.msg)), f", line {error.lineno}" if error.lineno else ""
    except (ValueError, RecursionError, MemoryError) as error:  # not UTF-8, a NUL, or nested too deeply
        reason, line = printable(str(error))[:200] or type(error).__name__, ""
    raise ConfigurationError(
        f"{option} {shown(path)}{line} is not Python: {reason}", "mend the file"
    ) from None


def _functions_if_any(path: str, option: str) -> List[str]:
    try:
        file = expand(path)
        names = _top_level(_parsed(read_bytes(file, MAX_BYTES), file, option))
    except UserError:
        return []
    return [name for name, is_function in names.items() if is_function and not name.startswith("_")]


def _top_level(module: ast.Module) -> Dict[str, bool]:
    """The names that a module binds outside of functions and classes, and whether by ``def``."""
    found: Dict[str, bool] = {}

    def walk(statements: List[ast.stmt]) -> None:
        for statement in statements:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found[statement.name] = True
            elif isinstance(statement, ast.ClassDef):
                found.setdefault(statement.name, False)
            elif isinstance(statement, (ast.Import, ast.ImportFrom)):
                for alias in statement.names:
                    found.setdefault((alias.asname or alias.name).split(".")[0], False)
            else:
                for node in ast.walk(statement) if isinstance(statement, (ast.Assign, ast.AnnAssign)) else ():
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                        found.setdefault(node.id, False)
                for block in ("body", "orelse", "finalbody"):
                    walk(getattr(statement, block, []))
                for handler in getattr(statement, "handlers", []):
                    walk(handler.body)

    walk(module.body)
    return found


# --- what other packages offer


def entry_point(group: str, name: str) -> Optional["EntryPoint"]:
    """The entry point of installed packages that has a name, or None.

    Args:
        group: ``ipucnn.models`` or ``ipucnn.datasets``.
    """
    return dict(entry_points(group)).get(name)


def entry_points(group: str) -> Tuple[Tuple[str, "EntryPoint"], ...]:
    """(name, entry point) of all that installed packages offer in a group, by name; nothing of them is imported."""
    from importlib import metadata

    found: Any = metadata.entry_points()
    # Until Python 3.9 a dictionary by group.
    own = found.select(group=group) if hasattr(found, "select") else found.get(group, ())
    return tuple(sorted({entry.name: entry for entry in own}.items()))


def load_entry_point(entry: "EntryPoint") -> Callable[..., Any]:
    """What an entry point names.

    Raises:
        ConfigurationError: it cannot be imported, or is no function.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = entry.load()
    except (Exception, SystemExit) as error:
        raise own_code_failed(error, f"{entry.name} ({entry.value})") from error
    if not callable(found):
        raise ConfigurationError(
            f"{shown_value(entry.name)} ({entry.value}) is not a function", "mend the package that offers it"
        )
    result: Callable[..., Any] = found
    return result
