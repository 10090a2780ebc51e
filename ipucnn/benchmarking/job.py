"""Makes the job of a benchmark: everything that is decided before TensorFlow is imported, in one value."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Optional, Tuple

import numpy as np

from ipucnn.aliases import PlainDict
from ipucnn.benchmarking.input_pipeline import random_source
from ipucnn.benchmarking.records import BenchmarkReport, DataFacts, Limits, Request
from ipucnn.config import bounds, values
from ipucnn.config.options import SPECS, RunConfig
from ipucnn.config.resolve import Resolved
from ipucnn.config.spec import Effect
from ipucnn.errors import ConfigurationError, DataError, did_you_mean
from ipucnn.filesystem import expand
from ipucnn.runs import setup as run_setup
from ipucnn.runs.rules import HOST_SESSION_RULES, RULES, Facts, check_group, check_rules
from ipucnn.sessions.group import ProcessGroup, find_instances
from ipucnn.sessions.host.division import check_fused
from ipucnn.text import shown_value
from ipucnn.training.batching import divisors, updates_from_steps_per_execution
from ipucnn.training.optimizer_settings import OptimizerSettings, settings_of_run
from ipucnn.training.program import Program, make_layout, make_program

if TYPE_CHECKING:
    from ipucnn.planning.calibration import SystemProfile

TRAINING, INFERENCE = "training", "inference"
SESSION, DATA, END_TO_END = "session", "data", "end-to-end"
MODES = (TRAINING, INFERENCE, DATA, END_TO_END)
KERAS = "keras"
# A call of Keras' fit takes some 50 ms whatever its work: executions are long enough to make this negligible.
COMPARED_EXECUTION_S = 2.0
DEFAULTS = Limits(
    min_executions=bounds.DEFAULT_EXECUTIONS,
    min_time_s=bounds.DEFAULT_MIN_TIME_S,
    max_time_s=bounds.DEFAULT_MAX_TIME_S,
    max_warmup_s=15.0,
    execution_s=0.1,
    compare_with=None,
)
HOST_GENERATED, DEVICE_GENERATED, REAL = "host-generated", "device-generated", "real"
DATA_KINDS = {
    HOST_GENERATED: "random images, generated once on the host and fed through the input pipeline",
    DEVICE_GENERATED: "one constant batch in memory, without input pipeline",
    REAL: "images of the data set, through the input pipeline",
}


@dataclass(frozen=True)
class BenchmarkSettings:
    """The options of a benchmark that runs do not have; :func:`make_settings` checks them.

    Attributes:
        mode: TRAINING or INFERENCE.
        scope: SESSION: the network on its data; DATA: the input pipeline that feeds it, alone; END_TO_END: the
            network on its data, beside the network on a constant batch and the pipeline alone.
        limits: the limits of time and executions, and the program to compare with.
        system: the IPU machine to predict for, None for the smallest suitable one.
        profile: the measurements of the IPU machine.
        baseline: an earlier report.json to compare with.
        max_regression: the share of the baseline's speed that may be lost.
    """

    mode: str = INFERENCE
    scope: str = SESSION
    limits: Limits = DEFAULTS
    system: Optional[str] = None
    profile: Optional[SystemProfile] = None
    baseline: Optional[Path] = None
    max_regression: float = bounds.DEFAULT_MAX_REGRESSION

    @property
    def training(self) -> bool:
        """Tells whether weight updates are measured."""
        return self.mode == TRAINING

    @property
    def compare_with(self) -> Optional[str]:
        """Returns "keras", or None."""
        return self.limits.compare_with


def make_settings(
    *,
    training: Optional[bool] = None,
    mode: Optional[str] = None,
    executions: int = DEFAULTS.min_executions,
    min_time: Optional[float] = None,
    max_time: float = DEFAULTS.max_time_s,
    compare_with: Optional[str] = None,
    system: Optional[str] = None,
    system_profile: Optional[str] = None,
    baseline: Optional[str] = None,
    max_regression: Optional[str] = None,
) -> BenchmarkSettings:
    """Returns checked settings from the typed options.

    Args:
        training: ``--training`` (True) or ``--inference`` (False); None: as ``mode`` implies.
        mode: one of ``MODES``.
        executions, min_time, max_time: see ``Limits``; the default of the least time is at most ``max_time``.
        compare_with, system, baseline, max_regression: see :class:`BenchmarkSettings`.
        system_profile: the file with the profile.

    Raises:
        ConfigurationError: a wrong option; the message names it, its value and the nearest legal one.
    """
    work, scope = _work_and_scope(training, mode)
    for option, given in (("--compare-with", compare_with), ("--baseline", baseline)):
        if given and scope != SESSION:
            raise ConfigurationError(
                f"{option} compares the network's speed, and --mode {scope} measures something else",
                f"drop {option}, or use --mode {work}",
            )
    if max_regression is not None and baseline is None:
        raise ConfigurationError(
            f"--max-regression {shown_value(max_regression)} needs something to compare with",
            "add --baseline report.json",
        )
    if system is not None:
        from ipucnn.hardware import get_system

        system = get_system(system).name
    return BenchmarkSettings(
        mode=work,
        scope=scope,
        limits=_limits(executions, min_time, max_time, compare_with),
        system=system,
        profile=_profile(system_profile, system) if system_profile is not None else None,
        baseline=expand(baseline) if baseline is not None else None,
        max_regression=_share(max_regression or "5%"),
    )


def _work_and_scope(training: Optional[bool], mode: Optional[str]) -> Tuple[str, str]:
    """Returns (TRAINING or INFERENCE, scope) of ``--mode`` and ``--training`` or ``--inference``."""
    flag = None if training is None else TRAINING if training else INFERENCE
    if mode is None:
        return flag or INFERENCE, SESSION
    name = mode.lower().replace("_", "-")
    if name not in MODES:
        raise ConfigurationError(
            f"--mode {shown_value(mode)}: there is no such mode",
            did_you_mean(mode, MODES) or f"use one of {', '.join(MODES)}",
        )
    if name in (DATA, END_TO_END):
        return flag or TRAINING, name
    if flag not in (None, name):
        raise ConfigurationError(f"--mode {name} and --{flag} contradict each other", "drop one of them")
    return name, SESSION


def _limits(
    executions: int, min_time_s: Optional[float], max_time_s: float, compare_with: Optional[str]
) -> Limits:
    """Returns the limits; the command line has refused values that are no number of executions or seconds."""
    if compare_with is not None and compare_with.lower() != KERAS:
        raise ConfigurationError(
            f"--compare-with {shown_value(compare_with)}: there is no such rival",
            did_you_mean(compare_with, (KERAS,)) or f"use --compare-with {KERAS}",
        )
    if min_time_s is None:
        min_time_s = min(DEFAULTS.min_time_s, max_time_s)
    if max_time_s < min_time_s:
        raise ConfigurationError(
            f"--max-time {max_time_s:g} is less than --min-time {min_time_s:g}",
            f"use --max-time {min_time_s:g}",
        )
    return Limits(
        min_executions=executions,
        min_time_s=min_time_s,
        max_time_s=max_time_s,
        max_warmup_s=DEFAULTS.max_warmup_s,
        execution_s=COMPARED_EXECUTION_S if compare_with is not None else DEFAULTS.execution_s,
        compare_with=KERAS if compare_with is not None else None,
    )


def _profile(path: str, system: Optional[str]) -> SystemProfile:
    """Returns the profile of ``--system-profile``, checked against the system."""
    from ipucnn.hardware import SYSTEMS
    from ipucnn.planning.calibration import calibrated_system, read_profile

    profile = read_profile(expand(path))
    calibrated_system(profile, SYSTEMS[system or profile.system])
    return profile


def _share(text: str) -> float:
    """Returns ``5%`` or ``0.05`` as a share."""
    percent = text.strip().endswith("%")
    try:
        share = values.parse_float(text.strip().rstrip("%").strip()) / (100.0 if percent else 1.0)
    except values.BadValue:
        share = -1.0
    if not 0 <= share < 1:
        raise ConfigurationError(
            f"--max-regression {shown_value(text)}: must be a share below 1 or a percentage below 100%",
            "--max-regression 5%",
        )
    return share


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
        fused: the number of fused micro-batches if it is prescribed.
        optimizer, learning_rate, loss_name: the training settings; the rate stays the same.
        baseline: the earlier report to compare with.
    """

    resolved: Resolved
    settings: BenchmarkSettings
    instances: ProcessGroup
    setup: run_setup.Setup
    seed: int
    program: Program
    steps: Optional[int]
    fused: Optional[int]
    optimizer: OptimizerSettings
    learning_rate: float
    loss_name: str
    baseline: Optional[BenchmarkReport]

    @property
    def config(self) -> RunConfig:
        """Returns the configuration's values."""
        return self.resolved.config

    @property
    def kind(self) -> str:
        """Returns the source of the images, a key of ``DATA_KINDS``."""
        return data_kind(self.config)

    def make_request(self) -> Request:
        """Returns the part of the report that is known before the network is built; it starts now."""
        info, kind, settings = self.setup.source.info, self.kind, self.settings
        return Request(
            model=self.resolved.record.name,
            preset=self.resolved.preset,
            mode=settings.mode,
            scope=settings.scope,
            started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            seed=self.seed,
            input_shape=list(self.setup.input_shape),
            data=DataFacts(
                kind=kind,
                description=DATA_KINDS[kind],
                name=info.name,
                location=info.location,
                num_images=info.num_train,
            ),
            settings=settings.limits,
            options=_compared_options(self.config),
            program=self.program.to_dict(),
        )


