"""Evaluation: takes every sample of a data set exactly once; for segmentation, every pixel of whole images.

Classes are predicted on batches of one fixed shape.  Masks are judged image by image: their pixels, the scores of
the ISBI 2012 challenge where the truth is membranes, and a baseline that knows nothing but the commonest class.
"""

import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from ipucnn.aliases import PlainDict, Tensor
from ipucnn.datasets.base import ArrayExamples, Examples
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.planning.search.variations import prediction_would_fit
from ipucnn.runs import setup as run_setup
from ipucnn.runs.images.outputs import Spool, check_outputs, class_colours, write_csv
from ipucnn.runs.images.segmentation import (
    TiledNetwork,
    check_tile_size,
    check_views,
    foreground_probability,
)
from ipucnn.runs.trained import Named, TrainedSetup, open_trained, weight_inputs
from ipucnn.text import counted, printable
from ipucnn.training.evaluation import EvaluationTotals, soft_dice
from ipucnn.training.metrics import SCORES, SegmentScores

CANDIDATES = tuple(k / 20 for k in range(1, 20))
"""Thresholds of which the best one is recommended, where the truth is no membranes."""
PLOTS = (".png", ".pdf", ".svg")
OnBatch = Callable[[int, int], None]


@dataclass(frozen=True)
class JudgedImage:
    """An image that was evaluated.

    Attributes:
        row: ``image``, ``accuracy``, ``dice`` of each class, and where the truth is membranes ``rand`` and ``info``.
        image: uint8 [h, w, c].
        truth, predicted: [h, w] classes.
        class_names: of all classes.
        colours: of all classes, see ``outputs.class_colours``.
    """

    row: PlainDict
    image: np.ndarray
    truth: np.ndarray
    predicted: np.ndarray
    class_names: Tuple[str, ...]
    colours: Tuple[Tuple[int, int, int], ...]


def measure(
    batches: Iterable[Tuple[Tuple["Tensor", ...], np.ndarray]],
    totals: EvaluationTotals,
    *,
    on_batch: Optional[Callable[[int], None]] = None,
    on_samples: Optional[Callable[[np.ndarray, np.ndarray, np.ndarray], None]] = None,
) -> int:
    """Adds all samples of weight 1 to the totals; padding is left out before anything is computed from it.

    Args:
        batches: ((images, labels, weights), logits), weights 1 for samples and 0 for padding.
        totals: where the sums go.
        on_batch: called with the number of samples seen so far.
        on_samples: called with labels, predicted classes and their probabilities.

    Returns:
        The number of samples seen.
    """
    for (_, labels, weights), found in batches:
        real = np.asarray(weights) > 0
        logits = np.asarray(found)[real]
        truth = np.asarray(labels)[real]
        predicted, confidence = totals.add(logits, truth)
        if on_samples is not None:
            on_samples(truth, predicted, confidence)
        if on_batch is not None:
            on_batch(totals.samples)
    return totals.samples


