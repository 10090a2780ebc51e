"""Options of a run that concern its data, model, evaluation and files; declared as ``options`` describes."""

# ruff: noqa: RUF009 - option() returns a dataclasses.field with a default_factory for mutable defaults
import dataclasses
from typing import Any, ClassVar, Dict, Optional, Tuple

from ipucnn.config import bounds, values
from ipucnn.config.spec import DATA, DEVICE, NETWORK, PLAN, RUN, TRAIN, option


@dataclasses.dataclass(frozen=True)
class General:
    """What to run, where, and where to put it."""

    PANEL: ClassVar[str] = "General"

    model_name: str = option(
        "toy_model",
        "Network: a name of `ipucnn models`, FILE.py:FUNCTION or FILE.keras of your own; also the argument MODEL.",
        aliases=("model",),
        metavar="NAME",
        commands=NETWORK,
    )
    dataset: Optional[str] = option(
        None,
        "Data set: digits, membranes, isbi2012, mnist, fashion_mnist, cifar10, cifar100, imagenet (or gc-imagenet), "
        "tfds:NAME, imagefolder, imagemasks, random, an image folder, or FILE.py:FUNCTION of your own.",
        parse=values.parse_dataset,
        metavar="NAME",
        commands=(*DATA, "plan-splits"),
        default_text="the model's own if in --dataset-path, else an embedded one; for verify-dataset what is there",
        wishes="data dataset-name my-images",
    )
    dataset_path: str = option(
        ".",
        "Folder the data set's files lie in.",
        metavar="DIR",
        commands=(*DATA, "doctor"),
        wishes="data-dir data-path data-root root",
    )
    download: bool = option(
        False, "Download the data set if it is not there; nothing is downloaded otherwise.", commands=DATA
    )
    seed: Optional[int] = option(
        None,
        "Seed of weights, data order, augmentation and dropout; drawn and recorded if not given.",
        minimum=0,
        maximum=bounds.MAX_COUNT,
        commands=(*RUN, "plan-splits"),
        default_text="drawn and recorded",
        wishes="random-seed random-state",
    )
    device: str = option(
        "auto",
        "Where to run: auto takes IPUs, then GPUs, then the CPU.",
        choices=("auto", "ipu", "gpu", "cpu"),
        commands=(*DEVICE, "doctor"),
        wishes="gpu gpus cuda",
    )
    run_dir: Optional[str] = option(
        None,
        "Run folder to create.",
        metavar="DIR",
        default_text="runs/MODEL-DATASET[-N]",
        wishes="output output-dir save-dir log-dir logdir outdir experiment tensorboard",
    )
    overwrite: bool = option(False, "Replace an existing run folder.", in_yaml=False, wishes="force")
    dry_run: bool = option(
        False,
        "Check all but the file of --weights, print what the run would do, and end: nothing is trained, "
        "and there is no run folder.",
        in_yaml=False,
        commands=TRAIN,
    )
    plot_schedule: Optional[str] = option(
        None,
        "With --dry-run, a picture (.png or .svg) of the learning rate over weight updates and epochs.",
        metavar="FILE",
        in_yaml=False,
        commands=TRAIN,
        default_text="none",
    )
    resume: bool = option(
        False,
        "Continue the run in --run-dir (else the latest of this model and data set) from its newest good "
        "checkpoint, to the same bytes as if it had never stopped; begin it where there is none.",
        in_yaml=False,
        commands=TRAIN,
        wishes="continue restart",
    )


