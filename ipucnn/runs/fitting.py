"""What a run that ran out of an IPU's memory should change, asked of the planner when it happens."""

from dataclasses import replace
from typing import Callable, Collection, Dict, Optional

from ipucnn.aliases import KerasModel
from ipucnn.config.options import BY_NAME, RunConfig
from ipucnn.errors import UserError
from ipucnn.training.program import Program, make_program

Ask = Callable[[Optional[float]], Optional[str]]
"""Memory needed over memory there is (None: unknown) -> a hint, or None where nothing tried is predicted to fit or the
planner does not know the network."""


def would_fit(model: "KerasModel", name: str, program: Program, config: RunConfig) -> Ask:
    """The question to ask when memory runs out in training.

    Args:
        model: from ``build_model``.
        name: of the network.
        program: that runs; its splits are filled in.
        config: of the run.
    """
    return _asking(model, name, lambda: program, config, training=True, renamed=None)


def prediction_would_fit(model: "KerasModel", name: str, config: RunConfig, command: str) -> Ask:
    """The question to ask when memory runs out in evaluation or inference, which have no pipeline.

    Args:
        model: from ``build_model``.
        name: of the network.
        config: of the run.
        command: "evaluate", "infer" or "benchmark"; the hint has only options that it takes.
    """
    proportions = config.available_memory_proportion
    micro_batch = config.validation_micro_batch_size or config.micro_batch_size
    one_stage = replace(
        config,
        micro_batch_size=micro_batch,
        num_replicas=config.validation_num_replicas or config.num_replicas,
        gradient_accumulation_count=1,
        global_batch_size=None,
        ipus=None,
        ipus_per_replica=None,
        pipeline_splits=(),
        device_mapping=None,
        recomputation=False,
        dbn_replica_group_size=1,
        pad_dataset=False,
        available_memory_proportion=proportions if len(proportions) == 1 else (),
        weight_updates_per_epoch=1,
        steps_per_execution=None,
        num_epochs=1,
        logs_per_epoch=1.0,
        checkpoints=False,
        validation=False,
    )

    def program() -> Program:
        return make_program(one_stage, micro_batch * one_stage.num_replicas, seed=0)

    size = "validation_micro_batch_size" if command == "evaluate" else "micro_batch_size"
    options = {"micro_batch_size": size, "available_memory_proportion": None, "precision": None}
    renamed = {}
    for option, other in options.items():
        spec = BY_NAME[other or option]
        if command in spec.commands:
            renamed[BY_NAME[option].flag] = spec.flag
    smaller = BY_NAME[size].flag if command in BY_NAME[size].commands else ""
    advice = f"use a smaller {smaller}, or --device cpu" if smaller else "use --device cpu"
    ask = _asking(model, name, program, one_stage, training=False, renamed=renamed)
    return lambda overuse: ask(overuse) or advice


def _asking(
    model: "KerasModel",
    name: str,
    make: Callable[[], Program],
    config: RunConfig,
    *,
    training: bool,
    renamed: Optional[Dict[str, str]],
) -> Ask:
    """The question to ask about a program.

    Args:
        make: the program that ran out of memory, asked for only then: no run fails for the sake of a hint.
        renamed: flags of training that may be proposed, and what they are called; None: all, as they are.
    """

    def ask(overuse: Optional[float]) -> Optional[str]:
        from ipucnn.hardware import smallest_system
        from ipucnn.planning.graphs.extract import graph_of
        from ipucnn.planning.search.smallest_change import hint_for, smallest_change
        from ipucnn.planning.settings import plan_settings

        only: Optional[Collection[str]] = renamed
        try:
            program = make()
            system = smallest_system(program.num_ipus)
            graph = graph_of(model, name)
            settings = plan_settings(config, program.layout, training)
            change = smallest_change(
                graph, settings, program.pipeline_splits, system, overuse=overuse, only=only
            )
        except UserError:
            # A layer that the planner does not know: the error that is being explained matters more.
            return None
        if change is not None and renamed is not None:
            change = replace(change, flags=tuple(renamed.get(word, word) for word in change.flags))
        return hint_for(change)

    return ask
