"""An earlier report to compare with: whole, and of the same work on the same machine."""

import json
from typing import Any, Dict, List, Tuple

from ipucnn.benchmarking.settings import DATA, END_TO_END
from ipucnn.config.bounds import MAX_FLOAT32
from ipucnn.config.options import SPECS
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.text import shown_value

# Options that decide nothing about figures: where things are, and the numbers that are drawn.
_NOT_COMPARED = ("run_dir", "overwrite", "model_name", "dataset_path", "download", "resume", "seed")
_DEVICE = ("kind", "name", "num_cores")
_POSITIVE, _COUNT = "number above 0", "whole number above 0"
# (path, what it has to be) of everything that a comparison reads.
_NEEDED: Tuple[Tuple[str, Any], ...] = (
    ("model", str),
    ("mode", str),
    ("scope", str),
    ("input_shape", list),
    ("data.kind", str),
    ("data.name", str),
    ("data.num_images", int),
    ("settings.compare_with", (str, type(None))),
    ("options", dict),
    ("program", dict),
    *((f"device.{key}", int if key == "num_cores" else str) for key in _DEVICE),
    ("execution.samples", _COUNT),
    ("execution.fused_micro_batches", _COUNT),
    ("execution.reference_repetitions", _COUNT),
    ("measured.images_per_s.value", _POSITIVE),
    ("measured.others_share", (float, int, type(None))),
    ("executions", list),
)
_EXECUTION = ("samples", "wall_s", "cpu_s", "reference_s", "reference_cpu_s")
# What a Program says of the length of executions, which follows the baseline's, and of the seed.
_NOT_OF_PROGRAM = (
    "weight_updates_per_epoch",
    "samples_per_epoch",
    "weight_updates_per_execution",
    "steps_per_execution",
    "num_executions",
    "executions_per_checkpoint",
    "first_checkpoint_execution",
    "seed",
    "splits_from",
    "warnings",
    # Checked by itself: the host chooses it while compiling.
    "fused_micro_batches",
)


def compared_options(config: Any) -> Dict[str, Any]:
    """The options of a run that decide about its speed, by key, as plain values."""
    options = {
        spec.key: spec.yaml_value(getattr(config, spec.name))
        for spec in SPECS
        if spec.name not in _NOT_COMPARED
    }
    plain: Dict[str, Any] = json.loads(json.dumps(options))
    return plain


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= MAX_FLOAT32


def check_whole(report: Dict[str, Any], where: str) -> None:
    """Looks at everything that a comparison reads.

    Args:
        report: ``report.json``.
        where: its file.

    Raises:
        ConfigurationError: it measured no network's speed.
        DataError: naming the first thing that is not there or not what it should be.
    """
    for path, wanted in _NEEDED:
        value: Any = report
        for key in path.split("."):
            if not isinstance(value, dict) or key not in value:
                raise DataError(f"{where} is damaged: {path} is not there", "make it again")
            value = value[key]
        if path == "scope" and value in (DATA, END_TO_END):
            raise ConfigurationError(
                f"--baseline {where} measured --mode {value}, this run the network's speed",
                "give the report.json of --mode training or inference",
            )
        whole = _is_positive(value) if wanted in (_POSITIVE, _COUNT) else isinstance(value, wanted)
        if not whole or (wanted == _COUNT and not isinstance(value, int)):
            raise DataError(f"{where} is damaged: {path} is {shown_value(value)}", "make it again")
    if not report["executions"]:
        raise DataError(f"{where} is damaged: it has no executions", "make it again")
    for index, row in enumerate(report["executions"]):
        for key in _EXECUTION:
            if not isinstance(row, dict) or not _is_positive(row.get(key)):
                raise DataError(
                    f"{where} is damaged: {key} of execution {index} is no {_POSITIVE}", "make it again"
                )


def _compare(where: str, pairs: List[Tuple[str, Any, Any]]) -> None:
    for what, before, now in pairs:
        if before != now:
            raise ConfigurationError(
                f"--baseline {where} has {what} {_text(before)}, this run {_text(now)}",
                "compare like with like: give this run the baseline's options, or make the baseline again",
            )


def _text(value: Any) -> str:
    return "none" if value is None else shown_value(value)


def check_same_request(baseline: Dict[str, Any], where: str, now: Dict[str, Any]) -> None:
    """Compares what is known before TensorFlow is imported.

    Args:
        baseline: an earlier report.
        where: its file, for messages.
        now: ``model``, ``mode``, ``compare_with``, ``data`` (kind, name, num_images), ``input_shape``,
            ``options`` and ``program`` of this run.

    Raises:
        ConfigurationError: the first thing that differs.
    """
    pairs = [(key, baseline[key], now[key]) for key in ("model", "mode")]
    pairs.append(("--compare-with", baseline["settings"]["compare_with"], now["compare_with"]))
    before, after = baseline["data"], now["data"]
    pairs += [(f"data {key}".replace("_", " "), before[key], after[key]) for key in after]
    pairs.append(("input shape", baseline["input_shape"], list(now["input_shape"])))
    options, own = baseline["options"], now["options"]
    pairs += [(f"--{key}", options.get(key), own.get(key)) for key in sorted({*options, *own})]
    _compare(where, [*pairs, *_program_pairs(baseline["program"], now["program"])])


def _program_pairs(before: Dict[str, Any], now: Dict[str, Any]) -> List[Tuple[str, Any, Any]]:
    keys = [key for key in sorted({*before, *now}) if key not in _NOT_OF_PROGRAM]
    # Splits that the planner chose are known only later; options and network decide them.
    keys = [key for key in keys if key != "pipeline_splits" or now[key]]
    return [(key.replace("_", " "), _plain(before.get(key)), _plain(now.get(key))) for key in keys]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def check_same_machine(baseline: Dict[str, Any], where: str, machine: Dict[str, Any]) -> None:
    """Compares the devices.

    Raises:
        ConfigurationError: they differ.
    """
    _compare(where, [(f"device {key}", baseline["device"][key], machine[key]) for key in _DEVICE])
