"""Random sequences of `SsdStore` calls compared with a dict: after every call both hold the same bytes.

Files are tiny, so that a few hundred rows fill write buffers, start new log files, merge and split partitions. They are
in /dev/shm if it exists: the test is about contents, not about disks.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.ssd import contents
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import thermocline as tc

Table = dict[int, bytes]

# Few distinct keys, so that most of them repeat, and a few from the ends of the range.
key_lists = st.lists(st.one_of(st.integers(0, 400), st.sampled_from([2**63 - 1, 2**63, 2**64 - 1])), max_size=40)
ranges = st.tuples(st.integers(0, 3000), st.integers(1, 1500))


class StoreMachine(RuleBasedStateMachine):
    """`rows` are the expected contents, `commits` the expected contents and note of each retained epoch."""

    def __init__(self) -> None:
        super().__init__()
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="thermocline-oracle-", dir=memory))
        self.rows: Table = {}
        self.commits: dict[int, tuple[Table, bytes]] = {}
        self.epoch = 0
        self.counter = 0

    @initialize(
        row_bytes=st.sampled_from([1, 8, 33, 128, 500, 5000]),
        background=st.booleans(),
        engine=st.sampled_from(["auto", "pread"]),
        rows_per_file=st.sampled_from([16, 128, 1024]),
        filter_bits=st.sampled_from([0, 10]),
    )
    def create(self, row_bytes: int, background: bool, engine: str, rows_per_file: int, filter_bits: int) -> None:
        self.row_bytes = row_bytes
        small = max(8192, rows_per_file * (row_bytes + 8))
        self.options: dict[str, Any] = {
            "mem_budget": "32MB",
            "background_merge": background,
            "io_engine": engine,
            "segment_bytes": small,
            "partition_bytes": small,
            "min_log_bytes": small,
            "write_buffer": small,
            "filter_bits": filter_bits,
        }
        self.open_newest()

    def open_newest(self) -> None:
        self.store = tc.SsdStore.open(self.folder / "s", row_bytes=self.row_bytes, **self.options)

    def keys_array(self, keys: list[int]) -> np.ndarray[Any, np.dtype[np.uint64]]:
        return np.array(keys, dtype=np.uint64)

    def fresh_rows(self, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return random rows, different for each call."""
        self.counter += 1
        return np.random.default_rng(self.counter).integers(0, 256, (count, self.row_bytes), dtype=np.uint8)

    def put_keys(self, keys: list[int]) -> None:
        rows = self.fresh_rows(len(keys))
        self.store.put(self.keys_array(keys), rows)
        self.rows.update((key, row.tobytes()) for key, row in zip(keys, rows, strict=True))

    @rule(keys=key_lists)
    def put(self, keys: list[int]) -> None:
        self.put_keys(keys)

    @rule(span=ranges)
    def put_many(self, span: tuple[int, int]) -> None:
        count = 1 + span[1] * 128 // (128 + self.row_bytes)  # fewer wide rows
        self.put_keys(list(range(span[0], span[0] + count)))

    @rule(keys=key_lists)
    def delete(self, keys: list[int]) -> None:
        self.store.delete(self.keys_array(keys))
        for key in keys:
            self.rows.pop(key, None)

    @rule(span=ranges)
    def delete_many(self, span: tuple[int, int]) -> None:
        self.delete(list(range(span[0], span[0] + span[1])))

    @rule(keys=key_lists, extra=ranges)
    def get(self, keys: list[int], extra: tuple[int, int]) -> None:
        keys = [*keys, *range(extra[0], extra[0] + extra[1])]
        found, rows = self.store.get(self.keys_array(keys))
        for key, present, row in zip(keys, found.tolist(), rows, strict=True):
            assert present == (key in self.rows), f"key {key}"
            assert row.tobytes() == self.rows.get(key, bytes(self.row_bytes)), f"key {key}"

    @rule(note=st.binary(max_size=20))
    def commit(self, note: bytes) -> None:
        epoch = self.store.commit(note)
        assert epoch > self.epoch
        self.epoch = epoch
        self.commits[epoch] = (dict(self.rows), note)

    @rule()
    def merge(self) -> None:
        self.store.merge()

    @rule()
    def scan(self) -> None:
        assert contents(self.store) == self.rows
        assert len(self.store) == len(self.rows)

    @rule()
    def check(self) -> None:
        self.store.check()

    @rule(merge_first=st.booleans())
    def reopen(self, merge_first: bool) -> None:
        if merge_first:
            self.store.merge()
        self.store.close()
        self.rows = dict(self.commits[self.epoch][0]) if self.epoch else {}
        self.open_newest()

    @precondition(lambda self: len(self.commits) > 1)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        epoch = data.draw(st.sampled_from(sorted(set(self.commits) - {self.epoch})))
        self.store.release(epoch)
        del self.commits[epoch]

    @precondition(lambda self: self.commits)
    @rule(data=st.data())
    def read_old_epoch(self, data: st.DataObject) -> None:
        epoch = data.draw(st.sampled_from(sorted(self.commits)))
        rows, note = self.commits[epoch]
        with tc.SsdStore.open(self.folder / "s", epoch=epoch, read_only=True, mem_budget="32MB") as old:
            assert old.epoch == epoch
            assert old.note == note
            assert contents(old) == rows

    @precondition(lambda self: self.commits)
    @rule(data=st.data())
    def commit_older_epoch(self, data: st.DataObject) -> None:
        """Open an older epoch for writing and commit it as the newest. All retained epochs stay readable."""
        epoch = data.draw(st.sampled_from(sorted(self.commits)))
        self.store.close()
        self.store = tc.SsdStore.open(self.folder / "s", epoch=epoch, **self.options)
        self.rows = dict(self.commits[epoch][0])
        assert contents(self.store) == self.rows
        self.commit(b"older epoch")

    @precondition(lambda self: self.commits)
    @rule()
    def link_checkpoint(self) -> None:
        copy = self.folder / f"copy-{self.counter}"
        self.counter += 1
        self.store.link_checkpoint(copy)
        with tc.SsdStore.open(copy, mem_budget="32MB") as linked:
            assert contents(linked) == self.commits[self.epoch][0]
        shutil.rmtree(copy)

    @invariant()
    def epochs_and_budget(self) -> None:
        if not hasattr(self, "store"):
            return
        assert self.store.epoch == self.epoch
        assert self.store.epochs == tuple(sorted(self.commits))
        assert self.store.note == (self.commits[self.epoch][1] if self.epoch else b"")
        stats = self.store.stats()
        assert stats.mem_total <= stats.mem_budget

    def teardown(self) -> None:
        if hasattr(self, "store"):
            assert contents(self.store) == self.rows
            self.store.check()
            self.store.close()
        shutil.rmtree(self.folder)


class TestStore(StoreMachine.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(stateful_step_count=30)


@pytest.mark.faults
class TestStoreManyTimes(StoreMachine.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(max_examples=4 * settings.default.max_examples, stateful_step_count=30)
