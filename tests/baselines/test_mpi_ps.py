"""The MPI baseline against Thermocline: one rank gives its bits, several ranks those of a simulation in one process.

MPI chooses the order in which dense gradients of more than two ranks are added: these results may differ in rounding.
"""

from __future__ import annotations

import dataclasses
import itertools
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
from baselines.mpi_ps.input_shard import RepeatedBatches, check_config, open_shard
from thermocline.batch import Batch
from thermocline.embedding.initializers import Normal
from thermocline.models import build, row_dim
from thermocline.training.run import Run, dense_optimizers, row_optimizer

reason = launch.missing()
pytestmark = pytest.mark.skipif(reason is not None, reason=f"MPI is not available: {reason}")

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
    """(rows of all ranks, dense weights, figures of the test); the dense weights must be equal on all ranks."""
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
    """Batches of each rank, step by step."""
    train: list[Any] = [open_shard(config, "train", rank, ranks, None) for rank in range(ranks)]
    left = config.train.steps or 10**9
    for epoch in range(config.train.epochs):
        for shard in train:
            if hasattr(shard, "set_epoch"):
                shard.set_epoch(epoch)
        batches = [list(shard) for shard in train]
        for i in range(max(map(len, batches))):
            if left == 0:
                return
            left -= 1
            yield [of_rank[i] if i < len(of_rank) else None for of_rank in batches]


def simulate(config: tc.Config, ranks: int) -> tuple[Rows, np.ndarray[Any, Any]]:
    """Train with one table: the gradients per rank and key are added in rank order and applied once."""
    torch.set_num_threads(1)
    torch.manual_seed(config.train.seed)
    start = Normal(scale=config.model.initial)
    table = tc.Table(row_dim(config.model), row_optimizer(config), mem="64MB", initial=start)
    first: Any = open_shard(config, "train", 0, 1, None)
    model = build(config.model, table, first.fields, first.dense)
    optimizers = dense_optimizers(config, model)
    for step, batches in enumerate(steps_of(config, ranks), 1):
        total = sum(0 if batch is None else batch.examples for batch in batches)
        sums: dict[int, Any] = {}
        dense: list[Any] = []
        for batch in batches:
            if batch is None:
                continue
            weight = np.float32(batch.examples * ranks / total)
            logits = model(batch)
            label = torch.as_tensor(batch.label, dtype=torch.float32)
            torch.nn.functional.binary_cross_entropy_with_logits(logits, label).backward()
            keys = batch.prepared["forward", table]().working_set.keys.tolist()
            table.reduce_gradients()
            grads = table._reduced.values.numpy()
            for key, grad in zip(keys, grads, strict=True):
                grad = grad if weight == 1 else grad * weight
                sums[key] = sums[key] + grad if key in sums else grad
            table.discard_gradients()
            rank_grads = [parameter.grad for parameter in model.parameters()]
            rank_grads = rank_grads if weight == 1 else [grad * float(weight) for grad in rank_grads]  # type: ignore[operator]
            dense = [a + b for a, b in zip(dense, rank_grads, strict=True)] if dense else rank_grads
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


def max_difference(one: Rows, other: Rows) -> float:
    a, b = (np.frombuffer(b"".join(rows[key] for key in one), np.float32) for rows in (one, other))
    return float(np.abs(a - b).max())


# ---- tests


def write_parquet(folder: Path) -> None:
    """Five row groups of training data: some ranks get more than others."""
    rng = np.random.default_rng(3)
    for name, lines in (("train", 2500), ("test", 400)):
        user, ad, price = (rng.integers(0, high, lines) for high in (200, 40, 1000))
        click = (user < 5 * ad).astype(np.float32)
        columns = {"click": click, "user": user, "ad": ad, "price": price / 7}
        pq.write_table(pa.table(columns), folder / f"{name}.parquet", row_group_size=500)


@pytest.mark.timeout(900)
def test_prepared_batches_train_the_same_bits_with_a_row_for_every_key(tmp_path: Path) -> None:
    names = ("plain", "prepared")
    for name in names:
        config = config_of(tmp_path, name, SYNTH, train__steps=3, train__epochs=1)
    result = run_ranks(2, *(tmp_path / f"{name}.toml" for name in names))
    assert result.returncode == 0, result.stderr
    (plain, dense, _), (rows, same_dense, _) = (trained(tmp_path / f"{name}.toml", 2) for name in names)
    ads = tc.SyntheticAds(keys=config.data.synth.keys, fields=config.data.synth.fields)
    assert set(rows) == set(ads.some_keys(0, sum(ads.keys)).tolist()) > set(plain)
    assert {key: rows[key] for key in plain} == plain
    assert (dense == same_dense).all()


