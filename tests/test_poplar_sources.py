"""Each rule of the test double names its source in the SDK, and each refusal in the sources has a rule or a reason."""

import json
import re
from pathlib import Path

import pytest
from poplar_double import sources
from poplar_double.refusals import read_refusals
from poplar_double.sources import declared, parse, rule, unsourced

REFUSALS = read_refusals()
# Read for the pipeline, but not listed among the files on instructions
SEVERAL_TOPICS = "tools/pipeline_util.cc"
PAGE = (Path(__file__).parents[1] / "docs" / "contributing" / "poplar-double.md").read_text(encoding="utf-8")


def test_every_rule_of_the_double_names_its_source():
    functions, undeclared = declared()
    assert not undeclared, undeclared
    for item in functions.values():
        assert item.sources or item.is_unsourced, item.name
        for source in item.sources:
            assert all(vars(source).values()), item
            if source.repository != "tensorflow/tensorflow":
                assert source.repository.startswith("graphcore/"), item
                assert source.branch.endswith(("sdk-release-3.4", "sdk-release-3.0")), item
    assert sum(len(item.sources) for item in functions.values()) > 90


SOURCED = "@rule('ipu config.py A')\n"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("def refuse():\n    raise ValueError('no')", 1),
        ("class A:\n    def refuse(self):\n        if self:\n            raise ValueError('no')", 1),
        (SOURCED + "def one():\n    raise ValueError\ndef two():\n    raise ValueError", 1),
        ("def refuse():\n    raise NotImplementedError('accumulation')", 1),
        (SOURCED + "def refuse():\n    def inner():\n        raise ValueError('no')\n    inner()", 0),
        ("@unsourced('closed source')\ndef refuse():\n    raise ValueError('no')", 0),
        ("def refuse(n):\n    raise NotImplementedError(f'the double lacks {n}')", 0),
        ("def again():\n    try:\n        pass\n    except ValueError:\n        raise", 0),
    ],
)
def test_rules_without_a_source_are_found(monkeypatch, tmp_path, text, count):
    (tmp_path / "new.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "sources.py"))
    assert len(declared()[1]) == count


@pytest.mark.parametrize("place", ["", "ipu config.py", "popart config.py A", "ipu config A", "config.py A"])
def test_source_needs_repository_file_and_symbol(place):
    with pytest.raises(ValueError, match=r"names|is no"):
        parse(place)
    with pytest.raises(ValueError, match=r"names|is no"):
        rule(place)
    with pytest.raises(ValueError, match="at least one"):
        rule()
    with pytest.raises(ValueError, match="why"):
        unsourced(" ")


def test_every_refusal_in_the_sources_has_a_rule_or_a_reason():
    functions, _ = declared()
    for one in REFUSALS:
        assert one.error in ("FailedPrecondition", "InvalidArgument", "Unimplemented"), one
        assert bool(one.rule) != bool(one.why_not), one
        if one.rule:
            assert one.rule in functions, f"{one.rule} is no rule of the double"
    assert len({(one.file, one.symbol, one.when) for one in REFUSALS}) == len(REFUSALS) > 40
    assert sum(bool(one.rule) for one in REFUSALS) >= 20


def test_looked_up_sources_are_recorded():
    """Lists each place that a rule or a refusal names, and no other; docs/contributing/poplar-double.md counts them."""
    folder = "tensorflow/compiler/plugin/poplar/"
    named = {(s.repository, s.file, s.symbol) for item in declared()[0].values() for s in item.sources}
    named |= {
        (
            "graphcore/tensorflow",
            folder + ("" if one.file.startswith("kernels/") else "driver/") + one.file,
            one.symbol,
        )
        for one in REFUSALS
    }
    files = json.loads((Path(sources.__file__).parent / "looked_up.json").read_text(encoding="utf-8"))
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
    record = json.loads((Path(sources.__file__).parent / "files_read.json").read_text(encoding="utf-8"))
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
