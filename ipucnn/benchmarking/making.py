"""The sides that a benchmark measures, compiled: the session's, Keras', and the input pipeline's stages.

``work`` is the ``Benchmark``: its settings and set-up, and the Program, which compiling completes.
"""

import functools
import time
from dataclasses import asdict, replace
from typing import Any, List, Optional, Tuple

from ipucnn.benchmarking.report import BenchmarkReport
from ipucnn.benchmarking.settings import DATA, DEVICE_GENERATED, END_TO_END

# Micro-batches per replica from which inference may fuse, where executions are not prescribed.
_OPEN_STEPS = 64
# On IPUs every length of an execution is a program of its own, compiled for minutes: one length, long enough.
_IPU_UPDATES = 32


def make_sides(
    work: Any, session: Any, model: Any, result: BenchmarkReport
) -> Tuple[List[Any], Optional[Tuple[str, str]]]:
    """The sides to measure, and (name, description) of the one that the session is compared with."""
    if work.settings.scope == DATA:
        return list(reversed(_stages(work, work.program.micro_batch_size))), None
    measured, rival = compile_sides(work, session, model, result)
    if work.settings.scope == END_TO_END:
        element = work.program.fused_micro_batches * work.program.micro_batch_size
        measured += [_constant(work, session, element), _stages(work, element)[-1]]
    return measured, rival


def _stages(work: Any, samples_per_element: int) -> List[Any]:
    """The input pipeline up to each of its stages."""
    from ipucnn.benchmarking.input_pipeline import PipelineStage, stage_names

    augment = work.resolved.config.augment and work.settings.training
    buffered = _buffered(work, samples_per_element)
    return [
        PipelineStage(name, functools.partial(work.pipeline, samples_per_element), buffered)
        for name in stage_names(augment)
    ]


def _buffered(work: Any, samples_per_element: int) -> int:
    from ipucnn.datasets.pipeline import buffered_elements

    config = work.resolved.config
    return buffered_elements(samples_per_element, work.setup.input_shape, config.pipeline_num_parallel)


def compile_sides(
    work: Any, session: Any, model: Any, result: BenchmarkReport
) -> Tuple[List[Any], Optional[Tuple[str, str]]]:
    """The sides to measure, and (name, description) of the one that the session is compared with."""
    from ipucnn.benchmarking import contenders as sides

    started = time.perf_counter()
    if work.settings.training:
        from ipucnn.training.losses import make_loss

        loss = make_loss(work.loss_name, work.resolved.config.label_smoothing)
        compilation = sides.compile_session(
            session, model, work.program, work.optimizer, loss, work.learning_rate, work.dataset
        )
        work.program = session.program
        element = work.program.fused_micro_batches * work.program.micro_batch_size
        fixed = None if work.steps is None else work.program.weight_updates_per_execution
        if fixed is None and session.device.kind == "ipu":
            fixed = _IPU_UPDATES
        side: Any = sides.SessionTraining(session, work.dataset(0, element), fixed, lead=_lead(work, element))
    else:
        work.program = work.program.with_fused(fused_in_inference(work, session, model))
        element = work.program.fused_micro_batches * work.program.micro_batch_size
        compilation = session.compile_prediction(model, (element, *work.setup.input_shape))
        compilation = replace(compilation, fused_micro_batches=work.program.fused_micro_batches)
        images = sides.images_only(work.dataset(0, element))
        side = sides.SessionInference(
            session,
            images,
            work.program.micro_batch_size,
            work.program.fused_micro_batches,
            None if work.steps is None else work.steps * work.program.num_replicas,
            lead=_lead(work, element),
        )
    result.device = asdict(session.device)
    result.program = work.program.to_dict()
    result.compilation = {
        **{
            k: v
            for k, v in compilation.to_dict().items()
            if k not in ("device", "first_update_s", "stages_s")
        },
        "first_execution_s": None,
        "cached": None,  # TensorFlow keeps no executables
        "predicted_memory": [
            {"system": p["system"], "precision": p["precision"], "ipus": p["memory"]}
            for p in result.predicted
        ],
    }
    result.phases["trace_s"] = compilation.trace_s
    result.phases["prepare_s"] = time.perf_counter() - started
    if work.settings.compare_with is None:
        return [side], None
    rival, description = keras_side(work, model)
    return [side, rival], ("keras", description)


def _lead(work: Any, samples_per_element: int) -> int:
    """Elements to compute off the clock: while others have their turn, the pipeline fills its buffers."""
    alone = work.settings.scope != END_TO_END and work.settings.compare_with is None
    return 0 if alone or work.kind == DEVICE_GENERATED else _buffered(work, samples_per_element)


def _constant(work: Any, session: Any, samples_per_element: int) -> Any:
    """The session's work on a constant batch, without input pipeline."""
    from ipucnn.benchmarking import contenders as sides

    batch = sides.constant_batch(work.pipeline(samples_per_element))
    if work.settings.training:
        side: Any = sides.SessionTraining(session, batch)
    else:
        p = work.program
        images = sides.images_only(batch)
        side = sides.SessionInference(session, images, p.micro_batch_size, p.fused_micro_batches)
    side.name = "constant batch"
    return side


def fused_in_inference(work: Any, session: Any, model: Any) -> int:
    from ipucnn.sessions.host.fusion import activation_bytes_per_sample, choose_fused

    p = work.program
    if work.fused is not None:
        return work.fused
    micro_batches = p.num_replicas * (work.steps or _OPEN_STEPS)
    memory = session.device.memory_bytes if session.device.kind == "cpu" else 0
    return choose_fused(micro_batches, p.micro_batch_size, 1, activation_bytes_per_sample(model), memory)


def keras_side(work: Any, model: Any) -> Tuple[Any, str]:
    from ipucnn.benchmarking import contenders as sides

    p, config = work.program, work.resolved.config
    compiled, accumulated, description = sides.keras_model(
        model,
        work.optimizer,
        work.learning_rate,
        work.loss_name,
        config.label_smoothing,
        p.num_micro_batches,
    )
    batches = work.dataset(0, p.micro_batch_size)
    if work.settings.training:
        micro_batches = p.num_micro_batches if accumulated > 1 else 1
        return sides.KerasTraining(compiled, batches, micro_batches, p.micro_batch_size), description
    images = sides.images_only(batches)
    description = f"Keras {description.split()[1]} predict"
    return sides.KerasInference(compiled, images, p.micro_batch_size), description
