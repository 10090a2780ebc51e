"""Lists the refusals in the driver's own sources, and the test double's rule or a reason for each (``refusals.csv``).

The sources are those of graphcore/tensorflow, below ``tensorflow/compiler/plugin/poplar/``. The list has
FailedPrecondition, InvalidArgument and Unimplemented of the passes and visitors that a Keras model with replicas,
accumulation, a pipeline, recomputation or offloading goes through, of the compiler, of the program's execution, of
kernels, and of the code that turns an instruction into Poplar's program (``ops/``, ``tools/``: nearly all of these
check the output of the driver's own passes, which no user can make wrong). They were read in public versions of these
files from the history of r2.6/sdk-release-3.4, not each of which is the release's last. Left out are those that only
host embeddings, ``outside_compilation_scope``, recurrent layers and the embedded runtime reach, and InternalError,
which means a mistake of the driver. ``files_read.json`` lists the passes that were read, in which stored version, and
those that were not.

A program is the XLA graph that ``keras/ipu`` makes; callers cannot see errors that this graph never causes.
"""

from typing import NamedTuple


class Refusal(NamedTuple):
    """One refusal.

    Attributes:
        file: path below ``driver/``, or ``kernels/...``.
        symbol: the function that refuses.
        error: "FailedPrecondition", "InvalidArgument" or "Unimplemented".
        when: the condition, in short.
        rule: the test double's function that refuses it, too (``module.function``); "" if none does.
        why_not: the reason if none does.
    """

    file: str
    symbol: str
    error: str
    when: str
    rule: str
    why_not: str
