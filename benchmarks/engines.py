"""Engines of benchmarks/ssd.py: our store, RocksDB and LMDB behind one interface, configured as their authors advise.

Keys and rows are converted (for the peers, to sorted lists of bytes) outside the timed calls: `as_keys`, `as_rows`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import importlib
import importlib.util
import mmap
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PEER_PACKAGES = Path(__file__).resolve().parent.parent / ".cache" / "peers"
PEERS = {"rocksdb": ("rocksdict", "rocksdict==0.3.29"), "lmdb": ("lmdb", "lmdb==3.0.0")}  # module, package

U64 = npt.NDArray[np.uint64]
ODD, STEP = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)


class Data:
    """`rows` rows of `row_bytes` bytes; key and row are functions of an index, so that no data is stored."""

    def __init__(self, rows: int, row_bytes: int) -> None:
        self.rows, self.row_bytes, self.words = rows, row_bytes, row_bytes // 8

    def keys(self, index: npt.NDArray[np.integer[Any]]) -> U64:
        """Distinct keys of distinct indices, uniform over 64 bits (splitmix64)."""
        z = (index.astype(np.uint64) + np.uint64(1)) * ODD
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    def values(self, keys: U64, version: int = 0) -> npt.NDArray[np.uint8]:
        steps = np.arange(self.words, dtype=np.uint64) * STEP + np.uint64(version)
        return ((keys * ODD)[:, None] + steps).view(np.uint8)

    def sample(self, rng: np.random.Generator, count: int) -> U64:
        return self.keys(rng.choice(self.rows, count, replace=False))

    def check(self, keys: U64, rows: npt.NDArray[np.uint8]) -> None:
        """Raise SystemExit unless every row is a version of the row of its key."""
        words = rows.view(np.uint64).reshape(len(keys), self.words)
        version = words[:, :1] - (keys * ODD)[:, None]
        expected = version + np.arange(self.words, dtype=np.uint64) * STEP + (keys * ODD)[:, None]
        if not (words == expected).all() or (version > np.uint64(1 << 20)).any():
            raise SystemExit("wrong results: rows that were read were never written")


def in_hash_order(keys: U64) -> U64:
    """Keys in the order of our store, in which a look-ahead passes them."""
    from thermocline.embedding.key_hash import hash_keys

    return keys[np.argsort(hash_keys(keys))]


def disk_bandwidth(path: Path, seconds: float = 2.0) -> float:
    """Bytes per second of reads of 1 MiB, O_DIRECT, by one thread per core (at least eight), of a folder's files."""
    size, stop = 1 << 20, time.perf_counter() + seconds
    parts = [(file, at) for file in sorted(path.iterdir()) for at in range(0, file.stat().st_size - size + 1, size)]
    threads = max(8, os.cpu_count() or 1)

    def work(first: int) -> int:
        done = 0
        with mmap.mmap(-1, size) as buffer:
            for file, at in parts[first::threads]:
                if time.perf_counter() > stop:
                    break
                fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
                done += os.preadv(fd, [buffer], at)
                os.close(fd)
        return done

    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        done = sum(pool.map(work, range(threads)))
    return done / (time.perf_counter() - start)


def installed(kind: str) -> bool:
    """Whether the engine is available; a missing peer is installed once into .cache/peers."""
    if kind not in PEERS:
        return True
    module, package = PEERS[kind]
    if str(PEER_PACKAGES) not in sys.path:
        sys.path.append(str(PEER_PACKAGES))
    if importlib.util.find_spec(module) is None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(PEER_PACKAGES), package], capture_output=True)
        importlib.invalidate_caches()
    return importlib.util.find_spec(module) is not None


def folder_bytes(path: Path) -> int:
    total = 0
    for file in path.iterdir():
        with contextlib.suppress(FileNotFoundError):  # merged away meanwhile
            total += file.stat().st_blocks * 512
    return total


