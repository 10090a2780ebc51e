"""The layer graphs that come with the package: each registered model's, at its home input and classes.

``python -m ipucnn.planning.graphs.shipped`` builds and writes them again, which any change of the models' sources asks
for: a graph whose sources changed is not used.
"""

import gzip
import sys
from pathlib import Path
from typing import Optional

from ipucnn.errors import DataError, MissingError
from ipucnn.models.build import BuildOptions
from ipucnn.models.registry import ModelRecord, list_models
from ipucnn.planning.graphs.layer_graph import LayerGraph

FOLDER = Path(__file__).parent


def home_options(record: ModelRecord) -> BuildOptions:
    """The options a graph is shipped for."""
    return BuildOptions(record.input_shape, record.num_classes)


def shipped_path(record: ModelRecord) -> Path:
    """The file of a model's graph: gzip of a line with its key, then JSON."""
    return FOLDER / f"{record.name}.json.gz"


def read_shipped(record: ModelRecord, key: str) -> Optional[LayerGraph]:
    """The shipped graph, if it is the one that ``key`` (of ``extract.graph_key``) stands for.

    None too where the file is absent or damaged: the graph can be built.
    """
    try:
        own, _, text = gzip.decompress(shipped_path(record).read_bytes()).decode("utf-8").partition("\n")
        return LayerGraph.from_json(text) if own == key else None
    except (OSError, EOFError, ValueError, DataError):
        return None


def write_shipped(record: ModelRecord) -> Path:
    """Builds a model and writes its graph.

    Raises:
        MissingError: the installed Keras lacks the network.
    """
    from ipucnn.planning.graphs.extract import build_graph, graph_key

    options = home_options(record)
    text = build_graph(record, options).to_json()
    packed = gzip.compress(f"{graph_key(record, options)}\n{text}".encode(), mtime=0)
    path = shipped_path(record)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(packed)
    return path


def main() -> int:
    """Writes every model's graph; needs a Keras that has them all."""
    for record in list_models():
        try:
            print(write_shipped(record).name)
        except MissingError as error:
            print(f"{record.name}: {error.message}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
