"""Open files of stores beside connections: a shortage is refused on every rank when the table is created."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import resource
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from helpers.ranks import run_ranks

import thermocline as tc
from thermocline.distributed import store_files
from thermocline.distributed.communicator import Groups
from thermocline.distributed.store_files import file_counts
from thermocline.embedding.table_spec import TableSpec
from thermocline.planner.scale_model import StoreShape, StoreSize

KEYS = 1_000_000_000
LEFT = 200
"""Descriptors that rank 1 may open beside those it has. Each rank has 5e8 rows of 8 bytes, at least 220 files."""


def open_table(groups: Groups, folder: str, name: str, expected_keys: int | None) -> tc.ShardedTable:
    return tc.ShardedTable(
        2, tc.SGD(lr=0.1), groups=groups, name=name, mem="1MB", ssd=Path(folder) / name, ssd_mem="8GB",
        mem_overcommit=True, expected_keys=expected_keys,
    )  # fmt: skip


def create_tables(groups: Groups, folder: str) -> Any:
    """Return the error of a table that needs too many files, and the number of keys of one that may run."""
    if groups.topology.rank == 1:
        limit = len(os.listdir("/proc/self/fd")) + LEFT
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(tc.ConfigError) as error:
        open_table(groups, folder, "large", KEYS)
    left = len(os.listdir("/proc/self/fd")) - opened
    with contextlib.closing(open_table(groups, folder, "small", None)) as table:
        table.read(np.arange(10, dtype=np.uint64))
    return str(error.value), left


def test_a_store_with_too_many_files_is_refused_on_every_rank(tmp_path: Path) -> None:
    (first, first_left), (second, second_left) = run_ranks(((0,), (1,)), create_tables, str(tmp_path))
    assert first == second
    found = re.fullmatch(
        r"rank 1 of 2 needs at least (\d+) open files, (\d+) of them for the store \S+/large/\S+, and its limit is "
        r"(\d+): raise the limit of open files \(ulimit -Hn \1\)",
        first,
    )
    assert found is not None
    needed, of_store, limit = map(int, found.groups())
    assert needed > limit
    assert of_store == 220
    assert first_left < 8 > second_left  # the refused store is closed


def count_open(groups: Groups, folder: str) -> Any:
    """Return the base files of a store of many small files, and the error with a limit below the open files."""
    options = {"partition_bytes": 1 << 16, "segment_bytes": 1 << 16, "background_merge": False}
    with tc.SsdStore.open(folder, row_bytes=8, **options) as store:
        keys = np.arange(50_000, dtype=np.uint64)
        store.put(keys, np.zeros((len(keys), 8), np.uint8))
        store.merge()
        store.commit()
    with contextlib.closing(tc.Table(2, tc.SGD(lr=0.1), mem="1MB", ssd=folder, ssd_options=options)) as table:
        files = len(list(Path(folder).glob("base-*.tc")))
        links = [store_files._link(name) for name in os.listdir("/proc/self/fd")]
        others = sum(not link.startswith("socket:") for link in links)
        with mock.patch.object(resource, "getrlimit", return_value=(others + 20, others + 20)):
            store_files.require_store_files(groups, table.spec)
        with (
            mock.patch.object(resource, "getrlimit", return_value=(others, others)),
            pytest.raises(tc.ConfigError) as error,
        ):
            store_files.require_store_files(groups, table.spec)
    return files, str(error.value)


def test_files_of_an_open_store_are_counted(tmp_path: Path) -> None:
    ((files, message),) = run_ranks(((0,),), count_open, str(tmp_path / "store"))
    assert files > 10
    assert re.search(r", (\d+) of them for", message)
    assert int(re.search(r", (\d+) of them for", message)[1]) >= files  # type: ignore[index]


# ---- number of files


def open_files(folder: Path) -> int:
    """Return the number of data files of a store that this process has open."""
    links = [store_files._link(name) for name in os.listdir("/proc/self/fd")]
    return sum(link.startswith(f"{folder}/") and link.endswith(".tc") for link in links)


@pytest.mark.parametrize(("ratio", "segment"), [(0.2, 1 << 16), (2.0, 1 << 20)])
def test_counts_of_files_are_bounds_while_a_store_grows(ratio: float, segment: int, tmp_path: Path) -> None:
    """The second store has many rows in few log segments: fewer files than base files of all rows would be."""
    options = {
        "partition_bytes": 1 << 16, "segment_bytes": segment, "min_log_bytes": 1 << 16, "write_buffer": 1 << 15,
        "max_log_ratio": ratio, "background_merge": False,
    }  # fmt: skip
    with contextlib.closing(tc.Table(4, tc.SGD(lr=0.1), mem="1MB", ssd=tmp_path / "t", ssd_options=options)) as table:
        spec = table.spec
    folder, rows = tmp_path / "s", np.zeros((10_000, spec.row_bytes), np.uint8)
    with tc.SsdStore.open(folder, row_bytes=spec.row_bytes, **options) as store:
        for first in range(0, 150_000, len(rows)):
            store.put(np.arange(first, first + len(rows), dtype=np.uint64), rows)
            least, most = file_counts(expecting(spec, first + len(rows)))
            assert least <= open_files(folder) <= most
    in_base = 150_000 * (spec.row_bytes + 8) / (1 << 16)
    assert (least > 0.8 * in_base) == (ratio == 0.2)


@pytest.mark.parametrize("keys", [10**6, 10**8, 10**9, 10**11])
def test_counts_of_files_are_those_of_the_scale_model(keys: int, tmp_path: Path) -> None:
    with contextlib.closing(tc.Table(12, tc.RowWiseAdagrad(lr=0.1), mem="1MB", ssd=tmp_path / "s")) as table:
        model = StoreSize(StoreShape(row_bytes=table.spec.row_bytes), keys)
        least, most = file_counts(expecting(table.spec, keys))
        assert model.partitions[0] * 0.8 - 2 <= least <= model.partitions[0] + 1
        assert model.open_files * 0.9 - 3 <= most <= model.open_files + 3


def expecting(spec: TableSpec, keys: int) -> TableSpec:
    return dataclasses.replace(spec, store_options={**spec.store_options, "expected_keys": keys})


def create_near_the_limit(groups: Groups, folder: str) -> list[str]:
    """Create a table whose largest number of files exceeds the limit of rank 1; return the warnings."""
    if groups.topology.rank == 1:
        limit = len(os.listdir("/proc/self/fd")) + groups.connections + 300
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        open_table(groups, folder, "medium", KEYS).close()
    return [str(warning.message) for warning in found if "open files" in str(warning.message)]


def test_a_limit_below_the_largest_number_of_files_is_one_warning(tmp_path: Path) -> None:
    first, second = run_ranks(((0,), (1,)), create_near_the_limit, str(tmp_path))
    assert second == []
    (text,) = first
    assert re.match(r"rank 1 of 2 may need up to \d+ open files, 5\d\d of them for the store ", text)
