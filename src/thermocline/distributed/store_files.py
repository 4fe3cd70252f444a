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
_PARTITION_BYTES = 32 << 20
_MOST_PARTITIONS = 512


def require_store_files(groups: Groups, spec: TableSpec) -> None:
    """Raise `ConfigError` on every rank if connections and files of stores exceed one rank's hard limit. Collective.

    Counts the files that are open, and with `expected_keys` those that this many rows have at least. The numbers of a
    store without it may grow further. Connections are counted as all that the groups may open, whether they are open or
    not; a job that can run is not refused.
    """
    topology = groups.topology
    links = [_link(name) for name in os.listdir("/proc/self/fd")]
    folder = None if spec.ssd is None else f"{Path(spec.ssd).resolve()}/"
    of_store = 0 if folder is None else sum(link.startswith(folder) and link.endswith(".tc") for link in links)
    more = max(0, least_files(spec) - of_store)
    others = sum(not link.startswith("socket:") for link in links)
    needed = others + _STORE_CONNECTIONS + groups.connections + more + _SPARE_FILES
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    problem = None
    if hard != resource.RLIM_INFINITY and needed > hard:
        problem = (
            f"rank {topology.rank} of {topology.world} needs at least {needed} open files, {of_store + more} of them "
            f"for the store {spec.ssd}, and its limit is {hard}: raise the limit of open files (ulimit -Hn {needed})"
        )
    for found in CollectiveRunner(groups.train).gather("counting open files", lambda: problem):
        if found is not None:
            raise ConfigError(found)


def least_files(spec: TableSpec) -> int:
    """Return the least number of base files of a store with `expected_keys` rows; 0 without."""
    keys: int | None = spec.store_options.get("expected_keys")
    if spec.ssd is None or keys is None:
        return 0
    size = keys * (spec.row_bytes + 8)
    partition = parse_size(spec.store_options.get("partition_bytes") or _PARTITION_BYTES, "partition_bytes")
    return -(-size // max(partition, size // _MOST_PARTITIONS + 1))


def _link(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # closed meanwhile
        return "socket:"
