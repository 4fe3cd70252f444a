"""Parts of an expiry that are read from the store ahead of their step: exact, whatever changes in between."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.online import DIM, fit, make_table, state_of, stream, train

import thermocline as tc
from thermocline.embedding.key_hash import KeyPart, hash_keys
from thermocline.tiers.host_rows import HostRows
from thermocline.tiers.ssd import FollowedScan, SsdStore

STEPS = 30
RULES = {
    "unused": tc.Expiry(every=9, spread=8, unused_steps=4, unused_seconds=500),
    "one after the other": tc.Expiry(every=4, spread=4, min_score=0.3, decay=0.8),
    "changed rows": tc.Expiry(every=5, spread=3, min_norm=0.7),
    "limits": tc.Expiry(every=6, spread=5, unused_steps=3, min_rows=30, max_rows=45, order="frequency"),
}


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Any]]:
    return {name: fit(make_table("reference", "", expiry=rule), stream(STEPS)) for name, rule in RULES.items()}


def trained(table: tc.Table, depth: int = 3) -> None:
    bag = tc.EmbeddingBag(table, 2, pooling=["sum", "mean"])
    with tc.prefetch(stream(STEPS), table, depth=depth) as batches:
        train(table, bag, batches)


@pytest.mark.parametrize(
    ("rule", "tiers", "lookahead"),
    [*((rule, "ssd", batches) for rule in RULES for batches in (0, 6)), ("limits", "hbm-ssd", 4)],
)
def test_no_step_scans_the_store(
    rule: str, tiers: str, lookahead: int, expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scanned(*_: Any) -> Iterator[Any]:
        raise AssertionError("a step has read the rows of its part")

    table = make_table(tiers, tmp_path, expiry=RULES[rule], lookahead=lookahead)
    with monkeypatch.context() as patched:
        patched.setattr(HostRows, "rows", scanned)
        trained(table)
    assert state_of(table) == expected[rule]
    table.dram.check()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("limit", ["memory", "changes", "error"])
def test_a_step_reads_what_was_not_read_ahead(
    rule: str, limit: str, expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts are too large to be kept; too many rows have changed; the scan has failed."""

    def failing(*_: Any) -> Iterator[Any]:
        raise tc.ThermoclineError("damaged")
        yield

    if limit == "memory":
        monkeypatch.setattr(SsdStore, "follow", lambda *_: None)
    elif limit == "changes":
        monkeypatch.setattr(FollowedScan, "changed", lambda *_: None)
    else:
        monkeypatch.setattr(FollowedScan, "rows", failing)
    assert fit(make_table("ssd", tmp_path, expiry=RULES[rule]), stream(STEPS), depth=3) == expected[rule]


