"""The result of ``ipucnn plan-splits``: a plan with everything predicted for it, as a value, JSON and YAML.

Nothing here was measured: predictions of the cost and memory model are named ``predicted_...``.  Sizes are in bytes,
times in seconds of one micro-batch unless the name says otherwise.
"""

import json
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Tuple

from ipucnn import documents
from ipucnn.aliases import PlainValue
from ipucnn.config.options import BY_NAME, RunConfig
from ipucnn.config.values import norm_of
from ipucnn.errors import ConfigurationError, DataError, did_you_mean
from ipucnn.filesystem import read_text, shown
from ipucnn.hardware import Calibration
from ipucnn.models.registry import is_layer_graph
from ipucnn.planning.program import PlannedProgram, run_values
from ipucnn.text import shown_value

# The first format that is released; until then it changes without another number.
SCHEMA_VERSION = 1


# Options of a run that a plan repeats beside its settings, so that the run has the plan's network and optimizer.
_ALWAYS = ("optimizer", "optimizer_params", "norm_layer")
_OF_LAYERS = ("norm_layer", "dropout", "base_filters")
OF_INPUT = ("dataset", "image_size")
KEPT = (*_ALWAYS, "convolution_options", "matmul_options", *_OF_LAYERS[1:], "freeze", *OF_INPUT)


def kept_options(config: RunConfig) -> Dict[str, Any]:
    """Returns the options of a configuration that its plan repeats, see ``KEPT``: names, and values as in YAML."""
    return {
        name: BY_NAME[name].yaml_value(getattr(config, name))
        for name in KEPT
        if name in _ALWAYS or getattr(config, name) != BY_NAME[name].default
    }


def layer_options(options: Mapping[str, PlainValue]) -> Dict[str, Any]:
    """Returns those of a plan's or a run's options (see ``kept_options``) that determine the layers, by YAML key."""
    named = {BY_NAME[name].key: options[name] for name in _OF_LAYERS if name in options}
    # Momentum and epsilon do not change the layer of a norm.
    norm = dict(named.get("norm-layer", BY_NAME["norm_layer"].default))
    parameters = [f"{k} {v}" for k, v in norm.items() if k in ("num_groups", "channels_per_group")]
    named["norm-layer"] = " ".join([norm_of(norm), *parameters])
    return named