def drop_cache(path: Path) -> None:
    """Empty the page cache of the files in a folder, including mappings of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    prefix = str(path.resolve()) + os.sep
    for line in Path("/proc/self/maps").read_text().splitlines():
        if prefix in line:
            start, end = (int(x, 16) for x in line.split()[0].split("-"))
            libc.madvise(start, end - start, 4)  # MADV_DONTNEED: unmaps pages, keeps the file's data
    for file in path.iterdir():
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def in_threads(count: int, items: list[bytes], work: Callable[[list[bytes]], list[bytes]]) -> list[bytes]:
    """work(items), split into `count` contiguous parts that run in parallel."""
    if count == 1:
        return work(items)
    parts: list[list[bytes]] = [[] for _ in range(count)]

    def run(i: int) -> None:
        parts[i] = work(items[i * len(items) // count : (i + 1) * len(items) // count])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [row for part in parts for row in part]


def cut(data: npt.NDArray[Any], size: int) -> list[bytes]:
    raw = data.tobytes()
    return [raw[at : at + size] for at in range(0, len(raw), size)]


class Engine:
    """One engine on one folder; `threads` is the number of threads of a get."""

    name = ""
    thread_choices: tuple[int, ...] = (1,)

    def __init__(self, folder: Path, data: Data, budget: int, *, writes: bool) -> None:
        self.path, self.data, self.budget, self.writes = folder, data, budget, writes
        self.threads = self.thread_choices[-1]

    def load(self, progress: Callable[[int], None]) -> None:
        """Write all rows to an empty folder, in the best state for reads; call progress(rows so far)."""
        raise NotImplementedError

    def open(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def compact(self) -> None:
        """Merge or compact everything: the best state for reads, also after an earlier run that wrote."""

    def as_keys(self, keys: U64) -> Any:
        return cut(np.sort(keys).astype(">u8"), 8)

    def as_rows(self, keys: U64, version: int) -> Any:
        ordered = np.sort(keys)
        pairs = cut(ordered.astype(">u8"), 8), cut(self.data.values(ordered, version), self.data.row_bytes)
        return list(zip(*pairs, strict=True))

    def get(self, keys: Any) -> Any:
        raise NotImplementedError

    def check(self, keys: U64, result: Any) -> None:
        """Raise SystemExit unless `result` contains the rows of `keys`."""
        rows = np.frombuffer(b"".join(result), dtype=np.uint8)
        self.data.check(np.sort(keys), rows.reshape(len(keys), self.data.row_bytes))

    def read_all(self) -> int:
        """Read every row once, so that it is in memory where it fits; return the number of rows."""
        raise NotImplementedError

    def put(self, rows: Any) -> None:
        raise NotImplementedError

    def commit(self) -> None:
        raise NotImplementedError

    def after_get(self) -> None:
        """Empty the page cache of the engine's files, between timed batches."""
        drop_cache(self.path)

    def counters(self) -> dict[str, float]:
        """Counters of the engine."""
        return {}


class Ours(Engine):
    name = "thermocline"
    out: npt.NDArray[np.uint8] | None = None  # output buffer of get

    def open(self) -> None:
        import thermocline as tc

        self.store = tc.SsdStore.open(self.path, row_bytes=self.data.row_bytes, mem_budget=self.budget)

    def close(self) -> None:
        self.store.close()

    def load(self, progress: Callable[[int], None]) -> None:
        """Write base files in hash order, the state after a full merge."""
        self.open()
        keys = in_hash_order(self.data.keys(np.arange(self.data.rows)))
        for at in range(0, len(keys), 1 << 20):
            part = keys[at : at + (1 << 20)]
            self.store.load(part, self.data.values(part))
            progress(at + len(part))
        self.store.merge()  # what an interrupted load left in the log
        self._commit(b"%d" % self.data.rows)
        self.close()

    def compact(self) -> None:
        self.store.merge()

    def as_keys(self, keys: U64) -> U64:
        if self.out is None or len(self.out) != len(keys):
            self.out = np.zeros((len(keys), self.data.row_bytes), dtype=np.uint8)
        return keys

    def as_rows(self, keys: U64, version: int) -> Any:
        return keys, self.data.values(keys, version)

    def get(self, keys: U64) -> Any:
        return self.store.get(keys, out=self.out)

    def check(self, keys: U64, result: Any) -> None:
        found, rows = result
        if not found.all():
            raise SystemExit("wrong results: existing keys were not found")
        self.data.check(keys, rows)

    def read_all(self) -> int:
        return sum(len(keys) for keys, _ in self.store.scan())

    def put(self, rows: Any) -> None:
        self.store.put(*rows)

    def _commit(self, note: bytes) -> None:
        self.store.commit(note)
        for old in self.store.epochs[:-1]:
            self.store.release(old)

    def commit(self) -> None:
        self._commit(self.store.note)

    def counters(self) -> dict[str, float]:
        s = self.store.stats()
        names = ("mem_total", "mem_index", "disk_bytes", "bytes_put", "bytes_written", "merges", "stall_seconds")
        names += ("rows_in_log", "read_cost_us", "page_cost_us", "false_pages", "keys_read", "reads", "pages_read")
        names += ("bytes_read", "get_scratch_peak")
        return {name: getattr(s, name) for name in names}


