"""Evaluation: predicts every sample of a data set exactly once; for segmentation, every pixel of whole images.

Classes are predicted in batches of one fixed shape.  Masks are evaluated image by image: pixel figures, the scores of
the ISBI 2012 challenge if the classes are membranes and cells, and a baseline that always predicts the most frequent
class.
"""

import time
from pathlib import Path
from typing import Iterable, Iterator, List, Optional, Sequence, Tuple

import msgspec
import numpy as np

from ipucnn.aliases import PlainDict, Tensor
from ipucnn.config.rules import OfTask, check_rules
from ipucnn.datasets.base import IN_MEMORY, Examples
from ipucnn.datasets.segmentation.patches import IGNORED
from ipucnn.errors import DataError, MemoryErrors
from ipucnn.events import LOADING, Began, Event, Events, Note, Progress
from ipucnn.runs import setup as run_setup
from ipucnn.runs.folder import KeptThreshold
from ipucnn.runs.images.outputs import PLOTS, Classes, Spool, class_colours, write_csv
from ipucnn.runs.images.segmentation import (
    PatchwiseNetwork,
    Segmented,
    SegmentedImage,
    foreground_probability,
)
from ipucnn.runs.overwriting import check_outputs
from ipucnn.runs.records import Bin, ClassScores, EvaluatedDataset, Evaluation
from ipucnn.runs.requests import EvaluateRequest
from ipucnn.runs.rules import EVALUATION_RULES
from ipucnn.runs.sources import weight_inputs
from ipucnn.runs.trained import TrainedSetup, open_trained
from ipucnn.runs.writer import open_writer
from ipucnn.sessions.role import find_role
from ipucnn.text import counted, exact, printable
from ipucnn.training.evaluation import EvaluationTotals, class_figures, soft_dice
from ipucnn.training.program import evaluation_replicas
from ipucnn.training.segment_scores import SCORES, SegmentScores

CANDIDATES = tuple(k / 20 for k in range(1, 20))
"""Thresholds to choose the recommended one from, if the classes are not membranes and cells."""


def evaluate_run(request: EvaluateRequest) -> Events[Evaluation]:
    """Evaluates the weights of a run, or other weights, on an evaluation set.

    Yields a ``Segmented`` for each image of a segmentation network.

    Raises:
        ConfigurationError: an option that does not fit the network; an output that would replace an input file.
        InfeasibleError: a batch does not fit into memory.
    """
    yield Began(LOADING)
    outputs = (
        ("--plot", request.plot, PLOTS),
        ("--predictions", request.predictions, (".csv",)),
        ("--contact-sheet", request.contact_sheet, (".png",)),
    )
    check_outputs(outputs, weight_inputs(request.named))
    trained = open_trained(request.named)
    segments, network = trained.record.task == "segmentation", None
    check_rules(EVALUATION_RULES, request, OfTask(segments, trained.record.name))
    if segments:
        network = PatchwiseNetwork(
            trained,
            request.patch_size,
            request.verbose,
            request.test_time_augmentation,
            command="evaluate",
        )
    loss = run_setup.loss_name(trained.config, trained.record.task)
    totals = EvaluationTotals(trained.source.info.num_classes, loss, trained.config.label_smoothing)
    if trained.weights.weight_updates is None:
        yield Note(trained.resolved.choice.message)
    yield from map(Note, trained.introduction())
    # An index of records, whose bar this replaces, may have been made.
    yield Began(LOADING)
    if network is None:
        device, wall_s, notes = yield from _evaluate_classes(trained, totals, request)
        return _evaluation(trained, device, totals, wall_s, notes)
    segmentation, wall_s = yield from _evaluate_masks(trained, totals, network, request)
    evaluation = _evaluation(trained, network.device, totals, wall_s, network.notes)
    return msgspec.structs.replace(evaluation, segmentation=segmentation)


