"""Resolves flags, a preset and the defaults to one RunConfig, and records the origin of each value.

Defaults < public defaults < preset < plan < flags (``origin.Giver``); for a saved run, its configuration < flags.  The
preset is the one that ``--config`` names, else the built-in one of the model and data set.  If two options replace each
other, one that is given in a higher layer drops the other from the lower layers.
"""

import contextlib
import copy
import dataclasses
import itertools
import os
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Container,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Protocol,
    Tuple,
)

from ipucnn.aliases import PlainDict, PlainValue
from ipucnn.config.options import AUTO, BY_KEY, BY_NAME, SPECS, RunConfig
from ipucnn.config.origin import (
    DEFAULT,
    NETWORK,
    OWN_NETWORK,
    PUBLIC,
    RUN,
    TYPED,
    Giver,
    Origin,
    implied,
    of_plan,
    of_preset,
)
from ipucnn.config.rules import check
from ipucnn.config.spec import Effect, OptionSpec, check_paths, convert_value
from ipucnn.config.values import norm_layer_of
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.text import quoted, shown_value

if TYPE_CHECKING:
    from ipucnn.config.presets import Preset
    from ipucnn.datasets.registry import ChosenDataset
    from ipucnn.models.registry import ModelRecord

OF_16_BITS = ("stochastic_rounding", "nanoo", "auto_loss_scaling")
"""Options that have no effect in 32 bits, on any device."""
OF_VALIDATIONS = ("validation_micro_batch_size", "validation_num_replicas", "pipeline_validation_model")
"""Options of forward passes, which a preset gives only to the commands that have them."""
OWN_GLOBAL_BATCH = 32
INITIAL_RATE = "initial_learning_rate"
LEAST_VALIDATIONS = 5
_OF_PLACE = ("dataset", "dataset_path")
PLANS = ("plan-splits",)
"""Commands that plan MODEL, and avoid building it if they can."""
# Defaults of Graphcore's public application that differ from ipucnn's and change what a run computes
# (vision/cnns/tensorflow2/configuration/terminal_argparse.py of graphcore/examples).  A configuration in its layout
# gets them for all options that it does not name.
_PUBLIC_DEFAULTS: PlainDict = {
    "precision": "16.16",
    "stochastic_rounding": "ON",
    "norm_layer": {"name": "custom_batch_norm", "momentum": 0.97},
    "prefetch_depth": 1,
}
# What the application does to the training images of a data set, regardless of its files.
_PUBLIC_AUGMENTATION: Dict[str, PlainDict] = {
    "cifar10": {"augment": True, "normalise": "image"},
    "cifar100": {"augment": True, "normalise": "image"},
    "imagenet": {"augment": True},
}

# Options that replace each other: the first in a higher layer drops the second from the lower ones.
REPLACES = (
    ("gradient_accumulation_count", "global_batch_size"),
    ("global_batch_size", "gradient_accumulation_count"),
    ("logs_per_epoch", "steps_per_execution"),
    ("steps_per_execution", "logs_per_epoch"),
    ("ipus", "num_replicas"),
    ("num_replicas", "ipus"),
    *itertools.permutations(("dataset", "host_generated_data", "device_generated_data"), 2),
    ("pipeline_splits", "device_mapping"),
    ("pipeline_splits", "ipus_per_replica"),
    ("lr_schedule_params", "learning_rate"),
)


class Plan(Protocol):
    """The part of a plan file (``--plan``) that a configuration uses."""

    @property
    def model(self) -> str:
        """The network of the plan."""

    def run_options(self) -> PlainDict:
        """Returns YAML keys and values of the options that run the plan."""


Layer = Tuple[Origin, Mapping[str, Any]]
"""(origin of the values, field name -> checked value)."""
ReadPlan = Callable[[Path], Plan]
"""Function from a file to the plan in it; raises a DataError if it is no plan."""


