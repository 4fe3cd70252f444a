"""Restarts of a run over several ranks: after a killed rank, an interrupted save, with another number of ranks.

Rows are loaded ahead of 8 batches: ranks are killed and saved inside a group of the look-ahead.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.rank_training import DIMS, ONE_RANK, PAIR, TWO_BY_TWO, Job, RunOptions, keys_of
from helpers.ranks import run_failing_ranks, run_ranks
from helpers.restarts import load_and_save, load_moments, train, train_and_damage, train_and_terminate

import thermocline as tc

JOB = Job(PAIR, "adam", (40, 33))
SMALL_JOB = Job(PAIR, "sgd", (12, 12))
OPTIONS = RunOptions("two", 0.25, 4, 2, lookahead=8)
SERIAL = RunOptions("two", 0.25, 1, 1)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return the folder and the result, equal on all ranks, of a run without interruption."""
    folder = tmp_path_factory.mktemp("undisturbed")
    results = run_ranks(PAIR, functools.partial(train, resume=False), JOB, OPTIONS, str(folder))
    assert results[0] == results[1]
    assert results[0]["steps"] == 40
    assert results[0]["examples"] == 2 * (40 + 33)
    return folder, results[0]


@pytest.fixture
def undisturbed(finished_run: tuple[Path, Any]) -> Any:
    return finished_run[1]


@pytest.mark.parametrize("kill_at", [23, "run.committed:5", "run.flushed:7"])
def test_a_killed_rank(kill_at: str | int, undisturbed: Any, tmp_path: Path) -> None:
    """The other rank raises at once; the resumed run ends with the same bits."""
    start = time.monotonic()
    killed = run_failing_ranks(
        PAIR, functools.partial(train, resume=False, kill_at=kill_at), JOB, OPTIONS, str(tmp_path)
    )
    assert time.monotonic() - start < 50
    assert killed[1] == ("killed", None)
    status, trace = killed[0]
    assert status == "raised"
    assert "RankError: rank 0 of 2 (node 0) cannot continue" in trace
    assert "another rank exited" in trace
    resumed = run_ranks(PAIR, functools.partial(train, resume=True), JOB, OPTIONS, str(tmp_path))
    for result in resumed:
        assert {**result, "examples": 0} == {**undisturbed, "examples": 0}
        assert result["examples"] < undisturbed["examples"]  # it resumed from a checkpoint


def test_a_rank_killed_between_merges(tmp_path: Path) -> None:
    """The resumed run merges after the same steps, with each rank's model and moments, and ends with the same bits."""
    options = RunOptions("two", None, 4, 2)
    train_k = functools.partial(train, sync=tc.DenseSync(every=16, exact=True))
    (tmp_path / "undisturbed").mkdir()
    expected = run_ranks(PAIR, functools.partial(train_k, resume=False), JOB, options, str(tmp_path / "undisturbed"))
    killed = run_failing_ranks(PAIR, functools.partial(train_k, resume=False, kill_at=14), JOB, options, str(tmp_path))
    assert killed[1] == ("killed", None)
    resumed = run_ranks(PAIR, functools.partial(train_k, resume=True), JOB, options, str(tmp_path))
    for result in resumed:
        assert {**result, "examples": 0} == {**expected[0], "examples": 0}
        assert result["examples"] < expected[0]["examples"]
    # Another number of ranks starts with the mean of models and moments.
    two, four, one = (
        run_ranks(nodes, load_moments, JOB, options, str(tmp_path)) for nodes in (PAIR, TWO_BY_TWO, ONE_RANK)
    )
    differ = {name for name, value in two[0].items() if not same(value, two[1][name])}
    assert {name.split("/")[1] for name in differ} == {"exp_avg", "exp_avg_sq", "x"}
    for result in (*four, *one):
        for name, value in result.items():
            assert same(value, (two[0][name] + two[1][name]) * 0.5 if name in differ else two[0][name]), name
    assert all(result.keys() == two[0].keys() for result in four)
    removed = {name.split("/")[1] for name in two[0].keys() - one[0].keys()}
    assert removed == {"v_hat", "v_hat_step", "v_hat_ranks"}


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_sigterm_to_one_rank(undisturbed: Any, tmp_path: Path) -> None:
    """All ranks finish the same step, save and exit; the resumed run ends with the same bits."""
    results = run_ranks(PAIR, train_and_terminate, JOB, OPTIONS, str(tmp_path), 11)
    (step, ending, code), (other_step, _, other_code) = results
    assert step == other_step
    assert 11 < step < 40
    assert "interrupted and saved" in ending
    assert code == other_code == 128 + signal.SIGTERM
    for result in run_ranks(PAIR, functools.partial(train, resume=True), JOB, OPTIONS, str(tmp_path)):
        assert {**result, "examples": 0} == {**undisturbed, "examples": 0}


