"""Compares our input pipeline with plain tf.data: processor time of an image of ImageNet's records at the same crops.

Usage: python benchmarks/input_pipeline.py (--records DIR | --folder DIR | --classes DIR | --pairs DIR)
           [--images 140] [--rounds 7] [--size 224] [--csv FILE] [--again]

Both read the same TFRecord files, crop boxes of the same distribution (5 to 100 % of the area, aspect 0.75 to 1.33),
resize them to 224 x 224, mirror half of them and deliver float32 batches.  Plain tf.data is: TFRecordDataset,
parse_example, sample_distorted_bounding_box, decode_jpeg, slice, image.resize.  ``--folder`` builds records of class
folders first.  ``--classes`` reads class folders as they are, and ``--pairs`` opens a folder of images and masks in
each turn.  Both time our pipeline alone, to compare two revisions of it by the rows of ``--csv``.

The two take turns.  Each turn is timed by the processor time of this process, which other programs hardly change; the
ratio is that of the medians.  Ours also verifies the checksum of each record, as tf.data does.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

from measuring import Journal, Provenance, add_again, write_rows

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

BATCH = 20


def ours(source: Any, size: int) -> Any:
    """Yields batches of our pipeline without end."""
    from ipucnn.datasets.pipeline import Stream, train_batches
    from ipucnn.datasets.pixels import InputRange

    return train_batches(
        source,
        Stream(
            batch_size=BATCH,
            samples_per_epoch=len(source.train),
            input_shape=(size, size, 3),
            input_range=InputRange.of("raw", source.info, 3),
            augment=True,
            seed=1,
            num_parallel=2,
        ),
    )


def plain(paths: List[str], size: int) -> Any:
    """Yields batches of a tutorial's tf.data pipeline without end."""
    import tensorflow as tf

    features = {
        "image/encoded": tf.io.FixedLenFeature([], tf.string),
        "image/class/label": tf.io.FixedLenFeature([], tf.int64),
    }

    def prepare(record: Any) -> Any:
        example = tf.io.parse_single_example(record, features)
        data = example["image/encoded"]
        begin, extent, _ = tf.image.sample_distorted_bounding_box(
            tf.image.extract_jpeg_shape(data),
            tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
            min_object_covered=0.0,
            aspect_ratio_range=(0.75, 1.33),
            area_range=(0.05, 1.0),
            max_attempts=100,
        )
        image = tf.slice(tf.image.decode_jpeg(data, channels=3), begin, extent)
        image = tf.image.random_flip_left_right(tf.image.resize(image, (size, size)))
        image.set_shape((size, size, 3))
        return image, tf.cast(example["image/class/label"], tf.int32) - 1

    records = tf.data.TFRecordDataset(paths).shuffle(1000).repeat()
    return records.map(prepare, num_parallel_calls=2).batch(BATCH).prefetch(4)


def settle() -> None:
    """Waits until the prefetch buffers are full, so that they hold as much after a turn as before it."""
    before = time.process_time()
    while True:
        time.sleep(0.3)
        now = time.process_time()
        if now - before < 0.003:
            return
        before = now


