"""Output of ``ipucnn doctor``."""

from __future__ import annotations

import sys
from itertools import groupby
from typing import TYPE_CHECKING, Iterator, Tuple

from ipucnn.reports import units
from ipucnn.reports.console import console, fact_table, plain_table
from ipucnn.text import counted, printable

if TYPE_CHECKING:
    from rich.console import Console

    from ipucnn.diagnosis.decision import ChosenDevice
    from ipucnn.diagnosis.diagnose import Diagnosis

_COLOURS = {"problem": "bold red", "warning": "yellow", "note": "cyan"}


def _python(diagnosis: Diagnosis) -> Iterator[Tuple[str, str]]:
    import platform

    from ipucnn import __version__

    versions = diagnosis.machine.software.versions
    tensorflow, keras, numpy = (
        versions.get(name) or "not installed" for name in ("tensorflow", "keras", "numpy")
    )
    yield "ipucnn", f"{__version__}, Python {platform.python_version()}"
    yield "TensorFlow", f"{tensorflow}, Keras {keras}, NumPy {numpy}"
    if diagnosis.machine.probe is not None:
        error = diagnosis.machine.probe.error
        yield "", "import: works" if error is None else f"import: {error.message}"
        compiled = diagnosis.machine.probe.answer.get("compiled_layers")
        if compiled is not None:
            yield "compiled layers", compiled if compiled.startswith("yes") else f"none: {compiled}"


def _sdk(diagnosis: Diagnosis) -> Iterator[Tuple[str, str]]:
    sdk = diagnosis.sdk
    if not (sdk["tensorflow"] or sdk["enabled"] or sdk["version"]):
        yield "Poplar SDK", "not installed here"
        return
    state = f"enabled from {sdk['path']}" if sdk["enabled"] else "not enabled in this shell"
    yield "Poplar SDK", f"{sdk['version'] or 'of unknown version'}, {state}"
    yield "", "its TensorFlow is installed" if sdk["tensorflow"] else "TensorFlow is not the SDK's"
    yield "custom operations", sdk["custom_ops"] or "not built (make -C custom_ops); the plain crop is used"


def _ipus(diagnosis: Diagnosis) -> Iterator[Tuple[str, str]]:
    ipus = diagnosis.machine.ipus
    if not ipus.num_ipus:
        yield "IPUs", f"none: {ipus.problem}"
    else:
        parts = [str(ipus.num_ipus), *filter(None, (ipus.board, ipus.architecture))]
        versions = (("driver", ipus.driver), ("firmware", ipus.firmware))
        yield "IPUs", ", ".join([" ".join(parts), *(f"{name} {value}" for name, value in versions if value)])
        yield "devices of", ", ".join(map(str, ipus.device_sizes)) + " IPUs"
    if ipus.partition:
        yield "partition", ipus.partition
    yield from ((name, value) for name, value in diagnosis.variables.items() if name != "POPLAR_SDK_ENABLED")


def _machine(diagnosis: Diagnosis) -> Iterator[Tuple[str, str]]:
    machine = diagnosis.machine
    gpus = [f"{gpu.name}, {units.size(gpu.memory_bytes)}, driver {gpu.driver}" for gpu in machine.gpus]
    yield "GPUs", "; ".join(gpus) or f"none: {machine.gpu_problem}"
    host = diagnosis.host
    cores = counted(host.num_cores, "core")
    if host.num_cores != host.num_cores_present:
        cores += f" of {host.num_cores_present}"
    if host.cpu_quota is not None:
        cores += f" (the quota of the control group is {host.cpu_quota:.3g})"
    yield "CPU", f"{host.cpu or 'unknown'}, {cores}"
    if host.memory_bytes:
        yield "memory", f"{units.size(host.memory_bytes)}, {units.size(host.available_bytes)} free"
    disk = diagnosis.disk
    free = f"{units.size(disk.free_bytes)} free in" if disk.writable else "runs cannot be written to"
    yield "disk for runs", f"{free} {disk.folder}"
    places = diagnosis.datasets.items()
    available = [
        name if place in ("embedded", "generated") else f"{name} ({place})" for name, place in places if place
    ]
    absent = [name for name, place in places if place is None]
    yield "data sets", ", ".join(available)
    if absent:
        yield f"not in {diagnosis.dataset_path}", ", ".join(absent)


_SECTIONS = (_python, _sdk, _ipus, _machine)


def _where(choice: ChosenDevice) -> str:
    device = (choice.device or "none").upper()
    return device if choice.usable else f"{device}, not usable"


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Prints the diagnosis on stdout: software and devices, the device of each command, findings, next steps."""
    from rich.text import Text

    out = console(sys.stdout)
    rows = [row for section in _SECTIONS for row in section(diagnosis)]
    out.print(fact_table((printable(name), printable(value)) for name, value in rows))
    _print_commands(out, diagnosis)
    advice = []
    for finding in diagnosis.findings:
        advice.append((Text(finding.level, style=_COLOURS[finding.level]), finding.message))
        if finding.hint:
            advice.append((Text("  hint", style="cyan"), finding.hint))
    said = {finding.hint for finding in diagnosis.findings}
    steps = [step for step in diagnosis.next_steps if step not in said]
    advice += [(Text("" if number else "next", style="bold"), step) for number, step in enumerate(steps)]
    table = plain_table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in advice:
        table.add_row(name, Text(printable(text)))
    out.print(table)


def _print_commands(out: Console, diagnosis: Diagnosis) -> None:
    """Prints a row for each group of commands that run on the same device for the same reason."""
    from rich.text import Text

    table = plain_table()
    table.add_column("command", overflow="fold")
    table.add_column("runs on", no_wrap=True)
    table.add_column("because", overflow="fold")
    for (where, reason), choices in groupby(
        diagnosis.commands, lambda choice: (_where(choice), choice.reason)
    ):
        names = ", ".join(choice.command for choice in choices)
        style = "bold red" if "not usable" in where else "bold"
        table.add_row(Text(names), Text(where, style=style), Text(printable(reason)))
    out.print(table)
