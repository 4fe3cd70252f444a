"""The SSD tier: a crash-safe key-value store of fixed-size rows in files. Usable without a table."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, SupportsIndex

import numpy as np
import numpy.typing as npt

from thermocline.arrays import Keys, Rows, as_keys, as_rows
from thermocline.core import core
from thermocline.embedding.key_hash import ALL_KEYS, KeyPart
from thermocline.errors import IoError, ThermoclineError
from thermocline.utils.atomic_file import make_folder
from thermocline.utils.machine import local_ranks, memory_bytes
from thermocline.utils.text_format import format_size, parse_size

_LEAST_MEM_BUDGET = 256_000_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SsdStats:
    """Counters of an `SsdStore`. Work is counted from zero when the store is opened."""

    epoch: int
    """Epoch of the newest commit; 0 before the first."""
    rows_in_base: int
    rows_in_log: int
    """All versions of a row count."""
    disk_bytes: int
    live_files: int
    partitions: int
    log_bytes: int
    base_bytes: int
    mem_index: int
    mem_buffers: int
    mem_total: int
    """All DRAM of the store in bytes; at most mem_budget."""
    mem_spare: int
    """Bytes of mem_budget that neither the log nor merges need: for scans that follow changes."""
    mem_budget: int
    keys_read: int
    pages_read: int
    reads: int
    """Requests to the device; adjacent pages share one."""
    bytes_read: int
    false_pages: int
    """Pages read that did not contain the key."""
    get_scratch_peak: int
    """Working memory of the largest get so far: 4 bytes per key and a fixed amount per thread; not in mem_total."""
    bytes_put: int
    """Bytes of rows and keys passed to put and delete."""
    bytes_written: int
    """All bytes written to disk."""
    merges: int
    merge_bytes_read: int
    merge_bytes_written: int
    merge_threads: int
    merges_running: int
    """Partitions that are being merged now."""
    merge_seconds: float
    """Seconds of all merging threads together, without pauses."""
    stall_seconds: float
    """Time that put waited for the merger."""
    read_cost_us: float
    """Measured cost of one more request on this device."""
    page_cost_us: float
    """Measured cost of one more page in a request."""
    engine: str
    """I/O engine in use: io_uring or pread. A store changes from io_uring to pread if the kernel refuses a ring."""
    damage: str
    """A page that a merge could not read, empty if none. Its partition is set aside: not merged any more."""
    damaged_partitions: int
    set_aside_log_bytes: int
    """Log that only set-aside partitions need."""
    set_aside_log_bound: int
    """Above this many bytes `put` raises: min_log_bytes + 4 times the base files of set-aside partitions."""
    filter_given_up: bool
    """Whether the filter of absent keys was dropped, because mem_budget is too small for it."""

    @property
    def merge_bytes_per_second(self) -> float:
        """Bytes that one merging thread writes per second of work, since opening."""
        return self.merge_bytes_written / self.merge_seconds if self.merge_seconds else 0.0

    @property
    def write_amplification(self) -> float:
        """Bytes written per byte put, since opening."""
        return self.bytes_written / self.bytes_put if self.bytes_put else 0.0


class SsdStore:
    """Rows of `row_bytes` bytes by 64-bit key, in one folder. Created by `SsdStore.open`.

    A `get` that starts after `put` or `delete` has returned sees the change. The next `commit` makes it durable. After
    a crash of the process or the machine, `open` restores exactly the last commit, or an older retained one on request.
    The checksum of every page is verified when it is read: a damaged page raises `CorruptionError`.

    Thread safety: all methods may be called from several threads at once, and release the GIL.
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
        mem_budget: str | SupportsIndex | None = None,
        expected_keys: int | None = None,
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
        merge_threads: int = 0,
        io_engine: Literal["auto", "io_uring", "pread"] = "auto",
        io_workers: int = 0,
        io_depth: int = 0,
    ) -> Self:
        """Open the store in folder `path`, or create one, with the folders above it, if there is none, `create` is
        True and `row_bytes` is set.

        Behaviour:
          row_bytes      bytes per row; optional for an existing store
          mem_budget     bytes of DRAM the store may use, such as 2**28 or "256MB"; default: `default_mem_budget`. If
                         they run short, the filter of absent keys is given up, with a warning, before `put` raises
          expected_keys  refuse to open, with `BudgetError`, if mem_budget cannot hold the index of this many rows
          epoch          a retained commit to open instead of the newest; later commits are kept until released
          read_only      open without a lock; put, delete, commit and release raise `ReadOnlyError`

        Performance (None or 0 selects the default):
          max_log_ratio     log bytes per base byte above which merging starts
          filter_bits       DRAM bits per row of a filter of absent keys; 10 avoid 99 of 100 reads of such keys
          write_buffer      bytes collected before a write
          segment_bytes     size of one log file
          partition_bytes   size above which a base file is split
          min_log_bytes     log size below which nothing is merged
          background_merge  False merges inside put and commit, which is deterministic
          merge_threads     partitions merged at once, 1 to 64; default: the number of cores, 2 to 8
          io_engine         "io_uring" or "pread" threads; "auto" selects io_uring if the kernel supports it
          io_workers        threads of a large get; default: one per core that the process may use, 2 to 8
          io_depth          reads in flight per thread, at most 64

        Raises `NotFoundError` (no store, no such epoch), `LockError` (open in another process or object), `FormatError`
        (not a store, a newer format, a different row size), `CorruptionError`, `BudgetError`, `IoError`.
        """
        if row_bytes is not None and row_bytes <= 0:
            raise ValueError(f"row_bytes is {row_bytes}: it must be at least 1")
        if epoch is not None and epoch < 0:
            raise ValueError(f"epoch is {epoch}: it must be at least 1, or None for the newest commit")
        options = core.StoreOptions()
        options.row_bytes = row_bytes or 0
        if expected_keys is not None and expected_keys <= 0:
            raise ValueError(f"expected_keys is {expected_keys}: it must be at least 1, or None")
        options.expected_rows = expected_keys or 0
        options.mem_budget = (
            default_mem_budget(path, row_bytes, filter_bits)
            if mem_budget is None
            else parse_size(mem_budget, "mem_budget")
        )
        options.create = create and row_bytes is not None and epoch is None and not read_only
        options.read_only = read_only
        options.epoch = epoch
        options.background_merge = background_merge
        if not 0 <= merge_threads <= 64:
            raise ValueError(f"merge_threads is {merge_threads}: it must be 1 to 64, or 0 for the default")
        options.merge_threads = merge_threads
        if max_log_ratio:
            options.max_log_ratio = max_log_ratio
        if not 0 <= filter_bits <= 64:
            raise ValueError(f"filter_bits is {filter_bits}: it must be 0 (no filter) to 64")
        options.filter_bits = filter_bits
        if write_buffer:
            options.write_buffer = parse_size(write_buffer, "write_buffer")
        if segment_bytes:
            options.segment_bytes = parse_size(segment_bytes, "segment_bytes")
        if partition_bytes:
            options.partition_bytes = parse_size(partition_bytes, "partition_bytes")
        if min_log_bytes:
            options.min_log_bytes = parse_size(min_log_bytes, "min_log_bytes")
        if options.create:
            try:
                make_folder(Path(path).absolute().parent)
            except OSError as error:
                cause = f"{error.filename} is a file" if isinstance(error, FileExistsError) else error.strerror
                raised = IoError(
                    f"{os.fspath(path)}: the folders above it cannot be created ({cause}, {error.filename}): make them "
                    "writable, or choose another folder"
                )
                raised.errno = error.errno
                raise raised from None
        store = core.SsdStore.open(os.fsencode(path), options, io_engine, io_workers, io_depth)
        opened = cls(store, os.fspath(path))
        opened._show_warnings()
        return opened

    def _show_warnings(self) -> None:
        """Pass the store's new messages to the module `warnings`; each text is shown once per store."""
        for text in self._core.take_warnings():
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def get(self, keys: Any, out: Any = None) -> tuple[npt.NDArray[np.bool_], Any]:
        """Return (found, rows): bool[n] and uint8[n, row_bytes], or `out` after writing the rows into it.

        keys: uint64[n] or int64[n] (bit patterns), NumPy or torch; may repeat. Rows of absent keys are zero, or
        unchanged in `out`. Raises `CorruptionError` if a page that it reads is damaged.
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
        """Set the rows of keys; of a repeated key the last row is kept. Durable after `commit`.

        rows: uint8[n, row_bytes], or the same bytes in another dtype, such as float32[n, row_bytes / 4].
        """
        keys = as_keys(keys)
        self._core.put(keys, as_rows(rows, len(keys), self._row_bytes))

    def load(self, keys: Any, rows: Any) -> None:
        """Set many rows of new keys by writing base files directly, without log and merging.

        This requires that no row of the store lies between these keys in hash order; `embedding/bulk_load.py` splits
        keys that way. Otherwise the rows are put.
        """
        keys = as_keys(keys)
        self._core.load(keys, as_rows(rows, len(keys), self._row_bytes))

    def delete(self, keys: Any) -> None:
        """Delete keys; absent keys are ignored. Durable after `commit`."""
        self._core.erase(as_keys(keys))

    def commit(self, note: bytes = b"") -> int:
        """Make all changes durable, together with `note`. Return the new epoch, which is retained until released."""
        if not isinstance(note, (bytes, bytearray, memoryview)):
            raise TypeError(f"note is a {type(note).__name__}: it must be bytes, such as text.encode()")
        epoch = self._core.commit(bytes(note))
        self._show_warnings()
        return epoch

    def scan(self, batch_rows: int = 65536, part: KeyPart = ALL_KEYS) -> Iterator[tuple[Keys, Rows]]:
        """Yield every live row of a part of the keys once, in any order: (uint64[m], uint8[m, row_bytes]) with m <=
        `batch_rows`.

        The scan reads a snapshot taken by this call; later changes do not affect it. It reads the pages that have rows
        of the part.
        """
        if batch_rows <= 0:
            raise ValueError(f"batch_rows is {batch_rows}: it must be at least 1")
        return _batches(self._core.scan(part.lo, part.hi), batch_rows, self._row_bytes)

    def follow(self, lo: int, hi: int, kept: int = 0, buffers: int = 0) -> FollowedScan | None:
        """Begin a scan of the keys with hashes from `lo` to `hi`, of the rows as of now, and keep track of changes.

        kept      bytes of what the caller keeps of it: counted in the memory of the store as long as the scan exists
        buffers   further bytes, until all rows were read
        All such scans share `SsdStats.mem_spare`. None: this one needs more than half of what is left of it.
        """
        scan = self._core.follow(lo, hi, kept, buffers)
        return None if scan is None else FollowedScan(scan, self._row_bytes)

    def position(self) -> str:
        """Return a text that identifies the rows put so far, for `changes`."""
        return "-".join(f"{part:x}" for part in self._core.position())

    def changes(self, since: str, batch_rows: int = 65536) -> Iterator[tuple[Keys, Rows, npt.NDArray[np.bool_]]] | str:
        """Iterate over the keys put or deleted after a position, each once, with its newest row, in hash order.

        Yields (keys, rows, deleted); the rows of deleted keys are undefined. Reads only the log after `since`. Returns
        a text, the cause, if the log does not reach back to `since`.
        """
        try:
            found = self._core.changes_since(_position(since))
        except ValueError:
            return f"{since!r} is not a position"
        return found if isinstance(found, str) else _changes(found, batch_rows, self._row_bytes)

    def keep_log(self, since: str, *, replace: bool = True) -> None:
        """Keep the log after a position also when it is merged, for `changes`, until `close` or the next call.

        It is given up when it exceeds the base files and 4 * min_log_bytes: all rows are compared faster then.

        replace  False: do nothing if a log is kept already
        """
        self._core.keep_log(_position(since), replace)

    @property
    def path(self) -> str:
        return self._path

    @property
    def row_bytes(self) -> int:
        return self._row_bytes

    @property
    def epoch(self) -> int:
        """Epoch of the last commit; 0 before the first."""
        return self._core.epoch()

    @property
    def note(self) -> bytes:
        """The note of the last commit."""
        return self._core.note()

    @property
    def epochs(self) -> tuple[int, ...]:
        """Retained commits, oldest first. `open(path, epoch=...)` opens one."""
        return tuple(self._core.epochs())

    def release(self, epoch: int) -> None:
        """Drop a retained commit, so that its files can be deleted. The newest cannot be released."""
        self._core.release(epoch)

    def __len__(self) -> int:
        """Return the exact number of live rows. Reads the device where the log overwrote rows."""
        return self._core.count()

    def __bool__(self) -> bool:
        return True  # an empty store is not false, and len() reads the device

    @property
    def damage(self) -> str:
        """Damage that a merge found, with the command that repairs it; empty: none. Fast."""
        return self._core.damage()

    def stats(self) -> SsdStats:
        self._show_warnings()
        return SsdStats(**self._core.stats())

    def read_floor(self, keys: Any) -> float:
        """Return the seconds that the page reads of `get(keys)` take without processing. For benchmarks."""
        return self._core.read_floor(as_keys(keys))

    def check(self) -> None:
        """Verify all files and invariants. Raises `CorruptionError` naming the first violation."""
        self._core.check()

    def find_damage(self) -> list[str]:
        """Verify as `check` does, and return the first damage of every file and log extent, one text each."""
        return self._core.find_damage()

    def merge(self) -> None:
        """Merge the whole log into the base files now."""
        self._core.merge_all()

    def link_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Create a store of the last commit in the new folder `path`, by hard links in the same file system."""
        self._core.link_checkpoint(os.fsencode(path))

    def close(self) -> None:
        """Stop background work and release the lock. Uncommitted changes are lost. May be called twice."""
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


