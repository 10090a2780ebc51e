"""Location of the compiled Poplar custom operations (``custom_ops/``, built by ``make`` on a machine with the SDK).

This module does not import TensorFlow, because ``ipucnn doctor`` looks for the operations without it.
"""

import os
from pathlib import Path
from typing import Optional

FOLDER_VARIABLE = "IPUCNN_CUSTOM_OPS"
CROP_LIBRARY = "libipucnn_crop.so"


def crop_library() -> Optional[Path]:
    """The library with the crop operation; None if it was not built.

    Its folder is IPUCNN_CUSTOM_OPS if that is set, else ``custom_ops/build`` of the source tree.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "custom_ops" / "build"
    library = folder / CROP_LIBRARY
    return library.resolve() if os.path.isfile(library) else None
