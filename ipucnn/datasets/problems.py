"""How readers report problems in files.

Training and ``verify-dataset`` share the readers.  In training, the first problem that cannot be skipped ends the
reading; ``verify-dataset`` records each problem and continues (``verification/survey.py``).
"""

import contextlib
from pathlib import Path
from typing import Iterator, Optional

from ipucnn.errors import DataError


class Problems:
    """Receives the problems that a reader reports.  This class is for training."""

    def find(self, code: str, subset: Optional[str], example: str = "", count: int = 1) -> None:
        """Records a problem that training skips or does not check.

        Args:
            code: a key of ``verification.findings.CODES``.
            subset: "train" or "eval"; None for the set as a whole.
            example: the file or sample, and its problem.
            count: number of files, samples or classes with the problem.
        """

    def refuse(self, error: DataError, subset: Optional[str], example: str) -> None:
        """Raises an error that ends training.  Code after a call to this runs only in verification."""
        raise error

    @contextlib.contextmanager
    def noting(self, subset: Optional[str], name: str, path: Path, place: str = "") -> Iterator[None]:
        """Encloses the reading of a file or sample; an error ends the block.

        In training the error is raised.  Verification records it and continues after the block.

        Args:
            subset: "train" or "eval"; None for the set as a whole.
            name: the name of the file or sample in findings.
            path: the file.
            place: its name in error messages, if that is not the path.
        """
        yield


STRICT = Problems()
