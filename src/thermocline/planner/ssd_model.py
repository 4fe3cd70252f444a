"""Reads of the SSD store, and the look-ahead that makes them few: for `cost_model`.

Symbols as in `cost_model`. H batches of a rank are ahead, and the rows of S = H * _SWEEP_SHARE batches of every rank
are read together, in hash order (`pipeline/lookahead.py`):

    missing rows of a node    m(S) = U(bRNS) / N * (1 - hit rate of U(bRNS) keys in DRAM)
    reads per batch           reads of m(S) rows in one pass over the store / S
    bytes of a rank           H * bytes of a batch + U(bH) * bytes of a key

In the steady state H is as large as the limits allow: of bytes, of rows that may be pinned, or a number of batches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from thermocline.planner.cost_model import Cluster, Workload
    from thermocline.planner.hardware import Disk

KEY_BYTES = 8
_MAX_BRIDGED_PAGES = 15
"""Largest gap that the SSD store reads instead of issuing another request, in pages."""
_SCRATCH_ID_BYTES = 65
"""Per id of one batch: working memory of its deduplication (33), and restored ids of four batches."""
_PARTS_SHARE = 1 / 16
"""Largest share of the look-ahead's bytes for the parts of the sweep that are being loaded."""
_AHEAD_KEY_BYTES = 27
"""Per unique key of the look-ahead: key, slot, uses, hash table, growth of the arrays."""
_SWEEP_SHARE = 3 / 4
"""Batches whose rows are read together, as a share of the batches ahead."""
_ROWS_SHARE = 7 / 8
"""Share of the DRAM tier that the rows of the look-ahead may fill."""
_MOST_BATCHES = 1 << 20


_LOG_SHARE = 0.1
"""Rows in the log of the SSD store per row in base files, when it merges: half of `max_log_ratio`."""
_BASE_FILE_BYTES = 24 << 20
"""Size of a base file: three quarters of the size at which it is split."""
MIN_LOG_BYTES = 64 << 20
"""Log size below which the store merges nothing."""


def merge_writes(
    store_bytes: float, min_log_bytes: float = MIN_LOG_BYTES, file_bytes: float = _BASE_FILE_BYTES
) -> float:
    """Return bytes written by log and merges per byte put into a store of this size.

    The log has a share s of the rows of n base files, which are merged in turn: of the next one f = 2 s n / (n + 1).
    A put row replaces a row of its base file: it is written to the log, then with 1 / f rows of that file: 1 + 1 / f.
    """
    files = max(1.0, store_bytes / file_bytes)
    merged = 2 * max(_LOG_SHARE, min_log_bytes / store_bytes) * files / (files + 1)
    return 1 + 1 / merged


LARGE_STORE_WRITES = 1 + 1 / (2 * _LOG_SHARE)
"""`merge_writes` of a store of many base files."""


class PageReads(NamedTuple):
    """Reads of one pass over the store."""

    pages: float
    """Pages that contain requested rows."""
    requests: float
    bytes: float
    """Bytes read, with the gaps that are read along."""
    seconds: float


def page_reads(work: Workload, nodes: int, rows: float, disk: Disk) -> PageReads:
    """Reads of `rows` rows in hash order, on one of `nodes` nodes.

    Rows are spread over P pages, so a page is requested with probability q = 1 - exp(-rows / P), and the gap before it
    is g pages with probability q (1-q)^g. The store reads a gap of at most G = read_us / page_us pages along, at
    page_us per page; a larger gap costs another request:

        seconds per page = (1-q)^(G+1) * read_us + sum over g <= G of q (1-q)^g (g+1) * page_us
    """
    pages = work.key_distribution.num_keys / nodes * (work.row_bytes + KEY_BYTES) / disk.page_bytes
    requested = -pages * math.expm1(-rows / pages)
    density = min(requested / pages, 1.0)
    max_gap = int(min(disk.read_us / disk.page_us, _MAX_BRIDGED_PAGES))
    new_request = (1 - density) ** (max_gap + 1)
    bridged = sum(density * (1 - density) ** gap * (gap + 1) for gap in range(max_gap + 1))
    seconds = requested * (new_request * disk.read_us + bridged * disk.page_us) * 1e-6
    return PageReads(requested, requested * new_request, requested * (new_request + bridged) * disk.page_bytes, seconds)


