"""Admission over ranks gives the bits of all ranks in one process, with counts over the batches of all ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.online import DIM, stream
from helpers.rank_training import PAIR, TWO_NODES, Job, RunOptions, assert_matches_reference, train_rank
from helpers.ranks import Nodes, run_ranks
from helpers.ssd import SMALL
from helpers.stream import CONFIG, write_file
from helpers.train import bits

import thermocline as tc
from thermocline.distributed.collective_errors import CollectiveRunner
from thermocline.distributed.communicator import Groups
from thermocline.distributed.sharded_table import ShardedTable
from thermocline.embedding.admission import SHARED_KEY, Otherwise
from thermocline.training.run import Run

THREE: Nodes = ((0, 1), (2,))


def job_of(nodes: Nodes, otherwise: Otherwise, **more: Any) -> Job:
    admission = tc.Admission(count=3, otherwise=otherwise, memory="64KB")
    return Job(nodes, admission=admission, keys=600, batches=(40, 33, 37)[: sum(map(len, nodes))], **more)


CASES: list[tuple[Job, RunOptions]] = [
    (job_of(PAIR, "initial"), RunOptions()),
    (job_of(PAIR, "initial"), RunOptions(depth=4, pull_window=3)),
    (job_of(PAIR, "zero"), RunOptions(memory=0.6, depth=3, pull_window=2, lookahead=9)),
    (job_of(TWO_NODES, "shared"), RunOptions(depth=3)),
    (job_of(THREE, "initial"), RunOptions("flat", depth=2)),
]


@pytest.mark.parametrize(("job", "options"), CASES, ids=[f"{len(j.nodes)}nodes-{o}" for j, o in CASES])
def test_rows_are_those_of_all_ranks_in_one_process(job: Job, options: RunOptions, tmp_path: Path) -> None:
    assert_matches_reference(job, run_ranks(job.nodes, train_rank, job, options, str(tmp_path)))


# ---- one process that trains the batches of all ranks as one: gradients are integers, so that all sums are exact


RULES = {
    "count": tc.Admission(count=4, otherwise="zero", memory="64KB"),
    "sketch": tc.Admission(count=4, sketch=True, otherwise="shared", memory="1MB"),
    "probability": tc.Admission(probability=0.2, memory="64KB"),
}
STEPS, WORLD = 24, 3
EXPIRY = tc.Expiry(every=5, unused_steps=4)


def data_of(rank: int) -> list[tc.Batch]:
    """The last batches are of rank 0 alone."""
    batches = stream(STEPS, seed=rank)
    for batch in batches:
        batch.ids[:] = batch.ids % 60 * np.uint64(0x9E3779B97F4A7C15)
    return batches if rank == 0 else batches[: STEPS - 3]


def open_table(groups: Groups | None, folder: str, admission: tc.Admission, expiry: tc.Expiry | None) -> tc.Table:
    options: dict[str, Any] = {"name": "t", "seed": 3, "statistics": ["last_step"], "threads": 1, "mem": "1MB"}
    options |= {"admission": admission, "expiry": expiry, "ssd": Path(folder) / "store", "ssd_options": SMALL}
    if groups is None:
        return tc.Table(DIM, tc.Adagrad(lr=0.5), **options)
    return ShardedTable(DIM, tc.Adagrad(lr=0.5), groups=groups, hops="flat", **options)


def state_of(table: tc.Table, groups: Groups | None, bag: tc.EmbeddingBag) -> dict[str, Any]:
    """Return rows, admitted keys and figures of admission of all ranks, and the vectors of an evaluation batch."""
    assert table._admission is not None
    keys = np.arange(80, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    stats = table.admission_stats
    assert stats is not None
    live = np.concatenate([np.empty(0, np.uint64), *(keys.copy() for keys, _ in table.rows())])
    admitted = table._admission._filter.admitted()
    admitted = admitted[admitted != SHARED_KEY]  # it has a row, and is a known key after a restart
    state = {
        "live": live[table.owns(live)].tolist(), "admitted": admitted[table.owns(admitted)].tolist(),
        "stats": [stats.keys_admitted, stats.ids_admitted, stats.ids_refused], "batches": stats.batches,
    }  # fmt: skip
    states = [state] if groups is None else CollectiveRunner(groups.train).gather("testing", lambda: state)
    probe = tc.Batch.from_lists([[[key], [5]] for key in keys.tolist()])
    with torch.no_grad(), tc.prefetch([probe], table, training=False) as batches:
        (vectors,) = [bag(batch).numpy() for batch in batches]
    return {
        "rows": bits(table.read(keys)), "vectors": bits(vectors),
        "live": sorted(key for part in states for key in part["live"]),
        "admitted": sorted(key for part in states for key in part["admitted"]),
        "stats": np.sum([part["stats"] for part in states], 0).tolist(),
        "batches": {part["batches"] for part in states},
    }  # fmt: skip


def train_part(
    groups: Groups | None, folder: str, admission: tc.Admission, expiry: tc.Expiry | None, first: int, last: int,
    depth: int,
) -> dict[str, Any]:  # fmt: skip
    """Continue a run at step `first`, save after step `last`, train on, and give the rest up; return the state."""
    table = open_table(groups, folder, admission, expiry)
    bag = tc.EmbeddingBag(table, 2)
    checkpoints = tc.Checkpoints(Path(folder) / "run", [table])
    if first:
        saved = checkpoints.restore()
        assert saved is not None
        assert saved.step == first
    world = 1 if groups is None else groups.topology.world
    # Whatever the number of ranks, their batches of a step are those of three ranks, in order.
    mine = np.array_split(np.arange(WORLD), world)[0 if groups is None else groups.topology.rank].tolist()
    batches = [_of_ranks(step, mine) for step in range(first, STEPS)]
    state: dict[str, Any] = {}
    with tc.prefetch(batches, table, depth=depth) as source:
        for step, batch in enumerate(source, first + 1):
            if batch.examples:
                (bag(batch) * torch.from_numpy(batch.dense)[:, :, None]).sum().backward()
            table.step(scale=0.25 * world)  # a sharded table divides by the number of ranks
            if step == last:
                checkpoints.save(step)
            if step == min(last + 2, STEPS):
                break
    state = state_of(table, groups, bag)
    checkpoints.close()
    table.close()
    return state


def _of_ranks(step: int, ranks: list[int]) -> tc.Batch:
    """Return the batches of some of the three ranks as one; it may be empty."""
    parts = [data_of(rank)[step] for rank in ranks if step < len(data_of(rank))]
    if not parts:
        return tc.Batch(np.empty(0, np.uint64), np.zeros(1, np.int64), 2, dense=np.empty((0, 2), np.float32))
    ends = np.cumsum([0, *(len(part.ids) for part in parts)])
    offsets = [part.offsets[1:] + end for part, end in zip(parts, ends, strict=False)]
    dense = np.concatenate([part.dense for part in parts])
    return tc.Batch(np.concatenate([part.ids for part in parts]), np.concatenate([[0], *offsets]), 2, dense=dense)


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name, value in theirs.items():
        assert ours[name] == value, name


def train_overlapped(groups: Groups, *arguments: Any) -> dict[str, Any]:
    """Train with rows exchanged while the network computes."""
    with Groups.make(groups.topology, timeout=groups.timeout, overlap=True) as made:
        return train_part(made, *arguments)


@pytest.mark.parametrize(
    ("rule", "expiry", "train"),
    [
        ("count", None, train_part),
        ("count", EXPIRY, train_overlapped),
        ("sketch", None, train_part),
        ("probability", EXPIRY, train_part),
    ],
)
def test_ranks_admit_the_keys_of_one_process(rule: str, expiry: tc.Expiry | None, train: Any, tmp_path: Path) -> None:
    """Also after expiries, which batches that are planned ahead must see."""
    expected = train_part(None, str(tmp_path / "one"), RULES[rule], expiry, 0, STEPS, 1)
    assert 0 < expected["stats"][2] < expected["stats"][1]
    results = run_ranks(((0, 1, 2),), train, str(tmp_path / "ranks"), RULES[rule], expiry, 0, STEPS, 4)
    for result in results:
        same(result, expected)


@pytest.mark.parametrize(("rule", "expiry"), [("count", EXPIRY), ("sketch", None), ("probability", EXPIRY)])
def test_counters_survive_checkpoints_and_another_number_of_ranks(
    rule: str, expiry: tc.Expiry | None, tmp_path: Path
) -> None:
    """Each part of the run saves, goes on a little with batches planned ahead, and is given up."""
    expected = train_part(None, str(tmp_path / "one"), RULES[rule], expiry, 0, STEPS, 1)
    first, folder = 0, str(tmp_path / "run")
    for last, ranks in [(6, 2), (11, 2), (14, 3), (18, 1), (STEPS, 2)]:
        results = run_ranks((tuple(range(ranks)),), train_part, folder, RULES[rule], expiry, first, last, 3)
        first = last
    for result in results:
        same(result, {**expected, "stats": result["stats"]})  # figures count from the last restart


# ---- runs


def train_run(groups: Groups, folder: str, sets: list[str]) -> dict[str, Any]:
    os.environ |= {"RANK": str(groups.topology.rank), "WORLD_SIZE": str(groups.topology.world)}
    with Run(tc.Config.parse(CONFIG.format(folder=folder), sets)) as run:
        tested = run.fit().test
        assert tested is not None
        rows = sum(len(keys) for keys, _ in run.table.rows())
        stats = run.table.admission_stats
        assert stats is not None
        return {"logloss": tested["logloss"], "rows": rows, "refused": stats.ids_refused}


@pytest.mark.parametrize("otherwise", ["zero", "shared"])
def test_a_run_over_ranks_is_evaluated_by_one_process_and_by_others(otherwise: str, tmp_path: Path) -> None:
    """Vectors of keys that are not admitted are those of training, also where another process reads the stores."""
    rng = np.random.default_rng(0)
    for number in range(3):
        values = rng.zipf(1.2, (400, 2)) % 900
        write_file(tmp_path / "in" / f"{number}.csv", ((int(a % 2), i, a, b) for i, (a, b) in enumerate(values)))
    sets = ["admission.count=4", f"admission.otherwise={otherwise}", f"data.test={tmp_path}/in"]
    sets += ["train.log_every=5", "model.initial=0.3"]
    first, second = run_ranks(PAIR, train_run, str(tmp_path), [*sets, f"tiers.ssd={tmp_path}/store"])
    assert first["logloss"] == second["logloss"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [row["admission"]["table"] for row in rows if row["event"] == "train"]
    assert sum(row["ids_refused"] for row in logged) == first["refused"] + second["refused"] > 200
    assert sum(row["keys_admitted"] for row in logged) == first["rows"] + second["rows"] - (otherwise == "shared")
    figures = [evaluate(None, str(tmp_path / "run")), *run_ranks(THREE, evaluate, str(tmp_path / "run"))]
    assert figures == pytest.approx([first["logloss"]] * 4, abs=1e-6)
    with Run.load(tmp_path / "run") as run:
        run.table.admission = run.table._admission = None
        run.table.backend = run.table.backend.inner  # type: ignore[attr-defined]
        assert abs(run_logloss(run) - first["logloss"]) > 1e-5, "the test sees no difference"


def evaluate(groups: Groups | None, run_dir: str) -> float:
    if groups is not None:
        os.environ |= {"RANK": str(groups.topology.rank), "WORLD_SIZE": str(groups.topology.world)}
    with Run.load(run_dir) as run:
        return run_logloss(run)


def run_logloss(run: Run) -> float:
    return float(run.evaluate(run.loader("test"))["logloss"])
