"""The public sources as ``quoted.csv`` quotes them: mutations are derived from them, not from the double's facts.

So a wrong fact of the double accepts a mutation, or refuses a legal call.
"""

import ast
import csv
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

import poplar_double


def _read() -> Dict[str, Dict[str, str]]:
    quoted: Dict[str, Dict[str, str]] = {}
    with open(Path(poplar_double.__file__).with_name("quoted.csv"), encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            kind, _, name = row["fact"].partition(" ")
            quoted.setdefault(kind, {})[name] = row["value"]
    return quoted


QUOTED = _read()
"""What is quoted, by kind (setting, enum, call, method, delegate, refused, flag) and name."""
ENUMS = {
    name: {member: int(number) for member, number in (one.split(" = ") for one in text.split(", "))}
    for name, text in QUOTED["enum"].items()
}


class Leaf(NamedTuple):
    """A setting of IPUConfig: the annotation of its type, and its default."""

    type: str
    default: Any


LEAVES = {
    name: Leaf(kind, ast.literal_eval(default))
    for name, (kind, default) in ((n, text.split(" = ", 1)) for n, text in QUOTED["setting"].items())
}


class Param(NamedTuple):
    """A parameter with a name of its own: not ``*`` and not ``**``."""

    name: str
    is_required: bool


def params_in(text: str) -> List[Param]:
    """Returns the parameters of a signature as Python writes it."""
    signature = ast.parse(f"def f({text}): pass").body[0].args  # type: ignore[attr-defined]
    num_required = len(signature.args) - len(signature.defaults)
    return [Param(one.arg, number < num_required) for number, one in enumerate(signature.args)]


def params_of(name: str) -> List[Param]:
    """Returns the parameters of a function or class of the SDK."""
    return params_in(QUOTED["call"][name])


def refused_by(method: str) -> List[str]:
    """Returns the keywords that a method of a model refuses."""
    return QUOTED["refused"][method].split(", ")
