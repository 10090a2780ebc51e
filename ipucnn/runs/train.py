"""One training run: from a resolved configuration to events, files in the run folder, and a report.

:class:`TrainingRun` builds, compiles and trains; the :class:`Recorder` handles each event of the session.
"""

from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, Union

import numpy as np

from ipucnn.aliases import KerasModel, TfDataset, TfVariable
from ipucnn.config.resolve import Resolved
from ipucnn.config.values import norm_of
from ipucnn.datasets.base import IN_MEMORY, fingerprint
from ipucnn.datasets.sources import in_memory
from ipucnn.errors import DataError, NoSpaceError
from ipucnn.events import Events, Note
from ipucnn.filesystem import free_bytes
from ipucnn.interrupts import InterruptGuard, check
from ipucnn.machine import fix_threads, fixed_threads, num_cores
from ipucnn.models.build import freeze_layers
from ipucnn.planning.network import network_options
from ipucnn.planning.search.neighbours import training_advice
from ipucnn.planning.splits import check_frozen, named_splits, splits_of_run
from ipucnn.runs import checkpoints
from ipucnn.runs import setup as run_setup
from ipucnn.runs.context import RunContext, make_context, norms_of, notes_on_own, statistics_warnings
from ipucnn.runs.folder import METRICS
from ipucnn.runs.recorder import Predicted, Recorder, Started, Timer
from ipucnn.runs.records import Compilation, CompiledReport, Report
from ipucnn.runs.resume import Continue, Finished, RunState, restore, resume_command
from ipucnn.runs.validated import list_validated
from ipucnn.runs.weight_files import file_with_weights
from ipucnn.sessions.group import Mpi
from ipucnn.sessions.host.agreement import agree, compared_options, require_same_weights
from ipucnn.sessions.host.division import Division, threads_of_training
from ipucnn.sessions.host.gpus import share_gpus
from ipucnn.sessions.session import (
    MakeDataset,
    Session,
    Trainer,
    TrainingTask,
    TrainState,
    ValidationDue,
    train,
)
from ipucnn.text import counted, printable, quoted, shown_value
from ipucnn.training.program import BuiltProgram, Layers, Program
from ipucnn.training.schedules import largest_rate


