"""A stand-in for libpva: reports with the attributes that public repositories read, and no others.

Asked for anything else an object raises AttributeError, as pybind11's do.  Each rule says who reads what.
"""

import json
from types import SimpleNamespace
from typing import Any, Dict, List

# (object, attributes): where they are read.
READ = {
    # graphcore/examples tutorials/.../profile.py: report.poplarVersion.string, report.compilation.target.numTiles,
    # report.execution.steps, step.ipus[0].cycles, tile.memory.total.includingGaps.
    # graphcore/ipu_tensorflow_addons .../auto_pipeline/pva_utils.py: compilation.ipus[i].tiles, the four categories,
    # alwaysLiveBytes, total.excludingGaps, execution.runs[0].steps, step.program.type and name,
    # step.ipus[i].activeCycles.cyclesFrom / cyclesTo . min / max.
    # graphcore/popliner popliner.py: tile.memory.notAlwaysLiveBytes.
    # graphcore/ipu_tensorflow_addons .../auto_pipeline: tile.memory.overflowed.excludingGaps, target.numIPUs,
    # target.bytesPerTile.
    "report": {"poplarVersion", "compilation", "execution"},
    "target": {"numIPUs", "numReplicas", "numTiles", "bytesPerTile", "clockFrequency"},
    "memory": {"category", "total", "overflowed", "alwaysLiveBytes", "notAlwaysLiveBytes"},
}
CATEGORIES = (
    *("vertexCode", "vertexInstanceState", "internalExchangeCode", "globalExchangeCode", "hostExchangeCode"),
    *("controlCode", "constant"),
)


class Type:
    """An enumeration of pybind11's: it has a name."""

    def __init__(self, name: str) -> None:
        self.name = name


def _pick(kind: str, **attributes: Any) -> SimpleNamespace:
    assert set(attributes) == READ[kind]
    return SimpleNamespace(**attributes)


def _gaps(without: int, including: int) -> SimpleNamespace:
    return SimpleNamespace(excludingGaps=without, includingGaps=including)


def _tile(own: Dict[str, int], capacity: int) -> SimpleNamespace:
    category = SimpleNamespace(**{name: SimpleNamespace(total=own.get(name, 0)) for name in CATEGORIES})
    code = sum(own.get(name, 0) for name in CATEGORIES if name != "constant")
    always = code + own.get("data", 0)
    total = always + own.get("temporary", 0)
    over = max(0, total - capacity)
    return SimpleNamespace(
        memory=_pick(
            "memory",
            category=category,
            total=_gaps(total, total + own.get("gaps", 0)),
            overflowed=_gaps(over, over),
            alwaysLiveBytes=always,
            notAlwaysLiveBytes=own.get("temporary", 0),
        )
    )


def _step(name: str, kind: str, spans: List[List[int]]) -> SimpleNamespace:
    def on_ipu(begin: int, end: int) -> SimpleNamespace:
        active = SimpleNamespace(
            cyclesFrom=SimpleNamespace(min=begin, max=begin), cyclesTo=SimpleNamespace(min=end, max=end)
        )
        return SimpleNamespace(cycles=end - begin, activeCycles=active)

    return SimpleNamespace(
        program=SimpleNamespace(name=name, type=Type(kind)), ipus=[on_ipu(*span) for span in spans]
    )


def openReport(path: str, debug: str = "") -> SimpleNamespace:
    """The report that a JSON file describes: ``target``, ``tiles`` of each IPU, ``runs`` of [name, kind, spans]."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    if not text.startswith("{"):
        raise RuntimeError("file is not a database")
    told = json.loads(text)
    target = _pick("target", **told["target"])
    ipus = [
        SimpleNamespace(tiles=[_tile(tile, target.bytesPerTile) for tile in tiles]) for tiles in told["tiles"]
    ]
    runs = [SimpleNamespace(steps=[_step(*step) for step in steps]) for steps in told["runs"]]
    return _pick(
        "report",
        poplarVersion=SimpleNamespace(string="3.3.0 (b67b751185)"),
        compilation=SimpleNamespace(target=target, ipus=ipus),
        execution=SimpleNamespace(runs=runs),
    )
