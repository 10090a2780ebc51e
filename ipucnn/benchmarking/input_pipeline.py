"""Provides the images of a benchmark, and measures the input pipeline alone, part by part.

The parts are reading, decoding, augmenting and batching.  Each is measured with all those before it, by cutting off the
training pipeline after the part.  The cost of a part by itself is the difference to the one before.  (Reports and the
command line call the parts stages; in the code a stage is one of a network's pipeline over IPUs.)
"""

from __future__ import annotations

import time
from typing import Callable, List, Optional, Sequence, Tuple

from ipucnn.aliases import Tensor, TfDataset, TfIterator
from ipucnn.benchmarking.intervals import paired_difference, paired_share, throughput, times_of
from ipucnn.benchmarking.records import (
    EndToEnd,
    Execution,
    Feed,
    Interval,
    IpuPrediction,
    PipelineFigures,
    PipelinePartFigures,
    Throughput,
)
from ipucnn.benchmarking.rounds import Contender
from ipucnn.config.resolve import Resolved
from ipucnn.datasets.base import IN_MEMORY, DataSource
from ipucnn.datasets.limits import check_memory
from ipucnn.errors import InfeasibleError

METHOD = (
    "each stage is measured together with those before it, in turns; its own time per image is the difference to "
    "the one before, with all threads of the pipeline at work"
)
_WHAT_ARRAYS = {
    "read": "stored pixels gathered from memory, in the order of the epoch",
    "decode": "to floats of the network's size (the set is stored decoded)",
    "augment": "augmentation",
    "batch": "channels, range, labels, batches of {batch}",
}
_WHAT_FILES = {
    "read": "bytes of the encoded images, in the order of the epoch",
    "decode": "decoded, the centre resized to the network's size",
    "augment": "a random crop resized and mirrored instead of the centre",
    "batch": "channels, range, labels, batches of {batch}",
}
# Random images are limited to this size, but are at least ``_LEAST_IMAGES``: drawing them takes time.
_RANDOM_BYTES, _LEAST_IMAGES, _MOST_IMAGES = 32 * 2**20, 16, 1024
MakePart = Callable[[str], "TfDataset"]
"""name of a part -> infinite tf.data.Dataset up to it."""


