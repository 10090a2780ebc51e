"""The commands there are, and the root help page; needs neither Typer nor TensorFlow."""

from typing import Dict, List, NamedTuple

ABOUT = (
    "Train, evaluate, run and benchmark convolutional networks on Graphcore IPUs, "
    "or with their semantics on any CPU or GPU."
)


class Command(NamedTuple):
    """A command: its module and function under ``ipucnn.commands``, and a line for the root help page."""

    name: str
    module: str
    function: str
    summary: str
    panel: str


COMMANDS = {
    command.name: command
    for command in (
        Command("train", "train", "train", "Train a network.", "Run"),
        Command("evaluate", "evaluate", "evaluate", "Evaluate a run or its checkpoints.", "Run"),
        Command("infer", "infer", "infer", "Classify images with a run.", "Run"),
        Command(
            "export", "export", "export", "Write a run's network as ONNX, TFLite, SavedModel or Keras.", "Run"
        ),
        Command("benchmark", "benchmark", "benchmark", "Measure throughput and time.", "Run"),
        Command(
            "models", "models", "models", "List the networks, or show the layers of one.", "Look up and plan"
        ),
        Command(
            "verify-dataset",
            "verify_dataset",
            "verify_dataset",
            "Look at every sample of a data set, and say what is wrong.",
            "Look up and plan",
        ),
        Command(
            "build-records",
            "build_records",
            "build_records",
            "Make ImageNet's record files from class folders.",
            "Look up and plan",
        ),
        Command(
            "plan-splits",
            "plan_splits",
            "plan_splits",
            "Plan how to split a network over IPUs.",
            "Look up and plan",
        ),
        Command("doctor", "doctor", "doctor", "Say what is here and what runs on it.", "Look up and plan"),
    )
}

ROOT_OPTIONS = (
    ("--version", "Print the version."),
    ("--install-completion", "Install completion for the current shell."),
    ("--show-completion", "Print the completion script for the current shell."),
    ("--help, -h", "Print this page; `ipucnn COMMAND --help` has the command's options."),
)


def print_root_help() -> None:
    """Prints the root help page on stdout."""
    from ipucnn.config.help_page import Row, print_page

    panels: Dict[str, List[Row]] = {}
    for command in COMMANDS.values():
        panels.setdefault(command.panel, []).append(Row(command.name, "", command.summary))
    panels["Options"] = [Row(names, "", text) for names, text in ROOT_OPTIONS]
    print_page("ipucnn COMMAND [OPTIONS]", ABOUT, list(panels.items()))
