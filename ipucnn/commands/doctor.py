"""``ipucnn doctor``: show the machine, the device that each command would use and why, and what to do next."""

import json
from dataclasses import dataclass

from ipucnn.config.shared_options import RunOptions
from ipucnn.config.spec import option


@dataclass(frozen=True)
class Doctor(RunOptions):
    """The options of ``ipucnn doctor``."""

    full: bool = option(
        False, "Also import TensorFlow in a separate process, to find errors that occur only then."
    )


def doctor(options: Doctor) -> None:
    """Show what this machine has, what commands would run on, and what to do next.

    It looks for the Poplar SDK, IPUs, GPUs, processor, memory, disk and data sets. The exit code is 6 if --device
    cannot be used.
    """
    from ipucnn.config.options import RunConfig
    from ipucnn.config.resolve import convert_flags
    from ipucnn.diagnosis.decision import as_error
    from ipucnn.diagnosis.diagnose import diagnose
    from ipucnn.reports.console import note
    from ipucnn.reports.doctor import print_diagnosis

    given = convert_flags(options.flags)
    if options.full and not options.json:
        note("importing TensorFlow in another process")
    diagnosis = diagnose(
        given.get("device", RunConfig.device),
        dataset_path=given.get("dataset_path", RunConfig.dataset_path),
        full=options.full,
    )
    if options.json:
        print(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        print_diagnosis(diagnosis)
    error = as_error(diagnosis.choice, diagnosis.findings)
    if error is not None:
        raise error
