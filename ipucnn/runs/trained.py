"""Opens trained networks for ``evaluate``, ``infer`` and ``export``: from a run, a Keras file, an export, or ImageNet.

The command line is resolved, and everything that can be is checked, without TensorFlow.
"""

import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple, Union

import numpy as np

from ipucnn.aliases import KerasModel, PlainValue
from ipucnn.config.options import BY_NAME, RunConfig
from ipucnn.config.resolve import Resolved, resolve, resolve_saved
from ipucnn.config.values import norm_layer_of
from ipucnn.datasets.base import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ArrayExamples,
    DatasetInfo,
    DataSource,
    limit_source,
)
from ipucnn.datasets.classes import Matched, match, relabelled
from ipucnn.datasets.pixels import Scaling
from ipucnn.errors import ConfigurationError, DataError, UserError
from ipucnn.filesystem import exists, expand, is_file, is_folder
from ipucnn.models.imagenet import NUM_CLASSES, check_has_weights, class_names, quiet_download
from ipucnn.models.keras_files import is_keras_file
from ipucnn.models.registry import (
    ModelRecord,
    check_buildable,
    check_same_network,
    find_network,
    get_model,
    list_models,
    saved_network,
)
from ipucnn.planning.network import InputShape
from ipucnn.planning.search.neighbours import prediction_advice
from ipucnn.python_files import name_it
from ipucnn.runs import setup as run_setup
from ipucnn.runs.checkpoints import TrainedRun, open_run, trained_facts
from ipucnn.runs.exported import RECORD, ExportedNetwork, is_exported, read_exported
from ipucnn.runs.folder import RUN_FILES, RunFolder
from ipucnn.runs.images.outputs import HALF
from ipucnn.runs.rules import check_group
from ipucnn.runs.setup import Setup
from ipucnn.runs.weight_files import check_scaling, scaling_of_file, take_over
from ipucnn.sessions.group import find_instances
from ipucnn.sessions.session import Session
from ipucnn.text import shown_value
from ipucnn.training.checkpoints import read_meta

IMAGENET = "imagenet"
_NETWORK_OPTIONS = ("model_name", "image_size", "norm_layer", "base_filters")
_DATA_OPTIONS = ("dataset", "dataset_path", "download", "limit_train", "limit_eval")


@dataclass(frozen=True)
class Named:
    """A network and its weights, as a command line names them.

    Attributes:
        command: evaluate, infer or export.
        target: a run folder, a checkpoint, an exported ONNX or TFLite file, a Keras weight file, or with ``weights`` a
            network of the registry.
        flags: the options given on the command line.
        which: the value of ``--checkpoint``, which chooses a checkpoint of the run.
        weights: the value of ``--weights``: imagenet, or a Keras weight file.
        from_python: whether :func:`ipucnn.load` is the caller, so that hints show Python instead of a command line.
    """

    command: str
    target: str
    flags: Mapping[str, Any]
    which: Optional[str] = None
    weights: Optional[str] = None
    from_python: bool = False


