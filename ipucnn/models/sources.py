"""A digest of the code that can change what some functions do, read from the sources without importing or running them.

What is derived from a network, its layer graph above all, is kept for as long as the code it was derived with is the
same.  That code is the network's builder and whatever the builder reaches: every function, class and constant that it
names, that those name, and so on, within the packages that are followed.  A network that is added beside it, a comment,
a docstring, an annotation or another layout of the lines leaves the digest as it is; a changed helper, constant or
layer class changes it.

Too much in the digest costs a build; too little would give a wrong graph.  So in doubt all is taken: a name counts as
used wherever it stands, also where a local variable hides it; a module that is handed around as a value counts as a
whole; what runs when a module is imported counts with anything of the module, and so does a definition that is handed
to a decorator or base class of these packages, which may register it; and where the sources do not tell what is meant
(a dynamic import, ``getattr`` with a computed name, a name that nothing binds), every file of the packages counts.
"""

import ast
import builtins
import functools
import hashlib
from pathlib import Path
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple, Union

import ipucnn

# Nothing outside of these decides what a network's layers are.
PACKAGES = ("ipucnn.models", "ipucnn.planning")

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NAMED = (*_FUNCTIONS, ast.ClassDef, ast.ExceptHandler)
_IMPORTS = (ast.Import, ast.ImportFrom)
_OF_MODULES = ("__name__", "__file__", "__doc__", "__package__", "__spec__", "__path__")
# They find things by names that are computed ...
_BY_NAME = ("getattr", "setattr", "delattr", "hasattr")
_MODULE_OF = "inspect.getmodule"
# ... or anything at all.
_ANYTHING = ("__import__", "eval", "exec", "compile", "globals", "locals", "vars", "sys.modules")
_ANYTHING_OF = (
    "importlib.",
    "pkgutil.",
    "runpy.",
    "builtins.",
    "operator.attrgetter",
    "operator.methodcaller",
)
_OPENS = ("__subclasses__", "__globals__", "__builtins__", "__dict__")
# Fields of the syntax tree that mean nothing when the code runs, and those of Python 3.8 that were renamed.
_NOT_WRITTEN = ("ctx", "kind", "type_comment", "annotation", "returns", "simple")
_SAME_FIELDS = {"dims": "elts"}


class _Unresolved(Exception):
    """The sources do not tell what is meant."""


class _Place(NamedTuple):
    """A definition of a module, or of all that has one of the marks below for a name."""

    module: str
    name: str


_ON_IMPORT, _WHOLE = "(on import)", "(whole)"


class _External(NamedTuple):
    """Something of a package that is not followed."""

    path: str


class _ModuleObject(NamedTuple):
    """A module that is followed."""

    name: str


_Target = Union[_Place, _External, _ModuleObject]


