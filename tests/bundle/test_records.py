"""The strict decoder: what it takes it gives back the same, and what it refuses costs little."""

import json
import os
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfit.bundle.records import MAX_VALUES, dump_json, parse_json, parse_toml, read_capped, value_at

_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
_SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False) | _TEXT
)
_VALUES = st.recursive(
    _SCALARS, lambda part: st.lists(part, max_size=4) | st.dictionaries(_TEXT, part, max_size=4), max_leaves=20
)


@given(_VALUES)
def test_what_is_written_reads_back_and_as_pythons_own_reader_reads_it(value):
    data = dump_json(value)
    assert parse_json(data) == value
    assert json.loads(data) == value
    assert dump_json(parse_json(data)) == data


def test_equal_values_give_equal_bytes():
    assert (
        dump_json({"b": 1, "a": [1.5, "é"]})
        == dump_json({"a": [1.5, "é"], "b": 1})
        == '{\n  "a": [\n    1.5,\n    "é"\n  ],\n  "b": 1\n}\n'.encode()
    )
    assert list(json.loads(dump_json({"b": 1, "a": 2}, sort_keys=False))) == ["b", "a"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"a": 1, "a": 2}', "duplicate key 'a'"),
        ("[NaN]", "the literal NaN"),
        ("[-Infinity]", "the literal -Infinity"),
        ("[1e999]", "beyond a double"),
        (f"[{2**64}]", "beyond 64 bits"),
        (f"[{-(2**63) - 1}]", "beyond 64 bits"),
        (f"[{10**399}]", "an integer of 400 digits"),
        ("[" * 65 + "]" * 65, "nested deeper than 64"),
        ("[" * 200_000, "nested deeper than 64"),
        (r'["\ud800"]', "half of a surrogate pair"),
        (r'{"\udc00": 1}', "half of a surrogate pair"),
        ("\ufeff{}", "byte-order mark"),
        ("{", "Expecting"),
        ("[1,]", "Illegal trailing comma|Expecting"),
    ],
)
def test_json_that_is_refused(text, what):
    with pytest.raises(ValueError, match=what) as caught:
        parse_json(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1: 2}, {"a": {2}}, 2**64, "\ud800", {"\udfff": 1}, b"x"])
def test_what_could_not_be_read_is_not_written(value):
    with pytest.raises(ValueError):  # noqa: PT011 (each has words of its own)
        dump_json([value])


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a = 1\na = 2", "overwrite"),
        ("a = nan", "finite"),
        ("a = -inf", "finite"),
        ("a = 1979-05-27", "a date"),
        ("a = 1979-05-27T07:32:00Z", "a datetime"),
        (f"a = {2**64}", "beyond 64 bits"),
        (f"a = {'9' * 400}", "beyond 64 bits"),
        (f"a = {'9' * 5000}", "digits|beyond 64 bits"),
        ("a = " + "[" * 20_000, "nested deeper"),
        ("a = " + "[" * 65 + "]" * 65, "nested deeper"),
        ("a = {", "Unclosed|nvalid|Expected"),
    ],
)
def test_toml_that_is_refused(text, what):
    with pytest.raises(ValueError, match=what) as caught:
        parse_toml(text)
    assert "\n" not in str(caught.value)


def test_toml_that_is_fine():
    assert parse_toml(b'a = 1\n[b]\nc = ["x", 1.5, true]') == {"a": 1, "b": {"c": ["x", 1.5, True]}}


@pytest.mark.parametrize("item", ["[],", '{"a":{}},', '"a",', "1,", "[[[[]]]],"])
def test_a_text_that_swells_is_refused_before_it_does(item):
    swelling = "[" + item * ((62 << 20) // len(item)) + "0]"
    started = time.process_time()
    tracemalloc.start()
    with pytest.raises(ValueError, match=f"more than {MAX_VALUES} values"):
        parse_json(swelling)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert time.process_time() - started < 1


@pytest.mark.parametrize("entry", ['"{}":{{}}', '"{}":[[]]', '"{}":"a b c"'])
def test_the_most_that_is_taken_stays_small(entry):
    count = MAX_VALUES // 4
    text = "{" + ",".join(entry.format(number) for number in range(count)) + "}"
    tracemalloc.start()
    assert len(parse_json(text)) == count
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 256 << 20


def test_only_regular_files_within_the_cap_are_read(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("x")
    assert read_capped(tmp_path / "x", 5) == read_capped(tmp_path / "link", 5) == b"12345"
    with pytest.raises(ValueError, match="more than 4 bytes"):
        read_capped(tmp_path / "x", 4)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero", "."):
        with pytest.raises(ValueError, match="needed a regular file"):
            read_capped(tmp_path / name, 5)


def test_a_value_inside():
    record = {"a": {"b": [1]}}
    assert value_at(record, "a", "b") == [1]
    assert value_at(record) == record
    assert value_at(record, "a", "x") is value_at(record, "a", "b", "c") is value_at(None, "a") is None
