"""The tables and the picture of results.md, from the CSV files of ../results."""

import csv
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

DOCS = Path(__file__).resolve().parent
RESULTS, IMAGES = DOCS.parent / "results", DOCS / "images"

Row = Dict[str, str]


def read(name: str) -> List[Row]:
    """Reads a CSV file; none if it is absent."""
    path = RESULTS / f"{name}.csv"
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as handle:
        return list(csv.DictReader(handle))


def conditions(rows: Sequence[Row]) -> str:
    """Names commands, machines, loads and revisions of rows, each once."""
    commands, machines, revisions = (
        list(dict.fromkeys(row[column] for row in rows)) for column in ("command", "conditions", "revision")
    )
    loads = sorted({float(row["load"]) for row in rows if row["load"]})
    load = f"load at the start {loads[0]}" + (f" to {loads[-1]}" if len(loads) > 1 else "") if loads else ""
    shown = "`, `".join(commands)
    if len(commands) > 3:
        shown = commands[0].partition(" --")[0] + " ..."
    parts = [*machines, load, f"revision {', '.join(revisions)}"]
    return f"`{shown}`<br>{'; '.join(part for part in parts if part)}"


def table(rows: Sequence[Row], columns: Dict[str, Callable[[Row], str]]) -> str:
    """Returns a Markdown table, and the conditions below it."""
    if not rows:
        return "Not measured."
    lines = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    lines += [f"| {' | '.join(cell(row) for cell in columns.values())} |" for row in rows]
    return "\n".join([*lines, "", conditions(rows)])


def number(text: str, digits: int = 0) -> str:
    return f"{float(text):,.{digits}f}" if text else ""


def sessions() -> str:
    """A table of the host session beside Keras and PyTorch."""
    rows = read("host_session")
    return table(
        rows,
        {
            "network": lambda r: f"`{r['network']}`",
            "image": lambda r: f"{r['size']}x{r['size']}",
            "micro-batch, global batch": lambda r: f"{r['micro_batch']}, {r['global_batch']}",
            "norm": lambda r: r["norm"],
            "computed by": lambda r: r["side"],
            "images/s": lambda r: number(r["images_per_s"], 1),
            "session is faster by": lambda r: number(r["ratio"], 2),
            "by processor time": lambda r: number(r["ratio_of_processor_time"], 2),
            "share of peak": lambda r: f"{float(r['share_of_peak']):.0%}" if r["share_of_peak"] else "",
            "MiB": lambda r: number(r["memory_mib"]),
        },
    )


def weight_updates() -> str:
    """A table of the time of a weight update by kind of operation, beside its lower bound."""
    rows = read("update_profile")
    if not rows:
        return "Not measured."
    kinds = sorted({row["kind"] for row in rows}, key=lambda kind: -sum(_ms(rows, kind=kind)))
    networks = list(dict.fromkeys(row["network"] for row in rows))
    lines = [f"| ms, and its bound | `{'` | `'.join(networks)}` |", "|" + " --- |" * (len(networks) + 1)]
    for kind in kinds:
        cells = []
        for network in networks:
            cell = [row for row in rows if row["network"] == network and row["kind"] == kind]
            bound = f" ({number(cell[0]['bound_ms'])})" if cell and float(cell[0]["bound_ms"]) else ""
            cells.append(number(cell[0]["ms"]) + bound if cell else "")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    totals = [number(str(sum(_ms(rows, network=network)))) for network in networks]
    lines.append(f"| all lanes together | {' | '.join(totals)} |")
    return "\n".join([*lines, "", conditions(rows)])


def _ms(rows: Sequence[Row], **values: str) -> List[float]:
    return [float(row["ms"]) for row in rows if all(row[key] == value for key, value in values.items())]