class _Code:
    """Statements as text that formatting, comments, docstrings and annotations do not change, and the names in them.

    Attributes:
        text: the same on every version of Python.
        names: chains of attributes, such as ("keras", "layers", "Add"), in the order in which they stand.
        imports: what import statements inside bind, by name.
        local: names that are bound inside in any other way.
        by_name: what takes something by a computed name, and the chain it is taken from, None where it is no chain.
    """

    def __init__(self, statements: Iterable[ast.stmt], module: "_Module") -> None:
        self.names: Dict[Tuple[str, ...], None] = {}
        self.imports: Dict[str, List[str]] = {}
        self.local: Set[str] = set()
        self.by_name: List[Tuple[str, Optional[Tuple[str, ...]]]] = []
        self._module = module
        self._in_function = False
        self._called: Set[int] = set()
        self._parts: List[str] = []
        for statement in statements:
            self._write(statement)
        self.text = "".join(self._parts)

    def _write(self, node: ast.AST) -> None:
        """Appends a node, under the names that Python 3.9 and later have for it."""
        own = type(node)
        kind = own.__name__
        if own is ast.Constant:
            self._parts.append(f"{type(node.value).__name__}:{node.value!r};")  # type: ignore[attr-defined]
            return
        if own in _IMPORTS:
            for name, path in self._module.imported_by(node):  # type: ignore[arg-type]
                self.imports.setdefault(name, []).append(path)
            return
        if own is ast.Attribute or own is ast.Name:
            self._note_attribute(node)  # type: ignore[arg-type]
            chain = _chain(node)
            if chain is not None:
                self.names[chain] = None
                self._parts.append(f"{'.'.join(chain)};")
                return
        elif own is ast.Call:
            self._note_call(node)  # type: ignore[arg-type]
        elif own in _NAMED:
            if node.name:  # type: ignore[attr-defined]
                self.local.add(str(node.name))  # type: ignore[attr-defined]
        elif own is ast.arg:
            self.local.add(node.arg)  # type: ignore[attr-defined]
        elif own is ast.AnnAssign and node.value is not None and self._in_function:  # type: ignore[attr-defined]
            kind = "Assign"
        elif kind == "Index":  # Python 3.8 wraps what stands in brackets
            self._write(node.value)  # type: ignore[attr-defined]
            return
        elif kind == "ExtSlice":  # Python 3.8 for a tuple with slices
            kind = "Tuple"
        self._parts.append(f"{kind}(")
        outside = self._in_function
        self._in_function = outside or own in _FUNCTIONS
        for name in node._fields:
            # A class may make fields of its annotations, as data classes do; others mean nothing when the code runs.
            if name not in _NOT_WRITTEN or (name == "annotation" and kind == "AnnAssign"):
                value = getattr(node, name, None)
                if value is not None and value != []:
                    self._write_field(_SAME_FIELDS.get(name, name), value)
        self._in_function = outside
        self._parts.append(")")

    def _write_field(self, name: str, value: object) -> None:
        entries = value if isinstance(value, list) else [value]
        if name == "targets" and isinstance(value, list) and len(value) == 1:
            name = "target"
        self._parts.append(f"{name}=")
        for entry in entries:
            if not isinstance(entry, ast.AST):
                self._parts.append(f"{entry!r};")
            elif not _has_no_effect(entry):
                self._write(entry)

    def _note_attribute(self, node: Union[ast.Attribute, ast.Name]) -> None:
        if isinstance(node, ast.Attribute):
            if node.attr in _OPENS:
                self.by_name.append((node.attr, None))
        elif not isinstance(node.ctx, ast.Load):
            self.local.add(node.id)
        elif node.id in _BY_NAME and id(node) not in self._called:
            self.by_name.append((node.id, None))

    def _note_call(self, call: ast.Call) -> None:
        self._called.add(id(call.func))
        chain = _chain(call.func)
        name = ".".join(chain or ())
        # With a name that is written down, getattr is an attribute.
        is_plain = name != _MODULE_OF and len(call.args) > 1 and isinstance(call.args[1], ast.Constant)
        if name in (*_BY_NAME, _MODULE_OF) and not is_plain:
            self.by_name.append((name, _chain(call.args[0]) if call.args else None))


def _chain(node: ast.AST) -> Optional[Tuple[str, ...]]:
    """("a", "b", "c") for ``a.b.c``; None for attributes of anything but a name."""
    attributes: List[str] = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = node.value
    return (node.id, *reversed(attributes)) if isinstance(node, ast.Name) else None


def _has_no_effect(node: ast.AST) -> bool:
    """Docstrings and other bare constants, and ``pass``."""
    own = type(node)
    return own is ast.Pass or (own is ast.Expr and isinstance(node.value, ast.Constant))  # type: ignore[attr-defined]


def _is_for_type_checkers(node: ast.stmt) -> bool:
    """``if TYPE_CHECKING:``, which never runs."""
    if not isinstance(node, ast.If) or node.orelse:
        return False
    return (_chain(node.test) or ("",))[-1] == "TYPE_CHECKING"


