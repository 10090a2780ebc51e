"""What the driver's own sources refuse, pass by pass, and where the double does: or why it does not (``refusals.csv``).

Of graphcore/tensorflow, below ``tensorflow/compiler/plugin/poplar/``: FailedPrecondition, InvalidArgument and
Unimplemented of the passes and visitors that a Keras model with replicas, accumulation, a pipeline, recomputation or
offloading goes through, of the compiler, of what executes a program, of kernels, and of what makes Poplar's program of
an instruction (``ops/``, ``tools/``: nearly all of these look at what the driver's own passes made, which none of its
users can make wrong).  They were read in public versions of these files from the history of r2.6/sdk-release-3.4, not
each of which is the release's last.  Left out are what only host embeddings, ``outside_compilation_scope``, recurrent
layers and the embedded runtime reach, and InternalError, which stands for a mistake of the driver.  ``files_read.json``
says which passes were read, in which stored version, and which were not.

A program means the XLA graph that ``keras/ipu`` makes; what that never makes wrong, no caller can see.
"""

import csv
from pathlib import Path
from typing import List, NamedTuple


class Refusal(NamedTuple):
    """One refusal.

    Attributes:
        file: below ``driver/``, or ``kernels/...``.
        symbol: that refuses.
        error: "FailedPrecondition", "InvalidArgument" or "Unimplemented".
        when: in short.
        rule: the function of the double that refuses it too (``module.function``); "" where none does.
        why_not: where none does, the reason.
    """

    file: str
    symbol: str
    error: str
    when: str
    rule: str
    why_not: str


def read_refusals() -> List[Refusal]:
    """All rows of the table."""
    with Path(__file__).with_name("refusals.csv").open(encoding="utf-8", newline="") as lines:
        return [Refusal(**row) for row in csv.DictReader(lines)]
