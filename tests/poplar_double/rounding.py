"""Which operations of a program round stochastically: the system's setting, and scopes that override it."""

import contextlib
from typing import Any, Iterator, List

import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue

from .facts import like

# The attribute of operations whose rounding a scope decides: b"on" or b"off".
ROUNDING = "_stochastic_rounding"


@like("ipu.scopes.stochastic_rounding")
@contextlib.contextmanager
def stochastic_rounding(override: Any) -> Iterator[None]:
    """Marks the operations made in the scope, as scopes.py does: those of the present graph alone."""
    words = {ROUNDING: AttrValue(s=b"on" if override else b"off")}
    with tf.compat.v1.get_default_graph()._attr_scope(words):
        yield


# Operations that only move numbers (HloOpcodes for which add_stochastic_rounding_options.cc needs no seed).
_MOVING = {
    *("BroadcastTo", "Const", "ExpandDims", "Fill", "Identity", "Pack", "Pad", "PadV2", "Placeholder"),
    *(
        "ReadVariableOp",
        "Reshape",
        "Slice",
        "Split",
        "SplitV",
        "Squeeze",
        "StridedSlice",
        "Transpose",
        "Unpack",
    ),
}


def rounded_at_random(graph: Any, behaviour: str) -> List[str]:
    """Returns the operations of a program that round stochastically, as the pass of that file decides.

    Args:
        graph: the traced program, with 16-bit results of the operations that round.
        behaviour: ``floating_point_behaviour.esr``, for operations outside of any scope.  REPLICA_IDENTICAL_ONLY is
            taken for ON, because the double does not know which operations are the same on all replicas.
    """
    names = []
    for op in graph.get_operations():
        if op.type not in _MOVING and any(output.dtype == tf.float16 for output in op.outputs):
            scope = op.node_def.attr[ROUNDING].s if ROUNDING in op.node_def.attr else b""
            if scope == b"on" or (not scope and behaviour != "OFF"):
                names.append(op.name)
    return names
