"""Rules for the options of ``benchmark``, and of the rows of suites, that do not go together.

A suite checks them when it is read, and a benchmark before data are opened.
"""

from dataclasses import replace
from typing import Callable, Dict, List, NamedTuple, Tuple

from ipucnn.benchmarking.settings import DEVICE_GENERATED, REAL, SESSION, BenchmarkSettings, data_kind
from ipucnn.config.options import RunConfig, specs_for
from ipucnn.config.resolve import OF_16_BITS, Resolved
from ipucnn.config.rules import Rule, check_rules
from ipucnn.config.spec import Effect
from ipucnn.planning.program import OF_UPDATES
from ipucnn.runs.rules import HOST_SESSION_RULES, RUN_RULES, RunFacts, check_run_rules
from ipucnn.sessions.group import Alone, ProcessGroup
from ipucnn.text import percent
from ipucnn.training.program import Layout, make_layout


class BenchmarkFacts(NamedTuple):
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

BENCHMARK_RULES: Tuple[Rule[BenchmarkSettings, BenchmarkFacts], ...] = (
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

NOISE_RULES: Tuple[Rule[RunConfig, None], ...] = tuple(
    Rule(
        lambda config, _: data_kind(config) != REAL,
        "{option} has no effect on generated images, of which a benchmark draws its own number",
        "{drop[it]}",
        name,
    )
    for name in ("limit_train", "skip_damaged")
)

ROW_RULES: Tuple[Rule[RunConfig, None], ...] = tuple(
    Rule(
        lambda config, _, name=name: name != "training" or not config.training,  # type: ignore[misc]
        f"{{option}}: a row is one run that is measured, and this {does}",
        "{drop[it]}",
        name,
        has_off=name != "training",
        typed_only=False,
    )
    for name, does in (
        ("kfold", "makes one for each fold"),
        ("training", "trains nothing"),
        ("dry_run", "trains nothing"),
        ("plot_schedule", "is for dry runs"),
        ("draw_samples", "is for dry runs"),
        ("compile_only", "only compiles"),
        ("checkpoint_input_dir", "continues another"),
    )
)


def _has_parts(layout: Layout) -> bool:
    return layout.num_replicas * layout.gradient_accumulation_count * layout.num_stages > 1


FIT_RULES: Tuple[Rule[RunConfig, None], ...] = (
    *ROW_RULES,
    Rule(
        lambda config, _: _has_parts(make_layout(config)),
        "fit: Keras has no replicas, accumulation or stages: that is the session's",
        "use train in its place",
    ),
    Rule(
        lambda config, _: config.precision != "32.32" or config.num_epochs < 2,
        "fit with --precision {precision} and --num-epochs {num_epochs}: Keras is measured in 32 bits, and the first "
        "epoch compiles and does not count",
        "write --precision 32.32 --num-epochs 3",
    ),
    *(
        Rule(
            lambda config, _, spec=spec: getattr(config, spec.name) != spec.default,  # type: ignore[misc]
            "{option} has no effect in fit, which is Keras' own loop",
            "{drop[it]}, or use train in its place",
            spec.name,
            has_off=False,
        )
        for spec in specs_for("train")
        if not spec.keras_effect
    ),
)


def check_settings(settings: BenchmarkSettings, config: RunConfig, num_instances: int = 1) -> None:
    """Refuses settings that do not go together, or not with the configuration or the instances of ``poprun``.

    Raises:
        ConfigurationError: the message names the options, and the hint the remedy.
    """
    check_rules(BENCHMARK_RULES, settings, BenchmarkFacts(data_kind(config), num_instances))


def check_run(resolved: Resolved, training: bool, group: ProcessGroup) -> Resolved:
    """Refuses options of runs that have no effect in a benchmark, or exclude each other.

    Returns:
        The configuration that is measured; for inference without accumulation.

    Raises:
        ConfigurationError: the message names the option, and the hint the remedy.
    """
    if not training:
        # Nothing is accumulated; a pipeline is filled with as many micro-batches as an execution has.
        config = replace(resolved.config, gradient_accumulation_count=None, global_batch_size=None)
        resolved = replace(resolved, config=config)
    layout = make_layout(resolved.config, resolved.origins["num_replicas"].is_typed)
    check_rules(NOISE_RULES, resolved.config, None, resolved.origins, resolved.command)
    check_run_rules(RunFacts(resolved, layout, group), RUN_RULES if training else HOST_SESSION_RULES)
    return resolved


def check_row(resolved: Resolved, command: str, training: bool) -> None:
    """Refuses options that spoil a row of a suite, or have no effect in it, before any row runs.

    Args:
        resolved: the configuration of the row.
        command: benchmark, train or fit.
        training: whether the row trains.

    Raises:
        ConfigurationError: the message names the option, and the hint the remedy.
    """
    rules = FIT_RULES if command == "fit" else ROW_RULES
    check_rules(rules, resolved.config, None, resolved.origins, resolved.command)
    check_run(resolved, training, Alone())


# What changes the trained network, or the end of the run, apart from the arithmetic of 16 bits: fit is in 32 bits.
_TRAINED = tuple(
    spec
    for spec in specs_for("train")
    if not spec.keras_effect
    and spec.name not in OF_16_BITS
    and (spec.effect is Effect.END or spec.panel in ("Data", "Model", "Training"))
)


def without_effect(resolved: Resolved, training: bool) -> List[str]:
    """Returns the note on typed options that inference has no use for, such as those of a loss, if it is measured."""
    idle = [] if training else resolved.typed_for_updates((*OF_UPDATES, "loss", "label_smoothing"))
    return (
        [f"without effect in inference: {', '.join(idle)}; --training measures weight updates"]
        if idle
        else []
    )


def differences_of_fit(resolved: Resolved) -> List[str]:
    """Returns the notes on a row of ``fit``: values that nobody typed and Keras' own loop does not take."""
    given = (
        resolved.origins[spec.name].option(spec.flag, spec.typed_text(getattr(resolved.config, spec.name)))
        for spec in _TRAINED
        if getattr(resolved.config, spec.name) != spec.default
    )
    return [f"Keras' own loop has no {text}" for text in given]
