"""Sources of trained weights: a run or its checkpoint, a Keras file, ImageNet, an exported file; a class each.

:func:`find_weights` opens what evaluate, infer and export name, :func:`find_starting_weights` what ``train --weights``
names, :func:`stored_weights` each file that ``train --no-training`` validates; without TensorFlow.
"""

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, ClassVar, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

from ipucnn.aliases import KerasModel, PlainValue, TfVariable
from ipucnn.config.options import BY_NAME, RunConfig
from ipucnn.config.resolve import Resolved, place_of_data, resolve, resolve_saved
from ipucnn.config.spec import OptionSpec
from ipucnn.config.values import norm_layer_of, norm_of
from ipucnn.datasets.base import IMAGENET_MEAN, IMAGENET_STD, DatasetInfo, DataSource
from ipucnn.datasets.classes import are_same, in_order_of, match, order_note
from ipucnn.datasets.registry import needs_files
from ipucnn.datasets.sources.in_memory import PREFIX
from ipucnn.errors import ConfigurationError, DataError, UserError
from ipucnn.filesystem import expand, shown
from ipucnn.models.imagenet import NUM_CLASSES, check_has_weights, class_names
from ipucnn.models.registry import (
    ModelRecord,
    check_buildable,
    check_same_network,
    find_network,
    get_model,
    is_keras_file,
    list_models,
    refuse_other_form,
    saved_network,
)
from ipucnn.planning.network import InputShape, input_shape_for
from ipucnn.python_files import naming_hint
from ipucnn.runs import setup as run_setup
from ipucnn.runs.checkpoints import TrainedRun, open_run, trained_facts
from ipucnn.runs.exported import RECORD, ExportedNetwork, is_exported, read_exported
from ipucnn.runs.folder import RUN_FILES, KeptThreshold, RunFolder
from ipucnn.runs.images.outputs import HALF
from ipucnn.runs.setup import Setup, SomeSetup
from ipucnn.runs.weight_files import (
    check_computes,
    check_scaling,
    holds_network,
    input_shape_of_file,
    scaling_of_file,
    size_note,
    take_over,
)
from ipucnn.sessions.session import Session
from ipucnn.text import quoted, shown_value
from ipucnn.training.checkpoints import Checkpoint, assign_weights, load_checkpoint, read_meta

IMAGENET = "imagenet"
_NETWORK_OPTIONS = ("model_name", "image_size", "norm_layer", "base_filters", "normalise")
_DATA_OPTIONS = ("dataset", "dataset_path", "download", "limit_train", "limit_eval")


@dataclass(frozen=True)
class WeightsArgument:
    """A network and its weights, as a command line names them.

    Attributes:
        command: evaluate, infer or export.
        target: a run folder, a checkpoint, an exported ONNX or TFLite file, a Keras weight file, or with ``weights`` a
            network of the registry.
        flags: the options given on the command line.
        which: the value of ``--checkpoint``, which chooses a checkpoint of the run.
        weights: the value of ``--weights``: imagenet, or a Keras weight file.
    """

    command: str
    target: str
    flags: Mapping[str, Any]
    which: Optional[str] = None
    weights: Optional[str] = None


# Option of a network that the shapes of weights do not tell -> function that returns what it makes a network compute.
_COMPUTED: Dict[str, Callable[[Any], Any]] = {
    "normalise": str,
    "norm_layer": lambda norm: (
        norm_of(norm),
        *map(norm.get, ("epsilon", "num_groups", "channels_per_group")),
    ),
}


