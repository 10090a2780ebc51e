"""Names for what TensorFlow, Keras and the Poplar SDK make: their types differ by version, and there are no stubs.

Importing this needs neither of them, so that a signature can name a tensor in a module that must stay light.  Last,
what a session may ask of the planner, which it does not import.
"""

from typing import Any, Optional, Protocol

KerasInitializer = Any
KerasLayer = Any
KerasModel = Any
SdkModule = Any
Tensor = Any
TensorShape = Any
TfDataset = Any
TfFunction = Any
TfGraph = Any
TfIterator = Any
TfVariable = Any


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
