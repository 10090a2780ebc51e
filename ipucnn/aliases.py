"""Names for what TensorFlow, Keras and the Poplar SDK make: their types differ by version, and there are no stubs.

Importing this needs neither of them, so that a signature can name a tensor in a module that must stay light.
"""

from typing import Any

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
