"""What a suite came to: one flat row per benchmark, the sum of epoch times, as ``suite.json`` and ``suite.csv``.

Two results give speed-ups: of another suite's rows over this one's, or of what is predicted of IPUs over what is
measured here.
"""

import csv
import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Hashable, List, Mapping, Optional, Tuple

from msgspec import structs

from ipucnn.aliases import PlainValue
from ipucnn.benchmarking.records import Row, RowPrediction, SuiteResult, Totals, from_plain
from ipucnn.benchmarking.suites.plan import PlannedRow
from ipucnn.documents import read_record
from ipucnn.errors import DataError
from ipucnn.filesystem import is_folder

PENDING, DONE, FAILED = "pending", "done", "failed"
TRAINED = ("training", "fit")
# Columns of the CSV beside a row's predictions, which are columns of their own, and its options and notes.
_COLUMNS = [name for name in Row.__struct_fields__ if name not in ("options", "predicted", "notes")]


def pending_row(row: PlannedRow) -> Row:
    """A row that has not run yet."""
    config = row.resolved.config
    training = row.mode != "inference"
    # The image size is known before, where it is given.
    height, width = config.image_size or (None, None)
    return Row(
        id=row.id,
        name=row.name,
        model=row.resolved.record.name,
        mode=row.mode,
        engine=row.engine,
        micro_batch_size=config.micro_batch_size,
        gradient_accumulation_count=config.gradient_accumulation_count if training else None,
        num_replicas=config.num_replicas,
        status=PENDING,
        work=row.work(),
        image_height=height,
        image_width=width,
        options=row.options(),
        notes=list(row.notes),
    )


def finished_row(
    row: PlannedRow, answer: Mapping[str, PlainValue], wall_s: float, epoch_images: Optional[int] = None
) -> Row:
    """A row that has run, from the answer of its process.

    Args:
        row: that was run.
        answer: of ``RowProcess``.
        wall_s: that it took, with the start of its process.
        epoch_images: training images of the epoch whose time is wanted.
    """
    result = structs.replace(pending_row(row), wall_s=wall_s, exit_code=answer["exit_code"])
    report = answer.get("report")
    if report is None or report["void"] is not None:
        hint = (answer if report is None else report).get("hint")
        reason = answer["error"] if report is None else report["void"]
        result = structs.replace(result, status=FAILED, error=reason, exit_code=answer["exit_code"] or 1)
        result.notes += [hint] if hint else []
        if report is None:
            return result
    else:
        result.status = DONE
    height, width, channels = report["input_shape"]
    program = report["program"]
    result = structs.replace(
        result,
        device=report["device"]["name"],
        tensorflow=report["environment"].get("tensorflow"),
        image_height=height,
        image_width=width,
        image_channels=channels,
        data_kind=report["data"]["kind"],
        data_name=report["data"]["name"],
        micro_batch_size=program["micro_batch_size"],
        num_replicas=program["num_replicas"],
        num_stages=program["num_stages"],
        global_batch_size=program["global_batch_size"] if row.mode in TRAINED else None,
        gradient_accumulation_count=(program["gradient_accumulation_count"] if row.mode in TRAINED else None),
        accuracy=report.get("accuracy"),
        loss=report.get("loss"),
        steady=(report.get("warmup") or {}).get("steady"),
        predicted=[
            RowPrediction(**{key: p[key] for key in RowPrediction.__struct_fields__})
            for p in report["predicted"]
        ],
    )
    result.notes += report["notes"]
    compilation, measured = report["compilation"], report["measured"]
    if compilation is not None:
        macs, parameters = compilation["macs_per_sample"], compilation["num_trainable_parameters"]
        result = structs.replace(
            result,
            compile_s=compilation.get("compile_s"),
            num_trainable_parameters=parameters,
            macs_per_image=macs,
            flop_per_parameter=intensity(macs, program["micro_batch_size"], parameters),
        )
    if measured is not None and result.status == DONE:
        speed = measured["images_per_s"]
        result = structs.replace(
            result,
            images_per_s=speed["value"],
            images_per_s_lower=speed["lower"],
            images_per_s_upper=speed["upper"],
            **{
                key: measured[key]
                for key in (
                    "step_s",
                    "num_executions",
                    "flop_per_image",
                    "flop_per_s",
                    "share_of_matmul_peak",
                    "peak_memory_bytes",
                )
            },
        )
        if epoch_images is not None and row.mode in TRAINED:
            result.epoch_s = epoch_s(epoch_images, program["global_batch_size"], speed["value"])
    if report.get("comparison") is not None:
        result.ratio_to_keras = report["comparison"]["ratio"]["value"]
    return result


