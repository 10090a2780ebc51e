"""``ipucnn plan-splits``: plan how to split a network over IPUs."""

from typing import Optional

import typer

from ipucnn.config.resolve import Resolved
from ipucnn.config.signature import with_run_options
from ipucnn.errors import ConfigurationError

STAGES = typer.Option(None, "--stages", min=1, metavar="K", help="Pipeline stages to split into.")
SYSTEM = typer.Option(None, "--system", metavar="NAME", help="System to plan for, for example pod16.")
SAVE = typer.Option(None, "--save", metavar="FILE", help="Write the plan as YAML.")
HTML = typer.Option(None, "--html", metavar="FILE", help="Write the plan as an HTML page.")


@with_run_options("plan-splits")
def plan_splits(
    resolved: Resolved,
    stages: Optional[int] = STAGES,
    system: Optional[str] = SYSTEM,
    save: Optional[str] = SAVE,
    html: Optional[str] = HTML,
) -> None:
    """Plan how to split a network into pipeline stages over IPUs, and predict memory and throughput."""
    raise ConfigurationError(
        "ipucnn plan-splits is not built yet",
        "`ipucnn train --ipus-per-replica K` splits by multiply-accumulates; --pipeline-splits takes your own",
    )
