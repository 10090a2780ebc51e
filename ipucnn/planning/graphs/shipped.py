"""Writes the package's files that are derived from the registered networks.  Run it after any change of a network:

    python -m ipucnn.planning.graphs.shipped

It derives the layer graph of each network at its default input and classes, the counts of parameters and
multiply-accumulates (``ipucnn.models.counts``), and the table of networks in docs/models.md.  It builds all networks if
any code of ``ipucnn.models`` or ``ipucnn.planning.graphs`` changed, which takes some minutes.
"""

import gzip
import hashlib
import json
import sys
from pathlib import Path

import ipucnn
from ipucnn.errors import MissingError
from ipucnn.models import counts
from ipucnn.models.registry import list_models
from ipucnn.planning.graphs import extract

DOCUMENT = Path(ipucnn.__file__).resolve().parents[1] / "docs" / "models.md"
BEGIN = "<!-- networks: begin (generated, see Adding a network) -->"
END = "<!-- networks: end -->"


def network_table() -> str:
    """Returns the table of networks in Markdown."""
    titles = (
        "network",
        "default data set",
        "input",
        "classes",
        "parameters",
        "MACs",
        "norm",
        "smallest input",
        "paper",
    )
    rows = [titles, tuple("---" for _ in titles)]
    all_counts = counts.registered_counts()
    for record in list_models():
        of_model = all_counts[record.name]
        rows.append(
            (
                f"`{record.name}`",
                record.home_dataset,
                "x".join(str(n) for n in record.input_shape),
                str(record.num_classes),
                f"{of_model.parameters:,}",
                f"{of_model.macs:,}",
                record.default_norm,
                str(record.min_size),
                record.paper,
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def insert_table(document: str) -> str:
    """Returns the document with the current table between its two markers."""
    before, begun, rest = document.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not begun or not ended:
        raise ValueError(f"the document has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{network_table()}\n\n{END}{after}"


def _write(path: Path, content: bytes) -> None:
    if not path.exists() or path.read_bytes() != content:
        path.write_bytes(content)
        print(f"{path.name}: written")


def main() -> int:
    """Updates all derived files; needs a Keras version with every network that changed."""
    graphs = {}
    try:
        for record in list_models():
            shipped = extract.read_shipped(record)
            graphs[record.name] = shipped or extract.build_graph(record, extract.home_options(record))
    except MissingError as error:
        print(f"{error.message}\nnothing was written", file=sys.stderr)
        return 1
    digests = {}
    for name, graph in graphs.items():
        text = graph.to_json().encode()
        digests[name] = hashlib.sha256(text).hexdigest()
        _write(extract.FOLDER / f"{name}.json.gz", gzip.compress(text, mtime=0))
    for path in extract.FOLDER.glob("*.json.gz"):
        if path.name[: -len(".json.gz")] not in graphs:
            path.unlink()
            print(f"{path.name}: removed, there is no such network")
    keys = json.dumps({"code": extract.code_key(), "graphs": digests}, indent=1, sort_keys=True)
    _write(extract.FOLDER / extract.KEYS, f"{keys}\n".encode())
    derived = {name: counts.Counts(graph.num_trainable, graph.total_macs) for name, graph in graphs.items()}
    _write(counts.FILE, counts.counts_text(derived).encode())
    counts.registered_counts.cache_clear()
    if DOCUMENT.exists():
        _write(DOCUMENT, insert_table(DOCUMENT.read_text(encoding="utf-8")).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