class Weights:
    """Trained weights, before data are read; each source is a subclass.

    Attributes:
        resolved: the configuration of the command.
        name: the name of the weights, for reports and messages.
        weight_updates: the weight updates of the checkpoint; None if that is not known.
        facts: the facts of the training set; None if only the data set that the command line names has them.
        hint: the hint for data with other classes.
        seed: the seed of the run.
        input_shape: the input shape of the trained network; None if the data set or an option determines it.
        folder: the run folder that the weights come from; None for other weights.
        data_sha256: ``fingerprint`` of the data of training; None if that is not known.
        trained_with: the configuration of training; None if that is not known.
    """

    is_exported: ClassVar[bool] = False
    """Whether an exported file runs in its own runtime, without a network of Keras."""

    def __init__(
        self,
        resolved: Resolved,
        name: str,
        facts: Optional[DatasetInfo] = None,
        hint: str = "",
        weight_updates: Optional[int] = None,
        seed: int = 0,
        input_shape: Optional[InputShape] = None,
        folder: Optional[RunFolder] = None,
        data_sha256: Optional[str] = None,
        trained_with: Optional[RunConfig] = None,
    ) -> None:
        self.resolved, self.name, self.weight_updates = resolved, name, weight_updates
        self.facts, self.hint, self.seed = facts, hint, seed
        self.input_shape, self.folder, self.data_sha256 = input_shape, folder, data_sha256
        self.trained_with = trained_with

    @property
    def threshold(self) -> KeptThreshold:
        """The probability of class 1 above which a pixel is class 1: what `evaluate` recommended, or 0.5."""
        kept = {} if self.folder is None else self.folder.thresholds()
        return kept.get(str(self.weight_updates), KeptThreshold(HALF))

    def labels(self, info: DatasetInfo) -> Tuple[str, ...]:
        """Returns the names of the classes; ``info`` has the facts of the data set that the weights are used with."""
        return info.class_names if self.facts is None else self.facts.class_names

    def fitted(self, setup: SomeSetup) -> Tuple[SomeSetup, List[str]]:
        """Returns the setup with images in the range that the weights need, checked, and notes for the user."""
        run_setup.build_options(setup)
        return setup, []

    def fill(self, setup: Setup, model: KerasModel) -> List[str]:
        """Copies the weights into the built network of a setup; returns notes for the user."""
        raise NotImplementedError

    def start(self, setup: Setup, model: KerasModel) -> Tuple[int, List[str]]:
        """Copies the weights into a network that is to be trained.

        A head whose shapes or classes differ keeps its initial values.

        Returns:
            The number of these weights, and notes for the user.
        """
        return 0, self.fill(setup, model)

    def as_started(self, source: DataSource) -> DataSource:
        """Returns the training set of a run that starts from the weights."""
        return source

    def options_kept(self, resolved: Resolved) -> Tuple[Resolved, List[str]]:
        """Returns the configuration of a run that starts from the weights, and notes for the user."""
        return resolved, []

    def session(self, config: RunConfig, verbose: bool) -> Session:
        """Makes the session that runs the network.

        Args:
            config: the configuration, with the device.
            verbose: show TensorFlow's own messages.
        """
        from ipucnn.sessions.factory import create_session

        return create_session(config.device, verbose=verbose, config=config)


class StoredWeights(Weights):
    """Weights in a file, which a built network matches with its own by their names."""

    def read(self, setup: Setup, model: KerasModel) -> Tuple[Checkpoint, List[str]]:
        """Returns the weights for the built network of a setup, checked, and notes for the user."""
        raise NotImplementedError

    def fill(self, setup: Setup, model: KerasModel) -> List[str]:
        from ipucnn.models.names import named_weights

        checkpoint, notes = self.read(setup, model)
        assign_weights(named_weights(model), checkpoint, what=self.name)
        return notes


