"""Modules, functions, operations and layers."""

import importlib
import tempfile
from pathlib import Path
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from .cases import Group
from .quoted import ENUMS, params_of

_INVALID = tf.errors.InvalidArgumentError


def names(group: Group, machine: Any) -> None:
    """Modules and their members."""
    import popdist
    from tensorflow.python import ipu

    operations = ("cross_replica_ops", "image_ops", "custom_ops", "pipelining_ops")
    for part in ("config", "utils", "ipu_strategy", *operations):
        group.add(part, lambda p=part: getattr(ipu, p))
    # Packages that the SDK does not bind in their parents.
    for name in ("distributed", "horovod"):
        group.add(f"ipu.{name}", lambda n=name: getattr(ipu, n), AttributeError)
    for part in operations:
        # Attributes of the package; the files lie elsewhere.
        load = lambda p=part: importlib.import_module("tensorflow.python.ipu." + p)  # noqa: E731
        group.add(f"import {part}", load, ModuleNotFoundError)
    group.add("popdist.tensorflow, not imported", lambda: popdist.tensorflow, AttributeError)
    for name in ("PipelineSchedule", "RecomputationMode"):
        for member in ENUMS[name]:
            group.add(f"{name}.{member}", lambda n=name, m=member: getattr(ipu.pipelining_ops, n)[m])


def functions(group: Group, machine: Any) -> None:
    """``reset_ipu_seed`` and the other functions, and ``PipelineStageOptions``."""
    from tensorflow.python import ipu

    utils, config, failed = ipu.utils, ipu.config.IPUConfig, tf.errors.FailedPreconditionError

    def configured(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **keywords: Any) -> Any:
            made = config()
            made.auto_select_ipus = 1
            made.configure_ipu_system()
            return call(*args, **keywords)

        return run

    seed, count = configured(utils.reset_ipu_seed), configured(utils.get_num_of_ipus_in_device)
    device = dict(ipu_device="/device:IPU:0")
    words = {"availableMemoryProportion": "0.2"}
    bad = ("x", [1], {"a": 1}, {1: "a"}, {"a": None}, {"a": 0.2}, 5)
    kinds = ("convolution_options", "matmul_options", "slice_options")
    for fact, function, legal, wrong in (
        (
            "utils.reset_ipu_seed",
            seed,
            dict(seed=1),
            {"seed": {_INVALID: (2**31, -(2**31) - 1), TypeError: ("1", None, b"x", [1], "x")}},
        ),
        ("utils.get_num_of_ipus_in_device", count, device, {"ipu_device": {_INVALID: ("IPU",)}}),
        (
            "ops.pipelining_ops.PipelineStageOptions",
            ipu.pipelining_ops.PipelineStageOptions,
            {},
            {name: {TypeError: bad} for name in kinds},
        ),
    ):
        group.call(fact, function, params_of("ipu." + fact), legal, wrong)
    # An operation's attribute: TensorFlow converts it to an integer.
    group.add("seed 1.5", lambda: seed(1.5))
    options = ipu.pipelining_ops.PipelineStageOptions
    group.add("stage options", lambda: options(convolution_options=words, matmul_options=words))
    group.add("seed before the system", lambda: utils.reset_ipu_seed(1), failed)
    group.add("IPUs before the system", lambda: utils.get_num_of_ipus_in_device(**device), failed)
    group.add(
        "configure_ipu_system: devices", lambda: config().configure_ipu_system(devices="cpu"), TypeError
    )
    group.add("IPUConfig: argument", lambda: config(auto_select_ipus=1), TypeError)
    mean = ipu.cross_replica_ops.cross_replica_mean
    group.signature("mean", mean, params_of("ipu.ops.cross_replica_ops.cross_replica_mean"), dict(x=1.0))


