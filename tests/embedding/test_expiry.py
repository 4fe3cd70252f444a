"""Expiry: the rules of the reference in every tier, whatever was loaded ahead; returning keys; resumed training."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.online import ALL, DIM, fit, make_table, state_of, stream, train, train_rank
from helpers.ranks import run_ranks

import thermocline as tc
from thermocline.embedding.key_hash import KeyPart, hash_keys
from thermocline.embedding.reference_statistics import part_of
from thermocline.embedding.row_statistics import RowStatistics

RULES = {
    "steps": tc.Expiry(every=4, unused_steps=3),
    "seconds": tc.Expiry(every=3, unused_seconds=200),
    "norm": tc.Expiry(every=5, min_norm=0.6),
    "score": tc.Expiry(every=2, min_score=0.3, decay=0.7, nonclick_coeff=0.2),
    "cap": tc.Expiry(every=3, max_rows=20, order="last_step"),
    "floor": tc.Expiry(every=3, unused_steps=0, min_rows=25, max_rows=60, order="frequency"),
    "parts": tc.Expiry(every=5, spread=4, unused_steps=3, min_rows=30, max_rows=50, order="last_step"),
    "all": tc.Expiry(every=3, unused_steps=8, unused_seconds=600, min_norm=0.3, min_score=0.1, decay=0.9, max_rows=50),
}
STEPS = 24


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Any]]:
    return {name: fit(make_table("reference", "", expiry=rule), stream(STEPS)) for name, rule in RULES.items()}


ON_CPU = [("mem", 4, 2, 0), ("ssd", 1, 1, 0), ("ssd", 4, 3, 0), ("ssd", 3, 1, 6)]
CASES = [(rule, *tiers) for rule in RULES for tiers in ON_CPU]
CASES += [("all", "hbm-ssd", 3, 1, 5), ("parts", "hbm", 3, 2, 0)]
ON_GPU = [("hbm", 4, 2, 0), ("hbm-ssd", 3, 1, 6)]
CASES += [pytest.param(rule, *tiers, marks=pytest.mark.gpu) for rule in RULES for tiers in ON_GPU]  # type: ignore[misc]


@pytest.mark.parametrize(("rule", "tiers", "depth", "pull_window", "lookahead"), CASES)
def test_no_result_depends_on_tiers_depth_or_lookahead(
    rule: str,
    tiers: str,
    depth: int,
    pull_window: int,
    lookahead: int,
    expected: dict[str, dict[str, Any]],
    tmp_path: Path,
) -> None:
    assert expected[rule]["expired"][1] > 20  # else the test proves nothing
    table = make_table(tiers, tmp_path, expiry=RULES[rule], lookahead=lookahead)
    assert fit(table, stream(STEPS), depth, pull_window) == expected[rule]
    table.dram.check()
    if table.hbm is not None:
        table.hbm.check()


@pytest.mark.parametrize("seed", range(8))
def test_random_rules_pipelines_and_saves(seed: int, tmp_path: Path) -> None:
    """Saves, reopened tables and aborted steps at random places, in the middle of expiries too."""
    rng = np.random.default_rng(seed)
    every = int(rng.integers(1, 9))
    spread = int(rng.integers(1, every + 1)) if rng.random() < 0.8 else None
    optional: dict[str, Any] = {
        "unused_steps": int(rng.integers(0, 6)),
        "unused_seconds": int(rng.integers(60, 500)),
        "min_norm": 0.5,
        "min_score": 0.3,
        "max_rows": int(rng.integers(20, 60)),
    }
    chosen = {name: value for name, value in optional.items() if rng.random() < 0.5} or {"unused_steps": 2}
    orders = ["score", "last_step", "last_time", "frequency", "norm"]
    rule = tc.Expiry(
        every=every, spread=spread, decay=float(rng.choice([1, 0.8])), min_rows=int(rng.integers(0, 20)),
        order=str(rng.choice(orders)), **chosen,
    )  # fmt: skip
    lazy = {"optimizer": tc.Adam(lr=0.05, weight_decay=0.01, lazy="catch_up", catch_up_steps=5)} if seed % 2 else {}
    data = stream(30, seed)
    expected = fit(make_table("reference", "", expiry=rule, **lazy), data)
    deleted = done = 0
    while done < len(data):
        table = make_table("ssd", tmp_path, expiry=rule, lookahead=int(rng.choice([0, 3, 6])), **lazy)
        assert table.step_count == done
        bag = tc.EmbeddingBag(table, 2, pooling=["sum", "mean"])
        steps = min(len(data) - done, int(rng.integers(3, 16)))
        lost = int(rng.integers(0, 4))
        with tc.prefetch(
            data[done:], table, depth=int(rng.integers(1, 5)), pull_window=int(rng.integers(1, 3))
        ) as ahead:
            train(table, bag, itertools.islice(ahead, steps))
            table.commit()
            done, deleted = done + steps, deleted + table.expired.rows
            if done == len(data):
                state = state_of(table)
            train(table, bag, itertools.islice(ahead, lost))  # never committed
        table.close()
    assert {**state, "expired": deleted} == {**expected, "expired": expected["expired"][1]}
    assert deleted > 20


def test_parts_follow_the_steps() -> None:
    """A row is deleted after the step of its part, and a key that is used before that is kept."""
    rule = tc.Expiry(every=4, spread=4, unused_steps=3)
    table = make_table("mem", "", expiry=rule, statistics=["last_step"])
    bag = tc.EmbeddingBag(table, 1)

    def step(keys: list[int]) -> list[int]:
        deleted: list[int] = []
        table.on_expired[:] = [lambda gone: deleted.extend(gone.tolist())]
        bag(tc.Batch.from_lists([[key] for key in keys])).sum().backward()
        table.step()
        return sorted(deleted)

    parts = {key: part_of(key, 4) for key in range(1, 60)}
    assert [rule.part_after(n) for n in (3, 4, 7, 8)] == [None, KeyPart(0, 4), KeyPart(3, 4), KeyPart(0, 4)]
    assert all(part.lo <= int(hash_keys(np.array([key], np.uint64))[0]) <= part.hi
               for key, number in parts.items() for part in [KeyPart(number, 4)])  # fmt: skip
    rescued = next(key for key, part in parts.items() if part == 3)
    step(list(parts))
    assert [step([0]) for _ in range(3)] == [[], [], []]  # step 4 begins: no row is unused for more than 3 steps yet
    assert step([0]) == [key for key, part in parts.items() if part == 1]
    assert step([0, rescued]) == [key for key, part in parts.items() if part == 2]
    assert table.expired.runs == 0
    assert step([0]) == [key for key, part in parts.items() if part == 3 and key != rescued]
    assert (table.expired.runs, table.expired.last_rows) == (1, table.expired.rows)
    assert table.expired.last_kept == 2 + sum(part == 0 for part in parts.values())
    assert step([0]) == [key for key, part in parts.items() if part == 0]


@pytest.mark.parametrize(("precision", "tiers"), [("bf16", "ssd"), ("int4", "hbm")])
def test_codes(precision: Any, tiers: str, tmp_path: Path) -> None:
    rule = tc.Expiry(every=3, unused_steps=2)
    first, second = (
        fit(make_table(each, tmp_path, precision=precision, expiry=rule), stream(8), depth=3) for each in ("mem", tiers)
    )
    assert first == second
    assert first["expired"][1] > 20


@pytest.mark.parametrize("tiers", ["mem", "ssd", "hbm", "hbm-ssd"])
def test_a_key_that_returns_starts_anew(tiers: str, tmp_path: Path) -> None:
    table = make_table(tiers, tmp_path, expiry=tc.Expiry(every=1, unused_steps=0))
    deleted: list[int] = []
    table.on_expired.append(lambda keys: deleted.extend(keys.tolist()))
    bag = tc.EmbeddingBag(table, 1)
    initial = table.read([1, 2]).tobytes()

    def step(key: int) -> None:
        batch = tc.Batch.from_lists([[key]], label=np.array([1.0]), time=[5])
        (3 * bag(batch)).sum().backward()
        table.step()

    step(1)
    assert not deleted
    first = table.read([1]).tobytes()
    assert table.read_statistics([1])["frequency"] == 1
    step(2)
    assert deleted == [1]
    assert table.read([1]).tobytes() + table.read([2]).tobytes() != initial
    assert table.read([1]).tobytes() == initial[: len(initial) // 2]
    assert [keys.tolist() for keys, _ in table.rows()] == [[2]]
    assert table.read_statistics([1])["frequency"] == 0
    step(1)
    assert table.read([1]).tobytes() == first
    assert table.read_statistics([1])["frequency"] == 1
    assert (table.expired.runs, table.expired.rows, table.expired.last_kept) == (3, 2, 1)


def test_memory_and_disk_space_come_back(tmp_path: Path) -> None:
    table = make_table("mem", "", statistics=["last_step"])
    train(table, tc.EmbeddingBag(table, 2), stream(20))
    resident = table.dram.stats().resident
    table.expire(tc.Expiry(every=1, unused_steps=0))
    assert table.dram.stats().resident < resident
    assert table.dram.stats().free + table.dram.stats().resident == table.dram.capacity
    table.dram.check()

    table = make_table("ssd", tmp_path, statistics=["last_step"])
    train(table, tc.EmbeddingBag(table, 2), stream(20))
    keys = np.unique(np.concatenate([batch.ids for batch in stream(20)]))
    assert table.expire(tc.Expiry(every=1, unused_steps=10**9)) == 0
    deleted = table.expire(tc.Expiry(every=1, unused_steps=0))
    assert deleted > 20
    table.commit()
    table.close()
    again = make_table("ssd", tmp_path, statistics=["last_step"])
    assert sum(len(found) for found, _ in again.rows()) == len(keys) - deleted
    assert again.store is not None
    again.store.merge()
    assert again.store.stats().rows_in_base == len(keys) - deleted


@pytest.mark.parametrize("lost", [1, 4])
def test_resumed_training_has_the_same_bits(lost: int, tmp_path: Path) -> None:
    """The process ends `lost` steps after a commit: an expiry of those steps never happened."""
    expected = fit(make_table("reference", "", expiry=RULES["all"]), stream(STEPS))
    folder, done, runs, rows = tmp_path, 0, 0, 0
    while done < STEPS:
        table = make_table("ssd", folder, expiry=RULES["all"], lookahead=4)
        assert table.step_count == done
        bag = tc.EmbeddingBag(table, 2, pooling=["sum", "mean"])
        data = stream(STEPS)
        with tc.prefetch(data[done:], table, depth=3) as batches:
            for _ in range(6):
                train(table, bag, [next(batches)])
        table.commit()
        done, runs, rows = done + 6, runs + table.expired.runs, rows + table.expired.rows
        if done < STEPS:
            with tc.prefetch(data[done:], table, depth=3) as batches:
                for _ in range(lost):
                    train(table, bag, [next(batches)])
        else:
            state = state_of(table)
        table.close()
    assert (runs, rows) == expected["expired"][:2]
    assert {**state, "expired": None} == {**expected, "expired": None}


@pytest.mark.parametrize("tiers", ["mem", "ssd"])
def test_checkpoints_after_an_expiry(tiers: str, tmp_path: Path) -> None:
    """Of a table without ssd too: the store of its checkpoints loses the rows, and a resumed run decays alike."""
    expected = fit(make_table("reference", "", expiry=RULES["score"]), stream(20))
    table = make_table(tiers, tmp_path, expiry=RULES["score"])
    model = torch.nn.Sequential(tc.EmbeddingBag(table, 2, pooling=["sum", "mean"]))
    checkpoints = tc.Checkpoints(tmp_path / "run", [table], model=model)
    train(table, model[0], stream(20)[:5])
    checkpoints.save(step=5)
    train(table, model[0], stream(20)[5:11])
    checkpoints.save(step=11)
    train(table, model[0], stream(20)[11:13])
    checkpoints.restore()
    train(table, model[0], stream(20)[11:])
    assert {**state_of(table), "expired": None} == {**expected, "expired": None}


def test_parts_of_an_expiry() -> None:
    assert tc.Expiry(every=10, unused_steps=1).parts == 10
    assert tc.Expiry(every=10**6, unused_steps=1).parts == 1000
    assert tc.Expiry(every=10**6, max_rows=50_000).parts == 5
    assert tc.Expiry(every=10**6, max_rows=10**9, min_rows=30_000).parts == 3
    assert tc.Expiry(every=10**6, max_rows=50).parts == 1
    assert tc.Expiry(every=10**6, spread=7, max_rows=50).parts == 7
    for count in (1, 3, 7, 1000):
        parts = [KeyPart(number, count) for number in range(count)]
        assert [part.lo for part in parts] == [0, *(part.hi + 1 for part in parts[:-1])]
        assert parts[-1].hi == 2**64 - 1
        assert sum(part.share(1001) for part in parts) == 1001


def test_two_ranks(tmp_path: Path) -> None:
    rule = tc.Expiry(every=3, unused_steps=4, unused_seconds=400, min_norm=0.2, min_score=0.1, decay=0.9)
    table = make_table("reference", "", accumulate=2, expiry=rule)
    bag = tc.EmbeddingBag(table, 2, pooling=["sum", "mean"])
    pairs = [batch for pair in zip(stream(14, 0), stream(14, 1), strict=True) for batch in pair]
    train(table, bag, pairs, scale=0.5, accumulate=2)
    expected = state_of(table)
    results = run_ranks(((0, 1),), train_rank, (14, 14), str(tmp_path), {"expiry": rule, "lookahead": 4})
    for result in results:
        assert {name: result[name] for name in ("rows", *ALL)} == {name: expected[name] for name in ("rows", *ALL)}
    assert sorted(results[0]["live"] + results[1]["live"]) == expected["live"]
    assert sum(result["expired"][1] for result in results) == expected["expired"][1] > 20


@pytest.mark.parametrize("order", ["score", "last_step", "norm"])
def test_two_ranks_keep_the_rows_of_one_process_up_to_a_cap(order: Any, tmp_path: Path) -> None:
    """Many rows have the same last step: those with the smallest keys go first, whichever rank has them."""
    rule = tc.Expiry(every=3, unused_steps=2, min_rows=37, max_rows=41, order=order)
    table = make_table("reference", "", accumulate=2, expiry=rule)
    bag = tc.EmbeddingBag(table, 2, pooling=["sum", "mean"])
    pairs = [batch for pair in zip(stream(9, 0), stream(9, 1), strict=True) for batch in pair]
    train(table, bag, pairs, scale=0.5, accumulate=2)
    expected = state_of(table)
    assert len(expected["live"]) in (37, 41)
    results = run_ranks(((0, 1),), train_rank, (9, 9), str(tmp_path), {"expiry": rule})
    assert sorted(results[0]["live"] + results[1]["live"]) == expected["live"]
    assert results[0]["rows"] == expected["rows"]


@pytest.mark.parametrize(("tiers", "depth", "lookahead"), [("mem", 4, 0), ("ssd", 3, 5)])
def test_admission_counts_deleted_keys_from_0(tiers: str, depth: int, lookahead: int, tmp_path: Path) -> None:
    options: Any = {"admission": tc.Admission(count=2, otherwise="zero"), "expiry": tc.Expiry(every=3, unused_steps=2)}
    expected = fit(make_table("reference", "", **options), stream(STEPS))
    assert expected["expired"][1] > 20
    assert fit(make_table(tiers, tmp_path, lookahead=lookahead, **options), stream(STEPS), depth) == expected
    table = make_table("mem", "", admission=tc.Admission(count=2))
    bag = tc.EmbeddingBag(table, 2)
    with tc.prefetch(stream(4), table, depth=2) as batches:
        train(table, bag, [next(batches)])
        with pytest.raises(tc.ThermoclineError, match=r"expire\(\) of a table without expiry=... while a training"):
            table.expire(tc.Expiry(every=3, unused_steps=2))


def test_decay_rates_may_change(tmp_path: Path) -> None:
    states = []
    for tiers in ("reference", "mem", "hbm"):
        table = make_table(tiers, tmp_path)
        bag = tc.EmbeddingBag(table, 2)
        for number, batch in enumerate(stream(7)):
            train(table, bag, [batch])
            table.expire(tc.Expiry(every=1, decay=0.5 if number % 3 else 0.9, min_score=0.01))
        states.append(state_of(table))
    assert states[0] == states[1] == states[2]


def test_gradients_must_be_applied_first() -> None:
    table = make_table("mem", "")
    tc.EmbeddingBag(table, 2)(stream(1)[0]).sum().backward()
    with pytest.raises(tc.ThermoclineError, match=r"table 't': expire\(\) with gradients that no step has applied"):
        table.expire(RULES["steps"])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"every": 0, "max_rows": 1}, "Expiry.every is 0: it must be a number of steps from 1"),
        ({"every": 1}, "Expiry has no rule: give at least one"),
        ({"every": 4, "spread": 5, "max_rows": 1}, "Expiry.spread is 5: it must be at most every, 4 steps"),
        ({"every": 1, "min_score": 1, "decay": 0}, "Expiry.decay is 0: it must be a number above 0 and up to 1"),
        ({"every": 1, "max_rows": 3, "min_rows": 4}, "Expiry.min_rows is 4: it must be at most max_rows, 3"),
        ({"every": 1, "max_rows": 3, "order": "age"}, "Expiry.order is 'age': it must be one of score, last_step"),
        ({"every": 1, "unused_steps": -1}, "Expiry.unused_steps is -1"),
        ({"every": 1, "min_norm": float("nan")}, "Expiry.min_norm is nan"),
    ],
)
def test_rules_are_checked(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tc.Expiry(**rule)


@pytest.mark.parametrize(
    ("rule", "missing"),
    [
        ({"unused_steps": 3}, "'last_step'"),
        ({"unused_seconds": 3}, "'last_time'"),
        ({"min_score": 3}, "'show'"),
        ({"max_rows": 3, "order": "frequency"}, "'frequency'"),
    ],
)
def test_rules_need_statistics(rule: dict[str, Any], missing: str) -> None:
    with pytest.raises(ValueError, match=f"it needs the statistic {missing}, but rows have \\[\\]: add it to"):
        tc.Table(DIM, tc.SGD(), mem="1MB", expiry=tc.Expiry(every=1, **rule))
    assert tc.Expiry(every=1, max_rows=3).checked(RowStatistics()).order == "norm"


@pytest.mark.parametrize("tiers", ["reference", "mem", "ssd", "hbm"])
def test_a_norm_that_is_nan_is_below_all_others(tiers: str, tmp_path: Path) -> None:
    """NaN of either sign: processors give both. A cap deletes such rows first, and any min_norm deletes them."""
    broken = np.array([0x7FC00000, 0xFFC00000], np.uint32).view(np.float32)

    def table_of(name: str) -> tc.Table:
        table = make_table(tiers, tmp_path / name, statistics=())
        values = np.full((6, DIM), 0.5, np.float32)
        values[[1, 4], [0, 2]] = broken
        values[5, 0] = np.inf
        table.load_rows(np.arange(6, dtype=np.uint64), values)
        return table

    def left(table: tc.Table) -> list[int]:
        return sorted(int(key) for keys, _ in table.rows() for key in keys)

    for number, (rule, kept) in enumerate(
        [
            ({"max_rows": 5}, [0, 2, 3, 4, 5]),
            ({"max_rows": 3}, [2, 3, 5]),
            ({"min_norm": 0.0}, [0, 2, 3, 5]),
            ({"min_norm": 1.0}, [5]),
            ({"min_norm": 0.0, "min_rows": 5}, [0, 2, 3, 4, 5]),
        ]
    ):
        table = table_of(str(number))
        table.expire(tc.Expiry(every=1, order="norm", **rule))
        assert left(table) == kept, rule


@pytest.mark.parametrize("tiers", ["reference", "mem", "ssd", "hbm"])
def test_norms_are_those_of_rows_that_have_caught_up(tiers: str, tmp_path: Path) -> None:
    """An unused row that decays below min_norm is deleted, although its stored weights are those of its last step."""
    decaying = tc.SGD(lr=0.5, weight_decay=0.5, lazy="catch_up")
    table = make_table(tiers, tmp_path, optimizer=decaying, statistics=())
    bag = tc.EmbeddingBag(table, 1)
    for key in [1] + [2] * 20:
        bag(tc.Batch.from_lists([[key]])).sum().backward()
        table.step()
    assert np.linalg.norm(table.read_rows([1])[0]) < 0.01
    assert table.expire(tc.Expiry(every=1, min_norm=0.01)) == 1
    assert [keys.tolist() for keys, _ in table.rows()] == [[2]]
