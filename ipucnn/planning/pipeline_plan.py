"""The answer of ``ipucnn plan-splits``: a plan with everything predicted for it, as a value, JSON and YAML.

Nothing here was measured: what the cost and memory model say of IPUs is named ``predicted_...``.  Sizes are in bytes,
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
from ipucnn.planning.settings import PlanSettings, Proportions, run_values
from ipucnn.text import shown_value

SCHEMA_VERSION = 2


# Options of a run that a plan repeats beside its settings, so that the run has the plan's network and optimizer.
_ALWAYS = ("optimizer", "optimizer_params", "norm_layer")
_OF_LAYERS = ("norm_layer", "dropout", "base_filters")
OF_INPUT = ("dataset", "image_size")
KEPT = (*_ALWAYS, "convolution_options", "matmul_options", *_OF_LAYERS[1:], "freeze", *OF_INPUT)


def kept_options(config: RunConfig) -> Dict[str, Any]:
    """The options of a configuration that its plan repeats, see ``KEPT``: names, and values as YAML has them."""
    return {
        name: BY_NAME[name].yaml_value(getattr(config, name))
        for name in KEPT
        if name in _ALWAYS or getattr(config, name) != BY_NAME[name].default
    }


def layer_options(options: Mapping[str, PlainValue]) -> Dict[str, Any]:
    """What of a plan's (or a run's, see ``kept_options``) options decides the network's layers, by YAML key."""
    named = {BY_NAME[name].key: options[name] for name in _OF_LAYERS if name in options}
    # Neither momentum nor epsilon makes another layer of a norm.
    norm = dict(named.get("norm-layer", BY_NAME["norm_layer"].default))
    parameters = [f"{k} {v}" for k, v in norm.items() if k in ("num_groups", "channels_per_group")]
    named["norm-layer"] = " ".join([norm_of(norm), *parameters])
    return named


@dataclass(frozen=True)
class SystemFacts:
    """The machine that was planned for.

    Attributes:
        name: as ``--system`` takes it.
        ipu: title of the IPU generation.
        num_ipus: of the whole system.
        ipu_memory_bytes: of one IPU.
        calibration: of the profile that the plan was made with.
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
        stage: from 0.
        ipu: it runs on, from 0 within the replica.
        first_layer, last_layer: names, both in the stage.
        macs: multiply-accumulates of the forward pass of one sample.
        num_parameters: numbers in all weights.
        predicted_backward_s: without the recomputation, which is ``predicted_recompute_s`` (0 where there is none).
        predicted_receive_s: transfer of everything that crosses the cut before it, one direction.
        received_bytes: what that is.
        skips: layers whose output crosses with it, but is not what the first layer of the stage reads.
        predicted_memory_bytes: by category, see ``memory.CATEGORIES``; of a segment that shares an IPU, its part.
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
        stages: that run on it.
        predicted_memory_bytes: by category, in the order of ``memory.CATEGORIES``.
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
        stage: that it is in.
        predicted_cumulative_s: forward and backward (without recomputation) of it and all layers before it.
    """

    name: str
    op_class: str
    stage: int
    predicted_forward_s: float
    predicted_backward_s: float
    predicted_cumulative_s: float


