"""``ipucnn build-records``: make ImageNet's record files from class folders."""

import json
from typing import Optional

import typer

from ipucnn.commands.run_arguments import value_option
from ipucnn.config import spec
from ipucnn.errors import ConfigurationError
from ipucnn.text import counted

FOLDER = typer.Argument(
    ..., metavar="FOLDER", help="Images in class folders: FOLDER/train/CLASS/* and FOLDER/val/CLASS/*."
)
OUT = typer.Argument(
    ...,
    metavar="OUT",
    help="Folder to write the records into. To continue a build that was killed, give its folder.",
)
SHARDS = value_option(
    "--shards", "N", "Number of files for the training images.", number=spec.SHARDS, shown="1024"
)
VALIDATION_SHARDS = value_option(
    "--validation-shards", "N", "Number of files for the validation images.", number=spec.SHARDS, shown="128"
)
WORKERS = value_option(
    "--workers",
    "N",
    "Number of files that are made at the same time.",
    number=spec.WORKERS,
    shown="one per core",
)
PIXELS = value_option(
    "--max-image-pixels",
    "N",
    "Largest number of pixels of an image; larger ones are refused.",
    number=spec.PIXELS,
    shown="100000000",
)


def build_records(
    folder: str = FOLDER,
    out: str = OUT,
    shards: Optional[int] = SHARDS,
    validation_shards: Optional[int] = VALIDATION_SHARDS,
    workers: Optional[int] = WORKERS,
    max_image_pixels: Optional[int] = PIXELS,
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Make TFRecord files of images in class folders, as --dataset imagenet reads them.

    The same images give the same files, byte for byte. If a build was interrupted or killed, type the same command
    again: it goes on where it left off.
    """
    from ipucnn.datasets.limits import MAX_IMAGE_PIXELS
    from ipucnn.datasets.sources.record_builder import (
        CHECKSUMS_FILE,
        NUM_SHARDS,
        NUM_VALIDATION_SHARDS,
        build,
    )
    from ipucnn.filesystem import expand, is_folder, shown
    from ipucnn.machine import num_cores
    from ipucnn.reports.console import ItemProgress, note

    source, target = expand(folder), expand(out)
    if not is_folder(source):
        raise ConfigurationError(
            f"FOLDER {shown(source)} is no folder", "give the folder that has train/ and val/"
        )
    with ItemProgress("building records") as bar:
        built = build(
            source,
            target,
            shards or NUM_SHARDS,
            validation_shards or NUM_VALIDATION_SHARDS,
            workers or num_cores(),
            max_image_pixels or MAX_IMAGE_PIXELS,
            bar.update,
        )
    for line in built.warnings:
        note(f"warning: {line}")
    if as_json:
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
