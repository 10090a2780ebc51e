"""The memory model against naive counts on random graphs, the planner's tables, and published facts."""

import csv
from dataclasses import replace
from typing import Any, Dict, Iterator, List, Set, Tuple

import numpy as np
import pytest
from few_examples import tries
from hypothesis import given
from hypothesis import strategies as st
from support.plans import check_search_agrees, conv
from support.scripts import ROOT, load_script

from ipucnn.hardware import get_ipu, get_system
from ipucnn.planning.cost.layer_times import layer_times
from ipucnn.planning.cost.memory import (
    CATEGORIES,
    FITS_BELOW,
    FITS_NOT_ABOVE,
    MemoryModel,
    StageMemory,
    distinct_sum,
    program_memory,
    published_at,
    range_maximum,
    range_sum,
)
from ipucnn.planning.cost.products import BAND_FACTOR, DEFAULT_CONSTANTS
from ipucnn.planning.graphs.layer_graph import Layer, LayerGraph
from ipucnn.planning.program import PlannedProgram
from ipucnn.planning.search.planner import Planner
from ipucnn.planning.search.tables import item_starts

MK2 = get_ipu("mk2")
SHARED = ROOT.parent / "shared" / "ipu"


@st.composite
def graphs(draw, max_layers: int = 9) -> LayerGraph:
    """Draws graphs of convolutions, some of them frozen, activations and sums with skips."""
    layers = [Layer("l0", "input", (), (8, 8, 3))]
    for i in range(1, draw(st.integers(2, max_layers))):
        name = f"l{i}"
        kind = draw(st.sampled_from(["conv", "activation", "elementwise", "concat"]))
        first = layers[draw(st.integers(max(0, i - 3), i - 1))]
        channels = first.output_shape[-1]
        if kind == "conv":
            outputs = draw(st.sampled_from([8, 16]))
            weights = 9 * channels * outputs
            trained = weights * draw(st.sampled_from([0, 1, 1]))
            counts = {"num_parameters": weights + outputs, "num_trainable": trained}
            layers.append(conv(name, first.name, 8, channels, outputs, **counts))
        elif kind == "activation":
            layers.append(
                Layer(name, kind, (first.name,), first.output_shape, input_channels=channels, kept=(name,))
            )
        else:
            second = layers[draw(st.integers(0, i - 1))]
            kept = (first.name,) if draw(st.booleans()) else ()
            shape = (8, 8, max(channels, second.output_shape[-1]))
            inputs = (first.name, second.name) if first is not second else (first.name,)
            layers.append(Layer(name, kind, inputs, shape, input_channels=channels, kept=kept))
    return LayerGraph("random", (8, 8, 3), 4, tuple(layers))


@st.composite
def settings_(draw) -> PlannedProgram:
    return PlannedProgram(
        micro_batch_size=draw(st.sampled_from([1, 4])),
        gradient_accumulation_count=draw(st.sampled_from([1, 8])),
        num_stages=draw(st.integers(1, 4)),
        schedule=draw(st.sampled_from(["Grouped", "Interleaved", "Sequential"])),
        precision=draw(st.sampled_from(["16.16", "16.32", "32.32"])),
        recomputation=draw(st.booleans()),
        training=draw(st.booleans()),
        optimizer_slots=draw(st.integers(0, 2)),
        optimizer_state_offloading=draw(st.booleans()),
    )


