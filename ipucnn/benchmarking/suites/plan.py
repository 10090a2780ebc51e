"""From a suite and a command line to rows whose configurations are resolved and validated, without TensorFlow.

:func:`plan_suite` settles what will run.  :func:`check_rows` then validates each row as it would be when it runs,
without drawing images.
"""

import fnmatch
import hashlib
import json
import random
import re
from dataclasses import asdict, dataclass, replace
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple, Union

from ipucnn.aliases import PlainValue
from ipucnn.benchmarking.settings import INFERENCE, KERAS, BenchmarkSettings, make_settings
from ipucnn.benchmarking.suites.file import FIT, RowSpec, Suite
from ipucnn.config.options import BY_KEY, SPECS
from ipucnn.config.request import RunRequest, is_wildcard, matching
from ipucnn.config.resolve import Resolved, convert_flags
from ipucnn.datasets.base import DataSource
from ipucnn.errors import ConfigurationError, InfeasibleError, UserError, did_you_mean
from ipucnn.models.registry import nearest_legal_sizes
from ipucnn.text import size_text

# Flags that are about the suite, not about its rows.
_OF_SUITE = ("run_dir", "overwrite", "model_name")
# Options that only say where things are; they change no figures.
_NOT_IDENTITY = (*_OF_SUITE, "dataset_path", "download", "resume")
# Options that do not change the work either: on which device it is done, and with which random numbers.
_NOT_WORK = (*_NOT_IDENTITY, "seed", "device", "on_demand", "select_ipu", "executable_cache")
# Settings of how executions are measured; in mode fit whole epochs are timed instead.
_OF_EXECUTIONS = ("executions", "min_time_s", "max_time_s", "compare_with")


