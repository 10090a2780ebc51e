"""The methods that models constructed inside ``IPUStrategy.scope()`` get, with the SDK's checks."""

from typing import Any, Dict, List

from tensorflow import keras

from .config import ENUMS, check_options
from .engine import Engine
from .facts import FACTS, checked, like, signature_of


class StageAssignment:
    """One call of a layer and its stage, as ``FunctionalLayerPipelineStageAssignment``."""

    def __init__(self, layer: Any, node_index: int, pipeline_stage: Any = None) -> None:
        self._layer, self._node_index = layer, node_index
        self.pipeline_stage = pipeline_stage

    layer = property(lambda self: self._layer)
    node_index = property(lambda self: self._node_index)


class PipelineStageOptions:
    """Holds the Poplar options of one stage: dictionaries of strings."""

    def __init__(self, **options: Any) -> None:
        for name, value in options.items():
            if value is not None and not isinstance(value, dict):
                raise TypeError(f"{name} must be a dict")
            check_options(value or {})
        self.options = {name: dict(value or {}) for name, value in options.items()}


make_stage_options = like("ipu.ops.pipelining_ops.PipelineStageOptions")(PipelineStageOptions)


def layer_calls(model: Any) -> List[Any]:
    """Returns (layer, node index) of every call of a functional model in post order, without the inputs."""
    calls: List[Any] = []
    seen = set()

    def visit(tensor: Any) -> None:
        history = tensor._keras_history
        layer = getattr(history, "layer", None) or history.operation
        key = (id(layer), history.node_index)
        if key in seen:
            return
        seen.add(key)
        node = layer._inbound_nodes[history.node_index]
        parents = node.keras_inputs if hasattr(node, "keras_inputs") else node.input_tensors
        for parent in parents:
            visit(parent)
        if not isinstance(layer, keras.layers.InputLayer):
            calls.append((layer, history.node_index, list(parents)))

    for output in model.outputs:
        visit(output)
    return calls


def _positive(name: str, value: Any) -> None:
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