class TrainingRun:
    """Trains one network.  The constructor checks everything that needs no TensorFlow; :meth:`events` does the work.

    Args:
        resolved: the configuration.
        verbose: show TensorFlow's own messages.

    Attributes:
        context: network, data, Program and run folder.
        state: history and validations so far.
        fresh_weights: the number of weights that keep their initial values, in a new head, beside ``--weights``.
        final_report: the content of ``report.json``, or the result of ``--compile-only``; None before the run is over.

    Raises:
        UserError: the configuration, the data or the run folder is wrong.
    """

    def __init__(self, resolved: Resolved, verbose: bool = False) -> None:
        self.context: RunContext = make_context(resolved)
        self.state = RunState([])
        self._former_rows = 0
        self.fresh_weights = 0
        self._weight_notes: List[str] = []
        self.final_report: Union[Report, CompiledReport, None] = None
        self._verbose = verbose
        # The differences between processes that can change the last digits of a result.
        self._differences: List[str] = []

    @property
    def neighbours_accuracy(self) -> Optional[float]:
        """Accuracy of 3-nearest-neighbours on the same split; only for the embedded digits, where it is cheap."""
        report = self.final_report
        if self.context.info.name != "digits" or not isinstance(report, Report) or report.validation is None:
            return None
        from ipucnn.datasets.base import knn_accuracy

        return float(knn_accuracy(self.context.source))

    def plan_of_run(self) -> Dict[str, Any]:
        """Describes what the run would do, as plain values: network, data, device, folder, program, learning rates.

        Raises:
            ConfigurationError: the network cannot be built, or cannot be split as the options say.
            MissingError: the device is absent, or Keras lacks the network.
        """
        is_finished = isinstance(self.context.start, Finished)
        context = self.context
        layers = self._named_layers() if is_finished else self._check_network()
        p, config, settings, info = context.program, context.config, context.optimizer, context.info
        session = self._session()
        device = f"{session.device.kind.upper()}: {session.device.name}" if session else None
        first, last = context.schedule(np.array([0, p.num_weight_updates - 1]))
        parameters = ", ".join(f"{name} {value}" for name, value in settings.params.items())
        decay = f", weight decay {settings.weight_decay:g}" if settings.weight_decay else ""
        l2 = f", L2 {settings.l2_regularization:g}" if settings.l2_regularization else ""
        is_part = not settings.decay_biases_and_norms and (decay or l2)
        but = ", not of biases and norms" if is_part else ""
        momentum = {"momentum": config.bn_momentum} if norm_of(config.norm_layer) == "batch" else {}
        norm, warnings, own = {**momentum, **config.norm_layer}, list(context.warnings), context.record.own
        if own is not None:
            norm = {"name": ", ".join(norms_of(own)) or "none"}
            warnings += statistics_warnings(context)
        notes = [*context.notes, *notes_on_own(context)]
        return {
            "model": context.record.name,
            "input_shape": list(context.input_shape),
            "dataset": {
                "name": info.name,
                "train": info.num_train,
                "evaluation": info.num_eval,
                "classes": info.num_classes,
            },
            "device": device or counted(p.num_ipus, "IPU"),
            "run_dir": str(context.folder.path),
            "continues_after": p.num_weight_updates if is_finished else context.weight_updates_done,
            "finished": is_finished,
            "seed": context.seed,
            "stochastic_rounding": config.stochastic_rounding,
            "norm_layer": norm,
            "optimizer": f"{settings.name} ({parameters}){decay}{l2}{but}",
            "learning_rate": {
                "schedule": config.lr_schedule,
                "first": float(first),
                "largest": largest_rate(context.schedule, p.num_weight_updates),
                "last": float(last),
            },
            "notes": notes,
            "warnings": warnings,
            "program": {**p.to_dict(), **layers.to_dict()},
        }

    def _session(self) -> Optional[Session]:
        """Creates the session of a run on the host, which imports TensorFlow; returns None on IPUs."""
        from ipucnn.sessions.factory import create_session, runs_on_ipus

        config = self.context.config
        if runs_on_ipus(config.device):
            return None
        return create_session(config.device, verbose=self._verbose, config=config, trains=True)

    def _named_layers(self) -> Layers:
        """Returns the layers that options name; those that only the built network tells are left out."""
        resolved = self.context.resolved
        return Layers(*named_splits(resolved), check_frozen(resolved))

    def _check_network(self) -> Layers:
        """Checks the options that depend on the network's layers, and plans the splits if none were given.

        Builds the network only if its layers are not those of the shipped graph, or if splits have to be planned.
        """
        from ipucnn.models.build import check_requirements
        from ipucnn.planning.graphs.extract import known_graph

        context = self.context
        record, program = context.record, context.program
        check_requirements(record)
        # Neither the input size nor the number of classes changes the list of layers.
        options = network_options(record, context.config, record.input_shape, record.num_classes)
        is_planned = program.num_stages > 1 and not context.config.named_splits
        if known_graph(record, options) is None or is_planned:
            self._session()
            return self._layers(run_setup.build(context))
        return self._named_layers()

    def _layers(self, model: KerasModel) -> Layers:
        """Freezes layers of the built network; returns them and the layers that open stages."""
        context, frozen = self.context, ()  # type: RunContext, Tuple[str, ...]
        if context.config.freeze is not None:
            frozen = freeze_layers(model, context.config.freeze, self.fresh_weights > 0)
        if context.record.own is not None and context.config.training:
            context.record.own.check_trained(model, self.fresh_weights > 0)
        splits, origin = splits_of_run(context.program, model, context.resolved, context.saved_program)
        return Layers(splits, origin, frozen)

    @property
    def threads(self) -> int:
        """The number of threads that share an operation."""
        return self._threads()[0]

    def _threads(self) -> Tuple[int, bool]:
        """Returns the number of threads that share an operation, and whether that number is required."""
        from ipucnn.sessions.factory import runs_on_ipus

        context = self.context
        config, start, threads = context.config, context.start, context.config.threads
        if threads is None and isinstance(start, Continue):
            threads = start.threads
        # TensorFlow keeps the number of its first run in this process, for example of a continued fold.
        threads = threads or fixed_threads()
        if threads is not None:
            return threads, True
        if runs_on_ipus(config.device):
            return num_cores(), False
        sharing = max(context.group.num_workers, config.max_workers)
        return threads_of_training(context.program, context.fused_micro_batches, sharing), False

    def _agree(self) -> None:
        """Agrees with the other processes of the run on what they train, and fixes the number of threads.

        Raises:
            ConfigurationError: a process would not train the same network.
        """
        context = self.context
        checkpoint = context.checkpoint
        threads, is_fixed = self._threads()
        if isinstance(context.group, Mpi):
            context.group.connection.timeout_s = context.config.rank_timeout
            compared = compared_options(context.config)
            compared["data"] = context.data_sha256
            if context.record.own is not None:
                compared["the network's file"] = context.record.own.sha256
            compared["the data set's file"] = context.resolved.choice.sha256
            if not context.config.training:
                compared["the checkpoints to validate in"] = context.config.checkpoint_input_dir
            compared["weight updates done"] = context.weight_updates_done
            compared["the checkpoint"] = None if checkpoint is None else checkpoint.digest
            threads, self._differences = agree(context.group, context.config, compared, threads)
            is_fixed = True
            if context.config.device != "cpu":
                share_gpus(context.group)
        fix_threads(threads, is_fixed)

    def dataset(
        self, first_update: int, samples_per_element: int, shard: Tuple[int, int] = (1, 0)
    ) -> TfDataset:
        """Returns a shard of the training batches, from a weight update on; sessions call it for their Division's."""
        context = self.context
        if isinstance(context.group, Mpi) and context.config.synthetic_data == "ipu":
            shard = (1, 0)  # every process repeats the same batch
        return run_setup.training_batches(
            context, context.program, first_update, samples_per_element, shard=shard
        )

    def events(self, begin: Callable[[], object] = lambda: None) -> Events[None]:
        """Builds, compiles, trains and writes the run folder.  A finished run yields nothing.

        Args:
            begin: called once the processes agree on the run, before anything is built; not for a finished run.

        Raises:
            Interrupted: SIGINT, SIGTERM or SIGHUP arrived; a checkpoint is saved if there was a weight update.
            NotFiniteError: the loss became NaN or infinite.
            NoSpaceError: a disk is full; the last checkpoint stays.
        """
        context = self.context
        if isinstance(context.start, Finished):
            self.final_report = context.start.report
            if context.config.clean_dir:
                context.folder.clean(context.start.report.checkpoints)
            context.folder.unlock()
            return
        is_in_memory = context.resolved.choice.name.startswith(in_memory.PREFIX)
        if is_in_memory and fingerprint(context.source) != context.data_sha256:
            raise DataError(
                "the arrays of the data set have changed since the run was checked",
                "train on copies, images.copy() and labels.copy(), or change them afterwards",
            )
        hint = None
        if context.checkpoint is not None and context.start.target.is_own:
            # The command to show if a signal ends this process before it did anything.
            hint = f"continue it with: {resume_command(context.folder.path, context.own_files)}"
        try:
            with InterruptGuard(hint=hint) as guard:
                self._agree()
                begin()
                yield from self._events(guard)
        except BaseException as error:
            folder = self.context.folder
            if len(self.state.history) == self._former_rows:
                # Out of memory, no free IPUs, or a signal before the first weight update: there is nothing to keep,
                # and the user will want the same folder name again.  A folder with a checkpoint is left as it is.
                folder.discard()
            elif isinstance(error, NoSpaceError) and folder.checkpoint_files():
                command = resume_command(folder.path, context.own_files)
                raise NoSpaceError(
                    error.message, f"free some space, and continue it with: {command}"
                ) from error
            raise
        finally:
            self.context.folder.unlock()

    def _events(self, guard: InterruptGuard) -> Events[None]:
        from ipucnn.sessions.factory import create_session

        config, group = self.context.config, self.context.group
        session = create_session(
            config.device, verbose=self._verbose, config=config, group=group, trains=True
        )
        self.context, session = run_setup.move_preprocessing(self.context, session)
        from ipucnn.datasets.pipeline import data_errors

        timer = Timer()
        model, trainer, make_dataset = self._make_trainer(session)
        state = trainer.state
        context = self.context
        if isinstance(group, Mpi):
            require_same_weights(group, {**state.weights, **state.slots})
        if config.compile_only:
            yield Note("compiling; nothing is trained")
            with data_errors():
                self.final_report = _compile_ahead(context, trainer, make_dataset)
            return
        validated: List[Path] = []
        skipped: List[str] = []
        matched: List[str] = []
        if not config.training and config.checkpoint_input_dir is not None:
            # Before the run folder is made, so that a checkpoint of another model leaves no folder behind.
            validated, skipped, matched = list_validated(context, state, model)
        check()
        # From here on there is something to save, or a half-made folder: signals wait for the end of a slice or batch.
        guard.defer()
        self._open_folder(trainer)
        context = self.context
        if context.checkpoint is None:
            self.state.notes = [
                *context.notes,
                *notes_on_own(context),
                *([] if context.record.own is None else statistics_warnings(context)),
                *self._weight_notes,
                *_notes_of_unused_weights(context),
            ]
        remarks = [*self.state.notes, *matched]
        next_batches = partial(self.dataset, shard=trainer.division.shard)
        recorder = Recorder(context, session, trainer, next_batches, self.state, guard, timer, remarks)
        notes = _notes_of_sharing(context, self._differences, trainer.division)
        notes += recorder.note_process(is_continued=context.checkpoint is not None)
        notes += [f"warning: {note}; skipped" for note in skipped]
        notes += [f"note: {note}" for note in remarks]
        notes += _notes_of_room(context, state)
        yield from map(Note, notes)
        yield Started(trainer.program, trainer.compilation, context.folder.path, context.info)
        if session.any_instance(guard.is_set):
            guard.end_before_training()
        with recorder, data_errors():
            if config.training and not recorder.is_over:
                for event in train(trainer, make_dataset):
                    yield from recorder.handle(event)
                    if recorder.is_over:
                        break
            yield from recorder.validate_each(validated, model)
            if config.validation and self.state.last_validation is None:
                yield from recorder.handle(ValidationDue(0))
            yield from recorder.save_last()
            self.final_report = recorder.report
            yield from self._predictions(trainer, recorder)
            yield from recorder.finish()

    def _make_trainer(self, session: Session) -> Tuple[KerasModel, Trainer, MakeDataset]:
        """Builds the network with its first weights, divides its Program, and compiles it.

        The third result makes the training batches; it keeps the latest data set, because a new run trains on the one
        that it was traced with.
        """
        from ipucnn.datasets.pipeline import data_errors
        from ipucnn.training.losses import Loss

        model = run_setup.build(self.context)
        self._load_weights(model)
        context, config = self.context, self.context.config
        layers = self._layers(model)
        division = session.divide(model, context.program, context.fused_micro_batches)
        program = BuiltProgram.of(context.program, layers, division.fused_micro_batches)
        advice = training_advice(model, context.record.name, program, config, layers.pipeline_splits)
        name = run_setup.loss_name(config, context.record.task)
        loss = Loss(name, config.label_smoothing, self._class_weights())
        make_dataset = lru_cache(maxsize=1)(partial(self.dataset, shard=division.shard))
        with data_errors():
            trainer = session.trainer(
                TrainingTask(
                    model, program, division, context.optimizer, loss, context.schedule, make_dataset, advice
                )
            )
        return model, trainer, make_dataset

    def _class_weights(self) -> Tuple[float, ...]:
        """Returns the factor of each class in the training loss, and notes the extremes; empty: all are 1."""
        from ipucnn.training.losses import balanced_weights

        info = self.context.info
        if self.context.config.class_weights is None:
            return ()
        weights = balanced_weights(self.context.source.train.labels, info.num_classes)
        ranked = sorted(zip(weights, info.class_names))
        shown = [f"{weight:.3g} ({printable(name)})" for weight, name in (ranked[0], ranked[-1])]
        self._weight_notes.append(f"class weights in the training loss: from {' to '.join(shown)}")
        return weights

    def _predictions(self, trainer: Trainer, recorder: Recorder) -> Iterator[Predicted]:
        """Yields masks that a trained segmentation network predicts, if the images are in memory."""
        context = self.context
        # Instances of poprun predict together; other processes of the host would only repeat the writer's work.
        predicts = context.folder.writes or context.group.under_poprun
        images = context.source.eval
        if context.record.task != "segmentation" or not context.config.training or not predicts:
            return
        if isinstance(images, IN_MEMORY) and len(images):
            from ipucnn.runs.images.segmentation import predicted_images

            with recorder.as_evaluated():
                predicted = predicted_images(context, trainer.predictor)
            yield Predicted(predicted)

    def _open_folder(self, trainer: Trainer) -> None:
        """Creates or reopens the run folder, and restores the trainer from the checkpoint."""
        context, program = self.context, trainer.program
        start, target, num_devices = context.start, context.start.target, len(trainer.division.devices)
        if isinstance(start, Continue):
            self.state = restore(start.checkpoint, trainer.state, str(start.path))
            self._former_rows = len(self.state.history)
        if isinstance(start, Continue) and target.is_own:
            context.folder.reopen(context.saved_config(num_devices), program, self.state.history)
            return
        context = self.context = replace(context, folder=target.claim(context.resolved))
        context.folder.create(context.saved_config(num_devices), program, target.replaces)
        for line in self.state.history:
            context.folder.append(METRICS, line)

    def _load_weights(self, model: KerasModel) -> None:
        """Loads the weights of ``--weights`` into the network, unless the run continues from a checkpoint."""
        if self.context.weights is None:
            return
        self.fresh_weights, notes = self.context.weights.start(self.context, model)
        head = "a new head for " + counted(self.context.info.num_classes, "class")
        given = shown_value(self.context.config.weights)
        self._weight_notes = [
            f"starting from {given}, with {head if self.fresh_weights else 'all of its layers'}",
            *notes,
        ]
        if self.fresh_weights:
            self._weight_notes += _notes_of_new_head(self.context.program)


