"""From flags, a preset and the defaults to one RunConfig, with where each value came from.

Defaults < preset < flags.  The preset is the one ``--config`` names, else the built-in one of the model and
data set.  Of options that stand in for each other, one given in a higher layer drops the lower layer's.
"""

import dataclasses
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Protocol, Sequence, Tuple

from ipucnn.aliases import PlainDict, PlainValue
from ipucnn.config.options import AUTO, BY_KEY, BY_NAME, SPECS, RunConfig
from ipucnn.config.spec import convert_value
from ipucnn.config.values import norm_layer_of
from ipucnn.errors import ConfigurationError, DataError, UserError
from ipucnn.filesystem import expand
from ipucnn.text import shown_value

if TYPE_CHECKING:
    from ipucnn.datasets.registry import Choice
    from ipucnn.models.registry import ModelRecord

DEFAULT = "default"
FLAG = "flag"
RUN_ORIGIN = "run"
PUBLIC_ORIGIN = "public default"
OF_16_BITS = ("stochastic_rounding", "nanoo", "auto_loss_scaling")
"""Options that find nothing to act on in 32 bits, on whatever device."""
ORDER_ORIGIN = "deterministic"
OWN_ORIGIN = "own network"
"""Of a micro-batch that nobody chose for a network of the user's own: it is smaller where the data set is."""
OWN_GLOBAL_BATCH = 32
LEAST_VALIDATIONS = 5
PLANS = ("plan-splits",)
"""Commands that plan MODEL and do not build it, if they can help it."""
# The defaults of Graphcore's public application that differ from those of this one and decide what a run computes
# (vision/cnns/tensorflow2/configuration/terminal_argparse.py of graphcore/examples): a configuration in its layout gets
# them for what it does not name.
_PUBLIC_DEFAULTS: PlainDict = {
    "precision": "16.16",
    "stochastic_rounding": "ON",
    "norm_layer": {"name": "custom_batch_norm", "momentum": 0.97},
    "prefetch_depth": 1,
}
# What it does to the training images of a data set, whatever its files say.
_PUBLIC_AUGMENTATION: Dict[str, PlainDict] = {
    "cifar10": {"augment": True, "normalise": "image"},
    "cifar100": {"augment": True, "normalise": "image"},
    "imagenet": {"augment": True},
}

# Options that take each other's place: the first in a higher layer drops the second from the lower ones.
REPLACES = (
    ("gradient_accumulation_count", "global_batch_size"),
    ("global_batch_size", "gradient_accumulation_count"),
    ("logs_per_epoch", "steps_per_execution"),
    ("steps_per_execution", "logs_per_epoch"),
    ("ipus", "num_replicas"),
    ("num_replicas", "ipus"),
    ("dataset", "host_generated_data"),
    ("host_generated_data", "dataset"),
    ("device_generated_data", "dataset"),
    ("pipeline_splits", "device_mapping"),
    ("pipeline_splits", "ipus_per_replica"),
    ("lr_schedule_params", "learning_rate"),
)


class Plan(Protocol):
    """What a configuration takes of the file of ``--plan``, whoever reads it."""

    @property
    def model(self) -> str:
        """The network that it is for."""

    def run_options(self) -> PlainDict:
        """YAML keys and values of the options that run it."""