def missing_rows(work: Workload, cluster: Cluster, batches: float) -> float:
    """Rows of a node that are not in its DRAM, among those of `batches` batches of every rank pulled together."""
    keys, examples = work.key_distribution, work.batch * cluster.world * batches
    hbm = cluster.hbm_rows * cluster.world if cluster.gpu else 0.0
    # A row is either in HBM or in DRAM: together they are one larger cache.
    hits = keys.hit_rate(cluster.mem_rows * cluster.nodes + hbm, examples, work.policy)
    return keys.unique_keys(examples) / cluster.nodes * (1 - hits)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LookAheadPlan:
    """Predicted look-ahead, in the steady state. Per batch: per step of all ranks, on one node."""

    batches: int
    """Batches of a rank that are ahead of training."""
    batches_together: float
    """Batches of a rank whose rows are read together."""
    bounded_by: Literal["bytes", "rows", "batches"]
    """The limit: of bytes, of rows that may be pinned, or the setting."""
    bytes: float
    """Batches in flight and their keys, of one rank."""
    limit_bytes: int
    """Limit of `bytes`, a part of tiers.mem."""
    rows_together: float
    """Rows of a node that these batches of every rank use."""
    missing_rows: float
    """Rows per batch that are read from SSD."""
    reads: float
    """Read requests per batch."""
    read_bytes: float
    """Bytes read per batch."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def plan_lookahead(work: Workload, cluster: Cluster, disk: Disk) -> LookAheadPlan | None:
    """Predict the length of the look-ahead and its reads. None: it is off, or all rows are in DRAM."""
    limits = cluster.lookahead
    if limits is None or missing_rows(work, cluster, 1) == 0:
        return None
    unique = work.key_distribution.unique_keys
    scratch = _SCRATCH_ID_BYTES * work.batch * work.key_distribution.ids_per_example
    scratch += _PARTS_SHARE * limits.bytes

    def bytes_of(batches: float) -> float:
        # A rank has the keys that it owns of all ranks' batches.
        keys = unique(work.batch * cluster.world * batches) / cluster.world
        return batches * _batch_bytes(work, cluster.world) + keys * _AHEAD_KEY_BYTES + scratch

    most = {
        "bytes": _largest(lambda batches: bytes_of(batches) <= limits.bytes),
        "rows": _largest(
            lambda batches: (
                unique(work.batch * cluster.world * batches) / cluster.nodes <= _ROWS_SHARE * cluster.mem_rows
            )
        ),
        "batches": _MOST_BATCHES if limits.batches is None else limits.batches,
    }
    bound: Any = min(most, key=lambda name: most[name])
    batches = most[bound]
    together = max(1.0, _SWEEP_SHARE * batches)
    missing = missing_rows(work, cluster, together)
    reads = page_reads(work, cluster.nodes, missing, disk)
    return LookAheadPlan(
        batches=batches,
        batches_together=together,
        bounded_by=bound,
        bytes=bytes_of(batches),
        limit_bytes=limits.bytes,
        rows_together=unique(work.batch * cluster.world * together) / cluster.nodes,
        missing_rows=missing / together,
        reads=reads.requests / together,
        read_bytes=reads.bytes / together,
    )


def _batch_bytes(work: Workload, world: int) -> float:
    """Bytes of a batch in flight: ids, offsets unless every bag has one id, dense features, labels.

    Of one rank, positions of the ids, and two bytes per unique key; over ranks, ids, and as many unique keys as a rank
    receives.
    """
    ids, unique = work.key_distribution.ids_per_example, work.key_distribution.unique_keys(work.batch)
    offsets = 0.0 if ids == work.fields else 8.0 * work.fields
    position = math.ceil(1 + math.log2(max(2.0, work.batch * ids))) / 8
    keys = position * work.batch * ids if world == 1 else 8 * work.batch * ids + position * unique
    return keys + 2 * unique + work.batch * (offsets + 4 * work.dense_features + 4)


def _largest(fits: Callable[[float], bool]) -> int:
    """The largest number of batches that fits, at least 1."""
    low, high = 1, 2
    while high < _MOST_BATCHES and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
