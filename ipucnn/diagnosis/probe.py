"""TensorFlow, imported in a process of its own: its crash or hang is an answer, too."""

import json
import os
import sys
from dataclasses import dataclass
from typing import Any, Dict, Optional

from ipucnn.diagnosis import tools
from ipucnn.errors import MissingError, UserError

__all__ = ["TIMEOUT_S", "Probe", "probe_tensorflow"]

TIMEOUT_S = 180.0

# Run by the same Python; writes one line of JSON after a mark, as libraries print to stdout as well.
_MARK = "ipucnn-probe:"
# The current folder, which ``-c`` puts first on the path, is anybody's: what lies there is not to be imported.
_CODE = f"""
import sys
sys.path[:] = [folder for folder in sys.path if folder]
import json, os
answer = {{}}
# Keras 3 imports matplotlib, which would take its settings from there.
exists = os.path.exists
os.path.exists = lambda path: path != "matplotlibrc" and exists(path)
import tensorflow as tf
answer["tensorflow"] = tf.__version__
from tensorflow import keras
answer["keras"] = keras.__version__
import numpy
answer["numpy"] = numpy.__version__
answer["gpus"] = len(tf.config.list_physical_devices("GPU"))
tf.linalg.matmul(tf.ones([2, 3]), tf.ones([3, 2])).numpy()
try:
    from tensorflow.python import ipu
    answer["ipu"] = hasattr(ipu, "config")
except ImportError as error:
    answer["ipu"], answer["ipu_error"] = False, str(error)
print({_MARK!r} + json.dumps(answer), flush=True)
"""


@dataclass(frozen=True)
class Probe:
    """What came of importing TensorFlow.

    Attributes:
        answer: versions, number of GPUs, whether ``tensorflow.python.ipu`` can be imported; empty if it failed.
        error: what went wrong, None if nothing did.
    """

    answer: Dict[str, Any]
    error: Optional[UserError]


def probe_tensorflow(timeout_s: float = TIMEOUT_S) -> Probe:
    """Imports TensorFlow and Keras and looks for GPUs and the IPU package, in another process."""
    variables = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_FORCE_GPU_ALLOW_GROWTH": "true", **os.environ}
    ran = tools.run([sys.executable, "-c", _CODE], timeout_s, variables)
    if ran.problem is None:
        lines = [line for line in ran.output.splitlines() if line.startswith(_MARK)]
        try:
            return Probe(json.loads(lines[-1][len(_MARK) :]), None)
        except (IndexError, ValueError):
            return Probe(
                {},
                MissingError(
                    "importing TensorFlow ended the process without an error", "install TensorFlow again"
                ),
            )
    return Probe({}, _error(ran))


def _error(ran: tools.Ran) -> UserError:
    from ipucnn.sessions.poplar.errors import translate_output

    if ran.signal_name == "SIGILL":
        return MissingError(
            "TensorFlow dies of an illegal instruction when it is imported: it was built for another processor",
            "of the Poplar SDK's wheels use the one for this processor (amd_znver1 or intel_skylake512)",
        )
    known = translate_output(ran.errors)
    if known is not None:
        return known
    last = [line.strip() for line in ran.errors.splitlines() if line.strip()][-1:]
    said = f": {last[0]}" if last else ""
    return MissingError(
        f"TensorFlow cannot be imported: the process {ran.problem}{said}",
        "python -c 'import tensorflow' shows all of it; install the requirements again where it is damaged",
    )