def evaluate_run(
    named: Named,
    *,
    plot: Optional[Path] = None,
    predictions: Optional[Path] = None,
    contact_sheet: Optional[Path] = None,
    tile_size: Optional[int] = None,
    views: int = 1,
    verbose: bool = False,
    say: Callable[[str], None] = lambda line: None,
    on_batch: Optional[OnBatch] = None,
    on_image: Callable[[JudgedImage], None] = lambda image: None,
) -> PlainDict:
    """Evaluates a run's weights, or others, on an evaluation set.

    Args:
        named: the network and its weights; its flags hold over the run's own options.
        plot: a figure the caller will write; its name is checked before any work.
        predictions: CSV file that gets a row per sample.
        contact_sheet: a picture of segmented images the caller will write; its name is checked before any work.
        tile_size: height and width of the tiles that a segmentation network sees; None chooses.
        views: versions of each image whose probabilities are averaged, of a segmentation network.
        verbose: let TensorFlow speak.
        say: takes lines worth knowing before the work begins (which data set, warnings).
        on_batch: called with the samples seen and their total.
        on_image: called with each image that was segmented.

    Returns:
        ``measured`` (loss, accuracy, top5 or dice and iou, calibration_error, samples), ``classes``,
        ``confusion_matrix`` (rows: true classes), ``calibration``, what was evaluated, and on what; of a
        segmentation network ``segmentation``, too: see ``MaskEvaluation.report``.
    """
    outputs = (
        ("--plot", plot, PLOTS),
        ("--predictions", predictions, (".csv",)),
        ("--contact-sheet", contact_sheet, (".png",)),
    )
    check_outputs(outputs, weight_inputs(named))
    trained = open_trained(named)
    segments = trained.record.task == "segmentation"
    if predictions is not None and segments:
        raise ConfigurationError(
            f"--predictions: {trained.record.name} segments images, it has no labels", "drop it"
        )
    if not segments and (contact_sheet is not None or tile_size is not None or views != 1):
        option = f"--views {views}" if tile_size is None else f"--tile-size {tile_size}"
        option = option if contact_sheet is None else "--contact-sheet"
        raise ConfigurationError(
            f"{option}: {trained.record.name} classifies images, it makes no masks", "drop it"
        )
    if segments:
        check_tile_size(trained.record, tile_size)
        check_views(views)
    totals = EvaluationTotals(
        trained.source.info.num_classes,
        run_setup.loss_name(trained.config, trained.record.task),
        trained.config.label_smoothing,
    )
    if trained.summary["weight_updates"] is None:
        say(trained.resolved.choice.message)
    for warning in trained.warnings:
        say(f"warning: {warning}")
    size = len(trained.source.eval)
    on_done = None if on_batch is None else lambda done: on_batch(done, size)
    if not segments:
        device, wall_s = _evaluate_classes(trained, totals, verbose, predictions, on_done)
        return _report(trained, device, totals, wall_s)
    network = TiledNetwork(trained, tile_size, verbose, views, command="evaluate")
    examples = trained.source.eval
    if isinstance(examples, ArrayExamples):
        network.warn_of_seams([examples.images.shape[1:3]], say)
    with network.together():
        evaluation = MaskEvaluation(trained, network, totals)
        started = time.perf_counter()
        evaluation.run(on_image, on_done or (lambda done: None))
        wall_s = time.perf_counter() - started
    found = evaluation.report()
    if found["threshold"] is not None and trained.folder is not None and network.is_writer:
        try:
            trained.folder.keep_threshold(trained.summary["weight_updates"], found["threshold"]["value"])
            found["threshold"]["kept"] = True
        except DataError as error:
            say(f"warning: the threshold for infer is not kept: {error.message}")
    return {**_report(trained, network.device, totals, wall_s), "segmentation": found}


def _evaluate_classes(
    trained: TrainedSetup,
    totals: EvaluationTotals,
    verbose: bool,
    predictions: Optional[Path],
    on_done: Optional[Callable[[int], None]],
) -> Tuple[str, float]:
    """Adds all samples to the totals, and writes a row for each; returns the kind of device and the seconds it took."""
    config = trained.config
    session = trained.session(verbose, trained.join())
    trained = run_setup.move_preprocessing(trained, session)
    from ipucnn.datasets.pipeline import data_errors

    replicas = config.validation_num_replicas or config.num_replicas
    micro_batch = config.validation_micro_batch_size or config.micro_batch_size
    rows = Spool() if predictions is not None else None
    with session.together(), _memory_errors(micro_batch * replicas), data_errors():
        model = trained.build()
        session.would_fit = prediction_would_fit(model, trained.record.name, config, "evaluate")
        session.prepare_evaluation(model, None)
        started = time.perf_counter()
        seen = measure(
            session.logits(run_setup.evaluation_batches(trained, micro_batch * replicas, session)),
            totals,
            on_batch=on_done,
            on_samples=None if rows is None else lambda *samples: _keep(rows, *samples),
        )
    wall_s = time.perf_counter() - started
    size = len(trained.source.eval)
    if seen != size:
        raise RuntimeError(f"{counted(seen, 'sample')} were evaluated, and the data set has {size}")
    if predictions is not None and rows is not None:
        _write_predictions(predictions, rows, trained.source.eval, _class_names(trained))
    return session.device.kind, wall_s


