"""``ipucnn evaluate``: the metrics of a trained run."""

import json
from pathlib import Path
from typing import Any, Dict, Optional

from ipucnn.commands.run_arguments import RUN, WHICH
from ipucnn.config.signature import with_run_options


@with_run_options("evaluate", from_run=True)
def evaluate(
    flags: Dict[str, Any],
    verbose: bool,
    json_output: bool,
    run: Path = RUN,
    checkpoint: Optional[str] = WHICH,
) -> None:
    """Evaluate a run on held-out data: loss, top-1, top-5.

    Every sample counts exactly once. The run's own options hold unless a flag overrides them.
    """
    from ipucnn.reports.console import note
    from ipucnn.reports.evaluate import print_evaluation
    from ipucnn.runs.evaluate import evaluate_run

    result = evaluate_run(run, flags, which=checkpoint, verbose=verbose)
    for warning in result.pop("warnings"):
        note(f"warning: {warning}")
    if json_output:
        print(json.dumps(result, indent=2))
    else:
        print_evaluation(result)
