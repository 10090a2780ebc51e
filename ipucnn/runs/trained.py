"""Opens trained networks for ``evaluate``, ``infer`` and ``export``: from a run, a Keras file, an export, or ImageNet.

The command line is resolved, and everything that can be is checked, without TensorFlow.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import List, Optional, Tuple

import numpy as np

from ipucnn.aliases import KerasModel
from ipucnn.config.resolve import Resolved, resolve_saved
from ipucnn.datasets.base import (
    ArrayExamples,
    DatasetInfo,
    DataSource,
    fingerprint,
    limit_source,
)
from ipucnn.datasets.classes import Matched, by_stored_values, match, placed, relabelled, undivided
from ipucnn.datasets.images import conversions
from ipucnn.datasets.pixels import InputRange
from ipucnn.datasets.registry import ChosenDataset, needs_files
from ipucnn.datasets.repeated import num_shared
from ipucnn.errors import DataError, UserError
from ipucnn.filesystem import real
from ipucnn.planning.search.neighbours import prediction_advice
from ipucnn.python_files import is_python_name
from ipucnn.runs import setup as run_setup
from ipucnn.runs.rules import check_group
from ipucnn.runs.setup import Setup
from ipucnn.runs.sources import Weights, WeightsArgument, find_weights
from ipucnn.sessions.group import find_instances
from ipucnn.sessions.session import Predictor, Session
from ipucnn.text import counted, printable

_DIVIDES_DATA = ("skip_damaged", "validation_fraction", "allow_partial")
"""The options that choose which samples of a given set are evaluated, beside limits."""


@dataclass(frozen=True)
class TrainedSetup(Setup):
    """A setup whose network has trained weights.  If no data set is read, its source has only the facts of one.

    Attributes:
        weights: the weights.
        num_stored: evaluation samples of the data set before ``--limit-eval``; 0 if no data set is read.
        notes: what was assumed about the data set's classes, or taken over for its images, one line each.
        by_number: whether the data set's classes are the network's by number alone, without names.
    """

    weights: Weights
    num_stored: int = 0
    notes: Tuple[str, ...] = ()
    by_number: bool = False

    @property
    def labels(self) -> Tuple[str, ...]:
        """The names of the network's classes; they may be read from the network, which imports TensorFlow."""
        return self.weights.labels(self.source.info)

    def session(self, verbose: bool) -> Session:
        """Makes the session that runs the network; ``verbose`` shows TensorFlow's own messages."""
        return self.weights.session(self.config, verbose)

    @property
    def warnings(self) -> Tuple[str, ...]:
        """Warnings of the data set, if one is read: its files may have changed since training printed its own."""
        return self.source.info.warnings if self.num_stored else ()

    def introduction(self) -> List[str]:
        """Returns notes and warnings for the user before the work begins, one line each."""
        from ipucnn.sessions.factory import device_warnings

        warnings = [*device_warnings(self.config.device), *self.warnings]
        return [*(f"note: {note}" for note in self.notes), *(f"warning: {text}" for text in warnings)]

    def load(self, session: Session, command: str) -> Tuple[Predictor, List[str]]:
        """Builds the network for a command.

        Returns:
            Its predictor, and notes for the user.
        """
        model, notes = self.build()
        if command == "evaluate" and model is not None:
            notes += _penalty_notes(model)
        advice = prediction_advice(model, self.record.name, self.config, command)
        return session.predictor(model, advice), notes

    def build(self) -> Tuple[Optional["KerasModel"], List[str]]:
        """Builds the network with its weights (imports TensorFlow).

        Returns:
            The network, None for an exported file; and notes for the user.
        """
        if self.weights.is_exported:
            return None, []
        model = run_setup.build(self)
        return model, [*self.record.notes, *self.weights.fill(self, model)]


def _penalty_notes(model: "KerasModel") -> List[str]:
    """Returns a note if regularizers belong to the network: what they would add to the loss in Keras."""
    from ipucnn.models.names import added_to_loss, named_weights, penalties

    added = added_to_loss(penalties(model), named_weights(model))
    return (
        [f"the loss is that of the data alone; Keras' evaluate adds the regularizers' {added:.6g}"]
        if added
        else []
    )


