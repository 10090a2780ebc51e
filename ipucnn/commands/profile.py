"""``ipucnn profile``: what Poplar's profile of a run says of memory and cycles."""

import sys
from typing import Optional

import typer

from ipucnn.commands.run_arguments import own_option
from ipucnn.errors import ConfigurationError

FOLDER = typer.Argument(
    ...,
    metavar="DIR",
    help="The file profile.pop that Poplar wrote, or a folder that has it somewhere below.",
)
RUN = own_option(
    "--run",
    "RUN|REPORT.json",
    "The run that was profiled: its folder, or its report. It tells plan-splits --calibrate what was executed.",
)
SAVE = own_option(
    "--save", "FILE", "Write everything as JSON, for `plan-splits --measured` and `plan-splits --calibrate`."
)


def profile(
    folder: str = FOLDER,
    run: Optional[str] = RUN,
    save: Optional[str] = SAVE,
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show what Poplar's profile of a run says: memory by IPU and category, and the programs with the most cycles.

    Profiles are read with libpva of the Poplar SDK; docs/ipu.md says how to make one. The exit code is 6 if libpva
    cannot be imported.
    """
    from ipucnn.benchmarking.poplar_profile import find_profile, import_pva, read_poplar_profile
    from ipucnn.benchmarking.prediction import profiled_run
    from ipucnn.filesystem import check_not_read, check_output, expand, write_output_text
    from ipucnn.reports.console import note
    from ipucnn.reports.profile import print_profile

    path = expand(folder, "DIR")
    run_path = None if run is None else expand(run, "--run")
    save_to = None if save is None else expand(save, "--save")
    found = find_profile(path)
    if save_to is not None:
        check_output(save_to, "--save")
        read = [("the profile", found), *([] if run_path is None else [("the file of --run", run_path)])]
        check_not_read(save_to, "--save", read, ConfigurationError)
    ran = None if run_path is None else profiled_run(run_path, "--run")
    import_pva()
    measured = read_poplar_profile(found, ran)
    if save_to is not None:
        write_output_text(save_to, measured.to_json())
    if as_json:
        sys.stdout.write(measured.to_json())
    else:
        print_profile(measured)
    if save_to is not None:
        note(f"written: {save_to}")
