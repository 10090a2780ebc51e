"""One training run: from a resolved configuration to events, files in the run folder, and a report.

:class:`TrainingRun` decides and refuses; what happens at each event of the session is the :class:`Recorder`'s.
"""

import atexit
import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple

import numpy as np

from ipucnn.aliases import KerasModel, TfDataset, TfVariable
from ipucnn.config.options import BY_NAME, SPECS, RunConfig
from ipucnn.config.resolve import OWN_ORIGIN, Resolved
from ipucnn.config.values import moves_once, norm_of
from ipucnn.datasets.base import ArrayExamples, fingerprint
from ipucnn.errors import ConfigurationError, DataError
from ipucnn.filesystem import (
    check_output,
    exists,
    expand,
    free_bytes,
    is_file,
    is_written_to,
    remove_file,
)
from ipucnn.interrupts import InterruptGuard, check
from ipucnn.machine import fix_threads, fixed_threads, num_cores
from ipucnn.models.build import freeze_layers
from ipucnn.planning.search.variations import would_fit
from ipucnn.planning.splits import (
    check_frozen,
    check_named_splits,
    plan_differences,
    settle_splits,
)
from ipucnn.runs import checkpoints, trackers
from ipucnn.runs import setup as run_setup
from ipucnn.runs.folder import LAST, METRICS, PAGE, PREDICTIONS, RunFolder, SilentFolder
from ipucnn.runs.input_size import size_warnings
from ipucnn.runs.recorder import (
    CompilingAhead,
    Notes,
    Predicted,
    Recorder,
    RunEvent,
    Started,
    Timer,
    Training,
)
from ipucnn.runs.start import check_same_run, find_start
from ipucnn.sessions.host.cluster import Cluster, join
from ipucnn.sessions.host.workers import (
    Workers,
    compared_options,
    find_group,
    notes_of_sharing,
    resume_command,
    threads_of_training,
)
from ipucnn.sessions.poplar.popdist import Instances
from ipucnn.sessions.session import (
    CompilationReport,
    DeviceInfo,
    Session,
    TrainState,
    ValidationDue,
    recomputes_statistics,
)
from ipucnn.text import counted
from ipucnn.training.checkpoints import digest_of
from ipucnn.training.optimizers import settings_of_run
from ipucnn.training.program import make_layout, make_program
from ipucnn.training.schedules import largest_rate


