"""Errors of `SsdStore`: each cause has its own exception, and no data is lost."""

from __future__ import annotations

import errno
import gc
import os
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import SMALL as CONFIG
from helpers.ssd import ROW, SMALL, contents, rows_of, some_keys

import thermocline as tc
from thermocline.tiers import ssd

# ---- errors of opening


def test_second_open_is_refused(store: tc.SsdStore, folder: Path) -> None:
    with pytest.raises(tc.LockError, match=str(folder)):
        tc.SsdStore.open(folder, row_bytes=ROW)
    code = f"import thermocline as tc; tc.SsdStore.open({str(folder)!r}, row_bytes={ROW})"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "LockError" in child.stderr
    store.put([1], np.zeros((1, ROW), dtype=np.uint8))  # the first store still works
    store.commit()


def test_readers_need_no_lock(store: tc.SsdStore, folder: Path) -> None:
    keys = some_keys(500)
    store.put(keys, rows_of(keys))
    store.commit()
    store.put(keys, rows_of(keys, 1))
    with tc.SsdStore.open(folder, read_only=True) as reader, tc.SsdStore.open(folder, read_only=True) as another:
        assert np.array_equal(reader.get(keys)[1], rows_of(keys))
        assert np.array_equal(another.get(keys)[1], rows_of(keys))


def test_lock_is_released_with_the_object(folder: Path) -> None:
    store = tc.SsdStore.open(folder, row_bytes=ROW, **SMALL)
    del store
    gc.collect()
    tc.SsdStore.open(folder, row_bytes=ROW, **SMALL).close()


def test_wrong_row_bytes(store: tc.SsdStore, folder: Path) -> None:
    store.commit()
    store.close()
    with pytest.raises(tc.FormatError, match=r"32.*64|64.*32"):
        tc.SsdStore.open(folder, row_bytes=64)
    tc.SsdStore.open(folder, row_bytes=ROW).close()


@pytest.mark.parametrize("row_bytes", [0, -1])
def test_row_bytes_must_be_positive(folder: Path, row_bytes: int) -> None:
    with pytest.raises(ValueError, match="row_bytes"):
        tc.SsdStore.open(folder, row_bytes=row_bytes)
    assert not folder.exists()


