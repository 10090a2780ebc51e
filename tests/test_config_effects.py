"""Every option has the effect that its declaration states: on the host, on IPUs, or on both.

An option counts as read if it is an attribute of an object with a name that a ``RunConfig`` has: ``program.seed`` does
not count.  These tests cannot see whether the value has an effect; the tests of each option show that.
"""

import ast
import functools
from pathlib import Path

import pytest

import ipucnn
from ipucnn.config.options import BY_NAME, SPECS
from ipucnn.config.spec import Effect, OptionSpec
from ipucnn.runs.rules import RULES

PACKAGE = Path(ipucnn.__file__).parent
BY_RESOLVE = {"dataset", "dataset_path", "plan"}
"""Options that ``resolve`` itself acts on: they choose the files to read."""


CALLED = ("config", "_config", "c", "RunConfig")


def _reads(source):
    """Returns the options that a module reads."""
    attributes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    owners = ((getattr(node.value, "attr", getattr(node.value, "id", "")), node.attr) for node in attributes)
    return {name for owner, name in owners if owner in CALLED} & set(BY_NAME)


@functools.lru_cache(maxsize=None)
def _readers():
    """Returns, for each option, the modules that read it and act on it."""
    readers = {name: {"config/resolve.py"} if name in BY_RESOLVE else set() for name in BY_NAME}
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE).as_posix()
        # config only declares, reports show, planning predicts IPUs; building a network counts for all devices.
        if module == "planning/network.py" or not module.startswith(("config/", "reports/", "planning/")):
            for name in _reads(path.read_text(encoding="utf-8")):
                readers[name].add(module)
    return readers


@pytest.mark.parametrize(
    "source, read",
    [
        ("def f(config): return config.seed", {"seed"}),
        ("def f(program): return program.seed", set()),
        ("def f(setup): return setup.config.seed, setup.seed", {"seed"}),
        ("def f(self): return self.device, self._config.shuffle", {"shuffle"}),
        ("Row('a', (), lambda c, p: c.loss or p.seed)", {"loss"}),
        ("given.get('download', RunConfig.download)", {"download"}),
    ],
)
def test_reads_of_a_configuration_are_recognised(source, read):
    assert _reads(source) == read


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.key)
def test_each_option_is_read_where_it_declares_an_effect(spec):
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
"""Options that ``config/resolve.py`` turns into a value of another one; tests/test_config_resolve.py tests that."""


def test_a_sweep_is_accepted_with_one_warning(succeeds):
    options = ("--dataset", "digits", "--limit-train", 32, "--num-epochs", 1, "--seed", 1, "--no-validation")
    _, err = succeeds("train", "toy_model", "--sweep", *options, "--run-dir", "run")
    assert err.count("warning:") == 1 == err.count("warning: sweep changes nothing")


# Options for Poplar only: compilation, exchange, memory, rounding, and attaching to devices.
POPLAR_ONLY = """
available-memory-proportion pipeline-validation-model on-demand select-ipu optimizer-state-offloading
half-partials internal-exchange-optimization-target max-cross-replica-buffer-size
max-reduce-many-buffer-size gather-conv-output stable-norm conv-dithering min-remote-tensor-size
scheduling-algorithm fused-preprocessing accelerator-side-reduction compile-only executable-cache
convolution-options matmul-options recomputation-mode offload-activations
offload-gradient-accumulation-buffers replicated-optimizer-state-sharding prefetch-depth
deterministic-workers dropout-layer ckpt-all-instances
"""


def test_options_without_effect_on_the_host_are_listed():
    """Every option that a run on the host accepts and ignores must be listed here, with a reason."""
    ignored = {spec.key for spec in SPECS if not spec.host_effect and not spec.warning}
    assert ignored == set(POPLAR_ONLY.split())


EFFECTS = {
    Effect.START: "plan max-workers checkpoint-input-dir",
    Effect.END: "num-epochs target-accuracy early-stopping",
    Effect.FILES: "dataset-path download run-dir overwrite dry-run plot-schedule draw-samples resume checkpoint-dir "
    "executable-cache",
    Effect.DELIVERY: "device pipeline-num-parallel max-image-pixels keep-checkpoints clean-dir ckpt-all-instances "
    "mlperf-logging sweep wandb wandb-run-name wandb-tags on-demand select-ipu compile-only prefetch-depth devices "
    "rank-timeout require-same-bytes",
}


def test_options_that_do_not_change_the_result_are_listed():
    """All others do: a run that continues keeps them."""
    listed = {key: effect for effect, keys in EFFECTS.items() for key in keys.split()}
    assert {spec.key: spec.effect for spec in SPECS if spec.effect is not Effect.RESULT} == listed


def test_an_option_without_any_effect_cannot_be_declared():
    details = {**vars(BY_NAME["shuffle"]), "host_effect": False, "ipu_effect": False}
    with pytest.raises(TypeError, match="neither on the host nor on IPUs"):
        OptionSpec(**details)


def test_options_of_the_host_alone_are_declared_once():
    declared = {spec.name for spec in SPECS if not spec.ipu_effect}
    workers = {"max_workers", "reduction", "rank_timeout", "require_same_bytes"}
    assert declared == {"fused_micro_batches", "threads", "devices", "deterministic_operations"} | workers
    assert declared <= {rule.option for rule in RULES}
