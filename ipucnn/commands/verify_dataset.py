"""``ipucnn verify-dataset``: check every sample of a data set, and report what is wrong."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from ipucnn.config.shared_options import RunOptions
from ipucnn.config.spec import argument, option
from ipucnn.errors import DataError
from ipucnn.text import counted

if TYPE_CHECKING:
    from ipucnn.datasets.formats import Found
    from ipucnn.datasets.verification.survey import Verification


@dataclass(frozen=True)
class VerifyDataset(RunOptions):
    """The options of ``ipucnn verify-dataset``."""

    name: Optional[str] = argument(
        "DATASET",
        "Name of a data set, tfds:NAME, or a folder with any kind of data set in it.  "
        "[default: the one in --dataset-path]",
        default=None,
    )
    contact_sheet: Optional[Path] = option(
        None,
        "Draw up to 100 samples with their labels (up to 30 with their masks).",
        metavar="FILE.png",
    )


def verify_dataset(options: VerifyDataset) -> None:
    """Check every sample of a data set, and say what is wrong with it.

    It looks for missing, damaged and changed files, duplicates, and samples that are in both subsets, and it checks
    counts, shapes, kinds of pixels, labels and their balance, mean and deviation. The exit code is 3 if there are
    errors, and 0 if there are only warnings.
    """
    from ipucnn.commands.rules import VERIFY_DATASET_RULES
    from ipucnn.config.options import RunConfig
    from ipucnn.config.origin import TYPED
    from ipucnn.config.resolve import convert_flags, overlay
    from ipucnn.config.rules import NOT_READ_FROM_FILES, check_rules
    from ipucnn.config.values import parse_dataset
    from ipucnn.datasets.registry import check_is_there
    from ipucnn.datasets.sources.imagefolder import division
    from ipucnn.datasets.verification.verify import choose, verify
    from ipucnn.events import show
    from ipucnn.filesystem import check_output, write_output
    from ipucnn.reports.console import Screen, note
    from ipucnn.reports.verify import LabelSheet, print_verification

    name = options.name
    given = convert_flags(options.flags)
    config = RunConfig(**given)
    check_rules(VERIFY_DATASET_RULES, options, config)
    sheet_to = options.contact_sheet
    if sheet_to is not None:
        check_output(sheet_to)
    if name is None and config.dataset is None and "dataset_path" in given:
        check_is_there(config.dataset_path)
    named = given if name is None else {**given, "dataset": parse_dataset(name)}
    settings, origins = overlay([(TYPED, named)])
    check_rules(NOT_READ_FROM_FILES, RunConfig(**settings), origins, origins, "verify-dataset")
    choice = choose(config.dataset if name is None else name, config.dataset_path, config.download)
    sheet = LabelSheet(choice.task)
    work = verify(
        choice,
        download=config.download,
        allow_partial=config.allow_partial,
        limit_train=config.limit_train,
        limit_eval=config.limit_eval,
        image_size=config.image_size,
        max_pixels=config.max_image_pixels,
        is_drawn=lambda *place: sheet_to is not None and sheet.is_drawn(*place),
        validation_fraction=given.get("validation_fraction"),
    )
    verification = show(work, Screen(take=sheet.take))
    found = choice.found
    if found is not None and found.name == "imagefolder" and found.is_undivided:
        note(division(found.location, *(subset.samples or 0 for subset in verification.subsets)))
    elif found is not None and found.choice:
        note(choice.message)
    if options.json:
        print(json.dumps(verification.to_dict(), indent=2))
    else:
        print_verification(verification)
    if sheet_to is not None and len(sheet):
        write_output(sheet_to, sheet.save)
        note(f"contact sheet of {counted(len(sheet), 'sample')} in {sheet_to}")
        if sheet.num_undrawn:
            note(f"{counted(sheet.num_undrawn, 'sample')} chosen for the sheet could not be drawn")
    elif sheet_to is not None:
        note("no contact sheet: no sample could be drawn")
    if verification.num_errors:
        raise DataError(
            f"{verification.dataset}: {counted(verification.num_errors, 'error')} in the data",
            "each is described above, with what to do about it" + _sorted_instead(found, verification),
        )


_NO_SUCH_SET = {"missing-file", "missing-subset", "unpaired", "unusable"}
"""Codes of errors of folders that may be of another layout than the one they were taken for."""


def _sorted_instead(found: "Optional[Found]", verification: "Verification") -> str:
    """Returns words for a hint with the command that makes a set of a folder of another layout; or ""."""
    from ipucnn.datasets.formats import LAYOUTS
    from ipucnn.datasets.registry import ANY_TASK
    from ipucnn.datasets.sorting import sorting_hint

    codes = {finding.code for finding in verification.findings}
    if found is None or found.name not in LAYOUTS or not codes & _NO_SUCH_SET:
        return ""
    task = "segmentation" if found.name == "imagemasks" else ANY_TASK
    command = sorting_hint(found.location, task).command
    return f"; or {command}" if command else ""
