"""Splits in any order of the layers, against trying all chains of down-sets, and what becomes of such a plan."""

import itertools
import json
import random

import numpy as np
import pytest

from ipucnn import cli
from ipucnn.errors import ConfigurationError
from ipucnn.hardware import get_system
from ipucnn.models.build import BuildOptions
from ipucnn.models.registry import get_model
from ipucnn.planning.cost.layer_times import output_bytes
from ipucnn.planning.cost.memory import LeastBytes, program_memory
from ipucnn.planning.graphs.extract import layer_graph
from ipucnn.planning.graphs.layer_graph import Layer, LayerGraph, frozen_graph
from ipucnn.planning.search import down_sets, minmax, orders, relaxation
from ipucnn.planning.search.planner import Planner
from ipucnn.planning.search.tables import StageTables
from ipucnn.planning.settings import PlanSettings


def instance(seed):
    """A small graph with branches: items, tables, stages and schedule."""
    rng = random.Random(seed)
    n = rng.randint(3, 7)
    before = [()]
    for item in range(1, n):
        before.append(tuple(sorted({0, *rng.sample(range(item), rng.randint(1, min(2, item)))})))
    readers = {i: tuple(j for j in range(n) if i in before[j]) for i in range(n)}
    tensors = tuple((rng.choice([0.0, 0.5, 1.0, 3.0]), i, readers[i]) for i in range(n) if readers[i])
    tables = StageTables(
        forward_s=[float(rng.randint(0, 5)) for _ in range(n)],
        backward_s=[float(rng.randint(0, 9)) for _ in range(n)],
        cut_s=np.zeros(n + 1),
        capacity_bytes=1.0,
        memory_bytes=lambda num_stages, stage: np.zeros((n, n + 1)),
        recompute=rng.random() < 0.5,
    )
    return (
        down_sets.Items(tuple(before), tensors),
        tables,
        rng.randint(2, min(4, n)),
        rng.choice(["Grouped", "Interleaved"]),
    )


def held_bytes(items, least, stage_of, stage):
    """What a stage holds, written from the words of ``LeastBytes``."""
    total = least.fixed[stage] + sum(least.items[stage][v] for v, own in enumerate(stage_of) if own == stage)
    for size, maker, readers in items.tensors:
        last = max(stage_of[reader] for reader in readers)
        arrives, leaves = stage_of[maker] < stage <= last, stage_of[maker] <= stage < last
        waits = arrives and last == stage and all(least.goes_back[reader] for reader in readers)
        total += size * (least.crossing * (arrives + leaves) + least.inputs[stage] * waits)
    return total


def brute_force(items, tables, count, schedule, fits=lambda stage_of: True):
    """The least tick of all pipelines: every item in any stage not before those that it reads, no stage empty."""
    n, best = len(items.before), float("inf")
    for stage_of in itertools.product(range(count), repeat=n):
        if set(stage_of) != set(range(count)):
            continue
        if any(stage_of[source] > stage_of[item] for item in range(n) for source in items.before[item]):
            continue
        if not fits(stage_of):
            continue
        f, b = [0.0] * count, [0.0] * count
        for item, stage in enumerate(stage_of):
            f[stage] += tables.forward_s[item]
            b[stage] += tables.backward_s[item]
        if tables.recompute:
            b = [b[s] + f[s] if s < count - 1 else b[s] for s in range(count)]
        cut = {
            s: sum(
                size for size, i, to in items.tensors if stage_of[i] < s and any(stage_of[j] >= s for j in to)
            )
            for s in range(1, count)
        }
        if schedule == "Grouped":
            tick = max(f) + max(b) + 2 * max(cut.values())
        else:
            tick = 0.0
            for parity in (0, 1):
                tick += max(f[s] if s % 2 == parity else b[s] for s in range(count))
                tick += 2 * max((cut[s] for s in cut if s % 2 != parity), default=0)
        best = min(best, tick)
    return best


@pytest.mark.parametrize("part", range(4))
def test_no_pipeline_in_any_order_is_faster(part):
    for seed in range(50 * part, 50 * part + 50):
        items, tables, count, schedule = instance(seed)
        fastest = brute_force(items, tables, count, schedule)
        masks = down_sets.down_sets(items)
        for below_s in (np.inf, fastest * 1.5 + 1):
            chains = down_sets.Chains(items, masks, tables, count, schedule)
            search = minmax.Search(chains, None, below_s)
            assert search.run() == pytest.approx(fastest, abs=1e-9)
            assert chains.value(*chains.maxima(search.starts)) == pytest.approx(fastest, abs=1e-9)
        # Down-sets that are no chain of one order, but a few of each size: no faster than all, and legal.
        few = down_sets.promising(items, 3 * len(items.before))
        assert set(few) <= set(masks)


