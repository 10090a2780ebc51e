"""The cost model: tile partitions against a naive search, ticks against a naive simulator, and other predictions."""

import itertools
import math
from dataclasses import replace
from typing import Dict, List, Tuple

import numpy as np
import pytest
from few_examples import tries
from hypothesis import given
from hypothesis import strategies as st
from pipeline_simulator import simulate_stages
from support.plans import conv

from ipucnn.hardware import get_ipu, get_system
from ipucnn.planning.cost.layer_times import layer_times, transfers_s
from ipucnn.planning.cost.products import (
    DEFAULT_CONSTANTS,
    FEATURES,
    CostConstants,
    Products,
    partition_products,
    partition_work,
)
from ipucnn.planning.cost.schedule import bottleneck_of, host_limit, predict, schedule_s, update_s
from ipucnn.planning.graphs.layer_graph import Layer, LayerGraph
from ipucnn.planning.program import PlannedProgram, uniform

MK2 = get_ipu("mk2")


def chain(num: int = 4, size: int = 28, channels: int = 64) -> LayerGraph:
    """Builds convolution, norm and activation, ``num`` times, and a skip from the first block to the end."""
    layers = [Layer("input", "input", (), (size, size, 3))]
    last, depth = "input", 3
    for i in range(num):
        layers.append(conv(f"conv{i}", last, size, depth, channels))
        shape, counts = (
            (size, size, channels),
            {"num_parameters": 4 * channels, "num_trainable": 2 * channels},
        )
        kept = {"kept": (f"conv{i}",), "input_channels": channels}
        layers.append(Layer(f"norm{i}", "norm", (f"conv{i}",), shape, **kept, **counts))
        layers.append(Layer(f"relu{i}", "activation", (f"norm{i}",), shape, kept=(f"relu{i}",)))
        last, depth = f"relu{i}", channels
    layers.append(Layer("add", "elementwise", ("relu0", last), (size, size, channels)))
    layers.append(Layer("pool", "pool", ("add",), (channels,), kernel=(size, size), strides=(size, size)))
    weights = {"num_parameters": 10 * channels + 10, "num_trainable": 10 * channels + 10, "kept": ("pool",)}
    layers.append(
        Layer("dense", "matmul", ("pool",), (10,), input_channels=channels, macs=10 * channels, **weights)
    )
    return LayerGraph("chain", (size, size, 3), 10, tuple(layers))


# --- tile partitions -------------------------------------------------------------------------------------------------


def naive_work(p: Dict[str, float], split: Tuple[int, ...], arithmetic: str) -> Tuple[List[float], float]:
    """Returns one product's work by feature and temporary bytes on the fullest tile of a Mk2, in plain numbers."""
    element = 4 if arithmetic == "float_float" else 2
    partial = 2 if arithmetic == "half_half" else 4
    block_in, block_out, per_position = {
        "half_half": (16, 16, 4),
        "half_float": (16, 8, 4),
        "float_float": (8, 16, 8),
    }[arithmetic]
    g = math.ceil(p["groups"] / split[0])
    n = math.ceil(p["outputs"] / split[1])
    r = math.ceil(p["reduction"] / split[2])
    m = math.ceil(p["rows"] / split[3])
    gradient = bool(p["weight_gradient"])
    room = block_out / p["outputs"]
    if not gradient:
        room = min(room, block_in / p["reduction"])
    joined_groups = max(1, min(math.floor(room), g))
    ways = []  # cycles, starts of each unit
    blocks = (
        math.ceil(g / joined_groups)
        * math.ceil(n * joined_groups / block_out)
        * math.ceil(r * (1 if gradient else joined_groups) / block_in)
        * p["taps"]
    )
    loading = block_in * block_out * element / 8
    positions = 6 * math.ceil(m * (joined_groups if gradient else 1) / 6)
    ways.append((blocks * (loading + per_position * positions), blocks))
    macs = g * n * r * m * p["taps"]
    small = math.ceil(g * n / 4) * math.ceil(r / 4) * max(p["taps"] / p["kernel_width"], 1)
    if element == 2 and not gradient:
        padded = 4 * math.ceil(p["kernel_width"] / 4) / p["kernel_width"]
        ways.append((macs * padded / (8 * min(p["reduction"], 4)), small))
    else:
        ways.append((math.inf, small))
    ways.append((macs / (4 if element == 2 else 2), small))
    cycles, starts = min(ways, key=lambda way: way[0] + DEFAULT_CONSTANTS.block_cycles * way[1])
    along, total = (r, p["reduction"]) if gradient else (m, p["rows"])
    patch = min((math.sqrt(along) * p["density"] + p["reach"]) ** 2, total * p["density"] ** 2)
    channels = min(math.ceil(p["channels"] / split[3]), p["channels"]) if gradient else r
    images = g * channels * patch * element
    others = g * n * r * (1 if gradient else p["taps"]) * element
    partials = g * m * n * partial
    reduced = partials * (1 - 1 / split[2])
    transposed = images * p["kernel_width"] + others if gradient else 0.0
    work = [cycles, starts, images + others + reduced, reduced, transposed, 5 if split[2] > 1 else 3]
    return work, images + others + partials + reduced