def intensity(macs: int, batch: int, parameters: int) -> Optional[float]:
    """FLOP per parameter: of the forward pass of one micro-batch, which reads each parameter once."""
    return 2.0 * macs * batch / parameters if parameters else None


def epoch_s(images: int, batch: int, images_per_s: float) -> float:
    """Time of the whole batches of an epoch at a rate; what is left over is not trained on."""
    return images // batch * batch / images_per_s


def totals(rows: List[Row], epoch_images: Optional[int]) -> Totals:
    """``measured_s`` of one epoch of each training row, one after the other, and what is predicted of the same.

    ``predicted_s`` is of the rows' configured precision and None unless every measured row has a prediction.
    """
    wanted = [row for row in rows if row.mode in TRAINED] if epoch_images else []
    timed = [row for row in wanted if row.epoch_s is not None]
    predicted = [predicted_rate(row) for row in timed]
    images = [epoch_images // row.global_batch_size * row.global_batch_size for row in timed]  # type: ignore[operator]
    known = [(n, rate) for n, rate in zip(images, predicted) if rate]
    return Totals(
        epoch_images=epoch_images,
        num_rows=len(wanted),
        num_measured=len(timed),
        measured_s=math.fsum(row.epoch_s or 0.0 for row in timed) if timed else None,
        num_predicted=len(known),
        predicted_s=math.fsum(n / rate for n, rate in known) if known and len(known) == len(timed) else None,
    )


def predicted_rate(row: Row) -> Optional[float]:
    """Predicted images/s of a row at its configured precision; None where there is none."""
    return row.predicted[0].images_per_s if row.predicted else None


def option_text(row: Row, key: str) -> str:
    """The value of a row's option, in few characters; an option that the row does not have is at its default."""
    from ipucnn.config.options import BY_KEY

    if key in row.options:
        return _plain(row.options[key])
    return _plain(BY_KEY[key].yaml_value(BY_KEY[key].default)) if key in BY_KEY else "default"


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={_plain(item)}" for key, item in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return " ".join(map(_plain, value)) or "none"
    return "none" if value is None else str(value)


def to_csv(rows: List[Row]) -> str:
    """CSV of rows: the configured precision's prediction is ``predicted_...``, 16.16's ``predicted_16_16_...``."""
    own_keys = RowPrediction.__struct_fields__
    half_keys = [key for key in own_keys if key != "precision"]
    columns = [f"predicted_{key}" for key in own_keys] + [f"predicted_16_16_{key}" for key in half_keys]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_COLUMNS, *columns, "notes"])
    for row in rows:
        by_precision = {p.precision: p for p in row.predicted}
        own, half = row.predicted[0] if row.predicted else None, by_precision.get("16.16")
        values = [getattr(row, key) for key in _COLUMNS]
        values += [getattr(own, key, None) for key in own_keys] + [
            getattr(half, key, None) for key in half_keys
        ]
        writer.writerow(["" if value is None else value for value in (*values, "; ".join(row.notes))])
    return text.getvalue()


def read_suite(path: Path, option: str = "--versus") -> SuiteResult:
    """A ``suite.json``, or the one in a folder.

    Raises:
        DataError: not there, damaged, or of another kind or version.
    """
    path = path / "suite.json" if is_folder(path, option) else path
    hint = "give the suite.json that `ipucnn benchmark --suite` wrote, or its folder"
    result = from_plain(read_record(path, option, hint), SuiteResult, f"{option} {path}", hint)
    damage = None
    if len({row.id for row in result.rows}) < len(result.rows):
        damage = "two rows of one id"
    elif any(row.status == DONE and row.images_per_s is None for row in result.rows):
        damage = "a row that is done has no images_per_s"
    if damage is not None:
        raise DataError(f"{option} {path} is damaged: {damage}", "make it again")
    return result


