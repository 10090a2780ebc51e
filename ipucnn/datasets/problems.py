"""What a reader tells of files that are not as they should be.

Readers are written once: for training the first thing that is wrong ends the reading, and ``verify-dataset`` notes it
and goes on (``verification/survey.py``).
"""

import contextlib
from pathlib import Path
from typing import Iterator, Optional

from ipucnn.errors import DataError


class Problems:
    """What hears of problems; this one is for training."""

    def find(self, code: str, subset: Optional[str], example: str = "", count: int = 1) -> None:
        """Something that training passes over, or does not look at.

        Args:
            code: a key of ``verification.findings.CODES``.
            subset: "train" or "eval"; None for the set as a whole.
            example: the file or sample, and what is wrong with it.
            count: files, samples or classes it is about.
        """

    def refuse(self, error: DataError, subset: Optional[str], example: str) -> None:
        """Something that training refuses: what comes after this is for verification."""
        raise error

    @contextlib.contextmanager
    def noting(self, subset: Optional[str], name: str, path: Path, place: str = "") -> Iterator[None]:
        """Around the reading of a file or sample, which ends where it is refused; what comes after is for verification.

        Args:
            subset: it is in.
            name: what to call it.
            path: the file.
            place: what messages call it, where that is not its path.
        """
        yield


STRICT = Problems()