# Rules of thumb: in a trial with 42 images, up to 50 weight updates were no better than chance, and 200 were useful.
_FEW_UPDATES, _ENOUGH_UPDATES = 100, 200


def _notes_of_new_head(program: Program) -> List[str]:
    """Returns a note if a run ends before a new head can have learned its classes."""
    updates, per_epoch = program.num_weight_updates, program.weight_updates_per_epoch
    if updates >= _FEW_UPDATES:
        return []
    return [
        f"few weight updates for a new head: {counted(updates, 'weight update')}, and it may need about "
        f"{_ENOUGH_UPDATES}: --num-epochs {-(-_ENOUGH_UPDATES // per_epoch)}"
    ]


def _compile_ahead(context: RunContext, trainer: Trainer, make_dataset: MakeDataset) -> CompiledReport:
    """Compiles training, statistics and validation into the executable cache, for ``--compile-only``.

    It needs no IPU, trains nothing, and makes no run folder.
    """
    from ipucnn.sessions.poplar.sdk_environment import executable_cache
    from ipucnn.sessions.poplar.session import PoplarTrainer

    assert isinstance(trainer, PoplarTrainer)  # only IPUs have the option
    program, batches = trainer.program, None
    if program.executions_per_validation:
        batch = program.validation_micro_batch_size * program.validation_num_replicas
        batches = run_setup.evaluation_batches(context, batch, trainer.predictor)
    compilation = trainer.compile_ahead(make_dataset, batches)
    return CompiledReport(
        context.config.model_name, executable_cache(), program.to_dict(), Compilation.of(compilation)
    )


