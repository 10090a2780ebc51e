"""YAML and JSON of users: plain values survive, PyYAML agrees, and hostile texts end soon with an error and a hint.

Texts that a page can show are in ``tests/refusals/yaml.txt``.
"""

import dataclasses
import json
import os
import re
import time
from pathlib import Path
from typing import List

import pytest
import yaml
from few_examples import tries
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import Refusal, check_refused

from ipucnn import documents
from ipucnn.config import presets
from ipucnn.documents import MAX_DEPTH, BadDocument
from ipucnn.errors import ConfigurationError, DataError, UserError
from ipucnn.filesystem import read_text
from ipucnn.text import shown_value

# Nine levels of nine aliases each: 9 ** 9 values.
BOMB = "a0: &a0 [v]\n" + "".join(f"a{n}: &a{n} [{', '.join(9 * [f'*a{n - 1}'])}]\n" for n in range(1, 10))
# Texts that no page can show, and a part of the error.
REFUSED = {
    "brackets": ("[" * 100_000, "line 1: more than 50"),
    "dashes": ("- " * 100_000, "inside of each other"),
    "closed brackets": ("a: " + "[" * 60 + "]" * 60, "line 1: more than 50"),
    "indentation": ("".join(" " * n + "a:\n" for n in range(60)), "line 51: more than 50"),
    "recursion": ("a: &a [*a]", "inside of each other"),
    "recursion of a key": ("a: &a {b: &b {c: *a}}", "inside of each other"),
    "aliases that multiply": (BOMB, "with its aliases written out"),
    "merges that multiply": (
        "a0: &a0 {k: v}\n" + "".join(
            f"a{n}: &a{n} {{<<: [{', '.join(9 * [f'*a{n - 1}'])}]}}\n" for n in range(1, 10)
        ), "with its aliases written out"),
    "a long text that aliases multiply": (f"a: &a {'x' * 90_000}\nb: [{'*a, ' * 90_000}]", "written out"),
    "digits": ("a: " + "9" * 5000, "line 1: a number of 5,000 characters"),
    "binary digits": ("a: 0b" + "1" * 500_000, "a number of"),
    "decimals": ("a: 0." + "3" * 500_000, "a number of"),
    "NUL": ("a: b\0c", "not readable as YAML"),
    "an escape character": ("a: 1\nb: \x1b[31m", "not readable as YAML"),
    "a surrogate": ("a: \udcff", "not readable as YAML"),
    "an escaped surrogate": ('a: "\\ud800"', "not readable as YAML"),
    "UTF-16 read as Latin-1": ("\xff\xfea\0", "not readable as YAML"),
    "a long text": ("a: " + "x" * 1_000_000, "longer than 1,000,000"),
    "a long anchor": ("a: *" + "b" * 900_000, "undefined alias"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_yaml_is_refused_with_place_and_hint(name):
    text, part = REFUSED[name]
    before = time.process_time()
    with pytest.raises(ConfigurationError) as caught, documents.naming("mine.yml"):
        documents.load(text)
    # Processor time: far below the minutes, or more, of a naive reader, and far above the usual time.
    assert time.process_time() - before < 10
    assert caught.value.message.startswith("mine.yml") and part in caught.value.message
    assert len(caught.value.message) < 600 and caught.value.hint


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("# nothing\n", None),
        ("a: 2001-01-01\n", {"a": "2001-01-01"}),
        ("a: 2001-12-14t21:59:43.10-05:00\n", {"a": "2001-12-14t21:59:43.10-05:00"}),
        ("a: 0x_\n", {"a": "0x_"}),
        ("1: a\ntrue: b\n", {"1": "a", "true": "b"}),
        ("'~': 1\n", {"~": 1}),
        ("\ufeffa: 1\n", {"a": 1}),
        ("a: &x {b: 1}\nc: {<<: *x, d: 2}\n", {"a": {"b": 1}, "c": {"b": 1, "d": 2}}),
        ("%YAML 1.1\n---\na: 1\n", {"a": 1}),
    ],
)  # fmt: skip
def test_plain_scalars_have_their_yaml_1_1_values(text, value):
    assert documents.load(text) == value


