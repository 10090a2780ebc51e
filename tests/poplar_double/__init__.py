"""A test double of the Poplar SDK's Python API, made from recorded facts (``facts.json``).

``installed()`` puts it in place of the SDK's modules, and removes it afterwards.  It raises the SDK's errors, logs the
configuration, and trains with stock Keras underneath.  docs/contributing/hardware-checklist.md lists what it cannot
show.
"""

import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from typing import Any, Dict, Iterator

from tensorflow import keras

from ipucnn.sessions.poplar import sdk_environment as environment_reader

from . import modules
from .errors import invalid
from .extension import extend
from .machine import Machine, ProcessAborted
from .sdk_environment import environment_of

__all__ = ["Machine", "ProcessAborted", "installed"]

_VARIABLES = ("TF_POPLAR_FLAGS",)
# Loaded only by their own import, which binds them in their packages.
_LATE = (
    "popdist.tensorflow",
    "tensorflow.python.ipu.distributed",
    "tensorflow.python.ipu.distributed.popdist_strategy",
)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that are imported late."""

    def __init__(self, made: Dict[str, types.ModuleType]) -> None:
        self._made = made

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._made:
            return None
        is_package = hasattr(self._made[name], "__path__")
        return importlib.machinery.ModuleSpec(name, self, is_package=is_package)

    def create_module(self, spec: Any) -> types.ModuleType:
        return self._made[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _functional() -> Any:
    """Returns the class that Keras makes of ``keras.Model(inputs, outputs)``."""
    inputs = keras.Input((1,))
    return next(kind for kind in type(keras.Model(inputs, inputs)).__mro__ if kind.__name__ == "Functional")


def _poprand(stateless_uniform: Any) -> Any:
    """Draws other numbers than the CPU for the same seed: the seed is the key of poprand's own generator.

    TensorFlow 2.6 takes the key from an operation that accepts seeds of any width, and checks their shape itself.
    """

    import tensorflow as tf

    def draw(shape: Any, seed: Any, **others: Any) -> Any:
        if tf.distribute.has_strategy():  # being traced for IPUs
            seed = tf.convert_to_tensor(seed)
            if seed.shape != (2,):
                raise invalid(f"seed must have shape [2], not {seed.shape}")
            if others.get("dtype", tf.float32) not in (tf.float32, tf.float16):
                raise invalid(
                    "Detected unsupported operations when trying to compile graph cluster_0[] on XLA_IPU_JIT: "
                    "StatelessRandomUniformV2 (No registered 'StatelessRandomUniformV2' OpKernel for XLA_IPU_JIT)"
                )
            seed = seed + tf.constant(0x5EED, seed.dtype)
        return stateless_uniform(shape, seed=seed, **others)

    return draw


@contextlib.contextmanager
def installed(sdk: str = "3.4", num_ipus: int = 16, **facts: Any) -> Iterator[Machine]:
    """Installs the SDK of a machine with IPUs while the context lasts.

    Args:
        sdk: version of the SDK.
        num_ipus: IPUs of the machine.
        facts: further attributes of :class:`Machine`.
    """
    machine = Machine(sdk=sdk, num_ipus=num_ipus, **facts)
    built = modules.build(machine)
    import tensorflow as tf
    import tensorflow.keras  # as a user's own file may do later
    import tensorflow.python as python

    functional = _functional()
    # Several objects represent Keras, which loads on first use: loaders, the module they load, and a copy of the module
    # that ``import tensorflow.keras`` makes and that TensorFlow 2.6 puts in the loader's place.
    names = (keras.__name__, functional.__module__.split(".")[0], "tensorflow.keras")
    named = [sys.modules.get(name) for name in names]
    places = {id(place): place for place in (keras, tf.keras, *named) if place is not None}
    original = functional.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if machine.strategy is not None and machine.strategy.extends and not hasattr(self, "_double"):
            extend(machine, self)

    saved = {name: sys.modules.get(name) for name in built}
    environment = {name: os.environ.get(name) for name in _VARIABLES}
    late = {name: built.pop(name) for name in _LATE}
    finder = _Finder(late)
    sys.meta_path.insert(0, finder)
    sys.modules.update(built)
    python.ipu = built["tensorflow.python.ipu"]
    for place in places.values():
        place.ipu = built["keras.ipu"]
    functional.__init__ = init
    stateless_uniform = tf.random.stateless_uniform
    tf.random.stateless_uniform = _poprand(stateless_uniform)
    read_sdk_environment, remote_memory = (
        environment_reader.read_sdk_environment,
        environment_reader.remote_memory,
    )
    environment_reader.read_sdk_environment = lambda: environment_of(machine)
    environment_reader.remote_memory = lambda: machine.remote_memory if machine.gc_info else None
    try:
        yield machine
    finally:
        functional.__init__ = original
        environment_reader.read_sdk_environment, environment_reader.remote_memory = (
            read_sdk_environment,
            remote_memory,
        )
        tf.random.stateless_uniform = stateless_uniform
        sys.meta_path.remove(finder)
        del python.ipu
        for place in places.values():
            # The loader passes on missing attributes, and then has none of its own to delete.
            vars(place).pop("ipu", None)
        for name, module in saved.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
