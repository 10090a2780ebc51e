"""Rules for the options that single commands have: which of them do not go together, a table for each command.

A table's rules are about the command's own class of options.
"""

from typing import Any, Callable, Iterable, Iterator, Tuple

from ipucnn.config.options import RunConfig, specs_for
from ipucnn.config.origin import Origins
from ipucnn.config.request import is_wildcard
from ipucnn.config.rules import OF_PATCHES, Facts, OfTask, Rule, is_set, task_rules
from ipucnn.text import quoted, shown_value

Rules = Tuple[Rule[Any, Facts], ...]
When = Callable[[Any, Facts], bool]


def _given(names: Iterable[str], when: When[Facts], why: str, hint: str) -> Iterator[Rule[Any, Facts]]:
    """Yields rules that refuse each of the options where ``when`` holds; ``why`` follows its flag."""
    for name in names:
        yield Rule(
            lambda options, facts, name=name: is_set(getattr(options, name)) and when(options, facts),  # type: ignore[misc]
            f"--{name.replace('_', '-')}{why}",
            hint,
        )


_TO_DRAW_MISTAKES = "--contact-sheet sheet.png"
INFER_RULES: Rules[OfTask] = (
    *task_rules(
        ("only_mistakes", "--only-mistakes", False),
        ("top", "--top {top}", False),
        ("format", "--format {format}", False),
        ("overlay", "--overlay", True),
        *OF_PATCHES,
        ("threshold", "--threshold {threshold}", True),
    ),
    Rule(
        lambda options, _: options.only_mistakes and None in (options.split, options.contact_sheet),
        "--only-mistakes draws images whose true class is known, on a contact sheet",
        "{add}",
        texts=lambda options, _: {
            "add": f"add {_TO_DRAW_MISTAKES}"
            if options.split
            else f"type: ipucnn infer {quoted(options.run)} --split eval --only-mistakes {_TO_DRAW_MISTAKES}"
        },
    ),
    Rule(
        lambda options, _: options.json and options.format not in (None, "json"),
        "--json and --format {format} are both given",
        "give one of them",
    ),
    Rule(
        lambda options, _: options.split is not None and bool(options.images),
        "images and --split {split} are both given",
        "give images, or --split, not both",
    ),
    Rule(
        lambda options, _: options.split is None and not options.images,
        "there is nothing to {do}",
        "give images, or a data set with --split eval",
        texts=lambda _, facts: {"do": "segment" if facts.segments else "classify"},
    ),
)

_OF_SUITES = "add --suite NAME, or give a wildcard as MODEL; or drop it"
BENCHMARK_COMMAND_RULES: Rules[bool] = (
    *_given(
        ("resume", "versus"),
        lambda _, is_suite: not is_suite,
        " is for suites, and this is one benchmark",
        _OF_SUITES,
    ),
    *_given(
        ("system_profile", "baseline", "max_regression"),
        lambda _, is_suite: is_suite,
        " is for one benchmark, not for suites",
        "drop it, or name one network",
    ),
)
"""Whether it is a suite is their only fact."""

_OF_PLANS = ("save", "html", "save_graph", "compare", "inference", "row")
PLAN_SPLITS_RULES: Rules[Origins] = (
    *_given(
        (*_OF_PLANS, "optimisations", "stages", "classes", "recomputation", "config", "config_path"),
        lambda options, _: bool(options.calibrate),
        ": --calibrate makes no plan",
        "drop one of them",
    ),
    *(
        Rule(
            lambda options, origins, name=spec.name: bool(options.calibrate) and origins[name].is_typed,  # type: ignore[misc]
            f"{'MODEL' if spec.name == 'model_name' else spec.flag}: --calibrate makes no plan",
            "drop one of them",
        )
        for spec in specs_for("plan-splits")
    ),
    *_given(
        _OF_PLANS,
        lambda options, _: options.optimisations,
        ": --optimisations makes no plan",
        "drop one of them",
    ),
)

VERIFY_DATASET_RULES: Rules[RunConfig] = (
    Rule(
        lambda options, config: options.name is not None and config.dataset is not None,
        "the data set is given twice: {name} and --dataset {dataset}",
        "drop one of them",
        texts=lambda _, config: {"dataset": config.dataset},
    ),
)

MODELS_RULES: Rules[None] = tuple(
    Rule(
        lambda options, _, name=spec.name: name in options.flags and not options.summary,  # type: ignore[misc]
        f"{spec.flag} needs --summary",
        f"ipucnn models {{network}} --summary {spec.flag} {{value}}",
        texts=lambda options, _, name=spec.name: {  # type: ignore[misc]
            "network": "NAME" if is_wildcard(options.pattern) else shown_value(options.pattern),
            "value": shown_value(options.flags[name]),
        },
    )
    for spec in specs_for("models")
)
