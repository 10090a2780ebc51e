"""The options that several commands share: those of runs, and those of commands on trained weights or on data.

``options.py`` joins those of runs to ``RunConfig``.  A command's other options are in its own module in ``commands``.
"""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar, Dict, Mapping, Optional, Tuple

from ipucnn.config import bounds, values
from ipucnn.config.bounds import Range
from ipucnn.config.parameters import names_of
from ipucnn.config.spec import (
    DIRECTORY,
    FRACTION,
    LIMIT,
    POPLAR_OPTIONS,
    SAVED_FILE,
    WEIGHTS,
    Effect,
    ValueKind,
    argument,
    int_or,
    option,
    word,
)

GENERAL = "General"
TRAIN = ("train",)
RUN = ("train", "benchmark")
PLAN = ("train", "benchmark", "plan-splits")
NETWORK = (*PLAN, "evaluate", "infer", "export")
DATA = ("train", "evaluate", "infer", "export", "benchmark", "verify-dataset")
DEVICE = ("train", "evaluate", "infer", "export", "benchmark")
"""The commands that take an option of runs; ``RUN`` those of most."""
_OF_RUN: Dict[str, Any] = {"commands": RUN}
_OF_SESSION = {"keras_effect": False}


# --- options of commands


@dataclasses.dataclass(frozen=True)
class CommandOptions:
    """The options of every command."""

    PANEL: ClassVar[str] = ""
    EACH: ClassVar[Dict[str, Any]] = {"optional": False, "off": (), "in_yaml": False}

    json: bool = option(False, "Print the result as JSON.", panel=GENERAL)
    verbose: bool = option(False, "Say more on stderr.", panel=GENERAL)

    def values(self) -> Dict[str, Any]:
        """Returns the value of each option, and the text of each option of runs that was given."""
        own = dict(vars(self))
        flags = own.pop("flags", {})
        return {**own, **flags}


@dataclasses.dataclass(frozen=True)
class RunOptions(CommandOptions):
    """The options of a command that takes options of runs.

    Attributes:
        flags: field name -> text of the options of runs that were given.
    """

    FROM_RUN: ClassVar[bool] = False
    """Whether the defaults of the options of runs are those of a saved run."""

    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class NetworkOptions(RunOptions):
    """The options of a command that takes MODEL and presets."""

    model: Optional[str] = argument(
        "MODEL", "Network, see `ipucnn models`.  [default: the preset's, else toy_model]", default=None
    )
    config: Optional[str] = word(
        "NAME",
        "Preset to start from; flags override it.",
        default_text="the model's own",
        panel=GENERAL,
    )
    config_path: Optional[Path] = option(
        None,
        "YAML file to take the preset from.",
        default_text="the built-in ones",
        panel=GENERAL,
        metavar="FILE",
    )
    print_config: bool = option(
        False, "Print every option's value and where it came from, and stop.", panel=GENERAL
    )


@dataclasses.dataclass(frozen=True)
class WeightsOptions(RunOptions):
    """Options of a command on trained weights: those of a run, or others."""

    FROM_RUN: ClassVar[bool] = True

    run: str = argument(
        "RUN",
        "A run folder, a checkpoint in one, or an exported network in its folder (.onnx, .tflite). Or weights that "
        "Keras saved (.weights.h5, .h5, .keras), with --model-name; or a network's name, with --weights.",
        required=True,
    )
    checkpoint: Optional[str] = word(
        "NAME",
        "Checkpoint of the run: best, last, or a file name in it. If RUN is a network's name: a run or a checkpoint.",
        default_text="last, else best",
    )
    weights: Optional[str] = option(
        None,
        "Weights for the network whose name is given as RUN: imagenet (those of Keras Applications, downloaded once), "
        "or a weight file of Keras.",
        metavar="imagenet|FILE",
        kind=WEIGHTS,
    )


@dataclasses.dataclass(frozen=True)
class PatchOptions(WeightsOptions):
    """Options of a command that predicts masks patch by patch."""

    patch_size: Optional[int] = option(
        None,
        "Segmentation: height and width of the patches that the network sees.",
        metavar="N",
        within=bounds.PATCH_SIDE,
        default_text="by the image's size",
    )
    test_time_augmentation: int = option(
        1,
        "Segmentation: average the probabilities over this many rotated and mirrored versions of each image.",
        metavar="1|2|4|8",
        within=bounds.TEST_TIME_AUGMENTATION,
        default_text="1",
    )


# --- options of runs: data, network, training, evaluation and files