def random_source(resolved: Resolved, seed: int, micro_batch_size: int) -> DataSource:
    """Returns a few random images for a network, as many as can be drawn quickly.

    Args:
        resolved: the configuration.
        seed: the seed of the pixels.

    Raises:
        ConfigurationError: an image size that the network does not accept.
        InfeasibleError: the images, or a micro-batch of them, do not fit into memory.
    """
    from ipucnn.datasets.sources.embedded import open_random
    from ipucnn.models.registry import validate_input_shape

    config, record = resolved.config, resolved.record
    shape: Tuple[int, int, int] = record.input_shape
    if config.image_size is not None:
        shape = (*config.image_size, record.input_shape[2])
        validate_input_shape(record, shape)
    num_values = shape[0] * shape[1] * shape[2]
    number = max(_LEAST_IMAGES, min(_MOST_IMAGES, _RANDOM_BYTES // num_values))
    what = f"a micro-batch of {micro_batch_size} random images of {'x'.join(map(str, shape))}"
    smaller = "use a smaller --image-size or --micro-batch-size"
    check_memory(4 * num_values * micro_batch_size, what, smaller, InfeasibleError)
    return open_random(*shape, record.num_classes, record.task, seed, num_train=number, num_eval=1)


def images_only(dataset: TfDataset) -> TfDataset:
    """Returns the images of a data set of (images, labels)."""
    import tensorflow as tf

    return dataset.map(tf.autograph.experimental.do_not_convert(lambda images, labels: images))


def part_names(augment: bool) -> List[str]:
    """Returns the parts of a pipeline with or without augmentation, in order."""
    return ["read", "decode", "augment", "batch"] if augment else ["read", "decode", "batch"]


class Drain:
    """Takes elements of data sets inside one TensorFlow function: no Python between elements."""

    def __init__(self) -> None:
        import tensorflow as tf

        def take(iterator: TfIterator, count: Tensor) -> Tensor:
            def body(i: Tensor, seen: Tensor) -> Tuple[Tensor, Tensor]:
                first = tf.nest.flatten(iterator.get_next())[0]
                # The sum depends on the element, so that the element is computed and not skipped.
                return i + 1, seen + tf.size(first, out_type=tf.int64)

            start = (tf.constant(0, tf.int64), tf.constant(0, tf.int64))
            return tf.while_loop(lambda i, _: i < count, body, start, parallel_iterations=1)[1]

        self._take = tf.function(take, autograph=False)

    def __call__(self, iterator: TfIterator, num_elements: int) -> None:
        """Takes ``num_elements`` elements, and returns when they were delivered."""
        import tensorflow as tf

        self._take(iterator, tf.constant(num_elements, tf.int64)).numpy()


class PipelinePart(Contender):
    """The pipeline up to a part; a unit is one sample.

    A pipeline prepares elements while nobody takes them.  These are taken before an execution, outside the timed part.
    After it, also outside the timed part, the pipeline gets the time to prepare new ones.  Then it is idle while others
    have their turn.

    Args:
        name: the name of the part.
        make: the function that makes the data set up to the part.
        buffered: the most elements that are ready or in progress.
    """

    samples_per_unit = 1

    def __init__(self, name: str, make: MakePart, buffered: int) -> None:
        self.name, self._buffered, self._drain = name, buffered, Drain()
        dataset = make(name)
        spec = dataset.element_spec
        images = spec[0] if isinstance(spec, tuple) else spec
        # Single files until the last part, batches otherwise.
        is_batch = name == "batch" or images.shape.rank == 4
        self.granule = int(images.shape[0]) if is_batch else 1
        self._iterator = iter(dataset)
        self._element_s = 0.0

    def prepare(self, num_units: int) -> None:
        """Takes the elements that are ready."""
        self._drain(self._iterator, self._buffered)

    def execute(self, num_units: int) -> None:
        """Takes ``num_units`` samples."""
        elements, started = num_units // self.granule, time.perf_counter()
        self._drain(self._iterator, elements)
        self._element_s = (time.perf_counter() - started) / elements

    def check(self) -> None:
        """Waits until the buffers are full again; taking elements has already raised any errors in the data."""
        time.sleep(self._buffered * self._element_s)


def pipeline_figures(
    source: DataSource,
    names: Sequence[str],
    executions: Sequence[Sequence[Execution]],
    predicted: Sequence[IpuPrediction],
    *,
    batch_size: int,
    num_parallel: Optional[int],
    seed: int,
) -> PipelineFigures:
    """Returns ``data_pipeline`` of a report.

    Args:
        source: the data set.
        names: the names of the measured parts.
        executions: the executions of each part, paired by round.
        predicted: the predicted columns.
        batch_size, num_parallel: the settings of the pipeline.
        seed: the seed of the bootstrap.
    """
    texts = _WHAT_ARRAYS if isinstance(source.train, IN_MEMORY) else _WHAT_FILES
    parts: List[PipelinePartFigures] = []
    for index, (name, rows) in enumerate(zip(names, executions)):
        times = times_of(rows)
        before = times_of(executions[index - 1]) if index else None
        parts.append(
            PipelinePartFigures(
                name=name,
                what=texts[name].format(batch=batch_size),
                images_per_s=throughput(times, seed),
                own_s_per_image=paired_difference(times, before, seed),
                executions=list(rows),
            )
        )
    feeds = []
    for prediction in predicted:
        if not parts or not prediction.images_per_s or not prediction.num_ipus:
            continue
        measured, each = parts[-1].images_per_s, prediction.images_per_s / prediction.num_ipus
        lower, upper = (None if bound is None else bound / each for bound in (measured.lower, measured.upper))
        feeds.append(
            Feed(
                system=prediction.system,
                precision=prediction.precision,
                images_per_s_per_ipu=each,
                num_ipus=Interval(measured.value / each, lower, upper),
            )
        )
    return PipelineFigures(
        method=METHOD, batch_size=batch_size, num_parallel=num_parallel, stages=parts, feeds=feeds
    )


END_TO_END_METHOD = (
    "1 - time per image on a constant batch / time per image on the data, in turns; what the pipeline costs is waiting "
    "for it and, on a CPU, the cores that it takes"
)


def data_share(executions: Sequence[Sequence[Execution]], seed: int) -> EndToEnd:
    """Returns ``end_to_end`` of a report, from executions on data, on a constant batch, and of the pipeline alone."""
    data, *others = map(times_of, executions)
    constant, pipeline = (
        Throughput(images_per_s=throughput(times, seed), executions=list(rows))
        for times, rows in zip(others, executions[1:])
    )
    return EndToEnd(
        method=END_TO_END_METHOD,
        data_share=paired_share(data, others[0], seed),
        constant_batch=constant,
        pipeline=pipeline,
    )
