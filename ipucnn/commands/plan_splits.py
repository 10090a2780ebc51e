"""``ipucnn plan-splits``: plan how to split a network over IPUs."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Dict, List, Mapping, Optional, Sequence, Tuple

from ipucnn.config import bounds
from ipucnn.config.command import request_of
from ipucnn.config.resolve import Resolved
from ipucnn.config.shared_options import NetworkOptions
from ipucnn.config.spec import FILES, option, word, words
from ipucnn.errors import ConfigurationError
from ipucnn.events import Events, Note, show
from ipucnn.filesystem import (
    check_not_replaced,
    check_output,
    expand,
    shown,
    write_output_text,
)
from ipucnn.models.registry import LAYER_GRAPH
from ipucnn.text import quoted

if TYPE_CHECKING:
    from ipucnn.planning.question import Question


@dataclass(frozen=True)
class PlanSplits(NetworkOptions):
    """The options of ``ipucnn plan-splits``, besides those of runs."""

    EACH: ClassVar[Dict[str, Any]] = {**NetworkOptions.EACH, "panel": "Plan"}

    stages: Optional[int] = option(
        None,
        "Number of pipeline stages. Without this option, and without splits, the best use of --ipus is searched for.",
        metavar="K",
        within=bounds.STAGES,
    )
    row: Optional[int] = option(
        None,
        "Plan row N of the table of best uses that a search with --ipus shows, instead of row 1, the fastest.",
        metavar="N",
        within=bounds.ROW,
    )
    system: Optional[str] = word(
        "NAME",
        "System to plan for: m2000, pod16, bow-pod64, c600, ...",
        default_text="the smallest POD from pod16 on",
    )
    classes: Optional[int] = option(
        None,
        "Classes of the network.",
        metavar="N",
        within=bounds.CLASSES,
        default_text="the data set's",
    )
    recomputation: Optional[str] = word(
        "auto|on|off",
        "Recompute activations in the backward pass; auto tries it with and without.",
        default_text="the preset's, else auto",
    )
    inference: bool = option(
        False,
        "Plan inference: throughput, latency, replicas and micro-batch of forward passes, without the memory that only "
        "training needs.",
    )
    compare: Tuple[str, ...] = words(
        "RULE|FILE...",
        "Splits to compare with: params, equal-layers, equal-blocks, a plan.yml, or a configs.yml.",
        default_text="params",
    )
    save: Optional[Path] = option(
        None,
        "Write the plan as YAML, for `ipucnn train --plan`.",
    )
    html: Optional[Path] = option(
        None,
        "Write the plan as an HTML page.",
    )
    save_graph: Optional[Path] = option(
        None,
        "Write the layers of the network as JSON; `plan-splits FILE` reads such a file.",
    )
    stage_proportions: bool = option(
        True,
        "If --available-memory-proportion is not given: choose for each stage the largest of 60, 30 and 15 % with "
        "which it fits; with --no-stage-proportions choose one value for all stages.",
        off=None,
        default_text="True",
    )
    optimisations: bool = option(
        False,
        "Instead of planning, predict memory and throughput with each optimisation of Graphcore's public U-Net "
        "switched on or off by itself.",
    )
    calibrate: Tuple[Path, ...] = words(
        "RUN|REPORT.json|PLAN.yml...",
        "Instead of planning, fit the predicted times to throughputs that were measured on your IPUs, the machine of "
        "--system. Give run folders, reports of benchmarks, or plans into which you wrote measured_images_per_s. The "
        "result is written to the file of --system-profile.",
        kind=FILES,
    )
    system_profile: Optional[Path] = option(
        None,
        "Predict with what --calibrate measured of a system, and wrote to this file.",
    )


def plan_splits(options: PlanSplits) -> None:
    """Plan how to split a network into pipeline stages over IPUs, and predict memory and throughput.

    It finds splits that fit into the predicted memory, and proves that no others are faster. --splits judges splits of
    your own instead. Nothing is measured, and no IPU is needed.
    """
    resolved = request_of(options, "plan-splits").resolve()
    if options.print_config:
        from ipucnn.reports.configuration import print_config

        print_config(resolved, options.json)
        return
    from ipucnn.commands.rules import PLAN_SPLITS_RULES
    from ipucnn.config.rules import check_rules

    profile_path = options.system_profile
    names = {"--save": options.save, "--html": options.html, "--save-graph": options.save_graph}
    check_rules(PLAN_SPLITS_RULES, options, resolved.origins)
    if options.calibrate:
        _calibrate(options.calibrate, options.system, profile_path, options.json)
        return
    from ipucnn.planning.question import make_question
    from ipucnn.reports.console import note

    compare = list(options.compare)
    outputs = {flag: path for flag, path in names.items() if path is not None}
    _check_outputs(resolved, outputs, compare, profile_path)
    profile = None
    if profile_path is not None:
        from ipucnn.planning.calibration import read_profile

        profile = read_profile(profile_path)
    question = make_question(
        resolved,
        stages=options.stages,
        row=options.row,
        system=options.system,
        profile=profile,
        classes=options.classes,
        recomputation=options.recomputation,
        stage_proportions=options.stage_proportions,
        inference=options.inference,
    )
    for warning in question.warnings:
        note(f"warning: {warning}")
    if options.optimisations:
        _show_optimisations(question, resolved, options.json)
    else:
        _show_plan(question, compare, outputs, options.json)


def import_tensorflow() -> None:
    """Imports TensorFlow through the host session's function, only when a plan needs it: most plans do not."""
    from ipucnn.sessions.host.environment import import_tensorflow as import_now

    import_now()


