"""Notes which lines of some modules each test executes, for ``mutants.py``.

A copy of the tree gets one more line in ``ipucnn/__init__.py``, which runs this file: so the processes that tests start
are noted, too.  A *context* is what a line is executed for: a test, a fixture that several tests share, a function
whose results are kept, or the import of the modules.  One line of the notes is ``CONTEXT, MODULE, LINE`` between tabs;
``CONTEXT, >, OTHER`` says that what the other context executes counts for the first as well.

Needs ``sys.monitoring`` of Python 3.12, which costs next to nothing: each line is reported once in a context.
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
_TOOL = 4  # none of the identifiers that debuggers, profilers and coverage use


class Recorder:
    """Of one process: the context that it is in, and what was executed there.

    Args:
        folder: where the notes are kept in ``hits``, and the context of the process that runs the tests in ``context``.
        modules: names of files as in the notes, by the modules' names.
    """

    def __init__(self, folder: str, modules: Dict[str, str]) -> None:
        self.folder = Path(folder)
        self.modules = modules
        self._files: Dict[CodeType, str] = {}
        self._waiting: Optional[List[str]] = None  # of the process that runs the tests, to be written at once
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
        """This process runs the tests: what it notes is written when the context changes."""
        self._waiting = []

    def watch(self, code: CodeType, module: str) -> None:
        """Notes the lines of a module's code object and of all within it."""
        self._files[code] = module
        self.monitoring.set_local_events(_TOOL, code, self.monitoring.events.LINE)
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                self.watch(inner, module)

    @contextlib.contextmanager
    def context(self, name: str) -> Iterator[None]:
        """What is executed meanwhile belongs to another context."""
        self.stack.append(name)
        self._changed()
        try:
            yield
        finally:
            self.flush()
            self.stack.pop()
            self._changed()

    def counts(self, name: str) -> None:
        """What a context executes counts for the present one as well."""
        pair = (self.stack[-1], name)
        if pair not in self._known and pair[0] != name:
            self._known.add(pair)
            self._note(f"{pair[0]}\t>\t{name}\n")

    def flush(self) -> None:
        """Writes what is not written yet."""
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
        # Opened each time: the processes of a test may end anyhow, or close what they did not open.
        with contextlib.suppress(OSError):
            handle = os.open(str(self.folder / "hits"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(handle, text.encode("utf-8"))
            finally:
                os.close(handle)


class _Loader(SourceFileLoader):
    """Loads a module of the package as usual, but for what runs then being noted as of the import.

    Whichever test imports a module first, its constants are there for all.
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
    """The recorder of this process, which is made if there is none."""
    recorder: Optional[Recorder] = getattr(sys, "_mutants_recorder", None)
    if recorder is None:
        recorder = Recorder(folder, modules)
        sys._mutants_recorder = recorder  # type: ignore[attr-defined]
        finder: Any = _Finder(recorder)
        sys.meta_path.insert(0, finder)
    return recorder


def note_caches(recorder: Recorder) -> None:
    """From now on, what a function with ``functools.lru_cache`` executes counts for all who ask it.

    Without this it would count for the first test alone, as the others get the result that was kept.
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