def data_kind(config: RunConfig) -> str:
    """Returns the source of a run's images: a key of ``DATA_KINDS``."""
    if config.device_generated_data or config.synthetic_data == "ipu":
        return DEVICE_GENERATED
    is_noise = config.host_generated_data or config.synthetic_data == "host" or config.dataset == "random"
    return HOST_GENERATED if is_noise else REAL


def make_job(resolved: Resolved, settings: BenchmarkSettings) -> Job:
    """Checks everything that can be checked without TensorFlow, and opens the data.

    Raises:
        UserError: the configuration, the baseline or the data are wrong.
    """
    from ipucnn.sessions.factory import check_device

    instances = find_instances()
    check_group(instances, resolved.config)
    _check_settings(settings, data_kind(resolved.config), instances.size)
    if not settings.training:
        # Nothing is accumulated; a pipeline is filled with as many micro-batches as an execution has.
        config = replace(resolved.config, gradient_accumulation_count=None, global_batch_size=None)
        resolved = replace(resolved, config=config)
    config = resolved.config
    check_device(config.device)
    loss_name = run_setup.loss_name(config, resolved.record.task)
    seed = config.seed if config.seed is not None else random.SystemRandom().randrange(2**31)
    layout = make_layout(config, resolved.origins["num_replicas"].is_typed)
    check_rules(Facts(resolved, layout, instances), RULES if settings.training else HOST_SESSION_RULES)
    # The execution length of a network's own preset is for another device; here executions are as long as time allows.
    steps = config.steps_per_execution if resolved.origins["steps_per_execution"].by_user else None
    updates = _prescribed_updates(config, steps) if settings.training else 1
    program = program_of(config, seed, instances, updates)
    if program.num_stages > 1:
        from ipucnn.planning.splits import check_named_splits

        check_named_splits(resolved, program)
    _check_on_ipus(program, config, settings, instances)
    if config.fused_micro_batches is not None:
        _check_fused(program, config.fused_micro_batches, settings, steps, instances)
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
    job = Job(
        resolved=resolved,
        settings=settings,
        instances=instances,
        setup=run_setup.prepare(resolved, seed, source=source),
        seed=seed,
        program=program,
        steps=steps,
        fused=config.fused_micro_batches,
        optimizer=optimizer,
        learning_rate=learning_rate,
        loss_name=loss_name,
        baseline=baseline,
    )
    run_setup.build_options(job.setup)
    return _like_baseline(job, baseline) if baseline is not None else job


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


