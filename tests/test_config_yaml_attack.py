"""Hostile YAML and JSON: each text is a value or an error with a place and a hint, in bounded time."""

import json
import math
import os
import resource
import time

import pytest
import yaml
from few_examples import tries
from hypothesis import given
from hypothesis import strategies as st

from ipucnn import documents
from ipucnn.config import presets
from ipucnn.config.options import RunConfig
from ipucnn.documents import MAX_DEPTH, MAX_NODES, BadDocument
from ipucnn.errors import ConfigurationError, UserError
from ipucnn.text import shown_value


def bomb(levels=9, width=10):
    """Each level repeats the one before ``width`` times: 430 bytes stand for 10**9 values."""
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(lines) + "\n"


def merge_bomb(levels=9, width=10):
    lines = ["a0: &a0 {seed: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * width)}]}}" for n in range(1, levels)]
    return "\n".join(lines) + "\n"


# Text -> a part of the error.
REFUSED = {
    "brackets": ("[" * 100_000, "inside of each other"),
    "braces": ("{a: " * 100_000, "inside of each other"),
    "dashes": ("- " * 100_000, "inside of each other"),
    "question marks": ("? " * 100_000, "inside of each other"),
    "closed brackets": ("a: " + "[" * 60 + "]" * 60, "line 1: more than 50"),
    "indentation": ("".join(" " * n + "a:\n" for n in range(60)), "line 51: more than 50"),
    "deep aliases": ("\n".join(["a0: &a0 [1]"] + [f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 60)]), "inside"),
    "recursion": ("a: &a [*a]", "an alias stands inside"),
    "recursion of a key": ("a: &a {b: &b {c: *a}}", "an alias stands inside"),
    "alias bomb": (bomb(), "counting what aliases repeat"),
    "merge bomb": (merge_bomb(), "counting what aliases repeat"),
    "many values": ("[" + "1," * MAX_NODES + "1]", "more than 100,000 values"),
    "an absent anchor": ("a: *b", "line 1: not readable as YAML: found undefined alias"),
    "an anchor twice": ("a: &a 1\nb: &a 2", "line 2: not readable as YAML: found duplicate anchor"),
    "a merge of text": ("a:\n  <<: 3", "line 2: '<<' must merge"),
    "a merge of a list of text": ("a:\n  <<: [3, 4]", "'<<' must merge"),
    "a merge of lists": ("x: &x [1]\na:\n  <<: *x", "'<<' must merge"),
    "a key twice": ("a:\n  b:\n    c: 1\n    c: 2", "line 4: 'c' is given twice, first on line 3"),
    "a list as key": ("? [1, 2]\n: 3", "a key is a list"),
    "a mapping as key": ("{{a: 1}: 2}", "a key is a mapping"),
    "no key": ("?\n: 1", "a key is empty"),
    "a null key": ("~: 1", "a key is empty"),
    "two documents": ("a: 1\n---\nb: 2", "line 2: not readable as YAML: expected a single document"),
    "a tag": ("a: !!int foo", "line 1: the tag tag:yaml.org,2002:int"),
    "a fitting tag": ("a: !!int 3", "the tag"),
    "Python": ("a: !!python/object/apply:os.system ['x']", "the tag"),
    "a date's tag": ("a: !!timestamp 2001-01-01", "the tag"),
    "binary": ("a: !!binary gIGC", "the tag"),
    "a set": ("a: !!set {b}", "the tag"),
    "a tag of one's own": ("a: !mine 3", "the tag !mine"),
    "tag directives": ("".join(f"%TAG !a{n}! tag:x\n" for n in range(50_000)) + "--- a", "line 1: a line begins"),
    "a version": ("%YAML 99999999999.1\n---\na: 1", "line 1: a line begins with %"),
    "digits": ("a: " + "9" * 5000, "line 1: a number of 5,000 characters"),
    "binary digits": ("a: 0b" + "1" * 500_000, "a number of"),
    "octal digits": ("a: 0" + "7" * 500_000, "a number of"),
    "hex digits": ("a: 0x" + "f" * 500_000, "a number of"),
    "minutes": ("a: 1" + ":59" * 100_000, "a number of"),
    "decimals": ("a: 0." + "3" * 500_000, "a number of"),
    "NUL": ("a: b\0c", "U+0000"),
    "an escape character": ("a: 1\nb: \x1b[31m", "line 2: not readable as YAML: the character U+001B"),
    "a surrogate": ("a: \udcff", "U+DCFF"),
    "an escaped surrogate": ('a: "\\ud800"', "not readable as YAML"),
    "a tab": ("a:\n\tb: 1", "line 2"),
    "UTF-16 read as Latin-1": ("\xff\xfea\0", "U+0000"),
    "a quote": ("a: 'b", "not readable as YAML"),
    "a long text": ("a: " + "x" * 1_000_000, "longer than 1,000,000"),
    "a long anchor": ("a: *" + "b" * 900_000, "undefined alias"),
    "a long tag": ("a: !" + "b" * 900_000 + " 1", "the tag"),
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


