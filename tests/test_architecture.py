"""Rules for all modules: layers of docs/architecture.md, types, sizes, a hint for each error, one opener of files."""

import ast
import functools
import re
from typing import Dict, Iterable, Iterator, List, Optional, Set, Tuple

from support.sources import PACKAGE, Source, sources

from ipucnn import errors

# From the lowest layer up.  A module imports from its own layer and from those above it in this list.
LAYERS = (
    ("__init__", "errors"),
    ("aliases", "events", "text", "interrupts", "hardware", "compat"),
    ("filesystem",),
    ("compiled",),
    ("python_files",),
    ("machine", "system_programs"),
    ("documents",),
    ("datasets",),
    ("models",),
    ("config",),
    ("command_table",),
    ("command_line",),
    ("command_group",),
    ("training",),
    ("planning", "sessions"),
    ("runs",),
    ("diagnosis",),
    ("benchmarking",),
    ("reports",),
    ("commands",),
    ("api",),
    ("cli",),
    ("__main__",),
)
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}
SAME_LAYER_APART = {"planning", "sessions"}
"""Parts of one layer that do not import each other."""


@functools.lru_cache(maxsize=None)
def _modules() -> Dict[str, Source]:
    modules = {}
    for source in sources():
        parts = source.path.relative_to(PACKAGE.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = source
    return modules


@functools.lru_cache(maxsize=None)
def _imports() -> Dict[str, Set[str]]:
    """Returns the modules that each module imports, at its top or inside a function."""
    modules, imports = _modules(), {}  # type: Dict[str, Source], Dict[str, Set[str]]
    for name, source in modules.items():
        named: List[str] = []
        for node in source.nodes:
            if isinstance(node, ast.Import):
                named += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                assert node.level == 0, f"{name} has a relative import, which this test does not follow"
                inside = [f"{node.module}.{alias.name}" for alias in node.names]
                named += [module if module in modules else node.module for module in inside]
        imports[name] = {module for module in named if module in modules and module != name}
    return imports


def _part(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def test_every_part_has_a_layer():
    assert {_part(name) for name in _modules()} == set(HEIGHT)


def test_imports_point_downwards():
    upwards = []
    for name, imported in _imports().items():
        for other in imported:
            source, target = _part(name), _part(other)
            is_apart = (
                source != target and {source, target} <= SAME_LAYER_APART and HEIGHT[source] == HEIGHT[target]
            )
            if HEIGHT[target] > HEIGHT[source] or is_apart:
                upwards.append(f"{name} imports {other}")
    assert not upwards, "\n".join(sorted(upwards))


def test_only_commands_and_the_api_import_reports():
    wrong = [
        f"{name} imports {other}"
        for name in _imports()
        for other in _imports()[name]
        if _part(other) == "reports" and _part(name) not in ("reports", "commands", "api")
    ]
    assert not wrong


def test_imports_have_no_cycles():
    """Removes modules that import none of the remaining ones until none is left to remove: the rest form cycles."""
    left = {name: set(imported) for name, imported in _imports().items()}
    while left:
        ground = {name for name, imported in left.items() if not imported & set(left)}
        if not ground:
            break
        left = {name: imported for name, imported in left.items() if name not in ground}
    assert not left, f"circles among {sorted(left)}"


# Keyword arguments that are passed on unread, annotations themselves, and a field that is text or a list.
ANY_PARAMETERS = {
    "config.help_page.__init__(details)",
    "config.spec.option(details)",
    "config.spec.specs_of(panel)",
    "datasets.base.data_source(facts)",
    "datasets.sources.tfds.refuse_foreign_features(connector)",
    "planning.program.restaged(changes)",
}


def test_parameters_have_types():
    """No parameter is ``Any``, except those above and in the scripts that run without this package (``aliases.py``)."""
    untyped = set()
    for name, source in _modules().items():
        if name in ("ipucnn.runs.runtimes", "ipucnn.runs.predict"):
            continue
        for node in source.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                args = node.args
                given = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
                for arg in filter(None, given):
                    inner = ast.walk(arg.annotation) if arg.annotation is not None else ()
                    if any(isinstance(part, ast.Name) and part.id == "Any" for part in inner):
                        untyped.add(f"{name[len('ipucnn.') :]}.{node.name}({arg.arg})")
    assert untyped == ANY_PARAMETERS


def test_docstrings_name_modules_that_exist():
    """Checks ``file.py`` in the docstring of a package, and ``module.Class`` in any docstring."""
    texts: Dict[str, str] = {}  # several modules may have one name
    for name, source in _modules().items():
        texts[name.rpartition(".")[2]] = texts.get(name.rpartition(".")[2], "") + source.text
    absent = []
    for name, source in _modules().items():
        path = source.path
        for node in source.nodes:
            if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                continue
            text = ast.get_docstring(node) or ""
            files = re.findall(r"``([\w/]+\.py)``", text) if path.name == "__init__.py" else ()
            absent += [
                (name, file) for file in files if not list(path.parent.rglob(file)) + list(PACKAGE.glob(file))
            ]
            for module, thing in re.findall(r"``([a-z_]+)\.([A-Z]\w+)", text):
                if module == "keras":
                    continue
                if thing not in texts.get(module, ""):
                    absent.append((name, f"{module}.{thing}"))
    assert not absent


# The most (code lines, AST statements) of each part: both, so that denser lines gain nothing.  Docstrings, comments and
# blank lines are not counted.  These are upper bounds, with room: what is right decides the size of a part.
BUDGET = {
    "benchmarking": (2939, 2221),
    "commands": (1480, 895),
    "config": (3396, 1724),
    "datasets": (10100, 7810),
    "diagnosis": (435, 335),
    "models": (3900, 3005),
    "planning": (5215, 3991),
    "reports": (3900, 3105),
    "runs": (7485, 5785),
    "sessions": (5560, 4545),
    "training": (1500, 1200),
    "modules at the top": (2735, 2215),
}


def _size(source: Source) -> Tuple[int, int]:
    """Returns the code lines and statements of a module."""
    lines = source.text.splitlines()
    num_statements = num_documented = 0
    for node in source.nodes:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        num_statements += isinstance(node, ast.stmt) and not is_text
        has_text = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module))
        if has_text and ast.get_docstring(node, clean=False) is not None:
            num_documented += node.body[0].end_lineno - node.body[0].lineno + 1
    others = sum(not line.strip() or line.strip().startswith("#") for line in lines)
    return len(lines) - num_documented - others, num_statements


