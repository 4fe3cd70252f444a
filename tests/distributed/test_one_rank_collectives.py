"""Collectives of `TorchGroup` and `Communicator` in a world of one rank: NCCL on a GPU, Gloo on a CPU.

One GPU is enough to run NCCL's code path: several communicators, several streams, several threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.rank_training import ONE_RANK, Job, RunOptions, assert_matches_reference, train_rank
from helpers.ranks import run_ranks

from thermocline.distributed.communicator import Communicator, Groups
from thermocline.distributed.group_setup import initialize_torch
from thermocline.distributed.heartbeat import Heartbeat
from thermocline.distributed.topology import Topology
from thermocline.distributed.torch_group import TorchGroup
from thermocline.kernels import INTERPRETED

ONE = Topology(1, 0, ((0,),))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def heartbeat() -> Iterator[Heartbeat]:
    beat = Heartbeat(None, 30.0, 60.0)
    yield beat
    beat.close()


@pytest.fixture
def make_group(request: pytest.FixtureRequest, heartbeat: Heartbeat, no_process_group: None) -> Iterator[Any]:
    """Initialize torch.distributed as a job of one rank does; yields a function that makes one more group."""
    gpu = request.getfixturevalue("device") == "cuda"
    initialize_torch(ONE, None, 30.0, gpu)
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    yield lambda: TorchGroup(dist.new_group([0], backend=backend), heartbeat)
    dist.destroy_process_group()


def values_on(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_every_collective_returns_the_values_of_the_only_rank(make_group: Any, device: str) -> None:
    group = make_group()
    assert (group.rank, group.size) == (0, 1)
    values = values_on(device, 7, 3)
    for call in (
        lambda out: group.all_to_all(out, values, [7], [7]),
        lambda out: group.all_gather([out], values),
        lambda out: group.all_gather_single(out, values),
        lambda out: group.reduce_scatter_single(out, values),
        lambda out: group.gather([out], values),
    ):
        out = torch.zeros_like(values)
        call(out)
        assert torch.equal(out, values)
    for call in (group.all_reduce, group.broadcast):
        out = values.clone()
        call(out)
        assert torch.equal(out, values)


@pytest.mark.parametrize("device", DEVICES)
def test_communicator_sends_messages_of_unknown_size(make_group: Any, heartbeat: Heartbeat, device: str) -> None:
    """`all_to_all` of one rank sends nothing, so its part that calls torch is called here."""
    group = make_group()
    comm = Communicator("train", ONE, heartbeat, group, group, None, gpu=device == "cuda")
    message = values_on(device, 5, 8).view(torch.uint8).flatten()
    for receive in (None, [len(message)]):
        (piece,) = comm._torch_all_to_all("node", message, [len(message)], receive)
        assert piece.device.type == device
        assert torch.equal(piece, message)
    copy = message.clone()
    comm.broadcast(copy, "testing")
    assert torch.equal(copy, message)


@pytest.mark.parametrize("device", DEVICES)
def test_communicators_of_several_threads_and_streams_do_not_interfere(make_group: Any, device: str) -> None:
    """One communicator and one stream per thread, as for train, ahead and read; unequal amounts of work."""
    groups = [make_group() for _ in range(3)]
    results: list[Any] = [None] * len(groups)

    def work(number: int, group: TorchGroup) -> None:
        stream = torch.cuda.Stream() if device == "cuda" else None
        with torch.cuda.stream(stream):
            total = torch.zeros(1000 * (number + 1), device=device)
            for n in range(20):
                values = torch.full_like(total, float(n + number))
                received = torch.empty_like(values)
                group.all_to_all(received, values, [len(values)], [len(values)])
                values.fill_(-1.0)  # a message is read before later work of its stream changes it
                group.all_reduce(received)
                total += received
            results[number] = total.cpu()

    threads = [threading.Thread(target=work, args=item) for item in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number, total in enumerate(results):
        assert torch.equal(total, torch.full((1000 * (number + 1),), float(sum(range(20)) + 20 * number)))


# ---- training of one rank through torch's collectives


def train_through_torch(groups: Groups, gpu: bool, job: Job, options: RunOptions, folder: str) -> dict[str, Any]:
    """Train as one of several ranks: every message is sent by torch, rows and gradients by NCCL if `gpu`."""
    sent: list[tuple[str, str]] = []
    for comm in (groups.train, groups.ahead, groups.read):
        carries_rows = gpu and comm is groups.train
        backend = "cpu:gloo,cuda:nccl" if carries_rows else "gloo"
        comm.world = comm.node = comm.peers = TorchGroup(dist.new_group([0], backend=backend), groups.heartbeat)
        comm.gpu = carries_rows

    def all_to_all(self: Communicator, group: Any, message: torch.Tensor, *given: Any) -> list[torch.Tensor]:
        sent.append((self.name, message.device.type))
        return self._exchange(group, message, *given)

    Communicator.all_to_all = all_to_all  # type: ignore[method-assign]  # of this process only
    return train_rank(groups, job, options, folder) | {"sent": sorted(set(sent))}


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        (RunOptions("two", 0.5, 4, 2), 30),
        (RunOptions("flat", None, 2, 1), 30),
        (RunOptions("two", 0.8, 2, 1, hbm=0.6), 5),
    ],
    ids=str,
)
def test_training_through_torch_has_the_bits_of_the_reference(
    options: RunOptions, batches: int, tmp_path: Path
) -> None:
    device = "cpu" if INTERPRETED or options.hbm is None else "cuda"
    job = Job(ONE_RANK, "adagrad", (batches,))
    results = run_ranks(ONE_RANK, train_through_torch, False, job, options, str(tmp_path))
    assert_matches_reference(job, results, device)
    assert {name for name, _ in results[0]["sent"]} >= {"train", "ahead"}


@pytest.mark.gpu
@pytest.mark.parametrize("hops", ["two", "flat"])
@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_training_through_nccl_has_the_bits_of_the_reference(hops: str, optimizer: str, tmp_path: Path) -> None:
    job, options = Job(ONE_RANK, optimizer), RunOptions(hops, 0.2, 4, 2, 2, hbm=0.2)
    results = run_ranks(ONE_RANK, train_through_torch, True, job, options, str(tmp_path))
    assert_matches_reference(job, results, "cuda")
    assert ("train", "cuda") in results[0]["sent"]
