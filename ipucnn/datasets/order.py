"""The order samples are trained on: a pure function of (seed, epoch), entered anywhere at once."""

from typing import Any, Tuple

import tensorflow as tf

from ipucnn.datasets.augmentation import shift_right
from ipucnn.datasets.hashing import ORDER, chain, stream_state


def sample_order(
    size: int, *, samples_per_epoch: int, seed: int, start_epoch: int, start_sample: int, shuffle: bool
) -> tf.data.Dataset:
    """Infinite int64 scalars, one per sample: (epoch * rounds per epoch + round) * 2**32 + index.

    An epoch of more samples than the set has goes through several permutations, its rounds.  Each is sorted
    out of hashes when it is reached, so starting late replays nothing.
    """
    rounds = -(-samples_per_epoch // size)
    start_epoch, start_sample = (
        start_epoch + start_sample // samples_per_epoch,
        start_sample % samples_per_epoch,
    )
    first_turn, first_skip = start_epoch * rounds + start_sample // size, start_sample % size
    state = stream_state(seed, ORDER)

    def one_round(turn: Any) -> tf.data.Dataset:
        indices = tf.range(size, dtype=tf.int64)
        if shuffle:
            epoch_state = chain(tf.constant(state, tf.int64), turn // rounds, shift_right)
            keys = chain(chain(epoch_state, turn % rounds, shift_right), indices, shift_right)
            # 31 bits of hash above the index: sorting sorts by hash and carries the index along.
            indices = tf.sort(shift_right(keys, 1) * 2**32 + indices) & (2**32 - 1)
        end = tf.minimum(tf.constant(size, tf.int64), samples_per_epoch - (turn % rounds) * size)
        begin = tf.where(turn == first_turn, tf.constant(first_skip, tf.int64), tf.constant(0, tf.int64))
        return tf.data.Dataset.from_tensor_slices(turn * 2**32 + indices[begin:end])

    turns = tf.data.Dataset.range(first_turn, 2**31)
    return turns.flat_map(tf.autograph.experimental.do_not_convert(one_round))


def split_ticket(tickets: Any, rounds: int) -> Tuple[Any, Any, Any]:
    """(epoch, round, index) of what :func:`sample_order` yields."""
    turn = shift_right(tickets, 32)
    return turn // rounds, turn % rounds, tickets & (2**32 - 1)
