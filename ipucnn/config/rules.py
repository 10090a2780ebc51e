"""The rule: a combination of options that is refused.  Here is its type, and the table of those that need only options.

Each layer has a table of its own: ``runs.rules`` for what depends on the network and the device, and for exports and
predictions; ``planning.rules``, ``benchmarking.rules`` and ``commands.rules`` for the commands' own options.
``training.program`` checks what needs the Program's arithmetic, and ``sessions.poplar.checks`` what IPUs add to that.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import (
    Any,
    Callable,
    Dict,
    Generic,
    Iterable,
    Iterator,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
)

from ipucnn.config.options import AUTO, BY_NAME, SPECS, RunConfig
from ipucnn.config.origin import RUN, Origins
from ipucnn.config.spec import check_paths
from ipucnn.errors import ConfigurationError
from ipucnn.text import shown_value

Options = TypeVar("Options")
"""The dataclass of the options that rules are about: the configuration of a run, or options of a command."""
Facts = TypeVar("Facts")
"""What the rules of a layer depend on, besides the options."""


def is_set(value: object) -> bool:
    """Returns whether an option whose default is None, False or an empty list has a value, which may be 0."""
    return value is not None and value is not False and value != ()


def _nothing(options: object, facts: object) -> Dict[str, Any]:
    return {}


@dataclass(frozen=True)
class _Drop:
    """The words of a hint that take away an option's value, whoever gave it: ``{drop[NAME]}`` in a hint.

    A typed flag is left out.  A value that a preset, a plan or a run gave is overridden by the default, or taken out of
    the preset if the command has no such flag.
    ``{drop[A|B]}`` takes away one of two values, ``{drop[A&B]}`` all that are not the default, and ``{drop[it]}``
    that of the option that the message begins with.

    Attributes:
        config: the configuration.
        origins: the origins of its values.
        command: the command.
        option: the name of the rule's own option.
    """

    config: RunConfig
    origins: Origins
    command: str
    option: str = ""

    def __getitem__(self, names: str) -> str:
        if names == "it":
            return "drop it" if self.origins[self.option].is_typed else self._one(self.option)
        if "&" in names:
            given = (n for n in names.split("&") if getattr(self.config, n) != BY_NAME[n].default)
            return " and ".join(map(self._one, given)).replace(" and drop ", " and ")
        typed = [name for name in names.split("|") if self.origins[name].is_typed]
        if len(typed) > 1:
            return "drop one of them"
        return self._one(*typed or names.split("|")[:1])

    def _one(self, name: str) -> str:
        spec = BY_NAME[name]
        is_off = getattr(self.config, name) is False
        if self.origins[name].is_typed:
            return f"drop {spec.off_flags[0] if is_off else spec.flag}"
        if self.command not in spec.commands:
            return f"take {spec.key} out of {self.origins[name]}"
        if spec.is_bool:
            return f"add {spec.flag if is_off else spec.off_flags[0]}"
        return f"add {spec.flag} {spec.typed_text(spec.default) or 'none'}"


@dataclass(frozen=True)
class Rule(Generic[Options, Facts]):
    """A combination of options that is refused.

    Attributes:
        applies: function that decides from options and facts whether it is present.
        message: the error, for ``str.format`` with the values of all options, ``option`` (the rule's own option as it
            is typed, or with its giver), ``origins`` and the values of ``texts``.
        hint: the remedy, likewise; ``drop`` has the words that take away an option's value (:class:`_Drop`).
        option: name of the option of runs that the rule is about: unless it is set, the rule does not apply.  Empty:
            none.
        has_off: whether the default, or False, switches the option off, so that it may be typed in every run.
        typed_only: whether the option counts as set only if it is typed.  Presets, plans and saved configurations also
            carry options for other runs.
        texts: function from options and facts to further values.
    """

    applies: Callable[[Options, Facts], bool]
    message: str
    hint: str
    option: str = ""
    has_off: bool = True
    typed_only: bool = True
    texts: Callable[[Options, Facts], Mapping[str, Any]] = _nothing

    def holds(self, options: Options, origins: Origins) -> bool:
        """Returns whether the rule's option is set, if it has one."""
        if not self.option:
            return True
        spec, value = BY_NAME[self.option], getattr(options, self.option)
        # True counts as a request even if it is the default.
        is_off = self.has_off and (value is False if spec.is_bool else value == spec.default)
        return not is_off and (not self.typed_only or origins[self.option].is_typed)

    def error(self, options: Options, facts: Facts, origins: Origins, command: str) -> ConfigurationError:
        """Returns the error with the values of a command's options."""
        shown = {name: shown_value(v) if isinstance(v, str) else v for name, v in vars(options).items()}
        values = {**shown, "origins": origins, **self.texts(options, facts)}
        if isinstance(options, RunConfig):
            values["drop"] = _Drop(options, origins, command, self.option)
        if self.option:
            spec, value = BY_NAME[self.option], getattr(options, self.option)
            flag = spec.off_flags[0] if value is False else spec.flag
            text = "" if spec.is_bool else spec.typed_text(value)
            values["option"] = origins[self.option].option(flag, text)
        message, hint = self.message.format(**values), self.hint.format(**values)
        return ConfigurationError(message, hint, self.option if self.typed_only else "")