def test_damage_of_one_rank_stops_all_at_the_same_step(tmp_path: Path) -> None:
    results = run_ranks(PAIR, train_and_damage, JOB, OPTIONS, str(tmp_path), 11)
    (step, ending, error), (other_step, _, other_error) = results
    assert step == other_step
    assert 11 < step < 40
    assert "because a store is damaged: saved" in ending
    assert "another rank found damage in its store" in error
    assert "page 7 of base-1: run thermocline repair" in other_error


def test_resharding(finished_run: tuple[Path, Any], tmp_path: Path) -> None:
    """Saved by 2 ranks, loaded and saved by 2, 4, 1 and 2 ranks: always the same rows."""
    shutil.copytree(finished_run[0], tmp_path, dirs_exist_ok=True)
    loads, sizes_of_manifests = [], []
    for nodes in (PAIR, TWO_BY_TWO, ONE_RANK, PAIR):
        loads.append(run_ranks(nodes, load_and_save, JOB, OPTIONS, str(tmp_path)))
        newest = max((tmp_path / "run" / "checkpoints").glob("*.json"))
        sizes_of_manifests.append(newest.stat().st_size)
    for results in loads:
        for result in results:
            assert {name: result[name] for name in ("rows", "dense", "steps")} == {
                name: loads[0][0][name] for name in ("rows", "dense", "steps")
            }
        for name in DIMS:
            owned = [result["owned"][name] for result in results]
            assert sum(owned) == len(keys_of(JOB, name))
            assert len(results) == 1 or max(owned) < 0.8 * sum(owned)
    sizes = {len(load): size for load, size in zip(loads, sizes_of_manifests, strict=True)}
    assert sizes[4] - sizes[2] < 2 * 1000  # positions, metrics and random states are in the files of the ranks
    folders = sorted(path.name for path in (tmp_path / "wide").iterdir())
    assert folders[0].startswith("rank-00000-of-00001")  # the last two checkpoints are of one rank and of two
    assert len(folders) == 3


def test_interrupted_removal_of_old_rank_folders(tmp_path: Path) -> None:
    """Three ranks load a checkpoint of two; one is killed while it removes their folders; two ranks can still load."""
    three = ((0, 1, 2),)
    run_ranks(PAIR, functools.partial(train, resume=False), SMALL_JOB, SERIAL, str(tmp_path))
    before = run_ranks(PAIR, load_and_save, SMALL_JOB, SERIAL, str(tmp_path))[0]["rows"]
    run_ranks(three, load_and_save, SMALL_JOB, SERIAL, str(tmp_path))
    killed = functools.partial(load_and_save, kill_at="run.folder_gone:1")
    assert ("killed", None) in run_failing_ranks(three, killed, SMALL_JOB, SERIAL, str(tmp_path))
    assert any(path.name.endswith(".gone") for path in tmp_path.glob("*/*"))
    after = run_ranks(PAIR, load_and_save, SMALL_JOB, SERIAL, str(tmp_path))
    assert [result["rows"] for result in after] == [before, before]
    assert not any(path.name.endswith(".gone") for path in tmp_path.glob("*/*"))


def test_two_ranks_load_a_checkpoint_of_one_process(tmp_path: Path) -> None:
    """They read the same rows. The process's store is removed with its last checkpoint."""
    job = dataclasses.replace(SMALL_JOB, nodes=ONE_RANK)
    single = train(None, job, SERIAL, str(tmp_path), resume=False)
    files = {path.name for path in (tmp_path / "wide").iterdir()}
    first, second = (run_ranks(PAIR, load_and_save, job, SERIAL, str(tmp_path))[0] for _ in range(2))
    assert hashlib.sha256(first["rows"]["wide"]).hexdigest() == single["wide"]
    assert second["rows"] == first["rows"]
    folders = {path.name for path in (tmp_path / "wide").iterdir()}
    assert "STORE" in files
    assert not folders & files
    assert folders == {"rank-00000-of-00002", "rank-00001-of-00002"}


def test_resharding_of_memory_only_tables(tmp_path: Path) -> None:
    options = RunOptions("flat", None, 1, 1)
    run_ranks(PAIR, functools.partial(train, resume=False), SMALL_JOB, options, str(tmp_path))
    before, after = (run_ranks(nodes, load_and_save, SMALL_JOB, options, str(tmp_path)) for nodes in (PAIR, TWO_BY_TWO))
    assert all(result["rows"] == before[0]["rows"] for result in (*before, *after))