class RocksDb(Engine):
    """Direct I/O, full Bloom filters of 10 bits, 4 KiB blocks with a hash index, sorted batched MultiGet."""

    name = "rocksdb"
    thread_choices = (1, 8, 32)

    def _options(self) -> Any:
        import rocksdict as rd

        table = rd.BlockBasedOptions()
        table.set_bloom_filter(10, False)
        table.set_block_size(4096)
        table.set_format_version(5)
        table.set_data_block_index_type(rd.DataBlockIndexType.binary_and_hash())
        # The budget: memtables, block cache, and an eighth for the filters and indexes of the open files.
        memtables = self.budget // 4 if self.writes else 0
        self.cache = rd.Cache(self.budget - memtables - self.budget // 8)
        table.set_block_cache(self.cache)
        options = rd.Options(raw_mode=True)
        options.create_if_missing(True)
        options.enable_statistics()
        options.set_block_based_table_factory(table)
        options.set_compression_type(rd.DBCompressionType.none())
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        options.set_compaction_readahead_size(2 << 20)
        options.set_max_background_jobs(4)
        options.set_max_subcompactions(2)
        options.set_level_compaction_dynamic_level_bytes(True)
        options.set_target_file_size_base(64 << 20)
        options.set_max_open_files(-1)
        if memtables:
            options.set_write_buffer_size(memtables // 2)
            options.set_max_write_buffer_number(2)
        self.options = options
        return options

    def open(self) -> None:
        import rocksdict as rd

        # Without the column family named, rocksdict takes its options from the folder, and those have no filter policy.
        options = self._options()
        self.db = rd.Rdict(str(self.path), options, column_families={"default": options})
        self._check_filters()

    def _check_filters(self) -> None:
        """Raise SystemExit unless the Bloom filters reject absent keys: a configured filter may not be in use."""
        before = self.tickers().get("bloom.filter.useful", 0)
        rng = np.random.default_rng(1)
        self.db.get(cut(rng.integers(0, 2**63, 1000, dtype=np.uint64), 8))
        self.filtered = (self.tickers().get("bloom.filter.useful", 0) - before) / 1000
        if self.filtered < 0.95:
            raise SystemExit(
                f"RocksDB's Bloom filters rejected {self.filtered:.0%} of absent keys: they are not in use"
            )

    def close(self) -> None:
        self.db.close()
        del self.db

    def load(self, progress: Callable[[int], None]) -> None:
        """Ingest sorted files into the last level, the state after a full compaction."""
        import rocksdict as rd

        keys = np.sort(self.data.keys(np.arange(self.data.rows)))
        files = []
        for at in range(0, len(keys), 400_000):
            part = keys[at : at + 400_000]
            files.append(f"{self.path}.{at}.sst")
            writer = rd.SstFileWriter(self._options())
            writer.open(files[-1])
            rows = cut(self.data.values(part), self.data.row_bytes)
            for key, row in zip(cut(part.astype(">u8"), 8), rows, strict=True):
                writer[key] = row
            writer.finish()
            progress(at + len(part))
        db = rd.Rdict(str(self.path), self._options())
        ingest_options = rd.IngestExternalFileOptions()
        ingest_options.set_move_files(True)
        db.ingest_external_file(files, ingest_options)
        db.close()

    def compact(self) -> None:
        levels = {file["level"] for file in self.db.live_files()}
        if levels != {6}:
            self.db.flush()
            self.db.compact_range(None, None)

    def read_all(self) -> int:
        return sum(1 for _ in self.db.keys())  # noqa: SIM118

    def get(self, keys: list[bytes]) -> list[bytes]:
        return in_threads(self.threads, keys, self.db.get)

    def put(self, rows: list[tuple[bytes, bytes]]) -> None:
        import rocksdict as rd

        batch = rd.WriteBatch(raw_mode=True)
        for key, row in rows:
            batch[key] = row
        self.db.write(batch)

    def commit(self) -> None:
        self.db.flush_wal(sync=True)

    def tickers(self) -> dict[str, int]:
        tickers = re.findall(r"^rocksdb\.(\S+) COUNT : (\d+)$", self.options.get_statistics() or "", re.M)
        return {name: int(count) for name, count in tickers}

    def counters(self) -> dict[str, float]:
        t = self.tickers()
        size = {"mem_tables": "cur-size-all-mem-tables", "mem_readers": "estimate-table-readers-mem"}
        memory = {name: self.db.property_int_value("rocksdb." + key) or 0 for name, key in size.items()}
        memory["mem_cache"] = self.cache.get_usage()
        written = t.get("wal.bytes", 0) + t.get("flush.write.bytes", 0) + t.get("compact.write.bytes", 0)
        stall = t.get("stall.micros", 0) / 1e6
        totals = {"mem_total": sum(memory.values()), "bytes_written": written, "stall_seconds": stall}
        return {**memory, **totals, "absent_keys_filtered": self.filtered}


class Lmdb(Engine):
    """Sorted keys, no readahead. Its memory is the page cache: see `after_get`."""

    name = "lmdb"
    thread_choices = (1, 8, 32)

    def open(self) -> None:
        import lmdb

        size = self.data.rows * (self.data.row_bytes + 64) * 4 + (1 << 30)
        self.env = lmdb.open(str(self.path), map_size=size, readahead=False, meminit=False, max_readers=64)
        self.writing: Any = None

    def close(self) -> None:
        if self.writing is not None:
            self.writing.abort()
        self.env.close()

    def load(self, progress: Callable[[int], None]) -> None:
        self.open()
        keys = np.sort(self.data.keys(np.arange(self.data.rows)))
        for at in range(0, len(keys), 400_000):
            part = keys[at : at + 400_000]
            pairs = zip(cut(part.astype(">u8"), 8), cut(self.data.values(part), self.data.row_bytes), strict=True)
            with self.env.begin(write=True) as txn:
                txn.cursor().putmulti(pairs, append=True)
            progress(at + len(part))
        self.close()

    def get(self, keys: list[bytes]) -> list[bytes]:
        if self.writing is not None:  # uncommitted rows are visible in their transaction only, which has one thread
            return [self.writing.get(key) for key in keys]

        def work(part: list[bytes]) -> list[bytes]:
            with self.env.begin() as txn:
                return [txn.get(key) for key in part]

        return in_threads(self.threads, keys, work)

    def read_all(self) -> int:
        with self.env.begin(buffers=True) as txn:
            return sum(1 for _ in txn.cursor().iternext(keys=False, values=True))

    def put(self, rows: list[tuple[bytes, bytes]]) -> None:
        if self.writing is None:
            self.writing = self.env.begin(write=True)
        self.writing.cursor().putmulti(rows)

    def commit(self) -> None:
        self.writing.commit()  # syncs
        self.writing = None


ENGINES: dict[str, type[Engine]] = {"ours": Ours, "rocksdb": RocksDb, "lmdb": Lmdb}


@contextlib.contextmanager
def opened(engine: Engine) -> Iterator[Engine]:
    engine.open()
    try:
        yield engine
    finally:
        engine.close()


def prepare(engine: Engine, progress: Callable[[int], None]) -> None:
    """Load the folder unless an earlier run has loaded it."""
    ready = engine.path.with_suffix(".ready")
    if ready.exists():
        return
    if not isinstance(engine, Ours):
        shutil.rmtree(engine.path, ignore_errors=True)
    engine.path.mkdir(parents=True, exist_ok=True)
    engine.load(progress)
    ready.write_text("loaded\n")
