"""The SSD tier: rows by 64-bit key in files, larger than memory, exact and crash-safe. Usable by itself."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Literal, Self, SupportsIndex

import numpy as np
import numpy.typing as npt

from thermocline.arrays import Keys, Rows, as_keys, as_rows
from thermocline.core import core
from thermocline.errors import ThermoclineError
from thermocline.utils.text_format import format_size, parse_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SsdStats:
    """A store's counters at one moment. Counters of work start at zero when the store is opened."""

    epoch: int
    """The newest commit; 0 before the first."""
    rows_in_base: int
    rows_in_log: int
    """Every version of a row in the log counts."""
    disk_bytes: int
    live_files: int
    partitions: int
    log_bytes: int
    base_bytes: int
    mem_index: int
    mem_buffers: int
    mem_total: int
    """Bytes of DRAM held, everything counted; never above mem_budget."""
    mem_budget: int
    keys_read: int
    pages_read: int
    reads: int
    """Requests to the device: neighbouring pages share one."""
    bytes_read: int
    false_pages: int
    """Pages read for a key that was not on them."""
    bytes_put: int
    """Rows and keys given to put and delete."""
    bytes_written: int
    """Everything written to disk."""
    merges: int
    merge_bytes_read: int
    merge_bytes_written: int
    stall_seconds: float
    """Time put waited for the merger."""
    read_cost_us: float
    """Cost of one more request on this device, as measured."""
    page_cost_us: float
    """Cost of one more page in a request, as measured."""
    engine: str
    """How files are read: io_uring or pread."""
    damage: str
    """A page that merging could not read: its partition is no longer merged; the rest is. Empty: none."""

    @property
    def write_amplification(self) -> float:
        """Bytes written per byte put, since opening."""
        return self.bytes_written / self.bytes_put if self.bytes_put else 0.0


