"""The one place that knows what hardware is here."""

from typing import TYPE_CHECKING, Callable, List, Optional

from ipucnn.config.options import RunConfig
from ipucnn.errors import ConfigurationError, MissingError
from ipucnn.machine import cpu_name, host_memory_bytes, num_cores
from ipucnn.sessions.poplar import surroundings
from ipucnn.sessions.session import DeviceInfo, Session

if TYPE_CHECKING:
    from ipucnn.sessions.host.cluster import Cluster

DEVICES = ("auto", "ipu", "gpu", "cpu")


def check_device(device: str) -> None:
    """Refuses what cannot run here, before TensorFlow is imported.

    Raises:
        MissingError, ConfigurationError: IPUs are meant, and the SDK is not here or not in order; or there is too
            little memory for TensorFlow.
    """
    from ipucnn.sessions.host.environment import check_memory

    check_memory()
    if device == "ipu" and not surroundings.has_poplar_sdk():
        raise MissingError(
            "--device ipu needs the Poplar SDK's TensorFlow, which is not installed here",
            "use --device cpu, or run inside the Poplar SDK's Python environment",
        )
    if runs_on_ipus(device):
        surroundings.check_requirements()


def device_warnings(device: str) -> List[str]:
    """What may go wrong on a device here, one line each; for the user, before the work begins."""
    if not runs_on_ipus(device):
        return []
    found = surroundings.look_around()
    return [f"{doubt.message}: {doubt.hint}" for doubt in surroundings.doubts(found)]


def visible_gpus() -> List[str]:
    """Names of the GPUs TensorFlow sees."""
    import tensorflow as tf

    return [device.name for device in tf.config.list_logical_devices("GPU")]


def runs_on_ipus(device: str) -> bool:
    """Whether a device means IPUs here: auto does where the SDK is."""
    return device == "ipu" or (device == "auto" and surroundings.has_poplar_sdk())


def create_session(
    device: str = "auto",
    *,
    verbose: bool = False,
    config: Optional[RunConfig] = None,
    cluster: Optional["Cluster"] = None,
) -> Session:
    """The session for a device.

    Args:
        device: auto (IPUs where the Poplar SDK is, else a GPU if there is one, else the CPU), ipu, gpu or cpu.
        verbose: let TensorFlow print what it prints.
        config: with the options that sessions act on; None: all defaults.
        cluster: the workers that train together on the host; None: this process is alone.

    Raises:
        MissingError: the device is not here.
        ConfigurationError: several GPUs; the host session computes on one.
    """
    if device not in DEVICES:
        raise ConfigurationError(f"device '{device}' does not exist", f"use one of {', '.join(DEVICES)}")
    check_device(device)
    from ipucnn.sessions.host.environment import import_tensorflow

    if runs_on_ipus(device):
        return _poplar_session(config, lambda: import_tensorflow(verbose))
    import_tensorflow(verbose, cluster.start_collectives if cluster is not None else None)
    from ipucnn.sessions.host.session import HostSession

    cores = num_cores()
    gpus = [] if device == "cpu" else visible_gpus()
    if gpus and cluster is not None:
        raise ConfigurationError(
            f"{cluster.count} workers compute on CPUs, and TensorFlow sees a GPU here",
            "add --device cpu, or train with one worker on the GPU",
        )
    if device == "gpu" and not gpus:
        raise MissingError("--device gpu: TensorFlow sees no GPU here", "use --device cpu")
    if len(gpus) > 1:
        raise ConfigurationError(
            f"{len(gpus)} GPUs are visible, and the host session computes all replicas on one",
            "set CUDA_VISIBLE_DEVICES=0 (or another number), or use --device cpu",
        )
    if gpus:
        info = DeviceInfo("gpu", gpus[0], cores, host_memory_bytes())
        return HostSession(info, gpus[0], config, cluster)
    info = DeviceInfo("cpu", cpu_name() or "CPU", cores, host_memory_bytes())
    place = "/CPU:0" if cluster is None or not cluster.place else f"{cluster.place}/device:CPU:0"
    return HostSession(info, place, config, cluster)


def _poplar_session(config: Optional[RunConfig], import_tensorflow: Callable[[], object]) -> Session:
    from ipucnn.sessions.poplar.errors import poplar_errors
    from ipucnn.sessions.poplar.popdist import find_instances

    config = RunConfig() if config is None else config
    instances = find_instances()
    surroundings.set_flags(config)
    with poplar_errors():
        import_tensorflow()
    from ipucnn.sessions.poplar.device import Device, load_api
    from ipucnn.sessions.poplar.session import PoplarSession

    return PoplarSession(Device(load_api(), instances), config)
