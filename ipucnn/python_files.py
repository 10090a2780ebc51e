"""Functions of users' own, of Python files (FILE.py:FUNCTION) and installed packages: found without running, and run.

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
from typing import Any, Callable, Dict, Optional

from ipucnn.errors import ConfigurationError, UserError, did_you_mean, text_of
from ipucnn.filesystem import absolute, expand, is_file, read_bytes, shown
from ipucnn.text import printable, shown_value

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
class OwnFunction:
    """A function that is not this package's; nothing of it has run.

    Attributes:
        name: as the user named it.
        sha256: of its file; of a package's function of what names it.
        load: imports it.
        path: of its file; None of a package's.
    """

    name: str
    sha256: str
    load: Callable[[], Any]
    path: Optional[Path] = None

    def __call__(self, *arguments: object) -> Any:
        """Imports the function and calls it.

        What either prints goes to stderr: stdout is for results.

        Raises:
            ConfigurationError: either raises an error, or it is no function.
        """
        hint = "fix the package that offers it"
        if self.path is not None:
            hint = "fix that line; docs/own-networks.md says what the function is given"
            # Last, so that nothing that lies there takes the place of a module of Python or an installed package.
            sys.path.append(str(self.path.parent))
        try:
            with contextlib.redirect_stdout(sys.stderr):
                function = self.load()
                if callable(function):
                    return function(*arguments)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise own_code_failed(error, self.name, self.path, hint) from error
        finally:
            if self.path is not None:
                with contextlib.suppress(ValueError):
                    sys.path.remove(str(self.path.parent))
        raise ConfigurationError(f"{shown_value(self.name)} is not a function", "define it with def")


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


def own_code_failed(
    error: BaseException, what: str, path: Optional[Path] = None, hint: str = "fix that line"
) -> ConfigurationError:
    """What to tell where code of the user's own raised an error.

    Args:
        what: was run, as the user named it.
        path: its file, whose line is the one to look at; None: the last one, whichever file it is in.
        hint: what to do about it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if path is None or frame.filename == str(path)]
    where = f", {shown(Path(places[-1].filename))}, line {places[-1].lineno}" if places else ""
    if path is None and isinstance(error, ImportError):
        where = ""  # where it was looked for, which is nobody's mistake
    if isinstance(error, SyntaxError) and error.filename:
        where = f", {shown(Path(error.filename))}, line {error.lineno}"
    # Keras writes several lines, the cause among them, with a terminal's colours.
    text = printable(" ".join(re.sub(r"\x1b\[[0-9;]*m", "", text_of(error)).split()))[:300]
    return ConfigurationError(
        f"{shown_value(what)} raised {type(error).__name__}{': ' + text if text else ''}{where}", hint
    )


def find_function(name: str, example: str) -> OwnFunction:
    """The function that FILE.py:FUNCTION names; the file is read and not run.

    Args:
        example: of a function that would do, such as ``build``.

    Raises:
        ConfigurationError: the file is not Python, or has no such word in it.
        DataError: the file cannot be read.
    """
    match = _NAME.fullmatch(name)
    if match is None or not match.group(2):
        raise ConfigurationError(
            f"{shown_value(name)} names a Python file without the function in it",
            f"for example {shown_value(name.rstrip(':'))}:{example}",
        )
    path, function = absolute(expand(match.group(1))), match.group(2)
    data = read_bytes(path, MAX_BYTES, f"give FILE.py:FUNCTION, for example my_file.py:{example}")
    try:
        text = data.decode("utf-8-sig")
        module = ast.parse(text, str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # ValueError: not UTF-8, or a NUL
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = printable(getattr(error, "msg", None) or str(error))[:200] or type(error).__name__
        raise ConfigurationError(f"{shown(path)}{line} is not Python: {reason}", "fix the file") from None
    if not re.search(rf"\b{re.escape(function)}\b", text):
        defined = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
        listed = f"it has {', '.join(map(shown_value, defined[:8]))}; " if defined else ""
        raise ConfigurationError(
            f"{shown(path)} has no function {shown_value(function)}",
            did_you_mean(function, defined) or f"{listed}define it: def {example}(...)",
        )
    sha256 = hashlib.sha256(data).hexdigest()
    return OwnFunction(name, sha256, lambda: getattr(_module(path, text, sha256), function, None), path)


# --- what other packages offer


def entry_points(group: str) -> Dict[str, OwnFunction]:
    """What installed packages offer in a group, ``ipucnn.models`` or ``ipucnn.datasets``, in the order of names."""
    from importlib import metadata

    installed: Any = metadata.entry_points()
    # Until Python 3.9 a dictionary by group.
    entries = installed.select(group=group) if hasattr(installed, "select") else installed.get(group, ())
    return {
        entry.name: OwnFunction(entry.name, hashlib.sha256(entry.value.encode()).hexdigest(), entry.load)
        for entry in sorted(entries, key=lambda entry: str(entry.name))
    }