def naive_memory(
    graph: LayerGraph, first: int, last: int, stage: int, settings: PlannedProgram
) -> Dict[str, float]:
    """Counts bytes by category, live activations and temporaries together, with sets."""
    layers = graph.layers
    stage_layers = layers[first:last]
    size = {
        layer.name: layer.output_elements * settings.micro_batch_size * settings.element_bytes
        for layer in layers
    }

    def read_after(name: str, place: int) -> bool:
        """Whether the layer at a place or a later one reads it."""
        return any(name in layer.inputs for layer in layers[place:])

    def total(names: Set[str]) -> float:
        return float(sum(size[name] for name in names))

    crossing_in = {layer.name for layer in layers[:first] if read_after(layer.name, first)}
    crossing_out = {layer.name for layer in layers[:last] if read_after(layer.name, last)}
    outputs = {layer.name for layer in stage_layers} - {layers[0].name}
    trains = any(layer.num_trainable for layer in layers)

    def goes_back(layer: Layer) -> bool:
        """Whether it, or a layer that it reads directly or indirectly, is trained."""
        before = [other for other in layers if other.name in layer.inputs]
        return not trains or layer.num_trainable > 0 or any(goes_back(other) for other in before)

    back = [layer for layer in stage_layers if goes_back(layer)] if settings.training else []
    # A frozen convolution's backward pass needs only its weights, not its input.
    frozen = [x for x in back if x.op_class == "conv" and trains and not x.num_trainable]
    kept = {name for layer in back if layer not in frozen for name in layer.kept}
    inputs = {name for layer in stage_layers for name in layer.inputs} - outputs if back else set()
    temporaries = layer_times(graph, settings, MK2).temporary_bytes.max(axis=1) * MK2.num_tiles
    work = 0.0
    for place in range(first, last):
        alive = {
            layer.name
            for layer in layers[: place + 1]
            if layer.name == layers[place].name or read_after(layer.name, place)
        }
        bytes_ = total(alive)
        layer = layers[place]
        if layer.op_class in ("activation", "elementwise") and any(
            not read_after(name, place + 1) for name in layer.inputs
        ):
            bytes_ -= size[layer.name]
        work = max(work, bytes_ + temporaries[place])
    one_ipu = settings.schedule == "Sequential"
    recomputes = settings.training and settings.recomputation
    depth = {"Grouped": 2, "Interleaved": 1, "Sequential": 0}[settings.schedule]
    depth *= (settings.num_stages - 1 - stage) if settings.training else 0
    image = size[layers[0].name]
    if one_ipu:
        stash = total(crossing_in) if recomputes else total(kept)
        live = (total(kept & outputs) if recomputes else 0) + image
    else:
        arriving = total(crossing_in) if first else image
        if recomputes and stage < settings.num_stages - 1:
            stash, live = depth * total(inputs), total(inputs | (kept & outputs))
        else:
            stash, live = depth * total(kept), total(kept)
        live += arriving + total(crossing_out)
    weight = {"16.16": 2, "16.32": 4, "32.32": 4}[settings.precision]
    parameters = sum(layer.num_parameters for layer in stage_layers)
    trainable = sum(layer.num_trainable for layer in stage_layers)
    shapes = {layer.name: layer.output_shape for layer in layers}
    kinds = {
        (layer.op_class, layer.output_shape, tuple(shapes[n] for n in layer.inputs), layer.kernel)
        for layer in stage_layers
        if layer.op_class != "input"
    }
    passes = 3 * 0.75 if settings.training else 1
    code = 20e6 + sum((0.45e6 if kind[0] == "conv" else 0.12e6) * passes for kind in kinds)
    accumulates = settings.num_stages > 1 or settings.gradient_accumulation_count > 1
    slots = 0 if settings.optimizer_state_offloading and accumulates else settings.optimizer_slots
    values = {
        "weights": parameters * (weight + (2 if settings.precision == "16.32" else 0)),
        "accumulators": trainable * weight * (settings.gradient_accumulation_count > 1),
        "optimizer_state": trainable * weight * slots,
        "stash": stash,
        "work": live + work,
        "code": code,
    }
    if not settings.training:
        values.update(accumulators=0, optimizer_state=0)
    return {name: 1.04 * value for name, value in values.items()}


def stage_memory(
    graph: LayerGraph, first: int, last: int, stage: int, settings: PlannedProgram
) -> StageMemory:
    """Returns the memory of layers ``first .. last - 1`` as a stage, by a model with only these two cuts."""
    starts = sorted({0, first, last} - {len(graph.layers)})
    a = starts.index(first)
    return MemoryModel(graph, settings, MK2, starts).entry(a, a + 1, settings.num_stages, stage)


