"""Holds all that is decided about a training run before TensorFlow is imported, as one immutable value."""

from dataclasses import dataclass, replace
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from ipucnn.config.options import SPECS, RunConfig
from ipucnn.config.origin import OWN_NETWORK
from ipucnn.config.resolve import OWN_GLOBAL_BATCH, Resolved
from ipucnn.config.values import norm_of
from ipucnn.datasets.base import DatasetInfo, fingerprint
from ipucnn.datasets.classes import in_order_of
from ipucnn.datasets.formats import LAYOUTS, lifted, subfolders
from ipucnn.datasets.images import changes_of_training, conversions
from ipucnn.datasets.registry import DATASETS
from ipucnn.errors import DataError
from ipucnn.models.own import OwnNetwork
from ipucnn.planning.network import network_options
from ipucnn.planning.splits import check_frozen, check_named_splits, plan_differences
from ipucnn.runs import rules
from ipucnn.runs import setup as run_setup
from ipucnn.runs.images.outputs import PLOTS
from ipucnn.runs.input_size import size_warnings
from ipucnn.runs.overwriting import check_outputs
from ipucnn.runs.resume import Continue, Finished, Fresh, Start, check_same_run, find_start
from ipucnn.runs.setup import Setup, range_name
from ipucnn.runs.sources import Weights, as_started, find_starting_weights
from ipucnn.runs.trackers import import_wandb
from ipucnn.runs.weight_files import check_frozen_weights
from ipucnn.runs.writer import RunWriter
from ipucnn.sessions.evaluated import Statistics, statistics_policy, why_statistics_are_lost
from ipucnn.sessions.group import ProcessGroup, find_group
from ipucnn.sessions.host.division import fixed_fused
from ipucnn.sessions.role import find_role
from ipucnn.text import counted, printable, quoted, shown_value
from ipucnn.training.checkpoints import Checkpoint
from ipucnn.training.optimizer_settings import OptimizerSettings, settings_of_run
from ipucnn.training.program import Program, make_layout, make_program
from ipucnn.training.schedules import Schedule


@dataclass(frozen=True)
class RunContext(Setup):
    """Configuration, data, Program and folder of a training run.

    The session adds the range of images, and makes a new context with ``replace``.  The configuration has the run's
    seed filled in.

    Attributes:
        start: the point where the run begins.
        group: the processes that train together, including this one.
        folder: the writer of the run folder for this process.
        program: the arithmetic of the run.
        fused_micro_batches: the number that an option or the checkpoint fixes; None: the session chooses it.
        optimizer: the checked settings of the optimizer.
        schedule: a function from weight updates (int array) to learning rates.
        data_sha256: ``fingerprint`` of the data set.
        weights: the opened weights of ``--weights``; None without them, and for a run that has begun.
        notes: notes on what images lose, and on options that are those of the run that the weights come from.
        warnings: warnings for the user before the run begins, one line each.
    """

    start: Start
    group: ProcessGroup
    folder: RunWriter
    program: Program
    fused_micro_batches: Optional[int]
    optimizer: OptimizerSettings
    schedule: Schedule
    data_sha256: str
    weights: Optional[Weights]
    notes: Tuple[str, ...] = ()
    warnings: Tuple[str, ...] = ()

    @property
    def info(self) -> DatasetInfo:
        """The facts of the data set."""
        return self.source.info

    @property
    def checkpoint(self) -> Optional[Checkpoint]:
        """The checkpoint that the run continues from; None for a new run, and for a finished one."""
        return self.start.checkpoint if isinstance(self.start, Continue) else None

    @property
    def weight_updates_done(self) -> int:
        """The number of weight updates of the checkpoint that the run continues from."""
        return self.start.weight_updates if isinstance(self.start, Continue) else 0

    @property
    def saved_program(self) -> Optional[Dict[str, Any]]:
        """The Program of the checkpoint that the run continues from; None for a new run."""
        return self.start.program if isinstance(self.start, Continue) else None

    def saved_config(self, num_devices: int = 1) -> RunConfig:
        """Returns the configuration that repeats this run.

        Args:
            num_devices: the number of this process's devices that share the training.
        """
        config, sharing = self.config, self.config.max_workers
        if self.checkpoint is None:
            # A run that is killed before its first checkpoint begins again with the same fused micro-batches.
            sharing = max(sharing, self.group.num_workers * num_devices)
        return replace(
            config,
            max_workers=sharing,
            run_dir=self.folder.path,
            checkpoint_dir=self.folder.checkpoints if config.checkpoint_dir else None,
            # A later --resume continues from the run's own checkpoints.
            checkpoint_input_dir=None,
            overwrite=False,
            resume=False,
        )