def check_rules(
    rules: Iterable[Rule[Options, Facts]],
    options: Options,
    facts: Facts,
    origins: Origins = MappingProxyType({}),
    command: str = "",
) -> None:
    """Refuses the first combination of a command's options that a rule forbids.

    Args:
        rules: the table.
        options: the options that they are about.
        facts: what else they depend on.
        origins: who gave the values of a run's options.
        command: the command.

    Raises:
        ConfigurationError: the message names the options, and the hint the remedy.
    """
    for rule in rules:
        if rule.holds(options, origins) and rule.applies(options, facts):
            raise rule.error(options, facts, origins, command)


class OfTask(NamedTuple):
    """The facts that the rules of evaluations and of ``infer`` depend on.

    Attributes:
        segments: whether the network makes masks.
        network: its name, or that of the run.
    """

    segments: bool
    network: str


OF_PATCHES = (
    ("test_time_augmentation", "--test-time-augmentation {test_time_augmentation}", True),
    ("patch_size", "--patch-size {patch_size}", True),
)


def task_rules(*named: Tuple[str, str, bool]) -> Iterator[Rule[Options, OfTask]]:
    """Yields the rules about options that are only for one kind of network.

    Args:
        named: (field, option as messages name it, whether it is for masks).
    """
    for name, text, for_masks in named:
        makes = "classifies images, it makes no masks" if for_masks else "segments images, it has no labels"
        yield Rule(
            lambda options, facts, name=name, for_masks=for_masks: (  # type: ignore[misc]
                facts.segments != for_masks and getattr(options, name) != getattr(type(options), name)
            ),
            f"{text}: {{network}} {makes}",
            "drop it",
            texts=lambda _, facts: facts._asdict(),
        )


