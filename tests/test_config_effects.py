"""Every option does what its declaration says: on the host, on IPUs, or on both."""

import ast
from pathlib import Path

import pytest

import ipucnn
from ipucnn.config.options import BY_NAME, SPECS, RunConfig
from ipucnn.config.spec import OptionSpec
from ipucnn.errors import ConfigurationError

PACKAGE = Path(ipucnn.__file__).parent


def _names(path):
    """The attributes that a module reads and the strings in it; a table of options names them as strings."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _readers():
    """For each option the modules that name it and do something with it."""
    found = {spec.name: set() for spec in SPECS}
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE).as_posix()
        # config declares, reports show, planning predicts what IPUs do.
        if not module.startswith(("config/", "reports/", "planning/")):
            for name in set(_names(path)) & set(found):
                found[name].add(module)
    return found


READERS = _readers()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.key)
def test_somebody_reads_each_option_where_it_says_it_has_an_effect(spec):
    readers = READERS[spec.name]
    on_host = {module for module in readers if not module.startswith("sessions/poplar/")}
    on_ipus = {module for module in readers if not module.startswith("sessions/host/")}
    if spec.refused or spec.name in STANDS_FOR:
        return
    if spec.host_effect:
        assert on_host, f"{spec.flag} says that it has an effect on the host, and nothing there reads it"
    if spec.ipu_effect:
        assert on_ipus, f"{spec.flag} says that it has an effect on IPUs, and nothing there reads it"


STANDS_FOR = {"deterministic": "shuffle"}
"""Options that ``config/resolve.py`` makes another option's value of; tests/test_config_resolve.py tests that."""
REFUSED = [spec for spec in SPECS if spec.refused]


@pytest.mark.parametrize("spec", REFUSED, ids=lambda spec: spec.key)
def test_what_this_version_lacks_may_stand_in_a_file_and_is_refused_by_name_when_it_runs(spec):
    from ipucnn.config.resolve import resolve
    from ipucnn.runs.setup import check_supported

    value = True if spec.is_bool else spec.convert("0.7" if spec.kind.is_number else "text")
    config = resolve("train", {spec.name: value}, model="toy_model").config
    assert RunConfig.from_yaml(config.to_yaml()) == config
    with pytest.raises(
        ConfigurationError, match=f"^--{spec.key}: .* is not available in this version$"
    ) as error:
        check_supported(config)
    assert error.value.hint.startswith("drop it; ")


def test_an_option_without_any_effect_cannot_be_declared():
    details = {**vars(BY_NAME["shuffle"]), "host_effect": False, "ipu_effect": False}
    with pytest.raises(TypeError, match="neither on the host nor on IPUs"):
        OptionSpec(**details)


def test_what_only_the_host_acts_on_is_declared_once():
    from ipucnn.runs.checks import RULES

    declared = {spec.name for spec in SPECS if not spec.ipu_effect}
    assert declared == {"fused_micro_batches"}
    assert declared <= {rule.name for rule in RULES}