# Two rows are compared only where these are equal.  What is not known before a row has run is taken to be equal.
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
    done = [row for row in result.rows if row.status == DONE]
    pairs: List[Tuple[Row, float, Optional[int]]] = []
    differences: Tuple[str, ...] = ()
    if versus is not None:
        found = counterparts(done, versus)
        pairs = [(row, other.rate, None) for row, other in found]
        differences = _differences(found)
        second = f"{_devices([other for _, other in found])} ({source})"
    else:
        for row in done:
            rate = predicted_rate(row)
            if rate:
                pairs.append((row, rate, row.predicted[0].num_ipus))
        second = _predicted_name([row for row, _, _ in pairs])
    points = tuple(
        Point(
            row.id,
            row.name,
            row.mode in TRAINED,
            row.micro_batch_size,
            row.flop_per_parameter,
            rate / row.rate,
            ipus,
        )
        for row, rate, ipus in pairs
        if row.flop_per_parameter
    )
    timed = [(row.epoch_s, row.rate / rate) for row, rate, _ in pairs if row.epoch_s is not None]
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
    others = [row for row in versus.rows if row.status == DONE]
    pairs: Dict[str, Tuple[Row, Row]] = {}
    keys: Tuple[Callable[[Row], Hashable], ...] = (
        lambda row: (row.id, row.work),
        lambda row: row.work,
        lambda row: row.id,
    )
    for key in keys:
        left = [row for row in rows if row.id not in pairs]
        taken = {other.id for _, other in pairs.values()}
        mine, theirs = (_by(key, some) for some in (left, [o for o in others if o.id not in taken]))
        for name, own in mine.items():
            matching = theirs.get(name, [])
            if len(own) == len(matching) == 1 and _alike(own[0], matching[0]):
                pairs[own[0].id] = (own[0], matching[0])
    return [pairs[row.id] for row in rows if row.id in pairs]


def _by(key: Callable[[Row], Hashable], rows: List[Row]) -> Dict[Hashable, List[Row]]:
    groups: Dict[Hashable, List[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _alike(row: Row, other: Row) -> bool:
    return all(
        getattr(row, key) == getattr(other, key)
        for key in _SAME
        if None not in (getattr(row, key), getattr(other, key))
    )


def _differences(pairs: List[Tuple[Row, Row]]) -> Tuple[str, ...]:
    """For example "optimizer adam here, sgd there (4 rows)"."""
    counts: Dict[str, int] = {}
    for row, other in pairs:
        if row.work == other.work:
            continue
        texts = [
            (key, option_text(row, key), option_text(other, key))
            for key in dict.fromkeys((*row.options, *other.options))
        ]
        texts.append(("data set", str(row.data_name), str(other.data_name)))
        for key, here, there in texts:
            if here != there:
                text = f"{key} {here} here, {there} there"
                counts[text] = counts.get(text, 0) + 1
    return tuple(f"{text} ({n} row{'s' if n > 1 else ''})" for text, n in counts.items())


def _devices(rows: List[Row]) -> str:
    return " and ".join(dict.fromkeys(str(row.device) for row in rows))


def _predicted_name(rows: List[Row]) -> str:
    """For example "predicted, 1 to 4 IPUs of m2000, 32.32"."""
    if not rows:
        return "predicted"
    columns = [row.predicted[0] for row in rows]
    systems = " and ".join(dict.fromkeys(column.system for column in columns))
    precisions = " and ".join(dict.fromkeys(column.precision for column in columns))
    counts = [column.num_ipus or 0 for column in columns]
    low, high = min(counts), max(counts)
    ipus = ("1 IPU" if high == 1 else f"{high} IPUs") if low == high else f"{low} to {high} IPUs"
    return f"predicted, {ipus} of {systems}, {precisions}"
