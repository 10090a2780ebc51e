"""Operations of ``tensorflow.python.ipu``: over replicas, on images, from a user's library."""

import numbers
import os
import types
from typing import Any, Dict, List

import numpy as np
import tensorflow as tf

from . import config, extension, rounding
from .errors import failed, internal, invalid
from .facts import FACTS, like, module


def _cross_replica_ops(machine: Any) -> types.ModuleType:
    @like("ipu.ops.cross_replica_ops.cross_replica_mean")
    def cross_replica_mean(x: Any, replica_group_size: Any, name: Any) -> Any:
        if replica_group_size is not None:
            raise NotImplementedError("the double reduces over all replicas")
        if machine.replicas is None:
            raise NotImplementedError("the double reduces in a weight update, and in the metrics after it")
        return machine.replicas.reduced(x, True)

    return module("cross_replica_ops", cross_replica_mean=cross_replica_mean)


@like("ipu.ops.image_ops.normalise_image")
def normalise_image(image: Any, channel_offsets: Any, channel_scales: Any, scale: Any, name: Any) -> Any:
    """Checks images as ops/image_ops.py does, then as kernels/popops/normalise_image.cc does when it compiles."""
    if image.dtype not in [tf.as_dtype(word) for word in FACTS["image_types"]]:
        raise TypeError("the image must be float16, float32 or uint8")
    if not isinstance(scale, (numbers.Real, np.number)):
        raise TypeError(f"Expected float for argument 'scale' not {scale!r}.")
    # 8-bit pixels become halves, whatever type the network computes in.
    result_type = tf.float16 if image.dtype == tf.uint8 else image.dtype

    def constant(values: Any) -> Any:
        values = tf.cast(values, result_type) if tf.is_tensor(values) else values
        values = tf.convert_to_tensor(values, dtype=result_type)
        if tf.get_static_value(values) is None:
            raise invalid("offsets and scales must be compile-time constants")
        return values

    offsets, scales = constant(channel_offsets), constant(channel_scales)
    if image.shape[-1] != 3:
        raise invalid(f"The image has {image.shape[-1]} channels, expected 3.")
    if offsets.shape != (3,) or scales.shape != (3,):
        raise invalid("offsets and scales must be as many as the image's channels")
    normalised = (tf.cast(image, result_type) * tf.cast(float(scale), result_type) - offsets) * scales
    return tf.pad(normalised, [[0, 0]] * (len(image.shape) - 1) + [[0, 1]])


def _strings(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, (str, bytes)):
            raise TypeError(f"Expected string for argument '{name}' not {value!r}.")


def _custom_ops(machine: Any) -> types.ModuleType:
    @like("ipu.ops.custom_ops.precompiled_user_op")
    def precompiled_user_op(
        inputs: Any,
        library_path: Any,
        gp_path: Any,
        outs: Any,
        name: Any,
        op_name: Any,
        separate_gradients: Any,
        inputs_with_gradients: Any,
        attributes: Any,
        gradient_attributes: Any,
    ) -> Any:
        outs = {"output_types": [], "output_shapes": []} if outs is None else outs
        if inputs_with_gradients is None:
            inputs_with_gradients = range(len(inputs))
        list(inputs_with_gradients)
        for text in (attributes, gradient_attributes):
            if text and not isinstance(text, str):
                raise ValueError(f"Expected attributes to be a 'str' type, but was {type(text)}.")
        _strings(library_path=library_path, gp_path=gp_path, op_name=op_name)
        if not isinstance(separate_gradients, bool):
            raise TypeError(f"Expected bool for argument 'separate_gradients' not {separate_gradients!r}.")
        if not isinstance(inputs, (list, tuple)):
            raise TypeError("Expected list for 'input' argument to 'IpuUserOp' Op")

        def operation(*, output_types: Any, output_shapes: Any) -> List[Any]:
            return _run_user_op(
                machine, list(inputs), library_path, op_name, attributes or "", output_types, output_shapes
            )

        return operation(**outs)

    return module("custom_ops", precompiled_user_op=precompiled_user_op)


def _run_user_op(
    machine: Any, inputs: Any, library: Any, name: str, attributes: str, types_: Any, shapes: Any
) -> List[Any]:
    """Runs a user operation as kernels/poputil/user_operation.cc: looks library and symbol up at compile time."""
    if not isinstance(types_, (list, tuple)) or not isinstance(shapes, (list, tuple)):
        raise TypeError("Expected list for argument 'output_types' or 'output_shapes'")
    types_, shapes = [tf.as_dtype(t) for t in types_], [tf.TensorShape(s) for s in shapes]
    if len(types_) != len(shapes):
        raise ValueError(f"{len(types_)} output types for {len(shapes)} output shapes")
    if not all(shape.is_fully_defined() for shape in shapes):
        raise invalid("output shapes must be fully defined")
    if not os.path.exists(library):
        raise invalid(f"Couldn't read shared library: {library}")
    if name not in machine.user_ops:
        raise invalid(f"Couldn't read {name} symbol from library")
    if machine.is_precompiling and name in machine.unhashable_ops:
        raise failed(
            "IPU devices have been configured for pre-compilation, however the program contains custom user operation "
            f"{name} which cannot be safely pre-compiled."
        )
    machine.note("precompiled_user_op", name=name, attributes=attributes, inputs=[i.shape for i in inputs])

    @tf.custom_gradient
    def run(*tensors: Any) -> Any:
        outputs = machine.user_ops[name](list(tensors), attributes)
        declared = list(zip(types_, shapes))
        if [(f.dtype, f.shape) for f in outputs] != declared:
            raise internal(f"{name} builds other outputs than {declared}")

        def gradient(*_: Any) -> Any:
            # The driver looks up another function in the library; no test needs one that computes so far.
            raise invalid(f"Couldn't read {name}_grad symbol from library")

        return [tf.identity(f) for f in outputs], gradient

    results = run(*inputs)
    return list(results) if isinstance(results, (list, tuple)) else [results]


def build(machine: Any) -> Dict[str, types.ModuleType]:
    """Builds the modules, which are only reachable as attributes of ``tensorflow.python.ipu``."""
    return {
        "cross_replica_ops": _cross_replica_ops(machine),
        "scopes": module("scopes", stochastic_rounding=rounding.stochastic_rounding),
        "image_ops": module("image_ops", normalise_image=normalise_image),
        "custom_ops": _custom_ops(machine),
        "pipelining_ops": module(
            "pipelining_ops",
            PipelineSchedule=config.ENUMS["PipelineSchedule"],
            RecomputationMode=config.ENUMS["RecomputationMode"],
            PipelineStageOptions=extension.make_stage_options,
        ),
    }
