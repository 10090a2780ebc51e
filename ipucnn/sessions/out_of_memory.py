"""How exhausted memory becomes an error for users while a session works.

Elsewhere it is an error at the end of the command (``user_error_of`` in ``ipucnn.filesystem``).  On IPUs Poplar's
messages say what does not fit (``ipucnn.sessions.poplar.errors``).
"""

import contextlib
from typing import Iterator

from ipucnn.errors import InfeasibleError


class OutOfMemoryError(InfeasibleError):
    """Work did not fit into the memory of the host or of its GPUs."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether Python or TensorFlow could not allocate memory."""
    import tensorflow as tf

    return isinstance(error, (MemoryError, OutOfMemoryError, tf.errors.ResourceExhaustedError))


@contextlib.contextmanager
def memory_errors(message: str, hint: str) -> Iterator[None]:
    """Converts exhausted memory inside the block; the outermost block knows best which options the user has.

    Args:
        message: the work that does not fit.
        hint: the option to change.

    Raises:
        OutOfMemoryError: memory ran out within the block.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(message, hint) from None
