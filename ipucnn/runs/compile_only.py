"""``ipucnn train --compile-only``: the run's programs into an executable cache, where no IPU need be."""

from typing import Any, Dict

from ipucnn.errors import ConfigurationError
from ipucnn.runs import setup as run_setup


def check_compile_only(config: Any) -> None:
    """Refuses what there is nothing to compile for.

    Raises:
        ConfigurationError: the device is no IPU, or one that must be there is named.
    """
    from ipucnn.sessions.factory import runs_on_ipus

    if config.compile_only and not runs_on_ipus(config.device):
        raise ConfigurationError(
            f"--compile-only compiles for IPUs, and --device {config.device} is none here",
            "drop it, or type it in the Poplar SDK's environment",
        )
    if config.compile_only and config.select_ipu is not None:
        # The driver ends the process where it has no device to take that number of (poplar_executor.cc).
        raise ConfigurationError(
            f"--select-ipu {config.select_ipu}: --compile-only takes no device", "drop one of them"
        )


def compile_only(run: Any, session: Any) -> Dict[str, Any]:
    """Compiles training, statistics and validation of a ``TrainingRun``; nothing is trained or written but the cache.

    Returns:
        The report: model, program, compilation and the cache's folder.
    """
    from ipucnn.sessions.poplar.surroundings import executable_cache

    config, program = run.setup.config, run.program
    batches = None
    if program.executions_per_validation:
        batch = program.validation_micro_batch_size * program.validation_num_replicas
        batches = run_setup.evaluation_batches(run.setup, batch)
    compilation = session.compile_ahead(run.dataset, batches)
    return {
        "model": config.model_name,
        "compiled_only": True,
        "executable_cache": executable_cache(),
        "program": program.to_dict(),
        "compilation": compilation.to_dict(),
    }