def test_memory_stays_small():
    """Covers a megabyte of each kind of value, up to the limit of their number."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for text in (
        "[" + "a," * 99_000 + "a]",
        "".join(f"k{n}: v\n" for n in range(49_000)),
        bomb(),
        merge_bomb(),
    ):
        try:
            documents.load(text)
        except BadDocument:
            continue
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("# nothing\n", None),
        ("a: 2001-01-01\n", {"a": "2001-01-01"}),
        ("a: 2001-12-14t21:59:43.10-05:00\n", {"a": "2001-12-14t21:59:43.10-05:00"}),
        ("a: =\n", {"a": "="}),
        ("a: 0x_\n", {"a": "0x_"}),
        ("1: a\ntrue: b\n", {"1": "a", "true": "b"}),
        ("'~': 1\n", {"~": 1}),
        ("a: .inf\n", {"a": math.inf}),
        ("a: 1.0e+400\n", {"a": math.inf}),
        ("a: 0x1F\nb: 0b11\nc: 017\n", {"a": 31, "b": 3, "c": 15}),
        ("a: 1:30\nb: 1_000\nc: -5\n", {"a": 90, "b": 1000, "c": -5}),
        ("\ufeffa: 1\n", {"a": 1}),
        ("a: &x {b: 1}\nc: {<<: *x, d: 2}\n", {"a": {"b": 1}, "c": {"b": 1, "d": 2}}),
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
    1_000 1__0. _1 1e5 1.0e5 1.0e+5 1.5E-3 .5e+1 +1:30 0:0 -0.0 1.2.3 1- --1 0b_1 1:30:59 ="""


def test_plain_scalars_equal_those_of_pyyaml():
    text = "".join(f"- {form}\n" for form in _WORD_FORMS + _NUMBER_FORMS.split())
    for form, ours, theirs in zip(text.splitlines(), documents.load(text), yaml.load(text, Loader=_Oracle)):
        assert _same(ours, theirs), (form, ours, theirs)


@pytest.mark.parametrize("number", ["{}", "-{}", "0.{}", "{}."])
def test_numbers_have_at_most_308_characters(number):
    digits = "7" * (308 - len(number.format("")))
    value = documents.load(f"- {number.format(digits)}\n")[0]
    assert value == (float if "." in number else int)(number.format(digits))
    with pytest.raises(BadDocument, match="a number of 309 characters") as caught:
        documents.load(f"- 1\n- {number.format(digits + '7')}\n")
    assert caught.value.line == 2 and "at most 308" in caught.value.hint
    if "." not in number:
        assert documents.load_json(f"[{number.format(digits)}]") == [value]
        with pytest.raises(BadDocument, match="309"):
            documents.load_json(f"[{number.format(digits + '7')}]")


@pytest.mark.parametrize(
    "text",
    [
        "[1, [2, 3], {a: 4}]",
        "a: &x 1\nb: *x\nc: [*x, *x]\n",
        "a: &x [1, 2]\nb: [*x, *x, &y {c: *x}]\nd: *y\n",
        "a: &x {b: &y [1, &z 2], c: *z}\nd: [*y, *z, *x]\n",
    ],
)
def test_values_repeated_by_aliases_are_counted_exactly(text, monkeypatch):
    def count(value):
        if isinstance(value, dict):
            return 1 + sum(1 + count(item) for item in value.values())
        return 1 + sum(map(count, value)) if isinstance(value, list) else 1

    value = yaml.load(text, Loader=_Oracle)
    monkeypatch.setattr(documents, "MAX_NODES", count(value))
    assert documents.load(text) == value
    monkeypatch.setattr(documents, "MAX_NODES", count(value) - 1)
    with pytest.raises(BadDocument, match="counting what aliases repeat"):
        documents.load(text)


@pytest.mark.parametrize(
    "text, line, column",
    [
        ("%YAML 1.1\n---\na: 1\n", 1, None),
        ("\n%YAML 1.1\n---\na: 1\n", 2, None),
        ("\x1b", 1, None),
        ("\n\na\x1b", 3, None),
        ("a: ]", 1, 4),
        ("a: 1\nb: [1, }\n", 2, 8),
        ("a: 1\n b: 2\n", 2, 3),
    ],
)
def test_lines_and_columns_of_errors_count_from_one(text, line, column):
    with pytest.raises(BadDocument) as caught:
        documents.load(text)
    assert (caught.value.line, caught.value.column) == (line, column)


def test_a_date_for_a_text_option_stays_text():
    assert RunConfig.from_yaml("run-dir: 2001-01-01\n").run_dir == "2001-01-01"


# -- the same through the options and commands that read such text ---------------------------------------------


FLAGS = [
    "--optimizer-params",
    "--lr-schedule-params",
    "--lr-warmup-params",
    "--norm-layer",
    "--convolution-options",
]
TEXTS = [
    "[" * 100_000,
    '{"a": ' * 100_000,
    "{a: " + "[" * 100_000,
    '{"a": ' + "9" * 5000 + "}",
    "{a: " + "9" * 5000 + "}",
    "{momentum: 1e400}",
    "{momentum: .nan}",
    '{"momentum": NaN}',
    '{"momentum": Infinity}',
    "{momentum: -.inf}",
    "{momentum: 1e39}",
    '{"a": 1, "a": 2}',
    '{"a": "\\ud800"}',
    "{a: !!int foo}",
    "{a: &a [*a]}",
    "{[1]: 2}",
    "{" + ",".join(f"k{n}: 1" for n in range(2000)) + "}",
    "{boundaries: [" + ",".join(map(str, range(2000))) + "]}",
    "x" * 10_000_000,
    "{a: \udcff}",
    json.dumps({"a": "y" * 900_000}),
]


