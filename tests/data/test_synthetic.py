"""Synthetic ads: reproducible bits, Zipf's law, positions, files, presets, labels that models can learn."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import thermocline as tc
from thermocline import SyntheticAds
from thermocline.batch import Batch
from thermocline.data.ads_distribution import AdsDistribution
from thermocline.data.paper_models import mlp_parameters
from thermocline.training.metrics import auc


def contents(batch: Batch) -> list[bytes]:
    dense = b"" if batch.dense is None else np.asarray(batch.dense).tobytes()
    return [batch.ids.tobytes(), batch.offsets.tobytes(), dense, np.asarray(batch.label).tobytes()]


def joined(batches: Any) -> list[bytes]:
    """Concatenate batches; bag sizes instead of offsets, which restart in every batch."""
    parts = [(b.ids, np.diff(b.offsets), np.asarray(b.dense), np.asarray(b.label)) for b in batches]
    return [np.concatenate(column).tobytes() for column in zip(*parts, strict=True)]


SMALL: dict[str, Any] = {"keys": 500, "fields": 5, "nonzeros": (5, 20), "dense": 3, "spread": 4.0}


def test_bits_do_not_depend_on_threads_batch_size_or_order() -> None:
    ads = SyntheticAds(**SMALL, batch_size=64, examples=1000, threads=1)
    batches = list(ads)
    assert len(batches) == len(ads) == 16
    assert [len(b) for b in batches] == [64] * 15 + [40]
    again = list(SyntheticAds(**SMALL, batch_size=64, examples=1000, threads=5))
    assert [contents(b) for b in again] == [contents(b) for b in batches]
    assert [b.position for b in again] == [b.position for b in batches]
    assert [contents(b) for b in ads] == [contents(b) for b in batches]  # the next epoch
    for number in (15, 3, 0):
        assert contents(ads.batch(number)) == contents(batches[number])
    assert joined(SyntheticAds(**SMALL, batch_size=333, examples=1000)) == joined(batches)


def test_distribution_and_options_are_equivalent() -> None:
    by_options = SyntheticAds(**SMALL, seed=4, batch_size=64)
    by_distribution = SyntheticAds(AdsDistribution(**SMALL, seed=4), batch_size=64)
    overridden = SyntheticAds(AdsDistribution(**SMALL, seed=3), seed=4, batch_size=64)
    for ads in (by_distribution, overridden):
        assert contents(ads.batch(2)) == contents(by_options.batch(2))
        assert ads.batch(2).position == by_options.batch(2).position
    with pytest.raises(TypeError, match="unexpected keyword argument 'key'"):
        SyntheticAds(key=3)


def test_seeds_and_splits_differ_but_share_keys() -> None:
    ads = SyntheticAds(**SMALL, batch_size=2000)
    batches = [ads.batch(0), ads.batch(1), ads.split("valid").batch(0), ads.split("test").batch(0)]
    batches.append(SyntheticAds(**SMALL, batch_size=2000, seed=1).batch(0))
    assert len({contents(b)[0] for b in batches}) == 5
    first = set(batches[0].ids.tolist())
    assert all(len(first & set(b.ids.tolist())) > 450 for b in batches)
    dense = [batch.dense.numpy() for batch in batches]
    for a, b in itertools.combinations(dense, 2):
        assert not {row.tobytes() for row in a} & {row.tobytes() for row in b}


def test_positions_resume_exactly() -> None:
    ads = SyntheticAds(**SMALL, batch_size=100, examples=950)
    batches = list(ads)
    for number in (0, 4, 8, 9):
        position = json.loads(json.dumps(batches[number].position))
        for resumed in (SyntheticAds(**SMALL, batch_size=100, examples=950, start=position), ads.seek(position)):
            rest = list(resumed)
            assert [contents(b) for b in rest] == [contents(b) for b in batches[number + 1 :]]
            assert [b.position for b in rest] == [b.position for b in batches[number + 1 :]]
            assert len(list(resumed)) == 10  # the next epoch is whole
    assert contents(next(iter(ads.seek(200)))) == contents(batches[2])
    endless = SyntheticAds(**SMALL, batch_size=7, start=2**62 - 7)
    assert len(list(endless)) == 1


def test_positions_of_other_data_are_rejected() -> None:
    ads = SyntheticAds(**SMALL, examples=100)
    position = ads.batch(0).position
    with pytest.raises(ValueError, match="its split is 'train', but here it is 'valid'"):
        ads.split("valid").seek(position)
    with pytest.raises(ValueError, match="its config is"):
        SyntheticAds(**{**SMALL, "seed": 5}).seek(position)
    with pytest.raises(ValueError, match="its reader is None"):
        ads.seek({"example": 4})
    for wrong in (-1, 101, "4"):
        with pytest.raises(ValueError, match="not an example of this epoch"):
            ads.seek(wrong)  # type: ignore[arg-type]


@settings(max_examples=30)
@given(
    fields=st.integers(1, 12),
    ids=st.tuples(st.integers(1, 60), st.integers(0, 60)),
    keys=st.integers(10_000, 2**63),
    zipf=st.floats(0, 3),
    spread=st.floats(1, 10),
    first=st.integers(0, 2**62 - 50),
)
def test_any_shape(fields: int, ids: tuple[int, int], keys: int, zipf: float, spread: float, first: int) -> None:
    low, high = ids[0], ids[0] + ids[1]
    ads = SyntheticAds(
        keys=keys, fields=fields, nonzeros=(low, high), zipf=zipf, spread=spread, batch_size=50, base_rate=0.5
    )
    assert sum(ads.keys) == keys
    batch = next(iter(ads.seek(first)))
    sizes = np.diff(batch.offsets).reshape(-1, fields)
    assert sizes.sum(1).min() >= low
    assert sizes.sum(1).max() <= high
    assert (sizes.max(1) - sizes.min(1)).max() <= 1
    bags = np.repeat(np.arange(len(batch.offsets) - 1), np.diff(batch.offsets))
    pairs = np.stack([bags.astype(np.uint64), batch.ids], 1)
    assert len(np.unique(pairs, axis=0)) == len(pairs)  # distinct within a bag


def test_key_frequencies_follow_zipfs_law() -> None:
    ads = SyntheticAds(keys=[1000, 1000], zipf=[1.05, 0.0], batch_size=100_000)
    ids = ads.batch(0).ids.reshape(-1, 2)
    ranks = np.arange(1.0, 1001)
    for field, exponent in ((0, 1.05), (1, 0.0)):
        expected = ranks**-exponent / (ranks**-exponent).sum() * 100_000
        keys = np.array([ads._core.key_of(field, rank) for rank in range(1000)], np.uint64)
        order = np.argsort(keys)
        counts = np.empty(1000)
        counts[order] = np.bincount(np.searchsorted(keys[order], ids[:, field]), minlength=1000)
        chi = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi - 999) < 5 * (2 * 999) ** 0.5


def test_two_to_the_63_keys() -> None:
    ads = SyntheticAds(keys=2**63, fields=3, zipf=0.5, batch_size=20_000)
    batch = ads.batch(10**9)
    assert sum(ads.keys) == 2**63
    assert len(np.unique(batch.ids)) > 59_990


def test_labels_have_the_base_rate_and_follow_the_teacher() -> None:
    for options in ({"base_rate": 0.2}, {"base_rate": 0.03, "dense": 13, "nonzeros": 100, "keys": 10**9}):
        ads = SyntheticAds(batch_size=40_000, **options)  # type: ignore[arg-type]
        label = ads.batch(0).label.numpy()
        assert set(np.unique(label)) == {0, 1}
        assert label.mean() == pytest.approx(options["base_rate"], abs=0.01)
        assert 0.8 < auc(ads.true_logits(0, 40_000), label) < 0.95
    noise = SyntheticAds(batch_size=40_000, label_noise=1.0)
    assert auc(noise.true_logits(0, 40_000), noise.batch(0).label) == pytest.approx(0.5, abs=0.02)


def test_tensors_false_returns_numpy_arrays() -> None:
    plain, tensors = SyntheticAds(**SMALL, tensors=False).batch(0), SyntheticAds(**SMALL).batch(0)
    assert isinstance(plain.label, np.ndarray)
    assert isinstance(tensors.label, torch.Tensor)
    assert (tensors.dense.shape, tensors.dense.dtype, tensors.label.dtype) == (
        (4096, 3),
        torch.float32,
        torch.float32,
    )
    assert contents(plain) == contents(tensors)


# ---- files


def test_write_parquet(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    ads = SyntheticAds(**SMALL, batch_size=300, examples=1000)
    expected = SyntheticAds(**SMALL, batch_size=1000).batch(0)
    files = ads.write(tmp_path / "parts", examples_per_file=400)
    assert [f.name for f in files] == ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet"]
    table = pq.read_table(tmp_path / "parts")
    assert table.column_names == ["label", *(f"dense_{i}" for i in range(3)), *(f"field_{i}" for i in range(5))]
    assert table["label"].to_numpy().tobytes() == expected.label.numpy().tobytes()
    for i in range(3):
        assert table[f"dense_{i}"].to_numpy().tobytes() == expected.dense[:, i].numpy().tobytes()
    for field in range(5):
        column = table[f"field_{field}"].combine_chunks()
        ids, offsets, _ = expected.select([field])
        assert column.flatten().to_numpy().tobytes() == ids.tobytes()
        assert (column.offsets.to_numpy() == offsets).all()
    (one_hot,) = SyntheticAds(keys=900, fields=3).write(tmp_path / "one.parquet", examples=50)
    assert str(pq.read_schema(one_hot).field("field_2").type) == "uint64"


@pytest.mark.parametrize("format", ["libsvm", "libffm"])
def test_write_text(tmp_path: Path, format: Any) -> None:
    ads = SyntheticAds(keys=900, fields=3, nonzeros=(2, 9), examples=500)
    (file,) = ads.write(tmp_path / "ads.txt", format)
    batch = SyntheticAds(keys=900, fields=3, nonzeros=(2, 9), examples=500, batch_size=500).batch(0)
    lines = []
    for e in range(500):
        words = [str(int(batch.label[e]))]
        for f in range(3):
            for i in range(batch.offsets[e * 3 + f], batch.offsets[e * 3 + f + 1]):
                words.append(f"{f}:" * (format == "libffm") + f"{batch.ids[i]}:1")
        lines.append(" ".join(words) + "\n")
    assert file.read_text() == "".join(lines)
    assert [f.name for f in tmp_path.iterdir()] == ["ads.txt"]


def test_write_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="endless"):
        SyntheticAds(**SMALL).write(tmp_path / "a")
    with pytest.raises(ValueError, match="LibSVM and LibFFM cannot hold dense features"):
        SyntheticAds(**SMALL).write(tmp_path / "a", "libsvm", examples=5)
    with pytest.raises(ValueError, match="format is 'csv': it must be one of parquet"):
        SyntheticAds(**SMALL).write(tmp_path / "a", "csv", examples=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the epoch has 10"):
        SyntheticAds(**SMALL, examples=10).write(tmp_path / "a", examples=11)
    assert not list(tmp_path.iterdir())  # no partial file


# ---- presets


def test_presets_match_the_published_sizes() -> None:
    published = {  # nonzeros, keys, dense parameters, GB
        "A": (100, 8e9, 7e5, 300),
        "B": (100, 2e10, 2e4, 600),
        "C": (500, 6e10, 2e6, 2000),
        "D": (500, 1e11, 4e6, 6000),
        "E": (500, 2e11, 7e6, 10000),
    }
    for name, (nonzeros, keys, dense, gigabytes) in published.items():
        for scale in (1, 1000, 2e6):
            ads = SyntheticAds.preset(f"{name}/{scale}", batch_size=8)
            plan = ads.plan
            assert sum(ads.keys) == plan.keys == round(keys / scale)
            assert len(ads.batch(0).ids) == 8 * nonzeros
            assert plan.model_bytes == pytest.approx(gigabytes * 1e9 / scale)
            assert plan.row_bytes == pytest.approx(gigabytes * 1e9 / keys, rel=0.1)  # bytes per key
            assert mlp_parameters(ads.fields * plan.dim, plan.hidden) == pytest.approx(dense, rel=0.02)
            assert plan.hbm / plan.mem == pytest.approx(0.256)
    model_e = SyntheticAds.preset("e/1000").plan
    assert (model_e.keys, model_e.model_bytes) == (200_000_000, 10_000_000_000)
    assert model_e.hbm / model_e.model_bytes == pytest.approx(0.1, abs=0.005)
    assert model_e.mem / model_e.model_bytes == pytest.approx(0.4)
    custom = SyntheticAds.preset("A/1e6", seed=3, nonzeros=(50, 60), examples=10)
    assert (custom.seed, custom.nonzeros, custom.examples, custom.plan.name) == (3, (50, 60), 10, "A")


@pytest.mark.parametrize("name", ["F", "", "E1000", "E/", "E/x", "AB/10", None])
def test_unknown_presets(name: Any) -> None:
    with pytest.raises(ValueError, match="one of A, B, C, D, E"):
        SyntheticAds.preset(name)


def test_preset_errors() -> None:
    for name in ("E/0.5", "E/0", "E/1e999", "E/1..2"):
        with pytest.raises(ValueError, match="at least 1"):
            SyntheticAds.preset(name)
    with pytest.raises(ValueError, match="200 keys are too few: each of 50 fields needs 10"):
        SyntheticAds.preset("E/1e9")
    with pytest.raises(ValueError, match="only a preset has a plan"):
        SyntheticAds(**SMALL).plan  # noqa: B018


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keys": 0}, "keys is 0"),
        ({"keys": 2**63 + 1}, "1 to 2\\*\\*63"),
        ({"keys": [2**62, 2**62, 1]}, "more than 2\\^63 keys"),
        ({"keys": [3, 100], "nonzeros": 10}, "field 0 has 3 keys, but an example can have 5"),
        ({"keys": 10}, "too few"),
        ({"fields": 0}, "fields is 0"),
        ({"nonzeros": 0}, "nonzeros is 0"),
        ({"nonzeros": (5, 4)}, r"nonzeros is \(5, 4\): .*least, most"),
        ({"zipf": -1}, "exponent"),
        ({"zipf": [1.0, 1.0]}, "2 zipf exponents for 26 fields"),
        ({"spread": 0.5}, "spread is"),
        ({"dense": -1}, "dense is -1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"examples": -1}, "examples is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"split": "dev"}, "split is 'dev'"),
        ({"base_rate": 1.0}, "base_rate"),
        ({"label_noise": 2.0}, "label_noise"),
        ({"signal": -1.0}, "signal must be from 0 to 20"),
    ],
)
def test_invalid_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SyntheticAds(**options)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        *(
            ({name: value}, "a whole number")
            for name in ("fields", "dense", "batch_size", "seed")
            for value in ("a", 2.0)
        ),
        *(({name: "a"}, "a whole number") for name in ("examples", "threads")),
        *(({name: "a"}, "a number") for name in ("spread", "base_rate", "signal", "label_noise")),
        *(({"keys": value}, "a whole number, or one per field") for value in ("a", 1.5, None)),
        *(({"zipf": value}, "a number, or one per field") for value in ("a", True)),
        ({"nonzeros": 2.5}, r"a number from 1 to 2\*\*24, or \(least, most\)"),
        ({"shard": 3}, r"\(number, count\)"),
        ({"hashing": 3}, "a Hashing, or None"),
    ],
)
def test_arguments_of_invalid_type_are_named(options: dict[str, Any], rule: str) -> None:
    ((name, value),) = options.items()
    with pytest.raises(TypeError, match=rf"^{name} is {value!r}: it must be {rule}"):
        SyntheticAds(**options)


def test_numpy_numbers_are_accepted() -> None:
    plain = SyntheticAds(keys=[30, 20], zipf=[1.0, 0.5], batch_size=4)
    arrays = SyntheticAds(keys=np.array([30, 20]), zipf=np.array([1.0, 0.5]), batch_size=np.int64(4))  # type: ignore[arg-type]
    assert plain.batch(1).position == arrays.batch(1).position
    assert np.array_equal(plain.batch(1).ids, arrays.batch(1).ids)


def test_length_and_batch_index() -> None:
    with pytest.raises(TypeError, match="endless"):
        len(SyntheticAds(**SMALL))
    ads = SyntheticAds(**SMALL, examples=100, batch_size=10)
    for number in (-1, 10):
        with pytest.raises(IndexError, match=f"batch {number} is out of range: the epoch has 10 batches"):
            ads.batch(number)
    assert list(ads.split("test", examples=0)) == []
    assert "100 examples" in repr(ads)


# ---- accuracy of models on the planted labels


class Model(torch.nn.Module):
    """Logistic regression if dim is 1; else logistic regression plus an MLP."""

    def __init__(self, table: Any, fields: int, bins: int | None) -> None:
        super().__init__()
        self.bag, self.bins = tc.EmbeddingBag(table, fields), bins
        self.bias = torch.nn.Parameter(torch.zeros(1))
        self.mlp = torch.nn.Sequential(torch.nn.Linear(fields * table.dim, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def forward(self, batch: Batch) -> torch.Tensor:
        if self.bins is not None:
            batch = Batch(batch.ids % np.uint64(self.bins), batch.offsets, batch.fields)
        rows = self.bag(batch)
        linear = rows[:, :, 0].sum(1) + self.bias
        return linear if rows.shape[2] == 1 else linear + self.mlp(rows.flatten(1)).squeeze(1)


def trained_auc(ads: SyntheticAds, dim: int, bins: int | None = None) -> float:
    torch.manual_seed(0)
    table = tc.Table(dim, tc.Adagrad(lr=0.05), mem="50MB", initial=tc.Uniform(scale=0.1 if dim > 1 else 0.0))
    model = Model(table, ads.fields, bins)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for batch in ads:
        torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label).backward()
        table.step()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    test = ads.split("test", examples=40_000)
    with torch.no_grad():
        scores = np.concatenate([model(batch).numpy() for batch in test])
    return auc(scores, np.concatenate([batch.label.numpy() for batch in test]))


def test_mlp_beats_logistic_regression_and_more_bins_beat_fewer() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ads = SyntheticAds(keys=20_000, fields=9, batch_size=512, examples=150_000)
        linear = trained_auc(ads, 1)
        network = trained_auc(ads, 8)
        hashed = [trained_auc(ads, 8, bins) for bins in (4096, 1024, 256)]
    finally:
        torch.set_num_threads(threads)
    teacher = auc(ads.split("test").true_logits(0, 40_000), ads.split("test", examples=40_000)._make(0, 40_000).label)
    assert 0.6 < linear < network - 0.01
    assert network < teacher
    for more, fewer in itertools.pairwise([network, *hashed]):
        assert fewer < more - 0.003


def test_some_keys_numbers_keys_by_field_and_rank() -> None:
    ads = SyntheticAds(keys=(30, 50, 20), nonzeros=9)
    expected = [ads._core.key_of(field, rank) for field, count in enumerate(ads.keys) for rank in range(count)]
    assert ads.some_keys(0, 100).tolist() == expected
    assert ads.some_keys(25, 40).tolist() == expected[25:40]
    with pytest.raises(IndexError, match="keys 90 to 101 are out of range: there are 100"):
        ads.some_keys(90, 101)
