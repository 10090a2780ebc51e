"""Counts how many small mistakes in central modules the tests notice.

    python benchmarks/mutants.py --seed 7 --each 30 --jobs 2 --keep DIR   # stop it and start it again at will
    python benchmarks/mutants.py --seed 7 --each 3 --modules ipucnn/training/batching.py

Each mutant is the tree with one change in one module: a comparison or an operation turned into another, a number one
larger, a condition negated, an ``and`` made an ``or``, a result dropped.  In a copy of the tree, the tests that execute
the changed statement run, from the test files that import the module, until the first fails: then the mutant is killed.
Surviving mutants are printed: either a test is missing, or the change has no effect.

The statements that each test executes are recorded beforehand, once for each test file, also in the processes that
tests start (``mutants_recorder.py``).  Statements of a fixture or of a cached result count for all tests that use it,
and changes of module-level code run all tests of the files.  The quickest tests come first.  A mutant is also killed if
a test takes more than a minute and ten times as long as without it (a loop that does not end).  Tests that fail alone
without any mutant kill nothing.

The seed and the module's own text alone determine the mutants, so two trees with the same module get the same mutants.
Needs Python 3.12 or later.
"""

import argparse
import ast
import copy
import hashlib
import itertools
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

import mutants_runs as runs

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
# The tests that run first: at most so much time (seconds), from so many files.
FIRST_S, FIRST_FILES = 10.0, 3

_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATIONS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
}  # fmt: skip
_STATEMENTS: Any = (ast.stmt, ast.ExceptHandler, ast.match_case)


class Mutant(NamedTuple):
    """A change of a module.

    Attributes:
        key: the line and the kind of change; the number distinguishes changes of one line.
        lines: the first and the last line of the statement; of one with a body, those before the body.
        on_import: whether the statement runs when the module is imported.
        before, after: the changed part of the text.
        text: the module's text with the change.
    """

    key: str
    lines: Tuple[int, int]
    on_import: bool
    before: str
    after: str
    text: str


def _changes(node: ast.AST) -> Iterator[Tuple[str, Any]]:
    """Yields the possible changes of a node: a name, and a function that makes the change on a copy of the node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        other = _COMPARISONS[type(node.ops[0])]
        yield f"{type(node.ops[0]).__name__} -> {other.__name__}", lambda n: setattr(n, "ops", [other()])
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        other_op = _OPERATIONS[type(node.op)]
        # "text" % values and [1] * 3 are not arithmetic.
        if not any(
            isinstance(side, (ast.List, ast.JoinedStr)) or _is_text(side) for side in (node.left, node.right)
        ):
            name = f"{type(node.op).__name__} -> {other_op.__name__}"
            yield name, lambda n: setattr(n, "op", other_op())
    if isinstance(node, ast.BoolOp):
        other_bool = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield f"{type(node.op).__name__} -> {other_bool.__name__}", lambda n: setattr(n, "op", other_bool())
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, (int, float))
        and not isinstance(node.value, bool)
    ):
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


def tests_of(tree: Path, module: str) -> List[str]:
    """Returns the test files that import a module directly; those named after it come first, as they kill soonest."""
    name = module[: -len(".py")].replace("/", ".")
    package, _, last = name.rpartition(".")
    files = []
    for path in sorted((tree / "tests").glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = (
                [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            )
            if (isinstance(node, ast.Import) and name in named) or (
                isinstance(node, ast.ImportFrom)
                and (node.module == name or (node.module == package and last in named))
            ):
                files.append(f"tests/{path.name}")
                break
    parts = name.split(".")[1:]
    return sorted(files, key=lambda file: -sum(part in Path(file).stem.split("_") for part in parts))


def draw(text: str, number: int, seed: int) -> List[Mutant]:
    """Draws ``number`` mutants of a module, or all if there are fewer; a pure function of the arguments."""
    tree = ast.parse(text)
    places = [(at, name) for at, node in enumerate(ast.walk(tree)) for name, _ in _changes(node)]
    chosen = random.Random(f"{seed} {text}").sample(places, min(number, len(places)))
    statements = _statements(tree)
    mutants = []
    for at, name in sorted(chosen):
        changed = copy.deepcopy(tree)
        node: Any = list(ast.walk(changed))[at]
        dict(_changes(node))[name](node)
        before, after, whole = _edited(text, node, ast.fix_missing_locations(changed))
        # The innermost statement begins last.
        first, last, on_import = max(
            (
                statement
                for statement in statements
                if statement[0] <= node.lineno and node.end_lineno <= statement[3]
            ),
            key=lambda statement: statement[0],
        )[:3]
        lines = (first, max(last, first))
        mutants.append(Mutant(f"{node.lineno}: {name} #{at}", lines, on_import, before, after, whole))
    return mutants


def _statements(tree: ast.AST) -> List[Tuple[int, int, bool, int]]:
    """Returns each statement's first line, last line before its body, whether it runs on import, and last line."""
    statements: List[Tuple[int, int, bool, int]] = []

    def walk(node: ast.AST, on_import: bool) -> None:
        children: List[Any] = list(ast.iter_child_nodes(node))
        for child in children:
            if isinstance(child, _STATEMENTS):
                body = getattr(child, "body", None) or getattr(child, "cases", None)
                decorators = getattr(child, "decorator_list", [])
                line = getattr(child, "lineno", 0) or child.pattern.lineno
                first = min([line] + [decorator.lineno for decorator in decorators])
                end = getattr(child, "end_lineno", None) or child.body[-1].end_lineno
                begins = _first_line(body[0]) if body else 0
                statements.append((first, begins - 1 if body else end, on_import, end))
            walk(child, on_import and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))

    walk(tree, True)
    return statements