@pytest.mark.parametrize(
    ("flag", "text"),
    [*((flag, TEXTS[0]) for flag in FLAGS), *((FLAGS[0], text) for text in TEXTS[1:])],
    ids=lambda text: text[:12] + f"-{len(text)}",
)
def test_hostile_dictionaries_in_flags(run, flag, text):
    before = time.process_time()
    code, out, err = run("train", "lenet", flag, text, "--print-config")
    assert time.process_time() - before < 20
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert len(lines) == 2 and lines[0].startswith(f"error: {flag}") and lines[1].startswith("hint: ")
    assert len(err) < 2000


def files(folder):
    """Returns paths that are not YAML files -> a part of the error."""
    parts = {}

    def make(name, data, part):
        (folder / name).write_bytes(data)
        parts[name] = part

    make("utf16.yml", "a: 1\n".encode("utf-16"), "UTF-8")
    make("latin.yml", b"a: 1\nb: \xe9\n", "line 2")
    make("large.yml", b"a: " + b"x" * 10_000_000, "larger than")
    make("brackets.yml", b"[" * 100_000, "inside of each other")
    make("bomb.yml", bomb().encode(), "counting what aliases repeat")
    make("nul.yml", b"a: \0\n", "U+0000")
    os.mkfifo(folder / "fifo.yml")
    parts["fifo.yml"] = "FIFO"
    (folder / "folder.yml").mkdir()
    parts["folder.yml"] = "folder.yml"
    parts["/dev/zero"] = "a device"
    parts["absent.yml"] = "absent.yml"
    return parts


NOT_JSON = dict.fromkeys(("nul.yml", "bomb.yml", "large.yml"), "is not JSON")


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
def test_hostile_files(run, tmp_path, args, parts):
    for name, part in {**files(tmp_path), **parts}.items():
        code, out, err = run(*args, name)
        lines = [line for line in err.splitlines() if not line.startswith("reading the layers")]
        assert code in (2, 3) and out == "" and len(err) < 2000, (name, err)
        assert [line.split(":")[0] for line in lines] == ["error", "hint"], (name, err)
        assert part.lower() in lines[0].lower(), (name, err)


def test_a_suite_cannot_expand_to_a_billion_rows(run, tmp_path):
    numbers = ",".join(map(str, range(1, 101)))
    options = " ".join(f"--seed {{{numbers}}}" for _ in range(5))
    (tmp_path / "many.yml").write_text(f"rows:\n- benchmark lenet {options}\n")
    code, _, err = run("benchmark", "--suite", "many.yml", "--print-config")
    assert code == 2 and "stands for 10000000000 command lines" in err and "hint: " in err


def test_hostile_json_is_refused():
    for text in ("[" * 100_000, '{"a":' * 100_000, "[" + "1," * 200_000 + "1]", "[" + "9" * 5000 + "]"):
        with pytest.raises(BadDocument) as caught:
            documents.load_json(text)
        assert caught.value.hint and len(str(caught.value)) < 300
    # Brackets inside text do not count as depth, also after escaped quotes.
    assert documents.load_json('["' + "[" * 1000 + '", "\\"[[["]') == ["[" * 1000, '"[[[']


def test_a_value_in_a_message_is_short_and_printable():
    assert shown_value("a\x1b\nb") == "a\\x1b\\nb"
    assert max(len(shown_value(value)) for value in ("x" * 10_000_000, list(range(50_000)))) < 300
    assert "digits" in shown_value(10**5000)


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
    assert _same(value, yaml.load(text, Loader=_Oracle)), text
    try:
        presets.PresetFile(text, "f.yml").get("a")
    except UserError as error:
        assert error.hint


class _Oracle(yaml.SafeLoader):
    """PyYAML's pure Python reader, with dates as text and several ``<<`` in one mapping."""


_Oracle.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, node: node.value)
_Oracle.add_constructor("tag:yaml.org,2002:value", lambda loader, node: node.value)


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
def test_plain_values_survive_yaml(value, flow):
    text = yaml.safe_dump(value, default_flow_style=flow, allow_unicode=True)
    assert documents.load(text) == value


@given(_VALUES)
def test_plain_values_survive_json(value):
    assert documents.load_json(json.dumps(value)) == value


@given(st.integers(0, 80), st.sampled_from(["[", "{a: ", "- "]))
def test_depth_is_counted_exactly(depth, opening):
    text = opening * depth + "1" + {"[": "]", "{a: ": "}", "- ": ""}[opening] * depth
    if depth <= MAX_DEPTH:
        documents.load(text)
    else:
        with pytest.raises(BadDocument, match="inside of each other"):
            documents.load(text)
