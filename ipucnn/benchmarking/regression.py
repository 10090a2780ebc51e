"""Is it slower than an earlier report says?

The machine itself is faster one day and slower the next: neighbours, heat, clock.  So what is compared is not
time but cost, an execution's time per sample over the time that a fixed matrix product took just before and
after it, in both reports.
"""

from typing import Any, Dict, List

from ipucnn.benchmarking.statistics import unpaired_ratio
from ipucnn.errors import ConfigurationError

METHOD = (
    "median over executions of time per sample / time of a reference matrix product around it; slower if the ratio "
    "of speeds is below 1 - allowed and its 95 % bootstrap interval excludes 1"
)
# What has to be the same in both reports for a comparison to mean anything.
_PROGRAM = (
    "micro_batch_size",
    "gradient_accumulation_count",
    "num_replicas",
    "precision",
)


def check_same_request(baseline: Dict[str, Any], where: str, **now: Any) -> None:
    """Compares what is known before TensorFlow is imported.

    Args:
        baseline: an earlier report.
        where: its file, for messages.
        now: key of a report -> value now.

    Raises:
        ConfigurationError: it measured something else.
    """
    for key, value in now.items():
        before = baseline["data"]["kind"] if key == "data" else baseline.get(key)
        if before != value:
            raise ConfigurationError(
                f"--baseline {where} measured {key} {before}, this is {value}", "compare like with like"
            )


def check_same_run(
    baseline: Dict[str, Any], where: str, program: Dict[str, Any], machine: Dict[str, Any]
) -> None:
    """Compares batches and machine.

    Raises:
        ConfigurationError: they differ.
    """
    pairs: List[Any] = [
        (key.replace("_", " "), baseline["program"].get(key), program[key]) for key in _PROGRAM
    ]
    pairs += [
        (f"device {key}", baseline["device"].get(key), machine[key]) for key in ("kind", "name", "num_cores")
    ]
    for what, before, now in pairs:
        if before != now:
            raise ConfigurationError(
                f"--baseline {where} has {what} {before}, this run {now}", "compare like with like"
            )


def costs(executions: List[Dict[str, Any]], relative: bool) -> List[float]:
    """Time per sample of each execution, ``relative`` to the reference product's."""
    return [e["wall_s"] / e["samples"] / (float(e["reference_s"]) if relative else 1.0) for e in executions]


def compare(
    baseline: Dict[str, Any], where: str, executions: List[Dict[str, Any]], allowed: float, seed: int = 0
) -> Dict[str, Any]:
    """``regression`` of a report.

    Args:
        baseline: an earlier report.
        where: its file.
        executions: of this one.
        allowed: share of the speed that may be lost.
    """
    both = [*baseline["executions"], *executions]
    relative = all(e.get("reference_s") for e in both)
    ratio = unpaired_ratio(costs(executions, relative), costs(baseline["executions"], relative), seed)
    certain = ratio.upper is not None and ratio.upper < 1.0
    return {
        "baseline": where,
        "baseline_images_per_s": baseline["measured"]["images_per_s"]["value"],
        "ratio": ratio.to_dict(),
        "relative_to_reference": relative,
        "allowed": allowed,
        "regressed": bool(ratio.value < 1.0 - allowed and certain),
        "method": METHOD,
    }