RESUMED_OR_REPLACED: Rule[RunConfig, Origins] = Rule(
    lambda config, _: config.resume and config.overwrite,
    "--resume and --overwrite are both given",
    "drop one of them",
)
NOT_READ_FROM_FILES: Tuple[Rule[RunConfig, Origins], ...] = tuple(
    Rule(
        lambda config, origins: (
            _is_in_use(config)
            and _has_no_files(config.dataset)
            # A run that took such a set because no files are in a folder saves the folder, and may be repeated.
            and origins["dataset"].is_given
        ),
        "{option}: {dataset} is not read from files",
        f"drop {flag}",
        name,
    )
    for name, flag in (("dataset_path", "--dataset-path"), ("download", "--download"))
)
OPTION_RULES: Tuple[Rule[RunConfig, Origins], ...] = (
    *NOT_READ_FROM_FILES,
    *(
        Rule(
            lambda config, origins, name=name: (  # type: ignore[misc]
                config.synthetic_data is not None
                and getattr(config, name)
                # Values of a saved run do not count as given.
                and RUN not in (origins[name], origins["synthetic_data"])
            ),
            f"synthetic-data {{synthetic_data}} and {name.replace('_', '-')} are two sources of the same data",
            f"{{drop[{name}]}}",
        )
        for name in ("host_generated_data", "device_generated_data")
    ),
    Rule(
        # As above, values of a saved run do not count.
        lambda config, origins: sum(origins[name] != RUN for name in _sources(config)) > 1,
        "{sources} are both given",
        "give one of them",
        texts=lambda config, _: {"sources": " and ".join(_sources(config).values())},
    ),
    Rule(
        lambda config, _: config.deterministic,
        "{option} contradicts deterministic, which trains on the samples in their stored order",
        "drop {option}, or add --no-deterministic",
        "shuffle",
    ),
    Rule(
        lambda config, origins: (
            config.eight_bit_transfer
            and not config.accelerator_side_preprocess
            and origins["accelerator_side_preprocess"].is_given
        ),
        "eight-bit-transfer with accelerator-side-preprocess False ({origins[accelerator_side_preprocess]}): "
        "normalised pixels do not go into 8 bits",
        "add --accelerator-side-preprocess, or --no-eight-bit-transfer",
    ),
    Rule(
        lambda config, _: (
            config.learning_rate is not None and "initial_learning_rate" in config.lr_schedule_params
        ),
        "learning-rate {learning_rate:g} (absolute) and initial_learning_rate "
        "{lr_schedule_params[initial_learning_rate]} (per sample) are both given",
        "give one of --learning-rate and --lr-schedule-params with initial_learning_rate",
    ),
    Rule(
        lambda config, _: config.learning_rate is not None and config.lr_schedule == "stepped",
        "learning-rate {learning_rate:g} and lr-schedule stepped are both given, and stepped has its own values",
        "{drop[learning_rate|lr_schedule]}",
    ),
    Rule(
        lambda config, _: (
            config.gradient_accumulation_count is not None and config.global_batch_size is not None
        ),
        "gradient-accumulation-count {gradient_accumulation_count} and global-batch-size {global_batch_size} are both "
        "given, but one follows from the other",
        "{drop[gradient_accumulation_count|global_batch_size]}",
    ),
    Rule(
        lambda config, _: config.pad_dataset and config.weight_updates_per_epoch not in (None, -1),
        "pad-dataset and weight-updates-per-epoch {weight_updates_per_epoch} are both given, and each says where an "
        "epoch ends",
        "{drop[pad_dataset|weight_updates_per_epoch]}",
    ),
    Rule(
        lambda config, _: (
            config.steps_per_execution is not None and config.logs_per_epoch != RunConfig.logs_per_epoch
        ),
        "steps-per-execution {steps_per_execution} and logs-per-epoch {logs_per_epoch:g} are both given, and each sets "
        "the length of an execution",
        "give one of --steps-per-execution and --logs-per-epoch",
    ),
    Rule(
        lambda config, _: config.optimizer == "lars" and config.weight_decay > 0,
        "weight-decay {weight_decay:g} is not LARS's: it has its own, inside the trust ratio",
        "{drop[weight_decay]}, and give --optimizer-params '{{\"weight_decay\": {weight_decay:g}}}'",
    ),
    Rule(
        lambda config, origins: (
            not (config.decay_biases_and_norms or config.weight_decay or config.l2_regularization)
            and origins["decay_biases_and_norms"].is_typed
        ),
        "--no-decay-biases-and-norms without --weight-decay and --l2-regularization: there is nothing to leave out",
        "for example --l2-regularization 0.0001 --no-decay-biases-and-norms",
    ),
    Rule(
        lambda config, _: not (config.training or config.validation),
        "--no-training and --no-validation are both given: nothing to do",
        "{drop[training|validation]}",
    ),
    RESUMED_OR_REPLACED,
    Rule(
        # A continued run, whose options are the run's own, may be one that was saved without training.
        lambda config, origins: not config.training and origins["training"] != RUN,
        "{option} without training has nothing to continue",
        "validate with: ipucnn evaluate RUN",
        "resume",
    ),
    Rule(
        lambda config, _: config.fold is not None and config.kfold is None,
        "--fold {fold} without --kfold",
        "for example --kfold 5 --fold 5",
    ),
    Rule(
        lambda config, _: (config.fold or 0) > (config.kfold or 0),
        "--fold {fold} of --kfold {kfold}",
        "folds are numbered from 1: use --fold {kfold} or less",
    ),
    Rule(
        lambda config, origins: (
            not _is_resumed_fold(config, origins)
            and (config.checkpoint_dir is not None or config.checkpoint_input_dir is not None)
        ),
        "--kfold with a checkpoint folder of its own: every fold has its checkpoints",
        "{drop[checkpoint_dir&checkpoint_input_dir]}; they go to fold-K/checkpoints",
        "kfold",
        typed_only=False,
    ),
    Rule(
        lambda config, origins: not config.training and not _is_resumed_fold(config, origins),
        "--kfold without training has nothing to do",
        "{drop[training]}",
        "kfold",
        typed_only=False,
    ),
    Rule(
        lambda config, _: AUTO in config.pipeline_splits and len(config.pipeline_splits) > 1,
        "pipeline-splits: 'auto' stands for all of them, but others are given too",
        "give auto, or layers",
    ),
    Rule(
        lambda config, _: _repeated(config.pipeline_splits) is not None,
        "pipeline-splits: '{repeated}' opens two stages",
        "name each layer once, in the network's order",
        texts=lambda config, _: {"repeated": _repeated(config.pipeline_splits)},
    ),
)


