"""``ipucnn benchmark``: measure throughput and time."""

from ipucnn.config.resolve import Resolved
from ipucnn.config.signature import with_run_options
from ipucnn.errors import ConfigurationError


@with_run_options("benchmark")
def benchmark(resolved: Resolved) -> None:
    """Measure the throughput and time of training, validation and inference.

    Takes the options of `ipucnn train`, so that what is measured is what would run.
    """
    raise ConfigurationError(
        "ipucnn benchmark is not built yet", "`ipucnn train` reports the throughput of its run"
    )