def _check_settings(settings: BenchmarkSettings, kind: str, num_instances: int) -> None:
    """Refuses options that cannot be measured.

    These are modes that measure an absent input pipeline, and options for one process under several instances of
    ``poprun``, because each instance would measure only its own host.
    """
    if settings.scope != SESSION and kind == DEVICE_GENERATED:
        raise ConfigurationError(
            f"--device-generated-data has no input pipeline, which --mode {settings.scope} measures",
            "drop it, and give --host-generated-data or a data set",
        )
    alone = {
        f"--mode {settings.scope}": settings.scope != SESSION,
        f"--compare-with {settings.compare_with}": settings.compare_with is not None,
        f"--baseline {settings.baseline}": settings.baseline is not None,
    }
    for option, given in alone.items():
        if given and num_instances > 1:
            raise ConfigurationError(
                f"{option} is for one process, and poprun started {num_instances} instances",
                "drop it, or start the benchmark without poprun",
            )


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


def _check_fused(
    program: Program, given: int, settings: BenchmarkSettings, steps: Optional[int], instances: ProcessGroup
) -> None:
    """Checks that --fused-micro-batches divides an execution, or in training a weight update."""
    if settings.training:
        check_fused(program, given)
        return
    whole = program.num_replicas // instances.size * (steps or given)
    if whole % given:
        near = min(divisors(whole), key=lambda d: abs(d - given))
        raise ConfigurationError(
            f"--fused-micro-batches {given} does not divide the {whole} micro-batches of an execution",
            f"use --fused-micro-batches {near}",
        )


def _like_baseline(job: Job, baseline: BenchmarkReport) -> Job:
    """Returns the job with the baseline's number of fused micro-batches.

    Raises:
        ConfigurationError: the baseline measured other work.
        DataError: the baseline is damaged.
    """
    from ipucnn.benchmarking.baseline import check_same_request

    program, where, execution = job.program, str(job.settings.baseline), baseline.execution
    assert execution is not None
    check_same_request(baseline, where, job.make_request())
    fused, whole = execution.fused_micro_batches, program.global_batch_size
    if job.settings.training:
        check_fused(program, fused)
    else:
        whole = program.micro_batch_size * fused
    if execution.samples % whole:
        raise DataError(
            f"{where} is damaged: executions of {execution.samples} samples are no multiple of {whole}",
            "make it again",
        )
    return replace(job, fused=fused)


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
