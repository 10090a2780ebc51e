"""Names the place of each rule of the test double in the SDK's public sources: repository, branch, file and symbol.

``@rule`` marks code that follows a public source, ``@unsourced`` a refusal that no public source states.
:func:`declared` reads both in the test double's text; ``tests/test_poplar_sources.py`` refuses code that raises and has
neither.
"""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

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


@dataclass(frozen=True)
class Source:
    """One place in a public repository."""

    repository: str
    branch: str
    file: str
    symbol: str


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


def rule(*places: str) -> Callable[[Function], Function]:
    """Declares where the SDK does what a function of the test double does.

    Raises:
        ValueError: no place is given, or :func:`parse` refuses one.
    """
    if not places:
        raise ValueError("a rule names at least one place")
    for place in places:
        parse(place)
    return lambda function: function


def unsourced(reason: str) -> Callable[[Function], Function]:
    """Declares that no public source states a function's refusal, and gives the reason for it.

    Raises:
        ValueError: no reason is given.
    """
    if not reason.strip():
        raise ValueError("say why")
    return lambda function: function


@dataclass(frozen=True)
class Declared:
    """A function or class of the test double, read from its text.

    Attributes:
        name: ``module.Class.function``.
        sources: the sources of all its ``@rule``.
        is_unsourced: whether it has ``@unsourced``.
    """

    name: str
    sources: Tuple[Source, ...]
    is_unsourced: bool


def declared() -> Tuple[Dict[str, Declared], List[str]]:
    """Returns the declared functions by name, and the places that raise without a source or a reason.

    NotImplementedError("the double ...") is exempt: it says itself that the test double lacks something.
    """
    functions: Dict[str, Declared] = {}
    undeclared: List[str] = []
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.name != Path(__file__).name:
            _read(ast.parse(path.read_text(encoding="utf-8")), path.stem, False, functions, undeclared)
    return functions, undeclared


def _read(
    node: ast.AST, name: str, covered: bool, functions: Dict[str, Declared], undeclared: List[str]
) -> None:
    for child in ast.iter_child_nodes(node):
        inner, inner_covered = name, covered
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            inner = f"{name}.{child.name}"
            calls = [
                d for d in child.decorator_list if isinstance(d, ast.Call) and isinstance(d.func, ast.Name)
            ]
            places = [a.value for d in calls if d.func.id == "rule" for a in d.args]  # type: ignore[attr-defined]
            is_unsourced = any(d.func.id == "unsourced" for d in calls)  # type: ignore[attr-defined]
            if places or is_unsourced:
                functions[inner] = Declared(inner, tuple(map(parse, places)), is_unsourced)
                inner_covered = True
        elif (
            isinstance(child, ast.Raise) and child.exc is not None and not covered and not _is_lack(child.exc)
        ):
            undeclared.append(f"{name}, line {child.lineno}")
        _read(child, inner, inner_covered, functions, undeclared)


def _is_lack(error: ast.expr) -> bool:
    """Whether a statement raises NotImplementedError("the double ...")."""
    if not (isinstance(error, ast.Call) and getattr(error.func, "id", "") == "NotImplementedError"):
        return False
    text = error.args[0]
    if isinstance(text, ast.JoinedStr):
        text = text.values[0]
    return isinstance(text, ast.Constant) and str(text.value).startswith("the double")
