"""What a Poplar profile shows: by itself, and beside what a plan predicts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, List, Sequence

from ipucnn.benchmarking.poplar_profile import CATEGORIES, MeasuredProfile, MeasuredStep, MemoryRow
from ipucnn.reports import units
from ipucnn.reports.console import console, plain_table, titled
from ipucnn.text import counted

if TYPE_CHECKING:
    from rich.console import Console

_MOST_STEPS = 12


def _head(name: str) -> str:
    """A column's title, on two lines at most."""
    first, _, last = name.rpartition("_")
    return f"{first.replace('_', ' ')}\n{last}" if first else name


def print_profile(measured: MeasuredProfile) -> None:
    """Memory by IPU and the longest programs, on stdout."""
    from rich.text import Text

    out = console(sys.stdout)
    target = measured.target
    out.print(
        Text(
            f"{measured.source}: {counted(len(measured.ipus), 'IPU')} of {target.tiles_per_ipu:,} tiles, "
            f"{counted(target.num_replicas, 'replica')}, Poplar {measured.poplar_version}"
        )
    )
    _memory(measured, out)
    cycles = measured.execution_cycles
    if cycles is None:
        out.print(Text("nothing was executed while it was profiled: there are no cycles"))
        return
    took = units.seconds(cycles / target.clock_hz)
    out.print(Text(f"an execution took {cycles:,.0f} cycles, {took}, with what profiling itself costs"))
    _steps(measured, out)


def _memory(measured: MeasuredProfile, out: Console) -> None:
    from rich.text import Text

    target = measured.target
    capacity = target.tiles_per_ipu * target.bytes_per_tile
    table = plain_table(padding=(0, 1, 0, 0))
    for name in ("IPU", *map(_head, CATEGORIES), "total", "of it", "max\ntile"):
        table.add_column(name, justify="right", no_wrap=True)
    for ipu in measured.ipus:
        sizes = ipu.memory_bytes.to_dict()
        fullest = ipu.tile_bytes.total_with_gaps[ipu.fullest_tile] / target.bytes_per_tile
        table.add_row(
            str(ipu.ipu),
            *(_mib(sizes[name]) for name in (*CATEGORIES, "total")),
            units.percent(sizes["total"] / capacity),
            Text(units.percent(fullest), style="red" if fullest > 1 else ""),
        )
    out.print(titled(f"memory in MiB, measured; an IPU has {capacity / 2**20:,.0f}", table))
    too_full = [str(ipu.ipu) for ipu in measured.ipus if ipu.memory_bytes.overflow]
    if too_full:
        out.print(Text(f"does not fit: IPU {', '.join(too_full)}", style="bold red"))
    out.print(
        Text(
            "max tile: how full the fullest one is, with the gaps between tensors; everything else is without"
        )
    )
    out.print()


def _mib(num_bytes: int) -> str:
    value = num_bytes / 2**20
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def _steps(measured: MeasuredProfile, out: Console) -> None:
    from rich.text import Text

    def length(step: MeasuredStep) -> int:
        return max(step.cycles, default=0)

    steps = sorted(measured.steps, key=length, reverse=True)
    whole = max(1, sum(map(length, steps)))
    table = plain_table(padding=(0, 1, 0, 0))
    table.add_column("program", overflow="fold", min_width=16)
    table.add_column("kind", no_wrap=True)
    for name in ("times", "cycles", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for step in steps[:_MOST_STEPS]:
        cells: List[str] = [f"{step.count:,}", f"{length(step):,}", units.percent(length(step) / whole)]
        table.add_row(Text(step.program), Text(step.kind), *cells)
    out.print(titled("programs with the most cycles, measured, of the IPU that takes longest", table))
    if len(steps) > _MOST_STEPS:
        out.print(Text(f"{len(steps) - _MOST_STEPS:,} more with --json"))


def print_comparison(rows: Sequence[MemoryRow], measured: MeasuredProfile) -> None:
    """Predicted and measured memory of each IPU, on stdout."""
    from rich.text import Text

    out = console(sys.stdout)
    capacity = measured.target.tiles_per_ipu * measured.target.bytes_per_tile
    table = plain_table(padding=(0, 1, 0, 0))
    for name in ("IPU", "stages", "memory"):
        table.add_column(name, justify="left" if name == "memory" else "right", no_wrap=True)
    for name in ("predicted", "measured", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    before = -1
    for row in rows:
        first = row.ipu != before
        before = row.ipu
        difference = row.predicted_bytes - row.measured_bytes
        table.add_row(
            str(row.ipu) if first else "",
            ", ".join(map(str, row.stages)) if first else "",
            row.group,
            _mib(round(row.predicted_bytes)),
            _mib(row.measured_bytes),
            f"{difference / capacity:+.1%}",
        )
        if row.measured_fullest_bytes is not None:
            full = Text(units.percent(row.measured_fullest_bytes / capacity))
            table.add_row("", "", "fullest tile, with gaps", "", full, "", end_section=True)
    out.print(titled(f"memory in MiB, predicted and measured ({measured.source})", table))
    out.print(Text("difference: predicted less measured, as a share of the IPU's memory"))