@dataclass(frozen=True)
class ComparisonRow:
    """Other splits under the plan's settings, or the best under another schedule, judged by the same model.

    Attributes:
        name: "params", "equal-layers", "equal-blocks", "preset NAME", a file's name, or a schedule and who set it.
        predicted_fill: of the fullest IPU.
        predicted_best_tick_s: tick of the best split that takes no more memory than the plan may (its own tick, if the
            planner chose it), or than these splits do, whichever is more.  Of another schedule: the plan's tick.
        ratio: ``predicted_tick_s`` over it: how many times longer; at least 1, because the best one is proved to be.
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
    """A configuration to which no other is better in throughput, memory and IPUs (in inference: and latency) at once.

    Attributes:
        num_stages: on ``ipus_per_replica`` IPUs: fewer IPUs than stages are recomputation segments.
        num_ipus: of all replicas.
        predicted_fill: of the fullest IPU.
        best: the one that the plan takes.
        predicted_latency_s: of a micro-batch through all forward passes.
        half_partials: which change numerics; optimizer_state_offloading: which the SDK has for pipelines and for
            accumulated gradients; eight_bit_transfer.  Each where it makes a difference.
    """

    num_stages: int
    schedule: str
    micro_batch_size: int
    gradient_accumulation_count: int
    num_replicas: int
    ipus_per_replica: int
    num_ipus: int
    recomputation: bool
    available_memory_proportion: Proportions
    splits: Tuple[str, ...]
    predicted_images_per_s: float
    predicted_fill: float
    verdict: str
    best: bool
    predicted_latency_s: float = 0.0
    half_partials: bool = False
    optimizer_state_offloading: bool = False
    eight_bit_transfer: bool = False

    @property
    def marks(self) -> str:
        """ "h" for half partials, "o" for optimizer state outside the chip, "t" for 8-bit transfer."""
        return (
            "h" * self.half_partials + "o" * self.optimizer_state_offloading + "t" * self.eight_bit_transfer
        )


@dataclass(frozen=True)
class Change:
    """The program of a plan with something changed, under the same splits.

    Attributes:
        name: in a few words; may be empty.
        flags: to add to the command.
        ratio: predicted images/s over those of the plan.
        predicted_fill: of the fullest IPU.
    """

    name: str
    flags: Tuple[str, ...]
    ratio: float
    predicted_fill: float
    verdict: str


@dataclass(frozen=True)
class NoFit:
    """Why no split surely fits.

    Attributes:
        memory_limit: share of an IPU's memory that was allowed.
        layer: a layer that alone exceeds it, in whatever stage it is.  None if there is no such layer.
        ranges: (first layer, last layer) of runs of layers, none of which fits into one stage as a whole.
        fewest_stages: the smallest number of stages, each on an IPU of its own, into which the network can be split
            so that it fits.  None if there is no such number up to ``max_ipus``.
        fewest_ipus: how many IPUs a replica of that many stages occupies.
        largest_micro_batch_size: the largest micro-batch with which some split into ``num_stages`` stages fits.  None
            if not even micro-batches of one sample do.
        fits_from_stages, fits_from_micro_batch_size: the same for plans whose verdict is "fits".
    """

    memory_limit: float
    num_stages: int
    layer: Optional[str]
    ranges: Tuple[Tuple[str, str], ...]
    fewest_stages: Optional[int]
    fewest_ipus: Optional[int]
    max_ipus: int
    largest_micro_batch_size: Optional[int]
    fits_from_stages: Optional[int] = None
    fits_from_micro_batch_size: Optional[int] = None


@dataclass(frozen=True)
class PipelinePlan:
    """A network's pipeline and what is predicted for it.

    Attributes:
        model, input_shape, num_classes: what the network was built for.
        build: further options that decide its layers: norm, dropout, base filters.
        settings: what the plan was made for; ``settings.mapping`` is the IPU of each stage.
        splits: names of the layers that open stages 1, 2, ...
        planned: whether the planner chose the splits (else they were given, and judged).
        occupied_ipus: of all replicas; a replica occupies a power of two.
        memory_limit: share of an IPU's memory that the planner allowed; see ``planner.LIMITS``.
        predicted_tick_s: the pipeline's time for one more micro-batch, transfers included: the planner's objective.
        predicted_lower_bound_s: no split within the memory limit, in the canonical layer order, is faster.
        gap: by how much a faster split could beat this one at most: tick / lower bound - 1.
        optimal: whether the gap is proved to be 0.
        predicted_transfer_s: part of the tick that is transfers between IPUs; predicted_fixed_s: feeds and loop.
        predicted_fill_drain_s: per weight update, by which filling and draining take longer than full ticks.
        predicted_update_s: optimizer and all-reduce, of which ``predicted_all_reduce_s``.
        predicted_weight_update_s: everything of one weight update.
        predicted_latency_s: one micro-batch through all forward passes.
        bottleneck: "stage 2", "stage 2 forward and stage 3 backward", "host", ...
        no_fit: why a plan is only "uncertain", None for one that fits.
        assumed: what the planner took for granted because neither a flag nor a preset gave it, a sentence each.
        predicted_images_per_s_band: 80 of 100 measurements are expected between the two.
        predicted_band_factor: by which that is less and more; it holds for every throughput here, those of the
            comparison and the Pareto front included.
        published_fits: of the public configurations whose fullest IPU is predicted about as full, how many are known to
            fit, and how many there are.
        not_searched: settings that were neither typed nor tried otherwise, by the names of ``PlanSettings``.
        next_changes: of one setting each, that make the program faster, the fastest first.
        remedy: the smallest change that makes it smaller, should it not fit.
        options: those of ``KEPT`` that the plan was made with, by name, as YAML has them.
        measured_images_per_s, measured_stage_s: what a user measured of its run and wrote here, for ``--calibrate``;
            of a stage, seconds of one micro-batch, forward, recomputation and backward.
    """

    model: str
    input_shape: Tuple[int, ...]
    num_classes: int
    build: Dict[str, Any]
    settings: PlanSettings
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
    options: Dict[str, Any]
    profile: Tuple[ProfileLayer, ...] = field(repr=False)
    comparison: Tuple[ComparisonRow, ...] = ()
    pareto: Tuple[ParetoRow, ...] = ()
    no_fit: Optional[NoFit] = None
    assumed: Tuple[str, ...] = ()
    predicted_images_per_s_band: Optional[Tuple[float, float]] = None
    predicted_band_factor: Optional[float] = None
    published_fits: Optional[Tuple[int, int]] = None
    not_searched: Tuple[str, ...] = ()
    next_changes: Tuple[Change, ...] = ()
    remedy: Optional[Change] = None
    measured_images_per_s: Optional[float] = None
    measured_stage_s: Tuple[float, ...] = ()
    ipucnn_version: str = ""
    schema_version: int = SCHEMA_VERSION

    @property
    def verdict(self) -> str:
        """The worst verdict of the IPUs."""
        return max(self.ipus, key=lambda ipu: ipu.predicted_fill).verdict

    @property
    def predicted_fill(self) -> float:
        """Of the fullest IPU."""
        return max(ipu.predicted_fill for ipu in self.ipus)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def command(self) -> str:
        """What runs it: ``ipucnn ...``."""
        return "train" if self.settings.training else "benchmark --inference"

    def run_options(self) -> Dict[str, Any]:
        """The options of ``command`` that run it, every setting's: YAML keys and values."""
        values = run_values(self.settings, self.splits, self.options)
        return {BY_NAME[name].key: value for name, value in values.items()}

    def to_dict(self) -> Dict[str, Any]:
        """Plain values, ready for JSON; ``from_dict`` reads them."""
        import msgspec

        plain: Dict[str, Any] = msgspec.to_builtins(self, enc_hook=lambda number: number.item())
        return plain

    @staticmethod
    def from_dict(data: object, where: str = "plan") -> "PipelinePlan":
        """The inverse of ``to_dict``.

        Raises:
            DataError: naming what is wrong.
        """
        whole: Dict[str, Any] = dict(data) if isinstance(data, dict) else {}
        remedy = f"make it again: {_command_for(whole)}"
        version = whole.get("schema_version")
        if version != SCHEMA_VERSION:
            raise DataError(
                f"{where} has schema_version {shown_value(version)}, this ipucnn reads {SCHEMA_VERSION}",
                remedy,
            )
        # Fields of plans that the version before made.
        whole.pop("searched_orders", None)
        if whole.pop("order", None):
            raise DataError(
                f"{where}: its stages take the layers in another order than the network's, which no session runs",
                remedy,
            )
        hint = f"it was changed by hand, or made by another version of ipucnn: {remedy}"
        try:
            plan = documents.to_record(whole, PipelinePlan, where, hint)
        except ConfigurationError as error:
            # Settings that no program has: what is wrong is wrong with the file, not with what was typed.
            raise DataError(f"{where}: {error.message}", hint) from None
        missing = [field.name for field in fields(PlanSettings) if field.name not in whole["settings"]]
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
        """The text of ``plan.yml``."""
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
            DataError: with ``source`` and what is wrong.
        """
        with documents.naming(source, DataError):
            data = documents.load(text)
        return PipelinePlan.from_dict(data, source)


def read_plan(path: Path, what: str) -> PipelinePlan:
    """The plan in a file that ``plan-splits --save`` wrote.

    Args:
        what: the option that names it, for messages.

    Raises:
        DataError: not there, not readable, or not a plan.
    """
    hint = "give a file that `ipucnn plan-splits MODEL --stages K --save FILE` wrote"
    text = read_text(path, documents.MAX_BYTES, hint=hint)
    return PipelinePlan.from_yaml(text, shown(path))


def _command_for(data: object) -> str:
    """The command that makes a plan like a damaged one, as far as that still says what it was for."""
    known = data if isinstance(data, dict) else {}
    model, stages = known.get("model"), known.get("stages")
    is_name = isinstance(model, str) and re.fullmatch(r"[\w./-]{1,100}", model)
    count = len(stages) if isinstance(stages, list) and stages else "K"
    return f"ipucnn plan-splits {model if is_name else 'MODEL'} --stages {count} --save FILE"
