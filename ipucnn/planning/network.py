"""Determines a configuration's network, for the planner and for runs: its input, and the options to build it."""

from typing import Any, Callable, Dict, Optional, Sequence, Tuple

from ipucnn.config.options import RunConfig
from ipucnn.config.parameters import method_of
from ipucnn.config.values import moves_once, norm_of
from ipucnn.models.build import BuildOptions, check_options
from ipucnn.models.registry import ModelRecord
from ipucnn.planning.graphs.extract import check_weights_fit, known_graph, layer_graph
from ipucnn.planning.graphs.layer_graph import LayerGraph

InputShape = Tuple[int, int, int]
"""(height, width, channels)."""


def input_shape_for(record: ModelRecord, image_shape: Sequence[Optional[int]]) -> InputShape:
    """Returns the input of a network without ``--image-size``: the data set's size, at least the network's smallest.

    Data sets of many sizes use the network's own size, as its default data set does.  For a user's own network, the
    data determine the dimensions that it leaves open, the channels too.
    """
    height, width = image_shape[0], image_shape[1]
    if record.own is not None:
        shape = zip(record.own.input_shape, image_shape, record.input_shape)
        height, width, channels = (fixed or given or usual for fixed, given, usual in shape)
        return int(height), int(width), int(channels)
    if height is None or width is None:
        return record.input_shape
    return max(height, record.min_size), max(width, record.min_size), record.input_shape[2]


def network_options(
    record: ModelRecord, config: RunConfig, input_shape: InputShape, num_classes: int, seed: int = 0
) -> BuildOptions:
    """Returns the ``BuildOptions`` of a configuration, for any input and classes.

    Raises:
        ConfigurationError: an option that the network does not support.
    """
    norm: Dict[str, Any] = dict(config.norm_layer)
    options = BuildOptions(
        input_shape=input_shape,
        num_classes=num_classes,
        norm=norm_of(norm),
        norm_momentum=float(norm.get("momentum", config.bn_momentum)),
        norm_epsilon=norm.get("epsilon", method_of("norm_layer", norm["name"]).defaults.get("epsilon")),
        norm_moves_once=moves_once(norm),
        norm_groups=norm.get("num_groups"),
        norm_channels_per_group=norm.get("channels_per_group"),
        dropout=config.dropout,
        base_filters=config.base_filters,
        seed=seed,
    )
    check_options(record, options)
    check_weights_fit(record, options)
    return options


def network_graph(
    record: ModelRecord, options: BuildOptions, before_build: Callable[[], object]
) -> LayerGraph:
    """Returns the layer graph of a registered network: shipped, from the cache, or by building the network.

    Args:
        before_build: called if the network has to be built: a command imports TensorFlow in its own way.

    Raises:
        ConfigurationError: an option that the network does not support.
    """
    graph = known_graph(record, options)
    if graph is None:
        before_build()
        graph = layer_graph(record, options)
    return graph
