"""The pipeline splits of a training run: those given, those of a plan, or those the planner chooses for its model."""

from typing import Any, Dict, List, Optional, Tuple

from ipucnn.config.options import AUTO, RunConfig
from ipucnn.planning.splits import check_splits
from ipucnn.training.program import Program

__all__ = ["check_named_splits", "choose_splits", "plan_differences", "settle_splits"]


def settle_splits(program: Program, model: Any, resolved: Any, saved: Optional[Dict[str, Any]]) -> Program:
    """A program with its splits filled in and checked against the built model.

    Args:
        program: its splits are empty where the planner is to choose them.
        model: from ``build_model``.
        resolved: the run's ``Resolved``.
        saved: the program of the checkpoint that is continued, whose splits it keeps; None to begin.

    Raises:
        ConfigurationError: an unknown layer, splits out of order, more stages than the model can be cut into.
    """
    if program.num_stages == 1:
        return program
    from ipucnn.models.names import canonical_names

    splits, origin = program.pipeline_splits, "given"
    if splits and resolved.plan is not None and splits == resolved.plan.splits:
        origin = resolved.origins["pipeline_splits"]
    if not splits and saved is not None:
        splits, origin = tuple(saved.get("pipeline_splits", ())), str(saved.get("splits_from", ""))
    if not splits:
        splits, origin = choose_splits(model, resolved.record.name, program, resolved.config)
    check_splits(splits, canonical_names(model))
    return program.with_splits(splits, origin)


def check_named_splits(resolved: Any) -> None:
    """Checks the names of given splits against the shipped graph, before TensorFlow is imported.

    A network's layers are the same at every input size; with other layers than the shipped graph's (another norm)
    nothing is known yet, and :func:`settle_splits` checks them on the built network.

    Raises:
        ConfigurationError: an unknown layer, or splits out of order.
    """
    from ipucnn.planning.graphs.extract import known_graph
    from ipucnn.runs.setup import network_options

    config, record = resolved.config, resolved.record
    if not config.pipeline_splits or list(config.pipeline_splits) == [AUTO]:
        return
    graph = known_graph(record, network_options(record, config, record.input_shape, record.num_classes))
    if graph is not None:
        check_splits(config.pipeline_splits, [layer.name for layer in graph.layers])


def choose_splits(model: Any, name: str, program: Program, config: RunConfig) -> Tuple[Tuple[str, ...], str]:
    """The planner's splits of a built model, and who chose them.

    A run on the host doesn't need the memory of IPUs: where nothing fits there, the fastest splits are taken
    whatever they need.

    Raises:
        ConfigurationError: more stages than the model can be cut into.
    """
    from ipucnn.hardware import smallest_system
    from ipucnn.planning.graphs.extract import graph_of
    from ipucnn.planning.search.planner import Planner
    from ipucnn.planning.settings import plan_settings
    from ipucnn.planning.splits import check_stages

    # Nothing says which machine a run will have.
    graph, system = graph_of(model, name), smallest_system(program.num_ipus)
    check_stages(program.num_stages, graph)
    settings = plan_settings(config, program.layout)
    planner = Planner(graph, system)
    found = planner.best_of([[settings]])
    if found is not None:
        return found.splits, f"planned for {system.title}"
    found = planner.best(settings, memory_limit=float("1e9"))
    assert found is not None  # nothing takes as much
    return found.splits, f"planned for {system.title}, whose memory they exceed"


def plan_differences(
    resolved: Any, program: Any, input_shape: Tuple[int, ...], num_classes: int
) -> List[str]:
    """What to tell of a run that isn't what its plan was made for; the splits hold all the same."""
    plan = resolved.plan
    if plan is None:
        return []
    config = resolved.config
    pairs = [
        ("input", "x".join(map(str, plan.input_shape)), "x".join(map(str, input_shape))),
        ("classes", plan.num_classes, num_classes),
        ("precision", plan.settings.precision, config.precision),
        ("micro-batch", plan.settings.micro_batch_size, program.micro_batch_size),
        ("accumulation", plan.settings.gradient_accumulation_count, program.gradient_accumulation_count),
        ("replicas", plan.settings.num_replicas, program.num_replicas),
        ("schedule", plan.settings.schedule, config.pipeline_schedule),
        ("recomputation", plan.settings.recomputation, config.recomputation),
    ]
    differing = [f"{name} {there} (here {here})" for name, there, here in pairs if there != here]
    lines = []
    if differing:
        lines.append("the plan was made for " + ", ".join(differing) + ": what it predicts isn't this run")
    if plan.verdict != "fits":
        lines.append(f"whether the plan fits on {plan.system.title}: {plan.verdict}")
    return lines
