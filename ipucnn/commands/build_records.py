"""``ipucnn build-records``: make ImageNet's record files from class folders."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ipucnn.config import bounds
from ipucnn.config.shared_options import CommandOptions
from ipucnn.config.spec import FILE, argument, option
from ipucnn.errors import ConfigurationError
from ipucnn.text import counted


@dataclass(frozen=True)
class BuildRecords(CommandOptions):
    """The options of ``ipucnn build-records``."""

    folder: Path = argument(
        "FOLDER",
        "Images in class folders: FOLDER/train/CLASS/* and FOLDER/val/CLASS/*.",
        required=True,
        kind=FILE,
    )
    out: Path = argument(
        "OUT",
        "Folder to write the records into. To continue a build that was killed, give its folder.",
        required=True,
        kind=FILE,
    )
    shards: int = option(
        1024,
        "Number of files for the training images.",
        metavar="N",
        within=bounds.SHARDS,
        default_text="1024",
    )
    validation_shards: int = option(
        128,
        "Number of files for the validation images.",
        metavar="N",
        within=bounds.SHARDS,
        default_text="128",
    )
    workers: Optional[int] = option(
        None,
        "Number of files that are made at the same time.",
        metavar="N",
        within=bounds.RECORD_WORKERS,
        default_text="one per core",
    )
    max_image_pixels: int = option(
        100_000_000,
        "Largest number of pixels of an image; larger ones are refused.",
        metavar="N",
        within=bounds.PIXELS,
        default_text="100000000",
    )


def build_records(options: BuildRecords) -> None:
    """Make TFRecord files of images in class folders, as --dataset imagenet reads them.

    The same images give the same files, byte for byte. If a build was interrupted or killed, type the same command
    again: it goes on where it left off.
    """
    from ipucnn.datasets.sources.record_builder import CHECKSUMS_FILE, build
    from ipucnn.events import show
    from ipucnn.filesystem import shown
    from ipucnn.machine import num_cores
    from ipucnn.reports.console import Screen, note

    source, target = options.folder, options.out
    if not source.is_dir():
        raise ConfigurationError(
            f"FOLDER {shown(source)} is no folder", "give the folder that has train/ and val/"
        )
    numbers = options.shards, options.validation_shards, options.workers or num_cores()
    built = show(build(source, target, *numbers, options.max_image_pixels), Screen())
    for line in built.warnings:
        note(f"warning: {line}")
    if options.json:
        print(json.dumps({"out": shown(target), **built._asdict()}, indent=2))
        return
    for subset, count in built.num_images.items():
        print(f"{subset}: {counted(count, 'image')} in {counted(built.num_shards[subset], 'file')}")
    total = sum(built.num_shards.values())
    print(
        f"{counted(built.num_classes, 'class')}, labels 1 to {built.num_classes}; "
        f"{built.num_kept:,} of {counted(total, 'file')} were there; "
        f"{counted(built.num_converted, 'image')} converted to JPEG"
    )
    print(f"in {shown(target)}, with {CHECKSUMS_FILE}")
