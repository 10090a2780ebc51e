"""Exchanges arrays between the instances of ``poprun``, through files in a folder that all of them see.

Without a folder an instance is alone, and behaves as if the others had its own values.
"""

import os
import time
from pathlib import Path
from typing import Any, List, Sequence

import numpy as np

FOLDER_VARIABLE = "POPLAR_DOUBLE_EXCHANGE"
TIMEOUT_VARIABLE = "POPLAR_DOUBLE_TIMEOUT_S"


class Exchange:
    """A rendezvous of all instances at every call, in the same order in each.

    Args:
        folder: empty before the first instance starts.
        index: number of this instance.
        count: number of instances.
        timeout_s: seconds that an instance waits for another.
    """

    def __init__(self, folder: Path, index: int, count: int, timeout_s: float = 120.0) -> None:
        self._folder, self._index, self._count, self._timeout_s = Path(folder), index, count, timeout_s
        self._sequence = 0

    def _path(self, index: int, sequence: int) -> Path:
        return self._folder / str(index) / f"{sequence:08d}.npz"

    def gather(self, name: str, arrays: Sequence[Any]) -> List[List[Any]]:
        """Returns the arrays of all instances, by instance.

        Raises:
            RuntimeError: another instance makes another call; devices would wait for each other forever.
            TimeoutError: another instance does not arrive.
        """
        own_file = self._path(self._index, self._sequence)
        own_file.parent.mkdir(parents=True, exist_ok=True)
        if own_file.exists():
            raise RuntimeError(f"{self._folder} holds another run's arrays")
        temporary = own_file.with_suffix(".tmp")
        with open(temporary, "wb") as handle:
            np.savez(handle, name=np.array(name), **{f"a{i}": np.asarray(a) for i, a in enumerate(arrays)})
        os.replace(temporary, own_file)
        gathered = [self._read(index, name, len(arrays)) for index in range(self._count)]
        if self._sequence:
            # An instance that wrote this call's file has read all files of the call before.
            self._path(self._index, self._sequence - 1).unlink()
        self._sequence += 1
        return gathered

    def _read(self, index: int, name: str, number: int) -> List[Any]:
        path, until = self._path(index, self._sequence), time.monotonic() + self._timeout_s
        while not path.exists():
            if time.monotonic() > until:
                raise TimeoutError(f"instance {self._index} waits for instance {index} at {name}")
            time.sleep(0.005)
        with np.load(path) as stored:
            theirs = str(stored["name"])
            if theirs != name or len(stored.files) != number + 1:
                raise RuntimeError(f"instance {self._index} is at {name}, instance {index} at {theirs}")
            return [stored[f"a{i}"] for i in range(number)]


class Alone:
    """Exchanges nothing: one process, alone or in place of all instances."""

    def __init__(self, count: int) -> None:
        self._count = count

    def gather(self, name: str, arrays: Sequence[Any]) -> List[List[Any]]:
        """Returns this instance's arrays, repeated for each instance."""
        return [[np.asarray(a) for a in arrays]] * self._count


def make_exchange(index: int, count: int) -> Any:
    """Makes the exchange of this process; ``POPLAR_DOUBLE_EXCHANGE`` is the folder."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if count < 2 or not folder:
        return Alone(count)
    return Exchange(Path(folder), index, count, float(os.environ.get(TIMEOUT_VARIABLE, 120)))