@dataclass(frozen=True)
class TrainedSetup(Setup):
    """A setup whose network has trained weights.  If no data set is read, its source has only the facts of one.

    Attributes:
        summary: ``model``, ``checkpoint`` and ``weight_updates`` (None if that is not known), for reports.
        fill: a function that copies the weights into the built network, and returns notes for the user; None for an
            exported file.
        names: a function that returns the names of the classes.  It may access the network, and import TensorFlow.
        runtime: a function that makes the session of an exported file, which has its own weights; None: the session
            of the device is used.
        num_stored: evaluation samples of the data set before ``--limit-eval``; 0 if no data set is read.
        notes: what was assumed about the data set's classes, or taken over for its images, one line each.
        by_number: whether the data set's classes are the network's by number alone, without names.
        folder: the run folder that the weights come from; None for other weights.
        exported_threshold: the threshold of an exported file for two classes of pixels; None for other weights.
        weight_file: the Keras file that the weights come from; None for other weights.
    """

    summary: Dict[str, Any]
    fill: Optional[Callable[["KerasModel"], List[str]]]
    names: Callable[[], Tuple[str, ...]]
    num_stored: int
    notes: Tuple[str, ...] = ()
    by_number: bool = False
    runtime: Optional[Callable[[], Session]] = None
    folder: Optional[RunFolder] = None
    exported_threshold: Optional[float] = None
    weight_file: Optional[Path] = None

    @property
    def threshold(self) -> float:
        """The probability of class 1 above which a pixel is class 1: what `evaluate` recommended, or 0.5."""
        if self.exported_threshold is not None:
            return self.exported_threshold
        kept = {} if self.folder is None else self.folder.thresholds()
        return kept.get(str(self.summary["weight_updates"]), HALF)

    def session(self, verbose: bool) -> Session:
        """Makes the session that runs the network: that of the device, or the runtime of an exported file.

        Args:
            verbose: show TensorFlow's own messages.
        """
        from ipucnn.sessions.factory import create_session
        from ipucnn.sessions.host.environment import import_tensorflow

        if self.runtime is None:
            return create_session(self.config.device, verbose=verbose, config=self.config)
        import_tensorflow(verbose)
        return self.runtime()

    @property
    def warnings(self) -> List[str]:
        """Warnings for the user before the work begins, one line each."""
        from ipucnn.sessions.factory import device_warnings

        return [*device_warnings(self.config.device), *self.source.info.warnings]

    def load(self, session: Session, command: str) -> List[str]:
        """Builds the network, and makes a session ready to predict with it, for a command.

        Returns:
            Notes for the user.
        """
        model, notes = self.build()
        session.would_fit = prediction_advice(model, self.record.name, self.config, command)
        session.prepare_evaluation(model, None)
        return notes

    def build(self) -> Tuple[Optional["KerasModel"], List[str]]:
        """Builds the network with its weights (imports TensorFlow).

        Returns:
            The network, None for an exported file; and notes for the user.
        """
        if self.fill is None:
            return None, []  # an exported file runs without Keras's network
        model = run_setup.build(self)
        notes = [] if self.record.own is None else list(self.record.own.notes)
        if self.weight_file is not None:
            notes += check_scaling(self, self.weight_file)
        return model, [*notes, *self.fill(model)]


def facts_only(info: DatasetInfo) -> DataSource:
    """Returns a data source without examples, for a data set of which only the facts are needed."""
    height, width, channels = info.image_shape
    none = ArrayExamples(np.zeros((0, height or 1, width or 1, channels), np.uint8), np.zeros(0, np.int32))
    return DataSource(info, none, none)


def open_trained(named: Named, reads_data: bool = True) -> TrainedSetup:
    """Opens the network that a command line names, with every check that needs no TensorFlow.

    Under ``poprun`` all instances open the same network.

    Args:
        named: the network and its weights.
        reads_data: whether the samples of a data set are needed.

    Raises:
        ConfigurationError: options contradict the network, or each other.
        DataError: the run, the weights or the data set cannot be read.
        MissingError: a device or a package is missing.
    """
    trained = _open(named, reads_data)
    check_group(find_instances(), trained.config, draws=False)
    return trained


@dataclass(frozen=True)
class _Weights:
    """Trained weights, from any source, before data are read.

    Attributes:
        resolved: the configuration of the command.
        summary, fill, folder, runtime, exported_threshold: see :class:`TrainedSetup`.
        facts: the facts of the training set; None if only the data set that the command line names has them.
        what, hint: the name of the weights, and the hint for data with another number of classes.
        seed: the seed of the run.
        input_shape: the input shape of the trained network; None if the data set or an option determines it.
        names: see :class:`TrainedSetup`; None for the names of the data set.
        exported_range: the range of the images that an exported file takes; None for other weights.
        weight_file: see :class:`TrainedSetup`.
        scaling: the scaling of pixels with which the model in that file begins; None if it has none.
    """

    resolved: Resolved
    summary: Dict[str, Any]
    fill: Optional[Callable[["KerasModel"], List[str]]]
    facts: Optional[DatasetInfo] = None
    what: str = ""
    hint: str = ""
    seed: int = 0
    input_shape: Optional[InputShape] = None
    names: Optional[Callable[[], Tuple[str, ...]]] = None
    folder: Optional[RunFolder] = None
    runtime: Optional[Callable[[], Session]] = None
    exported_range: Optional[str] = None
    exported_threshold: Optional[float] = None
    weight_file: Optional[Path] = None
    scaling: Optional[Scaling] = None


