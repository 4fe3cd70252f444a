"""The C++ parsers against a reference parser on random and hostile lines; messages; Arrow columns; gathering."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import helpers.parse_reference as reference
import numpy as np
import pytest
from hypothesis import given, strategies as st

from thermocline import ThermoclineError
from thermocline.core import _core

COLUMNS = [
    ("label", "label", False, 0.0, 1.0, "none"),
    ("number_key", "I1", False, 0.0, 1.0, "log_square"),
    ("number_key", "I2", False, 0.5, 0.25, 0.75),
    ("number_key", "I3", False, 0.0, 1.0, "none"),
    ("dense", "D1", False, 0.0, 1.0, "none"),
    ("dense", "D2", True, 0.5, 2.0, "none"),
    ("key", "C1", False, 0.0, 1.0, "none"),
    ("ignore", "x", False, 0.0, 1.0, "none"),
    ("key", "C2", False, 0.0, 1.0, "none"),
]
# Parser options of the fuzzing corpus (csrc/data/parse_fuzz_test.cc), by the first byte of a corpus file.
PARSERS: dict[str, dict[str, Any]] = {
    "0": {"kind": "libsvm", "fields": 3},
    "1": {"kind": "libsvm", "one_bag": True},
    "2": {"kind": "libsvm", "fields": 3, "raw_keys": True},
    "3": {"kind": "libffm", "fields": 4},
    "4": {"kind": "libffm", "fields": 4, "raw_keys": True},
    "5": {"kind": "table", "columns": COLUMNS},
    "6": {"kind": "table", "columns": COLUMNS, "delimiter": ",", "quoting": True},
    "7": {"kind": "table", "columns": COLUMNS, "delimiter": ";", "quoting": True, "raw_keys": True},
    "8": {"kind": "table", "columns": [("dense", "only", True, 1.5, 0.25, "none")], "quoting": True},
}


def reference_parse(block: bytes, options: dict[str, Any]) -> tuple[list[reference.Example], list[int]]:
    raw_keys = options.get("raw_keys", False)
    if options["kind"] == "libsvm":
        one_bag = options.get("one_bag", False)
        line = functools.partial(
            reference.svm_line, fields=options.get("fields", 0), one_bag=one_bag, raw_keys=raw_keys
        )
        return reference.parse(block, line, b" \t")
    if options["kind"] == "libffm":
        return reference.parse(
            block, functools.partial(reference.ffm_line, fields=options["fields"], raw_keys=raw_keys), b" \t"
        )
    delimiter, quoting = options.get("delimiter", "\t").encode(), options.get("quoting", False)
    line = functools.partial(
        reference.table_line, columns=options["columns"], delimiter=delimiter, quoting=quoting, raw_keys=raw_keys
    )
    return reference.parse(block, line, b"")


def check(block: bytes, options: dict[str, Any]) -> None:
    examples, malformed = reference_parse(block, options)
    ids, offsets, weights, dense, labels, _, errors, count = _core.TextParser(**options).parse(block, True)
    assert count == len(malformed)
    assert [line for line, _ in errors] == malformed[:16]
    flat = [bag for example in examples for bag in example.bags]
    assert offsets.tolist() == [0, *np.cumsum([len(bag) for bag in flat], dtype=int)]
    assert ids.tolist() == [key for bag in flat for key, _ in bag]
    expected = [weight for bag in flat for _, weight in bag]
    assert (weights is None) == all(weight == 1 for weight in expected)
    assert weights is None or weights.tolist() == expected
    assert labels.tolist() == [example.label for example in examples]
    # Our logarithm differs from libm's in the last bits.
    np.testing.assert_allclose(dense, [x for example in examples for x in example.dense], rtol=1e-6, atol=1e-12)
    first = _core.TextParser(**options).parse(block, False)
    assert [line for line, _ in first[6]] == malformed[:1]


HOSTILE = [
    *(
        b"0 1 -1 +1 2047 2048 -16 -17 00 007 1e3 -0 0.5 .5 5. 1e39 1e308 1e309 1e-400 -1e-320 3.4028235e38 3.4028236e38"
    ).split(),
    *b"nan inf -inf NaN 1e e5 . - + 1.2.3 0x1f 1_000 12a 18446744073709551615 18446744073709551616".split(),
    *b"9007199254740993 123456789012345678901234567890 0.1234567890123456789012345678 12345678 123456789".split(),
    *(b"", b" ", b" 7 ", b"7 8", b"\t", b"\r", b"\0", b"\xff\xfe", b"a\rb", b'"', b'""', b'"a"', b'"a,b"', b'"a""b"'),
    *(
        b'"a"b',
        b'a"b',
        b'"1"',
        b"68fd1e64",
        b"x" * 31,
        b"x" * 32,
        b"x" * 33,
        b"x" * 100,
        "Zürich".encode(),
        b":",
        b"1:",
    ),
    *(
        b"1:1",
        b"5:0.5",
        b"0:1:1",
        b"3:7:2.5",
        b"4:1:1",
        b"2:9",
        b"1:1:1:1",
        b"a:1",
        b"1:a",
        b":1",
        b"1:nan",
        b"01:02:1",
    ),
]
values = st.one_of(
    st.sampled_from(HOSTILE),
    st.integers(-3000, 10**10).map(lambda x: str(x).encode()),
    st.floats(width=64, allow_nan=False).map(lambda x: repr(x).encode()),
    st.binary(max_size=12),
)


@given(st.data())
def test_random_and_hostile_lines(data: st.DataObject) -> None:
    options = PARSERS[data.draw(st.sampled_from(sorted(PARSERS)))]
    separator = options.get("delimiter", "\t").encode() if options["kind"] == "table" else b" "
    columns = len(options.get("columns", ())) or 1 + options.get("fields", 3)
    # Nearly valid lines: half of the values are valid, and most lines have the expected number of values.
    plain = {"libsvm": b"12:1", "libffm": b"2:7:1", "table": b"1"}[options["kind"]]
    value = st.one_of(st.just(plain), values)
    line = st.lists(value, min_size=columns, max_size=columns) | st.lists(value, max_size=columns + 2)
    label = st.sampled_from([b"0", b"1"]) | values
    lines = data.draw(st.lists(st.tuples(label, line), max_size=8))
    ends = data.draw(st.lists(st.sampled_from([b"\n", b"\r\n", b"\n\n"]), min_size=len(lines), max_size=len(lines)))
    block = b"".join(separator.join([x, *rest[1:]]) + end for (x, rest), end in zip(lines, ends, strict=True))
    if data.draw(st.booleans()):
        block = block.rstrip(b"\n")
    check(block, options)


@given(st.sampled_from(sorted(PARSERS)), st.binary(max_size=60))
def test_any_bytes(parser: str, block: bytes) -> None:
    check(block, PARSERS[parser])


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "corpus").iterdir()), ids=lambda path: path.name)
def test_corpus(path: Path) -> None:
    data = path.read_bytes()
    for name, options in PARSERS.items():
        if name == data[:1].decode() or len(data) < 600:
            check(data[1:], options)


def only_error(block: bytes, **options: Any) -> str:
    *_, errors, count = _core.TextParser(**options).parse(block, False)
    assert count == 1
    return errors[0][1]


def test_messages_name_the_column_and_the_value() -> None:
    table = {"kind": "table", "columns": COLUMNS}
    cases = {
        "1\t1\t1\t1\t1\t1\ta\tb": '8 columns where 9 are expected, separated by "\\x09"',
        "yes\t1\t1\t1\t1\t1\ta\tb\tc": 'column "label" (1 of 9): the label "yes" is not a finite number',
        "\t1\t1\t1\t1\t1\ta\tb\tc": "the label is empty",
        "1\t1\t1\t1\t1x\t1\ta\tb\tc": 'column "D1" (5 of 9): "1x" is not a finite number',
        "1\t1\t1\t1\t1e39\t1\ta\tb\tc": 'column "D1" (5 of 9): "1e39" is too large a number',
        "1\t1\t1\t1\t" + "9" * 50 + "z\t1\ta\tb\tc": '"' + "9" * 40 + '..." (51 bytes) is not',
        "1\t1\t1\t1\t1\t1\t\0\tb\tc": "NUL byte",
    }
    for line, cause in cases.items():
        assert cause in only_error(line.encode(), **table)
    assert "does not end in this line" in only_error(b'1,1,1,1,1,1,"a,b,c', **table, delimiter=",", quoting=True)
    assert "text follows the closing quote" in only_error(b'1,1,1,1,1,1,"a"x,b,c', **table, delimiter=",", quoting=True)
    assert "raw_keys = true" in only_error(b"1\t1\t1\t1\t1\t1\tzz\tb\t1", **table, raw_keys=True)


def test_libsvm_messages_name_both_field_options() -> None:
    position = only_error(b"1 1:1 2:1\n", kind="libsvm", fields=3)
    assert "has 2 ids, not 3" in position
    assert 'fields = "position"' in position
    assert 'fields = "one"' in position
    assert 'id 2, "x:1": the id is not a decimal number' in only_error(b"1 1:1 x:1 3:1", kind="libsvm", fields=3)
    assert 'id 1, "1:nan": the value is not a finite number' in only_error(b"1 1:nan", kind="libsvm", one_bag=True)
    assert 'the label "x"' in only_error(b"x 1:1", kind="libsvm", one_bag=True)
    assert "there are 4 fields, numbered from 0" in only_error(b"1 4:1:1", kind="libffm", fields=4)
    assert "below 2^64" in only_error(b"1 18446744073709551616", kind="libsvm", one_bag=True, raw_keys=True)


def test_line_numbers_count_empty_lines() -> None:
    *_, errors, count = _core.TextParser("libsvm", fields=1).parse(b"\n1 1:1\n\r\nx 1\n1 2 3\n", True)
    assert [line for line, _ in errors] == [3, 4]
    assert count == 2


def test_malformed_lines_are_counted_and_the_first_kept() -> None:
    *_, errors, count = _core.TextParser("libsvm", fields=1).parse(b"x\n" * 1000, True)
    assert (len(errors), count) == (16, 1000)


def test_parse_accepts_any_buffer() -> None:
    parser = _core.TextParser("libsvm", fields=2)
    block = b"1 5 6\n0 7 8\n"
    for view in (bytearray(block), memoryview(block), np.frombuffer(block, np.uint8)):
        assert parser.parse(view, False)[0].tolist() == parser.parse(block, False)[0].tolist()
    with pytest.raises(TypeError):
        parser.parse("text", False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "svm"}, "libsvm, libffm or table"),
        ({"kind": "table"}, "needs columns"),
        ({"kind": "table", "columns": COLUMNS, "delimiter": "||"}, "one byte"),
        ({"kind": "table", "columns": COLUMNS, "delimiter": "\n"}, "must not be"),
        ({"kind": "table", "columns": [COLUMNS[0], COLUMNS[0]]}, "one label column"),
        ({"kind": "table", "columns": [("keys", *COLUMNS[0][1:])]}, "it must be label"),
        ({"kind": "table", "columns": [("dense", "a", False, 0.0, 1.0, "squares")]}, "log_square"),
        ({"kind": "table", "columns": [("number_key", "a", False, 0.0, 1.0, 0.0)]}, "width must be positive"),
        ({"kind": "table", "columns": [("dense", "a", False, math.nan, 1.0, "none")]}, "mean must be finite"),
    ],
)
def test_invalid_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ThermoclineError, match=message):
        _core.TextParser(**options)


def test_too_many_fields_allocate_no_memory() -> None:
    with pytest.raises(ThermoclineError, match="number of fields is wrong"):
        _core.TextParser("libffm", fields=1 << 20).parse(b"1\n" * 10_000, False)


# ---- Arrow columns


@given(st.lists(st.none() | st.binary(max_size=40)), st.booleans())
def test_strings_hash_like_text(strings: list[bytes | None], wide: bool) -> None:
    data = np.frombuffer(b"".join(s or b"" for s in strings), np.uint8)
    offsets = np.cumsum([0, *(len(s or b"") for s in strings)]).astype(np.int64 if wide else np.int32)
    valid = np.array([s is not None for s in strings], bool)
    expected = [reference.key_of("C1", s or b"") for s in strings]
    assert _core.hash_strings("C1", offsets, data, valid).tolist() == expected
    assert _core.hash_strings("C1", offsets, data).tolist() == expected
    assert [_core.key_of("C1", s or b"") for s in strings] == expected


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.lists(st.floats(width=32)), st.lists(st.floats()))
def test_numbers_hash_like_text(ints: list[int], floats: list[float], doubles: list[float]) -> None:
    expected = [reference.key_of("n", str(x).encode()) for x in ints]
    assert _core.hash_ints("n", np.array(ints, np.int64)).tolist() == expected
    unsigned = np.array(ints, np.int64).view(np.uint64)
    assert _core.hash_ints("n", unsigned).tolist() == [
        reference.key_of("n", str(x).encode()) for x in unsigned.tolist()
    ]
    for dtype, numbers in ((np.float32, floats), (np.float64, doubles)):
        array = np.array(numbers, dtype)
        keys = _core.hash_floats("n", array)
        for x, key in zip(array, keys.tolist(), strict=True):
            assert key in {reference.key_of("n", text.encode()) for text in texts_of(x)}


def texts_of(x: np.floating[Any]) -> set[str]:
    """The shortest texts that parse to x, with and without an exponent; C++ uses one of them."""
    if np.isnan(x):
        return {""}
    if abs(x) <= 2**53 and int(x) == x:
        return {str(int(x))}  # like an integer column
    scientific = np.format_float_scientific(x, trim="-", exp_digits=2)
    whole = {str(int(x))} if np.isfinite(x) and int(x) == x else set()
    return {np.format_float_positional(x, trim="-"), scientific, scientific.replace("e+00", "")} | whole


def test_integral_floats_hash_like_integers() -> None:
    """Up to 2^53, even if an exponent would be shorter; -0.0 hashes like 0."""
    ints = np.array([1, -3, 0, 10**6, -(10**9), 2**53, -(2**53)])
    for dtype in (np.float64, np.float32):
        floats = np.where(ints == 0, -0.0, ints).astype(dtype)
        assert _core.hash_floats("n", floats).tolist() == _core.hash_ints("n", ints).tolist()
    as_keys = _core.number_keys("n", ints.astype(np.float64), None, False, 0.0, 1.0, "none")
    assert as_keys.tolist() == _core.hash_ints("n", ints).tolist()
    beyond = _core.hash_floats("n", np.array([2.0**54, 1e300]))
    assert beyond.tolist() == [reference.key_of("n", b"18014398509481984"), reference.key_of("n", b"1e+300")]


def test_offsets_out_of_range() -> None:
    data = np.zeros(4, np.uint8)
    for offsets in ([0, 5], [2, 1], [-1, 2]):
        with pytest.raises(ThermoclineError, match="leave its 4 bytes"):
            _core.hash_strings("C1", np.array(offsets, np.int64), data)
    with pytest.raises(ThermoclineError, match="mask of 3"):
        _core.hash_ints("n", np.arange(2), np.ones(3, bool))


@given(
    st.lists(st.none() | st.integers(-5000, 10**12)), st.booleans(), st.sampled_from(["log_square", "none", 0.5, 10.0])
)
def test_arrow_and_text_numbers_are_equal(numbers: list[int | None], log: bool, bucket: float | str) -> None:
    rule = (log, 0.5, 0.25)
    columns = [
        ("number_key", "k", *rule, bucket),
        ("dense", "d", *rule, "none"),
        ("ignore", "-", False, 0.0, 1.0, "none"),
    ]
    lines = "".join(f"{'' if x is None else x}\t{'' if x is None else x}\t\n" for x in numbers)
    ids, _, _, dense, _, _, _, malformed = _core.TextParser("table", columns=columns).parse(lines.encode(), False)
    values = np.array([math.nan if x is None else x for x in numbers], float)
    assert malformed == 0
    assert _core.number_dense(values, None, *rule).tobytes() == dense.tobytes()
    if bucket != "none":
        assert _core.number_keys("k", values, ~np.isnan(values), *rule, bucket).tolist() == ids.tolist()
    else:
        whole = np.array([x or 0 for x in numbers], np.int64)
        assert _core.hash_ints("k", whole, ~np.isnan(values)).tolist() == ids.tolist()


def test_infinite_numbers_raise() -> None:
    with pytest.raises(ThermoclineError, match="value 1 of the column, inf"):
        _core.number_dense(np.array([1.0, math.inf]), None, False, 0.0, 1.0)
    with pytest.raises(ThermoclineError, match='"k": value 0'):
        _core.number_keys("k", np.array([1e300]), None, False, 0.0, 1.0, 0.1)


# ---- gathering


@given(st.data())
def test_gather_returns_the_selected_examples(data: st.DataObject) -> None:
    fields, dense = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2))
    weight = st.sampled_from([1.0, 0.5])
    example = st.tuples(*[st.lists(st.tuples(st.integers(0, 2**64 - 1), weight), max_size=3)] * fields)
    blocks, everything = [], []
    for examples in data.draw(st.lists(st.lists(example, max_size=5), min_size=1, max_size=4)):
        flat = [bag for e in examples for bag in e]
        ids = np.array([key for bag in flat for key, _ in bag], np.uint64)
        weights = np.array([w for bag in flat for _, w in bag], np.float32)
        offsets = np.cumsum([0, *map(len, flat)]).astype(np.int64)
        labels = np.arange(len(everything), len(everything) + len(examples), dtype=np.float32)
        features = np.repeat(labels, dense) + 0.5
        blocks.append((ids, offsets, None if np.all(weights == 1) else weights, features.astype(np.float32), labels))
        everything += examples
    order = data.draw(st.lists(st.integers(0, len(everything) - 1), max_size=20)) if everything else []
    got = _core.gather_examples(blocks, fields, dense, np.array(order, np.int64))
    flat = [bag for e in order for bag in everything[e]]
    assert got[0].tolist() == [key for bag in flat for key, _ in bag]
    assert got[1].tolist() == [0, *np.cumsum([len(bag) for bag in flat], dtype=int)]
    weights = [1.0] * len(got[0]) if got[2] is None else got[2].tolist()
    assert weights == [w for bag in flat for _, w in bag]
    assert got[3].tolist() == [e + 0.5 for e in order for _ in range(dense)]
    assert got[4].tolist() == order


def test_gather_checks_its_arguments() -> None:
    block = (np.zeros(2, np.uint64), np.array([0, 1, 2]), None, np.zeros(0, np.float32), np.zeros(2, np.float32))
    with pytest.raises(ThermoclineError, match="no example 2 among 2"):
        _core.gather_examples([block], 1, 0, np.array([2]))
    with pytest.raises(ThermoclineError, match="no example -1"):
        _core.gather_examples([block], 1, 0, np.array([-1]))
    with pytest.raises(ThermoclineError, match="does not fit 2 fields"):
        _core.gather_examples([block], 2, 0, np.array([0]))
    bad = (block[0], np.array([0, 3, 2]), *block[2:])
    with pytest.raises(ThermoclineError, match="leave its ids"):
        _core.gather_examples([bad], 1, 0, np.array([0]))
