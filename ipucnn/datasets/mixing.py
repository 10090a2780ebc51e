"""Random erasing, and mixing of the images of a micro-batch, for training.

Both work on pixels of the network's size, 0 to 255, before these are scaled to the network's range, so that the result
is the same whether the host or the device scales them.  Random numbers are hashes, as for augmentation: erasing uses
the hash of the sample, and mixing the hash of the micro-batch's first sample.  So neither depends on the number of
fused micro-batches, or on the sample at which a run resumes.
"""

from dataclasses import dataclass
from typing import Sequence, Tuple

import numpy as np
import tensorflow as tf

from ipucnn.aliases import Tensor
from ipucnn.datasets.augmentation import below, draws
from ipucnn.datasets.hashing import ERASE, MIX

LEVELS = 1024
"""Number of values that a share, an area or an aspect can take: the middles of equally likely parts of its
distribution."""
ATTEMPTS = 10
AREA, ASPECT = (0.02, 1 / 3), (0.3, 1 / 0.3)
"""Bounds of an erased rectangle's share of the image, and of its height over its width (Zhong et al. 2017, with timm's
bounds)."""
_MIDDLES = (np.arange(LEVELS) + 0.5) / LEVELS


@dataclass(frozen=True)
class Mixing:
    """Random erasing and mixing of training images and their labels.

    Attributes:
        micro_batch_size: number of samples that are mixed with each other.  Each is mixed with the one at the same
            distance from the other end of the micro-batch, as in timm's ``Mixup`` in its mode "batch".
        num_classes: number of classes of the labels.
        mixup: parameter of Beta(mixup, mixup), the distribution of an image's share in the sum of two (Zhang et
            al. 2018, arXiv:1710.09412); 0 is off.
        cutmix: the same parameter for the share of pixels that an image keeps when a rectangle of the other image
            replaces the rest (Yun et al. 2019, arXiv:1905.04899).  With both, each micro-batch gets one of them, with
            equal probability.
        erasing: probability that a rectangle of an image gets the data set's mean colour (Zhong et al. 2017,
            arXiv:1708.04896).
    """

    micro_batch_size: int
    num_classes: int
    mixup: float = 0.0
    cutmix: float = 0.0
    erasing: float = 0.0

    def apply(
        self,
        images: Tensor,
        labels: Tensor,
        seed: int,
        tickets: Tuple[Tensor, Tensor, Tensor],
        mean: Sequence[float],
    ) -> Tuple[Tensor, Tensor]:
        """Erases rectangles, then mixes images.

        Args:
            images: float32 [b, h, w, c] in 0..255, whole micro-batches.
            labels: int32 [b].
            seed: the run's seed.
            tickets: (epochs, rounds, indices), int64 [b] each.
            mean: mean of the pixels, one per channel.

        Returns:
            Images and labels.  If images are mixed, labels are float32 [b, classes] and add up to 1 for each image.
        """
        if self.erasing:
            random = draws(seed, *tickets, count=1 + 4 * ATTEMPTS, stream=ERASE)
            images = self._erase(images, random, mean)
        if self.mixup or self.cutmix:
            epochs, rounds, indices = (words[:: self.micro_batch_size] for words in tickets)
            random = draws(seed, epochs, rounds, indices, 4, MIX)
            images, labels = self._mix(images, labels, random)
        return images, labels

    def _erase(self, images: Tensor, random: Tensor, mean: Sequence[float]) -> Tensor:
        height, width = int(images.shape[1]), int(images.shape[2])
        areas = (AREA[0] + _MIDDLES * (AREA[1] - AREA[0])) * height * width
        aspects = np.exp(np.log(ASPECT[0]) + _MIDDLES * np.log(ASPECT[1] / ASPECT[0]))
        tried = tf.reshape(random[:, 1:], [-1, ATTEMPTS, 4])
        area = tf.gather(tf.constant(areas, tf.float32), below(tried[..., 0], LEVELS))
        aspect = tf.gather(tf.constant(aspects, tf.float32), below(tried[..., 1], LEVELS))
        tall = tf.cast(tf.sqrt(area * aspect) + 0.5, tf.int64)
        wide = tf.cast(tf.sqrt(area / aspect) + 0.5, tf.int64)
        fits = (tall < height) & (wide < width)
        # The first rectangle that fits; index 0 if none does.
        first_fitting = tf.argmax(tf.cast(fits, tf.int32), axis=1)[:, tf.newaxis]
        chosen = [
            tf.gather(values, first_fitting, batch_dims=1)
            for values in (tall, wide, tried[..., 2], tried[..., 3])
        ]
        tall, wide = chosen[0], chosen[1]
        top, left = below(chosen[2], height - tall + 1), below(chosen[3], width - wide + 1)
        erases = random[:, :1] < round(self.erasing * 2**32)
        erases &= tf.reduce_any(fits, axis=1, keepdims=True)
        rows, columns = tf.range(height, dtype=tf.int64), tf.range(width, dtype=tf.int64)
        inside = ((rows >= top) & (rows < top + tall) & erases)[:, :, tf.newaxis]
        inside &= ((columns >= left) & (columns < left + wide))[:, tf.newaxis, :]
        return tf.where(inside[..., tf.newaxis], tf.constant(np.asarray(mean, np.float32)), images)

    def _mix(self, images: Tensor, labels: Tensor, random: Tensor) -> Tuple[Tensor, Tensor]:
        size = self.micro_batch_size
        height, width, channels = (int(n) for n in images.shape[1:])
        parts = tf.reshape(images, [-1, size, height, width, channels])
        others = tf.reverse(parts, axis=[1])
        level = below(random[:, 1], LEVELS)
        cuts = tf.fill(tf.shape(level), bool(self.cutmix))
        if self.mixup and self.cutmix:
            cuts = below(random[:, 0], 2) > 0
        share, mixed = tf.ones(tf.shape(level)), parts
        if self.mixup:
            share = tf.gather(tf.constant(_quantiles(self.mixup)), level)
            weights = tf.reshape(share, [-1, 1, 1, 1, 1])
            mixed = parts * weights + others * (1.0 - weights)
        if self.cutmix:
            inside, stays = self._rectangles(random, level, height, width)
            cut = tf.where(inside[:, tf.newaxis, :, :, tf.newaxis], others, parts)
            mixed = tf.where(tf.reshape(cuts, [-1, 1, 1, 1, 1]), cut, mixed)
            share = tf.where(cuts, stays, share)
        truth = tf.one_hot(tf.reshape(labels, [-1, size]), self.num_classes, dtype=tf.float32)
        weights = share[:, tf.newaxis, tf.newaxis]
        truth = truth * weights + tf.reverse(truth, axis=[1]) * (1.0 - weights)
        return tf.reshape(mixed, [-1, height, width, channels]), tf.reshape(truth, [-1, self.num_classes])

    def _rectangles(self, random: Tensor, level: Tensor, height: int, width: int) -> Tuple[Tensor, Tensor]:
        """Returns a mask of the other image's pixels, bool [n, h, w], and the share of the remaining pixels."""
        side = np.sqrt(1.0 - _quantiles(self.cutmix).astype(np.float64))
        edges = []
        for length, draw in ((height, random[:, 2:3]), (width, random[:, 3:4])):
            half = tf.gather(tf.constant((length * side).astype(np.int64)), level)[:, tf.newaxis] // 2
            centre, places = below(draw, length), tf.range(length, dtype=tf.int64)
            edges.append((places >= centre - half) & (places < centre + half))
        inside = edges[0][:, :, tf.newaxis] & edges[1][:, tf.newaxis, :]
        pixels = tf.reduce_sum(tf.cast(inside, tf.float32), axis=[1, 2])
        return inside, 1.0 - pixels / float(height * width)


def _quantiles(parameter: float) -> np.ndarray:
    """Returns the quantiles of Beta(parameter, parameter) at the middles: float32 [LEVELS]."""
    from scipy.stats import beta

    values: np.ndarray = beta.ppf(_MIDDLES, parameter, parameter).astype(np.float32)
    return values
