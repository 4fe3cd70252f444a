"""Look-ahead over ranks: owners load rows of all ranks' coming batches, and no bit depends on a hint."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact.run import DIMS
from helpers.rank_training import (
    ONE_RANK,
    PAIR,
    TWO_NODES,
    Job,
    RunOptions,
    assert_matches_reference,
    make_model,
    make_table,
    probe_keys,
    train_rank,
)
from helpers.ranks import run_failing_ranks, run_ranks
from helpers.train import bits, loss_of

import thermocline as tc
from thermocline.distributed import hint_lane
from thermocline.distributed.communicator import Groups
from thermocline.distributed.hint_lane import Hint, HintLane, decode
from thermocline.distributed.sharded_horizon import _Pipeline
from thermocline.tiers import dram_horizon

THREE = ((0, 1, 2),)
JOB = Job(PAIR, "sgd", (60, 60))
OPTIONS = RunOptions("two", 0.3, 4, 1, lookahead=8)


def late_rows(results: list[dict[str, Any]]) -> int:
    """Return the rows that the pull of their batch had to read or create."""
    return sum(stats.misses - stats.loaded_ahead for result in results for stats in result["stats"].values())


def assert_same_bits(
    job: Job, options: RunOptions, folder: Path, train: Callable[..., Any] = train_rank
) -> list[dict[str, Any]]:
    results = run_ranks(job.nodes, train, job, options, str(folder))
    assert_matches_reference(job, results)
    for result in results:
        for stats in result["stats"].values():
            assert stats.pinned == 0
            assert stats.bytes_total <= stats.budget
            assert stats.evictions > 0
        assert all(hints.received for hints in result["hints"].values())
    return results


@pytest.mark.parametrize(
    ("job", "options"),
    [
        (Job(ONE_RANK, "adam", (60,)), RunOptions("two", 0.1, 4, 1, lookahead=8)),
        (Job(PAIR, "adam", (80, 80)), RunOptions("two", 0.1, 4, 1, lookahead=1)),
        (Job(PAIR, "sgd", (80, 70)), RunOptions("flat", 0.3, 1, 4, lookahead=8)),
        (Job(THREE, "adagrad", (90, 47, 0)), RunOptions("two", 0.2, 4, 2, lookahead="auto")),
        (Job(TWO_NODES, "rowwise", (60, 60)), RunOptions("two", 0.3, 4, 1, lookahead=64)),
    ],
    ids=str,
)
def test_same_bits(job: Job, options: RunOptions, tmp_path: Path) -> None:
    assert_same_bits(job, options, tmp_path)


def train_with_other_groups(groups: Groups, job: Job, options: RunOptions, folder: str) -> dict[str, Any]:
    return train_rank(groups, job, dataclasses.replace(options, lookahead=1 + 15 * groups.topology.rank), folder)


def test_ranks_with_groups_of_other_sizes(tmp_path: Path) -> None:
    assert_same_bits(JOB, OPTIONS, tmp_path, train_with_other_groups)


# ---- unreliable hints


def train_without_hints(groups: Groups, job: Job, options: RunOptions, folder: str) -> dict[str, Any]:
    """Train; no hint arrives."""
    HintLane._deliver = lambda self, hint: None  # type: ignore[method-assign]
    result = train_rank(groups, job, options, folder)
    for hints in result["hints"].values():
        hints.received = 1
    return result


def test_hints_load_nearly_all_rows_before_their_batch(tmp_path: Path) -> None:
    late = {
        train: late_rows(assert_same_bits(JOB, OPTIONS, tmp_path / train.__name__, train))
        for train in (train_rank, train_without_hints)
    }
    assert late[train_without_hints] > 1000
    assert late[train_rank] < 0.05 * late[train_without_hints]


def train_with_unreliable_hints(groups: Groups, job: Job, options: RunOptions, folder: str) -> dict[str, Any]:
    """Train; hints are lost, delayed, repeated, reordered, and given wrong batches, keys and pipelines."""
    chance, held, deliver = random.Random(groups.topology.rank), [], HintLane._deliver

    def unreliable(self: HintLane, hint: Hint) -> None:
        match chance.randrange(8):
            case 0:
                return
            case 1 | 2:
                held.append(hint)
                return
            case 3:
                deliver(self, hint)
            case 4:
                hint = hint._replace(first=0, end=max(1, hint.end + chance.randrange(-20, 20)))
            case 5:
                hint = hint._replace(pipeline=hint.pipeline + chance.randrange(-1, 2))
            case 6:
                hint = hint._replace(keys=hint.keys ^ np.uint64(1))
            case _:
                time.sleep(0.01 * chance.random())
        deliver(self, hint)
        while held and chance.random() < 0.5:
            deliver(self, held.pop(chance.randrange(len(held))))

    HintLane._deliver = unreliable  # type: ignore[method-assign]
    return train_rank(groups, job, options, folder)


@pytest.mark.parametrize("options", [OPTIONS, RunOptions("two", 0.1, 2, 3, lookahead=4)], ids=str)
def test_unreliable_hints_do_not_change_bits(options: RunOptions, tmp_path: Path) -> None:
    assert_same_bits(Job(THREE, "adam", (60, 41, 60)), options, tmp_path, train_with_unreliable_hints)


def train_after_the_lane_failed(groups: Groups, job: Job, options: RunOptions, folder: str) -> dict[str, Any]:
    """Train; the lane fails on rank 1 in the fifth round."""
    lane_round, rounds = HintLane._round, iter(range(10**9))

    def failing(self: HintLane) -> None:
        if groups.topology.rank == 1 and next(rounds) == 4:
            raise tc.RankError("no connection")
        lane_round(self)

    HintLane._round = failing  # type: ignore[method-assign]
    return train_rank(groups, job, options, folder)


def test_a_failed_lane_does_not_stop_training(tmp_path: Path) -> None:
    start = time.monotonic()
    assert_same_bits(JOB, OPTIONS, tmp_path, train_after_the_lane_failed)
    assert time.monotonic() - start < 60


# ---- pipelines


def evaluate_while_training(groups: Groups, folder: str) -> dict[str, Any]:
    """Evaluate within training, leave loops early on purpose, and return rows, scores and counters."""
    rank = groups.topology.rank
    tables = {name: make_table(name, JOB, OPTIONS, groups, folder) for name in DIMS}
    model, scores, data = make_model(tables), [], JOB.data(rank)
    for leave in (25, 60):
        source = tc.prefetch(data, *tables.values(), depth=4)
        for n, batch in enumerate(source, start=1):
            loss_of(model, batch).backward()
            for table in tables.values():
                table.step()
            if n in (10, 40):
                model.eval()
                with torch.no_grad(), tc.prefetch(data[: 12 + 5 * rank], *tables.values(), training=False) as batches:
                    scores += [model(b).numpy().tobytes() for b in batches if b.examples]
                model.train()
            if n == leave:
                break
        source.close()
        for table in tables.values():
            table.backend.require_idle()
    rows = [bits(table.read(probe_keys(JOB))) for table in tables.values()]
    ahead = sum(table.dram.stats().read_ahead for table in tables.values())
    threads = {thread.name for thread in threading.enumerate()}
    for table in tables.values():
        table.dram.check()
        table.close()
    return {"rows": rows, "scores": scores, "ahead": ahead, "threads": threads}


def evaluate_without_hints(groups: Groups, folder: str) -> dict[str, Any]:
    HintLane._deliver = lambda self, hint: None  # type: ignore[method-assign]
    return evaluate_while_training(groups, folder)


def test_evaluation_and_early_exit(tmp_path: Path) -> None:
    results = run_ranks(PAIR, evaluate_while_training, str(tmp_path / "a"))
    expected = run_ranks(PAIR, evaluate_without_hints, str(tmp_path / "b"))
    for result, plain in zip(results, expected, strict=True):
        assert result["rows"] == plain["rows"]
        assert result["scores"] == plain["scores"]
        assert result["ahead"] > plain["ahead"] == 0
        assert "thermocline-hint-load" not in result["threads"]


def fail_inside_a_horizon(groups: Groups, folder: str) -> None:
    tables = {name: make_table(name, JOB, OPTIONS, groups, folder) for name in DIMS}
    model = make_model(tables)
    for n, batch in enumerate(tc.prefetch(JOB.data(groups.topology.rank), *tables.values(), depth=4)):
        if n == 30 and groups.topology.rank == 1:
            raise OSError("no data")
        loss_of(model, batch).backward()
        for table in tables.values():
            table.step()


def test_an_error_of_one_rank_ends_all_soon(tmp_path: Path) -> None:
    start = time.monotonic()
    outcomes = run_failing_ranks(PAIR, fail_inside_a_horizon, str(tmp_path))
    assert time.monotonic() - start < 60
    assert [status for status, _ in outcomes] == ["raised", "raised"]
    assert "RankError" in outcomes[0][1]
    assert "OSError: no data" in outcomes[1][1]


def table_of_ranks_that_differ(groups: Groups, folder: str) -> bool:
    rank = groups.topology.rank
    table = make_table("wide", JOB, dataclasses.replace(OPTIONS, lookahead=8 * rank), groups, folder)
    table.close()
    return table.backend.lookahead is None


def test_no_rank_sends_hints_if_one_has_no_look_ahead(tmp_path: Path) -> None:
    assert run_ranks(PAIR, table_of_ranks_that_differ, str(tmp_path)) == [True, True]


# ---- messages


def make_hint(rng: Any, **values: Any) -> Hint:
    return Hint(3, True, 2, 40, 44, rng.integers(0, 2**64, 20, np.uint64))._replace(**values)


def same(a: Hint, b: Hint) -> bool:
    return a[:5] == b[:5] and np.array_equal(a.keys, b.keys)


def test_hints_are_decoded_and_split() -> None:
    rng = np.random.default_rng(1)
    hints = [make_hint(rng, channel=n, training=n % 2 == 0) for n in range(5)]
    message = np.concatenate([part for hint in hints for part in hint.encode()])
    assert all(map(same, decode(message), hints))
    assert not list(decode(message[:0]))
    for cut in (message[:-1], message[:3]):
        with pytest.raises(tc.RankError, match="longer than its message"):
            list(decode(cut))
    whole = hints[0]
    for count in (0, 7, 20):
        parts = whole.split(count)
        assert same(whole._replace(keys=np.concatenate([part.keys for part in parts])), whole)
        assert len(parts[0].keys) == count


class Collector:
    """A `HintReceiver` that keeps the hints."""

    def __init__(self) -> None:
        self.hints: list[Hint] = []

    def receive(self, hint: Hint) -> None:
        self.hints.append(hint)

    def begin(self, training: bool, pipeline: int) -> None: ...

    def end(self, training: bool) -> None: ...


def post_hints(groups: Groups) -> list[Hint]:
    """Post different numbers of hints, some of several rounds."""
    hint_lane._ROUND_KEYS = 16
    rank, received = groups.topology.rank, Collector()
    lane = groups.hint_lane
    assert lane.subscribe(received) == 1
    groups.open_pipeline(True)
    for n in range(3 * rank):
        keys = np.arange(20, dtype=np.uint64) + np.uint64(100 * rank)
        number = lane.post([Hint(1, True, 1, n, n + rank, keys + np.uint64(to)) for to in range(3)])
        assert lane.wait_sent(number, 20)
    groups.train.barrier("testing")
    kept, received.hints = received.hints, []
    lane.post([make_hint(np.random.default_rng(1), channel=1)] * 3)
    groups.close_pipeline(True)  # drops the hints that were not sent
    groups.open_pipeline(False)
    number = lane.post([make_hint(np.random.default_rng(1), channel=1, training=False)] * 3)
    assert lane.wait_sent(number, 20)
    groups.train.barrier("testing")
    assert sum(len(hint.keys) for hint in received.hints if not hint.training) >= 20
    groups.close_pipeline(False)
    groups.close()
    number = lane.post([make_hint(np.random.default_rng(1))] * 3)
    assert lane.wait_sent(number, 20)  # dropped
    return kept


def test_ranks_post_different_numbers_of_hints() -> None:
    for rank, hints in enumerate(run_ranks(THREE, post_hints)):
        for sender in (1, 2):
            for n in range(3 * sender):
                parts = [hint.keys for hint in hints if (hint.first, hint.end) == (n, n + sender)]
                assert np.array_equal(np.concatenate(parts), np.arange(20) + 100 * sender + rank)
                assert len(parts) > 1
        assert sum(len(hint.keys) for hint in hints) == 9 * 20


@pytest.mark.parametrize("parts", [1, 2])  # loaded at once; 2: as in a tier of 64 MB and more
def test_hints_of_several_ranks_for_the_same_batches_are_loaded(
    parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that loads hints compares them by their batches only, and loads all of them without a notification."""
    monkeypatch.setattr(dram_horizon, "_LEAST_PARTS", parts)
    table = tc.Table(4, tc.SGD(), mem="1MB", lookahead=8, ssd=tmp_path / "rows")
    pipeline = _Pipeline(table.backend, True, 1, 1 << 20)
    rng = np.random.default_rng(2)
    try:
        for rank in range(3):
            keys = np.arange(100 * rank, 100 * rank + 100, dtype=np.uint64)
            assert pipeline.receive(make_hint(rng, training=True)._replace(first=0, end=1, keys=keys))
        deadline = time.monotonic() + 30
        while pipeline.to_visit(0) > 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert pipeline.to_visit(0) == 0
        assert table.dram.stats().pinned == 300
    finally:
        pipeline.close()
    table.dram.check()
    table.close()
