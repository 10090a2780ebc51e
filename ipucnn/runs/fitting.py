"""What a run that ran out of an IPU's memory should change, asked of the planner when it happens."""

from typing import Any, Callable, Optional

from ipucnn.config.options import RunConfig
from ipucnn.errors import UserError
from ipucnn.training.program import Program

__all__ = ["would_fit"]


def would_fit(
    model: Any, name: str, program: Program, config: RunConfig, *, training: bool = True
) -> Callable[[Optional[float]], Optional[str]]:
    """The question to ask when memory runs out.

    Args:
        model: from ``build_model``.
        name: of the network.
        program: that runs; its splits are filled in.
        training: or evaluation and inference.

    Returns:
        A function of memory needed over memory there is (None: unknown); it returns a hint, or None where nothing
        tried is predicted to fit or the planner does not know the network.
    """

    def ask(overuse: Optional[float]) -> Optional[str]:
        from ipucnn.hardware import SYSTEMS, get_system
        from ipucnn.planning.extract import graph_of
        from ipucnn.planning.smallest_change import hint_for, settings_of, smallest_change
        from ipucnn.runs.splits import DEFAULT_SYSTEM, optimizer_slots

        pods = (system for system in SYSTEMS.values() if system.name.startswith("pod"))
        system = next((pod for pod in pods if pod.num_ipus >= program.num_ipus), get_system(DEFAULT_SYSTEM))
        try:
            graph = graph_of(model, name)
            settings = settings_of(
                program,
                training=training,
                optimizer_slots=optimizer_slots(config.optimizer, config.optimizer_params),
                optimizer_state_offloading=config.optimizer_state_offloading,
                half_partials=config.half_partials,
                eight_bit_transfer=config.eight_bit_transfer,
            )
            return hint_for(
                smallest_change(graph, settings, program.pipeline_splits, system, overuse=overuse)
            )
        except UserError:
            # A layer that the planner does not know: the error that is being explained matters more.
            return None

    return ask
