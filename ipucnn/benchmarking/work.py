"""Compiles the timed work of a job: the session, the input pipeline, and what they are compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import List, Optional, Tuple, Union

import numpy as np

from ipucnn.aliases import KerasModel, MemoryAdvice, TfDataset
from ipucnn.benchmarking.contenders import (
    KerasInference,
    KerasTraining,
    SessionInference,
    SessionTraining,
    keras_model,
)
from ipucnn.benchmarking.input_pipeline import PipelinePart, images_only, part_names
from ipucnn.benchmarking.job import Job
from ipucnn.benchmarking.rounds import Contender
from ipucnn.benchmarking.settings import DATA, DEVICE_GENERATED, END_TO_END
from ipucnn.datasets import pipeline
from ipucnn.datasets.pixels import InputRange
from ipucnn.runs import setup as run_setup
from ipucnn.sessions.session import CompilationReport, Predictor, Session, Trainer, TrainingTask
from ipucnn.training.losses import Loss
from ipucnn.training.program import BuiltProgram, Layers

# Micro-batches per replica from which inference may fuse, if executions are not prescribed.
_OPEN_STEPS = 64
# On IPUs every length of an execution is a program of its own, compiled for minutes.  So there is one, long enough.
_IPU_UPDATES = 32


@dataclass(frozen=True)
class Work:
    """The timed work.

    Attributes:
        program: the program as it was compiled.
        compilation: the compilation of the network, None if the input pipeline is measured alone.
        contenders: the work to time; the session, or the whole input pipeline, comes first.
        computing: the trainer or predictor, None if the input pipeline is measured alone.
    """

    program: BuiltProgram
    compilation: Optional[CompilationReport]
    contenders: Tuple[Contender, ...]
    computing: Union[Trainer, Predictor, None] = None

    @property
    def cached(self) -> Optional[bool]:
        """Whether the programs of IPUs came from the executable cache; None if nothing was compiled."""
        if self.compilation is None:
            return None
        latest = self.computing.compilation if isinstance(self.computing, Trainer) else self.compilation
        return latest.cached


def compile_work(
    job: Job,
    layers: Layers,
    session: Session,
    model: KerasModel,
    memory_advice: Optional[MemoryAdvice] = None,
) -> Work:
    """Compiles the work that a job measures.

    Args:
        job: the job.
        layers: the layers that open stages.
        session: the session of the device.
        model: the built network.
        memory_advice: the function that suggests changes if the program does not fit.
    """
    settings = job.settings
    if settings.scope == DATA:
        # The whole pipeline comes first: progress, and how long to measure, follow the first contender.
        parts = _pipeline_parts(job, job.program.micro_batch_size)
        return Work(BuiltProgram.of(job.program, layers, 1), None, tuple(reversed(parts)))
    compile_ = _compile_training if settings.training else _compile_inference
    work = compile_(job, layers, session, model, memory_advice)
    contenders = work.contenders
    if settings.compare_with is not None:
        contenders += (keras_contender(job, work.program, model),)
    if settings.scope == END_TO_END:
        element = work.program.fused_micro_batches * work.program.micro_batch_size
        constant = pipeline.constant_batch(_pipeline(job, element))
        contender: Contender
        if isinstance(work.computing, Trainer):
            contender = SessionTraining(work.computing, constant)
        else:
            assert work.computing is not None
            contender = SessionInference(session, work.computing, images_only(constant), work.program)
        contender.name = "constant batch"
        contenders += (contender, _pipeline_parts(job, element)[-1])
    return replace(work, contenders=contenders)


def dataset(
    job: Job,
    samples_per_element: int,
    input_range: Optional[InputRange] = None,
    shard: Tuple[int, int] = (1, 0),
) -> TfDataset:
    """Returns infinite training batches; without order or augmentation in inference.

    Args:
        input_range: the range of the images; None: the session's.
        shard: this process's share of the batches, of a Division.
    """
    batches = _pipeline(job, samples_per_element, input_range=input_range, shard=shard)
    return pipeline.constant_batch(batches) if job.kind == DEVICE_GENERATED else batches


def _pipeline(
    job: Job,
    samples_per_element: int,
    until: str = "batch",
    input_range: Optional[InputRange] = None,
    shard: Tuple[int, int] = (1, 0),
) -> TfDataset:
    """Returns the input pipeline up to one of its parts, with a share of the batches."""
    config, setup, training = job.config, job.setup, job.settings.training
    return pipeline.train_batches(
        setup.source,
        pipeline.Stream(
            batch_size=samples_per_element,
            samples_per_epoch=max(1, setup.source.info.num_train),
            input_shape=setup.input_shape,
            input_range=input_range or setup.input_range,
            augment=config.augment and training,
            seed=job.seed,
            shuffle=config.shuffle and training,
            num_parallel=config.pipeline_num_parallel,
            output_shape=setup.output_shape,
            until=until,
            shard=shard,
        ),
    )


def _buffered(job: Job, samples_per_element: int) -> int:
    """Returns the most elements that the input pipeline has ready or in progress."""
    num_parallel = job.config.pipeline_num_parallel
    return pipeline.buffered_elements(samples_per_element, job.setup.input_shape, num_parallel)


def _pipeline_parts(job: Job, samples_per_element: int) -> List[PipelinePart]:
    """Returns the input pipeline up to each of its parts."""
    make = partial(_pipeline, job, samples_per_element)
    buffered = _buffered(job, samples_per_element)
    names = part_names(job.config.augment and job.settings.training)
    return [PipelinePart(name, make, buffered) for name in names]


def _lead(job: Job, samples_per_element: int) -> int:
    """Returns the elements to compute untimed, because the pipeline fills its buffers during the turns of others."""
    is_alone = job.settings.scope != END_TO_END and job.settings.compare_with is None
    return 0 if is_alone or job.kind == DEVICE_GENERATED else _buffered(job, samples_per_element)


def _compile_training(
    job: Job, layers: Layers, session: Session, model: KerasModel, memory_advice: Optional[MemoryAdvice]
) -> Work:
    division = session.divide(model, job.program, job.fused)
    p, fixed = BuiltProgram.of(job.program, layers, division.fused_micro_batches), None
    task = TrainingTask(
        model,
        p,
        division,
        job.optimizer,
        Loss(job.loss_name, job.config.label_smoothing),
        lambda updates: np.full(np.shape(updates), job.learning_rate, np.float32),
        lambda first_update, samples_per_element: dataset(job, samples_per_element, shard=division.shard),
        memory_advice,
    )
    trainer = session.trainer(task)
    if job.steps is not None:
        fixed = p.weight_updates_per_execution
    elif session.device.kind == "ipu":
        fixed = _IPU_UPDATES
    element = division.samples_per_group
    contender = SessionTraining(
        trainer, dataset(job, element, shard=division.shard), fixed, _lead(job, element)
    )
    return Work(p, trainer.compilation, (contender,), trainer)


def _compile_inference(
    job: Job, layers: Layers, session: Session, model: KerasModel, memory_advice: Optional[MemoryAdvice]
) -> Work:
    micro_batches = job.program.num_replicas // job.instances.size * (job.steps or _OPEN_STEPS)
    division = session.divide_inference(model, job.program, micro_batches, job.fused)
    p = BuiltProgram.of(job.program, layers, division.fused_micro_batches)
    element = division.samples_per_group
    predictor = session.predictor(model, memory_advice, shares=False)
    compilation = predictor.compile((element, *job.setup.input_shape))
    contender = SessionInference(
        session,
        predictor,
        images_only(dataset(job, element, shard=division.shard)),
        p,
        None if job.steps is None else job.steps * p.num_replicas,
        lead=_lead(job, element),
        num_instances=job.instances.size,
    )
    compilation = replace(compilation, fused_micro_batches=p.fused_micro_batches)
    return Work(p, compilation, (contender,), predictor)


def keras_contender(job: Job, p: BuiltProgram, model: KerasModel) -> Contender:
    """Returns plain Keras with the same work."""
    config = job.config
    compiled, accumulated, description = keras_model(
        model,
        job.optimizer,
        job.learning_rate,
        Loss(job.loss_name, config.label_smoothing),
        p.num_micro_batches,
    )
    # The images' range at the network's input: only the session leaves preprocessing to the device.
    name = run_setup.range_name(config.normalise, job.resolved.record)
    batches = dataset(job, p.micro_batch_size, job.setup.in_range(name).input_range)
    contender: Contender
    if job.settings.training:
        micro_batches = p.num_micro_batches if accumulated > 1 else 1
        contender = KerasTraining(compiled, batches, micro_batches, p.micro_batch_size)
    else:
        contender = KerasInference(compiled, images_only(batches), p.micro_batch_size)
        description = f"Keras {description.split()[1]} predict"
    contender.description = description
    return contender
