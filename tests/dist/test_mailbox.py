"""Messages through shared memory: whole, in order, whatever their size; and ranks that end are noticed."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch
from ranks_helpers import outcomes, play

from thermocline.dist.groups import Groups
from thermocline.dist.mailbox import Mailbox

NODE = ((0, 1, 2),)


def content(sender: int, reader: int, number: int) -> torch.Tensor:
    """Sizes from nothing to more than a box has had room for."""
    rng = np.random.default_rng([sender, reader, number])
    size = int(rng.integers(0, 4)) and int(10.0 ** rng.uniform(0, 6.6))
    return torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8))


def many_messages(groups: Groups) -> bool:
    """Some put together in place, some elsewhere; slow readers, since a box must not change while it is read."""
    t, lane = groups.topology, groups.train
    assert lane.box is not None
    rng = np.random.default_rng(t.rank)
    for number in range(40):
        parts = [content(t.rank, reader, number) for reader in range(t.world)]
        sizes = [len(part) for part in parts]
        message = torch.cat(parts)
        if number % 3:
            room = lane.room("node", len(message), torch.device("cpu"))
            room.copy_(message)
            message = room
        found = lane.swap("node", message, sizes, None, "tested")
        if rng.random() < 0.2:
            time.sleep(0.01)
        for sender, piece in enumerate(found):
            assert torch.equal(piece, content(sender, t.rank, number))
        shared = lane.share(torch.full((number,), t.rank, dtype=torch.uint8), "tested")
        assert [piece.tolist() for piece in shared] == [[rank] * number for rank in range(t.world)]
    return True


def test_messages_arrive_whole() -> None:
    assert play(NODE, many_messages) == [True] * 3


def one_leaves(groups: Groups, how: str) -> None:
    t, lane = groups.topology, groups.train
    message = torch.zeros(3 * 8, dtype=torch.uint8)
    lane.swap("node", message, [8] * 3, None, "tested")
    if t.rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        groups.close()
    else:
        lane.swap("node", message, [8] * 3, None, "tested")


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


def no_memory(groups: Groups) -> Any:
    """One rank's system has no such memory: then none uses it."""
    if groups.topology.rank == 2:
        os.memfd_create = _refused
    return Mailbox.make(groups.node, range(3), groups.topology.rank)


def _refused(*_: Any) -> int:
    raise OSError("not here")


def test_all_or_none() -> None:
    assert play(NODE, no_memory) == [None] * 3