@tries(30, slow=100)
@given(graphs(), settings_(), st.data())
def test_stage_memory_equals_a_naive_count(graph, settings, data) -> None:
    first = data.draw(st.integers(0, len(graph.layers) - 1))
    last = data.draw(st.integers(first + 1, len(graph.layers)))
    stage = data.draw(st.integers(0, settings.num_stages - 1))
    memory = stage_memory(graph, first, last, stage, settings)
    expected = naive_memory(graph, first, last, stage, settings)
    categories = memory.categories()
    work = categories.pop("live_activations") + categories.pop("temporaries")
    for name, value in {**categories, "work": work}.items():
        assert value == pytest.approx(expected[name], rel=1e-9, abs=0.51 * settings.num_stages * 2), name
        assert value == int(value), name
    assert memory.total_bytes == pytest.approx(sum(expected.values()))


@tries(60, slow=200)
@given(graphs(), settings_(), st.booleans(), st.data())
def test_search_and_forecast_count_alike(graph, settings, own_ipus, data) -> None:
    planner, count = Planner(graph, get_system("pod16")), settings.num_stages
    if len(planner.starts) < count:
        return
    if own_ipus:
        settings = replace(settings, device_mapping=tuple(range(count)))
    cuts = sorted(data.draw(st.permutations(range(1, len(planner.starts))))[: count - 1])
    check_search_agrees(planner, planner.names((0, *cuts)), settings)


def test_stages_that_share_an_ipu_share_code_and_work_in_turn() -> None:
    layers = [
        Layer("l0", "input", (), (8, 8, 8)),
        *(conv(f"l{i}", f"l{i - 1}", 8, 8, 8) for i in range(1, 5)),
    ]
    graph = LayerGraph("four", (8, 8, 8), 8, tuple(layers))
    settings = PlannedProgram(num_stages=4, gradient_accumulation_count=8, device_mapping=(0, 1, 1, 0))
    first, second = program_memory(graph, ["l2", "l3", "l4"], settings, MK2)
    alone = [stage_memory(graph, a, b, s, settings) for s, (a, b) in enumerate([(0, 2), (2, 3)])]
    assert first.weights_bytes == pytest.approx(2 * alone[0].weights_bytes)
    assert second.code_bytes == pytest.approx(alone[1].code_bytes)
    assert second.stash_bytes < 2 * alone[1].stash_bytes  # the later stage has the shallower FIFO


def in_flight(schedule: str, num_stages: int) -> Iterator[Tuple[int, List[int]]]:
    """Yields a stage that goes backward in a full pipeline, and the micro-batches whose data each stage has then."""
    last = num_stages - 1
    if schedule == "Sequential":
        yield from ((s, [int(r <= s) for r in range(num_stages)]) for s in range(num_stages))
        return
    passes = {"Grouped": (1, 2 * last), "Interleaved": (2, 2 * last + 1)}
    step, turn = passes[schedule]
    ticks = [[(step * m + s, step * m + turn - s) for m in range(60)] for s in range(num_stages)]
    for tick in (40, 41):
        held = [sum(ahead <= tick <= back for ahead, back in of_stage) for of_stage in ticks]
        yield from ((s, held) for s in range(num_stages) if any(back == tick for _, back in ticks[s]))


