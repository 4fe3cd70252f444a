"""Sizes of a job at any scale: DRAM, files and manifest of a store, connections and messages of a rank. Loads no torch.

The figures follow from the constants of csrc/ssd and distributed/; benchmarks/scale.py compares them with stores and
process groups of the sizes that one machine can run. Symbols: n rows of one store, e = row_bytes + 8 bytes of an entry,
B bytes of all base files, r = max_log_ratio, W ranks, N nodes, R ranks per node.

    rows per page     (page - 16) / e
    fences            8 bytes per row page
    filter            filter_bits / 8 bytes per row
    log rows          rn/2 wait to be merged; rn are in the log files, because partitions are merged in turn
    log slots         9 bytes per waiting row: 6 per slot, tables at most 7/8 full and sized a quarter ahead
    partitions        B / T to 2B / T with T = max(partition_bytes, B / 512): a partition above T is split in halves
    segments          rB / max(segment_bytes, B / 1024)
    extents           rB / write_buffer; merging is urgent above 3/4 of `max_extents(mem_budget)`
    manifest          80 bytes + note + 56 per partition, 24 per segment, 40 per extent
    connections       per communicator: W - 1 (all ranks), N - 1 (ranks of equal local rank)
    messages          per step and table: keys, rows and gradients, each to R - 1 ranks of the node and N - 1 peers, and
                      the sizes of the keys to the peers
"""

from __future__ import annotations

import dataclasses
import math

from thermocline.planner.ssd_model import KEY_BYTES

SECTOR = 4096
_PAGE_HEADER = 16
_EXTENT_INFO = 24
LOG_ROW_BYTES = 9
"""DRAM per row that waits to be merged: Merger::kLogRowBytes."""
_PARTITION_BYTES = 400
"""DRAM of a partition's records, beside its fences and filter."""
_EXTENT_BYTES = 120
"""DRAM of an extent's record, beside its fences."""
_EXTRA_PAGES = 2.5
"""Pages of a base file beside full ones: the header, and half of a page each of rows, fences and filter."""
_MAX_PARTITION_SHARE, _MAX_SEGMENT_SHARE = 512, 1024
MOST_EXTENTS = 65536
URGENT_SHARE = 3 / 4
"""Share of the allowed extents above which merging does not wait for its share of the writes."""
MAX_LOG_PAGES = 2**31 - 1
MAX_MANIFEST = 2**30
COMMUNICATORS = 4
"""`communicator.Groups`: train, ahead, read, hints."""
SHM_FILES = 6
"""Descriptors of shared memory of a rank, of all communicators."""
_CONNECTION_BYTES = 4096
"""Memory of a rank per connection of Gloo, at most; buffers of the kernel are not counted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreShape:
    """Options of a store. The defaults are those of `tc.SsdStore.open` and, for the filter, of `tc.Table`."""

    row_bytes: int
    filter_bits: int = 10
    max_log_ratio: float = 0.2
    partition_bytes: int = 32 << 20
    segment_bytes: int = 64 << 20
    min_log_bytes: int = 64 << 20
    write_buffer: int = 16 << 20

    @property
    def entry_bytes(self) -> int:
        return self.row_bytes + KEY_BYTES

    @property
    def page_bytes(self) -> int:
        """Smallest multiple of a sector with at most 1/8 unused, or the best of the first 16."""
        first = -(-(self.entry_bytes + _PAGE_HEADER) // SECTOR)
        best, best_use = first, 0.0
        for sectors in range(first, first + 16):
            size = sectors * SECTOR
            use = (size - _PAGE_HEADER) // self.entry_bytes * self.entry_bytes / size
            if use > best_use:
                best, best_use = sectors, use
            if use >= 0.875:
                break
        return best * SECTOR

    @property
    def rows_per_page(self) -> int:
        return (self.page_bytes - _PAGE_HEADER) // self.entry_bytes

    def max_extents(self, mem_budget: int) -> int:
        """Live extents that a store with this budget allows: BufferSizes::of."""
        pages = mem_budget // self.page_bytes
        return min(max(min(pages // 16, 4096), pages // 64, 16), MOST_EXTENTS)


@dataclasses.dataclass(frozen=True, slots=True)
class StoreSize:
    """Sizes of a store of `rows` rows in the steady state of updates, with merging."""

    shape: StoreShape
    rows: float

    # ---- disk

    @property
    def row_pages(self) -> float:
        return self.rows / self.shape.rows_per_page

    @property
    def base_bytes(self) -> float:
        """Bytes of the base files, with a header and partly filled pages in each."""
        return (
            self._full_pages * self.shape.page_bytes + 1.5 * self.partitions[0] * _EXTRA_PAGES * self.shape.page_bytes
        )

    @property
    def _full_pages(self) -> float:
        """Pages of rows, fences and filters, if all were full."""
        shape = self.shape
        fence_pages = self.row_pages / ((shape.page_bytes - _PAGE_HEADER) // 8)
        return self.row_pages + fence_pages + self.filter_bytes / (shape.page_bytes - _PAGE_HEADER)

    @property
    def log_rows(self) -> float:
        """Rows that wait to be merged."""
        return max(self.shape.max_log_ratio / 2 * self.rows, self.shape.min_log_bytes / self.shape.entry_bytes)

    @property
    def log_bytes(self) -> float:
        """Bytes of the log files: rows and key columns."""
        return 2 * self.log_rows * self.log_row_bytes

    @property
    def log_row_bytes(self) -> float:
        """Bytes of one row in the log: its share of a row page and of a key page."""
        shape = self.shape
        keys_per_page = (shape.page_bytes - _PAGE_HEADER - _EXTENT_INFO) // KEY_BYTES
        return shape.page_bytes * (1 / shape.rows_per_page + 1 / keys_per_page)

    # ---- files

    @property
    def partitions(self) -> tuple[float, float]:
        """Least and largest number of base files."""
        size = self._full_pages * self.shape.page_bytes
        least = max(1.0, size / max(self.shape.partition_bytes, size / _MAX_PARTITION_SHARE))
        return least, max(1.0, 2 * least)

    @property
    def segments(self) -> float:
        return math.ceil(self.log_bytes / max(self.shape.segment_bytes, self.base_bytes / _MAX_SEGMENT_SHARE)) + 1

    @property
    def extents(self) -> float:
        """Live extents if every flush of the log has the size of the write buffer."""
        return self.log_bytes / self.shape.write_buffer

    @property
    def open_files(self) -> float:
        """Largest number of open data files. Merges in progress add two each."""
        return self.partitions[1] + self.segments

    @property
    def manifest_bytes(self) -> float:
        """Largest size of a manifest of one commit."""
        return manifest_bytes(self.partitions[1], self.segments, self.extents)

    # ---- DRAM

    @property
    def fence_bytes(self) -> float:
        return 8 * self.row_pages

    @property
    def filter_bytes(self) -> float:
        return self.rows * self.shape.filter_bits / 8

    @property
    def log_slot_bytes(self) -> float:
        return self.log_rows * LOG_ROW_BYTES

    @property
    def record_bytes(self) -> float:
        """Records of partitions and extents, and fences of extents."""
        fences = 8 * 2 * self.log_rows / self.shape.rows_per_page
        return self.partitions[1] * _PARTITION_BYTES + self.extents * _EXTENT_BYTES + fences

    @property
    def index_bytes(self) -> float:
        return self.fence_bytes + self.filter_bytes + self.log_slot_bytes + self.record_bytes

    # ---- restart

    @property
    def open_bytes(self) -> float:
        """Bytes that opening reads: headers, fences, filters and the key columns of the log."""
        shape = self.shape
        pages = self.partitions[1] + self.row_pages / ((shape.page_bytes - _PAGE_HEADER) // 8)
        return pages * shape.page_bytes + self.filter_bytes + 2 * self.log_rows * KEY_BYTES


def manifest_bytes(partitions: float, segments: float, extents: float, note: int = 0) -> float:
    """Size of a store's manifest."""
    return 32 + 48 + note + 24 + 56 * partitions + 24 * segments + 40 * extents