_WORD_FORMS = [
    form
    for word in ("yes", "no", "true", "false", "on", "off", "null", "y", "n", "nan", "inf", ".nan", ".inf", "-.inf")
    for form in (word, word.capitalize(), word.upper(), word + "x")
]  # fmt: skip
_NUMBER_FORMS = """~ 1:30 1:30.5 -1:30 190:20:30.15 1:60 +.5 .5 5. -5 +12 0 -0 00 017 08 0o17 0x1F -0x1f 0b101 0b2 0x
    1_000 1__0. _1 1e5 1.0e5 1.0e+5 1.5E-3 .5e+1 +1:30 0:0 -0.0 1.2.3 1- --1 0b_1 1:30:59 = 1.0e+400 1_000"""


_OTHER_BASES = ["1:30", "1:30.5", "-1:30", "190:20:30.15", "00", "017", "0x1F", "-0x1f", "0b101", "0b_1"]
_OTHER_BASES += ["+1:30", "0:0", "1:30:59"]
"""Numbers that are text here, because the command line takes them so."""


def test_plain_scalars_equal_those_of_pyyaml():
    text = "".join(f"- {form}\n" for form in _WORD_FORMS + _NUMBER_FORMS.split())
    for form, ours, theirs in zip(text.splitlines(), documents.load(text), yaml.load(text, Loader=_Oracle)):
        assert ours == form[2:] if form[2:] in _OTHER_BASES else _same(ours, theirs), (form, ours, theirs)


@pytest.mark.parametrize("number", ["{}", "-{}", "0.{}", "{}."])
def test_numbers_have_at_most_308_characters(number):
    digits = "7" * (308 - len(number.format("")))
    value = documents.load(f"- {number.format(digits)}\n")[0]
    assert value == (float if "." in number else int)(number.format(digits))
    with pytest.raises(BadDocument, match="a number of 309 characters") as caught:
        documents.load(f"- 1\n- {number.format(digits + '7')}\n")
    assert caught.value.line == 2 and "at most 308" in caught.value.hint
    if "." not in number:
        assert documents.load_record(f"[{number.format(digits)}]") == [value]
        with pytest.raises(BadDocument, match="309"):
            documents.load_record(f"[{number.format(digits + '7')}]")


@pytest.mark.parametrize(
    "text, line, column",
    [
        ("a: ]", 1, 4),
        ("a: 1\nb: [1, }\n", 2, 8),
        ("a: 1\n b: 2\n", 2, 3),
        ("a: 1\rb: ]", 2, 4),
    ],
)
def test_lines_and_columns_of_errors_count_from_one(text, line, column):
    with pytest.raises(BadDocument) as caught:
        documents.load(text)
    assert (caught.value.line, caught.value.column) == (line, column)


@pytest.mark.parametrize("name", ["utf-8", "utf-8-sig", "utf-16"])
def test_marks_of_encodings_are_read(here, name):
    Path("a.yml").write_bytes("löwe: {learning-rate: 0.5}\n".encode(name))
    assert documents.load(read_text(Path("a.yml"), 100)) == {"löwe": {"learning-rate": 0.5}}


# Contents of files that are not YAML files, and a part of the error.
HOSTILE = {
    "utf16.yml": ("a: é\n".encode("utf-16-le"), "UTF-8"),  # without the mark at its beginning
    "latin.yml": (b"a: 1\nb: \xe9\n", "line 2"),
    "large.yml": (b"a: " + b"x" * 10_000_000, "larger than"),
    "brackets.yml": (b"[" * 100_000, "inside of each other"),
    "nul.yml": (b"a: \0\n", "not readable"),
    "aliases.yml": (BOMB.encode(), "written out"),
}
# What else may have such a name.
OTHERS = {"fifo.yml": "FIFO", "folder.yml": "folder.yml", "/dev/zero": "a device", "absent.yml": "absent.yml"}
NOT_JSON = dict.fromkeys(("nul.yml", "large.yml", "aliases.yml"), "is not JSON")


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("train", "lenet", "--print-config", "--config-path"), {}),
        (("train", "lenet", "--print-config", "--plan"), {}),
        (("plan-splits", "lenet", "--stages", "2", "--compare"), {}),
        (("benchmark", "--print-config", "--suite"), {}),
        (("benchmark", "lenet", "--host-generated-data", "--baseline"), {**NOT_JSON, "folder.yml": "error"}),
        (("benchmark", "*", "--suite", "keras-tutorial", "--versus"), {**NOT_JSON, "folder.yml": "error"}),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_hostile_files(run, args, parts):
    for name, (data, _) in HOSTILE.items():
        Path(name).write_bytes(data)
    os.mkfifo("fifo.yml")
    Path("folder.yml").mkdir()
    for name, part in {**{name: part for name, (_, part) in HOSTILE.items()}, **OTHERS, **parts}.items():
        code, out, err = run(*args, name)
        lines = [line for line in err.splitlines() if not line.startswith("reading the layers")]
        assert code in (2, 3) and out == "" and len(err) < 2000, (name, err)
        assert [line.split(":")[0] for line in lines] == ["error", "hint"], (name, err)
        assert part.lower() in lines[0].lower(), (name, err)


