"""State files of ranks in an own loop: frozen parameters, and checkpoints without the ranks' `DenseParameters`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.rank_training import PAIR
from helpers.ranks import run_ranks

import thermocline as tc
from thermocline.distributed.communicator import Groups
from thermocline.distributed.dense_sync import DenseParameters


class Net(torch.nn.Module):
    """A frozen layer, a trained one and, if wanted, batch norm. Initial values are different on each rank."""

    def __init__(self, rank: int, batch_norm: bool) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.frozen = torch.nn.Linear(2, 3).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(3) if batch_norm else torch.nn.Identity()
        self.last = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.frozen(x)))  # type: ignore[no-any-return]


class OwnLoop:
    """Table, model and synchronization of one rank."""

    def __init__(self, groups: Groups, *, batch_norm: bool = False, every: int = 1) -> None:
        self.rank = groups.topology.rank
        self.table = tc.ShardedTable(2, tc.SGD(lr=0.1), groups=groups, mem="1MB", threads=1)
        self.net = Net(self.rank, batch_norm)
        self.optimizer = tc.FrozenAdam([p for p in self.net.parameters() if p.requires_grad], lr=0.1)
        settings = tc.DenseSync(every=every)
        self.sync = DenseParameters.make(
            self.net.parameters(), self.optimizer, groups, settings, buffers=self.net.buffers()
        )

    def checkpoints(self, folder: Path, **options: Any) -> tc.Checkpoints:
        return tc.Checkpoints(folder, [self.table], self.net, self.optimizer, **options)

    def train(self, steps: range) -> None:
        for step in steps:
            x = torch.randn(4, 2, generator=torch.Generator().manual_seed(step * 10 + self.rank))
            self.net(x).square().mean().backward()
            self.sync.after_backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.sync.after_step(step)

    def state(self) -> dict[str, bytes]:
        return {name: np.asarray(value).tobytes() for name, value in self.net.state_dict().items()}


def frozen_parameters(groups: Groups, folder: str) -> Any:
    first = OwnLoop(groups)
    first.sync.begin()
    begun = first.state()
    checkpoints = first.checkpoints(Path(folder), dense_sync=first.sync)
    first.train(range(1, 4))
    first.net.frozen.weight.data += first.rank  # an own loop may give ranks different ones
    checkpoints.save(3)
    checkpoints.close()
    second = OwnLoop(groups)
    resumed = second.checkpoints(Path(folder), dense_sync=second.sync)
    resumed.restore()
    resumed.close()
    reader = OwnLoop(groups).checkpoints(Path(folder), read_only=True)
    error = ""
    try:
        reader.restore()
    except tc.FormatError as raised:
        error = str(raised)
    return begun, first.state(), second.state(), error


def test_frozen_parameters_are_broadcast_once_and_never_averaged(tmp_path: Path) -> None:
    results = run_ranks(PAIR, frozen_parameters, str(tmp_path / "run"))
    assert results[0][0] == results[1][0]  # rank 0's, frozen ones included
    for begun, saved, resumed, error in results:
        assert resumed == saved
        assert saved["frozen.bias"] == begun["frozen.bias"]
        assert saved["last.weight"] != begun["last.weight"]
        assert (
            "parameter 'frozen.weight' is frozen (requires_grad False) and differs between rank 1 and rank 0" in error
        )
    assert results[0][1]["frozen.weight"] != results[1][1]["frozen.weight"]


def without_dense_sync(groups: Groups, folder: str) -> Any:
    found: list[Any] = []
    for n, options in enumerate(({"batch_norm": True}, {"every": 2}, {})):
        own, path = OwnLoop(groups, **options), Path(folder) / str(n)
        own.sync.begin()
        checkpoints = own.checkpoints(path)
        own.train(range(1, 4))
        try:
            checkpoints.save(3)
            checkpoints.close()
        except tc.ThermoclineError as raised:
            found.append(str(raised))
            checkpoints.close()
            continue
        own.train(range(4, 7))
        again = OwnLoop(groups, **options)
        restored = again.checkpoints(path)
        restored.restore()
        again.sync.begin()
        again.train(range(4, 7))
        found.append(again.state() == own.state())
    saved = Path(folder) / "saved"
    own = OwnLoop(groups, batch_norm=True)
    own.sync.begin()
    own.train(range(1, 4))
    own.checkpoints(saved, dense_sync=own.sync).save(3)
    again = OwnLoop(groups, batch_norm=True)
    try:
        again.checkpoints(saved).restore()
    except tc.ThermoclineError as raised:
        found.append(str(raised))
    return found


def test_checkpoints_without_dense_sync_are_exact_or_refused(tmp_path: Path) -> None:
    """Refused with batch norm and with periodic merging, whose ranks differ; exact otherwise."""
    for batch_norm, periodic, equal, restored in run_ranks(PAIR, without_dense_sync, str(tmp_path)):
        for message in (batch_norm, periodic, restored):
            assert "Pass dense_sync=sync" in message
        assert equal is True
