"""Plans for tests: ``plan-splits`` as a user types it, and a small network whose splits can all be tried."""

import itertools
import json
from dataclasses import replace

import pytest

from ipucnn.hardware import get_system
from ipucnn.models.registry import get_model
from ipucnn.planning.cost.memory import program_memory
from ipucnn.planning.cost.products import DEFAULT_CONSTANTS
from ipucnn.planning.cost.schedule import predict
from ipucnn.planning.forecast import forecast
from ipucnn.planning.graphs.extract import home_options, layer_graph
from ipucnn.planning.graphs.layer_graph import Layer, LayerGraph
from ipucnn.planning.pipeline_plan import PipelinePlan
from ipucnn.planning.search.open_settings import COMPARED, FREE, OPEN, Space, choices
from support.refusals import Refusal, check_refused

SYSTEM = get_system("pod16")
SCHEDULES = ("Grouped", "Interleaved", "Sequential")


def home_graph(name="cifar_resnet8"):
    """Returns the layer graph of a registered network at its default input and classes."""
    record = get_model(name)
    return layer_graph(record, home_options(record))


def _words(args):
    return ["plan-splits", *(word for arg in args for word in str(arg).split())]


def plan_splits(run, *args, columns=None, code=0):
    """Runs ``plan-splits`` with arguments of one or more words, checks its exit code, and returns stdout and stderr."""
    ended, out, err = run(*_words(args), columns=columns)
    assert ended == code, err
    return out, err


def plan(run, *args):
    """Returns the plan of ``plan-splits --json``."""
    out, _ = plan_splits(run, *args, "--json")
    return PipelinePlan.from_dict(json.loads(out))


def refused(run, code, error, hint, *args):
    """Checks that ``plan-splits`` ends with a code and prints one line of an error, one of a hint, and nothing else."""
    check_refused(run, Refusal(_words(args), error, hint, code), alone=True)


def conv(name, source, size, inputs, outputs, kernel=3, stride=1, groups=1, **more):
    """Returns a convolution without a bias, for images of ``size`` x ``size``."""
    weights = kernel * kernel * inputs // groups * outputs
    values = {
        "op_class": "conv" if groups == 1 else "depthwise_conv" if groups == inputs else "grouped_conv",
        "output_shape": (size, size, outputs),
        "macs": weights * size * size,
        "num_parameters": weights,
        "num_trainable": weights,
    }
    window = {"kernel": (kernel, kernel), "strides": (stride, stride), "groups": groups}
    return Layer(
        name=name, inputs=(source,), input_channels=inputs, kept=(source,), **{**values, **window, **more}
    )


def network(widths, size=16, block=2):
    """Returns convolutions with ReLUs; after every ``block`` of them a sum with the block before."""
    layers = [Layer("input", "input", (), (size, size, 3))]
    last, channels, before = "input", 3, None
    for i, width in enumerate(widths):
        shape = (size, size, width)
        layers.append(conv(f"conv{i}", last, size, channels, width))
        last, channels = f"relu{i}", width
        layers.append(Layer(last, "activation", (f"conv{i}",), shape, kept=(last,), input_channels=width))
        if i % block == block - 1:
            if before is not None and before[1] == width:
                layers.append(Layer(f"add{i}", "elementwise", (last, before[0]), shape, input_channels=width))
                last = f"add{i}"
            before = (last, width)
    return LayerGraph("net", (size, size, 3), 10, tuple(layers))


def system(kib_per_tile=624):
    """Returns an IPU-POD16 with less memory."""
    return replace(SYSTEM, ipu=replace(SYSTEM.ipu, sram_per_tile_bytes=int(kib_per_tile * 1024)))


def tried(settings):
    """Returns the programs to choose from with open recomputation and availableMemoryProportion."""
    values = {name: OPEN[name] for name in ("recomputation", "available_memory_proportion")}
    return choices(settings, values)


def space(settings, num_ipus, sizes, **details):
    """Returns a search with these micro-batch sizes, in which only the settings of ``details`` are open besides."""
    shares = details.pop("available_memory_proportion", OPEN["available_memory_proportion"])
    values = {
        "schedule": details.pop("schedule", SCHEDULES),
        "recomputation": OPEN["recomputation"],
        "available_memory_proportion": shares,
        "micro_batch_size": details.pop("more_sizes", sizes),
        "segments": details.pop("segments", OPEN["segments"]),
        **{name: (getattr(settings, name),) for name in FREE},
        **{name: OPEN[name] for name in details.pop("free", ())},
    }
    compared = {
        "micro_batch_size": sizes,
        "optimizer_state_offloading": values["optimizer_state_offloading"][-1:],
    }
    return Space(settings, values, {**COMPARED, **compared}, num_ipus, **details)


def all_splits(graph, num_stages):
    names = [graph.layers[cut].name for cut in graph.cuts]
    return itertools.combinations(names, num_stages - 1)


def fill(graph, splits, settings, machine):
    """Returns the share of its memory that the fullest IPU uses."""
    return max(memory.fill for memory in program_memory(graph, splits, settings, machine.ipu))


def check_search_agrees(planner, splits, program):
    """Checks that the search counts the tick and the memory of splits as the forecast does; not for shared IPUs."""
    predicted, count = forecast(planner.graph, splits, program, planner.system), program.num_stages
    tables = planner.tables(program, 1.0)
    bounds = [*planner.items(splits), tables.num_items]
    needed = max(tables.memory_bytes(count, s)[bounds[s], bounds[s + 1]] for s in range(count))
    if tables.checkpoint_bytes is not None:
        needed += tables.fixed_bytes + tables.checkpoint_bytes[bounds[:-1]].sum()
    assert needed == predicted.fullest.total_bytes
    found_s = planner.micro_batch_s(splits, program) + DEFAULT_CONSTANTS.fixed_s(planner.system)
    assert found_s == pytest.approx(micro_batch_s(predicted.times, program), rel=1e-12)
    return predicted


def micro_batch_s(times, program):
    """Returns the seconds of a tick and its share of the update."""
    return times.tick_s + times.update_s / program.gradient_accumulation_count


def all_that_fit(graph, programs, machine, limit):
    """Returns (time, images/s, splits, program) of all splits of all programs that fit, by trying each.

    The time is that of a tick with its share of the update.
    """
    return [
        (micro_batch_s(prediction, program), prediction.images_per_s, splits, program)
        for program in programs
        for splits in all_splits(graph, program.num_stages)
        if fill(graph, splits, program, machine) <= limit
        for prediction in [predict(graph, splits, program, machine)]
    ]


def naive_best(graph, settings, machine, limit):
    """Returns (time, splits) of the fastest splits that fit, as ``all_that_fit`` has them; None if none fit."""
    fitting = all_that_fit(graph, [settings], machine, limit)
    return min(((time_s, splits) for time_s, _, splits, _ in fitting), default=None)