@dataclass(frozen=True)
class PlannedRow:
    """One benchmark that will run.

    Attributes:
        id: unique in the suite, fit for a file name.
        name: as the suite calls it, or the network's.
        mode: inference, training or fit.
        engine: session or keras.
        resolved: the configuration.
        settings: of inference and training.
        notes: what differs from what was asked for.
    """

    id: str
    name: str
    mode: str
    engine: str
    resolved: Resolved
    settings: BenchmarkSettings
    notes: Tuple[str, ...] = ()

    def identity(self) -> Dict[str, Any]:
        """All that decides about the figures, as plain values."""
        config, settings = self.resolved.config, self.settings
        options = {
            spec.key: spec.yaml_value(getattr(config, spec.name))
            for spec in SPECS
            if spec.name not in _NOT_IDENTITY
        }
        choice = self.resolved.data
        return {
            "id": self.id,
            "model": self.resolved.record.name,
            "mode": self.mode,
            "engine": self.engine,
            "data": choice.name if choice is not None else None,
            "limits": asdict(settings.limits) if self.mode != FIT else None,
            "system": settings.system,
            "compare_with": settings.compare_with,
            "options": options,
        }

    def options(self) -> Dict[str, Any]:
        """The options about the work that differ from their defaults, as plain values by key."""
        config = self.resolved.config
        return {
            spec.key: spec.yaml_value(getattr(config, spec.name))
            for spec in SPECS
            if spec.name not in _NOT_WORK and getattr(config, spec.name) != spec.default
        }

    def work(self) -> str:
        """A hash of all that decides about the work: the same wherever, and for how long, a row is measured."""
        identity = self.identity()
        work = {key: identity[key] for key in ("model", "mode", "engine", "data")}
        left_out = {spec.key for spec in SPECS if spec.name in _NOT_WORK}
        work["options"] = {key: v for key, v in identity["options"].items() if key not in left_out}
        return hashlib.sha256(json.dumps(work, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class SuitePlan:
    """A suite whose rows are settled.

    Attributes:
        suite: as written.
        rows: what will run, in order.
        seed: of all rows, or of those that are not given one.
        notes: lines for the user.
    """

    suite: Suite
    rows: Tuple[PlannedRow, ...]
    seed: int
    notes: Tuple[str, ...] = ()


def plan_suite(
    suite: Suite,
    request: RunRequest,
    *,
    mode: Optional[str] = None,
    measuring: Optional[Mapping[str, PlainValue]] = None,
    only: Sequence[str] = (),
    seed: Optional[int] = None,
) -> SuitePlan:
    """Settles a suite's rows; the command line's options take the place of the file's.

    Args:
        suite: to run.
        request: what was typed.  Its MODEL, if any, keeps the rows of the networks that it matches.
        mode: inference or training, in place of the rows' own.
        measuring: arguments of ``make_settings`` that were typed.
        only: names or wildcards of rows to keep.
        seed: of rows that are not given one; None draws it.

    Raises:
        UserError: whatever is wrong with any row, with the row it is about.
    """
    convert_flags(request.flags)  # wrong whatever the row
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    rows: List[PlannedRow] = []
    seen: Set[str] = set()
    doubles = 0
    wanted = None if request.model is None or suite.source is None else _networks(request.model)
    for spec in suite.rows:
        for record in matching(spec.model):
            if wanted is not None and record.name not in wanted:
                continue
            try:
                row = _row(suite, spec, record.name, request, mode, measuring or {}, seed)
            except UserError as error:
                if suite.source is None:
                    error.message = f"{record.name}: {error.message}"
                else:
                    error.message = f"{spec.where} ({record.name}): {error.message}"
                raise
            key = repr({**row.identity(), "id": None, "name": spec.name})
            if key in seen:
                doubles += 1
                continue
            seen.add(key)
            rows.append(_unique(row, rows))
    rows = _only(rows, only)
    if not rows:
        raise ConfigurationError(
            f"the suite {suite.name} has no row of {request.model}", "leave MODEL out for all of its rows"
        )
    notes = [f"{doubles} rows that would be the same as another are left out"] if doubles else []
    notes += _ignored(rows, measuring or {})
    used = {row.resolved.config.seed for row in rows}
    common = used.pop() if len(used) == 1 else None
    return SuitePlan(suite, tuple(rows), seed if common is None else common, tuple(notes))


def _ignored(rows: Sequence[PlannedRow], measuring: Mapping[str, PlainValue]) -> List[str]:
    """Says which options that were typed have no effect on the rows of mode fit.

    Raises:
        ConfigurationError: all rows are of mode fit.
    """
    fits = [row for row in rows if row.mode == FIT]
    typed = [_flag(name) for name in _OF_EXECUTIONS if name in measuring]
    if not typed or not fits:
        return []
    flags = " and ".join(typed)
    if len(fits) == len(rows):
        raise ConfigurationError(
            f"{flags}: all rows are of mode fit, which trains for whole epochs and times these",
            f"drop {flags}; --num-epochs says how long",
        )
    count = f"{len(fits)} row{'s' if len(fits) > 1 else ''}"
    return [f"{flags}: without effect on the {count} of mode fit, which trains for whole epochs"]


def _flag(name: str) -> str:
    return "--" + (name[:-2] if name.endswith("_s") else name).replace("_", "-")


def _networks(model: str) -> Set[str]:
    return {record.name for record in matching(model)}


def _row(
    suite: Suite,
    spec: RowSpec,
    model: str,
    request: RunRequest,
    mode: Optional[str],
    measuring: Mapping[str, PlainValue],
    seed: int,
) -> PlannedRow:
    choices = [c for c in spec.for_each if c.key == "mode" or BY_KEY[c.key].name not in request.flags]
    in_file = next((c.value for c in choices if c.key == "mode"), spec.mode)
    settled = mode if mode is not None and in_file != FIT else in_file
    if spec.engine == KERAS and settled != FIT:
        raise ConfigurationError(
            f"engine keras is for mode fit, not for {settled}", "compare-with: keras measures both in turns"
        )
    options = dict(spec.options)
    options.update({BY_KEY[c.key].name: c.value for c in choices if c.key != "mode"})
    origin = f"suite {suite.name}"
    below = [(origin, dict(spec.defaults)), (origin, options)]
    resolved = request.resolve_as(model, below, drop=_OF_SUITE)
    notes: List[str] = []
    resolved = _legal_size(resolved, notes)
    if resolved.config.seed is None:
        resolved = replace(resolved, config=replace(resolved.config, seed=seed))
    settings = make_settings(training=settled != INFERENCE, **{**spec.measuring, **measuring})
    if settled == FIT:
        without = [_flag(name)[2:] for name in _OF_EXECUTIONS if name in spec.measuring]
        notes += [f"{name} has no effect in mode fit, which trains for whole epochs" for name in without]
    name = spec.name or model
    if spec.name and is_wildcard(spec.model):
        name = f"{spec.name} {model}"
    parts = [name] if spec.name else [model, settled]
    parts += [f"{c.key}-{c.text}" for c in choices if c.key != "mode"]
    if spec.name and any(c.key == "mode" for c in choices):
        parts.append(settled)
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(parts)).strip("-")
    return PlannedRow(slug, name, settled, spec.engine, resolved, settings, tuple(notes))


def _legal_size(resolved: Resolved, notes: List[str]) -> Resolved:
    """An image size that the network cannot take becomes the next one that it can, and the row says so."""
    size = resolved.config.image_size
    if size is None:
        return resolved
    height, width = (nearest_legal_sizes(resolved.record, n)[-1] for n in size)
    if (height, width) == tuple(size):
        return resolved
    notes.append(
        f"images of {height}x{width} instead of {size[0]}x{size[1]}: the next size that {resolved.record.name} takes"
    )
    return replace(resolved, config=replace(resolved.config, image_size=(height, width)))


def _unique(row: PlannedRow, rows: List[PlannedRow]) -> PlannedRow:
    taken = {other.id for other in rows}
    number, found = 2, row.id
    while found in taken:
        found, number = f"{row.id}-{number}", number + 1
    return replace(row, id=found)


def _only(rows: List[PlannedRow], patterns: Sequence[str]) -> List[PlannedRow]:
    """The rows whose name or id a pattern matches; every pattern must match one."""
    if not patterns:
        return rows
    kept: Set[str] = set()
    for pattern in patterns:
        found = {row.id for row in rows if pattern in (row.name, row.id)} or {
            row.id
            for row in rows
            if fnmatch.fnmatchcase(row.name, pattern) or fnmatch.fnmatchcase(row.id, pattern)
        }
        if not found:
            names = list(dict.fromkeys(row.name for row in rows))
            raise ConfigurationError(
                f"--rows {pattern}: the suite has no such row",
                did_you_mean(pattern, [*names, *(row.id for row in rows)])
                or f"its rows are called {', '.join(names[:12])}",
            )
        kept |= found
    return [row for row in rows if row.id in kept]


def check_rows(plan: SuitePlan) -> None:
    """Everything about each row that needs no TensorFlow: batches, shapes, losses, data.

    Raises:
        UserError: with the row it is about.
    """
    for row in plan.rows:
        try:
            _check(row)
        except UserError as error:
            error.message = f"row {row.id}: {error.message}"
            raise


def _check(row: PlannedRow) -> None:
    from ipucnn.benchmarking.benchmark import Benchmark
    from ipucnn.benchmarking.fit import Fit

    dry: Union[Benchmark, Fit]
    if row.mode == FIT:
        is_random = row.resolved.data is not None and row.resolved.data.is_noise
        source = _blank_source(row.resolved) if is_random else None
        dry = Fit(row.resolved, row.engine, system=row.settings.system, source=source)
    else:
        dry = Benchmark(row.resolved, row.settings, dry=True)
    _check_fits(dry.program.micro_batch_size, dry.setup.input_shape)


def _blank_source(resolved: Resolved) -> DataSource:
    """The random data set of a row, within its limits, without its pixels.

    Raises:
        ConfigurationError: an image size that the network cannot take.
    """
    from ipucnn.benchmarking.input_pipeline import generated_images
    from ipucnn.datasets.sources.embedded import open_blank

    config, (shape, classes) = resolved.config, generated_images(resolved)
    return open_blank(*shape, classes, resolved.record.task, config.limit_train, config.limit_eval)


def _check_fits(micro_batch_size: int, shape: Tuple[int, int, int]) -> None:
    """Refuses what surely fails: a micro-batch whose input alone is more than the machine's memory.

    Raises:
        InfeasibleError: it is.
    """
    from ipucnn.machine import host_memory_bytes

    height, width, channels = shape
    memory_bytes: Optional[int] = host_memory_bytes()
    needed_bytes = 4 * micro_batch_size * height * width * channels
    if memory_bytes and needed_bytes > memory_bytes:
        images = (
            f"{micro_batch_size} image{'s' if micro_batch_size > 1 else ''} of {height}x{width}x{channels}"
        )
        raise InfeasibleError(
            f"a micro-batch of {images} takes {size_text(needed_bytes)}, and the machine has {size_text(memory_bytes)}",
            "lower --image-size or --micro-batch-size",
        )
