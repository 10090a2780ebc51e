"""Layer graphs of registered models, cached so that only the first call needs TensorFlow."""

import hashlib
import json
import os
from importlib import metadata
from pathlib import Path
from typing import Optional

import ipucnn
from ipucnn.errors import DataError
from ipucnn.models.build import BuildOptions, build_model, check_options
from ipucnn.models.registry import ModelRecord
from ipucnn.planning.graph import SCHEMA_VERSION, LayerGraph
from ipucnn.planning.keras_graph import graph_of

__all__ = ["cache_folder", "graph_of", "layer_graph"]


def layer_graph(record: ModelRecord, options: BuildOptions) -> LayerGraph:
    """The layer graph of a registered model, from the cache or by building the model.

    Raises:
        ConfigurationError: an option the network can't have.
        MissingError: the installed Keras lacks the network.
    """
    check_options(record, options)
    path = cache_folder() / f"{record.name}-{_key(record, options)}.json"
    cached = _read_cached(path)
    if cached is not None:
        return cached
    graph = graph_of(build_model(record, options), record.name)
    _write_cached(path, graph)
    return graph


def cache_folder() -> Path:
    """Where graphs are cached: in IPUCNN_CACHE_DIR, or the user's cache folder (XDG_CACHE_HOME, ~/.cache)."""
    own = os.environ.get("IPUCNN_CACHE_DIR")
    if own:
        return Path(own) / "graphs"
    user = os.environ.get("XDG_CACHE_HOME")
    return (Path(user) if user else Path.home() / ".cache") / "ipucnn" / "graphs"


def _version(package: str) -> Optional[str]:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _key(record: ModelRecord, options: BuildOptions) -> str:
    """Digest of everything that the graph depends on."""
    digest = hashlib.sha256()
    described = {
        "ipucnn": ipucnn.__version__,
        "schema_version": SCHEMA_VERSION,
        "keras": [_version("tensorflow"), _version("keras")],
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
    sources = [package / "planning" / name for name in ("graph.py", "keras_graph.py")]
    for source in sorted([*sources, *(package / "models").rglob("*.py")]):
        digest.update(f"\0{source.relative_to(package).as_posix()}\0".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def _read_cached(path: Path) -> Optional[LayerGraph]:
    """The graph in a cache entry (a digest on the first line, then JSON); None if it is absent or damaged."""
    try:
        digest, _, text = path.read_text(encoding="utf-8").partition("\n")
        if digest != hashlib.sha256(text.encode()).hexdigest():
            return None
        return LayerGraph.from_json(text)
    except (OSError, ValueError, DataError):
        return None


def _write_cached(path: Path, graph: LayerGraph) -> None:
    """Writes a cache entry whole or not at all; a folder that can't be written means no cache."""
    text = graph.to_json()
    digest = hashlib.sha256(text.encode()).hexdigest()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(f"{digest}\n{text}", encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        if temporary.exists():
            temporary.unlink()
