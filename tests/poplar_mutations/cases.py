"""Mutations of calls, and the SDK they are tried on."""

import contextlib
import os
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple, Type

from poplar_double import installed

from .quoted import Param

Errors = Tuple[Type[BaseException], ...]


class Case(NamedTuple):
    """One call, and the errors of which it raises one; without any it passes."""

    name: str
    run: Callable[[], Any]
    errors: Errors


class Group(List[Case]):
    """Mutations of some calls, and these calls unchanged."""

    def add(self, name: str, run: Callable[[], Any], *errors: Type[BaseException]) -> None:
        """Adds a call that raises one of ``errors``, or none if there are none."""
        self.append(Case(name, run, errors))

    def signature(
        self, where: str, function: Callable[..., Any], params: List[Param], legal: Any, *errors: Any
    ) -> None:
        """Adds every keyword misspelt, a surplus one, and each required one missing.

        Args:
            params: the parameters in the public sources.
            legal: keywords of a legal call.
            errors: errors allowed beside TypeError.
        """
        kinds = (TypeError, *errors)
        self.add(f"{where}: surplus", lambda: function(**legal, surplus=1), *kinds)
        for name, is_required in params:
            kept = {k: v for k, v in legal.items() if k != name}
            self.add(f"{where}: {name}s", lambda k=kept, n=name: function(**k, **{n + "s": None}), *kinds)
            if is_required:
                self.add(f"{where}: no {name}", lambda k=kept: function(**k), *kinds)

    def call(
        self,
        where: str,
        function: Callable[..., Any],
        params: List[Param],
        legal: Any,
        wrong: Any,
        *errors: Any,
    ) -> None:
        """Adds a legal call, the mutations of its signature, and wrong values.

        Args:
            params, legal, errors: as for :meth:`signature`.
            wrong: by keyword and error, the values that raise it.
        """
        self.add(where, lambda: function(**legal))
        self.signature(where, function, params, legal, *errors)
        for name, by_error in wrong.items():
            for error, values in by_error.items():
                for value in values:
                    changed = {**legal, name: value}
                    self.add(f"{where}: {name} = {value!r}", lambda c=changed: function(**c), error)


@contextlib.contextmanager
def environment(variables: Dict[str, str]) -> Iterator[None]:
    """Sets variables while the context lasts."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def try_group(
    make: Callable[[Group, Any], None], sdk: str, variables: Dict[str, str]
) -> Tuple[List[str], List[str]]:
    """Tries every case of a group on a machine; returns the names of its mutations, and the unexpected outcomes."""
    group, wrong = Group(), []
    with environment(variables), installed(sdk=sdk) as machine:
        make(group, machine)
        for case in group:
            machine.config, machine.popdist_ready, machine.horovod_ready = None, False, False
            machine._flags, machine.remote_memory = None, True
            try:
                case.run()
            except case.errors:
                continue
            except BaseException as error:
                wrong.append(f"{case.name}: {type(error).__name__}: {error}")
                continue
            if case.errors:
                wrong.append(f"{case.name}: accepted")
    return [case.name for case in group if case.errors], wrong
