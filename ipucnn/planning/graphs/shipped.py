"""Writes what is derived from the registered networks and comes with the package: after any change of a network, run

    python -m ipucnn.planning.graphs.shipped

Derived are the layer graph of each network at its home input and classes, the counts of parameters and
multiply-accumulates (``ipucnn.models.counts``), and the table of networks in docs/models.md.  A network is only built
where its code or its record changed since its graph was written; a graph that turns out to be the same only gets its
new key.
"""

import gzip
import hashlib
import json
import sys
import zlib
from pathlib import Path
from typing import Dict, Optional

import ipucnn
from ipucnn.errors import MissingError
from ipucnn.models import counts
from ipucnn.models.registry import ModelRecord, list_models
from ipucnn.planning.graphs import extract
from ipucnn.planning.graphs.layer_graph import LayerGraph

DOCUMENT = Path(ipucnn.__file__).resolve().parents[1] / "docs" / "models.md"
BEGIN = "<!-- networks: begin (generated, see Adding a network) -->"
END = "<!-- networks: end -->"


def write_graph(record: ModelRecord, keys: Dict[str, Dict[str, str]]) -> LayerGraph:
    """A network's graph, which is built and written if the shipped one is not of this code.

    Args:
        record: the network.
        keys: of all shipped graphs; changed where the network's is another one.

    Raises:
        MissingError: the installed Keras lacks the network.
    """
    options = extract.home_options(record)
    key = extract.graph_key(record, options)
    shipped = extract.read_shipped(record, key)
    if shipped is not None:
        return shipped
    graph = extract.build_graph(record, options)
    text = graph.to_json().encode()
    path = extract.shipped_path(record)
    keys[record.name] = {"key": key, "sha256": hashlib.sha256(text).hexdigest()}
    if _unpacked(path) == text:
        print(f"{record.name}: the graph is the same, its key is new")
    else:
        path.write_bytes(gzip.compress(text, mtime=0))
        print(f"{record.name}: the graph is new")
    return graph


def _unpacked(path: Path) -> Optional[bytes]:
    try:
        return gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error):
        return None


def network_table() -> str:
    """The table of networks in Markdown."""
    titles = (
        "network",
        "home data set",
        "input",
        "classes",
        "parameters",
        "MACs",
        "norm",
        "smallest input",
        "paper",
    )
    rows = [titles, tuple("---" for _ in titles)]
    found = counts.registered_counts()
    for record in list_models():
        own = found[record.name]
        rows.append(
            (
                f"`{record.name}`",
                record.home_dataset,
                "x".join(str(n) for n in record.input_shape),
                str(record.num_classes),
                f"{own.parameters:,}",
                f"{own.macs:,}",
                record.default_norm,
                str(record.min_size),
                record.paper,
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def insert_table(document: str) -> str:
    """The document with the current table between its two markers."""
    before, begun, rest = document.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not begun or not ended:
        raise ValueError(f"the document has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{network_table()}\n\n{END}{after}"


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
        print(f"{path.name}: written")


def main() -> int:
    """Brings all of it up to date; needs a Keras that has every network that changed."""
    records = list_models()
    names = {record.name for record in records}
    try:
        keys = {name: entry for name, entry in extract.shipped_keys().items() if name in names}
    except (OSError, ValueError):
        keys = {}
    derived = {}
    try:
        for record in records:
            graph = write_graph(record, keys)
            derived[record.name] = counts.Counts(graph.num_trainable, graph.total_macs)
    except MissingError as error:
        print(f"{error.message}\nnothing but graphs was written", file=sys.stderr)
        return 1
    finally:
        lines = [f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(keys.items())]
        _write(extract.FOLDER / extract.KEYS, "{\n" + ",\n".join(lines) + "\n}\n")
    for path in extract.FOLDER.glob("*.json.gz"):
        if path.name[: -len(".json.gz")] not in names:
            path.unlink()
            print(f"{path.name}: removed, there is no such network")
    _write(counts.FILE, counts.counts_text(derived))
    counts.registered_counts.cache_clear()
    if DOCUMENT.exists():
        _write(DOCUMENT, insert_table(DOCUMENT.read_text(encoding="utf-8")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
