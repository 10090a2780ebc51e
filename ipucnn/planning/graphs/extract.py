"""Provides the layer graphs of registered models: shipped with the package, cached, or built with TensorFlow.

The package contains a graph for each registered model at its default input and classes; ``python -m
ipucnn.planning.graphs.shipped`` writes them.  Shipped and cached graphs are used only with the code that made them.
"""

import functools
import gzip
import hashlib
import json
import zlib
from importlib import metadata
from pathlib import Path
from typing import Optional, Tuple

import ipucnn
from ipucnn.documents import MAX_RECORD_BYTES
from ipucnn.errors import DataError, InfeasibleError, UserError
from ipucnn.filesystem import cache_folder, read_text, shown, write_cached
from ipucnn.machine import host_memory_bytes
from ipucnn.models.build import BuildOptions, build_model, check_options
from ipucnn.models.registry import ModelRecord
from ipucnn.planning.graphs.layer_graph import LayerGraph
from ipucnn.text import quoted, shown_value, size_text

MOST_BYTES = 2**26
_MAX_NAME = 200
FOLDER = Path(ipucnn.__file__).parent / "planning" / "graphs"
KEYS = "keys.json"
"""The key of the code that made the shipped graphs, and the SHA-256 of each graph's JSON text."""


def layer_graph(record: ModelRecord, options: BuildOptions) -> LayerGraph:
    """Returns the layer graph of a registered model: shipped, from the cache, or by building the model.

    Raises:
        ConfigurationError: an option that the network does not support.
        MissingError: the installed Keras lacks the network.
    """
    graph = known_graph(record, options)
    if graph is None:
        graph = build_graph(record, options)
        if record.own is None:
            _write_graph(record, options, graph)
    return graph


def known_graph(record: ModelRecord, options: BuildOptions) -> Optional[LayerGraph]:
    """Returns the layer graph if it needs no TensorFlow, shipped or cached; None otherwise.

    Raises:
        ConfigurationError: an option that the network does not support.
    """
    check_options(record, options)
    if record.own is not None:
        return None  # a function's result depends on more than its file
    shipped = (
        read_shipped(record) if _shape(record, options) == _shape(record, home_options(record)) else None
    )
    return shipped if shipped is not None else _read_cached(record, options)


def check_weights_fit(record: ModelRecord, options: BuildOptions) -> None:
    """Refuses a network whose weights exceed the machine's memory, before the network is built.

    The number of weights is estimated from the shipped layer graph: the weights of the last layer grow with the number
    of classes, those of a layer that reads a flattened image with its area, and those of all layers with the square of
    the base filters.

    Raises:
        InfeasibleError: the weights exceed the memory; the message names both.
    """
    filters = (options.base_filters or 0) / record.builder_args.get("base_filters", 1)
    pixels, own_pixels = (shape[0] * shape[1] for shape in (options.input_shape, record.input_shape))
    if (
        options.num_classes <= 10 * max(record.num_classes, 1000)
        and filters <= 4
        and pixels <= 16 * own_pixels
    ):
        return
    graph = known_graph(record, BuildOptions(record.input_shape, record.num_classes))
    memory_bytes = host_memory_bytes()
    if graph is None or not memory_bytes:
        return
    flattened = {layer.name for layer in graph.layers if layer.op_class == "reshape"}
    last = [layer.name for layer in graph.layers if layer.num_parameters][-1]
    num_weights = 0.0
    for layer in graph.layers:
        grown = max(1.0, filters) ** 2
        if flattened & set(layer.inputs) and layer.op_class == "matmul":
            grown *= pixels / own_pixels
        if layer.name == last:
            grown *= options.num_classes / record.num_classes
        num_weights += grown * layer.num_parameters
    # Four bytes each, and the network exists twice: as Keras has it, and with the layers exchanged.
    needed_bytes = 8 * num_weights
    if needed_bytes > memory_bytes:
        height, width, channels = options.input_shape
        raise InfeasibleError(
            f"{record.name} for {options.num_classes} classes and images of {height}x{width}x{channels} has some "
            f"{num_weights:.2g} weights, which take {size_text(needed_bytes)} while it is made, and the machine "
            f"has {size_text(memory_bytes)}",
            "lower the classes, --image-size or --base-filters",
        )


