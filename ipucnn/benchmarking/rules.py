"""Rules for the options of ``benchmark``, and of Keras' loop in a suite, that do not go together.

A suite checks them when it is read, and a benchmark before data are opened.
"""

from typing import Callable, Dict, NamedTuple, Tuple

from ipucnn.benchmarking.settings import DEVICE_GENERATED, SESSION, BenchmarkSettings, data_kind
from ipucnn.config.options import RunConfig
from ipucnn.config.rules import Rule, check_rules
from ipucnn.text import percent
from ipucnn.training.program import Layout


class Facts(NamedTuple):
    """The facts that the rules depend on.

    Attributes:
        kind: the source of the images, a key of ``DATA_KINDS``.
        num_instances: the instances of ``poprun``.
    """

    kind: str
    num_instances: int


_OF_ONE_PROCESS: Dict[str, Callable[[BenchmarkSettings], bool]] = {
    "--mode {scope}": lambda settings: settings.scope != SESSION,
    "--compare-with {compare_with}": lambda settings: settings.compare_with is not None,
    "--baseline {baseline}": lambda settings: settings.baseline is not None,
}

BENCHMARK_RULES: Tuple[Rule[BenchmarkSettings, Facts], ...] = (
    Rule(
        lambda settings, _: settings.scope == SESSION and settings.flag not in (None, settings.mode),
        "--mode {mode} and --{flag} contradict each other",
        "drop one of them",
    ),
    *(
        Rule(
            lambda settings, _, name=name: (  # type: ignore[misc]
                settings.scope != SESSION and getattr(settings, name) is not None
            ),
            f"--{name.replace('_', '-')} compares the network's speed, and --mode {{scope}} measures something else",
            f"drop --{name.replace('_', '-')}, or use --mode {{mode}}",
        )
        for name in ("compare_with", "baseline")
    ),
    Rule(
        lambda settings, _: settings.max_regression is not None and settings.baseline is None,
        "--max-regression {share} needs something to compare with",
        "add --baseline report.json",
        texts=lambda settings, _: {"share": percent(settings.max_regression or 0)},
    ),
    Rule(
        lambda settings, _: settings.limits.max_time_s < settings.limits.min_time_s,
        "--max-time {limits.max_time_s:g} is less than --min-time {limits.min_time_s:g}",
        "use --max-time {limits.min_time_s:g}",
    ),
    Rule(
        lambda settings, facts: settings.scope != SESSION and facts.kind == DEVICE_GENERATED,
        "--device-generated-data has no input pipeline, which --mode {scope} measures",
        "drop it, and give --host-generated-data or a data set",
    ),
    # Each instance would measure only its own host.
    *(
        Rule(
            lambda settings, facts, is_given=is_given: facts.num_instances > 1 and is_given(settings),  # type: ignore[misc]
            f"{option} is for one process, and poprun started {{num_instances}} instances",
            "drop it, or start the benchmark without poprun",
            texts=lambda settings, facts: {**facts._asdict(), "compare_with": settings.compare_with},
        )
        for option, is_given in _OF_ONE_PROCESS.items()
    ),
)

FIT_RULES: Tuple[Rule[RunConfig, Layout], ...] = (
    Rule(
        lambda _, layout: layout.num_replicas * layout.gradient_accumulation_count * layout.num_stages > 1,
        "fit: Keras has no replicas, accumulation or stages: that is the session's",
        "use train in its place",
    ),
    Rule(
        lambda config, _: config.precision != "32.32" or config.num_epochs < 2,
        "fit with --precision {precision} and --num-epochs {num_epochs}: Keras is measured in 32 bits, and the first "
        "epoch compiles and does not count",
        "write --precision 32.32 --num-epochs 3",
    ),
)


def check_settings(settings: BenchmarkSettings, config: RunConfig, num_instances: int = 1) -> None:
    """Refuses settings that do not go together, or not with the configuration or the instances of ``poprun``.

    Raises:
        ConfigurationError: the message names the options, and the hint the remedy.
    """
    check_rules(BENCHMARK_RULES, settings, Facts(data_kind(config), num_instances))