def test_a_suite_cannot_expand_to_a_billion_rows(run, tmp_path):
    numbers = ",".join(map(str, range(1, 101)))
    options = " ".join(f"--seed {{{numbers}}}" for _ in range(5))
    (tmp_path / "many.yml").write_text(f"rows:\n- benchmark lenet {options}\n")
    line = "benchmark --suite many.yml --print-config"
    check_refused(run, Refusal(line, "stands for 10000000000 command lines"))


def test_hostile_json_is_refused():
    for text in ("[" * 100_000, '{"a":' * 100_000, "[" + "9" * 5000 + "]"):
        with pytest.raises(BadDocument) as caught:
            documents.load_record(text)
        assert caught.value.hint and len(str(caught.value)) < 300
    # Brackets inside text do not count as depth, also after escaped quotes.
    assert documents.load_record('["' + "[" * 1000 + '", "\\"[[["]') == ["[" * 1000, '"[[[']


def test_a_value_in_a_message_is_short_and_printable():
    assert shown_value("a\x1b\nb") == "a\\x1b\\nb"
    assert max(len(shown_value(value)) for value in ("x" * 10_000_000, list(range(50_000)))) < 300
    assert "digits" in shown_value(10**5000)


def test_a_repeated_key_of_json_is_named():
    with pytest.raises(BadDocument, match="'b' is given twice"):
        documents.load_record('{"a": 1, "b": 2, "b": 3}')


@pytest.mark.parametrize("kind", [documents.Natural, documents.Positive])
def test_counts_in_files_have_at_most_63_bits(kind):
    assert documents.mismatch(9_223_372_036_854_775_807, kind) == ""
    assert "9223372036854775807" in documents.mismatch(9_223_372_036_854_775_808, kind)


@dataclasses.dataclass
class _Row:
    count: int = 1
    values: List[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Table:
    rows: List[_Row]


@pytest.mark.parametrize(
    "row, problem",
    [
        ({"count": 9_223_372_036_854_775_807, "values": [0.5, -3.0]}, ""),
        ({"count": 9_223_372_036_854_775_808}, "Expected `int` of at most 64 bits - at `$.rows[1].count`"),
        ({"values": [0.5, float("inf")]}, "Expected a finite number - at `$.rows[1].values[1]`"),
        ({"number": 1}, "Object contains unknown field `number` - at `$.rows[1]`"),
    ],
)
def test_what_no_array_holds_and_unknown_fields_are_damage_at_any_depth(row, problem):
    data = {"rows": [{}, row]}
    if not problem:
        assert documents.to_record(data, _Table, "x.json", "restore it") == _Table([_Row(), _Row(**row)])
        return
    with pytest.raises(DataError) as caught:
        documents.to_record(data, _Table, "x.json", "restore it")
    assert (caught.value.message, caught.value.hint) == (f"x.json is damaged: {problem}", "restore it")


# -- property tests --------------------------------------------------------------------------------------------

_WORDS = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=8)
_WRITTEN = """a b_1 16.16 1e-5 1/4 10% 0x1f 0b2 017 08 1:30 1:90 .5 5. -.inf .nan 1_0 ~ null yes No ON 2001-01-01 = <<
    2001-12-14t21:59:43.10-05:00 +1 -0 0.0 1.5e+3 1.5e3 ._ 0x 12e03 - ? : conv2_block1_out"""
_PLAIN = st.sampled_from(_WRITTEN.split())