def facts_only(info: DatasetInfo) -> DataSource:
    """Returns a data source without examples, for a data set of which only the facts are needed."""
    height, width, channels = info.image_shape
    none = ArrayExamples(np.zeros((0, height or 1, width or 1, channels), np.uint8), np.zeros(0, np.int32))
    return DataSource(info, none, none)


def open_trained(named: WeightsArgument, reads_data: bool = True) -> TrainedSetup:
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


def _open(named: WeightsArgument, reads_data: bool) -> TrainedSetup:
    """Finds the weights, and reads the data set that they are used with."""
    weights = find_weights(named, reads_data)
    resolved = _on_this_machine(named.command, weights.resolved)
    config, facts, num_stored, matched = resolved.config, weights.facts, 0, Matched(())
    changed: List[str] = []
    if facts is not None and not reads_data:
        source = facts_only(replace(facts, max_image_pixels=config.max_image_pixels))
        shape, size = weights.input_shape, config.image_size
        if shape is None:
            shape = resolved.record.input_shape if size is None else (*size, resolved.record.input_shape[2])
        network_range = InputRange.of(
            run_setup.range_name(config.normalise, resolved.record), source.info, shape[2]
        )
        setup = Setup(resolved, source, shape, None, weights.seed, network_range)
    else:
        everything = replace(resolved, config=replace(config, limit_train=None, limit_eval=None))
        setup = run_setup.prepare(everything, weights.seed, weights.input_shape)
        is_evaluated = reads_data and named.command != "export"
        source, is_other, divided = _as_evaluated(setup, weights, is_evaluated)
        num_stored = len(source.eval)
        if facts is not None:
            source, matched = _as_trained(source, facts, weights)
        changed = [
            *divided,
            *([] if is_other else _changed_since_training(setup.with_source(source), weights)),
        ]
        source = limit_source(source, config.limit_train, config.limit_eval, weights.seed)
        setup = replace(setup, resolved=resolved).with_source(source)
    setup, notes = weights.fitted(setup)
    notes = [
        *([matched.note] if matched.note else []),
        *notes,
        *changed,
        *conversions(setup.source.info, setup.input_shape),
    ]
    return TrainedSetup(
        **vars(setup), weights=weights, num_stored=num_stored, notes=tuple(notes), by_number=matched.by_number
    )


def _as_evaluated(setup: Setup, weights: Weights, is_evaluated: bool) -> Tuple[DataSource, bool, List[str]]:
    """Returns the data set with what is evaluated of it.

    A typed set that ipucnn divides itself counts whole, unless the network was trained on it.

    Args:
        is_evaluated: whether samples are evaluated; otherwise the set has the names of classes, and nothing is chosen.

    Returns:
        The set; whether it is another one than that of training, as far as is known; and a note on the division.
    """
    source, info, origins = setup.source, setup.source.info, setup.resolved.origins
    is_typed = any(origins[name].is_typed for name in ("dataset", "dataset_path"))
    is_divided = origins["validation_fraction"].is_typed
    if not (is_evaluated and (is_typed or is_divided)):
        return source, is_typed, []
    name, of_training = f"{info.name} ({printable(info.location)})", _of_training(setup, weights)
    is_whole = info.own_split and of_training is None and not is_divided
    if is_whole:
        source = undivided(source)
    elif info.own_split:
        source = of_training or source
    count, what = len(source.eval), "pair" if info.task == "segmentation" else "image"
    notes = []
    if is_whole:
        notes = [f"all {counted(count, what)} of {name} are for evaluation"]
    elif info.own_split and not info.division:
        among, verb = counted(len(source.train) + count, what), "is" if count == 1 else "are"
        notes = [f"{count:,} of the {among} of {name} {verb} held out in training, and {verb} for evaluation"]
    if of_training is None or is_divided:
        notes += _trained_on(source, name, weights)
    return source, of_training is None, notes


def _trained_on(source: DataSource, name: str, weights: Weights) -> List[str]:
    """Returns a note if a network was trained on images that are evaluated, or may have been."""
    before = weights.trained_with
    with suppress(UserError, OSError):  # the set of training is no longer there
        if before is not None:
            resolved = resolve_saved("infer", replace(before, download=False), {})
            former = run_setup.prepare(resolved, weights.seed, weights.input_shape).source
            shared = num_shared(former.train, source.eval) if _is_that_of_training(former, weights) else None
            if shared:
                verb = "is" if shared == 1 else "are"
                return [
                    f"{shared:,} of the {counted(len(source.eval), 'image')} of {name} {verb} among those that the "
                    "network was trained on: scores come out too high"
                ]
            if shared == 0 and before.weights is None:
                return []
    return [
        "if the network, or the weights that it began with, was trained on some of the images, scores of those are too "
        "high: not all images that it was trained on could be compared"
    ]


