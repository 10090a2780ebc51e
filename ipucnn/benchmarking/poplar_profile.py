"""What a Poplar profile says of memory and cycles, as a file of our own, and beside what a plan predicts.

Profiles are read by libpva, the Poplar SDK's analysis library, through ``pva.openReport``.  The attributes that are
asked for are those that public code reads: auto_pipeline/pva_utils.py of graphcore/ipu_tensorflow_addons (categories of
a tile's memory, what is always live, cycles of a step, when each began and ended), popliner.py of graphcore/popliner
(bytes that are not always live), the test utilities of graphcore/tensorflow (memory without gaps) and the tutorials of
graphcore/examples (memory with gaps, the target, the version, cycles of the steps).
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Dict, List, Optional, Sequence, Tuple

from msgspec import Meta

import ipucnn
from ipucnn.aliases import SdkModule
from ipucnn.benchmarking.records import Amount, Positive, Record, from_plain
from ipucnn.config.bounds import MAX_CLASSES
from ipucnn.documents import read_record
from ipucnn.errors import ConfigurationError, DataError, MissingError
from ipucnn.filesystem import entries, exists, is_folder, shown
from ipucnn.planning.pipeline_plan import PipelinePlan
from ipucnn.text import counted, shown_value
from ipucnn.training.batching import next_power_of_two

if sys.version_info >= (3, 9):
    from typing import Annotated, Literal
else:  # what TensorFlow 2.6 needs, too
    from typing_extensions import Annotated, Literal

Size = Annotated[int, Meta(ge=0, le=2**62)]
PROFILE_KIND: Literal["ipucnn measured profile"] = "ipucnn measured profile"
HINT = "make it: ipucnn profile DIR --save FILE, where DIR has what a profiled run wrote (docs/ipu.md)"
_SDK_HINT = "type: source PATH/TO/poplar_sdk-*/enable, with which the SDK's Python finds pva"


class MeasuredBytes(Record, kw_only=True):
    """Bytes by category.  The first six add up to what is always live and what is live at times."""

    vertex_code: Size
    vertex_state: Annotated[Size, Meta(description="fields and descriptors of vertices")]
    exchange_code: Annotated[Size, Meta(description="between tiles, IPUs and with the host")]
    control_code: Size
    always_live: Annotated[
        Size,
        Meta(description="weights, optimizer state, sums of gradients, stashes and constants; no code"),
    ]
    live_at_times: Annotated[Size, Meta(description="activations and temporary tensors, at most")]
    total: Annotated[Size, Meta(description="as Poplar lays it out, without gaps")]
    total_with_gaps: Annotated[Size, Meta(description="which is what has to fit into a tile")]
    overflow: Annotated[Size, Meta(description="that does not fit")]


CATEGORIES = (
    "vertex_code",
    "vertex_state",
    "exchange_code",
    "control_code",
    "always_live",
    "live_at_times",
)


class TileBytes(Record, kw_only=True):
    """The same by tile: a number for each."""

    vertex_code: List[Size]
    vertex_state: List[Size]
    exchange_code: List[Size]
    control_code: List[Size]
    always_live: List[Size]
    live_at_times: List[Size]
    total: List[Size]
    total_with_gaps: List[Size]
    overflow: List[Size]


class MeasuredIpu(Record, kw_only=True):
    """The memory of one IPU."""

    ipu: Size
    memory_bytes: MeasuredBytes
    fullest_tile: Annotated[Size, Meta(description="with gaps; from 0")]
    tile_bytes: TileBytes


class MeasuredTarget(Record, kw_only=True):
    """What was compiled for."""

    num_ipus: Positive
    num_replicas: Positive
    tiles_per_ipu: Positive
    bytes_per_tile: Positive
    clock_hz: Amount


class MeasuredStep(Record, kw_only=True):
    """A program that was executed, as often as it was."""

    program: Annotated[str, Meta(description="its name in Poplar")]
    kind: Annotated[str, Meta(description="OnTileExecute, DoExchange, Sync, StreamCopyMid, ...")]
    count: Positive
    cycles: Annotated[List[Size], Meta(description="of each IPU, all executions together")]


class MeasuredRun(Record, kw_only=True):
    """One run of the engine, for example an execution."""

    num_steps: Size
    cycles: Annotated[
        Size, Meta(description="from its first step to its last, of the IPU that takes longest")
    ]


class ProfiledRun(Record, kw_only=True):
    """The run of ipucnn that was profiled, from its report."""

    options: Dict[str, Any]
    program: Dict[str, Any]
    training: bool
    input_shape: Annotated[List[Positive], Meta(min_length=3, max_length=3)]
    num_classes: Annotated[int, Meta(ge=1, le=MAX_CLASSES)]
    steps: Annotated[Optional[Positive], Meta(description="micro-batches of an execution of inference")]


class MeasuredProfile(Record, kw_only=True):
    """A Poplar profile: memory by tile, IPU and category, and cycles by step.

    Everything was measured, or laid out by Poplar's compiler; nothing is predicted by ipucnn.
    """

    kind: Literal["ipucnn measured profile"] = PROFILE_KIND
    schema_version: Literal[1] = 1
    ipucnn_version: str
    poplar_version: str
    source: Annotated[str, Meta(description="the file that was read")]
    target: MeasuredTarget
    ipus: Annotated[List[MeasuredIpu], Meta(min_length=1)]
    runs: Annotated[List[MeasuredRun], Meta(description="none, if only the compilation was profiled")]
    steps: Annotated[List[MeasuredStep], Meta(description="in the order of their first execution")]
    run: Annotated[Optional[ProfiledRun], Meta(description="null if it was not named")] = None

    def to_json(self) -> str:
        """Text on a single line: a program's tiles are thousands of numbers."""
        return json.dumps(self.to_dict(), allow_nan=False) + "\n"

    @property
    def execution_cycles(self) -> Optional[float]:
        """Cycles of an execution: the median of the long runs of the engine; None if nothing was executed.

        The short ones load the program and copy weights.
        """
        longest = max((run.cycles for run in self.runs), default=0)
        return median([run.cycles for run in self.runs if 2 * run.cycles >= longest]) if longest else None


