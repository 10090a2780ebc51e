"""The table of commands, and the root help page; imports neither Typer nor TensorFlow."""

from typing import Dict, List, NamedTuple, Tuple

ABOUT = (
    "Train, evaluate, run and benchmark convolutional networks on Graphcore IPUs, "
    "or with their semantics on any CPU or GPU."
)


class Command(NamedTuple):
    """A command of the program, which is the function of that name in a module of ``ipucnn.commands``.

    Attributes:
        name: name on the command line.
        summary: its line on the root help page.
        panel: its section of the root help page.
        examples_text: command lines, each followed by a line that describes it.
        common: for a command with many options, the ones on its help page; ``--help-all`` shows all.
        module: name of its module, if it is not the name of the command.
        in_processes: whether several processes of MPI may run it together.
        in_instances: whether several instances of ``poprun`` may run it together.
        synonyms: further search words for ``ipucnn --help WORD``, besides its name, summary and examples.
    """

    name: str
    summary: str
    panel: str
    examples_text: str = ""
    common: str = ""
    module: str = ""
    in_processes: bool = False
    in_instances: bool = False
    synonyms: str = ""

    @property
    def function(self) -> str:
        return self.name.replace("-", "_")

    @property
    def options(self) -> str:
        """The name of the class of its options, in the same module."""
        return self.name.title().replace("-", "")

    @property
    def examples(self) -> List[Tuple[str, str]]:
        """Pairs of (command line, description)."""
        lines = [line.strip() for line in self.examples_text.strip().splitlines()]
        return list(zip(lines[::2], lines[1::2]))


_RUN, _PLAN = "Run", "Look up and plan"

