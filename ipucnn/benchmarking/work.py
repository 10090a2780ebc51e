"""Compiles the timed work of a benchmark: the session, the input pipeline, and what they are compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import List, Optional, Tuple

import numpy as np

from ipucnn.aliases import KerasModel, TfDataset
from ipucnn.benchmarking.benchmark import Benchmark
from ipucnn.benchmarking.contenders import (
    KerasInference,
    KerasTraining,
    SessionInference,
    SessionTraining,
    keras_model,
)
from ipucnn.benchmarking.input_pipeline import PipelinePart, images_only, part_names
from ipucnn.benchmarking.measure import Contender
from ipucnn.benchmarking.settings import DATA, DEVICE_GENERATED, END_TO_END
from ipucnn.datasets import pipeline
from ipucnn.runs import setup as run_setup
from ipucnn.sessions.session import CompilationReport, Session
from ipucnn.training.losses import Loss

# Micro-batches per replica from which inference may fuse, if executions are not prescribed.
_OPEN_STEPS = 64
# On IPUs every length of an execution is a program of its own, compiled for minutes.  So there is one, long enough.
_IPU_UPDATES = 32


@dataclass(frozen=True)
class Work:
    """The timed work.

    Attributes:
        benchmark: the benchmark with its program as it was compiled.
        compilation: the compilation of the network, None if the input pipeline is measured alone.
        contenders: the work to time; the session, or the whole input pipeline, comes first.
    """

    benchmark: Benchmark
    compilation: Optional[CompilationReport]
    contenders: Tuple[Contender, ...]


def compile_work(benchmark: Benchmark, session: Session, model: KerasModel) -> Work:
    """Compiles the work that a benchmark measures.

    Args:
        benchmark: the benchmark, with the splits of its program filled in.
        session: the session of the device.
        model: the built network.
    """
    settings = benchmark.settings
    if settings.scope == DATA:
        # The whole pipeline comes first: progress, and how long to measure, follow the first contender.
        parts = _pipeline_parts(benchmark, benchmark.program.micro_batch_size)
        return Work(benchmark, None, tuple(reversed(parts)))
    compile_ = _compile_training if settings.training else _compile_inference
    work = compile_(benchmark, session, model)
    benchmark, contenders = work.benchmark, work.contenders
    if settings.compare_with is not None:
        contenders += (keras_contender(benchmark, model),)
    if settings.scope == END_TO_END:
        pipeline_alone = _pipeline_parts(benchmark, benchmark.program.samples_per_fused_batch)[-1]
        contenders += (_on_constant_batch(benchmark, session), pipeline_alone)
    return replace(work, contenders=contenders)


def dataset(benchmark: Benchmark, samples_per_element: int, input_range: Optional[str] = None) -> TfDataset:
    """Returns infinite training batches; without order or augmentation in inference.

    Args:
        input_range: the range of the images; None: the session's.
    """
    batches = _pipeline(benchmark, samples_per_element, input_range=input_range)
    return pipeline.constant_batch(batches) if benchmark.kind == DEVICE_GENERATED else batches


def _pipeline(
    benchmark: Benchmark, samples_per_element: int, until: str = "batch", input_range: Optional[str] = None
) -> TfDataset:
    """Returns the input pipeline up to one of its parts; with several instances, this instance's share of batches."""
    config, setup, training = benchmark.config, benchmark.setup, benchmark.settings.training
    return pipeline.train_batches(
        setup.source,
        pipeline.Stream(
            batch_size=samples_per_element,
            samples_per_epoch=max(1, setup.source.info.num_train),
            input_shape=setup.input_shape,
            input_range=input_range or setup.input_range,
            augment=config.augment and training,
            seed=benchmark.seed,
            shuffle=config.shuffle and training,
            num_parallel=config.pipeline_num_parallel,
            output_shape=setup.output_shape,
            until=until,
            shard=(benchmark.instances.size, benchmark.instances.rank),
        ),
    )


def _buffered(benchmark: Benchmark, samples_per_element: int) -> int:
    """Returns the most elements that the input pipeline has ready or in progress."""
    num_parallel = benchmark.config.pipeline_num_parallel
    return pipeline.buffered_elements(samples_per_element, benchmark.setup.input_shape, num_parallel)


def _pipeline_parts(benchmark: Benchmark, samples_per_element: int) -> List[PipelinePart]:
    """Returns the input pipeline up to each of its parts."""
    make = partial(_pipeline, benchmark, samples_per_element)
    buffered = _buffered(benchmark, samples_per_element)
    names = part_names(benchmark.config.augment and benchmark.settings.training)
    return [PipelinePart(name, make, buffered) for name in names]