@dataclasses.dataclass(frozen=True)
class Data:
    """The samples and how they are delivered."""

    PANEL: ClassVar[str] = "Data"

    image_size: Optional[Tuple[int, int]] = option(
        None,
        "Size of the network's input, 224 or 388x512 (height x width).",
        metavar="SIZE",
        parse=values.parse_image_size,
        to_yaml=values.image_size_to_yaml,
        commands=(*NETWORK, "verify-dataset"),
        default_text="the data set's, at least the model's smallest",
        wishes="img-size input-size resolution resize",
    )
    augment: bool = option(
        False,
        "Augment the training images, each data set in its own way.",
        wishes="data-augmentation flip aa auto-augment",
    )
    normalise: str = option(
        "network",
        "How pixels are brought to the network's range: network (as it was published), or image (each image minus its "
        "mean, over its deviation).",
        choices=("network", "image"),
        wishes="normalize mean std",
    )
    limit_train: Optional[str] = option(
        None,
        "Use this many training samples (500), or this share (10%).",
        metavar="N|P%",
        parse=values.parse_limit,
        commands=(*RUN, "infer", "verify-dataset"),
        default_text="all",
        wishes="subset num-samples max-samples",
    )
    limit_eval: Optional[str] = option(
        None,
        "Use this many evaluation samples (500), or this share (10%).",
        metavar="N|P%",
        parse=values.parse_limit,
        commands=("train", "evaluate", "infer", "verify-dataset"),
        default_text="all",
    )
    validation_fraction: float = option(
        0.2,
        "Of a folder of class folders without train/ and val/: the share of each class that is held out for "
        "evaluation, the same images in every run.",
        above=0,
        below=1,
        commands=("train", "evaluate", "infer", "verify-dataset"),
    )
    allow_partial: bool = option(
        False,
        "Verifying: what is missing of the data set (a subset, a file, samples) is a warning, not an error.",
        in_yaml=False,
        commands=("verify-dataset",),
    )
    shuffle: bool = option(True, "Shuffle the training samples in every epoch.")
    deterministic: bool = option(
        False, "Train on the samples in their stored order in every epoch: turns shuffle off."
    )
    pad_dataset: bool = option(
        False,
        "Fill the last weight update of an epoch up with samples of weight 0 instead of discarding what is left.",
        commands=TRAIN,
    )
    host_generated_data: bool = option(
        False, "Random data generated on the host instead of a data set.", commands=(*RUN, "evaluate")
    )
    synthetic_data: Optional[str] = option(
        None,
        "Noise instead of the data set's images, of its size and classes where they are known: host makes it and sends "
        "it to the device, ipu keeps one batch on the device and sends nothing.",
        choices=("host", "ipu"),
        commands=(*RUN, "evaluate"),
        default_text="the data set's images",
    )
    device_generated_data: bool = option(
        False,
        "One constant batch kept in memory instead of data from the input pipeline.",
        in_yaml=False,
        commands=("benchmark",),
    )
    pipeline_num_parallel: int = option(
        48,
        "Images the input pipeline processes in parallel on the host.",
        minimum=1,
        maximum=bounds.MAX_WORKERS,
        commands=(*RUN, "evaluate", "infer"),
        wishes="num-workers workers loaders",
    )
    max_image_pixels: int = option(
        100_000_000,
        "Pixels that an image, or a page of a volume, may have at most; larger ones are refused.",
        minimum=1,
        maximum=2**31 - 1,
        commands=DATA,
    )
    eight_bit_transfer: bool = option(
        False,
        "Send images to the device in 8 bits; it then normalises them: accelerator-side-preprocess.",
        commands=PLAN,
    )
    accelerator_side_preprocess: bool = option(
        False, "Normalise and cast images on the device instead of in the input pipeline."
    )


