"""What to suggest when a program does not fit on IPUs: the smallest change that is predicted to."""

from typing import Any, Callable, Optional

from ipucnn.runs.splits import DEFAULT_SYSTEM


def memory_hint(run: Any, model: Any) -> Callable[[Optional[float]], Optional[str]]:
    """A function from how many times the memory there is was needed (None: unknown) to a hint, or None.

    Args:
        run: the ``TrainingRun``, its splits settled.
        model: the network.
    """

    def hint(overuse: Optional[float]) -> Optional[str]:
        from ipucnn.hardware import get_system
        from ipucnn.planning.keras_graph import graph_of
        from ipucnn.planning.smallest_change import hint_for, settings_of, smallest_change

        config, program = run.setup.config, run.program
        settings = settings_of(
            program,
            optimizer_slots=len(run.optimizer.slots),
            optimizer_state_offloading=config.optimizer_state_offloading,
            half_partials=config.half_partials,
            eight_bit_transfer=config.eight_bit_transfer,
        )
        graph = graph_of(model, run.setup.record.name)
        return hint_for(
            smallest_change(
                graph, settings, program.pipeline_splits, get_system(DEFAULT_SYSTEM), overuse=overuse
            )
        )

    return hint
