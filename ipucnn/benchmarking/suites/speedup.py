"""Speed-ups of a suite: of another result over this one, or of what is predicted of IPUs over what is measured here."""

from dataclasses import dataclass
from typing import Any, Callable, Dict, Hashable, List, Optional, Tuple

from ipucnn.benchmarking.suites.result import DONE, TRAINED, SuiteResult, option_text, predicted_rate

Row = Dict[str, Any]
# What two rows must have in common to be compared; what is not known before a row has run counts as the same.
_SAME = (
    "model",
    "mode",
    "engine",
    "micro_batch_size",
    "gradient_accumulation_count",
    "num_replicas",
    "num_stages",
    "image_height",
    "image_width",
    "image_channels",
)


@dataclass(frozen=True)
class Point:
    """One point of the figure.

    Attributes:
        id: of the row.
        label: network.
        training: which of the two panels.
        batch: micro-batch size.
        intensity: FLOP per parameter.
        speedup: of the second over the first.
        num_ipus: that the prediction is for; None where the second is measured.
    """

    id: str
    label: str
    training: bool
    batch: int
    intensity: float
    speedup: float
    num_ipus: Optional[int] = None


@dataclass(frozen=True)
class Speedups:
    """All points, and what they are of.

    Attributes:
        points: in the suite's order.
        first, second: what is compared, in words; ``speedup`` is of the second over the first.
        num_without: finished rows without a counterpart.
        differences: options in which rows of the same id differ, in words.
        totals: epoch time of the training rows that both have, by ``first_s`` and ``second_s``, and ``num_rows``.
    """

    points: Tuple[Point, ...]
    first: str
    second: str
    num_without: int
    totals: Dict[str, Any]
    differences: Tuple[str, ...] = ()


def speedups(result: SuiteResult, versus: Optional[SuiteResult] = None, source: str = "") -> Speedups:
    """The speed-ups of ``versus`` over the result, or without it those predicted of IPUs.

    Args:
        result: the first.
        versus: the second.
        source: its file, for messages.
    """
    done = [row for row in result.rows if row["status"] == DONE]
    pairs: List[Tuple[Row, float, Optional[int]]] = []
    differences: Tuple[str, ...] = ()
    if versus is not None:
        found = counterparts(done, versus)
        pairs = [(row, other["images_per_s"], None) for row, other in found]
        differences = _differences(found)
        second = f"{_devices([other for _, other in found])} ({source})"
    else:
        for row in done:
            rate = predicted_rate(row)
            if rate:
                pairs.append((row, rate, row["predicted"][0]["num_ipus"]))
        second = _predicted_name([row for row, _, _ in pairs])
    points = tuple(
        Point(
            row["id"],
            row["name"],
            row["mode"] in TRAINED,
            row["micro_batch_size"],
            row["flop_per_parameter"],
            rate / row["images_per_s"],
            ipus,
        )
        for row, rate, ipus in pairs
        if row["flop_per_parameter"]
    )
    timed = [
        (row["epoch_s"], row["images_per_s"] / rate) for row, rate, _ in pairs if row["epoch_s"] is not None
    ]
    totals = {
        "num_rows": len(timed),
        "first_s": sum(seconds for seconds, _ in timed) if timed else None,
        "second_s": sum(seconds * factor for seconds, factor in timed) if timed else None,
    }
    return Speedups(
        points, f"measured, {_devices(done)}", second, len(done) - len(pairs), totals, differences
    )


def counterparts(rows: List[Row], versus: SuiteResult) -> List[Tuple[Row, Row]]:
    """Each row with the one finished row of ``versus`` that it is compared with; rows without one are left out.

    First come rows of the same work, of the same id if there are several; what is left is paired by id alone.  A row
    with several that would do has none.
    """
    others = [row for row in versus.rows if row["status"] == DONE]
    pairs: Dict[str, Tuple[Row, Row]] = {}
    keys: Tuple[Callable[[Row], Hashable], ...] = (
        lambda row: (row["id"], row["work"]),
        lambda row: row["work"],
        lambda row: row["id"],
    )
    for key in keys:
        left = [row for row in rows if row["id"] not in pairs]
        taken = {other["id"] for _, other in pairs.values()}
        mine, theirs = (_by(key, some) for some in (left, [o for o in others if o["id"] not in taken]))
        for name, own in mine.items():
            matching = theirs.get(name, [])
            if len(own) == len(matching) == 1 and _alike(own[0], matching[0]):
                pairs[own[0]["id"]] = (own[0], matching[0])
    return [pairs[row["id"]] for row in rows if row["id"] in pairs]


def _by(key: Callable[[Row], Hashable], rows: List[Row]) -> Dict[Hashable, List[Row]]:
    groups: Dict[Hashable, List[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _alike(row: Row, other: Row) -> bool:
    return all(row[key] == other[key] for key in _SAME if None not in (row[key], other[key]))


def _differences(pairs: List[Tuple[Row, Row]]) -> Tuple[str, ...]:
    """For example "optimizer adam here, sgd there (4 rows)"."""
    counts: Dict[str, int] = {}
    for row, other in pairs:
        if row["work"] == other["work"]:
            continue
        texts = [
            (key, option_text(row, key), option_text(other, key))
            for key in dict.fromkeys((*row["options"], *other["options"]))
        ]
        texts.append(("data set", str(row["data_name"]), str(other["data_name"])))
        for key, here, there in texts:
            if here != there:
                text = f"{key} {here} here, {there} there"
                counts[text] = counts.get(text, 0) + 1
    return tuple(f"{text} ({n} row{'s' if n > 1 else ''})" for text, n in counts.items())


def _devices(rows: List[Row]) -> str:
    return " and ".join(dict.fromkeys(str(row["device"]) for row in rows))


def _predicted_name(rows: List[Dict[str, Any]]) -> str:
    """For example "predicted, 1 to 4 IPUs of m2000, 32.32"."""
    if not rows:
        return "predicted"
    columns = [row["predicted"][0] for row in rows]
    systems = " and ".join(dict.fromkeys(column["system"] for column in columns))
    precisions = " and ".join(dict.fromkeys(column["precision"] for column in columns))
    counts = [column["num_ipus"] for column in columns]
    low, high = min(counts), max(counts)
    ipus = ("1 IPU" if high == 1 else f"{high} IPUs") if low == high else f"{low} to {high} IPUs"
    return f"predicted, {ipus} of {systems}, {precisions}"
