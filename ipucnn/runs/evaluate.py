"""Evaluation: every sample of a data set exactly once, on batches of one fixed shape."""

import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

import numpy as np

from ipucnn.errors import ConfigurationError
from ipucnn.runs import setup as run_setup
from ipucnn.runs.evaluate_masks import JudgedImage, MaskEvaluation
from ipucnn.runs.fitting import prediction_would_fit
from ipucnn.runs.images.segmentation import TiledNetwork, check_tile_size, check_views
from ipucnn.runs.spool import Spool, check_outputs, write_csv
from ipucnn.runs.trained import Subject, open_subject, weight_inputs
from ipucnn.text import printable
from ipucnn.training.evaluation import EvaluationTotals

PLOTS = (".png", ".pdf", ".svg")
OnBatch = Callable[[int, int], None]


def measure(
    batches: Iterable[Tuple[Tuple[Any, Any, Any], Any]],
    totals: EvaluationTotals,
    *,
    on_batch: Optional[Callable[[int], None]] = None,
    on_samples: Optional[Callable[[Any, Any, Any], None]] = None,
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
    target: str,
    flags: Mapping[str, Any],
    *,
    which: Optional[str] = None,
    weights: Optional[str] = None,
    plot: Optional[Path] = None,
    predictions: Optional[Path] = None,
    contact_sheet: Optional[Path] = None,
    tile_size: Optional[int] = None,
    views: int = 1,
    verbose: bool = False,
    say: Callable[[str], None] = lambda line: None,
    on_batch: Optional[OnBatch] = None,
    on_image: Callable[[JudgedImage], None] = lambda image: None,
) -> Dict[str, Any]:
    """Evaluates a run's weights, or others, on an evaluation set.

    Args:
        target: run folder, checkpoint or Keras weight file; with ``weights`` a network.
        flags: options given on the command line, over the run's own.
        which: which checkpoint of the run.
        weights: imagenet or a Keras weight file.
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
    from ipucnn.sessions.factory import create_session

    outputs = (
        ("--plot", plot, PLOTS),
        ("--predictions", predictions, (".csv",)),
        ("--contact-sheet", contact_sheet, (".png",)),
    )
    check_outputs(outputs, weight_inputs(target, which, weights))
    subject = open_subject("evaluate", target, flags, which=which, weights=weights)
    setup, config = subject.setup, subject.resolved.config
    segments = setup.record.task == "segmentation"
    if predictions is not None and segments:
        raise ConfigurationError(
            f"--predictions: {setup.record.name} segments images, it has no labels", "drop it"
        )
    if not segments and (contact_sheet is not None or tile_size is not None or views != 1):
        option = f"--views {views}" if tile_size is None else f"--tile-size {tile_size}"
        option = option if contact_sheet is None else "--contact-sheet"
        raise ConfigurationError(
            f"{option}: {setup.record.name} classifies images, it makes no masks", "drop it"
        )
    if segments:
        check_tile_size(setup.record, tile_size)
        check_views(views)
    totals = EvaluationTotals(
        setup.source.info.num_classes,
        run_setup.loss_name(config, setup.record.task),
        config.label_smoothing,
    )
    if subject.summary["weight_updates"] is None:
        say(subject.resolved.choice.message)
    for warning in subject.warnings:
        say(f"warning: {warning}")
    size = len(setup.source.eval)
    if segments:
        network = TiledNetwork(subject, tile_size, verbose, views, command="evaluate")
        evaluation = MaskEvaluation(subject, network, totals)
        started = time.perf_counter()
        evaluation.run(on_image, lambda done: None if on_batch is None else on_batch(done, size))
        wall_s = time.perf_counter() - started
        report = _report(subject, network.device, totals, _class_names(subject), wall_s)
        return {**report, "segmentation": evaluation.report()}
    session = create_session(config.device, verbose=verbose, config=config)
    run_setup.move_preprocessing(setup, session)
    from ipucnn.datasets.pipeline import data_errors

    model = subject.build()
    session.would_fit = prediction_would_fit(model, setup.record.name, config, "evaluate")
    session.prepare_evaluation(model, None)
    replicas = config.validation_num_replicas or config.num_replicas
    micro_batch = config.validation_micro_batch_size or config.micro_batch_size
    rows = Spool() if predictions is not None else None
    started = time.perf_counter()
    with _memory_errors(micro_batch * replicas), data_errors():
        seen = measure(
            session.logits(run_setup.evaluation_batches(setup, micro_batch * replicas)),
            totals,
            on_batch=None if on_batch is None else lambda done: on_batch(done, size),
            on_samples=None if rows is None else lambda *samples: _keep(rows, *samples),
        )
    wall_s = time.perf_counter() - started
    if seen != size:
        raise RuntimeError(f"{seen} samples were evaluated, and the data set has {size}")
    names = _class_names(subject)
    if predictions is not None and rows is not None:
        _write_predictions(predictions, rows, setup.source.eval, names)
    return _report(subject, session.device.kind, totals, names, wall_s)


@contextmanager
def _memory_errors(batch: int) -> Iterator[None]:
    """Says which option is at fault where a batch does not fit, and memory does not suffice."""
    import tensorflow as tf

    try:
        yield
    except (MemoryError, tf.errors.ResourceExhaustedError) as error:
        raise ConfigurationError(
            f"batches of {batch} images do not fit into memory", "lower --validation-micro-batch-size"
        ) from error


def _class_names(subject: Subject) -> Tuple[str, ...]:
    """The names the network was trained with where they are known, else the data set's; printable."""
    names, info = subject.names(), subject.setup.source.info
    return tuple(map(printable, names if len(names) == info.num_classes else info.class_names))


def _report(
    subject: Subject, device: str, totals: EvaluationTotals, names: Tuple[str, ...], wall_s: float
) -> Dict[str, Any]:
    info = subject.setup.source.info
    return {
        **subject.summary,
        "checkpoint": printable(subject.summary["checkpoint"]),
        "task": subject.setup.record.task,
        "dataset": {
            "name": info.name,
            "location": printable(info.location),
            "size": info.num_eval,
            "stored": subject.num_stored,
        },
        "device": device,
        "measured": {**totals.result(), "wall_s": wall_s},
        "classes": totals.classes(names),
        "calibration": totals.bins(),
        "confusion_matrix": totals.confusion.tolist(),
    }


def _keep(rows: Spool, labels: Any, predicted: Any, confidence: Any) -> None:
    for label, guess, probability in zip(labels.tolist(), predicted.tolist(), confidence.tolist()):
        rows.append({"label": label, "prediction": guess, "probability": probability})


def _write_predictions(path: Path, rows: Spool, examples: Any, names: Tuple[str, ...]) -> None:
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
