"""Verifies a data set: chooses it, knows its published facts, and checks every sample.

Files are read with the same readers as in training.  If a reader rejects a file, page or record, the problem is
recorded and reading continues with the next one.  Nothing in a data set is executed.
"""

from dataclasses import replace
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from ipucnn.datasets.base import IMAGENET_MEAN
from ipucnn.datasets.formats import Found, base_name, find_sets
from ipucnn.datasets.limits import HELD_OUT_SHARE, MAX_IMAGE_PIXELS
from ipucnn.datasets.registry import (
    ANY_TASK,
    DATASETS,
    ChosenDataset,
    ReaderOptions,
    check_divides,
    choose_dataset,
    choose_found,
    fetch,
    needs_files,
    open_dataset,
    with_sorting_hint,
)
from ipucnn.datasets.segmentation import membranes
from ipucnn.datasets.sources import embedded, records
from ipucnn.datasets.verification import readers
from ipucnn.datasets.verification.findings import EVAL, TRAIN, WARNING
from ipucnn.datasets.verification.samples import IsDrawn, Result
from ipucnn.datasets.verification.survey import Known, Survey, Verification
from ipucnn.errors import ConfigurationError
from ipucnn.events import Events
from ipucnn.filesystem import shown
from ipucnn.machine import num_cores, parallel_map


def _published(name: str, mean: Tuple[float, ...], std: Tuple[float, ...] = ()) -> Known:
    return Known(dict(zip((TRAIN, EVAL), DATASETS[name].num_examples or ())), mean, std)


KNOWN: Dict[str, Known] = {
    "digits": Known({TRAIN: 1797 - embedded.NUM_HELD_OUT, EVAL: embedded.NUM_HELD_OUT}),
    "membranes": Known({TRAIN: membranes.NUM_TRAIN, EVAL: membranes.NUM_EVAL}),
    "random": Known({TRAIN: embedded.NUM_TRAIN, EVAL: embedded.NUM_EVAL}),
    # Means and standard deviations of the whole training subset, as widely published for normalisation: MNIST
    # 0.1307 and 0.3081 (PyTorch's MNIST example), Fashion-MNIST 0.2860 and 0.3530, CIFAR-10 0.4914 0.4822 0.4465 and
    # 0.2470 0.2435 0.2616, CIFAR-100 0.5071 0.4865 0.4409 and 0.2673 0.2564 0.2762.  Here they are in 0..255 units, to
    # four digits.
    "mnist": _published("mnist", (33.3184,), (78.5675,)),
    "fashion_mnist": _published("fashion_mnist", (72.9404,), (90.0212,)),
    "cifar10": _published("cifar10", (125.3069, 122.9501, 113.8660), (62.9932, 62.0887, 66.7049)),
    "cifar100": _published("cifar100", (129.3039, 124.0699, 112.4336), (68.1702, 65.3918, 70.4184)),
    # Arganda-Carreras et al. 2015: 30 slices of 512x512.  Mean and standard deviation are those of the challenge's
    # training stack, measured on a pixel-identical copy.
    "isbi2012": Known({TRAIN: 24, EVAL: 6}, (126.163,), (44.022,), 0.05, (TRAIN, EVAL)),
    # This is the mean of resized crops, because that of whole images is not published.  So the tolerance is wide, and a
    # larger difference is only a warning.
    "imagenet": replace(_published("imagenet", IMAGENET_MEAN), tolerance=10.0, severity=WARNING),
}