def default_mem_budget(path: str | os.PathLike[str], row_bytes: int | None = None, filter_bits: int = 0) -> int:
    """Return the DRAM budget of a store for which none is set: an upper limit, used as the index grows.

    An eighth of the machine's memory, or twice the index of the rows that the store has now if that is more; at least
    256 MB, and at most half of the memory. Of these, torchrun's ranks on this machine share equally.
    """
    ranks, memory = local_ranks(), memory_bytes()
    base_bytes = 0
    for file in Path(path).glob("base-*.tc"):
        with contextlib.suppress(FileNotFoundError):  # deleted by a concurrent writer
            base_bytes += file.stat().st_size
    fences, filters = base_bytes // 512, base_bytes // ((row_bytes or 64) + 8) * filter_bits // 8
    need = _LEAST_MEM_BUDGET + 2 * (fences + filters)
    return max(_LEAST_MEM_BUDGET, min(max(memory // 8 // ranks, need), memory // 2 // ranks))


def _batches(scan: core.Scan, batch_rows: int, row_bytes: int) -> Iterator[tuple[Keys, Rows]]:
    while True:
        keys = np.empty(batch_rows, dtype=np.uint64)
        rows = np.empty((batch_rows, row_bytes), dtype=np.uint8)
        count = scan.next(keys, rows)
        if count == 0:
            return
        yield keys[:count], rows[:count]


class FollowedScan:
    """A scan of a part of the keys, and the rows of it that change since. Made by `SsdStore.follow`.

    Rows that were in the write buffer of the store when it began may be among the changed ones only.
    """

    def __init__(self, scan: core.Scan, row_bytes: int) -> None:
        self._scan = scan
        self.row_bytes = row_bytes

    def rows(self, batch_rows: int, last_bytes: int | None = None) -> Iterator[tuple[Keys, Rows]]:
        """Iterate over the rows as of the begin of the scan, or the last bytes of each, in hash order. Once."""
        return _batches(self._scan, batch_rows, self.row_bytes if last_bytes is None else last_bytes)

    def close(self) -> None:
        """Free the memory without Python's lock: it may be that of many changed rows."""
        self._scan.close()

    @property
    def lost(self) -> bool:
        """Whether so many rows have changed that memory was short: `changed` returns None from now on."""
        return self._scan.lost

    def changed(self, part: KeyPart) -> tuple[Keys, Rows, npt.NDArray[np.bool_]] | None:
        """Return the keys of a part of the scanned ones that were put or deleted since the scan began, each once.

        Returns (keys, newest rows, deleted); the rows of deleted keys are undefined. None: too many rows have changed.
        """
        room = 1024
        while True:
            keys, deleted = np.empty(room, np.uint64), np.empty(room, np.bool_)
            rows = np.empty((room, self.row_bytes), np.uint8)
            count = self._scan.changed(part.lo, part.hi, keys, rows, deleted.view(np.uint8))
            if count is None:
                return None
            if count <= room:
                return keys[:count], rows[:count], deleted[:count]
            room = 2 * count  # writes go on meanwhile


def _position(text: str) -> tuple[int, int, int, int, int]:
    first, second, seq, nonce, page = (int(part, 16) for part in text.split("-"))
    return first, second, seq, nonce, page


def _changes(
    changes: core.StoreChanges, batch_rows: int, row_bytes: int
) -> Iterator[tuple[Keys, Rows, npt.NDArray[np.bool_]]]:
    batch_rows = max(1, min(batch_rows, changes.rows))
    while True:
        keys = np.empty(batch_rows, dtype=np.uint64)
        rows = np.empty((batch_rows, row_bytes), dtype=np.uint8)
        deleted = np.empty(batch_rows, dtype=np.bool_)
        count = changes.next(keys, rows, deleted.view(np.uint8))
        if count == 0:
            return
        yield keys[:count], rows[:count], deleted[:count]
