"""How many small mistakes in central modules the tests notice.

    python benchmarks/mutants.py --seed 7 --each 30 --keep DIR            # hours; stop it and start it again at will
    python benchmarks/mutants.py --seed 7 --each 3 --modules ipucnn/training/batching.py

Each mutant is the tree with one change in one module: a comparison or an operation turned into another, a number one
larger, a condition negated, an ``and`` made an ``or``, a result dropped.  It runs the tests whose files import the
module, in a copy of the tree, until the first fails: then the mutant is killed.  A mutant that outlasts ten times what
the unchanged tree takes is killed, too (a loop that does not end).  What survives is printed with its line: a test that
is missing, or a change that changes nothing.

Mutants are drawn with the seed from the module's own text alone, so that two trees in which a module is the same get
the same mutants.
"""

import argparse
import ast
import contextlib
import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

REPOSITORY = Path(__file__).resolve().parent.parent
MODULES = (
    "ipucnn/config/values.py",
    "ipucnn/config/resolve.py",
    "ipucnn/documents.py",
    "ipucnn/filesystem.py",
    "ipucnn/datasets/base.py",
    "ipucnn/training/batching.py",
    "ipucnn/training/program.py",
    "ipucnn/training/schedules.py",
    "ipucnn/training/checkpoints.py",
    "ipucnn/hardware.py",
)
PATIENCE = 10
LEAST_S = 60.0

_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATIONS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
}  # fmt: skip


class Mutant(NamedTuple):
    """A change: where, what, and the module's text with it."""

    line: int
    change: str
    text: str


