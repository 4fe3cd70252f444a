"""Rows below fp32: settings and bytes; the C++ codec against the obvious one, bit for bit; what rounding means."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from helpers import dram
from helpers.ssd import SMALL

import thermocline as tc
from thermocline.embedding.precision import Kind, Precision
from thermocline.embedding.reference_codec import encode, pack, rounding_bits

KINDS: list[Kind] = [kind for kind in get_args(Kind) if kind != "fp32"]
PRECISIONS = [
    Precision(kind=kind, rounding=rounding, range=limit)
    for kind in KINDS
    for rounding in ("stochastic", "nearest")
    for limit in ((None, 0.7) if kind.startswith("int") else (None,))
]
SEED, TABLE = 3, 4
SPECIAL = [0.0, -0.0, 1e-9, -1e-9, 6e-8, 3e-8, 6.1e-5, 6.0e-5, 65504.0, 65519.0, 65520.0, 1e9, -1e9, 3.3e38, 1e-45, 0.7]


def name(precision: Precision) -> str:
    where = "" if not precision.integer else "-row" if precision.row_scaled else "-table"
    return f"{precision.kind}-{precision.rounding}{where}"


def make_tier(dim: int, precision: Precision, optimizer: Any = None, **options: Any) -> tc.DramTier:
    chosen = {"budget": "1MB", "threads": 2, "seed": SEED, "table": TABLE, **options}
    return tc.DramTier(dim, optimizer or tc.SGD(lr=1.0), precision=precision, **chosen)


def test_settings_and_bytes() -> None:
    assert tc.Precision.of("int4") == tc.Precision("int4") == tc.Precision(kind="int4")
    with pytest.raises(TypeError, match="positional"):
        tc.Precision("int4", "nearest")  # type: ignore[misc]
    assert tc.Precision(kind="int8", range=127.5).scale == 1.0
    assert [tc.Precision(kind=kind).bits for kind in ("fp32", "bf16", "int3", "int16")] == [32, 16, 3, 16]
    rowwise, adam = tc.RowWiseAdagrad(), tc.Adam()
    for kind, limit, dim, bytes_ in [
        ("fp32", None, 16, 4 * 16),
        ("fp16", None, 16, 2 * 16),
        ("bf16", None, 5, 12),  # whole words
        ("int8", 1.0, 16, 16),
        ("int8", None, 16, 16 + 4),  # the row's own step
        ("int3", 1.0, 11, 8),  # 33 bits
        ("int2", 1.0, 16, 4),
        ("int16", 1.0, 3, 8),
    ]:
        precision = tc.Precision(kind=kind, range=limit)  # type: ignore[arg-type]
        for optimizer in (rowwise, adam, tc.SGD()):
            tier = make_tier(dim, precision, optimizer)
            assert tier.row_bytes == precision.row_bytes(dim, optimizer) == bytes_ + 4 * optimizer.state_floats(dim)
            assert tier.stats().bytes_rows == tier.capacity * tier.row_bytes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "int9"}, "Precision.kind is 'int9': it must be one of fp32, fp16"),
        ({"kind": "int8", "rounding": "up"}, "Precision.rounding is 'up'"),
        ({"kind": "int8", "range": 0.0}, "Precision.range is 0.0: it must be a finite number above 0, or None"),
        ({"kind": "int8", "range": "1"}, "Precision.range is '1': it must be a finite number above 0, or None"),
        ({"kind": "int8", "range": 1e-45}, "Precision.range is 1e-45: it must be such that its scale is a float32"),
        ({"kind": "int2", "range": 1e39}, "Precision.range is 1e[+]39: it must be"),
        (
            {"kind": "int8", "scale_lr": 0.01},
            "Precision.scale_lr is 0.01: it must be 0, or set range, such as range=1.0",
        ),
        (
            {"kind": "fp16", "scale_lr": 0.01},
            "Precision.scale_lr is 0.01: it must be 0: only integers have a scale to learn",
        ),
        (
            {"kind": "int8", "range": 1.0, "scale_lr": 0.5},
            "Precision.scale_lr is 0.5: it must be a number from 0 to 0.1",
        ),
        (
            {"kind": "int8", "range": 1.0, "scale_lr": "x"},
            "Precision.scale_lr is 'x': it must be a number from 0 to 0.1",
        ),
        ({"kind": "fp16", "range": 1.0}, "Precision.range is 1.0: it must be None: only integers, .* not fp16"),
    ],
)
def test_invalid_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tc.Precision(**settings)


# ---- the C++ codec and the reference


def stored_bytes(precision: Precision, weights: Any, random: list[int] | None) -> bytes:
    return pack(precision, *encode(precision, weights, np.float32(precision.scale), random))


@pytest.mark.parametrize("precision", PRECISIONS, ids=name)
@pytest.mark.parametrize("dim", [1, 3, 7, 8, 9, 16, 31, 32, 33, 70])
def test_stored_bytes_equal_the_reference(precision: Precision, dim: int) -> None:
    """push rounds to nearest, a step stochastically; values of all magnitudes and a zero row."""
    tier = make_tier(dim, precision, initial=tc.Constant(value=0.0))
    random = np.random.default_rng(dim)
    keys = random.integers(0, 2**63, 12, dtype=np.uint64)
    rows = (random.normal(size=(12, dim)) * 10.0 ** random.integers(-9, 3, (12, 1))).astype(np.float32)
    rows.reshape(-1)[: len(SPECIAL)] = SPECIAL[: rows.size]
    rows[-1] = 0
    tier.push(keys, rows)
    got = tier.read_stored(keys)
    for row, words in zip(rows, got, strict=True):
        assert words.tobytes() == stored_bytes(precision, row, None)
    # The update of a zero row is w - 1.0 * g, so -g is rounded.
    other = keys ^ np.uint64(1)
    slots = tier.pull(other)
    tier.apply_gradients(slots, -rows, step=9)
    tier.unpin(slots, dirty=True)
    for key, row, words in zip(other, rows, tier.read_stored(other), strict=True):
        random_bits = rounding_bits(SEED, TABLE, int(key), 9, dim) if precision.stochastic else None
        assert words.tobytes() == stored_bytes(precision, row + np.float32(0), random_bits)


@pytest.mark.parametrize("precision", PRECISIONS, ids=name)
@pytest.mark.parametrize("dim", [1, 5, 8, 33])
def test_encoding_is_idempotent(precision: Precision, dim: int) -> None:
    """Encode, decode and encode again: the bytes are equal. All codes of up to 8 bits, many of 16."""
    tier = make_tier(dim, precision)
    bits = precision.bits
    codes = np.arange(2**bits) if bits < 16 else np.random.default_rng(1).integers(0, 2**16, 5000)
    if precision.integer:
        values = (codes - 2 ** (bits - 1)) * np.float32(precision.scale or 0.01)
    else:
        shift = codes.astype(np.uint16)
        half = shift.view(np.float16).astype(np.float32)
        values = half if precision.kind == "fp16" else (shift.astype(np.uint32) << 16).view(np.float32)
        values = values[np.isfinite(values)]
    rows = np.resize(values.astype(np.float32), (-(-len(values) // dim), dim))
    if precision.row_scaled:  # the largest weight has the largest code
        rows[:, 0] = np.float32(0.01) * (2 ** (bits - 1) - 1)
        rows = np.maximum(rows, -rows[:, :1])
    once = tier.encode(rows)
    twice = tier.encode(tier.decode(once))
    assert once.tobytes() == twice.tobytes()
    if not precision.row_scaled:
        np.testing.assert_array_equal(tier.decode(once), rows)


@pytest.mark.parametrize("kind", ["int2", "int4", "int8", "int16"])
def test_values_outside_the_range_are_clamped(kind: Kind) -> None:
    tier = make_tier(4, Precision(kind=kind, range=1.0))
    bits = Precision(kind=kind).bits
    scale = np.float32(2 / (2**bits - 1))
    got = tier.decode(tier.encode(np.array([[1e9, -1e9, np.inf, -np.inf]], np.float32)))
    high, low = np.float32(2 ** (bits - 1) - 1) * scale, -np.float32(2 ** (bits - 1)) * scale
    np.testing.assert_array_equal(got, [[high, low, high, low]])


def test_nan_is_kept_per_row() -> None:
    """The scale of a row is NaN if a weight is, and then the whole row."""
    bad = np.array([[1.0, np.nan, 2.0]], np.float32)
    for kind in ("fp16", "bf16"):
        tier = make_tier(3, Precision(kind=kind))  # type: ignore[arg-type]
        np.testing.assert_array_equal(tier.decode(tier.encode(bad)), bad)
    tier = make_tier(3, Precision(kind="int8"))
    assert np.isnan(tier.decode(tier.encode(bad))).all()
    assert np.isnan(tier.decode(tier.encode(np.array([[1.0, np.inf, 2.0]], np.float32))))[0, 0]


def test_nan_is_stored_as_0_with_a_table_scale() -> None:
    """See `Precision.range`."""
    tier = make_tier(3, Precision("int8", rounding="nearest", range=127.5))
    bad = np.array([[1.0, np.nan, np.inf]], np.float32)
    np.testing.assert_array_equal(tier.decode(tier.encode(bad)), [[1.0, 0.0, 127.0]])


# ---- rounding


def initial_values(precision: Precision, value: float, count: int) -> Any:
    tier = make_tier(8, precision, initial=tc.Constant(value=value))
    return tier.initial_rows(np.arange(count // 8, dtype=np.uint64))


def test_example_of_the_talk() -> None:
    """x = 1.8 at scale 1: 2 with probability 80 %, 1 with 20 %; rounding to nearest gives 2."""
    stochastic = initial_values(Precision(kind="int8", range=127.5), 1.8, 80_000)
    assert set(np.unique(stochastic)) == {1.0, 2.0}
    assert abs((stochastic == 2.0).mean() - 0.8) < 5 * np.sqrt(0.8 * 0.2 / 80_000)
    nearest = initial_values(Precision(kind="int8", rounding="nearest", range=127.5), 1.8, 800)
    assert np.unique(nearest).tolist() == [2.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.3, -0.3, 0.0123, -0.002])
def test_unbiased_inside_the_range(kind: Kind, value: float) -> None:
    """The mean over many keys equals the value within five standard errors."""
    precision = Precision(kind=kind, range=None if kind.endswith("p16") or kind == "bf16" else 1.0)
    got = initial_values(precision, value, 80_000).astype(np.float64)
    assert len(np.unique(got)) <= 2
    error = abs(got.mean() - np.float32(value))
    assert error <= 5 * got.std() / np.sqrt(got.size) + 1e-9


def test_random_bits_depend_on_seed_table_key_step_and_element() -> None:
    def codes(seed: int = 1, table: int = 2, key: int = 3, step: int = 4) -> bytes:
        tier = tc.DramTier(64, tc.SGD(lr=1.0), precision=Precision(kind="int8", range=127.5), seed=seed, table=table,
                          initial=tc.Constant(value=0.0), budget="1MB", threads=1)  # fmt: skip
        slots = tier.pull(np.array([key], np.uint64))
        tier.apply_gradients(slots, np.full((1, 64), -0.5, np.float32), step=step)
        return tier.rows(slots).tobytes()

    variants = [codes(), codes(seed=5), codes(table=5), codes(key=5), codes(step=5)]
    assert codes() == variants[0]
    assert all(a != b for a, b in itertools.combinations(variants, 2))
    assert len(set(np.frombuffer(variants[0], np.float32))) == 2


def test_rounding_to_nearest_loses_small_updates() -> None:
    """300 updates of a tenth of the scale: lost by rounding to nearest, kept on average by stochastic rounding."""
    ends = {}
    for rounding in ("nearest", "stochastic"):
        precision = Precision(kind="int8", rounding=rounding, range=127.5)  # type: ignore[arg-type]
        tier = make_tier(16, precision, initial=tc.Constant(value=0.0))
        slots = tier.pull(np.arange(20, dtype=np.uint64))
        for step in range(1, 301):
            tier.apply_gradients(slots, np.full((20, 16), -0.1, np.float32), step=step)
        ends[rounding] = float(tier.rows(slots).mean())
    assert ends["nearest"] == 0.0
    assert abs(ends["stochastic"] - 30) < 2


# ---- stores, checkpoints, exports


def test_all_readers_return_floats(tmp_path: Path) -> None:
    table = tc.Table(6, tc.Adagrad(), precision="int8", mem="1MB", ssd=tmp_path / "rows", ssd_options=SMALL)
    keys = np.arange(50, dtype=np.uint64)
    rows = np.random.default_rng(1).normal(size=(50, 12)).astype(np.float32)
    table.dram.push(keys, rows)
    read = table.read(keys)
    assert read.shape == (50, 12)
    np.testing.assert_array_equal(read[:, 6:], rows[:, 6:])  # state is fp32
    assert np.abs(read[:, :6] - rows[:, :6]).max() <= np.abs(rows[:, :6]).max() / 127
    table.commit()
    assert table.store is not None
    assert table.store.row_bytes == 4 + 8 + 24
    scanned = dict(zip(*map(np.concatenate, zip(*table.rows(), strict=True)), strict=True))
    np.testing.assert_array_equal(np.stack([scanned[key] for key in keys]), read)
    tc.export_rows(table, tmp_path / "export", format="safetensors")
    from safetensors.numpy import load_file

    exported = load_file(tmp_path / "export" / "part-00000.safetensors")
    order = np.argsort(exported["keys"])
    np.testing.assert_array_equal(exported["weights"][order], read[:, :6])
    table.close()
    again = tc.Table(6, tc.Adagrad(), precision="int8", mem="1MB", ssd=tmp_path / "rows", ssd_options=SMALL)
    np.testing.assert_array_equal(again.read(keys), read)
    again.close()
    with pytest.raises(tc.FormatError, match="row_bytes=36, but it was opened with row_bytes=32"):
        tc.Table(6, tc.Adagrad(), precision="int4", mem="1MB", ssd=tmp_path / "rows", ssd_options=SMALL)


@pytest.mark.parametrize(("saved", "opened"), [("int16", "bf16"), ("fp32", "int8"), ("int8", "fp32")])
def test_checkpoint_of_another_precision_is_refused(saved: Kind, opened: Kind, tmp_path: Path) -> None:
    """int16 with a table scale and bf16 have the same row size."""

    def table(kind: Kind) -> tc.Table:
        limit = 1.0 if kind == "int16" else None
        return tc.Table(4, tc.SGD(), precision=Precision(kind=kind, range=limit), mem="1MB")

    first = table(saved)
    checkpoints = tc.Checkpoints(tmp_path, [first])
    checkpoints.save(step=0)
    checkpoints.close()
    with pytest.raises(tc.FormatError, match=r"precision .*'kind': '" + saved + "'.* has .*'kind': '" + opened):
        tc.Checkpoints(tmp_path, [table(opened)]).restore()


LEARNED = Precision(kind="int8", range=1.0, scale_lr=0.01)


def train_a_little(table: tc.Table, first: int) -> None:
    random = np.random.default_rng(first)
    for step in range(first, first + 5):
        lookup = dram.lookup(table.dram, random.integers(0, 30, 50).astype(np.uint64))
        dram.update(table.dram, lookup, random.normal(size=(50, 4)).astype(np.float32), step=step)
        dram.release(table.dram, lookup)


def test_learned_scale_is_in_the_store(tmp_path: Path) -> None:
    """Each commit has the scale of its rows."""

    def opened(**options: Any) -> tc.Table:
        location = {"ssd": tmp_path / "rows", "ssd_options": SMALL}
        return tc.Table(4, tc.Adagrad(lr=0.5), precision=LEARNED, mem="1MB", **location, **options)

    keys = np.arange(40, dtype=np.uint64)
    table = opened()
    states = []
    for first in (1, 6):
        train_a_little(table, first)
        states.append((table.commit(b"a note"), table.dram.learned, table.read(keys).tobytes()))
    assert states[0][1] != states[1][1]
    assert table.dram.learned is not None
    assert 0.9 < table.dram.learned.scale / LEARNED.scale < 1.1
    assert table.dram.learned.scale != LEARNED.scale
    train_a_little(table, 11)  # not committed
    table.close()
    again = opened()
    assert (again.dram.learned, again.read(keys).tobytes()) == states[1][1:]
    again.close()
    older = opened(epoch=states[0][0])
    assert (older.dram.learned, older.read(keys).tobytes()) == states[0][1:]
    older.close()


def test_learned_scale_is_in_checkpoints(tmp_path: Path) -> None:
    """A table without SSD: restored in place, and into another table."""
    keys = np.arange(40, dtype=np.uint64)

    def make() -> tc.Table:
        return tc.Table(4, tc.Adagrad(lr=0.5), precision=LEARNED, mem="1MB")

    table = make()
    checkpoints = tc.Checkpoints(tmp_path, [table])
    train_a_little(table, 1)
    checkpoints.save(step=5)
    saved = table.dram.learned, table.read(keys).tobytes()
    train_a_little(table, 6)
    assert table.dram.learned != saved[0]
    checkpoints.restore()
    assert (table.dram.learned, table.read(keys).tobytes()) == saved
    checkpoints.close()
    other = make()
    tc.Checkpoints(tmp_path, [other]).restore()
    assert (other.dram.learned, other.read(keys).tobytes()) == saved


def test_learned_scale_follows_the_weights() -> None:
    """The scale grows for weights beyond the range, and shrinks for weights far inside it."""
    ends = {}
    for size in (0.1, 1.0, 4.0):
        tier = make_tier(8, Precision(kind="int8", range=1.0, scale_lr=0.05), initial=tc.Constant(value=0.0))
        slots = tier.pull(np.arange(30, dtype=np.uint64))
        target = np.random.default_rng(1).uniform(-size, size, (30, 8)).astype(np.float32)
        for step in range(1, 301):
            tier.apply_gradients(slots, (tier.rows(slots) - target) * np.float32(0.1), step=step)
        assert tier.learned is not None
        ends[size] = tier.learned.scale / tier.precision.scale, float(np.abs(tier.rows(slots) - target).max())
    assert 0.08 < ends[0.1][0] < 0.3
    assert 0.8 < ends[1.0][0] < 2.0
    assert 3 < ends[4.0][0] < 8
    assert ends[4.0][1] < 0.5  # 3 if clamped


def test_learned_scale_with_large_gradients() -> None:
    """Gradients of a loss summed over a large batch: a scale that is too large shrinks at the full rate."""
    tier = make_tier(128, Precision(kind="int8", range=4.0, scale_lr=0.01), tc.SGD(lr=1e-3), budget="8MB")
    keys = np.arange(10_000, dtype=np.uint64)
    for step in range(1, 4):
        lookup = dram.lookup(tier, keys)
        dram.update(
            tier, lookup, np.random.default_rng(step).normal(0, 10, (len(keys), 128)).astype(np.float32), step=step
        )
        dram.release(tier, lookup)
    assert tier.learned is not None
    assert tier.learned.scale == pytest.approx(tier.precision.scale * 0.99**3, rel=1e-3)


def test_precision_in_a_config() -> None:
    config = tc.Config.parse('[precision]\nkind = "int4"\nrounding = "nearest"\nrange = 0.5')
    assert config.precision == tc.Precision(kind="int4", rounding="nearest", range=0.5)
    assert tc.Config.parse(config.to_toml()) == config
    assert tc.Config.parse("", ["precision.kind=bf16"]).precision.kind == "bf16"
    with pytest.raises(tc.ConfigError, match=r"precision.kind is \"int1\": it must be one of fp32"):
        tc.Config.parse('[precision]\nkind = "int1"')
    with pytest.raises(tc.ConfigError, match=r"precision.range is -1.0: it must be a finite number above 0"):
        tc.Config.parse('[precision]\nkind = "int8"\nrange = -1.0')