def public_documents() -> str:
    """A table of what public applications and tutorials say that they reach, and of what ipucnn gives."""
    lines = ["| document | figure | published | here | only an IPU shows |", "|" + " --- |" * 5]
    measured = []
    for row in read("public_documents"):
        key = ("preset",) if row["measured_in"] == "presets" else ("network", "task", "ipus")
        values = row["measured"].split(",")
        matching = [r for r in read(row["measured_in"]) if [r[column] for column in key] == values]
        here = "not measured"
        if matching and row["measured_in"] == "presets":
            here = _figure(matching[0])
            measured += matching[:1]
        elif matching:
            here = f"predicted: {number(matching[0]['predicted_without_this_network'])}"
        cells = (row["document"], row["published"], row["value"] or "none", here, row["only_on_hardware"])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *(["", conditions(measured)] if measured else [])])


def _figure(row: Row) -> str:
    """Returns mean and standard deviation of a measured figure; a loss and soft Dice have no per cent."""
    is_share = row["figure"] in ("accuracy", "dice", "training accuracy")
    factor, digits, unit = (100, 2, " %") if is_share else (1, 4, "")
    mean = f"{factor * float(row['mean']):.{digits}f}{unit}"
    return mean + (f" ± {factor * float(row['std']):.{digits}f}" if row["std"] else "")


def presets() -> str:
    """A table of what the presets reach on held-out images."""
    return table(
        [row for row in read("presets") if row["figure"] in ("accuracy", "dice")],
        {
            "preset": lambda r: f"`{r['preset']}`",
            "figure": lambda r: r["figure"],
            "mean ± standard deviation": _figure,
            "seeds": lambda r: str(len(r["seeds"].split())),
            "epochs": lambda r: r["epochs"],
            "whole command, s": lambda r: number(r["wall_s"]),
            "processor, s": lambda r: number(r["cpu_s"]),
            "revision": lambda r: r["revision"],
        },
    )


def throughput() -> str:
    """A table of predicted beside published throughput."""
    return table(
        read("throughput"),
        {
            "network": lambda r: f"`{r['network']}`",
            "task": lambda r: r["task"],
            "IPUs": lambda r: f"{r['ipus']} {r['ipu']}",
            "stages": lambda r: r["stages"],
            "micro-batch x accumulated": lambda r: f"{r['micro_batch']} x {r['gradient_accumulation']}",
            "precision": lambda r: r["precision"],
            "published": lambda r: number(r["images_per_s"]),
            "predicted": lambda r: number(r["predicted_images_per_s"]),
            "predicted without this network": lambda r: number(r["predicted_without_this_network"]),
            "ratio": lambda r: r["ratio_without_this_network"],
        },
    )


def plans() -> str:
    """A table of time and memory of plan-splits for the slowest and the largest networks."""
    rows = [row for row in read("plan_search") if row["tick_ms"]]
    slowest = sorted(rows, key=lambda row: -float(row["processor_s"]))[:5]
    return table(
        slowest,
        {
            "network": lambda r: f"`{r['model']}`",
            "cut points": lambda r: r["cut_points"],
            "stages": lambda r: r["stages"],
            "processor, s": lambda r: r["processor_s"],
            "MB": lambda r: r["memory_mb"],
            "gap": lambda r: r["gap_or_reason"],
        },
    )


def kills() -> str:
    """A table of the kill campaigns."""
    return table(
        read("kills"),
        {
            "runs of": lambda r: r["configuration"],
            "runs": lambda r: r["runs"],
            "kills": lambda r: r["kills"],
            "at another moment than intended": lambda r: r["missed"],
            "wrong end": lambda r: r["wrong end"],
            "runs that differ": lambda r: r["differing"],
        },
    )


def refusals() -> str:
    """A table of wrong inputs, and of those that break a rule of refusing."""
    rules = ("code", "one line", "no trace", "unchanged", "no TensorFlow", "in time")
    columns: Dict[str, Callable[[Row], str]] = {"inputs": lambda r: r["kind"], "cases": lambda r: r["cases"]}
    for rule in rules:
        columns[f"broken: {rule}"] = lambda r, rule=rule: r[rule]  # type: ignore[misc]
    return table(read("refused_inputs"), columns)


