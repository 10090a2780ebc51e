"""The lines of Python on an export's page that load the file in its own runtime and predict with it.

They need NumPy, Pillow and the runtime, and follow the lines of :mod:`ipucnn.runs.network_input` in one script.  For
masks they contain the loop over patches, so that an image of any size gets the mask of ``ipucnn infer``.
"""

from typing import List, Sequence

import numpy as np

from ipucnn.aliases import PlainDict
from ipucnn.runs.images.outputs import MaskForm
from ipucnn.runs.runtimes import KERAS, ONNX, SAVED_MODEL, SIGNATURE, TFLITE

IMAGE, MASK = "image.png", "mask.png"
"""The files that the lines read and write."""


def running_lines(record: PlainDict) -> str:
    """Returns the source of a script that follows ``network_input.python_lines``; "" for a program for an IPU.

    Args:
        record: the complete ``export.json``.
    """
    if record["format"] not in (SAVED_MODEL, KERAS, ONNX, TFLITE):
        return ""
    is_mask = record["input"]["patch"] is not None
    lines = [*_network(record), "", "", *(_mask(record) if is_mask else _label(record))]
    return "\n".join(lines) + "\n"


def _network(record: PlainDict) -> List[str]:
    """Returns the lines that load the file and define ``network(images)``."""
    file, name, output = record["file"], record["input"]["name"], record["output"]["name"]
    if record["format"] == ONNX:
        loads = ["import onnxruntime", "", f'session = onnxruntime.InferenceSession("{file}")']
        call = f'session.run(["{output}"], {{"{name}": images}})[0]'
    elif record["format"] == TFLITE:
        loads = [
            "try:",
            "    from ai_edge_litert.interpreter import Interpreter",
            "except ImportError:",
            "    import tensorflow as tf",
            "",
            "    Interpreter = tf.lite.Interpreter",
            "",
            f'runner = Interpreter("{file}").get_signature_runner("{SIGNATURE}")',
        ]
        call = f'runner({name}=images)["{output}"]'
    elif record["format"] == SAVED_MODEL:
        loads = ["import tensorflow as tf", "", f'loaded = tf.saved_model.load("{file}")']
        call = f'loaded.signatures["{SIGNATURE}"]({name}=tf.constant(images))["{output}"].numpy()'
    else:
        loads = [
            "from tensorflow import keras",
            "",
            f'model = keras.models.load_model("{file}", compile=False)',
        ]
        call = "np.asarray(model(images, training=False))"
    batch = record["input"]["shape"][0]
    head = [
        "",
        "",
        "def network(images):",
        f'    """The {output} of images, [batch, height, width, channels]."""',
    ]
    if batch is None:
        return [*loads, *head, f"    return {call}"]
    return [
        *loads,
        *head,
        "    count = len(images)",
        f"    empty = np.zeros(({batch} - count, *images.shape[1:]), images.dtype)",
        "    images = np.concatenate([images, empty])",
        f"    return {call}[:count]",
    ]


def _label(record: PlainDict) -> List[str]:
    return [
        "import json",
        "",
        'labels = json.load(open("labels.json", encoding="utf-8"))',
        f'scores = network(network_input("{IMAGE}")[np.newaxis])[0]',
        "print(labels[scores.argmax()])",
    ]


def _mask(record: PlainDict) -> List[str]:
    height, width = record["input"]["patch"]["output"]
    step = record["input"]["patch"]["first_at_multiples_of"]
    setup, num_classes = record["setup"], len(record["setup"]["class_names"])
    form = MaskForm(tuple(setup.get("mask_values", ())), tuple(map(tuple, setup.get("class_colours", ()))))
    values = form.stored(np.arange(num_classes), num_classes)
    return [
        "def starts(size, patch):",
        '    """The first rows (or columns) of patches that cover an image without gaps."""',
        f"    stride = patch // {step} * {step} or patch",
        "    return range(0, max(size - patch, 0) + stride, stride)",
        "",
        "",
        "def predicted_mask(path, page=0):",
        '    """The mask of an image of any size, [height, width], or of its colours, [height, width, 3]."""',
        "    image = Image.open(path)",
        "    image.seek(page)",
        f"    mask = np.zeros((image.height, image.width{', 3' if values.ndim == 2 else ''}), np.{values.dtype})",
        f"    for row in starts(image.height, {height}):",
        f"        for column in starts(image.width, {width}):",
        "            scores = network(network_input(path, row, column, page)[np.newaxis])[0]",
        f"            part = mask[row : row + {height}, column : column + {width}]",
        *(f"            {line}" for line in _classes(record)),
        f"            values = np.array({values.tolist()}, mask.dtype)[classes]",
        "            part[:] = values[: part.shape[0], : part.shape[1]]",
        "    return mask",
        "",
        "",
        f'image = Image.fromarray(predicted_mask("{IMAGE}"))',
        *([] if form.palette is None else [f"image.putpalette({form.palette})"]),
        f'image.save("{MASK}")',
    ]


def _classes(record: PlainDict) -> Sequence[str]:
    """Returns the lines that turn the outputs of a patch into classes, as ``infer`` does."""
    if record["threshold"] is None:
        return ["classes = scores.argmax(-1)"]
    if record["output"]["name"] == "probabilities":
        share = "scores[..., 1]"
    else:
        share = "1 / (1 + np.exp(scores[..., 0].astype(float) - scores[..., 1]))"
    return [
        f"probability = np.float32({share})",
        f"classes = np.uint8(probability > {record['threshold']!r})",
    ]
