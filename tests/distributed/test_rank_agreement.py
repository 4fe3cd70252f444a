"""Ranks compare settings, configs and data: a difference is one error on all ranks that names it and the ranks."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import SMALL, done, invoke, write_config
from helpers.rank_training import PAIR
from helpers.ranks import run_ranks

import thermocline as tc
from thermocline.config.loader import flatten
from thermocline.config.rank_rules import MAY_DIFFER
from thermocline.distributed import rank_agreement, sharded_table
from thermocline.distributed.communicator import Groups
from thermocline.training import run_dir as run_dir_module

THREE = ((0, 1, 2),)


def error_of(action: Callable[[], Any]) -> str | None:
    """Return the text of the ConfigError that the action raises, None if it raises none."""
    try:
        action()
    except tc.ConfigError as error:
        return str(error)
    return None


# ---- the comparison


def compare_settings(groups: Groups) -> list[str | None]:
    rank, comm = groups.topology.rank, groups.train

    def compare(**settings: Any) -> str | None:
        return error_of(lambda: rank_agreement.require_equal(comm, settings, "fix it"))

    gather, rank_agreement.CollectiveRunner.gather = rank_agreement.CollectiveRunner.gather, None  # type: ignore
    equal = compare(a=1, b=[1, 2], c=None)  # a digest is sufficient: no setting is sent
    rank_agreement.CollectiveRunner.gather = gather  # type: ignore[method-assign]
    return [
        equal,
        compare(a=1, seed=7 if rank == 1 else 1),
        compare(a=rank, b=rank % 2, c=rank, d=rank, e=rank),
        compare(files=["x", "y", "z"][: 3 - rank]),
        compare(**({"a": 1} if rank else {})),
    ]


def test_the_error_names_the_difference_and_the_ranks() -> None:
    results = run_ranks(THREE, compare_settings)
    assert results[0] == results[1] == results[2]
    assert results[0] == [
        None,
        "seed is 1 on ranks 0, 2 and 7 on rank 1: fix it",
        "a is 0 on rank 0; 1 on rank 1; 2 on rank 2 (b, c, d and 1 more also differ): fix it",
        'files[1] is "y" on ranks 0, 1 and missing on rank 2: fix it',
        "a is missing on rank 0 and 1 on ranks 1, 2: fix it",
    ]


def test_addresses_and_the_order_of_sets_are_not_compared() -> None:
    """An optimizer's group may contain a function or an object; both have another address in every process."""
    one, two = ({"f": lambda: 0, "object": object(), "dtype": torch.float16} for _ in range(2))
    assert rank_agreement._canonical(one) == rank_agreement._canonical(two)
    assert '"torch.float16"' in rank_agreement._canonical(one)
    assert rank_agreement._canonical({"names": {"b", "c", "a"}}) == '{"names": ["a", "b", "c"]}'


def test_long_lists_of_ranks_are_ranges() -> None:
    assert rank_agreement._rank_list([0, 1, 2, 3, 5, 7, 8]) == "ranks 0-3, 5, 7, 8"


# ---- own loops


def make_table(groups: Groups, **options: Any) -> tc.ShardedTable:
    settings = {"optimizer": tc.Adagrad(lr=0.1), "name": "ads", "seed": 1, "mem": "1MB", **options}
    return tc.ShardedTable(settings.pop("dim", 4), settings.pop("optimizer"), groups=groups, **settings)


def make_trainer(groups: Groups, *, lr: float = 0.1, hidden: int = 3, **settings: Any) -> tc.Trainer:
    model = torch.nn.Module()
    model.bag, model.net = tc.EmbeddingBag(make_table(groups), 2), torch.nn.Linear(4, hidden)
    optimizer = torch.optim.SGD(model.net.parameters(), lr=lr)
    return tc.Trainer(model, optimizer, config=tc.TrainConfig(display=False, **settings))