class RunWeights(StoredWeights):
    """The weights in a checkpoint of a run."""

    def __init__(self, resolved: Resolved, run: TrainedRun) -> None:
        super().__init__(resolved, **_facts_of_training(run), folder=run.folder)
        self._run = run

    def read(self, setup: Setup, model: KerasModel) -> Tuple[Checkpoint, List[str]]:
        return self._run.checkpoint, []

    def start(self, setup: Setup, model: KerasModel) -> Tuple[int, List[str]]:
        from ipucnn.models.names import named_weights

        weights, checkpoint = named_weights(model), self._run.checkpoint
        head = _new_head(weights, checkpoint, setup.source.info.class_names)
        try:
            assign_weights(weights, checkpoint, what=self.name, skip=head)
        except DataError as error:
            # Networks with the same layers share weights, so that other names alone are no error.
            raise (self._another_network() or error) from None
        own, network = setup.record.own, self._run.meta.get("network")
        is_known = own is not None and isinstance(network, dict)
        return len(head), own.changes_since(network, self.name) if own is not None and is_known else []

    def as_started(self, source: DataSource) -> DataSource:
        assert self.facts is not None
        return as_started(source, self.facts)

    def options_kept(self, resolved: Resolved) -> Tuple[Resolved, List[str]]:
        """Keeps what the network of the weights computes, unless the user gave something else."""
        given, lines = shown_value(resolved.config.weights), []  # type: str, List[str]
        for spec, former, present in _computed_otherwise(self._run.config, resolved.config):
            if spec.name == "norm_layer" and norm_of(former) not in resolved.record.norms:
                other = self._another_network()
                if other is not None:
                    raise other
            trained = f"the weights of {given} were trained with {spec.flag} {spec.typed_text(former)}"
            if resolved.origins[spec.name].by_user:
                lines.append(f"{trained}, and this run has {spec.typed_text(present)}")
                continue
            lines.append(f"{trained}, which this run keeps")
            resolved = replace(resolved, config=replace(resolved.config, **{spec.name: former}))
        return resolved, lines

    def _another_network(self) -> Optional[DataError]:
        """Returns the error that the weights are of another registered network; None if they are of this one."""
        resolved, network = self.resolved, self._run.config.model_name
        if network == resolved.record.name or resolved.record.own or get_model(network).own:
            return None
        given = resolved.config.weights
        data = "".join(
            f" {BY_NAME[name].flag} {quoted(getattr(resolved.config, name))}"
            for name in ("dataset", "dataset_path")
            if resolved.origins[name].by_user
        )
        return DataError(
            f"--weights {shown_value(given)}: the weights are of {network}, not of {resolved.record.name}",
            f"train that network: ipucnn train {quoted(network)}{data} --weights {quoted(given)}",
        )

    def check_validated(self, config: RunConfig, info: DatasetInfo) -> None:
        """Refuses to validate the weights in a network that computes something else, or with other classes.

        Raises:
            DataError: they are of another model.
            ConfigurationError: an option of the run must be that of the weights.
        """
        saved = (
            RunConfig.from_yaml(self._run.meta["config"], self.name) if "config" in self._run.meta else config
        )
        # The name of a user's own network has the path of its file, which may have moved.
        if self.resolved.record.own is None and saved.model_name != config.model_name:
            raise DataError(
                f"{self.name} is of another model: {shown_value(saved.model_name)}, not {config.model_name}",
                "build the model it was trained with (its config.yml lies in the run folder)",
            )
        others = _computed_otherwise(saved, config)
        if others:
            options = " ".join(f"{spec.flag} {quoted(spec.typed_text(former))}" for spec, former, _ in others)
            raise ConfigurationError(f"checkpoint {self.name} was trained with {options}", f"add {options}")
        assert self.facts is not None
        if not are_same(info.class_names, self.facts.class_names):
            raise ConfigurationError(
                f"checkpoint {self.name} was trained on other classes than those of {info.name}, or in another order",
                f"evaluate it, which matches them by name: ipucnn evaluate {quoted(self.name)}",
            )


def _computed_otherwise(saved: RunConfig, config: RunConfig) -> List[Tuple[OptionSpec, Any, Any]]:
    """Returns the options of two configurations with which networks compute different values, and both values."""
    pairs = ((BY_NAME[name], getattr(saved, name), getattr(config, name)) for name in _COMPUTED)
    return [(spec, a, b) for spec, a, b in pairs if _COMPUTED[spec.name](a) != _COMPUTED[spec.name](b)]


class ExportedWeights(Weights):
    """An exported file, which has its own weights and runtime."""

    is_exported = True

    def __init__(self, resolved: Resolved, network: ExportedNetwork) -> None:
        super().__init__(resolved, **_facts_of_training(network))
        self._network = network

    @property
    def threshold(self) -> KeptThreshold:
        kept = self._network.record.threshold
        return KeptThreshold(HALF if kept is None else kept)

    def fitted(self, setup: SomeSetup) -> Tuple[SomeSetup, List[str]]:
        return setup.in_range(self._network.record.input.name_of_range), []

    def session(self, config: RunConfig, verbose: bool) -> Session:
        from ipucnn.sessions.host.environment import import_tensorflow

        import_tensorflow(verbose)
        return self._network.session()