def test_no_part_outgrows_its_budget():
    sizes = {part: [0, 0] for part in BUDGET}
    for source in sources():
        parts = source.path.relative_to(PACKAGE).parts
        total = sizes[parts[0] if len(parts) > 1 else "modules at the top"]
        for k, number in enumerate(_size(source)):
            total[k] += number
    over = {
        part: (size, BUDGET[part])
        for part, size in sizes.items()
        if size[0] > BUDGET[part][0] or size[1] > BUDGET[part][1]
    }
    assert not over


# -- errors and files --------------------------------------------------------------------------------------------------

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


def _without_hint(nodes: Iterable[ast.AST]) -> Iterator[int]:
    for node in nodes:
        if isinstance(node, ast.Call) and _name(node) in ERRORS | STAND_INS and _may_be_none(_hint(node)):
            yield node.lineno


def test_every_error_has_a_hint():
    without_hint = [
        f"{source.path.relative_to(PACKAGE)}:{line}"
        for source in sources()
        for line in _without_hint(source.nodes)
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
    assert list(_without_hint(ast.walk(ast.parse("\n".join(lines))))) == [1, 2, 3, 4, 5]


# Words of a command in a hint after which a path may stand.
_BEFORE_PATHS = re.compile(
    r"(^|[ (`])(rm( -r)?|mv|cp|mkdir( -p)?"
    r"|ipucnn (train|evaluate|infer|export|benchmark|plan-splits|runs|compare|plot|models)"
    r"|--(dataset|dataset-path|weights|run-dir|checkpoint|checkpoint-dir|checkpoint-input-dir|output|plan|config-path"
    r"|system-profile|save|save-graph|html|model-name))[ =]$"
)
# What stands there is quoted, or is a name of ipucnn's own: of a set, or of a layout of folders.
_NO_PATHS = {"quoted", "name", "layout", "home", "embedded_name", "TFDS_PREFIX", "EMBEDDED"}
_NO_PATHS |= {"named", "into", "place", "is_name"}


def _unquoted(nodes):
    """Yields (line, expression) of texts other than the message of an error that put a path into a command as it is."""
    messages = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.Call) and node.args and re.search(r"(Error|_fail)$", _dotted(node.func))
        for inner in ast.walk(node.args[0])
    }
    for node in nodes:
        if not isinstance(node, ast.JoinedStr) or id(node) in messages:
            continue
        text = ""
        for part in node.values:
            if isinstance(part, ast.Constant):
                text += part.value
                continue
            words = [getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(part.value)]
            if _BEFORE_PATHS.search(text) and _NO_PATHS.isdisjoint(words):
                yield node.lineno, " ".join(filter(None, words))
            text += "X"


def test_paths_in_hints_are_quoted():
    """A path may have blanks; typed as it is, a hint with rm or --weights would name something else."""
    found = [
        f"{source.path.relative_to(PACKAGE)}:{line}: {value}"
        for source in sources()
        for line, value in _unquoted(source.nodes)
    ]
    assert found == []
    lines = (
        'f"remove it: rm {path}"',
        'f"add --weights {start.path}"',
        'f"rm {quoted(path)}"',
        'f"--dataset {name}"',
    )
    tree = list(
        ast.walk(ast.parse("\n".join([*lines, 'DataError(f"--weights {path} is absent", "drop it")'])))
    )
    assert [line for line, _ in _unquoted(tree)] == [1, 2]


def test_files_of_users_are_opened_in_one_place():
    """Other modules read only the package's files, /proc and settings, and files that the process has just written."""
    of_package = ("config/presets", "models/counts", "planning/graphs/", "runs/export.py", "runs/predict.py")
    of_system = ("benchmarking/peak", "cli", "machine", "sessions/host/environment")
    allowed = (*of_package, *of_system, "sessions/role", "runs/provenance", "filesystem", "commands/infer")
    allowed += ("runs/images/outputs",)
    readers = set()
    for source in sources():
        for node in source.nodes:
            if isinstance(node, ast.Call) and re.fullmatch(
                r"open|os\.open|.*\.read_(text|bytes)", _dotted(node.func)
            ):
                readers.add(source.path.relative_to(PACKAGE).as_posix())
    assert [name for name in readers if not name.startswith(allowed)] == []
    assert [start for start in allowed if not any(name.startswith(start) for name in readers)] == []


def _dotted(node: ast.expr) -> str:
    """Returns the name of a called function: ``f``, ``a.f``, or ``.f`` of anything else."""
    if isinstance(node, ast.Attribute):
        return f"{getattr(node.value, 'id', '')}.{node.attr}"
    return getattr(node, "id", "")
