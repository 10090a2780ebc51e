"""Users' functions in Python files (FILE.py:FUNCTION) and installed packages: finds them without running; calls them.

A Python file that is run can do anything that the user can do.  So a file is run only if a person names it on the
command line, never if a preset, a plan, a suite or a run folder names it, because those may come from others
(docs/security.md).  The text that is run is the one whose digest was computed, even if the file changes meanwhile.
"""

import ast
import contextlib
import functools
import hashlib
import os
import re
import signal
import sys
import traceback
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, FrozenSet, Iterator, Optional, Tuple

from ipucnn.errors import ConfigurationError, DataError, UserError, did_you_mean, text_of
from ipucnn.filesystem import Kind, entries, expand, kind_of, read_bytes, shown
from ipucnn.text import printable, quoted, shown_value

MAX_BYTES = 2**24
MODELS_GROUP = "ipucnn.models"
"""Group of the entry points of installed packages that make networks, with functions like those of Python files."""
_NAME = re.compile(r"(?s)(.*\.py):([^/\\:]*)")


def is_python_name(name: str) -> bool:
    """Whether a name means a function in a Python file, or a Python file without a function."""
    return name.lower().endswith(".py") or _NAME.fullmatch(name) is not None


def naming_hint(name: str, run: Path) -> str:
    """Makes the hint to name a run's Python file on the command line, with the file's path from the current folder.

    Args:
        name: the file's name in the run.
        run: the run folder; if the name is no file in the current folder, it is searched for in all folders above.
    """
    path, colon, function = name.rpartition(":") if ":" in name else (name, "", "")
    places = [path, *(os.path.relpath(folder / path) for folder in Path(os.path.abspath(run)).parents)]
    place = next((place for place in places if Path(place).is_file()), path)
    return f"add --model-name {quoted(f'{place}{colon}{function}')}"


def label_of(name: str) -> str:
    """The label of a user's file for names of folders: ``my_net-build`` for ``nets/my_net.py:build``."""
    path, _, function = name.rpartition(":") if _NAME.fullmatch(name) else (name, "", "")
    stem = re.sub(r"[^A-Za-z0-9_.-]", "_", Path(path).stem).strip(".-")[:100] or "own"
    return f"{stem}-{function}" if function else stem


@dataclass(frozen=True)
class OwnFunction:
    """A function of the user's or an installed package's code, none of which has run yet.

    Attributes:
        name: the user's name of the function.
        sha256: digest of its file; for an installed package, of the entry point's value.
        load: function that imports it.
        path: path of its file; None for an installed package.
        imports: names that the file imports, without those of modules in packages.
    """

    name: str
    sha256: str
    load: Callable[[], Any]
    path: Optional[Path] = None
    imports: FrozenSet[str] = frozenset()

    def __call__(self, *arguments: object) -> Any:
        """Imports the function and calls it; output of both goes to stderr, because stdout is for results.

        Raises:
            ConfigurationError: importing or calling raises an error, or it is not a function.
        """
        hint = "fix the package that offers it"
        if self.path is not None:
            hint = "fix that line; docs/own-networks.md says what the function is given"
        beside = contextlib.nullcontext() if self.path is None else _beside(self.path.parent)
        try:
            with contextlib.redirect_stdout(sys.stderr), _surroundings(self.name), beside:
                function = self.load()
                self._check_imports()
                if callable(function):
                    return function(*arguments)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise own_code_failed(error, self.name, self.path, hint) from error
        raise ConfigurationError(f"{shown_value(self.name)} is not a function", "define it with def")

    def _check_imports(self) -> None:
        """Refuses an import of an installed module where one of that name lies beside the file.

        Raises:
            ConfigurationError: there is such an import.  Python's own modules always come first.
        """
        if self.path is None:
            return
        for name in sorted(self.imports):
            beside = self.path.with_name(f"{name}.py")
            given = getattr(sys.modules.get(name), "__file__", None)
            if given is None or Path(given) == beside or not beside.is_file():
                continue
            if {"site-packages", "dist-packages"} & {*Path(given).parts}:
                raise ConfigurationError(
                    f"{shown_value(self.name)} imports {name}, which is {given} and not {shown(beside)}",
                    f"rename {shown(beside)}, and import it by that name",
                )


_Stamp = Tuple[int, int]
_imported: Dict[Path, Dict[str, Tuple[types.ModuleType, _Stamp]]] = {}
"""The modules that files of a folder imported from it, and their stamps at that time."""


@contextlib.contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """Lets a user's file import modules of its folder, and no module of this name of another file's folder.

    A module that was edited is imported again, and so is the file.
    """
    mine = _imported.setdefault(folder, {})
    if any(_stamp(module) != stamp for module, stamp in mine.values()):
        _module.cache_clear()
        for name in mine:
            sys.modules.pop(name, None)
        mine.clear()
    for name, module in [(name, module) for kept in _imported.values() for name, (module, _) in kept.items()]:
        first = folder / name.partition(".")[0]
        if sys.modules.get(name) is module and (first.is_dir() or first.with_suffix(".py").is_file()):
            del sys.modules[name]
    sys.modules.update({name: module for name, (module, _) in mine.items()})
    former = set(sys.modules)
    # Last, so that files there cannot replace modules of Python or of installed packages.
    sys.path.append(str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))
        for name in {*sys.modules} - former:
            file = getattr(sys.modules[name], "__file__", None)
            first = folder / name.partition(".")[0]
            # Not of an environment that lies in the folder.
            if file is not None and {first, first.with_suffix(".py")} & {Path(file), *Path(file).parents}:
                mine[name] = sys.modules[name], _stamp(sys.modules[name])