# -- reading ---------------------------------------------------------------------------------------------------------


def find_profile(path: Path) -> Path:
    """The profile that a folder holds, at any depth, or the file itself.

    Raises:
        ConfigurationError: there are several.
        DataError: there is none.
    """
    if not is_folder(path, "DIR"):
        if not exists(path, "DIR"):
            raise DataError(f"DIR {shown(path)} does not exist", _MAKE_HINT)
        return path
    found = _profiles_in(path, 3)
    if not found:
        raise DataError(f"DIR {shown(path)} has no profile.pop, nor has a folder in it", _MAKE_HINT)
    if len(found) > 1:
        listed = ", ".join(shown(each.parent) for each in found[:4]) + (", ..." if len(found) > 4 else "")
        raise ConfigurationError(
            f"DIR {shown(path)} has {len(found)} profiles, one for each program: {listed}",
            f"name one of these folders: ipucnn profile {shown(found[-1].parent)}",
        )
    return found[0]


def _profiles_in(folder: Path, depth: int) -> List[Path]:
    """Poplar makes a folder for each program, and one around them where it is told so."""
    found: List[Path] = []
    for each in entries(folder, "DIR"):
        if each.name == "profile.pop":
            found.append(each)
        elif depth > 1 and is_folder(each, "DIR"):
            found += _profiles_in(each, depth - 1)
    return sorted(found)


_MAKE_HINT = (
    'profile a run: POPLAR_ENGINE_OPTIONS=\'{"autoReport.all": "true", "autoReport.directory": "DIR"}\''
)


def import_pva() -> SdkModule:
    """The SDK's analysis library.

    Raises:
        MissingError: it cannot be imported.
    """
    try:
        import pva
    except ImportError as error:
        raise MissingError(
            f"pva cannot be imported ({shown_value(error)}): it is libpva, the Poplar SDK's reader of profiles",
            _SDK_HINT,
        ) from None
    return pva


