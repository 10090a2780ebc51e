"""Three rows of the covering table, and checks of the table; ``python tests/poplar_covering.py`` runs all rows."""

import json

import poplar_covering
import pytest
from poplar_covering import ROWS, SDKS, Comparison, call, cover, main, on_the_host
from poplar_double.facts import FACTS

from ipucnn.models.registry import get_model


@pytest.mark.slow_cases("cifar_resnet8, 2 stages Interleaved, 16.16", "lenet")
@pytest.mark.parametrize("number", [0, 1, 5], ids=lambda number: ROWS[number].name)
def test_row_equals_the_host(short_benchmarks, tmp_path, number):
    row = ROWS[number]
    comparison = cover(row, SDKS[number % 2], on_the_host(row, tmp_path / "host"), tmp_path / "ipu")
    assert comparison.is_right(), comparison


def test_rows_cover_the_required_features():
    assert len(ROWS) == len({row.name for row in ROWS}) == 12
    pipelines = {
        (row.stages, row.schedule) for row in ROWS if row.model == "cifar_resnet8" and row.stages > 1
    }
    assert pipelines == {(n, s) for n in (2, 4) for s in ("Grouped", "Interleaved", "Sequential")}
    assert {row.model for row in ROWS} == {"lenet", "cifar_resnet8", "efficientnet-b0", "unet"}
    assert {row.precision for row in ROWS} == {"32.32", "16.16", "16.32"}
    assert any(row.ahead for row in ROWS) and any(row.generated for row in ROWS)
    words = [word for row in ROWS for word in row.flags()]
    assert "--dbn-replica-group-size" in words and "--eight-bit-transfer" in words
    for row in ROWS:
        assert get_model(row.model).min_size <= row.size


def test_no_row_uses_features_missing_in_sdk_3_1_to_3_3():
    """They only lack TF_POPLAR_FLAGS --use_on_demand, which users set and the session does not."""
    lacking = {sdk: FACTS["absent_in"].get(sdk, {}) for sdk in ("3.1", "3.2", "3.3", "3.4")}
    assert lacking == {"3.1": {"flags": ["use_on_demand"]}, "3.2": {}, "3.3": {}, "3.4": {}}


def comparison_of(**changes):
    values = dict(weights=1e-7, in_steps=False, loss=1e-6, inferred=2, images_per_s=1.0, programs=2)
    return Comparison(**{**values, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": 2e-6},
        {"loss": 1e-3},
        {"inferred": 1},
        {"images_per_s": 0.0},
        {"weights": 5.0, "in_steps": True},
    ],
)
def test_differing_row_is_reported(monkeypatch, capsys, changes):
    assert comparison_of().is_right() and not comparison_of(**changes).is_right()
    monkeypatch.setattr(poplar_covering, "on_the_host", lambda row, folder: None)
    monkeypatch.setattr(poplar_covering, "cover", lambda *arguments: comparison_of(**changes))
    assert main(["--only", "unet", "--sdk", "3.4"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("| no |")
    monkeypatch.setattr(poplar_covering, "cover", lambda *arguments: comparison_of())
    assert main(["--only", "unet"]) == 0


def test_failed_command_is_reported():
    with pytest.raises(RuntimeError, match="exit code 2"):
        call("train", "nosuchnetwork")
    assert json.loads(call("models", "lenet", "--json"))