def make_context(resolved: Resolved) -> RunContext:
    """Makes the context of a run from its configuration, with every check that needs no TensorFlow.

    Raises:
        UserError: the configuration, the data or the run folder is wrong.
    """
    group = find_group()
    start = find_start(resolved, find_role(), locks=not resolved.config.dry_run)
    with start.target.folder.unlocked_after_error():
        return _context_of(start, group)


def _context_of(start: Start, group: ProcessGroup) -> RunContext:
    """Makes the context of a run that begins at ``start``; raises as :func:`make_context` does."""
    from ipucnn.sessions.factory import check_device, device_warnings, runs_on_ipus
    from ipucnn.sessions.poplar.checks import check_program

    resolved = start.resolved
    layout = make_layout(resolved.config, resolved.origins["num_replicas"].is_typed)
    config = resolved.config
    if group.size > 1:
        rules.check_group(group, config)
    check_device(config.device)
    rules.check_run_rules(rules.RunFacts(resolved, layout, group))
    _check_pictures(resolved)
    weights, kept = None, []  # type: Optional[Weights], List[str]
    if isinstance(start, Fresh) and config.weights is not None:
        weights = find_starting_weights(resolved)
        resolved, kept = weights.options_kept(resolved)
        config = resolved.config
    elif isinstance(start, Fresh) and config.training:
        check_frozen_weights(resolved.record)
    if config.wandb and start.target.folder.writes:
        import_wandb()
    check_named_splits(resolved, layout)
    check_frozen(resolved)
    seed = run_setup.draw_seed() if config.seed is None else config.seed
    config = replace(config, seed=seed)
    setup = run_setup.prepare(replace(resolved, config=config), seed)
    if weights is not None:
        setup = setup.with_source(weights.as_started(setup.source))
    elif config.weights is not None and isinstance(start, Finished):
        setup = setup.with_source(in_order_of(setup.source, tuple(start.report.dataset.class_names)))
    elif config.weights is not None and isinstance(start, Continue):
        setup = setup.with_source(as_started(setup.source, start.facts))
    _check_classes(setup)
    num_train, num_classes = setup.source.info.num_train, setup.source.info.num_classes
    # Refuses options that the network does not support.
    network_options(resolved.record, config, setup.input_shape, num_classes)
    if resolved.origins["micro_batch_size"] == OWN_NETWORK:
        size = min(OWN_GLOBAL_BATCH // layout.num_replicas, num_train // layout.num_micro_batches)
        config = replace(config, micro_batch_size=max(1, size))
        setup = replace(setup, resolved=replace(setup.resolved, config=config))
        rules.check_run_rules(rules.RunFacts(setup.resolved, make_layout(config), group))
    num_instances = group.size if group.under_poprun else 1
    program = make_program(config, num_train, seed=setup.seed, num_instances=num_instances)
    if runs_on_ipus(config.device):
        check_program(program, config, group)
    saved_fused, data_sha256 = None, fingerprint(setup.source)
    if isinstance(start, Continue):
        check_same_run(start, config, program, setup.source.info, data_sha256)
        saved_fused = start.fused_micro_batches
    fused = fixed_fused(config, program, saved_fused)
    if max(group.size, config.devices or 1, config.max_workers) > 1:
        rules.check_workers(group, config, program, fused)
    context = RunContext(
        **vars(setup),
        start=start,
        group=group,
        folder=start.target.folder,
        program=program,
        fused_micro_batches=fused,
        optimizer=settings_of_run(config, program.global_batch_size),
        schedule=run_setup.learning_rates(config, program),
        data_sha256=data_sha256,
        weights=weights,
        notes=(
            *conversions(setup.source.info, setup.input_shape, config.augment and config.training),
            *_augmentation_notes(setup),
            *kept,
        ),
    )
    warnings = [*device_warnings(config.device), *_warnings(context, runs_on_ipus(config.device))]
    return replace(context, warnings=tuple(warnings))


def _augmentation_notes(setup: Setup) -> List[str]:
    """Returns a note if a preset augments the images of a set that it does not know, whose classes may not bear it."""
    config, info = setup.config, setup.source.info
    is_unknown = setup.resolved.choice.make is not None or info.name in LAYOUTS or info.name not in DATASETS
    is_taken = config.training and config.augment and not setup.resolved.origins["augment"].by_user
    changes = changes_of_training(info) if is_taken and is_unknown else ""
    # The augmentation of the other sets was chosen for them.
    return (
        [f"training images are {changes} (--augment, from the preset); --no-augment leaves them as they are"]
        if changes
        else []
    )


def _only_class(setup: Setup) -> str:
    """Returns the class of all labels that are trained on; "" if there are several, none, or they are not known."""
    labels = setup.source.train.labels
    if not setup.config.training or setup.resolved.choice.is_absent or len(labels) < 2:
        return ""
    # A few samples at a time: a copy of all masks may take much memory.
    kept = (part[part >= 0] for part in (labels[k : k + 64] for k in range(0, len(labels), 64)))
    found = {int(value) for part in kept if part.size for value in (part.min(), part.max())}
    return printable(setup.source.info.class_names[found.pop()]) if len(found) == 1 else ""


def _check_classes(setup: Setup) -> None:
    """Refuses a data set of one class, or whose training labels are one, which every network tells at once."""
    info, found = setup.source.info, setup.resolved.choice.found
    if info.num_classes > 1:
        name = _only_class(setup)
        # A limit may leave one class of several, and so may a fold, which is warned of.
        if name and setup.config.limit_train is None and setup.config.fold is None:
            raise DataError(
                f"all training labels of {info.name} are {name}: there is nothing to learn",
                f"give {'masks' if info.task == 'segmentation' else 'images'} of two or more classes",
            )
        return
    hint = "give images of two or more classes"
    folders = [path for (part, *_) in found.parts.values() for path in subfolders(part)] if found else []
    if folders and all(map(subfolders, folders)):
        hint = lifted(folders)
    name = printable(info.class_names[0])
    raise DataError(f"data set {info.name} has one class, {name}: there is nothing to learn", hint)


def _check_pictures(resolved: Resolved) -> None:
    """Refuses pictures that cannot be written, and samples of absent files."""
    pictures = (
        ("--plot-schedule", resolved.config.plot_schedule, PLOTS),
        ("--draw-samples", resolved.config.draw_samples, (".png",)),
    )
    check_outputs([(name, path, endings) for name, path, endings in pictures if path is not None], [])
    if resolved.config.draw_samples is not None and resolved.choice.is_absent:
        raise DataError(
            f"--draw-samples: the files of {resolved.choice.name} are not here",
            "add --dataset-path DIR",
        )


def _rate_change(context: RunContext) -> List[str]:
    """Returns a warning if a continued run has another schedule than before, because it has more or fewer epochs.

    A rate that had decayed to the end of the run then rises again (a warm restart).
    """
    start, program = context.start, context.program
    if not isinstance(start, Continue):
        return []
    done = start.weight_updates
    saved = RunConfig.from_yaml(start.checkpoint.meta["config"], str(start.path))
    former = run_setup.learning_rates(saved, replace(program, num_epochs=saved.num_epochs))
    updates = np.array([max(0, done - 1), done])
    (last, expected), following = former(updates), context.schedule(updates)[1]
    if done >= program.num_weight_updates or np.isclose(expected, following, rtol=1e-3, atol=0):
        return []
    weights = f"--weights {quoted(start.target.folder.path)}"
    return [
        f"the learning rate was {last:.3g} and goes on with {following:.3g}, because the schedule is now one of "
        f"{counted(program.num_epochs, 'epoch')} (it was {saved.num_epochs:,}); a new run keeps the rate with: "
        f"{weights} --lr-schedule const --lr-schedule-params '{{}}' --learning-rate {last:.3g}"
    ]


def _warnings(context: RunContext, on_ipus: bool) -> List[str]:
    config, program, info = context.config, context.program, context.info
    lines: List[str] = []
    if context.checkpoint is None:  # a continued run has its data, and the size of its input
        lines += [*info.warnings, *info.training_warnings, *size_warnings(context, context.weights)]
    only = _only_class(context)
    if only and context.checkpoint is None:
        lines.append(f"all training labels are {only}: there is nothing to learn")
    lines += program.warnings
    lines += [spec.warning for spec in SPECS if spec.warning and getattr(config, spec.name) != spec.default]
    if context.resolved.plan is not None:
        lines += plan_differences(context.resolved, program, context.input_shape, info.num_classes)
    if program.samples_discarded_per_epoch:
        which = "a different subset each time" if config.shuffle else "always the same"
        lines.append(
            f"{program.samples_discarded_per_epoch:,} of {info.num_train:,} training samples are discarded in each "
            f"epoch ({which}): {counted(program.weight_updates_per_epoch, 'weight update')} x "
            f"{counted(program.global_batch_size, 'sample')}; --pad-dataset uses all of them"
        )
    warmup = (config.lr_warmup_params or {}).get("warmup_epochs", 0)
    if warmup > program.num_epochs:
        lines.append(
            f"the warm-up of {warmup:g} epochs is longer than the run, {counted(program.num_epochs, 'epoch')}: the "
            "learning rate never reaches its full value"
        )
    if config.early_stopping is not None and program.executions_per_validation:
        validations = -(-program.num_executions // program.executions_per_validation)
        if config.early_stopping > validations - 2:
            lines.append(
                f"--early-stopping {config.early_stopping:,} cannot end this run early: it has "
                f"{counted(validations, 'validation')}"
            )
    if program.samples_padded_per_epoch:
        lines.append(
            f"{program.samples_padded_per_epoch:,} samples of weight 0 fill up the last weight update of each epoch; "
            "batch norm's statistics include them"
        )
    lines += _rate_change(context)
    if on_ipus and program.num_replicas > 1:
        from ipucnn.sessions.poplar.checks import why_of_last_replica

        why = why_of_last_replica(program, config)
        lines += [f"loss and accuracy of training are those of the last replica: {why}"] if why else []
    if context.record.own is None:
        lines += statistics_warnings(context)
    return lines


def norms_of(own: OwnNetwork) -> List[str]:
    """Returns the kinds of an own network's stock normalisation layers; none before its function has been called."""
    known = own.architecture or own.trained_as
    nodes = [] if known is None else known.nodes
    return sorted({node.stock for node in nodes if node.stock.endswith("Normalization")})


def _moving_norms(own: OwnNetwork) -> List[Dict[str, Any]]:
    """Returns the settings of the batch norms whose moving statistics training moves."""
    known = own.architecture or own.trained_as
    return [
        node.config
        for node in ([] if known is None else known.nodes)
        if node.stock == "BatchNormalization" and node.config.get("trainable", True) and not node.infers
    ]


def notes_on_own(context: RunContext) -> List[str]:
    """Returns notes on a user's own network, which has to be built before; none for a registered one."""
    own = context.record.own
    if own is None:
        return []
    return [
        *own.notes,
        *_range_notes(context, own),
        *_frozen_notes(context, own),
        *_momentum_notes(context, own),
    ]


def _range_notes(context: RunContext, own: OwnNetwork) -> List[str]:
    """Returns a note on the range of the images if neither the network, its first weights nor the user says it."""
    is_known = own.first_rescaling is not None or context.resolved.origins["normalise"].by_user
    if is_known or context.weights is not None:
        return []
    name = range_name(context.config.normalise, context.record)
    return [
        f"{shown_value(own.name)}: no layer of Keras scales its images, so they come in the range {name}"
        + (" (minus the mean, over the standard deviation)" if name == "standard" else "")
        + "; --normalise raw gives pixels of 0..255, unit 0..1"
    ]


def _frozen_notes(context: RunContext, own: OwnNetwork) -> List[str]:
    """Returns a note on the layers that the network itself freezes, and whether anybody trained their weights."""
    frozen = own.frozen_layers
    if not frozen:
        return []
    named = ", ".join(map(shown_value, frozen[:3])) + (", ..." if len(frozen) > 3 else "")
    layers = f"{len(frozen)} of {counted(own.num_weighted, 'layer')} with weights"
    verb = "is" if len(frozen) == 1 else "are"
    if context.weights is not None or context.checkpoint is not None:
        return [
            f"{shown_value(own.name)}: {layers} {verb} frozen (trainable=False), and not trained ({named})"
        ]
    return [
        f"{shown_value(own.name)}: {layers} {verb} frozen with the random weights that the seed gives "
        f"({named}); --weights begins with trained ones"
    ]


def _momentum_notes(context: RunContext, own: OwnNetwork) -> List[str]:
    """Returns a note if the batch norms of a user's own network have another momentum than the run's."""
    config, origins = context.config, context.resolved.origins
    used = float(config.norm_layer.get("momentum", config.bn_momentum))
    momenta = [norm.get("momentum", used) for norm in _moving_norms(own)]
    others = sorted({momentum for momentum in momenta if momentum != used})
    is_chosen = origins["bn_momentum"].by_user or origins["norm_layer"].by_user
    if not others or is_chosen or norm_of(config.norm_layer) != "batch":
        return []
    keeps = f"which --bn-momentum {others[0]:g} keeps"
    if len(set(momenta)) > 1:
        keeps = "and --bn-momentum gives all layers one"
    own_ones = ", ".join(f"{momentum:g}" for momentum in others)
    return [f"batch norm has the momentum {used:g}, not the network's own {own_ones}, {keeps}"]


def statistics_warnings(context: RunContext) -> List[str]:
    """Returns a warning if batch norm's statistics are recomputed; a user's own network has to be built before."""
    config, program, own = context.config, context.program, context.record.own
    lacks_norm = own is not None and not _moving_norms(own)
    if lacks_norm or statistics_policy(config, program) is not Statistics.RECOMPUTED:
        return []
    return [
        "batch norm: its moving statistics are recomputed over training batches before each validation and checkpoint, "
        f"because IPUs {why_statistics_are_lost(program)}"
    ]