def _first_line(node: Any) -> int:
    return int(min([node.lineno] + [decorator.lineno for decorator in getattr(node, "decorator_list", [])]))


def _edited(text: str, node: Any, changed: ast.AST) -> Tuple[str, str, str]:
    """Returns the changed node's text before and after, and the module's whole text with the change.

    Everything else stays as it is, including comments and line numbers.
    """
    part: Any = node.test if isinstance(node, (ast.If, ast.IfExp, ast.While)) else node
    place: Any = part.operand if part is not node else part  # the original condition is inside the "not"
    before = ast.get_source_segment(text, place)
    assert before is not None
    after = ast.unparse(part)
    space = "\n" * before.count("\n")
    if isinstance(node, ast.Return):
        put = f"return (None{space})"
    else:
        put = f"({after}{space})"
    rows = text.encode("utf-8").splitlines(keepends=True)
    begin = sum(map(len, rows[: place.lineno - 1])) + place.col_offset
    end = sum(map(len, rows[: place.end_lineno - 1])) + place.end_col_offset
    data = text.encode("utf-8")
    whole = (data[:begin] + put.encode("utf-8") + data[end:]).decode("utf-8")
    assert ast.dump(ast.parse(whole)) == ast.dump(changed), f"line {node.lineno}: {before} became {put}"
    return " ".join(before.split()), " ".join(after.split()), whole


class Pool:
    """The tests of one module.

    Args:
        files: the test files that import it, see ``tests_of``.
        reached: the lines that the tests of each file execute.
    """

    def __init__(self, module: str, files: List[str], reached: Dict[str, runs.Reached]) -> None:
        self.module, self.files, self.reached = module, files, reached
        self.at_import = {
            line for record in reached.values() for line in record.lines["import"].get(module, [])
        }
        # Whether tests that killed a mutant pass without it when they run alone.
        self.passes: Dict[str, bool] = {test: False for record in reached.values() for test in record.failed}

    def is_for_all(self, mutant: Mutant) -> bool:
        """Whether the change affects code that runs when modules are imported, so that any test may notice it."""
        return mutant.on_import or not self.at_import.isdisjoint(_lines(mutant))

    def for_mutant(self, mutant: Mutant) -> Dict[str, float]:
        """Returns the tests for a mutant in the order they run in, and the seconds each takes unchanged."""
        lines = set(_lines(mutant))
        all_of_them = self.is_for_all(mutant)
        words = set(Path(self.module[:-3]).parts[1:])
        candidates = []
        for at, file in enumerate(self.files):
            named = -len(words & set(Path(file).stem.split("_")))
            for number, (test, executed) in enumerate(self.reached[file].lines.items()):
                lines_in_module = executed.get(self.module, [])
                if test == "import" or not self.passes.get(test, True):
                    continue
                if all_of_them or not lines.isdisjoint(lines_in_module):
                    seconds = self.reached[file].seconds[test]
                    slow = sum(seconds > bound for bound in (0.1, 0.5, 2, 8))
                    candidates.append((slow, not lines_in_module, named, at, number, test, seconds))
        return {test: seconds for *_, test, seconds in sorted(candidates)}