def _sources(config: RunConfig) -> Dict[str, str]:
    """Returns the options that say where images come from, but for ``synthetic_data``: name -> text."""
    named = {} if config.dataset is None else {"dataset": f"dataset {config.dataset}"}
    drawn = (name for name in ("host_generated_data", "device_generated_data") if getattr(config, name))
    return {**named, **{name: BY_NAME[name].key for name in drawn}}


def _is_in_use(config: RunConfig) -> bool:
    """Whether the data set is read: neither noise nor generated data replace it."""
    return config.synthetic_data is None and not (config.host_generated_data or config.device_generated_data)


def _has_no_files(dataset: Optional[str]) -> bool:
    """Whether a data set is a registered one that is embedded or generated."""
    from ipucnn.datasets.registry import DATASETS, needs_files

    return dataset in DATASETS and not needs_files(str(dataset))


def _is_resumed_fold(config: RunConfig, origins: Origins) -> bool:
    """Whether a single fold goes on, which is a run like any other, and not a part of a cross-validation."""
    return config.fold is not None and origins["fold"] == RUN


def _repeated(splits: Sequence[str]) -> Optional[str]:
    """Returns the first layer that is named twice, or None."""
    return next((name for number, name in enumerate(splits) if name in splits[:number]), None)


def check(config: RunConfig, origins: Origins, command: str) -> None:
    """Refuses options of a command that exclude each other, and texts that cannot be paths.

    Paths need not exist.  Those of a saved run are not checked, because they may belong to another machine.

    Raises:
        ConfigurationError: the message names both options, and the hint the remedy.
        DataError: a path that is too long, has a NUL, or is in a folder that may not be searched.
    """
    check_rules(OPTION_RULES, config, origins, origins, command)
    for spec in SPECS:
        if origins[spec.name] != RUN:
            check_paths(spec, getattr(config, spec.name), spec.flag)