def _open(named: Named, reads_data: bool) -> TrainedSetup:
    """Finds the weights, and reads the data set that they are used with."""
    weights = _find_weights(named, reads_data)
    resolved = _here(named.command, weights.resolved)
    config, facts, num_stored = resolved.config, weights.facts, 0
    matched, notes = Matched(()), []  # type: Tuple[Matched, List[str]]
    if facts is not None and not reads_data:
        source = facts_only(replace(facts, max_image_pixels=config.max_image_pixels))
        shape, size = weights.input_shape, config.image_size
        if shape is None:
            shape = resolved.record.input_shape if size is None else (*size, resolved.record.input_shape[2])
        network_range = run_setup.input_range(config.normalise, resolved.record)
        setup = Setup(resolved, source, shape, None, weights.seed, network_range)
    else:
        everything = replace(resolved, config=replace(config, limit_train=None, limit_eval=None))
        setup = run_setup.prepare(everything, weights.seed, weights.input_shape)
        num_stored, source = len(setup.source.eval), setup.source
        if facts is not None:
            source, matched = _as_trained(source, facts, weights)
        source = limit_source(source, config.limit_train, config.limit_eval, weights.seed)
        setup = replace(setup, resolved=resolved, source=source)
    if weights.weight_file is not None and weights.scaling is not None and setup.record.own is None:
        setup, notes = take_over(setup, weights.weight_file, weights.scaling)
    if weights.runtime is None:
        run_setup.build_options(setup)
    elif weights.exported_range is not None:
        setup = replace(setup, input_range=weights.exported_range)
    return TrainedSetup(
        **vars(setup),
        summary=weights.summary,
        fill=weights.fill,
        names=weights.names or (lambda: setup.source.info.class_names),
        num_stored=num_stored,
        notes=tuple(filter(None, [matched.note, *notes])),
        by_number=matched.by_number,
        runtime=weights.runtime,
        folder=weights.folder,
        exported_threshold=weights.exported_threshold,
        weight_file=weights.weight_file,
    )


def _as_trained(source: DataSource, facts: DatasetInfo, weights: _Weights) -> Tuple[DataSource, Matched]:
    """Returns a source with the classes and the preprocessing of the training set, and how its classes were matched.

    The images of another set are cropped and normalised as those of the training set, and get its channels.

    Raises:
        DataError: the set has other classes, or masks of images with other channels.
    """
    info = source.info
    names = facts.class_names or ("",) * facts.num_classes  # ImageNet's are downloaded later
    matched = match(info.class_names, names, info.name, weights.what, weights.hint)
    source = relabelled(source, matched.labels, facts.class_names or info.class_names)
    shape = facts.image_shape if info.task == "classification" else info.image_shape
    if shape[2] != facts.image_shape[2]:
        kinds = ["grey" if shape[2] == 1 else "colour" for shape in (info.image_shape, facts.image_shape)]
        raise DataError(
            f"the images of {info.name} are {kinds[0]}, and the network was trained on {kinds[1]} ones",
            f"take {kinds[1]} images, or train on {kinds[0]} ones",
        )
    info = replace(
        source.info,
        image_shape=shape,
        mean=facts.mean,
        std=facts.std,
        crops=facts.crops,
        class_colours=facts.class_colours or info.class_colours,
        mask_values=facts.mask_values,
    )
    return replace(source, info=info), matched


def _find_weights(named: Named, reads_data: bool) -> _Weights:
    command, target, which = named.command, named.target, named.which
    path = expand(target)
    is_twice_named = named.weights is None and which is not None and _is_network(target)
    if which is not None and is_twice_named and exists(expand(which)):
        # `infer unet --checkpoint runs/mine`: the network is named twice, and must be the same.
        weights = _of_run(replace(named, target=which, which=None), reads_data)
        name = weights.resolved.record.name
        if name != get_model(target).name:
            raise DataError(
                f"--checkpoint {which} is of {name}, not of {target}", f"ipucnn {command} {which}"
            )
        return weights
    if named.weights is None and is_keras_file(path):
        if "model_name" not in named.flags:
            if is_file(path.parent / RECORD):
                raise ConfigurationError(
                    f"{target} is a network that `ipucnn export` wrote for Keras; `ipucnn {command}` cannot run it",
                    f"name the run it was exported from: ipucnn {command} RUN; or export the run with --format onnx "
                    "or tflite, and name that file",
                )
            raise ConfigurationError(
                f"of {target} only the weights are read, and the network they belong to is not named",
                "add --model-name and --dataset, for example --model-name lenet --dataset mnist",
            )
        named = replace(named, target=str(named.flags["model_name"]), weights=target)
    if named.weights is None:
        return _of_run(named, reads_data)
    if which is not None:
        raise ConfigurationError(
            f"--checkpoint {which}: only a run has checkpoints to choose from", "drop it"
        )
    if named.weights.lower() == IMAGENET:
        return _of_imagenet(named, reads_data)
    return _of_keras_file(named, named.weights, reads_data)


