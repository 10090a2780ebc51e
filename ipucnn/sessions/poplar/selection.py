"""A device that the user named: its number of IPUs decides how many replicas run."""

from typing import Optional

from ipucnn.errors import ConfigurationError
from ipucnn.sessions.poplar.versions import Api


def check_selected(api: Api, select_ipu: Optional[int], num_ipus: int) -> None:
    """Refuses a named device of another size than the program's; ask once the system is configured.

    The SDK divides a device by the IPUs of a replica, and would train with other replicas than the program says
    (keras/ipu of SDK 3.4: ``get_num_of_ipus_in_device`` // shards).

    Args:
        select_ipu: ``--select-ipu``; None: the SDK found a device of the right size.
        num_ipus: of the program.

    Raises:
        ConfigurationError: naming both numbers.
    """
    if select_ipu is None:
        return
    found = int(api.ipu.utils.get_num_of_ipus_in_device("/device:IPU:0"))
    if found != num_ipus:
        raise ConfigurationError(
            f"--select-ipu {select_ipu}: that device has {found} IPU(s), and {num_ipus} are needed",
            f"take the number of a device of {num_ipus} from gc-info -l, or drop --select-ipu",
        )