def verify(
    choice: ChosenDataset,
    *,
    download: bool = False,
    allow_partial: bool = False,
    limit_train: Optional[str] = None,
    limit_eval: Optional[str] = None,
    image_size: Optional[Tuple[int, int]] = None,
    max_pixels: int = MAX_IMAGE_PIXELS,
    is_drawn: IsDrawn = lambda position, total: False,
    validation_fraction: Optional[float] = None,
) -> Events[Verification]:
    """Checks every sample of a data set, and yields those to draw.

    Args:
        choice: the set, from :func:`choose`.
        download: whether it may be downloaded.
        allow_partial: whether missing parts of the set are only a warning.
        limit_train, limit_eval: number or share of samples to check: "500" or "10%".
        image_size: (height, width) of the network's input, to report smaller images; also the size of generated sets.
        max_pixels: the most pixels of an image.
        is_drawn: chooses the samples to draw.
        validation_fraction: the share of each class that is held out of a folder without train/ and val/.

    Raises:
        DataError: the set is absent.
        MissingError: a package or the network is needed.
        ConfigurationError: a limit is not a number, or a validation fraction is given for a set that is already
            divided.
    """
    if validation_fraction is not None:
        check_divides(choice, validation_fraction)
    has_files = choice.make is None and needs_files(choice.name)
    found = fetch(choice, download).files if has_files else None
    known = KNOWN.get(base_name(choice.name), Known())
    is_records = found is not None and found.name == "imagenet" and not (found.parts or found.is_tfds)
    if found is not None and is_records and len(records.class_names(found.location)) != records.NUM_CLASSES:
        known = Known()  # records of another set in ImageNet's layout
    survey = Survey(
        choice.name,
        choice.task,
        "" if found is None else shown(found.location),
        known,
        is_drawn,
        {TRAIN: limit_train, EVAL: limit_eval},
        image_size if has_files else None,
        validation_fraction or HELD_OUT_SHARE,
        max_pixels,
        "" if found is None else found.choice_words,
    )
    survey.expect(_samples_of(survey, choice, found, image_size))

    def decode(name: str, numbers: List[int], drawn: List[int]) -> Tuple[str, List[Result]]:
        return name, list(survey.subsets[name].stored.decode(numbers, drawn))

    # Images in memory are measured on one core, because digests of small images would wait for Python's lock.
    is_in_memory = any(subset.stored.is_in_memory for subset in survey.subsets.values())
    for name, results in parallel_map(decode, survey.groups(), 1 if is_in_memory else num_cores()):
        for numbers, decoded in results:
            yield from survey.take(name, numbers, decoded)
    return survey.finish(allow_partial)


def _samples_of(
    survey: Survey, choice: ChosenDataset, found: Optional[Found], image_size: Optional[Tuple[int, int]]
) -> readers.SamplesBySubset:
    """Returns the samples of a set, with the function for its kind."""
    if found is None:
        image_shape = None if image_size is None else (*image_size, embedded.DEFAULT_SHAPE[2])
        source = open_dataset(
            choice, ReaderOptions(image_shape=image_shape, max_image_pixels=survey.max_pixels)
        )
        return readers.source_samples(survey, source)
    if found.is_tfds:
        return readers.tfds_samples(survey, found.location)
    shape = DATASETS[choice.name].image_shape
    survey.shape = None if shape is None else shape[:2]
    return readers.OF_SETS[choice.name](survey, found)


# -- choosing the set -----------------------------------------------------------------------------------------


def choose(name: Optional[str], path: Path, download: bool = False) -> ChosenDataset:
    """Chooses the set to verify.

    Args:
        name: a name, tfds:NAME, or a folder with any kind of set; None for the set in ``path``.
        path: the value of ``--dataset-path``.
        download: whether an absent set may be downloaded.

    Raises:
        ConfigurationError: the name is unknown, or a folder holds no set or several sets.
        DataError: the set is absent.
    """
    if name is None:
        with with_sorting_hint(path, ANY_TASK):
            sets = find_sets(path)
        if not sets:
            raise ConfigurationError(
                f"no data set is given, and none is known in {shown(path)}",
                f"ipucnn verify-dataset NAME, one of {', '.join(DATASETS)}, tfds:NAME, FILE.py:FUNCTION, or a folder",
            )
        return choose_found(sets, path, ANY_TASK)
    choice = choose_dataset(name, path, home="", task=ANY_TASK, download=download)
    if choice.make is None:
        return choice
    # The function is called only once, also for its task, because its result may differ from call to call.
    source = open_dataset(choice)
    return replace(choice, task=source.info.task, make=lambda: source, is_opened=True)
