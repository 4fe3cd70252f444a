"""Pins of a look-ahead follow rows that are trained in HBM: up when a batch is loaded, down when HBM evicts them."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
import pytest
from helpers.ssd import SMALL
from helpers.train import budget_for

import thermocline as tc
from thermocline.kernels import INTERPRETED
from thermocline.tiers.dram_horizon import DramBatchAhead, DramHorizon
from thermocline.tiers.hbm import HbmTier, bytes_for

ADAGRAD = tc.Adagrad(lr=0.05)
ROW_FLOATS = 8
pytestmark = pytest.mark.timeout(120)


class Trainer:
    """Trains batches in HBM, each some batches after its rows were loaded ahead."""

    def __init__(self, folder: Path, *, hbm_rows: int, dram_rows: int) -> None:
        mem = budget_for(dram_rows, 4, ADAGRAD, lookahead=True)
        self.table = tc.Table(
            4, ADAGRAD, hbm=bytes_for(hbm_rows, ROW_FLOATS), mem=mem, lookahead=16, ssd=folder, name="rows",
            ssd_options=SMALL, device="interpreter" if INTERPRETED else "cuda",
        )  # fmt: skip
        self.bag = tc.EmbeddingBag(self.table, 1)
        horizon = self.table.backend.horizon(training=True)
        assert isinstance(horizon, DramHorizon)
        self.horizon = horizon
        self.window: deque[tuple[tc.Batch, DramBatchAhead]] = deque()

    @property
    def hbm(self) -> HbmTier:
        assert self.table.hbm is not None
        return self.table.hbm

    def add(self, keys: np.ndarray) -> None:
        batch = tc.Batch(keys, np.arange(len(keys) + 1), 1)
        ahead = self.horizon.add(self.table.inputs(batch))
        self.window.append((batch, ahead))
        while ahead.to_visit:
            assert self.horizon.load()

    def train(self) -> None:
        """Load the next batch into HBM, and change its rows."""
        batch, ahead = self.window.popleft()
        rows = self.table.stage([batch], [ahead])
        self.table.pin(rows)
        self.table.backend.load(rows)
        self.hbm.dirty.fill_(1)
        rows.release()

    def check(self) -> None:
        self.horizon.drop()
        self.hbm.check()
        self.table.dram.check()


def keys(*ranges: tuple[int, int]) -> np.ndarray:
    return np.concatenate([np.arange(first, end, dtype=np.uint64) for first, end in ranges])


def test_rows_that_return_from_hbm_are_not_late(tmp_path: Path) -> None:
    """Before, 62 of these rows left DRAM between their return from HBM and their next batch."""
    rng, trainer = np.random.default_rng(1), Trainer(tmp_path, hbm_rows=150, dram_rows=500)
    for number in range(80):
        trainer.add(np.unique((4000 * rng.random(40) ** 3).astype(np.uint64)))
        if number >= 10:
            trainer.train()
    while trainer.window:
        trainer.train()
    trainer.hbm.wait_for_write_back()
    stats = trainer.hbm.stats()
    assert stats.written_back == stats.evictions > 2000
    assert stats.from_ssd == 0
    assert trainer.table.dram.pinned == 0
    trainer.check()


def test_a_loaded_batch_pins_no_row_in_dram_until_hbm_returns_it(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, hbm_rows=60, dram_rows=500)
    dram = trainer.table.dram
    for own in (keys((0, 40)), keys((100, 140)), keys((200, 250)), keys((0, 20))):
        trainer.add(own)
    assert dram.pinned == 130
    trainer.train()
    assert dram.pinned == 90, "rows of the last batch are in HBM"
    trainer.train()  # evicts some rows of the first batch
    trainer.train()  # and the others
    trainer.hbm.wait_for_write_back()
    assert dram.pinned == 20, "rows of the last batch are in DRAM again, and others are not needed"
    trainer.train()
    assert dram.pinned == 0
    assert trainer.hbm.stats().from_ssd == 0
    trainer.check()


def test_rows_that_hbm_evicts_unchanged_are_pinned_too(tmp_path: Path) -> None:
    """They are not written back: DRAM may still have them."""
    trainer = Trainer(tmp_path, hbm_rows=60, dram_rows=500)
    for own in (keys((0, 40)), keys((200, 250)), keys((0, 20))):
        trainer.add(own)
    trainer.train()
    trainer.hbm.write_back()  # as a commit does: rows in HBM are equal to those in DRAM
    trainer.train()
    trainer.hbm.wait_for_write_back()
    below = int((trainer.hbm.resident(keys((0, 20))) == 0).sum())
    assert trainer.table.dram.pinned == below > 0
    trainer.train()
    trainer.check()
