"""What ``ipucnn doctor`` shows."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Iterator, List, Optional, Tuple

from ipucnn.reports import units
from ipucnn.reports.console import console, fact_table, plain_table
from ipucnn.text import counted, printable

if TYPE_CHECKING:
    from rich.console import Console

    from ipucnn.diagnosis.decision import Choice
    from ipucnn.diagnosis.diagnose import Diagnosis

_COLOURS = {"problem": "bold red", "warning": "yellow", "note": "cyan"}


def _python(found: Diagnosis) -> Iterator[Tuple[str, str]]:
    import platform

    from ipucnn import __version__

    yield "ipucnn", f"{__version__}, Python {platform.python_version()}"
    versions = found.surroundings.versions
    absent = "not installed"
    yield (
        "TensorFlow",
        ", ".join(
            [
                versions.get("tensorflow") or absent,
                f"Keras {versions.get('keras') or absent}",
                f"NumPy {versions.get('numpy') or absent}",
            ]
        ),
    )
    if found.probe is not None:
        error = found.probe.error
        yield "", "import: works" if error is None else f"import: {error.message}"


def _sdk(found: Diagnosis) -> Iterator[Tuple[str, str]]:
    sdk = found.sdk
    if not (sdk["tensorflow"] or sdk["enabled"] or sdk["version"]):
        yield "Poplar SDK", "not installed here"
        return
    state = f"enabled from {sdk['path']}" if sdk["enabled"] else "not enabled in this shell"
    yield "Poplar SDK", f"{sdk['version'] or 'of unknown version'}, {state}"
    yield "", "its TensorFlow is installed" if sdk["tensorflow"] else "TensorFlow is not the SDK's"
    yield "custom operations", sdk["custom_ops"] or "not built (make -C custom_ops); the plain crop is used"


def _ipus(found: Diagnosis) -> Iterator[Tuple[str, str]]:
    ipus = found.ipus
    if not ipus.num_ipus:
        yield "IPUs", f"none: {ipus.problem}"
    else:
        parts = [str(ipus.num_ipus), *filter(None, (ipus.board, ipus.architecture))]
        versions = (("driver", ipus.driver), ("firmware", ipus.firmware))
        yield "IPUs", ", ".join([" ".join(parts), *(f"{name} {value}" for name, value in versions if value)])
        yield "devices of", ", ".join(map(str, ipus.device_sizes)) + " IPUs"
        if ipus.processes is None:
            yield "in use", "gc-monitor does not say"
        else:
            users = "; ".join(f"{p.command} ({p.user}, {len(p.ipus)})" for p in ipus.processes)
            yield "in use", f"{ipus.num_busy} of {ipus.num_ipus}" + (f": {users}" if users else "")
            free = ipus.free_devices or ()
            if ipus.num_busy:
                yield "free devices", ", ".join(map(str, free)) or "none"
    if ipus.partition:
        yield "partition", ipus.partition
    if found.poprun.line:
        yield "poprun", found.poprun.line
    if found.cluster.line:
        yield "cluster", found.cluster.line
    shown = "POPLAR_SDK_ENABLED"
    yield from ((name, value) for name, value in found.variables.items() if name != shown)


def _machine(found: Diagnosis) -> Iterator[Tuple[str, str]]:
    if found.gpus:
        yield (
            "GPUs",
            "; ".join(
                f"{gpu.name}, {units.size(gpu.memory_bytes)}, driver {gpu.driver}" for gpu in found.gpus
            ),
        )
    else:
        yield "GPUs", f"none: {found.gpu_problem}"
    host = found.host
    cores = f"{counted(host.num_cores, 'core')}"
    if host.num_cores != host.num_cores_present:
        cores += f" of {host.num_cores_present}"
    yield "CPU", f"{host.cpu or 'unknown'}, {cores}"
    if host.memory_bytes:
        yield "memory", f"{units.size(host.memory_bytes)}, {units.size(host.available_bytes)} free"
    yield "disk for runs", f"{units.size(found.disk.free_bytes)} free in {found.disk.folder}"
    here = [
        name if place in ("embedded", "generated") else f"{name} ({place})" for name, place in _located(found)
    ]
    absent = [name for name, place in found.datasets.items() if place is None]
    yield "data sets", ", ".join(here)
    if absent:
        yield f"not in {found.dataset_path}", ", ".join(absent)


def _located(found: Diagnosis) -> List[Tuple[str, str]]:
    return [(name, place) for name, place in found.datasets.items() if place is not None]


_SECTIONS = (_python, _sdk, _ipus, _machine)


def _where(choice: Choice) -> str:
    device = (choice.device or "none").upper()
    return device if choice.usable else f"{device}, not usable"


def print_diagnosis(found: Diagnosis) -> None:
    """The diagnosis on stdout: what is here, what runs where, findings, next steps."""
    out = console(sys.stdout)
    rows = [row for section in _SECTIONS for row in section(found)]
    out.print(fact_table((printable(name), printable(value)) for name, value in rows))
    _print_commands(out, found)
    for finding in found.findings:
        _print_lines(out, f"{finding.level}: ", finding.message, _COLOURS[finding.level])
        if finding.hint:
            _print_lines(out, "    hint: ", finding.hint, "cyan")
    said = {finding.hint for finding in found.findings}
    steps = [step for step in found.next_steps if step not in said]
    if steps:
        if found.findings:
            out.print()
        out.print("next", style="bold")
        for step in steps:
            _print_lines(out, "  - ", step, None)


def _print_commands(out: Console, found: Diagnosis) -> None:
    """A row for each group of commands that runs on the same for the same reason."""
    from rich.text import Text

    groups: List[Tuple[str, str, List[str]]] = []
    for choice in found.commands:
        own = (_where(choice), choice.reason)
        if not groups or groups[-1][:2] != own:
            groups.append((*own, []))
        groups[-1][2].append(choice.command)
    table = plain_table()
    table.add_column("command", overflow="fold")
    table.add_column("runs on", no_wrap=True)
    table.add_column("because", overflow="fold")
    for where, reason, names in groups:
        style = "bold red" if "not usable" in where else "bold"
        table.add_row(Text(", ".join(names)), Text(where, style=style), Text(printable(reason)))
    out.print(table)


def _print_lines(out: Console, head: str, text: str, style: Optional[str]) -> None:
    """A text with a hanging indent."""
    import textwrap

    from rich.text import Text

    indent = " " * (len(head) if head.strip().startswith(("-", "hint")) else 4)
    wrapped = textwrap.wrap(
        printable(text), max(20, out.width - len(head)), break_on_hyphens=False, break_long_words=False
    )
    for number, line in enumerate(wrapped or [""]):
        out.print(Text.assemble((head if number == 0 else indent, style or ""), line), soft_wrap=True)