@st.composite
def _lines(draw, depth=0):
    """Draws a block of near-YAML: indentation, anchors, aliases, merges, tags, quotes, flow and documents."""
    indent = "  " * depth if draw(st.integers(0, 12)) else draw(st.sampled_from(["\t", " ", "", "      "]))
    lines = []
    for _ in range(draw(st.integers(1, 4))):
        key = draw(
            st.one_of(_PLAIN, st.sampled_from(["a", "b", "c", "<<", "? x", "[1]", "'a'", "*a0", "seed"]))
        )
        head = draw(st.sampled_from([f"{key}: ", f"{key}: ", "- ", "? ", "", "---\n", "%TAG ! x\n"]))
        mark = draw(st.sampled_from(["", "", "", "&a0 ", "&a1 ", "!!int ", "!x ", "! "]))
        if depth < 4 and draw(st.booleans()):
            lines.append(indent + head + mark)
            lines += draw(_lines(depth + 1))
            continue
        scalar = st.one_of(
            _PLAIN,
            _WORDS,
            st.sampled_from(
                ["*a0", "*a1", "[*a0, *a0]", "{<<: *a0}", "[1, 2", "{a: 1}", "|\n   x", "'q", '"\\x']
            ),
        )
        lines.append(indent + head + mark + draw(scalar))
    return lines


@tries(40, slow=2000)
@given(_lines())
def test_any_text_is_a_value_or_an_error_with_a_hint(lines):
    text = "\n".join(lines)
    try:
        with documents.naming("f.yml"):
            value = documents.load(text)
    except UserError as error:
        assert error.message.startswith("f.yml") and error.hint and len(error.message) < 600
        return
    # Values that are read are the same in PyYAML, except for keys and dates.
    try:
        assert _same(value, yaml.load(text, Loader=_Oracle)), text
    except yaml.YAMLError:
        assert "\t" in text  # LibYAML takes a tab for a blank where PyYAML's own reader does not
    try:
        presets.PresetFile(text, "f.yml").get("a")
    except UserError as error:
        assert error.hint


class _Oracle(yaml.SafeLoader):
    """PyYAML's pure Python reader, with dates and numbers of other bases as text, and several ``<<`` in one mapping."""


def _decimal(loader, node):
    is_other = re.match(r"[-+]?0[0-9_xbo]", node.value) or ":" in node.value
    return node.value if is_other else loader.construct_yaml_int(node)


def _without_colons(loader, node):
    return node.value if ":" in node.value else loader.construct_yaml_float(node)


_Oracle.add_constructor("tag:yaml.org,2002:int", _decimal)
_Oracle.add_constructor("tag:yaml.org,2002:float", _without_colons)
_Oracle.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, node: node.value)
for _name in ("value", "merge"):  # = and << as values
    _Oracle.add_constructor(f"tag:yaml.org,2002:{_name}", lambda loader, node: node.value)


def _same(ours, theirs):
    if isinstance(ours, dict) and isinstance(theirs, dict):
        by_text = {key: value for key, value in theirs.items() if isinstance(key, str)}
        return len(ours) >= len(theirs) and all(_same(ours[key], value) for key, value in by_text.items())
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    return type(ours) is type(theirs) and (ours == theirs or ours != ours)


_VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.floats(allow_nan=False),
        st.text(st.characters(blacklist_categories=("Cs",)), max_size=20), _PLAIN,
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_WORDS, inner, max_size=4)),
    max_leaves=20,
)  # fmt: skip


@given(_VALUES, st.sampled_from([None, True, False]))
def test_plain_values_survive_yaml_and_json(value, flow):
    # PyYAML writes these characters as line breaks, which are blanks when they are read again.
    has_breaks = not {"\x85", "\u2028", "\u2029"}.isdisjoint(json.dumps(value, ensure_ascii=False))
    text = yaml.safe_dump(value, default_flow_style=flow, allow_unicode=not has_breaks)
    assert documents.load(text) == value
    assert documents.load_record(json.dumps(value)) == value


@given(st.integers(0, 80), st.sampled_from(["[", "{a: ", "- "]))
def test_depth_is_counted_exactly(depth, opening):
    text = opening * depth + "1" + {"[": "]", "{a: ": "}", "- ": ""}[opening] * depth
    if depth <= MAX_DEPTH:
        documents.load(text)
    else:
        with pytest.raises(BadDocument, match="inside of each other"):
            documents.load(text)


@pytest.mark.parametrize("text", ["010", "1:30", "0x10", "0b11", "-017", "1:30.5"])
def test_numbers_of_other_bases_are_text_as_on_the_command_line(text):
    """YAML 1.1 takes 010 for 8 and 1:30 for 90."""
    assert documents.load(f"num-epochs: {text}") == {"num-epochs": text}


@pytest.mark.parametrize(
    "text, value", [("0", 0), ("10", 10), ("-3", -3), ("0.10", 0.1), ("1_000", 1000), ("1e-3", "1e-3")]
)
def test_decimal_numbers_are_numbers(text, value):
    assert documents.load(text) == value
