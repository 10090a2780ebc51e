"""Rules for the options of ``plan-splits`` that do not go together: one table, checked before a network is read."""

from typing import NamedTuple, Optional, Tuple

from ipucnn.config.options import RunConfig
from ipucnn.config.rules import Rule
from ipucnn.planning.program import OF_UPDATES
from ipucnn.planning.schedules import INTERLEAVED
from ipucnn.text import counted


class Asked(NamedTuple):
    """The facts that the rules depend on, besides the options of runs.

    Attributes:
        stages: the value of ``--stages``.
        row: the value of ``--row``.
        recomputation: the value of ``--recomputation``.
        inference: whether forward passes are planned.
        typed: the typed option of runs that says how many stages there are, and their number.
        num_stages: the number of stages; None if it is searched.
    """

    stages: Optional[int]
    row: Optional[int]
    recomputation: Optional[str]
    inference: bool
    typed: Optional[Tuple[str, int]]
    num_stages: Optional[int]


PLAN_RULES: Tuple[Rule[RunConfig, Asked], ...] = (
    *(
        Rule(
            lambda _, asked: asked.inference,
            "{option}: inference has no weight updates",
            "drop it; --micro-batch-size, --num-replicas and --steps-per-execution say what an execution of inference "
            "takes",
            name,
            has_off=False,
        )
        for name in (*OF_UPDATES, "optimizer", "optimizer_params", "optimizer_state_offloading")
    ),
    Rule(
        lambda config, asked: asked.inference and config.pipeline_schedule == INTERLEAVED,
        "{option}: inference has no backward passes that could alternate with forward ones",
        "--pipeline-schedule Grouped, or Sequential",
        "pipeline_schedule",
    ),
    Rule(
        lambda _, asked: asked.inference and asked.recomputation is not None,
        "--recomputation {recomputation}: inference keeps nothing that could be computed again",
        "drop it",
        texts=lambda _, asked: {"recomputation": asked.recomputation},
    ),
    Rule(
        lambda _, asked: not asked.inference,
        "{option}: an execution of training is its weight updates",
        "add --inference, or give --gradient-accumulation-count",
        "steps_per_execution",
    ),
    Rule(
        lambda _, asked: None not in (asked.stages, asked.typed) and asked.stages != asked.num_stages,
        "--stages {stages}, but {typed[0]} says {count}",
        "use --stages {num_stages}, or drop one of them",
        texts=lambda _, asked: {**asked._asdict(), "count": counted(asked.num_stages or 0, "stage")},
    ),
    Rule(
        lambda config, asked: len(config.available_memory_proportion) > 1 and asked.num_stages is None,
        "--available-memory-proportion has {count} values, and nothing says how many stages there are",
        "give one value, or --stages",
        "available_memory_proportion",
        texts=lambda config, _: {"count": len(config.available_memory_proportion)},
    ),
    Rule(
        lambda _, asked: None not in (asked.row, asked.num_stages),
        "--row {row}: there is no table of best uses, because the number of stages is given",
        "leave out --row, or give --ipus and neither a number of stages nor splits",
        texts=lambda _, asked: {"row": asked.row},
    ),
)