class TrainingRun:
    """Validates everything that can be without TensorFlow on construction; :meth:`events` does the work.

    Args:
        resolved: the configuration.
        verbose: let TensorFlow speak.
        cluster: the workers who met for an earlier run of several; None: they are still to meet.
        parts: whether the workers part when the run is over, for no other one follows.

    Attributes:
        cluster: the workers, once they met; None for one alone.

    Raises:
        UserError: whatever is wrong with the configuration, the data or the run folder.
    """

    def __init__(
        self, resolved: Resolved, verbose: bool = False, cluster: Optional[Cluster] = None, parts: bool = True
    ) -> None:
        from ipucnn.sessions.factory import check_device, runs_on_ipus
        from ipucnn.sessions.poplar.checks import check_program

        self.instances = find_group(resolved.config)
        self.cluster, self._parts = cluster, parts
        if not self.instances.is_writer:
            # The writer may have made the folder already; this instance leaves it alone.
            resolved = replace(
                resolved, config=replace(resolved.config, overwrite=not resolved.config.resume)
            )
        start = find_start(resolved)
        resolved = start.resolved
        run_setup.check_instances(self.instances, resolved.config)
        config = resolved.config
        self.start = start
        self.verbose = verbose
        # Of this process that share the training; what compiles tells.
        self._num_devices = 1
        self.resolved = resolved
        check_device(config.device)
        loss = run_setup.loss_name(config, resolved.record.task)
        run_setup.check_padding(config, loss)
        _check_mixing(config, resolved.record.task)
        self.seed = config.seed if config.seed is not None else random.SystemRandom().randrange(2**31)
        self.folder = _own_folder(self.instances, start.folder, config)
        self._check_flags()
        # Before data is touched; the rest of the Program needs the size of the data set.
        run_setup.check_effects(config, resolved.origins, make_layout(config))
        check_named_splits(resolved, run_setup.network_options)
        frozen = check_frozen(resolved, run_setup.network_options)
        self.setup = run_setup.prepare(resolved, self.seed)
        run_setup.build_options(self.setup)
        self.info = self.setup.source.info
        most = max(1, self.info.num_train // config.num_replicas)
        if resolved.origins["micro_batch_size"] == OWN_ORIGIN and config.micro_batch_size > most:
            config = replace(config, micro_batch_size=most)
            self.resolved = resolved = replace(resolved, config=config)
            self.setup = replace(self.setup, resolved=resolved)
        self.program = make_program(
            config, self.info.num_train, seed=self.seed, num_instances=self.instances.num_shares
        ).with_frozen(frozen)
        if runs_on_ipus(config.device):
            check_program(self.program, config, self.instances)
        self.optimizer = settings_of_run(config, self.program.global_batch_size)
        self.schedule = run_setup.learning_rates(config, self.program)
        if config.fused_micro_batches:  # a number, and neither none nor measure
            self.program = self.program.with_checked_fused(config.fused_micro_batches)
        elif start.checkpoint is not None:
            # How many micro-batches are computed as one decides about rounding: a continued run keeps it.
            fused = int((self._saved_program() or {}).get("fused_micro_batches", 0))
            self.program = self.program.with_fused(fused)
        run_setup.check_workers(self.instances, config, self.program)
        self.data_sha256 = fingerprint(self.setup.source)
        self._check_same_run()
        self.state = checkpoints.RunState([])
        self.final_report: Dict[str, Any] = {}
        # What a continued run takes is decided already.
        self._size_warnings = [] if self.start.checkpoint is not None else size_warnings(self.setup)
        self.fresh_weights = 0
        self.first_weight_update = 0
        self._former_rows = 0

    def _saved_program(self) -> Optional[Dict[str, Any]]:
        """The program of the checkpoint that the run goes on from; None where it begins."""
        start = self.start
        return None if start.checkpoint is None else dict(start.checkpoint.meta.get("program", {}))

    def _check_same_run(self) -> None:
        """Refuses a checkpoint of another run, before the network is built."""
        program, saved = self.program, self._saved_program() or {}
        if program.num_stages > 1 and not program.pipeline_splits:
            # Splits that nobody names are those of the checkpoint.
            program = replace(program, pipeline_splits=tuple(saved.get("pipeline_splits", ())))
        check_same_run(self.start, self.saved_config(), program, self.info, self.data_sha256)

    def _check_flags(self) -> None:
        """What cannot be seen in the configuration alone: files, and flags that would have no effect."""
        config, origins = self.resolved.config, self.resolved.origins
        wanted = config.weights not in (None, "imagenet") and self.start.checkpoint is None
        if wanted and not exists(expand(str(config.weights))):
            raise DataError(
                f"--weights {config.weights} does not exist", "give a checkpoint, a run folder, or imagenet"
            )
        if config.weights == "imagenet" and self.resolved.record.keras_application is None:
            raise ConfigurationError(
                f"there are no ImageNet weights for {config.model_name}",
                "`ipucnn models --json` lists keras_application for the networks that have them",
            )
        run_setup.check_compile_only(config)
        if config.clean_dir and not config.checkpoints:
            raise ConfigurationError(
                "--clean-dir without --checkpoints has nothing to clean", "drop one of them"
            )
        if config.wandb and self.instances.is_writer:
            trackers.import_wandb()
        self.schedule_picture = _schedule_picture(config)
        both = origins["ipus"] == "flag" == origins["num_replicas"]
        if both and make_layout(config).batching.num_replicas != config.num_replicas:
            raise ConfigurationError(
                f"--ipus {config.ipus} and --num-replicas {config.num_replicas} contradict each other",
                "give one of them",
            )

    def plan_of_run(self) -> Dict[str, Any]:
        """What the run would do, as plain values: network, data, device, folder, program, and learning rates.

        Raises:
            ConfigurationError: the network cannot be built or cut so.
            MissingError: the device is not here, or Keras lacks the network.
        """
        if self.start.report is None:
            self._check_network()
        p, config, settings = self.program, self.setup.config, self.optimizer
        found = self._host_device()
        device = f"{found.kind.upper()}: {found.name}" if found else f"{counted(p.num_ipus, 'IPU')}"
        first, last = self.schedule(np.array([0, p.num_weight_updates - 1]))
        parameters = ", ".join(f"{name} {value}" for name, value in settings.params.items())
        decay = f", weight decay {settings.weight_decay:g}" if settings.weight_decay else ""
        l2 = f", L2 {settings.l2_regularization:g}" if settings.l2_regularization else ""
        momentum = {"momentum": config.bn_momentum} if norm_of(config.norm_layer) == "batch" else {}
        checkpoint, is_finished = self.start.checkpoint, self.start.report is not None
        done = 0 if checkpoint is None else int(checkpoint.meta["weight_updates"])
        return {
            "model": self.setup.record.name,
            "input_shape": list(self.setup.input_shape),
            "dataset": {
                "name": self.info.name,
                "train": self.info.num_train,
                "evaluation": self.info.num_eval,
                "classes": self.info.num_classes,
            },
            "device": device,
            "run_dir": str(self.folder.path),
            "continues_after": p.num_weight_updates if is_finished else done,
            "finished": is_finished,
            "seed": self.seed,
            "stochastic_rounding": config.stochastic_rounding,
            "norm_layer": {**momentum, **config.norm_layer},
            "optimizer": f"{settings.name} ({parameters}){decay}{l2}",
            "learning_rate": {
                "schedule": config.lr_schedule,
                "first": float(first),
                "largest": largest_rate(self.schedule, p.num_weight_updates),
                "last": float(last),
            },
            "warnings": self.warnings,
            "program": p.to_dict(),
        }

    def _host_device(self) -> Optional[DeviceInfo]:
        """The device of a run on the host, for which TensorFlow is imported as the run does it; None of one on IPUs."""
        from ipucnn.sessions.factory import create_session, runs_on_ipus

        config = self.setup.config
        if runs_on_ipus(config.device):
            return None
        return create_session(config.device, verbose=self.verbose, config=config, trains=True).device

    def _check_network(self) -> None:
        """Refuses what the network's layers refuse, and has the planner choose the splits that nobody named.

        The network is built where that is needed: its layers are not those of the shipped graph, or it is to be split.
        """
        from ipucnn.models.build import check_requirements
        from ipucnn.planning.graphs.extract import known_graph

        record, program = self.setup.record, self.program
        check_requirements(record)
        # Neither the input's size nor the number of classes changes which layers there are.
        at_home = run_setup.network_options(record, self.setup.config, record.input_shape, record.num_classes)
        is_planned = program.num_stages > 1 and not program.pipeline_splits
        if known_graph(record, at_home) is None or is_planned:
            self._host_device()
            model = run_setup.build(self.setup)
            if self.setup.config.freeze is not None:
                self.program = program.with_frozen(freeze_layers(model, self.setup.config.freeze))
            self.program = settle_splits(self.program, model, self.resolved, self._saved_program())

    @property
    def is_silent(self) -> bool:
        """Whether another instance of poprun says and writes what there is, and this one computes along."""
        return not self.instances.is_writer

    @property
    def neighbours_accuracy(self) -> Optional[float]:
        """3-nearest-neighbours on the same split, where that takes no time: the yardstick of the embedded digits."""
        if self.info.name != "digits" or self.final_report.get("validation") is None:
            return None
        from ipucnn.datasets.base import knn_accuracy

        return float(knn_accuracy(self.setup.source))

    @property
    def warnings(self) -> List[str]:
        """What the user should know before the run starts, one line each."""
        from ipucnn.sessions.factory import runs_on_ipus

        lines = [
            *self.info.warnings,
            *self.info.training_warnings,
            *self._size_warnings,
            *self.program.warnings,
        ]
        lines += [
            s.warning for s in SPECS if s.warning and getattr(self.resolved.config, s.name) != s.default
        ]
        lines += plan_differences(self.resolved, self.program, self.setup.input_shape, self.info.num_classes)
        if self.program.samples_discarded_per_epoch:
            which = "a different subset each time" if self.resolved.config.shuffle else "always the same"
            lines.append(
                f"{self.program.samples_discarded_per_epoch:,} of {self.info.num_train:,} training samples are "
                f"discarded in each epoch ({which}): {counted(self.program.weight_updates_per_epoch, 'weight update')} "
                f"x {counted(self.program.global_batch_size, 'sample')}"
            )
        warmup = (self.setup.config.lr_warmup_params or {}).get("warmup_epochs", 0)
        if warmup > self.program.num_epochs:
            run = f"longer than the run, {counted(self.program.num_epochs, 'epoch')}"
            lines.append(
                f"the warm-up of {warmup:g} epochs is {run}: the learning rate never reaches its full value"
            )
        if self.program.samples_padded_per_epoch:
            lines.append(
                f"{self.program.samples_padded_per_epoch:,} samples of weight 0 fill up the last weight update of each "
                "epoch; batch norm's statistics include them"
            )
        if runs_on_ipus(self.setup.config.device) and self.program.num_stages > 1 < self.program.num_replicas:
            lines.append(
                "loss and accuracy of training are those of the last replica: the SDK's pipelines give no others"
            )
        layer = self.setup.config.norm_layer
        precision = self.setup.config.precision
        if (
            recomputes_statistics(self.program, precision)
            and not self.setup.config.precise_batch_norm
            and norm_of(layer) == "batch"
            and not moves_once(layer)
        ):
            why = "do not update them correctly in a pipeline"
            if self.program.num_stages == 1:
                why = f"keep them in 16 bits with --precision {precision}"
            lines.append(
                f"batch norm: its moving statistics are recomputed over training batches before each validation and "
                f"checkpoint, because IPUs {why}"
            )
        return lines

    @property
    def threads(self) -> int:
        """How many threads share an operation."""
        return self._threads()[0]

    def _threads(self) -> Tuple[int, bool]:
        """How many threads share an operation, and whether it was told, so that no other number will do."""
        from ipucnn.sessions.factory import runs_on_ipus

        config, checkpoint = self.setup.config, self.start.checkpoint
        told = config.threads
        if told is None and checkpoint is not None:
            # They decide the order of sums, wherever the run goes on.
            told = checkpoint.meta.get("threads")
        # TensorFlow keeps those of its first run in this process, a fold that was continued.
        told = told or fixed_threads()
        if told is not None:
            return told, True
        if runs_on_ipus(config.device):
            return num_cores(), False
        count = self.instances.count if isinstance(self.instances, Workers) else 1
        return threads_of_training(config, self.program, count), False

    def _join(self) -> Optional[Cluster]:
        """The other workers, who wait for this one; None if it is alone.

        Raises:
            UserError: they did not come, or would not train the same network.
        """
        config, checkpoint = self.setup.config, self.start.checkpoint
        threads, is_told = self._threads()
        if isinstance(self.instances, Workers):
            run = compared_options(config)
            run["data"] = self.data_sha256
            if self.setup.record.own is not None:
                run["the network's file"] = self.setup.record.own.sha256
            run["the data set's file"] = self.resolved.choice.sha256
            run["weight updates done"] = 0 if checkpoint is None else int(checkpoint.meta["weight_updates"])
            run["the checkpoint"] = None if checkpoint is None else checkpoint.digest
            self.cluster, threads = join(self.instances, config, run, threads, self.cluster)
            is_told = True
        fix_threads(threads, is_told)
        return self.cluster

    def dataset(self, first_update: int, samples_per_element: int) -> "TfDataset":
        """Training batches from a weight update on, for the session: of several instances this one's part."""
        shard = (self.instances.count, self.instances.index)
        if isinstance(self.instances, Workers) and self.setup.config.synthetic_data == "ipu":
            shard = (1, 0)  # one batch, over and over, whoever computes it
        return run_setup.training_batches(
            self.setup, self.program, first_update, samples_per_element, shard=shard
        )

    def events(self) -> Iterator[RunEvent]:
        """Builds, compiles, trains and writes the run folder.  A finished run yields only the pictures that it lacks.

        Raises:
            Interrupted: by SIGINT, SIGTERM or SIGHUP, after a checkpoint if there was a weight update.
            NotFiniteError: the loss became NaN or infinite.
        """
        if self.start.report is not None:
            self.final_report = self.start.report
            if self.setup.config.clean_dir:
                self.folder.clean(self.final_report.get("checkpoints", ()))
            yield from self._complete()
            return
        try:
            with InterruptGuard(hint=self._continue_hint()) as guard:
                cluster = self._join()
                try:
                    yield from self._events(guard, cluster)
                except BaseException as error:
                    if cluster is not None:
                        cluster.close(error)
                    raise
                if cluster is not None and self._parts:
                    cluster.close()
        except BaseException:
            if len(self.state.history) == self._former_rows:
                # Out of memory, no free IPUs, a signal before the first weight update: there is nothing to keep,
                # and the same folder is wanted again.  Where there is a checkpoint this leaves everything.
                self.folder.discard()
            raise
        finally:
            self.folder.unlock()

    def _continue_hint(self) -> Optional[str]:
        """What to type where this process is ended before it did anything; None if nothing was there before it."""
        if self.start.checkpoint is None or not self.start.in_place:
            return None
        return f"continue it with: {resume_command(self.folder.path, self.setup.own_files)}"

    def _events(self, guard: InterruptGuard, cluster: Optional[Cluster]) -> Iterator[RunEvent]:
        from ipucnn.sessions.factory import create_session

        config = self.setup.config
        session = create_session(
            config.device, verbose=self.verbose, config=config, cluster=cluster, trains=True
        )
        self.setup = run_setup.move_preprocessing(self.setup, session)
        from ipucnn.datasets.pipeline import data_errors
        from ipucnn.training.losses import make_loss

        timer = Timer()
        model = run_setup.build(self.setup)
        self._load_weights(model)
        if config.freeze is not None:
            frozen = freeze_layers(model, config.freeze, self.fresh_weights > 0)
            self.program = self.program.with_frozen(frozen)
        self.program = settle_splits(self.program, model, self.resolved, self._saved_program())
        session.would_fit = would_fit(model, self.setup.record.name, self.program, config)
        loss = make_loss(run_setup.loss_name(config, self.setup.record.task), config.label_smoothing)
        with data_errors():
            compilation = session.compile(
                model, self.program, self.optimizer, loss, self.schedule, self.dataset
            )
        assert session.program is not None
        self.program, self._num_devices = session.program, session.num_devices[0]
        if cluster is not None:
            values = {name: v.numpy() for name, v in {**session.state.weights, **session.state.slots}.items()}
            cluster.require_same("weights", digest_of(values, {}))
        if config.compile_only:
            yield CompilingAhead(self.program)
            with data_errors():
                self.final_report = self._compile_ahead(session)
            return
        validated: List[Path] = []
        skipped: List[str] = []
        if not config.training and config.checkpoint_input_dir is not None:
            # Before the run folder is made: a checkpoint of another model leaves nothing behind.
            folder = expand(config.checkpoint_input_dir)
            validated, skipped = checkpoints.list_checkpoints(folder, session.state, model)
        check()
        # From here on there is something to save, or a folder half made: signals wait for the end of a slice or batch.
        guard.defer()
        self._open_folder(session.state)
        recorder = Recorder(self._settled(compilation), session, self.state, guard, timer)
        notes = self._notes_of_sharing(cluster, session.num_devices)
        notes += recorder.note_process(is_continued=self.start.checkpoint is not None)
        notes += [f"warning: {note}; skipped" for note in skipped]
        if self.setup.record.own is not None:
            notes += [f"note: {note}" for note in self.setup.record.own.notes]
        notes += self._room_wanted(session.state)
        if notes:
            yield Notes(notes)
        yield Started(self.program, compilation, self.folder.path, self.info)
        if session.any_instance(guard.is_set):
            guard.end_before_training()
        with recorder, data_errors():
            if config.training and not recorder.is_over:
                for event in session.train(self.dataset):
                    yield from recorder.handle(event)
                    if recorder.is_over:
                        break
            yield from recorder.validate_each(validated, model)
            if config.validation and self.state.last_validation is None:
                yield from recorder.handle(ValidationDue(0, 0))
            yield from recorder.save_last()
            self.final_report = recorder.report
            # Instances of poprun predict together; a worker of the host would do the same once more.
            if self._has_pictures and (self.instances.is_writer or self.instances.is_distributed):
                from ipucnn.runs.images.segmentation import predicted_pictures

                with session.as_evaluated():
                    pictures = predicted_pictures(self.setup, session)
                yield Predicted(pictures)
            yield from recorder.finish()

    @property
    def _has_pictures(self) -> bool:
        """Whether the run draws what the network predicts of a few images."""
        images = self.setup.source.eval
        is_drawn = self.setup.record.task == "segmentation" and self.setup.config.training
        return is_drawn and isinstance(images, ArrayExamples) and len(images) > 0

    def _complete(self) -> Iterator[RunEvent]:
        """The pictures that a finished run lacks, as its last checkpoint predicts them; its page is drawn anew."""
        if self.is_silent or PREDICTIONS not in self.folder.missing_files(self._has_pictures):
            return
        last = self.folder.checkpoints / LAST
        if not is_file(last):
            yield Notes(
                [f"warning: {PREDICTIONS} is missing, and there is no checkpoint {last} to draw it from"]
            )
            return
        from ipucnn.runs.images.segmentation import predicted_pictures
        from ipucnn.runs.trained import Named, open_trained

        record = self.setup.record
        flags = {} if record.own is None else {"model_name": record.name}
        typed = self.resolved.typed
        flags.update({name: str(typed[name]) for name in ("dataset_path", "device") if typed.get(name)})
        trained = open_trained(Named("evaluate", str(last), flags))
        session = trained.session(self.verbose)
        session.prepare_evaluation(trained.build(), None)
        pictures = predicted_pictures(trained, session)
        remove_file(self.folder.path / PAGE)
        yield Predicted(pictures)

    def _room_wanted(self, state: TrainState) -> List[str]:
        """A warning if the checkpoints will take more than a tenth of what is free on their disk."""
        config, program = self.setup.config, self.program
        if not (config.training and config.checkpoints) or not self.instances.is_writer:
            return []

        def size(variables: Iterable["TfVariable"]) -> int:
            # From their shapes: what instances train together is read by all of them or none.
            kinds = ((v, getattr(v.dtype, "as_numpy_dtype", v.dtype)) for v in variables)
            return sum(int(np.prod(v.shape)) * np.dtype(kind).itemsize for v, kind in kinds)

        weights = size(state.weights.values())
        first, last = self.first_weight_update, program.num_weight_updates
        due = len(checkpoints.written_names(program, first + 1, last)) - 2
        # One more while it is written, before an older one is deleted.
        whole = max(1, due if config.keep_checkpoints is None else min(due, config.keep_checkpoints + 1))
        needed = whole * (weights + size(state.slots.values())) + weights
        free = free_bytes(self.folder.checkpoints)
        if not free or needed * 10 <= free:  # 0: nobody knows
            return []
        fewer = "; --keep-checkpoints 2 keeps fewer" if config.keep_checkpoints is None and due > 2 else ""
        return [
            f"warning: the checkpoints of this run will take up to {needed / 2**20:,.0f} MiB, and "
            f"{free / 2**20:,.0f} MiB are free in {self.folder.checkpoints}{fewer}"
        ]

    def _notes_of_sharing(self, cluster: Optional[Cluster], num_devices: Tuple[int, int]) -> List[str]:
        """Who trains, and how a weight update is shared; nothing for one device of one worker."""
        workers = self.instances if isinstance(self.instances, Workers) else None
        if workers is None and num_devices == (1, 1):
            return []
        is_new = self.start.checkpoint is None
        notes = notes_of_sharing(workers, self.setup.config, self.program, is_new, num_devices)
        different = "the result may differ in bytes from one worker's"
        warnings = [] if cluster is None else cluster.warnings
        return [*notes, *(f"warning: {line}; {different}" for line in warnings)]

    def _settled(self, compilation: CompilationReport) -> Training:
        """What the recorder works on, once nothing of it changes any more."""
        return Training(
            setup=self.setup,
            program=self.program,
            config=self.saved_config(),
            schedule=self.schedule,
            batches=self.dataset,
            data_sha256=self.data_sha256,
            folder=self.folder,
            compilation=compilation,
            first_weight_update=self.first_weight_update,
            is_in_place=self.start.in_place,
            optimizer=self.optimizer,
            is_writer=self.instances.is_writer,
        )

    def _compile_ahead(self, session: Session) -> Dict[str, Any]:
        """``--compile-only``: compiles training, statistics and validation into the executable cache; no IPU need be
        there, nothing is trained, and no run folder is made.

        Returns:
            The report: model, program, compilation and the cache's folder.
        """
        from ipucnn.sessions.poplar.surroundings import executable_cache

        program, batches = self.program, None
        if program.executions_per_validation:
            batch = program.validation_micro_batch_size * program.validation_num_replicas
            batches = run_setup.evaluation_batches(self.setup, batch, session)
        compilation = session.compile_ahead(self.dataset, batches)
        return {
            "model": self.setup.config.model_name,
            "compiled_only": True,
            "executable_cache": executable_cache(),
            "program": program.to_dict(),
            "compilation": compilation.to_dict(),
        }

    def _open_folder(self, session_state: TrainState) -> None:
        """Makes or reopens the run folder, and puts the session where the checkpoint was written."""
        start = self.start
        if start.checkpoint is not None:
            self.state = checkpoints.restore(start.checkpoint, session_state, str(start.checkpoint_path))
            self.first_weight_update = session_state.weight_updates
            self._former_rows = len(self.state.history)
        if start.in_place and start.checkpoint is not None:
            self.folder.reopen(self.saved_config(), self.program, self.state.history)
        else:
            if self.instances.is_writer:
                self.folder = start.claim()
            replace_former = start.in_place or self.resolved.config.overwrite
            self.folder.create(self.saved_config(), self.program, replace_former)
            for line in self.state.history:
                self.folder.append(METRICS, line)

    def saved_config(self) -> RunConfig:
        """The configuration that repeats this run, its seed and place filled in."""
        config, sharing = self.setup.config, self.setup.config.max_workers
        if self.start.checkpoint is None:
            # Where it is killed before its first checkpoint, it begins again with chunks that are as large.
            workers = self.instances.count if isinstance(self.instances, Workers) else 1
            sharing = max(sharing, workers * self._num_devices)
        return replace(
            config,
            seed=self.seed,
            max_workers=sharing,
            run_dir=str(self.folder.path),
            checkpoint_dir=str(self.folder.checkpoints) if config.checkpoint_dir else None,
            # A run that is continued later goes on from its own checkpoints.
            checkpoint_input_dir=None,
            overwrite=False,
            resume=False,
        )

    def _load_weights(self, model: "KerasModel") -> None:
        """Fills the network with the weights that it starts from, unless it goes on from a checkpoint."""
        weights = self.setup.config.weights
        if weights is None or self.start.checkpoint is not None:
            return
        if weights == "imagenet":
            from ipucnn.models.imagenet import load_imagenet_weights

            self.fresh_weights = load_imagenet_weights(model, self.setup.record)
            return
        path = expand(weights)
        self.fresh_weights = len(checkpoints.load_starting_weights(model, path))


def _check_mixing(config: RunConfig, task: str) -> None:
    """Refuses what is done to whole images and classes where there are masks, and mixing with nothing.

    Raises:
        ConfigurationError: naming the option.
    """
    for name in ("mixup", "cutmix", "random_erasing"):
        if not getattr(config, name):
            continue
        what = f"{BY_NAME[name].flag} {getattr(config, name):g}"
        if task == "segmentation":
            raise ConfigurationError(
                f"{what} is for classes, and {config.model_name} predicts one for each pixel", "drop it"
            )
        if name != "random_erasing" and config.micro_batch_size == 1:
            raise ConfigurationError(
                f"{what} mixes the images of a micro-batch, and --micro-batch-size is 1",
                "use --micro-batch-size 2 or more, or drop it",
            )


def _schedule_picture(config: RunConfig) -> Optional[Path]:
    """Where ``--plot-schedule`` goes.

    Raises:
        ConfigurationError: without ``--dry-run``, with ``--compile-only``, or a name of another kind.
        DataError: nothing can be written there.
    """
    if config.dry_run and config.compile_only:
        raise ConfigurationError("--dry-run compiles nothing, and --compile-only does", "drop one of them")
    if config.plot_schedule is None:
        return None
    if not config.dry_run:
        raise ConfigurationError(
            "--plot-schedule draws the learning rate without training, and --dry-run is not given",
            "add --dry-run",
        )
    path = expand(config.plot_schedule)
    if not is_written_to(path) and path.suffix.lower() not in (".png", ".svg"):
        raise ConfigurationError(
            f"--plot-schedule {config.plot_schedule} has no ending that tells of a picture",
            "use a name that ends in .png or .svg",
        )
    check_output(path)
    return path


def _own_folder(instances: Instances, folder: RunFolder, config: RunConfig) -> RunFolder:
    """The run folder for the instance that writes; for the others one that goes away with them.

    Of the host's workers the others have the same as the first, and it alone needs room for it: they write nothing.

    With ``--ckpt-all-instances`` the checkpoints of the others stay, in ``instance-1``, ... of ``--checkpoint-dir``:
    each may be on a host of its own, whose disk the first instance does not see.
    """
    if instances.is_writer:
        return folder
    if isinstance(instances, Workers):
        return SilentFolder(folder.path, config.checkpoint_dir)
    path = Path(tempfile.mkdtemp(prefix="ipucnn-instance-"))
    atexit.register(shutil.rmtree, str(path), ignore_errors=True)
    own = None
    if config.ckpt_all_instances:
        own = str(folder.checkpoints / f"instance-{instances.index}")
    return RunFolder(path / "run", own)
