"""What goes wrong while a benchmark runs makes its report void."""

import contextlib
import re
import traceback
from typing import Iterator

from ipucnn import interrupts
from ipucnn.benchmarking.report import BenchmarkReport
from ipucnn.errors import EXIT_BUG, EXIT_INFEASIBLE, UserError


def _without_nodes(text: str) -> str:
    """The line of a TensorFlow message that says what could not be allocated, without names of graph nodes."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    line = next((line for line in lines if re.search("OOM|allocat", line)), lines[0])
    line = re.sub(r"\{\{[^{}]*\}\}|\[\[.*?\]\]|\[Op:[^\]]*\]", "", line)
    line = re.sub(r" on /job:\S+ by allocator \S+", "", line)
    return " ".join(line.split())


@contextlib.contextmanager
def void_on_error(result: BenchmarkReport) -> Iterator[None]:
    """Turns whatever goes wrong from here on into a void report."""
    import tensorflow as tf

    try:
        yield
    except UserError as error:
        result.void, result.exit_code = error.message, error.exit_code
        # Sessions speak of the checkpoints of a training run, which a benchmark does not write.
        result.hint = error.hint.split("; checkpoints")[0] if error.hint else None
    except (tf.errors.ResourceExhaustedError, MemoryError) as error:
        what = _without_nodes(str(getattr(error, "message", error)))
        result.void, result.exit_code = f"out of memory: {what}", EXIT_INFEASIBLE
        result.hint = "use a smaller --micro-batch-size or --image-size, or --fused-micro-batches 1"
    except Exception as error:
        # What a library made of an interruption says nothing about the benchmark.
        interrupts.check()
        text = str(error.message if isinstance(error, tf.errors.OpError) else error)
        lines = [line for line in text.splitlines() if line.strip()] or ["no message"]
        result.void, result.exit_code = f"{type(error).__name__}: {lines[0].strip()}", EXIT_BUG
        result.traceback = traceback.format_exc()
    if result.void is not None:
        result.measured = result.comparison = result.regression = None
        result.data_pipeline = result.end_to_end = None
