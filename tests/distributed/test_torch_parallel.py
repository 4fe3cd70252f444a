"""DDP, FSDP and torch.distributed.checkpoint around a model with sharded tables, over two Gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.rank_training import ONE_RANK, PAIR
from helpers.ranks import run_ranks
from helpers.train import Net, all_keys, bits, loss_of, make_batches

import thermocline as tc
import thermocline.torchrec as tr
from thermocline.distributed.communicator import Groups

STEPS = 6


def data(rank: int) -> list[tc.Batch]:
    """Batches whose fields are in another order on each rank."""
    batches = make_batches(STEPS, keys=60, seed=rank)
    for batch in batches:
        batch.names = ("a", "b", "c") if rank == 0 else ("c", "a", "b")
    return batches


KEYS = all_keys([*data(0), *data(1)])


def make(groups: Groups | None, **options: Any) -> tuple[tc.Table, Net]:
    options = {"optimizer": tc.Adagrad(lr=0.1), "mem": "1MB", "threads": 1, "name": "ads", **options}
    table = tc.Table(4, **options) if groups is None else tc.ShardedTable(4, groups=groups, **options)
    torch.manual_seed(0)
    return table, Net([tc.EmbeddingBag(table, ["a", "b", "c"])], 12)


def train(table: tc.Table, model: Any, parameters: Any, rank: int, *, reduce: bool) -> None:
    """Train the batches of one rank; `reduce`: average dense gradients here."""
    dense = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for batch in tc.prefetch(data(rank), table, depth=2):
        loss_of(model, batch).backward()
        table.step()
        if reduce:
            for parameter in parameters:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        dense.step()
        dense.zero_grad()


def full(parameter: torch.Tensor) -> bytes:
    return bits(parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter)


def fsdp(model: Net) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))


def train_all_ways(groups: Groups) -> list[tuple[bytes, list[bytes]]]:
    return [train_parallel(groups, way) for way in ("plain", "ddp", "fsdp")]


def train_parallel(groups: Groups, way: str) -> tuple[bytes, list[bytes]]:
    """Return all rows and dense weights after training with one way of averaging dense gradients."""
    table, net = make(groups)
    model: Any = net
    if way == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(net)
    elif way == "fsdp":
        model = fsdp(net)
    parameters = list(model.parameters())
    train(table, model, parameters, groups.topology.rank, reduce=way == "plain")
    rows = bits(table.read(KEYS))
    state = model.state_dict()
    model.load_state_dict(state)  # the description of the table goes through the wrapper
    prefix = "module." if way == "ddp" else ""
    assert f"{prefix}bags.0._extra_state" in state
    return rows, [full(parameter) for parameter in parameters]


def test_ddp_and_fsdp_equal_the_plain_loop() -> None:
    """Rows and dense weights have the bits of a loop that averages dense gradients itself, on both ranks."""
    results = run_ranks(PAIR, train_all_ways)
    assert results[0] == results[1]
    plain, ddp, fsdp = results[0]
    assert ddp == plain
    assert fsdp == plain


def train_local(groups: Groups) -> list[Any]:
    """Train a local table in a job of ranks: returns the refusal, and the steps of tables with and without opt-out."""
    refused = []
    batch = data(0)[0]
    table, model = make(None)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    try:
        ddp(batch)
    except RuntimeError as error:
        refused.append(str(error))
    tiers = tc.Tiers(mem="1MB")
    tables = [tiers.table(name, 4, tc.SGD(lr=0.1)) for name in ("a", "b")]
    try:
        bags = tc.EmbeddingBags([tc.EmbeddingBag(table, [table.name]) for table in tables])
        bags(tc.Batch.from_lists([[1, 2]], names=("a", "b")))
    except RuntimeError as error:
        refused.append(str(error))
    model.eval()
    with torch.no_grad():
        ddp(batch)  # reading is allowed
    own_table, own = make(None, per_rank=True)
    loss_of(own, batch).backward()
    own_table.step()
    return [*refused, own_table.step_count, table.step_count]


def test_local_table_over_ranks_is_refused() -> None:
    for result in run_ranks(PAIR, train_local):
        message, shared, *steps = result
        assert "table 'a' is trained by 2 ranks" in shared
        assert 'tc.Tiers(table_options={"per_rank": True})' in shared
        assert "table 'ads' is trained by 2 ranks of torch.distributed" in message
        assert "tc.ShardedTable(..., groups=tc.join_ranks())" in message
        assert "per_rank=True" in message
        assert steps == [1, 0]
    assert run_ranks(ONE_RANK, train_local) == [[1, 0]]


class Collection(torch.nn.Module):
    """A collection of `thermocline.torchrec` and a dense layer."""

    def __init__(self, kind: type[Any], **options: Any) -> None:
        super().__init__()
        config = (
            tr.EmbeddingBagConfig(50, 4, "t") if kind is tr.EmbeddingBagCollection else tr.EmbeddingConfig(50, 4, "t")
        )
        self.rows = kind([config], optimizer=tc.SGD(lr=0.1), mem="1MB", **options)
        self.dense = torch.nn.Linear(4, 1)

    def forward(self, ids: tr.KeyedJaggedTensor) -> torch.Tensor:
        out = self.rows(ids)
        result: torch.Tensor = self.dense((out if isinstance(out, tr.KeyedTensor) else out["t"]).values()).sum()
        return result


def train_collections(groups: Groups) -> list[tuple[list[str], int]]:
    """Train collections under DDP, without and with opt-out. Returns the refusals of each and its steps."""
    results = []
    ids = tr.KeyedJaggedTensor(["t"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    for kind in (tr.EmbeddingBagCollection, tr.EmbeddingCollection):
        for options in ({}, {"table_options": {"per_rank": True}}):
            model = Collection(kind, **options)
            # The parameters that stand for rows have no gradients.
            ddp = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
            refused = []
            for _ in range(2):
                try:
                    ddp(ids).backward()
                except RuntimeError as error:
                    refused.append(str(error))
            results.append((refused, model.rows.tables["t"].step_count))
            ddp.eval()
            with torch.no_grad():
                ddp(ids)  # reading is allowed
    return results


def test_local_collections_over_ranks_are_refused() -> None:
    for result in run_ranks(PAIR, train_collections):
        for refused, steps in result[::2]:
            assert ["table 't' is trained by 2 ranks of torch.distributed" in message for message in refused] == [
                True
            ] * 2
            assert 'tc.Tiers(table_options={"per_rank": True})' in refused[0]
            assert steps == 0
        assert result[1::2] == [([], 2)] * 2
    assert run_ranks(ONE_RANK, train_collections) == [[([], 2)] * 4]


Saved = tuple[bytes, list[bytes], int]
"""All rows, dense weights and the step count."""


def result_of(table: tc.Table, model: Any) -> Saved:
    return bits(table.read(KEYS)), [full(parameter) for parameter in model.parameters()], table.step_count


def saved_by_dcp(groups: Groups, folder: str) -> list[Saved]:
    """Train and save, then load into another table and model. Returns the results of both."""
    import torch.distributed.checkpoint as dcp

    table, net = make(groups)
    model = fsdp(net)  # parameters are sharded as well
    train(table, model, list(model.parameters()), groups.topology.rank, reduce=False)
    dcp.save({"app": tc.ModelState(model)}, checkpoint_id=folder)
    return [result_of(table, model), loaded_by_dcp(groups, folder)[0]]


def loaded_by_dcp(groups: Groups, folder: str, other: str = "") -> tuple[Saved, int]:
    """Load, and save to another folder. Returns the result and the number of rows of this rank."""
    import torch.distributed.checkpoint as dcp

    table, net = make(groups)
    model = fsdp(net)
    app = tc.ModelState(model)
    dcp.load({"app": app}, checkpoint_id=folder)
    if other:
        dcp.save({"app": app}, checkpoint_id=other)
    return result_of(table, model), sum(len(keys) for keys, _ in table.rows())


def test_dcp_over_ranks(tmp_path: Path) -> None:
    """Every rank saves its own rows and parameters; any number of ranks loads them, each the rows it owns."""
    (saved, loaded), other = run_ranks(PAIR, saved_by_dcp, str(tmp_path / "c"))
    assert loaded == saved
    assert other == [saved, saved]
    # Three ranks share parts of the rows: they exchange them before they save.
    three = run_ranks(((0, 1, 2),), loaded_by_dcp, str(tmp_path / "c"), str(tmp_path / "d"))
    assert [result for result, _ in three] == [saved] * 3
    assert sum(rows for _, rows in three) == len(KEYS)
    assert run_ranks(ONE_RANK, loaded_by_dcp, str(tmp_path / "d")) == [(saved, len(KEYS))]


def whole_state(groups: Groups, state: dict[str, Any] | None) -> Any:
    table, model = make(groups)
    if state is None:
        train(table, model, list(model.parameters()), groups.topology.rank, reduce=True)
        with pytest.raises(tc.BudgetError, match="max_bytes"):  # together, not one rank alone
            tc.state_dict(model, rows=True, max_bytes=8 * len(KEYS) * 16 // 10)
        return bits(table.read(KEYS)), {k: v.numpy() for k, v in tc.state_dict(model, rows=True).items()}
    tc.load_state_dict(model, {name: torch.from_numpy(value) for name, value in state.items()})
    own = np.concatenate([keys for keys, _ in table.rows()])
    assert table.owns(own).all()
    loaded = bits(table.read(KEYS))
    for batch in tc.prefetch(data(0)[:1] if groups.topology.rank == 0 else [], table):
        if batch.examples:  # the other rank has no data: it makes empty batches with the names that bags read
            loss_of(model, batch).backward()
        table.step()
    assert bits(table.read(KEYS)) != loaded
    return loaded, len(own)


def test_state_dict_with_rows_loads_on_any_number_of_ranks() -> None:
    (rows, state), (_, other) = run_ranks(PAIR, whole_state, None)
    assert state.keys() == other.keys()
    assert all(bits(state[name]) == bits(other[name]) for name in state)
    assert np.array_equal(state["tables/ads/keys"].view(np.uint64), KEYS)
    assert run_ranks(ONE_RANK, whole_state, state) == [(rows, len(KEYS))]
    loaded = run_ranks(PAIR, whole_state, state)
    assert [result[0] for result in loaded] == [rows] * 2
    assert sum(result[1] for result in loaded) == len(KEYS)
    table, model = make(None)
    tc.load_state_dict(model, {name: torch.from_numpy(value) for name, value in state.items()})
    assert bits(table.read(KEYS)) == rows