def _changes(node: ast.AST) -> Iterator[Tuple[str, Any]]:
    """What can be changed at a node: a name of the change, and a function that makes it on a copy of the node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        other = _COMPARISONS[type(node.ops[0])]
        yield f"{type(node.ops[0]).__name__} -> {other.__name__}", lambda n: setattr(n, "ops", [other()])
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        other_op = _OPERATIONS[type(node.op)]
        # "text" % values and [1] * 3 are no arithmetic.
        if not any(
            isinstance(side, (ast.List, ast.JoinedStr)) or _is_text(side) for side in (node.left, node.right)
        ):
            name = f"{type(node.op).__name__} -> {other_op.__name__}"
            yield name, lambda n: setattr(n, "op", other_op())
    if isinstance(node, ast.BoolOp):
        other_bool = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield f"{type(node.op).__name__} -> {other_bool.__name__}", lambda n: setattr(n, "op", other_bool())
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield f"{node.value} -> {node.value + 1}", lambda n: setattr(n, "value", n.value + 1)
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} -> {not node.value}", lambda n: setattr(n, "value", not n.value)
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        yield "negated condition", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
    if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield "returns None", lambda n: setattr(n, "value", ast.Constant(None))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def draw(text: str, number: int, seed: int) -> List[Mutant]:
    """So many mutants of a module, or all there are if they are fewer; a pure function of the arguments."""
    tree = ast.parse(text)
    places = [(at, name) for at, node in enumerate(ast.walk(tree)) for name, _ in _changes(node)]
    chosen = random.Random(f"{seed} {text}").sample(places, min(number, len(places)))
    mutants = []
    for at, name in sorted(chosen):
        changed = copy.deepcopy(tree)
        node: Any = list(ast.walk(changed))[at]
        line = getattr(node, "lineno", 0)
        dict(_changes(node))[name](node)
        mutants.append(Mutant(line, name, ast.unparse(ast.fix_missing_locations(changed)) + "\n"))
    return mutants


def tests_of(tree: Path, module: str) -> List[str]:
    """The test files that import a module themselves; those named after it first, as they kill the soonest."""
    name = module[: -len(".py")].replace("/", ".")
    package, _, last = name.rpartition(".")
    found = []
    for path in sorted((tree / "tests").glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = (
                [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            )
            if (isinstance(node, ast.Import) and name in named) or (
                isinstance(node, ast.ImportFrom)
                and (node.module == name or (node.module == package and last in named))
            ):
                found.append(f"tests/{path.name}")
                break
    parts = name.split(".")[1:]
    return sorted(found, key=lambda file: -sum(part in Path(file).stem.split("_") for part in parts))


def run_tests(tree: Path, files: Sequence[str], limit_s: Optional[float]) -> Tuple[str, float]:
    """("passed", "failed" or "endless", seconds) of some test files of a tree, until the first failure.

    What they print is in ``pytest.log`` beside the tree.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *files]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    begin = time.perf_counter()
    log = open(tree.parent / "pytest.log", "wb")  # noqa: SIM115 - closed when the tests have ended
    process = subprocess.Popen(
        command, cwd=str(tree), env=environment, stdout=log, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        code = process.wait(limit_s)
        outcome = "passed" if code in (0, 5) else "failed"
    except subprocess.TimeoutExpired:
        outcome = "endless"
    finally:
        # The tests start processes of their own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.close()
    return outcome, time.perf_counter() - begin


def check(
    tree: Path, module: str, each: int, seed: int, done: Dict[str, Any], save: Any, until: float
) -> None:
    """Runs a module's mutants that were not run yet, until ``until`` of the monotonic clock."""
    files = tests_of(tree, module)
    text = (tree / module).read_text(encoding="utf-8")
    mutants = draw(text, each, seed)
    entry = done.setdefault(module, {"tests": files, "mutants": {}})
    if not files:
        print(f"{module}: no test imports it")
        return
    if "unchanged_s" not in entry:
        outcome, entry["unchanged_s"] = run_tests(tree, files, None)
        if outcome != "passed":
            said = (tree.parent / "pytest.log").read_text(encoding="utf-8", errors="replace")
            sys.exit(f"{said[-3000:]}\n{module}: its tests fail without any mutant")
        save()
    for mutant in mutants:
        key = f"{mutant.line}: {mutant.change}"
        if key in entry["mutants"]:
            continue
        if time.monotonic() > until:
            return
        (tree / module).write_text(mutant.text, encoding="utf-8")
        try:
            limit_s = max(LEAST_S, PATIENCE * entry["unchanged_s"])
            entry["mutants"][key], _ = run_tests(tree, files, limit_s)
        finally:
            (tree / module).write_text(text, encoding="utf-8")
        save()
        if entry["mutants"][key] == "passed":
            print(f"{module}:{key}: survived")


def main() -> None:
    """Parses the command line, runs the mutants, prints the table."""
    parser = argparse.ArgumentParser(
        description="How many small mistakes in central modules the tests notice."
    )
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--each", type=int, default=30, help="mutants of each module")
    parser.add_argument("--modules", nargs="+", default=list(MODULES))
    parser.add_argument(
        "--keep", type=Path, help="folder of results, to go on after a stop; default: none is kept"
    )
    parser.add_argument("--max-hours", type=float, default=4.0)
    arguments = parser.parse_args()
    until = time.monotonic() + 3600 * arguments.max_hours
    done: Dict[str, Any] = {}
    results = arguments.keep / f"mutants-{arguments.seed}.json" if arguments.keep else None
    if results is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
        if results.is_file():
            done = json.loads(results.read_text(encoding="utf-8"))

    def save() -> None:
        if results is not None:
            results.write_text(json.dumps(done, indent=1), encoding="utf-8")

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / "tree"
        for name in ("ipucnn", "tests", "benchmarks", "docs", "custom_ops", "results", "constraints", ".ci"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(str(REPOSITORY / name), str(tree / name), ignore=ignored)
        for path in REPOSITORY.iterdir():
            if path.is_file():
                shutil.copy(str(path), str(tree / path.name))
        for module in arguments.modules:
            check(tree, module, arguments.each, arguments.seed, done, save, until)
    print(f"{'module':<36} mutants  killed  survived  test files")
    total = [0, 0]
    for module, entry in done.items():
        killed = sum(outcome != "passed" for outcome in entry["mutants"].values())
        number = len(entry["mutants"])
        total = [total[0] + number, total[1] + killed]
        print(f"{module:<36} {number:7} {killed:7} {number - killed:9}  {len(entry['tests'])}")
    print(f"{'together':<36} {total[0]:7} {total[1]:7} {total[0] - total[1]:9}")


if __name__ == "__main__":
    main()
