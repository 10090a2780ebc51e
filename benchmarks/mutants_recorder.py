"""Records which lines of some modules each test executes, for ``mutants.py``.

A copy of the tree gets one more line in ``ipucnn/__init__.py``, which runs this file, so that processes started by
tests are recorded, too. A *context* is the reason why a line runs: a test, a fixture that several tests share, a
function with cached results, or the import of the modules. One line of the record is ``CONTEXT, MODULE, LINE`` between
tabs; ``CONTEXT, >, OTHER`` says that the lines of the other context count for the first as well.

Needs ``sys.monitoring`` of Python 3.12, which costs almost nothing: each line is reported once in a context.
"""

import contextlib
import functools
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

IMPORT = "import"
_TOOL = 4  # not one of the identifiers of debuggers, profilers and coverage


class Recorder:
    """Records one process: its present context, and the lines that run in it.

    Args:
        folder: folder of the record (``hits``), and of the context of the process that runs the tests (``context``).
        modules: file name in the record by module name.
    """

    def __init__(self, folder: str, modules: Dict[str, str]) -> None:
        self.folder = Path(folder)
        self.modules = modules
        self._files: Dict[CodeType, str] = {}
        self._waiting: Optional[List[str]] = None  # the test process writes its lines in one piece
        self._known: Set[Tuple[str, str]] = set()
        try:
            self.stack = [(self.folder / "context").read_text(encoding="utf-8")]
        except FileNotFoundError:
            self.stack = [IMPORT]
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
        self.monitoring = monitoring
        monitoring.use_tool_id(_TOOL, "mutants")
        monitoring.register_callback(_TOOL, monitoring.events.LINE, self._line)
        os.register_at_fork(after_in_child=self._forked)

    def lead(self) -> None:
        """Marks this process as the one that runs the tests: its lines are written when the context changes."""
        self._waiting = []

    def watch(self, code: CodeType, module: str) -> None:
        """Records the lines of a module's code object and of all code objects within it."""
        self._files[code] = module
        self.monitoring.set_local_events(_TOOL, code, self.monitoring.events.LINE)
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                self.watch(inner, module)

    @contextlib.contextmanager
    def context(self, name: str) -> Iterator[None]:
        """Lets the lines that run meanwhile count for another context."""
        self.stack.append(name)
        self._changed()
        try:
            yield
        finally:
            self.flush()
            self.stack.pop()
            self._changed()

    def counts(self, name: str) -> None:
        """Lets the lines of a context count for the present one as well."""
        pair = (self.stack[-1], name)
        if pair not in self._known and pair[0] != name:
            self._known.add(pair)
            self._note(f"{pair[0]}\t>\t{name}\n")

    def flush(self) -> None:
        """Writes the lines that are not written yet."""
        if self._waiting:
            text, self._waiting = "".join(self._waiting), []
            self._write(text)

    def _changed(self) -> None:
        self.flush()
        if self._waiting is not None:
            (self.folder / "context").write_text(self.stack[-1], encoding="utf-8")
        self.monitoring.restart_events()

    def _forked(self) -> None:
        self._waiting = None

    def _line(self, code: CodeType, line: int) -> Any:
        self._note(f"{self.stack[-1]}\t{self._files[code]}\t{line}\n")
        return self.monitoring.DISABLE

    def _note(self, text: str) -> None:
        if self._waiting is not None:
            self._waiting.append(text)
        else:
            self._write(text)

    def _write(self, text: str) -> None:
        # Opened each time: a test's processes may end in any way, or close files that they did not open.
        with contextlib.suppress(OSError):
            handle = os.open(str(self.folder / "hits"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(handle, text.encode("utf-8"))
            finally:
                os.close(handle)


class _Loader(SourceFileLoader):
    """Loads a module of the package as usual, but records module-level lines as part of the import.

    Its constants are shared by all tests, whichever imports the module first.
    """

    recorder: Recorder

    def get_code(self, fullname: str) -> Optional[CodeType]:
        code = super().get_code(fullname)
        if code is not None and fullname in self.recorder.modules:
            self.recorder.watch(code, self.recorder.modules[fullname])
        return code

    def exec_module(self, module: ModuleType) -> None:
        with self.recorder.context(IMPORT):
            super().exec_module(module)


class _Finder:
    """Finds the package's modules."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def find_spec(
        self, name: str, path: Optional[Sequence[str]] = None, target: Any = None
    ) -> Optional[ModuleSpec]:
        if name.split(".")[0] != "ipucnn":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
            spec.loader.recorder = self.recorder
        return spec


def install(folder: str, modules: Dict[str, str]) -> Recorder:
    """Returns the recorder of this process, and makes it if there is none."""
    recorder: Optional[Recorder] = getattr(sys, "_mutants_recorder", None)
    if recorder is None:
        recorder = Recorder(folder, modules)
        sys._mutants_recorder = recorder  # type: ignore[attr-defined]
        finder: Any = _Finder(recorder)
        sys.meta_path.insert(0, finder)
    return recorder


def note_caches(recorder: Recorder) -> None:
    """Counts the lines of a function with ``functools.lru_cache`` for every caller from now on.

    Otherwise they would count for the first test alone, as the others get the cached result.
    """
    original = functools.lru_cache

    def lru_cache(maxsize: Any = 128, typed: bool = False) -> Any:
        if callable(maxsize):
            return decorate(maxsize, 128, typed)
        return lambda function: decorate(function, maxsize, typed)

    def decorate(function: Callable[..., Any], maxsize: Any, typed: bool) -> Any:
        module = str(getattr(function, "__module__", ""))
        if not module.startswith(("ipucnn", "test_", "conftest")):
            return original(maxsize, typed)(function)
        name = f"cache {module}.{function.__qualname__}"

        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            with recorder.context(name):
                return function(*args, **kwargs)

        kept = original(maxsize, typed)(noted)

        @functools.wraps(function)
        def asked(*args: Any, **kwargs: Any) -> Any:
            recorder.counts(name)
            return kept(*args, **kwargs)

        more: Any = asked
        more.cache_info, more.cache_clear, more.cache_parameters = (
            kept.cache_info, kept.cache_clear, kept.cache_parameters,
        )  # fmt: skip
        return asked

    functools.lru_cache = lru_cache  # type: ignore[assignment]
    functools.cache = lambda function: lru_cache(None)(function)  # type: ignore[assignment, attr-defined, unused-ignore]
