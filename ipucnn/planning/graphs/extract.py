"""Layer graphs of registered models: shipped with the package, or cached, or built with TensorFlow."""

import contextlib
import hashlib
import json
import os
from importlib import metadata
from pathlib import Path
from typing import Optional

import ipucnn
from ipucnn.errors import UserError
from ipucnn.filesystem import expand, make_folder, read_text, write_text
from ipucnn.models.build import BuildOptions, build_model, check_options
from ipucnn.models.registry import ModelRecord
from ipucnn.planning.graphs.keras_graph import graph_of
from ipucnn.planning.graphs.layer_graph import SCHEMA_VERSION, LayerGraph
from ipucnn.planning.graphs.shipped import read_shipped

MOST_BYTES = 2**26
__all__ = ["build_graph", "cache_folder", "cache_path", "graph_key", "graph_of", "known_graph", "layer_graph"]


def layer_graph(record: ModelRecord, options: BuildOptions) -> LayerGraph:
    """The layer graph of a registered model: the shipped one, from the cache, or by building the model.

    Raises:
        ConfigurationError: an option the network can't have.
        MissingError: the installed Keras lacks the network.
    """
    graph = known_graph(record, options)
    if graph is None:
        graph = build_graph(record, options)
        _write_cached(record, options, graph)
    return graph


def known_graph(record: ModelRecord, options: BuildOptions) -> Optional[LayerGraph]:
    """The layer graph where it needs no TensorFlow: shipped or cached; None otherwise.

    Raises:
        ConfigurationError: an option the network can't have.
    """
    check_options(record, options)
    shipped = read_shipped(record, graph_key(record, options))
    return shipped if shipped is not None else _read_cached(record, options)


def build_graph(record: ModelRecord, options: BuildOptions) -> LayerGraph:
    """The layer graph of the network as built now.

    Raises:
        ConfigurationError: an option the network can't have.
        MissingError: the installed Keras lacks the network.
    """
    return graph_of(build_model(record, options), record.name)


def cache_path(record: ModelRecord, options: BuildOptions) -> Path:
    """The file that holds the graph once it was built."""
    versions = [ipucnn.__version__, _version("tensorflow"), _version("keras")]
    key = hashlib.sha256(json.dumps([versions, graph_key(record, options)]).encode()).hexdigest()[:24]
    return cache_folder() / f"{record.name}-{key}.json"


def cache_folder() -> Path:
    """Where graphs are cached: in IPUCNN_CACHE_DIR, or the user's cache folder (XDG_CACHE_HOME, ~/.cache)."""
    own = os.environ.get("IPUCNN_CACHE_DIR")
    if own:
        return Path(own) / "graphs"
    user = os.environ.get("XDG_CACHE_HOME")
    return (Path(user) if user else expand("~/.cache")) / "ipucnn" / "graphs"


def _version(package: str) -> Optional[str]:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def graph_key(record: ModelRecord, options: BuildOptions) -> str:
    """Digest of everything that the graph depends on but the versions of TensorFlow and Keras."""
    digest = hashlib.sha256()
    described = {
        "schema_version": SCHEMA_VERSION,
        "model": record.name,
        "norm": options.norm or record.default_norm,
        # Neither the weights' values nor the moving statistics' momentum nor epsilon are in the graph.
        **{
            name: getattr(options, name)
            for name in (
                "input_shape",
                "num_classes",
                "norm_groups",
                "norm_channels_per_group",
                "dropout",
                "base_filters",
            )
        },
    }
    digest.update(json.dumps(described, sort_keys=True).encode())
    package = Path(ipucnn.__file__).parent
    sources = [package / "planning" / "graphs" / name for name in ("layer_graph.py", "keras_graph.py")]
    for source in sorted([*sources, *(package / "models").rglob("*.py")]):
        digest.update(f"\0{source.relative_to(package).as_posix()}\0".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _read_cached(record: ModelRecord, options: BuildOptions) -> Optional[LayerGraph]:
    """The graph in a cache entry (a digest on the first line, then JSON); None if it is absent or damaged."""
    try:
        digest, _, text = read_text(cache_path(record, options), MOST_BYTES).partition("\n")
        if digest != hashlib.sha256(text.encode()).hexdigest():
            return None
        return LayerGraph.from_json(text)
    except (ValueError, UserError, RecursionError):
        return None


def _write_cached(record: ModelRecord, options: BuildOptions, graph: LayerGraph) -> None:
    """Writes a cache entry whole or not at all; a folder that can't be written means no cache."""
    text = graph.to_json()
    digest = hashlib.sha256(text.encode()).hexdigest()
    with contextlib.suppress(UserError):
        path = cache_path(record, options)
        make_folder(path.parent)
        write_text(path, f"{digest}\n{text}")
