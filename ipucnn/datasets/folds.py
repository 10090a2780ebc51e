"""Cross-validation: which examples a fold trains on and which it is evaluated on.  No TensorFlow."""

from dataclasses import replace
from typing import Any

import numpy as np

from ipucnn.datasets.base import ArrayExamples, DataSource, channel_statistics, fingerprint
from ipucnn.errors import ConfigurationError


def fold_of_each(examples: ArrayExamples, num_folds: int) -> Any:
    """int64 [n]: the fold, from 1, in which each example is for evaluation; folds differ by one in size at most.

    Slices of a volume follow each other and look alike, so folds are runs of slices.  Images of classes are
    dealt out class by class, so that every fold has its share of each.
    """
    count = len(examples)
    if examples.labels.ndim == 1:
        folds: Any = np.empty(count, np.int64)
        folds[np.argsort(examples.labels, kind="stable")] = np.arange(count) % num_folds + 1
        return folds
    return np.arange(count) * num_folds // count + 1


def pool(source: DataSource) -> ArrayExamples:
    """What is split into folds: the training examples, and the evaluation examples where they were held out here.

    Raises:
        ConfigurationError: the images are not in memory.
    """
    train, evaluation = source.train, source.eval
    if not isinstance(train, ArrayExamples) or not isinstance(evaluation, ArrayExamples):
        raise ConfigurationError(
            f"--kfold: the images of {source.info.name} are files, which are not split into folds",
            "make the folds as folders of your own, or use a data set that is read into memory",
        )
    if not source.info.own_split:
        return train
    images = np.concatenate([train.images, evaluation.images])
    return ArrayExamples(images, np.concatenate([train.labels, evaluation.labels]))


def select_fold(source: DataSource, num_folds: int, fold: int) -> DataSource:
    """The data set with another split: evaluation on fold ``fold`` of 1 .. ``num_folds``, training on the others.

    Mean and standard deviation are those of the fold's own training images.

    Raises:
        ConfigurationError: more folds than examples, or images that are not in memory.
    """
    examples = pool(source)
    if num_folds > len(examples):
        raise ConfigurationError(
            f"--kfold {num_folds}: {source.info.name} has {len(examples)} examples",
            f"--kfold {len(examples)} or less",
        )
    is_held_out = fold_of_each(examples, num_folds) == fold
    held_out = np.nonzero(is_held_out)[0]
    train, evaluation = examples.subset(np.nonzero(~is_held_out)[0]), examples.subset(held_out)
    mean, std = channel_statistics(train.images)
    info = replace(source.info, num_train=len(train), num_eval=len(evaluation), mean=mean, std=std)
    everything = fingerprint(DataSource(source.info, examples, examples.subset(held_out[:0])))
    return DataSource(info, train, evaluation, tuple(int(i) for i in held_out), everything)
