"""``ipucnn verify-dataset``: check a data set's files."""

from typing import Any, Mapping

from ipucnn.config.signature import with_run_options
from ipucnn.errors import ConfigurationError


@with_run_options("verify-dataset", from_flags=True)
def verify_dataset(flags: Mapping[str, Any]) -> None:
    """Check that a data set's files are complete, readable and of the shapes and classes expected."""
    raise ConfigurationError(
        "ipucnn verify-dataset is not built yet",
        "`ipucnn train --limit-train 1%` reads a part of the data set",
    )