class KerasFileWeights(StoredWeights):
    """The weights in a file that Keras saved, for a network that the command line names."""

    def __init__(self, resolved: Resolved, path: Path) -> None:
        # A user's own network knows the size of its input; masks are of images of any size.
        is_known = resolved.record.own is not None or resolved.record.task != "classification"
        is_given = resolved.origins["image_size"].by_user
        shape = None if is_known or is_given else input_shape_of_file(path)
        super().__init__(resolved, str(path), input_shape=shape)
        # A network of the user's own has its scaling in its layers, wherever they stand.
        self._path, self._scaling = path, None if resolved.record.own is not None else scaling_of_file(path)

    def fitted(self, setup: SomeSetup) -> Tuple[SomeSetup, List[str]]:
        usual = input_shape_for(setup.record, setup.source.info.image_shape)
        notes = [] if self.input_shape in (None, usual) else [size_note(self._path, setup.input_shape)]
        if self._scaling is not None and setup.record.own is None:
            setup, more = take_over(setup, self._path, self._scaling)
            notes += more
        run_setup.build_options(setup)
        return setup, notes

    def read(self, setup: Setup, model: KerasModel) -> Tuple[Checkpoint, List[str]]:
        from ipucnn.models.keras_files import read_keras_weights
        from ipucnn.models.names import named_weights

        values, notes = read_keras_weights(model, self._path)
        of_range = check_scaling(setup, self._path)
        assign_weights(named_weights(model), Checkpoint(values, {}), what=self.name)
        notes += check_computes(setup, model, self._path)
        return Checkpoint(values, {}), [*of_range, *self._order(setup), *notes]

    def start(self, setup: Setup, model: KerasModel) -> Tuple[int, List[str]]:
        from ipucnn.models.keras_files import load_keras_weights

        # The file does not name its classes: shapes alone decide.
        fresh, notes = load_keras_weights(model, self._path, new_head=True)
        of_range = check_scaling(setup, self._path)
        notes += check_computes(setup, model, self._path)
        return len(fresh), [*of_range, *([] if fresh else self._order(setup)), *notes]

    def _order(self, setup: Setup) -> List[str]:
        info = setup.source.info
        return order_note(info.class_names, info.name, shown(self._path))


class ImageNetWeights(Weights):
    """The ImageNet weights of Keras Applications, downloaded once."""

    def __init__(self, resolved: Resolved) -> None:
        hint = "give ImageNet's images: --dataset imagefolder --dataset-path DIR"
        super().__init__(resolved, "imagenet of Keras Applications", _IMAGENET_FACTS, hint)

    def labels(self, info: DatasetInfo) -> Tuple[str, ...]:
        return info.class_names or class_names()

    def as_started(self, source: DataSource) -> DataSource:
        info, unnamed = source.info, ("",) * NUM_CLASSES
        if info.num_classes != NUM_CLASSES:
            return source
        match(info.class_names, unnamed, info.name, self.name, self.hint)
        return in_order_of(source, unnamed)

    def fill(self, setup: Setup, model: KerasModel) -> List[str]:
        return self.start(setup, model)[1]

    def start(self, setup: Setup, model: KerasModel) -> Tuple[int, List[str]]:
        from ipucnn.models.imagenet import load_imagenet_weights

        return load_imagenet_weights(model, setup.record), []


def _facts_of_training(run: Union[TrainedRun, ExportedNetwork]) -> Dict[str, Any]:
    """Returns the arguments of :class:`Weights` that a checkpoint or an export knows."""
    meta, facts = run.meta, trained_facts(run.meta)
    return {
        "name": str(run.path),
        "facts": facts,
        "hint": f"give the data set it was trained on: {_data_of(run.config, facts.name)}",
        "weight_updates": meta["weight_updates"],
        "seed": int(meta["seed"]),
        "input_shape": tuple(meta["input_shape"]),
        "data_sha256": meta.get("data_sha256"),
        "trained_with": run.config,
    }


def _data_of(config: RunConfig, name: str) -> str:
    """Returns the options for the data set of a training, or words for one that no option names.

    Args:
        config: the configuration of training.
        name: the set's own name.
    """
    if name.startswith(PREFIX):  # nobody typed this name
        return "the arrays"
    place = config.dataset_path
    folder = f" --dataset-path {quoted(place)}" if needs_files(name) and place != Path() else ""
    return f"--dataset {quoted(config.dataset or name)}{folder}"