@contextmanager
def _memory_errors(batch: int) -> Iterator[None]:
    """Says which option is at fault where a batch does not fit, and memory does not suffice."""
    import tensorflow as tf

    try:
        yield
    except (MemoryError, tf.errors.ResourceExhaustedError) as error:
        raise ConfigurationError(
            f"batches of {counted(batch, 'image')} do not fit into memory",
            "lower --validation-micro-batch-size",
        ) from error


def _class_names(trained: TrainedSetup) -> Tuple[str, ...]:
    """The names the network was trained with where they are known, else the data set's; printable."""
    names, info = trained.names(), trained.source.info
    return tuple(map(printable, names if len(names) == info.num_classes else info.class_names))


def _report(trained: TrainedSetup, device: str, totals: EvaluationTotals, wall_s: float) -> PlainDict:
    info = trained.source.info
    return {
        **trained.summary,
        "checkpoint": printable(trained.summary["checkpoint"]),
        "task": trained.record.task,
        "dataset": {
            "name": info.name,
            "location": printable(info.location),
            "size": info.num_eval,
            "stored": trained.num_stored,
        },
        "device": device,
        "measured": {**totals.result(), "wall_s": wall_s},
        "classes": totals.classes(_class_names(trained)),
        "calibration": totals.bins(),
        "confusion_matrix": totals.confusion.tolist(),
    }


def _keep(rows: Spool, labels: np.ndarray, predicted: np.ndarray, confidence: np.ndarray) -> None:
    for label, guess, probability in zip(labels.tolist(), predicted.tolist(), confidence.tolist()):
        rows.append({"label": label, "prediction": guess, "probability": probability})


def _write_predictions(path: Path, rows: Spool, examples: Examples, names: Tuple[str, ...]) -> None:
    paths = getattr(examples, "paths", None)
    columns: List[str] = ["index", "image", "label", "prediction", "probability"]
    write_csv(
        path,
        columns,
        (
            (
                i,
                printable(paths[i]) if paths else "",
                names[row["label"]],
                names[row["prediction"]],
                f"{row['probability']:.6f}",
            )
            for i, row in enumerate(rows)
        ),
    )


