"""``python -m poplar_double.run ARGUMENTS``: the command line with the double installed, in a process of its own.

Several such processes with POPDIST_* and ``POPLAR_DOUBLE_EXCHANGE`` set are the instances of one ``poprun``.
``POPLAR_DOUBLE_SDK`` and ``POPLAR_DOUBLE_IPUS`` say which SDK and how many IPUs are there.
"""

import os
import sys
from typing import List


def main(arguments: List[str]) -> int:
    """Runs one command; returns its exit code."""
    from ipucnn import cli
    from ipucnn.sessions.host.environment import set_variables

    set_variables()
    from poplar_double import installed

    sdk, ipus = os.environ.get("POPLAR_DOUBLE_SDK", "3.4"), os.environ.get("POPLAR_DOUBLE_IPUS", "16")
    with installed(sdk=sdk, num_ipus=int(ipus)):
        return int(cli.run(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
