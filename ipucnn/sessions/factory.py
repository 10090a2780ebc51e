"""Chooses the session for a device: the only module that knows which hardware is present."""

from contextlib import suppress
from typing import List, Optional, Tuple

from ipucnn.config.options import RunConfig
from ipucnn.errors import ConfigurationError, MissingError
from ipucnn.machine import cpu_name, host_memory_bytes, num_cores
from ipucnn.sessions.group import Alone, ProcessGroup, find_instances
from ipucnn.sessions.poplar import sdk_environment
from ipucnn.sessions.session import DeviceInfo, Session
from ipucnn.text import counted

DEVICES = ("auto", "ipu", "gpu", "cpu")


def check_device(device: str) -> None:
    """Rejects a device that cannot be used here, before TensorFlow is imported.

    Raises:
        MissingError, ConfigurationError: the device is an IPU and the SDK is missing or incomplete; or there is too
            little memory for TensorFlow.
    """
    from ipucnn.sessions.host.environment import check_memory

    check_memory()
    if device == "ipu" and not sdk_environment.has_poplar_sdk():
        raise MissingError(
            "--device ipu needs the Poplar SDK's TensorFlow, which is not installed here",
            "use --device cpu, or run inside the Poplar SDK's Python environment",
        )
    if runs_on_ipus(device):
        sdk_environment.check_requirements()


def device_warnings(device: str) -> List[str]:
    """Returns warnings for the user about a device on this machine, one line each, before the work begins."""
    if not runs_on_ipus(device):
        return []
    facts = sdk_environment.read_sdk_environment()
    return [f"{w.message}: {w.hint}" for w in sdk_environment.version_warnings(facts)]


def visible_gpus() -> List[Tuple[str, str]]:
    """Returns (TensorFlow's name, model) of each GPU that TensorFlow sees and may use."""
    import tensorflow as tf

    gpus = []
    for number, device in enumerate(tf.config.get_visible_devices("GPU")):
        details = tf.config.experimental.get_device_details(device)
        gpus.append((f"/device:GPU:{number}", str(details.get("device_name") or "GPU")))
    return gpus


def _configure_devices(device: str, num_devices: int) -> None:
    """Configures TensorFlow's devices before TensorFlow creates them.

    Args:
        device: gpu, cpu or auto.
        num_devices: the number of logical devices to split the processor into.

    Raises:
        MissingError: several GPUs are requested, and there is none.
        ConfigurationError: TensorFlow has already created other devices in this process.
    """
    import tensorflow as tf

    if device == "cpu" and tf.config.get_visible_devices("GPU"):
        # Otherwise every process on a machine would allocate the memory of its GPUs.
        with suppress(RuntimeError):
            tf.config.set_visible_devices([], "GPU")
    if num_devices > 1 and not tf.config.get_visible_devices("GPU"):
        if device != "cpu":
            raise MissingError(
                f"--devices {num_devices}: TensorFlow sees no GPU here",
                f"use --device cpu --devices {num_devices} to split the processor, or --devices 1",
            )
        (processor,) = tf.config.list_physical_devices("CPU")
        parts = [tf.config.LogicalDeviceConfiguration() for _ in range(num_devices)]
        try:
            tf.config.set_logical_device_configuration(processor, parts)
        except RuntimeError:
            existing = len(tf.config.list_logical_devices("CPU"))
            if existing < num_devices:
                raise ConfigurationError(
                    f"--devices {num_devices}: TensorFlow works with {counted(existing, 'device')} in this process "
                    "already",
                    "start a process of its own",
                ) from None


def runs_on_ipus(device: str) -> bool:
    """Returns whether a device means IPUs here: auto does if the SDK is installed."""
    return device == "ipu" or (device == "auto" and sdk_environment.has_poplar_sdk())


def create_session(
    device: str = "auto",
    *,
    verbose: bool = False,
    config: RunConfig = RunConfig(),
    group: Optional[ProcessGroup] = None,
    trains: bool = False,
) -> Session:
    """Returns the session for a device.

    Args:
        device: auto (IPUs where the Poplar SDK is, else a GPU if there is one, else the CPU), ipu, gpu or cpu.
        verbose: whether to show TensorFlow's own messages.
        config: the options of the run.
        group: the processes that train together; None: the instances of ``poprun``, else this process alone.
        trains: whether the session trains, so that several GPUs may share the work; otherwise it uses the first one.

    Raises:
        MissingError: the device is missing, or there are fewer devices than requested.
        ConfigurationError: TensorFlow was started with other settings in this process.
    """
    if device not in DEVICES:
        raise ConfigurationError(f"device '{device}' does not exist", f"use one of {', '.join(DEVICES)}")
    check_device(device)
    group = group or find_instances()
    if runs_on_ipus(device):
        return _poplar_session(config, verbose, group)
    from ipucnn.sessions.host.environment import import_tensorflow

    requested = config.devices if trains else 1
    import_tensorflow(
        verbose,
        lambda: _configure_devices(device, requested or 1),
        config.deterministic_operations,
        may_use_gpus=device != "cpu",
    )
    from ipucnn.sessions.host.session import HostSession

    gpus = [] if device == "cpu" else visible_gpus()
    if device == "gpu" and not gpus:
        raise MissingError("--device gpu: TensorFlow sees no GPU here", "use --device cpu")
    kind, cores, memory = "gpu" if gpus else "cpu", num_cores(), host_memory_bytes()
    places = gpus or [(f"/device:CPU:{number}", cpu_name() or "CPU") for number in range(requested or 1)]
    if requested:  # else all of them
        if len(places) < requested:
            raise MissingError(
                f"--devices {requested}: TensorFlow sees {counted(len(places), 'GPU')} here",
                f"use --devices {len(places)}",
            )
        places = places[:requested]
    together = group if isinstance(group, Alone) else Alone()
    names = [name for name, _ in places]
    return HostSession(DeviceInfo(kind, places[0][1], cores, memory), config, together, names)


def _poplar_session(config: RunConfig, verbose: bool, group: ProcessGroup) -> Session:
    from ipucnn.sessions.host.environment import import_tensorflow
    from ipucnn.sessions.poplar.errors import poplar_errors

    sdk_environment.set_flags(config)
    with poplar_errors():
        import_tensorflow(verbose)
    from ipucnn.sessions.poplar.device import load_api
    from ipucnn.sessions.poplar.session import PoplarSession

    return PoplarSession(load_api(), group, config)
