"""MobileNet and MobileNetV3 from Keras Applications, edited to the same layers and names in Keras 2.6 and 3.

Howard et al. 2017, arXiv:1704.04861; Howard et al. 2019, arXiv:1905.02244.
"""

from __future__ import annotations

from typing import Dict, List, Optional

from ipucnn.aliases import Tensor
from ipucnn.models.blueprint import Blueprint, Node
from ipucnn.models.families.keras_applications import application
from ipucnn.models.keras_config import read_blueprint


def build_mobilenet(inputs: Tensor, num_classes: int, application_name: str) -> Blueprint:
    """Builds MobileNet; its pooling keeps the two spatial axes, as in Keras 3, where Keras 2.6 reshapes afterwards."""
    blueprint = read_blueprint(application(application_name, inputs, num_classes))
    pool = next(node for node in blueprint.nodes if node.kind == "GlobalAveragePooling2D")
    pool.config["keepdims"] = True
    blueprint.bypass([node.name for node in blueprint.consumers(pool.name) if node.kind == "Reshape"])
    fixed = {pool.name: "avg_pool"}
    blueprint.rename(lambda node: fixed.get(node.name, node.name))
    return blueprint


# The two names of the function in Keras 3.
_HARD_SWISH = ("hard_swish", "hard_silu")


def _single_reader(blueprint: Blueprint, name: str, kind: str) -> Optional[Node]:
    readers = blueprint.consumers(name)
    return readers[0] if len(readers) == 1 and readers[0].kind == kind else None


def _fold_operations(blueprint: Blueprint) -> None:
    """Replaces each ``relu6(x + 3) / 6``, and each product of it with x, by one layer."""
    from ipucnn.models.layers.per_sample import HardSigmoid, HardSwish

    removed: List[Node] = []
    for add in [node for node in blueprint.nodes if node.kind == "Add" and node.constants == [3.0]]:
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
        last.inputs = [source]
        last.replace(folded, {})
    blueprint.nodes = [node for node in blueprint.nodes if not any(node is r for r in removed)]
    for node in blueprint.nodes:
        if node.kind == "Activation" and _activation_name(node) in _HARD_SWISH:
            node.replace(HardSwish, {})


def _activation_name(node: Node) -> str:
    activation = node.config["activation"]
    if isinstance(activation, dict):
        activation = activation.get("config", "")
    return str(activation)


_SUFFIX: Dict[str, str] = {"ReLU": "relu", "HardSwish": "hard_swish", "HardSigmoid": "hard_sigmoid"}


def _canonical(blueprint: Blueprint) -> None:
    """Renames the layers to Keras 3's names; an activation is named after the layer that it follows."""

    def spell(name: str) -> str:
        return name.replace("/BatchNorm", "_bn").replace("AvgPool", "avg_pool").replace("/", "_").lower()

    def new_name(node: Node) -> str:
        if node.kind in _SUFFIX and "squeeze_excite" not in node.name:
            source = spell(node.inputs[0])
            source = source[: -len("_bn")] if source.endswith("_bn") else source
            return f"{source}_{_SUFFIX[node.kind]}"
        if node.kind == "GlobalAveragePooling2D" and "squeeze" not in node.name:
            return "avg_pool"
        if node.kind in ("Dropout", "Flatten"):
            return node.kind.lower()
        return spell(node.name)

    blueprint.rename(new_name)


def build_mobilenet_v3(inputs: Tensor, num_classes: int, application_name: str) -> Blueprint:
    """Builds MobileNetV3 Small or Large."""
    blueprint = read_blueprint(application(application_name, inputs, num_classes))
    _fold_operations(blueprint)
    _canonical(blueprint)
    return blueprint