def measured(
    batches: Iterable[Tuple[Tuple["Tensor", ...], np.ndarray]], totals: EvaluationTotals
) -> Iterator[Tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Adds all samples of weight 1 to the totals; padding is removed before anything is computed.

    Args:
        batches: ((images, labels, weights), logits), weights 1 for samples and 0 for padding.
        totals: the sums to add to.

    Yields:
        The labels, predicted classes and their probabilities of each batch.
    """
    for (_, labels, weights), logits in batches:
        is_sample = np.asarray(weights) > 0
        truth = np.asarray(labels)[is_sample]
        yield (truth, *totals.add(np.asarray(logits)[is_sample], truth))


def _evaluate_classes(
    trained: TrainedSetup, totals: EvaluationTotals, request: EvaluateRequest
) -> Events[Tuple[str, float, List[str]]]:
    """Adds all samples to the totals and writes a row for each.

    Returns:
        The kind of device, the seconds taken, and the notes on the network.
    """
    config, size = trained.config, len(trained.source.eval)
    session = trained.session(request.verbose)
    trained, session = run_setup.move_preprocessing(trained, session)
    from ipucnn.datasets.pipeline import data_errors

    batch = config.validation_micro_batch_size or config.micro_batch_size
    batch *= evaluation_replicas(config)
    rows = Spool()

    too_large = MemoryErrors(
        f"batches of {counted(batch, 'image')} do not fit into memory", "lower --validation-micro-batch-size"
    )
    with too_large, data_errors():
        predictor, notes = trained.load(session, "evaluate")
        yield from (Note(f"note: {note}") for note in notes)
        started = time.perf_counter()
        batches = predictor.logits(run_setup.evaluation_batches(trained, batch, predictor))
        for samples in measured(batches, totals):
            if request.predictions is not None:
                for label, guess, probability in zip(*(values.tolist() for values in samples)):
                    rows.append({"label": label, "prediction": guess, "probability": probability})
            yield Progress("evaluating", totals.samples, size)
    wall_s = time.perf_counter() - started
    if totals.samples != size:
        raise RuntimeError(f"{counted(totals.samples, 'sample')} were evaluated, and the data set has {size}")
    if request.predictions is not None:
        _write_predictions(request.predictions, rows, trained.source.eval, _class_names(trained))
    return session.device.kind, wall_s, notes


def _write_predictions(path: Path, rows: Spool, examples: Examples, names: Tuple[str, ...]) -> None:
    paths = getattr(examples, "paths", None)

    def cells(number: int, row: PlainDict) -> Sequence[object]:
        image = exact(paths[number]) if paths else ""
        return number, image, names[row["label"]], names[row["prediction"]], f"{row['probability']:.6f}"

    columns = ["index", "image", "label", "prediction", "probability"]
    write_csv(path, columns, (cells(number, row) for number, row in enumerate(rows)))


def _class_names(trained: TrainedSetup) -> Tuple[str, ...]:
    """Returns the printable names of the network's classes, which are also the numbers of the set's labels."""
    return tuple(map(printable, trained.source.info.class_names))


def _evaluation(
    trained: TrainedSetup, device: str, totals: EvaluationTotals, wall_s: float, notes: Sequence[str]
) -> Evaluation:
    info = trained.source.info
    return Evaluation(
        checkpoint=printable(trained.weights.name),
        model=trained.record.name,
        weight_updates=trained.weights.weight_updates,
        task=trained.record.task,
        dataset=EvaluatedDataset(
            name=info.name,
            location=printable(info.location),
            size=info.num_eval,
            stored=trained.num_stored,
        ),
        notes=[*trained.notes, *info.warnings, *notes],
        device=device,
        measured={**totals.result(), "wall_s": wall_s},
        classes=msgspec.convert(totals.classes(_class_names(trained)), List[ClassScores]),
        calibration=msgspec.convert(totals.bins(), List[Bin]),
        confusion_matrix=totals.confusion.tolist(),
    )


# --- masks


def _evaluate_masks(
    trained: TrainedSetup, totals: EvaluationTotals, network: PatchwiseNetwork, request: EvaluateRequest
) -> Events[Tuple[PlainDict, float]]:
    """Adds all pixels to the totals and stores the recommended threshold in the folder of the run.

    That of other patches, or of averaged versions, is not stored: ``infer`` would take it without them.

    Returns:
        ``segmentation`` of the report, and the seconds taken.
    """
    examples = trained.source.eval
    if isinstance(examples, IN_MEMORY):
        yield from network.warn_of_seams([image.shape[:2] for image in examples.images])
    evaluation = MaskEvaluation(trained, network, totals)
    started = time.perf_counter()
    yield from evaluation.run()
    wall_s = time.perf_counter() - started
    report = evaluation.report()
    folder, updates = trained.weights.folder, trained.weights.weight_updates
    if report["threshold"] is None or folder is None or updates is None:
        return report, wall_s
    if request.patch_size is not None or request.test_time_augmentation > 1:
        yield Note(
            "infer does not take this threshold, which is one of --patch-size or --test-time-augmentation"
        )
        return report, wall_s
    # A copied checkpoint may be of another run than the folder that it lies in.
    if Path(trained.weights.name).absolute().parent == folder.checkpoints.absolute():
        try:
            info, writer = trained.source.info, open_writer(find_role(), folder.path)
            chosen_on = f"{counted(len(examples), 'image')} of {info.name} ({info.location})"
            writer.keep_threshold(updates, KeptThreshold(report["threshold"]["value"], chosen_on))
            report["threshold"]["kept"] = True
        except DataError as error:
            yield Note(f"warning: the threshold for infer is not kept: {error.message}")
    return report, wall_s


class MaskEvaluation:
    """Evaluates images one by one.

    Args:
        trained: the network and the evaluation set.
        network: the network for images of any size.
        totals: the sums that losses and pixels are added to.
    """

    def __init__(self, trained: TrainedSetup, network: PatchwiseNetwork, totals: EvaluationTotals) -> None:
        info, examples = trained.source.info, trained.source.eval
        if not isinstance(examples, IN_MEMORY):
            raise DataError(f"data set {info.name} has no masks", "take one with masks")
        self._examples, self._network, self._totals = examples, network, totals
        self._classes = Classes(info.class_names, class_colours(info.num_classes, info.class_colours))
        self._names = examples.names or [f"{info.name}/eval/{number}" for number in range(len(examples))]
        # The challenge's scores are defined for membranes between cells, if the data set says that it has them.
        is_judge = not trained.by_number and tuple(info.class_names) == ("membrane", "cell")
        self._scores = SegmentScores() if is_judge else None
        self._baseline = SegmentScores((0.5,)) if is_judge else None
        # For each threshold: correctly predicted pixels of class 1, and all pixels predicted as class 1.
        self._above: np.ndarray = np.zeros((len(CANDIDATES), 2), np.int64)
        self.rows: List[PlainDict] = []
        self._scores_s = 0.0

    def run(self) -> Iterator[Event]:
        """Evaluates all images of the evaluation set."""
        images, masks = self._examples.images, self._examples.masks
        for i, image, logits in self._network.each((i, images[i]) for i in range(len(images))):
            yield Segmented(i, len(images), self._one(i, image, np.asarray(masks[i]), logits))
            yield Progress("evaluating", i + 1, len(images))

    def _one(self, number: int, image: np.ndarray, truth: np.ndarray, logits: np.ndarray) -> SegmentedImage:
        before = self._totals.confusion.copy()
        predicted = self._totals.add(logits[np.newaxis], truth[np.newaxis])[0][0]
        figures = class_figures(self._totals.confusion - before)
        row: PlainDict = {
            "image": self._names[number],
            "accuracy": figures["accuracy"],
            "dice": figures["dice"],
            "soft_dice": soft_dice(logits, truth),
        }
        if self._classes.is_binary:
            probability = foreground_probability(logits)
            known = truth != IGNORED
            masks = [known & (probability > threshold) for threshold in CANDIDATES]
            self._above += [(np.count_nonzero(truth[mask]), np.count_nonzero(mask)) for mask in masks]
            if self._scores is not None and self._baseline is not None:
                started = time.perf_counter()
                row.update(self._scores.add(probability, truth) or dict.fromkeys(SCORES))
                self._baseline.add(np.ones(truth.shape), truth)
                self._scores_s += time.perf_counter() - started
        self.rows.append(row)
        return SegmentedImage(
            row["image"], image, predicted, self._classes, truth, mean_dice=mean_dice(row["dice"])
        )

    def report(self) -> PlainDict:
        """Returns ``segmentation`` of the report.

        Returns:
            ``dice`` and ``iou`` of each class; ``soft_dice``, the mean over images; ``scores`` of the challenge (None
            without membranes); the recommended ``threshold`` (None for more than two classes); ``baseline``, the
            figures of predicting the most frequent class everywhere; ``images``, a row for each image; ``network_s``
            and ``scores_s``, the seconds taken by the network, once it was built, and by the challenge's scores;
            ``patch_sizes`` and ``test_time_augmentation``.
        """
        confusion = self._totals.confusion
        commonest = int(confusion.sum(axis=1).argmax())
        trivial = np.zeros_like(confusion)
        trivial[:, commonest] = confusion.sum(axis=1)
        baseline = {"class": self._classes.names[commonest], **class_figures(trivial), "scores": None}
        of_baseline = self._baseline.result() if self._baseline is not None and commonest == 1 else None
        if of_baseline is not None:
            baseline["scores"] = {name: part["score"] for name, part in of_baseline.items()}
        figures = class_figures(confusion)
        scores = None if self._scores is None else self._scores.result()
        return {
            "dice": figures["dice"],
            "iou": figures["iou"],
            "soft_dice": float(np.mean([row["soft_dice"] for row in self.rows])),
            "scores": scores,
            "threshold": self._threshold(scores),
            "baseline": baseline,
            "images": self.rows,
            "network_s": self._network.busy_s,
            "scores_s": self._scores_s,
            "patch_sizes": self._network.patch_sizes,
            "test_time_augmentation": self._network.test_time_augmentation,
        }

    def _threshold(self, scores: Optional[PlainDict]) -> Optional[PlainDict]:
        """Returns the threshold with the best V^Rand for membranes, else with the best Dice of class 1.

        Returns:
            Its ``value``; ``of``, the name of the score; that ``score``; and the score ``at_half``.  None for more than
            two classes, and if no pixel is of class 1: every threshold has the same score.
        """
        if not self._classes.is_binary or not self._totals.confusion[1].sum():
            return None
        if scores is not None:
            best = scores["rand"]["best"]
            of, value, score, at_half = "V^Rand", best["threshold"], best["score"], scores["rand"]["score"]
        else:
            true = int(self._totals.confusion[1].sum())
            dice = 2.0 * self._above[:, 0] / np.maximum(self._above[:, 1] + true, 1)
            half = CANDIDATES.index(0.5)
            best_index = max(range(len(dice)), key=lambda k: (dice[k], -abs(k - half)))
            of = f"Dice, {printable(self._classes.names[1])}"
            value, score, at_half = CANDIDATES[best_index], float(dice[best_index]), float(dice[half])
        return {"value": value, "of": of, "score": score, "at_half": at_half}


def mean_dice(dice: Sequence[Optional[float]]) -> float:
    """Returns the score that ranks images: the mean Dice of two classes, or of all but class 0 if there are more."""
    known = [value for value in (dice if len(dice) == 2 else dice[1:]) if value is not None]
    return float(np.mean(known)) if known else 1.0
