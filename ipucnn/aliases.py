"""Type names for values from TensorFlow, Keras, the Poplar SDK, other libraries, and files.

The libraries' types differ by version and have no stubs.  This module imports none of the libraries, so modules that
must stay light can use the names in signatures.  ``MemoryAdvice`` is the type of a function of the planner that
sessions call without importing the planner.
"""

import sys
from typing import TYPE_CHECKING, Any, Dict, Optional, Protocol

if TYPE_CHECKING or sys.version_info >= (3, 9):
    from typing import Annotated as Annotated
else:
    from typing_extensions import Annotated as Annotated

KerasInitializer = Any
KerasLayer = Any
KerasModel = Any
KerasProgbar = Any
KerasVariable = Any
KerasConfig = Dict[str, Any]
"""The settings of a layer, a model or an optimizer by name, as Keras' ``get_config`` returns them."""
SdkModule = Any
Tensor = Any
TensorShape = Any
TfDataset = Any
TfFunction = Any
TfGraph = Any
TfIterator = Any
TfVariable = Any

Numbers = Any
"""A number, a NumPy array or a tensor, in arithmetic that is the same for all three."""

ClickCommand = Any
ClickContext = Any
ClickError = Any
ClickParameter = Any
"""A class of Click, or its copy in Typer: newer versions of Typer contain Click."""
HdfItem = Any
"""A file, group or HDF5 data set of h5py."""
NumbaType = Any
OnnxGraph = Any
OnnxNode = Any
PillowImage = Any
TfdsBuilder = Any
TiffPage = Any
YamlEvent = Any
YamlNode = Any

PlainValue = Any
"""A value from JSON, YAML or a command line: None, a bool, number or text, or a list or dictionary of plain values."""
PlainDict = Dict[str, Any]
"""A JSON object or a YAML mapping with plain values."""


class MemoryAdvice(Protocol):
    """Predicts the IPUs' memory; called only after the compiler refused a program.

    Args:
        overuse: memory needed divided by memory available, as the compiler reported it; None if unknown.
        without: the ``RunConfig`` name of an option whose memory is not available.  If given, the advice is what the
            fullest IPU holds without the option; if None, a change with which the program is predicted to fit.

    Returns:
        Part of a hint, or None if there is no prediction.
    """

    def __call__(self, overuse: Optional[float], without: Optional[str] = None) -> Optional[str]: ...
