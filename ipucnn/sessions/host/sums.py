"""The two orders in which the results of a weight update's groups are added, over lanes, devices and processes."""

import contextlib
from typing import Callable, ContextManager, List, NamedTuple, Optional, Sequence, TypeVar

import numpy as np
import tensorflow as tf

from ipucnn.aliases import Tensor
from ipucnn.sessions.host.collectives import Collectives
from ipucnn.sessions.host.division import Division

_Parts = TypeVar("_Parts")
AddGradients = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], List[Tensor]]
"""(number of the group, its gradients, sums) -> sums."""


class GroupResult(NamedTuple):
    """The result of a group of fused micro-batches, or the sum of such results.

    Attributes:
        gradients: one float32 gradient for each trained weight.
        loss: the sum of the micro-batches' losses.
        num_right: the number of right answers.
        statistics: the contributions to moving statistics; empty in a sum.
    """

    gradients: List[Tensor]
    loss: Tensor
    num_right: Tensor
    statistics: List[Tensor]


class OrderedSums:
    """Adds the results of groups in the order of groups.

    So the bytes do not depend on who computes which group.

    Args:
        division: the division of a weight update.
        collectives: the collective operations of the processes; None: this process is alone.
    """

    def __init__(self, division: Division, collectives: Optional[Collectives]) -> None:
        self._division = division
        self._collectives = collectives

    def exceptions(self) -> ContextManager[None]:
        """Returns a block that raises the exceptions of collective operations."""
        return contextlib.nullcontext() if self._collectives is None else self._collectives.exceptions()

    @property
    def received_bytes(self) -> List[int]:
        """The bytes that a process receives from each collective operation, in the order of tracing."""
        return [] if self._collectives is None else self._collectives.received_bytes

    def in_order(
        self,
        step: Tensor,
        results: Sequence[_Parts],
        sums: _Parts,
        add: Callable[[Tensor, _Parts, _Parts], _Parts],
    ) -> _Parts:
        """Adds the results of a step's groups one after the other, as one lane of one process would.

        Args:
            step: scalar int64.
            results: the result of each lane of this process: a nested structure of float32 tensors.
            sums: the sums to add to.
            add: (number of the group, its result, sums) -> sums.
        """
        division = self._division
        first = step * division.groups_per_step
        if division.num_workers == 1 and len(division.devices) == 1:
            for lane, result in enumerate(results):
                sums = _added(first + lane, lane, result, sums, add)
            return sums
        shapes = [[int(n) for n in part.shape] for part in tf.nest.flatten(results[0])]
        sizes = [int(np.prod(shape)) for shape in shapes]
        flat = []
        for device, result in zip(division.lanes, results):
            with tf.device(device):
                flat.append(tf.concat([tf.reshape(part, [-1]) for part in tf.nest.flatten(result)], axis=0))
        gathered = tf.concat(flat, axis=0)
        if self._collectives is not None:
            gathered = self._collectives.gather(gathered)
        gathered = tf.reshape(gathered, [division.num_workers, len(division.lanes), sum(sizes)])

        # A loop keeps the order: TensorFlow would merge a sequence of additions, and choose its own order.
        def body(row: Tensor, sums: _Parts) -> Sequence[object]:
            group = gathered[row % division.num_workers, row // division.num_workers]
            pieces = [tf.reshape(p, shape) for p, shape in zip(tf.split(group, sizes), shapes)]
            return row + 1, add(first + row, tf.nest.pack_sequence_as(results[0], pieces), sums)

        _, total = tf.while_loop(
            lambda row, _: row < division.groups_per_step,
            body,
            (tf.constant(0, tf.int64), sums),
            parallel_iterations=1,
        )
        added: _Parts = total
        return added

    def add_step(
        self,
        step: Tensor,
        results: Sequence[GroupResult],
        sums: GroupResult,
        add_gradients: AddGradients,
        move: Callable[[Tensor, Sequence[Tensor]], None],
    ) -> GroupResult:
        """Returns the sums after a step.

        Args:
            step: scalar int64.
            results: the result of each lane of this process.
            sums: the sums before the step.
            add_gradients: the function that adds the gradients of a group.
            move: the function that moves statistics by the contributions of a group: (number of the group,
                contributions).
        """

        def add(group: Tensor, result: GroupResult, sums: GroupResult) -> GroupResult:
            move(group, result.statistics)
            gradients = add_gradients(group, result.gradients, sums.gradients)
            return GroupResult(gradients, sums.loss + result.loss, sums.num_right + result.num_right, [])

        return self.in_order(step, results, sums, add)

    def total(self, gradients: List[Tensor], is_running_mean: bool) -> List[Tensor]:
        """Returns the gradients of the weight update after its last step."""
        return gradients


class AllReducedSums(OrderedSums):
    """Adds the gradients of this process's groups, and after the last step, those of all processes in MPI's order.

    Everything else is added in the order of groups.
    """

    def add_step(
        self,
        step: Tensor,
        results: Sequence[GroupResult],
        sums: GroupResult,
        add_gradients: AddGradients,
        move: Callable[[Tensor, Sequence[Tensor]], None],
    ) -> GroupResult:
        """Returns the sums after a step; those of gradients are this process's."""
        gradients = sums.gradients
        for lane, result in enumerate(results):
            number = step * len(results) + lane
            gradients = _added(number, lane, result.gradients, gradients, add_gradients)
        others = [result._replace(gradients=[]) for result in results]
        added = super().add_step(step, others, sums._replace(gradients=[]), add_gradients, move)
        return added._replace(gradients=gradients)

    def total(self, gradients: List[Tensor], is_running_mean: bool) -> List[Tensor]:
        """Returns the sum over processes, or the mean of their running means."""
        assert self._collectives is not None
        sizes = [int(g.shape.num_elements()) for g in gradients]
        total = self._collectives.add(tf.concat([tf.reshape(g, [-1]) for g in gradients], axis=0))
        if is_running_mean:
            total = total / float(self._division.num_workers)
        return [tf.reshape(part, g.shape) for part, g in zip(tf.split(total, sizes), gradients)]


def sums_of(division: Division, collectives: Optional[Collectives], reduction: str) -> OrderedSums:
    """Returns the order of ``--reduction``; a process that is alone has only one."""
    is_ordered = reduction == "ordered" or collectives is None
    return (OrderedSums if is_ordered else AllReducedSums)(division, collectives)


def _added(
    number: Tensor, lane: int, result: _Parts, sums: _Parts, add: Callable[[Tensor, _Parts, _Parts], _Parts]
) -> _Parts:
    """Adds the result of a lane to sums, after those of the lanes before it."""
    if lane == 0:
        return add(number, result, sums)
    # The branch is always taken.  Without it, TensorFlow would merge additions and choose its own order; and it would
    # add large tensors in temporary variables, two of which get the same name (tensorflow/tensorflow#23780).
    added: _Parts = tf.cond(number > 0, lambda: add(number, result, sums), lambda: sums)
    return added