def read_poplar_profile(path: Path, run: Optional[ProfiledRun] = None) -> MeasuredProfile:
    """What libpva reads of a profile.

    Args:
        path: of ``profile.pop``.
        run: that was profiled, where it is known.

    Raises:
        DataError: it is damaged, or libpva is of a version without the attributes that are needed.
        MissingError: libpva is not here.
    """
    pva = import_pva()
    name = shown(path)
    try:
        report = pva.openReport(str(path))
    except Exception as error:  # what pybind11 makes of C++'s exceptions
        raise DataError(
            f"{name} is no profile that libpva reads: {shown_value(error)}", _MAKE_HINT
        ) from error
    try:
        return _measured(report, name, run)
    except AttributeError as error:
        raise DataError(
            f"{name}: this libpva has another interface: {shown_value(error)}",
            "enable a Poplar SDK from 3.0 to 3.4",
        ) from error


def _measured(report: SdkModule, name: str, run: Optional[ProfiledRun]) -> MeasuredProfile:
    compilation = report.compilation
    target = compilation.target
    ipus = [_ipu(number, ipu.tiles) for number, ipu in enumerate(compilation.ipus)]
    if not ipus or not ipus[0].tile_bytes.total:
        raise DataError(f"{name} says nothing of memory", 'profile with "autoReport.all": "true"')
    runs, steps = _executed(report, len(ipus))
    return MeasuredProfile(
        ipucnn_version=ipucnn.__version__,
        poplar_version=str(report.poplarVersion.string),
        source=name,
        target=MeasuredTarget(
            num_ipus=int(target.numIPUs),
            num_replicas=int(target.numReplicas),
            tiles_per_ipu=len(ipus[0].tile_bytes.total),
            bytes_per_tile=int(target.bytesPerTile),
            clock_hz=float(target.clockFrequency),
        ),
        ipus=ipus,
        runs=runs,
        steps=steps,
        run=run,
    )


def _ipu(number: int, tiles: Sequence[SdkModule]) -> MeasuredIpu:
    columns: Dict[str, List[int]] = {
        name: [] for name in (*CATEGORIES, "total", "total_with_gaps", "overflow")
    }
    for tile in tiles:
        memory = tile.memory
        category = memory.category
        own = {
            "vertex_code": category.vertexCode.total,
            "vertex_state": category.vertexInstanceState.total,
            "exchange_code": category.internalExchangeCode.total
            + category.globalExchangeCode.total
            + category.hostExchangeCode.total,
            "control_code": category.controlCode.total,
        }
        # Code is always live as well: pva_utils.py takes it from there, as here.
        own["always_live"] = max(0, memory.alwaysLiveBytes - sum(own.values()))
        own["live_at_times"] = memory.notAlwaysLiveBytes
        own["total"] = memory.total.excludingGaps
        own["total_with_gaps"] = memory.total.includingGaps
        own["overflow"] = memory.overflowed.excludingGaps
        for name, value in own.items():
            columns[name].append(int(value))
    full = columns["total_with_gaps"]
    return MeasuredIpu(
        ipu=number,
        memory_bytes=MeasuredBytes(**{name: sum(values) for name, values in columns.items()}),
        fullest_tile=full.index(max(full)) if full else 0,
        tile_bytes=TileBytes(**columns),
    )


def _executed(report: SdkModule, num_ipus: int) -> Tuple[List[MeasuredRun], List[MeasuredStep]]:
    """The runs of the engine, and the programs that were executed in them."""
    runs: List[MeasuredRun] = []
    steps: Dict[Tuple[str, str], MeasuredStep] = {}
    for run in report.execution.runs:
        first: List[Optional[int]] = [None] * num_ipus
        last = [0] * num_ipus
        count = 0
        for step in run.steps:
            count += 1
            program = step.program
            key = (str(program.name), str(getattr(program.type, "name", program.type)))
            if key not in steps:
                steps[key] = MeasuredStep(program=key[0], kind=key[1], count=0, cycles=[0] * num_ipus)
            known = steps[key]
            known.count += 1
            for number, ipu in enumerate(list(step.ipus)[:num_ipus]):
                known.cycles[number] += int(ipu.cycles)
                begin, end = int(ipu.activeCycles.cyclesFrom.min), int(ipu.activeCycles.cyclesTo.max)
                before = first[number]
                first[number] = begin if before is None else min(before, begin)
                last[number] = max(last[number], end)
        took = [end - begin for begin, end in zip(first, last) if begin is not None]
        runs.append(MeasuredRun(num_steps=count, cycles=max([0, *took])))
    return runs, list(steps.values())