def read_layer_graph(path: Path) -> LayerGraph:
    """Returns the layer graph in a JSON file; its ``model`` is the path.

    Raises:
        DataError: the file is absent, damaged, or of a network that cannot be planned.
    """
    name = shown(path)
    hint = f"docs/plan-a-pipeline.md has its fields; a new one: ipucnn plan-splits MODEL --save-graph {quoted(path)}"
    text = read_text(path, MAX_RECORD_BYTES, hint=hint)
    try:
        graph = LayerGraph.from_json(text, name)
    except DataError as error:
        message = error.message if name in error.message else f"{name}: {error.message}"
        raise DataError(message, hint) from None
    for layer in graph.layers:
        if not 0 < len(layer.name) <= _MAX_NAME or not layer.name.isprintable():
            raise DataError(
                f"{name}: layer '{shown_value(layer.name)}': names have 1 to {_MAX_NAME} visible characters",
                "rename it",
            )
    return graph


def build_graph(record: ModelRecord, options: BuildOptions) -> LayerGraph:
    """Builds the network with the current code and returns its layer graph.

    Raises:
        ConfigurationError: an option that the network does not support.
        MissingError: the installed Keras lacks the network.
    """
    from ipucnn.planning.graphs.keras_graph import graph_of

    return graph_of(build_model(record, options), record.name)


def home_options(record: ModelRecord) -> BuildOptions:
    """Returns the options for which a graph is shipped."""
    return BuildOptions(record.input_shape, record.num_classes)


def shipped_path(record: ModelRecord) -> Path:
    """Returns the file of a model's graph: JSON, packed with gzip."""
    return FOLDER / f"{record.name}.json.gz"


def read_shipped(record: ModelRecord) -> Optional[LayerGraph]:
    """Returns the shipped graph, if the present code made it.

    Returns None also for an absent or damaged file: the graph can be built.
    """
    try:
        keys = json.loads((FOLDER / KEYS).read_text(encoding="utf-8"))
        text = gzip.decompress(shipped_path(record).read_bytes())
        if keys["code"] != code_key() or keys["graphs"][record.name] != hashlib.sha256(text).hexdigest():
            return None
        return LayerGraph.from_json(text.decode("utf-8"))
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error, DataError):
        return None


@functools.lru_cache(maxsize=None)
def code_key() -> str:
    """Returns the SHA-256 of the code that determines a network's layer graph."""
    package = Path(ipucnn.__file__).parent
    digest = hashlib.sha256()
    for folder in ("models", "planning/graphs"):
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(package).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def cache_path(record: ModelRecord, options: BuildOptions) -> Optional[Path]:
    """Returns the file that holds the graph after it was built; None without a cache."""
    versions = [ipucnn.__version__, _version("tensorflow"), _version("keras")]
    key = hashlib.sha256(json.dumps([versions, code_key(), _shape(record, options)]).encode()).hexdigest()[
        :24
    ]
    cache = cache_folder("graphs")
    return None if cache is None else cache / f"{record.name}-{key}.json"


def _version(package: str) -> Optional[str]:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _shape(record: ModelRecord, options: BuildOptions) -> Tuple[object, ...]:
    """Returns the options that change the graph; weights' values, epsilon and momentum of norms are not part of it."""
    return (
        options.norm or record.default_norm,
        options.input_shape,
        options.num_classes,
        options.norm_groups,
        options.norm_channels_per_group,
        options.dropout,
        options.base_filters,
    )


def _read_cached(record: ModelRecord, options: BuildOptions) -> Optional[LayerGraph]:
    """Returns the graph in a cache entry (a digest on the first line, then JSON); None if it is absent or damaged."""
    path = cache_path(record, options)
    if path is None:
        return None
    try:
        digest, _, text = read_text(path, MOST_BYTES).partition("\n")
        if digest != hashlib.sha256(text.encode()).hexdigest():
            return None
        return LayerGraph.from_json(text)
    except (ValueError, UserError, RecursionError):
        return None


def _write_graph(record: ModelRecord, options: BuildOptions, graph: LayerGraph) -> None:
    text = graph.to_json()
    digest = hashlib.sha256(text.encode()).hexdigest()
    write_cached(cache_path(record, options), f"{digest}\n{text}")
