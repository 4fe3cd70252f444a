"""`tc.Tiers`: tables of one budget have the bits of separate tables, whatever is stored together."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ssd import SMALL

import thermocline as tc
from thermocline.config import schema
from thermocline.kernels import INTERPRETED
from thermocline.training.graph_step import GraphStep

ON_GPU = ["interpreter"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)]
IDS, EXAMPLES = 40, 6
INITIALS = [tc.Uniform(scale=0.1), tc.Normal(scale=0.2), tc.Constant(value=0.5), tc.Uniform(scale=0.3)]


class Scenario:
    """Random tables, and bags that read one or two features each."""

    def __init__(self, seed: int, optimizer: Any, *, dims: tuple[int, ...] = (4, 3), **options: Any) -> None:
        rng = np.random.default_rng(seed)
        self.names = [f"t{i}" for i in range(6)]
        self.options = [
            {"dim": int(rng.choice(dims)), "optimizer": optimizer, "initial": INITIALS[rng.integers(4)], **options}
            for _ in self.names
        ]
        self.bags: list[tuple[str, list[str], str]] = []
        for name in self.names:
            for _ in range(1 + (rng.random() < 0.3)):
                features = [f"f{i}" for i in rng.choice(8, 1 + (rng.random() < 0.4), replace=False)]
                self.bags.append((name, features, str(rng.choice(["sum", "sum", "mean"]))))
        self.bags.append((self.names[0], ["f0"], "none"))

    def separate(self, **budgets: Any) -> World:
        tables = {
            name: tc.Table(name=name, **{"mem": "2MB", **options, **budgets})
            for name, options in zip(self.names, self.options, strict=True)
        }
        return World(self, tables, list(tables.values()))

    def shared(self, *, table_options: Any = None, **budgets: Any) -> World:
        tiers = tc.Tiers(**{"mem": "12MB", **budgets}, table_options=table_options)
        tables = {n: tiers.table(n, **options) for n, options in zip(self.names, self.options, strict=True)}
        return World(self, tables, [tiers])


class World:
    """Tables of a scenario and their bags."""

    def __init__(self, scenario: Scenario, tables: dict[str, Any], trained: list[Any]) -> None:
        self.tables, self.trained = tables, trained
        self.bags = [tc.EmbeddingBag(tables[n], features, pooling=kind) for n, features, kind in scenario.bags]  # type: ignore[arg-type]

    def step(self, **more: Any) -> None:
        for table in self.trained:
            table.step(**more)

    def rows(self) -> dict[str, Any]:
        return {name: table.read(np.arange(IDS)).view(np.uint32) for name, table in self.tables.items()}

    def trained_ids(self) -> dict[str, list[int]]:
        return {n: sorted(i for ids, _ in table.rows() for i in ids.tolist()) for n, table in self.tables.items()}


def batches(count: int, seed: int = 0, *, weights: bool = False) -> list[tc.Batch]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        lengths = rng.integers(0, 4, 8 * EXAMPLES)
        values = rng.integers(0, IDS, lengths.sum())
        factors = rng.random(lengths.sum(), np.float32) if weights else None
        made.append(tc.Batch.from_jagged([f"f{i}" for i in range(8)], values, lengths, factors))
    return made


def train(world: World, data: Any, seed: int = 0, used: float = 1.0, weights: bool = False) -> list[Any]:
    """Train with random losses of a random part of the bags; return all outputs and gradients of weights."""
    rng, out = np.random.default_rng(seed), []
    for batch in data:
        learned = torch.from_numpy(rng.random(len(batch.ids), np.float32)).requires_grad_() if weights else None
        vectors = [bag(batch, learned) for bag in world.bags]
        chosen = [i for i in range(len(vectors)) if rng.random() < used] or [0]
        factors = [torch.from_numpy(rng.standard_normal(v.shape).astype(np.float32)) for v in vectors]
        sum((vectors[i] * factors[i].to(vectors[i].device)).sum() for i in chosen).backward()  # type: ignore[union-attr]
        out += [v.detach().cpu().clone() for v in vectors] + ([] if learned is None else [learned.grad])
        world.step(lr=float(rng.random()))
    return out


def require_equal(ours: World, theirs: World, outputs: Any, wanted: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(outputs, wanted, strict=True))
    rows, others = ours.rows(), theirs.rows()
    assert [name for name in rows if not np.array_equal(rows[name], others[name])] == []
    assert ours.trained_ids() == theirs.trained_ids()


# ---- bits of separate tables


@pytest.mark.parametrize("optimizer", [tc.SGD(lr=0.1), tc.Adagrad(lr=0.1), tc.Adam(lr=0.1, weight_decay=0.01)], ids=str)
@pytest.mark.parametrize(("seed", "used", "ahead"), [(0, 1.0, True), (1, 0.6, True), (2, 0.6, False), (3, 1.0, False)])
def test_rows_are_those_of_separate_tables(optimizer: Any, seed: int, used: float, ahead: bool) -> None:
    scenario, data = Scenario(seed, optimizer), batches(8, seed)
    ours, theirs = scenario.shared(), scenario.separate()
    results = [
        train(world, tc.prefetch(data, *world.trained, pull_window=2) if ahead else data, seed, used)
        for world in (ours, theirs)
    ]
    require_equal(ours, theirs, *results)
    assert 1 <= len(ours.trained[0].row_tables) <= 2


@pytest.mark.parametrize("precision", ["fp16", "bf16", tc.Precision("int8", range=1.0), "int4"], ids=str)
def test_stored_precision(precision: Any) -> None:
    scenario, data = Scenario(4, tc.Adagrad(lr=0.1), precision=precision), batches(6)
    ours, theirs = scenario.shared(), scenario.separate()
    require_equal(ours, theirs, train(ours, data), train(theirs, data))


def test_rows_beyond_memory(tmp_path: Path) -> None:
    scenario, data = Scenario(5, tc.Adagrad(lr=0.1), dims=(16,)), batches(12)
    options = {"ssd_options": SMALL}
    ours = scenario.shared(mem="36KB", ssd=tmp_path, lookahead=0, table_options=options)
    theirs = scenario.separate()
    results = [train(world, tc.prefetch(data, *world.trained, depth=2)) for world in (ours, theirs)]
    assert ours.trained[0].row_tables[0].dram.stats().from_store > 0
    require_equal(ours, theirs, *results)


@pytest.mark.parametrize("used", [1.0, 0.6])
def test_weights_per_id(used: float) -> None:
    scenario, data = Scenario(6, tc.Adagrad(lr=0.1)), batches(6)
    ours, theirs = scenario.shared(), scenario.separate()
    require_equal(ours, theirs, *(train(w, data, used=used, weights=True) for w in (ours, theirs)))
    fixed = batches(4, 1, weights=True)
    require_equal(ours, theirs, train(ours, fixed, used=used), train(theirs, fixed, used=used))


@pytest.mark.parametrize("device", ON_GPU)
def test_rows_in_gpu_memory(device: Any) -> None:
    scenario, data = Scenario(7, tc.Adagrad(lr=0.1), dims=(4,)), batches(3)
    budgets = {"table_options": {"device": device}, "hbm": "1MB"}
    ours, theirs = scenario.shared(**budgets), scenario.separate(device=device, hbm="1MB")
    results = [train(world, tc.prefetch(data, *world.trained), used=0.8) for world in (ours, theirs)]
    assert ours.trained[0].row_tables[0].hbm is not None
    require_equal(ours, theirs, *results)


def test_frozen_tables_and_evaluation() -> None:
    scenario, data = Scenario(8, tc.Adam(lr=0.1)), batches(4)
    outputs = []
    worlds = scenario.shared(), scenario.separate()
    for world in worlds:
        out = train(world, data)
        world.tables["t1"].requires_grad_(False)
        out += train(world, tc.prefetch(data, *world.trained))
        world.tables["t1"].requires_grad_(True)
        before = world.trained_ids()
        for bag in world.bags:
            bag.eval()
        unseen = batches(2, 9)
        for batch in [*unseen, *tc.prefetch(unseen, *world.trained, training=False)]:
            out += [bag(batch) for bag in world.bags]
        with pytest.raises(RuntimeError, match="backward through rows read for evaluation"):
            world.bags[0](unseen[0]).sum().backward()
        assert world.trained_ids() == before
        outputs.append(out)
    require_equal(*worlds, *outputs)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_bag_does_not_decide_whether_another_is_trained(frozen: int) -> None:
    tiers = tc.Tiers(mem="4MB")
    bags = [tc.EmbeddingBag(tiers.table(name, 4, tc.SGD(lr=0.1)), [name]).eval() for name in "ab"]
    bags[frozen].requires_grad_(False)
    batch = tc.Batch(np.arange(6, dtype=np.uint64), np.arange(7), 2, names=["a", "b"])
    outputs = [bag(batch) for bag in bags]
    assert [output.requires_grad for output in outputs] == [frozen != 0, frozen != 1]
    with pytest.raises(RuntimeError, match="backward through rows read for evaluation"):
        outputs[1 - frozen].sum().backward()


def test_weights_that_were_changed_in_place_count() -> None:
    tiers, weights = tc.Tiers(mem="4MB"), torch.ones(6)
    first, second = (tc.EmbeddingBag(tiers.table(name, 4, tc.SGD(lr=0.1)), [name]).eval() for name in "ab")
    batch = tc.Batch(np.arange(6, dtype=np.uint64), np.arange(7), 2, names=["a", "b"])
    expected = [2 * bag(batch) for bag in (first, second)]
    first(batch, weights)
    weights.mul_(2)
    assert all(torch.equal(bag(batch, weights), want) for bag, want in zip((first, second), expected, strict=True))


def test_accumulated_gradients_and_second_passes() -> None:
    scenario, data = Scenario(9, tc.Adagrad(lr=0.1)), batches(4)
    outputs: list[Any] = [[], []]
    worlds = scenario.shared(), scenario.separate()
    for world, out in zip(worlds, outputs, strict=True):
        for table in world.tables.values():
            table.accumulate = 8
        for first, second in zip(data[::2], data[1::2], strict=True):
            a = [bag(first) for bag in world.bags]
            b = [bag(second) for bag in world.bags]
            again = [bag(first) for bag in world.bags[::2]]
            out += [v.detach() for v in (*a, *b, *again)]
            for loss in ([v.square().sum() for v in a], [v.sum() for v in b], [v.square().sum() for v in again]):
                sum(loss).backward(retain_graph=True)  # type: ignore[union-attr]
            for vector in b[1:3]:  # a backward pass of single bags
                vector.square().sum().backward()
            world.step(scale=0.5)
    require_equal(*worlds, *outputs)


def test_outputs_can_be_changed_in_place() -> None:
    scenario, (batch,) = Scenario(0, tc.SGD(lr=0.1)), batches(1)
    worlds = scenario.shared(), scenario.separate()
    outputs = []
    for world in worlds:
        vectors = [bag(batch).mul_(2) for bag in world.bags]
        sum(vector.square().sum() for vector in vectors).backward()  # type: ignore[union-attr]
        outputs.append([vector.detach() for vector in vectors])
        world.step()
    require_equal(*worlds, *outputs)


def test_bags_side_by_side() -> None:
    scenario, data = Scenario(10, tc.Adagrad(lr=0.1), dims=(4,)), batches(4)
    scenario.bags = [bag for bag in scenario.bags if bag[2] != "none"]
    worlds = scenario.shared(), scenario.shared()
    outputs: list[Any] = [[], []]
    joined = tc.EmbeddingBags(worlds[0].bags)
    for batch in data:
        for i, world in enumerate(worlds):
            out = joined(batch) if i == 0 else torch.cat([bag(batch).flatten(1) for bag in world.bags], 1)
            outputs[i].append(out.detach())
            out.square().sum().backward()
            world.step()
    require_equal(*worlds, *outputs)


def test_compiled_bags() -> None:
    scenario, data = Scenario(12, tc.Adam(lr=0.1), dims=(4,)), batches(3)
    scenario.bags = [bag for bag in scenario.bags if bag[2] != "none"]
    worlds = scenario.shared(), scenario.separate()
    outputs: list[Any] = [[], []]
    for world, out in zip(worlds, outputs, strict=True):
        model: Any = tc.EmbeddingBags(world.bags)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if world is worlds[0] else model
        for batch in data:
            vectors = run(batch)
            out.append(vectors.detach().clone())
            vectors.square().sum().backward()
            world.step()
    require_equal(*worlds, *outputs)


@pytest.mark.parametrize("used", ["abc", "bc", "c"])
def test_compiled_bags_that_are_joined(used: str) -> None:
    """An op of the graph may take what another has pooled: its gradient is not lost."""
    rows = []
    for compiled in (False, True):
        tiers = tc.Tiers(mem="4MB")
        tables = {name: tiers.table(name, 4, tc.Adagrad(lr=0.1)) for name in "abc"}
        bags = torch.nn.ModuleDict({name: tc.EmbeddingBag(table, [name]) for name, table in tables.items()})
        model: Any = _Squares(bags, used)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        rng = np.random.default_rng(5)
        for _ in range(2):
            ids = rng.integers(0, IDS, 3 * EXAMPLES, dtype=np.uint64)
            run(tc.Batch(ids, np.arange(len(ids) + 1), 3, names=list("abc"))).backward()
            tiers.step()
        rows.append({name: table.read(np.arange(IDS)).tobytes() for name, table in tables.items()})
        assert all((table.read_rows(np.arange(IDS))[1] > 0).any() == (n in used) for n, table in tables.items())
    assert rows[0] == rows[1]


class _Squares(torch.nn.Module):
    """A loss that uses some of the bags that it calls."""

    def __init__(self, bags: torch.nn.ModuleDict, used: str) -> None:
        super().__init__()
        self.bags, self.used = bags, used

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        outputs = {name: bag(batch) for name, bag in self.bags.items()}
        return torch.cat([outputs[name] for name in self.used]).square().sum()


def test_one_bag_per_table_is_one_input_and_one_gradient() -> None:
    tiers = tc.Tiers(mem="4MB")
    bags = [tc.EmbeddingBag(tiers.table(f"t{i}", 4, tc.SGD(lr=0.1)), [f"f{i}"]) for i in range(8)]
    (table,) = tiers.row_tables
    for batch in tc.prefetch(batches(2), tiers):
        assert len(batch.prepared[table].bags) == 1
        torch.cat([bag(batch).flatten(1) for bag in bags], 1).square().sum().backward()
        assert table.pending_gradients == 1
        tiers.step()
    batch = batches(1)[0]
    bags[3](batch).sum().backward()  # one of eight: the others must not change
    assert table.pending_gradients == 1
    before = [tiers[f"t{i}"].read(np.arange(IDS)) for i in range(8)]
    tiers.step()
    assert [i for i in range(8) if not np.array_equal(before[i], tiers[f"t{i}"].read(np.arange(IDS)))] == [3]


def test_statistics_are_counted_per_table() -> None:
    scenario, data = Scenario(11, tc.SGD(lr=0.1), statistics=["frequency", "last_step"]), batches(3)
    ours, theirs = scenario.shared(), scenario.separate()
    require_equal(ours, theirs, train(ours, data), train(theirs, data))
    for name in scenario.names:
        counted, wanted = (world.tables[name].read_statistics(np.arange(IDS)) for world in (ours, theirs))
        assert {key: value.tolist() for key, value in counted.items()} == {k: v.tolist() for k, v in wanted.items()}


@pytest.mark.parametrize(
    "rule", [{"unused_steps": 1}, {"max_rows": 7, "order": "frequency"}, {"min_norm": 2.3}], ids=str
)
@pytest.mark.parametrize("ssd", [False, True], ids=["dram", "ssd"])
def test_expired_rows_are_those_of_a_separate_table(rule: Any, ssd: bool, tmp_path: Path) -> None:
    scenario = Scenario(11, tc.SGD(lr=0.1), dims=(16,), statistics=["frequency", "last_step"])
    stored: Any = {"mem": "20KB", "ssd": tmp_path, "lookahead": 0, "table_options": {"ssd_options": SMALL}}
    ours, theirs, data = scenario.shared(**(stored if ssd else {})), scenario.separate(), batches(3)
    for world in (ours, theirs):
        train(world, data, used=0.7)
    trained, evicted = ours.trained_ids()["t1"], set()
    for i in trained:
        before = ours.tables["t1"].dram.read_from_store
        ours.tables["t1"].read([i])
        evicted |= {i} if ours.tables["t1"].dram.read_from_store > before else set()
    deleted = [world.tables["t1"].expire(tc.Expiry(every=1, **rule)) for world in (ours, theirs)]
    assert deleted[0] == deleted[1] > 0
    assert ours.trained_ids() == theirs.trained_ids()
    gone = {*trained} - {*ours.trained_ids()["t1"]}
    if ssd:  # rows in DRAM and rows in the store only
        assert gone & evicted
        assert gone - evicted
    require_equal(ours, theirs, train(ours, data), train(theirs, data))


def test_expiry_of_tables_that_are_stored_together() -> None:
    tiers = tc.Tiers(mem="4MB")
    a, b = (tiers.table(name, 4, tc.SGD(lr=0.1), statistics=["show", "click"]) for name in "ab")
    for table in (a, b):
        table.load_rows([1, 2], np.ones((2, 4), np.float32))
    with pytest.raises(
        tc.ThermoclineError, match=r"table 'a': Expiry\.decay is 0\.5: .* tables \['b'\], .*expiry=\.\.\."
    ):
        a.expire(tc.Expiry(every=1, decay=0.5))
    assert a.expire(tc.Expiry(every=1, min_norm=3.0)) == 2
    assert [len(a), len(b)] == [0, 2]


def test_batches_without_the_fields_of_some_tables() -> None:
    tiers = tc.Tiers(mem="4MB")
    a, b = (tc.EmbeddingBag(tiers.table(name, 4, tc.SGD(lr=0.5)), [name]) for name in "ab")
    only = tc.Batch.from_lists([[[1, 2]]], names=("a",))
    for batch in tc.prefetch([only], tiers):
        a(batch).sum().backward()
        with pytest.raises(ValueError, match=r"the bag reads fields 'b', but the batch has 'a': 'b' missing"):
            b(batch)
    tiers.step()
    assert len(tiers["a"]) == 2
    assert len(tiers["b"]) == 0


# ---- modules of torch


def test_torch_modules_equal_those_of_torch() -> None:
    torch.manual_seed(0)
    tiers, sizes = tc.Tiers(mem="4MB"), (30, 20, 10)
    theirs = [torch.nn.EmbeddingBag(n, 4, mode="sum") for n in sizes]
    ours = [tc.nn.EmbeddingBag(tiers.table(f"t{n}", 4, tc.SGD(lr=0.1), rows=n), mode="sum") for n in sizes]
    for bag, other in zip(ours, theirs, strict=True):
        bag.table.load_rows(torch.arange(len(other.weight)), other.weight.detach())
    rows, dense = tc.RowOptimizer(tiers), torch.optim.SGD([other.weight for other in theirs], lr=0.1)
    for _ in range(5):
        inputs = [torch.randint(0, n, (7, 3)) for n in sizes]
        losses = [
            torch.cat([bag(i) for bag, i in zip(bags, inputs, strict=True)], 1).square().sum()
            for bags in (ours, theirs)
        ]
        for optimizer, loss in zip((rows, dense), losses, strict=True):
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-4)
    for bag, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(
            bag.table.read_rows(torch.arange(len(other.weight)))[0], other.weight.detach(), atol=1e-6
        )
    batch = ours[1].batch_of(torch.tensor([[1, 2]]))
    for ready in tc.prefetch([batch], tiers):
        (plan,) = (plan for plan in ready.prepared.values())
        assert [spec.fields for spec in plan.bags] == [("t20",)]


# ---- checkpoints and state_dict


class Net(torch.nn.Module):
    """Two tables of one dim, one of another."""

    def __init__(self, tiers: Any) -> None:
        super().__init__()
        self.tables = {f"t{i}": tiers.table(f"t{i}", dim, tc.Adagrad(lr=0.2)) for i, dim in enumerate((4, 4, 3))}
        self.bags = torch.nn.ModuleList(tc.EmbeddingBag(t, [f"f{i}"]) for i, t in enumerate(self.tables.values()))
        torch.manual_seed(0)
        self.top = torch.nn.Linear(11, 1)

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        return self.top(torch.cat([bag(batch).flatten(1) for bag in self.bags], 1)).squeeze(1)  # type: ignore[no-any-return]

    def rows(self) -> list[Any]:
        return [table.read(np.arange(IDS)).tolist() for table in self.tables.values()]


class Labelled:
    """Batches with labels and positions."""

    def __init__(self, count: int) -> None:
        self.count, self.first = count, 0

    def seek(self, position: Any) -> Labelled:
        self.first = position
        return self

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tc.Batch]:
        first, self.first = self.first, 0
        for i, batch in enumerate(batches(self.count)):
            if i >= first:
                batch.label, batch.position = torch.arange(EXAMPLES) % 2.0, i + 1
                yield batch


def loop(net: Net, tiers: Any, checkpoints: Any, steps: range) -> None:
    dense = torch.optim.SGD(net.top.parameters(), lr=0.1)
    for step, batch in zip(steps, tc.prefetch(batches(8)[steps.start :], tiers), strict=False):
        torch.nn.functional.binary_cross_entropy_with_logits(net(batch), torch.arange(EXAMPLES) % 2.0).backward()
        tiers.step(max_norm=1.0)
        dense.step()
        dense.zero_grad()
        if checkpoints is not None and step % 2 == 1:
            checkpoints.save(step + 1)


@pytest.mark.parametrize("ssd", [False, True])
def test_checkpoints_restore_all_tables(tmp_path: Path, ssd: bool) -> None:
    def world(folder: str) -> tuple[Any, Net]:
        more = {"ssd": tmp_path / folder, "table_options": {"ssd_options": SMALL}} if ssd else {}
        tiers = tc.Tiers(mem="4MB", **more)
        return tiers, Net(tiers)

    tiers, net = world("a")
    loop(net, tiers, None, range(8))
    wanted = net.rows()
    tiers, net = world("b")
    checkpoints = tc.Checkpoints(tmp_path / "run", tiers, net)
    loop(net, tiers, checkpoints, range(5))  # the fifth step is lost
    checkpoints.close()
    tiers.close()
    manifest = json.loads(sorted((tmp_path / "run/checkpoints").glob("*.json"))[-1].read_text())
    tables = (manifest.get("content") or manifest)["tables"]
    assert sorted(name for table in tables.values() for name in table["layout"]["tables"]) == ["t0", "t1", "t2"]
    tiers, net = world("b")
    checkpoints = tc.Checkpoints(tmp_path / "run", list(net.tables.values()), net)
    saved = checkpoints.restore()
    assert saved is not None
    loop(net, tiers, checkpoints, range(saved.step, 8))
    assert net.rows() == wanted
    checkpoints.close()
    tiers.close()
    tiers, net = world("b")
    with pytest.raises(tc.FormatError, match="is of tables"):
        tc.Checkpoints(tmp_path / "run", [net.tables["t0"]], net, read_only=True).restore()
    tiers.close()
    tiers, net = world("b")
    tiers.table("t9", 4, tc.Adagrad(lr=0.2))
    with pytest.raises(tc.FormatError, match=r"was saved with tables \{'t0': .* but this one has \{'t0': .*, 't9': "):
        tc.Checkpoints(tmp_path / "run", tiers, net, read_only=True).restore()
    tiers.close()


def test_trainer(tmp_path: Path) -> None:
    results = []
    for attempt in ("whole", "resumed"):
        tiers = tc.Tiers(mem="4MB")
        net = Net(tiers)
        dense = torch.optim.SGD(net.top.parameters(), lr=0.1)
        config = tc.TrainConfig(display=False, tensorboard=False, clip_norm=0.5, checkpoint_minutes=None, steps=3)
        if attempt == "resumed":
            tc.Trainer(net, dense, run_dir=tmp_path, config=config).fit(Labelled(6))
            tiers.close()
            tiers = tc.Tiers(mem="4MB")
            net = Net(tiers)
            dense = torch.optim.SGD(net.top.parameters(), lr=0.1)
        config = tc.TrainConfig(display=False, tensorboard=False, clip_norm=0.5, checkpoint_minutes=None)
        run_dir = tmp_path if attempt == "resumed" else None
        trainer = tc.Trainer(net, dense, run_dir=run_dir, config=config)
        trainer.fit(Labelled(6), resume=attempt == "resumed")
        assert [table.step_count for table in tiers.row_tables] == [6, 6]
        results.append((net.rows(), net.top.weight.tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("device", ON_GPU)
def test_recorded_steps(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    monkeypatch.setattr(GraphStep, "_on_device", lambda self: True)
    results = []
    for graphs in ("off", "on"):
        tiers = tc.Tiers(mem="4MB", hbm="1MB", table_options={"device": device})
        net = Net(tiers).to("cpu" if INTERPRETED else "cuda")
        dense = torch.optim.SGD(net.top.parameters(), lr=0.1)
        config = tc.TrainConfig(display=False, tensorboard=False, checkpoint_minutes=None, graphs=graphs)  # type: ignore[arg-type]
        trainer = tc.Trainer(net, dense, config=config)
        trainer.fit(Labelled(5))
        assert (trainer.graph_step.replays > 0) == (graphs == "on")
        results.append((net.rows(), net.top.weight.tolist()))
    assert results[0] == results[1]


def test_state_dict_has_the_rows_of_each_table() -> None:
    tiers = tc.Tiers(mem="4MB")
    net = Net(tiers)
    loop(net, tiers, None, range(4))
    plain = net.state_dict()
    state = tc.state_dict(net, rows=True)
    assert sorted(key for key in state if key.endswith("/keys")) == [f"tables/t{i}/keys" for i in range(3)]
    assert (state["tables/t1/keys"] < IDS).all()
    assert len(state["tables/t1/keys"]) == len(tiers["t1"])
    other_tiers = tc.Tiers(mem="4MB")
    other = Net(other_tiers)
    with pytest.raises(
        tc.FormatError, match=r"belongs to the rows of table 't0' at step 4, but the table is untrained"
    ):
        other.load_state_dict(plain)
    tc.load_state_dict(other, state)
    assert other.rows() == net.rows()
    assert other_tiers["t2"].step_count == 4
    for name, table in other.tables.items():  # into separate tables too
        separate = tc.Table(table.dim, tc.Adagrad(lr=0.2), name=name, mem="1MB")
        bag = tc.EmbeddingBag(separate, ["f"])
        own = {key: value for key, value in state.items() if key.startswith(f"tables/{name}/")}
        tc.load_state_dict(bag, own, strict=False)
        assert np.array_equal(separate.read(np.arange(IDS)), table.read(np.arange(IDS)))
    part = torch.nn.ModuleList([other.bags[0]])
    with pytest.raises(
        tc.FormatError, match=r"tables \['t0'\] are stored with \['t1'\], which the model does not read"
    ):
        tc.load_state_dict(part, {k: v for k, v in state.items() if "/t0/" in k}, strict=False)


def test_rows_are_loaded_read_and_exported_by_id(tmp_path: Path) -> None:
    tiers = tc.Tiers(mem="4MB")
    a, b = (tiers.table(name, 2, tc.Adagrad(lr=0.1)) for name in "ab")
    a.load_rows([1, 2], torch.tensor([[1.0, 2], [3, 4]]), torch.tensor([[5.0, 6], [7, 8]]))
    b.load_rows([2], torch.tensor([[9.0, 9.0]]))
    assert [part.tolist() for part in a.read_rows([2, 1])] == [[[3, 4], [1, 2]], [[7, 8], [5, 6]]]
    assert b.read_rows([2])[0].tolist() == [[9, 9]]
    assert (len(a), len(b)) == (2, 1)
    assert [sorted(keys.tolist()) for keys, _ in a.rows()] == [[1, 2]]
    tc.export_rows(a, tmp_path / "a", format="safetensors")
    index = json.loads((tmp_path / "a" / "index.json").read_text())
    assert (index["table"], index["rows"]) == ("a", 2)
    for call in (lambda t: t.read([1]), lambda t: t.load_rows([1], [[0, 0]]), lambda t: list(t.rows())):
        with pytest.raises(tc.ThermoclineError, match=r"stores the rows of tables \['a', 'b'\].*use tiers\['a'\]"):
            call(tiers.row_tables[0])


# ---- stores


def test_a_folder_is_reopened_with_its_tables(tmp_path: Path) -> None:
    def opened(*names: str, dim: int = 4, lr: float = 0.1, **more: Any) -> Any:
        tiers = tc.Tiers(mem="4MB", ssd=tmp_path / "rows", table_options={"ssd_options": SMALL})
        for name in names:
            tiers.table(name, dim, tc.SGD(lr=lr), **more)
        return tiers

    tiers = opened("a", "b")
    tiers["b"].load_rows([7], torch.tensor([[1.0, 2, 3, 4]]))
    tiers.commit()
    tiers.close()
    tiers = opened("c", "b", "d", "a", lr=0.5)  # another order, other tables, another rate
    assert tiers["b"].read_rows([7])[0].tolist() == [[1, 2, 3, 4]]
    assert tiers["a"].storage is tiers["b"].storage is tiers["d"].storage is not tiers["c"].storage
    tiers.close()
    with pytest.raises(tc.FormatError, match=r"table 'b' of .*rows has dim 4, but is declared with 3: declare it as"):
        opened("b", dim=3)
    with pytest.raises(tc.FormatError, match=r"table 'a' .* has a storage that it shares with others: declare it with"):
        opened("a", keys="hash")
    with pytest.raises(tc.FormatError, match=r"table 'a' .* has initial"):
        opened("a", initial=tc.Constant(value=1.0))
    tiers = opened("a")
    with pytest.raises(
        tc.FormatError, match=r"table 'b' has SGD\(lr=0.3.*is stored in .* with tables \['a'\], which have"
    ):
        tiers.table("b", 4, tc.SGD(lr=0.3))
    (tmp_path / "rows" / "tables.json").write_text("{")
    with pytest.raises(tc.FormatError, match=r"tables.json, the record of the tables of this folder, cannot be read"):
        opened("a")


def test_the_record_keeps_tables_that_another_object_has_added(tmp_path: Path) -> None:
    both = [tc.Tiers(mem="4MB", ssd=tmp_path / "rows", table_options={"ssd_options": SMALL}) for _ in range(2)]
    for tiers, name, dim in zip(both, "ab", (4, 8), strict=True):
        tiers.table(name, dim, tc.SGD(lr=0.1))
    for tiers in both:
        assert len(tiers.row_tables) == 1
        tiers.close()
    assert json.loads((tmp_path / "rows" / "tables.json").read_text())["tables"].keys() == {"a", "b"}


def test_a_store_of_a_single_table_is_refused(tmp_path: Path) -> None:
    tc.Table(4, tc.SGD(lr=0.1), name="a", ssd=tmp_path / "a", mem="1MB", ssd_options=SMALL).close()
    for folder in (tmp_path, tmp_path / "a"):
        with pytest.raises(tc.FormatError, match=r"is a store that tc\.Tiers did not make: its rows would not be read"):
            tc.Tiers(mem="1MB", ssd=folder).table("a", 4, tc.SGD(lr=0.1))


def test_keys_are_ids_with_the_documented_salt() -> None:
    tiers = tc.Tiers(mem="4MB")
    tables = {name: tiers.table(name, 16, tc.Adagrad(lr=0.1), seed=7) for name in ("user", "item")}
    assert tables["user"].storage.name == "shared.16.adagrad.0fec34d7"
    assert {name: hex(table.member.salt) for name, table in tables.items()} == {
        "user": "0x26a41e944d973723",
        "item": "0x8939295c310ad0cd",
    }
    tables["item"].load_rows([5], torch.ones(1, 16))
    ((keys, _),) = tables["item"].backend.rows(None, 10)
    assert keys.tolist() == [5 ^ tables["item"].member.salt]


def test_tables_with_equal_prefixes_are_stored_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thermocline.embedding.table_storages.salt_of", lambda seed, table, storage: table >> 16)
    tiers = tc.Tiers(mem="8MB")
    first, second = (tiers.table(name, 4, tc.SGD(lr=0.1)) for name in "ab")
    assert first.storage is not second.storage
    assert second.storage.name == f"{first.storage.name}.2"


def test_keys_of_a_table_that_is_not_declared_are_given_to_no_other(tmp_path: Path) -> None:
    first, second = "t77", "t120"  # the prefixes of their keys are equal
    for names in ([first], [second], [first, second]):
        tiers = tc.Tiers(mem="4MB", ssd=tmp_path / "rows", table_options={"ssd_options": SMALL})
        tables = {name: tiers.table(name, 4, tc.SGD(lr=0.1)) for name in names}
        if names == [first]:
            tables[first].load_rows([1, 2], torch.ones(2, 4))
            tiers.commit()
        assert {name: len(table) for name, table in tables.items()} == {n: 2 if n == first else 0 for n in names}
        assert len({table.storage.name for table in tables.values()}) == len(names)
        tiers.close()


def test_a_new_table_with_another_rate_is_declared_before_or_after_those_of_the_folder(tmp_path: Path) -> None:
    def opened(*declared: tuple[str, float]) -> None:
        tiers = tc.Tiers(mem="4MB", ssd=tmp_path / "rows", table_options={"ssd_options": SMALL})
        tables = [tiers.table(name, 4, tc.SGD(lr=rate)) for name, rate in declared]
        assert len({table.storage.name for table in tables}) == len(declared)
        tiers.close()

    opened(("a", 0.1))
    opened(("new", 0.3), ("a", 0.1))
    opened(("a", 0.1), ("third", 0.2), ("new", 0.3))


def test_tables_stored_together_cannot_be_published(tmp_path: Path) -> None:
    from thermocline.training.publish import publish_table

    tiers = tc.Tiers(mem="8MB")
    together = tiers.table("a", 4, tc.SGD(lr=0.1))
    alone = tiers.table("b", 4, tc.SGD(lr=0.1), keys="hash")
    alone.load_rows([1], torch.ones(1, 4))
    for table in (together, together.storage, alone):
        with pytest.raises(
            tc.ThermoclineError, match=r"is stored with other tables of tc\.Tiers, and cannot be published"
        ):
            publish_table(table, tmp_path / "versions", step=1)  # type: ignore[arg-type]
    assert publish_table(alone.storage, tmp_path / "versions", step=1).tables[0].name == "b"


def test_closing_one_table_leaves_the_others_open(tmp_path: Path) -> None:
    tiers = tc.Tiers(mem="4MB", ssd=tmp_path, table_options={"ssd_options": SMALL})
    a, b = (tiers.table(name, 4, tc.SGD(lr=0.1)) for name in "ab")
    for table in (a, b):
        table.load_rows([1], torch.ones(1, 4))
        assert len(table) == 1
        table.commit()
        table.close()
    with pytest.raises(tc.ThermoclineError):
        b.commit()


# ---- budgets and refusals


def test_budgets_are_divided_by_the_bytes_of_rows() -> None:
    tiers = tc.Tiers(mem="64MB")
    tiers.table("a", 16, tc.SGD(lr=0.1), rows=100_000)
    tiers.table("b", 16, tc.SGD(lr=0.1), rows=100_000)
    tiers.table("c", 16, tc.SGD(lr=0.2), rows=200_000)  # another rate: stored apart
    tiers.table("d", 2, tc.SGD(lr=0.1), rows=10)
    ab, c, d = tiers.row_tables
    assert ab.spec.mem == c.spec.mem
    assert 1 << 20 <= d.spec.mem < 2 << 20
    assert 63_900_000 < sum(table.spec.mem for table in (ab, c, d)) <= 64_000_000
    assert tiers["a"].storage is tiers["b"].storage is ab


def test_tables_that_cannot_share_are_stored_alone() -> None:
    tiers = tc.Tiers(mem="64MB")
    plain = tiers.table("plain", 4, tc.SGD(lr=0.1))
    alone = [
        tiers.table("hashed", 4, tc.SGD(lr=0.1), keys="hash"),
        tiers.table("learned", 4, tc.SGD(lr=0.1), precision=tc.Precision("int8", range=1.0, scale_lr=0.01)),
        tiers.table("expiring", 4, tc.SGD(lr=0.1), statistics=["last_step"], expiry=tc.Expiry(every=1, unused_steps=1)),
        tiers.table("admitting", 4, tc.SGD(lr=0.1), admission=tc.Admission(count=2, memory="1MB")),
    ]
    assert [table.storage.name for table in alone] == ["hashed", "learned", "expiring", "admitting"]
    assert alone[2].storage.expiry is not None
    assert alone[3].storage.admission is not None
    key = 2**64 - 5
    wanted = tc.Table(4, tc.SGD(lr=0.1), name="hashed", mem="1MB").read([key])
    assert np.array_equal(alone[0].read([key]), wanted)
    bag = tc.EmbeddingBag(alone[0], 1)
    bag(tc.Batch.from_lists([[key]])).sum().backward()
    assert alone[0].gradient_norm() == 2
    assert alone[0].step() is None  # it has a step of its own
    message = r"table 'plain' has id -5: ids .* are 0 to 2\^48 - 1\. For keys of 64 bits, .*tc\.Reader.* keys=\"hash\""
    with pytest.raises(IndexError, match=message):
        plain.read([key])


def test_ids_out_of_range_name_the_field() -> None:
    tiers = tc.Tiers(mem="4MB")
    bags = [tc.EmbeddingBag(tiers.table(name, 4, tc.SGD(lr=0.1)), [name]) for name in "ab"]
    assert bags[0](tc.Batch.from_lists([[2**48 - 1, 1]], names=("a", "b"))).shape == (1, 1, 4)
    for batch in (
        tc.Batch.from_lists([[1, 2**48], [1, 2]], names=("a", "b")),
        tc.Batch.from_lists([[[], [2, 2**48]]], names=("a", "b")),
    ):
        with pytest.raises(IndexError, match="field 'b' has id 281474976710656"):
            bags[0](batch)


def test_refusals() -> None:
    tiers = tc.Tiers(mem="4MB")
    with pytest.raises(tc.ThermoclineError, match=r"tc\.Tiers has no tables: declare them with tiers\.table"):
        tiers.step()
    a = tiers.table("a", 4, tc.SGD(lr=0.1))
    tiers.table("b", 4, tc.SGD(lr=0.1))
    with pytest.raises(ValueError, match="table 'a' is declared twice"):
        tiers.table("a", 8, tc.SGD(lr=0.1))
    for arguments, message in (
        (("x/y", 4, tc.SGD(lr=0.1)), "name is 'x/y'"),
        (("shared.x", 4, tc.SGD(lr=0.1)), "names that begin with 'shared.' are those of storages"),
        (("tables.json", 4, tc.SGD(lr=0.1)), "the folder of tc.Tiers has a file of this name"),
        (("x", 0, tc.SGD(lr=0.1)), "dim is 0: it must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            tiers.table(*arguments)
    with pytest.raises(ValueError, match=r"table_options has \['dim', 'admission'\]: pass these to tiers.table"):
        tc.Tiers(mem="4MB", table_options={"admission": tc.Admission(count=2), "dim": 8})
    with pytest.raises(TypeError, match=r"optimizer is 0\.1"):
        tiers.table("x", 4, 0.1)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="there is no table 'x': tables are"):
        tiers["x"]
    a.read([1])
    with pytest.raises(tc.ThermoclineError, match="table 'c': the budgets were divided at the first use"):
        tiers.table("c", 4, tc.SGD(lr=0.1))
    for method in ("step", "gradient_norm", "discard_gradients"):
        with pytest.raises(tc.ThermoclineError, match=rf"'a' is stored with tables \['b'\].*call tiers\.{method}\(\)"):
            getattr(a, method)()
    with pytest.raises(
        tc.ThermoclineError, match=r"tables \['a', 'b'\] are stored together and have one learning rate"
    ):
        a.lr = 0.5
    tiers.set_lr(0.5)
    assert a.lr == 0.5
    with pytest.raises(ValueError, match=r"mem is .*, but the machine has"):
        tc.Tiers(mem="999TB").table("a", 4, tc.SGD(lr=0.1)).read([1])
    with pytest.raises(TypeError, match="table 'a' cannot be copied or pickled"):
        __import__("copy").deepcopy(a)


def test_tiers_are_the_section_of_a_config() -> None:
    tiers = tc.Tiers(mem="1MB", device="cpu")
    assert tc.Config(tiers=tiers).tiers == schema.Tiers(mem="1MB", device="cpu") == tiers
    assert hash(tiers) == hash(schema.Tiers(mem="1MB", device="cpu"))
    assert tc.Config.parse(tc.Config(tiers=tiers).to_toml()).tiers == tiers
    again = pickle.loads(pickle.dumps(tiers))
    assert again == tiers
    assert again.table("a", 4, tc.SGD(lr=0.1)).read([1]).shape == (1, 4)
    with pytest.raises(tc.ConfigError, match=r'\[tiers\] has no key "memory"'):
        tc.Tiers(memory="1MB")
    with pytest.raises(AttributeError, match="cannot assign to field 'mem'"):
        tiers.mem = "2MB"  # type: ignore[misc]
