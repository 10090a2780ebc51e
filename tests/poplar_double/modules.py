"""The test double's modules: ``tensorflow.python.ipu``, ``keras.ipu``, ``ipu_tensorflow_addons``, ``popdist``."""

import contextlib
import os
import re
import types
from typing import Any, Dict, Iterator

import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from . import addons, config, instances, ops
from .distribution import PopDistExtended
from .errors import invalid
from .facts import FACTS, like, module
from .replicas import KERAS_3


def _strategies(machine: Any) -> Any:
    """Makes the two strategies; models get the SDK's methods in their scope.

    Neither is derived from the other, as in the SDK.  Both wrap one device of stock TensorFlow, so that code traced in
    ``run`` sees the strategy, and is in a replica's context.
    """

    class Strategy:
        extends: bool

        @contextlib.contextmanager
        def scope(self) -> Iterator[Any]:
            machine.flags  # noqa: B018 - building extended models accesses the driver
            machine.strategies.append(self)
            try:
                with super().scope(), tf.variable_creator_scope(machine.place):
                    yield self
            finally:
                machine.strategies.pop()

        def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
            if tf.executing_eagerly() and not hasattr(fn, "get_concrete_function"):
                raise ValueError("IPUStrategy.run takes a tf.function")
            return super().run(fn, args=args, kwargs=kwargs)

    class IPUStrategyV1(Strategy, tf.distribute.OneDeviceStrategy):  # type: ignore[misc]
        def __init__(self, extends: bool) -> None:
            super().__init__("/cpu:0")
            self.extends = extends
            machine.generator  # noqa: B018 - a generator first made in a scope would belong to its strategy

    # Keras 3, which the SDK never has, updates variables that are not this test double's components: one device there.
    base = tf.distribute.OneDeviceStrategy if KERAS_3 else tf.distribute.Strategy

    class PopDistStrategy(Strategy, base):  # type: ignore[misc,valid-type]
        _collective_key_base = 0

        def __init__(self, extends: bool) -> None:
            super().__init__("/cpu:0" if KERAS_3 else PopDistExtended(self, machine))
            self.extends = extends
            machine.generator  # noqa: B018 - as above

    @like("ipu.ipu_strategy.IPUStrategyV1")
    def ipu_strategy(**options: Any) -> Any:
        machine.note("IPUStrategy", **options)
        return IPUStrategyV1(options["enable_keras_extensions"])

    @like("ipu.distributed.popdist_strategy.PopDistStrategy")
    def popdist_strategy(**options: Any) -> Any:
        if not instances.is_distributed():
            raise RuntimeError("PopDistStrategy outside of poprun")
        machine.note("PopDistStrategy", **options)
        machine.popdist_ready = True  # __init__ calls popdist.init(), in 3.0 as in 3.4
        if not options["add_ipu_cross_replica_reductions"]:
            raise NotImplementedError("the double reduces gradients over replicas")
        return PopDistStrategy(options["enable_keras_extensions"])

    return ipu_strategy, popdist_strategy


def _utils(machine: Any) -> types.ModuleType:
    @like("ipu.utils.reset_ipu_seed")
    def reset_ipu_seed(seed: Any, device: Any, cpu_device: Any, experimental_identical_replicas: Any) -> None:
        machine.device_ipus  # noqa: B018 - raises before the system is configured
        if isinstance(seed, str):
            raise TypeError(f"Expected int for argument 'seed' not {seed!r}.")
        try:
            seed = int(seed)  # as TensorFlow does with an operation's attribute: 1.5 is 1
        except (TypeError, ValueError):
            raise TypeError(f"Expected int for argument 'seed' not {seed!r}.") from None
        if not -(2**31) <= seed < 2**31:
            raise invalid(f"seed {seed} does not fit into 32 bits")
        machine.note("reset_ipu_seed", seed=seed, identical=experimental_identical_replicas)
        machine.generator.reset_from_seed(seed)

    @like("ipu.utils.get_num_of_ipus_in_device")
    def get_num_of_ipus_in_device(ipu_device: Any, device: Any) -> int:
        if not re.search(r"device:IPU:\d+$", ipu_device):
            raise invalid(f"Invalid device name {ipu_device}")
        return int(machine.total_ipus)

    return module(
        "tensorflow.python.ipu.utils",
        reset_ipu_seed=reset_ipu_seed,
        get_num_of_ipus_in_device=get_num_of_ipus_in_device,
    )