def own_loop(groups: Groups) -> list[str | None]:
    """Return the errors if rank 1 differs in one setting."""
    other = groups.topology.rank == 1

    def differing(make: Callable[..., Any], **options: Any) -> str | None:
        return error_of(lambda: make(groups, **(options if other else {})))

    def make_patched(groups: Groups, target: Any = None, name: str = "", value: Any = None) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if target is not None:
                patch.setattr(target, name, value)
            make_table(groups).close()

    def start(groups: Groups, threads: int = 1, **options: Any) -> None:
        trainer = make_trainer(groups, **options)
        torch.set_num_threads(threads)
        trainer._start([], resume=False)

    with tempfile.TemporaryDirectory() as folder, pytest.raises(tc.BudgetError, match="expected 5000000000 rows"):
        make_table(groups, ssd=folder, ssd_mem="16MB", expected_keys=10**10)  # over both ranks
    return [
        differing(make_table, mem="2MB", threads=1, policy="lru"),
        differing(make_table, dim=8, seed=2),
        differing(make_table, optimizer=tc.Adagrad(lr=0.2)),
        differing(make_table, optimizer=tc.SGD(lr=0.1)),
        differing(make_table, initial=tc.Constant(value=0.5)),
        differing(make_table, precision="fp16"),
        differing(make_table, name="users"),
        differing(make_patched, target=torch, name="__version__", value="9.9"),
        differing(make_patched, target=tc, name="__version__", value="9.9"),
        differing(make_patched, target=sharded_table, name="training_device", value=lambda *_: torch.device("cuda")),
        differing(make_trainer, hidden=5),
        differing(make_trainer, lr=0.2),
        differing(start, accumulate=2),
        differing(start, depth=7, tensorboard=False),
        differing(start, threads=2),
        differing(start),
    ]


def test_tables_and_trainers_of_an_own_loop() -> None:
    results = run_ranks(PAIR, own_loop)
    assert results[0] == results[1]
    budgets, dim, lr, kind, initial, precision, name, *versions, device = results[0][:10]
    shape, dense_lr, accumulate, depth, threads, equal = results[0][10:]
    assert budgets is None
    assert equal is None
    assert dim.startswith("ads.dim is 4 on rank 0 and 8 on rank 1 (ads.seed also differs): ")
    assert lr.startswith("ads.optimizer.lr is 0.1 on rank 0 and 0.2 on rank 1: ")
    assert kind.startswith('ads.optimizer.kind is "Adagrad" on rank 0 and "SGD" on rank 1 (')
    assert initial.startswith('ads.initial.kind is "Uniform" on rank 0 and "Constant" on rank 1')
    assert precision.startswith('ads.precision.kind is "fp32" on rank 0 and "fp16" on rank 1')
    assert name.startswith('name of the table is "ads" on rank 0 and "users" on rank 1')
    for package, number, version in zip(
        ("torch", "thermocline"), (torch.__version__, tc.__version__), versions, strict=True
    ):
        assert version.startswith(f'the version of {package} is "{number}" on rank 0 and "9.9" on rank 1: ')
    assert device.startswith('ads.device is "cpu" on rank 0 and "cuda" on rank 1: ')
    assert shape.startswith('model.net.weight is "float32[3, 4]" on rank 0 and "float32[5, 4]" on rank 1')
    assert dense_lr.startswith("dense optimizer 0.group 0.lr is 0.1 on rank 0 and 0.2 on rank 1: ")
    assert accumulate.startswith("train.accumulate is 1 on rank 0 and 2 on rank 1: ")
    assert depth.startswith("train.depth is 4 on rank 0 and 7 on rank 1: ")
    assert threads.startswith("torch threads is 1 on rank 0 and 2 on rank 1: ")


# ---- runs of the command line


def test_keys_that_may_differ_exist() -> None:
    names = {name for name, _ in flatten(tc.Config())}
    assert names >= MAY_DIFFER


FILES = """
[data]
train = "data/train*.libsvm"
valid = "data/valid.libsvm"
format = "libsvm"
raw_keys = true
"""


def commands_of_ranks(groups: Groups, folder: str, cases: list[list[str]]) -> list[tuple[int, str]]:
    """Run `thermocline train` with the flags of each case on rank 1 only; return exit codes and errors."""
    os.chdir(folder)
    rank = groups.topology.rank
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(groups.topology.world)}
    if rank:  # rank 1 takes its facts from rank 0
        run_dir_module._read = None  # type: ignore[assignment]
    results = []
    for case in cases:
        both, own = case[0].split(), case[1:] if rank else []
        result = invoke("train", "small.toml", *both, *(word for key in own for word in ("--set", key)))
        results.append((result.exit_code, result.stderr))
    return results


