"""A run over several ranks survives: a rank that is killed, a save cut short, another number of ranks."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.rank_training import DIMS, FOUR, ONE, PAIR, Job, Way
from helpers.ranks import Nodes, outcomes, play
from helpers.restarts import interrupted, live, load, moments, trained_keys

import thermocline as tc

JOB = Job(PAIR, "adam", (40, 33))
SMALL_JOB = Job(PAIR, "sgd", (12, 12))
WAY = Way("two", 0.25, 4, 2)


@functools.cache
def never_killed(job: Job, way: Way, folder: str) -> list[Any]:
    return play(job.nodes, functools.partial(live, resume=False), job, way, folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the run gives when nothing happens to it: on all ranks the same."""
    results = never_killed(JOB, WAY, str(tmp_path_factory.mktemp("whole")))
    assert results[0] == results[1]
    assert results[0]["steps"] == 40
    assert results[0]["examples"] == 2 * (40 + 33)
    return results[0]


@pytest.mark.parametrize("dies", [23, "run.committed:5", "run.flushed:7"])
def test_a_rank_is_killed(dies: str | int, whole: Any, tmp_path: Path) -> None:
    """The others end at once and say so; resumed, the run ends with the same bits."""
    start = time.monotonic()
    fallen = outcomes(PAIR, functools.partial(live, resume=False, dies=dies), JOB, WAY, str(tmp_path))
    assert time.monotonic() - start < 50
    assert fallen[1] == ("died", None)
    how, words = fallen[0]
    assert how == "failed"
    assert "RankError: rank 0 of 2 (node 0) cannot go on" in words
    assert "another rank was lost" in words
    resumed = play(PAIR, functools.partial(live, resume=True), JOB, WAY, str(tmp_path))
    for result in resumed:
        assert {**result, "examples": 0} == {**whole, "examples": 0}
        assert result["examples"] < whole["examples"]  # it did go on from a checkpoint


def test_a_rank_is_killed_between_merges(tmp_path: Path) -> None:
    """Resumed, it merges after the steps it would have merged after, with each rank's own moments: the same bits."""
    way, sync = Way("two", None, 4, 2), tc.DenseSync(every=16, exact=True)
    lives = functools.partial(live, sync=sync)
    (tmp_path / "whole").mkdir()
    whole = play(PAIR, functools.partial(lives, resume=False), JOB, way, str(tmp_path / "whole"))
    fallen = outcomes(PAIR, functools.partial(lives, resume=False, dies=14), JOB, way, str(tmp_path))
    assert fallen[1] == ("died", None)
    resumed = play(PAIR, functools.partial(lives, resume=True), JOB, way, str(tmp_path))
    for result in resumed:
        assert {**result, "examples": 0} == {**whole[0], "examples": 0}
        assert result["examples"] < whole[0]["examples"]
    # Another number of ranks goes on with the means of their moments.
    two, four, one = (play(nodes, moments, JOB, way, str(tmp_path)) for nodes in (PAIR, FOUR, ONE))
    differ = {name for name, value in two[0].items() if name != "dense" and not same(value, two[1][name])}
    assert {name.split("/")[1] for name in differ} == {"exp_avg", "exp_avg_sq"}
    for result in (*four, *one):
        assert result["dense"] == two[0]["dense"]
        for name, value in result.items():
            assert same(value, (two[0][name] + two[1][name]) * 0.5 if name in differ else two[0][name]), name
    assert all(result.keys() == two[0].keys() for result in four)
    gone = {name.split("/")[1] for name in two[0].keys() - one[0].keys()}
    assert gone == {"v_hat", "v_hat_step", "v_hat_ranks"}


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_one_rank_is_told_to_end(whole: Any, tmp_path: Path) -> None:
    """SIGTERM to one rank: all finish the same step, save and end; resumed, the run ends with the same bits."""
    (step, ending, code), (other, _, killed) = play(PAIR, interrupted, JOB, WAY, str(tmp_path), 11)
    assert step == other
    assert 11 < step < 40
    assert "interrupted and saved" in ending
    assert code == killed == 128 + signal.SIGTERM
    for result in play(PAIR, functools.partial(live, resume=True), JOB, WAY, str(tmp_path)):
        assert {**result, "examples": 0} == {**whole, "examples": 0}


