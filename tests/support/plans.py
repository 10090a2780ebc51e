"""Plans for tests: ``plan-splits`` as a user types it, and a small network whose splits can all be tried."""

import itertools
import json
from dataclasses import replace

from ipucnn import cli
from ipucnn.hardware import get_system
from ipucnn.models.registry import get_model
from ipucnn.planning.cost.memory import program_memory
from ipucnn.planning.cost.schedule import predict
from ipucnn.planning.graphs.extract import home_options, layer_graph
from ipucnn.planning.graphs.layer_graph import Layer, LayerGraph
from ipucnn.planning.pipeline_plan import PipelinePlan

SYSTEM = get_system("pod16")
SCHEDULES = ("Grouped", "Interleaved", "Sequential")


def home_graph(name="cifar_resnet8"):
    """Returns the layer graph of a registered network at its default input and classes."""
    record = get_model(name)
    return layer_graph(record, home_options(record))


def run(capsys, *args):
    """Runs ``plan-splits`` with arguments of one or more words; returns exit code, stdout and stderr."""
    capsys.readouterr()
    code = cli.run(["plan-splits", *(word for arg in args for word in str(arg).split())])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def plan(capsys, *args):
    """Returns the plan of ``plan-splits --json``."""
    code, out, err = run(capsys, *args, "--json")
    assert code == 0, err
    return PipelinePlan.from_dict(json.loads(out))


def refused(capsys, code, error, hint, *args):
    """Checks that ``plan-splits`` ends with a code and prints one line of an error, one of a hint, and nothing else."""
    got, out, err = run(capsys, *args)
    lines = [line for line in err.splitlines() if not line.startswith("reading the layers")]
    assert (got, out, len(lines)) == (code, "", 2), err
    assert lines[0].startswith("error: ") and error in lines[0]
    assert lines[1].startswith("hint: ") and hint in lines[1]


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


def all_splits(graph, num_stages):
    names = [graph.layers[cut].name for cut in graph.cuts]
    return itertools.combinations(names, num_stages - 1)


def fill(graph, splits, settings, machine):
    """Returns the share of its memory that the fullest IPU uses."""
    return max(memory.fill for memory in program_memory(graph, splits, settings, machine.ipu))


def naive_best(graph, settings, machine, limit):
    """Returns (tick, splits) of the fastest splits that fit, by trying all; None if none fit."""
    fitting = [
        (predict(graph, splits, settings, machine).tick_s, splits)
        for splits in all_splits(graph, settings.num_stages)
        if fill(graph, splits, settings, machine) <= limit
    ]
    return min(fitting, default=None)
