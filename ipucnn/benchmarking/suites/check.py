"""Validates the rows of a suite as each would be when it runs, without TensorFlow and without drawing images."""

from typing import Any, Optional, Tuple, Union

from ipucnn.benchmarking.benchmark import Benchmark
from ipucnn.benchmarking.suites.file import FIT
from ipucnn.benchmarking.fit import Fit
from ipucnn.benchmarking.suites.plan import PlannedRow, SuitePlan
from ipucnn.config.resolve import Resolved
from ipucnn.errors import InfeasibleError, UserError


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
    dry: Union[Benchmark, Fit]
    if row.mode == FIT:
        is_random = row.resolved.choice is not None and row.resolved.choice.name == "random"
        source = blank_source(row.resolved) if is_random else None
        dry = Fit(row.resolved, row.engine, system=row.settings.system, source=source)
    else:
        dry = Benchmark(row.resolved, row.settings, dry=True)
    _check_fits(dry.program.micro_batch_size, dry.setup.input_shape)


def blank_source(
    resolved: Resolved, limit_train: Optional[str] = None, limit_eval: Optional[str] = None
) -> Any:
    """The random data set of a row without its pixels; a benchmark has no limits.

    Raises:
        ConfigurationError: an image size that the network cannot take.
    """
    from ipucnn.datasets.random_data import open_blank
    from ipucnn.models.shapes import validate_input_shape

    config, record = resolved.config, resolved.record
    shape: Tuple[int, int, int] = record.input_shape
    if config.image_size is not None:
        shape = (*config.image_size, record.input_shape[2])
        validate_input_shape(record, shape)
    classes = record.num_classes or (2 if record.task == "segmentation" else 10)
    return open_blank(*shape, classes, record.task, config.limit_train, config.limit_eval)


def _check_fits(micro_batch_size: int, shape: Any) -> None:
    """Refuses what surely fails: a micro-batch whose input alone is more than the machine's memory.

    Raises:
        InfeasibleError: it is.
    """
    from ipucnn.sessions.session import host_memory_bytes

    height, width, channels = shape
    memory_bytes: Optional[int] = host_memory_bytes()
    needed_bytes = 4 * micro_batch_size * height * width * channels
    if memory_bytes and needed_bytes > memory_bytes:
        images = (
            f"{micro_batch_size} image{'s' if micro_batch_size > 1 else ''} of {height}x{width}x{channels}"
        )
        raise InfeasibleError(
            f"a micro-batch of {images} takes {needed_bytes / 2**30:.4g} GiB, and the machine has "
            f"{memory_bytes / 2**30:.4g} GiB",
            "lower --image-size or --micro-batch-size",
        )
