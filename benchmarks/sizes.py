"""Measures what grows with size: weight updates, ``plan-splits`` and ``verify-dataset``.

Usage: python benchmarks/sizes.py {updates,plans,verification} [--rounds 3] [--output results] [--again]

updates       seconds and peak memory of a weight update of EfficientNet-B0 in the host session, for images of 32 to
              128 pixels and micro-batches of 1 to 64 (global batch 64; group norm with micro-batches of 1)
plans         processor time and peak memory of the whole command ``plan-splits`` for networks of 10 to 2,000 layers
              (convolutions, activations and residual additions of changing widths) in 2 to 64 stages
verification  processor time and peak memory of the whole command ``verify-dataset`` for class folders of 1,000 to
              20,000 JPEG files of 64x64 pixels

Each writes ``update_sizes.csv``, ``plan_sizes.csv`` or ``verification_sizes.csv``: medians over the rounds.  After a
stop, the same command goes on with the next row.
"""

import argparse
import json
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import numpy as np
from host_session import Case, Side
from measuring import RESULTS, Journal, Provenance, add_again, run_ipucnn, write_rows

from ipucnn.planning.graphs.layer_graph import Layer, LayerGraph

IMAGE_SIZES, MICRO_BATCHES, GLOBAL_BATCH = (32, 64, 128), (1, 4, 16, 64), 64
NUM_LAYERS, STAGES = (10, 30, 100, 300, 1000, 2000), (2, 4, 8, 16, 32, 64)
NUM_IMAGES, NUM_CLASSES, IMAGE_SIZE = (1000, 5000, 20000), 10, 64


def medians(words: List[str], rounds: int) -> Dict[str, Any]:
    """Measures a command in ``rounds`` rounds."""
    times, memories = [], []
    for _ in range(rounds):
        ended = run_ipucnn(words)
        if ended.code:
            raise SystemExit(f"ipucnn {' '.join(words)} ended with {ended.code}")
        times.append(ended.processor_s)
        memories.append(ended.memory_mib)
    return {
        "processor_s": round(statistics.median(times), 2),
        "memory_mib": round(statistics.median(memories)),
    }


Size = Tuple[Dict[str, Any], Callable[[int], Dict[str, Any]]]
"""(columns that say what is measured, function that measures it in a number of rounds and returns other columns)."""


def update_of(case: Case, rounds: int) -> Dict[str, Any]:
    side = Side("session", case)
    for _ in range(rounds):
        side.measure()
    _, memory = side.ask(-1)
    side.close()
    return {"update_s": round(GLOBAL_BATCH / side.median(), 4), "memory_mib": round(memory)}


def updates() -> Iterator[Size]:
    for size in IMAGE_SIZES:
        for micro_batch in MICRO_BATCHES:
            case = Case("efficientnet-b0", size, micro_batch, GLOBAL_BATCH)
            yield {**case._asdict(), "norm": case.norm}, partial(update_of, case)


def chain(num_layers: int) -> LayerGraph:
    """Returns a network of about ``num_layers`` layers: convolutions, activations and residual additions."""
    rng, size = np.random.default_rng(0), 16
    layers = [Layer("input", "input", (), (size, size, 64))]
    last, channels = "input", 64
    while len(layers) < num_layers:
        i, width = len(layers), int(rng.choice([64, 64, 64, 128]))
        shape, weights = (size, size, width), 9 * channels * width
        layers.append(
            Layer(
                f"conv{i}",
                "conv",
                (last,),
                shape,
                macs=weights * size * size,
                num_parameters=weights,
                num_trainable=weights,
                input_channels=channels,
                kept=(last,),
                kernel=(3, 3),
                strides=(1, 1),
                groups=1,
            )
        )
        layers.append(
            Layer(f"relu{i}", "activation", (f"conv{i}",), shape, kept=(f"relu{i}",), input_channels=width)
        )
        new = f"relu{i}"
        if width == channels and last != "input":
            layers.append(Layer(f"add{i}", "elementwise", (new, last), shape, input_channels=width))
            new = f"add{i}"
        last, channels = new, width
    return LayerGraph("chain", (size, size, 64), 10, tuple(layers))


def plan_of(graph: LayerGraph, stages: int, rounds: int) -> Dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chain.json"
        path.write_text(graph.to_json(), encoding="utf-8")
        return medians(["plan-splits", str(path), "--stages", str(stages), "--json"], rounds)


def plans() -> Iterator[Size]:
    for num_layers in NUM_LAYERS:
        graph = chain(num_layers)
        for stages in STAGES:
            if stages <= len(graph.cuts) + 1:
                row = {"layers": len(graph.layers), "cut_points": len(graph.cuts), "stages": stages}
                yield row, partial(plan_of, graph, stages)


def write_images(folder: Path, number: int) -> None:
    """Writes class folders of JPEG files whose content is drawn at random, in coarse blocks."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for split, count in (("train", number - number // 10), ("val", number // 10)):
        for i in range(count):
            path = folder / split / f"class{i % NUM_CLASSES}" / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            blocks = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(blocks).resize((IMAGE_SIZE, IMAGE_SIZE)).save(path, quality=90)


def verification_of(number: int, rounds: int) -> Dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), number)
        return medians(["verify-dataset", folder, "--json"], rounds)


def verification() -> Iterator[Size]:
    for number in NUM_IMAGES:
        yield {"images": number}, partial(verification_of, number)


PARTS = {
    "updates": (updates, "update_sizes.csv", ("tensorflow", "keras")),
    "plans": (plans, "plan_sizes.csv", ("numpy",)),
    "verification": (verification, "verification_sizes.csv", ("pillow", "numpy")),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    add_again(parser)
    arguments = parser.parse_args()
    sizes, name, packages = PARTS[arguments.part]
    journal, rows = Journal(f"sizes-{arguments.part}", arguments.again), []
    for what, measured in sizes():
        how = Provenance(f"python benchmarks/sizes.py {arguments.part}", packages)
        columns = journal.take(
            (*what.values(), arguments.rounds), lambda: {**measured(arguments.rounds), **how.columns()}
        )
        rows.append({**what, **columns})
        print(json.dumps(rows[-1]), flush=True)
        write_rows(arguments.output / name, rows)


if __name__ == "__main__":
    main()
