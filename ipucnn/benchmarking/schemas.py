"""The JSON Schemas in docs/schemas, made of the records that declare the files; ``make generated`` writes them."""

import json
from typing import Dict, Type

import msgspec

from ipucnn.benchmarking.records import BenchmarkReport, Record, SuiteResult

SCHEMAS: Dict[str, Type[Record]] = {
    "docs/schemas/benchmark-report.json": BenchmarkReport,
    "docs/schemas/benchmark-suite.json": SuiteResult,
}
"""Where the JSON Schema of each file is kept, below the root of the source tree."""


def schema_text(record: Type[Record]) -> str:
    """The JSON Schema (draft 2020-12) of a file: all keys are there, but for those of :class:`Phases`."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(record)}
    for name, described in schema["$defs"].items():
        always = described["properties"] if name != "Phases" else ["data_s"]
        described["required"] = [key for key in always if key != "reference_repetitions"]
        # What the parser puts in for a missing key is no concern of who reads the file.
        for value in described["properties"].values():
            value.pop("default", None)
            # msgspec's versions order these differently.
            value.get("anyOf", []).sort(key=lambda each: (each == {"type": "null"}, sorted(each)))
    return json.dumps(schema, indent=1) + "\n"


def main() -> None:
    """Writes the schemas into the source tree; what ``make generated`` calls."""
    from pathlib import Path

    for name, record in SCHEMAS.items():
        (Path(__file__).resolve().parents[2] / name).write_text(schema_text(record), encoding="utf-8")


if __name__ == "__main__":
    main()