@dataclasses.dataclass(frozen=True, slots=True)
class Ranks:
    """Nodes with the same number of ranks each."""

    nodes: int
    per_node: int

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    @property
    def connections(self) -> int:
        """Most connections of a rank: Gloo's groups of all communicators, with shared memory inside the node."""
        if self.nodes == 1:
            return 0
        # With one rank per node the group of equal local ranks is the group of all.
        peers = self.nodes - 1 if self.per_node > 1 else 0
        return COMMUNICATORS * (self.world - 1 + peers)

    @property
    def connection_bytes(self) -> int:
        """Most memory of a rank's connections."""
        return _CONNECTION_BYTES * self.connections

    @property
    def store_host_files(self) -> int:
        """Descriptors of the process that hosts the rendezvous store."""
        return 2 * self.world

    def messages(self, hops: str = "two") -> int:
        """Messages that a rank sends per step and table."""
        if self.nodes == 1:
            return 3 * (self.per_node - 1)
        if hops == "flat":
            return 4 * (self.world - 1)
        return 3 * (self.per_node - 1) + 4 * (self.nodes - 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes sent per step and table, with two hops and fp32: by a rank within its node, by a node to other nodes."""

    ranks: Ranks
    dim: int
    rank_unique: float
    """Unique keys of a rank's batch."""
    node_unique: float
    """Unique keys of the batches of a node's ranks."""

    @property
    def within_per_rank(self) -> float:
        """Keys from the ranks of the node to the one in between, rows back, gradients there."""
        share = (self.ranks.per_node - 1) / self.ranks.per_node
        return self.rank_unique * share * self._key_and_rows

    @property
    def between_per_node(self) -> float:
        """Keys to the owners and gradients; the rows that the node's own ranks send to others are as many."""
        share = (self.ranks.nodes - 1) / self.ranks.nodes
        return self.node_unique * share * self._key_and_rows

    @property
    def _key_and_rows(self) -> float:
        return KEY_BYTES + 2 * 4 * self.dim + 1 / 8
