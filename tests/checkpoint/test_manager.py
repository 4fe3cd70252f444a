"""Checkpoints: a restore is bit-identical, and a crash at any point of a save leaves a valid checkpoint."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import run as run_helpers
from helpers.run import ADS, OPTIMIZERS, STORAGES, World, checkpoints_of, differing, folder_of, trained

import thermocline as tc
from thermocline.checkpoint import manager, rank_states, state_tree, table_stores
from thermocline.checkpoint.manager import Checkpoints
from thermocline.embedding.optimizers import Adagrad
from thermocline.embedding.table import Table
from thermocline.utils import atomic_file

worlds = run_helpers.worlds  # the fixture


# ---- bit-identical restore


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("optimizers", OPTIMIZERS)
def test_resumed_run_equals_uninterrupted_run(tmp_path: Path, storage: str, optimizers: str) -> None:
    reference = trained(None, 12, optimizers)
    for stop in (1, 5, 11):
        path = tmp_path / str(stop)
        folder = folder_of(storage, path)
        world = World(folder, optimizers)
        checkpoints = checkpoints_of(world, path)
        assert checkpoints.restore() is None
        for batch in map(ADS.batch, range(stop)):
            world.step(batch)
            if stop < 11 or batch.position["batch"] > 8:  # several saves; the last is restored
                checkpoints.save(batch.position["batch"], batch.position, {"stop": stop})
        bits = world.bits()
        world.step(ADS.batch(stop))  # trained but not saved
        world.close()

        world = World(folder, optimizers)
        torch.manual_seed(99)
        saved = checkpoints_of(world, path).restore()
        assert saved is not None
        assert (saved.step, saved.position, saved.extra) == (stop, {"batch": stop}, {"stop": stop})
        assert differing(world.bits(), bits) == []
        world.train(ADS.seek(saved.position), depth=3)
        assert differing(world.bits(), reference) == []
        world.close()


@pytest.mark.parametrize("storage", STORAGES)
def test_save_during_a_pipeline_is_at_a_step_boundary(tmp_path: Path, worlds: Any, storage: str) -> None:
    folder = folder_of(storage, tmp_path)
    world = worlds(folder)
    checkpoints = checkpoints_of(world, tmp_path)
    from thermocline.pipeline.prefetch import prefetch

    with prefetch(ADS, *world.tables, depth=4, pull_window=2) as batches:
        for batch in batches:
            world.step(batch)
            if batch.position["batch"] == 5:
                checkpoints.save(5, batch.position)
                with pytest.raises(tc.ThermoclineError, match=r"close tc\.prefetch"):
                    checkpoints.restore()
    world.close()
    again = worlds(folder)
    assert checkpoints_of(again, tmp_path).restore() is not None
    assert differing(again.bits(), trained(None, 5)) == []


@pytest.mark.parametrize("storage", STORAGES)
def test_restore_in_one_process_to_any_kept_step_or_tag(tmp_path: Path, worlds: Any, storage: str) -> None:
    world = worlds(folder_of(storage, tmp_path))
    checkpoints = checkpoints_of(world, tmp_path, keep=3)
    bits = {}
    for n in range(6):
        world.step(ADS.batch(n))
        checkpoints.save(n + 1, tag="best" if n == 1 else None)
        bits[n + 1] = world.bits()
    for which, step in (("best", 2), (4, 4), (None, 6), (5, 5)):
        saved = checkpoints.restore(which)
        assert saved is not None
        assert saved.step == step
        assert differing(world.bits(), bits[step]) == []
    # Training continues from the restored step, and the next save is the newest.
    world.step(ADS.batch(5))
    assert differing(world.bits(), bits[6]) == []
    checkpoints.save(6)
    world.step(ADS.batch(6))
    assert checkpoints.restore().step == 6  # type: ignore[union-attr]
    assert differing(world.bits(), bits[6]) == []
    with pytest.raises(tc.NotFoundError, match=r"no checkpoint 3; it has step 2 \(best\), step"):
        checkpoints.restore(3)


def test_run_killed_before_its_first_save_restarts(tmp_path: Path, worlds: Any) -> None:
    for storage in STORAGES:
        path = tmp_path / storage
        for _ in range(3):
            world = worlds(folder_of(storage, path))
            assert checkpoints_of(world, path).restore() is None
            world.train(ADS.batch(n) for n in range(4))
            assert differing(world.bits(), trained(None, 4)) == []
            world.close()


def test_dense_state_round_trip(tmp_path: Path) -> None:
    table = Table(2, Adagrad(), mem="1MB", ssd_mem="16MB")
    tied = torch.nn.Linear(3, 3)
    model = torch.nn.ModuleDict({"a": tied, "b": tied, "c": torch.nn.Linear(3, 3).to(torch.bfloat16)})
    groups = [{"params": tied.parameters(), "lr": 0.1}, {"params": model["c"].parameters()}]
    optimizers = [torch.optim.AdamW(groups, lr=0.01), torch.optim.SGD(tied.parameters(), lr=0.1, momentum=0.9)]
    checkpoints = Checkpoints(tmp_path, [table], model, optimizers)
    for _ in range(3):
        loss = tied(torch.ones(3)).sum() + model["c"](torch.ones(3, dtype=torch.bfloat16)).sum().float()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    saved = [optimizer.state_dict() for optimizer in optimizers]
    expected = [repr(s) for s in saved], repr(model.state_dict())
    checkpoints.save(3)
    for parameter in model.parameters():
        parameter.data.zero_()
    optimizers[0].param_groups[0]["lr"] = 7.0
    optimizers[1].state.clear()
    checkpoints.restore()
    assert ([repr(o.state_dict()) for o in optimizers], repr(model.state_dict())) == expected
    checkpoints.close()


# ---- retention and cost


@pytest.mark.parametrize("storage", STORAGES)
def test_only_the_last_saves_and_the_tags_are_kept(tmp_path: Path, worlds: Any, storage: str) -> None:
    world = worlds(folder_of(storage, tmp_path))
    checkpoints = checkpoints_of(world, tmp_path, keep=2)
    for n in range(7):
        world.step(ADS.batch(n))
        checkpoints.save(n + 1, tag={0: "best", 2: "best", 3: "odd"}.get(n))
    assert [(saved.step, saved.tag) for saved in checkpoints.saved()] == [(3, "best"), (4, "odd"), (6, None), (7, None)]
    files = {file.name for file in (tmp_path / "run" / "checkpoints").iterdir()}
    assert files == {f"{n + 1:08}.{kind}" for n in (3, 4, 6, 7) for kind in ("json", "safetensors")}
    for table in world.tables:
        store = table.store or table.checkpoint_store
        assert store.epochs == (4, 5, 7, 8)


@pytest.mark.parametrize("storage", STORAGES)
def test_save_writes_only_dirty_rows(tmp_path: Path, worlds: Any, storage: str) -> None:
    world = worlds(folder_of(storage, tmp_path))
    table = world.tables[0]
    table.dram.push(np.arange(5000, dtype=np.uint64), np.ones((5000, 8), np.float32))
    checkpoints = checkpoints_of(world, tmp_path)
    flushed = table.dram.stats().flushed
    assert flushed >= 5000
    table.dram.push(np.arange(7, dtype=np.uint64), np.zeros((7, 8), np.float32))
    checkpoints.save(1)
    assert table.dram.stats().flushed == flushed + 7
    checkpoints.save(2)
    assert table.dram.stats().flushed == flushed + 7


# ---- crashes


class Crash(BaseException):
    """Derives from BaseException, so that no handler for Exception catches it."""


def crash_at(monkeypatch: pytest.MonkeyPatch, nth: int) -> list[str]:
    """Raise at the nth failpoint; return the list to which the passed failpoints are added."""
    passed: list[str] = []

    def failpoint(point: str) -> None:
        passed.append(point)
        if len(passed) == nth:
            raise Crash(point)

    monkeypatch.setattr(atomic_file, "failpoint", failpoint)
    for module in (manager, rank_states, table_stores):
        monkeypatch.setattr(module, "failpoint", failpoint)
    return passed


@pytest.mark.parametrize("storage", STORAGES)
def test_crash_at_any_failpoint_of_a_save_leaves_a_valid_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    after = {n: trained(None, n) for n in (3, 4, 5, 6)}
    seen: set[str] = set()
    nth = 0
    while True:
        nth += 1
        path = tmp_path / str(nth)
        world = World(folder_of(storage, path))
        checkpoints = checkpoints_of(world, path, keep=1)
        for n in range(4):
            world.step(ADS.batch(n))
            if n != 1:
                checkpoints.save(n + 1, {"batch": n + 1})
        world.step(ADS.batch(4))
        passed = crash_at(monkeypatch, nth)
        try:
            checkpoints.save(5, {"batch": 5})
            crashed = False
        except Crash:
            crashed = True
        monkeypatch.undo()
        seen.update(passed)
        world.close()

        world = World(folder_of(storage, path))
        checkpoints = checkpoints_of(world, path, keep=1)
        saved = checkpoints.restore()
        assert saved is not None
        assert saved.step == (5 if passed.count("run.file_renamed") == 2 else 4)  # the dense file and the manifest
        assert differing(world.bits(), after[saved.step]) == []
        # The next save removes all leftovers of the crash.
        world.train(ADS.batch(n) for n in range(saved.step, 6))
        assert differing(world.bits(), after[6]) == []
        checkpoints.save(6, {"batch": 6})
        assert len(list((path / "run" / "checkpoints").iterdir())) == 2
        assert all(len((table.store or table.checkpoint_store).epochs) == 1 for table in world.tables)
        world.close()
        shutil.rmtree(path)
        if not crashed:
            break
    assert {"run.flushed", "run.committed", "run.dense_published", "run.file_synced", "run.published"} < seen
    assert {"run.manifest_removed", "run.epoch_released", "run.file_removed", "run.done"} < seen
    assert nth > 15


@pytest.mark.parametrize("storage", STORAGES)
def test_run_starts_after_a_crash_during_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    for nth in range(1, 20):
        path = tmp_path / str(nth)
        world = World(folder_of(storage, path))
        passed = crash_at(monkeypatch, nth)
        try:
            checkpoints_of(world, path)
            crashed = False
        except Crash:
            crashed = True
        monkeypatch.undo()
        world.close()
        world = World(folder_of(storage, path))
        assert checkpoints_of(world, path).restore() is None
        world.train(ADS.batch(n) for n in range(3))
        assert differing(world.bits(), trained(None, 3)) == []
        world.close()
        if not crashed:
            break
    assert passed[-1] == "run.done"


def test_failed_save_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worlds: Any) -> None:
    world = worlds(None)
    checkpoints = checkpoints_of(world, tmp_path)
    world.step(ADS.batch(0))
    for nth in (3, 5, 7, 9):
        crash_at(monkeypatch, nth)
        with pytest.raises(Crash):
            checkpoints.save(1)
        monkeypatch.undo()
    checkpoints.save(1)
    bits = world.bits()
    world.close()
    again = worlds(None)
    assert checkpoints_of(again, tmp_path).restore() is not None
    assert differing(again.bits(), bits) == []


@pytest.mark.parametrize("storage", STORAGES)
def test_save_is_refused_after_an_interrupted_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worlds: Any, storage: str
) -> None:
    """Interrupted between two tables."""
    world = worlds(folder_of(storage, tmp_path))
    checkpoints = checkpoints_of(world, tmp_path)
    for n in range(3):
        world.step(ADS.batch(n))
        checkpoints.save(n + 1)
    bits = world.bits()
    world.step(ADS.batch(3))
    reopen, second = Table.reopen, world.tables[1]

    def interrupted(table: Table, epoch: int | None = None) -> None:
        if table is second:
            raise Crash
        reopen(table, epoch)

    def interrupted_replace(*_: object) -> None:
        raise Crash

    if storage == "ssd":
        monkeypatch.setattr(Table, "reopen", interrupted)
    else:
        monkeypatch.setattr(second.backend, "replace_rows", interrupted_replace)
    with pytest.raises(Crash):
        checkpoints.restore()
    monkeypatch.undo()
    with pytest.raises(tc.ThermoclineError, match="restore"):
        checkpoints.save(4)
    assert checkpoints.restore() is not None
    assert differing(world.bits(), bits) == []


def test_closing_a_table_releases_the_lock_of_its_checkpoints(tmp_path: Path, worlds: Any) -> None:
    """In one process, as in a notebook: tables without `ssd` lock the run folder until they are closed."""
    world = worlds(None)
    checkpoints_of(world, tmp_path).save(1)
    for table in world.tables:
        table.close()
    assert checkpoints_of(worlds(None), tmp_path).restore() is not None


def test_tensors_with_equal_paths_are_kept_apart() -> None:
    value = {"a": {"b": torch.zeros(1)}, "a/b": torch.ones(1), 1: torch.full((1,), 2.0), "1": torch.full((1,), 3.0)}
    tensors: state_tree.Tensors = {}
    packed = state_tree.pack(value, tensors, "x")
    assert repr(state_tree.unpack(packed, state_tree.decode(state_tree.encode(tensors)))) == repr(value)


def test_kill_at_a_failpoint(tmp_path: Path) -> None:
    code = """if True:
        import sys; from pathlib import Path; from helpers.run import *; import thermocline.checkpoint.manager as c
        path = Path(sys.argv[1]); world = World(path)
        checkpoints = c.Checkpoints(path / "run", world.tables, world.model, world.optimizer)
        for n in range(3):
            world.step(Ads(12).batch(n))
            checkpoints.save(n + 1)
    """
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "THERMOCLINE_KILL_AT": "run.file_synced:5"}  # the second manifest
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env, check=False)
    assert result.returncode == -signal.SIGKILL
    world = World(tmp_path)
    saved = checkpoints_of(world, tmp_path).restore()
    assert saved is not None
    assert saved.step == 1
    assert differing(world.bits(), trained(None, 1)) == []
    world.close()
