"""Checks the layers named in splits and in ``--freeze``, and computes the splits of heuristics and of a run.

Plans are compared with the splits of the heuristics.  A run's splits are given, or those of a plan, or the planner
chooses them for its model.
"""

import bisect
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from ipucnn.aliases import KerasModel, PlainDict
from ipucnn.config.options import RunConfig
from ipucnn.config.origin import Giver
from ipucnn.config.resolve import Resolved
from ipucnn.errors import ConfigurationError, did_you_mean
from ipucnn.models.build import layers_to_freeze
from ipucnn.models.registry import is_network_file
from ipucnn.planning.graphs.layer_graph import LayerGraph, estimates
from ipucnn.planning.network import network_options
from ipucnn.planning.pipeline_plan import PipelinePlan, kept_options, layer_options
from ipucnn.text import counted, quoted
from ipucnn.training.program import Layout


def check_splits(splits: Sequence[str], layer_names: Sequence[str], model: str = "MODEL") -> None:
    """Checks pipeline splits against a model's layers in the order in which they run.

    Args:
        splits: the names of the layers that open a stage.
        layer_names: the canonical names; the first is the input, which cannot open a later stage.
        model: the model's name, for the hint.

    Raises:
        ConfigurationError: an unknown layer, or splits out of order.
    """
    order = {name: i for i, name in enumerate(layer_names)}
    for split in splits:
        if order.get(split, 0) == 0:
            what = "is the input" if split in order else "is not a layer of the model"
            raise ConfigurationError(
                f"pipeline split '{split}' {what}",
                did_you_mean(split, layer_names[1:])
                or (
                    ""
                    if is_network_file(model)
                    else f"the layers in their order: ipucnn models {quoted(model)} --summary; or "
                )
                + f"leave the splits to the planner: ipucnn plan-splits {quoted(model)} --stages {len(splits) + 1}",
            )
    for before, after in zip(splits, splits[1:]):
        if order[before] >= order[after]:
            raise ConfigurationError(
                f"pipeline splits are out of order: '{after}' runs before '{before}'",
                "order them as they run: --pipeline-splits "
                + " ".join(sorted(set(splits), key=order.__getitem__)),
            )


def check_cuts(splits: Sequence[str], graph: LayerGraph) -> None:
    """Calls ``check_splits``, and checks that a stage may open at each of the layers.

    Raises:
        ConfigurationError: a stage may not open there; the message names the nearest layers where it may.
    """
    check_splits(splits, [layer.name for layer in graph.layers], graph.model)
    legal = list(graph.cuts)
    for split in splits:
        cut = graph.index(split)
        place = bisect.bisect_left(legal, cut)
        if place < len(legal) and legal[place] == cut:
            continue
        reason = (
            "the first stage would be empty" if cut <= 1 else "layers before and after this cut share weights"
        )
        if len(legal) < len(splits):
            hint = f"it can be cut before {', '.join(graph.layers[c].name for c in legal) or 'no layer'} only"
        elif len(splits) > 1:  # a name beside this split may be another split, or have to change with it
            hint = f"possible splits: {' '.join(_names(graph, [graph.index(name) for name in splits]))}"
        else:
            near = [graph.layers[c].name for c in legal[max(0, place - 1) : place + 1]]
            hint = "use " + " or ".join(f"'{name}'" for name in near)
        raise ConfigurationError(f"pipeline split '{split}' can't open a stage: {reason}", hint)


def check_stages(num_stages: int, graph: LayerGraph, option: str = "--stages") -> None:
    """Refuses more stages than the model can be cut into; ``option`` is the command's for their number.

    Raises:
        ConfigurationError: too many stages; the message says how many are possible.
    """
    most = len(graph.cuts) + 1
    if num_stages > most:
        raise ConfigurationError(
            f"{num_stages} stages, but {graph.model} can be cut in {most - 1} places only",
            f"use {option} {most} or less",
        )


def _names(graph: LayerGraph, positions: Sequence[int]) -> Tuple[str, ...]:
    """Returns the names of the layers at given positions, each moved to the next legal cut behind the one before it."""
    legal = list(graph.cuts)
    names: List[str] = []
    place = 0
    for number, position in enumerate(positions):
        # The remaining positions need a place each.
        last = len(legal) - (len(positions) - number)
        place = min(max(place, bisect.bisect_left(legal, position)), last)
        names.append(graph.layers[legal[place]].name)
        place += 1
    return tuple(names)


def equal_parameters(graph: LayerGraph, num_stages: int) -> Tuple[str, ...]:
    """Returns splits with about the same number of weights in each stage, by a walk over the weights in order.

    A stage opens at the layer whose weights take the running count past k/N of all.  Graphcore's public CNN application
    uses this rule if no splits are given.
    """
    check_stages(num_stages, graph)
    total, count = graph.num_parameters, 0
    opens: List[int] = []
    for i, layer in enumerate(graph.layers):
        count += layer.num_parameters
        while len(opens) < num_stages - 1 and layer.num_parameters:
            if count * num_stages <= total * (len(opens) + 1):
                break
            opens.append(i)
    opens += [len(graph.layers)] * (num_stages - 1 - len(opens))
    return _names(graph, opens)


