"""Compares the planner's splits with others under the same model: all figures are predicted.

Usage: python benchmarks/compare_splits.py seed
       python benchmarks/compare_splits.py unet
       python benchmarks/compare_splits.py public

seed: ResNet-50 in 2, 4, 8 and 16 stages against the same number of parameters in each stage, which is what Graphcore's
      public CNN application proposes.
unet: U-Net at 572x572 in 4 stages against the hand-made split of the public application.
public: the splits of the public configurations, each under its own settings.  The exit code is 5 if
      one of them is faster than the best splits that take no more memory.
"""

import argparse
import sys
from dataclasses import replace
from typing import Dict, Hashable, List, Sequence, Tuple

import numpy as np
from measuring import RESULTS, read_rows
from published_rows import Program, program_of

from ipucnn.hardware import get_system
from ipucnn.models.build import BuildOptions
from ipucnn.models.registry import get_model
from ipucnn.planning.cost.layer_times import cut_bytes
from ipucnn.planning.cost.memory import FITS_BELOW
from ipucnn.planning.cost.products import DEFAULT_CONSTANTS
from ipucnn.planning.graphs.extract import layer_graph
from ipucnn.planning.graphs.layer_graph import LayerGraph
from ipucnn.planning.program import PlannedProgram, uniform
from ipucnn.planning.search.exact import solve
from ipucnn.planning.search.planner import Candidate, Planner
from ipucnn.planning.search.tables import StageTables
from ipucnn.planning.splits import equal_parameters

PUBLISHED_FITS = RESULTS / "published_fits.csv"
FIXED_S = DEFAULT_CONSTANTS.micro_batch_s

# The last layers of stages 0 to 2 in the public application (model_utils.py of its U-Net).
UNET_ENDS = ("encoder_block_1_maxpooling", "decoder_block_0_transpose", "decoder_block_2_transpose")


