"""``ipu.config``: strictly typed leaves, as recorded; nothing takes effect before ``configure_ipu_system``."""

import enum
import os
import warnings
from typing import Any, Dict, List, Tuple

from .errors import failed, internal, invalid
from .facts import FACTS
from .machine import ProcessAborted

ENUMS = {
    name: (enum.IntEnum if name == "PipelineSchedule" else enum.Enum)(name, members)  # type: ignore[misc]
    for name, members in FACTS["enums"].items()
}
_PLAIN = {"bool": bool, "int": int, "float": float, "str": str, "dict": dict}
_IPUS = ("auto_select_ipus", "select_ipus")


def _parse(cls: Any, value: Any) -> Any:
    """Returns the member for a member, or for its name in any case."""
    if isinstance(value, cls):
        return value
    if isinstance(value, str) and value.upper() in cls.__members__:
        return cls[value.upper()]
    raise ValueError(f"cannot make a {cls.__name__} of {value!r}")


for _name in ("GradientAccumulationReductionMethod", "ReplicatedMetricReductionMethod"):
    ENUMS[_name].parse = classmethod(_parse)  # type: ignore[attr-defined]


def _default(fact: Dict[str, Any]) -> Any:
    if "enum" in fact:
        return ENUMS[fact["enum"]][fact["default"]]
    value = fact["default"]
    return type(value)(value) if isinstance(value, (list, dict)) else value


def _check_type(name: str, value: Any) -> None:
    fact = FACTS["leaves"][name]
    if name in _IPUS:
        right = type(value) is int or (type(value) in (list, tuple) and all(type(v) is int for v in value))
    elif "enum" in fact:
        right = isinstance(value, ENUMS[fact["enum"]])
    else:
        right = type(value) is _PLAIN[fact["type"]]
    if not right:
        raise TypeError(f"IPUConfig.{name} takes {fact['type']}, got {type(value).__name__}")


class Category:
    """The leaves and categories below one dotted prefix."""

    def __init__(self, values: Dict[str, Any], prefix: str) -> None:
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_prefix", prefix)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = self._prefix + name
        if full in FACTS["leaves"]:
            return self._values[full]
        if full in FACTS["categories"]:
            return Category(self._values, full + ".")
        raise ValueError(f"IPUConfig has no attribute {full}")

    def __setattr__(self, name: str, value: Any) -> None:
        full = self._prefix + name
        if full in FACTS["categories"]:
            raise Exception(f"{full} is a category of IPUConfig and cannot be assigned")
        if full not in FACTS["leaves"]:
            raise ValueError(f"IPUConfig has no attribute {full}")
        _check_type(full, value)
        self._values[full] = value


def make_config_class(machine: Any) -> Any:
    """Makes the ``IPUConfig`` of a machine."""

    class IPUConfig(Category):
        def __init__(self) -> None:
            values = {name: _default(fact) for name, fact in FACTS["leaves"].items()}
            super().__init__(values, "")
            object.__setattr__(self, "_machine", machine)

        def configure_ipu_system(self, device: str = "cpu") -> None:
            configure(machine, self._values)

        def to_dict(self) -> Dict[str, Any]:
            return {k: v.value if isinstance(v, enum.Enum) else v for k, v in self._values.items()}

    return IPUConfig


def check_options(options: Dict[Any, Any]) -> None:
    """Checks that Poplar options are strings; protobuf refuses anything else."""
    for key, value in options.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"{key!r}: {value!r} has type {type(value).__name__}, but expected one of: str")


def check_option_words(kind: str, options: Dict[str, str]) -> None:
    """Refuses unknown keys and invalid values, as Poplar does when it plans an operation."""
    known = FACTS["poplar_options"].get(kind)
    for key, value in options.items():
        fact = known.get(key) if known is not None else {}
        wrong = fact is None or ("values" in fact and value not in fact["values"])
        if fact is not None and fact.get("type") == "decimal":
            try:
                wrong = float(value) < 0
            except ValueError:
                wrong = True
        if wrong:
            raise internal(f"[Poplar][Build graph] invalid_option: {kind} {key}={value}")