def _lead(benchmark: Benchmark) -> int:
    """Returns the elements to compute untimed, because the pipeline fills its buffers during the turns of others."""
    settings = benchmark.settings
    is_alone = settings.scope != END_TO_END and settings.compare_with is None
    if is_alone or benchmark.kind == DEVICE_GENERATED:
        return 0
    return _buffered(benchmark, benchmark.program.samples_per_fused_batch)


def _compile_training(benchmark: Benchmark, session: Session, model: KerasModel) -> Work:
    compilation = session.compile(
        model,
        benchmark.program,
        benchmark.optimizer,
        Loss(benchmark.loss_name, benchmark.config.label_smoothing),
        lambda updates: np.full(np.shape(updates), benchmark.learning_rate, np.float32),
        lambda first_update, samples_per_element: dataset(benchmark, samples_per_element),
    )
    assert session.program is not None
    compiled = replace(benchmark, program=session.program)
    fixed = None if benchmark.steps is None else session.program.weight_updates_per_execution
    if fixed is None and session.device.kind == "ipu":
        fixed = _IPU_UPDATES
    batches = dataset(compiled, compiled.program.samples_per_fused_batch)
    return Work(compiled, compilation, (SessionTraining(session, batches, fixed, lead=_lead(compiled)),))


def _compile_inference(benchmark: Benchmark, session: Session, model: KerasModel) -> Work:
    p = benchmark.program.with_fused(fused_in_inference(benchmark, session, model))
    benchmark = replace(benchmark, program=p)
    element = p.samples_per_fused_batch
    compilation = session.compile_prediction(model, (element, *benchmark.setup.input_shape))
    contender = SessionInference(
        session,
        images_only(dataset(benchmark, element)),
        p.micro_batch_size,
        p.fused_micro_batches,
        None if benchmark.steps is None else benchmark.steps * p.num_replicas,
        lead=_lead(benchmark),
        num_instances=benchmark.instances.size,
    )
    return Work(benchmark, replace(compilation, fused_micro_batches=p.fused_micro_batches), (contender,))


def fused_in_inference(benchmark: Benchmark, session: Session, model: KerasModel) -> int:
    """Returns the number of fused micro-batches in inference: as requested, else as many as suit the memory."""
    from ipucnn.sessions.host.division import Capacity, activation_bytes_per_sample, choose_fused

    if benchmark.fused is not None:
        return benchmark.fused
    p = benchmark.program
    micro_batches = p.num_replicas // benchmark.instances.size * (benchmark.steps or _OPEN_STEPS)
    memory = session.device.memory_bytes if session.device.kind == "cpu" else 0
    alike = replace(p, num_replicas=1, gradient_accumulation_count=micro_batches, dbn_replica_group_size=1)
    return choose_fused(alike, Capacity(1, 1, memory, activation_bytes_per_sample(model)))


def _on_constant_batch(benchmark: Benchmark, session: Session) -> Contender:
    """Returns the session's work on a constant batch, without input pipeline."""
    p = benchmark.program
    batch = pipeline.constant_batch(_pipeline(benchmark, p.samples_per_fused_batch))
    contender: Contender
    if benchmark.settings.training:
        contender = SessionTraining(session, batch)
    else:
        contender = SessionInference(session, images_only(batch), p.micro_batch_size, p.fused_micro_batches)
    contender.name = "constant batch"
    return contender


def keras_contender(benchmark: Benchmark, model: KerasModel) -> Contender:
    """Returns plain Keras with the same work."""
    p, config = benchmark.program, benchmark.config
    compiled, accumulated, description = keras_model(
        model,
        benchmark.optimizer,
        benchmark.learning_rate,
        Loss(benchmark.loss_name, config.label_smoothing),
        p.num_micro_batches,
    )
    # The images' range at the network's input: only the session leaves preprocessing to the device.
    batches = dataset(
        benchmark, p.micro_batch_size, run_setup.input_range(config.normalise, benchmark.resolved.record)
    )
    contender: Contender
    if benchmark.settings.training:
        micro_batches = p.num_micro_batches if accumulated > 1 else 1
        contender = KerasTraining(compiled, batches, micro_batches, p.micro_batch_size)
    else:
        contender = KerasInference(compiled, images_only(batches), p.micro_batch_size)
        description = f"Keras {description.split()[1]} predict"
    contender.description = description
    return contender