@dataclasses.dataclass(frozen=True)
class Model:
    """The network and its starting weights."""

    PANEL: ClassVar[str] = "Model"

    weights: Optional[str] = option(
        None,
        "Weights to start from: a checkpoint, a run folder, or imagenet.",
        metavar="PATH|imagenet",
        commands=TRAIN,
        default_text="random from the seed",
        wishes="pretrained finetune fine-tune transfer initial-checkpoint",
    )
    freeze: Optional[str] = option(
        None,
        "Layers that keep the weights they start from: the first N that have weights, or those whose names match "
        "patterns such as conv1,block1*; backbone is all but the last. See docs/fine-tuning.md.",
        metavar="N|PATTERN|backbone",
        parse=values.parse_freeze,
        commands=(*TRAIN, "plan-splits"),
        default_text="all are trained",
        wishes="frozen freeze-layers trainable freeze-backbone linear-probe",
    )
    norm_layer: Dict[str, Any] = option(
        {"name": "batch_norm"},
        "Normalisation: batch_norm, custom_batch_norm, group_norm or none, or a dictionary with name, "
        "momentum, epsilon, num_groups, channels_per_group.",
        metavar="NAME|DICT",
        parse=values.parse_norm_layer,
        commands=NETWORK,
        wishes="batchnorm bn norm group-norm normalization sync-bn",
    )
    bn_momentum: float = option(
        0.97,
        "Momentum of batch norm's moving statistics, unless norm-layer gives one.",
        minimum=0,
        below=1,
        commands=TRAIN,
    )
    precise_batch_norm: int = option(
        0,
        "Validate and save with batch norm's statistics measured over training images in batches of so many: 1024 "
        "images, or one batch, or all there are; the same ones each time, not augmented, without dropout. Training "
        "itself, and a run that is resumed, keep to running statistics, as IPUs do. 0 is off.",
        minimum=0,
        maximum=bounds.MAX_MICRO_BATCH,
        commands=TRAIN,
    )
    dropout: Optional[float] = option(
        None,
        "Dropout rate in place of the network's own.",
        minimum=0,
        below=1,
        default_text="the network's own",
        wishes="drop-rate",
    )
    base_filters: Optional[int] = option(
        None,
        "Filters of the U-Net's first block.",
        minimum=1,
        maximum=bounds.MAX_BASE_FILTERS,
        commands=NETWORK,
        default_text="the network's own",
        wishes="width channels num-filters",
    )


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Validation, checkpoints and trackers."""

    PANEL: ClassVar[str] = "Evaluation and checkpoints"

    validation: bool = option(True, "Validate during training.", commands=TRAIN)
    validation_micro_batch_size: Optional[int] = option(
        None,
        "Micro-batch size of validation.",
        minimum=1,
        maximum=bounds.MAX_MICRO_BATCH,
        commands=("train", "evaluate"),
        default_text="micro-batch-size",
    )
    validation_num_replicas: Optional[int] = option(
        None,
        "Replicas of validation.",
        minimum=1,
        maximum=bounds.MAX_IPUS,
        commands=("train", "evaluate"),
        default_text="as many as the training's IPUs hold",
    )
    validation_freq: int = option(
        1,
        "Validate every so many epochs.",
        aliases=("eval-freq",),
        minimum=1,
        maximum=bounds.MAX_EPOCHS,
        commands=TRAIN,
        wishes="eval-every val-freq validate-every eval-interval val-interval",
    )
    kfold: Optional[int] = option(
        None,
        "Cross-validation: train as many networks as there are folds, each evaluated on the fold it has not seen.",
        minimum=2,
        maximum=bounds.MAX_COUNT,
        commands=TRAIN,
        default_text="the data set's own evaluation part",
        wishes="cross-validation cv folds",
    )
    fold: Optional[int] = option(
        None,
        "The one fold to train, from 1.",
        minimum=1,
        maximum=bounds.MAX_COUNT,
        commands=TRAIN,
        default_text="all of them",
    )
    pipeline_validation_model: bool = option(
        False, "Pipeline the validation model too.", commands=("train", "evaluate"), host_effect=False
    )
    checkpoints: bool = option(True, "Save checkpoints.", commands=TRAIN)
    checkpoint_dir: Optional[str] = option(
        None,
        "Folder to write the checkpoints to.",
        aliases=("checkpoint-output-dir",),
        metavar="DIR",
        commands=TRAIN,
        default_text="in the run folder",
    )
    checkpoint_input_dir: Optional[str] = option(
        None,
        "Folder of checkpoints to continue from (the newest good one, with optimizer and position); with "
        "--no-training each of them is validated.",
        metavar="DIR",
        commands=TRAIN,
        default_text="none",
    )
    ckpts_per_epoch: Optional[float] = option(
        None,
        "Checkpoints per epoch, a number or a fraction such as 1/5; more than logs-per-epoch makes executions shorter.",
        parse=values.parse_fraction,
        minimum=0,
        maximum=bounds.MAX_COUNT,
        metavar="N|A/B",
        commands=TRAIN,
        default_text="1, or one per execution where that is longer than an epoch",
        wishes="checkpoint checkpoint-every checkpoint-freq save-every save-freq save-interval",
    )
    first_ckpt_epoch: float = option(
        0.0,
        "Epoch of the first checkpoint.",
        parse=values.parse_fraction,
        minimum=0,
        maximum=bounds.MAX_EPOCHS,
        metavar="N|A/B",
        commands=TRAIN,
    )
    keep_checkpoints: Optional[int] = option(
        2,
        "Numbered checkpoints to keep, the newest ones; older ones of this run are deleted, the last and the best one "
        "never. Where --ckpts-per-epoch or --config-path is given and this is not, all are kept.",
        parse=values.parse_kept,
        minimum=1,
        maximum=bounds.MAX_COUNT,
        metavar="N|all",
        commands=TRAIN,
        wishes="save-total-limit max-to-keep checkpoint-hist keep-last",
    )
    clean_dir: bool = option(False, "Delete the checkpoints after the final validation.", commands=TRAIN)
    ckpt_all_instances: bool = option(
        False,
        "Under poprun every instance saves checkpoints, those after the first below --checkpoint-dir in instance-1, "
        "instance-2, ...; else the first one saves for all.",
        commands=TRAIN,
        host_effect=False,
    )
    target_accuracy: Optional[float] = option(
        None,
        "Accuracy (for masks: Dice) from 0 to 1: training ends at the first validation that reaches it, and the "
        "report says how long that took.",
        above=0,
        maximum=1,
        commands=TRAIN,
        default_text="none",
        wishes="stop-at time-to-train",
    )
    early_stopping: Optional[int] = option(
        None,
        "Training ends when so many validations in a row are no better than the best one before them.",
        minimum=1,
        maximum=bounds.MAX_COUNT,
        commands=TRAIN,
        default_text="none",
        wishes="earlystop patience",
    )
    mlperf_logging: bool = option(
        False,
        "Write the lines that MLPerf's rules for training ask for (:::MLLOG) to mlperf.log in the run folder.",
        commands=TRAIN,
    )
    sweep: bool = option(
        False,
        "Accepted for files of the public application, with a warning.",
        commands=TRAIN,
        warning="sweep changes nothing: what a sweep compares is in every report.json and metrics.jsonl",
    )
    wandb: bool = option(
        False,
        "Log to Weights & Biases too (needs: pip install 'ipucnn[wandb]'; without a network set WANDB_MODE=offline).",
        commands=TRAIN,
        wishes="log-wandb weights-and-biases tracker",
    )
    wandb_run_name: Optional[str] = option(
        None,
        "Name of the run at Weights & Biases.",
        metavar="NAME",
        commands=TRAIN,
        default_text="the run folder's name",
    )
    wandb_tags: Tuple[str, ...] = option(
        (),
        "Tags of the run at Weights & Biases.",
        metavar="TAG...",
        commands=TRAIN,
    )


# Options of a run that concern the arithmetic of training; declared as ``options`` describes.


# ruff: noqa: RUF009 - option() returns a dataclasses.field with a default_factory for mutable defaults


@dataclasses.dataclass(frozen=True)
class Training:
    """Optimizer, schedule, loss and precision."""

    PANEL: ClassVar[str] = "Training"

    training: bool = option(True, "Train; False only validates.", commands=TRAIN)
    num_epochs: int = option(
        1,
        "Epochs to train for.",
        aliases=("epochs",),
        minimum=1,
        maximum=bounds.MAX_EPOCHS,
        commands=TRAIN,
        wishes="max-epochs n-epochs",
    )
    optimizer: str = option(
        "sgd",
        "Optimizer.",
        choices=("sgd", "lars", "adam", "adamw", "rmsprop"),
        commands=PLAN,
        wishes="opt adam sgd adamw rmsprop lars",
    )
    optimizer_params: Dict[str, Any] = option(
        {"momentum": 0},
        "The optimizer's parameters, e.g. '{\"momentum\": 0.9}'.",
        commands=PLAN,
        wishes="momentum beta1 beta2 betas eps opt-eps nesterov",
    )
    learning_rate: Optional[float] = option(
        None,
        "Learning rate, absolute; excludes initial_learning_rate, which is per sample of the global batch.",
        aliases=("lr",),
        above=0,
        maximum=bounds.MAX_FLOAT32,
        default_text="lr-schedule-params' initial_learning_rate x global batch",
        wishes="base-lr initial-lr",
    )
    lr_schedule: str = option(
        "const",
        "Learning rate schedule.",
        choices=("const", "cosine", "stepped", "polynomial", "exponential"),
        commands=TRAIN,
        wishes="scheduler sched lr-scheduler lr-policy",
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
        wishes="warmup warmup-epochs warm-up warmup-lr",
    )
    lr_staircase: bool = option(False, "Keep the learning rate constant within an epoch.", commands=TRAIN)
    weight_decay: float = option(
        0.0, "The optimizer's weight decay.", minimum=0, maximum=bounds.MAX_DECAY, wishes="wd regularization"
    )
    l2_regularization: float = option(
        0.0,
        "L2 penalty: l2 x weight is added to each gradient (the reported loss leaves it out).",
        minimum=0,
        maximum=bounds.MAX_DECAY,
        wishes="l2 reg regularization",
    )
    clip_gradient_norm: Optional[float] = option(
        None,
        "Largest norm that all gradients of a weight update have together; what is longer is shortened to it.",
        above=0,
        maximum=bounds.MAX_FLOAT32,
        default_text="none",
        wishes="clip-grad grad-clip gradient-clipping clipnorm max-grad-norm",
    )
    ema_decay: Optional[float] = option(
        None,
        "Averages all weights over training, with this decay per weight update (0.999 averages over about 1000); "
        "validation and checkpoints have the averages, and training goes on from the weights themselves.",
        above=0,
        below=1,
        commands=TRAIN,
        default_text="none",
        wishes="ema model-ema moving-average swa",
    )
    loss_scaling: float = option(
        0.0,
        "Static loss scale for 16-bit training; 0 is none.",
        minimum=0,
        maximum=bounds.MAX_LOSS_SCALING,
        wishes="grad-scaler",
    )
    auto_loss_scaling: bool = option(
        False,
        "Loss scale that is doubled every 8 weight updates, or halved where 16-bit gradients come close to overflow; "
        "for plain SGD.",
    )
    label_smoothing: Optional[float] = option(
        None, "Label smoothing factor.", minimum=0, below=1, default_text="none", wishes="smoothing"
    )
    mixup: Optional[float] = option(
        None,
        "Mixup: each training image is summed with another of its micro-batch, the labels likewise; the share is drawn "
        "from Beta(N, N), e.g. 0.2.",
        minimum=bounds.LEAST_BETA,
        maximum=bounds.MAX_BETA,
        metavar="N",
        commands=TRAIN,
        default_text="none",
    )
    cutmix: Optional[float] = option(
        None,
        "CutMix: a rectangle of each training image is taken from another of its micro-batch, and the labels are mixed "
        "by area, drawn from Beta(N, N), e.g. 1; with --mixup, each micro-batch gets one of the two.",
        minimum=bounds.LEAST_BETA,
        maximum=bounds.MAX_BETA,
        metavar="N",
        commands=TRAIN,
        default_text="none",
    )
    random_erasing: float = option(
        0.0,
        "Probability that a rectangle of a training image, 2 to 33 % of it, gets the data set's mean colour.",
        minimum=0,
        maximum=1,
        commands=TRAIN,
        wishes="reprob erasing cutout",
    )
    precision: str = option(
        "32.32",
        "Bits of compute and of weights: 16.16, 16.32 or 32.32.",
        choices=("16.16", "16.32", "32.32"),
        commands=(*PLAN, "evaluate", "infer"),
        wishes="fp16 half amp mixed-precision bf16 dtype float16",
    )
    stochastic_rounding: str = option(
        "OFF",
        "Stochastic rounding of 16-bit values: ON, OFF, or RI (only where all replicas compute the same).",
        parse=values.parse_rounding,
        metavar="ON|OFF|RI",
    )
    fp_exceptions: bool = option(
        False,
        "Stop at floating-point exceptions: invalid operations, division by zero, overflow.",
    )
    nanoo: bool = option(False, "A 16-bit overflow gives NaN; without it, it gives the largest number.")
    loss: str = option(
        "auto",
        "Loss; auto is cross-entropy, with Dice for U-Net.",
        choices=("auto", "cross_entropy", "bce_dice"),
        wishes="criterion loss-function",
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
        wishes="batch-size batch bs mini-batch",
    )
    gradient_accumulation_count: Optional[int] = option(
        None,
        "Micro-batches per replica per weight update; excludes global-batch-size.",
        aliases=("gradient-accumulation",),
        minimum=1,
        maximum=bounds.MAX_ACCUMULATION,
        commands=PLAN,
        default_text="1, or from global-batch-size",
        wishes="accum-iter grad-accum accumulate grad-accum-steps",
    )
    global_batch_size: Optional[int] = option(
        None,
        "Samples per weight update, in place of gradient-accumulation-count.",
        minimum=1,
        maximum=bounds.MAX_COUNT,
        commands=PLAN,
        default_text="micro-batch x accumulation x replicas",
        wishes="batch-size total-batch effective-batch",
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
        wishes="data-parallel num-gpus copies",
    )
    dbn_replica_group_size: int = option(
        1,
        "Replicas that share batch norm statistics (distributed batch norm); 1 is off.",
        minimum=1,
        maximum=bounds.MAX_IPUS,
        commands=PLAN,
        wishes="sync-bn distributed-batch-norm",
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
        wishes="log-interval log-every logging",
    )
    steps_per_execution: Optional[int] = option(
        None,
        "Micro-batches per replica in one execution, in place of logs-per-epoch; plan-splits: of inference.",
        minimum=1,
        maximum=bounds.MAX_COUNT,
        commands=PLAN,
        default_text="from logs-per-epoch",
    )
