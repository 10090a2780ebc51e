"""Speed-ups of a suite: of another result over this one, or of what is predicted of IPUs over what is measured here."""

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

from ipucnn.benchmarking.suites.result import DONE, TRAINED, SuiteResult, predicted_rate
from ipucnn.errors import DataError

# What two rows must have in common to be compared.
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
        totals: epoch time of the training rows that both have, by ``first_s`` and ``second_s``, and ``num_rows``.
    """

    points: Tuple[Point, ...]
    first: str
    second: str
    num_without: int
    totals: Dict[str, Any]


def speedups(result: SuiteResult, versus: Optional[SuiteResult] = None, source: str = "") -> Speedups:
    """The speed-ups of ``versus`` over the result, or without it those predicted of IPUs.

    Args:
        result: the first.
        versus: the second.
        source: its file, for messages.

    Raises:
        DataError: the two have no row in common.
    """
    done = [row for row in result.rows if row["status"] == DONE]
    pairs: List[Tuple[Dict[str, Any], float, Optional[int]]] = []
    if versus is not None:
        others = {_key(row): row for row in versus.rows if row["status"] == DONE}
        found = [(row, others[_key(row)]) for row in done if _key(row) in others]
        if done and not found:
            raise DataError(
                f"--versus {source}: no row of it is like one of this suite",
                "it needs the same networks, modes, batches and --image-size",
            )
        pairs = [(row, other["images_per_s"], None) for row, other in found]
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
    return Speedups(points, f"measured, {_devices(done)}", second, len(done) - len(pairs), totals)


def _key(row: Dict[str, Any]) -> Tuple[Any, ...]:
    return tuple(row[key] for key in _SAME)


def _devices(rows: List[Dict[str, Any]]) -> str:
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