def test_folder_that_is_not_a_store_is_unchanged(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.txt").write_text("two years of work")
    for options in ({"row_bytes": ROW}, {}, {"read_only": True}):
        with pytest.raises(tc.FormatError, match=str(folder)):
            tc.SsdStore.open(folder, **options)  # type: ignore[arg-type]
    assert [file.name for file in folder.iterdir()] == ["thesis.txt"]


def test_missing_store(folder: Path) -> None:
    for options in ({}, {"row_bytes": ROW, "create": False}, {"read_only": True}, {"row_bytes": ROW, "epoch": 1}):
        with pytest.raises(tc.NotFoundError, match=str(folder)):
            tc.SsdStore.open(folder, **options)  # type: ignore[arg-type]
    assert not folder.exists()


def test_path_is_a_file(folder: Path) -> None:
    folder.write_text("a file")
    with pytest.raises(tc.StoreError, match=str(folder)):
        tc.SsdStore.open(folder, row_bytes=ROW)
    assert folder.read_text() == "a file"


def xxh64(data: bytes, seed: int) -> int:
    """XXH64 from the public specification, independent of the C++ implementation."""
    p1, p2, p3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
    p4, p5, mask = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5, 2**64 - 1

    def rotl(x: int, r: int) -> int:
        return ((x << r) | (x >> (64 - r))) & mask

    def mix(acc: int, comm: int) -> int:
        return rotl((acc + comm * p2) & mask, 31) * p1 & mask

    at, h = 0, (seed + p5) & mask
    if len(data) >= 32:
        accs = [(seed + p1 + p2) & mask, (seed + p2) & mask, seed, (seed - p1) & mask]
        for at in range(0, len(data) - 31, 32):
            accs = [mix(a, comm) for a, comm in zip(accs, struct.unpack_from("<4Q", data, at), strict=True)]
        at += 32
        h = sum(rotl(a, r) for a, r in zip(accs, (1, 7, 12, 18), strict=True)) & mask
        for a in accs:
            h = ((h ^ mix(0, a)) * p1 + p4) & mask
    h = (h + len(data)) & mask
    while at + 8 <= len(data):
        h = (rotl(h ^ mix(0, struct.unpack_from("<Q", data, at)[0]), 27) * p1 + p4) & mask
        at += 8
    if at + 4 <= len(data):
        h = (rotl(h ^ (struct.unpack_from("<I", data, at)[0] * p1 & mask), 23) * p2 + p3) & mask
        at += 4
    for byte in data[at:]:
        h = rotl(h ^ (byte * p5 & mask), 11) * p1 & mask
    h = (h ^ (h >> 33)) * p2 & mask
    h = (h ^ (h >> 29)) * p3 & mask
    return h ^ (h >> 32)


def test_newer_format_version(store: tc.SsdStore, folder: Path) -> None:
    store.commit()
    store.close()
    record = (folder / "STORE").read_bytes()
    assert struct.unpack("<Q", record[-8:])[0] == xxh64(record[:-8], 0x53544F5245)
    newer = record[:8] + struct.pack("<I", 2) + record[12:-8]
    (folder / "STORE").write_bytes(newer + struct.pack("<Q", xxh64(newer, 0x53544F5245)))
    with pytest.raises(tc.FormatError, match=r"version 2.*upgrade"):
        tc.SsdStore.open(folder)
    (folder / "STORE").write_bytes(record)
    tc.SsdStore.open(folder).close()


def test_damaged_identity_file(store: tc.SsdStore, folder: Path) -> None:
    store.commit()
    store.close()
    record = bytearray((folder / "STORE").read_bytes())
    record[30] ^= 1
    (folder / "STORE").write_bytes(record)
    with pytest.raises(tc.CorruptionError, match="STORE"):
        tc.SsdStore.open(folder)


def test_budget_too_small(folder: Path) -> None:
    with pytest.raises(tc.BudgetError, match=r"mem_budget|budget"):
        tc.SsdStore.open(folder, row_bytes=ROW, mem_budget=1000)


def test_bad_options(folder: Path) -> None:
    with pytest.raises(ValueError, match="mem_budget"):
        tc.SsdStore.open(folder, row_bytes=ROW, mem_budget="lots")
    with pytest.raises(tc.ThermoclineError, match="io_engine"):
        tc.SsdStore.open(folder, row_bytes=ROW, io_engine="magic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="epoch"):
        tc.SsdStore.open(folder, row_bytes=ROW, epoch=-1)


@pytest.mark.parametrize("engine", ["pread", "auto"])
def test_engines_agree(folder: Path, engine: Any) -> None:
    keys = some_keys(3000)
    with tc.SsdStore.open(folder, row_bytes=ROW, io_engine=engine, io_workers=2, io_depth=4, **SMALL) as store:
        store.put(keys, rows_of(keys))
        store.commit()
        store.merge()
        assert np.array_equal(store.get(keys)[1], rows_of(keys))
        assert store.stats().engine in ("pread", "io_uring")


def test_folder_name_that_is_not_utf8(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/st\xff"))
    with tc.SsdStore.open(folder, row_bytes=ROW) as store:
        store.commit()
        with pytest.raises(tc.LockError) as caught:
            tc.SsdStore.open(folder)
    assert str(folder) in str(caught.value)


# ---- states of an open store


def test_read_only(store: tc.SsdStore, folder: Path) -> None:
    keys = some_keys(100)
    store.put(keys, rows_of(keys))
    store.commit()
    store.commit()
    store.close()
    before = sorted((file.name, file.stat().st_mtime_ns) for file in folder.iterdir())
    with tc.SsdStore.open(folder, read_only=True) as reader:
        for change in (
            lambda: reader.put(keys, rows_of(keys)),
            lambda: reader.delete(keys),
            lambda: reader.commit(),
            lambda: reader.release(1),
        ):
            with pytest.raises(tc.ReadOnlyError):
                change()
        assert np.array_equal(reader.get(keys)[1], rows_of(keys))
        assert len(reader) == len(keys)
        assert len(contents(reader)) == len(keys)
        reader.check()
    assert sorted((file.name, file.stat().st_mtime_ns) for file in folder.iterdir()) == before


def test_closed(store: tc.SsdStore) -> None:
    store.commit()
    store.close()
    store.close()
    calls: list[Callable[[], object]] = [
        lambda: store.get([1]),
        lambda: store.put([1], np.zeros((1, ROW), dtype=np.uint8)),
        lambda: store.delete([1]),
        lambda: store.commit(),
        lambda: store.scan(),
        lambda: store.stats(),
        lambda: store.check(),
        lambda: len(store),
    ]
    for call in calls:
        with pytest.raises(tc.ThermoclineError, match="closed"):
            call()


def test_close_during_a_scan(store: tc.SsdStore) -> None:
    keys = some_keys(5000)
    store.put(keys, rows_of(keys))
    store.commit()
    scan = store.scan(batch_rows=10)
    next(scan)
    store.close()
    try:
        rest = sum(len(batch) for batch, _ in scan)
    except tc.ThermoclineError:
        return  # refused
    assert rest == len(keys) - 10  # or complete: no crash, no partial result


def test_context_manager_closes_without_commit(folder: Path) -> None:
    def use() -> None:
        with tc.SsdStore.open(folder, row_bytes=ROW, **SMALL) as store:
            store.put([1], np.zeros((1, ROW), dtype=np.uint8))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    with tc.SsdStore.open(folder, row_bytes=ROW, **SMALL) as store:
        assert store.epoch == 0
        assert len(store) == 0


def test_damage_is_named_and_other_rows_are_readable(folder: Path) -> None:
    keys = some_keys(4000)
    with tc.SsdStore.open(folder, row_bytes=ROW, **SMALL) as store:
        store.put(keys, rows_of(keys))
        store.merge()
        store.commit()
    victim = max(folder.glob("base-*"), key=lambda file: file.stat().st_size)
    data = bytearray(victim.read_bytes())
    page = 4096 * 2
    data[page + 100] ^= 0x10
    victim.write_bytes(data)
    with tc.SsdStore.open(folder, **SMALL) as store:
        with pytest.raises(tc.CorruptionError, match=rf"{victim.name}.*page 2"):
            store.get(keys)
        with pytest.raises(tc.CorruptionError, match=victim.name):
            store.check()
        readable = 0
        for part in np.array_split(keys, 2000):
            try:
                found, rows = store.get(part)
            except tc.CorruptionError:
                continue
            assert found.all()
            assert np.array_equal(rows, rows_of(part))
            readable += len(part)
        assert readable > len(keys) * 0.8


def test_io_errors_are_os_errors(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(tc.IoError) as caught:
        tc.SsdStore.open(tmp_path / "file" / "parent", row_bytes=ROW)
    assert caught.value.errno in (errno.EEXIST, errno.ENOTDIR)
    with pytest.raises(tc.IoError, match="the folders above it cannot be created") as caught:
        tc.SsdStore.open(tmp_path / "file" / "above" / "parent", row_bytes=ROW)
    assert caught.value.errno == errno.EEXIST


def test_damage_found_by_a_merge_warns_once_with_the_command(folder: Path) -> None:
    keys = some_keys(4000)
    with tc.SsdStore.open(folder, row_bytes=ROW, **SMALL) as store:
        store.put(keys, rows_of(keys))
        store.merge()
        store.commit()
        assert store.damage == ""
    victim = sorted(folder.glob("base-*"))[0]
    data = bytearray(victim.read_bytes())
    data[4096 + 100] ^= 0x10
    victim.write_bytes(data)
    with tc.SsdStore.open(folder, **SMALL) as store:
        store.put(keys, rows_of(keys, 1))
        with pytest.raises(tc.CorruptionError, match=victim.name):
            store.merge()
        with pytest.warns(RuntimeWarning, match=f"{victim.name}: page 1.*thermocline repair {folder}"):
            stats = store.stats()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            store.stats()
            store.commit()
        assert stats.damaged_partitions == 1
        assert stats.set_aside_log_bytes > 0
        assert store.damage.startswith(str(victim))
        assert f"thermocline repair {folder}" in store.damage
        assert np.array_equal(store.get(keys)[1], rows_of(keys, 1))  # the newer rows are in the log


# ---- memory


def test_default_memory_is_sized_from_machine_store_and_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def budget(memory: int, ranks: int = 1) -> int:
        monkeypatch.setattr(ssd, "memory_bytes", lambda: memory)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        with tc.SsdStore.open(folder, row_bytes=ROW) as store:
            return store.stats().mem_budget

    assert budget(1 << 30) == 256_000_000
    assert budget(64 << 30) == 8 << 30
    assert budget(64 << 30, ranks=8) == 1 << 30
    folder.joinpath("base-000001.tc").touch()
    os.truncate(folder / "base-000001.tc", 1 << 40)  # sparse: a store whose fences have 2 GiB
    monkeypatch.setattr(ssd, "memory_bytes", lambda: 128 << 30)
    assert ssd.default_mem_budget(folder) == 256_000_000 + (4 << 30)
    monkeypatch.setattr(ssd, "memory_bytes", lambda: 4 << 30)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert ssd.default_mem_budget(folder) == 2 << 30


def test_expected_keys_that_do_not_fit_are_refused_with_the_numbers(folder: Path) -> None:
    with pytest.raises(tc.BudgetError, match=r"mem_budget is 16000000 bytes, but the expected 10000000000 rows .* \d+"):
        tc.SsdStore.open(folder, row_bytes=ROW, expected_keys=10**10, **SMALL)
    tc.SsdStore.open(folder, row_bytes=ROW, expected_keys=10**6, **SMALL).close()
    with pytest.raises(ValueError, match="expected_keys is 0: it must be at least 1"):
        tc.SsdStore.open(folder, row_bytes=ROW, expected_keys=0, **SMALL)
    with pytest.raises(tc.BudgetError, match="expected 10000000000 rows"):
        tc.Table(8, tc.SGD(), ssd=folder.parent / "table", ssd_mem="16MB", expected_keys=10**10)
    config = tc.Config.parse(
        CONFIG,
        [
            f"train.run_dir={folder.parent}/run",
            f"tiers.ssd={folder.parent}/run-store",
            "tiers.expected_keys=10000000000",
        ],
    )
    with pytest.raises(tc.BudgetError, match="expected 10000000000 rows"):
        tc.Run(config)