def equal_layers(graph: LayerGraph, num_stages: int) -> Tuple[str, ...]:
    """Returns splits with the same number of layers in each stage."""
    check_stages(num_stages, graph)
    count = len(graph.layers)
    return _names(graph, [round(k * count / num_stages) for k in range(1, num_stages)])


def _blocks(graph: LayerGraph) -> List[int]:
    """Returns the cuts between blocks, the runs of layers within which the network branches.

    One tensor crosses each cut.  Layers outside any block belong to the block behind them, and those at the end to the
    last one.  In a network without branches every layer with weights opens a block.
    """
    narrow = [cut for cut in graph.cuts if len(graph.crossing(cut)) == 1]
    ends = [*narrow[1:], len(graph.layers)]
    branches = [end - cut > 1 for cut, end in zip(narrow, ends)]
    if any(branches):
        # A cut stays at the end of each block: everything up to the next branching belongs together.
        return [cut for cut, before in zip(narrow[1:], branches) if before]
    return [cut for cut in narrow if graph.layers[cut].num_parameters]


def equal_blocks(graph: LayerGraph, num_stages: int) -> Tuple[str, ...]:
    """Returns splits with the same number of blocks in each stage.

    Raises:
        ConfigurationError: the network has fewer blocks than stages.
    """
    check_stages(num_stages, graph)
    cuts = _blocks(graph)
    count = len(cuts) + 1
    if num_stages > count:
        raise ConfigurationError(
            f"equal-blocks: {graph.model} has {counted(count, 'block')} with one tensor between them, fewer than "
            f"{num_stages} stages",
            "use --compare equal-layers",
        )
    return tuple(graph.layers[cuts[round(k * count / num_stages) - 1]].name for k in range(1, num_stages))


HEURISTICS: Dict[str, Callable[[LayerGraph, int], Tuple[str, ...]]] = {
    "params": equal_parameters,
    "equal-layers": equal_layers,
    "equal-blocks": equal_blocks,
}


# --- the splits of a run


def named_splits(resolved: Resolved) -> Tuple[Tuple[str, ...], str]:
    """Returns the splits that options or a plan name, and their origin; empty if they name none."""
    splits, origin = resolved.config.named_splits, resolved.origins["pipeline_splits"]
    text = str(origin) if origin.giver is Giver.PLAN else "given"
    return splits, text if splits else ""


def splits_of_run(
    layout: Layout, model: "KerasModel", resolved: Resolved, saved: Optional[PlainDict]
) -> Tuple[Tuple[str, ...], str]:
    """Returns the splits of a run, checked against the built model, and their origin.

    Args:
        layout: the stages of the run.
        model: the model from ``build_model``.
        saved: the program of the checkpoint to resume, whose splits are kept; None for a new run.

    Raises:
        ConfigurationError: an unknown layer, splits out of order, more stages than the model can be cut into.
    """
    if layout.num_stages == 1:
        return (), ""
    splits, origin = named_splits(resolved)
    if not splits and saved is not None:
        splits, origin = tuple(saved.get("pipeline_splits", ())), str(saved.get("splits_from", ""))
    if not splits:
        splits, origin = choose_splits(model, resolved.record.name, layout, resolved.config)
    check_splits(splits, [layer.name for layer in model.layers], resolved.record.name)
    return splits, origin + _other_network(resolved, model)


def _other_network(resolved: Resolved, model: "KerasModel") -> str:
    """Returns words about a plan of a user's network that has changed since, in its weights or multiplications."""
    plan, shape = resolved.plan, tuple(model.inputs[0].shape[1:])
    is_of_plan = resolved.origins["pipeline_splits"].giver is Giver.PLAN
    if resolved.record.own is None or not isinstance(plan, PipelinePlan) or not is_of_plan:
        return ""
    from ipucnn.planning.graphs.keras_graph import graph_of

    layers = graph_of(model, resolved.record.name).layers
    here = sum(layer.num_parameters for layer in layers), sum(layer.macs for layer in layers)
    then = sum(stage.num_parameters for stage in plan.stages), sum(stage.macs for stage in plan.stages)
    # Of other images and classes `plan_differences` tells.
    if here == then or (tuple(plan.input_shape), plan.num_classes) != (shape, model.outputs[0].shape[-1]):
        return ""
    return (
        f", which was made for a network of {then[0]:,} weights and {then[1]:,} MACs, and this one has {here[0]:,} and "
        f"{here[1]:,}: what it predicts isn't this run"
    )