def measure(
    source: Any, num_images: int, rounds: int, size: int, with_plain: bool = True
) -> Dict[str, List[float]]:
    """Returns milliseconds of processor time per image, for each turn of our pipeline, and of plain tf.data."""
    makers: Dict[str, Callable[[], Any]] = {"ours": lambda: ours(source, size)}
    if with_plain:
        makers["plain tf.data"] = lambda: plain(list(source.train.paths), size)
    num_batches = max(1, num_images // BATCH)
    milliseconds: Dict[str, List[float]] = {name: [] for name in makers}
    iterators = {name: iter(make()) for name, make in makers.items()}
    for turn in range(rounds + 1):
        names = list(makers) if turn % 2 else list(makers)[::-1]
        for name in names:
            begun = time.process_time()
            for _ in range(num_batches):
                next(iterators[name])
            settle()
            spent = time.process_time() - begun
            if turn:
                milliseconds[name].append(1e3 * spent / (num_batches * BATCH))
    return milliseconds


def measure_pairs(folder: Path, rounds: int) -> Dict[str, List[float]]:
    """Returns milliseconds of processor time per pair to open a set of images and masks, for each turn."""
    from ipucnn.datasets.registry import choose_dataset, open_dataset

    milliseconds = []
    for turn in range(rounds + 1):
        begun = time.process_time()
        source = open_dataset(choose_dataset("imagemasks", folder, home="", task="segmentation"))
        spent = time.process_time() - begun
        if turn:
            milliseconds.append(1e3 * spent / (len(source.train) + len(source.eval)))
    return {"ours": milliseconds}


def main(arguments: List[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", help="folder of records")
    parser.add_argument("--folder", help="class folders, of which records are built")
    parser.add_argument("--classes", help="class folders, read as they are")
    parser.add_argument("--pairs", help="a folder with images and masks")
    parser.add_argument("--csv", help="file that gets a row for each kind and pipeline")
    parser.add_argument("--images", type=int, default=140)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=int, default=224)
    add_again(parser)
    given = parser.parse_args(arguments)
    folders = {kind: getattr(given, kind) for kind in ("records", "folder", "classes", "pairs")}
    folders = {kind: Path(folder) for kind, folder in folders.items() if folder is not None}
    if not folders:
        parser.error("give at least one of --records, --folder, --classes and --pairs")
    journal = Journal("input_pipeline", given.again)
    for kind, folder in folders.items():
        key = (kind, folder.resolve(), given.images, given.rounds, given.size)
        rows = journal.take(key, lambda: measured_rows(kind, folder, given.images, given.rounds, given.size))
        for row in rows:
            print(
                f"{kind:8}  {row['pipeline']:13}  {row['ms_per_image']:.2f} ms of processor time an image "
                f"(turns {row['least']:.2f} to {row['most']:.2f}); {row['conditions']}; load {row['load']}"
            )
        if len(rows) > 1:
            ratio = rows[1]["ms_per_image"] / rows[0]["ms_per_image"]
            print(f"{kind:8}  plain tf.data takes {ratio:.2f} times as long as ours")
        if given.csv is not None:
            write_rows(Path(given.csv), rows, ("kind", "pipeline"))
    return 0


def measured_rows(kind: str, folder: Path, images: int, rounds: int, size: int) -> List[Dict[str, Any]]:
    """Measures a folder; returns the row of each pipeline, with milliseconds of processor time an image."""
    from ipucnn.datasets.registry import choose_dataset, open_dataset
    from ipucnn.datasets.sources.record_builder import build
    from ipucnn.datasets.sources.records import open_records
    from ipucnn.events import show
    from ipucnn.machine import num_cores

    words = f"--{kind} DIR --images {images} --rounds {rounds} --size {size}"
    with tempfile.TemporaryDirectory() as temporary:
        if kind == "folder":
            show(build(folder, Path(temporary), 4, 2, num_cores()))
        how = Provenance(f"python benchmarks/input_pipeline.py {words}", ("tensorflow", "pillow"))
        if kind == "pairs":
            milliseconds = measure_pairs(folder, rounds)
        elif kind == "classes":
            chosen = choose_dataset("imagefolder", folder, home="", task="classification")
            milliseconds = measure(open_dataset(chosen), images, rounds, size, with_plain=False)
        else:
            source = open_records(folder if kind == "records" else Path(temporary))
            milliseconds = measure(source, images, rounds, size)
    return [
        {
            "kind": kind,
            "pipeline": name,
            "ms_per_image": round(statistics.median(times), 4),
            "least": round(min(times), 4),
            "most": round(max(times), 4),
            "turns": len(times),
            **how.columns(),
        }
        for name, times in milliseconds.items()
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
