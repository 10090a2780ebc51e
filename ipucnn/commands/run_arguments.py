"""Arguments of the commands that work on a run."""

import typer

RUN = typer.Argument(..., metavar="RUN", help="Run folder, or a checkpoint file in one.")
WHICH = typer.Option(
    None,
    "--checkpoint",
    metavar="NAME",
    help="Checkpoint of the run: best, last, or a file name in it.",
    show_default="last, else best",
)