def test_other_numbers_of_ranks(whole: Any, tmp_path: Path) -> None:
    """Saved by 2, loaded by 4, saved by these and loaded by 1, and by 2 again: always the same rows."""
    play(PAIR, functools.partial(live, resume=False), JOB, WAY, str(tmp_path))
    ways: list[tuple[Nodes, int]] = [(PAIR, 2), (FOUR, 4), (ONE, 1), (PAIR, 2)]
    found = [play(nodes, load, JOB, WAY, str(tmp_path)) for nodes, _ in ways]
    for (_, world), results in zip(ways, found, strict=True):
        for result in results:
            assert {name: result[name] for name in ("rows", "dense", "steps")} == {
                name: found[0][0][name] for name in ("rows", "dense", "steps")
            }
        for name in DIMS:
            held = [result["held"][name] for result in results]
            assert sum(held) == len(trained_keys(JOB, name))
            assert world == 1 or max(held) < 0.8 * sum(held)
    left = sorted(path.name for path in (tmp_path / "wide").iterdir())
    assert left[0].startswith("rank-00000-of-00001")  # the last two checkpoints are those of one rank and of two
    assert len(left) == 3


def test_a_removal_cut_short(tmp_path: Path) -> None:
    """Of the folders of two ranks, by one of the three that took over: two can still begin where those ended."""
    way, three = Way("two", 0.25, 1, 1), ((0, 1, 2),)
    play(PAIR, functools.partial(live, resume=False), SMALL_JOB, way, str(tmp_path))
    before = play(PAIR, load, SMALL_JOB, way, str(tmp_path))[0]["rows"]
    play(three, load, SMALL_JOB, way, str(tmp_path))
    killed = functools.partial(load, dies="run.folder_gone:1")
    assert ("died", None) in outcomes(three, killed, SMALL_JOB, way, str(tmp_path))
    assert any(path.name.endswith(".gone") for path in tmp_path.glob("*/*"))
    after = play(PAIR, load, SMALL_JOB, way, str(tmp_path))
    assert [result["rows"] for result in after] == [before, before]
    assert not any(path.name.endswith(".gone") for path in tmp_path.glob("*/*"))


def test_ranks_take_over_from_one_process(tmp_path: Path) -> None:
    """Its rows are theirs; its stores go with its last checkpoint, and until then stay."""
    job = dataclasses.replace(SMALL_JOB, nodes=ONE)
    way = Way("two", 0.25, 1, 1)
    alone = live(None, job, way, str(tmp_path), resume=False)
    files = {path.name for path in (tmp_path / "wide").iterdir()}
    first, second = (play(PAIR, load, job, way, str(tmp_path))[0] for _ in range(2))
    assert hashlib.sha256(first["rows"]["wide"]).hexdigest() == alone["wide"]
    assert second["rows"] == first["rows"]
    left = {path.name for path in (tmp_path / "wide").iterdir()}
    assert "STORE" in files
    assert not left & files
    assert left == {"rank-00000-of-00002", "rank-00001-of-00002"}


def test_memory_only_tables_reshard(tmp_path: Path) -> None:
    way = Way("flat", None, 1, 1)
    play(PAIR, functools.partial(live, resume=False), Job(PAIR, "sgd", (12, 12)), way, str(tmp_path))
    before, after = (play(nodes, load, Job(PAIR, "sgd", (12, 12)), way, str(tmp_path)) for nodes in (PAIR, FOUR))
    assert all(result["rows"] == before[0]["rows"] for result in (*before, *after))