# Photographs of any size in 1000 classes.
_IMAGENET_FACTS = DatasetInfo(
    name=IMAGENET,
    task="classification",
    num_classes=NUM_CLASSES,
    image_shape=(None, None, 3),
    num_train=0,
    num_eval=0,
    class_names=(),
    location="Keras Applications",
    mean=IMAGENET_MEAN,
    std=IMAGENET_STD,
)


def find_weights(named: WeightsArgument, reads_data: bool) -> Weights:
    """Opens the weights that a command line names, with every check that needs no data set.

    Raises:
        ConfigurationError: options contradict the network, or each other.
        DataError: the run or the weights cannot be read.
    """
    command, target, which = named.command, named.target, named.which
    path = expand(target)
    is_twice_named = named.weights is None and which is not None and _is_network(target)
    if which is not None and is_twice_named and expand(which).exists():
        # `infer unet --checkpoint runs/mine`: the network is named twice, and must be the same.
        weights = _of_run(replace(named, target=which, which=None), reads_data)
        name = weights.resolved.record.name
        if name != get_model(target).name:
            raise DataError(
                f"--checkpoint {which} is of {name}, not of {target}", f"ipucnn {command} {quoted(which)}"
            )
        return weights
    if named.weights is None and is_keras_file(path.name):
        if "model_name" not in named.flags:
            if (path.parent / RECORD).is_file():
                raise ConfigurationError(
                    f"{target} is a network that `ipucnn export` wrote for Keras; `ipucnn {command}` cannot run it",
                    f"name the run it was exported from: ipucnn {command} RUN; or export the run with --format onnx "
                    "or tflite, and name that file",
                )
            raise ConfigurationError(
                f"of {target} only the weights are read, and the network they belong to is not named",
                _how_to_name_network(named),
            )
        named = replace(named, target=str(named.flags["model_name"]), weights=target)
    if named.weights is None:
        return _of_run(named, reads_data)
    if which is not None:
        raise ConfigurationError(
            f"--checkpoint {which}: only a run has checkpoints to choose from", "drop it"
        )
    if named.weights == IMAGENET:
        return _of_imagenet(named, reads_data)
    return _of_keras_file(named, named.weights, reads_data)


def find_starting_weights(resolved: Resolved) -> Weights:
    """Opens the weights that ``train --weights`` names.

    Raises:
        DataError: they do not exist, or cannot be read.
    """
    given = str(resolved.config.weights)
    if given == IMAGENET:
        return ImageNetWeights(resolved)
    path = expand(given)
    if not path.exists():
        raise DataError(
            f"--weights {given} does not exist",
            "give a checkpoint, a run folder, a weight file of Keras (.weights.h5, .h5, .keras), or imagenet",
        )
    if is_keras_file(path.name):
        return KerasFileWeights(resolved, path)
    if is_exported(path):
        raise DataError(
            f"--weights {shown(path)} is an exported network, which is evaluated and not trained from",
            "give the run that was exported, or the .keras file of an export",
        )
    with _whole_facts(given):
        return RunWeights(resolved, open_run(path, command=f"train {resolved.record.name} --weights"))


def stored_weights(resolved: Resolved, path: Path) -> StoredWeights:
    """Opens a checkpoint of any run with this network, or a weight file of Keras, to validate its weights.

    Raises:
        DataError: it cannot be read.
    """
    if is_keras_file(path.name):
        return KerasFileWeights(resolved, path)
    with _whole_facts(str(path)):
        return RunWeights(resolved, TrainedRun(None, resolved.config, load_checkpoint(path), path))


@contextlib.contextmanager
def _whole_facts(given: str) -> Iterator[None]:
    """Converts the error of a checkpoint that lacks a fact into an error about the checkpoint."""
    try:
        yield
    except KeyError as error:
        raise DataError(
            f"checkpoint {given} lacks {error.args[0]}",
            "give a checkpoint or run folder that `ipucnn train` wrote",
        ) from None