@pytest.mark.parametrize(
    "seeds", [range(0, 200, 20), *(pytest.param(range(i, 200, 3), marks=pytest.mark.slow) for i in range(3))]
)
def test_no_pipeline_is_below_the_bound_of_the_linear_programs(seeds, monkeypatch):
    monkeypatch.setattr(relaxation, "_MOST_PROGRAMS", 8)
    rng, reached = np.random.default_rng(seeds.start), 0
    for seed in seeds:
        items, tables, count, schedule = instance(seed)
        fastest = brute_force(items, tables, count, schedule)
        for below_s in (fastest * (1 + 1e-6) + 1e-6, fastest * 1.5 + 1):
            program = relaxation.Relaxation(items, tables, count, schedule, 0.0, below_s)
            bound_s = program.run()
            assert bound_s <= fastest * (1 + 1e-9) <= program.best_s * (1 + 1e-8)
            # What it found is a pipeline with that tick.
            if program.cuts:
                chains = down_sets.Chains(
                    items, [*program.cuts, (1 << len(items.before)) - 1], tables, count, schedule
                )
                found = chains.value(*chains.maxima(tuple(range(count))))
                assert found == pytest.approx(program.best_s, rel=1e-9, abs=1e-9)
                legal = down_sets.down_sets(items)
                assert set(program.cuts) <= set(legal)
            reached += program.best_s <= fastest * (1 + 1e-6) + 2e-6
        # The bound is one whatever the solver says.
        program.make_program()
        low, high = np.zeros(len(program.costs)), program.ends
        for _ in range(10):
            multipliers = rng.exponential(size=len(program.most)) * rng.integers(0, 2)
            multipliers[rng.random(len(multipliers)) < 0.5] = 0.0
            assert program.proved_s(multipliers, low, high) <= fastest * (1 + 1e-9)
    # It finds a fastest one in nearly all of them.
    assert reached >= 0.9 * 2 * len(seeds)


@pytest.mark.parametrize(
    "seeds", [range(40, 41), *(pytest.param(range(i, 200, 3), marks=pytest.mark.slow) for i in range(3))]
)
def test_no_pipeline_that_fits_is_below_the_bound_with_memory(seeds, monkeypatch):
    monkeypatch.setattr(relaxation, "_MOST_PROGRAMS", 24)
    raised = 0
    for seed in seeds:
        items, tables, count, schedule = instance(seed)
        rng, n = np.random.default_rng(seed), len(items.before)
        again = np.array([tables.recomputes(count, stage) for stage in range(count)])
        least = LeastBytes(
            items=rng.integers(0, 6, n) * (1.0 + rng.integers(0, 3, (count, 1))),
            inputs=again * rng.integers(0, 4, count).astype(float),
            goes_back=np.arange(n) >= seed % 3,
            fixed=rng.integers(0, 3, count).astype(float),
            crossing=1.04,
        )
        needed = []

        def most(stage_of, needed=needed, items=items, least=least, count=count):
            needed.append(max(held_bytes(items, least, stage_of, s) for s in range(count)))
            return True

        free = brute_force(items, tables, count, schedule, most)
        # What a twentieth of all pipelines keep to.
        capacity = float(np.quantile(needed, 0.05))

        def fits(stage_of, capacity=capacity, items=items, least=least, count=count):
            return max(held_bytes(items, least, stage_of, s) for s in range(count)) <= capacity

        fastest = brute_force(items, tables, count, schedule, fits)
        memory = relaxation.Memory(least, capacity, 1.0, lambda order, below_s: None)
        program = relaxation.Relaxation(items, tables, count, schedule, 0.0, fastest * 1.001 + 1e-6, memory)
        bound_s = program.run()
        assert bound_s <= fastest * (1 + 1e-9), seed
        raised += bound_s > free * (1 + 1e-9)
    # Without memory it would be no more than the tick of what does not fit.
    assert raised > len(seeds) / 10


@pytest.mark.parametrize(("recomputation", "num_frozen"), [(False, 0), (True, 0), (True, 180)])
def test_no_stage_of_any_order_holds_less_than_the_bound_says(recomputation, num_frozen):
    """Against the memory of real stages: those of a network whose layers were put into other orders."""
    graph = layer_graph(get_model("inceptionv3"), BuildOptions((299, 299, 3), 1000))
    graph = frozen_graph(graph, [layer.name for layer in graph.layers if layer.num_parameters][:num_frozen])
    settings = PlanSettings(
        micro_batch_size=32,
        gradient_accumulation_count=32,
        num_stages=8,
        recomputation=recomputation,
        precision="16.32",
    )
    planner = Planner(graph, get_system("pod16"))
    ipu = planner.system.ipu
    sizes = 2 * output_bytes(graph, settings) / ipu.link_bytes_per_s
    items = down_sets.items_of(graph, sizes.tolist())
    least = planner.least_bytes(settings)
    tensors = [(size * ipu.link_bytes_per_s / 2, maker, to) for size, maker, to in items.tensors]
    rng, n = random.Random(3), len(items.before)
    for _ in range(6):
        order, left = [], set(range(n))
        while left:
            ready = [v for v in sorted(left) if not left & set(items.before[v])]
            order.append(rng.choice(ready))
            left.discard(order[-1])
        starts = [0, *sorted(rng.sample(range(1, n), 7))]
        stage_of = [0] * n
        for place, item in enumerate(order):
            stage_of[item] = sum(place >= start for start in starts) - 1
        moved = orders._in_order(graph, order)
        other = Planner(moved, planner.system)
        memory = program_memory(moved, other.names(starts), settings, ipu)
        held = [held_bytes(items._replace(tensors=tensors), least, stage_of, stage) for stage in range(8)]
        assert all(least <= own.total_bytes for least, own in zip(held, memory))
        assert sum(held) > 0.25 * sum(own.total_bytes for own in memory)