def home_graph(name: str) -> LayerGraph:
    record = get_model(name)
    return layer_graph(record, BuildOptions(record.input_shape, record.num_classes))


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Returns a Markdown table."""
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")


def best_for(planner: Planner, judged: Candidate) -> Candidate:
    """Returns the best splits within the memory that a candidate was judged with."""
    best = planner.fastest_splits(judged.settings, judged.memory_limit)
    assert best is not None  # the candidate's own splits are within it
    return best


def bottleneck_s(planner: Planner, splits: Sequence[str], settings: PlannedProgram) -> float:
    """Returns the tick without transfers and fixed time: longest forward and longest backward pass of a stage."""
    tables = planner.tables(settings, 1.0)
    bounds = [*planner.items(splits), tables.num_items]
    forward = np.add.reduceat(tables.forward_s, bounds[:-1])
    backward = np.add.reduceat(tables.backward_s, bounds[:-1])
    recomputed_s = [f if tables.recomputes(settings.num_stages, s) else 0.0 for s, f in enumerate(forward)]
    return float(forward.max() + (backward + recomputed_s).max())


def macs_ratios(graph: LayerGraph, splits: Sequence[str]) -> Tuple[float, float]:
    """Returns the MACs of the stage with the most, over an even share and over those of the most balanced splits."""

    def most(starts: Sequence[int]) -> int:
        return max(sum(macs[a:b]) for a, b in zip(starts, [*starts[1:], len(macs)]))

    macs = [layer.macs for layer in graph.layers]
    largest, count = most([0, *(graph.index(name) for name in splits)]), len(splits) + 1
    # The planner on MACs alone: inference with free cuts and unlimited memory, cut between any two layers.
    none = np.zeros(len(macs))
    free = StageTables(
        forward_s=np.array(macs, float),
        backward_s=none,
        cut_s=np.zeros(len(macs) + 1),
        capacity_bytes=1.0,
        memory_bytes=lambda k, s: np.where(np.tri(len(macs), len(macs) + 1, dtype=bool), np.inf, 0.0),
        training=False,
    )
    return largest * count / sum(macs), largest / solve(free, count, "Grouped").objective_s


def compare_seed() -> int:
    planner = Planner(home_graph("resnet50"), get_system("pod16"))
    rows = []
    for num_stages in (2, 4, 8, 16):
        settings = PlannedProgram(
            micro_batch_size=4, gradient_accumulation_count=128, num_stages=num_stages, recomputation=True
        )
        splits = equal_parameters(planner.graph, num_stages)
        judged = planner.judge(splits, settings, FITS_BELOW)
        best = best_for(planner, judged)
        tables = planner.tables(settings, judged.memory_limit)
        still = solve(replace(tables, cut_s=0 * tables.cut_s), num_stages, settings.schedule)
        rows.append(
            (
                num_stages,
                *(f"{ratio:.2f}" for ratio in macs_ratios(planner.graph, splits)),
                f"{bottleneck_s(planner, splits, settings) / still.objective_s:.2f}",
                f"{1e3 * judged.prediction.tick_s:.2f}",
                f"{1e3 * best.prediction.tick_s:.2f}",
                f"{judged.prediction.tick_s / best.prediction.tick_s:.2f}",
                f"{judged.predicted_fill:.0%}",
                f"{best.predicted_fill:.0%}",
                f"{judged.prediction.images_per_s:,.0f}",
                f"{best.prediction.images_per_s:,.0f}",
                str(best.solution.optimal).lower(),
            )
        )
    print(
        "ResNet-50, micro-batch 4, 128 accumulated, Grouped, recomputation, 16.16, POD16, one replica; predicted"
    )
    head = ["stages", "MACs, x even share", "x best", "bottleneck, x best", "tick ms", "best", "x best"]
    table([*head, "memory", "best", "images/s", "best", "optimal"], rows)
    return 0


def crop_late(graph: LayerGraph) -> LayerGraph:
    """Returns the network with each crop moved right before the layer that reads it, as the paper draws it."""
    crops = {layer.name: layer for layer in graph.layers if layer.name.endswith("_crop")}
    layers = []
    for layer in graph.layers:
        if layer.name not in crops:
            layers += [crops[name] for name in layer.inputs if name in crops]
            layers.append(layer)
    return LayerGraph(graph.model, graph.input_shape, graph.num_classes, tuple(layers), graph.tied)


def compare_unet() -> int:
    cropped = home_graph("unet")
    rows = []
    for title, graph in (
        ("skips cropped where they end", crop_late(cropped)),
        ("cropped where they begin", cropped),
    ):
        planner = Planner(graph, get_system("bow-2000"))
        hand = tuple(graph.layers[graph.index(last) + 1].name for last in UNET_ENDS)
        for schedule in ("Grouped", "Interleaved"):
            settings = PlannedProgram(
                gradient_accumulation_count=24,
                num_stages=4,
                schedule=schedule,
                recomputation=True,
                available_memory_proportion=uniform(0.3),
                optimizer_state_offloading=True,
            )
            judged = planner.judge(hand, settings, FITS_BELOW)
            for name, candidate in (("by hand", judged), ("best", best_for(planner, judged))):
                cuts = [graph.index(split) for split in candidate.splits]
                megabytes = "/".join(f"{size / 1e6:.0f}" for size in cut_bytes(graph, cuts, settings))
                rows.append(
                    (
                        title,
                        schedule,
                        name,
                        " ".join(candidate.splits),
                        megabytes,
                        f"{1e3 * candidate.prediction.tick_s:.2f}",
                        f"{candidate.prediction.tick_s / best_for(planner, judged).prediction.tick_s:.2f}",
                        f"{candidate.prediction.images_per_s:.0f}",
                        f"{candidate.predicted_fill:.0%} {candidate.verdict}",
                    )
                )
    print(
        "U-Net, 572x572, 4 stages, micro-batch 1, 24 accumulated, recomputation, 16.16, Bow-2000; predicted"
    )
    table(
        ["skips", "schedule", "", "splits", "MB over cuts", "tick ms", "x best", "images/s", "memory"], rows
    )
    return 0


def public_programs() -> List[Program]:
    """Returns each program of the public configurations with splits, without duplicates."""
    programs: Dict[Hashable, Program] = {}
    for row in read_rows(PUBLISHED_FITS):
        if row["task"] != "train" or not row["splits"]:
            continue
        program = program_of(row)
        key = (
            program.graph.model,
            program.graph.input_shape,
            program.splits,
            program.settings,
            program.system.name,
        )
        programs.setdefault(key, program)
    return list(programs.values())


def compare_public() -> int:
    programs = public_programs()
    rows, faster = [], 0
    for program in programs:
        planner = Planner(program.graph, program.system)
        judged = planner.judge(program.splits, program.settings, FITS_BELOW)
        settings = judged.settings
        time_s = planner.micro_batch_s(judged.splits, settings) + FIXED_S
        best = best_for(planner, judged)
        best_s = best.solution.objective_s + FIXED_S
        proved = best.solution.optimal
        faster += time_s < best_s * (1 - 1e-9) or not proved
        norm = "" if "batch" in _norms(program.graph) else " group norm"
        rows.append(
            (
                f"{program.graph.model}{norm}",
                program.system.ipu.name,
                settings.micro_batch_size,
                settings.precision,
                f"{settings.num_stages} {settings.schedule}",
                f"{1e3 * time_s:.2f}",
                f"{1e3 * best_s:.2f}",
                f"{time_s / best_s:.3f}",
                f"{judged.predicted_fill:.0%}",
                f"{best.predicted_fill:.0%}",
                str(proved).lower(),
            )
        )
    head = [
        "network",
        "IPU",
        "micro-batch",
        "precision",
        "stages",
        "time ms, by hand",
        "best",
        "x best",
        "memory",
    ]
    print("Public hand-made splits under their own settings; predicted")
    table([*head, "best", "optimal"], sorted(rows))
    print(f"\n{len(rows)} configurations, {faster} faster than the best splits")
    return 5 if faster else 0


def _norms(graph: LayerGraph) -> str:
    """Returns "batch" where the norms keep moving statistics."""
    norms = [layer for layer in graph.layers if layer.op_class == "norm"]
    return (
        "batch"
        if any(layer.num_parameters > layer.num_trainable for layer in norms) or not norms
        else "group"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("seed", "unet", "public"))
    arguments = parser.parse_args()
    commands = {"seed": compare_seed, "unet": compare_unet, "public": compare_public}
    return commands[arguments.what]()


if __name__ == "__main__":
    sys.exit(main())