def _lines(mutant: Mutant) -> range:
    return range(mutant.lines[0], mutant.lines[1] + 1)


def first_of(tests: Dict[str, float]) -> Dict[str, float]:
    """Returns the tests that run first: the quickest, from few files, as each file has to be imported."""
    chosen: Dict[str, float] = {}
    files: List[str] = []
    for test, seconds in tests.items():
        file = test.split("::")[0]
        if file not in files and len(files) < FIRST_FILES:
            files.append(file)
        if file in files and sum(chosen.values()) + seconds <= FIRST_S:
            chosen[test] = seconds
    return chosen


def try_mutant(
    tree: Path, pool: Pool, mutant: Mutant, found: Callable[[Dict[str, Any]], None]
) -> Callable[[runs.Slot], runs.Task]:
    """Makes a task that runs a mutant's tests, and reports how it ended."""
    text = (tree / pool.module).read_text(encoding="utf-8")

    def task(slot: runs.Slot) -> runs.Task:
        begin = time.monotonic()
        tests = pool.for_mutant(mutant)
        result = {"outcome": "survived" if tests else "unreached", "tests": len(tests), "by": ""}
        parts = [first_of(tests)]
        parts.append({test: seconds for test, seconds in tests.items() if test not in parts[0]})
        while parts and result["outcome"] == "survived":
            part = parts.pop(0)
            if not part:
                continue
            slot.write(pool.module, mutant.text)
            try:
                outcome = yield _run(part)
            finally:
                slot.write(pool.module, text)
            if outcome.kind == "passed":
                continue
            if outcome.test in part:
                if outcome.test not in pool.passes:
                    alone = yield _run({outcome.test: part[outcome.test]})
                    pool.passes[outcome.test] = alone.kind == "passed"
                if not pool.passes[outcome.test]:
                    parts.insert(0, {test: s for test, s in part.items() if pool.passes.get(test, True)})
                    continue
            result.update(outcome=outcome.kind, by=outcome.test)
        found({**result, "s": round(time.monotonic() - begin, 1)})

    return task


def _run(tests: Dict[str, float]) -> runs.Run:
    return runs.Run(list(dict.fromkeys(test.split("::")[0] for test in tests)), tests)


def main() -> None:
    """Parses the command line, runs the mutants, prints the table."""
    parser = argparse.ArgumentParser(
        description="How many small mistakes in central modules the tests notice."
    )
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--each", type=int, default=30, help="mutants of each module")
    parser.add_argument("--modules", nargs="+", default=list(MODULES))
    parser.add_argument("--jobs", type=int, default=1, help="runs of tests at the same time")
    parser.add_argument("--tree", type=Path, default=REPOSITORY, help="the repository; default: this one")
    parser.add_argument(
        "--keep", type=Path, help="folder of results, to go on after a stop; default: none is kept"
    )
    parser.add_argument("--max-hours", type=float, default=4.0)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # like Ctrl-C: removes processes and copies
    until = time.monotonic() + 3600 * arguments.max_hours
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        keep = (arguments.keep or Path(folder) / "kept").resolve()
        tree = arguments.tree.resolve()
        runs.prepare(tree)
        slots = [runs.Slot(tree, Path(folder) / str(at)) for at in range(arguments.jobs)]
        tree = shutil.copytree(
            slots[0].tree, Path(folder) / "tree"
        )  # a snapshot, whatever is edited meanwhile
        results = keep / f"mutants-{arguments.seed}.json"
        done = json.loads(results.read_text(encoding="utf-8")) if results.is_file() else {}
        untried = False
        # Mutants of module-level code run all tests and take longest, so they come last.
        for on_import, module in itertools.product((False, True), arguments.modules):
            files = tests_of(tree, module)
            reached = note(tree, slots, files, {*MODULES, *arguments.modules}, keep / "reached", until)
            untried = len(reached) < len(files)
            if untried:
                break  # the time is up
            pool = Pool(module, files, reached)
            for test in [] if on_import else pool.passes:
                print(f"{module}: left out, as it fails without any mutant: {test}")
            mutants = draw((tree / module).read_text(encoding="utf-8"), arguments.each, arguments.seed)
            chosen = [mutant for mutant in mutants if pool.is_for_all(mutant) == on_import]
            runs.run_all(slots, tasks_of(tree, pool, chosen, done, results), until)
            untried = any(mutant.key not in done[module]["mutants"] for mutant in chosen)
            if untried:
                break
    print_table({module: done[module] for module in arguments.modules if module in done})
    if untried:
        how = "the same command goes on" if arguments.keep else "with --keep DIR a second command would go on"
        sys.exit(f"--max-hours {arguments.max_hours:g} is over, and not every mutant was tried; {how}")