def test_down_sets_are_all_that_hold_what_they_read():
    for seed in range(30):
        items, *_ = instance(seed)
        n = len(items.before)
        legal = {
            mask
            for mask in range(1 << n)
            if all(mask >> i & 1 for item in range(n) if mask >> item & 1 for i in items.before[item])
        }
        assert set(down_sets.down_sets(items)) == legal
        assert down_sets.down_sets(items, at_most=len(legal) - 1) is None


def run(capsys, *arguments):
    code = cli.run([*arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


UNET = ("plan-splits", "unet", "--stages", "4", "--schedule", "Grouped", "--micro-batch-size", "1")


def test_a_plan_in_another_order_is_told_and_not_trained(capsys, tmp_path):
    code, out, err = run(capsys, *UNET, "--json")
    assert code == 0, err
    own = json.loads(out)
    path = tmp_path / "plan.yml"
    code, out, err = run(capsys, *UNET, "--orders", "--json", "--save", str(path))
    assert code == 0, err
    plan = json.loads(out)
    assert (own["searched_orders"], own["order"], plan["searched_orders"]) == ("own", [], "all")
    # Not slower, though each stage has its own proportion of memory here.
    assert len(own["settings"]["available_memory_proportion"]) == 4
    assert plan["predicted_tick_s"] <= own["predicted_tick_s"]
    assert plan["predicted_images_per_s"] >= own["predicted_images_per_s"]
    assert plan["predicted_lower_bound_s"] <= plan["predicted_tick_s"] * (1 + 1e-9)
    if plan["order"]:
        assert sorted(plan["order"]) == sorted(layer["name"] for layer in own["profile"])
        assert [layer["name"] for layer in plan["profile"]] == plan["order"]
        code, _, err = run(capsys, "train", "unet", "--plan", str(path))
        assert code == 2 and "another order" in err and "hint: plan again without --orders" in err
    code, out, err = run(capsys, *UNET, "--orders")
    assert code == 0 and "any order" in out


def test_a_network_with_one_order_says_so(capsys):
    code, out, err = run(
        capsys, "plan-splits", "mobilenet", "--stages", "2", "--schedule", "Grouped", "--orders"
    )
    assert code == 0, err
    assert "this order, the only one they have" in " ".join(out.split())


@pytest.mark.parametrize(
    "arguments, error",
    [
        (("--stages", "4", "--schedule", "Sequential"), "a Sequential pipeline of 4 stages"),
        (("--stages", "1"), "a Grouped pipeline of 1 stage"),
        (("--ipus", "4"), "a number of stages"),
        (("--splits", "conv2_block1_out"), "a number of stages"),
    ],
)
def test_orders_of_what_has_none_are_refused(capsys, arguments, error):
    code, out, err = run(capsys, "plan-splits", "resnet50", *arguments, "--orders")
    assert (code, out) == (2, "")
    assert err.startswith("error: --orders") and error in err and "hint: " in err


def test_a_network_with_separable_convolutions_in_any_order(capsys):
    line = ["plan-splits", "nasnetmobile", "--stages", "4", "--orders", "--micro-batch-size", "1", "--json"]
    assert cli.run([*line, "--schedule", "Grouped", "--recomputation", "off"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["searched_orders"] == "all" and found["order"] and found["gap"] < 0.06


def test_graphs_of_which_not_every_order_is_searched_are_refused():
    def convolution(name, source):
        return Layer(name, "conv", (source,), (4, 4, 1), input_channels=1)

    layers = (
        Layer("input", "input", (), (4, 4, 1)),
        *(convolution(n, "input" if n == "a" else "a") for n in "abcd"),
    )
    chain = (*layers, Layer("e", "matmul", ("d",), (2,), input_channels=1))
    orders.check_all_orders(LayerGraph("near", (4, 4, 1), 2, chain, tied=(("b", "c"),)))
    with pytest.raises(ConfigurationError, match="in far b and d share weights"):
        orders.check_all_orders(LayerGraph("far", (4, 4, 1), 2, chain, tied=(("b", "d"),)))
    wide = (*chain[:2], convolution("b", "input"), *chain[3:])
    with pytest.raises(ConfigurationError, match="the input feeds a and b"):
        orders.check_all_orders(LayerGraph("wide", (4, 4, 1), 2, wide))
