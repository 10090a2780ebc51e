"""What a layer has to know about the execution it is traced in.

The host session computes several micro-batches as one large batch.  Batch norm must then know where a
micro-batch ends, and dropout which random numbers are its own.  Both read the context that the session
sets while it traces the model; outside a session (plain Keras) there is none.
"""

import contextlib
import threading
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, Optional, Tuple


@dataclass
class ExecutionContext:
    """One traced forward pass over ``num_groups`` statistics groups laid one after the other in the batch.

    Attributes:
        num_groups: batch-norm groups in the batch: fused micro-batches, or groups of replicas of one
            micro-batch step under distributed batch norm.  Divides the batch.
        seeds: int32 tensor (num_micro_batches, 2), different for every micro-batch of the run.
        num_micro_batches: fused micro-batches in the batch.
        batch_statistics: filled by the batch norms: (layer, mean, variance), statistics of shape
            (num_groups, channels), the variance with Bessel's correction.
        seed_slots: how many times each layer has drawn random numbers from this context.
    """

    num_groups: int
    seeds: Any
    num_micro_batches: int
    batch_statistics: List[Tuple[Any, Any, Any]] = field(default_factory=list)
    seed_slots: Dict[str, int] = field(default_factory=dict)


_state = threading.local()


def current_context() -> Optional[ExecutionContext]:
    """The innermost context of this thread, or None outside a session."""
    stack = getattr(_state, "stack", None)
    return stack[-1] if stack else None


@contextlib.contextmanager
def execution_context(context: ExecutionContext) -> Iterator[ExecutionContext]:
    """Makes ``context`` the current one while a model is traced."""
    if not hasattr(_state, "stack"):
        _state.stack = []
    _state.stack.append(context)
    try:
        yield context
    finally:
        _state.stack.pop()
