"""The MPI baseline trains what Thermocline trains: the same bits by one rank, the same sums by several.

Where several ranks may differ from the simulation: MPI chooses the order in which the dense gradients of more than two
ranks are added. Two have only one order.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import thermocline as tc
from baselines.mpi_ps import launch
from baselines.mpi_ps.share import check, open_share
from thermocline.batch import Batch
from thermocline.embedding.initializers import Normal
from thermocline.models import build, row_dim
from thermocline.training.run import Run, dense_optimizers, row_optimizer

reason = launch.missing()
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no MPI here: {reason}")

SYNTH = """
[data]
format = "synth"
[data.synth]
keys = 5000
fields = 6
nonzeros = 9
dense = 2
examples = 1510
valid_examples = 0
test_examples = 2000
[model]
name = "deepfm"
dim = 8
hidden = [16]
dropout = 0.0
embedding_l2 = 1e-4
[tiers]
mem = "32MB"
[train]
batch_size = 300
epochs = 2
torch_threads = 1
lr = 0.01
log_every = 4
"""
FILES = """
[data]
train = ["train.parquet"]
test = ["test.parquet"]
label = "click"
numeric = ["price"]
[model]
name = "dnn"
dim = 4
hidden = [8]
dropout = 0.0
batch_norm = false
[train]
batch_size = 64
steps = 50
epochs = 9
optimizer = "rowwise_adagrad"
torch_threads = 1
"""
Rows = dict[int, bytes]


def config_of(folder: Path, name: str, text: str, **sets: Any) -> tc.Config:
    config = tc.Config.parse(text, [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in sets.items()])
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, run_dir=str(folder / f"{name}-run")))
    (folder / f"{name}.toml").write_text(config.to_toml())
    return config.resolve()


def run_ranks(ranks: int, *configs: Path, seconds: float = 800) -> subprocess.CompletedProcess[str]:
    command = launch.command(ranks, [str(Path(__file__).with_name("ranks.py")), *map(str, configs)])
    where = {"cwd": configs[0].parent, "env": launch.environment()}
    return subprocess.run(command, **where, capture_output=True, text=True, timeout=seconds)  # type: ignore[call-overload]


def trained(config: Path, ranks: int) -> tuple[Rows, np.ndarray[Any, Any], dict[str, Any]]:
    """All ranks' rows together, the dense weights, which are the same on all, and the test's figures."""
    rows: Rows = {}
    dense = []
    for rank in range(ranks):
        saved = np.load(config.with_suffix(f".{rank}.npz"))
        owned = dict(zip(saved["keys"].tolist(), (row.tobytes() for row in saved["rows"]), strict=True))
        assert not rows.keys() & owned.keys()  # a key has one owner
        assert len(owned) > 0
        rows |= owned
        dense.append(saved["dense"])
    assert all((other == dense[0]).all() for other in dense)
    return rows, dense[0], json.loads(config.with_suffix(".json").read_text())


def rows_of(table: tc.Table) -> Rows:
    return {
        key: row.tobytes() for keys, rows in table.rows() for key, row in zip(keys.tolist(), rows.copy(), strict=True)
    }


def dense_of(model: torch.nn.Module) -> np.ndarray[Any, Any]:
    return np.concatenate([p.detach().numpy().reshape(-1) for p in model.parameters()])


# ---- all ranks in one process


def steps_of(config: tc.Config, ranks: int) -> Iterator[list[Batch | None]]:
    """What each rank trains on, step by step."""
    train: list[Any] = [open_share(config, "train", rank, ranks, None) for rank in range(ranks)]
    left = config.train.steps or 10**9
    for epoch in range(config.train.epochs):
        for share in train:
            if hasattr(share, "set_epoch"):
                share.set_epoch(epoch)
        batches = [list(share) for share in train]
        for i in range(max(map(len, batches))):
            if left == 0:
                return
            left -= 1
            yield [own[i] if i < len(own) else None for own in batches]


def simulate(config: tc.Config, ranks: int) -> tuple[Rows, np.ndarray[Any, Any]]:
    """The same training with one table: a gradient per rank and key, added in rank order, applied once."""
    torch.set_num_threads(1)
    torch.manual_seed(config.train.seed)
    start = Normal(scale=config.model.initial)
    table = tc.Table(row_dim(config.model), row_optimizer(config), mem="64MB", initial=start)
    first: Any = open_share(config, "train", 0, 1, None)
    model = build(config.model, table, first.fields, first.dense)
    optimizers = dense_optimizers(config, model)
    for step, shares in enumerate(steps_of(config, ranks), 1):
        total = sum(0 if batch is None else batch.examples for batch in shares)
        sums: dict[int, Any] = {}
        dense: list[Any] = []
        for batch in shares:
            if batch is None:
                continue
            weight = np.float32(batch.examples * ranks / total)
            logits = model(batch)
            label = torch.as_tensor(batch.label, dtype=torch.float32)
            torch.nn.functional.binary_cross_entropy_with_logits(logits, label).backward()
            keys = batch.prepared[table].working_set.keys.tolist()
            table.reduce_gradients()
            grads = table._reduced.values.numpy()
            for key, grad in zip(keys, grads, strict=True):
                grad = grad if weight == 1 else grad * weight
                sums[key] = sums[key] + grad if key in sums else grad
            table.discard_gradients()
            own = [parameter.grad for parameter in model.parameters()]
            own = own if weight == 1 else [grad * float(weight) for grad in own]  # type: ignore[operator]
            dense = [a + b for a, b in zip(dense, own, strict=True)] if dense else own
            model.zero_grad()
        pins = table.dram.pin(np.array(list(sums), np.uint64))
        table.dram.core.mark_dirty(pins.slots())
        table.dram.apply_gradients(pins.slots(), np.stack(list(sums.values())), step=step, scale=1 / ranks)
        pins.release()
        for parameter, grad in zip(model.parameters(), dense, strict=True):
            parameter.grad = grad * (1 / ranks)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    return rows_of(table), dense_of(model)


def apart(one: Rows, other: Rows) -> float:
    a, b = (np.frombuffer(b"".join(rows[key] for key in one), np.float32) for rows in (one, other))
    return float(np.abs(a - b).max())


# ---- tests


def write_parquet(folder: Path) -> None:
    """Five row groups of training data, dealt out to ranks: some have more than others."""
    rng = np.random.default_rng(3)
    for name, lines in (("train", 2500), ("test", 400)):
        user, ad, price = (rng.integers(0, high, lines) for high in (200, 40, 1000))
        click = (user < 5 * ad).astype(np.float32)
        columns = {"click": click, "user": user, "ad": ad, "price": price / 7}
        pq.write_table(pa.table(columns), folder / f"{name}.parquet", row_group_size=500)


@pytest.mark.timeout(900)
def test_one_rank_gives_the_bits_of_thermocline(tmp_path: Path) -> None:
    names = {"adam": {"train__optimizer": "adam"}, "drop": {"train__optimizer": "adagrad", "model__dropout": 0.2}}
    configs = {name: config_of(tmp_path, name, SYNTH, **sets) for name, sets in names.items()}
    paths = [tmp_path / f"{name}.toml" for name in configs]
    assert run_ranks(1, *paths).stderr == ""
    for path, config in zip(paths, configs.values(), strict=True):
        rows, dense, test = trained(path, 1)
        train = dataclasses.replace(config.train, run_dir=str(path.with_suffix("")), display=False, tensorboard=False)
        with Run(dataclasses.replace(config, train=train)) as run:
            result = run.fit()
            assert rows == rows_of(run.table)
            assert dense.tobytes() == dense_of(run.model).tobytes()
            assert result.test is not None
            assert test["auc"] == result.test["auc"]
            assert test["logloss"] == pytest.approx(result.test["logloss"], rel=1e-12)  # scores are added in batches


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 4])
def test_several_ranks_equal_a_simulation_in_one_process(
    tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_parquet(tmp_path)
    configs = {
        "adam": config_of(tmp_path, "adam", SYNTH, train__depth=1, model__batch_norm=False),
        "files": config_of(tmp_path, "files", FILES),
        "sparse": config_of(tmp_path, "sparse", SYNTH, train__optimizer="adagrad", train__dense_lr=0.0),
    }
    paths = [tmp_path / f"{name}.toml" for name in configs]
    done = run_ranks(ranks, *paths)
    assert done.returncode == 0, done.stderr
    for path, (name, config) in zip(paths, configs.items(), strict=True):
        rows, dense, _ = trained(path, ranks)
        expected, weights = simulate(config, ranks)
        assert rows.keys() == expected.keys()
        if ranks == 2 or name == "sparse":
            assert rows == expected
            assert dense.tobytes() == weights.tobytes()
        else:
            assert apart(rows, expected) < 1e-4
            np.testing.assert_allclose(dense, weights, atol=1e-4)


@pytest.mark.timeout(900)
def test_auc_is_that_of_thermocline(tmp_path: Path) -> None:
    sets = {"data__synth__examples": 30_000, "train__epochs": 1, "train__optimizer": "adagrad"}
    sets |= {"model__batch_norm": False}  # a rank's statistics would be those of its own examples
    config = config_of(tmp_path, "auc", SYNTH, **sets)
    command = launch.command(2, ["-m", "baselines.mpi_ps", "auc.toml", "--set", "train.lr=0.05"])
    done = subprocess.run(command, cwd=tmp_path, env=launch.environment(), capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    lines = (Path(config.train.run_dir) / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [e["step"] for e in events] == [*range(4, 101, 4), 100]
    assert json.loads(done.stdout.splitlines()[-1]) == events[-1]
    assert events[-1]["examples_per_s"] > 0
    train = dataclasses.replace(config.train, run_dir=str(tmp_path / "ours"), lr=0.05, dense_lr=0.05, display=False)
    with Run(dataclasses.replace(config, train=train)) as run:
        test = run.fit().test
    assert test is not None
    assert test["auc"] > 0.6  # something was learned
    assert abs(test["auc"] - events[-1]["auc"]) < 0.0005
    ours = [json.loads(line) for line in (tmp_path / "ours" / "metrics.jsonl").read_text().splitlines()]
    for mine, theirs in zip(ours, events, strict=True):
        assert mine["event"] == theirs["event"]
        if mine["event"] == "train":
            assert theirs["loss"] == pytest.approx(mine["loss"], abs=1e-3)
            assert theirs["auc"] == pytest.approx(mine["auc"], abs=1e-3)


@pytest.mark.timeout(900)
def test_an_error_of_any_rank_ends_all_with_its_message(tmp_path: Path) -> None:
    config_of(tmp_path, "small", SYNTH, tiers__mem="100KB", data__synth__keys=50_000)
    done = run_ranks(2, tmp_path / "small.toml")
    assert done.returncode != 0
    assert "BudgetError" in done.stderr


def test_what_it_does_not_do_is_refused(tmp_path: Path) -> None:
    check(config_of(tmp_path, "plain", SYNTH), 300)
    for key, value in {"clip_norm": 1.0, "accumulate": 2, "patience": 3, "plateau_factor": 0.5}.items():
        with pytest.raises(tc.ConfigError, match=f"train.{key} is {value}: the MPI baseline"):
            check(config_of(tmp_path, "wrong", SYNTH, **{f"train__{key}": value}), 1)
    with pytest.raises(tc.ConfigError, match=r"precision\.kind is int8: the MPI baseline"):
        check(config_of(tmp_path, "coded", SYNTH, precision__kind="int8"), 1)
    with pytest.raises(tc.ConfigError, match=r"train\.batch_size is 300: 301 ranks need at least one example each"):
        check(config_of(tmp_path, "many", SYNTH), 301)


@pytest.mark.parametrize("ranks", [1, 3, 9])
def test_pieces_make_up_the_mini_batches(tmp_path: Path, ranks: int) -> None:
    config = config_of(tmp_path, "pieces", SYNTH, data__synth__examples=652, train__batch_size=10)  # the last has 2
    whole: Any = open_share(config, "train", 0, 1, None)
    shares: list[Any] = [list(open_share(config, "train", rank, ranks, None) or ()) for rank in range(ranks)]
    for number, batch in enumerate(whole):
        pieces = [share[number] for share in shares if number < len(share)]
        assert max(p.examples for p in pieces) - min(p.examples for p in pieces) <= 1
        assert (np.concatenate([piece.ids for piece in pieces]) == batch.ids).all()
        assert (torch.cat([piece.label for piece in pieces]) == batch.label).all()