@dataclasses.dataclass(frozen=True)
class GeneralOptions:
    """The network, data, device and folder of a run."""

    PANEL: ClassVar[str] = "General"
    EACH: ClassVar[Dict[str, Any]] = _OF_RUN

    model_name: str = option(
        "toy_model",
        "Network: a name that `ipucnn models` lists, or a file of your own, FILE.py:FUNCTION, FILE.keras or FILE.h5; "
        "the same as the argument MODEL.",
        aliases=("model",),
        metavar="NAME",
        commands=NETWORK,
        effect=Effect.RESULT,
    )
    dataset: Optional[str] = option(
        None,
        "Data set: digits, membranes, isbi2012, mnist, fashion_mnist, cifar10, cifar100, imagenet (or gc-imagenet), "
        "tfds:NAME, imagefolder, imagemasks, random, an image folder, or FILE.py:FUNCTION of your own.",
        kind=ValueKind(values.parse_dataset, "NAME"),
        commands=(*DATA, "plan-splits", "models"),
        default_text="the model's own if its files are in --dataset-path, else an embedded one; for verify-dataset "
        "the one that is there, for models the model's own",
        synonyms="data dataset-name my-images",
        effect=Effect.RESULT,
    )
    dataset_path: Path = option(
        Path("."),
        "Folder with the data set's files.",
        kind=DIRECTORY,
        commands=(*DATA, "doctor", "models"),
        synonyms="data-dir dataset-dir data-path data-root data-folder root",
        effect=Effect.FILES,
    )
    download: bool = option(
        False,
        "Download the data set if it is not there; nothing is downloaded otherwise.",
        commands=DATA,
        effect=Effect.FILES,
    )
    seed: Optional[int] = option(
        None,
        "Seed of the initial weights, the order of the data, augmentation and dropout.",
        within=Range(0, bounds.MAX_COUNT),
        commands=(*RUN, "plan-splits"),
        default_text="drawn at random, and recorded",
        synonyms="random-seed random-state",
        effect=Effect.RESULT,
    )
    device: str = option(
        "auto",
        "Where to run: auto takes IPUs, then GPUs, then the CPU.",
        choices=("auto", "ipu", "gpu", "cpu"),
        commands=(*DEVICE, "doctor"),
        synonyms="gpu gpus cuda laptop rehearse rehearsal simulate emulate",
        effect=Effect.DELIVERY,
    )
    run_dir: Optional[Path] = option(
        None,
        "Run folder to create.",
        kind=DIRECTORY,
        default_text="runs/MODEL-DATASET[-N]",
        synonyms="output output-dir save-dir log-dir logdir outdir name run-name exp-name experiment tensorboard",
        effect=Effect.FILES,
    )
    overwrite: bool = option(
        False, "Replace an existing run folder.", in_yaml=False, synonyms="force", effect=Effect.FILES
    )
    dry_run: bool = option(
        False,
        "Check everything except the file of --weights, print what the run would do, and stop: nothing is trained, "
        "and no run folder is made. Without the files of ImageNet, CIFAR or MNIST it takes their published size.",
        in_yaml=False,
        commands=TRAIN,
        effect=Effect.FILES,
    )
    plot_schedule: Optional[Path] = option(
        None,
        "With --dry-run: draw the learning rate over weight updates and epochs into this picture (.png, .pdf, .svg).",
        in_yaml=False,
        commands=TRAIN,
        kind=SAVED_FILE,
        effect=Effect.FILES,
    )
    draw_samples: Optional[Path] = option(
        None,
        "With --dry-run: draw the first training samples into this picture (.png) as the network will see them: "
        "cropped or cut into patches, augmented and mixed, with their classes or masks.",
        in_yaml=False,
        commands=TRAIN,
        synonyms="augmentation augmented preview samples show images masks picture",
        kind=SAVED_FILE,
        effect=Effect.FILES,
    )
    resume: bool = option(
        False,
        "Continue the run in --run-dir, or else the latest run of this model and data set, from its newest undamaged "
        "checkpoint. Its files end up the same, byte for byte, as if it had never stopped. If there is no run yet, it "
        "begins.",
        in_yaml=False,
        commands=TRAIN,
        synonyms="continue restart load-checkpoint crash crashed interrupted",
        effect=Effect.FILES,
    )


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Which samples are used, and how they are loaded."""

    PANEL: ClassVar[str] = "Data"
    EACH: ClassVar[Dict[str, Any]] = _OF_RUN

    image_size: Optional[Tuple[int, int]] = option(
        None,
        "Size of the network's input, such as 224, or 388x512 (height x width).",
        commands=(*NETWORK, "verify-dataset", "models"),
        default_text="the data set's, at least the model's smallest; for models the model's own",
        synonyms="img-size input-size resolution resize",
        effect=Effect.RESULT,
    )
    augment: bool = option(
        False,
        "Augment the training images, each data set in its own way.",
        synonyms="data-augmentation augmentation flip crop random-crop hflip aa auto-augment transform transforms",
        updates_only=True,
        effect=Effect.RESULT,
    )
    normalise: str = option(
        "network",
        "The network's range of pixels: network (as published), standard (minus the data set's mean, over its "
        "deviation), unit (0 to 1), tf (-1 to 1), raw (0 to 255), torch (minus ImageNet's mean, over its deviation), "
        "caffe (blue, green, red, minus ImageNet's mean), or image (minus each image's mean, over its deviation).",
        choices=("network", "standard", "unit", "tf", "raw", "torch", "caffe", "image"),
        commands=(*RUN, "evaluate", "infer", "export"),
        synonyms="normalize mean std preprocess-input",
        effect=Effect.RESULT,
    )
    limit_train: Optional[str] = option(
        None,
        "Use only so many training samples (such as 500), or this share of them (such as 10%).",
        kind=LIMIT,
        commands=(*RUN, "infer", "verify-dataset"),
        default_text="all",
        synonyms="subset num-samples max-samples",
        effect=Effect.RESULT,
    )
    limit_eval: Optional[str] = option(
        None,
        "Use only so many evaluation samples (such as 500), or this share of them (such as 10%).",
        kind=LIMIT,
        commands=("train", "evaluate", "infer", "verify-dataset"),
        default_text="all",
        effect=Effect.RESULT,
    )
    validation_fraction: float = option(
        0.2,
        "For a folder of class folders without train/ and val/: the share of each class that is held out for "
        "evaluation. Every run holds out the same images.",
        within=Range(above=0, below=1),
        commands=("train", "evaluate", "infer", "verify-dataset"),
        effect=Effect.RESULT,
    )
    allow_partial: bool = option(
        False,
        "Treat missing parts of the data set as a warning, not as an error: images without one mask, and for "
        "verify-dataset also a subset, a file or samples.",
        commands=("train", "evaluate", "infer", "export", "verify-dataset"),
        effect=Effect.RESULT,
    )
    shuffle: bool = option(
        True,
        "Shuffle the training samples in every epoch.",
        synonyms="shuffle-buffer shuffle-buffer-size",
        updates_only=True,
        effect=Effect.RESULT,
    )
    deterministic: bool = option(
        False,
        "Train on the samples in their stored order in every epoch; this turns shuffle off.",
        updates_only=True,
        effect=Effect.RESULT,
    )
    pad_dataset: bool = option(
        False,
        "Fill up the last weight update of an epoch with samples of weight 0, instead of discarding the samples left "
        "over.",
        commands=TRAIN,
        keras_effect=False,
        updates_only=True,
        effect=Effect.RESULT,
    )
    host_generated_data: bool = option(
        False,
        "Use random data, generated on the host, instead of a data set.",
        commands=(*RUN, "evaluate"),
        effect=Effect.RESULT,
    )
    synthetic_data: Optional[str] = option(
        None,
        "Use noise instead of the data set's images, with the same size and classes where these are known. host: make "
        "it on the host and send it to the device; ipu: keep one batch on the device and send nothing.",
        choices=("host", "ipu"),
        kind=ValueKind(values.parse_noise, "host|ipu", "host"),
        commands=(*RUN, "evaluate"),
        default_text="the data set's images",
        effect=Effect.RESULT,
    )
    device_generated_data: bool = option(
        False,
        "Use one constant batch that is kept in memory, instead of data from the input pipeline.",
        in_yaml=False,
        commands=("benchmark",),
        effect=Effect.RESULT,
    )
    pipeline_num_parallel: int = option(
        48,
        "Images the input pipeline processes in parallel on the host.",
        within=Range(1, bounds.MAX_WORKERS),
        commands=(*RUN, "evaluate", "infer"),
        synonyms="num-workers workers loaders",
        effect=Effect.DELIVERY,
    )
    max_image_pixels: int = option(
        100_000_000,
        "Largest number of pixels of an image, or of a page of a volume; larger ones are refused.",
        within=bounds.PIXELS,
        commands=DATA,
        effect=Effect.DELIVERY,
    )
    skip_damaged: bool = option(
        False,
        "Leave out images of files and records, and pairs of images and masks, that cannot be decoded; they are "
        "counted and named. All images are decoded once before the run begins.",
        commands=(*RUN, "evaluate", "export"),
        synonyms="corrupt broken unreadable truncated images ignore",
        effect=Effect.RESULT,
    )
    eight_bit_transfer: bool = option(
        False,
        "Send images to the device in 8 bits, where they are then normalised; this turns accelerator-side-preprocess "
        "on.",
        commands=PLAN,
        plan_default="the preset's, else False; a search tries both",
        keras_effect=False,
        effect=Effect.RESULT,
    )
    accelerator_side_preprocess: bool = option(
        False,
        "Normalise and cast images on the device instead of in the input pipeline.",
        keras_effect=False,
        effect=Effect.RESULT,
    )


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """The network and its starting weights."""

    PANEL: ClassVar[str] = "Model"
    EACH: ClassVar[Dict[str, Any]] = _OF_RUN

    weights: Optional[str] = option(
        None,
        "Weights to start from: a checkpoint, a run folder, a weight file of Keras (.h5, .keras), or imagenet.",
        kind=WEIGHTS,
        commands=TRAIN,
        default_text="random from the seed",
        synonyms="load load-weights init-weights pretrained finetune fine-tune transfer initial-checkpoint",
        keras_effect=False,
        effect=Effect.RESULT,
    )
    freeze: Optional[str] = option(
        None,
        "Layers that keep the weights they start with: the first N layers that have weights, or those whose names "
        "match patterns such as conv1,block1*, or backbone, which is every layer but the last one. See "
        "docs/fine-tuning.md.",
        kind=ValueKind(values.parse_freeze, "N|PATTERN|backbone", "backbone"),
        commands=(*TRAIN, "plan-splits"),
        default_text="none, all layers are trained",
        synonyms="frozen freeze-layers trainable freeze-backbone linear-probe",
        keras_effect=False,
        effect=Effect.RESULT,
    )
    norm_layer: Dict[str, Any] = option(
        {"name": "batch_norm"},
        "Normalisation: batch_norm, custom_batch_norm, group_norm or none; or a dictionary with any of the keys name, "
        "momentum, epsilon, num_groups and channels_per_group. `--help group_norm` describes those of group_norm.",
        kind=ValueKind(values.parse_norm_layer, "NAME|DICT", "batch_norm"),
        commands=NETWORK,
        synonyms="batchnorm bn norm group-norm normalization sync-bn",
        effect=Effect.RESULT,
    )
    bn_momentum: float = option(
        0.97,
        "Momentum of the moving statistics of batch norm, if --norm-layer does not give one.",
        within=Range(minimum=0, below=1),
        commands=TRAIN,
        effect=Effect.RESULT,
    )
    precise_batch_norm: int = option(
        0,
        "Before each validation and checkpoint, measure the statistics of batch norm over batches of this many "
        "training images (1,024 images in all, or one batch if that is more, or all images if there are fewer; always "
        "the same ones, without augmentation and dropout). Training itself goes on with running statistics, as on "
        "IPUs. 0 turns it off.",
        within=Range(0, bounds.MAX_MICRO_BATCH),
        commands=TRAIN,
        keras_effect=False,
        effect=Effect.RESULT,
    )
    dropout: Optional[float] = option(
        None,
        "Dropout rate, instead of the network's own.",
        within=Range(minimum=0, below=1),
        default_text="the network's own",
        synonyms="drop-rate",
        effect=Effect.RESULT,
    )
    base_filters: Optional[int] = option(
        None,
        "Filters of the U-Net's first block.",
        within=Range(1, bounds.MAX_BASE_FILTERS),
        commands=NETWORK,
        default_text="the network's own",
        synonyms="width channels num-filters",
        effect=Effect.RESULT,
    )


@dataclasses.dataclass(frozen=True)
class EvaluationOptions:
    """Validation, checkpoints and trackers."""

    PANEL: ClassVar[str] = "Evaluation and checkpoints"
    EACH: ClassVar[Dict[str, Any]] = {"commands": TRAIN, **_OF_SESSION}

    validation: bool = option(
        True,
        "Validate during training.",
        synonyms="test test-set do-eval",
        keras_effect=True,
        effect=Effect.RESULT,
    )
    validation_micro_batch_size: Optional[int] = option(
        None,
        "Micro-batch size of validation.",
        within=Range(1, bounds.MAX_MICRO_BATCH),
        commands=("train", "evaluate"),
        default_text="micro-batch-size",
        effect=Effect.RESULT,
    )
    validation_num_replicas: Optional[int] = option(
        None,
        "Replicas of validation.",
        within=Range(1, bounds.MAX_IPUS),
        commands=("train", "evaluate"),
        default_text="as many as the training's IPUs hold",
        effect=Effect.RESULT,
    )
    validation_freq: int = option(
        1,
        "Epochs from one validation to the next.",
        aliases=("eval-freq",),
        within=Range(1, bounds.MAX_EPOCHS),
        synonyms="eval-every val-freq validate-every eval-interval val-interval",
        effect=Effect.RESULT,
    )
    kfold: Optional[int] = option(
        None,
        "Cross-validation with this many folds: one network is trained for each fold, and evaluated on that fold, "
        "which it has not seen. 1 is one run on the data set's own split.",
        within=Range(2, bounds.MAX_COUNT),
        kind=ValueKind(values.parse_folds, "INT", is_number=True),
        default_text="none, the data set's evaluation part is used",
        synonyms="cross-validation cv folds",
        effect=Effect.RESULT,
    )
    fold: Optional[int] = option(
        None,
        "With --kfold: train only this fold; the first one is 1.",
        within=Range(1, bounds.MAX_COUNT),
        default_text="all of them",
        effect=Effect.RESULT,
    )
    pipeline_validation_model: bool = option(
        False,
        "Pipeline the network in validation, too.",
        commands=("train", "evaluate"),
        host_effect=False,
        effect=Effect.RESULT,
    )
    checkpoints: bool = option(
        True,
        "Save checkpoints.",
        keras_effect=True,
        effect=Effect.RESULT,
    )
    checkpoint_dir: Optional[Path] = option(
        None,
        "Folder to write the checkpoints to.",
        aliases=("checkpoint-output-dir",),
        kind=DIRECTORY,
        default_text="in the run folder",
        effect=Effect.FILES,
    )
    checkpoint_input_dir: Optional[Path] = option(
        None,
        "Folder of checkpoints. Training continues from the newest undamaged one, with its optimizer state and "
        "position in the data; with --no-training each of them is validated, and so are weight files of Keras (.h5).",
        kind=DIRECTORY,
        effect=Effect.FILES,
    )
    ckpts_per_epoch: Optional[float] = option(
        None,
        "Checkpoints per epoch, a number or a fraction such as 1/5. If there are more than --logs-per-epoch, "
        "executions become shorter.",
        kind=FRACTION,
        within=Range(0, bounds.MAX_COUNT),
        default_text="1, or one per execution where that is longer than an epoch",
        synonyms="checkpoint checkpoint-every checkpoint-freq save-every save-freq save-interval",
        effect=Effect.RESULT,
    )
    first_ckpt_epoch: float = option(
        0.0,
        "Epoch of the first checkpoint.",
        kind=FRACTION,
        within=Range(0, bounds.MAX_EPOCHS),
        effect=Effect.RESULT,
    )
    keep_checkpoints: Optional[int] = option(
        2,
        "How many numbered checkpoints to keep: older ones of this run are deleted. The last and the best checkpoint "
        "always stay. With --ckpts-per-epoch or --config-path, and without this option, all are kept.",
        kind=int_or("all", None),
        within=Range(1, bounds.MAX_COUNT),
        metavar="N|all",
        synonyms="save-best save-best-only save-top-k save-total-limit max-to-keep checkpoint-hist keep-last",
        effect=Effect.FILES,
    )
    clean_dir: bool = option(
        False,
        "Delete the checkpoints after the final validation.",
        effect=Effect.FILES,
    )
    ckpt_all_instances: bool = option(
        False,
        "Under poprun let every instance save checkpoints: the first one in --checkpoint-dir, the others in its "
        "folders instance-1, instance-2, ... Otherwise only the first instance saves.",
        host_effect=False,
        effect=Effect.FILES,
    )
    target_accuracy: Optional[float] = option(
        None,
        "Stop at the first validation that reaches this accuracy (for masks: this Dice score), from 0 to 1. The "
        "report says how long that took.",
        kind=ValueKind(values.parse_proportion, "FLOAT", is_number=True),
        within=Range(maximum=1, above=0),
        synonyms="stop-at time-to-train",
        effect=Effect.END,
    )
    early_stopping: Optional[int] = option(
        None,
        "Stop after this many validations in a row that are no better than the best one before them.",
        within=Range(1, bounds.MAX_COUNT),
        synonyms="earlystop patience",
        effect=Effect.END,
    )
    mlperf_logging: bool = option(
        False,
        "Write mlperf.log into the run folder, with the lines (:::MLLOG) that the training rules of MLPerf ask for.",
        effect=Effect.FILES,
    )
    sweep: bool = option(
        False,
        "Has no effect; accepted, with a warning, because files of Graphcore's public application have it.",
        warning="sweep changes nothing: what a sweep compares is in every report.json and metrics.jsonl",
        effect=Effect.DELIVERY,
    )
    wandb: bool = option(
        False,
        "Log to Weights & Biases, too. It needs pip install 'ipucnn[wandb]'; without internet access set "
        "WANDB_MODE=offline.",
        synonyms="log-wandb weights-and-biases tracker",
        effect=Effect.DELIVERY,
    )
    wandb_run_name: Optional[str] = option(
        None,
        "Name of the run in Weights & Biases.",
        metavar="NAME",
        default_text="the run folder's name",
        synonyms="wandb-params",
        effect=Effect.DELIVERY,
    )
    wandb_tags: Tuple[str, ...] = option(
        (),
        "Tags of the run in Weights & Biases.",
        metavar="TAG...",
        effect=Effect.DELIVERY,
    )


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """Optimizer, schedule, loss and precision."""

    PANEL: ClassVar[str] = "Training"
    EACH: ClassVar[Dict[str, Any]] = {**_OF_RUN, "updates_only": True}

    training: bool = option(
        True,
        "Train; with --no-training the run only validates.",
        commands=TRAIN,
        updates_only=False,
        effect=Effect.RESULT,
    )
    num_epochs: int = option(
        1,
        "Epochs to train for.",
        aliases=("epochs",),
        within=Range(1, bounds.MAX_EPOCHS),
        commands=TRAIN,
        synonyms="max-epochs n-epochs",
        updates_only=False,
        effect=Effect.END,
    )
    optimizer: str = option(
        "sgd",
        "Optimizer.",
        choices=names_of("optimizer_params"),
        commands=PLAN,
        synonyms="opt adam sgd adamw rmsprop lars",
        effect=Effect.RESULT,
    )
    optimizer_params: Dict[str, Any] = option(
        {"momentum": 0},
        "The optimizer's parameters, e.g. '{\"momentum\": 0.9}'. `--help adam` describes those of adam.",
        commands=PLAN,
        synonyms="momentum beta1 beta2 betas eps opt-eps nesterov",
        effect=Effect.RESULT,
    )
    learning_rate: Optional[float] = option(
        None,
        "Learning rate of a weight update. It takes the place of initial_learning_rate in --lr-schedule-params, which "
        "is a rate per sample: it is multiplied by the global batch size.",
        aliases=("lr",),
        within=Range(maximum=bounds.MAX_FLOAT32, above=0),
        default_text="initial_learning_rate of --lr-schedule-params x global batch",
        synonyms="base-lr initial-lr",
        effect=Effect.RESULT,
    )
    lr_schedule: str = option(
        "const",
        "Learning rate schedule.",
        choices=names_of("lr_schedule_params"),
        commands=TRAIN,
        synonyms="scheduler sched lr-scheduler lr-policy lr-decay decay-rate anneal",
        effect=Effect.RESULT,
    )
    lr_schedule_params: Dict[str, Any] = option(
        {"initial_learning_rate": 0.0001},
        "The schedule's parameters, e.g. '{\"initial_learning_rate\": 0.0001}' (per sample). `--help cosine` "
        "describes those of cosine.",
        commands=TRAIN,
        effect=Effect.RESULT,
    )
    lr_warmup_params: Optional[Dict[str, Any]] = option(
        None,
        'Warm-up of the rate, e.g. \'{"warmup_mode": "shift", "warmup_epochs": 5}\'. The mode is shift or mask; '
        "`--help shift` describes it.",
        commands=TRAIN,
        default_text="no warm-up",
        synonyms="warmup warmup-epochs warm-up warmup-lr",
        effect=Effect.RESULT,
    )
    lr_staircase: bool = option(
        False, "Keep the learning rate constant within an epoch.", commands=TRAIN, effect=Effect.RESULT
    )
    weight_decay: float = option(
        0.0,
        "The optimizer's weight decay.",
        within=Range(0, bounds.MAX_DECAY),
        synonyms="wd regularization",
        effect=Effect.RESULT,
    )
    l2_regularization: float = option(
        0.0,
        "L2 penalty: this number times the weight is added to each gradient. The reported loss does not include it.",
        within=Range(0, bounds.MAX_DECAY),
        synonyms="l2 reg regularization",
        effect=Effect.RESULT,
    )
    decay_biases_and_norms: bool = option(
        True,
        "Whether weight decay and the L2 penalty act on biases, norms and other weights of one dimension. LARS's own "
        "weight decay never does.",
        synonyms="filter-bias-and-bn bias-decay no-weight-decay exclude-from-weight-decay wd",
        effect=Effect.RESULT,
    )
    clip_gradient_norm: Optional[float] = option(
        None,
        "Largest norm of all gradients of a weight update together; longer ones are scaled down to it.",
        within=Range(maximum=bounds.MAX_FLOAT32, above=0),
        synonyms="clip-grad grad-clip gradient-clipping clipnorm max-grad-norm",
        effect=Effect.RESULT,
    )
    ema_decay: Optional[float] = option(
        None,
        "Keep an average of all weights over training, with this decay per weight update (0.999 averages over about "
        "1,000 of them). Validation and checkpoints take the averages; training itself goes on with the weights.",
        within=Range(above=0, below=1),
        commands=TRAIN,
        synonyms="ema model-ema moving-average swa",
        keras_effect=False,
        effect=Effect.RESULT,
    )
    loss_scaling: float = option(
        0.0,
        "Constant loss scale for training in 16 bits; 0 turns it off.",
        within=Range(0, bounds.MAX_LOSS_SCALING),
        synonyms="grad-scaler",
        keras_effect=False,
        effect=Effect.RESULT,
    )
    auto_loss_scaling: bool = option(
        False,
        "Adapt the loss scale: every 8 weight updates it is doubled, or halved if 16-bit gradients come close to "
        "overflowing. For plain SGD.",
        keras_effect=False,
        effect=Effect.RESULT,
    )
    label_smoothing: Optional[float] = option(
        None,
        "Label smoothing factor.",
        within=Range(minimum=0, below=1),
        synonyms="smoothing",
        updates_only=False,
        effect=Effect.RESULT,
    )
    class_weights: Optional[str] = option(
        None,
        "balanced: multiply the loss of each training sample by the number of training samples, divided by the number "
        "of classes and by the samples of its class, so that rare classes count as much as common ones. The reported "
        "loss of training has these weights, that of validation has not. For a mixed image, the weights of its classes "
        "are averaged by share.",
        choices=("balanced",),
        commands=TRAIN,
        default_text="every sample counts the same",
        synonyms="class-weight weighted-loss imbalance imbalanced unbalanced oversampling weighted-sampler pos-weight",
        keras_effect=False,
        effect=Effect.RESULT,
    )
    mixup: Optional[float] = option(
        None,
        "Mixup: blend each training image, and its label, with another one of its micro-batch. The share of each is "
        "drawn from Beta(N, N), e.g. 0.2.",
        within=Range(bounds.LEAST_BETA, bounds.MAX_BETA),
        metavar="N",
        commands=TRAIN,
        effect=Effect.RESULT,
    )
    cutmix: Optional[float] = option(
        None,
        "CutMix: replace a rectangle of each training image by that of another one of its micro-batch, and mix the "
        "labels by area. The area is drawn from Beta(N, N), e.g. 1, and what lies beyond the border is cut off. With "
        "--mixup, each micro-batch gets one of the two.",
        within=Range(bounds.LEAST_BETA, bounds.MAX_BETA),
        metavar="N",
        commands=TRAIN,
        effect=Effect.RESULT,
    )
    random_erasing: float = option(
        0.0,
        "Probability that a rectangle of a training image, 2 to 33 % of its area, is filled with the data set's mean "
        "colour.",
        within=Range(0, 1),
        commands=TRAIN,
        synonyms="reprob erasing cutout",
        effect=Effect.RESULT,
    )
    precision: str = option(
        "32.32",
        "Bits of the arithmetic and of the weights: 16.16, 16.32 or 32.32.",
        choices=("16.16", "16.32", "32.32"),
        commands=(*PLAN, "evaluate", "infer"),
        plan_default="the preset's, else 16.16",
        synonyms="fp16 half amp mixed mixed-precision bf16 dtype float16",
        updates_only=False,
        effect=Effect.RESULT,
    )
    stochastic_rounding: str = option(
        "OFF",
        "Stochastic rounding of 16-bit values: ON, OFF, or RI, which rounds so only where all replicas compute the "
        "same.",
        kind=ValueKind(values.parse_rounding, "ON|OFF|RI", "ON"),
        keras_effect=False,
        updates_only=False,
        effect=Effect.RESULT,
    )
    fp_exceptions: bool = option(
        False,
        "Stop at a floating-point exception: an invalid operation, a division by zero, or an overflow.",
        keras_effect=False,
        updates_only=False,
        effect=Effect.RESULT,
    )
    nanoo: bool = option(
        False,
        "Let a 16-bit overflow give NaN. Without this option it gives the largest number.",
        keras_effect=False,
        updates_only=False,
        effect=Effect.RESULT,
    )
    loss: str = option(
        "auto",
        "Loss; auto is cross-entropy, and for the U-Net cross-entropy with Dice.",
        choices=("auto", "cross_entropy", "bce_dice"),
        synonyms="criterion loss-function",
        updates_only=False,
        effect=Effect.RESULT,
    )


@dataclasses.dataclass(frozen=True)
class BatchingOptions:
    """The sizes of a weight update, an execution and an epoch."""

    PANEL: ClassVar[str] = "Batching"
    EACH: ClassVar[Dict[str, Any]] = _OF_RUN

    micro_batch_size: int = option(
        1,
        "Samples that one replica processes in one forward pass.",
        within=Range(1, bounds.MAX_MICRO_BATCH),
        commands=PLAN,
        synonyms="batch-size batch bs mini-batch",
        plan_default="the preset's, else 1; a search tries others",
        effect=Effect.RESULT,
    )
    gradient_accumulation_count: Optional[int] = option(
        None,
        "Micro-batches of each replica in a weight update. Give either this or --global-batch-size.",
        aliases=("gradient-accumulation",),
        within=Range(1, bounds.MAX_ACCUMULATION),
        commands=PLAN,
        default_text="1, or from global-batch-size",
        synonyms="accum-iter grad-accum accumulate grad-accum-steps",
        plan_default="the preset's, else 16 for each stage, or from global-batch-size",
        effect=Effect.RESULT,
    )
    global_batch_size: Optional[int] = option(
        None,
        "Samples in a weight update. Give either this or --gradient-accumulation-count.",
        within=Range(1, bounds.MAX_COUNT),
        commands=PLAN,
        default_text="micro-batch size x accumulation count x replicas",
        synonyms="batch-size total-batch effective-batch",
        effect=Effect.RESULT,
    )
    gradient_accumulation_reduction_method: str = option(
        "mean",
        "How the gradients of a weight update are combined.",
        choices=("sum", "mean", "running_mean"),
        keras_effect=False,
        updates_only=True,
        effect=Effect.RESULT,
    )
    num_replicas: int = option(
        1,
        "Data-parallel copies of the model.",
        aliases=("replicas",),
        within=Range(1, bounds.MAX_IPUS),
        commands=PLAN,
        synonyms="data-parallel num-gpus copies",
        plan_default="the preset's, else 1; a search tries others",
        effect=Effect.RESULT,
    )
    dbn_replica_group_size: int = option(
        1,
        "Replicas that share the statistics of batch norm (distributed batch norm); 1 turns it off.",
        within=Range(1, bounds.MAX_IPUS),
        commands=PLAN,
        synonyms="sync-bn distributed-batch-norm",
        keras_effect=False,
        effect=Effect.RESULT,
    )
    weight_updates_per_epoch: Optional[int] = option(
        None,
        "Weight updates in an epoch; -1 or none stands for the data set's size / global batch.",
        kind=int_or("-1", -1),
        metavar="INT",
        within=Range(-1, bounds.MAX_COUNT),
        commands=TRAIN,
        default_text="the data set's size / global batch",
        effect=Effect.RESULT,
    )
    logs_per_epoch: float = option(
        1.0,
        "Log lines per epoch, a number or a fraction such as 1/3; 0 gives one line for the whole run.",
        kind=FRACTION,
        within=Range(0, bounds.MAX_COUNT),
        commands=TRAIN,
        synonyms="log-interval log-every logging",
        keras_effect=False,
        effect=Effect.RESULT,
    )
    steps_per_execution: Optional[int] = option(
        None,
        "Micro-batches of each replica in an execution. Give either this or --logs-per-epoch. For plan-splits, an "
        "execution of inference is meant.",
        within=Range(1, bounds.MAX_COUNT),
        commands=PLAN,
        default_text="from logs-per-epoch",
        keras_effect=False,
        effect=Effect.RESULT,
    )


# --- options of runs: pipelines and devices


@dataclasses.dataclass(frozen=True)
class PipelineOptions:
    """Splitting the model over the IPUs of a replica."""

    PANEL: ClassVar[str] = "Pipeline"
    EACH: ClassVar[Dict[str, Any]] = {**_OF_RUN, **_OF_SESSION}

    plan: Optional[Path] = option(
        None,
        "Take the options of pipeline, batch, precision, optimizer and devices from a plan that `ipucnn plan-splits "
        "--save` wrote. Other options override them.",
        in_yaml=False,
        kind=SAVED_FILE,
        effect=Effect.FILES,
    )
    pipeline_splits: Tuple[str, ...] = option(
        (),
        "Layers that begin the next pipeline stages, e.g. conv2_block1_out conv3_block1_out; or auto, which lets the "
        "planner choose. To plan with a --system-profile of your own, use plan-splits --save, and --plan here.",
        aliases=("splits",),
        metavar="LAYER...",
        commands=PLAN,
        synonyms="split",
        effect=Effect.RESULT,
    )
    device_mapping: Optional[Tuple[int, ...]] = option(
        None,
        "IPU of each stage within the replica, e.g. 0 1 1 0.",
        within=Range(0, bounds.MAX_IPUS - 1),
        commands=PLAN,
        default_text="stage N on IPU N",
        effect=Effect.RESULT,
    )
    pipeline_schedule: str = option(
        "Grouped",
        "Pipeline schedule.",
        aliases=("schedule",),
        choices=("Grouped", "Interleaved", "Sequential"),
        commands=PLAN,
        plan_default="the faster of Grouped and Interleaved; a search tries Sequential too",
        synonyms="gpipe 1f1b",
        effect=Effect.RESULT,
    )
    ipus_per_replica: Optional[int] = option(
        None,
        "IPUs of one replica; the network becomes a pipeline of as many stages.",
        aliases=("nb-ipus-per-replica",),
        within=Range(1, bounds.MAX_IPUS),
        commands=PLAN,
        default_text="as many as the stages need",
        synonyms="stages pipeline-stages num-ipus",
        effect=Effect.RESULT,
    )
    ipus: Optional[int] = option(
        None,
        "IPUs in all; they are filled with replicas.",
        within=Range(1, bounds.MAX_IPUS),
        commands=PLAN,
        default_text="replicas x IPUs per replica",
        synonyms="num-ipus world-size",
        plan_default="replicas x IPUs per replica; for a search all of the system",
        effect=Effect.RESULT,
    )
    recomputation: bool = option(
        False,
        "Recompute activations in the backward pass instead of keeping them. It needs a pipeline.",
        synonyms="grad-checkpointing activation-checkpointing remat",
        effect=Effect.RESULT,
    )
    available_memory_proportion: Tuple[float, ...] = option(
        (),
        "Percent of an IPU's memory that convolutions and matrix products may use: one value; or one for each stage; "
        "or two for each stage, for convolutions and for matrix products.",
        kind=ValueKind(values.parse_percent, "PERCENT...", is_list=True, is_number=True),
        within=Range(1, 100),
        commands=PLAN,
        host_effect=False,
        synonyms="memory-proportion",
        plan_default="the preset's, else the fastest of 60, 30 and 15",
        effect=Effect.RESULT,
    )


@dataclasses.dataclass(frozen=True)
class IpuOptions:
    """Options that only the Poplar session uses. The host records them without effect."""

    PANEL: ClassVar[str] = "IPU only"
    EACH: ClassVar[Dict[str, Any]] = {**_OF_RUN, **_OF_SESSION, "host_effect": False}

    on_demand: bool = option(
        True,
        "Attach to IPUs only when they are needed.",
        effect=Effect.DELIVERY,
    )
    select_ipu: Optional[int] = option(
        None,
        "Number of the device to use, as gc-info -l lists it.",
        within=Range(0, bounds.MAX_COUNT),
        commands=DEVICE,
        default_text="any free device with enough IPUs",
        effect=Effect.DELIVERY,
    )
    optimizer_state_offloading: bool = option(
        True,
        "Keep the optimizer state in remote memory.",
        commands=PLAN,
        synonyms="offload offloading zero",
        plan_default="the preset's, else True; a search tries both",
        effect=Effect.RESULT,
    )
    half_partials: bool = option(
        False,
        "Accumulate partial results of convolutions and matrix products in 16 bits.",
        commands=PLAN,
        synonyms="partials partials-type",
        plan_default="the preset's, else False; a search tries both",
        effect=Effect.RESULT,
    )
    internal_exchange_optimization_target: Optional[str] = option(
        None,
        "What Poplar optimises the exchange between tiles for.",
        choices=("cycles", "memory", "balanced"),
        default_text="Poplar's",
        effect=Effect.RESULT,
    )
    max_cross_replica_buffer_size: int = option(
        0,
        "Bytes that may wait before a sum over replicas is scheduled; with 0 it is scheduled at once.",
        within=Range(0, bounds.MAX_BYTES),
        effect=Effect.RESULT,
    )
    max_reduce_many_buffer_size: int = option(
        0,
        "Bytes that a cluster of reductions may reach before it is scheduled.",
        within=Range(0, bounds.MAX_BYTES),
        effect=Effect.RESULT,
    )
    gather_conv_output: bool = option(
        False,
        "Gather the outputs of convolutions, which saves small all-reduces.",
        effect=Effect.RESULT,
    )
    stable_norm: bool = option(
        False,
        "Use a normalisation that is numerically more stable and less parallel.",
        effect=Effect.RESULT,
    )
    conv_dithering: bool = option(
        False,
        "Let convolutions begin at different tiles.",
        effect=Effect.RESULT,
    )
    min_remote_tensor_size: int = option(
        128,
        "Smallest tensor, in bytes, that may be kept in remote memory.",
        within=Range(0, bounds.MAX_BYTES),
        effect=Effect.RESULT,
    )
    scheduling_algorithm: str = option(
        "CHOOSE_BEST",
        "Poplar's scheduling algorithm.",
        metavar="NAME",
        choices=("CHOOSE_BEST", "CLUSTERING", "POST_ORDER", "LOOK_AHEAD", "SHORTEST_PATH"),
        effect=Effect.RESULT,
    )
    fused_preprocessing: bool = option(
        False,
        "Preprocess on the IPU in one fused operation.",
        effect=Effect.RESULT,
    )
    accelerator_side_reduction: bool = option(
        False,
        "Reduce metrics over replicas on the IPU.",
        effect=Effect.RESULT,
    )
    compile_only: bool = option(
        False,
        "Compile for IPUs into --executable-cache, without attaching to any.",
        in_yaml=False,
        effect=Effect.FILES,
    )
    executable_cache: Optional[Path] = option(
        None,
        "Folder that keeps compiled programs for later runs.",
        kind=DIRECTORY,
        commands=DEVICE,
        default_text="the one that TF_POPLAR_FLAGS names, if any",
        synonyms="cache compile-cache",
        effect=Effect.FILES,
    )
    convolution_options: Dict[str, Any] = option(
        {},
        "Further Poplar options of convolutions, e.g. '{\"use128BitConvUnitLoad\": true}'.",
        kind=POPLAR_OPTIONS,
        effect=Effect.RESULT,
    )
    matmul_options: Dict[str, Any] = option(
        {},
        "Further Poplar options of matrix products, e.g. '{\"enableFastReduce\": true}'.",
        kind=POPLAR_OPTIONS,
        effect=Effect.RESULT,
    )
    recomputation_mode: str = option(
        "Auto",
        "How --recomputation recomputes; Auto chooses by the pipeline schedule.",
        choices=("Auto", "RecomputeThenBackpropagate", "RecomputeAndBackpropagateInterleaved"),
        effect=Effect.RESULT,
    )
    offload_activations: bool = option(
        False,
        "Keep the stashed activations of a pipeline in remote memory.",
        effect=Effect.RESULT,
    )
    offload_gradient_accumulation_buffers: bool = option(
        False,
        "Keep a pipeline's accumulated gradients in remote memory.",
        effect=Effect.RESULT,
    )
    replicated_optimizer_state_sharding: bool = option(
        False,
        "Divide the offloaded optimizer state among the replicas.",
        synonyms="zero sharding rts",
        effect=Effect.RESULT,
    )
    prefetch_depth: int = option(
        3,
        "Micro-batches that the host prepares in advance for each replica.",
        within=Range(1, 255),
        effect=Effect.DELIVERY,
    )
    deterministic_workers: str = option(
        "portable",
        "portable: random numbers on IPUs do not depend on how the work is spread over workers, so that the same seed "
        "gives the same numbers; false: they may.",
        choices=("portable", "false"),
        effect=Effect.RESULT,
    )
    dropout_layer: str = option(
        "poprand",
        "Dropout on IPUs: poprand uses the IPU's generator and keeps no mask for the backward pass; stateless makes "
        "the mask a function of seed and micro-batch alone, however many replicas there are. Neither gives the masks "
        "that the host draws, because IPUs have a generator of their own.",
        choices=("poprand", "stateless"),
        effect=Effect.RESULT,
    )


@dataclasses.dataclass(frozen=True)
class HostOptions:
    """Options that only the host session uses."""

    PANEL: ClassVar[str] = "Host session"
    EACH: ClassVar[Dict[str, Any]] = {**_OF_RUN, **_OF_SESSION, "ipu_effect": False}

    fused_micro_batches: Optional[int] = option(
        None,
        "Micro-batches that the host session computes as one batch.",
        within=Range(1, bounds.MAX_ACCUMULATION),
        default_text="chosen by memory and cache",
        effect=Effect.RESULT,
    )
    threads: Optional[int] = option(
        None,
        "Threads that share an operation. A CPU computes as many groups of fused micro-batches in parallel as it has "
        "cores for. The number of threads decides the order of sums: the same bytes come only from the same number. "
        "A run that is continued keeps its number.",
        within=Range(1, bounds.MAX_THREADS),
        commands=TRAIN,
        default_text="half of the cores where a weight update can be halved, otherwise all",
        effect=Effect.RESULT,
    )
    devices: Optional[int] = option(
        None,
        "How many GPUs of this machine share the work of each weight update, or all. With --device cpu the processor "
        "stands in for so many devices, so that you can try it: it gives the same bytes, and is no faster.",
        within=Range(values.ALL, bounds.MAX_DEVICES),
        kind=int_or("all", values.ALL),
        in_yaml=False,
        commands=TRAIN,
        default_text="as many GPUs as can share it evenly; 1 on a CPU",
        synonyms="gpus num-gpus multi-gpu",
        effect=Effect.DELIVERY,
    )
    deterministic_operations: bool = option(
        True,
        "Use only operations that give the same bytes each time. With --no-deterministic-operations GPUs are faster, "
        "but a run that is continued no longer equals one that never stopped.",
        commands=(*RUN, "evaluate", "infer"),
        synonyms="reproducible cudnn-deterministic",
        keras_effect=True,
        effect=Effect.RESULT,
    )


@dataclasses.dataclass(frozen=True)
class WorkerOptions:
    """Processes of MPI (workers) that train one network together; see docs/cluster.md."""

    PANEL: ClassVar[str] = "Workers"
    EACH: ClassVar[Dict[str, Any]] = {"commands": TRAIN, **_OF_SESSION, "ipu_effect": False}

    max_workers: int = option(
        1,
        "Compute so few micro-batches as one that this many workers, or any divisor of it, can share a weight update. "
        "A run that is continued keeps what it began with.",
        within=Range(1, bounds.MAX_RANKS),
        effect=Effect.START,
    )
    reduction: str = option(
        "ordered",
        "How workers add up gradients: ordered adds them group by group of fused micro-batches, and gives the same "
        "bytes as one worker; allreduce is MPI's, which sends less and is equal within rounding.",
        choices=("ordered", "allreduce"),
        effect=Effect.RESULT,
    )
    rank_timeout: float = option(
        600.0,
        "Seconds after which a worker that waits asks the others whether they are alive. A worker that does not answer "
        "ends the run, with exit code 7.",
        within=Range(1, bounds.MAX_SECONDS),
        in_yaml=False,
        effect=Effect.DELIVERY,
    )
    require_same_bytes: bool = option(
        False,
        "Refuse workers whose processor, versions or settings differ in a way that can change the last digits. "
        "Without this option they only cause a warning.",
        in_yaml=False,
        effect=Effect.DELIVERY,
    )
