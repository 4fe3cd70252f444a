"""`thermocline repair`: rebuilt files, reported losses, exit codes. csrc/ssd/repair_test.cc compares with an oracle."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from helpers.cli import done, invoke, write_config
from helpers.ssd import ROW, SMALL, contents, rows_of, some_keys

import thermocline as tc

pytestmark = pytest.mark.usefixtures("command_folder")
PAGE = 4096


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def make_store(folder: Path, count: int = 3000) -> dict[int, bytes]:
    """Write base files and a log, and two commits; return the rows of the second."""
    keys = some_keys(count)
    with tc.SsdStore.open(folder, row_bytes=ROW, **SMALL) as store:
        store.put(keys, rows_of(keys))
        store.merge()
        store.commit(b"one")
        store.put(keys[:200], rows_of(keys[:200], 1))
        store.delete(keys[-50:])
        store.commit(b"two")
        return contents(store)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    flags = ["--set", "train.valid_every=2", "--set", "train.patience=50", "--set", "train.epochs=2"]
    done("train", write_config(tmp_path), *flags, "--set", "train.lr=0.1")  # the best checkpoint is not the last
    return tmp_path / "run"


def test_repair_of_a_run_loses_nothing_where_row_pages_are_intact(trained: Path) -> None:
    before = done("eval", "run")
    (store,) = json.loads(done("inspect", "run", "--json"))["stores"]
    folder = Path(store["path"])
    log = sorted(folder.glob("log-*.tc"))[-1]
    intact = log.read_bytes()
    flip(log, 100)  # the header page
    flip(log, PAGE + 100)  # a key column
    damaged = files_of(folder)
    result = invoke("eval", "run")
    assert result.exit_code == 1
    assert f"{log.name}: page 0: checksum mismatch" in result.stderr
    assert "run: thermocline repair " in result.stderr
    planned = done("repair", "run", "--dry-run")
    assert "run would be repaired: 1 file rebuilt, nothing lost" in planned
    assert files_of(folder) == damaged
    assert "run repaired: 1 file rebuilt, nothing lost" in done("repair", "run")
    assert log.read_bytes() == intact
    assert (folder / "damaged" / log.name).read_bytes() == damaged[log.name]
    assert "healthy" in done("inspect", "run", "--check")
    assert done("eval", "run") == before
    assert "run: nothing to repair in 1 store" in done("repair", "run")


def test_lost_rows_are_listed_by_hash_range(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    rows = make_store(folder)
    base = sorted(folder.glob("base-*.tc"))[0]
    flip(base, 2 * PAGE + 500)
    with tc.SsdStore.open(folder, read_only=True) as store, pytest.raises(tc.CorruptionError, match="page 2"):
        store.check()
    result = invoke("repair", folder, "--json")
    assert result.exit_code == 1
    (store,) = json.loads(result.stdout)["stores"]
    (loss,) = store["losses"]
    assert (loss["file"], loss["first_page"], loss["pages"], loss["epochs"]) == (base.name, 2, 1, [2, 1])
    with tc.SsdStore.open(folder, read_only=True) as store:
        store.check()
        left = contents(store)
        assert store.note == b"two"
    assert left.items() <= rows.items()
    assert 0 < len(rows) - len(left) <= loss["rows"]
    kept = invoke("repair", folder)
    assert kept.exit_code == 0
    assert "nothing to repair" in kept.stdout


def test_lost_rows_are_described_in_text(tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    base = sorted((tmp_path / "store").glob("base-*.tc"))[0]
    flip(base, 2 * PAGE + 500)
    result = invoke("repair", tmp_path / "store", "--dry-run")
    assert result.exit_code == 1
    assert f"lost     {base.name} page 2: checksum mismatch" in result.stdout
    assert "of all hashes), in commits 1, 2" in result.stdout
    assert "would be repaired: 0 files rebuilt" in result.stdout.splitlines()[-1]


def test_dry_run_counts_the_rows_that_the_repair_removes(tmp_path: Path) -> None:
    """A lost page of the log hides older versions of its rows."""
    make_store(tmp_path / "store")
    (log,) = (tmp_path / "store").glob("log-*.tc")
    data = log.read_bytes()
    rows_page = next(at for at in range(PAGE, len(data), PAGE) if data[at + 10] == 2)  # the kind of the page
    flip(log, rows_page + 500)
    (planned,) = json.loads(invoke("repair", tmp_path / "store", "--dry-run", "--json").stdout)["stores"]
    assert planned["rows_hidden"] > 0
    note = f"the repair also removes {planned['rows_hidden']} rows in these hash ranges"
    assert note in invoke("repair", tmp_path / "store", "--dry-run").stdout
    (store,) = json.loads(invoke("repair", tmp_path / "store", "--json").stdout)["stores"]
    assert store["rows_hidden"] == planned["rows_hidden"]


def test_check_lists_all_damage(tmp_path: Path) -> None:
    """Of a store that opens, and of one that does not."""
    folder = tmp_path / "store"
    make_store(folder)
    first, second, third = sorted(folder.glob("base-*.tc"))[:3]
    flip(first, 2 * PAGE + 500)
    flip(second, 3 * PAGE + 500)
    (log,) = folder.glob("log-*.tc")
    for opens in (True, False):
        if not opens:
            flip(third, 100)  # the header
            flip(log, 100)
        result = invoke("inspect", folder, "--check")
        assert result.exit_code == 1
        problems = [line for line in result.stdout.splitlines() if "PROBLEM" in line]
        damaged = [first, second] if opens else [first, second, third, log]
        assert len(problems) == len(damaged), problems
        for file in damaged:
            assert sum(file.name in problem for problem in problems) == 1


def test_a_store_without_a_valid_manifest_has_one_advice(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    make_store(folder)
    for manifest in folder.glob("MANIFEST-*"):
        flip(manifest, 60)
    with pytest.raises(tc.CorruptionError, match="restore a copy of the store") as raised:
        tc.SsdStore.open(folder)
    assert "thermocline repair" not in str(raised.value)
    for command in (["inspect", folder, "--check"], ["repair", folder], ["repair", folder, "--dry-run"]):
        result = invoke(*command)
        assert result.exit_code == 1
        assert "restore a copy of the store" in result.stdout
        assert "thermocline repair" not in result.stdout
    assert "cannot be repaired; problems: 1" in invoke("repair", folder).stdout.splitlines()[-1]


def test_damaged_folder_that_is_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    make_store(folder)
    flip(sorted(folder.glob("base-*.tc"))[0], 2 * PAGE + 500)
    (tmp_path / "elsewhere").mkdir()
    (folder / "damaged").symlink_to(tmp_path / "elsewhere")
    before = files_of(folder)
    result = invoke("repair", folder)
    assert result.exit_code == 1
    assert "damaged is a symbolic link or no folder" in result.stdout
    assert not list((tmp_path / "elsewhere").iterdir())
    assert files_of(folder) == before


def test_damaged_identity_and_old_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    make_store(folder)
    old = folder / "MANIFEST-000000000001"
    flip(old, 60)
    with pytest.warns(RuntimeWarning, match=rf"no file .* is deleted.*{old.name}.*thermocline repair") as issued:
        store = tc.SsdStore.open(folder, row_bytes=ROW, **SMALL)
    with warnings.catch_warnings(action="error"):  # once per store
        store.put(some_keys(5), np.zeros((5, ROW), dtype=np.uint8))
        store.commit(b"three")
        rows = contents(store)
    store.close()
    assert len(issued) == 1
    for flags in ([], ["--check"]):
        result = invoke("inspect", folder, *flags)
        assert result.exit_code == 1
        (problem,) = [line for line in result.stdout.splitlines() if "PROBLEM" in line]
        assert f"{old.name}: checksum mismatch" in problem
    flip(folder / "STORE", 42)
    with pytest.raises(tc.CorruptionError, match=r"STORE: .*thermocline repair"):
        tc.SsdStore.open(folder)
    result = invoke("repair", folder)
    assert result.exit_code == 1  # the first commit is lost
    assert "1 file rebuilt, 1 commit lost" in result.stdout
    assert (folder / "damaged" / old.name).exists()
    with tc.SsdStore.open(folder, **SMALL) as store:
        store.check()
        assert contents(store) == rows
        assert store.epochs == (2, 3)


def test_usage_errors_and_an_open_store(tmp_path: Path) -> None:
    for words, code, message in (
        (["nowhere"], 2, "no such file or folder"),
        ([tmp_path], 2, "neither a store"),
        ([tmp_path, "--mem", "much"], 2, "--mem"),
    ):
        result = invoke("repair", *words)
        assert result.exit_code == code
        assert message in result.stderr
    with tc.SsdStore.open(tmp_path / "store", row_bytes=ROW, **SMALL):
        result = invoke("repair", tmp_path / "store")
        assert result.exit_code == 1
        assert "open for writing" in result.stdout


def test_a_lost_commit_of_a_checkpoint_is_reported(trained: Path) -> None:
    (store,) = json.loads(done("inspect", "run", "--json"))["stores"]
    manifest = sorted(Path(store["path"]).glob("MANIFEST-*"))[-1]
    flip(manifest, 60)
    result = invoke("repair", "run")
    assert result.exit_code == 1
    assert f"needs commit {int(manifest.name[9:])}" in result.stdout
    assert "1 commit lost" in result.stdout.splitlines()[-1]


def test_stores_outside_of_a_run_are_named_and_not_changed(tmp_path: Path) -> None:
    done("train", write_config(tmp_path), "--set", "tiers.ssd=rows", "--set", "train.steps=5")
    rows = tmp_path / "rows"
    assert "run: nothing to repair in 0 stores" in done("repair", "run")
    (log,) = rows.glob("log-*.tc")
    flip(log, PAGE + 100)
    damaged = files_of(rows)
    for words in (["run", "--dry-run"], ["run"]):
        result = invoke("repair", *words)
        assert result.exit_code == 1
        (problem,) = [line for line in result.stdout.splitlines() if "PROBLEM" in line]
        assert "not repaired, because it is outside of run: " in problem
        assert f"{log.name}: page 1: checksum mismatch" in problem
        assert problem.endswith(f"run: thermocline repair {rows}")
        assert files_of(rows) == damaged
    assert "rows repaired: 1 file rebuilt, nothing lost" in done("repair", rows)
    assert "run: nothing to repair in 0 stores" in done("repair", "run")
    make_store(tmp_path / "foreign")  # not a store of this run: neither verified nor repaired
    flip(sorted((tmp_path / "foreign").glob("base-*.tc"))[0], 2 * PAGE + 500)
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace(str(rows), str(tmp_path / "foreign")))
    assert "is not a store of this run" in invoke("repair", "run").stdout
    rows.rename(tmp_path / "moved")
    config.write_text(config.read_text().replace(str(tmp_path / "foreign"), str(rows)))
    result = invoke("repair", "run")
    assert result.exit_code == 1
    assert f"outside of run: {rows}: no such folder" in result.stdout


def test_the_report_is_printed_if_the_result_cannot_be_verified(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    make_store(folder)
    base = sorted(folder.glob("base-*.tc"))[0]
    flip(base, 2 * PAGE + 500)
    result = invoke("repair", folder, "--mem", "100KB")
    assert result.exit_code == 1
    assert f"lost     {base.name} page 2" in result.stdout
    assert "PROBLEM  not verified: " in result.stdout
    assert "nothing to repair" in done("repair", folder)


def test_a_missing_identity_is_rebuilt(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    make_store(folder)
    identity = (folder / "STORE").read_bytes()
    (folder / "STORE").unlink()
    assert "STORE" in done("repair", folder)
    assert (folder / "STORE").read_bytes() == identity
    assert not (folder / "damaged").exists()
    assert "nothing to repair" in done("repair", folder)


def test_an_identity_that_cannot_be_rebuilt(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    make_store(folder)
    (folder / "STORE").unlink()
    for file in folder.glob("*.tc"):
        flip(file, 100)
    result = invoke("repair", folder)
    assert result.exit_code == 1
    assert "it cannot be rebuilt, because no data file has a valid header" in result.stdout


def test_stores_that_a_run_does_not_name_are_reported(tmp_path: Path) -> None:
    """A run of a user's own loop has no config: the folder of its rows is unknown."""
    table = tc.Table(4, tc.SGD(lr=0.1), mem="1MB", ssd=tmp_path / "rows", name="ads")
    tc.Checkpoints(tmp_path / "run", [table]).save(1)
    table.close()
    inspected = invoke("inspect", str(tmp_path / "run"), "--check")
    assert "rows of ads: not inspected; the run does not name their ssd folder" in inspected.output
    repaired = invoke("repair", str(tmp_path / "run"))
    assert repaired.exit_code == 1
    assert "rows of ads were not repaired" in repaired.output