def _save_graph(question: "Question", path: Path) -> "Events[Question]":
    """Writes the layer graph before planning, so that it exists even if no plan fits.

    Returns:
        The question with the graph.
    """
    from ipucnn.planning.plan import read_graph

    if path.suffix.lower() != LAYER_GRAPH:
        raise ConfigurationError(
            f"--save-graph {shown(path)}: plan-splits knows a layer graph by the ending {LAYER_GRAPH}",
            f"--save-graph {quoted(path.with_suffix(LAYER_GRAPH))}",
        )
    graph = read_graph(question, import_tensorflow)
    # The graph does not record --freeze; a command that reads the file needs the option again.
    write_output_text(path, graph.to_json())
    yield Note(f"written: {path}")
    return replace(question, graph=graph)


def _show_plan(
    question: "Question", compare: List[str], outputs: Mapping[str, Path], json_output: bool
) -> None:
    """Makes a plan, writes it to the given files, and prints it.

    Raises:
        InfeasibleError: no splits fit, or the given splits do not.
    """
    from ipucnn.planning.plan import check_not_fitting, make_plan
    from ipucnn.planning.search.neighbours import NothingFits
    from ipucnn.reports.console import Screen, note

    if "--save-graph" in outputs:
        path = outputs["--save-graph"]
        question = show(_save_graph(question, path), Screen())
    try:
        plan = show(make_plan(question, compare, import_tensorflow), Screen())
    except NothingFits as error:
        if json_output:
            sys.stdout.write(error.to_json())
        raise
    texts: List[Tuple[Path, str]] = []  # two outputs may be one stream
    if "--save" in outputs:
        # The file has only the plan to run; the other plans of the search are only shown.
        texts.append((outputs["--save"], replace(plan, pareto=()).to_yaml()))
    if "--html" in outputs:
        from ipucnn.reports.plan_html import render

        texts.append((outputs["--html"], render(plan)))
    for path, text in texts:
        write_output_text(path, text)
    if json_output:
        sys.stdout.write(plan.to_json())
    else:
        from ipucnn.reports.plan import print_plan

        print_plan(plan)
    for path, _ in texts:
        note(f"written: {path}")
    check_not_fitting(plan, question)


def _calibrate(
    paths: Sequence[Path], system: Optional[str], profile_to: Optional[Path], json_output: bool
) -> None:
    """Fits a system profile to measurements, prints it, and writes it to the file of ``--system-profile``."""
    from ipucnn.benchmarking.observation import read_observation
    from ipucnn.hardware import get_system, smallest_system
    from ipucnn.planning.calibration import calibrate, plan_measurement, suspicious
    from ipucnn.planning.pipeline_plan import read_plan
    from ipucnn.reports.console import note

    measured_on = None if system is None else get_system(system)
    if profile_to is not None:
        check_output(profile_to)
        check_not_replaced([("--system-profile", profile_to)], [("measured", path) for path in paths])
    measurements = [
        plan_measurement(read_plan(path), shown(path), import_tensorflow)
        if path.suffix.lower() in (".yml", ".yaml")
        else read_observation(path, import_tensorflow)
        for path in paths
    ]
    if measured_on is None:
        measured_on = smallest_system(max(measured.settings.occupied_ipus for measured in measurements))
        note(f"--system is not given: measured on {measured_on.title} is assumed")
    profile = calibrate(measurements, measured_on)
    for warning in suspicious(profile):
        note(f"warning: {warning}")
    if profile_to is not None:
        write_output_text(profile_to, profile.to_json())
    if json_output:
        sys.stdout.write(profile.to_json())
    else:
        from ipucnn.reports.plan import print_calibration

        print_calibration(profile)
    note(
        "add --system-profile FILE to keep it, and give that to plan-splits and benchmark"
        if profile_to is None
        else f"written: {profile_to}"
    )


def _show_optimisations(question: "Question", resolved: Resolved, json_output: bool) -> None:
    from ipucnn.planning.plan import make_optimisations
    from ipucnn.reports.console import Screen
    from ipucnn.reports.plan import optimisations_json, print_optimisations

    answer = show(make_optimisations(question, resolved.config, import_tensorflow), Screen())
    if json_output:
        print(optimisations_json(*answer))
    else:
        print_optimisations(*answer)


def _check_outputs(
    resolved: Resolved, outputs: Mapping[str, Path], compare: List[str], profile: Optional[Path]
) -> None:
    """Refuses outputs that cannot be written, or would replace an input, before anything else is done.

    Raises:
        DataError: an output cannot be written.
        ConfigurationError: two outputs are the same file, or an output is also an input.
    """
    from ipucnn.planning.splits import HEURISTICS

    read = [("the file of --compare", expand(name)) for name in compare if name not in HEURISTICS]
    input_files = {
        "--config-path": resolved.config_path,
        "MODEL": resolved.record.file,
        "--system-profile": profile,
    }
    read += [(f"the file of {option}", path) for option, path in input_files.items() if path is not None]
    for path in outputs.values():
        check_output(path)
    check_not_replaced(outputs.items(), read)
