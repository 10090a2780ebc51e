"""Every leaf of IPUConfig: misspelt, of wrong types, of illegal values."""

import functools
from typing import Any, Callable, Dict, List

import numpy as np
import tensorflow as tf
from poplar_double import ProcessAborted

from .cases import Group, environment
from .quoted import ENUMS, LEAVES
from .setting import set_leaf

# Fields of driver/config.proto: these two numbers are int32, all others int64.
_INT32 = ("auto_select_ipus", "select_ipus")
_WRONG = {
    "bool": [1, "true", None],
    "int": [1.0, "1", True, None, np.int32(1)],
    "float": [1, "1.0", None],
    "str": [1, None, b"x"],
    "dict": ["{}", None, [("a", "b")]],
}


def leaves(group: Group, machine: Any) -> None:
    """Every leaf of IPUConfig: misspelt, of wrong types, its category assigned."""
    from tensorflow.python import ipu

    def assign(name: str, value: Any) -> Callable[[], None]:
        return lambda: set_leaf(ipu.config.IPUConfig(), name, value)

    def read(name: str) -> Callable[[], None]:
        return lambda: functools.reduce(getattr, name.split("."), ipu.config.IPUConfig())

    for name, (kind, default) in LEAVES.items():
        is_enum = kind in ENUMS
        values = [getattr(ipu.config, kind)[member] for member in ENUMS[kind]] if is_enum else [default]
        for value in values:
            group.add(f"{name} = {value!r}", assign(name, value))
        group.add(f"{name}: misspelt", assign(name + "s", default), ValueError)
        group.add(f"{name}: misspelt reading", read(name + "s"), ValueError)
        if is_enum:
            wrong: List[Any] = [*next(iter(ENUMS[kind].items())), None, True]
        elif kind in _WRONG:
            wrong = _WRONG[kind]
        else:
            wrong = ["2", 2.0, None, True, [1.0], ("1",), [True], np.int32(2), {1}]
        for value in wrong:
            group.add(f"{name} = {value!r}", assign(name, value), TypeError)
        if kind == "int" or name in _INT32:
            limit = 2**31 if name in _INT32 else 2**63
            for number in (limit, -limit - 1):
                group.add(f"{name} = {number}", _configured(ipu, name, number), ValueError)
            if not name.endswith(("_ipus", "process_count")):  # the number that would have to be there
                group.add(f"{name} = {limit - 1}", _configured(ipu, name, limit - 1))
        if kind == "dict":
            for bad in ({"availableMemoryProportion": 0.2}, {1: "x"}, {"partialsType": True}):
                group.add(f"{name} = {bad}", _configured(ipu, name, bad), TypeError)
    parents = {name.rpartition(".")[0] for name in LEAVES} - {""}
    for category in sorted(parents | {name.partition(".")[0] for name in parents}):
        group.add(f"{category}: assigned", assign(category, 1), Exception)
    illegal_values = [
        ("auto_select_ipus", 3, tf.errors.FailedPreconditionError),
        ("auto_select_ipus", 64, tf.errors.FailedPreconditionError),
        ("select_ipus", [1, 1], ValueError),
        ("select_ipus", 99, ProcessAborted),
        ("device_connection.version", "ipu9", ValueError),
        ("io_tiles.place_ops_on_io_tiles", True, ValueError),
        ("norms.experimental.distributed_batch_norm_replica_group_size", 0, ValueError),
    ]
    for name, value in (("auto_select_ipus", [4]), ("select_ipus", 0), ("select_ipus", (1, 2))):
        group.add(f"{name} = {value}", _configured(ipu, name, value))
    for name, value, error in illegal_values:
        group.add(f"{name} = {value}", _configured(ipu, name, value), error)
    for kind in ("PRE_COMPILE", "NEVER"):
        member = ipu.config.DeviceConnectionType[kind]
        group.add(f"{kind}: no version", _configured(ipu, "device_connection.type", member), ValueError)
    two = dict(auto_select_ipus=[2], select_ipus=[17])
    group.add("auto_select_ipus and select_ipus", _set_and_configured(ipu, two), Exception)
    tiles = {"io_tiles.num_io_tiles": 32, "norms.experimental.distributed_batch_norm_replica_group_size": 2}
    group.add("I/O tiles and distributed batch norm", _set_and_configured(ipu, tiles), ValueError)

    def on_the_model() -> None:
        with environment({"TF_POPLAR_FLAGS": "--use_ipu_model"}):
            _configured(ipu, "select_ipus", 1)()

    group.add("select_ipus on the IPU model", on_the_model, Exception)


def _configured(ipu: Any, name: str, value: Any) -> Callable[[], None]:
    return _set_and_configured(ipu, {name: value})


def _set_and_configured(ipu: Any, leaves: Dict[str, Any]) -> Callable[[], None]:
    def configure() -> None:
        config = ipu.config.IPUConfig()
        for name, value in leaves.items():
            set_leaf(config, name, value)
        config.configure_ipu_system()

    return configure