@dataclasses.dataclass(frozen=True)
class Resolved:
    """The resolved configuration of a run.

    Attributes:
        command: the command it is for, e.g. ``train``.
        config: every option, validated.
        origins: field name -> who gave its value.
        record: the model's registry record.
        data: the chosen data set; its ``message`` names it and explains how to choose another.  None for commands that
            read no data set (infer, plan-splits), and in a suite if the data set is absent.
        preset: the name of the preset that was applied, or None.
        plan: the plan of ``--plan``, or None.
        config_path: the file of ``--config-path``, or None.
        left_out: what a run that continues does not take over from the command line, and what a file of presets has
            beside them, a sentence each.
    """

    command: str
    config: RunConfig
    origins: Dict[str, Origin]
    record: "ModelRecord"
    data: "Optional[ChosenDataset]"
    preset: Optional[str]
    plan: Optional[Plan] = None
    config_path: Optional[Path] = None
    left_out: Tuple[str, ...] = ()

    @property
    def choice(self) -> "ChosenDataset":
        """The data set of a command that reads one.

        Raises:
            DataError: it was not found, which ``--print-config`` ignores.
        """
        if self.data is None:
            raise DataError(
                f"no data set for {self.config.model_name} was found here",
                "name it with --dataset, and its folder with --dataset-path",
            )
        return self.data

    def typed_for_updates(self, others: Container[str]) -> List[str]:
        """Returns the typed options of weight updates alone, or among the others, that are not the default."""
        return [
            spec.key
            for spec in SPECS
            if (spec.updates_only or spec.name in others)
            and self.origins[spec.name].is_typed
            and getattr(self.config, spec.name) != spec.default
        ]

    def notes(self, on_ipus: bool) -> List[str]:
        """Returns the lines to print before the work.

        They are about options that are left out, the data set, public defaults, and options without effect on a host.
        Options without effect are those that the user gave and that act only on an IPU, or only in 16 bits.
        """
        lines = [*self.left_out, *([] if self.data is None else [self.data.message])]
        public = [
            f"{spec.key} {shown_value(spec.yaml_value(getattr(self.config, spec.name)))}"
            for spec in SPECS
            if self.origins[spec.name] == PUBLIC
        ]
        if public:
            source = self.config_path or f"preset {self.preset}"
            lines.append(
                f"note: {source} does not name these options, so they are Graphcore's public defaults: "
                + ", ".join(public)
            )
        if self.origins["kfold"].is_typed and self.config.kfold is None:
            lines.append("note: no folds: --kfold 1 is one run on the data set's own split")
        idle = OF_16_BITS if self.config.precision == "32.32" else ()
        without_effect = [
            spec.key + " (in 32.32)" * spec.host_effect
            for spec in SPECS
            if (not spec.host_effect or spec.name in idle)
            and self.origins[spec.name].by_user
            and getattr(self.config, spec.name) != spec.default
        ]
        if without_effect and not on_ipus:
            lines.append("note: recorded, but without effect on the host: " + ", ".join(without_effect))
        return lines


