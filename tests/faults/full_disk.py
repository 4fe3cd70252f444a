"""Test `SsdStore` on a small mounted file system. Run by test_full_disk.py in a new mount namespace.

    python full_disk.py KIND CASE FOLDER SEED

KIND: tmpfs or ext4. CASE: full fills it, read-only remounts it, probe only mounts it.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import workload

import thermocline as tc


def mount(kind: str, folder: Path, megabytes: int) -> Path:
    point = folder / "mount"
    point.mkdir(exist_ok=True)
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(point)]
    else:
        image = folder / "image"
        image.unlink(missing_ok=True)
        with image.open("wb") as file:
            file.truncate(megabytes << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
        command = ["mount", "-o", "loop", str(image), str(point)]
    subprocess.run(command, check=True)
    return point


def open_store(point: Path, *, read_only: bool = False) -> tc.SsdStore:
    return tc.SsdStore.open(
        point / "store", row_bytes=workload.ROW_BYTES, read_only=read_only, background_merge=False, **workload.OPTIONS
    )


def fill_until_full(store: tc.SsdStore, state: workload.State) -> None:
    """Commit steps until the disk is full; `state.done` is the last committed step."""
    for _ in range(10_000):
        step = state.done + 1
        try:
            workload.apply_step(store, state.seed, step)
            store.commit(str(step).encode())
        except tc.DiskFullError:
            return
        state.advance(step)
    raise AssertionError("the disk did not fill up")


def check_full_disk(point: Path, seed: int) -> None:
    rng = random.Random(seed)
    state = workload.State(seed)
    ballast = point / "ballast"
    ballast.write_bytes(bytes(rng.randrange(3 << 20, 6 << 20)))
    store = open_store(point)
    fill_until_full(store, state)
    # Rows are still readable: in this store (with a part of the uncommitted step) and by a reader (the last commit).
    store.get(workload.ALL_KEYS)
    with open_store(point, read_only=True) as reader:
        assert workload.step_of_note(reader) == state.done
        state.check(reader)
        reader.check()
    # Reopening on the full disk restores the last commit.
    store.close()
    store = open_store(point)
    assert workload.step_of_note(store) == state.done
    state.check(store)
    # With free space the store continues.
    if seed % 2:
        ballast.unlink()
    else:
        for epoch in store.epochs[:-1]:
            store.release(epoch)
    full_at = state.done
    for _ in range(3):
        step = state.done + 1
        workload.apply_step(store, seed, step)
        store.commit(str(step).encode())
        state.advance(step)
        for epoch in store.epochs[:-1]:
            store.release(epoch)
    assert state.done == full_at + 3
    state.check(store)
    store.check()
    # Fill the disk again; this time the store continues without reopening.
    fill_until_full(store, state)
    ballast.unlink(missing_ok=True)
    for epoch in store.epochs[:-1]:
        store.release(epoch)
    # Rows of the failed step may be there in part: repeat the whole step.
    workload.apply_step(store, seed, state.done + 1)
    store.commit(str(state.done + 1).encode())
    state.advance(state.done + 1)
    state.check(store)
    store.close()
    with open_store(point) as again:
        state.check(again)
        again.check()


def check_read_only(point: Path) -> None:
    state = workload.State(1)
    with open_store(point) as store:
        workload.apply_step(store, 1, 1)
        store.commit(b"1")
    state.advance(1)
    subprocess.run(["mount", "-o", "remount,ro", str(point)], check=True)
    with pytest.raises(tc.ReadOnlyError, match="read_only=True"):
        open_store(point)
    with open_store(point, read_only=True) as reader:
        state.check(reader)


def main(kind: str, case: str, folder: Path, seed: int) -> None:
    # Space for a few commits of the workload; the journal of ext4 takes some of it.
    point = mount(kind, folder, (12 if kind == "tmpfs" else 20) + seed % 5)
    try:
        if case == "full":
            check_full_disk(point, seed)
        elif case == "read-only":
            check_read_only(point)
    finally:
        subprocess.run(["umount", str(point)], check=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
