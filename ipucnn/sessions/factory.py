"""The one place that knows what hardware is here."""

import importlib.util
import os
from typing import List

from ipucnn.errors import ConfigurationError, MissingError
from ipucnn.sessions.session import DeviceInfo, Session, cpu_name, host_memory_bytes

DEVICES = ("auto", "ipu", "gpu", "cpu")


def has_poplar_sdk() -> bool:
    """Whether this TensorFlow is the Poplar SDK's; asks the file system, imports nothing."""
    found = importlib.util.find_spec("tensorflow")
    locations = found.submodule_search_locations if found is not None else None
    return any(os.path.isdir(os.path.join(place, "python", "ipu")) for place in locations or ())


def check_device(device: str) -> None:
    """Refuses what cannot run here, before TensorFlow is imported.

    Raises:
        MissingError: an IPU is asked for (or the SDK is here) and the Poplar session does not exist yet.
    """
    if device == "ipu" and not has_poplar_sdk():
        raise MissingError(
            "--device ipu needs the Poplar SDK's TensorFlow, which is not installed here",
            "use --device cpu, or run inside the Poplar SDK's Python environment",
        )
    if device in ("auto", "ipu") and has_poplar_sdk():
        raise MissingError(
            "the Poplar session is not built yet: this version runs on CPUs and GPUs only",
            "use --device cpu to run with the IPU's semantics on the host",
        )


def visible_gpus() -> List[str]:
    """Names of the GPUs TensorFlow sees."""
    import tensorflow as tf

    return [device.name for device in tf.config.list_logical_devices("GPU")]


def create_session(device: str = "auto", *, verbose: bool = False) -> Session:
    """The session for a device.

    Args:
        device: auto (a GPU if there is one, else the CPU), ipu, gpu or cpu.
        verbose: let TensorFlow print what it prints.

    Raises:
        MissingError: the device is not here.
        ConfigurationError: several GPUs; the host session computes on one.
    """
    if device not in DEVICES:
        raise ConfigurationError(f"device '{device}' does not exist", f"use one of {', '.join(DEVICES)}")
    check_device(device)
    from ipucnn.sessions.host.environment import import_tensorflow

    import_tensorflow(verbose)
    from ipucnn.sessions.host.session import HostSession

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = [] if device == "cpu" else visible_gpus()
    if device == "gpu" and not gpus:
        raise MissingError("--device gpu: TensorFlow sees no GPU here", "use --device cpu")
    if len(gpus) > 1:
        raise ConfigurationError(
            f"{len(gpus)} GPUs are visible, and the host session computes all replicas on one",
            "set CUDA_VISIBLE_DEVICES=0 (or another number), or use --device cpu",
        )
    if gpus:
        info = DeviceInfo("gpu", gpus[0], cores, host_memory_bytes())
        return HostSession(info, gpus[0])
    return HostSession(DeviceInfo("cpu", cpu_name() or "CPU", cores, host_memory_bytes()), "/CPU:0")