@pytest.mark.parametrize("rule", RULES)
def test_a_step_waits_for_the_scan(
    rule: str, expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows change, and are written to the store, while the scan is going on."""
    scan, waiting = FollowedScan.rows, threading.Event()

    def slow(self: FollowedScan, batch_rows: int, last_bytes: int) -> Iterator[Any]:
        waiting.wait(0.2)
        yield from scan(self, 7, last_bytes)

    monkeypatch.setattr(FollowedScan, "rows", slow)
    assert fit(make_table("ssd", tmp_path, expiry=RULES[rule], lookahead=4), stream(STEPS), depth=3) == expected[rule]


@pytest.mark.parametrize("rule", RULES)
def test_parts_of_a_lost_scan_are_read_again(
    rule: str, expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many of the rows of a scan change that the store gives up their changes: another scan, not the step, reads
    its parts."""
    follow, scans = SsdStore.follow, list[FollowedScan]()

    def followed(*arguments: Any) -> FollowedScan | None:
        if (scan := follow(*arguments)) is not None:
            scans.append(scan)
        return scan

    def scanned(*_: Any) -> Iterator[Any]:
        raise AssertionError("a step has read the rows of its part")

    def lost(scan: FollowedScan) -> bool:
        return len(scans) % 2 == 1 and scan is scans[-1]

    monkeypatch.setattr(SsdStore, "follow", followed)
    monkeypatch.setattr(FollowedScan, "lost", property(lost))
    table = make_table("ssd", tmp_path, expiry=RULES[rule])
    expect = HostRows.expect_expiry

    def expected_twice(self: HostRows, *arguments: Any) -> None:
        for _ in range(2):
            expect(self, *arguments)
            for chunk in self._ahead._chunks:  # a step of training takes longer than these scans
                chunk._reading.result()
        expect(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(HostRows, "rows", scanned)
        patched.setattr(HostRows, "expect_expiry", expected_twice)
        trained(table)
    assert state_of(table) == expected[rule]
    assert len(scans) > 4


@pytest.mark.parametrize(("every", "spread"), [(600, 500), (90, 90), (400, 3)])
def test_a_scan_reads_several_parts(every: int, spread: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan of one part, step by step, would cost the memory and reads of a scan for each."""
    follow, hashes = SsdStore.follow, list[tuple[int, int]]()

    def followed(self: SsdStore, lo: int, hi: int, *bytes_: int) -> FollowedScan | None:
        hashes.append((lo, hi))
        return follow(self, lo, hi, *bytes_)

    monkeypatch.setattr(SsdStore, "follow", followed)
    rule = tc.Expiry(every=every, spread=spread, unused_steps=10**6)
    table = make_table("ssd", tmp_path, statistics=["last_step"], expiry=rule)
    bag = tc.EmbeddingBag(table, 1)
    for _ in range(2 * every):
        bag(tc.Batch.from_lists([[0]])).sum().backward()
        table.step()
    parts = [round((hi - lo + 1) * spread / 2**64) for lo, hi in hashes]
    most = min(-(-min(128, every) // 8), spread)
    assert {*parts} == {most, spread % most or most}
    assert sum(parts) >= spread


def test_steps_far_from_an_expiry_plan_no_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, asked = tc.Expiry.part_after, list[int]()

    def planned(self: tc.Expiry, step: int) -> KeyPart | None:
        asked.append(step)
        return plan(self, step)

    monkeypatch.setattr(tc.Expiry, "part_after", planned)
    monkeypatch.setattr(SsdStore, "stats", None)
    table = make_table("ssd", tmp_path, expiry=tc.Expiry(every=1000, spread=100, unused_steps=9))
    trained(table)
    assert asked == list(range(1, STEPS + 1))


def test_rows_and_commits_between_the_scan_and_the_step(tmp_path: Path) -> None:
    """Exports and saves then have every row whose turn has not come; another expiry in between is exact."""
    rule = tc.Expiry(every=12, spread=6, unused_steps=5)
    tables = [make_table("reference", "", expiry=rule), make_table("ssd", tmp_path, expiry=rule)]
    bags = [tc.EmbeddingBag(table, 2) for table in tables]
    for number, batch in enumerate(stream(STEPS)):
        for table, bag in zip(tables, bags, strict=True):
            train(table, bag, [batch])
            if number % 10 == 3:
                table.expire(tc.Expiry(every=1, unused_steps=9))
        if number % 5 == 0:
            tables[1].commit()
        assert state_of(tables[1]) == state_of(tables[0])
    assert tables[0].expired.rows > 20


def test_loaded_rows_are_tested(tmp_path: Path) -> None:
    """Rows that are loaded after the scan of their part, over those that it has read."""
    rule = tc.Expiry(every=8, spread=2, min_norm=1.0)
    table = make_table("ssd", tmp_path, statistics=(), expiry=rule)
    bag = tc.EmbeddingBag(table, 1)
    keys = np.arange(1, 41, dtype=np.uint64)
    table.load_rows(keys, np.full((40, DIM), 0.01, np.float32))
    table.commit()

    def steps(count: int) -> None:
        for _ in range(count):
            bag(tc.Batch.from_lists([[0]])).sum().backward()
            table.step()

    steps(4)
    table.load_rows(keys[:20], np.full((20, DIM), 9.0, np.float32))
    steps(6)
    left = np.sort(np.concatenate([found for found, _ in table.rows()]))
    assert left[left > 0].tolist() == keys[:20].tolist()


def test_changes_of_a_followed_scan(tmp_path: Path) -> None:
    with SsdStore.open(tmp_path / "s", row_bytes=8, create=True) as store:
        keys = np.arange(100, dtype=np.uint64)
        store.put(keys, keys.view(np.uint8).reshape(-1, 8))
        store.commit()  # empties the write buffer, whose rows would count as changed
        halves = [KeyPart(0, 2), KeyPart(1, 2)]
        scan = store.follow(halves[0].lo, halves[1].hi)
        store.put(keys[:5], np.zeros((5, 8), np.uint8))
        store.delete(keys[3:7])
        read = np.concatenate([found for found, _ in scan.rows(9)])
        assert read.tolist() == keys[np.argsort(hash_keys(keys))].tolist()
        found = [scan.changed(half) for half in halves]
        changes = {
            int(key): (row.tobytes(), bool(gone))
            for each in found
            if each
            for key, row, gone in zip(*each, strict=True)
        }
        assert {key: gone for key, (_, gone) in changes.items()} == {key: key >= 3 for key in range(7)}
        assert {changes[key][0] for key in range(3)} == {bytes(8)}
