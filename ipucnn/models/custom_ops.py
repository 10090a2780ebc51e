"""Where the compiled Poplar custom operations lie (``custom_ops/``, built by ``make`` where the SDK is).

No TensorFlow: whether there is one is asked before anything is imported.
"""

import os
from pathlib import Path
from typing import Optional

FOLDER_VARIABLE = "IPUCNN_CUSTOM_OPS"
CROP_LIBRARY = "libipucnn_crop.so"


def crop_library() -> Optional[Path]:
    """The library with the crop, None if it was not built.

    Looked for in the folder IPUCNN_CUSTOM_OPS names, else in ``custom_ops/build`` of the source tree.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "custom_ops" / "build"
    library = folder / CROP_LIBRARY
    return library.resolve() if os.path.isfile(library) else None