def as_started(source: DataSource, facts: DatasetInfo) -> DataSource:
    """Returns a training set as a network from a run knows it: its numbers of classes, mean and deviation.

    Args:
        source: the training set.
        facts: the facts of the set that the run was trained on.
    """
    source = in_order_of(source, facts.class_names)
    info = source.info
    if len(facts.mean) != len(info.mean) or (facts.mean, facts.std) == (info.mean, info.std):
        return source
    note = (
        f"{info.name} is normalised with the mean and deviation of {facts.name}, as the weights to start from"
    )
    return replace(
        source, info=replace(info, mean=facts.mean, std=facts.std, warnings=(*info.warnings, note))
    )


def _new_head(
    weights: Mapping[str, TfVariable], checkpoint: Checkpoint, class_names: Sequence[str]
) -> Tuple[str, ...]:
    """Returns the names of the head's weights if their shapes or classes differ from the checkpoint's; else none.

    The head is the last layer that has weights.
    """
    names = list(weights)
    layer = names[-1].split("/")[0]
    head = [name for name in names if name.split("/")[0] == layer]
    differ = not are_same(class_names, checkpoint.meta["class_names"]) or any(
        name in checkpoint.weights and tuple(checkpoint.weights[name].shape) != tuple(weights[name].shape)
        for name in head
    )
    return tuple(head) if differ else ()


def weight_inputs(named: WeightsArgument) -> List[Tuple[str, Path]]:
    """Returns (description, path) of the files that the command line names as weights; no output may replace them."""
    options = (("RUN", named.target), ("--checkpoint", named.which), ("--weights", named.weights))
    named_files = [
        (f"what {option} names", expand(name)) for option, name in options if name not in (None, IMAGENET)
    ]
    folder = expand(named.target)
    return named_files + [("a file of the run", folder / name) for name in RUN_FILES]


def task_of(named: WeightsArgument) -> Optional[str]:
    """Returns the task of the network that the command line names; reads only its configuration.

    The result is None if anything is wrong with the command line, which :func:`open_trained` then reports.
    """
    target, weights = named.target, named.weights
    try:
        path = expand(target)
        if weights == IMAGENET:
            return "classification"
        if weights is not None or (named.which is not None and _is_network(target)):
            return get_model(target).task
        if is_keras_file(path.name):
            return get_model(str(named.flags["model_name"])).task
        if is_exported(path):
            return get_model(read_exported(path).record.model).task
        if path.is_file():
            return get_model(read_meta(path)["model"]).task
        return get_model(RunFolder(path).read_config().model_name).task
    except (UserError, KeyError):
        return None


def _is_network(target: str) -> bool:
    return not expand(target).exists() and any(record.name == target for record in list_models())


def _refuse(flags: Mapping[str, PlainValue], names: Tuple[str, ...], why: str, hint: str) -> None:
    for name in names:
        if name in flags:
            raise ConfigurationError(f"{BY_NAME[name].flag}: {why}", hint)


def _of_run(named: WeightsArgument, reads_data: bool) -> Weights:
    command, target, flags, which = named.command, named.target, named.flags, named.which
    path = expand(target)
    if _is_network(target):
        raise DataError(
            f"{target} is a network, and there is no run folder of that name",
            _how_to_get_weights(command, target),
        )
    if which is not None and path.is_file():
        raise ConfigurationError(
            f"--checkpoint {which}: {target} is one checkpoint, not a run to choose from",
            "drop it, or give the run folder",
        )
    run: Union[TrainedRun, ExportedNetwork]
    with _whole_facts(target):
        run = read_exported(path) if is_exported(path) else open_run(path, which, command)
        trained_facts(run.meta)
    record = _own_network(named, run)
    refused = _NETWORK_OPTIONS if record is None else tuple(n for n in _NETWORK_OPTIONS if n != "model_name")
    _refuse(flags, refused, f"{target} is a run, which has its own network", "drop it")
    if not reads_data:
        _refuse_data(named)
    # Without data first: a wrong value is reported with its own hint, and later errors can only concern the data.
    resolved = resolve_saved(command, run.config, flags, reads_data=False)
    if reads_data:
        with place_of_data(run.config, flags, str(path)):
            resolved = resolve_saved(command, run.config, flags, reads_data=True)
    if record is not None:
        resolved = replace(resolved, record=record)
    return ExportedWeights(resolved, run) if isinstance(run, ExportedNetwork) else RunWeights(resolved, run)


