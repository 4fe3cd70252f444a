"""Open files of a rank: those of its stores beside all its connections.

A store opens one descriptor per base file and log segment. `Groups.make` counts connections before stores are open;
`require_store_files` counts both when a table has opened its store, so that a shortage is an error at start.

Thread     the thread that creates a table
Blocks     until every rank has called it, at most the timeout
Raises     `ConfigError` on every rank if one may open too few files
"""

from __future__ import annotations

import os
import resource
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from thermocline.distributed.collective_errors import CollectiveRunner
from thermocline.errors import ConfigError
from thermocline.utils.text_format import parse_size

if TYPE_CHECKING:
    from thermocline.distributed.communicator import Groups
    from thermocline.embedding.table_spec import TableSpec

_SPARE_FILES = 8
"""Descriptors of a rank that are neither open at start, nor connections, nor of stores: data and logs."""
_STORE_CONNECTIONS = 2
_MOST_PARTITIONS, _MOST_SEGMENTS = 512, 1024
"""Base files and log segments grow to these shares of the base if that exceeds the size in the options."""
_SIZES = {"partition_bytes": 32 << 20, "segment_bytes": 64 << 20, "min_log_bytes": 64 << 20, "write_buffer": 16 << 20}
"""Default sizes of a store, at most."""
_MAX_LOG_RATIO = 0.2
_BLOCKED = 1.5
"""Rows of the log at which a writer waits, per row that merging aims at: `Merger::limit`."""


def require_store_files(groups: Groups, spec: TableSpec) -> None:
    """Raise `ConfigError` on every rank if connections and files of stores exceed one rank's hard limit. Collective.

    Counts the files that are open, and with `expected_keys` those that this many rows have at least; a job that can run
    is not refused. If the limit suffices for those but not for the largest number, rank 0 warns. The number of files of
    a store without `expected_keys` may grow further. Connections are counted as all that the groups may open, whether
    they are open or not.
    """
    topology = groups.topology
    links = [_link(name) for name in os.listdir("/proc/self/fd")]
    folder = None if spec.ssd is None else f"{Path(spec.ssd).resolve()}/"
    of_store = 0 if folder is None else sum(link.startswith(folder) and link.endswith(".tc") for link in links)
    others = sum(not link.startswith("socket:") for link in links) - of_store
    others += _STORE_CONNECTIONS + groups.connections + _SPARE_FILES
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def shortage(files: int, words: str) -> str | None:
        needed = others + max(of_store, files)
        if hard == resource.RLIM_INFINITY or needed <= hard:
            return None
        return (
            f"rank {topology.rank} of {topology.world} {words} {needed} open files, {max(of_store, files)} of them "
            f"for the store {spec.ssd}, and its limit is {hard}: raise the limit of open files (ulimit -Hn {needed})"
        )

    least, most = file_counts(spec)
    found = [shortage(least, "needs at least"), shortage(most, "may need up to")]
    all_found = CollectiveRunner(groups.train).gather("counting open files", lambda: found)
    for problem, _ in all_found:
        if problem is not None:
            raise ConfigError(problem)
    caution = next((text for _, text in all_found if text is not None), None)
    if caution is not None and topology.rank == 0:
        warnings.warn(caution, RuntimeWarning, stacklevel=2)


def file_counts(spec: TableSpec) -> tuple[int, int]:
    """Return the least and the largest number of data files of a store with `expected_keys` rows; 0 without.

    The least: all rows in base files, or, because segments of the log may be larger than base files, as many in the log
    as writers may put there before they wait for merges. The largest: base files that were just split in halves, and
    the whole log.
    """
    keys: int | None = spec.store_options.get("expected_keys")
    if spec.ssd is None or not keys:
        return 0, 0
    partition, segment, min_log, write = (
        parse_size(spec.store_options.get(name) or default, name) for name, default in _SIZES.items()
    )
    ratio = spec.store_options.get("max_log_ratio") or _MAX_LOG_RATIO
    size = keys * (spec.row_bytes + 8)

    def base_files(size: int) -> int:
        return -(-size // max(partition, size // _MOST_PARTITIONS + 1))

    least_base = max(0, min(int(size / (1 + _BLOCKED * ratio / 2)), int(size - _BLOCKED * min_log)))
    segment = max(segment, size // _MOST_SEGMENTS)
    least_log = (size - least_base) // (segment + write)  # a segment ends after the write that exceeds its size
    log = max(int(ratio * size), 2 * min_log)
    least = min(base_files(size), base_files(least_base) + least_log)
    return least, 2 * base_files(size) + -(-log // segment) + 1


def _link(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # closed meanwhile
        return "socket:"
