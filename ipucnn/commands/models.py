"""``ipucnn models``: print the registry as a table or JSON, or the layers of one model."""

import json
import sys
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ipucnn.aliases import KerasModel, PlainDict, PlainValue
from ipucnn.config.request import is_wildcard
from ipucnn.config.resolve import convert_flags
from ipucnn.config.shared_options import RunOptions
from ipucnn.config.spec import argument, option
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.events import LOADING, during, show
from ipucnn.models.counts import layer_macs, layer_parameters, registered_counts
from ipucnn.models.registry import ModelRecord, assumption, find_network, list_models, validate_input_shape
from ipucnn.reports import units
from ipucnn.reports.console import (
    NUMBER,
    TEXT,
    Screen,
    Side,
    console,
    note,
    print_table,
    text_table,
)
from ipucnn.text import counted, shown_value

_RECORD_COLUMNS = {
    "model": TEXT,
    "default data set": TEXT,
    "input": NUMBER,
    "classes": NUMBER,
    "parameters": NUMBER,
    "MACs": NUMBER,
    "norm": TEXT,
    "smallest": NUMBER,
    "paper": TEXT,
}
# Columns that a narrow terminal leaves out, in this order.
_LEFT_OUT = ("paper", "smallest", "norm")
_LAYER_COLUMNS = {"layer": TEXT, "type": TEXT, "output": NUMBER, "parameters": NUMBER, "MACs": NUMBER}
# Attributes of a record that ``--json`` prints, besides the counts.
_FACTS = (
    "name", "family", "task", "home_dataset", "input_shape", "min_size", "num_classes", "paper", "input_range",
    "keras_application", "requires", "default_norm", "norms", "size_step", "size_offset",
)  # fmt: skip


@dataclass(frozen=True)
class Models(RunOptions):
    """The options of ``ipucnn models``, besides those of runs, which are for ``--summary``."""

    pattern: str = argument(
        "[PATTERN]", "Name of a model, or a wildcard such as 'efficientnet*' (quoted).", default="*"
    )
    summary: bool = option(
        False,
        "Build the model that PATTERN names, and list its layers; --dataset and --image-size name other images.",
    )


def models(options: Models) -> None:
    """List the networks, or show the layers of one.

    Parameters are the trainable ones; MACs are the multiply-accumulates of the forward pass of one sample. Both are for
    the model's default data set, unless --dataset names another one. --summary prints the names of layers that
    --pipeline-splits takes.
    """
    pattern, flags = options.pattern, options.flags
    if options.summary:
        record = find_network(pattern)
        shape, num_classes = _input(record, flags)
        report = _summarise(record, shape, num_classes)
        for line in record.notes:
            note(f"note: {line}")
        if options.json:
            print(json.dumps(report, indent=2))
            return
        rows = [_layer_row(layer) for layer in report["layers"]]
        _print_table(_LAYER_COLUMNS, rows)
        console(sys.stdout).print(
            f"{report['model']}: {counted(len(rows), 'layer')}, {report['parameters']:,} trainable parameters, "
            f"{report['macs']:,} MACs per image of {_dimensions(report['input_shape'])}, "
            f"{counted(num_classes, 'class')}",
            soft_wrap=not sys.stdout.isatty(),
        )
        return
    wildcard = is_wildcard(pattern)
    from ipucnn.commands.rules import MODELS_RULES
    from ipucnn.config.rules import check_rules

    check_rules(MODELS_RULES, options, None)
    records = list_models(pattern) if wildcard else [find_network(pattern)]
    if not records:
        raise ConfigurationError(
            f"no model matches '{shown_value(pattern)}'", "`ipucnn models` lists them all"
        )
    if options.json:
        print(json.dumps([_as_dict(record) for record in records], indent=2))
    else:
        _print_table(_RECORD_COLUMNS, [_record_row(record) for record in records], _LEFT_OUT)


