"""MobileNet and MobileNetV3 from Keras Applications, edited to the same layers and names in Keras 2.6 and 3.

Howard et al. 2017, arXiv:1704.04861; Howard et al. 2019, arXiv:1905.02244.
"""

from __future__ import annotations

from typing import Dict, List, Optional

from ipucnn.aliases import Tensor
from ipucnn.models.blueprint import Blueprint, Step, read_blueprint
from ipucnn.models.families.keras_applications import application


def build_mobilenet(inputs: Tensor, num_classes: int, application_name: str) -> Blueprint:
    """Builds MobileNet; its pooling keeps the two spatial axes, as in Keras 3, where Keras 2.6 reshapes afterwards."""
    blueprint = read_blueprint(application(application_name, inputs, num_classes))
    pool = next(step for step in blueprint.steps if step.kind == "GlobalAveragePooling2D")
    pool.config["keepdims"] = True
    blueprint.bypass([step.name for step in blueprint.consumers(pool.name) if step.kind == "Reshape"])
    fixed = {pool.name: "avg_pool"}
    blueprint.rename(lambda step: fixed.get(step.name, step.name))
    return blueprint


# The two names of the function in Keras 3.
_HARD_SWISH = ("hard_swish", "hard_silu")


def _single_reader(blueprint: Blueprint, name: str, kind: str) -> Optional[Step]:
    readers = blueprint.consumers(name)
    return readers[0] if len(readers) == 1 and readers[0].kind == kind else None


def _fold_operations(blueprint: Blueprint) -> None:
    """Replaces each ``relu6(x + 3) / 6``, and each product of it with x, by one layer."""
    from ipucnn.models.editing import replace_layer
    from ipucnn.models.layers.per_sample import HardSigmoid, HardSwish

    removed: List[Step] = []
    for add in [step for step in blueprint.steps if step.kind == "Add" and step.constants == [3.0]]:
        relu = _single_reader(blueprint, add.name, "ReLU")
        scale = relu and _single_reader(blueprint, relu.name, "Multiply")
        if relu is None or scale is None or len(scale.constants) != 1:
            raise ValueError(f"{add.name} is not the start of a hard sigmoid")
        source = add.inputs[0]
        product = _single_reader(blueprint, scale.name, "Multiply")
        swish = product is not None and sorted(product.inputs) == sorted([source, scale.name])
        last, folded = (product, HardSwish) if swish else (scale, HardSigmoid)
        assert last is not None
        removed += [add, relu] + ([scale] if swish else [])
        last.inputs, last.constants = [source], []
        replace_layer(last, folded, {})
    blueprint.steps = [step for step in blueprint.steps if not any(step is r for r in removed)]
    for step in blueprint.steps:
        if step.kind == "Activation" and _activation_name(step) in _HARD_SWISH:
            replace_layer(step, HardSwish, {})


def _activation_name(step: Step) -> str:
    activation = step.config["activation"]
    if isinstance(activation, dict):
        activation = activation.get("config", "")
    return str(activation)


_SUFFIX: Dict[str, str] = {"ReLU": "relu", "HardSwish": "hard_swish", "HardSigmoid": "hard_sigmoid"}


def _canonical(blueprint: Blueprint) -> None:
    """Renames the layers to Keras 3's names; an activation is named after the layer that it follows."""

    def spell(name: str) -> str:
        return name.replace("/BatchNorm", "_bn").replace("AvgPool", "avg_pool").replace("/", "_").lower()

    def new_name(step: Step) -> str:
        if step.kind in _SUFFIX and "squeeze_excite" not in step.name:
            source = spell(step.inputs[0])
            source = source[: -len("_bn")] if source.endswith("_bn") else source
            return f"{source}_{_SUFFIX[step.kind]}"
        if step.kind == "GlobalAveragePooling2D" and "squeeze" not in step.name:
            return "avg_pool"
        if step.kind in ("Dropout", "Flatten"):
            return step.kind.lower()
        return spell(step.name)

    blueprint.rename(new_name)


def build_mobilenet_v3(inputs: Tensor, num_classes: int, application_name: str) -> Blueprint:
    """Builds MobileNetV3 Small or Large."""
    from ipucnn.models.editing import strip_preprocessing

    blueprint = read_blueprint(application(application_name, inputs, num_classes))
    strip_preprocessing(blueprint)
    _fold_operations(blueprint)
    _canonical(blueprint)
    return blueprint
