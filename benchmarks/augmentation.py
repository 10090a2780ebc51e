"""Images per second of the input pipeline alone, with and without augmentation: no network runs.

Usage: python benchmarks/augmentation.py unet --dataset isbi2012 --dataset-path DIR [--images 200]
       python benchmarks/augmentation.py efficientnet-b0 --dataset digits --micro-batch-size 16

Wall time on all cores, and the CPU time an image takes, which another program running beside it does not change.
"""

import argparse
import os
import sys
import time
from typing import Any, Dict, List

from ipucnn.config.resolve import resolve
from ipucnn.runs import setup as run_setup

WARM_UP = 20


def measure(setup: Any, augment: bool, batch_size: int, num_images: int) -> Dict[str, float]:
    """Seconds per image: of the wall clock, and of the CPU."""
    from ipucnn.datasets.pipeline import Stream, train_batches

    batches = iter(
        train_batches(
            setup.source,
            Stream(
                batch_size=batch_size,
                samples_per_epoch=len(setup.source.train),
                input_shape=setup.input_shape,
                input_range=setup.record.input_range,
                augment=augment,
                seed=1,
                num_parallel=setup.config.pipeline_num_parallel,
                output_shape=setup.output_shape,
            ),
        )
    )
    for _ in range(-(-WARM_UP // batch_size)):
        next(batches)
    count = max(1, num_images // batch_size)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        next(batches)
    images = count * batch_size
    return {"wall_s": (time.perf_counter() - wall) / images, "cpu_s": (time.process_time() - cpu) / images}


def main(arguments: List[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--dataset")
    parser.add_argument("--dataset-path", default=".")
    parser.add_argument("--image-size")
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--images", type=int, default=200)
    given = parser.parse_args(arguments)
    flags = {"dataset_path": given.dataset_path, "dataset": given.dataset, "image_size": given.image_size}
    flags = {name: value for name, value in flags.items() if value is not None}
    setup = run_setup.prepare(resolve("train", flags, model=given.model), seed=1)
    size = "x".join(map(str, setup.input_shape))
    print(
        f"{setup.source.info.name} at {size}, batches of {given.micro_batch_size}, {os.cpu_count()} cores; measured"
    )
    for augment in (False, True):
        found = measure(setup, augment, given.micro_batch_size, given.images)
        print(
            f"{'with' if augment else 'without'} augmentation: {1 / found['wall_s']:.1f} images/s, "
            f"{1e3 * found['cpu_s']:.2f} ms of CPU an image"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