def suite() -> str:
    """A table of the networks of the ULHPC tutorial: for each batch what was measured, and the prediction for IPUs."""
    rows = read("ulhpc")
    if not rows:
        return "Not measured."
    batches = sorted({row["micro_batch_size"] for row in rows}, key=int)
    heads = [f"batch {batch}, {what}" for batch in batches for what in ("measured", "IPUs, predicted")]
    lines = [f"| network | task | {' | '.join(heads)} |", "|" + " --- |" * (2 + len(heads))]
    for model, mode in dict.fromkeys((row["model"], row["mode"]) for row in rows):
        cells = []
        for batch in batches:
            key = [model, mode, batch]
            (row,) = [r for r in rows if [r["model"], r["mode"], r["micro_batch_size"]] == key]
            ipus = "" if row["predicted_num_ipus"] in ("", "1") else f" ({row['predicted_num_ipus']} IPUs)"
            cells.append(number(row["images_per_s"], 1) or row["error"] or row["status"])
            cells.append(number(row["predicted_images_per_s"]) + ipus)
        lines.append(f"| `{model}` | {mode} | {' | '.join(cells)} |")
    unsteady, few = (
        sum(word in row["notes"] for row in rows) for word in ("before times were steady", "--max-time")
    )
    said = (
        f"In {unsteady} of {len(rows)} rows the warm-up ended by its time limit, before times were steady; {few} have "
        "fewer than ten executions, because the time was over. Where nothing is predicted, the network does not fit on "
        "16 IPUs in 32 bits."
    )
    return "\n".join([*lines, "", said, "", conditions(rows)])


def _lines(axes: Any, rows: Sequence[Row], x: str, y: str, group: str, label: str) -> None:
    for value in dict.fromkeys(row[group] for row in rows):
        part = [row for row in rows if row[group] == value]
        axes.plot([float(r[x]) for r in part], [float(r[y]) for r in part], "o-", label=label.format(value))
    axes.legend(frameon=False, fontsize=8)


def draw_sizes() -> None:
    """Draws time and memory against size: weight updates, plans, verification."""
    from ipucnn.reports.figures import new_figure, save_figure

    figure = new_figure(12, 6.4)
    axes = figure.subplots(2, 3)
    updates, plans_, checks = (read(name) for name in ("update_sizes", "plan_sizes", "verification_sizes"))
    _lines(axes[0][0], updates, "size", "update_s", "micro_batch", "micro-batch {}")
    _lines(axes[1][0], updates, "size", "memory_mib", "micro_batch", "micro-batch {}")
    _lines(axes[0][1], plans_, "layers", "processor_s", "stages", "{} stages")
    _lines(axes[1][1], plans_, "layers", "memory_mib", "stages", "{} stages")
    for line, column in zip(axes, ("processor_s", "memory_mib")):
        line[2].plot([float(r["images"]) for r in checks], [float(r[column]) for r in checks], "o-")
        line[1].set_xscale("log")
        for part in line:
            part.set_ylim(0, 1.06 * part.dataLim.y1)
            part.grid(alpha=0.3)
    titles = ("weight update of EfficientNet-B0", "plan-splits", "verify-dataset")
    for part, title in zip(axes[0], titles):
        part.set_title(title)
    for part, label in zip(axes[1], ("pixels of an image's side", "layers", "images of 64x64 pixels")):
        part.set_xlabel(label)
    axes[0][0].set_ylabel("seconds for 64 images")
    axes[0][1].set_ylabel("processor time, s")
    axes[0][2].set_ylabel("processor time, s")
    for part in axes[1]:
        part.set_ylabel("peak memory, MiB")
    save_figure(figure, IMAGES / "cost-against-size.svg", ".svg")


def sizes() -> str:
    """The conditions of the picture's three parts."""
    parts = [read(name) for name in ("update_sizes", "plan_sizes", "verification_sizes")]
    return "\n\n".join(conditions(rows) for rows in parts if rows)


PARTS: Dict[str, Callable[[], str]] = {
    "sizes": sizes,
    "host session": sessions,
    "presets": presets,
    "public documents": public_documents,
    "throughput": throughput,
    "plans": plans,
    "kills": kills,
    "refused inputs": refusals,
    "suite": suite,
}