ReadPlan = Callable[[Path, str], Plan]
"""(file, the option that names it) -> the plan in it; raises a DataError for what is none."""


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A run's configuration and what it was resolved to.

    Attributes:
        command: the command it is for, e.g. ``train``.
        config: every option, validated.
        origins: field name -> "default", "preset NAME", "flag" (or "run": the run folder's config.yml).
        record: the model's registry record.
        data: the data set that was chosen; its ``message`` says which, and how to get another.  None for
            commands that read no data set (infer, plan-splits), and in a suite where it is absent.
        preset: the name of the preset that was applied, or None.
        without_effect: keys the user gave that only an IPU, or only 16 bits, act on, in order of declaration.
        typed: field name -> value of what the user gave, by flag, in a plan or in a preset named on the command line,
            and nothing else displaced.
        plan: what ``--plan`` names, or None.
        config_path: the file of ``--config-path``, or None.
    """

    command: str
    config: RunConfig
    origins: Dict[str, str]
    record: "ModelRecord"
    data: "Optional[Choice]"
    preset: Optional[str]
    without_effect: Tuple[str, ...]
    typed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    plan: Optional[Plan] = None
    config_path: Optional[str] = None

    @property
    def choice(self) -> "Choice":
        """The data set, of a command that reads one.

        Raises:
            DataError: it was not found, which ``--print-config`` passes over.
        """
        if self.data is None:
            raise DataError(
                f"no data set for {self.config.model_name} was found here",
                "name it with --dataset, and its folder with --dataset-path",
            )
        return self.data

    def given(self, name: str) -> bool:
        """Whether a preset or flag gave the field ``name``."""
        return self.origins[name] != DEFAULT

    def public_note(self) -> Optional[str]:
        """The one line to print before a run with defaults of the public application, or None."""
        names = [spec for spec in SPECS if self.origins[spec.name] == PUBLIC_ORIGIN]
        if not names:
            return None
        values = ", ".join(
            f"{spec.key} {shown_value(spec.yaml_value(getattr(self.config, spec.name)))}" for spec in names
        )
        source = self.config_path or f"preset {self.preset}"
        return (
            f"note: {source} does not name these options, so they are Graphcore's public defaults: {values}"
        )

    def host_note(self) -> Optional[str]:
        """The one line to print before a host run about options without effect there, or None."""
        if not self.without_effect:
            return None
        keys = [key + " (in 32.32)" * BY_KEY[key].host_effect for key in self.without_effect]
        return "note: recorded, but without effect on the host: " + ", ".join(keys)


# Options that say where images come from, beside the data set's name.
_DATA_SOURCES = ("dataset_path", "host_generated_data", "device_generated_data")


def resolve(
    command: str,
    flags: Mapping[str, PlainValue],
    *,
    model: Optional[str] = None,
    config_name: Optional[str] = None,
    config_path: Optional[str] = None,
    reads_data: bool = True,
    needs_data: bool = True,
    below: Sequence[Tuple[str, Mapping[str, PlainValue]]] = (),
    read_plan: Optional[ReadPlan] = None,
) -> Resolved:
    """Resolves a run's configuration before TensorFlow is imported.

    Args:
        command: the command that runs it.
        flags: field name -> text (or value) of the flags that were given.
        model: the positional MODEL, if given.
        config_name: ``--config``.
        config_path: ``--config-path``.
        reads_data: False where this call of the command needs no data set, which may then be absent.
        needs_data: False where the data set is named but not read: where it is absent, nothing is chosen.
        below: further (origin, checked values) between the preset and the flags, the lowest first.
        read_plan: reads the file of ``--plan``; of a command that takes none, None.

    Raises:
        ConfigurationError: for a wrong value, key, name or combination.
        DataError: if a data set that was asked for is not there.
    """
    from ipucnn.config import presets
    from ipucnn.models.registry import find_network

    given = convert_flags(flags)
    if model is not None:
        _add_model(given, convert_value(BY_NAME["model_name"], model, "MODEL"))
    elif "model_name" not in given:
        _check_swallowed_model(command, given)
    chosen = presets.load_preset(config_name, config_path)
    in_file = dict(chosen.values) if chosen is not None else {}
    plan, in_plan = _load_plan(given.get("plan"), read_plan)
    if any(given.get(source) for source in _DATA_SOURCES):
        in_plan.pop("dataset", None)
    name = str(_first("model_name", given, in_file, in_plan))
    if "model_name" not in given:
        refuse_unnamed("the network", name, f"add --model-name {shlex.quote(name)}")
    record = find_network(name, plans=command in PLANS)
    between = [values for _, values in reversed(below)]
    if plan is not None:
        _check_plan_model(plan, str(given["plan"]), record)
    choice = None
    if reads_data:
        try:
            choice = _choose_dataset(command, record, given, in_plan, *between, in_file)
        except DataError:
            if needs_data:
                raise
    # Where no data are read, and none are named, the preset is the network's own, not one cut to a data set.
    named = choice.like or choice.name if choice is not None else _first("dataset", given, in_plan, in_file)
    dataset = named or record.home_dataset
    wanted = presets.candidates(record.name, named, given.get("ipus_per_replica"), command)
    preset = chosen or presets.find_built_in(*wanted)
    if preset is not None and preset.name.endswith("@folder") and given.get("weights") is not None:
        # Weights were trained on images of a size that is the network's, and not that of small photographs.
        kept = {name: value for name, value in preset.values.items() if name != "image_size"}
        preset = preset._replace(values=kept)
    layers: List[Tuple[str, Mapping[str, Any]]] = [*below, (FLAG, given)]
    if preset is not None:
        layers.insert(0, (f"preset {preset.name}", dict(preset.values)))
    is_public = chosen is not None and (config_path is not None or presets.is_of_application(chosen))
    if is_public and record.task == "classification":
        layers.insert(0, (PUBLIC_ORIGIN, _public_defaults(record, dataset, in_file)))
    if plan is not None:
        layers.insert(-1, (f"plan {given['plan']}", in_plan))
    settings, origins = overlay(layers)
    settings["model_name"] = record.name
    if settings["dataset"] is None and not (
        settings["host_generated_data"] or settings["device_generated_data"]
    ):
        settings["dataset"] = dataset
    for name in ("host_generated_data", "device_generated_data"):
        if settings["synthetic_data"] and settings[name]:
            raise ConfigurationError(
                f"synthetic-data {settings['synthetic_data']} and {BY_NAME[name].key} are two sources of the same data",
                f"drop {BY_NAME[name].flag}: with --synthetic-data nothing is read",
            )
    if origins["norm_layer"] == DEFAULT:
        settings["norm_layer"] = norm_layer_of(record.default_norm)
    _fix_order(settings, origins)
    _fix_preprocessing(settings, origins)
    _fix_kept(settings, origins, config_path)
    if chosen is None:
        _fix_validations(settings, origins)
    if command == "train" and record.own is not None:
        _fix_batch(settings, origins)
    config = RunConfig(**settings)
    check_paths(config)
    check(config)
    by_user = dict(in_file)
    for values in (*reversed(between), in_plan, given):
        by_user.update(values)
    # What came of it: of an option that another one displaced nothing is left that a continued run could contradict.
    by_user = {
        name: settings[name]
        for name in by_user
        if origins[name] != ORDER_ORIGIN
        and (origins[name] != DEFAULT or settings[name] != BY_NAME[name].default)
    }
    return Resolved(
        command=command,
        config=config,
        origins=origins,
        record=record,
        data=choice,
        preset=preset.name if preset is not None else None,
        without_effect=_without_effect(config, by_user),
        typed=by_user,
        plan=plan,
        config_path=config_path,
    )


def _public_defaults(record: "ModelRecord", dataset: str, named: Mapping[str, PlainValue]) -> PlainDict:
    """What a configuration in the public application's layout means by what it does not name.

    Args:
        record: of the network.
        dataset: that it is trained on.
        named: what the configuration says.
    """
    from ipucnn.datasets.registry import known_as

    values = dict(_PUBLIC_DEFAULTS)
    if "batch" not in record.norms:
        del values["norm_layer"]
    if "augment" not in named:  # normalising goes with it
        values.update(_PUBLIC_AUGMENTATION.get(str(known_as(dataset)), {}))
    per_epoch = named.get("ckpts_per_epoch")
    if per_epoch and per_epoch < 1:
        # It validates saved checkpoints, once training is over (its train.py): the figures of those epochs.
        values["validation_freq"] = round(1 / per_epoch)
    return {name: value for name, value in values.items() if name not in named}


def refuse_unnamed(what: str, name: str, hint: str) -> None:
    """Refuses a Python file that something else than the command line names: it may come from others.

    Args:
        what: it would be.
        name: that a preset, a plan or a run folder has.
        hint: what to do.

    Raises:
        ConfigurationError: it is the name of a function in a Python file.
    """
    from ipucnn.python_files import is_python_name

    if is_python_name(name):
        raise ConfigurationError(
            f"{what} is {shown_value(name)}, and a Python file is run only if the command line names it",
            f"if you trust it, {hint}",
        )


def _fix_order(settings: PlainDict, origins: Dict[str, str]) -> None:
    """Turns shuffling off where ``deterministic`` asks for the stored order.

    Raises:
        ConfigurationError: shuffling is typed.
    """
    if not (settings["deterministic"] and settings["shuffle"]):
        return
    if origins["shuffle"] == FLAG:
        raise ConfigurationError(
            "--shuffle contradicts deterministic, which trains on the samples in their stored order",
            "drop --shuffle, or add --no-deterministic",
        )
    settings["shuffle"], origins["shuffle"] = False, ORDER_ORIGIN


def _fix_preprocessing(settings: PlainDict, origins: Dict[str, str]) -> None:
    """Moves preprocessing to the device that is sent pixels of 8 bits.

    Raises:
        ConfigurationError: something says that it is to stay in the input pipeline.
    """
    name = "accelerator_side_preprocess"
    if not settings["eight_bit_transfer"] or settings[name]:
        return
    if origins[name] != DEFAULT:
        raise ConfigurationError(
            f"eight-bit-transfer with accelerator-side-preprocess False ({origins[name]}): normalised pixels do not go "
            "into 8 bits",
            "add --accelerator-side-preprocess, or --no-eight-bit-transfer",
        )
    settings[name], origins[name] = True, "eight-bit-transfer"


def _fix_kept(settings: PlainDict, origins: Dict[str, str], config_path: Optional[str]) -> None:
    """Keeps all checkpoints where somebody said how many are to be written: each of them may be wanted."""
    if origins["keep_checkpoints"] != DEFAULT:
        return
    if origins["ckpts_per_epoch"] == FLAG:
        settings["keep_checkpoints"], origins["keep_checkpoints"] = None, "ckpts-per-epoch"
    elif config_path is not None:
        settings["keep_checkpoints"], origins["keep_checkpoints"] = None, "config-path"


def _fix_validations(settings: PlainDict, origins: Dict[str, str]) -> None:
    """Validates at least five times in a run that is shorter than the preset's: else the best of one is no best."""
    name, most = "validation_freq", max(1, settings["num_epochs"] // LEAST_VALIDATIONS)
    if origins[name].startswith("preset ") and settings[name] > most:
        settings[name], origins[name] = most, "num-epochs"


def _fix_batch(settings: PlainDict, origins: Dict[str, str]) -> None:
    """Gives a network of the user's own, which has no preset, a global batch that batch norm can work with."""
    batch = ("micro_batch_size", "gradient_accumulation_count", "global_batch_size")
    if all(origins[name] == DEFAULT for name in batch):
        settings["micro_batch_size"] = max(1, OWN_GLOBAL_BATCH // settings["num_replicas"])
        origins["micro_batch_size"] = OWN_ORIGIN


def _load_plan(path: Optional[str], read_plan: Optional[ReadPlan]) -> Tuple[Optional[Plan], PlainDict]:
    """The plan in a file, and the options that run it; nothing for no file.

    Raises:
        DataError: not readable, or not a plan.
    """
    if path is None:
        return None, {}
    if read_plan is None:
        raise TypeError("this command has --plan, and does not say how it is read")
    plan = read_plan(expand(path), "--plan")
    options = {BY_KEY[key].name: value for key, value in plan.run_options().items()}
    values = {name: convert_value(BY_NAME[name], value, f"{path}: {name}") for name, value in options.items()}
    return plan, {**values, "model_name": plan.model}


def _check_plan_model(plan: Plan, path: str, record: "ModelRecord") -> None:
    if plan.model != record.name:
        raise ConfigurationError(
            f"--plan {path} is for {shown_value(plan.model)}, but the network is {record.name}",
            f"ipucnn plan-splits {record.name} --save FILE, or train {plan.model}",
        )


def resolve_saved(
    command: str, config: RunConfig, flags: Mapping[str, PlainValue], *, reads_data: bool = True
) -> Resolved:
    """Resolves a command on an existing run: its ``config.yml``, overridden by flags (evaluate, infer).

    The data set is chosen again, so that a flag can point to another one or another place; with ``reads_data``
    False none is.
    """
    from ipucnn.models.registry import get_model

    given = convert_flags(flags)
    saved = {spec.name: getattr(config, spec.name) for spec in SPECS}
    # Where training ran, and with which IPUs, says nothing of where another command runs.
    saved.update({name: BY_NAME[name].default for name in ("device", "select_ipu", "executable_cache")})
    settings, origins = overlay([(RUN_ORIGIN, saved), (FLAG, given)])
    record = get_model(settings["model_name"])
    choice = _choose_dataset(command, record, given, saved) if reads_data else None
    merged = RunConfig(**settings)
    check(merged)
    return Resolved(command, merged, origins, record, choice, None, _without_effect(merged, given))


# What a run may change when it is continued: where things are and how they are delivered, never what is computed.
RESUMABLE = (
    "dataset_path",
    "download",
    "device",
    "select_ipu",
    "on_demand",
    "executable_cache",
    "pipeline_num_parallel",
    "max_image_pixels",
    "run_dir",
    "resume",
    "overwrite",
    "dry_run",
    "plot_schedule",
    "checkpoint_dir",
    "checkpoint_input_dir",
    "keep_checkpoints",
    "num_epochs",
    "plan",  # what is in it is compared
    "target_accuracy",
    "early_stopping",
    "mlperf_logging",
    "wandb",
    "wandb_run_name",
    "wandb_tags",
    "devices",
    "max_workers",  # what it decides, how many micro-batches are fused, is in the program
    "start_timeout",
    "require_same_bytes",
    "trusted_network",
)

# Of those, what says when a run is over: one that was is continued where they have changed.
ENDS_RUN = ("num_epochs", "target_accuracy", "early_stopping")


CONTINUE_HINT = "drop it to continue that run as it was, or drop --resume and give another --run-dir"


def resolve_resumed(asked: Resolved, saved: RunConfig, run: str) -> Resolved:
    """The configuration of a run that is continued: the saved one, where nothing asked for contradicts it.

    Args:
        asked: what the command line stands for.
        saved: the run's own.
        run: its name, for messages.

    Raises:
        ConfigurationError: an option that would make another run of it.
    """
    from ipucnn.models.registry import folder_name, get_model

    for name, value in asked.typed.items():
        have = getattr(saved, name)
        if name == "model_name":
            # A file of one's own may have moved; its digest is compared with the checkpoint's.
            value, have = (folder_name(get_model(own).name) for own in (value, have))
        if name not in RESUMABLE and value != have:
            raise ConfigurationError(
                f"{BY_NAME[name].flag} {shown_value(value)}: the run in {run} has {shown_value(have)}",
                CONTINUE_HINT,
            )
    changes = {name: value for name, value in asked.typed.items() if name in RESUMABLE}
    config = dataclasses.replace(saved, **changes)
    check(config)
    settings = {spec.name: getattr(config, spec.name) for spec in SPECS}
    record = get_model(config.model_name)
    return dataclasses.replace(
        asked,
        config=config,
        origins=dict.fromkeys(settings, RUN_ORIGIN),
        record=record,
        data=_choose_dataset(asked.command, record, {"dataset": asked.typed.get("dataset")}, settings),
        preset=None,
    )


def convert_flags(flags: Mapping[str, PlainValue]) -> PlainDict:
    """Field name -> checked value of the flags, whose values are text (or lists of it) as typed.

    Raises:
        ConfigurationError: naming the flag, its value, the reason and the nearest legal value.
    """
    return {name: convert_value(BY_NAME[name], value, BY_NAME[name].flag) for name, value in flags.items()}


def overlay(layers: PlainValue) -> Tuple[PlainDict, Dict[str, str]]:
    """Lays (origin, values) pairs over the defaults, later ones over earlier ones.

    Returns:
        settings: field name -> value, for every field.
        origins: field name -> origin.
    """
    settings = {spec.name: spec.default for spec in SPECS}
    settings.update({name: dict(value) for name, value in settings.items() if isinstance(value, dict)})
    origins = dict.fromkeys(settings, DEFAULT)
    for origin, layer in layers:
        layer = dict(layer)
        for name, other in REPLACES:
            if name == "pipeline_splits" and layer.get(name) == (AUTO,):
                continue  # the layers are left open, not how many stages there are
            # 0 is a value: --logs-per-epoch 0 makes the whole run one execution.
            is_given = layer.get(name) is not None and layer[name] is not False
            if is_given and other not in layer:
                settings[other], origins[other] = BY_NAME[other].default, DEFAULT
        stages = layer.get("ipus_per_replica")
        if (
            stages is not None
            and "pipeline_splits" not in layer
            and len(settings["pipeline_splits"]) + 1 != stages
        ):
            for name in ("pipeline_splits", "device_mapping"):
                settings[name], origins[name] = BY_NAME[name].default, DEFAULT
        mapping = settings["device_mapping"]
        if stages is not None and "device_mapping" not in layer and mapping and max(mapping) + 1 != stages:
            settings["device_mapping"], origins["device_mapping"] = BY_NAME["device_mapping"].default, DEFAULT
        _replace_parameters("optimizer", "optimizer_params", layer, settings, origins)
        _replace_parameters("lr_schedule", "lr_schedule_params", layer, settings, origins)
        if layer.get("learning_rate") is not None and "lr_schedule_params" not in layer:
            # The absolute rate takes the place of the per-sample one below it; the other parameters stay.
            kept = dict(settings["lr_schedule_params"])
            kept.pop("initial_learning_rate", None)
            settings["lr_schedule_params"] = kept
        for name, value in layer.items():
            settings[name], origins[name] = value, origin
    return settings, origins


def _replace_parameters(
    name: str,
    params: str,
    layer: Dict[str, PlainValue],
    settings: Dict[str, PlainValue],
    origins: Dict[str, str],
) -> None:
    """Drops the parameters of a lower layer's optimizer or schedule when another one takes its place."""
    if name not in layer or params in layer or layer[name] == settings[name]:
        return
    lower = settings[params]
    settings[params], origins[params] = dict(BY_NAME[params].default), DEFAULT
    if params == "lr_schedule_params":
        # Every schedule starts from the initial learning rate.
        settings[params] = {key: rate for key, rate in lower.items() if key == "initial_learning_rate"}


def _add_model(given: Dict[str, PlainValue], model: str) -> None:
    named = given.get("model_name")
    if named is not None and named.lower().replace("_", "-") != model.lower().replace("_", "-"):
        raise ConfigurationError(
            f"two models are given: MODEL {shown_value(model)} and --model-name {shown_value(named)}",
            "give one of them",
        )
    given["model_name"] = model


def _check_swallowed_model(command: str, given: Mapping[str, PlainValue]) -> None:
    """A list option takes every word up to the next option, MODEL too if it comes last."""
    from ipucnn.models.registry import list_models

    splits = list(given.get("pipeline_splits") or ())
    if splits and splits[-1] in {record.name for record in list_models()}:
        raise ConfigurationError(
            f"--pipeline-splits: '{splits[-1]}' is a model, not a layer",
            f"put MODEL first: ipucnn {command} {splits[-1]} --pipeline-splits {' '.join(splits[:-1])}",
        )


def _first(name: str, *layers: Mapping[str, PlainValue]) -> Any:
    """The value of ``name`` in the first layer that has one, or its default."""
    for layer in layers:
        if layer.get(name) is not None:
            return layer[name]
    return BY_NAME[name].default


def _choose_dataset(
    command: str, record: "ModelRecord", *layers: Mapping[str, PlainValue]
) -> "Optional[Choice]":
    """The data set registry's choice; None for a command that reads no data, which may then be absent."""
    if command not in BY_NAME["dataset_path"].commands:
        return None
    from ipucnn.datasets import registry

    path = expand(_first("dataset_path", *layers))
    synthetic = _first("synthetic_data", *layers)
    if synthetic is not None:
        return registry.choose_synthetic(_first("dataset", *layers), record.task, synthetic)
    name = None
    for layer in layers:
        named = layer.get("dataset")
        if named is not None and layer is not layers[0]:
            refuse_unnamed("the data set", str(named), f"add --dataset {shlex.quote(str(named))}")
        sources = [name for name in ("host_generated_data", "device_generated_data") if layer.get(name)]
        given = [f"dataset {named}"] * (named is not None) + [BY_NAME[name].key for name in sources]
        if len(given) > 1:
            raise ConfigurationError(f"{' and '.join(given)} are both given", "give one of them")
        generated = bool(sources)
        if named is not None or generated:
            name = "random" if generated else named
            break
    return registry.choose_dataset(
        name,
        path,
        home=record.home_dataset,
        task=record.task,
        download=bool(_first("download", *layers)),
        divides=True,
        reads_files=not layers[0].get("dry_run"),
    )


def _without_effect(config: RunConfig, by_user: Mapping[str, PlainValue]) -> Tuple[str, ...]:
    idle = OF_16_BITS if config.precision == "32.32" else ()
    return tuple(
        spec.key
        for spec in SPECS
        if (not spec.host_effect or spec.name in idle)
        and spec.name in by_user
        and getattr(config, spec.name) != spec.default
    )


# Rules between options that need no arithmetic; batches and pipelines are checked by ``training.program``.


# What options that take a path call it in their help.
_PATHS = ("DIR", "FILE", "PATH")


def check_paths(config: RunConfig) -> None:
    """Refuses what no path can be, in every option that takes one; nothing need be there.

    Not for saved configurations: what they name may have been on another machine.

    Raises:
        ConfigurationError: empty, or ``~`` and a user who is not here.
        DataError: too long, with a NUL, or in a folder that may not be searched.
    """
    for spec in SPECS:
        path = getattr(config, spec.name)
        if path is not None and spec.metavar.startswith(_PATHS):
            try:
                expand(path)
            except UserError as error:
                raise type(error)(f"{spec.flag} {error.message}", error.hint) from None


def check(config: RunConfig) -> None:
    """Refuses combinations that are illegal whatever the model and data.

    Raises:
        ConfigurationError: naming both options and what to give instead.
    """
    if config.learning_rate is not None and "initial_learning_rate" in config.lr_schedule_params:
        raise ConfigurationError(
            f"learning-rate {config.learning_rate:g} (absolute) and initial_learning_rate "
            f"{shown_value(config.lr_schedule_params['initial_learning_rate'])} (per sample) are both given",
            "give one of --learning-rate and --lr-schedule-params with initial_learning_rate",
        )
    if config.steps_per_execution is not None and config.logs_per_epoch != RunConfig().logs_per_epoch:
        raise ConfigurationError(
            f"steps-per-execution {config.steps_per_execution} and logs-per-epoch {config.logs_per_epoch:g} are "
            "both given, and each sets the length of an execution",
            "give one of --steps-per-execution and --logs-per-epoch",
        )
    if config.optimizer == "lars" and config.weight_decay:
        raise ConfigurationError(
            f"weight-decay {config.weight_decay:g} is not LARS's: it has its own, inside the trust ratio",
            f"give it with --optimizer-params '{{\"weight_decay\": {config.weight_decay:g}}}'",
        )
    if not config.training and not config.validation:
        raise ConfigurationError(
            "neither training nor validation: nothing to do", "drop one of the two flags"
        )
    if config.fold is not None and (config.kfold is None or config.fold > config.kfold):
        if config.kfold is None:
            raise ConfigurationError(
                f"--fold {config.fold} without --kfold", "for example --kfold 5 --fold 5"
            )
        raise ConfigurationError(
            f"--fold {config.fold} of --kfold {config.kfold}", f"folds are numbered from 1 to {config.kfold}"
        )
    if AUTO in config.pipeline_splits and len(config.pipeline_splits) > 1:
        raise ConfigurationError(
            "pipeline-splits: 'auto' stands for all of them, but others are given too", "give auto, or layers"
        )
    repeated = [name for name, count in Counter(config.pipeline_splits).items() if count > 1]
    if repeated:
        raise ConfigurationError(
            f"pipeline-splits: '{shown_value(repeated[0])}' opens two stages",
            "name each layer once, in the network's order",
        )