def _stamp(module: types.ModuleType) -> _Stamp:
    """Size and time of change of a module's file, by which an edited one is known; zeros of a file that is gone."""
    try:
        stat = os.stat(module.__file__ or "")
    except OSError:
        return 0, 0
    return stat.st_size, stat.st_mtime_ns


@contextlib.contextmanager
def _surroundings(name: str) -> Iterator[None]:
    """Hides the command line from the user's code, which may read it with argparse.

    Sets back the current folder, in which the run lies, and the handlers of signals, at which it writes a checkpoint.
    """
    given, sys.argv, folder = sys.argv, [name], os.getcwd()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        sys.argv = given
        os.chdir(folder)
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@functools.lru_cache(maxsize=None)
def _module(path: Path, code: types.CodeType, sha256: str) -> types.ModuleType:
    """Runs the file as a module, once for all of its functions, because Keras refuses to register a layer twice."""
    module = types.ModuleType(f"ipucnn_own_{path.stem}_{sha256[:12]}")
    module.__file__ = str(path)
    # Data classes, pickle and Keras look up the module of a class here.
    sys.modules[module.__name__] = module
    try:
        exec(code, module.__dict__)
    except BaseException:
        del sys.modules[module.__name__]
        raise
    return module


def own_code_failed(
    error: BaseException, what: str, path: Optional[Path] = None, hint: str = "fix that line"
) -> ConfigurationError:
    """Converts an error of the user's own code into a ConfigurationError with the line that raised it.

    Args:
        what: the code, as the user named it.
        path: its file, whose last line in the traceback is shown; None for the last line of any file.
        hint: what to do about the error.
    """
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if path is None or frame.filename == str(path)]
    where = f", {shown(Path(places[-1].filename))}, line {places[-1].lineno}" if places else ""
    if path is None and isinstance(error, ImportError):
        where = ""  # the place of the import is not the mistake
    if isinstance(error, SyntaxError) and error.filename:
        where = f", {shown(Path(error.filename))}, line {error.lineno}"
    # Keras writes several lines, including the cause.
    text = printable(" ".join(text_of(error).split()))[:300]
    return ConfigurationError(
        f"{shown_value(what)} raised {type(error).__name__}{': ' + text if text else ''}{where}", hint
    )


def find_function(name: str, example: str) -> OwnFunction:
    """Finds the function of FILE.py:FUNCTION; the file is read but not run.

    Args:
        example: name of a suitable function for hints, such as ``build``.

    Raises:
        ConfigurationError: the file is not Python, or does not contain the name.
        DataError: the file does not exist, or cannot be read.
    """
    match = _NAME.fullmatch(name)
    if match is None or not match.group(2):
        raise ConfigurationError(
            f"{shown_value(name)} names a Python file without the function in it",
            f"for example {shown_value(name.rstrip(':'))}:{example}",
        )
    path, function = expand(match.group(1)).absolute(), match.group(2)
    if kind_of(path) is Kind.ABSENT:
        folder = os.path.dirname(match.group(1))
        others = [os.path.join(folder, other.name) for other in entries(path.parent) if other.suffix == ".py"]
        raise DataError(
            f"{shown_value(name)}: there is no file {shown(path)}",
            did_you_mean(match.group(1), others, cutoff=0.75)
            or f"check the path; names such as {'lenet' if example == 'build' else 'digits'} need no file",
        )
    data = read_bytes(path, MAX_BYTES, f"give FILE.py:FUNCTION, for example my_file.py:{example}")
    try:
        tree = ast.parse(data, str(path))
        code = compile(tree, str(path), "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # ValueError: a NUL
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = printable(getattr(error, "msg", None) or str(error))[:200] or type(error).__name__
        raise ConfigurationError(f"{shown(path)}{line} is not Python: {reason}", "fix the file") from None
    # Not only among the names of the code: it may set names by text, such as in globals() or __all__.
    if not re.search(rf"\b{re.escape(function)}\b", data.decode("utf-8", "replace")):
        raise ConfigurationError(
            f"{shown(path)} has no function {shown_value(function)}",
            did_you_mean(function, list(_possible_functions(tree))) or f"define it: def {example}(...)",
        )
    sha256, imports = hashlib.sha256(data).hexdigest(), frozenset(_imports(tree))
    return OwnFunction(
        name, sha256, lambda: getattr(_module(path, code, sha256), function, None), path, imports
    )


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yields the names of the modules and packages that a file imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _possible_functions(tree: ast.Module) -> Iterator[str]:
    """Yields the names of functions at the top of a file; those of its modules and values are no functions."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)


# --- installed packages


def entry_points(group: str) -> Dict[str, OwnFunction]:
    """The functions of installed packages in a group, ``ipucnn.models`` or ``ipucnn.datasets``, sorted by name."""
    from importlib import metadata

    installed: Any = metadata.entry_points()
    # Up to Python 3.9 it is a dictionary by group.
    entries = installed.select(group=group) if hasattr(installed, "select") else installed.get(group, ())
    values: Dict[str, Dict[str, Callable[[], object]]] = {}
    for entry in sorted(entries, key=lambda entry: str(entry.name)):
        values.setdefault(entry.name, {})[entry.value] = entry.load
    return {name: _offered(name, loads) for name, loads in values.items()}


def _offered(name: str, loads: Dict[str, Callable[[], object]]) -> OwnFunction:
    """The function that a package offers; one that several offer raises an error when it is loaded."""

    def refuse() -> None:
        raise ConfigurationError(
            f"{shown_value(name)} is offered by several installed packages: {', '.join(sorted(loads))}",
            "uninstall the others",
        )

    value, load = next(iter(loads.items()))
    return OwnFunction(name, hashlib.sha256(value.encode()).hexdigest(), load if len(loads) == 1 else refuse)
