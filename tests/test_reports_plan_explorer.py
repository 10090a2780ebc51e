"""The page of a search: what its script shows is what the planner predicts, and no other script can run."""

import base64
import hashlib
import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ipucnn import cli
from ipucnn.hardware import get_system
from ipucnn.models.build import BuildOptions
from ipucnn.models.registry import get_model
from ipucnn.planning.cost.memory import program_memory
from ipucnn.planning.cost.schedule import predict, timeline
from ipucnn.planning.graphs import extract
from ipucnn.planning.pipeline_plan import PipelinePlan
from ipucnn.planning.plan import assemble
from ipucnn.planning.search.configurations import SearchSpace, search
from ipucnn.planning.search.planner import Planner
from ipucnn.planning.settings import PlanSettings
from ipucnn.planning.what_if import choice, settings_of
from ipucnn.reports import plan_html
from ipucnn.reports.plan_html import SCRIPT, render

MODEL = "cifar_resnet8"
SYSTEM = get_system("pod16")
SOURCE = Path(plan_html.__file__).parent / SCRIPT
HOSTILE = "</script><script>alert(1)</script>&amp;'\"]]>\u2028"

node = pytest.mark.skipif(shutil.which("node") is None, reason="no node to run scripts with")


@pytest.fixture(scope="module")
def planner():
    return Planner(extract.known_graph(get_model(MODEL), BuildOptions((32, 32, 3), 10)), SYSTEM)


def searched(planner, training=True, **space):
    base = PlanSettings(training=training)
    best, rows = search(planner, SearchSpace(base, 4, (2, 8, 32), **space))
    plan = assemble(planner, best, planned=True, build={}, pareto=rows, options={"optimizer": "sgd"})
    found = [choice(planner, plan.settings, row) for row in rows]
    # Another precision of the first configuration.
    other = replace(plan.settings, precision="32.32")
    found.append(replace(choice(planner, other, rows[0]), best=False))
    return plan, tuple(found)


@pytest.fixture(scope="module")
def trained(planner):
    return searched(planner)


@pytest.fixture(scope="module")
def inferred(planner):
    return searched(planner, training=False, schedules=("Grouped",))


@pytest.fixture(scope="module", params=["training", "inference"])
def explored(request):
    return request.getfixturevalue("trained" if request.param == "training" else "inferred")


