"""Row statistics: exact in every tier, over ranks, in stores, checkpoints and state_dicts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.online import ALL, DIM, KEYS, fit, make_table, state_of, stream, train, train_rank
from helpers.ranks import run_ranks

import thermocline as tc
from thermocline.embedding.row_statistics import RowStatistics

SUBSETS = [("frequency",), ("last_step", "show"), ("click",), ("last_time", "click", "frequency"), ALL]


@pytest.fixture(scope="module")
def expected() -> dict[Any, dict[str, Any]]:
    return {names: fit(make_table("reference", "", statistics=names), stream(14)) for names in SUBSETS}


INTERPRETED = [(ALL, "hbm-ssd"), (SUBSETS[1], "hbm")]
ON_GPU = [case for case in itertools.product(SUBSETS, ("hbm", "hbm-ssd")) if case not in INTERPRETED]


@pytest.mark.parametrize(
    ("names", "tiers"),
    [
        *itertools.product(SUBSETS, ("mem", "ssd")),
        *INTERPRETED,
        *(pytest.param(*case, marks=pytest.mark.gpu) for case in ON_GPU),
    ],
)
def test_every_tier_has_the_statistics_of_the_reference(
    names: Any, tiers: str, expected: dict[Any, dict[str, Any]], tmp_path: Path
) -> None:
    table = make_table(tiers, tmp_path, statistics=names)
    assert fit(table, stream(14), depth=3, pull_window=2) == expected[names]
    table.dram.check()


@pytest.mark.parametrize("tiers", ["mem", "ssd"])
def test_rows_that_are_padded_in_memory(tiers: str, tmp_path: Path) -> None:
    """Rows of 156 bytes lie 160 bytes apart; stores have no padding. Evictions, expiry and a reopened store."""
    options: dict[str, Any] = {"dim": 16, "expiry": tc.Expiry(every=4, unused_steps=25)}
    expected = fit(make_table("reference", "", **options), stream(40))
    assert expected["expired"][1] > 20
    table = make_table(tiers, tmp_path, **options)
    assert table.dram.stats().bytes_rows == 160 * table.dram.capacity
    assert fit(table, stream(40), depth=3, pull_window=2) == expected
    table.dram.check()
    if table.store is not None:
        assert table.dram.stats().evictions > 0
        table.commit()
        table.close()
        again = make_table(tiers, tmp_path, **options)
        assert state_of(again) | {"expired": 0} == expected | {"expired": 0}


def test_counted_by_hand() -> None:
    table = tc.Table(DIM, tc.SGD(lr=0.1), statistics=ALL, mem="1MB")
    bag = tc.EmbeddingBag(table, 2)
    first = tc.Batch.from_lists([[[7, 7], 8], [7, []]], label=np.array([1.0, 0.5]), time=[100, 300])
    second = tc.Batch.from_lists([[8, 9]], label=np.array([1.0]), time=[200])
    for batch in (first, second):
        bag(batch).sum().backward()
        table.step()
    assert {name: values.tolist() for name, values in table.read_statistics([7, 8, 9, 10]).items()} == {
        "frequency": [3, 2, 1, 0],
        "last_step": [1, 2, 2, 0],
        "last_time": [300, 200, 200, 0],
        "show": [3, 2, 1, 0],
        "click": [2.5, 2, 1, 0],
    }
    assert table.read([7]).shape == (1, DIM)  # without the words of the statistics
    assert all(rows.shape[1] == DIM for _, rows in table.rows())


@pytest.mark.parametrize(("precision", "tiers"), [("fp16", "ssd"), ("int8", "ssd"), ("int3", "hbm")])
def test_codes_leave_statistics_alone(precision: Any, tiers: str, tmp_path: Path) -> None:
    expected = fit(make_table("reference", ""), stream(8))
    results = [fit(make_table(each, tmp_path, precision=precision), stream(8), depth=2) for each in ("mem", tiers)]
    assert results[0] == results[1]
    assert all(results[0][name] == expected[name] for name in ALL)


def test_weights_are_as_without_statistics() -> None:
    with_statistics = fit(make_table("mem", ""), stream(14))["rows"]
    plain = make_table("mem", "", statistics=())
    with tc.prefetch(stream(14), plain) as batches:
        train(plain, tc.EmbeddingBag(plain, 2, pooling=["sum", "mean"]), batches)
    assert plain.read(KEYS).tobytes() == with_statistics
    with pytest.raises(ValueError, match="table 't' keeps no statistics"):
        plain.read_statistics(KEYS)


@pytest.mark.parametrize("tiers", ["mem", "hbm"])
def test_clipping_and_accumulation(tiers: str) -> None:
    states = []
    for where in ("reference", tiers):
        table = make_table(where, "", accumulate=2)
        bag = tc.EmbeddingBag(table, 2)
        data = stream(10)
        for first, second in zip(data[::2], data[1::2], strict=True):
            for batch in (first, second):
                bag(batch).sum().backward()
            table.step(max_norm=1e9)
        states.append(state_of(table))
    assert states[0] == states[1]


def test_pooling_none_and_two_bags() -> None:
    states = []
    for where in ("reference", "mem", "hbm"):
        table = make_table(where, "")
        bags = [tc.EmbeddingBag(table, [1], pooling="none"), tc.EmbeddingBag(table, 2)]
        for batch in stream(8):
            (bags[0](batch).sum() + bags[1](batch).sum()).backward()
            table.step()
        states.append(state_of(table))
    assert states[0] == states[1] == states[2]


def test_two_ranks(tmp_path: Path) -> None:
    table = make_table("reference", "", accumulate=2)
    bag = tc.EmbeddingBag(table, 2, pooling=["sum", "mean"])
    empty = tc.Batch(np.empty(0, np.uint64), np.zeros(1, np.int64), 2)
    data = [stream(12, 0), [*stream(9, 1), empty, empty, empty]]
    train(table, bag, [batch for pair in zip(*data, strict=True) for batch in pair], scale=0.5, accumulate=2)
    expected = state_of(table)
    results = run_ranks(((0,), (1,)), train_rank, (12, 9), str(tmp_path), {"wire": "fp16"})
    assert [result[name] for result in results for name in ALL] == 2 * [expected[name] for name in ALL]
    results = run_ranks(((0, 1),), train_rank, (12, 9), str(tmp_path / "node"), {})
    assert all(result["rows"] == expected["rows"] for result in results)
    assert sorted(results[0]["live"] + results[1]["live"]) == expected["live"]


@pytest.mark.parametrize("tiers", ["mem", "ssd", "reference"])
def test_checkpoints_and_state_dicts_have_statistics(tiers: str, tmp_path: Path) -> None:
    expected = fit(make_table("reference", ""), stream(20))

    def opened(folder: str) -> tuple[tc.Table, torch.nn.Module]:
        table = make_table(tiers, tmp_path / folder, name="t")
        return table, torch.nn.Sequential(tc.EmbeddingBag(table, 2, pooling=["sum", "mean"]))

    table, model = opened("a")
    train(table, model[0], stream(20)[:12])
    saved = tc.state_dict(model, rows=True)
    checkpoints = tc.Checkpoints(tmp_path / "run", [table], model=model)
    checkpoints.save(step=12)
    checkpoints.close()
    table.close()
    table, model = opened("a")
    tc.Checkpoints(tmp_path / "run", [table], model=model).restore()
    train(table, model[0], stream(20)[12:])
    assert state_of(table) == expected
    table, model = opened("b")
    tc.load_state_dict(model, saved)
    train(table, model[0], stream(20)[12:])
    assert state_of(table) == expected


def test_a_store_keeps_its_statistics(tmp_path: Path) -> None:
    table = make_table("ssd", tmp_path)
    before = fit(table, stream(10))
    table.commit(b"note")
    assert table.note == b"note"
    table.close()
    assert state_of(make_table("ssd", tmp_path)) == before
    other = make_table("ssd", tmp_path / "other", statistics=["frequency", "last_step"])
    other.commit()
    other.close()
    with pytest.raises(tc.FormatError, match=r"statistics \['frequency', 'last_step'\], .* has \['last_time'\]: open"):
        make_table("ssd", tmp_path / "other", statistics=["last_time"])  # as many bytes
    plain = make_table("ssd", tmp_path / "plain", statistics=())
    plain.commit()
    plain.close()
    with pytest.raises(tc.FormatError, match=r"Statistics \['frequency'\] of table 't' take 4 bytes of a row: they"):
        make_table("ssd", tmp_path / "plain", statistics=["frequency"])


@pytest.mark.parametrize(
    ("names", "bytes_per_row"), [((), 0), (("frequency",), 4), (("last_time",), 8), (("show",), 8), (ALL, 28)]
)
def test_bytes_per_row(names: Any, bytes_per_row: int) -> None:
    assert RowStatistics.of(names).bytes == bytes_per_row
    table = tc.Table(DIM, tc.SGD(), mem="1MB", statistics=names)
    assert table.dram.row_bytes == 4 * DIM + bytes_per_row == table.spec.row_bytes


def test_saturation_and_limits() -> None:
    table = tc.Table(DIM, tc.SGD(), mem="1MB", statistics=["frequency"])
    words = np.zeros((1, DIM + 1), np.float32)
    words.view(np.uint32)[0, -1] = 2**32 - 2
    table.dram.push([5], words)
    bag = tc.EmbeddingBag(table, 1)
    for _ in range(2):
        bag(tc.Batch.from_lists([[5], [5]])).sum().backward()
        table.step()
        assert table.read_statistics([5])["frequency"].tolist() == [2**32 - 1]


@pytest.mark.parametrize(
    ("names", "more", "message"),
    [
        (["click"], {}, "keeps the statistic click, but a batch has no label"),
        (["click"], {"label": np.zeros((2, 3))}, r"one label per example: the label has shape \(2, 3\) for 2 examples"),
        (["last_time"], {}, "keeps the statistic last_time, but a batch has no event time: set Batch.time"),
    ],
)
def test_batches_must_have_what_is_counted(names: Any, more: dict[str, Any], message: str) -> None:
    table = tc.Table(DIM, tc.SGD(), mem="1MB", statistics=names)
    tc.EmbeddingBag(table, 1)(tc.Batch.from_lists([[1], [2]], **more)).sum().backward()
    with pytest.raises(ValueError, match=message):
        table.step()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["shows"], "statistics has 'shows': the statistics of rows are frequency, last_step"),
        (["show", "show"], "it must have each name once"),
    ],
)
def test_names_are_checked(names: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tc.Table(DIM, tc.SGD(), statistics=names)
    with pytest.raises(TypeError, match=r"it must be a list, such as \['show'\]"):
        tc.Table(DIM, tc.SGD(), statistics="show")  # type: ignore[arg-type]
