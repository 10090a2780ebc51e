"""Weights of 16 bits as checkpoints have them: float32."""

from typing import Any

import numpy as np


class Float32View:
    """A variable of another type that reads and takes float32."""

    def __init__(self, variable: Any) -> None:
        self._variable = variable
        self.shape = variable.shape

    def numpy(self) -> Any:
        """float32 values."""
        return self._variable.numpy().astype(np.float32)

    def assign(self, values: Any) -> None:
        """Rounds to the variable's type."""
        values = values.numpy() if hasattr(values, "numpy") else np.asarray(values)
        self._variable.assign(values.astype(self._variable.dtype.as_numpy_dtype))


def portable(variable: Any) -> Any:
    """The variable itself if it is float32, else a view of it that is."""
    return variable if variable.dtype.name == "float32" else Float32View(variable)