@dataclass(frozen=True)
class SystemFacts:
    """The machine of the plan.

    Attributes:
        name: the name as ``--system`` accepts it.
        ipu: the title of the IPU generation.
        num_ipus: the number of IPUs of the whole system.
        ipu_memory_bytes: the memory of one IPU.
        calibration: the factors of the profile used for the plan.
    """

    name: str
    title: str
    ipu: str
    num_ipus: int
    ipu_memory_bytes: float
    calibration: Calibration = field(default_factory=Calibration)


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage.

    Attributes:
        stage: its number, from 0.
        ipu: the IPU of the stage, from 0 within the replica.
        first_layer, last_layer: the names of the first and last layer in the stage.
        macs: multiply-accumulates of the forward pass of one sample.
        num_parameters: the number of elements in all weights.
        predicted_backward_s: the backward pass without recomputation, which is ``predicted_recompute_s`` (0 if there is
            none).
        predicted_receive_s: the transfer of everything that crosses the cut before it, in one direction.
        received_bytes: the bytes of that transfer.
        skips: the layers whose output crosses the cut, but is not an input of the stage's first layer.
        predicted_memory_bytes: bytes by category, see ``memory.CATEGORIES``; for a segment that shares an IPU, its
            part.
    """

    stage: int
    ipu: int
    first_layer: str
    last_layer: str
    num_layers: int
    macs: int
    num_parameters: int
    predicted_forward_s: float
    predicted_backward_s: float
    predicted_recompute_s: float
    predicted_receive_s: float
    received_bytes: float
    skips: Tuple[str, ...]
    predicted_memory_bytes: Dict[str, float]


@dataclass(frozen=True)
class IpuPlan:
    """The memory of one IPU of a replica.

    Attributes:
        stages: the stages on the IPU.
        predicted_memory_bytes: bytes by category, in the order of ``memory.CATEGORIES``.
        predicted_fill: their sum over ``capacity_bytes``.
        verdict: "fits", "uncertain" or "does not fit".
    """

    ipu: int
    stages: Tuple[int, ...]
    predicted_memory_bytes: Dict[str, float]
    capacity_bytes: float
    predicted_fill: float
    verdict: str


@dataclass(frozen=True)
class ProfileLayer:
    """A layer of the model in its canonical order.

    Attributes:
        stage: the stage of the layer.
        predicted_cumulative_s: forward and backward (without recomputation) of this layer and all layers before it.
    """

    name: str
    op_class: str
    stage: int
    predicted_forward_s: float
    predicted_backward_s: float
    predicted_cumulative_s: float


@dataclass(frozen=True)
class ComparisonRow:
    """Other splits under the plan's settings, or the best under another schedule, predicted by the same model.

    Attributes:
        name: "params", "equal-layers", "equal-blocks", "preset NAME", a file's name, or a schedule and its origin.
        predicted_fill: the fill of the fullest IPU.
        predicted_best_tick_s: the tick, with its share of the weights' update, of the best split within the larger of
            two memory limits: the plan's (then it is the plan's own split, if the planner chose it), or the need of
            these splits.  For another schedule: those of the plan.
        ratio: the same of these splits over ``predicted_best_tick_s``; at least 1, because the best split is proved
            to be the best.
    """

    name: str
    splits: Tuple[str, ...]
    predicted_tick_s: float
    predicted_images_per_s: float
    predicted_fill: float
    verdict: str
    predicted_best_tick_s: float
    ratio: float


@dataclass(frozen=True)
class ParetoRow:
    """A program on the Pareto front of throughput, memory and IPUs (in inference also latency).

    Attributes:
        occupied_ipus: the IPUs of all replicas.
        predicted_fill: the fill of the fullest IPU.
        predicted_latency_s: one micro-batch through all forward passes.
        best: whether the plan uses this program.
    """

    settings: PlannedProgram
    splits: Tuple[str, ...]
    occupied_ipus: int
    predicted_images_per_s: float
    predicted_latency_s: float
    predicted_fill: float
    verdict: str
    best: bool


@dataclass(frozen=True)
class Change:
    """A plan's program with one change, under the same splits.

    Attributes:
        flags: the options to add to the command.
        ratio: the predicted images/s over those of the plan.
        predicted_fill: the fill of the fullest IPU.
    """

    flags: Tuple[str, ...]
    ratio: float
    predicted_fill: float
    verdict: str


@dataclass(frozen=True)
class NoFit:
    """The reason why no split surely fits.

    Attributes:
        memory_limit: the allowed share of an IPU's memory.
        layer: a layer that alone exceeds it in any stage.  None if there is no such layer.
        ranges: (first layer, last layer) of runs of layers, none of which fits into one stage as a whole.
        on_one_ipu: whether stages are recomputation segments of one IPU; otherwise each has an IPU of its own.
        most_stages: the largest number of stages that was tried; ``num_stages`` if no other number was.
        fewest_stages: the smallest number of stages above ``num_stages`` into which the network can be split so that it
            fits.  None if no number that was tried fits.
        largest_micro_batch_size: the largest micro-batch with which some split into ``num_stages`` stages fits.  None
            if not even micro-batches of one sample fit.
        fits_from_stages, fits_from_micro_batch_size: the same for plans whose verdict is "fits".
    """

    memory_limit: float
    num_stages: int
    layer: Optional[str]
    ranges: Tuple[Tuple[str, str], ...]
    on_one_ipu: bool
    most_stages: int
    fewest_stages: Optional[int]
    largest_micro_batch_size: Optional[int]
    fits_from_stages: Optional[int] = None
    fits_from_micro_batch_size: Optional[int] = None


@dataclass(frozen=True)
class PipelinePlan:
    """A network's pipeline and what is predicted for it.

    Attributes:
        model, input_shape, num_classes: the network; with its input (``input_shape``) and classes (``num_classes``).
        build: further options that determine its layers: norm, dropout, base filters.
        settings: the settings of the plan; ``settings.mapping`` is the IPU of each stage.
        splits: the names of the layers that open stages 1, 2, ...
        planned: whether the planner chose the splits (otherwise they were given, and judged).
        occupied_ipus: the IPUs of all replicas; a replica occupies a power of two.
        memory_limit: the share of an IPU's memory that the planner allowed; see ``planner.LIMITS``.
        predicted_tick_s: the pipeline's time for one more micro-batch, transfers included.
        predicted_lower_bound_s: no split within the memory limit, in the canonical layer order, has a shorter tick with
            its share of the weights' update (the planner's objective: update over accumulated micro-batches).
        gap: the largest possible gain of a faster split: tick with its share / lower bound - 1.
        optimal: whether the gap is proved to be 0.
        predicted_transfer_s: the part of the tick spent on transfers between IPUs; predicted_fixed_s: feeds and loop.
        predicted_fill_drain_s: the time per weight update that filling and draining add to full ticks.
        predicted_update_s: optimizer and all-reduce; ``predicted_all_reduce_s`` is the all-reduce alone.
        predicted_weight_update_s: the total time of one weight update.
        predicted_latency_s: one micro-batch through all forward passes.
        bottleneck: "stage 2", "stage 2 forward and stage 3 backward", "host", ...
        no_fit: the reason why a plan is only "uncertain"; None for one that fits.
        assumed: what the planner assumed because neither a flag nor a preset gave it, a sentence each.
        predicted_images_per_s_band: the range that is expected to contain 80 of 100 measurements.
        predicted_band_factor: the factor between the prediction and either end; it applies to every throughput here,
            including the comparison and the Pareto front.
        published_fits: the public configurations whose fullest IPU has a similar predicted fill: the number known to
            fit, and the total.
        not_searched: settings that were neither typed nor varied, by the names of ``PlannedProgram``.
        next_changes: the changes of one setting each that make the program faster, the fastest first.
        remedy: the smallest change that makes it smaller, in case it does not fit.
        options: the values of ``KEPT`` with which the plan was made, by name, as in YAML.
        measured_images_per_s, measured_stage_s: a user's measurements of the run, written here for ``--calibrate``; for
            a stage, seconds of one micro-batch, forward, recomputation and backward.
    """

    model: str
    input_shape: Tuple[int, ...]
    num_classes: int
    build: Dict[str, Any]
    settings: PlannedProgram
    system: SystemFacts
    splits: Tuple[str, ...]
    planned: bool
    occupied_ipus: int
    memory_limit: float
    stages: Tuple[StagePlan, ...]
    ipus: Tuple[IpuPlan, ...]
    predicted_tick_s: float
    predicted_lower_bound_s: float
    gap: float
    optimal: bool
    predicted_images_per_s: float
    predicted_transfer_s: float
    predicted_fixed_s: float
    predicted_fill_drain_s: float
    predicted_update_s: float
    predicted_all_reduce_s: float
    predicted_weight_update_s: float
    predicted_latency_s: float
    predicted_host_bytes_per_s: float
    predicted_host_limit_images_per_s: float
    bottleneck: str
    predicted_images_per_s_band: Tuple[float, float]
    predicted_band_factor: float
    published_fits: Tuple[int, int]
    options: Dict[str, Any]
    profile: Tuple[ProfileLayer, ...] = field(repr=False)
    comparison: Tuple[ComparisonRow, ...] = ()
    pareto: Tuple[ParetoRow, ...] = ()
    no_fit: Optional[NoFit] = None
    assumed: Tuple[str, ...] = ()
    not_searched: Tuple[str, ...] = ()
    next_changes: Tuple[Change, ...] = ()
    remedy: Optional[Change] = None
    measured_images_per_s: Optional[float] = None
    measured_stage_s: Tuple[float, ...] = ()
    ipucnn_version: str = ""
    schema_version: int = SCHEMA_VERSION

    @property
    def verdict(self) -> str:
        """Returns the worst verdict of the IPUs."""
        return max(self.ipus, key=lambda ipu: ipu.predicted_fill).verdict

    @property
    def predicted_fill(self) -> float:
        """Returns the fill of the fullest IPU."""
        return max(ipu.predicted_fill for ipu in self.ipus)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def micro_batch_s(self) -> float:
        """The seconds of a tick with its share of the weights' update, which the planner minimises."""
        return self.predicted_tick_s + self.predicted_update_s / self.settings.gradient_accumulation_count

    @property
    def command(self) -> str:
        """Returns the command that runs the plan: ``ipucnn ...``."""
        return "train" if self.settings.training else "benchmark --inference"

    def run_options(self) -> Dict[str, Any]:
        """Returns the run options of ``command``, for every setting: YAML keys and values."""
        values = run_values(self.settings, self.splits, self.options)
        return {BY_NAME[name].key: value for name, value in values.items()}

    def to_dict(self) -> Dict[str, Any]:
        """Returns plain values, ready for JSON; ``from_dict`` reads them."""
        import msgspec

        plain: Dict[str, Any] = msgspec.to_builtins(self, enc_hook=lambda number: number.item())
        return plain

    @staticmethod
    def from_dict(data: object, where: str = "plan") -> "PipelinePlan":
        """Reads a plan from ``to_dict``'s values.

        Raises:
            DataError: the values are wrong; the message says how.
        """
        whole: Dict[str, Any] = dict(data) if isinstance(data, dict) else {}
        remedy = f"make it again: {_command_for(whole)}"
        version = whole.get("schema_version")
        if version != SCHEMA_VERSION:
            raise DataError(
                f"{where} has schema_version {shown_value(version)}, this ipucnn reads {SCHEMA_VERSION}",
                remedy,
            )
        hint = f"it was changed by hand, or made by another version of ipucnn: {remedy}"
        try:
            plan = documents.to_record(whole, PipelinePlan, where, hint)
        except ConfigurationError as error:
            # No program has these settings.  The error is in the file, not in the typed options.
            raise DataError(f"{where}: {error.message}", hint) from None
        missing = [field.name for field in fields(PlannedProgram) if field.name not in whole["settings"]]
        if missing:
            raise DataError(
                f"{where} lacks settings.{missing[0]}, without which its run would be another one's", hint
            )
        for name in plan.options:
            if name not in KEPT:
                raise DataError(
                    f"{where}: options has an unknown key '{shown_value(name)}'",
                    did_you_mean(name, KEPT) or hint,
                )
        return plan

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def to_yaml(self) -> str:
        """Returns the text of ``plan.yml``."""
        import yaml

        header = f"# Pipeline plan for {self.model}, predicted, not measured.\n" + (
            "# No session runs it: the network is a layer graph.\n"
            if is_layer_graph(self.model)
            else f"# Use it: ipucnn {self.command} --plan FILE; look at it: ipucnn plan-splits MODEL --compare FILE\n"
        )
        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        return header + yaml.dump(self.to_dict(), Dumper=dumper, sort_keys=False, width=110)

    @staticmethod
    def from_yaml(text: str, source: str) -> "PipelinePlan":
        """Reads ``plan.yml``.

        Raises:
            DataError: the text is wrong; the message names ``source`` and the error.
        """
        with documents.naming(source, DataError):
            data = documents.load(text)
        return PipelinePlan.from_dict(data, source)


def read_plan(path: Path) -> PipelinePlan:
    """Reads the plan in a file that ``plan-splits --save`` wrote.

    Raises:
        DataError: the file is absent, unreadable, or not a plan.
    """
    hint = "give a file that `ipucnn plan-splits MODEL --stages K --save FILE` wrote"
    text = read_text(path, documents.MAX_BYTES, hint=hint)
    return PipelinePlan.from_yaml(text, shown(path))


def _command_for(data: object) -> str:
    """Returns the command that makes a plan like a damaged one, as far as the damaged plan can be read."""
    known = data if isinstance(data, dict) else {}
    model, stages = known.get("model"), known.get("stages")
    is_name = isinstance(model, str) and re.fullmatch(r"[\w./-]{1,100}", model)
    count = len(stages) if isinstance(stages, list) and stages else "K"
    return f"ipucnn plan-splits {model if is_name else 'MODEL'} --stages {count} --save FILE"