class SsdStore:
    """Rows of `row_bytes` bytes by 64-bit key, in one folder. Made by `SsdStore.open`.

    `put` and `delete` are seen by every `get` that starts after they return, and are durable after the next
    `commit`. Whatever happens to the process or the machine, opening gives exactly the last commit, or an older one
    that is still retained. Every page read is verified by its checksum: damage raises `CorruptionError`.

    Thread safety: all methods may be called from several threads at once; none holds the GIL while it works.
    """

    __slots__ = ("_core", "_path", "_row_bytes")

    def __init__(self, core_store: core.SsdStore, path: str) -> None:
        self._core = core_store
        self._path = path
        self._row_bytes = core_store.row_bytes

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        row_bytes: int | None = None,
        mem_budget: str | SupportsIndex = "256MB",
        create: bool = True,
        epoch: int | None = None,
        read_only: bool = False,
        max_log_ratio: float | None = None,
        filter_bits: int = 0,
        write_buffer: str | SupportsIndex | None = None,
        segment_bytes: str | SupportsIndex | None = None,
        partition_bytes: str | SupportsIndex | None = None,
        min_log_bytes: str | SupportsIndex | None = None,
        background_merge: bool = True,
        io_engine: Literal["auto", "io_uring", "pread"] = "auto",
        io_workers: int = 0,
        io_depth: int = 0,
    ) -> Self:
        """Opens the store in folder `path`; makes an empty one if there is none, `create` is set and `row_bytes` given.

        Behaviour:
          row_bytes      bytes per row; may be left out for a store that exists
          mem_budget     bytes of DRAM the store may use, such as 2**28 or "256MB"
          epoch          a retained commit to open instead of the newest; later ones stay until released
          read_only      takes no lock and changes nothing; put, delete, commit and release raise `ReadOnlyError`

        Performance (None or 0: the default):
          max_log_ratio     log bytes, as a share of base bytes, before merging starts
          filter_bits       DRAM bits per row that spare the read of keys never put; 10 spare 99 of 100 such reads
          write_buffer      bytes gathered before they are written
          segment_bytes     size of one log file
          partition_bytes   a base file splits above this size
          min_log_bytes     no merging below this much log
          background_merge  False: merging happens inside put and commit, deterministic
          io_engine         "io_uring" or "pread" threads; "auto" takes the first that works here
          io_workers        threads that read; io_depth: reads in flight of each

        Raises `NotFoundError` (no store, no such epoch), `LockError` (open elsewhere), `FormatError` (a foreign
        folder, a newer format, another row size), `CorruptionError`, `BudgetError`, `IoError`.
        """
        if row_bytes is not None and row_bytes <= 0:
            raise ValueError(f"row_bytes is {row_bytes}: a row has at least one byte")
        if epoch is not None and epoch < 0:
            raise ValueError(f"epoch is {epoch}: epochs count from 1; None opens the newest")
        options = core.StoreOptions()
        options.row_bytes = row_bytes or 0
        options.mem_budget = parse_size(mem_budget, "mem_budget")
        options.create = create and row_bytes is not None and epoch is None and not read_only
        options.read_only = read_only
        options.epoch = epoch
        options.background_merge = background_merge
        if max_log_ratio:
            options.max_log_ratio = max_log_ratio
        if not 0 <= filter_bits <= 64:
            raise ValueError(f"filter_bits is {filter_bits}: it must be from 0 (no filter) to 64")
        options.filter_bits = filter_bits
        if write_buffer:
            options.write_buffer = parse_size(write_buffer, "write_buffer")
        if segment_bytes:
            options.segment_bytes = parse_size(segment_bytes, "segment_bytes")
        if partition_bytes:
            options.partition_bytes = parse_size(partition_bytes, "partition_bytes")
        if min_log_bytes:
            options.min_log_bytes = parse_size(min_log_bytes, "min_log_bytes")
        store = core.SsdStore.open(os.fsencode(path), options, io_engine, io_workers, io_depth)
        return cls(store, os.fspath(path))

    def get(self, keys: Any, out: Any = None) -> tuple[npt.NDArray[np.bool_], Any]:
        """(found, rows): bool[n] and uint8[n, row_bytes], or `out` itself, into which the rows were written.

        keys are uint64[n] or int64[n] (bit patterns), NumPy or torch, and may repeat. Rows of keys that are not there
        are zero, or untouched in `out`: look at `found`. Raises `CorruptionError` if a page it needs is damaged.
        """
        keys = as_keys(keys)
        count = len(keys)
        found = np.zeros(count, dtype=np.bool_)
        rows = np.zeros((count, self._row_bytes), dtype=np.uint8) if out is None else out
        target = as_rows(rows, count, self._row_bytes, "out", writable=True)
        if count:
            self._core.get(keys, found.view(np.uint8), target)
        return found, rows

    def put(self, keys: Any, rows: Any) -> None:
        """Sets the rows of keys: newest wins, also among repeated keys. Seen at once, durable after `commit`.

        rows are uint8[n, row_bytes], or the same bytes in another dtype, such as float32[n, row_bytes / 4].
        """
        keys = as_keys(keys)
        self._core.put(keys, as_rows(rows, len(keys), self._row_bytes))

    def load(self, keys: Any, rows: Any) -> None:
        """As `put`, for bulk: many rows where the store has none become its files at once, without log and merging.

        That is so where no row of the store lies between these keys in the order of their hashes: `tables.bulk` cuts
        all keys into such pieces. Other rows are put.
        """
        keys = as_keys(keys)
        self._core.load(keys, as_rows(rows, len(keys), self._row_bytes))

    def delete(self, keys: Any) -> None:
        """Removes keys; those that are not there are ignored. Seen at once, durable after `commit`."""
        self._core.erase(as_keys(keys))

    def commit(self, note: bytes = b"") -> int:
        """Makes everything so far durable, together with `note`; returns the new epoch, openable until released."""
        if not isinstance(note, (bytes, bytearray, memoryview)):
            raise TypeError(f"note is a {type(note).__name__}: pass bytes, such as text.encode()")
        return self._core.commit(bytes(note))

    def scan(self, batch_rows: int = 65536) -> Iterator[tuple[Keys, Rows]]:
        """Every live row once, in batches of at most `batch_rows`: (uint64[m], uint8[m, row_bytes]), in any order.

        Sees the store as it is now, whatever is put while it runs.
        """
        if batch_rows <= 0:
            raise ValueError(f"batch_rows is {batch_rows}: a batch has at least one row")
        return _batches(self._core.scan(), batch_rows, self._row_bytes)

    @property
    def path(self) -> str:
        return self._path

    @property
    def row_bytes(self) -> int:
        return self._row_bytes

    @property
    def epoch(self) -> int:
        """The last commit; 0 before the first."""
        return self._core.epoch()

    @property
    def note(self) -> bytes:
        """The note of the last commit."""
        return self._core.note()

    @property
    def epochs(self) -> tuple[int, ...]:
        """The retained commits, oldest first: each can be opened with `open(path, epoch=...)`."""
        return tuple(self._core.epochs())

    def release(self, epoch: int) -> None:
        """Forgets a retained commit, so that its files can go. The newest cannot be released."""
        self._core.release(epoch)

    def __len__(self) -> int:
        """Live rows, exactly. Costs reads where the log has overwritten rows."""
        return self._core.count()

    def __bool__(self) -> bool:
        return True  # not len(): an empty store is a store, and len() reads

    def stats(self) -> SsdStats:
        return SsdStats(**self._core.stats())

    def read_floor(self, keys: Any) -> float:
        """Benchmarks: seconds that the page reads of `get(keys)` take alone, with no look at what they bring."""
        return self._core.read_floor(as_keys(keys))

    def check(self) -> None:
        """Verifies every byte and every book; raises `CorruptionError` naming the first that is wrong."""
        self._core.check()

    def merge(self) -> None:
        """Merges the whole log into the base files now, as the background thread would over time."""
        self._core.merge_all()

    def link_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """The last commit as a store of its own in the new folder `path`, by hard links: same file system, no copy."""
        self._core.link_checkpoint(os.fsencode(path))

    def close(self) -> None:
        """Stops background work and gives the lock back. What was not committed is gone. Closing twice is fine."""
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        try:
            stats = self.stats()
        except ThermoclineError:
            return f"<SsdStore {self._path!r} closed>"
        return (
            f"<SsdStore {self._path!r} row_bytes={self._row_bytes} epoch={stats.epoch} "
            f"disk={format_size(stats.disk_bytes)} memory={format_size(stats.mem_total)} of "
            f"{format_size(stats.mem_budget)}>"
        )


def _batches(scan: core.Scan, batch_rows: int, row_bytes: int) -> Iterator[tuple[Keys, Rows]]:
    while True:
        keys = np.empty(batch_rows, dtype=np.uint64)
        rows = np.empty((batch_rows, row_bytes), dtype=np.uint8)
        count = scan.next(keys, rows)
        if count == 0:
            return
        yield keys[:count], rows[:count]
