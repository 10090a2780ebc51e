"""Names the place of each rule of the test double in the SDK's public sources: repository, branch, file and symbol.

``provenance.csv`` lists the functions that follow a public source, and the refusals that no public source states, with
a reason.  ``tests/test_poplar_sources.py`` refuses code that raises and is not in the table.
"""

import ast
import csv
from pathlib import Path
from typing import Any, List, NamedTuple, Set, Tuple

_RELEASE = "r2.6/sdk-release-3.4"
# Repository and branch by the first word of a place.
_REPOSITORIES = {
    "tensorflow": ("graphcore/tensorflow", _RELEASE),
    "tensorflow-3.0": ("graphcore/tensorflow", "r2.6/sdk-release-3.0"),
    "keras": ("graphcore/keras", _RELEASE),
    "addons": ("graphcore/ipu_tensorflow_addons", _RELEASE),
    "poplibs": ("graphcore/poplibs", "sdk-release-3.4"),
    # Sources that graphcore/tensorflow takes over unchanged.
    "stock": ("tensorflow/tensorflow", "v2.6.3"),
}
# The folders of graphcore/tensorflow and graphcore/keras with most rules.
_FOLDERS = {
    "driver": ("tensorflow", "tensorflow/compiler/plugin/poplar/driver/"),
    "kernels": ("tensorflow", "tensorflow/compiler/plugin/poplar/kernels/"),
    "ipu": ("tensorflow", "tensorflow/python/ipu/"),
    "extensions": ("keras", "keras/ipu/extensions/"),
}


class Source(NamedTuple):
    """One place in a public repository."""

    repository: str
    branch: str
    file: str
    symbol: str


class Provenance(NamedTuple):
    """One row of the table.

    Attributes:
        function: a function or class of the test double, ``module.Class.function``; what is inside follows it, too.
        place: where the SDK does what the function does: ``"<repository or folder> <file> <symbol>"``.
        why_none: the reason if no public source states the refusal.
    """

    function: str
    place: str
    why_none: str


def parse(place: str) -> Source:
    """Parses ``"<repository or folder> <file> <symbol>"``.

    Raises:
        ValueError: one of the three is missing or unknown.
    """
    words = place.split()
    if len(words) != 3:
        raise ValueError(f"{place!r} names not a repository, a file and a symbol")
    where, file, symbol = words
    where, folder = _FOLDERS.get(where, (where, ""))
    if where not in _REPOSITORIES:
        raise ValueError(f"{place!r}: there is no repository {where!r}")
    if "." not in file.rpartition("/")[2]:
        raise ValueError(f"{place!r}: {file!r} is no file")
    return Source(*_REPOSITORIES[where], folder + file, symbol)


def read_table(name: str, row: Any) -> List[Any]:
    """Reads all rows of a CSV file beside this module."""
    with Path(__file__).with_name(name).open(encoding="utf-8", newline="") as lines:
        return [row(**values) for values in csv.DictReader(lines)]


def read_functions(folder: Path) -> Tuple[Set[str], List[str]]:
    """Returns the names of a folder's functions and classes, and for each ``raise`` the function that it is in.

    NotImplementedError("the double ...") is exempt: it says itself that the test double lacks something.
    """
    functions: Set[str] = set()
    raising: List[str] = []
    for path in sorted(folder.glob("*.py")):
        if path.name != Path(__file__).name:
            _read(ast.parse(path.read_text(encoding="utf-8")), path.stem, functions, raising)
    return functions, raising


def _read(node: ast.AST, name: str, functions: Set[str], raising: List[str]) -> None:
    for child in ast.iter_child_nodes(node):
        inner = name
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            inner = f"{name}.{child.name}"
            functions.add(inner)
        elif isinstance(child, ast.Raise) and child.exc is not None and not _is_lack(child.exc):
            raising.append(name)
        _read(child, inner, functions, raising)


def _is_lack(error: ast.expr) -> bool:
    """Whether a statement raises NotImplementedError("the double ...")."""
    if not (isinstance(error, ast.Call) and getattr(error.func, "id", "") == "NotImplementedError"):
        return False
    text = error.args[0]
    if isinstance(text, ast.JoinedStr):
        text = text.values[0]
    return isinstance(text, ast.Constant) and str(text.value).startswith("the double")
