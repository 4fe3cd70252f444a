"""Shared memory transport: messages of any size arrive complete and in order; exited and closed ranks are detected."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ranks import run_failing_ranks, run_ranks

import thermocline as tc
from thermocline.distributed import shm_transport
from thermocline.distributed.communicator import Groups
from thermocline.distributed.group_setup import open_store
from thermocline.distributed.shm_transport import ShmSegment, make_transports, segment_bytes
from thermocline.errors import RankError

NODE = ((0, 1, 2),)


def message_of(sender: int, reader: int, number: int) -> torch.Tensor:
    """Return random bytes: empty, small, or larger than the segment so far."""
    rng = np.random.default_rng([sender, reader, number])
    size = int(rng.integers(0, 4)) and int(10.0 ** rng.uniform(0, 6.6))
    return torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8))


def exchange_many(groups: Groups) -> bool:
    """Exchange messages written in place or copied, with slow readers: a segment must not change while it is read."""
    t, comm = groups.topology, groups.train
    assert comm.shm is not None
    rng = np.random.default_rng(t.rank)
    for number in range(40):
        parts = [message_of(t.rank, reader, number) for reader in range(t.world)]
        sizes = [len(part) for part in parts]
        message = torch.cat(parts)
        if number % 3:
            buffer = comm.send_buffer("node", len(message), torch.device("cpu"))
            buffer.copy_(message)
            message = buffer
        pieces = comm.all_to_all("node", message, sizes, None, "testing")
        if rng.random() < 0.2:
            time.sleep(0.01)
        for sender, piece in enumerate(pieces):
            assert torch.equal(piece, message_of(sender, t.rank, number))
        gathered = comm.all_gather_bytes(torch.full((number,), t.rank, dtype=torch.uint8), "testing")
        assert [piece.tolist() for piece in gathered] == [[rank] * number for rank in range(t.world)]
    return True


def test_messages_arrive_complete() -> None:
    assert run_ranks(NODE, exchange_many) == [True] * 3


def lose_rank_1(groups: Groups, how: str) -> None:
    t, comm = groups.topology, groups.train
    message = torch.zeros(3 * 8, dtype=torch.uint8)
    comm.all_to_all("node", message, [8] * 3, None, "testing")
    if t.rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        groups.close()
    else:
        comm.all_to_all("node", message, [8] * 3, None, "testing")


@pytest.mark.parametrize(
    ("how", "cause"), [("killed", "the process of rank 1 exited"), ("closed", "rank 1 closed its communicator")]
)
def test_a_lost_rank_is_detected(how: str, cause: str) -> None:
    """Soon, by the ranks that wait for it; its last message can still be read."""
    start = time.monotonic()
    outcomes = run_failing_ranks(NODE, lose_rank_1, how)
    for rank in (0, 2):
        assert outcomes[rank][0] == "raised"
        assert "RankError" in outcomes[rank][1]
        assert cause in outcomes[rank][1]
    assert time.monotonic() - start < 60


MISSING = [
    ("memfd_create", "refused"),
    ("memfd_create", "absent"),
    ("memfd_create", "refused later"),
    ("stat", "refused"),
]


def make_without_calls(groups: Groups) -> Any:
    """Create transports where rank 2 lacks a system call. Returns transport, cause, warnings and open descriptors."""
    topology = groups.topology
    store = open_store(topology.rank, topology.world, 20.0)
    results = []
    for name, how in MISSING:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if topology.rank == 2 and how == "absent":
                patch.delattr(os, name)
            elif topology.rank == 2:
                patch.setattr(os, name, refuse_after(os.memfd_create, 3 if how == "refused later" else 0))
            made, causes = make_transports(store, topology, 2, groups.heartbeat, name=f"{name} {how}")
        results.append((made, causes[0], len(caught), len(os.listdir("/proc/self/fd")) - before))
    return results


def refuse_after(function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """Return a function that fails after a number of calls."""
    left = [None] * calls

    def call(*args: Any) -> Any:
        if not left:
            raise OSError("not supported")
        left.pop()
        return function(*args)

    return call


def test_no_rank_uses_shared_memory_if_one_cannot() -> None:
    """Rank 2 cannot create or open segments: no rank creates a transport or leaks a descriptor, one rank warns."""
    for rank, results in enumerate(run_ranks(NODE, make_without_calls)):
        for made, cause, warned, leaked in results:
            assert (made, warned, leaked) == (None, rank == 0, 0)
            assert cause.startswith("rank 2 cannot ")
            assert "not supported" in cause or "no attribute" in cause


def test_other_files_are_not_attached(tmp_path: Path) -> None:
    """In another container the same process and descriptor numbers may belong to any file."""
    files = [*os.pipe()]
    for size in (0, 3, 4096, segment_bytes(2)):
        files.append(os.open(tmp_path / str(size), os.O_RDWR | os.O_CREAT))
        os.ftruncate(files[-1], size)
    before = os.listdir("/proc/self/fd")
    for file in files:
        with pytest.raises(OSError, match=r"not a shared memory segment|belongs to another process"):
            ShmSegment((os.getpid(), file, 5), 2)
    with pytest.raises(FileNotFoundError):
        ShmSegment((os.getpid(), 1 << 20, 5), 2)
    assert os.listdir("/proc/self/fd") == before
    for file in files:
        os.close(file)


def count_descriptors(groups: Groups) -> tuple[int, int, int]:
    """Return the descriptors of one more set of groups: created, after small and large messages, and closed."""

    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    shm_transport._MAX_SEGMENT = 1 << 30  # TSan leaves 1.5 TiB of addresses: segments of 64 GiB of 5 ranks do not fit
    start, ranks = opened(), groups.topology.world
    more = Groups.make(groups.topology, timeout=20.0)
    made = opened() - start
    for comm in (more.train, more.ahead, more.read):
        for size in (10, 3_000_000):
            comm.all_to_all("node", torch.zeros(ranks * size, dtype=torch.uint8), [size] * ranks, None, "testing")
        comm.barrier("testing")
    used = opened() - start
    more.close()
    return made, used, opened() - start


def test_descriptors_do_not_depend_on_the_number_of_ranks() -> None:
    """Six segments of its own per rank; no socket and no descriptor of another rank."""
    for ranks in (2, 5):
        for made, used, closed in run_ranks((tuple(range(ranks)),), count_descriptors):
            assert made == used <= 8
            assert closed <= made - 6


def limit_files(groups: Groups) -> Any:
    """Rank 1 of two nodes has few descriptors left."""
    if groups.topology.rank == 1:
        limit = len(os.listdir("/proc/self/fd")) + 20
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    with pytest.raises(tc.ConfigError) as error:
        Groups.make(groups.topology, timeout=20.0)
    return str(error.value)


def test_too_few_open_files_are_refused_with_the_number_needed() -> None:
    messages = run_ranks(((0,), (1,)), limit_files)
    assert messages[0] == messages[1]
    assert re.fullmatch(
        r"rank 1 of 2 needs up to (\d+) open files, its limit is \d+: raise the limit .* \(ulimit -n \1\)", messages[0]
    )


def interrupt_exchange(groups: Groups) -> Any:
    """Rank 0 is interrupted while it waits for rank 1, which still reads the previous message."""
    comm, rank = groups.train, groups.topology.rank
    pieces = comm.all_gather_bytes(torch.full((1000,), rank, dtype=torch.uint8), "testing")
    if rank == 1:
        time.sleep(1.0)
        return [set(piece.tolist()) for piece in pieces]
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        comm.all_gather_bytes(torch.full((1000,), 7, dtype=torch.uint8), "testing")
    with pytest.raises(RankError, match="an earlier exchange was interrupted"):
        comm.all_gather_bytes(torch.full((1000,), 8, dtype=torch.uint8), "testing")
    comm.send_buffer("node", 1000, torch.device("cpu")).fill_(9)
    return None


def test_an_interrupted_exchange_poisons_the_transport() -> None:
    """Otherwise it would overwrite a segment that other ranks still read."""
    assert run_ranks(((0, 1),), interrupt_exchange) == [None, [{0}, {1}]]


def call_different_collectives(groups: Groups) -> None:
    size = 1 + groups.topology.rank
    with pytest.raises(RankError, match=r"size mismatch: got \[8, 16\] bytes, expected .* different collectives"):
        groups.train.all_gather(np.zeros(size, np.int64), "testing")
    with pytest.raises(RankError, match="ranks called different collectives"):
        groups.ahead.all_to_all("node", torch.zeros(2 * size, dtype=torch.uint8), [size] * 2, [size] * 2, "testing")


def test_different_collectives_raise() -> None:
    run_ranks(((0, 1),), call_different_collectives)


def close_during_pipeline(groups: Groups) -> float:
    """Rank 1 closes while other ranks wait for its windows. Returns the seconds until all is closed."""
    table = tc.ShardedTable(4, tc.SGD(lr=0.1), groups=groups, mem="4MB", threads=1)
    tc.EmbeddingBag(table, fields=2)
    ads = tc.SyntheticAds(keys=1000, fields=2, batch_size=8, examples=800)
    batches = tc.prefetch(ads, table, depth=2)
    next(batches)
    start = time.monotonic()
    if groups.topology.rank == 1:
        groups.close()
    batches.close()
    groups.close()
    with pytest.raises(RankError, match="the communicator is closed on this rank"):
        groups.ahead.all_gather(np.zeros(1), "testing")
    return time.monotonic() - start


def test_closed_groups_do_not_block_other_ranks() -> None:
    assert max(run_ranks(((0, 1),), close_during_pipeline, seconds=20)) < 10
