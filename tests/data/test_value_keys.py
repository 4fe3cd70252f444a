"""`tc.key_of` and docs/keys.md: test vectors, the documented program, and the keys of the readers agree."""

from __future__ import annotations

import ast
import random
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import thermocline as tc

PAGE = (Path(__file__).parents[2] / "docs/keys.md").read_text()


@pytest.fixture(scope="module")
def documented() -> Any:
    """Return `key_of` of the program in the page, which uses the standard library alone."""
    (program,) = (text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def xxh64" in text)
    assert "import" not in program
    names: dict[str, Any] = {}
    exec(program, names)
    return names["key_of"]


def vectors() -> list[tuple[str, Any, int]]:
    rows = re.findall(r"^\| `(.*?)` \| `(.*?)` \| `0x([0-9a-f]{16})` \|$", PAGE, re.MULTILINE)
    literal = {'float("nan")': float("nan")}
    return [(ast.literal_eval(f), literal.get(v) or ast.literal_eval(v), int(key, 16)) for f, v, key in rows]


def test_vectors(documented: Any) -> None:
    assert len(vectors()) > 20
    for field, value, key in vectors():
        assert (tc.key_of(field, value), documented(field, value)) == (key, key), (field, value)


def test_documented_program_computes_keys_of_any_value(documented: Any) -> None:
    rng = random.Random(0)
    values: list[Any] = [struct.unpack("d", rng.randbytes(8))[0] for _ in range(500)]
    values += [rng.uniform(-1, 1) * 10 ** rng.randint(-8, 22) for _ in range(500)]
    values += [rng.randint(-(2**63), 2**64 - 1) for _ in range(100)]
    values += [rng.randbytes(size) for size in range(100)]
    assert [v for v in values if tc.key_of("f", v) != documented("f", v)] == []


def test_sequences_and_arrays_have_the_keys_of_their_values() -> None:
    def one(values: list[Any]) -> list[int]:
        return [tc.key_of("f", value) for value in values]

    mixed: list[Any] = ["a", b"a", 1, 1.5, None, True]
    assert tc.key_of("f", mixed).tolist() == one(mixed)
    assert tc.key_of("f", np.array([[1, -2], [3, 4]])).tolist() == [one([1, -2]), one([3, 4])]
    for dtype in (np.int32, np.uint8, np.uint64, np.bool_):
        assert tc.key_of("f", np.array([0, 1], dtype)).tolist() == one([0, 1])
    assert (
        tc.key_of("f", np.array([0.1], np.float32))[0]
        == tc.key_of("f", "0.1")
        != tc.key_of("f", float(np.float32(0.1)))
    )
    assert tc.key_of("f", np.array(["x", "yy"])).tolist() == one(["x", "yy"])
    assert tc.key_of("f", torch.tensor([7, 8])).tolist() == one([7, 8])
    assert tc.key_of("f", []).dtype == np.uint64


def test_readers_compute_the_same_keys(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("label,item,count\n1,shoe,3\n0,,4\n")
    (batch,) = tc.Reader(tmp_path / "data.csv", batch_size=2, label="label", categorical=["item", "count"])
    assert set(batch.ids.tolist()) == {
        *tc.key_of("item", ["shoe", None]).tolist(),
        *tc.key_of("count", [3, 4]).tolist(),
    }


def test_values_without_a_text_are_refused() -> None:
    with pytest.raises(TypeError, match=r"value is a dict: it must be text, bytes, a number, a bool or None"):
        tc.key_of("f", {})  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="field is 3: it must be the name of a field, such as '3'"):
        tc.key_of(3, "x")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="values have dtype complex128"):
        tc.key_of("f", np.zeros(2, np.complex128))
