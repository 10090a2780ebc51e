"""Batch norm's statistics for evaluation and checkpoints, measured over large batches of training images.

Running statistics are averages over many micro-batches, and the weights changed between them.  They can also be
imprecise: with 16 samples of small images, the deepest layers have 16 numbers per channel.  Then evaluation normalises
differently from training.  So the final weights are given training images in larger batches (precise batch norm: Wu and
Johnson 2021, arXiv:2105.07576, section 3).  Each batch norm normalises by the statistics of the whole batch, and the
moments of the batches are pooled.  In all else the pass is that of evaluation: images are not augmented, and there is
no dropout, which would make variances larger than they are in evaluation (Li et al. 2018, arXiv:1801.05134).
"""

import itertools
from typing import Callable, Dict, Iterable, List, Tuple

import numpy as np
import tensorflow as tf

from ipucnn import interrupts
from ipucnn.aliases import KerasModel, Tensor
from ipucnn.errors import InfeasibleError
from ipucnn.machine import side_by_side
from ipucnn.models.layers import BatchNormalization, ExecutionContext
from ipucnn.sessions.host.arithmetic import Arithmetic, Rounding
from ipucnn.sessions.host.network import Network
from ipucnn.sessions.session import Batch

_Moments = Tuple[Tensor, Tensor, Tensor]
"""Mean and biased variance, (channels,), and of how many numbers of each channel."""


class LargeBatches:
    """Measures what :class:`ipucnn.models.layers.BatchNormalization` layers have as moving statistics.

    Args:
        model: with the weights to be used, whenever :meth:`measure` is called.
        arithmetic: what is computed in; rounding is to nearest.
        unpack: brings images as they are in the batches to the network's range.
        on_cpu: whether this runs on a CPU.
        at_once: how many batches of so many samples are computed side by side.

    Attributes:
        names: of the moving statistics, but for those of frozen layers.
    """

    def __init__(
        self,
        model: KerasModel,
        arithmetic: Arithmetic,
        unpack: Callable[[Tensor], Tensor],
        on_cpu: bool,
        at_once: Callable[[int], int] = lambda samples: 1,
    ) -> None:
        norms = [x.name for x in model.layers if isinstance(x, BatchNormalization) and x.trainable]
        self.names = [f"{norm}/{moving}" for norm in norms for moving in ("moving_mean", "moving_variance")]
        self._at_once = at_once
        if not self.names:
            return
        network = Network(model, on_cpu=on_cpu, alone=True)  # Batch norm is not to be folded: it measures.

        def moments(images: Tensor) -> Dict[str, _Moments]:
            context = ExecutionContext(
                num_groups=1, seeds=tf.zeros([1, 2], tf.int32), num_micro_batches=1, measures=True
            )
            network(unpack(images), False, Rounding(arithmetic), context)
            return {
                layer.name: (mean[0], variance[0], numbers)
                for layer, mean, variance, numbers in context.update_statistics
            }

        self._moments = tf.function(moments, autograph=False)

    def measure(self, batches: Iterable[Batch]) -> Dict[str, np.ndarray]:
        """float32 (channels,) of each ``<layer>/moving_mean`` and ``/moving_variance``; nothing without batch norm.

        Args:
            batches: (images, ...), all of one shape; at least one.

        Raises:
            InfeasibleError: a batch does not fit into the host's memory.
        """
        found: Dict[str, List[List[np.ndarray]]] = {}

        def of_batch(images: Tensor, *_: Tensor) -> Dict[str, _Moments]:
            interrupts.check()
            try:
                moments: Dict[str, _Moments] = self._moments(images)
                return moments
            except tf.errors.ResourceExhaustedError:
                raise InfeasibleError(
                    f"out of memory with {len(images)} training images at once, to measure batch norm's statistics",
                    "use a smaller --precise-batch-norm; 0 leaves it out",
                ) from None

        left = iter(batches if self.names else ())
        first = next(left, None)
        given = () if first is None else itertools.chain([first], left)
        at_once = 1 if first is None else self._at_once(len(first[0]))
        for moments in side_by_side(of_batch, given, at_once):
            for name, values in moments.items():
                found.setdefault(name, []).append([np.asarray(v, np.float64) for v in values])
        measured = {}
        for name, parts in found.items():
            means, variances, numbers = (np.stack(values) for values in zip(*parts))
            total = numbers.sum()
            # All batches have as many numbers.  The estimate is unbiased, as that of the running variance.
            variance = (variances.mean(axis=0) + means.var(axis=0)) * (total / max(total - 1, 1))
            measured[f"{name}/moving_mean"] = means.mean(axis=0).astype(np.float32)
            measured[f"{name}/moving_variance"] = variance.astype(np.float32)
        return measured