def note(
    tree: Path, slots: List[runs.Slot], files: List[str], modules: Set[str], keep: Path, until: float
) -> Dict[str, runs.Reached]:
    """Returns the lines of some modules that the tests of each file execute; missing records are made first."""
    keep.mkdir(parents=True, exist_ok=True)
    names = {module[: -len(".py")].replace("/", "."): module for module in modules}

    def load(file: str) -> Optional[runs.Reached]:
        path = keep / f"{Path(file).stem}.json"
        kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if kept.pop("digest", "") != runs.digest_of(tree, file):
            return None
        return runs.Reached(**kept)

    tasks = [
        runs.record(tree, file, names, keep / f"{Path(file).stem}.json")
        for file in files
        if load(file) is None
    ]
    runs.run_all(slots, tasks, until)
    reached = {}
    for file in files:
        record = load(file)
        if record is not None:
            reached[file] = record
    return reached


def tasks_of(
    tree: Path, pool: Pool, mutants: List[Mutant], done: Dict[str, Any], results: Path
) -> Iterator[Callable[[runs.Slot], runs.Task]]:
    """Yields a task for each mutant that was not tried yet, or that survived other tests than today's."""
    module = pool.module
    text = (tree / module).read_text(encoding="utf-8")
    if done.get(module, {}).get("text") != text:
        done[module] = {"text": text, "mutants": {}}
    done[module]["files"] = len(pool.files)
    entry = done[module]["mutants"]
    shown = hashlib.sha256("".join(runs.digest_of(tree, file) for file in pool.files).encode()).hexdigest()
    for mutant in mutants:
        before = entry.get(mutant.key)
        if before and (before["outcome"] in ("failed", "endless") or before["shown"] == shown):
            continue

        def found(result: Dict[str, Any], mutant: Mutant = mutant) -> None:
            entry[mutant.key] = {**result, "before": mutant.before, "after": mutant.after, "shown": shown}
            results.write_text(json.dumps(done, indent=1), encoding="utf-8")
            how = f"{result['outcome']} {result['by']}".strip()
            print(f"{module}:{mutant.key}: {how} ({result['tests']} tests, {result['s']} s)", flush=True)

        yield try_mutant(tree, pool, mutant, found)


def print_table(done: Dict[str, Any]) -> None:
    """Prints the surviving mutants, and the counts of each module."""
    for module, entry in done.items():
        for key, result in entry["mutants"].items():
            if result["outcome"] in ("survived", "unreached"):
                print(f"{module}:{key}: {result['outcome']}: {result['before']} became {result['after']}")
    print(f"{'module':<36} mutants  killed  endless  survived  unreached  test files")
    rows = {
        module: [
            len(entry["mutants"]),
            *(
                sum(result["outcome"] == kind for result in entry["mutants"].values())
                for kind in ("failed", "endless", "survived", "unreached")
            ),
            entry["files"],
        ]
        for module, entry in done.items()
    }
    rows["together"] = [sum(row[at] for row in rows.values()) for at in range(5)]
    for name, row in rows.items():
        print(f"{name:<36} " + " ".join(f"{number:8}" for number in row))


if __name__ == "__main__":
    main()