class _Module:
    """The statements at the top level of a module.

    Attributes:
        bound: the statements that bind a name.
        imports: what is imported under a name, as dotted paths.
        imported: every dotted path that an import statement has.
        on_import: statements that do anything else than to bind names.
    """

    def __init__(self, name: str, path: Path, is_followed: Callable[[str], bool]) -> None:
        self._is_followed = is_followed
        self._package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        source = path.read_bytes()
        self.statements = ast.parse(source, str(path)).body
        self.bound: Dict[str, List[ast.stmt]] = {}
        self.imports: Dict[str, List[str]] = {}
        self.imported: List[str] = []
        self.on_import: List[ast.stmt] = []
        for statement in self.statements:
            self._take(statement)
        if b"global " in source:
            self._take_globals()

    def _take_globals(self) -> None:
        """A function that binds a name of the module is one of the statements that bind it."""
        for statement in self.statements:
            for node in ast.walk(statement):
                if isinstance(node, ast.Global):
                    for name in node.names:
                        self.bound.setdefault(name, []).append(statement)

    def _take(self, statement: ast.stmt) -> None:
        if _has_no_effect(statement):
            return
        if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
            self.bound.setdefault(statement.name, []).append(statement)
            if self._is_handed_to_ours(statement):
                self.on_import.append(statement)
            return
        # Also what stands inside a condition or an attempt.
        for node in ast.walk(statement):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for name, path in self.imported_by(node):
                    self.imports.setdefault(name, []).append(path)
                    self.imported.append(path)
                if isinstance(node, ast.Import):  # ``import a.b`` binds a, and runs a.b
                    self.imported += [alias.name for alias in node.names]
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                self.bound.setdefault(node.id, []).append(statement)
            elif isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
                self.bound.setdefault(node.name, []).append(statement)
        only_binds = isinstance(statement, (ast.Import, ast.ImportFrom)) or (
            isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and _binds_names(statement)
        )
        if not only_binds and not _is_for_type_checkers(statement):
            self.on_import.append(statement)

    def _is_handed_to_ours(self, statement: ast.stmt) -> bool:
        """Whether a decorator, base class or metaclass of this code gets a definition, and may register it anywhere."""
        takers: List[ast.expr] = [*getattr(statement, "decorator_list", ()), *getattr(statement, "bases", ())]
        takers += [keyword.value for keyword in getattr(statement, "keywords", ())]
        for taker in takers:
            chain = _chain(taker.func if isinstance(taker, ast.Call) else taker)
            paths = self.imports.get(chain[0], []) if chain else []
            is_builtin = chain is not None and hasattr(builtins, chain[0]) and chain[0] not in self.bound
            if any(self._is_followed(path) for path in paths) or not (paths or is_builtin):
                return True
        return False

    def imported_by(self, node: Union[ast.Import, ast.ImportFrom]) -> List[Tuple[str, str]]:
        """(name, dotted path of what it stands for) of an import statement."""
        if isinstance(node, ast.Import):
            return [(a.asname, a.name) if a.asname else (a.name.partition(".")[0],) * 2 for a in node.names]  # type: ignore[misc]
        source = node.module or ""
        if node.level:
            base = self._package.split(".")
            base = base[: len(base) - node.level + 1]
            source = ".".join([*base, *([source] if source else [])])
        return [(alias.asname or alias.name, f"{source}.{alias.name}") for alias in node.names]


def _binds_names(statement: Union[ast.Assign, ast.AnnAssign, ast.AugAssign]) -> bool:
    """Whether an assignment only binds names, and changes nothing that is there."""
    waiting = list(statement.targets) if isinstance(statement, ast.Assign) else [statement.target]
    while waiting:
        target = waiting.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            waiting += target.elts
        elif not isinstance(target, ast.Name):
            return False
    return True


