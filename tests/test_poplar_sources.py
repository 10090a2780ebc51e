"""Each rule of the test double names its source in the SDK, and each refusal in the sources has a rule or a reason."""

import csv
import json
import re
from pathlib import Path

import pytest
from poplar_double import sources
from poplar_double.facts import FACTS
from poplar_double.refusals import Refusal
from poplar_double.sources import Provenance, parse, read_functions, read_table

DOUBLE = Path(sources.__file__).parent
PROVENANCE = read_table("provenance.csv", Provenance)
REFUSALS = read_table("refusals.csv", Refusal)
SOURCED = {row.function for row in PROVENANCE}
# Read for the pipeline, but not listed among the files on instructions
SEVERAL_TOPICS = "tools/pipeline_util.cc"
PAGE = (Path(__file__).parents[1] / "docs" / "contributing" / "poplar-double.md").read_text(encoding="utf-8")


def unsourced(folder, sourced):
    """Returns the functions that raise, and are in no function or class of the table."""
    _, raising = read_functions(folder)
    return [name for name in raising if not any(f"{name}.".startswith(f"{one}.") for one in sourced)]


def test_every_rule_of_the_double_names_its_source():
    functions, _ = read_functions(DOUBLE)
    assert functions >= SOURCED and len(set(PROVENANCE)) == len(PROVENANCE)
    assert unsourced(DOUBLE, SOURCED) == []
    for row in PROVENANCE:
        assert bool(row.place) != bool(row.why_none.strip()), row
        if row.place:
            source = parse(row.place)
            if source.repository != "tensorflow/tensorflow":
                assert source.repository.startswith("graphcore/"), row
                assert source.branch.endswith(("sdk-release-3.4", "sdk-release-3.0")), row
    assert sum(bool(row.place) for row in PROVENANCE) > 90


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def refuse():\n    raise ValueError('no')", ["new.refuse"]),
        ("class A:\n    def refuse(self):\n        if self:\n            raise ValueError", ["new.A.refuse"]),
        ("def one():\n    raise ValueError\ndef one_more():\n    raise ValueError", ["new.one_more"]),
        ("def refuse():\n    raise NotImplementedError('accumulation')", ["new.refuse"]),
        ("def one():\n    def inner():\n        raise ValueError('no')\n    inner()", []),
        ("def refuse(n):\n    raise NotImplementedError(f'the double lacks {n}')", []),
        ("def again():\n    try:\n        pass\n    except ValueError:\n        raise", []),
    ],
)
def test_rules_without_a_source_are_found(tmp_path, text, names):
    (tmp_path / "new.py").write_text(text, encoding="utf-8")
    assert unsourced(tmp_path, {"new.one"}) == names


@pytest.mark.parametrize("place", ["", "ipu config.py", "popart config.py A", "ipu config A", "config.py A"])
def test_source_needs_repository_file_and_symbol(place):
    with pytest.raises(ValueError, match=r"names|is no"):
        parse(place)


def test_every_refusal_in_the_sources_has_a_rule_or_a_reason():
    for one in REFUSALS:
        assert one.error in ("FailedPrecondition", "InvalidArgument", "Unimplemented"), one
        assert bool(one.rule) != bool(one.why_not), one
        if one.rule:
            assert one.rule in SOURCED, f"{one.rule} is no rule of the double"
    assert len({(one.file, one.symbol, one.when) for one in REFUSALS}) == len(REFUSALS) > 40
    assert sum(bool(one.rule) for one in REFUSALS) >= 20


