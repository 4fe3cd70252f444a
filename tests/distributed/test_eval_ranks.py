"""`eval` and `predict` over ranks give the results of one process, for runs trained by any number of ranks."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.cli import SMALL, done, invoke, write_config
from helpers.rank_training import PAIR
from helpers.ranks import Nodes, run_ranks

import thermocline as tc
from thermocline.distributed.communicator import Groups
from thermocline.distributed.key_sharding import overlapping_ranks, owner_of
from thermocline.distributed.shard_reader import ShardReaderTable
from thermocline.embedding.key_hash import hash_keys
from thermocline.training import prediction_writer
from thermocline.training.run_dir import config_of

THREE: Nodes = ((0, 1), (2,))
FIGURES = ("auc", "logloss", "ne", "calibration")
pytestmark = pytest.mark.usefixtures("command_folder")


def commands(groups: Groups, folder: str, lines: list[list[Any]]) -> list[tuple[int, str, str]]:
    """Run commands on this rank, as torchrun would; return exit code, stdout and stderr of each."""
    os.chdir(folder)
    os.environ |= {"RANK": str(groups.topology.rank), "WORLD_SIZE": str(groups.topology.world)}
    results = [invoke(*line) for line in lines]
    return [(result.exit_code, result.stdout, result.stderr) for result in results]


def over_ranks(nodes: Nodes, *lines: list[Any]) -> list[str]:
    """Run commands on all ranks; return rank 0's output. The others print nothing."""
    results = run_ranks(nodes, commands, os.getcwd(), list(lines))
    for rank, outputs in enumerate(results):
        for code, out, error in outputs:
            assert code == 0, error
            assert not rank or not out
    return [out for _, out, _ in results[0]]


@pytest.fixture(scope="module")
def trained_by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with small.toml and a run of two ranks, with an SSD store in the run's folder."""
    folder = tmp_path_factory.mktemp("two")
    write_config(folder, SMALL.replace("[tiers]", '[tiers]\nssd = "run/store"'))
    sets = ["--set", "train.display=false", "--set", "train.progressive_steps=2"]
    results = run_ranks(PAIR, commands, str(folder), [["train", "small.toml", *sets]])
    assert [output[0][0] for output in results] == [0, 0], results
    return folder


def test_progressive_validation_has_the_examples_of_all_ranks(trained_by_two: Path) -> None:
    size = config_of(trained_by_two / "run").train.batch_size
    rows = [json.loads(line) for line in (trained_by_two / "run" / "metrics.jsonl").read_text().splitlines()]
    windows = [row for row in rows if row["event"] == "progressive"]
    assert [(row["first_step"], row["step"]) for row in windows[:2]] == [(1, 2), (3, 4)]
    assert windows[0]["examples"] == 2 * 2 * size


def test_the_topology_of_the_training_ranks_is_not_read(trained_by_two: Path, tmp_path: Path) -> None:
    """It is a file of their machines. The ranks that evaluate may be others."""
    run = Path(shutil.copytree(trained_by_two / "run", tmp_path / "run"))
    config = run / "config.toml"
    config.write_text(config.read_text().replace("[dist]\n", '[dist]\ntopology = "/dev/zero"\n'))
    assert config_of(run).dist.topology is None
    assert config_of(run, ["dist.topology=mine.toml"]).dist.topology == "mine.toml"


def test_rows_of_an_earlier_attempt_to_restore_are_dropped(tmp_path: Path) -> None:
    """A checkpoint that was replaced while it was read is followed by another one, which may lack expired rows."""
    table = ShardReaderTable(1, tc.SGD(lr=0.1), mem="1MB", initial=tc.Constant(value=0.0))
    for name, keys in (("first", [1, 2]), ("second", [2])):
        with table.open_store(tmp_path / name, create=True) as store:
            store.put(np.array(keys, np.uint64), np.full((len(keys), 1), 5, np.float32).view(np.uint8))
            store.commit(table.commit_note(b""))
    for name, expected in (("first", [5, 5]), ("second", [0, 5])):
        table.open_stores([(tmp_path / name, 1)])
        assert table.read(np.array([1, 2], np.uint64)).ravel().tolist() == expected
    table.close()


@pytest.mark.parametrize("ssd", [True, False])
def test_all_rows_have_the_learned_scale(tmp_path: Path, ssd: bool) -> None:
    options: Any = {"mem": "8MB", "precision": tc.Precision(kind="int8", range=1.0, scale_lr=0.01)}
    trained = tc.Table(2, tc.SGD(lr=0.5), ssd=tmp_path / "0", **options)
    bag, batch = tc.EmbeddingBag(trained, 1), tc.Batch(np.arange(50, dtype=np.uint64), np.arange(51), 1)
    for _ in range(10):
        (bag(batch) - 2).square().sum().backward()
        trained.step()
    trained.commit()
    trained.close()
    table = ShardReaderTable(2, tc.SGD(lr=0.5), ssd=tmp_path if ssd else None, **options)
    table.open_stores([(tmp_path / "0", 1)])
    ((keys, rows),) = table.rows()
    assert table.backend.learned_scale is not None
    assert table.backend.learned_scale.scale > 1.1 / 128  # above the initial one
    assert rows.tobytes() == table.read(keys).tobytes()
    table.close()


