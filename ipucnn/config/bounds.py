"""Bounds of the numbers, texts and lists of options, each with its reason.

Every option that takes a number has a bound (``spec`` refuses a declaration without one).  It follows from the number's
meaning: the capacity of the largest machines, or a value well beyond any feasible computation.  Products of legal
values are checked when they are computed, see ``training.batching``.
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
"""Samples, weight updates and other counts: the largest 32-bit integer."""
MAX_BYTES = 2**63 - 1
"""Bytes in the SDK's configuration, whose fields are 64-bit integers (its driver/config.proto)."""
MAX_IPUS = 2**16
"""Graphcore announced Bow Pods of up to 64,000 IPUs; the size of a replica, stages and replicas are counted in IPUs."""
MAX_MICRO_BATCH = 2**20
"""Samples in one forward pass; an IPU holds a few hundred."""
MAX_ACCUMULATION = 2**20
"""Micro-batches of one weight update."""
MAX_EPOCHS = 10**6
"""Epochs: ImageNet is trained for a few hundred."""
MAX_IMAGE_SIDE = 2**16
"""Pixels: the limit of image formats other than TIFF."""
MAX_CHANNELS = 2**16
"""Channels of a layer; the widest networks have a few thousand."""
MAX_BASE_FILTERS = 1024
"""Filters of the first block; the last one has sixteen times as many.  Published networks have 64."""
MAX_CLASSES = 2**17
"""Classes; the largest public data sets of images have some ten thousand."""
MAX_FLOAT32 = 3.4028234663852886e38
"""The largest 32-bit float: training cannot compute with larger numbers."""
MAX_DECAY = 1e9
"""Weight decay and penalties; no useful one exceeds 1."""
LEAST_BETA, MAX_BETA = 0.01, 1000.0
"""Bounds of the mixing parameters: below, one image of two is always whole; above, both always have a half."""
MAX_LOSS_SCALING = 2**32
"""Loss scaling: the largest 16-bit float is 65,504, and gradients are seldom scaled by more."""
MAX_WORKERS = 2**16
"""Images that the host processes at a time."""
MAX_THREADS = 4096
"""Threads of an operation; the largest machines have a few hundred cores."""
MAX_RANKS = 1024
"""Processes that train together: each has memory for the gradients of all."""
MAX_DEVICES = 64
"""GPUs of one process; no machine has as many."""
MAX_SECONDS = 3e7
"""Nearly a year."""
MAX_GROUPS = MAX_CHANNELS
"""Groups of group norm, and channels of one."""
MAX_TEXT = 4096
"""Characters of a text; the longest path has that many bytes."""
MAX_VALUES = 1024
"""Values of a list, and of each list and dictionary in a dictionary; networks have fewer stages."""
LEAST_FRACTION = 1 / MAX_EPOCHS
"""Least events per epoch: a lower number never reaches one event, even in the longest run."""

# Bounds of the numbers of single commands.

MIN_EXECUTIONS = 3
"""Fewer measured executions of a benchmark show no spread."""
EXECUTIONS = Range(MIN_EXECUTIONS, 10**6)
"""Measured executions of a benchmark; all of them are stored."""
SECONDS = Range(0, MAX_SECONDS)
"""Duration of a measurement."""
STAGES = Range(1, MAX_IPUS)
"""Pipeline stages; each has at least one layer, so that networks have fewer."""
ROW = Range(1, MAX_COUNT)
"""Row of the table of a search; the first is 1."""
CLASSES = Range(1, MAX_CLASSES)
"""Classes to plan a network for, or to show."""
PATCH_SIDE = Range(1, MAX_IMAGE_SIDE)
"""Height and width of an input patch."""
THRESHOLD = Range(0, 0.99)
"""Probability of class 1 above which a pixel is of class 1."""
TEST_TIME_AUGMENTATION = Range(1, 8)
"""Rotated and mirrored versions of an image; ``runs.images.segmentation`` defines the legal numbers."""
OPSET = Range(9, 99)
"""Version of the operations of an ONNX file; the installed packages determine which can be written."""
EXPORT_BATCH = Range(1, 65536)
"""Images of each call of an exported network."""
SHARDS = Range(1, 99_999)
"""Files of records of a subset; the number in a file's name has five digits."""
RECORD_WORKERS = Range(1, 1024)
"""Files of records that are written at a time."""
PIXELS = Range(1, 2**31 - 1)
"""Limit of the pixels of one image; Pillow's own arithmetic allows no more."""

# Defaults of options whose value is None unless they are typed: a suite, a format or a task depends on it.
DEFAULT_EXECUTIONS, DEFAULT_MIN_TIME_S, DEFAULT_MAX_TIME_S = 10, 10.0, 150.0
DEFAULT_MAX_REGRESSION = 0.05
DEFAULT_OPSET = 15
DEFAULT_TOP = 5
