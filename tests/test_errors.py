"""Every error that a user can cause has a hint."""

import ast
from pathlib import Path
from typing import Iterator, Optional

import ipucnn
from ipucnn import errors

PACKAGE = Path(ipucnn.__file__).parent
ERRORS = {
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.UserError)
}
# Parameters and functions that hold such a class: `error(...)` in ipucnn.filesystem and ipucnn.documents.
STAND_INS = {"error", "NotFiniteError"}


def _name(call: ast.Call) -> str:
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


def _hint(call: ast.Call) -> Optional[ast.expr]:
    if len(call.args) > 1:
        return call.args[1]
    return next((keyword.value for keyword in call.keywords if keyword.arg == "hint"), None)


def _may_be_none(hint: Optional[ast.expr]) -> bool:
    """Returns whether a hint is missing, is None, or is a suggestion that may be None."""
    if isinstance(hint, ast.IfExp):
        return _may_be_none(hint.body) or _may_be_none(hint.orelse)
    if isinstance(hint, ast.BoolOp):
        return _may_be_none(hint.values[-1])
    is_none = isinstance(hint, ast.Constant) and hint.value is None
    return hint is None or is_none or (isinstance(hint, ast.Call) and _name(hint) == "did_you_mean")


def _without_hint(text: str) -> Iterator[int]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and _name(node) in ERRORS | STAND_INS and _may_be_none(_hint(node)):
            yield node.lineno


def test_every_error_has_a_hint():
    without_hint = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in _without_hint(path.read_text(encoding="utf-8"))
    ]
    assert without_hint == []


def test_errors_without_hints_are_found():
    lines = (
        'DataError("a")',
        'DataError("a", None)',
        'DataError("a", hint or None)',
        'raise DataError("a", did_you_mean("b", names))',
        'ConfigurationError("a", "b" if c else None)',
        'DataError("a", "b")',
        'DataError("a", did_you_mean("b", names) or "c")',
    )
    assert list(_without_hint("\n".join(lines))) == [1, 2, 3, 4, 5]