def _serving(machine: Any) -> types.ModuleType:
    @like("ipu.serving.export_keras")
    def export_keras(
        model: Any, export_dir: Any, batch_size: Any, output_names: Any, purge_export_dir: Any, **steps: Any
    ) -> Any:
        if not hasattr(model, "_double"):
            raise ValueError("Provided model was not created inside an IPU strategy")
        if any(step is not None for step in steps.values()):
            raise NotImplementedError("the double has no steps before and after the network")
        if os.path.isdir(export_dir) and os.listdir(export_dir) and not purge_export_dir:
            raise ValueError("Directory is not empty. Please specify an empty directory.")
        if output_names is not None and not isinstance(output_names, (str, list)):
            raise TypeError(f"output_names must be either a string or a list, received {type(output_names)}")
        shape = [batch_size or model.inputs[0].shape[0], *model.inputs[0].shape[1:]]
        if shape[0] is None:
            raise ValueError("the batch size must be given")
        machine.device_ipus  # noqa: B018 - compiling needs a configured system
        machine.note("export_keras", model=model.name, batch_size=batch_size, output_names=output_names)
        names = [output_names] if isinstance(output_names, str) else output_names
        spec = tf.TensorSpec(shape, model.inputs[0].dtype, name=model.inputs[0].name.split(":")[0])

        @tf.function(input_signature=[spec])
        def predict(images: Any) -> Any:
            return model(images, training=False)

        # Weights are part of the compiled program: later changes of the model do not reach it.
        frozen = convert_variables_to_constants_v2(predict.get_concrete_function())
        module = tf.Module()
        module.serve = tf.function(lambda images: frozen(images), input_signature=[spec])
        tf.saved_model.save(module, export_dir)
        assets = os.path.join(export_dir, "assets")
        os.makedirs(assets, exist_ok=True)
        with open(os.path.join(assets, "application.popef"), "wb") as file:
            file.write(b"a program would be here")

        def run(images: Any) -> Any:
            if tuple(images.shape) != tuple(shape):
                raise ValueError(f"compiled for {shape}, and these are {images.shape}")
            outputs = tf.nest.flatten(frozen(images))
            return outputs if names is None else dict(zip(names, outputs))

        return run

    return module("tensorflow.python.ipu.serving", export_keras=export_keras)


def build(machine: Any) -> Dict[str, types.ModuleType]:
    """Builds modules by their import names; ``keras.ipu`` is to be set on the Keras modules, too."""
    strategy, popdist_strategy = _strategies(machine)
    names = {fact["enum"] for fact in FACTS["leaves"].values() if "enum" in fact}
    enums = {name: config.ENUMS[name] for name in names}
    ipu = module("tensorflow.python.ipu")
    parts: Dict[str, types.ModuleType] = {
        "config": module(
            "tensorflow.python.ipu.config", IPUConfig=config.make_config_class(machine), **enums
        ),
        "utils": _utils(machine),
        "serving": _serving(machine),
        "ipu_strategy": module("tensorflow.python.ipu.ipu_strategy", IPUStrategy=strategy),
        **ops.build(machine),
    }
    for name, part in parts.items():
        if name not in FACTS["package_attributes"]:
            raise ValueError(f"tensorflow.python.ipu binds no {name}")
        setattr(ipu, name, part)
    # Not bound on the package: it has to be imported.
    distributed = instances.build_distributed(machine)
    ipu.__path__ = []  # type: ignore[attr-defined]
    keras_ipu = module("keras.ipu")
    if "ReplicatedMetricReductionMethod" not in FACTS["absent_in"].get(machine.sdk, {}).get("names", ()):
        keras_ipu.ReplicatedMetricReductionMethod = config.ENUMS["ReplicatedMetricReductionMethod"]
    return {
        "tensorflow.python.ipu": ipu,
        "tensorflow.python.ipu.distributed": distributed,
        "tensorflow.python.ipu.distributed.popdist_strategy": module(
            "popdist_strategy", PopDistStrategy=popdist_strategy
        ),
        "keras.ipu": keras_ipu,
        **addons.build(machine),
        **instances.build_popdist(machine),
    }