class Scripts(HTMLParser):
    """Every script of a page with its attributes, the policies, and all addresses."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.scripts, self.policies, self.addresses, self.inside = [], [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        own = dict(attributes)
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append((own, ""))
        if own.get("http-equiv") == "Content-Security-Policy":
            self.policies.append(own["content"])
        self.addresses += [v for k, v in attributes if k in ("src", "href", "action", "xlink:href", "data")]
        assert not [name for name in own if name.startswith("on") or name == "style"]

    def handle_data(self, data):
        if self.inside:
            own, text = self.scripts[-1]
            self.scripts[-1] = own, text + data

    def handle_endtag(self, tag):
        self.inside = False


def data_of(page):
    (own,) = [text for attributes, text in Scripts(page).scripts if attributes.get("id") == "choices"]
    return json.loads(own)


def test_one_script_runs_and_nothing_is_fetched(explored):
    page = render(*explored)
    found = Scripts(page)
    assert [sorted(own) for own, _ in found.scripts] == [["id", "type"], []]
    ((_, script),) = [each for each in found.scripts if not each[0]]
    assert script == SOURCE.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = found.policies
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.partition("style-src")[0]
    assert found.addresses == [] and not re.search(r"url\(|@import", page)
    assert not re.search("fetch|XMLHttpRequest|WebSocket|import\\(|eval|innerHTML|Function\\(", script)
    for word in re.findall(r"https?://[^\"' ]+", page):
        assert word.startswith("http://www.w3.org/")  # a namespace
    ET.fromstring(page.replace("<!DOCTYPE html>", ""))
    assert "hidden" in re.search(r'<section id="explore"[^>]*>', page).group()


def test_a_page_without_choices_has_no_script(trained):
    plan, _ = trained
    found = Scripts(render(plan))
    assert found.scripts == [] and "script-src 'none'" in found.policies[0]


def test_without_scripts_everything_about_the_plan_is_there(trained):
    plan, choices = trained
    page = render(plan, choices)
    still = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert all(split in still for split in plan.splits)
    assert still.count("<svg") > 3 and f"{plan.predicted_images_per_s:,.0f}" in still
    assert "<noscript>" in still


def test_data_cannot_end_the_element_that_it_is_in(trained):
    plan, choices = trained
    hostile = [
        replace(
            one, layers=tuple((HOSTILE, HOSTILE) for _ in one.layers), splits=(HOSTILE,) * len(one.splits)
        )
        for one in choices
    ]
    page = render(replace(plan, model="x" + HOSTILE), hostile)
    assert len(Scripts(page).scripts) == 2
    ET.fromstring(page.replace("<!DOCTYPE html>", ""))
    data = data_of(page)
    assert data["choices"][0]["stages"][0]["first"] == HOSTILE


def test_the_data_is_what_the_planner_predicts(planner, explored):
    plan, choices = explored
    data = data_of(render(plan, choices))["choices"]
    assert len(data) == len(plan.pareto) + 1
    for row, own, one in zip(plan.pareto, data, choices):
        settings = settings_of(plan.settings, row)
        found = predict(planner.graph, row.splits, settings, SYSTEM)
        assert found.images_per_s == row.predicted_images_per_s
        memory = program_memory(planner.graph, row.splits, settings, SYSTEM.ipu)
        assert own["fill"] == max(each.fill for each in memory) == row.predicted_fill
        assert own["verdict"] == row.verdict
        assert [sum(sizes) for sizes in own["memory"]] == pytest.approx([each.fill for each in memory])
        assert own["ipus"] == row.num_ipus and own["micro"] == row.micro_batch_size
        for batch in own["batches"]:
            changed = replace(settings, gradient_accumulation_count=batch["count"])
            again = predict(planner.graph, row.splits, changed, SYSTEM)
            assert batch["images"] == again.images_per_s and batch["seconds"] == again.weight_update_s
            per_batch = row.micro_batch_size * row.num_replicas if settings.training else 1
            assert batch["size"] == batch["count"] * per_batch
        assert len(own["batches"]) > 3 and row.gradient_accumulation_count in [
            b["count"] for b in own["batches"]
        ]
        assert "{count}" in own["command"] and all(split in own["command"] for split in row.splits)
        assert one.best == row.best == own["best"]


# As much of a browser's page as the script uses.
FAKE = """
function Element(tag) {
  this.tag = tag; this.children = []; this.attributes = {}; this.listeners = {}; this.hidden = true; this.value = "";
  this.own = "";
}
Element.prototype = {
  get firstChild() { return this.children[0]; },
  get textContent() { return this.own + this.children.map(function (c) { return c.textContent; }).join(" "); },
  set textContent(text) { this.own = String(text); this.children = []; },
  appendChild: function (child) { this.children.push(child); },
  removeChild: function (child) { this.children.splice(this.children.indexOf(child), 1); },
  setAttribute: function (name, value) { this.attributes[name] = String(value); },
  addEventListener: function (name, run) { this.listeners[name] = run; }
};
var elements = {};
var page = {
  createElement: function (tag) { return new Element(tag); },
  createElementNS: function (space, tag) { return new Element(tag); },
  getElementById: function (id) { return elements[id]; }
};
INPUT.ids.forEach(function (id) { elements[id] = new Element(id); });
elements.choices.textContent = JSON.stringify(INPUT.data);
"""


def run_node(code, **given):
    text = f"const INPUT = {json.dumps(given)};\n" + SOURCE.read_text(encoding="utf-8") + "\n" + FAKE + code
    done = subprocess.run(
        ["node", "-"], input=text, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ids_of(page):
    return re.findall(r'\bid="([^"]+)"', page)


@node
@pytest.mark.parametrize("count", [8, 40])
@pytest.mark.parametrize(
    ("stages", "schedule", "more"),
    [
        (1, "Grouped", {}),
        (2, "Grouped", {"recomputation": True}),
        (4, "Grouped", {}),
        (4, "Interleaved", {"recomputation": True}),
        (3, "Sequential", {"recomputation": True}),
        (3, "Sequential", {"device_mapping": (0, 1, 2)}),
        (4, "Grouped", {"training": False}),
    ],
)
def test_the_script_s_timeline_is_the_planner_s(planner, trained, stages, schedule, more, count):
    settings = PlanSettings(4, count, 2, stages, schedule, **more)
    candidate = planner.best(settings, 1.15)
    plan = assemble(planner, candidate, planned=True, build={}, pareto=trained[0].pareto)
    layers = tuple((stage.first_layer, stage.last_layer) for stage in plan.stages)
    own = replace(
        trained[1][0],
        settings=settings,
        splits=candidate.splits,
        layers=layers,
        prediction=candidate.prediction,
        ipus=candidate.ipus,
        fixed_s=plan.predicted_fixed_s,
    )
    data = data_of(render(plan, [own]))
    code = "console.log(JSON.stringify(timelineOf(INPUT.data.choices[0], INPUT.count, 3)));"
    found = run_node(code, data=data, count=count, ids=["choices"])
    told = timeline(plan)
    assert found["omitted"] == told.omitted_ticks
    assert [found["from"], found["to"], found["end"]] == pytest.approx(
        [told.omitted_from_s, told.omitted_to_s, told.end_s]
    )
    assert [(s["kind"], s["stage"], s["microBatch"]) for s in found["spans"]] == [
        (s.kind, s.stage, s.micro_batch) for s in told.spans
    ]
    ends = [time for s in found["spans"] for time in (s["start"], s["end"])]
    assert ends == pytest.approx([time for s in told.spans for time in (s.start_s, s.end_s)], abs=1e-12)


SHOW = """
explore(page);
function shown() {
  var found = {moved: elements["explored-moved"].textContent, about: elements["explored-about"].textContent,
    cards: elements["explored-cards"].textContent, command: elements["explored-command"].textContent,
    stages: elements["explored-stages"].children.length, hidden: elements.explore.hidden,
    memory: elements["explored-memory"].textContent, timeline: elements["explored-timeline"].textContent};
  ["ipus", "precision", "micro", "batch"].forEach(function (name) {
    found[name] = elements["choose-" + name].value;
    found[name + "s"] = elements["choose-" + name].children.map(function (c) { return c.value; });
  });
  return found;
}
var all = [shown()];
INPUT.changes.forEach(function (change) {
  elements["choose-" + change[0]].value = change[1];
  elements["choose-" + change[0]].listeners.change();
  all.push(shown());
});
console.log(JSON.stringify(all));
"""


def naive_pick(choices, wanted, changed):
    """All pairs of a configuration and a batch, sorted."""
    found = []
    for choice_ in choices:
        for batch in choice_["batches"]:
            own = {**{name: str(choice_[name]) for name in ("ipus", "precision", "micro")}}
            own["batch"] = str(batch["size"])
            if own[changed] != wanted[changed]:
                continue
            alike = sum(own[name] == wanted[name] for name in ("ipus", "precision", "micro"))
            far = abs(math.log(batch["size"] / int(wanted["batch"])))
            found.append(((alike, -far, batch["images"]), own))
    return max(found, key=lambda each: each[0])[1]


@node
def test_what_is_chosen_is_shown(explored):
    plan, choices = explored
    page = render(plan, choices)
    data = data_of(page)
    changes = [["precision", "32.32"], ["precision", "16.16"]]
    for name in ("ipus", "micro"):
        changes += [[name, str(value)] for value in sorted({each[name] for each in data["choices"]})]
    shown = run_node(SHOW, data=data, changes=changes, ids=ids_of(page))
    first = shown[0]
    assert not first["hidden"] and first["moved"] == ""
    assert (first["ipus"], first["micro"]) == (str(plan.occupied_ipus), str(plan.settings.micro_batch_size))
    assert f"{round(plan.predicted_images_per_s):,} images/s" in first["cards"]
    assert first["command"] == plan_html.command_line(plan)
    assert first["stages"] == plan.num_stages
    names = ("ipus", "precision", "micro", "batch")
    for before, change, after in zip(shown, changes, shown[1:]):
        wanted = {name: before[name] for name in names}
        wanted[change[0]] = change[1]
        expected = naive_pick(data["choices"], wanted, change[0])
        assert {name: after[name] for name in names} == expected
        assert all(expected[name] in after[name + "s"] for name in names)
        moved = [name for name in names if name != change[0] and expected[name] != wanted[name]]
        assert bool(after["moved"]) == bool(moved)
        assert "stage 0" in after["timeline"] and "IPU 0" in after["memory"]


def test_the_command_writes_the_page_of_a_search(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = ["plan-splits", MODEL, "--ipus", "2", "--micro-batch-size", "8"]
    assert cli.run([*args, "--html", "a.html", "--json"]) == 0
    plan = PipelinePlan.from_dict(json.loads(capsys.readouterr().out))
    data = data_of(Path("a.html").read_text(encoding="utf-8"))["choices"]
    assert {own["precision"] for own in data} == {"16.16", "16.32", "32.32"}
    assert sum(own["best"] for own in data) == 1 and len(data) > len(plan.pareto)
    assert cli.run([*args, "--html", "b.html", "--precision", "16.32"]) == 0
    capsys.readouterr()
    data = data_of(Path("b.html").read_text(encoding="utf-8"))["choices"]
    assert {own["precision"] for own in data} == {"16.32"}
    # One program is no choice.
    assert cli.run(["plan-splits", MODEL, "--stages", "2", "--html", "c.html"]) == 0
    assert Scripts(Path("c.html").read_text(encoding="utf-8")).scripts == []
