"""The environment around the SDK on the test double's machine: Python 3.8, its wheels, and a shell that enabled it."""

import os
from typing import Any

from ipucnn.sessions.poplar.sdk_environment import SDK_MODULES, SdkEnvironment


def environment_of(machine: Any) -> SdkEnvironment:
    """Returns a sound environment of the machine's SDK, with the changes in ``machine.environment``.

    Its ``versions`` and ``variables`` are added to the sound ones; a variable that is None is not set.
    """
    version = f"{machine.sdk}.0"
    changes = dict(machine.environment)
    enabled = f"/opt/poplar_sdk-ubuntu_20_04-{version}+1-a/poplar-ubuntu_20_04-{version}+2-b"
    variables = {**os.environ, "POPLAR_SDK_ENABLED": enabled, **changes.pop("variables", {})}
    versions = {
        "tensorflow": f"2.6.3+gc{version}+3+c+amd_znver1",
        "keras": f"2.6.0+gc{version}+4+d",
        "numpy": "1.19.5",
        "ipu-tensorflow-addons": f"2.6.3+gc{version}",
        **changes.pop("versions", {}),
    }
    sound = SdkEnvironment(
        python=(3, 8),
        versions=versions,
        has_ipu_package=True,
        has_keras_ipu=True,
        modules=SDK_MODULES,
        variables={name: value for name, value in variables.items() if value is not None},
        cpu_flags=("avx2",),
    )
    return SdkEnvironment(**{**vars(sound), **changes})
