"""Random stalls and failures in every stage of the prefetching loop: no deadlock, no lost row, no leaked pin.

Every seed trains the same batches over an SSD store, with DRAM for little more than one window. After each injected
failure no pin and no thread may be left, and a new pipeline continues with the first untrained batch. At the end every
row and every dense weight equals the reference.
"""

from __future__ import annotations

import _thread
import dataclasses
import functools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ssd import SMALL
from helpers.threads import our_threads, start_counting
from helpers.train import (
    Net,
    Reference,
    ReferenceBag,
    all_keys,
    bits,
    budget_for,
    loss_of,
    make_batches,
    one_torch_thread,
    weights_of,
)

import thermocline as tc
from thermocline.tiers.dram import DramTier
from thermocline.tiers.dram_backend import DramBackend
from thermocline.tiers.dram_horizon import DramHorizon

pytestmark = pytest.mark.timeout(120)
LONG = os.environ.get("THERMOCLINE_LONG") == "1"
SEEDS = range(2000 if LONG else 40)
COUNT = 40
OPTIMIZERS = {"a": tc.Adagrad(lr=0.05), "b": tc.Adam(lr=0.01)}
STAGES = ["source", "collect", "ahead", "pull", "load", "body", "interrupt", "break", "close"]


class Injected(Exception):
    pass


@functools.cache
def batches() -> list[tc.Batch]:
    return make_batches(COUNT, keys=2000, weighted=True, skew=1.5, seed=11)


def most_keys(window: int) -> int:
    return max(len(all_keys(batches()[n : n + window])) for n in range(COUNT))


@pytest.fixture(autouse=True)
def _count_threads() -> None:
    start_counting()


@dataclasses.dataclass
class Loop:
    """A model with its dense optimizer and the number of trained batches; tables may be the reference's."""

    tables: list[Any]
    model: Net
    trained: int = 0

    def __post_init__(self) -> None:
        self.dense = torch.optim.Adam(self.model.dense.parameters(), lr=0.01)

    def train(self, batch: tc.Batch) -> None:
        self.dense.zero_grad()
        loss_of(self.model, batch).backward()
        for table in self.tables:
            table.step()
        self.dense.step()
        self.trained += 1


def make_reference() -> Loop:
    one_torch_thread()
    references = [Reference(tc.Table(4, optimizer, mem="1MB", name=name)) for name, optimizer in OPTIMIZERS.items()]
    return Loop(
        references, Net([ReferenceBag(references[0], 3, ["sum", "mean", "sum"]), ReferenceBag(references[1], [2])], 16)
    )


@functools.cache
def expected(count: int = COUNT) -> tuple[list[bytes], bytes]:
    loop = make_reference()
    for batch in batches()[:count]:
        loop.train(batch)
    return [bits(reference.table.read(all_keys(batches()))) for reference in loop.tables], weights_of(loop.model)


