"""Modules, functions, operations and layers."""

import tempfile
from pathlib import Path
from typing import Any, Callable

import numpy as np
import tensorflow as tf
from poplar_double.facts import FACTS

from .cases import Group, params_of

_INVALID = tf.errors.InvalidArgumentError


def names(machine: Any) -> Group:
    """Returns mutations of modules and their members."""
    import importlib

    import popdist
    from tensorflow.python import ipu

    group = Group("names in the modules")
    parts = (
        "config",
        "utils",
        "ipu_strategy",
        "cross_replica_ops",
        "image_ops",
        "custom_ops",
        "pipelining_ops",
    )
    for part in parts:
        group.allow(part, lambda p=part: getattr(ipu, p))
    # Packages that the SDK does not bind in their parents.
    for name in ("distributed", "horovod"):
        group.add(f"ipu.{name}", lambda n=name: getattr(ipu, n), AttributeError)
    for part in ("cross_replica_ops", "image_ops", "custom_ops", "pipelining_ops"):
        # Attributes of the package; the files lie elsewhere.
        load = lambda p=part: importlib.import_module("tensorflow.python.ipu." + p)  # noqa: E731
        group.add(f"import {part}", load, ModuleNotFoundError)
    for name in set(FACTS["popdist"]) - {"execute_on_instances"}:  # not in the test double
        group.allow(f"popdist.{name}", lambda n=name: getattr(popdist, n))
    group.add("popdist.tensorflow, not imported", lambda: popdist.tensorflow, AttributeError)
    for name in ("PipelineSchedule", "RecomputationMode"):
        for member in FACTS["enums"][name]:
            group.allow(f"{name}.{member}", lambda n=name, m=member: getattr(ipu.pipelining_ops, n)[m])
    return group


def functions(machine: Any) -> Group:
    """Returns mutations of ``reset_ipu_seed`` and the other functions, and of ``PipelineStageOptions``."""
    from tensorflow.python import ipu

    group = Group("functions and stage options")
    options, failed = ipu.pipelining_ops.PipelineStageOptions, tf.errors.FailedPreconditionError

    def configured(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **keywords: Any) -> Any:
            config = ipu.config.IPUConfig()
            config.auto_select_ipus = 1
            config.configure_ipu_system()
            return call(*args, **keywords)

        return run

    seed = configured(ipu.utils.reset_ipu_seed)
    group.allow("seed", lambda: seed(seed=1))
    # An operation's attribute: TensorFlow converts it to an integer.
    group.allow("seed 1.5", lambda: seed(1.5))
    group.signature("reset_ipu_seed", seed, params_of("ipu.utils.reset_ipu_seed"), dict(seed=1))
    for value in (2**31, -(2**31) - 1):
        group.add(f"seed {value}", lambda v=value: seed(v), _INVALID)
    for value in ("1", None, b"x", [1], "x"):
        group.add(f"seed {value!r}", lambda v=value: seed(v), TypeError)
    group.add("seed before the system", lambda: ipu.utils.reset_ipu_seed(1), failed)

    count = configured(ipu.utils.get_num_of_ipus_in_device)
    device = dict(ipu_device="/device:IPU:0")
    group.allow("number of IPUs", lambda: count(**device))
    params = params_of("ipu.utils.get_num_of_ipus_in_device")
    group.signature("get_num_of_ipus_in_device", count, params, device)
    group.add("IPUs of no device", lambda: count("IPU"), _INVALID)
    group.add("IPUs before the system", lambda: ipu.utils.get_num_of_ipus_in_device(**device), failed)

    configure = ipu.config.configure_ipu_system
    group.allow("configure", lambda: configure(ipu.config.IPUConfig()))
    params = params_of("ipu.config.configure_ipu_system")
    group.signature("configure_ipu_system", configure, params, dict(config=ipu.config.IPUConfig()))
    for wrong in (None, {}, ipu.config.IPUConfig().norms):
        group.add(f"configure {type(wrong).__name__}", lambda w=wrong: configure(w), TypeError)
    configure_with = lambda **k: ipu.config.IPUConfig().configure_ipu_system(**k)  # noqa: E731
    group.add("IPUConfig.configure_ipu_system: devices", lambda: configure_with(devices="cpu"), TypeError)
    group.add("IPUConfig: argument", lambda: ipu.config.IPUConfig(auto_select_ipus=1), TypeError)

    words = {"availableMemoryProportion": "0.2"}
    stage = params_of("ipu.ops.pipelining_ops.PipelineStageOptions")
    group.allow("stage options", lambda: options(convolution_options=words, matmul_options=words))
    group.signature("PipelineStageOptions", options, stage, {})
    for name in ("convolution_options", "matmul_options", "slice_options"):
        for bad in ("x", [1], {"a": 1}, {1: "a"}, {"a": None}, {"a": 0.2}, 5):
            group.add(f"stage {name} {bad!r}", lambda n=name, b=bad: options(**{n: b}), TypeError)
    for name in ("cross_replica_mean", "cross_replica_sum"):
        function = getattr(ipu.cross_replica_ops, name)
        group.signature(name, function, params_of("ipu.ops.cross_replica_ops." + name), dict(x=1.0))
    return group