class SourceTree:
    """The sources below a folder.

    Args:
        folder: where the top packages' folders lie.
        packages: those that are followed, as dotted names.
    """

    def __init__(self, folder: Path, packages: Tuple[str, ...] = PACKAGES) -> None:
        self._folder = folder
        self._packages = packages
        self._files: Dict[str, Optional[Path]] = {}
        self._modules: Dict[str, _Module] = {}
        self._digests: Dict[Tuple[_Place, ...], str] = {}

    def digest(self, roots: Iterable[Tuple[str, str]]) -> str:
        """Digest of all that some definitions, as (module, name), reach."""
        wanted = tuple(_Place(*root) for root in roots)
        if wanted not in self._digests:
            try:
                self._digests[wanted] = self._reached(wanted)
            except (_Unresolved, SyntaxError):
                self._digests[wanted] = self._everything()
        return self._digests[wanted]

    def _reached(self, roots: Tuple[_Place, ...]) -> str:
        """The definitions in the order in which they are found, each with what its names stand for.

        A definition stands for its number in that order, so the digest does not change when modules are renamed.
        """
        found = list(dict.fromkeys(roots))
        numbers = {place: i for i, place in enumerate(found)}
        digest = hashlib.sha256()

        def number(place: _Place) -> int:
            if place not in numbers:
                numbers[place] = len(found)
                found.append(place)
            return numbers[place]

        imported: Set[str] = set()
        for place in found:  # which grows meanwhile
            if place.module not in imported:
                imported.add(place.module)
                for module in self._imported_with(place.module):
                    if self._module(module).on_import:
                        number(_Place(module, _ON_IMPORT))
            code = self._code(place)
            digest.update(f"{code.text}\0{self._edges(place, code, number)}\0".encode())
        return digest.hexdigest()

    def _imported_with(self, name: str) -> List[str]:
        """The followed modules that run when a module is imported: it, those above it, and its imports."""
        parts = name.split(".")
        paths = [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
        found = [
            self._longest_module(p) for p in (*paths, *self._module(name).imported) if self._is_followed(p)
        ]
        return [module for module in dict.fromkeys(found) if module]

    def _code(self, place: _Place) -> _Code:
        module = self._module(place.module)
        if place.name == _ON_IMPORT:
            return _Code(module.on_import, module)
        if place.name == _WHOLE:
            return _Code((s for s in module.statements if not _is_for_type_checkers(s)), module)
        if place.name not in module.bound:
            raise _Unresolved(f"{place.module}.{place.name}")
        return _Code(dict.fromkeys(module.bound[place.name]), module)

    def _edges(self, place: _Place, code: _Code, number: Callable[[_Place], int]) -> List[Tuple[str, str]]:
        """What each name of a definition stands for: a number, or a path that is not followed."""
        edges: Set[Tuple[str, str]] = set()
        used = {chain[0] for chain in code.names}
        # What is imported and not named may be imported for what that does.
        for chain in (*code.names, *((name,) for name in code.imports if name not in used)):
            for target in self._targets(place, code, chain):
                if isinstance(target, _External):
                    is_disguised = target.path == _MODULE_OF != ".".join(chain)
                    if is_disguised or target.path in _ANYTHING or target.path.startswith(_ANYTHING_OF):
                        raise _Unresolved(target.path)
                    edges.add((".".join(chain), target.path))
                else:
                    wanted = target if isinstance(target, _Place) else _Place(target.name, _WHOLE)
                    edges.add((".".join(chain), str(number(wanted))))
        for function, chain_or_none in code.by_name:
            found = [] if chain_or_none is None else self._targets(place, code, chain_or_none)
            if not found or not all(isinstance(target, _External) for target in found):
                raise _Unresolved(f"{function} in {place.module}.{place.name}")
        return sorted(edges)

    def _targets(self, place: _Place, code: _Code, chain: Tuple[str, ...]) -> List[_Target]:
        """All that a chain of attributes may stand for; nothing for local variables and builtins.

        Raises:
            _Unresolved: nothing binds its name.
        """
        name = chain[0]
        module = self._module(place.module)
        targets: List[_Target] = [
            self._find(".".join((path, *chain[1:])))
            for path in (*code.imports.get(name, ()), *module.imports.get(name, ()))
        ]
        if name in module.bound:
            targets.append(_Place(place.module, name))
        is_known = name in code.local or hasattr(builtins, name) or name in _OF_MODULES
        if not targets and (name in _ANYTHING or not is_known):
            raise _Unresolved(name)
        return targets

    def _find(self, path: str) -> _Target:
        """What a dotted path stands for: the longest part of it that is a module, and what is taken from that.

        Raises:
            _Unresolved: the module is followed, and has nothing of that name.
        """
        if not self._is_followed(path):
            # A package above those that are followed, handed around as a value, gives access to them all.
            if any(package.startswith(f"{path}.") for package in self._packages):
                raise _Unresolved(path)
            return _External(path)
        owner = self._longest_module(path)
        if owner == path:
            file = self._file(owner)
            if file is not None and file.name == "__init__.py":
                raise _Unresolved(path)  # a package that is handed around gives access to all modules in it
            return _ModuleObject(owner)
        module = self._module(owner)
        name, _, rest = path[len(owner) + 1 :].partition(".")
        paths = module.imports.get(name, [])
        if name in module.bound and not paths:
            return _Place(owner, name)
        if name in module.bound or len(paths) != 1:
            raise _Unresolved(path)
        return self._find(f"{paths[0]}.{rest}" if rest else paths[0])

    def _is_followed(self, path: str) -> bool:
        return any(path == package or path.startswith(f"{package}.") for package in self._packages)

    def _longest_module(self, path: str) -> str:
        """The longest part of a dotted path that is a module; "" if there is none."""
        while path and self._file(path) is None:
            path = path.rpartition(".")[0]
        return path

    def _file(self, module: str) -> Optional[Path]:
        if module not in self._files:
            base = self._folder.joinpath(*module.split("."))
            candidates = (base.with_suffix(".py"), base / "__init__.py")
            self._files[module] = next((path for path in candidates if path.is_file()), None)
        return self._files[module]

    def _module(self, name: str) -> _Module:
        if name not in self._modules:
            path = self._file(name)
            if path is None:
                raise _Unresolved(name)
            self._modules[name] = _Module(name, path, self._is_followed)
        return self._modules[name]

    def _everything(self) -> str:
        """Digest of the bytes of every file."""
        digest = hashlib.sha256()
        for package in self._packages:
            folder = self._folder.joinpath(*package.split("."))
            for path in sorted(folder.rglob("*.py")):
                digest.update(f"\0{path.relative_to(self._folder).as_posix()}\0".encode())
                digest.update(path.read_bytes())
        return digest.hexdigest()


@functools.lru_cache(maxsize=None)
def _package() -> SourceTree:
    return SourceTree(Path(ipucnn.__file__).parent.parent)


def code_digest(*functions: Callable[..., object]) -> str:
    """Digest of the sources that functions or classes of this package reach."""
    return _package().digest(
        # What has no name of its own can't be looked up, which makes everything count.
        (getattr(function, "__module__", ""), getattr(function, "__qualname__", ""))
        for function in functions
    )