def _known_graph(resolved: Resolved) -> Optional[LayerGraph]:
    """Returns the network's layer graph if it needs no TensorFlow.  Its layers are the same at every input size."""
    from ipucnn.planning.graphs.extract import known_graph

    record = resolved.record
    options = network_options(record, resolved.config, record.input_shape, record.num_classes)
    return known_graph(record, options)


def check_named_splits(resolved: Resolved, layout: Layout) -> None:
    """Checks the names of given splits, or whether the planner can choose them, before TensorFlow is imported.

    If the layers differ from the shipped graph's (another norm), no name is known yet, and :func:`splits_of_run` checks
    the splits on the built network.

    Args:
        layout: the stages of the run.

    Raises:
        ConfigurationError: an unknown layer, or splits out of order; stages that share IPUs without splits.
    """
    from ipucnn.planning.program import check_searchable, planned_program

    splits = resolved.config.named_splits
    if not splits and layout.num_stages > 1:
        check_searchable(planned_program(resolved.config, layout))
    graph = _known_graph(resolved) if splits else None
    if graph is not None:
        check_splits(splits, [layer.name for layer in graph.layers], resolved.record.name)


def check_frozen(resolved: Resolved) -> Tuple[str, ...]:
    """Checks ``--freeze`` as far as possible without TensorFlow.

    Returns:
        The layers that it names, if the network's layer graph is known; else none.

    Raises:
        ConfigurationError: no layer has this name; or no layer would be left to train.
    """
    config = resolved.config
    if config.freeze is None:
        return ()
    graph = _known_graph(resolved)
    return () if graph is None else frozen_layers(graph, config.freeze)


def frozen_layers(graph: LayerGraph, named: str) -> Tuple[str, ...]:
    """Returns the layers of a graph that ``--freeze`` names, see :func:`ipucnn.models.build.layers_to_freeze`.

    Raises:
        ConfigurationError: as for ``layers_to_freeze``.
    """
    # The second half of a separable convolution is a layer only of the graph, with a slash in its name.
    names = [x.name for x in graph.layers if x.num_parameters and "/" not in x.name]
    return layers_to_freeze(named, names, graph.model)


def choose_splits(
    model: "KerasModel", name: str, program: Layout, config: RunConfig
) -> Tuple[Tuple[str, ...], str]:
    """Returns the planner's splits of a built model, and their origin.

    A run on the host does not need the memory of IPUs.  So if nothing fits there, the fastest splits are taken whatever
    they need.

    Raises:
        ConfigurationError: more stages than the model can be cut into.
    """
    from ipucnn.hardware import smallest_system
    from ipucnn.planning.graphs.keras_graph import graph_of
    from ipucnn.planning.program import ProgramVariants, planned_program
    from ipucnn.planning.search.planner import Planner

    # The machine of the run is unknown, so the splits are for the smallest system with enough IPUs.
    graph, system = graph_of(model, name), smallest_system(program.num_ipus)
    check_stages(program.num_stages, graph, "--ipus-per-replica")
    settings = planned_program(config, program)
    planner = Planner(graph, system)
    candidate = planner.fastest_program([ProgramVariants(settings)])
    origin = f"planned for {system.title}"
    if candidate is None:
        candidate = planner.fastest_splits(settings, float("1e9"))
        assert candidate is not None  # no splits need that much
        origin += ", whose memory they exceed"
    return candidate.splits, "; ".join([origin, *estimates(graph)])


def plan_differences(
    resolved: Resolved, program: Layout, input_shape: Tuple[int, ...], num_classes: int
) -> List[str]:
    """Returns messages about how a run differs from its plan; the run uses the plan's splits regardless."""
    plan = resolved.plan
    if not isinstance(plan, PipelinePlan):
        return []
    from ipucnn.planning.program import differences, planned_program

    config = resolved.config
    pairs = [
        ("input", "x".join(map(str, plan.input_shape)), "x".join(map(str, input_shape))),
        ("classes", plan.num_classes, num_classes),
    ]
    planned, of_run = layer_options(plan.options), layer_options(kept_options(config))
    pairs += [(key, planned.get(key), of_run.get(key)) for key in sorted({*planned, *of_run})]
    pairs.append(("freeze", plan.options.get("freeze"), config.freeze))
    differing = [f"{name} {of_plan} (here {of_run})" for name, of_plan, of_run in pairs if of_plan != of_run]
    differing += differences(plan.settings, planned_program(config, program))
    splits = config.named_splits
    if len(plan.splits) == len(splits) and plan.splits != splits:
        differing.append(f"splits {' '.join(plan.splits)} (here {' '.join(splits)})")
    lines = []
    if differing:
        lines.append("the plan was made for " + ", ".join(differing) + ": what it predicts isn't this run")
    if plan.verdict != "fits":
        lines.append(f"whether the plan fits on {plan.system.title}: {plan.verdict}")
    return lines