_ALL = (
    Command(
        "train",
        "Train a network.",
        _RUN,
        """
        ipucnn train efficientnet-b0 --replicas 4
            EfficientNet-B0 on the embedded digits, as four IPUs would train it.
        ipucnn train cifar_resnet8 --dataset path/to/images --num-epochs 20
            A small network on your own images, in one folder per class.
        ipucnn train unet --dataset membranes --dry-run
            What training a U-Net would do, without doing it.
        """,
        common="""
        --dataset --dataset-path --num-epochs --micro-batch-size --global-batch-size --num-replicas --optimizer
        --learning-rate --augment --weights --precision --pipeline-splits --seed --run-dir --resume --dry-run
        --print-config
        """,
        in_processes=True,
        in_instances=True,
        synonyms="fit rehearse rehearsal simulate emulate laptop",
    ),
    Command(
        "evaluate",
        "Evaluate a run or its checkpoints.",
        _RUN,
        """
        ipucnn evaluate runs/lenet-digits
            The run's last checkpoint, on the data it was validated on.
        ipucnn evaluate runs/lenet-digits --checkpoint best --json
            The run's best checkpoint, with every figure as JSON.
        """,
        in_instances=True,
    ),
    Command(
        "infer",
        "Classify or segment images with a run.",
        _RUN,
        """
        ipucnn infer runs/lenet-digits --split eval --contact-sheet sheet.png
            Predicted classes of the run's evaluation images, and a sheet of pictures.
        ipucnn infer runs/lenet-digits path/to/images --output labels.csv
            Predicted classes of your own images, in a table for a spreadsheet.
        """,
        in_instances=True,
    ),
    Command(
        "export",
        "Write a run's network for other programs.",
        _RUN,
        """
        ipucnn export runs/lenet-digits --format onnx
            An ONNX file with its labels, verified in onnxruntime.
        ipucnn export runs/lenet-digits --format tflite --raw-uint8 --half
            A small TFLite file that takes pixels from 0 to 255.
        """,
    ),
    Command(
        "benchmark",
        "Measure throughput and time.",
        _RUN,
        """
        ipucnn benchmark unet --host-generated-data
            The speed of a U-Net's forward passes on random images.
        ipucnn benchmark lenet --training --compare-with keras
            The speed of weight updates, compared with Keras `fit`.
        ipucnn benchmark --suite keras-tutorial
            The steps of Graphcore's Keras tutorial, in one table.
        """,
        common="""
        --suite --inference --compare-with --dataset --host-generated-data --device-generated-data --micro-batch-size
        --global-batch-size --num-replicas --precision --device --print-config
        """,
        in_instances=True,
    ),
    Command(
        "runs",
        "List run folders.",
        _PLAN,
        """
        ipucnn runs
            All runs below the folder runs.
        ipucnn runs --sort accuracy
            All runs, the most accurate first.
        """,
    ),
    Command(
        "diff",
        "Show how two runs differ.",
        _PLAN,
        """
        ipucnn diff runs/lenet-digits runs/lenet-digits-2
            Different options and data, and the first row in which the histories differ.
        """,
        module="runs",
    ),
    Command(
        "plot",
        "Draw the curves of runs.",
        _PLAN,
        """
        ipucnn plot runs/lenet-digits
            Loss, accuracy and learning rate, in curves.png.
        ipucnn plot runs/lenet-digits runs/lenet-digits-2 --output both.svg
            Two runs in one picture.
        """,
        module="runs",
    ),
    Command(
        "models",
        "List the networks, or show the layers of one.",
        _PLAN,
        """
        ipucnn models
            All networks.
        ipucnn models resnet50 --summary
            The layers of one network; splits are named after them.
        """,
    ),
    Command(
        "verify-dataset",
        "Check every sample of a data set, and say what is wrong.",
        _PLAN,
        """
        ipucnn verify-dataset
            The data set in the current folder, whichever it is.
        ipucnn verify-dataset cifar10 --dataset-path path/to/data
            CIFAR-10 in another folder.
        """,
    ),
    Command(
        "build-records",
        "Make ImageNet's record files from class folders.",
        _PLAN,
        """
        ipucnn build-records path/to/images records
            TFRecord files of your images, with checksums.
        """,
    ),
    Command(
        "plan-splits",
        "Plan how to split a network over IPUs.",
        _PLAN,
        """
        ipucnn plan-splits resnet50 --stages 4
            The best split into four pipeline stages.
        ipucnn plan-splits resnet50 --ipus 16
            The best use of 16 IPUs: stages, replicas and batch.
        ipucnn plan-splits unet --stages 4 --save plan.yml --html plan.html
            A plan for `ipucnn train unet --plan plan.yml`, and a page that draws it.
        """,
        common="""
        --stages --ipus --splits --system --image-size --micro-batch-size --global-batch-size --num-replicas
        --precision --pipeline-schedule --optimizer --recomputation --inference --save --html
        """,
        synonyms="what-if rehearse rehearsal simulate partition pipeline predict memory",
    ),
    Command(
        "doctor",
        "Show what this machine has, and what commands would run on.",
        _PLAN,
        """
        ipucnn doctor
            Python, TensorFlow, devices, and what is missing.
        ipucnn doctor --device ipu
            The same; it ends with exit code 6 if IPUs cannot be used.
        """,
        in_instances=True,
    ),
)
COMMANDS = {command.name: command for command in _ALL}

ROOT_OPTIONS = (
    ("--version", "Print the version."),
    ("--install-completion", "Install completion for the current shell."),
    ("--show-completion", "Print the completion script for the current shell."),
    (
        "--help, -h [WORD]",
        "Print this page; with WORD the commands and options about it. `ipucnn COMMAND --help` shows the options of a "
        "command.",
    ),
)


def print_root_help() -> None:
    """Prints the root help page on stdout."""
    from ipucnn.config.help_page import HelpRow, print_page

    panels: Dict[str, List[HelpRow]] = {}
    for command in COMMANDS.values():
        panels.setdefault(command.panel, []).append(HelpRow(command.name, "", command.summary))
    panels["Options"] = [HelpRow(names, "", text) for names, text in ROOT_OPTIONS]
    print_page("ipucnn COMMAND [OPTIONS]", ABOUT, list(panels.items()))
