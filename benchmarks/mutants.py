"""Changes a module in many small ways, one at a time, and lists the changes that its tests do not notice.

Usage: python benchmarks/mutants.py ipucnn/documents.py tests/test_documents.py ... [--count 20] [--seed 1]

Each change (a mutant) is drawn at random from all of them: another comparison or operator, a number plus one, a bool
negated, a `not` dropped, None returned, or a statement removed.  Texts, annotations and `raise` stay as they are.  The
tests run in a copy of the checkout.  Read each mutant that survives: either no test could notice it, or one is missing.
"""

import argparse
import ast
import itertools
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 60
"""Processor time of a mutant's tests; one that never ends is noticed, too."""

_PAIRS: Tuple[Tuple[Any, Any], ...] = (
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.In, ast.NotIn),
    (ast.Is, ast.IsNot),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.FloorDiv),
    (ast.And, ast.Or),
)
_OTHER: Dict[Any, Any] = {**dict(_PAIRS), **{other: one for one, other in _PAIRS}}


class Mutant(NamedTuple):
    """A change of a module: the line, the code there before and after it, and the module's new source."""

    line: int
    before: str
    after: str
    source: str


def _replacements(node: ast.AST) -> Iterator[ast.AST]:
    """Returns the nodes that may replace a node."""
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            if type(operator) in _OTHER:
                others = [*node.ops[:place], _OTHER[type(operator)](), *node.ops[place + 1 :]]
                yield ast.Compare(node.left, others, node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OTHER:
        yield ast.BinOp(node.left, _OTHER[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(_OTHER[type(node.op)](), node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        yield ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Return) and node.value is not None:
        if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield ast.Return(ast.Constant(None))
    elif _is_removable(node):
        yield ast.Pass()


def _is_removable(node: ast.AST) -> bool:
    """Tells whether a node is a statement without which the rest may still run."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, (ast.Constant, ast.Yield))
    if isinstance(node, ast.Assign):
        # Without a name's only assignment there is a NameError, which proves nothing.
        return not any(isinstance(target, (ast.Name, ast.Tuple)) for target in node.targets)
    if isinstance(node, ast.If):
        return not node.orelse
    return isinstance(node, (ast.AugAssign, ast.Continue, ast.Break))


class _Changer(ast.NodeTransformer):
    """Makes the change with a number, if there is one, and counts all."""

    def __init__(self, wanted: Optional[int] = None) -> None:
        self.wanted, self.count = wanted, 0
        self.made: Tuple[ast.AST, ast.AST]

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, (ast.Raise, ast.JoinedStr)):
            return node
        for replacement in _replacements(node):
            self.count += 1
            if self.count - 1 == self.wanted:
                self.made = node, replacement
                return ast.copy_location(replacement, node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns"):
                continue
            if isinstance(value, list):
                value[:] = [self.visit(item) if isinstance(item, ast.AST) else item for item in value]
            elif isinstance(value, ast.AST):
                setattr(node, name, self.visit(value))
        return node


def mutants(source: str, count: int, seed: int) -> List[Mutant]:
    """Draws mutants of a module, in the order of its lines; all of them if there are at most ``count``."""
    counter = _Changer()
    counter.visit(ast.parse(source))
    drawn = []
    for number in random.Random(seed).sample(range(counter.count), min(count, counter.count)):
        changer = _Changer(number)
        changed = ast.unparse(ast.fix_missing_locations(changer.visit(ast.parse(source))))
        before, after = changer.made
        drawn.append(Mutant(before.lineno, ast.unparse(before), ast.unparse(after), changed))  # type: ignore[attr-defined]
    return sorted(drawn, key=lambda mutant: mutant.line)


_SECONDS = itertools.count(1)


def survives(copy: Path, module: str, source: str, tests: List[str]) -> bool:
    """Tells whether the tests pass in a copy of the checkout whose module has another source."""
    (copy / module).write_text(source)
    # Byte code is found by whole seconds and size, and a mutant may have those of the one before it.
    second = next(_SECONDS)
    os.utime(copy / module, (second, second))
    words = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
    limit = lambda: resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 1))  # noqa: E731
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    variables["PYTHONPATH"] = str(copy)
    return not subprocess.run(
        words, cwd=copy, env=variables, preexec_fn=limit, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("module")
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "build", ".*_cache"))
        source = (copy / given.module).read_text()
        # Comments are gone in mutants, too: a test that reads them would notice every one.
        if not survives(copy, given.module, ast.unparse(ast.parse(source)), given.tests):
            sys.exit("error: the tests fail without a change")
        drawn, alive = mutants(source, given.count, given.seed), 0
        for mutant in drawn:
            if survives(copy, given.module, mutant.source, given.tests):
                alive += 1
                print(f"{given.module}:{mutant.line}: {mutant.before}  ->  {mutant.after}", flush=True)
    print(f"{len(drawn)} mutants, {alive} survive")


if __name__ == "__main__":
    main()
