"""Splits as users name them: checks, and the splits of simple rules that plans are compared with."""

import bisect
from typing import Callable, Dict, List, Sequence, Tuple

from ipucnn.errors import ConfigurationError, did_you_mean
from ipucnn.planning.graphs.layer_graph import LayerGraph

__all__ = [
    "RULES",
    "check_cuts",
    "check_splits",
    "check_stages",
    "equal_blocks",
    "equal_layers",
    "equal_parameters",
]


def check_splits(splits: Sequence[str], layer_names: Sequence[str]) -> None:
    """Checks pipeline splits against a model's layers in the order in which they run.

    Args:
        splits: names of the layers that open a stage.
        layer_names: canonical names; the first is the input, which cannot open a later stage.

    Raises:
        ConfigurationError: an unknown layer, or splits out of order.
    """
    order = {name: i for i, name in enumerate(layer_names)}
    for split in splits:
        if order.get(split, 0) == 0:
            what = "is the input" if split in order else "is not a layer of the model"
            raise ConfigurationError(
                f"pipeline split '{split}' {what}",
                did_you_mean(split, layer_names[1:]) or "list the layers with: ipucnn models NAME --summary",
            )
    for before, after in zip(splits, splits[1:]):
        if order[before] >= order[after]:
            raise ConfigurationError(
                f"pipeline splits are out of order: '{after}' runs before '{before}'",
                "order them as they run: " + " ".join(sorted(set(splits), key=order.__getitem__)),
            )


def check_cuts(splits: Sequence[str], graph: LayerGraph) -> None:
    """``check_splits``, and that a stage may open at each of the layers.

    Raises:
        ConfigurationError: otherwise, with the nearest layers that may.
    """
    check_splits(splits, [layer.name for layer in graph.layers])
    legal = list(graph.cuts)
    for split in splits:
        cut = graph.index(split)
        place = bisect.bisect_left(legal, cut)
        if place < len(legal) and legal[place] == cut:
            continue
        near = [graph.layers[c].name for c in legal[max(0, place - 1) : place + 1]]
        reason = (
            "the first stage would be empty"
            if cut <= 1
            else "it shares weights with a layer of the stage before"
        )
        raise ConfigurationError(
            f"pipeline split '{split}' can't open a stage: {reason}",
            "use " + " or ".join(f"'{name}'" for name in near) if near else "the model can't be cut",
        )


def check_stages(num_stages: int, graph: LayerGraph) -> None:
    """Refuses more stages than the model can be cut into.

    Raises:
        ConfigurationError: naming how many are possible.
    """
    most = len(graph.cuts) + 1
    if num_stages > most:
        raise ConfigurationError(
            f"{num_stages} stages, but {graph.model} can be cut in {most - 1} places only",
            f"use at most {most} stages",
        )


def _names(graph: LayerGraph, wanted: Sequence[int]) -> Tuple[str, ...]:
    """Names of the layers at wanted positions, each moved to the next legal cut behind the one before it."""
    legal = list(graph.cuts)
    found: List[str] = []
    place = 0
    for number, position in enumerate(wanted):
        # Those still to come need a place each.
        last = len(legal) - (len(wanted) - number)
        place = min(max(place, bisect.bisect_left(legal, position)), last)
        found.append(graph.layers[legal[place]].name)
        place += 1
    return tuple(found)


def equal_parameters(graph: LayerGraph, num_stages: int) -> Tuple[str, ...]:
    """The same number of weights in each stage, as near as a walk over the weights in order comes.

    A stage opens at the layer whose weights take the running count past k/N of all: what Graphcore's public CNN
    application does where no splits are given.
    """
    check_stages(num_stages, graph)
    total, count = graph.num_parameters, 0
    wanted: List[int] = []
    for i, layer in enumerate(graph.layers):
        count += layer.num_parameters
        while len(wanted) < num_stages - 1 and layer.num_parameters:
            if count * num_stages <= total * (len(wanted) + 1):
                break
            wanted.append(i)
    wanted += [len(graph.layers)] * (num_stages - 1 - len(wanted))
    return _names(graph, wanted)


def equal_layers(graph: LayerGraph, num_stages: int) -> Tuple[str, ...]:
    """The same number of layers in each stage."""
    check_stages(num_stages, graph)
    count = len(graph.layers)
    return _names(graph, [round(k * count / num_stages) for k in range(1, num_stages)])


def _blocks(graph: LayerGraph) -> List[int]:
    """Cuts between blocks, the runs of layers within which the network branches.

    One tensor crosses them.  Layers outside of any block belong to the block behind them, those at the end to
    the last one; in a network without branches every layer with weights opens a block.
    """
    narrow = [cut for cut in graph.cuts if len(graph.crossing(cut)) == 1]
    ends = [*narrow[1:], len(graph.layers)]
    branches = [end - cut > 1 for cut, end in zip(narrow, ends)]
    if any(branches):
        # A cut stays where a block ends: everything up to the next branching belongs together.
        return [cut for cut, before in zip(narrow[1:], branches) if before]
    return [cut for cut in narrow if graph.layers[cut].num_parameters]


def equal_blocks(graph: LayerGraph, num_stages: int) -> Tuple[str, ...]:
    """The same number of blocks in each stage.

    Raises:
        ConfigurationError: the network has fewer blocks than stages.
    """
    check_stages(num_stages, graph)
    cuts = _blocks(graph)
    count = len(cuts) + 1
    if num_stages > count:
        raise ConfigurationError(
            f"equal-blocks: {graph.model} has {count} block(s) with one tensor between them, fewer than "
            f"{num_stages} stages",
            "use --compare equal-layers",
        )
    return tuple(graph.layers[cuts[round(k * count / num_stages) - 1]].name for k in range(1, num_stages))


RULES: Dict[str, Callable[[LayerGraph, int], Tuple[str, ...]]] = {
    "params": equal_parameters,
    "equal-layers": equal_layers,
    "equal-blocks": equal_blocks,
}