def test_stores_of_several_ranks_are_read_ahead(tmp_path: Path) -> None:
    options: Any = {"mem": "8MB", "lookahead": 4, "initial": tc.Constant(value=-1.0)}
    table = ShardReaderTable(1, tc.SGD(lr=0.1), ssd=tmp_path, **options)
    keys = np.arange(1, 3000, dtype=np.uint64)
    for rank in range(3):
        with table.open_store(tmp_path / str(rank), create=True) as store:
            own = keys[owner_of(keys, 3) == rank]
            store.put(own, own.astype(np.float32)[:, None].view(np.uint8))
            store.commit(table.commit_note(b""))
    table.open_stores([(tmp_path / str(rank), 1) for rank in range(3)])
    bag = tc.EmbeddingBag(table, 1).eval()
    rng = np.random.default_rng(1)
    data = [tc.Batch(rng.integers(1, 4000, 100, np.uint64), np.arange(101), 1) for _ in range(20)]
    with torch.no_grad(), tc.prefetch(data, table, training=False) as prepared:
        for batch, plain in zip(prepared, data, strict=True):
            expected = np.where(plain.ids < 3000, plain.ids.astype(np.float32), -1)
            assert bag(batch).numpy().ravel().tolist() == expected.tolist()
    ahead = prepared.lookahead
    assert ahead is not None
    assert ahead.collected == ahead.consumed == 20
    assert ahead.rows_loaded > 1000
    table.close()