class FaultInjector:
    """Injects seeded stalls and failures; `armed` is the stage that fails next, at its `countdown`-th call."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        self.stalls = self.random.choice([0.0, 0.05, 0.3])
        self.armed: str | None = None
        self.countdown = 0
        self.failures = 0
        for stage, owner, method in (
            ("collect", tc.Table, "inputs"),
            ("ahead", DramHorizon, "load"),
            ("pull", DramTier, "pin"),
            ("pull", DramTier, "pin_ahead"),
            ("load", DramBackend, "plan_batch"),
        ):
            monkeypatch.setattr(owner, method, self.wrapped(stage, getattr(owner, method)))

    def wrapped(self, stage: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.at(stage)
            return method(*args)

        return call

    def arm(self) -> None:
        with self.lock:
            self.armed = self.random.choice(STAGES)
            self.countdown = self.random.randint(1, 12)

    def disarm(self) -> None:
        with self.lock:
            self.armed = None

    def at(self, stage: str) -> bool:
        """Stall at random. If the failure is due, raise it, or return True for a regular exit of the loop."""
        with self.lock:
            stall = self.random.random() < self.stalls
            seconds = self.random.choice([0.0, 0.0005, 0.003])
            due = False
            if stage == self.armed:
                self.countdown -= 1
                due = self.countdown == 0
                if due:
                    self.armed = None
                    self.failures += 1
        if stall:
            time.sleep(seconds)
        if due and stage in ("source", "collect", "ahead", "pull", "load", "body"):
            raise self.random.choice([Injected, OSError, MemoryError, KeyboardInterrupt])(stage)
        return due

    def source(self, first: int) -> Iterator[tc.Batch]:
        for batch in batches()[first:]:
            self.at("source")
            yield batch


def run_until_failure(loop: Loop, faults: FaultInjector, depth: int, window: int) -> None:
    """Train from the first untrained batch to the end, or until the injected event."""
    source = tc.prefetch(faults.source(loop.trained), *loop.tables, depth=depth, pull_window=window)
    for batch in source:
        faults.at("body")
        loop.train(batch)
        if faults.at("interrupt"):
            raise KeyboardInterrupt
        if faults.at("break"):
            break
        if faults.at("close"):
            source.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_training_continues_after_any_failure(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_torch_thread()
    faults = FaultInjector(seed, monkeypatch)
    depth, window = faults.random.choice([1, 2, 3, 4, 8]), faults.random.choice([1, 1, 2, 4])
    share = faults.random.choice([1.0, 1.3, 3.0])
    ahead = faults.random.choice([0, 1, 3, 16])
    tables = [
        tc.Table(
            4,
            optimizer,
            mem=budget_for(int(share * most_keys(window)) + 3, 4, optimizer, lookahead=ahead > 0),
            lookahead=ahead,
            ssd=tmp_path / name,
            name=name,
            threads=faults.random.choice([1, 2]),
            policy=faults.random.choice(["lru_lfu", "lru", "lfu"]),
            ssd_options=SMALL,
        )
        for name, optimizer in OPTIMIZERS.items()
    ]
    bags = [tc.EmbeddingBag(tables[0], 3, pooling=["sum", "mean", "sum"]), tc.EmbeddingBag(tables[1], [2])]
    loop = Loop(tables, Net(bags, 16))
    failures = faults.random.randint(1, 6)
    raised: list[str] = []
    while loop.trained < COUNT:
        if faults.failures < failures:
            faults.arm()
        before = faults.failures, loop.trained
        try:
            run_until_failure(loop, faults, depth, window)
        except (Injected, OSError, MemoryError, KeyboardInterrupt) as error:
            raised.append(str(error))
        faults.disarm()
        assert our_threads() == []
        for table in tables:
            table.discard_gradients()
            table.dram.check()
        assert (faults.failures, loop.trained) != before
    assert set(raised) <= {"", *STAGES}, "an error that was not injected"
    rows = [bits(table.read(all_keys(batches()))) for table in tables]
    assert (rows, weights_of(loop.model)) == expected()
    for table in tables:
        assert table.store is not None
        table.commit()
        table.store.check()
        table.close()


@pytest.mark.parametrize("seed", range(400 if LONG else 12))
def test_ctrl_c_at_random_times(seed: int, tmp_path: Path) -> None:
    """Interrupts between any two instructions of the loop: no leaked thread or pin, and the last commit is intact."""
    one_torch_thread()
    rng = random.Random(seed)
    depth, window, ahead = rng.choice([1, 2, 4]), rng.choice([1, 2]), rng.choice([0, 8])
    optimizer = OPTIMIZERS["a"]
    budget = budget_for(int(1.5 * most_keys(window)), 4, optimizer, lookahead=ahead > 0)
    table = tc.Table(4, optimizer, mem=budget, lookahead=ahead, ssd=tmp_path / "a", name="a", ssd_options=SMALL)
    bag = tc.EmbeddingBag(table, 3)
    table.commit(b"0")
    interrupts = done = 0
    while done < COUNT:
        control_c = threading.Timer(rng.random() * 0.1, _thread.interrupt_main)
        try:
            try:
                if interrupts < 5:
                    control_c.start()
                for batch in tc.prefetch(batches()[done:], table, depth=depth, pull_window=window):
                    bag(batch).pow(2).sum().backward()
                    table.step()
                    done += 1
                    if done % 7 == 0 or done == COUNT:
                        table.commit(str(done).encode())
            finally:
                while control_c.is_alive():
                    time.sleep(0.001)
        except KeyboardInterrupt:
            interrupts += 1
        assert our_threads() == []
        table.discard_gradients()
        table.dram.check()
        table.reopen()
        assert table.store is not None
        done = int(table.note)
    assert interrupts > 0
    reference = Reference(table)
    reference_bag = ReferenceBag(reference, 3)
    for batch in batches():
        reference_bag(batch).pow(2).sum().backward()
        reference.step()
    reference.assert_equals(table, all_keys(batches()))
    table.close()
