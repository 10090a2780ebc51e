"""Makes the job of a benchmark: everything that is decided before TensorFlow is imported, in one value."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, replace
from typing import Optional

import numpy as np

from ipucnn.aliases import PlainDict
from ipucnn.benchmarking.input_pipeline import random_source
from ipucnn.benchmarking.records import BenchmarkReport, DataFacts, Request
from ipucnn.benchmarking.rules import check_run, check_settings
from ipucnn.benchmarking.settings import DATA_KINDS, REAL, BenchmarkSettings, data_kind
from ipucnn.config.options import SPECS, RunConfig
from ipucnn.config.resolve import Resolved
from ipucnn.config.spec import Effect
from ipucnn.errors import DataError
from ipucnn.runs import setup as run_setup
from ipucnn.runs.rules import check_group
from ipucnn.sessions.group import ProcessGroup, find_instances
from ipucnn.sessions.host.division import fixed_fused, fixed_in_inference
from ipucnn.training.batching import updates_from_steps_per_execution
from ipucnn.training.optimizer_settings import OptimizerSettings, settings_of_run
from ipucnn.training.program import Program, make_layout, make_program


@dataclass(frozen=True)
class Job:
    """A benchmark that can be measured; :func:`make_job` makes it.

    Attributes:
        resolved: the configuration; for inference without accumulation.
        settings: what to measure, and for how long.
        instances: the instances of ``poprun``.
        setup: the data and the network.
        seed: the seed of weights, data and bootstrap.
        program: the program of one execution as requested: the planner's splits and the session's choices are not part
            of the job.
        steps: the micro-batches of an execution if they are prescribed.
        optimizer, learning_rate, loss_name: the training settings; the rate stays the same.
        request: the part of the report that is known before the network is built.
        baseline: the earlier report to compare with.
        fused: the number of fused micro-batches that an option or the baseline prescribes; None if it is free.
    """

    resolved: Resolved
    settings: BenchmarkSettings
    instances: ProcessGroup
    setup: run_setup.Setup
    seed: int
    program: Program
    steps: Optional[int]
    optimizer: OptimizerSettings
    learning_rate: float
    loss_name: str
    request: Request
    baseline: Optional[BenchmarkReport]
    fused: Optional[int]

    @property
    def config(self) -> RunConfig:
        """Returns the configuration's values."""
        return self.resolved.config

    @property
    def kind(self) -> str:
        """Returns the source of the images, a key of ``DATA_KINDS``."""
        return data_kind(self.config)


def make_job(resolved: Resolved, settings: BenchmarkSettings) -> Job:
    """Checks everything that can be checked without TensorFlow, and opens the data.

    Raises:
        UserError: the configuration, the baseline or the data are wrong.
    """
    from ipucnn.sessions.factory import check_device

    instances = find_instances()
    check_group(instances, resolved.config)
    check_settings(settings, resolved.config, instances.size)
    check_device(resolved.config.device)
    resolved = check_run(resolved, settings.training, instances)
    config = resolved.config
    loss_name = run_setup.loss_name(config, resolved.record.task)
    seed = config.seed if config.seed is not None else random.SystemRandom().randrange(2**31)
    # The execution length of a network's own preset is for another device; here executions are as long as time allows.
    steps = config.steps_per_execution if resolved.origins["steps_per_execution"].by_user else None
    updates = _prescribed_updates(config, steps) if settings.training else 1
    program = program_of(config, seed, instances, updates)
    if program.num_stages > 1:
        from ipucnn.planning.splits import check_named_splits

        check_named_splits(resolved, program)
    _check_on_ipus(program, config, settings, instances)
    baseline = None
    if settings.baseline is not None:
        from ipucnn.benchmarking.baseline import read_report

        baseline = read_report(settings.baseline)
    optimizer = settings_of_run(config, program.global_batch_size)
    # The schedule's first learning rate, without warm-up, stays the same while updates are measured.
    without_warmup = replace(config, lr_warmup_params=None)
    schedule = run_setup.learning_rates(without_warmup, replace(program, num_epochs=config.num_epochs))
    learning_rate = float(schedule(np.arange(1))[0])
    is_real = data_kind(config) == REAL
    source = None if is_real else random_source(resolved, seed, program.micro_batch_size)
    setup = run_setup.prepare(resolved, seed, source=source)
    run_setup.build_options(setup)
    request = _make_request(setup, settings, program)
    if baseline is not None:
        _check_baseline(baseline, request, settings, program)
    return Job(
        resolved=resolved,
        settings=settings,
        instances=instances,
        setup=setup,
        seed=seed,
        program=program,
        steps=steps,
        optimizer=optimizer,
        learning_rate=learning_rate,
        loss_name=loss_name,
        request=request,
        baseline=baseline,
        fused=_prescribed_fused(config, settings, program, baseline, steps, instances),
    )