@st.composite
def products(draw):
    gradient = draw(st.booleans())
    kernel = draw(st.sampled_from([1, 3, 5]))
    groups = draw(st.sampled_from([1, 1, 4, 32]))
    inputs = draw(st.sampled_from([1, 3, 16, 24, 64]))
    outputs = draw(st.sampled_from([1, 4, 16, 40, 128]))
    positions = draw(st.integers(1, 3000))
    rows, reduction = (inputs * kernel**2, positions) if gradient else (positions, inputs)
    return dict(
        groups=groups,
        rows=rows,
        outputs=outputs,
        reduction=reduction,
        taps=1 if gradient else kernel**2,
        kernel_width=kernel,
        reach=kernel - 1,
        density=1.0,
        weight_gradient=gradient,
        channels=inputs if gradient else 0,
    )


def as_arrays(dicts: List[Dict[str, float]]) -> Products:
    return Products(
        **{
            key: np.array([d[key] for d in dicts], dtype=bool if key == "weight_gradient" else float)
            for key in dicts[0]
        }
    )


ARITHMETICS = st.sampled_from(["half_half", "half_float", "float_float"])


@given(products(), st.tuples(*[st.integers(1, 8)] * 4), ARITHMETICS)
def test_work_of_a_split_equals_the_naive_count(p, split, arithmetic) -> None:
    split = tuple(min(s, int(p[key])) for s, key in zip(split, ("groups", "outputs", "reduction", "rows")))
    arrays = tuple(np.array([[float(s)]]) for s in split)
    work, temporary = partition_work(as_arrays([p]).columns(), arrays, MK2, arithmetic, DEFAULT_CONSTANTS)
    expected, expected_bytes = naive_work(p, split, arithmetic)
    np.testing.assert_allclose(work[0, 0], expected, rtol=1e-12)
    assert temporary[0, 0] == pytest.approx(expected_bytes)


def naive_factors(limit: int, fine: bool) -> List[int]:
    powers = [2**i for i in range(12)] + ([3 * 2**i for i in range(12)] if fine else [])
    return sorted({min(limit, f) for f in powers})


