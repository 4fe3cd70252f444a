"""[publish] over ranks: versions have the rows of all ranks at their step; a failure of one rank publishes nothing."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.dense import mean
from helpers.ranks import run_failing_ranks, run_ranks
from helpers.stream import CONFIG, write_file
from helpers.train import weights_of
from safetensors.torch import load_file

import thermocline as tc
from thermocline.cli.serving import ExportOptions, export
from thermocline.distributed.communicator import Groups
from thermocline.embedding.state_dict import dense_state_dict
from thermocline.errors import RankError, ThermoclineError
from thermocline.serving.snapshot import StoredRows, open_state
from thermocline.serving.version import read_version, versions
from thermocline.training.row_source import RowSource
from thermocline.training.run import Run

THREE = ((0, 1), (2,))


@pytest.fixture
def ads(tmp_path: Path) -> Path:
    """Three files, whose keys drift, so that rows expire."""
    for number in range(3):
        values = np.random.default_rng(number).zipf(1.3, (240, 2)) % 90
        rows = ((int((a + b) % 3 == 0), 1000 * number + i, a + i // 8, b) for i, (a, b) in enumerate(values))
        write_file(tmp_path / "in" / f"{number}.csv", rows)
    return tmp_path


class Record(tc.Callback):
    """Keeps the weights of this rank's rows at every step, with the statistic frequency of those that have it twice.

    Keeps its dense model, too.
    """

    def __init__(self) -> None:
        self.rows: dict[int, dict[int, bytes]] = {}
        self.dense: dict[int, dict[str, torch.Tensor]] = {}

    def on_step(self, trainer: tc.Trainer, loss: torch.Tensor) -> None:
        (table,) = trainer.tables
        rows = {
            int(k): r[: table.dim].tobytes() for keys, rows in table.rows() for k, r in zip(keys, rows, strict=True)
        }
        if "frequency" in table.spec.statistics.names:
            frequencies = table.read_statistics(np.array([*rows], np.uint64))["frequency"]
            rows = {key: row for (key, row), times in zip(rows.items(), frequencies, strict=True) if times >= 2}
        self.rows[trainer.progress.step] = rows
        self.dense[trainer.progress.step] = {
            name: value.clone() for name, value in dense_state_dict(trainer.model).items() if value.is_floating_point()
        }


def train_rank(groups: Groups, folder: str, sets: list[str], resume: bool = False) -> tuple[bytes, Any, Any]:
    os.environ |= {"RANK": str(groups.topology.rank), "WORLD_SIZE": str(groups.topology.world)}
    record = Record()
    with warnings.catch_warnings():
        warnings.filterwarnings("error" if "tiers.ssd" in " ".join(sets) else "ignore", ".*all rows are compared")
        with Run(tc.Config.parse(CONFIG.format(folder=folder), sets), resume=resume) as run:
            run.fit(resume=resume, callbacks=[record])
            dense = weights_of(run.model)
    return dense, record.rows, record.dense


def served(folder: Path, number: int) -> dict[int, bytes]:
    """Return the rows that a consumer of a version has: base and deltas, replayed."""
    (view,) = open_state(folder, number).views.values()
    return {int(k): r.tobytes() for piece in StoredRows(view) for k, r in zip(piece.keys, piece.rows, strict=True)}


OPTIONS = ["data.shuffle=false", "train.checkpoint_every=3", 'rows.statistics=["last_step"]', "expiry.every=2",
           "expiry.unused_steps=2"]  # fmt: skip


@pytest.mark.parametrize("ssd", [False, True], ids=["dram", "ssd"])
def test_versions_have_the_rows_of_all_ranks_at_their_step(ads: Path, ssd: bool) -> None:
    """With a store, deltas are of the log: a comparison of all rows would warn, which is an error here.

    There, dense models are merged every 50 steps, so that those of the ranks differ, and their mean is published.
    """
    stored = [f"tiers.ssd={ads}/store", 'rows.statistics=["last_step", "frequency"]', "publish.min_frequency=2"]
    stored += ["dist.dense_sync.every=50", "train.dense_optimizer=adam"]
    options = [*OPTIONS, *(stored if ssd else [])]
    publish = [f"publish.folder={ads}/served", "publish.every_steps=2", "publish.base_every=3"]
    results = run_ranks(THREE, train_rank, str(ads), [*options, *publish])
    found = [read_version(path) for _, path in sorted(versions(ads / "served").items())]
    steps = max(results[0][1])
    assert [version.step for version in found] == [*range(2, steps, 2), steps]  # the end is published, too
    assert {version.kind for version in found[1:4]} == {"delta"}
    assert sum(version.tables[0].deleted for version in found) > 0
    differing = set()  # steps at which parameters of the ranks differ
    for version in found:
        rows = {key: row for _, record, _ in results for key, row in record[version.step].items()}
        assert served(ads / "served", version.number) == rows, version.step
        published = load_file(versions(ads / "served")[version.number] / "dense.safetensors")
        for name, first in results[0][2][version.step].items():
            of_ranks = [dense[version.step][name] for _, _, dense in results]
            differs = any(not torch.equal(first, each) for each in of_ranks)
            differing |= {version.step} if differs and "running" not in name else set()
            expected = mean(of_ranks, THREE) if differs else first
            assert torch.equal(published[name], expected), (version.step, name)
    # Gradients are averaged at every step, or models are merged after steps 1, 2, 4, 8 and 50.
    assert differing == ({version.step for version in found} - {2, 4, 8} if ssd else set())
    assert found[-1].event_time == 2239
    assert {file.name for file in found[-1].files} == {"config.toml", "features.json", "dense.safetensors"}
    # One process that exports the last checkpoint publishes the same.
    export(str(ads / "run"), str(ads / "exported"), ExportOptions(min_frequency=2 if ssd else None))
    (exported,) = (read_version(path) for path in versions(ads / "exported").values())
    assert (exported.step, exported.event_time) == (found[-1].step, found[-1].event_time)
    assert served(ads / "exported", 1) == served(ads / "served", found[-1].number)
    if not ssd:  # publishing changes no bit
        again = run_ranks(THREE, train_rank, str(ads), [*options, f"train.run_dir={ads}/again"])
        assert [each[:2] for each in again] == [each[:2] for each in results]


def fail_on_rank1(groups: Groups, folder: str, sets: list[str], kill: bool) -> str:
    """Train; the first delta fails on rank 1 after its first rows."""
    original, calls = RowSource._decoded, 0

    def decoded(self: RowSource, stream: Any, served: Any) -> Any:
        nonlocal calls
        calls += 1
        for piece in original(self, stream, served):
            yield piece
            if calls == 1 and groups.topology.rank == 1:
                if kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError("no such disk")

    RowSource._decoded = decoded  # type: ignore[method-assign]
    try:
        train_rank(groups, folder, sets)
    except ThermoclineError as error:
        if kill:
            raise
        return f"{type(error).__name__}: {error}"
    return "trained"


PUBLISH = ["publish.every_steps=2", "publish.base_every=1000", "train.steps=6"]


@pytest.mark.parametrize("on_error", ["stop", "warn"])
def test_a_rank_that_fails_publishes_nothing(ads: Path, on_error: str) -> None:
    sets = [*PUBLISH, f"publish.folder={ads}/served", f"publish.on_error={on_error}"]
    results = run_ranks(((0, 1),), fail_on_rank1, str(ads), sets, False)
    numbers = sorted(versions(ads / "served"))
    assert not list((ads / "served").glob(".tmp*"))
    if on_error == "warn":
        assert results == ["trained", "trained"]
        assert [read_version(versions(ads / "served")[number]).step for number in numbers] == [2, 6]
        return
    assert numbers == [1]
    assert all("step 4 cannot be published" in result and "saved at step 4" in result for result in results)
    assert "no such disk" in results[0]


def test_a_rank_that_dies_leaves_no_half_version(ads: Path) -> None:
    sets = [*PUBLISH, f"publish.folder={ads}/served"]
    outcomes = run_failing_ranks(((0, 1),), fail_on_rank1, str(ads), sets, True, seconds=20)
    assert outcomes[1][0] == "killed"
    assert RankError.__name__ in str(outcomes[0][1])
    assert sorted(versions(ads / "served")) == [1]
    assert not list((ads / "served").glob(".tmp*"))
    assert len(served(ads / "served", 1)) > 10