def resolve(
    command: str,
    flags: Mapping[str, PlainValue],
    *,
    model: Optional[str] = None,
    config_name: Optional[str] = None,
    config_path: Optional[Path] = None,
    reads_data: bool = True,
    needs_data: bool = True,
    read_plan: Optional[ReadPlan] = None,
) -> Resolved:
    """Resolves a run's configuration before TensorFlow is imported.

    Args:
        command: the command that runs it.
        flags: field name -> text (or value) of the flags that were given.
        model: the positional MODEL, if given.
        config_name: ``--config``.
        config_path: ``--config-path``.
        reads_data: False if this call of the command needs no data set; none is then chosen.
        needs_data: False if the data set is named but not read; if it is absent, none is chosen.
        read_plan: function that reads the file of ``--plan``; None for a command that takes none.

    Raises:
        ConfigurationError: a wrong value, key, name or combination.
        DataError: a data set that was requested does not exist.
    """
    from ipucnn.config import presets
    from ipucnn.datasets.formats import TFDS_PREFIX

    given = convert_flags(flags)
    _take_model(command, given, model)
    chosen = presets.load_preset(config_name, config_path)
    in_file = dict(chosen.values) if chosen is not None else {}
    plan, in_plan = _load_plan(given, read_plan)
    record = _find_network(command, given, in_file, in_plan)
    choice = None
    if reads_data:
        try:
            choice = _choose_dataset(command, record, given, in_plan, in_file)
        except DataError:
            if needs_data:
                raise
    named = _first("dataset", given, in_plan, in_file) if choice is None else choice.like or choice.name
    dataset = named or record.home_dataset
    # Without data the preset is the network's own.  Arrays, functions and sets that only TFDS knows get that of files,
    # without its image size.
    has_a_size = choice is not None and choice.make is not None
    of_files = "imagemasks" if record.task == "segmentation" else "imagefolder"
    suited = named
    if named is not None and named.lower().startswith(TFDS_PREFIX):
        from ipucnn.datasets.registry import known_as

        suited = known_as(named)
        has_a_size = suited is None
    if has_a_size:
        suited = of_files
    preset = chosen or presets.find_built_in(
        *presets.candidates(record.name, suited, given.get("ipus_per_replica"), command)
    )
    if preset is not None:
        without = {name for name in OF_VALIDATIONS if command not in BY_NAME[name].commands}
        if preset.name.endswith("@folder") and (has_a_size or given.get("weights") is not None):
            # The weights were trained on images of the network's size, not on small photographs.
            without.add("image_size")
        if command in ("evaluate", "infer", "export") and record.task == "classification":
            # These resolve a network only for weights of Keras, which no preset trained; a run has its configuration.
            without |= {"image_size", "label_smoothing"}
        kept = {name: value for name, value in preset.values.items() if name not in without}
        preset = preset._replace(values=kept)
    layers: List[Layer] = []
    is_public = chosen is not None and (config_path is not None or presets.is_of_application(chosen))
    if is_public and record.task == "classification":
        layers.append((PUBLIC, _public_defaults(record, dataset, in_file)))
    if preset is not None:
        flags_given = {"--config": config_name, "--config-path": config_path}
        named_with = " and ".join(flag for flag, value in flags_given.items() if value is not None)
        layers.append((of_preset(preset.name, named_with), preset.values))
    layers += [(of_plan(str(given.get("plan"))), in_plan), (TYPED, given)]
    settings, origins = overlay(layers)
    settings["model_name"] = record.name
    if not any(settings[name] for name in ("dataset", "host_generated_data", "device_generated_data")):
        settings["dataset"] = dataset
        origins["dataset"] = NETWORK if dataset == record.home_dataset else implied("dataset-path")
    check(RunConfig(**settings), origins, command)
    for name, value, origin in _implied(command, record, settings, origins, config_path):
        settings[name], origins[name] = value, origin
    return Resolved(
        command=command,
        config=RunConfig(**settings),
        origins=origins,
        record=record,
        data=choice,
        preset=preset.name if preset is not None else None,
        plan=plan,
        config_path=config_path,
        left_out=_beside_presets(chosen, config_path),
    )


def _beside_presets(chosen: "Optional[Preset]", config_path: Optional[Path]) -> Tuple[str, ...]:
    """Returns the sentence about options of a user's file that belong to none of its presets, if it has any."""
    if chosen is None or config_path is None or not chosen.beside:
        return ()
    keys = ", ".join(map(shown_value, chosen.beside))
    return (f"note: {chosen.source}: outside of a preset, so not read: {keys}",)


def _find_network(command: str, given: PlainDict, in_file: PlainDict, in_plan: PlainDict) -> "ModelRecord":
    """Returns the record of the network that the flags name, else the file, else the plan.

    Raises:
        ConfigurationError: a Python file that is not typed, or the plan of another network.
    """
    from ipucnn.models.registry import find_network

    network = str(_first("model_name", given, in_file, in_plan))
    if "model_name" not in given:
        refuse_unnamed("the network", network, f"add --model-name {quoted(network)}")
    record = find_network(network, plans=command in PLANS)
    planned = in_plan.get("model_name", record.name)
    if planned != record.name:
        raise ConfigurationError(
            f"--plan {given['plan']} is for {shown_value(planned)}, but the network is {record.name}",
            f"ipucnn plan-splits {quoted(record.name)} --save FILE, or train {quoted(planned)}",
        )
    return record