def _notes_of_sharing(context: RunContext, differences: Sequence[str], division: Division) -> List[str]:
    """Describes the workers and how they share a weight update; empty for one device of one worker."""
    if context.group.num_workers == 1 and division.num_present == 1:
        return []
    notes = division.notes(context.config, is_new=context.checkpoint is None)
    different = "the result may differ in bytes from one process's"
    return [*notes, *(f"warning: {line}; {different}" for line in differences)]


def _notes_of_unused_weights(context: RunContext) -> List[str]:
    """Returns a note if a run on a file of Keras begins without the weights in it."""
    file = file_with_weights(context.record)
    if file is None or context.config.weights is not None:
        return []
    name = context.record.name
    return [
        f"the weights in {shown_value(name)} are not used: training draws its own; --weights {quoted(name)} "
        "begins with them"
    ]


def _notes_of_room(context: RunContext, state: TrainState) -> List[str]:
    """Returns a warning if the checkpoints will take more than a tenth of the free space on their disk."""
    config, program = context.config, context.program
    if not (config.training and config.checkpoints and context.folder.writes):
        return []

    def size(variables: Iterable[TfVariable]) -> int:
        # Computed from shapes: reading a variable that instances share needs all of them.
        kinds = ((v, getattr(v.dtype, "as_numpy_dtype", v.dtype)) for v in variables)
        return sum(int(np.prod(v.shape)) * np.dtype(kind).itemsize for v, kind in kinds)

    weights = size(state.weights.values())
    due = len(checkpoints.written_names(program, state.weight_updates + 1, program.num_weight_updates)) - 2
    # A new checkpoint is written before an older one is deleted.
    whole = max(1, due if config.keep_checkpoints is None else min(due, config.keep_checkpoints + 1))
    needed = whole * (weights + size(state.slots.values())) + weights
    free = free_bytes(context.folder.checkpoints)
    if not free or needed * 10 <= free:  # 0: the free space is unknown
        return []
    fewer = "; --keep-checkpoints 2 keeps fewer" if config.keep_checkpoints is None and due > 2 else ""
    return [
        f"warning: the checkpoints of this run will take up to {needed / 2**20:,.0f} MiB, and "
        f"{free / 2**20:,.0f} MiB are free in {context.folder.checkpoints}{fewer}"
    ]
