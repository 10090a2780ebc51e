"""``ipucnn plan-splits``: plan how to split a network over IPUs."""

from ipucnn.config.resolve import Resolved
from ipucnn.config.signature import with_run_options
from ipucnn.errors import ConfigurationError


@with_run_options("plan-splits")
def plan_splits(resolved: Resolved) -> None:
    """Plan how to split a network into pipeline stages over IPUs, and predict memory and throughput."""
    raise ConfigurationError(
        "ipucnn plan-splits is not built yet",
        "name the splits yourself with `ipucnn train --pipeline-splits`",
    )
