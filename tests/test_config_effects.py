"""Every option does what its declaration says: on the host, on IPUs, or on both.

What counts as reading an option is reading an attribute of a ``RunConfig``: of a name that is annotated as one, of what
is made of one, or of an attribute that all classes declare as one.  ``program.seed`` and ``session.device`` are other
things.  What this cannot see is whether the value that is read reaches anything; that is for each option's own tests.
"""

import ast
import functools
from pathlib import Path

import pytest
from test_cli_docs import DOCUMENT, docs_generate

import ipucnn
from ipucnn import documents
from ipucnn.config.options import BY_NAME, SPECS
from ipucnn.config.spec import OptionSpec

PACKAGE = Path(ipucnn.__file__).parent
BY_RESOLVE = {"dataset", "dataset_path", "plan"}
"""What the resolution of a configuration acts on by itself: which files there are to read."""


def _is_config(annotation):
    """Whether an annotation is RunConfig, Optional[RunConfig], or one of them in quotes."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)} if annotation else set()
    return "RunConfig" in names <= {"Optional", "RunConfig"}


def _takes_config(annotation):
    """Whether an annotation is that of a function whose first argument is a RunConfig."""
    lists = [node for node in ast.walk(annotation) if isinstance(node, ast.List)]
    return any(_is_config(arguments.elts[0]) for arguments in lists if arguments.elts)


class _Reads(ast.NodeVisitor):
    """The attributes of RunConfigs that a module reads.

    Args:
        attributes: names of attributes that hold a RunConfig, whatever they are of.
        makers: classes and functions whose call is given functions of a RunConfig.
    """

    def __init__(self, attributes, makers):
        self.attributes, self.makers = attributes, makers
        self.known = [{"RunConfig"}]
        self.found = set()

    def is_config(self, node):
        if isinstance(node, ast.Name):
            return any(node.id in names for names in self.known)
        if isinstance(node, ast.Attribute):
            return node.attr in self.attributes
        if isinstance(node, ast.IfExp):
            return self.is_config(node.body) or self.is_config(node.orelse)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                return node.func.attr == "read_config" or self.is_config(
                    node.func.value
                )  # RunConfig.from_yaml
            copies = isinstance(node.func, ast.Name) and node.func.id == "replace" and node.args
            return self.is_config(node.func) or bool(copies and self.is_config(node.args[0]))
        return False

    def visit_FunctionDef(self, node, first_is_config=False):
        arguments = [*node.args.args, *node.args.kwonlyargs]
        names = {a.arg for a in arguments if _is_config(a.annotation)}
        if first_is_config:
            names.add(arguments[0].arg)
        self.known.append(names)
        self.generic_visit(node)
        self.known.pop()

    visit_Lambda = visit_FunctionDef

    def visit_Call(self, node):
        makes = isinstance(node.func, ast.Name) and node.func.id in self.makers
        self.visit(node.func)
        for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
            if makes and isinstance(value, ast.Lambda):
                self.visit_FunctionDef(value, first_is_config=True)
            else:
                self.visit(value)

    def visit_Assign(self, node):
        self.visit(node.value)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts))
            for left, right in pairs:
                if isinstance(left, ast.Name) and self.is_config(right):
                    self.known[-1].add(left.id)

    def visit_Attribute(self, node):
        if self.is_config(node.value):
            self.found.add(node.attr)
        self.generic_visit(node)


@functools.lru_cache(maxsize=None)
def _trees():
    """The package's modules but for networks and data sets, which know nothing of it (test_architecture.py)."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in ("models", "datasets")
    }


def _reads(tree):
    """The options that a module reads."""
    configs, _, makers = _declared()
    # Private attributes are not declared: they are called like what they hold.
    reads = _Reads({*configs, "_config"}, makers)
    reads.visit(tree)
    return reads.found


@functools.lru_cache(maxsize=None)
def _declared():
    """(attributes that hold a RunConfig, those of the same names that hold something else, makers)."""
    configs, others, makers = set(), set(), set()
    for tree in _trees().values():
        for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for node in ast.walk(owner):
                if isinstance(node, ast.AnnAssign):
                    target = node.target.attr if isinstance(node.target, ast.Attribute) else node.target.id
                    if getattr(node.annotation, "id", "") != "str":  # the YAML of one, in files
                        (configs if _is_config(node.annotation) else others).add(target)
                    if _takes_config(node.annotation):
                        makers.add(owner.name)
                elif isinstance(node, ast.FunctionDef) and any(
                    isinstance(mark, ast.Name) and mark.id == "property" for mark in node.decorator_list
                ):
                    (configs if _is_config(node.returns) else others).add(node.name)
    return configs, others, makers


@functools.lru_cache(maxsize=None)
def _readers():
    """For each option the modules that read it and do something with it."""
    found = {spec.name: set() for spec in SPECS}
    for module, tree in _trees().items():
        # config declares, reports show, planning predicts what IPUs do; how a network is built holds for all.
        if module == "planning/network.py" or not module.startswith(("config/", "reports/", "planning/")):
            for name in _reads(tree) & set(found):
                found[name].add(module)
    for name in BY_RESOLVE:
        strings = {n.value for n in ast.walk(_trees()["config/resolve.py"]) if isinstance(n, ast.Constant)}
        found[name] |= {"config/resolve.py"} if name in strings else set()
    return found


