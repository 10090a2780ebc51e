"""The option reference in the documentation is the one the declarations give."""

from pathlib import Path

from ipucnn.config import reference

DOCUMENT = Path(__file__).parents[1] / "docs" / "configuration.md"


def test_the_option_reference_is_current():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert reference.insert(text) == text, "run: python -m ipucnn.config.reference --write"