class MaskEvaluation:
    """Evaluates images one by one; of several workers each computes its share, and the first one alone judges them by
    the challenge's scores, which take long.

    Args:
        trained: the network and the set.
        network: for images of any size.
        totals: where losses and pixels go.
    """

    def __init__(self, trained: TrainedSetup, network: TiledNetwork, totals: EvaluationTotals) -> None:
        self._info, examples = trained.source.info, trained.source.eval
        if not isinstance(examples, ArrayExamples):
            raise DataError(f"data set {self._info.name} has no masks", "take one with masks")
        self._examples = examples
        self._network, self._totals = network, totals
        judges = network.is_writer and has_membranes(self._info.class_names)
        self._scores = SegmentScores() if judges else None
        self._baseline = SegmentScores((0.5,)) if self._scores is not None else None
        # Pixels that are class 1 and predicted so, and that are predicted so, for each threshold.
        self._above: Optional[np.ndarray] = None
        if self._info.num_classes == 2:
            self._above = np.zeros((len(CANDIDATES), 2), np.int64)
        self.rows: List[PlainDict] = []
        self._scores_s = 0.0

    def run(
        self,
        on_image: Callable[[JudgedImage], None] = lambda image: None,
        on_batch: Callable[[int], None] = lambda done: None,
    ) -> int:
        """All images of the evaluation set.

        Returns:
            How many there were.
        """
        images, masks = self._examples.images, self._examples.labels
        for i, image, logits in self._network.each((i, images[i]) for i in range(len(self._examples))):
            on_image(self._one(i, image, np.asarray(masks[i]), logits))
            on_batch(i + 1)
        return len(self._examples)

    def _one(self, number: int, image: np.ndarray, truth: np.ndarray, logits: np.ndarray) -> JudgedImage:
        before = self._totals.confusion.copy()
        predicted = self._totals.add(logits[np.newaxis], truth[np.newaxis])[0][0]
        figures = class_figures(self._totals.confusion - before)
        row: PlainDict = {
            "image": self._examples.names[number]
            if self._examples.names
            else f"{self._info.name}/eval/{number}",
            "accuracy": figures["accuracy"],
            "dice": figures["dice"],
            "soft_dice": soft_dice(logits, truth),
        }
        if self._above is not None:
            probability = foreground_probability(logits)
            masks = [probability > threshold for threshold in CANDIDATES]
            self._above += [(np.count_nonzero(truth[mask]), np.count_nonzero(mask)) for mask in masks]
        if self._scores is not None and self._baseline is not None:
            started = time.perf_counter()
            own = self._scores.add(foreground_probability(logits), truth)
            row.update(dict.fromkeys(SCORES) if own is None else own)
            self._baseline.add(np.ones(truth.shape), truth)
            self._scores_s += time.perf_counter() - started
        self.rows.append(row)
        names = self._info.class_names
        colours = class_colours(len(names), self._info.class_colours)
        return JudgedImage(row, image, truth, predicted, names, colours)

    def report(self) -> PlainDict:
        """``dice`` and ``iou`` of each class, ``soft_dice`` (the mean over images), ``scores`` of the challenge (None
        without membranes), the recommended ``threshold`` (None of more than two classes), ``baseline``: what calling
        every pixel the most frequent class scores, a row for each image, and how long the network (once it was built)
        and the challenge's scores took.
        """
        confusion = self._totals.confusion
        most = int(confusion.sum(axis=1).argmax())
        trivial = np.zeros_like(confusion)
        trivial[:, most] = confusion.sum(axis=1)
        baseline = {"class": self._info.class_names[most], **class_figures(trivial), "scores": None}
        if self._baseline is not None and most == 1:
            found = self._baseline.result()
            if found is not None:
                baseline["scores"] = {name: part["score"] for name, part in found.items()}
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
            "tile_sizes": self._network.tile_sizes,
            "views": self._network.views,
        }

    def _threshold(self, scores: Optional[PlainDict]) -> Optional[PlainDict]:
        """The threshold with the best V^Rand where the truth is membranes, else with the best Dice of class 1: its
        ``value``, what it is the best ``of``, that ``score``, and the score ``at_half``."""
        if self._above is None:
            return None
        if scores is not None:
            best = scores["rand"]["best"]
            return {
                "value": best["threshold"],
                "of": "V^Rand",
                "score": best["score"],
                "at_half": scores["rand"]["score"],
            }
        true = int(self._totals.confusion[1].sum())
        dice = 2.0 * self._above[:, 0] / np.maximum(self._above[:, 1] + true, 1)
        half = CANDIDATES.index(0.5)
        at = max(range(len(dice)), key=lambda k: (dice[k], -abs(k - half)))
        name = f"Dice, {printable(self._info.class_names[1])}"
        return {"value": CANDIDATES[at], "of": name, "score": float(dice[at]), "at_half": float(dice[half])}


def has_membranes(class_names: Sequence[str]) -> bool:
    """Whether a set's truth is membranes between cells, which the challenge's scores are for."""
    return tuple(class_names) == ("membrane", "cell")


def class_figures(confusion: np.ndarray) -> PlainDict:
    """``accuracy``, and ``dice`` and ``iou`` of each class, from counts [true, predicted].

    Of a class that is neither there nor predicted both are None.
    """
    right = np.diag(confusion).astype(float)
    both = (confusion.sum(axis=0) + confusion.sum(axis=1)).astype(float)

    def shares(numerator: np.ndarray, denominator: np.ndarray) -> List[Optional[float]]:
        return [float(a / b) if b else None for a, b in zip(numerator, denominator)]

    return {
        "accuracy": float(right.sum() / confusion.sum()),
        "dice": shares(2 * right, both),
        "iou": shares(right, both - right),
    }


def mean_dice(row: PlainDict) -> float:
    """What images are ranked by, from worst to best: the mean Dice of both classes, or of several without class 0."""
    values = row["dice"] if len(row["dice"]) == 2 else row["dice"][1:]
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else 1.0
