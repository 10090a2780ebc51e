"""Options of a run that concern the arithmetic of training; declared as ``options`` describes."""

# ruff: noqa: RUF009 - option() returns a dataclasses.field with a default_factory for mutable defaults
import dataclasses
from typing import Any, ClassVar, Dict, Optional

from ipucnn.config import bounds, values
from ipucnn.config.spec import PLAN, TRAIN, option


@dataclasses.dataclass(frozen=True)
class Training:
    """Optimizer, schedule, loss and precision."""

    PANEL: ClassVar[str] = "Training"

    training: bool = option(True, "Train; False only validates.", commands=TRAIN)
    num_epochs: int = option(
        1, "Epochs to train for.", aliases=("epochs",), minimum=1, maximum=bounds.MAX_EPOCHS, commands=TRAIN
    )
    optimizer: str = option(
        "sgd", "Optimizer.", choices=("sgd", "lars", "adam", "adamw", "rmsprop"), commands=PLAN
    )
    optimizer_params: Dict[str, Any] = option(
        {"momentum": 0}, "The optimizer's parameters, e.g. '{\"momentum\": 0.9}'.", commands=PLAN
    )
    learning_rate: Optional[float] = option(
        None,
        "Learning rate, absolute; excludes initial_learning_rate, which is per sample of the global batch.",
        aliases=("lr",),
        above=0,
        maximum=bounds.MAX_FLOAT32,
        default_text="lr-schedule-params' initial_learning_rate x global batch",
    )
    lr_schedule: str = option(
        "const",
        "Learning rate schedule.",
        choices=("const", "cosine", "stepped", "polynomial", "exponential"),
        commands=TRAIN,
    )
    lr_schedule_params: Dict[str, Any] = option(
        {"initial_learning_rate": 0.0001},
        "The schedule's parameters, e.g. '{\"initial_learning_rate\": 0.0001}' (per sample).",
        commands=TRAIN,
    )
    lr_warmup_params: Optional[Dict[str, Any]] = option(
        None,
        'Warm-up, e.g. \'{"warmup_mode": "shift", "warmup_epochs": 5}\'; modes shift and mask.',
        commands=TRAIN,
        default_text="no warm-up",
    )
    lr_staircase: bool = option(False, "Keep the learning rate constant within an epoch.", commands=TRAIN)
    weight_decay: float = option(0.0, "The optimizer's weight decay.", minimum=0, maximum=bounds.MAX_DECAY)
    l2_regularization: float = option(
        0.0,
        "L2 penalty: l2 x weight is added to each gradient (the reported loss leaves it out).",
        minimum=0,
        maximum=bounds.MAX_DECAY,
    )
    loss_scaling: float = option(
        0.0, "Static loss scale for 16-bit training; 0 is none.", minimum=0, maximum=bounds.MAX_LOSS_SCALING
    )
    label_smoothing: Optional[float] = option(
        None, "Label smoothing factor.", minimum=0, below=1, default_text="none"
    )
    precision: str = option(
        "32.32",
        "Bits of compute and of weights: 16.16, 16.32 or 32.32.",
        choices=("16.16", "16.32", "32.32"),
        commands=(*PLAN, "evaluate", "infer"),
    )
    loss: str = option(
        "auto",
        "Loss; auto is cross-entropy, with Dice for U-Net.",
        choices=("auto", "cross_entropy", "bce_dice"),
    )


@dataclasses.dataclass(frozen=True)
class Batching:
    """What makes up a weight update, an execution and an epoch."""

    PANEL: ClassVar[str] = "Batching"

    micro_batch_size: int = option(
        1,
        "Samples one replica processes in one forward pass.",
        minimum=1,
        maximum=bounds.MAX_MICRO_BATCH,
        commands=PLAN,
    )
    gradient_accumulation_count: Optional[int] = option(
        None,
        "Micro-batches per replica per weight update; excludes global-batch-size.",
        aliases=("gradient-accumulation",),
        minimum=1,
        maximum=bounds.MAX_ACCUMULATION,
        commands=PLAN,
        default_text="1, or from global-batch-size",
    )
    global_batch_size: Optional[int] = option(
        None,
        "Samples per weight update, in place of gradient-accumulation-count.",
        minimum=1,
        maximum=bounds.MAX_COUNT,
        commands=PLAN,
        default_text="micro-batch x accumulation x replicas",
    )
    gradient_accumulation_reduction_method: str = option(
        "mean", "How the gradients of a weight update are combined.", choices=("sum", "mean", "running_mean")
    )
    num_replicas: int = option(
        1,
        "Data-parallel copies of the model.",
        aliases=("replicas",),
        minimum=1,
        maximum=bounds.MAX_IPUS,
        commands=PLAN,
    )
    dbn_replica_group_size: int = option(
        1,
        "Replicas that share batch norm statistics (distributed batch norm); 1 is off.",
        minimum=1,
        maximum=bounds.MAX_IPUS,
    )
    weight_updates_per_epoch: Optional[int] = option(
        None,
        "Weight updates in an epoch; -1 or none: data set size / global batch.",
        parse=values.parse_updates,
        minimum=-1,
        maximum=bounds.MAX_COUNT,
        commands=TRAIN,
        default_text="data set size / global batch",
    )
    logs_per_epoch: float = option(
        1.0,
        "Logs per epoch, a number or a fraction such as 1/3; 0 is one log in all.",
        parse=values.parse_fraction,
        minimum=0,
        maximum=bounds.MAX_COUNT,
        metavar="N|A/B",
        commands=TRAIN,
    )
    steps_per_execution: Optional[int] = option(
        None,
        "Micro-batches per replica in one execution, in place of logs-per-epoch.",
        minimum=1,
        maximum=bounds.MAX_COUNT,
        default_text="from logs-per-epoch",
    )
