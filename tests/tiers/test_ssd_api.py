"""The Python interface of `SsdStore`: rows, epochs, buffers, threads. test_ssd_oracle.py compares contents."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from helpers.ssd import ROW, SMALL, contents, rows_of, some_keys

import thermocline as tc

# ---- rows


def test_get_put_delete(store: tc.SsdStore) -> None:
    keys = some_keys(5000)
    found, rows = store.get(keys)
    assert found.dtype == np.bool_
    assert rows.dtype == np.uint8
    assert rows.shape == (len(keys), ROW)
    assert not found.any()
    assert not rows.any()

    store.put(keys, rows_of(keys))
    store.put(keys[::3], rows_of(keys[::3], version=1))
    store.delete(keys[::5])
    want = rows_of(keys)
    want[::3] = rows_of(keys[::3], version=1)
    want[::5] = 0
    for _ in ("in the log", "in the bases"):
        found, rows = store.get(keys)
        assert np.array_equal(found, np.arange(len(keys)) % 5 != 0)
        assert np.array_equal(rows, want)
        assert len(store) == found.sum()
        store.merge()
    store.check()


def test_first_and_last_keys_are_legal(store: tc.SsdStore) -> None:
    keys = np.array([0, 1, 2**63 - 1, 2**63, 2**64 - 1], dtype=np.uint64)
    store.put(keys, rows_of(keys))
    store.merge()
    found, rows = store.get(keys)
    assert found.all()
    assert np.array_equal(rows, rows_of(keys))


def test_repeated_keys(store: tc.SsdStore) -> None:
    keys = np.array([7, 7, 9, 7], dtype=np.uint64)
    rows = np.arange(4 * ROW, dtype=np.uint8).reshape(4, ROW)
    store.put(keys, rows)  # the last row is kept
    found, got = store.get(keys)
    assert found.all()
    assert np.array_equal(got, rows[[3, 3, 2, 3]])
    assert len(store) == 2


def test_empty_batches(store: tc.SsdStore) -> None:
    none = np.empty(0, dtype=np.uint64)
    store.put(none, np.empty((0, ROW), dtype=np.uint8))
    store.delete(none)
    found, rows = store.get(none)
    assert found.shape == (0,)
    assert rows.shape == (0, ROW)
    assert list(store.scan()) == []
    assert len(store) == 0


def test_scan_sees_every_live_row_once(store: tc.SsdStore) -> None:
    keys = some_keys(3000)
    store.put(keys, rows_of(keys))
    store.merge()
    store.put(keys[:500], rows_of(keys[:500], 1))
    store.delete(keys[500:700])
    want = rows_of(keys)
    want[:500] = rows_of(keys[:500], 1)
    expected = {int(k): r.tobytes() for i, (k, r) in enumerate(zip(keys, want, strict=True)) if not 500 <= i < 700}
    assert contents(store) == expected
    sizes = [len(batch) for batch, _ in store.scan(batch_rows=7)]
    assert max(sizes) <= 7
    assert sum(sizes) == len(expected)


def test_scan_reads_a_snapshot(store: tc.SsdStore) -> None:
    keys = some_keys(2000)
    store.put(keys, rows_of(keys))
    scan = store.scan(batch_rows=100)
    store.put(keys, rows_of(keys, 1))
    store.delete(keys[:100])
    store.merge()
    got = np.concatenate([batch for batch, _ in scan])
    assert np.array_equal(np.sort(got), keys)
    assert all(np.array_equal(rows, rows_of(batch, 1)) for batch, rows in store.scan())


def test_stats_are_plain_numbers(store: tc.SsdStore) -> None:
    keys = some_keys(5000)
    store.put(keys, rows_of(keys))
    store.commit()
    store.get(keys)
    stats = store.stats()
    assert isinstance(stats, tc.SsdStats)
    assert stats.epoch == 1
    assert stats.mem_budget == 16_000_000
    assert 0 < stats.mem_total <= stats.mem_budget
    assert stats.bytes_put >= len(keys) * (ROW + 8)
    assert stats.write_amplification >= 1
    assert stats.keys_read >= len(keys)
    on_disk = sum(file.stat().st_size for file in Path(store.path).iterdir())
    assert stats.disk_bytes <= on_disk
    assert stats.engine
    with pytest.raises(AttributeError):
        stats.epoch = 2  # type: ignore[misc]


def test_repr_and_properties(folder: Path) -> None:
    store = tc.SsdStore.open(folder, row_bytes=ROW, mem_budget="16MB")
    assert store.row_bytes == ROW
    assert store.path == str(folder)
    assert "row_bytes=32" in repr(store)
    assert bool(store)
    store.close()
    assert "closed" in repr(store)


# ---- commits and epochs


def test_open_restores_the_last_commit(folder: Path) -> None:
    keys = some_keys(3000)
    with tc.SsdStore.open(folder, row_bytes=ROW, **SMALL) as store:
        assert store.epoch == 0
        assert store.note == b""
        assert store.epochs == ()
        store.put(keys[:2000], rows_of(keys[:2000]))
        assert store.commit(note=b"step 10\0\xff") == 1
        store.put(keys, rows_of(keys, 1))  # never committed
        store.delete(keys[:10])
    with tc.SsdStore.open(folder, **SMALL) as store:
        assert store.row_bytes == ROW
        assert store.epoch == 1
        assert store.note == b"step 10\0\xff"
        found, rows = store.get(keys)
        assert np.array_equal(found, np.arange(len(keys)) < 2000)
        assert np.array_equal(rows[:2000], rows_of(keys[:2000]))
        store.check()


def test_old_epochs_open_until_released(folder: Path) -> None:
    keys = some_keys(2000)
    with tc.SsdStore.open(folder, row_bytes=ROW, **SMALL) as store:
        for version in range(1, 6):
            store.put(keys, rows_of(keys, version))
            assert store.commit(note=str(version).encode()) == version
            store.merge()
        assert store.epochs == (1, 2, 3, 4, 5)
        store.release(2)
        store.release(4)
        assert store.epochs == (1, 3, 5)
        with pytest.raises(tc.ThermoclineError, match="5"):
            store.release(5)  # the newest
        with pytest.raises(tc.NotFoundError, match="2"):
            store.release(2)
    for version in (1, 3, 5):
        with tc.SsdStore.open(folder, epoch=version, read_only=True, mem_budget="16MB") as store:
            assert store.epoch == version
            assert store.note == str(version).encode()
            found, rows = store.get(keys)
            assert found.all()
            assert np.array_equal(rows, rows_of(keys, version))
            store.check()
    for missing in (2, 6):
        with pytest.raises(tc.NotFoundError, match=str(missing)):
            tc.SsdStore.open(folder, epoch=missing)


def test_continue_from_an_older_epoch(folder: Path) -> None:
    keys = some_keys(1000)
    with tc.SsdStore.open(folder, row_bytes=ROW, **SMALL) as store:
        for version in (1, 2, 3):
            store.put(keys, rows_of(keys, version))
            store.commit()
    with tc.SsdStore.open(folder, epoch=1, **SMALL) as store:
        assert np.array_equal(store.get(keys)[1], rows_of(keys, 1))
        store.put(keys[:10], rows_of(keys[:10], 9))
        epoch = store.commit(b"another way")
    with tc.SsdStore.open(folder, **SMALL) as store:
        assert store.epoch == epoch
        assert store.note == b"another way"
        _, rows = store.get(keys)
        assert np.array_equal(rows[:10], rows_of(keys[:10], 9))
        assert np.array_equal(rows[10:], rows_of(keys[10:], 1))
        store.check()


def test_commit_takes_bytes_only(store: tc.SsdStore) -> None:
    with pytest.raises(TypeError, match="encode"):
        store.commit("text")  # type: ignore[arg-type]
    store.commit(bytearray(b"ab"))
    assert store.note == b"ab"


def test_link_checkpoint_creates_an_independent_store(store: tc.SsdStore, tmp_path: Path) -> None:
    keys = some_keys(2000)
    store.put(keys, rows_of(keys))
    epoch = store.commit(b"kept")
    store.put(keys, rows_of(keys, 1))
    store.link_checkpoint(tmp_path / "copy")
    store.commit()
    store.release(epoch)
    store.merge()
    with tc.SsdStore.open(tmp_path / "copy", **SMALL) as copy:
        assert copy.note == b"kept"
        assert np.array_equal(copy.get(keys)[1], rows_of(keys))
        copy.put(keys, rows_of(keys, 2))
        copy.commit()
        copy.check()
    assert np.array_equal(store.get(keys)[1], rows_of(keys, 1))
    with pytest.raises(tc.ThermoclineError):
        store.link_checkpoint(tmp_path / "copy")  # the folder exists


# ---- buffers and dtypes


def test_out_is_written_in_place_and_returned(store: tc.SsdStore) -> None:
    keys = some_keys(100)
    store.put(keys[:50], rows_of(keys[:50]))
    out = np.full((100, ROW), 0xAB, dtype=np.uint8)
    found, rows = store.get(keys, out=out)
    assert rows is out
    assert np.array_equal(out[found], rows_of(keys[found]))
    assert (out[~found] == 0xAB).all()


def test_out_with_a_row_stride(store: tc.SsdStore) -> None:
    keys = some_keys(100)
    wide = np.zeros((100, 3 * ROW), dtype=np.uint8)
    wide[:, ROW : 2 * ROW] = rows_of(keys)
    store.put(keys, wide[:, ROW : 2 * ROW])
    target = np.zeros((100, 2 * ROW), dtype=np.uint8)
    store.get(keys, out=target[:, ROW:])
    assert np.array_equal(target[:, ROW:], rows_of(keys))
    assert not target[:, :ROW].any()


def test_float_rows(store: tc.SsdStore) -> None:
    keys = some_keys(64)
    values = np.random.default_rng(1).normal(size=(len(keys), ROW // 4)).astype(np.float32)
    store.put(keys, values)
    out = np.zeros_like(values)
    store.get(keys, out=out)
    assert np.array_equal(values, out)


def test_int64_keys_are_bit_patterns(store: tc.SsdStore) -> None:
    keys = some_keys(100)
    store.put(keys.view(np.int64), rows_of(keys))
    assert store.get(keys)[0].all()
    assert store.get([int(k) for k in keys])[0].all()
    store.delete(keys.view(np.int64)[:10])
    assert len(store) == len(keys) - 10


def test_strided_and_read_only_keys_and_rows(store: tc.SsdStore) -> None:
    keys, rows = some_keys(100), rows_of(some_keys(100))
    rows.flags.writeable = False
    keys.flags.writeable = False
    store.put(keys[::2], rows[::2])
    found, _ = store.get(keys)
    assert np.array_equal(found, np.arange(len(keys)) % 2 == 0)


def test_torch_tensors_are_not_copied(store: tc.SsdStore) -> None:
    torch = pytest.importorskip("torch")
    keys = some_keys(100)
    key_tensor = torch.from_numpy(keys.view(np.int64))
    weights = torch.randn(len(keys), ROW // 4, requires_grad=True)
    store.put(key_tensor, weights)
    out = torch.zeros(len(keys), ROW // 4)
    found, rows = store.get(key_tensor, out=out)
    assert found.all()
    assert rows is out
    assert torch.equal(out, weights)
    with pytest.raises(TypeError, match="view"):
        store.put(key_tensor, torch.zeros(len(keys), ROW // 2, dtype=torch.bfloat16))
    store.put(key_tensor, torch.zeros(len(keys), ROW // 2, dtype=torch.bfloat16).view(torch.uint8))


BAD_CALLS: list[tuple[str, type[Exception], str, Callable[[tc.SsdStore], object]]] = [
    ("float keys", TypeError, "dtype float64", lambda s: s.get(np.zeros(3))),
    ("int32 keys", TypeError, "dtype int32", lambda s: s.get(np.zeros(3, dtype=np.int32))),
    ("keys of two dimensions", ValueError, "one-dimensional", lambda s: s.get(np.zeros((3, 1), dtype=np.uint64))),
    ("keys of text", TypeError, "NumPy array", lambda s: s.get("abc")),
    ("float in a list", TypeError, r"keys\[0\] is 1.5: keys must be whole", lambda s: s.get([1.5])),
    ("negative in a list", OverflowError, r"keys\[0\] is -1", lambda s: s.get([-1])),
    ("too few rows", ValueError, "3 rows", lambda s: s.put([1, 2, 3], np.zeros((2, ROW), dtype=np.uint8))),
    ("too narrow rows", ValueError, "32 bytes", lambda s: s.put([1], np.zeros((1, ROW - 1), dtype=np.uint8))),
    ("one row without its axis", ValueError, "shape", lambda s: s.put([1], np.zeros(ROW, dtype=np.uint8))),
    ("list of rows", TypeError, "list", lambda s: s.put([1], [[0] * ROW])),
    ("columns not contiguous", ValueError, "contiguous", lambda s: s.put([1, 2], np.zeros((ROW, 2), dtype=np.uint8).T)),
    ("objects", TypeError, "object", lambda s: s.put([1], np.zeros((1, ROW // 8), dtype=object))),
    (
        "reversed rows",
        ValueError,
        "in reverse order",
        lambda s: s.put([1, 2], np.zeros((2, ROW), dtype=np.uint8)[::-1]),
    ),
    ("read-only out", ValueError, "read-only", lambda s: s.get([1], out=np.frombuffer(bytes(ROW), np.uint8)[None])),
    ("out too small", ValueError, "2 rows", lambda s: s.get([1, 2], out=np.zeros((1, ROW), dtype=np.uint8))),
    ("empty scan batches", ValueError, "batch_rows", lambda s: s.scan(0)),
]


@pytest.mark.parametrize(("kind", "text", "call"), [b[1:] for b in BAD_CALLS], ids=[b[0] for b in BAD_CALLS])
def test_bad_arguments(
    store: tc.SsdStore, kind: type[Exception], text: str, call: Callable[[tc.SsdStore], object]
) -> None:
    with pytest.raises(kind, match=text):
        call(store)
    assert len(store) == 0


# ---- threads


def test_concurrent_calls(store: tc.SsdStore) -> None:
    """Four threads with disjoint keys put, get, delete and commit concurrently; each reads its own last write."""
    batches = 30

    def work(worker: int) -> npt.NDArray[np.uint64]:
        rng = np.random.default_rng(worker)
        mine = some_keys(4000, seed=worker + 1)
        version = np.zeros(len(mine), dtype=np.int64)
        for batch in range(1, batches + 1):
            picked = np.unique(rng.integers(0, len(mine), 400))
            store.put(mine[picked], rows_of(mine[picked], batch))
            version[picked] = batch
            looked = rng.integers(0, len(mine), 600)
            found, rows = store.get(mine[looked])
            assert np.array_equal(found, version[looked] > 0)
            for v in np.unique(version[looked][found]):
                of = version[looked] == v
                assert np.array_equal(rows[of], rows_of(mine[looked][of], int(v)))
            if batch % 10 == 0:
                store.commit()
        return mine[version > 0]

    with ThreadPoolExecutor(4) as pool:
        written = np.concatenate(list(pool.map(work, range(4))))
    assert len(store) == len(written)
    assert np.array_equal(np.sort(np.concatenate([k for k, _ in store.scan()])), np.sort(written))
    store.check()


def test_calls_release_the_gil(store: tc.SsdStore) -> None:
    keys = some_keys(200_000)
    store.put(keys, rows_of(keys))
    store.merge()
    done = threading.Event()
    ticks = 0

    def work() -> None:
        for _ in range(3):
            store.get(keys)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.wait(0.001):
        ticks += 1
    thread.join()
    assert ticks > 3  # a call that held the GIL would allow one or two ticks per call


def test_close_during_reads(folder: Path) -> None:
    store = tc.SsdStore.open(folder, row_bytes=ROW, **SMALL)
    keys = some_keys(20_000)
    store.put(keys, rows_of(keys))
    store.merge()

    def read() -> None:
        while True:
            found, rows = store.get(keys)
            assert found.all()
            assert np.array_equal(rows, rows_of(keys))

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        threading.Event().wait(0.2)
        store.close()
        for reader in readers:
            with pytest.raises(tc.ThermoclineError, match="closed"):
                reader.result()


def test_folders_above_a_new_store_are_created(tmp_path: Path) -> None:
    with tc.SsdStore.open(tmp_path / "a" / "b" / "c", row_bytes=8) as store:
        assert store.epoch == 0
    table = tc.Table(4, tc.SGD(lr=0.1), mem="1MB", ssd=tmp_path / "x" / "y", ssd_mem="16MB")
    table.close()
    assert (tmp_path / "x" / "y" / "STORE").exists()
    (tmp_path / "file").touch()
    with pytest.raises(tc.IoError, match=r"file/b/c: the folders above it cannot be created \(.*file is a file"):
        tc.SsdStore.open(tmp_path / "file" / "b" / "c", row_bytes=8)
    with pytest.raises(tc.NotFoundError):
        tc.SsdStore.open(tmp_path / "none" / "b", read_only=True)
    assert not (tmp_path / "none").exists()
