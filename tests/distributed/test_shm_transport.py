"""Messages through shared memory: whole, in order, whatever their size; and ranks that end are noticed."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ranks import outcomes, play

import thermocline as tc
from thermocline.distributed.communicator import Groups
from thermocline.distributed.shm_transport import ShmSegment, ShmTransport
from thermocline.errors import RankError

NODE = ((0, 1, 2),)


def content(sender: int, reader: int, number: int) -> torch.Tensor:
    """Sizes from nothing to more than a box has had room for."""
    rng = np.random.default_rng([sender, reader, number])
    size = int(rng.integers(0, 4)) and int(10.0 ** rng.uniform(0, 6.6))
    return torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8))


def many_messages(groups: Groups) -> bool:
    """Some put together in place, some elsewhere; slow readers, since a box must not change while it is read."""
    t, comm = groups.topology, groups.train
    assert comm.box is not None
    rng = np.random.default_rng(t.rank)
    for number in range(40):
        parts = [content(t.rank, reader, number) for reader in range(t.world)]
        sizes = [len(part) for part in parts]
        message = torch.cat(parts)
        if number % 3:
            room = comm.send_buffer("node", len(message), torch.device("cpu"))
            room.copy_(message)
            message = room
        found = comm.all_to_all("node", message, sizes, None, "tested")
        if rng.random() < 0.2:
            time.sleep(0.01)
        for sender, piece in enumerate(found):
            assert torch.equal(piece, content(sender, t.rank, number))
        shared = comm.all_gather_bytes(torch.full((number,), t.rank, dtype=torch.uint8), "tested")
        assert [piece.tolist() for piece in shared] == [[rank] * number for rank in range(t.world)]
    return True


def test_messages_arrive_whole() -> None:
    assert play(NODE, many_messages) == [True] * 3


def one_leaves(groups: Groups, how: str) -> None:
    t, comm = groups.topology, groups.train
    message = torch.zeros(3 * 8, dtype=torch.uint8)
    comm.all_to_all("node", message, [8] * 3, None, "tested")
    if t.rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        groups.close()
    else:
        comm.all_to_all("node", message, [8] * 3, None, "tested")


@pytest.mark.parametrize(("how", "said"), [("killed", "rank 1 has ended"), ("closed", "rank 1 has left")])
def test_a_rank_that_leaves_is_noticed(how: str, said: str) -> None:
    """By those that wait for it, soon; not by those that have still to read its last message."""
    begin = time.monotonic()
    found = outcomes(NODE, one_leaves, how)
    for rank in (0, 2):
        assert found[rank][0] == "failed"
        assert "RankError" in found[rank][1]
        assert said in found[rank][1]
    assert time.monotonic() - begin < 60


def all_or_none(groups: Groups, name: str, how: str) -> tuple[Any, int]:
    """One rank's system, or its Python, cannot do it: then none uses it, and no file stays open."""
    before = len(os.listdir("/proc/self/fd"))
    if groups.topology.rank == 2:
        if how == "refused":
            setattr(os, name, _refused)
        else:
            delattr(os, name)
    made = ShmTransport.make(groups.node, range(3), groups.topology.rank)
    return made, len(os.listdir("/proc/self/fd")) - before


def _refused(*_: Any) -> int:
    raise OSError("not here")


@pytest.mark.parametrize("name", ["memfd_create", "pidfd_open"])
@pytest.mark.parametrize("how", ["refused", "unknown"])
def test_all_or_none(name: str, how: str) -> None:
    assert play(NODE, all_or_none, name, how) == [(None, 0)] * 3


def test_what_is_no_box_is_refused(tmp_path: Path) -> None:
    """In another container the same process and descriptor may be anything."""
    files = [*os.pipe()]
    for size in (0, 3, 4096, 5000):
        (tmp_path / str(size)).write_bytes(bytes(size))
        files.append(os.open(tmp_path / str(size), os.O_RDWR))
    before = os.listdir("/proc/self/fd")
    for file in files:
        with pytest.raises(OSError, match=r"not a box|memory of another|Invalid"):
            ShmSegment.at((os.getpid(), file, 5), 2)
    with pytest.raises(FileNotFoundError):
        ShmSegment.at((os.getpid(), 1 << 20, 5), 2)
    assert os.listdir("/proc/self/fd") == before
    for file in files:
        os.close(file)


def many_files(groups: Groups) -> list[list[int]]:
    """Descriptors of processes beyond those that select() knows; a rank that is late is looked for by them."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    rank = groups.topology.rank
    box = ShmTransport.make(groups.node, range(3), rank)
    assert box is not None
    if rank == 1:
        time.sleep(0.4)
    box.room(1).fill_(rank)
    found = [piece.tolist() for piece in box.swap(1, [(0, 1)] * 3, 20.0)]
    box.close()
    for file in kept:
        os.close(file)
    return found


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096, reason="opens 1,200 files")
def test_processes_that_have_many_files_open() -> None:
    assert play(NODE, many_files) == [[[0], [1], [2]]] * 3


def cut_short(groups: Groups) -> Any:
    """Rank 0 is interrupted while it waits for rank 1, which still reads the message before."""
    comm, rank = groups.train, groups.topology.rank
    found = comm.all_gather_bytes(torch.full((1000,), rank, dtype=torch.uint8), "tested")
    if rank == 1:
        time.sleep(1.0)
        return [set(piece.tolist()) for piece in found]
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        comm.all_gather_bytes(torch.full((1000,), 7, dtype=torch.uint8), "tested")
    with pytest.raises(RankError, match="an earlier message was cut short"):
        comm.all_gather_bytes(torch.full((1000,), 8, dtype=torch.uint8), "tested")
    comm.send_buffer("node", 1000, torch.device("cpu")).fill_(9)
    return None


def test_who_is_cut_short_sends_no_more() -> None:
    """Else it would write where others still read."""
    assert play(((0, 1),), cut_short) == [None, [{0}, {1}]]


def at_different_things(groups: Groups) -> None:
    size = 1 + groups.topology.rank
    with pytest.raises(RankError, match=r"\[8, 16\] bytes came instead of .* different things"):
        groups.train.all_gather(np.zeros(size, np.int64), "tested")
    with pytest.raises(RankError, match="different things"):
        groups.ahead.all_to_all("node", torch.zeros(2 * size, dtype=torch.uint8), [size] * 2, [size] * 2, "tested")


def test_ranks_at_different_things_are_told() -> None:
    play(((0, 1),), at_different_things)


def closed_under_a_pipeline(groups: Groups) -> float:
    """Rank 1 leaves while it still owes the others windows."""
    table = tc.ShardedTable(4, tc.SGD(lr=0.1), groups=groups, mem="4MB", threads=1)
    tc.EmbeddingBag(table, fields=2)
    ads = tc.SyntheticAds(keys=1000, fields=2, batch_size=8, examples=800)
    ready = tc.prefetch(ads, table, depth=2)
    next(ready)
    begin = time.monotonic()
    if groups.topology.rank == 1:
        groups.close()
    ready.close()
    groups.close()
    with pytest.raises(RankError, match="the groups are closed here"):
        groups.ahead.all_gather(np.zeros(1), "tested")
    return time.monotonic() - begin


def test_groups_that_are_closed_keep_nobody_waiting() -> None:
    assert max(play(((0, 1),), closed_under_a_pipeline, seconds=20)) < 10
