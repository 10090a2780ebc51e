"""Names for what this project is given: by TensorFlow, Keras, the Poplar SDK and other libraries, and by files.

The types of the libraries differ by version, there are no stubs of them, and importing this needs none of them: so a
signature can name a tensor in a module that must stay light.  Last, what a session may ask of the planner, which it
does not import.
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
KerasVariable = Any
KerasConfig = Dict[str, Any]
"""What Keras says of a layer, a model or an optimizer in ``get_config``: its settings by name."""
SdkModule = Any
Tensor = Any
TensorShape = Any
TfDataset = Any
TfFunction = Any
TfGraph = Any
TfIterator = Any
TfVariable = Any

Numbers = Any
"""One number, a NumPy array of them or a tensor: for arithmetic that is the same for each."""

ClickCommand = Any
ClickContext = Any
ClickError = Any
ClickParameter = Any
"""Click's own or those in Typer: newer versions of Typer have Click inside them."""
HdfItem = Any
"""A file, group or data set of h5py."""
NumbaType = Any
OnnxGraph = Any
PillowImage = Any
TfdsBuilder = Any
YamlEvent = Any
YamlNode = Any

PlainValue = Any
"""What JSON, YAML and command lines say: None, a bool, number or text, or a list or dictionary of plain values."""
PlainDict = Dict[str, Any]
"""An object of a JSON document, or a mapping of a YAML one; its values are plain."""


class MemoryAdvice(Protocol):
    """What is predicted of the IPUs' memory, asked only once a program was refused.

    Args:
        overuse: memory needed over memory there is, as the compiler said; None: unknown.
        without: the option, by its name in ``RunConfig``, whose memory is not there.  Then the answer is what the
            fullest IPU holds with it off; else it is a change after which the program is predicted to fit.

    Returns:
        Part of a hint, or None where nothing is predicted.
    """

    def __call__(self, overuse: Optional[float], without: Optional[str] = None) -> Optional[str]: ...