def test_what_is_called_config_is_one():
    configs, others, makers = _declared()
    assert {"config"} == configs and not configs & others
    assert {"Row", "Obstacle", "Contradiction"} == makers


@pytest.mark.parametrize(
    "source, found",
    [
        ("def f(config: RunConfig): return config.seed", {"seed"}),
        ("def f(program: Program): return program.seed", set()),
        ("def f(setup): return setup.config.seed, setup.seed", {"seed"}),
        ("def f(self): return self.device, self._config.shuffle", {"shuffle"}),
        ("def f(r):\n config, record = r.config, r.record\n return config.seed, record.loss", {"seed"}),
        ("def f(r):\n own = replace(r.config, seed=1)\n return own.loss", {"loss"}),
        ("def f(r):\n own = replace(r.program, seed=1)\n return own.loss", set()),
        ("def f(config: RunConfig): pass\ndef g(config): return config.seed", set()),
        ("Row('a', (), lambda c, p: c.loss or p.seed); sorted([], key=lambda c: c.device)", {"loss"}),
        ("given.get('download', RunConfig.download)", {"download"}),
    ],
)
def test_reads_of_a_configuration_are_told_from_others_of_the_same_name(source, found):
    assert _reads(ast.parse(source)) & set(_readers()) == found


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.key)
def test_somebody_reads_each_option_where_it_says_it_has_an_effect(spec):
    readers = _readers()[spec.name]
    on_host = {module for module in readers if not module.startswith("sessions/poplar/")}
    on_ipus = {module for module in readers if not module.startswith("sessions/host/")}
    if spec.warning or spec.name in STANDS_FOR:
        return
    if spec.host_effect:
        assert on_host, f"{spec.flag} says that it has an effect on the host, and nothing there reads it"
    if spec.ipu_effect:
        assert on_ipus, f"{spec.flag} says that it has an effect on IPUs, and nothing there reads it"


STANDS_FOR = {"deterministic": "shuffle"}
"""Options that ``config/resolve.py`` makes another option's value of; tests/test_config_resolve.py tests that."""


def test_a_sweep_is_accepted_with_one_warning(run):
    options = ("--dataset", "digits", "--limit-train", 32, "--num-epochs", 1, "--seed", 1, "--no-validation")
    code, _, err = run("train", "toy_model", "--sweep", *options, "--run-dir", "run")
    assert code == 0 and err.count("warning:") == 1 == err.count("warning: sweep changes nothing"), err


# What only Poplar has: how it compiles, exchanges, keeps memory and rounds, and how a process attaches to devices.
POPLAR_ONLY = """
available-memory-proportion pipeline-validation-model on-demand select-ipu optimizer-state-offloading
half-partials internal-exchange-optimization-target max-cross-replica-buffer-size
max-reduce-many-buffer-size gather-conv-output stable-norm conv-dithering min-remote-tensor-size
scheduling-algorithm fused-preprocessing accelerator-side-reduction compile-only executable-cache
convolution-options matmul-options recomputation-mode offload-activations
offload-gradient-accumulation-buffers replicated-optimizer-state-sharding prefetch-depth
deterministic-workers dropout-layer ckpt-all-instances
"""


def test_what_has_no_effect_on_the_host_is_a_known_list():
    """An option that a run on the host accepts and does nothing with has to be here, with a reason."""
    assert {spec.key for spec in SPECS if docs_generate().effects(spec)[0] == "none"} == set(
        POPLAR_ONLY.split()
    )


def test_every_option_names_a_test_that_is_there():
    folder = Path(__file__).parent
    named = documents.load((folder / "option_tests.yml").read_text(encoding="utf-8"))
    assert sorted(named) == sorted(spec.key for spec in SPECS)

    @functools.lru_cache(maxsize=None)
    def functions(module):
        tree = ast.parse((folder / module).read_text(encoding="utf-8"))
        return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}

    for key, where in named.items():
        module, _, function = where.partition("::")
        assert function.startswith("test_") and function in functions(module), key
    table = DOCUMENT.read_text(encoding="utf-8")
    assert all(f"| `{key}` | " in table and f"`{where}` |" in table for key, where in named.items())


def test_an_option_without_any_effect_cannot_be_declared():
    details = {**vars(BY_NAME["shuffle"]), "host_effect": False, "ipu_effect": False}
    with pytest.raises(TypeError, match="neither on the host nor on IPUs"):
        OptionSpec(**details)


def test_what_only_the_host_acts_on_is_declared_once():
    from ipucnn.runs.rules import RULES

    declared = {spec.name for spec in SPECS if not spec.ipu_effect}
    workers = {
        "max_workers",
        "reduction",
        "start_timeout",
        "require_same_bytes",
        "trusted_network",
    }
    assert declared == {"fused_micro_batches", "threads", "devices", "deterministic_operations"} | workers
    assert declared <= {name for rule in RULES for name in rule.names}
