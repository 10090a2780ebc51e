"""`ipucnn profile`, and its file in `plan-splits`: on a fake libpva whose profiles the tests write."""

import json
import sys
from pathlib import Path

import fake_pva
import jsonschema
import pytest
from altered import altered, places

from ipucnn import cli
from ipucnn.benchmarking.poplar_profile import CATEGORIES, GROUPS, read_measured
from ipucnn.errors import UserError
from ipucnn.hardware import get_system
from ipucnn.planning.cost.memory import CATEGORIES as PREDICTED

ROOT = Path(__file__).parents[1]
TILES = 1472
MK2 = get_system("pod16").ipu


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setitem(sys.modules, "pva", fake_pva)


def run(capsys, *args):
    code = cli.run([str(a) for a in args])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def tile(number, ipu):
    """Sizes of a tile, by name of the fake's; all different."""
    return {
        "vertexCode": 40_000 + number,
        "vertexInstanceState": 5_000 + ipu,
        "internalExchangeCode": 20_000,
        "globalExchangeCode": 300 * ipu,
        "hostExchangeCode": 50,
        "controlCode": 9_000,
        "constant": 12,
        "data": 100_000 + 10 * number,
        "temporary": 200_000 - number,
        "gaps": 1_000 if number == 7 else 3,
    }


def steps(executions=2):
    """Runs of the engine on two IPUs: loading, then executions; each IPU counts cycles from its own start."""
    load = [["load", "StreamCopyBegin", [[0, 10], [500, 510]]]]
    execution = [
        ["conv", "OnTileExecute", [[1000, 3000], [1500, 1600]]],
        ["copy", "DoExchange", [[3000, 3100], [1600, 1900]]],
        ["conv", "OnTileExecute", [[3100, 5000], [1900, 4200]]],
    ]
    return [load, *[execution] * executions]


def write_profile(folder, num_ipus=2, runs=None, **target):
    folder.mkdir(parents=True, exist_ok=True)
    told = {
        "target": {
            "numIPUs": num_ipus,
            "numReplicas": 1,
            "numTiles": TILES * num_ipus,
            "bytesPerTile": MK2.sram_per_tile_bytes,
            "clockFrequency": 1.33e9,
            **target,
        },
        "tiles": [[tile(number, ipu) for number in range(TILES)] for ipu in range(num_ipus)],
        "runs": steps() if runs is None else runs,
    }
    (folder / "profile.pop").write_text(json.dumps(told))
    return folder / "profile.pop"


