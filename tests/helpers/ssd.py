"""Helpers of the SSD store tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import thermocline as tc

ROW = 32
# Small files, so that a few thousand rows split partitions and merge.
SMALL: dict[str, Any] = {
    "mem_budget": "16MB",
    "segment_bytes": 64 << 10,
    "partition_bytes": 32 << 10,
    "min_log_bytes": 32 << 10,
    "write_buffer": 32 << 10,
}


def rows_of(keys: npt.NDArray[np.uint64], version: int = 0, row_bytes: int = ROW) -> npt.NDArray[np.uint8]:
    """Make rows whose every byte depends on key, version and position."""
    mixed = (keys[:, None] * np.uint64(0x9E3779B97F4A7C15)) ^ np.arange(row_bytes, dtype=np.uint64)[None, :]
    return ((mixed + np.uint64(version * 0x5851F42D4C957F2D % 2**64)) >> np.uint64(40)).astype(np.uint8)


def some_keys(count: int, seed: int = 0) -> npt.NDArray[np.uint64]:
    keys = np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)
    return np.unique(keys)


def contents(store: tc.SsdStore) -> dict[int, bytes]:
    seen: dict[int, bytes] = {}
    for keys, rows in store.scan(batch_rows=1000):
        assert keys.dtype == np.uint64
        assert rows.dtype == np.uint8
        assert rows.shape == (len(keys), store.row_bytes)
        for key, row in zip(keys.tolist(), rows, strict=True):
            assert key not in seen, "the scan returned a key twice"
            seen[key] = row.tobytes()
    return seen