def _take_model(command: str, given: PlainDict, model: Optional[str]) -> None:
    """Adds the argument MODEL to the flags.

    Raises:
        ConfigurationError: it is given twice, or a list option took it for one of its values.
    """
    from ipucnn.models.registry import list_models

    named = given.get("model_name")
    if model is not None:
        given["model_name"] = convert_value(BY_NAME["model_name"], model, "MODEL")
        spellings = {
            name.lower().replace("_", "-") for name in (named, given["model_name"]) if name is not None
        }
        if len(spellings) > 1:
            raise ConfigurationError(
                f"two models are given: MODEL {shown_value(model)} and --model-name {shown_value(named)}",
                "give one of them",
            )
    splits = given.get("pipeline_splits")
    if "model_name" not in given and splits and splits[-1] in {record.name for record in list_models()}:
        # A list option takes every word up to the next option.
        raise ConfigurationError(
            f"--pipeline-splits: '{splits[-1]}' is a model, not a layer",
            " ".join(
                ["put MODEL first: ipucnn", command, splits[-1]]
                + (["--pipeline-splits", *map(quoted, splits[:-1])] if splits[1:] else [])
            ),
        )


def _public_defaults(record: "ModelRecord", dataset: str, named: Mapping[str, PlainValue]) -> PlainDict:
    """Returns the values that a configuration in the public application's layout implies for options it does not name.

    Args:
        record: the network's record.
        dataset: the data set that it is trained on.
        named: the options that the configuration names.
    """
    from ipucnn.datasets.registry import known_as

    values = dict(_PUBLIC_DEFAULTS)
    if "batch" not in record.norms:
        del values["norm_layer"]
    if "augment" not in named:  # normalise is set together with augment
        values.update(_PUBLIC_AUGMENTATION.get(str(known_as(dataset)), {}))
    per_epoch = named.get("ckpts_per_epoch")
    if per_epoch and per_epoch < 1:
        # The application validates saved checkpoints after training (its train.py); the same epochs are validated here.
        values["validation_freq"] = round(1 / per_epoch)
    return {name: value for name, value in values.items() if name not in named}


def refuse_unnamed(what: str, name: str, hint: str) -> None:
    """Refuses a Python file that is not named on the command line, because it may come from others.

    Args:
        what: role of the file, for the message.
        name: name in a preset, a plan or a run folder.
        hint: remedy.

    Raises:
        ConfigurationError: it is the name of a function in a Python file.
    """
    from ipucnn.python_files import is_python_name

    if is_python_name(name):
        raise ConfigurationError(
            f"{what} is {shown_value(name)}, and a Python file is run only if the command line names it",
            f"if you trust it, {hint}",
        )