def valid(document):
    schema = json.loads((ROOT / "docs/schemas/measured-profile.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    return document


def test_a_profile_becomes_a_document_of_our_own(capsys, tmp_path):
    write_profile(tmp_path / "profile" / "tf_report_1")
    code, out, err = run(capsys, "profile", "profile", "--save", "m.json", "--json")
    assert code == 0, err
    assert "written: m.json" in err
    found = valid(json.loads(out))
    assert found == json.loads((tmp_path / "m.json").read_text())
    assert found["poplar_version"].startswith("3.3.0")
    assert found["target"]["tiles_per_ipu"] == TILES
    for number, ipu in enumerate(found["ipus"]):
        columns = ipu["tile_bytes"]
        for at in (0, 7, TILES - 1):
            own = tile(at, number)
            expected = {
                "vertex_code": own["vertexCode"],
                "vertex_state": own["vertexInstanceState"],
                "exchange_code": sum(own[f"{where}ExchangeCode"] for where in ("internal", "global", "host")),
                "control_code": own["controlCode"],
                "always_live": own["data"],
                "live_at_times": own["temporary"],
            }
            assert {name: columns[name][at] for name in CATEGORIES} == expected
            assert columns["total"][at] == sum(expected.values())
            assert columns["total_with_gaps"][at] == sum(expected.values()) + own["gaps"]
        assert ipu["memory_bytes"] == {name: sum(column) for name, column in columns.items()}
        full = columns["total_with_gaps"]
        assert full[ipu["fullest_tile"]] == max(full)
    assert found["runs"] == [
        {"num_steps": 1, "cycles": 10},
        # From 1000 to 5000 on one IPU, from 1500 to 4200 on the other.
        {"num_steps": 3, "cycles": 4000},
        {"num_steps": 3, "cycles": 4000},
    ]
    assert found["steps"] == [
        {"program": "load", "kind": "StreamCopyBegin", "count": 1, "cycles": [10, 10]},
        {"program": "conv", "kind": "OnTileExecute", "count": 4, "cycles": [7800, 4800]},
        {"program": "copy", "kind": "DoExchange", "count": 2, "cycles": [200, 600]},
    ]


@pytest.mark.parametrize("width", [80, 160])
def test_what_a_profile_shows(capsys, tmp_path, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    path = write_profile(tmp_path / "p")
    code, out, err = run(capsys, "profile", path)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= width
    assert "2 IPUs of 1,472 tiles, 1 replica, Poplar 3.3.0" in " ".join(out.split())
    assert "an execution took 4,000 cycles, 3.008 us" in out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    assert rows["conv"] == ["OnTileExecute", "4", "7,800", "93%"]
    assert "does not fit" not in out


def test_a_program_that_does_not_fit_or_was_not_executed(capsys, tmp_path):
    write_profile(tmp_path / "p", runs=[], bytesPerTile=300_000)
    code, out, _ = run(capsys, "profile", "p")
    assert code == 0
    assert "does not fit: IPU 0, 1" in out
    assert "nothing was executed" in out
    measured = json.loads(run(capsys, "profile", "p", "--json")[1])
    assert measured["ipus"][0]["memory_bytes"]["overflow"] > 0
    assert measured["runs"] == measured["steps"] == []


def test_what_is_refused(capsys, tmp_path, monkeypatch):
    write_profile(tmp_path / "two" / "a")
    write_profile(tmp_path / "two" / "b")
    code, _, err = run(capsys, "profile", "two")
    assert code == 2 and "2 profiles" in err and "hint: name one" in err
    (tmp_path / "empty").mkdir()
    for name in ("absent", "empty"):
        code, _, err = run(capsys, "profile", name)
        assert code == 3 and "autoReport.all" in err
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "profile.pop").write_text("SQLite format 3")
    code, _, err = run(capsys, "profile", "broken", "--save", "x.json")
    assert code == 3 and "file is not a database" in err
    assert not (tmp_path / "x.json").exists()
    code, _, err = run(capsys, "profile", "two/a", "--save", "two/a/profile.pop")
    assert code == 2 and "would be replaced" in err
    assert run(capsys, "profile", "two/a", "--run", "absent")[0] == 3
    # A libpva of another version, and none at all.
    monkeypatch.setattr(fake_pva, "openReport", lambda path: object())
    code, _, err = run(capsys, "profile", "two/a")
    assert code == 3 and "another interface" in err and "3.0 to 3.4" in err
    monkeypatch.setitem(sys.modules, "pva", None)
    code, _, err = run(capsys, "profile", "two/a")
    assert code == 6 and "libpva" in err and "enable" in err


def test_the_groups_hold_every_category_once():
    assert sorted(name for _, predicted, _ in GROUPS for name in predicted) == sorted(PREDICTED)
    assert sorted(name for *_, measured in GROUPS for name in measured) == sorted(CATEGORIES)


PLAN = ("plan-splits", "cifar_resnet8", "--stages", "2", "--micro-batch-size", "16", "--system", "pod16")


def test_a_plan_beside_a_profile(capsys, tmp_path):
    write_profile(tmp_path / "p")
    assert run(capsys, "profile", "p", "--save", "m.json")[0] == 0
    code, out, err = run(capsys, *PLAN, "--measured", "m.json", "--json")
    assert code == 0, err
    plan, measured = json.loads(out), json.loads((tmp_path / "m.json").read_text())
    rows = plan["measured_memory"]
    for own, found in zip(plan["ipus"], measured["ipus"]):
        of_ipu = {row["group"]: row for row in rows if row["ipu"] == own["ipu"]}
        assert set(of_ipu) == {"code", "always live", "live at times", "total"}
        assert of_ipu["code"]["stages"] == own["stages"]
        assert of_ipu["always live"]["predicted_bytes"] == pytest.approx(
            sum(
                own["predicted_memory_bytes"][n]
                for n in ("weights", "accumulators", "optimizer_state", "stash")
            )
        )
        assert of_ipu["live at times"]["measured_bytes"] == found["memory_bytes"]["live_at_times"]
        assert of_ipu["total"]["measured_bytes"] == found["memory_bytes"]["total"]
        full = max(found["tile_bytes"]["total_with_gaps"])
        assert of_ipu["total"]["measured_fullest_bytes"] == full * TILES
    code, out, _ = run(capsys, *PLAN, "--measured", "m.json")
    assert code == 0
    assert "memory in MiB, predicted and measured" in out
    assert out.count("live at times") == 2
    assert max(map(len, out.splitlines()[-16:])) <= 80


def test_what_is_refused_beside_a_plan(capsys, tmp_path):
    write_profile(tmp_path / "one", num_ipus=1)
    run(capsys, "profile", "one", "--save", "one.json")
    code, _, err = run(capsys, *PLAN, "--measured", "one.json")
    assert code == 2 and "1 IPU for each replica, and this plan has 2" in err
    write_profile(tmp_path / "small", bytesPerTile=256 * 1024)
    run(capsys, "profile", "small", "--save", "small.json")
    code, _, err = run(capsys, *PLAN, "--measured", "small.json")
    assert code == 2 and "--system NAME" in err
    code, _, err = run(capsys, *PLAN, "--measured", "small.json", "--save", "small.json")
    assert code == 2 and "--measured" in err
    (tmp_path / "plan.yml").write_text("{}")
    assert run(capsys, *PLAN, "--measured", "plan.yml")[0] == 3
    assert run(capsys, *PLAN, "--measured", "absent.json")[0] == 3
    code, _, err = run(capsys, "plan-splits", "--calibrate", "one.json", "--measured", "one.json")
    assert code == 2 and "--measured" in err


def test_a_damaged_document_is_refused_in_words(tmp_path, capsys):
    import random

    write_profile(tmp_path / "p", num_ipus=1)
    run(capsys, "profile", "p", "--save", "m.json")
    whole = json.loads((tmp_path / "m.json").read_text())
    for column in whole["ipus"][0]["tile_bytes"].values():
        del column[2:]
    path = tmp_path / "m.json"
    path.write_text(json.dumps(whole))
    read_measured(path, "--measured")
    draw = random.Random(3)
    for at in places(whole):
        path.write_text(
            json.dumps(altered(whole, at, draw, [None, "x", -1, 1.5, [], {}, 10**300, float("nan")]))
        )
        try:
            read_measured(path, "--measured")
        except UserError as error:
            assert error.hint and "\n" not in error.message