class Extension:
    """State of one model's options; the methods are bound to the model by :func:`extend`."""

    def __init__(self, machine: Any, model: Any) -> None:
        self.machine, self.model, self.strategy = machine, model, machine.strategy
        self.accumulation: Any = None
        self.pipelining: Any = None
        self.device_mapping: Any = None
        self.reduction = ENUMS["GradientAccumulationReductionMethod"].SUM
        self.accumulation_keywords: Dict[str, Any] = {}
        self.pipelining_keywords: Dict[str, Any] = {}
        self.infeed: Dict[str, Any] = {}
        self.metric_reduction = "NONE"
        self.assignment: Any = None
        self.engine = Engine(self)

    def _refuse(self, method: str, keywords: Dict[str, Any]) -> None:
        for name in keywords:
            if name in FACTS["forbidden_keywords"][method]:
                raise ValueError(f"{method} does not take {name}")

    def _changed(self, call_: str, **arguments: Any) -> None:
        self.machine.note(call_, model=self.model.name, **arguments)
        self.engine.forget()

    def set_replication_options(self, replicated_metric_reduction_method: Any) -> None:
        method = ENUMS["ReplicatedMetricReductionMethod"].parse(replicated_metric_reduction_method)
        self.metric_reduction = method.name
        self._changed("set_replication_options")

    def set_gradient_accumulation_options(
        self,
        gradient_accumulation_steps_per_replica: Any,
        gradient_accumulation_reduction_method: Any,
        **keywords: Any,
    ) -> None:
        # SDK 3.0 lacks the parameter, and takes it for an unknown keyword of the optimizer.
        absent = FACTS["absent_in"].get(self.machine.sdk, {}).get("parameters", {})
        keyword = "use_v2_gradient_accumulation_optimizer"
        is_v2 = keyword not in absent.get("set_gradient_accumulation_options", ()) and keywords.pop(
            keyword, False
        )
        _positive("gradient_accumulation_steps_per_replica", gradient_accumulation_steps_per_replica)
        self._refuse("set_gradient_accumulation_options", keywords)
        self.reduction = ENUMS["GradientAccumulationReductionMethod"].parse(
            gradient_accumulation_reduction_method
        )
        if is_v2:
            raise NotImplementedError("the double accumulates in one way")
        if gradient_accumulation_steps_per_replica is not None:
            self.accumulation = gradient_accumulation_steps_per_replica
        self.accumulation_keywords = keywords
        self._changed("set_gradient_accumulation_options", keywords=keywords)

    def set_pipelining_options(
        self,
        gradient_accumulation_steps_per_replica: Any,
        device_mapping: Any,
        accumulate_outfeed: Any,
        gradient_accumulation_reduction_method: Any,
        **keywords: Any,
    ) -> None:
        _positive("gradient_accumulation_steps_per_replica", gradient_accumulation_steps_per_replica)
        if device_mapping is not None and not (
            isinstance(device_mapping, list) and all(isinstance(d, int) for d in device_mapping)
        ):
            raise ValueError("device_mapping must be a list of integers")
        self._refuse("set_pipelining_options", keywords)
        self.reduction = ENUMS["GradientAccumulationReductionMethod"].parse(
            gradient_accumulation_reduction_method
        )
        if gradient_accumulation_steps_per_replica is not None:
            self.pipelining = gradient_accumulation_steps_per_replica
        if device_mapping is not None:
            self.device_mapping = device_mapping
        if accumulate_outfeed is not None:
            raise NotImplementedError("the double lacks accumulated outfeeds")
        self.pipelining_keywords = keywords
        self._changed("set_pipelining_options")

    def set_infeed_queue_options(self, **keywords: Any) -> None:
        self._refuse("set_infeed_queue_options", keywords)
        self.infeed = keywords
        self._changed("set_infeed_queue_options")

    def get_pipeline_stage_assignment(self) -> List[Any]:
        if self.assignment is None:
            return [StageAssignment(layer, index) for layer, index, _ in layer_calls(self.model)]
        return self.assignment

    def set_pipeline_stage_assignment(self, pipeline_stage_assignment: Any) -> None:
        calls = layer_calls(self.model)
        given = pipeline_stage_assignment
        if not isinstance(given, list) or len(given) != len(calls):
            raise ValueError(f"the stage assignment must be a list of {len(calls)} entries")
        if not all(isinstance(entry, StageAssignment) for entry in given):
            raise ValueError("entries must be FunctionalLayerPipelineStageAssignment")
        if self.machine.sdk == "3.0":  # accepted in any order
            places = {(id(layer), index): number for number, (layer, index, _) in enumerate(calls)}
            given = sorted(given, key=lambda entry: places.get((id(entry.layer), entry.node_index), -1))
        stages: Dict[int, int] = {}
        for entry, (layer, index, parents) in zip(given, calls):
            if entry.layer is not layer or entry.node_index != index:
                raise ValueError(f"the assignment is not in post order: {entry.layer.name}, not {layer.name}")
            if entry.pipeline_stage is None:
                raise ValueError(f"{layer.name} has no pipeline stage")
            for parent in parents:
                history = parent._keras_history
                source = getattr(history, "layer", None) or history.operation
                if stages.get(id(source), 0) > entry.pipeline_stage:
                    raise ValueError(f"{layer.name} consumes an output of a later stage ({source.name})")
            stages[id(layer)] = entry.pipeline_stage
        if self.machine.sdk == "3.0" and set(stages.values()) != set(range(max(stages.values()) + 1)):
            raise ValueError(f"pipeline stages must have no hole: {sorted(set(stages.values()))}")
        self.assignment = list(given)
        self._changed("set_pipeline_stage_assignment")


# Of the SDK's methods of a model, those that the session calls.
METHODS = (
    "set_replication_options",
    "set_gradient_accumulation_options",
    "set_pipelining_options",
    "set_infeed_queue_options",
    "get_pipeline_stage_assignment",
    "set_pipeline_stage_assignment",
)
_ENGINE = ("fit", "evaluate", "predict")


def extend(machine: Any, model: Any) -> None:
    """Gives a functional model the SDK's methods, as the SDK's Keras does on construction."""
    extension = Extension(machine, model)
    absent = FACTS["absent_in"].get(machine.sdk, {})
    body: Dict[str, Any] = {"_double": extension, "__original_class__": type(model)}
    for name in METHODS:
        if name in absent.get("methods", ()):
            continue
        signature = signature_of(FACTS["model_methods"][name], absent.get("parameters", {}).get(name, ()))
        method = checked(signature, name, getattr(extension, name))
        body[name] = staticmethod(method)
    for name in _ENGINE:
        signature = signature_of(FACTS["delegates"][name])
        body[name] = staticmethod(checked(signature, name, getattr(extension.engine, name)))
    kind = type(model)

    def compile_(self: Any, *args: Any, **kwargs: Any) -> None:
        # Keras resets its compile cache, and the SDK's with it.
        extension.engine.forget()
        kind.compile(self, *args, **kwargs)

    body["compile"] = compile_
    extended = type(kind.__name__, (kind,), body)
    object.__setattr__(model, "__class__", extended)