@pytest.mark.parametrize("trained_by", ["one process", "two ranks"])
def test_generated_data_gives_the_same_bits(trained_by: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Every rank has whole batches of the single process, so scores and AUC are equal; sums have another order."""
    nodes = PAIR
    if trained_by == "one process":
        write_config(tmp_path)
        done("train", "small.toml")
    else:
        nodes = THREE
        shutil.copytree(request.getfixturevalue("trained_by_two"), tmp_path, dirs_exist_ok=True)
    expected = json.loads(done("eval", "run", "--json"))
    done("predict", "run", "--out", "one.npy")
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    ahead = ["--set", "tiers.lookahead=2"]
    report, text = over_ranks(
        nodes, ["eval", "run", "--json", *ahead], ["predict", "run", "--out", "out/many.csv", *ahead]
    )
    found = json.loads(report)
    assert found["auc"] == expected["auc"]
    assert [found[name] for name in FIGURES] == pytest.approx([expected[name] for name in FIGURES], rel=1e-12)
    assert (found["examples"], found["step"]) == (400, expected["step"])
    assert text == f"400 scores of step {expected['step']} in out/many.csv\n"
    scores = np.loadtxt("out/many.csv", np.float32, skiprows=1)
    assert scores.tobytes() == np.load("one.npy").tobytes()
    assert {path.name for path in Path("out").iterdir()} == {"many.csv"}
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


def test_files_are_scored_in_order(tmp_path: Path) -> None:
    """Batches have other examples than in one process: figures are equal up to the rounding of float32."""
    sizes = ["--keys", 3000, "--fields", 4, "--examples", 800, "--valid-examples", 0, "--test-examples", 370]
    section = done("data", "synth", "data", "--format", "libsvm", *sizes)
    write_config(tmp_path, f"{section}\n[model]{SMALL.split('[model]')[1]}")
    done("train", "small.toml")
    lines = Path("data/test.libsvm").read_text().splitlines(keepends=True)
    for part in range(5):
        Path(f"part-{part}.libsvm").write_text("".join(lines[74 * part : 74 * part + 74]))
    with gzip.open("part-1.libsvm.gz", "wt") as file:
        file.write(Path("part-1.libsvm").read_text())
    files = ["part-0.libsvm", "part-1.libsvm.gz", *(f"part-{part}.libsvm" for part in range(2, 5))]
    Path("bad.libsvm").write_text("malformed\n" + "".join(lines[:3]))
    done("predict", "run", *files, "--out", "one.npy")
    expected = json.loads(done("eval", "run", *files, "--json"))
    report, _, skipped, few, one_block = over_ranks(
        THREE,
        ["eval", "run", *files, "--json"],
        ["predict", "run", *files, "--out", "many.npy"],
        ["eval", "run", *files, "bad.libsvm", "--json", "--set", "data.on_error=skip"],
        ["predict", "run", "part-1.libsvm.gz", "--out", "few.npy"],
        ["eval", "run", "part-0.libsvm", "--json"],
    )
    scores = np.load("one.npy")
    assert np.load("many.npy").shape == (370,)
    assert np.load("many.npy") == pytest.approx(scores, abs=1e-6)
    assert "74 scores" in few  # one compressed file: two ranks have nothing to read
    assert np.load("few.npy") == pytest.approx(scores[74:148], abs=1e-6)
    assert json.loads(one_block)["examples"] == 74  # too small for a part per rank: rank 0 reads it
    found = json.loads(report)
    assert [found[name] for name in FIGURES] == pytest.approx([expected[name] for name in FIGURES], abs=1e-6)
    assert found["examples"] == 370
    assert "1 malformed line was skipped; the first: bad.libsvm, line 1" in json.loads(skipped)["skipped"]


# ---- errors


def hidden_folder(groups: Groups, folder: str) -> str:
    os.chdir(folder)
    if groups.topology.rank == 1:
        prediction_writer.Path.is_dir = lambda self: False  # type: ignore[method-assign]
    return commands(groups, folder, [["predict", "run", "--out", "out/scores.npy"]])[0][2]


def test_missing_folders_are_named(trained_by_two: Path, tmp_path: Path) -> None:
    """The folder of --out on another machine; the store of a rank that trained."""
    shutil.copytree(trained_by_two, tmp_path, dirs_exist_ok=True)
    errors = run_ranks(PAIR, hidden_folder, str(tmp_path))
    assert "but rank 1 on host" in errors[1]
    assert "choose a folder on a file system that all ranks share" in errors[1]
    assert errors[0].startswith("thermocline: rank 1 failed while opening the folder of --out: ConfigError: --out is")
    assert not list(Path("out").iterdir())
    Path("run/store/rank-00001-of-00002").rename("run/store/elsewhere")
    alone = invoke("eval", "run")
    assert alone.exit_code == 1
    host = os.uname().nodename
    missing = f"store/rank-00001-of-00002, written by rank 1 of 2 on host {host}, but"
    assert f"{missing} this process on host {host} has no store there" in alone.stderr
    results = run_ranks(((0, 1, 2),), commands, str(tmp_path), [["train", "small.toml", "--resume"]])
    errors = [outputs[0][2] for outputs in results]
    assert [outputs[0][0] for outputs in results] == [1, 1, 1]
    # Rank 0 needs the store of rank 0 only.
    assert "rank 1 failed while checking the checkpoint: NotFoundError" in errors[0]
    for rank in (1, 2):
        assert f"{missing} rank {rank} of 3 on host {host}" in errors[rank]


def select_different_checkpoints(groups: Groups, folder: str) -> list[str]:
    rank = groups.topology.rank
    lines = [
        ["eval", "run", "--checkpoint", ("last", "best")[rank]],
        ["eval", "run", *([], ["--checkpoint", "9"])[rank]],
    ]
    return [error for _, _, error in commands(groups, folder, lines)]


def test_ranks_with_different_checkpoints_are_named(trained_by_two: Path) -> None:
    fix = "select the same checkpoint on all ranks\n"
    for tags, step in run_ranks(PAIR, select_different_checkpoints, str(trained_by_two)):
        assert tags == f'thermocline: --checkpoint is "last" on rank 0 and "best" on rank 1: {fix}'
        assert step == f"thermocline: --checkpoint is none on rank 0 and 9 on rank 1: {fix}"


# ---- which stores a rank reads


def test_overlapping_ranks_are_those_that_own_common_keys() -> None:
    keys = np.arange(200_000, dtype=np.uint64)
    assert len(np.unique(hash_keys(keys) & np.uint64(0xFFFF))) > 60_000
    for world in (1, 2, 3, 8):
        now = owner_of(keys, world)
        for saved_world in (1, 2, 5, 7):
            saved = owner_of(keys, saved_world)
            for rank in range(world):
                assert [*overlapping_ranks(rank, world, saved_world)] == np.unique(saved[now == rank]).tolist()


def reshard(groups: Groups, folder: str) -> tuple[int, list[str]]:
    """Restore a run with any number of ranks; return the rows of this rank and the stores that it read."""
    from thermocline.checkpoint.table_stores import TableStores

    os.chdir(folder)
    opened: list[str] = []
    original = TableStores._open_saved

    def open_saved(table: Any, source: Any) -> Any:
        opened.append(source.path.name)
        return original(table, source)

    TableStores._open_saved = staticmethod(open_saved)  # type: ignore[method-assign]
    os.environ |= {"RANK": str(groups.topology.rank), "WORLD_SIZE": str(groups.topology.world)}
    with tc.Run(tc.Config.load("small.toml")) as run:
        checkpoints = tc.Checkpoints("run", [run.table], run.model, run.optimizers)
        checkpoints.restore()
        keys = np.concatenate([keys for keys, _ in run.table.rows()])
        assert (owner_of(keys, groups.topology.world) == groups.topology.rank).all()
        checkpoints.close()
    return len(keys), sorted(set(opened))


def test_resharding_reads_only_stores_with_own_rows(trained_by_two: Path, tmp_path: Path) -> None:
    shutil.copytree(trained_by_two, tmp_path, dirs_exist_ok=True)
    with tc.Run.load("run") as run:
        keys = sum(len(keys) for keys, _ in run.table.rows())
    three = run_ranks(((0, 1, 2),), reshard, str(tmp_path))
    assert sum(rows for rows, _ in three) == keys > 900
    names = ["rank-00000-of-00002", "rank-00001-of-00002"]
    assert [opened for _, opened in three] == [names[:1], names, names[1:]]
