"""The modules of the package as syntax trees, read once for all tests of a process."""

import ast
import functools
from pathlib import Path
from typing import List, NamedTuple, Tuple

PACKAGE = Path(__file__).resolve().parents[2] / "ipucnn"


class Source(NamedTuple):
    """A module: its file, its text, its tree, and all nodes of it in the order of ``ast.walk``."""

    path: Path
    text: str
    tree: ast.Module
    nodes: List[ast.AST]


@functools.lru_cache(maxsize=None)
def sources() -> Tuple[Source, ...]:
    """Returns all modules, in the order of their paths."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        found.append(Source(path, text, tree, list(ast.walk(tree))))
    return tuple(found)
