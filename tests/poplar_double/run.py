"""``python -m poplar_double.run ARGUMENTS`` runs the command line with the test double, in a process of its own.

Several such processes with POPDIST_* and ``POPLAR_DOUBLE_EXCHANGE`` set are the instances of one ``poprun``.
Arguments may be those of several commands, with ``+`` between them, run one after the other as long as they succeed.
``POPLAR_DOUBLE_SDK`` and ``POPLAR_DOUBLE_IPUS`` set the SDK's version and the number of IPUs.
"""

import gc
import os
import sys
from typing import List


def main(arguments: List[str]) -> int:
    """Runs the commands; returns the last one's exit code."""
    from ipucnn import cli
    from ipucnn.sessions.host.environment import set_variables

    set_variables()
    gc.disable()  # importing TensorFlow makes no garbage
    from poplar_double import installed

    gc.enable()
    from poplar_double.exchange import FOLDER_VARIABLE

    sdk, ipus = os.environ.get("POPLAR_DOUBLE_SDK", "3.4"), os.environ.get("POPLAR_DOUBLE_IPUS", "16")
    exchange = os.environ.get(FOLDER_VARIABLE)
    code = 0
    for number in range(arguments.count("+") + 1):
        end = arguments.index("+") if "+" in arguments else len(arguments)
        command, arguments = arguments[:end], arguments[end + 1 :]
        if exchange:
            # Each command is a run of poprun with an exchange of its own.
            os.environ[FOLDER_VARIABLE] = os.path.join(exchange, str(number))
        with installed(sdk=sdk, num_ipus=int(ipus)):
            code = int(cli.run(command))
        if code:
            break
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