def _as_dict(record: ModelRecord) -> Dict[str, Any]:
    """Returns the facts of a record, without those that only the builder needs, and its counts; None if not known."""
    facts = {name: getattr(record, name) for name in _FACTS}
    counts = registered_counts().get(record.name)
    return {**facts, "parameters": counts and counts.parameters, "macs": counts and counts.macs}


def _dimensions(shape: Sequence[Optional[int]]) -> str:
    return "x".join("?" if n is None else str(n) for n in shape)


def _record_row(record: ModelRecord) -> List[str]:
    counts = registered_counts().get(record.name)
    return [
        record.name,
        record.home_dataset,
        _dimensions(record.input_shape),
        f"{record.num_classes:,}",
        units.count(counts.parameters) if counts else "?",
        units.count(counts.macs) if counts else "?",
        record.default_norm,
        str(record.min_size),
        record.paper,
    ]


def _input(record: ModelRecord, flags: Mapping[str, PlainValue]) -> Tuple[Tuple[int, int, int], int]:
    """Returns a model's input shape (height, width, channels) and its number of classes.

    With a data set these are the same as in training on it.

    Args:
        record: the model's record.
        flags: field name -> text of the options of runs that were given.

    Raises:
        ConfigurationError: the model cannot take the size, or the data set is unknown.
        DataError: the data set's files are absent.
    """
    if "dataset" in flags or "dataset_path" in flags:
        from ipucnn.config.resolve import resolve
        from ipucnn.runs.setup import prepare

        try:
            resolved = resolve("train", flags, model=record.name)
        except DataError as error:
            if "--download" not in (error.hint or ""):
                raise
            # This command does not download.
            raise DataError(error.message, "name the folder that has it with --dataset-path DIR") from error
        note(resolved.choice.message)
        setup = prepare(resolved, seed=0)
        return setup.input_shape, setup.source.info.num_classes
    size = convert_flags(flags).get("image_size")
    shape = (*(size or record.input_shape[:2]), record.input_shape[2])
    validate_input_shape(record, shape)
    assumed = assumption(record, size)
    if assumed:
        note(f"{assumed}; --dataset NAME takes those of a data set")
    return shape, record.num_classes


def _summarise(record: ModelRecord, shape: Tuple[int, int, int], num_classes: int) -> Dict[str, Any]:
    """Builds a model and returns the facts of its layers, as ``--json`` prints them."""
    from ipucnn.models.build import BuildOptions, build_model
    from ipucnn.models.keras_config import output_shape
    from ipucnn.sessions.host.environment import import_tensorflow

    def build() -> KerasModel:
        import_tensorflow()
        return build_model(record, BuildOptions(input_shape=shape, num_classes=num_classes))

    model = show(during(LOADING, build), Screen())
    layers = []
    for layer in model.layers:
        layers.append(
            {
                "name": layer.name,
                "type": type(layer).__name__,
                "output_shape": [None if n is None else int(n) for n in output_shape(layer)[1:]],
                "parameters": layer_parameters(layer),
                "macs": layer_macs(layer),
            }
        )
    return {
        "model": record.name,
        "input_shape": list(shape),
        "num_classes": num_classes,
        "parameters": sum(layer["parameters"] for layer in layers),
        "macs": sum(layer["macs"] for layer in layers),
        "layers": layers,
    }


def _layer_row(layer: PlainDict) -> List[str]:
    parameters, macs = layer["parameters"], layer["macs"]
    return [
        layer["name"],
        layer["type"],
        _dimensions(layer["output_shape"]),
        f"{parameters:,}" if parameters else "",
        units.count(macs) if macs else "",
    ]


def _print_table(columns: Mapping[str, Side], rows: List[List[str]], left_out: Sequence[str] = ()) -> None:
    """Prints a table on stdout; in a pipe, every line and column is whole, and there are no rules."""
    out = console(sys.stdout)
    table = text_table(columns, rows, whole_numbers=True, padding=(0, 1, 0, 0))
    if sys.stdout.isatty():
        print_table(out, table, left_out=left_out)
    else:
        table.box, table.padding, out.width = None, (0, 2, 0, 0), 100_000
        out.print(table)