def configure(machine: Any, leaves: Dict[str, Any]) -> None:
    """Checks a configuration as ``configure_ipu_system`` and the driver do, and applies it."""
    machine.flags  # noqa: B018 - the first access of the driver parses them
    values = dict(leaves)
    for name in FACTS["leaves"]:
        if name.endswith("poplar_options"):
            check_options(values[name])
            values[name] = dict(values[name])
    devices = _devices(values)
    _check_widths(values)
    # The configuration itself is changed: a number becomes a list.
    leaves.update((name, values[name]) for name in _IPUS)
    connection = values["device_connection.type"].name
    if connection in ("PRE_COMPILE", "NEVER") and not values["device_connection.version"]:
        raise ValueError(f"device_connection.version must be set with {connection}")
    if values["device_connection.version"] not in ("", "ipu1", "ipu2", "ipu21"):
        raise ValueError("device_connection.version")
    count = values["experimental.multi_replica_distribution.process_count"]
    if count and not 0 <= values["experimental.multi_replica_distribution.process_index"] < count:
        raise ValueError("process_index is outside of process_count")
    group = values["norms.experimental.distributed_batch_norm_replica_group_size"]
    if values["io_tiles.num_io_tiles"] > 0 and group > 1:
        raise ValueError("distributed_batch_norm_replica_group_size is not supported with I/O tiles")
    if group < 1:
        raise ValueError("distributed_batch_norm_replica_group_size must be at least 1")
    if values["io_tiles.place_ops_on_io_tiles"] and not values["io_tiles.num_io_tiles"]:
        raise ValueError("place_ops_on_io_tiles needs num_io_tiles")
    ipus = _num_ipus(devices, connection, machine)
    if connection in ("ALWAYS", "ON_DEMAND"):
        _find_device(machine, ipus, connection)
        if count > 1 and devices[0][0] == "auto":
            # The driver does not refuse this, but every process takes the first free IPUs, and the links between the
            # instances are set up for others; popdist.getDeviceId() returns those.
            raise RuntimeError("instances must select their device: select_ipus = popdist.getDeviceId(...)")
    if machine.config is not None and machine.config["leaves"] != values:
        warnings.warn("Resetting existing IPU configuration before applying new configuration", stacklevel=3)
    machine.config = {"leaves": values, "ipus": ipus}
    machine.note("configure_ipu_system", leaves=values)


def _check_widths(values: Dict[str, Any]) -> None:
    """Refuses integers that protobuf's fields do not hold: int64, int32 for IPUs (driver/config.proto).

    Raises:
        ValueError: an integer is out of range; the message names it.
    """
    for name, fact in FACTS["leaves"].items():
        if "bits" not in fact:
            continue
        limit = 2 ** (fact["bits"] - 1)
        for value in values[name] if isinstance(values[name], (list, tuple)) else [values[name]]:
            if not -limit <= value < limit:
                raise ValueError(f"{name}: Value out of range: {value}")


def _devices(values: Dict[str, Any]) -> List[Tuple[str, int]]:
    """Returns ("select", id) or ("auto", number of IPUs) of /device:IPU:0, /device:IPU:1, ...

    As in config.py, [] and 0 both count as unset when the two are compared; after that a number is a list of one, and
    [0] is device 0, or 0 IPUs.

    Raises:
        Exception: both are given.
        ValueError: a device is given twice.
    """
    if values["auto_select_ipus"] and values["select_ipus"]:
        raise Exception("Only one of auto_select_ipus and select_ipus can be set")
    for name in _IPUS:
        if isinstance(values[name], int):
            values[name] = [values[name]]
    chosen = values["select_ipus"]
    if len(set(chosen)) != len(chosen):
        raise ValueError("select_ipus must be unique")
    if chosen and "--use_ipu_model" in os.environ.get("TF_POPLAR_FLAGS", ""):
        raise Exception("the IPU model takes auto_select_ipus only")
    return [("select", i) for i in chosen] + [("auto", n) for n in values["auto_select_ipus"]] or [
        ("auto", 1)
    ]


def _num_ipus(devices: List[Tuple[str, int]], connection: str, machine: Any) -> int:
    """Returns the number of IPUs of /device:IPU:0."""
    kind, value = devices[0]
    if kind == "auto":
        return value
    if not machine.num_ipus and connection not in ("ALWAYS", "ON_DEMAND"):
        # CHECK(HasIpuHardware()) of poplar_executor.cc: without IPUs a program is compiled for a number of them.
        raise ProcessAborted("Check failed: HasIpuHardware()")
    return _ipus_of(value, machine)


def _ipus_of(device_id: int, machine: Any) -> int:
    """Returns the IPUs of a device as gc-info -l numbers them: first every IPU, then the pairs, the fours, ...

    Raises:
        ProcessAborted: there is no such device; the driver looks it up with ``at``, and nothing catches the exception.
    """
    first, size = 0, 1
    while size <= machine.num_ipus:
        if 0 <= device_id < first + machine.num_ipus // size:
            return size
        first, size = first + machine.num_ipus // size, 2 * size
    raise ProcessAborted("terminate called after throwing an instance of 'std::out_of_range'")


def _find_device(machine: Any, ipus: int, connection: str) -> None:
    if not machine.num_ipus:
        raise invalid("Target configuration failed: model disabled and no hardware IPU found.")
    if ipus < 1 or ipus & (ipus - 1) or ipus > machine.num_ipus:
        raise failed(f"Unsupported number of IPUs requested - could not find an IPU device with {ipus} IPUs")
    if machine.busy and connection == "ALWAYS":
        raise internal("Could not find an available device for TensorFlow virtual device /device:IPU:0.")