def read_measured(path: Path, what: str) -> MeasuredProfile:
    """The profile in a file that ``ipucnn profile --save`` wrote.

    Raises:
        DataError: absent, damaged, or of another kind or version.
    """
    return from_plain(read_record(path, what, HINT), MeasuredProfile, f"{what} {shown(path)}", HINT)


# -- beside a prediction ----------------------------------------------------------------------------------------------

# What a plan predicts by category, and what a profile has of the same: Poplar knows what is always live, and not what
# it is.
GROUPS: Tuple[Tuple[str, Tuple[str, ...], Tuple[str, ...]], ...] = (
    ("code", ("code",), ("vertex_code", "vertex_state", "exchange_code", "control_code")),
    ("always live", ("weights", "accumulators", "optimizer_state", "stash"), ("always_live",)),
    ("live at times", ("live_activations", "temporaries"), ("live_at_times",)),
)


@dataclass(frozen=True)
class MemoryRow:
    """Memory of an IPU as predicted and as measured.

    Attributes:
        ipu: of a replica, with the ``stages`` that run on it.
        group: of categories, see ``GROUPS``; "total" of all.
        predicted_bytes, measured_bytes: of all its tiles; a prediction's total has the fullest tile counted in.
        measured_fullest_bytes: tiles times the fullest tile, with gaps: what has to be less than the IPU's memory; of
            "total" alone.
    """

    ipu: int
    stages: Tuple[int, ...]
    group: str
    predicted_bytes: float
    measured_bytes: int
    measured_fullest_bytes: Optional[int] = None


def compare_memory(plan: PipelinePlan, measured: MeasuredProfile, what: str) -> List[MemoryRow]:
    """A plan's predicted memory beside a measured one, of the IPUs of the first replica.

    Raises:
        ConfigurationError: the profile is of other IPUs, or of fewer than the plan has.
    """
    # What was compiled has a power of two of IPUs for each replica.
    of_replica, planned = (
        len(measured.ipus) // measured.target.num_replicas,
        next_power_of_two(len(plan.ipus)),
    )
    if of_replica != planned:
        raise ConfigurationError(
            f"{what} is the profile of {counted(of_replica, 'IPU')} for each replica, and this plan has {planned}",
            "plan what was profiled: the same --stages or --splits",
        )
    capacity = measured.target.tiles_per_ipu * measured.target.bytes_per_tile
    if abs(capacity / plan.system.ipu_memory_bytes - 1) > 0.01:
        raise ConfigurationError(
            f"{what} is the profile of IPUs of {capacity / 2**20:,.0f} MiB, and {plan.system.title} has those of "
            f"{plan.system.ipu_memory_bytes / 2**20:,.0f} MiB",
            "plan for the system that was profiled: --system NAME",
        )
    rows = []
    for own, found in zip(plan.ipus, measured.ipus):
        sizes = found.memory_bytes.to_dict()
        for group, predicted, has in GROUPS:
            rows.append(
                MemoryRow(
                    own.ipu,
                    own.stages,
                    group,
                    sum(own.predicted_memory_bytes.get(name, 0.0) for name in predicted),
                    sum(sizes[name] for name in has),
                )
            )
        fullest = found.tile_bytes.total_with_gaps[found.fullest_tile] * measured.target.tiles_per_ipu
        whole = sum(own.predicted_memory_bytes.values())
        rows.append(MemoryRow(own.ipu, own.stages, "total", whole, sizes["total"], fullest))
    return rows