@pytest.fixture
def data_folder(tmp_path: Path, command_folder: None) -> Path:
    sizes = ["--keys", 3000, "--fields", 4, "--examples", 400, "--valid-examples", 100, "--test-examples", 0]
    done("data", "synth", "data", "--format", "libsvm", *sizes)
    lines = Path("data/train.libsvm").read_text().splitlines(keepends=True)
    for part in range(4):
        Path(f"data/train-{part}.libsvm").write_text("".join(lines[100 * part : 100 * part + 100]))
    Path("data/train.libsvm").unlink()
    write_config(tmp_path, FILES + "[model]" + SMALL.split("[model]")[1])
    return tmp_path


def test_configs_and_data_of_a_run(data_folder: Path) -> None:
    cases = [
        ["", "train.seed=7"],
        ["", "train.dense_lr=0.5", "train.batch_size=50"],
        ["", "data.train=data/train-[012].libsvm"],
        ["", "data.valid=data/none.libsvm"],
        ["", "tiers.mem=5MB", "data.threads=1", "train.display=false", f"data.valid={data_folder}/data/valid.libsvm"],
        [""],
        ["--resume", "model.hidden=[8,8]"],
        ["--resume --set train.lr=0.5"],
        ["--resume --set train.epochs=2", f"data.train={data_folder}/data/train*.libsvm"],
    ]
    results = run_ranks(PAIR, commands_of_ranks, str(data_folder), cases)
    codes = [[code for code, _ in rank] for rank in results]
    assert codes[0] == [2, 2, 2, 1, 0, 2, 2, 2, 0], results
    assert codes[1] == [2, 2, 2, 2, 0, 2, 2, 2, 0], results
    seed, rate, files, missing, _, again, hidden, resumed, _ = (error for _, error in results[0])
    start = "start all ranks with the same config and flags"
    assert seed == f"thermocline: train.seed is 0 on rank 0 and 7 on rank 1: {start}\n"
    assert rate == (
        "thermocline: train.batch_size is 100 on rank 0 and 50 on rank 1 (train.dense_lr also differs): " + start + "\n"
    )
    size = Path("data/train-3.libsvm").stat().st_size
    assert f'data.train.files[3] is "train-3.libsvm ({size} bytes)" on rank 0 and missing on rank 1' in files
    assert "rank 1 failed while opening the data: ConfigError: data.valid[0]: data/none.libsvm: no such file" in missing
    assert "already has a run" in again
    assert "model.hidden[1] is missing on rank 0 and 8 on rank 1" in hidden
    assert "cannot be resumed with train.lr from 0.01 to 0.5" in resumed
    for (_, ours), (_, theirs) in zip(*results, strict=True):
        assert ours in (theirs, missing)
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["epoch"] == 2
    ranks = next(line for line in lines if line["event"] == "train")["ranks"]
    assert len(ranks) == 2
    assert all(rank["examples"] > 0 and rank["dram_rows"] > 0 for rank in ranks)


def train_in_own_folder(groups: Groups, folder: str) -> tuple[int, str]:
    os.chdir(Path(folder) / str(groups.topology.rank))
    os.environ |= {"RANK": str(groups.topology.rank), "WORLD_SIZE": str(groups.topology.world)}
    result = invoke("train", "../small.toml")
    return result.exit_code, result.stderr


def test_a_run_folder_that_a_rank_does_not_see(tmp_path: Path) -> None:
    """Equal paths on two machines without a shared file system."""
    write_config(tmp_path)
    for rank in "01":
        (tmp_path / rank).mkdir()
    (code, error), (other_code, other) = run_ranks(PAIR, train_in_own_folder, str(tmp_path))
    assert (code, other_code) == (1, 1)
    assert "is not the folder that rank 0 uses: rank 1 does not see its checkpoints" in other
    assert "rank 1 failed while starting a run: NotFoundError: run on host" in error