@tries(40, slow=200)
@given(graphs(), settings_(), st.data())
def test_stages_that_share_an_ipu_keep_what_they_need_for_their_backward_passes(
    graph, settings, data
) -> None:
    starts, count = item_starts(graph), settings.num_stages
    if len(starts) < count or count < 3:
        return
    cuts = sorted(data.draw(st.permutations(range(1, len(starts))))[: count - 1])
    bounds = [0, *(starts[cut] for cut in cuts), len(graph.layers)]
    mapping = (0, *data.draw(st.permutations([0, 1, 1][: count - 1])))
    settings = replace(settings, device_mapping=mapping)
    # What a stage holds does not depend on the schedule, but for the number of micro-batches.
    alike = replace(settings, schedule="Interleaved", device_mapping=None)
    stages = [naive_memory(graph, bounds[s], bounds[s + 1], s, alike) for s in range(count)]
    kept = []
    for s in range(count):
        # The same stage before one other, so that its FIFO holds one micro-batch.
        before = replace(alike, num_stages=s + 2, recomputation=settings.recomputation and s < count - 1)
        kept.append(naive_memory(graph, bounds[s], bounds[s + 1], s, before)["stash"])
    for number, ipu in enumerate(
        program_memory(graph, [graph.layers[b].name for b in bounds[1:-1]], settings, MK2)
    ):
        members = [s for s in range(count) if mapping[s] == number]
        resident = sum(
            stages[s][name] for s in members for name in ("weights", "accumulators", "optimizer_state")
        )
        fullest = max(
            stages[s]["work"] + sum((held[r] - (r == s)) * kept[r] for r in members)
            for s, held in in_flight(settings.schedule, count)
            if s in members
        )
        assert ipu.total_bytes - ipu.code_bytes == pytest.approx(resident + fullest, rel=1e-9, abs=20)


def test_verdicts() -> None:
    def filled(fill: float) -> StageMemory:
        values = dict.fromkeys((f"{name}_bytes" for name in CATEGORIES), 0.0)
        values["weights_bytes"] = fill * 1e9
        return StageMemory(**values, capacity_bytes=1e9)

    assert filled(FITS_BELOW - 0.01).verdict == "fits"
    assert filled(FITS_BELOW + 0.01).verdict == "uncertain"
    assert filled(FITS_NOT_ABOVE - 0.01).verdict == "uncertain"
    assert filled(FITS_NOT_ABOVE + 0.01).verdict == "does not fit"


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.sets(st.integers(0, 7)), st.integers(0, 9), st.integers(-1, 7)), max_size=6),
    st.lists(st.integers(0, 9), min_size=8, max_size=8),
)
def test_range_tables_equal_naive_ones(things, values) -> None:
    occurrences = [sorted(items) for items, _, _ in things]
    weights = [weight for _, weight, _ in things]
    after = [place for _, _, place in things]
    everywhere = distinct_sum(occurrences, weights, 8)
    behind = distinct_sum(occurrences, weights, 8, after=after)
    sums, maxima = range_sum(np.array(values, dtype=float)), range_maximum(np.array(values, dtype=float))
    for a in range(8):
        for b in range(a + 1, 9):
            inside = [w for items, w, _ in things if any(a <= i < b for i in items)]
            assert everywhere[a, b] == pytest.approx(sum(inside))
            later = [w for items, w, p in things if a > p and any(a <= i < b for i in items)]
            assert behind[a, b] == pytest.approx(sum(later))
            assert sums[a, b] == pytest.approx(sum(values[a:b]))
            assert maxima[a, b] == max(values[a:b])


# --- published facts -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def judged() -> List[Tuple[str, StageMemory]]:
    """Returns the outcome of each published configuration in results/published_fits.csv, and its fullest IPU."""
    benchmark = load_script("benchmarks/fit_cost_model.py")
    return [(row["outcome"], fullest) for row, _, fullest in benchmark.judged_fits()]


@pytest.mark.slow
def test_published_fits_are_judged_correctly(judged: List[Tuple[str, StageMemory]]) -> None:
    """None that fits is judged "does not fit", most are judged "fits", and out-of-memory reports are not."""
    verdicts = [fullest.verdict for outcome, fullest in judged if outcome == "fits"]
    hard = [fullest.verdict for outcome, fullest in judged if outcome == "out of memory"]
    assert len(verdicts) >= 60
    assert "does not fit" not in verdicts
    assert verdicts.count("fits") >= 0.7 * len(verdicts)
    assert len(hard) >= 2 and "fits" not in hard