def test_batches_in_memory_are_repeated_as_copies() -> None:
    ads = tc.SyntheticAds(keys=1000, fields=2, batch_size=4)
    first, second = ads.batch(0), ads.batch(1)
    repeated = list(itertools.islice(RepeatedBatches([first, second]), 5))
    assert [batch.ids is first.ids for batch in repeated] == [True, False, True, False, True]
    repeated[0].prepared["plan"] = 1
    assert repeated[2].prepared == first.prepared == {}


@pytest.mark.timeout(900)
def test_one_rank_is_bit_identical_to_thermocline(tmp_path: Path) -> None:
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
            assert test["logloss"] == pytest.approx(result.test["logloss"], rel=1e-12)  # summed in batches


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 4])
def test_several_ranks_equal_a_simulation_in_one_process(
    tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two ranks, a last config fails in training: the error of a rank ends all ranks with its message.

    It shares the start of the ranks, which takes longer than the trainings.
    """
    monkeypatch.chdir(tmp_path)
    write_parquet(tmp_path)
    configs = {
        "adam": config_of(tmp_path, "adam", SYNTH, train__depth=1, model__batch_norm=False),
        "files": config_of(tmp_path, "files", FILES),
        "sparse": config_of(tmp_path, "sparse", SYNTH, train__optimizer="adagrad", train__dense_lr=0.0),
    }
    paths = [tmp_path / f"{name}.toml" for name in configs]
    if ranks == 2:
        config_of(tmp_path, "failing", SYNTH, tiers__mem="100KB", data__synth__keys=50_000)
        done = run_ranks(ranks, *paths, tmp_path / "failing.toml")
        assert done.returncode != 0
        assert "BudgetError" in done.stderr
        assert not list(tmp_path.glob("failing*.npz"))
    else:
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
            assert max_difference(rows, expected) < 1e-4
            np.testing.assert_allclose(dense, weights, atol=1e-4)


@pytest.mark.timeout(900)
def test_auc_equals_thermocline(tmp_path: Path) -> None:
    sets = {"data__synth__examples": 30_000, "train__epochs": 1, "train__optimizer": "adagrad"}
    sets |= {"model__batch_norm": False}  # batch norm statistics are per rank
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
    assert test["auc"] > 0.6  # the model has learned
    assert abs(test["auc"] - events[-1]["auc"]) < 0.0005
    ours = [json.loads(line) for line in (tmp_path / "ours" / "metrics.jsonl").read_text().splitlines()]
    for expected, event in zip(ours, events, strict=True):
        assert event["event"] == expected["event"]
        if event["event"] == "train":
            assert event["loss"] == pytest.approx(expected["loss"], abs=1e-3)
            assert event["auc"] == pytest.approx(expected["auc"], abs=1e-3)


def test_unsupported_settings_are_refused(tmp_path: Path) -> None:
    check_config(config_of(tmp_path, "plain", SYNTH), 300)
    for key, value in {"clip_norm": 1.0, "accumulate": 2, "patience": 3, "plateau_factor": 0.5}.items():
        with pytest.raises(tc.ConfigError, match=f"train.{key} is {value}: the MPI baseline does not support it"):
            check_config(config_of(tmp_path, "wrong", SYNTH, **{f"train__{key}": value}), 1)
    with pytest.raises(tc.ConfigError, match=r"precision\.kind is int8: the MPI baseline"):
        check_config(config_of(tmp_path, "coded", SYNTH, precision__kind="int8"), 1)
    with pytest.raises(tc.ConfigError, match=r"train\.batch_size is 300: 301 ranks need at least one example each"):
        check_config(config_of(tmp_path, "many", SYNTH), 301)


@pytest.mark.parametrize("ranks", [1, 3, 9])
def test_parts_of_all_ranks_are_the_mini_batch(tmp_path: Path, ranks: int) -> None:
    config = config_of(tmp_path, "parts", SYNTH, data__synth__examples=652, train__batch_size=10)  # the last has 2
    whole: Any = open_shard(config, "train", 0, 1, None)
    shards: list[Any] = [list(open_shard(config, "train", rank, ranks, None) or ()) for rank in range(ranks)]
    for number, batch in enumerate(whole):
        parts = [shard[number] for shard in shards if number < len(shard)]
        assert max(p.examples for p in parts) - min(p.examples for p in parts) <= 1
        assert (np.concatenate([part.ids for part in parts]) == batch.ids).all()
        assert (torch.cat([part.label for part in parts]) == batch.label).all()


def test_mpirun_is_found_beside_packages_in_a_folder_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mpi4py/__init__.py", "bin/mpirun"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch(0o755)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(launch.sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delitem(launch.sys.modules, "mpi4py", raising=False)
    assert launch.missing() is None
    assert launch.command(2, ["job"])[0] == str(tmp_path / "bin/mpirun")
    monkeypatch.delenv("HOME", raising=False)
    assert Path(launch.environment()["HOME"]).is_dir()
