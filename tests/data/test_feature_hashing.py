"""Feature hashing: against a dense matrix product, in any order, for any number of threads, and in a config."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import thermocline as tc
from thermocline.config.data import Hashing
from thermocline.config.schema import check_resume
from thermocline.data.feature_hashing import CountSketch, Hasher, Modulo, OpOsrp

M = 2**64 - 1
KINDS = [OpOsrp, CountSketch, Modulo]


# ---- reference implementation


def mix64(x: int) -> int:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x ^= x >> 33
        x = x * factor & M
    return x ^ x >> 33


def stream(seed: int, index: int, count: int) -> list[int]:
    golden = 0x9E3779B97F4A7C15
    state = mix64(((mix64((seed + golden) & M) ^ index) + golden) & M)
    return [mix64((state + (i + 1) * golden) & M) for i in range(count)]


def bin_and_sign(key: int, k: int, seed: int) -> tuple[int, int]:
    permuted = key
    for round_key in stream(seed, 64, 2):
        permuted = mix64(permuted ^ round_key)
    sign = 1 if mix64(permuted ^ stream(seed, M, 1)[0]) >> 63 else -1
    return permuted * k >> 64, sign


def dense_projection(keys: list[int], k: int, seed: int) -> tuple[Any, Any]:
    """Return the bins that occur, and the projection as a [keys, bins] matrix of signs."""
    assigned = [bin_and_sign(key, k, seed) for key in keys]
    bins = sorted({b for b, _ in assigned})
    matrix = np.zeros((len(keys), len(bins)))
    for row, (b, sign) in enumerate(assigned):
        matrix[row, bins.index(b)] = sign
    return np.array(bins), matrix


def random_vectors(rng: np.random.Generator, examples: int, columns: int, weighted: bool) -> np.ndarray[Any, Any]:
    """Dense rows of counts, or of multiples of 1/8, whose sums are exact."""
    present = rng.random((examples, columns)) < rng.random((examples, 1)) * 0.7
    values = rng.integers(-20, 21, present.shape) / 8 if weighted else rng.integers(1, 3, present.shape)
    return np.where(present, values, 0)


def as_bags(vectors: np.ndarray[Any, Any], keys: np.ndarray[Any, Any], rng: np.random.Generator, weighted: bool) -> Any:
    """Convert to CSR in random order; without weights a value of 2 becomes a repeated key."""
    bags, weights, lengths = [], [], []
    for row in vectors:
        columns = np.flatnonzero(row)
        columns = columns if weighted else np.repeat(columns, row[columns].astype(int))
        columns = rng.permutation(columns)
        bags.append(keys[columns])
        weights.append(row[columns])
        lengths.append(len(columns))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return np.concatenate(bags), offsets, np.concatenate(weights).astype(np.float32) if weighted else None


@pytest.mark.parametrize("weighted", [False, True])
@settings(max_examples=40, deadline=None)
@given(k=st.integers(1, 2**40) | st.integers(1, 60), seed=st.integers(0, 2**64 - 1), draw=st.integers(0, 2**32))
def test_hash_equals_the_dense_product(weighted: bool, k: int, seed: int, draw: int) -> None:
    rng = np.random.default_rng(draw)
    keys = rng.integers(0, 2**64, 80, dtype=np.uint64)
    vectors = random_vectors(rng, 30, len(keys), weighted)
    bins, projection = dense_projection(keys.tolist(), k, seed)
    z = vectors @ projection
    ids, offsets, weights = as_bags(vectors, keys, rng, weighted)

    slots, cuts, no_weights = OpOsrp(k, seed).hash(ids, offsets, weights)
    assert no_weights is None
    sketch, sketch_cuts, values = CountSketch(k, seed).hash(ids, offsets, weights)
    assert values is not None
    for example, row in enumerate(z):
        hit = np.flatnonzero(row)
        np.testing.assert_array_equal(slots[cuts[example] : cuts[example + 1]], 2 * bins[hit] + (row[hit] > 0))
        np.testing.assert_array_equal(sketch[sketch_cuts[example] : sketch_cuts[example + 1]], bins[hit])
        np.testing.assert_array_equal(values[sketch_cuts[example] : sketch_cuts[example + 1]], row[hit])


@pytest.mark.parametrize("kind", [OpOsrp, CountSketch])
def test_result_does_not_depend_on_order_or_threads(kind: type[Hasher]) -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, 400, 600)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(0, 3000, offsets[-1]).astype(np.uint64)
    weights = rng.normal(size=len(ids)).astype(np.float32)
    order = np.argsort(np.repeat(np.arange(len(lengths)), lengths) + rng.random(len(ids)), kind="stable")
    for factors in (None, weights):
        expected = kind(500, 3, threads=1).hash(ids, offsets, factors)
        other = kind(500, 3, threads=4).hash(ids[order], offsets, None if factors is None else factors[order])
        for a, b in zip(expected, other, strict=True):
            assert (a is None) == (b is None)
            assert a is None or a.tobytes() == b.tobytes()  # type: ignore[union-attr]


def test_negated_vector_has_the_opposite_slots() -> None:
    rng = np.random.default_rng(2)
    ids = rng.integers(0, 2000, 40_000).astype(np.uint64)
    offsets = np.arange(0, len(ids) + 1, 100)
    weights = rng.normal(size=len(ids)).astype(np.float32)
    up, cuts, _ = OpOsrp(64, 7).hash(ids, offsets, weights)
    down, same, _ = OpOsrp(64, 7).hash(ids, offsets, -weights)
    np.testing.assert_array_equal(cuts, same)
    np.testing.assert_array_equal(up ^ np.uint64(1), down)
    assert 0.47 < float((up % 2).mean()) < 0.53


def test_count_sketch_preserves_inner_products_in_expectation() -> None:
    rng = np.random.default_rng(3)
    keys = rng.integers(0, 2**64, 60, dtype=np.uint64)
    vectors = random_vectors(rng, 2, 60, True)
    ids, offsets, weights = as_bags(vectors, keys, rng, True)
    products = []
    for seed in range(3000):
        bins, cuts, values = CountSketch(17, seed, threads=1).hash(ids, offsets, weights)
        assert values is not None
        dense = np.zeros((2, 17))
        for row in range(2):
            dense[row, bins[cuts[row] : cuts[row + 1]].astype(int)] = values[cuts[row] : cuts[row + 1]]
        products.append(dense[0] @ dense[1])
    exact, error = vectors[0] @ vectors[1], np.std(products) / np.sqrt(len(products))
    assert error > 0
    assert abs(np.mean(products) - exact) < 4.5 * error


def test_collisions_match_random_bins() -> None:
    """The number of nonzero bins matches balls thrown into k bins, with cancellations."""
    rng = np.random.default_rng(4)
    n, k, examples = 500, 1000, 400
    ids = rng.integers(0, 2**64, n * examples, dtype=np.uint64)
    bins = len(CountSketch(k, 1).hash(ids, np.arange(0, len(ids) + 1, n))[0]) / examples
    # A bin with m keys has z = 0 with the probability that a random walk of m steps returns; m is binomial.
    sizes = np.array([1.0])
    for _ in range(n):
        sizes = np.convolve(sizes, [1 - 1 / k, 1 / k])[:40]
    returns = np.array([0.0 if m % 2 else math.comb(m, m // 2) / 2**m for m in range(len(sizes))])
    assert abs(bins - k * (1 - sizes @ returns)) < 2


def test_modulo() -> None:
    rng = np.random.default_rng(5)
    ids = rng.integers(0, 2**64, 1000, dtype=np.uint64)
    weights = rng.normal(size=1000).astype(np.float32)
    hashed, cuts, factors = Modulo(997).hash(ids, [0, 400, 400, 1000], weights)
    assert hashed.tolist() == [key % 997 for key in ids.tolist()]
    assert cuts.tolist() == [0, 400, 400, 1000]
    assert factors is not None
    assert factors.tobytes() == weights.tobytes()


# ---- batches


def batch(weighted: bool = False) -> tc.Batch:
    rng = np.random.default_rng(6)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 4, 30))])
    ids = rng.integers(0, 50, offsets[-1]).astype(np.uint64)
    weights = rng.normal(size=len(ids)).astype(np.float32) if weighted else None
    return tc.Batch(ids, offsets, 3, weights, np.ones((10, 2)), np.arange(10), {"at": 10})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [False, True])
def test_per_example_gives_one_bag_and_per_field_keeps_fields(kind: type[Hasher], weighted: bool) -> None:
    original = batch(weighted)
    per_example, per_field = kind(20, 1)(original), kind(20, 1, fields="per_field")(original)
    assert (per_example.fields, per_example.examples, per_field.fields, per_field.examples) == (1, 10, 3, 10)
    for hashed, starts in ((per_example, original.offsets[::3]), (per_field, original.offsets)):
        ids, offsets, weights = kind(20, 1).hash(original.ids, starts, original.weights)
        np.testing.assert_array_equal(hashed.ids, ids)
        np.testing.assert_array_equal(hashed.offsets, offsets)
        assert (hashed.weights is None) == (weights is None)
        assert hashed.dense is original.dense
        assert hashed.label is original.label
        assert hashed.position == {"at": 10}
    assert original.fields == 3  # unchanged


def test_empty_bags_and_empty_batches() -> None:
    for kind in KINDS:
        ids, offsets, _ = kind(2**40).hash([], [0, 0, 0])
        assert (len(ids), offsets.tolist()) == (0, [0, 0, 0])
        assert kind(9).hash([], [0])[1].tolist() == [0]


def test_ids_are_below_slots() -> None:
    ids = np.random.default_rng(7).integers(0, 2**64, 100_000, dtype=np.uint64)
    for kind in KINDS:
        for k in (1, 3, 1000, 2**40):
            hasher = kind(k, 5)
            hashed = hasher.hash(ids, np.arange(len(ids) + 1))[0]
            assert int(hashed.max()) < hasher.slots
            assert k > 2000 or len(np.unique(hashed)) == hasher.slots  # every slot is used


@pytest.mark.parametrize(
    ("wrong", "allowed"),
    [
        ({"k": 0}, r"a whole number, 1 to 2\*\*40"),
        ({"k": 2**40 + 1}, r"a whole number, 1 to 2\*\*40"),
        ({"k": 1.5}, r"a whole number, 1 to 2\*\*40"),
        ({"k": "10"}, r"a whole number, 1 to 2\*\*40"),
        ({"seed": -1}, r"a whole number, 0 to 2\*\*64 - 1"),
        ({"seed": 0.5}, r"a whole number, 0 to 2\*\*64 - 1"),
        ({"fields": "both"}, "one of per_example, per_field"),
        ({"threads": 0}, "a whole number, at least 1, or None for all cores"),
        ({"threads": 1.5}, "a whole number, at least 1, or None for all cores"),
    ],
)
def test_invalid_settings_are_named(wrong: dict[str, Any], allowed: str) -> None:
    [(name, value)] = wrong.items()
    for kind in KINDS:
        with pytest.raises(ValueError, match=rf"^{kind.__name__}: {name} is {value!r}: it must be {allowed}$"):
            kind(**{"k": 8, **wrong})
    if name != "threads":
        with pytest.raises(ValueError, match=rf"^data\.hashing\.{name} is {value!r}: it must be {allowed}$"):
            Hashing(**wrong)
    assert repr(OpOsrp(np.int64(8), np.uint64(3))) == repr(OpOsrp(8, 3))  # type: ignore[arg-type]


def test_invalid_arrays_are_rejected() -> None:
    with pytest.raises(tc.ThermoclineError, match="the weight of id 1 is not finite"):
        OpOsrp(8).hash([1, 2], [0, 2], [1.0, np.nan])
    with pytest.raises(ValueError, match="offsets must begin with 0"):
        OpOsrp(8).hash([1, 2], [0, 3])
    for wrong, error in ((-1, OverflowError), (2**64, OverflowError), (1.5, TypeError), ("a", TypeError)):
        with pytest.raises(error, match=rf"keys\[1\] is {wrong!r}: keys must be whole numbers from 0 to 2\*\*64"):
            OpOsrp(8).hash([7, wrong], [0, 2])
    with pytest.raises(TypeError, match="keys have dtype int32: they must be uint64, or int64"):
        OpOsrp(8).hash(np.array([1, 2], np.int32), [0, 2])
    with pytest.raises(TypeError, match=r"CountSketch was called with a list: it takes a tc.Batch; for arrays call "):
        CountSketch(8)([1, 2])  # type: ignore[arg-type]


# ---- data and configs


def test_readme_examples(tmp_path: Path) -> None:
    """The program in the README runs, and its [data.hashing] and [precision] sections train."""
    blocks = re.findall(r"```(toml|python)\n(.*?)```", (Path(__file__).parents[2] / "README.md").read_text(), re.DOTALL)
    program = next(text for kind, text in blocks if kind == "python" and "tc.hashing" in text)
    scope: dict[str, Any] = {}
    exec(program, scope)
    assert scope["ids"].tolist() == scope["hashed"].ids.tolist()
    assert scope["ids"][3] in scope["ids"][:3]
    assert scope["table"].precision.bits == 8
    scope["table"].close()

    config = next(text for kind, text in blocks if kind == "toml" and text.startswith("# ads.toml"))
    sections = next(text for kind, text in blocks if kind == "toml" and "[data.hashing]" in text)
    lines = ["click,price,age,site,ad", *(f"{i % 2},{i},{i % 50},{i % 7},{i % 11}" for i in range(400))]
    for name in ("day_1.csv", "last.csv"):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    text = config.replace("day_*.csv.gz", str(tmp_path / "day_*.csv")).replace("last.csv", str(tmp_path / "last.csv"))
    sets = [
        f"train.run_dir={tmp_path / 'run'}",
        f"tiers.ssd={tmp_path / 'store'}",
        "tiers.mem=64MB",
        "model.hidden=[8]",
    ]
    for part in (sections, sections.replace("# range", "range").replace("# scale_lr", "scale_lr")):
        parsed = tc.Config.parse(f"{text}\n{part}", [*sets, "train.display=false", "train.tensorboard=false"])
        assert (parsed.precision.kind, parsed.data.hashing.k) == ("int8", 1 << 24)  # type: ignore[union-attr]
    assert parsed.precision.scale_lr == 0.01
    with tc.Run(parsed) as run:
        assert run.fit().progress.examples == 400


def test_synthetic_ads_and_files_hash_equally(tmp_path: Path) -> None:
    hashing = Hashing(k=3000, seed=4, fields="per_field")
    ads = tc.SyntheticAds(keys=20_000, fields=4, nonzeros=9, examples=500, batch_size=100)
    hashed = tc.SyntheticAds(keys=20_000, fields=4, nonzeros=9, examples=500, batch_size=100, hashing=hashing)
    path = tmp_path / "ads.libffm"
    assert [file.read_bytes() for file in hashed.write(path, "libffm")] == [
        file.read_bytes() for file in ads.write(tmp_path / "raw.libffm", "libffm")
    ]
    reader = tc.Reader(path, batch_size=100, format="libffm", raw_keys=True, hashing=hashing)
    assert (hashed.fields, reader.fields) == (4, 4)
    for raw, generated, read in zip(ads, hashed, reader, strict=True):
        expected = OpOsrp(3000, 4, fields="per_field")(raw)
        for other in (generated, read):
            np.testing.assert_array_equal(other.ids, expected.ids)
            np.testing.assert_array_equal(other.offsets, expected.offsets)
        assert generated.position == raw.position
    per_example = dataclasses.replace(hashing, fields="per_example")
    one = tc.Reader(path, batch_size=100, format="libffm", raw_keys=True, hashing=per_example)
    assert (one.fields, len(one.field_names), next(iter(one)).fields) == (1, 1, 1)
    assert hashed.split("test", examples=100).batch(0).ids.max() < 6000


TOML = """
[data]
train = ["train.csv"]
test = ["train.csv"]
[data.hashing]
k = 500
seed = 3
[model]
name = "dnn"
dim = 4
hidden = [8]
[tiers]
mem = "16MB"
device = "cpu"
[train]
batch_size = 64
display = false
tensorboard = false
"""


def test_config_with_hashing_trains_and_reloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(8)
    rows = [f"{rng.integers(2)},{rng.integers(3000)},{rng.integers(3000)}" for _ in range(640)]
    Path("train.csv").write_text("\n".join(["label,a,b", *rows]) + "\n")
    config = tc.Config.parse(TOML)
    assert config.data.hashing == Hashing(k=500, seed=3)
    assert tc.Config.parse(config.to_toml()) == config
    with tc.Run(config) as run:
        run.fit()
        assert run.model.features.bag.fields == (0,)
        assert 500 < run.table.dram.stats().resident <= 1000  # of 6,000 keys
    with tc.Run.load("run") as trained:
        assert trained.model.features.bag.fields == (0,)
        assert 0 <= trained.evaluate(trained.loader("test"))["auc"] <= 1
    other = tc.Config.parse(TOML, ["data.hashing.k=501"])
    with pytest.raises(tc.ConfigError, match=r"data\.hashing\.k from 500 to 501"):
        check_resume(config.resolve(), other.resolve(), "run")
    plain = dataclasses.replace(config, data=dataclasses.replace(config.data, hashing=None))
    with pytest.raises(tc.ConfigError, match=r"data\.hashing"):
        check_resume(config.resolve(), plain.resolve(), "run")


def test_invalid_config_section() -> None:
    with pytest.raises(tc.ConfigError, match=r"data\.hashing\.kind is .*op_osrp"):
        tc.Config.parse('[data.hashing]\nkind = "op-osrp"')
    with pytest.raises(tc.ConfigError, match=r"data\.hashing\.k is 0: it must be a whole number, 1 to 2\*\*40"):
        tc.Config.parse("[data.hashing]\nk = 0")
