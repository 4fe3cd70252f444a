"""Errors for damaged or foreign checkpoints and for misuse; none of them changes any state."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import run as run_helpers
from helpers.run import ADS, OPTIMIZERS, STORAGES, World, checkpoints_of, differing, folder_of

import thermocline as tc
from thermocline.checkpoint.manager import Checkpoints
from thermocline.checkpoint.manifest import decode_manifest, encode_manifest
from thermocline.distributed.frozen_adam import FrozenAdam
from thermocline.embedding.optimizers import Adagrad
from thermocline.embedding.state_dict import dense_state_dict
from thermocline.embedding.table import Table

worlds = run_helpers.worlds  # the fixture


def saved_run(path: Path, storage: str) -> None:
    """Train 4 steps with a save after each."""
    world = World(folder_of(storage, path))
    checkpoints = checkpoints_of(world, path)
    for n in range(4):
        world.step(ADS.batch(n))
        checkpoints.save(n + 1)
    world.close()


@pytest.fixture(scope="module")
def saved_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One saved run per storage; tests copy it before they change it."""
    runs = {storage: tmp_path_factory.mktemp(storage) for storage in STORAGES}
    for storage, path in runs.items():
        saved_run(path, storage)
    return runs


def state_of(path: Path) -> dict[str, bytes]:
    """Content of every file in a folder except locks."""
    files = (file for file in path.rglob("*") if file.is_file() and file.name != "LOCK")
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("file", ["00000005.json", "00000005.safetensors", "00000004.json"])
@pytest.mark.parametrize("damage", ["flip first", "flip middle", "flip last", "truncate", "empty", "missing"])
def test_damaged_file_is_named_and_nothing_changes(
    tmp_path: Path, worlds: Any, saved_runs: dict[str, Path], storage: str, file: str, damage: str
) -> None:
    shutil.copytree(saved_runs[storage], tmp_path, dirs_exist_ok=True)
    damaged = tmp_path / "run" / "checkpoints" / file
    data = bytearray(damaged.read_bytes())
    if damage.startswith("flip"):
        data[{"first": 0, "middle": len(data) // 2, "last": len(data) - 1}[damage.split()[1]]] ^= 0x10
    elif damage == "truncate":
        del data[len(data) * 2 // 3 :]
    elif damage == "empty":
        data.clear()
    if damage == "missing":
        damaged.unlink()
    else:
        damaged.write_bytes(data)
    world = worlds(folder_of(storage, tmp_path))
    before, bits = state_of(tmp_path / "run" / "checkpoints"), world.bits()
    checkpoints = checkpoints_of(world, tmp_path)
    if damage == "missing" and file.endswith(".json"):
        saved = checkpoints.restore()  # as if it had never been saved
        assert saved is not None
        assert saved.step == (3 if file == "00000005.json" else 4)
        return
    error = tc.NotFoundError if damage == "missing" else tc.CorruptionError
    with pytest.raises(error, match=file):
        checkpoints.restore()
    assert differing(world.bits(), bits) == []
    assert state_of(tmp_path / "run" / "checkpoints") == before
    with pytest.raises(tc.ThermoclineError, match="restore"):
        checkpoints.save(9)


def test_every_flipped_bit_of_a_manifest_is_detected(tmp_path: Path) -> None:
    manifest = {"format": 3, "run": "a", "begin": False, "step": 3, "tag": None, "versions": {}, "torch_threads": 1}
    manifest |= {"tables": {}, "files": {}, "states": [], "position": {"file": "a\u00e9", "row": None, "lr": 0.1}}
    data = encode_manifest(manifest)
    assert decode_manifest(data, "x")["step"] == 3
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            manifest = decode_manifest(bytes(flipped), "x")
        except tc.CorruptionError:
            continue
        assert encode_manifest(manifest) == data, bit  # an equal value in other bytes, such as \u00E9


def test_damaged_store_leaves_a_table_without_ssd_unchanged(tmp_path: Path, worlds: Any) -> None:
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
    ("change", "message"),
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
def test_foreign_checkpoint_is_refused(
    tmp_path: Path, worlds: Any, saved_runs: dict[str, Path], change: Any, message: str
) -> None:
    shutil.copytree(saved_runs["memory"], tmp_path, dirs_exist_ok=True)
    world = worlds(None)
    change(world)
    before = state_of(tmp_path / "run")
    with pytest.raises(tc.FormatError, match=message):
        checkpoints_of(world, tmp_path).restore()
    assert state_of(tmp_path / "run") == before
    assert all(table.step_count == 0 for table in world.tables)


def test_missing_store_or_store_of_another_run_is_refused(tmp_path: Path, worlds: Any) -> None:
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


def test_frozen_adam_of_an_earlier_version_is_refused(tmp_path: Path, worlds: Any) -> None:
    """Its state lacks the number of ranks that the frozen denominators average. Reading does not need it."""
    world = worlds(None)
    world.optimizer = FrozenAdam(world.model.parameters(), lr=0.01)
    checkpoints = checkpoints_of(world, tmp_path)
    world.step(ADS.batch(0))
    for parameter, state in world.optimizer.state.items():
        world.optimizer.freeze(parameter, state["exp_avg_sq"].clone(), 2)
        del state["v_hat_ranks"]
    checkpoints.save(1)
    bits = dense_bits(world)
    checkpoints.close()

    other = worlds(None)
    other.optimizer = FrozenAdam(other.model.parameters(), lr=0.01)
    before = dense_bits(other)
    again = checkpoints_of(other, tmp_path)
    with pytest.raises(tc.FormatError, match=r"earlier version and lacks v_hat_ranks: .* one process .* a new run"):
        again.restore()
    assert dense_bits(other) == before != bits
    again.close()
    reading = checkpoints_of(other, tmp_path, read_only=True)
    assert reading.restore() is not None
    assert dense_bits(other) == bits
    reading.close()


def dense_bits(world: World) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in dense_state_dict(world.model).items()}


def test_rows_that_do_not_fit_raise_budget_error_and_change_nothing(tmp_path: Path, worlds: Any) -> None:
    big = worlds(None)
    big.tables[1].dram.push(np.arange(5000, dtype=np.uint64), np.zeros((5000, 7), np.float32))
    checkpoints_of(big, tmp_path).save(1)
    big.close()
    world = worlds(None, mem="60KB")
    with pytest.raises(tc.BudgetError):
        checkpoints_of(world, tmp_path).restore()
    assert all(table.dram.stats().resident == 0 for table in world.tables)


def test_store_with_commits_is_not_reused(tmp_path: Path, worlds: Any) -> None:
    saved_run(tmp_path, "ssd")
    world = worlds(tmp_path)
    with pytest.raises(tc.ThermoclineError, match=r"already has commits.*Resume the run"):
        Checkpoints(tmp_path / "other", world.tables)
    with pytest.raises(tc.ThermoclineError, match=r"restore\(\) first"):
        checkpoints_of(world, tmp_path).save(1)


class WithExtraState(torch.nn.Module):
    def get_extra_state(self) -> Any:
        return object()


def test_misuse_raises(tmp_path: Path, worlds: Any) -> None:
    world = worlds(None)
    with pytest.raises(ValueError, match="keep is 0"):
        checkpoints_of(world, tmp_path, keep=0)
    with pytest.raises(ValueError, match="with unique names"):
        Checkpoints(tmp_path / "run", [world.tables[0]] * 2)
    checkpoints = checkpoints_of(world, tmp_path)
    for wrong, where in ((np.int64(3), "position is a int64"), ({"a": [1, (2,)]}, r"position\['a'\]\[1\] is a tuple")):
        with pytest.raises(TypeError, match=where):
            checkpoints.save(1, position=wrong)
    with pytest.raises(TypeError, match="extra is a dict: it must be JSON"):
        checkpoints.save(1, extra={1: 2})
    loss = world.model(ADS.batch(0)).sum()
    loss.backward()
    with pytest.raises(tc.ThermoclineError, match="save between steps"):
        checkpoints.save(1)
    for table in world.tables:
        table.discard_gradients()
    world.model.extra = WithExtraState()
    with pytest.raises(TypeError, match="is a object: a checkpoint holds"):
        checkpoints.save(1)
