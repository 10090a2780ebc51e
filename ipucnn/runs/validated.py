"""The files that ``train --no-training --checkpoint-input-dir`` validates: of one run, or those that Keras wrote."""

from pathlib import Path
from typing import List, Tuple

from ipucnn.aliases import KerasModel
from ipucnn.errors import DataError
from ipucnn.filesystem import entries
from ipucnn.models.registry import is_keras_file
from ipucnn.runs.checkpoints import epoch_of, keras_checkpoints
from ipucnn.runs.context import RunContext
from ipucnn.runs.folder import BEST, LAST, is_checkpoint_name
from ipucnn.runs.sources import RunWeights, StoredWeights, stored_weights
from ipucnn.sessions.session import TrainState
from ipucnn.training.checkpoints import assign_weights


def list_validated(
    context: RunContext, state: TrainState, model: KerasModel
) -> Tuple[List[Path], List[str], List[str]]:
    """Returns the readable files of the folder, the error of each of the others, and notes for the user.

    These are the numbered checkpoints, in the order of training.  Without numbered ones it is the last or else the best
    checkpoint, or the weight files of Keras.

    Args:
        context: the run, whose folder has at least one such file.
        state: the session's ``TrainState``; its weights are overwritten with those of each file, as a check.
        model: the network, whose layers are matched with those of weight files.

    Raises:
        DataError: a file is of another model, or a file of Keras is damaged.
        ConfigurationError: the images of a file of Keras were scaled otherwise, or a checkpoint's network computes
            something else.
    """
    folder = context.config.checkpoint_input_dir
    assert folder is not None
    names = [path for path in entries(folder) if is_checkpoint_name(path.name)]
    names = [path for path in names if path.name not in (LAST, BEST)] or [
        path for name in (LAST, BEST) for path in names if path.name == name
    ][:1]
    good: List[Path] = []
    bad: List[str] = []
    notes: List[str] = []
    for path in [*keras_checkpoints(folder), *names]:
        try:
            weights = stored_weights(context.resolved, path)
        except DataError as error:
            if is_keras_file(path.name):
                raise
            bad.append(error.message)
            continue
        notes += _fill(weights, context, state, model)
        good.append(path)
    return good, bad, notes


def load_validated(context: RunContext, path: Path, state: TrainState, model: KerasModel) -> int:
    """Loads the weights of one of the files that :func:`list_validated` found.

    Returns:
        The weight updates of the checkpoint, for a file of Keras those of the epoch in its name.
    """
    weights = stored_weights(context.resolved, path)
    _fill(weights, context, state, model)
    if weights.weight_updates is not None:
        return int(weights.weight_updates)
    return round(epoch_of(path) * context.program.weight_updates_per_epoch)


def _fill(weights: StoredWeights, context: RunContext, state: TrainState, model: KerasModel) -> List[str]:
    """Copies weights into the session's variables, which are not the network's own in 16 bits; returns notes."""
    if isinstance(weights, RunWeights):
        weights.check_validated(context.config, context.info)
    checkpoint, notes = weights.read(context, model)
    assign_weights(state.weights, checkpoint, what=weights.name)
    return notes
