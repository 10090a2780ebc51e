"""Mutations of calls, and the SDK they are tried on."""

import contextlib
import os
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Type

from poplar_double import installed
from poplar_double.facts import FACTS

Errors = Tuple[Type[BaseException], ...]


@dataclass
class Case:
    """One call that the SDK refuses."""

    name: str
    run: Callable[[], Any]
    errors: Errors


@dataclass
class Group:
    """Mutations of some calls, and these calls unchanged.

    Attributes:
        legal: the calls without a mutation.
    """

    name: str
    cases: List[Case] = field(default_factory=list)
    legal: List[Case] = field(default_factory=list)

    def add(self, name: str, run: Callable[[], Any], *errors: Type[BaseException]) -> None:
        """Adds a call that raises one of ``errors``."""
        self.cases.append(Case(name, run, errors))

    def allow(self, name: str, run: Callable[[], Any]) -> None:
        """Adds a call that passes."""
        self.legal.append(Case(name, run, ()))

    def signature(
        self,
        where: str,
        function: Callable[..., Any],
        params: List[Dict[str, Any]],
        keywords: Dict[str, Any],
        *errors: Type[BaseException],
    ) -> None:
        """Adds every keyword misspelt, a surplus one, and each required one missing.

        Args:
            params: the recorded parameters.
            keywords: keywords of a legal call.
            errors: errors allowed beside TypeError.
        """
        kinds = (TypeError, *errors)
        self.add(f"{where}: surplus", lambda: function(**keywords, surplus=1), *kinds)
        for param in params:
            name = param["name"]
            if "kind" in param:
                continue
            kept = {k: v for k, v in keywords.items() if k != name}
            self.add(f"{where}: {name}s", lambda k=kept, n=name: function(**k, **{n + "s": None}), *kinds)
            if "default" not in param:
                self.add(f"{where}: no {name}", lambda k=kept: function(**k), *kinds)


def params_of(name: str, method: Optional[str] = None) -> List[Dict[str, Any]]:
    """Returns the recorded parameters of a callable or its method."""
    fact = FACTS["callables"][name]
    return list(fact["params"] if method is None else fact["methods"][method])


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


def try_group(make: Callable[[Any], Group], sdk: str = "3.4", **variables: str) -> Tuple[Group, List[str]]:
    """Makes a group on a machine of its own and tries every case; returns the group, and the unexpected outcomes."""
    wrong: List[str] = []
    with environment(variables), installed(sdk=sdk) as machine:
        group = make(machine)
        for case in group.legal + group.cases:
            machine.config, machine.popdist_ready, machine.horovod_ready = None, False, False
            machine._flags, machine.stage, machine.remote_memory = None, None, True
            try:
                case.run()
            except case.errors:
                continue
            except BaseException as error:
                wrong.append(f"{case.name}: {type(error).__name__}: {error}")
                continue
            if case.errors:
                wrong.append(f"{case.name}: accepted")
    return group, wrong