def program_of(config: RunConfig, seed: int, instances: ProcessGroup, updates: int) -> Program:
    """Returns the Program with ``updates`` weight updates per execution."""
    config = replace(
        config,
        num_epochs=1,
        weight_updates_per_epoch=updates,
        pad_dataset=False,
        steps_per_execution=None,
        logs_per_epoch=1.0,
        validation=False,
        checkpoints=False,
    )
    samples = updates * make_layout(config).global_batch_size
    return make_program(config, samples, seed=seed, num_instances=instances.size)


def _prescribed_updates(config: RunConfig, steps: Optional[int]) -> int:
    """Returns the weight updates of an execution of ``steps`` steps; one if they are not prescribed."""
    if steps is None:
        return 1
    count = make_layout(config).gradient_accumulation_count
    return updates_from_steps_per_execution(steps, count, max(1, steps // count), 1)


def _check_on_ipus(
    program: Program, config: RunConfig, settings: BenchmarkSettings, instances: ProcessGroup
) -> None:
    """Refuses programs that the Poplar session would refuse."""
    from ipucnn.sessions.factory import runs_on_ipus

    if not runs_on_ipus(config.device):
        return
    from ipucnn.sessions.poplar.checks import check_layout, check_program

    if settings.training:
        check_program(program, config, instances)
    else:
        check_layout(instances, program, config)


def _make_request(setup: run_setup.Setup, settings: BenchmarkSettings, program: Program) -> Request:
    """Returns the part of the report that is known before the network is built; it starts now."""
    resolved, info = setup.resolved, setup.source.info
    kind = data_kind(resolved.config)
    return Request(
        model=resolved.record.name,
        preset=resolved.preset,
        mode=settings.mode,
        scope=settings.scope,
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        seed=setup.seed,
        input_shape=list(setup.input_shape),
        data=DataFacts(
            kind=kind,
            description=DATA_KINDS[kind],
            name=info.name,
            location=info.location,
            num_images=info.num_train,
        ),
        settings=settings.limits,
        options=_compared_options(resolved.config),
        program=program.to_dict(),
    )


def _check_baseline(
    baseline: BenchmarkReport, request: Request, settings: BenchmarkSettings, program: Program
) -> None:
    """Refuses a baseline of other work.

    Raises:
        ConfigurationError: the baseline measured other work.
        DataError: the baseline is damaged.
    """
    from ipucnn.benchmarking.baseline import check_same_request

    where, execution = str(settings.baseline), baseline.execution
    assert execution is not None
    check_same_request(baseline, where, request)
    whole = program.global_batch_size
    if not settings.training:
        whole = program.micro_batch_size * execution.fused_micro_batches
    if execution.samples % whole:
        raise DataError(
            f"{where} is damaged: executions of {execution.samples} samples are no multiple of {whole}",
            "make it again",
        )


def _prescribed_fused(
    config: RunConfig,
    settings: BenchmarkSettings,
    program: Program,
    baseline: Optional[BenchmarkReport],
    steps: Optional[int],
    instances: ProcessGroup,
) -> Optional[int]:
    """Returns the number of fused micro-batches that an option or the baseline prescribes; None if it is free.

    Raises:
        ConfigurationError: the number does not divide the work.
    """
    execution = None if baseline is None else baseline.execution
    saved = None if execution is None else execution.fused_micro_batches
    if settings.training:
        return fixed_fused(config, program, saved)
    replicas = program.num_replicas // instances.size
    return fixed_in_inference(config, None if steps is None else replicas * steps, saved)


def _compared_options(config: RunConfig) -> PlainDict:
    """Returns the options of a run that affect its speed, by key, as plain values.

    The network is compared by itself, and the seed affects no speed.
    """
    options = {
        spec.key: spec.yaml_value(getattr(config, spec.name))
        for spec in SPECS
        if spec.effect is not Effect.FILES and spec.name not in ("model_name", "seed")
    }
    plain: PlainDict = json.loads(json.dumps(options))
    return plain