def _is_that_of_training(source: DataSource, weights: Weights) -> bool:
    """Returns whether a limited data set has the content of that of training."""
    if weights.facts is None or weights.data_sha256 == fingerprint(source):
        return weights.facts is not None
    with suppress(UserError):
        # In training the classes may have been numbered as those of its first weights.
        numbered = _as_trained(source, weights.facts, weights)[0]
        is_other = not np.array_equal(numbered.eval.labels, source.eval.labels)
        return is_other and weights.data_sha256 == fingerprint(numbered)
    return False


def _of_training(setup: Setup, weights: Weights) -> Optional[DataSource]:
    """Returns a set as training divided it, if the network was trained on this set; else None.

    It is the one of training if it lies where that did, or has the same files and classes wherever it lies.  Files
    without facts of training are used with the set that they were trained on.
    """
    source, choice, before = setup.source, setup.resolved.choice, weights.trained_with
    if weights.facts is None:
        return source
    if before is None:
        return None
    config = replace(before, limit_train=None, limit_eval=None)
    if config.fold is not None and not source.held_out:
        with suppress(UserError):  # fewer examples than folds are other ones
            source = run_setup.fold_of(source, config, weights.seed)
    is_same = before.dataset == setup.config.dataset and is_python_name(str(before.dataset))
    with suppress(UserError, OSError):  # the set of training is no longer there
        former = resolve_saved(setup.resolved.command, before, {}).choice
        is_same = is_same or _identity(former) == _identity(choice)
    limited = limit_source(source, before.limit_train, before.limit_eval, weights.seed)
    return source if is_same or _is_that_of_training(limited, weights) else None


def _identity(choice: ChosenDataset) -> Tuple[str, List[Path]]:
    """Returns what tells a set from others: its name, its folder, and those of its parts."""
    if choice.found is None:
        return choice.name, []
    inside = (path for paths in choice.files.parts.values() for path in paths)
    return choice.name, [*map(real, (choice.files.location, *inside))]


def _changed_since_training(setup: Setup, weights: Weights) -> List[str]:
    """Returns a note if the files of the set of training, of which nothing is limited, are not those of training."""
    source, choice, origins = setup.source, setup.resolved.choice, setup.resolved.origins
    is_other = weights.facts is None or any(origins[name].is_typed for name in _DIVIDES_DATA)
    is_made = choice.make is None and not needs_files(choice.name)
    before = weights.trained_with
    if is_other or is_made or before is None or weights.data_sha256 is None:
        return []
    if _is_that_of_training(
        limit_source(source, before.limit_train, before.limit_eval, weights.seed), weights
    ):
        return []
    return [
        f"{source.info.name} is not as it was in training: images that were trained on may be among those that are "
        "evaluated now, and their scores are too high"
    ]


def _as_trained(source: DataSource, facts: DatasetInfo, weights: Weights) -> Tuple[DataSource, Matched]:
    """Returns a source with the classes and the preprocessing of the training set, and how its classes were matched.

    The images of another set are cropped and normalised as those of the training set, and get its channels.

    Raises:
        DataError: the set has other classes, or masks of images with other channels.
    """
    info = source.info
    names = facts.class_names or ("",) * facts.num_classes  # ImageNet's are downloaded later
    matched = match(info.class_names, names, info.name, weights.name, weights.hint)
    if matched.by_number:
        matched = by_stored_values(matched, info, facts)
    source = relabelled(source, matched.labels, facts.class_names or placed(info.class_names, matched.labels))
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


def _on_this_machine(command: str, resolved: Resolved) -> Resolved:
    """Returns the configuration as this machine runs it, after checking the device."""
    from ipucnn.sessions.factory import check_device

    config = resolved.config
    if command in ("infer", "export"):
        # A few images need one replica, and this machine may have fewer IPUs than the one that trained; poprun chooses
        # the IPUs of its instances.
        alone = None if find_instances().under_poprun else 1
        config = replace(config, num_replicas=1, validation_num_replicas=alone)
    check_device(config.device)
    return replace(resolved, config=config)