def weight_inputs(named: Named) -> List[Tuple[str, Path]]:
    """Returns (description, path) of the files that the command line names as weights; no output may replace them."""
    options = (("RUN", named.target), ("--checkpoint", named.which), ("--weights", named.weights))
    named_files = [
        (f"what {option} names", expand(name)) for option, name in options if name not in (None, IMAGENET)
    ]
    folder = expand(named.target)
    return named_files + [("a file of the run", folder / name) for name in RUN_FILES]


def task_of(named: Named) -> Optional[str]:
    """Returns the task of the network that the command line names; reads only its configuration.

    The result is None if anything is wrong with the command line, which :func:`open_trained` then reports.
    """
    target, weights = named.target, named.weights
    try:
        path = expand(target)
        if weights is not None and weights.lower() == IMAGENET:
            return "classification"
        if weights is not None or (named.which is not None and _is_network(target)):
            return get_model(target).task
        if is_keras_file(path):
            return get_model(str(named.flags["model_name"])).task
        if is_exported(path):
            return get_model(read_exported(path).record.model).task
        if is_file(path):
            return get_model(read_meta(path)["model"]).task
        return get_model(RunFolder(path).read_config().model_name).task
    except (UserError, KeyError):
        return None


def _is_network(target: str) -> bool:
    return not exists(expand(target)) and any(record.name == target for record in list_models())


def _here(command: str, resolved: Resolved) -> Resolved:
    """Returns the configuration as this machine runs it, after checking the device."""
    from ipucnn.sessions.factory import check_device

    config = resolved.config
    if command in ("infer", "export"):
        # A few images need one replica, and this machine may have fewer IPUs than the one that trained.
        config = replace(config, num_replicas=1, validation_num_replicas=None)
    check_device(config.device)
    return replace(resolved, config=config)


def _refuse(flags: Mapping[str, PlainValue], names: Tuple[str, ...], why: str, hint: str) -> None:
    for name in names:
        if name in flags:
            raise ConfigurationError(f"{BY_NAME[name].flag}: {why}", hint)


def _of_run(named: Named, reads_data: bool) -> _Weights:
    command, target, flags, which = named.command, named.target, named.flags, named.which
    path = expand(target)
    if _is_network(target):
        raise DataError(
            f"{target} is a network, and there is no run folder of that name",
            _how_to_get_weights(command, target),
        )
    if which is not None and is_file(path):
        raise ConfigurationError(
            f"--checkpoint {which}: {target} is one checkpoint, not a run to choose from",
            "drop it, or give the run folder",
        )
    run: Union[TrainedRun, ExportedNetwork]
    try:
        run = read_exported(path) if is_exported(path) else open_run(path, which, command)
        meta, facts = run.meta, trained_facts(run.meta, run.path)
    except KeyError as error:
        raise DataError(
            f"checkpoint {target} lacks {error.args[0]}",
            "give a checkpoint or run folder that `ipucnn train` wrote",
        ) from None
    record = _own_network(named, run)
    refused = _NETWORK_OPTIONS if record is None else tuple(n for n in _NETWORK_OPTIONS if n != "model_name")
    _refuse(flags, refused, f"{target} is a run, which has its own network", "drop it")
    if not reads_data:
        _refuse_data(flags)
    # Without data first: a wrong value is reported with its own hint, and later errors can only concern the data.
    resolved = resolve_saved(command, run.config, flags, reads_data=False)
    if reads_data:
        try:
            resolved = resolve_saved(command, run.config, flags, reads_data=True)
        except (ConfigurationError, DataError) as error:
            where = _data_of_run(run.config, flags, path)
            raise type(error)(error.message, where or error.hint) from error
    if record is not None:
        resolved = replace(resolved, record=record)
    return _Weights(
        resolved,
        summary={"checkpoint": str(run.path), **{key: meta[key] for key in ("model", "weight_updates")}},
        fill=run.fill if isinstance(run, TrainedRun) else None,
        facts=facts,
        what=str(run.path),
        hint=f"take {facts.name}, which it was trained on",
        seed=int(meta["seed"]),
        input_shape=tuple(meta["input_shape"]),
        names=lambda: facts.class_names,
        folder=None if isinstance(run, ExportedNetwork) else run.folder,
        runtime=run.session if isinstance(run, ExportedNetwork) else None,
        exported_range=run.record.input.name_of_range if isinstance(run, ExportedNetwork) else None,
        exported_threshold=run.record.threshold if isinstance(run, ExportedNetwork) else None,
    )