def _own_network(named: WeightsArgument, run: Union[TrainedRun, ExportedNetwork]) -> Optional[ModelRecord]:
    """Returns the record of a user's own network: from the command line, else from the checkpoint.

    The result is None for a registered network, and for an exported file, which needs no record.

    Raises:
        ConfigurationError: the Python file that it needs was not named, or has changed.
        DataError: the checkpoint has no network.
    """
    if isinstance(run, ExportedNetwork) or get_model(run.config.model_name).own is None:
        return None
    name, meta, what = run.config.model_name, run.meta, f"checkpoint {run.path}"
    typed = named.flags.get("model_name")
    if typed is not None:
        record = find_network(str(typed))
        check_same_network(record, meta, what)
        return record
    record = saved_network(name, meta.get("network"), what, naming_hint(name, run.path))
    check_buildable(record)
    return record


def _how_to_name_network(named: WeightsArgument) -> str:
    """Returns the hint for a Keras file without a network: the file itself, if it holds one that can be built."""
    has_data = "dataset" in named.flags
    data = "" if has_data else " --dataset mnist"
    if not holds_network(expand(named.target)):
        options = "--model-name" if has_data else "--model-name and --dataset"
        return f"add {options}, for example --model-name lenet{data}"
    its_own = f"it holds a network: add --model-name {quoted(named.target)}"
    return its_own if has_data else f"{its_own} and its data set, for example{data}"


def _how_to_get_weights(command: str, model: str) -> str:
    """Returns the hint for a network that was given without weights."""
    if get_model(model).keras_application is not None:
        return "give a run folder, or add --weights imagenet"
    return f"give a run folder; `ipucnn train {quoted(model)}` makes one"


def _refuse_data(named: WeightsArgument) -> None:
    of_data = f"ipucnn {named.command} {quoted(named.target)} --split eval"
    hint = f"drop it; for the images of a data set in place of these: {of_data}"
    _refuse(named.flags, _DATA_OPTIONS, "no data set is read", hint)


def _of_keras_file(named: WeightsArgument, weights: str, reads_data: bool) -> Weights:
    path = expand(weights)
    refuse_other_form(path)
    if not is_keras_file(path.name):
        if path.is_file() and not is_exported(path):
            read_meta(path)  # which says what it is, if it is no checkpoint
        raise ConfigurationError(
            f"--weights {weights}: neither imagenet nor a weight file of Keras (.weights.h5, .h5, .keras)",
            f"a run or its checkpoint needs no model: ipucnn {named.command} {quoted(weights)}",
        )
    if not path.is_file():
        raise DataError(f"weight file {path} does not exist", "give a .weights.h5, .h5 or .keras file")
    if not reads_data and "dataset" not in named.flags:
        own = find_network(named.target).own
        scales = own is not None and own.first_rescaling is not None
        lacks = "knows neither the names of its classes nor how its images were normalised"
        raise ConfigurationError(
            f"{path} {'does not know the names of its classes' if scales else lacks}",
            "name the data set it was trained on, for example --dataset mnist",
        )
    return KerasFileWeights(resolve(named.command, named.flags, model=named.target), path)


def _of_imagenet(named: WeightsArgument, reads_data: bool) -> Weights:
    command, model = named.command, named.target
    if expand(model).exists() and not any(record.name == model for record in list_models()):
        raise ConfigurationError(
            f"--weights imagenet: {model} is a file or folder, and has its own weights",
            f"name a network instead: ipucnn {command} resnet50-keras --weights imagenet",
        )
    record = get_model(model)
    check_has_weights(record)
    _refuse(named.flags, ("normalise",), "ImageNet's weights have a range of pixels", "drop it")
    if not reads_data:
        _refuse_data(named)
    resolved = resolve(command, named.flags, model=model, reads_data=reads_data)
    if not resolved.origins["norm_layer"].is_typed:
        # The weights belong to the published network, whose norm layer a preset may change.
        norm = norm_layer_of(record.default_norm)
        resolved = replace(resolved, config=replace(resolved.config, norm_layer=norm))

    return ImageNetWeights(resolved)