def test_looked_up_sources_are_recorded():
    """Lists each place that a rule or a refusal names, and no other; docs/contributing/poplar-double.md counts them."""
    folder = "tensorflow/compiler/plugin/poplar/"
    places = [parse(row.place) for row in PROVENANCE if row.place]
    named = {(source.repository, source.file, source.symbol) for source in places}
    named |= {
        (
            "graphcore/tensorflow",
            folder + ("" if one.file.startswith("kernels/") else "driver/") + one.file,
            one.symbol,
        )
        for one in REFUSALS
    }
    files = json.loads((DOUBLE / "looked_up.json").read_text(encoding="utf-8"))
    recorded = {(*name.split(), symbol) for name, file in files.items() for symbol in file["symbols"]}
    assert recorded == named
    notes = [(file["commit"], note) for file in files.values() for note in file["symbols"].values()]
    for commit, note in notes:
        assert note or re.fullmatch("[0-9a-f]{40}", commit), "where it was read, or what is missing"
    assert not [note for _, note in notes if "not found" in note]
    read = sum(not note for _, note in notes)
    assert f"{len(notes)} places in {len(files)} files" in PAGE and f"{read} of these places" in PAGE


def test_driver_files_that_were_read_are_recorded():
    """Every file with a refusal was read; the others give a reason.  docs/contributing/poplar-double.md counts them."""
    record = json.loads((DOUBLE / "files_read.json").read_text(encoding="utf-8"))
    read, listed = record["read"], record["listed"]
    assert all(name.split("/")[0] in listed and name.endswith(".cc") for name in read)
    assert all(re.fullmatch("[0-9a-f]{40}", one["commit"] or "0" * 40) for one in read.values())
    instructions = ("passes/", "ops/", "tools/")
    assert {one.file for one in REFUSALS if one.file.startswith(instructions)} - set(read) <= {SEVERAL_TOPICS}
    assert not set(read) & set(record["not_read"]) and all(record["not_read"].values())
    counts = {folder: sum(name.startswith(folder + "/") for name in read) for folder in listed}
    assert f"{counts['passes']} of the driver's {listed['passes']} passes" in PAGE
    text = " ".join(PAGE.split())
    assert f"{counts['ops']} of its {listed['ops']} files in `ops`" in text
    assert f"{counts['tools']} of {listed['tools']} in `tools`" in text


def quoted_form(parameters):
    """Returns recorded parameters as Python writes them."""
    words, is_keyword_only = [], False
    for one in parameters:
        kind = one.get("kind", "")
        if kind == "keyword" and not is_keyword_only:
            words.append("*")
        is_keyword_only = is_keyword_only or kind != ""
        default = f"={one['default']}" if "default" in one else ""
        words.append(f"{kind if kind != 'keyword' else ''}{one['name']}{default}")
    return ", ".join(words)


def recorded_facts():
    """Returns what the double knows of the public API, in the words of ``quoted.csv``."""
    for name, leaf in FACTS["leaves"].items():
        yield f"setting {name}", f"{leaf['type'].replace('typing.', '')} = {leaf['default']!r}"
    for name, members in FACTS["enums"].items():
        yield f"enum {name}", ", ".join(f"{member} = {number}" for member, number in members.items())
    for name, one in FACTS["callables"].items():
        if not name.startswith("popdist.") and not name.endswith(" 3.0"):  # closed source; another release
            yield f"call {name}", quoted_form(one["params"])
    for name, parameters in FACTS["model_methods"].items():
        yield f"method {name}", quoted_form(parameters)
    for name in ("fit", "evaluate", "predict"):
        yield f"delegate {name}", quoted_form(FACTS["delegates"][name])
    for name, keywords in FACTS["forbidden_keywords"].items():
        yield f"refused {name}", ", ".join(keywords)
    for name, kind in FACTS["flags"].items():
        yield f"flag {name}", kind


def test_facts_are_those_quoted_from_the_public_sources():
    """``quoted.csv`` quotes the public sources: a wrong fact of the double differs from it."""
    with open(DOUBLE / "quoted.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert dict(recorded_facts()) == {row["fact"]: row["value"] for row in rows}
    for row in rows:
        repository, _, file_and_line = row["place"].partition(" ")
        assert repository in ("tensorflow", "keras", "ipu_tensorflow_addons"), row
        assert re.fullmatch(r"[\w/]+\.(py|cc)(:\d+)?", file_and_line), row