def _implied(
    command: str,
    record: "ModelRecord",
    settings: PlainDict,
    origins: Dict[str, Origin],
    config_path: Optional[Path],
) -> Iterator[Tuple[str, Any, Origin]]:
    """Yields (field name, value, origin) of values that follow from other options and that nobody gave."""
    if origins["norm_layer"] == DEFAULT:
        yield "norm_layer", norm_layer_of(record.default_norm), NETWORK
    if settings["deterministic"] and settings["shuffle"]:
        yield "shuffle", False, implied("deterministic")
    if settings["eight_bit_transfer"] and not settings["accelerator_side_preprocess"]:
        yield "accelerator_side_preprocess", True, implied("eight-bit-transfer")
    is_typed = origins["ckpts_per_epoch"].is_typed
    if origins["keep_checkpoints"] == DEFAULT and (is_typed or config_path is not None):
        # Somebody chose how many checkpoints are written, so all of them are kept.
        yield "keep_checkpoints", None, implied("ckpts-per-epoch" if is_typed else "config-path")
    # At least five validations, also in a run shorter than the preset's: one validation has no best.
    most = max(1, settings["num_epochs"] // LEAST_VALIDATIONS)
    if origins["validation_freq"].giver is Giver.PRESET and settings["validation_freq"] > most:
        yield "validation_freq", most, implied("num-epochs")
    # A user's own network has no preset; it gets a global batch that suits batch norm.
    batch = ("micro_batch_size", "gradient_accumulation_count", "global_batch_size")
    if command == "train" and record.own is not None and all(origins[name] == DEFAULT for name in batch):
        # A run corrects it by its exact replicas, and by the number of its training samples.
        ipus_per_replica = settings["ipus_per_replica"] or len(settings["pipeline_splits"]) + 1
        replicas = (settings["ipus"] or 0) // ipus_per_replica or settings["num_replicas"]
        yield "micro_batch_size", max(1, OWN_GLOBAL_BATCH // replicas), OWN_NETWORK


def _load_plan(given: PlainDict, read_plan: Optional[ReadPlan]) -> Tuple[Optional[Plan], PlainDict]:
    """Returns the plan that ``--plan`` names and the options that run it; None and no options without ``--plan``.

    Raises:
        DataError: the file is not readable, or not a plan.
    """
    path = given.get("plan")
    if path is None:
        return None, {}
    assert read_plan is not None, "the command has --plan"
    plan = read_plan(path)
    options = {BY_KEY[key].name: value for key, value in plan.run_options().items()}
    values = {name: convert_value(BY_NAME[name], value, f"{path}: {name}") for name, value in options.items()}
    if any(given.get(source) for source in ("dataset_path", "host_generated_data", "device_generated_data")):
        values.pop("dataset", None)
    return plan, {**values, "model_name": plan.model}


def resolve_saved(
    command: str, config: RunConfig, flags: Mapping[str, PlainValue], *, reads_data: bool = True
) -> Resolved:
    """Resolves a command on an existing run (evaluate, infer): its ``config.yml``, overridden by flags.

    The data set is chosen again, so that a flag can change it or its folder; if ``reads_data`` is False, none is
    chosen.
    """
    from ipucnn.models.registry import get_model

    given = convert_flags(flags)
    saved = {spec.name: getattr(config, spec.name) for spec in SPECS}
    # The devices of training do not determine those of another command.
    saved.update({name: BY_NAME[name].default for name in ("device", "select_ipu", "executable_cache")})
    settings, origins = overlay([(RUN, saved), (TYPED, given)])
    record = get_model(settings["model_name"])
    choice = _choose_dataset(command, record, given, saved) if reads_data else None
    merged = RunConfig(**settings)
    check(merged, origins, command)
    return Resolved(command, merged, origins, record, choice, preset=None)


def resolve_resumed(requested: Resolved, saved: RunConfig, run: str) -> Resolved:
    """Returns the configuration of a run that is continued: the saved one, unless a requested option contradicts it.

    Args:
        requested: the resolved command line.
        saved: the run's own configuration.
        run: its name, for messages.

    Raises:
        ConfigurationError: an option would change what the run computes.
    """
    from ipucnn.datasets.registry import is_folder_name
    from ipucnn.models.registry import get_model

    changes: PlainDict = {}
    left_out: List[str] = []
    for spec in SPECS:
        origin, value = requested.origins[spec.name], getattr(requested.config, spec.name)
        saved_value = getattr(saved, spec.name)
        if not origin.overrides_run:
            continue
        if spec.name == "dataset" and is_folder_name(value) and is_folder_name(saved_value):
            changes[spec.name] = value  # The files may have moved; they are compared by their content.
        elif spec.effect is Effect.RESULT:
            _check_unchanged(spec, origin, value, saved_value, run)
        elif value == saved_value:
            continue
        elif spec.effect is not Effect.START:
            changes[spec.name] = value
        else:
            left_out.append(
                f"{origin.option(spec.flag, spec.typed_text(value))} is left out: the run keeps "
                f"{spec.typed_text(saved_value)}, with which it began"
            )
    config = dataclasses.replace(saved, **changes)
    settings = {spec.name: getattr(config, spec.name) for spec in SPECS}
    origins = {**dict.fromkeys(settings, RUN), **{name: requested.origins[name] for name in changes}}
    check(config, origins, requested.command)
    record = get_model(config.model_name)
    is_named = requested.origins["dataset"].overrides_run
    named = {"dataset": requested.config.dataset if is_named else None, "dry_run": config.dry_run}
    typed = {key: getattr(requested.config, key) for key in _OF_PLACE if requested.origins[key].overrides_run}
    model = "" if requested.origins["model_name"].by_user else saved.model_name
    with place_of_data(saved, typed, run, model):
        data = _choose_dataset(requested.command, record, named, settings)
    return dataclasses.replace(
        requested,
        config=config,
        origins=origins,
        record=record,
        data=data,
        preset=None,
        left_out=(*requested.left_out, *left_out),
    )


@contextlib.contextmanager
def place_of_data(
    saved: RunConfig, given: Mapping[str, PlainValue], run: str, model: str = ""
) -> Iterator[None]:
    """Adds to the error that ends the block, because a run's data set is not found, how to say where it is.

    Args:
        saved: the run's configuration.
        given: the options of the command line.
        run: its folder, or its checkpoint.
        model: the network, if the command line must name it with the data; "" otherwise.
    """
    try:
        yield
    except (ConfigurationError, DataError) as error:
        raise type(error)(error.message, _hint_of_place(saved, given, run, model) or error.hint) from error


def _hint_of_place(saved: RunConfig, given: Mapping[str, PlainValue], run: str, model: str) -> str:
    """Returns a hint if the data of a run lie elsewhere than it says, as seen from here; "" if that is not known."""
    from ipucnn.datasets.registry import is_folder_name

    is_outside = os.path.relpath(run).startswith(os.pardir)
    if is_folder_name(saved.dataset):
        flag, place = "--dataset", str(saved.dataset)
        # "." and ".." are there wherever the command is typed.
        is_anywhere = os.path.normpath(place).split(os.sep)[0] in (os.curdir, os.pardir)
        if given.get("dataset") is not None or (Path(place).expanduser().is_dir() and not is_anywhere):
            return ""
    else:
        flag, place = "--dataset-path", str(saved.dataset_path)
        is_anywhere = False
        is_given = given.get("dataset") is not None or given.get("dataset_path") is not None
        if is_given or os.path.isabs(os.path.expanduser(place)) or not is_outside:
            return ""
    is_elsewhere = (is_outside or is_anywhere) and not os.path.isabs(os.path.expanduser(place))
    trained = f"the run was trained with {flag} {shown_value(place)}{' in another folder' * is_elsewhere}"
    words = f"{quoted(model)} {flag}" if model else flag
    for folder in Path(os.path.abspath(run)).parents:
        nearby = os.path.relpath(folder / place)
        # The parent folder itself is no answer: the run does not name it.
        if not is_anywhere and os.path.normpath(place) != os.curdir and Path(nearby).is_dir():
            return f"{trained}; from here, add {words} {quoted(nearby)}"
    return f"{trained}; add {words} DIR with the place of its data as seen from here"


def _check_unchanged(
    spec: OptionSpec, origin: Origin, value: PlainValue, saved: PlainValue, run: str
) -> None:
    """Refuses another value of an option than the one with which a run began."""
    from ipucnn.models.registry import folder_name, get_model

    if spec.name == "model_name":
        # A user's own file may have moved; its digest is compared with the checkpoint's.
        value, saved = (folder_name(get_model(str(network)).name) for network in (value, saved))
    if value == saved:
        return
    text, saved_text = (
        shown_value(spec.typed_text(each)) or ("none" if each is None else "''") for each in (value, saved)
    )
    dropped = f"drop {origin.named_with or 'it'} to continue that run as it was, or "
    raise ConfigurationError(
        f"{origin.option(spec.flag, text)}: the run in {run} has {saved_text}",
        f"{dropped * origin.by_user}drop --resume and give another --run-dir",
    )


def convert_flags(flags: Mapping[str, PlainValue]) -> PlainDict:
    """Returns field name -> checked value of the flags, whose values are text (or lists of it) as typed.

    Raises:
        ConfigurationError: the message has the flag, its value, the reason and the nearest legal value.
    """
    given = {name: convert_value(BY_NAME[name], value, BY_NAME[name].flag) for name, value in flags.items()}
    for name, value in given.items():
        check_paths(BY_NAME[name], value, BY_NAME[name].flag)
    return given


def overlay(layers: Iterable[Layer]) -> Tuple[PlainDict, Dict[str, Origin]]:
    """Overlays the defaults with (origin, values) pairs; later ones override earlier ones.

    Returns:
        settings: field name -> value, for every field.
        origins: field name -> origin.
    """
    settings: PlainDict = {}
    origins: Dict[str, Origin] = {}

    def drop(*names: str) -> None:
        for name in names:
            settings[name], origins[name] = copy.copy(BY_NAME[name].default), DEFAULT

    drop(*BY_NAME)
    for origin, layer in layers:
        for name, other in REPLACES:
            value = layer.get(name)
            # 0 is a value: --logs-per-epoch 0 makes the whole run one execution.  auto lets the planner choose layers,
            # but does not change the number of stages.
            if value is not None and value is not False and value != (AUTO,) and other not in layer:
                drop(other)
        stages = layer.get("ipus_per_replica")
        if stages is not None:
            if "pipeline_splits" not in layer and len(settings["pipeline_splits"]) + 1 != stages:
                drop("pipeline_splits", "device_mapping")
            mapping = settings["device_mapping"]
            if mapping and max(mapping) + 1 != stages:
                drop("device_mapping")
        for name, params in (("optimizer", "optimizer_params"), ("lr_schedule", "lr_schedule_params")):
            if name in layer and params not in layer and layer[name] != settings[name]:
                if params == "optimizer_params":
                    drop(params)
                else:
                    # Every schedule starts from the initial learning rate, and whoever gave that one gives it here.
                    rate = settings[params].get(INITIAL_RATE)
                    settings[params] = {} if rate is None else {INITIAL_RATE: rate}
        if layer.get("lr_schedule") == "stepped" and "learning_rate" not in layer:
            drop("learning_rate")
        if layer.get("learning_rate") is not None and "lr_schedule_params" not in layer:
            # The absolute rate replaces the per-sample one of lower layers; the other parameters stay.
            settings["lr_schedule_params"].pop(INITIAL_RATE, None)
        for name, value in layer.items():
            settings[name], origins[name] = copy.copy(value), origin
    return settings, origins


def _first(name: str, *layers: Mapping[str, PlainValue]) -> Any:
    """Returns the value of ``name`` in the first layer that has one, or its default."""
    for layer in layers:
        if layer.get(name) is not None:
            return layer[name]
    return BY_NAME[name].default


def _choose_dataset(
    command: str, record: "ModelRecord", *layers: Mapping[str, PlainValue]
) -> "Optional[ChosenDataset]":
    """Returns the data set registry's choice; None for a command that reads no data, which may then be absent."""
    if command not in BY_NAME["dataset_path"].commands:
        return None
    from ipucnn.datasets import registry

    path = _first("dataset_path", *layers)
    synthetic = _first("synthetic_data", *layers)
    if synthetic is not None:
        return registry.choose_synthetic(_first("dataset", *layers), record.task, synthetic)
    name = None
    for layer in layers:
        named = layer.get("dataset")
        if named is not None and layer is not layers[0]:
            refuse_unnamed("the data set", str(named), f"add --dataset {quoted(named)}")
        if layer.get("host_generated_data") or layer.get("device_generated_data"):
            named = "random"
        if named is not None:
            name = named
            break
    return registry.choose_dataset(
        name,
        path,
        home=record.home_dataset,
        task=record.task,
        download=bool(_first("download", *layers)),
        reads_files=not layers[0].get("dry_run"),
        # A run that is continued has its data set, whatever is here.
        is_path_typed=layers[0].get("dataset_path") is not None and not layers[0].get("resume"),
    )
