"""Evaluation and inference of a trained run."""

import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence

import numpy as np

from ipucnn.config.resolve import resolve_saved
from ipucnn.errors import DataError
from ipucnn.runs import setup as run_setup
from ipucnn.runs.load import load_weights, open_run, summary


def evaluate_run(
    path: Path, flags: Mapping[str, Any], *, which: Optional[str] = None, verbose: bool = False
) -> Dict[str, Any]:
    """Evaluates a run's weights on its evaluation set, or on another one that the flags name.

    Every sample counts exactly once: the last batch is padded and masked.

    Args:
        path: run folder or checkpoint.
        flags: options given on the command line, over the run's own.
        which: which checkpoint of the run.
        verbose: let TensorFlow speak.

    Returns:
        ``measured`` (loss, accuracy, top5 or dice and iou, samples), what was evaluated, and on what.
    """
    from ipucnn.sessions.factory import check_device, create_session

    run = open_run(path, which)
    resolved = resolve_saved("evaluate", run.config, flags)
    check_device(resolved.config.device)
    run_setup.check_supported(resolved.config)
    seed = int(run.checkpoint.meta["seed"])
    setup = run_setup.prepare(resolved, seed, run.input_shape)
    _normalise_as_trained(setup, run)
    if setup.source.info.num_classes != run.num_classes:
        raise DataError(
            f"{run.path} has {run.num_classes} classes, data set {setup.source.info.name} has "
            f"{setup.source.info.num_classes}",
            f"evaluate it on {run.checkpoint.meta['dataset']}, which it was trained on",
        )
    session = create_session(resolved.config.device, verbose=verbose)
    from ipucnn.datasets.pipeline import data_errors
    from ipucnn.training.losses import make_loss

    model = run_setup.build(setup)
    load_weights(model, run.checkpoint, str(run.path))
    loss = make_loss(run_setup.loss_name(resolved.config, setup.record.task), resolved.config.label_smoothing)
    session.prepare_evaluation(model, loss)
    config = resolved.config
    batch = (config.validation_micro_batch_size or config.micro_batch_size) * (
        config.validation_num_replicas or config.num_replicas
    )
    started = time.perf_counter()
    with data_errors():
        metrics = session.evaluate(run_setup.evaluation_batches(setup, batch))
    wall_s = time.perf_counter() - started
    info = setup.source.info
    return {
        **summary(run),
        "dataset": {"name": info.name, "location": info.location, "size": info.num_eval},
        "device": session.device.kind,
        "warnings": list(info.warnings),
        "measured": {**metrics, "samples": int(metrics["samples"]), "wall_s": wall_s},
    }


def _normalise_as_trained(setup: Any, run: Any) -> None:
    """Another data set is normalised with the training set's mean and standard deviation, not its own."""
    from dataclasses import replace

    mean, std = run.checkpoint.meta["mean"], run.checkpoint.meta["std"]
    if len(mean) == len(setup.source.info.mean):
        setup.source = replace(
            setup.source, info=replace(setup.source.info, mean=tuple(mean), std=tuple(std))
        )


def infer_run(
    path: Path,
    images: Sequence[Path],
    flags: Mapping[str, Any],
    *,
    top: int = 5,
    which: Optional[str] = None,
    verbose: bool = False,
) -> List[Dict[str, Any]]:
    """The ``top`` most probable classes of each image file, in the order given.

    Args:
        path: run folder or checkpoint of a classification network.
        images: image files.
        flags: options given on the command line.
        top: classes per image, at most the network's.
        which: which checkpoint of the run.
        verbose: let TensorFlow speak.

    Returns:
        Per image ``image`` and ``predictions``, a list of ``label`` and ``probability``, falling.

    Raises:
        DataError: an image that cannot be read, or a segmentation network.
    """
    from ipucnn.models.registry import get_model
    from ipucnn.sessions.factory import check_device, create_session

    run = open_run(path, which)
    record = get_model(run.config.model_name)
    if record.task != "classification":
        raise DataError(f"infer gives labels; {record.name} segments images", "masks are not built yet")
    for image in images:
        if not image.is_file():
            raise DataError(f"image {image} does not exist", "give image files, for example digit.png")
    resolved = resolve_saved("infer", run.config, flags)
    run_setup.check_supported(resolved.config)
    check_device(resolved.config.device)
    session = create_session(resolved.config.device, verbose=verbose)
    from ipucnn.datasets.pipeline import load_images

    setup = run_setup.Setup(resolved, _Trained(run), run.input_shape, None, int(run.checkpoint.meta["seed"]))
    model = run_setup.build(setup)
    load_weights(model, run.checkpoint, str(run.path))
    session.prepare_evaluation(model, None)
    names = run.checkpoint.meta["class_names"]
    pixels = load_images(
        [str(image) for image in images],
        setup.source.info,
        input_shape=run.input_shape,
        input_range=record.input_range,
    )
    results = []
    for image, logits in zip(images, _in_batches(session, pixels)):
        exponentials = np.exp(logits.astype(np.float64) - logits.max())
        probabilities = exponentials / exponentials.sum()
        order = np.argsort(-probabilities, kind="stable")[:top]
        results.append(
            {
                "image": str(image),
                "predictions": [{"label": names[i], "probability": float(probabilities[i])} for i in order],
            }
        )
    return results


def _in_batches(session: Any, pixels: Any, batch: int = 32) -> Iterator[Any]:
    """Logits of each image, computed in batches of one fixed shape (the last one padded)."""
    import tensorflow as tf

    pixels = np.asarray(pixels)
    batch = min(batch, len(pixels))
    for start in range(0, len(pixels), batch):
        part = pixels[start : start + batch]
        padded = np.concatenate([part, np.zeros((batch - len(part), *part.shape[1:]), part.dtype)])
        yield from session.predict([tf.constant(padded)])[0][: len(part)]


class _Trained:
    """Stands for the data set of a run where only its facts are needed, from the checkpoint."""

    def __init__(self, run: Any) -> None:
        from ipucnn.datasets.base import DatasetInfo

        meta = run.checkpoint.meta
        self.info = DatasetInfo(
            name=meta["dataset"],
            task="classification",
            num_classes=run.num_classes,
            image_shape=tuple(meta["image_shape"]),
            num_train=0,
            num_eval=0,
            class_names=tuple(meta["class_names"]),
            location=str(run.path),
            mean=tuple(meta["mean"]),
            std=tuple(meta["std"]),
        )