@given(products(), ARITHMETICS, st.sampled_from([0.001, 0.02, 0.6]))
def test_search_equals_a_naive_search(p, arithmetic, proportion) -> None:
    bound = proportion * MK2.sram_per_tile_bytes
    work_of_best, bytes_of_best = partition_products(
        as_arrays([p]), MK2, arithmetic, bound, DEFAULT_CONSTANTS
    )
    fine = not p["weight_gradient"]
    limits = [p["groups"], math.ceil(p["outputs"] / 4), math.ceil(p["reduction"] / 4)]
    best_cycles, least_bytes = math.inf, math.inf
    for a, b, c in itertools.product(
        *(naive_factors(min(limit, 1472), grain) for limit, grain in zip(limits, (fine, True, fine)))
    ):
        if a * b * c > 1472:
            continue
        split = (a, b, c, max(1, min(p["rows"], 1472 // (a * b * c))))
        work, bytes_ = naive_work(p, split, arithmetic)
        least_bytes = min(least_bytes, bytes_)
        if bytes_ <= bound:
            best_cycles = min(best_cycles, float(np.dot(work, DEFAULT_CONSTANTS.cycles_per_unit)))
    if math.isfinite(best_cycles):
        assert work_of_best[0] @ DEFAULT_CONSTANTS.cycles_per_unit == pytest.approx(best_cycles)
        assert bytes_of_best[0] <= bound
    else:
        assert bytes_of_best[0] == pytest.approx(least_bytes)


@tries(30, slow=100)
@given(st.lists(products(), min_size=2, max_size=12), ARITHMETICS)
def test_product_is_planned_the_same_among_any_others(many, arithmetic) -> None:
    bound = 0.2 * MK2.sram_per_tile_bytes
    work, _ = partition_products(as_arrays(many), MK2, arithmetic, bound, DEFAULT_CONSTANTS)
    for i, p in enumerate(many):
        alone, _ = partition_products(as_arrays([p]), MK2, arithmetic, bound, DEFAULT_CONSTANTS)
        np.testing.assert_array_equal(alone[0], work[i])


def test_products_of_few_channels_gain_from_slic() -> None:
    layers = [
        Layer("input", "input", (), (56, 56, 64)),
        conv("dense", "input", 56, 64, 64, kernel=1),
        conv("depthwise", "dense", 56, 64, 64, groups=64),
        conv("grouped", "depthwise", 56, 64, 64, groups=4),
    ]
    graph = LayerGraph("units", (56, 56, 64), 64, tuple(layers))
    fast, slow = (
        layer_times(graph, PlannedProgram(micro_batch_size=4), ipu).forward_s
        for ipu in (MK2, replace(MK2, slic_macs_per_channel=0))
    )
    assert [graph.layers[i].name for i in np.flatnonzero(fast < slow)] == ["depthwise"]
    assert (fast <= slow).all() and not get_ipu("mk1").slic_macs_per_channel


@given(st.sampled_from([1, 3, 5]), st.sampled_from([1, 2]), st.sampled_from([1, 8, 64]), st.integers(1, 4))
def test_every_pass_of_a_convolution_takes_the_cycles_of_its_macs(kernel, stride, groups, batch) -> None:
    """Unit cycles are at least the MACs over the peak, and not far above for a large dense convolution."""
    size = 32
    layer = conv("conv", "before", size // stride, 64, 64, kernel, stride, groups)
    first = conv("before", "input", size, 3, 64)
    graph = LayerGraph(
        "passes", (size, size, 3), 64, (Layer("input", "input", (), (size, size, 3)), first, layer)
    )
    times = layer_times(graph, PlannedProgram(micro_batch_size=batch), MK2)
    unit = times.work[2, :, FEATURES.index("unit_cycles")]
    ideal = layer.macs * batch / (MK2.num_tiles * MK2.amp["half_half"].macs_per_cycle)
    assert (unit >= ideal * 0.999).all()


# What every layer of ``branching`` reads and writes besides products, forward and backward: the name of a layer is its
# output or the gradient of it, which are as large.
ACCESSES = {
    "n": ("c c n", "c n c n c"),  # statistics; backward both sums, then the gradient
    "r": ("n r", "r r n"),
    "p": ("r p", "r r r"),  # windows of 2x2 with a stride of 2 are as large as the input, in both directions
    "u": ("p u", "u p"),
    "j": ("u r j", "j u r"),
    "k": ("k k", "k j"),
    "g": ("k g", "k k k"),
    "e": ("k g e", "k g k g k g"),
    "s": ("e k s", ""),  # a sum passes its gradient on
}
READERS = {"r": 2, "k": 3}
"""Tensors that several layers read: each further gradient is read with the sum so far, and the sum is written."""


def branching(bias: int) -> LayerGraph:
    c = conv("c", "before", 8, 4, 4)
    if bias:
        c = replace(
            c,
            num_trainable=c.num_trainable + bias,
            num_parameters=c.num_parameters + bias,
            kept=("before", "c"),
        )
    layers = [
        Layer("input", "input", (), (8, 8, 3)),
        conv("before", "input", 8, 3, 4),
        c,
        Layer(
            "n", "norm", ("c",), (8, 8, 4), input_channels=4, num_parameters=16, num_trainable=8, kept=("c",)
        ),
        Layer("r", "activation", ("n",), (8, 8, 4), kept=("r",)),
        Layer("p", "pool", ("r",), (4, 4, 4), kernel=(2, 2), strides=(2, 2), kept=("r", "p")),
        Layer("u", "resize", ("p",), (8, 8, 4)),
        Layer("j", "concat", ("u", "r"), (8, 8, 8)),
        Layer("k", "reshape", ("j",), (6, 6, 8)),
        Layer("g", "pool", ("k",), (8,), kernel=(6, 6), strides=(6, 6)),
        Layer("e", "elementwise", ("k", "g"), (6, 6, 8), kept=("k", "g")),
        Layer("s", "elementwise", ("e", "k"), (6, 6, 8)),
        conv("last", "s", 6, 8, 10, 1),
    ]
    return LayerGraph("branching", (8, 8, 3), 10, tuple(layers))


@pytest.mark.parametrize("batch", [1, 3])
def test_layers_move_the_bytes_of_the_tensors_that_they_read_and_write(batch) -> None:
    graph, program = branching(4), PlannedProgram(micro_batch_size=batch)
    sizes = {layer.name: layer.output_elements * batch * program.element_bytes for layer in graph.layers}

    def moved(graph):
        work = layer_times(graph, program, MK2).work[..., FEATURES.index("moved_bytes")] * MK2.num_tiles
        return {layer.name: work[i] for i, layer in enumerate(graph.layers)}

    given = moved(graph)
    for name, passes in ACCESSES.items():
        forward, backward = (sum(sizes[tensor] for tensor in accesses.split()) for accesses in passes)
        backward += 3 * (READERS.get(name, 1) - 1) * sizes[name]
        assert given[name][:2] == pytest.approx([forward, backward]), name
        # An accumulator is read and written, and the gradient is read.
        assert given[name][2] == pytest.approx(3 * 8 * program.weight_bytes if name == "n" else 0), name
    # A convolution's bias and its activation read and write the output; backward the bias sums the gradient, and the
    # activation reads output and gradient and writes a gradient.
    more = given["c"] - moved(branching(0))["c"]
    expected = [4 * sizes["c"], 4 * sizes["c"], 3 * 4 * program.weight_bytes]
    assert more == pytest.approx(expected)


def test_no_gradient_flows_to_the_image() -> None:
    times = layer_times(chain(), PlannedProgram(), MK2)
    unit_cycles = times.work[..., FEATURES.index("unit_cycles")]
    assert unit_cycles[1, 1] == 0  # data gradient of the first convolution
    assert unit_cycles[1, 2] > 0 and unit_cycles[4, 1] > 0


def test_inference_has_no_backward_pass_and_folds_norms() -> None:
    graph = chain()
    times = layer_times(graph, PlannedProgram(training=False), MK2)
    assert not times.backward_s.any()
    assert times.forward_s[graph.index("norm1")] == 0
    assert layer_times(graph, PlannedProgram(), MK2).forward_s[graph.index("norm1")] > 0


def test_shared_statistics_cost_time_in_norms_alone() -> None:
    graph = chain()
    alone = layer_times(graph, PlannedProgram(), MK2)
    shared = layer_times(graph, PlannedProgram(dbn_replica_group_size=2), MK2)
    slower = np.flatnonzero(shared.forward_s > alone.forward_s)
    assert [graph.layers[i].op_class for i in slower] == ["norm"] * 4
    # 3 us for two replicas, a ring of two steps; the number of steps grows with the ring.
    four = layer_times(graph, PlannedProgram(dbn_replica_group_size=4), MK2)
    np.testing.assert_allclose((shared.forward_s - alone.forward_s)[slower], 3e-6)
    np.testing.assert_allclose((four.backward_s - alone.backward_s)[slower], 9e-6)


def test_less_memory_for_temporaries_is_never_faster() -> None:
    graph = chain(size=112)
    seconds = []
    for proportion in (0.6, 0.1, 0.02):
        times = layer_times(
            graph, PlannedProgram(micro_batch_size=8, available_memory_proportion=uniform(proportion)), MK2
        )
        seconds.append(times.forward_s.sum() + times.backward_s.sum())
    assert seconds == sorted(seconds)


def test_with_constants_keeps_the_partitions() -> None:
    graph, settings = chain(), PlannedProgram(micro_batch_size=4)
    times = layer_times(graph, settings, MK2)
    doubled = CostConstants(**{name: 2 * value for name, value in vars(DEFAULT_CONSTANTS).items()})
    other = times.with_constants(doubled)
    np.testing.assert_array_equal(other.work, times.work)
    expected = times.work[:, 0] @ doubled.cycles_per_unit / MK2.clock_hz
    np.testing.assert_allclose(other.forward_s, expected)


# --- ticks -----------------------------------------------------------------------------------------------------------


seconds_ = st.floats(0.0, 10.0).map(lambda x: round(x, 3))


@given(
    st.integers(1, 5).flatmap(lambda n: st.tuples(*[st.lists(seconds_, min_size=n, max_size=n)] * 3)),
    st.integers(1, 14),
    st.sampled_from(["Grouped", "Interleaved", "Sequential"]),
    st.booleans(),
    seconds_,
)
def test_schedules_equal_a_tick_level_simulation(times, count, schedule, training, fixed) -> None:
    forward, backward, receive = (np.array(t) for t in times)
    if not training:
        backward = 0 * backward
    receive[0] = 0
    settings = PlannedProgram(
        num_stages=len(forward), gradient_accumulation_count=count, schedule=schedule, training=training
    )
    total, _ = schedule_s(forward, backward, receive, settings, fixed)
    simulation = simulate_stages(forward, backward, receive, schedule, count, training)
    assert total == pytest.approx(simulation.total_s + simulation.num_ticks * fixed, abs=1e-9)


@given(st.lists(seconds_, min_size=4, max_size=4), st.integers(1, 12))
def test_stages_that_share_an_ipu_add_up(times, count) -> None:
    settings = PlannedProgram(num_stages=4, gradient_accumulation_count=count, device_mapping=(0, 1, 1, 0))
    forward, ipus = np.array(times), ((0, 3), (1, 2))
    total, tick = schedule_s(forward, 2 * forward, np.zeros(4), settings, 0.0)

    def longest(ticks):
        """Sums the seconds of the busiest IPU, when each stage is at work in ``count`` ticks."""
        return max(sum(times[s] for s in stages if 0 <= ticks[s] < count) for stages in ipus)

    ahead = sum(longest([t - s for s in range(4)]) for t in range(count + 6))
    back = sum(longest([t - 6 + s for s in range(4)]) for t in range(count + 6))
    assert total == pytest.approx(ahead + 2 * back, abs=1e-9)
    assert tick == pytest.approx(3 * max(times[0] + times[3], times[1] + times[2]))


# --- predictions -----------------------------------------------------------------------------------------------------


def test_prediction_is_the_sum_of_its_parts() -> None:
    graph, system = chain(), get_system("pod16")
    settings = PlannedProgram(
        micro_batch_size=4,
        gradient_accumulation_count=8,
        num_replicas=2,
        num_stages=2,
        recomputation=True,
    )
    times = layer_times(graph, settings, MK2)
    prediction = predict(graph, ["conv2"], settings, system)
    cut = graph.index("conv2")
    stage, last = prediction.stages
    assert stage.forward_s == pytest.approx(times.forward_s[:cut].sum())
    assert stage.backward_s == pytest.approx((times.forward_s + times.backward_s)[:cut].sum())
    assert last.recompute_s == 0 and last.backward_s == pytest.approx(times.backward_s[cut:].sum())
    transfer = transfers_s(graph, [cut], settings, MK2)[0]
    assert last.receive_s == pytest.approx(transfer)
    tick = (
        max(stage.forward_s, last.forward_s)
        + max(stage.backward_s, last.backward_s)
        + 2 * transfer
        + DEFAULT_CONSTANTS.micro_batch_s
    )
    assert prediction.tick_s == pytest.approx(tick)
    assert prediction.transfer_s == pytest.approx(2 * transfer)
    assert prediction.weight_update_s < 10 * tick + prediction.update_s
    assert prediction.images_per_s == pytest.approx(4 * 8 * 2 / prediction.weight_update_s)
    sample = 28 * 28 * 3 * 2 + 4
    assert prediction.host_bytes_per_s == pytest.approx(prediction.images_per_s * sample)


def test_cut_transfers_the_skips_across_it() -> None:
    graph, settings = chain(), PlannedProgram(micro_batch_size=3)
    one = 28 * 28 * 64 * 2 * 3
    idle = 2 * MK2.link_idle_cycles / MK2.clock_hz
    inside = transfers_s(graph, [graph.index("conv2")], settings, MK2)[0]  # relu1, and relu0 for the add
    assert inside == pytest.approx(2 * 2 * one / MK2.link_bytes_per_s + idle)
    behind = transfers_s(graph, [graph.index("pool")], settings, MK2)[0]
    assert behind == pytest.approx(2 * one / MK2.link_bytes_per_s + idle)


@pytest.mark.parametrize("slots", [0, 1, 2])
def test_weight_update_moves_each_array_once(slots: int) -> None:
    """Reads the gradient, reads and writes weight and states, and clears the accumulator, on all tiles at once."""
    program = PlannedProgram(optimizer_slots=slots, precision="32.32")
    moved = sum(4 * 3e6 for _ in ["gradient", "weight", "weight", *2 * slots * ["state"], "accumulator"])
    expected = moved / MK2.num_tiles * DEFAULT_CONSTANTS.moved_byte_cycles / MK2.computing_hz
    assert update_s([3e6], program, get_system("pod16")) == pytest.approx(expected)


@pytest.mark.parametrize(
    "name, replicas, links",
    [("m2000", 1, 4), ("pod16", 1, 1), ("pod16", 4, 1), ("pod16", 5, 2), ("pod16", 8, 2), ("pod16", 16, 4)],
)
def test_a_program_is_fed_by_the_machines_that_it_is_on(name: str, replicas: int, links: int) -> None:
    system, graph = get_system(name), chain()
    sample, most = host_limit(graph, PlannedProgram(num_replicas=replicas), system)
    assert sample == 28 * 28 * 3 * 2 + 4
    assert most == pytest.approx(links / 4 * system.host_bytes_per_s / sample)


def test_stages_on_one_ipu_exchange_nothing_and_a_sample_passes_all_stages_once() -> None:
    graph, system = chain(), get_system("pod16")
    program = PlannedProgram(micro_batch_size=2, num_stages=3, device_mapping=(0, 1, 1), schedule="Grouped",
                             gradient_accumulation_count=12)  # fmt: skip
    prediction = predict(graph, ["conv1", "conv2"], program, system)
    transfers = transfers_s(graph, [graph.index("conv1"), graph.index("conv2")], program, MK2)
    assert transfers[0] != transfers[1]
    assert [stage.receive_s for stage in prediction.stages] == [0, transfers[0], 0]
    passed = sum(stage.forward_s + stage.receive_s for stage in prediction.stages)
    assert prediction.latency_s == pytest.approx(passed + DEFAULT_CONSTANTS.fixed_s(system))


def test_weight_update() -> None:
    system = get_system("pod16")
    one = PlannedProgram(num_stages=2)
    assert update_s([1e6, 2e6], replace(one, training=False), system) == 0
    alone = update_s([1e6, 2e6], one, system)
    assert alone == update_s([0, 2e6], one, system)  # IPUs work side by side
    one_ipu = replace(one, device_mapping=(0, 0))
    assert update_s([1e6, 2e6], one_ipu, system) == pytest.approx(1.5 * alone)
    many = update_s([1e6, 2e6], replace(one, num_replicas=4), system)
    # Four replicas in a ring: three steps to sum the parts, three to pass the sums round.
    assert many - alone == pytest.approx(4e6 / system.all_reduce_bytes_per_s + 6 * 1.5e-6)
    few = update_s([10.0], replace(one, num_replicas=16), system) - update_s([10.0], one, system)
    assert few == pytest.approx(30 * 1.5e-6, rel=0.01)  # a few bytes only cost the steps of the ring
    offloaded = update_s([1e6, 2e6], replace(one, optimizer_state_offloading=True), system)
    assert offloaded - alone == pytest.approx(2 * 4e6 / system.remote_bytes_per_s)
    wide = update_s([1e6, 2e6], replace(one, precision="16.32", num_replicas=4), system)
    assert wide - 6 * 1.5e-6 == pytest.approx(2 * (many - 6 * 1.5e-6))


@pytest.mark.parametrize(
    ("schedule", "forward", "backward", "transfer", "name"),
    [
        ("Grouped", (1, 1), (1, 1), 0.9, "stage 0"),
        ("Grouped", (1, 1), (1, 1), 1.5, "transfer before stage 1"),  # a tick has it in both directions
        ("Grouped", (1, 3), (2, 1), 0, "stage 1 forward and stage 0 backward"),
        # The halves of a tick: stages 0 and 2 forward beside 1 backward, then the other way round.
        ("Interleaved", (1, 5, 2), (3, 1, 4), 0, "stage 2 forward and stage 1 forward"),
        ("Interleaved", (4, 1), (3, 2), 0, "stage 0"),
        ("Sequential", (1, 1), (1, 1), 1.5, "compute"),
        ("Sequential", (1, 1), (1, 1), 2.5, "transfer before stage 1"),
    ],
)
def test_bottleneck_is_what_takes_most_of_a_tick(
    schedule: str, forward: Tuple[int, ...], backward: Tuple[int, ...], transfer: float, name: str
) -> None:
    count = len(forward)
    settings = PlannedProgram(num_stages=count, schedule=schedule, device_mapping=tuple(range(count)))
    receive = np.array([0.0, *[transfer] * (count - 1)])
    assert _bottleneck(np.array(forward, float), np.array(backward, float), receive, settings) == name


def _bottleneck(
    forward: np.ndarray, backward: np.ndarray, receive: np.ndarray, settings: PlannedProgram
) -> str:
    tick, still = (
        settings.order.tick_s(forward, backward, c, settings.mapping) for c in (receive, 0 * receive)
    )
    return bottleneck_of(forward, backward, receive, settings, tick - still)


@tries(30, slow=500)
@given(
    st.sampled_from(["Grouped", "Interleaved"]),
    st.lists(st.integers(1, 10**6), min_size=4, max_size=12, unique=True),
)
def test_a_shorter_bottleneck_makes_a_shorter_tick(schedule: str, passes: List[int]) -> None:
    """A full tick becomes shorter if a pass that is named takes less time, and if no other one does."""
    count = len(passes) // 2
    settings = PlannedProgram(num_stages=count, schedule=schedule)
    seconds = np.array(passes[: 2 * count], float).reshape(2, count)
    named = _bottleneck(*seconds, np.zeros(count), settings)
    for stage in range(count):
        for row, direction in enumerate(("forward", "backward")):
            shorter = seconds.copy()
            shorter[row, stage] -= 0.5
            nothing = np.zeros(count)
            less = settings.order.tick_s(*shorter, nothing) < settings.order.tick_s(*seconds, nothing)
            is_named = f"stage {stage} {direction}" in named or named == f"stage {stage}"
            assert is_named == less


def test_host_link_limits_the_feed_of_the_ipus() -> None:
    tiny = chain(num=1, size=64, channels=4)
    settings = PlannedProgram(micro_batch_size=512, num_replicas=16, training=False)
    prediction = predict(tiny, [], settings, get_system("pod16"))
    assert prediction.bottleneck == "host"
    sample = 64 * 64 * 3 * 2 + 4
    assert prediction.images_per_s == pytest.approx(get_system("pod16").host_bytes_per_s / sample)
    bytes_ = predict(tiny, [], replace(settings, eight_bit_transfer=True), get_system("pod16"))
    assert bytes_.images_per_s > 1.5 * prediction.images_per_s
    # A replica of three stages occupies four IPUs.
    three, four = (
        predict(
            chain(), splits, PlannedProgram(num_replicas=4, num_stages=len(splits) + 1), get_system("pod16")
        )
        for splits in (["conv1", "conv2"], ["conv1", "conv2", "conv3"])
    )
    assert three.host_limit_images_per_s == four.host_limit_images_per_s


def test_faster_chips_and_larger_batches_are_faster() -> None:
    graph = chain()
    settings = PlannedProgram(micro_batch_size=2)
    rates = [
        predict(graph, [], settings, get_system("m2000")).images_per_s,
        predict(graph, [], settings, get_system("bow-2000")).images_per_s,
        predict(graph, [], replace(settings, micro_batch_size=8), get_system("bow-2000")).images_per_s,
    ]
    assert rates == sorted(rates)


def test_splits_must_match_the_stages() -> None:
    graph, system = chain(), get_system("pod16")
    for splits in (["conv2"], ["conv2", "conv1"], ["conv1", "conv1"]):
        with pytest.raises(ValueError, match="do not open 2 stages"):
            predict(graph, splits, PlannedProgram(num_stages=3), system)