def images(machine: Any) -> Group:
    """Returns mutations of ``normalise_image``."""
    from tensorflow.python import ipu

    group = Group("normalise_image")
    function = ipu.image_ops.normalise_image
    three = np.ones(3, np.float32)

    def image(dtype: Any = tf.float32, channels: int = 3) -> Any:
        return tf.zeros([1, 2, 2, channels], dtype)

    legal = dict(image=image(), channel_offsets=three, channel_scales=three)
    group.allow("normalise_image", lambda: function(**legal, scale=2))
    group.allow("uint8", lambda: function(image(tf.uint8), three, tf.constant(three), 0.5))
    group.signature("normalise_image", function, params_of("ipu.ops.image_ops.normalise_image"), legal)
    for dtype in (tf.int32, tf.float64, tf.int8, tf.bfloat16):
        group.add(f"{dtype.name} image", lambda d=dtype: function(image(d), three, three), TypeError)
    for channels in (1, 2, 4):
        wrong = lambda c=channels: function(image(channels=c), three, three)  # noqa: E731
        group.add(f"{channels} channels", wrong, _INVALID)
    for size in (1, 4):
        other = np.ones(size, np.float32)
        group.add(f"{size} offsets", lambda o=other: function(image(), o, three), _INVALID)
        group.add(f"{size} scales", lambda o=other: function(image(), three, o), _INVALID)
    for scale in ("1", None, [1.0]):
        group.add(f"scale {scale!r}", lambda s=scale: function(image(), three, three, s), TypeError)
    for name in ("channel_offsets", "channel_scales"):
        changing = tf.function(lambda v, n=name: function(**{**legal, n: v}))
        group.add(f"{name} that change", lambda f=changing: f(tf.constant(three)), _INVALID)
    return group


def user_operations(machine: Any) -> Group:
    """Returns mutations of ``precompiled_user_op``."""
    from tensorflow.python import ipu

    group = Group("precompiled_user_op")
    function = ipu.custom_ops.precompiled_user_op
    machine.user_ops["Double"] = lambda tensors, attributes: [2.0 * t for t in tensors]
    library = Path(tempfile.mkdtemp()) / "library.so"
    library.write_bytes(b"")
    value = tf.ones([2, 3])
    outs = {"output_types": [tf.float32], "output_shapes": [tf.TensorShape([2, 3])]}
    legal = dict(inputs=[value], library_path=str(library), outs=outs, op_name="Double", attributes="a")

    def changed(name: str, wrong: Any, *errors: Any) -> None:
        group.add(f"{name} = {wrong!r}", lambda: function(**{**legal, name: wrong}), *errors)

    group.allow("user operation", lambda: function(**legal, gp_path="", name="x", separate_gradients=True))
    params = params_of("ipu.ops.custom_ops.precompiled_user_op")
    group.signature("precompiled_user_op", function, params, legal)
    changed("inputs", value, TypeError)
    changed("inputs", 1.0, TypeError)
    changed("library_path", library, TypeError)
    changed("library_path", None, TypeError)
    changed("library_path", str(library) + "x", _INVALID)
    changed("op_name", "Triple", _INVALID)
    changed("op_name", None, TypeError)
    changed("gp_path", 1, TypeError)
    for name in ("attributes", "gradient_attributes"):
        for wrong in (5, b"x", ["x"], {"x": 1}):
            changed(name, wrong, ValueError)
    changed("separate_gradients", 1, TypeError)
    changed("separate_gradients", None, TypeError)
    changed("inputs_with_gradients", 1, TypeError)
    changed("outs", [tf.float32], TypeError)
    for name in outs:
        changed("outs", {k: v for k, v in outs.items() if k != name}, TypeError)
        changed("outs", {**outs, name + "s": []}, TypeError)
        changed("outs", {**outs, name: outs[name][0]}, TypeError)
    changed("outs", {**outs, "output_types": ["number"]}, TypeError)
    changed("outs", {**outs, "output_shapes": [tf.TensorShape([None, 3])]}, _INVALID)
    changed("outs", {**outs, "output_shapes": [tf.TensorShape([3, 2])]}, tf.errors.InternalError)

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
        function(**{**legal, "op_name": "Double"})
        function(**{**legal, "op_name": "Unhashable"})

    group.add("compiled ahead, and not hashable", ahead, tf.errors.FailedPreconditionError)
    return group


def layers(machine: Any) -> Group:
    """Returns mutations of the addons' layers."""
    from ipu_tensorflow_addons.keras import layers as addons

    group = Group("layers of the addons")
    x = tf.zeros([1, 2, 2, 4])
    rate, legal = dict(rate=0.5), dict(groups=2, gamma_initializer="ones", beta_initializer="zeros")
    group.allow("Dropout", lambda: addons.Dropout(**rate, noise_shape=[1, 1, 1, 4])(x, training=True))
    group.allow("GroupNormalization", lambda: addons.GroupNormalization(**legal)(x))
    for name, keywords in (("Dropout", rate), ("GroupNormalization", legal)):
        # Current Keras refuses a layer's unknown keyword with a ValueError.
        group.signature(name, getattr(addons, name), params_of("addons.layers." + name), keywords, ValueError)
    for wrong in (dict(groups=3), dict(groups=8), dict(channels_axis=2), dict(channels_axis=5)):
        group.add(
            f"GroupNormalization {wrong}",
            lambda w=wrong: addons.GroupNormalization(**{**legal, **w})(x),
            ValueError,
        )
    return group
