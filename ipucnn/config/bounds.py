"""How large the numbers, texts and lists of options may be, each with its reason.

Every option that takes a number has a bound (``spec`` refuses a declaration without one), chosen by what the
number means: what the largest machines hold, or well beyond anything that can be computed with.  Products of
legal values are checked where they are made, see ``training.batching``.
"""

from typing import NamedTuple, Optional


class Range(NamedTuple):
    """Bounds of a number: ``minimum`` and ``maximum`` are legal values themselves, ``above`` and ``below`` are not."""

    minimum: Optional[float] = None
    maximum: Optional[float] = None
    above: Optional[float] = None
    below: Optional[float] = None

    @property
    def is_closed(self) -> bool:
        """Whether there is a lower and an upper bound."""
        lower, upper = (self.minimum, self.above), (self.maximum, self.below)
        return lower != (None, None) and upper != (None, None)


MAX_COUNT = 2**31 - 1
"""Samples, weight updates and the like: what a whole number of 32 bits holds."""
MAX_BYTES = 2**63 - 1
"""Fields of the SDK's configuration that hold bytes are whole numbers of 64 bits (its driver/config.proto)."""
MAX_IPUS = 2**16
"""Graphcore announced Bow Pods of up to 64,000 IPUs; a replica, stages and replicas are counted in IPUs."""
MAX_MICRO_BATCH = 2**20
"""Samples in one forward pass; an IPU holds some hundreds."""
MAX_ACCUMULATION = 2**20
"""Micro-batches of one weight update."""
MAX_EPOCHS = 10**6
"""Epochs: ImageNet is trained for some hundreds."""
MAX_IMAGE_SIDE = 2**16
"""Pixels: what the formats of images hold, but for TIFF."""
MAX_CHANNELS = 2**16
"""Channels of a layer; the widest networks have some thousands."""
MAX_BASE_FILTERS = 1024
"""Filters of the first block, of which the last one has sixteen times as many; published networks have 64."""
MAX_CLASSES = 2**17
"""The largest public data sets of images have some ten thousand classes."""
MAX_FLOAT32 = 3.4028234663852886e38
"""The largest number of 32 bits: training computes with no larger ones."""
MAX_DECAY = 1e9
"""Weight decay and penalties; none above 1 was ever of use."""
LEAST_BETA, MAX_BETA = 0.01, 1000.0
"""Parameters of the shares of mixed images: below, one image of two is always whole; above, both always have a half."""
MAX_LOSS_SCALING = 2**32
"""The largest number of 16 bits is 65,504, and gradients are seldom scaled by more."""
MAX_WORKERS = 2**16
"""Images that the host processes at once."""
MAX_THREADS = 4096
"""Threads of an operation; the largest machines have some hundreds of cores."""
MAX_CLUSTER = 1024
"""Workers of a cluster: each has a connection to the first one, and gets what every other one computed."""
MAX_DEVICES = 64
"""GPUs of one process; no machine has as many."""
MAX_SECONDS = 3e7
"""Nearly a year."""
MAX_GROUPS = MAX_CHANNELS
"""Groups of group norm, and channels of one."""
MAX_TEXT = 4096
"""Characters of a text; the longest path has as many bytes."""
MAX_VALUES = 1024
"""Values of a list, and of each list and dictionary inside of a dictionary; networks have fewer stages."""
LEAST_FRACTION = 1 / MAX_EPOCHS
"""Of what happens per epoch: less than once in the longest run is never."""