def images(group: Group, machine: Any) -> None:
    """``normalise_image``."""
    from tensorflow.python import ipu

    function, three = ipu.image_ops.normalise_image, np.ones(3, np.float32)

    def image(dtype: Any = tf.float32, channels: int = 3) -> Any:
        return tf.zeros([1, 2, 2, channels], dtype)

    group.add("uint8", lambda: function(image(tf.uint8), three, tf.constant(three), 0.5))
    types = tf.int32, tf.float64, tf.int8, tf.bfloat16
    sizes = {_INVALID: [np.ones(size, np.float32) for size in (1, 4)]}
    legal = dict(image=image(), channel_offsets=three, channel_scales=three, scale=2)
    wrong = {
        "image": {
            TypeError: [image(dtype) for dtype in types],
            _INVALID: [image(channels=channels) for channels in (1, 2, 4)],
        },
        "channel_offsets": sizes,
        "channel_scales": sizes,
        "scale": {TypeError: ("1", None, [1.0])},
    }
    group.call("normalise_image", function, params_of("ipu.ops.image_ops.normalise_image"), legal, wrong)
    for name in ("channel_offsets", "channel_scales"):
        changing = tf.function(lambda v, n=name: function(**{**legal, n: v}))
        group.add(f"{name} that change", lambda f=changing: f(tf.constant(three)), _INVALID)


def user_operations(group: Group, machine: Any) -> None:
    """``precompiled_user_op``."""
    from tensorflow.python import ipu

    function = ipu.custom_ops.precompiled_user_op
    machine.user_ops["Double"] = lambda tensors, attributes: [2.0 * t for t in tensors]
    library = Path(tempfile.mkdtemp()) / "library.so"
    library.write_bytes(b"")
    value = tf.ones([2, 3])
    outs = {"output_types": [tf.float32], "output_shapes": [tf.TensorShape([2, 3])]}
    legal = dict(inputs=[value], library_path=str(library), outs=outs, op_name="Double", attributes="a")
    text = {ValueError: (5, b"x", ["x"], {"x": 1})}
    wrong_outs = [[tf.float32], {**outs, "output_types": ["number"]}]
    for name in outs:
        wrong_outs.append({k: v for k, v in outs.items() if k != name})
        wrong_outs += [{**outs, name + "s": []}, {**outs, name: outs[name][0]}]
    wrong = {
        "inputs": {TypeError: (value, 1.0)},
        "library_path": {TypeError: (library, None), _INVALID: (f"{library}x",)},
        "op_name": {TypeError: (None,), _INVALID: ("Triple",)},
        "gp_path": {TypeError: (1,)},
        "attributes": text,
        "gradient_attributes": text,
        "separate_gradients": {TypeError: (1, None)},
        "inputs_with_gradients": {TypeError: (1,)},
        "outs": {
            TypeError: wrong_outs,
            _INVALID: [{**outs, "output_shapes": [tf.TensorShape([None, 3])]}],
            tf.errors.InternalError: [{**outs, "output_shapes": [tf.TensorShape([3, 2])]}],
        },
    }
    params = params_of("ipu.ops.custom_ops.precompiled_user_op")
    group.call("precompiled_user_op", function, params, legal, wrong)
    group.add("all keywords", lambda: function(**legal, gp_path="", name="x", separate_gradients=True))

    def gradient() -> None:
        with tf.GradientTape() as tape:
            tape.watch(value)
            (result,) = function(**legal)
        tape.gradient(result, value)

    group.add("a gradient that the library lacks", gradient, _INVALID)

    def ahead() -> None:
        machine.user_ops["Unhashable"] = machine.user_ops["Double"]
        machine.unhashable_ops.add("Unhashable")
        config = ipu.config.IPUConfig()
        config.device_connection.version = "ipu2"
        config.device_connection.type = ipu.config.DeviceConnectionType.PRE_COMPILE
        config.configure_ipu_system()
        function(**legal)
        function(**{**legal, "op_name": "Unhashable"})

    group.add("compiled ahead, and not hashable", ahead, tf.errors.FailedPreconditionError)


def layers(group: Group, machine: Any) -> None:
    """The addons' layers."""
    from ipu_tensorflow_addons.keras import layers as addons

    x = tf.zeros([1, 2, 2, 4])
    noisy = dict(rate=0.5, noise_shape=[1, 1, 1, 4])
    groups = dict(groups=2, gamma_initializer="ones", beta_initializer="zeros")
    wrong = {"groups": {ValueError: (3, 8)}, "channels_axis": {ValueError: (2, 5)}}
    for name, legal, values in (("Dropout", noisy, {}), ("GroupNormalization", groups, wrong)):
        layer = lambda n=name, **keywords: getattr(addons, n)(**keywords)(x, training=True)  # noqa: E731
        # Current Keras refuses a layer's unknown keyword with a ValueError.
        group.call(name, layer, params_of("addons.layers." + name), legal, values, ValueError)