@pytest.fixture
def calibration() -> Tuple[Any, List[Tuple[Any, float]]]:
    """Returns the benchmark that fits the constants, and the published programs with their images/s."""
    benchmark = load_script("benchmarks/fit_cost_model.py")
    return benchmark, benchmark.calibration_programs()


def _without(calibration: Tuple[Any, List[Tuple[Any, float]]]) -> Iterator[Tuple[str, List[float]]]:
    """Yields each network with the errors of its rows, by constants fitted to the rows of all others."""
    benchmark, pairs = calibration
    for model in {program.graph.model for program, _ in pairs}:
        kept = [(p, v) for p, v in pairs if p.graph.model != model]
        fitted = benchmark.fit([p for p, _ in kept], [v for _, v in kept])
        left = [(p, v) for p, v in pairs if p.graph.model == model]
        yield model, [abs(float(np.log(p.images_per_s(fitted) / v))) for p, v in left]


@pytest.mark.slow
def test_constants_predict_the_calibration_rows(calibration) -> None:
    _, pairs = calibration
    assert len(pairs) == 20
    errors = [abs(np.log(program.images_per_s(DEFAULT_CONSTANTS) / value)) for program, value in pairs]
    assert max(errors) < np.log(1.2)
    assert np.exp(np.mean(errors)) < 1.15


@pytest.mark.slow
def test_fit_gives_the_shipped_constants_and_generalises_to_other_networks(calibration) -> None:
    benchmark, pairs = calibration
    fitted = benchmark.fit([p for p, _ in pairs], [v for _, v in pairs])
    for name, value in vars(DEFAULT_CONSTANTS).items():
        assert getattr(fitted, name) == pytest.approx(value, rel=0.03)
    assert all(max(errors) < np.log(1.35) for _, errors in _without(calibration))


def test_published_configurations_are_counted_by_fill() -> None:
    assert published_at(0.449) == published_at(0.41) == (12, 12)
    assert published_at(0.15) == (0, 0)  # none is that empty
    assert published_at(1.1) == published_at(7.0) == (0, 4)
    shares = [fits / number for fits, number in map(published_at, (0.45, 0.85, 0.95, 1.2))]
    assert shares == sorted(shares, reverse=True)
    with open(ROOT / "results" / "published_fits.csv") as file:
        outcomes = [row["outcome"] for row in csv.DictReader(file)]
    counts = np.array([published_at(tenth / 10 + 0.05) for tenth in range(12)])
    assert counts.sum(axis=0).tolist() == [outcomes.count("fits"), len(outcomes)]


@pytest.mark.slow
def test_band_covers_networks_left_out_of_the_fit(calibration) -> None:
    """Counts band and coverage a second time, plainly, over the errors without a network."""
    errors = dict(_without(calibration))
    every = sorted(error for errors_of_model in errors.values() for error in errors_of_model)
    place = 0.8 * (len(every) - 1)
    low, high = every[int(place)], every[int(place) + 1]
    assert np.exp(low + (place - int(place)) * (high - low)) == pytest.approx(BAND_FACTOR, rel=0.005)
    hits = 0
    for model, errors_of_model in errors.items():
        others = np.quantile(
            [e for name, other_errors in errors.items() if name != model for e in other_errors], 0.8
        )
        hits += sum(e <= others for e in errors_of_model)
    assert 0.7 <= hits / len(every) <= 0.9


@pytest.mark.slow
def test_published_counts_are_those_of_the_shipped_rows(judged: List[Tuple[str, StageMemory]]) -> None:
    outcomes: Dict[int, List[bool]] = {}
    for outcome, fullest in judged:
        outcomes.setdefault(min(int(fullest.fill * 10), 11), []).append(outcome == "fits")
    counts = {place: (sum(fits), len(fits)) for place, fits in outcomes.items()}
    assert counts == {place: published_at(place / 10 + 0.05) for place in outcomes}
    assert sum(number for _, number in counts.values()) == sum(
        published_at(n / 10 + 0.05)[1] for n in range(12)
    )