def _data_of_run(config: RunConfig, flags: Mapping[str, PlainValue], run: Path) -> str:
    """Returns a hint if the data set is not found because the run was trained in another folder than this one.

    Returns:
        The hint.  It is "" if the command line names the data, or if the run names them with an absolute path.  It is
        also "" if the run lies below this folder, because then no other folder is known.
    """
    if "dataset" in flags or "dataset_path" in flags:
        return ""
    flag, given = "--dataset-path", str(config.dataset_path)
    if config.dataset is not None and os.sep in config.dataset:
        flag, given = "--dataset", config.dataset
    if os.path.isabs(os.path.expanduser(given)):
        return ""
    if not os.path.relpath(run).startswith(os.pardir):
        return ""
    trained = f"the run was trained with {flag} {shown_value(given)} in another folder"
    for folder in Path(os.path.abspath(run)).parents:
        nearby = os.path.relpath(folder / given)
        # The parent folder itself is no answer: the run does not name it.
        if os.path.normpath(given) != os.curdir and is_folder(Path(nearby)):
            return f"{trained}; from here, add {flag} {shlex.quote(nearby)}"
    return f"{trained}; add {flag} DIR with the place of its data as seen from here"


def _own_network(named: Named, run: Union[TrainedRun, ExportedNetwork]) -> Optional[ModelRecord]:
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
    hint = name_it("--model-name", name, run.path)
    if named.from_python:
        which = "" if named.which is None else f", checkpoint={named.which!r}"
        hint = f"type: ipucnn.load({named.target!r}{which}, model={name!r})"
    record = saved_network(name, meta.get("network"), what, hint)
    check_buildable(record)
    return record


def _how_to_get_weights(command: str, model: str) -> str:
    """Returns the hint for a network that was given without weights."""
    if get_model(model).keras_application is not None:
        return f"give a run folder, or weights: ipucnn {command} {model} --weights imagenet"
    return f"give a run folder; `ipucnn train {model}` makes one"


def _refuse_data(flags: Mapping[str, PlainValue]) -> None:
    _refuse(flags, _DATA_OPTIONS, "no data set is read", "drop it, or ask for the data set with --split eval")


def _of_keras_file(named: Named, weights: str, reads_data: bool) -> _Weights:
    from ipucnn.models.keras_files import load_keras_weights

    path = expand(weights)
    if not is_keras_file(path):
        raise ConfigurationError(
            f"--weights {weights}: neither imagenet nor a weight file of Keras (.weights.h5, .h5, .keras)",
            f"a run or its checkpoint needs no model: ipucnn {named.command} {weights}",
        )
    if not is_file(path):
        raise DataError(f"weight file {path} does not exist", "give a .weights.h5, .h5 or .keras file")
    if not reads_data and "dataset" not in named.flags:
        raise ConfigurationError(
            f"{path} knows neither the names of its classes nor how its images were normalised",
            "name the data set it was trained on: --dataset mnist",
        )
    resolved = resolve(named.command, named.flags, model=named.target)
    return _Weights(
        resolved,
        summary={"checkpoint": str(path), "model": resolved.record.name, "weight_updates": None},
        fill=lambda built: load_keras_weights(built, path),
        weight_file=path,
        scaling=scaling_of_file(path),
    )


def _of_imagenet(named: Named, reads_data: bool) -> _Weights:
    command, model = named.command, named.target
    if exists(expand(model)) and not any(record.name == model for record in list_models()):
        raise ConfigurationError(
            f"--weights imagenet: {model} is a file or folder, and has its own weights",
            f"name a network instead: ipucnn {command} resnet50-keras --weights imagenet",
        )
    record = get_model(model)
    check_has_weights(record)
    if not reads_data:
        _refuse_data(named.flags)
    resolved = resolve(command, named.flags, model=model, reads_data=reads_data)
    if not resolved.is_typed("norm_layer"):
        # The weights belong to the published network, whose norm layer a preset may change.
        norm = norm_layer_of(record.default_norm)
        resolved = replace(resolved, config=replace(resolved.config, norm_layer=norm))

    def fill(built: "KerasModel") -> List[str]:
        from ipucnn.models.imagenet import load_imagenet_weights

        with quiet_download():
            load_imagenet_weights(built, record)
        return []

    summary = {"checkpoint": "imagenet, of Keras Applications", "model": record.name, "weight_updates": None}
    return _Weights(
        resolved,
        summary=summary,
        fill=fill,
        facts=_IMAGENET_FACTS,
        what="the set of ImageNet weights",
        hint="give ImageNet's images: --dataset imagefolder --dataset-path DIR",
        names=None if reads_data else class_names,
    )


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
