"""Checkpoints: the same bits after a restore, nothing half restored, nothing lost wherever a save dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_helpers import OPTIMIZERS, Ads, World, differing

import thermocline as tc
from thermocline import checkpoint as checkpoint_module
from thermocline import snapshot
from thermocline.checkpoint import Checkpoints
from thermocline.export import export_rows
from thermocline.tables.optimizers import Adagrad
from thermocline.tables.table import Table

ADS = Ads(12)
PLACES = ["memory", "ssd"]


def folder_of(place: str, path: Path) -> Path | None:
    return path if place == "ssd" else None


def checkpoints_of(world: World, path: Path, **options: Any) -> Checkpoints:
    return Checkpoints(path / "run", world.tables, world.model, world.optimizer, **options)


def trained(folder: Path | None, steps: int, optimizers: str = "adagrad") -> dict[str, bytes]:
    """The bits of a run that was never stopped."""
    world = World(folder, optimizers)
    world.train(ADS.batch(n) for n in range(steps))
    bits = world.bits()
    world.close()
    return bits


@pytest.fixture
def worlds() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(*args: Any, **kwargs: Any) -> World:
        made.append(World(*args, **kwargs))
        return made[-1]

    yield make
    for world in made:
        world.close()


# ---- the same bits


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("optimizers", OPTIMIZERS)
def test_resumed_run_has_the_bits_of_one_never_stopped(tmp_path: Path, place: str, optimizers: str) -> None:
    folder = folder_of(place, tmp_path)
    reference = trained(None, 12, optimizers)
    for stop in (1, 5, 11):
        path = tmp_path / str(stop)
        folder = folder_of(place, path)
        world = World(folder, optimizers)
        checkpoints = checkpoints_of(world, path)
        assert checkpoints.restore() is None
        for batch in map(ADS.batch, range(stop)):
            world.step(batch)
            if stop < 11 or batch.position["batch"] > 8:  # several saves, of which the last counts
                checkpoints.save(batch.position["batch"], batch.position, {"stop": stop})
        bits = world.bits()
        world.step(ADS.batch(stop))  # trained and never saved
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


@pytest.mark.parametrize("place", PLACES)
def test_a_save_beside_a_running_pipeline_is_a_step_boundary(tmp_path: Path, worlds: Any, place: str) -> None:
    folder = folder_of(place, tmp_path)
    world = worlds(folder)
    checkpoints = checkpoints_of(world, tmp_path)
    from thermocline.pipeline.prefetch import prefetch

    with prefetch(ADS, *world.tables, depth=4, pull_window=2) as batches:
        for batch in batches:
            world.step(batch)
            if batch.position["batch"] == 5:
                checkpoints.save(5, batch.position)
                with pytest.raises(tc.ThermoclineError, match="close the pipeline"):
                    checkpoints.restore()
    world.close()
    again = worlds(folder)
    assert checkpoints_of(again, tmp_path).restore() is not None
    assert differing(again.bits(), trained(None, 5)) == []


@pytest.mark.parametrize("place", PLACES)
def test_restore_goes_back_within_a_process_and_to_any_kept_step_or_tag(
    tmp_path: Path, worlds: Any, place: str
) -> None:
    world = worlds(folder_of(place, tmp_path))
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
    # From there it goes on: a new save is the newest.
    world.step(ADS.batch(5))
    assert differing(world.bits(), bits[6]) == []
    checkpoints.save(6)
    world.step(ADS.batch(6))
    assert checkpoints.restore().step == 6  # type: ignore[union-attr]
    assert differing(world.bits(), bits[6]) == []
    with pytest.raises(tc.NotFoundError, match=r"no checkpoint 3; it has step 2 \(best\), step"):
        checkpoints.restore(3)


def test_a_run_that_died_before_its_first_save_begins_anew(tmp_path: Path, worlds: Any) -> None:
    for place in PLACES:
        path = tmp_path / place
        for _ in range(3):
            world = worlds(folder_of(place, path))
            assert checkpoints_of(world, path).restore() is None
            world.train(ADS.batch(n) for n in range(4))
            assert differing(world.bits(), trained(None, 4)) == []
            world.close()


def test_dense_state_of_many_kinds_survives(tmp_path: Path) -> None:
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


# ---- damaged, foreign, missing


def saved_run(path: Path, place: str) -> dict[str, bytes]:
    world = World(folder_of(place, path))
    checkpoints = checkpoints_of(world, path)
    for n in range(4):
        world.step(ADS.batch(n))
        checkpoints.save(n + 1)
    bits = world.bits()
    world.close()
    return bits


def state_of(path: Path) -> dict[str, bytes]:
    """Every file of a folder but the locks."""
    files = (file for file in path.rglob("*") if file.is_file() and file.name != "LOCK")
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("file", ["00000005.json", "00000005.safetensors", "00000004.json"])
@pytest.mark.parametrize("harm", ["flip first", "flip middle", "flip last", "truncate", "empty", "missing"])
def test_damage_is_named_and_touches_nothing(tmp_path: Path, worlds: Any, place: str, file: str, harm: str) -> None:
    saved_run(tmp_path, place)
    victim = tmp_path / "run" / "checkpoints" / file
    data = bytearray(victim.read_bytes())
    if harm.startswith("flip"):
        data[{"first": 0, "middle": len(data) // 2, "last": len(data) - 1}[harm.split()[1]]] ^= 0x10
    elif harm == "truncate":
        del data[len(data) * 2 // 3 :]
    elif harm == "empty":
        data.clear()
    if harm == "missing":
        victim.unlink()
    else:
        victim.write_bytes(data)
    world = worlds(folder_of(place, tmp_path))
    before, bits = state_of(tmp_path / "run" / "checkpoints"), world.bits()
    checkpoints = checkpoints_of(world, tmp_path)
    if harm == "missing" and file.endswith(".json"):
        saved = checkpoints.restore()  # as if it had never been
        assert saved is not None
        assert saved.step == (3 if file == "00000005.json" else 4)
        return
    error = tc.NotFoundError if harm == "missing" else tc.CorruptionError
    with pytest.raises(error, match=file):
        checkpoints.restore()
    assert differing(world.bits(), bits) == []
    assert state_of(tmp_path / "run" / "checkpoints") == before
    with pytest.raises(tc.ThermoclineError, match="restore"):
        checkpoints.save(9)


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    data = snapshot.encode_manifest({"format": 1, "step": 3, "lr": 0.1, "position": {"file": "a\u00e9", "row": None}})
    assert snapshot.decode_manifest(data, "x")["step"] == 3
    for place in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        try:
            manifest = snapshot.decode_manifest(bytes(flipped), "x")
        except tc.CorruptionError:
            continue
        assert snapshot.encode_manifest(manifest) == data, place  # other bytes of the same meaning, such as \u00E9


def test_a_memory_table_with_a_damaged_store_is_left_as_it_was(tmp_path: Path, worlds: Any) -> None:
    saved_run(tmp_path, "memory")
    for log in (tmp_path / "run" / "stores" / "b").glob("log-*"):
        data = bytearray(log.read_bytes())
        for page in range(2, len(data) // 4096):  # rows; the header and the keys are read on opening
            data[page * 4096 + 2000] ^= 1
        log.write_bytes(data)
    world = worlds(None)
    world.step(ADS.batch(9))
    bits = world.bits()
    checkpoints = checkpoints_of(world, tmp_path)
    with pytest.raises(tc.CorruptionError):
        checkpoints.restore()
    assert differing(world.bits(), bits) == []
    with pytest.raises(tc.ThermoclineError, match="restore"):
        checkpoints.save(9)


def table_like(name: str = "a", dim: int = 4, optimizer: Any = None, **options: Any) -> Table:
    return Table(dim, optimizer or OPTIMIZERS["adagrad"][0], name=name, mem="1MB", ssd_mem="16MB", **options)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.tables.pop(), r"is of tables \['a', 'b'\], these are \['a'\]"),
        (lambda w: w.tables.__setitem__(0, table_like("z")), r"these are \['b', 'z'\]"),
        (lambda w: w.tables.__setitem__(0, table_like(seed=1)), "saved with seed 0, but this one has 1"),
        (lambda w: w.tables.__setitem__(0, table_like(dim=5)), "saved with dim 4, but this one has 5"),
        (lambda w: w.tables.__setitem__(0, table_like(optimizer=Adagrad(eps=1e-3))), "saved with optimizer.*eps"),
        (lambda w: w.tables.__setitem__(0, table_like(initial=tc.Normal())), "saved with initial.*Normal"),
        (lambda w: setattr(w, "model", torch.nn.Linear(3, 1)), "another model"),
        (lambda w: setattr(w.model, "out", torch.nn.Linear(3, 1)), r"out.weight is torch.float32\[1, 14\] in the"),
        (lambda w: setattr(w, "optimizer", torch.optim.SGD(w.model.parameters())), "other dense optimizers"),
        (lambda w: setattr(w, "optimizer", torch.optim.Adam(w.model.out.parameters())), "other dense optimizers"),
    ],
)
def test_a_foreign_checkpoint_is_refused(tmp_path: Path, worlds: Any, change: Any, words: str) -> None:
    saved_run(tmp_path, "memory")
    world = worlds(None)
    change(world)
    before = state_of(tmp_path / "run")
    with pytest.raises(tc.FormatError, match=words):
        checkpoints_of(world, tmp_path).restore()
    assert state_of(tmp_path / "run") == before
    assert all(table.step_count == 0 for table in world.tables)


def test_a_table_elsewhere_or_of_another_run_is_refused(tmp_path: Path, worlds: Any) -> None:
    saved_run(tmp_path / "1", "ssd")
    saved_run(tmp_path / "2", "ssd")
    with pytest.raises(tc.FormatError, match="saved with an ssd folder"):
        checkpoints_of(worlds(None), tmp_path / "1").restore()
    with pytest.raises(tc.FormatError, match="of another run"):
        checkpoints_of(worlds(tmp_path / "2"), tmp_path / "1").restore()
    with pytest.raises(tc.NotFoundError, match="needs epoch"):
        checkpoints_of(worlds(tmp_path / "new"), tmp_path / "1").restore()
    saved_run(tmp_path / "3", "memory")
    shutil.rmtree(tmp_path / "3" / "run" / "stores" / "b")
    with pytest.raises(tc.NotFoundError, match=r"stores.b is missing"):
        checkpoints_of(worlds(None), tmp_path / "3").restore()


def test_rows_that_do_not_fit_are_a_budget_error_and_change_nothing(tmp_path: Path, worlds: Any) -> None:
    big = worlds(None)
    big.tables[1].tier.push(np.arange(5000, dtype=np.uint64), np.zeros((5000, 7), np.float32))
    checkpoints_of(big, tmp_path).save(1)
    big.close()
    world = worlds(None, mem="60KB")
    with pytest.raises(tc.BudgetError):
        checkpoints_of(world, tmp_path).restore()
    assert all(table.tier.stats().resident == 0 for table in world.tables)


def test_a_store_with_commits_is_not_taken_over(tmp_path: Path, worlds: Any) -> None:
    saved_run(tmp_path, "ssd")
    world = worlds(tmp_path)
    with pytest.raises(tc.ThermoclineError, match=r"already has commits.*Resume the run"):
        Checkpoints(tmp_path / "other", world.tables)
    with pytest.raises(tc.ThermoclineError, match=r"restore\(\) first"):
        checkpoints_of(world, tmp_path).save(1)


class WithExtraState(torch.nn.Module):
    def get_extra_state(self) -> Any:
        return object()


def test_misuse_says_so(tmp_path: Path, worlds: Any) -> None:
    world = worlds(None)
    with pytest.raises(ValueError, match="keep is 0"):
        checkpoints_of(world, tmp_path, keep=0)
    with pytest.raises(ValueError, match="each with a name of its own"):
        Checkpoints(tmp_path / "run", [world.tables[0]] * 2)
    checkpoints = checkpoints_of(world, tmp_path)
    with pytest.raises(TypeError, match="position must be plain JSON"):
        checkpoints.save(1, position=np.int64(3))
    loss = world.model(ADS.batch(0)).sum()
    loss.backward()
    with pytest.raises(tc.ThermoclineError, match="save between steps"):
        checkpoints.save(1)
    for table in world.tables:
        table.discard_gradients()
    world.model.extra = WithExtraState()
    with pytest.raises(TypeError, match="is a object: a checkpoint holds"):
        checkpoints.save(1)


# ---- what is kept


@pytest.mark.parametrize("place", PLACES)
def test_the_last_k_and_the_tags_stay_and_nothing_else(tmp_path: Path, worlds: Any, place: str) -> None:
    world = worlds(folder_of(place, tmp_path))
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


@pytest.mark.parametrize("place", PLACES)
def test_cost_follows_the_dirty_rows(tmp_path: Path, worlds: Any, place: str) -> None:
    world = worlds(folder_of(place, tmp_path))
    table = world.tables[0]
    table.tier.push(np.arange(5000, dtype=np.uint64), np.ones((5000, 8), np.float32))
    checkpoints = checkpoints_of(world, tmp_path)
    flushed = table.tier.stats().flushed
    assert flushed >= 5000
    table.tier.push(np.arange(7, dtype=np.uint64), np.zeros((7, 8), np.float32))
    checkpoints.save(1)
    assert table.tier.stats().flushed == flushed + 7
    checkpoints.save(2)
    assert table.tier.stats().flushed == flushed + 7


# ---- crashes


class Crash(BaseException):
    """Not an Exception: nothing may catch it."""


def crash_at(monkeypatch: pytest.MonkeyPatch, nth: int) -> list[str]:
    """The nth named point that a save reaches raises; the names so far are in the list."""
    passed: list[str] = []

    def reached(point: str) -> None:
        passed.append(point)
        if len(passed) == nth:
            raise Crash(point)

    monkeypatch.setattr(snapshot, "reached", reached)
    monkeypatch.setattr(checkpoint_module, "reached", reached)
    return passed


@pytest.mark.parametrize("place", PLACES)
def test_a_crash_between_any_two_steps_of_a_save_leaves_one_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    after = {n: trained(None, n) for n in (3, 4, 5, 6)}
    seen: set[str] = set()
    nth = 0
    while True:
        nth += 1
        path = tmp_path / str(nth)
        world = World(folder_of(place, path))
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

        world = World(folder_of(place, path))
        checkpoints = checkpoints_of(world, path, keep=1)
        saved = checkpoints.restore()
        assert saved is not None
        assert saved.step == (5 if passed.count("publish.renamed") == 2 else 4)  # the dense file's, the manifest's
        assert differing(world.bits(), after[saved.step]) == []
        # Once it has saved again, nothing of the crash is left.
        world.train(ADS.batch(n) for n in range(saved.step, 6))
        assert differing(world.bits(), after[6]) == []
        checkpoints.save(6, {"batch": 6})
        assert len(list((path / "run" / "checkpoints").iterdir())) == 2
        assert all(len((table.store or table.checkpoint_store).epochs) == 1 for table in world.tables)
        world.close()
        shutil.rmtree(path)
        if not crashed:
            break
    assert {"save.flushed", "save.committed", "save.dense_published", "publish.synced", "save.published"} < seen
    assert {"sweep.manifest_removed", "sweep.epoch_released", "sweep.file_removed", "save.done"} < seen
    assert nth > 15


@pytest.mark.parametrize("place", PLACES)
def test_a_crash_while_a_run_begins_lets_it_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    for nth in range(1, 20):
        path = tmp_path / str(nth)
        world = World(folder_of(place, path))
        passed = crash_at(monkeypatch, nth)
        try:
            checkpoints_of(world, path)
            crashed = False
        except Crash:
            crashed = True
        monkeypatch.undo()
        world.close()
        world = World(folder_of(place, path))
        assert checkpoints_of(world, path).restore() is None
        world.train(ADS.batch(n) for n in range(3))
        assert differing(world.bits(), trained(None, 3)) == []
        world.close()
        if not crashed:
            break
    assert passed[-1] == "save.done"


def test_a_save_that_failed_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worlds: Any) -> None:
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


def test_kill_at_a_named_point(tmp_path: Path) -> None:
    code = """if True:
        import sys; from pathlib import Path; from run_helpers import *; import thermocline.checkpoint as c
        path = Path(sys.argv[1]); world = World(path)
        checkpoints = c.Checkpoints(path / "run", world.tables, world.model, world.optimizer)
        for n in range(3):
            world.step(Ads(12).batch(n))
            checkpoints.save(n + 1)
    """
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "THERMOCLINE_KILL_AT": "publish.synced:5"}  # the second manifest
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env, check=False)
    assert result.returncode == -signal.SIGKILL
    world = World(tmp_path)
    saved = checkpoints_of(world, tmp_path).restore()
    assert saved is not None
    assert saved.step == 1
    assert differing(world.bits(), trained(None, 1)) == []
    world.close()


# ---- export


@pytest.mark.parametrize("place", ["memory", "memory, saved", "ssd"])
@pytest.mark.parametrize("format", ["parquet", "safetensors"])
def test_export_holds_every_trained_row_once(tmp_path: Path, worlds: Any, place: str, format: Any) -> None:
    world = worlds(folder_of(place, tmp_path))
    if place == "memory, saved":
        checkpoints = checkpoints_of(world, tmp_path)
    for n in range(8):
        world.step(ADS.batch(n))
        if place == "memory, saved" and n == 4:
            checkpoints.save(n)
    trained_keys = np.unique(np.concatenate([ADS.batch(n).select([0, 1])[0] for n in range(8)]))
    for table in world.tables[:1]:
        files = export_rows(table, tmp_path / "out", format=format, shard_rows=100)
        index = json.loads((tmp_path / "out" / "index.json").read_text())
        assert [shard["file"] for shard in index["shards"]] == [file.name for file in files]
        assert all(shard["rows"] == 100 for shard in index["shards"][:-1])
        parts = [read_export(file) for file in files]
        keys, rows = np.concatenate([k for k, _ in parts]), np.concatenate([r for _, r in parts])
        assert index["rows"] == len(keys)
        assert sorted(keys) == sorted(trained_keys)
        assert rows.tobytes() == table.read(keys).tobytes()
    with pytest.raises(FileExistsError, match="not empty"):
        export_rows(world.tables[0], tmp_path / "out")
    with pytest.raises(ValueError, match="format is 'csv'"):
        export_rows(world.tables[0], tmp_path / "other", format="csv")  # type: ignore[arg-type]


def read_export(file: Path) -> tuple[Any, Any]:
    if file.suffix == ".parquet":
        import pyarrow.parquet as pq

        columns = pq.read_table(file)
        lists = [np.array(columns[name].to_pylist(), np.float32) for name in ("weights", "state")]
        return columns["key"].to_numpy(), np.concatenate(lists, 1)
    from safetensors.numpy import load_file

    tensors = load_file(file)
    return tensors["keys"].view(np.uint64), np.concatenate([tensors["weights"], tensors["state"]], 1)


def test_export_of_nothing_is_an_index_of_nothing(tmp_path: Path) -> None:
    table = table_like()
    assert export_rows(table, tmp_path / "out") == []
    assert json.loads((tmp_path / "out" / "index.json").read_text())["rows"] == 0
