"""What this process may print and write: all if it is alone; else only the first of the processes prints and writes.

``runs.writer.open_writer`` gives each role its writer of the run folder.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Optional

from ipucnn.sessions.group import find_instances, find_launched


@dataclass(frozen=True)
class Role:
    """The role of one process.

    Attributes:
        rank: its number among the processes of the run.
        prints_errors: whether it prints errors; if not, another process prints the same ones.
        prints_own_errors: whether it prints errors that occur before the processes are connected.
    """

    rank: int = 0
    prints_errors: bool = True
    prints_own_errors: bool = True

    @property
    def writes(self) -> bool:
        """Whether it prints results and writes the files of the user and of the run, as the first process does."""
        return self.rank == 0

    @contextlib.contextmanager
    def output(self) -> Iterator[None]:
        """Discards the output of a process that prints nothing, besides errors."""
        if self.writes:
            yield
            return
        with contextlib.ExitStack() as stack:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
            yield

    def path(self, path: Optional[Path]) -> Optional[Path]:
        """Returns the path to which this process writes an output; None without an output.

        A process that writes nothing of the user's gets a temporary file of the same name.
        """
        if path is None or self.writes:
            return path
        import atexit
        import shutil
        import tempfile

        folder = tempfile.mkdtemp(prefix="ipucnn-instance-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return Path(folder) / path.name


ALONE = Role()


def find_role() -> Role:
    """Returns the role of this process, from the variables of its launcher.

    Raises:
        ConfigurationError: the variables are not valid.
    """
    launched = find_launched()
    if launched is None:
        return Role(find_instances().rank)
    return Role(launched.rank, launched.rank == 0, launched.local_rank == 0)
