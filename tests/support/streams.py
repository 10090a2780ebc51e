"""Samples of training streams, and the check that they are functions of seed, epoch and index alone."""

import numpy as np

from ipucnn.datasets.pipeline import Stream, train_batches
from ipucnn.datasets.pixels import InputRange

RAW = InputRange.of("raw", None, 3)


def take(source, count, *, batch_size=4, **options):
    """Returns the first ``count`` samples of a stream, as (images, labels)."""
    usual = {"samples_per_epoch": len(source.train), "input_shape": (8, 8, 3), "augment": True, "seed": 7}
    given = {**usual, "input_range": "standard", **options}
    if isinstance(given["input_range"], str):
        given["input_range"] = InputRange.of(given["input_range"], source.info, given["input_shape"][2])
    stream = Stream(batch_size=batch_size, **given)
    taken = train_batches(source, stream).take(-(-count // batch_size)).as_numpy_iterator()
    return tuple(np.concatenate(column)[:count] for column in zip(*taken))


def assert_same(one, two):
    for a, b in zip(one, two):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def check_pure(source, count, **options):
    """Checks that batch size, threads and start do not change a byte; returns the samples."""
    samples = take(source, count, batch_size=count, num_parallel=1, **options)
    assert len(samples[0]) == len(samples[1]) == count
    for batch_size, num_parallel in ((1, None), (7, 8)):
        assert_same(take(source, count, batch_size=batch_size, num_parallel=num_parallel, **options), samples)
    per_epoch = options.get("samples_per_epoch", len(source.train))
    for start in (3, per_epoch + 1):
        part = [column[start : start + 9] for column in samples]
        assert len(part[0])
        place = {"start_epoch": start // per_epoch, "start_sample": start % per_epoch}
        assert_same(take(source, len(part[0]), batch_size=3, **place, **options), part)
    return samples
